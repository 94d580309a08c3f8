/* Seeded universes: members of three instances do anything at any moment, tiers are late, out of order and fail, and
 * after every step all that was promised must hold. A failing seed: KVD_TEST_SEED=... with the printed number of the
 * universe.
 *
 *     test_core_universe [universes]
 */
#include "life.h"

#include "core/block/admission.h"

static void make_keys(life_t *l)
{
	for (uint32_t c = 0; c < CHAINS; c++) {
		uint32_t shared = c > 0 ? (uint32_t)below(l, DEPTH) : 0;
		const kv_key_t *from = l->keys[c > 0 ? below(l, c) : 0];

		memcpy(l->keys[c], from, shared * sizeof *from);
		u_chain(shared ? &l->keys[c][shared - 1] : NULL, below(l, 1u << 30), &l->keys[c][shared],
			DEPTH - shared);
		l->whole[c] = 2 * (uint32_t)below(l, DEPTH / 4);
		u_chain(l->whole[c] ? &l->keys[c][l->whole[c] - 1] : NULL, 7, &l->privates[c], 1);
	}
}

static void do_join(life_t *l)
{
	static const char *const names[] = {"one", "two", "three"};
	uint32_t live = 0;

	for (uint32_t i = 0; i < U_MEMBERS; i++) {
		live += l->u.members[i].id != 0;
	}
	if (live < 10) {
		/* One after the other: the order of arguments is the compiler's, and a seed is one universe. */
		const uint32_t rank = (uint32_t)below(l, 2), role = (uint32_t)below(l, 3), name = (uint32_t)below(l, 3);

		(void)u_join(&l->u, (uint32_t)below(l, 2), names[name], role, rank);
	}
}

/* Mostly full chains, and unchained blocks. */
static void some_group(life_t *l, uint32_t space)
{
	static const uint8_t groups[] = {0, 0, 0, 1, 1, 2, 5};

	l->u.group = space % SPACES_OF_NS < 2 ? groups[below(l, sizeof groups)] : 0;
}

/* ---- spaces ---------------------------------------------------------------------------------- */

static uint64_t refused_spaces_;

/* A number and an epoch are of one space for ever. */
static void keep_handle(life_t *l, uint32_t space, const kvd_space_info_t *info)
{
	uint32_t i = 0;

	while (i < l->handle_count && (ns_of(l->handles[i].space) != ns_of(space) ||
				       l->handles[i].number != info->space || l->handles[i].epoch != info->epoch)) {
		i++;
	}
	assert_true(i < HANDLES);
	assert_true(i == l->handle_count || l->handles[i].space == space);
	l->handles[i] = (life_handle_t){info->space, space, info->epoch};
	l->handle_count += i == l->handle_count;
}

static int uneven_; /* in this universe groups of a space differ */

static uint32_t is_in_gpu_memory(const life_t *l, uint32_t space)
{
	return l->u.gpu.cap > 0 && space % SPACES_OF_NS == 1;
}

static kv_status_t open_space(life_t *l, const u_member_t *m, uint32_t space)
{
	static const char *const names[SPACES_OF_NS] = {"model", "other", "one"};
	const uint32_t which = space % SPACES_OF_NS;
	kv_status_t status;

	l->u.block_bytes = which > 0 ? 8192 : 4096; /* of another class */
	l->u.uneven = uneven_ && which == 0;        /* its large blocks are of the class of the others' */
	l->u.group_count = which == 2 ? 1 : U_GROUPS;
	l->u.memory = is_in_gpu_memory(l, space);
	status = u_open(&l->u, ns_of(space), m, names[which], 0, &l->space[space]);
	if (status == KV_OK) {
		keep_handle(l, space, &l->space[space]);
	}

	return status;
}

