#include "connectors/inproc/jobs_rig.h"
#include "engine/check.h"

#include "kvk/move.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const kvk_layout_t layout = {
	.heads = 2, .layers = LAYERS, .block_tokens = TOKENS, .k_dim = 16, .v_dim = 16, .dtype = KVK_DTYPE_F32};

knobs_t knobs;

void knobs_reset(void)
{
	memset(&knobs, 0, sizeof knobs);
	atomic_store(&knobs.ready, NONE);
	atomic_store(&knobs.revoke_on, NONE);
	atomic_store(&knobs.grant, NONE);
}

/* ---- what the connector calls ---------------------------------------------------------------- */

#define WRAP(type, name, ...)                                                                                          \
	type __real_##name(__VA_ARGS__);                                                                               \
	type __wrap_##name(__VA_ARGS__);                                                                               \
	type __wrap_##name(__VA_ARGS__)

WRAP(uint32_t, kvc_lease_ready, const kvc_lease_t *lease)
{
	const uint32_t ready = __real_kvc_lease_ready(lease), most = atomic_load(&knobs.ready);

	return ready < most ? ready : most;
}

WRAP(kvc_status_t, kvc_lease_rest_status, const kvc_lease_t *lease)
{
	const kvc_status_t rest = atomic_load(&knobs.rest);

	return rest ? rest : __real_kvc_lease_rest_status(lease);
}

WRAP(kvc_status_t, kvc_lease_start, kvc_space_t *space, const kvc_want_t *want, kvc_lease_t **p_lease)
{
	const kvc_status_t status = atomic_load(&knobs.lease);

	return status ? status : __real_kvc_lease_start(space, want, p_lease);
}

WRAP(kvc_status_t, kvc_lease_state, const kvc_lease_t *lease)
{
	if (atomic_load(&knobs.late)) {
		return KVC_PENDING;
	}

	return atomic_load(&knobs.revoked) ? KVC_ERR_REVOKED : __real_kvc_lease_state(lease);
}

WRAP(kvc_status_t, kvc_lease_report_bad, kvc_lease_t *lease, uint32_t i)
{
	atomic_fetch_add(&knobs.bad, 1u);

	return __real_kvc_lease_report_bad(lease, i);
}

WRAP(kv_status_t, kvk_scatter, const kvk_layout_t *pool, const kvk_paged_t *paged, const kvk_move_t *moves,
     uint32_t count, uint32_t *p_bad)
{
	const kv_status_t status = __real_kvk_scatter(pool, paged, moves, count, p_bad);

	for (uint32_t i = 0; i < count; i++) {
		if (moves[i].block == atomic_load(&knobs.revoke_on)) {
			atomic_store(&knobs.revoked, 1);
		}
		if (atomic_load(&knobs.wrong)) {
			((uint8_t *)paged->base[0])[moves[i].block * FLOATS * sizeof(float) + 5] ^= 1;
		}
	}

	return status;
}

static _Atomic(kvc_put_t *) refused;

WRAP(kvc_status_t, kvc_put_start, kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t to,
     const kvc_put_options_t *options, kvc_put_t **p_put)
{
	const uint32_t grant = atomic_load(&knobs.grant);
	kvc_status_t status;

	status = __real_kvc_put_start(space, keys, from, to - from > grant ? from + grant : to, options, p_put);
	atomic_store(&knobs.put_from, from);
	atomic_fetch_add(&knobs.put_starts, 1u);
	atomic_store(&refused, status == KVC_OK && atomic_load(&knobs.put_times) > 0 ? *p_put : NULL);

	return status;
}

WRAP(void, kvc_put_get_result, const kvc_put_t *put, kvc_put_result_t *result)
{
	__real_kvc_put_get_result(put, result);
	if (put == atomic_load(&refused)) {
		atomic_store(&refused, NULL);
		atomic_fetch_sub(&knobs.put_times, 1);
		result->status = atomic_load(&knobs.put);
	} else if (result->status != KVC_PENDING && atomic_load(&knobs.put_done)) {
		result->status = atomic_load(&knobs.put_done);
		result->visible = 0;
	}
}

WRAP(kvc_status_t, kvc_put_end, kvc_put_t *put, uint32_t first, uint32_t n)
{
	const kvc_status_t status = atomic_load(&knobs.put_end);

	return status ? status : __real_kvc_put_end(put, first, n);
}

