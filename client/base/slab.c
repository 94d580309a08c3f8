/* Slabs of the pools in this process. */
#include "impl.h"

#include "kv/struct.h"

#include <stdio.h>
#include <sys/mman.h>

static size_t prefault_bitmap_words(uint64_t bytes)
{
	return bytes / KVC_PREFAULT_BYTES / 64u + 1u;
}

/* The daemon has touched [0, n) of the data. To touch more would be charged to this process, and where the kernel
 * refuses the page it would end it. */
static size_t ready_bytes(const kv_slab_tail_t *tail, size_t data_bytes)
{
	uint64_t ready = tail ? atomic_load_explicit(&tail->ready_bytes, memory_order_acquire) : data_bytes;

	return ready < data_bytes ? (size_t)ready : data_bytes;
}

size_t kvc_memory_ready(const kvc_memory_t *memory)
{
	return ready_bytes(memory->mark, memory->bytes);
}

/* Bring the pages around some bytes into our page table, many at a time: one by one each would cost a fault. */
static void prefault_span(const kvc_slab_t *slab, uint8_t *data, size_t bytes)
{
	size_t at = (size_t)(data - slab->data), end = at + bytes - 1,
	       ready = ready_bytes(slab->tail, slab->data_bytes);

	for (size_t i = at / KVC_PREFAULT_BYTES; i <= end / KVC_PREFAULT_BYTES; i++) {
		uint64_t bit = UINT64_C(1) << i % 64u;
		size_t begin = i * KVC_PREFAULT_BYTES;
		size_t left = slab->data_bytes - begin, span = left < KVC_PREFAULT_BYTES ? left : KVC_PREFAULT_BYTES;
		size_t there = ready > begin ? ready - begin : 0;

		if (atomic_load_explicit(&slab->prefaulted[i / 64u], memory_order_relaxed) & bit) {
			continue;
		}
		/* Before Linux 5.14 there is no such advice, and the faults come one by one. */
		(void)madvise(slab->data + begin, there < span ? there : span, MADV_POPULATE_WRITE);
		if (there >= span) {
			atomic_fetch_or_explicit(&slab->prefaulted[i / 64u], bit, memory_order_relaxed);
		}
	}
}

/* The next pages that are not in the page table yet; how many bytes. */
static uint64_t prefault_next(kvc_slab_t *slab, uint64_t bytes)
{
	const size_t ready = ready_bytes(slab->tail, slab->data_bytes);
	uint64_t done = 0;

	while (!slab->on_device && slab->prefault_at < slab->data_bytes && done < bytes) {
		if (ready < slab->data_bytes && ready < slab->prefault_at + KVC_PREFAULT_BYTES) {
			break;
		}
		prefault_span(slab, slab->data + slab->prefault_at, 1);
		slab->prefault_at += KVC_PREFAULT_BYTES;
		done += KVC_PREFAULT_BYTES;
	}

	return done;
}

uint64_t kvc_prefault(kvc_t *kvc, uint64_t bytes)
{
	const kvc_map_t *map = NULL;
	uint64_t done = 0;

	if (kvc && kvc_check_process(kvc) == KVC_OK) {
		map = atomic_load_explicit(&kvc->map, memory_order_relaxed);
	}
	for (uint32_t i = 0; map && i <= KV_SLOT_MAX_SLAB && done < bytes; i++) {
		kvc_slab_t *slab = atomic_load_explicit(&map->slabs[i], memory_order_relaxed);

		if (slab) {
			done += prefault_next(slab, bytes - done);
		}
	}

	return done;
}

static kv_status_t slab_check(const kv_msg_slab_add_t *msg)
{
	uint64_t words = (uint64_t)msg->slots * msg->heads;

	if (msg->slots == 0 || msg->slot_bytes == 0 || msg->slot_bytes % 4096 != 0 || msg->block_bytes == 0 ||
	    msg->block_bytes > msg->slot_bytes) {
		return KV_ERR_PROTO;
	}
	if (msg->heads == 0 || msg->heads > KVC_MAX_HEADS || msg->leaves == 0 || msg->leaves > KVC_MAX_LEAVES) {
		return KV_ERR_PROTO;
	}
	/* slots <= 2^20, heads <= 2^16, leaves <= 2^20: no product overflows. */
	if (msg->bytes < (uint64_t)msg->slots * msg->slot_bytes ||
	    msg->digest_bytes < words * (msg->leaves + UINT64_C(1)) * 8u) {
		return KV_ERR_PROTO;
	}

	return KV_OK;
}

