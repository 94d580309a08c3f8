/* Loads into GPU memory. A batch goes onto a stream when its blocks are there; what it has come to is looked at when it
 * lands: the digests the device has compared, and the lease, which has to be valid still when all bytes have come. */
#include "worker/cuda/impl.h"

#define SPINS    4000u
#define NAP_NS   UINT64_C(100000)
#define GRACE_NS UINT64_C(20000000)  /* past its deadline the engine ends a load itself */
#define HASTE_NS UINT64_C(500000000) /* before its deadline a load gives way no more */

/* ---- one batch
 * --------------------------------------------------------------------------------------------------------------- */

/* Leaves of all layers lie in the block's as a move wants them: they are read there. */
static void expect(const kvx_worker_t *worker, const kvx_wpart_t *part, const kvx_source_t *source, kvk_move_t *move)
{
	const uint64_t *leaves = source->leaves + (size_t)part->group->paged.first_head * worker->geometry.leaves;

	move->data = (void *)(uintptr_t)source->data; /* scatter only reads both */
	move->leaves = (uint64_t *)(uintptr_t)leaves;
}

/* The moves of blocks [first, first + count) that are wanted: how many. */
static uint32_t prepare(const kvx_worker_t *worker, const kvx_wpart_t *part, uint32_t first, uint32_t count)
{
	kvx_wgpu_t *gpu = worker->gpu;
	uint32_t n = 0;

	for (uint32_t i = first; i < first + count; i++) {
		if (part->ids[i] == KVX_NO_BLOCK) {
			continue;
		}
		if (part->group->paged.layers == worker->layout.layers) {
			expect(worker, part, &part->sources[i], &gpu->moves[n]);
		} else {
			kvx_move_prepare(worker, part->group, &part->sources[i], &gpu->moves[n],
					 gpu->expected + (size_t)n * worker->words);
		}
		gpu->moves[n++].block = part->ids[i];
	}

	return n;
}

/* So many more blocks of the load need nothing any more. */
static void settle_blocks(kvx_worker_t *worker, kvx_wload_t *load, uint32_t count)
{
	if (atomic_fetch_sub(&load->left, count) == count) {
		kvx_wload_close(worker, load, KVC_OK);
	}
}

/* Blocks of the part that come whole behind these; what comes layer by layer is another way's. */
static uint32_t behind(const kvx_wload_t *load, const kvx_wpart_t *part, const kvx_flight_t *flight)
{
	const uint32_t end = load->of ? part->whole : part->n, at = flight->first + flight->count;

	return flight->layers || end < at ? 0 : end - at;
}

/* Beside the steps by kernels: what an engine copies in before it computes waits until the copy engine has nothing of a
 * load on its way. */
kvc_status_t kvx_gpu_load_submit(kvx_worker_t *worker, kvx_flight_t *flight)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_wload_t *load = flight->load;
	kvx_wpart_t *part = flight->part;
	const uint32_t moves = prepare(worker, part, flight->first, flight->count);
	const int beside = (load->flags & KVX_PLAN_ASYNC) != 0;
	const kvk_gpu_copy_t copy = {.dir = KVK_GPU_SCATTER,
				     .way = beside ? KVK_GPU_ZERO_COPY : KVK_GPU_AUTO,
				     .layout = load->layout,
				     .paged = &part->group->paged,
				     .layer = flight->layer,
				     .layers = flight->layers,
				     .moves = gpu->moves,
				     .count = moves,
				     .of = part->n,
				     .rest = behind(load, part, flight),
				     .ready = 1, /* leased: nobody writes there */
				     .stream = beside ? gpu->beside : gpu->urgent};
	kvc_status_t status = kvc_lease_state(part->lease);

	flight->lane = beside ? KVX_LANE_BESIDE : KVX_LANE_SYNC;
	if (status != KVC_OK) {
		return status;
	}
	if (moves == 0) {
		settle_blocks(worker, load, flight->count * flight->ranges);
		return KVC_OK;
	}
	atomic_fetch_add(&load->active, 1u);
	kvx_clock_turn(gpu, load, copy.stream);
	status = kvx_flight_submit(worker, flight, &copy);
	if (status == KVC_OK) {
		load->sent = 1;
	} else {
		atomic_fetch_sub(&load->active, 1u);
	}
	if (status == (kvc_status_t)KV_ERR_IO) {
		atomic_store(&gpu->loose, 1u); /* some of it may have been enqueued */
	}

	return status;
}

