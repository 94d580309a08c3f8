#include "connectors/worker/universe.h"
#include "connectors/worker/wr_device.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LATE_MS       20u
#define UNKNOWN_GROUP 5u

uint32_t u_roll(world_t *w, uint32_t n)
{
	return below(&w->seed, n);
}

int u_one_in(world_t *w, uint32_t n)
{
	return n > 0 && u_roll(w, n) == 0;
}

/* ---- engine blocks --------------------------------------------------------------------------- */

void u_fill(world_t *w, uint32_t id, uint32_t tag)
{
	for (uint32_t r = 0; r < w->wr.rank_count; r++) {
		wr_fill_block(&w->wr.rank[r], id, tag, 0);
	}
	w->tag[id][0] = tag;
	w->tag[id][1] = tag;
}

int u_excuse_saves_of(world_t *w, uint32_t id)
{
	int found = 0;

	U_EACH_PUT(w, put) {
		for (uint32_t i = 0; i < put->n; i++) {
			put->excused |= put->ids[i] == id;
			found |= put->ids[i] == id;
		}
	}

	return found;
}

/* Whose bytes a block has instead of those it must have. */
static void describe_block(const world_t *w, uint32_t r, uint32_t id, uint32_t tag)
{
	uint32_t has = w->serial;

	while (has > 0 && !wr_block_is(&w->wr.rank[r], id, has, 0)) {
		has--;
	}
	print_message("step %u: block %u of rank %u has contents %u instead of %u\n", w->wr.step, id, r, has, tag);
}

static void describe_wrong_blocks(const world_t *w)
{
	wr_device_print_trace();
	for (uint32_t b = 0; b < WR_BLOCKS; b++) {
		for (uint32_t r = 0; r < w->wr.rank_count && !w->busy[b] && w->tag[b][0] == w->tag[b][1]; r++) {
			if (!wr_block_is(&w->wr.rank[r], b, w->tag[b][0], 0)) {
				describe_block(w, r, b, w->tag[b][0]);
				return;
			}
		}
	}
}

void u_check_blocks(world_t *w)
{
	for (uint32_t b = 0; b < WR_BLOCKS; b++) {
		for (uint32_t r = 0; r < w->wr.rank_count && !w->busy[b]; r++) {
			const wr_rank_t *rank = &w->wr.rank[r];

			wr_compare(rank, (wr_content_t){b, w->tag[b][0], 0, 0, w->split}, &w->wrong);
			wr_compare(rank, (wr_content_t){b, w->tag[b][1], 0, w->split, rank->layers}, &w->wrong);
		}
	}
	wr_device_sync();
	if (w->wrong) {
		describe_wrong_blocks(w);
	}
	assert_int_equal(w->wrong, 0);
}

static uint32_t free_blocks(const world_t *w)
{
	uint32_t n = 0;

	for (uint32_t b = 0; b < WR_BLOCKS; b++) {
		n += !w->busy[b] && !w->given[b];
	}

	return n;
}

/* A block for new contents; often one that a save still has to read, else one that a kernel still has to write. */
static uint32_t give_block(world_t *w)
{
	const u_put_t *put = &w->puts[u_roll(w, PUTS)];
	uint32_t id = put->put ? put->ids[u_roll(w, put->n)] : KVX_NO_BLOCK;

	while (id == KVX_NO_BLOCK || w->busy[id] || w->given[id]) {
		id = u_roll(w, WR_BLOCKS);
	}
	w->given[id] = 1;
	if (!u_excuse_saves_of(w, id)) {
		u_fill(w, id, ++w->serial);
	}

	return id;
}

/* ---- spaces ---------------------------------------------------------------------------------- */

void u_make_keys(world_t *w, uint32_t number)
{
	u_space_t *s = &w->space[number];
	uint32_t tokens[CHAIN * 32], n = 0;

	for (uint32_t i = 0; i < CHAIN * 32; i++) {
		tokens[i] = i;
	}
	assert_int_equal(kvc_keys_of(s->space, &(kvc_prompt_t){sizeof(kvc_prompt_t), tokens, CHAIN * 32, NULL}, s->keys,
				     CHAIN, &n),
			 KVC_OK);
	for (uint32_t k = 0; k < KEYS; k++) {
		const uint64_t name[2] = {k, 77};

		if (k >= CHAIN) {
			assert_int_equal(kvc_key_bind(s->space, name, sizeof name, &s->keys[k]), KVC_OK);
		}
		s->tag[k] = ++w->serial;
		s->state[k] = 0;
	}
	s->damaged = 0;
}