/* Behind the roots, if the daemon has it. */
static const kv_slab_tail_t *find_tail(const kv_msg_slab_add_t *msg, const void *digests)
{
	const uint64_t needed = (uint64_t)msg->slots * msg->heads * (msg->leaves + UINT64_C(1)) * 8u;
	const kv_slab_tail_t *tail =
		(const kv_slab_tail_t *)((const uint8_t *)digests + (msg->digest_bytes - sizeof(kv_slab_tail_t)));

	return msg->digest_bytes - needed >= sizeof *tail && (uintptr_t)tail % _Alignof(kv_slab_tail_t) == 0 &&
			       tail->magic == KV_SLAB_TAIL_MAGIC
		       ? tail
		       : NULL;
}

static void notify_memory(const kvc_t *kvc, const kvc_slab_t *slab, int mapped)
{
	const kvc_memory_t memory = {slab->data, slab->data_bytes, slab->slot_bytes, slab->tail};

	if (kvc->on_memory && !slab->on_device) {
		kvc->on_memory(kvc->memory_ctx, &memory, mapped);
	}
}

kv_status_t kvc_device_add(kvc_t *kvc, const kv_msg_device_add_t *msg)
{
	kvc_map_t *map = atomic_load(&kvc->map);

	if (!map || msg->device == 0 || msg->name.len == 0 || msg->name.len > KVC_MAX_DEVICE) {
		return KV_ERR_PROTO;
	}
	snprintf(map->gpus[msg->device - 1u].name, KVC_MAX_DEVICE + 1u, "%.*s", (int)msg->name.len,
		 (const char *)msg->name.data);

	return KV_OK;
}

kvc_status_t kvc_device(const kvc_t *kvc, uint32_t i, kvc_device_t *device)
{
	const kvc_map_t *map = atomic_load(&kvc->map);
	kvc_device_t full = {0};

	for (uint32_t d = 0; map && d < KV_MAX_DEVICES; d++) {
		const kvc_gpu_t *gpu = &map->gpus[d];

		if (gpu->name[0] != '\0' && i-- == 0) {
			full.name = gpu->name;
			full.mapped = gpu->mapped;
			full.unmapped = gpu->unmapped;
			return kvc_fill("kvc_device", device, &full, sizeof full);
		}
	}

	return KVC_MISS;
}

/* It has come (1), or goes (-1). */
static void count_slab(kvc_map_t *map, const kvc_slab_t *slab, int by)
{
	kvc_gpu_t *gpu = slab->device > 0 ? &map->gpus[slab->device - 1u] : NULL;

	if (gpu) {
		*(slab->data ? &gpu->mapped : &gpu->unmapped) += (uint32_t)by;
	}
}

/* Without it the slab is known all the same, and acknowledged like any other when it retires. */
static kv_status_t map_device(const kvc_t *kvc, int fd, uint64_t bytes, void **p_base)
{
	if (bytes > SIZE_MAX / 2) {
		return KV_ERR_PROTO;
	}
	if (!kvc->map_device || kvc->map_device(kvc->memory_ctx, fd, bytes, p_base) != KVC_OK) {
		*p_base = NULL;
	}

	return KV_OK;
}

static void unmap_data(const kvc_t *kvc, void *data, size_t bytes, int on_device)
{
	if (!on_device) {
		munmap(data, bytes);
	} else if (data) {
		kvc->unmap_device(kvc->memory_ctx, data, bytes);
	}
}

kv_status_t kvc_slab_add(kvc_t *kvc, const kv_msg_slab_add_t *msg, int data_fd, int digest_fd)
{
	kvc_map_t *map = atomic_load(&kvc->map);
	kvc_slab_t *slab;
	const int on_device = msg->memory == KV_SLAB_CUDA;
	void *data = NULL, *digests;
	kv_status_t status = slab_check(msg);

	if (status != KV_OK || !map || atomic_load_explicit(&map->slabs[msg->slab], memory_order_relaxed)) {
		return KV_ERR_PROTO;
	}
	slab = kv_alloc(&kvc->env, sizeof *slab + prefault_bitmap_words(msg->bytes) * sizeof *slab->prefaulted);
	if (!slab) {
		return KV_ERR_NOMEM;
	}
	status = on_device ? map_device(kvc, data_fd, msg->bytes, &data)
			   : kvc_map_fd(data_fd, msg->bytes, PROT_READ | PROT_WRITE, &data);
	if (status != KV_OK) {
		goto err_slab;
	}
	status = kvc_map_fd(digest_fd, msg->digest_bytes, PROT_READ, &digests);
	if (status != KV_OK) {
		goto err_data;
	}

	*slab = (kvc_slab_t){
		.data = data,
		.leaves = digests,
		.tail = find_tail(msg, digests),
		.data_bytes = msg->bytes,
		.digest_bytes = msg->digest_bytes,
		.number = msg->slab,
		.slots = msg->slots,
		.slot_bytes = msg->slot_bytes,
		.block_bytes = msg->block_bytes,
		.heads = msg->heads,
		.leaves_a_head = msg->leaves,
		.device = msg->device,
		.on_device = on_device,
		.prefaulted = (_Atomic uint64_t *)(slab + 1),
	};
	atomic_store_explicit(&map->slabs[msg->slab], slab, memory_order_release);
	count_slab(map, slab, 1);
	kvc->slabs_mapped++;
	notify_memory(kvc, slab, 1);

	return KV_OK;

err_data:
	unmap_data(kvc, data, msg->bytes, on_device);
err_slab:
	kv_free(&kvc->env, slab);

	return status;
}