/* A batch of the part, if there is one and a flight for it: how many blocks. Lock held. */
static uint32_t send_part(kvx_worker_t *worker, kvx_wload_t *load, kvx_wpart_t *part)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_flight_t *flight = kvx_flight_of_load(gpu, load->flags);
	kvc_status_t status;

	if (!flight) {
		return 0;
	}
	flight->count = kvx_wload_take(part, load->flags & KVX_PLAN_ASYNC ? gpu->beside_batch : gpu->sync_batch,
				       &flight->first);
	if (flight->count == 0) {
		return 0;
	}
	flight->load = load;
	flight->part = part;
	flight->layer = 0;
	flight->layers = 0;
	flight->ranges = load->ranges;
	status = kvx_gpu_load_submit(worker, flight);
	if (status == KVC_ERR_BUSY) {
		atomic_store(&part->next, flight->first); /* nobody else takes of this load */
	} else if (status != KVC_OK) {
		kvx_wload_close(worker, load, status);
	}
	if (!flight->job) {
		flight->load = NULL;
	}

	return status == KVC_ERR_BUSY ? 0 : flight->count;
}

/* One batch of the load: how many blocks. */
static uint32_t send(kvx_worker_t *worker, kvx_wload_t *load)
{
	uint32_t count = 0;

	atomic_fetch_add(&load->active, 1u);
	if (atomic_load(&load->go) && atomic_load(&load->cause) == KVC_PENDING) {
		(void)pthread_mutex_lock(&worker->gpu->lock);
		for (uint32_t p = 0; p < load->parts && count == 0; p++) {
			count = send_part(worker, load, &load->part[p]);
		}
		(void)pthread_mutex_unlock(&worker->gpu->lock);
	}
	atomic_fetch_sub(&load->active, 1u);

	return count;
}

void kvx_gpu_load_landed(kvx_worker_t *worker, kvx_flight_t *flight, kvc_status_t status)
{
	kvx_wload_t *load = flight->load;
	kvx_wpart_t *part = flight->part;
	const kvk_paged_t *paged = &part->group->paged;
	const kvc_status_t after = kvc_lease_state(part->lease);
	const kvc_status_t verdict = after != KVC_OK ? after : status;
	uint32_t good = 0, move = 0;

	if (verdict == KVC_OK || verdict == KVC_ERR_CORRUPT) {
		for (uint32_t i = flight->first; i < flight->first + flight->count; i++) {
			if (part->ids[i] == KVX_NO_BLOCK) {
				continue;
			}
			if (status == KVC_ERR_CORRUPT && kvk_gpu_bad(flight->job, move)) {
				part->ends[i] = KVX_BLOCK_BAD;
			} else {
				part->came[i] = (uint8_t)(part->came[i] + flight->ranges);
				part->ends[i] = part->came[i] == load->ranges ? KVX_BLOCK_GOOD : part->ends[i];
				good += part->came[i] == load->ranges;
			}
			move++;
		}
		atomic_fetch_add(&load->good, good);
		atomic_fetch_add(&load->bytes,
				 (uint64_t)good * paged->heads * paged->layers * worker->geometry.page_bytes);
	}
	if (verdict == KVC_OK) {
		settle_blocks(worker, load, flight->count * flight->ranges);
	} else {
		kvx_wload_close(worker, load, verdict);
	}
	atomic_fetch_sub(&load->active, 1u);
}

/* ---- beside the steps (transfer thread)
 * -------------------------------------------------------------------------------------- */

/* The device copies what a step waits for, and two streams would share the link. Not while that is behind the step
 * before. */
static int step_loads(kvx_wgpu_t *gpu)
{
	const kvx_flight_t *flight;
	int begun;

	(void)pthread_mutex_lock(&gpu->lock);
	flight = gpu->first[KVX_LANE_SYNC];
	begun = flight && kvx_clock_begun(gpu, flight->load);
	(void)pthread_mutex_unlock(&gpu->lock);

	return begun;
}

