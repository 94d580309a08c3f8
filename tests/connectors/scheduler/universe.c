#include "connectors/scheduler/universe.h"
#include "engine/check.h"
#include "scheduler/names/spaces.h"

u_world_t w;

uint32_t u_roll(uint32_t n)
{
	return below(&w.rng, n);
}

int u_one_in(uint32_t n)
{
	return n > 0 && u_roll(n) == 0;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static uint8_t *bytes_of(uint32_t id)
{
	return sr.cache + (size_t)id * sr.block_bytes;
}

static void want(const u_slot_t *slot, uint32_t group, uint32_t i, uint8_t *out)
{
	sr_content(&slot->r, group, i, out);
	out[0] ^= (uint8_t)(slot->adapter + 1u);
	out[1] ^= (uint8_t)slot->weights;
}

static int is_right(const u_slot_t *slot, uint32_t group, uint32_t i)
{
	uint8_t expected[4096];

	want(slot, group, i, expected);

	return memcmp(expected, bytes_of(slot->r.ids[group][i]), sr.block_bytes) == 0;
}

void u_spoil(uint32_t id)
{
	memset(bytes_of(id), (int)u_roll(256), sr.block_bytes);
	w.block[id].right = 0;
}

/* Blocks [from, to) of its table hold what they must. */
static int are_right(const u_slot_t *slot, uint32_t from, uint32_t to)
{
	while (from < to && is_right(slot, 0, from)) {
		from++;
	}

	return from >= to;
}

/* ---- the engine's blocks --------------------------------------------------------------------- */

uint32_t u_free_blocks(void)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < U_BLOCKS; i++) {
		n += w.block[i].refs == 0;
	}

	return n;
}

static uint32_t take_block(void)
{
	uint32_t id = u_roll(U_BLOCKS);

	while (w.block[id].refs > 0) {
		id = (id + 1) % U_BLOCKS;
	}
	w.block[id].refs = 1;
	w.block[id].fresh = 1;
	w.block[id].cached = 0;
	w.block[id].sync_step = 0;

	return id;
}

static void drop_blocks(u_slot_t *slot)
{
	for (uint32_t g = 0; g < sr.groups; g++) {
		for (uint32_t i = 0; i < slot->have[g]; i++) {
			w.block[slot->r.ids[g][i]].refs--;
		}
		slot->have[g] = 0;
	}
}

uint32_t u_find_cached(const u_slot_t *slot, uint32_t i)
{
	uint32_t id = 0;

	while (id < U_BLOCKS && !(w.block[id].cached && w.block[id].adapter == slot->adapter &&
				  memcmp(w.block[id].hash, slot->r.hash[i], sizeof w.block[id].hash) == 0)) {
		id++;
	}

	return id;
}

void u_cache_blocks(u_slot_t *slot, uint32_t to)
{
	for (; slot->cached < to / SR_UNIT && sr.groups == 1; slot->cached++) {
		u_block_t *block = &w.block[slot->r.ids[0][slot->cached]];

		if (!block->cached && u_find_cached(slot, slot->cached) == U_BLOCKS) {
			block->cached = 1;
			block->adapter = slot->adapter;
			memcpy(block->hash, slot->r.hash[slot->cached], sizeof block->hash);
		}
	}
}

void u_grow(u_slot_t *slot, uint32_t local, uint32_t to)
{
	const uint32_t n = (to + SR_UNIT - 1u) / SR_UNIT;

	for (uint32_t g = 0; g < sr.groups; g++) {
		const uint32_t first = slot->have[g];
		const kvx_block_table_t table = {.struct_size = sizeof table,
						 .group = g,
						 .first = first,
						 .n = n > first ? n - first : 0,
						 .fresh = g == 0 ? local / SR_UNIT : 0,
						 .ids = slot->r.ids[g] + first};

		for (uint32_t i = first; i < n; i++) {
			const uint32_t id = g == 0 && i < local / SR_UNIT ? u_find_cached(slot, i) : U_BLOCKS;

			slot->r.ids[g][i] = id;
			w.block[id].refs += id < U_BLOCKS;
		}
		for (uint32_t i = first; i < n; i++) {
			slot->r.ids[g][i] = slot->r.ids[g][i] < U_BLOCKS ? slot->r.ids[g][i] : take_block();
		}
		assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &slot->r.ask, &table), KVC_OK);
		slot->have[g] = n > first ? n : first;
	}
}