uint32_t life_open(life_t *l, const u_member_t *m, uint32_t space)
{
	kv_status_t status = open_space(l, m, space);

	/* All numbers are named then: one of the others has one. */
	for (uint32_t more = 1; status != KV_OK; more++) {
		assert_int_equal(status, KV_ERR_LIMIT);
		assert_true(more < SPACES_OF_NS);
		space = SPACES_OF_NS * ns_of(space) + (space + 1) % SPACES_OF_NS;
		status = open_space(l, m, space);
		refused_spaces_++;
	}

	return space;
}

/* A space that the member may ask for. */
static uint32_t some_space(life_t *l, const u_member_t *m)
{
	return life_open(l, m, (m ? SPACES_OF_NS * m->ns : 0) + (below(l, 8) == 0 ? 2u : below(l, 3) == 0 ? 1u : 0u));
}

/* A handle of any time is its space's, or refused. */
static void use_old_handle(life_t *l)
{
	const life_handle_t *old = &l->handles[below(l, l->handle_count)];
	const kvd_ns_t *ns = l->u.core->ns[ns_of(old->space)];
	const int is_current = ns->numbers[old->number] && ns->numbers[old->number]->epoch == old->epoch;
	kv_msg_t reply, ask = {.explain = {.space = old->number, .epoch = old->epoch}};
	const kvd_ask_t request = {
		.ns = l->u.ns[ns_of(old->space)], .code = KV_CODE_EXPLAIN, .frame_id = 1, .msg = &ask};

	assert_int_equal(kvd_core_request(l->u.core, &request, &reply, NULL), is_current ? KV_OK
									      : old->number <= ns->number_made
										      ? KV_ERR_STALE_EPOCH
										      : KV_ERR_NOT_FOUND);
	assert_int_equal(ns->mirror.epochs[old->number] == old->epoch, is_current);
	assert_true(!is_current || l->space[old->space].space == old->number);
}

static void do_close(life_t *l)
{
	u_member_t *m = some_member(l);

	if (m) {
		const uint32_t space = SPACES_OF_NS * m->ns + (uint32_t)below(l, SPACES_OF_NS);
		const kv_status_t status = u_close(&l->u, m, &l->space[space]);

		assert_true(status == KV_OK || status == KV_ERR_NOT_FOUND);
	}
	use_old_handle(l);
}

/* ALREADY blocks have no slot, all others have one. */
static void check_already(const u_put_t *put, uint32_t already)
{
	const uint32_t *slots = put->id ? kv_lease_slots(u_header(put->member, put->offset)) : NULL;
	uint32_t without = 0;

	for (uint32_t i = 0; slots && i < put->n; i++) {
		without += slots[i] == KV_SLOT_NONE;
	}
	assert_true(!slots || without == already);
}

static uint64_t not_admitted_;

/* Only a put that allows it is refused, and only while the pool of a class of its namespace thrashes. */
static void check_refused(const life_t *l, const u_member_t *m, uint32_t space, uint32_t flags, kv_status_t status)
{
	if (status == KV_ERR_NOT_ADMITTED) {
		assert_int_equal(flags, KV_PUT_OPTIONAL);
		assert_true(l->u.core->config.admission && !is_in_gpu_memory(l, space));
		not_admitted_ += kvd_admission_thrashes(l->u.core, l->u.ns[m->ns]) ? 1 : 0;
	}
}

