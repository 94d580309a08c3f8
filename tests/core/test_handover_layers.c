/* Layers of an unfinished put: who sees them, how far, and that no end of a side leaves wrong bytes or a slot behind.
 * The blocks of the universe have two layers. */
#include "handover_stage.h"

static u_put_t put_;
static u_lease_t lease_;
static const u_layers_t first_ = {.heads = 2, .layers = 1}, second_ = {.heads = 2, .from = 1, .layers = 2};

/* A put of blocks [8, 16) below those before them, by two ranks of `m_` with a layer each if `split`. */
static void start_put(int split)
{
	const uint32_t writers[2][5] = {{0, 0, 2, 0, 1}, {1, 0, 2, 1, 1}};
	kv_msg_t ask = {.put_start = {.space = space_.space,
				      .epoch = space_.epoch,
				      .parent = keys_[7],
				      .depth = 8,
				      .keys = {(const uint8_t *)&keys_[8], 8 * KV_KEY_BYTES},
				      .writers = {(const uint8_t *)writers, split ? sizeof writers : 0}}},
		 answer;

	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_START, &ask, &answer), KV_OK);
	put_ = (u_put_t){.id = answer.put_start_reply.put,
			 .member = m_,
			 .offset = answer.put_start_reply.offset,
			 .n = 8,
			 .first = 8};
	memcpy(put_.keys, &keys_[8], 8 * sizeof *keys_);
}

/* `m_` has handed over 8 blocks, and a put of the next 8 while it is written; `d_` is the consumer. */
static void stage_with(uint32_t disk, int split)
{
	stage_two(64, disk);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 8), 8);
	u_settle(&u_);
	start_put(split);
	assert_int_equal(recv(d_, "t", 9000), KV_OK);
	assert_int_equal(u_send(&u_, m_,
				&(u_send_t){.transfer = "t",
					    .space = &space_,
					    .keys = keys_,
					    .n = 8,
					    .groups = U_FULL,
					    .open_put = put_.id},
				&sent_),
			 KV_OK);
	u_put_write(&u_, &put_);
}

static void stage_open(void)
{
	stage_with(0, 0);
}

static const kv_lease_header_t *header(void)
{
	return u_header(lease_.member, lease_.offset);
}

static void check_layers(uint32_t open_n, uint32_t layers)
{
	const kv_msg_handover_t *notice = last_notice(d_, sent_.number);

	assert_non_null(notice);
	assert_int_equal(notice->open_n, open_n);
	assert_int_equal(notice->layers, layers);
	universe_check(&u_);
}

static kv_status_t take_lease(u_member_t *m)
{
	return u_open_lease(&u_, m, sent_.number, &put_, &lease_);
}

/* ---- the way of a put ------------------------------------------------------------------------ */

static void p3_layers_are_seen_by_the_consumer_alone_until_the_blocks_are_whole(void **state)
{
	kv_msg_acquire_reply_t reply;
	u_member_t *other;
	u_lease_t lease;

	(void)state;
	stage_open();
	other = u_join(&u_, 0, "other", 2, 0);
	check_layers(16, 0);
	assert_int_equal(take_lease(m_), KV_ERR_NOT_FOUND);
	assert_int_equal(take_lease(other), KV_ERR_NOT_FOUND);
	assert_int_equal(take_lease(d_), KV_OK);
	assert_int_equal(header()->kind, KV_LEASE_READ);
	assert_int_equal(header()->n, 8);
	assert_int_equal(header()->ready, 8); /* the blocks before it */
	assert_int_equal(header()->layers, 0);
	assert_int_equal(take_lease(d_), KV_ERR_EXISTS);

	assert_int_equal(u_put_layers(&u_, m_, &put_, &first_), KV_OK);
	check_layers(16, 1);
	assert_int_equal(header()->layers, 1);
	u_lease_verify(&u_, &lease_);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 16), 8);
	assert_int_equal(u_mirror_tiers(&u_, 0, &keys_[8]), 0);
	assert_int_equal(u_acquire(&u_, other, &space_, keys_, 16, 0, &lease, &reply), KV_OK);
	assert_int_equal(reply.n, 8);
	assert_int_equal(u_acquire(&u_, d_, &space_, keys_, 16, 8, &lease, &reply), KV_OK);
	assert_int_equal(reply.lease, 0);

	assert_int_equal(u_put_layers(&u_, m_, &put_, &second_), KV_OK);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 16), 16);
	assert_int_equal(header()->layers, 2);
	assert_int_equal(header()->ready, 16);
	assert_int_equal(u_find_notice(&u_, KV_CODE_LEASE_DONE, lease_.id)->msg.lease_done.status, KV_OK);
	assert_true(u_lease_alive(&lease_));
	universe_check(&u_);
	assert_int_equal(send_more(16, U_FULL, 1), KV_OK);
	check_notice(d_, sent_.number, KV_HANDOVER_COMPLETE, 0, KV_OK); /* the other groups have nothing */
	check_layers(0, 0);
	assert_int_equal(u_done(&u_, d_, sent_.number, 0), KV_OK);
	evict_all();
	u_lease_verify(&u_, &lease_); /* a lease like any other now */
	assert_true(u_lease_alive(&lease_));
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 16), 16);
	assert_int_equal(u_release(&u_, d_, lease_.id), KV_OK);
	stage_end();
}

