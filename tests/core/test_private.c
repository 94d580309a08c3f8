/* Private blocks: what is left of a prompt after its last whole block, for one hand-over. */
#include "handover_stage.h"

static kv_key_t private_;    /* of the tokens after unit 8 */
static kv_key_t whole_[512]; /* the first 8 keys, then the private one */

static void stage_private(uint32_t cpu, uint32_t disk)
{
	stage_two(cpu, disk);
	u_chain(&keys_[7], 99, &private_, 1);
	memcpy(whole_, keys_, 8 * sizeof *keys_);
	whole_[8] = private_;
	sent_.number = 0;
}

static void put_private(void)
{
	for (uint32_t g = 0; g < U_GROUPS; g++) {
		u_.group = u_groups[g].id;
		assert_int_equal(u_put_private(&u_, m_, &space_, &private_), 1);
	}
	u_.group = 0;
}

static kv_status_t send_partial(uint32_t n, uint32_t partial, int last)
{
	u_send_t send = to_send("t", n, U_ALL, last);

	send.number = sent_.number;
	send.partial = partial;
	send.private_key = private_;

	return send_it(send);
}

static uint64_t private_blocks(void)
{
	return kvd_tree_at(&u_.core->ix, u_.core->ns[0]->numbers[space_.space]->tree)->private_blocks;
}

static uint8_t tiers_of(uint32_t group, const kv_key_t *key)
{
	uint8_t tiers;

	u_.group = group;
	u_explain(&u_, 0, &space_, key, 1, &tiers);
	u_.group = 0;

	return tiers;
}

static void acquire(uint32_t group, const kv_key_t *keys, uint32_t n, uint32_t skip, u_lease_t *lease)
{
	kv_msg_acquire_reply_t reply;

	u_.group = group;
	assert_int_equal(u_acquire(&u_, d_, &space_, keys, n, skip, lease, &reply), KV_OK);
	u_.group = 0;
}

/* ---- what it is for -------------------------------------------------------------------------- */

STAGE_TEST(p1_a_partial_block_is_handed_over_and_goes_with_its_last_holder, stage_private(256, 0))
{
	uint64_t number, free_slots;
	u_lease_t path, window, after;
	kv_key_t last_four[9];

	put_all(0, 8);
	free_slots = stage_free_slots();
	put_private();
	assert_int_equal(send_partial(8, 5, 1), KV_OK);
	number = sent_.number;
	assert_int_equal(sent_.n, 8);
	assert_int_equal(sent_.bytes, (8 + 4 + 1 + 8 + 4) * 4096);
	assert_int_equal(recv(d_, "t", 0), KV_OK);
	assert_int_equal(got_.n, 8);
	assert_int_equal(got_.partial, 5);

	acquire(0, whole_, 9, 0, &path);
	assert_int_equal(path.n, 9);
	memcpy(last_four, whole_, sizeof last_four);
	acquire(1, last_four, 9, 5, &window);
	assert_int_equal(window.n, 9);
	acquire(2, &private_, 1, 0, &after);
	assert_int_equal(after.n, 1);
	u_lease_verify(&u_, &path);
	u_lease_verify(&u_, &window);
	u_lease_verify(&u_, &after);
	universe_check(&u_);

	assert_int_equal(u_done(&u_, d_, number, 0), KV_OK);
	u_tick(&u_, 1);
	assert_int_equal(private_blocks(), 3); /* nothing had group 5's */
	assert_int_equal(u_release(&u_, d_, window.id), KV_OK);
	assert_int_equal(u_release(&u_, d_, after.id), KV_OK);
	u_tick(&u_, 1);
	assert_int_equal(private_blocks(), 1);
	u_lease_verify(&u_, &path);
	assert_int_equal(u_release(&u_, d_, path.id), KV_OK);
	u_tick(&u_, 1);
	assert_int_equal(private_blocks(), 0);
	assert_int_equal(stage_free_slots(), free_slots);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 8), 8);
}

