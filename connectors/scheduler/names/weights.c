/* The name of the weights (docs/decisions/071). It holds for the moment at which it was proved: a reset of the engine
 * suspends it, and the next name is the same, or another one. Then what was stored since the last proof is withdrawn,
 * because the weights may have been changed before it was computed. */
#include "scheduler/names/weights.h"
#include "scheduler/names/spaces.h"

#include "kv/log.h"

#define STORED_MAX  (1u << 20) /* runs of blocks: a name is proved again before there are more */
#define RETRY_NS    (500u * KVX_MS)
#define WITHDRAW_MS 1000u /* longest wait at the end for what is still to be taken back */

/* ---- the name -------------------------------------------------------------------------------- */

static char *copy_text(const kvx_scheduler_t *scheduler, const char *text, size_t len)
{
	char *copy = kv_alloc(scheduler->env, len + 1u);

	if (copy) {
		memcpy(copy, text, len);
	}

	return copy;
}

kvc_status_t kvx_weights_init(kvx_scheduler_t *scheduler, const char *text)
{
	scheduler->may_change = !text;
	if (!text) {
		return KVC_OK;
	}
	atomic_store(&scheduler->named, 1);
	scheduler->adopted = 1;
	scheduler->weights = copy_text(scheduler, text, strlen(text));

	return scheduler->weights ? kvx_space_take_first_name(scheduler) : KVC_ERR_NOMEM;
}

void kvx_weights_fini(kvx_scheduler_t *scheduler)
{
	kvc_withdraw_free(scheduler->withdrawal);
	kv_free(scheduler->env, atomic_load(&scheduler->next_weights));
	kv_free(scheduler->env, scheduler->weights);
	kv_free(scheduler->env, scheduler->stored.at);
}

kvc_status_t kvx_scheduler_set_weights(kvx_scheduler_t *scheduler, const char *text)
{
	const size_t len = text ? strnlen(text, KVX_WEIGHTS_MAX + 1u) : 0;
	char *copy;
	int unnamed = 0;

	if (len == 0 || len > KVX_WEIGHTS_MAX || atomic_load(&scheduler->named)) {
		return KVC_ERR_ARG;
	}
	copy = copy_text(scheduler, text, len);
	if (!copy) {
		return KVC_ERR_NOMEM;
	}
	if (!atomic_compare_exchange_strong(&scheduler->named, &unnamed, 1)) {
		kv_free(scheduler->env, copy);
		return KVC_ERR_ARG;
	}
	atomic_store(&scheduler->next_weights, copy);

	return KVC_OK;
}

/* What was stored under the last name is right if this is the same. */
static void change_name(kvx_scheduler_t *scheduler, char *text)
{
	kvx_stored_list_t *stored = &scheduler->stored;

	if (strcmp(scheduler->weights, text) == 0) {
		stored->n = stored->withdrawn;
	} else {
		scheduler->stats.withdrawn += stored->n - stored->withdrawn;
		for (; stored->withdrawn < stored->n; stored->withdrawn++) {
			scheduler->spaces[stored->at[stored->withdrawn].space].suspects++;
		}
	}
	stored->full = 0;
	kv_free(scheduler->env, scheduler->weights);
	scheduler->weights = text;
	scheduler->base = kvx_space_of_name(scheduler, NULL);
}

void kvx_weights_poll(kvx_scheduler_t *scheduler)
{
	char *text = atomic_load_explicit(&scheduler->next_weights, memory_order_relaxed)
			     ? atomic_exchange(&scheduler->next_weights, NULL)
			     : NULL;

	if (!text) {
		return;
	}
	scheduler->adopted = 1;
	if (scheduler->weights) {
		change_name(scheduler, text);
		return;
	}
	scheduler->weights = text;
	if (kvx_space_take_first_name(scheduler) != KVC_OK) {
		scheduler->base = UINT32_MAX;
	}
}

void kvx_weights_suspend(kvx_scheduler_t *scheduler)
{
	atomic_store(&scheduler->named, 0);
	kv_free(scheduler->env, atomic_exchange(&scheduler->next_weights, NULL));
	scheduler->adopted = 0;
	scheduler->base = scheduler->weights ? UINT32_MAX : 0;
}

/* ---- what is stored -------------------------------------------------------------------------- */

