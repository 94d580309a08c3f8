/* scheduler/base/state.h -- the state of a kvx_scheduler_t.
 *
 * The scheduler half leases and reserves from its daemon and tells the ranks what to copy in a step message. Memory for
 * a load is reserved before the load is promised. A block is handed to the ranks only while it still is what was
 * reserved: every engine block counts its allocations.
 *
 * This header has no functions of a module: each module's header has its own, so a file sees the modules it calls and
 * no others.
 */
#ifndef KVX_SCHEDULER_STATE_H
#define KVX_SCHEDULER_STATE_H

#include "cost_model/cost_model.h"
#include "scheduler/base/list.h"
#include "scheduler/base/requests.h"
#include "step/message.h"

#include "kv/identity.h"
#include "kv/shm.h"

#define KVX_SPACES_MAX  512u /* open at a time: two engines have room in a daemon's default limits.spaces */
#define KVX_LOADS_MAX   1024u
#define KVX_PUTS_MAX    1024u
#define KVX_RUN_BLOCKS  8192u /* most blocks of one put */
#define KVX_MS          UINT64_C(1000000)
#define KVX_ADAPTER_MAX 1024u
#define KVX_SLICE_US    50u /* longest single wait: the heartbeat is checked this often */
#define KVX_UNNAMED     UINT64_MAX
#define KVX_TIMED_STEPS 16u /* steps whose time may still be reported */
#define KVX_SYNC_HITS   64u /* synchronous hits of one step that are told apart */

/* A space in memory of a GPU. */
typedef struct kvx_smem_space {
	kvc_space_t *space; /* NULL: not requested, or refused */
	int wanted;         /* a hand-over has named the GPU, another engine's */
	int named;          /* it was open once: leases, puts and hand-overs may name it */
	int open;
	uint64_t retry_ns;
} kvx_smem_space_t;

/* The space of the base model or of an adapter, of weights of one name. Its number may become another one's when
 * nothing uses it. */
typedef struct kvx_sspace {
	char *weights;      /* NULL: not known yet */
	char *adapter;      /* NULL: the base model's */
	uint64_t hash;      /* of both */
	uint64_t used;      /* of all uses, the number of the last one */
	kvc_space_t *space; /* NULL: not requested, or refused */
	int open;           /* it was open once */
	int emitted;        /* the ranks know what its number stands for */
	uint32_t closes;    /* its hand-overs of before have ended with the handle */
	uint32_t suspects;  /* runs of its blocks that must be taken back */
	uint64_t retry_ns;
	kvx_smem_space_t mems[KVX_MEMS]; /* that of KVX_HOST_MEM is not used */
} kvx_sspace_t;

typedef struct kvx_sload_part {
	kvc_lease_t *lease;       /* NULL: none, or released */
	uint32_t mem;             /* of a group, what is in a GPU comes first */
	uint32_t index, first, n; /* index: of the group, among ours */
	uint32_t *ids;            /* [n] */
} kvx_sload_part_t;

/* A load. Before the engine admits its request it is cached: only its leases exist (scheduler/lease_cache.c). An open
 * load is of a hand-over: it has no leases yet, and shrinks by each piece that is split off. */
typedef struct kvx_sload {
	struct kvx_sload *next, **link;         /* of all; NULL: the leases were given back */
	struct kvx_sload *own_next, **own_link; /* of the request's; NULL: cached */
	kvx_request_t *request;
	uint64_t number; /* 0: cached */
	uint64_t asked_ns, renewed_ns;
	uint64_t ns;      /* the longest that a rank has reported */
	uint64_t sync_ns; /* expected time, if it is synchronous; else 0 */
	size_t bytes;     /* reserved for its record; 0: it was sent */
	uint32_t space, flags, parts, blocks;
	uint32_t timeout_ms; /* of each rank */
	uint32_t ranks_left; /* that have not reported */
	uint32_t gpu_tokens, cpu_tokens, disk_tokens;
	uint32_t step;
	uint32_t local, units;         /* cached: tokens the engine had, units requested, */
	uint32_t gpu_units;            /* and of these from the space in GPU memory */
	uint64_t generation, until_ns; /* cached: of the daemon, 0: the leases were given back; end of the wait */
	uint64_t used_ns;              /* cached: last use */
	int sent;                      /* in a step message */
	int failed, timed_out;         /* a rank loaded less; because of its deadline */
	int dropped;                   /* the ranks were told that the request has ended */
	int blocks_lost;               /* the request has lost the blocks before the ranks reported */
	int open;                      /* its blocks are still to be handed over */
	int awaits_rest;               /* it was: what its lease in memory of a GPU lacks is loaded from host memory */
	uint32_t partial;              /* tokens of its last block, a private one; 0: all are whole */
	kvx_sload_part_t part[KVX_MAX_GROUPS];
} kvx_sload_t;

