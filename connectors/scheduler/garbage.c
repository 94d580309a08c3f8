/* Blocks that a synchronous load has not filled, and what was computed after them. */
#include "scheduler/garbage.h"
#include "scheduler/base/requests.h"
#include "scheduler/save.h"

/* What the request was given after garbage is computed from it. 0: it has none, but what it computes again. */
static int invalidate_dependents(kvx_scheduler_t *scheduler, const kvx_request_t *request)
{
	const kvx_request_group_t *group = &request->groups[0];
	const uint32_t own = request->garbage_until ? request->garbage_from : group->n;
	int found = 0;

	for (uint32_t i = 0; i < group->n && (found || i < own); i++) {
		const kvx_table_entry_t *entry = &group->entries[i];

		found |= kvx_entry_is_garbage(scheduler, entry);
		if (found && i >= request->found && kvx_entry_is_current(scheduler, entry)) {
			scheduler->blocks[entry->id].gen |= 1u;
		}
	}

	return found;
}

void kvx_loads_mark_unverified(kvx_scheduler_t *scheduler, const kvx_request_t *request)
{
	for (kvx_sload_t *load = request->loads; load; load = load->own_next) {
		const kvx_sload_part_t *part = &load->part[0];
		const kvx_request_group_t *group = &request->groups[0];

		if ((load->flags & KVX_MSG_ASYNC) || load->blocks_lost) {
			continue;
		}
		load->blocks_lost = 1;
		for (uint32_t i = part->first; i < group->n; i++) {
			const kvx_table_entry_t *entry = &group->entries[i];

			if (kvx_entry_is_current(scheduler, entry) &&
			    scheduler->blocks[entry->id].unverified_by != KVX_UNNAMED) {
				scheduler->blocks[entry->id].unverified_by = load->number;
			}
		}
	}
}

static void invalidate_unverified(kvx_scheduler_t *scheduler, const kvx_sload_t *load)
{
	for (uint32_t i = 0; load->blocks_lost && i < scheduler->max_blocks; i++) {
		kvx_block_t *block = &scheduler->blocks[i];

		if (block->unverified_by == load->number) {
			block->gen |= 1u;
			block->unverified_by = KVX_UNNAMED;
			scheduler->unnamed++;
		}
	}
}

uint32_t kvx_scheduler_take_invalidated(kvx_scheduler_t *scheduler, uint32_t *ids, uint32_t cap)
{
	uint32_t n = 0;

	for (uint32_t i = 0; scheduler->unnamed > 0 && n < cap && i < scheduler->max_blocks; i++) {
		if (scheduler->blocks[i].unverified_by == KVX_UNNAMED) {
			scheduler->blocks[i].unverified_by = 0;
			scheduler->unnamed--;
			ids[n++] = i;
		}
	}

	return n;
}

/* The load's own blocks, and those computed after them. */
static void invalidate_table(kvx_scheduler_t *scheduler, const kvx_sload_t *load)
{
	kvx_request_t *request = load->request;
	const kvx_request_group_t *group = &request->groups[0];

	for (uint32_t i = load->part[0].first; i < group->n; i++) {
		if (kvx_entry_is_current(scheduler, &group->entries[i])) {
			scheduler->blocks[group->entries[i].id].gen |= 1u;
		}
	}
	if (!request->unsavable) { /* else what it computes again comes after other garbage */
		request->garbage_until = group->n * scheduler->groups[0].block_tokens;
		request->garbage_from = load->part[0].first;
	}
}

/* An engine may have entered the blocks of a synchronous load in its prefix cache when it allocated them, and keep them
 * there when the load fails (docs/decisions/019). Until the request has computed them again, every request that finds
 * them computes garbage: none of it is saved. So its blocks are marked invalid, and puts that depend on them are
 * revoked. */
void kvx_loads_invalidate(kvx_scheduler_t *scheduler, const kvx_sload_t *load)
{
	/* After it has lost its blocks the table names others. */
	const kvx_request_t *request = load->blocks_lost ? NULL : load->request;

	if (request) {
		invalidate_table(scheduler, load);
	}
	invalidate_unverified(scheduler, load);
	for (kvx_request_t *other = NULL; (other = kvx_requests_next(&scheduler->requests, other));) {
		if (other != request && invalidate_dependents(scheduler, other)) {
			other->unsavable = 1;
			other->garbage_until = 0;
			kvx_puts_revoke(scheduler, other, load->step);
		}
	}
}
