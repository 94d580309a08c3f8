/* Dispatch and combine by the GPU's kernels, which the CPU runs thread by thread (lanes.h), against the twin, over each
 * kind of link: index, sums and bytes sent. Memory of the device stands for host memory that ranks share. */
#include "ep_case.h"
#include "ep_driver.h"

#include "ep/heap.h"

#define MOST_RANKS 4u
#define SLOTS      2u /* numbers in flight */

void lanes_launch_ep(const char *name, unsigned grid, unsigned threads, unsigned shared_bytes, const void *args);
void lanes_seed(uint64_t seed);
extern uint64_t lanes_clock;
extern void (*lanes_look_at_clock)(void);

static struct {
	kv_test_rng_t rng;
	kvk_ep_plan_t plan;
	kvk_cu_ptr_t heaps[MOST_RANKS];
	void *twin_heaps[MOST_RANKS];
	kvk_ep_link_t link;
	kvk_ep_link_kind_t kind;
	uint64_t pace;
	kvk_ep_gpu_t *eps[MOST_RANKS];
	kvk_ep_rank_t *twins[MOST_RANKS];
	ep_batch_t batches[SLOTS][MOST_RANKS];
	kvk_bf16_t *twin_out;
	kvk_bf16_t *outputs;
} w;

static uint32_t below(uint32_t n)
{
	return (uint32_t)kv_test_below(&w.rng, n);
}

static void open_group(const kvk_ep_shape_t *s, uint32_t sms, uint64_t timeout_us)
{
	kvk_gpu_t *gpu = ep_driver_open(&rig_, 9, lanes_launch_ep);
	const int beside = (int)below(2); /* packing and sums on a stream of compute */
	kvk_cu_stream_t compute;

	assert_int_equal(kvk_gpu_create_stream(gpu, 0, &compute), KV_OK);
	ep_driver_compute(compute);
	assert_int_equal(kvk_ep_plan(s, &w.plan, NULL), KV_OK);
	for (uint32_t r = 0; r < s->ranks; r++) {
		w.heaps[r] = gpu_rig_alloc(w.plan.heap_bytes);
		memset((void *)(uintptr_t)w.heaps[r], 0, w.plan.heap_bytes);
		w.twin_heaps[r] = ep_alloc(w.plan.heap_bytes);
	}
	w.link = kvk_ep_link_of(w.kind, w.twin_heaps);
	w.outputs = ep_alloc(w.plan.max_rows * w.plan.row_bytes);
	w.twin_out = ep_alloc(s->max_tokens * w.plan.row_bytes);
	for (uint32_t r = 0; r < s->ranks; r++) {
		const kvk_ep_gpu_config_t config = {.gpu = gpu,
						    .plan = &w.plan,
						    .heaps = w.heaps,
						    .rank = r,
						    .link = w.kind,
						    .pace = w.pace,
						    .sms = sms,
						    .wide = 1 + below(3),
						    .timeout_us = timeout_us,
						    .compute = beside ? compute : NULL};

		assert_int_equal(kvk_ep_gpu_open(&config, &w.eps[r]), KV_OK);
		assert_int_equal(kvk_ep_open(&kv_env_posix, &w.plan, r, w.twin_heaps[r], &w.link, &w.twins[r]), KV_OK);
		for (uint32_t slot = 0; slot < SLOTS; slot++) {
			ep_batch_open(&w.batches[slot][r], &w.plan);
		}
	}
}

static void close_group(void)
{
	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		kvk_ep_gpu_close(w.eps[r]);
		kvk_ep_close(w.twins[r]);
		gpu_rig_free(w.heaps[r]);
		free(w.twin_heaps[r]);
		for (uint32_t slot = 0; slot < SLOTS; slot++) {
			ep_batch_close(&w.batches[slot][r]);
		}
	}
	free(w.outputs);
	free(w.twin_out);
	gpu_rig_fini(&rig_);
}

/* ---- a number -------------------------------------------------------------------------------- */

static struct {
	uint32_t rank;
	uint32_t kind;
	uint64_t number;
} sending;

