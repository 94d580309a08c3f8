/* kve/rank.h -- ranks of one process: data parallel in attention, expert parallel in the mixtures of experts.
 *
 * A group has the weights, which nobody changes, and the memory through which rows travel. A rank has activations, the
 * cache that it is given, and its share of the experts; one thread calls its functions. Where there are several, all
 * ranks take every step together: kve_rank_agree(), and then kve_rank_forward(), with no spans where a rank has no
 * tokens. Its tokens' bits do not depend on the number of ranks, nor on what the others compute.
 */
#ifndef KVE_RANK_H
#define KVE_RANK_H

#include "kv/env.h"
#include "kve/cache.h"
#include "kve/clock.h"
#include "kve/dbo.h"
#include "kve/devices.h"
#include "kve/model.h"
#include "kvk/cuda.h"
#include "kvk/ep.h"

#define KVE_MAX_ROWS  64u    /* tokens of a rank that one forward pass computes, in fp32; */
#define KVE_MOST_ROWS 16384u /* on a device, at most */
#define KVE_MAX_SPANS 256u   /* sequences that it computes together */

typedef struct kve_group kve_group_t;
typedef struct kve_rank kve_rank_t;

typedef struct kve_group_config {
	const kve_config_t *model;
	uint32_t ranks;         /* that have the experts between them; 0: one */
	uint32_t deadline_ms;   /* longest wait of a rank for another; 0: 60,000 */
	const kv_env_t *env;    /* its clock, for deadlines; NULL: kv_env_posix */
	kve_dbo_config_t dbo;   /* enabled, and the thresholds; the other fields are set here */
	kve_devices_t *devices; /* borrowed, as many as ranks: compute in BF16; NULL: in fp32 on the CPU */
	uint32_t max_rows;      /* with devices: tokens of one pass, up to KVE_MOST_ROWS; 0: 4,096 */
} kve_group_config_t;

/* KV_ERR_ARG: a bad shape, several ranks without experts, the ranks do not divide the groups of experts, or what
 * kve_dbo_check() or kve_devices_fault_of_shape() says. KV_ERR_NOMEM; KV_ERR_IO: a device. */
kv_status_t kve_group_create(const kve_group_config_t *config, kve_group_t **p_group);
/* After its ranks. NULL is fine. */
void kve_group_destroy(kve_group_t *group);
const kve_config_t *kve_group_model(const kve_group_t *group);
uint32_t kve_group_ranks(const kve_group_t *group);
/* Tokens of one pass of a rank, at most. */
uint32_t kve_group_max_rows(const kve_group_t *group);

/* What a rank of the group takes of its device's memory, in bytes. Zeros without devices. */
typedef struct kve_group_memory {
	size_t weights, workspace, heap;
	size_t cache_block; /* each block of its cache */
} kve_group_memory_t;
kve_group_memory_t kve_group_memory(const kve_group_t *group);

/* The group is borrowed. Each number is made once. KV_ERR_ARG: no such number. KV_ERR_NOMEM. */
kv_status_t kve_rank_create(kve_group_t *group, uint32_t number, kve_rank_t **p_rank);
/* NULL is fine. */
void kve_rank_destroy(kve_rank_t *rank);

/* What a rank says of the step that it is about to take. */
typedef struct kve_step_count {
	kve_dbo_count_t count;
	uint32_t unfinished; /* requests that it has */
} kve_step_count_t;

/* What all ranks have come to, the same on each. */
typedef struct kve_step {
	uint32_t tokens, unfinished; /* of all ranks; without tokens there is nothing to compute */
	kve_dbo_step_t dbo;
} kve_step_t;

/* A GPU's memory, and the stream on which the rank computes. */
typedef struct kve_place {
	int ordinal; /* as the driver counts */
	kvk_cu_stream_t stream;
} kve_place_t;

/* Where the rank's cache lies. KV_ERR_UNSUPPORTED: in host memory, and each step has ended when it returns. */
kv_status_t kve_rank_place(const kve_rank_t *rank, kve_place_t *place);

/* A cache for this rank, of `tp` tensor parallel ranks (with devices: 1), where it computes. As kve_cache_init_ranks();
 * KV_ERR_IO: the device. */
kv_status_t kve_rank_open_cache(kve_rank_t *rank, uint32_t blocks, uint32_t tp, kve_cache_t *cache);
/* A zeroed one is fine. */
void kve_rank_close_cache(kve_rank_t *rank, kve_cache_t *cache);

/* Tell all ranks, and hear what they say. KV_ERR_TIMEOUT: a rank has not come, here or at another one; kve_rank_lost()
 * says which. The group is of no further use. */
kv_status_t kve_rank_agree(kve_rank_t *rank, const kve_step_count_t *own, kve_step_t *p_step);

/* Say that this rank takes no further step: the others end as if its deadline had passed. */
void kve_rank_abandon(kve_rank_t *rank);

/* A rank's attention is computed by as many tensor parallel ranks as its cache has, one after the other. Each has its
 * heads, and its share of the outputs of every matrix: what it needs of the others' it is given before, so each sum has
 * all its terms in index order, and bits do not depend on the number of ranks.
 *
 * Compute at most KVE_MAX_SPANS spans of different sequences together; their n sum up to at most
 * kve_group_max_rows(), and to what was agreed. dbo:
 * what was agreed; NULL: one batch. Bits do not depend on what is computed together, nor on microbatches. KV_ERR_ARG:
 * too many rows, none in a microbatch, a token or a position out of range, or a cache of another shape; nothing was
 * computed. KV_ERR_TIMEOUT: as of kve_rank_agree(). KV_ERR_IO: this rank's device has failed,
 * and the others lose this rank: it takes no further step. */
kv_status_t kve_rank_forward(kve_rank_t *rank, kve_cache_t *cache, const kve_span_t *spans, uint32_t n_spans,
			     const kve_dbo_step_t *dbo);

/* When the phases of a pass run, on the device's clock. */
typedef enum kve_trace {
	KVE_TRACE_NONE,
	KVE_TRACE_RUN,   /* as it is */
	KVE_TRACE_APART, /* each phase begins when the one before it in the list has ended: what it takes alone */
} kve_trace_t;

/* Of the passes to come. KV_ERR_UNSUPPORTED: without devices. KV_ERR_NOMEM, KV_ERR_IO. */
kv_status_t kve_rank_set_trace(kve_rank_t *rank, kve_trace_t trace);
/* The list of passes in that mode. */
const kve_overlap_item_t *kve_rank_items(const kve_rank_t *rank, kve_overlap_mode_t mode, uint32_t *p_n);
/* Nanoseconds from the first phase's begin of the last pass, one interval an item. KV_ERR_ARG: it was not traced;
 * KV_ERR_UNSUPPORTED, KV_ERR_IO. */
kv_status_t kve_rank_read_trace(kve_rank_t *rank, kve_clock_interval_t *intervals);

/* The ranks that have not come, a bit each; 0: none is missing. It may get more exact as others give up. */
uint32_t kve_rank_lost(const kve_rank_t *rank);

typedef struct kve_rank_stats {
	uint64_t steps[KVE_OVERLAP_DBO + 1]; /* passes in each mode */
	kvk_ep_stats_t sent;                 /* bytes to other ranks; zeros without experts */
} kve_rank_stats_t;

kve_rank_stats_t kve_rank_stats(const kve_rank_t *rank);

#endif
