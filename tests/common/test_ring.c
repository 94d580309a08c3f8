/* Rings: a model of a queue, refusal when full, and threads that neither lose, double nor reorder a record. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kv/ring.h"

#include <pthread.h>
#include <sched.h>

typedef struct record {
	uint64_t number;
	uint32_t producer;
	uint32_t check; /* tells a torn record */
} record_t;

static record_t make(uint32_t producer, uint64_t number)
{
	return (record_t){number, producer, (uint32_t)(number * 2654435761u) ^ producer};
}

static int is_whole(const record_t *r)
{
	return r->check == ((uint32_t)(r->number * 2654435761u) ^ r->producer);
}

static void p5_shapes_out_of_range_are_refused(void **state)
{
	static const uint32_t bad[][2] = {{0, 8},  {8, 0},    {8, 1},        {8, 3},
					  {8, 12}, {4097, 8}, {8, 1u << 21}, {8, 1u << 31}};
	kv_test_env_t t;
	kv_spsc_t one;
	kv_mpsc_t many;

	(void)state;
	kv_test_env_init(&t);
	for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
		assert_int_equal(kv_spsc_init(&one, &t.env, bad[i][0], bad[i][1]), KV_ERR_ARG);
		assert_int_equal(kv_mpsc_init(&many, &t.env, bad[i][0], bad[i][1]), KV_ERR_ARG);
	}
	KV_TEST_EACH_FAILURE(&t, n)
	{
		kv_status_t status = kv_spsc_init(&one, &t.env, 24, 8);

		assert_int_equal(status, n == 1 ? KV_ERR_NOMEM : KV_OK);
		if (status == KV_OK) {
			status = kv_mpsc_init(&many, &t.env, 24, 8);
			assert_int_equal(status, n == 2 ? KV_ERR_NOMEM : KV_OK);
			if (status == KV_OK) {
				kv_mpsc_fini(&many);
			}
			kv_spsc_fini(&one);
		}
		assert_int_equal(kv_test_env_live(&t), 0);
	}
}

/* One model for both: the same pushes and pops, every record size from 1 byte over odd ones. */
static void each_ring_is_a_queue(void **state)
{
	static const uint32_t sizes[] = {1, 3, 8, 24, 56, 57, 128};
	kv_test_rng_t rng = {kv_test_seed()};
	kv_test_env_t t;

	(void)state;
	kv_test_env_init(&t);
	for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
		uint32_t bytes = sizes[s], cap = 2u << kv_test_below(&rng, 5);
		uint64_t pushed = 0, popped = 0;
		uint8_t in[128], out[2][128], want[128];
		kv_spsc_t one;
		kv_mpsc_t many;

		assert_int_equal(kv_spsc_init(&one, &t.env, bytes, cap), KV_OK);
		assert_int_equal(kv_mpsc_init(&many, &t.env, bytes, cap), KV_OK);
		for (int step = 0; step < 5000; step++) {
			if (kv_test_below(&rng, 2)) {
				int fits = pushed - popped < cap;

				memset(in, (int)(pushed % 251), sizeof in);
				assert_int_equal(kv_spsc_push(&one, in), fits);
				assert_int_equal(kv_mpsc_push(&many, in), fits);
				pushed += (uint64_t)fits;
			} else {
				int there = popped < pushed;

				assert_int_equal(kv_spsc_pop(&one, out[0]), there);
				assert_int_equal(kv_mpsc_pop(&many, out[1]), there);
				memset(want, (int)(popped % 251), sizeof want);
				if (there) {
					assert_memory_equal(out[0], want, bytes);
					assert_memory_equal(out[1], want, bytes);
				}
				popped += (uint64_t)there;
			}
			assert_int_equal(kv_spsc_count(&one), pushed - popped);
			assert_int_equal(kv_mpsc_count(&many), pushed - popped);
		}
		kv_spsc_fini(&one);
		kv_mpsc_fini(&many);
	}
	assert_int_equal(kv_test_env_live(&t), 0);
}

#define RECORDS   200000u
#define PRODUCERS 4u

static kv_spsc_t spsc;
static kv_mpsc_t mpsc;

static void *spsc_producer(void *arg)
{
	(void)arg;
	for (uint64_t i = 0; i < RECORDS;) {
		record_t r = make(0, i);

		if (kv_spsc_push(&spsc, &r)) {
			i++;
		} else {
			sched_yield();
		}
	}

	return NULL;
}

static void one_producer_loses_doubles_and_reorders_nothing(void **state)
{
	pthread_t thread;
	record_t r;

	(void)state;
	assert_int_equal(kv_spsc_init(&spsc, &kv_env_posix, sizeof r, 64), KV_OK);
	assert_int_equal(pthread_create(&thread, NULL, spsc_producer, NULL), 0);
	for (uint64_t i = 0; i < RECORDS;) {
		assert_true(kv_spsc_count(&spsc) <= 64);
		if (!kv_spsc_pop(&spsc, &r)) {
			sched_yield();
			continue;
		}
		assert_true(is_whole(&r) && r.number == i);
		i++;
	}
	pthread_join(thread, NULL);
	assert_int_equal(kv_spsc_pop(&spsc, &r), 0);
	kv_spsc_fini(&spsc);
}

static void *mpsc_producer(void *arg)
{
	uint32_t me = *(const uint32_t *)arg;

	for (uint64_t i = 0; i < RECORDS / PRODUCERS;) {
		record_t r = make(me, i);

		if (kv_mpsc_push(&mpsc, &r)) {
			i++;
		} else {
			sched_yield();
		}
	}

	return NULL;
}

static void many_producers_lose_and_double_nothing_and_each_keeps_its_order(void **state)
{
	uint64_t next[PRODUCERS] = {0}, got = 0;
	uint32_t ids[PRODUCERS];
	pthread_t threads[PRODUCERS];
	record_t r;

	(void)state;
	assert_int_equal(kv_mpsc_init(&mpsc, &kv_env_posix, sizeof r, 32), KV_OK);
	for (uint32_t i = 0; i < PRODUCERS; i++) {
		ids[i] = i;
		assert_int_equal(pthread_create(&threads[i], NULL, mpsc_producer, &ids[i]), 0);
	}
	while (got < RECORDS) {
		assert_true(kv_mpsc_count(&mpsc) <= 32);
		if (!kv_mpsc_pop(&mpsc, &r)) {
			sched_yield();
			continue;
		}
		assert_true(is_whole(&r) && r.producer < PRODUCERS && r.number == next[r.producer]);
		next[r.producer]++;
		got++;
	}
	for (uint32_t i = 0; i < PRODUCERS; i++) {
		pthread_join(threads[i], NULL);
	}
	assert_int_equal(kv_mpsc_pop(&mpsc, &r), 0);
	kv_mpsc_fini(&mpsc);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p5_shapes_out_of_range_are_refused),
		cmocka_unit_test(each_ring_is_a_queue),
		cmocka_unit_test(one_producer_loses_doubles_and_reorders_nothing),
		cmocka_unit_test(many_producers_lose_and_double_nothing_and_each_keeps_its_order),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
