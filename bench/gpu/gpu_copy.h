// gpu_copy.h -- what the families of gpu_copy share: memory, clocks, rows, a cache and blocks of one shape, and a copy
// between them.
#ifndef GPU_COPY_H
#define GPU_COPY_H

#define _Noreturn __attribute__((noreturn)) // C's word
extern "C" {
#include "bench.h"
#include "kvk/device.h"
#include "kvk/gpu.h"
}

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <functional>
#include <random>
#include <string>
#include <unistd.h>
#include <vector>

#include <cuda_runtime.h>

#define BATCH 4 // copies behind each other in a sample

#define CU(call)                                                                                                       \
	do {                                                                                                           \
		const cudaError_t error_ = (call);                                                                     \
		if (error_ != cudaSuccess) {                                                                           \
			printf("line %d: %s: %s\n", __LINE__, #call, cudaGetErrorString(error_));                      \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

static inline void must_kv(kv_status_t status)
{
	if (status != KV_OK) {
		printf("%s (%d)\n", kvk_gpu_last_error(), (int)status);
		exit(1);
	}
}

struct gpu_t {
	kvk_gpu_t *kvk;
	cudaStream_t stream, other;
	cudaEvent_t begin, end, begin_other, end_other;
	volatile int *gate;    // pinned; 0: hold() holds its stream
	uint64_t bytes;        // of each memory
	uint8_t *pool, *pool2; // registered host memory
	uint8_t *cache, *hbm;  // device memory
	uint8_t *peer;         // of device 1, or null
};
static gpu_t gpu;

static inline double timed(cudaStream_t stream, const std::function<void()> &enqueue)
{
	float ms;

	CU(cudaEventRecord(gpu.begin, stream));
	enqueue();
	CU(cudaEventRecord(gpu.end, stream));
	CU(cudaEventSynchronize(gpu.end));
	CU(cudaEventElapsedTime(&ms, gpu.begin, gpu.end));

	return ms / 1e3;
}

static __global__ void hold(volatile int *gate)
{
	while (*gate == 0) {
	}
}

// What follows in the stream waits until the host opens the gate (*gpu.gate = 1).
static inline void close_gate(cudaStream_t stream, uint32_t blocks = 1, uint32_t threads = 1, size_t shared_bytes = 0)
{
	*gpu.gate = 0;
	hold<<<blocks, threads, shared_bytes, stream>>>(gpu.gate);
}

// The stream waits until the host has enqueued all: else a sample of short copies measures how fast the host does that.
static inline double timed_held(cudaStream_t stream, const std::function<void()> &enqueue)
{
	close_gate(stream);

	return timed(stream, [&] {
		enqueue();
		*gpu.gate = 1;
	});
}

// Of work on both streams, from the start of both to the end of the later.
static inline double timed_both(const std::function<void()> &enqueue)
{
	return timed(gpu.stream, [&] {
		CU(cudaStreamWaitEvent(gpu.other, gpu.begin, 0));
		enqueue();
		CU(cudaEventRecord(gpu.end_other, gpu.other));
		CU(cudaStreamWaitEvent(gpu.stream, gpu.end_other, 0));
	});
}

static inline std::string text(const char *format, ...)
{
	char out[256];
	va_list args;

	va_start(args, format);
	vsnprintf(out, sizeof out, format, args);
	va_end(args);

	return out;
}

typedef std::function<double()> side_t;

static bench_outcome_t sample(void *arg, bench_sample_t *p_sample)
{
	p_sample->value = (*((const side_t **)arg)[p_sample->is_reference])();
	return BENCH_DONE;
}

// goal: of the ratio, at least so much; negative: at most; 0: none.
static void row(const std::string &name, const char *unit, const char *reference, double goal, const side_t &value_of,
		const side_t &reference_of)
{
	const side_t *sides[] = {&value_of, &reference_of};
	const bench_goal_t kind = goal > 0 ? BENCH_RATIO_AT_LEAST : goal < 0 ? BENCH_RATIO_AT_MOST : BENCH_NO_GOAL;
	const bench_measurement_t m = {name.c_str(), unit, reference, sample, sample, 7, kind, std::abs(goal)};

	bench_measure(sides, &m);
}

// Random bytes: zeros would flatter the link.
static inline uint8_t *host_memory()
{
	uint8_t *p = (uint8_t *)bench_memory(gpu.bytes);

	if (!p) {
		printf("out of memory\n");
		exit(1);
	}
	bench_fill(p, gpu.bytes, 1);
	must_kv(kvk_gpu_register(gpu.kvk, p, gpu.bytes));

	return p;
}

static inline uint8_t *device_memory(int device)
{
	uint8_t *p;

	CU(cudaSetDevice(device));
	CU(cudaMalloc(&p, gpu.bytes));
	CU(cudaMemcpy(p, gpu.pool, gpu.bytes, cudaMemcpyDefault));
	CU(cudaSetDevice(0));

	return p;
}

// Memory of a device as kvd-gpu hands it out, mapped for device 0; of random bytes. NULL: it cannot be had, and why is
// said.
static inline uint8_t *mapped_memory(uint32_t ordinal, uint64_t bytes)
{
	const kvk_cuda_ops_t *cuda = kvk_cuda_load(nullptr);
	kvk_device_info_t info[16];
	kvk_device_t *device;
	uint32_t count = 0;
	void *base = nullptr;
	int fd = -1;

	must_kv(kvk_device_list(cuda, info, 16, &count));
	if (kvk_device_open(cuda, info[ordinal].uuid, &device) != KV_OK) {
		printf("mapped memory of device %u: skipped, %s\n", ordinal, kvk_gpu_last_error());
		return nullptr;
	}
	bytes = (bytes + kvk_device_grain(device) - 1) / kvk_device_grain(device) * kvk_device_grain(device);
	must_kv(kvk_device_alloc(device, bytes, &fd));
	kvk_device_close(device);
	must_kv(kvk_gpu_map(gpu.kvk, fd, bytes, &base));
	close(fd);
	for (uint64_t at = 0; at < bytes; at += gpu.bytes) {
		CU(cudaMemcpy((uint8_t *)base + at, gpu.pool, std::min(gpu.bytes, bytes - at), cudaMemcpyDefault));
	}

	return (uint8_t *)base;
}

// NULL: the device is there, and open from now on; else why it is not.
static inline const char *open_gpu()
{
	const char *why = "no device";
	kvk_gpu_config_t config = {};
	int devices = 0, can = 0;

	if (gpu.kvk) {
		return nullptr;
	}
	gpu.bytes = bench_param_size("mib", 384) << 20;
	config.cuda = kvk_cuda_load(&why);
	if (!config.cuda || cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 ||
	    kvk_gpu_open(&config, &gpu.kvk) != KV_OK) {
		return config.cuda ? kvk_gpu_last_error() : why;
	}
	CU(cudaSetDevice(0));
	CU(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
	CU(cudaStreamCreateWithFlags(&gpu.other, cudaStreamNonBlocking));
	for (cudaEvent_t *event : {&gpu.begin, &gpu.end, &gpu.begin_other, &gpu.end_other}) {
		CU(cudaEventCreate(event));
	}
	CU(cudaHostAlloc((void **)&gpu.gate, sizeof *gpu.gate, cudaHostAllocMapped));
	gpu.pool = host_memory();
	gpu.pool2 = host_memory();
	gpu.cache = device_memory(0);
	gpu.hbm = device_memory(0);
	if (devices > 1) {
		CU(cudaDeviceCanAccessPeer(&can, 0, 1));
		if (can) {
			CU(cudaDeviceEnablePeerAccess(1, 0));
			gpu.peer = device_memory(1);
		}
	}
	printf("# %s; %llu MiB a copy\n", kvk_gpu_describe(gpu.kvk), (unsigned long long)(gpu.bytes >> 20));

	return nullptr;
}

static const uint32_t HEADS = 8, LAYERS = 32, DIM = 128, ROW = 256; // bf16: rows of 256 B

struct shape {
	kvk_layout_t layout;
	kvk_paged_t paged;
	std::vector<void *> base;
	std::vector<kvk_move_t> moves;
	std::vector<uint64_t> leaves;
	uint64_t bytes;
	uint32_t max_in_flight = 0; // bytes of a scatter on their way; 0: kvk's
};

// Of `ranks` ranks one, whose heads are a part of each block: the pool then has that many times the bytes.
// apart: every second place of the pool is somebody else's, so that no two blocks are neighbours there.
struct share {
	uint32_t ranks = 1;
	bool apart = false;
};

// Fragments of `fragment` bytes, K and V of one head and layer; blocks in an order of chance on both sides.
static void make_shape(shape &s, uint32_t fragment, kvk_paged_kind_t kind, uint8_t *pool, bool digests, share part = {})
{
	const uint32_t ranks = part.ranks, heads = HEADS / ranks;
	const uint64_t block = (uint64_t)HEADS * LAYERS * fragment, held = block / ranks;
	const uint64_t stride = part.apart ? 2 * block : block;
	const uint32_t count = (uint32_t)(ranks * gpu.bytes / stride);

	s.layout = {};
	s.layout.heads = HEADS;
	s.layout.layers = LAYERS;
	s.layout.block_tokens = fragment / (2 * ROW);
	s.layout.k_dim = s.layout.v_dim = DIM;
	s.layout.dtype = KVK_DTYPE_BF16;
	s.layout.inner = kind == KVK_PAGED_HEAD_TOKEN_KV ? KVK_INNER_PACKED : KVK_INNER_SPLIT;
	s.base.resize(LAYERS);
	for (uint32_t i = 0; i < LAYERS; i++) {
		s.base[i] = gpu.cache + (uint64_t)i * count * heads * fragment;
	}
	s.paged = {};
	s.paged.kind = kind;
	s.paged.blocks = count;
	s.paged.layers = LAYERS;
	s.paged.heads = heads;
	s.paged.block_tokens = s.layout.block_tokens;
	s.paged.k_dim = s.paged.v_dim = DIM;
	s.paged.dtype = KVK_DTYPE_BF16;
	s.paged.base = s.base.data();
	s.bytes = held * count;
	s.moves.resize(count);
	s.leaves.assign((uint64_t)count * heads * LAYERS, 0);
	std::vector<uint32_t> order(count);
	for (uint32_t i = 0; i < count; i++) {
		order[i] = i;
	}
	std::shuffle(order.begin(), order.end(), std::mt19937(7));
	for (uint32_t i = 0; i < count; i++) {
		s.moves[i] = {order[i], 0, pool + (uint64_t)order[count - 1 - i] * stride,
			      digests ? s.leaves.data() + (uint64_t)i * heads * LAYERS : nullptr};
	}
}

// Which way, and with what.
struct how {
	bool load;
	kvk_gpu_way_t way;
	uint32_t sms;
};

static kvk_gpu_job_t *submit(shape &s, how h, cudaStream_t stream)
{
	kvk_gpu_copy_t copy = {};
	kvk_gpu_job_t *job;

	copy.dir = h.load ? KVK_GPU_SCATTER : KVK_GPU_GATHER;
	copy.way = h.way;
	copy.layout = &s.layout;
	copy.paged = &s.paged;
	copy.moves = s.moves.data();
	copy.count = (uint32_t)s.moves.size();
	copy.sms = h.sms;
	copy.max_in_flight = s.max_in_flight;
	copy.ready = h.load; // the pool's bytes are never on their way
	copy.stream = (kvk_cu_stream_t)stream;
	must_kv(kvk_gpu_submit(gpu.kvk, &copy, &job));

	return job;
}

static void finish(kvk_gpu_job_t *job)
{
	must_kv(kvk_gpu_wait(job, 60000000));
	kvk_gpu_release_job(job);
}

// Several copies behind each other, so that what the host does for one runs while the one before it copies.
static double copy_rate(shape &s, how h)
{
	kvk_gpu_job_t *jobs[BATCH];
	const auto enqueue = [&] {
		for (auto &job : jobs) {
			job = submit(s, h, gpu.stream);
		}
	};
	// Many small pieces of work would wait for each other and for the hold.
	const double seconds =
		h.way == KVK_GPU_ZERO_COPY ? timed_held(gpu.stream, enqueue) : timed(gpu.stream, enqueue);

	for (auto job : jobs) {
		finish(job);
	}

	return (double)s.bytes * BATCH / seconds / 1e9;
}

static double memcpy_rate(void *dst, const void *src, uint64_t bytes)
{
	const double seconds = timed(gpu.stream, [&] {
		for (int i = 0; i < BATCH; i++) {
			CU(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, gpu.stream));
		}
	});

	return (double)bytes * BATCH / seconds / 1e9;
}

// Digests to compare with, of what lies in the pool: a gather makes both. And each kernel has run once, which loads it.
static void prime(shape &s)
{
	finish(submit(s, {false, KVK_GPU_ZERO_COPY, 16}, gpu.stream));
	finish(submit(s, {true, KVK_GPU_ZERO_COPY, 16}, gpu.stream));
}

// Ours, against as many bytes in one piece by the copy engine.
static inline void copy_row(const std::string &name, shape &s, uint8_t *pool, how h, const char *reference, double goal)
{
	row(
		name, "GB/s", reference, goal, [&] { return copy_rate(s, h); },
		[&] { return h.load ? memcpy_rate(gpu.cache, pool, s.bytes) : memcpy_rate(pool, gpu.cache, s.bytes); });
}

static const char *const ONE_PIECE = "cudaMemcpyAsync, one piece";

// Copies one behind another on the other stream: of blocks, or (sms 0) plain ones by the copy engine.
struct background {
	shape &s;
	how h;
	std::vector<kvk_gpu_job_t *> jobs;

	std::string name() const
	{
		if (h.sms == 0) {
			return text("the copy engine %s", h.load ? "loads" : "saves");
		}
		return text("%s, %s, %u SMs", h.load ? "loading" : "saving",
			    h.way == KVK_GPU_STAGED ? "staged" : "zero copy", h.sms) +
		       (s.max_in_flight ? text(", %u KiB on their way", s.max_in_flight >> 10) : "");
	}

	void start(size_t count)
	{
		for (size_t i = 0; i < count; i++) {
			if (h.sms > 0) {
				jobs.push_back(submit(s, h, gpu.other));
			} else {
				CU(cudaMemcpyAsync(h.load ? gpu.hbm : gpu.pool2, h.load ? gpu.pool : gpu.hbm, s.bytes,
						   cudaMemcpyDefault, gpu.other));
			}
		}
	}

	void end()
	{
		for (auto job : jobs) {
			finish(job);
		}
		jobs.clear();
		CU(cudaStreamSynchronize(gpu.other));
	}
};

#endif