void u_reset_space(world_t *w, uint32_t number)
{
	U_EACH_LOAD(w, load) {
		if (load->space == number) {
			return;
		}
	}
	U_EACH_PUT(w, put) {
		if (put->space == number) {
			return;
		}
	}
	assert_int_equal(kvc_space_reset(w->space[number].space), KVC_OK);
	u_make_keys(w, number);
}

/* What follows in the message is of this space. */
static void name_space(world_t *w, uint32_t number)
{
	static const char *const names[SPACES] = {"", "adapter-a", "adapter-b"};

	if (number > 0 && !w->space[number].told) {
		wr_add_space(&w->wr, number, names[number]);
		w->space[number].told = 1;
	}
	w->wr.number = number;
}

/* ---- loads ----------------------------------------------------------------------------------- */

void u_doom(u_load_t *load, kvc_status_t why)
{
	load->want = load->want == KVC_OK && load->n > 0 ? why : KVC_PENDING;
	load->doomed = 1;
}

/* How many blocks of the space's prompt are stored. */
static uint32_t stored_prefix(const u_space_t *s)
{
	uint8_t tiers[CHAIN];
	uint32_t why, n = 0;

	if (kvc_explain_group(s->space, 0, s->keys, CHAIN, tiers, &why) != KVC_OK) {
		return 0;
	}
	while (n < CHAIN && tiers[n] > 0 && tiers[n] < 0x20) {
		n++;
	}

	return n;
}

static void key_at(void *ctx, uint32_t i, kvc_key_t *key)
{
	*key = ((const kvc_key_t *)ctx)[i];
}

static kvc_lease_t *lease(world_t *w, const u_space_t *s, uint32_t group, const uint32_t *picked, uint32_t n)
{
	kvc_key_t keys[CHAIN];
	const kvc_key_source_t source = {key_at, keys};
	kvc_want_t want = {
		.struct_size = sizeof want, .group = group, .n = n, .ttl_ms = WR_PATIENCE, .source = &source};
	kvc_lease_t *leased = NULL;

	for (uint32_t i = 0; i < n && group; i++) {
		keys[i] = s->keys[picked[i]];
	}
	if (group == 0) { /* and what is before them */
		memcpy(keys, s->keys, sizeof keys);
		want.skip = picked[0];
		want.n = picked[0] + n;
	}
	if (kvc_lease_start(s->space, &want, &leased) != KVC_OK) {
		return NULL;
	}
	while (kvc_lease_state(leased) == KVC_PENDING) {
		(void)kvc_poll(w->wr.kvc, 1);
	}
	if (kvc_lease_state(leased) != KVC_OK || kvc_lease_n(leased) != want.n) {
		kvc_release(&leased, 1);
		return NULL;
	}

	return leased;
}

/* Lease some stored blocks of a group: their keys, and how many. */
static kvc_lease_t *lease_some(world_t *w, u_space_t *s, uint32_t group, uint32_t *keys, uint32_t *p_n)
{
	const uint32_t most = 1 + u_roll(w, MOST - 1), start = u_roll(w, LOOSE);
	const uint32_t stored = group ? 0 : stored_prefix(s), end = stored ? 1 + u_roll(w, stored) : 0;
	uint32_t n = 0;

	for (uint32_t k = end > most ? end - most : 0; k < end; k++) {
		keys[n++] = k;
	}
	for (uint32_t i = 0; i < LOOSE && n < most && group; i++) {
		const uint32_t k = CHAIN + (start + i * 5) % LOOSE;

		if (s->state[k] == 1) {
			keys[n++] = k;
		}
	}
	*p_n = n;

	return n ? lease(w, s, group, keys, n) : NULL;
}

