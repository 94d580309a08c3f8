/* The steps of the fake engine: scheduling, what the ranks do, faults. */
#include "connectors/step/fake_engine.h"
#include "engine/check.h"

#include <signal.h>
#include <stdlib.h>

/* ---- scheduling ------------------------------------------------------------------------------ */

static void preempt(fe_t *fe, fe_request_t *r)
{
	fe_blocks_give(fe, r);
	r->state = FE_WAITING;
	r->computed = 0;
	r->step_tokens = 0;
	r->preempted = 1;
	fe->preempted++;
	kvx_scheduler_preempt(fe->scheduler, &r->ask);
}

/* The running first, oldest first; who finds no block takes those of the youngest. Returns what is left of the budget;
 * 0 also after preemptions. */
static uint32_t schedule_running(fe_t *fe, uint32_t budget)
{
	int preempted = 0;

	for (fe_request_t *r = fe_oldest(fe, FE_RUNNING, 0); r && budget;
	     r = fe_oldest(fe, FE_RUNNING, r->order + 1u)) {
		const uint32_t left = r->known - r->computed, take = left < budget ? left : budget;

		while (r->state == FE_RUNNING && !fe_blocks_for(fe, r, r->computed + take, 0)) {
			preempt(fe, fe_youngest_running(fe));
			preempted = 1;
		}
		if (r->state == FE_RUNNING) {
			r->step_tokens = take;
			budget -= take;
		}
	}

	return preempted ? 0 : budget;
}

/* Nobody runs, so nobody will free a block, and waiting requests hold what loads have brought them: the youngest gives
 * its own up. */
static void make_room(fe_t *fe)
{
	fe_request_t *youngest = NULL;

	for (uint32_t i = 0; i < FE_REQUESTS; i++) {
		fe_request_t *r = &fe->request[i];

		if (r->state == FE_RUNNING) {
			return;
		}
		if (r->state == FE_WAITING && r->n > 0 && (!youngest || r->order > youngest->order)) {
			youngest = r;
		}
	}
	if (youngest) {
		preempt(fe, youngest);
	}
}

/* One that waits: match, admit when there is room. 0: nobody else is admitted in this step. */
static int admit(fe_t *fe, fe_request_t *r, uint32_t *p_budget)
{
	uint32_t from, to, take;
	kvx_hit_t hit = {0};

	fe_ask_refresh(r);
	if (r->computed == 0) {
		fe_feed_tokens(fe, r);
		r->ask.local = fe_share(fe, r);
		r->ask.whole = 1;
		r->ask.busy = fe_youngest_running(fe) != NULL;
		kvx_scheduler_match(fe->scheduler, &r->ask, &hit);
		r->computed = r->ask.local;
	}
	from = r->computed;
	to = from + hit.tokens;
	assert_true(to <= r->known && (hit.async || to < r->known || !hit.tokens));
	take = hit.async ? 0 : r->known - to < *p_budget ? r->known - to : *p_budget;
	if (!fe_blocks_for(fe, r, to + take, hit.tokens ? fe_window_first(to) : 0)) {
		if (r->told == 0) {
			fe_blocks_give(fe, r);
			r->computed = 0;
		}
		make_room(fe);
		return 0;
	}
	fe_place(fe, r, r->told, r->told ? r->told : from / FE_UNIT);
	r->load_from = from;
	r->load_to = to;
	r->sync_load = hit.tokens && !hit.async;
	r->computed = to;
	fe->hit_tokens += hit.tokens;
	if (hit.tokens) {
		kvx_scheduler_start_load(fe->scheduler, &r->ask, &hit);
		fe->sync_loads += !hit.async;
		fe->async_loads += hit.async != 0;
	}
	r->state = hit.async ? FE_LOADING : FE_RUNNING;
	r->step_tokens = take;
	*p_budget -= take;

	return 1;
}

static void schedule(fe_t *fe)
{
	uint32_t budget = schedule_running(fe, FE_BUDGET);
	uint64_t after = 0;

	while (budget) {
		fe_request_t *r = fe_oldest(fe, FE_WAITING, after);

		if (!r) {
			break;
		}
		after = r->order + 1u;
		if (!admit(fe, r, &budget)) {
			break;
		}
	}
	for (uint32_t i = 0; i < FE_REQUESTS; i++) {
		fe_request_t *r = &fe->request[i];

		if (r->state != FE_RUNNING || r->step_tokens == 0) {
			continue;
		}
		fe_ask_refresh(r);
		fe_feed_tokens(fe, r);
		if (r->told < r->n) {
			fe_place(fe, r, r->told, r->told);
		}
		if (r->computed + r->step_tokens >= kvx_scheduler_next_save_at(fe->scheduler, r->id, r->ask.id_len) ||
		    r->step_tokens > 1) {
			kvx_scheduler_advance(fe->scheduler, &r->ask, r->computed + r->step_tokens, r->step_tokens);
		}
	}
}

/* ---- the step -------------------------------------------------------------------------------- */

