/* client/impl.h -- the insides of libkvc. Nothing here is exported.
 *
 * Files, from the bottom up; none calls into one of a later line but through what it was given (an answer's handler,
 * kvc_events_t):
 *   error.c, config.c, group.c, copy.c      sentences; what the caller gave; block groups of a space; verified copies
 *   channel.c, area.c                       frames and pending requests; memory that came as a descriptor
 *   slab.c, map.c                           shared memory of one incarnation
 *   grant.c, staging.c                      what leases and puts share
 *   session.c                               states of a session, polling, waiting
 *   space.c, match.c, report.c, doc.c
 *   lease.c, put.c, handover.c
 *   acquire.c, put_end.c, handle.c          asking for leases; handing blocks in; leases and puts of other members
 *   dispatch.c                              what arrives
 *   attach.c                                the life of an attachment
 *
 * Threads. One owner thread at a time; at the same time others match, look at leases and read them, and write into puts
 * (kvc.h says what). They reach shared memory in two ways only:
 *   kvc_match()                    through kvc->map between kvc_map_enter() and kvc_map_leave()
 *   kvc_lease_read() and the like  through the map of the lease or put, on which it holds a reference
 * A map is unmapped when it is no longer current, nothing refers to it, and no match is running (kvc_map_reap()).
 */
#ifndef KVC_IMPL_H
#define KVC_IMPL_H

#include "kvc.h"

#include "kv/env.h"
#include "kv/identity.h"
#include "kv/shm.h"
#include "kv/sock.h"
#include "kv/status.h"
#include "kv/struct.h"
#include "kv/wire.h"

#include <stdatomic.h>

#define KVC_MAX_PENDING     1024u       /* requests in flight                                      */
#define KVC_ONEWAY_ID       1u          /* of requests without a handler; no pending request has it */
#define KVC_MAX_OUT         (64u << 20) /* bytes waiting for the socket                             */
#define KVC_MAX_FDS_QUEUED  16u         /* descriptors received ahead of their frames               */
#define KVC_MAX_BACKLOG     4096u       /* lease ids waiting to be released; RELEASE holds as many  */
#define KVC_MAX_BAD         64u         /* bad blocks waiting to be reported                        */
#define KVC_MAX_EXTENTS     1024u       /* puts that hold staging at a time                         */
#define KVC_ID_BUCKETS      256u        /* of the tables lease id -> lease, put id -> put           */
#define KVC_PREFAULT_BYTES  (2u << 20)  /* of a slab, made accessible at a time */
#define KVC_MAX_SOCKET_PATH 108u
#define KVC_MAX_HEADS       65536u
#define KVC_MAX_LEAVES      (1u << 20)
#define KVC_MAX_LAYOUT_TEXT 1024u
#define KVC_EXPLAIN_KEYS    4096u
#define KVC_STAGING_WORDS_A_BLOCK                                                                                      \
	256u /* what staging_blocks is multiplied with; heads and layers are not known at attach */
#define KVC_MAX_STAGING_WORDS (1u << 24)
#define KVC_BACKOFF_MIN_NS    UINT64_C(10000000)
#define KVC_BACKOFF_MAX_NS    UINT64_C(1000000000)
#define KVC_REOPEN_NS         UINT64_C(200000000)   /* before a space that was open is asked for again */
#define KVC_OTHER_CLOCK_NS    UINT64_C(10000000000) /* a clock that differs by this much is of another time namespace */
#define KVC_HUNG_NS           UINT64_C(1000000000)  /* without a heartbeat this long: no request is sent */
#define KVC_NS_A_MS           UINT64_C(1000000)
#define KVC_NS_A_US           UINT64_C(1000)
#define KVC_FORK_GUARD        UINT64_C(0x6b766320616c6976) /* what the fork_guard page holds in its process */

/* ---- shared memory of one incarnation -------------------------------------------------------- */

