/* Memory that the device sees, and the kernels, as cuda/device/args.h has them in words: one byte range after the
 * other, digests by libxxhash. */
#include "fake_cuda_internal.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

/* ---- memory ---------------------------------------------------------------------------------- */

fake_range_t *fake_range_of(uint64_t at, fake_kind_t kind)
{
	for (size_t i = 0; i < FAKE_RANGES; i++) {
		fake_range_t *r = &fake.ranges[i];

		if (r->kind == kind && r->base <= at && at < r->base + r->bytes) {
			return r;
		}
	}

	return NULL;
}

int fake_range_add(fake_kind_t kind, void *base, size_t bytes)
{
	for (size_t i = 0; i < FAKE_RANGES; i++) {
		if (fake.ranges[i].kind == FAKE_NONE) {
			fake.ranges[i] = (fake_range_t){kind, (uint64_t)(uintptr_t)base, bytes};
			return 0;
		}
	}
	fake_fault("too many ranges for the test");

	return CU_UNKNOWN;
}

int fake_range_drop(fake_kind_t kind, uint64_t base)
{
	fake_range_t *r = fake_range_of(base, kind);

	if (!r || r->base != base) {
		fake_fault("memory given back that was not given");
		return CU_INVALID;
	}
	r->kind = FAKE_NONE;

	return 0;
}

void *fake_resolve(uint64_t at, size_t bytes)
{
	const int tagged = (at & FAKE_TAG) != 0;
	const uint64_t plain = at & ~FAKE_TAG;

	for (size_t i = 0; i < FAKE_RANGES; i++) {
		const fake_range_t *r = &fake.ranges[i];
		const int host = r->kind == FAKE_PINNED || r->kind == FAKE_REGISTERED;

		if (r->kind != FAKE_NONE && host == tagged && r->base <= plain && plain + bytes <= r->base + r->bytes) {
			return (void *)(uintptr_t)plain;
		}
	}
	fake_fault("an address that the device does not see");

	return NULL;
}

/* ---- memory apart from its addresses --------------------------------------------------------- */

/* Memory is a memfd, an address range is one of the process that nobody may touch until it is mapped and accessible. */

#define CU_DEVICE_LOST 101 /* no such device */
#define MEMFD_NAME     "fake-gpu"

static int add_handle(int fd, kvk_cu_memory_t *p_memory)
{
	for (size_t i = 0; i < FAKE_HANDLES; i++) {
		if (fake.handles[i] == 0) {
			fake.handles[i] = fd;
			fake.live.handles++;
			*p_memory = i + 1;
			return 0;
		}
	}
	close(fd);
	fake_fault("too many handles for the test");

	return CU_UNKNOWN;
}

/* -1 and a fault: there is none. */
static int handle_fd(kvk_cu_memory_t memory)
{
	if (memory == 0 || memory > FAKE_HANDLES || fake.handles[memory - 1] == 0) {
		fake_fault("a handle of memory that is none");
		return -1;
	}

	return fake.handles[memory - 1];
}

static fake_space_t *find_space(uint64_t at, size_t bytes)
{
	for (size_t i = 0; i < FAKE_SPACES; i++) {
		if (fake.spaces[i].bytes > 0 && fake.spaces[i].base == at && fake.spaces[i].bytes == bytes) {
			return &fake.spaces[i];
		}
	}
	fake_fault("addresses that are not reserved like this");

	return NULL;
}

static int is_device(kvk_cu_location_t location)
{
	return location.type == KVK_CU_LOCATION_DEVICE && location.id >= 0 && location.id < fake.config.devices;
}

static int check_prop(const kvk_cu_memory_prop_t *prop)
{
	const kvk_cu_memory_prop_t plain = {
		.type = KVK_CU_MEMORY_PINNED, .handle_types = KVK_CU_HANDLE_FD, .location = prop->location};

	if (!is_device(prop->location) || memcmp(prop, &plain, sizeof plain) != 0) {
		fake_fault("memory of a kind that is none");
		return 0;
	}

	return 1;
}

