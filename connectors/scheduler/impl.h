/* scheduler/impl.h -- what the files of the scheduling half share. */
#ifndef KVX_SCHEDULER_IMPL_H
#define KVX_SCHEDULER_IMPL_H

#include "common/await.h"
#include "cost_model/cost_model.h"
#include "step/message.h"
#include "scheduler/requests.h"

#include "kv/identity.h"
#include "kv/shm.h"

#define KVX_SPACES_MAX  1024u
#define KVX_LOADS_MAX   1024u
#define KVX_PUTS_MAX    1024u
#define KVX_RUN_BLOCKS  8192u /* most blocks of one put */
#define KVX_MS          UINT64_C(1000000)
#define KVX_ADAPTER_MAX 1024u
#define KVX_SPOILT      UINT64_MAX
#define KVX_TIMED       16u /* steps of which the time may still be reported */

/* ---- spaces: one for each adapter
 * -------------------------------------------------------------------------------------------- */

typedef struct kvx_sspace {
	char *adapter; /* NULL: the base model's */
	uint32_t adapter_len;
	uint64_t hash;
	kvc_space_t *space; /* NULL: not asked for, or refused */
	int open;           /* it was open once */
	int told;           /* the ranks know its number */
	uint64_t retry_ns;
} kvx_sspace_t;

/* ---- loads
 * -------------------------------------------------------------------------------------------------------------------
 */

typedef struct kvx_sload_part {
	kvc_lease_t *lease; /* NULL: none, or given back */
	uint32_t group, first, n;
	uint32_t *ids; /* [n] */
} kvx_sload_part_t;

typedef struct kvx_sload {
	struct kvx_sload *next;
	uint64_t number;
	uint64_t serial; /* of the request */
	uint64_t asked_ns, renewed_ns;
	uint64_t ns;        /* longest of the ranks so far */
	uint64_t inside_ns; /* as expected, where it is inside a step; else 0 */
	size_t bytes;       /* of its record at most: promised */
	uint32_t space, flags, parts, blocks;
	uint32_t left; /* ranks that have not reported */
	uint32_t cpu_tokens, disk_tokens;
	uint32_t step;
	uint32_t local, units;       /* held: tokens the engine had, units asked for */
	uint64_t era, until_ns;      /* held: of which daemon; its answer is waited for until then */
	uint64_t used_ns;            /* held: asked for last */
	int sent, failed, timed_out; /* in a plan; a rank brought less; ... in time */
	int gone, drop;              /* the request has ended; the ranks are to hear of it */
	int lost, doubted; /* the request has lost the blocks; those that are nobody else's since carry its number */
	uint32_t id_len;
	char *id;
	kvx_sload_part_t part[KVX_MAX_GROUPS];
} kvx_sload_t;

/* ---- saves
 * -------------------------------------------------------------------------------------------------------------------
 */

typedef enum kvx_sput_step { KVX_SPUT_ASKED, KVX_SPUT_GRANTED, KVX_SPUT_SENT } kvx_sput_step_t;

typedef struct kvx_sput {
	struct kvx_sput *next;
	kvc_put_t *put;
	kvx_sput_step_t at;
	uint64_t serial, asked_ns;
	uint64_t handle;              /* id; 0: not granted yet */
	uint32_t space, group, index; /* group: its number, and its place among ours */
	uint32_t from, n, granted;    /* blocks [from, from + n) of the request */
	uint32_t step;                /* the plan that computes them */
	uint32_t told;                /* the plan that names them to the ranks */
	uint64_t over_ns;             /* that step was seen to be over; 0: not yet */
	int awaited;                  /* that plan has waited for the answer */
	uint32_t cap, id_len;
	kvx_place_t *places; /* [n] */
	char id[KVX_MAX_ID];
} kvx_sput_t;

/* ---- steps
 * -------------------------------------------------------------------------------------------------------------------
 */

/* One that the ranks were asked to time. */
typedef struct kvx_timed {
	uint32_t step;
	int asked, prefill, loads;
	int alone; /* one request computes all of it */
	kvx_guard_work_t work;
} kvx_timed_t;

/* ---- the scheduling half
 * ------------------------------------------------------------------------------------------------------ */

/* How often an engine block has been allocated, and when last: in which step, after how many resets. */
typedef struct kvx_block {
	uint32_t gen, step, resets;
	int bad; /* a load within a step has failed to fill it, or one before it, and it has not been computed since */
	/* Number of the load within a step that this, or what this was computed after, was to come from, when its
	 * request lost it before the ranks had reported; KVX_SPOILT: it has failed. 0: none. */
	uint64_t doubt;
} kvx_block_t;

struct kvx_scheduler {
	const kv_env_t *env;
	kvc_t *kvc;
	kvx_requests_t requests;
	kvx_guard_t guard;
	kvx_scheduler_stats_t stats;