/* Each digest is taken once: what was compared with it is what becomes visible. */
static void p1_a_layer_that_was_handed_over_stays_as_it_is(void **state)
{
	const u_layers_t whole = {.heads = 2, .layers = 2};
	uint64_t leaves[4];
	uint32_t slot;

	(void)state;
	stage_open();
	assert_int_equal(take_lease(d_), KV_OK);
	slot = kv_lease_slots(header())[3];
	assert_int_equal(u_put_layers(&u_, m_, &put_, &first_), KV_OK);
	memcpy(leaves, u_.cpu.slots[slot].leaves, sizeof leaves);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &first_), KV_ERR_ARG);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &whole), KV_ERR_ARG); /* words of two layers, and one is new */
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 8), KV_ERR_COVERAGE);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &second_), KV_OK);
	assert_int_equal(leaves[0], u_.cpu.slots[slot].leaves[0]);
	assert_int_equal(leaves[2], u_.cpu.slots[slot].leaves[2]);
	assert_int_equal(u_.seals, 16);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &second_), KV_ERR_NOT_FOUND); /* it has ended */
	universe_check(&u_);
	stage_end();
}

/* A layer is there when the last of its writers has handed it in. */
static void p3_a_layer_counts_when_all_ranks_have_it(void **state)
{
	const uint32_t writers[2][5] = {{0, 0, 1, 0, 2}, {1, 1, 1, 0, 2}};
	u_layers_t mine = {.heads = 1, .layers = 1}, other = {.rank = 1, .heads = 1, .layers = 1};
	kv_msg_t ask = {0}, answer;

	(void)state;
	stage_two(64, 0);
	ask.put_start = (kv_msg_put_start_t){.space = space_.space,
					     .epoch = space_.epoch,
					     .keys = {(const uint8_t *)keys_, 4 * KV_KEY_BYTES},
					     .writers = {(const uint8_t *)writers, sizeof writers}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_START, &ask, &answer), KV_OK);
	put_ = (u_put_t){
		.id = answer.put_start_reply.put, .member = m_, .offset = answer.put_start_reply.offset, .n = 4};
	memcpy(put_.keys, keys_, 4 * sizeof *keys_);
	u_put_write(&u_, &put_);
	assert_int_equal(recv(d_, "t", 9000), KV_OK);
	assert_int_equal(u_send(&u_, m_, &(u_send_t){.transfer = "t", .space = &space_, .open_put = put_.id}, &sent_),
			 KV_OK);
	assert_int_equal(take_lease(d_), KV_OK);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &other), KV_OK); /* this rank is ahead */
	check_layers(4, 0);
	assert_int_equal(header()->layers, 0);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &mine), KV_OK);
	check_layers(4, 1);
	mine.from = other.from = 1;
	mine.layers = other.layers = 2;
	assert_int_equal(u_put_layers(&u_, m_, &put_, &other), KV_OK);
	check_layers(4, 1);
	assert_int_equal(header()->layers, 1);
	assert_int_equal(header()->ready, 0);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &mine), KV_OK);
	assert_int_equal(header()->layers, 2);
	assert_int_equal(header()->ready, 4);
	universe_check(&u_);
	stage_end();
}

