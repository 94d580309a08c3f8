#include "common/await.h"

#include "kv/shm.h"
#include "kv/status.h"

#define BRIEF_NS UINT64_C(1000000) /* within this time a wait is short, so the processor stays awake */
#define BRIEF_US 50u
#define GRACE_NS UINT64_C(200000000) /* in addition to the 50 ms after which a match calls it stale */
#define SLICE_US 1000u               /* later waits are longer: the heartbeat is checked this often */

uint32_t kvx_miss_reason(const kvc_space_t *space)
{
	static const kvc_key_t any;
	kvc_match_t match = {.struct_size = sizeof match};

	kvc_match(space, &any, 0, &match);

	return match.why;
}

uint32_t kvx_miss_reason_of(kvc_status_t status)
{
	switch (status) {
	case KVC_OK:
	case KVC_MISS:
		return KV_WHY_EVICTED;
	case KVC_PENDING:
	case KVC_ERR_TIMEOUT:
		return KV_WHY_TIMEOUT;
	case KVC_ERR_CORRUPT:
		return KV_WHY_CORRUPT;
	case (kvc_status_t)KV_ERR_IO:
		return KV_WHY_UNREADABLE;
	case KVC_ERR_STALE_EPOCH:
		return KV_WHY_STALE_EPOCH;
	case KVC_ERR_DAEMON_STALE:
		return KV_WHY_DAEMON_STALE;
	case KVC_ERR_CLOSED:
	case KVC_ERR_REVOKED:
	case KVC_ERR_UNREACHABLE:
		return KV_WHY_NO_DAEMON;
	default:
		return KV_WHY_NONE;
	}
}

int kvx_await_daemon(kvc_t *kvc, const kv_env_t *env, uint64_t since, uint64_t until)
{
	const uint64_t now = kv_now_ns(env), left = now < until ? (until - now) / 1000u : 0;
	const uint32_t slice = now < since + BRIEF_NS ? BRIEF_US : SLICE_US;

	return now < until && kvc_await_us(kvc, left < slice ? (uint32_t)left : slice) == KVC_OK;
}

uint32_t kvx_miss_reason_awaited(kvc_t *kvc, const kv_env_t *env, const kvc_space_t *space)
{
	const uint64_t since = kv_now_ns(env);
	uint32_t why = kvx_miss_reason(space);

	while (why == KV_WHY_DAEMON_STALE && kvx_await_daemon(kvc, env, since, since + KVX_STALE_NS)) {
		why = kvx_miss_reason(space);
	}

	return why;
}

int kvx_silent_too_long(uint64_t *p_since, int silent, uint64_t now)
{
	*p_since = !silent ? 0 : *p_since ? *p_since : now;

	return silent && now - *p_since > GRACE_NS;
}
