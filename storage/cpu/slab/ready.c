/* Memory that has been touched, and what becomes of slabs where touching fails. */
#include "carve.h"
#include "geometry.h"
#include "slab_table.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#define RETRY_NS    UINT64_C(1000000000) /* after a failure */
#define LOOK_NS     UINT64_C(50000000)
#define WARMING_NS  UINT64_C(100000000)
#define WARM_BYTES  (UINT64_C(16) << 20)
#define LOOK_SLABS  16u /* at a time: each costs a system call */
#define FRESH_TRIES 8u  /* slabs whose touching has failed, passed over at a time */

static int error_of(const kvs_pool_slab_t *p)
{
	return atomic_load_explicit(&p->slab.error, memory_order_acquire);
}

static void note_failure(kvs_pool_t *pool, kvs_pool_slab_t *p, int error)
{
	p->again_ns = kv_now_ns(&pool->env) + RETRY_NS;
	kv_metric_add(pool->config.metrics, KV_M_CPU_MEMORY_REFUSED, 1);
	if (pool->refusal != error) {
		pool->refusal = error;
		kv_logf(&pool->env, KV_LOG_WARN, "pool",
			"the kernel, or a limit of memory, refuses pages of the pool: it stays as large as it is, "
			"trying "
			"again every second slab %u ready_bytes %llu error \"%s\"",
			p->slab.number, (unsigned long long)atomic_load(&p->slab.ready_bytes), strerror(error));
	}
}

/* ---- slots ----------------------------------------------------------------------------------- */

/* A slot that is read into from disk is not lent before the read has ended, and that waits for the memory: its record
 * is all that is needed now. */
static int may_be_filled(const kvs_pool_t *pool, kvs_pool_slab_t *p)
{
	return pool->prefault && !p->hidden && !error_of(p) && kvs_slab_open(&p->slab, pool->sys) == 0;
}

void kvs_pool_hurry(kvs_pool_t *pool, const kvs_pool_slab_t *p)
{
	if (pool->prefault && !kvs_slab_whole(&p->slab)) {
		kvs_prefault_hurry(pool->prefault, &p->slab);
	}
}

void kvs_pool_warm(kvs_pool_t *pool, const kvs_pool_slab_t *p)
{
	kvs_pool_hurry(pool, p);
	pool->warming = p->slab.number;
	pool->warming_until_ns = kv_now_ns(&pool->env) + WARMING_NS;
}

int kvs_pool_is_warming(kvs_tier_t *tier)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	const kvs_pool_slab_t *p = pool->warming == KVS_NONE ? NULL : pool->slabs[pool->warming];
	const uint64_t ready = p ? atomic_load_explicit(&p->slab.ready_bytes, memory_order_relaxed) : 0;

	if (p && ready < WARM_BYTES && !kvs_slab_whole(&p->slab) && !error_of(p) &&
	    kv_now_ns(&pool->env) < pool->warming_until_ns) {
		return 1;
	}
	pool->warming = KVS_NONE;

	return 0;
}

kv_status_t kvs_pool_check_slot(kvs_pool_t *pool, kvs_pool_slab_t *p, uint32_t index, kvs_state_t state)
{
	if (kvs_slab_ready(&p->slab, index)) {
		return KV_OK;
	}
	kv_metric_add(pool->config.metrics, KV_M_CPU_FIRST_TOUCH, 1);
	kvs_pool_hurry(pool, p);
	if (state == KVS_FILLING && may_be_filled(pool, p)) {
		return KV_OK;
	}

	/* Small pages come in the place of huge ones. */
	return error_of(p) && !p->hidden ? KV_ERR_FULL : KV_ERR_BUSY;
}

/* ---- slabs ----------------------------------------------------------------------------------- */

static void touch_again(kvs_pool_t *pool, kvs_pool_slab_t *p)
{
	p->again_ns = 0;
	if (pool->prefault) {
		kvs_prefault_add(pool->prefault, &p->slab);
	} else {
		atomic_store_explicit(&p->slab.error, -kvs_slab_touch(&p->slab, pool->sys), memory_order_relaxed);
	}
}

/* What has become of a slab that was not whole. It may be another one at its number then. */
static void look_at(kvs_pool_t *pool, kvs_pool_slab_t *p)
{
	int error = error_of(p);

	if (p->hidden && kvs_slab_whole(&p->slab)) {
		p->hidden = 0;
		pool->version++;
	}
	if (!error || !kvs_prefault_is_done(pool->prefault, &p->slab)) {
		return;
	}
	if (p->hidden && error != EAGAIN) {
		kvs_pool_replace_slab(pool, p);
	} else if (p->again_ns == 0) {
		note_failure(pool, p, error);
	} else if (kv_now_ns(&pool->env) >= p->again_ns) {
		touch_again(pool, p);
	}
}