typedef struct kvc_slab {
	uint8_t *data;              /* NULL: memory of a GPU that is not mapped here */
	const uint64_t *leaves;     /* leaf[slots][heads][leaves] */
	const kv_slab_tail_t *tail; /* NULL: of a daemon that does not say what it has touched */
	size_t data_bytes;
	size_t digest_bytes;
	uint32_t number;
	uint32_t slots;
	uint32_t slot_bytes;
	uint32_t block_bytes;
	uint32_t heads;
	uint32_t leaves_a_head;
	uint32_t device;              /* the daemon's number of the GPU; 0: host memory */
	int on_device;                /* data is an address of a GPU */
	_Atomic uint64_t *prefaulted; /* one bit a KVC_PREFAULT_BYTES: its pages are in our page table */
	size_t prefault_at;           /* before it kvc_prefault() has been */
	uint64_t retired_at;          /* serial of the first lease or put that cannot use it; 0: in use */
	struct kvc_slab *next_retired;
} kvc_slab_t;

/* A GPU whose memory the daemon has blocks in. */
typedef struct kvc_gpu {
	char name[KVC_MAX_DEVICE + 1]; /* "": the daemon has not told of it */
	uint32_t mapped, unmapped;     /* slabs that this process could map, and could not */
} kvc_gpu_t;

typedef struct kvc_map {
	struct kvc_map *next; /* among the retired */
	uint64_t incarnation;
	uint64_t refs;         /* leases and puts, and 1 while current; owner thread only */
	_Atomic uint32_t dead; /* the session has ended: leases and puts are over */

	const kv_mirror_header_t *mirror;
	size_t mirror_bytes;
	uint64_t stale_ns; /* a heartbeat this old is that of a dead or stopped daemon */
	const kv_mirror_bucket_t *buckets;
	uint64_t bucket_mask;
	const _Atomic uint64_t *epochs;

	const uint8_t *leases;
	size_t lease_bytes;

	kv_member_area_header_t *member;
	size_t member_bytes;
	kv_report_t *ring;
	uint32_t ring_mask;
	uint64_t *staging;
	uint64_t staging_words;

	kvc_gpu_t gpus[KV_MAX_DEVICES]; /* by the daemon's number - 1; owner thread only */
	kvc_slab_t *retired;
	_Atomic(kvc_slab_t *) slabs[KV_SLOT_MAX_SLAB + 1u];
} kvc_map_t;

/* ---- requests in flight ---------------------------------------------------------------------- */

/* The end of a request: its reply, or a status of our own (TIMEOUT, CLOSED) with `reply` NULL. `detail` is the
 * daemon's sentence, never NULL. */
typedef struct kvc_answer {
	kv_status_t status;
	const kv_msg_t *reply;
	const char *detail;
	int expired; /* our deadline has passed; of a PUT_END the answer is still expected */
} kvc_answer_t;
typedef void (*kvc_answer_fn)(kvc_t *kvc, void *object, const kvc_answer_t *answer);
/* One whole frame. PROTO, TOO_BIG, ...: the session must end. */
typedef kv_status_t (*kvc_frame_fn)(kvc_t *kvc, const kv_frame_header_t *header, const uint8_t *body);

typedef struct kvc_pending {
	uint64_t id;        /* 0: free */
	uint64_t deadline;  /* UINT64_MAX: passed already, the late answer is still expected */
	kvc_answer_fn done; /* NULL: no handler; what a late answer grants is given back */
	void *object;
	uint16_t code;
	uint32_t next_free;
} kvc_pending_t;

/* What to send besides the message. */
typedef struct kvc_ask {
	uint16_t code;
	const void *msg; /* the request's struct */
	kvc_answer_fn done;
	void *object;
	uint64_t deadline; /* 0: now + the default */
	int fd;            /* one descriptor to send along, -1: none; only with an empty queue */
} kvc_ask_t;