/* What is still to be copied was not announced to anybody. */
static void no_flag_is_up(void)
{
	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		const size_t at = kvk_ep_flag_at(&w.plan, sending.kind, sending.rank);

		assert_true(r == sending.rank || *(const uint64_t *)(uintptr_t)(w.heaps[r] + at) < sending.number);
	}
}

static void begin_sending(uint32_t rank, uint32_t kind, uint64_t number)
{
	sending.rank = rank;
	sending.kind = kind;
	sending.number = number;
	ep_driver_before_copy = no_flag_is_up;
}

static void combine_send(uint32_t r, uint64_t number)
{
	begin_sending(r, KVK_EP_COMBINE, number);
	assert_int_equal(kvk_ep_gpu_combine_send(w.eps[r], number, NULL), KV_OK);
	ep_driver_before_copy = NULL;
}

static void send_all(uint32_t slot, uint64_t number)
{
	const ep_routing_t routing = (ep_routing_t)below(EP_ROUTINGS);
	const uint32_t most = ep_draw_most(&w.plan, &w.rng);
	uint64_t sent, twin_sent;

	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		ep_batch_t *b = &w.batches[slot][r];

		ep_batch_draw(b, &w.plan, &w.rng, r, routing);
		ep_batch_bound(b, most);
		begin_sending(r, KVK_EP_DISPATCH, number);
		assert_int_equal(kvk_ep_gpu_dispatch_send(w.eps[r], &b->tokens, NULL, &sent), KV_OK);
		ep_driver_before_copy = NULL;
		assert_int_equal(kvk_ep_dispatch_send(w.twins[r], &b->tokens, &twin_sent), KV_OK);
		assert_true(sent == number && twin_sent == number);
	}
}

/* The index is the twin's; each makes its outputs from the rows that its own index names. */
static void receive_and_reduce(uint32_t r, uint64_t number)
{
	kvk_ep_gpu_rows_t gpu;
	kvk_ep_rows_t rows, seen;

	assert_int_equal(kvk_ep_gpu_dispatch_recv(w.eps[r], number, NULL, &gpu), KV_OK);
	assert_int_equal(kvk_ep_dispatch_recv(w.twins[r], number, 0, &rows), KV_OK);
	seen = (kvk_ep_rows_t){.n = rows.n,
			       .first = (const void *)(uintptr_t)gpu.first,
			       .record = (const void *)(uintptr_t)gpu.record,
			       .rows = (const void *)(uintptr_t)gpu.rows,
			       .own = (const void *)(uintptr_t)gpu.own,
			       .own_first = gpu.own_first};
	assert_memory_equal(seen.first, rows.first, (w.plan.rank_experts + 1u) * sizeof *rows.first);
	assert_memory_equal(seen.record, rows.record, rows.n * sizeof *rows.record);
	ep_run_experts(&w.plan, r, &rows, w.outputs);
	assert_int_equal(kvk_ep_combine_send(w.twins[r], number, w.outputs), KV_OK);
	memset(w.outputs, 0xee, w.plan.max_rows * w.plan.row_bytes);
	ep_run_experts(&w.plan, r, &seen, w.outputs);
	assert_int_equal(kvk_ep_gpu_reduce(w.eps[r], number, (uintptr_t)w.outputs, NULL), KV_OK);
}

static void take_sums(uint32_t slot, uint64_t number)
{
	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		const ep_batch_t *b = &w.batches[slot][r];

		assert_int_equal(kvk_ep_gpu_combine_recv(w.eps[r], number, (uintptr_t)b->out, NULL), KV_OK);
		assert_int_equal(kvk_ep_combine_recv(w.twins[r], number, 0, w.twin_out), KV_OK);
		assert_memory_equal(b->out, w.twin_out, b->tokens.n * w.plan.row_bytes);
	}
}

static void end_number(uint32_t slot, uint64_t number)
{
	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		receive_and_reduce(r, number);
		combine_send(r, number);
	}
	take_sums(slot, number);
}

