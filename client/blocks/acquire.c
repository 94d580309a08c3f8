/* Asking for leases: a ladder of keys for a group that is a chain, every key for one of unchained blocks. */
#include "impl.h"

#define KVC_LADDER_SHORT 128u /* keys that fit on the stack */

/* Keys of blocks n, n-1, n-2, n-4, ... and 1. */
static uint32_t ladder_of(const kvc_key_source_t *source, const kvc_group_t *group, uint32_t n, kv_key_t *ladder)
{
	uint32_t count = 0;

	ladder[count++] = kvc_block_key(source, group, n - 1);
	for (uint32_t step = 1; step < n - 1; step *= 2) {
		ladder[count++] = kvc_block_key(source, group, n - step - 1);
	}
	if (n > 1) {
		ladder[count++] = kvc_block_key(source, group, 0);
	}

	return count;
}

static kv_status_t take_acquire_grant(kvc_t *kvc, kvc_lease_t *lease, const kv_msg_acquire_reply_t *reply)
{
	kv_status_t status;

	lease->why = reply->why;
	if (reply->lease == 0) {
		return KV_MISS;
	}
	if (reply->n <= lease->skip || reply->n > lease->n || (lease->exact && reply->n != lease->n)) {
		return KV_ERR_PROTO;
	}
	status = kvc_grant_take(kvc, reply->lease, reply->offset, reply->n - lease->skip, KV_LEASE_READ, &lease->grant);
	if (status != KV_OK) {
		return status;
	}
	lease->n = reply->n;
	lease->disk = reply->n_disk;
	atomic_store(&lease->expires_ns, kv_now_ns(&kvc->env) + reply->ttl_ms * KVC_NS_A_MS);
	kvc_lease_bind(lease);

	return KV_OK;
}

static void on_acquired(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	kvc_lease_t *lease = object;
	kv_status_t status = answer->status;

	if (status == KV_OK) {
		status = take_acquire_grant(kvc, lease, &answer->reply->acquire_reply);
	}
	if (status == KV_MISS) {
		kvc_count(&kvc->counters.acquire_misses, 1);
	}
	if (status == KV_ERR_STALE_EPOCH) {
		kvc_space_stale(lease->space);
	}
	if (status < 0) {
		kvc_fail_request(status, answer->detail, "acquiring %u blocks", lease->n);
	}
	if (status != KV_OK) {
		lease->n = lease->skip;
	}
	atomic_store(&lease->status, status);
}

kv_key_t *kvc_reserve_keys(kvc_t *kvc, uint32_t count)
{
	if (count > kvc->ladder_cap) {
		kv_key_t *keys =
			kv_resize(&kvc->env, kvc->ladder, kvc->ladder_cap * sizeof *keys, count * sizeof *keys);

		if (!keys) {
			return NULL;
		}
		kvc->ladder = keys;
		kvc->ladder_cap = count;
	}

	return kvc->ladder;
}

/* The keys to send, in `few` or in memory kept for the next. NULL: out of memory. */
static const kv_key_t *keys_of(kvc_t *kvc, const kvc_lease_t *lease, const kvc_group_t *group,
			       const kvc_key_source_t *source, kv_key_t few[KVC_LADDER_SHORT], uint32_t *p_count)
{
	uint32_t count = lease->n - lease->skip;
	kv_key_t *keys = few;

	if (!lease->exact) {
		*p_count = ladder_of(source, group, lease->n, few);
		return few;
	}
	if (count > KVC_LADDER_SHORT) {
		keys = kvc_reserve_keys(kvc, count);
	}
	for (uint32_t i = 0; keys && i < count; i++) {
		keys[i] = kvc_block_key(source, group, lease->skip + i);
	}
	*p_count = count;

	return keys;
}

