/* DURABLE: answered once, when the deepest visible block of a put and all above it are on disk and synced, or when it
 * is known how many of them will be. */
#include "core/block/block.h"
#include "core/block/write_behind.h"
#include "core/base/core_impl.h"
#include "core/put/durable.h"
#include "core/put/put_impl.h"
#include "core/base/find.h"

static void answer_durable(kvd_core_t *core, kvd_put_t *put, uint32_t n, kv_status_t status)
{
	kv_msg_t msg = {.durable = {.put = put->id, .n = n, .status = status}};

	put->durable = 0;
	core->durable_owed--;
	kvd_member_notify(core, put->member, KV_CODE_DURABLE, &msg);
	kvd_put_unpin(core, put);
	kvd_put_remove_if_done(core, put);
}

static uint32_t pinned_block(kvd_core_t *core, const kvd_put_t *put)
{
	const kvd_pin_t *pin = kvd_obj_at(&core->pins, put->pin);

	return pin->block;
}

static int is_on_disk(const kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	return kvd_in_set(&core->ix, block, KVD_DISK) && !kvd_index_is_dead(&core->ix, block);
}

/* Is the block in the disk set, and in this very slot? One that was evicted there and written again is behind a later
 * flush only. */
static int is_in_slot(const kvd_core_t *core, uint32_t id, kvs_loc_t disk)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	return is_on_disk(core, id) && block->disk.slot == disk.slot && block->disk.gen == disk.gen;
}

/* Has the flush failed that was for `store_seq`? What came after it began waits for the next one. */
static int flush_failed(const kvd_core_t *core, uint64_t store_seq)
{
	return !core->flush_busy && core->flush_status != KV_OK && core->flush_due_ns > core->now_ns &&
	       core->flushing + 1 >= store_seq;
}

/* Each put that owes an acknowledgement; `see` may end it. */
static void for_each_owed(kvd_core_t *core, void (*see)(kvd_core_t *core, kvd_put_t *put))
{
	for (uint32_t i = core->instance_list.head; i != KVD_NONE; i = kvd_instance_at(core, i)->of_core.next) {
		for (uint32_t p = kvd_instance_at(core, i)->puts.head; p != KVD_NONE;) {
			kvd_put_t *put = kvd_obj_at(&core->puts, p);

			p = put->of_instance.next;
			if (put->durable && !put->running) {
				see(core, put);
			}
		}
	}
}

/* ---- entries without parents ----------------------------------------------------------------- */

/* The entry's block while it is pinned, else KVD_NONE. */
static uint32_t pinned_block_of(const kvd_core_t *core, const kvd_put_t *put, uint32_t index)
{
	uint32_t pin = put->entries[index].pin;

	return pin == KVD_NONE ? KVD_NONE : ((const kvd_pin_t *)kvd_obj_at(&core->pins, pin))->block;
}

/* How many of the first n entries are where they were seen on disk, up to the first that is not. */
static uint32_t count_on_disk(kvd_core_t *core, const kvd_put_t *put, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		uint32_t id = pinned_block_of(core, put, i);

		if (id == KVD_NONE || !is_in_slot(core, id, put->entries[i].disk)) {
			return i;
		}
	}

	return n;
}

/* How far the ended put is on disk: 1 when entries [0, put->stored) are and no more will be, 0 when that is not known
 * yet. */
static int count_stored(kvd_core_t *core, kvd_put_t *put)
{
	for (; put->stored < put->next; put->stored++) {
		uint32_t id = pinned_block_of(core, put, put->stored);

		if (id != KVD_NONE && kvd_in_set(&core->ix, kvd_block_at(&core->ix, id), KVD_DISK)) {
			put->entries[put->stored].disk = kvd_block_at(&core->ix, id)->disk;
			continue;
		}
		if (id != KVD_NONE && kvd_write_is_expected(core, id)) {
			return 0;
		}
		if (id == KVD_NONE || put->asked == put->stored + 1 || kvd_write_behind_paused(core)) {
			break; /* it will not be written */
		}
		put->asked = put->stored + 1;
		kvd_queue_push(&core->ix, kvd_block_at(&core->ix, id)->node);
		return 0;
	}

	return 1;
}

static void check_unchained(kvd_core_t *core, kvd_put_t *put)
{
	uint32_t n;

	if (!kvd_class_has_disk(core, put->slot_class)) {
		answer_durable(core, put, 0, put->status != KV_OK ? put->status : KV_ERR_NOT_ADMITTED);
		return;
	}
	if (put->store_seq == 0) {
		if (!count_stored(core, put)) {
			return;
		}
		put->store_seq = core->stores + 1; /* a block stored later is not covered by this flush */
	}
	n = put->stored;
	if (n > 0 && core->flushed + 1 < put->store_seq) {
		if (flush_failed(core, put->store_seq)) {
			answer_durable(core, put, 0, core->flush_status);
		}
		return;
	}
	n = count_on_disk(core, put, n); /* some may have been evicted there while it waited */
	if (n < put->next && put->status == KV_OK) {
		put->status = KV_ERR_NOT_ADMITTED;
		kvd_count(core, KV_M_NOT_ADMITTED, put->next - n);
	}
	answer_durable(core, put, n, put->status);
}

