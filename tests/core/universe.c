#include "universe.h"

#include "kv/digest.h"

/* ---- the world ------------------------------------------------------------------------------- */

/* Is every block that DURABLE counts on disk, covered by a flush? */
static int promise_holds(const universe_t *u, uint64_t id, uint32_t n)
{
	const kvd_put_t *put = kvd_put_find(u->core, id);
	const kvd_index_t *ix = &u->core->ix;

	for (uint32_t i = 0; i < n; i++) {
		uint32_t pin = put->unchained ? put->entries[i].pin : put->pin;
		uint32_t block = ((const kvd_pin_t *)kvd_obj_at(&u->core->pins, pin))->block;

		block = put->unchained ? block : kvd_index_ancestor(ix, block, i + 1);
		if (!fake_is_synced(&u->disk, kvd_block_at(ix, block)->disk)) {
			return 0;
		}
	}

	return 1;
}

static void world_notify(void *ctx, kvd_member_t member, uint16_t code, const kv_msg_t *msg)
{
	universe_t *u = ctx;

	assert_true(u->notice_count < U_NOTICES);
	if (code == KV_CODE_DURABLE && msg->durable.n > 0) {
		assert_true(promise_holds(u, msg->durable.put, msg->durable.n));
	}
	u->notices[u->notice_count++] = (u_notice_t){member, code, *msg};
}

static kv_status_t world_note_reset(void *ctx, const kvs_epoch_t *epoch)
{
	(void)epoch;
	((universe_t *)ctx)->resets_noted++;

	return KV_OK;
}

static u_event_key_t *event_key(universe_t *u, uint32_t space, uint64_t hash)
{
	uint64_t at;

	if (u->event_count * 2 >= u->event_cap) {
		u_event_key_t *old = u->events;
		uint32_t old_cap = u->event_cap;

		u->event_cap = old_cap ? old_cap * 4 : 4096;
		u->events = calloc(u->event_cap, sizeof *u->events);
		u->event_count = 0;
		for (uint32_t i = 0; i < old_cap; i++) {
			if (old[i].space != 0) {
				*event_key(u, old[i].space, old[i].hash) = old[i];
			}
		}
		free(old);
	}
	at = (hash ^ space * UINT64_C(0x9e3779b97f4a7c15)) % u->event_cap;
	while (u->events[at].space != 0 && (u->events[at].hash != hash || u->events[at].space != space)) {
		at = (at + 1) % u->event_cap;
	}
	if (u->events[at].space == 0) {
		u->event_count++;
		u->events[at].space = space;
		u->events[at].hash = hash;
	}

	return &u->events[at];
}

static void world_publish(void *ctx, const kvd_event_t *event)
{
	universe_t *u = ctx;
	uint32_t space = 1u + event->space + (event->ns[0] == 'b' ? 1000u : 0u) + ((uint32_t)event->group << 16);

	assert_true(event->count > 0);
	if (u_alone(event->group) && event->type == KVD_EVENT_STORED && (event->count != 1 || event->has_parent)) {
		u->events_bad = "a block without parent was announced with one";
	}
	if (event->type == KVD_EVENT_STORED && event->has_parent && !(event_key(u, space, event->parent_hash)->media)) {
		u->events_bad = "stored below an unknown parent";
	}
	for (uint32_t i = 0; i < event->count; i++) {
		u_event_key_t *key = event_key(u, space, event->hashes[i]);
		int there = (key->media & event->medium) != 0;

		if (there == (event->type == KVD_EVENT_STORED)) {
			u->events_bad = there ? "stored twice" : "removed while absent";
		}
		if (event->tokens && event->medium == KV_TIER_DISK && (key->media & KV_TIER_CPU)) {
			u->events_bad = "a block that was written behind was announced with tokens";
		}
		key->media ^= (uint32_t)event->medium;
	}
	if (event->type == KVD_EVENT_STORED) {
		u->stored += event->count;
		u->stored_tokens += event->tokens ? (uint64_t)event->count * event->block_tokens : 0;
		u->last_has_parent = (uint32_t)event->has_parent;
		u->last_parent = event->parent_hash;
	} else {
		u->removed += event->count;
	}
}

