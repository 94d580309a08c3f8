/* What survived: rows (or headers) to slots, checked, ordered parents first, handed to the core.
 *
 * Rows of slots that were freed and reused shortly before a crash may still name the old block; the slot's header has
 * the last word, so such a block is found out at its first load, and only blocks that had been evicted can be hit by
 * it.
 */
#include "recover.h"

#include "commit.h"
#include "faults.h"
#include "rebuild.h"
#include "nvme/slots/recency.h"
#include "nvme/slots/slots.h"

#define CHUNK   16384u
#define SCAN_NS UINT64_C(3000000000) /* so long an open tries to read the rows */

typedef struct found {
	kvs_meta_t meta;
	kv_slot_t slot;
	uint8_t is_spare;   /* another slot has the block too, and counts */
	uint8_t is_kept;    /* the core has it */
	uint8_t is_covered; /* so has it a child that was not used earlier: its use says nothing new */
} found_t;

typedef struct kvs_recovery {
	kvs_nvme_t *nvme;
	found_t **chunk;
	uint32_t chunk_count;
	uint32_t chunk_cap;
	uint32_t count;
	uint32_t batched; /* in the commit's changes, which nobody else uses yet */
	int unwritten;    /* rows could not be written */
	uint64_t dropped;
	uint8_t root[32]; /* of the row before, with its epoch: rows of a space come in runs */
	uint64_t epoch;
	uint32_t withdrawals;
	int root_known;
	uint32_t *order; /* indices of all of them, shallow first */
	uint32_t *entry; /* of those reported, by key: index + 1 */
	uint64_t mask;
	uint32_t total;
	uint32_t next;    /* in the order */
	uint32_t put_off; /* at its beginning: these come again */
	uint64_t kept;
} scan_t;

static found_t *found_at(const scan_t *scan, uint32_t i)
{
	return &scan->chunk[i / CHUNK][i % CHUNK];
}

static kv_status_t scan_grow(scan_t *scan)
{
	const kv_env_t *env = scan->nvme->env;
	uint32_t cap = scan->chunk_cap ? scan->chunk_cap * 2u : 64u;
	void *grown;

	if (scan->count < scan->chunk_count * CHUNK) {
		return KV_OK;
	}
	if (scan->chunk_count == scan->chunk_cap) {
		grown = kv_resize(env, scan->chunk, scan->chunk_cap * sizeof(void *), cap * sizeof(void *));
		if (!grown) {
			return KV_ERR_NOMEM;
		}
		scan->chunk = grown;
		scan->chunk_cap = cap;
	}
	scan->chunk[scan->chunk_count] = kv_alloc(env, CHUNK * sizeof(found_t));
	if (!scan->chunk[scan->chunk_count]) {
		return KV_ERR_NOMEM;
	}
	scan->chunk_count++;

	return KV_OK;
}

static void scan_free(scan_t *scan)
{
	for (uint32_t i = 0; i < scan->chunk_count; i++) {
		kv_free(scan->nvme->env, scan->chunk[i]);
	}
	kv_free(scan->nvme->env, scan->chunk);
	scan->chunk = NULL;
	scan->chunk_count = scan->chunk_cap = scan->count = 0;
}

static int is_current(scan_t *scan, const kvs_meta_t *meta)
{
	const kvs_super_space_t *space;

	/* One lookup for a run of rows: slots that follow one another are mostly of one space. */
	if (!scan->root_known || memcmp(scan->root, meta->root, sizeof scan->root) != 0) {
		space = kvs_super_space_find(&scan->nvme->super, meta->root);
		memcpy(scan->root, meta->root, sizeof scan->root);
		scan->epoch = space ? space->epoch : UINT64_MAX;
		scan->withdrawals = space ? space->withdrawals : 0;
		scan->root_known = 1;
	}

	if (scan->epoch == UINT64_MAX || scan->epoch != meta->epoch) {
		return 0;
	}

	/* A row says what holds. A header says what was written once, and may be that of a block which was withdrawn
	 * since: nothing tells it from the others, so none counts that is older than the last withdrawal (decision
	 * 070).
	 */
	return !scan->nvme->rebuild || meta->withdrawals >= scan->withdrawals;
}

