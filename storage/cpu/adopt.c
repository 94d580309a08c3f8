/* The memory of an earlier daemon. Its ledger and digest tables are read only: nobody but that daemon could write them,
 * and a copy of what is valid is the new daemon's. So a crash on the way leaves everything as it was found. */
#include "adopt.h"

#include "alloc.h"
#include "cpu/slab/carve.h"
#include "geometry.h"
#include "cpu/slab/slab_table.h"
#include "tier_ops.h"

#include "kv/digest.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct whole {
	uint64_t use; /* 0 until all were reported */
	uint32_t depth;
	kv_slot_t slot;
} whole_t;

typedef struct kvs_adoption {
	whole_t *found; /* the whole blocks, in the order of the report */
	uint32_t count, next;
	int by_use; /* 1: all were reported */
	uint64_t kept;
} kvs_adoption_t;

/* The ledger that is read, and the space of the last block: those of a slab come in runs. */
typedef struct source {
	const uint8_t *base;
	uint64_t bytes;
	uint32_t slabs, slabs_kept;
	uint64_t whole, dropped, unfinished;
	uint8_t root[32];
	uint64_t epoch; /* 0: no space yet, or none that is known */
} source_t;

/* ---- the ledger ------------------------------------------------------------------------------ */

static void refuse(kvs_pool_t *pool, const char *what, const char *why)
{
	kv_metric_add(pool->config.metrics, KV_M_ADOPT_REFUSED, 1);
	kv_logf(&pool->env, KV_LOG_WARN, "pool", "memory of the daemon before is not taken over: %s: %s", what, why);
}

/* 1: nobody can cut the memfd under a reader. */
static int is_whole(int fd, uint64_t *p_bytes)
{
	struct stat st;

	if (fstat(fd, &st) != 0 || st.st_size < (off_t)KVS_LEDGER_PAGE || !(fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK)) {
		return 0;
	}
	*p_bytes = (uint64_t)st.st_size;

	return 1;
}

static int map_ledger(kvs_pool_t *pool, source_t *source)
{
	const int fd = pool->config.claim(pool->config.hold_ctx, "ledger");
	kvs_ledger_summary_t sum;
	char detail[128] = "it is no sealed memory, or too short";
	kv_status_t status = KV_ERR_FOREIGN;
	void *base = MAP_FAILED;

	if (fd < 0) {
		return 0;
	}
	if (is_whole(fd, &source->bytes)) {
		base = mmap(NULL, source->bytes, PROT_READ, MAP_SHARED, fd, 0);
	}
	close(fd);
	if (base != MAP_FAILED) {
		status = kvs_ledger_check(base, source->bytes, &sum, detail, sizeof detail);
	}
	if (status == KV_OK) {
		source->base = base;
		return 1;
	}
	refuse(pool, "the ledger", detail);
	if (base != MAP_FAILED) {
		munmap(base, source->bytes);
	}

	return 0;
}

/* ---- slots ----------------------------------------------------------------------------------- */

static void ignore(void *arg, kv_status_t status)
{
	(void)arg;
	(void)status;
}

/* Is it the epoch of its space? A space with blocks keeps its epoch. */
static int has_current_epoch(kvs_pool_t *pool, source_t *source, const kvs_ledger_slot_t *slot)
{
	if (source->epoch == 0 || memcmp(source->root, slot->root, sizeof source->root) != 0) {
		kvs_epoch_t epoch = {.root = slot->root, .epoch = kvs_ledger_find_epoch(source->base, slot->root)};

		memcpy(source->root, slot->root, sizeof source->root);
		source->epoch = epoch.epoch;
		if (epoch.epoch != 0 && kvs_pool_epoch_set(&pool->tier, &epoch, ignore, NULL) != KV_OK) {
			source->epoch = 0;
		}
	}

	return source->epoch != 0 && source->epoch == slot->epoch;
}

