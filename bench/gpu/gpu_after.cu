// gpu_after: what work that is over leaves behind for an engine's small kernels.
//
// An engine that generates launches some 450 kernels a step as one graph, each a few microseconds, and what lies between two of them counts. A driver may
// change that for a whole process because of what was launched in it once (docs/decisions/017-kernels-as-graphs.md). So each row is a process of its own: a
// graph of small kernels on the default stream, as engines have it, before and after the work, which is on another stream. One goal: of kvd's copies.
//
//     gpu_after [--rounds N] [--mib N] [--json FILE] [--only ROW,...]
#include "gpu_shape.h"

#include <sys/wait.h>
#include <unistd.h>

static const int WORK = 20; // times

// ---- the engine --------------------------------------------------------------------------------------------------------

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

static __global__ void nothing()
{
}

// Every second kernel reads 16 MiB of weights, more of them than the device's cache holds.
static cudaGraphExec_t make_step()
{
	const int threads = 256, blocks = 132, parts = 24;
	const int read = (16 << 20) / (int)sizeof(float4);
	cudaGraphExec_t step;
	cudaGraph_t graph;
	float4 *weights;
	float *x;

	CU(cudaMalloc(&x, (size_t)blocks * threads * sizeof *x));
	CU(cudaMemset(x, 0, (size_t)blocks * threads * sizeof *x));
	CU(cudaMalloc(&weights, (size_t)parts * read * sizeof *weights));
	CU(cudaMemset(weights, 0, (size_t)parts * read * sizeof *weights));
	CU(cudaStreamBeginCapture(bench.stream, cudaStreamCaptureModeThreadLocal));
	for (int i = 0; i < 220; i++) {
		little<<<blocks, threads, 0, bench.stream>>>(x, blocks * threads);
		reads<<<2 * blocks, threads, 0, bench.stream>>>(weights + (size_t)(i % parts) * read, x, read);
	}
	CU(cudaStreamEndCapture(bench.stream, &graph));
	CU(cudaGraphInstantiate(&step, graph, 0));
	CU(cudaDeviceSynchronize());

	return step;
}

static double step_ms(cudaGraphExec_t step)
{
	const int steps = 10;

	return 1e3 *
	       timed(cudaStreamLegacy,
		     [&] {
			     for (int i = 0; i < steps; i++) {
				     CU(cudaGraphLaunch(step, cudaStreamLegacy));
			     }
		     }) /
	       steps;
}

// ---- the work ----------------------------------------------------------------------------------------------------------

static void launch(int n, bool at_once)
{
	for (int i = 0; i < n; i++) {
		nothing<<<1, 1, 0, bench.other>>>();
		if (!at_once) {
			CU(cudaStreamSynchronize(bench.other));
		}
	}
}

static void launch_graphs()
{
	cudaGraphExec_t exec;
	cudaGraph_t graph;

	CU(cudaStreamBeginCapture(bench.stream, cudaStreamCaptureModeThreadLocal));
	nothing<<<1, 1, 0, bench.stream>>>();
	CU(cudaStreamEndCapture(bench.stream, &graph));
	CU(cudaGraphInstantiate(&exec, graph, 0));
	for (int i = 0; i < WORK; i++) {
		CU(cudaGraphLaunch(exec, bench.other));
		CU(cudaStreamSynchronize(bench.other));
	}
}

static void copy(void *to, const void *from)
{
	for (int i = 0; i < WORK; i++) {
		CU(cudaMemcpyAsync(to, from, 1 << 16, cudaMemcpyDefault, bench.other));
		CU(cudaStreamSynchronize(bench.other));
	}
}

// Out and in, both ways of copying with kernels.
static void copy_blocks()
{
	kvk_cu_stream_t stream;
	shape s;

	must_kv(kvk_gpu_stream(bench.gpu, 1, &stream));
	make_shape(s, 8192, KVK_PAGED_KV_TOKEN_HEAD, bench.pool, true);
	for (int i = 0; i < WORK; i++) {
		for (kvk_gpu_way_t way : {KVK_GPU_ZERO_COPY, KVK_GPU_STAGED}) {
			finish(submit(s, KVK_GPU_GATHER, way, 8, (cudaStream_t)stream));
			finish(submit(s, KVK_GPU_SCATTER, way, 8, (cudaStream_t)stream));
		}
	}
}

// ---- rows --------------------------------------------------------------------------------------------------------------

struct work {
	const char *name, *text;
	double goal;
	void (*run)();
};

static const work works[] = {
	{"none", "nothing", 0, [] {}},
	{"launch7", "7 launches, one at a time", 0, [] { launch(7, false); }},
	{"launch8", "8 launches, one at a time", 0, [] { launch(8, false); }},
	{"launch20", "20 launches, one at a time", 0, [] { launch(WORK, false); }},
	{"burst20", "20 launches at once", 0, [] { launch(WORK, true); }},
	{"graphs", "20 graphs of a kernel, one at a time", 0, launch_graphs},
	{"inside", "20 copies inside the device", 0, [] { copy(bench.hbm, bench.cache); }},
	{"in", "20 copies into the device", 0, [] { copy(bench.hbm, bench.pool); }},
	{"out", "20 copies out of the device", 0, [] { copy(bench.pool, bench.hbm); }},
	{"kvd", "80 copies of blocks by kvd, out and in", 1.005, copy_blocks},
};

// In a process that has not used the device.
static int measure(const work &w, bool first)
{
	std::vector<double> before;

	if (!open_bench()) {
		return 77;
	}
	if (first) {
		print_head();
	}
	cudaGraphExec_t step = make_step();
	step_ms(step);
	for (int i = 0; i < bench.rounds; i++) {
		before.push_back(step_ms(step));
	}
	w.run();
	CU(cudaDeviceSynchronize());
	row(
		text("step of 440 small kernels after %s", w.text), "ms", "before", at_most(w.goal),
		[&] { return step_ms(step); }, [&] { return median(before); });

	return 0;
}

int main(int argc, char **argv)
{
	bool first = true;
	int status = 0;

	parse_options(argc, argv);
	for (const work &w : works) {
		int child_status = 0;

		if (!wanted(w.name) || status == 77) {
			continue;
		}
		fflush(nullptr);
		const pid_t child = fork();

		if (child == 0) {
			exit(measure(w, first));
		}
		first = false;
		if (child < 0 || waitpid(child, &child_status, 0) != child) {
			perror("gpu_after");
			return 1;
		}
		status = WIFEXITED(child_status) ? std::max(status, WEXITSTATUS(child_status)) : 1;
	}

	return status;
}
