/* Spaces: opened by identity, opened again after a restart or a reset; and the keys of their blocks. */
#include "impl.h"

#include "kv/key.h"
#include "kvk/layout.h"

#include <stdio.h>
#include <stdlib.h>

_Static_assert(sizeof(kvc_chain_t) == sizeof(kv_chain_t), "a chain of the API is a chain of kv/key.h");
_Static_assert(sizeof(kvc_key_t) == sizeof(kv_key_t), "a key of the API is a key of kv/types.h");

/* ---- opening --------------------------------------------------------------------------------- */

/* What the daemon says about a block must be consistent: offsets are computed from it. */
static int is_consistent(kvc_geometry_t *g)
{
	const uint32_t head_bytes = g->heads ? g->block_bytes / g->heads : 0;

	if (head_bytes == 0 || g->heads > KVC_MAX_HEADS || (uint64_t)head_bytes * g->heads != g->block_bytes ||
	    g->page_bytes == 0 || g->leaf_bytes == 0 || head_bytes % g->page_bytes != 0) {
		return 0;
	}
	g->layers = head_bytes / g->page_bytes;
	g->pieces = (g->page_bytes - 1u) / g->leaf_bytes + 1u;

	return (uint64_t)g->layers * g->pieces == g->leaves && g->leaves <= KVC_MAX_LEAVES;
}

/* Of each group: that of the answer, or what follows from the group's own layout. */
static kv_status_t find_geometries(const kvc_space_t *space, const kv_msg_space_open_reply_t *reply,
				   kvc_geometry_t *found)
{
	const kvc_geometry_t first = {.block_bytes = reply->block_bytes,
				      .heads = reply->heads,
				      .leaves = reply->leaves,
				      .leaf_bytes = reply->leaf_bytes,
				      .page_bytes = reply->page_bytes};
	const int differ = memchr(reply->layout.data, ';', reply->layout.len) != NULL;
	kvk_layout_t layouts[KV_MAX_GROUPS];
	int consistent = 1;

	if (differ && kvk_layouts_parse((const char *)reply->layout.data, reply->layout.len, layouts,
					space->group_count, NULL) != KV_OK) {
		return KV_ERR_PROTO;
	}
	for (uint32_t g = 0; g < space->group_count; g++) {
		kvk_geometry_t of = {0};

		found[g] = first;
		if (differ) {
			kvk_layout_geometry(&layouts[g], &of);
			found[g] = (kvc_geometry_t){.block_bytes = of.block_bytes,
						    .heads = of.heads,
						    .leaves = of.leaves,
						    .leaf_bytes = of.leaf_bytes,
						    .page_bytes = of.page_bytes};
		}
		consistent = consistent && is_consistent(&found[g]);
	}

	return consistent && found[0].block_bytes == first.block_bytes && found[0].leaves == first.leaves
		       ? KV_OK
		       : KV_ERR_PROTO;
}

/* Is it the same space as before? Handles in use were sized by the first answer, and callers fill blocks in the order
 * of bytes that it named. A new daemon has the order of the first member that opened the space. */
static int is_unchanged(const kvc_space_t *space, const kv_msg_space_open_reply_t *reply, const kvc_geometry_t *found)
{
	kv_slice_t was = kv_slice_str(space->layout);
	int same = memcmp(space->root, reply->root.data, sizeof space->root) == 0 &&
		   space->hash_tokens == reply->hash_tokens && was.len == reply->layout.len &&
		   memcmp(was.data, reply->layout.data, was.len) == 0;

	for (uint32_t g = 0; g < space->group_count; g++) {
		same = same && memcmp(&space->groups[g].geometry, &found[g], sizeof found[g]) == 0;
	}

	return same;
}

