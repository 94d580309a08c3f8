/* Two engines hand a prefix over, each in a process of its own, and one of the three ends at the worst moment. */
#include "e2e/rig/rig.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCKS 32u
#define HALF   16u
#define SOON   20000u /* ms: who runs into it has waited for nothing */

static rig_t rig_;
static user_t user_;
static kvc_key_t keys_[BLOCKS];

static int setup_with(const char *size, const char *most)
{
	rig_init(&rig_, 0);
	rig_option(&rig_, "--cpu.size=%s", size);
	rig_option(&rig_, "--handover.max_bytes=%s", most);
	rig_start(&rig_);
	user_attach(&user_, &rig_, "model");
	user_keys(&user_, 1, BLOCKS, keys_);

	return 0;
}

static int setup(void **state)
{
	(void)state;

	return setup_with("8MiB", "0");
}

static int setup_large(void **state)
{
	(void)state;

	return setup_with("128MiB", "0");
}

/* Room for one tail, and not for two. */
static int setup_small(void **state)
{
	(void)state;

	return setup_with("8MiB", "1500KiB");
}

KV_FIXTURE(teardown)
{
	user_leave(&user_);
	rig_fini(&rig_);
}

static const kvc_key_source_t source_ = {.key = user_key_at, .ctx = keys_};

/* Put units [from, n) and hand [0, n) over. */
static kvc_status_t produce(user_t *user, const char *transfer, uint32_t from, uint32_t n, int last,
			    kvc_handover_t **p_handover)
{
	const kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk,
					    .transfer = transfer,
					    .n = n,
					    .source = &source_,
					    .last = last,
					    .tail = "token",
					    .tail_len = last ? 5 : 0};
	kvc_status_t status = from < n ? user_put(user, keys_, from, n, 0, NULL) : KVC_OK;

	if (status == KVC_OK) {
		status = kvc_handover_send(user->space, &chunk, p_handover);
	}

	return status == KVC_OK ? kvc_handover_wait(*p_handover, 0, SOON) : status;
}

typedef struct half {
	uint32_t n;
	int last;
} half_t;

/* A producer that hands over so much, and then does nothing. */
static void producer(void *arg, int ready)
{
	const half_t *half = arg;
	kvc_handover_t *handover = NULL;
	user_t user = {0};

	user_attach(&user, &rig_, "model");
	if (produce(&user, "t", 0, half->n, half->last, &handover) == KVC_OK) {
		child_say(ready);
	}
	for (;;) {
		(void)kvc_poll(user.kvc, 100);
	}
}

static void consumer(void *arg, int ready)
{
	kvc_handover_t *handover = NULL;
	user_t user = {0};

	(void)arg;
	user_attach(&user, &rig_, "model");
	if (kvc_handover_recv(user.space, "t", 0, &handover) == KVC_OK &&
	    kvc_handover_wait(handover, 0, SOON) == KVC_OK) {
		child_say(ready);
	}
	for (;;) {
		(void)kvc_poll(user.kvc, 100);
	}
}

static void check_blocks(uint32_t n)
{
	uint32_t got = 0;

	assert_int_equal(user_get(&user_, keys_, n, &got), KVC_OK);
	assert_int_equal(got, n);
	assert_int_equal(user_.wrong, 0);
}

KV_TEST(p1_what_one_process_hands_over_another_one_reads, setup, teardown)
{
	kvc_handover_t *wanted = NULL;
	half_t half = {.n = BLOCKS, .last = 1};
	pid_t pid;

	assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, HALF, 50), KVC_ERR_TIMEOUT);
	assert_int_equal(user_handover_info(wanted).state, KVC_HANDOVER_AWAITED);
	pid = child_start(producer, &half);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).n, BLOCKS);
	assert_int_equal(user_handover_info(wanted).tail_len, 5);
	assert_memory_equal(user_handover_info(wanted).tail, "token", 5);
	child_kill(pid); /* it does not matter now */
	check_blocks(BLOCKS);
	kvc_handover_done(wanted, 0);
	rig_check_quiet(&rig_);
	assert_true(rig_metric_is(&rig_, "kvd_handovers", 0));
}

