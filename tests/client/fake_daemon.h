/* fake_daemon.h -- a small daemon in a thread that keeps the protocol exactly, except where a test tells it not to.
 *
 * One namespace, one space geometry, one slab; blocks live in an array. Real sockets, real memfds, so libkvc runs
 * unchanged against it. Faults are knobs, read at each request: set them before or while it runs.
 */
#ifndef TESTS_FAKE_DAEMON_H
#define TESTS_FAKE_DAEMON_H

#include "kv/wire.h"

#include <stdatomic.h>
#include <stddef.h>

#define FAKE_SLOTS    256u
#define FAKE_STALE_NS 2000000000u /* its heartbeat may be so old: more than a busy machine takes */

/* One lie: a field of what the daemon hands out has another value, or what carries it is broken. */
typedef enum fake_of {
	FAKE_OF_JOIN, /* what is handed out at JOIN: its reply, and three areas */
	FAKE_OF_MIRROR,
	FAKE_OF_LEASES,
	FAKE_OF_MEMBER,
	FAKE_OF_SLAB,  /* the notice of the slab */
	FAKE_OF_ANSWER /* the header of the answer to `corrupt_code` */
} fake_of_t;

typedef struct fake_lie {
	fake_of_t of;
	size_t at, bytes; /* of the field; 0 bytes: none */
	uint64_t value;
	int one_less; /* descriptor than is said */
	int unsealed; /* memfd */
	int twice;    /* the same slab */
	int garbled;  /* body: the one byte msgpack never uses */
	int cut;      /* half a header, then end of file */
} fake_lie_t;
#define FAKE_LIE(of_, type, field, value_)                                                                             \
	{                                                                                                              \
		.of = (of_), .at = offsetof(type, field), .bytes = sizeof(((type *)0)->field), .value = (value_)       \
	}

typedef struct fake_knobs {
	_Atomic uint32_t slab_memory;   /* kv_slab_memory_t that the slab is announced as */
	_Atomic uint32_t hello_version; /* 0: the right one */
	_Atomic uint32_t mute;          /* code that is never answered; UINT32_MAX: none is */
	_Atomic uint32_t delay_code;    /* this code's next answer waits for `release` */
	_Atomic uint32_t release;
	_Atomic uint32_t fail_code; /* this code is answered with fail_status */
	_Atomic int32_t fail_status;
	_Atomic uint32_t corrupt_code;   /* the answer to this code is a lie */
	_Atomic(const fake_lie_t *) lie; /* NULL: none */
	_Atomic uint32_t no_heartbeat;
	_Atomic uint32_t space_geometry; /* 1: leaves that do not fit the block; 2: another block size than before;
						3: another order of bytes in a block */
	_Atomic uint32_t lease_outside;  /* grants name an offset outside the lease area */
	_Atomic uint32_t lazy_ready;     /* leases start with nothing ready; fake_ready() moves them */
	_Atomic uint32_t hold_puts;      /* PUT_DONE is not sent */
	_Atomic uint32_t slots;          /* blocks a put may get; 0: all */
	_Atomic uint32_t put_ttl_ms;     /* answer to KEEP */
	_Atomic uint32_t tail_bytes;     /* of HANDOVER_TAIL's answer: 5 is what RECV has said */
} fake_knobs_t;

/* What the daemon has seen, for tests to look at. */
typedef struct fake_seen {
	_Atomic uint32_t asked[KV_CODE_SPACE_CLOSE + 1]; /* requests that were answered as they should, by code */
	_Atomic uint32_t released_ids, done_flags, bad_index, durable_asked;
	_Atomic uint32_t ladder; /* keys of the last ACQUIRE */
	_Atomic uint64_t old_incarnation, drained_what;
} fake_seen_t;

typedef struct fake_geometry {
	uint32_t block_bytes, slot_bytes, heads, leaves, leaf_bytes, page_bytes;
} fake_geometry_t;
extern const fake_geometry_t fake_split;  /* 2 heads x 4 layers, 2 KiB leaves */
extern const fake_geometry_t fake_opaque; /* 1 head x 2 pages of 40,000 bytes, 16 KiB leaves: 6 leaves, uneven */

typedef struct fake fake_t;

/* Listen at path. Ends the test program when it cannot. */
fake_t *fake_start(const char *path, const fake_geometry_t *geometry, uint64_t incarnation);
/* Close everything and forget every block, as kill -9 does. */
void fake_stop(fake_t *fake);
fake_knobs_t *fake_knobs(fake_t *fake);
const fake_seen_t *fake_seen(fake_t *fake);

/* These act at once, from the test's thread. */
void fake_drop_sessions(fake_t *fake);                           /* close every connection; the daemon lives on */
void fake_ready(fake_t *fake, uint32_t ready, kv_status_t done); /* of every lease; PENDING: no LEASE_DONE */
void fake_cut(fake_t *fake, uint32_t n);                         /* every lease to n blocks; nobody is told */
void fake_revoke_all(fake_t *fake);                              /* REVOKED into every lease and put header */
void fake_flip(fake_t *fake, uint32_t slot, size_t byte);
void fake_reset_space(fake_t *fake); /* the next epoch */
void fake_retire_slab(fake_t *fake);
void fake_finish_puts(fake_t *fake, kv_status_t status);
uint32_t fake_visible(fake_t *fake);
uint32_t fake_open_leases(fake_t *fake);
uint64_t fake_ring_records(fake_t *fake); /* report records written by the newest member */

#endif