/* ---- what is stored -------------------------------------------------------------------------- */

const char *u_adapter_name(uint32_t adapter)
{
	return adapter == 0 ? NULL : adapter == 1 ? "adapter-1" : "adapter-2";
}

static uint32_t bind_keys(const u_slot_t *slot, const kvc_space_t *space, kvc_key_t *keys)
{
	const kvc_prompt_t prompt = {.struct_size = sizeof prompt, .tokens = slot->r.tokens, .n_tokens = slot->r.n};
	uint32_t n = slot->r.n / SR_UNIT;

	if (sr.options.own_keys) {
		return kvc_keys_of(space, &prompt, keys, n, &n) == KVC_OK ? n : 0;
	}
	for (uint32_t i = 0; i < n; i++) {
		if (kvc_key_bind(space, slot->r.hash[i], 32, &keys[i]) != KVC_OK) {
			return 0;
		}
	}

	return n;
}

uint32_t u_count_in(const u_slot_t *slot, uint32_t mem)
{
	const uint32_t number = kvx_space_of_name(sr.scheduler, u_adapter_name(slot->adapter));
	kvc_space_t *space = number == UINT32_MAX ? NULL : kvx_space_in(sr.scheduler, number, mem);
	kvc_match_t match = {.struct_size = sizeof match};
	kvc_key_t keys[SR_BLOCKS];
	const uint32_t n = space && kvc_space_state(space) == KVC_OK ? bind_keys(slot, space, keys) : 0;

	/* A live daemon that is short of time counts as silent for a moment. */
	for (uint32_t i = 0; n > 0 && (i == 0 || (match.why == KV_WHY_DAEMON_STALE && !w.silent && sr.rig.pid)); i++) {
		assert_true(i < U_TRIES);
		usleep(i == 0 ? 0 : 1000);
		kvc_match(space, keys, n, &match);
	}

	return match.n * SR_UNIT;
}

uint32_t u_count_stored(const u_slot_t *slot)
{
	uint32_t most = 0;

	for (uint32_t mem = 0; mem <= (sr.options.device ? KVX_OWN_MEM : KVX_HOST_MEM); mem++) {
		const uint32_t n = u_count_in(slot, mem);

		most = n > most ? n : most;
	}

	return most;
}

void u_make_prompt(u_slot_t *slot, const char *id, uint32_t prompt, uint32_t n)
{
	sr_request(&slot->r, id, 1u + prompt % 3u, prompt / 3u * 5u * SR_UNIT, n);
	memset(slot->r.hash[n / SR_UNIT], (int)n, sizeof slot->r.hash[0]); /* of a private block */
	slot->r.hash[n / SR_UNIT][0] = (uint8_t)prompt;
	slot->prompt = prompt;
}

void u_check_prompt(uint32_t prompt, uint32_t adapter)
{
	static u_slot_t probe;
	const uint32_t number = kvx_space_of_name(sr.scheduler, u_adapter_name(adapter));
	kvc_key_t keys[SR_BLOCKS];
	kvc_lease_t *lease = NULL;
	kvc_space_t *space;
	uint8_t found[4096], expected[4096];
	uint32_t n;

	u_make_prompt(&probe, "probe", prompt, U_MOST);
	probe.adapter = adapter;
	probe.weights = w.weights;
	n = u_count_in(&probe, KVX_HOST_MEM) / SR_UNIT;
	if (n == 0) {
		sr_finish(&probe.r);
		return;
	}
	space = sr_await_space(number, KVX_HOST_MEM);
	assert_true(bind_keys(&probe, space, keys) >= n);
	for (uint32_t i = 0; i < U_TRIES && kvc_acquire(space, keys, n, 0, 0, &lease) != KVC_OK; i++) {
		assert_true(i + 1 < U_TRIES);
		usleep(1000);
	}
	assert_int_equal(kvc_lease_wait(lease, kvc_lease_n(lease), SR_LOAD_MS), KVC_OK);
	for (uint32_t i = 0; i < kvc_lease_n(lease); i++) {
		void *to = found;
		uint32_t bad;

		assert_int_equal(kvc_lease_read(lease, i, 1, &to, &bad), KVC_OK);
		want(&probe, 0, i, expected);
		assert_memory_equal(found, expected, sr.block_bytes);
	}
	kvc_release(&lease, 1);
	sr_finish(&probe.r);
}

