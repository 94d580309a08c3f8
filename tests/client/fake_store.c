/* Blocks, leases and puts of the fake daemon: arrays, searched from end to end. */
#include "fake_impl.h"

kv_lease_header_t *fake_claim_header(fake_t *fake, const fake_claim_t *claim)
{
	return (kv_lease_header_t *)(fake->leases.base + 4096u + (uint32_t)(claim - fake->claims) * FAKE_LEASE_STRIDE);
}

static kv_slot_t block_find(fake_t *fake, const kv_key_t *key, uint32_t group)
{
	for (uint32_t i = 0; i < FAKE_SLOTS; i++) {
		if (fake->blocks[i].state == 2 && fake->blocks[i].group == group &&
		    kv_key_equal(&fake->blocks[i].key, key)) {
			return i;
		}
	}

	return KV_SLOT_NONE;
}

static int block_known(fake_t *fake, const kv_key_t *key)
{
	for (uint32_t i = 0; i < FAKE_SLOTS; i++) {
		if (fake->blocks[i].state && kv_key_equal(&fake->blocks[i].key, key)) {
			return 1;
		}
	}

	return 0;
}

static fake_claim_t *claim_new(fake_t *fake, uint32_t session, uint32_t kind, uint32_t n)
{
	for (uint32_t i = 0; i < FAKE_CLAIMS; i++) {
		fake_claim_t *claim = &fake->claims[i];
		kv_lease_header_t *header = fake_claim_header(fake, claim);

		if (claim->id) {
			continue;
		}
		*claim = (fake_claim_t){.id = ++fake->next_id, .kind = kind, .n = n, .session = session};
		header->incarnation = fake->incarnation;
		header->kind = kind;
		header->skip = 0;
		header->space = 0;
		atomic_store(&header->n, n);
		atomic_store(&header->ready, 0);
		atomic_store(&header->id, claim->id);
		atomic_store(&header->state, KV_LEASE_ACTIVE);
		return claim;
	}

	return NULL;
}

static fake_claim_t *claim_find(fake_t *fake, uint64_t id)
{
	FAKE_EACH_CLAIM(fake, claim, 0) {
		if (claim->id == id) {
			return claim;
		}
	}

	return NULL;
}

static void claim_end(fake_t *fake, fake_claim_t *claim)
{
	atomic_store(&fake_claim_header(fake, claim)->state, KV_LEASE_REVOKED);
	claim->id = 0;
}

static uint64_t claim_offset(fake_t *fake, const fake_claim_t *claim)
{
	uint64_t offset = (uint64_t)((uint8_t *)fake_claim_header(fake, claim) - fake->leases.base);

	return atomic_load(&fake->knobs.lease_outside) ? FAKE_LEASE_BYTES - 32u : offset;
}

/* Position of the ladder's key i, 1-based. */
static uint32_t rung(uint32_t n, uint32_t i)
{
	uint32_t step = i ? 1u << (i - 1) : 0;

	return step < n - 1 || i == 0 ? n - step : 1;
}

/* Blocks [skip, n) of the lease into slots[]; how many blocks the lease has, skip included. */
static uint32_t ladder_climb(fake_t *fake, const kv_msg_acquire_t *ask, kv_slot_t *slots)
{
	const kv_key_t *ladder = (const kv_key_t *)(const void *)ask->ladder.data;
	uint32_t count = ask->ladder.len / KV_KEY_BYTES, i = 0, n;
	kv_slot_t slot = KV_SLOT_NONE;

	while (i < count && slot == KV_SLOT_NONE) {
		slot = block_find(fake, &ladder[i++], 0);
	}
	n = slot == KV_SLOT_NONE ? 0 : rung(ask->n, i - 1);
	for (uint32_t at = n; at > ask->skip && slot != KV_SLOT_NONE; at--) {
		slots[at - 1 - ask->skip] = slot;
		slot = block_find(fake, &fake->blocks[slot].parent, 0);
	}

	return n;
}

