/* The CPU pool: composition, and what the operations are. */
#include "adopt.h"
#include "geometry.h"
#include "cpu/slab/slab_table.h"
#include "tier_ops.h"

#include "kv/system.h"
#include "kvs/sigbus.h"

static kv_status_t pool_flush(kvs_tier_t *tier, kvs_done_fn done, void *arg)
{
	(void)tier;
	done(arg, KV_OK); /* memory has nothing behind it to wait for */

	return KV_OK;
}

static uint64_t pool_slot_bytes(kvs_tier_t *tier, uint32_t slot_class)
{
	return kvs_geometry_stride(&kvs_pool_of(tier)->classes[slot_class].geometry);
}

static void pool_usage(kvs_tier_t *tier, kvs_usage_t *p_usage)
{
	*p_usage = kvs_pool_of(tier)->usage;
}

static kv_status_t pool_cap(kvs_tier_t *tier, const char *ns, uint64_t bytes)
{
	return kvs_caps_set(&kvs_pool_of(tier)->caps, ns, bytes);
}

static int pool_event_fd(kvs_tier_t *tier)
{
	(void)tier;

	return -1;
}

/* Transfers end inside the call that starts them. */
static uint32_t pool_poll(kvs_tier_t *tier, uint32_t max)
{
	(void)tier;
	(void)max;

	return 0;
}

static uint32_t pool_in_flight(kvs_tier_t *tier)
{
	(void)tier;

	return 0;
}

static void pool_close(kvs_tier_t *tier)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	kv_env_t env = pool->env;

	pool->usage = (kvs_usage_t){0};
	kvs_pool_update_gauges(pool);
	kvs_prefault_stop(pool->prefault);
	for (uint32_t i = 0; i < pool->slab_count; i++) {
		if (pool->slabs[i]) {
			kvs_slab_destroy(&pool->slabs[i]->slab, &env);
			kv_free(&env, pool->slabs[i]);
		}
	}
	kvs_pool_end_adoption(pool);
	kvs_ledger_destroy(&pool->ledger, &env);
	kv_free(&env, pool->epochs);
	kv_free(&env, pool->slabs);
	kv_free(&env, pool->classes);
	kv_free(&env, pool);
}

static const kvs_tier_ops_t pool_ops = {
	.medium = "CPU",
	.rebalance = &kvs_pool_rebalance_ops,
	.class_open = kvs_pool_class_open,
	.class_close = kvs_pool_class_close,
	.class_ns = kvs_pool_class_ns,
	.class_bytes = kvs_pool_class_bytes,
	.cap = pool_cap,
	.alloc = kvs_pool_alloc,
	.set_state = kvs_pool_set_state,
	.free = kvs_pool_free,
	.mem = kvs_pool_mem,
	.store = kvs_pool_store,
	.load = kvs_pool_load,
	.flush = pool_flush,
	.epoch_set = kvs_pool_epoch_set,
	.epoch_get = kvs_pool_epoch_get,
	.epochs_drop = kvs_pool_epochs_drop,
	.recover = kvs_pool_recover,
	.usage = pool_usage,
	.event_fd = pool_event_fd,
	.poll = pool_poll,
	.in_flight = pool_in_flight,
	.check = kvs_pool_check,
	.touch = kvs_pool_touch,
	.recover_use = kvs_pool_recover_use,
	.close = pool_close,
	.slot_bytes = pool_slot_bytes,
};

