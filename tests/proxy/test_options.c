/* Options of kvd-pd-proxy: bad ones are refused with a sentence, and the page in docs/ is the table's. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "options.h"

static kv_status_t read_options(const char *a, const char *b, kv_option_error_t *error)
{
	char *argv[] = {(char *)(uintptr_t) "kvd-pd-proxy", (char *)(uintptr_t)a, (char *)(uintptr_t)b, NULL};
	kvp_action_t action;
	kvp_options_t options;

	return kvp_options_read(b ? 3 : 2, argv, &options, &action, error);
}

KV_TEST(p10_bad_options_are_refused_with_a_sentence)
{
	static const char *const bad[] = {"--decode=10.0.0.1:8000",
					  "--decode=http://",
					  "--decode=http://a/?x",
					  "--decode=ftp://a",
					  "--prefill=http://a,b",
					  "--http.listen=8080",
					  "--http.listen=0.0.0.0:8080",
					  "--kvd.peers=node0",
					  "--skip.token=1",
					  "--skip.tokens",
					  "--skip.wait=3",
					  "skip.tokens=1",
					  "--events.decode=tcp://a:1",
					  "--events.decode=tcp://*:5557",
					  "--events.decode=tcp://1.2.3.4:1,tcp://1.2.3.4:2",
					  "--events.prefill=tcp://1.2.3.4:1",
					  "--events.blocks=0",
					  "--config=/nonexistent"};
	kv_option_error_t error;

	assert_int_equal(read_options("--decode=http://a:1", "--prefill=http://b:1/,https://c", &error), KV_OK);
	assert_int_equal(read_options("--decode=http://a:1", "--sequential", &error), KV_OK);
	assert_int_equal(read_options("--decode=http://a:1", "--events.decode=tcp://1.2.3.4:1", &error), KV_OK);
	setenv("KVD_PD_PROXY_PREFILL", "http://b:1,http://c:1", 1);
	setenv("KVD_PD_PROXY_DECODE", "http://a:1", 1);
	assert_int_equal(read_options("--kvd.peers=node-0,n.1", NULL, &error), KV_OK);
	assert_int_equal(read_options("--kvd.peers=node0", NULL, &error), KV_ERR_CONFIG);
	assert_non_null(strstr(error.text, "1 names for 2"));
	assert_int_equal(read_options("--kvd.peers=node0,a\"b", NULL, &error), KV_ERR_CONFIG);
	unsetenv("KVD_PD_PROXY_PREFILL");
	unsetenv("KVD_PD_PROXY_DECODE");
	for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
		assert_true(read_options(strstr(bad[i], "--decode") ? "--sequential" : "--decode=http://a:1", bad[i],
					 &error) < 0);
		assert_true(strlen(error.text) > 10);
	}
	assert_int_equal(read_options("--sequential", NULL, &error), KV_ERR_CONFIG);
	assert_non_null(strstr(error.text, "at least one engine"));
}

KV_TEST(p5_a_list_of_too_many_engines_is_refused)
{
	char prefill[KV_OPTION_STRING_MAX] = "--prefill=";
	kv_option_error_t error;

	for (int i = 0; i < 45; i++) {
		strcat(prefill, i ? ",http://a" : "http://a");
	}
	assert_int_equal(read_options("--decode=http://a", prefill, &error), KV_OK);
	prefill[0] = '\0';
	strcat(prefill, "--decode=");
	for (int i = 0; i < 45; i++) {
		strcat(prefill, i ? ",http://a" : "http://a");
	}
	setenv("KVD_PD_PROXY_PREFILL", prefill + 9, 1);
	assert_int_equal(read_options(prefill, NULL, &error), KV_ERR_CONFIG);
	assert_non_null(strstr(error.text, "at most 64"));
	unsetenv("KVD_PD_PROXY_PREFILL");
}

KV_TEST(p10_the_page_is_that_of_the_table)
{
	char command[1024], printed[65536], kept[65536];
	FILE *pipe, *file = fopen(PROXY_PAGE, "re");
	size_t a, b;

	snprintf(command, sizeof command, "'%s' --options-page", kv_test_program(PROXY_PROGRAM));
	pipe = popen(command, "re");
	assert_true(pipe && file);
	a = fread(printed, 1, sizeof printed, pipe);
	b = fread(kept, 1, sizeof kept, file);
	assert_int_equal(pclose(pipe), 0);
	fclose(file);
	if (a != b || memcmp(printed, kept, a) != 0) {
		fail_msg("%s is not what kvd-pd-proxy --options-page prints: run scripts/docs.sh", PROXY_PAGE);
	}
}
