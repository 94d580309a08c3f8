// nn_product: products of kvk/nn.h on a device, right and fast. Part of gpu_nn.cu.
#include "gpu_nn.h"

extern "C" {
#include "kvk/compute.h"
#include "nn/gpu.h"
}

#include <algorithm>
#include <cstdarg>
#include <cstring>
#include <dlfcn.h>
#include <string>

namespace {

typedef std::vector<kvk_bf16_t> rows_t;
typedef std::vector<uint32_t> words_t;

std::mt19937_64 rng;

uint32_t below(uint32_t n)
{
	return (uint32_t)(rng() % n);
}

std::string text(const char *format, ...)
{
	char out[256];
	va_list args;

	va_start(args, format);
	vsnprintf(out, sizeof out, format, args);
	va_end(args);

	return out;
}

const char *const OUT_NAMES[] = {"bf16", "f32", "add", "swiglu"};

bool is_float(kvk_nn_out_t out)
{
	return out == KVK_NN_F32 || out == KVK_NN_ADD;
}

// ---- right --------------------------------------------------------------------------------------

// Kernels that have one SM: most dense products that tiles of one panel do on the whole device have tiles of two here.
kvk_nn_t *one_sm;

const uint32_t MARGIN = 50000; // elements before and behind y, more than a tile has

struct case_t {
	uint32_t k, n;
	words_t first; // rows of groups; {0, rows} without is_grouped
	bool is_grouped, is_gathered;
	kvk_nn_out_t out;

