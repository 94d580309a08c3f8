/* A rank on a GPU: its memory, and the kernels of each half. */
#include "kvk/ep_gpu.h"

#include "cuda/driver/context.h"
#include "cuda/driver/image.h"
#include "ep/device/args.h"

#define FUNCTION_SHARED 8 /* attribute: shared memory a block may take */
#define SMS             16u
#define WIDE            4u /* blocks an SM */
#define TIMEOUT_US      UINT64_C(10000000)
#define LINE            128u
#define PIECE_BYTES     (256u << 10) /* of copies, at least: 5 us of a link, what it costs to use one before the next */
#define MOST_PIECES     4u
#define STAGES          3u /* of a warp, at least, where there is room: one is filled, one is sent, one is read */

enum { ROUTE, PUSH, WAIT, COUNT, PLACE, REDUCE, RETURN, SUM, PULL, FLAG, KERNELS };

static const char *const names[KERNELS] = {KVK_EP_ROUTE,  KVK_EP_PUSH,   KVK_EP_WAIT, KVK_EP_COUNT, KVK_EP_PLACE,
					   KVK_EP_REDUCE, KVK_EP_RETURN, KVK_EP_SUM,  KVK_EP_PULL,  KVK_EP_FLAG};

/* What differs among links: how rows of a number get to the other ranks, and the flag behind them; and, once the flags
 * of others are here, how their rows get to where the rank reads, and the index or the sums of them. `kind`:
 * KVK_EP_DISPATCH or KVK_EP_COMBINE. */
typedef struct gpu_link {
	kv_status_t (*send)(kvk_ep_gpu_t *ep, uint32_t kind, uint64_t number, kvk_cu_stream_t stream);
	kv_status_t (*take)(kvk_ep_gpu_t *ep, uint32_t kind, uint64_t number, kvk_cu_stream_t stream);
} gpu_link_t;

/* Of a slot, over copies: where they run while the caller's stream uses what has come, and what orders the two. Halves
 * of one number come one after the other; those of two do not wait for each other here. */
typedef struct gpu_side {
	kvk_cu_stream_t stream;
	kvk_cu_event_t event;
} gpu_side_t;

struct kvk_ep_gpu {
	kvk_gpu_t *gpu;
	kvk_cu_module_t module;
	kvk_cu_function_t kernels[KERNELS];
	kvk_cu_ptr_t memory;    /* state, index, staged rows */
	kvk_cu_stream_t stream; /* on which the state is read */
	uint8_t *seen;          /* pinned: the state, and the reports of all ranks */
	kvk_ep_args_t args;
	kvk_ep_link_kind_t kind;
	const gpu_link_t *link;
	uint32_t sms, pushers, wide; /* pushers: blocks of the push */
	uint64_t done[4];            /* halves that were enqueued */
	uint64_t reduced;
	kvk_cu_ptr_t own[KVK_EP_MAX_IN_FLIGHT]; /* rows of a slot's tokens */
	uint32_t most[KVK_EP_MAX_IN_FLIGHT];    /* of a slot: what copies are of */
	gpu_side_t sides[KVK_EP_MAX_IN_FLIGHT];
	kvk_cu_ptr_t outbox; /* of copies: a slot's behind the other */
	kvk_cu_stream_t
		compute; /* of copies: where rows are packed and summed; NULL: where they are sent and received */
};

/* ---- memory ---------------------------------------------------------------------------------- */

static size_t append(size_t *p_end, size_t bytes)
{
	const size_t at = (*p_end + LINE - 1) / LINE * LINE;

	*p_end = at + bytes;

	return at;
}

/* What a rank has beside its heap; offsets become addresses by `base`. */
static size_t place(const kvk_ep_plan_t *plan, kvk_ep_link_kind_t kind, kvk_cu_ptr_t base, kvk_ep_args_t *args)
{
	const size_t records = (size_t)plan->shape.ranks * plan->shape.max_tokens;
	size_t end = 0;

	args->near = kind == KVK_EP_PEER ? 0 : base + append(&end, plan->heap_bytes); /* first: regions of 256 bytes */
	args->outbox = kind == KVK_EP_HOST_COPIES
			       ? base + append(&end, plan->shape.in_flight * records * plan->record_bytes)
			       : 0;
	args->state = base + append(&end, sizeof(kvk_ep_state_t));
	args->index = base + append(&end, plan->index_bytes);
	args->masks = base + append(&end, plan->shape.max_tokens);
	args->before = base + append(&end, (size_t)KVK_EP_INDEX_GRID * KVK_EP_WARPS * plan->rank_experts * 4u);
	args->totals = base + append(&end, (size_t)KVK_EP_INDEX_GRID * plan->rank_experts * 4u);
	args->staged = base + append(&end, plan->shape.in_flight * kvk_ep_staged_bytes(plan));

	return end;
}

