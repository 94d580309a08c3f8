// gpu_idle.h -- what copies that are over leave behind for an engine's kernels; part of gpu_copy.cu.
//
// An engine that generates launches some 450 kernels a step as one graph, each a few microseconds, and what lies between two of them counts. A driver may
// change that for the whole process because of what others once did (docs/decisions/017-kernels-as-graphs.md), so this comes first, before any other row has
// launched a kernel on any stream but the engine's.
#ifndef GPU_IDLE_H
#define GPU_IDLE_H

static __global__ void idle_little(float *x, int n)
{
	const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);

	if (i < n) {
		x[i] = x[i] * 1.0001f + 1.0f;
	}
}

static __global__ void idle_read(const float4 *from, float *to, int n)
{
	float sum = 0;

	for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += (int)(gridDim.x * blockDim.x)) {
		sum += from[i].x + from[i].y + from[i].z + from[i].w;
	}
	if (sum == 12345.0f) { // never, which the compiler does not know
		*to = sum;
	}
}

// A step, on the stream that engines use: the default one. 16 MiB of weights are read by every second kernel.
static cudaGraphExec_t idle_step()
{
	const int threads = 256, blocks = 132, read = 1 << 20;
	float4 *weights = (float4 *)bench.cache;
	cudaGraphExec_t step;
	cudaGraph_t graph;
	float *x;

	CU(cudaMalloc(&x, (size_t)blocks * threads * sizeof *x));
	CU(cudaMemset(x, 0, (size_t)blocks * threads * sizeof *x));
	CU(cudaStreamBeginCapture(bench.stream, cudaStreamCaptureModeThreadLocal));
	for (uint64_t i = 0; i < 220; i++) {
		idle_little<<<blocks, threads, 0, bench.stream>>>(x, blocks * threads);
		idle_read<<<2 * blocks, threads, 0, bench.stream>>>(weights + (i << 20) % (bench.bytes / 16), x, read);
	}
	CU(cudaStreamEndCapture(bench.stream, &graph));
	CU(cudaGraphInstantiate(&step, graph, 0));
	CU(cudaGraphDestroy(graph));

	return step;
}

static double idle_seconds(cudaGraphExec_t step)
{
	const int steps = 10;

	return timed(cudaStreamLegacy,
		     [&] {
			     for (int i = 0; i < steps; i++) {
				     CU(cudaGraphLaunch(step, cudaStreamLegacy));
			     }
		     }) /
	       steps;
}

static void idle_row(const char *name, goal_t goal, cudaGraphExec_t step, const std::vector<double> &before)
{
	row(
		name, "ms", "before any copy", goal, [&] { return 1e3 * idle_seconds(step); },
		[&] { return 1e3 * median(before); });
}

static void rows_idle()
{
	cudaGraphExec_t step = idle_step();
	std::vector<double> before;
	kvk_cu_stream_t copies;
	shape s;

	idle_seconds(step);
	for (int i = 0; i < bench.rounds; i++) {
		before.push_back(idle_seconds(step));
	}
	must_kv(kvk_gpu_stream(bench.gpu, 1, &copies));
	make_shape(s, 8192, KVK_PAGED_KV_TOKEN_HEAD, bench.pool, true);
	for (int i = 0; i < 20; i++) {
		for (kvk_gpu_way_t way : {KVK_GPU_ZERO_COPY, KVK_GPU_STAGED}) {
			finish(submit(s, KVK_GPU_GATHER, way, 8, (cudaStream_t)copies));
			finish(submit(s, KVK_GPU_SCATTER, way, 8, (cudaStream_t)copies));
		}
	}
	idle_row("step of 440 small kernels after copies out and in, zero copy and staged", at_most(1.005), step,
		 before);
	for (int i = 0; i < 20; i++) {
		idle_little<<<1, 1, 0, bench.other>>>(nullptr, 0);
		CU(cudaStreamSynchronize(bench.other));
	}
	idle_row("the same after 20 plain launches, one at a time, on another stream", {}, step, before);
	CU(cudaGraphExecDestroy(step));
}

#endif