/* A refused put says that what it continues is not stored any longer. */
WRAP(void, kvc_match_lazy, const kvc_space_t *space, const kvc_key_source_t *keys, uint32_t n, kvc_match_t *match)
{
	__real_kvc_match_lazy(space, keys, n, match);
	if (atomic_load(&knobs.put) && atomic_load(&knobs.put) != KVC_ERR_BUSY) {
		match->n = match->n_cpu = 0;
	}
}

WRAP(kvc_status_t, kvc_space_open_start, kvc_t *kvc, const kvc_identity_t *identity, kvc_space_t **p_space)
{
	return atomic_load(&knobs.no_space) ? KVC_ERR_FULL : __real_kvc_space_open_start(kvc, identity, p_space);
}

/* The daemon goes on meanwhile, however busy the machine is. */
WRAP(kvc_status_t, kvc_await_us, kvc_t *kvc, uint32_t timeout_us)
{
	const kvc_status_t status = __real_kvc_await_us(kvc, timeout_us);

	if (atomic_load(&knobs.stall) && atomic_fetch_sub(&knobs.stall, 1) == 1) {
		assert_int_equal(kill(knobs.stalled, SIGCONT), 0);
		usleep(1000000);
	}

	return status;
}

WRAP(void, kvc_report, kvc_space_t *space, const kvc_report_t *report)
{
	atomic_fetch_add(&knobs.reports, 1u);
	atomic_store(&knobs.report_why, report->why);
	__real_kvc_report(space, report);
}

/* ---- the connector --------------------------------------------------------------------------- */

static const kvc_identity_t identity = {
	.struct_size = sizeof identity, .model = "m", .weights = "w", .dtype = "f32", .rope = "r"};

static void attach(bench_t *b)
{
	const kvx_config_t config = {
		.struct_size = sizeof config,
		.roles = KVX_BOTH,
		.socket = b->rig.socket,
		.identity = &identity,
		.layout = &layout,
		.paged = &b->paged,
		.load_ms = JOBS_MS,
		.save_ms = JOBS_MS,
		.attach_ms = atomic_load(&knobs.no_space) || atomic_load(&knobs.wrong) ? 200 : JOBS_MS,
	};

	assert_int_equal(kvx_attach(&config, &b->kvx), KVC_OK);
}

void bench_open(bench_t *b, const char *program, const char *silence)
{
	for (uint32_t l = 0; l < LAYERS; l++) {
		b->cache[l] = calloc(BLOCKS * FLOATS, sizeof(float));
		b->base[l] = b->cache[l];
	}
	b->paged = (kvk_paged_t){.kind = KVK_PAGED_KV_TOKEN_HEAD,
				 .blocks = BLOCKS,
				 .layers = LAYERS,
				 .heads = 2,
				 .block_tokens = TOKENS,
				 .k_dim = 16,
				 .v_dim = 16,
				 .dtype = KVK_DTYPE_F32,
				 .base = b->base};
	rig_init(&b->rig, program);
	b->rig.silence = silence;
	rig_start(&b->rig);
	attach(b);
}

void bench_close(bench_t *b)
{
	knobs_reset();
	kvx_detach(b->kvx);
	if (b->rig.pid) {
		rig_check_quiet(&b->rig);
	}
	rig_fini(&b->rig);
	for (uint32_t l = 0; l < LAYERS; l++) {
		free(b->cache[l]);
	}
}

void bench_await_ready(bench_t *b)
{
	for (uint32_t i = 0; i < JOBS_MS / 10u && !kvx_is_ready(b->kvx); i++) {
		(void)kvx_poll(b->kvx, 10);
	}
	assert_true(kvx_is_ready(b->kvx));
}

/* What block i of conversation c holds in layer l: a function of both. */
static float content(uint32_t c, uint32_t i, uint32_t l, uint32_t at)
{
	return (float)(c * 1000003u + i * 7919u + l * 131u + at);
}

void fill(bench_t *b, uint32_t block, uint32_t c, uint32_t i)
{
	for (uint32_t l = 0; l < LAYERS; l++) {
		for (uint32_t at = 0; at < FLOATS; at++) {
			b->cache[l][block * FLOATS + at] = content(c, i, l, at);
		}
	}
}

int holds(const bench_t *b, uint32_t block, uint32_t c, uint32_t i)
{
	for (uint32_t l = 0; l < LAYERS; l++) {
		for (uint32_t at = 0; at < FLOATS; at += 37) {
			if (b->cache[l][block * FLOATS + at] != content(c, i, l, at)) {
				return 0;
			}
		}
	}

	return 1;
}