/* The same of a group other than 0, whose blocks are unchained here: all or nothing. */
static uint32_t all_or_nothing(fake_t *fake, const kv_msg_acquire_t *ask, kv_slot_t *slots)
{
	const kv_key_t *keys = (const kv_key_t *)(const void *)ask->ladder.data;
	uint32_t count = ask->ladder.len / KV_KEY_BYTES;

	for (uint32_t i = 0; i < count; i++) {
		slots[i] = block_find(fake, &keys[i], ask->group);
		if (slots[i] == KV_SLOT_NONE) {
			return 0;
		}
	}

	return count == ask->n - ask->skip ? ask->n : 0;
}

kv_status_t fake_acquire(fake_t *fake, uint32_t session, const kv_msg_acquire_t *ask, kv_msg_acquire_reply_t *reply)
{
	kv_slot_t slots[FAKE_SLOTS];
	fake_claim_t *claim;
	kv_lease_header_t *header;
	uint32_t n;

	if (ask->epoch != fake->epoch) {
		return KV_ERR_STALE_EPOCH;
	}
	if (ask->n - ask->skip > FAKE_SLOTS) {
		return KV_ERR_ARG;
	}
	*reply = (kv_msg_acquire_reply_t){.n = ask->skip, .why = KV_WHY_ABSENT};
	n = ask->group ? all_or_nothing(fake, ask, slots) : ladder_climb(fake, ask, slots);
	atomic_store(&fake->seen.ladder, ask->ladder.len / KV_KEY_BYTES);
	if (n <= ask->skip) {
		return KV_OK;
	}
	claim = claim_new(fake, session, KV_LEASE_READ, n - ask->skip);
	if (!claim) {
		return KV_ERR_LIMIT;
	}
	header = fake_claim_header(fake, claim);
	header->skip = ask->skip;
	memcpy(header + 1, slots, (n - ask->skip) * sizeof slots[0]);
	reply->lease = claim->id;
	reply->n = n;
	reply->ready = atomic_load(&fake->knobs.lazy_ready) ? ask->skip : n;
	reply->n_disk = n - reply->ready;
	reply->offset = claim_offset(fake, claim);
	reply->ttl_ms = ask->ttl_ms ? ask->ttl_ms : 60000;
	reply->why = n < ask->n ? KV_WHY_ABSENT : KV_WHY_NONE;
	atomic_store(&header->ready, reply->ready);

	return KV_OK;
}

kv_status_t fake_release(fake_t *fake, const kv_msg_release_t *ask, kv_msg_release_reply_t *reply)
{
	*reply = (kv_msg_release_reply_t){0};
	for (uint32_t i = 0; i < ask->leases.len / 8u; i++) {
		uint64_t id;
		fake_claim_t *claim;

		memcpy(&id, ask->leases.data + 8u * i, sizeof id);
		claim = claim_find(fake, id);
		if (claim) {
			claim_end(fake, claim);
			reply->released++;
		}
	}
	atomic_fetch_add(&fake->seen.released_ids, ask->leases.len / 8u);

	return KV_OK;
}

kv_status_t fake_put_start(fake_t *fake, uint32_t session, const kv_msg_put_start_t *ask,
			   kv_msg_put_start_reply_t *reply)
{
	const kv_key_t *keys = (const kv_key_t *)(const void *)ask->keys.data;
	uint32_t n = ask->keys.len / KV_KEY_BYTES, limit = atomic_load(&fake->knobs.slots), next = 0;
	fake_claim_t *claim;
	kv_slot_t *slots;

	if (ask->epoch != fake->epoch) {
		return KV_ERR_STALE_EPOCH;
	}
	if (!kv_key_is_zero(&ask->parent) && !block_known(fake, &ask->parent)) {
		return KV_ERR_NO_PARENT;
	}
	n = limit && n > limit ? limit : n;
	n = n > (FAKE_LEASE_STRIDE - 64u) / 4u ? (FAKE_LEASE_STRIDE - 64u) / 4u : n;
	*reply = (kv_msg_put_start_reply_t){.n = n};
	claim = claim_new(fake, session, KV_LEASE_PUT, n);
	if (!claim) {
		return KV_ERR_LIMIT;
	}
	slots = (kv_slot_t *)(fake_claim_header(fake, claim) + 1);
	for (uint32_t i = 0; i < n; i++) {
		slots[i] = KV_SLOT_NONE;
		if (block_find(fake, &keys[i], ask->group) != KV_SLOT_NONE) {
			reply->already++;
			continue;
		}
		while (next < FAKE_SLOTS && fake->blocks[next].state) {
			next++;
		}
		if (next == FAKE_SLOTS) {
			reply->n = i;
			break;
		}
		fake->blocks[next] = (fake_block_t){.key = keys[i],
						    .parent = i ? keys[i - 1] : ask->parent,
						    .group = (uint8_t)ask->group,
						    .state = 1};
		slots[i] = next;
	}
	claim->n = reply->n;
	atomic_store(&fake_claim_header(fake, claim)->n, reply->n);
	claim->durable = (ask->flags & 1u) != 0;
	if (reply->already == reply->n) {
		claim_end(fake, claim);
		return KV_OK;
	}
	reply->put = claim->id;
	reply->offset = claim_offset(fake, claim);

	return KV_OK;
}

