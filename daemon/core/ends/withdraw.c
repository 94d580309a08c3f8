#include "core/block/events.h"
#include "core/block/quarantine.h"
#include "core/ends/withdraw.h"
#include "core/base/core_impl.h"
#include "core/put/put.h"
#include "core/base/find.h"

#define MAX_PENDING  64u
#define QUANTUM_KEYS 16u

typedef struct kvd_withdrawal {
	struct kvd_withdrawal *next;
	kvd_core_t *core;
	kvd_member_t member;
	uint64_t frame_id;
	uint64_t epoch;
	uint64_t before; /* core->withdrawn when it began */
	uint32_t ns, space;
	uint32_t n, hidden; /* keys, and how many are done */
	uint32_t blocks;    /* that went with them */
	uint8_t group;
	kv_key_t keys[];
} kvd_withdrawal_t;

static size_t bytes_of(uint32_t n)
{
	return sizeof(kvd_withdrawal_t) + (size_t)n * sizeof(kv_key_t);
}

kv_status_t kvd_withdraw(kvd_core_t *core, const kvd_ask_t *ask)
{
	const kv_msg_withdraw_t *msg = &ask->msg->withdraw;
	kvd_withdrawal_t *withdrawal, **link = &core->withdrawals;
	kvd_member_rec_t *member;
	kvd_instance_rec_t *instance;
	const kv_group_t *group;
	kvd_space_t *space;
	kv_status_t status = kvd_member_check(core, ask->ns, ask->member, &member, &instance);

	status = status == KV_OK ? kvd_space_find(core, ask->ns, msg->space, msg->epoch, &space) : status;
	status = status == KV_OK ? kvd_space_group(space, msg->group, &group) : status;
	if (status != KV_OK) {
		return status;
	}
	if (msg->keys.len == 0 || msg->keys.len % KV_KEY_BYTES != 0) {
		return KV_ERR_ARG;
	}
	if (core->pending_withdrawals >= MAX_PENDING) {
		return kvd_busy(core, KVD_DISK_IS_BUSY);
	}
	withdrawal = kv_alloc(core->env, bytes_of(msg->keys.len / KV_KEY_BYTES));
	if (!withdrawal) {
		return KV_ERR_NOMEM;
	}
	*withdrawal = (kvd_withdrawal_t){.core = core,
					 .member = ask->member,
					 .frame_id = ask->frame_id,
					 .epoch = msg->epoch,
					 .ns = ask->ns,
					 .space = msg->space,
					 .n = msg->keys.len / KV_KEY_BYTES,
					 .group = (uint8_t)msg->group};
	memcpy(withdrawal->keys, msg->keys.data, msg->keys.len);
	while (*link) {
		link = &(*link)->next;
	}
	*link = withdrawal;
	core->pending_withdrawals++;

	return KV_PENDING;
}

static void answer(kvd_withdrawal_t *withdrawal, kv_status_t status)
{
	kvd_core_t *core = withdrawal->core;
	const kv_msg_t reply = {.withdraw_reply = {.withdrawn = withdrawal->blocks}};

	core->pending_withdrawals--;
	if (core->answer) {
		core->answer(core->answer_ctx, withdrawal->member, KV_CODE_WITHDRAW, withdrawal->frame_id, status,
			     &reply);
	}
	kv_free(core->env, withdrawal);
}

static void finish_record(void *arg, kv_status_t status)
{
	kvd_withdrawal_t *withdrawal = arg;
	const kv_env_t env = withdrawal->core->world.env;

	if (kvd_callback_enter(withdrawal->core)) {
		kv_free(&env, withdrawal);
		return;
	}
	answer(withdrawal, status);
}

/* All of it is gone from memory. A row or a header on disk may bring it back still. */
static void record(kvd_core_t *core, kvd_withdrawal_t *withdrawal)
{
	kvd_space_t *space;
	kv_status_t status = kvd_space_find(core, withdrawal->ns, withdrawal->space, withdrawal->epoch, &space);

	if (status == KV_OK && core->tier[KVD_DISK] && space->memory == 0) {
		core->outstanding++;
		status = kvs_withdraw(core->tier[KVD_DISK], space->root, finish_record, withdrawal);
		if (status == KV_OK) {
			return;
		}
		core->outstanding--;
		status = status == KV_MISS ? KV_OK : status;
	}
	answer(withdrawal, status);
}

static void withdraw_key(kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint8_t group)
{
	uint32_t id;

	kvd_puts_withdraw_key(core, tree, key, group);
	id = kvd_index_find(&core->ix, tree, key, group);
	if (id == KVD_NONE) {
		id = kvd_index_find_aside(&core->ix, tree, key, group);
	}
	if (id != KVD_NONE) {
		kvd_withdraw_subtree(core, id);
	}
}

static void withdraw_some(kvd_core_t *core, kvd_withdrawal_t *withdrawal)
{
	const uint32_t left = withdrawal->n - withdrawal->hidden;
	kvd_space_t *space;

	if (kvd_space_find(core, withdrawal->ns, withdrawal->space, withdrawal->epoch, &space) != KV_OK) {
		withdrawal->hidden = withdrawal->n; /* it was reset meanwhile: all its blocks go */
		return;
	}
	for (uint32_t i = 0; i < left && i < QUANTUM_KEYS; i++) {
		withdraw_key(core, space->tree, &withdrawal->keys[withdrawal->hidden++], withdrawal->group);
	}
}

int kvd_withdrawals_run(kvd_core_t *core)
{
	kvd_withdrawal_t *first = core->withdrawals;

	if (!first) {
		return 0;
	}
	if (first->hidden == 0) {
		first->before = core->withdrawn;
	}
	if (first->hidden < first->n) {
		withdraw_some(core, first);
	}
	/* dismantle.h goes on with the subtrees, the oldest first. */
	if (first->hidden == first->n && core->withdrawn_tops == 0) {
		first->blocks = (uint32_t)(core->withdrawn - first->before);
		kvd_count(core, KV_M_BLOCKS_WITHDRAWN, first->blocks);
		core->withdrawals = first->next;
		kvd_events_flush(core);
		record(core, first);
	}

	return core->withdrawals != NULL;
}

int kvd_withdrawals_name(const kvd_core_t *core, const kvd_space_t *space)
{
	const kvd_withdrawal_t *withdrawal = core->withdrawals;

	while (withdrawal && (withdrawal->ns != space->ns || withdrawal->space != space->id)) {
		withdrawal = withdrawal->next;
	}

	return withdrawal != NULL;
}

void kvd_withdrawals_free(kvd_core_t *core)
{
	while (core->withdrawals) {
		kvd_withdrawal_t *next = core->withdrawals->next;

		kv_free(core->env, core->withdrawals);
		core->withdrawals = next;
	}
}