static kv_status_t world_ledger_add(void *ctx, const kvd_grant_t *grant)
{
	assert_true(grant->id != 0 && grant->deepest_key &&
		    (grant->expiry_ns == 0) == (grant->header->kind == KV_LEASE_PUT));
	((universe_t *)ctx)->ledger_records++;

	return KV_OK;
}

static void world_ledger_remove(void *ctx, uint64_t id)
{
	(void)id;
	((universe_t *)ctx)->ledger_records--;
}

fake_tier_t *u_fake_of(universe_t *u, kv_slot_t slot, kv_slot_t *p_local)
{
	*p_local = kvs_loc_in_pool((kvs_loc_t){slot, 0}).slot;

	return kvs_memory_of_slab(kv_slot_slab(slot)) == 0 ? &u->cpu : &u->gpu;
}

uint64_t *u_bytes(universe_t *u, kv_slot_t slot)
{
	kvs_slab_info_t info;
	kv_slot_t local;
	fake_tier_t *fake = u_fake_of(u, slot, &local);

	if (!u->pool || fake == &u->gpu) {
		return fake_bytes(fake, local);
	}
	assert_int_equal(kvs_pool_slab(u->pool, kv_slot_slab(slot), &info), KV_OK);
	assert_true(kv_slot_index(slot) < info.slots);

	return (uint64_t *)(void *)((uint8_t *)info.base + (uint64_t)kv_slot_index(slot) * info.slot_bytes);
}

/* The digests that ranks would have staged: of the bytes in the slot. */
static kv_status_t pool_digests(universe_t *u, kvs_loc_t loc, const kvs_leaf_span_t *span)
{
	const uint8_t *data = (const uint8_t *)u_bytes(u, loc.slot);
	uint64_t values[4];
	kvs_slab_info_t info;

	assert_int_equal(kvs_pool_slab(u->pool, kv_slot_slab(loc.slot), &info), KV_OK);
	for (uint32_t h = 0; h < span->heads; h++) {
		for (uint32_t l = 0; l < span->count; l++) {
			size_t offset, len;

			kvs_leaf_range(&info.geometry, span->head + h, span->leaf + l, &offset, &len);
			values[h * span->count + l] = kv_digest(data + offset, len);
		}
	}

	return kvs_pool_set_leaves(u->pool, loc, span, values);
}

static kv_status_t world_set_leaves(void *ctx, kvs_loc_t loc, const kvs_leaf_span_t *span, const uint64_t *values)
{
	universe_t *u = ctx;
	kv_slot_t local;
	fake_tier_t *fake = u_fake_of(u, loc.slot, &local);

	assert_true(span->head + span->heads <= 2 && span->leaf + span->count <= 2 && span->heads > 0 &&
		    span->count > 0);
	u->digest_words += (uint64_t)span->heads * span->count;
	if (u->pool && fake == &u->cpu) {
		return pool_digests(u, loc, span);
	}
	for (uint32_t h = 0; h < span->heads; h++) {
		for (uint32_t l = 0; l < span->count; l++) {
			fake->slots[local].leaves[(span->head + h) * 2 + span->leaf + l] = values[h * span->count + l];
		}
	}

	return KV_OK;
}

static kv_status_t world_compute_roots(void *ctx, kvs_loc_t loc)
{
	universe_t *u = ctx;

	u->seals++;

	return u->pool && kvs_memory_of_slab(kv_slot_slab(loc.slot)) == 0 ? kvs_pool_compute_roots(u->pool, loc)
									  : KV_OK;
}

static kv_status_t world_staging(void *ctx, kvd_member_t member, uint64_t first, uint32_t words, uint64_t *out)
{
	(void)member;
	for (uint32_t i = 0; i < words; i++) {
		out[i] = first + i;
	}

	return ((universe_t *)ctx)->staging_status;
}

