/* common/cpus.h -- which CPUs the transfer threads may use: all that the process was given, however the engine has
 * bound its own threads since.
 *
 * Engines bind each compute thread to one core, and new threads inherit the mask of the thread that opens the worker.
 * The user may have allowed fewer CPUs than the machine has (taskset, numactl, a CPU set). The union of two masks is
 * between the two: the mask of the process when this library was loaded, before an engine starts its threads, and the
 * masks its threads have now. */
#ifndef KVX_WORKER_CPUS_H
#define KVX_WORKER_CPUS_H

#include <sched.h>
#include <stdint.h>

typedef struct kvx_cpus {
	cpu_set_t set; /* empty: not known */
} kvx_cpus_t;

/* Read once, by the thread that opens the worker; masks that cannot be read are left out. */
void kvx_cpus_read_allowed(kvx_cpus_t *p_cpus);
/* How many; 1 when not known. */
uint32_t kvx_cpus_count(const kvx_cpus_t *cpus);
/* Let the calling thread use them; as it was when not known. */
void kvx_cpus_bind_thread(const kvx_cpus_t *cpus);

#endif
