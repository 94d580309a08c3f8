/* Namespaces, spaces and keys of the net process. */
#include "net/prefix.h"

#include "kv/identity.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PREFAULT_BYTES (1u << 20)
#define SPACES_MAX     256u /* of one namespace; those that nobody uses go first */

struct kvd_net_space {
	kvd_net_space_t *next;
	kvd_tenant_t *tenant;
	kvc_space_t *space; /* NULL: the namespace was not attached yet */
	uint32_t users;
	int was_open; /* somebody may have something of it */
	int is_new;   /* opened here for a hand-over, whose other side may have another one: not kept */
	uint32_t len;
	char identity[]; /* canonical text */
};

struct kvd_tenant {
	char ns[65];
	kvc_t *kvc; /* NULL: not attached yet */
	kvd_net_space_t *spaces;
	uint32_t space_count;
};

/* ---- namespaces ------------------------------------------------------------------------------ */

kv_status_t kvd_tenants_open(kvd_net_t *net)
{
	const char *word;
	size_t len;

	while (kvd_list_word(net->config->namespaces, net->tenant_count, &word) > 0) {
		net->tenant_count++;
	}
	net->tenants = calloc(net->tenant_count, sizeof *net->tenants);
	if (!net->tenants) {
		return KV_ERR_NOMEM;
	}
	for (uint32_t i = 0; (len = kvd_list_word(net->config->namespaces, i, &word)) > 0; i++) {
		snprintf(net->tenants[i].ns, sizeof net->tenants[i].ns, "%.*s", (int)len, word);
	}

	return KV_OK;
}

void kvd_tenants_poll(kvd_net_t *net)
{
	for (uint32_t i = 0; i < net->tenant_count; i++) {
		if (net->tenants[i].kvc) {
			(void)kvc_poll(net->tenants[i].kvc, 0);
		}
	}
}

int kvd_tenants_prefault(const kvd_net_t *net)
{
	for (uint32_t i = 0; i < net->tenant_count; i++) {
		if (net->tenants[i].kvc && kvc_prefault(net->tenants[i].kvc, PREFAULT_BYTES) > 0) {
			return 1;
		}
	}

	return 0;
}

uint32_t kvd_tenants_fds(const kvd_net_t *net, int *fds, uint32_t cap)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < net->tenant_count && n < cap; i++) {
		if (net->tenants[i].kvc && kvc_fd(net->tenants[i].kvc) >= 0) {
			fds[n++] = kvc_fd(net->tenants[i].kvc);
		}
	}

	return n;
}

static kv_status_t find_tenant(kvd_net_t *net, const char *ns, kvd_tenant_t **p_tenant)
{
	char path[KV_OPTION_STRING_MAX + 80];
	kvc_config_t config = {.struct_size = sizeof config,
			       .socket = path,
			       .role = KVC_ROLE_BOTH,
			       .program = "kvd-net",
			       .spin_us = UINT32_MAX,
			       .lazy = 2};

	for (uint32_t i = 0; i < net->tenant_count; i++) {
		kvd_tenant_t *tenant = &net->tenants[i];

		if (strcmp(tenant->ns, ns) != 0) {
			continue;
		}
		snprintf(path, sizeof path, "%s/%s.sock", net->config->run_dir, ns);
		*p_tenant = tenant;
		return tenant->kvc ? KV_OK : (kv_status_t)kvc_attach(&config, &tenant->kvc);
	}

	return KV_ERR_NOT_FOUND;
}

/* ---- spaces ---------------------------------------------------------------------------------- */

static kv_status_t open_space(kvd_net_space_t *space)
{
	static char storage[KV_IDENTITY_MAX_TEXT + 64];
	kv_identity_t parsed;
	kv_status_t status = kv_identity_parse(space->identity, space->len, &parsed, storage, sizeof storage, NULL);
	kvc_identity_t identity = {.struct_size = sizeof identity};
	kv_group_t groups[KVD_GROUPS_MAX];
	uint32_t count;

	if (status == KV_OK) {
		status = kv_identity_groups(&parsed, &identity.hash_tokens, groups, KVD_GROUPS_MAX, &count);
	}
	if (status != KV_OK) {
		return status;
	}
	identity.model = parsed.model;
	identity.weights = parsed.weights;
	identity.dtype = parsed.dtype;
	identity.quantization = parsed.quantization;
	identity.rope = parsed.rope;
	identity.lora = parsed.lora;
	identity.hash = parsed.hash;
	identity.groups = parsed.groups;
	identity.layout = parsed.layout;
	identity.page_format = parsed.page_format;
	identity.extra = parsed.extra[0] ? parsed.extra : NULL;
	identity.known = !space->is_new;

	return (kv_status_t)kvc_space_open_start(space->tenant->kvc, &identity, &space->space);
}

static void forget_space(kvd_net_space_t *space)
{
	kvc_space_close(space->space);
	space->space = NULL;
	space->was_open = space->is_new = 0;
}

