/* The scheduler half: open, block tables, step messages, reports. */
#include "scheduler/scheduler.h"
#include "scheduler/config.h"
#include "scheduler/garbage.h"
#include "scheduler/handover.h"
#include "scheduler/lease_cache.h"
#include "scheduler/load.h"
#include "scheduler/base/requests.h"
#include "scheduler/save.h"
#include "scheduler/names/spaces.h"
#include "scheduler/step_time.h"
#include "scheduler/names/weights.h"

#include "kv/struct.h"
#include "kv/system.h"

#define CALL_MS 1000u /* an answer of the daemon is waited for at least so long */

/* ---- open and close -------------------------------------------------------------------------- */

kvc_status_t kvx_scheduler_open_in(const kv_env_t *env, const kvx_scheduler_config_t *config,
				   kvx_scheduler_t **p_scheduler)
{
	kvx_scheduler_t *scheduler;
	kvc_config_t kvc;
	kvc_status_t status;

	if (kv_random_check(env) != KV_OK) {
		return kvx_scheduler_reject_config(KV_RANDOM_REFUSED);
	}
	scheduler = kv_alloc(env, sizeof *scheduler);
	if (!scheduler) {
		return KVC_ERR_NOMEM;
	}
	scheduler->env = env;
	scheduler->loads_end = &scheduler->loads;
	scheduler->puts_end = &scheduler->puts;
	scheduler->handovers_end = &scheduler->handovers;
	scheduler->step = 1;
	scheduler->generation = 1;
	status = kvx_scheduler_apply_config(scheduler, config);
	if (status != KVC_OK) {
		goto err_scheduler;
	}
	scheduler->space_count = 1; /* the base model's */
	scheduler->nameless = UINT32_MAX;
	scheduler->spaces[0].emitted = config->identity->weights != NULL;
	status = kvx_weights_init(scheduler, config->identity->weights);
	if (status != KVC_OK) {
		goto err_scheduler;
	}

	kvc = (kvc_config_t){
		.struct_size = sizeof kvc,
		.socket = config->socket,
		.instance = config->instance,
		.secret = config->secret,
		.secret_len = config->secret_len,
		.role = KVC_ROLE_SCHEDULER,
		.rank = KVX_SCHEDULER_RANK,
		.program = config->program,
		/* An answer is of use while a load may wait for it (docs/decisions/021). */
		.timeout_ms = scheduler->load_ms > CALL_MS ? scheduler->load_ms : CALL_MS,
		.lazy = 2,
	};
	status = kvc_attach(&kvc, &scheduler->kvc);
	if (status != KVC_OK) {
		status = status == KVC_ERR_NOMEM ? status : kvx_scheduler_reject_config(kvc_last_error());
		goto err_scheduler;
	}
	*p_scheduler = scheduler;

	return KVC_OK;

err_scheduler:
	kvx_scheduler_close(scheduler);
	return status;
}

kvc_status_t kvx_scheduler_open(const kvx_scheduler_config_t *config, kvx_scheduler_t **p_scheduler)
{
	return kvx_scheduler_open_in(&kv_env_posix, config, p_scheduler);
}

void kvx_scheduler_close(kvx_scheduler_t *scheduler)
{
	const kv_env_t *env;

	if (!scheduler) {
		return;
	}
	env = scheduler->env;
	if (scheduler->stored.withdrawn > 0) {
		kvx_withdrawals_finish(scheduler);
	}
	kvx_handovers_close(scheduler);
	kvx_loads_close(scheduler);
	kvx_puts_revoke_all(scheduler);
	kvx_spaces_close(scheduler);
	kvc_detach(scheduler->kvc);
	kvx_requests_fini(&scheduler->requests);
	kvx_msg_free(&scheduler->message);
	kv_free(env, scheduler->fence);
	kv_free(env, scheduler->blocks);
	kv_free(env, scheduler->keys);
	kv_free(env, scheduler->spaces);
	kv_free(env, scheduler->writers);
	kvx_weights_fini(scheduler);
	for (uint32_t mem = 0; mem < KVX_MEMS; mem++) {
		kv_free(env, atomic_load(&scheduler->mems[mem].device));
	}
	kv_free(env, scheduler->text);
	kv_free(env, scheduler);
}

int kvx_scheduler_is_ready(const kvx_scheduler_t *scheduler)
{
	return kvx_space_miss_reason(scheduler, scheduler->base) == KV_WHY_NONE;
}

