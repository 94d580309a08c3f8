/* Two daemons hand prefixes to each other over TLS on this machine, and one of the processes ends at the worst
 * moment. */
#include "e2e/rig/peers.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define BLOCKS 96u
#define HALF   32u
#define SOON   20000u /* ms: who runs into it has waited for nothing */

static peers_t net_; /* rigs 0 (has the blocks) and 1 (wants them) */
static user_t producer_, consumer_;
static kvc_key_t keys_[2][BLOCKS];
static uint32_t tokens_[BLOCKS * RIG_TOKENS];
static kvc_prompt_t prompt_ = {.struct_size = sizeof prompt_, .tokens = tokens_, .n_tokens = BLOCKS * RIG_TOKENS};

KV_FIXTURE(setup)
{
	peers_init(&net_);
	peers_start(&net_);
	user_attach(&producer_, &net_.rig[0], "model");
	user_attach(&consumer_, &net_.rig[1], "model");
	user_tokens(1, BLOCKS, tokens_);
	user_keys(&producer_, 1, BLOCKS, keys_[0]);
	user_keys(&consumer_, 1, BLOCKS, keys_[1]);
	peers_connected(&net_);
}

KV_FIXTURE(teardown)
{
	user_leave(&producer_);
	user_leave(&consumer_);
	peers_fini(&net_);
}

static void put(uint32_t from, uint32_t n)
{
	uint32_t visible = 0;

	assert_int_equal(user_put(&producer_, keys_[0], from, n, 0, &visible), KVC_OK);
	assert_int_equal(visible, n - from);
}

static void hand_over(uint32_t n, int last, kvc_handover_t **p_handover)
{
	const kvc_key_source_t source = {.key = user_key_at, .ctx = keys_[0]};
	const kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk,
					    .transfer = "t",
					    .n = n,
					    .source = &source,
					    .last = last,
					    .tail = "token",
					    .tail_len = last ? 5 : 0};

	assert_int_equal(kvc_handover_send(producer_.space, &chunk, p_handover), KVC_OK);
	assert_int_equal(kvc_handover_wait(*p_handover, 0, SOON), KVC_OK);
}

static kvc_status_t fetch_by(const user_t *user, const char *transfer, uint32_t timeout_ms, kvc_handover_t **p_handover)
{
	const kvc_fetch_t ask = {.struct_size = sizeof ask,
				 .peer = "node0",
				 .transfer = transfer,
				 .prompt = &prompt_,
				 .timeout_ms = timeout_ms};

	return kvc_handover_fetch(user->space, &ask, p_handover);
}

static kvc_status_t fetch(const char *transfer, uint32_t timeout_ms, kvc_handover_t **p_handover)
{
	return fetch_by(&consumer_, transfer, timeout_ms, p_handover);
}

/* The consumer's daemon has these blocks, with the bytes that were put at the other one. */
static void check_blocks(uint32_t n)
{
	user_expect_as(&consumer_, keys_[1], keys_[0], n);
}

KV_TEST(p1_a_hand_over_arrives_on_the_other_node_byte_for_byte, setup, teardown)
{
	kvc_handover_t *sent = NULL, *wanted = NULL;

	assert_int_equal(fetch("t", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, HALF, 200), KVC_ERR_TIMEOUT); /* its producer has not begun */
	put(0, HALF);
	hand_over(HALF, 0, &sent);
	assert_int_equal(kvc_handover_wait(wanted, HALF, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).status, KVC_PENDING);
	check_blocks(HALF); /* while the producer goes on */
	put(HALF, BLOCKS);
	hand_over(BLOCKS, 1, &sent);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).n, BLOCKS);
	assert_int_equal(user_handover_info(wanted).tail_len, 5);
	assert_memory_equal(user_handover_info(wanted).tail, "token", 5);
	check_blocks(BLOCKS);
	kvc_handover_done(wanted, 0);
	kvc_handover_done(sent, 0);
	peers_check_quiet(&net_);
	assert_true(rig_metric_is(&net_.rig[1], "kvd_peer_bytes_total{direction=in}", BLOCKS * RIG_BLOCK_BYTES));
	assert_true(rig_metric_is(&net_.rig[0], "kvd_peer_bytes_total{direction=out}", BLOCKS * RIG_BLOCK_BYTES));
}

/* After a fault the peers find each other again, and what is still at node0 comes. What was asked while they did not
 * know of it yet may fail. */
