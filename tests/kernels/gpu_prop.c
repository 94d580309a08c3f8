/* gpu_prop: the device's copies are those of the CPU, bit for bit.
 *
 * Draws layouts, caches, ranges and moves from a seed; gathers and scatters them on the device between a paged cache in
 * its memory and blocks in registered host memory, in its own memory and in a peer's (when there is one), both as the
 * driver allocates it and mapped from a descriptor (kvk/device.h, kvk_gpu_map()); does the same with kvk/move.h over
 * host copies; and compares every byte of both sides, also those that nobody was to touch, and every digest. Then it
 * flips bits: all must be found, in the right move, and no other.
 *
 *     gpu_prop [--seed N] [--cases N] [--flips N] [--mib N] [--peer 1]     exit 0: all equal; 1: not; 77: no device
 *     here
 *
 * --peer 1: all blocks in the memory of a second
 * device.
 */
#include "kvk/device.h"
#include "kvk/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_LAYERS 8u
#define MAX_MOVES  96u
#define MAX_BLOCK  (8u << 20)
#ifndef GPU_PROP_IMAGE
#define GPU_PROP_IMAGE NULL /* the build's own */
#endif
#define PATIENCE UINT64_C(60000000) /* us */

typedef enum place { HOST, OWN, MAPPED, PEER, MAPPED_PEER, PLACES } place_t;

/* One memory, twice: as the twin and as the device see it. */
typedef struct area {
	uint8_t *twin;
	uint8_t *real;     /* address for the device */
	kvk_cu_ptr_t ptr;  /* 0: host memory, `real` is read as it is */
	uint8_t *readback; /* of device memory */
} area_t;

typedef struct world {
	const kvk_cuda_ops_t *cuda;
	kvk_gpu_t *gpu;
	kvk_cu_context_t context;
	kvk_cu_stream_t stream;
	kvk_cu_event_t event;
	size_t bytes; /* of each area */
	area_t cache, pools[PLACES];
	int has_peer, peer_only;
	place_t usable[PLACES]; /* where blocks may lie */
	uint32_t usable_count;
	uint64_t rng;
	uint64_t copies, compared, flips, caught, cases_in[PLACES];
} world_t;

static uint64_t below(world_t *w, uint64_t n)
{
	uint64_t z = w->rng += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);

	return (z ^ (z >> 31)) % n;
}

static void must(int error, const char *what)
{
	if (error != 0) {
		printf("gpu_prop: %s: error %d, %s\n", what, error, kvk_gpu_last_error());
		exit(1);
	}
}

/* ---- memory ---------------------------------------------------------------------------------- */

static uint8_t *host_memory(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED) {
		printf("gpu_prop: out of memory\n");
		exit(1);
	}
	madvise(p, bytes, MADV_HUGEPAGE);

	return p;
}

static void wait_for_stream(world_t *w)
{
	must(w->cuda->event_record(w->event, w->stream), "event_record");
	must(w->cuda->event_wait(w->event), "event_wait");
}

/* Twin -> real. */
static void upload(world_t *w, area_t *a, size_t bytes)
{
	if (!a->ptr) {
		memcpy(a->real, a->twin, bytes);
		return;
	}
	memcpy(a->readback, a->twin, bytes);
	must(w->cuda->copy_async(a->ptr, (kvk_cu_ptr_t)(uintptr_t)a->readback, bytes, w->stream), "upload");
	wait_for_stream(w);
}

static const uint8_t *download(world_t *w, area_t *a, size_t bytes)
{
	if (!a->ptr) {
		return a->real;
	}
	must(w->cuda->copy_async((kvk_cu_ptr_t)(uintptr_t)a->readback, a->ptr, bytes, w->stream), "download");
	wait_for_stream(w);

	return a->readback;
}

static void randomise(world_t *w, area_t *a, size_t bytes)
{
	uint64_t x = below(w, UINT64_MAX) | 1;

	for (size_t i = 0; i < bytes / 8; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		memcpy(a->twin + 8 * i, &x, 8);
	}
	upload(w, a, bytes);
}

