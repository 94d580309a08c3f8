// nn_rows: drawn weights, embeddings, norms, heads, routing and choices of a GPU against the twin. --with seed=N.
#include "gpu_nn.h"

#include <algorithm>
#include <cstdarg>
#include <cstring>
#include <string>

// ---- cases --------------------------------------------------------------------------------------

#define BEYOND 64 // elements behind an output, which stay painted
#define PAINT 0xa5

static std::mt19937_64 rng;
static std::string now; // the case that runs

static void begin(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void begin(const char *format, ...)
{
	char text[256];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	now = text;
}

static void fault(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
static void fault(const char *format, ...)
{
	va_list args;

	printf("%s: ", now.c_str());
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	printf("\n");
	exit(1);
}

static uint32_t below(uint32_t n)
{
	return (uint32_t)(rng() % n);
}

static std::vector<float> normal_floats(size_t n, float middle, float deviation)
{
	std::normal_distribution<float> normal(middle, deviation);
	std::vector<float> to(n);

	for (float &value : to) {
		value = normal(rng);
	}

	return to;
}

// What both write to: of the device and of the host, painted.
template <class T> struct output {
	size_t n;
	T *device;
	std::vector<T> host;

	explicit output(size_t count) : n(count), device(nn_array<T>(count + BEYOND)), host(count + BEYOND)
	{
		paint();
	}
	output(const output &) = delete;
	~output()
	{
		CU(cudaFree(device));
	}
	void paint()
	{
		memset(host.data(), PAINT, host.size() * sizeof(T));
		upload();
	}
	void set(const std::vector<T> &from)
	{
		std::copy(from.begin(), from.end(), host.begin());
		upload();
	}
	void upload()
	{
		CU(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
	}
	// What the device has written.
	std::vector<T> get(const char *what) const
	{
		std::vector<T> got = nn_download(device, n + BEYOND), behind(BEYOND);

		memset(behind.data(), PAINT, BEYOND * sizeof(T));
		if (memcmp(&got[n], behind.data(), BEYOND * sizeof(T)) != 0) {
			fault("%s: written beyond its end", what);
		}
		got.resize(n);

		return got;
	}
};

// Copies of pageable memory may still be on their way when they return, and the stream does not wait for them.
static void run(const std::function<kv_status_t(kvk_nn_t *, kvk_cu_stream_t)> &enqueue)
{
	CU(cudaDeviceSynchronize());
	nn_must(enqueue(nn_device.nn, nn_stream()));
	CU(cudaDeviceSynchronize());
}

template <class T> static void must_equal(const char *what, const std::vector<T> &got, const std::vector<T> &want)
{
	for (size_t i = 0; i < got.size(); i++) {
		if (memcmp(&got[i], &want[i], sizeof(T)) != 0) {
			uint32_t bits[2] = {};

			memcpy(&bits[0], &got[i], sizeof(T));
			memcpy(&bits[1], &want[i], sizeof(T));
			fault("%s[%zu] is %#x, not %#x", what, i, bits[0], bits[1]);
		}
	}
}

// Place of a BF16 among all of them: neighbours are one apart.
static int place_of(kvk_bf16_t value)
{
	return value & 0x8000 ? -(int)(value & 0x7fff) : (int)value;
}

// BF16 within one rounding, or, of values that cancelled, within 1e-6 of the largest; paint stays paint.
static void must_be_close(const char *what, const std::vector<kvk_bf16_t> &got, const std::vector<kvk_bf16_t> &want)
{
	const std::vector<float> a = nn_floats(got), b = nn_floats(std::vector<kvk_bf16_t>(want.begin(), want.begin() + got.size()));
	const kvk_bf16_t paint = PAINT << 8 | PAINT;
	float largest = 0;

	for (float value : b) {
		largest = std::max(largest, std::fabs(value));
	}
	for (size_t i = 0; i < got.size(); i++) {
		const bool is_close = std::abs(place_of(got[i]) - place_of(want[i])) <= 1 || std::fabs(a[i] - b[i]) <= 1e-6f * largest;

		if (!is_close || ((got[i] == paint) != (want[i] == paint))) {
			fault("%s[%zu] is %g, not %g", what, i, a[i], b[i]);
		}
	}
	if (!(nn_distance(a, b) <= 1e-3)) {
		fault("%s: relative L2 %g", what, nn_distance(a, b));
	}
}

// ---- weights ------------------------------------------------------------------------------------

// Value number i, as engine/weights.c draws it.
static float drawn(const kvk_nn_draw_t &d, uint64_t i)
{
	uint64_t z = d.seed + (i + 1) * UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	z ^= z >> 31;

	const float u = (float)(int32_t)(z >> 40) * (1.0f / 8388608.0f) - 1.0f;
	volatile const float product = d.width * u; // rounded

	return d.middle + product;
}

static kvk_bf16_t tile_value(const kvk_nn_draw_t &d, uint32_t o, uint32_t i)
{
	return kvk_bf16_round(drawn(d, d.first + ((uint64_t)(o / 16) * d.k + i) * 16 + o % 16));
}

static size_t drawn_bytes(const kvk_nn_draw_t &d)
{
	switch (d.order) {
	case KVK_NN_ROW_F32: return (size_t)d.n * sizeof(float);
	case KVK_NN_ROWS: return (size_t)d.n * d.k * sizeof(kvk_bf16_t);
	case KVK_NN_TILES: return kvk_nn_weight_count(d.k, d.n) * sizeof(kvk_bf16_t);
	default: return kvk_nn_weight_count(d.k, 2 * d.n) * sizeof(kvk_bf16_t);
	}
}

static void draw_one(kvk_nn_order_t order, uint32_t k, uint32_t n)
{
	kvk_nn_draw_t d = {rng(), rng() >> (below(2) ? 1 : 40), below(2) ? 1.0f : 0.0f, 0.1f + (float)below(100) * 0.01f, k, n, order, nullptr};
	output<uint8_t> out(drawn_bytes(d));

	begin("draw order %d k %u n %u seed %#llx first %#llx", (int)order, k, n, (unsigned long long)d.seed, (unsigned long long)d.first);
	d.to = out.host.data();
	nn_must(kvk_nn_draw(nn_device.twin, &d, nullptr));
	d.to = out.device;
	run([&](kvk_nn_t *nn, kvk_cu_stream_t stream) { return kvk_nn_draw(nn, &d, stream); });
	const std::vector<uint8_t> got = out.get("values");

	must_equal("byte", got, out.host);
	for (uint32_t o = 0; order == KVK_NN_TILES && o < n; o++) {
		for (uint32_t i = 0; i < k; i++) {
			kvk_bf16_t value;

			memcpy(&value, &got[kvk_nn_weight_at(k, o, i) * sizeof value], sizeof value);
			if (value != tile_value(d, o, i)) {
				fault("output %u of input %u is %#x, not %#x", o, i, value, tile_value(d, o, i));
			}
		}
	}
}

// More values than 32 bits count bytes of, looked at here and there.
static void draw_large()
{
	const uint32_t k = 8192, n = 8192 * 40;
	kvk_nn_draw_t d = {rng(), rng() >> 20, 0.0f, 0.25f, k, n, KVK_NN_TILES, nullptr};
	const size_t count = kvk_nn_weight_count(k, n);
	kvk_bf16_t *w = nn_array<kvk_bf16_t>(count), value;

	begin("draw of %zu values", count);
	d.to = w;
	run([&](kvk_nn_t *nn, kvk_cu_stream_t stream) { return kvk_nn_draw(nn, &d, stream); });
	for (uint32_t look = 0; look < 1000; look++) {
		const uint32_t o = look == 0 ? n - 1 : below(n), i = look == 0 ? k - 1 : below(k);

		CU(cudaMemcpy(&value, w + kvk_nn_weight_at(k, o, i), sizeof value, cudaMemcpyDeviceToHost));
		if (value != tile_value(d, o, i)) {
			fault("output %u of input %u is %#x, not %#x", o, i, value, tile_value(d, o, i));
		}
	}
	CU(cudaFree(w));
}

static void check_draw()
{
	for (uint32_t n : {1u, 63u, 4096u, 100003u}) {
		draw_one(KVK_NN_ROW_F32, 1, n);
	}
	for (uint32_t k : {1u, 7u, 64u, 2048u}) {
		for (uint32_t n : {1u, 33u, 500u}) {
			draw_one(KVK_NN_ROWS, k, n);
		}
	}
	for (uint32_t k : {64u, 192u, 2048u}) {
		for (uint32_t n : {16u, 128u, 144u, 272u}) {
			draw_one(KVK_NN_TILES, k, n);
		}
		for (uint32_t n : {64u, 192u, 768u}) {
			draw_one(KVK_NN_GATES, k, n);
			draw_one(KVK_NN_UPS, k, n);
		}
	}
	draw_large();
}

// ---- embeddings and norms -----------------------------------------------------------------------

static void check_embed()
{
	for (uint32_t hidden : {8u, 2048u, 5120u, 8192u}) {
		const uint32_t rows = 1 + below(40), vocab = 1000;
		const std::vector<kvk_bf16_t> table = nn_random((size_t)vocab * hidden, 1.0f, rng());
		std::vector<uint32_t> tokens(rows);
		output<float> x((size_t)rows * hidden);

		for (uint32_t &token : tokens) {
			token = below(vocab);
		}
		tokens[0] = vocab - 1;
		begin("embed rows %u hidden %u", rows, hidden);
		kvk_nn_embed_t e = {rows, hidden, tokens.data(), table.data(), x.host.data()};

		nn_must(kvk_nn_embed(nn_device.twin, &e, nullptr));
		e.tokens = nn_upload(tokens);
		e.table = nn_upload(table);
		e.x = x.device;
		run([&](kvk_nn_t *nn, kvk_cu_stream_t stream) { return kvk_nn_embed(nn, &e, stream); });
		must_equal("x", x.get("x"), x.host);
	}
}

struct norm_case {
	uint32_t rows, hidden;
	bool adds, norms, picks;
};

static void norm_one(const norm_case &c)
{
	const size_t count = (size_t)c.rows * c.hidden;
	const std::vector<float> from = normal_floats(count, 0.0f, 2.0f), gain = normal_floats(c.hidden, 1.0f, 0.1f);
	const std::vector<kvk_bf16_t> added = nn_random(count, 1.0f, rng());
	std::vector<uint32_t> pick(c.rows);
	output<float> x(count);
	output<kvk_bf16_t> y(count);

	for (uint32_t &row : pick) {
		row = below(c.rows);
	}
	begin("norm rows %u hidden %u adds %d norms %d picks %d", c.rows, c.hidden, c.adds, c.norms, c.picks);
	x.set(from);
	const kvk_nn_norm_t twin = {c.rows, c.hidden, x.host.data(), c.adds ? added.data() : nullptr, gain.data(),
				    c.picks ? pick.data() : nullptr, 1e-6f, c.norms ? y.host.data() : nullptr};
	kvk_nn_norm_t own = {c.rows, c.hidden, x.device, c.adds ? nn_upload(added) : nullptr, nn_upload(gain),
			     c.picks ? nn_upload(pick) : nullptr, 1e-6f, c.norms ? y.device : nullptr};

	nn_must(kvk_nn_norm(nn_device.twin, &twin, nullptr));
	run([&](kvk_nn_t *nn, kvk_cu_stream_t stream) { return kvk_nn_norm(nn, &own, stream); });
	const std::vector<float> x_got = x.get("x");
	const std::vector<kvk_bf16_t> y_got = y.get("y");

	must_equal("x", x_got, x.host);
	must_be_close("y", y_got, y.host);
	if (c.picks) {
		return;
	}
	/* each row alone */
	y.paint();
	x.set(from);
	own.rows = 1;
	for (uint32_t r = 0; r < c.rows; r++) {
		kvk_nn_norm_t alone = own;

		alone.x += (size_t)r * c.hidden;
		alone.added = c.adds ? own.added + (size_t)r * c.hidden : nullptr;
		alone.y = c.norms ? own.y + (size_t)r * c.hidden : nullptr;
		run([&](kvk_nn_t *nn, kvk_cu_stream_t stream) { return kvk_nn_norm(nn, &alone, stream); });
	}
	must_equal("x alone", x.get("x alone"), x_got);
	must_equal("y alone", y.get("y alone"), y_got);
}

static void check_norm()
{
	for (uint32_t hidden : {8u, 64u, 1032u, 2048u, 4096u, 5120u, 8192u, 12288u}) {
		for (uint32_t rows : {1u, 3u, 37u}) {
			norm_one({rows, hidden, false, true, false});
			norm_one({rows, hidden, true, true, false});
			norm_one({rows, hidden, true, false, false});
			norm_one({rows, hidden, false, true, true});
		}
	}
}

// ---- heads --------------------------------------------------------------------------------------

struct qkv_case {
	kvk_nn_heads_t shape;
	uint32_t rows, sequences, max_blocks;
	bool norms;
	std::vector<kvk_bf16_t> qkv;
	std::vector<float> q_gain, k_gain, rotation;
	std::vector<kvk_nn_row_t> places;
	std::vector<uint32_t> blocks;
};

static qkv_case make_qkv(const kvk_nn_heads_t &shape, uint32_t rows, bool norms)
{
	qkv_case c = {shape, rows, 3, 5, norms, {}, {}, {}, {}, {}, {}};
	const uint32_t positions = c.max_blocks * shape.block_tokens, dim = shape.head_dim;
	std::vector<uint32_t> order(c.sequences * positions);

	c.qkv = nn_random((size_t)rows * (shape.heads + 2 * shape.kv_heads) * dim, 1.0f, rng());
	c.q_gain = normal_floats(dim, 1.8f, 0.1f);
	c.k_gain = normal_floats(dim, 1.8f, 0.1f);
	for (uint32_t i = 0; i < positions * dim / 2; i++) {
		const double angle = (double)below(1000000) * 1e-5;

		c.rotation.push_back((float)std::cos(angle));
		c.rotation.push_back((float)std::sin(angle));
	}
	for (uint32_t i = 0; i < order.size(); i++) {
		order[i] = i;
	}
	std::shuffle(order.begin(), order.end(), rng);
	for (uint32_t r = 0; r < rows; r++) {
		c.places.push_back({order[r] / positions, order[r] % positions});
	}
	for (uint32_t i = 0; i < c.sequences * c.max_blocks; i++) {
		c.blocks.push_back(i);
	}
	std::shuffle(c.blocks.begin(), c.blocks.end(), rng);

	return c;
}

static void qkv_one(const kvk_nn_heads_t &shape, uint32_t rows, bool norms)
{
	const qkv_case c = make_qkv(shape, rows, norms);
	const uint32_t dim = shape.head_dim, all = shape.heads + 2 * shape.kv_heads;
	output<kvk_bf16_t> q_out((size_t)rows * shape.heads * dim);
	output<kvk_bf16_t> cache((size_t)c.blocks.size() * 2 * shape.block_tokens * shape.kv_heads * dim);
	const kvk_nn_qkv_t twin = {shape, rows, c.qkv.data(), norms ? c.q_gain.data() : nullptr, norms ? c.k_gain.data() : nullptr,
				   c.rotation.data(), c.places.data(), c.blocks.data(), c.max_blocks, 1e-6f, q_out.host.data(), cache.host.data()};
	kvk_nn_qkv_t own = {shape, rows, nn_upload(c.qkv), norms ? nn_upload(c.q_gain) : nullptr, norms ? nn_upload(c.k_gain) : nullptr,
			    nn_upload(c.rotation), nn_upload(c.places), nn_upload(c.blocks), c.max_blocks, 1e-6f, q_out.device, cache.device};

	begin("qkv heads %u kv %u dim %u tokens %u rows %u norms %d", shape.heads, shape.kv_heads, dim, shape.block_tokens, rows, norms);
	nn_must(kvk_nn_qkv(nn_device.twin, &twin, nullptr));
	run([&](kvk_nn_t *nn, kvk_cu_stream_t stream) { return kvk_nn_qkv(nn, &own, stream); });
	const std::vector<kvk_bf16_t> q_got = q_out.get("q"), cache_got = cache.get("cache");

	must_be_close("q", q_got, q_out.host);
	must_be_close("cache", cache_got, cache.host);
	if (!norms) { /* nothing is summed */
		must_equal("q", q_got, q_out.host);
		must_equal("cache", cache_got, cache.host);
	}
	q_out.paint();
	cache.paint();
	own.rows = 1;
	for (uint32_t r = 0; r < rows; r++) {
		kvk_nn_qkv_t alone = own;

		alone.qkv += (size_t)r * all * dim;
		alone.places += r;
		alone.q_out += (size_t)r * shape.heads * dim;
		run([&](kvk_nn_t *nn, kvk_cu_stream_t stream) { return kvk_nn_qkv(nn, &alone, stream); });
	}
	must_equal("q alone", q_out.get("q alone"), q_got);
	must_equal("cache alone", cache.get("cache alone"), cache_got);
}

static void check_qkv()
{
	static const kvk_nn_heads_t shapes[] = {{32, 4, 128, 16}, {32, 8, 128, 64}, {16, 1, 128, 16}, {4, 4, 64, 16}, {14, 14, 64, 32}, {1, 1, 64, 16}};

	for (const kvk_nn_heads_t &shape : shapes) {
		for (uint32_t rows : {1u, 7u, 100u}) {
			qkv_one(shape, rows, false);
			qkv_one(shape, rows, true);
		}
	}
}

// ---- experts ------------------------------------------------------------------------------------

// Choices agree where probabilities of what was chosen differ by more than 1e-5.
static void compare_routes(const kvk_nn_route_t &r, const std::vector<uint32_t> &ids, const std::vector<float> &weights)
{
	for (uint32_t row = 0; row < r.rows; row++) {
		const float *logits = r.logits + (size_t)row * r.experts;

		for (uint32_t k = 0; k < r.top_k; k++) {
			const size_t at = (size_t)row * r.top_k + k;
			const uint32_t got = ids[at], want = r.ids[at];

			if (got >= r.experts || std::find(&ids[at - k], &ids[at], got) != &ids[at]) {
				fault("row %u choice %u: expert %u", row, k, got);
			}
			if (got != want && (logits[got] == logits[want] || std::fabs(std::expm1((double)logits[got] - logits[want])) > 1e-5)) {
				fault("row %u choice %u: expert %u, not %u", row, k, got, want);
			}
			if (!(std::fabs(weights[at] - r.weights[at]) <= 2e-5f * r.weights[at])) {
				fault("row %u choice %u: weight %.9g, not %.9g", row, k, weights[at], r.weights[at]);
			}
		}
	}
}

/* levels: how many logits there are; 0: any. */
static void route_one(uint32_t experts, uint32_t top_k, uint32_t rows, uint32_t levels)
{
	std::vector<float> logits = normal_floats((size_t)rows * experts, 0.0f, 2.0f);
	output<uint32_t> ids((size_t)rows * top_k);
	output<float> weights((size_t)rows * top_k);

	for (size_t i = 0; levels && i < logits.size(); i++) {
		logits[i] = (float)below(levels) * 0.5f;
	}
	for (uint32_t norm = 0; norm < 2; norm++) {
		kvk_nn_route_t twin = {rows, experts, top_k, norm, logits.data(), ids.host.data(), weights.host.data()};
		kvk_nn_route_t own = {rows, experts, top_k, norm, nn_upload(logits), ids.device, weights.device};

		begin("route experts %u top %u rows %u levels %u norm %u", experts, top_k, rows, levels, norm);
		nn_must(kvk_nn_route(nn_device.twin, &twin, nullptr));
		run([&](kvk_nn_t *nn, kvk_cu_stream_t stream) { return kvk_nn_route(nn, &own, stream); });
		const std::vector<uint32_t> ids_got = ids.get("ids");
		const std::vector<float> weights_got = weights.get("weights");

		compare_routes(twin, ids_got, weights_got);
		if (levels) {
			must_equal("ids", ids_got, ids.host);
		}
		ids.paint();
		weights.paint();
		for (uint32_t r = 0; r < rows; r++) {
			kvk_nn_route_t alone = {1, experts, top_k, norm, own.logits + (size_t)r * experts, own.ids + (size_t)r * top_k, own.weights + (size_t)r * top_k};

			run([&](kvk_nn_t *nn, kvk_cu_stream_t stream) { return kvk_nn_route(nn, &alone, stream); });
		}
		must_equal("ids alone", ids.get("ids alone"), ids_got);
		must_equal("weights alone", weights.get("weights alone"), weights_got);
		ids.paint();
		weights.paint();
	}
}

static void check_route()
{
	for (uint32_t experts : {16u, 64u, 128u, 144u, 256u, 1024u}) {
		for (uint32_t top_k : {1u, 8u, 16u}) {
			route_one(experts, top_k, 1 + below(100), 0);
			route_one(experts, top_k, 1 + below(20), 1);
			route_one(experts, top_k, 1 + below(20), 3);
		}
	}
}

// ---- tokens -------------------------------------------------------------------------------------

static void choose_one(uint32_t vocab, uint32_t rows, uint32_t levels)
{
	std::vector<float> logits = normal_floats((size_t)rows * vocab, -3.0f, 2.0f);
	output<uint32_t> ids(rows);

	for (size_t i = 0; levels && i < logits.size(); i++) {
		logits[i] = (float)below(levels) * 0.5f * (below(2) ? 1.0f : -1.0f); // both zeros
	}
	kvk_nn_choose_t c = {rows, vocab, logits.data(), ids.host.data()};

	begin("choose vocab %u rows %u levels %u", vocab, rows, levels);
	nn_must(kvk_nn_choose(nn_device.twin, &c, nullptr));
	c.logits = nn_upload(logits);
	c.ids = ids.device;
	run([&](kvk_nn_t *nn, kvk_cu_stream_t stream) { return kvk_nn_choose(nn, &c, stream); });
	const std::vector<uint32_t> got = ids.get("ids");

	must_equal("ids", got, ids.host);
	ids.paint();
	for (uint32_t r = 0; r < rows; r++) {
		kvk_nn_choose_t alone = {1, vocab, c.logits + (size_t)r * vocab, c.ids + r};

		run([&](kvk_nn_t *nn, kvk_cu_stream_t stream) { return kvk_nn_choose(nn, &alone, stream); });
	}
	must_equal("ids alone", ids.get("ids alone"), got);
}

static void check_choose()
{
	for (uint32_t vocab : {1u, 7u, 1000u, 1003u, 32768u, 151936u}) {
		for (uint32_t rows : {1u, 9u}) {
			choose_one(vocab, rows, 0);
			choose_one(vocab, rows, 1);
			choose_one(vocab, rows, 4);
		}
	}
}

bench_outcome_t nn_rows_right(int)
{
	const char *why = nn_open();
	const uint64_t seed = bench_param_size("seed", 1);

	if (why) {
		return bench_skip("%s", why);
	}
	rng.seed(seed);
	check_draw();
	check_embed();
	check_norm();
	check_qkv();
	check_route();
	check_choose();
	printf("draw, embed, norm, qkv, route and choose are right, seed %llu\n", (unsigned long long)seed);

	return BENCH_DONE;
}
