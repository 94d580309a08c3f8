/* Options: what is accepted, where an error points, and that an error changes nothing. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kv/option.h"

#include <unistd.h>

typedef struct values {
	uint64_t size;
	uint64_t slab_size;
	uint64_t depth;
	uint64_t ttl;
	int spin;
	int policy;
	char path[KV_OPTION_STRING_MAX];
	char listen[KV_OPTION_STRING_MAX];
	char names[KV_OPTION_STRING_MAX];
	uint64_t odd;
} values_t;

#define AT(member) offsetof(values_t, member)

static const kv_option_t rows[] = {
	{"cpu.size", KV_OPTION_SIZE, "4GiB", "64MiB", "16TiB", NULL, 0, AT(size), "memory of the pool"},
	{"cpu.slab_size", KV_OPTION_SIZE, "256MiB", NULL, NULL, NULL, 0, AT(slab_size), "bytes a slab"},
	{"nvme.queue_depth", KV_OPTION_U64, "64", "1", "4096", NULL, 0, AT(depth), "writes in flight"},
	{"lease.ttl", KV_OPTION_DURATION, "30s", "10ms", NULL, NULL, 1, AT(ttl), "life of a lease"},
	{"spin", KV_OPTION_BOOL, "yes", NULL, NULL, NULL, 1, AT(spin), "busy-wait before sleeping"},
	{"policy", KV_OPTION_ENUM, "lru", NULL, NULL, "lru,fifo", 0, AT(policy), "who is evicted"},
	{"nvme.path", KV_OPTION_PATH, "", NULL, NULL, NULL, 0, AT(path), "directory of the disk tier"},
	{"http.listen", KV_OPTION_STRING, "127.0.0.1:9464", NULL, NULL, NULL, 0, AT(listen), "address, or \"off\""},
	{"namespaces", KV_OPTION_LIST, "default", NULL, NULL, NULL, 0, AT(names), "namespaces to serve"},
	{"odd-one", KV_OPTION_U64, "0", NULL, "9", NULL, 0, AT(odd), "a name with a dash"},
};

static const kv_option_table_t table = {rows, sizeof rows / sizeof rows[0], "KVD_"};

typedef struct fixture {
	values_t values;
	kv_option_source_t sources[sizeof rows / sizeof rows[0]];
	kv_option_error_t error;
} fixture_t;

static kv_status_t read_text(fixture_t *f, const char *text)
{
	memset(f, 0, sizeof *f);
	kv_options_default(&table, &f->values, f->sources);

	return kv_options_text(&table, "kvd.conf", kv_slice_str(text), &f->values, f->sources, &f->error);
}

/* Refused at that place with a sentence that holds `part`, and nothing has changed. */
static void refused(const char *text, unsigned line, unsigned column, const char *part)
{
	fixture_t f, untouched;

	read_text(&untouched, "");
	assert_int_equal(read_text(&f, text), KV_ERR_CONFIG);
	if (f.error.line != line || f.error.column != column || !strstr(f.error.text, part)) {
		fail_msg("[%s] -> %u:%u %s", text, f.error.line, f.error.column, f.error.text);
	}
	assert_string_equal(f.error.file, "kvd.conf");
	assert_memory_equal(&f.values, &untouched.values, sizeof f.values);
	assert_memory_equal(f.sources, untouched.sources, sizeof f.sources);
}

KV_TEST(defaults_come_from_the_table)
{
	fixture_t f;

	assert_int_equal(read_text(&f, ""), KV_OK);
	assert_true(f.values.size == UINT64_C(4) << 30 && f.values.depth == 64 &&
		    f.values.ttl == UINT64_C(30000000000));
	assert_true(f.values.spin == 1 && f.values.policy == 0);
	assert_string_equal(f.values.listen, "127.0.0.1:9464");
	assert_string_equal(f.values.path, "");
	assert_int_equal(f.sources[0], KV_SOURCE_DEFAULT);
	assert_int_equal(read_text(&f, "# nothing\n---\n~\n"), KV_OK);
}