uint32_t kvx_gpu_load_beside(kvx_worker_t *worker, uint64_t now)
{
	int busy = -1; /* not known yet */
	uint32_t total = 0, count;

	for (kvx_wjob_t *job = worker->run; job; job = job->next_run) {
		kvx_wload_t *load = (kvx_wload_t *)job;

		if (job->kind != KVX_WJOB_LOAD || !(load->flags & KVX_PLAN_ASYNC)) {
			continue;
		}
		busy = busy < 0 ? step_loads(worker->gpu) : busy;
		if (busy && now + HASTE_NS < load->deadline_ns) {
			worker->waiting = 1;
			continue;
		}
		do {
			count = send(worker, load);
			total += count;
		} while (count > 0);
	}

	return total;
}

/* ---- within a step (engine's thread)
 * ----------------------------------------------------------------------------------------- */

/* Every block of every load has gone, or the load has failed. */
static int all_sent(const kvx_worker_t *worker)
{
	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		for (uint32_t p = 0; p < load->parts && atomic_load(&load->cause) == KVC_PENDING; p++) {
			if (atomic_load(&load->part[p].next) < load->part[p].n) {
				return 0;
			}
		}
	}

	return 1;
}

void kvx_gpu_load_wait(kvx_worker_t *worker, uint32_t seen, uint32_t *p_spins)
{
	const uint64_t now = kvx_worker_now();

	if (kvx_flight_land(worker) > 0) {
		*p_spins = 0;
		return;
	}
	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		if (now >= load->deadline_ns + GRACE_NS) {
			kvx_wload_close(worker, load, KVC_ERR_TIMEOUT);
		}
	}
	if ((*p_spins)++ < SPINS) {
		kvx_pause();
	} else {
		kvx_gate_wait(&worker->progress, seen, NAP_NS);
	}
}

/* A batch of each load that has one: how many blocks. */
static uint32_t send_some(kvx_worker_t *worker)
{
	uint32_t moved = 0;

	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		moved += send(worker, load);
	}

	return moved;
}

static void send_until_sent(kvx_worker_t *worker)
{
	uint32_t spins = 0;

	while (!all_sent(worker)) {
		const uint32_t seen = kvx_gate_seen(&worker->progress);

		if (send_some(worker) > 0) {
			spins = 0;
		} else if (!all_sent(worker)) {
			kvx_gpu_load_wait(worker, seen, &spins);
		}
	}
}

/* Their copies may begin, after all that the engine has enqueued. 0: the driver refuses, so they have failed. */
static int let_go(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;
	const int ordered = kvx_gpu_order(worker, gpu->compute, gpu->urgent);

	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		if (!ordered) {
			kvx_wload_close(worker, load, (kvc_status_t)KV_ERR_IO);
		} else {
			kvx_clock_load(worker, load, gpu->urgent);
		}
		atomic_store(&load->go, 1u);
	}
	kvx_worker_wake(worker);

	return ordered;
}

void kvx_gpu_load_early(kvx_worker_t *worker, int layers)
{
	worker->gpu->sent = 1;
	if (!let_go(worker)) {
		return;
	}
	if (kvx_layers_there(worker) && layers && kvx_layers_send(worker)) {
		return;
	}
	while (send_some(worker) > 0) {
	}
}

void kvx_gpu_load_cancel(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	if (!gpu->sent) {
		return;
	}
	gpu->sent = 0;
	gpu->layers.count = 0;
	for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
		load->skipped = 1; /* also what has come: nobody has waited for it */
		atomic_store(&load->cancel, 1u);
	}
	kvx_worker_wake(worker);
	if (!kvx_gpu_order(worker, gpu->urgent, gpu->compute)) {
		atomic_store(&gpu->loose, 1u);
	}
}

/* What the engine enqueues from now on comes after all of them. */
static void put_before(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	if (!kvx_gpu_order(worker, gpu->urgent, gpu->compute)) {
		atomic_store(&gpu->loose, 1u);
		kvx_gpu_settle(worker); /* then the host waits */
	}
}

int kvx_gpu_load(kvx_worker_t *worker, int layers)
{
	kvx_wgpu_t *gpu = worker->gpu;
	const int early = gpu->sent;
	int layered;

	gpu->sent = 0;
	if (early) {
		layered = layers && gpu->layers.count > 0;
	} else {
		layered = let_go(worker) && layers && kvx_layers_send(worker);
	}
	if (layered) {
		for (kvx_wload_t *load = worker->sync; load; load = load->next_sync) {
			kvx_wcount(&worker->stats.layered, 1);
		}
		return 1;
	}
	gpu->layers.count = 0; /* whatever order they were sent in */
	send_until_sent(worker);
	put_before(worker);

	return 0;
}