static void close_unused(kvd_tenant_t *tenant)
{
	kvd_net_space_t **at = &tenant->spaces;

	while (*at) {
		kvd_net_space_t *space = *at;

		if (space->users > 0) {
			at = &space->next;
			continue;
		}
		*at = space->next;
		kvc_space_close(space->space);
		free(space);
		tenant->space_count--;
	}
}

static kv_status_t find_space(kvd_tenant_t *tenant, kv_slice_t identity, kvd_net_space_t **p_space)
{
	kvd_net_space_t *space = tenant->spaces;

	while (space && (space->len != identity.len || memcmp(space->identity, identity.data, identity.len) != 0)) {
		space = space->next;
	}
	if (space) {
		*p_space = space;
		return KV_OK;
	}
	if (tenant->space_count >= SPACES_MAX) {
		close_unused(tenant);
	}
	if (tenant->space_count >= SPACES_MAX) {
		return KV_ERR_LIMIT;
	}
	space = calloc(1, sizeof *space + identity.len + 1);
	if (!space) {
		return KV_ERR_NOMEM;
	}
	space->tenant = tenant;
	space->len = identity.len;
	memcpy(space->identity, identity.data, identity.len);
	space->next = tenant->spaces;
	tenant->spaces = space;
	tenant->space_count++;
	*p_space = space;

	return KV_OK;
}

/* ---- a prefix -------------------------------------------------------------------------------- */

kv_status_t kvd_prefix_init(kvd_net_t *net, const kvd_prefix_names_t *names, kvd_prefix_t *prefix)
{
	kvd_tenant_t *tenant;
	kv_status_t status = find_tenant(net, names->ns, &tenant);
	const uint32_t each = names->hash_bytes ? names->hash_bytes : (uint32_t)sizeof(uint32_t);

	memset(prefix, 0, sizeof *prefix);
	if (status == KV_OK && (names->salt.len > KVC_MAX_SALT || names->names.len % each != 0 ||
				names->rest.len % sizeof(uint32_t) != 0 ||
				(names->hash_bytes != 0 && (names->hash_bytes < 16 || names->hash_bytes > 60)))) {
		status = KV_ERR_ARG;
	}
	if (status == KV_OK) {
		status = find_space(tenant, names->identity, &prefix->space);
	}
	if (status != KV_OK) {
		prefix->space = NULL;
		return status;
	}
	prefix->names = malloc((size_t)names->names.len + names->rest.len + 1u);
	if (!prefix->names) {
		prefix->space = NULL;
		return KV_ERR_NOMEM;
	}
	memcpy(prefix->names, names->names.data, names->names.len);
	prefix->is_handover = names->is_handover;
	prefix->names_len = names->names.len;
	memcpy(prefix->names + names->names.len, names->rest.data, names->rest.len);
	prefix->rest_len = names->rest.len;
	prefix->hash_bytes = names->hash_bytes;
	memcpy(prefix->salt, names->salt.data, names->salt.len);
	prefix->space->users++;

	return KV_OK;
}

void kvd_prefix_fini(kvd_prefix_t *prefix)
{
	if (prefix->space) {
		prefix->space->users--;
		if (prefix->space->users == 0 && prefix->space->is_new) {
			forget_space(prefix->space);
		}
	}
	free(prefix->names);
	free(prefix->keys);
	memset(prefix, 0, sizeof *prefix);
}

static kvc_status_t make_keys(kvd_prefix_t *prefix, uint32_t units)
{
	const kvc_prompt_t prompt = {.struct_size = sizeof prompt,
				     .tokens = (const uint32_t *)(const void *)prefix->names,
				     .n_tokens = units * prefix->unit_tokens,
				     .salt = prefix->salt};
	kvc_status_t status = KVC_OK;
	kvc_chain_t header;
	uint32_t n;

	if (prefix->hash_bytes == 0) {
		return kvc_keys_of(prefix->space->space, &prompt, prefix->keys, units, &n);
	}
	kvc_chain_begin(prefix->space->space, &header);
	for (uint32_t i = 0; i < units && status == KVC_OK; i++) {
		status = kvc_chain_bind(&header, prefix->names + (size_t)i * prefix->hash_bytes, prefix->hash_bytes,
					&prefix->keys[i]);
	}

	return status;
}

