/* From written to visible: ends of ranges, digests, and the result of each block. */
#include "core/block/block.h"
#include "core/block/room.h"
#include "core/block/transfer.h"
#include "core/block/visibility.h"
#include "core/block/write_behind.h"
#include "core/base/core_impl.h"
#include "core/put/durable.h"
#include "core/put/pending.h"
#include "core/put/put.h"
#include "core/put/put_impl.h"
#include "core/base/find.h"
#include "core/base/share.h"
#include "core/block/slot_class.h"

#define STAGING_WORDS       512u
#define INDEX_TRIES         64u
#define BLOCKS_OF_A_REQUEST 1024u
#define BLOCKS_OF_A_TICK    64u
#define TICK_NS             UINT64_C(20000)

/* ---- PUT_END --------------------------------------------------------------------------------- */

/* Copy a rank's leaf digests of one block out of its staging, each word once, and into the digest table. */
static kv_status_t copy_digests(kvd_core_t *core, const kvd_put_t *put, const kvd_writer_t *w, kvs_loc_t loc,
				kvd_member_t member, uint64_t first)
{
	uint64_t words[STAGING_WORDS];
	uint32_t leaves = w->layers * put->pieces, leaf0 = w->layer * put->pieces;
	uint32_t rows = leaves < STAGING_WORDS ? STAGING_WORDS / leaves : 1;
	kv_status_t status = KV_OK;

	for (uint32_t head = 0; head < w->heads && status == KV_OK; head += rows) {
		uint32_t some = w->heads - head < rows ? w->heads - head : rows;

		for (uint32_t leaf = 0; leaf < leaves && status == KV_OK; leaf += STAGING_WORDS) {
			uint32_t part = leaves - leaf < STAGING_WORDS ? leaves - leaf : STAGING_WORDS;

			/* Staging is a client's memory: each word is read once, and what was read counts, whatever the
			 * client writes later. */
			status = core->staging(core->staging_ctx, member, first, some * part, words);
			if (status == KV_OK) {
				kvs_leaf_span_t span = {w->head + head, some, leaf0 + leaf, part};

				status = core->world.set_leaves(core->world.ctx, loc, &span, words);
			}
			first += (uint64_t)some * part;
		}
	}

	return status;
}

static int bit_get(const uint8_t *bits, uint64_t i)
{
	return bits[i / 8] >> i % 8 & 1;
}

static kvd_writer_t *find_writer(const kvd_put_t *put, uint32_t rank)
{
	for (uint32_t w = 0; w < put->writer_count; w++) {
		if (put->writers[w].rank == rank) {
			return &put->writers[w];
		}
	}

	return NULL;
}

static kv_status_t check_end(const kvd_put_t *put, const kv_msg_put_end_t *ask, const kvd_writer_t *writer)
{
	uint64_t blocks = 0, words;

	if (ask->count == 0 || ask->first >= put->n || ask->count > put->n - ask->first) {
		return KV_ERR_ARG;
	}
	for (uint32_t i = ask->first; i < ask->first + ask->count; i++) {
		if (put->entries[i].state == KVD_ENTRY_ALREADY) {
			continue;
		}
		if (bit_get(put->ended, (uint64_t)i * put->writer_count + (uint64_t)(writer - put->writers))) {
			/* Its digests are taken already; bytes written after them would not match. */
			return KV_ERR_COVERAGE;
		}
		blocks++;
	}
	words = blocks * writer->heads * writer->layers * put->pieces;

	return words == ask->words ? KV_OK : KV_ERR_ARG;
}

static kv_status_t end_ranges(kvd_core_t *core, kvd_put_t *put, kvd_writer_t *writer, const kv_msg_put_end_t *ask)
{
	for (uint32_t i = ask->first; i < ask->first + ask->count; i++) {
		kvd_entry_t *entry = &put->entries[i];
		uint64_t bit = (uint64_t)i * put->writer_count + (uint64_t)(writer - put->writers);

		if (entry->state == KVD_ENTRY_ALREADY) {
			continue;
		}
		put->ended[bit / 8] |= (uint8_t)(1u << bit % 8);
		writer->left--;
		entry->left--;
		if (entry->left == 0) {
			kv_status_t status = core->world.compute_roots(core->world.ctx, entry->loc);

			if (status != KV_OK) {
				return status;
			}
			entry->state = KVD_ENTRY_FULL;
			put->full++;
			if (put->unchained) {
				kvd_entry_push_full(put, i);
			}
		}
	}

	return KV_OK;
}