/* The slot the row speaks of, if the row can be true. */
static kvs_dslot_t *row_slot(scan_t *scan, const kvs_row_t *row)
{
	kvs_nvme_t *nvme = scan->nvme;
	kvs_dslot_t *s = kvs_slot_get(nvme, row->slot);

	/* Flags that are set: another row has named the slot before. A slot holds one block, and the first row counts.
	 */
	if (!s || kv_slot_index(row->slot) >= nvme->files[kv_slot_slab(row->slot)].whole ||
	    nvme->files[kv_slot_slab(row->slot)].slot_class != row->slot_class || s->flags ||
	    row->length != kvs_slot_class(nvme, row->slot)->geometry.block_bytes || row->meta.depth == 0 ||
	    (row->meta.depth == 1u) != kv_key_is_zero(&row->meta.parent) || !is_current(scan, &row->meta)) {
		return NULL;
	}

	return s;
}

/* Rows that cannot be written now are not missed: the database stays without its mark. Deletions are made again by the
 * next start. */
static void write_batch(scan_t *scan)
{
	kvs_nvme_t *nvme = scan->nvme;

	if (scan->batched > 0 && !scan->unwritten) {
		scan->unwritten = kvs_metadb_write(nvme->db, nvme->commit->change, scan->batched) != KV_OK;
	}
	scan->batched = 0;
}

static void add_change(scan_t *scan, const kvs_row_t *row, int is_put)
{
	scan->nvme->commit->change[scan->batched++] = (kvs_row_change_t){.row = *row, .is_put = is_put};
	if (scan->batched == KVS_COMMIT_ROWS) {
		write_batch(scan);
	}
}

/* Its file is there and cannot be used now: the next start may. No slot is given out under its number meanwhile. If its
 * blocks are stored again before it comes back, there are two good copies, and one is dropped then. */
static int may_come_back(const kvs_nvme_t *nvme, const kvs_row_t *row)
{
	return kv_slot_slab(row->slot) < KVS_MAX_FILES && nvme->files[kv_slot_slab(row->slot)].reserved;
}

static kv_status_t take_row(void *arg, const kvs_row_t *row)
{
	scan_t *scan = arg;
	kvs_nvme_t *nvme = scan->nvme;
	kvs_dslot_t *s = row_slot(scan, row);
	kv_status_t status;
	found_t *f;

	if (!s) {
		scan->dropped++;
		/* While rows are made from headers, there is none to delete: the new database has those that are
		 * added only. */
		if (!nvme->rebuild && !may_come_back(nvme, row)) {
			add_change(scan, row, 0);
		}
		return KV_OK;
	}
	status = scan_grow(scan);
	if (status != KV_OK) {
		return status;
	}

	f = found_at(scan, scan->count++);
	f->meta = row->meta;
	f->slot = row->slot;
	s->key = row->meta.key;
	s->group = row->meta.group;
	s->gen = row->gen;
	s->flags = KVS_SLOT_ROW | KVS_SLOT_STORED;
	s->state = KVS_READY;
	nvme->free_slots--;
	nvme->used_bytes += kvs_slot_class(nvme, row->slot)->stride;
	if (nvme->rebuild) {
		/* A header says what was to be written. Whether the payload behind it was, is known when it has been
		 * read (decision 023). */
		kvs_slot_mark_unverified(nvme, s);
		add_change(scan, row, 1);
	}

	return KV_OK;
}

/* Indices of all found blocks by depth, shallow first; a depth beyond the number of blocks cannot have its ancestors
 * and sorts last. */
static kv_status_t sort_by_depth(const scan_t *scan, uint32_t **p_order)
{
	const kv_env_t *env = scan->nvme->env;
	uint32_t *start = kv_alloc(env, ((size_t)scan->count + 3u) * sizeof *start);
	uint32_t *order = kv_alloc(env, ((size_t)scan->count + 1u) * sizeof *order);
	uint32_t last = scan->count + 1u;

	if (!start || !order) {
		kv_free(env, start);
		kv_free(env, order);
		return KV_ERR_NOMEM;
	}

	for (uint32_t i = 0; i < scan->count; i++) {
		uint32_t depth = found_at(scan, i)->meta.depth;

		start[(depth < last ? depth : last) + 1u]++;
	}
	/* A counting sort: a million rows are ordered in milliseconds, and rows of one depth keep their order. */
	for (uint32_t d = 1; d <= last; d++) {
		start[d] += start[d - 1u];
	}
	for (uint32_t i = 0; i < scan->count; i++) {
		uint32_t depth = found_at(scan, i)->meta.depth;

		order[start[depth < last ? depth : last]++] = i;
	}
	kv_free(env, start);
	*p_order = order;

	return KV_OK;
}