size_t kvk_ep_gpu_bytes(const kvk_ep_plan_t *plan, kvk_ep_link_kind_t link)
{
	kvk_ep_args_t args;

	return place(plan, link, 0, &args);
}

/* Shared memory of the kernels of the index. */
static size_t index_shared(const kvk_ep_plan_t *plan)
{
	return ((size_t)(KVK_EP_WARPS + 1) * plan->rank_experts + 1u) * sizeof(uint32_t);
}

/* What a block of the push knows of its tokens: of 32 a base for each rank; of each a mask, and a byte a rank. */
static size_t share_bytes(const kvk_ep_gpu_t *ep)
{
	const kvk_ep_shape_t *shape = &ep->args.plan.shape;
	const size_t tokens = (shape->max_tokens + ep->pushers - 1u) / ep->pushers, groups = (tokens + 31u) / 32u;

	return groups * (KVK_EP_MAX_RANKS * sizeof(uint32_t) + 32u * (size_t)(1u + shape->ranks));
}

static kv_status_t size_stages(kvk_ep_gpu_t *ep)
{
	kvk_ep_args_t *args = &ep->args;
	const kvk_ep_plan_t *plan = &args->plan;

	const size_t share = share_bytes(ep), room = share < KVK_EP_SHARED ? KVK_EP_SHARED - share : 0;
	uint32_t stages, warps;

	args->stage_bytes = (uint32_t)((plan->row_bytes + LINE - 1) / LINE * LINE);
	stages = (uint32_t)(room / args->stage_bytes);
	warps = stages / STAGES;
	args->ring_warps = warps == 0 ? 1 : warps < KVK_EP_WARPS ? warps : KVK_EP_WARPS;
	stages /= args->ring_warps;
	args->stages = stages < KVK_EP_MAX_STAGES ? stages : KVK_EP_MAX_STAGES;
	if (args->stages == 0 || index_shared(plan) > KVK_EP_SHARED) {
		return kvk_gpu_set_error(
			KV_ERR_UNSUPPORTED,
			"rows of %zu bytes, %u tokens and %u experts of a rank are more than a block of the GPU has room for",
			plan->row_bytes, plan->shape.max_tokens, plan->rank_experts);
	}

	return KV_OK;
}

/* ---- links ----------------------------------------------------------------------------------- */

/* Kernels that are launched from now on are of this number. */
static void set_number(kvk_ep_gpu_t *ep, uint64_t number)
{
	ep->args.number = ep->kind == KVK_EP_HOST_COPIES ? number : 0;
}

/* In the context. */
static kv_status_t launch(kvk_ep_gpu_t *ep, int kernel, uint32_t grid, size_t shared_bytes, kvk_cu_stream_t stream)
{
	const unsigned threads = kernel == WAIT || kernel == FLAG   ? 32u
				 : kernel == PUSH || kernel == PULL ? KVK_EP_THREADS + 32u * KVK_EP_NOTE_WARPS
								    : KVK_EP_THREADS;
	void *params[] = {&ep->args};

	return KVK_GPU_CALL(ep->gpu, launch, ep->kernels[kernel], grid, 1, 1, threads, 1, 1, (unsigned)shared_bytes,
			    stream, params, NULL);
}

/* Shared memory of a kernel that moves rows. */
static size_t ring_bytes(const kvk_ep_gpu_t *ep)
{
	return (size_t)ep->args.ring_warps * ep->args.stages * ep->args.stage_bytes;
}

static kv_status_t send_by_stores(kvk_ep_gpu_t *ep, uint32_t kind, uint64_t number, kvk_cu_stream_t stream)
{
	(void)number;

	return kind == KVK_EP_DISPATCH ? launch(ep, PUSH, ep->pushers, ring_bytes(ep) + share_bytes(ep), stream)
				       : launch(ep, RETURN, ep->sms, ring_bytes(ep), stream);
}

/* The index of the records that have come. */
static kv_status_t build_index(kvk_ep_gpu_t *ep, kvk_cu_stream_t stream)
{
	const size_t bytes = index_shared(&ep->args.plan);
	const kv_status_t status = launch(ep, COUNT, KVK_EP_INDEX_GRID, bytes, stream);

	return status == KV_OK ? launch(ep, PLACE, KVK_EP_INDEX_GRID, bytes, stream) : status;
}

/* The sums of tokens [first, end); of the last ones `end` is max_tokens. */
static kv_status_t sum_parts(kvk_ep_gpu_t *ep, uint32_t first, uint32_t end, kvk_cu_stream_t stream)
{
	ep->args.sum_first = first;
	ep->args.sum_end = end;

	return launch(ep, SUM, ep->wide, 0, stream);
}

static kv_status_t take_in_place(kvk_ep_gpu_t *ep, uint32_t kind, uint64_t number, kvk_cu_stream_t stream)
{
	(void)number;

	return kind == KVK_EP_DISPATCH ? build_index(ep, stream)
				       : sum_parts(ep, 0, ep->args.plan.shape.max_tokens, stream);
}

