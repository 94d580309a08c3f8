// gpu_nn: attention. Against the twin, each row's bits whatever rows are beside it, and rates.
#include "gpu_nn.h"

#include <algorithm>
#include <cstring>
#include <string>

typedef std::vector<kvk_bf16_t> values_t;
typedef std::vector<kvk_nn_tile_t> tiles_t;

static const kvk_bf16_t UNTOUCHED = 0x5a5a;
static const size_t CANARY = 512; // values beyond the result
static const size_t CROWD = 2000; // tiles that are more blocks than three an SM, of any device

// Sequences in a cache. Row first[i] + position is that token of sequence i.
struct problem {
	kvk_nn_heads_t shape;
	std::vector<uint32_t> length, first;
	uint32_t rows, max_blocks;
	std::vector<uint32_t> blocks;
	values_t q, cache;

	size_t row_values() const
	{
		return (size_t)shape.heads * shape.head_dim;
	}

	// Where K (half 0) or V (half 1) of a token lies in the cache, all KV heads.
	size_t token_at(uint32_t sequence, uint32_t position, uint32_t half) const
	{
		const uint32_t block = blocks[sequence * max_blocks + position / shape.block_tokens];

		return (((size_t)block * 2 + half) * shape.block_tokens + position % shape.block_tokens) * shape.kv_heads * shape.head_dim;
	}
};

static kvk_bf16_t garbage(size_t i)
{
	const kvk_bf16_t kinds[] = {0x7fff, 0x7f7f, 0xff7f, 0x7f80, 0xffc0, 0xff80, 0x7f00};

	return kinds[i % 7];
}

// Blocks in random order; places without a token hold garbage, and unused entries of the table name no block.
static problem make_problem(const kvk_nn_heads_t &shape, const std::vector<uint32_t> &length, float deviation, uint64_t seed)
{
	problem p = {shape, length, {}, 0, 0, {}, {}, {}};
	const size_t token = (size_t)shape.kv_heads * shape.head_dim;
	std::mt19937_64 rng(seed);
	std::vector<uint32_t> order;
	uint32_t used = 0, next = 0;

	for (const uint32_t n : length) {
		const uint32_t blocks = (n + shape.block_tokens - 1) / shape.block_tokens;

		p.first.push_back(p.rows);
		p.rows += n;
		p.max_blocks = std::max(p.max_blocks, blocks + 1);
		used += blocks;
	}
	for (uint32_t i = 0; i < used + 3; i++) {
		order.push_back(i);
	}
	std::shuffle(order.begin(), order.end(), rng);
	p.blocks.assign(length.size() * p.max_blocks, 0xfffffff0);
	p.cache.resize(order.size() * 2 * shape.block_tokens * token);
	for (size_t i = 0; i < p.cache.size(); i++) {
		p.cache[i] = garbage(i / 3);
	}
	for (uint32_t s = 0; s < length.size(); s++) {
		for (uint32_t at = 0; at < length[s]; at += shape.block_tokens) {
			p.blocks[s * p.max_blocks + at / shape.block_tokens] = order[next++];
		}
		for (uint32_t half = 0; half < 2; half++) {
			const values_t drawn = nn_random(length[s] * token, 1.0f, rng());

			for (uint32_t at = 0; at < length[s]; at++) {
				std::copy_n(&drawn[at * token], token, &p.cache[p.token_at(s, at, half)]);
			}
		}
	}
	p.q = nn_random(p.rows * p.row_values(), deviation, rng());

	return p;
}

// Rows `from` to `to` of a sequence, `most` rows a tile at most.
static void add_tiles(tiles_t &tiles, const problem &p, uint32_t sequence, uint32_t from, uint32_t to, uint32_t most)
{
	for (; from < to; from += most) {
		tiles.push_back({p.first[sequence] + from, std::min(most, to - from), sequence, from});
	}
}

static std::string describe(const problem &p)
{
	char text[200];

	snprintf(text, sizeof text, "%u heads, %u KV heads of %u, blocks of %u, %zu sequences, %u rows", p.shape.heads, p.shape.kv_heads,
		 p.shape.head_dim, p.shape.block_tokens, p.length.size(), p.rows);

	return text;
}

