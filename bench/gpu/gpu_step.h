// gpu_step.h -- the small kernels of a step that generates, in place of an engine; part of gpu_copy.cu and
// gpu_after.cu.
#ifndef GPU_STEP_H
#define GPU_STEP_H

#include "gpu_shape.h"

static const int STEP_PAIRS = 220;

static __global__ void little(float *x, int n)
{
	const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);

	if (i < n) {
		x[i] = x[i] * 1.0001f + 1.0f;
	}
}

static __global__ void reads(const float4 *from, float *to, int n)
{
	float sum = 0;

	for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += (int)(gridDim.x * blockDim.x)) {
		sum += from[i].x + from[i].y + from[i].z + from[i].w;
	}
	if (sum == 12345.0f) { // never, which the compiler does not know
		*to = sum;
	}
}

// Every second kernel reads 16 MiB of weights, more of them than the device's cache holds.
struct small_step {
	static const int THREADS = 256, BLOCKS = 132, PARTS = 24, READ = (16 << 20) / (int)sizeof(float4);
	static const size_t INPUT = 4096;
	float4 *weights = nullptr;
	float *x = nullptr;
	cudaGraphExec_t graph = nullptr;

	void open()
	{
		cudaGraph_t captured;

		CU(cudaMalloc(&x, (size_t)BLOCKS * THREADS * sizeof *x));
		CU(cudaMemset(x, 0, (size_t)BLOCKS * THREADS * sizeof *x));
		CU(cudaMalloc(&weights, (size_t)PARTS * READ * sizeof *weights));
		CU(cudaMemset(weights, 0, (size_t)PARTS * READ * sizeof *weights));
		CU(cudaStreamBeginCapture(bench.stream, cudaStreamCaptureModeThreadLocal));
		launch(bench.stream);
		CU(cudaStreamEndCapture(bench.stream, &captured));
		CU(cudaGraphInstantiate(&graph, captured, 0));
		CU(cudaDeviceSynchronize());
	}

	// What an engine does before it computes: each of its tables is copied in, and read by a kernel.
	void copy_in(const char *inputs, int count, cudaStream_t stream)
	{
		for (int i = 0; i < count; i++) {
			CU(cudaMemcpyAsync(x, inputs + i * INPUT, INPUT, cudaMemcpyHostToDevice, stream));
			little<<<1, THREADS, 0, stream>>>(x, (int)(INPUT / sizeof *x));
		}
	}

	void launch(cudaStream_t stream)
	{
		for (int i = 0; i < STEP_PAIRS; i++) {
			little<<<BLOCKS, THREADS, 0, stream>>>(x, BLOCKS * THREADS);
			reads<<<2 * BLOCKS, THREADS, 0, stream>>>(weights + (size_t)(i % PARTS) * READ, x, READ);
		}
	}
};

#endif
