/* Announced blocks: what they may keep and cost, clients that announce what makes no sense, and two tenants. */
#include "ahead_stage.h"

#include "core/base/share.h"

static u_member_t *stranger_; /* of the other namespace */
static kvd_space_info_t theirs_;

/* `share`: bytes of memory of each namespace; 0: no end. */
static void stage_tenants(uint64_t share)
{
	stage_one_in(&(u_config_t){.cpu_slots = 1024, .share = {[0] = {share}, [1] = {share}}});
	stranger_ = u_join(&u_, 1, "engine", 2, 0);
	theirs_ = u_space(&u_, 1, "one");
}

static void allow_many(uint32_t entries)
{
	u_.core->config.max_handover_bytes = UINT64_C(1) << 30;
	u_.core->config.max_handovers = u_.core->config.max_leases = entries;
	u_.core->handovers.limit = entries;
}

/* `count` entries of m_, of n units each; the last one is sent_. Every other one is the last chunk. */
static void announce_many(uint32_t count, const kv_key_t *keys, uint32_t n)
{
	char name[16];

	for (uint32_t i = 0; i < count; i++) {
		u_send_t send = to_announce(name, 0, n, i % 2);

		snprintf(name, sizeof name, "%u", i);
		send.keys = keys;
		assert_int_equal(send_it(send), KV_OK);
	}
}

/* All entries of the first namespace have n units, and `complete` of them are complete. */
static void check_all(uint32_t n, uint32_t complete)
{
	for (uint32_t i = 0; i < u_.core->handovers.made; i++) {
		const kvd_handover_t *one = kvd_obj_at(&u_.core->handovers, i);
		const int counts = one->number != 0 && one->ns == 0;

		assert_true(!counts || one->n == n);
		complete -= counts && one->state == KV_HANDOVER_COMPLETE;
	}
	assert_int_equal(complete, 0);
	assert_int_equal(u_.core->announced_count, 0);
}

/* ---- bytes ----------------------------------------------------------------------------------- */

STAGE_TEST(p5_keys_of_announced_blocks_are_counted_and_given_back, stage_one(128, 0))
{
	u_.core->config.max_handover_bytes = 4 * 4096;
	assert_int_equal(announce(0, 0, 200, 0), KV_OK);
	assert_int_equal(u_.core->ns[0]->tail_bytes, 200 * sizeof(kv_key_t));
	assert_int_equal(kvd_share_irreclaimable(u_.core, 0, KVD_HOST_MEM), 200 * sizeof(kv_key_t));
	u_.core->config.max_handover_bytes = 4096;
	assert_int_equal(announce(sent_.number, 200, 300, 0), KV_ERR_BUSY);
	assert_int_equal(metric(KV_M_HANDOVERS_REFUSED), 1);
	assert_int_equal(u_.core->ns[0]->tail_bytes, 200 * sizeof(kv_key_t));
	universe_check(&u_);
	assert_int_equal(u_done(&u_, m_, sent_.number, U_GIVE_UP), KV_OK);
	assert_int_equal(u_.core->ns[0]->tail_bytes, 0);
	assert_int_equal(u_.core->announced_count, 0);
}

/* No room when a block becomes visible: the announcement is dropped, the producer knows, and sends again. */
STAGE_TEST(p5_without_room_for_a_pin_the_announcement_is_dropped, stage_one(128, 0))
{
	u_.core->config.max_handover_bytes = 6 * 4096;
	assert_int_equal(receive(d_), KV_OK);
	assert_int_equal(announce(0, 0, 8, 1), KV_OK);
	put(m_, 0, 4);
	check_told(KV_HANDOVER_SENDING, 4, 8);
	put(m_, 4, 8);
	check_notice(m_, sent_.number, KV_HANDOVER_SENDING, 4, KV_OK);
	assert_int_equal(last_notice(m_, sent_.number)->announced, 0);
	assert_int_equal(u_.core->announced_count, 0);
	assert_int_equal(metric(KV_M_HANDOVERS_REFUSED), 1);
	assert_int_equal(send_visible(8, 1), KV_ERR_BUSY);
	u_.core->config.max_handover_bytes = 0;
	assert_int_equal(send_visible(8, 1), KV_OK);
	check_notice(d_, sent_.number, KV_HANDOVER_COMPLETE, 8, KV_OK);
}