static void key_with_private(void *ctx, uint32_t i, kvc_key_t *key)
{
	*key = i < HALF ? keys_[i] : *(const kvc_key_t *)ctx;
}

KV_TEST(p1_what_is_left_of_a_prompt_is_handed_over_too, setup, teardown)
{
	static const uint32_t rest[3] = {7, 8, 9};
	kvc_key_t key;
	const kvc_key_source_t source = {.key = key_with_private, .ctx = &key};
	kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk,
				      .transfer = "t",
				      .n = HALF,
				      .source = &source,
				      .last = 1,
				      .partial = KV_COUNT_OF(rest)};
	kvc_want_t want = {.struct_size = sizeof want, .n = HALF + 1, .skip = HALF - 1, .source = &source};
	kvc_space_info_t space = {.struct_size = sizeof space};
	kvc_match_t match = {.struct_size = sizeof match};
	kvc_handover_t *made = NULL, *wanted = NULL;
	kvc_lease_t *lease = NULL;
	uint32_t visible = 0, bad = 0;
	user_t other = {0};
	uint8_t *block, *read[2];

	user_attach(&other, &rig_, "model");
	kvc_space_get_info(user_.space, &space);
	block = malloc(3 * (size_t)space.block_bytes);
	read[0] = block + space.block_bytes;
	read[1] = read[0] + space.block_bytes;
	memset(block, 0x5c, space.block_bytes);
	assert_int_equal(user_put(&user_, keys_, 0, HALF, 0, NULL), KVC_OK);
	assert_int_equal(kvc_private_key(user_.space, &keys_[HALF - 1], "t", rest, KV_COUNT_OF(rest), &key), KVC_OK);
	assert_int_equal(kvc_put(user_.space, &key, 0, 1,
				 &(kvc_put_options_t){.struct_size = sizeof(kvc_put_options_t),
						      .blocks = (const void *const *)&block,
						      .private_blocks = 1},
				 &visible),
			 KVC_OK);
	assert_int_equal(visible, 1);
	kvc_match_lazy(other.space, &source, HALF + 1, &match);
	assert_int_equal(match.n, HALF);
	assert_int_equal(kvc_handover_send(user_.space, &chunk, &made), KVC_OK);
	assert_int_equal(kvc_handover_wait(made, 0, SOON), KVC_OK);
	assert_int_equal(kvc_handover_recv(other.space, "t", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).n, HALF);
	assert_int_equal(user_handover_info(wanted).partial, KV_COUNT_OF(rest));
	assert_int_equal(kvc_lease_start(other.space, &want, &lease), KVC_OK);
	assert_int_equal(kvc_lease_wait(lease, HALF + 1, SOON), KVC_OK);
	assert_int_equal(kvc_lease_read(lease, HALF - 1, 2, (void *const *)read, &bad), KVC_OK);
	assert_memory_equal(read[1], block, space.block_bytes);
	kvc_handover_done(wanted, 0);
	kvc_release(&lease, 1);
	assert_true(rig_metric_is(&rig_, "kvd_blocks", HALF)); /* its last holder has gone, and it with it */
	kvc_handover_done(made, 0);
	user_leave(&other);
	rig_check_quiet(&rig_);
	free(block);
}

KV_TEST(p4_a_producer_killed_half_way_is_told_at_once, setup, teardown)
{
	kvc_handover_t *wanted = NULL;
	half_t half = {.n = HALF};
	pid_t pid = child_start(producer, &half);
	uint64_t start;

	assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, HALF, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).status, KVC_PENDING);
	start = rig_now_ms();
	child_kill(pid);
	assert_int_equal(kvc_handover_wait(wanted, BLOCKS, SOON), KVC_ERR_PRODUCER_LOST);
	assert_true(rig_now_ms() - start < SOON);
	assert_int_equal(user_handover_info(wanted).state, KVC_HANDOVER_FAILED);
	assert_int_equal(user_handover_info(wanted).n, HALF);
	check_blocks(HALF); /* what was handed over is there */
	kvc_handover_done(wanted, 0);
	rig_check_quiet(&rig_);
}