/* Of rows that stayed where they are there is no byte, neither counted nor moved. */
static void compare_bytes(uint32_t r, uint64_t *p_moved)
{
	const size_t bytes = w.plan.shape.max_tokens * w.plan.row_bytes;
	const kvk_ep_stats_t stats = kvk_ep_get_stats(w.twins[r]);
	kvk_ep_gpu_report_t report;

	assert_int_equal(kvk_ep_gpu_check(w.eps[r], &report), KV_OK);
	assert_int_equal(report.stats.dispatch_bytes, stats.dispatch_bytes);
	assert_int_equal(report.stats.combine_bytes, stats.combine_bytes);
	assert_int_equal(report.stats.dispatch_padding, stats.dispatch_padding);
	assert_int_equal(report.stats.combine_padding, stats.combine_padding);
	*p_moved += stats.dispatch_bytes + stats.combine_bytes + stats.dispatch_padding + stats.combine_padding;
	assert_true(report.lost == 0 && report.refused == 0);
	for (uint32_t slot = 0; slot < w.plan.shape.in_flight; slot++) {
		const uint8_t *own = (const uint8_t *)(uintptr_t)w.heaps[r] +
				     kvk_ep_row_at(&w.plan, slot, r * w.plan.shape.max_tokens);

		assert_true(own[0] == 0 && memcmp(own, own + 1, bytes - 1) == 0);
	}
}

/* Four numbers, two of them at a time. */
static void check_group(const kvk_ep_shape_t *s)
{
	uint64_t moved = 0;

	open_group(s, 1 + below(5), 0);
	for (uint64_t first = 1; first <= 4; first += SLOTS) {
		for (uint32_t slot = 0; slot < SLOTS; slot++) {
			send_all(slot, first + slot);
		}
		for (uint32_t slot = 0; slot < SLOTS; slot++) {
			end_number(slot, first + slot);
		}
	}
	for (uint32_t r = 0; r < s->ranks; r++) {
		compare_bytes(r, &moved);
	}
	/* The copy engine moves all of it out of a rank and into another one, or nothing. */
	assert_int_equal(ep_driver_copied(), w.kind == KVK_EP_HOST_COPIES ? 2 * moved : 0);
	close_group();
}

KV_TEST(p1_the_kernels_make_what_the_twin_makes)
{
	w.rng.state = kv_test_seed();
	lanes_seed(kv_test_seed());
	for (uint32_t i = 0; i < 12; i++) {
		const int many = i % 3 == 2; /* records of a warp, tokens of a block, experts of a rank */
		kvk_ep_shape_t s = {
			.ranks = 1u << i / 4, .in_flight = 2 + below(2), .max_tokens = 1 + below(many ? 700 : 50)};

		s.groups = s.ranks << below(2);
		s.experts = s.groups * (many ? 33 + below(40) : 1 + below(8));
		s.top_k = 1 + below(s.experts < 16 ? s.experts : 16);
		s.hidden = i % 4 == 3 ? 328 : 8 * (1 + below(8));
		w.kind = (kvk_ep_link_kind_t)((i / 3 + i) % 3);
		check_group(&s);
	}
	w.kind = KVK_EP_PEER;
	w.pace = 0;
}

/* Both numbers of the slots are reduced before the first is sent: neither finds the other one's rows. */
static void reduce_then_send(uint64_t first)
{
	for (uint32_t slot = 0; slot < SLOTS; slot++) {
		send_all(slot, first + slot);
	}
	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		for (uint32_t slot = 0; slot < SLOTS; slot++) {
			receive_and_reduce(r, first + slot);
		}
		for (uint32_t slot = 0; slot < SLOTS; slot++) {
			combine_send(r, first + slot);
		}
	}
	for (uint32_t slot = 0; slot < SLOTS; slot++) {
		take_sums(slot, first + slot);
	}
}

