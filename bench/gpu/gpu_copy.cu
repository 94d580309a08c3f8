// gpu_copy: how fast kvd's copies are between a paged cache in a GPU and blocks in host memory, in its own memory and
// in a peer's.
//
// Every row has its reference measured in the same round: value, reference and ratio are medians over rounds. A line of
// a table each, and a JSON line each into the file of --json. Digests are made and compared unless a row says
// otherwise.
//
//     gpu_copy [--rounds N] [--mib N] [--json FILE] [--only FAMILY,...]
#include "gpu_step.h"

#include <unistd.h>

// Several copies behind each other, so that what the host does for one runs while the one before it copies.
static double copy_rate(shape &s, kvk_gpu_dir_t dir, kvk_gpu_way_t way, uint32_t sms)
{
	kvk_gpu_job_t *jobs[BATCH];
	const auto enqueue = [&] {
		for (auto &job : jobs) {
			job = submit(s, dir, way, sms, bench.stream);
		}
	};
	// Many small pieces of work would wait for each other and for the hold.
	const double seconds =
		way == KVK_GPU_ZERO_COPY ? timed_held(bench.stream, enqueue) : timed(bench.stream, enqueue);

	for (auto job : jobs) {
		finish(job);
	}

	return (double)s.bytes * BATCH / seconds / 1e9;
}

static double memcpy_rate(void *dst, const void *src, uint64_t bytes)
{
	const double seconds = timed(bench.stream, [&] {
		for (int i = 0; i < BATCH; i++) {
			CU(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, bench.stream));
		}
	});

	return (double)bytes * BATCH / seconds / 1e9;
}

// Digests to compare with, of what lies in the pool: a gather makes both. And each kernel has run once, which loads it.
static void prime(shape &s)
{
	finish(submit(s, KVK_GPU_GATHER, KVK_GPU_ZERO_COPY, 16, bench.stream));
	finish(submit(s, KVK_GPU_SCATTER, KVK_GPU_ZERO_COPY, 16, bench.stream));
}

// ---- rows ---------------------------------------------------------------------------------------

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

		make_shape(s, c.fragment, KVK_PAGED_KV_TOKEN_HEAD, bench.pool, true);
		prime(s);
		row(
			text("zero copy load %u B in rows of 256 B, %u SMs", c.fragment, c.sms), "GB/s",
			"cudaMemcpyAsync, one piece", at_least(c.in),
			[&] { return copy_rate(s, KVK_GPU_SCATTER, KVK_GPU_ZERO_COPY, c.sms); },
			[&] { return memcpy_rate(bench.cache, bench.pool, s.bytes); });
		row(
			text("zero copy store %u B in rows of 256 B, %u SMs", c.fragment, c.sms), "GB/s",
			"cudaMemcpyAsync, one piece", at_least(c.out),
			[&] { return copy_rate(s, KVK_GPU_GATHER, KVK_GPU_ZERO_COPY, c.sms); },
			[&] { return memcpy_rate(bench.pool, bench.cache, s.bytes); });
	}
}

// Loads and stores of different halves at the same time, on two streams: bytes of both over the time of the longer.
static double both_rate(shape &in, kvk_gpu_way_t in_way, uint32_t in_sms, shape &out, kvk_gpu_way_t out_way,
			uint32_t out_sms)
{
	kvk_gpu_job_t *jobs[2 * BATCH];
	const double seconds = timed_both([&] {
		for (int i = 0; i < BATCH; i++) {
			jobs[2 * i] = submit(in, KVK_GPU_SCATTER, in_way, in_sms, bench.stream);
			jobs[2 * i + 1] = submit(out, KVK_GPU_GATHER, out_way, out_sms, bench.other);
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
			CU(cudaMemcpyAsync(bench.cache, bench.pool, bytes, cudaMemcpyDefault, bench.stream));
			CU(cudaMemcpyAsync(bench.pool2, bench.hbm, bytes, cudaMemcpyDefault, bench.other));
		}
	});

	return 2.0 * (double)bytes * BATCH / seconds / 1e9;
}

