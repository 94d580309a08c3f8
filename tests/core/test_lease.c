/* Leases, members and spaces: every rule of who may read what, and for how long. */
#include "stage.h"

static u_lease_t lease_, lease2_;
static kv_msg_acquire_reply_t reply_;

/* n blocks of keys_ on disk only. */
static void stage_disk(uint32_t cpu, uint32_t n)
{
	stage(cpu, 256);
	for (uint32_t at = 0; at < n; at += 4) {
		assert_int_equal(u_put(&u_, m_, &space_, keys_, at, at + 4), 4);
		u_settle(&u_);
	}
	u_evict_all(&u_, KV_TIER_CPU);
	assert_int_equal(stage_free_slots(), cpu);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, n), n);
}

STAGE_TEST(p3_a_ladder_leases_the_deepest_known_rung, stage(256, 0))
{
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 100), 100);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 100, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(reply_.n, 100);
	assert_int_equal(reply_.why, KV_WHY_NONE);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 108, 0, &lease2_, &reply_), KV_OK);
	assert_int_equal(reply_.n, 100); /* 108 - 8 */
	assert_int_equal(reply_.why, KV_WHY_ABSENT);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 512, 0, &lease2_, &reply_), KV_OK);
	assert_int_equal(reply_.n, 1);
	assert_int_equal(u_acquire(&u_, m_, &space_, &fork_[8], 8, 0, &lease2_, &reply_), KV_OK);
	assert_int_equal(reply_.n, 0);
	assert_int_equal(reply_.lease, 0);
}

STAGE_TEST(p10_a_ladder_of_the_wrong_length_is_refused, stage(64, 0))
{
	kv_msg_t ask = {0}, reply;

	ask.acquire = (kv_msg_acquire_t){.space = space_.space,
					 .epoch = space_.epoch,
					 .n = 10,
					 .ladder = {(const uint8_t *)keys_, 3 * KV_KEY_BYTES}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_ACQUIRE, &ask, &reply), KV_ERR_ARG);
	ask.acquire.n = 0;
	assert_int_equal(u_request(&u_, m_, KV_CODE_ACQUIRE, &ask, &reply), KV_ERR_ARG);
	ask.acquire.space = 9;
	assert_int_equal(u_request(&u_, m_, KV_CODE_ACQUIRE, &ask, &reply), KV_ERR_NOT_FOUND);
	ask.acquire.space = space_.space;
	ask.acquire.epoch = 5;
	assert_int_equal(u_request(&u_, m_, KV_CODE_ACQUIRE, &ask, &reply), KV_ERR_STALE_EPOCH);
	assert_int_equal(u_request(&u_, NULL, KV_CODE_ACQUIRE, &ask, &reply), KV_ERR_NOT_JOINED);
}

STAGE_TEST(p5_pinned_bytes_and_leases_are_capped, stage(64, 0))
{
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 40), 40);
	u_.core->config.max_pinned_bytes = 30 * 4096;
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 40, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(reply_.n, 30);
	assert_int_equal(kv_metric_get(&u_.metrics, KV_M_ACQUIRE_SHORTENED), 1);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 40, 0, &lease2_, &reply_), KV_ERR_BUSY);
	assert_non_null(strstr(u_.detail, "instance.max_pinned"));
	assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);
	u_.core->config.max_leases = 1;
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 4, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 4, 0, &lease2_, &reply_), KV_ERR_LIMIT);
}

STAGE_TEST(p5_slots_for_reads_are_taken_at_once_or_the_lease_shortened, stage_disk(32, 20))
{
	u_member_t *other;
	kv_msg_put_start_reply_t started;
	static u_put_t put;

	other = u_join(&u_, 0, "second", 2, 0);
	assert_int_equal(u_put_start(&u_, other, &space_, &fork_[8], 0, 24, 0, &put, &started),
			 KV_OK); /* 8 slots are left */
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 20, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(reply_.n, 8);
	assert_int_equal(kv_metric_get(&u_.metrics, KV_M_ACQUIRE_SHORTENED), 1);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 20, 10, &lease2_, &reply_), KV_OK);
	assert_int_equal(reply_.lease, 0);
	u_settle(&u_);
	u_lease_verify(&u_, &lease_);
}

