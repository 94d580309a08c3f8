/* Huge pages, both kinds, set by this test where it may (root) and put back as they were. */
#include "pool_test.h"

#include "cpu/pool.h"

#include <fcntl.h>
#include <signal.h>

#define NR_HUGE "/proc/sys/vm/nr_hugepages"
#define SHMEM   "/sys/kernel/mm/transparent_hugepage/shmem_enabled"

static char old_nr[64], old_shmem[128];

static int read_text(const char *path, char *out, size_t cap)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, out, cap - 1);

	if (fd >= 0) {
		close(fd);
	}
	if (n <= 0) {
		return 0;
	}
	out[n] = '\0';

	return 1;
}

static int write_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : write(fd, text, strlen(text));

	if (fd >= 0) {
		close(fd);
	}

	return n == (ssize_t)strlen(text);
}

static void restore(void)
{
	char word[32] = "never";
	const char *open_bracket = strchr(old_shmem, '[');

	write_text(NR_HUGE, old_nr);
	if (open_bracket && sscanf(open_bracket, "[%31[a-z_]", word) == 1) {
		write_text(SHMEM, word);
	}
}

static void begin_huge(kvs_huge_t huge)
{
	pool_set_up(17u << 20, 4u << 20);
	config_.huge = huge;
	pool_begin();
}

/* Kilobytes of `field` in this process's mapping of a slab. */
static unsigned long smaps_kb(const void *base, const char *field)
{
	FILE *file = fopen("/proc/self/smaps", "re");
	char line[512];
	unsigned long kb = 0;
	int inside = 0;

	assert_non_null(file);
	while (fgets(line, sizeof line, file)) {
		unsigned long start, value;

		if (sscanf(line, "%lx-", &start) == 1 && strchr(line, '-')) {
			inside = start == (unsigned long)base;
		} else if (inside && strncmp(line, field, strlen(field)) == 0 &&
			   sscanf(strchr(line, ':') + 1, "%lu", &value) == 1) {
			kb = value;
		}
	}
	fclose(file);

	return kb;
}

KV_TEST(the_pool_lies_on_reserved_huge_pages_and_falls_back_once)
{
	kvs_slab_info_t info;
	kvs_usage_t u;
	char now[64];

	if (!write_text(NR_HUGE, "4") || !read_text(NR_HUGE, now, sizeof now) || strcmp(now, "4\n") != 0) {
		print_message("# SKIP: no four huge pages to be had\n");
		skip();
	}
	begin_huge(KVS_HUGE_ON);
	kvs_loc_t loc = put(pool_, class_, &plain, 1);

	assert_true(kvs_pool_of(pool_)->slabs[0]->slab.huge);
	assert_int_equal(kvs_pool_slab(pool_, 0, &info), KV_OK);
	assert_true(info.huge);
	assert_int_equal(kv_metric_get(&metrics_, KV_M_CPU_HUGE_PAGES), 1);
	for (uint64_t i = 0; i < 2000; i++) {
		kvs_meta_t meta = meta_of(i);

		if (kvs_alloc(pool_, class_, KVS_PUT, 1, &meta, &loc) != KV_OK) {
			break;
		}
	}
	/* Four pages carry two slabs; the rest is on small pages, said once. */
	kvs_usage(pool_, &u);
	assert_true(u.free_slots == 0 && u.charged_bytes <= u.limit_bytes);
	assert_true(kvs_pool_of(pool_)->slabs[1]->slab.huge);
	assert_false(kvs_pool_of(pool_)->slabs[2]->slab.huge);
	assert_true(kvs_pool_slab_count(pool_) > 3);
	assert_int_equal(atomic_load(&t_.lines[KV_LOG_WARN]), 1);
	pool_end();
}

KV_TEST(without_reserved_pages_the_pool_says_so_and_goes_on)
{
	static const kvs_huge_t modes[] = {KVS_HUGE_AUTO, KVS_HUGE_ON, KVS_HUGE_OFF};

	write_text(NR_HUGE, "0");
	write_text(SHMEM, "never");
	for (int i = 0; i < 3; i++) {
		begin_huge(modes[i]);
		put(pool_, class_, &plain, 1);
		assert_int_equal(kv_metric_get(&metrics_, KV_M_CPU_HUGE_PAGES), 0);
		assert_int_equal(atomic_load(&t_.lines[KV_LOG_WARN]), modes[i] == KVS_HUGE_ON);
		assert_int_equal(atomic_load(&t_.lines[KV_LOG_INFO]), modes[i] == KVS_HUGE_AUTO ? 2 : 1);
		pool_end();
	}
}

KV_TEST(transparent_huge_pages_are_used_where_the_kernel_has_them)
{
	write_text(NR_HUGE, "0");
	if (!write_text(SHMEM, "advise")) {
		print_message("# SKIP: transparent huge pages of shared memory cannot be set here\n");
		skip();
	}
	begin_huge(KVS_HUGE_AUTO);
	const kvs_slab_t *slab = &kvs_pool_of(pool_)->slabs[0]->slab;

	memset(slab->data.base, 1, slab->data.bytes);
	assert_true(smaps_kb(slab->data.base, "ShmemPmdMapped") > 0);
	assert_int_equal(kv_metric_get(&metrics_, KV_M_CPU_HUGE_PAGES), 1);
	pool_end();
}

/* Somebody punches a reserved page and the reserve is gone: the slab's owner loses a block, the daemon nothing. */
KV_TEST(p6_a_punched_huge_page_is_a_typed_error)
{
	static block_t b;
	kvs_slab_info_t info;
	char now[64];

	if (!write_text(NR_HUGE, "4") || !read_text(NR_HUGE, now, sizeof now) || strcmp(now, "4\n") != 0) {
		print_message("# SKIP: no four huge pages to be had\n");
		skip();
	}
	begin_huge(KVS_HUGE_ON);
	kvs_loc_t loc = put(pool_, class_, &plain, 1);

	assert_int_equal(kvs_pool_slab(pool_, 0, &info), KV_OK);
	assert_int_equal(fallocate(info.data_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 2 << 20), 0);
	write_text(NR_HUGE, "0");
	block_fill(&plain, 1, &b);
	kv_status_t status = load(pool_, loc, &b.mem);

	assert_true(status == KV_ERR_FAULT || status == KV_ERR_CORRUPT);
	kvs_close(pool_);
}

int main(void)
{
	if (!read_text(NR_HUGE, old_nr, sizeof old_nr) || !read_text(SHMEM, old_shmem, sizeof old_shmem)) {
		kv_test_skip("this kernel shows no huge pages");
	}
	if (geteuid() != 0 || !write_text(NR_HUGE, old_nr)) {
		kv_test_skip("setting huge pages needs root");
	}

	int failed = kv_test_run(NULL, NULL);

	restore();

	return failed;
}
