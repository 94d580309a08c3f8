#include "core/block/admission.h"
#include "core/block/block.h"
#include "core/ends/damage.h"
#include "core/ends/dismantle.h"
#include "core/block/events.h"
#include "core/block/room.h"
#include "core/block/transfer.h"
#include "core/block/visibility.h"
#include "core/ends/withdraw.h"
#include "core/block/write_behind.h"
#include "core/base/core_impl.h"
#include "core/handover/handover.h"
#include "core/index/policy.h"
#include "core/lease/lease.h"
#include "core/put/durable.h"
#include "core/put/pending.h"
#include "core/put/put.h"
#include "core/ends/instance.h"
#include "core/base/find.h"
#include "core/ends/numbers.h"
#include "core/ends/rebalance.h"
#include "core/base/share.h"
#include "core/ends/space.h"

#define TICK_BUDGET_NS UINT64_C(200000)
#define POLL_BATCH     64u
#define MEMORY_WAIT_NS UINT64_C(1000000) /* a read waits for a slot's memory */

static void free_core(kvd_core_t *core)
{
	const kv_env_t env = core->world.env;

	kvd_spaces_fini(core);
	kvd_index_fini(&core->ix);
	kvd_obj_pool_fini(&core->pins);
	kvd_obj_pool_fini(&core->leases);
	kvd_obj_pool_fini(&core->puts);
	kvd_obj_pool_fini(&core->pendings);
	kvd_obj_pool_fini(&core->ios);
	kvd_obj_pool_fini(&core->extents);
	kvd_obj_pool_fini(&core->instances);
	kvd_obj_pool_fini(&core->members);
	kvd_obj_pool_fini(&core->handovers);
	kv_free(&env, core->reaped);
	kv_free(&env, core->ghosts);
	kv_free(&env, core->explain);
	kv_free(&env, core);
}

static int is_config_valid(const kvd_core_config_t *config, const kvd_world_t *world)
{
	return world->cpu && config->incarnation != 0 && config->max_index_blocks > 0 && config->max_spaces > 1 &&
	       config->max_spaces <= KV_MIRROR_MAX_SPACES && config->max_instances > 0 && config->max_members > 0 &&
	       config->max_leases > 0 && config->lease_ttl_ns > 0 && config->put_ttl_ns > 0 && config->read_depth > 0 &&
	       config->write_behind_depth > 0 && config->policy <= KVD_POLICY_FIFO &&
	       (config->max_handovers == 0 || config->handover_ttl_ns > 0) &&
	       (uint64_t)config->max_instances * config->max_leases < 1u << KVD_ID_BITS;
}

static kv_status_t init_pools(kvd_core_t *core)
{
	const kvd_core_config_t *config = &core->config;
	uint32_t leases = config->max_instances * config->max_leases;
	uint32_t blocks = (uint32_t)config->max_index_blocks;
	uint64_t most = (uint64_t)KVD_MAX_NAMESPACES * config->max_handovers;
	uint64_t handovers = most < 1u << KVD_ID_BITS ? most : (1u << KVD_ID_BITS) - 1;
	const struct {
		kvd_obj_pool_t *pool;
		size_t item;
		uint64_t limit;
	} pools[] = {
		{&core->leases, sizeof(kvd_lease_t), leases},
		{&core->puts, sizeof(kvd_put_t), leases},
		/* One a lease, one a put; and of unchained groups one a block, of several leases of all
		 * blocks. Hand-overs have theirs of these, or are refused. */
		{&core->pins, sizeof(kvd_pin_t), 2u * (uint64_t)leases + 4u * (uint64_t)blocks},
		{&core->pendings, sizeof(kvd_pending_t), blocks + 65536u},
		{&core->ios, sizeof(kvd_io_t), blocks + 65536u},
		{&core->extents, sizeof(kvd_extent_t),
		 4u * (uint64_t)leases + 2u * (uint64_t)config->max_instances + 64u},
		{&core->instances, sizeof(kvd_instance_rec_t), config->max_instances},
		{&core->members, sizeof(kvd_member_rec_t), config->max_members},
		{&core->handovers, sizeof(kvd_handover_t), handovers},
	};
	kv_status_t status = kvd_index_init(&core->ix, core->env, core->world.metrics, config->max_index_blocks);

	for (size_t i = 0; i < KV_COUNT_OF(pools) && status == KV_OK; i++) {
		status = kvd_obj_pool_init(pools[i].pool, core->env, (uint32_t)pools[i].item, (uint32_t)pools[i].limit);
	}

	return status;
}