STAGE_TEST(p1_a_read_that_fails_shortens_the_lease_and_takes_the_block_out, stage_disk(32, 20))
{
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 10, 0, &lease_, &reply_), KV_OK);
	u_settle(&u_);
	u_.disk.fail_percent = 100;
	u_.disk.fail_with = KV_ERR_CORRUPT;
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 20, 0, &lease2_, &reply_), KV_OK);
	assert_int_equal(reply_.ready, 10);
	u_settle(&u_);
	assert_int_equal(u_find_notice(&u_, KV_CODE_LEASE_DONE, lease2_.id)->msg.lease_done.ready, 10);
	assert_int_equal(u_find_notice(&u_, KV_CODE_LEASE_DONE, lease2_.id)->msg.lease_done.status, KV_ERR_CORRUPT);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 20), 10);
	assert_int_equal(u_mirror_tiers(&u_, 0, &keys_[15]), 0);
	u_lease_verify(&u_, &lease_);
	u_lease_verify(&u_, &lease2_);
}

STAGE_TEST(p1_nothing_of_an_old_epoch_is_served, stage(64, 64))
{
	static u_put_t put;
	kv_msg_put_start_reply_t started;

	put_settled(0, 20);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 20, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(u_put_start(&u_, m_, &space_, fork_, 8, 12, 0, &put, &started), KV_OK);
	u_.disk.hold = 1;
	assert_int_equal(u_reset(&u_, m_, &space_), KV_PENDING);
	assert_int_equal(u_.answers, 0);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 20, 0, &lease2_, &reply_), KV_ERR_STALE_EPOCH);
	assert_int_equal(u_reset(&u_, m_, &space_), KV_ERR_STALE_EPOCH);
	u_.disk.hold = 0;
	u_settle(&u_);
	assert_int_equal(u_.answers, 1);
	assert_int_equal(u_.answer_status, KV_OK);
	assert_false(u_lease_alive(&lease_));
	space_.epoch++;
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 20), 0);
	assert_int_equal(u_put_end(&u_, m_, &put, 0, 4), KV_OK);
	assert_int_equal(u_find_notice(&u_, KV_CODE_PUT_DONE, put.id)->msg.put_done.status, KV_ERR_STALE_EPOCH);
	assert_int_equal(stage_free_slots(), 64);
	assert_int_equal(u_.disk.free_count, 64);
}

/* ---- members --------------------------------------------------------------------------------- */

/* Blocks below it that are being written, or pinned by a put. */
STAGE_TEST(p4_a_bad_cpu_copy_drops_the_cpu_copies_below_it, stage(64, 64))
{
	static u_put_t put;
	kv_msg_put_start_reply_t started;
	uint8_t tiers[12];

	put_settled(0, 4);
	u_.disk.hold = 1;
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 4, 12), 8);
	u_tick(&u_, 4);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 12, 16, 1, &put, &started), KV_OK);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 12, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(u_bad_block(&u_, m_, lease_.id, 2), KV_OK);
	universe_check(&u_);
	u_explain(&u_, 0, &space_, keys_, 12, tiers);
	for (uint32_t i = 0; i < 12; i++) {
		assert_int_equal(tiers[i], i < 2 ? KV_TIER_CPU | KV_TIER_DISK : i < 4 ? KV_TIER_DISK : 0);
	}
	u_.disk.hold = 0;
	u_settle(&u_);
	u_put_write(&u_, &put);
	(void)u_put_end(&u_, m_, &put, 0, 4);
	assert_int_equal(u_find_notice(&u_, KV_CODE_PUT_DONE, put.id)->msg.put_done.status, KV_ERR_PARENT_LOST);
}