/* A consumer that comes late finds the layers that are there. */
static void p5_a_late_consumer_learns_how_many_layers_there_are(void **state)
{
	kv_msg_put_start_reply_t reply;

	(void)state;
	stage_two(64, 0);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 4, 0, &put_, &reply), KV_OK);
	u_put_write(&u_, &put_);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &first_), KV_OK);
	assert_int_equal(u_send(&u_, m_, &(u_send_t){.transfer = "t", .space = &space_, .open_put = put_.id}, &sent_),
			 KV_OK);
	assert_int_equal(recv(d_, "t", 0), KV_OK);
	assert_int_equal(got_.open_n, 4);
	assert_int_equal(got_.layers, 1);
	assert_int_equal(take_lease(d_), KV_OK);
	assert_int_equal(header()->layers, 1);
	u_lease_verify(&u_, &lease_);
	stage_end();
}

/* ---- ends ------------------------------------------------------------------------------------ */

/* How a hand-over ends while its put is open. */
static void end_by_death(void)
{
	u_dead(&u_, m_);
}
static void end_by_close(void)
{
	u_closed(&u_, m_);
}
static void end_by_revoke(void)
{
	assert_int_equal(u_put_revoke(&u_, m_, put_.id), KV_OK);
}
static void end_by_abort(void)
{
	assert_int_equal(u_done(&u_, m_, sent_.number, U_GIVE_UP), KV_OK);
}
static void end_by_reset(void)
{
	kv_msg_t ask = {.space_reset = {.space = space_.space, .epoch = space_.epoch}}, reply;

	assert_int_equal(u_request(&u_, m_, KV_CODE_SPACE_RESET, &ask, &reply), KV_OK);
}
static void end_by_bad_layer(void)
{
	kv_msg_t ask = {.bad_block = {.lease = lease_.id, .index = 2}}, reply;

	assert_int_equal(u_request(&u_, d_, KV_CODE_BAD_BLOCK, &ask, &reply), KV_OK);
	assert_int_equal(u_find_notice(&u_, KV_CODE_PUT_DONE, put_.id)->msg.put_done.status, KV_ERR_CORRUPT);
}
static void end_by_consumers_death(void)
{
	u_dead(&u_, d_);
}
static void end_by_giving_back(void)
{
	assert_int_equal(u_done(&u_, d_, sent_.number, KV_HANDOVER_ABORT), KV_OK);
}
static void end_by_done(void)
{
	assert_int_equal(u_done(&u_, d_, sent_.number, 0), KV_OK);
}
static void end_by_deadline(void)
{
	kv_test_advance(&u_.env, UINT64_C(9200000000));
	u_tick(&u_, 2);
}

static const struct {
	void (*end)(void);
	int put_goes_on;
	int needs_layers;
} ends_[] = {
	{end_by_death, 0, 0}, {end_by_close, 0, 0},     {end_by_revoke, 0, 0},          {end_by_abort, 1, 0},
	{end_by_reset, 1, 0}, {end_by_bad_layer, 0, 1}, {end_by_consumers_death, 1, 0}, {end_by_giving_back, 1, 0},
	{end_by_done, 1, 0},  {end_by_deadline, 1, 0},
};

/* However it ends, with or without a layer there: the consumer's lease says so before a slot can be another block's,
 * the slots of a put that has ended with it stay in quarantine until its writer is drained, and the rest goes on. */
static void p1_p4_whatever_ends_first_the_lease_ends_before_the_slots(void **state)
{
	uint32_t freed;

	(void)state;
	for (uint32_t e = 0; e < KV_COUNT_OF(ends_); e++) {
		for (uint32_t layers = (uint32_t)ends_[e].needs_layers; layers < 2; layers++) {
			stage_open();
			assert_int_equal(take_lease(d_), KV_OK);
			if (layers > 0) {
				assert_int_equal(u_put_layers(&u_, m_, &put_, &first_), KV_OK);
			}
			ends_[e].end();
			u_tick(&u_, 1); /* sides and epochs that have ended are noticed by a sweep */
			universe_check(&u_);
			assert_false(u_lease_alive(&lease_));
			if (ends_[e].put_goes_on) {
				assert_int_equal(stage_quarantined(), 0);
				assert_int_equal(u_put_layers(&u_, m_, &put_, layers ? &second_ : &first_), KV_OK);
			} else if (m_->id != 0) {
				assert_int_equal(stage_quarantined(), 8);
				assert_int_equal(u_visible(&u_, 0, &space_, keys_, 16), 8);
				if (!m_->closed) {
					assert_int_equal(u_put_layers(&u_, m_, &put_, &second_), KV_ERR_REVOKED);
					assert_int_equal(u_quiet(&u_, m_, 0, put_.id, &freed), KV_OK);
					assert_int_equal(freed, 8);
					assert_int_equal(stage_quarantined(), 0);
				}
			}
			universe_check(&u_);
			stage_end();
		}
	}
}

