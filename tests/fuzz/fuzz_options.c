/* Option files. What is refused changes nothing; what is accepted can be printed and read back. */
#include "kv_test.h"

#include "kv/option.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct values {
	uint64_t size, depth, ttl;
	int spin, policy;
	char path[KV_OPTION_STRING_MAX], names[KV_OPTION_STRING_MAX];
} values_t;

#define AT(member) offsetof(values_t, member)

static const kv_option_t rows[] = {
	{"cpu.size", KV_OPTION_SIZE, "4GiB", "64MiB", "16TiB", NULL, 0, AT(size), "size"},
	{"nvme.queue_depth", KV_OPTION_U64, "64", "1", "4096", NULL, 0, AT(depth), "number"},
	{"lease.ttl", KV_OPTION_DURATION, "30s", "10ms", NULL, NULL, 1, AT(ttl), "duration"},
	{"spin", KV_OPTION_BOOL, "yes", NULL, NULL, NULL, 1, AT(spin), "bool"},
	{"policy", KV_OPTION_ENUM, "lru", NULL, NULL, "lru,fifo", 0, AT(policy), "choice"},
	{"nvme.path", KV_OPTION_PATH, "", NULL, NULL, NULL, 0, AT(path), "path"},
	{"namespaces", KV_OPTION_LIST, "default", NULL, NULL, NULL, 0, AT(names), "list"},
};

#define COUNT (sizeof rows / sizeof rows[0])

static const kv_option_table_t table = {rows, COUNT, "KVD_"};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static values_t before, values, again;
	kv_option_source_t sources[COUNT];
	kv_option_error_t error;
	char text[KV_OPTION_STRING_MAX];

	memset(&before, 0, sizeof before);
	kv_options_default(&table, &before, sources);
	values = before;
	if (kv_options_text(&table, "fuzz", (kv_slice_t){data, (uint32_t)size}, &values, sources, &error) != KV_OK) {
		kv_assert(memcmp(&values, &before, sizeof values) == 0);
		kv_assert(error.text[0] != '\0' && strlen(error.text) < sizeof error.text);
		return 0;
	}
	again = before;
	for (size_t i = 0; i < COUNT; i++) {
		char back[KV_OPTION_STRING_MAX];

		kv_option_text(&rows[i], &values, text, sizeof text);
		kv_assert(kv_options_set(&table, rows[i].name, text, &again, NULL, &error) == KV_OK);
		kv_assert(strcmp(kv_option_text(&rows[i], &again, back, sizeof back), text) == 0);
	}

	return 0;
}