static void do_put_start(life_t *l)
{
	u_member_t *m = some_member(l);
	uint32_t which = (uint32_t)below(l, PUTS), chain = (uint32_t)below(l, CHAINS), space = some_space(l, m);
	uint32_t visible, first, n;
	kv_msg_put_start_reply_t reply;
	kv_status_t status;

	some_group(l, space);
	visible = u_visible(&l->u, ns_of(space), &l->space[space], l->keys[chain], DEPTH);
	first = (uint32_t)below(l, u_alone(l->u.group) ? DEPTH : visible + 4);
	n = first + 1 + (uint32_t)below(l, 12);

	if (!m || l->puts[which].id != 0 || n > DEPTH) {
		return;
	}
	if (below(l, 3) > 0 && first > visible && !u_alone(l->u.group)) {
		first = visible;
	}
	if (below(l, 6) == 0) {
		status = u_put_start(&l->u, m, &l->space[space], &l->privates[chain], 0, 1,
				     KV_PUT_PRIVATE | KV_PUT_OPTIONAL, &l->puts[which], &reply);
		assert_true(status != KV_ERR_NOT_ADMITTED);
	} else {
		const uint32_t flags = (uint32_t)below(l, 2) | (below(l, 4) ? KV_PUT_OPTIONAL : 0);

		status = u_put_start(&l->u, m, &l->space[space], l->keys[chain], first, n, flags, &l->puts[which],
				     &reply);
		check_refused(l, m, space, flags, status);
	}
	if (status != KV_OK) {
		l->puts[which].id = 0;
		return;
	}
	check_already(&l->puts[which], reply.already);
	if (l->puts[which].id != 0) {
		u_put_write(&l->u, &l->puts[which]);
	}
}

static int put_runs(const u_put_t *put)
{
	const kv_lease_header_t *header = put->id != 0 ? u_header(put->member, put->offset) : NULL;

	return header && put->member->id != 0 && header->id == put->id && header->state == KV_LEASE_ACTIVE;
}

static void do_put_end(life_t *l)
{
	u_put_t *put = &l->puts[below(l, PUTS)];

	if (!put_runs(put)) {
		put->id = 0;
		return;
	}
	if (put->member->closed) {
		return;
	}
	if (below(l, 10) == 0) {
		kv_msg_t ask = {.keep = {.put = put->id}}, reply;

		assert_int_equal(u_request(&l->u, put->member, KV_CODE_KEEP, &ask, &reply), KV_OK);
		return;
	}
	if (below(l, 3) == 0) {
		(void)u_put_end(&l->u, put->member, put, (uint32_t)below(l, put->n), 1);
	} else {
		for (uint32_t i = 0; i < put->n; i++) {
			(void)u_put_end(&l->u, put->member, put, i, 1);
		}
	}
}

static void do_put_revoke(life_t *l)
{
	u_put_t *put = &l->puts[below(l, PUTS)];
	uint32_t freed;

	if (put_runs(put) && !put->member->closed) {
		(void)u_put_revoke(&l->u, put->member, put->id);
		if (below(l, 2)) {
			(void)u_quiet(&l->u, put->member, below(l, 2) ? 0 : 2, put->id, &freed);
		}
	}
}

/* All of a window's blocks or none. */
static void acquire_unchained(life_t *l, u_member_t *m, uint32_t which, uint32_t space, const kv_key_t *keys,
			      uint32_t n)
{
	uint32_t some = l->u.group == 2 ? 1 : 1 + (uint32_t)below(l, 6), skip = n > some ? n - some : 0;
	uint32_t visible = u_visible(&l->u, ns_of(space), &l->space[space], &keys[skip], n - skip);
	kv_msg_acquire_reply_t reply;
	kv_status_t status = u_acquire(&l->u, m, &l->space[space], keys, n, skip, &l->leases[which], &reply);

	if (status != KV_OK) {
		l->leases[which].id = 0;
		assert_true(status == KV_ERR_BUSY || status == KV_ERR_LIMIT);
		return;
	}
	assert_int_equal(reply.lease != 0, visible == n - skip);
	assert_int_equal(reply.n, reply.lease ? n : 0);
	assert_int_equal(reply.why == KV_WHY_NONE, reply.lease != 0);
}