[[noreturn]] static void fail(const problem &p, const std::string &what)
{
	printf("nn_attention: %s: %s\n", describe(p).c_str(), what.c_str());
	exit(1);
}

static uint32_t most_rows(const tiles_t &tiles)
{
	uint32_t most = 0;

	for (const kvk_nn_tile_t &tile : tiles) {
		most = std::max(most, tile.rows);
	}

	return most;
}

static kvk_nn_attention_t arguments(const problem &p, const tiles_t &tiles)
{
	kvk_nn_attention_t a = {};

	a.shape = p.shape;
	a.tiles = (uint32_t)tiles.size();
	a.max_blocks = p.max_blocks;
	a.most_rows = most_rows(tiles);

	return a;
}

static values_t attend_twin(const problem &p, const tiles_t &tiles)
{
	values_t out(p.rows * p.row_values(), 0);
	kvk_nn_attention_t a = arguments(p, tiles);

	a.tile = tiles.data();
	a.blocks = p.blocks.data();
	a.q = p.q.data();
	a.cache = p.cache.data();
	a.out = out.data();
	nn_must(kvk_nn_attention(nn_device.twin, &a, nullptr));

	return out;
}

// Rows that no tile has, and what lies behind the last, are as they were; those come back as zeros, as from the twin.
static values_t attend(const problem &p, const tiles_t &tiles)
{
	const size_t n = p.rows * p.row_values();
	std::vector<uint8_t> is_row(p.rows, 0);
	values_t out(n + CANARY, UNTOUCHED);
	kvk_nn_attention_t a = arguments(p, tiles);

	a.tile = nn_upload(tiles);
	a.blocks = nn_upload(p.blocks);
	a.q = nn_upload(p.q);
	a.cache = nn_upload(p.cache);
	a.out = nn_upload(out);
	nn_must(kvk_nn_attention(nn_device.nn, &a, nn_stream()));
	CU(cudaStreamSynchronize(nn_device.stream));
	out = nn_download(a.out, n + CANARY);
	for (const void *memory : {(const void *)a.tile, (const void *)a.blocks, (const void *)a.q, (const void *)a.cache, (const void *)a.out}) {
		CU(cudaFree((void *)memory));
	}
	for (const kvk_nn_tile_t &tile : tiles) {
		std::fill_n(&is_row[tile.row], tile.rows, 1);
	}
	for (size_t i = 0; i < n + CANARY; i++) {
		if ((i >= n || !is_row[i / p.row_values()]) && out[i] != UNTOUCHED) {
			fail(p, "value " + std::to_string(i) + " is of no tile, and was written");
		}
		out[i] = i < n && is_row[i / p.row_values()] ? out[i] : 0;
	}
	out.resize(n);

	return out;
}

// Of the rows of those tiles.
static double check_near(const problem &p, const tiles_t &tiles)
{
	const std::vector<float> twin = nn_floats(attend_twin(p, tiles)), device = nn_floats(attend(p, tiles));
	const double distance = nn_distance(device, twin);

	for (size_t i = 0; i < device.size(); i++) {
		if (!std::isfinite(device[i])) {
			fail(p, "value " + std::to_string(i) + " is no number");
		}
	}
	for (size_t head = 0; head < twin.size(); head += p.shape.head_dim) {
		float greatest = 0, error = 0;

		for (size_t i = head; i < head + p.shape.head_dim; i++) {
			greatest = std::max(greatest, std::fabs(twin[i]));
			error = std::max(error, std::fabs(device[i] - twin[i]));
		}
		if (error > 0.04f * greatest) {
			fail(p, "row " + std::to_string(head / p.row_values()) + ", head " + std::to_string(head / p.shape.head_dim % p.shape.heads) +
					": error of " + std::to_string(error) + ", greatest " + std::to_string(greatest));
		}
	}
	if (!(distance <= 1e-2)) {
		fail(p, "relative L2 " + std::to_string(distance));
	}

	return distance;
}