/* Memory of a device as another process would hand it out. 0: there is none, and why is said. */
static kvk_cu_ptr_t map_memory(world_t *w, uint32_t ordinal)
{
	kvk_device_info_t info[2];
	kvk_device_t *device;
	void *base = NULL;
	uint32_t count;
	size_t bytes;
	kv_status_t status;
	int fd = -1;

	must((int)kvk_device_list(w->cuda, info, 2, &count), "device_list");
	status = kvk_device_open(w->cuda, info[ordinal].uuid, &device);
	if (status == KV_ERR_UNSUPPORTED || status == KV_ERR_NOT_FOUND) {
		printf("gpu_prop: no mapped memory of device %u: %s\n", ordinal, kvk_gpu_last_error());
		return 0;
	}
	must((int)status, "device_open");
	bytes = (w->bytes + kvk_device_grain(device) - 1) / kvk_device_grain(device) * kvk_device_grain(device);
	must((int)kvk_device_alloc(device, bytes, &fd), "device_alloc");
	kvk_device_close(device);
	status = kvk_gpu_map(w->gpu, fd, bytes, &base);
	close(fd);
	if (status != KV_OK && ordinal > 0) {
		printf("gpu_prop: no mapped memory of device %u: %s\n", ordinal, kvk_gpu_last_error());
		return 0;
	}
	must((int)status, "map");

	return (kvk_cu_ptr_t)(uintptr_t)base;
}

static kvk_cu_ptr_t allocate(world_t *w, int ordinal)
{
	kvk_cu_context_t other, popped;
	kvk_cu_ptr_t ptr;
	int device;

	must(w->cuda->device_get(&device, ordinal), "device");
	must(w->cuda->context_retain(&other, device), "context");
	must(w->cuda->context_push(other), "context_push");
	must(w->cuda->mem_alloc(&ptr, w->bytes), "mem_alloc");
	must(w->cuda->context_pop(&popped), "context_pop");

	return ptr;
}

/* 0: there is no such memory here. */
static int make_area(world_t *w, area_t *a, place_t place)
{
	const int peer = place == PEER || place == MAPPED_PEER;

	a->twin = host_memory(w->bytes);
	if (place == HOST) {
		a->real = host_memory(w->bytes);
		must((int)kvk_gpu_register(w->gpu, a->real, w->bytes), "register");
		return 1;
	}
	a->ptr = place == MAPPED || place == MAPPED_PEER ? map_memory(w, (uint32_t)peer) : allocate(w, peer);
	if (!a->ptr) {
		return 0;
	}
	a->real = (uint8_t *)(uintptr_t)a->ptr;
	a->readback = host_memory(w->bytes);
	must((int)kvk_gpu_register(w->gpu, a->readback, w->bytes), "register");

	return 1;
}

static void make_pools(world_t *w)
{
	for (place_t place = HOST; place < PLACES; place++) {
		const int peer = place == PEER || place == MAPPED_PEER;

		if ((!peer || w->has_peer) && make_area(w, &w->pools[place], place) && (peer || !w->peer_only)) {
			w->usable[w->usable_count++] = place;
		}
	}
}

static int make_world(world_t *w)
{
	const char *why;
	int count = 0, device = 0;

	w->cuda = kvk_cuda_load(&why);
	if (!w->cuda) {
		printf("# SKIP: %s\n", why);
		return 77;
	}
	if (kvk_gpu_open(&(kvk_gpu_config_t){.cuda = w->cuda, .staging_bytes = 32u << 20, .image = GPU_PROP_IMAGE},
			 &w->gpu) != KV_OK) {
		printf("# SKIP: %s\n", kvk_gpu_last_error());
		return 77;
	}
	must(w->cuda->device_count(&count), "device_count");
	must(w->cuda->device_get(&device, 0), "device_get");
	must(w->cuda->context_retain(&w->context, device), "context");
	must(w->cuda->context_push(w->context), "context_push");
	must((int)kvk_gpu_create_stream(w->gpu, 0, &w->stream), "stream");
	must(w->cuda->event_create(&w->event, 2), "event");
	w->has_peer = count > 1;
	if (w->peer_only && !w->has_peer) {
		printf("# SKIP: there is no second device\n");
		return 77;
	}
	(void)make_area(w, &w->cache, OWN);
	make_pools(w);
	printf("gpu_prop: %s, %s, seed 0x%llx\n", kvk_gpu_describe(w->gpu), w->has_peer ? "a peer" : "no peer",
	       (unsigned long long)w->rng);

	return 0;
}

/* ---- a draw ---------------------------------------------------------------------------------- */

