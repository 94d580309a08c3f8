// gpu_copy: how fast kvd's copies are between a paged cache in a GPU and blocks in host memory, in its own memory and
// in a peer's; a program of the harness (bench.h), a bench a family of rows.
//
// Digests are made and compared unless a row says otherwise. --with mib=N: of each memory (384). Exit status 77: there
// is no device.
#include "gpu_beside.h"

static void rows_link()
{
	const struct {
		uint32_t fragment, sms;
		double in, out;
	} cases[] = {{1024, 4, 0, 0}, {1024, 8, 0, 0},        {1024, 16, 0.84, 0.84},
		     {4096, 4, 0, 0}, {4096, 8, 0.92, 0.945}, {8192, 2, 0, 0},
		     {8192, 4, 0, 0}, {8192, 8, 0.92, 0.945}, {16384, 8, 0.92, 0.945}};

	for (const auto &c : cases) {
		shape s;

		make_shape(s, c.fragment, KVK_PAGED_KV_TOKEN_HEAD, gpu.pool, true);
		prime(s);
		for (bool load : {true, false}) {
			copy_row(text("zero copy %s %u B in rows of 256 B, %u SMs", load ? "load" : "store", c.fragment,
				      c.sms),
				 s, gpu.pool, {load, KVK_GPU_ZERO_COPY, c.sms}, ONE_PIECE, load ? c.in : c.out);
		}
	}
}

// Loads and stores of different halves at the same time, on two streams: bytes of both over the time of the longer.
static double both_rate(shape &in, how in_how, shape &out, how out_how)
{
	kvk_gpu_job_t *jobs[2 * BATCH];
	const double seconds = timed_both([&] {
		for (int i = 0; i < BATCH; i++) {
			jobs[2 * i] = submit(in, in_how, gpu.stream);
			jobs[2 * i + 1] = submit(out, out_how, gpu.other);
		}
	});

	for (auto job : jobs) {
		finish(job);
	}

	return (double)(in.bytes + out.bytes) * BATCH / seconds / 1e9;
}

static double both_memcpy(uint64_t bytes)
{
	const double seconds = timed_both([&] {
		for (int i = 0; i < BATCH; i++) {
			CU(cudaMemcpyAsync(gpu.cache, gpu.pool, bytes, cudaMemcpyDefault, gpu.stream));
			CU(cudaMemcpyAsync(gpu.pool2, gpu.hbm, bytes, cudaMemcpyDefault, gpu.other));
		}
	});

	return 2.0 * (double)bytes * BATCH / seconds / 1e9;
}

static void rows_both()
{
	shape in, out;
	uint8_t *cache = gpu.cache;

	make_shape(in, 8192, KVK_PAGED_KV_TOKEN_HEAD, gpu.pool, true);
	prime(in);
	gpu.cache = gpu.hbm;
	make_shape(out, 8192, KVK_PAGED_KV_TOKEN_HEAD, gpu.pool2, true);
	gpu.cache = cache;
	const struct {
		kvk_gpu_way_t way;
		uint32_t in, out;
		double goal;
	} cases[] = {{KVK_GPU_ZERO_COPY, 8, 8, 0},
		     {KVK_GPU_ZERO_COPY, 4, 4, 0},
		     {KVK_GPU_ZERO_COPY, 8, 2, 0},
		     {KVK_GPU_STAGED, 4, 4, 0.9}};

	for (const auto &c : cases) {
		const char *way = c.way == KVK_GPU_STAGED ? "staged" : "zero copy";
		const auto ours = [&] { return both_rate(in, {true, c.way, c.in}, out, {false, c.way, c.out}); };

		row(text("both ways at once, %s, 8192 B, %u + %u SMs", way, c.in, c.out), "GB/s",
		    "cudaMemcpyAsync both ways", c.goal, ours, [&] { return both_memcpy(in.bytes); });
	}
}

// The pieces of a head-major cache, which are contiguous on both sides: what a rival can copy with one call a piece.
struct pieces {
	std::vector<void *> dst;
	std::vector<void *> src;
	std::vector<size_t> sizes;
	uint64_t bytes = 0;
};

static const size_t MOST_PIECES = 4096; // of a sample

static pieces make_pieces(const shape &s, uint32_t fragment, uint32_t heads_together, bool load)
{
	const uint64_t page = fragment;
	pieces p;

	for (const auto &move : s.moves) {
		for (uint32_t layer = 0; layer < LAYERS; layer++) {
			for (uint32_t head = 0; head < HEADS && p.dst.size() < MOST_PIECES; head += heads_together) {
				uint8_t *cache =
					(uint8_t *)s.base[layer] + (move.block * (uint64_t)HEADS + head) * page;
				uint8_t *pool = (uint8_t *)move.data +
						((uint64_t)head * LAYERS + layer * heads_together) * page;

				p.dst.push_back(load ? cache : pool);
				p.src.push_back(load ? pool : cache);
				p.sizes.push_back(page * heads_together);
				p.bytes += page * heads_together;
			}
		}
	}

	return p;
}