static void must_equal(const problem &p, const values_t &a, const values_t &b, uint32_t row, const char *what)
{
	const size_t n = p.row_values(), at = row * n;

	if (memcmp(&a[at], &b[at], n * sizeof(kvk_bf16_t)) != 0) {
		size_t i = at;

		while (a[i] == b[i]) {
			i++;
		}
		fail(p, std::string(what) + ": row " + std::to_string(row) + " has other bits, head " + std::to_string((i - at) / p.shape.head_dim) +
				", value " + std::to_string((i - at) % p.shape.head_dim));
	}
}

// The rows of a whole prompt have the bits that they have in chunks and alone, also when nothing is in the cache behind
// them.
static void check_invariance(const problem &p, std::mt19937_64 &rng)
{
	const uint32_t most = kvk_nn_tile_rows(&p.shape), n = p.length[0];
	tiles_t whole, alone, chunks;

	add_tiles(whole, p, 0, 0, n, most);
	add_tiles(alone, p, 0, 0, n, 1);
	std::reverse(whole.begin(), whole.end());
	const values_t out = attend(p, whole), single = attend(p, alone);
	for (uint32_t row = 0; row < n; row++) {
		must_equal(p, out, single, row, "alone");
	}
	// More blocks than fit on a device at once, which therefore are small ones. Each row is computed often.
	tiles_t crowd;
	while (crowd.size() < CROWD) {
		crowd.insert(crowd.end(), alone.begin(), alone.end());
	}
	const values_t in_crowd = attend(p, crowd);
	for (uint32_t row = 0; row < n; row++) {
		must_equal(p, out, in_crowd, row, "in a crowd");
	}
	for (const uint32_t chunk : {64u, 7u}) {
		const uint32_t skipped = (uint32_t)(rng() % 5) % n; // chunks begin anywhere

		chunks.clear();
		for (uint32_t at = skipped; at < n; at += chunk) {
			add_tiles(chunks, p, 0, at, std::min(at + chunk, n), most);
		}
		const values_t in_chunks = attend(p, chunks);
		for (uint32_t row = skipped; row < n; row++) {
			must_equal(p, out, in_chunks, row, chunk == 7 ? "chunks of 7" : "chunks of 64");
		}
	}
	for (int i = 0; i < 2; i++) {
		const uint32_t row = (uint32_t)(rng() % n);
		const size_t token = (size_t)p.shape.kv_heads * p.shape.head_dim;
		problem now = p;

		for (uint32_t later = row + 1; later < n; later++) {
			for (size_t v = 0; v < token; v++) {
				now.cache[p.token_at(0, later, 0) + v] = garbage(v);
				now.cache[p.token_at(0, later, 1) + v] = garbage(v + later);
			}
		}
		must_equal(p, out, attend(now, {{row, 1, 0, row}}), row, "decoded");
	}
}

// Prompts, chunks of them and single tokens in one launch: each up to its sequence's last token.
static tiles_t mix(const problem &p, std::mt19937_64 &rng)
{
	tiles_t tiles;

	for (uint32_t s = 0; s < p.length.size(); s++) {
		const uint32_t n = p.length[s], how = (uint32_t)(rng() % 3), most = kvk_nn_tile_rows(&p.shape);

		add_tiles(tiles, p, s, how == 0 ? 0 : how == 1 ? (uint32_t)(rng() % n) : n - 1, n, 1 + (uint32_t)(rng() % 2) * (most - 1));
	}
	std::shuffle(tiles.begin(), tiles.end(), rng);

	return tiles;
}

static uint32_t draw_length(std::mt19937_64 &rng)
{
	const uint32_t edges[] = {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 400};

	return rng() % 3 == 0 ? edges[rng() % 11] : 1 + (uint32_t)(rng() % (rng() % 4 == 0 ? 400 : 90));
}

static void check_case(const kvk_nn_heads_t &shape, std::mt19937_64 &rng, double *p_worst)
{
	std::vector<uint32_t> length;

	for (uint64_t n = 1 + rng() % 5; n > 0; n--) {
		length.push_back(draw_length(rng));
	}
	const problem p = make_problem(shape, length, rng() % 3 == 0 ? 4.0f : 1.0f, rng());
	tiles_t prompts;
	for (uint32_t s = 0; s < length.size(); s++) {
		add_tiles(prompts, p, s, 0, length[s], kvk_nn_tile_rows(&shape));
	}
	*p_worst = std::max({*p_worst, check_near(p, prompts), check_near(p, mix(p, rng))});
	check_invariance(p, rng);
}

