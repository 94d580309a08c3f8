/* universe.h -- a world of its own for one core: virtual clock, tiers in memory, members as plain calls, and a record
 * of all notices and events. Every block's bytes are a function of its key, so a lease can be checked in full at any
 * time; events are played into a set that must equal the index; universe_check() runs the core's own invariants and
 * these on top, after every step if a test wants. */
#ifndef TESTS_CORE_UNIVERSE_H
#define TESTS_CORE_UNIVERSE_H

#include "kv_cmocka.h"

#include "core/block/block.h"
#include "core/block/transfer.h"
#include "core/block/write_behind.h"
#include "core/check.h"
#include "core/core.h"
#include "core/base/core_impl.h"
#include "core/lease/lease.h"
#include "core/put/put.h"
#include "core/base/find.h"
#include "kvs/memories.h"
#include "core/base/share.h"
#include "fake_tier.h"
#include "kv_test.h"
#include "kvs/pool.h"

#define U_MEMBERS             24u
#define U_NOTICES             8192u
#define U_LEASE_BYTES         (1u << 20)
#define U_INSTANCES           16u
#define U_GROUPS              4u
#define U_HANDOVER_TTL_NS     UINT64_C(10000000000)
#define U_HANDOVER_MIN_TTL_NS UINT64_C(2000000000)

/* Groups of every space: 0 full, 1 window, 2 state, 5 full. */
extern const kv_group_t u_groups[U_GROUPS];

typedef struct u_notice {
	kvd_member_t member;
	uint16_t code;
	kv_msg_t msg;
} u_notice_t;

typedef struct u_member {
	kvd_member_t id;
	kvd_instance_t instance;
	uint8_t *area; /* lease area of the instance */
	uint32_t ns, role, rank;
	int closed;
} u_member_t;

/* A lease as its holder sees it. */
typedef struct u_lease {
	uint64_t id;
	u_member_t *member;
	uint64_t offset;
	kv_key_t keys[512]; /* of the blocks [0, n) */
	uint32_t n, skip, group;
} u_lease_t;

typedef struct u_put {
	uint64_t id;
	u_member_t *member;
	uint64_t offset;
	uint32_t n, first; /* blocks before it */
	uint32_t group;
	kv_key_t keys[512];
} u_put_t;

#define U_GIVE_UP (KV_HANDOVER_ABORT | KV_HANDOVER_BY_PRODUCER)
#define U_FULL    1u /* of u_send_t.groups: the first group; all of them */
#define U_ALL     15u

/* A HANDOVER_SEND. */
typedef struct u_send {
	const char *transfer;
	uint64_t number;
	const kvd_space_info_t *space;
	const kv_key_t *keys;
	uint32_t n;      /* units of 16 tokens */
	uint32_t groups; /* bits: those of u_groups that have a part */
	int last;
	int ahead; /* of the first group alone: the keys of units [from, n) */
	uint32_t from;
	uint32_t partial;
	kv_key_t private_key;
	int await_room;
	uint32_t ttl_ms;
	const void *tail;
	uint32_t tail_len;
} u_send_t;

typedef struct u_event_key {
	uint64_t hash;
	uint32_t space;
	uint32_t media; /* bits */
} u_event_key_t;

typedef struct universe {
	kv_test_env_t env;
	kv_test_rng_t rng;
	kv_metrics_t metrics;
	fake_tier_t cpu, disk, gpu;
	fake_tier_t *kept_gpu; /* of the configuration */
	kvs_tier_t *memories;  /* `cpu` or `pool`, and `gpu` */
	uint32_t memory;       /* of spaces opened from now on; 1: `gpu` */
	kvs_tier_t *pool;      /* the real CPU tier instead of `cpu`; NULL: not */
	uint32_t block_bytes;  /* of spaces opened from now on */
	int uneven;            /* and blocks of every other group are twice as large */
	uint32_t group_count;  /* likewise: the first ones of u_groups */
	int has_disk;
	kvd_core_config_t config;
	kvd_core_t *core;
	void *mirror[2];
	uint32_t ns[2];
	uint32_t group; /* of all that is asked for from now on */
	u_member_t members[U_MEMBERS];
	uint32_t member_count;
	struct {
		kvd_instance_t id;
		uint8_t *area;
	} areas[U_INSTANCES];
	u_notice_t notices[U_NOTICES];
	uint32_t notice_count;
	u_event_key_t *events;
	uint32_t event_count, event_cap;
	const char *events_bad; /* stored twice, removed while absent, or below an unknown parent */
	uint64_t last_parent;
	uint32_t last_has_parent;
	uint64_t stored, removed, stored_tokens;
	uint32_t ledger_records; /* in the ledger */
	uint64_t answers;        /* of pending resets and withdrawals */
	kv_status_t answer_status;
	uint32_t withdrawn; /* blocks, of the last answer to one */
	uint64_t digest_words, seals;
	kv_status_t staging_status;
	uint32_t resets_noted;
	const char *detail;
	kv_msg_t reply; /* to the last bad block, renewal or reset */
} universe_t;