KV_TEST(every_type_is_read_nested_or_dotted)
{
	fixture_t f;

	assert_int_equal(read_text(&f,
				   "cpu:\n  size: 1.5GiB\n  slab_size: 64MiB\nnvme: {queue_depth: 8, path: \"/data\"}\n"
				   "lease.ttl: 250ms\nspin: off\npolicy: fifo\nhttp:\n  listen: off\n"
				   "namespaces:\n  - a\n  - 'b'\nodd-one: 3\n"),
			 KV_OK);
	assert_true(f.values.size == UINT64_C(3) << 29 && f.values.slab_size == 64u << 20 && f.values.depth == 8);
	assert_true(f.values.ttl == 250000000 && f.values.spin == 0 && f.values.policy == 1 && f.values.odd == 3);
	assert_string_equal(f.values.path, "/data");
	assert_string_equal(f.values.listen, "off");
	assert_string_equal(f.values.names, "a,b");
	for (size_t i = 0; i < table.count; i++) {
		assert_int_equal(f.sources[i], KV_SOURCE_FILE);
	}
	assert_int_equal(read_text(&f, "namespaces: a,b,c\n"), KV_OK);
	assert_string_equal(f.values.names, "a,b,c");
	assert_int_equal(read_text(&f, "namespaces: []\nnvme.path: ''\n"), KV_OK);
	assert_string_equal(f.values.names, "");
}

KV_TEST(p10_a_misspelt_name_gets_the_nearest_one_and_its_place)
{
	refused("cpu:\n  siez: 1GiB\n", 2, 3, "unknown option `cpu.siez`; did you mean `cpu.size`?");
	refused("spin: yes\npolicyy: lru\n", 2, 1, "did you mean `policy`?");
	refused("cup:\n  size: 1GiB\n", 1, 1, "did you mean `cpu`?");
	refused("completely-different-thing: 1\n", 1, 1, "unknown option `completely-different-thing`");
	refused("policy: lur\n", 1, 9, "`lur` is not one of lru,fifo; did you mean `lru`?");
}

KV_TEST(p10_a_bad_value_is_refused_where_it_stands)
{
	refused("cpu:\n  size: lots\n", 2, 9, "cpu.size: `lots` is not a size");
	refused("cpu: {size: 1MiB}\n", 1, 13, "below the minimum, 64MiB");
	refused("cpu.size: 17TiB\n", 1, 11, "above the maximum, 16TiB");
	refused("nvme.queue_depth: 0\n", 1, 19, "below the minimum, 1");
	refused("nvme.queue_depth: 8.5\n", 1, 19, "not a whole number");
	refused("nvme.queue_depth: -1\n", 1, 19, "not a whole number");
	refused("lease.ttl: 30\n", 1, 12, "not a duration");
	refused("spin: maybe\n", 1, 7, "neither yes nor no");
	refused("spin:\n", 1, 6, "has no value");
	refused("spin: ~\n", 1, 7, "has no value");
	refused("nvme.path: \"a\\x01b\"\n", 1, 12, "control characters");
	refused("nvme.path: \"a\\0b\"\n", 1, 12, "NUL");
	refused("namespaces: a b\n", 1, 13, "not a list of words");
	refused("namespaces: a,\n", 1, 13, "not a list of words");
	refused("namespaces: [a, 'b,c']\n", 1, 17, "plain words");
	refused("namespaces: [a, [b]]\n", 1, 17, "plain words");
	refused("namespaces: [a, '']\n", 1, 17, "plain words");
}