int fake_mem_grain(size_t *p_bytes, const kvk_cu_memory_prop_t *prop, int which)
{
	BEGIN(mem_grain, 0)
	*p_bytes = FAKE_GRAIN;

	return check_prop(prop) && which >= 0 && which <= 1 ? 0 : CU_INVALID;
}

int fake_mem_create(kvk_cu_memory_t *p_memory, size_t bytes, const kvk_cu_memory_prop_t *prop, unsigned long long flags)
{
	uint8_t *dirt;
	int fd, error;

	BEGIN(mem_create, 0)
	if (!check_prop(prop) || bytes == 0 || bytes % FAKE_GRAIN != 0 || flags != 0) {
		return CU_INVALID;
	}
	fd = memfd_create(MEMFD_NAME, MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) {
		return CU_NO_MEMORY;
	}
	dirt = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	memset(dirt, FAKE_DIRT, bytes);
	munmap(dirt, bytes);
	pthread_mutex_lock(&fake.lock);
	error = add_handle(fd, p_memory);
	pthread_mutex_unlock(&fake.lock);

	return error;
}

int fake_mem_release(kvk_cu_memory_t memory)
{
	int fd;

	BEGIN(mem_release, GIVES_BACK)
	pthread_mutex_lock(&fake.lock);
	fd = handle_fd(memory);
	if (fd >= 0) {
		close(fd);
		fake.handles[memory - 1] = 0;
		fake.live.handles--;
	}
	pthread_mutex_unlock(&fake.lock);

	return failing;
}

/* As the driver's, the descriptor stays open across exec. */
int fake_mem_export(void *p_fd, kvk_cu_memory_t memory, int handle_type, unsigned long long flags)
{
	int fd;

	BEGIN(mem_export, 0)
	pthread_mutex_lock(&fake.lock);
	fd = handle_fd(memory);
	fd = fd >= 0 ? dup(fd) : -1;
	pthread_mutex_unlock(&fake.lock);
	if (fd < 0 || handle_type != KVK_CU_HANDLE_FD || flags != 0) {
		return CU_INVALID;
	}
	*(int *)p_fd = fd;

	return 0;
}

int fake_mem_import(kvk_cu_memory_t *p_memory, void *fd, int handle_type)
{
	static const char name[] = "/memfd:" MEMFD_NAME;
	char path[32], found[64] = "";
	int own, error;

	BEGIN(mem_import, 0)
	snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(uintptr_t)fd);
	if (handle_type != KVK_CU_HANDLE_FD || readlink(path, found, sizeof found - 1) < 0 ||
	    strncmp(found, name, sizeof name - 1) != 0) {
		return CU_DEVICE_LOST;
	}
	own = fcntl((int)(uintptr_t)fd, F_DUPFD_CLOEXEC, 0);
	pthread_mutex_lock(&fake.lock);
	error = add_handle(own, p_memory);
	pthread_mutex_unlock(&fake.lock);

	return error;
}

int fake_mem_reserve(kvk_cu_ptr_t *p_at, size_t bytes, size_t alignment, kvk_cu_ptr_t wanted, unsigned long long flags)
{
	void *base;

	BEGIN(mem_reserve, 0)
	if (bytes == 0 || bytes % FAKE_GRAIN != 0 || alignment != 0 || wanted != 0 || flags != 0) {
		return CU_INVALID;
	}
	base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	pthread_mutex_lock(&fake.lock);
	for (size_t i = 0; i < FAKE_SPACES; i++) {
		if (fake.spaces[i].bytes == 0) {
			fake.spaces[i] = (fake_space_t){.base = (uint64_t)(uintptr_t)base, .bytes = bytes};
			break;
		}
	}
	fake.live.reserved++;
	pthread_mutex_unlock(&fake.lock);
	*p_at = (uint64_t)(uintptr_t)base;

	return 0;
}