typedef struct kvc_channel {
	int fd;            /* -1: closed */
	uint32_t max_body; /* the daemon accepts */
	uint8_t *out;      /* whole frames, back to back: [out_head, out_tail) waits */
	size_t out_cap, out_head, out_tail;
	size_t out_sent; /* bytes of the first frame already sent */
	uint8_t *in;
	size_t in_cap, in_len;
	int fds[KVC_MAX_FDS_QUEUED];
	uint32_t fd_count;
	kvc_pending_t *pending;
	uint32_t free_pending;
	uint32_t in_flight;
	uint64_t serial;
	uint64_t next_deadline;
} kvc_channel_t;

/* ---- staging --------------------------------------------------------------------------------- */

typedef struct kvc_extent {
	uint64_t first;
	uint64_t words;
} kvc_extent_t;

/* ---- the objects of the API ------------------------------------------------------------------ */

/* What follows from the layout of a group's blocks. */
typedef struct kvc_geometry {
	uint32_t block_bytes;
	uint32_t heads;
	uint32_t leaves;
	uint32_t leaf_bytes;
	uint32_t page_bytes;
	uint32_t layers; /* pages a head */
	uint32_t pieces; /* leaves a page */
} kvc_geometry_t;

/* A block group. Block j (from 0) is named by the key of unit (j + 1) * units - 1. */
typedef struct kvc_group {
	uint32_t number;
	kv_group_rule_t rule;
	uint32_t block_tokens;
	uint32_t window;         /* tokens; KV_RULE_WINDOW */
	uint32_t units;          /* a block */
	kvc_geometry_t geometry; /* block_bytes 0: the space was never open */
} kvc_group_t;

struct kvc_space {
	kvc_t *kvc;
	kvc_space_t *next;
	_Atomic uint32_t id;          /* of this incarnation */
	_Atomic uint64_t epoch;       /* 0: not open now */
	_Atomic uint64_t known_epoch; /* the last one seen: keys are made in it */
	_Atomic uint32_t stale;       /* a match or an answer has seen another epoch: open it again */
	int opening;
	kv_status_t open_status; /* PENDING while opening */
	uint64_t again_ns;       /* could not be opened again just then: asked for at this time; 0: no */
	uint8_t root[32];
	uint32_t hash_tokens;
	uint32_t group_count;
	uint32_t granule; /* units: a length that every group can serve is a multiple of it */
	kvc_group_t groups[KV_MAX_GROUPS];
	kv_status_t reset_status;
	uint32_t flags;     /* KV_SPACE_* */
	uint32_t puts_left; /* closed; puts whose handed-in blocks the daemon has still to take */
	uint32_t text_len;
	char text[KV_MAX_TEXT + 1u]; /* canonical identity */
	char asked_layout[KVC_MAX_LAYOUT_TEXT + 1u];
	char layout[KVC_MAX_LAYOUT_TEXT + 1u]; /* what the daemon has: the inner order may differ */
};

/* What leases and puts share: their slots in the lease area. */
typedef struct kvc_grant {
	kvc_map_t *map; /* NULL: nothing granted */
	const kv_lease_header_t *header;
	uint64_t id;
	uint64_t offset;
	uint32_t slots; /* entries behind the header */
	uint32_t kind;  /* kv_lease_kind_t */
} kvc_grant_t;

struct kvc_lease {
	kvc_space_t *space;
	kvc_lease_t *next, *prev; /* among the live, oldest first; free ones: next only */
	kvc_lease_t *chain;       /* in the id table */
	const kvc_group_t *group;
	kvc_grant_t grant;
	uint64_t serial;
	_Atomic int32_t status; /* PENDING, OK, MISS, or why it is over */
	_Atomic int32_t rest;   /* why blocks beyond ready will never come; OK: they may */
	uint32_t n, skip, disk, why;
	int exact; /* of a group that is not `full`: all of it or nothing */
	_Atomic uint64_t expires_ns;
	int imported; /* another member's: not ours to release */
};

