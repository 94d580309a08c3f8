/* Saves out of GPU memory, and fences. A block is taken and submitted in one go under the lock, so that a fence finds
 * it waiting or in flight, never between.
 *
 * What a gather reads is right only if nothing wrote there meanwhile: the engine's next kernels are put in order after
 * it, on the device. Where that cannot be done, what the flight brings is poisoned and counts for nothing, for its
 * digests would be right whatever it read.
 */
#include "worker/cuda/impl.h"

#define SPINS 2000u
#define STAGED_LEAST                                                                                                   \
	(UINT64_C(256)                                                                                                 \
	 << 10) /* bytes beside each other in the pool, from which on the copy engine is worth its calls */

/* ---- submitting
 * -------------------------------------------------------------------------------------------------------------- */

static int is_fenced(const kvx_worker_t *worker, const kvx_wsave_t *save, uint32_t i)
{
	const uint32_t id = save->ids[i];

	return id != KVX_NO_BLOCK && worker->fence[id / 64u] >> id % 64u & 1u;
}

/* Put block i of the save into the flight. Not OK: it stays as it was; ALREADY: there is nothing to do. */
static kvc_status_t board(kvx_worker_t *worker, kvx_flight_t *flight, kvx_wsave_t *save, uint32_t i)
{
	kvx_wgpu_t *gpu = worker->gpu;
	void *data = NULL;
	kvc_status_t status = kvc_put_block(save->put, i, &data);

	/* Without room for its digests it would be copied for nothing, again and again. */
	status = status == KVC_OK ? kvc_put_digests(save->put, i, NULL) : status;
	if (status == KVC_OK && !kvk_gpu_sees(gpu->gpu, data, worker->geometry.block_bytes)) {
		status = KVX_ERR_FAULT;
	}
	if ((status != KVC_OK && status != KVC_ALREADY) || !kvx_wsave_claim(save, i)) {
		return status;
	}
	if (status == KVC_ALREADY) {
		kvx_wsave_unmark(worker, save, i, KVX_MARK_DONE);
		return status;
	}
	if (save->group->padded) {
		kvx_move_zero(worker, save->group, data);
	}
	atomic_fetch_add(&save->active, 1u);
	gpu->moves[flight->n] = (kvk_move_t){
		.block = save->ids[i], .data = data, .leaves = flight->leaves + (size_t)flight->n * worker->words};
	flight->saves[flight->n] = save;
	flight->place[flight->n++] = i;

	return KVC_OK;
}

/* Blocks of the save that wait, those of the fence or from the first on. Not OK: why the next one cannot be copied now,
 * or ever. */
static kvc_status_t board_some(kvx_worker_t *worker, kvx_flight_t *flight, kvx_wsave_t *save, int fence)
{
	kvc_status_t status = KVC_OK;

	for (uint32_t i = fence ? 0 : save->at; i < save->n && flight->n < worker->gpu->save_batch; i++) {
		if (atomic_load(&save->state[i]) != KVX_MARK_WAITING || (fence && !is_fenced(worker, save, i))) {
			continue;
		}
		status = board(worker, flight, save, i);
		if (status != KVC_OK && status != KVC_ALREADY) {
			return status;
		}
	}

	return KVC_OK;
}

/* What one step has to save are many puts, some of a block each: those behind the save come with it. What of them
 * cannot is seen to in their own turn. */
static void board_others(kvx_worker_t *worker, kvx_flight_t *flight, const kvx_wsave_t *save)
{
	for (kvx_wjob_t *job = save->job.next_run; job && flight->n < worker->gpu->save_batch; job = job->next_run) {
		kvx_wsave_t *other = (kvx_wsave_t *)job;

		if (job->kind == KVX_WJOB_SAVE && other->group == save->group && other->layout == save->layout &&
		    atomic_load(&other->imported) == KVC_OK && !atomic_load(&other->dropped) &&
		    !atomic_load(&other->closed)) {
			(void)board_some(worker, flight, other, 0);
		}
	}
}

/* What was put into the flight is given up, or put back. */
static void leave(kvx_worker_t *worker, kvx_flight_t *flight, int give_up)
{
	for (uint32_t m = 0; m < flight->n; m++) {
		kvx_wsave_t *save = flight->saves[m];

		if (give_up) {
			kvx_wsave_unmark(worker, save, flight->place[m], KVX_MARK_DROPPED);
		} else {
			atomic_store(&save->state[flight->place[m]], KVX_MARK_WAITING);
		}
		atomic_fetch_sub(&save->active, 1u);
	}
}

