// gpu_copy.h -- what rows of gpu_copy and gpu_after share: options, memory, clocks, medians and printing.
#ifndef GPU_COPY_H
#define GPU_COPY_H

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <random>
#include <string>
#include <sys/mman.h>
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

struct bench_t {
	kvk_gpu_t *gpu;
	cudaStream_t stream, other;
	cudaEvent_t begin, end, end_other;
	uint64_t bytes;        // of each memory
	uint8_t *pool, *pool2; // registered host memory
	uint8_t *cache, *hbm;  // device memory
	uint8_t *peer;         // of device 1, or null
	int rounds;
	const char *only;
	FILE *json;
};
static bench_t bench;

// ---- clocks -------------------------------------------------------------------------------------

static inline double timed(cudaStream_t stream, const std::function<void()> &enqueue)
{
	float ms;

	CU(cudaEventRecord(bench.begin, stream));
	enqueue();
	CU(cudaEventRecord(bench.end, stream));
	CU(cudaEventSynchronize(bench.end));
	CU(cudaEventElapsedTime(&ms, bench.begin, bench.end));

	return ms / 1e3;
}

// Holds a stream until the host has enqueued everything that is measured: else short copies measure how fast it does.
static __global__ void hold(volatile int *go)
{
	while (*go == 0) {
	}
}

static inline double timed_held(cudaStream_t stream, const std::function<void()> &enqueue)
{
	static int *go;
	float ms;

	if (!go) {
		CU(cudaHostAlloc((void **)&go, sizeof *go, cudaHostAllocMapped));
	}
	*(volatile int *)go = 0;
	hold<<<1, 1, 0, stream>>>(go);
	CU(cudaEventRecord(bench.begin, stream));
	enqueue();
	CU(cudaEventRecord(bench.end, stream));
	*(volatile int *)go = 1;
	CU(cudaEventSynchronize(bench.end));
	CU(cudaEventElapsedTime(&ms, bench.begin, bench.end));

	return ms / 1e3;
}

// Of work on both streams, from the start of both to the end of the later.
static inline double timed_both(const std::function<void()> &enqueue)
{
	return timed(bench.stream, [&] {
		CU(cudaStreamWaitEvent(bench.other, bench.begin, 0));
		enqueue();
		CU(cudaEventRecord(bench.end_other, bench.other));
		CU(cudaStreamWaitEvent(bench.stream, bench.end_other, 0));
	});
}

static inline double median(std::vector<double> v)
{
	std::sort(v.begin(), v.end());
	return v[v.size() / 2];
}

// ---- rows ---------------------------------------------------------------------------------------

// Of a ratio; 0: none.
struct goal_t {
	bool least;
	double ratio;
};

static inline goal_t at_least(double ratio)
{
	return {true, ratio};
}