/* Negative control: the first two blocks of every load change places. */
static void swap_ids(uint8_t *bytes, size_t len)
{
	const kvx_record_header_t *record;
	kvx_msg_reader_t cursor;

	assert_true(kvx_msg_open(&cursor, KVX_MSG_MAGIC, bytes, len));
	for (record = kvx_msg_next(&cursor); record; record = kvx_msg_next(&cursor)) {
		const kvx_msg_part_t *part;
		uint32_t *ids, id;

		if (record->type != KVX_RECORD_LOAD) {
			continue;
		}
		part = kvx_msg_part_first((const void *)record);
		ids = (uint32_t *)(uintptr_t)kvx_msg_part_ids(part);
		if (part->n > 1) {
			id = ids[0];
			ids[0] = ids[1];
			ids[1] = id;
		}
	}
}

static size_t take_plan(fe_t *fe)
{
	const void *bytes = NULL;
	size_t len = 0;

	kvx_scheduler_build_message(fe->scheduler, &bytes, &len);
	if (len > fe->plan_cap) {
		fe->plan = realloc(fe->plan, len);
		assert_non_null(fe->plan);
		fe->plan_cap = len;
	}
	if (len) {
		memcpy(fe->plan, bytes, len);
	}
	if (len && fe->options.swap) {
		swap_ids(fe->plan, len);
	}

	return len;
}

static void take_errors(fe_t *fe)
{
	uint32_t ids[16], n;

	for (uint32_t rank = 0; rank < fe->options.ranks; rank++) {
		while ((n = kvx_worker_take_failed_blocks(fe->worker[rank], ids, 16)) > 0) {
			for (uint32_t i = 0; i < n; i++) {
				assert_true(ids[i] < FE_BLOCKS);
				fe->bad[ids[i]] = 1;
			}
		}
	}
}

/* Tokens from the start that are there; with several groups a load that failed is of no use at all. */
static uint32_t good_tokens(const fe_t *fe, const fe_request_t *r)
{
	for (uint32_t i = r->load_from / FE_UNIT; i < r->load_to / FE_UNIT; i++) {
		for (uint32_t g = 0; g < fe->options.groups; g++) {
			if (r->ids[g][i] != KVX_NO_BLOCK && fe->bad[r->ids[g][i]]) {
				return fe->options.groups > 1 ? r->load_from : i * FE_UNIT;
			}
		}
	}

	return r->load_to;
}

/* Blocks that are full and right may be shared. */
static void publish(fe_t *fe, const fe_request_t *r)
{
	for (uint32_t i = 0; fe->options.sharing && i < r->computed / FE_UNIT; i++) {
		fe->holds[r->ids[0][i]] = r->prefix[(i + 1u) * FE_UNIT - 1u];
	}
}

static void run_one(fe_t *fe, fe_request_t *r)
{
	const uint32_t good = r->sync_load ? good_tokens(fe, r) : r->load_to;
	const uint32_t tokens = r->step_tokens;

	r->step_tokens = 0;
	if (r->sync_load && good < r->load_to) {
		/* The step runs on what was not loaded; then all from there on is computed again. */
		fe_compute(fe, r, r->computed, r->computed + tokens, 1);
		fe_check_tokens(fe, r, r->load_from, good);
		r->computed = good;
		r->sync_load = 0;
		fe->failed_loads++;
		publish(fe, r);
		return;
	}
	if (r->sync_load) {
		fe_check_tokens(fe, r, r->load_from, r->load_to);
		r->sync_load = 0;
	}
	fe_compute(fe, r, r->computed, r->computed + tokens, 0);
	r->computed += tokens;
	publish(fe, r);
	fe_slide(fe, r);
	if (r->computed == r->known && r->known < r->total) {
		r->known++; /* a token is generated */
	} else if (r->computed == r->total) {
		fe_check_tokens(fe, r, 0, r->total);
		fe_request_end(fe, r, 0);
	}
}

static void load_over(fe_t *fe, const char *id, uint32_t len, int failed)
{
	for (uint32_t i = 0; i < FE_REQUESTS; i++) {
		fe_request_t *r = &fe->request[i];

		if ((r->state != FE_LOADING && r->state != FE_ABORTED) || strlen(r->id) != len ||
		    memcmp(r->id, id, len) != 0) {
			continue;
		}
		if (r->state == FE_ABORTED) {
			fe_blocks_give(fe, r);
			r->state = FE_FREE;
			return;
		}
		r->state = FE_WAITING;
		r->computed = good_tokens(fe, r);
		assert_true(failed || r->computed == r->load_to);
		if (failed && fe->options.groups > 1) {
			r->computed = r->load_from;
		}
		fe_check_tokens(fe, r, r->load_from, r->computed);
		publish(fe, r);
		fe->failed_loads += r->computed < r->load_to;
		if (r->computed == r->known) {
			r->computed--; /* one token must be computed */
		}
		if (r->computed == 0) {
			fe_blocks_give(fe, r);
		}
		return;
	}
	fail_msg("%.*s is over, but was not being loaded", (int)len, id);
}

