/* daemon/io/host.h -- everything one running daemon owns: the core's host.
 *
 * One thread, the core loop (loop.c), owns all of it. Two other threads see only what is named here: the publisher
 * (events.h) reads its own rings, and the HTTP thread (http.h) reads `metrics`, counts there, and reads the three
 * atomics of `health`.
 *
 *   loop.c, poller.c   iterations: wait, handle, tick; what the loop watches
 *   fair.c             which source is served next
 *   world.c            what the core may call: tiers, ledger, notices, events
 *   disk_attach.c      a disk tier that was off at the start
 *   net.c              the net process: peers
 *   gpu.c              memory of GPUs, and the program that gets it
 *   http.c             /metrics, /healthz, /readyz
 *   sessions/          sockets, accept; bytes to frames to requests; replies; SPACE_OPEN; STATUS and other documents
 *   members/           JOIN, pidfds, shared regions, report rings; which member maps which slab
 *   events/            the publisher's thread, its rings, the ZeroMQ endpoints
 */
#ifndef KVD_IO_HOST_H
#define KVD_IO_HOST_H

#include "core/core.h"
#include "io/base/shm_region.h"
#include "io/events/events.h"
#include "io/base/fair.h"
#include "base/keeper_socket.h"
#include "kv/log.h"
#include "kv/sock.h"
#include "kvs/memories.h"
#include "options/options.h"

#include <sys/types.h>

#define KVD_FILES_REASON_MAX 384u

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
	kv_sock_file_t file; /* the socket's, when it was bound */
	uint32_t id;         /* the core's number */
	uint32_t index;
	int trusted; /* members may join unproved (members.trusted) */
	kvd_part_t used;
	kvd_flow_t flow; /* its listening socket, sessions and pidfds that are ready */
	kvd_shm_region_t mirror;
	struct kvd_mirror_touch *touch; /* the thread that touches it; NULL: none */
	int mirror_refused;             /* there was no memory for it when an engine came last */
	uint64_t refusal_logged_ns;     /* when a refused frame had a log line */
	uint64_t refusals_unlogged;     /* since then */
	uint64_t member_logged_ns;      /* lines about members: when the allowance was full again, at the latest */
	uint64_t members_unlogged;      /* such lines left out since the last one */
} kvd_namespace_t;

/* What the HTTP thread may see. */
typedef struct kvd_health {
	_Atomic int ready;
	_Atomic uint64_t iteration_ns; /* CLOCK_MONOTONIC of the last turn of the core loop */
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
	int upgrade; /* the keeper has asked for the end: another program goes on */
	kvd_source_t signals;
	kvd_source_t keeper;
	kvd_keeper_queue_t to_keeper;
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
	int accept_paused; /* after this errno; 0: it is not */
	uint64_t accept_again_ns;
	char few_files[KVD_FILES_REASON_MAX]; /* what the limit of descriptors does not permit; "": nothing */
	int lacks_files;                      /* not even what the daemon itself may need */
	int unreachable;                      /* a socket of ours was removed and is not back: it has been said */

	/* storage and core */
	kvs_tier_t *cpu;
	kvs_tier_t *memory;             /* the CPU tier as the core sees it: the pools together */
	kvs_tier_t *pool[KVS_MEMORIES]; /* by the core's number of memory; pool[0] is `cpu` */
	uint32_t pool_count;
	kvs_tier_t *disk;               /* NULL: none, or off */
	int disk_unsynced;              /* kvs_nvme_config_t.unsynced, from one try to open to the next */
	struct kvd_disk_attach *attach; /* a disk tier that was off at the start (disk_attach.h); NULL: none was */
	kvd_world_t world;
	kvd_core_config_t core_config;
	kvd_core_t *core;
	struct kvd_slabs *slabs; /* what members have been told */
	kvd_publisher_t *publisher;
	struct kvd_http *http;
	struct kvd_net_host *net; /* NULL: there are no peers (net.h) */
	struct kvd_gpu_host *gpu; /* NULL: there is no GPU tier (gpu.h) */
	struct kvd_held *held;    /* what an earlier daemon left, during the start; NULL: nothing */
	uint32_t own_fds;         /* descriptors open, and slabs among them, when the start was over */
	uint32_t own_slabs;

	/* who is here */
	kvd_namespace_t *namespaces;
	int parked; /* sessions wait for memory (kvd_sessions_unpark) */
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
	struct kvd_writer *writers; /* of earlier daemons (members/writers.h) */
	int writers_wait;           /* 1: slots wait for them */

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

/* Pass the events of the call that has just ended on as one batch. */
static inline void kvd_commit_events(kvd_host_t *host)
{
	if (host->publisher) {
		kvd_publisher_commit(host->publisher);
	}
}

#endif