static kv_status_t take_by_loads(kvk_ep_gpu_t *ep, uint32_t kind, uint64_t number, kvk_cu_stream_t stream)
{
	const kv_status_t status = launch(ep, PULL, ep->sms, ring_bytes(ep), stream);

	return status == KV_OK ? take_in_place(ep, kind, number, stream) : status;
}

/* ---- copies: what is sent -------------------------------------------------------------------- */

static kv_status_t copy(kvk_ep_gpu_t *ep, kvk_cu_ptr_t to, kvk_cu_ptr_t from, size_t bytes, kvk_cu_stream_t stream)
{
	return KVK_GPU_CALL(ep->gpu, copy_async, to, from, bytes, stream);
}

/* What no rank's tokens exceed in the dispatch of that number. */
static uint32_t most_of(const kvk_ep_gpu_t *ep, uint64_t number)
{
	return ep->most[kvk_ep_slot(number, ep->args.plan.shape.in_flight)];
}

/* Parts of n tokens, of all groups of one rank. `to` and `from` are those of the first: in both memories a group has
 * room for max_tokens, so that parts of all of these are one piece. */
static kv_status_t copy_parts(kvk_ep_gpu_t *ep, kvk_cu_ptr_t to, kvk_cu_ptr_t from, uint32_t n, kvk_cu_stream_t stream)
{
	const kvk_ep_plan_t *plan = &ep->args.plan;
	const size_t room = plan->shape.max_tokens * plan->row_bytes, bytes = n * plan->row_bytes;
	const uint32_t groups = kvk_ep_first_group(plan, 1);
	kv_status_t status = KV_OK;

	if (bytes == room) {
		return copy(ep, to, from, groups * bytes, stream);
	}
	for (uint32_t g = 0; g < groups && status == KV_OK; g++) {
		status = copy(ep, to + g * room, from + g * room, bytes, stream);
	}

	return status;
}

static kv_status_t copy_to(kvk_ep_gpu_t *ep, uint32_t rank, uint32_t kind, uint64_t number, kvk_cu_stream_t stream)
{
	const kvk_ep_args_t *args = &ep->args;
	const kvk_ep_plan_t *plan = &args->plan;
	const uint32_t room = plan->shape.max_tokens, own = args->rank * room, most = most_of(ep, number);
	const size_t first = (size_t)rank * room, notes = (size_t)plan->shape.ranks * room * plan->row_bytes;
	kv_status_t status;

	if (kind == KVK_EP_COMBINE) {
		const size_t at = kvk_ep_part_at(plan, number, kvk_ep_first_group(plan, args->rank), 0);

		const size_t slot = kvk_ep_slot(number, plan->shape.in_flight);
		const kvk_cu_ptr_t staged = args->staged + slot * kvk_ep_staged_bytes(plan);

		return copy_parts(ep, args->heaps[rank] + at, staged + rank * kvk_ep_rank_parts(plan), most, stream);
	}
	status = copy(ep, args->heaps[rank] + kvk_ep_row_at(plan, number, own), args->outbox + first * plan->row_bytes,
		      most * plan->row_bytes, stream);

	return status == KV_OK ? copy(ep, args->heaps[rank] + kvk_ep_note_at(plan, number, own),
				      args->outbox + notes + first * plan->note_bytes, most * plan->note_bytes, stream)
			       : status;
}

/* What is enqueued on `after` from now on comes after all that is on `before`. */
static kv_status_t follow(kvk_ep_gpu_t *ep, kvk_cu_event_t event, kvk_cu_stream_t before, kvk_cu_stream_t after)
{
	kv_status_t status;

	if (before == after) {
		return KV_OK;
	}
	status = KVK_GPU_CALL(ep->gpu, event_record, event, before);

	return status == KV_OK ? KVK_GPU_CALL(ep->gpu, stream_wait, after, event, 0) : status;
}

/* Where kernels run that want all SMs. */
static kvk_cu_stream_t compute_of(const kvk_ep_gpu_t *ep, kvk_cu_stream_t stream)
{
	return ep->compute ? ep->compute : stream;
}

static kv_status_t pack(kvk_ep_gpu_t *ep, uint64_t number, kvk_cu_stream_t stream)
{
	const kvk_ep_plan_t *plan = &ep->args.plan;
	const uint32_t slot = kvk_ep_slot(number, plan->shape.in_flight);
	kv_status_t status;

	ep->args.outbox = ep->outbox + (size_t)slot * plan->shape.ranks * plan->shape.max_tokens * plan->record_bytes;
	status = send_by_stores(ep, KVK_EP_DISPATCH, number, compute_of(ep, stream));

	return status == KV_OK ? follow(ep, ep->sides[slot].event, compute_of(ep, stream), stream) : status;
}

