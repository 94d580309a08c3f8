/* Carving: the next slab of a class, exactly within what the limit leaves. */
#include "carve.h"

#include "geometry.h"
#include "slab_table.h"

#include "kv/system.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

/* How long the kernel is not asked again after it has refused memory. */
#define RETRY_NS UINT64_C(1000000000)

/* Low ones first: their part of the ledger has been touched already. */
uint32_t kvs_pool_next_number(const kvs_pool_t *pool)
{
	for (uint32_t i = 0; pool->slab_count > pool->held && i < pool->slab_count; i++) {
		if (!pool->slabs[i]) {
			return i;
		}
	}

	return pool->slab_count < pool->ledger.chunks ? pool->slab_count : KVS_NONE;
}

/* The limit of a pool of memory from elsewhere is for that memory alone. */
static uint64_t slab_cost(const kvs_pool_t *pool, const kvs_geometry_t *geometry, uint64_t slots, uint64_t page,
			  uint32_t number)
{
	if (pool->config.take) {
		return kvs_slab_data_bytes(geometry, slots, page);
	}

	return kvs_slab_data_bytes(geometry, slots, page) + kvs_slab_digest_bytes(geometry, slots) +
	       kvs_ledger_slab_cost(&pool->ledger, number, slots);
}

uint64_t kvs_pool_slab_cost(const kvs_pool_t *pool, const kvs_geometry_t *geometry, uint64_t slots, uint64_t page)
{
	uint32_t number = kvs_pool_next_number(pool);

	return slab_cost(pool, geometry, slots, page, number == KVS_NONE ? 0 : number);
}

