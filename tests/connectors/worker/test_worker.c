/* A worker and its daemon, where no seed of a universe leads: the daemon hangs or is not there, and messages that are
 * fences of all blocks. What it cannot do it says when it is opened. What one number of ranks has saved, any other number
 * loads, each rank its heads: heads may be fewer than ranks, as with few KV heads or one latent vector a token; then
 * several ranks hold copies. */
#include "connectors/worker/wr.h"

#include "kvx_digest.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define IDLE_MS 300u
/* percent of a CPU: more than it needs, far less than a thread that spins */
#ifdef KVD_SANITIZE /* each of its looks takes twice as long */
#define IDLE_PC 20u
#else
#define IDLE_PC 10u
#endif

static const wr_t unstored = {.empty = 1};
static const wr_t fewer_layers = {.no_daemon = 1, .groups = "0:full:32,1:window:32:511", .layers = 4};
static const wr_t strict_alone = {.strict = 1, .no_daemon = 1};
static const wr_t strict_quick = {.strict = 1, .silence = "50ms"};
static const uint32_t both_kinds[2] = {0, KVX_MSG_ASYNC};

/* ---- how it is opened ------------------------------------------------------------------------ */

/* Also of a group with fewer layers. */
WR_CASE(p1_a_roundtrip_brings_a_block_back, fewer_layers)
{
	wr_rank_t *rank = &wr->rank[0];

	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 0, 5, 9), KVC_OK);
	assert_true(wr_block_is(rank, 9, 1, 5));
	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 1, 7, 9), KVC_OK);
	assert_false(wr_block_is(rank, 9, 1, 7)); /* two of the layers are not the group's */
	rank->layers = 4;
	assert_true(wr_block_is(rank, 9, 1, 7));
	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 2, 5, 9), KVC_ERR_ARG);
	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 0, WR_BLOCKS, 9), KVC_ERR_ARG);
	assert_int_equal(kvx_worker_roundtrip_test(rank->worker, 0, 5, WR_BLOCKS), KVC_ERR_ARG);
}

#define REFUSED(change, words)                                                                                         \
	do {                                                                                                           \
		kvx_worker_config_t config = good;                                                                     \
		kvk_paged_t cache = wr->rank[0].paged;                                                                 \
		kvk_layout_t layout = wr->layout;                                                                      \
		kvx_worker_group_t groups[2] = {{.layout = &layout, .paged = &cache},                                  \
						{.group = 1, .layout = &layout, .paged = &cache}};                     \
		kvx_worker_t *worker = NULL;                                                                           \
		config.groups = groups;                                                                                \
		change;                                                                                                \
		assert_int_equal(kvx_worker_open(&config, &worker), KVC_ERR_ARG);                                      \
		assert_non_null(strstr(kvx_worker_last_error(), words));                                               \
		assert_null(worker);                                                                                   \
	} while (0)

WR_CASE(p10_a_configuration_that_contradicts_itself_is_refused, wr_alone)
{
	kvx_worker_group_t two[2];
	const kvx_worker_config_t good = wr_config(wr, 0, two);

	REFUSED(config.struct_size = 8, "struct_size");
	REFUSED(config.identity = NULL, "required");
	REFUSED(groups[0].layout = NULL, "required");
	REFUSED(groups[0].paged = NULL, "required");
	REFUSED(layout.layers = 0, "layers");
	REFUSED(layout.layers = WR_LAYERS - 1, "layers");
	REFUSED((groups[0].save_layers = 1, groups[0].save_layer_first = WR_LAYERS), "not those that it holds");
	REFUSED((groups[0].save_layers = 1, cache.layers = 1, cache.first_layer = 1), "not those that it holds");
	REFUSED((groups[0].save_layers = 2, cache.layers = 1), "not those that it holds");
	REFUSED(config.group_count = 0, "no groups");
	REFUSED(config.threads = 1000, "threads");
	REFUSED(cache.page_bytes++, "page size");
	REFUSED((config.group_count = 2, groups[1].group = 0), "same number");
	REFUSED(config.secret_len = 3, "secret");
}

/* ---- a daemon that hangs --------------------------------------------------------------------- */

