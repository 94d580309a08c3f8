/* handover_stage.h -- what the tests of hand-overs share: of two instances `m_` produces, and `d_` consumes. */
#ifndef TESTS_CORE_HANDOVER_STAGE_H
#define TESTS_CORE_HANDOVER_STAGE_H

#include "stage.h"

#include "core/handover/handover.h"

static u_member_t *d_; /* instance "decode" */
static kv_msg_handover_send_reply_t sent_;
static kv_msg_handover_recv_reply_t got_;

static inline void stage_two_in(const u_config_t *config)
{
	stage_in(config);
	d_ = u_join(&u_, 0, "decode", 2, 0);
}

static inline void stage_two(uint32_t cpu, uint32_t disk)
{
	stage_two_in(&(u_config_t){.cpu_slots = cpu, .disk_slots = disk});
}

/* Blocks of units [first, n) in every group. */
static inline void put_all(uint32_t first, uint32_t n)
{
	for (uint32_t g = 0; g < U_GROUPS; g++) {
		uint32_t units = u_groups[g].block_tokens / 16;

		u_.group = u_groups[g].id;
		assert_int_equal(u_put(&u_, m_, &space_, keys_, first / units, n / units), n / units - first / units);
	}
	u_.group = 0;
}

/* The first n units of keys_ in these groups of the space. */
static inline u_send_t to_send(const char *transfer, uint32_t n, uint32_t groups, int last)
{
	return (u_send_t){
		.transfer = transfer, .space = &space_, .keys = keys_, .n = n, .groups = groups, .last = last};
}

/* A tail alone. */
static inline u_send_t to_send_tail(const char *transfer, const void *tail, uint32_t tail_len)
{
	return (u_send_t){.transfer = transfer, .space = &space_, .tail = tail, .tail_len = tail_len};
}

/* By m_; the answer is in sent_. */
static inline kv_status_t send_it(u_send_t send)
{
	return u_send(&u_, m_, &send, &sent_);
}

static inline kv_status_t send_more(uint32_t n, uint32_t groups, int last)
{
	u_send_t send = to_send("t", n, groups, last);

	send.number = sent_.number;

	return send_it(send);
}

static inline kv_status_t send_first(const char *transfer, uint32_t n, uint32_t groups, int last)
{
	return send_it(to_send(transfer, n, groups, last));
}

static inline kv_status_t recv(u_member_t *m, const char *transfer, uint32_t timeout_ms)
{
	return u_recv(&u_, m, &space_, transfer, timeout_ms, &got_);
}

/* The last HANDOVER that the member got of this number; NULL: none. */
static inline const kv_msg_handover_t *last_notice(const u_member_t *m, uint64_t number)
{
	for (uint32_t i = u_.notice_count; i > 0; i--) {
		const u_notice_t *notice = &u_.notices[i - 1];

		if (notice->member == m->id && notice->code == KV_CODE_HANDOVER &&
		    notice->msg.handover.number == number) {
			return &notice->msg.handover;
		}
	}

	return NULL;
}

static inline void check_notice(const u_member_t *m, uint64_t number, kv_handover_state_t state, uint32_t n,
				kv_status_t status)
{
	const kv_msg_handover_t *notice = last_notice(m, number);

	assert_non_null(notice);
	assert_int_equal(notice->state, state);
	assert_int_equal(notice->n, n);
	assert_int_equal(notice->status, status);
}

static inline void evict_all(void)
{
	u_evict_all(&u_, KV_TIER_CPU);
}

static inline void advance(uint64_t ns)
{
	kv_test_advance(&u_.env, ns);
	tick_and_check(2);
}

static inline uint64_t metric(kv_metric_t id)
{
	return kv_metric_get(&u_.metrics, id);
}

#endif
