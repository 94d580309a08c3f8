/* The network between two daemons is cut, one way or both, loses packets or is slow; then it is whole again. */
#include "e2e/rig/netns.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define BLOCKS 64u
#define SOON   30000u
#define DELAY  100u /* ms each way, of a slow link */

static peers_t net_;
static user_t owner_, consumer_;
static kvc_key_t keys_[2][BLOCKS];
static uint32_t tokens_[BLOCKS * RIG_TOKENS];

static void start(void)
{
	peers_start(&net_);
	user_attach(&owner_, &net_.rig[0], "model");
	user_attach(&consumer_, &net_.rig[1], "model");
	peers_connected(&net_);
}

KV_FIXTURE(setup)
{
	netns_init(&net_);
	start();
}

KV_FIXTURE(setup_slow)
{
	netns_init_slow(&net_, DELAY);
	for (uint32_t i = 0; i < 2; i++) {
		rig_option(&net_.rig[i], "--peers.timeout=60s");
	}
	start();
}

KV_FIXTURE(teardown)
{
	user_leave(&owner_);
	user_leave(&consumer_);
	netns_fini(&net_);
}

/* A new conversation at the owner. */
static void put(uint64_t seed)
{
	user_tokens(seed, BLOCKS, tokens_);
	user_keys(&owner_, seed, BLOCKS, keys_[0]);
	user_keys(&consumer_, seed, BLOCKS, keys_[1]);
	assert_int_equal(user_put(&owner_, keys_[0], 0, BLOCKS, 0, NULL), KVC_OK);
}

static kvc_status_t fetch(void)
{
	const kvc_prompt_t prompt = {.struct_size = sizeof prompt, .tokens = tokens_, .n_tokens = BLOCKS * RIG_TOKENS};
	const kvc_fetch_t ask = {.struct_size = sizeof ask, .peer = "node0", .prompt = &prompt};
	kvc_handover_t *wanted = NULL;
	kvc_status_t status;

	assert_int_equal(kvc_handover_fetch(consumer_.space, &ask, &wanted), KVC_OK);
	status = kvc_handover_wait(wanted, 0, SOON);
	assert_int_not_equal(status, KVC_ERR_TIMEOUT);
	kvc_handover_done(wanted, 0);

	return status;
}

/* Blocks that are here have the owner's bytes. */
static void check_bytes(uint32_t least)
{
	const uint32_t n = user_match(&consumer_, keys_[1], BLOCKS);

	assert_in_range(n, least, BLOCKS);
	if (n > 0) {
		user_expect_as(&consumer_, keys_[1], keys_[0], n);
	}
}

/* Both are up again without anybody's help, and a prefix comes. */
static void check_healed(uint64_t seed)
{
	const uint64_t deadline = rig_now_ms() + SOON;
	kvc_status_t status = KVC_PENDING;

	put(seed);
	peers_connected(&net_);
	while (status != KVC_OK && rig_now_ms() < deadline) {
		status = fetch();
		usleep(status == KVC_OK ? 0 : 50000);
	}
	assert_int_equal(status, KVC_OK);
	check_bytes(BLOCKS);
	rig_check_quiet(&net_.rig[0]);
	rig_check_quiet(&net_.rig[1]);
}

/* The daemons themselves do not notice: local hits go on. */
static void check_cut_off(void)
{
	assert_true(rig_metric_is(&net_.rig[0], "kvd_peers_up", 0));
	assert_true(rig_metric_is(&net_.rig[1], "kvd_peers_up", 0));
	assert_true(fetch() < 0);
	user_expect(&owner_, keys_[0], BLOCKS);
}

KV_TEST(p6_a_partition_is_a_miss_and_heals_by_itself, setup, teardown)
{
	put(1);
	netns_link(0);
	check_cut_off();
	netns_link(1);
	check_healed(2);
}

KV_TEST(p6_a_partition_one_way_is_a_miss_and_heals_by_itself, setup, teardown)
{
	for (uint32_t i = 0; i < 2; i++) {
		put(10 + i);
		netns_drop(i, 100);
		check_cut_off();
		netns_drop(i, 0);
		check_healed(20 + i);
	}
}

/* The link goes while blocks are under way. */
KV_TEST(p1_a_cut_at_any_moment_leaves_no_wrong_byte, setup, teardown)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};

	netns_run(0, "tc qdisc add dev veth0 root tbf rate 40mbit burst 32kb latency 50ms");
	for (uint32_t round = 0; round < 4; round++) {
		const kvc_prompt_t prompt = {
			.struct_size = sizeof prompt, .tokens = tokens_, .n_tokens = BLOCKS * RIG_TOKENS};
		const kvc_fetch_t ask = {.struct_size = sizeof ask, .peer = "node0", .prompt = &prompt};
		kvc_handover_t *wanted = NULL;

		put(100 + round);
		assert_int_equal(kvc_handover_fetch(consumer_.space, &ask, &wanted), KVC_OK);
		(void)kvc_handover_wait(wanted, 0, (uint32_t)kv_test_below(&rng, 250));
		netns_link(0);
		assert_int_not_equal(kvc_handover_wait(wanted, 0, SOON), KVC_ERR_TIMEOUT);
		kvc_handover_done(wanted, 0);
		check_bytes(0);
		netns_link(1);
		peers_connected(&net_);
	}
	netns_run(0, "tc qdisc del dev veth0 root");
	check_healed(200);
}

KV_TEST(p1_lost_packets_and_a_slow_link_leave_no_wrong_byte, setup, teardown)
{
	netns_run(0, "tc qdisc add dev veth0 root tbf rate 20mbit burst 32kb latency 50ms");
	put(1);
	assert_int_equal(fetch(), KVC_OK);
	check_bytes(BLOCKS);
	netns_run(0, "tc qdisc del dev veth0 root");
	netns_drop(1, 30);
	for (uint32_t i = 0; i < 3; i++) {
		put(2 + i);
		(void)fetch();
		check_bytes(0);
	}
	netns_drop(1, 0);
	check_healed(10);
}

/* A packet and its answer take 200 ms. */
KV_TEST(p1_packets_that_take_long_leave_no_wrong_byte, setup_slow, teardown)
{
	for (uint32_t i = 0; i < 3; i++) {
		const uint64_t start_ms = rig_now_ms();

		put(1 + i);
		assert_int_equal(fetch(), KVC_OK);
		assert_in_range(rig_now_ms() - start_ms, 4 * DELAY, SOON); /* ASK, OFFER, GO, bytes */
		check_bytes(BLOCKS);
	}
	assert_int_equal(rig_metric(&net_.rig[1], "kvd_peer_breaks_total"), 0);
	rig_check_quiet(&net_.rig[0]);
	rig_check_quiet(&net_.rig[1]);
}