static void check_again(const char *transfer)
{
	const uint64_t deadline = rig_now_ms() + SOON;
	kvc_handover_t *wanted = NULL;
	kvc_status_t status = KVC_PENDING;

	while (status != KVC_OK && rig_now_ms() < deadline) {
		kvc_handover_done(wanted, 1);
		wanted = NULL;
		assert_int_equal(fetch(transfer, 0, &wanted), KVC_OK);
		status = kvc_handover_wait(wanted, 0, SOON);
		usleep(status == KVC_OK ? 0 : 50000);
	}
	assert_int_equal(status, KVC_OK);
	assert_int_equal(user_handover_info(wanted).tail_len, transfer ? 5 : 0);
	check_blocks(BLOCKS);
	kvc_handover_done(wanted, 0);
}

KV_TEST(p1_a_prefix_that_a_peer_holds_is_fetched_as_far_as_it_goes, setup, teardown)
{
	kvc_handover_t *wanted = NULL;

	put(0, HALF);
	assert_int_equal(fetch(NULL, 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).n, HALF);
	kvc_handover_done(wanted, 0);
	check_blocks(HALF);
	put(HALF, BLOCKS);
	assert_int_equal(fetch(NULL, 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).n, BLOCKS);
	kvc_handover_done(wanted, 0);
	check_blocks(BLOCKS);
	/* What was here already did not come again. */
	assert_true(rig_metric_is(&net_.rig[1], "kvd_peer_bytes_total{direction=in}", BLOCKS * RIG_BLOCK_BYTES));
	peers_check_quiet(&net_);
}