static uint64_t block_hash(const kv_key_t *key, const kvs_meta_t *meta)
{
	uint64_t root;

	memcpy(&root, meta->root, sizeof root);

	return (kv_key_hash(key) ^ root ^ meta->group) * 0x9e3779b97f4a7c15ull >> 16;
}

/* The block with this key in the group and space of `like`: its place, or the empty one where it belongs. */
static uint32_t *table_find(const scan_t *scan, const kv_key_t *key, const kvs_meta_t *like)
{
	uint64_t at = block_hash(key, like) & scan->mask;

	while (scan->entry[at]) {
		const kvs_meta_t *meta = &found_at(scan, scan->entry[at] - 1u)->meta;

		if (kv_key_equal(&meta->key, key) && meta->group == like->group &&
		    memcmp(meta->root, like->root, sizeof meta->root) == 0) {
			break;
		}
		at = (at + 1u) & scan->mask;
	}

	return &scan->entry[at];
}

/* The block before it, reported already; NULL: there is none. */
static found_t *find_parent(const scan_t *scan, const kvs_meta_t *meta)
{
	const uint32_t place = meta->depth > 1u ? *table_find(scan, &meta->parent, meta) : 0;
	found_t *parent = place ? found_at(scan, place - 1u) : NULL;

	return parent && parent->meta.depth + 1u == meta->depth ? parent : NULL;
}

static void keep_block(scan_t *scan, found_t *f, found_t *parent)
{
	f->is_kept = 1;
	scan->kept++;
	if (parent && kvs_recency_of(scan->nvme, f->slot) >= kvs_recency_of(scan->nvme, parent->slot)) {
		parent->is_covered = 1;
	}
}

static int is_better(const scan_t *scan, const found_t *than, const found_t *f)
{
	const kvs_copy_t copy = kvs_rebuild_check_copy(scan->nvme, than->slot, &than->meta);

	return copy != KVS_COPY_WHOLE && kvs_rebuild_check_copy(scan->nvme, f->slot, &f->meta) > copy;
}

/* A header stays where it is when its slot is freed, or quarantined because the write was torn. Of blocks with one key
 * the first whole one counts, or the first that may be. */
static void choose_copies(scan_t *scan)
{
	for (uint32_t i = 0; i < scan->count; i++) {
		found_t *f = found_at(scan, scan->order[i]);
		uint32_t *place = table_find(scan, &f->meta.key, &f->meta);
		found_t *first = *place ? found_at(scan, *place - 1u) : f;

		if (first != f && is_better(scan, first, f)) {
			first->is_spare = 1;
			first = f;
		}
		f->is_spare = first != f;
		if (first == f) {
			*place = scan->order[i] + 1u;
		}
	}
	memset(scan->entry, 0, (scan->mask + 1u) * sizeof *scan->entry);
}

/* At most `max`; the blocks of a space that was reset since they were read are dropped too. */
static void report_some(scan_t *scan, kvs_found_fn found, void *arg, uint32_t max)
{
	kvs_nvme_t *nvme = scan->nvme;

	scan->root_known = 0;
	for (; scan->next < scan->count && max > 0; scan->next++, max--) {
		uint32_t i = scan->order[scan->next];
		found_t *f = found_at(scan, i), *parent = find_parent(scan, &f->meta);
		kvs_dslot_t *s = kvs_slot_get(nvme, f->slot);
		kvs_loc_t loc = {.slot = f->slot, .gen = s->gen};
		uint32_t *place = table_find(scan, &f->meta.key, &f->meta);
		uint32_t slot_class = nvme->files[kv_slot_slab(f->slot)].slot_class;

		kv_status_t status = KV_ERR_NO_PARENT;

		/* A parent that is missing now may be one that the core has put off: then this one comes after it. */
		if (!*place && !f->is_spare && is_current(scan, &f->meta)) {
			status = parent || f->meta.depth == 1u ? found(arg, slot_class, loc, &f->meta)
				 : scan->put_off > 0           ? KV_PENDING
							       : KV_ERR_NO_PARENT;
		}
		if (status == KV_OK) {
			*place = i + 1u;
			nvme->classes[slot_class].is_used = 1;
			keep_block(scan, f, parent);
			continue;
		}
		/* In place: never more are put off than have been taken from the order. */
		if (status == KV_PENDING) {
			scan->order[scan->put_off++] = i;
			continue;
		}
		scan->dropped++;
		s->gen++;
		s->flags &= (uint8_t)~KVS_SLOT_STORED;
		kvs_slot_set_state(nvme, f->slot, s, KVS_FREE);
	}
}

