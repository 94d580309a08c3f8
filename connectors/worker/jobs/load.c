/* Loads: the transfer thread imports the leases and publishes how far blocks may be taken; any thread takes a batch and
 * copies it.
 *
 * A block counts only if the lease was still valid after it was copied and its digests were right: the memory of an
 * ended lease may already hold another block. The first failure closes a load: no further batch is taken, and batches
 * taken before may still be verified. */
#include "worker/jobs/load.h"
#include "worker/config.h"
#include "worker/host/move.h"

#include <stdlib.h>
#include <string.h>

/* ---- making one (engine's thread) ------------------------------------------------------------ */

/* Bytes of all arrays behind the parts, and of the request's id. */
static size_t arrays_size(const kvx_msg_load_t *record)
{
	const kvx_msg_part_t *part = kvx_msg_part_first(record);
	size_t size = 0;

	for (uint32_t p = 0; p < record->parts; p++) {
		size += (size_t)part->n * (sizeof(kvx_source_t) + sizeof(uint32_t) + 2u);
		part = kvx_msg_part_next(part);
	}

	return size + record->id_len;
}

static int part_is_sound(const kvx_wgroup_t *group, const kvx_msg_part_t *part)
{
	const uint32_t *ids = kvx_msg_part_ids(part);

	if (!group) {
		return 0;
	}
	for (uint32_t i = 0; i < part->n; i++) {
		if (ids[i] >= group->paged.blocks && ids[i] != KVX_NO_BLOCK) {
			return 0;
		}
	}

	return 1;
}

/* Copy the part; its arrays begin at these addresses. Blocks without a destination are good from the start. Returns how
 * many have one. */
static uint32_t copy_part(kvx_wpart_t *to, const kvx_msg_part_t *part, kvx_source_t *sources, uint32_t *ids,
			  uint8_t *ends)
{
	uint32_t wanted = 0;

	to->handle = part->lease;
	to->n = part->n;
	to->first = part->first;
	to->sources = sources;
	to->ids = ids;
	to->results = ends;
	to->ranges_done = ends + part->n;
	memcpy(ids, kvx_msg_part_ids(part), part->n * sizeof *ids);
	for (uint32_t i = 0; i < part->n; i++) {
		ends[i] = ids[i] == KVX_NO_BLOCK ? KVX_BLOCK_GOOD : KVX_BLOCK_OPEN;
		wanted += ids[i] != KVX_NO_BLOCK;
	}

	return wanted;
}

static int copy_parts(kvx_worker_t *worker, kvx_wload_t *load, const kvx_msg_load_t *record)
{
	const kvx_msg_part_t *part = kvx_msg_part_first(record);
	uint32_t total = 0;
	kvx_source_t *sources = (kvx_source_t *)(void *)(load->part + record->parts);
	uint32_t *ids;
	uint8_t *ends;

	for (uint32_t p = 0; p < record->parts; p++) {
		total += part->n;
		part = kvx_msg_part_next(part);
	}
	ids = (uint32_t *)(void *)(sources + total);
	ends = (uint8_t *)(ids + total);
	load->request = (char *)(ends + (size_t)2 * total);
	memcpy(load->request, kvx_msg_load_id(record), record->id_len);

	part = kvx_msg_part_first(record);
	for (uint32_t p = 0; p < record->parts; p++) {
		kvx_wpart_t *to = &load->part[p];

		to->group = kvx_worker_find_group(worker, part->group);
		if (!part_is_sound(to->group, part)) {
			return 0;
		}
		load->wanted += copy_part(to, part, sources, ids, ends);
		sources += part->n;
		ids += part->n;
		ends += (size_t)2 * part->n;
		part = kvx_msg_part_next(part);
	}
	atomic_store(&load->remaining, total);

	return 1;
}

