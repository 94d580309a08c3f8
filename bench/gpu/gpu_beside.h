// gpu_beside.h -- rows of what a step's small kernels take while blocks are copied; part of gpu_copy.cu.
//
// An engine enqueues a step that waits for its loads layer by layer, and most of it is small: what each kernel loses
// beside a load, the step loses hundreds of times. What a device has on its way over the link stands in front of all
// else that it reads there, launches of kernels before all (docs/decisions/018-what-is-on-its-way.md).
#ifndef GPU_BESIDE_H
#define GPU_BESIDE_H

#include "gpu_step.h"

static const int INPUTS = 8; // of a step: each is copied in before a kernel may read it

enum beside_kind { ONE_BY_ONE, AS_GRAPH, COPIES_IN, BESIDE_KINDS };

struct beside_t {
	small_step step;
	beside_kind kind;
	char *inputs; // pinned
	int *go;
	int short_rounds; // the copies were over before the step
};

typedef std::function<void()> work_t;

// Milliseconds of a step that is enqueued first, and let go when the copies are under way.
static double beside_ms(beside_t &b, const work_t &copies)
{
	cudaEvent_t over;
	float ms;

	CU(cudaEventCreate(&over));
	*(volatile int *)b.go = 0;
	hold<<<1, 1, 0, bench.stream>>>(b.go);
	CU(cudaEventRecord(bench.begin, bench.stream));
	if (b.kind == AS_GRAPH) {
		CU(cudaGraphLaunch(b.step.graph, bench.stream));
	} else if (b.kind == ONE_BY_ONE) {
		b.step.launch(bench.stream);
	} else {
		b.step.copy_in(b.inputs, INPUTS, bench.stream);
	}
	CU(cudaEventRecord(bench.end, bench.stream));
	if (copies) {
		copies();
	}
	CU(cudaEventRecord(over, bench.other));
	usleep(3000);
	*(volatile int *)b.go = 1;
	CU(cudaEventSynchronize(bench.end));
	b.short_rounds += copies && cudaEventQuery(over) == cudaSuccess;
	CU(cudaEventSynchronize(over));
	CU(cudaEventElapsedTime(&ms, bench.begin, bench.end));
	CU(cudaEventDestroy(over));

	return ms;
}

static void beside_row(beside_t &b, const std::string &name, const work_t &copies)
{
	for (int kind = 0; kind < BESIDE_KINDS; kind++) {
		b.kind = (beside_kind)kind;
		b.short_rounds = 0;
		row(
			kind == COPIES_IN
				? text("%d copies of 4 KiB in, a kernel behind each, while %s", INPUTS, name.c_str())
				: text("step of %d small kernels %s while %s", 2 * STEP_PAIRS,
				       kind == AS_GRAPH ? "as a graph" : "one by one", name.c_str()),
			"ms", "alone", at_most(0), [&] { return beside_ms(b, copies); },
			[&] { return beside_ms(b, nullptr); });
		if (b.short_rounds > 0) {
			printf("    the copies were over before the step in %d rounds\n", b.short_rounds);
		}
	}
}

static void beside_copies(beside_t &b, shape &s, kvk_gpu_dir_t dir, kvk_gpu_way_t way, uint32_t sms)
{
	std::vector<kvk_gpu_job_t *> jobs(8);
	const std::string window = s.max_in_flight ? text(", %u KiB on their way", s.max_in_flight >> 10) : "";
	const auto finish_all = [&] {
		for (auto &job : jobs) {
			if (job) {
				finish(job);
			}
			job = nullptr;
		}
	};

	beside_row(b,
		   text("%s, %s, %u SMs%s", dir == KVK_GPU_GATHER ? "saving" : "loading",
			way == KVK_GPU_STAGED ? "staged" : "zero copy", sms, window.c_str()),
		   [&] {
			   finish_all();
			   for (auto &job : jobs) {
				   job = submit(s, dir, way, sms, bench.other);
			   }
		   });
	finish_all();
}

static void beside_engine(beside_t &b, uint64_t bytes, bool save)
{
	void *to = save ? bench.pool2 : bench.hbm;
	const void *from = save ? bench.hbm : bench.pool;

	beside_row(b, text("the copy engine %s", save ? "saves" : "loads"), [&] {
		for (int i = 0; i < 8; i++) {
			CU(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, bench.other));
		}
	});
}

// How fast a load is with so much on its way, and what that costs.
static void beside_window(beside_t &b, shape &s, uint32_t sms, uint32_t kib)
{
	s.max_in_flight = kib << 10;
	row(
		text("zero copy load 8192 B in rows of 256 B, %u SMs, %u KiB on their way", sms, kib), "GB/s",
		"cudaMemcpyAsync, one piece", at_least(0),
		[&] { return copy_rate(s, KVK_GPU_SCATTER, KVK_GPU_ZERO_COPY, sms); },
		[&] { return memcpy_rate(bench.cache, bench.pool, s.bytes); });
	beside_copies(b, s, KVK_GPU_SCATTER, KVK_GPU_ZERO_COPY, sms);
	s.max_in_flight = 0;
}

static void rows_beside()
{
	beside_t b;
	shape s;

	b.step.open();
	CU(cudaHostAlloc((void **)&b.go, sizeof *b.go, cudaHostAllocMapped));
	CU(cudaHostAlloc((void **)&b.inputs, INPUTS * small_step::INPUT, cudaHostAllocDefault));
	make_shape(s, 8192, KVK_PAGED_KV_TOKEN_HEAD, bench.pool, true);
	prime(s);
	for (bool save : {false, true}) {
		const kvk_gpu_dir_t dir = save ? KVK_GPU_GATHER : KVK_GPU_SCATTER;

		beside_engine(b, s.bytes, save);
		for (uint32_t sms : {4u, 2u}) {
			beside_copies(b, s, dir, KVK_GPU_STAGED, sms);
			beside_copies(b, s, dir, KVK_GPU_ZERO_COPY, sms);
		}
	}
	for (uint32_t kib : {128u, 256u, 512u, 1024u}) {
		beside_window(b, s, 4, kib);
	}
	beside_window(b, s, 3, 192);
	beside_window(b, s, 8, 4096); // all that there is room for
}

#endif