	uint32_t groups() const
	{
		return (uint32_t)first.size() - 1;
	}
	uint32_t rows() const
	{
		return first.back();
	}
	uint32_t width() const
	{
		return out == KVK_NN_SWIGLU ? n / 2 : n;
	}
	double flops() const
	{
		return 2.0 * rows() * k * n;
	}
	std::string name() const
	{
		return text("%s, k %u, n %u, %u rows, %u groups%s%s", OUT_NAMES[out], k, n, rows(), groups(), is_grouped ? "" : " (dense)",
			    is_gathered ? ", gathered" : "");
	}
};

[[noreturn]] void fail(const case_t &c, const std::string &what)
{
	printf("nn_product: %s: %s\n", c.name().c_str(), what.c_str());
	exit(1);
}

// What a case computes from, in host memory. Outputs of w beyond n are not zero here: nothing may come of them.
struct input_t {
	rows_t x, w, received, own;
	words_t record;
	uint32_t own_first = 0;
};

input_t make_input(const case_t &c, uint64_t seed)
{
	input_t in;

	in.w = nn_random((size_t)c.groups() * kvk_nn_weight_count(c.k, c.n), 1 / std::sqrt((float)c.k), seed);
	if (!c.is_gathered) {
		in.x = nn_random((size_t)c.rows() * c.k, 1, seed + 1);
		return in;
	}
	const uint32_t own = 1 + below(c.rows()), records = c.rows() + own + below(50);

	in.received = nn_random((size_t)records * c.k, 1, seed + 1);
	in.own = nn_random((size_t)own * c.k, 1, seed + 2);
	in.own_first = below(records - own + 1);
	for (uint32_t i = 0; i < c.rows(); i++) {
		in.record.push_back(i % 3 == 0 ? in.own_first + below(own) : below(records));
	}

	return in;
}

kvk_nn_product_t make_product(const case_t &c, const input_t &in)
{
	kvk_nn_product_t p = {};

	p.k = c.k;
	p.n = c.n;
	p.groups = c.groups();
	p.max_rows = c.rows() + (c.is_grouped ? below(200) : 0);
	p.own_first = in.own_first;
	p.own_count = (uint32_t)(in.own.size() / c.k);
	p.out = c.out;

	return p;
}

// On the device; y has MARGIN elements before and behind it, all with the bytes given.
std::vector<uint8_t> run_gpu(kvk_nn_t *nn, const case_t &c, const input_t &in, kvk_nn_product_t p, const std::vector<uint8_t> &y)
{
	const size_t margin = MARGIN * (is_float(c.out) ? 4 : 2);
	kvk_bf16_t *w = nn_upload(in.w), *x = nn_upload(in.x), *received = nn_upload(in.received), *own = nn_upload(in.own);
	uint32_t *record = nn_upload(in.record), *first = nn_upload(c.first);
	uint8_t *to = nn_upload(y);

	p.w = w;
	p.x = c.is_gathered ? nullptr : x;
	p.rows = received;
	p.own = own;
	p.record = record;
	p.first = c.is_grouped ? first : nullptr;
	p.y = to + margin;
	nn_must(kvk_nn_product(nn, &p, nn_stream()));
	if (cudaStreamSynchronize(nn_device.stream) != cudaSuccess) {
		fail(c, cudaGetErrorString(cudaGetLastError()));
	}
	std::vector<uint8_t> out = nn_download(to, y.size());
	for (void *at : {(void *)w, (void *)x, (void *)received, (void *)own, (void *)record, (void *)first, (void *)to}) {
		CU(cudaFree(at));
	}

	return out;
}

std::vector<uint8_t> run_twin(const case_t &c, const input_t &in, kvk_nn_product_t p, std::vector<uint8_t> y)
{
	p.w = in.w.data();
	p.x = c.is_gathered ? nullptr : in.x.data();
	p.rows = in.received.data();
	p.own = in.own.data();
	p.record = in.record.data();
	p.first = c.is_grouped ? c.first.data() : nullptr;
	p.y = y.data() + MARGIN * (is_float(c.out) ? 4 : 2);
	nn_must(kvk_nn_product(nn_device.twin, &p, nullptr));

	return y;
}

// The elements of y alone.
std::vector<float> values(const case_t &c, const std::vector<uint8_t> &y)
{
	const size_t count = (size_t)c.rows() * c.width();
	std::vector<float> out(count);

	if (is_float(c.out)) {
		memcpy(out.data(), y.data() + (size_t)MARGIN * 4, count * 4);
		return out;
	}
	rows_t rounded(count);
	memcpy(rounded.data(), y.data() + (size_t)MARGIN * 2, count * 2);

	return nn_floats(rounded);
}

// Margins around y, what is added to in between.
std::vector<uint8_t> make_y(const case_t &c)
{
	const size_t size = is_float(c.out) ? 4 : 2, count = (size_t)c.rows() * c.width();
	std::vector<uint8_t> y((count + 2 * MARGIN) * size, 0xa5);

	if (c.out == KVK_NN_ADD) {
		for (size_t i = 0; i < count; i++) {
			const float value = (float)(int)below(2001) / 1000 - 1;

			memcpy(y.data() + (MARGIN + i) * 4, &value, 4);
		}
	}

	return y;
}

// Each element, since one that is wrong is little of the distance of many.
void compare(const case_t &c, const std::vector<float> &got, const std::vector<float> &want)
{
	const double limit = is_float(c.out) ? 1e-3 : 1e-2, distance = nn_distance(got, want);

	for (size_t i = 0; i < want.size(); i++) {
		const double off = std::fabs((double)got[i] - want[i]);

		if (!(off <= limit * (1 + std::fabs(want[i])))) {
			fail(c, text("row %zu, output %zu: %g, the twin's is %g", i / c.width(), i % c.width(), got[i], want[i]));
		}
	}
	if (!(distance <= limit)) {
		fail(c, text("distance %g from the twin's", distance));
	}
}

void check_case(const case_t &c, uint64_t seed)
{
	const input_t in = make_input(c, seed);
	const kvk_nn_product_t p = make_product(c, in);
	const std::vector<uint8_t> y = make_y(c), got = run_gpu(nn_device.nn, c, in, p, y);
	const size_t margin = MARGIN * (is_float(c.out) ? 4 : 2);

	compare(c, values(c, got), values(c, run_twin(c, in, p, y)));
	if (memcmp(got.data(), y.data(), margin) != 0) {
		fail(c, "it writes before its rows");
	}
	if (memcmp(got.data() + got.size() - margin, y.data() + y.size() - margin, margin) != 0) {
		fail(c, "it writes beyond its rows");
	}
	if (run_gpu(one_sm, c, in, p, y) != got) {
		fail(c, "other bits on one SM");
	}
}

// Rows of groups: any number; as many each; half of them in an eighth of the groups; most of them empty.
enum spread_t { ANY, EVEN, SKEWED, EMPTY, SPREADS };
const char *const SPREAD_NAMES[] = {"drawn", "even", "skewed", "most are empty"};

words_t make_first(uint32_t groups, uint32_t rows, spread_t spread)
{
	const uint32_t large = (groups + 7) / 8, small = groups - large;
	words_t count(groups), first = {0};

	for (uint32_t i = 0; i < rows; i++) {
		const uint32_t g = spread == EVEN ? i % groups
				   : spread == EMPTY ? below(1 + groups / 5) * 5 % groups
				   : spread == ANY || small == 0 ? below(groups)
				   : i % 2 == 0 ? i / 2 % large * 8
						: i / 2 % small + i / 2 % small / 7 + 1;
		count[std::min(g, groups - 1)]++;
	}
	for (const uint32_t n : count) {
		first.push_back(first.back() + n);
	}

	return first;
}

case_t make_case(uint32_t i, double most_flops)
{
	case_t c;

	do {
		const kvk_nn_out_t out = (kvk_nn_out_t)(i % 4);
		const bool is_grouped = i / 4 % 2 == 1;
		const uint32_t rows = 1 + below(700);

		c = {64 * (1 + below(32)), out == KVK_NN_SWIGLU ? 128 * (1 + below(12)) : 16 * (1 + below(96)), {0, rows}, is_grouped,
		     below(2) == 1, out};
		if (is_grouped) {
			c.first = make_first(1 + below(70), rows, (spread_t)below(SPREADS));
		}
	} while (c.flops() > most_flops || (double)c.groups() * c.n * c.k > 6e6);

	return c;
}

// Shapes in which something ends, or begins anew.
std::vector<case_t> make_corners()
{
	std::vector<case_t> all = {
		{64, 16, {0, 1}, false, false, KVK_NN_BF16},
		{64, 128, {0, 65}, false, false, KVK_NN_SWIGLU},
		{64, 272, {0, 700}, false, false, KVK_NN_F32},
		{128, 384, {0, 128}, false, false, KVK_NN_ADD},
		{192, 512, {0, 129}, false, true, KVK_NN_BF16},
		{320, 1536, {0, 64}, false, false, KVK_NN_SWIGLU},
		{2048, 1536, {0, 130}, false, true, KVK_NN_BF16},
		{2048, 144, {0, 257}, false, false, KVK_NN_ADD},
		{64, 528, {0, 2500}, false, false, KVK_NN_BF16}, // more than one band of rows
		{64, 256, {0, 0, 0, 3, 3}, true, true, KVK_NN_BF16},
		{128, 256, {0, 0, 0}, true, false, KVK_NN_F32}, // no rows at all
	};

	// More tiles than blocks by several times, and more groups than lanes of a warp have.
	all.push_back({64, 1536, make_first(64, 1024, EVEN), true, true, KVK_NN_SWIGLU});
	all.push_back({192, 1536, make_first(48, 1500, SKEWED), true, false, KVK_NN_ADD});
	all.push_back({64, 48, make_first(1100, 1500, ANY), true, true, KVK_NN_F32});

	// Every width that a tile's rows may need, and groups in parts; panels two by two, one left over, cut amid, or alone.
	words_t every = {0};
	for (uint32_t rows = 1; rows < 180; rows += 4) {
		every.push_back(every.back() + rows);
	}
	for (const kvk_nn_out_t out : {KVK_NN_BF16, KVK_NN_F32, KVK_NN_ADD, KVK_NN_SWIGLU}) {
		all.push_back({128, out == KVK_NN_SWIGLU ? 384u : 336u, every, true, out == KVK_NN_SWIGLU, out});
	}
	all.push_back({64, 128, every, true, false, KVK_NN_SWIGLU});
	all.push_back({448, 512, {0, 160, 321, 322, 322, 801}, true, true, KVK_NN_BF16});
	all.push_back({64, 128, {0, 0, 3000, 3007}, true, false, KVK_NN_BF16}); // more parts than a band has

	return all;
}

// A row's bits are the same alone and amid others, in tiles of one panel and of two.
void check_alone(kvk_nn_out_t out)
{
	const case_t many = {576, 512, {0, 301}, false, false, out}, one = {576, 512, {0, 1}, false, false, out};
	const case_t last = {576, 512, {0, 300, 301}, true, false, out};
	const input_t in = make_input(many, 99);
	const size_t size = is_float(out) ? 4 : 2, row_bytes = many.width() * size;
	std::vector<uint8_t> y(((size_t)301 * many.width() + 2 * MARGIN) * size, 0), y1(((size_t)many.width() + 2 * MARGIN) * size, 0);
	const kvk_nn_product_t p = make_product(many, in);
	const std::vector<uint8_t> all = run_gpu(nn_device.nn, many, in, p, y);

	if (kvk_nn_choose_tiles(&p, kvk_gpu_sms(nn_device.gpu)) != KVK_NN_TILES_OF_ONE_PANEL || kvk_nn_choose_tiles(&p, 1) != KVK_NN_TILES_OF_TWO_PANELS) {
		fail(many, "the same tiles on one SM: two widths are not compared");
	}
	if (run_gpu(one_sm, many, in, p, y) != all) {
		fail(many, "other bits in tiles of two panels");
	}

	for (const uint32_t r : {0u, 7u, 63u, 64u, 127u, 128u, 213u, 300u}) {
		input_t alone = in;

		alone.x.assign(in.x.begin() + (size_t)r * 576, in.x.begin() + (size_t)(r + 1) * 576);
		const std::vector<uint8_t> got = run_gpu(nn_device.nn, one, alone, make_product(one, alone), y1);
		if (memcmp(got.data() + MARGIN * size, all.data() + MARGIN * size + r * row_bytes, row_bytes) != 0) {
			fail(many, text("row %u has other bits alone", r));
		}
	}
	// The last one in a group of its own, with the same weights.
	input_t twice = in;

	twice.w.insert(twice.w.end(), in.w.begin(), in.w.end());
	const std::vector<uint8_t> grouped = run_gpu(nn_device.nn, last, twice, make_product(last, twice), y);
	if (memcmp(grouped.data(), all.data(), all.size()) != 0) {
		fail(last, "rows have other bits in groups");
	}
}

// ---- speed --------------------------------------------------------------------------------------

typedef std::function<double()> side_t;

bench_outcome_t sample(void *arg, bench_sample_t *p_sample)
{
	p_sample->value = (*((const side_t **)arg)[p_sample->is_reference])();
	return BENCH_DONE;
}

void row(const std::string &name, const char *reference, double goal, const side_t &value_of, const side_t &reference_of)
{
	const side_t *sides[] = {&value_of, &reference_of};
	const bench_measurement_t m = {name.c_str(), "TFLOP/s", reference, sample, sample, 5, BENCH_RATIO_AT_LEAST, goal};

	bench_measure(sides, &m);
}

// Random values again and again: zeros would flatter the clock.
kvk_bf16_t *random_array(size_t n, float deviation)
{
	static const size_t PERIOD = 4000037;
	const rows_t host = nn_random(std::min(n, PERIOD), deviation, 5);
	kvk_bf16_t *at = nn_array<kvk_bf16_t>(n);

	for (size_t i = 0; i < n; i += PERIOD) {
		CU(cudaMemcpy(at + i, host.data(), std::min(n - i, PERIOD) * 2, cudaMemcpyHostToDevice));
	}

	return at;
}

// cuBLAS, found at run time.
struct cublas_t {
	typedef int (*create_fn)(void **);
	typedef int (*stream_fn)(void *, cudaStream_t);
	typedef int (*gemm_fn)(void *, int, int, int, int, int, const void *, const void *, int, int, const void *, int, int, const void *,
			       void *, int, int, int, int);
	void *handle = nullptr;
	gemm_fn gemm = nullptr;

