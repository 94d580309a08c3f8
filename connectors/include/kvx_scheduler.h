/* kvx_scheduler.h -- the scheduler half of a connector: what of a prompt is stored, which blocks to load, which to
 * save.
 *
 * An engine with a scheduler and one or more ranks (vLLM, SGLang) has one kvx_scheduler_t next to its scheduler and one
 * kvx_worker_t (kvx_worker.h) in each rank. All are members of one instance. The scheduler half looks up, leases and
 * reserves. What the ranks must do in a step travels to them as one opaque string of bytes, the step message, and what
 * became of it travels back as another, the report:
 *
 *   new request   match -> hit               shared memory; a hit is leased once, and stays leased while it waits
 *   admitted      append_blocks, start_load  the engine has allocated blocks: the leased tokens are loaded into them
 *   each step     append_blocks, advance     tables grow; blocks that are full after this step are reserved
 *   end of step   build_message -> bytes     to every rank, then kvx_worker_begin_step() there
 *   after it      take_report <- bytes       from every rank that has something to report
 *   gone          finish                     the request has ended: what is in progress is completed and freed
 *
 * Promise to the engine: no failure needs handling, no call waits longer than wait_us (a match: than it is worth), and
 * without a live daemon every call costs microseconds. A lost answer, a full store or an absent daemon is a miss, or a
 * block that is not saved, and a counter.
 *
 * Keys. With `foreign` set the engine's own block hashes are used: kvx_hashes_t returns them one by one, and a lookup
 * reads only those it needs. Otherwise kvd's own chain is kept for each request and fed by kvx_scheduler_add_tokens().
 *
 * Cost model. The ranks time loads, and steps that compute prompts. The expected time of loading a hit, from memory and
 * from disk, is compared with the time of computing it (docs/decisions/015). A part that does not pay is left out of
 * the answer of match(): the tail on disk, or all of it. A small sample is loaded now and then.
 *
 * Hand-overs. A request that another instance will go on with is handed over block by block as it is saved
 * (kvx_scheduler_send()); there, match() promises its tokens before they are computed, and the ranks load them as they
 * come (kvx_scheduler_receive()). What does not come in time has failed to load, and is computed.
 *
 * Units. A unit is identity.hash_tokens tokens; a group's block is a whole number of units. Group numbers are those of
 * identity.groups. Block ids are the engine's, below max_blocks, unique over all groups; KVX_NO_BLOCK where a group has
 * no block.
 *
 * Threads. One kvx_scheduler_t belongs to one thread at a time. struct_size: as in kvc.h, also in results. */
#ifndef KVX_SCHEDULER_H
#define KVX_SCHEDULER_H

#include "kvc.h"
#include "kvk/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvx_scheduler kvx_scheduler_t;

#define KVX_NO_BLOCK       UINT32_MAX
#define KVX_SCHEDULER_RANK 65535u /* rank of the scheduling member: no worker has it */
#define KVX_MAX_GROUPS     16u
#define KVX_WAIT_US        500u  /* default of wait_us */
#define KVX_STEP_LOAD_MS   2000u /* default of load_ms */

/* Which loads are synchronous: their step waits for them. */
typedef enum kvx_load_mode { KVX_LOAD_AUTO = 0, KVX_LOAD_SYNC = 1, KVX_LOAD_ASYNC = 2 } kvx_load_mode_t;

typedef struct kvx_scheduler_config {
	size_t struct_size;
	const char *socket;   /* NULL: $KVD_SOCKET, else /run/kvd/default.sock */
	const char *instance; /* shared with the workers */
	const uint8_t *secret;
	uint32_t secret_len;
	const char *program;
	const kvc_identity_t *identity; /* all fields set, groups and layout included; `lora` is that of requests
					 * without an adapter; `weights` NULL: kvx_scheduler_set_weights() */
	/* Of each of the identity's groups, in their order: the layout of its blocks in the pool, and which rank fills
	 * which heads and layers of them: writers[groups][writer_count]. */
	const kvk_layout_t *layouts;
	const kvc_writer_t *writers;
	uint32_t writer_count; /* of a group */
	uint32_t max_blocks;
	int foreign;    /* 1: keys are bound from the engine's hashes */
	int cost_model; /* 1: load only what pays */
	int mode;       /* kvx_load_mode_t */
	/* kvx_scheduler_build_message() waits at most this long for answers, and not at all for decoding requests; a
	 * match waits at least this long. 0: KVX_WAIT_US, and for a message at most a 128th of the expected time of the
	 * step. */
	uint32_t wait_us;
	uint32_t load_ms;    /* deadline of a load on a rank; 0: KVX_STEP_LOAD_MS */
	uint32_t min_tokens; /* shorter hits are not loaded; 0: one unit */
	/* 1: the engine caches the blocks of a synchronous load when it allocates them, and a request of the same step
	 * that finds them there is not computed again when the load fails. A match defers it to the next step. */
	int defer_shared;
	/* 1: the daemon may refuse no save (kvc_put_options_t.optional). 0: while its pool thrashes it may, those of
	 * requests that are handed over excepted. */
	int saves_all;
	/* 1: after the end of a request the engine writes none of its blocks before it has named them in a
	 * kvx_block_table_t again. Then what the daemon refused, or has not answered by the end, is asked for during
	 * another second. 0: nothing is. */
	int keeps_blocks;
} kvx_scheduler_config_t;

