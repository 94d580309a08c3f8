/* What kvc.h lets any thread call goes on while the owner loses its session and joins again. */
#include "client_test.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <time.h>

#define ROUNDS 8u
#define BLOCKS 4u
#define CUTS   10000u

typedef struct crowd {
	_Atomic(kvc_lease_t *) lease; /* what to read; NULL: nothing now */
	_Atomic(kvc_put_t *) put;     /* what to fill, each thread its block */
	_Atomic uint32_t inside, stop, threads, good, over, wrong;
} crowd_t;

/* Answers that may come at any time, of a lease and of a put. */
static int sane(kvc_status_t status)
{
	return status == KVC_OK || status == KVC_PENDING || status == KVC_ERR_REVOKED;
}

static void check_answers(crowd_t *crowd, uint32_t me)
{
	static const uint64_t leaves[8] = {0};
	kvc_lease_t *lease = atomic_load(&crowd->lease);
	kvc_put_t *put = atomic_load(&crowd->put);
	const void *data = NULL;
	void *memory = NULL;

	if (lease) {
		int good = sane(kvc_lease_state(lease)) && sane(kvc_lease_block(lease, me, &data, NULL)) &&
			   kvc_lease_ready(lease) <= BLOCKS && kvc_lease_n(lease) == BLOCKS &&
			   kvc_lease_rest_status(lease) == KVC_OK;

		atomic_fetch_add(&crowd->wrong, (uint32_t)!good);
	}
	if (put) {
		int good = sane(kvc_put_block(put, me, &memory)) && sane(kvc_put_digests(put, me, leaves)) &&
			   sane(kvc_put_write(put, me, bed.src[me]));

		atomic_fetch_add(&crowd->wrong, (uint32_t)!good);
	}
}

static void check_hit(crowd_t *crowd, uint8_t *bytes, uint32_t me)
{
	kvc_space_t *space = bed.space;
	uint32_t block_bytes = bed.info.block_bytes, n = 0;
	void *dst[BLOCKS];
	kvc_key_t keys[BLOCKS];
	kvc_match_t match = {.struct_size = sizeof match};
	kvc_lease_t *lease;

	if (kvc_keys_of(space, &(kvc_prompt_t){sizeof(kvc_prompt_t), bed.tokens, BLOCKS * 16, NULL}, keys, BLOCKS,
			&n) != KVC_OK) {
		atomic_fetch_add(&crowd->wrong, 1u);
	}
	kvc_match(space, keys, BLOCKS, &match);
	atomic_fetch_add(&crowd->wrong, (uint32_t)(match.n > BLOCKS || (match.n < BLOCKS && match.why == KV_WHY_NONE)));

	for (uint32_t i = 0; i < BLOCKS; i++) {
		dst[i] = bytes + (size_t)i * block_bytes;
	}
	atomic_fetch_add(&crowd->inside, 1u);
	check_answers(crowd, me);
	lease = atomic_load(&crowd->lease);
	if (lease && kvc_lease_read(lease, 0, BLOCKS, dst, NULL) == KVC_OK) {
		atomic_fetch_add(&crowd->good, 1u);
		for (uint32_t i = 0; i < BLOCKS; i++) {
			atomic_fetch_add(&crowd->wrong, (uint32_t)(memcmp(dst[i], bed.src[i], block_bytes) != 0));
		}
	} else if (lease) {
		atomic_fetch_add(&crowd->over, 1u);
		atomic_fetch_add(&crowd->wrong, (uint32_t)(kvc_lease_state(lease) != KVC_ERR_REVOKED));
	}
	atomic_fetch_sub(&crowd->inside, 1u);
}

static void *look_for_ever(void *context)
{
	crowd_t *crowd = context;
	uint8_t *bytes = malloc((size_t)BLOCKS * bed.info.block_bytes);

	uint32_t me = atomic_fetch_add(&crowd->threads, 1u);

	while (bytes && !atomic_load(&crowd->stop)) {
		check_hit(crowd, bytes, me);
	}
	free(bytes);

	return NULL;
}

