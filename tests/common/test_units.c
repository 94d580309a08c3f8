/* Sizes, durations, the nearest name. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kv/units.h"

typedef struct quantity {
	const char *text;
	uint64_t value;
} quantity_t;

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

KV_TEST(sizes_mean_what_their_unit_says)
{
	static const quantity_t good[] = {KV_ROWS({"0", 0}, {"4096", 4096}, {"12B", 12}, {"64KiB", 65536},
						  {"64kB", 64000}, {"64KB", 64000}, {"1.5GiB", UINT64_C(3) << 29},
						  {"0.001GB", 1000000}, {"2TB", UINT64_C(2000000000000)},
						  {"1PiB", UINT64_C(1) << 50}, {"8191PiB", UINT64_C(8191) << 50},
						  {"9223372036854775807", INT64_MAX}, {"1.999999999KiB", 2047})};
	static const char *const bad[] = {KV_ROWS("", "GiB", "-1", "+1", " 1", "1 ", "1 GiB", "1gib", "1K", "1G", "1.5",
						  "1.", ".5GiB", "1..5GiB", "0x10", "1e9", "1GiBB",
						  "9223372036854775808", "8192PiB", "99999999999999999999999",
						  "1.0000000001GiB", "18446744073709551616", "1GiB\n", "nan",
						  "18446744073709551.699kB", /* over 64 bits by its fraction alone */
						  "18446.9PB")};
	uint64_t value;

	for (size_t i = 0; i < COUNT(good); i++) {
		value = 1;
		assert_int_equal(kv_parse_size(good[i].text, &value), KV_OK);
		assert_true(value == good[i].value);
	}
	for (size_t i = 0; i < COUNT(bad); i++) {
		value = 99;
		if (kv_parse_size(bad[i], &value) != KV_ERR_ARG || value != 99) {
			fail_msg("accepted: [%s]", bad[i]);
		}
	}
}

KV_TEST(a_duration_has_a_unit)
{
	static const quantity_t good[] = {KV_ROWS({"0", 0}, {"0s", 0}, {"250us", 250000}, {"20ms", 20000000},
						  {"1.5s", 1500000000}, {"10m", UINT64_C(600000000000)},
						  {"2h", UINT64_C(7200000000000)}, {"1d", UINT64_C(86400000000000)},
						  {"7ns", 7}, {"0.5ns", 0})};
	static const char *const bad[] = {KV_ROWS("", "1", "30", "1.5", "-1s", "1 s", "1sec", "S", "1S", "106752d",
						  "1m30s", "0.0", "213503.99d")};
	uint64_t value;

	for (size_t i = 0; i < COUNT(good); i++) {
		assert_int_equal(kv_parse_duration(good[i].text, &value), KV_OK);
		assert_true(value == good[i].value);
	}
	for (size_t i = 0; i < COUNT(bad); i++) {
		value = 99;
		if (kv_parse_duration(bad[i], &value) != KV_ERR_ARG || value != 99) {
			fail_msg("accepted: [%s]", bad[i]);
		}
	}
}

KV_TEST(a_number_is_digits_only_and_uses_all_64_bits)
{
	static const char *const bad[] = {
		KV_ROWS("", "-1", "+1", "1 ", " 1", "0x1", "1.0", "18446744073709551616", "99999999999999999999")};
	uint64_t value;

	assert_int_equal(kv_parse_u64("18446744073709551615", &value), KV_OK);
	assert_true(value == UINT64_MAX);
	assert_int_equal(kv_parse_u64("007", &value), KV_OK);
	assert_int_equal(value, 7);
	for (size_t i = 0; i < COUNT(bad); i++) {
		value = 99;
		assert_int_equal(kv_parse_u64(bad[i], &value), KV_ERR_ARG);
		assert_int_equal(value, 99);
	}
}

KV_TEST(quantities_are_written_short_and_cut_to_the_buffer)
{
	char out[32];

	assert_string_equal(kv_format_size(0, out, sizeof out), "0B");
	assert_string_equal(kv_format_size(12, out, sizeof out), "12B");
	assert_string_equal(kv_format_size(65536, out, sizeof out), "64KiB");
	assert_string_equal(kv_format_size(UINT64_C(3) << 29, out, sizeof out), "1.5GiB");
	assert_string_equal(kv_format_size((1u << 20) + (1u << 18), out, sizeof out), "1.25MiB");
	assert_string_equal(kv_format_size(UINT64_MAX, out, sizeof out), "16383.99PiB");
	assert_string_equal(kv_format_duration(0, out, sizeof out), "0s");
	assert_string_equal(kv_format_duration(250000, out, sizeof out), "250us");
	assert_string_equal(kv_format_duration(1500000000, out, sizeof out), "1.5s");
	assert_string_equal(kv_format_duration(20000000, out, sizeof out), "20ms");
	assert_string_equal(kv_format_duration(UINT64_C(5400000000000), out, sizeof out), "1.5h");
	assert_string_equal(kv_format_size(UINT64_MAX, out, 4), "163");
}

KV_TEST(the_nearest_name_is_found_and_a_far_one_is_not)
{
	static const char *const names[] = {"cpu.size", "cpu.slab_size", "nvme.path", "policy", "spin"};
	char huge[500];

	assert_string_equal(kv_nearest("cpu.siez", names, COUNT(names)), "cpu.size");
	assert_string_equal(kv_nearest("cpu.slabsize", names, COUNT(names)), "cpu.slab_size");
	assert_string_equal(kv_nearest("policy", names, COUNT(names)), "policy");
	assert_string_equal(kv_nearest("pin", names, COUNT(names)), "spin");
	assert_null(kv_nearest("zzzz", names, COUNT(names)));
	assert_null(kv_nearest("", names, COUNT(names)));
	assert_null(kv_nearest("policy", names, 0));
	memset(huge, 'a', sizeof huge - 1);
	huge[sizeof huge - 1] = '\0';
	assert_null(kv_nearest(huge, names, COUNT(names)));
}