	uint32_t unit; /* tokens */
	uint32_t group_count;
	kv_group_t groups[KVX_MAX_GROUPS];
	kvc_writer_t *writers;
	uint32_t writer_count, max_blocks;
	int foreign, guarded;
	kvx_load_mode_t mode;
	uint32_t wait_us, load_ms, min_tokens;
	int wait_asked; /* wait_us is the caller's: whatever the step is worth */
	char *text;     /* storage of the strings of `identity` */
	kvc_identity_t identity;
	_Atomic(char *) weights; /* that came after the start; NULL: none yet */
	uint64_t token_bytes;    /* of all groups, about */

	uint64_t incarnation, era; /* era: counts daemons and resets */
	uint32_t resets;
	kvx_sspace_t *spaces; /* [KVX_SPACES_MAX] */
	uint32_t space_count, spaces_untold;

	kvx_sload_t *loads, **loads_end;
	kvx_sload_t *holds; /* leased for requests that may be admitted any moment */
	uint32_t hold_count;
	kvx_sput_t *puts, **puts_end, *free_puts;
	uint32_t load_count, put_count;
	uint64_t load_number;
	uint32_t drop_count; /* loads with `drop` */

	kvc_key_t *keys;  /* [KVX_RUN_BLOCKS + 1]: of one put */
	uint64_t *events; /* the same */

	kvx_block_t *blocks; /* [max_blocks] */
	uint32_t spoilt;     /* the engine has not been told of so many of them */
	uint32_t *fence;     /* [max_blocks]: allocated in this step */
	uint32_t fence_count;
	kvx_bytes_t plan;
	size_t promised; /* bytes the plan will need for what is already certain */
	size_t offered;  /* and for hits that may be loaded yet: of all requests */
	int building;    /* the plan has been started */
	int slow;        /* the daemon did not answer in time lately: plans do not wait for reservations */
	uint32_t step;   /* number of the plan being made */

	kvx_guard_work_t work; /* of the step being planned; */
	uint32_t longest;      /* most tokens of one request in it; */
	uint32_t sync_loads;   /* loads inside it */
	uint32_t untimed;      /* steps since one was timed */
	kvx_timed_t timed[KVX_TIMED];
	uint64_t step_ns;  /* a recent step that loads nothing, smoothed; */
	uint64_t light_ns; /* one of single tokens */
	uint64_t next_log_ns, next_attach_ns;
	int lease_late; /* the last lease a lookup waited for did not come in time */
};

/* The keys of one request, made when looked at. */
typedef struct kvx_key_view {
	kvx_scheduler_t *scheduler;
	const kvc_space_t *space;
	const kvx_hashes_t *hashes;
	const kvx_request_t *request;
	uint32_t n; /* units that have one */
	int bad;    /* one that should be there was not */
	kvc_key_source_t source;
} kvx_key_view_t;

/* scheduler/config.c */
kvc_status_t kvx_scheduler_refuse(const char *why);
kvc_status_t kvx_scheduler_take(kvx_scheduler_t *scheduler, const kvx_scheduler_config_t *config);
/* Index of a group among ours; UINT32_MAX: no such one. */
uint32_t kvx_scheduler_group(const kvx_scheduler_t *scheduler, uint32_t number);

/* scheduler/message_buffer.c */
/* Start this step's plan, once. */
void kvx_plan_begin(kvx_scheduler_t *scheduler);
/* Room for so many bytes beside what is certain. 0: there is none. */
int kvx_plan_room(kvx_scheduler_t *scheduler, size_t more);
/* So many bytes are kept for the request's load, whichever plan that comes in; 0: none any more. */
void kvx_plan_offer(kvx_scheduler_t *scheduler, kvx_request_t *request, size_t bytes);
/* Bytes of a FENCE of all blocks; of the LOAD record of that many units at most. */
size_t kvx_fence_bytes(uint32_t max_blocks);
size_t kvx_load_bytes(const kvx_scheduler_t *scheduler, uint32_t units);

/* scheduler.c */
kvc_status_t kvx_scheduler_open_in(const kv_env_t *env, const kvx_scheduler_config_t *config,
				   kvx_scheduler_t **p_scheduler);
/* Detach for good when an invariant is broken. */
void kvx_scheduler_check(kvx_scheduler_t *scheduler);
static inline int kvx_ask_is_sound(const kvx_ask_t *ask)
{
	return ask && ask->struct_size >= sizeof *ask && ask->id && ask->id_len > 0 && ask->id_len <= KVX_MAX_ID;
}

/* scheduler/spaces.c */
/* Number of the ask's space, UINT32_MAX: refused. Opens it when it is new. */
uint32_t kvx_space_of(kvx_scheduler_t *scheduler, const kvx_ask_t *ask);
/* KV_WHY_NONE: open and the daemon alive. */
uint32_t kvx_space_why(const kvx_scheduler_t *scheduler, uint32_t number);
/* The daemon answers, as far as its heartbeat says. */
int kvx_is_alive(const kvx_scheduler_t *scheduler);
/* Wait a moment for the daemon, in a call that began at `since` and may take until `until`. 0: that is over, or the
 * daemon is not worth waiting for. Either way what has come meanwhile has been heard: look once more. */
