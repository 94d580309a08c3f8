/* Leases: wait, copy out verified, give back. */
#include "impl.h"

/* ---- the objects ----------------------------------------------------------------------------- */

kvc_lease_t *kvc_lease_new(kvc_space_t *space)
{
	kvc_t *kvc = space->kvc;
	kvc_lease_t *lease = kvc->free_leases;

	if (lease) {
		kvc->free_leases = lease->next;
		memset(lease, 0, sizeof *lease);
	} else {
		lease = kv_alloc(&kvc->env, sizeof *lease);
		if (!lease) {
			return NULL;
		}
	}
	lease->space = space;
	lease->serial = ++kvc->serial;
	atomic_store(&lease->status, KV_PENDING);
	lease->prev = kvc->last_lease;
	if (kvc->last_lease) {
		kvc->last_lease->next = lease;
	} else {
		kvc->leases = lease;
	}
	kvc->last_lease = lease;
	kvc->leases_open++;

	return lease;
}

void kvc_lease_bind(kvc_lease_t *lease)
{
	kvc_lease_t **bucket = &lease->space->kvc->lease_ids[lease->grant.id % KVC_ID_BUCKETS];

	lease->chain = *bucket;
	*bucket = lease;
}

static void unbind_lease(kvc_t *kvc, const kvc_lease_t *lease)
{
	kvc_lease_t **link = &kvc->lease_ids[lease->grant.id % KVC_ID_BUCKETS];

	while (*link && *link != lease) {
		link = &(*link)->chain;
	}
	if (*link) {
		*link = lease->chain;
	}
}

void kvc_lease_forget(kvc_lease_t *lease)
{
	kvc_t *kvc = lease->space->kvc;

	if (lease->grant.map) {
		unbind_lease(kvc, lease);
	}
	kvc_grant_drop(&lease->grant);
	if (lease->prev) {
		lease->prev->next = lease->next;
	} else {
		kvc->leases = lease->next;
	}
	if (lease->next) {
		lease->next->prev = lease->prev;
	} else {
		kvc->last_lease = lease->prev;
	}
	kvc->leases_open--;
	lease->next = kvc->free_leases;
	kvc->free_leases = lease;
}

void kvc_leases_destroy(kvc_t *kvc)
{
	while (kvc->leases) {
		kvc_lease_forget(kvc->leases);
	}
	while (kvc->free_leases) {
		kvc_lease_t *lease = kvc->free_leases;

		kvc->free_leases = lease->next;
		kv_free(&kvc->env, lease);
	}
}

void kvc_leases_of_space_end(kvc_space_t *space)
{
	kvc_lease_t *next;

	for (kvc_lease_t *lease = space->kvc->leases; lease; lease = next) {
		next = lease->next;
		if (lease->space == space) {
			kvc_release(&lease, 1);
		}
	}
}

/* ---- looking at one -------------------------------------------------------------------------- */

kvc_status_t kvc_lease_state(const kvc_lease_t *lease)
{
	kvc_status_t status = kvc_check_process(lease->space->kvc);

	/* In a forked child the lease area is not mapped. */
	if (status == KVC_OK) {
		status = atomic_load_explicit(&lease->status, memory_order_acquire);
	}
	if (status != KVC_OK || kvc_grant_check(&lease->grant) == KV_OK) {
		return status;
	}
	if (!lease->imported && !atomic_load(&lease->grant.map->dead) &&
	    kv_now_ns(&lease->space->kvc->env) >= atomic_load(&lease->expires_ns)) {
		return kvc_fail(KV_ERR_EXPIRED, "lease %llu has outlived its time; acquire again",
				(unsigned long long)lease->grant.id);
	}

	return kvc_fail(KV_ERR_REVOKED, "lease %llu was revoked; acquire again", (unsigned long long)lease->grant.id);
}

uint32_t kvc_lease_n(const kvc_lease_t *lease)
{
	return lease->n;
}