KV_TEST(p7_what_a_peer_does_not_have_is_a_miss_with_a_reason, setup, teardown)
{
	const kvc_fetch_t stranger = {
		.struct_size = sizeof stranger, .peer = "nobody", .transfer = "t", .prompt = &prompt_};
	kvc_handover_t *wanted = NULL;

	assert_int_equal(fetch(NULL, 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_ERR_NOT_FOUND);
	kvc_handover_done(wanted, 0);
	wanted = NULL;
	assert_int_equal(kvc_handover_fetch(consumer_.space, &stranger, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_ERR_NOT_FOUND);
	kvc_handover_done(wanted, 0);
	wanted = NULL;
	assert_int_equal(fetch("never", 300, &wanted), KVC_OK);
	assert_true(kvc_handover_wait(wanted, 0, SOON) < 0);
	kvc_handover_done(wanted, 0);
	peers_check_quiet(&net_);
}

/* Else a peer could take the numbers that engines here need. What an engine opens later is found. */
KV_TEST(p5_a_peer_opens_no_space_that_is_not_known, setup, teardown)
{
	static char out[1 << 16];
	kvc_handover_t *wanted = NULL;
	user_t here, there;

	user_attach(&there, &net_.rig[1], "other");
	assert_int_equal(fetch_by(&there, NULL, 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_ERR_NOT_FOUND);
	kvc_handover_done(wanted, 0);
	assert_int_equal(rig_kvctl(&net_.rig[0], "status --json", out, sizeof out), 0);
	assert_true(strstr(out, "model=model") && !strstr(out, "model=other"));
	user_attach(&here, &net_.rig[0], "other");
	user_keys(&here, 1, HALF, keys_[0]);
	assert_int_equal(user_put(&here, keys_[0], 0, HALF, 0, NULL), KVC_OK);
	wanted = NULL;
	assert_int_equal(fetch_by(&there, NULL, 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).n, HALF);
	kvc_handover_done(wanted, 0);
	user_leave(&here);
	user_leave(&there);
	peers_check_quiet(&net_);
}

/* A consumer that knows its producer's node, and not that it is its own: the entry is found there, and no peer is
 * asked.
 */
KV_TEST(p7_a_hand_over_of_this_node_needs_no_peer, setup, teardown)
{
	kvc_fetch_t ask = {.struct_size = sizeof ask, .peer = "node0", .transfer = "t", .prompt = &prompt_};
	kvc_handover_t *sent = NULL, *wanted = NULL;
	user_t other;

	assert_string_equal(kvc_peer_name(consumer_.kvc), "node1");
	user_attach(&other, &net_.rig[0], "model");
	assert_string_equal(kvc_peer_name(other.kvc), "node0");
	put(0, BLOCKS);
	assert_int_equal(kvc_handover_fetch(other.space, &ask, &wanted), KVC_OK);
	hand_over(BLOCKS, 1, &sent);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).n, BLOCKS);
	kvc_handover_done(wanted, 0);
	kvc_handover_done(sent, 0);
	wanted = NULL;
	ask.transfer = NULL; /* it has what a match finds */
	assert_int_equal(kvc_handover_fetch(other.space, &ask, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_ERR_NOT_FOUND);
	kvc_handover_done(wanted, 0);
	assert_true(rig_metric_is(&net_.rig[0], "kvd_peer_fetches_total{result=done}", 0));
	user_leave(&other);
	peers_check_quiet(&net_);
}

/* The producer is told on its node, the consumer on the other one. The prompt is computed. */
KV_TEST(p5_nodes_with_other_weights_wait_for_nothing, setup, teardown)
{
	kvc_handover_t *sent = NULL, *wanted = NULL;
	user_t other;

	user_attach(&other, &net_.rig[1], "other");
	put(0, HALF);
	hand_over(HALF, 0, &sent);
	assert_int_equal(fetch_by(&other, "t", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_ERR_OTHER_SPACE);
	while (user_handover_info(sent).state != KVC_HANDOVER_ENDED) {
		(void)kvc_poll(producer_.kvc, 5);
	}
	assert_int_equal(user_handover_info(sent).status, KVC_ERR_OTHER_SPACE);
	kvc_handover_done(wanted, 0);
	kvc_handover_done(sent, 0);
	user_leave(&other);
	peers_check_quiet(&net_);
}

KV_TEST(p4_a_producer_that_gives_up_is_told_of_on_the_other_node, setup, teardown)
{
	kvc_handover_t *sent = NULL, *wanted = NULL;

	assert_int_equal(fetch("t", 0, &wanted), KVC_OK);
	put(0, HALF);
	hand_over(HALF, 0, &sent);
	assert_int_equal(kvc_handover_wait(wanted, HALF, SOON), KVC_OK);
	kvc_handover_done(sent, 1);
	assert_int_equal(kvc_poll(producer_.kvc, 0), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, BLOCKS, SOON), KVC_ERR_ABORTED);
	assert_int_equal(user_handover_info(wanted).n, HALF);
	check_blocks(HALF); /* what has come is there */
	kvc_handover_done(wanted, 0);
	peers_check_quiet(&net_);
}

KV_TEST(p4_a_consumer_that_has_enough_leaves_nothing_on_either_node, setup, teardown)
{
	kvc_handover_t *sent = NULL, *wanted = NULL;

	assert_int_equal(fetch("t", 0, &wanted), KVC_OK);
	put(0, HALF);
	hand_over(HALF, 0, &sent);
	assert_int_equal(kvc_handover_wait(wanted, HALF, SOON), KVC_OK);
	kvc_handover_done(wanted, 0);
	assert_int_equal(kvc_poll(consumer_.kvc, 0), KVC_OK);
	peers_check_quiet(&net_); /* its producer says nothing, and is told that it is over */
	assert_int_equal(kvc_handover_wait(sent, 0, SOON), KVC_OK);
	kvc_handover_done(sent, 0);
}

/* A hand-over is half way. */
static kvc_handover_t *half_way(kvc_handover_t **p_sent)
{
	kvc_handover_t *wanted = NULL;

	assert_int_equal(fetch("t", 0, &wanted), KVC_OK);
	put(0, HALF);
	hand_over(HALF, 0, p_sent);
	assert_int_equal(kvc_handover_wait(wanted, HALF, SOON), KVC_OK);

	return wanted;
}

static int is_end_of_producer(kvc_status_t status)
{
	return status == KVC_ERR_PRODUCER_LOST || status == KVC_ERR_ABORTED;
}

/* One of the net processes ends, or stops: the consumer is told, both daemons serve, and the hand-over goes to the next
 * consumer that asks. */
static void end_net(uint32_t i, int signal)
{
	kvc_handover_t *sent = NULL, *wanted = half_way(&sent);
	const pid_t net = peers_net(&net_, i);
	const uint64_t start = rig_now_ms();

	assert_true(net > 0);
	kill(net, signal);
	assert_true(is_end_of_producer(kvc_handover_wait(wanted, BLOCKS, SOON)));
	assert_true(rig_now_ms() - start < SOON);
	check_blocks(HALF);
	kvc_handover_done(wanted, 0);
	put(HALF, BLOCKS);
	hand_over(BLOCKS, 1, &sent);
	kvc_handover_done(sent, 0);
	if (signal == SIGSTOP) {
		kill(net, SIGCONT);
	}
	check_again("t");
	peers_check_quiet(&net_);
}

KV_TEST(p6_the_owners_net_process_may_be_killed, setup, teardown)
{
	end_net(0, SIGKILL);
	assert_true(rig_metric_is(&net_.rig[0], "kvd_net_restarts_total", 1));
}

/* Not by its daemon: status says so, and tells it apart from an end for silence. */
KV_TEST(p6_a_crash_of_the_net_process_is_told_apart, setup, teardown)
{
	char *json = NULL;

	end_net(0, SIGABRT); /* what UCX ends a process with; a sanitizer takes SIGSEGV for itself */
	assert_true(rig_metric_is(&net_.rig[0], "kvd_net_crashes_total", 1));
	assert_int_equal(kvc_document(producer_.kvc, KVC_DOC_STATUS, 0, &json, NULL), KVC_OK);
	assert_non_null(strstr(json, "the net process has crashed"));
	kvc_free(json);
}

KV_TEST(p6_a_peer_that_stands_still_is_cut_off_and_comes_back, setup, teardown)
{
	end_net(0, SIGSTOP);
}

/* As when a container is paused: the daemon wakes up first, and its net process has said nothing for as long. */
KV_TEST(p6_a_net_process_paused_with_its_daemon_is_not_silent, setup, teardown)
{
	const pid_t net = peers_net(&net_, 0), daemon = rig_daemon(&net_.rig[0]);

	assert_true(net > 0 && daemon > 0);
	put(0, BLOCKS);
	kill(net, SIGSTOP);
	kill(daemon, SIGSTOP);
	sleep(11); /* a net process that runs and is silent for 10 s is killed */
	kill(daemon, SIGCONT);
	assert_true(rig_metric_is(&net_.rig[0], "kvd_net_restarts_total", 0));
	kill(net, SIGCONT);
	check_again(NULL);
	assert_int_equal(peers_net(&net_, 0), net);
	peers_check_quiet(&net_);
}

/* A FETCH that the net process here has not looked at when the link or the process ends. */
static kvc_status_t end_before_begin(uint32_t killed)
{
	const pid_t net = peers_net(&net_, 1), victim = peers_net(&net_, killed);
	kvc_handover_t *wanted = NULL;
	kvc_status_t status;

	assert_true(net > 0 && victim > 0);
	put(0, BLOCKS);
	kill(net, SIGSTOP);
	assert_int_equal(fetch(NULL, 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, 200), KVC_ERR_TIMEOUT);
	kill(victim, SIGKILL);
	KV_AWAIT(peers_net(&net_, killed) != victim); /* its end of the link is closed when it has gone */
	if (killed == 0) {
		kill(net, SIGCONT);
	}
	status = kvc_handover_wait(wanted, 0, SOON);
	kvc_handover_done(wanted, 0);
	assert_true(rig_metric_is(&net_.rig[killed], "kvd_net_restarts_total", 1));
	check_again(NULL);
	peers_check_quiet(&net_);

	return status;
}

/* Asks, and never hears the answer: it does not get as far as RECV. */
static void fetch_only(void *arg, int ready)
{
	kvc_handover_t *wanted = NULL;
	user_t user = {0};

	(void)arg;
	user_attach(&user, &net_.rig[1], "model");
	if (fetch_by(&user, "t", 0, &wanted) == KVC_OK) {
		child_say(ready);
	}
	for (;;) {
		pause();
	}
}

/* What it has asked for is here, and goes to the next one: nothing is fetched twice. */
KV_TEST(p4_what_a_member_killed_after_its_fetch_leaves_is_taken, setup, teardown)
{
	kvc_handover_t *sent = NULL, *wanted = NULL;
	pid_t pid;

	put(0, BLOCKS);
	hand_over(BLOCKS, 1, &sent);
	pid = child_start(fetch_only, NULL);
	assert_true(rig_metric_reaches(&net_.rig[1], "kvd_peer_fetches_total{result=done}", 1));
	child_kill(pid);
	assert_true(rig_metric_is(&net_.rig[1], "kvd_handovers", 1));
	assert_int_equal(fetch("t", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).n, BLOCKS);
	assert_int_equal(user_handover_info(wanted).tail_len, 5);
	check_blocks(BLOCKS);
	kvc_handover_done(wanted, 0);
	kvc_handover_done(sent, 0);
	assert_true(rig_metric_is(&net_.rig[1], "kvd_peer_bytes_total{direction=in}", BLOCKS * RIG_BLOCK_BYTES));
	peers_check_quiet(&net_);
}

KV_TEST(p7_a_fetch_that_has_not_begun_ends_with_the_link, setup, teardown)
{
	kvc_status_t status;

	status = end_before_begin(0);
	assert_true(status == KVC_ERR_UNREACHABLE ||
		    status == KVC_ERR_PRODUCER_LOST); /* it looked at the FETCH before the end of the link */
}

KV_TEST(p7_a_fetch_that_has_not_begun_ends_with_the_net_process, setup, teardown)
{
	assert_int_equal(end_before_begin(1), KVC_ERR_UNREACHABLE);
}

/* ---- the private block ----------------------------------------------------------------------- */

#define REST   5u /* tokens after the whole units */
#define HASH   32u
#define HYBRID "0:full:16,1:window:16:64,2:state:16"
#define UNEVEN                                                                                                         \
	"1*kvk1 heads=2 layers=4 tokens=16 k=32 v=32 dtype=bf16 inner=split page=0;"                                   \
	"1*kvk1 heads=2 layers=2 tokens=16 k=32 v=32 dtype=bf16 inner=split page=0;"                                   \
	"1*kvk1 heads=2 layers=1 tokens=16 k=32 v=32 dtype=bf16 inner=split page=0"

typedef struct side {
	user_t user;
	kvc_key_t keys[HALF + 1]; /* of the units, and then of the private block */
} side_t;

/* One way to name a prompt of `units` units and REST tokens. */
typedef struct rest_case {
	const char *groups; /* NULL: one full one */
	int uneven;         /* a block of the second group has half as many layers, one of the third a quarter */
	uint32_t units;
	int by_hashes;
	int differs; /* the consumer's last token is another one */
} rest_case_t;

static side_t sides_[2];
static uint8_t hashes_[HALF][HASH];

static void attach_side(side_t *side, rig_t *rig, const rest_case_t *c)
{
	kvc_identity_t identity = user_identity("rest");

	identity.groups = c->groups ? c->groups : identity.groups;
	identity.layout = c->uneven ? UNEVEN : identity.layout;
	assert_int_equal(user_try(&side->user, rig->sock, &identity), KVC_OK);
	user_keys(&side->user, 1, c->units, side->keys);
	for (uint32_t i = 0; i < c->units; i++) {
		hashes_[i][0] = (uint8_t)i;
		if (c->by_hashes) {
			assert_int_equal(kvc_key_bind(side->user.space, hashes_[i], HASH, &side->keys[i]), KVC_OK);
		}
	}
	assert_int_equal(kvc_private_key(side->user.space, c->units ? &side->keys[c->units - 1] : NULL, "t",
					 tokens_ + c->units * RIG_TOKENS, REST, &side->keys[c->units]),
			 KVC_OK);
}

static uint8_t byte_of(uint32_t group, uint32_t i)
{
	return (uint8_t)(1 + group * (HALF + 1) + i);
}

/* Blocks [first, end) of a group, private from `units` on. */
static void put_group(const side_t *side, uint32_t group, uint32_t first, uint32_t end, uint32_t units)
{
	static uint8_t bytes[HALF + 1][RIG_BLOCK_BYTES];
	const void *blocks[HALF + 1];
	kvc_put_options_t options = {.struct_size = sizeof options,
				     .blocks = blocks,
				     .group = group,
				     .base = first == units ? 0 : first,
				     .private_blocks = first == units};
	uint32_t visible = 0;

	for (uint32_t i = first; i < end; i++) {
		memset(bytes[i], byte_of(group, i), RIG_BLOCK_BYTES);
		blocks[i - first] = bytes[i];
	}
	assert_int_equal(kvc_put(side->user.space, &side->keys[first], options.base, options.base + end - first,
				 &options, &visible),
			 KVC_OK);
	assert_int_equal(visible, end - first);
}

/* What a sequence after the whole units needs of a group: blocks from here on; a state only from the private block. */
static uint32_t first_of(const rest_case_t *c, uint32_t group)
{
	return group == 0 ? 0 : group == 1 ? c->units - 4 : c->units;
}

static void check_group(side_t *side, const rest_case_t *c, uint32_t group)
{
	static uint8_t bytes[HALF + 1][RIG_BLOCK_BYTES], want_bytes[RIG_BLOCK_BYTES];
	const kvc_key_source_t source = {.key = user_key_at, .ctx = side->keys};
	const uint32_t first = first_of(c, group), n = c->units + 1;
	const kvc_want_t want = {.struct_size = sizeof want, .group = group, .n = n, .skip = first, .source = &source};
	kvc_lease_t *lease = NULL;
	void *dst[HALF + 1];
	uint32_t bad = 0;

	for (uint32_t i = 0; i < n; i++) {
		dst[i] = bytes[i];
	}
	assert_int_equal(kvc_lease_start(side->user.space, &want, &lease), KVC_OK);
	assert_int_equal(kvc_lease_wait(lease, n, SOON), KVC_OK);
	assert_int_equal(kvc_lease_n(lease), n);
	assert_int_equal(kvc_lease_read(lease, first, n - first, dst, &bad), KVC_OK);
	for (uint32_t i = first; i < n; i++) {
		memset(want_bytes, byte_of(group, i), sizeof want_bytes);
		assert_memory_equal(bytes[i - first], want_bytes,
				    c->uneven ? RIG_BLOCK_BYTES >> group : RIG_BLOCK_BYTES);
	}
	kvc_release(&lease, 1);
}

static void send_rest(const rest_case_t *c, kvc_handover_t **p_sent)
{
	const side_t *side = &sides_[0];
	const kvc_key_source_t source = {.key = user_key_at, .ctx = (void *)(uintptr_t)side->keys};
	const kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk,
					    .transfer = "t",
					    .n = c->units,
					    .source = &source,
					    .last = 1,
					    .tail = "token",
					    .tail_len = 5,
					    .partial = REST};

	for (uint32_t group = 0; group < (c->groups ? 3 : 1); group++) {
		if (first_of(c, group) < c->units) {
			put_group(side, group, first_of(c, group), c->units, c->units);
		}
		put_group(side, group, c->units, c->units + 1, c->units);
	}
	assert_int_equal(kvc_handover_send(side->user.space, &chunk, p_sent), KVC_OK);
	assert_int_equal(kvc_handover_wait(*p_sent, 0, SOON), KVC_OK);
}

static void fetch_rest(const rest_case_t *c, kvc_handover_t **p_wanted)
{
	static uint32_t tokens[(HALF + 1) * RIG_TOKENS];
	const kvc_prompt_t prompt = {
		.struct_size = sizeof prompt, .tokens = tokens, .n_tokens = c->units * RIG_TOKENS + REST};
	const kvc_fetch_t ask = {.struct_size = sizeof ask,
				 .peer = "node0",
				 .transfer = "t",
				 .prompt = &prompt,
				 .hashes = c->by_hashes ? hashes_ : NULL,
				 .hash_bytes = HASH,
				 .n_hashes = c->units};

	memcpy(tokens, tokens_, sizeof tokens);
	tokens[prompt.n_tokens - 1] += c->differs != 0;
	assert_int_equal(kvc_handover_fetch(sides_[1].user.space, &ask, p_wanted), KVC_OK);
}

static void rest_arrives(const rest_case_t *c)
{
	kvc_handover_t *sent = NULL, *wanted = NULL;

	for (uint32_t i = 0; i < 2; i++) {
		attach_side(&sides_[i], &net_.rig[i], c);
	}
	send_rest(c, &sent);
	fetch_rest(c, &wanted);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).n, c->units);
	assert_int_equal(user_handover_info(wanted).partial, c->differs ? 0 : REST);
	assert_int_equal(user_handover_info(wanted).tail_len, 5);
	for (uint32_t group = 0; !c->differs && group < (c->groups ? 3 : 1); group++) {
		check_group(&sides_[1], c, group);
	}
	kvc_handover_done(wanted, 0);
	kvc_handover_done(sent, 0);
	for (uint32_t i = 0; i < 2; i++) { /* the private block has gone with those that held it */
		user_leave(&sides_[i].user);
		assert_true(rig_metric_is(&net_.rig[i], "kvd_blocks", c->units + (c->groups ? 4 : 0)));
	}
	peers_check_quiet(&net_);
}

