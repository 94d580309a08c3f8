// gpu_nn.h -- the operations of kvk/nn.h on a device: against their twin, and against what the device can do.
#ifndef GPU_NN_H
#define GPU_NN_H

#define _Noreturn __attribute__((noreturn)) // C's word
extern "C" {
#include "bench.h"
#include "kvk/gpu.h"
#include "kvk/nn.h"
}

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#include <cuda_runtime.h>

#define CU(call)                                                                                                       \
	do {                                                                                                           \
		const cudaError_t error_ = (call);                                                                     \
		if (error_ != cudaSuccess) {                                                                           \
			printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_));              \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

static inline void nn_must(kv_status_t status)
{
	if (status != KV_OK) {
		printf("%s (%d)\n", kvk_gpu_last_error(), (int)status);
		exit(1);
	}
}

// Opened once. NULL: it is there; else why not.
struct nn_rig {
	kvk_gpu_t *gpu;
	kvk_nn_t *nn, *twin;
	cudaStream_t stream;
};
extern nn_rig nn_device;
const char *nn_open();

static inline kvk_cu_stream_t nn_stream()
{
	return (kvk_cu_stream_t)nn_device.stream;
}

// Median seconds of one of `times` runs behind each other, of `rounds` measured ones, the host out of the way.
double nn_time(const std::function<void()> &enqueue, int times = 10, int rounds = 7);

// Memory of the device; freed by nobody.
template <class T> static inline T *nn_array(size_t n)
{
	void *at;

	CU(cudaMalloc(&at, n * sizeof(T)));

	return (T *)at;
}
template <class T> static inline T *nn_upload(const std::vector<T> &from)
{
	T *at = nn_array<T>(from.size() + 1);

	CU(cudaMemcpy(at, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
	CU(cudaStreamSynchronize(nullptr)); // the copy may have come no further than to the driver's own memory

	return at;
}
template <class T> static inline std::vector<T> nn_download(const T *at, size_t n)
{
	std::vector<T> to(n);

	CU(cudaMemcpy(to.data(), at, n * sizeof(T), cudaMemcpyDeviceToHost));

	return to;
}

// Relative L2 distance: |a - b| / |b|.
double nn_distance(const std::vector<float> &a, const std::vector<float> &b);
std::vector<float> nn_floats(const std::vector<kvk_bf16_t> &from);
// Normal, deviation as given, rounded to BF16.
std::vector<kvk_bf16_t> nn_random(size_t n, float deviation, uint64_t seed);

// Families, one a file: nn_product.cu, nn_attention.cu, nn_rows.cu. "right": against the twin, a difference ends the
// program; the others print rows with a reference of the same run.
bench_outcome_t nn_product_right(int rounds);
bench_outcome_t nn_product_speed(int rounds);
bench_outcome_t nn_attention_right(int rounds);
bench_outcome_t nn_attention_speed(int rounds);
bench_outcome_t nn_rows_right(int rounds);

#endif
