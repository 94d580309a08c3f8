// gpu_after: what work that is over leaves behind for an engine's small kernels.
//
// An engine that generates launches some 450 kernels a step as one graph, each a few microseconds, and what lies
// between two of them counts. A driver may change that for a whole process because of what was launched in it once
// (docs/decisions/017-kernels-as-graphs.md). So each row is a process of its own: a graph of small kernels on the
// default stream, as engines have it, before and after the work, which is on another stream. One goal: of kvd's copies.
//
//     gpu_after [--rounds N] [--mib N] [--json FILE] [--only ROW,...]
#include "gpu_step.h"

#include <sys/wait.h>
#include <unistd.h>

static const int WORK = 20; // times

// ---- the engine ---------------------------------------------------------------------------------

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

// ---- the work -----------------------------------------------------------------------------------

static __global__ void nothing()
{
}

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

	must_kv(kvk_gpu_create_stream(bench.gpu, 1, &stream));
	make_shape(s, 8192, KVK_PAGED_KV_TOKEN_HEAD, bench.pool, true);
	for (int i = 0; i < WORK; i++) {
		for (kvk_gpu_way_t way : {KVK_GPU_ZERO_COPY, KVK_GPU_STAGED}) {
			finish(submit(s, KVK_GPU_GATHER, way, 8, (cudaStream_t)stream));
			finish(submit(s, KVK_GPU_SCATTER, way, 8, (cudaStream_t)stream));
		}
	}
}

// ---- rows ---------------------------------------------------------------------------------------

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
	small_step small;

	small.open();
	const cudaGraphExec_t step = small.graph;

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