typedef struct u_config {
	uint32_t cpu_slots;
	uint32_t gpu_slots;       /* 0: no memory of a GPU */
	fake_tier_t *gpu;         /* where universe_kill() leaves it, for the next one; NULL: it is empty then */
	uint64_t fail_adopt;      /* this allocation of its adoption fails; 0: none */
	uint32_t disk_slots;      /* 0: no disk tier */
	int disk_off;             /* there is one, and it comes later: kvd_core_take_in() */
	uint32_t disk_file_slots; /* 0: disk slots have no files */
	kvs_pool_config_t pool;   /* limit_bytes > 0: a real pool is the CPU tier */
	uint64_t max_blocks;      /* 0: 4096 */
	uint32_t max_spaces;      /* 0: 64 */
	kvd_policy_kind_t policy;
	int admission;                 /* 1: by second use while the pool thrashes */
	uint64_t share[2][KVD_SHARES]; /* of the namespaces; 0: no end */
	uint64_t max[2][KVD_SHARES];   /* likewise */
	uint64_t seed;                 /* 0: that of the run */
} u_config_t;

/* The first bytes of a block: those of another key or group are never the same. */
static inline uint64_t u_word(const kv_key_t *key, uint32_t group)
{
	return kv_key_hash(key) ^ group * UINT64_C(0x9e3779b97f4a7c15);
}
static inline int u_alone(uint32_t group)
{
	return group == 1 || group == 2;
}

/* The fake tier that has the slot, unless it is of `pool`; *p_local: as that tier counts. */
fake_tier_t *u_fake_of(universe_t *u, kv_slot_t slot, kv_slot_t *p_local);
/* First word of a slot in the CPU tier. */
uint64_t *u_bytes(universe_t *u, kv_slot_t slot);

/* A core with namespaces "a" and "b". The disk of an earlier universe can be kept: pass it in `disk`. */
void universe_init(universe_t *u, const u_config_t *config, const fake_tier_t *disk);
void universe_fini(universe_t *u);
/* The daemon dies: the core goes, the disk stays and is handed over. */
void universe_kill(universe_t *u, fake_tier_t *p_disk);

u_member_t *u_join(universe_t *u, uint32_t ns, const char *instance, uint32_t role, uint32_t rank);
/* The id of a member whose instance has ended with it becomes 0. */
void u_closed(universe_t *u, u_member_t *member);
void u_dead(universe_t *u, u_member_t *member);
void u_left(universe_t *u, u_member_t *member);
/* The space called `name` in namespace ns (heads 2, leaves 2). */
kvd_space_info_t u_space(universe_t *u, uint32_t ns, const char *name);
/* The same for a member, NULL: for nobody, in the member's namespace. `known`: only if it was opened before. */
kv_status_t u_open(universe_t *u, uint32_t ns, const u_member_t *m, const char *name, int known,
		   kvd_space_info_t *p_info);
/* SPACE_CLOSE. */
kv_status_t u_close(universe_t *u, u_member_t *m, const kvd_space_info_t *space);

/* keys[i] = child `label` of keys[i - 1]; the first one's parent is `parent` (NULL: root). */
void u_chain(const kv_key_t *parent, uint64_t label, kv_key_t *keys, uint32_t n);

kv_status_t u_request(universe_t *u, u_member_t *member, uint16_t code, const kv_msg_t *ask, kv_msg_t *reply);
kv_status_t u_acquire(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *keys, uint32_t n,
		      uint32_t skip, u_lease_t *lease, kv_msg_acquire_reply_t *reply);