/* Never waits for the daemon, which may come later. KVC_ERR_ARG: the configuration contradicts itself
 * (kvx_scheduler_last_error()). KVC_ERR_NOMEM. */
KVC_API kvc_status_t kvx_scheduler_open(const kvx_scheduler_config_t *config, kvx_scheduler_t **p_scheduler);
/* Detach; the daemon releases what was leased or reserved. NULL is fine. */
KVC_API void kvx_scheduler_close(kvx_scheduler_t *scheduler);
/* Why the last kvx_scheduler_open() on this thread failed; never NULL. */
KVC_API const char *kvx_scheduler_last_error(void);
/* Name the weights, of a scheduler opened without a name, or after kvx_scheduler_suspend(): `text` is copied, and the
 * ranks learn it with the next message. Until then every lookup is a miss and nothing is saved. If it is another name
 * than the last one, the daemon is asked to take back what was stored since that was given. Any thread may call it.
 * KVC_ERR_ARG: the weights have a name, or the text is empty or longer than KVX_WEIGHTS_MAX. KVC_ERR_NOMEM. */
#define KVX_WEIGHTS_MAX 1000u
KVC_API kvc_status_t kvx_scheduler_set_weights(kvx_scheduler_t *scheduler, const char *text);
/* The weights may have been changed, so their name is no longer proved. Saves and hand-overs in progress are given up,
 * and what the engine's blocks hold now is never saved. Blocks of others stay as they are. */
KVC_API void kvx_scheduler_suspend(kvx_scheduler_t *scheduler);
/* 1: nothing is saved any longer, because too much would have to be taken back if the weights had changed: suspend, and
 * name them again. */
KVC_API int kvx_scheduler_needs_proof(const kvx_scheduler_t *scheduler);
/* Use memory that the daemon has on a GPU: the one in which rank 0 has its cache, by its UUID ("GPU-...") or the name
 * of a fake device, up to KVX_DEVICE_MAX bytes; copied. Hits found there are loaded from there, and what is used a
 * second time is saved there (docs/decisions/057). A prefix that is longer in memory of another GPU of the daemon's is
 * loaded from that, when all ranks can (docs/decisions/062). Without such memory nothing changes: it is asked for every
 * 2 s. `foreign` only: own chains have keys of one space (KVC_ERR_UNSUPPORTED). Once, at any time, by any thread.
 * KVC_ERR_ARG: it is set already, empty or too long. KVC_ERR_NOMEM. */
#define KVX_DEVICE_MAX KVC_MAX_DEVICE
KVC_API kvc_status_t kvx_scheduler_set_device(kvx_scheduler_t *scheduler, const char *uuid);
/* 1: attached and the space is open. */
KVC_API int kvx_scheduler_is_ready(const kvx_scheduler_t *scheduler);

/* The engine's hash of unit i (the whole prefix up to and with it): *p_len bytes, valid until the next call. NULL:
 * there is none. */
typedef struct kvx_hashes {
	const void *(*at)(void *ctx, uint32_t i, uint32_t *p_len);
	void *ctx;
	uint32_t n; /* units that have one */
} kvx_hashes_t;