/* Saves have time, and steps run beside them: a matrix product waits for its slowest SM, so that a copy that takes some
 * costs it far more than their share. Beside products of many waves the copy engine takes the link's part, and a kernel
 * on few SMs the rest, which gets them between two waves. Those of a step that generates are of a wave or less and wait
 * for the memory: there, one kernel that reads the cache once and writes the pool disturbs them least. */
static kvk_gpu_way_t way_of(const kvx_worker_t *worker, const kvx_wsave_t *save)
{
	const kvk_paged_t *paged = &save->group->paged;
	const uint64_t run = (uint64_t)paged->layers * worker->geometry.page_bytes *
			     (paged->layers == worker->layout.layers ? paged->heads : 1u);

	if (!atomic_load(&worker->gpu->crowded)) {
		return KVK_GPU_ZERO_COPY;
	}

	return run >= STAGED_LEAST ? KVK_GPU_STAGED : KVK_GPU_AUTO;
}

/* One flight with blocks of the save that wait, those of the fence or from the first on, onto the stream: how many.
 * Lock held. PENDING: no flight is free, or the driver has no job; else why a block cannot be copied now, or ever. */
static kvc_status_t send(kvx_worker_t *worker, kvx_wsave_t *save, int fence, uint32_t *p_sent)
{
	kvx_wgpu_t *gpu = worker->gpu;
	kvx_flight_t *flight = kvx_flight_of_save(gpu, fence);
	kvk_gpu_copy_t copy = {.dir = KVK_GPU_GATHER,
			       .layout = save->layout,
			       .paged = &save->group->paged,
			       .moves = gpu->moves,
			       .way = fence ? KVK_GPU_AUTO : way_of(worker, save),
			       .sms = fence ? 0 : gpu->save_sms,
			       .stream = fence ? gpu->compute : gpu->low};
	kvc_status_t status, sent;

	*p_sent = 0;
	if (!flight) {
		return KVC_PENDING;
	}
	flight->lane = fence ? KVX_LANE_FENCE : KVX_LANE_SAVE;
	flight->n = 0;
	status = board_some(worker, flight, save, fence);
	if (status == KVC_OK && !fence) {
		board_others(worker, flight, save);
	}
	if (flight->n > 0) {
		copy.count = flight->n;
		sent = kvx_flight_submit(worker, flight, &copy);
		*p_sent = sent == KVC_OK ? flight->n : 0;
		if (sent != KVC_OK) {
			leave(worker, flight, sent != KVC_ERR_BUSY);
			status = sent == KVC_ERR_BUSY ? KVC_PENDING : sent;
		}
	}

	return status;
}

/* ---- the transfer thread
 * ----------------------------------------------------------------------------------------------------- */

/* The device sees the next blocks' memory, or that of the first of them: those before memory that is refused now can
 * go. */
static kvc_status_t ensure_next(kvx_worker_t *worker, const kvx_wsave_t *save)
{
	kvc_status_t status = KVC_OK;
	uint32_t looked = 0;

	for (uint32_t i = save->at; i < save->n && looked < worker->gpu->save_batch && status == KVC_OK; i++) {
		void *data = NULL;

		if (atomic_load(&save->state[i]) != KVX_MARK_WAITING) {
			continue;
		}
		if (kvc_put_block(save->put, i, &data) == KVC_OK) {
			status = kvx_slabs_ensure(worker, data, worker->geometry.block_bytes);
		}
		looked++;
	}

	return status == KVC_ERR_BUSY && looked > 1 ? KVC_OK : status;
}

/* Past what has been read. REVOKED: something was given up. */
static kvc_status_t pass(kvx_wsave_t *save)
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

kvc_status_t kvx_gpu_save(kvx_worker_t *worker, kvx_wsave_t *save, uint32_t *p_moved)
{
	kvx_wgpu_t *gpu = worker->gpu;
	const int full = atomic_load(&gpu->airborne) - atomic_load(&gpu->loading) >= KVX_GPU_AHEAD ||
			 (uint64_t)atomic_load(&gpu->leaving) * worker->geometry.block_bytes >= KVX_GPU_AHEAD_BYTES;
	kvc_status_t status = full ? KVC_PENDING : ensure_next(worker, save), passed;

	*p_moved = 0;
	if (status == KVC_OK) {
		(void)pthread_mutex_lock(&gpu->lock);
		status = send(worker, save, 0, p_moved);
		(void)pthread_mutex_unlock(&gpu->lock);
	}
	if (status == KVC_PENDING) {
		worker->waiting = 1;
		status = KVC_OK;
	}

	passed = pass(save);

	return passed == KVC_OK ? status : passed;
}