KV_TEST(p1_the_private_block_arrives_with_those_before_it, setup, teardown)
{
	rest_arrives(&(rest_case_t){.units = HALF});
}

KV_TEST(p1_the_private_block_of_a_short_prompt_arrives_alone, setup, teardown)
{
	rest_arrives(&(rest_case_t){.units = 0});
}

KV_TEST(p1_the_private_block_arrives_where_hashes_name_the_rest, setup, teardown)
{
	rest_arrives(&(rest_case_t){.units = HALF, .by_hashes = 1});
}

KV_TEST(p3_the_private_blocks_of_several_groups_arrive_together, setup, teardown)
{
	rest_arrives(&(rest_case_t){.units = 8, .groups = HYBRID});
}

KV_TEST(p3_groups_with_blocks_of_other_sizes_arrive_together, setup, teardown)
{
	rest_arrives(&(rest_case_t){.units = 8, .groups = HYBRID, .uneven = 1});
}

KV_TEST(p1_a_private_block_of_other_tokens_stays_where_it_is, setup, teardown)
{
	rest_arrives(&(rest_case_t){.units = HALF, .differs = 1});
}

/* ---- strangers ------------------------------------------------------------------------------- */

/* There is one port, and what comes in at it is TLS of a peer or ends. */
KV_TEST(p10_strangers_on_the_port_of_peers_do_no_harm, setup, teardown)
{
	const pid_t net = peers_net(&net_, 0);
	uint16_t ports[8];

	assert_int_equal(peers_ports(net, ports, 8), 1);
	put(0, BLOCKS);
	peers_send_garbage(ports, 1);
	check_again(NULL);
	assert_int_equal(peers_net(&net_, 0), net); /* the same process */
	/* Some finds all connections taken, or is reset before it is read. */
	assert_true(rig_metric_reaches(&net_.rig[0], "kvd_peer_refused_total{reason=malformed}", 10));
	assert_true(rig_metric_reaches(&net_.rig[0], "kvd_peer_refused_total{reason=old}", 10));
	peers_check_quiet(&net_);
}