/* A request as the engine knows it. Nothing of it is kept after a call but the id. */
typedef struct kvx_ask {
	size_t struct_size;
	const char *id; /* of the engine, unique among the living; not NUL-terminated */
	uint32_t id_len;
	const char *lora; /* adapter: name and fingerprint; NULL: none. Blocks of different adapters lie in different
			     spaces */
	const kvx_hashes_t *hashes; /* `foreign` only */
	uint32_t tokens;            /* of the request now: prompt and what was generated */
	uint32_t local;             /* the engine has these already, in whole units */
	uint32_t busy;              /* other requests that a synchronous load would hold up */
	int whole;  /* 1: all tokens may be loaded, 0: at least one is left to compute (synchronous loads always leave
		       one) */
	int polled; /* 1: a match waits wait_us at most, and is repeated while hit->leasing is set */
	uint32_t load_ms;     /* deadline of its load on a rank; 0: the configuration's */
	uint32_t save_tokens; /* of these from its first on whole blocks are saved; 0: of all */
	int memory_only;      /* 1: what is on disk is not loaded */
} kvx_ask_t;

/* Own keys only: the whole units of tokens [at, at + n) of the request; `at` is the number taken before. extra[i],
 * extra_len[i]: canonical extra keys of the i-th unit (salt, images); NULL: none.
 * KVC_ERR_ARG: token ids or `at` are wrong, and the request has no keys. KVC_ERR_UNREACHABLE: its space is not open yet
 * (a match tries to open it). KVC_ERR_STALE_EPOCH: the space has another epoch: nothing was taken, begin again with
 * `at` 0. */
typedef struct kvx_units {
	size_t struct_size;
	uint32_t at, n;
	const uint32_t *tokens;
	const void *const *extra;
	const uint32_t *extra_len;
	uint32_t extra_count;
} kvx_units_t;
KVC_API kvc_status_t kvx_scheduler_add_tokens(kvx_scheduler_t *scheduler, const kvx_ask_t *ask,
					      const kvx_units_t *units);

typedef struct kvx_hit {
	size_t struct_size;
	uint32_t tokens;      /* beyond `local`, to load; 0: none, or loading does not pay */
	uint32_t disk_tokens; /* of these, from disk; while leasing, of those asked for: the answer may find them in
				   memory */
	uint32_t stored;      /* tokens from the start that are stored, whatever was decided */
	uint32_t why;         /* KVC_WHY_*: why not all is stored, or was leased */
	int async;            /* 1: load asynchronously, and tell the engine when it is done */
	int declined;         /* 1: the cost model has declined */
	int leasing;          /* 1: the daemon has not answered yet: the same match later has its answer */
	uint32_t gpu_tokens;  /* of `tokens`, the first ones: from memory of the GPU */
	int deferred; /* 1: some of the `local` tokens are still to be loaded, by another request of this step: match
			 again in the next one */
} kvx_hit_t;
/* A hit is leased. The first match of a request waits for the daemon's answer as long as computing the tokens would
 * take, at most 100 ms, at least wait_us. A daemon whose heartbeat stands still is awaited for limits.silence (50 ms),
 * once, not once a request. A late answer is there when the request asks again (why: KVC_WHY_TIMEOUT or
 * KVC_WHY_DAEMON_STALE until then). The lease is kept until kvx_scheduler_start_load(), advance() or finish(), or for a
 * second without a lookup. The bytes of the load's record stay reserved until the same calls, over any number of
 * messages. */
KVC_API kvc_status_t kvx_scheduler_match(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_hit_t *hit);

/* The request's blocks in `group`, from index `first` on, are ids[n]: appended, or replacing all from there. The engine
 * has just allocated those at indexes >= fresh: saves read what they still need of them before they are written.
 * KVC_ERR_ARG, KVC_ERR_NOMEM: the request is not saved. */
typedef struct kvx_block_table {
	size_t struct_size;
	uint32_t group, first, n, fresh;
	const uint32_t *ids;
	int shared; /* 1: the group before this one has the same blocks, and was given them just before */
} kvx_block_table_t;
KVC_API kvc_status_t kvx_scheduler_append_blocks(kvx_scheduler_t *scheduler, const kvx_ask_t *ask,
						 const kvx_block_table_t *table);

/* Load what the request's last match() has found, with the same `local`: tokens [ask->local, ask->local + hit->tokens),
 * into the appended blocks. The load is always in the message: one whose lease was lost since (the daemon died) is
 * reported as failed by the ranks. */
KVC_API void kvx_scheduler_start_load(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_hit_t *hit);

