/* The core's way out: tiers, ledger, notices, events. */
#include "io/world.h"

#include "io/sessions/disk_attach.h"
#include "io/sessions/join.h"
#include "io/members/member_table.h"
#include "io/members/reports.h"
#include "io/members/slabs.h"
#include "io/sessions/request.h"
#include "io/base/session.h"
#include "base/memory.h"

#include "kvs/pool.h"
#include "kvs/sigbus.h"

#include <stdio.h>

/* ---- what the core calls --------------------------------------------------------------------- */

static void world_notify(void *ctx, kvd_member_t member, uint16_t code, const kv_msg_t *msg)
{
	kvd_host_t *host = ctx;
	kvd_session_t *session;

	kvd_slabs_announce(host);
	session = kvd_member_entry_session(kvd_member_entry_find(host, member));
	if (session) {
		kvd_session_notify(host, session, code, msg, NULL);
	}
}

static void world_publish(void *ctx, const kvd_event_t *event)
{
	kvd_host_t *host = ctx;

	if (host->publisher) {
		kvd_publisher_event(host->publisher, event);
	}
}

/* The pool in which the slot lies; without a slot, that of the host. */
static kvs_tier_t *pool_of(const kvd_host_t *host, kvs_loc_t loc)
{
	return host->pool[loc.slot == KV_SLOT_NONE ? 0 : kvs_memory_of_slab(kv_slot_slab(loc.slot))];
}

static kv_status_t world_ledger_add(void *ctx, const kvd_grant_t *grant)
{
	const kv_lease_header_t *header = grant->header;

	return kvs_pool_add_record(pool_of(ctx, grant->deepest),
				   &(kvs_record_t){.id = grant->id,
						   .instance = grant->instance,
						   .expiry_ns = grant->expiry_ns,
						   .space = header->space,
						   .n = header->n,
						   .skip = header->skip,
						   .kind = header->kind,
						   .deepest = kvs_loc_in_pool(grant->deepest),
						   .deepest_key = *grant->deepest_key,
						   .group = (uint8_t)header->group});
}

/* Ids come from one counter, so at most one ledger has it. */
static void world_ledger_remove(void *ctx, uint64_t id)
{
	const kvd_host_t *host = ctx;

	for (uint32_t m = 0; m < host->pool_count; m++) {
		kvs_pool_remove_record(host->pool[m], id);
	}
}

static kv_status_t world_set_leaves(void *ctx, kvs_loc_t loc, const kvs_leaf_span_t *span, const uint64_t *values)
{
	return kvs_pool_set_leaves(pool_of(ctx, loc), kvs_loc_in_pool(loc), span, values);
}

static kv_status_t world_compute_roots(void *ctx, kvs_loc_t loc)
{
	return kvs_pool_compute_roots(pool_of(ctx, loc), kvs_loc_in_pool(loc));
}

static void world_hold(void *ctx, const char *name, int fd)
{
	kvd_keeper_hold(&((kvd_host_t *)ctx)->to_keeper, name, fd);
}

static void world_drop(void *ctx, const char *name)
{
	kvd_keeper_drop(&((kvd_host_t *)ctx)->to_keeper, name);
}

/* ---- open and close -------------------------------------------------------------------------- */

static kv_status_t open_cpu(kvd_host_t *host, char *detail, size_t cap)
{
	const kvd_options_t *options = host->options;
	uint64_t ahead = 0;
	kv_status_t status = kvd_ahead_parse(options, &ahead);
	kvs_pool_config_t config = {.limit_bytes = options->cpu_size,
				    .slab_bytes = options->cpu_slab_size,
				    .max_slabs = KVS_HOST_SLABS,
				    .max_blocks = options->cpu_max_blocks,
				    .huge = (kvs_huge_t)options->cpu_huge_pages,
				    .prefault = options->cpu_prefault,
				    .room = kvd_memory_room,
				    .ahead_bytes = ahead,
				    .incarnation = host->incarnation,
				    .hold = world_hold,
				    .drop = world_drop,
				    .hold_ctx = host,
				    .metrics = &host->metrics};

	if (status == KV_OK) {
		status = kvs_sigbus_install();
	}
	if (status == KV_OK) {
		status = kvs_pool_open(&config, host->env, &host->cpu);
	}
	if (status == KV_OK) {
		host->pool[host->pool_count++] = host->cpu;
		status = kvs_memories_open(host->cpu, host->env, &host->memory);
	}
	if (status == KV_OK) {
		status = kvd_slabs_open(host);
	}
	if (status != KV_OK) {
		snprintf(detail, cap, "cannot set up the CPU tier: %s", kv_status_text(status));
	}

	return status;
}

