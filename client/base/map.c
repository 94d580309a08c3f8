/* The shared memory of one incarnation: checked once when it is mapped, unmapped when no thread can be in it. */
#include "impl.h"

#include <sys/mman.h>

static kv_status_t mirror_check(kvc_t *kvc, kvc_map_t *map)
{
	const kv_mirror_header_t *header = map->mirror;
	uint64_t count = header->bucket_count, bytes = map->mirror_bytes;
	uint64_t buckets = header->buckets_offset, epochs = header->epochs_offset;

	if (bytes < KV_MIRROR_HEADER_BYTES || header->magic != KV_MIRROR_MAGIC || header->version != KV_SHM_VERSION) {
		return KV_ERR_VERSION;
	}
	if (header->incarnation != kvc->incarnation || header->total_bytes > bytes || count == 0 ||
	    (count & (count - 1)) != 0) {
		return KV_ERR_PROTO;
	}
	/* Subtracted and divided, never added and multiplied: no header can make a sum wrap. */
	if (buckets % 4096 != 0 || buckets > bytes || count > (bytes - buckets) / sizeof(kv_mirror_bucket_t)) {
		return KV_ERR_PROTO;
	}
	if (epochs % sizeof(uint64_t) != 0 || epochs > bytes ||
	    bytes - epochs < KV_MIRROR_MAX_SPACES * sizeof(uint64_t)) {
		return KV_ERR_PROTO;
	}

	if (header->stale_ns > KV_MIRROR_STALE_MAX_NS) {
		return KV_ERR_PROTO;
	}

	map->stale_ns = header->stale_ns ? header->stale_ns : KV_MIRROR_STALE_NS;
	map->buckets = (const kv_mirror_bucket_t *)((const uint8_t *)header + buckets);
	map->bucket_mask = count - 1;
	map->epochs = (const _Atomic uint64_t *)((const uint8_t *)header + epochs);

	return KV_OK;
}

static kv_status_t leases_check(const kvc_t *kvc, const kvc_map_t *map)
{
	const kv_lease_area_header_t *header = (const kv_lease_area_header_t *)map->leases;

	if (map->lease_bytes < sizeof *header || header->magic != KV_LEASES_MAGIC ||
	    header->version != KV_SHM_VERSION) {
		return KV_ERR_VERSION;
	}

	return header->incarnation == kvc->incarnation && header->total_bytes <= map->lease_bytes ? KV_OK
												  : KV_ERR_PROTO;
}

static kv_status_t member_check(kvc_map_t *map)
{
	const kv_member_area_header_t *header = map->member;
	uint64_t records = header->ring_records, words = header->staging_words, bytes = map->member_bytes;
	uint64_t ring = header->ring_offset, staging = header->staging_offset;

	if (bytes < sizeof *header || header->magic != KV_MEMBER_MAGIC || header->version != KV_SHM_VERSION) {
		return KV_ERR_VERSION;
	}
	if (records == 0 || (records & (records - 1)) != 0 || ring % _Alignof(kv_report_t) != 0 || ring > bytes ||
	    records > (bytes - ring) / sizeof(kv_report_t)) {
		return KV_ERR_PROTO;
	}
	if (staging % sizeof(uint64_t) != 0 || staging > bytes || words > (bytes - staging) / sizeof(uint64_t)) {
		return KV_ERR_PROTO;
	}

	map->ring = (kv_report_t *)((uint8_t *)map->member + ring);
	map->ring_mask = (uint32_t)records - 1u;
	map->staging = (uint64_t *)((uint8_t *)map->member + staging);
	map->staging_words = words;

	return KV_OK;
}

static void map_destroy(kvc_t *kvc, kvc_map_t *map)
{
	for (uint32_t i = 0; i <= KV_SLOT_MAX_SLAB; i++) {
		kvc_slab_t *slab = atomic_load_explicit(&map->slabs[i], memory_order_relaxed);

		if (slab) {
			kvc_slab_destroy(kvc, slab);
			kvc->slabs_mapped--;
		}
	}
	while (map->retired) {
		kvc_slab_t *slab = map->retired;

		map->retired = slab->next_retired;
		kvc_slab_destroy(kvc, slab);
		kvc->slabs_mapped--;
	}
	/* In a forked child the areas were never there, and something else may lie at their addresses. After
	 * kvc_abandon() a copy may be in them. */
	if (kvc_check_process(kvc) == KVC_OK) {
		if (map->mirror) {
			munmap((void *)(uintptr_t)map->mirror, map->mirror_bytes);
		}
		if (map->leases) {
			munmap((void *)(uintptr_t)map->leases, map->lease_bytes);
		}
		if (map->member) {
			munmap(map->member, map->member_bytes);
		}
	}
	kv_free(&kvc->env, map);
}

