/* Options when memory runs out: each allocation of ours fails in turn, nothing changes, nothing leaks. Linked with
 * --wrap, so that only calls from our code fail; libyaml's own go through. */
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

	return kv_options_env(&table, good, values, NULL, NULL, error);
}

static char warned_[400];

static void keep_warning(const char *sentence)
{
	snprintf(warned_, sizeof warned_, "%s", sentence);
}

/* The hint needs memory; without it the warning still names the variable, and the others count. */
KV_TEST(p6_a_warning_without_memory_still_names_the_variable)
{
	static char *unknown[] = {"KVD_CPU_SIEZ=2GiB", "KVD_CPU_SIZE=1GiB", NULL};
	kv_option_error_t error;
	values_t values;

	for (uint64_t n = 2; n <= 3; n++) { /* the first is for the values */
		kv_options_default(&table, &values, NULL);
		warned_[0] = '\0';
		calls = 0;
		fail_at = n;
		assert_int_equal(kv_options_env(&table, unknown, &values, NULL, keep_warning, &error), KV_OK);
		fail_at = 0;
		assert_true(calls >= n);
		assert_string_equal(warned_, "unknown environment variable KVD_CPU_SIEZ is ignored");
		assert_true(values.size == UINT64_C(1) << 30);
	}
}

static char path[256];

static kv_status_t from_file(values_t *values, kv_option_error_t *error)
{
	return kv_options_file(&table, path, values, NULL, error);
}

static void each_failure(kv_status_t (*read)(values_t *, kv_option_error_t *))
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
	assert_int_equal(status, KV_OK);
	assert_true(values.size == UINT64_C(1) << 30);
}

KV_TEST(p6_options_without_memory_change_nothing)
{
	char dir[128];
	FILE *file;

	kv_test_dir_make(dir, sizeof dir);
	snprintf(path, sizeof path, "%s/kvd.conf", dir);
	file = fopen(path, "w");
	fputs("cpu.size: 1GiB\n", file);
	fclose(file);
	each_failure(from_text);
	each_failure(from_env);
	each_failure(from_file);
	kv_test_dir_remove(dir);
}