static uint64_t count_ghosts(uint64_t blocks)
{
	uint64_t count = 1024;

	while (count < blocks && count < 1u << 20) {
		count *= 2;
	}

	return count;
}

kv_status_t kvd_core_create(const kvd_core_config_t *config, const kvd_world_t *world, kvd_core_t **p_core)
{
	kvd_core_t *core;
	kv_status_t status;

	if (!is_config_valid(config, world)) {
		return KV_ERR_ARG;
	}
	core = kv_alloc(&world->env, sizeof *core);
	if (!core) {
		return KV_ERR_NOMEM;
	}
	core->config = *config;
	core->world = *world;
	core->env = &core->world.env;
	core->tier[KVD_CPU] = world->cpu;
	core->tier[KVD_DISK] = world->disk;
	core->policy = config->policy == KVD_POLICY_FIFO ? &kvd_policy_fifo : &kvd_policy_lru;
	core->instance_list = core->fills = core->run_puts = core->dead_nodes = KVD_LIST_EMPTY;
	core->dead_trees = KVD_NONE;
	memset(core->pending_heads, 0xff, sizeof core->pending_heads);
	memset(core->handover_heads, 0xff, sizeof core->handover_heads);
	core->now_ns = kv_now_ns(core->env);
	kvd_wheel_init(&core->lease_wheel, core->now_ns);
	kvd_wheel_init(&core->handover_wheel, core->now_ns);
	core->rebalance[KVD_CPU].slab = core->rebalance[KVD_DISK].slab = KVD_NONE;
	core->ghost_mask = count_ghosts(config->max_index_blocks) - 1;

	status = init_pools(core);
	if (status == KV_OK) {
		core->ghosts = kv_alloc(core->env, (core->ghost_mask + 1) * sizeof *core->ghosts);
		core->reaped = kv_alloc(core->env, 2 * (size_t)config->max_instances * sizeof *core->reaped);
		core->explain = kv_alloc(core->env, KVD_EXPLAIN_KEYS * (1 + sizeof(uint32_t)));
		status = core->ghosts && core->reaped && core->explain ? KV_OK : KV_ERR_NOMEM;
	}
	if (status != KV_OK) {
		free_core(core);
		return status;
	}
	kvd_epochs_init(core);
	if (world->disk) {
		kvd_watch_disk(core);
	}
	*p_core = core;

	return KV_OK;
}

void kvd_core_destroy(kvd_core_t *core)
{
	if (!core) {
		return;
	}
	kvd_puts_free(core);
	kvd_leases_free(core);
	kvd_handovers_free(core);
	kvd_withdrawals_free(core);
	if (core->tier[KVD_DISK]) {
		kvs_tier_watch(core->tier[KVD_DISK], &(kvs_watch_t){0});
	}
	core->closed = free_core;
	if (core->outstanding == 0) {
		free_core(core);
	}
}

void kvd_core_set_staging(kvd_core_t *core, kvd_staging_fn fetch, void *ctx)
{
	core->staging = fetch;
	core->staging_ctx = ctx;
}

void kvd_core_set_answer(kvd_core_t *core, kvd_answer_fn answer, void *ctx)
{
	core->answer = answer;
	core->answer_ctx = ctx;
}

/* ---- requests -------------------------------------------------------------------------------- */

static int is_disk_off(const kvd_core_t *core)
{
	kvs_tier_t *disk = core->tier[KVD_DISK];

	return disk && kvs_readable(disk, (kvs_loc_t){.slot = KV_SLOT_NONE}) == KV_ERR_TIER_OFF;
}

static int is_in_gpu_memory(const kvd_core_t *core, const kvd_tree_t *tree)
{
	return tree->group_count > 0 && core->classes[tree->groups[0].slot_class].memory > 0;
}