/* Change a byte of a leased block, in a layer of some rank: there it fails, and others may with it. */
static void damage(world_t *w, u_load_t *load, const kvc_lease_t *lease, uint32_t i, u_block_t *block)
{
	const uint32_t r = u_roll(w, w->wr.rank_count);
	const wr_rank_t *rank = &w->wr.rank[r];
	const uint32_t first = block->group ? rank->second.first_layer : rank->paged.first_layer;
	const uint32_t layer = first + u_roll(w, block->group ? w->split : rank->layers);
	const void *data;

	if (kvc_lease_block(lease, i, &data, NULL) != KVC_OK) {
		return;
	}
	((uint8_t *)(uintptr_t)data)[layer * WR_PAGE + u_roll(w, WR_PAGE)] ^= 1;
	U_EACH_LOAD(w, other) { /* the daemon ends the leases of a bad block */
		other->excused |= other != load && other->space == load->space;
	}
	U_EACH_PUT(w, put) {
		put->excused |= put->space == load->space;
	}
	w->space[load->space].damaged = 1;
	block->fails |= 1u << r;
	load->may_fail = 1;
	load->want = KVC_PENDING;
	w->seen.damaged++;
}

/* A part of the load's record: blocks of the lease, sometimes more than it covers. Some have no destination. */
static int add_part(world_t *w, u_load_t *load, uint32_t group)
{
	u_space_t *s = &w->space[load->space];
	const uint32_t lacks = !w->now.held && u_one_in(w, 12) ? 1 : 0, bad = u_one_in(w, 40) ? 1 : 0;
	const int forged = lacks && u_one_in(w, 2); /* the lease is said to have more blocks, which never come */
	uint32_t keys[MOST + 1], ids[MOST + 2], n;
	kvc_lease_t *leased = lease_some(w, s, group, keys, &n);
	kvc_handle_t handle;

	if (!leased || kvc_lease_export(leased, &handle) != KVC_OK) { /* a block of it was found bad meanwhile */
		kvc_release(&leased, 1);
		return 0;
	}
	keys[n] = 0;
	for (uint32_t i = 0; i < n + lacks; i++) {
		u_block_t *b = &load->block[load->n];

		ids[i] = u_one_in(w, 8) ? KVX_NO_BLOCK : give_block(w);
		if (ids[i] == KVX_NO_BLOCK) {
			continue;
		}
		w->busy[ids[i]] = 1;
		*b = (u_block_t){.id = ids[i], .key = keys[i], .group = group};
		load->n++;
		if (i >= n) {
			b->fails = UINT32_MAX;
			load->want = load->want == KVC_OK || load->want == KVC_MISS ? KVC_MISS : KVC_PENDING;
		} else if (u_one_in(w, 60) && !s->damaged) {
			damage(w, load, leased, group ? i : keys[i], b);
		}
	}
	ids[n + lacks] = WR_BLOCKS + u_roll(w, 9);
	w->wr.group = bad && u_one_in(w, 2) ? UNKNOWN_GROUP : group;
	w->wr.forge_n = forged ? 2 * WR_BLOCKS : 0;
	w->wr.handle = &handle; /* the daemon may have heard of a damaged block */
	if (load->lease[0]) {
		wr_add_part(&w->wr, leased, ids, n + lacks + bad);
	} else {
		wr_add_load(&w->wr, leased, load->flags, load->number, ids, n + lacks + bad);
	}
	if (forged) {
		load->want = KVC_PENDING;
		load->may_fail = 1;
	}
	load->lease[load->lease[0] ? 1 : 0] = leased;
	w->wr.forge_n = 0;
	w->wr.handle = NULL;
	w->now.leased |= !load->flags;

	return bad ? 2 : 1;
}

/* A load without a lease. */
static void add_dead_load(world_t *w, u_load_t *load)
{
	const uint32_t id = give_block(w);

	w->busy[id] = 1;
	w->wr.group = 0;
	load->block[load->n++] = (u_block_t){.id = id};
	wr_add_load(&w->wr, NULL, load->flags, load->number, &id, 1);
	u_doom(load, KVC_MISS);
}

void u_add_load(world_t *w)
{
	const uint32_t kind = w->wr.groups ? u_roll(w, 3) : 0; /* parts of the first group, of the second, both */
	u_load_t *load = NULL;
	int unsound = 0;

	for (uint32_t i = 0; i < LOADS && !load; i++) {
		load = w->loads[i].number ? NULL : &w->loads[i];
	}
	if (!load || free_blocks(w) < 4 * MOST) {
		return;
	}
	*load = (u_load_t){.number = ++w->number,
			   .flags = u_one_in(w, 2) ? KVX_MSG_ASYNC : 0,
			   .space = u_roll(w, w->spaces),
			   .step = w->wr.step};
	if (w->space[load->space].damaged) {
		load->number = 0;
		return;
	}
	w->wr.timeout_ms = w->now.late && load->flags ? LATE_MS : WR_LOAD_MS;
	name_space(w, load->space);
	if (u_one_in(w, 12)) {
		add_dead_load(w, load);
		return;
	}
	unsound |= kind != 1 ? add_part(w, load, 0) : 0;
	unsound |= kind != 0 ? add_part(w, load, 1) : 0;
	if (!load->lease[0]) {
		load->number = 0;
	} else if (unsound & 2) {
		u_doom(load, KVC_ERR_NOMEM);
		w->unsound += w->now.alloc ? 0u : 1u;
		w->holes += w->now.alloc ? 1u : 0u;
	}
}