static void world_answer(void *ctx, kvd_member_t member, uint16_t code, uint64_t frame_id, kv_status_t status,
			 const kv_msg_t *reply)
{
	universe_t *u = ctx;

	(void)member;
	(void)frame_id;
	assert_true(code == KV_CODE_SPACE_RESET || code == KV_CODE_WITHDRAW);
	u->withdrawn = code == KV_CODE_WITHDRAW ? reply->withdraw_reply.withdrawn : u->withdrawn;
	u->answers++;
	u->answer_status = status;
}

static kvd_core_config_t make_config(const u_config_t *config)
{
	return (kvd_core_config_t){
		.incarnation = 77,
		.max_index_blocks = config->max_blocks ? config->max_blocks : 4096,
		.max_spaces = config->max_spaces ? config->max_spaces : 64,
		.max_instances = U_INSTANCES,
		.max_members = 96,
		.max_leases = 512,
		.max_pinned_bytes = UINT64_C(1) << 40,
		.max_unfinished_bytes = UINT64_C(1) << 40,
		.lease_ttl_ns = UINT64_C(10000000000),
		.put_ttl_ns = UINT64_C(10000000000),
		.max_handovers = 64,
		.handover_ttl_ns = U_HANDOVER_TTL_NS,
		.handover_min_ttl_ns = U_HANDOVER_MIN_TTL_NS,
		.write_behind_depth = 8,
		.read_depth = 8,
		.write_behind = 1,
		.policy = config->policy,
		.admission = config->admission,
	};
}

static uint64_t seed_of(const u_config_t *config)
{
	return config->seed ? config->seed : kv_test_seed();
}

void universe_init(universe_t *u, const u_config_t *config, const fake_tier_t *disk)
{
	kvd_world_t world = {.ctx = u,
			     .metrics = &u->metrics,
			     .notify = world_notify,
			     .publish = world_publish,
			     .ledger_add = world_ledger_add,
			     .ledger_remove = world_ledger_remove,
			     .set_leaves = world_set_leaves,
			     .compute_roots = world_compute_roots};
	kvd_parts_t parts;
	uint32_t memory;

	memset(u, 0, sizeof *u);
	kv_test_env_init(&u->env);
	u->rng.state = seed_of(config);
	u->env.rng.state = seed_of(config) + 1;
	u->block_bytes = 4096;
	u->group_count = U_GROUPS;
	if (config->pool.limit_bytes > 0) {
		kvs_pool_config_t pool = config->pool;

		pool.incarnation = 77;
		pool.metrics = &u->metrics;
		assert_int_equal(kvs_pool_open(&pool, &u->env.env, &u->pool), KV_OK);
	}
	fake_tier_init(&u->cpu, 0, config->cpu_slots, seed_of(config) + 2);
	if (config->gpu && config->gpu->cap > 0) {
		u->gpu = *config->gpu;
		*config->gpu = (fake_tier_t){0};
	} else {
		fake_tier_init(&u->gpu, 0, config->gpu_slots, seed_of(config) + 4);
	}
	u->kept_gpu = config->gpu;
	u->gpu.device = 1;
	u->has_disk = disk || config->disk_slots > 0;
	if (disk) {
		u->disk = *disk;
	} else if (u->has_disk) {
		fake_tier_init(&u->disk, 1, config->disk_slots, seed_of(config) + 3);
		u->disk.file_slots = config->disk_file_slots;
	}
	u->disk.whole = u->pool != NULL;
	u->config = make_config(config);
	world.env = u->env.env;
	assert_int_equal(kvs_memories_open(u->pool ? u->pool : &u->cpu.tier, &u->env.env, &u->memories), KV_OK);
	world.cpu = u->memories;
	world.disk = u->has_disk && !config->disk_off ? &u->disk.tier : NULL;
	world.note_reset = config->disk_off ? world_note_reset : NULL;
	assert_int_equal(kvd_core_create(&u->config, &world, &u->core), KV_OK);
	if (config->gpu_slots > 0) {
		assert_int_equal(kvd_core_add_memory(u->core, &u->gpu.tier, &memory), KV_OK);
		assert_int_equal(memory, 1);
	}
	kvd_core_set_staging(u->core, world_staging, u);
	kvd_core_set_answer(u->core, world_answer, u);
	for (uint32_t i = 0; i < 2; i++) {
		u->mirror[i] = aligned_alloc(4096, kvd_mirror_bytes(&u->config));
		memset(u->mirror[i], 0, kvd_mirror_bytes(&u->config));
		assert_int_equal(kvd_namespace_add(u->core, i ? "b" : "a", u->mirror[i], &u->ns[i]), KV_OK);
		for (uint32_t what = 0; what < KVD_SHARES; what++) { /* a test without shares has no limits */
			parts.given[what] = config->share[i][what] ? config->share[i][what] : UINT64_MAX / 4;
			parts.max[what] = config->max[i][what];
		}
		assert_int_equal(kvd_namespace_share(u->core, u->ns[i], &parts), KV_OK);
	}
	assert_int_equal(kvd_core_recover(u->core), KV_OK);
	if (config->gpu_slots > 0) {
		kv_test_fail_nth(&u->env, config->fail_adopt);
		kvd_core_adopt(u->core, 1);
	}
}