kvx_wload_t *kvx_wload_create(kvx_worker_t *worker, const kvx_msg_load_t *record)
{
	const size_t size = sizeof(kvx_wload_t) + record->parts * sizeof(kvx_wpart_t) + arrays_size(record);
	kvx_wload_t *load = calloc(1, size);

	if (!load) {
		return NULL;
	}
	load->job.kind = KVX_WJOB_LOAD;
	load->id = record->load;
	load->space = record->space;
	load->flags = record->flags;
	load->parts = record->parts;
	load->ranges = 1;
	load->id_len = record->id_len;
	load->begin_ns = kvx_worker_now_ns();
	load->copied_ns = worker->copied_ns;
	load->deadline_ns = load->begin_ns + record->timeout_ms * KVX_NS_A_MS;
	atomic_store(&load->cause, KVC_PENDING);
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

int kvx_wload_is_settled(kvx_wload_t *load)
{
	return atomic_load(&load->cause) != KVC_PENDING && atomic_load(&load->active) == 0;
}

/* ---- copying (any thread) -------------------------------------------------------------------- */

uint32_t kvx_wpart_take(kvx_wpart_t *part, uint32_t most, uint32_t *p_first)
{
	uint32_t first = atomic_load(&part->next);
	uint32_t limit, count;

	do {
		limit = atomic_load(&part->limit);
		if (first >= limit) {
			return 0;
		}
		count = limit - first < most ? limit - first : most;
	} while (!atomic_compare_exchange_weak(&part->next, &first, first + count));
	*p_first = first;

	return count;
}

/* Fill in the moves of blocks [first, first + count) with a destination: how many. */
static uint32_t prepare_moves(const kvx_worker_t *worker, const kvx_wpart_t *part, uint32_t first, uint32_t count,
			      kvx_scratch_t *scratch)
{
	uint32_t moves = 0;

	for (uint32_t i = first; i < first + count; i++) {
		if (part->ids[i] == KVX_NO_BLOCK) {
			continue;
		}
		kvx_move_prepare(worker, part->group, &part->sources[i], &scratch->moves[moves],
				 scratch->leaves + (size_t)moves * worker->words);
		scratch->moves[moves].block = part->ids[i];
		scratch->index[moves] = i;
		moves++;
	}

	return moves;
}

static void copy_blocks(kvx_worker_t *worker, kvx_wload_t *load, kvx_wpart_t *part, uint32_t first, uint32_t count,
			kvx_scratch_t *scratch)
{
	const kvk_paged_t *paged = &part->group->paged;
	const uint32_t moves = prepare_moves(worker, part, first, count, scratch);
	kvc_status_t status = kvc_lease_state(part->lease);
	kvc_status_t after;
	uint32_t good = moves, bad = 0;

	if (status == KVC_OK && moves > 0) {
		status = (kvc_status_t)kvk_scatter(load->layout, paged, scratch->moves, moves, &bad);
		after = kvc_lease_state(part->lease);
		good = status == KVC_ERR_CORRUPT ? bad : moves;
		status = after != KVC_OK ? after : status;
	}
	if (status != KVC_OK && status != KVC_ERR_CORRUPT) {
		kvx_wload_close(worker, load, status);
		return;
	}

	for (uint32_t i = 0; i < good; i++) {
		part->results[scratch->index[i]] = KVX_BLOCK_GOOD;
	}
	atomic_fetch_add(&load->verified, good);
	atomic_fetch_add(&load->bytes, (uint64_t)good * paged->heads * paged->layers * worker->geometry.page_bytes);
	if (status == KVC_ERR_CORRUPT) {
		part->results[scratch->index[bad]] = KVX_BLOCK_BAD;
		kvx_wload_close(worker, load, status);
	} else if (atomic_fetch_sub(&load->remaining, count) == count) {
		kvx_wload_close(worker, load, KVC_OK);
	}
}

uint32_t kvx_wload_copy(kvx_worker_t *worker, kvx_wload_t *load, kvx_scratch_t *scratch)
{
	uint32_t count = 0;

	atomic_fetch_add(&load->active, 1u);
	if (atomic_load(&load->may_copy) && atomic_load(&load->cause) == KVC_PENDING) {
		for (uint32_t p = 0; p < load->parts && count == 0; p++) {
			uint32_t first = 0;

			count = kvx_wpart_take(&load->part[p], worker->batch, &first);
			if (count > 0) {
				copy_blocks(worker, load, &load->part[p], first, count, scratch);
			}
		}
	}
	atomic_fetch_sub(&load->active, 1u);

	return count;
}