/* ---- the ranks ------------------------------------------------------------------------------- */

static u_later_t *add_later(uint32_t what, uint32_t steps)
{
	uint32_t i = 0;

	while (i < U_QUEUE && w.later[i].what != NOTHING) {
		i++;
	}
	assert_true(i < U_QUEUE);
	w.later[i] = (u_later_t){.what = what, .due = w.step + (w.calm ? 0 : steps)};

	return &w.later[i];
}

static u_slot_t *find_slot(const char *id, uint32_t len)
{
	uint32_t i = 0;

	while (i < U_SLOTS &&
	       (w.slot[i].state == FREE || strlen(w.slot[i].r.id) != len || memcmp(w.slot[i].r.id, id, len))) {
		i++;
	}

	return i < U_SLOTS ? &w.slot[i] : NULL;
}

static int is_tainted(uint32_t step)
{
	return w.failed_step[step % U_TAINTED] == step || w.failed_step[(step - 1u) % U_TAINTED] == step - 1u;
}

static void report_dropped(const kvx_msg_save_t *save)
{
	u_later_t *later = add_later(DROPPED, u_roll(3));

	later->number = save->put.id;
	w.seen.dropped++;
}

static void do_save(const kvx_msg_save_t *save)
{
	const uint32_t *ids = kvx_msg_save_ids(save), mem = save->flags & KVX_MSG_GPU_MEM ? KVX_OWN_MEM : KVX_HOST_MEM;
	kvc_put_t *put = NULL;
	u_later_t *later;

	assert_true(save->group < sr.groups);
	assert_true(save->flags & KVX_MSG_COMPLETE ? (int32_t)(save->step - w.step) < 0 : save->step == w.step);
	(void)kvc_poll(sr.kvc, 0);
	if (is_tainted(save->step) || (!w.calm && u_one_in(w.profile->bad)) || w.silent ||
	    kvc_put_import(sr_await_space(save->space, mem), &save->put, &sr.writer, &put) != KVC_OK) {
		report_dropped(save);
		return;
	}
	for (uint32_t i = 0; i < save->n; i++) {
		if (ids[i] != KVX_NO_BLOCK) {
			assert_true(ids[i] < U_BLOCKS);
			assert_true(w.block[ids[i]].right);
			(void)kvc_put_write(put, i, bytes_of(ids[i]));
		}
	}
	later = add_later(SAVED, u_roll(4));
	later->put = put;
	later->n = save->n;
	w.seen.saves++;
}

/* The blocks of one part: how many have come. */
static uint32_t read_part(u_slot_t *slot, const kvx_msg_load_t *load, const kvx_msg_part_t *part, u_later_t *report)
{
	const uint32_t *ids = kvx_msg_part_ids(part), last = part->first + part->n;
	const int fails = !w.calm && u_one_in(w.profile->bad), part_of_it = u_one_in(2);
	kvc_lease_t *lease = NULL;
	uint32_t good = 0, end = 0, bad;

	if (part->lease.incarnation != 0 && !w.silent) {
		kvc_space_t *space = sr_await_space(load->space, part->mem);

		(void)kvc_poll(sr.kvc, 0);
		if (kvc_lease_import(space, &part->lease, &lease) == KVC_OK) {
			end = kvc_lease_n(lease) < last ? kvc_lease_n(lease) : last;
			end = kvc_lease_wait(lease, end, SR_LOAD_MS) == KVC_OK ? end : 0;
		}
	}
	for (uint32_t i = part->first; i < last; i++) {
		const uint32_t id = ids[i - part->first];
		void *to = bytes_of(id);

		w.block[id].right = 0;
		if (i < end && !(fails && (!part_of_it || u_one_in(3))) &&
		    kvc_lease_read(lease, i, 1, &to, &bad) == KVC_OK) {
			w.block[id].right = !slot->tainted;
			assert_true(is_right(slot, part->group, i));
			good++;
		} else {
			u_spoil(id);
			report->first_bad = i < report->first_bad ? i : report->first_bad;
		}
	}
	kvc_release(&lease, 1);

	return good;
}