static kv_status_t geometry_take(kvc_space_t *space, const kv_msg_space_open_reply_t *reply)
{
	kvc_geometry_t found[KV_MAX_GROUPS] = {0};
	kv_status_t status;

	if (reply->space >= KV_MIRROR_MAX_SPACES || reply->epoch == 0 || reply->root.len != sizeof space->root ||
	    reply->hash_tokens == 0 || reply->hash_tokens > KV_MAX_UNIT_TOKENS) {
		return KV_ERR_PROTO;
	}
	status = find_geometries(space, reply, found);
	if (status != KV_OK || space->groups[0].geometry.block_bytes) {
		return status != KV_OK || is_unchanged(space, reply, found) ? status : KV_ERR_LAYOUT;
	}

	memcpy(space->root, reply->root.data, sizeof space->root);
	space->hash_tokens = reply->hash_tokens;
	for (uint32_t g = 0; g < space->group_count; g++) {
		space->groups[g].geometry = found[g];
	}
	memcpy(space->layout, reply->layout.data, reply->layout.len);
	space->layout[reply->layout.len] = '\0';

	return KV_OK;
}

/* How asking for it has ended. One that was open is asked for again, unless the answer would be the same: its handle is
 * to survive whatever the daemon was too busy for when it was attached to again. */
static void set_open_status(kvc_space_t *space, kv_status_t status)
{
	space->opening = 0;
	space->open_status = status;
	if (status < 0 && atomic_load(&space->known_epoch) != 0 && atomic_load(&space->epoch) == 0 &&
	    kv_status_retry(status) != KV_RETRY_NO) {
		space->again_ns = kv_now_ns(&space->kvc->env) + KVC_REOPEN_NS;
	}
}

static void on_space_opened(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	kvc_space_t *space = object;
	kv_status_t status = answer->status;

	if (status == KV_OK) {
		status = geometry_take(space, &answer->reply->space_open_reply);
	}
	if (status == KV_OK) {
		const kv_msg_space_open_reply_t *reply = &answer->reply->space_open_reply;

		atomic_store(&space->id, reply->space);
		atomic_store(&space->known_epoch, reply->epoch);
		atomic_store(&space->epoch, reply->epoch);
	} else {
		kvc_fail_request(status, answer->detail, "opening the space");
	}
	set_open_status(space, status);
	if (answer->status != KV_ERR_CLOSED || kvc->state != KVC_DETACHED) {
		kvc_reopened(kvc);
	}
}

/* Ask for the space (again). */
static kv_status_t send_space_open(kvc_space_t *space)
{
	kv_msg_space_open_t msg = {
		.identity = {(const uint8_t *)space->text, space->text_len},
		.layout = kv_slice_str(space->asked_layout),
		.flags = space->flags,
	};
	kvc_ask_t request = {
		.code = KV_CODE_SPACE_OPEN, .msg = &msg, .done = on_space_opened, .object = space, .fd = -1};
	kv_status_t status = kvc_send(space->kvc, &request);

	space->again_ns = 0;
	if (status == KV_OK) {
		space->opening = 1;
		space->open_status = KV_PENDING;
	} else {
		set_open_status(space, status);
	}

	return status;
}

uint32_t kvc_spaces_ask(kvc_t *kvc)
{
	uint32_t asked = 0;

	for (kvc_space_t *space = kvc->spaces; space; space = space->next) {
		asked += send_space_open(space) == KV_OK;
	}

	return asked;
}

void kvc_spaces_refresh(kvc_t *kvc)
{
	for (kvc_space_t *space = kvc->spaces; space; space = space->next) {
		const int due = space->again_ns && kv_now_ns(&kvc->env) >= space->again_ns;

		if (!space->opening && (atomic_exchange(&space->stale, 0u) || due)) {
			(void)send_space_open(space);
		}
	}
}

static kv_identity_t identity_of(const kvc_identity_t *given, char groups[32], char hash_tokens[16])
{
	snprintf(hash_tokens, 16, "%u", given->hash_tokens);
	snprintf(groups, 32, "0:full:%u", given->hash_tokens);

	return (kv_identity_t){
		.model = given->model,
		.weights = given->weights,
		.dtype = given->dtype,
		.quantization = given->quantization ? given->quantization : "none",
		.rope = given->rope,
		.lora = given->lora ? given->lora : "none",
		.hash = given->hash ? given->hash : "kv1",
		.hash_tokens = hash_tokens,
		.groups = given->groups ? given->groups : groups,
		.layout = given->layout,
		.page_format = given->page_format ? given->page_format : "plain",
		.extra = given->extra,
		.device = given->device,
	};
}

