/* The pool's sums, counted again from the ledger, the slabs and the stacks of free slots. */
#include "pool.h"
#include "tier_ops.h"

#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>

typedef struct checker {
	const kvs_pool_t *pool;
	kvs_usage_t sum;
	uint32_t held;
	char *detail;
	size_t cap;
} checker_t;

__attribute__((format(printf, 2, 3))) static kv_status_t report(const checker_t *c, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(c->detail, c->cap, format, args);
	va_end(args);

	return KV_ERR_INTERNAL;
}

static int has_size(const kvs_shm_t *area)
{
	struct stat st;

	return fstat(area->fd, &st) == 0 && (uint64_t)st.st_size == area->bytes;
}

/* Free slots that alloc can reach in a slab; bounded, should its stack run in a circle. */
static uint64_t count_reachable(const kvs_pool_slab_t *p)
{
	uint64_t n = p->slab.slots - p->fresh;

	for (uint32_t i = p->stack; i != KVS_NONE && n <= p->slab.slots; n++) {
		i = p->slab.next[i];
	}

	return n;
}

/* The slots of a slab that has not been retired. */
static kv_status_t check_slots(checker_t *c, const kvs_pool_slab_t *p)
{
	uint32_t taken = 0, open = 0;

	for (uint32_t i = 0; i < p->slab.slots; i++) {
		kvs_state_t state = kvs_ledger_state(&p->slots[i]);

		taken += state != KVS_FREE;
		open += state != KVS_FREE && state != KVS_READY;
		switch (state) {
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
	if (taken != p->taken || open != p->open || count_reachable(p) != p->slab.slots - taken) {
		return report(c, "slab %u: %u slots are taken and %u open, %u and %u are counted, %llu can be reached",
			      p->slab.number, taken, open, p->taken, p->open, (unsigned long long)count_reachable(p));
	}

	return KV_OK;
}

static kv_status_t check_slab(checker_t *c, uint32_t number)
{
	const kvs_pool_slab_t *p = c->pool->slabs[number];

	c->sum.charged_bytes += c->pool->config.take ? 0 : c->pool->ledger.touched[number];
	if (!p) {
		return KV_OK;
	}
	if (p->state == KVS_SLAB_ZOMBIE) { /* never of memory from elsewhere */
		c->sum.charged_bytes += p->slab.digest.bytes;
		return KV_OK;
	}
	if (p->slab.number != number || !(p->slab.foreign || has_size(&p->slab.data)) || !has_size(&p->slab.digest)) {
		return report(c, "slab %u is not of the size it was made", number);
	}
	c->held++;
	c->sum.charged_bytes += p->slab.data.bytes + (p->slab.foreign ? 0 : p->slab.digest.bytes);

	return p->state == KVS_SLAB_RETIRED ? KV_OK : check_slots(c, p);
}

/* Lists and count of a class's free slots. */
static kv_status_t check_class(checker_t *c, uint32_t number)
{
	const kvs_pool_t *pool = c->pool;
	const kvs_class_t *class = &pool->classes[number];
	uint64_t listed[KVS_LISTS] = {0, 0}, there[KVS_LISTS] = {0, 0}, free_slots = 0, open_slots = 0;

	for (kvs_list_t list = KVS_WARM; list < KVS_LISTS; list++) {
		for (uint32_t i = class->first[list]; i != KVS_NONE && listed[list] <= pool->slab_count;
		     listed[list]++) {
			i = pool->slabs[i]->next[list];
		}
	}
	for (uint32_t i = 0; i < pool->slab_count; i++) {
		const kvs_pool_slab_t *p = pool->slabs[i];

		open_slots += p && p->slot_class == number && p->open > 0 ? p->slab.slots : 0;
		if (p && p->slot_class == number && p->state == KVS_SLAB_USED) {
			there[KVS_WARM] += p->stack != KVS_NONE;
			there[KVS_FRESH] += p->fresh < p->slab.slots;
			free_slots += p->slab.slots - p->taken;
		}
	}
	if (memcmp(listed, there, sizeof there) != 0 || free_slots != class->free_slots ||
	    open_slots != class->open_slots) {
		return report(
			c,
			"class %u: %llu and %llu slabs listed, %llu and %llu there; %llu slots free, %llu counted; "
			"%llu in slabs with an open one, %llu counted",
			number, (unsigned long long)listed[0], (unsigned long long)listed[1],
			(unsigned long long)there[0], (unsigned long long)there[1], (unsigned long long)free_slots,
			(unsigned long long)class->free_slots, (unsigned long long)open_slots,
			(unsigned long long)class->open_slots);
	}

	return KV_OK;
}

kv_status_t kvs_pool_check(kvs_tier_t *tier, char *detail, size_t cap)
{
	const kvs_pool_t *pool = kvs_pool_of(tier);
	checker_t c = {.pool = pool, .detail = detail, .cap = cap};

	c.sum.limit_bytes = pool->config.limit_bytes;
	c.sum.charged_bytes = pool->config.take ? 0 : kvs_ledger_fixed_bytes(pool->config.limit_bytes);
	for (uint32_t i = 0; i < pool->slab_count; i++) {
		kv_status_t status = check_slab(&c, i);

		if (status != KV_OK) {
			return status;
		}
	}
	for (uint32_t i = 0; i < pool->class_count; i++) {
		kv_status_t status = check_class(&c, i);

		if (status != KV_OK) {
			return status;
		}
	}

	if (memcmp(&c.sum, &pool->usage, sizeof c.sum) != 0) {
		return report(
			&c,
			"the ledger counts %llu free, %llu used, %llu quarantined of %llu slots in %llu bytes; the "
			"sums say otherwise",
			(unsigned long long)c.sum.free_slots, (unsigned long long)c.sum.used_slots,
			(unsigned long long)c.sum.quarantined_slots, (unsigned long long)c.sum.slots,
			(unsigned long long)c.sum.charged_bytes);
	}
	if (c.sum.free_slots + c.sum.used_slots + c.sum.quarantined_slots != c.sum.slots || c.held != pool->held) {
		return report(&c, "%llu slots in %u slabs, %u are counted", (unsigned long long)c.sum.slots, c.held,
			      pool->held);
	}
	if (pool->ledger.area.bytes != pool->ledger.header->total_bytes || !has_size(&pool->ledger.area) ||
	    c.sum.charged_bytes > c.sum.limit_bytes) {
		return report(&c, "charged %llu bytes of %llu", (unsigned long long)c.sum.charged_bytes,
			      (unsigned long long)c.sum.limit_bytes);
	}
	snprintf(detail, cap, "%llu slots in %u slabs", (unsigned long long)c.sum.slots, c.held);

	return KV_OK;
}
