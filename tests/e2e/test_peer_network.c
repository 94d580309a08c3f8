/* Hand-overs and prefixes between two daemons over a network that is drawn from a seed (wire_between.h): what comes are
 * the right bytes, what cannot come is said, and nothing is left under way. */
#include "e2e/rig/wire_between.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

#define SEEDS  300u
#define TALKS  3u  /* at once, at most */
#define BLOCKS 24u /* at most */
#define WAIT   20000u

enum fault { NONE, CUT, FLIP, STILL, PRODUCER_GIVES_UP, OTHER_CONSUMER, FULL, FAULTS };
static const char *const fault_names[FAULTS] = {"none",
						"a cut",
						"a changed bit",
						"bytes that stand still",
						"a producer that gives up",
						"another consumer",
						"a queue that is full"};

typedef struct talk {
	uint64_t number;
	int is_prefix;
	uint32_t n, sent; /* units */
	kvc_key_t keys[2][BLOCKS];
	uint32_t tokens[BLOCKS * RIG_TOKENS];
	kvc_handover_t *made, *wanted;
	int is_asked, gave_up; /* its producer */
	uint64_t order;
	kv_status_t answer; /* to the order */
} talk_t;

static rig_t rigs_[2];
static user_t users_[2]; /* producer, consumer */
static wire_t wire_;
static kv_test_rng_t rng_;
static talk_t talks_[TALKS];
static uint64_t number_, whole_[FAULTS], failed_[FAULTS];
static uint32_t seeds_ = SEEDS;

static void name_transfer(const talk_t *talk, char out[32])
{
	snprintf(out, 32, "talk-%" PRIu64, talk->number);
}

static void begin_talk(talk_t *talk)
{
	*talk = (talk_t){.number = ++number_,
			 .is_prefix = kv_test_below(&rng_, 4) == 0,
			 .n = 1 + (uint32_t)kv_test_below(&rng_, BLOCKS)};
	user_tokens(talk->number, talk->n, talk->tokens);
	user_keys(&users_[0], talk->number, talk->n, talk->keys[0]);
	user_keys(&users_[1], talk->number, talk->n, talk->keys[1]);
	if (talk->is_prefix) {
		assert_int_equal(user_put(&users_[0], talk->keys[0], 0, talk->n, 0, NULL), KVC_OK);
		talk->sent = talk->n;
	}
}

/* The next chunk. */
static void step_producer(talk_t *talk)
{
	const kvc_key_source_t source = {.key = user_key_at, .ctx = talk->keys[0]};
	const uint32_t n = talk->sent + 1 + (uint32_t)kv_test_below(&rng_, talk->n - talk->sent);
	char transfer[32];
	const kvc_handover_chunk_t chunk = {
		.struct_size = sizeof chunk, .transfer = transfer, .n = n, .source = &source, .last = n == talk->n};

	name_transfer(talk, transfer);
	assert_int_equal(user_put(&users_[0], talk->keys[0], talk->sent, n, 0, NULL), KVC_OK);
	assert_int_equal(kvc_handover_send(users_[0].space, &chunk, &talk->made), KVC_OK);
	assert_int_equal(kvc_handover_wait(talk->made, 0, WAIT), KVC_OK);
	talk->sent = n;
}

static void ask_for_talk(talk_t *talk)
{
	const kvc_identity_t identity = user_identity("model");
	char transfer[32];

	name_transfer(talk, transfer);
	assert_int_equal(wire_fetch(&wire_, &identity, transfer, talk->is_prefix, talk->tokens, talk->n * RIG_TOKENS),
			 KV_OK);
	assert_int_equal(kvc_handover_recv(users_[1].space, transfer, WAIT, &talk->wanted), KVC_OK);
	talk->order = wire_.order;
	talk->answer = KV_PENDING;
	talk->is_asked = 1;
}