/* After this step the request's first `computed` tokens are computed (ask->hashes covers the confirmed ones): reserve
 * for saving what is full and not stored. `prefill`: tokens of it that this step computes. Fewer than before: blocks
 * were lost and are computed again. */
KVC_API void kvx_scheduler_advance(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, uint32_t computed,
				   uint32_t prefill);
/* The step computes `prefill` tokens of a request that is not saved. For the cost model. */
KVC_API void kvx_scheduler_note_step_tokens(kvx_scheduler_t *scheduler, uint32_t computed, uint32_t prefill);
/* The request was preempted: its block table is void until kvx_scheduler_append_blocks() gives the new one. */
KVC_API void kvx_scheduler_preempt(kvx_scheduler_t *scheduler, const kvx_ask_t *ask);
KVC_API void kvx_scheduler_finish(kvx_scheduler_t *scheduler, const kvx_ask_t *ask);
/* The number of tokens at which advance() next has something to do for the request, for callers that want to save the
 * call. UINT32_MAX: unknown request. */
KVC_API uint32_t kvx_scheduler_next_save_at(const kvx_scheduler_t *scheduler, const char *id, uint32_t id_len);

/* The other side of a hand-over, as both sides name it. */
typedef struct kvx_transfer {
	size_t struct_size;
	const char *id; /* UTF-8 without control characters, 1 to KVC_MAX_TRANSFER bytes */
	/* send(): how long it waits for a consumer, from its last chunk on; 0: the daemon's handover.ttl, which is the
	 * most. receive(): how long match()'s promise waits for all of it, handover.ttl at most; 0: 30 s, or twice what
	 * the cost model predicts for computing it and a second, if that is less. */
	uint32_t timeout_ms;
	/* Of one group: the tokens of the prompt after its last whole block, which travel in a private block. The block
	 * must not change after the prompt is computed. n_tokens 0, or of one side only: the consumer computes them. */
	const uint32_t *tokens;
	uint32_t n_tokens;
	/* receive(): the node that sends, by the name in the option peers.addresses of this node's daemon; its own
	 * name, or NULL: this node. Names of keys cross the nodes, so a prompt whose own keys have extra keys in them
	 * is not received from another one. */
	const char *peer;
	/* send(): 1: also in memory of the engine's own GPU, if the daemon has some there. The prompt is saved there
	 * first, and to host memory as always. Of one group that fills its prompt, `foreign` only. */
	int on_device;
	/* receive(): UUID of the GPU in whose memory it may be handed over as well; NULL: in none. What does not come
	 * from there, or cannot be loaded, comes from host memory. Not from another node. */
	const char *device;
} kvx_transfer_t;
/* Hand ask->tokens, the prompt, over to the instance that receives this transfer: each block as soon as it is visible,
 * the last ones after kvx_scheduler_finish(). Once for a request, before it is computed. Without a daemon nothing is
 * handed over. KVC_ERR_ARG, KVC_ERR_EXISTS, KVC_ERR_NOMEM. */
KVC_API kvc_status_t kvx_scheduler_send(kvx_scheduler_t *scheduler, const kvx_ask_t *ask,
					const kvx_transfer_t *transfer);
/* The request's prompt, ask->tokens, is computed by another instance. From now on match() answers with all of it that
 * is handed over (hit->async), unless that is stored already, and the load lasts until the last block has come, the
 * producer has ended, or the time is up. Once for a request. Errors as above. */
KVC_API kvc_status_t kvx_scheduler_receive(kvx_scheduler_t *scheduler, const kvx_ask_t *ask,
					   const kvx_transfer_t *transfer);
/* The request will not be computed: its consumer is told at once. Before kvx_scheduler_finish(); of one that is not
 * handed over nothing happens. */
KVC_API void kvx_scheduler_abort_send(kvx_scheduler_t *scheduler, const kvx_ask_t *ask);
/* 1: the daemon knows the request's hand-over, or had all of it. */
KVC_API int kvx_scheduler_has_sent(const kvx_scheduler_t *scheduler, const kvx_ask_t *ask);
/* The GPU in whose memory the request is handed over, for kvx_transfer_t of its consumer; "": in none, or not any
 * longer. */
KVC_API const char *kvx_scheduler_send_device(const kvx_scheduler_t *scheduler, const kvx_ask_t *ask);
/* What other nodes call this one, as in kvx_transfer_t; "": it has no peers, or no daemon yet. Valid until the next
 * call. */