/* A side of a hand-over in one mem (scheduler/handover.c). */
typedef struct kvx_shandover {
	struct kvx_shandover *next, **link; /* of all */
	kvx_request_t *request;
	kvc_handover_t *handover; /* NULL: not begun, or ended with its space */
	uint32_t closes;          /* of the space when it was begun */
	uint32_t space, mem;
	int sends;           /* 1: the producer's side */
	int begun;           /* the daemon was asked, */
	int heard;           /* and has answered that there is such a hand-over: the producer's */
	int satisfied;       /* the consumer has what it wants */
	int aborted;         /* before it was computed */
	int asking;          /* a chunk is not answered yet */
	uint32_t units;      /* to hand over, or to load; of whole blocks */
	int sent_in_gpu_mem; /* the producer's: all of it was handed over in memory of a GPU */
	uint32_t passed;     /* of them handed over, or given to the ranks */
	uint32_t reserved;   /* the producer's: of them stored, or being saved */
	uint32_t announced;  /* of them: the daemon hands them over as they become visible */
	int last_announced;  /* and nothing follows */
	int plain;           /* nothing is announced: of several groups, or the daemon took it not */
	uint32_t timeout_ms; /* 0: the producer's: the daemon's; the consumer's: it has not begun */
	uint64_t until_ns;   /* the consumer's: the end of the wait; 0: it has not begun */
	uint32_t tries;      /* chunks in a row that found no room */
	uint64_t retry_ns;   /* the next chunk is not sent before */
	uint32_t keys_known; /* of the first units */
	uint32_t partial;    /* tokens after the units, in a private block; 0: none */
	int key_known;       /* that of the private block */
	int partial_put;     /* the private block was saved, or was to be */
	uint32_t *tokens;    /* [partial] */
	char transfer[KVC_MAX_TRANSFER + 1];
	char peer[KVC_MAX_PEER + 1];         /* the consumer's: node of the producer; "": this one */
	_Alignas(uint32_t) kvc_key_t keys[]; /* [units + 1]: the last is the private block's; then the tokens */
} kvx_shandover_t;

/* Resting: its request has ended, and the daemon was busy. It is asked for again, as long as its blocks are there. */
typedef enum kvx_sput_step { KVX_SPUT_RESTING, KVX_SPUT_ASKED, KVX_SPUT_GRANTED, KVX_SPUT_SENT } kvx_sput_step_t;

typedef struct kvx_sput {
	struct kvx_sput *next, **link;         /* of all */
	struct kvx_sput *own_next, **own_link; /* of the request's */
	kvx_request_t *request;
	kvc_put_t *put; /* NULL: it rests */
	kvx_sput_step_t at;
	uint64_t asked_ns;
	uint32_t rests;              /* times that it rested */
	uint64_t handle;             /* id; 0: not granted yet */
	uint32_t space, mem, index;  /* index: of the group; mem: KVX_HOST_MEM or KVX_OWN_MEM */
	uint32_t from, n, granted;   /* blocks [from, from + n) of the request */
	uint32_t step;               /* the step that computes them */
	uint32_t emitted;            /* the step whose message names them */
	uint64_t step_done_ns;       /* that step was seen to have ended; 0: not yet */
	int awaited;                 /* the message of that step has waited for the answer */
	int once;                    /* it is not tried again: the hand-over goes on without it */
	int urgent;                  /* a hand-over waits for it */
	int is_private;              /* its one block is a private one */
	uint32_t parents;            /* 1: keys[-1] and events[-1] are of the block before, where blocks have one */
	kvc_key_t *keys;             /* [n], behind the entries */
	uint64_t *events;            /* [n] names in events, behind the keys, if they are the engine's */
	kvx_table_entry_t entries[]; /* [n] */
} kvx_sput_t;

