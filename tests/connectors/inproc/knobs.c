#include "connectors/inproc/knobs.h"
#include "engine/check.h"
#include "kvc.h"

#include "kv/shm.h"
#include "kvk/move.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

knobs_t knobs;

void knobs_reset(void)
{
	memset(&knobs, 0, sizeof knobs);
	atomic_store(&knobs.ready, NONE);
	atomic_store(&knobs.revoke_on, NONE);
	atomic_store(&knobs.grant, NONE);
}

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
	if (n > 0 && atomic_load(&knobs.contended) > 0) {
		atomic_fetch_sub(&knobs.contended, 1);
		match->n = match->n_cpu = 0;
		match->why = KV_WHY_CONTENDED;
	}
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