static kvc_status_t identity_take(kvc_space_t *space, const kvc_identity_t *given)
{
	kvc_identity_t wide;
	char groups_text[32], hash_tokens[16];
	const char *field = NULL;
	kv_identity_t identity;
	kv_group_t groups[KV_MAX_GROUPS];
	uint32_t count = 0;
	kv_status_t status;

	kv_struct_read(&wide, given, sizeof wide);
	identity = identity_of(&wide, groups_text, hash_tokens);
	status = kv_identity_text(&identity, space->text, KV_IDENTITY_MAX_TEXT, &field);
	if (status != KV_OK) {
		return kvc_fail(status, "the identity's field %s is missing or too long", field ? field : "(text)");
	}
	status = kv_identity_groups(&identity, &space->hash_tokens, groups, KV_COUNT_OF(groups), &count);
	if (status != KV_OK || count == 0) {
		return kvc_fail(status != KV_OK ? status : KV_ERR_IDENTITY, "groups \"%s\" over %u tokens a unit: %s",
				identity.groups, wide.hash_tokens, kv_status_text(status));
	}
	status = kvc_groups_take(space, groups, count);
	if (status != KV_OK) {
		return kvc_fail(status,
				"groups \"%s\": blocks of so different lengths that no prefix ends in all of them",
				identity.groups);
	}
	if (strlen(wide.layout) > KVC_MAX_LAYOUT_TEXT) {
		return kvc_fail(KV_ERR_LAYOUT, "the layout text is longer than %u bytes", KVC_MAX_LAYOUT_TEXT);
	}
	space->flags = wide.known ? KV_SPACE_KNOWN : 0;
	space->text_len = (uint32_t)strlen(space->text);
	memcpy(space->asked_layout, wide.layout, strlen(wide.layout) + 1);

	return KVC_OK;
}

static int is_space_answered(const void *object)
{
	return ((const kvc_space_t *)object)->open_status != KV_PENDING;
}

kvc_status_t kvc_space_open_start(kvc_t *kvc, const kvc_identity_t *identity, kvc_space_t **p_space)
{
	kvc_space_t *space;
	kvc_status_t status;

	if (!kvc || !identity || !p_space || identity->struct_size < offsetof(kvc_identity_t, quantization)) {
		return kvc_fail(KV_ERR_ARG, "kvc_space_open: an argument is NULL or struct_size is not set");
	}
	status = kvc_enter(kvc);
	if (status != KVC_OK) {
		return status;
	}
	if (kvc->state != KVC_READY) {
		return kvc_detached(kvc);
	}
	space = kv_alloc(&kvc->env, sizeof *space);
	if (!space) {
		return kvc_fail(KV_ERR_NOMEM, "out of memory for a space");
	}
	space->kvc = kvc;
	status = identity_take(space, identity);
	if (status == KVC_OK) {
		status = (kvc_status_t)send_space_open(space);
	}
	if (status != KVC_OK) {
		kvc_space_free(space);
		return status;
	}
	space->next = kvc->spaces;
	kvc->spaces = space;
	*p_space = space;

	return KVC_OK;
}

kvc_status_t kvc_space_state(const kvc_space_t *space)
{
	if (atomic_load_explicit(&space->epoch, memory_order_relaxed) != 0) {
		return KVC_OK;
	}

	return (kvc_status_t)(space->open_status == KV_OK ? KV_ERR_CLOSED : space->open_status);
}

kvc_status_t kvc_space_open(kvc_t *kvc, const kvc_identity_t *identity, kvc_space_t **p_space)
{
	kvc_space_t *space = NULL;
	kvc_status_t status = p_space ? kvc_space_open_start(kvc, identity, &space)
				      : kvc_fail(KV_ERR_ARG, "kvc_space_open: p_space is NULL");

	if (status != KVC_OK || !space) {
		return status;
	}
	(void)kvc_wait(kvc, is_space_answered, space, kvc_deadline(kvc, 0));
	status = (kvc_status_t)space->open_status;
	if (status == KVC_PENDING || status == KVC_ERR_TIMEOUT) {
		status = kvc_fail(KV_ERR_TIMEOUT, "kvd at %s did not answer in time; is it stopped?", kvc->socket);
	}
	if (status != KVC_OK) {
		kvc_space_unlink(space);
		kvc_space_free(space);
		return status;
	}
	*p_space = space;

	return KVC_OK;
}

