#include "common/await.h"

#include "kv/shm.h"
#include "kv/status.h"

#define GRACE_NS UINT64_C(200000000) /* in addition to the 50 ms after which a match calls it stale */

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

int kvx_silent_too_long(uint64_t *p_since, int silent, uint64_t now)
{
	*p_since = !silent ? 0 : *p_since ? *p_since : now;

	return silent && now - *p_since > GRACE_NS;
}
