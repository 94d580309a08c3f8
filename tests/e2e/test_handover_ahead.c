/* Two engines, one daemon: the producer announces what it is about to compute, and says nothing more. */
#include "e2e/rig/rig.h"

#include <sys/mman.h>

#define BLOCKS 32u
#define HALF   16u
#define SOON   20000u /* ms: who runs into it has waited for nothing */

static rig_t rig_;
static user_t user_;
static kvc_key_t keys_[BLOCKS];
static _Atomic int *go_; /* shared with the producer: it may go on */

KV_FIXTURE(setup)
{
	rig_init(&rig_, 0);
	rig_option(&rig_, "--cpu.size=%s", "8MiB");
	rig_start(&rig_);
	user_attach(&user_, &rig_, "model");
	user_keys(&user_, 1, BLOCKS, keys_);
	go_ = mmap(NULL, sizeof *go_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	assert_ptr_not_equal(go_, MAP_FAILED);
}

KV_FIXTURE(teardown)
{
	munmap((void *)go_, sizeof *go_);
	user_leave(&user_);
	rig_fini(&rig_);
}

static const kvc_key_source_t source_ = {.key = user_key_at, .ctx = keys_};

static kvc_status_t send_chunk(user_t *user, uint32_t n, int last, int ahead, kvc_handover_t **p_handover)
{
	const kvc_handover_chunk_t chunk = {
		.struct_size = sizeof chunk, .transfer = "t", .n = n, .source = &source_, .last = last, .ahead = ahead};
	kvc_status_t status = kvc_handover_send(user->space, &chunk, p_handover);

	return status == KVC_OK ? kvc_handover_wait(*p_handover, 0, SOON) : status;
}

/* Announces all of it before the first put begins, puts a half and, when it may, the rest. */
static void producer(void *arg, int ready)
{
	kvc_handover_t *handover = NULL;
	user_t user = {0};

	(void)arg;
	user_attach(&user, &rig_, "model");
	if (send_chunk(&user, BLOCKS, 1, 1, &handover) == KVC_OK && user_handover_info(handover).announced == BLOCKS) {
		child_say(ready);
	}
	(void)user_put(&user, keys_, 0, HALF, 0, NULL);
	while (!*go_) {
		(void)kvc_poll(user.kvc, 1);
	}
	(void)user_put(&user, keys_, HALF, BLOCKS, 0, NULL);
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

KV_TEST(p4_a_consumer_sees_pieces_without_a_word_of_its_producer, setup, teardown)
{
	kvc_handover_t *wanted = NULL;
	pid_t pid;

	assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &wanted), KVC_OK);
	pid = child_start(producer, NULL);
	assert_int_equal(kvc_handover_wait(wanted, HALF, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).state, KVC_HANDOVER_SENDING);
	assert_int_equal(user_handover_info(wanted).n, HALF);
	check_blocks(HALF);
	*go_ = 1;
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).state, KVC_HANDOVER_COMPLETE);
	assert_int_equal(user_handover_info(wanted).n, BLOCKS);
	child_kill(pid); /* it does not matter now */
	check_blocks(BLOCKS);
	kvc_handover_done(wanted, 0);
	rig_check_quiet(&rig_);
	assert_true(rig_metric_is(&rig_, "kvd_handovers", 0));
	assert_true(rig_metric_is(&rig_, "kvd_handover_bytes", 0));
}

KV_TEST(p7_a_producer_killed_with_an_announcement_is_told_at_once, setup, teardown)
{
	kvc_handover_t *wanted = NULL;
	uint64_t start;
	pid_t pid;

	assert_int_equal(kvc_handover_recv(user_.space, "t", 0, &wanted), KVC_OK);
	pid = child_start(producer, NULL);
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
	check_blocks(BLOCKS);
	kvc_handover_done(wanted, 0);
	rig_check_quiet(&rig_);
	assert_true(rig_metric_is(&rig_, "kvd_handovers", 0));
	assert_true(rig_metric_is(&rig_, "kvd_handover_bytes", 0));
}

/* The producer's last chunk is on its way while what it has announced completes the hand-over, or ends it. */
KV_TEST(p4_requests_that_cross_the_notice_end_well, setup, teardown)
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

KV_TEST_MAIN(NULL, NULL)