static void p4_the_consumer_is_told_of_an_early_end(void **state)
{
	(void)state;
	stage_open();
	assert_int_equal(take_lease(d_), KV_OK);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &first_), KV_OK);
	end_by_revoke();
	assert_int_equal(u_find_notice(&u_, KV_CODE_LEASE_DONE, lease_.id)->msg.lease_done.status, KV_ERR_REVOKED);
	check_notice(d_, sent_.number, KV_HANDOVER_SENDING, 0, KV_OK); /* the producer may store it again */
	check_layers(0, 0);
	assert_int_equal(take_lease(d_), KV_MISS);
	end_by_death();
	u_tick(&u_, 1);
	check_notice(d_, sent_.number, KV_HANDOVER_FAILED, 0, KV_ERR_PRODUCER_LOST);
	stage_end();
}

/* The next consumer has a lease of its own, on what is there by then. */
static void p4_what_is_given_back_is_leased_by_the_next(void **state)
{
	u_member_t *next;
	u_lease_t lost;

	(void)state;
	stage_open();
	next = u_join(&u_, 0, "next", 2, 0);
	assert_int_equal(take_lease(d_), KV_OK);
	lost = lease_;
	end_by_consumers_death();
	assert_int_equal(u_put_layers(&u_, m_, &put_, &first_), KV_OK);
	assert_int_equal(recv(next, "t", 0), KV_OK);
	assert_int_equal(got_.layers, 1);
	assert_int_equal(take_lease(next), KV_OK);
	assert_false(u_lease_alive(&lost));
	assert_int_equal(header()->layers, 1);
	assert_int_equal(u_release(&u_, next, lease_.id), KV_OK); /* and again after a release */
	assert_int_equal(take_lease(next), KV_OK);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &second_), KV_OK);
	assert_true(u_lease_alive(&lease_));
	u_lease_verify(&u_, &lease_);
	universe_check(&u_);
	stage_end();
}

/* ---- slots that another block gets ----------------------------------------------------------- */

/* Another copy of one of the blocks was first: the slot that the lease names is free at once. */
static void p1_the_lease_ends_when_another_copy_was_first(void **state)
{
	u_member_t *other;

	(void)state;
	stage_open();
	other = u_join(&u_, 0, "other", 2, 0);
	assert_int_equal(take_lease(d_), KV_OK);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &first_), KV_OK);
	assert_int_equal(u_put(&u_, other, &space_, keys_, 8, 12), 4);
	assert_true(u_lease_alive(&lease_));
	u_lease_verify(&u_, &lease_);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &second_), KV_OK);
	assert_false(u_lease_alive(&lease_));
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 16), 16);
	assert_int_equal(u_find_notice(&u_, KV_CODE_LEASE_DONE, lease_.id)->msg.lease_done.status, KV_ERR_REVOKED);
	universe_check(&u_);
	stage_end();
}

/* Somebody has found wrong bytes in block `index`. */
static void report_bad(uint32_t index)
{
	kv_msg_acquire_reply_t reply;
	u_lease_t lease;
	kv_msg_t ask = {0}, answer;

	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, index + 1, 0, &lease, &reply), KV_OK);
	ask.bad_block = (kv_msg_bad_block_t){.lease = lease.id, .index = index};
	assert_int_equal(u_request(&u_, m_, KV_CODE_BAD_BLOCK, &ask, &answer), KV_OK);
	u_settle(&u_);
}