kvc_status_t kvd_prefix_ready(kvd_prefix_t *prefix)
{
	kvc_space_info_t info = {.struct_size = sizeof info};
	kvc_status_t status = prefix->space->space ? KVC_OK : (kvc_status_t)open_space(prefix->space);
	const char *layout;
	uint64_t granule = 1;
	uint32_t units;

	if (!prefix->space->space) {
		return status == KVC_ERR_CLOSED || status == KVC_ERR_UNREACHABLE ? KVC_PENDING : status;
	}
	status = kvc_space_state(prefix->space->space);
	prefix->space->was_open |= status == KVC_OK;
	if (status < 0 && !prefix->space->was_open) {
		forget_space(prefix->space); /* the next one asks again: an engine may have opened it */
		/* A hand-over's sides must meet though they have other weights (decision 070). */
		prefix->space->is_new = status == KVC_ERR_NOT_FOUND && prefix->is_handover;
		return prefix->space->is_new ? KVC_PENDING : status;
	}
	if (prefix->keys || status != KVC_OK) {
		return status;
	}
	kvc_space_get_info(prefix->space->space, &info);
	prefix->unit_tokens = info.hash_tokens;
	prefix->group_count = kvc_space_groups(prefix->space->space, prefix->groups, KVD_GROUPS_MAX);
	layout = kvc_space_layout(prefix->space->space);
	if (info.hash_tokens == 0 || prefix->group_count > KVD_GROUPS_MAX ||
	    kvk_layouts_parse(layout, strlen(layout), prefix->layouts, prefix->group_count, NULL) != KV_OK) {
		return KVC_ERR_LAYOUT;
	}
	for (uint32_t g = 0; g < prefix->group_count; g++) {
		kvk_layout_geometry(&prefix->layouts[g], &prefix->geometries[g]);
	}
	for (uint32_t g = 0; g < prefix->group_count; g++) {
		const uint32_t units_a_block = prefix->groups[g].block_tokens / info.hash_tokens;
		const uint64_t of_others = granule;

		while (units_a_block > 0 && granule % units_a_block != 0 && granule < KV_MAX_BLOCKS) {
			granule += of_others;
		}
	}
	units = prefix->names_len / (prefix->hash_bytes ? prefix->hash_bytes : 4u * info.hash_tokens);
	prefix->keys = calloc((size_t)units + 1u, sizeof *prefix->keys);
	if (!prefix->keys) {
		return KVC_ERR_NOMEM;
	}
	status = units > KV_MAX_BLOCKS ? KVC_ERR_ARG : units > 0 ? make_keys(prefix, units) : KVC_OK;
	prefix->n = granule > 0 && granule <= units ? units - units % (uint32_t)granule : 0;

	return status;
}

kvc_space_t *kvd_prefix_space(const kvd_prefix_t *prefix)
{
	return prefix->space->space;
}

static void key_of(void *ctx, uint32_t i, kvc_key_t *key)
{
	*key = ((const kvd_prefix_t *)ctx)->keys[i];
}

kvc_key_source_t kvd_prefix_source(const kvd_prefix_t *prefix)
{
	return (kvc_key_source_t){.key = key_of, .ctx = (void *)(uintptr_t)prefix};
}

static void private_key_of(void *ctx, uint32_t i, kvc_key_t *key)
{
	const kvd_prefix_t *prefix = ctx;

	*key = i < prefix->private_units ? prefix->keys[i] : prefix->private_key;
}

kvc_key_source_t kvd_prefix_private_source(const kvd_prefix_t *prefix)
{
	return (kvc_key_source_t){.key = private_key_of, .ctx = (void *)(uintptr_t)prefix};
}

/* Bytes of names and rest that are token ids after n units; *p_at: where they begin. */
static size_t tokens_after(const kvd_prefix_t *prefix, uint32_t n, size_t *p_at)
{
	const size_t of_units =
		(size_t)n * (prefix->hash_bytes ? prefix->hash_bytes : prefix->unit_tokens * sizeof(uint32_t));

	*p_at = of_units;
	if (prefix->hash_bytes) {
		return of_units == prefix->names_len ? prefix->rest_len : 0;
	}

	return of_units < prefix->names_len ? prefix->names_len - of_units : 0;
}

kvc_status_t kvd_prefix_set_private(kvd_prefix_t *prefix, const char *transfer, uint32_t n, uint32_t partial)
{
	uint32_t *tokens = NULL;
	kvc_status_t status;
	size_t at, len;

	if (partial == 0 || n > prefix->n) {
		return KVC_ERR_ARG;
	}
	for (uint32_t g = 0; g < prefix->group_count; g++) {
		if (partial >= prefix->groups[g].block_tokens) {
			return KVC_ERR_ARG;
		}
	}
	len = partial * sizeof *tokens;
	if (tokens_after(prefix, n, &at) < len) {
		return KVC_ERR_ARG;
	}
	tokens = calloc(partial, sizeof *tokens);
	if (!tokens) {
		return KVC_ERR_NOMEM;
	}
	memcpy(tokens, prefix->names + at, len); /* hashes leave them unaligned */
	status = kvc_private_key(prefix->space->space, n ? &prefix->keys[n - 1] : NULL, transfer, tokens, partial,
				 &prefix->private_key);
	free(tokens);
	if (status == KVC_OK) {
		prefix->private_units = n;
		prefix->partial = partial;
	}

	return status;
}

void kvd_prefix_range(const kvd_prefix_t *prefix, uint32_t g, uint32_t n, uint32_t *p_first, uint32_t *p_end)
{
	kvc_group_range(prefix->space->space, prefix->groups[g].group, n, p_first, p_end);
}

kvc_key_t kvd_prefix_block_key(const kvd_prefix_t *prefix, uint32_t g, uint32_t i)
{
	return prefix->keys[(i + 1) * (prefix->groups[g].block_tokens / prefix->unit_tokens) - 1];
}
