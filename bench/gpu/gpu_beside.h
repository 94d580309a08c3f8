// gpu_beside.h -- rows of what a step's small kernels, and products of matrices, take while blocks are copied; part of
// gpu_copy.cu.
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
	char *inputs;     // pinned
	int short_rounds; // the copies were over before the step
};

// Milliseconds of a step that is enqueued first, and let go when the copies are under way.
static double beside_ms(beside_t &b, background *copies)
{
	float ms;

	close_gate(gpu.stream);
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
	CU(cudaEventRecord(gpu.end_other, gpu.other));
	usleep(3000);
	*gpu.gate = 1;
	CU(cudaEventSynchronize(gpu.end));
	b.short_rounds += copies && cudaEventQuery(gpu.end_other) == cudaSuccess;
	CU(cudaEventSynchronize(gpu.end_other));
	CU(cudaEventElapsedTime(&ms, gpu.begin, gpu.end));
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
		    "ms", "alone", 0, [&] { return beside_ms(b, &copies); }, [&] { return beside_ms(b, nullptr); });
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

// ---- products of matrices ------------------------------------------------------------------------

// A product is cut into tiles, a wave of them for all SMs at a time; with some SMs taken a wave more may be needed,
// which costs a shape of few waves much and one of many waves little. So several shapes are reported, and the cost of
// SMs that do nothing beside them.

struct gemm_shape {
	int m, n, k;
	bool large; // the goals are about it
};

// What is timed: products one after another, so often.
struct gemm_work {
	std::string name;
	std::vector<gemm_shape> products;
	int times;
};

// cuBLAS, found at run time: bf16, again and again.
struct gemm {
	typedef int (*create_fn)(void **);
	typedef int (*stream_fn)(void *, cudaStream_t);
	typedef int (*gemm_fn)(void *, int, int, int, int, int, const void *, const void *, int, int, const void *, int,
			       int, const void *, void *, int, int, int, int);
	void *handle = nullptr, *a = nullptr, *b = nullptr, *c = nullptr;
	gemm_fn product = nullptr;
	gemm_work work;
	double alone = 0;

	bool open(const std::vector<gemm_work> &works)
	{
		const char *named = getenv("KVD_CUBLAS");
		void *lib = nullptr;
		size_t most = 0;

		for (const char *name : {named ? named : "libcublas.so", "libcublas.so.13", "libcublas.so.12"}) {
			lib = lib ? lib : dlopen(name, RTLD_NOW | RTLD_GLOBAL);
		}
		create_fn create = lib ? (create_fn)dlsym(lib, "cublasCreate_v2") : nullptr;
		stream_fn set_stream = lib ? (stream_fn)dlsym(lib, "cublasSetStream_v2") : nullptr;
		product = lib ? (gemm_fn)dlsym(lib, "cublasGemmEx") : nullptr;
		if (!create || !set_stream || !product || create(&handle) != 0 || set_stream(handle, gpu.stream) != 0) {
			return false;
		}
		for (const gemm_work &w : works) {
			for (const gemm_shape &s : w.products) {
				most = std::max({most, (size_t)s.m * s.k, (size_t)s.k * s.n, (size_t)s.m * s.n});
			}
		}
		for (void **m : {&a, &b, &c}) {
			std::vector<uint16_t> host(most);
			std::mt19937 rng(3);

			for (auto &x : host) { // bf16 of about -1 .. 1
				x = (uint16_t)((rng() & 0x807f) | 0x3f00);
			}
			CU(cudaMalloc(m, host.size() * 2));
			CU(cudaMemcpy(*m, host.data(), host.size() * 2, cudaMemcpyHostToDevice));
		}

		return true;
	}

	void take(const gemm_work &w)
	{
		work = w;
		run();
		alone = run();
	}