	bool open()
	{
		const char *named = getenv("KVD_CUBLAS");
		void *lib = nullptr;

		for (const char *name : {named ? named : "libcublas.so", "libcublas.so.13", "libcublas.so.12"}) {
			lib = lib ? lib : dlopen(name, RTLD_NOW | RTLD_GLOBAL);
		}
		create_fn create = lib ? (create_fn)dlsym(lib, "cublasCreate_v2") : nullptr;
		stream_fn set_stream = lib ? (stream_fn)dlsym(lib, "cublasSetStream_v2") : nullptr;

		gemm = lib ? (gemm_fn)dlsym(lib, "cublasGemmEx") : nullptr;
		if (!create || !set_stream || !gemm || create(&handle) != 0 || set_stream(handle, nn_device.stream) != 0) {
			gemm = nullptr;
		}

		return gemm != nullptr;
	}

	// y [rows][n] = x [rows][k] times w [n][k], BF16.
	void product(uint32_t rows, uint32_t n, uint32_t k, const kvk_bf16_t *x, const kvk_bf16_t *w, kvk_bf16_t *y) const
	{
		const float one = 1, zero = 0;
		const int bf16 = 14, f32 = 68; // CUDA_R_16BF, CUBLAS_COMPUTE_32F
		const int status = gemm(handle, 1, 0, (int)n, (int)rows, (int)k, &one, w, bf16, (int)k, x, bf16, (int)k, &zero, y, bf16, (int)n, f32, -1);

		if (status != 0) {
			printf("cublasGemmEx: %d\n", status);
			exit(1);
		}
	}
};

// Memory of all rows, and what the device can do: measured anew for each sample.
struct device_t {
	static const uint32_t DENSE = 8192;
	static const size_t COPY = (size_t)1 << 30;
	cublas_t cublas;
	bool has_cublas;
	kvk_bf16_t *x, *w; // 64 Mi and 201 Mi elements
	uint8_t *y, *copy;