void prompt_init(prompt_t *p, uint32_t c, uint32_t n, uint32_t first)
{
	for (uint32_t i = 0; i < n * TOKENS; i++) {
		p->tokens[i] = c * 100000 + i;
	}
	for (uint32_t i = 0; i < n; i++) {
		p->blocks[i] = (first + i) % BLOCKS;
	}
	p->prefix = (kvx_prefix_t){
		.struct_size = sizeof p->prefix, .tokens = p->tokens, .n_tokens = n * TOKENS, .blocks = p->blocks};
}

kvc_status_t save_now(bench_t *b, const prompt_t *p, kvx_save_result_t *result)
{
	kvx_save_t *save;
	const kvc_status_t status = kvx_save_prefix(b->kvx, &p->prefix, &save);

	if (status != KVC_PENDING) {
		return status;
	}
	while (kvx_save_state(save, result) == KVC_PENDING) {
		(void)kvx_poll(b->kvx, 1);
	}
	kvx_save_end(save);

	return result->status;
}

kvc_status_t load_now(bench_t *b, const prompt_t *p, kvx_load_result_t *result)
{
	kvx_load_t *load;

	if (kvx_load_prefix(b->kvx, &p->prefix, &load, result) == KVC_MISS) {
		return KVC_MISS;
	}
	while (kvx_load_state(load, result) == KVC_PENDING) {
		(void)kvx_poll(b->kvx, 1);
	}
	kvx_load_end(load);

	return result->status;
}

kvx_stats_t stats_of(const bench_t *b)
{
	kvx_stats_t stats = {.struct_size = sizeof stats};

	kvx_get_stats(b->kvx, &stats);

	return stats;
}

void store_ten(bench_t *b, prompt_t *from, prompt_t *to)
{
	kvx_save_result_t saved;

	bench_await_ready(b);
	prompt_init(from, 1, 10, 0);
	prompt_init(to, 1, 10, 30);
	for (uint32_t i = 0; i < 10; i++) {
		fill(b, i, 1, i);
	}
	assert_int_equal(save_now(b, from, &saved), KVC_OK);
	assert_int_equal(saved.blocks, 10);
	assert_true(saved.copied);
}

/* ---- another client -------------------------------------------------------------------------- */

static kvc_t *other_client(const bench_t *b, const prompt_t *p, kvc_key_t *keys, kvc_space_t **p_space)
{
	const kvc_config_t config = {.struct_size = sizeof config, .socket = b->rig.socket};
	kvc_identity_t same = identity;
	char text[KVK_LAYOUT_TEXT_MAX];
	uint32_t n;
	kvc_t *kvc;

	assert_int_equal(kvk_layout_format(&layout, text, sizeof text), KV_OK);
	same.hash_tokens = TOKENS;
	same.layout = text;
	assert_int_equal(kvc_attach(&config, &kvc), KVC_OK);
	assert_int_equal(kvc_space_open(kvc, &same, p_space), KVC_OK);
	assert_int_equal(
		kvc_keys_of(*p_space,
			    &(kvc_prompt_t){sizeof(kvc_prompt_t), p->tokens, p->prefix.n_tokens, p->prefix.salt}, keys,
			    MAX_JOB, &n),
		KVC_OK);
	assert_int_equal(n, p->prefix.n_tokens / TOKENS);

	return kvc;
}

void keys_of(const bench_t *b, const prompt_t *p, kvc_key_t *keys)
{
	kvc_space_t *space;

	kvc_detach(other_client(b, p, keys, &space));
}

void damage(const bench_t *b, const prompt_t *p, uint32_t block)
{
	kvc_key_t keys[MAX_JOB];
	kvc_space_t *space;
	kvc_lease_t *lease;
	const void *data;
	kvc_t *kvc = other_client(b, p, keys, &space);

	assert_int_equal(kvc_acquire(space, keys, block + 1, 0, 0, &lease), KVC_OK);
	assert_int_equal(kvc_lease_wait(lease, block + 1, JOBS_MS), KVC_OK);
	assert_int_equal(kvc_lease_block(lease, block, &data, NULL), KVC_OK);
	((uint8_t *)(uintptr_t)data)[1234] ^= 0x10;
	kvc_release(&lease, 1);
	kvc_detach(kvc);
}
