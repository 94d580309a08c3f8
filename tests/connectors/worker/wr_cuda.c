#include "connectors/worker/wr_device.h"
#include "engine/check.h"
#include "kernels/fake_cuda.h"

static kvk_cu_stream_t streams[2], compute;
static kvk_cu_context_t context;
static int running, device, left;

void wr_device_start(uint64_t seed)
{
	const kvk_cuda_ops_t *cuda = fake_cuda_ops();

	if (running) {
		return;
	}
	fake_cuda_start(&(fake_cuda_config_t){.seed = seed, .lazy = 1, .major = 9});
	assert_int_equal(cuda->device_get(&device, 0), 0);
	assert_int_equal(cuda->context_retain(&context, device), 0);
	assert_int_equal(cuda->context_push(context), 0);
	assert_int_equal(cuda->stream_create(&streams[0], 1, 0), 0);
	assert_int_equal(cuda->stream_create(&streams[1], 1, 0), 0);
	compute = streams[0];
	running = 1;
}

void wr_device_stop(void)
{
	const kvk_cuda_ops_t *cuda = fake_cuda_ops();

	running = 0;
	fake_cuda_drain();
	assert_int_equal(cuda->stream_destroy(streams[0]), 0);
	assert_int_equal(cuda->stream_destroy(streams[1]), 0);
	assert_int_equal(cuda->context_pop(&context), 0);
	assert_int_equal(cuda->context_release(device), 0);
	assert_true(left || fake_cuda_clean());
	left = 0;
	fake_cuda_stop();
}

void wr_device_leave(void)
{
	left = 1;
}

uint8_t *wr_device_alloc(size_t bytes)
{
	kvk_cu_ptr_t memory = 0;

	assert_int_equal(fake_cuda_ops()->mem_alloc(&memory, bytes), 0);

	return (uint8_t *)(uintptr_t)memory;
}

void wr_device_free(uint8_t *memory)
{
	assert_int_equal(fake_cuda_ops()->mem_free((kvk_cu_ptr_t)(uintptr_t)memory), 0);
}

void wr_device_config(kvx_worker_config_t *config)
{
	config->memory = KVX_MEMORY_CUDA;
	config->cuda = fake_cuda_ops();
	config->image = fake_cuda_image();
}

const kvx_device_t *wr_device_front(void)
{
	static kvx_device_t front;

	front = (kvx_device_t){.stream = compute, .cuda = fake_cuda_ops(), .image = fake_cuda_image()};

	return &front;
}

void wr_device_set_stream(kvx_worker_t *worker, int second)
{
	compute = streams[second];
	kvx_worker_set_stream(worker, compute);
}

void wr_device_call(void (*call)(void *args), void *args)
{
	fake_cuda_call(compute, call, args);
}

void wr_device_take(uint64_t ns)
{
	fake_cuda_advance(ns);
}

void wr_device_hold(int held)
{
	fake_cuda_hold(held);
}

void wr_device_stall(int second, int stalled)
{
	fake_cuda_stall(streams[second], stalled);
}

void wr_device_await_second(void)
{
	const kvk_cuda_ops_t *cuda = fake_cuda_ops();
	kvk_cu_event_t event = NULL;

	assert_int_equal(cuda->event_create(&event, 2), 0);
	assert_int_equal(cuda->event_record(event, streams[1]), 0);
	assert_int_equal(cuda->stream_wait(compute, event, 0), 0);
	assert_int_equal(cuda->event_destroy(event), 0);
}

void wr_device_cost(uint64_t ns)
{
	fake_cuda_costs(ns, ns);
}

int wr_device_runs_behind(void)
{
	return 1;
}

void wr_device_sync(void)
{
	const kvk_cuda_ops_t *cuda = fake_cuda_ops();
	kvk_cu_event_t event = NULL;

	assert_int_equal(cuda->event_create(&event, 2), 0);
	assert_int_equal(cuda->event_record(event, compute), 0);
	while (cuda->event_query(event) != 0) {
	}
	assert_int_equal(cuda->event_destroy(event), 0);
}

int wr_device_fail(uint64_t nth)
{
	const int refused = fake_cuda_failed();

	fake_cuda_fail_nth(nth);

	return refused;
}

void wr_device_refuse_orders(int refuse)
{
	fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, stream_wait), refuse ? 999 : 0);
}

void wr_device_trace(const char *what, uint32_t a, uint32_t b)
{
	fake_cuda_trace("%s %u %u", what, a, b);
}

void wr_device_print_trace(void)
{
	fake_cuda_print_trace();
}
