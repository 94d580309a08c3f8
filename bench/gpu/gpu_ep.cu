// gpu_ep: dispatch and combine between ranks on GPUs (kvk/ep_gpu.h); a program of the harness (bench.h).
//
//   right   bytes, index and sums against the twin of kernels/ep, with routings of all kinds; a difference ends the
//           program
//   link    the transport of two ranks at once, against copies of the same bytes
//   wire    bytes of rows against the driver's counters of NVLink
//   host    the same as link through host memory that the ranks share, by copies and by kernels
// With two GPUs each rank has its own; with one both lie on it. Exit status 77: there is no GPU.
#include "ep_batch.h"

// ---- ranks on GPUs ------------------------------------------------------------------------------

struct device_t {
	kvk_gpu_t *kvk;
	int ordinal;
};
static std::vector<device_t> devices;
static volatile int *gate; // pinned; 0: hold() holds its stream

static void on(const device_t &device)
{
	CU(cudaSetDevice(device.ordinal));
}

// NULL: they are there.
static const char *open_devices()
{
	const char *why = "no device";
	const kvk_cuda_ops_t *cuda = kvk_cuda_load(&why);
	int count = 0, can = 0;

	if (!devices.empty()) {
		return nullptr;
	}
	if (!cuda || cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
		return why;
	}
	if (count > 1) {
		CU(cudaDeviceCanAccessPeer(&can, 0, 1));
	}
	for (int d = 0; d < (can ? 2 : 1); d++) {
		kvk_gpu_config_t config = {};
		device_t device = {nullptr, d};

		config.cuda = cuda;
		config.device = d;
		must_kv(kvk_gpu_open(&config, &device.kvk));
		devices.push_back(device);
		if (can) { /* kvk maps heaps; this is for the copies that they are compared with */
			on(device);
			(void)cudaDeviceEnablePeerAccess(1 - d, 0);
			(void)cudaGetLastError(); // it may have it already
		}
	}
	CU(cudaHostAlloc((void **)&gate, sizeof *gate, cudaHostAllocPortable | cudaHostAllocMapped));
	printf("# %s, %zu of them\n", kvk_gpu_describe(devices[0].kvk), devices.size());

	return nullptr;
}

// Memory of one device that all map; freed by nobody.
static std::vector<void *> shared_memory(const device_t &device, size_t bytes)
{
	std::vector<void *> bases;
	kvk_device_t *opened;
	int fd;

	must_kv(kvk_device_open(kvk_cuda_load(nullptr), kvk_gpu_uuid(device.kvk), &opened));
	bytes = (bytes + kvk_device_grain(opened) - 1) / kvk_device_grain(opened) * kvk_device_grain(opened);
	must_kv(kvk_device_alloc(opened, bytes, &fd));
	kvk_device_close(opened);
	for (const device_t &d : devices) {
		void *base;

		must_kv(kvk_gpu_map(d.kvk, fd, bytes, &base));
		bases.push_back(base);
	}
	close(fd);

	return bases;
}

struct host_heap_t {
	kvk_ep_memory_t memory;
	kvk_cu_ptr_t address; // as the device of that mapping reaches it
};

// Host memory that each device has a mapping of its own of, as ranks in processes do.
static std::vector<host_heap_t> shared_host_memory(size_t bytes)
{
	std::vector<host_heap_t> heaps(devices.size());
	kvk_ep_memory_t first;
	int fd;

	must_kv(kvk_ep_memory_create(bytes, &first, &fd));
	for (size_t d = 0; d < devices.size(); d++) {
		host_heap_t &heap = heaps[d];

		must_kv(kvk_ep_memory_map(fd, bytes, &heap.memory));
		must_kv(kvk_gpu_register(devices[d].kvk, heap.memory.base, heap.memory.bytes));
		must_kv(kvk_gpu_address(devices[d].kvk, heap.memory.base, bytes, &heap.address));
	}
	kvk_ep_memory_unmap(&first);
	close(fd);

	return heaps;
}

// What a group's link is made of.
struct how_t {
	kvk_ep_link_kind_t link;
	uint32_t sms;
	uint64_t pace, timeout_us;
};