static void restart_with_key(uint32_t i, const char *key)
{
	rig_stop(&net_.rig[i]);
	peers_write_key(net_.key[i], key, 0600);
	rig_start(&net_.rig[i]);
}

KV_TEST(p10_a_peer_with_another_key_is_refused, setup, teardown)
{
	restart_with_key(1, "another key of thirty-two bytes!");
	assert_true(rig_metric_is(&net_.rig[0], "kvd_peers_up", 0));
	assert_true(rig_metric_reaches(&net_.rig[1], "kvd_peer_refused_total{reason=key}", 1));
	assert_true(rig_kvctl_has(&net_.rig[1], "peers", "node0"));
	assert_true(rig_kvctl_has(&net_.rig[1], "peers", "does not have the key")); /* not while it tries again */
	restart_with_key(1, "0123456789abcdef0123456789abcdef");
	peers_connected(&net_);
}

/* A third daemon says that it is node1, and has the key: the first one stays. */
KV_TEST(p10_two_peers_of_one_name_are_not_mixed, setup, teardown)
{
	peers_t other;

	put(0, BLOCKS);
	peers_init(&other);
	rig_option(&other.rig[1], "--peers.addresses=node0=127.0.0.1:%u", net_.port[0]);
	rig_option(&other.rig[1], "--peers.keys=node0=%s", net_.key[0]);
	rig_start(&other.rig[1]);
	assert_true(rig_metric_reaches(&net_.rig[0], "kvd_peer_refused_total{reason=other}", 1));
	check_again(NULL);
	rig_start(&other.rig[0]);
	peers_fini(&other);
	peers_check_quiet(&net_);
}