/* The flags go behind the copies: the kernel before them has packed what they copy, and given none. */
static kv_status_t send_by_copies(kvk_ep_gpu_t *ep, uint32_t kind, uint64_t number, kvk_cu_stream_t stream)
{
	kv_status_t status = kind == KVK_EP_DISPATCH ? pack(ep, number, stream) : KV_OK;

	for (uint32_t r = 0; r < ep->args.plan.shape.ranks && status == KV_OK; r++) {
		status = r == ep->args.rank ? KV_OK : copy_to(ep, r, kind, number, stream);
	}
	ep->args.kind = kind;
	ep->args.half = kind == KVK_EP_DISPATCH ? KVK_EP_DISPATCH_SENT : KVK_EP_COMBINE_SENT;
	ep->args.most = most_of(ep, number);

	return status == KV_OK ? launch(ep, FLAG, 1, 0, stream) : status;
}

/* ---- copies: what is received ---------------------------------------------------------------- */

/* In how many pieces what other ranks have sent comes, so that one is used while the next is on its way. */
static uint32_t find_pieces(const kvk_ep_gpu_t *ep, uint32_t kind, uint32_t most)
{
	const kvk_ep_plan_t *plan = &ep->args.plan;
	const size_t pieces = (plan->shape.ranks - 1u) * kvk_ep_padded_bytes(plan, kind, most) / PIECE_BYTES;
	const uint32_t n = pieces < MOST_PIECES ? (uint32_t)pieces : MOST_PIECES;

	return n == 0 ? 1 : n < most ? n : most;
}

enum { ROWS, NOTES };

static kv_status_t fetch_records(kvk_ep_gpu_t *ep, int what, uint64_t number, kvk_cu_stream_t stream)
{
	const kvk_ep_plan_t *plan = &ep->args.plan;
	const kvk_cu_ptr_t heap = ep->args.heaps[ep->args.rank];
	const size_t bytes = most_of(ep, number) * (what == ROWS ? plan->row_bytes : plan->note_bytes);
	kv_status_t status = KV_OK;

	for (uint32_t r = 0; r < plan->shape.ranks && status == KV_OK; r++) {
		const uint32_t first = r * plan->shape.max_tokens;
		const size_t at =
			what == ROWS ? kvk_ep_row_at(plan, number, first) : kvk_ep_note_at(plan, number, first);

		status = r == ep->args.rank ? KV_OK : copy(ep, ep->args.near + at, heap + at, bytes, stream);
	}

	return status;
}

/* The index reads notes alone: it is made while the rows come. */
static kv_status_t index_by_copies(kvk_ep_gpu_t *ep, uint64_t number, kvk_cu_stream_t stream)
{
	const gpu_side_t *side = &ep->sides[kvk_ep_slot(number, ep->args.plan.shape.in_flight)];
	const int is_small = find_pieces(ep, KVK_EP_DISPATCH, most_of(ep, number)) == 1;
	const kvk_cu_stream_t copies = is_small ? stream : side->stream;
	kv_status_t status = follow(ep, side->event, stream, copies);

	if (status == KV_OK) {
		status = fetch_records(ep, NOTES, number, copies);
	}
	if (status == KV_OK) {
		status = follow(ep, side->event, copies, stream);
	}
	if (status == KV_OK) {
		status = fetch_records(ep, ROWS, number, copies);
	}
	if (status == KV_OK) {
		status = build_index(ep, stream);
	}

	return status == KV_OK ? follow(ep, side->event, copies, stream) : status;
}

/* Of tokens [first, first + n). */
static kv_status_t fetch_parts(kvk_ep_gpu_t *ep, uint64_t number, uint32_t first, uint32_t n, kvk_cu_stream_t stream)
{
	const kvk_ep_plan_t *plan = &ep->args.plan;
	const kvk_cu_ptr_t heap = ep->args.heaps[ep->args.rank];
	kv_status_t status = KV_OK;

	for (uint32_t r = 0; r < plan->shape.ranks && status == KV_OK; r++) {
		const size_t at = kvk_ep_part_at(plan, number, kvk_ep_first_group(plan, r), first);

		status = r == ep->args.rank ? KV_OK : copy_parts(ep, ep->args.near + at, heap + at, n, stream);
	}

	return status;
}

/* All of them, on the stream of compute. */
static kv_status_t sum_beside(kvk_ep_gpu_t *ep, uint64_t number, kvk_cu_stream_t stream)
{
	const gpu_side_t *side = &ep->sides[kvk_ep_slot(number, ep->args.plan.shape.in_flight)];
	kv_status_t status = fetch_parts(ep, number, 0, most_of(ep, number), stream);

	if (status == KV_OK) {
		status = follow(ep, side->event, stream, ep->compute);
	}

	return status == KV_OK ? sum_parts(ep, 0, ep->args.plan.shape.max_tokens, ep->compute) : status;
}

