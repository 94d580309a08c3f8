/* An engine that allocates, computes, saves, loads and reuses blocks at random for many steps: what a load says is
 * there is what was computed. The blocks are those of a second group with fewer layers than the pool's blocks. */
#include "connectors/worker/worker_rig.h"
#include "connectors/worker/wr_device.h"
#include "engine/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define KEYS   40u
#define STEPS  250u
#define A_STEP 6u /* blocks given out a step, of each kind at most */
#define PUTS   16u
#define LAYERS 4u

static const char *kvd_program;

/* A put under way, and what of the keys it has. */
typedef struct pending {
	kvc_put_t *put;
	uint32_t keys[A_STEP];
	uint32_t n;
} pending_t;

typedef struct world {
	rig_t rig;
	wr_t wr;
	uint64_t seed;
	kvc_key_t keys[KEYS];
	uint8_t stored[KEYS];     /* or being stored */
	uint8_t busy[WR_BLOCKS];  /* an asynchronous load writes there */
	uint8_t given[WR_BLOCKS]; /* in this step */
	pending_t puts[PUTS];
	kvc_lease_t *async; /* of the asynchronous load; NULL: none */
	uint32_t async_keys[A_STEP], async_ids[A_STEP], async_n;
	uint32_t loads, saves, lost;
	uint32_t wrong; /* blocks that were not what they should have been when the engine read them */
} world_t;

static uint32_t free_block(world_t *w)
{
	uint32_t id;

	do {
		id = below(&w->seed, WR_BLOCKS);
	} while (w->busy[id] || w->given[id]);
	w->given[id] = 1;

	return id;
}

/* Different keys that are, or are not, stored: how many of n. */
static uint32_t pick_keys(world_t *w, int stored, uint32_t *keys, uint32_t n)
{
	const uint32_t start = below(&w->seed, KEYS);
	uint32_t found = 0;

	for (uint32_t i = 0; i < KEYS && found < n; i++) {
		const uint32_t k = (start + i * 7u) % KEYS;

		if (w->stored[k] == (stored ? 1 : 0)) {
			keys[found++] = k;
		}
	}

	return found;
}

/* A put that is granted by now: computed blocks go into it. */
static void compute(world_t *w)
{
	kvc_key_t keys[A_STEP];
	uint32_t ids[A_STEP];
	pending_t *p = NULL;

	for (uint32_t i = 0; i < PUTS && !p; i++) {
		p = w->puts[i].put ? NULL : &w->puts[i];
	}
	if (!p) {
		return;
	}
	p->n = pick_keys(w, 0, p->keys, below(&w->seed, A_STEP) + 1);
	for (uint32_t i = 0; i < p->n; i++) {
		keys[i] = w->keys[p->keys[i]];
		ids[i] = free_block(w);
	}
	p->put = p->n ? wr_put_keys(&w->wr, keys, p->n) : NULL;
	if (!p->put) {
		return;
	}
	if (kvc_put_ready(p->put, WR_PATIENCE) != KVC_OK || kvc_put_n(p->put) != p->n) {
		kvc_put_free(p->put);
		p->put = NULL;
		return;
	}

	wr_plan_fence(&w->wr, ids, p->n);
	wr_plan_save(&w->wr, p->put, 0, ids, p->n);
	for (uint32_t i = 0; i < p->n; i++) {
		w->stored[p->keys[i]] = 2;
		/* after begin(), as an engine does: see step() */
		w->given[ids[i]] = (uint8_t)(p->keys[i] + 2);
	}
	w->saves += p->n;
}

static kvc_lease_t *plan_load(world_t *w, uint32_t flags, uint32_t *picked, uint32_t *ids, uint32_t *p_n)
{
	const uint32_t n = pick_keys(w, 1, picked, below(&w->seed, A_STEP) + 1);
	kvc_key_t keys[A_STEP];
	kvc_lease_t *lease;

	*p_n = n;
	for (uint32_t i = 0; i < n; i++) {
		keys[i] = w->keys[picked[i]];
	}
	lease = n ? wr_lease_keys(&w->wr, keys, n) : NULL;
	if (!lease) {
		return NULL;
	}
	for (uint32_t i = 0; i < n; i++) {
		ids[i] = free_block(w);
	}
	wr_plan_fence(&w->wr, ids, n);
	wr_plan_load(&w->wr, lease, flags, flags ? 8 : 7, ids, n);

	return lease;
}

static void check(world_t *w, const uint32_t *ids, const uint32_t *keys, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		wr_look_block(&w->wr.rank[0], ids[i], 1, keys[i], &w->wrong);
	}
	w->loads += n;
}

/* The asynchronous load, if it has ended. */
static void look_beside(world_t *w)
{
	char id[16];
	int failed;

	if (!w->async || kvx_worker_take_finished(w->wr.rank[0].worker, id, sizeof id, &failed) == 0) {
		return;
	}
	assert_int_equal(failed, 0);
	check(w, w->async_ids, w->async_keys, w->async_n);
	for (uint32_t i = 0; i < w->async_n; i++) {
		w->busy[w->async_ids[i]] = 0;
	}
	kvc_release(&w->async, 1);
	w->async = NULL;
}

static void look_at_puts(world_t *w)
{
	for (uint32_t i = 0; i < PUTS; i++) {
		pending_t *p = &w->puts[i];
		kvc_put_result_t result = {.struct_size = sizeof result};

		if (!p->put) {
			continue;
		}
		kvc_put_get_result(p->put, &result);
		if (result.status == KVC_PENDING) {
			continue;
		}
		for (uint32_t k = 0; k < p->n; k++) {
			w->stored[p->keys[k]] = result.status == KVC_OK;
			w->lost += result.status != KVC_OK;
		}
		kvc_put_free(p->put);
		p->put = NULL;
	}
}