kv_status_t kvd_put_end(kvd_core_t *core, kvd_member_t member_id, const kv_msg_put_end_t *ask,
			kv_msg_put_end_reply_t *reply)
{
	const kvd_member_rec_t *member = kvd_member_find(core, member_id);
	kvd_put_t *put = member ? kvd_put_find(core, ask->put) : NULL;
	kvd_writer_t *writer;
	uint64_t first = ask->staging, per_block;
	kv_status_t status;

	if (!put || put->instance != member->instance) {
		return member ? KV_ERR_NOT_FOUND : KV_ERR_NOT_JOINED;
	}
	if (!put->running) {
		return KV_ERR_REVOKED;
	}
	writer = find_writer(put, ask->rank);
	status = writer ? check_end(put, ask, writer) : KV_ERR_COVERAGE;
	if (status != KV_OK || !core->staging) {
		return status == KV_OK ? KV_ERR_UNSUPPORTED : status;
	}

	per_block = (uint64_t)writer->heads * writer->layers * put->pieces;
	for (uint32_t i = ask->first; i < ask->first + ask->count && status == KV_OK; i++) {
		if (put->entries[i].state != KVD_ENTRY_ALREADY) {
			status = copy_digests(core, put, writer, put->entries[i].loc, member_id, first);
			first += per_block;
		}
	}
	if (status != KV_OK) {
		kvd_count(core, KV_M_BAD_STAGING, 1);
		return status;
	}
	status = end_ranges(core, put, writer, ask);
	if (status != KV_OK) { /* the slot's memory is gone */
		kvd_put_finish(core, put, status);
		return status;
	}
	kvd_put_extend(core, put);
	reply->complete = put->full;
	kvd_put_queue(core, put);

	return KV_OK;
}

/* ---- into the index -------------------------------------------------------------------------- */

typedef enum kvd_publish_result { KVD_PUBLISH_NEXT, KVD_PUBLISH_WAIT, KVD_PUBLISH_ENDED } kvd_publish_result_t;

static kvd_publish_result_t end_put(kvd_core_t *core, kvd_put_t *put, kv_status_t why)
{
	kvd_put_finish(core, put, why);

	return KVD_PUBLISH_ENDED;
}

static void make_entry_visible(kvd_core_t *core, kvd_put_t *put, uint32_t index, uint32_t block,
			       kvd_entry_state_t state)
{
	kvd_entry_t *entry = &put->entries[index];

	entry->state = state;
	if (!put->unchained) {
		put->next = index + 1;
		/* Without memory for the first pin the block stays unpinned. */
		(void)kvd_put_pin_block(core, put, block);
	} else {
		kvd_put_count_visible(put);
		if (put->durable) {
			kvd_entry_pin_block(core, put, index, block);
		}
	}
	atomic_store_explicit(&put->header->ready, put->next, memory_order_release);
	/* Other copies of the key may be unfinished still: a put that waits needs only one of them. */
	kvd_pending_remove(core, put, index);
	kvd_pending_wake(core, put->tree, &entry->key, put->group);
	kvd_count(core,
		  state != KVD_ENTRY_VISIBLE ? KV_M_PUT_DUPLICATES
		  : put->private_blocks      ? KV_M_PUT_PRIVATE
					     : KV_M_PUT_BLOCKS,
		  1);
}

