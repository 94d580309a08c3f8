/* What the core itself costs, without sockets and bytes. Prints; judges nothing. Built with the tests, run by hand:
 *
 *     core_measure            acquire + release of 8,192 resident blocks, puts, evictions, a hostile chain on disk,
 *                             recovery of 1 M blocks
 */
#include "universe.h"

#include <time.h>

#define BLOCKS  8192u
#define ROUNDS  20000u
#define RECOVER (1u << 20)

static uint64_t real_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);

	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return x < y ? -1 : x > y;
}

static uint32_t ladder_make(const kv_key_t *keys, uint32_t n, kv_key_t *ladder)
{
	uint32_t count = 0;

	for (uint32_t back = 0;; back = back ? back * 2 : 1) {
		uint32_t depth = back < n ? n - back : 1;

		ladder[count++] = keys[depth - 1];
		if (depth == 1) {
			return count;
		}
	}
}

/* One chain of BLOCKS blocks, put in pieces of 512. */
static void fill(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *keys)
{
	uint64_t start = real_ns();

	for (uint32_t at = 0; at < BLOCKS; at += 512) {
		assert_int_equal(u_put(u, m, space, keys, at, at + 512), 512);
	}
	printf("put            %7.1f ns a block (start, write, end, visible)\n", (double)(real_ns() - start) / BLOCKS);
}

static void measure_acquire(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *keys)
{
	static uint64_t times[ROUNDS];
	kv_key_t ladder[KV_MAX_LADDER];
	kv_msg_t ask = {.acquire = {.space = space->space, .epoch = space->epoch, .n = BLOCKS}}, release, reply;

	ask.acquire.ladder = (kv_slice_t){(const uint8_t *)ladder, ladder_make(keys, BLOCKS, ladder) * KV_KEY_BYTES};
	for (uint32_t i = 0; i < ROUNDS; i++) {
		uint64_t start = real_ns(), lease;

		assert_int_equal(kvd_core_request(u->core,
						  &(kvd_ask_t){.member = m->id, .code = KV_CODE_ACQUIRE, .msg = &ask},
						  &reply, NULL),
				 KV_OK);
		assert_int_equal(reply.acquire_reply.ready, BLOCKS);
		lease = reply.acquire_reply.lease;
		release = (kv_msg_t){.release = {.leases = {(const uint8_t *)&lease, sizeof lease}}};
		assert_int_equal(
			kvd_core_request(u->core,
					 &(kvd_ask_t){.member = m->id, .code = KV_CODE_RELEASE, .msg = &release},
					 &reply, NULL),
			KV_OK);
		times[i] = real_ns() - start;
	}
	qsort(times, ROUNDS, sizeof *times, by_value);
	printf("acquire+release %6.0f ns p50, %.0f ns p99 of %u resident blocks\n", (double)times[ROUNDS / 2],
	       (double)times[ROUNDS * 99 / 100], BLOCKS);
}

/* A chain on disk with a branch at every block, so that every run has one block: the longest path a client can make. */
static void measure_hostile(void)
{
	static universe_t u;
	fake_tier_t disk;
	kvs_geometry_t geometry = {
		.block_bytes = 4096, .heads = 2, .leaves = 2, .leaf_bytes = 1024, .page_bytes = 1024};
	kv_key_t *keys = calloc(BLOCKS, sizeof *keys), ladder[KV_MAX_LADDER];
	kv_msg_t ask = {.acquire = {.n = BLOCKS}}, reply;
	kvd_space_info_t space;
	uint32_t slot_class;
	u_member_t *m;
	uint64_t start, steps;

	fake_tier_init(&disk, 1, 2 * BLOCKS, 1);
	assert_int_equal(kvs_class_open(&disk.tier, "a", &geometry, &slot_class), KV_OK);
	u_chain(NULL, 1, keys, BLOCKS);
	for (uint32_t i = 0; i < 2 * BLOCKS; i++) { /* a block of the chain, then its sibling */
		kvs_meta_t meta = {.epoch = 1, .depth = i / 2 + 1, .root = "model", .key = keys[i / 2]};
		kvs_loc_t loc;

		meta.key.b[0] ^= (uint8_t)(i & 1);
		if (i >= 2) {
			meta.parent = keys[i / 2 - 1];
		}
		assert_int_equal(kvs_alloc(&disk.tier, slot_class, KVS_FILLING, 0, &meta, &loc), KV_OK);
		disk.slots[loc.slot].state = KVS_READY;
	}
	memcpy(disk.roots[0].root, "model", 5);
	disk.roots[0].epoch = 1;
	disk.root_count = 1;
	disk.ordered = 1;
	universe_init(&u, &(u_config_t){.cpu_slots = 2 * BLOCKS, .max_blocks = 4 * BLOCKS, .seed = 1}, &disk);
	m = u_join(&u, 0, "engine", 2, 0);
	space = u_space(&u, 0, "model");
	ask.acquire.space = space.space;
	ask.acquire.epoch = space.epoch;
	ask.acquire.ladder = (kv_slice_t){(const uint8_t *)ladder, ladder_make(keys, BLOCKS, ladder) * KV_KEY_BYTES};
	steps = kv_metric_get(&u.metrics, KV_M_INDEX_STEPS);
	start = real_ns();
	assert_int_equal(u_request(&u, m, KV_CODE_ACQUIRE, &ask, &reply), KV_OK);
	start = real_ns() - start;
	assert_int_equal(reply.acquire_reply.n_disk, BLOCKS);
	printf("acquire hostile %6.2f ms, %llu runs visited, %u blocks on disk that all branch\n", (double)start / 1e6,
	       (unsigned long long)(kv_metric_get(&u.metrics, KV_M_INDEX_STEPS) - steps), BLOCKS);
	universe_fini(&u);
	free(keys);
}

