// gpu_probe: how two GPUs of one machine reach each other and the host; a program of the harness (bench.h), a bench a
// family of rows.
//
// Plain copies by the copy engines, and a flag that two kernels write in each other's memory. --with mib=N: of each
// memory (384). Exit status 77: there is no second GPU, or one of the two cannot access the other one.
#include "gpu_copy.h"

// A direction: copies run on a stream of the GPU they leave.
struct lane {
	int device;
	uint8_t *dst, *src;
	cudaStream_t stream;
	cudaEvent_t begin, end;
};

static uint8_t *peer_too; // of device 1, as long as gpu.peer

static lane lane_of(int device, uint8_t *dst, uint8_t *src)
{
	lane l = {device, dst, src, nullptr, nullptr, nullptr};

	CU(cudaSetDevice(device));
	CU(cudaStreamCreateWithFlags(&l.stream, cudaStreamNonBlocking));
	CU(cudaEventCreate(&l.begin));
	CU(cudaEventCreate(&l.end));
	CU(cudaMemcpyAsync(dst, src, gpu.bytes, cudaMemcpyDefault, l.stream));
	CU(cudaStreamSynchronize(l.stream));
	CU(cudaSetDevice(0));

	return l;
}

// GB/s of all lanes together, from the first start to the end of the longest. No lane starts before all are enqueued.
static double lanes_rate(std::vector<lane> &lanes)
{
	double longest = 0;

	*gpu.gate = 0;
	for (auto &l : lanes) {
		CU(cudaSetDevice(l.device));
		hold<<<1, 1, 0, l.stream>>>(gpu.gate);
		CU(cudaEventRecord(l.begin, l.stream));
		for (int i = 0; i < BATCH; i++) {
			CU(cudaMemcpyAsync(l.dst, l.src, gpu.bytes, cudaMemcpyDefault, l.stream));
		}
		CU(cudaEventRecord(l.end, l.stream));
	}
	*gpu.gate = 1;
	for (auto &l : lanes) {
		float ms;

		CU(cudaSetDevice(l.device));
		CU(cudaEventSynchronize(l.end));
		CU(cudaEventElapsedTime(&ms, l.begin, l.end));
		longest = std::max(longest, ms / 1e3);
	}
	CU(cudaSetDevice(0));

	return (double)lanes.size() * BATCH * (double)gpu.bytes / longest / 1e9;
}

static void lanes_row(const char *name, std::vector<lane> ours, const char *reference, std::vector<lane> theirs)
{
	const side_t value_of = [&] { return lanes_rate(ours); }, reference_of = [&] { return lanes_rate(theirs); };

	row(name, "GB/s", reference, 0, value_of, reference_of);
}

static void rows_link()
{
	const lane there = lane_of(0, gpu.peer, gpu.cache), back = lane_of(1, gpu.hbm, peer_too);

	lanes_row("GPU 0 to GPU 1", {there}, "GPU 1 to GPU 0", {back});
	lanes_row("between the GPUs, both ways at once", {there, back}, "GPU 0 to GPU 1", {there});
}

static void rows_host()
{
	const lane in0 = lane_of(0, gpu.cache, gpu.pool), in1 = lane_of(1, gpu.peer, gpu.pool2);
	const lane out0 = lane_of(0, gpu.pool, gpu.cache), out1 = lane_of(1, gpu.pool2, gpu.peer);

	lanes_row("host to GPU 0", {in0}, "host to GPU 1", {in1});
	lanes_row("host to both GPUs at once", {in0, in1}, "host to GPU 0", {in0});
	lanes_row("GPU 0 to host", {out0}, "GPU 1 to host", {out1});
	lanes_row("both GPUs to host at once", {out0, out1}, "GPU 0 to host", {out0});
	lanes_row("host to GPU 0 and GPU 1 to host at once", {in0, out1}, "host to GPU 0", {in0});
}

// ---- the flag --------------------------------------------------------------------------------