/* Byte of a key in the answer, and the leases that end at its block. */
static uint8_t explain_key(kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint8_t group, uint32_t *p_leases)
{
	uint8_t in, pending = kvd_pending_has_key(core, tree, key, group) ? 0x80 : 0;
	uint32_t shown = kvd_index_find(&core->ix, tree, key, group);
	uint32_t id = shown != KVD_NONE ? shown : kvd_index_find_aside(&core->ix, tree, key, group);

	if (id == KVD_NONE) {
		return pending | (kvd_index_is_quarantined(&core->ix, tree, key, group) ? 0x40 : 0);
	}
	for (uint32_t c = kvd_block_at(&core->ix, id)->pins.head; c != KVD_NONE;) {
		const kvd_pin_t *pin = kvd_obj_at(&core->pins, c);

		*p_leases += pin->kind == KVD_PIN_LEASE ? 1 : 0;
		c = pin->of_block.next;
	}
	in = kvd_tiers_of(&core->ix, kvd_block_at(&core->ix, id));
	if ((in & KV_TIER_CPU) && is_in_gpu_memory(core, kvd_tree_at(&core->ix, tree))) {
		in = KV_TIER_GPU;
	}

	return pending | in | (shown == KVD_NONE || (in == KV_TIER_DISK && is_disk_off(core)) ? KV_TIER_UNREADABLE : 0);
}

static kv_status_t explain_keys(kvd_core_t *core, uint32_t ns, const kv_msg_explain_t *ask,
				kv_msg_explain_reply_t *reply)
{
	uint32_t count = ask->keys.len / KV_KEY_BYTES;
	uint8_t *tiers = core->explain, *leases = core->explain + KVD_EXPLAIN_KEYS;
	const kv_group_t *group;
	kvd_space_t *space;
	kv_status_t status = kvd_space_find(core, ns, ask->space, ask->epoch, &space);

	if (status == KV_OK) {
		status = kvd_space_group(space, ask->group, &group);
	}
	if (status != KV_OK) {
		return status;
	}
	if (ask->keys.len % KV_KEY_BYTES != 0 || count > KVD_EXPLAIN_KEYS) {
		return KV_ERR_ARG;
	}
	reply->why = KV_WHY_NONE;
	for (uint32_t i = 0; i < count; i++) {
		kv_key_t key;
		uint32_t ends = 0;

		memcpy(&key, ask->keys.data + (size_t)i * KV_KEY_BYTES, sizeof key);
		tiers[i] = explain_key(core, space->tree, &key, (uint8_t)ask->group, &ends);
		memcpy(leases + (size_t)i * sizeof ends, &ends, sizeof ends);
		if (reply->why != KV_WHY_NONE) {
			continue;
		}
		if (tiers[i] & KV_TIER_UNREADABLE) {
			reply->why = KV_WHY_UNREADABLE;
		} else if ((tiers[i] & 0x3f) == 0) {
			reply->why = kvd_explain_miss(core, space->tree, &key, (uint8_t)ask->group);
		}
	}
	reply->tiers = (kv_slice_t){tiers, count};
	reply->leases = (kv_slice_t){leases, count * (uint32_t)sizeof(uint32_t)};

	return KV_OK;
}

static kv_status_t reset_space(kvd_core_t *core, uint32_t ns, kvd_member_t id, uint64_t frame_id, const kv_msg_t *msg,
			       kv_msg_t *reply)
{
	kvd_member_rec_t *member;
	kvd_instance_rec_t *instance;
	kv_status_t status = kvd_member_check(core, ns, id, &member, &instance);

	return status == KV_OK ? kvd_space_reset(core, ns, id, frame_id, &msg->space_reset, &reply->space_reset_reply)
			       : status;
}

