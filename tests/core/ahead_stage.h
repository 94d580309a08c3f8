/* ahead_stage.h -- what the tests of announced blocks share: a space of one full group. */
#ifndef TESTS_CORE_AHEAD_STAGE_H
#define TESTS_CORE_AHEAD_STAGE_H

#include "handover_stage.h"

static kvd_space_info_t one_; /* a space of one full group */
static kv_key_t private_;     /* below keys_[3] */

static inline void stage_one_in(const u_config_t *config)
{
	stage_two_in(config);
	u_.group_count = 1;
	one_ = u_space(&u_, 0, "one");
	u_chain(&keys_[3], 7, &private_, 1);
}

static inline void stage_one(uint32_t cpu, uint32_t disk)
{
	stage_one_in(&(u_config_t){.cpu_slots = cpu, .disk_slots = disk});
}

/* Announce units [from, n) of keys_. */
static inline u_send_t to_announce(const char *transfer, uint32_t from, uint32_t n, int last)
{
	u_send_t send = to_send(transfer, n, U_FULL, last);

	send.space = &one_;
	send.ahead = 1;
	send.from = from;

	return send;
}

static inline kv_status_t announce(uint64_t number, uint32_t from, uint32_t n, int last)
{
	u_send_t send = to_announce("t", from, n, last);

	send.number = number;

	return send_it(send);
}

/* A plain chunk. */
static inline u_send_t to_send_visible(uint32_t n, int last)
{
	u_send_t send = to_send("t", n, U_FULL, last);

	send.number = sent_.number;
	send.space = &one_;

	return send;
}

static inline kv_status_t send_visible(uint32_t n, int last)
{
	return send_it(to_send_visible(n, last));
}

/* The consumer's request; its answer is in got_. */
static inline kv_status_t receive(u_member_t *m)
{
	return u_recv(&u_, m, &one_, "t", 9000, &got_);
}

static inline void put(u_member_t *m, uint32_t first, uint32_t n)
{
	assert_int_equal(u_put(&u_, m, &one_, keys_, first, n), n - first);
	tick_and_check(1);
}

/* Both sides were told last that the entry is so. */
static inline void check_told(kv_handover_state_t state, uint32_t n, uint32_t announced)
{
	check_notice(d_, sent_.number, state, n, KV_OK);
	check_notice(m_, sent_.number, state, n, KV_OK);
	assert_int_equal(last_notice(m_, sent_.number)->side, 1);
	assert_int_equal(last_notice(m_, sent_.number)->announced, announced);
}

static inline const kvd_handover_t *entry(void)
{
	return kvd_obj_at(&u_.core->handovers, kvd_id_index(sent_.number));
}

#endif