void kvc_space_free(kvc_space_t *space)
{
	kv_env_t env = space->kvc->env;

	kv_free(&env, space);
}

void kvc_space_unlink(kvc_space_t *space)
{
	kvc_space_t **link = &space->kvc->spaces;

	while (*link && *link != space) {
		link = &(*link)->next;
	}
	if (*link) {
		*link = space->next;
	}
	if (space->opening) {
		kvc_reopened(space->kvc);
	}
	kvc_forget_requests(space->kvc, space);
}

/* Does the handle have the space of this number, or may the answer that it waits for name it? */
static int has_number(const kvc_space_t *space, uint32_t id, const char *text)
{
	return (atomic_load(&space->epoch) != 0 && atomic_load(&space->id) == id) ||
	       (space->opening && (!text || strcmp(space->text, text) == 0));
}

void kvc_space_give_back(kvc_t *kvc, uint32_t id, const char *text)
{
	const kvc_map_t *map = atomic_load_explicit(&kvc->map, memory_order_relaxed);
	const kv_msg_space_close_t msg = {.space = id};
	const kvc_space_t *other = kvc->spaces;

	while (other && !has_number(other, id, text)) {
		other = other->next;
	}
	/* Only members hold a number, and a forked child shares the socket: not a byte of its goes there. */
	if (!other && kvc->state == KVC_READY && map && map->leases && kvc_check_process(kvc) == KVC_OK) {
		kvc_send_oneway(kvc, KV_CODE_SPACE_CLOSE, &msg);
	}
}

kvc_status_t kvc_space_get_info(const kvc_space_t *space, kvc_space_info_t *info)
{
	const kvc_geometry_t *first = &space->groups[0].geometry;
	kvc_space_info_t now = {
		.epoch = atomic_load(&space->known_epoch),
		.hash_tokens = space->hash_tokens,
		.block_bytes = first->block_bytes,
		.heads = first->heads,
		.leaves = first->leaves,
	};

	memcpy(now.root, space->root, sizeof now.root);

	return kvc_fill("kvc_space_get_info", info, &now, sizeof now);
}

const char *kvc_space_layout(const kvc_space_t *space)
{
	return space->layout;
}

/* A match gives up when the heartbeat is stale; what is asked by message has a deadline and may outlast a hiccup, but
 * not a stop. */
static int is_hung(const kvc_t *kvc, const kvc_map_t *map)
{
	uint64_t beat = atomic_load_explicit(&map->mirror->heartbeat_ns, memory_order_relaxed);
	uint64_t now = kv_now_ns(&kvc->env);
	uint64_t longest = map->stale_ns > KVC_HUNG_NS ? map->stale_ns : KVC_HUNG_NS;

	return now > beat && now - beat > longest;
}

kvc_status_t kvc_space_usable(kvc_space_t *space)
{
	kvc_t *kvc = space->kvc;
	const kvc_map_t *map;
	kvc_status_t status = kvc_enter(kvc);

	if (status != KVC_OK) {
		return status;
	}
	if (kvc->state != KVC_READY) {
		return kvc_detached(kvc);
	}
	if (kvc_space_state(space) == KVC_PENDING) {
		return kvc_fail(KV_ERR_BUSY, "the space is still being opened; poll and try again");
	}
	if (atomic_load_explicit(&space->epoch, memory_order_relaxed) == 0) {
		return kvc_fail(space->open_status == KV_OK ? KV_ERR_CLOSED : space->open_status,
				"the space could not be opened again after a re-attach: %s",
				kv_status_text(space->open_status));
	}
	map = atomic_load_explicit(&kvc->map, memory_order_relaxed);
	if (!map) {
		return kvc_fail(KV_ERR_NOT_JOINED, "an observer holds no blocks; attach without `observe`");
	}
	if (!map->leases) {
		return kvc_fail(KV_ERR_PIDFD_REQUIRED, "attached to match only: neither leases nor puts");
	}
	if (is_hung(kvc, map)) {
		return kvc_fail(KV_ERR_DAEMON_STALE, "kvd at %s has been silent for over a second; is it stopped?",
				kvc->socket);
	}

	return KVC_OK;
}