static void put_finish(fake_t *fake, fake_claim_t *claim, kv_status_t status)
{
	kv_msg_put_done_t done = {.put = claim->id, .n = status == KV_OK ? claim->n : 0, .status = status};
	kv_msg_durable_t durable = {.put = claim->id, .n = claim->n, .status = status};

	fake_notice(fake, claim->session, KV_CODE_PUT_DONE, &done, NULL, 0);
	/* Members that may still write get PUT_DONE, and answer DRAINED. */
	for (uint32_t i = 0; i < FAKE_SESSIONS && status != KV_OK; i++) {
		if (i != claim->session && fake->sessions[i].joined) {
			fake_notice(fake, i, KV_CODE_PUT_DONE, &done, NULL, 0);
		}
	}
	if (claim->durable) {
		fake_notice(fake, claim->session, KV_CODE_DURABLE, &durable, NULL, 0);
	}
	claim_end(fake, claim);
}

/* The staged digests of one block into the digest table; whole blocks become visible. */
static void take_digests(fake_t *fake, kv_slot_t slot, const uint64_t *words, uint32_t count)
{
	const fake_geometry_t *g = &fake->geometry;
	uint64_t *table = (uint64_t *)(void *)fake->digests.base + (size_t)slot * g->heads * g->leaves;
	fake_block_t *block = &fake->blocks[slot];

	/* Ranks hand in whole heads in order, or everything. */
	memcpy(table + block->words, words, count * sizeof *words);
	block->words += count;
	if (block->words == g->heads * g->leaves) {
		block->state = 2;
		(void)kvd_mirror_set(&fake->writer, &block->key, block->group, KV_TIER_CPU);
	}
}

kv_status_t fake_put_end(fake_t *fake, uint32_t session, const kv_msg_put_end_t *ask, kv_msg_put_end_reply_t *reply)
{
	fake_claim_t *claim = claim_find(fake, ask->put);
	const uint64_t *staging = (const uint64_t *)(const void *)(fake->sessions[session].member.base + 4096u +
								   FAKE_RING_RECORDS * sizeof(kv_report_t));
	const kv_slot_t *slots;
	uint32_t writable = 0, each;

	if (!claim) {
		return KV_ERR_REVOKED;
	}
	if (ask->staging > FAKE_STAGING_WORDS || ask->words > FAKE_STAGING_WORDS - ask->staging ||
	    ask->first + ask->count > claim->n) {
		return KV_ERR_ARG;
	}
	slots = kv_lease_slots(fake_claim_header(fake, claim));
	for (uint32_t i = ask->first; i < ask->first + ask->count; i++) {
		writable += slots[i] != KV_SLOT_NONE;
	}
	each = writable ? ask->words / writable : 0;
	staging += ask->staging;
	*reply = (kv_msg_put_end_reply_t){0};
	for (uint32_t i = ask->first; i < ask->first + ask->count; i++) {
		if (slots[i] != KV_SLOT_NONE) {
			take_digests(fake, slots[i], staging, each);
			staging += each;
		}
	}
	for (uint32_t i = 0; i < claim->n; i++) {
		reply->complete += slots[i] == KV_SLOT_NONE || fake->blocks[slots[i]].state == 2;
	}
	if (reply->complete == claim->n && !atomic_load(&fake->knobs.hold_puts)) {
		put_finish(fake, claim, KV_OK);
	}

	return KV_OK;
}