/* It has been read: its digests go where the daemon looks for them. */
static kvc_status_t take_over(kvx_worker_t *worker, const kvx_flight_t *flight, uint32_t m)
{
	const kvx_wsave_t *save = flight->saves[m];
	uint64_t *leaves = flight->leaves + (size_t)m * worker->words;

	if (save->group->padded) {
		kvx_move_pad(worker, save->group, leaves, worker->gpu->padded);
		leaves = worker->gpu->padded;
	}

	return kvc_put_digests(save->put, flight->place[m], leaves);
}

void kvx_gpu_save_landed(kvx_worker_t *worker, kvx_flight_t *flight, kvc_status_t status)
{
	const kvk_paged_t *paged = &flight->saves[0]->group->paged;
	const uint64_t bytes = (uint64_t)paged->heads * paged->layers * worker->geometry.page_bytes;
	uint32_t done = 0;

	for (uint32_t m = 0; m < flight->n; m++) {
		const int good = status == KVC_OK && !flight->poisoned && take_over(worker, flight, m) == KVC_OK;
		kvx_wsave_t *save = flight->saves[m];

		kvx_wsave_unmark(worker, save, flight->place[m], good ? KVX_MARK_DONE : KVX_MARK_DROPPED);
		done += good ? 1u : 0u;
		atomic_fetch_sub(&save->active, 1u); /* it may be gone now */
	}
	kvx_wcount(&worker->stats.save_bytes, done * bytes);
	kvx_wcount(&worker->stats.save_ns, kvx_worker_now() - flight->begin_ns);
}

/* ---- fences (engine's thread)
 * ------------------------------------------------------------------------------------------------ */

/* Blocks of the fence that nobody has taken. */
static int waits(const kvx_worker_t *worker, kvx_wsave_t *save)
{
	for (uint32_t i = 0; i < save->n; i++) {
		if (is_fenced(worker, save, i) && atomic_load(&save->state[i]) == KVX_MARK_WAITING) {
			return 1;
		}
	}

	return 0;
}

/* One flight of the save's fenced blocks onto the engine's stream: how many. 0: none can go now. */
static uint32_t send_fenced(kvx_worker_t *worker, kvx_wsave_t *save)
{
	kvx_wgpu_t *gpu = worker->gpu;
	uint32_t sent = 0;

	atomic_fetch_add(&save->active, 1u);
	(void)pthread_mutex_lock(&gpu->lock);
	if (!atomic_load(&save->closed)) {
		(void)send(worker, save, 1, &sent);
	}
	(void)pthread_mutex_unlock(&gpu->lock);
	atomic_fetch_sub(&save->active, 1u);

	return sent;
}

static void send_waiting(kvx_worker_t *worker, kvx_wsave_t *save)
{
	if (!waits(worker, save) || !kvx_fence_wait_imported(worker, save)) {
		return;
	}
	while (waits(worker, save) && !atomic_load(&save->closed)) {
		if (send_fenced(worker, save) > 0) {
			continue;
		}
		if (kvx_worker_now() >= worker->fence_retry) {
			return;
		}
		kvx_worker_wake(worker);
		(void)kvx_flight_land(worker);
		kvx_pause();
	}
}

static void drop_waiting(kvx_worker_t *worker, kvx_wsave_t *save)
{
	for (uint32_t i = 0; i < save->n; i++) {
		if (is_fenced(worker, save, i)) {
			kvx_wsave_drop_block(worker, save, i);
		}
	}
}

/* What the engine enqueues from now on comes after the flight, if it reads a block of the fence. */
static void order_flight(kvx_worker_t *worker, kvx_flight_t *flight)
{
	for (uint32_t m = 0; m < flight->n; m++) {
		if (is_fenced(worker, flight->saves[m], flight->place[m])) {
			if (kvk_gpu_order(flight->job, worker->gpu->compute) != KV_OK) {
				flight->poisoned = 1;
			}
			return;
		}
	}
}

void kvx_gpu_fence(kvx_worker_t *worker)
{
	kvx_wgpu_t *gpu = worker->gpu;

	for (kvx_wjob_t *job = worker->saves; job; job = job->next) {
		if (!atomic_load(&job->over)) {
			send_waiting(worker, (kvx_wsave_t *)job);
		}
	}
	/* What still waits is given up before anybody can submit it. */
	(void)pthread_mutex_lock(&gpu->lock);
	for (kvx_wjob_t *job = worker->saves; job; job = job->next) {
		if (!atomic_load(&job->over)) {
			drop_waiting(worker, (kvx_wsave_t *)job);
		}
	}
	for (uint32_t i = KVX_GPU_LOADS; i < KVX_GPU_FLIGHTS; i++) {
		if (gpu->flights[i].job) {
			order_flight(worker, &gpu->flights[i]);
		}
	}
	(void)pthread_mutex_unlock(&gpu->lock);
}