void u_revoke(world_t *w, u_load_t *load)
{
	for (uint32_t i = 0; i < 2; i++) {
		if (load->lease[i]) {
			wr_revoke(&w->wr, load->lease[i]);
			load->lease[i] = NULL;
		}
	}
	u_doom(load, KVC_ERR_REVOKED);
	w->seen.revoked++;
}

int u_is_sync(const u_load_t *load, uint32_t step)
{
	return load->number && !(load->flags & KVX_MSG_ASYNC) && load->step == step;
}

static void compare_load(world_t *w, u_load_t *load, uint32_t r, uint32_t layer, uint32_t layers)
{
	const wr_rank_t *rank = &w->wr.rank[r];

	for (uint32_t i = 0; i < load->n; i++) {
		u_block_t *b = &load->block[i];
		const uint32_t all = b->group ? w->split : rank->layers;
		const uint32_t end = layer + layers < all ? layer + layers : all;

		if (layer < end) {
			wr_compare(rank, (wr_content_t){b->id, w->space[load->space].tag[b->key], 0, layer, end},
				   &b->wrong[r]);
		}
	}
}

void u_compare_sync_loads(world_t *w, uint32_t r, uint32_t layer, uint32_t layers)
{
	U_EACH_LOAD(w, load) {
		if (u_is_sync(load, w->wr.step)) {
			compare_load(w, load, r, layer, layers);
		}
	}
}

/* ---- the end of a load ----------------------------------------------------------------------- */

/* What a rank has said of a load must be what the model says. */
static void expect(const u_load_t *load, uint32_t r, int is, const char *what)
{
	if (!is) {
		fail_msg("%s: load %u of step %u, flags %u, rank %u: status %d of %d, %u blocks of %u, doomed %d, "
			 "excused %d, silent %d, lost %d",
			 what, load->number, load->step, load->flags, r, load->loaded[r].status, load->want,
			 load->loaded[r].blocks, load->n, load->doomed, load->excused, load->silent, load->lost);
	}
}

/* The daemon, which soon knows of each. */
static void await_report_of_corrupt_block(world_t *w)
{
	w->corrupt++;
	KV_AWAIT(rig_counter(&w->wr.rig, "kvd_bad_blocks_total") >= w->corrupt);
}

static void check_ended(const world_t *w, const u_load_t *load, uint32_t r)
{
	const kvx_report_loaded_t *loaded = &load->loaded[r];
	const int all_fail = load->doomed && !load->excused;
	uint64_t bytes = 0;
	uint32_t named = 0;

	for (uint32_t i = 0; i < load->n; i++) {
		const u_block_t *b = &load->block[i];
		const int failed = b->named >> r & 1u;
		const int fails = all_fail || (!load->excused && b->fails >> r & 1u);

		named += failed ? 1u : 0u;
		bytes += (uint64_t)(b->group ? w->split : w->wr.rank[r].layers) * WR_PAGE;
		if (!load->silent) {
			if (!failed && b->wrong[r]) {
				wr_device_print_trace();
				describe_block(w, r, b->id, w->space[load->space].tag[b->key]);
			}
			expect(load, r, failed || b->wrong[r] == 0, "wrong bytes");
			expect(load, r, failed || !fails, "a block that is not there was not named");
			expect(load, r, !failed || fails || load->excused || load->may_fail, "a good block was named");
		}
	}
	expect(load, r, load->failed[r] == (load->flags & KVX_MSG_ASYNC && loaded->status != KVC_OK), "verdict");
	expect(load, r, !named || !load->silent || load->excused, "a dropped load has named blocks");
	if (loaded->status == KVC_OK) {
		expect(load, r, named == 0 && loaded->blocks == load->n && loaded->bytes == bytes, "counts");
	}
	expect(load, r, load->excused || load->want == KVC_PENDING || loaded->status == load->want, "status");
}