KV_TEST(p10_a_configuration_that_lets_strangers_in_is_refused, setup, teardown)
{
	static const struct {
		const char *options[3];
		const char *why;
	} cases[] = {
		{{"--peers.listen=0.0.0.0:9465", "--peers.keys=", "--peers.name=node0"}, "no key file"},
		{{"--peers.addresses=node1=localhost:1", "--peers.name=node0", "--peers.timeout=2s"}, "numeric"},
		{{"--peers.addresses=node0=127.0.0.1:1", "--peers.name=node0", "--peers.timeout=2s"}, "own name"},
		{{"--peers.addresses=node1=127.0.0.1:1,node1=127.0.0.1:2", "--peers.name=node0", "--peers.timeout=2s"},
		 "there twice"},
	};
	rig_t *rig = &net_.rig[0];
	const uint32_t count = rig->option_count;

	rig_stop(rig);
	for (size_t i = 0; i < KV_COUNT_OF(cases); i++) {
		for (size_t o = 0; o < 3; o++) {
			rig_option(rig, "%s", cases[i].options[o]);
		}
		assert_int_equal(rig_try(rig), 78);
		assert_true(rig_log_has(rig, cases[i].why));
		rig->option_count = count;
	}
	peers_write_key(net_.key[0], "0123456789abcdef0123456789abcdef", 0640);
	assert_int_equal(rig_try(rig), 78);
	assert_true(rig_log_has(rig, "mode 0600"));
	peers_write_key(net_.key[0], "too short", 0600);
	assert_int_equal(rig_try(rig), 78);
	peers_write_key(net_.key[0], "0123456789abcdef0123456789abcdef", 0600);
	rig_start(rig);
	peers_connected(&net_);
}