/* Tokens are summed while the parts of later ones come. */
static kv_status_t sum_by_copies(kvk_ep_gpu_t *ep, uint64_t number, kvk_cu_stream_t stream)
{
	const gpu_side_t *side = &ep->sides[kvk_ep_slot(number, ep->args.plan.shape.in_flight)];
	const uint32_t most = most_of(ep, number), pieces = find_pieces(ep, KVK_EP_COMBINE, most);
	const kvk_cu_stream_t copies = pieces == 1 ? stream : side->stream;
	kv_status_t status = follow(ep, side->event, stream, copies);

	for (uint32_t i = 0; i < pieces && status == KV_OK; i++) {
		const uint32_t first = most * i / pieces, end = most * (i + 1) / pieces;

		status = fetch_parts(ep, number, first, end - first, copies);
		if (status == KV_OK) {
			status = follow(ep, side->event, copies, stream);
		}
		if (status == KV_OK) {
			status = sum_parts(ep, first, i + 1 < pieces ? end : ep->args.plan.shape.max_tokens, stream);
		}
	}

	return status;
}

static kv_status_t take_by_copies(kvk_ep_gpu_t *ep, uint32_t kind, uint64_t number, kvk_cu_stream_t stream)
{
	if (kind == KVK_EP_DISPATCH) {
		return index_by_copies(ep, number, stream);
	}

	return ep->compute ? sum_beside(ep, number, stream) : sum_by_copies(ep, number, stream);
}

static const gpu_link_t links[] = {[KVK_EP_PEER] = {send_by_stores, take_in_place},
				   [KVK_EP_HOST_COPIES] = {send_by_copies, take_by_copies},
				   [KVK_EP_HOST_KERNELS] = {send_by_stores, take_by_loads}};

/* ---- open ------------------------------------------------------------------------------------ */

static kv_status_t load_kernels(kvk_ep_gpu_t *ep)
{
	kvk_gpu_t *gpu = ep->gpu;
	kv_status_t status = KV_OK;

	if (!kvk_ep_image()) {
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "this build has no GPU kernels");
	}
	if (!gpu->bulk[0]) {
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "%s has no bulk copies", gpu->name);
	}
	status = KVK_GPU_CALL(gpu, module_load, &ep->module, kvk_ep_image());
	ep->module = status == KV_OK ? ep->module : NULL;
	for (int i = 0; i < KERNELS && status == KV_OK; i++) {
		status = KVK_GPU_CALL(gpu, module_function, &ep->kernels[i], ep->module, names[i]);
		if (status == KV_OK && i != WAIT && i != FLAG) {
			status = KVK_GPU_CALL(gpu, function_attribute, ep->kernels[i], FUNCTION_SHARED,
					      (int)KVK_EP_SHARED);
		}
	}

	return status;
}

static size_t seen_bytes(const kvk_ep_plan_t *plan)
{
	return sizeof(kvk_ep_state_t) + (size_t)plan->shape.ranks * 64u;
}

/* In the context. */
static kv_status_t take_memory(kvk_ep_gpu_t *ep)
{
	static const size_t needed[] = {offsetof(kvk_cuda_ops_t, mem_set), offsetof(kvk_cuda_ops_t, context_wait)};
	kvk_gpu_t *gpu = ep->gpu;
	const kvk_ep_plan_t *plan = &ep->args.plan;
	const size_t bytes = kvk_ep_gpu_bytes(plan, ep->kind);
	kv_status_t status = kvk_cuda_require(gpu->cuda, needed, KV_COUNT_OF(needed));

	if (status == KV_OK) {
		status = KVK_GPU_CALL(gpu, mem_alloc, &ep->memory, bytes);
		ep->memory = status == KV_OK ? ep->memory : 0;
	}
	if (status == KV_OK) {
		(void)place(plan, ep->kind, ep->memory, &ep->args);
		ep->outbox = ep->args.outbox;
		ep->args.near = ep->args.near ? ep->args.near : ep->args.heaps[ep->args.rank];
		status = KVK_GPU_CALL(gpu, mem_set, ep->memory, 0, bytes);
	}
	if (status == KV_OK) {
		status = kvk_gpu_check_result(gpu, offsetof(kvk_cuda_ops_t, context_wait), gpu->cuda->context_wait());
	}
	if (status == KV_OK) {
		status = KVK_GPU_CALL(gpu, host_alloc, (void **)&ep->seen, seen_bytes(plan), KVK_CU_HOST_MAPPED);
		ep->seen = status == KV_OK ? ep->seen : NULL;
	}
	if (status == KV_OK) {
		status = KVK_GPU_CALL(gpu, stream_create, &ep->stream, KVK_CU_STREAM_OWN, KVK_CU_PRIORITY_HIGH);
		ep->stream = status == KV_OK ? ep->stream : NULL;
	}

	return status;
}