/* Its step has computed with blocks that were not there. After a daemon's death it may be heard long after. */
static void taint_step(world_t *w, const u_load_t *load)
{
	uint8_t *tainted = &w->tainted[load->step % HISTORY];

	if (u_is_sync(load, load->step) && w->wr.step - load->step < HISTORY && !*tainted) {
		*tainted = 1;
	}
}

/* All ranks have answered: its blocks are the engine's, which computes again what has failed. */
static void end_load(world_t *w, u_load_t *load)
{

	(void)kvc_poll(w->wr.kvc, 0);
	for (uint32_t i = 0; i < 2; i++) { /* the daemon may have ended a lease */
		load->excused |= load->lease[i] && kvc_lease_state(load->lease[i]) != KVC_OK;
	}
	for (uint32_t r = 0; r < w->wr.rank_count && load->flags & KVX_MSG_ASYNC; r++) {
		compare_load(w, load, r, 0, WR_LAYERS);
	}
	wr_device_sync();
	for (uint32_t r = 0; r < w->wr.rank_count; r++) {
		check_ended(w, load, r);
		if (load->loaded[r].status == KVC_ERR_CORRUPT && !load->excused) {
			await_report_of_corrupt_block(w);
		}
		if (load->loaded[r].status != KVC_OK) {
			taint_step(w, load);
		}
		w->seen.failed += load->loaded[r].status != KVC_OK;
	}
	for (uint32_t i = 0; i < load->n; i++) {
		const u_block_t *b = &load->block[i];

		w->busy[b->id] = 0;
		if (load->lost) {
			continue;
		}
		if (b->named || load->silent) {
			u_fill(w, b->id, ++w->serial);
		} else {
			w->tag[b->id][0] = w->space[load->space].tag[b->key];
			w->tag[b->id][1] = b->group ? w->tag[b->id][1] : w->tag[b->id][0];
		}
	}
	kvc_release(load->lease, 2);
	load->number = 0;
	w->seen.loads++;
}

void u_fill_load(world_t *w, const u_load_t *load)
{
	for (uint32_t i = 0; i < load->n; i++) {
		u_fill(w, load->block[i].id, ++w->serial);
	}
}

void u_excuse_all(world_t *w)
{
	U_EACH_LOAD(w, load) {
		load->excused = 1;
	}
	U_EACH_PUT(w, put) {
		put->excused = 1;
	}
}

static u_load_t *find_load(world_t *w, uint64_t number)
{
	U_EACH_LOAD(w, load) {
		if (load->number == number) {
			return load;
		}
	}
	fail_msg("load %u is not open", (unsigned)number);

	return NULL;
}

static void take_finished(world_t *w, uint32_t r)
{
	char id[17] = "";
	int failed;

	while (kvx_worker_take_finished(w->wr.rank[r].worker, id, sizeof id - 1, &failed) > 0) {
		u_load_t *load = find_load(w, strtoul(id + strlen("request-"), NULL, 10));

		assert_true(load->flags & KVX_MSG_ASYNC);
		assert_false(load->finished >> r & 1u);
		load->finished |= 1u << r;
		load->failed[r] = failed;
		memset(id, 0, sizeof id);
	}
}

static void take_failed(world_t *w, uint32_t r)
{
	uint32_t ids[WR_BLOCKS];
	const uint32_t n = kvx_worker_take_failed_blocks(w->wr.rank[r].worker, ids, WR_BLOCKS);

	for (uint32_t i = 0; i < n; i++) {
		uint32_t found = 0;

		U_EACH_LOAD(w, load) {
			for (u_block_t *block = load->block; block < load->block + load->n; block++) {
				if (block->id == ids[i]) {
					assert_false(block->named >> r & 1u);
					block->named |= 1u << r;
					found++;
				}
			}
		}
		assert_int_equal(found, 1);
	}
}

void u_take_report(world_t *w, uint32_t r)
{
	const kvx_record_header_t *record;
	kvx_msg_reader_t cursor = {0};
	const void *bytes;
	size_t len;

	kvx_worker_take_report(w->wr.rank[r].worker, &bytes, &len);
	assert_true(len == 0 || kvx_msg_open(&cursor, KVX_REPORT_MAGIC, bytes, len));
	while (len > 0 && (record = kvx_msg_next(&cursor)) != NULL) {
		if (record->type == KVX_RECORD_LOADED) {
			const kvx_report_loaded_t *loaded = (const kvx_report_loaded_t *)(const void *)record;
			u_load_t *load = find_load(w, loaded->load);

			assert_false(load->reported >> r & 1u);
			load->reported |= 1u << r;
			load->loaded[r] = *loaded;
		} else if (record->type == KVX_RECORD_DROPPED) {
			const uint64_t id = ((const kvx_report_dropped_t *)(const void *)record)->put;

			U_EACH_PUT(w, put) {
				put->dropped |= put->id == id;
			}
		} else {
			assert_int_equal(record->type, KVX_RECORD_STEP);
		}
	}
	assert_false(cursor.bad);
}