KV_TEST(p1_a_number_is_reduced_while_the_one_before_waits_to_be_sent)
{
	const kvk_ep_shape_t s = {2, 16, 3, 64, 20, 4, SLOTS};

	w.rng.state = kv_test_seed();
	lanes_seed(kv_test_seed());
	for (int kind = KVK_EP_PEER; kind <= KVK_EP_HOST_KERNELS; kind++) {
		uint64_t moved = 0;

		w.kind = (kvk_ep_link_kind_t)kind;
		open_group(&s, 2, 0);
		for (uint64_t first = 1; first <= 6; first += SLOTS) {
			reduce_then_send(first);
		}
		for (uint32_t r = 0; r < s.ranks; r++) {
			compare_bytes(r, &moved);
		}
		assert_true(moved > 0);
		close_group();
	}
	w.kind = KVK_EP_PEER;
}

/* Copies large enough that what has come is used while the rest is on its way. */
KV_TEST(p1_copies_in_pieces_make_what_the_twin_makes)
{
	w.rng.state = kv_test_seed();
	lanes_seed(kv_test_seed());
	w.kind = KVK_EP_HOST_COPIES;
	for (uint32_t i = 0; i < 3; i++) {
		const uint32_t ranks = i == 2 ? 4 : 2;
		const kvk_ep_shape_t s = {ranks, 16, 1 + below(4), 4096, 70 + below(60), ranks << below(2), 2};

		check_group(&s);
	}
	w.kind = KVK_EP_PEER;
}

/* One block, all tokens for the other rank: each warp's stores are as far apart as the pace has it. */
KV_TEST(p5_stores_to_host_memory_keep_their_pace)
{
	const kvk_ep_shape_t s = {2, 8, 1, 2048, 64, 2, 2};
	const uint32_t rows = 64;

	w.rng.state = kv_test_seed();
	for (int i = 0; i < 4; i++) {
		const int is_paced = i == 3; /* over the other link, and without a pace, none looks at the clock */
		ep_batch_t *b = &w.batches[0][0];
		uint64_t number, start;

		w.kind = i > 1 ? KVK_EP_HOST_KERNELS : KVK_EP_PEER;
		w.pace = i % 2 ? UINT64_C(2000000) : 0;
		open_group(&s, 1, 0);
		do {
			ep_batch_draw(b, &w.plan, &w.rng, 0, EP_RANDOM);
		} while (b->tokens.n != rows);
		for (uint32_t t = 0; t < rows; t++) {
			b->experts[t] = 4 + t % 4;
		}
		start = lanes_clock;
		assert_int_equal(kvk_ep_gpu_dispatch_send(w.eps[0], &b->tokens, NULL, &number), KV_OK);
		if (is_paced) { /* the first store of each warp waits for nothing */
			assert_true(lanes_clock - start >= (rows - 8) * 4096 * UINT64_C(1000000000) / w.pace);
		} else {
			assert_int_equal(lanes_clock, start);
		}
		close_group();
	}
	w.kind = KVK_EP_PEER;
	w.pace = 0;
}

/* ---- what goes wrong ------------------------------------------------------------------------- */

KV_TEST_BETWEEN(p10_an_expert_that_there_is_not_is_counted, (void)0, close_group())
{
	const kvk_ep_shape_t s = {2, 6, 2, 16, 8, 2, 2};
	kvk_ep_gpu_report_t report;
	kvk_ep_gpu_rows_t rows;
	uint64_t number;

	w.rng.state = kv_test_seed();
	open_group(&s, 2, 0);
	for (uint32_t r = 0; r < 2; r++) {
		ep_batch_t *b = &w.batches[0][r];

		do {
			ep_batch_draw(b, &w.plan, &w.rng, r, EP_RANDOM);
		} while (b->tokens.n < 2);
		b->experts[1] = 6;
		b->experts[2] = KVK_EP_NO_EXPERT - 1;
		b->experts[3] = KVK_EP_NO_EXPERT;
		assert_int_equal(kvk_ep_gpu_dispatch_send(w.eps[r], &b->tokens, NULL, &number), KV_OK);
	}
	for (uint32_t r = 0; r < 2; r++) {
		assert_int_equal(kvk_ep_gpu_dispatch_recv(w.eps[r], 1, NULL, &rows), KV_OK);
		assert_int_equal(kvk_ep_gpu_check(w.eps[r], &report), KV_ERR_ARG);
		assert_int_equal(report.refused, 2);
		assert_int_equal(report.lost, 0);
	}
}