/* ---- block tables ---------------------------------------------------------------------------- */

/* These blocks belong to another request from this step on. What a save still has to read of them is read before the
 * step writes them, so the ranks learn of them in a FENCE record. */
static void fence_blocks(kvx_scheduler_t *scheduler, const kvx_block_table_t *table)
{
	for (uint32_t i = table->fresh > table->first ? table->fresh - table->first : 0; i < table->n; i++) {
		kvx_block_t *block;

		if (table->ids[i] >= scheduler->max_blocks) {
			continue;
		}
		block = &scheduler->blocks[table->ids[i]];
		block->gen += 2u + (block->gen & 1u);
		scheduler->unnamed -= block->unverified_by == KVX_UNNAMED;
		block->unverified_by = 0;
		if (block->step != scheduler->step) {
			block->step = scheduler->step;
			scheduler->fence[scheduler->fence_count++] = table->ids[i];
		}
	}
}

/* Index of the group with that number; UINT32_MAX: there is none. */
static uint32_t find_group(const kvx_scheduler_t *scheduler, uint32_t number)
{
	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		if (scheduler->groups[g].id == number) {
			return g;
		}
	}

	return UINT32_MAX;
}

/* Every id is a block or none, and the table continues the known one. */
static int table_is_sound(const kvx_scheduler_t *scheduler, const kvx_request_t *request,
			  const kvx_block_table_t *table, uint32_t index)
{
	if (index == UINT32_MAX || table->first > request->groups[index].n || table->n > UINT32_MAX - table->first) {
		return 0;
	}
	for (uint32_t i = 0; i < table->n; i++) {
		if (table->ids[i] >= scheduler->max_blocks && table->ids[i] != KVX_NO_BLOCK) {
			return 0;
		}
	}

	return 1;
}

kvc_status_t kvx_scheduler_append_blocks(kvx_scheduler_t *scheduler, const kvx_ask_t *ask,
					 const kvx_block_table_t *table)
{
	kvx_request_t *request;
	kvx_request_group_t *group;
	kvc_status_t status;
	uint32_t index;

	if (!table || table->struct_size < sizeof *table || (table->n && !table->ids)) {
		return KVC_ERR_ARG;
	}
	if (!table->shared) {
		fence_blocks(scheduler, table); /* even if the rest fails: these blocks will be written */
	}
	if (!kvx_ask_is_sound(ask)) {
		return KVC_ERR_ARG;
	}
	request = kvx_requests_find_or_add(&scheduler->requests, ask->id, ask->id_len);
	if (!request) {
		return KVC_ERR_NOMEM;
	}
	index = find_group(scheduler, table->group);
	status = table_is_sound(scheduler, request, table, index)
			 ? kvx_request_reserve(&scheduler->requests, request, index, table->first + table->n)
			 : KVC_ERR_ARG;
	if (status != KVC_OK) {
		request->unsavable = 1;
		return status;
	}

	group = &request->groups[index];
	request->space = kvx_space_find_or_add(scheduler, ask);
	if (table->first == 0 && index == 0) {
		request->unsavable = 0; /* a preempted request may get other blocks before preempt() is called */
		request->found = table->fresh;
	}
	for (uint32_t i = 0; i < table->n; i++) {
		const uint32_t id = table->ids[i];
		uint32_t gen = 0;

		if (id != KVX_NO_BLOCK) {
			/* Others may find what it computes there, without the garbage before it. */
			scheduler->blocks[id].gen |= request->unsavable && table->first + i >= table->fresh;
			gen = scheduler->blocks[id].gen;
		}
		group->entries[table->first + i] = (kvx_table_entry_t){id, gen};
		request->unsavable |= (int)(gen & 1u); /* what it computes after garbage is garbage */
	}
	group->n = table->first + table->n;

	return KVC_OK;
}

void kvx_scheduler_advance(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, uint32_t computed, uint32_t prefill)
{
	kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);

	kvx_scheduler_note_step_tokens(scheduler, computed, prefill);
	if (request) {
		kvx_lease_cache_drop(scheduler, request); /* the engine computes without it */
		kvx_request_advance(scheduler, ask, request, computed);
		if (!request->was_seen) {
			request->was_seen = 1;
			kvx_request_save_to_device(scheduler, ask, request,
						   computed > prefill ? computed - prefill : 0);
		}
		kvx_handover_advance(scheduler, ask, request);
	}
}