/* A scan that broke off half way: as if it had not begun. */
static void forget_rows(scan_t *scan)
{
	kvs_nvme_t *nvme = scan->nvme;

	for (uint32_t i = 0; i < scan->count; i++) {
		kv_slot_t slot = found_at(scan, i)->slot;
		kvs_dslot_t *s = kvs_slot_get(nvme, slot);

		s->flags = 0;
		s->state = KVS_FREE;
		nvme->free_slots++;
		nvme->used_bytes -= kvs_slot_class(nvme, slot)->stride;
	}
	scan->dropped = 0;
	scan_free(scan);
}

/* Errors of the device are tried again for a while. */
static kv_status_t scan_metadata(scan_t *scan)
{
	kvs_nvme_t *nvme = scan->nvme;
	const uint64_t until = kv_now_ns(nvme->env) + SCAN_NS;
	kv_status_t status;

	do {
		status = kvs_metadb_scan(nvme->db, take_row, scan);
		if (status == KV_OK || status == KV_ERR_NOMEM) {
			break;
		}
		kv_metric_add(nvme->metrics, KV_M_DISK_ERRORS, 1);
		forget_rows(scan);
	} while ((status == KV_ERR_IO || status == KV_ERR_BUSY || status == KV_ERR_NOSPC) &&
		 kvs_metadb_await_retry(nvme->db, until));

	return status;
}

/* A row speaks of synced bytes only. A header may be one that was written when the daemon was killed, and never synced.
 * Syncing the same bytes after a sync that failed proves nothing (decision 022). */
static kv_status_t sync_found(kvs_nvme_t *nvme)
{
	int none = 0, *unsynced = nvme->config.unsynced ? nvme->config.unsynced : &none;
	kv_status_t status;

	if (nvme->config.unreadable) {
		*nvme->config.unreadable = 0;
	}
	status = *unsynced ? kvs_rebuild_write_again(nvme) : KV_OK;
	if (status == KV_OK) {
		status = kvs_commit_sync_all(nvme);
		*unsynced = status != KV_OK;
	}

	return status;
}

static kv_status_t scan_rows(scan_t *scan)
{
	kvs_nvme_t *nvme = scan->nvme;
	kv_status_t status = KV_OK;

	if (!nvme->rebuild) {
		status = scan_metadata(scan);
		/* Slots carry all that a row does, so a damaged database costs a scan of the headers and no block. What
		 * the device does not read now may be read later, when the tier opens (decision 067). */
		if (status == KV_ERR_CORRUPT || status == KV_ERR_PROTO ||
		    (status != KV_OK && status != KV_ERR_NOMEM && nvme->config.drop_unreadable)) {
			nvme->rebuild = 1;
			(void)kvs_metadb_replace(nvme->db);
			status = KV_OK;
		} else if (status != KV_OK && status != KV_ERR_NOSPC && status != KV_ERR_NOMEM) {
			kvs_rebuild_count_unread(nvme, 1);
		}
	}
	if (status == KV_OK && nvme->rebuild) {
		status = sync_found(nvme);
	}
	if (status == KV_OK && nvme->rebuild) {
		status = kvs_rebuild_rows(nvme, take_row, scan);
	}
	write_batch(scan);

	return status;
}

/* The rows are all there, or the tier is read-only until they can be written. The mark comes when the blocks are
 * verified. Without it the next start reads the headers again: those of a file that cannot be used now are missing. */
