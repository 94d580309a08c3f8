/* The transfer threads run where the user lets the process run: nowhere else, and not on the one core the engine has
 * bound its thread to. The parts are run in a process of their own, started on the CPUs that are said; a user's taskset
 * does the same. */
#include "connectors/worker/wr.h"

#include "kv_cmocka.h"
#include "common/cpus.h"

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

static cpu_set_t only(int one)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET((size_t)one, &set);

	return set;
}

static cpu_set_t both(void)
{
	cpu_set_t set = only(cpu[0]);

	CPU_SET((size_t)cpu[1], &set);

	return set;
}

static void bind_to(const cpu_set_t *set)
{
	assert_int_equal(sched_setaffinity(0, sizeof *set, set), 0);
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
	uint32_t waited = 0;

	wr_open(&wr);
	while (bound_threads(expected) != WORKER_THREADS - 1 && ++waited < WR_PATIENCE) {
		usleep(1000); /* threads name themselves and move */
	}
	assert_int_equal(bound_threads(expected), WORKER_THREADS - 1);
	wr_close(&wr);
}

/* ---- parts, each in a process of its own ----------------------------------------------------- */

static void *sleeper(void *arg)
{
	const cpu_set_t *set = arg;

	bind_to(set);
	(void)pause();

	return NULL;
}

static void engine_binds_itself(void **state)
{
	const cpu_set_t all = both(), one = only(cpu[0]);

	(void)state;
	bind_to(&one);
	open_and_check(&all);
}

static void nothing_is_bound(void **state)
{
	const cpu_set_t one = only(cpu[1]);

	(void)state;
	open_and_check(&one);
}

/* A compute library has bound the process's threads before it loaded us: what they have together. */
static void threads_are_bound(void **state)
{
	static cpu_set_t other;
	const cpu_set_t all = both();
	kvx_cpus_t allowed;
	pthread_t thread;
	uint32_t waited = 0;

	(void)state;
	other = only(cpu[1]);
	kvx_cpus_read_allowed(&allowed);
	assert_int_equal(kvx_cpus_count(&allowed), 1);
	assert_int_equal(pthread_create(&thread, NULL, sleeper, &other), 0);
	do {
		usleep(1000);
		kvx_cpus_read_allowed(&allowed);
	} while (kvx_cpus_count(&allowed) != 2 && ++waited < WR_PATIENCE);
	assert_true(CPU_EQUAL(&allowed.set, &all));
	pthread_cancel(thread);
	pthread_join(thread, NULL);
}

static const struct CMUnitTest parts[] = {
	cmocka_unit_test(engine_binds_itself),
	cmocka_unit_test(nothing_is_bound),
	cmocka_unit_test(threads_are_bound),
};

static int run_part(char **argv)
{
	const struct CMUnitTest part[] = {parts[strtoul(argv[1], NULL, 10)]};

	cpu[0] = atoi(argv[2]);
	cpu[1] = atoi(argv[3]);

	return cmocka_run_group_tests(part, NULL, NULL);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void run(uint32_t part, const cpu_set_t *set)
{
	char text[3][16];
	int status;
	pid_t pid;

	snprintf(text[0], sizeof text[0], "%u", part);
	snprintf(text[1], sizeof text[1], "%d", cpu[0]);
	snprintf(text[2], sizeof text[2], "%d", cpu[1]);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		if (sched_setaffinity(0, sizeof *set, set) == 0) {
			execl(self, self, text[0], text[1], text[2], (char *)NULL);
		}
		_exit(127);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
}

static void p5_threads_leave_the_core_that_the_engine_is_bound_to(void **state)
{
	const cpu_set_t all = both();

	(void)state;
	run(0, &all);
}

static void p10_threads_stay_where_the_user_lets_the_process_run(void **state)
{
	const cpu_set_t one = only(cpu[1]);

	(void)state;
	run(1, &one);
}

static void p5_threads_may_go_where_any_thread_of_the_process_may(void **state)
{
	const cpu_set_t one = only(cpu[0]);

	(void)state;
	run(2, &one);
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
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p5_threads_leave_the_core_that_the_engine_is_bound_to),
		cmocka_unit_test(p10_threads_stay_where_the_user_lets_the_process_run),
		cmocka_unit_test(p5_threads_may_go_where_any_thread_of_the_process_may),
	};

	self = argv[0];
	if (argc == 4) {
		return run_part(argv);
	}
	if (!two_cpus()) {
		printf("# SKIP: there is one CPU to run on\n");
		return 77;
	}

	return cmocka_run_group_tests(tests, NULL, NULL);
}