static const char *const place_names[] = {"host", "own", "mapped", "peer", "mapped peer"};
static const char *const way_names[] = {"auto", "zero copy", "staged", "each"};

/* One draw. */
typedef struct draw {
	kvk_layout_t layout;
	kvk_geometry_t g;
	kvk_paged_t paged;
	void *twin_base[MAX_LAYERS], *real_base[MAX_LAYERS];
	uint32_t layer, layers, count;
	size_t block_stride; /* from a pool block to the next */
	size_t pool_at, cache_bytes;
	place_t place;
	kvk_gpu_way_t way;
	uint32_t sms, max_in_flight;
	uint32_t ids[MAX_MOVES];
	kvk_move_t twin[MAX_MOVES], real[MAX_MOVES];
	uint64_t *twin_leaves, *real_leaves;
	size_t leaves; /* of a move */
} draw_t;

/* ---- drawing --------------------------------------------------------------------------------- */

/* A page of about 256 B << (0 .. 12), in rows of one of many lengths. */
static void draw_layout(world_t *w, draw_t *d, uint32_t number)
{
	static const uint32_t tokens[] = {1, 2, 3, 5, 7, 8, 16, 16, 16, 17, 32, 64, 128};
	kvk_layout_t *l = &d->layout;
	const uint64_t page = UINT64_C(256) << number % 13;
	uint64_t row;

	*l = (kvk_layout_t){.heads = 1 + (uint32_t)below(w, 8), .layers = 1 + (uint32_t)below(w, MAX_LAYERS)};
	if (below(w, 6) == 0) {
		l->heads = 1;
		l->block_tokens = 16;
		l->inner = KVK_INNER_OPAQUE;
		l->page_bytes = (uint32_t)(page + (below(w, 2) ? below(w, page) : 0));
		return;
	}
	l->dtype = (kvk_dtype_t)below(w, KVK_DTYPE_COUNT);
	l->inner = (kvk_inner_t)below(w, 2);
	l->block_tokens = tokens[below(w, KV_COUNT_OF(tokens))];
	while (page / l->block_tokens / kvk_dtype_bytes(l->dtype) > 2u * (size_t)KVK_MAX_DIM) {
		l->block_tokens *= 2;
	}
	row = page / l->block_tokens / kvk_dtype_bytes(l->dtype); /* elements of K and V of a token */
	row = row < 2 ? 2 : row;
	l->k_dim = (uint32_t)(row / 2);
	l->v_dim = l->k_dim;
	switch (below(w, 6)) {
	case 0: /* odd ones */
		l->k_dim = 1 + (uint32_t)below(w, row < KVK_MAX_DIM ? row : KVK_MAX_DIM);
		l->v_dim = 1 + (uint32_t)below(w, row < KVK_MAX_DIM ? row : KVK_MAX_DIM);
		break;
	case 1: /* latent */
		l->k_dim = (uint32_t)(row < KVK_MAX_DIM ? row : KVK_MAX_DIM);
		l->v_dim = 0;
		l->inner = KVK_INNER_SPLIT;
		break;
	default:
		break;
	}
}

static void draw_paged(world_t *w, draw_t *d)
{
	static const kvk_paged_kind_t kinds[] = {KVK_PAGED_KV_TOKEN_HEAD, KVK_PAGED_HEAD_TOKEN_KV,
						 KVK_PAGED_TOKEN_HEAD_KV, KVK_PAGED_KV_HEAD_TOKEN,
						 KVK_PAGED_HEAD_KV_TOKEN};
	const kvk_layout_t *l = &d->layout;
	kvk_paged_t *p = &d->paged;
	size_t bytes;

	*p = (kvk_paged_t){.kind = l->inner == KVK_INNER_OPAQUE ? KVK_PAGED_OPAQUE : kinds[below(w, 5)],
			   .block_tokens = l->block_tokens,
			   .k_dim = l->k_dim,
			   .v_dim = l->v_dim,
			   .dtype = l->dtype,
			   .page_bytes = l->page_bytes,
			   .base = d->real_base};
	p->first_layer = (uint32_t)below(w, l->layers);
	p->layers = 1 + (uint32_t)below(w, l->layers - p->first_layer);
	p->first_head = (uint32_t)below(w, l->heads);
	p->heads = 1 + (uint32_t)below(w, l->heads - p->first_head);
	bytes = (size_t)p->heads * d->g.page_bytes;
	if ((p->kind == KVK_PAGED_HEAD_TOKEN_KV || p->kind == KVK_PAGED_HEAD_KV_TOKEN) && below(w, 2)) {
		p->head_stride =
			d->g.page_bytes + below(w, 5) * (below(w, 3) ? 16 : 1); /* as where other layers lie between */
		bytes = p->heads * p->head_stride;
		p->block_stride = bytes;
	}
	if (below(w, 2)) { /* padding between blocks, sometimes of a kind that no vector likes */
		p->block_stride = bytes + below(w, 5) * (below(w, 3) ? 16 : 1);
	}
}