/* The first block is visible, by two ranks that go different ways, and is lost: its slot is free. */
static void p1_the_lease_ends_when_a_block_that_was_visible_is_lost(void **state)
{
	kv_msg_t ask = {0}, answer;

	(void)state;
	stage_with(0, 1);
	assert_int_equal(take_lease(d_), KV_OK);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &first_), KV_OK);
	assert_int_equal(header()->layers, 1);
	ask.put_end = (kv_msg_put_end_t){.put = put_.id, .rank = 1, .count = 1, .words = 2};
	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_END, &ask, &answer), KV_OK);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 16), 9);
	u_lease_verify(&u_, &lease_);
	assert_true(u_lease_alive(&lease_));
	report_bad(8);
	assert_false(u_lease_alive(&lease_));
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 16), 8);
	assert_int_equal(take_lease(d_), KV_MISS); /* it would name a slot that is another block's soon */
	universe_check(&u_);
	stage_end();
}

/* The parent is on disk only: the blocks go there too, and their slots are free when they are. */
static void p1_the_lease_ends_before_its_blocks_go_to_disk(void **state)
{
	(void)state;
	stage_with(64, 0);
	assert_int_equal(take_lease(d_), KV_OK);
	report_bad(3); /* of the copies in memory; those below it go with it */
	assert_false(u_lease_alive(&lease_));
	assert_int_equal(take_lease(d_), KV_OK);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &first_), KV_OK);
	u_lease_verify(&u_, &lease_);
	u_.disk.hold = 1;
	assert_int_equal(u_put_layers(&u_, m_, &put_, &second_), KV_OK);
	assert_false(u_lease_alive(&lease_));
	assert_int_equal(take_lease(d_), KV_MISS); /* nor does one begin meanwhile */
	u_.disk.hold = 0;
	u_settle(&u_);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 16), 16);
	universe_check(&u_);
	stage_end();
}

static void p5_eviction_never_takes_an_open_puts_slots(void **state)
{
	(void)state;
	stage_open();
	assert_int_equal(take_lease(d_), KV_OK);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &first_), KV_OK);
	evict_all();
	assert_int_equal(u_put(&u_, d_, &space_, fork_, 8, 200), 48); /* all the room that there is */
	assert_true(u_lease_alive(&lease_));
	u_lease_verify(&u_, &lease_);
	universe_check(&u_);
	stage_end();
}

static void p5_an_open_lease_is_capped_and_expires_like_any_other(void **state)
{
	kv_msg_t ask = {0}, reply;

	(void)state;
	stage_open();
	u_.core->config.max_pinned_bytes = 7 * 4096;
	assert_int_equal(take_lease(d_), KV_ERR_BUSY);
	u_.core->config.max_pinned_bytes = 8 * 4096;
	assert_int_equal(take_lease(d_), KV_OK);
	kv_test_advance(&u_.env, UINT64_C(6000000000));
	ask.renew.lease = lease_.id;
	assert_int_equal(u_request(&u_, d_, KV_CODE_RENEW, &ask, &reply), KV_OK);
	ask.handover_recv =
		(kv_msg_handover_recv_t){.transfer = kv_slice_str("t"), .space = space_.space, .epoch = space_.epoch};
	assert_int_equal(u_request(&u_, d_, KV_CODE_HANDOVER_RECV, &ask, &reply), KV_OK);
	kv_test_advance(&u_.env, UINT64_C(6000000000));
	u_tick(&u_, 1);
	assert_true(u_lease_alive(&lease_));
	kv_test_advance(&u_.env, UINT64_C(5000000000));
	u_tick(&u_, 1);
	assert_false(u_lease_alive(&lease_));
	universe_check(&u_);
	stage_end();
}

/* ---- refusals -------------------------------------------------------------------------------- */

static kv_status_t send_open(const char *transfer, uint32_t n, uint64_t put, int last)
{
	kv_msg_handover_send_reply_t reply = {0};

	return u_send(&u_, m_,
		      &(u_send_t){.transfer = transfer,
				  .space = &space_,
				  .keys = keys_,
				  .n = n,
				  .groups = U_FULL,
				  .last = last,
				  .open_put = put},
		      &reply);
}