/* ---- many bytes under way -------------------------------------------------------------------- */

#define CROWD 16u /* prefixes of RIG_BLOCKS blocks */

static kvc_handover_t *crowd_[CROWD];

/* Prefixes of 4 MiB each at the owner, and all of them asked for at once. */
static void fetch_crowd(void)
{
	static uint32_t tokens[RIG_BLOCKS * RIG_TOKENS];
	static kvc_key_t keys[RIG_BLOCKS];
	const kvc_prompt_t prompt = {
		.struct_size = sizeof prompt, .tokens = tokens, .n_tokens = RIG_BLOCKS * RIG_TOKENS};
	const kvc_fetch_t ask = {.struct_size = sizeof ask, .peer = "node0", .prompt = &prompt};

	for (uint32_t i = 0; i < CROWD; i++) {
		crowd_[i] = NULL;
		user_keys(&producer_, 100 + i, RIG_BLOCKS, keys);
		assert_int_equal(user_put(&producer_, keys, 0, RIG_BLOCKS, 0, NULL), KVC_OK);
	}
	for (uint32_t i = 0; i < CROWD; i++) {
		user_tokens(100 + i, RIG_BLOCKS, tokens);
		assert_int_equal(kvc_handover_fetch(consumer_.space, &ask, &crowd_[i]), KVC_OK);
	}
}

