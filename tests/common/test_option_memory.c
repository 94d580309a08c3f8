/* Options when memory runs out: each allocation of ours fails in turn, nothing changes, nothing leaks. Linked with --wrap, so that
 * only calls from our code fail; libyaml's own go through. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kv/option.h"

#include <errno.h>

void *__real_calloc(size_t count, size_t size);
void *__real_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_malloc(size_t size);

static uint64_t calls, fail_at;

static int fails(void)
{
	if (fail_at == 0 || ++calls != fail_at) {
		return 0;
	}
	errno = ENOMEM;

	return 1;
}

void *__wrap_calloc(size_t count, size_t size)
{
	return fails() ? NULL : __real_calloc(count, size);
}

void *__wrap_malloc(size_t size)
{
	return fails() ? NULL : __real_malloc(size);
}

typedef struct values {
	uint64_t size;
	char path[KV_OPTION_STRING_MAX];
} values_t;

static const kv_option_t rows[] = {
	{"cpu.size", KV_OPTION_SIZE, "4GiB", NULL, NULL, NULL, 0, offsetof(values_t, size), "size"},
	{"nvme.path", KV_OPTION_PATH, "", NULL, NULL, NULL, 0, offsetof(values_t, path), "path"},
};

static const kv_option_table_t table = {rows, 2, "KVD_"};

static kv_status_t from_text(values_t *values, kv_option_error_t *error)
{
	return kv_options_text(&table, "x", kv_slice_str("cpu.size: 1GiB\n"), values, NULL, error);
}

static kv_status_t from_env(values_t *values, kv_option_error_t *error)
{
	static char *good[] = {"KVD_CPU_SIZE=1GiB", NULL};

	return kv_options_env(&table, good, values, NULL, error);
}

/* The hint needs memory; without it the error still names the variable. */
static kv_status_t from_bad_env(values_t *values, kv_option_error_t *error)
{
	static char *bad[] = {"KVD_CPU_SIEZ=1GiB", NULL};
	kv_status_t status = kv_options_env(&table, bad, values, NULL, error);

	assert_true(status == KV_ERR_NOMEM || strstr(error->text, "KVD_CPU_SIEZ"));

	return status;
}

static char path[256];

static kv_status_t from_file(values_t *values, kv_option_error_t *error)
{
	return kv_options_file(&table, path, values, NULL, error);
}

static void each_failure(kv_status_t (*read)(values_t *, kv_option_error_t *), kv_status_t at_last)
{
	kv_option_error_t error;
	kv_status_t status;
	values_t values;

	for (uint64_t n = 1;; n++) {
		kv_options_default(&table, &values, NULL);
		error.text[0] = '\0';
		calls = 0;
		fail_at = n;
		status = read(&values, &error);
		fail_at = 0;
		if (calls < n) {
			break;
		}
		assert_true(status != KV_OK);
		assert_true(error.text[0] != '\0');
		assert_true(values.size == UINT64_C(4) << 30);
	}
	assert_int_equal(status, at_last);
	assert_true(values.size == (at_last == KV_OK ? UINT64_C(1) << 30 : UINT64_C(4) << 30));
}

static void p6_options_without_memory_change_nothing(void **state)
{
	char dir[128];
	FILE *file;

	(void)state;
	kv_test_dir_make(dir, sizeof dir);
	snprintf(path, sizeof path, "%s/kvd.conf", dir);
	file = fopen(path, "w");
	fputs("cpu.size: 1GiB\n", file);
	fclose(file);
	each_failure(from_text, KV_OK);
	each_failure(from_env, KV_OK);
	each_failure(from_bad_env, KV_ERR_CONFIG);
	each_failure(from_file, KV_OK);
	kv_test_dir_remove(dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {cmocka_unit_test(p6_options_without_memory_change_nothing)};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