/* What a member has in addition to the mirror. */
static kv_status_t member_map(kvc_t *kvc, kvc_map_t *map, const kv_msg_join_reply_t *reply, const kvc_join_fds_t *fds)
{
	void *base;
	kv_status_t status = kvc_map_fd(fds->leases, reply->lease_bytes, PROT_READ, &base);

	if (status != KV_OK) {
		return status;
	}
	map->leases = base;
	map->lease_bytes = reply->lease_bytes;
	status = kvc_map_fd(fds->member, reply->member_bytes, PROT_READ | PROT_WRITE, &base);
	if (status != KV_OK) {
		return status;
	}
	map->member = base;
	map->member_bytes = reply->member_bytes;
	status = leases_check(kvc, map);

	return status == KV_OK ? member_check(map) : status;
}

kv_status_t kvc_map_create(kvc_t *kvc, const kv_msg_join_reply_t *reply, const kvc_join_fds_t *fds, kvc_map_t **p_map)
{
	kvc_map_t *map = kv_alloc(&kvc->env, sizeof *map);
	void *base;
	kv_status_t status;

	if (!map) {
		return KV_ERR_NOMEM;
	}
	map->incarnation = kvc->incarnation;
	map->refs = 1;

	status = kvc_map_fd(fds->mirror, reply->mirror_bytes, PROT_READ, &base);
	if (status != KV_OK) {
		goto err_map;
	}
	map->mirror = base;
	map->mirror_bytes = reply->mirror_bytes;
	status = mirror_check(kvc, map);
	if (status == KV_OK && kvc->role != KVC_ROLE_MATCH) {
		status = member_map(kvc, map, reply, fds);
	}
	if (status != KV_OK) {
		goto err_map;
	}
	/* A match must not take page faults: touch the mirror's pages now. */
	(void)madvise((void *)(uintptr_t)map->mirror, map->mirror_bytes, MADV_POPULATE_READ);
	*p_map = map;

	return KV_OK;

err_map:
	map_destroy(kvc, map);

	return status;
}

void kvc_map_ref(kvc_map_t *map)
{
	map->refs++;
}

void kvc_map_unref(kvc_map_t *map)
{
	if (kv_holds(map->refs > 0)) {
		map->refs--;
	}
}

void kvc_map_retire(kvc_t *kvc)
{
	kvc_map_t *map = atomic_exchange(&kvc->map, NULL);

	if (map) {
		atomic_store(&map->dead, 1u);
		map->next = kvc->retired;
		kvc->retired = map;
		kvc_map_unref(map);
		kvc_map_reap(kvc);
	}
}

void kvc_map_reap(kvc_t *kvc)
{
	kvc_map_t **link = &kvc->retired;

	/* A match that starts now finds the new map or none; one that had found the old one is counted here. */
	if (!kvc->retired || atomic_load(&kvc->readers) != 0) {
		return;
	}
	while (*link) {
		kvc_map_t *map = *link;

		if (map->refs) {
			link = &map->next;
			continue;
		}
		*link = map->next;
		map_destroy(kvc, map);
	}
}

void kvc_map_destroy_all(kvc_t *kvc)
{
	kvc_map_t *map = atomic_exchange(&kvc->map, NULL);

	if (map) {
		map->next = kvc->retired;
		kvc->retired = map;
	}
	while (kvc->retired) {
		map = kvc->retired;
		kvc->retired = map->next;
		map_destroy(kvc, map);
	}
}

kvc_map_t *kvc_map_enter(kvc_t *kvc)
{
	atomic_fetch_add(&kvc->readers, 1u);

	return atomic_load(&kvc->map);
}

void kvc_map_leave(kvc_t *kvc)
{
	atomic_fetch_sub(&kvc->readers, 1u);
}