KV_TEST(p4_a_consumer_killed_leaves_the_hand_over_to_another, setup, teardown)
{
	kvc_handover_t *made = NULL, *wanted = NULL;
	user_t other = {0};
	pid_t pid;

	user_attach(&other, &rig_, "model");
	assert_int_equal(produce(&user_, "t", 0, BLOCKS, 1, &made), KVC_OK);
	pid = child_start(consumer, NULL);
	assert_int_equal(kvc_handover_recv(other.space, "t", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_ERR_TAKEN);
	kvc_handover_done(wanted, 0);
	child_kill(pid);
	do {
		wanted = NULL;
		assert_int_equal(kvc_handover_recv(other.space, "t", 0, &wanted), KVC_OK);
		if (kvc_handover_wait(wanted, 0, SOON) == KVC_OK) {
			break;
		}
		assert_int_equal(user_handover_info(wanted).status, KVC_ERR_TAKEN);
		kvc_handover_done(wanted, 0);
	} while (1);
	assert_int_equal(user_handover_info(wanted).n, BLOCKS);
	kvc_handover_done(wanted, 0);
	while (user_handover_info(made).state != KVC_HANDOVER_ENDED) { /* its producer hears of the end */
		(void)kvc_poll(user_.kvc, 10);
	}
	assert_int_equal(user_handover_info(made).status, KVC_OK);
	kvc_handover_done(made, 0);
	user_leave(&other);
	rig_check_quiet(&rig_);
}

KV_TEST(p7_hand_overs_of_a_daemon_that_dies_are_revoked, setup, teardown)
{
	kvc_handover_t *wanted = NULL, *made = NULL, *late = NULL;

	assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &wanted), KVC_OK);
	assert_int_equal(produce(&user_, "u", 0, HALF, 0, &made), KVC_OK);
	(void)rig_kill(&rig_, SIGKILL);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_ERR_REVOKED);
	assert_int_equal(user_handover_info(wanted).state, KVC_HANDOVER_ENDED);
	assert_int_equal(user_handover_info(made).state, KVC_HANDOVER_ENDED);
	assert_int_equal(produce(&user_, "u", HALF, HALF, 1, &made) < 0, 1);
	assert_true(kvc_handover_recv(user_.space, "t", 0, &late) < 0);
	kvc_handover_done(wanted, 1);
	kvc_handover_done(made, 1);
	rig_start(&rig_);
	while (kvc_poll(user_.kvc, 20) != KVC_OK) {
	}
	made = wanted = NULL;
	user_keys(&user_, 1, BLOCKS, keys_);
	assert_int_equal(produce(&user_, "t", 0, BLOCKS, 1, &made), KVC_OK);
	assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	kvc_handover_done(wanted, 0);
	kvc_handover_done(made, 0);
	rig_check_quiet(&rig_);
}

/* Each of the sides, before and after the answer. */
KV_TEST(p4_handles_freed_at_any_moment_leave_nothing, setup, teardown)
{
	kvc_handover_t *made = NULL, *wanted = NULL;
	const kvc_handover_chunk_t first = {.struct_size = sizeof first, .transfer = "t", .tail = "x", .tail_len = 1};
	kvc_status_t status;

	assert_int_equal(kvc_handover_recv(user_.space, "s", 0, &wanted), KVC_OK);
	kvc_handover_done(wanted, 0); /* not answered yet */
	assert_int_equal(kvc_handover_send(user_.space, &first, &made), KVC_OK);
	status = kvc_handover_send(user_.space, &first, &made);
	assert_true(status == KVC_PENDING || status == KVC_OK); /* OK: the answer was there already */
	kvc_handover_done(made, 0);                             /* nor this: it has not sent its last */
	made = wanted = NULL;
	assert_int_equal(kvc_handover_recv(user_.space, "u", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 1, 100), KVC_ERR_TIMEOUT);
	assert_int_equal(produce(&user_, "u", 0, HALF, 0, &made), KVC_OK);
	kvc_handover_done(made, 0);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_ERR_ABORTED);
	kvc_handover_done(wanted, 1);
	kvc_handover_done(NULL, 0);
	/* "t" has failed without a consumer: who asks gets the reason. */
	wanted = NULL;
	assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_ERR_ABORTED);
	kvc_handover_done(wanted, 0);
	assert_true(rig_metric_is(&rig_, "kvd_handovers", 0));
	rig_check_quiet(&rig_);
}

