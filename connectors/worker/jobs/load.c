/* Loads: the transfer thread imports the leases and publishes how far blocks may be taken; any thread takes a batch and
 * copies it.
 *
 * A block counts only if the lease was still valid after it was copied and its digests were right: the memory of an
 * ended lease may already hold another block. The first failure closes a load: no further batch is taken, and batches
 * taken before may still be verified. */
#include "worker/jobs/load.h"
#include "worker/base/submit.h"

#include <stdlib.h>
#include <string.h>

#define NAP_NS        UINT64_C(500000)
#define DEVICE_NAP_NS UINT64_C(100000)   /* nothing wakes who waits for a device */
#define GRACE_NS      UINT64_C(20000000) /* past its deadline the engine ends a load itself */

/* ---- making one (engine's thread) ------------------------------------------------------------ */

static uint32_t count_blocks(const kvx_msg_load_t *record)
{
	const kvx_msg_part_t *part = kvx_msg_part_first(record);
	uint32_t blocks = 0;

	for (uint32_t p = 0; p < record->parts; p++) {
		blocks += part->n;
		part = kvx_msg_part_next(part);
	}

	return blocks;
}

/* 0: the record names a group or a block that this rank does not have. */
static int copy_parts(kvx_worker_t *worker, kvx_wload_t *load, const kvx_msg_load_t *record)
{
	const kvx_msg_part_t *part = kvx_msg_part_first(record);
	kvx_wblock_t *block = (kvx_wblock_t *)(void *)(load->part + record->parts);

	for (uint32_t p = 0; p < record->parts; p++) {
		const kvx_wgroup_t *group = kvx_worker_find_group(worker, part->group);
		const uint32_t *ids = kvx_msg_part_ids(part);
		kvx_wpart_t *to = &load->part[p];

		if (!group) {
			return 0;
		}
		to->group = group;
		to->handle = part->lease;
		to->mem = part->mem;
		to->n = part->n;
		to->first = part->first;
		to->blocks = block;
		for (uint32_t i = 0; i < part->n; i++, block++) {
			if (ids[i] >= group->paged.blocks && ids[i] != KVX_NO_BLOCK) {
				return 0;
			}
			block->id = ids[i];
			load->wanted += ids[i] != KVX_NO_BLOCK;
		}
		part = kvx_msg_part_next(part);
	}
	load->request = (char *)block;
	memcpy(load->request, kvx_msg_load_id(record), record->id_len);

	return 1;
}

kvx_wload_t *kvx_wload_create(kvx_worker_t *worker, const kvx_msg_load_t *record)
{
	const uint32_t blocks = count_blocks(record);
	kvx_wload_t *load = calloc(1, sizeof *load + record->parts * sizeof *load->part +
					      blocks * sizeof *load->part->blocks + record->id_len);

	if (!load) {
		return NULL;
	}
	load->job.kind = KVX_WJOB_LOAD;
	load->id = record->load;
	load->space = record->space;
	load->flags = record->flags;
	load->more = (record->flags & KVX_MSG_MORE) != 0;
	load->parts = record->parts;
	load->ranges = 1;
	load->id_len = record->id_len;
	load->begin_ns = kvx_worker_now_ns();
	load->copied_ns = worker->copied_ns;
	load->deadline_ns = load->begin_ns + record->timeout_ms * KVX_NS_A_MS;
	atomic_store(&load->cause, KVC_PENDING);
	atomic_store(&load->remaining, blocks);
	if (!copy_parts(worker, load, record)) {
		kvx_stat_add(&worker->stats.bad_messages, 1);
		free(load);
		return NULL;
	}

	return load;
}

/* ---- the end of one -------------------------------------------------------------------------- */

void kvx_wload_close(kvx_worker_t *worker, kvx_wload_t *load, kvc_status_t cause)
{
	int32_t open = KVC_PENDING;

	if (atomic_compare_exchange_strong(&load->cause, &open, cause)) {
		load->end_ns = kvx_worker_now_ns();
		kvx_gate_open(&worker->progress);
	}
}

void kvx_wload_count_done(kvx_worker_t *worker, kvx_wload_t *load, uint32_t blocks)
{
	if (atomic_fetch_sub(&load->remaining, blocks) == blocks) {
		kvx_wload_close(worker, load, load->lacks_blocks ? KVC_MISS : KVC_OK);
	}
}

int kvx_wload_is_settled(kvx_wload_t *load)
{
	return atomic_load(&load->cause) != KVC_PENDING && atomic_load(&load->active) == 0;
}

/* ---- copying (any thread) -------------------------------------------------------------------- */

uint32_t kvx_wpart_take(kvx_wpart_t *part, uint32_t end, uint32_t most, uint32_t *p_first)
{
	uint32_t first = atomic_load(&part->next);
	uint32_t count;

	do {
		if (first >= end) {
			return 0;
		}
		count = end - first < most ? end - first : most;
	} while (!atomic_compare_exchange_weak(&part->next, &first, first + count));
	*p_first = first;

	return count;
}

void kvx_move_prepare(const kvx_wgroup_t *group, const kvx_source_t *source, kvk_move_t *move, uint64_t *leaves)
{
	const kvk_geometry_t *g = &group->geometry;
	const kvk_paged_t *paged = &group->paged;
	const uint64_t *first = source->leaves + (size_t)paged->first_head * g->leaves;
	const uint32_t count = paged->layers * g->pieces;

	move->data = (void *)(uintptr_t)source->data; /* scatter only reads both */
	move->leaves = (uint64_t *)(uintptr_t)first;
	if (paged->layers == group->layout.layers) {
		return; /* the group has all layers, so its leaves lie together */
	}
	for (uint32_t h = 0; h < paged->heads; h++) {
		memcpy(leaves + (size_t)h * count,
		       first + (size_t)h * g->leaves + (size_t)paged->first_layer * g->pieces, count * sizeof *leaves);
	}
	move->leaves = leaves;
}