static void world_end(universe_t *u)
{
	free(u->mirror[0]);
	free(u->mirror[1]);
	free(u->events);
	for (uint32_t i = 0; i < U_INSTANCES; i++) {
		free(u->areas[i].area);
	}
	fake_tier_fini(&u->cpu);
	fake_tier_fini(&u->gpu);
}

void universe_fini(universe_t *u)
{
	kvd_core_destroy(u->core);
	if (u->has_disk) {
		kvs_close(&u->disk.tier);
		fake_tier_fini(&u->disk);
	}
	kvs_close(u->memories);
	if (u->pool) {
		kvs_close(u->pool);
	}
	assert_int_equal(kv_test_env_live(&u->env), 0);
	world_end(u);
}

void universe_kill(universe_t *u, fake_tier_t *p_disk)
{
	kvd_core_destroy(u->core);
	kvs_close(&u->disk.tier);
	kvs_close(u->memories);
	assert_int_equal(kv_test_env_live(&u->env), 0);
	fake_disk_restart(&u->disk);
	*p_disk = u->disk;
	if (u->kept_gpu && u->gpu.cap > 0) {
		kvs_close(&u->gpu.tier);
		fake_disk_restart(&u->gpu); /* all writers have died */
		*u->kept_gpu = u->gpu;
		u->gpu = (fake_tier_t){0};
	}
	world_end(u);
}

/* ---- members and spaces ---------------------------------------------------------------------- */

u_member_t *u_join(universe_t *u, uint32_t ns, const char *instance, uint32_t role, uint32_t rank)
{
	uint8_t secret[16] = "0123456789abcde";
	kvd_join_t join = {
		.ns = u->ns[ns], .instance = instance, .secret = secret, .secret_len = 16, .role = role, .rank = rank};
	u_member_t *member = NULL;
	kvd_instance_t id;
	uint32_t place = 0;

	assert_int_equal(kvd_instance_find(u->core, &join, &id), KV_OK);
	while (place < U_INSTANCES && (id ? u->areas[place].id != id : u->areas[place].id != 0)) {
		place++;
	}
	assert_true(place < U_INSTANCES);
	if (!id) {
		free(u->areas[place].area);
		u->areas[place].area = aligned_alloc(4096, U_LEASE_BYTES);
		memset(u->areas[place].area, 0, U_LEASE_BYTES);
		assert_int_equal(kvd_instance_create(u->core, &join, u->areas[place].area, U_LEASE_BYTES, &id), KV_OK);
		u->areas[place].id = id;
	}
	for (uint32_t i = 0; i < U_MEMBERS && !member; i++) {
		member = u->members[i].id == 0 ? &u->members[i] : NULL;
	}
	assert_non_null(member);
	*member = (u_member_t){.instance = id, .area = u->areas[place].area, .ns = ns, .role = role, .rank = rank};
	assert_int_equal(kvd_member_add(u->core, id, &join, &member->id), KV_OK);

	return member;
}

