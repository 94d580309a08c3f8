/* What leases and puts share: their header and slots in the lease area. */
#include "impl.h"

kv_status_t kvc_grant_take(kvc_t *kvc, uint64_t id, uint64_t offset, uint32_t slots, kv_lease_kind_t kind,
			   kvc_grant_t *grant)
{
	kvc_map_t *map = atomic_load_explicit(&kvc->map, memory_order_relaxed);
	const kv_lease_header_t *header;

	if (!map || id == 0 || offset % 8u != 0 || offset < sizeof(kv_lease_area_header_t) ||
	    offset > map->lease_bytes ||
	    map->lease_bytes - offset < sizeof *header + (uint64_t)slots * sizeof(kv_slot_t)) {
		return KV_ERR_PROTO;
	}
	header = (const kv_lease_header_t *)(map->leases + offset);
	/* Another id: it has been revoked and its memory used again, which kvc_grant_check() says from now on. */
	if (atomic_load(&header->id) == id && header->kind != (uint32_t)kind) {
		return KV_ERR_PROTO;
	}
	kvc_map_ref(map);
	*grant = (kvc_grant_t){
		.map = map, .header = header, .id = id, .offset = offset, .slots = slots, .kind = (uint32_t)kind};

	return KV_OK;
}

void kvc_grant_drop(kvc_grant_t *grant)
{
	if (grant->map) {
		kvc_map_unref(grant->map);
	}
	*grant = (kvc_grant_t){0};
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wtsan"
#endif
kv_status_t kvc_grant_check(const kvc_grant_t *grant)
{
	/* The bytes copied before must have been read before id and state are; and the state before the id: when the
	 * memory has gone to the next lease in between, the id is another. The other way round that lease's state would
	 * be taken for this one's. */
	atomic_thread_fence(memory_order_acquire);
	if (!grant->map || atomic_load_explicit(&grant->map->dead, memory_order_acquire) ||
	    atomic_load_explicit(&grant->header->state, memory_order_acquire) != KV_LEASE_ACTIVE ||
	    atomic_load_explicit(&grant->header->id, memory_order_acquire) != grant->id) {
		return KV_ERR_REVOKED;
	}

	return KV_OK;
}
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

kv_slot_t kvc_grant_slot(const kvc_grant_t *grant, uint32_t i)
{
	return i < grant->slots ? __atomic_load_n(&kv_lease_slots(grant->header)[i], __ATOMIC_RELAXED) : KV_SLOT_NONE;
}