	double run()
	{
		const float one = 1, zero = 0;
		const int bf16 = 14, f32 = 68; // CUDA_R_16BF, CUBLAS_COMPUTE_32F

		return timed(gpu.stream,
			     [&] {
				     for (int i = 0; i < work.times; i++) {
					     for (const gemm_shape &s : work.products) {
						     product(handle, 1, 0, s.m, s.n, s.k, &one, a, bf16, s.k, b, bf16,
							     s.k, &zero, c, bf16, s.m, f32, -1);
					     }
				     }
			     }) /
		       work.times;
	}

	// The same while a kernel holds SMs and all of their shared memory, and moves nothing: what the missing SMs
	// cost by themselves.
	double beside_nothing(uint32_t sms)
	{
		double seconds;

		CU(cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
		close_gate(gpu.other, sms, 256, 200 << 10);
		seconds = run();
		*gpu.gate = 1;
		CU(cudaStreamSynchronize(gpu.other));

		return seconds;
	}

	// While copies that last longer than the products go on all the time; *p_rate: how fast.
	double beside_copies(background &copies, double *p_rate)
	{
		const double bytes = (double)copies.s.bytes;
		const size_t count = (size_t)(alone * work.times * 1.6 / (bytes / 45e9)) + 2;
		double seconds;
		float ms;

		CU(cudaEventRecord(gpu.begin_other, gpu.other));
		copies.start(count);
		CU(cudaEventRecord(gpu.end_other, gpu.other));
		seconds = run();
		CU(cudaEventSynchronize(gpu.end_other));
		CU(cudaEventElapsedTime(&ms, gpu.begin_other, gpu.end_other));
		*p_rate = bytes * (double)count / ms / 1e6;
		copies.end();

		return seconds;
	}
};

static void gemm_row(gemm &g, background copies, double goal)
{
	double rate = 0;

	row(
		g.work.name + " while " + copies.name(), "ms", "alone", -goal,
		[&] { return g.beside_copies(copies, &rate) * 1e3; }, [&] { return g.run() * 1e3; });
	printf("    copies went on at %.1f GB/s beside it\n", rate);
}

static void gemm_rows(gemm &g, shape &s, const gemm_work &work)
{
	const bool large = work.products[0].large;

	g.take(work);
	for (uint32_t sms : {8u, 2u}) {
		row(
			text("%s while %u SMs are busy with nothing", work.name.c_str(), sms), "ms", "alone", 0,
			[&] { return g.beside_nothing(sms) * 1e3; }, [&] { return g.run() * 1e3; });
	}
	for (bool load : {true, false}) {
		gemm_row(g, {s, {load, KVK_GPU_AUTO, 0}}, 0);
		for (uint32_t sms : {2u, 8u, 32u, 132u}) {
			gemm_row(g, {s, {load, KVK_GPU_STAGED, sms}}, large && load ? 1.02 : 0);
		}
		for (uint32_t sms : {8u, 4u, 2u}) {
			gemm_row(g, {s, {load, KVK_GPU_ZERO_COPY, sms}}, large && load && sms > 2 ? 1.07 : 0);
		}
	}
}

// How much longer large matrix products, and those of a step that decodes, take while blocks are copied all the time.
static void rows_gemm()
{
	// A layer of an 8B model, as wide as its weights, for 8 requests: each of them about one wave of all SMs.
	const gemm_work decode = {
		"decode layer, 8 requests",
		{{6144, 8, 4096, false}, {4096, 8, 4096, false}, {28672, 8, 4096, false}, {4096, 8, 14336, false}},
		240};
	std::vector<gemm_work> works = {decode};
	gemm g;
	shape s;

	for (const gemm_shape &of : {gemm_shape{8192, 8192, 8192, false}, gemm_shape{16384, 16384, 8192, true}}) {
		works.push_back({text("GEMM %dx%dx%d", of.m, of.n, of.k), {of}, 24});
	}
	if (!g.open(works)) {
		printf("slowdown of a GEMM: skipped, no cuBLAS is found (KVD_CUBLAS names it)\n");
		return;
	}
	make_shape(s, 8192, KVK_PAGED_KV_TOKEN_HEAD, gpu.pool, true);
	prime(s);
	for (const gemm_work &work : works) {
		gemm_rows(g, s, work);
	}
}

#endif
