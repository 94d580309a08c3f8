/* A machine all of whose CPUs are busy: no time is left to touch memory ahead, and no caller waits for that. */
#include "pool_test.h"

#include <pthread.h>
#include <unistd.h>

#define MOST_MS 3000u /* of one call, which takes about 100; waiting for a starved thread takes 5 to 15 seconds */

static atomic_int over;

static void *burn(void *arg)
{
	(void)arg;
	while (!atomic_load_explicit(&over, memory_order_relaxed)) {
	}

	return NULL;
}

static uint64_t now_ms(void)
{
	return kv_now_ns(&kv_env_posix) / 1000000u;
}

KV_TEST(p5_no_call_waits_for_memory_touched_ahead)
{
	const size_t count = 4u * (size_t)sysconf(_SC_NPROCESSORS_ONLN);
	pthread_t *burners = calloc(count, sizeof *burners);
	kvs_meta_t meta = meta_of(1);
	uint64_t begin, longest = 0;
	kvs_loc_t loc;
	kv_status_t status;

	for (size_t i = 0; i < count; i++) {
		assert_int_equal(pthread_create(&burners[i], NULL, burn, NULL), 0);
	}
	for (int round = 0; round < 3; round++) {
		pool_set_up(64u << 20, 4u << 20);
		config_.prefault = 1;
		pool_begin();
		status = KV_OK;
		while (status == KV_OK) { /* until it is full */
			begin = now_ms();
			status = kvs_alloc(pool_, class_, KVS_PUT, 1, &meta, &loc);
			longest = now_ms() - begin > longest ? now_ms() - begin : longest;
		}
		begin = now_ms();
		pool_end();
		longest = now_ms() - begin > longest ? now_ms() - begin : longest;
	}
	atomic_store(&over, 1);
	for (size_t i = 0; i < count; i++) {
		pthread_join(burners[i], NULL);
	}
	free(burners);
	printf("# longest call: %lu ms\n", (unsigned long)longest);
	assert_true(longest < MOST_MS);
}