void kvx_scheduler_preempt(kvx_scheduler_t *scheduler, const kvx_ask_t *ask)
{
	kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);

	if (!request) {
		return;
	}
	kvx_loads_mark_unverified(scheduler, request);
	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		request->groups[g].n = 0;
	}
	request->generation = 0;
	request->computed = 0;
	request->unsavable = 0;
	request->garbage_until = 0;
}

void kvx_scheduler_finish(kvx_scheduler_t *scheduler, const kvx_ask_t *ask)
{
	kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);

	if (request) {
		kvx_lease_cache_drop(scheduler, request);
		kvx_loads_mark_unverified(scheduler, request);
		kvx_request_save_rest(scheduler, ask, request);
		kvx_requests_remove(&scheduler->requests, request);
	}
}

/* ---- the message -------------------------------------------------------------------------------- */

/* Last, because its bytes are always reserved. If it does not fit, a FENCE without ids does, which means all blocks. */
static void emit_fence(kvx_scheduler_t *scheduler)
{
	kvx_msg_buf_t *message = &scheduler->message;
	const size_t len = message->len;
	const uint32_t records = message->records;
	kvx_msg_fence_t *record = NULL;

	if (scheduler->fence_count > 0) {
		record = kvx_msg_add_record(message, KVX_RECORD_FENCE, sizeof *record);
	}
	if (record) {
		record->n = scheduler->fence_count;
		(void)kvx_msg_append(message, scheduler->fence, scheduler->fence_count * sizeof *scheduler->fence);
	}
	if (!kv_holds(!message->failed)) {
		message->failed = 0;
		message->len = len;
		message->records = records;
		(void)kvx_msg_add_record(message, KVX_RECORD_FENCE, sizeof *record);
	}
	scheduler->fence_count = 0;
}

void kvx_scheduler_build_message(kvx_scheduler_t *scheduler, const void **p_bytes, size_t *p_len)
{
	uint64_t now = kv_now_ns(scheduler->env);

	(void)kvc_poll_us(scheduler->kvc, 0);
	kvx_weights_poll(scheduler);
	kvx_spaces_poll(scheduler, now);
	kvx_withdrawals_poll(scheduler, now);
	kvx_puts_await(scheduler, now);
	now = kv_now_ns(scheduler->env);
	kvx_loads_poll(scheduler, now);
	kvx_handovers_poll(scheduler, now);

	kvx_spaces_emit(scheduler);
	kvx_loads_emit(scheduler, kv_now_ns(scheduler->env));
	kvx_puts_emit(scheduler);
	kvx_step_time_emit(scheduler);
	emit_fence(scheduler);
	kvx_msg_finish(&scheduler->message, scheduler->step);
	if (kv_broken_count() > 0) { /* detach for good */
		kvc_abandon(scheduler->kvc);
		(void)kvc_poll_us(scheduler->kvc, 0); /* the daemon hears of it at once */
	}
	*p_bytes = scheduler->message.len ? scheduler->message.data : NULL;
	*p_len = scheduler->message.len;

	kvx_msg_reset(&scheduler->message, KVX_MSG_MAGIC);
	scheduler->step++;
}

int kvx_scheduler_has_pending(kvx_scheduler_t *scheduler)
{
	const uint64_t now = kv_now_ns(scheduler->env);

	(void)kvc_poll_us(scheduler->kvc, 0);
	kvx_weights_poll(scheduler);
	kvx_spaces_poll(scheduler, now);
	kvx_withdrawals_poll(scheduler, now);
	(void)kvx_puts_poll(scheduler, now);
	kvx_handovers_poll(scheduler, now);

	return kvx_handovers_are_due(scheduler) || kvx_loads_have_drops(scheduler) ||
	       kvx_withdrawals_are_due(scheduler, now) ||
	       (kvx_daemon_is_alive(scheduler) && kvx_puts_are_due(scheduler, now));
}

/* ---- reports --------------------------------------------------------------------------------- */