static inline goal_t at_most(double ratio)
{
	return {false, ratio};
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

// One round before the counted ones warms everything up.
static inline void row(const std::string &name, const char *unit, const char *reference, goal_t goal,
		       const std::function<double()> &value_of, const std::function<double()> &reference_of)
{
	std::vector<double> values, references, ratios;

	for (int i = -1; i < bench.rounds; i++) {
		const double r = reference_of(), v = value_of();

		if (i >= 0) {
			values.push_back(v);
			references.push_back(r);
			ratios.push_back(v / r);
		}
	}

	const double ratio = median(ratios);
	const bool met = goal.least ? ratio >= goal.ratio : ratio <= goal.ratio;

	printf("%-58s %8.2f %-4s %8.2f %6.3f  %s", name.c_str(), median(values), unit, median(references), ratio,
	       reference);
	if (goal.ratio > 0) {
		printf("  goal %s %.3f: %s", goal.least ? ">=" : "<=", goal.ratio, met ? "met" : "MISSED");
	}
	printf("\n");
	fflush(stdout);
	if (!bench.json) {
		return;
	}
	fprintf(bench.json,
		"{\"name\":\"%s\",\"value\":%.4g,\"unit\":\"%s\",\"reference\":\"%s\",\"reference_value\":%.4g,"
		"\"ratio\":%.4f,\"rounds\":%d",
		name.c_str(), median(values), unit, reference, median(references), ratio, bench.rounds);
	if (goal.ratio > 0) {
		fprintf(bench.json, ",\"goal\":\"ratio %s %g\",\"goal_met\":%s", goal.least ? ">=" : "<=", goal.ratio,
			met ? "true" : "false");
	}
	fprintf(bench.json, "}\n");
	fflush(bench.json);
}

// ---- memory -------------------------------------------------------------------------------------

// Random bytes: zeros would flatter the link.
static inline uint8_t *host_memory()
{
	const uint64_t huge = 2 << 20;
	uint8_t *p = (uint8_t *)mmap(nullptr, bench.bytes + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
				     -1, 0);
	uint64_t x = 88172645463325252u;

	if (p == MAP_FAILED) {
		printf("out of memory\n");
		exit(1);
	}
	p += (huge - (uintptr_t)p % huge) % huge;
	madvise(p, bench.bytes, MADV_HUGEPAGE);
	for (uint64_t i = 0; i < bench.bytes / 8; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		((uint64_t *)p)[i] = x;
	}
	must_kv(kvk_gpu_register(bench.gpu, p, bench.bytes));

	return p;
}

static inline uint8_t *device_memory(int device, uint64_t times)
{
	uint8_t *p;

	CU(cudaSetDevice(device));
	CU(cudaMalloc(&p, times * bench.bytes));
	for (uint64_t i = 0; i < times; i++) {
		CU(cudaMemcpy(p + i * bench.bytes, bench.pool, bench.bytes, cudaMemcpyDefault));
	}
	CU(cudaSetDevice(0));

	return p;
}

static inline void parse_options(int argc, char **argv)
{
	bench.rounds = 7;
	bench.bytes = 384u << 20;
	for (int i = 1; i + 1 < argc; i += 2) {
		if (!strcmp(argv[i], "--rounds")) {
			bench.rounds = atoi(argv[i + 1]);
		} else if (!strcmp(argv[i], "--mib")) {
			bench.bytes = strtoull(argv[i + 1], nullptr, 0) << 20;
		} else if (!strcmp(argv[i], "--only")) {
			bench.only = argv[i + 1];
		} else if (!strcmp(argv[i], "--json")) {
			bench.json = fopen(argv[i + 1], "w");
		}
	}
}

// --only: names with commas between.
static inline bool wanted(const char *name)
{
	const std::string all = std::string(",") + (bench.only ? bench.only : "") + ",";

	return !bench.only || all.find(std::string(",") + name + ",") != std::string::npos;
}

static inline bool open_bench()
{
	const char *why = "";
	kvk_gpu_config_t config = {};
	int devices = 0, can = 0;

	config.cuda = kvk_cuda_load(&why);
	if (!config.cuda || cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 ||
	    kvk_gpu_open(&config, &bench.gpu) != KV_OK) {
		printf("skipped: %s\n", config.cuda ? kvk_gpu_last_error() : why);
		return false;
	}
	CU(cudaSetDevice(0));
	CU(cudaStreamCreateWithFlags(&bench.stream, cudaStreamNonBlocking));
	CU(cudaStreamCreateWithFlags(&bench.other, cudaStreamNonBlocking));
	for (cudaEvent_t *event : {&bench.begin, &bench.end, &bench.end_other}) {
		CU(cudaEventCreate(event));
	}
	bench.pool = host_memory();
	bench.pool2 = host_memory();
	bench.cache = device_memory(0, 1);
	bench.hbm = device_memory(0, 1);
	if (devices > 1) {
		CU(cudaDeviceCanAccessPeer(&can, 0, 1));
		if (can) {
			CU(cudaDeviceEnablePeerAccess(1, 0));
			bench.peer = device_memory(1, 1);
		}
	}

	return true;
}

static inline void print_head()
{
	printf("# %s; medians of %d rounds, %llu MiB a copy; value, reference, ratio\n", kvk_gpu_describe(bench.gpu),
	       bench.rounds, (unsigned long long)(bench.bytes >> 20));
}

#endif
