/* daemon/io/base/fair.h -- whose source is served next: namespaces in turn, each for one quantum (decision 033).
 *
 *   idle --kvd_fair_add--> queued in its namespace's flow --kvd_fair_serve--> ready()
 *       --1: there is more--> queued again, behind the others of its flow
 *                                                                                     --0--> idle
 *
 * What waits longest for one that has just become ready is what a quantum of each other namespace takes, and the piece
 * that was begun before. A piece is what ready() does at once: one accept, one receive, frames until the quantum is
 * over, the end of one session.
 */
#ifndef KVD_IO_FAIR_H
#define KVD_IO_FAIR_H

#include "kv/env.h"

#define KVD_QUANTUM_NS UINT64_C(10000)

typedef struct kvd_host kvd_host_t;
typedef struct kvd_source kvd_source_t;
typedef struct kvd_flow kvd_flow_t;

/* Something epoll watches. `ready` runs in the core loop. */
struct kvd_source {
	/* One piece of work. 1: there is more without another event. The source may be gone when this returns 0. */
	int (*ready)(kvd_host_t *host, kvd_source_t *source, uint32_t events);
	int fd;
	kvd_flow_t *flow; /* of its namespace; NULL: the daemon's own, which is served at once */

	kvd_source_t *next, *prev; /* in its flow, while `queued` */
	uint32_t events;           /* that have come since it was served */
	uint64_t since_ns;         /* when the sockets were looked at before it was queued */
	uint8_t queued;
	uint8_t silent; /* epoll says nothing more of it until ready() watches it again */
};

/* The ready sources of one namespace. */
struct kvd_flow {
	kvd_source_t *first, *last;
	kvd_flow_t *next; /* among the flows that have some */
	uint8_t listed;
};

typedef struct kvd_fair {
	kvd_flow_t *first, *last; /* flows with ready sources; one that has just got some comes first */
	uint32_t flows;
	uint8_t serving;
	uint64_t until_ns; /* when the quantum being served is over */
} kvd_fair_t;

/* Queue a source of a flow, or add events to one that is queued. */
void kvd_fair_add(kvd_fair_t *fair, kvd_source_t *source, uint32_t events, uint64_t since_ns);
/* It is about to be freed, or needs nothing more. */
void kvd_fair_remove(kvd_source_t *source);
/* A quantum of each flow. */
void kvd_fair_serve(kvd_fair_t *fair, kvd_host_t *host, const kv_env_t *env);
/* Is something left? */
static inline int kvd_fair_has_ready(const kvd_fair_t *fair)
{
	return fair->first != NULL;
}

#endif