/* Another copy was first. 0: no copy is visible. */
static int adopt_duplicate(kvd_core_t *core, kvd_put_t *put, uint32_t index, kvd_publish_result_t *p_result)
{
	kvd_entry_t *entry = &put->entries[index];
	uint32_t id = kvd_index_find(&core->ix, put->tree, &entry->key, (uint8_t)put->group);

	if (id == KVD_NONE) {
		return 0;
	}
	if (kvd_depth_of(&core->ix, kvd_block_at(&core->ix, id)) != kvd_put_depth(put, index)) {
		*p_result = end_put(core, put, KV_ERR_ARG);
		return 1;
	}
	/* Two puts of one block: the first copy is kept, and this slot is free at once, since its writers have ended.
	 */
	if (entry->loc.slot != KV_SLOT_NONE) {
		kvd_entry_free(core, put, entry);
	}
	kvd_private_block_renew(core, id);
	make_entry_visible(core, put, index, id, KVD_ENTRY_DUPLICATE);
	*p_result = KVD_PUBLISH_NEXT;

	return 1;
}

static const uint32_t *tokens_of(const kvd_put_t *put, uint32_t index)
{
	return put->tokens ? put->tokens + (size_t)index * put->block_tokens : NULL;
}

static kv_status_t try_insert(kvd_core_t *core, const kvd_put_t *put, uint32_t parent, const kvs_meta_t *meta,
			      uint32_t *p_block)
{
	return core->ns[put->ns]->blocks < kvd_share_max(core, put->ns, KVD_SHARE_INDEX)
		       ? kvd_index_insert(&core->ix, put->tree, parent, meta, p_block)
		       : KV_ERR_LIMIT;
}

/* The key is that of a block set aside: the new bytes replace the copy that cannot be read, and the blocks below it are
 * visible again at once. Only a client that contradicts itself has another block above it, or the key below one that is
 * hidden. */
static kv_status_t restore_set_aside(kvd_core_t *core, uint32_t id, uint32_t parent)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	if (kvd_index_parent(&core->ix, id) != parent || *kvd_slot_of(&core->ix, block) != KV_SLOT_NONE ||
	    block->io != KVD_NONE) {
		return KV_ERR_ARG;
	}
	kvd_block_take_back(core, id);

	return KV_OK;
}

/* Into the index. When that is full, the coldest blocks of the namespace furthest over its share make room (decision
 * 025). A pin keeps the CPU copy of a parent but lets its disk copy go, and the new block may join below that copy: so
 * the parent is referenced meanwhile. */
static kv_status_t insert_block(kvd_core_t *core, kvd_put_t *put, uint32_t index, uint32_t parent, uint32_t *p_block)
{
	kvs_meta_t meta;
	kv_status_t status;

	/* A copy that cannot be read is in the index already: the new bytes heal it (decision 032). */
	*p_block = kvd_index_find_aside(&core->ix, put->tree, &put->entries[index].key, (uint8_t)put->group);
	if (*p_block != KVD_NONE) {
		return restore_set_aside(core, *p_block, parent);
	}
	kvd_put_get_meta(core, put, index, &meta);
	if (parent != KVD_NONE) {
		kvd_block_ref(core, parent);
	}
	status = try_insert(core, put, parent, &meta, p_block);
	for (uint32_t tries = 0; status == KV_ERR_LIMIT && tries < INDEX_TRIES; tries++) {
		if (kvd_make_index_room(core, put->ns) != KV_OK) {
			break;
		}
		status = try_insert(core, put, parent, &meta, p_block);
	}
	if (parent != KVD_NONE) {
		kvd_block_unref(core, parent);
	}

	return status == KV_ERR_LIMIT ? KV_ERR_NOT_ADMITTED : status;
}

static kvd_publish_result_t publish_cpu(kvd_core_t *core, kvd_put_t *put, uint32_t index, uint32_t parent)
{
	kvd_entry_t *entry = &put->entries[index];
	kvd_block_t *block;
	uint32_t id;
	kv_status_t status = insert_block(core, put, index, parent, &id);

	if (status != KV_OK) {
		return end_put(core, put, status);
	}
	block = kvd_block_at(&core->ix, id);
	/* One with a copy on disk is an old block that is no longer set aside. */
	if (put->private_blocks && block->disk.slot == KV_SLOT_NONE) {
		kvd_index_make_private(&core->ix, id);
	}
	block->cpu_gen = entry->loc.gen;
	*kvd_slot_of(&core->ix, block) = entry->loc.slot;
	kvd_share_count_unfinished(core, kvd_instance_at(core, put->instance), put->slot_class, 0);
	kvd_block_join(core, id, KVD_CPU, put->stamp, tokens_of(put, index));
	make_entry_visible(core, put, index, id, KVD_ENTRY_VISIBLE);

	return KVD_PUBLISH_NEXT;
}