static kv_status_t open_disk(kvd_host_t *host, char *detail, size_t cap)
{
	kv_status_t status = host->options->nvme_path[0] ? kvd_disk_attach_open(host, detail, cap) : KV_OK;

	return kvd_disk_attach_may_retry(status) ? kvd_disk_attach_begin(host, detail) : status;
}

kv_status_t kvd_world_open(kvd_host_t *host, char *detail, size_t cap)
{
	kv_status_t status = open_cpu(host, detail, cap);

	if (status == KV_OK) {
		status = open_disk(host, detail, cap);
	}
	host->world = (kvd_world_t){.env = *host->env,
				    .ctx = host,
				    .cpu = host->memory,
				    .disk = host->disk,
				    .metrics = &host->metrics,
				    .notify = world_notify,
				    .publish = world_publish,
				    .ledger_add = world_ledger_add,
				    .ledger_remove = world_ledger_remove,
				    .set_leaves = world_set_leaves,
				    .compute_roots = world_compute_roots,
				    .describe = kvd_member_entry_describe,
				    .note_reset = host->attach ? kvd_disk_attach_note_reset : NULL};

	return status;
}

void kvd_world_close(kvd_host_t *host)
{
	kvs_close(host->disk);
	host->disk = NULL;
	kvd_disk_attach_end(host);
	kvs_close(host->memory);
	host->memory = NULL;
	while (host->pool_count > 0) {
		kvs_close(host->pool[--host->pool_count]);
	}
	host->cpu = NULL;
	kvd_slabs_close(host);
}

kv_status_t kvd_world_create_core(kvd_host_t *host, char *detail, size_t cap)
{
	const kvd_options_t *options = host->options;
	kv_status_t status;

	host->core_config = (kvd_core_config_t){
		.incarnation = host->incarnation,
		.max_index_blocks = options->index_max_blocks,
		.max_spaces = (uint32_t)options->limits_spaces + 1, /* 0 is none */
		.max_instances = (uint32_t)options->limits_instances,
		.max_members = (uint32_t)options->limits_members,
		.max_leases = (uint32_t)options->limits_leases,
		.max_pinned_bytes = options->instance_max_pinned,
		.max_unfinished_bytes = options->instance_max_unfinished,
		.lease_ttl_ns = options->lease_ttl,
		.put_ttl_ns = options->put_ttl,
		.max_handovers = (uint32_t)options->handover_max_entries,
		.max_handover_bytes = options->handover_max_bytes,
		.handover_ttl_ns = options->handover_ttl,
		.handover_min_ttl_ns = options->handover_min_ttl,
		.write_behind_depth = (uint32_t)options->nvme_queue_depth,
		.read_depth = (uint32_t)options->nvme_queue_depth,
		.write_behind = options->nvme_write_behind,
		.policy = (kvd_policy_kind_t)options->policy,
		.admission = options->admission,
		.stale_ns = options->limits_silence,
	};
	status = kvd_core_create(&host->core_config, &host->world, &host->core);
	if (status != KV_OK) {
		snprintf(detail, cap, "cannot set up the index: %s", kv_status_text(status));
		return status;
	}
	kvd_core_set_staging(host->core, kvd_member_entry_read_staging, host);
	kvd_core_set_answer(host->core, kvd_request_reply_late, host);

	return KV_OK;
}

void kvd_world_destroy_core(kvd_host_t *host)
{
	if (host->core) {
		kvd_core_destroy(host->core);
		host->core = NULL;
	}
}