STAGE_TEST(p1_same_rank_of_another_process_does_not_drain_a_writer, stage(64, 0))
{
	static u_put_t put;
	kv_msg_put_start_reply_t started;
	u_member_t *again;
	uint32_t freed;

	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 4, 0, &put, &started), KV_OK);
	u_closed(&u_, m_);
	again = u_join(&u_, 0, "engine", 2, 0);
	assert_int_equal(u_quiet(&u_, again, 2, 0, &freed), KV_OK);
	assert_int_equal(u_quiet(&u_, again, 0, put.id, &freed), KV_OK);
	assert_int_equal(stage_quarantined(), 4);
	u_dead(&u_, m_);
	assert_int_equal(stage_quarantined(), 0);
}

STAGE_TEST(p4_a_reconnected_process_drains_its_old_connections, stage(64, 0))
{
	static u_put_t put;
	kv_msg_put_start_reply_t started;
	u_member_t *again;
	uint32_t freed;

	for (uint32_t times = 0; times < 200; times++) {
		int promised = times % 5 == 0;

		assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 4, 0, &put, &started), KV_OK);
		u_closed(&u_, m_);
		again = u_join(&u_, 0, "engine", 2, 0);
		kvd_member_absorb(u_.core, m_->id, again->id, promised);
		assert_int_equal(u_.core->members.used, 1);
		assert_int_equal(stage_quarantined(), promised ? 0 : 4);
		assert_int_equal(u_quiet(&u_, again, 2, 0, &freed), KV_OK);
		assert_int_equal(freed, promised ? 0 : 4);
		m_->id = 0;
		m_ = again;
	}
}

STAGE_TEST(p4_a_member_that_leaves_ends_its_own_puts_only, stage(64, 0))
{
	static u_put_t put, others;
	u_member_t *rank;
	uint32_t freed;

	for (uint32_t times = 0; times < 200; times++) {
		rank = u_join(&u_, 0, "engine", 1, 5);
		assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 4, 0, &others, &(kv_msg_put_start_reply_t){0}),
				 KV_OK);
		assert_int_equal(u_put_start(&u_, rank, &space_, keys_, 0, 2, 0, &put, &(kv_msg_put_start_reply_t){0}),
				 KV_OK);
		u_left(&u_, rank);
		assert_int_equal(u_.core->members.used, 1);
		assert_int_equal(stage_quarantined(), 2); /* for m_, of the rank that writes it */
		assert_int_equal(u_quiet(&u_, m_, 0, put.id, &freed), KV_OK);
		assert_int_equal(freed, 2);
		assert_int_equal(u_put_revoke(&u_, m_, others.id), KV_OK); /* went on until now */
		assert_int_equal(u_quiet(&u_, m_, 0, others.id, &freed), KV_OK);
		assert_int_equal(freed, 4);
	}
}

STAGE_TEST(p4_an_instance_without_members_ends_without_quarantine, stage(64, 0))
{
	static u_put_t put;
	kv_msg_put_start_reply_t started;
	u_member_t *other, *second;

	for (uint32_t times = 0; times < 200; times++) {
		other = u_join(&u_, 0, "passing", 2, 0);
		assert_int_equal(u_put(&u_, other, &space_, keys_, 0, 8), 8);
		assert_int_equal(u_acquire(&u_, other, &space_, keys_, 8, 0, &lease_, &reply_), KV_OK);
		u_closed(&u_, other);
		assert_false(u_lease_alive(&lease_));
		assert_int_equal(u_.core->instances.used, 1);
		assert_int_equal(u_.core->members.used, 1);
	}
	other = u_join(&u_, 0, "passing", 1, 0);
	second = u_join(&u_, 0, "passing", 1, 1);
	assert_int_equal(u_put_start(&u_, other, &space_, keys_, 8, 12, 0, &put, &started), KV_OK);
	u_closed(&u_, second);
	u_closed(&u_, other);
	assert_int_equal(u_.core->instances.used, 2);
	u_dead(&u_, other);
	assert_int_equal(u_.core->instances.used, 1);
	assert_int_equal(u_.core->members.used, 1);
}