static const char *detail_of(const kvd_core_t *core, kv_status_t status)
{
	switch (status) {
	case KV_ERR_ARG:
		return "a field is out of its range, or two fields contradict each other";
	case KV_ERR_LIMIT:
		return "limits.leases (leases and puts of an instance, and hand-overs that it is a side of), "
		       "instance.lease_area or handover.max_entries (of a namespace) is reached; raise it, or end some";
	case KV_ERR_UNSUPPORTED:
		return "the space has no such group";
	case KV_ERR_NOT_ADMITTED:
		return "the pool thrashes (kvctl status), and these blocks were asked for too rarely to stay in it";
	case KV_ERR_BUSY:
		return core->why_busy;
	default:
		return NULL;
	}
}

static kv_status_t handle_request(kvd_core_t *core, const kvd_ask_t *ask, kv_msg_t *reply)
{
	const kv_msg_t *msg = ask->msg;
	kvd_member_t member = ask->member;
	uint32_t ns = ask->ns;
	kv_status_t status;

	switch (ask->code) {
	case KV_CODE_ACQUIRE:
		status = kvd_lease_acquire(core, ns, member, &msg->acquire, &reply->acquire_reply);
		break;
	case KV_CODE_RELEASE:
		status = kvd_lease_release(core, member, &msg->release, &reply->release_reply);
		break;
	case KV_CODE_RENEW:
		status = kvd_lease_renew(core, member, &msg->renew, &reply->renew_reply);
		break;
	case KV_CODE_PUT_START:
		status = kvd_put_start(core, ns, member, &msg->put_start, &reply->put_start_reply);
		break;
	case KV_CODE_PUT_END:
		status = kvd_put_end(core, member, &msg->put_end, &reply->put_end_reply);
		break;
	case KV_CODE_PUT_REVOKE:
		status = kvd_put_revoke(core, member, &msg->put_revoke, &reply->put_revoke_reply);
		break;
	case KV_CODE_KEEP:
		status = kvd_put_keep(core, member, &msg->keep, &reply->keep_reply);
		break;
	case KV_CODE_DRAINED:
		status = kvd_member_drained(core, member, &msg->drained, &reply->drained_reply);
		break;
	case KV_CODE_BAD_BLOCK:
		status = kvd_report_bad_block(core, member, &msg->bad_block, &reply->bad_block_reply);
		break;
	case KV_CODE_HANDOVER_SEND:
		status = kvd_handover_send(core, ns, member, &msg->handover_send, &reply->handover_send_reply);
		break;
	case KV_CODE_HANDOVER_RECV:
		status = kvd_handover_recv(core, ns, member, &msg->handover_recv, &reply->handover_recv_reply);
		break;
	case KV_CODE_HANDOVER_TAIL:
		status = kvd_handover_tail(core, ns, member, &msg->handover_tail, &reply->handover_tail_reply);
		break;
	case KV_CODE_HANDOVER_DONE:
		status = kvd_handover_done(core, ns, member, &msg->handover_done);
		break;
	case KV_CODE_SPACE_CLOSE:
		status = kvd_member_close_space(core, member, msg->space_close.space);
		break;
	case KV_CODE_SPACE_RESET:
		status = reset_space(core, ns, member, ask->frame_id, msg, reply);
		break;
	case KV_CODE_WITHDRAW:
		status = kvd_withdraw(core, ask);
		break;
	case KV_CODE_EXPLAIN:
		status = explain_keys(core, ns, &msg->explain, &reply->explain_reply);
		break;
	default:
		status = KV_ERR_UNKNOWN_REQUEST;
		break;
	}

	return status;
}

kv_status_t kvd_core_request(kvd_core_t *core, const kvd_ask_t *ask, kv_msg_t *reply, const char **detail)
{
	kv_status_t status;

	core->now_ns = kv_now_ns(core->env);
	core->why_busy = NULL;
	status = handle_request(core, ask, reply);
	if (ask->code != KV_CODE_PUT_START) { /* its answer goes out before any notice about the put */
		kvd_puts_run(core);
	}
	kvd_events_flush(core);
	if (detail) {
		*detail = detail_of(core, status);
	}

	return status;
}