static void do_acquire(life_t *l)
{
	u_member_t *m = some_member(l);
	uint32_t which = (uint32_t)below(l, LEASES), chain = (uint32_t)below(l, CHAINS), space = some_space(l, m);
	uint32_t n = 1 + (uint32_t)below(l, DEPTH), skip = below(l, 3) ? 0 : (uint32_t)below(l, n + 1);
	kv_msg_acquire_reply_t reply;
	kv_key_t keys[DEPTH];

	if (!m || u_lease_alive(&l->leases[which])) {
		return;
	}
	l->leases[which].id = 0;
	some_group(l, space);
	if (u_alone(l->u.group)) {
		acquire_unchained(l, m, which, space, l->keys[chain], n);
	} else {
		memcpy(keys, l->keys[chain], sizeof keys);
		if (below(l, 3) == 0) {
			n = l->whole[chain] + 1;
			skip = skip < n ? skip : n - 1;
			keys[n - 1] = l->privates[chain];
		}
		if (u_acquire(&l->u, m, &l->space[space], keys, n, skip, &l->leases[which], &reply) != KV_OK) {
			l->leases[which].id = 0;
		}
	}
}

static void do_release(life_t *l)
{
	u_lease_t *lease = &l->leases[below(l, LEASES)];

	if (lease->id && u_lease_alive(lease) && lease->member->id && !lease->member->closed) {
		if (below(l, 4) == 0) {
			kv_msg_t ask = {.bad_block = {.lease = lease->id, .index = (uint32_t)below(l, 8)}}, reply;

			(void)u_request(&l->u, lease->member, KV_CODE_BAD_BLOCK, &ask, &reply);
		} else {
			assert_int_equal(u_release(&l->u, lease->member, lease->id), KV_OK);
		}
	}
}

/* ---- hand-overs ------------------------------------------------------------------------------ */

static uint64_t partials_; /* hand-overs with private blocks */

static void do_send(life_t *l)
{
	static uint8_t tail[6000];
	u_member_t *m = some_member(l);
	uint32_t which = (uint32_t)below(l, NUMBERS), chain = (uint32_t)below(l, CHAINS), space = some_space(l, m);
	u_send_t send = {.transfer = transfers[which],
			 .number = below(l, 4) ? l->numbers[which] : 0,
			 .space = &l->space[space],
			 .keys = l->keys[chain],
			 .groups = below(l, 3) ? U_FULL : (uint32_t)below(l, U_ALL + 1),
			 .last = below(l, 4) == 0,
			 .ttl_ms = (uint32_t)below(l, 3) * 400,
			 .tail = tail,
			 .tail_len = below(l, 3) ? 0 : (uint32_t)below(l, sizeof tail)};
	kv_msg_handover_send_reply_t reply = {0};
	uint32_t visible;

	send.await_room = (int)below(l, 2);
	l->u.group = 0;
	visible = u_visible(&l->u, ns_of(space), &l->space[space], l->keys[chain], DEPTH);
	send.n = 2 + (uint32_t)below(l, visible + 1);
	if (m && below(l, 3) == 0) {
		send.n = below(l, 3) ? l->whole[chain] : 0;
		send.last = 1;
		send.partial = 1 + (uint32_t)below(l, 15);
		send.private_key = l->privates[chain];
		for (uint32_t g = 0; g < U_GROUPS; g++) {
			l->u.group = u_groups[g].id;
			(void)u_put_private(&l->u, m, &l->space[space], &l->privates[chain]);
		}
	}
	if (m && send.n <= DEPTH && u_send(&l->u, m, &send, &reply) == KV_OK) {
		l->numbers[which] = reply.number;
		life_forget_announced(l, reply.number);
		partials_ += send.partial > 0;
	}
}

static void do_recv(life_t *l)
{
	u_member_t *m = some_member(l);
	uint32_t which = (uint32_t)below(l, NUMBERS), space = some_space(l, m);
	kv_msg_handover_recv_reply_t reply = {0};
	kv_msg_t ask = {0}, answer;

	if (m && u_recv(&l->u, m, &l->space[space], transfers[which], (uint32_t)below(l, 3) * 300, &reply) == KV_OK) {
		l->numbers[which] = reply.number;
		assert_true(reply.state >= KV_HANDOVER_AWAITED && reply.state <= KV_HANDOVER_FAILED);
		assert_int_equal(reply.status != KV_OK, reply.state == KV_HANDOVER_FAILED);
		ask.handover_tail.number = reply.number;
		assert_int_equal(u_request(&l->u, m, KV_CODE_HANDOVER_TAIL, &ask, &answer), KV_OK);
		assert_int_equal(answer.handover_tail_reply.tail.len, reply.tail_bytes);
	}
}

