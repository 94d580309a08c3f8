/* Plans and reports: what was written is read, what makes no sense is refused, and want of memory leaves no half of a
 * plan. */
#include "kv_cmocka.h"
#include "kv_test.h"
#include "step/message.h"

#undef realloc /* step/message.c calls plan_realloc() by that name */
void *realloc(void *p, size_t n);

/* ---- an allocator whose n-th call fails: step/message.c calls these -------------------------- */

void *plan_realloc(void *p, size_t n);
static uint64_t fail_at, calls;

void *plan_realloc(void *p, size_t n)
{
	return ++calls == fail_at ? NULL : realloc(p, n);
}

/* ---- building -------------------------------------------------------------------------------- */

static const uint32_t three[3] = {7, KVX_NO_BLOCK, 9};
static const char request_id[] = "request-12345";

static void add_load(kvx_msg_buf_t *bytes)
{
	const kvx_msg_part_t part = {.group = 1, .n = 3, .first = 4, .lease = {.id = 99, .incarnation = 5}};
	kvx_msg_load_t *load = kvx_msg_add_record(bytes, KVX_RECORD_LOAD, sizeof *load);

	if (!load) {
		return;
	}
	load->load = 42;
	load->parts = 2;
	load->id_len = sizeof request_id - 1u;
	(void)kvx_msg_append(bytes, request_id, sizeof request_id - 1u);
	for (uint32_t p = 0; p < 2; p++) {
		(void)kvx_msg_append(bytes, &part, sizeof part);
		(void)kvx_msg_append(bytes, three, sizeof three);
	}
}

static void add_ids(kvx_msg_buf_t *bytes, uint32_t type, size_t size, uint32_t n)
{
	void *record = kvx_msg_add_record(bytes, type, size);
	uint32_t *ids;

	if (!record) {
		return;
	}
	if (type == KVX_RECORD_FENCE) {
		((kvx_msg_fence_t *)record)->n = n;
	} else {
		((kvx_msg_save_t *)record)->n = n;
	}
	ids = kvx_msg_append(bytes, NULL, n * sizeof *ids);
	for (uint32_t i = 0; ids && i < n; i++) {
		ids[i] = i * 3u;
	}
}

static void build(kvx_msg_buf_t *bytes, uint32_t fences)
{
	kvx_msg_space_t *space;

	kvx_msg_reset(bytes, KVX_MSG_MAGIC);
	space = kvx_msg_add_record(bytes, KVX_RECORD_SPACE, sizeof *space);
	if (space) {
		space->number = 3;
		space->weights_len = 9;
		space->adapter_len = 5;
		(void)kvx_msg_append(bytes, "files:abc", 9);
		(void)kvx_msg_append(bytes, "hello", 5);
	}
	add_load(bytes);
	add_ids(bytes, KVX_RECORD_SAVE, sizeof(kvx_msg_save_t), 5);
	(void)kvx_msg_add_record(bytes, KVX_RECORD_DROP, sizeof(kvx_msg_drop_t));
	(void)kvx_msg_add_record(bytes, KVX_RECORD_WORK, sizeof(kvx_msg_work_t));
	add_ids(bytes, KVX_RECORD_FENCE, sizeof(kvx_msg_fence_t), fences);
	kvx_msg_finish(bytes, 77);
}

static uint32_t count(const void *data, size_t len, uint32_t magic, int *p_bad)
{
	kvx_msg_reader_t cursor;
	uint32_t n = 0;

	*p_bad = 1;
	if (!kvx_msg_open(&cursor, magic, data, len)) {
		return 0;
	}
	while (kvx_msg_next(&cursor)) {
		n++;
	}
	*p_bad = cursor.bad;

	return n;
}

/* ---- the promises ---------------------------------------------------------------------------- */

/* A GPU has a mem of its own, which is one that there is. */
KV_TEST(p10_a_gpu_in_no_place_is_refused)
{
	for (uint32_t mem = 0; mem <= KVX_MEMS; mem++) {
		kvx_msg_buf_t bytes = {0};
		kvx_msg_gpu_mem_t *device;
		int bad;

		kvx_msg_reset(&bytes, KVX_MSG_MAGIC);
		device = kvx_msg_add_record(&bytes, KVX_RECORD_GPU_MEM, sizeof *device);
		device->mem = mem;
		device->text_len = 6;
		(void)kvx_msg_append(&bytes, "fake-0", 6);
		kvx_msg_finish(&bytes, 1);
		(void)count(bytes.data, bytes.len, KVX_MSG_MAGIC, &bad);
		assert_int_equal(bad, mem == KVX_HOST_MEM || mem == KVX_MEMS);
		kvx_msg_free(&bytes);
	}
}

