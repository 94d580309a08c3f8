/* The host's side of dispatch and combine on a GPU: what it refuses, and what a driver that fails leaves. */
#include "ep_driver.h"

static kvk_ep_shape_t shape = {2, 8, 2, 16, 8, 4, 2};
static kvk_ep_plan_t plan;
static kvk_cu_ptr_t heaps[2];
static kvk_ep_gpu_config_t config;

static void start(int major)
{
	const char *why = NULL;

	assert_int_equal(kvk_ep_plan(&shape, &plan, &why), KV_OK);
	config = (kvk_ep_gpu_config_t){.gpu = ep_driver_open(&rig_, major, NULL), .plan = &plan, .heaps = heaps};
	for (int r = 0; r < 2; r++) {
		heaps[r] = gpu_rig_alloc(plan.heap_bytes);
		memset((void *)(uintptr_t)heaps[r], 0, plan.heap_bytes);
	}
}

static void end_test(void)
{
	for (int r = 0; r < 2; r++) {
		gpu_rig_free(heaps[r]);
	}
	gpu_rig_fini(&rig_);
}

#define EP_TEST(name) KV_TEST_BETWEEN(name, (void)0, end_test())

static void refuse(kv_status_t status, const char *why)
{
	kvk_ep_gpu_t *ep = NULL;

	assert_int_equal(kvk_ep_gpu_open(&config, &ep), status);
	assert_null(ep);
	if (!strstr(kvk_gpu_last_error(), why)) {
		fail_msg("%s", kvk_gpu_last_error());
	}
}

EP_TEST(p10_without_kernels_ranks_are_not_supported)
{
	start(9);
	ep_driver_has_kernels = 0;
	refuse(KV_ERR_UNSUPPORTED, "this build has no GPU kernels");
}

EP_TEST(p10_a_device_without_bulk_copies_is_not_supported)
{
	start(8);
	refuse(KV_ERR_UNSUPPORTED, "has no bulk copies");
}

EP_TEST(p10_rows_too_large_for_a_block_are_not_supported)
{
	const kvk_ep_shape_t large = {2, 8, 2, KVK_EP_MAX_HIDDEN, 8, 2, 1};
	kvk_ep_plan_t large_plan;

	start(9);
	assert_int_equal(kvk_ep_plan(&large, &large_plan, NULL), KV_OK);
	large_plan.row_bytes = 201u << 10;
	config.plan = &large_plan;
	refuse(KV_ERR_UNSUPPORTED, "205824 bytes, 8 tokens and 4 experts");
}

EP_TEST(p10_a_rank_that_the_plan_lacks_is_refused)
{
	start(9);
	config.rank = 2;
	refuse(KV_ERR_ARG, "no rank 2");
	config.rank = 1;
	config.link = (kvk_ep_link_kind_t)3;
	refuse(KV_ERR_ARG, "no link 3");
}

/* Each call of the driver in turn, until none is left. How many there are. */
static uint64_t refuse_each_call(void)
{
	fake_cuda_live_t before = fake_cuda_live(), now;
	uint64_t refused = 0;
	int failed = 1;

	kv_test_fail_nth(&rig_.t, 1);
	refuse(KV_ERR_NOMEM, "out of memory");
	for (uint64_t n = 1; failed; n++) {
		kvk_ep_gpu_t *ep = NULL;
		kv_status_t status;

		fake_cuda_fail_nth(n);
		status = kvk_ep_gpu_open(&config, &ep);
		failed = fake_cuda_failed();
		fake_cuda_fail_nth(0);
		if (status != KV_OK) {
			assert_int_equal(status, KV_ERR_IO);
			assert_null(ep);
			assert_non_null(strstr(kvk_gpu_last_error(), "answered CUDA_ERROR_UNKNOWN"));
			refused++;
		}
		kvk_ep_gpu_close(ep);
		now = fake_cuda_live();
		assert_memory_equal(&now, &before, sizeof before);
	}

	return refused;
}

EP_TEST(p6_a_rank_that_cannot_be_opened_leaves_nothing)
{
	start(9);
	/* context, module, 10 kernels, shared memory of 8, memory, zeroed, waited for, pinned memory, stream */
	assert_int_equal(refuse_each_call(), 25);
	config.link = KVK_EP_HOST_COPIES;
	assert_int_equal(refuse_each_call(), 25 + 2 * 2); /* a stream and an event a slot */
}