/* In any order. No step is prefetched before the engine has heard all of the one before. */
static void hear_rank(world_t *w, uint32_t r)
{
	const uint32_t first = u_roll(w, 2);

	take_finished(w, r);
	for (uint32_t i = 0; i < 2; i++) {
		assert_false(r == 0 && !w->heard && wr_prefetch(&w->wr, KVX_PREFETCH_LAYERS));
		if (i == first) {
			take_failed(w, r);
		} else {
			u_take_report(w, r);
		}
	}
	take_failed(w, r);
}

void u_collect(world_t *w)
{
	const uint32_t all = (1u << w->wr.rank_count) - 1;

	for (uint32_t r = 0; r < w->wr.rank_count; r++) {
		hear_rank(w, r);
	}
	w->heard = 1;
	w->seen.refused += wr_device_fail(0) ? 1u : 0u;
	wr_device_refuse_orders(0);
	U_EACH_LOAD(w, load) {
		if (load->reported == all && (load->finished == all || !(load->flags & KVX_MSG_ASYNC))) {
			end_load(w, load);
		}
	}
}

/* ---- saves ----------------------------------------------------------------------------------- */

/* Keys that are not stored; none of a prompt while another put for it is open. */
static uint32_t choose_keys(world_t *w, const u_put_t *put, uint32_t *keys)
{
	const uint32_t most = 1 + u_roll(w, MOST), start = u_roll(w, LOOSE);
	u_space_t *s = &w->space[put->space];
	uint32_t n = 0;

	for (uint32_t i = 0; i < LOOSE && n < most && put->group; i++) {
		const uint32_t k = CHAIN + (start + i * 5) % LOOSE;

		if (s->state[k] == 0) {
			keys[n++] = k;
		}
	}
	U_EACH_PUT(w, other) {
		if (!put->group && other->space == put->space && !other->group) {
			return 0;
		}
	}
	for (uint32_t k = put->group ? CHAIN : stored_prefix(s); k < CHAIN && n < most; k++) {
		keys[n++] = k;
	}

	return n;
}

/* A put that was given up may have left some of them visible. */
static int are_stored(u_space_t *s, const u_put_t *put, const kvc_key_t *keys)
{
	uint8_t tiers[MOST];
	uint32_t why;

	if (put->group == 0) {
		return stored_prefix(s) != put->keys[0];
	}
	if (kvc_explain_group(s->space, 1, keys, put->n, tiers, &why) != KVC_OK) {
		return 1;
	}
	for (uint32_t i = 0; i < put->n; i++) {
		if (tiers[i] > 0 && tiers[i] < 0x20) {
			return 1;
		}
	}

	return 0;
}

/* Reserve their slots: granted, all of them, when it returns. */
static kvc_put_t *start_put(world_t *w, const u_put_t *put)
{
	const kvc_put_options_t options = {.struct_size = sizeof options,
					   .writers = put->group ? w->wr.writers2 : w->wr.writers,
					   .writer_count = w->wr.rank_count,
					   .group = put->group};
	u_space_t *s = &w->space[put->space];
	kvc_put_t *started = NULL;
	kvc_key_t keys[KEYS];
	uint32_t from = put->group ? 0 : put->keys[0];

	memcpy(keys, s->keys, sizeof keys);
	for (uint32_t i = 0; i < put->n && put->group; i++) {
		keys[i] = s->keys[put->keys[i]];
	}
	if (kvc_put_start(s->space, keys, from, from + put->n, &options, &started) != KVC_OK) {
		return NULL;
	}
	if (kvc_put_ready(started, WR_PATIENCE) == KVC_OK && kvc_put_n(started) == put->n &&
	    !are_stored(s, put, keys)) {
		return started;
	}
	kvc_put_free(started);

	return NULL;
}

