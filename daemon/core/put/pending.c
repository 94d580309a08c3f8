/* Which keys are being written, by which puts, and which puts wait for one of them. */
#include "core/base/core_impl.h"
#include "core/put/pending.h"
#include "core/put/put_impl.h"

static uint32_t *bucket_of(kvd_core_t *core, const kv_key_t *key)
{
	return &core->pending_heads[(kv_key_hash(key) ^ core->ix.seed[0] >> 32) % KVD_PENDING_HEADS];
}

static kvd_pending_t *pending_at(kvd_core_t *core, uint32_t id)
{
	return kvd_obj_at(&core->pendings, id);
}

static kvd_put_t *put_at(kvd_core_t *core, uint32_t id)
{
	return kvd_obj_at(&core->puts, id);
}

static uint32_t find_pending(kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint32_t group)
{
	uint32_t id = *bucket_of(core, key);

	while (id != KVD_NONE) {
		const kvd_pending_t *pending = pending_at(core, id);

		if (pending->tree == tree && pending->group == group && kv_key_equal(&pending->key, key)) {
			break;
		}
		id = pending->next;
	}

	return id;
}

static void free_pending(kvd_core_t *core, uint32_t id)
{
	uint32_t *link = bucket_of(core, &pending_at(core, id)->key);

	while (*link != id) {
		link = &pending_at(core, *link)->next;
	}
	*link = pending_at(core, id)->next;
	kvd_obj_pool_put(&core->pendings, id);
}

kv_status_t kvd_pending_add(kvd_core_t *core, kvd_put_t *put, uint32_t index)
{
	kvd_entry_t *entry = &put->entries[index];
	uint32_t id = find_pending(core, put->tree, &entry->key, put->group);
	kvd_pending_t *pending;

	if (id == KVD_NONE) {
		uint32_t *head = bucket_of(core, &entry->key);
		kv_status_t status = kvd_obj_pool_get(&core->pendings, &id);

		if (status != KV_OK) {
			return status;
		}
		*pending_at(core, id) = (kvd_pending_t){.tree = put->tree,
							.key = entry->key,
							.group = put->group,
							.copies.put = KVD_NONE,
							.waiters = KVD_LIST_EMPTY,
							.next = *head};
		*head = id;
	}
	/* In front: a key that one PUT_START names twice finds its own copy first (kvd_pending_is_own()). */
	pending = pending_at(core, id);
	entry->pending = id;
	entry->next = pending->copies;
	pending->copies = (kvd_copy_t){.put = put->self, .index = index};

	return KV_OK;
}

void kvd_pending_unwait(kvd_core_t *core, kvd_put_t *put)
{
	if (put->wait_pending != KVD_NONE) {
		kvd_list_remove(&pending_at(core, put->wait_pending)->waiters, &core->puts,
				offsetof(kvd_put_t, of_pending), put->self);
		put->wait_pending = KVD_NONE;
	}
}

/* Each waiting put looks again, and waits anew if it must. */
static void wake_waiters(kvd_core_t *core, kvd_pending_t *pending, uint32_t withdrawn)
{
	while (pending->waiters.head != KVD_NONE) {
		kvd_put_t *put = put_at(core, pending->waiters.head);

		/* A put below a withdrawn one was computed from its block, and others may wait for its keys in turn: the
		 * mark goes on from put to put. */
		kvd_pending_unwait(core, put);
		put->withdrawn |= withdrawn;
		kvd_put_queue(core, put);
	}
}

void kvd_pending_remove(kvd_core_t *core, kvd_put_t *put, uint32_t index)
{
	kvd_entry_t *entry = &put->entries[index];
	uint32_t id = entry->pending;
	kvd_pending_t *pending;
	kvd_copy_t *link;

	if (id == KVD_NONE) {
		return;
	}
	pending = pending_at(core, id);
	link = &pending->copies;
	while (link->put != put->self || link->index != index) {
		link = &put_at(core, link->put)->entries[link->index].next;
	}
	*link = entry->next;
	entry->pending = KVD_NONE;
	if (pending->copies.put == KVD_NONE) {
		wake_waiters(core, pending, put->withdrawn);
		free_pending(core, id);
	}
}

int kvd_pending_wait(kvd_core_t *core, kvd_put_t *put)
{
	uint32_t id = find_pending(core, put->tree, &put->parent, put->group);

	if (id == KVD_NONE) {
		return 0;
	}
	if (put->wait_pending == KVD_NONE) {
		put->wait_pending = id;
		kvd_list_push_front(&pending_at(core, id)->waiters, &core->puts, offsetof(kvd_put_t, of_pending),
				    put->self);
	}

	return 1;
}

int kvd_pending_is_own(kvd_core_t *core, const kvd_put_t *put, const kv_key_t *key)
{
	uint32_t id = find_pending(core, put->tree, key, put->group);

	return id != KVD_NONE && pending_at(core, id)->copies.put == put->self;
}

int kvd_pending_has_instance(kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint32_t group, uint32_t instance)
{
	uint32_t id = find_pending(core, tree, key, group);
	kvd_copy_t copy;

	if (id == KVD_NONE) {
		return 0;
	}
	for (copy = pending_at(core, id)->copies; copy.put != KVD_NONE;
	     copy = put_at(core, copy.put)->entries[copy.index].next) {
		if (put_at(core, copy.put)->instance == instance) {
			return 1;
		}
	}

	return 0;
}

int kvd_pending_has_key(kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint32_t group)
{
	return find_pending(core, tree, key, group) != KVD_NONE;
}

uint32_t kvd_pending_first(kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint32_t group)
{
	uint32_t id = find_pending(core, tree, key, group);

	return id == KVD_NONE ? KVD_NONE : pending_at(core, id)->copies.put;
}

void kvd_pending_wake(kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint32_t group)
{
	uint32_t id = find_pending(core, tree, key, group);

	if (id != KVD_NONE) {
		wake_waiters(core, pending_at(core, id), 0);
	}
}