static void run_load(const kvx_msg_load_t *load, int dropped)
{
	u_slot_t *slot = find_slot(kvx_msg_load_id(load), load->id_len);
	const kvx_msg_part_t *part = kvx_msg_part_first(load);
	const int sync = !(load->flags & KVX_MSG_ASYNC);
	u_later_t *report = add_later(LOADED, sync ? (uint32_t)w.ahead : u_roll(2));
	uint32_t asked = 0;

	assert_non_null(slot);
	report->slot = (uint32_t)(slot - w.slot);
	report->serial = slot->serial;
	report->round = slot->round;
	report->number = load->load;
	report->sync = sync;
	report->first_bad = UINT32_MAX;
	for (uint32_t p = 0; p < load->parts; p++) {
		if (dropped) {
			report->first_bad = part->n ? 0 : report->first_bad;
		} else {
			report->blocks += read_part(slot, load, part, report);
		}
		asked += part->n;
		part = kvx_msg_part_next(part);
	}
	if (report->blocks < asked && sr.groups > 1) {
		report->first_bad = 0; /* a window that ends earlier has other blocks */
	}
	report->status = report->blocks == asked || u_one_in(4) ? KVC_OK : u_one_in(2) ? KVC_ERR_CORRUPT : KVC_MISS;
	if (report->blocks < asked && sync) {
		w.failed_step[w.step % U_TAINTED] = w.step;
	}
	w.seen.failed += report->blocks < asked;
}

/* It names the request's blocks, of those that were promised each once. */
static void check_load(u_slot_t *slot, const kvx_msg_load_t *load)
{
	const kvx_msg_part_t *part = kvx_msg_part_first(load);

	assert_int_equal((load->flags & KVX_MSG_ASYNC) != 0, slot->async);
	for (uint32_t p = 0; p < load->parts; p++) {
		const uint32_t *ids = kvx_msg_part_ids(part);

		assert_true(part->group < sr.groups && part->first + part->n <= slot->have[part->group]);
		assert_memory_equal(ids, slot->r.ids[part->group] + part->first, part->n * sizeof *ids);
		for (uint32_t i = part->first; i < part->first + part->n && part->group == 0; i++) {
			assert_true(i >= slot->load_at && i < slot->load_end && !slot->is_named[i]);
			slot->is_named[i] = 1;
			slot->named++;
		}
		part = kvx_msg_part_next(part);
	}
	assert_true(!slot->told || (load->flags & KVX_MSG_MORE));
	slot->told |= !(load->flags & KVX_MSG_MORE);
	slot->loads++;
}

static void take_load(const kvx_msg_load_t *load)
{
	u_slot_t *slot = find_slot(kvx_msg_load_id(load), load->id_len);
	u_later_t *later;

	assert_non_null(slot); /* of no other request, and of none whose blocks are another one's */
	check_load(slot, load);
	if (!slot->async) {
		run_load(load, 0);
		return;
	}
	later = add_later(LOAD, u_roll(4));
	later->slot = (uint32_t)(slot - w.slot);
	later->number = load->load;
	later->record = malloc(load->h.bytes);
	assert_non_null(later->record);
	memcpy(later->record, load, load->h.bytes);
}

/* The request has ended: its load ends early. */
static void take_drop(const kvx_msg_drop_t *drop)
{
	for (uint32_t i = 0; i < U_QUEUE; i++) {
		if (w.later[i].what == LOAD && w.later[i].number == drop->load) {
			run_load(w.later[i].record, 1);
			free(w.later[i].record);
			w.later[i].what = NOTHING;
		}
	}
}

/* A number is named once, until another name of the weights needs it. */
static void take_name(const kvx_msg_space_t *space)
{
	assert_true(space->number < SR_NAMES && (w.profile->renamed || !w.is_named[space->number]));
	w.is_named[space->number] = 1;
	sr_take_name(space);
}

