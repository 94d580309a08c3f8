/* What ranks share, and how they agree on a step. */
#include "rank.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#define DEADLINE_MS 60000u
#define DEVICE_ROWS 4096u /* of a pass, on devices */

/* Memory through which rows travel: two microbatches are under way at once. */
static kv_status_t create_heaps(kve_group_t *group)
{
	const kve_config_t *c = &group->model.config;
	const kvk_ep_shape_t shape = {.ranks = group->ranks,
				      .experts = c->experts,
				      .top_k = c->top_k,
				      .hidden = c->hidden,
				      .max_tokens = group->max_rows,
				      .groups = c->groups,
				      .in_flight = KVE_MAX_MICROBATCHES};
	const kv_status_t status = kvk_ep_plan(&shape, &group->plan, NULL);

	if (status != KV_OK) {
		return status;
	}
	if (group->devices) {
		return group->devices->open_heaps(group->devices, &group->plan);
	}
	for (uint32_t r = 0; r < group->ranks; r++) {
		group->heaps[r] = aligned_alloc(64, group->plan.heap_bytes);
		if (!group->heaps[r]) {
			return KV_ERR_NOMEM;
		}
		memset(group->heaps[r], 0, group->plan.heap_bytes);
	}
	group->link = kvk_ep_memory_link(group->heaps);

	return KV_OK;
}

static int is_sound(const kve_group_config_t *config, uint32_t ranks, const kve_dbo_config_t *dbo)
{
	const kve_devices_t *devices = config->devices;

	if (kve_config_check(config->model, NULL) != KV_OK || ranks > KVK_EP_MAX_RANKS ||
	    (ranks > 1 && !config->model->experts) || (dbo->enabled && kve_dbo_check(dbo) != NULL)) {
		return 0;
	}

	return !devices || (devices->ranks == ranks && config->max_rows <= KVE_MOST_ROWS &&
			    !devices->backend->fault_of_shape(config->model));
}

kv_status_t kve_group_create(const kve_group_config_t *config, kve_group_t **p_group)
{
	const uint32_t ranks = config->ranks ? config->ranks : 1;
	kve_dbo_config_t dbo = config->dbo;
	kve_group_t *group;
	kv_status_t status = KV_OK;

	dbo.data_parallel = ranks;
	dbo.expert_parallel = 1;
	if (!is_sound(config, ranks, &dbo)) {
		return KV_ERR_ARG;
	}
	group = aligned_alloc(_Alignof(kve_group_t), sizeof *group);
	if (!group) {
		return KV_ERR_NOMEM;
	}

	memset(group, 0, sizeof *group);
	group->ranks = ranks;
	group->dbo = dbo;
	group->devices = config->devices;
	group->backend = config->devices ? config->devices->backend : &kve_backend_fp32;
	group->max_rows = !config->devices ? KVE_MAX_ROWS : config->max_rows ? config->max_rows : DEVICE_ROWS;
	group->env = config->env ? *config->env : kv_env_posix;
	group->deadline_ns = (uint64_t)(config->deadline_ms ? config->deadline_ms : DEADLINE_MS) * 1000000u;
	group->model.config = *config->model;
	if (!config->devices) {
		status = kve_model_init(&group->model, config->model);
	}
	if (status == KV_OK && config->model->experts) {
		status = create_heaps(group);
	}
	if (status != KV_OK) {
		kve_group_destroy(group);
		return status;
	}
	*p_group = group;

	return KV_OK;
}

void kve_group_destroy(kve_group_t *group)
{
	if (!group) {
		return;
	}
	for (uint32_t r = 0; r < group->ranks; r++) {
		free(group->heaps[r]);
	}
	kve_model_fini(&group->model);
	free(group);
}

const kve_config_t *kve_group_model(const kve_group_t *group)
{
	return &group->model.config;
}

uint32_t kve_group_ranks(const kve_group_t *group)
{
	return group->ranks;
}

uint32_t kve_group_max_rows(const kve_group_t *group)
{
	return group->max_rows;
}

kve_group_memory_t kve_group_memory(const kve_group_t *group)
{
	return group->devices ? group->backend->get_memory(group) : (kve_group_memory_t){.weights = 0};
}

/* ---- before a step --------------------------------------------------------------------------- */

uint32_t kve_rank_lost(const kve_rank_t *rank)
{
	const uint64_t report = atomic_load(&rank->group->report);
	const uint32_t in_step = rank->model->config.experts ? rank->group->backend->find_lost(rank) : 0;

	return report & 0xff ? (uint32_t)(report & 0xff) : in_step;
}

/* Of several reports the one of the earliest step counts: a rank that waits for a lost one amid a step comes to no
 * agreement after it. Which ranks are lost amid a step, the transport knows. */
void kve_report_lost(kve_rank_t *rank, int in_step, uint32_t lost)
{
	_Atomic uint64_t *place = &rank->group->report;
	const uint64_t step = atomic_load_explicit(&rank->group->seats[rank->number].step, memory_order_relaxed);
	const uint64_t report = (2 * step + (uint64_t)(in_step != 0)) << 8 | lost;
	uint64_t first = atomic_load(place);

	while ((first == 0 || report >> 8 < first >> 8) && !atomic_compare_exchange_weak(place, &first, report)) {
	}
}

void kve_rank_abandon(kve_rank_t *rank)
{
	kve_report_lost(rank, 1, 1u << rank->number);
}

/* The ranks that have not come to that step, a bit each. */
static uint32_t find_behind(const kve_group_t *group, uint64_t step)
{
	uint32_t behind = 0;

	for (uint32_t r = 0; r < group->ranks; r++) {
		if (atomic_load_explicit(&group->seats[r].step, memory_order_acquire) < step) {
			behind |= 1u << r;
		}
	}

	return behind;
}

/* All ranks are in that step. */
static void read_counts(const kve_group_t *group, uint64_t step, kve_step_t *p_step)
{
	kve_dbo_count_t counts[KVK_EP_MAX_RANKS];

	*p_step = (kve_step_t){.tokens = 0};
	for (uint32_t r = 0; r < group->ranks; r++) {
		const kve_step_count_t *count = &group->seats[r].counts[step % 2];

		counts[r] = count->count;
		p_step->tokens += count->count.tokens;
		p_step->unfinished += count->unfinished;
	}
	p_step->dbo = kve_dbo_decide(&group->dbo, counts, group->ranks);
}

kv_status_t kve_rank_agree(kve_rank_t *rank, const kve_step_count_t *own, kve_step_t *p_step)
{
	kve_group_t *group = rank->group;
	kve_seat_t *seat = &group->seats[rank->number];
	const uint64_t step = atomic_load_explicit(&seat->step, memory_order_relaxed) + 1;
	uint64_t deadline_ns;

	seat->counts[step % 2] = *own;
	atomic_store_explicit(&seat->step, step, memory_order_release);
	deadline_ns = kv_now_ns(&group->env) + group->deadline_ns;
	for (;;) {
		/* Before the seats are read: a rank that stood still in between would name those that have come since. */
		const int has_ended = kve_rank_lost(rank) != 0, is_late = kv_now_ns(&group->env) >= deadline_ns;
		const uint32_t behind = find_behind(group, step);

		if (has_ended || (behind != 0 && is_late)) {
			kve_report_lost(rank, 0, behind);
			return KV_ERR_TIMEOUT;
		}
		if (behind == 0) {
			break;
		}
		(void)sched_yield();
	}
	read_counts(group, step, p_step);

	return KV_OK;
}
