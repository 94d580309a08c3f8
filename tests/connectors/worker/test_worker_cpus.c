/* The transfer threads run where the user lets the process run: nowhere else, and not on the one core the engine has
 * bound its thread to. Each row runs in a process of its own, started on its CPUs, as a user's taskset does. */
#include "connectors/worker/wr.h"

#include "kv_cmocka.h"

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORKER_THREADS 3u /* of the rig's first rank: transfer, helper, and the engine's own */

static const char *self;
static int cpu[2]; /* two that this process may use */

/* CPUs of a row: 1 the first, 2 the second, 3 both. */
typedef struct row {
	const char *name;
	uint32_t start;         /* those of the process */
	uint32_t engine, other; /* where the engine's thread, and another one, have bound themselves; 0: nowhere */
	uint32_t expected;
} row_t;

static const row_t rows[] = {
	{"p5_threads_leave_the_core_that_the_engine_is_bound_to", 3, 1, 0, 3},
	{"p10_threads_stay_where_the_user_lets_the_process_run", 2, 0, 0, 2},
	/* a compute library has bound the process's threads before it loaded us: what they have together */
	{"p5_threads_may_go_where_any_thread_of_the_process_may", 1, 0, 2, 3},
};

static cpu_set_t set_of(uint32_t cpus)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	for (uint32_t i = 0; i < 2; i++) {
		if (cpus >> i & 1u) {
			CPU_SET((size_t)cpu[i], &set);
		}
	}

	return set;
}

static void bind_to(uint32_t cpus)
{
	const cpu_set_t set = set_of(cpus);

	assert_int_equal(sched_setaffinity(0, sizeof set, &set), 0);
}

/* Threads of the worker; 0 when one of them may use other CPUs than these. */
static uint32_t bound_threads(const cpu_set_t *expected)
{
	DIR *tasks = opendir("/proc/self/task");
	uint32_t seen = 0, wrong = 0;

	assert_non_null(tasks);
	for (struct dirent *entry = readdir(tasks); entry; entry = readdir(tasks)) {
		const pid_t thread = (pid_t)strtol(entry->d_name, NULL, 10);
		char path[64], name[32] = "";
		cpu_set_t set;
		FILE *file;

		snprintf(path, sizeof path, "/proc/self/task/%d/comm", thread);
		file = thread > 0 ? fopen(path, "r") : NULL;
		if (!file) {
			continue;
		}
		assert_non_null(fgets(name, sizeof name, file));
		fclose(file);
		if (strncmp(name, "kvx-", 4) == 0) {
			assert_int_equal(sched_getaffinity(thread, sizeof set, &set), 0);
			wrong += !CPU_EQUAL(&set, expected);
			seen++;
		}
	}
	closedir(tasks);

	return wrong ? 0 : seen;
}

static void open_and_check(const cpu_set_t *expected)
{
	wr_t wr = wr_alone;

	wr_open(&wr);
	KV_AWAIT(bound_threads(expected) == WORKER_THREADS - 1); /* threads name themselves and move */
	wr_close(&wr);
}

/* ---- a row's process ------------------------------------------------------------------------- */

static void *sleep_bound(void *arg)
{
	const row_t *row = arg;

	bind_to(row->other);
	(void)pause();

	return NULL;
}

static void run_row(void **state)
{
	const row_t *row = *state;
	const cpu_set_t other = set_of(row->other), expected = set_of(row->expected);
	cpu_set_t bound;
	pthread_t thread;

	if (row->engine) {
		bind_to(row->engine);
	}
	if (row->other) {
		assert_int_equal(pthread_create(&thread, NULL, sleep_bound, *state), 0);
		do {
			assert_int_equal(pthread_getaffinity_np(thread, sizeof bound, &bound), 0);
		} while (!CPU_EQUAL(&bound, &other));
	}
	open_and_check(&expected);
	if (row->other) {
		pthread_cancel(thread);
		pthread_join(thread, NULL);
	}
}

static int run_child(char **argv)
{
	const row_t *row = &rows[strtoul(argv[1], NULL, 10)];
	const struct CMUnitTest test[] = {{row->name, run_row, NULL, NULL, (void *)(uintptr_t)row}};

	cpu[0] = atoi(argv[2]);
	cpu[1] = atoi(argv[3]);

	return cmocka_run_group_tests(test, NULL, NULL);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void start_row(void **state)
{
	const row_t *row = *state;
	const cpu_set_t set = set_of(row->start);
	char text[3][16];
	int status;
	pid_t pid;

	snprintf(text[0], sizeof text[0], "%u", (uint32_t)(row - rows));
	snprintf(text[1], sizeof text[1], "%d", cpu[0]);
	snprintf(text[2], sizeof text[2], "%d", cpu[1]);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		if (sched_setaffinity(0, sizeof set, &set) == 0) {
			execl(self, self, text[0], text[1], text[2], (char *)NULL);
		}
		_exit(127);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
}

static int two_cpus(void)
{
	cpu_set_t set;
	uint32_t n = 0;

	if (sched_getaffinity(0, sizeof set, &set) != 0) {
		return 0;
	}
	for (int i = 0; i < CPU_SETSIZE && n < 2; i++) {
		if (CPU_ISSET((size_t)i, &set)) {
			cpu[n++] = i;
		}
	}

	return n == 2;
}

int main(int argc, char **argv)
{
	struct CMUnitTest tests[KV_COUNT_OF(rows)];

	self = argv[0];
	if (argc == 4) {
		return run_child(argv);
	}
	if (!two_cpus()) {
		printf("# SKIP: there is one CPU to run on\n");
		return 77;
	}
	for (size_t i = 0; i < KV_COUNT_OF(rows); i++) {
		tests[i] = (struct CMUnitTest){rows[i].name, start_row, NULL, NULL, (void *)(uintptr_t)&rows[i]};
	}

	return cmocka_run_group_tests(tests, NULL, NULL);
}