static double loop_rate(pieces &p)
{
	const double seconds = timed(gpu.stream, [&] {
		for (size_t i = 0; i < p.dst.size(); i++) {
			CU(cudaMemcpyAsync(p.dst[i], p.src[i], p.sizes[i], cudaMemcpyDefault, gpu.stream));
		}
	});

	return (double)p.bytes / seconds / 1e9;
}

static double batch_rate(pieces &p)
{
	cudaMemcpyAttributes attributes = {};
	size_t from = 0;

	attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
	const double seconds = timed(gpu.stream, [&] {
		CU(cudaMemcpyBatchAsync(p.dst.data(), p.src.data(), p.sizes.data(), p.dst.size(), &attributes, &from, 1,
					gpu.stream));
	});

	return (double)p.bytes / seconds / 1e9;
}

static void rows_rivals()
{
	for (uint32_t fragment : {4096u, 8192u, 16384u, 24576u, 65536u}) {
		for (bool load : {true, false}) {
			const std::string name = text("%s %u B pieces, 8 SMs", load ? "load" : "store", fragment);
			const double goal = fragment <= 24576 ? 3 : 1;
			shape s;

			make_shape(s, fragment, KVK_PAGED_HEAD_TOKEN_KV, gpu.pool, true);
			prime(s);
			pieces p = make_pieces(s, fragment, 1, load);
			const auto ours = [&] { return copy_rate(s, {load, KVK_GPU_AUTO, 8}); };

			row(name, "GB/s", "cudaMemcpyAsync a piece", goal, ours, [&] { return loop_rate(p); });
			row(name, "GB/s", "cudaMemcpyBatchAsync", goal, ours, [&] { return batch_rate(p); });
		}
	}
	// 16 tokens of all heads of a layer, as in vLLM's native offload: layer by layer.
	for (bool load : {true, false}) {
		shape s;

		make_shape(s, 8192, KVK_PAGED_HEAD_TOKEN_KV, gpu.pool, true);
		prime(s);
		pieces p = make_pieces(s, 8192, HEADS, load);
		const auto ours = [&] { return copy_rate(s, {load, KVK_GPU_AUTO, 8}); };

		row(text("%s 2 MiB blocks, 8 SMs", load ? "load" : "store"), "GB/s",
		    "swap_blocks like vLLM's, 64 KiB a call", 1, ours, [&] { return loop_rate(p); });
	}
}

// Of 1.25 GiB, a prompt of 10,240 tokens: less is over before a launch counts for nothing.
static void rows_hbm()
{
	const gpu_t before = gpu;
	const struct {
		const char *name;
		kvk_paged_kind_t kind;
		uint32_t ranks;
	} cases[] = {{"NHD <-> blocks", KVK_PAGED_KV_TOKEN_HEAD, 1},
		     {"HND <-> blocks", KVK_PAGED_KV_HEAD_TOKEN, 1},
		     {"tensor parallel 2 of 8 heads, NHD", KVK_PAGED_KV_TOKEN_HEAD, 4}};

	gpu.bytes = 1280u << 20;
	CU(cudaMalloc(&gpu.cache, gpu.bytes));
	CU(cudaMalloc(&gpu.hbm, 4 * gpu.bytes));
	for (uint64_t at = 0; at < 4 * gpu.bytes; at += before.bytes) {
		CU(cudaMemcpy(gpu.hbm + at, before.pool, std::min(before.bytes, 4 * gpu.bytes - at),
			      cudaMemcpyDefault));
	}
	for (const auto &c : cases) {
		for (bool digests : {true, false}) {
			shape s;

			make_shape(s, 8192, c.kind, gpu.hbm, digests, {c.ranks, false});
			prime(s);
			for (bool load : {true, false}) {
				copy_row(text("inside one GPU, %s %s, digests %s, all SMs", c.name, load ? "in" : "out",
					      digests ? "on" : "off"),
					 s, gpu.hbm, {load, KVK_GPU_ZERO_COPY, 1024}, "cudaMemcpyAsync inside", 0.9);
			}
		}
	}
	CU(cudaFree(gpu.cache));
	CU(cudaFree(gpu.hbm));
	gpu = before;
}

