/* MessagePack: what msgpack-c writes we read, and hostile bytes are refused without believing
 * them. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "mp_compare.h"

static const uint64_t edges[] = {KV_ROWS(0, 1, 31, 32, 127, 128, 255, 256, 32767, 32768, 65535, 65536, INT32_MAX,
					 UINT64_C(1) << 31, UINT32_MAX, UINT64_C(1) << 32, INT64_MAX, UINT64_C(1) << 63,
					 UINT64_MAX)};

#define EDGES (sizeof edges / sizeof edges[0])

static uint8_t ours[1 << 18];
static char bytes[70000];

/* What the packer has written is read back, object by object; the writer is empty again. */
static void read_back(kv_mp_writer_t *w)
{
	assert_true(w->len <= w->cap);
	for (size_t at = 0; at < w->len;) {
		kv_mp_reader_t r = {ours + at, ours + w->len};

		assert_true(mp_compare(ours + at, w->len - at));
		assert_int_equal(kv_mp_skip(&r, KV_MP_MAX_DEPTH), KV_OK);
		at = (size_t)(r.at - ours);
	}
	w->len = 0;
}

KV_TEST(every_value_that_msgpack_c_writes_is_read)
{
	static const uint32_t lens[] = {0, 1, 15, 16, 31, 32, 255, 256, 65535, 65536};
	kv_mp_writer_t w = {ours, sizeof ours, 0};
	msgpack_packer packer = kv_mp_packer(&w);

	for (size_t i = 0; i < EDGES; i++) {
		for (int64_t d = -1; d <= 1; d++) {
			uint64_t value = edges[i] + (uint64_t)d;

			msgpack_pack_uint64(&packer, value);
			msgpack_pack_int64(&packer, (int64_t)(0 - value));
			read_back(&w);
		}
	}
	for (size_t i = 0; i < sizeof lens / sizeof lens[0]; i++) {
		msgpack_pack_str_with_body(&packer, bytes, lens[i]);
		msgpack_pack_bin_with_body(&packer, bytes, lens[i]);
		read_back(&w);
		msgpack_pack_array(&packer, lens[i]);
		for (uint32_t j = 0; j < lens[i]; j++) {
			msgpack_pack_nil(&packer);
		}
		read_back(&w);
		msgpack_pack_map(&packer, lens[i]);
		for (uint32_t j = 0; j < lens[i]; j++) {
			msgpack_pack_true(&packer);
			msgpack_pack_false(&packer);
		}
		read_back(&w);
	}
	for (int i = 0; i < 5; i++) {
		const double values[] = {0.0, -1.5, 1e300, 3.25, -0.0};

		msgpack_pack_double(&packer, values[i]);
		read_back(&w);
	}
}

KV_TEST(a_writer_that_is_full_counts_and_leaves_the_rest_alone)
{
	uint8_t out[4] = {9, 9, 9, 9};
	kv_mp_writer_t w = {out, 3, 0};
	msgpack_packer packer = kv_mp_packer(&w);

	msgpack_pack_uint64(&packer, 5);
	msgpack_pack_uint64(&packer, 70000);
	assert_int_equal(w.len, 6);
	assert_int_equal(out[0], 5);
	assert_int_equal(out[3], 9);
	msgpack_pack_uint64(&packer, 1);
	assert_int_equal(out[1], 9);
	assert_true(w.len > w.cap);
}

KV_TEST(p10_counts_over_the_bytes_left_are_refused)
{
	static const struct {
		const char *data;
		size_t len;
	} bad[] = {KV_ROWS({"", 0}, {"\xdd\xff\xff\xff\xff", 5}, {"\xdd\x07\xff\xff\xff", 5},
			   {"\xdf\xff\xff\xff\xff\x00\x00", 7}, {"\xdf\x80\x00\x00\x00\x00\x00", 7},
			   {"\xdc\x00\x02\x00", 4}, {"\xde\x00\x01\x00", 4}, {"\x92\x00", 2}, {"\x81\x00", 2},
			   {"\xdb\xff\xff\xff\xff", 5}, {"\xc6\xff\xff\xff\xffxxxx", 9},
			   {"\xc9\xff\xff\xff\xff\x01", 6}, {"\xc7\x01\x01", 3}, {"\xd8\x01", 2}, {"\xa1", 1},
			   {"\xc1", 1}, {"\xcc", 1}, {"\xcb\x00", 2}, {"\x91\xc1", 2})};

	for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
		kv_mp_reader_t r = {(const uint8_t *)bad[i].data, (const uint8_t *)bad[i].data + bad[i].len};

		assert_int_equal(kv_mp_skip(&r, KV_MP_MAX_DEPTH), KV_ERR_PROTO);
		assert_ptr_equal(r.at, bad[i].data);
	}
}

KV_TEST(p10_nesting_has_a_bound)
{
	uint8_t deep[64];
	kv_mp_reader_t r;

	for (unsigned depth = 0; depth <= 20; depth++) {
		memset(deep, 0x91, depth);
		deep[depth] = 0x00;
		for (unsigned max = 0; max <= 20; max++) {
			unsigned bound = max < KV_MP_MAX_DEPTH ? max : KV_MP_MAX_DEPTH;

			r = (kv_mp_reader_t){deep, deep + depth + 1};
			assert_int_equal(kv_mp_skip(&r, max), depth <= bound ? KV_OK : KV_ERR_PROTO);
		}
	}
	memset(deep, 0x91, sizeof deep);
	r = (kv_mp_reader_t){deep, deep + sizeof deep};
	assert_int_equal(kv_mp_skip(&r, 1000), KV_ERR_PROTO);
	memset(deep, 0x90, sizeof deep);
	r = (kv_mp_reader_t){deep, deep + sizeof deep};
	assert_int_equal(kv_mp_skip(&r, 0), KV_ERR_PROTO);
	assert_int_equal(kv_mp_skip(&r, 1), KV_OK);
	assert_ptr_equal(r.at, deep + 1);
}

/* All values of the first bytes with random ones behind: whatever we accept msgpack-c reads the same way. */
KV_TEST(p10_random_bytes_are_read_as_msgpack_c_reads_them)
{
	kv_test_rng_t rng = {kv_test_seed()};
	uint8_t data[48];

	for (unsigned first = 0; first < 256; first++) {
		for (int round = 0; round < 400; round++) {
			size_t len = 1 + kv_test_below(&rng, sizeof data);

			kv_test_fill(&rng, data, len);
			data[0] = (uint8_t)first;
			if (first >= 0xc0 && first < 0xe0 && round % 2) {
				memset(data + 1, 0, len > 4 ? 3 : 0);
			}
			if (!mp_compare(data, len)) {
				fail_msg("first byte %02x round %d", first, round);
			}
		}
	}
}
