/* The status list, and what every table owes its readers. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kv/metric.h"
#include "kv/status.h"
#include "kv/wire.h"

static const struct {
	kv_status_t status;
	const char *name;
} all[] = {
#define ROW(name, code, radius, retry, exit_code, sentence) {KV_##name, #name},
	KV_STATUS_LIST(ROW)
#undef ROW
};

KV_TEST(every_outcome_has_a_name_a_sentence_and_an_exit_code)
{
	for (size_t i = 0; i < KV_COUNT_OF(all); i++) {
		kv_status_t status = all[i].status;

		assert_string_equal(kv_status_name(status), all[i].name);
		assert_true(strlen(kv_status_text(status)) > 3);
		assert_true(kv_status_exit_code(status) >= 0 && kv_status_exit_code(status) < 128);
		assert_true(kv_status_radius(status) <= KV_RADIUS_DAEMON && kv_status_retry(status) <= KV_RETRY_LATER);
		assert_int_equal(strncmp(all[i].name, "ERR_", 4) == 0, (int)status < 0);
		assert_true((int)status >= 0 || kv_status_exit_code(status) != 0);
		for (size_t j = 0; j < i; j++) {
			assert_int_not_equal(status, all[j].status);
		}
	}
}

KV_TEST(a_number_of_a_later_version_is_unknown_not_undefined)
{
	volatile int number = -1000;
	kv_status_t later = (kv_status_t)number;

	assert_string_equal(kv_status_name(later), "UNKNOWN");
	assert_true(strlen(kv_status_text(later)) > 3);
	assert_int_equal(kv_status_exit_code(later), 70);
	assert_int_equal(kv_status_radius(later), KV_RADIUS_REQUEST);
	assert_int_equal(kv_status_retry(later), KV_RETRY_NO);
}

/* One sentence that fits into a table of a page: lower case, one line, no full stop, no column mark. */
static void is_a_sentence(const char *text)
{
	size_t len = strlen(text);

	if (len < 1 || strpbrk(text, "|\n\t") || text[len - 1] == '.') {
		fail_msg("not fit for a table: [%s]", text);
	}
}

KV_TEST(help_texts_fit_into_the_pages_made_from_them)
{
	for (size_t i = 0; i < KV_COUNT_OF(all); i++) {
		is_a_sentence(kv_status_text(all[i].status));
	}
	for (unsigned i = 0; i < KV_METRIC_COUNT; i++) {
		is_a_sentence(kv_metric_infos[i].help);
		assert_null(strchr(kv_metric_infos[i].help, '\\'));
	}
	for (uint32_t i = 0; i < kv_request_count; i++) {
		const kv_request_t *request = &kv_requests[i];

		is_a_sentence(request->help);
		assert_int_equal(request->roles == KV_ROLE_NONE, request->reply.count == 0);
		assert_true(request->ask.count >= 1);
		for (uint32_t j = 0; j < request->ask.count; j++) {
			is_a_sentence(request->ask.fields[j].help);
		}
		for (uint32_t j = 0; j < request->reply.count; j++) {
			is_a_sentence(request->reply.fields[j].help);
		}
	}
}