// Blocks of 2 MiB of an 8B model in mapped memory of a device: a whole cache of either order, and what a rank of 8
// saves and a rank of 2 loads. By as many SMs as kvd takes (0), a few, and all. `plain`: other memory of that device.
static void rows_of_mapped(uint32_t ordinal, uint8_t *plain)
{
	const struct {
		const char *name;
		kvk_paged_kind_t kind;
		uint32_t ranks;
	} cases[] = {{"NHD <-> blocks", KVK_PAGED_KV_TOKEN_HEAD, 1},
		     {"HND <-> blocks", KVK_PAGED_KV_HEAD_TOKEN, 1},
		     {"rank of 8, 1 of 8 heads, NHD", KVK_PAGED_KV_TOKEN_HEAD, 8},
		     {"rank of 2, 4 of 8 heads, NHD", KVK_PAGED_KV_TOKEN_HEAD, 2}};
	uint8_t *pool = mapped_memory(ordinal, 8 * gpu.bytes);

	for (size_t i = 0; pool && i < sizeof cases / sizeof *cases; i++) {
		shape s;

		make_shape(s, 8192, cases[i].kind, pool, true, {cases[i].ranks, false});
		prime(s);
		for (uint32_t sms : {0u, 8u, 16u, 33u, 44u, 1024u}) {
			const std::string who = sms == 0 ? "kvd's SMs" : sms == 1024 ? "all SMs" : text("%u SMs", sms);

			for (bool load : {true, false}) {
				copy_row(text("mapped memory of %s, %s %s, %s", ordinal ? "a peer" : "this GPU",
					      load ? "in" : "out", cases[i].name, who.c_str()),
					 s, plain, {load, KVK_GPU_ZERO_COPY, sms},
					 ordinal ? "cudaMemcpyPeer" : "cudaMemcpyAsync inside",
					 sms == 0 || sms == 1024 ? 0.9 : 0);
			}
		}
	}
	if (pool) {
		kvk_gpu_unmap(gpu.kvk, pool);
	}
}

// Of 640 MiB each: a prompt of 5,120 tokens.
static void rows_mapped()
{
	const gpu_t before = gpu;

	gpu.bytes = 640u << 20;
	CU(cudaMalloc(&gpu.cache, gpu.bytes));
	CU(cudaMalloc(&gpu.hbm, gpu.bytes));
	gpu.pool = host_memory();
	rows_of_mapped(0, gpu.hbm);
	if (gpu.peer) {
		gpu.peer = device_memory(1);
		rows_of_mapped(1, gpu.peer);
		CU(cudaFree(gpu.peer));
	} else {
		printf("mapped memory of a peer: skipped, this machine has one GPU\n");
	}
	CU(cudaFree(gpu.cache));
	CU(cudaFree(gpu.hbm));
	kvk_gpu_unregister(gpu.kvk, gpu.pool);
	gpu = before;
}

static void rows_peer()
{
	if (!gpu.peer) {
		printf("peer: skipped, this machine has one GPU\n");
		return;
	}
	for (uint32_t fragment : {4096u, 8192u, 16384u}) {
		for (uint32_t sms : {16u, 132u}) {
			shape s;

			make_shape(s, fragment, KVK_PAGED_KV_TOKEN_HEAD, gpu.peer, true);
			prime(s);
			for (bool load : {true, false}) {
				copy_row(text("peer %s %u B in rows of 256 B, %u SMs", load ? "load" : "store",
					      fragment, sms),
					 s, gpu.peer, {load, KVK_GPU_ZERO_COPY, sms}, "cudaMemcpyPeer",
					 sms == 132 ? 0.93 : 0);
			}
		}
	}
}

static void rows_digests()
{
	for (uint32_t fragment : {1024u, 4096u, 8192u}) {
		shape on, off;

		make_shape(on, fragment, KVK_PAGED_KV_TOKEN_HEAD, gpu.pool, true);
		make_shape(off, fragment, KVK_PAGED_KV_TOKEN_HEAD, gpu.pool, false);
		prime(on);
		for (bool load : {true, false}) {
			const how h = {load, KVK_GPU_ZERO_COPY, 8};
			const auto with = [&] { return copy_rate(on, h); };
			const auto without = [&] { return copy_rate(off, h); };

			row(text("digests on, %s %u B, 8 SMs", load ? "load" : "store", fragment), "GB/s",
			    "digests off", 0.97, with, without);
		}
	}
}