static void announce(world_t *w, u_put_t *put)
{
	const uint32_t hole = u_roll(w, put->n);
	uint32_t ids[MOST];

	memcpy(ids, put->ids, sizeof ids);
	if (u_one_in(w, 20) && !put->group &&
	    put->keys[hole] >= stored_prefix(&w->space[put->space])) { /* a slot without a source */
		ids[hole] = KVX_NO_BLOCK;
		put->doomed = 1;
		w->holes++;
	}
	name_space(w, put->space);
	w->wr.group = put->group;
	wr_add_save(&w->wr, put->put, put->later ? KVX_MSG_COMPLETE : 0, ids, put->n);
	((kvx_msg_save_t *)(void *)(w->wr.message.data + w->wr.message.record))->step = put->step;
	put->excused |= w->now.alloc || w->wr.step < w->fresh_until;
	put->doomed |= !put->later && w->now.no_end;
	put->later = 0;
}

/* This step computes blocks that are saved when it ends, or by the next message. */
void u_add_save(world_t *w)
{
	u_put_t *put = NULL;
	kvc_handle_t handle;

	for (uint32_t i = 0; i < PUTS && !put; i++) {
		put = w->puts[i].put ? NULL : &w->puts[i];
	}
	if (!put || free_blocks(w) < 2 * MOST) {
		return;
	}
	*put = (u_put_t){.space = u_roll(w, w->spaces), .group = w->wr.groups ? u_roll(w, 2) : 0, .step = w->wr.step};
	put->n = w->space[put->space].damaged ? 0 : choose_keys(w, put, put->keys);
	put->put = put->n ? start_put(w, put) : NULL;
	if (!put->put) {
		return;
	}
	if (kvc_put_export(put->put, &handle) != KVC_OK) { /* all of it is stored already */
		kvc_put_free(put->put);
		put->put = NULL;
		return;
	}
	put->id = handle.id;
	memset(put->ids, 0xff, sizeof put->ids);
	for (uint32_t i = 0; i < put->n; i++) {
		const uint32_t id = give_block(w);

		put->ids[i] = id;
		w->compute[id] = w->space[put->space].tag[put->keys[i]];
		w->space[put->space].state[put->keys[i]] = 2;
	}
	put->later = u_one_in(w, 3);
	for (uint32_t i = 0; i < put->n && put->later; i++) {
		w->busy[put->ids[i]] = 1;
	}
	if (!put->later) {
		announce(w, put);
	}
}

void u_add_complete_saves(world_t *w)
{
	U_EACH_PUT(w, put) {
		if (put->later) {
			announce(w, put);
			for (uint32_t b = 0; b < put->n; b++) {
				w->busy[put->ids[b]] = 0;
			}
		}
	}
}

/* Synchronous loads of its step, or of the one before, are open or have failed. */
static uint32_t taint_of(world_t *w, const u_put_t *put, int *p_open)
{
	*p_open = 0;
	U_EACH_LOAD(w, load) {
		*p_open |= u_is_sync(load, put->step) || u_is_sync(load, put->step - 1);
	}

	return w->tainted[put->step % HISTORY] | w->tainted[(put->step - 1) % HISTORY];
}

void u_check_puts(world_t *w)
{
	(void)kvc_poll(w->wr.kvc, 0);
	U_EACH_PUT(w, put) {
		kvc_put_result_t result = {.struct_size = sizeof result};
		uint32_t taint;
		int open;

		if (put->later) {
			continue;
		}
		kvc_put_get_result(put->put, &result);
		taint = taint_of(w, put, &open);
		if (open || (result.status == KVC_PENDING && !put->dropped)) {
			put->excused |= w->wr.step - put->step > HISTORY / 2; /* longer ago than is remembered */
			continue;
		}
		if (result.status == KVC_OK ? put->dropped || put->doomed || (taint == 1 && !put->excused)
					    : !put->excused && !put->doomed && !taint) {
			fail_msg("put of step %u, space %u, group %u, %u blocks: status %d, dropped %d, doomed %d, "
				 "taint %u",
				 put->step, put->space, put->group, put->n, result.status, put->dropped, put->doomed,
				 taint);
		}
		for (uint32_t k = 0; k < put->n; k++) {
			w->space[put->space].state[put->keys[k]] = result.status == KVC_OK;
		}
		w->seen.stored += result.status == KVC_OK;
		w->seen.dropped += result.status != KVC_OK;
		kvc_put_free(put->put);
		put->put = NULL;
	}
}
