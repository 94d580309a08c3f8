// gpu_gemm.h -- rows of matrix products that run while blocks are copied; part of gpu_copy.cu.
//
// A product is cut into tiles, a wave of them for all SMs at a time; with some SMs taken a wave more may be needed,
// which costs a shape of few waves much and one of many waves little. So several shapes are reported, the cost of SMs
// that do nothing beside them.
#ifndef GPU_GEMM_H
#define GPU_GEMM_H

#include "gpu_copy.h"

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
		int *go;
		double seconds;

		CU(cudaHostAlloc((void **)&go, sizeof *go, cudaHostAllocMapped));
		*(volatile int *)go = 0;
		CU(cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
		hold<<<sms, 256, 200 << 10, gpu.other>>>(go);
		seconds = run();
		*(volatile int *)go = 1;
		CU(cudaStreamSynchronize(gpu.other));
		CU(cudaFreeHost(go));

		return seconds;
	}

	// While copies that last longer than the products go on all the time; *p_rate: how fast.
	double beside_copies(background &copies, double *p_rate)
	{
		const double bytes = (double)copies.s.bytes;
		const size_t count = (size_t)(alone * work.times * 1.6 / (bytes / 45e9)) + 2;
		cudaEvent_t begin, end;
		double seconds;
		float ms;

		CU(cudaEventCreate(&begin));
		CU(cudaEventCreate(&end));
		CU(cudaEventRecord(begin, gpu.other));
		copies.start(count);
		CU(cudaEventRecord(end, gpu.other));
		seconds = run();
		CU(cudaEventSynchronize(end));
		CU(cudaEventElapsedTime(&ms, begin, end));
		*p_rate = bytes * (double)count / ms / 1e6;
		copies.end();
		CU(cudaEventDestroy(begin));
		CU(cudaEventDestroy(end));

		return seconds;
	}
};

static void gemm_row(gemm &g, background copies, double goal)
{
	double rate = 0;

	row(
		g.work.name + " while " + copies.name(), "ms", "alone", at_most(goal),
		[&] { return g.beside_copies(copies, &rate) * 1e3; }, [&] { return g.run() * 1e3; });
	printf("    copies went on at %.1f GB/s beside it\n", rate);
}

static void gemm_rows(gemm &g, shape &s, const gemm_work &work)
{
	const bool large = work.products[0].large;

	g.take(work);
	for (uint32_t sms : {8u, 2u}) {
		row(
			text("%s while %u SMs are busy with nothing", work.name.c_str(), sms), "ms", "alone",
			at_most(0), [&] { return g.beside_nothing(sms) * 1e3; }, [&] { return g.run() * 1e3; });
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