int kvx_weights_reserve_stored(kvx_scheduler_t *scheduler, uint32_t n)
{
	kvx_stored_list_t *list = &scheduler->stored;
	uint32_t cap = list->cap ? list->cap : 256u;
	kvx_stored_at_t *at;

	if (!scheduler->may_change) {
		return 1;
	}
	list->full |= list->n - list->withdrawn + n > STORED_MAX;
	if (list->full || n <= list->cap - list->n) {
		return !list->full;
	}
	while (cap < list->n + n) {
		cap *= 2u;
	}
	at = kv_resize(scheduler->env, list->at, list->cap * sizeof *at, cap * sizeof *at);
	if (at) {
		list->at = at;
		list->cap = cap;
	}

	return at != NULL;
}

void kvx_weights_add_stored(kvx_scheduler_t *scheduler, const kvx_stored_at_t *at)
{
	if (scheduler->may_change) {
		scheduler->stored.at[scheduler->stored.n++] = *at;
	}
}

int kvx_scheduler_needs_proof(const kvx_scheduler_t *scheduler)
{
	return scheduler->adopted && scheduler->stored.full;
}

/* ---- what is taken back ---------------------------------------------------------------------- */

/* Bring the entries of the first one's space and group to the front, and their keys out; how many. */
static uint32_t gather_keys(kvx_scheduler_t *scheduler)
{
	kvx_stored_at_t *at = scheduler->stored.at;
	uint32_t n = 0;

	for (uint32_t i = 0; i < scheduler->stored.withdrawn && n < KVX_RUN_BLOCKS; i++) {
		const kvx_stored_at_t entry = at[i];

		if (entry.space == at[0].space && entry.mem == at[0].mem && entry.group == at[0].group) {
			at[i] = at[n];
			at[n] = entry;
			scheduler->keys[n++] = entry.key;
		}
	}

	return n;
}

static void drop_withdrawn(kvx_scheduler_t *scheduler, uint32_t n)
{
	kvx_stored_list_t *list = &scheduler->stored;

	for (uint32_t i = 0; i < n; i++) {
		scheduler->spaces[list->at[i].space].suspects--;
	}
	memmove(list->at, list->at + n, (list->n - n) * sizeof *list->at);
	list->n -= n;
	list->withdrawn -= n;
	scheduler->stats.withdrawals += n;
}

/* 0: not now. A space that was never opened again has nothing. */
static int start_withdrawal(kvx_scheduler_t *scheduler)
{
	const kvx_stored_at_t *first = scheduler->stored.at;
	kvc_space_t *space = kvx_space_in(scheduler, first->space, first->mem);
	kvc_space_info_t info = {.struct_size = sizeof info};
	kvc_withdraw_t what = {.struct_size = sizeof what, .group = first->group, .keys = scheduler->keys};

	if (!space) {
		drop_withdrawn(scheduler, gather_keys(scheduler));
		return 1;
	}
	kvc_space_get_info(space, &info);
	what.epoch = info.epoch;
	what.n = scheduler->withdrawing = gather_keys(scheduler);

	return kvc_withdraw_start(space, &what, &scheduler->withdrawal) == KVC_OK;
}

void kvx_withdrawals_poll(kvx_scheduler_t *scheduler, uint64_t now)
{
	const kvc_status_t status = scheduler->withdrawal ? kvc_withdraw_state(scheduler->withdrawal, NULL) : KVC_OK;

	if (status == KVC_PENDING) {
		return;
	}
	if (scheduler->withdrawal) {
		kvc_withdraw_free(scheduler->withdrawal);
		scheduler->withdrawal = NULL;
		if (status == KVC_OK) {
			drop_withdrawn(scheduler, scheduler->withdrawing);
		} else {
			scheduler->withdraw_ns = now + RETRY_NS;
		}
	}
	if (kvx_withdrawals_are_due(scheduler, now) && !start_withdrawal(scheduler)) {
		scheduler->withdraw_ns = now + RETRY_NS;
	}
}

int kvx_withdrawals_are_due(const kvx_scheduler_t *scheduler, uint64_t now)
{
	return scheduler->stored.withdrawn > 0 && scheduler->incarnation && now >= scheduler->withdraw_ns;
}

void kvx_withdrawals_finish(kvx_scheduler_t *scheduler)
{
	uint64_t now = kv_now_ns(scheduler->env);
	const uint64_t until = now + WITHDRAW_MS * KVX_MS;

	while (scheduler->stored.withdrawn > 0 && kvx_daemon_is_alive(scheduler) && now < until) {
		kvx_withdrawals_poll(scheduler, now);
		(void)kvc_poll_us(scheduler->kvc, KVX_SLICE_US);
		now = kv_now_ns(scheduler->env);
	}
}