/* All of HALF blocks that are put, with this tail. */
static kvc_status_t complete(user_t *user, const char *transfer, const char *tail, kvc_handover_t **p_made)
{
	const kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk,
					    .transfer = transfer,
					    .n = HALF,
					    .source = &source_,
					    .last = 1,
					    .tail = tail,
					    .tail_len = (uint32_t)strlen(tail),
					    .await_room = 1};

	return kvc_handover_send(user->space, &chunk, p_made);
}

/* The second question is sent before the first one is answered. */
KV_TEST(p4_a_consumer_that_gives_up_and_asks_again_has_it, setup, teardown)
{
	kvc_handover_t *made = NULL, *given_up = NULL, *wanted = NULL;

	assert_int_equal(produce(&user_, "t", 0, HALF, 0, &made), KVC_OK);
	assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &given_up), KVC_OK);
	kvc_handover_done(given_up, 1);
	assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, HALF, SOON), KVC_OK);
	assert_int_equal(produce(&user_, NULL, HALF, BLOCKS, 1, &made), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).n, BLOCKS);
	kvc_handover_done(wanted, 0);
	kvc_handover_done(made, 0);
	assert_true(rig_metric_is(&rig_, "kvd_handovers", 0));
	rig_check_quiet(&rig_);
}

KV_TEST(p5_many_large_tails_do_not_end_the_session, setup_large, teardown)
{
	enum { TAILS = 12 };
	static uint8_t tail[KVC_MAX_TAIL];
	kvc_handover_t *wanted[TAILS] = {NULL}, *made[TAILS] = {NULL};
	uint64_t incarnation = kvc_incarnation(user_.kvc);
	user_t other = {0};
	char name[16];

	user_attach(&other, &rig_, "model");
	for (uint32_t i = 0; i < TAILS; i++) {
		snprintf(name, sizeof name, "tail-%u", i);
		assert_int_equal(kvc_handover_recv(user_.space, name, 0, &wanted[i]), KVC_OK);
	}
	(void)kvc_poll(user_.kvc, 20);
	for (uint32_t i = 0; i < TAILS; i++) {
		const kvc_handover_chunk_t all = {
			.struct_size = sizeof all, .transfer = name, .last = 1, .tail = tail, .tail_len = sizeof tail};

		snprintf(name, sizeof name, "tail-%u", i);
		memset(tail, (int)i, sizeof tail);
		assert_int_equal(kvc_handover_send(other.space, &all, &made[i]), KVC_OK);
		assert_int_equal(kvc_handover_wait(made[i], 0, SOON), KVC_OK);
		kvc_handover_done(made[i], 0);
	}
	for (uint32_t i = 0; i < TAILS; i++) {
		assert_int_equal(kvc_handover_wait(wanted[i], 0, SOON), KVC_OK);
		assert_int_equal(user_handover_info(wanted[i]).tail_len, sizeof tail);
		assert_int_equal(((const uint8_t *)user_handover_info(wanted[i]).tail)[12345], i);
		kvc_handover_done(wanted[i], 0);
	}
	assert_int_equal(kvc_incarnation(user_.kvc), incarnation);
	assert_int_equal(rig_metric(&rig_, "kvd_send_overflows_total"), 0);
	user_leave(&other);
	rig_check_quiet(&rig_);
}