STAGE_TEST(p8_a_secret_opens_its_own_instance_only, stage(64, 0))
{
	uint8_t secret[16] = "another secret!";
	kvd_join_t join = {.ns = 0, .instance = "engine", .secret = secret, .secret_len = 16};
	kvd_instance_t id;

	assert_int_equal(kvd_instance_find(u_.core, &join, &id), KV_ERR_SECRET);
	join.ns = u_.ns[1]; /* the other namespace has no such instance */
	assert_int_equal(kvd_instance_find(u_.core, &join, &id), KV_OK);
	assert_int_equal(id, 0);
}

STAGE_TEST(p8_a_namespace_sees_nothing_of_another, stage(64, 0))
{
	kvd_space_info_t theirs;
	u_member_t *other;

	other = u_join(&u_, 1, "engine", 2, 0);
	theirs = u_space(&u_, 1, "model");
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 10), 10);
	assert_int_equal(u_visible(&u_, 1, &theirs, keys_, 10), 0);
	assert_int_equal(u_mirror_tiers(&u_, 1, &keys_[0]), 0);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 10, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(u_release(&u_, other, lease_.id), KV_ERR_NOT_FOUND);
	assert_int_equal(u_bad_block(&u_, other, lease_.id, 0), KV_ERR_NOT_FOUND);
	assert_true(u_lease_alive(&lease_));
	/* Its pool is full of another's blocks: it gets what is free, and evicts nothing of theirs. */
	assert_int_equal(u_put(&u_, other, &theirs, keys_, 0, 60), 54);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 10), 10);
}

/* The first n blocks of keys_, each of them a run of its own: below each hangs one more block. */
static void put_branched(uint32_t n)
{
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, n), n);
	memcpy(fork_, keys_, n * sizeof *keys_);
	for (uint32_t i = 1; i < n; i++) {
		u_chain(&keys_[i - 1], 1000 + i, &fork_[i], 1);
		assert_int_equal(u_put(&u_, m_, &space_, fork_, i, i + 1), 1);
		fork_[i] = keys_[i];
	}
	u_settle(&u_);
}

static uint64_t steps(void)
{
	return kv_metric_get(&u_.metrics, KV_M_INDEX_STEPS);
}

STAGE_TEST(p5_a_lease_visits_each_run_of_its_path_a_few_times, stage(1024, 2048))
{
	uint64_t before;

	put_branched(512);
	u_evict_all(&u_, KV_TIER_CPU);
	before = steps();
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 512, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(reply_.n_disk, 512);
	u_settle(&u_);
	assert_int_equal(u_header(m_, lease_.offset)->ready, 512);
	u_lease_verify(&u_, &lease_);
	assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);
	assert_in_range(steps() - before, 1, UINT64_C(16) * 512);
}

STAGE_TEST(p5_many_leases_of_one_path_cost_one_walk_when_a_block_is_bad, stage(1024, 0))
{
	uint64_t before;

	put_branched(512);
	for (uint32_t i = 0; i < 256; i++) {
		assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 512 - i, 0, &lease_, &reply_), KV_OK);
	}
	before = steps();
	assert_int_equal(u_bad_block(&u_, m_, lease_.id, 0), KV_OK);
	u_settle(&u_);
	assert_in_range(steps() - before, 1, UINT64_C(16) * 512);
}

STAGE_TEST(p5_lookups_during_dismantling_do_not_walk_to_the_root, stage(1024, 0))
{
	uint64_t before;

	put_branched(512);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 511, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(u_bad_block(&u_, m_, lease_.id, 510), KV_OK);
	before = steps();
	for (uint32_t i = 0; i < 256; i++) { /* leases that stay, and leases that end */
		assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 510, 510, &lease2_, &reply_), KV_OK);
		assert_int_equal(reply_.n, 510);
		assert_int_equal(u_visible(&u_, 0, &space_, &keys_[511], 1), 0);
	}
	assert_in_range(steps() - before, 1, UINT64_C(16) * 512);
}
