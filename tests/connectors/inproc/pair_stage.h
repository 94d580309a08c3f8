/* pair_stage.h -- what the tests of two engines share: a daemon, a producer, a consumer, and a prompt of theirs. */
#ifndef TESTS_CONNECTORS_PAIR_STAGE_H
#define TESTS_CONNECTORS_PAIR_STAGE_H

#include "connectors/inproc/pair.h"
#include "engine/check.h"
#include "kv_cmocka.h"
#include "kv_test.h"

#include <unistd.h>

static side_t producer, consumer;
static pair_prompt_t from, to;

static inline void open_pair(void)
{
	side_open(&producer, the_rig.socket, (side_options_t){.roles = KVX_PRODUCER});
	side_open(&consumer, the_rig.socket, (side_options_t){.roles = KVX_CONSUMER});
}

static inline int begin_test(void **state)
{
	(void)begin_rig(state);
	rig_start(&the_rig);
	open_pair();

	return 0;
}

/* Fails the test when a lease, a put or a hand-over is left. */
static inline int end_test(void **state)
{
	side_close(&producer);
	side_close(&consumer);
	KV_AWAIT(!the_rig.pid || rig_counter(&the_rig, "kvd_handovers") == 0);

	return end_rig(state);
}

/* Conversation c of n tokens: where the producer has it, and where the consumer wants it. */
static inline void set_prompt(uint32_t c, uint32_t n)
{
	pair_prompt_init(&from, c, n, 0);
	pair_prompt_init(&to, c, n, 30);
}

static inline kvx_recv_t *start_recv(const char *transfer, uint32_t deadline_ms)
{
	kvx_recv_t *recv;

	to.prefix.deadline_ms = deadline_ms;
	assert_int_equal(kvx_recv(consumer.kvx, transfer, &to.prefix, &recv, NULL), KVC_PENDING);

	return recv;
}

/* To the end, freed. What it says is there is there. */
static inline kvx_recv_result_t finish_recv(kvx_recv_t *recv)
{
	kvx_recv_result_t result = {.struct_size = sizeof result};

	pair_await_recv(&consumer, producer.kvx ? &producer : NULL, recv, &result);
	assert_true(side_holds(&consumer, &to, result.tokens));
	assert_true(side_is_untouched(&consumer, &to, to.n_tokens));
	assert_true(result.cause == KVC_OK || !result.tail);
	kvx_recv_end(recv);

	return result;
}

static inline void finish_send(kvx_send_t *send, kvc_status_t status)
{
	kvx_send_result_t result = {.struct_size = sizeof result};

	pair_await_send(&producer, consumer.kvx ? &consumer : NULL, send, &result);
	assert_int_equal(result.status, status);
	assert_true(result.copied);
	kvx_send_end(send);
}

/* An id that was not used before: the daemon may hear of the end of a hand-over after the begin of the next one. */
static inline const char *next_id(void)
{
	static char id[32];
	static uint32_t number;

	(void)snprintf(id, sizeof id, "hand-over %u", number++);

	return id;
}

#endif