void kvx_scheduler_take_report(kvx_scheduler_t *scheduler, const void *bytes, size_t len)
{
	const kvx_record_header_t *record;
	kvx_msg_reader_t cursor;

	if (!kvx_msg_open(&cursor, KVX_REPORT_MAGIC, bytes, len)) {
		scheduler->stats.bad_reports++;
		return;
	}
	for (record = kvx_msg_next(&cursor); record; record = kvx_msg_next(&cursor)) {
		const void *at = record;

		if (record->type == KVX_RECORD_LOADED) {
			kvx_loads_take_report(scheduler, at);
		} else if (record->type == KVX_RECORD_DROPPED) {
			kvx_puts_take_dropped(scheduler, ((const kvx_report_dropped_t *)at)->put);
		} else if (record->type == KVX_RECORD_STEP) {
			kvx_step_time_take_report(scheduler, at);
		} else if (record->type == KVX_RECORD_REACHED) {
			kvx_device_take_reached(scheduler, at);
		}
	}
	scheduler->stats.bad_reports += cursor.bad != 0;
}

int kvx_scheduler_wait(kvx_scheduler_t *scheduler, uint32_t timeout_us)
{
	const kvc_status_t status = kvc_poll_us(scheduler->kvc, timeout_us);

	/* One that did not answer in time is asked again: on a busy machine it takes seconds to be attached. */
	return status == KVC_ERR_TIMEOUT || kvc_fd(scheduler->kvc) >= 0;
}

void kvx_scheduler_record(kvx_scheduler_t *scheduler, const char *lora, const kvc_report_t *report)
{
	const uint32_t number = kvx_space_find_or_add(scheduler, &(kvx_ask_t){.lora = lora});

	if (number != UINT32_MAX && scheduler->spaces[number].open) {
		kvc_report(scheduler->spaces[number].space, report);
	}
}

void kvx_scheduler_record_ended(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_ended_t *ended)
{
	static const kvx_request_t unknown;
	const kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);
	kvc_report_t report;

	if (!kvx_ask_is_sound(ask) || !ended || ended->struct_size < sizeof *ended) {
		return;
	}
	request = request ? request : &unknown;
	report = (kvc_report_t){
		.struct_size = sizeof report,
		.request = kvx_requests_hash(&scheduler->requests, ask->id, ask->id_len),
		.query_tokens = ended->prompt_tokens,
		.hit_gpu_tokens = request->gpu_tokens,
		.hit_cpu_tokens = request->cpu_tokens,
		.hit_disk_tokens = request->disk_tokens,
		.hit_engine_tokens = ended->engine_tokens,
		.output_tokens = ended->output_tokens,
		.why = request->why,
		.first_missing = request->first_missing,
		.match_ns = request->match_ns,
		.load_ns = request->load_ns,
	};
	kvx_loads_count_unreported(request, &report);
	kvx_scheduler_record(scheduler, ask->lora, &report);
}

/* ---- weights that may have changed ------------------------------------------------------------- */

void kvx_scheduler_revoke_saves(kvx_scheduler_t *scheduler)
{
	kvx_puts_revoke_all(scheduler);
	for (kvx_request_t *request = NULL; (request = kvx_requests_next(&scheduler->requests, request));) {
		/* With blocks, it may be computing or loading at this moment. */
		request->unsavable |= request->computed > 0 || request->groups[0].n > 0;
		request->garbage_until = 0;
	}
}

void kvx_scheduler_suspend(kvx_scheduler_t *scheduler)
{
	/* Everything in progress is of the old weights, and so is what this step computes. */
	kvx_scheduler_revoke_saves(scheduler);
	kvx_handovers_abort(scheduler);
	scheduler->generation++;
	for (uint32_t i = 0; i < scheduler->max_blocks; i++) {
		scheduler->blocks[i].gen |= 1u;
	}
	for (kvx_request_t *request = NULL; (request = kvx_requests_next(&scheduler->requests, request));) {
		request->own.epoch = 0; /* its keys are of the old space */
		request->space = UINT32_MAX;
	}
	kvx_weights_suspend(scheduler);
	scheduler->stats.suspensions++;
}

kvc_status_t kvx_scheduler_get_stats(const kvx_scheduler_t *scheduler, kvx_scheduler_stats_t *stats)
{
	kvx_scheduler_stats_t now = scheduler->stats;

	now.broken_invariants = kv_broken_count();
	now.requests = scheduler->requests.count;
	now.puts_open = scheduler->put_count;
	now.leases_open = kvx_loads_count_leases(scheduler);

	return kv_struct_fill(stats, &now, sizeof now) ? KVC_OK : KVC_ERR_ARG;
}