void kvc_space_stale(kvc_space_t *space)
{
	atomic_store(&space->stale, 1u);
}

/* ---- reset ----------------------------------------------------------------------------------- */

static void on_space_reset(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	kvc_space_t *space = object;

	(void)kvc;
	space->reset_status = answer->status;
	if (answer->status == KV_OK) {
		atomic_store(&space->known_epoch, answer->reply->space_reset_reply.epoch);
		atomic_store(&space->epoch, answer->reply->space_reset_reply.epoch);
		return;
	}
	if (answer->status == KV_ERR_STALE_EPOCH) {
		kvc_space_stale(space);
	}
	kvc_fail_request(answer->status, answer->detail, "resetting the space");
}

static int is_reset_answered(const void *object)
{
	return ((const kvc_space_t *)object)->reset_status != KV_PENDING;
}

kvc_status_t kvc_space_reset(kvc_space_t *space)
{
	kv_msg_space_reset_t msg;
	kvc_ask_t ask = {.code = KV_CODE_SPACE_RESET, .msg = &msg, .done = on_space_reset, .object = space, .fd = -1};
	kvc_status_t status;
	kv_status_t sent;

	if (!space) {
		return kvc_fail(KV_ERR_ARG, "kvc_space_reset: no space given");
	}
	status = kvc_space_usable(space);
	if (status != KVC_OK) {
		return status;
	}
	msg = (kv_msg_space_reset_t){.space = atomic_load(&space->id), .epoch = atomic_load(&space->epoch)};
	sent = kvc_send(space->kvc, &ask);
	if (sent != KV_OK) {
		return kvc_fail(sent, "SPACE_RESET could not be sent: %s", kv_status_text(sent));
	}
	space->reset_status = KV_PENDING;
	/* The request's own deadline ends the wait. */
	(void)kvc_wait(space->kvc, is_reset_answered, space, UINT64_MAX);

	return (kvc_status_t)space->reset_status;
}

/* ---- keys ------------------------------------------------------------------------------------ */

void kvc_chain_begin(const kvc_space_t *space, kvc_chain_t *chain)
{
	/* hash_tokens was checked when the space was opened, so this cannot fail. */
	(void)kv_chain_init((kv_chain_t *)(void *)chain, space->root, space->hash_tokens,
			    atomic_load(&space->known_epoch));
}

kvc_status_t kvc_chain_tokens(kvc_chain_t *chain, const uint32_t *tokens, uint32_t units, kvc_key_t *keys)
{
	uint32_t done = 0;
	kv_status_t status =
		kv_chain_tokens((kv_chain_t *)(void *)chain, tokens, units, (kv_key_t *)(void *)keys, &done);

	if (status != KV_OK) {
		return kvc_fail(status, "a token of unit %u is 0xffffffff, which is not a token id", done);
	}

	return KVC_OK;
}

kvc_status_t kvc_chain_unit(kvc_chain_t *chain, const void *extra, uint32_t extra_len, const uint32_t *tokens,
			    kvc_key_t *key)
{
	kv_status_t status =
		kv_chain_unit((kv_chain_t *)(void *)chain, extra, extra_len, tokens, (kv_key_t *)(void *)key);

	if (status != KV_OK) {
		return kvc_fail(status, "a unit with %u bytes of extra keys: too long, or a token is 0xffffffff",
				extra_len);
	}

	return KVC_OK;
}