/* What is computed after garbage is garbage. Until the load before it is known to have failed, the engine forgets it: the
 * request may lose it without a trace (docs/decisions/019). */
static void compute(void)
{
	for (uint32_t i = 0; i < SR_BLOCKS; i++) {
		w.block[i].right &= !w.block[i].fresh || w.block[i].sync_step == w.step;
		w.block[i].fresh = 0;
	}
	for (uint32_t s = 0; s < w.planned_n; s++) {
		u_slot_t *slot = w.planned[s];

		for (uint32_t i = slot->from / SR_UNIT; i * SR_UNIT < slot->to; i++) {
			const int good = !slot->tainted && are_right(slot, 0, i);

			if ((i + 1) * SR_UNIT > slot->to && slot->to < slot->r.n) {
				break;
			}
			for (uint32_t g = 0; g < sr.groups; g++) {
				const uint32_t id = slot->r.ids[g][i];

				want(slot, g, i, bytes_of(id));
				w.block[id].right = 1;
				if (!good) {
					u_spoil(id);
					w.block[id].cached &= !is_tainted(w.step);
				}
			}
		}
		slot->from = slot->to = 0;
	}
	w.planned_n = 0;
}

/* ---- the engine hears of it ------------------------------------------------------------------ */

void u_preempt(u_slot_t *slot)
{
	kvx_scheduler_preempt(sr.scheduler, &slot->r.ask);
	drop_blocks(slot);
	slot->state = WAITING;
	slot->round++;
	slot->computed = slot->from = slot->to = 0;
	slot->tainted = 0;
	w.seen.preempted++;
}

/* The engine's cache forgets its blocks from index `from` on. */
static void uncache(const u_slot_t *slot, uint32_t from)
{
	for (uint32_t i = from; i < slot->have[0]; i++) {
		w.block[slot->r.ids[0][i]].cached = 0;
	}
}

/* These blocks of a synchronous load did not come: all that have one of them are preempted; the loading request may be
 * computed again in its blocks (docs/decisions/019). */
static void lose_blocks(const uint32_t *ids, uint32_t n, const u_slot_t *loading)
{
	int lost[SR_BLOCKS] = {0};

	for (uint32_t i = 0; i < n; i++) {
		lost[ids[i]] = 1;
	}
	for (uint32_t s = 0; s < U_SLOTS; s++) {
		u_slot_t *slot = &w.slot[s];
		uint32_t first = 0;

		while (first < slot->have[0] && !lost[slot->r.ids[0][first]]) {
			first++;
		}
		if (first == slot->have[0]) {
			continue;
		}
		if (slot->state != RUNNING) { /* it begins there when its own load has ended */
			uncache(slot, first);
			slot->lost = first < slot->lost ? first : slot->lost;
			continue;
		}
		if (slot != loading || u_one_in(2)) { /* else others find them until they are computed again */
			uncache(slot, first);
		}
		if (slot == loading && u_one_in(2)) {
			slot->computed = first * SR_UNIT;
			slot->cached = first;
		} else {
			uncache(slot, first);
			u_preempt(slot);
		}
	}
}

void u_end_request(u_slot_t *slot)
{
	kvx_scheduler_finish(sr.scheduler, &slot->r.ask);
	slot->state = slot->state == LOADING ? LEAVING : FREE;
	if (slot->state == FREE) {
		drop_blocks(slot);
	}
}

/* All of an asynchronous load is reported. */
static void end_load(u_slot_t *slot)
{
	kvx_outcome_t outcome;
	uint32_t end;

	assert_int_equal(slot->named, slot->load_end - slot->load_at);
	if (slot->state == LEAVING) {
		drop_blocks(slot);
		slot->state = FREE;
		return;
	}
	outcome = sr_outcome(&slot->r);
	assert_int_equal(outcome.load == KVC_OK, slot->good == UINT32_MAX);
	assert_int_not_equal(outcome.load, KVC_PENDING);
	end = slot->good < slot->load_end ? slot->good : slot->load_end;
	end = slot->lost < end ? slot->lost : end;
	assert_true(slot->tainted || are_right(slot, slot->load_at, end));
	slot->computed = end * SR_UNIT < slot->r.n ? end * SR_UNIT : slot->r.n - 1u;
	slot->state = RUNNING;
	slot->cached = slot->load_at < end ? slot->load_at : end;
	u_cache_blocks(slot, slot->computed);
}