bench_outcome_t nn_attention_right(int)
{
	const uint64_t seed = bench_param_size("seed", 4711), times = bench_quick() ? 1 : 4;
	const char *why = nn_open();
	std::mt19937_64 rng(seed);
	uint32_t cases = 0;
	double worst = 0;

	if (why) {
		return bench_skip("%s", why);
	}
	for (const uint32_t group : {1u, 2u, 4u, 8u, 16u}) {
		for (const uint32_t head_dim : {64u, 128u}) {
			for (const uint32_t block_tokens : {16u, 32u}) {
				for (uint64_t i = 0; i < times; i++) {
					const uint32_t kv_heads = 1 + (uint32_t)(rng() % 3);

					check_case({group * kv_heads, kv_heads, head_dim, block_tokens}, rng, &worst);
					cases++;
				}
			}
		}
	}
	printf("nn_attention: seed %llu, %u cases: the twin's values (worst relative L2 %.1e); rows have the same bits in prompts, in chunks and alone\n",
	       (unsigned long long)seed, cases, worst);

	return BENCH_DONE;
}

// ---- speed --------------------------------------------------------------------------------------

typedef std::function<double()> side_t;

static bench_outcome_t sample(void *arg, bench_sample_t *p_sample)
{
	p_sample->value = (*((const side_t **)arg)[p_sample->is_reference])();

	return BENCH_DONE;
}

// goal: of the ratio, at least so much; 0: none. No reference: no ratio.
static void print_row(const bench_measurement_t &named, double goal, const side_t &value_of, const side_t &reference_of)
{
	const side_t *sides[] = {&value_of, &reference_of};
	bench_measurement_t m = named;

	m.value_fn = sample;
	m.reference_fn = reference_of ? sample : nullptr;
	m.rounds = 7;
	m.goal = goal > 0 ? BENCH_RATIO_AT_LEAST : BENCH_NO_GOAL;
	m.goal_value = goal;
	bench_measure(sides, &m);
}

static const kvk_nn_heads_t SPEED_SHAPE = {32, 4, 128, 16};
static const uint32_t SPEED_KEYS = 8192;

// `sequences` of them in a cache on the device, of SPEED_KEYS tokens each, in blocks of random order.
struct speed_batch {
	kvk_nn_attention_t a;
	std::vector<void *> memory;

	template <class T> const T *keep(const T *at)
	{
		memory.push_back((void *)at);

		return at;
	}

	speed_batch(uint32_t sequences, uint32_t rows, const tiles_t &tiles) : a()
	{
		const uint32_t blocks = SPEED_KEYS / SPEED_SHAPE.block_tokens;
		const size_t row = (size_t)SPEED_SHAPE.heads * SPEED_SHAPE.head_dim;
		const size_t n = (size_t)sequences * SPEED_KEYS * 2 * SPEED_SHAPE.kv_heads * SPEED_SHAPE.head_dim;
		const values_t drawn = nn_random(size_t{1} << 22, 1.0f, 7);
		std::vector<uint32_t> table(sequences * blocks);
		kvk_bf16_t *cache = nn_array<kvk_bf16_t>(n);

		for (uint32_t i = 0; i < table.size(); i++) {
			table[i] = i;
		}
		std::shuffle(table.begin(), table.end(), std::mt19937_64(7));
		for (size_t at = 0; at < n; at += drawn.size()) {
			CU(cudaMemcpy(cache + at, drawn.data(), std::min(drawn.size(), n - at) * sizeof(kvk_bf16_t), cudaMemcpyHostToDevice));
		}
		a.shape = SPEED_SHAPE;
		a.tiles = (uint32_t)tiles.size();
		a.tile = keep(nn_upload(tiles));
		a.blocks = keep(nn_upload(table));
		a.max_blocks = blocks;
		a.most_rows = most_rows(tiles);
		a.q = keep(nn_upload(nn_random(rows * row, 1.0f, 8)));
		a.cache = keep(cache);
		a.out = nn_array<kvk_bf16_t>(rows * row);
		keep(a.out);
	}
	~speed_batch()
	{
		CU(cudaStreamSynchronize(nn_device.stream));
		for (void *at : memory) {
			CU(cudaFree(at));
		}
	}
	double seconds(int times) const
	{
		return nn_time([&] { nn_must(kvk_nn_attention(nn_device.nn, &a, nn_stream())); }, times, 1);
	}
};