kv_status_t u_release(universe_t *u, u_member_t *m, uint64_t lease);
/* keys[first .. n) below keys[first - 1]. */
kv_status_t u_put_start(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *keys,
			uint32_t first, uint32_t n, uint32_t flags, u_put_t *put, kv_msg_put_start_reply_t *reply);
/* The ranks' bytes: writes them into the slots. */
void u_put_write(universe_t *u, const u_put_t *put);
kv_status_t u_put_end(universe_t *u, u_member_t *m, const u_put_t *put, uint32_t first, uint32_t count);
kv_status_t u_put_revoke(universe_t *u, u_member_t *m, uint64_t put);
kv_status_t u_quiet(universe_t *u, u_member_t *m, uint32_t what, uint64_t id, uint32_t *p_freed);
/* start, write, end: all in one. Returns how many blocks are visible now. */
uint32_t u_put(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *keys, uint32_t first,
	       uint32_t n);
/* The same for a put that the pool may refuse. */
uint32_t u_put_optional(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *keys,
			uint32_t first, uint32_t n);
/* The private block of this key, in group u->group: 1 when it is visible now. */
uint32_t u_put_private(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *key);
/* *reply stays as it is unless the answer is OK. */
kv_status_t u_send(universe_t *u, u_member_t *m, const u_send_t *send, kv_msg_handover_send_reply_t *reply);
kv_status_t u_recv(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const char *transfer,
		   uint32_t timeout_ms, kv_msg_handover_recv_reply_t *reply);
kv_status_t u_done(universe_t *u, u_member_t *m, uint64_t number, uint32_t flags); /* KV_HANDOVER_* */
/* Tiers of each key, and why the first missing one is missing (EXPLAIN). */
uint32_t u_explain(universe_t *u, uint32_t ns, const kvd_space_info_t *space, const kv_key_t *keys, uint32_t n,
		   uint8_t *tiers);
/* How many leading keys are visible. */
uint32_t u_visible(universe_t *u, uint32_t ns, const kvd_space_info_t *space, const kv_key_t *keys, uint32_t n);

/* WITHDRAW of some keys of group u->group: the answer at once, or KV_PENDING. */
kv_status_t u_withdraw(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *keys, uint32_t n);

kv_status_t u_bad_block(universe_t *u, u_member_t *m, uint64_t lease, uint32_t index);
kv_status_t u_renew(universe_t *u, u_member_t *m, uint64_t lease);
/* SPACE_RESET; *space is as it was. */
kv_status_t u_reset(universe_t *u, u_member_t *m, const kvd_space_info_t *space);
/* This many of the coldest blocks, which must be there; all that can go. */
void u_evict(universe_t *u, kv_tier_t tier, uint32_t n);
void u_evict_all(universe_t *u, kv_tier_t tier);

void u_tick(universe_t *u, uint32_t times);
/* Ticks until nothing is in flight or queued. */
void u_settle(universe_t *u);
const u_notice_t *u_find_notice(const universe_t *u, uint16_t code, uint64_t id);
uint32_t u_count_notices(const universe_t *u, uint16_t code, uint64_t id);

/* Is the header still that of this lease, and ACTIVE? */
int u_lease_alive(const u_lease_t *lease);
kv_lease_header_t *u_header(const u_member_t *member, uint64_t offset);
/* Every ready block of a living lease has its own bytes. */
void u_lease_verify(universe_t *u, const u_lease_t *lease);

/* The core's own checks, and the events against the index. Fails the test with a sentence. */
void universe_check(universe_t *u);
/* Time passes until no hand-over is left: nobody may be there who takes one. */
void u_expire_handovers(universe_t *u);
/* Everybody leaves, and nothing is left behind: for the end of a test, before universe_fini(). */
void universe_leave(universe_t *u);
/* Bits in the mirror, of group u->group, found as a client finds them. */
uint8_t u_mirror_tiers(const universe_t *u, uint32_t ns, const kv_key_t *key);

/* STAGE_TEST(p1_what_it_defends, stage(64, 0)): a test between a `begin` and the stage_end() of its file. */
#define STAGE_TEST(name, begin) KV_TEST_BETWEEN(name, begin, stage_end())

#endif