uint32_t kvx_wbatch_prepare(const kvx_worker_t *worker, const kvx_wbatch_t *batch, kvk_move_t *moves, uint64_t *leaves)
{
	const kvx_wpart_t *part = batch->part;
	uint32_t n = 0;

	for (uint32_t i = batch->first; i < batch->first + batch->count; i++) {
		const kvx_wblock_t *block = &part->blocks[i];

		if (block->id != KVX_NO_BLOCK) {
			kvx_move_prepare(part->group, &block->source, &moves[n], leaves + (size_t)n * worker->words);
			moves[n++].block = block->id;
		}
	}

	return n;
}

/* Enter the results of the moves. */
static void enter_results(const kvx_wbatch_t *batch, kvc_status_t status, const kvk_gpu_job_t *job, uint32_t moves)
{
	uint32_t move = 0;

	for (uint32_t i = batch->first; i < batch->first + batch->count && move < moves; i++) {
		kvx_wblock_t *block = &batch->part->blocks[i];

		if (block->id == KVX_NO_BLOCK) {
			continue;
		}
		move++;
		if (status == KVC_ERR_CORRUPT && (job ? kvk_gpu_move_is_bad(job, move - 1) : move == moves)) {
			block->ranges_done = KVX_BLOCK_BAD;
		} else if (block->ranges_done != KVX_BLOCK_BAD) {
			block->ranges_done = (uint8_t)(block->ranges_done + batch->ranges);
		}
	}
}

void kvx_wbatch_complete(kvx_worker_t *worker, const kvx_wbatch_t *batch, kvc_status_t status, const kvk_gpu_job_t *job,
			 uint32_t moves)
{
	const kvc_status_t after = kvc_lease_state(batch->part->lease);
	const kvc_status_t verdict = after != KVC_OK ? after : status;

	if (verdict == KVC_OK || verdict == KVC_ERR_CORRUPT) {
		enter_results(batch, status, job, moves);
	}
	if (verdict == KVC_OK) {
		kvx_wload_count_done(worker, batch->load, batch->count * batch->ranges);
	} else {
		kvx_wload_close(worker, batch->load, verdict);
	}
}

static void copy_batch(kvx_worker_t *worker, const kvx_wbatch_t *batch, kvx_scratch_t *scratch)
{
	const kvx_wpart_t *part = batch->part;
	const uint32_t moves = kvx_wbatch_prepare(worker, batch, scratch->moves, scratch->leaves);
	kvc_status_t status = kvc_lease_state(part->lease);
	uint32_t bad = 0;

	if (status == KVC_OK && moves > 0) {
		status = (kvc_status_t)kvk_scatter(part->layout, &part->group->paged, scratch->moves, moves, &bad);
	}
	kvx_wbatch_complete(worker, batch, status, NULL, status == KVC_ERR_CORRUPT ? bad + 1 : moves);
}

kvx_wpart_t *kvx_wload_find_part(kvx_wload_t *load)
{
	kvx_wpart_t *found = NULL;

	for (uint32_t p = 0; p < load->parts; p++) {
		kvx_wpart_t *part = &load->part[p];

		if (atomic_load(&part->next) < atomic_load(&part->limit) &&
		    (!found || found->group->block_bytes < part->group->block_bytes)) {
			found = part;
		}
	}

	return found;
}

uint32_t kvx_wload_copy(kvx_worker_t *worker, kvx_wload_t *load, kvx_scratch_t *scratch)
{
	kvx_wbatch_t batch = {.load = load, .ranges = 1};

	atomic_fetch_add(&load->active, 1u);
	if (atomic_load(&load->may_copy) && atomic_load(&load->cause) == KVC_PENDING) {
		while (batch.count == 0 && (batch.part = kvx_wload_find_part(load)) != NULL) {
			batch.count = kvx_wpart_take(batch.part, atomic_load(&batch.part->limit),
						     batch.part->group->batch, &batch.first);
		}
		if (batch.count > 0) {
			copy_batch(worker, &batch, scratch);
		}
	}
	atomic_fetch_sub(&load->active, 1u);

	return batch.count;
}

/* ---- waiting for the synchronous ones (engine's thread) --------------------------------------- */

int kvx_sync_loads_settled(const kvx_worker_t *worker)
{
	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		if (!kvx_wload_is_settled(load)) {
			return 0;
		}
	}

	return 1;
}

/* The transfer thread watches deadlines; if it hangs in a system call, the engine's thread does not wait for it. */
int kvx_sync_loads_pause(kvx_worker_t *worker, uint32_t seen, uint32_t *p_spins)
{
	const uint64_t now = kvx_worker_now_ns();
	int all = 1;

	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		if (now >= load->deadline_ns + GRACE_NS) {
			kvx_wload_close(worker, load, KVC_ERR_TIMEOUT);
		} else {
			all = all && kvx_wload_is_settled(load);
		}
	}
	kvx_gate_pause(&worker->progress, seen, p_spins, worker->gpu ? DEVICE_NAP_NS : NAP_NS);

	return all;
}