// The last `rows` tokens of a prompt of 8,192, as a step of some of a prompt computes them. All of it has references.
static void prefill_row(uint32_t rows)
{
	const bool is_whole = rows == SPEED_KEYS;
	const char *flash = is_whole ? getenv("NN_SDPA_TFLOPS") : nullptr, *cudnn = is_whole ? getenv("NN_CUDNN_TFLOPS") : nullptr;
	const uint32_t most = kvk_nn_tile_rows(&SPEED_SHAPE), first = SPEED_KEYS - rows;
	const std::string name = (is_whole ? "prefill of 8,192 tokens" : "prefill of the last " + std::to_string(rows) + " of 8,192 tokens") +
				 std::string(", 32 heads, 4 KV heads of 128, causal");
	const double pairs = rows * (first + (rows + 1.0) / 2), flop = 4.0 * SPEED_SHAPE.heads * SPEED_SHAPE.head_dim * pairs;
	bench_measurement_t m = {};
	tiles_t tiles;

	for (uint32_t end = rows; end > 0; end -= most) {
		tiles.push_back({end - most, most, 0, first + end - most});
	}
	const speed_batch batch(1, rows, tiles);
	m.name = name.c_str();
	m.unit = "TFLOP/s";
	m.reference = flash ? "torch's flash kernel (NN_SDPA_TFLOPS)" : nullptr;
	print_row(m, flash ? 0.6 : 0, [&] { return flop / batch.seconds(10) / 1e12; }, flash ? side_t([&] { return atof(flash); }) : side_t());
	if (cudnn) {
		printf("    cuDNN's kernel (NN_CUDNN_TFLOPS): %.1f TFLOP/s\n", atof(cudnn));
	}
}

static void decode_row(uint32_t sequences, double goal)
{
	const size_t copied = size_t{1} << 30;
	const double bytes = (double)sequences * SPEED_KEYS * 2 * SPEED_SHAPE.kv_heads * SPEED_SHAPE.head_dim * sizeof(kvk_bf16_t);
	const std::string name = "decode of " + std::to_string(sequences) + " sequences of 8,192 keys, 32 heads, 4 KV heads of 128";
	uint8_t *from = nn_array<uint8_t>(copied), *to = nn_array<uint8_t>(copied);
	bench_measurement_t m = {};
	tiles_t tiles;

	for (uint32_t s = 0; s < sequences; s++) {
		tiles.push_back({s, 1, s, SPEED_KEYS - 1});
	}
	{
		const speed_batch batch(sequences, sequences, tiles);

		m.name = name.c_str();
		m.unit = "GB/s";
		m.reference = "cudaMemcpyAsync on the device, 1 GiB, bytes read and written";
		print_row(
			m, goal, [&] { return bytes / batch.seconds(20) / 1e9; },
			[&] {
				const double seconds =
					nn_time([&] { CU(cudaMemcpyAsync(to, from, copied, cudaMemcpyDeviceToDevice, nn_device.stream)); }, 10, 1);

				return 2.0 * (double)copied / seconds / 1e9;
			});
	}
	CU(cudaFree(from));
	CU(cudaFree(to));
}

bench_outcome_t nn_attention_speed(int)
{
	const char *why = nn_open();

	if (why) {
		return bench_skip("%s", why);
	}
	prefill_row(SPEED_KEYS);
	prefill_row(2048);
	prefill_row(1024);
	decode_row(128, 0.8);
	decode_row(8, 0);

	return BENCH_DONE;
}