/* ---- quanta ---------------------------------------------------------------------------------- */

/* Many entries, each with much: every quantum is bounded, none waits for another's end, all are complete. */
STAGE_TEST(p5_announced_blocks_are_looked_up_in_quanta, stage_one(512, 0))
{
	uint32_t quanta = 0;

	allow_many(64);
	announce_many(40, keys_, 300);
	assert_int_equal(u_put(&u_, m_, &one_, keys_, 0, 300), 300);
	while (kvd_handovers_run(u_.core)) {
		quanta++;
		universe_check(&u_);
	}
	assert_true(quanta >= 40 && quanta < 100);
	check_all(300, 20);
}

/* The private block is looked up by the next quantum when the blocks have taken one. */
STAGE_TEST(p5_a_private_block_has_a_lookup_of_its_own, stage_one(512, 0))
{
	u_send_t send = to_announce("t", 0, 256, 1);

	send.partial = 5;
	send.private_key = private_;
	u_.core->config.max_handover_bytes = UINT64_C(1) << 30;
	assert_int_equal(send_it(send), KV_OK);
	assert_int_equal(u_put_private(&u_, m_, &one_, &private_), 1);
	assert_int_equal(u_put(&u_, m_, &one_, keys_, 0, 256), 256);
	assert_int_equal(kvd_handovers_run(u_.core), 1);
	assert_int_equal(entry()->n, 256);
	assert_int_equal(entry()->state, KV_HANDOVER_SENDING);
	assert_int_equal(kvd_handovers_run(u_.core), 0);
	assert_int_equal(entry()->state, KV_HANDOVER_COMPLETE);
	assert_int_equal(entry()->partial, 5);
}

/* Six hundred entries that wait for something else cost a look each, and no quantum without end. */
STAGE_TEST(p5_entries_that_wait_are_looked_at_once_for_what_appears, stage_one(128, 0))
{
	uint32_t quanta = 0;

	allow_many(600);
	announce_many(600, fork_, 12);
	assert_int_equal(u_put(&u_, m_, &one_, &keys_[100], 0, 1), 1);
	assert_true(kvd_handovers_are_due(u_.core));
	while (kvd_handovers_run(u_.core)) {
		quanta++;
	}
	assert_int_equal(quanta, 2);
	assert_false(kvd_handovers_are_due(u_.core));
	assert_int_equal(u_.core->announced_count, 600);
}

/* More than one tick may look up: each says that there is more until all is handed over, and nobody sends anything.
 * What is announced and not visible keeps no loop awake. */
STAGE_TEST(p5_a_loop_does_not_sleep_over_announced_blocks, stage_one(512, 0))
{
	uint32_t ticks = 0;

	allow_many(128);
	announce_many(100, keys_, 300);
	u_tick(&u_, 1);
	assert_int_not_equal(kvd_core_tick(u_.core), 0);
	assert_int_equal(u_put(&u_, m_, &one_, keys_, 0, 300), 300);
	while (kvd_core_tick(u_.core) == 0) {
		assert_true(++ticks < 100);
		universe_check(&u_);
	}
	assert_true(ticks > 0);
	check_all(300, 50);
}

/* ---- clients that mean harm, or err ---------------------------------------------------------- */

/* A request as no library makes it. */
typedef struct garbage {
	uint64_t number;
	uint32_t parts[3 * 2], parts_len; /* bytes */
	const kv_key_t *keys;
	uint32_t keys_len; /* bytes */
	uint32_t flags, partial, space;
	uint64_t epoch;
} garbage_t;

