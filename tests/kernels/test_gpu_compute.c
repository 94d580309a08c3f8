/* Memory, copies and events for a program that computes on a device (kvk/compute.h), over a driver that runs streams as
 * late as it may, and one that refuses. */
#include "gpu_rig.h"

#include "fake_cuda_internal.h"

#include "kvk/compute.h"

#define BYTES 4096u
#define MOST  200u /* calls of the driver */

/* The device has one address for pinned memory, that of the host: the fake's own is for what may take none but it. */
static kvk_cu_ptr_t unify(kvk_cu_ptr_t at)
{
	return fake_range_of(at, FAKE_PINNED) ? at | FAKE_TAG : at;
}

static int copy_unified(kvk_cu_ptr_t dst, kvk_cu_ptr_t src, size_t bytes, kvk_cu_stream_t stream)
{
	return fake_cuda_ops()->copy_async(unify(dst), unify(src), bytes, stream);
}

static void start(uint64_t seed)
{
	static kvk_cuda_ops_t ops;

	gpu_rig_init(&rig_, &(fake_cuda_config_t){.seed = seed, .lazy = 1, .major = 9});
	ops = *fake_cuda_ops();
	ops.copy_async = copy_unified;
	rig_.config.cuda = &ops;
}

static int is_zero(const void *at, size_t bytes)
{
	const uint8_t *p = at;

	return p[0] == 0 && memcmp(p, p + 1, bytes - 1) == 0;
}

GPU_TEST(p4_memory_is_zero_when_it_is_given)
{
	static const size_t sizes[] = {1, 255, 256, BYTES, 100000};
	void *memory[KV_COUNT_OF(sizes)], *host;
	kvk_gpu_t *gpu;

	start(1);
	gpu = gpu_rig_open(&rig_);
	assert_true(kvk_gpu_sms(gpu) > 0);
	for (size_t i = 0; i < KV_COUNT_OF(sizes); i++) {
		assert_int_equal(kvk_gpu_alloc(gpu, sizes[i], &memory[i]), KV_OK);
		assert_int_equal((uintptr_t)memory[i] % 256, 0);
		assert_true(is_zero(memory[i], sizes[i])); /* the fake's memory is the host's, and dirty at first */
		memset(memory[i], 0x5a, sizes[i]);
	}
	for (size_t i = 0; i < KV_COUNT_OF(sizes); i++) {
		kvk_gpu_free(gpu, memory[i]);
	}
	assert_int_equal(kvk_gpu_alloc_host(gpu, BYTES, &host), KV_OK);
	assert_true(is_zero(host, BYTES));
	kvk_gpu_free_host(gpu, host);
	kvk_gpu_free(gpu, NULL);
	kvk_gpu_free_host(gpu, NULL);
	kvk_gpu_event_destroy(gpu, NULL);
}

GPU_TEST(p10_what_the_device_has_not_room_for_is_refused)
{
	kvk_gpu_t *gpu;
	void *memory = &rig_;

	start(1);
	gpu = gpu_rig_open(&rig_);
	fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, mem_alloc), 2);
	assert_int_equal(kvk_gpu_alloc(gpu, BYTES, &memory), KV_ERR_NOMEM);
	assert_null(memory);
	fake_cuda_fail_always(0, 0);
	fake_cuda_limit_pinned(BYTES);
	assert_int_equal(kvk_gpu_alloc_host(gpu, BYTES + 1, &memory), KV_ERR_NOMEM);
	assert_null(memory);
}

/* ---- a program ------------------------------------------------------------------------------- */

/* What a program has: host memory, memory of the device that another stream copies on from, events. */
typedef struct program {
	kvk_gpu_t *gpu;
	kvk_cu_stream_t streams[2];
	uint8_t *in, *out; /* pinned */
	void *near, *far;  /* of the device */
	kvk_cu_event_t begin, copied;
} program_t;

static kv_status_t open_program(program_t *p)
{
	const kv_status_t results[] = {
		kvk_gpu_create_stream(p->gpu, 0, &p->streams[0]),
		kvk_gpu_create_stream(p->gpu, 1, &p->streams[1]),
		kvk_gpu_alloc_host(p->gpu, BYTES, (void **)&p->in),
		kvk_gpu_alloc_host(p->gpu, BYTES, (void **)&p->out),
		kvk_gpu_alloc(p->gpu, BYTES, &p->near),
		kvk_gpu_alloc(p->gpu, BYTES, &p->far),
		kvk_gpu_event_create(p->gpu, 1, &p->begin),
		kvk_gpu_event_create(p->gpu, 1, &p->copied),
	};
	kv_status_t status = KV_OK;

	for (size_t i = 0; i < KV_COUNT_OF(results); i++) {
		status = status == KV_OK ? results[i] : status;
	}

	return status;
}

static void close_program(program_t *p)
{
	kvk_gpu_event_destroy(p->gpu, p->copied);
	kvk_gpu_event_destroy(p->gpu, p->begin);
	kvk_gpu_free(p->gpu, p->far);
	kvk_gpu_free(p->gpu, p->near);
	kvk_gpu_free_host(p->gpu, p->out);
	kvk_gpu_free_host(p->gpu, p->in);
}