/* What the slot will be. A record that is damaged says nothing reliable, nor that nobody writes to the slot. */
static kvs_state_t judge_slot(kvs_pool_t *pool, source_t *source, const kvs_pool_slab_t *p, uint32_t index,
			      const kvs_ledger_slot_t *slot)
{
	const kvs_state_t state = kvs_ledger_state(slot);

	if (state == KVS_FREE) {
		return KVS_FREE;
	}
	source->whole += state == KVS_READY;
	if (state != KVS_READY || slot->check != kvs_ledger_slot_check(slot) ||
	    slot->digest != kv_digest_root(kvs_slab_roots(&p->slab, index), p->slab.geometry.heads)) {
		source->unfinished += state != KVS_READY;
		source->dropped += state == KVS_READY;
		return KVS_QUARANTINED;
	}
	if (slot->transient || !has_current_epoch(pool, source, slot)) {
		source->dropped++;
		return KVS_FREE;
	}

	return KVS_READY;
}

static void copy_slots(kvs_pool_t *pool, source_t *source, kvs_pool_slab_t *p, const kvs_ledger_slab_t *from)
{
	const kvs_ledger_slot_t *slots = kvs_ledger_slots(from);
	uint32_t used = p->slab.slots;

	while (used > 0 && slots[used - 1].gen == 0 && kvs_ledger_state(&slots[used - 1]) == KVS_FREE) {
		used--;
	}
	for (uint32_t i = 0; i < used; i++) {
		kvs_pool_copy_slot(pool, p, &slots[i], judge_slot(pool, source, p, i, &slots[i]));
	}
}

/* ---- slabs ----------------------------------------------------------------------------------- */

/* NULL, or why the slab cannot be this pool's. */
static const char *find_obstacle(const kvs_pool_t *pool, const kvs_ledger_slab_t *from, int data_fd, int digest_fd)
{
	struct stat st;

	if (data_fd < 0 || digest_fd < 0) {
		return "its descriptors are missing";
	}
	if (from->data_bytes != pool->config.slab_bytes) {
		return "it is of another size (gpu.slab_size)";
	}
	if (pool->usage.charged_bytes + from->data_bytes > pool->usage.limit_bytes ||
	    kvs_pool_next_number(pool) == KVS_NONE || from->chunk_bytes > pool->ledger.header->chunk_stride) {
		return "there is no room for it (gpu.size)";
	}
	if (pool->config.memory == KV_SLAB_MEMFD &&
	    (fstat(data_fd, &st) != 0 || (uint64_t)st.st_size != from->data_bytes)) {
		return "its memory is of another size than the ledger says";
	}

	return NULL;
}

/* 0, or -errno. `data_fd` stays the caller's then. */
static int make_slab(kvs_pool_t *pool, const kvs_ledger_slab_t *from, int data_fd, int digest_fd, kvs_pool_slab_t *p)
{
	int error = kvs_pool_find_class(pool, from->ns, &from->geometry, &p->slot_class) == KV_OK ? 0 : -ENOSPC;
	uint64_t done = 0, digest_bytes;

	p->slab.geometry = from->geometry;
	p->slab.number = kvs_pool_next_number(pool);
	p->slab.id = from->id;
	p->slab.slots = atomic_load_explicit(&from->slots, memory_order_relaxed);
	p->slab.foreign = 1;
	p->slab.data = (kvs_shm_t){.bytes = from->data_bytes, .fd = data_fd};
	error = error ? error : kvs_slab_create(&p->slab, pool->sys, &pool->env);
	digest_bytes = p->slab.slots * kvs_geometry_digest_bytes(&p->slab.geometry);
	if (!error) {
		error = kvs_pool_touch_first(pool, &p->slab);
		if (error) {
			p->slab.data.bytes = 0;
			kvs_slab_destroy(&p->slab, &pool->env);
		}
	}
	while (!error && done < digest_bytes) {
		ssize_t n = pread(digest_fd, p->slab.digest.base + done, digest_bytes - done, (off_t)done);

		if (n <= 0) {
			p->slab.data.bytes = 0;
			kvs_slab_destroy(&p->slab, &pool->env);
			return -EIO;
		}
		done += (uint64_t)n;
	}

	return error;
}