/* The last holder has gone, and a producer puts the block again before it is dropped: it is there for its hand-over. */
STAGE_TEST(p3_a_block_put_again_is_not_dropped_under_its_producer, stage_private(128, 0))
{
	put_all(0, 8);
	put_private();
	assert_int_equal(send_partial(8, 5, 1), KV_OK);
	assert_int_equal(u_done(&u_, m_, sent_.number, U_GIVE_UP), KV_OK);
	assert_int_equal(recv(d_, "t", 0), KV_OK); /* that it failed: its blocks are let go */
	assert_int_equal(u_done(&u_, d_, got_.number, 0), KV_OK);
	put_private();
	u_tick(&u_, 3);
	assert_int_equal(private_blocks(), 4);
	sent_.number = 0;
	assert_int_equal(send_partial(8, 5, 1), KV_OK);
	assert_int_equal(u_done(&u_, m_, sent_.number, U_GIVE_UP), KV_OK);
	u_tick(&u_, 1);
	assert_int_equal(private_blocks(), 0);
}

/* One of the reads fails: the lease ends before it, without the private block. */
STAGE_TEST(p3_a_path_cut_short_loses_the_private_block, stage_private(64, 64))
{
	u_lease_t lease;

	put_settled(0, 8);
	evict_all();
	assert_int_equal(u_put_private(&u_, m_, &space_, &private_), 1);
	u_.disk.fail_percent = 100;
	u_.disk.fail_with = KV_ERR_CORRUPT;
	acquire(0, whole_, 9, 0, &lease);
	u_settle(&u_);
	assert_false(u_lease_alive(&lease) && u_header(d_, lease.offset)->n == 9);
	u_.disk.fail_percent = 0;
	universe_check(&u_);
	assert_int_equal(private_blocks(), 0);

	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 5), 5);
	assert_int_equal(u_put_private(&u_, m_, &space_, &private_), 1);
	acquire(0, whole_, 9, 0, &lease); /* its place is after block 8, which is gone */
	assert_int_equal(lease.n, 5);
}

/* ---- who knows it ---------------------------------------------------------------------------- */

STAGE_TEST(p9_no_event_and_no_lookup_tells_of_a_private_block, stage_private(128, 64))
{
	static char json[4096];
	uint64_t told;

	put_all(0, 8);
	u_settle(&u_);
	told = u_.stored + u_.removed;
	put_private();
	u_settle(&u_);
	assert_int_equal(u_.stored + u_.removed, told);
	for (uint32_t g = 0; g < U_GROUPS; g++) {
		assert_int_equal(tiers_of(u_groups[g].id, &private_), KV_TIER_CPU); /* and never on disk */
		u_.group = u_groups[g].id;
		assert_int_equal(u_mirror_tiers(&u_, 0, &private_), 0);
	}
	u_.group = 0;
	assert_int_equal(metric(KV_M_PUT_PRIVATE), 4);
	assert_true(kvd_core_status_json(u_.core, 0, 1, json, sizeof json) > 0);
	assert_non_null(strstr(json, "\"blocks\":28,\"blocks_cpu\":28,"));
	assert_int_equal(send_partial(8, 5, 1), KV_OK);
	assert_int_equal(u_done(&u_, m_, sent_.number, U_GIVE_UP), KV_OK);
	u_tick(&u_, 1);
	assert_int_equal(private_blocks(), 0);
	assert_int_equal(u_.stored + u_.removed, told);
}

KV_TEST(p2_a_restart_forgets_private_blocks)
{
	fake_tier_t disk;

	stage_private(64, 64);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 8), 8);
	assert_int_equal(u_put_private(&u_, m_, &space_, &private_), 1);
	u_settle(&u_);
	universe_kill(&u_, &disk);
	universe_init(&u_, &(u_config_t){.cpu_slots = 64}, &disk);
	space_ = u_space(&u_, 0, "model");
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 8), 8);
	assert_int_equal(tiers_of(0, &private_), 0);
	universe_leave(&u_);
	universe_fini(&u_);
}

/* ---- how it ends ----------------------------------------------------------------------------- */

