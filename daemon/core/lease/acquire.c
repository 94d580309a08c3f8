/* ACQUIRE of a group without parents: a window's blocks or a state, every block pinned by itself, all of them or
 * none. */
#include "core/core_impl.h"

/* Let go of every block. */
void kvd_lease_unclaim(kvd_core_t *core, kvd_lease_t *lease)
{
	kvd_lease_unhold(core, lease, lease->skip);
	while (lease->claim_count > 0) {
		kvd_claim_drop(core, lease->claims[--lease->claim_count]);
	}
	if (lease->claims != &lease->claim) {
		kv_free(core->env, lease->claims);
	}
	lease->claims = NULL;
}

static kv_key_t key_at(const kv_msg_acquire_t *ask, uint32_t i)
{
	kv_key_t key;

	memcpy(&key, ask->ladder.data + (size_t)i * KV_KEY_BYTES, sizeof key);

	return key;
}

/* A claim on each of the blocks. KV_MISS: reply->why says how the first one that is missing went. */
static kv_status_t claims_take(kvd_core_t *core, const kvd_space_t *space, kvd_lease_t *lease,
			       const kv_msg_acquire_t *ask, kv_msg_acquire_reply_t *reply)
{
	for (uint32_t i = 0; i < ask->n - ask->skip; i++) {
		kv_key_t key = key_at(ask, i);
		uint32_t id = kvd_index_find(&core->ix, space->tree, &key, (uint8_t)ask->group);
		kv_status_t status;

		if (id == KVD_NONE) {
			reply->why = kvd_why_missing(core, space->tree, &key, (uint8_t)ask->group);
			return KV_MISS;
		}
		if (kvd_index_depth_pinned(&core->ix, id) == 0 &&
		    kvd_pin_room(core, space->ns, space->slot_class) == 0) {
			kvd_count(core, KV_M_SHARE_FULL, 1);
			kvd_count_ns(core, space->ns, KV_NM_SHARE_FULL, 1);
			return KV_ERR_BUSY;
		}
		status = kvd_claim_take(core, id, KVD_CLAIM_LEASE, lease->id, &lease->claims[i]);
		if (status != KV_OK) {
			return status;
		}
		lease->claim_count++;
	}

	return KV_OK;
}

/* Hold all blocks and start to read those that are only on disk. KV_ERR_BUSY: no room for one of them. */
static kv_status_t fills_start(kvd_core_t *core, kvd_lease_t *lease, kv_msg_acquire_reply_t *reply)
{
	lease->hold_from = lease->skip;
	lease->ready = lease->skip;
	for (uint32_t depth = lease->skip + 1; depth <= lease->n; depth++) {
		kvd_hold(core, kvd_lease_block(core, lease, depth));
	}
	for (uint32_t depth = lease->skip + 1; depth <= lease->n; depth++) {
		uint32_t id = kvd_lease_block(core, lease, depth);
		const kvd_block_t *block = kvd_block_at(&core->ix, id);

		reply->n_disk += kvd_in_set(&core->ix, block, KVD_CPU) ? 0 : 1;
		if (*kvd_slot_of(&core->ix, block) == KV_SLOT_NONE) {
			kv_status_t status = kvd_fill_start(core, id, lease->id, lease->stamp);

			if (status != KV_OK) {
				return status;
			}
		}
	}
	kvd_lease_settle(core, lease);

	return KV_OK;
}

static kv_status_t blocks_take(kvd_core_t *core, const kvd_space_t *space, kvd_lease_t *lease,
			       const kv_msg_acquire_t *ask, kv_msg_acquire_reply_t *reply)
{
	uint32_t on_disk = 0;
	kv_status_t status;

	lease->claims = lease->n - lease->skip == 1
				? &lease->claim
				: kv_alloc(core->env, (size_t)(lease->n - lease->skip) * sizeof *lease->claims);
	if (!lease->claims) {
		return KV_ERR_NOMEM;
	}
	status = claims_take(core, space, lease, ask, reply);
	if (status != KV_OK) {
		return status;
	}
	for (uint32_t depth = lease->skip + 1; depth <= lease->n; depth++) {
		uint32_t id = kvd_lease_block(core, lease, depth);

		kvd_touch(core, id);
		on_disk += kvd_in_set(&core->ix, kvd_block_at(&core->ix, id), KVD_CPU) ? 0 : 1;
	}
	if (on_disk > 0) {
		status = fills_start(core, lease, reply);
	}

	return status == KV_OK ? kvd_lease_publish(core, space, lease, (uint8_t)ask->group, reply) : status;
}

kv_status_t kvd_acquire_alone(kvd_core_t *core, const kvd_space_t *space, const kvd_member_rec_t *member,
			      const kv_msg_acquire_t *ask, kv_msg_acquire_reply_t *reply)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, member->instance);
	kvd_lease_t draft = {.instance = member->instance,
			     .member = member->id,
			     .alone = 1,
			     .n = ask->n,
			     .skip = ask->skip,
			     .ready = ask->n,
			     .hold_from = ask->n,
			     .stamp = core->stamp,
			     .expiry_ns = kvd_lease_expiry(core, ask->ttl_ms)};
	kvd_lease_t *lease;
	kv_status_t status;

	if (ask->skip >= ask->n || ask->ladder.len / KV_KEY_BYTES != ask->n - ask->skip) {
		return KV_ERR_ARG;
	}
	draft.bytes = (ask->n - ask->skip) * core->classes[space->slot_class].slot_bytes;
	if (draft.bytes > kvd_lease_room(core, instance)) {
		return KV_ERR_BUSY;
	}
	status = kvd_lease_create(core, instance, &draft, &lease);
	if (status != KV_OK) {
		return status;
	}
	status = blocks_take(core, space, lease, ask, reply);
	if (status != KV_OK) {
		kvd_lease_close(core, lease);
		reply->n_disk = 0;
		return status == KV_MISS ? KV_OK : status;
	}
	reply->n = ask->n;

	return KV_OK;
}