static const kvd_block_t *pinned_block(const kvd_core_t *core, const kvd_put_t *put)
{
	return kvd_block_at(&core->ix, ((const kvd_pin_t *)kvd_obj_at(&core->pins, put->pin))->block);
}

/* Is the block above entry `index` visible? KVD_NONE in *p_parent: at the root. The put's pin hangs on it from then on:
 * room for the entry must not be made by evicting its parent. */
static kvd_publish_result_t find_parent(kvd_core_t *core, kvd_put_t *put, uint32_t index, uint32_t *p_parent)
{
	const kv_key_t *key = index > 0 ? &put->entries[index - 1].key : &put->parent;

	*p_parent = KVD_NONE;
	/* Another copy of the parent may be here by now, but this put was made below the one that was withdrawn. */
	if (put->pin != KVD_NONE && kvd_index_is_withdrawn(&core->ix, pinned_block(core, put))) {
		kvd_put_withdraw(core, put);
		return KVD_PUBLISH_ENDED;
	}
	if (index == 0 && put->depth0 == 0) {
		return KVD_PUBLISH_NEXT;
	}
	*p_parent = kvd_index_find(&core->ix, put->tree, key, (uint8_t)put->group);
	if (*p_parent == KVD_NONE) {
		if (index == 0 && kvd_pending_wait(core, put)) {
			return KVD_PUBLISH_WAIT;
		}
		return end_put(core, put,
			       kvd_index_find_aside(&core->ix, put->tree, key, (uint8_t)put->group) != KVD_NONE
				       ? KV_ERR_PARENT_UNREADABLE
				       : KV_ERR_PARENT_LOST);
	}
	if (kvd_depth_of(&core->ix, kvd_block_at(&core->ix, *p_parent)) != put->depth0 + index ||
	    kvd_is_private(&core->ix, kvd_block_at(&core->ix, *p_parent))) {
		return end_put(core, put, KV_ERR_ARG);
	}

	if (put->pin == KVD_NONE && !kvd_put_may_pin(core, put, *p_parent)) {
		return end_put(core, put, KV_ERR_BUSY);
	}

	return kvd_put_pin_block(core, put, *p_parent) == KV_OK ? KVD_PUBLISH_NEXT : end_put(core, put, KV_ERR_NOMEM);
}

/* ---- write-through --------------------------------------------------------------------------- */

/* On disk, below a parent that is there too. */
static kvd_publish_result_t publish_disk(kvd_core_t *core, kvd_put_t *put, uint32_t index, uint32_t parent,
					 kvs_loc_t disk)
{
	kvd_entry_t *entry = &put->entries[index];
	kvd_block_t *block;
	uint32_t id;
	kv_status_t status = insert_block(core, put, index, parent, &id);

	if (status != KV_OK) {
		kvs_free(core->tier[KVD_DISK], disk);
		entry->state = KVD_ENTRY_FULL;
		return end_put(core, put, status);
	}
	block = kvd_block_at(&core->ix, id);
	if (block->disk.slot != KV_SLOT_NONE) {
		kvs_free(core->tier[KVD_DISK], block->disk);
		kvd_durable_await_again(core);
	}
	block->disk = disk;
	if (!kvd_in_set(&core->ix, block, KVD_DISK)) {
		kvd_block_join(core, id, KVD_DISK, put->stamp, tokens_of(put, index));
	}
	/* The bytes are in memory still. When the parent has come into the CPU set meanwhile, the block joins without a
	 * read. */
	if (kvd_index_can_join(&core->ix, block, KVD_CPU)) {
		block->cpu_gen = entry->loc.gen;
		*kvd_slot_of(&core->ix, block) = entry->loc.slot;
		kvd_share_count_unfinished(core, kvd_instance_at(core, put->instance), put->slot_class, 0);
		kvd_block_join(core, id, KVD_CPU, put->stamp, tokens_of(put, index));
	} else {
		kvd_entry_free(core, put, entry);
	}
	make_entry_visible(core, put, index, id, KVD_ENTRY_VISIBLE);

	return KVD_PUBLISH_NEXT;
}

