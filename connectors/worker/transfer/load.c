/* What the transfer thread does for a load: import its leases, publish which blocks may be copied, watch it, release.
 */
#include "worker/transfer/load.h"
#include "common/await.h"
#include "worker/cuda/pool_memory.h"
#include "worker/jobs/load.h"
#include "worker/submit.h"
#include "worker/transfer/spaces.h"

/* A part without a lease, or that begins before it, has no bytes. */
static kvc_status_t import_part(kvx_wpart_t *part, kvc_space_t *space)
{
	kvc_status_t status;
	uint32_t n;

	if (part->n == 0 || part->handle.incarnation == 0) {
		return KVC_OK;
	}
	if (part->first < part->handle.first) {
		return KVC_ERR_ARG;
	}
	status = kvc_lease_import(space, &part->handle, &part->lease);
	if (status != KVC_OK) {
		return status;
	}
	n = kvc_lease_n(part->lease);
	part->leased_blocks = n > part->first ? n - part->first : 0;
	part->leased_blocks = part->leased_blocks < part->n ? part->leased_blocks : part->n;

	return KVC_OK;
}

/* Blocks beyond the leases have no bytes: the load is complete without them, and has failed if one is wanted. */
static void count_missing(kvx_worker_t *worker, kvx_wload_t *load)
{
	uint32_t missing = 0;

	for (uint32_t p = 0; p < load->parts; p++) {
		const kvx_wpart_t *part = &load->part[p];

		missing += part->n - part->leased_blocks;
		for (uint32_t i = part->leased_blocks; i < part->n; i++) {
			load->lacks_blocks |= part->ids[i] != KVX_NO_BLOCK;
		}
	}
	kvx_wload_count_done(worker, load, missing);
}

/* PENDING: the space is not open yet. */
static kvc_status_t import_parts(kvx_worker_t *worker, kvx_wload_t *load, uint64_t now)
{
	const kvx_wspace_t *space = NULL;
	kvc_status_t status = kvx_wspace_get(worker, load->space, now, &space);

	if (status != KVC_OK) {
		return status;
	}
	load->layout = &space->layout;
	for (uint32_t p = 0; p < load->parts && status == KVC_OK; p++) {
		status = import_part(&load->part[p], space->space);
	}
	if (status == KVC_OK) {
		load->imported = 1;
		count_missing(worker, load);
	}

	return status;
}

/* Publish the blocks of the part that are ready; KV_ERR_FAULT: one lies in a slab this process has not mapped yet, so
 * poll and try again. */
static kvc_status_t publish_ready_blocks(kvx_worker_t *worker, kvx_wpart_t *part)
{
	const uint32_t ready = kvc_lease_ready(part->lease);
	const uint32_t end = ready > part->first ? ready - part->first : 0;
	const uint32_t stop = end < part->leased_blocks ? end : part->leased_blocks;
	const uint32_t before = atomic_load_explicit(&part->limit, memory_order_relaxed);
	uint32_t at = before;
	kvc_status_t status = KVC_OK;

	while (at < stop && status == KVC_OK) {
		kvx_source_t *source = &part->sources[at];

		if (part->ids[at] != KVX_NO_BLOCK) {
			status = kvc_lease_block(part->lease, part->first + at, &source->data, &source->leaves);
			if (status == KVC_OK && worker->gpu) {
				status = kvx_pool_memory_register(worker, source->data, worker->geometry.block_bytes);
			}
		}
		at += status == KVC_OK;
		if (at % KVX_WORKER_MOVES == 0) {
			atomic_store(&part->limit, at);
		}
	}
	atomic_store(&part->limit, at);
	if (at > before) {
		kvx_gate_open(&worker->progress);
	}

	return status;
}

static int daemon_silent_too_long(const kvx_worker_t *worker, kvx_wload_t *load, uint64_t now)
{
	return kvx_silent_too_long(&load->silent_ns, kvx_daemon_is_silent(worker), now);
}

/* Ready blocks that are not published yet. Asked after the rest of the lease has failed: these are the last ones. */
static int has_more_ready(kvx_wpart_t *part)
{
	return kvc_lease_ready(part->lease) > part->first + atomic_load(&part->limit);
}