static void do_done(life_t *l)
{
	u_member_t *m = some_member(l);
	const uint32_t flags = m ? (uint32_t)below(l, 4) : 0;
	kv_status_t status = m ? u_done(&l->u, m, l->numbers[below(l, NUMBERS)], flags) : KV_OK;

	assert_true(status == KV_OK || status == KV_ERR_NOT_FOUND || status == KV_ERR_ARG);
}

/* What an entry has pinned is in a tier: nothing has evicted it. */
static void check_handovers(life_t *l)
{
	const kvd_core_t *core = l->u.core;

	for (uint32_t i = 0; i < core->handovers.made; i++) {
		const kvd_handover_t *entry = kvd_obj_at(&core->handovers, i);

		for (uint32_t g = 0; entry->number != 0 && g <= KV_MAX_GROUPS; g++) {
			const kvd_handover_pins_t *pins =
				g < KV_MAX_GROUPS ? &entry->parts[g].pins : &entry->private_pins;
			const kvd_pin_t *pin = NULL;

			for (uint32_t p = pins->head; p != KVD_NONE; p = pin->next) {
				pin = kvd_obj_at(&core->pins, p);
				assert_true(pin->kind == KVD_PIN_HANDOVER && pin->owner == entry->number);
				assert_int_not_equal(kvd_tiers_of(&core->ix, kvd_block_at(&core->ix, pin->block)), 0);
			}
		}
	}
}

static void forget(life_t *l, const u_member_t *m)
{
	for (uint32_t i = 0; i < LEASES; i++) {
		l->leases[i].id = l->leases[i].member == m ? 0 : l->leases[i].id;
	}
	for (uint32_t i = 0; i < PUTS; i++) {
		l->puts[i].id = l->puts[i].member == m ? 0 : l->puts[i].id;
	}
}

/* The process of a closed member has joined again: as any open one of its rank. */
static void come_back(life_t *l, u_member_t *m)
{
	for (uint32_t i = 0; i < U_MEMBERS; i++) {
		const u_member_t *by = &l->u.members[i];

		if (by->id && !by->closed && by->instance == m->instance && by->rank == m->rank &&
		    by->role == m->role) {
			kvd_member_absorb(l->u.core, m->id, by->id, (int)below(l, 2));
			m->id = 0;
			return;
		}
	}
}

static void do_leave(life_t *l)
{
	u_member_t *m = &l->u.members[below(l, U_MEMBERS)];
	uint32_t freed;

	if (m->id == 0) {
		return;
	}
	switch (below(l, 5)) {
	case 0:
		u_closed(&l->u, m);
		break;
	case 1:
		u_dead(&l->u, m);
		break;
	case 2:
		if (!m->closed) {
			u_left(&l->u, m);
		}
		break;
	default:
		if (!m->closed) {
			(void)u_quiet(&l->u, m, 2, 0, &freed);
		} else {
			come_back(l, m);
		}
		break;
	}
	for (uint32_t i = 0; i < U_MEMBERS; i++) {
		if (l->u.members[i].id == 0) {
			forget(l, &l->u.members[i]);
		}
	}
}