/* In on one stream, on to other memory and out on the other, which waits for the event. *p_ms: from its begin. */
static kv_status_t run_program(program_t *p, float *p_ms)
{
	kvk_gpu_t *gpu = p->gpu;
	kv_status_t status = kvk_gpu_event_record(gpu, p->begin, p->streams[0]);

	if (status == KV_OK) {
		status = kvk_gpu_copy_bytes(gpu, p->near, p->in, BYTES, p->streams[0]);
	}
	if (status == KV_OK) {
		status = kvk_gpu_event_record(gpu, p->copied, p->streams[0]);
	}
	if (status == KV_OK) {
		status = kvk_gpu_event_await(gpu, p->copied, p->streams[1]);
	}
	if (status == KV_OK) {
		status = kvk_gpu_copy_bytes(gpu, p->far, p->near, BYTES, p->streams[1]);
	}
	if (status == KV_OK) {
		status = kvk_gpu_copy_bytes(gpu, p->out, p->far, BYTES, p->streams[1]);
	}
	if (status == KV_OK) {
		status = kvk_gpu_sync_stream(gpu, p->streams[1]);
	}

	return status == KV_OK ? kvk_gpu_event_elapsed(gpu, p->begin, p->copied, p_ms) : status;
}

static void fill(program_t *p, uint64_t seed)
{
	kv_test_rng_t rng = {seed};

	kv_test_fill(&rng, p->in, BYTES);
	memset(p->out, 0, BYTES);
}

/* Streams run some steps at a time, in any order. */
KV_TEST(p1_what_follows_an_event_on_another_stream_finds_what_came_before)
{
	for (uint64_t seed = 1; seed <= 40; seed++) {
		program_t p = {.gpu = NULL};
		float ms = -1;

		start(seed);
		p.gpu = gpu_rig_open(&rig_);
		assert_int_equal(open_program(&p), KV_OK);
		fake_cuda_costs(1000, 0); /* a microsecond a byte */
		fill(&p, seed);
		assert_int_equal(run_program(&p, &ms), KV_OK);
		assert_memory_equal(p.out, p.in, BYTES);
		assert_true(ms >= (float)BYTES / 1000 && ms < 4 * (float)BYTES / 1000);
		close_program(&p);
		gpu_rig_fini(&rig_);
	}
}

GPU_TEST(p1_nothing_is_copied_before_the_event_that_a_stream_awaits)
{
	program_t p = {.gpu = NULL};

	start(3);
	p.gpu = gpu_rig_open(&rig_);
	assert_int_equal(open_program(&p), KV_OK);
	fill(&p, 3);
	fake_cuda_stall(p.streams[0], 1);
	assert_int_equal(kvk_gpu_copy_bytes(p.gpu, p.near, p.in, BYTES, p.streams[0]), KV_OK);
	assert_int_equal(kvk_gpu_event_record(p.gpu, p.copied, p.streams[0]), KV_OK);
	assert_int_equal(kvk_gpu_event_await(p.gpu, p.copied, p.streams[1]), KV_OK);
	assert_int_equal(kvk_gpu_copy_bytes(p.gpu, p.out, p.near, BYTES, p.streams[1]), KV_OK);
	fake_cuda_drain();
	assert_true(is_zero(p.out, BYTES));
	fake_cuda_stall(p.streams[0], 0);
	assert_int_equal(kvk_gpu_sync_stream(p.gpu, p.streams[1]), KV_OK);
	assert_memory_equal(p.out, p.in, BYTES);
	close_program(&p);
}

GPU_TEST(p10_the_time_between_events_that_have_not_come_is_refused)
{
	program_t p = {.gpu = NULL};
	float ms;

	start(4);
	p.gpu = gpu_rig_open(&rig_);
	assert_int_equal(open_program(&p), KV_OK);
	fake_cuda_stall(p.streams[0], 1);
	assert_int_equal(kvk_gpu_event_record(p.gpu, p.begin, p.streams[0]), KV_OK);
	assert_int_equal(kvk_gpu_event_record(p.gpu, p.copied, p.streams[0]), KV_OK);
	assert_int_equal(kvk_gpu_event_elapsed(p.gpu, p.begin, p.copied, &ms), KV_ERR_IO);
	fake_cuda_stall(p.streams[0], 0);
	assert_int_equal(kvk_gpu_sync_stream(p.gpu, p.streams[0]), KV_OK);
	assert_int_equal(kvk_gpu_event_elapsed(p.gpu, p.begin, p.copied, &ms), KV_OK);
	close_program(&p);
}

/* Each call in turn, until there is none left; then what was opened is given back. Of calls that give something back the
 * caller hears nothing: what is there is free all the same. */
KV_TEST(p6_any_call_of_the_driver_may_fail_and_leaves_nothing)
{
	uint64_t n = 0;
	int failed = 1;

	while (failed && ++n < MOST) {
		program_t p = {.gpu = NULL};
		kv_status_t status;
		float ms;

		start(n);
		p.gpu = gpu_rig_open(&rig_);
		fake_cuda_fail_nth(n);
		status = open_program(&p);
		assert_true(status == KV_OK || (status == KV_ERR_IO && strlen(kvk_gpu_last_error()) > 10));
		if (status == KV_OK) {
			fill(&p, n);
			status = run_program(&p, &ms);
			assert_true(status == KV_OK || (status == KV_ERR_IO && strlen(kvk_gpu_last_error()) > 10));
			assert_true(status != KV_OK || memcmp(p.out, p.in, BYTES) == 0);
		}
		failed = fake_cuda_failed();
		assert_true(failed || status == KV_OK);
		fake_cuda_fail_nth(0);
		fake_cuda_drain();
		close_program(&p);
		gpu_rig_fini(&rig_); /* nothing is left, on the device or off it */
	}
	assert_in_range(n, 40, MOST - 1);
}
