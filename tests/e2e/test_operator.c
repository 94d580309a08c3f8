/* What an operator sees first: engines, hit rates, and blocks on disk before an engine attaches. */
#include "e2e/rig/rig.h"

#include <signal.h>

#define LEN 8u

static int status_has(const rig_t *rig, const char *arguments, const char *text)
{
	static char out[1 << 16];

	for (uint64_t until = rig_now_ms() + RIG_WAIT_MS; rig_now_ms() < until; usleep(5000)) {
		(void)rig_kvctl(rig, arguments, out, sizeof out);
		if (strstr(out, text)) {
			return 1;
		}
	}
	print_error("kvctl %s: no \"%s\" in\n%s\n", arguments, text, out);

	return 0;
}

static int log_gets(const rig_t *rig, const char *text)
{
	for (uint64_t until = rig_now_ms() + RIG_WAIT_MS; !rig_log_has(rig, text) && rig_now_ms() < until;) {
		usleep(5000);
	}

	return rig_log_has(rig, text);
}

/* Three of four prompt tokens were found; the last quarter was not stored. */
static void engines_and_hit_rates_are_in_the_status(void **state)
{
	const kvc_report_t report = {.struct_size = sizeof report,
				     .request = 1,
				     .query_tokens = 4 * LEN,
				     .hit_cpu_tokens = 3 * LEN,
				     .why = KV_WHY_ABSENT};
	user_t user;
	rig_t rig;

	(void)state;
	rig_init(&rig, 0);
	rig_start(&rig);
	user_attach(&user, &rig, "llama");
	assert_true(rig_log_has(&rig, "a member has attached: namespace default instance "));
	assert_true(log_gets(&rig, "a space is open: namespace default space 1 model \"llama\""));
	kvc_report(user.space, &report);
	assert_true(status_has(&rig, "status",
			       "75.0 % of 32 prompt tokens in 1 prompts (cpu 75.0 %, disk 0.0 %)\n"
			       "  missed: not stored 25.0 %\n"));
	assert_true(status_has(&rig, "status", "\nengines\n"));
	assert_true(status_has(&rig, "status", "  space 1  model=llama\n"));
	assert_true(status_has(
		&rig, "status --json",
		"\"hits\":{\"namespace\":{\"lookups\":1,\"query_tokens\":32,\"hit_gpu_tokens\":0,\"hit_cpu_tokens\":24,"
		"\"hit_disk_tokens\":0,\"hit_rate\":0.7500,"));
	user_leave(&user);
	assert_true(log_gets(&rig, "a member has detached: namespace default instance "));
	rig_fini(&rig);
}

static void disk_blocks_count_before_an_engine_attaches(void **state)
{
	kvc_key_t keys[LEN];
	user_t user;
	rig_t rig;

	(void)state;
	rig_init(&rig, 1);
	rig_start(&rig);
	user_attach(&user, &rig, "llama");
	user_keys(&user, 1, LEN, keys);
	assert_int_equal(user_put(&user, keys, 0, LEN, 1, NULL), KVC_OK);
	user_leave(&user);
	assert_int_equal(rig_kill(&rig, SIGTERM), 0);
	rig_start(&rig);
	assert_true(rig_metric_is(&rig, "kvd_tier_blocks{tier=disk}", LEN));
	assert_true(rig_metric_is(&rig, "kvd_tier_blocks{tier=cpu}", 0));
	assert_true(rig_metric_is(&rig, "kvd_spaces", 0));
	rig_fini(&rig);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(engines_and_hit_rates_are_in_the_status),
		cmocka_unit_test(disk_blocks_count_before_an_engine_attaches),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
