/* The texts of a layout and of block groups, built from numbers: what an identity takes. */
#include "impl.h"

#include "kv/identity.h"
#include "kv/text.h"
#include "kvk/layout.h"

kvc_status_t kvc_layout_text(const kvk_layout_t *layouts, uint32_t count, char *out, size_t cap)
{
	const char *why = NULL;

	if (!layouts || !out || count == 0 || count > KV_MAX_GROUPS) {
		return kvc_fail(KV_ERR_ARG,
				"kvc_layout_text: an argument is NULL, or %u layouts: at least 1, at most %u", count,
				KV_MAX_GROUPS);
	}
	for (uint32_t i = 0; i < count; i++) {
		if (kvk_layout_check(&layouts[i], &why) != KV_OK) {
			return kvc_fail(KV_ERR_LAYOUT, "kvc_layout_text: %s", why);
		}
	}
	if (kvk_layouts_format(layouts, count, out, cap) != KV_OK) {
		return kvc_fail(KV_ERR_TOO_BIG, "kvc_layout_text: the text does not fit into %zu bytes", cap);
	}

	return KVC_OK;
}

kvc_status_t kvc_groups_text(const kvc_group_info_t *groups, uint32_t count, char *out, size_t cap)
{
	static const char *const rules[] = {"full", "window", "state"};
	kv_group_t parsed[KV_MAX_GROUPS];
	kv_text_t text = kv_text(out, out ? cap : 0);
	uint32_t hash_tokens, found = 0;
	kv_status_t status;

	if (!groups || !out) {
		return kvc_fail(KV_ERR_ARG, "kvc_groups_text: an argument is NULL");
	}
	for (uint32_t i = 0; i < count; i++) {
		if (groups[i].rule >= KV_COUNT_OF(rules)) {
			return kvc_fail(KV_ERR_IDENTITY, "kvc_groups_text: group %u has no rule of kvc_rule_t",
					groups[i].group);
		}
		kv_text_addf(&text, "%s%u:%s:%u", i ? "," : "", groups[i].group, rules[groups[i].rule],
			     groups[i].block_tokens);
		if (groups[i].rule == KVC_RULE_WINDOW) {
			kv_text_addf(&text, ":%u", groups[i].window);
		}
	}
	if (!kv_text_fits(&text)) {
		return kvc_fail(KV_ERR_TOO_BIG, "kvc_groups_text: the text needs %zu bytes and a NUL", text.len);
	}
	status = kv_identity_groups(&(kv_identity_t){.hash_tokens = "1", .groups = out}, &hash_tokens, parsed,
				    KV_COUNT_OF(parsed), &found);
	if (status != KV_OK) {
		return kvc_fail(status, "kvc_groups_text: numbers are not ascending, or one is out of range: %s", out);
	}

	return KVC_OK;
}
