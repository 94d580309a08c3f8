// gpu_beside.h -- rows of what a step's small kernels take while blocks are copied; part of gpu_copy.cu.
//
// An engine enqueues a step that waits for its loads layer by layer, and most of it is small: what each kernel loses
// beside a load, the step loses hundreds of times. What a device has on its way over the link stands in front of all
// else that it reads there, launches of kernels before all (docs/decisions/018-what-is-on-its-way.md).
#ifndef GPU_BESIDE_H
#define GPU_BESIDE_H

#include "gpu_copy.h"

#include <unistd.h>

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
		CU(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal));
		launch(gpu.stream);
		CU(cudaStreamEndCapture(gpu.stream, &captured));
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

static const int INPUTS = 8; // of a step: each is copied in before a kernel may read it

enum beside_kind { ONE_BY_ONE, AS_GRAPH, COPIES_IN, BESIDE_KINDS };

struct beside_t {
	small_step step;
	beside_kind kind;
	char *inputs; // pinned
	int *go;
	int short_rounds; // the copies were over before the step
};

// Milliseconds of a step that is enqueued first, and let go when the copies are under way.
static double beside_ms(beside_t &b, background *copies)
{
	cudaEvent_t over;
	float ms;

	CU(cudaEventCreate(&over));
	*(volatile int *)b.go = 0;
	hold<<<1, 1, 0, gpu.stream>>>(b.go);
	CU(cudaEventRecord(gpu.begin, gpu.stream));
	if (b.kind == AS_GRAPH) {
		CU(cudaGraphLaunch(b.step.graph, gpu.stream));
	} else if (b.kind == ONE_BY_ONE) {
		b.step.launch(gpu.stream);
	} else {
		b.step.copy_in(b.inputs, INPUTS, gpu.stream);
	}
	CU(cudaEventRecord(gpu.end, gpu.stream));
	if (copies) {
		copies->start(8);
	}
	CU(cudaEventRecord(over, gpu.other));
	usleep(3000);
	*(volatile int *)b.go = 1;
	CU(cudaEventSynchronize(gpu.end));
	b.short_rounds += copies && cudaEventQuery(over) == cudaSuccess;
	CU(cudaEventSynchronize(over));
	CU(cudaEventElapsedTime(&ms, gpu.begin, gpu.end));
	CU(cudaEventDestroy(over));
	if (copies) {
		copies->end();
	}

	return ms;
}

static void beside_rows(beside_t &b, background copies)
{
	for (int kind = 0; kind < BESIDE_KINDS; kind++) {
		b.kind = (beside_kind)kind;
		b.short_rounds = 0;
		row((kind == COPIES_IN ? text("%d copies of 4 KiB in, a kernel behind each, while ", INPUTS)
				       : text("step of %d small kernels %s while ", 2 * STEP_PAIRS,
					      kind == AS_GRAPH ? "as a graph" : "one by one")) +
			    copies.name(),
		    "ms", "alone", at_most(0), [&] { return beside_ms(b, &copies); },
		    [&] { return beside_ms(b, nullptr); });
		if (b.short_rounds > 0) {
			printf("    the copies were over before the step in %d rounds\n", b.short_rounds);
		}
	}
}

static void rows_beside()
{
	beside_t b;
	shape s;

	b.step.open();
	CU(cudaHostAlloc((void **)&b.go, sizeof *b.go, cudaHostAllocMapped));
	CU(cudaHostAlloc((void **)&b.inputs, INPUTS * small_step::INPUT, cudaHostAllocDefault));
	make_shape(s, 8192, KVK_PAGED_KV_TOKEN_HEAD, gpu.pool, true);
	prime(s);
	for (bool load : {true, false}) {
		beside_rows(b, {s, {load, KVK_GPU_AUTO, 0}});
		for (uint32_t sms : {4u, 2u}) {
			beside_rows(b, {s, {load, KVK_GPU_STAGED, sms}});
			beside_rows(b, {s, {load, KVK_GPU_ZERO_COPY, sms}});
		}
	}
	// How fast a load is with so much on its way, and what that costs; the last has all that there is room for.
	for (auto [sms, kib] : {std::pair{4u, 256u}, {4u, 512u}, {8u, 4096u}}) {
		const how h = {true, KVK_GPU_ZERO_COPY, sms};

		s.max_in_flight = kib << 10;
		copy_row(text("zero copy load 8192 B in rows of 256 B, %u SMs, %u KiB on their way", sms, kib), s,
			 gpu.pool, h, ONE_PIECE, 0);
		beside_rows(b, {s, h});
	}
}

#endif
