/* Keys of a request: the engine's hashes bound when they are looked at, or our own chain. */
#include "scheduler/keys.h"
#include "scheduler/base/requests.h"
#include "scheduler/names/spaces.h"

/* ---- looking --------------------------------------------------------------------------------- */

static void key_at(void *ctx, uint32_t i, kvc_key_t *key)
{
	kvx_key_view_t *view = ctx;
	const void *hash;
	uint32_t len = 0;

	*key = (kvc_key_t){{0}}; /* the key of no block: it is found nowhere */
	if (i >= view->n) {
		view->bad = 1;
		return;
	}
	if (!view->scheduler->foreign) {
		*key = view->request->own.keys[i];
		return;
	}
	hash = view->hashes->at(view->hashes->ctx, i, &len);
	if (!hash || kvc_key_bind(view->space, hash, len, key) != KVC_OK) {
		view->bad = 1;
	}
}

static uint64_t space_epoch(const kvc_space_t *space)
{
	kvc_space_info_t info = {.struct_size = sizeof info};

	kvc_space_get_info(space, &info);

	return info.epoch;
}

void kvx_key_view_init(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request, uint32_t tokens,
		       kvx_key_view_t *view)
{
	uint32_t n = 0;

	*view = (kvx_key_view_t){.scheduler = scheduler, .hashes = ask->hashes, .request = request};
	view->source = (kvc_key_source_t){.key = key_at, .ctx = view};
	if (request->space >= scheduler->space_count || !scheduler->spaces[request->space].open) {
		return;
	}
	view->space = scheduler->spaces[request->space].space;
	if (scheduler->foreign) {
		n = ask->hashes && ask->hashes->at ? ask->hashes->n : 0;
	} else if (request->own.epoch && request->own.epoch == space_epoch(view->space)) {
		n = request->own.n;
	}
	view->n = tokens / scheduler->unit < n ? tokens / scheduler->unit : n;
}

/* ---- for another daemon ---------------------------------------------------------------------- */

static kvc_status_t copy_hashes(const kvx_hashes_t *hashes, kvx_prompt_names_t *names)
{
	for (uint32_t i = 0; i < names->n_hashes; i++) {
		uint32_t len = 0;
		const void *hash = hashes->at(hashes->ctx, i, &len);

		if (!hash || len != names->hash_bytes) {
			return KVC_MISS;
		}
		memcpy(names->hashes + (size_t)i * len, hash, len);
	}

	return KVC_OK;
}

kvc_status_t kvx_prompt_names_copy(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request,
				   const kvx_shandover_t *h, kvx_prompt_names_t *names)
{
	const uint32_t whole = h->units * scheduler->unit;
	const int own = !scheduler->foreign;
	kvc_status_t status = KVC_OK;
	kvx_key_view_t view;

	kvx_key_view_init(scheduler, ask, request, whole, &view);
	if (request->space != h->space || view.n < h->units || (own && request->own.has_extra)) {
		return KVC_MISS;
	}
	*names = (kvx_prompt_names_t){.n_tokens = own || h->partial > 0 ? whole + h->partial : 0};
	if (!own && h->units > 0) {
		names->n_hashes = h->units;
		(void)ask->hashes->at(ask->hashes->ctx, 0, &names->hash_bytes);
	}
	names->tokens = kv_alloc(scheduler->env, names->n_tokens * sizeof *names->tokens +
							 (size_t)names->n_hashes * names->hash_bytes + 1u);
	if (!names->tokens) {
		return KVC_ERR_NOMEM;
	}
	if (own && whole > 0) {
		memcpy(names->tokens, request->own.tokens, whole * sizeof *names->tokens);
	}
	if (h->partial > 0) {
		memcpy(names->tokens + whole, h->tokens, h->partial * sizeof *h->tokens);
	}
	if (names->n_hashes > 0) {
		names->hashes = (uint8_t *)(names->tokens + names->n_tokens);
		status = copy_hashes(ask->hashes, names);
	}
	if (status != KVC_OK) {
		kv_free(scheduler->env, names->tokens);
	}

	return status;
}

/* ---- our own chain --------------------------------------------------------------------------- */

static void drop_chain(kvx_chain_state_t *own)
{
	own->n = 0;
	own->partial = 0;
	own->epoch = 0;
	own->has_extra = 0;
}