/* Why its first missing block is missing: the mirror has stored blocks alone, what was evicted is absent there. */
static kv_miss_reason_t resolve_miss(const kvd_core_t *core, uint32_t ns, const kv_report_t *report)
{
	const kvd_space_t *space =
		report->space <= core->ns[ns]->number_made ? core->ns[ns]->numbers[report->space] : NULL;
	const int known = report->why != KV_WHY_ABSENT || !space || kv_key_is_zero(&report->first_missing);

	return known ? (kv_miss_reason_t)report->why
		     : kvd_explain_miss(core, space->tree, &report->first_missing, (uint8_t)report->group);
}

/* Tokens of a request that neither engine nor daemon had, by the reason of its first missing block. */
static void count_missed(kvd_core_t *core, uint32_t ns, const kv_report_t *report, uint64_t hits)
{
	static const kv_ns_metric_t metrics[] = {
		[KV_WHY_ABSENT] = KV_NM_MISS_ABSENT_TOKENS,
		[KV_WHY_EVICTED] = KV_NM_MISS_EVICTED_TOKENS,
		[KV_WHY_DAEMON_STALE] = KV_NM_MISS_STALE_TOKENS,
		[KV_WHY_NO_DAEMON] = KV_NM_MISS_NO_DAEMON_TOKENS,
		[KV_WHY_STALE_EPOCH] = KV_NM_MISS_EPOCH_TOKENS,
		[KV_WHY_CONTENDED] = KV_NM_MISS_CONTENDED_TOKENS,
		[KV_WHY_CORRUPT] = KV_NM_MISS_CORRUPT_TOKENS,
		[KV_WHY_TIMEOUT] = KV_NM_MISS_LATE_TOKENS,
		[KV_WHY_UNREADABLE] = KV_NM_MISS_UNREADABLE_TOKENS,
		[KV_WHY_NOT_ADMITTED] = KV_NM_MISS_NOT_ADMITTED_TOKENS,
	};
	const uint64_t had = hits + report->hit_engine_tokens;

	if (report->why != KV_WHY_NONE && had < report->query_tokens) {
		kvd_count_ns(core, ns, metrics[report->why], report->query_tokens - had);
	}
}

kv_status_t kvd_core_report(kvd_core_t *core, kvd_member_t id, kv_report_t *report)
{
	const kvd_member_rec_t *member = kvd_member_find(core, id);
	uint64_t hits = (uint64_t)report->hit_gpu_tokens + report->hit_cpu_tokens + report->hit_disk_tokens;
	uint32_t ns;

	if (!member || (report->type != KV_REPORT_MATCH && report->type != KV_REPORT_REQUEST) ||
	    hits > report->query_tokens || report->why > KV_WHY_NOT_ADMITTED) {
		kvd_count(core, KV_M_BAD_REPORTS, 1);
		return KV_ERR_ARG;
	}
	ns = kvd_instance_at(core, member->instance)->ns;
	kvd_count_ns(core, ns, KV_NM_LOOKUPS, 1);
	kvd_count_ns(core, ns, KV_NM_QUERY_TOKENS, report->query_tokens);
	kvd_count_ns(core, ns, KV_NM_HIT_GPU_TOKENS, report->hit_gpu_tokens);
	kvd_count_ns(core, ns, KV_NM_HIT_CPU_TOKENS, report->hit_cpu_tokens);
	kvd_count_ns(core, ns, KV_NM_HIT_DISK_TOKENS, report->hit_disk_tokens);
	report->why = resolve_miss(core, ns, report);
	count_missed(core, ns, report, hits);

	return KV_OK;
}

/* ---- time ------------------------------------------------------------------------------------ */

/* 0: no maximum. */
static uint64_t max_share_of(const kvd_core_t *core, uint32_t n, kvd_resource_t what)
{
	return core->ns[n]->parts.max[what];
}

static uint64_t kept_by_handovers(const kvd_ns_t *ns)
{
	return kvd_sum_of_memories(ns->handover_bytes, 0) + ns->tail_bytes;
}