EP_TEST(p10_halves_out_of_order_are_refused_and_launch_nothing)
{
	static const kvk_ep_tokens_t some = {.n = 1};
	static const kvk_ep_tokens_t many[] = {{.n = 9}, {.n = 9, .most = 9}, {.n = 1, .most = 9}, {.n = 4, .most = 3}};
	kvk_ep_gpu_rows_t rows;
	kvk_ep_gpu_t *ep;
	uint64_t number = 0, launches;

	start(9);
	assert_int_equal(kvk_ep_gpu_open(&config, &ep), KV_OK);
	for (size_t i = 0; i < KV_COUNT_OF(many); i++) {
		assert_int_equal(kvk_ep_gpu_dispatch_send(ep, &many[i], NULL, &number), KV_ERR_ARG);
	}
	assert_int_equal(kvk_ep_gpu_dispatch_recv(ep, 1, NULL, &rows), KV_ERR_ARG);
	assert_int_equal(ep_driver_launches(), 0);
	for (uint64_t n = 1; n <= 2; n++) {
		assert_int_equal(kvk_ep_gpu_dispatch_send(ep, &some, NULL, &number), KV_OK);
		assert_int_equal(number, n);
	}
	launches = ep_driver_launches();
	assert_int_equal(launches, 4);
	assert_int_equal(kvk_ep_gpu_dispatch_send(ep, &some, NULL, &number), KV_ERR_BUSY);
	assert_int_equal(kvk_ep_gpu_dispatch_recv(ep, 2, NULL, &rows), KV_ERR_ARG);
	assert_int_equal(kvk_ep_gpu_reduce(ep, 1, 0, NULL), KV_ERR_ARG);
	assert_int_equal(ep_driver_launches(), launches);
	for (uint64_t n = 1; n <= 2; n++) {
		assert_int_equal(kvk_ep_gpu_dispatch_recv(ep, n, NULL, &rows), KV_OK);
	}
	launches = ep_driver_launches();
	assert_int_equal(kvk_ep_gpu_combine_send(ep, 1, NULL), KV_ERR_ARG); /* not reduced */
	assert_int_equal(kvk_ep_gpu_reduce(ep, 2, 0, NULL), KV_ERR_ARG);
	assert_int_equal(ep_driver_launches(), launches);
	assert_int_equal(kvk_ep_gpu_reduce(ep, 1, 0, NULL), KV_OK);
	assert_int_equal(kvk_ep_gpu_combine_recv(ep, 1, 0, NULL), KV_ERR_ARG);
	assert_int_equal(kvk_ep_gpu_reduce(ep, 1, 0, NULL), KV_ERR_ARG);
	assert_int_equal(kvk_ep_gpu_combine_send(ep, 2, NULL), KV_ERR_ARG);
	assert_int_equal(ep_driver_launches(), launches + 1);
	assert_int_equal(kvk_ep_gpu_combine_send(ep, 1, NULL), KV_OK);
	assert_int_equal(kvk_ep_gpu_combine_send(ep, 1, NULL), KV_ERR_ARG);
	assert_int_equal(kvk_ep_gpu_combine_recv(ep, 1, 0, NULL), KV_OK);
	assert_int_equal(kvk_ep_gpu_combine_recv(ep, 1, 0, NULL), KV_ERR_ARG);
	assert_int_equal(kvk_ep_gpu_dispatch_send(ep, &some, NULL, &number), KV_OK);
	assert_int_equal(number, 3);
	kvk_ep_gpu_close(ep);
}

/* In a stream's order: a flag goes behind the rows that it announces, and rows are fetched behind the wait for it. */
EP_TEST(p1_each_link_has_flags_behind_its_rows_and_fetches_behind_its_flags)
{
	static const char *const expected[][5] = {
		{"route push", "wait count place", "reduce", "return", "wait sum"},
		{"route push copy copy flag", "wait copy copy count place", "reduce", "copy flag", "wait copy sum"},
		{"route push", "wait pull count place", "reduce", "return", "wait pull sum"},
	};
	static const kvk_ep_tokens_t some = {.n = 1};
	kvk_ep_gpu_rows_t rows;
	uint64_t number;

	start(9);
	for (size_t link = 0; link < KV_COUNT_OF(expected); link++) {
		kvk_ep_gpu_t *ep;

		config.link = (kvk_ep_link_kind_t)link;
		assert_int_equal(kvk_ep_gpu_open(&config, &ep), KV_OK);
		assert_int_equal(kvk_ep_gpu_dispatch_send(ep, &some, NULL, &number), KV_OK);
		assert_string_equal(ep_driver_trace(), expected[link][0]);
		assert_int_equal(kvk_ep_gpu_dispatch_recv(ep, 1, NULL, &rows), KV_OK);
		assert_string_equal(ep_driver_trace(), expected[link][1]);
		assert_int_equal(kvk_ep_gpu_reduce(ep, 1, 0, NULL), KV_OK);
		assert_string_equal(ep_driver_trace(), expected[link][2]);
		assert_int_equal(kvk_ep_gpu_combine_send(ep, 1, NULL), KV_OK);
		assert_string_equal(ep_driver_trace(), expected[link][3]);
		assert_int_equal(kvk_ep_gpu_combine_recv(ep, 1, 0, NULL), KV_OK);
		assert_string_equal(ep_driver_trace(), expected[link][4]);
		kvk_ep_gpu_close(ep);
	}
}