static uint64_t min_of(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* The most slots that slab size, limit, cap, max_blocks and slot numbers allow the next slab. */
uint32_t kvs_pool_fit_slots(const kvs_pool_t *pool, uint32_t slot_class, uint64_t page, const kvs_pool_slab_t *instead)
{
	const kvs_class_t *class = &pool->classes[slot_class];
	const kvs_geometry_t *geometry = &class->geometry;
	uint64_t extra = instead ? instead->slab.data.bytes : 0;
	uint64_t room = pool->usage.limit_bytes - pool->usage.charged_bytes + extra;
	uint64_t left = kvs_caps_left(&pool->caps, (kvs_tier_t *)(uintptr_t)&pool->tier, slot_class, pool->class_count);
	uint64_t stride = kvs_geometry_stride(geometry);
	uint64_t most = min_of(KV_SLOT_MAX_INDEX + 1u, room / stride);
	uint64_t least = 0;
	uint32_t number = most > 0 ? kvs_pool_next_number(pool) : KVS_NONE;

	if (number == KVS_NONE) {
		return 0;
	}
	if (pool->config.take) {
		page = pool->config.slab_bytes;
		most = min_of(most, page / stride); /* a block does not lie in two slabs */
	}
	if (left != UINT64_MAX && instead && strcmp(pool->classes[instead->slot_class].ns, class->ns) == 0) {
		left += extra;
	}
	most = min_of(most, pool->config.slab_bytes < stride ? 1u : pool->config.slab_bytes / stride);
	if (pool->config.max_blocks > 0 && extra == 0) {
		most = min_of(most, pool->config.max_blocks - pool->usage.slots);
	}

	/* Cost grows with the slots: the largest count that fits lies in [least, most]. */
	while (least < most) {
		uint64_t middle = least + (most - least + 1u) / 2u;

		if (slab_cost(pool, geometry, middle, page, number) <= room &&
		    kvs_slab_data_bytes(geometry, middle, page) <= left) {
			least = middle;
		} else {
			most = middle - 1u;
		}
	}

	return (uint32_t)least;
}

/* Reserved huge pages were refused: the rest of the pool does without, said once. */
static void give_up_huge_pages(kvs_pool_t *pool, int error)
{
	if (!pool->huge) {
		return;
	}
	pool->huge = 0;
	kv_logf(&pool->env, pool->config.huge == KVS_HUGE_ON ? KV_LOG_WARN : KV_LOG_INFO, "pool",
		"no reserved huge pages, see vm.nr_hugepages and the hugetlb limits of the control group error \"%s\"; "
		"going on with %s",
		strerror(-error), pool->thp ? "transparent huge pages" : "small pages");
}

/* The page of the ledger that the slab is entered in; without a thread everything, as nobody else will. */
int kvs_pool_touch_first(kvs_pool_t *pool, kvs_slab_t *slab)
{
	slab->records = kvs_ledger_records(&pool->ledger, slab->number, slab->slots);

	return pool->prefault ? kvs_shm_populate(pool->sys, slab->records.base, KVS_LEDGER_PAGE)
			      : kvs_slab_touch(slab, pool->sys);
}

static int create_slab(kvs_pool_t *pool, kvs_pool_slab_t *p, int huge, uint32_t slots)
{
	int error;

	p->slab.geometry = pool->classes[p->slot_class].geometry;
	p->slab.number = kvs_pool_next_number(pool);
	p->slab.id = pool->config.incarnation * UINT64_C(0x9e3779b97f4a7c15) + pool->version;
	p->slab.slots = slots;
	p->slab.huge = huge;
	if (pool->config.take) {
		p->slab.foreign = 1;
		p->slab.data =
			(kvs_shm_t){.bytes = pool->config.slab_bytes, .fd = pool->config.take(pool->config.take_ctx)};
		if (p->slab.data.fd < 0) {
			return 1;
		}
	}
	error = kvs_slab_create(&p->slab, pool->sys, &pool->env);
	if (error && p->slab.foreign) {
		close(p->slab.data.fd);
	}
	if (!error) {
		error = kvs_pool_touch_first(pool, &p->slab);
		if (error) {
			kvs_slab_destroy(&p->slab, &pool->env);
		}
	}

	return error;
}

/* 0, 1 when nothing fits, or -errno. */
static int create_best_slab(kvs_pool_t *pool, kvs_pool_slab_t *p)
{
	uint32_t slots = pool->huge ? kvs_pool_fit_slots(pool, p->slot_class, KVS_HUGE_PAGE, NULL) : 0;

	if (slots > 0) {
		int error = create_slab(pool, p, 1, slots);

		if (!error) {
			return 0;
		}
		if (error == -EMFILE || error == -ENFILE) {
			return error; /* not for want of huge pages */
		}
		give_up_huge_pages(pool, error);
		p->slab = (kvs_slab_t){0};
	}
	slots = kvs_pool_fit_slots(pool, p->slot_class, 4096u, NULL);

	return slots > 0 ? create_slab(pool, p, 0, slots) : 1;
}

void kvs_pool_link_slab(kvs_pool_t *pool, kvs_pool_slab_t *p)
{
	const kvs_slab_t *slab = &p->slab;
	kvs_class_t *class = &pool->classes[p->slot_class];
	uint64_t beside = slab->digest.bytes + kvs_ledger_slab_cost(&pool->ledger, slab->number, slab->slots);
	uint64_t bytes = slab->data.bytes + (slab->foreign ? 0 : beside);

	p->slots = kvs_ledger_add_slab(&pool->ledger, slab, p->slot_class, class->ns);
	p->stack = KVS_NONE;
	p->serial = ++pool->version;
	pool->slabs[slab->number] = p;
	pool->slab_count += slab->number == pool->slab_count;
	pool->held++;
	pool->usage.slots += slab->slots;
	pool->usage.free_slots += slab->slots;
	pool->usage.charged_bytes += bytes;
	kv_assert(pool->usage.charged_bytes <= pool->usage.limit_bytes);
	class->free_slots += slab->slots;
	class->bytes += slab->data.bytes;
	class->newest = slab->number;
	kvs_pool_link(pool, p, KVS_FRESH, 0);
}

void kvs_pool_name(char out[KVS_HOLD_NAME], const char *what, uint64_t id)
{
	snprintf(out, KVS_HOLD_NAME, "%s.%016llx", what, (unsigned long long)id);
}

void kvs_pool_hold_slab(const kvs_pool_t *pool, const kvs_slab_t *slab)
{
	char name[KVS_HOLD_NAME];

	if (pool->config.hold) {
		kvs_pool_name(name, "slab", slab->id);
		pool->config.hold(pool->config.hold_ctx, name, slab->data.fd);
		kvs_pool_name(name, "digest", slab->id);
		pool->config.hold(pool->config.hold_ctx, name, slab->digest.fd);
	}
}

void kvs_pool_drop_slab(const kvs_pool_t *pool, uint64_t id)
{
	static const char *const names[] = {"slab", "digest"};
	char name[KVS_HOLD_NAME];

	for (size_t i = 0; pool->config.drop && i < KV_COUNT_OF(names); i++) {
		kvs_pool_name(name, names[i], id);
		pool->config.drop(pool->config.hold_ctx, name);
	}
}

static void admit_slab(kvs_pool_t *pool, kvs_pool_slab_t *p)
{
	const kvs_slab_t *slab = &p->slab;

	p->hidden = slab->huge && !kvs_slab_whole(slab);
	kvs_pool_hold_slab(pool, slab); /* first: the next daemon must have what the ledger names */
	kvs_pool_link_slab(pool, p);
	if (pool->prefault) {
		kvs_prefault_add(pool->prefault, &p->slab);
	}
	pool->look_ns = 0;
	if (!slab->foreign) {
		kv_metric_set(pool->config.metrics, KV_M_CPU_HUGE_PAGES, slab->huge || pool->thp);
	}
	kvs_pool_update_gauges(pool);
}

kv_status_t kvs_pool_carve(kvs_pool_t *pool, uint32_t slot_class)
{
	if (pool->carve_after_ns > 0 && kv_now_ns(&pool->env) < pool->carve_after_ns) {
		return KV_ERR_FULL;
	}

	/* A full pool is asked again and again: it answers before anything is allocated. */
	if (kvs_pool_fit_slots(pool, slot_class, 4096u, NULL) == 0) {
		return KV_ERR_FULL;
	}

	kvs_pool_slab_t *p = kv_alloc(&pool->env, sizeof *p);
	int error = -ENOMEM;

	if (p) {
		p->slot_class = slot_class;
		error = create_best_slab(pool, p);
	}
	if (error) {
		kv_free(&pool->env, p);
	}
	if (error < 0) {
		pool->carve_after_ns = kv_now_ns(&pool->env) + RETRY_NS;
		kv_logf(&pool->env, KV_LOG_WARN, "pool", "no new slab, trying again in a second slab %u error \"%s\"",
			kvs_pool_next_number(pool),
			kv_refused_text(p ? kvs_shm_failed_call() : "malloc", -error, pool->refused,
					sizeof pool->refused));
	}
	if (error) {
		return KV_ERR_FULL;
	}

	pool->carve_after_ns = 0;
	pool->refused[0] = '\0';
	admit_slab(pool, p);

	return KV_OK;
}

const char *kvs_pool_refusal(kvs_tier_t *tier)
{
	return kvs_pool_of(tier)->refused;
}

void kvs_pool_replace_slab(kvs_pool_t *pool, kvs_pool_slab_t *p)
{
	kvs_class_t *class = &pool->classes[p->slot_class];
	const uint32_t slot_class = p->slot_class;

	kv_assert(p->hidden && p->taken == 0);
	give_up_huge_pages(pool, -atomic_load_explicit(&p->slab.error, memory_order_relaxed));
	if (p->state == KVS_SLAB_USED) {
		kvs_pool_unlink(pool, p, KVS_FRESH);
		class->free_slots -= p->slab.slots;
	}
	kvs_ledger_remove_slab(&pool->ledger, p->slab.number);
	kvs_pool_drop_slab(pool, p->slab.id);
	class->newest = class->newest == p->slab.number ? KVS_NONE : class->newest;
	class->bytes -= p->slab.data.bytes;
	pool->usage.slots -= p->slab.slots;
	pool->usage.free_slots -= p->slab.slots;
	pool->usage.charged_bytes -= p->slab.data.bytes + p->slab.digest.bytes;
	pool->held--;
	pool->version++;
	pool->slabs[p->slab.number] = NULL;
	kvs_slab_destroy(&p->slab, &pool->env);
	kv_free(&pool->env, p);
	(void)kvs_pool_carve(pool, slot_class);
}