/* In the context. */
static kv_status_t open_sides(kvk_ep_gpu_t *ep)
{
	const uint32_t slots = ep->kind == KVK_EP_HOST_COPIES ? ep->args.plan.shape.in_flight : 0;
	kvk_gpu_t *gpu = ep->gpu;
	kv_status_t status = KV_OK;

	for (uint32_t i = 0; i < slots && status == KV_OK; i++) {
		gpu_side_t *side = &ep->sides[i];

		status = KVK_GPU_CALL(gpu, stream_create, &side->stream, KVK_CU_STREAM_OWN, KVK_CU_PRIORITY_HIGH);
		side->stream = status == KV_OK ? side->stream : NULL;
		if (status == KV_OK) {
			status = KVK_GPU_CALL(gpu, event_create, &side->event, KVK_CU_EVENT_NO_TIME);
			side->event = status == KV_OK ? side->event : NULL;
		}
	}

	return status;
}

static void close_sides(kvk_ep_gpu_t *ep)
{
	for (size_t i = 0; i < KV_COUNT_OF(ep->sides); i++) {
		if (ep->sides[i].stream) {
			KVK_GPU_CALL(ep->gpu, stream_destroy, ep->sides[i].stream);
		}
		if (ep->sides[i].event) {
			KVK_GPU_CALL(ep->gpu, event_destroy, ep->sides[i].event);
		}
	}
}

/* In the context. */
static kv_status_t open_parts(kvk_ep_gpu_t *ep, uint64_t pace)
{
	kv_status_t status = size_stages(ep);

	/* The warps of a rank that store to others share its pace. */
	if (status == KV_OK && pace != 0) {
		ep->args.pace_ns =
			ep->args.plan.row_bytes * ep->sms * ep->args.ring_warps * UINT64_C(1000000000) / pace;
	}
	if (status == KV_OK) {
		status = load_kernels(ep);
	}

	if (status == KV_OK) {
		status = take_memory(ep);
	}

	return status == KV_OK ? open_sides(ep) : status;
}

kv_status_t kvk_ep_gpu_open(const kvk_ep_gpu_config_t *config, kvk_ep_gpu_t **p_ep)
{
	kvk_gpu_t *gpu = config->gpu;
	kvk_ep_gpu_t *ep;
	kv_status_t status;

	if (config->rank >= config->plan->shape.ranks) {
		return kvk_gpu_set_error(KV_ERR_ARG, "the plan has no rank %u", config->rank);
	}
	if ((size_t)config->link >= KV_COUNT_OF(links)) {
		return kvk_gpu_set_error(KV_ERR_ARG, "there is no link %d", (int)config->link);
	}
	ep = kv_alloc(gpu->env, sizeof *ep);
	if (!ep) {
		return kvk_gpu_set_error(KV_ERR_NOMEM, "out of memory");
	}
	ep->gpu = gpu;
	ep->sms = config->sms ? config->sms : SMS;
	ep->wide = config->wide ? config->wide : WIDE * gpu->sms_all;
	/* A push that packs for copies stays in the rank's memory: all SMs, each with room for one block. */
	ep->pushers = config->link != KVK_EP_HOST_COPIES ? ep->sms : ep->wide < gpu->sms_all ? ep->wide : gpu->sms_all;
	ep->kind = config->link;
	ep->link = &links[config->link];
	ep->compute = config->link == KVK_EP_HOST_COPIES ? config->compute : NULL;
	ep->args.plan = *config->plan;
	ep->args.rank = config->rank;
	ep->args.per_rank = kvk_ep_reciprocal(config->plan->rank_experts);
	ep->args.per_group = kvk_ep_reciprocal(config->plan->group_experts);
	ep->args.timeout_ns = (config->timeout_us ? config->timeout_us : TIMEOUT_US) * 1000u;
	for (uint32_t r = 0; r < config->plan->shape.ranks; r++) {
		ep->args.heaps[r] = config->heaps[r];
	}
	status = kvk_gpu_enter(gpu);
	if (status == KV_OK) {
		status = open_parts(ep, config->link == KVK_EP_HOST_KERNELS ? config->pace : 0);
		kvk_gpu_leave(gpu);
	}
	if (status != KV_OK) {
		kvk_ep_gpu_close(ep);
		return status;
	}
	*p_ep = ep;

	return KV_OK;
}

void kvk_ep_gpu_close(kvk_ep_gpu_t *ep)
{
	if (!ep) {
		return;
	}
	if (kvk_gpu_enter(ep->gpu) == KV_OK) {
		close_sides(ep);
		if (ep->stream) {
			KVK_GPU_CALL(ep->gpu, stream_destroy, ep->stream);
		}
		if (ep->seen) {
			KVK_GPU_CALL(ep->gpu, host_free, ep->seen);
		}
		if (ep->memory) {
			KVK_GPU_CALL(ep->gpu, mem_free, ep->memory);
		}
		if (ep->module) {
			KVK_GPU_CALL(ep->gpu, module_unload, ep->module);
		}
		kvk_gpu_leave(ep->gpu);
	}
	kv_free(ep->gpu->env, ep);
}

/* ---- the halves ------------------------------------------------------------------------------ */