/* Kernels that want all SMs run on the caller's stream of compute: what they make is waited for, and what they use. */
EP_TEST(p1_copies_pack_and_sum_on_the_stream_of_compute)
{
	static const kvk_ep_tokens_t some = {.n = 1};
	kvk_ep_gpu_rows_t rows;
	kvk_ep_gpu_t *ep;
	uint64_t number;

	start(9);
	config.link = KVK_EP_HOST_COPIES;
	assert_int_equal(kvk_gpu_create_stream(config.gpu, 0, &config.compute), KV_OK);
	ep_driver_compute(config.compute);
	assert_int_equal(kvk_ep_gpu_open(&config, &ep), KV_OK);
	assert_int_equal(kvk_ep_gpu_dispatch_send(ep, &some, NULL, &number), KV_OK);
	assert_string_equal(ep_driver_trace(), "route push behind compute copy copy flag");
	assert_int_equal(kvk_ep_gpu_dispatch_recv(ep, 1, NULL, &rows), KV_OK);
	(void)ep_driver_trace();
	assert_int_equal(kvk_ep_gpu_reduce(ep, 1, 0, config.compute), KV_OK);
	assert_int_equal(kvk_ep_gpu_combine_send(ep, 1, NULL), KV_OK);
	(void)ep_driver_trace();
	assert_int_equal(kvk_ep_gpu_combine_recv(ep, 1, 0, NULL), KV_OK);
	assert_string_equal(ep_driver_trace(), "wait copy compute behind sum");
	kvk_ep_gpu_close(ep);
	config.compute = NULL;
}

/* Two groups a rank, and room for 128 tokens: a piece is 256 KiB, 64 rows. */
EP_TEST(p1_copies_of_a_receive_run_beside_what_uses_them_and_are_of_the_most_tokens)
{
	static const struct {
		kvk_ep_tokens_t tokens;
		uint32_t most;
		const char *trace[4]; /* dispatch sent and received, combine sent and received */
	} cases[] = {
		{{.n = 1},
		 128,
		 {"route push copy copy flag", "wait fork +copy join +copy count place join", "copy flag",
		  "wait fork +copy +copy join sum +copy +copy join sum +copy +copy join sum +copy +copy join sum"}},
		{{.n = 1, .most = 64},
		 64,
		 {"route push copy copy flag", "wait copy copy count place", "copy copy flag",
		  "wait fork +copy +copy join sum +copy +copy join sum"}},
		{{.n = 0, .most = 1},
		 1,
		 {"route push copy copy flag", "wait copy copy count place", "copy copy flag", "wait copy copy sum"}},
	};
	kvk_ep_gpu_rows_t rows;
	kvk_ep_gpu_t *ep;
	uint64_t number;

	shape = (kvk_ep_shape_t){2, 8, 2, 2048, 128, 4, 2};
	start(9);
	config.link = KVK_EP_HOST_COPIES;
	assert_int_equal(kvk_ep_gpu_open(&config, &ep), KV_OK);
	for (uint64_t n = 1; n <= 2 * KV_COUNT_OF(cases); n++) { /* each in both slots */
		const size_t i = (n - 1) % KV_COUNT_OF(cases);
		const uint64_t before = ep_driver_copied();

		assert_int_equal(kvk_ep_gpu_dispatch_send(ep, &cases[i].tokens, NULL, &number), KV_OK);
		assert_string_equal(ep_driver_trace(), cases[i].trace[0]);
		assert_int_equal(kvk_ep_gpu_dispatch_recv(ep, n, NULL, &rows), KV_OK);
		assert_string_equal(ep_driver_trace(), cases[i].trace[1]);
		assert_int_equal(kvk_ep_gpu_reduce(ep, n, 0, NULL), KV_OK);
		assert_string_equal(ep_driver_trace(), "reduce");
		assert_int_equal(kvk_ep_gpu_combine_send(ep, n, NULL), KV_OK);
		assert_string_equal(ep_driver_trace(), cases[i].trace[2]);
		assert_int_equal(kvk_ep_gpu_combine_recv(ep, n, 0, NULL), KV_OK);
		assert_string_equal(ep_driver_trace(), cases[i].trace[3]);
		assert_int_equal(ep_driver_copied() - before,
				 2 * cases[i].most * (plan.record_bytes + 2 * plan.row_bytes));
	}
	kvk_ep_gpu_close(ep);
	shape = (kvk_ep_shape_t){2, 8, 2, 16, 8, 4, 2};
}