static void do_reset_or_withdraw(life_t *l)
{
	u_member_t *m = some_member(l);
	uint32_t space = life_open(l, m, (m ? SPACES_OF_NS * m->ns : 0) + (uint32_t)below(l, SPACES_OF_NS));
	kv_msg_t ask = {.space_reset = {.space = l->space[space].space, .epoch = l->space[space].epoch}}, reply;
	const uint64_t what = m ? below(l, 6) : 2;

	if (what == 0) {
		kv_status_t status = u_request(&l->u, m, KV_CODE_SPACE_RESET, &ask, &reply);

		assert_true(status == KV_OK || status == KV_PENDING || status == KV_ERR_BUSY);
		if (status != KV_ERR_BUSY) {
			l->space[space].epoch = reply.space_reset_reply.epoch;
			keep_handle(l, space, &l->space[space]);
		}
	} else if (what == 1) { /* a few blocks, and all below them */
		const uint32_t chain = (uint32_t)below(l, CHAINS);
		const kv_key_t *keys = &l->keys[chain][2 + below(l, DEPTH / 4)];
		kv_status_t status;

		some_group(l, space);
		status = u_withdraw(&l->u, m, &l->space[space], keys, 1 + (uint32_t)below(l, 4));
		assert_true(status == KV_PENDING || status == KV_ERR_BUSY);
	}
}

static void do_world(life_t *l)
{
	universe_t *u = &l->u;

	switch (below(l, 8)) {
	case 0:
		u->disk.hold = !u->disk.hold;
		break;
	case 1:
		u->disk.fail_percent = below(l, 3) ? 0 : 30;
		u->disk.fail_with = below(l, 2) ? KV_ERR_IO : below(l, 2) ? KV_ERR_FAULT : KV_ERR_CORRUPT;
		break;
	case 2:
		u->disk.lose_percent = below(l, 2) ? 0 : 5;
		kv_test_advance(&u->env, below(l, 4) ? 300000000 : UINT64_C(11000000000));
		break;
	case 3:
		(void)kvd_core_evict_one(u->core, below(l, 2) ? KV_TIER_CPU : KV_TIER_DISK);
		break;
	default:
		u_tick(u, 1);
		/* What is on disk only may be hidden and come back. Files are under pressure enough without that. */
		if (!u->disk.file_slots && below(l, 3) == 0) {
			u->disk.aside_percent = below(l, 3) ? 90 : 0;
			for (uint32_t i = 0; i < 8; i++) {
				(void)kvd_core_evict_one(u->core, KV_TIER_CPU);
			}
		}
		break;
	}
}

/* In a few hundred steps no pool begins to thrash: a class is said to, and finds out. */
static void do_thrash(life_t *l)
{
	kvd_class_t *class = &l->u.core->classes[below(l, l->u.core->class_count)];

	class->admission.thrashing = l->u.core->config.admission && class->memory == KVD_HOST_MEM;
}

static void step(life_t *l)
{
	static void (*const steps[])(life_t * l) = {KV_ROWS(
		do_join, do_leave, do_put_start, do_put_start, do_put_start, do_put_end, do_put_end, do_put_end,
		do_put_revoke, do_acquire, do_acquire, do_acquire, do_release, do_reset_or_withdraw, do_send, do_recv,
		do_recv, do_recv, do_done, life_do_announced, do_close, do_thrash, do_world, do_world)};

	steps[below(l, KV_COUNT_OF(steps))](l);
}

static void check(life_t *l)
{
	universe_check(&l->u);
	check_handovers(l);
	life_check_announced(l);
	for (uint32_t i = 0; i < LEASES; i++) {
		if (l->leases[i].id && l->leases[i].member->id) {
			u_lease_verify(&l->u, &l->leases[i]);
		}
	}
	if (l->u.notice_count > U_NOTICES / 2) {
		l->u.notice_count = 0;
	}
}

static void explain(life_t *l, uint32_t space, const kv_key_t *keys, uint8_t tiers[DEPTH])
{
	assert_int_equal(open_space(l, NULL, space), KV_OK);
	u_explain(&l->u, ns_of(space), &l->space[space], keys, DEPTH, tiers);
}

static int nowhere(life_t *l, uint32_t space, const kv_key_t *keys)
{
	uint8_t tiers[DEPTH], any = 0;

	explain(l, space, keys, tiers);
	for (uint32_t i = 0; i < DEPTH; i++) {
		any |= tiers[i];
	}

	return any == 0;
}