static kvc_handover_info_t info_of(const talk_t *talk)
{
	kvc_handover_info_t info = {.struct_size = sizeof info};

	kvc_handover_get_info(talk->wanted, &info);

	return info;
}

/* Of the hand-over, or why none has begun: then the daemon ends the wait with the answer to its order. */
static kv_status_t status_of(talk_t *talk)
{
	if (talk->answer == KV_PENDING) {
		talk->answer = wire_answer(&wire_, talk->order);
	}

	return talk->answer < 0 ? talk->answer : (kv_status_t)info_of(talk).status;
}

/* Units that the consumer was told of are there, and right. */
static void check_units(const talk_t *talk, uint32_t n)
{
	static uint8_t bytes[BLOCKS][RIG_BLOCK_BYTES], want[RIG_BLOCK_BYTES];
	kvc_lease_t *lease = NULL;
	void *dst[BLOCKS];

	assert_in_range(n, 0, talk->sent);
	if (n == 0) {
		return;
	}
	for (uint32_t i = 0; i < n; i++) {
		dst[i] = bytes[i];
	}
	assert_int_equal(kvc_acquire(users_[1].space, talk->keys[1], n, 0, 0, &lease), KVC_OK);
	assert_int_equal(kvc_lease_n(lease), n);
	assert_int_equal(kvc_lease_read(lease, 0, n, dst, NULL), KVC_OK);
	for (uint32_t i = 0; i < n; i++) {
		user_fill(&talk->keys[0][i], want);
		assert_memory_equal(bytes[i], want, sizeof want);
	}
	kvc_release(&lease, 1);
}

/* It gives the hand-over back, and the next one on its node takes it. */
static void change_consumer(talk_t *talk)
{
	char transfer[32];

	name_transfer(talk, transfer);
	kvc_handover_done(talk->wanted, 1);
	assert_int_equal(kvc_handover_recv(users_[1].space, transfer, WAIT, &talk->wanted), KVC_OK);
}

static void inject_fault(enum fault fault, talk_t *talk)
{
	switch (fault) {
	case CUT:
		wire_cut(&wire_);
		break;
	case FLIP:
		wire_.flip_next = 1;
		break;
	case STILL:
		wire_.still = 1;
		break;
	case PRODUCER_GIVES_UP:
		if (talk->made && talk->sent < talk->n) {
			kvc_handover_done(talk->made, 1);
			talk->made = NULL;
			talk->gave_up = 1;
		}
		break;
	case FULL:
		wire_.full = 1 + (uint32_t)kv_test_below(&rng_, 3);
		break;
	case OTHER_CONSUMER:
		if (talk->wanted) {
			change_consumer(talk);
		}
		break;
	default:
		break;
	}
}

/* 1: it has its end. */
static int step_talk(talk_t *talk)
{
	if (talk->gave_up) {
		return !talk->is_asked || status_of(talk) != KV_PENDING;
	}
	if (!talk->is_asked && kv_test_below(&rng_, 40) == 0) {
		ask_for_talk(talk);
	}
	if (talk->sent < talk->n && kv_test_below(&rng_, 200) == 0) {
		step_producer(talk);
	}

	return talk->is_asked && status_of(talk) != KV_PENDING;
}

/* Steps until all have their ends, and until nothing is under way. */
static void run(uint32_t count, enum fault fault)
{
	const uint64_t deadline = rig_now_ms() + WAIT;
	uint64_t fault_at = kv_test_below(&rng_, 4000), steps = 0;
	uint32_t ended = 0;

	while (ended < count || !wire_is_quiet(&wire_)) {
		if (steps++ == fault_at) {
			inject_fault(fault, &talks_[kv_test_below(&rng_, count)]);
		}
		if (steps % 256 == 0 && rig_now_ms() > deadline) {
			fail_msg("%u of %u transfers have ended, fault: %s", ended, count, fault_names[fault]);
		}
		wire_step(&wire_);
		wire_.still = wire_.still && wire_.cuts == 0 && wire_.net[1].fetches;
		if (steps % 8 == 0) {
			(void)kvc_poll(users_[1].kvc, 0);
		}
		ended = 0;
		for (uint32_t i = 0; i < count; i++) {
			ended += (uint32_t)step_talk(&talks_[i]);
		}
	}
}