/* Where blocks and layers lie; as many moves as there is room for. */
static int draw_places(world_t *w, draw_t *d)
{
	kvk_paged_t *p = &d->paged;
	const size_t stride = p->block_stride ? p->block_stride : (size_t)p->heads * d->g.page_bytes;
	const size_t grain = below(w, 3) ? 256 : 1 + below(w, 16);
	size_t at = below(w, 3) ? 0 : below(w, 64) * (below(w, 2) ? 16 : 1);
	size_t room;

	d->block_stride = d->g.block_bytes + (below(w, 2) ? below(w, 4) * (below(w, 3) ? 16 : 1) : 0);
	d->pool_at = below(w, 3) ? 0 : below(w, 64) * (below(w, 2) ? 16 : 1);
	d->count = (uint32_t)below(w, MAX_MOVES + 1);
	if (d->block_stride == 0 || p->layers == 0 || stride == 0) {
		return 0; /* no layout that was accepted has these */
	}
	room = (w->bytes - 8192) / d->block_stride;
	d->count = d->count < room ? d->count : (uint32_t)room;
	room = (w->bytes - 16384) / p->layers / stride;
	d->count = d->count < room ? d->count : (uint32_t)room;
	if (room == 0) {
		return 0;
	}
	p->blocks = d->count + (uint32_t)below(w, room - d->count + 1 < 5 ? room - d->count + 1 : 5);
	p->blocks = p->blocks ? p->blocks : 1;
	for (uint32_t i = 0; i < p->layers; i++) {
		d->twin_base[i] = w->cache.twin + at;
		d->real_base[i] = w->cache.real + at;
		at += (stride * p->blocks + grain - 1) / grain * grain;
	}
	d->cache_bytes = at;

	return at <= w->bytes;
}

static int draw(world_t *w, draw_t *d, uint32_t number)
{
	static const uint32_t sms[] = {0, 1, 2, 3, 8, 16, 132};
	static const uint32_t windows[] = {0, 1, 96u << 10, 512u << 10, UINT32_MAX};
	const char *why = "too large";

	draw_layout(w, d, number);
	if (kvk_layout_check(&d->layout, &why) != KV_OK) {
		return 0;
	}
	kvk_layout_geometry(&d->layout, &d->g);
	draw_paged(w, d);
	if (d->g.block_bytes > MAX_BLOCK || !draw_places(w, d)) {
		return 0;
	}
	if (kvk_paged_check(&d->paged, &d->layout, &why) != KV_OK) {
		printf("gpu_prop: a draw that is none: %s\n", why);
		exit(1);
	}
	d->layer = below(w, 2) ? 0 : (uint32_t)below(w, d->paged.layers);
	d->layers = 1 + (uint32_t)below(w, d->paged.layers - d->layer);
	d->place = w->usable[below(w, w->usable_count)];
	d->way = (kvk_gpu_way_t)below(w, 4);
	if (d->way == KVK_GPU_COPY_PER_PIECE &&
	    d->paged.layers * d->paged.heads * d->count * d->layout.block_tokens > 2000) {
		d->way = KVK_GPU_ZERO_COPY; /* right it is, but not quick */
	}
	d->sms = sms[below(w, KV_COUNT_OF(sms))];
	d->max_in_flight = windows[below(w, KV_COUNT_OF(windows))];
	for (uint32_t i = 0; i < d->paged.blocks && i < MAX_MOVES; i++) {
		d->ids[i] = i;
	}
	for (uint32_t i = d->count; i > 1; i--) {
		const uint32_t j = (uint32_t)below(w, i), id = d->ids[j];

		d->ids[j] = d->ids[i - 1];
		d->ids[i - 1] = id;
	}
	d->leaves = (size_t)d->paged.heads * d->paged.layers * d->g.pieces;
	d->twin_leaves = calloc(d->count * d->leaves + 1, 8);
	d->real_leaves = calloc(d->count * d->leaves + 1, 8);
	for (uint32_t i = 0; i < d->count; i++) {
		const size_t at = d->pool_at + i * d->block_stride;

		d->twin[i] = (kvk_move_t){d->ids[i], 0, w->pools[d->place].twin + at, d->twin_leaves + i * d->leaves};
		d->real[i] = (kvk_move_t){d->ids[i], 0, w->pools[d->place].real + at, d->real_leaves + i * d->leaves};
	}

	return 1;
}