KV_TEST(p10_yaml_beyond_options_is_refused)
{
	refused("spin: yes\nspin: no\n", 2, 1, "spin is set twice (first in line 1)");
	refused("cpu:\n  size: 1GiB\npolicy: lru\ncpu:\n  slab_size: 64MiB\n", 5, 3,
		"cpu is given twice (first in line 2)");
	refused("cpu:\n  size: 1GiB\ncpu.size: 2GiB\n", 3, 1, "set twice");
	refused("spin: &a yes\n", 1, 7, "anchors");
	refused("spin: *a\n", 1, 7, "anchors");
	refused("spin: !!bool yes\n", 1, 7, "tags");
	refused("spin: yes\n---\nspin: yes\n", 2, 1, "second document");
	refused("- a\n- b\n", 1, 1, "name: value");
	refused("just words\n", 1, 1, "name: value");
	refused("cpu: 5\n", 1, 6, "cpu is a group");
	refused("policy: {a: b}\n", 1, 9, "takes one value, not a mapping");
	refused("policy: [lru]\n", 1, 9, "takes one value, not a list");
	refused("[a]: b\n", 1, 1, "plain word");
	refused("? {a: b}\n: c\n", 1, 3, "plain word");
	refused("cpu: {size: 1GiB\n", 2, 1, "YAML:");
	refused("\tspin: yes\n", 1, 1, "YAML:");
	refused("spin: \"yes\n", 2, 1, "YAML:");
}

KV_TEST(p10_bytes_that_are_not_utf8_are_refused)
{
	fixture_t f;

	assert_int_equal(read_text(&f, "spin: \xff\xfe\n"), KV_ERR_CONFIG);
	assert_non_null(strstr(f.error.text, "YAML"));
	assert_int_equal(read_text(&f, "\xff\xfes\0"), KV_ERR_CONFIG);
}

KV_TEST(p5_deep_or_long_input_is_refused)
{
	static char text[200000];
	fixture_t f;

	memset(text, '[', sizeof text - 1);
	assert_int_equal(read_text(&f, text), KV_ERR_CONFIG);
	memset(text, '{', sizeof text - 1);
	assert_int_equal(read_text(&f, text), KV_ERR_CONFIG);
	memset(text, 'a', sizeof text - 1);
	memcpy(text + sizeof text - 4, ": 1", 3);
	assert_int_equal(read_text(&f, text), KV_ERR_CONFIG);
	snprintf(text, sizeof text, "nvme.path: ");
	memset(text + strlen(text), 'b', 600);
	text[611] = '\0';
	assert_int_equal(read_text(&f, text), KV_ERR_CONFIG);
	assert_non_null(strstr(f.error.text, "longer than 511"));
}

static char warned_[400];
static int warnings_;

static void keep_warning(const char *sentence)
{
	snprintf(warned_, sizeof warned_, "%s", sentence);
	warnings_++;
}

KV_TEST(assignments_and_the_environment_follow_the_same_rules)
{
	char *good[] = {"PATH=/bin", "KVD_CPU_SIZE=1GiB", "KVD_ODD_ONE=2", "KVD_TEST_SEED=5", "KVD_SPIN=no", NULL};
	char *unknown[] = {"KVD_SPIN=no", "KVD_CPU_SIEZ=1GiB", NULL};
	char *bad[] = {"KVD_SPIN=no", "KVD_CPU_SIEZ=1GiB", "KVD_POLICY=mru", NULL};
	char *bare[] = {"KVD_SPIN", NULL};
	fixture_t f;

	read_text(&f, "");
	assert_int_equal(kv_options_env(&table, good, &f.values, f.sources, keep_warning, &f.error), KV_OK);
	assert_true(f.values.size == 1u << 30 && f.values.odd == 2 && f.values.spin == 0);
	assert_int_equal(f.sources[0], KV_SOURCE_ENV);

	read_text(&f, "");
	assert_int_equal(warnings_, 0);
	assert_int_equal(kv_options_env(&table, unknown, &f.values, f.sources, keep_warning, &f.error), KV_OK);
	assert_string_equal(warned_,
			    "unknown environment variable KVD_CPU_SIEZ is ignored; did you mean `KVD_CPU_SIZE`?");
	assert_int_equal(f.values.spin, 0);
	assert_int_equal(kv_options_env(&table, bare, &f.values, f.sources, keep_warning, &f.error), KV_OK);
	assert_int_equal(warnings_, 2);

	read_text(&f, "");
	assert_int_equal(kv_options_env(&table, bad, &f.values, f.sources, NULL, &f.error), KV_ERR_CONFIG);
	assert_non_null(strstr(f.error.text, "KVD_POLICY: `mru` is not one of"));
	assert_int_equal(f.values.spin, 1);

	assert_int_equal(kv_options_set(&table, "cpu.size", "2GiB", &f.values, f.sources, &f.error), KV_OK);
	assert_true(f.values.size == UINT64_C(2) << 30 && f.sources[0] == KV_SOURCE_COMMAND);
	assert_int_equal(kv_options_set(&table, "cpu.size", "1", &f.values, f.sources, &f.error), KV_ERR_CONFIG);
	assert_non_null(strstr(f.error.text, "cpu.size: 1 is below"));
	assert_int_equal(kv_options_set(&table, "cpu", "1", &f.values, NULL, &f.error), KV_ERR_CONFIG);
	assert_int_equal(f.error.line, 0);
}

