/* Two engines hand a prefix over, each in a process of its own, and one of the three ends at the worst moment. */
#include "e2e/rig/rig.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCKS 32u
#define HALF   16u
#define SOON   20000u /* ms: who runs into it has waited for nothing */

static kvc_key_t keys_[BLOCKS];

static void setup_with(const char *size, const char *most)
{
	rig_init(&rig_, 0);
	rig_option(&rig_, "--cpu.size=%s", size);
	rig_option(&rig_, "--handover.max_bytes=%s", most);
	rig_start(&rig_);
	user_attach(&user_, &rig_, "model");
	user_keys(&user_, 1, BLOCKS, keys_);
}

KV_FIXTURE(setup)
{
	setup_with("8MiB", "0");
}

KV_FIXTURE(setup_large)
{
	setup_with("128MiB", "0");
}

/* Room for one tail, and not for two. */
KV_FIXTURE(setup_small)
{
	setup_with("8MiB", "1500KiB");
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

static void check_blocks(uint32_t n)
{
	user_expect(&user_, keys_, n);
}

KV_TEST(p1_what_one_process_hands_over_another_one_reads, setup, teardown)
{
	kvc_handover_t *wanted = NULL;
	half_t half = {.n = BLOCKS, .last = 1};
	pid_t pid;

	assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &wanted), KVC_OK);
	KV_AWAIT(kvc_handover_wait(wanted, HALF, 50) == KVC_ERR_TIMEOUT &&
		 user_handover_info(wanted).state == KVC_HANDOVER_AWAITED);
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
	assert_int_equal(rig_metric(&rig_, "kvd_handovers_ended_total{result=taken}"), 1);
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
	assert_true(rig_kvctl_has(&rig_, "transfers --json", "a-transfer-id-that-is-long"));
	kvc_handover_done(wanted, 1);
	kvc_handover_done(made, 1);
}

/* ---- blocks that are announced before they are put --------------------------------------------- */

static _Atomic int *go_; /* shared with the producer: it may go on */

KV_FIXTURE(setup_ahead)
{
	setup_with("8MiB", "0");
	if (!go_) {
		go_ = mmap(NULL, sizeof *go_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		assert_ptr_not_equal(go_, MAP_FAILED);
	}
	atomic_store(go_, 0);
}

static kvc_status_t send_chunk(user_t *user, uint32_t n, int last, int ahead, kvc_handover_t **p_handover)
{
	const kvc_handover_chunk_t chunk = {
		.struct_size = sizeof chunk, .transfer = "t", .n = n, .source = &source_, .last = last, .ahead = ahead};
	kvc_status_t status = kvc_handover_send(user->space, &chunk, p_handover);

	return status == KVC_OK ? kvc_handover_wait(*p_handover, 0, SOON) : status;
}

/* Announces all of it before the first put begins, puts a half and, when it may, the rest. */
static void announcer(void *arg, int ready)
{
	kvc_handover_t *handover = NULL;
	user_t user = {0};

	(void)arg;
	user_attach(&user, &rig_, "model");
	if (send_chunk(&user, BLOCKS, 1, 1, &handover) == KVC_OK && user_handover_info(handover).announced == BLOCKS) {
		child_say(ready);
	}
	(void)user_put(&user, keys_, 0, HALF, 0, NULL);
	while (!atomic_load(go_)) {
		(void)kvc_poll(user.kvc, 1);
	}
	(void)user_put(&user, keys_, HALF, BLOCKS, 0, NULL);
	for (;;) {
		(void)kvc_poll(user.kvc, 100);
	}
}

/* The consumer has all blocks, and when it is done nothing is kept. */
static void end_and_check(kvc_handover_t *wanted)
{
	check_blocks(BLOCKS);
	kvc_handover_done(wanted, 0);
	rig_check_quiet(&rig_);
	assert_true(rig_metric_is(&rig_, "kvd_handovers", 0));
	assert_true(rig_metric_is(&rig_, "kvd_handover_bytes", 0));
}

KV_TEST(p4_a_consumer_sees_pieces_without_a_word_of_its_producer, setup_ahead, teardown)
{
	kvc_handover_t *wanted = NULL;
	pid_t pid;

	assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &wanted), KVC_OK);
	pid = child_start(announcer, NULL);
	assert_int_equal(kvc_handover_wait(wanted, HALF, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).state, KVC_HANDOVER_SENDING);
	assert_int_equal(user_handover_info(wanted).n, HALF);
	check_blocks(HALF);
	atomic_store(go_, 1);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).state, KVC_HANDOVER_COMPLETE);
	assert_int_equal(user_handover_info(wanted).n, BLOCKS);
	child_kill(pid); /* it does not matter now */
	end_and_check(wanted);
}

KV_TEST(p7_a_producer_killed_with_an_announcement_is_told_at_once, setup_ahead, teardown)
{
	kvc_handover_t *wanted = NULL;
	uint64_t start;
	pid_t pid;

	assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &wanted), KVC_OK);
	pid = child_start(announcer, NULL);
	assert_int_equal(kvc_handover_wait(wanted, HALF, SOON), KVC_OK);
	child_kill(pid);
	start = rig_now_ms();
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_ERR_PRODUCER_LOST);
	assert_true(rig_now_ms() - start < SOON / 2);
	assert_int_equal(user_handover_info(wanted).n, HALF);
	/* What somebody else puts now is an ordinary block, and not the dead producer's to hand over. */
	assert_int_equal(user_put(&user_, keys_, HALF, BLOCKS, 0, NULL), KVC_OK);
	(void)kvc_poll(user_.kvc, 50);
	assert_int_equal(user_handover_info(wanted).n, HALF);
	end_and_check(wanted);
}

/* The producer's last chunk is on its way while what it has announced completes the hand-over, or ends it. */
KV_TEST(p4_requests_that_cross_the_notice_end_well, setup_ahead, teardown)
{
	user_t other = {0};

	user_attach(&other, &rig_, "model");
	for (int is_taken = 0; is_taken < 2; is_taken++) {
		kvc_handover_t *made = NULL, *wanted = NULL;

		assert_int_equal(send_chunk(&user_, BLOCKS, 1, 1, &made), KVC_OK);
		assert_int_equal(kvc_handover_recv(other.space, "t", 0, &wanted), KVC_OK);
		if (!is_taken) {
			assert_int_equal(user_handover_info(made).state, KVC_HANDOVER_SENDING);
			assert_int_equal(user_put(&other, keys_, 0, BLOCKS, 0, NULL), KVC_OK);
		}
		assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
		if (is_taken) { /* all is visible already: it was complete at once */
			assert_int_equal(user_handover_info(made).state, KVC_HANDOVER_COMPLETE);
			kvc_handover_done(wanted, 0);
			assert_true(rig_metric_is(&rig_, "kvd_handovers", 0));
			wanted = NULL;
		}
		assert_int_equal(send_chunk(&user_, HALF, 1, 0, &made), KVC_OK);
		assert_int_equal(user_handover_info(made).state, is_taken ? KVC_HANDOVER_ENDED : KVC_HANDOVER_COMPLETE);
		assert_int_equal(user_handover_info(made).n, BLOCKS);
		kvc_handover_done(wanted, 0);
		kvc_handover_done(made, 0);
		assert_true(rig_metric_is(&rig_, "kvd_handovers", 0)); /* the name is free again */
	}
	user_leave(&other);
	rig_check_quiet(&rig_);
}
