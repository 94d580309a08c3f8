/* Bounded text, JSON strings, UTF-8. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kv/text.h"
#include "kv/utf8.h"

KV_TEST(text_is_cut_at_the_buffer_and_counted_whole)
{
	char out[8];
	kv_text_t text = kv_text(out, sizeof out);
	kv_text_t none = kv_text(NULL, 0);

	kv_text_addf(&text, "%s", "1234");
	assert_true(kv_text_fits(&text));
	kv_text_add(&text, "567", 3);
	assert_true(kv_text_fits(&text));
	assert_string_equal(out, "1234567");
	kv_text_addf(&text, "%d", 8);
	assert_false(kv_text_fits(&text));
	kv_text_add(&text, "9", 1);
	assert_string_equal(out, "1234567");
	assert_int_equal(text.len, 9);
	kv_text_addf(&none, "%d", 123);
	kv_text_add(&none, "4", 1);
	assert_int_equal(none.len, 4);
}

KV_TEST(a_json_string_is_always_valid)
{
	char out[128];
	kv_text_t text = kv_text(out, sizeof out);

	kv_text_json(&text, "a\"b\\c\n\t\x01\x7f\xc3\xa9\xff\xc2\x85");
	assert_string_equal(out, "\"a\\\"b\\\\c\\n\\t\\u0001\\u007f\xc3\xa9\xef\xbf\xbd\\u0085\"");
	text = kv_text(out, sizeof out);
	kv_text_json_n(&text, "a\0b", 3);
	assert_string_equal(out, "\"a\\u0000b\"");
}

KV_TEST(p10_utf8_that_is_not_shortest_or_is_cut_is_refused)
{
	static const char *const good[] = {KV_ROWS("", "a", "\x7e", "\xc2\xa0", "\xdf\xbf", "\xe0\xa0\x80",
						   "\xed\x9f\xbf", "\xee\x80\x80", "\xf0\x90\x80\x80",
						   "\xf4\x8f\xbf\xbf")};
	static const char *const bad[] = {KV_ROWS("\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xc2", "\xc2\x20",
						  "\xe0\x80\x80", "\xe0\x9f\xbf", "\xe2\x82", "\xed\xa0\x80",
						  "\xed\xbf\xbf", "\xf0\x80\x80\x80", "\xf0\x8f\xbf\xbf",
						  "\xf0\x9f\x98", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xfe",
						  "\xff", "\x1f", "\n", "\t", "\x7f", "\xc2\x80", "\xc2\x9f")};
	char text[32];

	for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
		for (int at = 0; at < 20; at++) {
			int n = snprintf(text, sizeof text, "%.*s%s", at, "abcdefghijklmnopqrstuv", good[i]);

			assert_int_equal(kv_utf8_clean((const uint8_t *)text, (size_t)n, 0), 1);
		}
	}
	for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
		for (int at = 0; at < 20; at++) {
			int n = snprintf(text, sizeof text, "%.*s%s", at, "abcdefghijklmnopqrstuv", bad[i]);

			if (kv_utf8_clean((const uint8_t *)text, (size_t)n, 0)) {
				fail_msg("accepted bad %zu behind %d", i, at);
			}
		}
	}
	assert_int_equal(kv_utf8_clean((const uint8_t *)"a\0b", 3, 1), 0);
	assert_int_equal(kv_utf8_clean((const uint8_t *)"a\n\tb", 4, 1), 1);
	assert_int_equal(kv_utf8_clean((const uint8_t *)"a\rb", 3, 1), 0);
}

/* The eight-at-a-time path agrees with the slow one for every byte at every place. */
KV_TEST(the_fast_path_agrees_with_the_slow_one)
{
	for (unsigned at = 0; at < 8; at++) {
		for (unsigned byte = 0; byte < 256; byte++) {
			uint8_t text[9] = "        ";

			text[at] = (uint8_t)byte;
			assert_int_equal(kv_utf8_clean(text, 8, 0), byte >= 0x20 && byte < 0x7f);
			assert_int_equal(kv_utf8_clean(text, 8, 1),
					 (byte >= 0x20 && byte < 0x7f) || byte == '\n' || byte == '\t');
		}
	}
}