/* A receive is freed while it is answered, while it waits, and while it is given an entry: the entry stays. */
KV_TEST(p4_receives_freed_at_any_moment_leave_every_entry, setup, teardown)
{
	user_t other = {0};

	user_attach(&other, &rig_, "model");
	assert_int_equal(user_put(&user_, keys_, 0, HALF, 0, NULL), KVC_OK);
	for (uint32_t i = 0; i < 150; i++) {
		kvc_handover_t *made = NULL, *freed = NULL, *wanted = NULL;

		assert_int_equal(kvc_handover_recv(other.space, "t", 0, &freed), KVC_OK);
		if (i % 3) { /* the answer has come; else it comes later */
			(void)kvc_poll(other.kvc, i % 3);
		}
		assert_int_equal(complete(&user_, "t", "kept", &made), KVC_OK);
		(void)kvc_poll(user_.kvc, i % 2);
		kvc_handover_done(freed, 1);
		assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &wanted), KVC_OK);
		while (kvc_handover_wait(wanted, 0, 1) != KVC_OK) {
			if (user_handover_info(wanted).status == KVC_ERR_TAKEN) { /* it is not given back yet */
				kvc_handover_done(wanted, 0);
				assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &wanted), KVC_OK);
			}
			(void)kvc_poll(other.kvc, 0);
		}
		assert_int_equal(user_handover_info(wanted).tail_len, 4);
		assert_memory_equal(user_handover_info(wanted).tail, "kept", 4);
		kvc_handover_done(wanted, 0);
		kvc_handover_done(made, 0);
	}
	user_leave(&other);
	assert_true(rig_metric_is(&rig_, "kvd_handovers", 0));
	rig_check_quiet(&rig_);
}