/* Eight saves that wait for the space of an adapter, which a stopped daemon does not open; their step has ended. */
static kvc_put_t *save_into_unopened_space(wr_t *wr)
{
	kvc_put_t *put = wr_put(wr, 0, 8);
	char name[16];

	rig_signal(&wr->rig, SIGSTOP);
	wr->number++;
	(void)snprintf(name, sizeof name, "adapter-%u", wr->number);
	wr_message(wr);
	wr_add_space(wr, wr->number, name);
	wr_add_save(wr, put, 0, wr_eight, 8);
	wr_begin(wr);
	wr_end(wr);

	return put;
}

/* Also a message that is not sound: which blocks the engine is about to write is not known then. No block is read after
 * it, and the saves are given up. */
WR_CASE(p1_a_fence_of_all_blocks_leaves_none_to_be_read, unstored)
{
	static const uint64_t zeros[8];
	const struct {
		const void *message;
		size_t len;
		uint32_t fenced;
	} rows[] = {{zeros, sizeof zeros, 0}, {(const uint8_t *)zeros + 1, 24, 0}, {zeros, 3, 0}, {0}, {.fenced = 8}};

	for (size_t i = 0; i < KV_COUNT_OF(rows); i++) {
		kvc_put_t *put = save_into_unopened_space(wr);

		assert_int_equal(wr_stats(wr, 0).marked, 8);
		if (rows[i].message) {
			kvx_worker_begin_step(wr->rank[0].worker, rows[i].message, rows[i].len);
		} else {
			wr_message(wr);
			wr_add_fence(wr, wr_eight, rows[i].fenced);
			wr_begin(wr);
		}
		assert_int_equal(wr_stats(wr, 0).marked, 0);
		rig_signal(&wr->rig, SIGCONT);
		assert_true(wr_wait_dropped(wr) != 0);
		kvc_put_free(put);
	}
	assert_int_equal(wr_stats(wr, 0).bad_messages, 3);
}

/* What is in memory still comes; what has to be asked for does not. */
WR_CASE(p5_a_stopped_daemon_fails_a_load_long_before_its_deadline, strict_quick)
{
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	wr_end_t end;

	wr->timeout_ms = WR_PATIENCE;
	rig_signal(&wr->rig, SIGSTOP);
	for (uint32_t i = 0; i < 3; i++) {
		const uint64_t begin = wr_now_ms();
		const uint32_t flags = i < 2 ? both_kinds[i] : 0;

		wr->number = i < 2 ? i + 1 : 0;
		wr_message(wr);
		wr_add_space(wr, i + 1, i ? "adapter-b" : "adapter-a");
		wr_add_load(wr, lease, flags, 7, wr_other, 8);
		wr_begin(wr);
		wr_run_loads(wr);
		wr_wait_load(wr, flags, &end);
		assert_true(wr_now_ms() - begin < WR_QUICK_MS);
		assert_int_equal(end.loaded.status, i < 2 ? KVC_ERR_DAEMON_STALE : KVC_OK);
		assert_int_equal(end.error_count, i < 2 ? 8 : 0);
	}
	rig_signal(&wr->rig, SIGCONT);
	kvc_release(&lease, 1);
}

/* ---- no daemon ------------------------------------------------------------------------------- */

/* Nor is there a self-test, before which nothing is loaded. */
WR_CASE(p7_without_a_daemon_everything_fails_at_once, strict_alone)
{
	const uint64_t begin = wr_now_ms();
	wr_end_t end;

	for (uint32_t round = 0; round < 50; round++) {
		wr_message(wr);
		wr_add_save(wr, NULL, KVX_MSG_COMPLETE, wr_eight, 8);
		wr_add_fence(wr, wr_eight, 8);
		wr_begin(wr);
		wr_end(wr);
		assert_true(wr_wait_dropped(wr) == 9);
	}
	assert_int_equal(kvx_worker_self_test_status(wr->rank[0].worker), KVC_PENDING);
	for (uint32_t i = 0; i < 4; i++) {
		const uint32_t flags = both_kinds[i % 2];

		wr_message(wr);
		wr_add_load(wr, NULL, flags, 7, wr_other, 8);
		if (i >= 2) { /* a lease of a daemon that nobody knows */
			((kvx_msg_load_t *)(void *)(wr->message.data + wr->message.record))->flags = flags;
		}
		wr_begin(wr);
		wr_run_loads(wr);
		wr_wait_load(wr, flags, &end);
		assert_int_equal(end.loaded.status, i < 2 ? KVC_MISS : KVC_ERR_UNREACHABLE);
		assert_int_equal(end.error_count, 8);
	}
	assert_true(wr_now_ms() - begin < WR_QUICK_MS);
}

