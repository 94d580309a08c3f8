/* knobs.h -- calls that libkvx makes of libkvc and of the copies can be made to fail: a test links knobs.c and wraps
 * them. */
#ifndef TESTS_CONNECTORS_KNOBS_H
#define TESTS_CONNECTORS_KNOBS_H

#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#define NONE UINT32_MAX

/* What goes wrong, and what was seen. The transfer thread reads and writes it too. */
typedef struct knobs {
	atomic_uint ready;     /* blocks of a lease that are ready, at most                         */
	atomic_int rest;       /* why no more become ready; 0: the daemon's own answer              */
	atomic_int lease;      /* what asking for a lease returns; 0: the daemon's own answer       */
	atomic_uint revoke_on; /* leases are over once this block of the cache was written          */
	atomic_int revoked;    /* they are                                                          */
	atomic_uint grant;     /* most blocks of one put                                            */
	atomic_int put;        /* answer to the next puts ...                                       */
	atomic_int put_times;  /* ... this many; from the first of them on nothing counts as stored */
	atomic_int put_done;   /* how puts end; 0: as the daemon says                               */
	atomic_int put_end;    /* what handing in returns; 0: what libkvc does                      */
	atomic_uint contended; /* lookups that find the daemon writing all the time                 */
	atomic_int no_space;   /* a space cannot be opened                                          */
	atomic_int stall;      /* waits for a heartbeat until a stopped daemon goes on; 0: for ever */
	pid_t stalled;
	atomic_uint put_starts, put_from, reports, bad; /* seen */
	atomic_ullong report_why;
} knobs_t;
extern knobs_t knobs;

/* Nothing goes wrong, and nothing was seen. */
void knobs_reset(void);

#endif