/* Where a put has stored blocks of this engine: a block of a full group stands for those after it as well. */
typedef struct kvx_stored_at {
	kvc_key_t key;
	uint16_t space;
	uint8_t mem, group; /* group: its id */
} kvx_stored_at_t;

/* Oldest first. The first `withdrawn` are of another name than the present one, and to be taken back. */
typedef struct kvx_stored_list {
	kvx_stored_at_t *at;
	uint32_t n, cap, withdrawn;
	int full; /* the weights must be proved before more is stored */
} kvx_stored_list_t;

/* A GPU whose memory may have blocks: the engine's own, or another one that the daemon or a hand-over has named. */
typedef struct kvx_smem {
	_Atomic(char *) device; /* UUID; NULL: none */
	int offered;            /* the daemon has memory there */
	int emitted;            /* the ranks know it */
	uint32_t ranks;         /* another engine's: that have said that they can load from there */
	uint64_t off_ns;        /* a rank could not use it: not before */
	uint64_t pause_ns;      /* the last pause; 0: a load from there has ended well since */
} kvx_smem_t;

/* A step that the ranks were asked to time. */
typedef struct kvx_timed_step {
	uint32_t step;
	int asked, prefill, loads;
	int single_request; /* one request computes all of it */
	kvx_step_work_t work;
} kvx_timed_step_t;

/* An engine block, and the generation of its bytes: odd where they are garbage, which are those of weights from before
 * a reset, those that a failed synchronous load has left, and what was computed after such a block.
 *
 *   allocated        + 2, from an odd one + 3; and 1, if it is computed after garbage
 *   becomes garbage  + 1, if it is even
 *   computed again   + 1, also in the table entry of the request that has done it
 *
 * A table entry keeps the generation of when the block was entered, and nothing else is needed to save no garbage:
 *   - A block is saved only while its entry is current, so it was neither reallocated nor made garbage since. One that
 *     was reallocated in the very step of the message has + 2 or + 3; garbage in between would make that + 4 or + 5
 *     (is_intact()).
 *   - What is computed after garbage is garbage. A request that enters an odd generation is not saved, and blocks that
 *     it is given from then on are odd. One that had entered the block before is found when the block becomes garbage,
 *     in that same call (kvx_loads_invalidate()), and its blocks after that one become odd. What a request without a
 *     load of its own has computed and lost before that call is not found: an engine forgets it (decision 019).
 *   - The request that computes a block again makes its own entry current again, and those of others never. */
typedef struct kvx_block {
	uint32_t gen;
	uint32_t step; /* in which it was allocated last */
	/* Number of the synchronous load that fills it, or a block before it, if the request has lost the block before
	 * the ranks reported; KVX_UNNAMED: that load has failed, and the engine was not told. 0: none. */
	uint64_t unverified_by;
} kvx_block_t;

/* Synchronous hits of one step: the first block of each that is loaded. */
typedef struct kvx_sync_hits {
	uint32_t step;
	uint32_t n; /* more than KVX_SYNC_HITS: of any others nothing is known */
	struct {
		kvc_key_t key;
		uint32_t space, unit;
	} hit[KVX_SYNC_HITS];
} kvx_sync_hits_t;

struct kvx_scheduler {
	const kv_env_t *env;
	kvc_t *kvc;
	kvx_requests_t requests;
	kvx_cost_model_t cost_model;
	kvx_scheduler_stats_t stats;
	uint64_t other_space_log_ns; /* not before: a hand-over whose sides have other weights is logged */