/* Instances that have ended, with all that were their members. */
static void reap(universe_t *u)
{
	kvd_instance_t ended[4];
	uint32_t n;

	do {
		n = kvd_instances_reap(u->core, ended, KV_COUNT_OF(ended));
		for (uint32_t i = 0; i < n; i++) {
			for (uint32_t a = 0; a < U_INSTANCES; a++) {
				u->areas[a].id = u->areas[a].id == ended[i] ? 0 : u->areas[a].id;
			}
			for (uint32_t m = 0; m < U_MEMBERS; m++) {
				u->members[m].id = u->members[m].instance == ended[i] ? 0 : u->members[m].id;
			}
		}
	} while (n > 0);
}

void u_closed(universe_t *u, u_member_t *member)
{
	member->closed = 1;
	kvd_member_closed(u->core, member->id);
	reap(u);
}

void u_dead(universe_t *u, u_member_t *member)
{
	kvd_member_gone(u->core, member->id, 1);
	member->id = 0;
	reap(u);
}

void u_left(universe_t *u, u_member_t *member)
{
	kvd_member_gone(u->core, member->id, 0);
	member->id = 0;
	reap(u);
}

const kv_group_t u_groups[U_GROUPS] = {{.id = 0, .rule = KV_RULE_FULL, .block_tokens = 16},
				       {.id = 1, .rule = KV_RULE_WINDOW, .block_tokens = 16, .window = 63},
				       {.id = 2, .rule = KV_RULE_STATE, .block_tokens = 32},
				       {.id = 5, .rule = KV_RULE_FULL, .block_tokens = 16}};

kv_status_t u_open(universe_t *u, uint32_t ns, const u_member_t *m, const char *name, int known,
		   kvd_space_info_t *p_info)
{
	kvs_geometry_t geometries[U_GROUPS];
	kvd_space_open_t ask = {.ns = u->ns[ns],
				.member = m ? m->id : 0,
				.known = known,
				.identity = name,
				.identity_len = (uint32_t)strlen(name),
				.hash_tokens = 16,
				.groups = u_groups,
				.group_count = u->group_count,
				.geometries = geometries,
				.layout = "layout",
				.memory = u->memory};

	for (uint32_t g = 0; g < u->group_count; g++) {
		const uint32_t bytes = u->block_bytes << (u->uneven ? g % 2 : 0);

		geometries[g] = (kvs_geometry_t){.block_bytes = bytes,
						 .heads = 2,
						 .leaves = 2,
						 .leaf_bytes = bytes / 4,
						 .page_bytes = bytes / 4};
	}
	memcpy(ask.root, name, strlen(name) < 31 ? strlen(name) : 31);
	ask.root[31] = (uint8_t)ns;

	return kvd_space_open(u->core, &ask, p_info);
}

kvd_space_info_t u_space(universe_t *u, uint32_t ns, const char *name)
{
	kvd_space_info_t info;

	assert_int_equal(u_open(u, ns, NULL, name, 0, &info), KV_OK);

	return info;
}

kv_status_t u_close(universe_t *u, u_member_t *m, const kvd_space_info_t *space)
{
	kv_msg_t ask = {.space_close = {.space = space->space}}, reply;

	return u_request(u, m, KV_CODE_SPACE_CLOSE, &ask, &reply);
}

void u_chain(const kv_key_t *parent, uint64_t label, kv_key_t *keys, uint32_t n)
{
	kv_test_rng_t rng = {.state = label};

	for (uint32_t i = 0; i < n; i++) {
		const kv_key_t *above = i > 0 ? &keys[i - 1] : parent;
		uint64_t words[2];

		rng.state ^= above ? kv_key_hash(above) : 0;
		words[0] = kv_test_rand(&rng);
		words[1] = kv_test_rand(&rng) | 1;
		rng.state = label;
		memcpy(keys[i].b, words, sizeof words);
	}
}

/* ---- requests -------------------------------------------------------------------------------- */

kv_status_t u_request(universe_t *u, u_member_t *member, uint16_t code, const kv_msg_t *ask, kv_msg_t *reply)
{
	const kvd_member_rec_t *rec = member ? kvd_member_find(u->core, member->id) : NULL;
	uint32_t ns = rec ? kvd_instance_at(u->core, rec->instance)->ns : u->ns[0];
	kv_status_t status;

	memset(reply, 0, sizeof *reply);
	status = kvd_core_request(
		u->core,
		&(kvd_ask_t){.ns = ns, .member = member ? member->id : 0, .code = code, .frame_id = 1, .msg = ask},
		reply, &u->detail);
	assert_true(status != KV_ERR_BUSY || u->detail); /* what is awaited is said */

	return status;
}