struct kvc_put {
	kvc_space_t *space;
	kvc_put_t *next, *prev;
	kvc_put_t *chain;
	const kvc_group_t *group;
	kvc_grant_t grant;
	uint64_t serial;
	_Atomic int32_t status; /* of PUT_START: PENDING, OK, or why not */
	kv_status_t end_status; /* first failure of a PUT_END */
	kvc_put_result_t result;
	kvc_writer_t range; /* of this member */
	uint64_t kept_ns;   /* the daemon has heard last that it is still written */
	uint32_t asked, n, from;
	uint32_t ends;   /* PUT_END requests in flight: their staging is still read */
	uint32_t handed; /* blocks handed in, ALREADY ones not counted */
	int durable;
	int imported;
	int freed;        /* by the caller; waits for `ends` */
	int staging_lost; /* its session has ended: the staging is another one now */
	/* Staging holds `window_blocks` blocks from the window's first on, counted as in `order`. It moves on when all
	 * of them have been handed in and answered; where there is room for the whole put, it never does. */
	kvc_extent_t staging;
	_Atomic uint32_t window;
	uint32_t window_blocks;
	uint32_t words_a_block;
	uint32_t *order; /* order[i]: blocks before i that are not ALREADY; n + 1 entries */
	uint32_t order_cap;
};

struct kvc_handover {
	kvc_t *kvc;
	kvc_space_t *space; /* NULL: closed */
	kvc_handover_t *next, *prev;
	kvc_handover_t *chain; /* in the id table */
	uint64_t number;       /* 0: none, or the daemon has forgotten it */
	uint64_t bytes;
	int is_producer;
	int asking;                  /* SEND or RECV is not answered */
	int await_room, awaits_room; /* of a producer: asked for with the last chunk; it was answered BUSY */
	int freed;                   /* by the caller; waits for that answer */
	int abort;                   /* of kvc_handover_done() */
	kv_status_t why;             /* of kvc_handover_fail() */
	int taken;
	uint32_t state;
	kv_status_t status;
	uint32_t n;
	uint32_t partial;
	uint32_t announced; /* of a producer: units, a private block counts as one */
	int was_announced;  /* its n may grow at any time */
	uint32_t tail_bytes;
	uint8_t *tail;
	char transfer[KVC_MAX_TRANSFER + 1];
};

typedef struct kvc_bad {
	uint64_t incarnation;
	uint64_t lease;
	uint32_t index;
} kvc_bad_t;

typedef struct kvc_counters {
	_Atomic uint64_t matches, match_hits, acquires, acquire_misses, blocks_read, bytes_read, blocks_put, bytes_put,
		corrupt, reattaches, timeouts, reports_dropped;
} kvc_counters_t;

/* What a session tells spaces, leases and puts, which it does not know. There is one table, in attach.c. */
typedef struct kvc_events {
	kvc_frame_fn frame;             /* a frame has come */
	uint32_t (*opened)(kvc_t *kvc); /* spaces can be asked for; how many are: the session is ready after as many
					   kvc_reopened() */
	void (*lost)(kvc_t *kvc);       /* it is over: its channel is closed, its map retired */
	void (*deferred)(kvc_t *kvc);   /* it is ready, and time for what has been left for later */
} kvc_events_t;

typedef enum kvc_state {
	KVC_DETACHED,
	KVC_HELLO, /* connected, HELLO sent */
	KVC_JOIN,  /* JOIN sent */
	KVC_OPEN,  /* joined; spaces of before are being opened again */
	KVC_READY,
} kvc_state_t;

struct kvc {
	kv_env_t env;
	const kvc_events_t *events;
	char socket[KVC_MAX_SOCKET_PATH];
	char instance[129];
	uint8_t secret[32];
	uint32_t secret_len;
	uint32_t role, rank;
	uint64_t attachment; /* by it the daemon knows our older connections */
	char program[65];
	uint64_t timeout_ns;
	uint64_t most_spin_ns, spin_ns; /* as configured; with this daemon */
	uint32_t staging_words;
	int observe;
	void (*on_memory)(void *ctx, const kvc_memory_t *memory, int mapped);
	kvc_status_t (*map_device)(void *ctx, int fd, size_t bytes, void **p_base);
	void (*unmap_device)(void *ctx, void *base, size_t bytes);
	void *memory_ctx;
	const volatile uint64_t *fork_guard; /* a page a forked child reads as zero */