/* What was computed is freed at once, given out again and written: by somebody whose blocks are not saved. */
static void reuse_at_once(world_t *w)
{
	uint32_t ids[WR_BLOCKS], n = 0;

	for (uint32_t b = 0; b < WR_BLOCKS; b++) {
		if (w->given[b] >= 2) {
			ids[n++] = b;
		}
	}
	wr_plan(&w->wr);
	wr_plan_fence(&w->wr, ids, n);
	wr_begin(&w->wr);
	for (uint32_t i = 0; i < n; i++) {
		wr_fill_block(&w->wr.rank[0], ids[i], 99, ids[i]);
	}
	kvx_worker_end_step(w->wr.rank[0].worker);
}

static void step(world_t *w)
{
	kvx_worker_t *worker = w->wr.rank[0].worker;
	uint32_t keys[A_STEP], ids[A_STEP], n = 0;
	kvc_lease_t *lease = NULL;
	const void *report;
	size_t len;

	memset(w->given, 0, sizeof w->given);
	wr_plan(&w->wr);
	if (below(&w->seed, 3)) {
		lease = plan_load(w, 0, keys, ids, &n);
	}
	if (!w->async && below(&w->seed, 2)) {
		w->async = plan_load(w, KVX_MSG_ASYNC, w->async_keys, w->async_ids, &w->async_n);
		for (uint32_t i = 0; w->async && i < w->async_n; i++) {
			w->busy[w->async_ids[i]] = 1;
		}
	}
	compute(w);
	wr_begin(&w->wr);
	kvx_worker_start_async_loads(worker);
	kvx_worker_run_sync_loads(worker);
	if (lease) {
		check(w, ids, keys, n);
	}
	for (uint32_t b = 0; b < WR_BLOCKS; b++) {
		if (w->given[b] >= 2) {
			wr_fill_block(&w->wr.rank[0], b, 1, w->given[b] - 2u);
		}
	}
	kvx_worker_end_step(worker);
	if (below(&w->seed, 2)) {
		reuse_at_once(w);
	}
	look_beside(w);
	assert_int_equal(kvx_worker_take_failed_blocks(worker, keys, A_STEP), 0);
	kvc_release(&lease, 1); /* of a device only now have all bytes come */
	kvx_worker_take_report(worker, &report, &len);
	(void)kvc_poll(w->wr.kvc, 0);
	look_at_puts(w);
}

static void make_keys(world_t *w)
{
	for (uint32_t i = 0; i < KEYS; i++) {
		const uint64_t name[2] = {i, 77};

		assert_int_equal(kvc_key_bind(w->wr.space, name, sizeof name, &w->keys[i]), KVC_OK);
	}
}

static void p1_whatever_is_loaded_is_what_was_computed(void **state)
{
	kvx_worker_stats_t stats = {.struct_size = sizeof stats};
	const char *seed = getenv("KVD_TEST_SEED");
	world_t *w = calloc(1, sizeof *w);
	uint32_t looks = 0;

	(void)state;
	assert_non_null(w);
	w->seed = seed ? strtoull(seed, NULL, 0) : 4711;
	print_message("seed %lu\n", (unsigned long)w->seed);
	wr_device_start(w->seed);
	rig_init(&w->rig, kvd_program);
	rig_start(&w->rig);
	w->wr.groups = "0:full:32,1:window:32:511";
	w->wr.layers = LAYERS;
	w->wr.group = 1;
	wr_init_with(&w->wr, &w->rig, 1, 1);
	w->wr.rank[0].layers = LAYERS;
	make_keys(w);

	for (uint32_t i = 0; i < STEPS; i++) {
		step(w);
		if (!w->async && below(&w->seed, 20) == 0) {
			assert_int_equal(kvc_space_reset(w->wr.space), KVC_OK);
			make_keys(w);
			for (uint32_t k = 0; k < KEYS; k++) {
				w->stored[k] = w->stored[k] == 2 ? 2 : 0;
			}
		}
	}
	for (uint32_t i = 0; i < WR_PATIENCE && w->async; i++) {
		look_beside(w);
		usleep(1000);
	}
	assert_null(w->async);
	assert_int_equal(kvx_worker_flush(w->wr.rank[0].worker, WR_PATIENCE), KVC_OK);
	for (uint32_t i = 0; i < PUTS; i++) {
		kvc_put_free(w->puts[i].put);
	}
	do { /* completed jobs are counted when the engine looks next */
		const void *report;
		size_t len;

		usleep(1000);
		kvx_worker_take_report(w->wr.rank[0].worker, &report, &len);
		kvx_worker_get_stats(w->wr.rank[0].worker, &stats);
	} while (stats.marked + stats.loads_open + stats.saves_open > 0 && looks++ < WR_PATIENCE);
	print_message("%u blocks saved (%u lost), %u loaded, %lu fences\n", w->saves, w->lost, w->loads,
		      (unsigned long)stats.fences);
	assert_true(w->loads > 100 && w->saves > 100 && stats.fences > 10);
	wr_device_sync();
	assert_int_equal(w->wrong, 0);
	assert_int_equal(stats.loads_failed, 0);
	assert_int_equal(stats.marked, 0);
	assert_int_equal(stats.loads_open, 0);
	assert_int_equal(stats.saves_open, 0);
	rig_check_quiet(&w->rig);
	wr_fini(&w->wr);
	rig_fini(&w->rig);
	free(w);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_whatever_is_loaded_is_what_was_computed),
	};

	if (argc < 2) {
		fprintf(stderr, "usage: %s KVD\n", argv[0]);
		return 64;
	}
	kvd_program = argv[1];

	return cmocka_run_group_tests_name("kvx.worker-steps", tests, NULL, NULL);
}