static kv_status_t send_garbage(u_member_t *m, const char *transfer, const garbage_t *garbage)
{
	const kv_msg_t ask = {.handover_send = {.transfer = kv_slice_str(transfer),
						.number = garbage->number,
						.space = garbage->space,
						.epoch = garbage->epoch,
						.partial = garbage->partial,
						.private_key = private_,
						.flags = garbage->flags,
						.parts = {(const uint8_t *)garbage->parts, garbage->parts_len},
						.keys = {(const uint8_t *)garbage->keys, garbage->keys_len}}};
	kv_msg_t answer;

	return u_request(&u_, m, KV_CODE_HANDOVER_SEND, &ask, &answer);
}

static garbage_t announcement(uint32_t n, uint32_t count)
{
	return (garbage_t){.parts = {0, n, count},
			   .parts_len = 12,
			   .keys = keys_,
			   .keys_len = count * KV_KEY_BYTES,
			   .flags = KV_HANDOVER_AHEAD,
			   .space = one_.space,
			   .epoch = one_.epoch};
}

STAGE_TEST(p10_announcements_that_are_not_sound_are_refused, stage_one(64, 0))
{
	static const struct {
		uint32_t n, count, keys_len, parts_len, group, flags, partial;
		uint64_t epoch, number; /* each of these on top of what is right */
		kv_status_t status;
	} rows[] = {
		{.n = 0, .count = 0, .status = KV_ERR_ARG}, /* a part without units */
		{.n = 4, .count = 5, .status = KV_ERR_ARG}, /* more keys than units */
		{.n = KV_MAX_BLOCKS + 1, .count = 4, .status = KV_ERR_ARG},
		{.n = UINT32_MAX, .count = 4, .status = KV_ERR_ARG},
		{.n = 4, .count = UINT32_MAX, .status = KV_ERR_ARG}, /* a count whose bytes wrap to none */
		{.n = 8, .count = 4, .status = KV_MISS},             /* a gap before the first */
		{.n = 4, .count = 0, .status = KV_ERR_ARG},          /* a unit whose key is not named */
		{.n = 4, .count = 4, .keys_len = UINT32_MAX, .status = KV_ERR_ARG},
		{.n = 4, .count = 4, .keys_len = KV_KEY_BYTES, .status = KV_ERR_ARG},
		{.n = 4, .count = 4, .parts_len = UINT32_MAX, .status = KV_ERR_ARG},
		{.n = 4, .count = 4, .group = 3, .status = KV_ERR_UNSUPPORTED}, /* no such group */
		{.n = 2, .count = 2, .keys_len = 2 * KV_KEY_BYTES, .parts_len = 12, .status = KV_ERR_ARG}, /* twice */
		{.n = 4,
		 .count = 4,
		 .flags = KV_HANDOVER_LAST,
		 .partial = 16,
		 .status = KV_ERR_ARG}, /* no whole block */
		{.n = 4, .count = 4, .epoch = 1, .status = KV_ERR_STALE_EPOCH},
		{.n = 4, .count = 4, .number = 12345, .status = KV_ERR_NOT_FOUND},
	};
	u_member_t *rival = u_join(&u_, 0, "rival", 2, 0);

	for (size_t i = 0; i < KV_COUNT_OF(rows); i++) {
		garbage_t garbage = announcement(rows[i].n, rows[i].count);

		memcpy(&garbage.parts[3], garbage.parts, 12); /* named by parts_len only */
		garbage.parts[0] += rows[i].group;
		garbage.parts_len += rows[i].parts_len;
		garbage.keys_len += rows[i].keys_len;
		garbage.flags |= rows[i].flags;
		garbage.partial = rows[i].partial;
		garbage.epoch += rows[i].epoch;
		garbage.number = rows[i].number;
		assert_int_equal(send_garbage(rival, "g", &garbage), rows[i].status);
	}
	assert_int_equal(u_.core->handovers.used + u_.core->announced_count + u_.core->ns[0]->tail_bytes, 0);
}