/* All members leave: nothing may be left behind. */
static void calm_down(life_t *l)
{
	universe_t *u = &l->u;
	kvs_usage_t usage;

	u->disk.hold = 0;
	u->disk.fail_percent = u->disk.lose_percent = u->disk.aside_percent = 0;
	fake_read_all(&u->disk);
	for (uint32_t i = 0; i < U_MEMBERS; i++) {
		if (u->members[i].id) {
			u_dead(u, &u->members[i]);
		}
	}
	u_settle(u);
	universe_check(u);
	u_expire_handovers(u);
	assert_int_equal(u->core->handovers.used + u->core->ns[0]->tail_bytes + u->core->ns[1]->tail_bytes, 0);
	assert_int_equal(u->core->pins.used, 0);
	assert_int_equal(u->core->leases.used, 0);
	assert_int_equal(u->core->puts.used, 0);
	assert_int_equal(u->core->ios.used, 0);
	assert_int_equal(u->core->pendings.used, 0);
	assert_int_equal(u->core->refs + u->core->extents.used + u->core->instances.used + u->core->members.used, 0);
	assert_int_equal(u->core->transit + u->core->disk_unlinked + u->core->durable_owed, 0);
	for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
		uint64_t in = 0;

		for (uint32_t tr = 0; tr < u->core->ix.trees.made; tr++) {
			in += kvd_tree_at(&u->core->ix, tr)->live ? kvd_tree_at(&u->core->ix, tr)->in[t] : 0;
		}
		if (u->core->tier[t]) {
			kvs_usage(u->core->tier[t], &usage);
			assert_int_equal(usage.used_slots, in);
			assert_int_equal(usage.quarantined_slots, 0);
		}
	}
	for (uint32_t c = 0; c < 2 * CHAINS * U_GROUPS; c++) {
		uint8_t tiers[DEPTH];
		const kv_key_t *keys = l->keys[c % CHAINS];
		uint32_t ns = c / CHAINS / U_GROUPS;

		u->group = u_groups[c / CHAINS % U_GROUPS].id;

		explain(l, SPACES_OF_NS * ns, keys, tiers);
		for (uint32_t i = 0; i < DEPTH; i++) {
			if (nowhere(l, SPACES_OF_NS * ns + 1, keys) &&
			    (u->group != 0 || nowhere(l, SPACES_OF_NS * ns + 2, keys))) {
				assert_int_equal(u_mirror_tiers(u, ns, &keys[i]), tiers[i]);
			}
		}
	}
}

static uint64_t files_, gpu_adopted_;   /* files that changed their class, blocks adopted in the memory of a GPU */
static uint64_t seen_[KV_METRIC_COUNT]; /* all counts of all universes */

