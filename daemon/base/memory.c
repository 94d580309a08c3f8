/* Memory of the machine, of the control groups and of the process, before the pool takes it page by page and the kernel
 * ends somebody for it. */
#include "memory.h"

#include "kv/log.h"
#include "kv/shm.h"
#include "kv/system.h"
#include "kv/types.h"
#include "kv/units.h"
#include "kvs/pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define FILE_BYTES  16384u
#define HUGE_PAGE   (UINT64_C(2) << 20)
#define INDEX_BLOCK UINT64_C(200)         /* of the index, about */
#define REST        (UINT64_C(100) << 20) /* other processes, threads, connections, leases */
#define HUGE_DIR    "/sys/kernel/mm/hugepages/hugepages-2048kB/"

typedef struct bound {
	uint64_t bytes;
	char by[320]; /* whose it is, for the sentence */
} bound_t;

typedef struct memory {
	uint64_t huge_all, huge_free; /* reserved huge pages, which count for no control group */
	bound_t limit;                /* ordinary memory that can be had at all */
	bound_t room;                 /* and now */
	uint64_t oom_kills;           /* of the innermost group; UINT64_MAX: none says so */
	char oom_where[320];
} memory_t;

#define NO_LIMIT ((memory_t){.limit.bytes = UINT64_MAX, .room.bytes = UINT64_MAX, .oom_kills = UINT64_MAX})

/* Where a version of control groups keeps its numbers. */
typedef struct cgroup_files {
	const char *limit, *usage, *inactive, *active, *events;
} cgroup_files_t;

static const cgroup_files_t version_1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "\ntotal_inactive_file ",
					 "\ntotal_active_file ", "memory.oom_control"};
static const cgroup_files_t version_2 = {"memory.max", "memory.current", "\ninactive_file ", "\nactive_file ",
					 "memory.events"};

/* The number behind a word; 0: the word is not there. */
static uint64_t number_after(const char *text, const char *word)
{
	const char *at = strstr(text, word);

	return at ? strtoull(at + strlen(word), NULL, 10) : 0;
}

static void lower(bound_t *bound, uint64_t bytes, const char *by, const char *path)
{
	if (bytes < bound->bytes) {
		bound->bytes = bytes;
		snprintf(bound->by, sizeof bound->by, "%s%.256s", by, path);
	}
}

static void look_at_machine(int huge, memory_t *memory)
{
	char text[FILE_BYTES];
	uint64_t all = kv_read_number(HUGE_DIR, "nr_hugepages"), unused = kv_read_number(HUGE_DIR, "free_hugepages"),
		 promised = kv_read_number(HUGE_DIR, "resv_hugepages");

	if (huge && all != UINT64_MAX && unused != UINT64_MAX && promised != UINT64_MAX) {
		memory->huge_all = all * HUGE_PAGE;
		memory->huge_free = (unused > promised ? unused - promised : 0) * HUGE_PAGE;
	}
	if (kv_read_text("/proc/meminfo", text, sizeof text) && strstr(text, "MemTotal:") &&
	    strstr(text, "\nMemAvailable:")) {
		uint64_t total = number_after(text, "MemTotal:"), reserved = number_after(text, "\nHugetlb:");

		lower(&memory->limit, 1024u * (total > reserved ? total - reserved : 0), "this machine", "");
		lower(&memory->room, 1024u * number_after(text, "\nMemAvailable:"), "this machine", "");
	}
}

/* The innermost group speaks for the process. */
static void look_at_kills(const char *dir, const char *file, const char *name, memory_t *memory)
{
	char path[640], text[FILE_BYTES + 1] = "\n";

	snprintf(path, sizeof path, "%s/%s", dir, file);
	if (memory->oom_kills == UINT64_MAX && kv_read_text(path, text + 1, FILE_BYTES) &&
	    strstr(text, "\noom_kill ")) {
		memory->oom_kills = number_after(text, "\noom_kill ");
		snprintf(memory->oom_where, sizeof memory->oom_where, "%.300s", name);
	}
}

/* One control group: what it may have, and what of that is free or would be given back at once. */
static void look_at_group(void *ctx, int version, const char *dir, const char *path_in)
{
	const cgroup_files_t *files = version == 1 ? &version_1 : &version_2;
	memory_t *memory = ctx;
	uint64_t limit = kv_read_number(dir, files->limit), high = kv_read_number(dir, "memory.high"), used,
		 files_cached;
	char path[640], text[FILE_BYTES];

	look_at_kills(dir, files->events, path_in, memory);
	limit = high < limit ? high : limit; /* beyond it the kernel makes us wait for memory without end */
	if (limit == UINT64_MAX) {
		return;
	}
	used = kv_read_number(dir, files->usage);
	snprintf(path, sizeof path, "%s/memory.stat", dir);
	(void)kv_read_text(path, text, sizeof text);
	files_cached = number_after(text, files->inactive) + number_after(text, files->active);
	used = used == UINT64_MAX || used < files_cached ? 0 : used - files_cached;
	lower(&memory->limit, limit, "control group ", path_in);
	lower(&memory->room, limit > used ? limit - used : 0, "control group ", path_in);
}

static void look_at_control_groups(memory_t *memory)
{
	kv_cgroup_walk("memory", look_at_group, memory);
}