/* Canonical bytes of a salt: a name of its own keeps it apart from every other extra key. */
static kvc_status_t salted_unit(kvc_chain_t *chain, const char *salt, const uint32_t *tokens, kvc_key_t *key)
{
	char extra[KVC_MAX_SALT + sizeof KVC_SALT_PREFIX];
	int len = snprintf(extra, sizeof extra, KVC_SALT_PREFIX "%s", salt);

	if (len < 0 || (size_t)len >= sizeof extra) {
		return kvc_fail(KV_ERR_ARG, "the cache salt is longer than %u bytes", KVC_MAX_SALT);
	}

	return kvc_chain_unit(chain, extra, (uint32_t)len, tokens, key);
}

kvc_status_t kvc_keys_of(const kvc_space_t *space, const kvc_prompt_t *prompt, kvc_key_t *keys, uint32_t cap,
			 uint32_t *p_n)
{
	const int known = prompt && prompt->struct_size >= sizeof *prompt;
	uint32_t units = space && known ? prompt->n_tokens / space->hash_tokens : 0;
	uint32_t first = 0;
	kvc_chain_t chain;
	kvc_status_t status = KVC_OK;

	if (!space || !known || !p_n || (units && (!prompt->tokens || !keys)) || units > cap) {
		return kvc_fail(
			KV_ERR_ARG,
			"kvc_keys_of: an argument is NULL, struct_size is not set, or %u keys do not fit into %u",
			units, cap);
	}
	kvc_chain_begin(space, &chain);
	if (prompt->salt && *prompt->salt && units) {
		status = salted_unit(&chain, prompt->salt, prompt->tokens, keys);
		first = 1;
	}
	if (status == KVC_OK && units > first) {
		status = kvc_chain_tokens(&chain, prompt->tokens + (size_t)first * space->hash_tokens, units - first,
					  keys + first);
	}
	if (status == KVC_OK) {
		*p_n = units;
	}

	return status;
}

kvc_status_t kvc_chain_bind(const kvc_chain_t *header, const void *hash, uint32_t len, kvc_key_t *key)
{
	kv_status_t status;

	if (!header || !hash || !key) {
		return kvc_fail(KV_ERR_ARG, "kvc_chain_bind: an argument is NULL");
	}
	status = kv_key_bind((const kv_chain_t *)(const void *)header, hash, len, (kv_key_t *)(void *)key);
	if (status != KV_OK) {
		return kvc_fail(status, "an engine's hash has 16 to 60 bytes, this one %u", len);
	}

	return KVC_OK;
}

kvc_status_t kvc_private_key(const kvc_space_t *space, const kvc_key_t *parent, const char *transfer,
			     const uint32_t *tokens, uint32_t n_tokens, kvc_key_t *key)
{
	struct {
		char what[16];
		kvc_key_t parent;
		uint8_t tokens[32];
		char transfer[KVC_MAX_TRANSFER];
	} name = {.what = "kvd private"};
	size_t len = transfer ? strnlen(transfer, KVC_MAX_TRANSFER + 1) : 0;
	uint8_t digest[32];

	if (!space || !tokens || n_tokens == 0 || !key || len == 0 || len > KVC_MAX_TRANSFER) {
		return kvc_fail(KV_ERR_ARG, "kvc_private_key: an argument is NULL, or a transfer id of %zu bytes", len);
	}
	for (uint32_t i = 0; i < n_tokens; i++) {
		if (tokens[i] == KV_TOKEN_REFUSED) {
			return kvc_fail(KV_ERR_ARG, "token %u of a private block is no token id", i);
		}
	}
	if (parent) {
		name.parent = *parent;
	}
	kv_sha256(tokens, (size_t)n_tokens * sizeof *tokens, name.tokens);
	memcpy(name.transfer, transfer, len);
	kv_sha256(&name, sizeof name, digest);

	return kvc_key_bind(space, digest, sizeof digest, key);
}

kvc_status_t kvc_key_bind(const kvc_space_t *space, const void *hash, uint32_t len, kvc_key_t *key)
{
	kvc_chain_t header;

	if (!space) {
		return kvc_fail(KV_ERR_ARG, "kvc_key_bind: an argument is NULL");
	}
	kvc_chain_begin(space, &header);

	return kvc_chain_bind(&header, hash, len, key);
}