static void update_ns_gauges(kvd_core_t *core, uint32_t n)
{
	kv_metrics_t *m = core->world.metrics;
	uint64_t gpu_used = 0, gpu_share = 0;

	for (uint32_t memory = 1; memory <= core->gpu_memories; memory++) {
		gpu_used += kvd_share_used(core, n, kvd_share_resource(memory));
		gpu_share += kvd_share_of(core, n, kvd_share_resource(memory));
	}
	kv_ns_metric_set(m, n, KV_NM_CPU_BYTES, kvd_share_used(core, n, KVD_SHARE_CPU));
	kv_ns_metric_set(m, n, KV_NM_CPU_SHARE_BYTES, kvd_share_of(core, n, KVD_SHARE_CPU));
	kv_ns_metric_set(m, n, KV_NM_DISK_BYTES, kvd_share_used(core, n, KVD_SHARE_DISK));
	kv_ns_metric_set(m, n, KV_NM_DISK_SHARE_BYTES, kvd_share_of(core, n, KVD_SHARE_DISK));
	kv_ns_metric_set(m, n, KV_NM_BLOCKS, kvd_share_used(core, n, KVD_SHARE_INDEX));
	kv_ns_metric_set(m, n, KV_NM_BLOCKS_SHARE, kvd_share_of(core, n, KVD_SHARE_INDEX));
	kv_ns_metric_set(m, n, KV_NM_CPU_MAX_BYTES, max_share_of(core, n, KVD_SHARE_CPU));
	kv_ns_metric_set(m, n, KV_NM_DISK_MAX_BYTES, max_share_of(core, n, KVD_SHARE_DISK));
	kv_ns_metric_set(m, n, KV_NM_BLOCKS_MAX, max_share_of(core, n, KVD_SHARE_INDEX));
	kv_ns_metric_set(m, n, KV_NM_IRRECLAIMABLE_BYTES, kvd_share_irreclaimable(core, n, KVD_HOST_MEM));
	kv_ns_metric_set(m, n, KV_NM_GPU_BYTES, gpu_used);
	kv_ns_metric_set(m, n, KV_NM_GPU_SHARE_BYTES, gpu_share);
	kv_ns_metric_set(m, n, KV_NM_SPACES, core->ns[n]->number_count);
	kv_ns_metric_set(m, n, KV_NM_HANDOVERS, core->ns[n]->handovers);
	kv_ns_metric_set(m, n, KV_NM_THRASHES, kvd_admission_thrashes(core, n) ? 1 : 0);
	kv_ns_metric_set(m, n, KV_NM_HANDOVER_BYTES, kept_by_handovers(core->ns[n]));
}

static void update_gauges(kvd_core_t *core)
{
	kv_metrics_t *m = core->world.metrics;
	uint64_t spaces = 0, handed_over = 0, in_gpus = 0, in[KVD_TIERS] = {0, 0};

	for (uint32_t n = 0; n < core->ns_count; n++) {
		spaces += core->ns[n]->number_count;
		handed_over += kept_by_handovers(core->ns[n]);
	}
	/* Of all trees: blocks taken in from disk count before an engine opens their space. */
	for (uint32_t id = 0; id < core->ix.trees.made; id++) {
		const kvd_tree_t *tree = kvd_tree_at(&core->ix, id);

		*(is_in_gpu_memory(core, tree) ? &in_gpus : &in[KVD_CPU]) +=
			tree->live && !tree->hidden ? tree->in[KVD_CPU] : 0;
		in[KVD_DISK] += tree->live && !tree->hidden ? tree->in[KVD_DISK] : 0;
	}
	if (core->ns_count > 0) { /* one namespace a call: to count all of them takes long */
		update_ns_gauges(core, core->gauge_ns++ % core->ns_count);
	}
	kv_metric_set(m, KV_M_SPACES, spaces);
	kv_metric_set(m, KV_M_BLOCKS_CPU, in[KVD_CPU]);
	kv_metric_set(m, KV_M_BLOCKS_GPU, in_gpus);
	kv_metric_set(m, KV_M_BLOCKS_DISK, in[KVD_DISK]);
	kv_metric_set(m, KV_M_BLOCKS, core->ix.blocks.used);
	kv_metric_set(m, KV_M_INSTANCES, core->instances.used);
	kv_metric_set(m, KV_M_MEMBERS, core->members.used);
	kv_metric_set(m, KV_M_LEASES, core->leases.used);
	kv_metric_set(m, KV_M_PUTS, core->puts.used);
	kv_metric_set(m, KV_M_HANDOVERS, core->handovers.used);
	kv_metric_set(m, KV_M_HANDOVER_BYTES, handed_over);
	kv_metric_set(m, KV_M_PINS, core->pins.used + core->refs);
}