/* The owner of an entry is not disturbed by who announces for it, and what is announced twice as the end is the end. */
STAGE_TEST(p10_only_its_producer_announces_for_an_entry, stage_one(64, 0))
{
	garbage_t garbage;
	u_member_t *rival;

	rival = u_join(&u_, 0, "rival", 2, 0);
	assert_int_equal(receive(d_), KV_OK);
	assert_int_equal(announce(0, 0, 8, 1), KV_OK);
	garbage = announcement(12, 12);
	assert_int_equal(send_garbage(rival, "t", &garbage), KV_ERR_EXISTS);
	garbage.number = sent_.number;
	assert_int_equal(send_garbage(rival, "t", &garbage), KV_ERR_NOT_FOUND);
	assert_int_equal(send_garbage(d_, "t", &garbage), KV_ERR_NOT_FOUND); /* its consumer is no producer */
	assert_int_equal(send_garbage(rival, "another", &garbage), KV_ERR_NOT_FOUND);
	assert_int_equal(entry()->ahead.n, 8);
	assert_int_equal(u_.core->ns[0]->tail_bytes, 8 * sizeof(kv_key_t));
	assert_int_equal(announce(sent_.number, 0, 8, 1), KV_OK); /* the same end again: nothing is kept twice */
	assert_int_equal(u_.core->ns[0]->tail_bytes, 8 * sizeof(kv_key_t));
	put(m_, 0, 8);
	check_told(KV_HANDOVER_COMPLETE, 8, 0);
	assert_int_equal(announce(sent_.number, 0, 8, 1), KV_OK);
	assert_int_equal(announce(sent_.number, 8, 12, 1), KV_ERR_EXISTS); /* it has ended already */
	assert_int_equal(entry()->n, 8);
}

/* Keys of another space are names of nothing in this one, however many of their blocks are visible there. */
STAGE_TEST(p8_keys_of_another_space_hand_nothing_over, stage_one(64, 0))
{
	kvd_space_info_t other;

	other = u_space(&u_, 0, "other");
	assert_int_equal(receive(d_), KV_OK);
	assert_int_equal(announce(0, 0, 8, 1), KV_OK);
	assert_int_equal(u_put(&u_, m_, &other, keys_, 0, 8), 8);
	u_tick(&u_, 2);
	assert_int_equal(entry()->n, 0);
	assert_int_equal(u_.core->ns[0]->handover_bytes[KVD_HOST_MEM], 0);
	put(m_, 0, 8);
	check_told(KV_HANDOVER_COMPLETE, 8, 0);
}

/* Fields of any value, right ones among them. */
static garbage_t draw_garbage(const uint64_t numbers[3])
{
	static const uint32_t sizes[] = {0, 1, 4, 8, 12, 500, KV_MAX_BLOCKS, UINT32_MAX};
	kv_test_rng_t *rng = &u_.rng;
	uint32_t n = sizes[kv_test_below(rng, KV_COUNT_OF(sizes))], count = n < 512 ? n : 512;
	garbage_t garbage = announcement(n, kv_test_below(rng, 3) ? count : (uint32_t)kv_test_below(rng, count + 2));

	garbage.keys = kv_test_below(rng, 4) ? keys_ : fork_;
	garbage.keys_len = garbage.parts[2] < 512 ? garbage.parts[2] * KV_KEY_BYTES : 0;
	garbage.keys_len -= garbage.keys_len > 0 && kv_test_below(rng, 8) == 0;
	garbage.number = numbers[kv_test_below(rng, 3)];
	garbage.flags = (uint32_t)kv_test_below(rng, 4) ? garbage.flags : 0;
	garbage.flags |= kv_test_below(rng, 2) ? KV_HANDOVER_LAST : 0;
	garbage.partial = kv_test_below(rng, 6) ? 0 : (uint32_t)kv_test_below(rng, 20);
	garbage.epoch += kv_test_below(rng, 20) == 0;

	return garbage;
}