static void finish_metadata(kvs_nvme_t *nvme, const scan_t *scan)
{
	const kv_status_t status = kvs_metadb_end_reading(nvme->db);

	nvme->mark_owed = nvme->rebuild && !scan->unwritten && nvme->reserved_files == 0;
	if (status != KV_OK) {
		kvs_commit_raise_meta(nvme, "opening the metadata", status);
	}
	if (nvme->unverified > 0) {
		kv_logf(nvme->env, KV_LOG_WARN, "nvme",
			"blocks found by their headers are read before anything is acknowledged: %llu",
			(unsigned long long)nvme->unverified);
	}
	kvs_commit_request(nvme);
}

void kvs_recovery_free(kvs_nvme_t *nvme)
{
	scan_t *scan = nvme->recovery;

	if (scan) {
		scan_free(scan);
		kv_free(nvme->env, scan->order);
		kv_free(nvme->env, scan->entry);
		kv_free(nvme->env, scan);
		nvme->recovery = NULL;
	}
}

kv_status_t kvs_recovery_read(kvs_nvme_t *nvme)
{
	scan_t *scan = nvme->recovery = kv_alloc(nvme->env, sizeof *scan);
	kv_status_t status;

	if (!scan) {
		return KV_ERR_NOMEM;
	}
	scan->nvme = nvme;
	status = scan_rows(scan);
	if (status == KV_OK) {
		status = sort_by_depth(scan, &scan->order);
	}
	if (status != KV_OK) {
		return status;
	}
	kvs_recency_read(nvme);
	scan->total = scan->count;
	/* At most half full, so that a probe stays short. */
	scan->mask = 1023u;
	while (scan->mask < (uint64_t)scan->count * 2u) {
		scan->mask = scan->mask * 2u + 1u;
	}
	scan->entry = kv_alloc(nvme->env, (scan->mask + 1u) * sizeof *scan->entry);
	if (!scan->entry) {
		return KV_ERR_NOMEM;
	}
	if (nvme->rebuild) {
		choose_copies(scan); /* rows are of one copy each */
	}

	return KV_OK;
}

/* The end of a path, and what was used later than all that is below it. */
static void sort_by_use(scan_t *scan)
{

	kvs_recency_begin(scan->nvme, (uint32_t)scan->kept);
	for (uint32_t i = 0; i < scan->total; i++) {
		const found_t *f = found_at(scan, i);

		if (f->is_kept && !f->is_covered) {
			kvs_recency_add(scan->nvme, f->slot, f->meta.depth);
		}
	}
	kvs_recency_sort(scan->nvme);
}

kv_status_t kvs_nvme_recover(kvs_tier_t *tier, kvs_found_fn found, void *arg, uint32_t max)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	scan_t *scan = nvme->recovery;

	kv_assert(!nvme->recovered);
	report_some(scan, found, arg, max);
	if (scan->next < scan->count) {
		return KV_PENDING;
	}
	if (scan->put_off > 0) {
		scan->count = scan->put_off;
		scan->next = scan->put_off = 0;
		return KV_MISS;
	}
	kv_metric_add(nvme->metrics, KV_M_DISK_RECOVERED, scan->kept);
	kv_metric_add(nvme->metrics, KV_M_DISK_REBUILT, nvme->rebuild ? scan->kept : 0);
	kv_metric_add(nvme->metrics, KV_M_DISK_DROPPED, scan->dropped);
	kv_logf(nvme->env, KV_LOG_INFO, "nvme", "blocks found %llu dropped %llu", (unsigned long long)scan->kept,
		(unsigned long long)scan->dropped);
	finish_metadata(nvme, scan);
	sort_by_use(scan);
	kvs_recovery_free(nvme);
	for (uint32_t i = 0; i < KVS_MAX_FILES; i++) {
		if (nvme->files[i].slot) {
			kvs_file_list_free_slots(nvme, i);
		}
	}
	nvme->recovered = 1;
	atomic_store(&nvme->watch_meta, 1);
	kvs_wakeup_signal(&nvme->commit_wakeup);
	kvs_nvme_update_gauges(nvme);

	return KV_OK;
}
