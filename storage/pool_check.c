/* The pool's sums, counted again from the ledger, the slabs and the stacks of free slots. */
#include "pool_priv.h"

#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>

typedef struct checker {
	const kvs_pool_t *pool;
	kvs_usage_t sum;
	char *detail;
	size_t cap;
} checker_t;

__attribute__((format(printf, 2, 3))) static kv_status_t fail(const checker_t *c, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(c->detail, c->cap, format, args);
	va_end(args);

	return KV_ERR_INTERNAL;
}

static int has_size(const kvs_area_t *area)
{
	struct stat st;

	return fstat(area->fd, &st) == 0 && (uint64_t)st.st_size == area->bytes;
}

static kv_status_t check_slab(checker_t *c, uint32_t number)
{
	const kvs_pool_slab_t *p = c->pool->slabs[number];

	if (p->slab.number != number || !has_size(&p->slab.data) || !has_size(&p->slab.digest)) {
		return fail(c, "slab %u is not of the size it was made", number);
	}

	for (uint32_t i = 0; i < p->slab.slots; i++) {
		switch (kvs_ledger_state(&p->slots[i])) {
		case KVS_FREE:
			c->sum.free_slots++;
			break;
		case KVS_QUARANTINED:
			c->sum.quarantined_slots++;
			c->sum.quarantined_bytes += p->slab.stride;
			break;
		default:
			c->sum.used_slots++;
			c->sum.used_bytes += p->slab.stride;
			break;
		}
	}
	c->sum.slots += p->slab.slots;
	c->sum.charged_bytes += p->slab.data.bytes + p->slab.digest.bytes + kvs_ledger_chunk_bytes(p->slab.slots);

	return KV_OK;
}

/* Free slots that alloc can reach; bounded, should a stack run in a circle. */
static uint64_t reachable(const kvs_pool_t *pool, const kvs_class_t *class)
{
	uint64_t n = 0;

	for (kv_slot_t slot = class->stack; slot != KV_SLOT_NONE && n <= pool->usage.slots; n++) {
		slot = pool->slabs[kv_slot_slab(slot)]->slab.next[kv_slot_index(slot)];
	}
	if (class->fresh_slab != KVS_NONE) {
		n += pool->slabs[class->fresh_slab]->slab.slots - class->fresh_next;
	}
	for (uint32_t i = 0, slab = class->ahead_first; i < class->ahead_count; i++) {
		n += pool->slabs[slab]->slab.slots;
		slab = pool->slabs[slab]->ahead_next;
	}

	return n;
}

kv_status_t kvs_pool_check(kvs_tier_t *tier, char *detail, size_t cap)
{
	const kvs_pool_t *pool = kvs_pool_of(tier);
	checker_t c = {.pool = pool, .detail = detail, .cap = cap};
	uint64_t free_slots = 0;

	c.sum.limit_bytes = pool->config.limit_bytes;
	c.sum.charged_bytes = kvs_ledger_fixed_bytes(pool->config.limit_bytes);
	for (uint32_t i = 0; i < pool->slab_count; i++) {
		kv_status_t status = check_slab(&c, i);

		if (status != KV_OK) {
			return status;
		}
	}
	for (uint32_t i = 0; i < pool->class_count; i++) {
		free_slots += reachable(pool, &pool->classes[i]);
	}

	if (memcmp(&c.sum, &pool->usage, sizeof c.sum) != 0) {
		return fail(&c,
			    "the ledger counts %llu free, %llu used, %llu quarantined of %llu slots in %llu bytes; the "
			    "sums say otherwise",
			    (unsigned long long)c.sum.free_slots, (unsigned long long)c.sum.used_slots,
			    (unsigned long long)c.sum.quarantined_slots, (unsigned long long)c.sum.slots,
			    (unsigned long long)c.sum.charged_bytes);
	}
	if (free_slots != c.sum.free_slots ||
	    c.sum.free_slots + c.sum.used_slots + c.sum.quarantined_slots != c.sum.slots) {
		return fail(&c, "%llu slots are free, %llu can be reached", (unsigned long long)c.sum.free_slots,
			    (unsigned long long)free_slots);
	}
	if (pool->ledger.area.bytes != pool->ledger.header->total_bytes || !has_size(&pool->ledger.area) ||
	    c.sum.charged_bytes > c.sum.limit_bytes) {
		return fail(&c, "charged %llu bytes of %llu", (unsigned long long)c.sum.charged_bytes,
			    (unsigned long long)c.sum.limit_bytes);
	}
	snprintf(detail, cap, "%llu slots in %u slabs", (unsigned long long)c.sum.slots, pool->slab_count);

	return KV_OK;
}
