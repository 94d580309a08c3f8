/* common/cpus.h -- which CPUs the transfer threads may use: all that the process was given, whatever the engine has
 * bound its own threads to since.
 *
 * Engines bind each compute thread to one core, the thread that opens the worker among them, and new threads inherit
 * that. What the user has allowed (taskset, numactl, a CPU set) is narrower than the machine. Between the two lies the
 * union of the mask the process had when this library was loaded, which is before an engine starts its threads, and the
 * masks that its threads have now.
 */
#ifndef KVX_WORKER_CPUS_H
#define KVX_WORKER_CPUS_H

#include <sched.h>
#include <stdint.h>

typedef struct kvx_cpus {
	cpu_set_t set; /* empty: not known */
} kvx_cpus_t;

/* Read once, by the thread that opens; never fails: what cannot be read is left out. */
void kvx_cpus_read_allowed(kvx_cpus_t *p_cpus);
/* How many; 1 when not known. */
uint32_t kvx_cpus_count(const kvx_cpus_t *cpus);
/* Let the calling thread use them; as it was when not known. */
void kvx_cpus_bind_thread(const kvx_cpus_t *cpus);

#endif