	void open()
	{
		has_cublas = cublas.open();
		if (!has_cublas) {
			printf("# no cuBLAS is found (KVD_CUBLAS names it): the rate of products is our own of 8,192^3\n");
		}
		x = random_array((size_t)DENSE * DENSE, 1);
		w = random_array((size_t)64 * 2048 * 1536, 1.0f / 45);
		y = nn_array<uint8_t>((size_t)DENSE * DENSE * 2);
		copy = nn_array<uint8_t>(2 * COPY);
		CU(cudaMemset(copy, 0x5a, 2 * COPY));
	}

	kvk_nn_product_t dense(uint32_t rows, uint32_t n, uint32_t k) const
	{
		kvk_nn_product_t p = {};

		p.k = k;
		p.n = n;
		p.groups = 1;
		p.max_rows = rows;
		p.x = x;
		p.w = w;
		p.y = y;
		p.out = KVK_NN_BF16;

		return p;
	}

	// Seconds.
	static double ours(const kvk_nn_product_t &p, int times, kvk_nn_t *nn = nn_device.nn)
	{
		return nn_time([&] { nn_must(kvk_nn_product(nn, &p, nn_stream())); }, times, 3);
	}
	double theirs(uint32_t rows, uint32_t n, uint32_t k) const
	{
		return nn_time([&] { cublas.product(rows, n, k, x, w, (kvk_bf16_t *)y); }, 3, 3);
	}