kv_status_t fake_put_revoke(fake_t *fake, const kv_msg_put_revoke_t *ask)
{
	fake_claim_t *claim = claim_find(fake, ask->put);
	const kv_slot_t *slots;

	if (!claim) {
		return KV_ERR_NOT_FOUND;
	}
	slots = kv_lease_slots(fake_claim_header(fake, claim));
	for (uint32_t i = 0; i < claim->n; i++) {
		if (slots[i] != KV_SLOT_NONE && fake->blocks[slots[i]].state == 1) {
			fake->blocks[slots[i]].state = 0;
		}
	}
	put_finish(fake, claim, KV_ERR_REVOKED);

	return KV_OK;
}

kv_status_t fake_explain(fake_t *fake, const kv_msg_explain_t *ask, kv_msg_explain_reply_t *reply)
{
	static uint8_t tiers[4096];
	static uint8_t leases[4096 * 4];
	const kv_key_t *keys = (const kv_key_t *)(const void *)ask->keys.data;
	uint32_t n = ask->keys.len / KV_KEY_BYTES;

	*reply = (kv_msg_explain_reply_t){.tiers = {tiers, n}, .leases = {leases, n * 4u}};
	for (uint32_t i = 0; i < n; i++) {
		tiers[i] = block_find(fake, &keys[i], ask->group) != KV_SLOT_NONE ? KV_TIER_CPU
			   : block_known(fake, &keys[i])                          ? 0x80
										  : 0;
		if (!(tiers[i] & KV_TIER_CPU)) {
			reply->why = KV_WHY_ABSENT;
		}
	}

	return KV_OK;
}

/* ---- from the test's thread ------------------------------------------------------------------ */

void fake_ready(fake_t *fake, uint32_t ready, kv_status_t done)
{
	pthread_mutex_lock(&fake->lock);
	FAKE_EACH_CLAIM(fake, claim, KV_LEASE_READ) {
		kv_msg_lease_done_t msg = {.lease = claim->id, .ready = ready, .status = done};

		atomic_store(&fake_claim_header(fake, claim)->ready, ready);
		if (done != KV_PENDING) {
			fake_notice(fake, claim->session, KV_CODE_LEASE_DONE, &msg, NULL, 0);
		}
	}
	pthread_mutex_unlock(&fake->lock);
}

void fake_cut(fake_t *fake, uint32_t n)
{
	pthread_mutex_lock(&fake->lock);
	FAKE_EACH_CLAIM(fake, claim, KV_LEASE_READ) {
		atomic_store(&fake_claim_header(fake, claim)->n, n);
	}
	pthread_mutex_unlock(&fake->lock);
}

void fake_revoke_all(fake_t *fake)
{
	pthread_mutex_lock(&fake->lock);
	FAKE_EACH_CLAIM(fake, claim, 0) {
		claim_end(fake, claim);
	}
	pthread_mutex_unlock(&fake->lock);
}

void fake_finish_puts(fake_t *fake, kv_status_t status)
{
	pthread_mutex_lock(&fake->lock);
	FAKE_EACH_CLAIM(fake, claim, KV_LEASE_PUT) {
		put_finish(fake, claim, status);
	}
	pthread_mutex_unlock(&fake->lock);
}

uint32_t fake_visible(fake_t *fake)
{
	uint32_t n = 0;

	pthread_mutex_lock(&fake->lock);
	for (uint32_t i = 0; i < FAKE_SLOTS; i++) {
		n += fake->blocks[i].state == 2;
	}
	pthread_mutex_unlock(&fake->lock);

	return n;
}

uint32_t fake_open_leases(fake_t *fake)
{
	uint32_t n = 0;

	pthread_mutex_lock(&fake->lock);
	FAKE_EACH_CLAIM(fake, claim, 0) {
		n++;
	}
	pthread_mutex_unlock(&fake->lock);

	return n;
}
