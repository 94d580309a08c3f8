/* The test environment itself: what other tests rest on. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

KV_TEST(the_nth_allocation_fails_once_and_every_block_is_counted)
{
	kv_test_env_t t;
	uint64_t runs = 0;

	kv_test_env_init(&t);
	KV_TEST_EACH_FAILURE(&t, n)
	{
		void *a = kv_alloc(&t.env, 10);
		void *b = kv_alloc(&t.env, 20);
		void *c = b ? kv_resize(&t.env, b, 20, 40) : NULL;

		assert_int_equal(kv_test_failed(&t), n <= 3);
		assert_int_equal(!a, n == 1);
		assert_int_equal(!b, n == 2);
		kv_free(&t.env, a);
		kv_free(&t.env, c ? c : b);
		assert_int_equal(kv_test_env_live(&t), 0);
		assert_int_equal(atomic_load(&t.live_bytes), 0);
		runs++;
	}
	assert_int_equal(runs, 4);
}

KV_TEST(resize_keeps_old_bytes_and_does_not_zero_new_ones)
{
	kv_test_env_t t;
	uint8_t *p;

	kv_test_env_init(&t);
	p = kv_alloc(&t.env, 2);
	assert_int_equal(p[0] | p[1], 0);
	p[1] = 7;
	p = kv_resize(&t.env, p, 2, 4);
	assert_int_equal(p[1], 7);
	assert_int_equal(p[3], 0xa5);
	p = kv_resize(&t.env, p, 4, 2);
	assert_int_equal(p[1], 7);
	kv_free(&t.env, p);
}

KV_TEST(the_same_seed_gives_the_same_numbers_and_the_clock_stands)
{
	kv_test_env_t a, b;
	uint8_t x[32], y[32];

	kv_test_env_init(&a);
	kv_test_env_init(&b);
	kv_random(&a.env, x, sizeof x);
	kv_random(&b.env, y, sizeof y);
	assert_memory_equal(x, y, sizeof x);
	assert_true(kv_now_ns(&a.env) == kv_now_ns(&b.env));
	kv_test_advance(&a, 5);
	assert_true(kv_now_ns(&a.env) == kv_now_ns(&b.env) + 5);
}

KV_TEST(a_long_log_line_is_cut_not_overrun)
{
	kv_test_env_t t;
	char text[2000];

	memset(text, 'x', sizeof text - 1);
	text[sizeof text - 1] = '\0';
	kv_test_env_init(&t);
	t.echo = 0;
	kv_logf(&t.env, KV_LOG_WARN, "test", "%s", text);
	assert_int_equal(strlen(t.last_line), 1023);
	assert_int_equal(atomic_load(&t.lines[KV_LOG_WARN]), 1);
}

KV_TEST(the_real_environment_has_a_clock_memory_and_randomness)
{
	const kv_env_t *env = &kv_env_posix;
	uint64_t a[4] = {0}, before = kv_now_ns(env);
	uint8_t *p = kv_alloc(env, 64);

	assert_non_null(p);
	for (unsigned i = 0; i < 64; i++) {
		assert_int_equal(p[i], 0);
	}
	p = kv_resize(env, p, 64, 128);
	assert_non_null(p);
	kv_free(env, p);
	kv_free(env, NULL);
	kv_random(env, a, sizeof a);
	assert_true(a[0] | a[1] | a[2] | a[3]);
	assert_true(kv_now_ns(env) >= before);
}

KV_TEST(a_temporary_directory_goes_with_everything_in_it)
{
	char path[128], inner[256];
	FILE *file;

	kv_test_dir_make(path, sizeof path);
	snprintf(inner, sizeof inner, "%s/file", path);
	file = fopen(inner, "w");
	assert_non_null(file);
	fclose(file);
	kv_test_dir_remove(path);
	assert_int_not_equal(access(path, F_OK), 0);
}

KV_TEST(a_broken_invariant_says_where_and_aborts)
{
	char text[512] = "";
	int ends[2], status;
	pid_t child;

	assert_int_equal(pipe(ends), 0);
	child = fork();
	if (child == 0) {
		signal(SIGABRT, SIG_DFL);
		dup2(ends[1], STDERR_FILENO);
		kv_assert(1 + 1 == 3);
		_exit(0);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
	assert_true(read(ends[0], text, sizeof text - 1) > 0);
	assert_non_null(strstr(text, "broken invariant: 1 + 1 == 3"));
	assert_non_null(strstr(text, "test_env.c"));
	close(ends[0]);
	close(ends[1]);
}

/* Where an engine would die with it: said once, counted, and the process goes on. */
KV_TEST(p7_a_broken_invariant_in_an_engine_is_counted_and_said_once)
{
	char text[4096] = "", *first;
	int ends[2], status;
	pid_t child;

	assert_int_equal(pipe(ends), 0);
	child = fork();
	if (child == 0) {
		dup2(ends[1], STDERR_FILENO);
		for (int i = 0; i < 3; i++) {
			if (kv_holds(1 + 1 == 3) || !kv_holds(1 + 1 == 2) || kv_broken_count() != (uint64_t)i + 1u) {
				_exit(1);
			}
		}
		_exit(0);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
	close(ends[1]);
	assert_true(read(ends[0], text, sizeof text - 1) > 0);
	first = strstr(text, "broken invariant: 1 + 1 == 3");
	assert_non_null(first);
	assert_null(strstr(first + 1, "broken invariant"));
	close(ends[0]);
}
