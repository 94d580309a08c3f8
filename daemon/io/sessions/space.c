/* SPACE_OPEN: is the identity whole, canonical, served, and does it say what the layout says? */
#include "io/sessions/space.h"

#include "io/base/gpu.h"
#include "io/members/member_table.h"

#include "kv/identity.h"
#include "kvk/layout.h"

#include <stdio.h>

#define LIMIT_DETAIL                                                                                                    \
	"engines use as many spaces (models, weights, adapters) of this namespace as limits.spaces permits; raise it, " \
	"or end some of them"

typedef struct kvd_asked_space {
	kv_identity_t identity;
	kvk_layout_t layouts[KV_MAX_GROUPS];
	kvs_geometry_t geometries[KV_MAX_GROUPS];
	uint32_t hash_tokens;
	kv_group_t groups[KV_MAX_GROUPS];
	uint32_t group_count;
	char layout_text[KVK_LAYOUTS_TEXT_MAX + 1];
	char storage[2 * KV_IDENTITY_MAX_TEXT];
} kvd_asked_space_t;

static kv_status_t check_identity(kvd_host_t *host, kvd_call_t *call, kvd_asked_space_t *asked)
{
	const kv_msg_space_open_t *ask = &call->ask->space_open;
	const char *field = NULL;
	kv_status_t status;

	status = kv_identity_parse((const char *)ask->identity.data, ask->identity.len, &asked->identity,
				   asked->storage, sizeof asked->storage, &field);
	if (status != KV_OK) {
		snprintf(host->detail, sizeof host->detail, "identity field %s is missing or malformed",
			 field ? field : "?");
		call->detail = host->detail;
		return status;
	}
	if (ask->layout.len > KVK_LAYOUTS_TEXT_MAX) {
		return KV_ERR_LAYOUT;
	}
	memcpy(asked->layout_text, ask->layout.data, ask->layout.len);
	asked->layout_text[ask->layout.len] = '\0';
	if (strcmp(asked->layout_text, asked->identity.layout) != 0) {
		call->detail = "the identity's layout is not the layout asked for";
		return KV_ERR_IDENTITY;
	}

	return KV_OK;
}

static kvs_geometry_t geometry_of(const kvk_layout_t *layout)
{
	kvk_geometry_t g;

	kvk_layout_geometry(layout, &g);

	return (kvs_geometry_t){.block_bytes = g.block_bytes,
				.heads = g.heads,
				.leaves = g.leaves,
				.leaf_bytes = g.leaf_bytes,
				.page_bytes = g.page_bytes};
}

static kv_status_t check_groups(kvd_call_t *call, kvd_asked_space_t *asked)
{
	kv_status_t status = kv_identity_groups(&asked->identity, &asked->hash_tokens, asked->groups, KV_MAX_GROUPS,
						&asked->group_count);

	if (status != KV_OK) {
		call->detail = status == KV_ERR_TOO_BIG ? "the identity has more groups than a space can have"
							: "identity field hash_tokens or groups is malformed";
		return status;
	}
	if (asked->group_count == 0) {
		return KV_ERR_IDENTITY;
	}
	status = kvk_layouts_parse(asked->layout_text, strlen(asked->layout_text), asked->layouts, asked->group_count,
				   &call->detail);
	for (uint32_t i = 0; i < asked->group_count && status == KV_OK; i++) {
		if (asked->groups[i].block_tokens != asked->layouts[i].block_tokens) {
			call->detail = "a group's block tokens are not those of its layout";
			status = KV_ERR_LAYOUT;
		}
		asked->geometries[i] = geometry_of(&asked->layouts[i]);
	}

	return status;
}

/* The engine's name of the adapter, without the revision behind its last @; NULL: there is none. Changes the text. */
static const char *adapter_name(char *lora)
{
	char *revision = strrchr(lora, '@');

	if (revision && revision > lora) {
		*revision = '\0';
	}

	return strcmp(lora, "none") == 0 ? NULL : lora;
}

kv_status_t kvd_request_space_open(kvd_host_t *host, kvd_call_t *call)
{
	const kv_msg_space_open_t *ask = &call->ask->space_open;
	const kvd_namespace_t *ns = call->session->ns;
	kvd_asked_space_t asked;
	kvd_space_open_t open = {.ns = ns->id,
				 .identity = (const char *)ask->identity.data,
				 .identity_len = ask->identity.len,
				 .layout = asked.layout_text};
	kvd_space_info_t info;
	kv_status_t status;

	memset(&asked, 0, sizeof asked);
	status = check_identity(host, call, &asked);
	if (status == KV_OK) {
		status = check_groups(call, &asked);
	}
	if (status == KV_OK) {
		status = kv_identity_root(ns->name, open.identity, open.identity_len, open.root);
	}
	if (status != KV_OK) {
		return status;
	}

	if (asked.identity.device[0] && !kvd_gpu_find(host, asked.identity.device, &open.memory)) {
		call->detail = "no memory of this device is here (gpu.size, gpu.devices); kvctl status says why";
		return KV_ERR_TIER_OFF;
	}

	open.member = kvd_member_entry_id(call->session->member);
	open.known = (ask->flags & KV_SPACE_KNOWN) != 0;
	open.hash_tokens = asked.hash_tokens;
	open.groups = asked.groups;
	open.group_count = asked.group_count;
	open.geometries = asked.geometries;
	open.lora = adapter_name(asked.storage + (asked.identity.lora - asked.storage));
	status = kvd_space_open(host->core, &open, &info);
	kvd_commit_events(host);
	if (status != KV_OK) {
		call->detail = status == KV_ERR_NOT_FOUND ? "no engine has opened the space here"
			       : status != KV_ERR_LIMIT   ? NULL
			       : kvd_core_lacks_spaces(host->core, open.ns)
				       ? LIMIT_DETAIL
				       : "engines have 256 block layouts open, the most there may be; end some of them";
		return status;
	}
	if (call->session->member) {
		kvd_member_entry_set_space(host, call->session->member, info.space, asked.identity.model);
	}
	memcpy(host->root, open.root, sizeof host->root);
	call->reply->space_open_reply = (kv_msg_space_open_reply_t){.space = info.space,
								    .epoch = info.epoch,
								    .root = {host->root, sizeof host->root},
								    .hash_tokens = info.hash_tokens,
								    .block_bytes = asked.geometries[0].block_bytes,
								    .heads = asked.geometries[0].heads,
								    .leaves = asked.geometries[0].leaves,
								    .leaf_bytes = asked.geometries[0].leaf_bytes,
								    .page_bytes = asked.geometries[0].page_bytes,
								    .layout = kv_slice_str(info.layout)};

	return KV_OK;
}