	kvc_state_t state;
	kv_status_t why_detached;
	char why_text[512];
	uint64_t incarnation;
	uint64_t old_incarnation;
	char peer_name[KVC_MAX_PEER + 1]; /* of the daemon that was joined last */
	uint64_t next_try_ns, backoff_ns;
	uint64_t ready_ns; /* since when the session has been ready */
	uint64_t news;     /* frames taken and requests timed out: what a caller may wait for */
	uint64_t awaited_beat,
		awaited_ns;    /* kvc_await_us(): the heartbeat seen last, and how long it has been waited on */
	uint32_t reopening;    /* SPACE_OPENs a re-attach still waits for */
	int must_send_drained; /* handles of an older session were alive when it joined */
	kvc_channel_t channel;

	_Atomic(kvc_map_t *) map; /* current; NULL: detached */
	_Atomic uint32_t readers; /* matches running */
	kvc_map_t *retired;

	kvc_space_t *spaces;
	kvc_lease_t *leases, *last_lease, *free_leases;
	kvc_put_t *puts, *last_put, *free_puts;
	kvc_lease_t *lease_ids[KVC_ID_BUCKETS];
	kvc_put_t *put_ids[KVC_ID_BUCKETS];
	kvc_handover_t *handovers;
	kvc_handover_t *handover_ids[KVC_ID_BUCKETS];
	kvc_handover_t *tail_of; /* whose tail is being fetched */
	int tails_wanted;        /* some handle may want its own */
	uint64_t serial;
	uint64_t leases_open, puts_open, slabs_mapped;
	uint64_t put_ttl_ns; /* the daemon's put.ttl, as an answer to KEEP says; 0: none has come */

	kv_key_t *ladder; /* keys of the request being sent, when they are many */
	uint32_t ladder_cap;
	uint64_t *backlog; /* lease ids to release */
	uint32_t backlog_len;
	_Atomic uint32_t bad_lock; /* readers on other threads report bad blocks, the owner sends them */
	uint32_t bad_len;
	kvc_bad_t bad[KVC_MAX_BAD];
	kvc_extent_t extents[KVC_MAX_EXTENTS]; /* of the current staging, by address */
	uint32_t extent_count;
	kvc_counters_t counters;
	_Atomic int abandoned; /* for good */
};

/* ---- error.c --------------------------------------------------------------------------------- */