kv_status_t kvs_pool_slab(kvs_tier_t *tier, uint32_t slab, kvs_slab_info_t *p_info)
{
	kvs_pool_t *pool = kvs_pool_of(tier);

	if (slab >= pool->slab_count || !pool->slabs[slab] || pool->slabs[slab]->hidden) {
		return KV_MISS;
	}

	const kvs_pool_slab_t *p = pool->slabs[slab];
	const kvs_slab_t *s = &p->slab;

	*p_info = (kvs_slab_info_t){
		.slab = slab,
		.serial = p->serial,
		.retired = p->state >= KVS_SLAB_RETIRED,
		.slot_class = p->slot_class,
		.slots = s->slots,
		.slot_bytes = s->stride,
		.geometry = s->geometry,
		.bytes = s->data.bytes,
		.digest_bytes = s->digest.bytes,
		.data_fd = s->data.fd,
		.digest_fd = s->digest.fd,
		.huge = s->huge,
		.memory = s->foreign ? pool->config.memory : KV_SLAB_MEMFD,
		.base = s->data.base,
		.ready_bytes = atomic_load_explicit(&s->ready_bytes, memory_order_acquire),
		.ns = pool->classes[p->slot_class].ns,
	};

	return KV_OK;
}

uint32_t kvs_pool_slab_count(kvs_tier_t *tier)
{
	return kvs_pool_of(tier)->slab_count;
}

uint64_t kvs_pool_version(const kvs_tier_t *tier)
{
	return ((const kvs_pool_t *)tier)->version;
}

uint32_t kvs_pool_slabs_held(const kvs_tier_t *tier)
{
	return ((const kvs_pool_t *)tier)->held;
}

kv_status_t kvs_pool_class(kvs_tier_t *tier, uint32_t slot_class, kvs_class_info_t *p_look)
{
	const kvs_pool_t *pool = kvs_pool_of(tier);

	if (slot_class >= pool->class_count) {
		return KV_MISS;
	}

	const kvs_class_t *class = &pool->classes[slot_class];

	*p_look = (kvs_class_info_t){
		.ns = class->ns, .block_bytes = class->geometry.block_bytes, .free_slots = class->free_slots};
	for (uint32_t i = 0; i < pool->slab_count; i++) {
		const kvs_pool_slab_t *p = pool->slabs[i];

		if (p && p->slot_class == slot_class && p->state < KVS_SLAB_RETIRED) {
			p_look->slabs++;
			p_look->slots += p->slab.slots;
			p_look->bytes += p->slab.data.bytes;
			p_look->ready_bytes += atomic_load_explicit(&p->slab.ready_bytes, memory_order_relaxed);
		}
	}

	return KV_OK;
}

void kvs_pool_set_region(kvs_tier_t *tier, uint32_t slab, uint32_t region)
{
	kvs_pool_t *pool = kvs_pool_of(tier);

	if (slab < pool->slab_count && pool->slabs[slab]) {
		pool->slabs[slab]->slab.region = region;
	}
}

kv_status_t kvs_pool_add_record(kvs_tier_t *tier, const kvs_record_t *record)
{
	return kvs_ledger_add_record(&kvs_pool_of(tier)->ledger, record);
}

void kvs_pool_remove_record(kvs_tier_t *tier, uint64_t id)
{
	kvs_ledger_remove_record(&kvs_pool_of(tier)->ledger, id);
}

static kv_status_t pool_memory(kvs_pool_t *pool)
{
	const kvs_pool_config_t *config = &pool->config;

	pool->classes = kv_alloc(&pool->env, KVS_POOL_MAX_CLASSES * sizeof *pool->classes);
	pool->slabs = kv_alloc(&pool->env, KVS_POOL_MAX_SLABS * sizeof(kvs_pool_slab_t *));
	if (!pool->classes || !pool->slabs) {
		return KV_ERR_NOMEM;
	}

	const kvs_ledger_size_t size = {.limit_bytes = config->limit_bytes,
					.slab_bytes = config->slab_bytes,
					.incarnation = config->incarnation,
					.max_slabs = config->max_slabs,
					.epochs = config->take ? KVS_POOL_KEPT_EPOCHS : 0};
	int error = kvs_ledger_create(&pool->ledger, pool->sys, &pool->env, &size);

	if (error) {
		return kv_refused(&pool->env, "pool", kvs_shm_failed_call(), -error);
	}

	return config->prefault ? kvs_prefault_start(&(kvs_prefault_config_t){.max_slabs = KVS_POOL_MAX_SLABS,
									      .huge = config->huge != KVS_HUGE_OFF,
									      .sys = pool->sys,
									      .room = config->room,
									      .room_ctx = config->room_ctx},
						     &pool->env, &pool->prefault)
				: KV_OK;
}

