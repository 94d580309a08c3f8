/* daemon/io/host.h -- everything one running daemon owns: the core's host.
 *
 * One thread, the core loop (loop.c), owns all of it. Two other threads see only what is named here: the publisher
 * (events.h) reads its own rings, and the HTTP thread (http.h) reads `metrics`, counts there, and reads the three
 * atomics of `health`.
 *
 *   loop.c      iterations: wait, handle, tick            request.c   one decoded request -> reply
 *   listener.c  one socket a namespace, accept          join.c      members, instances and their shared areas
 *   session.c   bytes <-> frames, limits, queues        space.c     SPACE_OPEN: identity, layout, groups
 *   fair.c      which source is served next
 *   world.c     the core's way out: tiers, notices      document.c  STATUS, STATS, CHECK, CONFIG as JSON
 *   slabs.c     slabs that come and go                  pidfd.c     whose pidfd a member hands in
 *   events.c    publisher thread (zmtp.c: endpoints)    http.c      /metrics, /healthz, /readyz
 *   disk_attach.c a disk tier that comes late
 */
#ifndef KVD_IO_HOST_H
#define KVD_IO_HOST_H

#include "core/core.h"
#include "io/shm_region.h"
#include "io/events/events.h"
#include "io/fair.h"
#include "keeper.h"
#include "kv/log.h"
#include "kv/sock.h"
#include "options.h"

#include <sys/types.h>

typedef struct kvd_session kvd_session_t;
typedef struct kvd_member_entry kvd_member_entry_t;
typedef struct kvd_instance_entry kvd_instance_entry_t;

/* What one namespace has of what its sessions share, or may have. */
typedef struct kvd_part {
	uint32_t sessions, members, instances;
	size_t receive; /* bytes of receive buffers */
} kvd_part_t;

typedef struct kvd_namespace {
	kvd_source_t source; /* the listening socket */
	char name[65];
	char path[108];
	uint32_t id; /* the core's number */
	uint32_t index;
	int trusted; /* members may join unproved (members.trusted) */
	kvd_part_t used;
	kvd_flow_t flow; /* its listening socket, sessions and pidfds that are ready */
	kvd_area_t mirror;
	uint64_t refusal_logged_ns; /* when a refused frame had a log line */
	uint64_t refusals_unlogged; /* since then */
	uint64_t member_logged_ns;  /* lines about members: when the allowance was full again, at the latest */
	uint64_t members_unlogged;  /* such lines left out since the last one */
} kvd_namespace_t;

/* What the HTTP thread may see. */
typedef struct kvd_health {
	_Atomic int ready;
	_Atomic uint64_t turn_ns; /* CLOCK_MONOTONIC of the last turn of the core loop */
	_Atomic int stopping;
} kvd_health_t;

#define KVD_MEMBER_BUCKETS    1024u
#define KVD_RESERVED_SESSIONS 8u /* of operators, beyond what a namespace may have */

struct kvd_host {
	kvd_setup_t *setup;
	const kvd_options_t *options;
	const kv_env_t *env;
	kv_metrics_t metrics;
	kvd_health_t health;
	uint64_t incarnation;
	uint64_t started_ns;

	/* the loop */
	int epoll_fd;
	int stop;
	kvd_source_t signals;
	kvd_source_t keeper;
	kvd_source_t cpu_ready;
	kvd_source_t disk_ready;
	kvd_fair_t fair;                   /* sources of namespaces that are ready */
	uint64_t look_ns;                  /* when spinning last looked at a socket */
	uint64_t looked_ns;                /* when the last iteration looked at all sockets */
	uint64_t busy_until_ns;            /* spin until then */
	uint64_t hurried_until_ns;         /* sleeps have ended late: shorter ones until then */
	uint64_t asked_ns;                 /* when the last turn with a request ended */
	uint64_t gap_ns;                   /* moving average of the time between two of them */
	uint64_t next_drain_ns;            /* report rings, timeouts */
	uint64_t next_second_ns;           /* gauges */
	uint32_t frames;                   /* handled in this turn */
	int spares[KVD_RESERVED_SESSIONS]; /* descriptors for operators, when there are no others */
	uint32_t spare_count;
	int accept_paused;
	uint64_t accept_again_ns;

	/* storage and core */
	kvs_tier_t *cpu;
	kvs_tier_t *disk;          /* NULL: none, or off */
	struct kvd_attach *attach; /* a disk tier that was off at the start (disk_attach.h); NULL: none was */
	kvd_world_t world;
	kvd_core_config_t core_config;
	kvd_core_t *core;
	struct kvd_slabs *slabs; /* what members have been told */
	kvd_publisher_t *publisher;
	struct kvd_http *http;
	uint32_t own_fds; /* descriptors open, and slabs among them, when the start was over */
	uint32_t own_slabs;

	/* who is here */
	kvd_namespace_t *namespaces;
	uint32_t namespace_count;
	kvd_session_t *sessions;
	kvd_session_t *hot; /* looked at first while spinning */
	uint32_t session_count;
	kvd_session_t *expire_next; /* checked next for being too slow; NULL: a round is over */
	uint64_t next_session;
	size_t receive_bytes; /* of all receive buffers */
	kvd_part_t part;      /* the most of each namespace */
	uint32_t reserved;    /* operators' sessions beyond the part of their namespace */
	kvd_member_entry_t *members[KVD_MEMBER_BUCKETS];
	uint32_t drain_next;      /* bucket whose report rings are read next; 0: a round is over */
	kvd_member_entry_t *gone; /* freed at the end of the turn */
	kvd_instance_entry_t *instances;

	/* scratch of the loop thread */
	kv_msg_t ask;
	kv_msg_t reply;
	uint8_t *frame; /* KVD_FRAME_SCRATCH bytes: an encoded body */
	char *text;     /* KVD_TEXT_SCRATCH bytes: a document */
	char detail[256];
	uint8_t root[32];
};