/* After a fault nothing is lost: what its producer has handed over comes when it is asked for once more. While the
 * owner's side has not heard of the end, it is taken. */
static void ask_again(talk_t *talk)
{
	const uint64_t deadline = rig_now_ms() + WAIT;

	do {
		if (rig_now_ms() > deadline) {
			fail_msg("talk %" PRIu64 ": lost: %s", talk->number, kvc_status_name(status_of(talk)));
		}
		kvc_handover_done(talk->wanted, 0);
		talk->wanted = NULL;
		(void)rig_number(users_[1].kvc, "kvd_handovers"); /* its answer comes after that of DONE */
		talk->is_asked = 0;
		talks_[0] = *talk;
		run(1, NONE);
		*talk = talks_[0];
	} while (status_of(talk) != KV_OK);
}

static void end_talk(talk_t *talk, enum fault fault)
{
	if (talk->wanted && !talk->gave_up) {
		const int came = status_of(talk) == KV_OK;

		(*(came ? &whole_ : &failed_))[fault]++;
		if (!came) {
			assert_true(fault != NONE && fault != FULL);
			check_units(talk, info_of(talk).n);
			ask_again(talk);
		}
		assert_int_equal(info_of(talk).n, talk->n);
	}
	if (talk->wanted) {
		check_units(talk, info_of(talk).n);
	}
	kvc_handover_done(talk->wanted, 0);
	kvc_handover_done(talk->made, 0);
}

static void play(enum fault fault)
{
	const uint32_t count = 1 + (uint32_t)kv_test_below(&rng_, TALKS);
	talk_t played[TALKS];

	wire_.cuts = wire_.flips = wire_.full = 0;
	wire_.flip_next = 0;
	wire_.still = 0;
	for (uint32_t i = 0; i < count; i++) {
		begin_talk(&talks_[i]);
	}
	run(count, fault);
	wire_.flip_next = 0;
	memcpy(played, talks_, sizeof played);
	for (uint32_t i = 0; i < count; i++) {
		end_talk(&played[i], fault);
	}
}

static void check_quiet(void)
{
	for (uint32_t i = 0; i < 2; i++) {
		(void)kvc_poll(users_[i].kvc, 0);
		assert_true(rig_metric_is(&rigs_[i], "kvd_handover_bytes", 0));
		rig_check_quiet(&rigs_[i]);
	}
}

static int open_all(void **state)
{
	(void)state;
	rng_.state = kv_test_seed();
	for (uint32_t i = 0; i < 2; i++) {
		rig_init(&rigs_[i], 0);
		rig_option(&rigs_[i], "--cpu.size=32MiB");
		rig_option(&rigs_[i], "--handover.ttl=30s");
		rig_start(&rigs_[i]);
		user_attach(&users_[i], &rigs_[i], "model");
	}
	wire_open(&wire_, rigs_, &rng_);

	return 0;
}

static int close_all(void **state)
{
	(void)state;
	for (uint32_t i = 0; i < 2; i++) {
		user_leave(&users_[i]);
		rig_fini(&rigs_[i]);
	}

	return 0;
}

/* Nothing is left of what a test has begun. */
static void end_all(void)
{
	const uint64_t deadline = rig_now_ms() + WAIT;

	wire_cut(&wire_);
	while (!wire_is_quiet(&wire_)) {
		assert_true(rig_now_ms() < deadline);
		wire_step(&wire_);
	}
	wire_.net[1].answer_count = 0;
}