struct rank_t {
	device_t device;
	kvk_ep_gpu_t *ep;
	cudaStream_t stream;
	cudaEvent_t begin, end;
	kvk_bf16_t *rows, *outputs, *out;
	uint32_t *experts;
	float *weights;
	uint32_t tokens, most;
};

struct group_t {
	kvk_ep_plan_t plan;
	std::vector<std::vector<void *>> heaps; // [rank][device]
	std::vector<std::vector<host_heap_t>> host;
	std::vector<rank_t> ranks;

	group_t(const kvk_ep_shape_t &shape, uint32_t slots, const how_t &how);
	~group_t();
};

template <typename T> static T *device_array(size_t n)
{
	T *p;

	CU(cudaMalloc(&p, n * sizeof(T)));

	return p;
}

group_t::group_t(const kvk_ep_shape_t &shape, uint32_t slots, const how_t &how)
{
	const char *why = "";

	if (kvk_ep_plan(&shape, &plan, &why) != KV_OK) {
		printf("no such plan: %s\n", why);
		exit(1);
	}
	for (uint32_t r = 0; r < shape.ranks; r++) {
		if (how.link == KVK_EP_PEER) {
			heaps.push_back(shared_memory(devices[r % devices.size()], plan.heap_bytes));
		} else {
			host.push_back(shared_host_memory(plan.heap_bytes));
		}
	}
	for (uint32_t r = 0; r < shape.ranks; r++) {
		const size_t rows = (size_t)slots * shape.max_tokens, at = r % devices.size();
		kvk_cu_ptr_t bases[KVK_EP_MAX_RANKS] = {};
		kvk_ep_gpu_config_t config = {};
		rank_t rank = {};

		rank.device = devices[at];
		on(rank.device);
		for (uint32_t other = 0; other < shape.ranks; other++) {
			bases[other] = how.link == KVK_EP_PEER ? (kvk_cu_ptr_t)heaps[other][at] : host[other][at].address;
		}
		config.gpu = rank.device.kvk;
		config.plan = &plan;
		config.heaps = bases;
		config.rank = r;
		config.link = how.link;
		config.sms = how.sms;
		config.pace = how.pace;
		config.timeout_us = how.timeout_us;
		must_kv(kvk_ep_gpu_open(&config, &rank.ep));
		CU(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
		CU(cudaEventCreate(&rank.begin));
		CU(cudaEventCreate(&rank.end));
		rank.rows = device_array<kvk_bf16_t>(rows * shape.hidden);
		rank.out = device_array<kvk_bf16_t>(rows * shape.hidden);
		rank.outputs = device_array<kvk_bf16_t>((size_t)plan.max_rows * shape.hidden);
		rank.experts = device_array<uint32_t>(rows * shape.top_k);
		rank.weights = device_array<float>(rows * shape.top_k);
		ranks.push_back(rank);
	}
}

group_t::~group_t()
{
	for (rank_t &rank : ranks) {
		on(rank.device);
		CU(cudaDeviceSynchronize());
		kvk_ep_gpu_close(rank.ep);
		CU(cudaStreamDestroy(rank.stream));
		for (void *p : {(void *)rank.rows, (void *)rank.out, (void *)rank.outputs, (void *)rank.experts, (void *)rank.weights}) {
			CU(cudaFree(p));
		}
	}
	for (const auto &bases : heaps) {
		for (size_t d = 0; d < devices.size(); d++) {
			kvk_gpu_unmap(devices[d].kvk, bases[d]);
		}
	}
	for (auto &of_rank : host) {
		for (size_t d = 0; d < devices.size(); d++) {
			kvk_gpu_unregister(devices[d].kvk, of_rank[d].memory.base);
			kvk_ep_memory_unmap(&of_rank[d].memory);
		}
	}
}

// Slot 0 or 1 of a rank's arrays.
static kvk_ep_tokens_t tokens_of(const group_t &g, const rank_t &rank, uint32_t slot)
{
	const kvk_ep_shape_t &s = g.plan.shape;
	const size_t first = (size_t)slot * s.max_tokens;

	return {rank.tokens, rank.most, rank.rows + first * s.hidden, rank.experts + first * s.top_k, rank.weights + first * s.top_k};
}

// ---- right --------------------------------------------------------------------------------------

static void must_equal(const void *expected, const void *device, size_t bytes, const char *what)
{
	std::vector<uint8_t> seen(bytes);

	CU(cudaMemcpy(seen.data(), device, bytes, cudaMemcpyDefault));
	for (size_t i = 0; i < bytes; i++) {
		if (seen[i] != ((const uint8_t *)expected)[i]) {
			printf("gpu_ep: %s differs from the twin's at byte %zu of %zu\n", what, i, bytes);
			exit(1);
		}
	}
}

static void send_batch(group_t &g, uint32_t r, uint32_t slot, const batch_t &b)
{
	rank_t &rank = g.ranks[r];
	uint64_t number;

	on(rank.device);
	rank.tokens = b.n;
	rank.most = b.most;
	const kvk_ep_tokens_t tokens = tokens_of(g, rank, slot);
	CU(cudaMemcpyAsync((void *)tokens.rows, b.rows.data(), b.rows.size() * 2, cudaMemcpyDefault, rank.stream));
	CU(cudaMemcpyAsync((void *)tokens.experts, b.experts.data(), b.experts.size() * 4, cudaMemcpyDefault, rank.stream));
	CU(cudaMemcpyAsync((void *)tokens.weights, b.weights.data(), b.weights.size() * 4, cudaMemcpyDefault, rank.stream));
	must_kv(kvk_ep_gpu_dispatch_send(rank.ep, &tokens, (kvk_cu_stream_t)rank.stream, &number));
}

static void wait_for_all(group_t &g)
{
	for (rank_t &rank : g.ranks) {
		on(rank.device);
		CU(cudaStreamSynchronize(rank.stream));
	}
}

// Two numbers in flight: both are sent before the first is received.
static void check_pair(group_t &g, twins_t &twins, uint64_t first)
{
	const kvk_ep_shape_t &s = g.plan.shape;
	std::vector<batch_t> batches[2];
	std::vector<kvk_ep_gpu_rows_t> rows(s.ranks);

	for (uint32_t slot = 0; slot < 2; slot++) {
		const routing how = (routing)below(ROUTINGS);
		const uint32_t most = draw_most(s);

		for (uint32_t r = 0; r < s.ranks; r++) {
			batches[slot].push_back(make_batch(s, r, how, most));
			send_batch(g, r, slot, batches[slot][r]);
		}
	}
	for (uint32_t slot = 0; slot < 2; slot++) {
		uint64_t number = 0;

		for (uint32_t r = 0; r < s.ranks; r++) {
			must_kv(kvk_ep_gpu_dispatch_recv(g.ranks[r].ep, first + slot, (kvk_cu_stream_t)g.ranks[r].stream, &rows[r]));
		}
		wait_for_all(g);
		twins.dispatch(batches[slot], &number);
		for (uint32_t r = 0; r < s.ranks; r++) {
			rank_t &rank = g.ranks[r];

			must_equal(twins.rows[r].first, (const void *)rows[r].first, (g.plan.rank_experts + 1) * 4, "the first row of each expert");
			must_equal(twins.rows[r].record, (const void *)rows[r].record, twins.rows[r].n * 4u, "the record of each row");
			on(rank.device);
			run_experts<<<64, 128, 0, rank.stream>>>(g.plan, r, rows[r], rank.outputs);
			must_kv(kvk_ep_gpu_reduce(rank.ep, first + slot, (kvk_cu_ptr_t)rank.outputs, (kvk_cu_stream_t)rank.stream));
			must_kv(kvk_ep_gpu_combine_send(rank.ep, first + slot, (kvk_cu_stream_t)rank.stream));
		}
		for (uint32_t r = 0; r < s.ranks; r++) {
			must_kv(kvk_ep_gpu_combine_recv(g.ranks[r].ep, first + slot, (kvk_cu_ptr_t)g.ranks[r].out,
							(kvk_cu_stream_t)g.ranks[r].stream));
		}
		wait_for_all(g);
		twins.combine(batches[slot], number);
		for (uint32_t r = 0; r < s.ranks; r++) {
			must_equal(twins.out[r].data(), g.ranks[r].out, batches[slot][r].rows.size() * 2, "a combined row");
		}
	}
}

static void check_group(const kvk_ep_shape_t &shape, uint32_t pairs, kvk_ep_link_kind_t link)
{
	group_t g(shape, 2, {link, below(3) ? 8 : 1 + below(16), below(2) ? 10000000000u : 0, 0});
	twins_t twins(g.plan, link);

	for (uint32_t pair = 0; pair < pairs; pair++) {
		check_pair(g, twins, 1 + 2 * pair);
	}
	for (uint32_t r = 0; r < shape.ranks; r++) {
		const kvk_ep_stats_t stats = kvk_ep_get_stats(twins.ranks[r]);
		kvk_ep_gpu_report_t report;

		must_kv(kvk_ep_gpu_check(g.ranks[r].ep, &report));
		if (memcmp(&stats, &report.stats, sizeof stats) != 0) {
			printf("gpu_ep: rank %u has sent %llu + %llu bytes and %llu + %llu of padding, the twin %llu + %llu and %llu + %llu\n", r,
			       (unsigned long long)report.stats.dispatch_bytes, (unsigned long long)report.stats.combine_bytes,
			       (unsigned long long)report.stats.dispatch_padding, (unsigned long long)report.stats.combine_padding,
			       (unsigned long long)stats.dispatch_bytes, (unsigned long long)stats.combine_bytes,
			       (unsigned long long)stats.dispatch_padding, (unsigned long long)stats.combine_padding);
			exit(1);
		}
	}
}

// A rank that never comes is named by all others, and nothing hangs.
static void check_lost_rank(kvk_ep_link_kind_t link)
{
	const kvk_ep_shape_t shape = {3, 6, 2, 64, 16, 3, 2};
	group_t g(shape, 2, {link, 2, 0, 100000});
	kvk_ep_gpu_rows_t rows;

	for (uint32_t r = 0; r < 2; r++) {
		send_batch(g, r, 0, make_batch(shape, r, RANDOM, 0));
		must_kv(kvk_ep_gpu_dispatch_recv(g.ranks[r].ep, 1, (kvk_cu_stream_t)g.ranks[r].stream, &rows));
	}
	wait_for_all(g);
	for (uint32_t r = 0; r < 2; r++) {
		kvk_ep_gpu_report_t report;

		if (kvk_ep_gpu_check(g.ranks[r].ep, &report) != KV_ERR_TIMEOUT || report.lost != 4) {
			printf("gpu_ep: rank %u names %x as lost, where rank 2 is\n", r, report.lost);
			exit(1);
		}
	}
}

static bench_outcome_t run_right(int)
{
	const uint32_t groups = bench_quick() ? 12 : 60;
	const uint64_t seed = bench_param_size("seed", 4711);
	const char *why = open_devices();

	if (why) {
		return bench_skip("%s", why);
	}
	printf("# seed %llu\n", (unsigned long long)seed);
	rng.seed(seed);
	for (uint32_t i = 0; i < groups; i++) {
		const bool in_pieces = i % 10 == 9; // copies so large that what has come is used while the rest comes
		kvk_ep_shape_t s = {};

		s.ranks = 1u << (in_pieces ? 1 : below(3));
		s.groups = s.ranks << below(2);
		s.experts = s.groups * (1 + below(20));
		s.top_k = 1 + below(std::min(s.experts, 16u));
		s.hidden = in_pieces ? 4096 : 8 * (1 + below(i % 5 == 0 ? 900 : 40));
		s.max_tokens = in_pieces ? 300 : 1 + below(i % 7 == 0 ? 700 : 90);
		s.in_flight = 2 + below(2);
		check_group(s, 3, in_pieces ? KVK_EP_HOST_COPIES : (kvk_ep_link_kind_t)below(3));
	}
	for (const kvk_ep_link_kind_t link : {KVK_EP_PEER, KVK_EP_HOST_COPIES, KVK_EP_HOST_KERNELS}) {
		check_lost_rank(link);
	}
	printf("gpu_ep: %u groups of ranks, 6 dispatches each: index, sums and bytes are the twin's; a lost rank is named\n", groups);

	return BENCH_DONE;
}

// ---- link ---------------------------------------------------------------------------------------

static __global__ void hold_at(volatile int *gate)
{
	while (*gate == 0) {
	}
}

#include "cuda/device/bulk.cuh"

// Pieces of 4 KiB through a ring in shared memory: as fast as this many SMs copy.
static __global__ void __launch_bounds__(256) copy_ring(uint8_t *to, const uint8_t *from, uint32_t pieces)
{
	enum { STAGES = 6, PIECE = 4096 };
	extern __shared__ uint4 memory[];
	__shared__ uint64_t full[8][STAGES];
	const uint32_t warp = threadIdx.x / 32, step = gridDim.x * 8;
	uint8_t *stages = (uint8_t *)memory + warp * STAGES * PIECE;
	uint32_t loaded = 0, next = blockIdx.x * 8 + warp;

	if (threadIdx.x % 32 != 0) {
		return;
	}
	for (int i = 0; i < STAGES; i++) {
		barrier_init(&full[warp][i], 1);
	}
	barrier_init_done();
	uint32_t sent = 0;
	for (uint32_t p = next; p < pieces; p += step) {
		for (; next < pieces && loaded <= sent + STAGES / 2; next += step, loaded++) {
			bulk_stores_read<(STAGES - 1) / 2>();
			barrier_expect(&full[warp][loaded % STAGES], PIECE);
			bulk_load(stages + loaded % STAGES * PIECE, (uint64_t)(from + (size_t)next * PIECE), PIECE, &full[warp][loaded % STAGES]);
		}
		barrier_wait(&full[warp][sent % STAGES], sent / STAGES % 2);
		bulk_store((uint64_t)(to + (size_t)p * PIECE), stages + sent % STAGES * PIECE, PIECE);
		sent++;
	}
	bulk_stores_done();
}

static size_t index_of(const group_t &g, const rank_t &rank)
{
	return (size_t)(&rank - g.ranks.data());
}

// From the opening of the gate to the end of the slower rank, seconds.
static double together(group_t &g, const std::function<void(rank_t &)> &enqueue)
{
	double longest = 0;

	*gate = 0;
	for (rank_t &rank : g.ranks) {
		on(rank.device);
		hold_at<<<1, 1, 0, rank.stream>>>(gate);
		CU(cudaEventRecord(rank.begin, rank.stream));
		enqueue(rank);
		CU(cudaEventRecord(rank.end, rank.stream));
	}
	*gate = 1;
	for (rank_t &rank : g.ranks) {
		float ms;

		on(rank.device);
		CU(cudaEventSynchronize(rank.end));
		CU(cudaEventElapsedTime(&ms, rank.begin, rank.end));
		longest = std::max(longest, ms / 1e3);
	}

	return longest;
}

static double median(std::vector<double> values)
{
	std::sort(values.begin(), values.end());

	return values[values.size() / 2];
}

enum { PUSH, INDEX, REDUCE, RETURN, SUM, PARTS };

static void enqueue_part(const group_t &g, rank_t &rank, int part, uint64_t number)
{
	const kvk_cu_stream_t stream = (kvk_cu_stream_t)rank.stream;
	const kvk_ep_tokens_t tokens = tokens_of(g, rank, 0);
	kvk_ep_gpu_rows_t rows;
	uint64_t n;

	must_kv(part == PUSH     ? kvk_ep_gpu_dispatch_send(rank.ep, &tokens, stream, &n)
		: part == INDEX  ? kvk_ep_gpu_dispatch_recv(rank.ep, number, stream, &rows)
		: part == REDUCE ? kvk_ep_gpu_reduce(rank.ep, number, (kvk_cu_ptr_t)rank.outputs, stream)
		: part == RETURN ? kvk_ep_gpu_combine_send(rank.ep, number, stream)
				 : kvk_ep_gpu_combine_recv(rank.ep, number, (kvk_cu_ptr_t)rank.out, stream));
}

// A dispatch and its combine, part by part or in one.
struct parts_t {
	group_t &g;
	std::vector<double> us[PARTS];
	uint64_t number = 0;

	// Seconds of the parts that count (a bit each).
	double run(uint32_t counted)
	{
		double sum = 0;

		number++;
		for (int part = 0; part < PARTS; part++) {
			const double seconds = together(g, [&](rank_t &rank) { enqueue_part(g, rank, part, number); });

			us[part].push_back(seconds * 1e6);
			sum += counted >> part & 1 ? seconds : 0;
		}
		return sum;
	}

	double run_whole()
	{
		number++;
		return together(g, [&](rank_t &rank) {
			for (int part = 0; part < PARTS; part++) {
				enqueue_part(g, rank, part, number);
			}
		});
	}

	// `bytes`: of a rank.
	void print(uint64_t bytes)
	{
		kvk_ep_gpu_report_t report;

		must_kv(kvk_ep_gpu_check(g.ranks[0].ep, &report));
		const kvk_ep_stats_t &sent = report.stats;
		printf("# us, medians: push %.1f, wait (and fetch) and index %.1f, reduce %.1f, return %.1f, wait (and fetch) and sum %.1f; %.1f MB a rank, padding %.2f %%\n",
		       median(us[PUSH]), median(us[INDEX]), median(us[REDUCE]), median(us[RETURN]), median(us[SUM]), (double)bytes / 1e6,
		       100.0 * (double)(sent.dispatch_padding + sent.combine_padding) / (double)(sent.dispatch_bytes + sent.combine_bytes));
	}
};

static void fill(group_t &g, uint32_t tokens)
{
	for (uint32_t r = 0; r < g.plan.shape.ranks; r++) {
		rank_t &rank = g.ranks[r];
		batch_t b;

		do {
			b = make_batch(g.plan.shape, r, RANDOM, tokens);
		} while (b.n != tokens);
		on(rank.device);
		rank.tokens = rank.most = b.n;
		CU(cudaMemcpy(rank.rows, b.rows.data(), b.rows.size() * 2, cudaMemcpyDefault));
		CU(cudaMemcpy(rank.experts, b.experts.data(), b.experts.size() * 4, cudaMemcpyDefault));
		CU(cudaMemcpy(rank.weights, b.weights.data(), b.weights.size() * 4, cudaMemcpyDefault));
		CU(cudaMemset(rank.outputs, 0x3f, (size_t)g.plan.max_rows * g.plan.row_bytes));
	}
}

// Bytes that a rank sends in a dispatch and its combine, and that one reads of its own memory to reduce; of the larger.
static uint64_t wire_bytes(group_t &g)
{
	uint64_t most = 0;

	for (rank_t &rank : g.ranks) {
		kvk_ep_gpu_report_t report;

		must_kv(kvk_ep_gpu_check(rank.ep, &report));
		most = std::max(most, report.stats.dispatch_bytes + report.stats.combine_bytes);
	}

	return most;
}

static void link_rows(uint32_t hidden, uint32_t sms)
{
	const uint32_t tokens = (uint32_t)bench_param_size("tokens", 4096); // a rank, up to 4,096
	const kvk_ep_shape_t shape = {2, 128, 8, hidden, 4096, 2, 1};
	const bool two = devices.size() > 1;
	group_t g(shape, 1, {KVK_EP_PEER, sms, 0, 0});
	parts_t parts = {g, {}, 0};

	for (const device_t &device : devices) {
		on(device);
		CU(cudaFuncSetAttribute(copy_ring, cudaFuncAttributeMaxDynamicSharedMemorySize, 8 * 6 * 4096));
	}
	fill(g, std::min(tokens, shape.max_tokens));
	(void)parts.run(0);
	const uint64_t bytes = wire_bytes(g);
	const uint32_t pieces = (uint32_t)(bytes / 4096);
	std::vector<uint8_t *> from, to;
	for (uint32_t r = 0; r < 2; r++) {
		on(g.ranks[r].device);
		from.push_back(device_array<uint8_t>(bytes));
		to.push_back(device_array<uint8_t>(bytes));
	}
	const auto rate = [&](double seconds) { return (double)bytes / seconds / 1e9; };
	const side_t moves = [&] { return rate(parts.run(1u << PUSH | 1u << RETURN)); };
	const side_t whole = [&] { return rate(parts.run_whole()); };
	const side_t ring = [&] {
		return rate(together(g, [&](rank_t &rank) {
			const size_t r = index_of(g, rank);

			copy_ring<<<sms, 256, 8 * 6 * 4096, rank.stream>>>(to[1 - r], from[r], pieces);
		}));
	};
	const side_t engines = [&] {
		return rate(together(g, [&](rank_t &rank) {
			const size_t r = index_of(g, rank);

			CU(cudaMemcpyPeerAsync(to[1 - r], g.ranks[1 - r].device.ordinal, from[r], rank.device.ordinal, (size_t)pieces * 4096, rank.stream));
		}));
	};
	const std::string what = text("%s, H %u, %u SMs, %u tokens a rank", two ? "NVLink" : "two ranks on one GPU", hidden, sms, tokens);

	row(what + ": rows dispatched and returned", "GB/s", two ? "pairwise cudaMemcpyPeerAsync, both ways" : "bulk-copy ring, same bytes and SMs", 0.85, moves,
	    two ? engines : ring);
	row(what + ": with index, reduction and sums", "GB/s", "bulk-copy ring, same bytes and SMs", 0, whole, ring);
	parts.print(bytes);
	for (uint32_t r = 0; r < 2; r++) {
		CU(cudaFree(from[r]));
		CU(cudaFree(to[r]));
	}
}

static bench_outcome_t run_link(int)
{
	const char *why = open_devices();

	if (why) {
		return bench_skip("%s", why);
	}
	rng.seed(7);
	for (const uint32_t hidden : {2048u, 7168u}) {
		for (const uint32_t sms : {8u, 16u}) {
			link_rows(hidden, sms);
		}
	}

	return BENCH_DONE;
}

// ---- host ---------------------------------------------------------------------------------------

// Bytes of rank r's own host memory, out and in, one after the other as a dispatch and its combine need them.
struct bare_t {
	uint8_t *device, *host;
};

static void copy_bare(rank_t &rank, const bare_t &bare, uint64_t bytes, bool both)
{
	CU(cudaMemcpyAsync(bare.host, bare.device, bytes, cudaMemcpyDeviceToHost, rank.stream));
	if (both) {
		CU(cudaMemcpyAsync(bare.device, bare.host, bytes, cudaMemcpyHostToDevice, rank.stream));
	}
}

static std::vector<bare_t> open_bare(group_t &g, uint64_t bytes)
{
	std::vector<bare_t> all;

	for (rank_t &rank : g.ranks) {
		bare_t bare = {};

		on(rank.device);
		bare.device = device_array<uint8_t>(bytes);
		CU(cudaHostAlloc((void **)&bare.host, bytes, cudaHostAllocPortable));
		all.push_back(bare);
	}

	return all;
}

// Out, then in, of a dispatch and of a combine. Copies of one rank out and of the other in run at the same time, as
// those do that they are compared with: parts one by one would not.
static void host_rows(const how_t &how, uint32_t tokens, double goal, const char *name, double *p_out)
{
	const kvk_ep_shape_t shape = {2, 128, 8, 2048, 4096, 2, 1};
	group_t g(shape, 1, how);
	parts_t parts = {g, {}, 0};

	fill(g, tokens);
	for (int i = 0; i < 3; i++) {
		(void)parts.run(0);
	}
	const uint64_t bytes = wire_bytes(g) / 3;
	const std::vector<bare_t> bare = open_bare(g, bytes);
	const auto bare_of = [&](const rank_t &rank) { return bare[index_of(g, rank)]; };
	const side_t moves = [&] { return (double)bytes / parts.run_whole() / 1e9; };
	const side_t copies = [&] {
		return (double)bytes / together(g, [&](rank_t &rank) {
			       copy_bare(rank, bare_of(rank), bytes / 2, true);
			       copy_bare(rank, bare_of(rank), bytes / 2, true);
		       }) / 1e9;
	};

	row(text("through host memory, H 2,048, %u of 4,096 tokens a rank, %s: dispatched and combined", tokens, name), "GB/s",
	    "cudaMemcpyAsync of the bytes out of both ranks, then in", goal, moves, copies);
	*p_out = (double)bytes / together(g, [&](rank_t &rank) { copy_bare(rank, bare_of(rank), bytes, false); });
	parts.print(bytes);
	for (const bare_t &b : bare) {
		CU(cudaFree(b.device));
		CU(cudaFreeHost(b.host));
	}
}

static bench_outcome_t run_host(int)
{
	const char *why = open_devices();
	double out = 0;

	if (why) {
		return bench_skip("%s", why);
	}
	rng.seed(7);
	host_rows({KVK_EP_HOST_COPIES, 8, 0, 0}, 4096, 0.92, "the copy engine", &out);
	host_rows({KVK_EP_HOST_COPIES, 8, 0, 0}, 2048, 0, "the copy engine", &out);
	host_rows({KVK_EP_HOST_KERNELS, 8, 0, 0}, 4096, 0.92, "8 SMs, no pace", &out);
	host_rows({KVK_EP_HOST_KERNELS, 8, (uint64_t)(0.85 * out), 0}, 4096, 0, "8 SMs at 0.85 of the link", &out);

	return BENCH_DONE;
}

// ---- wire ---------------------------------------------------------------------------------------

// Bytes of data that a GPU has sent over all its NVLinks, as the driver counts; 0: it does not say.
static uint64_t nvlink_sent(int gpu)
{
	const std::string command = "nvidia-smi nvlink -gt d -i " + std::to_string(gpu) + " 2>/dev/null";
	FILE *file = popen(command.c_str(), "r");
	char line[256];
	uint64_t kib = 0;

	while (file && fgets(line, sizeof line, file)) {
		const char *at = strstr(line, "Tx");
		unsigned long long n;

		if (at && sscanf(at, "Tx%*[^0-9]%llu KiB", &n) == 1) {
			kib += n;
		}
	}
	if (file) {
		pclose(file);
	}

	return kib * 1024;
}

// What the driver's counters have moved by, against the bytes of the routing: an all-gather would be twice as many, and
// tokens once for each of their experts four times.
static bench_outcome_t run_wire(int)
{
	const kvk_ep_shape_t shape = {2, 128, 8, 2048, 4096, 2, 1};
	const uint32_t steps = bench_quick() ? 100 : 1000;
	const char *why = open_devices();

	if (why || devices.size() < 2) {
		return bench_skip("%s", why ? why : "one GPU has no link to another");
	}
	if (nvlink_sent(devices[0].ordinal) == 0) {
		return bench_skip("the driver does not say what NVLink has carried");
	}
	rng.seed(7);
	group_t g(shape, 1, {KVK_EP_PEER, 8, 0, 0});
	parts_t parts = {g, {}, 0};
	fill(g, shape.max_tokens);
	(void)parts.run(0);
	const double bytes = (double)wire_bytes(g) * steps;
	row("NVLink, H 2,048, 4,096 tokens a rank: rows' bytes of what GPU 0 has sent by the driver's counters", "GB", "the counters", 0.9, [&] { return bytes / 1e9; },
	    [&] {
		    const uint64_t before = nvlink_sent(devices[0].ordinal);

		    for (uint32_t i = 0; i < steps; i++) {
			    (void)parts.run_whole();
		    }
		    return (double)(nvlink_sent(devices[0].ordinal) - before) / 1e9;
	    });

	return BENCH_DONE;
}

extern "C" const bench_t bench_list[] = {
	{"right", run_right, 0, "dispatch and combine on GPUs, byte by byte", "the twin on the CPU", "equal"},
	{"link", run_link, 0, "dispatch and combine of two ranks", "copies of the same bytes", "rows moved: ratio >= 0.85"},
	{"wire", run_wire, 0, "bytes of dispatch and combine over NVLink", "the driver's counters", "ratio >= 0.9"},
	{"host", run_host, 0, "dispatch and combine of two ranks through host memory", "copies of the same bytes", "ratio >= 0.92"},
	{},
};