#define TRIPS 2000u
#define POLLS 4000000u // of a flag, a second or more: then the other side has failed

static __device__ uint64_t now_ns()
{
	uint64_t ns;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
	return ns;
}

static __device__ bool wait_for_flag(uint64_t *flag, uint64_t wanted)
{
	uint64_t value = 0;

	for (uint32_t i = 0; i < POLLS && value < wanted; i++) {
		asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
	}

	return value >= wanted;
}

// Each side waits for a flag in its own memory and writes the one in the other side's. The one that begins measures the
// trips after the first: *p_ns is 0 when the other side did not answer.
static __global__ void exchange_flags(uint64_t *own, uint64_t *other, bool begins, uint64_t *p_ns)
{
	uint64_t start = 0;

	for (uint64_t trip = 1; trip <= TRIPS + 1; trip++) {
		if (!begins && !wait_for_flag(own, trip)) {
			return;
		}
		asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(other), "l"(trip) : "memory");
		if (begins && !wait_for_flag(own, trip)) {
			return;
		}
		start = start ? start : now_ns();
	}
	if (begins) {
		*p_ns = now_ns() - start;
	}
}

// Nanoseconds of a round trip between GPU 0 and another side, which is on `device`.
static double round_trip(int device, cudaStream_t stream)
{
	uint64_t *const first = (uint64_t *)gpu.hbm, ns = 0;
	uint64_t *const second = device ? (uint64_t *)peer_too : first + 512;
	uint64_t *const p_ns = first + 1024;

	CU(cudaMemset(first, 0, 2048 * sizeof *first));
	CU(cudaMemset(second, 0, sizeof *second));
	CU(cudaDeviceSynchronize());
	CU(cudaSetDevice(device));
	CU(cudaDeviceSynchronize());
	exchange_flags<<<1, 1, 0, stream>>>(second, first, false, nullptr);
	CU(cudaSetDevice(0));
	exchange_flags<<<1, 1, 0, gpu.stream>>>(first, second, true, p_ns);
	CU(cudaStreamSynchronize(gpu.stream));
	CU(cudaStreamSynchronize(stream));
	CU(cudaMemcpy(&ns, p_ns, sizeof ns, cudaMemcpyDefault));
	if (ns == 0) {
		printf("flag: the side on GPU %d does not answer\n", device);
		exit(1);
	}

	return (double)ns / TRIPS;
}

static void rows_flag()
{
	const lane other = lane_of(1, peer_too, gpu.peer);
	const side_t value_of = [&] { return round_trip(1, other.stream); };
	const side_t reference_of = [&] { return round_trip(0, gpu.other); };

	row("round trip of a flag between the GPUs", "ns", "between two kernels on GPU 0", 0, value_of, reference_of);
}

template <void (*rows)()> static bench_outcome_t run_pair(int)
{
	const char *why = open_gpu();
	int devices = 0, back = 0;

	if (why) {
		return bench_skip("%s", why);
	}
	CU(cudaGetDeviceCount(&devices));
	if (devices < 2) {
		return bench_skip("this machine has one GPU");
	}
	CU(cudaDeviceCanAccessPeer(&back, 1, 0));
	if (!gpu.peer || !back) {
		return bench_skip("peer access: GPU 0 to 1: %d, 1 to 0: %d", gpu.peer != nullptr, back);
	}
	if (!peer_too) {
		CU(cudaSetDevice(1));
		CU(cudaDeviceEnablePeerAccess(0, 0));
		peer_too = device_memory(1);
	}
	rows();

	return BENCH_DONE;
}

extern "C" const bench_t bench_list[] = {
	{"link", run_pair<rows_link>, 0, "plain copies between two GPUs", "one way, the other way", "none"},
	{"host", run_pair<rows_host>, 0, "plain copies between both GPUs and the host", "one GPU alone", "none"},
	{"flag", run_pair<rows_flag>, 0, "round trip of a flag between two GPUs", "inside one GPU", "none"},
	{},
};