	uint32_t unit; /* tokens */
	uint32_t group_count;
	kv_group_t groups[KVX_MAX_GROUPS];
	kvc_writer_t *writers; /* [group_count][writer_count] */
	uint32_t writer_count, max_blocks;
	int foreign, use_cost_model, defer_shared;
	kvx_load_mode_t mode;
	kvx_sync_hits_t sync_hits;
	uint32_t wait_us, load_ms, min_tokens;
	int saves_all;    /* the daemon may refuse none */
	int keeps_blocks; /* of requests that have ended, until they are allocated again */
	int wait_asked;   /* wait_us is the caller's, however short the step */
	char *text;       /* storage of the strings of `identity` */
	kvc_identity_t identity;
	_Atomic(char *) next_weights; /* given and not adopted yet; NULL: none */
	_Atomic int named;            /* the weights have a name, or are given one */
	char *weights;                /* the last name adopted; NULL: none yet */
	int adopted;                  /* and it is still theirs */
	uint32_t base;                /* number of the base model's space of that name; UINT32_MAX: none */
	int may_change;               /* it was opened without a name: what is stored may have to be withdrawn */
	kvx_stored_list_t stored;     /* since the name was proved */
	kvc_withdrawal_t *withdrawal; /* asked of the daemon; NULL: none */
	uint32_t withdrawing;         /* the first ones of `stored`, that it names */
	uint64_t withdraw_ns;         /* the next one is not asked for before */
	uint64_t token_bytes;         /* of all groups, about */
	kvx_smem_t mems[KVX_MEMS];
	uint32_t device_count; /* of the daemon's, that have got a mem or are left out */

	uint64_t incarnation, generation; /* generation: counts daemons and resets */
	kvx_sspace_t *spaces;             /* [KVX_SPACES_MAX] */
	uint32_t space_count;
	uint64_t space_uses;
	uint32_t nameless; /* number of the space for hand-overs of weights without a name; UINT32_MAX: none yet */

	kvx_sload_t *loads, **loads_end;
	kvx_sput_t *puts, **puts_end;
	uint32_t load_count, put_count;
	uint32_t admitted;    /* loads that are not cached, */
	uint64_t admitted_ns; /* and the expected time of the synchronous ones among them */
	uint64_t load_number;
	kvx_shandover_t *handovers, **handovers_end;

	kvc_key_t *keys; /* [KVX_RUN_BLOCKS] that are taken back in one call */

	kvx_block_t *blocks; /* [max_blocks] */
	uint32_t unnamed;    /* blocks with KVX_UNNAMED */
	uint32_t *fence;     /* [max_blocks]: allocated in this step */
	uint32_t fence_count;
	kvx_msg_buf_t message;
	size_t reserved_bytes; /* that messages will need for loads not sent yet, and for a FENCE of all blocks */
	int slow;              /* the daemon did not answer in time lately: messages do not wait for reservations */
	uint32_t step;         /* number of the message being built */

	kvx_step_work_t work; /* of the step being planned */
	uint32_t longest;     /* most tokens of one request in it */
	uint32_t sync_loads;
	uint32_t untimed; /* steps since one was timed */
	kvx_timed_step_t timed[KVX_TIMED_STEPS];
	uint64_t step_ns;  /* mean of recent steps without loads */
	uint64_t light_ns; /* mean of those that compute single tokens */
	uint64_t next_log_ns, next_attach_ns;
	int lease_late; /* the last lease a lookup has waited for was not granted in time */
};

static inline kvc_space_t *kvx_space_in(const kvx_scheduler_t *scheduler, uint32_t number, uint32_t mem)
{
	const kvx_sspace_t *space = &scheduler->spaces[number];

	return mem == KVX_HOST_MEM ? space->space : space->mems[mem].space;
}

/* Memory for `more` bytes of this message in addition to what is reserved for loads, so that adding them cannot fail.
 * 0: there is none. */
static inline int kvx_message_reserve(kvx_scheduler_t *scheduler, size_t more)
{
	return kvx_msg_reserve(&scheduler->message, scheduler->reserved_bytes + more);
}

/* The block still has the bytes it had when it was entered. */
static inline int kvx_entry_is_current(const kvx_scheduler_t *scheduler, const kvx_table_entry_t *entry)
{
	return entry->id != KVX_NO_BLOCK && scheduler->blocks[entry->id].gen == entry->gen;
}

/* It has become garbage since. */
static inline int kvx_entry_is_garbage(const kvx_scheduler_t *scheduler, const kvx_table_entry_t *entry)
{
	const uint32_t gen = entry->id == KVX_NO_BLOCK ? 0 : scheduler->blocks[entry->id].gen;

	return (gen & 1u) && gen == entry->gen + 1u;
}

#endif