static kvc_status_t send_acquire(kvc_lease_t *lease, const kvc_group_t *group, const kvc_want_t *want)
{
	kvc_space_t *space = lease->space;
	kv_key_t few[KVC_LADDER_SHORT];
	uint32_t count = 0;
	const kv_key_t *keys = keys_of(space->kvc, lease, group, want->source, few, &count);
	kv_msg_acquire_t msg = {
		.space = atomic_load_explicit(&space->id, memory_order_relaxed),
		.epoch = atomic_load_explicit(&space->epoch, memory_order_relaxed),
		.group = group->number,
		.skip = lease->skip,
		.n = lease->n,
		.ttl_ms = want->ttl_ms,
	};
	kvc_ask_t ask = {.code = KV_CODE_ACQUIRE, .msg = &msg, .done = on_acquired, .object = lease, .fd = -1};
	kv_status_t sent;

	if (!keys) {
		return kvc_fail(KV_ERR_NOMEM, "out of memory for the keys of a lease");
	}
	msg.ladder = (kv_slice_t){keys->b, count * (uint32_t)sizeof *keys};
	sent = kvc_send(space->kvc, &ask);
	if (sent != KV_OK) {
		return kvc_fail(sent, "ACQUIRE could not be sent: %s", kv_status_text(sent));
	}
	kvc_count(&space->kvc->counters.acquires, 1);

	return KVC_OK;
}

static kvc_status_t acquire_group(kvc_space_t *space, const kvc_group_t *group, const kvc_want_t *want,
				  kvc_lease_t **p_lease)
{
	uint32_t n = want->n / group->units;
	kvc_lease_t *lease;
	kvc_status_t status;

	if (n == 0 || n > KV_MAX_BLOCKS || want->skip > n) {
		return kvc_fail(KV_ERR_ARG, "a lease on %u blocks with %u skipped: at least 1, at most %u, skip <= n",
				n, want->skip, KV_MAX_BLOCKS);
	}
	status = kvc_space_usable(space);
	if (status != KVC_OK) {
		return status;
	}
	lease = kvc_lease_new(space);
	if (!lease) {
		return kvc_fail(KV_ERR_NOMEM, "out of memory for a lease");
	}
	lease->n = n;
	lease->skip = want->skip;
	lease->group = group;
	lease->exact = group->rule != KV_RULE_FULL;
	if (lease->exact && lease->skip == n) {
		atomic_store(&lease->status, KV_MISS); /* nothing to lease, and no prefix to touch */
	} else {
		status = send_acquire(lease, group, want);
	}
	if (status != KVC_OK) {
		kvc_lease_forget(lease);
		return status;
	}
	*p_lease = lease;

	return KVC_OK;
}

kvc_status_t kvc_lease_start(kvc_space_t *space, const kvc_want_t *given, kvc_lease_t **p_lease)
{
	kvc_want_t want = {0};
	const kvc_group_t *group;

	if (!space || !given || !p_lease || given->struct_size < sizeof want || !given->source || !given->source->key) {
		return kvc_fail(KV_ERR_ARG, "kvc_lease_start: an argument is NULL or struct_size is not set");
	}
	memcpy(&want, given, sizeof want);
	group = kvc_group_find(space, want.group);
	if (!group) {
		return kvc_fail(KV_ERR_ARG, "kvc_lease_start: the space has no group %u", want.group);
	}

	return acquire_group(space, group, &want, p_lease);
}

kvc_status_t kvc_acquire_start(kvc_space_t *space, const kvc_key_t *keys, uint32_t n, uint32_t skip, uint32_t ttl_ms,
			       kvc_lease_t **p_lease)
{
	kvc_key_array_t array = {.keys = keys};
	kvc_key_source_t source = {.key = kvc_key_of_array, .ctx = &array};
	kvc_want_t want = {.n = n, .skip = skip, .ttl_ms = ttl_ms, .source = &source};

	if (!space || !keys || !p_lease) {
		return kvc_fail(KV_ERR_ARG, "kvc_acquire: an argument is NULL");
	}

	/* The first group; of most spaces there is no other. */
	return acquire_group(space, &space->groups[0], &want, p_lease);
}

static int is_acquire_answered(const void *object)
{
	return atomic_load(&((const kvc_lease_t *)object)->status) != KV_PENDING;
}

kvc_status_t kvc_acquire(kvc_space_t *space, const kvc_key_t *keys, uint32_t n, uint32_t skip, uint32_t ttl_ms,
			 kvc_lease_t **p_lease)
{
	kvc_lease_t *lease = NULL;
	kvc_status_t status = kvc_acquire_start(space, keys, n, skip, ttl_ms, &lease);

	if (status != KVC_OK || !lease) {
		return status;
	}
	/* The request's own deadline ends the wait. */
	(void)kvc_wait(space->kvc, is_acquire_answered, lease, UINT64_MAX);
	status = atomic_load(&lease->status);
	if (status != KVC_OK) {
		kvc_lease_forget(lease);
		lease = NULL;
	}
	if (status == KVC_OK || status == KVC_MISS) {
		*p_lease = lease;
	}

	return status;
}