static void take_over_slab(kvs_pool_t *pool, source_t *source, const kvs_ledger_slab_t *from)
{
	char data[KVS_HOLD_NAME], digest[KVS_HOLD_NAME];
	int data_fd, digest_fd, error;
	kvs_pool_slab_t *p = kv_alloc(&pool->env, sizeof *p);
	const char *why;

	kvs_pool_name(data, "slab", from->id);
	kvs_pool_name(digest, "digest", from->id);
	data_fd = pool->config.claim(pool->config.hold_ctx, data);
	digest_fd = pool->config.claim(pool->config.hold_ctx, digest);
	why = p ? find_obstacle(pool, from, data_fd, digest_fd) : "no memory";
	if (!why) {
		error = make_slab(pool, from, data_fd, digest_fd, p);
		why = error ? strerror(-error) : NULL;
	}
	if (digest_fd >= 0) {
		close(digest_fd);
	}
	if (why) {
		refuse(pool, data, why);
		if (data_fd >= 0) {
			close(data_fd);
		}
		kvs_pool_drop_slab(pool, from->id);
		kv_free(&pool->env, p);
		return;
	}
	kvs_pool_link_slab(pool, p);
	kvs_pool_hold_slab(pool, &p->slab);
	copy_slots(pool, source, p, from);
	source->slabs_kept++;
}

static int compare(const void *a, const void *b)
{
	const whole_t *x = a, *y = b;

	return x->use != y->use       ? (x->use > y->use) - (x->use < y->use)
	       : x->depth != y->depth ? (x->depth > y->depth) - (x->depth < y->depth)
				      : (x->slot > y->slot) - (x->slot < y->slot);
}

/* The whole blocks, in the order in which the core can take them. */
static void list_found(kvs_pool_t *pool)
{
	kvs_adoption_t *adoption = kv_alloc(&pool->env, sizeof *adoption);
	whole_t *found = kv_alloc(&pool->env, (pool->usage.used_slots + 1u) * sizeof *found);

	if (!adoption || !found) {
		kv_free(&pool->env, adoption);
		kv_free(&pool->env, found);
		adoption = NULL;
		refuse(pool, "its whole blocks", "no memory");
	} else {
		adoption->found = found;
	}
	for (uint32_t number = 0; number < pool->slab_count; number++) {
		const kvs_pool_slab_t *p = pool->slabs[number];

		for (uint32_t i = 0; i < p->slab.slots; i++) {
			const kv_slot_t slot = kv_slot_make(number, i);

			if (kvs_ledger_state(&p->slots[i]) != KVS_READY) {
				continue;
			}
			if (adoption) {
				found[adoption->count++] = (whole_t){.depth = p->slots[i].depth, .slot = slot};
			} else {
				kvs_pool_free(&pool->tier, (kvs_loc_t){slot, p->slots[i].gen});
				kv_metric_add(pool->config.metrics, KV_M_ADOPT_DROPPED, 1);
			}
		}
	}
	if (adoption) {
		qsort(found, adoption->count, sizeof *found, compare);
	}
	pool->adoption = adoption;
}

void kvs_pool_adopt(kvs_pool_t *pool)
{
	source_t source = {0};
	uint32_t count;

	if (!map_ledger(pool, &source)) {
		return;
	}
	pool->unknown_before = atomic_load_explicit(&((const kvs_ledger_header_t *)source.base)->unknown_writers,
						    memory_order_relaxed);
	kvs_pool_set_unknown_writers(&pool->tier, 0);
	count = atomic_load_explicit(&((const kvs_ledger_header_t *)source.base)->slab_count, memory_order_relaxed);
	for (uint32_t number = 0; number < count; number++) {
		const kvs_ledger_slab_t *from = kvs_ledger_slab(source.base, number);

		if (from) {
			source.slabs++;
			take_over_slab(pool, &source, from);
		}
	}
	munmap((void *)(uintptr_t)source.base, source.bytes);
	list_found(pool);
	kv_metric_add(pool->config.metrics, KV_M_ADOPT_DROPPED, source.dropped);
	kv_logf(&pool->env, KV_LOG_INFO, "pool",
		"memory of the daemon before is taken over slabs %u of %u blocks %llu dropped %llu unfinished %llu",
		source.slabs_kept, source.slabs, (unsigned long long)source.whole, (unsigned long long)source.dropped,
		(unsigned long long)source.unfinished);
}

/* ---- blocks for the core --------------------------------------------------------------------- */