KV_TEST(p1_p4_any_order_cut_or_change_leaves_right_bytes_and_nothing_else)
{
	uint64_t corrupt = 0;

	for (uint32_t seed = 0; seed < seeds_; seed++) {
		rng_.state = kv_test_seed() + seed * UINT64_C(0x9e3779b97f4a7c15);
		play((enum fault)(seed % FAULTS));
		corrupt += wire_.flips;
		if (seed % 100 == 99) {
			check_quiet();
		}
	}
	for (uint32_t f = 0; f < FAULTS; f++) {
		printf("# %-26s %4" PRIu64 " came whole, %4" PRIu64 " failed and came when asked for again\n",
		       fault_names[f], whole_[f], failed_[f]);
	}
	printf("# %" PRIu64 " messages, %" PRIu64 " pushes, %" PRIu64 " of them changed\n", wire_.delivered,
	       wire_.pushes, corrupt);
	assert_int_equal(wire_.net[1].peers[0].counts.corrupt, corrupt);
}

/* A step of the asker alone, with this clock. */
static void step_asker(uint64_t later_ns)
{
	kvd_net_t *net = &wire_.net[1];

	(void)rig_number(users_[1].kvc, "kvd_handovers"); /* its daemon has had its turn */
	kvd_tenants_poll(net);
	net->now_ns += later_ns;
	kvd_fetches_step(net);
}

static void begin_fetch(talk_t *talk)
{
	const kvc_identity_t identity = user_identity("model");
	char transfer[32];

	begin_talk(talk);
	name_transfer(talk, transfer);
	assert_int_equal(wire_fetch(&wire_, &identity, transfer, 0, talk->tokens, talk->n * RIG_TOKENS), KV_OK);
}

/* After each number of steps: one that is late is not asked for, with a deadline in years. */
KV_TEST(p5_what_is_too_late_is_not_asked_for)
{
	int is_asked = 0;

	for (uint32_t steps = 0; steps < WAIT && !is_asked; steps++) {
		talk_t talk;

		begin_fetch(&talk);
		for (uint32_t i = 0; i < steps && !wire_has_asked(); i++) {
			step_asker(0);
		}
		is_asked = wire_has_asked();
		while (wire_.net[1].fetches && !is_asked) {
			step_asker(UINT64_C(3600000000000));
			assert_false(wire_has_asked());
		}
		end_all();
	}
	assert_true(is_asked);
}

/* The asker's daemon knows the transfer. */
static int has_transfer(const talk_t *talk)
{
	static char out[1 << 16];
	char transfer[40];

	name_transfer(talk, transfer);
	strcat(transfer, "\"");
	assert_int_equal(rig_kvctl(&rigs_[1], "transfers --json", out, sizeof out), 0);

	return strstr(out, transfer) != NULL;
}

/* Its consumer's own deadline has passed, and nobody hears of the end. It has gone before handover.ttl. */
KV_TEST(p4_a_fetch_whose_consumer_does_not_come_leaves_nothing)
{
	const uint64_t deadline = rig_now_ms() + WAIT;
	talk_t talk;

	wire_.timeout_ms = 200;
	begin_fetch(&talk);
	while (!wire_has_asked()) {
		assert_true(rig_now_ms() < deadline);
		step_asker(0);
	}
	assert_true(has_transfer(&talk));
	while (wire_.net[1].fetches) {
		step_asker(UINT64_C(300000000));
	}
	while (has_transfer(&talk)) {
		assert_true(rig_now_ms() < deadline);
		usleep(10000);
	}
	wire_.timeout_ms = WAIT;
	end_all();
}

static void give_up_fetches(void)
{
	kvd_net_t *nets = wire_.net;

	while (nets[1].fetches || nets[0].peers[0].serving > 0) {
		kvd_net_set_time(&nets[1], nets[1].now_ns + WAIT * UINT64_C(1000000));
		wire_step(&wire_);
	}
}