kv_status_t u_withdraw(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *keys, uint32_t n)
{
	kv_msg_t reply, ask = {.withdraw = {.space = space->space,
					    .epoch = space->epoch,
					    .group = u->group,
					    .keys = {(const uint8_t *)keys, n * KV_KEY_BYTES}}};

	return u_request(u, m, KV_CODE_WITHDRAW, &ask, &reply);
}

static uint32_t ladder_make(const kv_key_t *keys, uint32_t n, kv_key_t *ladder)
{
	uint32_t count = 0, depth = n;

	for (uint32_t back = 0;; back = back ? back * 2 : 1) {
		depth = back < n ? n - back : 1;
		ladder[count++] = keys[depth - 1];
		if (depth == 1) {
			return count;
		}
	}
}

kv_status_t u_acquire(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *keys, uint32_t n,
		      uint32_t skip, u_lease_t *lease, kv_msg_acquire_reply_t *reply)
{
	kv_key_t ladder[KV_MAX_LADDER];
	kv_msg_t ask = {.acquire = {.space = space->space,
				    .epoch = space->epoch,
				    .group = u->group,
				    .skip = skip,
				    .n = n}},
		 answer;
	kv_status_t status;

	if (u_alone(u->group)) {
		ask.acquire.ladder = (kv_slice_t){(const uint8_t *)&keys[skip], (n - skip) * KV_KEY_BYTES};
	} else {
		ask.acquire.ladder = (kv_slice_t){(const uint8_t *)ladder, ladder_make(keys, n, ladder) * KV_KEY_BYTES};
	}
	status = u_request(u, m, KV_CODE_ACQUIRE, &ask, &answer);
	*reply = answer.acquire_reply;
	if (status == KV_OK && lease) {
		*lease = (u_lease_t){.id = reply->lease,
				     .member = m,
				     .offset = reply->offset,
				     .n = reply->n,
				     .skip = skip,
				     .group = u->group};
		assert_true(reply->n <= n && n <= 512);
		memcpy(lease->keys, keys, n * sizeof *keys);
	}

	return status;
}

kv_status_t u_release(universe_t *u, u_member_t *m, uint64_t lease)
{
	kv_msg_t ask = {.release = {.leases = {(const uint8_t *)&lease, sizeof lease}}}, reply;
	kv_status_t status = u_request(u, m, KV_CODE_RELEASE, &ask, &reply);

	return status == KV_OK && reply.release_reply.released == 0 ? KV_ERR_NOT_FOUND : status;
}

kv_status_t u_bad_block(universe_t *u, u_member_t *m, uint64_t lease, uint32_t index)
{
	kv_msg_t ask = {.bad_block = {.lease = lease, .index = index}};

	return u_request(u, m, KV_CODE_BAD_BLOCK, &ask, &u->reply);
}

kv_status_t u_renew(universe_t *u, u_member_t *m, uint64_t lease)
{
	kv_msg_t ask = {.renew = {.lease = lease}};

	return u_request(u, m, KV_CODE_RENEW, &ask, &u->reply);
}

kv_status_t u_reset(universe_t *u, u_member_t *m, const kvd_space_info_t *space)
{
	kv_msg_t ask = {.space_reset = {.space = space->space, .epoch = space->epoch}};

	return u_request(u, m, KV_CODE_SPACE_RESET, &ask, &u->reply);
}

void u_evict(universe_t *u, kv_tier_t tier, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		assert_int_equal(kvd_core_evict_one(u->core, tier), KV_OK);
	}
}

void u_evict_all(universe_t *u, kv_tier_t tier)
{
	while (kvd_core_evict_one(u->core, tier) == KV_OK) {
	}
}