static kv_status_t check_limits(const kvd_options_t *options, char *detail, size_t cap)
{
	static const struct {
		int which;
		const char *name;
	} limits[] = {{RLIMIT_AS, "RLIMIT_AS (ulimit -v)"}, {RLIMIT_FSIZE, "RLIMIT_FSIZE (ulimit -f)"}};
	const uint64_t need[] = {options->cpu_size, options->cpu_slab_size};
	static const char *const option[] = {"cpu.size", "cpu.slab_size"};
	struct rlimit limit;
	char a[32], b[32];

	for (size_t i = 0; i < KV_COUNT_OF(limits); i++) {
		if (getrlimit((__rlimit_resource_t)limits[i].which, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
		    limit.rlim_cur < need[i]) {
			snprintf(detail, cap,
				 "%s is %s, but %s of this process is %s; make one smaller or the other larger",
				 option[i], kv_format_size(need[i], a, sizeof a), limits[i].name,
				 kv_format_size(limit.rlim_cur, b, sizeof b));
			return KV_ERR_CONFIG;
		}
	}

	return KV_OK;
}

/* What the daemon may need when all of it is full; the pool is only the largest part. */
typedef struct need {
	uint64_t pool, index, mirrors, buffers, all;
} need_t;

static need_t add_up(const kvd_options_t *options)
{
	need_t need = {.pool = options->cpu_size, .index = INDEX_BLOCK * options->index_max_blocks};
	uint64_t namespaces = 1;

	for (const char *c = options->namespaces; *c; c++) {
		namespaces += *c == ',';
	}
	need.mirrors = namespaces * sizeof(kv_mirror_bucket_t) * options->index_max_blocks;
	need.buffers = options->limits_receive;
	if (options->events_enabled) {
		need.buffers += namespaces * (options->events_buffer + options->events_send_buffer);
	}
	need.all = need.pool + need.index + need.mirrors + need.buffers + REST;

	return need;
}

/* Pages of the pool are refused where memory is short; the rest is what the kernel ends processes for. */
static void warn_of_the_whole(const kvd_options_t *options, const memory_t *memory)
{
	const need_t need = add_up(options);
	const uint64_t huge = need.pool < memory->huge_all ? need.pool : memory->huge_all;
	bound_t limit = memory->limit;
	struct rlimit space;
	char text[7][32];

	if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
		lower(&limit, space.rlim_cur, "RLIMIT_AS (ulimit -v) of this process", "");
	}
	if (need.all - huge <= limit.bytes) {
		return;
	}
	kv_log(KV_LOG_WARN, "main",
	       "the daemon may need %s in all: cpu.size %s, index %s and mirrors %s (index.max_blocks), receive and event "
	       "buffers %s, kvd-meta, kvd-net and the rest %s; there can be no more than %s (%s), and beyond it the "
	       "kernel ends it: make them smaller, or raise the limit",
	       kv_format_size(need.all, text[0], 32), kv_format_size(need.pool, text[1], 32),
	       kv_format_size(need.index, text[2], 32), kv_format_size(need.mirrors, text[3], 32),
	       kv_format_size(need.buffers, text[4], 32), kv_format_size(REST, text[5], 32),
	       kv_format_size(limit.bytes, text[6], 32), limit.by);
}

uint64_t kvd_memory_room(void *unused)
{
	memory_t memory = NO_LIMIT;

	(void)unused;
	look_at_machine(0, &memory);
	look_at_control_groups(&memory);

	return memory.room.bytes;
}

kv_status_t kvd_memory_check(const kvd_options_t *options, char *detail, size_t cap)
{
	memory_t memory = NO_LIMIT;
	uint64_t size = options->cpu_size, huge;
	kv_status_t status = check_limits(options, detail, cap);
	char a[32], b[32], c[32];

	if (status != KV_OK) {
		return status;
	}
	look_at_machine(options->cpu_huge_pages != KVS_HUGE_OFF, &memory);
	look_at_control_groups(&memory);
	huge = size < memory.huge_all ? size : memory.huge_all;
	if (size - huge > memory.limit.bytes) {
		snprintf(detail, cap,
			 "cpu.size is %s, but there can be no more than %s (%s) and %s of reserved huge pages; make it "
			 "smaller",
			 kv_format_size(size, a, sizeof a), kv_format_size(memory.limit.bytes, b, sizeof b),
			 memory.limit.by, kv_format_size(memory.huge_all, c, sizeof c));
		return KV_ERR_CONFIG;
	}
	huge = size < memory.huge_free ? size : memory.huge_free;
	if (size - huge > memory.room.bytes) {
		snprintf(detail, cap,
			 "cpu.size is %s, but only %s (%s) and %s of reserved huge pages are available now; make it "
			 "smaller, or stop what uses the memory",
			 kv_format_size(size, a, sizeof a), kv_format_size(memory.room.bytes, b, sizeof b),
			 memory.room.by, kv_format_size(memory.huge_free, c, sizeof c));
		return KV_ERR_NOMEM;
	}
	warn_of_the_whole(options, &memory);

	return KV_OK;
}

uint64_t kvd_memory_oom_kills(char *where, size_t cap)
{
	memory_t memory = NO_LIMIT;

	look_at_control_groups(&memory);
	if (memory.oom_kills != UINT64_MAX) {
		snprintf(where, cap, "control group %s", memory.oom_where);
		return memory.oom_kills;
	}
	look_at_kills("/proc", "vmstat", "", &memory);
	snprintf(where, cap, "this machine");

	return memory.oom_kills;
}
