/* The transfer thread: it owns the attachment and runs the jobs, loads first. With nothing to do it spins for a moment,
 * then sleeps.
 *
 * For a load it imports the leases, publishes which blocks may be copied, watches it, and releases the leases. For a
 * save it imports the put, copies block after block out of the engine's cache, hands in what is done, and frees the
 * put. A block that is about to be reused is copied by the engine's thread (worker/jobs/fence.c), so blocks may be done
 * in any order; they are handed in from the first on. All blocks behind one that was given up are given up too: a block
 * whose parent is missing cannot become visible. */
#include "worker/transfer/thread.h"
#include "common/await.h"
#include "worker/cuda/device.h"
#include "worker/jobs/gpu_load.h"
#include "worker/cuda/pool_memory.h"
#include "worker/jobs/gpu_save.h"
#include "worker/transfer/copy_threads.h"
#include "worker/jobs/load.h"
#include "worker/jobs/save.h"
#include "worker/transfer/prefault.h"
#include "worker/transfer/self_test.h"
#include "worker/base/submit.h"
#include "worker/transfer/spaces.h"

#include "kv/system.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS    UINT64_C(50000)
#define POLL_NS    UINT64_C(100000)   /* the socket is read this often while there is work */
#define NAP_NS     UINT64_C(50000)    /* for an event without a message: poll soon at first, */
#define NAP_MAX_NS UINT64_C(1000000)  /* then less often */
#define COPY_NS    UINT64_C(100000)   /* the device copies: its queue must not run empty */
#define OPEN_NS    UINT64_C(5000000)  /* jobs wait for the daemon */
#define AWAY_NS    UINT64_C(20000000) /* no daemon: look for one */
#define IDLE_NS    UINT64_C(100000000)
#define HAND_IN    (4u << 20) /* bytes copied before they are handed in: the daemon works while the rest is copied */
#define STUCK_NS   UINT64_C(1000000000) /* for staging, or a slab this process has not mapped yet */
#define IMPORT_MS  2000u                /* for the space to be opened */

/* ---- a load ------------------------------------------------------------------------------------ */

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
			load->lacks_blocks |= part->blocks[i].id != KVX_NO_BLOCK;
		}
	}
	kvx_wload_count_done(worker, load, missing);
}