kv_status_t u_put_start(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *keys,
			uint32_t first, uint32_t n, uint32_t flags, u_put_t *put, kv_msg_put_start_reply_t *reply)
{
	kv_msg_t ask = {.put_start = {.space = space->space,
				      .epoch = space->epoch,
				      .group = u->group,
				      .flags = flags,
				      .depth = first}},
		 answer;
	kv_status_t status;

	if (first > 0) {
		ask.put_start.parent = keys[first - 1];
	}
	ask.put_start.keys = (kv_slice_t){(const uint8_t *)&keys[first], (n - first) * KV_KEY_BYTES};
	status = u_request(u, m, KV_CODE_PUT_START, &ask, &answer);
	*reply = answer.put_start_reply;
	if (status == KV_OK) {
		assert_true(n - first <= 512);
		*put = (u_put_t){.id = reply->put,
				 .member = m,
				 .offset = reply->offset,
				 .n = reply->n,
				 .first = first,
				 .group = u->group};
		memcpy(put->keys, &keys[first], (n - first) * sizeof *keys);
	}

	return status;
}

kv_lease_header_t *u_header(const u_member_t *member, uint64_t offset)
{
	return (kv_lease_header_t *)(void *)(member->area + offset);
}

void u_put_write(universe_t *u, const u_put_t *put)
{
	const uint32_t *slots = kv_lease_slots(u_header(put->member, put->offset));

	for (uint32_t i = 0; i < put->n && put->id; i++) {
		if (slots[i] != KV_SLOT_NONE) {
			*u_bytes(u, slots[i]) = u_word(&put->keys[i], put->group);
		}
	}
}

kv_status_t u_put_end(universe_t *u, u_member_t *m, const u_put_t *put, uint32_t first, uint32_t count)
{
	const uint32_t *slots = kv_lease_slots(u_header(put->member, put->offset));
	kv_msg_t ask = {.put_end = {.put = put->id, .first = first, .count = count, .staging = 5}}, reply;

	for (uint32_t i = first; i < first + count; i++) {
		ask.put_end.words += i < put->n && slots[i] != KV_SLOT_NONE ? 4 : 0;
	}

	return u_request(u, m, KV_CODE_PUT_END, &ask, &reply);
}

kv_status_t u_put_revoke(universe_t *u, u_member_t *m, uint64_t put)
{
	kv_msg_t ask = {.put_revoke = {.put = put}}, reply;

	return u_request(u, m, KV_CODE_PUT_REVOKE, &ask, &reply);
}

kv_status_t u_quiet(universe_t *u, u_member_t *m, uint32_t what, uint64_t id, uint32_t *p_freed)
{
	kv_msg_t ask = {.drained = {.what = what, .id = id}}, reply;
	kv_status_t status = u_request(u, m, KV_CODE_DRAINED, &ask, &reply);

	*p_freed = reply.drained_reply.freed;

	return status;
}

static uint32_t put_all_of(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *keys,
			   uint32_t first, uint32_t n, uint32_t flags)
{
	kv_msg_put_start_reply_t reply;
	static u_put_t put;

	reply.already = 0;
	if (u_put_start(u, m, space, keys, first, n, flags, &put, &reply) != KV_OK || reply.put == 0) {
		return reply.already;
	}
	u_put_write(u, &put);
	if (u_put_end(u, m, &put, 0, put.n) != KV_OK) {
		fail_msg("put end failed");
	}

	return put.n;
}

uint32_t u_put(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *keys, uint32_t first,
	       uint32_t n)
{
	return put_all_of(u, m, space, keys, first, n, 0);
}

uint32_t u_put_optional(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *keys,
			uint32_t first, uint32_t n)
{
	return put_all_of(u, m, space, keys, first, n, KV_PUT_OPTIONAL);
}

uint32_t u_put_private(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const kv_key_t *key)
{
	return put_all_of(u, m, space, key, 0, 1, KV_PUT_PRIVATE);
}