KV_TEST(what_is_printed_can_be_read_back)
{
	static const char *const settings[][2] = {
		KV_ROWS({"cpu.size", "1536MiB"}, {"cpu.slab_size", "4097B"}, {"lease.ttl", "90m"},
			{"lease.ttl", "10500us"}, {"nvme.path", "/a b/\xc3\xa9"}, {"namespaces", "x,y"},
			{"policy", "fifo"}, {"spin", "no"}, {"nvme.queue_depth", "17"})};
	char text[KV_OPTION_STRING_MAX];
	fixture_t f;

	read_text(&f, "");
	for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
		assert_int_equal(kv_options_set(&table, settings[i][0], settings[i][1], &f.values, NULL, &f.error),
				 KV_OK);
		for (size_t j = 0; j < table.count; j++) {
			if (strcmp(rows[j].name, settings[i][0]) == 0) {
				assert_string_equal(kv_option_text(&rows[j], &f.values, text, sizeof text),
						    settings[i][1]);
			}
		}
	}
}

/* The sample, with every name uncommented, is a valid file that says what the defaults say. */
KV_TEST(the_sample_file_is_valid_and_equals_the_defaults)
{
	char *sample = NULL, *open_sample;
	size_t len = 0, out = 0;
	fixture_t f, defaults;
	FILE *file = open_memstream(&sample, &len);

	kv_options_sample(&table, file);
	fclose(file);
	assert_int_equal(read_text(&f, sample), KV_OK);
	assert_int_equal(f.sources[0], KV_SOURCE_DEFAULT);

	open_sample = malloc(len + 1);
	for (size_t i = 0; i < len; i++) {
		if (sample[i] == '#' && sample[i + 1] != ' ') {
			continue;
		}
		open_sample[out++] = sample[i];
	}
	open_sample[out] = '\0';
	assert_int_equal(read_text(&f, open_sample), KV_OK);
	read_text(&defaults, "");
	assert_memory_equal(&f.values, &defaults.values, sizeof f.values);
	for (size_t i = 0; i < table.count; i++) {
		assert_int_equal(f.sources[i], KV_SOURCE_FILE);
	}
	free(open_sample);
	free(sample);
}

KV_TEST(help_names_every_option_and_json_is_counted_like_snprintf)
{
	char *help = NULL, json[8192], cut[64];
	size_t len = 0, need;
	fixture_t f;
	FILE *file = open_memstream(&help, &len);

	kv_options_describe(&table, file);
	fclose(file);
	for (size_t i = 0; i < table.count; i++) {
		assert_non_null(strstr(help, rows[i].name));
		assert_non_null(strstr(help, rows[i].help));
	}
	assert_non_null(strstr(help, "KVD_CPU_SLAB_SIZE=VALUE"));
	free(help);

	read_text(&f, "policy: fifo\n");
	need = kv_options_json(&table, &f.values, f.sources, json, sizeof json);
	assert_int_equal(need, strlen(json));
	assert_int_equal(kv_options_json(&table, &f.values, f.sources, cut, sizeof cut), need);
	assert_int_equal(strlen(cut), sizeof cut - 1);
	assert_int_equal(kv_options_json(&table, &f.values, f.sources, NULL, 0), need);
	assert_non_null(strstr(
		json, "\"policy\":{\"value\":\"fifo\",\"text\":\"fifo\",\"source\":\"file\",\"default\":\"lru\""));
	assert_non_null(strstr(json, "\"namespaces\":{\"value\":[\"default\"]"));
	assert_non_null(strstr(json, "\"help\":\"address, or \\\"off\\\"\""));
}

