/* Announced blocks in a seeded universe, with a model of each hand-over that has some. */
#include "life.h"

#include "core/handover/handover.h"

const char *const transfers[NUMBERS] = {"t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7", "t8", "t9"};

static uint64_t announced_, advanced_, completed_, withdrawn_, gaps_, dropped_, lost_;

static const kvd_handover_t *entry_of(life_t *l, uint64_t number)
{
	const kvd_handover_t *entry = number ? kvd_obj_at(&l->u.core->handovers, kvd_id_index(number)) : NULL;

	return entry && entry->number == number ? entry : NULL;
}

/* Does a lookup find it in this very space? The mirror knows namespaces only. */
static int is_visible(const life_t *l, uint32_t space, const kv_key_t *key)
{
	const kvd_core_t *core = l->u.core;

	return kvd_index_find(&core->ix, core->ns[ns_of(space)]->numbers[l->space[space].space]->tree, key, 0) !=
	       KVD_NONE;
}

static uint32_t visible_in(const life_t *l, uint32_t space, const kv_key_t *keys)
{
	uint32_t n = 0;

	while (n < DEPTH && is_visible(l, space, &keys[n])) {
		n++;
	}

	return n;
}

static uint64_t refused_of(life_t *l, uint32_t space)
{
	return kv_ns_metric_get(&l->u.metrics, ns_of(space), KV_NM_HANDOVERS_REFUSED);
}

/* The transfer's last one, or a new one. Most begin where the last chunk ended, or before; some leave a gap. */
static void announce(life_t *l)
{
	static const char tail[] = "token";
	const uint32_t which = (uint32_t)below(l, TRANSFERS);
	life_ahead_t *ahead = &l->ahead[which];
	const kvd_handover_t *entry = entry_of(l, ahead->number);
	u_member_t *m = entry ? member_of(l, entry->producer.member) : some_member(l);
	const uint32_t space = entry ? ahead->space
			       : m   ? life_open(l, m, SPACES_OF_NS * m->ns + 2)
				     : 0,
		       chain = entry ? ahead->chain : (uint32_t)below(l, CHAINS);
	u_send_t send = {.transfer = transfers[which],
			 .number = entry ? ahead->number : 0,
			 .space = &l->space[space],
			 .keys = l->keys[chain],
			 .groups = U_FULL,
			 .ahead = 1,
			 .await_room = (int)below(l, 2),
			 .ttl_ms = (uint32_t)below(l, 3) * 400,
			 .tail = tail,
			 .tail_len = below(l, 4) ? 0 : sizeof tail};
	kv_msg_handover_send_reply_t reply = {0};
	kv_status_t status;
	uint32_t known;
	int complete;

	if (!m || m->closed || space % SPACES_OF_NS != 2) {
		return;
	}
	complete = entry && entry->state == KV_HANDOVER_COMPLETE;
	known = entry ? entry->is_announced ? entry->ahead.n : entry->parts[0].n : 0;
	send.n = known + (uint32_t)below(l, 8);
	send.from = below(l, 8) ? (uint32_t)below(l, known + 1) : known + (uint32_t)below(l, 3);
	if (below(l, 3) == 0 && known <= l->whole[chain]) {
		send.n = l->whole[chain];
		send.last = 1;
		send.partial = below(l, 2) ? 1 + (uint32_t)below(l, 15) : 0;
		send.private_key = l->privates[chain];
	}
	if (send.n > DEPTH || send.from >= send.n) {
		return;
	}
	status = u_send(&l->u, m, &send, &reply);
	if (status == KV_OK && !complete) { /* else it crosses a notice, and changes nothing */
		*ahead = (life_ahead_t){.number = reply.number,
					.space = space,
					.chain = chain,
					.n = send.n,
					.handed = reply.n,
					.last = send.last,
					.partial = send.partial,
					.refused = refused_of(l, space)};
		l->numbers[which] = reply.number;
		assert_int_equal(reply.announced == 0,
				 reply.n == send.n && (!send.last || reply.state == KV_HANDOVER_COMPLETE));
		announced_ += reply.announced > 0;
	}
	gaps_ += status == KV_MISS && send.from > known;
	assert_true(status != KV_MISS || send.from > known);
}

/* A plain chunk of what is visible, often the last one. */
static void withdraw(life_t *l)
{
	const uint32_t which = (uint32_t)below(l, TRANSFERS);
	life_ahead_t *ahead = &l->ahead[which];
	const kvd_handover_t *entry = entry_of(l, ahead->number);
	u_member_t *m = entry ? member_of(l, entry->producer.member) : NULL;
	u_send_t send = {.transfer = transfers[which],
			 .number = ahead->number,
			 .space = &l->space[ahead->space],
			 .keys = l->keys[ahead->chain],
			 .groups = U_FULL,
			 .last = (int)below(l, 2)};
	kv_msg_handover_send_reply_t reply = {0};
	int complete;
	kv_status_t status;

	if (!m || m->closed || below(l, 3)) {
		return;
	}
	complete = entry->state == KV_HANDOVER_COMPLETE;
	send.n = visible_in(l, ahead->space, send.keys);
	send.n = complete || below(l, 4) == 0 ? (uint32_t)below(l, entry->n + 1) : send.n;
	status = u_send(&l->u, m, &send, &reply);
	/* What names no more than there is crosses a notice. */
	assert_true(!complete || !send.last || status != KV_ERR_EXISTS);
	if (status == KV_OK) {
		withdrawn_ += ahead->n > reply.n;
		assert_int_equal(reply.announced, 0);
		ahead->number = 0;
	}
}

