/* ring.cuh -- rows to other ranks: the stages in shared memory through which a warp of a kernel of ep.cu moves them. */
#ifndef KVK_EP_RING_CUH
#define KVK_EP_RING_CUH

/* A warp's stages, in turn: a row is loaded into one, and goes from it to other ranks. A load may be `ahead` items
 * before the one that goes; so when it begins, all but (stages - 1) / 2 of the stores before have been read. */
struct ring {
	uint64_t *full; /* [stages] */
	uint8_t *stage; /* [stages][stage_bytes] */
	uint32_t stages, stage_bytes, ahead;
	uint32_t loaded, sent;
	uint64_t due; /* of a paced warp: the time of its next store */
};

static __device__ ring open_ring(const kvk_ep_args_t &a, uint64_t (*barriers)[KVK_EP_MAX_STAGES])
{
	const uint32_t warp = threadIdx.x / LANES, stages = a.stages;
	ring r = {barriers[warp], (uint8_t *)shared + (size_t)warp * stages * a.stage_bytes, stages, a.stage_bytes, stages / 2, 0, 0, 0};

	if (threadIdx.x % LANES == 0) {
		for (uint32_t i = 0; i < stages; i++) {
			barrier_init(&r.full[i], 1);
		}
		barrier_init_done();
	}
	__syncthreads();

	return r;
}

static __device__ __forceinline__ bool may_load(const ring &r)
{
	return r.loaded <= r.sent + r.ahead;
}

static __device__ __forceinline__ uint8_t *stage_of(const ring &r, uint32_t i)
{
	return r.stage + (size_t)i * r.stage_bytes;
}

static __device__ __forceinline__ void load_row(ring &r, uint64_t from, uint32_t bytes)
{
	const uint32_t i = r.loaded++ % r.stages;

	if (threadIdx.x % LANES == 0) {
		switch ((r.stages - 1) / 2) {
		case 0: bulk_stores_read<0>(); break;
		case 1: bulk_stores_read<1>(); break;
		case 2: bulk_stores_read<2>(); break;
		default: bulk_stores_read<3>(); break;
		}
		barrier_expect(&r.full[i], bytes);
		bulk_load(stage_of(r, i), from, bytes, &r.full[i]);
	}
}

/* The row of the next stage has come; the caller sends it, one group. */
static __device__ __forceinline__ uint8_t *next_row(ring &r)
{
	const uint32_t i = r.sent % r.stages;

	barrier_wait(&r.full[i], r.sent++ / r.stages % 2);

	return stage_of(r, i);
}

/* A link that is full holds up all memory of the device. */
static __device__ __forceinline__ void keep_pace(const kvk_ep_args_t &a, ring &r)
{
	if (a.pace_ns != 0) {
		uint64_t now = now_ns();

		while (now < r.due) {
			__nanosleep(64);
			now = now_ns();
		}
		r.due = now + a.pace_ns;
	}
}

static __device__ __forceinline__ void close_ring(void)
{
	if (threadIdx.x % LANES == 0) {
		bulk_stores_done();
	}
}

#endif
