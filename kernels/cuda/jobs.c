/* Jobs: their memory, what is enqueued for them, and how they end. */
#include "jobs.h"

#include "args.h"
#include "cuda/driver/context.h"
#include "copy_per_piece.h"
#include "cuda/driver/launch.h"
#include "cuda/driver/memory.h"
#include "cuda/driver/stage.h"
#include "cuda/driver/upload.h"

#include <stdlib.h>
#include <time.h>

#define ALIGNMENT     UINT64_C(256)
#define SPIN_NS       UINT64_C(50000)
#define SLEEP_MOST_NS UINT64_C(200000)
#define QUERIES       3u /* see KVK_GPU_CALL_AGAIN */

/* ---- memory of a job ------------------------------------------------------------------------- */

/* Offsets within a job's memory. */
typedef struct shape {
	uint64_t moves, bases, leaves, bad, asked, place, inputs, bytes;
} shape_t;

static uint64_t reserve_bytes(uint64_t *p_end, uint64_t bytes)
{
	const uint64_t at = *p_end;

	*p_end = (at + bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;

	return at;
}

static shape_t job_shape(const kvk_gpu_copy_desc_t *desc)
{
	const kvk_gpu_args_t *args = &desc->args;
	shape_t s = {0};

	s.moves = reserve_bytes(&s.bytes, (uint64_t)(1 + desc->staged_ranges) * args->count * sizeof(kvk_gpu_move_t));
	s.bases = reserve_bytes(&s.bytes, (uint64_t)args->layers * sizeof(uint64_t));
	s.inputs = s.bytes;
	s.leaves = reserve_bytes(&s.bytes, desc->digests ? kvk_gpu_count_units(args) * sizeof(uint64_t) : 0);
	s.inputs = desc->copy->dir == KVK_GPU_SCATTER ? s.bytes : s.inputs;
	s.bad = reserve_bytes(&s.bytes, (uint64_t)args->count * sizeof(uint32_t));
	s.asked = reserve_bytes(&s.bytes, (uint64_t)args->count * sizeof(kvk_move_t));
	s.place = reserve_bytes(&s.bytes, desc->way == KVK_GPU_STAGED ? (uint64_t)args->count * sizeof(uint32_t) : 0);

	return s;
}

/* The first gap of the argument buffer that is large enough; *p_after: the job that lies before it (NULL: none). Under
 * the lock. */
static int find_gap(kvk_gpu_t *gpu, uint64_t bytes, kvk_gpu_job_t **p_after, uint64_t *p_at)
{
	kvk_gpu_job_t *after = NULL;
	uint64_t at = 0;

	for (kvk_gpu_job_t *job = gpu->busy; job && job->at - at < bytes; job = job->next) {
		at = job->at + job->bytes;
		after = job;
	}
	*p_after = after;
	*p_at = at;

	return gpu->arg_buffer_bytes - at >= bytes;
}

/* Under the lock. */
static void unlink_job(kvk_gpu_t *gpu, kvk_gpu_job_t *job)
{
	kvk_gpu_job_t **at = &gpu->busy;

	while (*at != job) {
		at = &(*at)->next;
	}
	*at = job->next;
	job->state = KVK_GPU_JOB_FREE;
	job->next = gpu->idle;
	gpu->idle = job;
}

/* Take back what was given back before its copies had ended. A query that is refused says nothing of them. In the
 * context, under the lock. */
static void reclaim_jobs(kvk_gpu_t *gpu)
{
	kvk_gpu_job_t *next;

	for (kvk_gpu_job_t *job = gpu->busy; job; job = next) {
		next = job->next;
		if (job->state == KVK_GPU_JOB_ENDING && !job->lost && gpu->cuda->event_query(job->event) == 0) {
			unlink_job(gpu, job);
			atomic_fetch_sub(&gpu->ending, 1);
		}
	}
}

static kv_status_t alloc_job(kvk_gpu_t *gpu, uint64_t bytes, kvk_gpu_job_t **p_job)
{
	kvk_gpu_job_t *job, *after;
	uint64_t at;
	kv_status_t status = KV_OK;

	if (bytes > gpu->arg_buffer_bytes) {
		return kvk_gpu_set_error(KV_ERR_LIMIT, "the copy has too many blocks: it takes less in parts");
	}
	pthread_mutex_lock(&gpu->lock);
	if (atomic_load(&gpu->ending) > 0) {
		reclaim_jobs(gpu);
	}
	job = gpu->idle;
	if (!job || !find_gap(gpu, bytes, &after, &at)) {
		status = kvk_gpu_set_error(KV_ERR_BUSY, "all copies that may be on their way at a time are");
		kvk_gpu_add_count(&gpu->counters.busy, 1);
	} else {
		gpu->idle = job->next;
		job->next = after ? after->next : gpu->busy;
		*(after ? &after->next : &gpu->busy) = job;
		job->at = at;
		job->bytes = bytes;
		job->state = KVK_GPU_JOB_RUNNING;
		*p_job = job;
	}
	pthread_mutex_unlock(&gpu->lock);

	return status;
}

static void free_job(kvk_gpu_t *gpu, kvk_gpu_job_t *job)
{
	pthread_mutex_lock(&gpu->lock);
	unlink_job(gpu, job);
	pthread_mutex_unlock(&gpu->lock);
}

/* Its copies may still run: it is taken back when its event says so, or never if there is none. */
static void free_job_later(kvk_gpu_t *gpu, kvk_gpu_job_t *job)
{
	pthread_mutex_lock(&gpu->lock);
	job->state = KVK_GPU_JOB_ENDING;
	atomic_fetch_add(&gpu->ending, 1);
	pthread_mutex_unlock(&gpu->lock);
}

/* ---- filling it ------------------------------------------------------------------------------ */

/* Between the caller's leaves, of all layers of the cache, and the job's, of those that are copied. */
static void copy_leaves(const kvk_gpu_job_t *job, uint32_t i, int out)
{
	const size_t row = (size_t)job->layers * job->pieces;

	if (!kv_holds(job->leaves && job->asked[i].leaves)) {
		return; /* what is compared, or stored, does not fit its bytes: the block is corrupt to every reader
			 */
	}

	uint64_t *theirs = job->asked[i].leaves + (size_t)job->layer * job->pieces;
	uint64_t *ours = job->leaves + (size_t)i * job->heads * row;

	for (uint32_t head = 0; head < job->heads; head++) {
		memcpy(out ? theirs : ours, out ? ours : theirs, row * sizeof *ours);
		theirs += (size_t)job->cache_layers * job->pieces;
		ours += row;
	}
}

static void point_into_arg_buffer(kvk_gpu_t *gpu, const kvk_gpu_copy_desc_t *desc, const shape_t *s, kvk_gpu_job_t *job)
{
	uint8_t *base = gpu->arg_buffer + job->at;
	const uint64_t at = gpu->arg_buffer_at + job->at;

	job->moves = (kvk_gpu_move_t *)(void *)(base + s->moves);
	job->bases = (uint64_t *)(void *)(base + s->bases);
	job->bad = (uint32_t *)(void *)(base + s->bad);
	job->asked = (kvk_move_t *)(void *)(base + s->asked);
	job->position = desc->way == KVK_GPU_STAGED ? (uint32_t *)(void *)(base + s->place) : NULL;
	job->leaves = desc->digests ? (uint64_t *)(void *)(base + s->leaves) : NULL;
	job->inputs = s->inputs;
	job->start_at = at;
	job->moves_at = at + s->moves;
	job->bases_at = at + s->bases;
	job->bad_at = at + s->bad;
	job->leaves_at = desc->digests ? at + s->leaves : 0;
}

static int by_pool(const void *a, const void *b)
{
	const kvk_gpu_move_t *x = a, *y = b;

	return x->pool < y->pool ? -1 : x->pool > y->pool;
}

/* Moves in the order of their blocks in the pool, so that the copy engine finds neighbours beside each other.
 * moves[].block is the caller's number of the move until now, and its block from now on. */
static void sort_moves(const kvk_gpu_copy_desc_t *desc, kvk_gpu_job_t *job)
{
	int ascending = 1;

	for (uint32_t i = 1; i < job->count; i++) {
		ascending &= job->moves[i - 1].pool <= job->moves[i].pool;
	}
	if (!job->position || ascending) {
		job->position = NULL;
	} else {
		qsort(job->moves, job->count, sizeof *job->moves, by_pool);
	}
	for (uint32_t k = 0; k < job->count; k++) {
		const uint32_t i = (uint32_t)job->moves[k].block;

		job->asked[k] = desc->copy->moves[i];
		job->moves[k].block = job->asked[k].block;
		if (job->position) {
			job->position[i] = k;
		}
	}
}

/* Addresses of both sides, what was asked for, what is expected. *p_bits: all addresses, or-ed. KV_ERR_ARG: memory
 * nobody sees. KV_ERR_UNREACHABLE: memory that is harder to reach than what was planned for. */
static kv_status_t fill_job(kvk_gpu_t *gpu, const kvk_gpu_copy_desc_t *desc, kvk_gpu_job_t *job, uint64_t *p_bits)
{
	const kvk_gpu_copy_t *copy = desc->copy;
	uint64_t bits = 0;

	job->dir = copy->dir;
	job->way = desc->way;
	job->near = 0;
	job->layout = *copy->layout;
	job->count = copy->count;
	job->heads = desc->args.heads;
	job->layers = desc->args.layers;
	job->pieces = desc->args.pieces;
	job->layer = copy->layer;
	job->cache_layers = copy->paged->layers;
	job->pool_first = desc->args.pool_first;
	job->pool_head = desc->args.pool_head;
	for (uint32_t l = 0; l < job->layers; l++) {
		job->bases[l] = (uint64_t)(uintptr_t)copy->paged->base[copy->layer + l];
		bits |= job->bases[l];
	}
	for (uint32_t i = 0; i < copy->count; i++) {
		const kvk_move_t *move = &copy->moves[i];
		kvk_gpu_mem_kind_t at = KVK_GPU_MEM_HOST;
		const kv_status_t status =
			kvk_gpu_translate(gpu, move->data, desc->pool_bytes, &job->moves[i].pool, &at);

		if (status != KV_OK) {
			return status;
		}
		if (at > desc->kind) {
			return KV_ERR_UNREACHABLE;
		}
		if (desc->way == KVK_GPU_COPY_PER_PIECE && move->leaves && at != KVK_GPU_MEM_HOST) {
			return kvk_gpu_set_error(
				KV_ERR_UNSUPPORTED,
				"no kernel makes these digests, and the host cannot read the memory of a device");
		}
		job->near |= at == KVK_GPU_MEM_NEAR;
		job->moves[i].block = i;
		job->bad[i] = 0;
		bits |= job->moves[i].pool;
	}
	sort_moves(desc, job);
	for (uint32_t k = 0; k < job->count; k++) {
		if (job->asked[k].leaves && copy->dir == KVK_GPU_SCATTER) {
			copy_leaves(job, k, 0);
		}
	}
	*p_bits = bits;

	return KV_OK;
}

/* ---- enqueueing ------------------------------------------------------------------------------ */

static kv_status_t copy_zero_copy(kvk_gpu_t *gpu, const kvk_gpu_copy_desc_t *desc, const kvk_gpu_job_t *job,
				  uint64_t bits)
{
	const kvk_gpu_copy_t *copy = desc->copy;
	const kvk_gpu_launch_t launch = {.dir = copy->dir,
					 .sms = desc->sms,
					 .addresses = bits,
					 .max_in_flight =
						 copy->dir == KVK_GPU_SCATTER && !job->near ? desc->max_in_flight : 0,
					 .stream = copy->stream};
	const uint64_t inputs = kvk_gpu_upload_args(gpu, job, copy->stream);
	kvk_gpu_args_t args = desc->args;

	args.moves = inputs + (job->moves_at - job->start_at);
	args.bases = inputs + (job->bases_at - job->start_at);
	args.leaves = job->leaves_at;
	if (job->leaves_at && copy->dir == KVK_GPU_SCATTER) {
		args.leaves = inputs + (job->leaves_at - job->start_at);
	}
	args.bad = job->leaves_at ? job->bad_at : 0;
	if (copy->dir == KVK_GPU_SCATTER && desc->kind == KVK_GPU_MEM_HOST) {
		atomic_store(&gpu->linked, (uintptr_t)copy->stream);
	}

	return kvk_gpu_launch_copy(gpu, &launch, &args);
}

static void count_copy(kvk_gpu_t *gpu, const kvk_gpu_copy_desc_t *desc)
{
	const kvk_gpu_args_t *args = &desc->args;
	kvk_gpu_counters_t *c = &gpu->counters;

	kvk_gpu_add_count(desc->copy->dir == KVK_GPU_GATHER ? &c->gathers : &c->scatters, 1);
	kvk_gpu_add_count(&c->bytes, (uint64_t)args->count * args->heads * args->layers * args->page_bytes);
	kvk_gpu_add_count(desc->way == KVK_GPU_COPY_PER_PIECE ? &c->copy_per_piece
			  : desc->way == KVK_GPU_STAGED       ? &c->staged
							      : &c->zero_copy,
			  1);
	kvk_gpu_add_count(&c->far, desc->kind == KVK_GPU_MEM_FAR);
}

/* In the context. A failure half way leaves copies on the stream: the job's event tells when they have ended, unless it
 * is lost. */
static kv_status_t enqueue_copy(kvk_gpu_t *gpu, const kvk_gpu_copy_desc_t *desc, kvk_gpu_job_t *job, uint64_t bits)
{
	const kvk_cu_stream_t stream = desc->copy->stream;
	kv_status_t status = KV_OK;

	if (desc->args.count > 0) {
		switch (desc->way) {
		case KVK_GPU_STAGED:
			status = kvk_gpu_copy_staged(gpu, desc, job);
			break;
		case KVK_GPU_COPY_PER_PIECE:
			status = kvk_gpu_copy_per_piece(gpu, desc, job);
			break;
		case KVK_GPU_AUTO:
		case KVK_GPU_ZERO_COPY:
			status = copy_zero_copy(gpu, desc, job, bits);
			break;
		}
	}
	/* Also after a failure: what the driver took before it still runs, and only an event behind it says when the
	 * memory of the job may be used again. Without the event the job is lost and its memory stays taken. */
	if (KVK_GPU_CALL_AGAIN(gpu, event_record, job->event, stream) != KV_OK) {
		job->lost = 1;
		status = KV_ERR_IO;
	}

	return status;
}

/* A desc, and a job that is filled for it. */
static kv_status_t prepare_job(kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy, kvk_gpu_mem_kind_t kind,
			       kvk_gpu_copy_desc_t *desc, kvk_gpu_job_t **p_job, uint64_t *p_bits)
{
	kv_status_t status = kvk_gpu_describe_copy(gpu, copy, kind, desc);
	kvk_gpu_job_t *job = NULL;
	shape_t shape;

	if (status != KV_OK) {
		return status;
	}
	shape = job_shape(desc);
	status = alloc_job(gpu, shape.bytes, &job);
	if (status == KV_OK && !kv_holds(job)) {
		status = KV_ERR_INTERNAL;
	}
	if (status != KV_OK) {
		return status;
	}
	point_into_arg_buffer(gpu, desc, &shape, job);
	status = fill_job(gpu, desc, job, p_bits);
	if (status != KV_OK) {
		free_job(gpu, job);
		return status;
	}
	*p_job = job;

	return KV_OK;
}

kv_status_t kvk_gpu_submit(kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy, kvk_gpu_job_t **p_job)
{
	kvk_gpu_copy_desc_t desc;
	kvk_gpu_job_t *job = NULL;
	uint64_t bits = 0;
	kvk_gpu_mem_kind_t kind = copy->count > 0 ? kvk_gpu_guess_kind(gpu, copy->moves[0].data) : KVK_GPU_MEM_HOST;
	kv_status_t status = kvk_gpu_enter(gpu);

	if (status != KV_OK) {
		return KV_ERR_IO;
	}
	status = prepare_job(gpu, copy, kind, &desc, &job, &bits);
	while (status == KV_ERR_UNREACHABLE && kind < KVK_GPU_MEM_FAR) {
		status = prepare_job(gpu, copy, ++kind, &desc, &job, &bits);
	}
	if (status != KV_OK) {
		goto out_context;
	}
	job->refused = enqueue_copy(gpu, &desc, job, bits) != KV_OK;
	if (job->refused && job->lost) {
		free_job_later(gpu, job);
		status = KV_ERR_IO;
		goto out_context;
	}
	job->status = KV_PENDING;
	if (!job->refused) {
		count_copy(gpu, &desc);
	}
	*p_job = job;

out_context:
	kvk_gpu_leave(gpu);

	return status;
}

/* ---- ending ---------------------------------------------------------------------------------- */

static kv_status_t collect_digests(kvk_gpu_job_t *job)
{
	uint64_t corrupt = 0;

	if (job->way == KVK_GPU_COPY_PER_PIECE && job->leaves) {
		kvk_gpu_digest_pieces(job);
	}
	for (uint32_t i = 0; i < job->count; i++) {
		if (!job->asked[i].leaves) {
			job->bad[i] = 0;
		} else if (job->dir == KVK_GPU_GATHER) {
			copy_leaves(job, i, 1);
		} else {
			corrupt += job->bad[i] != 0;
		}
	}
	if (corrupt > 0) {
		kvk_gpu_add_count(&job->gpu->counters.corrupt, corrupt);
		return kvk_gpu_set_error(KV_ERR_CORRUPT, "%llu of %u blocks do not match their digests",
					 (unsigned long long)corrupt, job->count);
	}

	return KV_OK;
}

static kv_status_t job_result(kvk_gpu_job_t *job)
{
	return job->refused ? kvk_gpu_set_error(KV_ERR_IO, "the driver has refused a part of the copy")
			    : collect_digests(job);
}

/* PENDING: its copies have not ended. KV_ERR_IO: the driver does not say whether they have. */
static kv_status_t query_end(const kvk_gpu_job_t *job)
{
	kvk_gpu_t *gpu = job->gpu;
	kv_status_t status = KV_ERR_IO;

	for (uint32_t i = 0; i < QUERIES && status == KV_ERR_IO; i++) {
		if (kvk_gpu_enter(gpu) == KV_OK) {
			const int error = gpu->cuda->event_query(job->event);

			status = error == KVK_CU_NOT_READY
					 ? KV_PENDING
					 : kvk_gpu_check_result(gpu, offsetof(kvk_cuda_ops_t, event_query), error);
			kvk_gpu_leave(gpu);
		}
	}

	return status;
}

kv_status_t kvk_gpu_poll(kvk_gpu_job_t *job)
{
	kv_status_t end;

	if (job->state == KVK_GPU_JOB_OVER) {
		return job->status;
	}
	end = query_end(job);
	if (end == KV_PENDING) {
		return KV_PENDING;
	}
	job->status = end == KV_OK ? job_result(job) : end;
	job->state = KVK_GPU_JOB_OVER;

	return job->status;
}

static void sleep_briefly(uint64_t waited_ns)
{
	const uint64_t ns = waited_ns / 8 < SLEEP_MOST_NS ? waited_ns / 8 : SLEEP_MOST_NS;
	const struct timespec ts = {.tv_nsec = (long)ns};

	nanosleep(&ts, NULL);
}

kv_status_t kvk_gpu_wait(kvk_gpu_job_t *job, uint64_t timeout_us)
{
	const kv_env_t *env = job->gpu->env;
	const uint64_t start = kv_now_ns(env);
	kv_status_t status = kvk_gpu_poll(job);

	while (status == KV_PENDING) {
		const uint64_t waited = kv_now_ns(env) - start;

		if (waited / 1000 >= timeout_us) {
			break;
		}
		if (waited > SPIN_NS) {
			sleep_briefly(waited);
		}
		status = kvk_gpu_poll(job);
	}

	return status;
}

int kvk_gpu_move_is_bad(const kvk_gpu_job_t *job, uint32_t i)
{
	return job->status == KV_ERR_CORRUPT && i < job->count && job->bad[job->position ? job->position[i] : i] != 0;
}

kv_status_t kvk_gpu_order_after_job(kvk_gpu_job_t *job, kvk_cu_stream_t stream)
{
	kvk_gpu_t *gpu = job->gpu;
	kv_status_t status = kvk_gpu_enter(gpu);

	if (status == KV_OK) {
		status = KVK_GPU_CALL(gpu, stream_wait, stream, job->event, 0);
		kvk_gpu_leave(gpu);
	}

	return status;
}

void kvk_gpu_release_job(kvk_gpu_job_t *job)
{
	/* A query that failed says nothing about what the device still does. */
	if (job && job->state == KVK_GPU_JOB_OVER && job->status != KV_ERR_IO) {
		free_job(job->gpu, job);
	} else if (job) {
		free_job_later(job->gpu, job);
	}
}

/* ---- init and fini --------------------------------------------------------------------------- */

kv_status_t kvk_gpu_jobs_init(kvk_gpu_t *gpu, uint32_t count)
{
	kv_status_t status;

	gpu->jobs = kv_alloc(gpu->env, count * sizeof *gpu->jobs);
	if (!gpu->jobs) {
		return kvk_gpu_set_error(KV_ERR_NOMEM, "out of memory");
	}
	for (uint32_t i = 0; i < count; i++) {
		kvk_gpu_job_t *job = &gpu->jobs[i];

		status = KVK_GPU_CALL(gpu, event_create, &job->event, KVK_CU_EVENT_NO_TIME);
		if (status != KV_OK) {
			kvk_gpu_jobs_fini(gpu);
			return status;
		}
		job->gpu = gpu;
		job->next = gpu->idle;
		gpu->idle = job;
		gpu->job_count++;
	}

	return KV_OK;
}

void kvk_gpu_jobs_fini(kvk_gpu_t *gpu)
{
	for (kvk_gpu_job_t *job = gpu->busy; job; job = job->next) {
		KVK_GPU_CALL(gpu, event_wait, job->event);
	}
	for (uint32_t i = 0; i < gpu->job_count; i++) {
		KVK_GPU_CALL(gpu, event_destroy, gpu->jobs[i].event);
	}
	kv_free(gpu->env, gpu->jobs);
}