KVC_API const char *kvx_scheduler_peer_name(const kvx_scheduler_t *scheduler);
/* 1: hand-overs wait for the daemon, and nothing else is in progress: an engine with nothing to compute may
 * kvx_scheduler_wait() before its next step. */
KVC_API int kvx_scheduler_awaits_peer(const kvx_scheduler_t *scheduler);

/* What became of the request's load and saves. */
typedef struct kvx_outcome {
	size_t struct_size;
	kvc_status_t load;    /* of the last load: PENDING until every rank has reported; OK; else why less came */
	uint32_t why;         /* KVC_WHY_* of the first token that was not found, leased or loaded */
	uint32_t stored;      /* tokens from the start that are visible to others */
	uint32_t sent;        /* tokens from the start that are visible, or that a message told the ranks to save */
	kvc_status_t refused; /* why blocks were not saved: the last reason. OK: none since the last grant */
	uint32_t refusals;    /* in a row, without a block that became visible */
} kvx_outcome_t;
KVC_API kvc_status_t kvx_scheduler_get_outcome(kvx_scheduler_t *scheduler, const kvx_ask_t *ask,
					       kvx_outcome_t *outcome);

/* The message of this step, valid until the next call. Exactly once a step, after all its other calls; an empty message
 * has *p_len 0. */
KVC_API void kvx_scheduler_build_message(kvx_scheduler_t *scheduler, const void **p_bytes, size_t *p_len);
/* A rank's report (kvx_worker_take_report()). One that is not sound is counted and ignored. */
KVC_API void kvx_scheduler_take_report(kvx_scheduler_t *scheduler, const void *bytes, size_t len);
/* Ids of blocks that depend on a synchronous load that has failed, and that their requests had lost before: preempted
 * or ended. An engine that has them in a cache of its own removes them. Each is named once; returns how many, at most
 * `cap`: ask again. */
KVC_API uint32_t kvx_scheduler_take_invalidated(kvx_scheduler_t *scheduler, uint32_t *ids, uint32_t cap);
/* 1: something waits for a message: keep stepping although there are no requests. */
KVC_API int kvx_scheduler_has_pending(kvx_scheduler_t *scheduler);

/* The caller no longer knows which request has which blocks: saves in progress are given up, and no request known now
 * is saved before it was preempted. */
KVC_API void kvx_scheduler_revoke_saves(kvx_scheduler_t *scheduler);

/* Wait until the daemon has sent something, timeout_us at most. 0: no daemon listens. For an engine that has nothing to
 * compute. */
KVC_API int kvx_scheduler_wait(kvx_scheduler_t *scheduler, uint32_t timeout_us);
/* Own keys only: the key of that unit of the request. KVC_MISS: it has none. */
KVC_API kvc_status_t kvx_scheduler_get_key(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, uint32_t unit,
					   kvc_key_t *key);

/* A request has ended: metrics and prefix-hit records of the daemon. Call it before kvx_scheduler_finish(), which drops
 * the request's hits. */
typedef struct kvx_ended {
	size_t struct_size;
	uint32_t prompt_tokens, engine_tokens, output_tokens;
} kvx_ended_t;
KVC_API void kvx_scheduler_record_ended(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_ended_t *ended);
/* The same for a caller that knows what was hit. lora: as in kvx_ask_t. */
KVC_API void kvx_scheduler_record(kvx_scheduler_t *scheduler, const char *lora, const kvc_report_t *report);

