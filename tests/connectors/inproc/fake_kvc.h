/* fake_kvc.h -- a libkvc with its daemon in one array, and a knob for everything that can go wrong. Linked in place of
 * the real one. */
#ifndef TESTS_CONNECTORS_FAKE_KVC_H
#define TESTS_CONNECTORS_FAKE_KVC_H

#include "kvc.h"
#include "kvk/layout.h"

#define FAKE_BLOCKS 4096u

typedef struct fake {
	/* knobs */
	uint64_t incarnation;  /* 0: no daemon                                              */
	uint32_t answer_after; /* polls until a request is answered                         */
	uint32_t ready_step;   /* blocks of a lease that become ready a poll                */
	uint32_t disk;         /* how many of a lease's blocks come from disk               */
	kvc_status_t acquire;  /* answer to an acquire                                      */
	kvc_status_t rest;     /* why no more blocks become ready after `rest_at`           */
	uint32_t rest_at;
	uint32_t revoke_on_block; /* the lease is over once this block has been asked for; 0: never */
	uint32_t grant;           /* most blocks one put is granted; 0: all                    */
	kvc_status_t put;         /* answer to the next put_starts ...                         */
	uint32_t put_times;       /* ... this many times                                       */
	kvc_status_t put_done;    /* status of PUT_DONE                                        */
	kvc_status_t put_end;     /* what kvc_put_end() returns                                */
	int silent;               /* match says DAEMON_STALE; nothing is ever answered         */
	uint32_t stall;           /* waits after which it answers again; 0: for ever  */
	int wrong_bytes;          /* puts store other bytes, with digests that fit them        */
	int no_space;             /* the space cannot be opened                                */
	/* seen */
	uint32_t leases, puts; /* open now                                                  */
	uint32_t bad;          /* kvc_lease_report_bad() calls                                     */
	uint32_t put_starts, put_from, released_unfinished, reports, keeps;
	uint64_t last_report_why;
} fake_t;

extern fake_t fake;

/* Forget everything; blocks have this layout. */
void fake_reset(const kvk_layout_t *layout);
/* Flip a bit of the stored block of this key. */
void fake_damage(const kvc_key_t *key);
/* Drop it, as eviction would. */
void fake_evict(const kvc_key_t *key);
void fake_keys(const uint32_t *tokens, uint32_t n_tokens, const char *salt, kvc_key_t *keys);

#endif
