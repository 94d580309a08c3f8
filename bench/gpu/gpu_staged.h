// gpu_staged.h -- rows of whole blocks that the copy engine moves; part of gpu_copy.cu.
#ifndef GPU_STAGED_H
#define GPU_STAGED_H

// Blocks by the copy engine alone: a call each over one or more streams, or one call (streams 0).
static double blocks_rate(const shape &s, int streams)
{
	const uint64_t block = s.bytes / s.moves.size();
	static cudaStream_t ring[4];
	static cudaEvent_t done[4];

	if (streams == 0) {
		pieces p;

		for (size_t i = 0; i < s.moves.size(); i++) {
			p.dst.push_back(bench.cache + i * block);
			p.src.push_back(s.moves[i].data);
			p.sizes.push_back(block);
		}
		p.bytes = s.bytes;
		return batch_rate(p);
	}
	for (int i = 0; i < 4 && !ring[i]; i++) {
		CU(cudaStreamCreateWithFlags(&ring[i], cudaStreamNonBlocking));
		CU(cudaEventCreate(&done[i]));
	}
	const double seconds = timed(bench.stream, [&] {
		for (int i = 0; i < streams; i++) {
			CU(cudaStreamWaitEvent(ring[i], bench.begin, 0));
		}
		for (size_t i = 0; i < s.moves.size(); i++) {
			CU(cudaMemcpyAsync(bench.cache + i * block, s.moves[i].data, block, cudaMemcpyDefault,
					   ring[i / 4 % streams]));
		}
		for (int i = 0; i < streams; i++) {
			CU(cudaEventRecord(done[i], ring[i]));
			CU(cudaStreamWaitEvent(bench.stream, done[i], 0));
		}
	});

	return (double)s.bytes / seconds / 1e9;
}

// Rows of `width` bytes out of every `pitch` of the pool, which is how layers of a head lie in a block, in one call.
static double pitched_rate(uint64_t width, uint64_t pitch, bool load)
{
	const uint64_t rows = bench.bytes / pitch;
	const double seconds = timed(bench.stream, [&] {
		for (int i = 0; i < BATCH; i++) {
			uint8_t *pool = bench.pool + i * width;

			CU(cudaMemcpy2DAsync(load ? bench.cache : pool, load ? width : pitch, load ? pool : bench.cache,
					     load ? pitch : width, width, rows, cudaMemcpyDefault, bench.stream));
		}
	});

	return (double)(rows * width) * BATCH / seconds / 1e9;
}

static void rows_pitched()
{
	for (uint64_t width : {8u << 10, 16u << 10, 32u << 10, 48u << 10}) {
		for (bool load : {true, false}) {
			row(
				text("copy engine alone, %s, %u KiB of every 256 in one call", load ? "load" : "store",
				     (unsigned)(width >> 10)),
				"GB/s", "cudaMemcpyAsync, one piece", at_least(0),
				[&] { return pitched_rate(width, 256 << 10, load); },
				[&] {
					const uint64_t bytes = bench.bytes / (256 << 10) * width;

					return load ? memcpy_rate(bench.cache, bench.pool, bytes)
						    : memcpy_rate(bench.pool, bench.cache, bytes);
				});
		}
	}
}

static void rows_staged_of(const std::string &how, uint32_t sms, bool apart, double goal)
{
	shape s;

	make_shape(s, 8192, KVK_PAGED_KV_TOKEN_HEAD, bench.pool, true, {1, apart});
	prime(s);
	for (bool load : {true, false}) {
		const kvk_gpu_dir_t dir = load ? KVK_GPU_SCATTER : KVK_GPU_GATHER;

		row(
			text("staged %s of 2 MiB blocks %s, %u SMs%s", load ? "load" : "store",
			     apart ? "apart" : "side by side", sms, how.c_str()),
			"GB/s", "cudaMemcpyAsync, one piece", at_least(goal),
			[&] { return copy_rate(s, dir, KVK_GPU_STAGED, sms); },
			[&] {
				return load ? memcpy_rate(bench.cache, bench.pool, s.bytes)
					    : memcpy_rate(bench.pool, bench.cache, s.bytes);
			});
	}
}

// A range of layers, as a load that comes layer by layer has it.
static void rows_layers()
{
	for (uint32_t layers : {1u, 2u, 4u, 6u}) {
		for (kvk_gpu_way_t way : {KVK_GPU_ZERO_COPY, KVK_GPU_STAGED}) {
			shape s;

			make_shape(s, 8192, KVK_PAGED_KV_TOKEN_HEAD, bench.pool, true);
			prime(s);
			s.layers = layers;
			s.bytes = s.bytes / LAYERS * layers;
			row(
				text("%s load of %u of 32 layers, 8 SMs",
				     way == KVK_GPU_STAGED ? "staged" : "zero copy", layers),
				"GB/s", "cudaMemcpyAsync, one piece", at_least(0),
				[&] { return copy_rate(s, KVK_GPU_SCATTER, way, 8); },
				[&] { return memcpy_rate(bench.cache, bench.pool, s.bytes); });
		}
	}
}

static void rows_staged()
{
	for (int streams : {1, 4, 0}) {
		shape s;

		make_shape(s, 8192, KVK_PAGED_KV_TOKEN_HEAD, bench.pool, true, {1, true});
		row(
			streams ? text("copy engine alone, 2 MiB a call, %d streams", streams)
				: std::string("copy engine alone, 2 MiB pieces in one call"),
			"GB/s", "cudaMemcpyAsync, one piece", at_least(0), [&] { return blocks_rate(s, streams); },
			[&] { return memcpy_rate(bench.cache, bench.pool, s.bytes); });
	}
	rows_pitched();
	rows_staged_of("", 4, false, 0.98);
	rows_staged_of("", 4, true, 0.98);
	rows_staged_of("", 2, true, 0);
	rows_staged_of("", 8, true, 0);
	rows_layers();
}

#endif
