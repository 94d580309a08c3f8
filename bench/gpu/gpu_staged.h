// gpu_staged.h -- rows of whole blocks that the copy engine moves, and the choices inside kernels/ that they decide between; part of gpu_copy.cu.
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

static void rows_staged_of(const std::string &how, uint32_t sms, bool apart, double goal)
{
	shape s;

	make_shape(s, 8192, KVK_PAGED_KV_TOKEN_HEAD, bench.pool, true, 1, apart);
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

static void rows_staged()
{
	for (int streams : {1, 4, 0}) {
		shape s;

		make_shape(s, 8192, KVK_PAGED_KV_TOKEN_HEAD, bench.pool, true, 1, true);
		row(
			streams ? text("copy engine alone, 2 MiB a call, %d streams", streams)
				: std::string("copy engine alone, 2 MiB pieces in one call"),
			"GB/s", "cudaMemcpyAsync, one piece", at_least(0), [&] { return blocks_rate(s, streams); },
			[&] { return memcpy_rate(bench.cache, bench.pool, s.bytes); });
	}
	rows_staged_of("", 4, false, 0.98);
	rows_staged_of("", 4, true, 0.98);
	rows_staged_of("", 2, true, 0);
	rows_staged_of("", 8, true, 0);
}

// What the defaults are compared with: one thing changed at a time. For choosing, without a goal.
static void rows_choose()
{
	const struct {
		const char *name;
		std::function<void(kvk_gpu_tune_t &)> change;
	} staged[] = {{", 4 slots with a stream each, a call a block",
		       [](kvk_gpu_tune_t &t) {
			       t.slots = 4;
			       t.copy_streams = 0;
			       t.batch = t.sorted = t.taper = t.wide = 0;
			       t.uploads = 0;
		       }},
		      {", a call a block", [](kvk_gpu_tune_t &t) { t.batch = 0; }},
		      {", one copy stream", [](kvk_gpu_tune_t &t) { t.copy_streams = 1; }},
		      {", one kernel stream", [](kvk_gpu_tune_t &t) { t.kernel_streams = 1; }},
		      {", three kernel streams", [](kvk_gpu_tune_t &t) { t.kernel_streams = 3; }},
		      {", 4 slots", [](kvk_gpu_tune_t &t) { t.slots = 4; }},
		      {", a stream a slot", [](kvk_gpu_tune_t &t) { t.copy_streams = 0; }},
		      {", no taper", [](kvk_gpu_tune_t &t) { t.taper = 0; }},
		      {", no uploads", [](kvk_gpu_tune_t &t) { t.uploads = 0; }},
		      {", 8 warps an SM", [](kvk_gpu_tune_t &t) { t.wide = 0; }}};

	for (const auto &c : staged) {
		tuned with(c.change);

		rows_staged_of(c.name, 4, true, 0);
	}
	for (uint32_t fragment : {4096u, 16384u}) {
		for (bool uploads : {false, true}) {
			tuned with([&](kvk_gpu_tune_t &t) { t.uploads = uploads ? KVK_GPU_UPLOAD_LINK : 0; });
			shape s;

			make_shape(s, fragment, KVK_PAGED_KV_TOKEN_HEAD, bench.pool, true);
			prime(s);
			row(
				text("zero copy load %u B, 8 SMs, arguments %s", fragment,
				     uploads ? "uploaded" : "in host memory"),
				"GB/s", "cudaMemcpyAsync, one piece", at_least(0),
				[&] { return copy_rate(s, KVK_GPU_SCATTER, KVK_GPU_ZERO_COPY, 8); },
				[&] { return memcpy_rate(bench.cache, bench.pool, s.bytes); });
		}
	}
	for (uint32_t choice : {0u, 1u, 2u, 3u}) {
		tuned with([&](kvk_gpu_tune_t &t) {
			t.wide = choice & 1;
			t.uploads = choice & 2 ? KVK_GPU_UPLOAD_NEAR : 0;
		});

		for (uint32_t ranks : {1u, 4u}) {
			shape s;

			make_shape(s, 8192, KVK_PAGED_KV_TOKEN_HEAD, bench.hbm, true, ranks);
			prime(s);
			for (bool load : {true, false}) {
				row(
					text("inside one GPU %s, %u heads, %s warps, arguments %s", load ? "in" : "out",
					     HEADS / ranks, choice & 1 ? "16" : "8",
					     choice & 2 ? "uploaded" : "in host memory"),
					"GB/s", "cudaMemcpyAsync inside", at_least(0),
					[&] {
						return copy_rate(s, load ? KVK_GPU_SCATTER : KVK_GPU_GATHER,
								 KVK_GPU_ZERO_COPY, 1024);
					},
					[&] { return memcpy_rate(bench.cache, bench.hbm, s.bytes); });
			}
		}
	}
}

#endif