/* The rank that does not come is named, and what comes later is void, and ends. */
static void lose_rank(kvk_ep_link_kind_t kind)
{
	const kvk_ep_shape_t s = {4, 8, 2, 16, 8, 4, 2};
	kvk_ep_gpu_report_t report;
	kvk_ep_gpu_rows_t rows;
	uint64_t number, launches, start;

	w.kind = kind;
	open_group(&s, 2, 1000);
	for (uint32_t r = 0; r < 3; r++) {
		ep_batch_draw(&w.batches[0][r], &w.plan, &w.rng, r, EP_RANDOM);
		assert_int_equal(kvk_ep_gpu_dispatch_send(w.eps[r], &w.batches[0][r].tokens, NULL, &number), KV_OK);
	}
	for (uint32_t r = 0; r < 3; r++) {
		start = lanes_clock;
		assert_int_equal(kvk_ep_gpu_dispatch_recv(w.eps[r], 1, NULL, &rows), KV_OK);
		assert_int_equal(lanes_clock - start > 1000000, r == 0); /* the others are told */
		assert_int_equal(kvk_ep_gpu_check(w.eps[r], &report), KV_ERR_TIMEOUT);
		assert_int_equal(report.lost, 1u << 3);
	}
	launches = ep_driver_launches();
	assert_int_equal(kvk_ep_gpu_reduce(w.eps[0], 1, (uintptr_t)w.outputs, NULL), KV_OK);
	assert_int_equal(kvk_ep_gpu_combine_send(w.eps[0], 1, NULL), KV_OK);
	assert_int_equal(kvk_ep_gpu_combine_recv(w.eps[0], 1, (uintptr_t)w.batches[0][0].out, NULL), KV_OK);
	assert_int_equal(ep_driver_launches(), launches + 4 + (kind == KVK_EP_HOST_KERNELS));
	assert_int_equal(kvk_ep_gpu_check(w.eps[0], &report), KV_ERR_TIMEOUT);
	assert_int_equal(report.lost, 1u << 3);
	assert_int_equal(report.stats.combine_bytes + report.stats.combine_padding, 0);
	close_group();
	w.kind = KVK_EP_PEER;
}

KV_TEST(p6_a_rank_that_never_sends_is_named_by_the_others)
{
	w.rng.state = kv_test_seed();
	lose_rank(KVK_EP_PEER);
	lose_rank(KVK_EP_HOST_COPIES);
	lose_rank(KVK_EP_HOST_KERNELS);
}

static uint32_t looks;

/* The last of the waiting lanes, before it knows what time it is: an hour passes, and the other rank comes. */
static void stand_still(void)
{
	if (++looks == 64) {
		lanes_clock += UINT64_C(3600000000000);
		*(uint64_t *)(uintptr_t)(w.heaps[0] + kvk_ep_flag_at(&w.plan, KVK_EP_DISPATCH, 1)) = 1;
	}
}

KV_TEST_BETWEEN(p6_a_rank_that_stood_still_names_nobody_who_has_come, (void)0, close_group())
{
	const kvk_ep_shape_t s = {2, 6, 2, 16, 8, 2, 2};
	kvk_ep_gpu_report_t report;
	kvk_ep_gpu_rows_t rows;
	uint64_t number;

	w.rng.state = kv_test_seed();
	open_group(&s, 2, 1000);
	ep_batch_draw(&w.batches[0][0], &w.plan, &w.rng, 0, EP_RANDOM);
	assert_int_equal(kvk_ep_gpu_dispatch_send(w.eps[0], &w.batches[0][0].tokens, NULL, &number), KV_OK);
	looks = 0;
	lanes_look_at_clock = stand_still;
	assert_int_equal(kvk_ep_gpu_dispatch_recv(w.eps[0], 1, NULL, &rows), KV_OK);
	lanes_look_at_clock = NULL;
	assert_true(looks >= 64);
	assert_int_equal(kvk_ep_gpu_check(w.eps[0], &report), KV_OK);
	assert_int_equal(report.lost, 0);
}