/* ---- time in which nothing happens ----------------------------------------------------------- */

static uint64_t cpu_ns(void)
{
	struct timespec time;

	(void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);

	return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void check_idle(const char *when)
{
	uint64_t before = cpu_ns(), used;

	usleep(IDLE_MS * 1000u);
	used = cpu_ns() - before;
	print_message("%s: %lu us of CPU in %u ms\n", when, (unsigned long)used / 1000u, IDLE_MS);
	assert_true(used < (uint64_t)IDLE_MS * 1000000u / 100u * IDLE_PC);
}

/* With a daemon, with one that hangs while a save waits for it, and without one. */
WR_CASE(p5_a_worker_that_waits_burns_no_cpu, unstored)
{
	kvc_put_t *put;

	usleep(IDLE_MS * 1000u);
	check_idle("idle");
	put = save_into_unopened_space(wr);
	check_idle("daemon stopped, a save waits");
	rig_signal(&wr->rig, SIGCONT);
	kvc_put_free(put);
	rig_kill(&wr->rig);
	usleep(IDLE_MS * 1000u);
	check_idle("no daemon");
}

/* ---- loads in pieces ------------------------------------------------------------------------- */

/* The last piece has failed at once; the engine may use the blocks when the one before it has ended, too. */
WR_CASE(p1_a_request_is_named_when_all_its_pieces_have_ended, wr_one)
{
	kvx_worker_t *worker = wr->rank[0].worker;
	kvc_lease_t *lease = wr_lease(wr, 0, 4);
	uint32_t len = 0;
	int failed = 0;
	char id[16];

	wr->request = "in pieces";
	wr_message(wr);
	wr_add_load(wr, lease, KVX_MSG_ASYNC | KVX_MSG_MORE, 7, wr_other, 4);
	wr_begin(wr); /* its copies may not begin yet */
	wr_message(wr);
	wr_add_load(wr, NULL, KVX_MSG_ASYNC, 8, wr_other + 4, 4);
	wr_begin(wr);
	assert_int_equal(wr_stats(wr, 0).loads_open, 2);
	assert_int_equal(kvx_worker_take_finished(worker, id, sizeof id, NULL), 0);

	wr_run_loads(wr);
	wr_end(wr);
	KV_AWAIT((len = kvx_worker_take_finished(worker, id, sizeof id, &failed)) > 0);
	assert_int_equal(len, strlen("in pieces"));
	assert_memory_equal(id, "in pieces", len);
	assert_true(failed);
	assert_int_equal(wr_count_failed(wr), 4);
	for (uint32_t i = 0; i < 4; i++) {
		assert_true(wr_block_is(&wr->rank[0], wr_other[i], 1, wr_eight[i]));
	}
	wr_drain(wr);
	assert_int_equal(kvx_worker_take_finished(worker, id, sizeof id, NULL), 0);
	kvc_release(&lease, 1);
}

/* ---- digests --------------------------------------------------------------------------------- */

/* Each layer's part of the cache, where it lies, asked by a thread that is not the engine's. */
static void *digest_layers(void *arg)
{
	const wr_rank_t *rank = arg;
	uint8_t digests[WR_LAYERS + 1][KVK_RANGE_DIGEST_BYTES], expected[WR_LAYERS + 1][KVK_RANGE_DIGEST_BYTES];
	kvk_range_t ranges[WR_LAYERS + 1] = {{0}};

	for (uint32_t i = 0; i < rank->layers; i++) {
		ranges[i] = (kvk_range_t){(uint64_t)(uintptr_t)rank->base[i] + i, (uint64_t)WR_BLOCKS * rank->page - i};
	}
	assert_int_equal(kvx_worker_digest(rank->worker, ranges, rank->layers + 1, digests), KVC_OK);
	assert_int_equal(kvx_digest_memory(ranges, rank->layers + 1, 1, expected), KVC_OK);
	assert_memory_equal(digests, expected, (rank->layers + 1) * sizeof digests[0]);

	return NULL;
}

WR_CASE(p1_a_digest_names_what_lies_in_memory, wr_alone)
{
	const kvk_range_t beyond = {UINT64_MAX - 1, 16};
	uint8_t digest[1][KVK_RANGE_DIGEST_BYTES];
	pthread_t thread;

	for (uint32_t seed = 1; seed < 3; seed++) {
		wr_fill(wr, seed);
		assert_int_equal(pthread_create(&thread, NULL, digest_layers, &wr->rank[0]), 0);
		wr_message(wr);
		wr_step(wr);
		assert_int_equal(pthread_join(thread, NULL), 0);
	}
	assert_int_equal(kvx_worker_digest(wr->rank[0].worker, &beyond, 1, digest), KVC_ERR_ARG);
	assert_true(strlen(kvx_worker_last_error()) > 10);
}

/* ---- tensor parallel degrees, pipeline stages ------------------------------------------------ */

#define BLOCK_BYTES(wr) ((uint64_t)(wr)->heads * WR_LAYERS * 32u * 32u * 4u)

static const wr_t four_heads[] = {
	{.heads = 4, .rank_count = 1}, {.heads = 4, .rank_count = 2}, {.heads = 4, .rank_count = 4}};
static const wr_t two_heads[] = {
	{.heads = 2, .rank_count = 1}, {.heads = 2, .rank_count = 2}, {.heads = 2, .rank_count = 4}};
static const wr_t latent[] = {{.heads = 1, .latent = 1, .rank_count = 1},
			      {.heads = 1, .latent = 1, .rank_count = 2},
			      {.heads = 1, .latent = 1, .rank_count = 4}};
static const wr_t staged[] = {{.heads = 2, .rank_count = 1, .stages = 1},
			      {.heads = 2, .rank_count = 2, .stages = 2},
			      {.heads = 2, .rank_count = 4, .stages = 2},
			      {.heads = 2, .rank_count = 4, .stages = 4}, /* of one, two, one and two layers */
			      {.heads = 1, .latent = 1, .rank_count = 4, .stages = 2}};

static void must_load_with(wr_t *wr, uint32_t ranks, uint32_t stages)
{
	kvc_lease_t *lease;
	wr_end_t end;

	wr->stages = stages;
	wr_set_ranks(wr, ranks);
	wr_fill(wr, 2);
	lease = wr_lease(wr, 0, 8);
	wr_load(wr, lease, 0, &end);
	wr_drain(wr);
	assert_int_equal(end.loaded.status, KVC_OK);
	for (uint32_t r = 0; r < ranks; r++) {
		for (uint32_t i = 0; i < 8; i++) {
			assert_true(wr_block_is(&wr->rank[r], wr_other[i], 1, wr_eight[i]));
		}
	}
	wr_revoke(wr, lease);
}

WR_CASE(p1_what_any_degree_has_saved_any_other_loads, four_heads[0])
{
	uint64_t saved = 0;

	for (uint32_t r = 0; r < wr->rank_count; r++) {
		saved += wr_stats(wr, r).save_bytes;
	}
	assert_int_equal(saved, 8 * BLOCK_BYTES(wr)); /* each byte once, of copies too */
	for (uint32_t count = 1; count <= WR_MAX_RANKS; count *= 2) {
		must_load_with(wr, count, 1);
	}
}
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, four_heads[1])
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, four_heads[2])
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, two_heads[0])
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, two_heads[1])
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, two_heads[2])
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, latent[0])
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, latent[1])
WR_ALSO(p1_what_any_degree_has_saved_any_other_loads, latent[2])

WR_CASE(p1_what_any_stages_have_saved_any_others_load, staged[0])
{
	const uint32_t count =
		wr->stages == 4 ? 1 : 3; /* a self-test's block is a rank's share; the pool has four slabs */

	for (uint32_t i = 0; i < count; i++) {
		must_load_with(wr, staged[i].rank_count, staged[i].stages);
	}
}
WR_ALSO(p1_what_any_stages_have_saved_any_others_load, staged[1])
WR_ALSO(p1_what_any_stages_have_saved_any_others_load, staged[2])
WR_ALSO(p1_what_any_stages_have_saved_any_others_load, staged[3])
WR_ALSO(p1_what_any_stages_have_saved_any_others_load, staged[4])

WR_MAIN