void kvs_pool_end_adoption(kvs_pool_t *pool)
{
	if (pool->adoption) {
		kv_free(&pool->env, pool->adoption->found);
		kv_free(&pool->env, pool->adoption);
		pool->adoption = NULL;
	}
}

static void order_by_use(kvs_pool_t *pool, kvs_adoption_t *adoption)
{
	for (uint32_t i = 0; i < adoption->count; i++) {
		const kv_slot_t slot = adoption->found[i].slot;
		const kvs_ledger_slot_t *record = &pool->slabs[kv_slot_slab(slot)]->slots[kv_slot_index(slot)];

		adoption->found[i].use = record->owner;
		pool->use_base = record->owner > pool->use_base ? record->owner : pool->use_base;
	}
	qsort(adoption->found, adoption->count, sizeof *adoption->found, compare);
	adoption->by_use = 1;
	adoption->next = 0;
}

kv_status_t kvs_pool_recover(kvs_tier_t *tier, kvs_found_fn found, void *arg, uint32_t max)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	kvs_adoption_t *adoption = pool->adoption;

	for (; adoption && adoption->next < adoption->count && max > 0; adoption->next++, max--) {
		const kv_slot_t slot = adoption->found[adoption->next].slot;
		const uint32_t slot_class = pool->slabs[kv_slot_slab(slot)]->slot_class;
		kvs_loc_t loc;
		kvs_meta_t meta;
		kv_status_t status = kvs_pool_rebalance_ops.describe_slot(tier, slot, &loc, &meta);

		kv_assert(status == KV_OK);
		if (found(arg, slot_class, loc, &meta) == KV_OK) {
			adoption->kept++;
		} else {
			kvs_pool_free(tier, loc);
		}
	}
	if (!adoption) {
		return KV_OK;
	}
	if (adoption->next < adoption->count) {
		return KV_PENDING;
	}
	kv_metric_add(pool->config.metrics, KV_M_ADOPTED_BLOCKS, adoption->kept);
	kv_metric_add(pool->config.metrics, KV_M_ADOPT_DROPPED, adoption->count - adoption->kept);
	order_by_use(pool, adoption);

	return KV_OK;
}

kv_status_t kvs_pool_recover_use(kvs_tier_t *tier, uint32_t memory, kvs_used_fn used, void *arg, uint32_t max)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	kvs_adoption_t *adoption = pool->adoption;

	(void)memory;
	kv_assert(!adoption || adoption->by_use);
	for (; adoption && adoption->next < adoption->count && max > 0; adoption->next++, max--) {
		kvs_loc_t loc;
		kvs_meta_t meta;

		/* One that was not kept is FREE. */
		if (kvs_pool_rebalance_ops.describe_slot(tier, adoption->found[adoption->next].slot, &loc, &meta) ==
		    KV_OK) {
			used(arg, loc, &meta.key, meta.group);
		}
	}
	if (adoption && adoption->next < adoption->count) {
		return KV_PENDING;
	}
	kvs_pool_end_adoption(pool);

	return KV_OK;
}

uint64_t kvs_pool_free_before(kvs_tier_t *tier)
{
	kvs_pool_t *pool = kvs_pool_of(tier);
	const uint32_t count = pool->unknown_before > 0 ? 0 : pool->slab_count;
	uint64_t freed = 0;

	for (uint32_t number = 0; number < count; number++) {
		kvs_pool_slab_t *p = pool->slabs[number];

		for (uint32_t i = 0; p && p->state <= KVS_SLAB_RETIRING && i < p->slab.slots; i++) {
			if (kvs_ledger_state(&p->slots[i]) == KVS_QUARANTINED &&
			    p->slots[i].owner == KVS_OWNER_BEFORE) {
				kvs_pool_free(tier, (kvs_loc_t){kv_slot_make(number, i), p->slots[i].gen});
				freed++;
			}
		}
	}

	return freed;
}

void kvs_pool_set_unknown_writers(kvs_tier_t *tier, uint32_t n)
{
	kvs_pool_t *pool = kvs_pool_of(tier);

	atomic_store_explicit(&pool->ledger.header->unknown_writers, pool->unknown_before + n, memory_order_release);
}

uint32_t kvs_pool_unknown_before(kvs_tier_t *tier)
{
	return kvs_pool_of(tier)->unknown_before;
}