/* Whatever becomes of them, it becomes so in time. Returns how many came whole. */
static uint32_t end_crowd(void)
{
	uint32_t whole = 0;

	for (uint32_t i = 0; i < CROWD; i++) {
		const kvc_status_t status = kvc_handover_wait(crowd_[i], 0, SOON);

		assert_int_not_equal(status, KVC_ERR_TIMEOUT);
		if (status != KVC_OK && status != KVC_ERR_BUSY && status != KVC_ERR_FULL &&
		    status != KVC_ERR_UNREACHABLE && !is_end_of_producer(status)) {
			fail_msg("fetch %u ended with %s", i, kvc_status_text(status));
		}
		whole += status == KVC_OK;
		kvc_handover_done(crowd_[i], 0);
	}

	return whole;
}

/* No byte of a landing window is left behind. */
static void check_landing_window(void)
{
	const uint64_t deadline = rig_now_ms() + SOON;
	char out[8192] = "";

	while (!strstr(out, "\"in_flight_bytes\":0,") && rig_now_ms() < deadline) {
		usleep(100000);
		assert_int_equal(rig_kvctl(&net_.rig[1], "peers --json", out, sizeof out), 0);
	}
	assert_non_null(strstr(out, "\"in_flight_bytes\":0,"));
}

KV_TEST(p5_many_transfers_at_once_are_served_within_the_window, setup, teardown)
{
	fetch_crowd();
	assert_int_equal(end_crowd(), CROWD);
	check_landing_window();
	assert_true(rig_metric_is(&net_.rig[1], "kvd_peer_fetches_total{result=done}", CROWD));
	peers_check_quiet(&net_);
}

/* Hand-overs may keep half of that: some fail, in time, and none of them half. */
KV_TEST(p5_transfers_without_room_fail_soon, setup, teardown)
{
	rig_stop(&net_.rig[1]);
	rig_option(&net_.rig[1], "--handover.max_bytes=%u", CROWD * RIG_BLOCKS * RIG_BLOCK_BYTES / 2);
	rig_start(&net_.rig[1]);
	peers_connected(&net_);
	user_leave(&consumer_);
	user_attach(&consumer_, &net_.rig[1], "model");
	fetch_crowd();
	assert_in_range(end_crowd(), 1, CROWD);
	check_landing_window();
	peers_check_quiet(&net_);
}

KV_TEST(p4_bytes_under_way_when_the_owner_dies_leave_nothing, setup, teardown)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};

	for (uint32_t round = 0; round < 5; round++) {
		fetch_crowd();
		usleep((useconds_t)kv_test_below(&rng, 60000));
		kill(peers_net(&net_, 0), SIGKILL);
		(void)end_crowd();
		check_landing_window();
		peers_connected(&net_);
	}
	put(0, BLOCKS);
	check_again(NULL);
	peers_check_quiet(&net_);
}