/* A write-through has ended. */
static void finish_write_through(kvd_core_t *core, kvd_io_t *io, kv_status_t status)
{
	kvd_put_t *put = kvd_put_find(core, io->put);
	kvd_entry_t *entry = put && put->running ? &put->entries[io->index] : NULL;
	uint32_t parent;
	kvd_publish_result_t result;

	if (status == KV_OK) {
		kvd_note_store(core);
	} else {
		kvs_free(core->tier[KVD_DISK], io->disk);
	}
	if (!entry || entry->state != KVD_ENTRY_WRITE_THROUGH) { /* the put ended meanwhile */
		kvs_free(core->tier[KVD_CPU], io->cpu);
		if (status == KV_OK) {
			kvs_free(core->tier[KVD_DISK], io->disk);
		}
		return;
	}
	entry->state = KVD_ENTRY_FULL;
	if (status != KV_OK) {
		kvd_put_finish(core, put, KV_ERR_NOT_ADMITTED);
		return;
	}
	if (kvd_tree_at(&core->ix, put->tree)->hidden) {
		kvs_free(core->tier[KVD_DISK], io->disk);
		kvd_put_queue(core, put);
		return;
	}
	result = find_parent(core, put, io->index, &parent);
	if (result != KVD_PUBLISH_NEXT ||
	    kvd_index_find(&core->ix, put->tree, &entry->key, (uint8_t)put->group) != KVD_NONE || parent == KVD_NONE ||
	    !kvd_in_set(&core->ix, kvd_block_at(&core->ix, parent), KVD_DISK)) {
		/* Another copy came first, or the parent has moved. */
		kvs_free(core->tier[KVD_DISK], io->disk);
		if (result == KVD_PUBLISH_NEXT) {
			kvd_put_queue(core, put);
		}
		return;
	}
	if (publish_disk(core, put, io->index, parent, io->disk) == KVD_PUBLISH_NEXT) {
		kvd_put_queue(core, put);
	}
}

/* Write the entry's block straight to disk. KV_ERR_BUSY: the disk has no room for it now. */
static kv_status_t start_write_through(kvd_core_t *core, const kvd_put_t *put, uint32_t index)
{
	kvs_meta_t meta;
	kvd_io_t *io;
	kv_status_t status = kvd_io_create(core, KVD_NONE, finish_write_through, &io);

	if (status != KV_OK) {
		return status;
	}
	kvd_put_get_meta(core, put, index, &meta);
	io->cpu = put->entries[index].loc;
	io->put = put->id;
	io->index = index;
	status = kvd_slot_alloc(core, put->slot_class, KVD_DISK, &(kvd_use_t){KVS_FILLING, put->id, &meta}, &io->disk);
	if (status == KV_OK) {
		status = kvd_io_submit_write(core, io);
	}
	if (status != KV_OK) {
		kvd_io_destroy(core, io);
	}

	return status;
}

static kvd_publish_result_t publish_write_through(kvd_core_t *core, kvd_put_t *put, uint32_t index)
{
	kvd_entry_t *entry = &put->entries[index];
	kv_status_t status;

	entry->state = KVD_ENTRY_WRITE_THROUGH;
	/* Its writers have ended, and only the transfer reads the slot now. */
	if (!entry->transit) {
		(void)kvs_set_state(core->tier[KVD_CPU], entry->loc, KVS_TRANSIT);
		entry->transit = 1;
	}
	status = start_write_through(core, put, index);
	if (status == KV_OK) {
		return KVD_PUBLISH_WAIT;
	}
	entry->state = KVD_ENTRY_FULL;
	if (status == KV_ERR_BUSY && (core->writes > 0 || kvd_class_expects_slots(core, put->slot_class, KVD_DISK))) {
		/* room comes back with the writes in flight, or with a file that is being emptied */
		kvd_put_queue(core, put);
		return KVD_PUBLISH_WAIT;
	}

	return end_put(core, put, KV_ERR_NOT_ADMITTED);
}