	double flops() const // a second
	{
		const double work = 2.0 * DENSE * DENSE * DENSE;

		return work / (has_cublas ? theirs(DENSE, DENSE, DENSE) : ours(dense(DENSE, DENSE, DENSE), 3));
	}
	double bytes() const // a second, read and written
	{
		return 2.0 * COPY /
		       nn_time([&] { CU(cudaMemcpyAsync(copy, copy + COPY, COPY, cudaMemcpyDeviceToDevice, nn_device.stream)); }, 3, 3);
	}
};

void dense_row(const device_t &d, uint32_t rows, uint32_t n, uint32_t k)
{
	const double work = 2.0 * rows * n * k;
	const kvk_nn_product_t p = d.dense(rows, n, k);

	if (d.has_cublas) {
		row(text("dense, %u x %u x %u", rows, n, k), "cuBLAS", 0.75, [&] { return work / device_t::ours(p, 5) / 1e12; },
		    [&] { return work / d.theirs(rows, n, k) / 1e12; });
	} else {
		printf("# dense, %u x %u x %u: %.1f TFLOP/s\n", rows, n, k, work / device_t::ours(p, 5) / 1e12);
	}
}

// Tiles that a product has against those of two panels, which rows of a group have. With tiles of one panel in
// w waves and of two in v: one costs v / w / ratio of one of two (PANEL_COST of gpu_product.c).
void panel_row(const device_t &d, uint32_t sms, uint32_t rows, uint32_t n, uint32_t k)
{
	const kvk_nn_product_t p = d.dense(rows, n, k);
	const double work = 2.0 * rows * n * k;
	const uint32_t panels = kvk_nn_choose_tiles(&p, sms) == KVK_NN_TILES_OF_ONE_PANEL ? 1 : 2;
	kvk_nn_product_t grouped = p;
	uint32_t *first = nn_upload(words_t{0, rows});
	kvk_nn_t *nn;

	nn_must(kvk_nn_gpu_open(nn_device.gpu, sms, &nn));
	grouped.first = first;
	row(text("dense, %u x %u x %u on %u SMs, tiles of %u", rows, n, k, sms, panels * KVK_NN_PANEL), "tiles of 256", 0.97,
	    [&] { return work / device_t::ours(p, 20, nn) / 1e12; }, [&] { return work / device_t::ours(grouped, 20, nn) / 1e12; });
	kvk_nn_close(nn);
	CU(cudaFree(first));
}

struct grouped_t {
	uint32_t k, n;
	kvk_nn_out_t out;
};

const uint32_t EXPERTS = 64;

// Rows of SWIGLU are gathered, as an engine's are.
void grouped_row(const device_t &d, const grouped_t &g, uint32_t rows, spread_t spread)
{
	const uint32_t all = rows * EXPERTS;
	const words_t first = make_first(EXPERTS, all, spread);
	const double work = 2.0 * all * g.k * g.n, weights = 2.0 * EXPERTS * g.k * g.n;
	kvk_nn_product_t p = d.dense(all, g.n, g.k);
	words_t record(all);
	double seconds = 0, bound = 0;
	uint32_t *device_first = nn_upload(first), *device_record;

	for (uint32_t i = 0; i < all; i++) {
		record[i] = i;
	}
	std::shuffle(record.begin(), record.end(), rng);
	device_record = nn_upload(record);
	p.groups = EXPERTS;
	p.first = device_first;
	p.out = g.out;
	if (g.out == KVK_NN_SWIGLU) {
		p.x = nullptr;
		p.rows = p.own = d.x;
		p.record = device_record;
		p.own_count = all / 2;
	}
	row(text("%s, %u experts, k %u, n %u, %u rows an expert, %s", OUT_NAMES[g.out], EXPERTS, g.k, g.n, rows, SPREAD_NAMES[spread]),
	    "weights at the rate of a copy, or products at that of 8192^3", 0.75,
	    [&] {
		    seconds = device_t::ours(p, 10);
		    return work / seconds / 1e12;
	    },
	    [&] {
		    bound = std::max(weights / d.bytes(), work / d.flops());
		    return work / bound / 1e12;
	    });
	printf("    %.1f us, at best %.1f; weights at %.0f GB/s\n", seconds * 1e6, bound * 1e6, weights / seconds / 1e9);
	CU(cudaFree(device_first));
	CU(cudaFree(device_record));
}

} // namespace