static void rows_both()
{
	shape in, out;
	uint8_t *cache = bench.cache;

	make_shape(in, 8192, KVK_PAGED_KV_TOKEN_HEAD, bench.pool, true);
	prime(in);
	bench.cache = bench.hbm;
	make_shape(out, 8192, KVK_PAGED_KV_TOKEN_HEAD, bench.pool2, true);
	bench.cache = cache;
	const struct {
		const char *name;
		kvk_gpu_way_t in, out;
		uint32_t in_sms, out_sms;
		double goal;
	} cases[] = {{"zero copy", KVK_GPU_ZERO_COPY, KVK_GPU_ZERO_COPY, 8, 8, 0},
		     {"zero copy", KVK_GPU_ZERO_COPY, KVK_GPU_ZERO_COPY, 4, 4, 0},
		     {"zero copy", KVK_GPU_ZERO_COPY, KVK_GPU_ZERO_COPY, 8, 2, 0},
		     {"staged load, zero copy store", KVK_GPU_STAGED, KVK_GPU_ZERO_COPY, 4, 4, 0},
		     {"zero copy load, staged store", KVK_GPU_ZERO_COPY, KVK_GPU_STAGED, 8, 4, 0},
		     {"staged", KVK_GPU_STAGED, KVK_GPU_STAGED, 4, 4, 0.9}};

	for (const auto &c : cases) {
		row(
			text("both ways at once, %s, 8192 B, %u + %u SMs", c.name, c.in_sms, c.out_sms), "GB/s",
			"cudaMemcpyAsync both ways", at_least(c.goal),
			[&] { return both_rate(in, c.in, c.in_sms, out, c.out, c.out_sms); },
			[&] { return both_memcpy(in.bytes); });
	}
}

// The pieces of a head-major cache, which are contiguous on both sides: what a rival can copy with one call a piece.
struct pieces {
	std::vector<void *> dst;
	std::vector<void *> src;
	std::vector<size_t> sizes;
	uint64_t bytes = 0;
};