/* X(name, help): counters since kvx_scheduler_open(). */
#define KVX_SCHEDULER_STATS(X)                                                                                         \
	X(matches, "lookups of a prompt")                                                                              \
	X(match_hits, "lookups that found something beyond what the engine had")                                       \
	X(match_declined, "hits not loaded because loading was measured to be slower than computing")                  \
	X(match_deferred, "lookups deferred to the next step: another request was loading what the engine had cached") \
	X(match_no_daemon, "lookups answered with a miss because no daemon was alive")                                 \
	X(miss_tokens_absent, "tokens looked up that are not stored")                                                  \
	X(miss_tokens_evicted, "tokens found that were gone when they were to be leased")                              \
	X(miss_tokens_daemon_stale, "tokens not found or leased because the daemon was silent for too long")           \
	X(miss_tokens_no_daemon, "tokens not found or leased because no daemon was attached")                          \
	X(miss_tokens_stale_epoch, "tokens not found because the space has just been reset")                           \
	X(miss_tokens_weights_pending, "tokens not looked up because the weights had not been digested yet")           \
	X(miss_tokens_contended, "tokens not found because the daemon was writing there all the time")                 \
	X(miss_tokens_unreadable, "tokens stored that the disk cannot read now, or that lie below such a block")       \
	X(miss_tokens_late, "tokens found that the daemon did not lease in time")                                      \
	X(miss_tokens_declined, "tokens found that were not loaded because computing them was measured to be faster")  \
	X(miss_tokens_refused, "tokens found that were not loaded: too few, or no memory for the load")                \
	X(wait_ns, "nanoseconds that lookups have waited for the daemon")                                              \
	X(loads, "loads started")                                                                                      \
	X(loads_async, "of them asynchronous")                                                                         \
	X(loads_done, "loads that brought every block")                                                                \
	X(loads_failed, "loads that brought less: the engine computes the rest")                                       \
	X(load_tokens, "tokens asked for")                                                                             \
	X(gpu_tokens, "of them from memory of a GPU")                                                                  \
	X(other_gpu_tokens, "of those from memory of another engine's GPU")                                            \
	X(disk_tokens, "of them from disk")                                                                            \
	X(lease_lost, "hits whose blocks were gone when they were to be leased")                                       \
	X(saves, "reservations asked for")                                                                             \
	X(save_blocks, "blocks handed to the ranks for saving")                                                        \
	X(save_done, "blocks that became visible")                                                                     \
	X(gpu_blocks, "blocks that became visible in memory of the GPU, in addition")                                  \
	X(save_busy, "blocks the daemon had no room for")                                                              \
	X(save_not_admitted,                                                                                           \
	  "blocks the daemon did not want while its pool thrashed: of no request that is handed over")                 \
	X(save_lost, "blocks reserved that were not saved after all")                                                  \
	X(late_answers, "answers of the daemon that came after the lookup or the step message that waited for them")   \
	X(handovers_sent, "prompts that were handed over to another instance")                                         \
	X(handovers_send_failed, "of those to be handed over, prompts that were not, or not wholly")                   \
	X(handovers_send_other, "of those, whose consumer has other weights or another layout")                        \
	X(handovers_received, "prompts that another instance has handed over")                                         \
	X(handovers_receive_failed, "prompts whose hand-over ended before all of it had come: the rest is computed")   \
	X(handovers_receive_other, "of those, whose producer has other weights or another layout")                     \
	X(handovers_sent_gpu, "prompts that were handed over in memory of the GPU, too")                               \
	X(handovers_received_gpu, "prompts handed over whose last blocks came from memory of a GPU")                   \
	X(handover_pieces, "loads of a chunk that was handed over while more was to follow")                           \
	X(bad_reports, "reports of a rank that were not sound")                                                        \
	X(cost_model_stops, "lengths at which the cost model stopped loading")                                         \
	X(cost_model_resumes, "lengths at which the cost model resumed loading")                                       \
	X(cost_model_cuts, "hits loaded in part, because loading the rest is slower than computing it")                \
	X(cost_model_samples, "hits that were sampled: a small part was loaded to measure it")                         \
	X(cost_model_steps, "steps whose time was measured")                                                           \
	X(attaches, "attachments to a daemon")                                                                         \
	X(suspensions,                                                                                                 \
	  "times the weights may have changed, so that nothing was loaded or saved until their next name")             \
	X(withdrawn,                                                                                                   \
	  "runs of blocks to be taken back, because the weights had another name when they were proved next")          \
	X(withdrawals, "of them, runs that the daemon has taken back")                                                 \
	X(broken_invariants,                                                                                           \
	  "invariants found broken; above 0 the half has detached for good: please report the log line")               \
	X(spaces_refused, "requests of adapters for which there was no space (512 are in use), or no name yet")
typedef struct kvx_scheduler_stats {
	size_t struct_size;
#define KVX_SCHEDULER_STAT(name, help) uint64_t name;
	KVX_SCHEDULER_STATS(KVX_SCHEDULER_STAT)
#undef KVX_SCHEDULER_STAT
	uint64_t requests, leases_open, puts_open; /* now */
} kvx_scheduler_stats_t;
KVC_API kvc_status_t kvx_scheduler_get_stats(const kvx_scheduler_t *scheduler, kvx_scheduler_stats_t *stats);

#ifdef __cplusplus
}
#endif
#endif