static void write_heartbeats(kvd_core_t *core)
{
	const uint64_t off = is_disk_off(core) ? KV_TIER_DISK : 0;

	for (uint32_t n = 0; n < core->ns_count; n++) {
		kvd_mirror_set_unreadable(&core->ns[n]->mirror, off);
		kvd_mirror_set_heartbeat(&core->ns[n]->mirror, core->now_ns);
	}
}

/* One quantum of everything that may take long; 1 while there is more. */
static int run_quantum(kvd_core_t *core)
{
	int more = kvd_leases_expire(core, core->now_ns);

	more |= kvd_handovers_run(core);
	more |= kvd_private_blocks_run(core);
	more |= kvd_dismantle_run(core);
	more |= kvd_withdrawals_run(core);
	more |= kvd_visibility_run(core);
	more |= kvd_rebalance_run(core);

	return more;
}

uint64_t kvd_core_tick(kvd_core_t *core)
{
	uint64_t start = kv_now_ns(core->env);
	uint32_t polled;
	int more;

	core->now_ns = start;
	write_heartbeats(core);
	polled = kvs_poll(core->tier[KVD_CPU], POLL_BATCH);
	if (core->tier[KVD_DISK]) {
		polled += kvs_poll(core->tier[KVD_DISK], POLL_BATCH);
	}
	if (core->disk_lost) {
		core->disk_lost = 0;
		kvd_durable_fail_lost(core);
	}
	for (uint32_t i = 0; (more = run_quantum(core)) != 0 && i < 64; i++) {
		if (kv_now_ns(core->env) - start > TICK_BUDGET_NS) {
			break;
		}
	}
	kvd_puts_run_tick(core);
	more |= kvd_handovers_announced_run(core); /* consumers learn in this tick of what it has published */
	if (core->tier[KVD_DISK]) {
		kvd_io_submit_reads(core);
		kvd_write_behind_run(core);
	}
	kvd_durable_run(core);
	if (core->tier[KVD_DISK]) {
		kvd_flush_run(core);
		(void)kvs_poll(core->tier[KVD_DISK], 0); /* start what was queued */
	}
	kvd_events_flush(core);
	if (start >= core->gauge_due_ns) {
		core->gauge_due_ns = start + KV_MIRROR_HEARTBEAT_NS;
		update_gauges(core);
	}

	more |= core->puts_left || kvd_handovers_are_due(core);

	if (more || polled >= POLL_BATCH) {
		return 0;
	}

	return core->memory_waits ? MEMORY_WAIT_NS : KV_MIRROR_HEARTBEAT_NS;
}

void kvd_core_shutdown(kvd_core_t *core)
{
	core->now_ns = kv_now_ns(core->env);
	for (uint32_t n = 0; n < core->ns_count; n++) {
		kvd_mirror_set_heartbeat(&core->ns[n]->mirror, 0);
	}
	for (uint32_t id = core->instance_list.head; id != KVD_NONE; id = kvd_instance_at(core, id)->of_core.next) {
		kvd_instance_rec_t *instance = kvd_instance_at(core, id);

		while (instance->leases.head != KVD_NONE) {
			kvd_lease_end(core, kvd_obj_at(&core->leases, instance->leases.head), KV_ERR_REVOKED);
		}
	}
	kvd_events_flush(core);
}

kv_status_t kvd_core_evict_one(kvd_core_t *core, kv_tier_t tier)
{
	kvd_set_t t = tier == KV_TIER_CPU ? KVD_CPU : KVD_DISK;
	kv_status_t status = KV_MISS;

	for (uint32_t c = 0; c < core->class_count && status == KV_MISS; c++) {
		status = kvd_make_room(core, c, t);
	}
	kvd_events_flush(core);

	return status;
}