void kvc_slab_retire(kvc_t *kvc, uint32_t number)
{
	kvc_map_t *map = atomic_load(&kvc->map);
	kvc_slab_t *slab = map && number <= KV_SLOT_MAX_SLAB ? atomic_exchange(&map->slabs[number], NULL) : NULL;

	if (slab) {
		count_slab(map, slab, -1);
		slab->retired_at = kvc->serial + 1;
		slab->next_retired = map->retired;
		map->retired = slab;
		kvc_slab_reap(kvc);
	} else { /* it went before we heard of it */
		kvc_send_oneway(kvc, KV_CODE_DRAINED, &(kv_msg_drained_t){.what = 3, .id = number});
	}
}

/* Of the oldest live lease or put; UINT64_MAX: none. */
static uint64_t oldest_serial(const kvc_t *kvc)
{
	uint64_t lease = kvc->leases ? kvc->leases->serial : UINT64_MAX;
	uint64_t put = kvc->puts ? kvc->puts->serial : UINT64_MAX;

	return lease < put ? lease : put;
}

void kvc_slab_reap(kvc_t *kvc)
{
	kvc_map_t *map = atomic_load(&kvc->map);
	kvc_slab_t **link = map ? &map->retired : NULL;
	uint64_t oldest;

	if (!link || !*link) {
		return;
	}
	oldest = oldest_serial(kvc);
	while (*link) {
		kvc_slab_t *slab = *link;
		kv_msg_drained_t msg = {.what = 3, .id = slab->number};

		if (oldest < slab->retired_at) {
			link = &slab->next_retired;
			continue;
		}
		*link = slab->next_retired;
		kvc_slab_destroy(kvc, slab);
		kvc->slabs_mapped--;
		kvc_send_oneway(kvc, KV_CODE_DRAINED, &msg);
	}
}

void kvc_slab_destroy(const kvc_t *kvc, kvc_slab_t *slab)
{
	if (kvc_check_process(kvc) == KVC_OK) {
		notify_memory(kvc, slab, 0);
		unmap_data(kvc, slab->data, slab->data_bytes, slab->on_device);
		munmap((void *)(uintptr_t)slab->leaves, slab->digest_bytes);
	}
	kv_free(&kvc->env, slab);
}

kv_status_t kvc_slab_find(const kvc_map_t *map, const kvc_geometry_t *g, kv_slot_t slot, kvc_block_memory_t *memory)
{
	uint32_t number = kv_slot_slab(slot), index = kv_slot_index(slot);
	const kvc_slab_t *slab;

	if (number > KV_SLOT_MAX_SLAB) {
		return KV_ERR_FAULT;
	}
	slab = atomic_load_explicit(&map->slabs[number], memory_order_acquire);
	if (!slab || index >= slab->slots) {
		return KV_ERR_FAULT;
	}
	if (!slab->data) {
		return KV_ERR_TIER_OFF; /* memory of a GPU that this process cannot map, now or later */
	}
	if (slab->block_bytes != g->block_bytes || slab->heads != g->heads || slab->leaves_a_head != g->leaves) {
		return KV_ERR_LAYOUT;
	}
	*memory = (kvc_block_memory_t){
		.data = slab->data + (size_t)index * slab->slot_bytes,
		.leaves = slab->leaves + (size_t)index * slab->heads * slab->leaves_a_head,
		.on_device = slab->on_device,
	};
	if (!slab->on_device) {
		prefault_span(slab, memory->data, slab->block_bytes);
	}

	return KV_OK;
}