static void p10_a_put_that_does_not_follow_is_refused(void **state)
{
	kv_msg_put_start_reply_t reply;
	u_put_t other;

	(void)state;
	stage_open();
	assert_int_equal(send_open("u", 8, put_.id, 0), KV_ERR_EXISTS); /* another hand-over has it */
	assert_int_equal(send_more(8, 0, 1), KV_ERR_ARG);               /* nothing follows, and it does */
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 16, 20, 0, &other, &reply), KV_OK);
	assert_int_equal(send_open("u", 8, other.id, 0), KV_ERR_ARG); /* a gap */
	assert_int_equal(send_open("u", 0, other.id, 0), KV_ERR_ARG); /* and nothing before it */
	assert_int_equal(send_open("u", 8, other.id, 1), KV_ERR_ARG);
	assert_int_equal(u_put_start(&u_, m_, &space_, fork_, 8, 12, 0, &other, &reply), KV_OK);
	assert_int_equal(u_put(&u_, d_, &space_, keys_, 8, 12), 4);
	assert_int_equal(send_open("u", 12, other.id, 0), KV_ERR_ARG); /* another prefix */
	assert_int_equal(u_put_start(&u_, d_, &space_, fork_, 8, 12, 0, &other, &reply), KV_OK);
	assert_int_equal(send_open("u", 8, other.id, 0), KV_MISS); /* another instance's */
	assert_int_equal(send_open("u", 8, 77, 0), KV_MISS);
	u_.group = 2;
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 4, 6, 0, &other, &reply), KV_OK);
	assert_int_equal(send_open("u", 8, other.id, 0), KV_ERR_ARG); /* of states, not of a full group */
	assert_int_equal(u_.core->handovers.used, 1);
	universe_check(&u_);
	stage_end();
}

static void p10_layers_that_cannot_be_are_refused(void **state)
{
	kv_msg_t ask = {0}, reply;

	(void)state;
	stage_open();
	assert_int_equal(u_put_layers(&u_, m_, &put_, &(u_layers_t){.heads = 2, .layers = 3}), KV_ERR_ARG);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &(u_layers_t){.heads = 2}), KV_ERR_ARG);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &(u_layers_t){.rank = 3, .heads = 2, .layers = 1}),
			 KV_ERR_COVERAGE);
	assert_int_equal(u_put_layers(&u_, d_, &put_, &first_), KV_ERR_NOT_FOUND);
	u_.staging_status = KV_ERR_FAULT;
	assert_int_equal(u_put_layers(&u_, m_, &put_, &first_), KV_ERR_FAULT);
	u_.staging_status = KV_OK;
	check_layers(16, 0);
	assert_int_equal(take_lease(d_), KV_OK);
	ask.bad_block = (kv_msg_bad_block_t){.lease = lease_.id, .index = 2};
	assert_int_equal(u_request(&u_, d_, KV_CODE_BAD_BLOCK, &ask, &reply), KV_ERR_ARG); /* nothing is there */
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 1), KV_OK);
	assert_int_equal(u_put_layers(&u_, m_, &put_, &first_), KV_ERR_COVERAGE); /* one way or the other */
	assert_int_equal(u_put_end(&u_, m_, &put_, 1, 7), KV_OK);
	assert_true(u_lease_alive(&lease_) || u_visible(&u_, 0, &space_, keys_, 16) == 16);
	universe_check(&u_);
	stage_end();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p3_layers_are_seen_by_the_consumer_alone_until_the_blocks_are_whole),
		cmocka_unit_test(p1_a_layer_that_was_handed_over_stays_as_it_is),
		cmocka_unit_test(p3_a_layer_counts_when_all_ranks_have_it),
		cmocka_unit_test(p5_a_late_consumer_learns_how_many_layers_there_are),
		cmocka_unit_test(p1_p4_whatever_ends_first_the_lease_ends_before_the_slots),
		cmocka_unit_test(p4_the_consumer_is_told_of_an_early_end),
		cmocka_unit_test(p4_what_is_given_back_is_leased_by_the_next),
		cmocka_unit_test(p1_the_lease_ends_when_another_copy_was_first),
		cmocka_unit_test(p1_the_lease_ends_when_a_block_that_was_visible_is_lost),
		cmocka_unit_test(p1_the_lease_ends_before_its_blocks_go_to_disk),
		cmocka_unit_test(p5_eviction_never_takes_an_open_puts_slots),
		cmocka_unit_test(p5_an_open_lease_is_capped_and_expires_like_any_other),
		cmocka_unit_test(p10_a_put_that_does_not_follow_is_refused),
		cmocka_unit_test(p10_layers_that_cannot_be_are_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