/* The asker has said GO for the bytes of a transfer, and for some time since. */
static void step_until_go(uint32_t transfers)
{
	const uint32_t pushes = transfers < KVD_NET_PUSHES_MAX ? transfers : KVD_NET_PUSHES_MAX;
	const uint64_t deadline = rig_now_ms() + WAIT;

	while (kvd_fetch_in_flight(&wire_.net[1].peers[0]) == 0 || wire_pushes() < pushes) {
		assert_true(rig_now_ms() < deadline);
		wire_step(&wire_);
	}
	for (uint32_t steps = 0; steps < 2000; steps++) {
		wire_step(&wire_);
	}
}

/* A peer asks, says that there is room, and gives up, again and again: nothing of what is being pushed is let go of
 * before its end, so all of it counts. */
KV_TEST(p5_pushes_of_transfers_that_were_given_up_are_counted)
{
	uint32_t most = 0;

	wire_.still = 1;
	for (uint32_t i = 0; i < 3 * KVD_NET_PUSHES_MAX; i++) {
		talk_t talk = {.number = ++number_, .n = 1, .is_prefix = 1};

		user_tokens(talk.number, talk.n, talk.tokens);
		user_keys(&users_[0], talk.number, talk.n, talk.keys[0]);
		assert_int_equal(user_put(&users_[0], talk.keys[0], 0, talk.n, 0, NULL), KVC_OK);
		ask_for_talk(&talk);
		step_until_go(i + 1);
		most = most > wire_pushes() ? most : wire_pushes();
		give_up_fetches();
		kvc_handover_done(talk.wanted, 0);
	}
	assert_int_equal(most, KVD_NET_PUSHES_MAX);
	assert_int_equal(wire_pushes(), KVD_NET_PUSHES_MAX);
	wire_.still = 0;
	end_all();
	assert_int_equal(wire_.net[0].peers[0].pushes, 0);
	for (uint32_t i = 0; i < SEEDS / 10; i++) {
		play(NONE);
	}
	check_quiet();
}

/* Of one block, at the beginning of the prompt. */
static kv_status_t offer_block(uint64_t batch)
{
	static const uint8_t ticket[KVD_NET_TICKET];
	static uint64_t leaves[KVD_NET_MAX_LEAVES];
	kvk_layout_t layout;
	kvk_geometry_t geometry;
	kvd_net_offer_t offer = {
		.id = wire_.net[1].next_id, .batch = batch, .ticket = {ticket, sizeof ticket}, .count = 1, .units = 1};

	assert_int_equal(kvk_layout_parse(RIG_LAYOUT, strlen(RIG_LAYOUT), &layout, NULL), KV_OK);
	kvk_layout_geometry(&layout, &geometry);
	offer.leaves =
		(kv_slice_t){(const uint8_t *)leaves, (uint32_t)(geometry.heads * geometry.leaves * sizeof leaves[0])};

	return kvd_fetch_offer(&wire_.net[1].peers[0], &offer);
}

/* What a peer may have open is bounded, and each of it has a number of its own. The last test: the owner's own numbers
 * are lower. */
KV_TEST(p10_offers_over_the_limit_or_of_one_number_are_refused)
{
	const uint64_t deadline = rig_now_ms() + WAIT;
	uint64_t batch = wire_.net[0].next_id + 1000;
	talk_t talk;

	begin_fetch(&talk);
	while (!wire_has_asked()) {
		assert_true(rig_now_ms() < deadline);
		step_asker(0);
	}
	assert_int_equal(offer_block(batch), KV_OK);
	assert_int_equal(offer_block(batch), KV_ERR_PROTO);
	assert_int_equal(offer_block(batch - 1), KV_ERR_PROTO);
	for (uint32_t i = 1; i < 16; i++) {
		assert_int_equal(offer_block(++batch), KV_OK);
	}
	assert_int_equal(offer_block(++batch), KV_ERR_PROTO);
	end_all();
}

int main(int argc, char **argv)
{
	if (argc == 2) {
		seeds_ = (uint32_t)strtoul(argv[1], NULL, 10);
	}

	return kv_test_run(open_all, close_all);
}