bench_outcome_t nn_product_right(int)
{
	const uint32_t cases = bench_quick() ? 24 : 64;
	const uint64_t seed = bench_param_size("seed", 4711);
	const char *why = nn_open();
	uint64_t count = 0;

	if (why) {
		return bench_skip("%s", why);
	}
	printf("# seed %llu\n", (unsigned long long)seed);
	rng.seed(seed);
	nn_must(kvk_nn_gpu_open(nn_device.gpu, 1, &one_sm));
	for (const case_t &c : make_corners()) {
		if (c.rows() > 0) {
			check_case(c, seed + count++);
			continue;
		}
		// Rows are not given: only that it ends and writes nothing.
		const input_t in = make_input(c, seed);
		kvk_nn_product_t p = make_product(c, in);
		const std::vector<uint8_t> y = make_y(c);

		p.max_rows = 100;
		if (run_gpu(nn_device.nn, c, in, p, y) != y) {
			fail(c, "it writes without rows");
		}
		count++;
	}
	for (uint32_t i = 0; i < cases; i++, count++) {
		check_case(make_case(i, 2e8), seed + 1000 + i * 3);
	}
	for (const kvk_nn_out_t out : {KVK_NN_BF16, KVK_NN_F32, KVK_NN_ADD, KVK_NN_SWIGLU}) {
		check_alone(out);
	}
	printf("nn_product: %llu cases are the twin's, within 1e-2 in BF16 and 1e-3 in fp32; a row has the same bits alone and amid 300, in "
	       "tiles of one panel and of two\n",
	       (unsigned long long)count);
	kvk_nn_close(one_sm);

	return BENCH_DONE;
}