kv_status_t kvs_pool_find_fresh(kvs_pool_t *pool, uint32_t slot_class, kvs_state_t state, kvs_pool_slab_t **p_slab)
{
	const kvs_class_t *class = &pool->classes[slot_class];
	kv_status_t status = KV_ERR_FULL;

	if (class->first[KVS_FRESH] == KVS_NONE && kvs_pool_carve(pool, slot_class) != KV_OK) {
		return KV_ERR_FULL;
	}
	for (uint32_t i = 0; i < FRESH_TRIES; i++) {
		kvs_pool_slab_t *p = pool->slabs[class->first[KVS_FRESH]];

		if (p->hidden || error_of(p)) {
			look_at(pool, p);
			if (class->first[KVS_FRESH] == KVS_NONE) {
				return KV_ERR_FULL;
			}
			p = pool->slabs[class->first[KVS_FRESH]];
		}
		status = kvs_pool_check_slot(pool, p, p->fresh, state);
		if (status != KV_ERR_FULL) {
			*p_slab = p;
			break;
		}
		kvs_pool_unlink(pool, p, KVS_FRESH);
		kvs_pool_link(pool, p, KVS_FRESH, 0);
		if (class->first[KVS_FRESH] == p->slab.number) {
			break;
		}
	}

	return status;
}

/* Pages that a client has taken away are touched again before the next slot is given out. */
static void look_for_holes(kvs_pool_t *pool, kvs_pool_slab_t *p)
{
	const uint64_t ready = atomic_load_explicit(&p->slab.ready_bytes, memory_order_relaxed);
	struct stat st;

	if (p->slab.foreign || ready == 0 || !kvs_prefault_is_done(pool->prefault, &p->slab) ||
	    fstat(p->slab.data.fd, &st) != 0 || (uint64_t)st.st_blocks * 512u >= ready) {
		return;
	}
	kv_metric_add(pool->config.metrics, KV_M_SLAB_FAULTS, 1);
	kvs_slab_set_ready(&p->slab, 0);
	touch_again(pool, p);
}

/* Now and then: show what is there as a whole, replace what will not be, and try again what has failed. */
static void look_at_slabs(kvs_pool_t *pool)
{
	const uint64_t now = kv_now_ns(&pool->env);

	if (now < pool->look_ns) {
		return;
	}
	pool->look_ns = now + LOOK_NS;
	for (uint32_t i = 0; i < pool->slab_count; i++) {
		kvs_pool_slab_t *p = pool->slabs[i];

		if (p && p->state == KVS_SLAB_USED && (p->hidden || error_of(p))) {
			look_at(pool, p);
		}
	}
	for (uint32_t i = 0; i < LOOK_SLABS && i < pool->slab_count; i++) {
		kvs_pool_slab_t *p = pool->slabs[pool->look_at++ % pool->slab_count];

		if (p && p->state == KVS_SLAB_USED) {
			look_for_holes(pool, p);
		}
	}
}

/* ---- ahead of need --------------------------------------------------------------------------- */

#define ALL_AT_A_TIME 16u /* slabs carved in one turn of a loop: a carve takes some 50 us */

/* Bytes of the class beyond the slab in use. */
static uint64_t ahead_of(const kvs_pool_t *pool, const kvs_class_t *class)
{
	const kvs_pool_slab_t *used = class->first[KVS_FRESH] == KVS_NONE ? NULL : pool->slabs[class->first[KVS_FRESH]];

	return (class->free_slots - (used ? used->slab.slots - used->fresh : 0)) *
	       (uint64_t)kvs_geometry_stride(&class->geometry);
}

/* Of these, bytes that have been touched: all but the rest of the last slab. */
static uint64_t ready_ahead_of(const kvs_pool_t *pool, const kvs_class_t *class)
{
	const uint64_t ahead = ahead_of(pool, class);
	uint64_t rest = 0;

	if (class->newest != KVS_NONE) {
		const kvs_slab_t *newest = &pool->slabs[class->newest]->slab;

		rest = newest->data.bytes - atomic_load_explicit(&newest->ready_bytes, memory_order_relaxed);
	}

	return ahead > rest ? ahead - rest : 0;
}

/* Is the class's last slab touched, and less beyond the slab in use than there should be? */
static int carve_is_due(const kvs_pool_t *pool, const kvs_class_t *class, uint64_t wanted)
{
	const kvs_pool_slab_t *newest = class->newest == KVS_NONE ? NULL : pool->slabs[class->newest];

	/* One at a time, touched before the next: no faster than there is time for it. */
	if (newest && newest->state == KVS_SLAB_USED && !kvs_slab_ready(&newest->slab, newest->slab.slots - 1)) {
		return 0;
	}

	return ahead_of(pool, class) < wanted;
}

void kvs_pool_carve_ahead(kvs_tier_t *tier, int busy)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	const int all = pool->config.ahead_bytes == KVS_AHEAD_ALL;
	const uint64_t wanted = busy ? pool->config.ahead_bytes / 2u : pool->config.ahead_bytes;
	const kvs_class_t *class;

	look_at_slabs(pool);
	if (!pool->thp && kvs_prefault_huge(pool->prefault)) {
		pool->thp = 1;
		kv_metric_set(pool->config.metrics, KV_M_CPU_HUGE_PAGES, 1);
	}
	if (!pool->prefault || pool->config.ahead_bytes == 0 || pool->ahead_class == KVS_NONE) {
		return;
	}
	class = &pool->classes[pool->ahead_class];
	kvs_prefault_pause(pool->prefault, !all && busy && ready_ahead_of(pool, class) >= wanted);
	for (uint32_t i = 0; i < (all ? ALL_AT_A_TIME : 1u); i++) {
		if ((!all && !carve_is_due(pool, class, wanted)) || kvs_pool_carve(pool, pool->ahead_class) != KV_OK) {
			return;
		}
	}
}