/* In the context. */
static kv_status_t receive(kvk_ep_gpu_t *ep, uint32_t kind, uint64_t number, kvk_cu_stream_t stream)
{
	kv_status_t status;

	set_number(ep, number);
	ep->args.kind = kind;
	ep->args.half = kind == KVK_EP_DISPATCH ? KVK_EP_DISPATCH_RECEIVED : KVK_EP_COMBINE_RECEIVED;
	status = launch(ep, WAIT, 1, 0, stream);

	return status == KV_OK ? ep->link->take(ep, kind, number, stream) : status;
}

static kv_status_t not_next(uint64_t number)
{
	return kvk_gpu_set_error(KV_ERR_ARG, "number %llu is not the next", (unsigned long long)number);
}

static kv_status_t check_next(const kvk_ep_gpu_t *ep, uint32_t half, uint64_t number)
{
	return number == ep->done[half] + 1 && number <= ep->done[half - 1] ? KV_OK : not_next(number);
}

kv_status_t kvk_ep_gpu_dispatch_send(kvk_ep_gpu_t *ep, const kvk_ep_tokens_t *tokens, kvk_cu_stream_t stream,
				     uint64_t *p_number)
{
	const uint64_t number = ep->done[KVK_EP_DISPATCH_SENT] + 1;
	const kvk_ep_shape_t *shape = &ep->args.plan.shape;
	const uint32_t most = tokens->most ? tokens->most : shape->max_tokens;
	kv_status_t status;

	if (most > shape->max_tokens || tokens->n > most) {
		return kvk_gpu_set_error(KV_ERR_ARG,
					 "%u tokens of at most %u are more than the plan's %u, or than these",
					 tokens->n, most, shape->max_tokens);
	}
	if (!kvk_ep_may_send(number, ep->done[KVK_EP_COMBINE_RECEIVED], shape->in_flight)) {
		return kvk_gpu_set_error(KV_ERR_BUSY, "%u dispatches wait for their combine", shape->in_flight);
	}
	status = kvk_gpu_enter(ep->gpu);
	if (status != KV_OK) {
		return status;
	}
	ep->args.tokens = (kvk_ep_device_tokens_t){.rows = (uintptr_t)tokens->rows,
						   .experts = (uintptr_t)tokens->experts,
						   .weights = (uintptr_t)tokens->weights,
						   .n = tokens->n};
	ep->most[kvk_ep_slot(number, shape->in_flight)] = most;
	set_number(ep, number);
	status = launch(ep, ROUTE, (shape->max_tokens + KVK_EP_THREADS - 1u) / KVK_EP_THREADS, 0,
			compute_of(ep, stream));
	if (status == KV_OK) {
		status = ep->link->send(ep, KVK_EP_DISPATCH, number, stream);
	}
	kvk_gpu_leave(ep->gpu);
	ep->done[KVK_EP_DISPATCH_SENT] += status == KV_OK;
	ep->own[kvk_ep_slot(number, shape->in_flight)] = ep->args.tokens.rows;
	*p_number = number;

	return status;
}

kv_status_t kvk_ep_gpu_dispatch_recv(kvk_ep_gpu_t *ep, uint64_t number, kvk_cu_stream_t stream,
				     kvk_ep_gpu_rows_t *p_rows)
{
	const kvk_ep_plan_t *plan = &ep->args.plan;
	const uint32_t slot = kvk_ep_slot(number, plan->shape.in_flight);
	kv_status_t status = check_next(ep, KVK_EP_DISPATCH_RECEIVED, number);

	if (status == KV_OK) {
		status = kvk_gpu_enter(ep->gpu);
	}
	if (status != KV_OK) {
		return status;
	}
	status = receive(ep, KVK_EP_DISPATCH, number, stream);
	kvk_gpu_leave(ep->gpu);
	ep->done[KVK_EP_DISPATCH_RECEIVED] += status == KV_OK;
	p_rows->first = ep->args.index + slot * kvk_ep_slot_words(plan) * sizeof(uint32_t);
	p_rows->record = p_rows->first + (plan->rank_experts + 1u) * sizeof(uint32_t);
	p_rows->rows = ep->args.near + kvk_ep_row_at(plan, number, 0);
	p_rows->own = ep->own[slot];
	p_rows->own_first = ep->args.rank * plan->shape.max_tokens;

	return status;
}

/* The number before may still wait to be sent: staged rows are of a slot, and a slot that is in use is not sent to. */
kv_status_t kvk_ep_gpu_reduce(kvk_ep_gpu_t *ep, uint64_t number, kvk_cu_ptr_t outputs, kvk_cu_stream_t stream)
{
	const int is_next = number == ep->reduced + 1 && number <= ep->done[KVK_EP_DISPATCH_RECEIVED];
	kv_status_t status = is_next ? KV_OK : not_next(number);

	if (status == KV_OK) {
		status = kvk_gpu_enter(ep->gpu);
	}
	if (status != KV_OK) {
		return status;
	}
	set_number(ep, number);
	ep->args.outputs = outputs;
	status = launch(ep, REDUCE, ep->wide, 0, stream);
	kvk_gpu_leave(ep->gpu);
	ep->reduced += status == KV_OK;

	return status;
}