kvc_status_t kvc_lease_rest_status(const kvc_lease_t *lease)
{
	kvc_status_t rest = atomic_load_explicit(&lease->rest, memory_order_acquire);
	const kv_lease_header_t *header = lease->grant.header;
	uint32_t n;

	if (rest != KVC_OK || atomic_load_explicit(&lease->status, memory_order_acquire) != KV_OK ||
	    kvc_check_process(lease->space->kvc) != KVC_OK) {
		return rest;
	}
	/* Only the taker is told; the others see that the daemon has cut the lease short. What comes before the cut
	 * comes yet. */
	n = atomic_load_explicit(&header->n, memory_order_acquire);
	if (n < lease->n - lease->skip &&
	    atomic_load_explicit(&header->ready, memory_order_acquire) >= lease->skip + n &&
	    kvc_grant_check(&lease->grant) == KV_OK) {
		rest = (kvc_status_t)KV_ERR_IO;
	}

	return rest;
}

uint32_t kvc_lease_ready(const kvc_lease_t *lease)
{
	uint32_t ready;

	if (atomic_load_explicit(&lease->status, memory_order_acquire) != KV_OK ||
	    kvc_check_process(lease->space->kvc) != KVC_OK) {
		return lease->skip;
	}
	ready = atomic_load_explicit(&lease->grant.header->ready, memory_order_acquire);
	if (atomic_load_explicit(&lease->grant.header->id, memory_order_acquire) != lease->grant.id ||
	    ready < lease->skip) {
		return lease->skip;
	}

	return ready < lease->n ? ready : lease->n;
}

uint32_t kvc_lease_skip(const kvc_lease_t *lease)
{
	return lease->skip;
}

uint32_t kvc_lease_disk(const kvc_lease_t *lease)
{
	return lease->disk;
}

void kvc_lease_notice(kvc_t *kvc, const kv_msg_lease_done_t *msg)
{
	kvc_lease_t *lease = kvc->lease_ids[msg->lease % KVC_ID_BUCKETS];

	/* Views of it in this process, too. */
	for (; lease; lease = lease->chain) {
		if (lease->grant.id == msg->lease && !atomic_load(&lease->grant.map->dead)) {
			atomic_store_explicit(&lease->rest, msg->status, memory_order_release);
		}
	}
}