static pieces make_pieces(const shape &s, uint32_t fragment, uint32_t heads_together, bool load, uint32_t most)
{
	const uint64_t page = fragment;
	pieces p;

	for (const auto &move : s.moves) {
		for (uint32_t layer = 0; layer < LAYERS; layer++) {
			for (uint32_t head = 0; head < HEADS && p.dst.size() < most; head += heads_together) {
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
	const double seconds = timed(bench.stream, [&] {
		for (size_t i = 0; i < p.dst.size(); i++) {
			CU(cudaMemcpyAsync(p.dst[i], p.src[i], p.sizes[i], cudaMemcpyDefault, bench.stream));
		}
	});

	return (double)p.bytes / seconds / 1e9;
}

static double batch_rate(pieces &p)
{
	cudaMemcpyAttributes attributes = {};
	size_t from = 0;

	attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
	const double seconds = timed(bench.stream, [&] {
		CU(cudaMemcpyBatchAsync(p.dst.data(), p.src.data(), p.sizes.data(), p.dst.size(), &attributes, &from, 1,
					bench.stream));
	});

	return (double)p.bytes / seconds / 1e9;
}

static void rows_rivals()
{
	for (uint32_t fragment : {4096u, 8192u, 16384u, 24576u, 65536u}) {
		const double goal = fragment <= 24576 ? 3 : 1;

		for (bool load : {true, false}) {
			const kvk_gpu_dir_t dir = load ? KVK_GPU_SCATTER : KVK_GPU_GATHER;
			shape s;

			make_shape(s, fragment, KVK_PAGED_HEAD_TOKEN_KV, bench.pool, true);
			prime(s);
			pieces p = make_pieces(s, fragment, 1, load, 4096);
			const auto ours = [&] { return copy_rate(s, dir, KVK_GPU_AUTO, 8); };

			row(text("%s %u B pieces, 8 SMs", load ? "load" : "store", fragment), "GB/s",
			    "cudaMemcpyAsync a piece", at_least(goal), ours, [&] { return loop_rate(p); });
			row(text("%s %u B pieces, 8 SMs", load ? "load" : "store", fragment), "GB/s",
			    "cudaMemcpyBatchAsync", at_least(goal), ours, [&] { return batch_rate(p); });
		}
	}
	for (bool load :
	     {true,
	      false}) { /* 16 tokens of all heads of a layer, as in vLLM's native offload: layer by layer */
		shape s;

		make_shape(s, 8192, KVK_PAGED_HEAD_TOKEN_KV, bench.pool, true);
		prime(s);
		pieces p = make_pieces(s, 8192, HEADS, load, 4096);

		row(
			text("%s 2 MiB blocks, 8 SMs", load ? "load" : "store"), "GB/s",
			"swap_blocks like vLLM's, 64 KiB a call", at_least(1),
			[&] { return copy_rate(s, load ? KVK_GPU_SCATTER : KVK_GPU_GATHER, KVK_GPU_AUTO, 8); },
			[&] { return loop_rate(p); });
	}
}

// Of 1.25 GiB, a prompt of 10,240 tokens: less is over before a launch counts for nothing.
static void rows_hbm()
{
	const bench_t before = bench;
	const struct {
		const char *name;
		kvk_paged_kind_t kind;
		uint32_t ranks;
	} cases[] = {{"NHD <-> blocks", KVK_PAGED_KV_TOKEN_HEAD, 1},
		     {"HND <-> blocks", KVK_PAGED_KV_HEAD_TOKEN, 1},
		     {"tensor parallel 2 of 8 heads, NHD", KVK_PAGED_KV_TOKEN_HEAD, 4}};

	bench.bytes = 1280u << 20;
	CU(cudaMalloc(&bench.cache, bench.bytes));
	CU(cudaMalloc(&bench.hbm, 4 * bench.bytes));
	for (uint64_t at = 0; at < 4 * bench.bytes; at += before.bytes) {
		CU(cudaMemcpy(bench.hbm + at, before.pool, std::min(before.bytes, 4 * bench.bytes - at),
			      cudaMemcpyDefault));
	}
	for (const auto &c : cases) {
		for (bool digests : {true, false}) {
			shape s;

			make_shape(s, 8192, c.kind, bench.hbm, digests, {c.ranks, false});
			prime(s);
			for (bool load : {true, false}) {
				row(
					text("inside one GPU, %s %s, digests %s, all SMs", c.name, load ? "in" : "out",
					     digests ? "on" : "off"),
					"GB/s", "cudaMemcpyAsync inside", at_least(0.9),
					[&] {
						return copy_rate(s, load ? KVK_GPU_SCATTER : KVK_GPU_GATHER,
								 KVK_GPU_ZERO_COPY, 1024);
					},
					[&] { return memcpy_rate(bench.cache, bench.hbm, s.bytes); });
			}
		}
	}
	CU(cudaFree(bench.cache));
	CU(cudaFree(bench.hbm));
	bench = before;
}

static void rows_peer()
{
	if (!bench.peer) {
		printf("peer: skipped, this machine has one GPU\n");
		return;
	}
	for (uint32_t fragment : {4096u, 8192u, 16384u}) {
		for (uint32_t sms : {16u, 32u, 64u, 132u}) {
			shape s;

			make_shape(s, fragment, KVK_PAGED_KV_TOKEN_HEAD, bench.peer, true);
			prime(s);
			for (bool load : {true, false}) {
				row(
					text("peer %s %u B in rows of 256 B, %u SMs", load ? "load" : "store", fragment,
					     sms),
					"GB/s", "cudaMemcpyPeer", at_least(sms == 132 ? 0.93 : 0),
					[&] {
						return copy_rate(s, load ? KVK_GPU_SCATTER : KVK_GPU_GATHER,
								 KVK_GPU_ZERO_COPY, sms);
					},
					[&] {
						return load ? memcpy_rate(bench.cache, bench.peer, s.bytes)
							    : memcpy_rate(bench.peer, bench.cache, s.bytes);
					});
			}
		}
	}
}

static void rows_digests()
{
	for (uint32_t fragment : {1024u, 4096u, 8192u}) {
		for (uint32_t sms : {2u, 4u, 8u}) {
			shape on, off;

			make_shape(on, fragment, KVK_PAGED_KV_TOKEN_HEAD, bench.pool, true);
			make_shape(off, fragment, KVK_PAGED_KV_TOKEN_HEAD, bench.pool, false);
			prime(on);
			for (bool load : {true, false}) {
				const kvk_gpu_dir_t dir = load ? KVK_GPU_SCATTER : KVK_GPU_GATHER;

				row(
					text("digests on, %s %u B, %u SMs", load ? "load" : "store", fragment, sms),
					"GB/s", "digests off", at_least(sms == 8 ? 0.97 : 0),
					[&] { return copy_rate(on, dir, KVK_GPU_ZERO_COPY, sms); },
					[&] { return copy_rate(off, dir, KVK_GPU_ZERO_COPY, sms); });
			}
		}
	}
}

#include "gpu_beside.h"
#include "gpu_gemm.h"
#include "gpu_staged.h"

int main(int argc, char **argv)
{
	const struct {
		const char *name;
		void (*run)();
	} families[] = {{"link", rows_link},       {"staged", rows_staged}, {"both", rows_both},
			{"digests", rows_digests}, {"rivals", rows_rivals}, {"hbm", rows_hbm},
			{"peer", rows_peer},       {"gemm", rows_gemm},     {"beside", rows_beside}};

	parse_options(argc, argv);
	if (!open_bench()) {
		return 77;
	}
	print_head();
	for (const auto &family : families) {
		if (wanted(family.name)) {
			family.run();
		}
	}

	return 0;
}