int kvx_await(kvx_scheduler_t *scheduler, uint64_t since, uint64_t until);
/* Attach and open what is not. */
void kvx_spaces_keep(kvx_scheduler_t *scheduler, uint64_t now);
void kvx_spaces_tell(kvx_scheduler_t *scheduler);
/* What names the weights; NULL: nothing yet. */
const char *kvx_weights(const kvx_scheduler_t *scheduler);
void kvx_spaces_close(kvx_scheduler_t *scheduler);

/* scheduler/keys.c */
/* Keys of the first `tokens` tokens. */
void kvx_keys_view(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request, uint32_t number,
		   uint32_t tokens, kvx_key_view_t *view);

/* scheduler/lease_cache.c */
/* Lease tokens [ask->local, end) for the request, which may be admitted next; how many from the start are leased,
 * ask->local: none. *p_status: why not all (PENDING: no answer in time). */
uint32_t kvx_hold(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t end,
		  kvc_status_t *p_status);
/* What is held for the request, cut to units [local, units), without leases when they are lost; NULL: nothing that
 * covers them. It is the caller's. */
kvx_sload_t *kvx_hold_take(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t units);
/* The same where there is nothing that covers them, without leases; NULL: no memory. */
kvx_sload_t *kvx_hold_lost(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request,
			   uint32_t units);
void kvx_hold_drop(kvx_scheduler_t *scheduler, kvx_request_t *request);
/* Renew; give back what nobody has asked for in a while. */
void kvx_holds_keep(kvx_scheduler_t *scheduler, uint64_t now);
void kvx_holds_close(kvx_scheduler_t *scheduler);
/* Which blocks of each group are to come: the parts of `load`. Returns how many blocks. */
uint32_t kvx_load_ranges(const kvx_scheduler_t *scheduler, const kvc_space_t *space, const kvx_ask_t *ask,
			 uint32_t units, kvx_sload_t *load);
void kvx_load_renew(const kvx_scheduler_t *scheduler, kvx_sload_t *load, uint64_t now);
/* Leases of a list of loads. */
uint64_t kvx_leases_of(const kvx_sload_t *load);
/* Its leases are given back, its memory too. */
void kvx_load_free(kvx_scheduler_t *scheduler, kvx_sload_t *load);

/* scheduler/load.c */
void kvx_loads_tell(kvx_scheduler_t *scheduler, uint64_t now);
void kvx_loads_keep(kvx_scheduler_t *scheduler, uint64_t now);
void kvx_loads_close(kvx_scheduler_t *scheduler);
void kvx_load_reported(kvx_scheduler_t *scheduler, const kvx_report_loaded_t *report);
/* The request loses its blocks: those that hang on a load within a step are remembered until the ranks have said how it
 * went. */
void kvx_loads_doubt(kvx_scheduler_t *scheduler, const kvx_request_t *request);
/* The request is gone: end its asynchronous loads early. */
void kvx_loads_drop(kvx_scheduler_t *scheduler, const kvx_request_t *request);

/* scheduler/save.c */
/* Answers that have come; 1: one of this step's has not. */
int kvx_puts_look(kvx_scheduler_t *scheduler, uint64_t now);
void kvx_puts_tell(kvx_scheduler_t *scheduler);
/* 1: one is granted and not handed out, or an answer is due any moment. */
int kvx_puts_wait(const kvx_scheduler_t *scheduler, uint64_t now);
void kvx_put_dropped(kvx_scheduler_t *scheduler, uint64_t handle);
/* What the request, which may be gone, has reserved since that plan is given back: it may be garbage. */
void kvx_puts_revoke(kvx_scheduler_t *scheduler, uint64_t serial, uint32_t since);
void kvx_puts_revoke_all(kvx_scheduler_t *scheduler);
void kvx_puts_close(kvx_scheduler_t *scheduler);
/* The plan of this step waits for the answers to what the step has asked for. */
void kvx_puts_await(kvx_scheduler_t *scheduler);
/* What is next to be saved, in tokens. */
void kvx_request_next(const kvx_scheduler_t *scheduler, kvx_request_t *request);
/* See again what of it is stored before more of it is saved. */
void kvx_request_restart(kvx_request_t *request);

/* scheduler/step_time.c */
/* In this step a request computes `tokens` tokens and has `computed` then. */
void kvx_time_advance(kvx_scheduler_t *scheduler, uint32_t computed, uint32_t tokens);
/* How long this step's plan may wait for answers. */
uint64_t kvx_time_wait_ns(kvx_scheduler_t *scheduler);
/* Ask for the step's time, if it is worth it; the next step begins. */
void kvx_time_tell(kvx_scheduler_t *scheduler);
void kvx_time_reported(kvx_scheduler_t *scheduler, const kvx_report_step_t *report);

#endif