static void live(uint64_t seed, uint32_t steps)
{
	static life_t l;
	fake_tier_t disk, gpu = {0};
	u_config_t config = {.cpu_slots = 40,
			     .disk_slots = seed % 4 == 0   ? 0
					   : seed % 4 == 1 ? 90
							   : 40,
			     .disk_file_slots = seed % 4 == 1 ? 0 : 5,
			     .gpu_slots = seed % 2 ? 0 : 24,
			     .gpu = &gpu,
			     .max_blocks = seed % 3 ? 4096 : 80,
			     .admission = seed % 5 > 0,
			     .max_spaces = seed % 7 < 3 ? SPACES_OF_NS : 0, /* a number less than spaces */
			     .seed = seed};
	int restart = config.disk_slots > 0 && seed % 5 == 0;

	uneven_ = seed % 3 == 1;

	if (seed % 2) { /* shares that are met all the time; in the others what is there is the limit */
		const uint64_t shares[2][KVD_SHARES] = {{24 * 4096, 20 * 4096, config.max_blocks / 2},
							{16 * 4096, 20 * 4096, config.max_blocks / 2}};

		memcpy(config.share, shares, sizeof shares);
	}
	if (seed % 3 == 0) { /* an end of what one of them may borrow */
		memcpy(config.max[1], (uint64_t[KVD_SHARES]){18 * 4096, 25 * 4096, config.max_blocks / 2 + 8},
		       sizeof config.max[1]);
	}

	for (int run = 0; run <= restart; run++) {
		l.handle_count = run ? l.handle_count : 0;
		memset(&l, 0, offsetof(life_t, handles));
		memset(l.space, 0, sizeof l - offsetof(life_t, space));
		universe_init(&l.u, &config, run ? &disk : NULL);
		gpu_adopted_ += l.u.gpu.used;
		l.u.rng.state = seed + 1000 * (uint64_t)run;
		l.u.cpu.shuffle = l.u.disk.shuffle = 1;
		l.u.disk.queue_limit = seed % 2 ? 4 : 0;
		for (uint32_t s = 0; s < SPACES; s++) {
			assert_int_equal(open_space(&l, NULL, s), KV_OK);
		}
		l.u.rng.state = seed;
		make_keys(&l);
		for (uint32_t i = 0; i < steps; i++) {
			step(&l);
			check(&l);
		}
		calm_down(&l);
		files_ += l.u.disk.retired;
		for (uint32_t i = 0; i < KV_METRIC_COUNT; i++) {
			seen_[i] += kv_metric_get(&l.u.metrics, (kv_metric_t)i);
		}
		if (run < restart) {
			universe_kill(&l.u, &disk);
		}
	}
	universe_fini(&l.u);
}

static uint32_t universes_ = 240;

/* What must have happened in some of them. */
static const kv_metric_t wanted_[] = {
	KV_M_SLABS_RECLAIMED,   KV_M_PUTS_EXPIRED, KV_M_HANDOVERS_TAKEN, KV_M_HANDOVERS_FAILED,
	KV_M_HANDOVERS_REFUSED, KV_M_EVICTED_GPU,  KV_M_SPACES_CLOSED,   KV_M_BLOCKS_WITHDRAWN,
};

static int has_seen_all(void)
{
	int all = refused_spaces_ > 0 && not_admitted_ > 0 && partials_ > 0 && files_ > 0 && gpu_adopted_ > 0;

	for (size_t i = 0; i < KV_COUNT_OF(wanted_); i++) {
		all = all && seen_[wanted_[i]] > 0;
	}

	return all;
}

KV_TEST(p1_to_p10_hold_after_every_step)
{
	uint64_t seed = kv_test_seed();
	const char *one = getenv("KVD_TEST_UNIVERSE");
	const int usual = !getenv("KVD_TEST_SEED"); /* another seed may leave something out */

	/* More of them where chance has left something out. */
	for (uint32_t i = one ? (uint32_t)atoi(one) : 0;
	     i < universes_ || (usual && i < 4 * universes_ && !has_seen_all()); i++) {
		if (getenv("KVD_TEST_LOG")) {
			printf("# universe %u\n", i);
		}
		live(seed / 7 * 7 + i, 400);
		if (one) {
			return;
		}
	}
	for (size_t i = 0; i < KV_COUNT_OF(wanted_); i++) {
		printf("# %s %" PRIu64 "\n", kv_metric_infos[wanted_[i]].name, seen_[wanted_[i]]);
	}
	printf("# files that changed hands %" PRIu64 ", hand-overs with a private block %" PRIu64
	       ", blocks adopted in the memory of a GPU %" PRIu64 ", spaces refused %" PRIu64
	       ", puts not admitted %" PRIu64 "\n",
	       files_, partials_, gpu_adopted_, refused_spaces_, not_admitted_);
	if (usual) {
		life_announced_all();
		assert_true(has_seen_all());
	}
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);

	if (argc > 1) {
		universes_ = (uint32_t)atoi(argv[1]);
	}

	return kv_test_run(NULL, NULL);
}