/* Some announced blocks are put, by a member of the namespace. */
static void put_announced(life_t *l)
{
	const life_ahead_t *ahead = &l->ahead[below(l, TRANSFERS)];
	const kvd_handover_t *entry = entry_of(l, ahead->number);
	u_member_t *m = some_member(l);
	kv_msg_put_start_reply_t reply;
	static u_put_t put;
	uint32_t visible, n;

	if (!entry || !m || m->ns != ns_of(ahead->space)) {
		return;
	}
	l->u.group = 0;
	visible = visible_in(l, ahead->space, l->keys[ahead->chain]);
	if (visible >= ahead->n) {
		(void)u_put_private(&l->u, m, &l->space[ahead->space], &l->privates[ahead->chain]);
		return;
	}
	n = visible + 1 + (uint32_t)below(l, ahead->n - visible);
	if (u_put_start(&l->u, m, &l->space[ahead->space], l->keys[ahead->chain], visible, n, 0, &put, &reply) ==
		    KV_OK &&
	    reply.put != 0) {
		u_put_write(&l->u, &put);
		(void)u_put_end(&l->u, m, &put, reply.already, put.n - reply.already);
	}
	if (below(l, 4) == 0) {
		(void)kvd_core_evict_one(l->u.core, KV_TIER_CPU);
	}
}

void life_do_announced(life_t *l)
{
	static void (*const steps[])(life_t * l) = {announce, withdraw, put_announced};

	steps[below(l, 3)](l);
}

/* Nothing that is announced and visible waits for a word of its producer, and nothing else is handed over. */
static void check_announced_one(life_t *l, life_ahead_t *ahead)
{
	const kvd_handover_t *entry = entry_of(l, ahead->number);
	const kv_key_t *keys = l->keys[ahead->chain];
	uint32_t visible;

	if (!entry || entry->state == KV_HANDOVER_FAILED) {
		lost_ += ahead->number != 0;
		ahead->number = 0;
		return;
	}
	assert_true(entry->n >= ahead->handed && entry->n <= ahead->n);
	advanced_ += entry->n > ahead->handed;
	ahead->handed = entry->n;
	if (entry->n > 0) {
		const kvd_pin_t *pin = kvd_obj_at(&l->u.core->pins, entry->parts[0].pins.head);

		assert_true(kv_key_equal(&kvd_block_at(&l->u.core->ix, pin->block)->key, &keys[entry->n - 1]));
	}
	if (entry->state == KV_HANDOVER_COMPLETE) {
		assert_true(ahead->last && entry->n == ahead->n && entry->partial == ahead->partial &&
			    entry->private_pins.count == (ahead->partial > 0) && !entry->is_announced);
		completed_ += !ahead->is_complete;
		ahead->is_complete = 1;
		return;
	}
	assert_int_equal(entry->state, KV_HANDOVER_SENDING);
	if (!entry->is_announced) { /* all of it has come, or there was no room */
		assert_true((entry->n == ahead->n && !ahead->last) || refused_of(l, ahead->space) > ahead->refused);
		dropped_ += (entry->n < ahead->n || ahead->last) && !ahead->is_dropped;
		ahead->is_dropped = 1;
		return;
	}
	visible = visible_in(l, ahead->space, keys);
	if (kvd_handovers_are_due(l->u.core) || l->space[ahead->space].epoch != entry->epoch) {
		return;
	}
	assert_true(visible <= entry->n || entry->n == ahead->n);
	assert_true(entry->n < ahead->n ||
		    (ahead->partial > 0 && !is_visible(l, ahead->space, &l->privates[ahead->chain])));
}

void life_check_announced(life_t *l)
{
	for (uint32_t i = 0; i < TRANSFERS; i++) {
		check_announced_one(l, &l->ahead[i]);
	}
}

void life_forget_announced(life_t *l, uint64_t number)
{
	for (uint32_t i = 0; i < TRANSFERS; i++) {
		l->ahead[i].number = l->ahead[i].number == number ? 0 : l->ahead[i].number;
	}
}

void life_announced_all(void)
{
	print_message(
		"# announced %llu, advanced %llu, complete %llu, withdrawn %llu, gaps %llu, dropped %llu, lost %llu\n",
		(unsigned long long)announced_, (unsigned long long)advanced_, (unsigned long long)completed_,
		(unsigned long long)withdrawn_, (unsigned long long)gaps_, (unsigned long long)dropped_,
		(unsigned long long)lost_);
	assert_true(announced_ > 0 && advanced_ > 0 && completed_ > 0 && withdrawn_ > 0 && gaps_ > 0 && dropped_ > 0 &&
		    lost_ > 0);
}
