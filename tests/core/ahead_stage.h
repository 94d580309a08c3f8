/* ahead_stage.h -- what the tests of announced blocks share: a space of one full group. */
#ifndef TESTS_CORE_AHEAD_STAGE_H
#define TESTS_CORE_AHEAD_STAGE_H

#include "handover_stage.h"

static kvd_space_info_t one_; /* a space of one full group */
static kv_key_t private_;     /* below keys_[3] */

static inline void stage_one(uint32_t cpu, uint32_t disk)
{
	stage_two(cpu, disk);
	u_.group_count = 1;
	one_ = u_space(&u_, 0, "one");
	u_chain(&keys_[3], 7, &private_, 1);
}

/* Announce units [from, n) of `keys`. */
static inline kv_status_t announce_of(const kv_key_t *keys, uint64_t number, uint32_t from, uint32_t n, int last)
{
	return u_send(&u_, m_,
		      &(u_send_t){.transfer = "t",
				  .number = number,
				  .space = &one_,
				  .keys = keys,
				  .ahead = 1,
				  .from = from,
				  .n = n,
				  .groups = U_FULL,
				  .last = last},
		      &sent_);
}

static inline kv_status_t announce(uint64_t number, uint32_t from, uint32_t n, int last)
{
	return announce_of(keys_, number, from, n, last);
}

static inline kv_status_t send_visible(uint32_t n, int last)
{
	return u_send(&u_, m_,
		      &(u_send_t){.transfer = "t",
				  .number = sent_.number,
				  .space = &one_,
				  .keys = keys_,
				  .n = n,
				  .groups = U_FULL,
				  .last = last},
		      &sent_);
}

/* The consumer's request; its answer is in got_. */
static inline kv_status_t receive(u_member_t *m)
{
	return u_recv(&u_, m, &one_, "t", 9000, &got_);
}

static inline void put(u_member_t *m, uint32_t first, uint32_t n)
{
	assert_int_equal(u_put(&u_, m, &one_, keys_, first, n), n - first);
	u_tick(&u_, 1);
	universe_check(&u_);
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