#define KVD_TEXT_SCRATCH  ((size_t)KV_MAX_JSON + 1u)
#define KVD_FRAME_SCRATCH ((size_t)KV_MAX_JSON + 65536u)

/* ---- loop.c ---------------------------------------------------------------------------------- */

kv_status_t kvd_loop_init(kvd_host_t *host);
void kvd_loop_fini(kvd_host_t *host);
/* Watch source->fd for `events` (EPOLLIN, ...). KV_ERR_LIMIT: the kernel refuses. */
kv_status_t kvd_loop_add(kvd_host_t *host, kvd_source_t *source, uint32_t events);
void kvd_loop_change(kvd_host_t *host, kvd_source_t *source, uint32_t events);
void kvd_loop_remove(kvd_host_t *host, kvd_source_t *source);
/* Watch host->disk. */
kv_status_t kvd_loop_disk(kvd_host_t *host);
/* One iteration: wait at most wait_ns, handle a quantum of each namespace, tick. Returns how long the next one may
 * wait. */
uint64_t kvd_loop_iterate(kvd_host_t *host, uint64_t wait_ns);
/* Until SIGTERM, SIGINT or the end of the keeper. */
void kvd_loop_run(kvd_host_t *host);

/* ---- listener.c ------------------------------------------------------------------------------ */

/* Mirrors, namespaces in the core, recovery of the disk tier, then the sockets. `detail` gets a sentence. */
kv_status_t kvd_listeners_open(kvd_host_t *host, char *detail, size_t cap);
/* Close and unlink the sockets; the mirrors stay. */
void kvd_listeners_close(kvd_host_t *host);
/* After the core has gone. */
void kvd_namespaces_free(kvd_host_t *host);
/* Descriptors may be there again: accept goes on. */
void kvd_listeners_resume(kvd_host_t *host);

/* ---- world.c --------------------------------------------------------------------------------- */

/* Open the tiers; fill host->world and host->core_config. */
kv_status_t kvd_world_open(kvd_host_t *host, char *detail, size_t cap);
void kvd_world_close(kvd_host_t *host);
/* Create and destroy the core on top of them. */
kv_status_t kvd_world_core(kvd_host_t *host, char *detail, size_t cap);
void kvd_world_core_end(kvd_host_t *host);
/* Send a notice; fds (two, borrowed) or NULL. */
void kvd_send_notice(kvd_host_t *host, kvd_session_t *session, uint16_t code, const kv_msg_t *msg, const int *fds);
/* Pass the events of the call that has just ended on as one batch. */
void kvd_world_commit(kvd_host_t *host);

/* ---- slabs.c --------------------------------------------------------------------------------- */

kv_status_t kvd_slabs_open(kvd_host_t *host);
void kvd_slabs_close(kvd_host_t *host);
/* Tell members of slabs that were carved or retired since the last call; call it before anything that can name their
 * slots is sent. */
void kvd_slabs_sync(kvd_host_t *host);
/* Tell one new member of all slabs of its namespace. */
void kvd_slabs_greet(kvd_host_t *host, kvd_session_t *session);
/* A member has unmapped a retired slab; it has gone, and with it all it has mapped. */
void kvd_slabs_drained(kvd_host_t *host, kvd_member_t member, uint64_t slab);
void kvd_slabs_member_gone(kvd_host_t *host, kvd_member_t member);
/* Once a turn: give back the memory of retired slabs that nobody maps, or has mapped for too long. */
void kvd_slabs_turn(kvd_host_t *host);

/* ---- join.c ---------------------------------------------------------------------------------- */

/* NULL when it is unknown. The other two take NULL. */
kvd_member_entry_t *kvd_entry_find(kvd_host_t *host, kvd_member_t id);
kvd_member_t kvd_entry_id(const kvd_member_entry_t *member);
kvd_session_t *kvd_entry_session(const kvd_member_entry_t *member);
/* It has said that it touches some memory no more. */
void kvd_entry_drained(kvd_host_t *host, kvd_member_entry_t *member, const kv_msg_drained_t *ask);
/* The session of a member is at end of file. */
void kvd_entry_session_ended(kvd_host_t *host, kvd_member_entry_t *member);
/* Copy reports out of the rings, a bounded number each and a bounded number in all: the next call goes on. 1: it has
 * to. */
int kvd_entries_drain(kvd_host_t *host);
/* Free some members that have gone and the areas of an instance the core has done with. 1: there may be more. */
int kvd_entries_reap(kvd_host_t *host);
void kvd_entries_fini(kvd_host_t *host);
/* Members of a namespace, with and without a session; at most cap of them. Returns how many there are. */
typedef struct kvd_mapper {
	kvd_member_t id;
	uint32_t role;
} kvd_mapper_t;
uint32_t kvd_entries_of(const kvd_host_t *host, const char *ns, kvd_mapper_t *out, uint32_t cap);
/* Members with a session, and descriptors held for members and instances. */
uint32_t kvd_entries_attached(const kvd_host_t *host);
uint32_t kvd_entries_fds(const kvd_host_t *host);
/* A member has opened a space: STATUS names it, and the log. */
void kvd_entry_opened(kvd_host_t *host, kvd_member_entry_t *member, uint32_t space, const char *model);
/* Program, process id and space of a member into its object in STATUS (kvd_world_t.describe). */
void kvd_entry_describe(void *ctx, kvd_member_t id, struct kvd_json *json);
kv_status_t kvd_entry_staging(void *ctx, kvd_member_t id, uint64_t first, uint32_t words, uint64_t *out);

/* Open descriptors of this process (document.c). */
uint32_t kvd_count_fds(void);

#endif
