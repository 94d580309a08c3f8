/* Any bytes as a layout text, and as that of three groups: refused, or valid and exactly the text that these layouts
 * have. */
#include "kvk/layout.h"

#include "kv/env.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void try_groups(const char *data, size_t size)
{
	char text[KVK_LAYOUTS_TEXT_MAX];
	kvk_layout_t layouts[3];
	const char *why = NULL;

	if (kvk_layouts_parse(data, size, layouts, 3, &why) != KV_OK) {
		kv_assert(why != NULL);
		return;
	}
	kv_assert(kvk_layouts_format(layouts, 3, text, sizeof text) == KV_OK);
	kv_assert(strlen(text) == size && memcmp(text, data, size) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char text[KVK_LAYOUT_TEXT_MAX];
	kvk_layout_t layout;
	kvk_geometry_t g;
	const char *why = NULL;
	size_t offset;
	size_t len;

	try_groups((const char *)data, size);
	if (kvk_layout_parse((const char *)data, size, &layout, &why) != KV_OK) {
		kv_assert(why != NULL);
		return 0;
	}
	kv_assert(kvk_layout_check(&layout, NULL) == KV_OK);
	kv_assert(kvk_layout_format(&layout, text, sizeof text) == KV_OK);
	kv_assert(strlen(text) == size && memcmp(text, data, size) == 0);

	kvk_layout_geometry(&layout, &g);
	kv_assert(g.block_bytes > 0 && g.block_bytes <= KVK_MAX_BLOCK_BYTES);
	kvk_layout_leaf(&layout, g.heads - 1, g.leaves - 1, &offset, &len);
	kv_assert(len > 0 && offset + len == g.block_bytes);

	return 0;
}