kvc_status_t kvc_lease_wait(kvc_lease_t *lease, uint32_t n, uint32_t timeout_ms)
{
	kvc_t *kvc = lease->space->kvc;
	uint64_t now = kv_now_ns(&kvc->env);
	uint64_t deadline = kvc_deadline(kvc, timeout_ms), spin_until = now + kvc->spin_ns;
	uint64_t nap = UINT64_C(50000);
	kvc_status_t status = kvc_check_process(kvc);

	if (status != KVC_OK) {
		return status;
	}
	for (;;) {
		const kvc_status_t rest = kvc_lease_rest_status(lease);

		status = kvc_lease_state(lease);
		if (status != KVC_OK && status != KVC_PENDING) {
			return status;
		}
		if (status == KVC_OK && n > lease->n) {
			return kvc_fail(KV_ERR_ARG, "the lease has %u blocks, not %u", lease->n, n);
		}
		if (status == KVC_OK && kvc_lease_ready(lease) >= n) {
			return KVC_OK;
		}
		if (rest != KVC_OK) {
			return kvc_fail((kv_status_t)rest, "only %u of %u blocks could be read: %s",
					kvc_lease_ready(lease), n, kvc_status_text(rest));
		}
		now = kv_now_ns(&kvc->env);
		if (now >= deadline) {
			return kvc_fail(KV_ERR_TIMEOUT, "%u of %u blocks are ready so far; wait again or recompute",
					kvc_lease_ready(lease), n);
		}
		if (now < spin_until) {
			kvc_pause();
		} else {
			/* `ready` moves without a message until all is there: look again soon. */
			kvc_sleep(kvc, deadline - now < nap ? deadline - now : nap);
			nap = nap < UINT64_C(1000000) ? nap * 2 : nap;
		}
		kvc_pump(kvc);
	}
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Of block i, if it is ready. */
static kvc_status_t find_block(const kvc_lease_t *lease, uint32_t i, kvc_block_memory_t *source)
{
	const kvc_status_t rest = kvc_lease_rest_status(lease);
	kv_status_t found;
	kvc_status_t status = kvc_check_process(lease->space->kvc);

	if (status == KVC_OK) {
		status = kvc_lease_state(lease);
	}
	if (status != KVC_OK) {
		return status;
	}
	if (i < lease->skip || i >= lease->n) {
		return kvc_fail(KV_ERR_ARG, "block %u is not in the lease's [%u, %u)", i, lease->skip, lease->n);
	}
	if (i >= kvc_lease_ready(lease)) {
		return rest == KVC_OK ? KVC_PENDING : kvc_fail((kv_status_t)rest, "block %u could not be read", i);
	}
	found = kvc_slab_find(lease->grant.map, &lease->group->geometry, kvc_grant_slot(&lease->grant, i - lease->skip),
			      source);
	if (found != KV_OK) {
		return kvc_fail(found, "block %u lies in memory this process does not have: %s", i,
				kv_status_text(found));
	}

	return KVC_OK;
}

kvc_status_t kvc_lease_block(const kvc_lease_t *lease, uint32_t i, const void **p_data, const uint64_t **p_leaves)
{
	kvc_block_memory_t source = {0};
	const kvc_status_t status = find_block(lease, i, &source);

	if (status == KVC_OK && p_data) {
		*p_data = source.data;
	}
	if (status == KVC_OK && p_leaves) {
		*p_leaves = source.leaves;
	}

	return status;
}

static void bad_push(kvc_t *kvc, const kvc_lease_t *lease, uint32_t i)
{
	kvc_bad_t bad = {
		.incarnation = lease->grant.map->incarnation, .lease = lease->grant.id, .index = i - lease->skip};

	while (atomic_exchange_explicit(&kvc->bad_lock, 1u, memory_order_acquire)) {
		kvc_pause();
	}
	/* A full queue drops the report: the next reader of that block makes another. */
	if (kvc->bad_len < KVC_MAX_BAD) {
		kvc->bad[kvc->bad_len++] = bad;
	}
	atomic_store_explicit(&kvc->bad_lock, 0u, memory_order_release);
}

/* Block i, whose memory and digests are given. */
static kvc_status_t read_block(kvc_lease_t *lease, uint32_t i, const kvc_block_memory_t *source, void *dst)
{
	kvc_t *kvc = lease->space->kvc;
	kvc_status_t status;
	kv_status_t copied;

	if (source->on_device) {
		return kvc_fail(KV_ERR_UNSUPPORTED, "block %u lies in memory of a GPU, which a CPU does not read", i);
	}
	copied = kvc_copy_checked(&lease->group->geometry, dst, source->data, source->leaves);

	/* Taken away meanwhile: what was read may be anything; the block is not to blame. */
	status = kvc_lease_state(lease);
	if (status == KVC_OK && copied != KV_OK) {
		kvc_count(&kvc->counters.corrupt, 1);
		bad_push(kvc, lease, i);
		return kvc_fail(KV_ERR_CORRUPT,
				"block %u does not match its digest; it has been reported, recompute it", i);
	}

	return status;
}

kvc_status_t kvc_lease_read(kvc_lease_t *lease, uint32_t first, uint32_t count, void *const *dst, uint32_t *p_bad)
{
	kvc_t *kvc = lease->space->kvc;

	if (!dst || first < lease->skip || count > UINT32_MAX - first) {
		return kvc_fail(KV_ERR_ARG, "kvc_lease_read: blocks from %u on, and the lease begins with block %u",
				first, lease->skip);
	}
	for (uint32_t i = 0; i < count; i++) {
		kvc_block_memory_t source = {0};
		kvc_status_t status = find_block(lease, first + i, &source);

		if (status == KVC_OK) {
			status = read_block(lease, first + i, &source, dst[i]);
		}
		if (status != KVC_OK) {
			if (p_bad) {
				*p_bad = first + i;
			}
			return status;
		}
	}
	kvc_count(&kvc->counters.blocks_read, count);
	kvc_count(&kvc->counters.bytes_read, (uint64_t)count * lease->group->geometry.block_bytes);

	return KVC_OK;
}

kvc_status_t kvc_lease_report_bad(kvc_lease_t *lease, uint32_t i)
{
	kvc_status_t status = kvc_check_process(lease->space->kvc);

	if (status == KVC_OK) {
		status = kvc_lease_state(lease);
	}
	if (status != KVC_OK) {
		return status;
	}
	if (i < lease->skip || i >= lease->n) {
		return kvc_fail(KV_ERR_ARG, "block %u is not in the lease's [%u, %u)", i, lease->skip, lease->n);
	}
	kvc_count(&lease->space->kvc->counters.corrupt, 1);
	bad_push(lease->space->kvc, lease, i);
	kvc_lease_flush(lease->space->kvc);

	return KVC_OK;
}

/* ---- giving back ----------------------------------------------------------------------------- */

static void bad_flush(kvc_t *kvc)
{
	kvc_bad_t bad[KVC_MAX_BAD];
	uint32_t count;

	while (atomic_exchange_explicit(&kvc->bad_lock, 1u, memory_order_acquire)) {
		kvc_pause();
	}
	count = kvc->bad_len;
	memcpy(bad, kvc->bad, count * sizeof bad[0]);
	kvc->bad_len = 0;
	atomic_store_explicit(&kvc->bad_lock, 0u, memory_order_release);

	for (uint32_t i = 0; i < count; i++) {
		kv_msg_bad_block_t msg = {.lease = bad[i].lease, .index = bad[i].index};

		if (bad[i].incarnation == kvc->incarnation) {
			kvc_send_oneway(kvc, KV_CODE_BAD_BLOCK, &msg);
		}
	}
}

void kvc_lease_flush(kvc_t *kvc)
{
	kv_msg_release_t msg = {
		.leases = {(const uint8_t *)kvc->backlog, kvc->backlog_len * (uint32_t)sizeof *kvc->backlog}};
	kvc_ask_t ask = {.code = KV_CODE_RELEASE, .msg = &msg, .fd = -1};

	/* A forked child shares the socket: not a byte of its goes there. */
	if (kvc->state != KVC_READY || kvc_check_process(kvc) != KVC_OK) {
		return;
	}
	/* A bad block is named by its lease, so it is reported first. */
	bad_flush(kvc);
	if (kvc->backlog_len && kvc_send(kvc, &ask) == KV_OK) {
		kvc->backlog_len = 0;
	}
}

static void release_one(kvc_lease_t *lease)
{
	kvc_t *kvc = lease->space->kvc;

	if (atomic_load(&lease->status) == KV_PENDING) {
		kvc_forget_requests(kvc, lease);
	}
	if (lease->grant.map && !lease->imported && !atomic_load(&lease->grant.map->dead)) {
		if (kvc->backlog_len == KVC_MAX_BACKLOG) {
			kvc_lease_flush(kvc);
		}
		/* Still full: the daemon does not listen; the lease ends by its time to live. */
		if (kvc->backlog_len < KVC_MAX_BACKLOG) {
			kvc->backlog[kvc->backlog_len++] = lease->grant.id;
		}
	}
	kvc_lease_forget(lease);
}

void kvc_release(kvc_lease_t *const *leases, uint32_t count)
{
	kvc_t *kvc = NULL;

	for (uint32_t i = 0; leases && i < count; i++) {
		if (!leases[i]) {
			continue;
		}
		if (kvc && kvc != leases[i]->space->kvc) {
			kvc_lease_flush(kvc);
		}
		kvc = leases[i]->space->kvc;
		release_one(leases[i]);
	}
	if (kvc && kvc_check_process(kvc) == KVC_OK) {
		kvc_lease_flush(kvc);
		kvc_map_reap(kvc);
	}
}

static void on_renewed(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	kvc_lease_t *lease = object;

	if (answer->status == KV_OK) {
		atomic_store(&lease->expires_ns,
			     kv_now_ns(&kvc->env) + answer->reply->renew_reply.ttl_ms * KVC_NS_A_MS);
	}
}

kvc_status_t kvc_lease_renew(kvc_lease_t *lease, uint32_t ttl_ms)
{
	kv_msg_renew_t msg = {.ttl_ms = ttl_ms};
	kvc_ask_t ask = {.code = KV_CODE_RENEW, .msg = &msg, .done = on_renewed, .object = lease, .fd = -1};
	kvc_status_t status = kvc_space_usable(lease->space);
	kv_status_t sent;

	if (status == KVC_OK) {
		status = kvc_lease_state(lease);
	}
	if (status != KVC_OK) {
		return status;
	}
	msg.lease = lease->grant.id;
	sent = kvc_send(lease->space->kvc, &ask);
	if (sent != KV_OK) {
		return kvc_fail(sent, "RENEW could not be sent: %s", kv_status_text(sent));
	}

	return KVC_OK;
}