/* PENDING: a space is not open yet. */
static kvc_status_t import_parts(kvx_worker_t *worker, kvx_wload_t *load, uint64_t now)
{
	kvc_status_t status = KVC_OK;

	for (uint32_t p = 0; p < load->parts && status == KVC_OK; p++) {
		const kvx_wspace_ref_t ref = {load->space, load->part[p].mem};
		const kvx_wspace_t *space = NULL;

		status = load->part[p].lease ? KVC_OK : kvx_wspace_get(worker, ref, now, &space);
		if (ref.mem != KVX_HOST_MEM && status < 0 && status != KVC_ERR_CLOSED) {
			status = KVC_ERR_TIER_OFF; /* the scheduler half then leaves it alone for a while */
		}
		if (status == KVC_OK && space) {
			load->part[p].layout = &space->layouts[load->part[p].group->index];
			status = import_part(&load->part[p], space->space);
		}
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
		kvx_wblock_t *block = &part->blocks[at];

		if (block->id != KVX_NO_BLOCK) {
			status = kvc_lease_block(part->lease, part->first + at, &block->source.data,
						 &block->source.leaves);
			if (status == KVC_OK && worker->gpu) {
				status = kvx_pool_memory_register(worker, block->source.data,
								  part->group->geometry.block_bytes);
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
			if (part->blocks[i].ranges_done == KVX_BLOCK_BAD) {
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

/* Import its leases, publish which blocks may be copied, watch its deadline. 1: it has been completed. */
static int advance_load_job(kvx_worker_t *worker, kvx_wload_t *load, uint64_t now)
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

/* ---- a save ------------------------------------------------------------------------------------ */

/* A block without a source must have no slot either: else the old bytes of the slot would be handed in as its own. */
static kvc_status_t check_sources(kvx_worker_t *worker, const kvx_wsave_t *save)
{
	for (uint32_t i = 0; i < save->n; i++) {
		if (save->ids[i] == KVX_NO_BLOCK && kvc_put_block(save->put, i, NULL) == KVC_OK) {
			kvx_stat_add(&worker->stats.bad_messages, 1);
			return KVC_ERR_ARG;
		}
	}

	return KVC_OK;
}

/* BUSY: the space is not open yet, or there is no staging now. */
static kvc_status_t import_put(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t now)
{
	const kvx_wspace_t *space = NULL;
	kvc_status_t status = kvx_wspace_get(worker, (kvx_wspace_ref_t){save->space, save->mem}, now, &space);

	if (status == KVC_OK) {
		const kvk_paged_t *saved = &save->group->saved;
		const kvc_writer_t range = {.rank = worker->rank,
					    .head_first = saved->first_head,
					    .head_count = saved->heads,
					    .layer_first = saved->first_layer,
					    .layer_count = saved->layers};

		save->layout = &space->layouts[save->group->index];
		status = kvc_put_import(space->space, &save->handle, &range, &save->put);
	}
	if (status == KVC_OK) {
		status = check_sources(worker, save);
	}
	if (status == KVC_PENDING || status == KVC_ERR_BUSY) {
		status = now - save->begin_ns > IMPORT_MS * KVX_NS_A_MS ? KVC_ERR_TIMEOUT : KVC_ERR_BUSY;
	}
	atomic_store(&save->imported, status);
	kvx_gate_open(&worker->progress);

	return status;
}

/* Hand in the blocks that are done, from the first one on. */
static kvc_status_t end_blocks(kvx_wsave_t *save, int all)
{
	const uint64_t bytes = (uint64_t)(save->at - save->ended) * save->group->geometry.block_bytes;
	kvc_status_t status;

	if (save->at == save->ended || (!all && bytes < HAND_IN)) {
		return KVC_OK;
	}
	status = kvc_put_end(save->put, save->ended, save->at - save->ended);
	if (status == KVC_OK) {
		save->ended = save->at;
	}

	return status;
}

/* Publish how many puts still wait for an answer. */
static void count_unacked(kvx_worker_t *worker)
{
	kvc_stats_t stats = {.struct_size = sizeof stats};

	kvc_get_stats(worker->kvc, &stats);
	atomic_store(&worker->unacked, (uint32_t)stats.puts_open);
}

/* Free the put. 0: a thread or the device still copies into it. */
static int release_put(kvx_worker_t *worker, kvx_wsave_t *save)
{
	atomic_store(&save->closed, 1u);
	if (atomic_load(&save->dropped)) {
		kvx_wsave_drop(worker, save);
	}
	if (atomic_load(&save->active) > 0) {
		worker->polls_soon = 1;
		return 0;
	}
	kvc_put_free(save->put);
	save->put = NULL;
	count_unacked(worker);
	kvx_wjob_complete(worker, &save->job);

	return 1;
}

/* In host memory: copy up to a batch; a fence may save blocks meanwhile. */
static kvc_status_t copy_batch(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t *p_moved)
{
	kvc_status_t status = KVC_OK;
	uint32_t moved = 0;

	for (uint32_t i = save->at; i < save->n && moved < save->group->batch && status == KVC_OK; i++) {
		if (atomic_load(&save->state[i]) == KVX_MARK_WAITING) {
			status = kvx_wsave_copy_block(worker, save, i, &worker->transfer_scratch);
			moved += status == KVC_OK;
		}
	}
	*p_moved = moved;

	return status;
}

/* Skip blocks that are done. REVOKED: a block was given up. */
static kvc_status_t skip_done(kvx_wsave_t *save)
{
	while (save->at < save->n) {
		const uint8_t state = atomic_load(&save->state[save->at]);

		if (state != KVX_MARK_DONE) {
			return state == KVX_MARK_DROPPED ? KVC_ERR_REVOKED : KVC_OK;
		}
		save->at++;
	}

	return KVC_OK;
}

/* 0: it has waited for too long. */
static int may_wait(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t now)
{
	save->stuck_ns = save->stuck_ns ? save->stuck_ns : now;
	worker->polls_soon = 1;

	return now - save->stuck_ns < STUCK_NS;
}

/* Copy a batch and hand in. OK: continue. */
static kvc_status_t advance_save(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t now, uint32_t *p_moved)
{
	const uint32_t at = save->at, ended = save->ended;
	kvc_status_t status =
		worker->gpu ? kvx_gpu_send_save(worker, save, p_moved) : copy_batch(worker, save, p_moved);
	kvc_status_t passed = skip_done(save), handed;

	status = passed == KVC_OK ? status : passed;
	handed = end_blocks(save, save->at == save->n || status != KVC_OK);
	if (save->at > at || save->ended > ended) {
		save->stuck_ns = 0;
	}
	if (handed != KVC_OK && !kvx_wsave_must_wait(handed)) {
		return handed;
	}
	if ((kvx_wsave_must_wait(status) || kvx_wsave_must_wait(handed)) && !may_wait(worker, save, now)) {
		return KVC_ERR_TIMEOUT;
	}

	return kvx_wsave_must_wait(status) ? KVC_OK : status;
}

/* Import its put, copy a batch, hand in copied blocks. Without p_moved it is imported only. 1: it has been completed.
 */
static int advance_save_job(kvx_worker_t *worker, kvx_wsave_t *save, uint64_t now, uint32_t *p_moved)
{
	kvc_status_t status = (kvc_status_t)atomic_load(&save->imported);

	if (atomic_load(&worker->stop)) {
		atomic_store(&save->dropped, 1u);
	}
	if (status == KVC_PENDING || status == KVC_ERR_BUSY) {
		status = import_put(worker, save, now);
		if (status == KVC_ERR_BUSY && !atomic_load(&worker->stop)) {
			worker->polls_soon = 1;
			return 0;
		}
	}
	if (status == KVC_OK && !atomic_load(&save->dropped)) {
		if (!p_moved) {
			return 0;
		}
		status = advance_save(worker, save, now, p_moved);
	}
	/* What has failed may be a batch for other saves, tried when all blocks of this one were handed in. */
	if (status != KVC_OK && save->ended < save->n) {
		atomic_store(&save->dropped, 1u);
	}
	if (atomic_load(&save->dropped) || save->ended == save->n) {
		return release_put(worker, save);
	}

	return 0;
}

/* ---- one round ------------------------------------------------------------------------------- */

/* The scheduler half gives a number away when nothing of its own uses it; a revoked save may end later. Then the number
 * keeps its space, and libkvc refuses leases and puts of another one there: what comes is not loaded or saved. */
static void take_name(kvx_worker_t *worker, kvx_wname_t *name)
{
	for (const kvx_wjob_t *job = worker->run; job; job = job->next_run) {
		const uint32_t number = job->kind == KVX_WJOB_LOAD ? ((const kvx_wload_t *)job)->space
								   : ((const kvx_wsave_t *)job)->space;

		if (name->ref.mem == KVX_HOST_MEM && number == name->ref.number) {
			kvx_stat_add(&worker->stats.bad_messages, 1);
			free(name);
			return;
		}
	}
	kvx_wspace_add_name(worker, name);
}

/* Take all jobs that were submitted, oldest first. */
static void take_jobs(kvx_worker_t *worker)
{
	kvx_wjob_t *newest = atomic_exchange(&worker->submitted, NULL), *oldest = NULL, *next;

	for (; newest; newest = next) {
		next = newest->next_run;
		newest->next_run = oldest;
		oldest = newest;
	}
	for (kvx_wjob_t *job = oldest; job; job = next) {
		next = job->next_run;
		if (job->kind == KVX_WJOB_NAME) {
			take_name(worker, (kvx_wname_t *)job);
			continue;
		}
		job->next_run = NULL;
		*worker->run_end = job;
		worker->run_end = &job->next_run;
	}
}

/* Advance the jobs of a kind; completed ones belong to the engine's thread again. All saves are imported; the oldest
 * that can is copied, none unless `copy`: while loads are copied. Returns how many blocks of saves were copied. */
static uint32_t step_jobs(kvx_worker_t *worker, kvx_wjob_kind_t kind, uint64_t now, int copy)
{
	kvx_wjob_t **link = &worker->run;
	uint32_t moved = 0;

	while (*link) {
		kvx_wjob_t *job = *link;
		kvx_wjob_t *next = job->next_run;
		uint32_t *p_moved = copy && moved == 0 ? &moved : NULL;
		int completed = 0;

		if (job->kind == kind) {
			completed = kind == KVX_WJOB_LOAD ? advance_load_job(worker, (kvx_wload_t *)job, now)
							  : advance_save_job(worker, (kvx_wsave_t *)job, now, p_moved);
		}
		if (completed) {
			*link = next;
		} else {
			link = &job->next_run;
		}
	}
	worker->run_end = link;

	return moved;
}

/* Copy one batch of the oldest load of that kind that has one. */
static uint32_t copy_oldest(kvx_worker_t *worker, uint32_t async)
{
	for (kvx_wjob_t *job = worker->run; job; job = job->next_run) {
		kvx_wload_t *load = (kvx_wload_t *)job;
		uint32_t copied;

		if (job->kind != KVX_WJOB_LOAD || (load->flags & KVX_MSG_ASYNC) != async) {
			continue;
		}
		copied = kvx_wload_copy(worker, load, &worker->transfer_scratch);
		if (copied > 0) {
			return copied;
		}
	}

	return 0;
}

/* Synchronous loads come before asynchronous ones. */
static uint32_t copy_loads(kvx_worker_t *worker)
{
	const uint32_t copied = worker->threads > 1 ? copy_oldest(worker, 0) : 0;

	return copied > 0 ? copied : copy_oldest(worker, KVX_MSG_ASYNC);
}

static void keep_attached(kvx_worker_t *worker, uint64_t now, int moving)
{
	uint64_t incarnation;

	if (moving && now - worker->polled_ns < POLL_NS) {
		return;
	}
	worker->polled_ns = now;
	if (kv_broken_count() > 0) {
		kvc_abandon(worker->kvc);
	}
	(void)kvc_poll(worker->kvc, 0);
	incarnation = kvc_incarnation(worker->kvc);
	if (incarnation != atomic_load_explicit(&worker->incarnation, memory_order_relaxed)) {
		kvx_stat_add(&worker->stats.attaches, incarnation != 0);
		atomic_store(&worker->incarnation, incarnation);
	}
	if (atomic_load_explicit(&worker->unacked, memory_order_relaxed)) {
		count_unacked(worker);
	}
	kvx_wspaces_poll(worker, now);
	kvx_self_test_run(worker, now);
}

static int run_iteration(kvx_worker_t *worker, int moving)
{
	uint64_t now;
	uint32_t moved;

	worker->polls_soon = 0;
	keep_attached(worker, kvx_worker_now_ns(), moving);
	take_jobs(worker);
	now = kvx_worker_now_ns(); /* only now: no job that was taken began later */
	(void)step_jobs(worker, KVX_WJOB_LOAD, now, 0);
	if (worker->gpu) {
		moved = kvx_gpu_send_prefetched(worker, now);
		moved += kvx_gpu_complete_batches(worker);
		moved += kvx_gpu_send_async_loads(worker, now);
		(void)step_jobs(worker, KVX_WJOB_SAVE, now, 0); /* so that their blocks share batches */
	} else {
		moved = copy_loads(worker);
	}
	moved += step_jobs(worker, KVX_WJOB_SAVE, now, worker->gpu || moved == 0);

	return moved > 0;
}

/* ---- sleeping -------------------------------------------------------------------------------- */

static int is_copying(const kvx_worker_t *worker)
{
	return worker->gpu && atomic_load(&worker->gpu->in_flight) > 0;
}

/* How long to sleep at most. *p_nap: for an event that comes without a message, twice as long each time. */
static uint64_t choose_sleep_ns(const kvx_worker_t *worker, uint64_t *p_nap)
{
	const int copying = is_copying(worker);
	const uint64_t nap = *p_nap, most = copying ? COPY_NS : NAP_MAX_NS;

	if (copying || worker->polls_soon) {
		*p_nap = nap * 2 < most ? nap * 2 : most;
		return copying && atomic_load(&worker->gpu->loads_in_flight) > 0 ? NAP_NS : nap;
	}
	*p_nap = NAP_NS;
	if (worker->run || atomic_load_explicit(&worker->unacked, memory_order_relaxed)) {
		return OPEN_NS;
	}
	if (atomic_load_explicit(&worker->incarnation, memory_order_relaxed) == 0) {
		return AWAY_NS;
	}

	return atomic_load_explicit(&worker->self_test_status, memory_order_relaxed) == KVC_PENDING ? OPEN_NS : IDLE_NS;
}

/* Not at all if the thread was poked since `seen`. */
static void sleep_until_woken(kvx_worker_t *worker, uint32_t seen, uint64_t ns)
{
	struct pollfd fds[2] = {{.fd = worker->event_fd, .events = POLLIN},
				{.fd = kvc_fd(worker->kvc), .events = POLLIN}};
	const struct timespec time = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
	uint64_t count;

	atomic_store(&worker->asleep, 1u);
	if (atomic_load(&worker->pokes) == seen && (!atomic_load(&worker->stop) || is_copying(worker))) {
		(void)ppoll(fds, fds[1].fd >= 0 ? 2 : 1, &time, NULL);
	}
	atomic_store(&worker->asleep, 0u);
	if (fds[0].revents) {
		(void)!read(worker->event_fd, &count, sizeof count);
	}
}

/* 1: do not sleep yet. */
static int spin_briefly(kvx_worker_t *worker, uint32_t seen, uint64_t idle_since)
{
	for (int i = 0; i < 64; i++) {
		if (atomic_load(&worker->pokes) != seen) {
			return 1;
		}
		kvx_cpu_relax();
	}

	return kvx_worker_now_ns() - idle_since < SPIN_NS;
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* Before it stops, it completes the jobs in progress, unless the device hangs. */
static int must_go_on(kvx_worker_t *worker)
{
	if (!atomic_load(&worker->stop)) {
		return 1;
	}

	return (worker->run || atomic_load(&worker->submitted)) && !(worker->gpu && kvx_gpu_shutdown_timed_out(worker));
}

static void *run_transfer(void *arg)
{
	kvx_worker_t *worker = arg;
	uint64_t idle_since = 0, nap = NAP_NS;
	int moving = 0;

	(void)prctl(PR_SET_NAME, "kvx-transfer", 0, 0, 0);
	kvx_cpus_bind_thread(&worker->cpus);
	while (must_go_on(worker)) {
		const uint32_t seen = atomic_load(&worker->pokes);

		moving = run_iteration(worker, moving);
		if (moving) {
			idle_since = 0;
			nap = NAP_NS;
			continue;
		}
		idle_since = idle_since ? idle_since : kvx_worker_now_ns();
		if (spin_briefly(worker, seen, idle_since)) {
			continue;
		}
		if (!worker->run && kvx_prefault_step(worker)) {
			continue;
		}
		sleep_until_woken(worker, seen, choose_sleep_ns(worker, &nap));
	}
	if (!worker->run) {
		kvx_wspaces_close(worker);
	}

	return NULL;
}

kvc_status_t kvx_transfer_start(kvx_worker_t *worker)
{
	sigset_t all, before;
	int failed;

	worker->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (worker->event_fd < 0) {
		return (kvc_status_t)kv_refused(&kv_env_posix, "kvx", "eventfd", errno);
	}
	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &before);
	failed = pthread_create(&worker->thread, NULL, run_transfer, worker);
	worker->started = !failed;
	for (uint32_t i = 0; i + 2 < worker->threads && !failed; i++) {
		failed = pthread_create(&worker->copy_threads[i].thread, NULL, kvx_copy_thread_run,
					&worker->copy_threads[i]);
		worker->copy_thread_count += !failed;
	}
	(void)pthread_sigmask(SIG_SETMASK, &before, NULL);

	return failed ? (kvc_status_t)kv_refused(&kv_env_posix, "kvx", "pthread_create", failed) : KVC_OK;
}

void kvx_transfer_stop(kvx_worker_t *worker)
{
	atomic_store(&worker->stop, 1u);
	if (worker->gpu) {
		kvx_gpu_begin_shutdown(worker);
	}
	kvx_gate_open(&worker->work);
	if (worker->started) {
		atomic_store(&worker->asleep, 1u);
		kvx_transfer_wake(worker);
		(void)pthread_join(worker->thread, NULL);
	}
	for (uint32_t i = 0; i < worker->copy_thread_count; i++) {
		(void)pthread_join(worker->copy_threads[i].thread, NULL);
	}
	if (worker->event_fd >= 0) {
		(void)close(worker->event_fd);
	}
}