// Whole blocks that the copy engine moves: alone in one call, and ours.
static void rows_staged()
{
	for (bool apart : {false, true}) {
		shape s;

		make_shape(s, 8192, KVK_PAGED_KV_TOKEN_HEAD, gpu.pool, true, {1, apart});
		prime(s);
		if (apart) {
			const uint64_t block = s.bytes / s.moves.size();
			pieces p;

			for (size_t i = 0; i < s.moves.size(); i++) {
				p.dst.push_back(gpu.cache + i * block);
				p.src.push_back(s.moves[i].data);
				p.sizes.push_back(block);
			}
			p.bytes = s.bytes;
			const auto one_piece = [&] { return memcpy_rate(gpu.cache, gpu.pool, s.bytes); };

			row(
				"copy engine alone, 2 MiB pieces in one call", "GB/s", ONE_PIECE, 0,
				[&] { return batch_rate(p); }, one_piece);
			prime(s); // the cache holds its own bytes again
		}
		for (uint32_t sms : {4u, 8u}) {
			for (bool load : {true, false}) {
				copy_row(text("staged %s of 2 MiB blocks %s, %u SMs", load ? "load" : "store",
					      apart ? "apart" : "side by side", sms),
					 s, gpu.pool, {load, KVK_GPU_STAGED, sms}, ONE_PIECE, sms == 4 ? 0.98 : 0);
			}
		}
	}
}

// The weights of an engine, as much as there is room for: the digest of all, and of as many bytes in tensors of a few
// MB.
static void rows_digest()
{
	const uint64_t tensor = (uint64_t)6 << 20;
	size_t free_bytes, all;
	uint8_t *base;

	CU(cudaMemGetInfo(&free_bytes, &all));
	const uint64_t wanted = bench_param_size("weights", bench_quick() ? 1000000000 : 16000000000);
	const uint64_t bytes = std::min<uint64_t>(wanted, free_bytes / 10 * 9) / (2 * tensor) * (2 * tensor);

	CU(cudaMalloc(&base, bytes));
	for (uint64_t at = 0; at < bytes; at += gpu.bytes) {
		CU(cudaMemcpy(base + at, gpu.pool, std::min(gpu.bytes, bytes - at), cudaMemcpyDefault));
	}
	for (uint64_t each : {bytes, tensor}) {
		std::vector<kvk_range_t> ranges;
		for (uint64_t at = 0; at < bytes; at += each) {
			ranges.push_back({(uint64_t)(uintptr_t)base + at, each});
		}
		std::vector<uint8_t> digests(ranges.size() * KVK_RANGE_DIGEST_BYTES);
		const auto digest = [&] {
			const auto start = std::chrono::steady_clock::now();

			must_kv(kvk_gpu_digest(gpu.kvk, ranges.data(), (uint32_t)ranges.size(),
					       (kvk_cu_stream_t)gpu.stream,
					       (uint8_t(*)[KVK_RANGE_DIGEST_BYTES])digests.data()));

			return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
		};
		// It reads one half and writes the other: as many bytes of memory.
		const auto copy = [&] {
			return 1e3 * timed(gpu.stream, [&] {
				       CU(cudaMemcpyAsync(base, base + bytes / 2, bytes / 2, cudaMemcpyDefault,
							  gpu.stream));
			       });
		};

		row(text("digest of %.2f GB, %zu ranges", (double)bytes / 1e9, ranges.size()), "ms",
		    "cudaMemcpyAsync of one half to the other", -4, digest, copy);
	}
	CU(cudaFree(base));
}

template <void (*rows)()> static bench_outcome_t run_family(int)
{
	const char *why = open_gpu();

	if (why) {
		return bench_skip("%s", why);
	}
	rows();

	return BENCH_DONE;
}

#define FAMILY(id, measures, reference)                                                                                \
	{                                                                                                              \
#id, run_family < rows_##id>, 0, measures, reference, "of each row"                                    \
	}
extern "C" const bench_t bench_list[] = {
	FAMILY(link, "zero copy between a paged cache and the pool, by size of a page and SMs",
	       "contiguous pinned copies"),
	FAMILY(staged, "whole blocks by copy engine and kernel (--with mib=1280)", "contiguous pinned copies"),
	FAMILY(both, "loads and stores at once", "contiguous pinned copies both ways"),
	FAMILY(digests, "copies with digests", "without"),
	FAMILY(rivals, "pieces by kvd", "by the driver's calls"),
	FAMILY(hbm, "permuting copies inside one GPU", "cudaMemcpyAsync inside"),
	FAMILY(mapped, "copies from and to mapped memory of this GPU and of a peer",
	       "one plain copy between the same devices"),
	FAMILY(peer, "copies with another layout between two GPUs", "cudaMemcpyPeer"),
	FAMILY(digest, "the digest of an engine's weights (--with weights=16000000000)",
	       "a copy inside the GPU that reads and writes as many bytes"),
	FAMILY(gemm, "products of matrices while blocks are copied", "alone"),
	FAMILY(beside, "small kernels of a step while blocks are copied", "alone"),
	{},
};