/* Poll until others have got on by some. */
static void until(const _Atomic uint32_t *counter, uint32_t more)
{
	uint32_t from = atomic_load(counter);

	BED_UNTIL(&bed, atomic_load(counter) - from >= more);
}

static void one_round(crowd_t *crowd, uint32_t round)
{
	kvc_lease_t *lease;
	kvc_put_t *put;

	bed_store(0, BLOCKS);
	lease = bed_acquire(BLOCKS, 0);
	put = bed_reserve(bed.space, BLOCKS, 2 * BLOCKS, NULL);
	atomic_store(&crowd->lease, lease);
	atomic_store(&crowd->put, put);
	until(&crowd->good, 10);
	if (round % 2) {
		fake_drop_sessions(bed.fake);
	} else {
		fake_stop(bed.fake);
		bed.fake = fake_start(bed.path, &fake_split, 42 + round);
	}
	until(&crowd->over, 10);
	BED_UNTIL(&bed, kvc_poll(bed.kvc, 1) == KVC_OK);
	atomic_store(&crowd->lease, NULL);
	atomic_store(&crowd->put, NULL);
	while (atomic_load(&crowd->inside) != 0) {
		nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
	}
	kvc_release(&lease, 1);
	kvc_put_free(put);
}

BED_CASE(p1_other_threads_match_and_read_while_sessions_come_and_go)
{
	static crowd_t crowd;
	pthread_t threads[2];

	for (uint32_t i = 0; i < KV_COUNT_OF(threads); i++) {
		assert_int_equal(pthread_create(&threads[i], NULL, look_for_ever, &crowd), 0);
	}
	for (uint32_t round = 0; round < ROUNDS; round++) {
		one_round(&crowd, round);
	}
	atomic_store(&crowd.stop, 1u);
	for (uint32_t i = 0; i < KV_COUNT_OF(threads); i++) {
		assert_int_equal(pthread_join(threads[i], NULL), 0);
	}
	assert_int_equal(atomic_load(&crowd.wrong), 0);
}

/* The daemon's way with a block that cannot be read: what came before it is ready, then the lease ends there. */
typedef struct cutter {
	sem_t begin, done; /* of a round; threads that sleep are not late on a busy machine, as those that spin are */
} cutter_t;

static void *cut_for_ever(void *context)
{
	cutter_t *cutter = context;

	for (uint32_t round = 1; round <= CUTS; round++) {
		sem_wait(&cutter->begin);
		fake_ready(bed.fake, 1, KV_PENDING);
		fake_cut(bed.fake, 1);
		sem_post(&cutter->done);
	}

	return NULL;
}

BED_CASE(p6_blocks_before_a_lost_block_are_served)
{
	cutter_t cutter = {0};
	kvc_lease_t *lease;
	pthread_t thread;

	assert_int_equal(sem_init(&cutter.begin, 0, 0), 0);
	assert_int_equal(sem_init(&cutter.done, 0, 0), 0);
	bed_store(0, BLOCKS);
	KNOB(lazy_ready) = 1;
	lease = bed_acquire(BLOCKS, 0);
	assert_int_equal(pthread_create(&thread, NULL, cut_for_ever, &cutter), 0);
	for (uint32_t round = 1; round <= CUTS; round++) {
		kvc_status_t status = KVC_PENDING;

		fake_cut(bed.fake, BLOCKS);
		fake_ready(bed.fake, 0, KV_PENDING);
		sem_post(&cutter.begin);
		while (round % 2 && status == KVC_PENDING) {
			status = kvc_lease_block(lease, 0, NULL, NULL);
		}
		assert_int_equal(round % 2 ? status : kvc_lease_wait(lease, 1, 0), KVC_OK);
		assert_int_equal(kvc_lease_wait(lease, 2, 0), (kvc_status_t)KV_ERR_IO);
		sem_wait(&cutter.done);
	}
	assert_int_equal(pthread_join(thread, NULL), 0);
	kvc_release(&lease, 1);
}

KV_TEST_MAIN_EACH(NULL, bed_teardown)