/* Memory for the tokens and keys of more units. */
static kvc_status_t reserve_units(const kv_env_t *env, kvx_chain_state_t *own, uint32_t units, uint32_t unit)
{
	const uint32_t need = own->n + units;
	uint32_t cap = own->cap ? own->cap : 64u;
	kvc_key_t *keys;
	uint32_t *tokens;

	if (need <= own->cap) {
		return KVC_OK;
	}
	while (cap < need) {
		cap *= 2u;
	}
	keys = kv_resize(env, own->keys, own->cap * sizeof *keys, cap * sizeof *keys);
	if (!keys) {
		return KVC_ERR_NOMEM;
	}
	own->keys = keys;
	tokens = kv_resize(env, own->tokens, (size_t)own->cap * unit * sizeof *tokens,
			   (size_t)cap * unit * sizeof *tokens);
	if (!tokens) {
		return KVC_ERR_NOMEM;
	}
	own->tokens = tokens;
	own->cap = cap;

	return KVC_OK;
}

static kvc_status_t append_units(kvx_chain_state_t *own, const kvx_units_t *units, uint32_t unit)
{
	kvc_status_t status = KVC_OK;

	for (uint32_t i = 0; i < units->n / unit && status == KVC_OK; i++) {
		const int may_have = units->extra && units->extra_len && i < units->extra_count;
		const void *extra = may_have && units->extra_len[i] ? units->extra[i] : NULL;
		uint32_t *tokens = own->tokens + (size_t)own->n * unit;
		kvc_key_t *key = &own->keys[own->n];

		memcpy(tokens, units->tokens + (size_t)i * unit, unit * sizeof *tokens);
		status = extra ? kvc_chain_unit(&own->chain, extra, units->extra_len[i], tokens, key)
			       : kvc_chain_tokens(&own->chain, tokens, 1, key);
		own->has_extra |= extra != NULL;
		own->n += status == KVC_OK;
	}

	return status;
}

kvc_status_t kvx_scheduler_add_tokens(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_units_t *units)
{
	kvx_request_t *request;
	kvx_chain_state_t *own;
	const kvc_space_t *space;
	kvc_status_t status;
	uint32_t number;

	if (scheduler->foreign || !kvx_ask_is_sound(ask) || !units || units->struct_size < sizeof *units ||
	    (units->n && !units->tokens) || units->at > UINT32_MAX - units->n) {
		return KVC_ERR_ARG;
	}
	number = kvx_space_find_or_add(scheduler, ask);
	if (number == UINT32_MAX || !scheduler->spaces[number].open) {
		return KVC_ERR_UNREACHABLE; /* a chain begins with its space */
	}
	space = scheduler->spaces[number].space;
	request = kvx_requests_find_or_add(&scheduler->requests, ask->id, ask->id_len);
	if (!request) {
		return KVC_ERR_NOMEM;
	}
	own = &request->own;
	request->space = number;
	if (units->at == 0) {
		drop_chain(own);
		own->epoch = space_epoch(space);
		kvc_chain_begin(space, &own->chain);
	}
	if (own->epoch == 0) {
		return KVC_OK;
	}
	if (own->epoch != space_epoch(space)) {
		return KVC_ERR_STALE_EPOCH;
	}

	status = units->at == own->n * scheduler->unit && own->partial == 0
			 ? reserve_units(scheduler->env, own, units->n / scheduler->unit, scheduler->unit)
			 : KVC_ERR_ARG;
	if (status == KVC_OK) {
		status = append_units(own, units, scheduler->unit);
	}
	if (status != KVC_OK) {
		drop_chain(own);
	}

	return status;
}

kvc_status_t kvx_scheduler_add_private(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const char *transfer,
				       const uint32_t *tokens, uint32_t n)
{
	kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);
	kvx_chain_state_t *own = request ? &request->own : NULL;
	kvc_status_t status = own && own->epoch && own->partial == 0 && n > 0 && n < scheduler->unit
				      ? reserve_units(scheduler->env, own, 1, scheduler->unit)
				      : KVC_ERR_ARG;

	if (status == KVC_OK) {
		status = kvc_private_key(scheduler->spaces[request->space].space,
					 own->n ? &own->keys[own->n - 1u] : NULL, transfer, tokens, n,
					 &own->keys[own->n]);
	}
	if (status == KVC_OK) {
		own->n++;
		own->partial = n;
	}

	return status;
}

kvc_status_t kvx_scheduler_get_key(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, uint32_t unit, kvc_key_t *key)
{
	const kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);

	if (!request || unit >= request->own.n) {
		return KVC_MISS;
	}
	*key = request->own.keys[unit];

	return KVC_OK;
}