static void print_case(const world_t *w, const draw_t *d, uint32_t number)
{
	char text[KVK_LAYOUT_TEXT_MAX] = "?";
	const kvk_paged_t *p = &d->paged;

	kvk_layout_format(&d->layout, text, sizeof text);
	printf("  case %u: %s\n  kind %d, %u blocks stride %zu, layers %u+%u heads %u+%u, range %u+%u, %u moves, pool "
	       "at %zu stride %zu in %s, %s, "
	       "%u SMs, %u on their way\n",
	       number, text, (int)p->kind, p->blocks, p->block_stride, p->first_layer, p->layers, p->first_head,
	       p->heads, d->layer, d->layers, d->count, d->pool_at, d->block_stride, place_names[d->place],
	       way_names[d->way], d->sms, d->max_in_flight);
	(void)w;
}

/* ---- copying and comparing ------------------------------------------------------------------- */

static kv_status_t copy_real(world_t *w, draw_t *d, kvk_gpu_dir_t dir, kvk_gpu_job_t **p_job)
{
	const kvk_gpu_copy_t copy = {.dir = dir,
				     .way = d->way,
				     .layout = &d->layout,
				     .paged = &d->paged,
				     .layer = d->layer,
				     .layers = d->layers,
				     .moves = d->real,
				     .count = d->count,
				     .sms = d->sms,
				     .max_in_flight = d->max_in_flight,
				     .ready = (int)below(w, 2), /* nothing writes the pool meanwhile */
				     .stream = w->stream};

	const kv_status_t status = kvk_gpu_submit(w->gpu, &copy, p_job);

	*p_job = status == KV_OK ? *p_job : NULL;
	if (status == KV_ERR_UNSUPPORTED) {
		return status;
	}
	must((int)status, "submit");
	w->copies++;

	return kvk_gpu_wait(*p_job, PATIENCE);
}

/* The twin knows no ranges of layers: it is given a cache that holds no others. Its digests land where the device's
 * do. */
static void copy_twin(draw_t *d, kvk_gpu_dir_t dir)
{
	kvk_paged_t part = d->paged;
	const size_t row = (size_t)d->layers * d->g.pieces;
	uint64_t *leaves = calloc(row * part.heads, 8);

	part.base = d->twin_base + d->layer;
	part.first_layer += d->layer;
	part.layers = d->layers;
	for (uint32_t i = 0; i < d->count; i++) {
		kvk_move_t move = d->twin[i];

		move.leaves = dir == KVK_GPU_GATHER ? leaves : NULL;
		if (dir == KVK_GPU_SCATTER) {
			must((int)kvk_scatter(&d->layout, &part, &move, 1, NULL), "twin scatter");
			continue;
		}
		must((int)kvk_gather(&d->layout, &part, &move, 1), "twin gather");
		for (uint32_t head = 0; head < part.heads; head++) {
			memcpy(d->twin[i].leaves + ((size_t)head * d->paged.layers + d->layer) * d->g.pieces,
			       leaves + head * row, row * 8);
		}
	}
	free(leaves);
}

static int same(world_t *w, area_t *a, size_t bytes, const char *what)
{
	const uint8_t *real = download(w, a, bytes);

	w->compared += bytes;
	if (memcmp(real, a->twin, bytes) == 0) {
		return 1;
	}
	for (size_t i = 0; i < bytes; i++) {
		if (real[i] != a->twin[i]) {
			printf("gpu_prop: %s differs first at byte %zu of %zu\n", what, i, bytes);
			break;
		}
	}

	return 0;
}