/* Every option has one item, its help with no markup that Markdown would take away. */
KV_TEST(the_page_has_one_item_for_every_option)
{
	char *page = NULL;
	size_t len = 0;
	FILE *file = open_memstream(&page, &len);

	kv_options_page(&table, file);
	fclose(file);
	for (size_t i = 0; i < table.count; i++) {
		char row[96];
		const char *at;

		snprintf(row, sizeof row, "\n- `%s` (", rows[i].name);
		at = strstr(page, row);
		assert_non_null(at);
		assert_null(strstr(at + 1, row));
	}
	assert_non_null(strstr(page, "\n## cpu\n"));
	free(page);
}

KV_TEST(p10_a_file_that_cannot_be_read_says_so)
{
	char dir[128], path[256];
	fixture_t f;
	FILE *file;

	kv_test_dir_make(dir, sizeof dir);
	read_text(&f, "");
	snprintf(path, sizeof path, "%s/kvd.conf", dir);
	assert_int_equal(kv_options_file(&table, path, &f.values, f.sources, &f.error), KV_ERR_IO);
	assert_non_null(strstr(f.error.text, "No such file"));
	assert_int_equal(kv_options_file(&table, dir, &f.values, f.sources, &f.error), KV_ERR_IO);
	assert_non_null(strstr(f.error.text, "not a regular file"));

	file = fopen(path, "w");
	fputs("policy: fifo\n", file);
	fclose(file);
	assert_int_equal(kv_options_file(&table, path, &f.values, f.sources, &f.error), KV_OK);
	assert_int_equal(f.values.policy, 1);

	assert_int_equal(truncate(path, (1 << 20) + 1), 0);
	assert_int_equal(kv_options_file(&table, path, &f.values, f.sources, &f.error), KV_ERR_IO);
	assert_non_null(strstr(f.error.text, "larger"));
	kv_test_dir_remove(dir);
}

/* What somebody appends to the file between our look at its size and the first byte that we read. */
static const char *grows;
static size_t grows_by;
ssize_t __real_read(int fd, void *out, size_t n);
ssize_t __wrap_read(int fd, void *out, size_t n);
ssize_t __wrap_read(int fd, void *out, size_t n)
{
	if (grows) {
		FILE *file = fopen(grows, "a");

		grows = NULL;
		assert_non_null(file);
		for (size_t i = 1; i < grows_by; i++) {
			putc('#', file);
		}
		putc('\n', file);
		assert_int_equal(fclose(file), 0);
	}

	return __real_read(fd, out, n);
}

KV_TEST(p10_a_file_that_grows_while_it_is_read_is_not_cut)
{
	const char *const text = "policy: fifo\n";
	char dir[128], path[256];
	fixture_t f;

	kv_test_dir_make(dir, sizeof dir);
	snprintf(path, sizeof path, "%s/kvd.conf", dir);
	for (size_t over = 0; over < 2; over++) {
		FILE *file = fopen(path, "w");

		fputs(text, file);
		fclose(file);
		read_text(&f, "");
		grows = path;
		grows_by = (1u << 20) - strlen(text) + over;
		assert_int_equal(kv_options_file(&table, path, &f.values, f.sources, &f.error),
				 over ? KV_ERR_IO : KV_OK);
		assert_null(grows);
		assert_int_equal(f.values.policy, over ? 0 : 1);
	}
	assert_non_null(strstr(f.error.text, "it is larger than 1MiB"));
	kv_test_dir_remove(dir);
}