static void take_loaded(const u_later_t *later)
{
	u_slot_t *slot = &w.slot[later->slot];
	kvx_report_loaded_t *record = sr_begin_report(KVX_RECORD_LOADED, sizeof *record);

	record->load = later->number;
	record->status = later->status;
	record->blocks = later->blocks;
	record->ns = 1000;
	sr_give_report();
	slot->failed |= later->serial == slot->serial && later->first_bad != UINT32_MAX;
	if (later->serial != slot->serial || later->round != slot->round || slot->state == FREE) {
		return; /* of a synchronous load: the request has ended, or was preempted */
	}
	if (later->sync) {
		if (later->first_bad != UINT32_MAX) {
			lose_blocks(slot->r.ids[0] + later->first_bad, slot->load_end - later->first_bad, slot);
		}
		return;
	}
	slot->good = later->first_bad < slot->good ? later->first_bad : slot->good;
	slot->loads--;
	if (slot->told && slot->loads == 0) {
		end_load(slot);
	} else if (slot->state == LOADING && slot->good == UINT32_MAX) {
		assert_int_equal(sr_outcome(&slot->r).load, KVC_PENDING);
	}
}

static void drop_invalidated(void)
{
	uint32_t ids[SR_BLOCKS];
	const uint32_t n = kvx_scheduler_take_invalidated(sr.scheduler, ids, SR_BLOCKS);

	if (n > 0) {
		lose_blocks(ids, n, NULL);
	}
}

static void run_later(void)
{
	for (uint32_t i = 0; i < U_QUEUE; i++) {
		const u_later_t later = w.later[i];

		if (later.what == NOTHING || (!w.calm && (int32_t)(later.due - w.step) > 0) ||
		    (later.what == LOAD && w.slot[later.slot].state == LEAVING)) { /* it must be told of that */
			continue;
		}
		w.later[i].what = NOTHING;
		if (later.what == LOAD) {
			run_load(later.record, 0);
			free(later.record);
		} else if (later.what == LOADED) {
			take_loaded(&later);
		} else if (later.what == DROPPED) {
			kvx_report_dropped_t *record = sr_begin_report(KVX_RECORD_DROPPED, sizeof *record);

			record->put = later.number;
			sr_give_report();
		} else {
			(void)kvc_put_end(later.put, 0, later.n);
			sr.puts[sr.put_count++] = later.put;
		}
	}
	drop_invalidated();
	for (uint32_t i = 0; i < sr.put_count && sr.put_count > SR_PUTS / 2; i++) {
		kvc_put_free(sr.puts[i]);
		sr.put_count -= i + 1 == sr.put_count ? sr.put_count : 0;
	}
}

void u_run_ranks(const void *message, size_t len)
{
	const kvx_record_header_t *record;
	kvx_msg_reader_t cursor;

	w.step = len ? ((const kvx_msg_header_t *)message)->step : w.step + 1u;
	for (int pass = 0; pass < 3; pass++) {
		if (pass == 2) {
			compute();
		}
		if (len == 0 || !kvx_msg_open(&cursor, KVX_MSG_MAGIC, message, len)) {
			continue;
		}
		while ((record = kvx_msg_next(&cursor)) != NULL) {
			const void *at = record;
			const int complete = record->type == KVX_RECORD_SAVE &&
					     (((const kvx_msg_save_t *)at)->flags & KVX_MSG_COMPLETE) != 0;

			if (record->type == KVX_RECORD_SAVE && pass == (complete ? 0 : 2)) {
				do_save(at);
			} else if (record->type == KVX_RECORD_LOAD && pass == 1) {
				take_load(at);
			} else if (record->type == KVX_RECORD_SPACE && pass == 0) {
				take_name(at);
			} else if (record->type == KVX_RECORD_DROP && pass == 1) {
				take_drop(at);
			}
		}
	}
	run_later();
}
