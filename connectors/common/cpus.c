/* CPUs for the transfer threads: those of the process when it loaded us, and those of its threads now. */
#include "common/cpus.h"

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#define TASKS_MAX 4096u /* threads that are looked at */

static cpu_set_t at_load; /* a fork inherits it */

__attribute__((constructor)) static void remember(void)
{
	if (sched_getaffinity(0, sizeof at_load, &at_load) != 0) {
		CPU_ZERO(&at_load);
	}
}

static void add_thread(kvx_cpus_t *cpus, pid_t thread)
{
	cpu_set_t one;

	if (sched_getaffinity(thread, sizeof one, &one) == 0) {
		CPU_OR(&cpus->set, &cpus->set, &one);
	}
}

void kvx_cpus_read_allowed(kvx_cpus_t *p_cpus)
{
	DIR *tasks = opendir("/proc/self/task");
	struct dirent *entry;

	p_cpus->set = at_load;
	add_thread(p_cpus, 0);
	for (uint32_t i = 0; tasks && i < TASKS_MAX && (entry = readdir(tasks)); i++) {
		const long thread = strtol(entry->d_name, NULL, 10);

		if (thread > 0) {
			add_thread(p_cpus, (pid_t)thread);
		}
	}
	if (tasks) {
		(void)closedir(tasks);
	}
}

uint32_t kvx_cpus_count(const kvx_cpus_t *cpus)
{
	const int count = CPU_COUNT(&cpus->set);

	return count > 0 ? (uint32_t)count : 1u;
}

void kvx_cpus_bind_thread(const kvx_cpus_t *cpus)
{
	if (CPU_COUNT(&cpus->set) > 0) {
		(void)sched_setaffinity(0, sizeof cpus->set, &cpus->set);
	}
}