KV_TEST(p5_a_producer_waits_for_room_and_is_told, setup_small, teardown)
{
	static char tail[900000];
	kvc_handover_t *made[2] = {NULL}, *wanted = NULL;
	uint64_t requests;

	memset(tail, 'x', sizeof tail - 1);
	assert_int_equal(user_put(&user_, keys_, 0, HALF, 0, NULL), KVC_OK);
	assert_int_equal(complete(&user_, "t", tail, &made[0]), KVC_OK);
	assert_int_equal(kvc_handover_wait(made[0], 0, SOON), KVC_OK);
	assert_int_equal(complete(&user_, "u", tail, &made[1]), KVC_OK);
	assert_int_equal(kvc_handover_wait(made[1], 0, 100), KVC_ERR_TIMEOUT);
	assert_int_equal(user_handover_info(made[1]).status, KVC_PENDING);
	requests = rig_metric(&rig_, "kvd_requests_total");
	assert_int_equal(complete(&user_, "u", tail, &made[1]), KVC_PENDING); /* nothing is sent: it is not asked for */
	assert_int_equal(kvc_handover_wait(made[1], 0, 300), KVC_ERR_TIMEOUT);
	assert_true(rig_metric(&rig_, "kvd_requests_total") - requests < 4);
	assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	kvc_handover_done(wanted, 0);
	assert_int_equal(kvc_handover_wait(made[1], 0, SOON), KVC_ERR_BUSY); /* and now there is room */
	assert_int_equal(complete(&user_, "u", tail, &made[1]), KVC_OK);
	assert_int_equal(kvc_handover_wait(made[1], 0, SOON), KVC_OK);
	assert_int_equal(kvc_handover_recv(user_.space, "u", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	kvc_handover_done(wanted, 0);
	kvc_handover_done(made[0], 0);
	kvc_handover_done(made[1], 0);
	assert_true(rig_metric_is(&rig_, "kvd_handovers", 0));
	rig_check_quiet(&rig_);
}

KV_TEST(p10_chunks_that_cannot_be_are_refused_here, setup, teardown)
{
	kvc_handover_t *made = NULL, *wanted = NULL;
	char name[140];
	kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk, .transfer = "t", .n = BLOCKS, .source = &source_};

	assert_int_equal(kvc_handover_send(user_.space, &chunk, &made), KVC_OK);
	assert_int_equal(kvc_handover_wait(made, 0, SOON), KVC_MISS); /* nothing is put yet */
	assert_int_equal(user_handover_info(made).number, 0);
	assert_int_equal(produce(&user_, NULL, 0, BLOCKS, 0, &made), KVC_OK); /* and now it is */
	chunk.n = HALF;
	assert_int_equal(kvc_handover_send(user_.space, &chunk, &made), KVC_ERR_ARG);
	assert_int_equal(kvc_handover_recv(user_.space, "", 0, &wanted), KVC_ERR_ARG);
	memset(name, 'n', sizeof name);
	name[129] = '\0';
	assert_int_equal(kvc_handover_recv(user_.space, name, 0, &wanted), KVC_ERR_ARG);
	assert_int_equal(kvc_handover_recv(user_.space, "a\nb", 0, &wanted), KVC_ERR_ARG);
	chunk.transfer = NULL;
	assert_int_equal(kvc_handover_send(user_.space, &chunk, &wanted), KVC_ERR_ARG);
	chunk.transfer = "u";
	chunk.last = 1;
	chunk.partial = 16;
	assert_int_equal(kvc_handover_send(user_.space, &chunk, &wanted), KVC_ERR_ARG); /* a whole block */
	chunk.partial = 3;
	chunk.last = 0;
	assert_int_equal(kvc_handover_send(user_.space, &chunk, &wanted), KVC_ERR_ARG); /* before the end */
	assert_null(wanted);
	chunk.struct_size = 8;
	assert_int_equal(kvc_handover_send(user_.space, &chunk, &made), KVC_ERR_ARG);
	kvc_handover_done(made, 1);
}

/* With a window and a state next to the full group, one chunk names what a sequence after n units needs of each. */
KV_TEST(p3_a_chunk_of_several_groups_is_whole, setup, teardown)
{
	kvc_identity_t identity = user_identity("hybrid");
	kvc_put_options_t options = {.struct_size = sizeof options};
	kvc_handover_t *made = NULL, *wanted = NULL;
	static uint8_t bytes[RIG_BLOCK_BYTES];
	const void *blocks[8];
	user_t hybrid = {0};
	kvc_handover_chunk_t chunk = {
		.struct_size = sizeof chunk, .transfer = "t", .n = 8, .source = &source_, .last = 1};
	uint32_t visible;

	identity.groups = "0:full:16,1:window:16:64,2:state:16";
	assert_int_equal(user_try(&hybrid, rig_.sock, &identity), KVC_OK);
	user_keys(&hybrid, 1, BLOCKS, keys_);
	for (uint32_t i = 0; i < 8; i++) {
		blocks[i] = bytes;
	}
	options.blocks = blocks;
	assert_int_equal(kvc_put(hybrid.space, keys_, 0, 8, &options, &visible), KVC_OK);
	options.group = 1;
	options.base = 4;
	assert_int_equal(kvc_put(hybrid.space, &keys_[4], 4, 8, &options, &visible), KVC_OK);
	assert_int_equal(kvc_handover_send(hybrid.space, &chunk, &made), KVC_OK);
	assert_int_equal(kvc_handover_wait(made, 0, SOON), KVC_MISS); /* the state is not there yet */
	options.group = 2;
	options.base = 7;
	assert_int_equal(kvc_put(hybrid.space, &keys_[7], 7, 8, &options, &visible), KVC_OK);
	assert_int_equal(kvc_handover_send(hybrid.space, &chunk, &made), KVC_OK);
	assert_int_equal(kvc_handover_wait(made, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(made).n, 8);
	assert_int_equal(user_handover_info(made).bytes, (8 + 4 + 1) * RIG_BLOCK_BYTES);
	assert_int_equal(kvc_handover_recv(hybrid.space, "t", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 8, SOON), KVC_OK);
	kvc_handover_done(wanted, 0);
	kvc_handover_done(made, 0);
	user_leave(&hybrid);
	rig_check_quiet(&rig_);
}

static void key_with_private_after_eight(void *ctx, uint32_t i, kvc_key_t *key)
{
	*key = i < 8 ? keys_[i] : *(const kvc_key_t *)ctx;
}

/* Each group has the rest of the prompt in a block of its own; a state after the whole units is not needed then. */
KV_TEST(p3_a_partial_block_of_several_groups_is_whole, setup, teardown)
{
	const uint32_t rest[] = {5, 6, 7};
	/* Of each group: units up to and with the private block, blocks before those that are read. */
	const uint32_t wanted_of[3][2] = {{9, 0}, {9, 5}, {9, 8}};
	kvc_identity_t identity = user_identity("hybrid");
	kvc_put_options_t options = {.struct_size = sizeof options}, rest_options = options;
	kvc_handover_t *made = NULL, *wanted = NULL;
	static uint8_t bytes[RIG_BLOCK_BYTES];
	const void *blocks[8];
	user_t hybrid = {0};
	kvc_key_t key;
	const kvc_key_source_t source = {.key = key_with_private_after_eight, .ctx = &key};
	kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk,
				      .transfer = "t",
				      .n = 8,
				      .source = &source,
				      .last = 1,
				      .partial = KV_COUNT_OF(rest)};
	uint32_t visible;

	identity.groups = "0:full:16,1:window:16:64,2:state:16";
	assert_int_equal(user_try(&hybrid, rig_.sock, &identity), KVC_OK);
	user_keys(&hybrid, 1, BLOCKS, keys_);
	for (uint32_t i = 0; i < 8; i++) {
		blocks[i] = bytes;
	}
	options.blocks = rest_options.blocks = blocks;
	assert_int_equal(kvc_put(hybrid.space, keys_, 0, 8, &options, &visible), KVC_OK);
	options.group = 1;
	options.base = 4;
	assert_int_equal(kvc_put(hybrid.space, &keys_[4], 4, 8, &options, &visible), KVC_OK);
	assert_int_equal(kvc_private_key(hybrid.space, &keys_[7], "t", rest, KV_COUNT_OF(rest), &key), KVC_OK);
	rest_options.private_blocks = 1;
	for (uint32_t g = 0; g < 3; g++) {
		assert_int_equal(kvc_handover_send(hybrid.space, &chunk, &made), KVC_OK);
		assert_int_equal(kvc_handover_wait(made, 0, SOON), KVC_MISS);
		rest_options.group = g;
		assert_int_equal(kvc_put(hybrid.space, &key, 0, 1, &rest_options, &visible), KVC_OK);
	}
	assert_int_equal(kvc_handover_send(hybrid.space, &chunk, &made), KVC_OK);
	assert_int_equal(kvc_handover_wait(made, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(made).n, 8);
	assert_int_equal(user_handover_info(made).bytes, (8 + 4 + 3) * RIG_BLOCK_BYTES);
	assert_int_equal(kvc_handover_recv(hybrid.space, "t", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).partial, KV_COUNT_OF(rest));
	for (uint32_t g = 0; g < 3; g++) {
		const kvc_want_t want = {.struct_size = sizeof want,
					 .group = g,
					 .n = wanted_of[g][0],
					 .skip = wanted_of[g][1],
					 .source = &source};
		kvc_lease_t *lease = NULL;
		const void *data;

		assert_int_equal(kvc_lease_start(hybrid.space, &want, &lease), KVC_OK);
		assert_int_equal(kvc_lease_wait(lease, 9, SOON), KVC_OK);
		assert_int_equal(kvc_lease_block(lease, 8, &data, NULL), KVC_OK);
		kvc_release(&lease, 1);
	}
	kvc_handover_done(wanted, 0);
	kvc_handover_done(made, 0);
	user_leave(&hybrid);
	assert_true(rig_metric_is(&rig_, "kvd_blocks", 8 + 4));
	rig_check_quiet(&rig_);
}

KV_TEST(p6_kvctl_shows_who_waits_for_whom, setup, teardown)
{
	kvc_handover_t *made = NULL, *wanted = NULL;
	char out[4096];

	assert_int_equal(rig_kvctl(&rig_, "transfers", out, sizeof out), 0);
	assert_int_equal(kvc_handover_recv(user_.space, "a-transfer-id-that-is-long", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 1, 100), KVC_ERR_TIMEOUT);
	assert_int_equal(produce(&user_, "other", 0, HALF, 1, &made), KVC_OK);
	assert_int_equal(rig_kvctl(&rig_, "transfers", out, sizeof out), 0);
	assert_non_null(strstr(out, "a-transfer-id-that-i~"));
	assert_non_null(strstr(out, "the producer to begin"));
	assert_non_null(strstr(out, "complete"));
	assert_non_null(strstr(out, "a consumer"));
	assert_int_equal(rig_kvctl(&rig_, "transfers --json", out, sizeof out), 0);
	assert_non_null(strstr(out, "a-transfer-id-that-is-long"));
	kvc_handover_done(wanted, 1);
	kvc_handover_done(made, 1);
}

KV_TEST_MAIN(NULL, NULL)
