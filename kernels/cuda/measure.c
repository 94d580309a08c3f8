/* Which way is faster for a cache on this device: both are timed between scratch of the same shape. One job, and
 * several behind each other: the first and the last step of a staged copy have nothing beside them, which counts in a
 * small job and not in a large one. Before that, whether the link is one that few SMs with little on its way fill:
 * another may have several times the rate. */
#include "args.h"
#include "cuda/driver/context.h"

#define SCRATCH_BYTES (UINT64_C(32) << 20)
#define SCRATCH_MOST  (UINT64_C(256) << 20) /* of one block: above, nothing is measured */
#define ROUNDS        3u                    /* the first warms up */
#define WAIT_US       2000000u
#define JOBS          16u /* like a large one */
#define WORTH         8u  /* more SMs, and more in flight, must gain one part in this number */

/* Scratch of both sides. */
typedef struct scratch {
	kvk_gpu_t *gpu;
	const kvk_layout_t *layout;
	kvk_paged_t paged;
	kvk_cu_ptr_t cache;
	uint8_t *pool;
	void **bases;
	kvk_move_t *moves;
	uint32_t blocks;
	kvk_cu_stream_t stream;
	uint64_t link_ns; /* several scatters behind each other, zero copy; 0: not timed yet */
} scratch_t;

/* ---- scratch --------------------------------------------------------------------------------- */

static void free_scratch(scratch_t *s)
{
	kvk_gpu_t *gpu = s->gpu;

	if (s->pool) {
		KVK_GPU_CALL(gpu, host_free, s->pool);
	}
	if (s->cache) {
		KVK_GPU_CALL(gpu, mem_free, s->cache);
	}
	if (s->stream) {
		KVK_GPU_CALL(gpu, stream_destroy, s->stream);
	}
	kv_free(gpu->env, s->bases);
	kv_free(gpu->env, s->moves);
}

/* As many blocks as can be had of what was wished; the driver may have less pinned memory to give. */
static kv_status_t alloc_pool(scratch_t *s, uint64_t block_bytes)
{
	void *pool = NULL;
	kv_status_t status = KV_ERR_NOMEM;

	for (; s->blocks > 0; s->blocks /= 2) {
		status = KVK_GPU_CALL(s->gpu, host_alloc, &pool, s->blocks * block_bytes, KVK_CU_HOST_MAPPED);
		if (status == KV_OK) {
			s->pool = pool;
			break;
		}
	}

	return status;
}

/* In the context. What was taken before a failure is dropped by the caller. */
static kv_status_t alloc_scratch(scratch_t *s, const kvk_paged_t *paged, uint64_t pool_block, uint64_t cache_block)
{
	kvk_gpu_t *gpu = s->gpu;
	kv_status_t status;

	s->bases = kv_alloc(gpu->env, paged->layers * sizeof *s->bases);
	s->moves = kv_alloc(gpu->env, s->blocks * sizeof *s->moves);
	if (!s->bases || !s->moves) {
		return kvk_gpu_set_error(KV_ERR_NOMEM, "out of memory");
	}
	status = alloc_pool(s, pool_block);
	if (status != KV_OK) {
		return status;
	}
	status = KVK_GPU_CALL(gpu, mem_alloc, &s->cache, (uint64_t)s->blocks * paged->layers * cache_block);
	if (status != KV_OK) {
		s->cache = 0;
		return status;
	}
	status = KVK_GPU_CALL(gpu, stream_create, &s->stream, KVK_CU_STREAM_OWN, KVK_CU_PRIORITY_HIGH);
	if (status != KV_OK) {
		s->stream = NULL;
		return status;
	}
	s->paged = *paged;
	s->paged.blocks = s->blocks;
	s->paged.block_stride = cache_block;
	s->paged.head_stride = 0;
	s->paged.base = s->bases;
	for (uint32_t l = 0; l < paged->layers; l++) {
		s->bases[l] = (void *)(uintptr_t)(s->cache +
						  (uint64_t)l * s->blocks * cache_block); /* an address of the device */
	}
	for (uint32_t i = 0; i < s->blocks; i++) {
		s->moves[i] = (kvk_move_t){.block = s->blocks - 1 - i, .data = s->pool + i * pool_block};
	}

	return KV_OK;
}

/* ---- timing ---------------------------------------------------------------------------------- */

/* What is timed: the same copy, several times behind each other. */
typedef struct timing {
	kvk_gpu_dir_t dir;
	kvk_gpu_way_t way;
	uint32_t jobs;
	int wide;
} timing_t;

/* After a job that failed or took too long (before), nobody waits for the others. */
static kv_status_t end_job(kvk_gpu_job_t *job, kv_status_t before)
{
	const kv_status_t status = before == KV_OK ? kvk_gpu_wait(job, WAIT_US) : before;

	kvk_gpu_release_job(job);

	return status == KV_PENDING ? kvk_gpu_set_error(KV_ERR_TIMEOUT, "the copies took too long") : status;
}

/* Both ways copy the same bytes. A staged job takes more memory for its arguments, so fewer of them fit at a time: like
 * a load, the next one waits until the oldest has ended. */
