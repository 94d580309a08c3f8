/* Time, and the checks of a universe. */
#include "universe.h"

#include "core/handover/handover.h"

/* ---- time and looking ------------------------------------------------------------------------ */

void u_tick(universe_t *u, uint32_t times)
{
	for (uint32_t i = 0; i < times; i++) {
		kv_test_advance(&u->env, 1000000);
		(void)kvd_core_tick(u->core);
	}
}

static int is_calm(const universe_t *u)
{
	const kvd_core_t *core = u->core;

	return core->dead_nodes.head == KVD_NONE && core->dead_trees == KVD_NONE && core->fills.head == KVD_NONE &&
	       core->ix.queue.head == KVD_NONE && core->reads + core->writes == 0 && !core->flush_busy &&
	       (core->flush_due_ns == 0 || core->durable_owed == 0) && core->run_puts.head == KVD_NONE &&
	       core->ix.unheld.head == KVD_NONE && !core->showing && core->outstanding == 0 &&
	       core->handover_sweep == 0 && core->withdrawals == NULL && !kvd_handovers_are_due(core);
}

void u_settle(universe_t *u)
{
	for (uint32_t i = 0; i < 5000 && !is_calm(u); i++) {
		if (kvd_write_behind_paused(u->core)) {
			kv_test_advance(&u->env, u->core->write_after_ns - u->core->now_ns);
		}
		u_tick(u, 1);
	}
	assert_true(is_calm(u));
	u_tick(u, 2);
}

static uint64_t notice_id(const u_notice_t *notice)
{
	switch (notice->code) {
	case KV_CODE_LEASE_DONE:
		return notice->msg.lease_done.lease;
	case KV_CODE_PUT_DONE:
		return notice->msg.put_done.put;
	case KV_CODE_HANDOVER:
		return notice->msg.handover.number;
	case KV_CODE_HANDOVER_ROOM:
		return 0;
	default:
		return notice->msg.durable.put;
	}
}

const u_notice_t *u_find_notice(const universe_t *u, uint16_t code, uint64_t id)
{
	for (uint32_t i = 0; i < u->notice_count; i++) {
		if (u->notices[i].code == code && notice_id(&u->notices[i]) == id) {
			return &u->notices[i];
		}
	}

	return NULL;
}

uint32_t u_count_notices(const universe_t *u, uint16_t code, uint64_t id)
{
	uint32_t count = 0;

	for (uint32_t i = 0; i < u->notice_count; i++) {
		count += u->notices[i].code == code && notice_id(&u->notices[i]) == id ? 1 : 0;
	}

	return count;
}

int u_lease_alive(const u_lease_t *lease)
{
	const kv_lease_header_t *header = lease->id != 0 ? u_header(lease->member, lease->offset) : NULL;

	return header && atomic_load(&header->id) == lease->id && atomic_load(&header->state) == KV_LEASE_ACTIVE;
}

void u_lease_verify(universe_t *u, const u_lease_t *lease)
{
	const kv_lease_header_t *header;
	const uint32_t *slots;

	if (!u_lease_alive(lease)) {
		return;
	}
	header = u_header(lease->member, lease->offset);
	slots = kv_lease_slots(header);
	assert_true(header->ready <= header->n + lease->skip && header->n + lease->skip <= lease->n);
	for (uint32_t i = lease->skip; i < header->ready; i++) {
		/* A slot that is free is another block's soon. */
		kv_slot_t local;
		const fake_tier_t *fake = u_fake_of(u, slots[i - lease->skip], &local);

		assert_true((u->pool && fake == &u->cpu) || fake->slots[local].state != KVS_FREE);
		if (*u_bytes(u, slots[i - lease->skip]) != u_word(&lease->keys[i], lease->group)) {
			fail_msg("lease %llu block %u: wrong bytes", (unsigned long long)lease->id, i);
		}
	}
}

uint8_t u_mirror_tiers(const universe_t *u, uint32_t ns, const kv_key_t *key)
{
	const kv_mirror_header_t *header = u->mirror[ns];
	const kv_mirror_bucket_t *buckets = (const void *)((const uint8_t *)u->mirror[ns] + header->buckets_offset);
	uint64_t home = kv_key_hash(key);

	for (uint32_t d = 0; d < KV_MIRROR_MAX_PROBE; d++) {
		const kv_mirror_bucket_t *bucket = &buckets[(home + d) & (header->bucket_count - 1)];

		assert_int_equal(bucket->seq & 1, 0);
		for (uint32_t way = 0; way < KV_MIRROR_WAYS; way++) {
			if (bucket->entry[way].tiers && bucket->entry[way].group == u->group &&
			    kv_key_equal(&bucket->entry[way].key, key)) {
				return bucket->entry[way].tiers;
			}
		}
		if (bucket->entry[0].overflow == 0) {
			return 0;
		}
	}

	return 0;
}