/* Of an asynchronous load, what has come is copied before the rest is given up: its engine uses every block. */
static int has_blocks_to_copy(const kvx_wload_t *load, kvx_wpart_t *part)
{
	return load->flags & KVX_MSG_ASYNC && atomic_load(&part->next) < atomic_load(&part->limit);
}

/* Nothing new to copy: close the load if there is no hope of more. */
static void check_progress(kvx_worker_t *worker, kvx_wload_t *load, uint64_t now)
{
	if (now >= load->deadline_ns) {
		kvx_wload_close(worker, load, KVC_ERR_TIMEOUT);
	}
	for (uint32_t p = 0; p < load->parts && atomic_load(&load->cause) == KVC_PENDING; p++) {
		kvx_wpart_t *part = &load->part[p];
		const kvc_status_t state = part->lease ? kvc_lease_state(part->lease) : KVC_OK;
		const kvc_status_t rest = part->lease ? kvc_lease_rest_status(part->lease) : KVC_OK;

		if (state != KVC_OK) {
			kvx_wload_close(worker, load, state);
		} else if (atomic_load(&part->limit) < part->leased_blocks) {
			worker->polls_soon = 1;
			if (rest < 0 && !has_more_ready(part) && !has_blocks_to_copy(load, part)) {
				kvx_wload_close(worker, load, rest);
			} else if (daemon_silent_too_long(worker, load, now)) {
				kvx_wload_close(worker, load, KVC_ERR_DAEMON_STALE);
			}
		}
	}
}

/* Closed, and no thread copies: report corrupt blocks, release the leases. */
static void release_leases(kvx_worker_t *worker, kvx_wload_t *load)
{
	for (uint32_t p = 0; p < load->parts; p++) {
		kvx_wpart_t *part = &load->part[p];

		for (uint32_t i = 0; part->lease && i < part->n; i++) {
			if (part->results[i] == KVX_BLOCK_BAD) {
				(void)kvc_lease_report_bad(part->lease, part->first + i);
			}
		}
		kvc_release(&part->lease, 1);
		part->lease = NULL;
	}
	kvx_wjob_complete(worker, &load->job);
}

/* 1: all leased blocks may be copied. */
static int publish_all_parts(kvx_worker_t *worker, kvx_wload_t *load)
{
	int all = 1;

	for (uint32_t p = 0; p < load->parts; p++) {
		kvx_wpart_t *part = &load->part[p];
		kvc_status_t status;

		if (!part->lease || atomic_load(&part->limit) >= part->leased_blocks) {
			continue;
		}
		status = publish_ready_blocks(worker, part);
		if (status < 0 && status != KVX_ERR_FAULT) {
			kvx_wload_close(worker, load, status);
		}
		all = all && atomic_load(&part->limit) >= part->leased_blocks;
	}

	return all;
}

static void advance_load(kvx_worker_t *worker, kvx_wload_t *load, uint64_t now)
{
	const int first = !load->imported;
	kvc_status_t status = KVC_OK;
	int all;

	if (atomic_load(&load->cancel) || atomic_load(&worker->stop)) {
		kvx_wload_close(worker, load, KVC_MISS);
		return;
	}
	if (!load->imported) {
		status = import_parts(worker, load, now);
		if (status == KVC_PENDING) {
			worker->polls_soon = 1;
			if (kvc_incarnation(worker->kvc) == 0 || daemon_silent_too_long(worker, load, now)) {
				kvx_wload_close(worker, load, KVC_ERR_DAEMON_STALE);
			}
		} else if (status != KVC_OK) {
			kvx_wload_close(worker, load, status);
		}
	}
	if (load->imported) {
		all = publish_all_parts(worker, load);
		if (first && all) {
			atomic_store(&load->all_ready, 1u);
		}
	}
	check_progress(worker, load, now);
}

int kvx_load_transfer_step(kvx_worker_t *worker, kvx_wload_t *load, uint64_t now)
{
	if (atomic_load(&load->cause) == KVC_PENDING) {
		advance_load(worker, load, now);
	}
	if (!kvx_wload_is_settled(load)) {
		return 0;
	}
	release_leases(worker, load);

	return 1;
}