/* Slab numbers have 12 bits: slabs must be large enough for that many of them to make up the limit, even half filled.
 */
static void pool_slab_size(kvs_pool_t *pool)
{
	uint64_t most = pool->config.max_slabs ? pool->config.max_slabs : KVS_POOL_MAX_SLABS;
	uint64_t least = (pool->config.limit_bytes / (most / 2u) + 4095u) / 4096u * 4096u;

	if (pool->config.take) {
		return;
	}

	if (pool->config.slab_bytes < least) {
		kv_logf(&pool->env, KV_LOG_WARN, "pool",
			"slabs are too small for this pool; making them larger slab_bytes %llu instead_of %llu",
			(unsigned long long)least, (unsigned long long)pool->config.slab_bytes);
		pool->config.slab_bytes = least;
	}
}

/* What the pages will be is said once, at the start. */
static void pool_announce(kvs_pool_t *pool)
{
	char setting[128];

	pool->huge = pool->config.huge != KVS_HUGE_OFF;
	pool->ahead_class = pool->warming = KVS_NONE;
	pool->thp = kvs_thp_works(setting, sizeof setting) && pool->huge;
	if (pool->config.take) {
		return;
	}
	kv_logf(&pool->env, KV_LOG_INFO, "pool",
		"CPU pool is open limit_bytes %llu slab_bytes %llu max_blocks %llu transparent_huge_pages \"%s\"",
		(unsigned long long)pool->config.limit_bytes, (unsigned long long)pool->config.slab_bytes,
		(unsigned long long)pool->config.max_blocks, setting);
}

kv_status_t kvs_pool_open_with(const kvs_pool_config_t *config, const kv_env_t *env, const kvs_sys_t *sys,
			       kvs_tier_t **p_tier)
{
	uint64_t fixed = kvs_ledger_fixed_bytes(config->limit_bytes);
	kv_status_t status;

	if (config->slab_bytes == 0 || config->incarnation == 0 || !config->metrics ||
	    config->limit_bytes < (config->take ? config->slab_bytes : fixed) || config->max_slabs == 1 ||
	    config->limit_bytes > (uint64_t)1 << 50 || config->slab_bytes > (uint64_t)1 << 50) {
		return KV_ERR_ARG;
	}
	status = kvs_sigbus_install();
	if (status != KV_OK) {
		return status;
	}

	kvs_pool_t *pool = kv_alloc(env, sizeof *pool);

	if (!pool) {
		return KV_ERR_NOMEM;
	}
	pool->ops = pool_ops;
	pool->ops.medium = config->take ? "GPU" : "CPU";
	pool->tier.ops = &pool->ops;
	pool->config = *config;
	pool->env = *env;
	pool->sys = sys;
	pool_slab_size(pool);
	status = pool_memory(pool);
	if (status != KV_OK) {
		pool_close(&pool->tier);
		return status;
	}

	pool_announce(pool);
	pool->usage.limit_bytes = config->limit_bytes;
	pool->usage.charged_bytes = config->take ? 0 : fixed;
	if (config->take && config->claim) {
		kvs_pool_adopt(pool);
	}
	kvs_pool_update_gauges(pool);
	/* Last: until now a daemon that comes after a crash finds the ledger that was there (decision 059). */
	if (config->hold) {
		config->hold(config->hold_ctx, "ledger", pool->ledger.area.fd);
	}
	*p_tier = &pool->tier;

	return KV_OK;
}

kv_status_t kvs_pool_open(const kvs_pool_config_t *config, const kv_env_t *env, kvs_tier_t **p_tier)
{
	return kvs_pool_open_with(config, env, &kvs_sys_posix, p_tier);
}