bench_outcome_t nn_product_speed(int)
{
	const grouped_t shapes[] = {{2048, 1536, KVK_NN_SWIGLU}, {2048, 1536, KVK_NN_BF16}, {768, 2048, KVK_NN_BF16}};
	const char *why = nn_open();
	device_t d;

	if (why) {
		return bench_skip("%s", why);
	}
	rng.seed(7);
	d.open();
	printf("# memory copies at %.0f GB/s, read and written\n", d.bytes() / 1e9);
	dense_row(d, 8192, 8192, 8192);
	dense_row(d, 4096, 5120, 2048);
	for (const uint32_t left : {0u, 8u}) { // to transport
		for (const uint32_t rows : {1024u, 2048u}) {
			panel_row(d, kvk_gpu_sms(nn_device.gpu) - left, rows, 5120, 2048);
			panel_row(d, kvk_gpu_sms(nn_device.gpu) - left, rows, 2048, 4096);
		}
	}
	for (const grouped_t &g : shapes) {
		for (const uint32_t rows : {8u, 64u, 128u, 256u, 512u}) {
			for (const spread_t spread : {EVEN, ANY, SKEWED}) { // a batch's rows are drawn
				const bool is_row = spread == ANY ? rows == 128 || rows == 256 : spread == SKEWED || rows != 128;

				if (is_row && !bench_late() && (!bench_quick() || rows == 64)) {
					grouped_row(d, g, rows, spread);
				}
			}
		}
	}

	return BENCH_DONE;
}