/* Flip one bit in some moves, within what is copied or outside; those within, and only they, must be bad. */
static int corrupt(world_t *w, draw_t *d)
{
	area_t *pool = &w->pools[d->place];
	const size_t pool_bytes = d->pool_at + d->count * d->block_stride;
	uint8_t bad[MAX_MOVES] = {0};
	kvk_gpu_job_t *job;
	kv_status_t status;
	uint32_t any = 0;
	int right = 1;

	for (uint32_t i = 0; i < d->count; i++) {
		const size_t bit = below(w, (uint64_t)d->g.block_bytes * 8);
		const size_t page = bit / 8 / d->g.page_bytes;
		const uint32_t head = (uint32_t)(page / d->layout.layers) - d->paged.first_head;
		const uint32_t layer = (uint32_t)(page % d->layout.layers) - d->paged.first_layer - d->layer;

		if (below(w, 4) == 0) {
			continue;
		}
		((uint8_t *)d->twin[i].data)[bit / 8] ^= (uint8_t)(1u << bit % 8);
		bad[i] = head < d->paged.heads && layer < d->layers;
		any += bad[i];
	}
	upload(w, pool, pool_bytes);
	status = copy_real(w, d, KVK_GPU_SCATTER, &job);
	if (status != (any ? KV_ERR_CORRUPT : KV_OK)) {
		printf("gpu_prop: %u blocks are corrupt and the copy says %d\n", any, (int)status);
		right = 0;
	}
	for (uint32_t i = 0; i < d->count; i++) {
		w->flips += bad[i];
		w->caught += bad[i] && kvk_gpu_move_is_bad(job, i);
		if (bad[i] != (kvk_gpu_move_is_bad(job, i) != 0)) {
			printf("gpu_prop: move %u is %s\n", i,
			       bad[i] ? "corrupt and passed" : "right and called corrupt");
			right = 0;
		}
	}
	kvk_gpu_release_job(job);

	return right;
}

/* 1: right; 0: wrong; -1: this cannot be done, and it says so (digests piece by piece of memory that the host does not
 * see). */
static int run_case(world_t *w, draw_t *d)
{
	area_t *pool = &w->pools[d->place];
	const size_t pool_bytes = d->pool_at + d->count * d->block_stride;
	kvk_gpu_job_t *job;
	kv_status_t status;
	int right;

	randomise(w, &w->cache, d->cache_bytes + 7);
	randomise(w, pool, pool_bytes + 7);
	status = copy_real(w, d, KVK_GPU_GATHER, &job);
	kvk_gpu_release_job(job);
	if (status == KV_ERR_UNSUPPORTED && d->place != HOST) {
		return -1;
	}
	copy_twin(d, KVK_GPU_GATHER);
	right = status == KV_OK && same(w, pool, pool_bytes, "the pool after a gather");
	if (memcmp(d->twin_leaves, d->real_leaves, d->count * d->leaves * 8) != 0) {
		printf("gpu_prop: the digests differ\n");
		right = 0;
	}

	randomise(w, &w->cache, d->cache_bytes + 7);
	status = copy_real(w, d, KVK_GPU_SCATTER, &job);
	kvk_gpu_release_job(job);
	copy_twin(d, KVK_GPU_SCATTER);
	if (status != KV_OK) {
		printf("gpu_prop: the scatter says %d\n", (int)status);
		right = 0;
	}

	return right && same(w, &w->cache, d->cache_bytes, "the cache after a scatter");
}

/* ---- digests of memory ----------------------------------------------------------------------- */

#define RANGES 64u

/* Ranges of a pool that lie anywhere, by the twin and by a device that has it registered or mapped, or (`stranger`)
 * that finds it by the driver. 1: all are equal. */