static kv_status_t time_once(const scratch_t *s, const timing_t *t, uint64_t *p_ns)
{
	kvk_gpu_copy_t copy = {.dir = t->dir,
			       .way = t->way,
			       .layout = s->layout,
			       .paged = &s->paged,
			       .moves = s->moves,
			       .count = s->blocks,
			       .sms = t->wide ? KVK_GPU_SMS_WIDE : 0,
			       .max_in_flight = t->wide ? UINT32_MAX : 0,
			       .ready = 1,
			       .stream = s->stream};
	const uint64_t start = kv_now_ns(s->gpu->env);
	kvk_gpu_job_t *jobs[JOBS];
	kv_status_t status = KV_OK, over = KV_OK;
	uint32_t n = 0, ended = 0;

	while (n < t->jobs && status == KV_OK) {
		copy.rest = (t->jobs - 1 - n) * s->blocks;
		status = kvk_gpu_submit(s->gpu, &copy, &jobs[n]);
		if (status == KV_ERR_BUSY && ended < n) {
			status = over = end_job(jobs[ended++], KV_OK);
		} else {
			n += status == KV_OK;
		}
	}
	while (ended < n) {
		over = end_job(jobs[ended++], over);
	}
	*p_ns = kv_now_ns(s->gpu->env) - start;

	return status == KV_OK ? over : status;
}

/* Best time of the rounds. */
static kv_status_t time_way(const scratch_t *s, const timing_t *t, uint64_t *p_ns)
{
	uint64_t best = UINT64_MAX;

	for (uint32_t round = 0; round < ROUNDS; round++) {
		uint64_t ns;
		const kv_status_t status = time_once(s, t, &ns);

		if (status != KV_OK) {
			return status;
		}
		best = round > 0 && ns < best ? ns : best;
	}
	*p_ns = best;

	return KV_OK;
}

static kv_status_t compare_direction(const scratch_t *s, kvk_gpu_choice_t *choice, kvk_gpu_dir_t dir, int large)
{
	const uint32_t jobs = large ? JOBS : 1u;
	uint64_t link = dir == KVK_GPU_SCATTER && large ? s->link_ns : 0, staged = 0;
	kv_status_t status = KV_OK;

	if (link == 0) {
		status = time_way(s, &(timing_t){dir, KVK_GPU_ZERO_COPY, jobs, choice->wide}, &link);
	}
	if (status == KV_OK) {
		status = time_way(s, &(timing_t){dir, KVK_GPU_STAGED, jobs, choice->wide}, &staged);
	}
	if (status == KV_OK) {
		choice->way[dir][large] = staged < link ? KVK_GPU_STAGED : KVK_GPU_ZERO_COPY;
		kv_logf(s->gpu->env, KV_LOG_INFO, "gpu",
			"copies measured device %d dir %s blocks %u zero_copy_us %llu staged_us %llu", s->gpu->ordinal,
			dir == KVK_GPU_GATHER ? "gather" : "scatter", s->blocks * jobs,
			(unsigned long long)(link / 1000), (unsigned long long)(staged / 1000));
	}

	return status;
}

/* Nothing to choose where the SMs are the caller's. */
static kv_status_t measure_width(scratch_t *s, kvk_gpu_choice_t *choice)
{
	uint64_t narrow = 0, wide = 0;
	kv_status_t status;

	if (s->gpu->sms) {
		return KV_OK;
	}
	status = time_way(s, &(timing_t){KVK_GPU_SCATTER, KVK_GPU_ZERO_COPY, JOBS, 0}, &narrow);
	if (status == KV_OK) {
		status = time_way(s, &(timing_t){KVK_GPU_SCATTER, KVK_GPU_ZERO_COPY, JOBS, 1}, &wide);
	}
	if (status == KV_OK) {
		choice->wide = wide < narrow - narrow / WORTH;
		s->link_ns = choice->wide ? wide : narrow;
		kv_logf(s->gpu->env, KV_LOG_INFO, "gpu", "link measured device %d narrow_us %llu wide_us %llu",
			s->gpu->ordinal, (unsigned long long)(narrow / 1000), (unsigned long long)(wide / 1000));
	}

	return status;
}

static kv_status_t compare_ways(scratch_t *s, kvk_gpu_choice_t *choice)
{
	kv_status_t status = measure_width(s, choice);

	for (int i = 0; i < 4 && status == KV_OK; i++) {
		status = compare_direction(s, choice, i / 2 ? KVK_GPU_SCATTER : KVK_GPU_GATHER, i % 2);
	}

	return status;
}

static kv_status_t measure_ways(kvk_gpu_t *gpu, const kvk_layout_t *layout, const kvk_paged_t *paged)
{
	kvk_gpu_choice_t choice = {
		.layout = *layout, .kind = paged->kind, .heads = paged->heads, .layers = paged->layers};
	scratch_t s = {.gpu = gpu, .layout = layout};
	kvk_geometry_t g;
	kv_status_t status;

	kvk_layout_geometry(layout, &g);
	if (g.block_bytes > SCRATCH_MOST) {
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "blocks of %u bytes are too large to measure",
					 g.block_bytes);
	}
	s.blocks = g.block_bytes < SCRATCH_BYTES ? (uint32_t)(SCRATCH_BYTES / g.block_bytes) : 1;
	status = alloc_scratch(&s, paged, g.block_bytes, (uint64_t)paged->heads * g.page_bytes);
	if (status == KV_OK) {
		status = compare_ways(&s, &choice);
	}
	free_scratch(&s);
	if (status == KV_OK) {
		kvk_gpu_keep_choice(gpu, &choice);
	}

	return status;
}

kv_status_t kvk_gpu_measure(kvk_gpu_t *gpu, const kvk_layout_t *layout, const kvk_paged_t *paged)
{
	kv_status_t status;

	if (!gpu->plain[0] || kvk_gpu_find_choice(gpu, layout, paged)) {
		return KV_OK;
	}
	status = kvk_gpu_enter(gpu);
	if (status != KV_OK) {
		return status;
	}
	status = measure_ways(gpu, layout, paged);
	kvk_gpu_leave(gpu);

	return status;
}