/* A client announces anything while an owner hands a prompt over: every answer has a name, the owner
 * loses nothing, and when the client has gone nothing of it is left. */
STAGE_TEST(p7_p10_garbage_announcements_disturb_nobody, stage_one(256, 0))
{
	u_member_t *rival;
	uint32_t answers[2] = {0, 0};
	char name[16];

	allow_many(512);
	rival = u_join(&u_, 0, "rival", 2, 0);
	assert_int_equal(receive(d_), KV_OK);
	assert_int_equal(announce(0, 0, 12, 1), KV_OK);
	for (uint32_t i = 0; i < 3000; i++) {
		const uint32_t made = u_.core->handovers.made;
		const kvd_handover_t *any = kvd_obj_at(&u_.core->handovers, (uint32_t)kv_test_below(&u_.rng, made));
		const uint64_t numbers[3] = {0, sent_.number, any->number};
		const garbage_t garbage = draw_garbage(numbers);
		kv_status_t status;

		snprintf(name, sizeof name, "g%u", i / 8);
		status = send_garbage(rival, kv_test_below(&u_.rng, 4) ? name : "t", &garbage);
		answers[status == KV_OK]++;
		assert_true(status == KV_OK || status == KV_MISS || status == KV_ERR_ARG || status == KV_ERR_EXISTS ||
			    status == KV_ERR_NOT_FOUND || status == KV_ERR_STALE_EPOCH || status == KV_ERR_BUSY ||
			    status == KV_ERR_UNSUPPORTED);
		if (i % 250 == 0) {
			put(m_, i / 250, i / 250 + 1);
			assert_int_equal(entry()->n, i / 250 + 1);
		}
		universe_check(&u_);
	}
	assert_true(answers[0] > 100 && answers[1] > 10);
	check_told(KV_HANDOVER_COMPLETE, 12, 0);
	u_dead(&u_, rival);
	u_settle(&u_);
	assert_int_equal(u_.core->announced_count + u_.core->ns[0]->tail_bytes, 0);
	assert_int_equal(u_done(&u_, d_, sent_.number, 0), KV_OK);
	check_notice(m_, sent_.number, KV_HANDOVER_ENDED, 12, KV_OK);
}

/* ---- another tenant -------------------------------------------------------------------------- */

static kv_status_t announce_theirs(uint64_t number, uint32_t n, kv_msg_handover_send_reply_t *reply)
{
	u_send_t send = to_announce("t", 0, n, 1);

	send.number = number;
	send.space = &theirs_;

	return u_send(&u_, stranger_, &send, reply);
}

/* Two tenants announce the same keys under the same name. */
STAGE_TEST(p8_a_block_of_one_tenant_is_not_handed_over_by_another, stage_tenants(0))
{
	kv_msg_handover_send_reply_t theirs = {0};
	char json[4096];

	assert_int_equal(receive(d_), KV_OK);
	assert_int_equal(announce(0, 0, 8, 1), KV_OK);
	assert_int_equal(announce_theirs(0, 8, &theirs), KV_OK);
	assert_int_equal(announce_theirs(sent_.number, 12, &theirs), KV_ERR_NOT_FOUND);
	u_.notice_count = 0;
	put(m_, 0, 8);
	check_told(KV_HANDOVER_COMPLETE, 8, 0);
	assert_null(last_notice(stranger_, theirs.number));
	assert_null(last_notice(stranger_, sent_.number));
	assert_int_equal(u_.core->ns[1]->handover_bytes[KVD_HOST_MEM], 0);
	(void)kvd_core_transfers_json(u_.core, u_.ns[1], json, sizeof json);
	assert_non_null(strstr(json, "\"announced_units\":8"));
	assert_int_equal(u_put(&u_, stranger_, &theirs_, keys_, 0, 8), 8);
	u_tick(&u_, 1);
	check_notice(stranger_, theirs.number, KV_HANDOVER_COMPLETE, 8, KV_OK);
}