int fake_mem_unreserve(kvk_cu_ptr_t at, size_t bytes)
{
	fake_space_t *space;

	BEGIN(mem_unreserve, GIVES_BACK)
	pthread_mutex_lock(&fake.lock);
	space = find_space(at, bytes);
	if (space && space->mapped) {
		fake_fault("addresses given back while memory is mapped there");
	} else if (space) {
		munmap((void *)(uintptr_t)at, bytes);
		*space = (fake_space_t){0};
		fake.live.reserved--;
	}
	pthread_mutex_unlock(&fake.lock);

	return failing;
}

int fake_mem_map(kvk_cu_ptr_t at, size_t bytes, size_t offset, kvk_cu_memory_t memory, unsigned long long flags)
{
	fake_space_t *space;
	struct stat st;
	int fd, error = CU_INVALID;

	BEGIN(mem_map, 0)
	pthread_mutex_lock(&fake.lock);
	fd = handle_fd(memory);
	space = find_space(at, bytes);
	if (fd >= 0 && space && !space->mapped && offset == 0 && flags == 0 && fstat(fd, &st) == 0 &&
	    (size_t)st.st_size == bytes &&
	    mmap((void *)(uintptr_t)at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED) {
		space->mapped = 1;
		fake.live.mapped++;
		error = 0;
	}
	pthread_mutex_unlock(&fake.lock);

	return error;
}

int fake_mem_access(kvk_cu_ptr_t at, size_t bytes, const kvk_cu_access_t *access, size_t count)
{
	fake_space_t *space;
	int error = CU_INVALID;

	BEGIN(mem_access, 0)
	pthread_mutex_lock(&fake.lock);
	space = find_space(at, bytes);
	if (fake.unlinked) {
		error = CU_DEVICE_LOST;
	} else if (space && space->mapped && count == 1 && is_device(access->location) &&
		   access->flags == KVK_CU_ACCESS_READ_WRITE &&
		   mprotect((void *)(uintptr_t)at, bytes, PROT_READ | PROT_WRITE) == 0) {
		space->access = 1;
		error = fake_range_add(FAKE_MAPPED, (void *)(uintptr_t)at, bytes);
	}
	pthread_mutex_unlock(&fake.lock);

	return error;
}

/* Bytes that were to be set and were not waited for never are. */
int fake_mem_unmap(kvk_cu_ptr_t at, size_t bytes)
{
	fake_space_t *space;

	BEGIN(mem_unmap, GIVES_BACK | WAITS)
	pthread_mutex_lock(&fake.lock);
	space = find_space(at, bytes);
	if (space && space->mapped) {
		if (space->access) {
			fake_range_drop(FAKE_MAPPED, at);
		}
		mmap((void *)(uintptr_t)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
		     -1, 0);
		space->mapped = space->access = 0;
		fake.live.mapped--;
		fake.zeroing.bytes = fake.zeroing.base == at ? 0 : fake.zeroing.bytes;
	}
	pthread_mutex_unlock(&fake.lock);

	return failing;
}

int fake_mem_set(kvk_cu_ptr_t at, unsigned char byte, size_t bytes)
{
	BEGIN(mem_set, NEEDS_CONTEXT | WAITS)
	pthread_mutex_lock(&fake.lock);
	fake.zeroing = (fake_range_t){FAKE_MAPPED, at, bytes};
	fake.zeroing_byte = byte;
	pthread_mutex_unlock(&fake.lock);

	return 0;
}

int fake_context_wait(void)
{
	BEGIN(context_wait, NEEDS_CONTEXT | WAITS)
	pthread_mutex_lock(&fake.lock);
	if (fake.zeroing.bytes > 0) {
		void *at = fake_resolve(fake.zeroing.base, fake.zeroing.bytes);

		if (at) {
			memset(at, fake.zeroing_byte, fake.zeroing.bytes);
		}
		fake.zeroing.bytes = 0;
	}
	fake_run_all();
	pthread_mutex_unlock(&fake.lock);

	return 0;
}

/* ---- kernels --------------------------------------------------------------------------------- */

/* One page of a move while it is copied. */
typedef struct page {
	const kvk_gpu_args_t *args;
	int gather;
	uint64_t pool, cache; /* the page's first byte; the block's first byte in its layer */
	uint32_t head;
	uint8_t *canonical; /* its bytes in the order of the digest */
} page_t;

static int is_gather(size_t kernel)
{
	return kernel % 2 == 0;
}

static void copy_bytes(const page_t *p, uint64_t pool, uint64_t cache, uint64_t bytes)
{
	void *in_pool = fake_resolve(pool, bytes);
	void *in_cache = fake_resolve(cache, bytes);

	if (in_pool && in_cache) {
		memcpy(p->gather ? in_pool : in_cache, p->gather ? in_cache : in_pool, bytes);
	}
}

/* Piece `token` of K or V; its bytes also go to where the digest wants them. */
static uint8_t *copy_piece(const page_t *p, const kvk_gpu_row_t *row, uint32_t token, uint8_t *out)
{
	const uint64_t pool = p->pool + row->pool_offset + token * row->pool_stride;
	const uint64_t cache = p->cache + row->cache_offset + p->head * row->cache_head + token * row->cache_stride;
	const void *source;

	if (row->bytes == 0) {
		return out;
	}
	source = fake_resolve(p->gather ? cache : pool, row->bytes);
	if (source) {
		memcpy(out, source, row->bytes);
	}
	copy_bytes(p, pool, cache, row->bytes);

	return out + row->bytes;
}

static void copy_page(const page_t *p)
{
	const kvk_gpu_args_t *a = p->args;
	uint8_t *out = p->canonical;

	if (a->interleaved) {
		for (uint32_t t = 0; t < a->tokens; t++) {
			out = copy_piece(p, &a->k, t, out);
			out = copy_piece(p, &a->v, t, out);
		}
	} else {
		for (uint32_t t = 0; t < a->tokens; t++) {
			out = copy_piece(p, &a->k, t, out);
		}
		for (uint32_t t = 0; t < a->tokens; t++) {
			out = copy_piece(p, &a->v, t, out);
		}
	}
	if ((uint64_t)(out - p->canonical) != a->page_bytes) {
		fake_fault("rows that are not a page");
	}
}

/* Digests of the page's leaves: written by a gather, compared by a scatter. */
static void digest_page(const page_t *p, uint32_t move, uint32_t layer)
{
	const kvk_gpu_args_t *a = p->args;
	const uint64_t first = (((uint64_t)move * a->heads + p->head) * a->cache_layers + layer) * a->pieces;

	for (uint32_t piece = 0; piece < a->pieces; piece++) {
		const uint64_t at = (uint64_t)piece * a->leaf_bytes;
		const uint64_t left = a->page_bytes - at;
		const uint64_t n = left < a->leaf_bytes ? left : a->leaf_bytes;
		uint64_t *leaf = fake_resolve(a->leaves + (first + piece) * sizeof(uint64_t), sizeof(uint64_t));
		const uint64_t digest = XXH3_64bits(p->canonical + at, n);

		if (n <= 240) {
			fake_fault("a leaf too small for the kernels' digest");
		}
		if (!leaf) {
			continue;
		}
		if (p->gather) {
			*leaf = digest;
		} else if (*leaf != digest && a->bad) {
			uint32_t *bad = fake_resolve(a->bad + move * sizeof(uint32_t), sizeof(uint32_t));

			if (bad) {
				*bad = 1;
			}
		}
	}
}

static uint64_t row_bits(const kvk_gpu_row_t *r)
{
	return r->pool_offset | r->pool_stride | r->cache_offset | r->cache_stride | r->cache_head | r->bytes;
}

static void check_bulk(const fake_work_t *work, uint64_t addresses)
{
	const kvk_gpu_args_t *a = &work->args;

	if ((addresses | row_bits(&a->k) | row_bits(&a->v) | a->cache_stride | a->page_bytes | a->pool_head |
	     a->pool_first) %
		    16 !=
	    0) {
		fake_fault("a bulk kernel with something that is no multiple of 16");
	}
	if (work->shared != KVK_GPU_SHARED || fake.functions[work->kernel].shared != KVK_GPU_SHARED) {
		fake_fault("a bulk kernel without its shared memory");
	}
	fake.bulk_launches++;
}

static uint64_t cost_of(const kvk_gpu_args_t *a, const kvk_gpu_move_t *moves)
{
	const uint64_t narrow = a->ahead && fake.narrow_cost ? fake.narrow_cost : 1;

	return moves && moves[0].pool & FAKE_TAG ? fake.link_cost * narrow : 1;
}

static void digest_pieces(const kvk_gpu_digest_args_t *a)
{
	const kvk_gpu_piece_t *pieces = fake_resolve(a->pieces, a->count * sizeof *pieces);
	uint64_t *digests = fake_resolve(a->digests, a->count * sizeof *digests);

	for (uint32_t i = 0; i < a->count && pieces && digests; i++) {
		const uint64_t n = pieces[i].bytes;
		uint8_t padded[KVK_GPU_PIECE] = {0};
		const void *at;

		if (n == 0 || n > sizeof padded) {
			fake_fault("a piece of no size");
			return;
		}
		at = fake_resolve(pieces[i].at, n);
		if (at) {
			memcpy(padded, at, n);
		}
		digests[i] = XXH3_64bits(padded, (n + KVK_GPU_PIECE_PAD - 1) / KVK_GPU_PIECE_PAD * KVK_GPU_PIECE_PAD);
	}
}

static void copy_pages(const fake_work_t *work)
{
	const kvk_gpu_args_t *a = &work->args;
	const kvk_gpu_move_t *moves = fake_resolve(a->moves, a->count * sizeof *moves);
	const uint64_t *bases = fake_resolve(a->bases, (a->layer + a->layers) * sizeof *bases);
	uint8_t *canonical = malloc(a->page_bytes + a->k.bytes + a->v.bytes);
	uint64_t addresses = 0;
	const uint64_t pages = (uint64_t)a->count * a->heads * a->layers;

	for (uint64_t i = 0; i < pages && moves && bases; i++) {
		const uint32_t move = (uint32_t)(i / a->heads / a->layers);
		const uint32_t layer = a->layer + (uint32_t)(i % a->layers);
		page_t p = {.args = a, .gather = is_gather(work->kernel), .canonical = canonical};

		p.head = (uint32_t)(i / a->layers % a->heads);
		p.pool = moves[move].pool + a->pool_first + p.head * a->pool_head + layer * a->page_bytes;
		p.cache = bases[layer] + moves[move].block * a->cache_stride;
		if (i % ((uint64_t)a->heads * a->layers) == 0) {
			fake_cuda_trace("stream %u: %s block %u, layers %u to %u", work->stream,
					p.gather ? "gather" : "scatter", (unsigned)moves[move].block, a->layer,
					a->layer + a->layers);
		}
		addresses |= moves[move].pool | bases[layer];
		copy_page(&p);
		if (a->leaves) {
			digest_page(&p, move, layer);
		}
	}
	if (work->kernel >= FAKE_BULK) {
		check_bulk(work, addresses);
	}
	atomic_fetch_add(&fake.clock, cost_of(a, moves) * pages * a->page_bytes);
	free(canonical);
}

void fake_kernel(const fake_work_t *work)
{
	if (work->kernel == FAKE_DIGEST) {
		fake_cuda_trace("stream %u: digests of %u pieces", work->stream, work->digest.count);
		digest_pieces(&work->digest);
	} else {
		copy_pages(work);
	}
}