/* Note a sentence for kvc_last_error() and return status. */
kvc_status_t kvc_fail(kv_status_t status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same of a request that was refused: "WHAT: the status's sentence: the daemon's detail". */
kvc_status_t kvc_fail_request(kv_status_t status, const char *detail, const char *what, ...)
	__attribute__((format(printf, 3, 4)));
/* An invariant is broken, here or in the caller: no session, no copy, and nothing is unmapped from then on. */
int kvc_is_abandoned(const kvc_t *kvc);
/* KVC_OK, KVC_ERR_CLOSED in a forked child, or KVC_ERR_INTERNAL once abandoned. No system call. */
kvc_status_t kvc_check_process(const kvc_t *kvc);

/* ---- channel.c ------------------------------------------------------------------------------- */

kv_status_t kvc_channel_init(kvc_t *kvc);
void kvc_channel_fini(kvc_t *kvc);
/* Close the socket and forget what was queued; every pending request ends with `status`. */
void kvc_channel_close(kvc_t *kvc, kv_status_t status);
/* Queue a request and send what fits. BUSY: too much in flight, which never holds up one without a handler: its answer
 * is not kept for. CLOSED: the socket has gone (the session is then over). */
kv_status_t kvc_send(kvc_t *kvc, const kvc_ask_t *ask);
kv_status_t kvc_flush(kvc_t *kvc);
/* Read what has arrived and hand on every frame of it. CLOSED or PROTO: the session must end. */
kv_status_t kvc_receive(kvc_t *kvc, kvc_frame_fn frame);
/* End requests whose deadline has passed. */
void kvc_expire(kvc_t *kvc, uint64_t now);
/* The object goes away: answers to its requests are dropped. */
void kvc_forget_requests(kvc_t *kvc, const void *object);
/* The pending request of a reply, or NULL. */
kvc_pending_t *kvc_pending_find(kvc_t *kvc, uint64_t id);
void kvc_pending_free(kvc_t *kvc, kvc_pending_t *pending);
/* A request whose answer is dropped. It is sent however many answers are awaited. */
void kvc_send_oneway(kvc_t *kvc, uint16_t code, const void *msg);
/* timeout_ms from now; 0: the attachment's. */
uint64_t kvc_deadline(const kvc_t *kvc, uint32_t timeout_ms);

/* ---- dispatch.c ------------------------------------------------------------------------------ */

/* A kvc_frame_fn. Takes the frame's descriptors out of the channel's queue. */
kv_status_t kvc_dispatch(kvc_t *kvc, const kv_frame_header_t *header, const uint8_t *body);

/* ---- session.c ------------------------------------------------------------------------------- */

/* Every call of the owner starts here: the fork_guard page, then what has arrived, deadlines, re-attach. OK also while
 * detached. */
kvc_status_t kvc_enter(kvc_t *kvc);
void kvc_pump(kvc_t *kvc);
/* The session is over: all of its leases and puts are, too. */
void kvc_session_lost(kvc_t *kvc, kv_status_t status, const char *why);
/* Pump until done(object), at most until `deadline`; TIMEOUT. */
typedef int (*kvc_done_fn)(const void *object);
kv_status_t kvc_wait(kvc_t *kvc, kvc_done_fn done, const void *object, uint64_t deadline);
/* Sleep until something arrives, at most `ns`. */
void kvc_sleep(kvc_t *kvc, uint64_t ns);
/* Why nothing can be asked now: UNREACHABLE or CLOSED with a sentence. */
kvc_status_t kvc_detached(const kvc_t *kvc);
/* One SPACE_OPEN of a re-attach has ended. */
void kvc_reopened(kvc_t *kvc);

/* ---- area.c, map.c, slab.c ------------------------------------------------------------------- */

/* Map `bytes` of fd, checked against its real size and its seals. */
kv_status_t kvc_map_fd(int fd, uint64_t bytes, int prot, void **p_base);

typedef struct kvc_join_fds {
	int mirror, leases, member;
} kvc_join_fds_t;

/* Map and check what JOIN handed out. The descriptors stay the caller's. */
kv_status_t kvc_map_create(kvc_t *kvc, const kv_msg_join_reply_t *reply, const kvc_join_fds_t *fds, kvc_map_t **p_map);
void kvc_map_ref(kvc_map_t *map);
void kvc_map_unref(kvc_map_t *map);
/* The current map ends: kvc_map_reap() unmaps it when nothing uses it. */
void kvc_map_retire(kvc_t *kvc);
void kvc_map_reap(kvc_t *kvc);
/* Unmap all, also maps in use; only when the kvc_t itself ends. */
void kvc_map_destroy_all(kvc_t *kvc);
kvc_map_t *kvc_map_enter(kvc_t *kvc);
void kvc_map_leave(kvc_t *kvc);
/* A GPU's memory has blocks from now on. */
kv_status_t kvc_device_add(kvc_t *kvc, const kv_msg_device_add_t *msg);
kv_status_t kvc_slab_add(kvc_t *kvc, const kv_msg_slab_add_t *msg, int data_fd, int digest_fd);
void kvc_slab_retire(kvc_t *kvc, uint32_t number);
/* Unmap retired slabs that no lease or put can name, and send DRAINED. */
void kvc_slab_reap(kvc_t *kvc);
void kvc_slab_destroy(const kvc_t *kvc, kvc_slab_t *slab);

/* Memory of a block, and its digests. */
typedef struct kvc_block_memory {
	uint8_t *data;
	const uint64_t *leaves;
	int on_device; /* data is an address of a GPU: no CPU may use it */
} kvc_block_memory_t;

/* Those of a slot. FAULT: no such memory here. LAYOUT: a slab of another geometry. */
kv_status_t kvc_slab_find(const kvc_map_t *map, const kvc_geometry_t *g, kv_slot_t slot, kvc_block_memory_t *memory);

/* ---- space.c --------------------------------------------------------------------------------- */

/* Ask for all spaces (again): how many requests were sent. */
uint32_t kvc_spaces_ask(kvc_t *kvc);
/* Those that another member has reset: learn the new epoch. Those that could not be opened again after a re-attach: ask
 * once more. */
void kvc_spaces_refresh(kvc_t *kvc);
/* kvc_enter(), then OK when requests of a member can name the space. */
kvc_status_t kvc_space_usable(kvc_space_t *space);
/* The daemon or the mirror knows another epoch. */
void kvc_space_stale(kvc_space_t *space);
/* Tell the daemon that the member needs the space of this number no longer, unless another handle does. `text`: its
 * identity, NULL: not known. */
void kvc_space_give_back(kvc_t *kvc, uint32_t id, const char *text);
/* Out of the attachment: nothing that arrives reaches it from then on. Then kvc_space_free(). */
void kvc_space_unlink(kvc_space_t *space);
void kvc_space_free(kvc_space_t *space);

/* Where leaf `leaf` of head `head` lies in a block. */
static inline size_t kvc_leaf(const kvc_geometry_t *g, uint32_t head, uint32_t leaf, size_t *p_len)
{
	uint32_t page = leaf / g->pieces;
	uint32_t at = (leaf - page * g->pieces) * g->leaf_bytes;
	uint32_t left = g->page_bytes - at;

	*p_len = left < g->leaf_bytes ? left : g->leaf_bytes;

	return ((size_t)head * g->layers + page) * g->page_bytes + at;
}

/* ---- group.c --------------------------------------------------------------------------------- */

/* Take over what the identity says; IDENTITY: no length is a multiple of all groups' blocks. */
kv_status_t kvc_groups_take(kvc_space_t *space, const kv_group_t *groups, uint32_t count);
/* NULL: the space has no such group. */
const kvc_group_t *kvc_group_find(const kvc_space_t *space, uint32_t number);
/* Blocks [first, end) that a sequence continuing after n units needs. */
typedef struct kvc_blocks {
	uint32_t first, end;
} kvc_blocks_t;
kvc_blocks_t kvc_group_blocks(const kvc_space_t *space, const kvc_group_t *group, uint32_t n);
/* A key source over an array of keys, which begins with the key of unit `first`. */
typedef struct kvc_key_array {
	const kvc_key_t *keys;
	uint32_t first;
} kvc_key_array_t;
void kvc_key_of_array(void *ctx, uint32_t i, kvc_key_t *key);

/* ---- acquire.c, lease.c, put.c, put_end.c, handover.c, staging.c ----------------------------- */

/* Check a grant against the lease area and take a reference. PROTO: the daemon named something that is not there. */
kv_status_t kvc_grant_take(kvc_t *kvc, uint64_t id, uint64_t offset, uint32_t slots, kv_lease_kind_t kind,
			   kvc_grant_t *grant);
void kvc_grant_drop(kvc_grant_t *grant);
/* ACTIVE still? REVOKED otherwise. Ordered after every earlier read. */
kv_status_t kvc_grant_check(const kvc_grant_t *grant);
kv_slot_t kvc_grant_slot(const kvc_grant_t *grant, uint32_t i);

/* Key of a block of the group, counted from 0. */
static inline kv_key_t kvc_block_key(const kvc_key_source_t *source, const kvc_group_t *group, uint32_t block)
{
	kv_key_t key;

	source->key(source->ctx, (block + 1u) * group->units - 1u, (kvc_key_t *)(void *)&key);

	return key;
}

/* Fill the struct of a caller of `call`. KVC_ERR_ARG: its struct_size is not set. */
kvc_status_t kvc_fill(const char *call, void *out, const void *full, size_t size);

/* Memory for the keys of the request being sent, kept for the next. NULL: out of memory. */
kv_key_t *kvc_reserve_keys(kvc_t *kvc, uint32_t count);

kvc_lease_t *kvc_lease_new(kvc_space_t *space);
void kvc_lease_forget(kvc_lease_t *lease);
void kvc_lease_bind(kvc_lease_t *lease);
void kvc_lease_notice(kvc_t *kvc, const kv_msg_lease_done_t *msg);
void kvc_lease_flush(kvc_t *kvc);
void kvc_leases_destroy(kvc_t *kvc);
/* The space goes: what is left of its leases goes back. */
void kvc_leases_of_space_end(kvc_space_t *space);

kvc_put_t *kvc_put_new(kvc_space_t *space);
void kvc_put_forget(kvc_put_t *put);
kv_status_t kvc_put_bind(kvc_put_t *put);
void kvc_put_notice_done(kvc_t *kvc, const kv_msg_put_done_t *msg);
void kvc_put_notice_durable(kvc_t *kvc, const kv_msg_durable_t *msg);
void kvc_puts_lost(kvc_t *kvc);
void kvc_puts_destroy(kvc_t *kvc);
/* The same of its puts. While space->puts_left is not 0, the last of them frees the space. */
void kvc_puts_of_space_end(kvc_space_t *space);
/* Is the range within the space? Sets the words a block has in it. */
kv_status_t kvc_put_range(const kvc_geometry_t *g, const kvc_writer_t *range, uint32_t *p_words);

void kvc_handover_notice(kvc_t *kvc, const kv_msg_handover_t *msg);
void kvc_handovers_note_room(kvc_t *kvc);
void kvc_handovers_fetch_tails(kvc_t *kvc);
void kvc_handovers_lost(kvc_t *kvc);
void kvc_handovers_destroy(kvc_t *kvc);
void kvc_handovers_of_space_end(const kvc_space_t *space);

/* First fit in the member's staging. BUSY: no room now; LIMIT: never. */
kv_status_t kvc_staging_take(kvc_t *kvc, uint64_t words, kvc_extent_t *extent);
void kvc_staging_give(kvc_t *kvc, kvc_extent_t *extent);
/* The staging area itself has gone. */
void kvc_staging_reset(kvc_t *kvc);

/* ---- copy.c ---------------------------------------------------------------------------------- */

/* Leaves [first, first + count) of one head. */
typedef struct kvc_leaves {
	uint32_t head, first, count;
} kvc_leaves_t;

/* Copy them from block to block; digests[count]. */
void kvc_copy_leaves(const kvc_geometry_t *g, const kvc_leaves_t *range, void *dst, const void *src, uint64_t *digests);
/* Copy a whole block and compare its digests with leaves[heads][leaves]: CORRUPT when one differs. */
kv_status_t kvc_copy_checked(const kvc_geometry_t *g, void *dst, const void *src, const uint64_t *leaves);

/* ---- for tests ------------------------------------------------------------------------------- */

/* kvc_attach() in another universe. */
kvc_status_t kvc_attach_env(const kvc_config_t *config, const kv_env_t *env, kvc_t **p_kvc);

static inline void kvc_count(_Atomic uint64_t *counter, uint64_t n)
{
	atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static inline void kvc_pause(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

#endif