KV_TEST(p1_what_was_written_is_read)
{
	const kvx_record_header_t *record;
	const kvx_msg_load_t *load;
	const kvx_msg_part_t *part;
	kvx_msg_buf_t bytes = {0};
	kvx_msg_reader_t cursor;

	build(&bytes, 1000);
	assert_int_equal(bytes.len % 8, 0);
	assert_int_equal(((const kvx_msg_header_t *)(const void *)bytes.data)->step, 77);
	assert_true(kvx_msg_open(&cursor, KVX_MSG_MAGIC, bytes.data, bytes.len));
	record = kvx_msg_next(&cursor);
	assert_int_equal(record->type, KVX_RECORD_SPACE);
	assert_memory_equal(kvx_msg_space_weights((const void *)record), "files:abc", 9);
	assert_memory_equal(kvx_msg_space_adapter((const void *)record), "hello", 5);
	record = kvx_msg_next(&cursor);
	assert_int_equal(record->type, KVX_RECORD_LOAD);
	load = (const void *)record;
	assert_memory_equal(kvx_msg_load_id(load), request_id, load->id_len);
	part = kvx_msg_part_next(kvx_msg_part_first(load));
	assert_int_equal(part->lease.id, 99);
	assert_memory_equal(kvx_msg_part_ids(part), three, sizeof three);
	record = kvx_msg_next(&cursor);
	assert_int_equal(kvx_msg_save_ids((const void *)record)[4], 12);
	assert_int_equal(kvx_msg_next(&cursor)->type, KVX_RECORD_DROP);
	assert_int_equal(kvx_msg_next(&cursor)->type, KVX_RECORD_WORK);
	record = kvx_msg_next(&cursor);
	assert_int_equal(kvx_msg_fence_ids((const void *)record)[999], 2997);
	assert_null(kvx_msg_next(&cursor));
	assert_false(cursor.bad);

	/* The same memory again; a plan of nothing has no bytes. */
	kvx_msg_reset(&bytes, KVX_REPORT_MAGIC);
	kvx_msg_finish(&bytes, 1);
	assert_int_equal(bytes.len, 0);
	kvx_msg_free(&bytes);
}

/* A message is no report, and a piece of it is neither. With one length or count changed it is refused, or nothing is
 * read past the end (a sanitizer looks). */
KV_TEST(p10_what_is_not_a_whole_message_is_refused)
{
	static const uint32_t nasty[] = {0, 1, 7, 8, 255, 4096, 0x7fffffff, 0xfffffff8, UINT32_MAX};
	kvx_msg_buf_t bytes = {0};
	int bad;

	build(&bytes, 10);
	assert_int_equal(count(bytes.data, bytes.len, KVX_MSG_MAGIC, &bad), 6);
	assert_false(bad);
	(void)count(bytes.data, bytes.len, KVX_REPORT_MAGIC, &bad);
	assert_true(bad);
	for (size_t cut = 0; cut < bytes.len; cut++) {
		assert_int_equal(count(bytes.data, cut, KVX_MSG_MAGIC, &bad), 0);
	}
	for (size_t at = sizeof(kvx_msg_header_t); at < bytes.len; at += 4) {
		uint32_t *word = (uint32_t *)(void *)(bytes.data + at);
		const uint32_t was = *word;

		for (size_t i = 0; i < sizeof nasty / sizeof nasty[0]; i++) {
			*word = nasty[i];
			(void)count(bytes.data, bytes.len, KVX_MSG_MAGIC, &bad);
		}
		*word = was;
	}
	for (size_t at = 8; at < 12; at++) { /* fewer or more records than said */
		bytes.data[at] ^= 1;
		(void)count(bytes.data, bytes.len, KVX_MSG_MAGIC, &bad);
		assert_true(bad);
		bytes.data[at] ^= 1;
	}
	((kvx_msg_header_t *)(void *)bytes.data)->magic = KVX_REPORT_MAGIC;
	assert_int_equal(count(bytes.data, bytes.len, KVX_REPORT_MAGIC, &bad), 0);
	assert_true(bad);
	kvx_msg_free(&bytes);
}

/* Without memory there is no plan at all; with room taken before, there is no way to fail. */
KV_TEST(p5_lack_of_memory_leaves_no_half_of_a_message)
{
	kvx_msg_buf_t bytes = {0};

	for (uint64_t n = 1;; n++) {
		calls = 0;
		fail_at = n;
		build(&bytes, 5000);
		assert_true(bytes.failed ? bytes.len == 0 : bytes.len > 20000);
		kvx_msg_free(&bytes);
		if (calls < n) {
			break;
		}
	}
	fail_at = 0;
	kvx_msg_reset(&bytes, KVX_MSG_MAGIC);
	assert_true(kvx_msg_reserve(&bytes, 40000));
	assert_false(kvx_msg_reserve(&bytes, KVX_MSG_BYTES_MAX));
	calls = 0;
	fail_at = 1;
	build(&bytes, 5000);
	assert_int_equal(calls, 0);
	assert_true(bytes.len > 20000);
	fail_at = 0;
	kvx_msg_free(&bytes);
}

KV_TEST_MAIN(NULL, NULL)