/* One tenant's announcements end at its limit and its share, as keys and as pins; the other has all of its own. */
KV_TEST(p5_p8_announcements_of_a_tenant_end_at_its_own_limits)
{
	kv_msg_handover_send_reply_t theirs = {0};
	const uint64_t share = 128 * UINT64_C(4096);
	kv_status_t status = KV_OK;
	u_send_t send;

	stage_tenants(share); /* hand-overs: a quarter */
	for (uint32_t i = 0; status == KV_OK; i++) {
		char name[16];

		snprintf(name, sizeof name, "%u", i);
		send = to_announce(name, 0, 400, 0);
		send.keys = &keys_[100];
		status = send_it(send);
		universe_check(&u_);
	}
	assert_int_equal(status, KV_ERR_BUSY);
	assert_int_equal(kv_ns_metric_get(&u_.metrics, 0, KV_NM_HANDOVERS_REFUSED), 1);
	assert_true(u_.core->ns[0]->tail_bytes <= share / 4 &&
		    u_.core->ns[0]->tail_bytes > share / 4 - 400 * sizeof(kv_key_t));
	assert_true(kvd_share_irreclaimable(u_.core, 0, KVD_HOST_MEM) <= share);
	/* Its own share of hand-overs is full of keys: one more block cannot be pinned. */
	assert_int_equal(announce(0, 0, 4, 1), KV_OK);
	assert_int_equal(u_put(&u_, m_, &one_, keys_, 0, 4), 4);
	u_tick(&u_, 1);
	check_notice(m_, sent_.number, KV_HANDOVER_SENDING, 0, KV_OK);
	assert_int_equal(last_notice(m_, sent_.number)->announced, 0);
	assert_int_equal(kv_ns_metric_get(&u_.metrics, 0, KV_NM_HANDOVERS_REFUSED), 2);
	/* The other one has announced as much as it may keep, and gets it. */
	assert_int_equal(announce_theirs(0, 30, &theirs), KV_OK);
	assert_int_equal(u_put(&u_, stranger_, &theirs_, keys_, 0, 30), 30);
	u_tick(&u_, 1);
	check_notice(stranger_, theirs.number, KV_HANDOVER_COMPLETE, 30, KV_OK);
	assert_int_equal(kv_ns_metric_get(&u_.metrics, 1, KV_NM_HANDOVERS_REFUSED), 0);
	assert_int_equal(u_.core->ns[1]->handover_bytes[KVD_HOST_MEM], 30 * 4096);
	stage_end();
}

/* A hundred entries, each with a quantum of lookups to do, and one block of somebody else: decision 052. */
STAGE_TEST(p5_p8_announcements_of_a_tenant_do_not_delay_another, stage_tenants(0))
{
	kv_msg_handover_send_reply_t theirs = {0};
	uint32_t quanta = 0;

	allow_many(128);
	announce_many(100, keys_, 300);
	assert_int_equal(announce_theirs(0, 1, &theirs), KV_OK);
	assert_int_equal(u_put(&u_, m_, &one_, keys_, 0, 300), 300);
	assert_int_equal(u_put(&u_, stranger_, &theirs_, keys_, 0, 1), 1);
	while (!last_notice(stranger_, theirs.number)) {
		assert_int_equal(kvd_handovers_run(u_.core), 1);
		quanta++;
	}
	assert_true(quanta <= 2);
	check_notice(stranger_, theirs.number, KV_HANDOVER_COMPLETE, 1, KV_OK);
	while (kvd_handovers_run(u_.core)) {
	}
	check_all(300, 50);
}