/* Nobody is told of private blocks, and the mirror has none. */
static void count_told(const universe_t *u, const kvd_node_t *node, uint64_t in[2])
{
	if (node->flags & KVD_NODE_PRIVATE) {
		const kvd_block_t *block = kvd_block_at(&u->core->ix, node->ids[0]);

		assert_true(node->len == 1 && node->child_count == 0 && node->n[KVD_DISK] == 0);
		assert_int_equal(block->disk.slot, KV_SLOT_NONE);
		return;
	}
	for (uint32_t i = 0; i < node->len; i++) {
		const kvd_block_t *block = kvd_block_at(&u->core->ix, node->ids[i]);

		for (uint32_t t = 0; t < 2 && !(block->flags & KVD_EVENT_PENDING); t++) {
			in[t] += i < node->n[t] ? 1 : 0;
		}
	}
}

/* A class knows how many blocks its pool has. */
static void check_classes(const universe_t *u)
{
	for (uint32_t t = 0; t < KVD_TIERS; t++) {
		uint64_t ordered = 0, in = 0;

		for (uint32_t c = 0; c < u->core->class_count; c++) {
			ordered += u->core->classes[c].order[t].blocks;
		}
		for (uint32_t i = 0; i < u->core->ix.trees.made; i++) {
			const kvd_tree_t *tree = kvd_tree_at(&u->core->ix, i);

			in += tree->live ? tree->in[t] : 0;
		}
		assert_int_equal(ordered, in);
	}
}

void universe_check(universe_t *u)
{
	uint64_t told[2] = {0, 0}, in[2] = {0, 0};
	char why[256] = "";

	for (uint32_t i = 0; i < kvd_check_count; i++) {
		if (!kvd_checks[i].run(u->core, why, sizeof why)) {
			fail_msg("check %s: %s", kvd_checks[i].name, why);
		}
	}
	for (uint32_t n = 0; n < 2; n++) {
		for (kvd_resource_t what = 0; what < KVD_SHARES; what++) {
			assert_true(kvd_share_used(u->core, u->ns[n], what) <= kvd_share_max(u->core, u->ns[n], what));
		}
	}
	check_classes(u);
	assert_int_equal(u->ledger_records, u->core->leases.used + u->core->puts.used);
	if (u->events_bad) {
		fail_msg("an event is wrong: %s", u->events_bad);
	}
	for (uint32_t i = 0; i < u->event_cap; i++) {
		told[0] += u->events[i].media & (KV_TIER_CPU | KV_TIER_GPU) ? 1 : 0;
		told[1] += u->events[i].media & KV_TIER_DISK ? 1 : 0;
	}
	for (uint32_t t = 0; t < u->core->ix.trees.made; t++) {
		const kvd_tree_t *tree = kvd_tree_at(&u->core->ix, t);

		for (uint32_t n = tree->live && tree->ns != KVD_NONE ? tree->children.head : KVD_NONE; n != KVD_NONE;
		     n = kvd_index_next_run(&u->core->ix, n)) {
			count_told(u, kvd_node_at(&u->core->ix, n), in);
		}
	}
	if (told[0] != in[0] || told[1] != in[1]) {
		fail_msg("events say CPU %llu DISK %llu, the index has %llu and %llu", (unsigned long long)told[0],
			 (unsigned long long)told[1], (unsigned long long)in[0], (unsigned long long)in[1]);
	}
}

void u_expire_handovers(universe_t *u)
{
	kv_test_advance(&u->env, U_HANDOVER_TTL_NS + 100000000u);
	u_tick(u, 2);
	while (u->core->handovers.used > 0) { /* one is without a consumer only since the last tick */
		kv_test_advance(&u->env, U_HANDOVER_TTL_NS + 100000000u);
		u_tick(u, 2);
	}
}

void universe_leave(universe_t *u)
{
	universe_check(u);
	for (uint32_t i = 0; i < U_MEMBERS; i++) {
		if (u->members[i].id) {
			u_dead(u, &u->members[i]);
		}
	}
	u->disk.hold = 0;
	u_expire_handovers(u);
	u_settle(u);
	universe_check(u);
	assert_int_equal(u->core->handovers.used, 0);
	assert_int_equal(u->core->pins.used + u->core->leases.used + u->core->puts.used + u->core->ios.used, 0);
	assert_int_equal(u->core->refs, 0);
}