static int digests_are_equal(world_t *w, area_t *pool, kvk_gpu_t *stranger)
{
	static const size_t len[] = {0,    1,    63,   240,   241,   255,   256,   257,
				     4095, 4096, 4097, 16383, 16384, 16385, 32768, 300000};
	uint8_t expected[RANGES][KVK_RANGE_DIGEST_BYTES], digests[RANGES][KVK_RANGE_DIGEST_BYTES];
	uint64_t *pieces = calloc(kvk_count_pieces(w->bytes), sizeof *pieces);
	kvk_range_t ranges[RANGES];
	kv_status_t status;
	int right;

	randomise(w, pool, w->bytes);
	for (uint32_t i = 0; i < RANGES; i++) {
		const size_t bytes = i < 3 * KV_COUNT_OF(len) ? len[i / 3] : below(w, w->bytes / 8);
		const size_t align = i % 3 == 0 ? 16 : i % 3 == 1 ? 4 : 1;
		const size_t at = i + 1 == RANGES ? w->bytes - bytes : below(w, w->bytes - bytes) / align * align;
		uint32_t n = 0;

		for (size_t from = 0; from < bytes; from += KVK_PIECE) {
			pieces[n++] = kvk_digest_piece(pool->twin + at + from,
						       bytes - from < KVK_PIECE ? bytes - from : KVK_PIECE);
		}
		kvk_digest_range(pieces, bytes, expected[i]);
		ranges[i] = (kvk_range_t){(uint64_t)(uintptr_t)pool->real + at, bytes};
		w->compared += bytes;
	}
	free(pieces);
	status = kvk_gpu_digest(w->gpu, ranges, RANGES, w->stream, digests);
	right = status == KV_OK && memcmp(digests, expected, sizeof digests) == 0;
	if (right && stranger) {
		status = kvk_gpu_digest(stranger, ranges, RANGES, w->stream, digests);
		right = status == KV_OK && memcmp(digests, expected, sizeof digests) == 0;
	}
	if (!right) {
		printf("gpu_prop: digests of memory: %s\n", status == KV_OK ? "others" : kvk_gpu_last_error());
	}

	return right || status == KV_ERR_UNSUPPORTED;
}

/* In all places: how many are wrong. */
static uint64_t check_digests(world_t *w)
{
	kvk_gpu_t *stranger;
	uint64_t wrong = 0;

	must((int)kvk_gpu_open(&(kvk_gpu_config_t){.cuda = w->cuda, .image = GPU_PROP_IMAGE}, &stranger), "open");
	for (uint32_t i = 0; i < w->usable_count; i++) {
		wrong += !digests_are_equal(w, &w->pools[w->usable[i]], w->usable[i] == HOST ? NULL : stranger);
	}
	kvk_gpu_close(stranger);
	printf("gpu_prop: digests of %u ranges of memory in %u places, %llu wrong\n", RANGES, w->usable_count,
	       (unsigned long long)wrong);

	return wrong;
}

static uint64_t option(int argc, char **argv, const char *name, uint64_t otherwise)
{
	for (int i = 1; i + 1 < argc; i++) {
		if (strcmp(argv[i], name) == 0) {
			return strtoull(argv[i + 1], NULL, 0);
		}
	}

	return otherwise;
}

int main(int argc, char **argv)
{
	const uint64_t cases = option(argc, argv, "--cases", 1000), flips = option(argc, argv, "--flips", 10000);
	world_t w = {.rng = option(argc, argv, "--seed", 0x6b766b67),
		     .bytes = option(argc, argv, "--mib", 16) << 20,
		     .peer_only = option(argc, argv, "--peer", 0) != 0};
	uint64_t done = 0, failed = 0, unsupported = 0;
	const int status = make_world(&w);

	if (status != 0) {
		return status;
	}
	failed += check_digests(&w);
	for (uint32_t number = 0; (done < cases || w.flips < flips) && failed < 5; number++) {
		draw_t d = {0};
		int right;

		if (!draw(&w, &d, number)) {
			continue;
		}
		right = run_case(&w, &d);
		if (right < 0) {
			unsupported++;
		} else if (right == 0) {
			failed++;
			print_case(&w, &d, number);
		} else if (w.flips < flips && !corrupt(&w, &d)) {
			failed++;
			print_case(&w, &d, number);
		}
		done += right >= 0;
		w.cases_in[d.place] += right >= 0;
		free(d.twin_leaves);
		free(d.real_leaves);
	}
	for (place_t place = HOST; place < PLACES; place++) {
		printf("gpu_prop: %llu cases with blocks in %s memory\n", (unsigned long long)w.cases_in[place],
		       place_names[place]);
	}
	printf("gpu_prop: %llu cases, %llu copies, %.1f GB compared, %llu flips, %llu "
	       "caught, %llu cases failed, %llu "
	       "not possible\n",
	       (unsigned long long)done, (unsigned long long)w.copies, (double)w.compared / 1e9,
	       (unsigned long long)w.flips, (unsigned long long)w.caught, (unsigned long long)failed,
	       (unsigned long long)unsupported);

	return failed == 0 && w.caught == w.flips ? 0 : 1;
}