static kv_status_t found_nothing(void *arg, uint32_t slot_class, kvs_loc_t loc, const kvs_meta_t *meta)
{
	*(uint64_t *)arg += slot_class + loc.slot + meta->depth;

	return KV_OK;
}

static void measure_recovery(void)
{
	static universe_t u;
	fake_tier_t disk;
	kvs_geometry_t geometry = {
		.block_bytes = 4096, .heads = 2, .leaves = 2, .leaf_bytes = 1024, .page_bytes = 1024};
	kv_test_rng_t rng = {.state = 9};
	kv_key_t above[4096];
	uint32_t slot_class;
	uint64_t start, walk, sum = 0;
	kvd_space_info_t space;
	u_config_t config = {.cpu_slots = 64, .max_blocks = RECOVER + 1024, .seed = 1};
	uint64_t longest = 0, turns = 1;

	fake_tier_init(&disk, 1, RECOVER, 1);
	assert_int_equal(kvs_class_open(&disk.tier, "a", &geometry, &slot_class), KV_OK);
	for (uint32_t i = 0; i < RECOVER; i++) { /* 4,096 chains side by side, parents first */
		kvs_meta_t meta = {.epoch = 1, .depth = i / 4096 + 1, .root = "model"};
		kvs_loc_t loc;

		kv_test_fill(&rng, meta.key.b, sizeof meta.key.b);
		if (i >= 4096) {
			meta.parent = above[i % 4096];
		}
		above[i % 4096] = meta.key;
		assert_int_equal(kvs_alloc(&disk.tier, slot_class, KVS_FILLING, 0, &meta, &loc), KV_OK);
		disk.slots[loc.slot].state = KVS_READY;
	}
	memcpy(disk.roots[0].root, "model", 5);
	disk.roots[0].epoch = 1;
	disk.root_count = 1;
	disk.ordered = 1;
	start = real_ns();
	assert_int_equal(kvs_recover(&disk.tier, found_nothing, &sum), KV_OK);
	walk = real_ns() - start;
	start = real_ns();
	universe_init(&u, &config, &disk);
	printf("recover         %6.0f ms for %u blocks (the disk's own walk, %.0f ms, taken off)\n",
	       (double)(real_ns() - start - walk) / 1e6, RECOVER, (double)walk / 1e6);
	printf("memory          %6.1f bytes a block, mirror not counted\n",
	       (double)atomic_load(&u.env.live_bytes) / RECOVER);
	start = real_ns();
	space = u_space(&u, 0, "model");
	while (u.core->showing) {
		u_tick(&u, 1);
	}
	printf("mirror filled   %6.0f ms\n", (double)(real_ns() - start) / 1e6);
	assert_int_equal(kvd_tree_at(&u.core->ix, u.core->ns[0]->numbers[space.space]->tree)->in[KVD_DISK], RECOVER);
	universe_kill(&u, &disk);

	config.disk_off = 1;
	universe_init(&u, &config, &disk);
	start = walk = real_ns();
	while (kvd_core_take_in(u.core, &u.disk.tier) == KV_PENDING) {
		uint64_t now = real_ns();

		longest = turns > 1 && now - walk > longest ? now - walk : longest;
		walk = now;
		turns++;
	}
	printf("attach          %6.0f ms in %llu turns, the longest %.2f ms (the first not counted: the disk's own "
	       "walk)\n",
	       (double)(real_ns() - start) / 1e6, (unsigned long long)turns, (double)longest / 1e6);
	universe_fini(&u);
}

int main(void)
{
	static universe_t u;
	kv_key_t *keys = calloc(BLOCKS, sizeof *keys);
	kvd_space_info_t space;
	u_member_t *m;
	uint64_t start;

	setvbuf(stdout, NULL, _IOLBF, 0);
	universe_init(&u, &(u_config_t){.cpu_slots = BLOCKS, .max_blocks = 1u << 20, .seed = 1}, NULL);
	m = u_join(&u, 0, "engine", 2, 0);
	space = u_space(&u, 0, "model");
	u_chain(NULL, 1, keys, BLOCKS);
	fill(&u, m, &space, keys);
	measure_acquire(&u, m, &space, keys);
	start = real_ns();
	for (uint32_t i = 0; i < BLOCKS; i++) {
		assert_int_equal(kvd_core_evict_one(u.core, KV_TIER_CPU), KV_OK);
	}
	printf("evict          %7.1f ns a block\n", (double)(real_ns() - start) / BLOCKS);
	universe_fini(&u);
	free(keys);
	measure_hostile();
	measure_recovery();

	return 0;
}