kv_status_t kvk_ep_gpu_combine_send(kvk_ep_gpu_t *ep, uint64_t number, kvk_cu_stream_t stream)
{
	kv_status_t status = number <= ep->reduced ? check_next(ep, KVK_EP_COMBINE_SENT, number) : not_next(number);

	if (status == KV_OK) {
		status = kvk_gpu_enter(ep->gpu);
	}
	if (status != KV_OK) {
		return status;
	}
	set_number(ep, number);
	status = ep->link->send(ep, KVK_EP_COMBINE, number, stream);
	kvk_gpu_leave(ep->gpu);
	ep->done[KVK_EP_COMBINE_SENT] += status == KV_OK;

	return status;
}

kv_status_t kvk_ep_gpu_combine_recv(kvk_ep_gpu_t *ep, uint64_t number, kvk_cu_ptr_t out, kvk_cu_stream_t stream)
{
	kv_status_t status = check_next(ep, KVK_EP_COMBINE_RECEIVED, number);

	if (status == KV_OK) {
		status = kvk_gpu_enter(ep->gpu);
	}
	if (status != KV_OK) {
		return status;
	}
	ep->args.out = out;
	status = receive(ep, KVK_EP_COMBINE, number, stream);
	kvk_gpu_leave(ep->gpu);
	ep->done[KVK_EP_COMBINE_RECEIVED] += status == KV_OK;

	return status;
}

/* ---- how far it has come --------------------------------------------------------------------- */

/* In the context. */
static kv_status_t read_back(kvk_ep_gpu_t *ep)
{
	const kvk_ep_plan_t *plan = &ep->args.plan;
	const kvk_cu_ptr_t to = (uintptr_t)ep->seen, heap = ep->args.heaps[ep->args.rank];
	kvk_cu_event_t event = NULL;
	kv_status_t status = KVK_GPU_CALL(ep->gpu, copy_async, to, ep->args.state, sizeof(kvk_ep_state_t), ep->stream);

	if (status == KV_OK) {
		status = KVK_GPU_CALL(ep->gpu, copy_async, to + sizeof(kvk_ep_state_t), heap + plan->reports,
				      (size_t)plan->shape.ranks * 64u, ep->stream);
	}
	if (status == KV_OK) {
		status = KVK_GPU_CALL(ep->gpu, event_create, &event, KVK_CU_EVENT_NO_TIME);
	}
	if (status != KV_OK) {
		return status;
	}
	status = KVK_GPU_CALL(ep->gpu, event_record, event, ep->stream);
	if (status == KV_OK) {
		status = KVK_GPU_CALL(ep->gpu, event_wait, event);
	}
	KVK_GPU_CALL(ep->gpu, event_destroy, event);

	return status;
}

/* Rows are counted before the copy that takes them has ended. */
static uint64_t find_padding(const kvk_ep_state_t *state, uint32_t kind)
{
	return state->moved[kind] > state->bytes[kind] ? state->moved[kind] - state->bytes[kind] : 0;
}

kv_status_t kvk_ep_gpu_check(kvk_ep_gpu_t *ep, kvk_ep_gpu_report_t *p_report)
{
	const uint32_t ranks = ep->args.plan.shape.ranks;
	uint64_t reports[KVK_EP_MAX_RANKS];
	kvk_ep_state_t state;
	kv_status_t status = kvk_gpu_enter(ep->gpu);

	if (status != KV_OK) {
		return status;
	}
	status = read_back(ep);
	kvk_gpu_leave(ep->gpu);
	if (status != KV_OK) {
		return status;
	}
	memcpy(&state, ep->seen, sizeof state);
	for (uint32_t r = 0; r < ranks; r++) {
		memcpy(&reports[r], ep->seen + sizeof state + (size_t)r * 64u, sizeof reports[r]);
	}
	*p_report = (kvk_ep_gpu_report_t){.stats = {.dispatch_bytes = state.bytes[KVK_EP_DISPATCH],
						    .combine_bytes = state.bytes[KVK_EP_COMBINE],
						    .dispatch_padding = find_padding(&state, KVK_EP_DISPATCH),
						    .combine_padding = find_padding(&state, KVK_EP_COMBINE)},
					  .lost = kvk_ep_name_lost(reports, ranks),
					  .refused = state.refused};

	return state.failed ? kvk_gpu_set_error(KV_ERR_TIMEOUT, "a rank has not come in time (bits %x)", p_report->lost)
	       : state.refused > 0
		       ? kvk_gpu_set_error(KV_ERR_ARG, "%u experts that tokens name are not in the plan", state.refused)
		       : KV_OK;
}