/* A part of n units: the key of its last block, or those of a window. */
static void add_part(const u_send_t *send, uint32_t g, uint32_t part[3], kv_key_t *keys, uint32_t *p_keys)
{
	uint32_t n = send->n * 16 / u_groups[g].block_tokens, count = send->ahead ? n - send->from : 1;

	if (u_groups[g].rule == KV_RULE_WINDOW) {
		count = n < 4 ? n : 4;
	}
	memcpy(part, (uint32_t[3]){u_groups[g].id, n, count}, 3 * sizeof *part);
	memcpy(&keys[*p_keys], &send->keys[n - count], count * sizeof *keys);
	*p_keys += count;
}

kv_status_t u_send(universe_t *u, u_member_t *m, const u_send_t *send, kv_msg_handover_send_reply_t *reply)
{
	uint32_t parts[U_GROUPS][3], count = 0, key_count = 0;
	static kv_key_t keys[512];
	kv_msg_t ask = {.handover_send = {.transfer = kv_slice_str(send->transfer),
					  .number = send->number,
					  .space = send->space->space,
					  .epoch = send->space->epoch,
					  .partial = send->partial,
					  .private_key = send->private_key,
					  .flags = (send->last ? KV_HANDOVER_LAST : 0u) |
						   (send->await_room ? KV_HANDOVER_AWAIT_ROOM : 0u) |
						   (send->ahead ? KV_HANDOVER_AHEAD : 0u),
					  .ttl_ms = send->ttl_ms,
					  .tail = {(const uint8_t *)send->tail, send->tail_len}}},
		 answer;
	kv_status_t status;

	for (uint32_t g = 0; g < U_GROUPS && send->n > 0; g++) {
		if (send->groups & 1u << g) {
			add_part(send, g, parts[count++], keys, &key_count);
		}
	}
	ask.handover_send.parts = (kv_slice_t){(const uint8_t *)parts, count * (uint32_t)sizeof parts[0]};
	ask.handover_send.keys = (kv_slice_t){(const uint8_t *)keys, key_count * KV_KEY_BYTES};
	status = u_request(u, m, KV_CODE_HANDOVER_SEND, &ask, &answer);
	*reply = status == KV_OK ? answer.handover_send_reply : *reply;

	return status;
}

kv_status_t u_recv(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const char *transfer,
		   uint32_t timeout_ms, kv_msg_handover_recv_reply_t *reply)
{
	kv_msg_t ask = {.handover_recv = {.transfer = kv_slice_str(transfer),
					  .space = space->space,
					  .epoch = space->epoch,
					  .timeout_ms = timeout_ms}},
		 answer;
	kv_status_t status = u_request(u, m, KV_CODE_HANDOVER_RECV, &ask, &answer);

	*reply = status == KV_OK ? answer.handover_recv_reply : *reply;

	return status;
}

kv_status_t u_done(universe_t *u, u_member_t *m, uint64_t number, uint32_t flags)
{
	kv_msg_t ask = {.handover_done = {.number = number, .flags = flags}}, reply;

	return u_request(u, m, KV_CODE_HANDOVER_DONE, &ask, &reply);
}

uint32_t u_explain(universe_t *u, uint32_t ns, const kvd_space_info_t *space, const kv_key_t *keys, uint32_t n,
		   uint8_t *tiers)
{
	kv_msg_t ask = {.explain = {.space = space->space,
				    .epoch = space->epoch,
				    .group = u->group,
				    .keys = {(const uint8_t *)keys, n * KV_KEY_BYTES}}},
		 reply;

	assert_int_equal(
		kvd_core_request(u->core,
				 &(kvd_ask_t){.ns = u->ns[ns], .code = KV_CODE_EXPLAIN, .frame_id = 1, .msg = &ask},
				 &reply, NULL),
		KV_OK);
	memcpy(tiers, reply.explain_reply.tiers.data, n);

	return reply.explain_reply.why;
}

uint32_t u_visible(universe_t *u, uint32_t ns, const kvd_space_info_t *space, const kv_key_t *keys, uint32_t n)
{
	uint8_t tiers[4096];
	uint32_t visible = 0;

	u_explain(u, ns, space, keys, n, tiers);
	while (visible < n && (tiers[visible] & 0x3f) != 0 && !(tiers[visible] & KV_TIER_UNREADABLE)) {
		visible++;
	}

	return visible;
}