STAGE_TEST(p4_a_reset_takes_private_blocks_along, stage_private(128, 0))
{
	put_all(0, 8);
	put_private();
	assert_int_equal(send_partial(8, 5, 1), KV_OK);
	assert_int_equal(u_reset(&u_, m_, &space_), KV_OK);
	u_settle(&u_);
	check_notice(m_, sent_.number, KV_HANDOVER_ENDED, 8, KV_ERR_STALE_EPOCH);
	assert_int_equal(stage_free_slots(), 128);
}

/* ---- refusals -------------------------------------------------------------------------------- */

STAGE_TEST(p10_what_a_private_block_cannot_be_is_refused, stage_private(128, 0))
{
	kv_msg_put_start_reply_t reply;
	kv_key_t below[2];
	u_put_t put;

	put_all(0, 8);
	assert_int_equal(u_put_start(&u_, m_, &space_, &private_, 0, 1, KV_PUT_PRIVATE | KV_PUT_DURABLE, &put, &reply),
			 KV_ERR_ARG);
	assert_int_equal(send_partial(8, 5, 1), KV_MISS); /* not there yet */
	put_private();
	assert_int_equal(send_partial(8, 5, 0), KV_ERR_ARG);  /* before the last chunk */
	assert_int_equal(send_partial(8, 16, 1), KV_ERR_ARG); /* a whole block */
	/* Nothing below it: as a parent, and as the first of a chain. */
	below[0] = private_;
	u_chain(&private_, 5, &below[1], 1);
	assert_int_equal(u_put_start(&u_, m_, &space_, below, 1, 2, 0, &put, &reply), KV_ERR_ARG);
	assert_int_equal(u_put_start(&u_, m_, &space_, below, 0, 2, 0, &put, &reply), KV_ERR_ARG);
	/* A block that others find is not private, and a private one is none of the prefix. */
	private_ = keys_[0];
	assert_int_equal(send_partial(8, 5, 1), KV_ERR_ARG);
	keys_[0] = below[0];
	assert_int_equal(send_first("u", 1, U_FULL, 1), KV_ERR_ARG);
	universe_check(&u_);
	assert_int_equal(u_.core->handovers.used + u_.core->pins.used, 0);
}

/* A child that waits for its parent finds a private block in its place. */
STAGE_TEST(p10_nothing_becomes_visible_below_a_private_block, stage_private(64, 0))
{
	kv_msg_put_start_reply_t reply;
	kv_key_t below[2];
	u_put_t parent, child;

	below[0] = private_;
	u_chain(&private_, 5, &below[1], 1);
	assert_int_equal(u_put_start(&u_, m_, &space_, &private_, 0, 1, KV_PUT_PRIVATE, &parent, &reply), KV_OK);
	assert_int_equal(u_put_start(&u_, m_, &space_, below, 1, 2, 0, &child, &reply), KV_OK);
	u_put_write(&u_, &parent);
	u_put_write(&u_, &child);
	assert_int_equal(u_put_end(&u_, m_, &child, 0, 1), KV_OK);
	assert_int_equal(u_put_end(&u_, m_, &parent, 0, 1), KV_OK);
	u_settle(&u_);
	assert_int_equal(u_find_notice(&u_, KV_CODE_PUT_DONE, parent.id)->msg.put_done.status, KV_OK);
	assert_int_equal(u_find_notice(&u_, KV_CODE_PUT_DONE, child.id)->msg.put_done.status, KV_ERR_ARG);
}

STAGE_TEST(p5_private_blocks_count_within_the_bytes_of_hand_overs, stage_private(128, 0))
{
	put_all(0, 8);
	put_private();
	u_.core->config.max_handover_bytes = (8 + 4 + 1 + 8 + 3) * 4096;
	assert_int_equal(send_partial(8, 5, 1), KV_ERR_BUSY);
	assert_int_equal(u_.core->pins.used, 0);
	u_.core->config.max_handover_bytes += 4096;
	assert_int_equal(send_partial(8, 5, 1), KV_OK);
}