/* ---- a path ---------------------------------------------------------------------------------- */

/* It is on disk, and durable with the flush that covers all that is stored now. Blocks above leave the disk after it
 * only. */
static void await_flush(kvd_core_t *core, kvd_put_t *put)
{
	put->disk = kvd_block_at(&core->ix, pinned_block(core, put))->disk;
	put->store_seq = core->stores + 1;
	core->durable_changed |= KVD_DURABLE_STORED;
}

/* The pinned block will not reach the disk: promise the part of its path that is there already. */
static void report_partial_durability(kvd_core_t *core, kvd_put_t *put)
{
	uint32_t id = pinned_block(core, put), depth = kvd_index_depth_in(&core->ix, id, KVD_DISK);

	if (put->status == KV_OK) {
		put->status = KV_ERR_NOT_ADMITTED;
		kvd_count(core, KV_M_NOT_ADMITTED, 1);
	}
	if (depth == 0) {
		answer_durable(core, put, 0, put->status);
		return;
	}
	kvd_pin_move(core, put->pin, kvd_index_ancestor(&core->ix, id, depth));
	await_flush(core, put);
}

static void check_put(kvd_core_t *core, kvd_put_t *put)
{
	uint32_t id;

	if (put->unchained) {
		check_unchained(core, put);
		return;
	}
	if (put->pin == KVD_NONE || !kvd_class_has_disk(core, put->slot_class)) {
		answer_durable(core, put, 0, put->status != KV_OK ? put->status : KV_ERR_NOT_ADMITTED);
		return;
	}
	id = pinned_block(core, put);
	if (put->store_seq == 0) {
		if (is_on_disk(core, id)) {
			await_flush(core, put);
		} else if (!put->expected && !(put->expected = (uint32_t)kvd_write_is_expected(core, id))) {
			/* Write-behind may have dropped the block when the disk had no room: it is queued once more,
			 * and only once. */
			if (put->asked || kvd_write_behind_paused(core)) {
				report_partial_durability(core, put);
				return;
			}
			put->asked = 1;
			kvd_queue_push(&core->ix, kvd_block_at(&core->ix, id)->node);
			core->durable_question = kvd_index_new_question(&core->ix);
		}
	}
	if (put->store_seq == 0) {
		return;
	}
	if (core->flushed + 1 >= put->store_seq) {
		if (!is_on_disk(core, id)) { /* evicted there while it waited */
			report_partial_durability(core, put);
			return;
		}
		if (!is_in_slot(core, id, put->disk)) { /* and written again */
			await_flush(core, put);
			return;
		}
		answer_durable(core, put, kvd_depth_of(&core->ix, kvd_block_at(&core->ix, id)), put->status);
	} else if (flush_failed(core, put->store_seq)) {
		answer_durable(core, put, 0, core->flush_status);
	}
}

/* ---- all that are owed ----------------------------------------------------------------------- */

/* What it waits for has left the disk. It may be written there again, but the flush it waits for does not cover
 * that. */
static void fail_lost(kvd_core_t *core, kvd_put_t *put)
{
	uint32_t stored = put->stored;

	if (put->unchained) {
		put->stored = count_on_disk(core, put, stored);
	}
	if (put->store_seq != 0 &&
	    (put->unchained ? put->stored < stored
			    : put->pin == KVD_NONE || !is_in_slot(core, pinned_block(core, put), put->disk))) {
		put->status = KV_ERR_IO;
		answer_durable(core, put, 0, put->status);
	}
}

void kvd_durable_fail_lost(kvd_core_t *core)
{
	core->durable_changed |= KVD_DURABLE_DROPPED;
	for_each_owed(core, fail_lost);
}

static void reset_flush_wait(kvd_core_t *core, kvd_put_t *put)
{
	(void)core;
	if (!put->unchained) {
		put->store_seq = 0;
	}
}

void kvd_durable_await_again(kvd_core_t *core)
{
	core->durable_changed |= KVD_DURABLE_STORED;
	for_each_owed(core, reset_flush_wait);
}

/* Its block was expected on disk before something was dropped: ask again. */
static void clear_expected(kvd_core_t *core, kvd_put_t *put)
{
	(void)core;
	put->expected = 0;
}

void kvd_durable_run(kvd_core_t *core)
{
	if (core->durable_owed == 0 || !core->durable_changed) {
		return;
	}
	if (core->durable_changed & KVD_DURABLE_DROPPED) {
		for_each_owed(core, clear_expected);
	}
	core->durable_changed = 0;
	core->durable_question = kvd_index_new_question(&core->ix);
	for_each_owed(core, check_put);
}