/* ---- one put after the other ----------------------------------------------------------------- */

static kvd_publish_result_t publish_entry(kvd_core_t *core, kvd_put_t *put, uint32_t index)
{
	kvd_publish_result_t result;
	uint32_t parent;

	if (put->entries[index].state == KVD_ENTRY_WRITE_THROUGH) {
		return KVD_PUBLISH_WAIT;
	}
	result = find_parent(core, put, index, &parent);
	if (result != KVD_PUBLISH_NEXT || put->entries[index].state == KVD_ENTRY_OPEN) {
		return result == KVD_PUBLISH_NEXT ? KVD_PUBLISH_WAIT : result;
	}
	if (adopt_duplicate(core, put, index, &result)) {
		return result;
	}
	if (parent == KVD_NONE || kvd_in_set(&core->ix, kvd_block_at(&core->ix, parent), KVD_CPU)) {
		return publish_cpu(core, put, index, parent);
	}

	return publish_write_through(core, put, index);
}

/* A FULL entry of an unchained put. */
static kvd_publish_result_t publish_unchained(kvd_core_t *core, kvd_put_t *put, uint32_t index)
{
	kvd_publish_result_t result;

	return adopt_duplicate(core, put, index, &result) ? result : publish_cpu(core, put, index, KVD_NONE);
}

/* Make visible what can be. */
static void try_put(kvd_core_t *core, kvd_put_t *put)
{
	if (!put->running) {
		return;
	}
	if (put->withdrawn) {
		kvd_put_withdraw(core, put);
		return;
	}
	if (kvd_tree_at(&core->ix, put->tree)->hidden) {
		/* The space was reset: the put stays until its writers have ended, since they may still write into its
		 * slots. */
		if (put->full == put->n - put->already) {
			kvd_put_finish(core, put, KV_ERR_STALE_EPOCH);
		}
		return;
	}
	for (uint32_t published = 0; put->unchained ? put->full_head != KVD_NONE : put->next < put->n; published++) {
		if (published == core->put_blocks) { /* other puts first (decision 033) */
			kvd_put_queue(core, put);
			core->puts_left = 1;
			return;
		}
		if ((put->unchained ? publish_unchained(core, put, kvd_entry_pop_full(put))
				    : publish_entry(core, put, put->next)) != KVD_PUBLISH_NEXT) {
			return;
		}
	}
	if (put->next == put->n) {
		kvd_put_finish(core, put, KV_OK);
	}
}

/* At most `blocks` blocks of one put become visible in a row. */
static void run_queued_puts(kvd_core_t *core, uint32_t blocks, uint64_t until_ns)
{
	uint32_t retries = 0;

	core->put_blocks = blocks;
	/* A put that must wait queues itself again: stop when only such puts are left. */
	while (core->run_count > retries) {
		uint32_t self = core->run_puts.head;
		kvd_put_t *put = kvd_obj_at(&core->puts, self);
		uint64_t id = put->id;

		kvd_put_unqueue(core, put);
		try_put(core, put);
		put = kvd_obj_at(&core->puts, self);
		retries += put->id == id && put->run_queued ? 1 : 0;
		if (core->run_count > retries && kv_now_ns(core->env) >= until_ns) {
			core->puts_left = 1;
			break;
		}
	}
}

/* A request does not wait for blocks left over from earlier puts: ticks publish those (decision 033). */
void kvd_puts_run(kvd_core_t *core)
{
	if (!core->puts_left) {
		run_queued_puts(core, BLOCKS_OF_A_REQUEST, UINT64_MAX);
	}
}

void kvd_puts_run_tick(kvd_core_t *core)
{
	core->puts_left = 0;
	run_queued_puts(core, BLOCKS_OF_A_TICK, core->now_ns + TICK_NS);
}