/* Over on a rank is over for the engine only when it is over on all. */
static void take_finished(fe_t *fe)
{
	char id[32];
	uint32_t len;

	for (uint32_t rank = 0; rank < fe->options.ranks; rank++) {
		int failed;

		while ((len = kvx_worker_take_finished(fe->worker[rank], id, sizeof id, &failed)) > 0) {
			for (uint32_t i = 0; i < FE_REQUESTS; i++) {
				if (fe->request[i].state == FE_FREE || strlen(fe->request[i].id) != len ||
				    memcmp(fe->request[i].id, id, len) != 0) {
					continue;
				}
				fe->load_failed[i] |= failed;
				if (++fe->loaded[i] == fe->options.ranks) {
					load_over(fe, id, len, fe->load_failed[i]);
					fe->loaded[i] = 0;
					fe->load_failed[i] = 0;
				}
			}
		}
	}
}

static void take_reports(fe_t *fe)
{
	for (uint32_t rank = 0; rank < fe->options.ranks; rank++) {
		const void *bytes = NULL;
		size_t len = 0;

		kvx_worker_take_report(fe->worker[rank], &bytes, &len);
		if (len) {
			kvx_scheduler_take_report(fe->scheduler, bytes, len);
		}
	}
}

static int is_loading(const fe_t *fe)
{
	for (uint32_t i = 0; i < FE_REQUESTS; i++) {
		if (fe->request[i].state == FE_LOADING || fe->request[i].state == FE_ABORTED) {
			return 1;
		}
	}

	return 0;
}

static void step(fe_t *fe)
{
	uint64_t before = fe->computed_tokens;
	size_t len;

	schedule(fe);
	len = take_plan(fe);
	for (uint32_t rank = 0; rank < fe->options.ranks; rank++) {
		kvx_worker_begin_step(fe->worker[rank], fe->plan, len);
		kvx_worker_start_async_loads(fe->worker[rank]);
	}
	for (uint32_t rank = 0; rank < fe->options.ranks; rank++) {
		kvx_worker_run_sync_loads(fe->worker[rank]);
	}
	take_errors(fe);
	for (uint32_t i = 0; i < FE_REQUESTS; i++) {
		if (fe->request[i].state == FE_RUNNING && fe->request[i].step_tokens) {
			run_one(fe, &fe->request[i]);
		}
	}
	for (uint32_t rank = 0; rank < fe->options.ranks; rank++) {
		kvx_worker_end_step(fe->worker[rank]);
	}
	take_errors(fe);
	take_finished(fe);
	take_reports(fe);
	fe->steps++;
	if (fe->computed_tokens == before && is_loading(fe)) {
		usleep(100);
	} else {
		usleep(fe->options.step_us); /* as if it were a model */
	}
}

/* ---- faults ---------------------------------------------------------------------------------- */

static void fault(fe_t *fe)
{
	if (fe->stopped && --fe->stopped == 0) {
		rig_signal(fe->rig, SIGCONT);
	}
	if (!fe->options.faults || fe->stopped || kv_test_below(&fe->rng, fe->options.faults) != 0) {
		return;
	}
	if (kv_test_below(&fe->rng, 2)) {
		rig_signal(fe->rig, SIGSTOP);
		fe->stopped = 1u + (uint32_t)kv_test_below(&fe->rng, 30);
	} else {
		rig_kill(fe->rig);
		for (uint32_t i = 0; i < 3; i++) {
			step(fe);
		}
		rig_start(fe->rig);
	}
}

static int is_quiet(fe_t *fe)
{
	kvx_scheduler_stats_t stats = {.struct_size = sizeof stats};

	kvx_scheduler_get_stats(fe->scheduler, &stats);
	assert_int_equal(stats.requests, 0);

	return stats.puts_open + stats.leases_open == 0 && !kvx_scheduler_has_pending(fe->scheduler);
}

void fe_run(fe_t *fe, uint64_t requests)
{
	while (fe->finished < requests) {
		fe_request_t *r = &fe->request[kv_test_below(&fe->rng, FE_REQUESTS)];

		if (r->state == FE_FREE) {
			fe_request_begin(fe, r);
		} else if (r->state != FE_ABORTED && kv_test_below(&fe->rng, 300) == 0) {
			fe_request_end(fe, r, 1);
		}
		fault(fe);
		step(fe);
	}
	if (fe->stopped) {
		rig_signal(fe->rig, SIGCONT);
	}
	for (uint32_t i = 0; i < FE_REQUESTS; i++) {
		if (fe->request[i].state != FE_FREE && fe->request[i].state != FE_ABORTED) {
			fe_request_end(fe, &fe->request[i], 1);
		}
	}
	for (uint32_t i = 0; i < 5000 && (is_loading(fe) || !is_quiet(fe)); i++) {
		step(fe);
		usleep(1000);
	}
	assert_false(is_loading(fe));
	assert_true(is_quiet(fe));
	assert_int_equal(fe->free_count, FE_BLOCKS);
}
