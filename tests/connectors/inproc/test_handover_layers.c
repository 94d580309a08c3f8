/* Hand-overs of libkvx layer by layer, between two engines on a real daemon: what the consumer has after each layer,
 * and the end of either side, of the put and of the daemon between two layers. */
#include "connectors/inproc/pair_stage.h"

#include "kv/env.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define T PAIR_TOKENS

static uint32_t ttl_ms;      /* of what is sent */
static uint32_t layers_done; /* of the pass */

/* ---- what goes wrong below libkvx ------------------------------------------------------------ */

static _Atomic uint32_t
	damaged_layer;             /* of the first block of a put, before its digests are handed in; UINT32_MAX: none */
static _Atomic int has_no_staging; /* for layers */
static int has_no_lease;           /* the put has ended when the consumer asks for it */
static uint32_t leases_asked;
static _Atomic uint32_t layers_handed_in;

kvc_status_t __real_kvc_put_layers(kvc_put_t *put, uint32_t layers);
kvc_status_t __wrap_kvc_put_layers(kvc_put_t *put, uint32_t layers);
kvc_status_t __wrap_kvc_put_layers(kvc_put_t *put, uint32_t layers)
{
	void *data = NULL;

	if (layers == damaged_layer + 1u && kvc_put_block(put, 0, &data) == KVC_OK) {
		((uint8_t *)data)[damaged_layer * PAIR_PAYLOAD / 2u + 123] ^= 0x10; /* of its first head */
	}
	layers_handed_in++;

	return __real_kvc_put_layers(put, layers);
}

kvc_status_t __real_kvc_put_layer_digests(kvc_put_t *put, uint32_t i, uint32_t first, uint32_t count,
					  const uint64_t *leaves);
kvc_status_t __wrap_kvc_put_layer_digests(kvc_put_t *put, uint32_t i, uint32_t first, uint32_t count,
					  const uint64_t *leaves);
kvc_status_t __wrap_kvc_put_layer_digests(kvc_put_t *put, uint32_t i, uint32_t first, uint32_t count,
					  const uint64_t *leaves)
{
	return has_no_staging ? KVC_ERR_LIMIT : __real_kvc_put_layer_digests(put, i, first, count, leaves);
}

kvc_status_t __real_kvc_handover_lease(kvc_handover_t *handover, uint32_t ttl_ms, kvc_lease_t **p_lease);
kvc_status_t __wrap_kvc_handover_lease(kvc_handover_t *handover, uint32_t ttl_ms, kvc_lease_t **p_lease);
kvc_status_t __wrap_kvc_handover_lease(kvc_handover_t *handover, uint32_t ttl_ms, kvc_lease_t **p_lease)
{
	leases_asked++;

	return has_no_lease ? KVC_MISS : __real_kvc_handover_lease(handover, ttl_ms, p_lease);
}

/* ---- what a test has ------------------------------------------------------------------------- */

static int begin_layers_test(void **state)
{
	ttl_ms = 0;
	damaged_layer = UINT32_MAX;
	has_no_staging = has_no_lease = 0;
	leases_asked = 0;
	layers_handed_in = 0;

	return begin_test(state);
}

static kvc_status_t send_whole(kvx_send_t **p_send, const char *transfer, uint32_t before, uint32_t computed, int last)
{
	kvx_chunk_t chunk = pair_chunk(&from, transfer, computed, last);

	chunk.ttl_ms = ttl_ms;
	side_compute(&producer, &from, before, computed);

	return kvx_send(producer.kvx, &chunk, p_send);
}

/* A forward pass over tokens [computed, computing) has done that number of layers. */
static kvx_chunk_t pass_chunk(uint32_t computed, uint32_t computing, uint32_t layers)
{
	kvx_chunk_t chunk = pair_chunk(&from, NULL, computed, 0);

	chunk.ttl_ms = ttl_ms;
	chunk.computing = computing;
	chunk.layers = layers;

	return chunk;
}

static kvc_status_t send_layer(kvx_send_t *send, uint32_t computed, uint32_t computing, uint32_t layers)
{
	const kvx_chunk_t chunk = pass_chunk(computed, computing, layers);

	if (layers > 0) {
		side_compute_layer(&producer, &from, computed, computing, layers - 1u);
	}
	layers_done = layers;

	return kvx_send(producer.kvx, &chunk, &send);
}

static kvx_recv_result_t state_of(const kvx_recv_t *recv)
{
	kvx_recv_result_t result = {.struct_size = sizeof result};

	(void)kvx_recv_state(recv, &result);

	return result;
}

/* Until the consumer has that number of layers of the blocks before `blocks`, and then not one more. */
static void await_layers(const kvx_recv_t *recv, uint32_t blocks, uint32_t layers)
{
	for (uint32_t i = 0; i < PAIR_MS && state_of(recv).layers < layers; i++) {
		pair_poll(producer.kvx ? &producer : NULL, &consumer, 1);
	}
	pair_poll(producer.kvx ? &producer : NULL, &consumer, 5);
	assert_int_equal(state_of(recv).layers, layers);
	assert_int_equal(state_of(recv).layer_blocks, blocks);
	assert_true(side_holds_layers(&consumer, &to, blocks * T, layers));
}

/* A hand-over of 12 blocks: three whole, then the first `layers` layers of a pass over six more. */
static kvx_send_t *begin_pass(const char *transfer, const kvx_recv_t *recv, uint32_t layers)
{
	kvx_send_t *send = NULL;

	assert_int_equal(send_whole(&send, transfer, 0, 3 * T, 0), KVC_PENDING);
	pair_await_blocks(&consumer, &producer, recv, 3);
	for (uint32_t l = 0; l <= layers; l++) {
		assert_int_equal(send_layer(send, 3 * T, 9 * T, l), KVC_PENDING);
		pair_poll(&producer, &consumer, 2);
	}
	if (layers > 0) {
		await_layers(recv, 9, layers);
	}

	return send;
}

/* The pass ends, and the prompt. */
static void end_pass(kvx_send_t *send)
{
	for (uint32_t l = layers_done; l < PAIR_LAYERS; l++) {
		side_compute_layer(&producer, &from, 3 * T, 9 * T, l);
	}
	assert_int_equal(send_whole(&send, NULL, 9 * T, from.n_tokens, 1), KVC_PENDING);
}

/* Blocks of the prompt that others find. */
static uint32_t others_find(side_t *other)
{
	static pair_prompt_t theirs;
	kvx_load_result_t result = {.struct_size = sizeof result};
	kvx_prefix_t prefix;
	kvx_load_t *load;

	pair_prompt_init(&theirs, from.conversation, from.n_tokens, 0);
	prefix = pair_prefix(&theirs, 0);
	if (kvx_load_prefix(other->kvx, &prefix, &load, &result) != KVC_PENDING) {
		return 0;
	}
	for (uint32_t i = 0; i < PAIR_MS && kvx_load_state(load, &result) == KVC_PENDING; i++) {
		pair_poll(other, NULL, 1);
	}
	kvx_load_end(load);

	return result.blocks;
}

/* ---- what arrives ---------------------------------------------------------------------------- */

/* All layers are there while the pass is not announced as over, and nobody else has seen one of them. */
static void p1_p3_layers_are_in_the_consumers_cache_during_the_pass(void **state)
{
	kvx_recv_result_t result;
	kvx_recv_t *recv;
	kvx_send_t *send;
	side_t other;

	(void)state;
	side_open(&other, rig.socket, KVX_CONSUMER);
	set_prompt(1, 12 * T + 5);
	recv = start_recv("layers", 0);
	send = begin_pass("layers", recv, 0);
	assert_int_equal(state_of(recv).layers, 0);
	for (uint32_t layers = 1; layers < PAIR_LAYERS; layers++) {
		assert_int_equal(send_layer(send, 3 * T, 9 * T, layers), KVC_PENDING);
		await_layers(recv, 9, layers);
		assert_int_equal(state_of(recv).blocks, 3);
		assert_int_equal(others_find(&other), 3);
	}
	assert_int_equal(send_layer(send, 3 * T, 9 * T, PAIR_LAYERS), KVC_PENDING);
	pair_await_blocks(&consumer, &producer, recv, 9);
	assert_int_equal(state_of(recv).layer_blocks, 0); /* they are whole */
	assert_true(side_holds(&consumer, &to, 9 * T));
	assert_int_equal(others_find(&other), 9);

	/* The next pass reaches into the partial block, which comes whole. */
	for (uint32_t layers = 0; layers <= PAIR_LAYERS; layers++) {
		assert_int_equal(send_layer(send, 9 * T, 12 * T + 5, layers), KVC_PENDING);
		if (layers > 0 && layers < PAIR_LAYERS) {
			await_layers(recv, 12, layers);
		}
	}
	pair_await_blocks(&consumer, &producer, recv, 12);
	assert_int_equal(send_whole(&send, NULL, 12 * T + 5, 12 * T + 5, 1), KVC_PENDING);
	result = finish_recv(recv);
	assert_int_equal(result.cause, KVC_OK);
	assert_int_equal(result.tokens, 12 * T + 5);
	assert_int_equal(result.cpu_tokens, 12 * T + 5);
	finish_send(send, KVC_OK);
	assert_int_equal(leases_asked, 2);
	assert_int_equal(layers_handed_in, 2 * PAIR_LAYERS);
	side_close(&other);
}

/* A consumer that comes late has the layers that are there at once; one that wants less has no more. */
static void p1_a_consumer_may_come_between_two_layers(void **state)
{
	kvx_send_t *send = NULL;
	kvx_recv_t *recv;

	(void)state;
	set_prompt(2, 12 * T);
	assert_int_equal(send_whole(&send, "late", 0, 3 * T, 0), KVC_PENDING);
	for (uint32_t i = 0; i < 2; i++) {
		pair_poll(&producer, NULL, 20);
		assert_int_equal(send_layer(send, 3 * T, 9 * T, 1 + i), KVC_PENDING);
	}
	pair_poll(&producer, NULL, 20);
	pair_prompt_init(&to, 2, 7 * T, 30);
	recv = start_recv("late", 0);
	await_layers(recv, 7, 2);
	end_pass(send);
	assert_int_equal(finish_recv(recv).cause, KVC_OK);
	finish_send(send, KVC_OK);
}

/* Whatever keeps layers from coming, whole blocks come. */
static void p1_what_cannot_come_by_layers_comes_whole(void **state)
{
	(void)state;
	for (uint32_t i = 0; i < 2; i++) {
		kvx_recv_t *recv;
		kvx_send_t *send;
		const char *transfer = next_id();

		has_no_staging = i == 0;
		has_no_lease = i == 1;
		set_prompt(3 + i, 12 * T);
		recv = start_recv(transfer, 0);
		send = begin_pass(transfer, recv, 0);
		assert_int_equal(send_layer(send, 3 * T, 9 * T, 1), KVC_PENDING);
		for (uint32_t polls = 0; polls < PAIR_MS && leases_asked <= i; polls++) {
			pair_poll(&producer, &consumer, 1);
		}
		assert_int_equal(leases_asked, 1 + i);
		pair_poll(&producer, &consumer, 20);
		assert_int_equal(state_of(recv).layers, 0);
		end_pass(send);
		assert_int_equal(finish_recv(recv).cause, KVC_OK);
		finish_send(send, KVC_OK);
	}
	assert_int_equal(layers_handed_in, PAIR_LAYERS); /* of the second */
}

/* One flipped bit in the memory of one layer: it is never used, nor are those after it. */
static void p1_a_damaged_layer_ends_the_receive_before_it(void **state)
{
	(void)state;
	for (uint32_t layer = 0; layer < PAIR_LAYERS; layer++) {
		kvx_recv_result_t result;
		kvx_recv_t *recv;
		kvx_send_t *send;
		const char *transfer = next_id();

		damaged_layer = layer;
		set_prompt(10 + layer, 12 * T);
		recv = start_recv(transfer, 0);
		send = begin_pass(transfer, recv, layer);
		assert_int_equal(send_layer(send, 3 * T, 9 * T, layer + 1), KVC_PENDING);
		result = finish_recv(recv);
		damaged_layer = UINT32_MAX;
		assert_int_equal(result.cause, KVC_ERR_CORRUPT);
		assert_int_equal(result.blocks, 3);
		assert_int_equal(result.layers, layer);
		kvx_send_end(send);
	}
	assert_int_equal(side_stats(&consumer).recvs_failed, PAIR_LAYERS);
}

/* ---- either side gives up -------------------------------------------------------------------- */

/* Its blocks are its own at once; what the consumer has verified stays, and nobody finds a block of the pass. */
static void p7_a_producer_that_aborts_leaves_the_layers_it_has_sent(void **state)
{
	(void)state;
	for (uint32_t layers = 0; layers < PAIR_LAYERS; layers++) {
		kvx_recv_result_t result;
		kvx_recv_t *recv;
		kvx_send_t *send;
		const char *transfer = next_id();

		set_prompt(20 + layers, 12 * T);
		recv = start_recv(transfer, 0);
		send = begin_pass(transfer, recv, layers);
		kvx_send_end(send);
		pair_prompt_init(&from, 99, 12 * T, 0);
		side_compute(&producer, &from, 0, from.n_tokens);
		result = finish_recv(recv);
		assert_int_equal(result.cause, KVC_ERR_ABORTED);
		assert_int_equal(result.blocks, 3);
		assert_int_equal(result.layers, layers);
		assert_int_equal(result.layer_blocks, layers ? 9 : 0);
		pair_poll(&producer, &consumer, 20);
		set_prompt(20 + layers, 12 * T);
		assert_int_equal(others_find(&consumer), 3);
	}
}

/* Its blocks are its own again, and the next consumer has all of it. */
static void p7_a_consumer_that_aborts_between_layers_gives_it_back(void **state)
{
	(void)state;
	for (uint32_t layers = 0; layers < PAIR_LAYERS; layers++) {
		kvx_recv_t *recv;
		kvx_send_t *send;
		const char *transfer = next_id();

		set_prompt(30 + layers, 12 * T);
		recv = start_recv(transfer, 0);
		send = begin_pass(transfer, recv, layers);
		kvx_recv_end(recv);
		pair_prompt_init(&to, 77, 12 * T, 30);
		side_compute(&consumer, &to, 0, to.n_tokens);
		if (layers > 0) {
			assert_int_equal(send_layer(send, 3 * T, 9 * T, layers + 1), KVC_PENDING);
		}
		pair_poll(&producer, &consumer, 5);
		assert_true(side_holds(&consumer, &to, to.n_tokens));
		pair_prompt_init(&to, 30 + layers, 12 * T, 30);
		recv = start_recv(transfer, 0);
		end_pass(send);
		assert_int_equal(finish_recv(recv).cause, KVC_OK);
		finish_send(send, KVC_OK);
	}
}

static void p5_a_pass_that_does_not_go_on_is_a_miss_at_the_deadline(void **state)
{
	kvx_recv_result_t result;
	kvx_recv_t *recv;
	kvx_send_t *send;

	(void)state;
	set_prompt(40, 12 * T);
	recv = start_recv("stops", 3000);
	send = begin_pass("stops", recv, 1);
	result = finish_recv(recv);
	assert_int_equal(result.cause, KVC_ERR_TIMEOUT);
	assert_int_equal(result.blocks, 3);
	assert_int_equal(result.layers, 1);
	assert_int_equal(kvx_send_state(send, NULL), KVC_PENDING);
	end_pass(send); /* for another consumer */
	assert_int_equal(finish_recv(start_recv("stops", 0)).cause, KVC_OK);
	finish_send(send, KVC_OK);
}

static void p7_a_daemon_that_dies_between_two_layers_is_a_miss(void **state)
{
	kvx_recv_result_t result;
	kvx_recv_t *recv;
	kvx_send_t *send;

	(void)state;
	set_prompt(41, 12 * T);
	recv = start_recv("dies", 0);
	send = begin_pass("dies", recv, 2);
	rig_kill(&rig);
	(void)send_layer(send, 3 * T, 9 * T, 3);
	result = finish_recv(recv);
	assert_int_equal(result.cause, KVC_ERR_REVOKED);
	assert_int_equal(result.blocks, 3);
	assert_int_equal(result.layers, 2);
	kvx_send_end(send);
}

/* Both engines detach between two layers, and the next ones begin anew. */
static void p4_engines_detached_amid_a_pass_leave_nothing(void **state)
{
	const char *transfer;
	kvx_recv_t *recv;
	kvx_send_t *send;

	(void)state;
	for (uint32_t i = 0; i < 2; i++) {
		transfer = next_id();
		ttl_ms = 500; /* the reason is kept that long for another consumer */
		set_prompt(42 + i, 12 * T);
		recv = start_recv(transfer, 0);
		(void)begin_pass(transfer, recv, 1);
		side_close(i ? &producer : &consumer);
		pair_poll(i ? &consumer : &producer, NULL, 5);
		side_close(i ? &consumer : &producer);
		open_pair();
		pair_poll(&producer, &consumer, 20);
	}
	ttl_ms = 0;
	set_prompt(44, 12 * T);
	recv = start_recv("again", 0);
	send = begin_pass("again", recv, 2);
	end_pass(send);
	assert_int_equal(finish_recv(recv).cause, KVC_OK);
	finish_send(send, KVC_OK);
}

/* ---- refused --------------------------------------------------------------------------------- */

static void p10_a_pass_that_is_not_sound_changes_nothing(void **state)
{
	kvx_recv_t *recv;
	kvx_send_t *send;
	kvx_chunk_t bad[6];

	(void)state;
	set_prompt(50, 12 * T);
	recv = start_recv("bad", 0);
	send = begin_pass("bad", recv, 2);
	bad[0] = pass_chunk(3 * T, 9 * T, 1);                /* back */
	bad[1] = pass_chunk(3 * T, 9 * T, PAIR_LAYERS + 1u); /* too many */
	bad[2] = pass_chunk(3 * T, 8 * T, 2);                /* shorter */
	bad[3] = pass_chunk(3 * T, 13 * T, 2);               /* beyond the prompt */
	bad[4] = pass_chunk(9 * T, 9 * T, 0);                /* nothing is computed */
	bad[5] = pass_chunk(3 * T, 9 * T, 3);
	bad[5].last = 1;
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		assert_int_equal(kvx_send(producer.kvx, &bad[i], &send), KVC_ERR_ARG);
	}
	await_layers(recv, 9, 2);
	end_pass(send);
	assert_int_equal(finish_recv(recv).cause, KVC_OK);
	finish_send(send, KVC_OK);
}

/* What lies behind an older caller's struct is not read. */
static void p10_a_chunk_of_an_older_caller_has_no_pass(void **state)
{
	kvx_chunk_t chunk;
	kvx_send_t *send = NULL;

	(void)state;
	set_prompt(51, 6 * T);
	side_compute(&producer, &from, 0, 6 * T);
	chunk = pair_chunk(&from, "old", 6 * T, 1);
	chunk.computing = chunk.layers = 0x5a5a5a5a;
	chunk.struct_size = offsetof(kvx_chunk_t, layers);
	assert_int_equal(kvx_send(producer.kvx, &chunk, &send), KVC_PENDING);
	finish_send(send, KVC_OK);
	assert_int_equal(finish_recv(start_recv("old", 0)).cause, KVC_OK);
}

/* ---- at random ------------------------------------------------------------------------------- */

#define ROUNDS 60u

typedef enum end { ENDS_WELL, PRODUCER_ABORTS, CONSUMER_ABORTS, DAMAGED, ENDS } end_t;

/* Passes of random size, with random polls between their layers. 1: the producer aborts in one of them. */
static int send_at_random(kvx_send_t **p_send, const char *transfer, uint64_t *random, end_t end)
{
	const uint32_t stop = end == PRODUCER_ABORTS ? below(random, from.n_tokens) : UINT32_MAX;
	uint32_t computed = 0, before;

	assert_int_equal(send_whole(p_send, transfer, 0, 0, 0), KVC_PENDING);
	while (computed < from.n_tokens) {
		before = computed;
		computed += 1 + below(random, 120);
		computed = computed < from.n_tokens ? computed : from.n_tokens;
		for (uint32_t layers = 0; layers <= PAIR_LAYERS; layers++) {
			if (send_layer(*p_send, before, computed, layers) != KVC_PENDING ||
			    (stop < computed && below(random, 3) == 0)) {
				return 1;
			}
			pair_poll(&producer, &consumer, below(random, 4));
		}
		if (kvx_send(producer.kvx, &(kvx_chunk_t){0}, p_send) != KVC_ERR_ARG ||
		    send_whole(p_send, NULL, computed, computed, computed == from.n_tokens) != KVC_PENDING) {
			return 1;
		}
	}

	return 0;
}

static void hand_over_at_random(uint64_t *random, uint32_t i, uint32_t *ends)
{
	const end_t end = (end_t)below(random, ENDS);
	const char *transfer = next_id();
	kvx_recv_result_t result;
	kvx_send_t *send = NULL;
	kvx_recv_t *recv;
	int aborted;

	set_prompt(1000 + i, 20 + below(random, PAIR_PROMPT * T - 20));
	for (uint32_t l = 0; l < PAIR_LAYERS; l++) {
		memset(consumer.base[l], 0, (size_t)PAIR_BLOCKS * PAIR_PAYLOAD);
		memset(producer.base[l], 0, (size_t)PAIR_BLOCKS * PAIR_PAYLOAD);
	}
	damaged_layer = end == DAMAGED ? below(random, PAIR_LAYERS) : UINT32_MAX;
	recv = start_recv(transfer, 0);
	if (end == CONSUMER_ABORTS && below(random, 2)) {
		kvx_recv_end(recv);
		recv = NULL;
	}
	aborted = send_at_random(&send, transfer, random, end);
	damaged_layer = UINT32_MAX;
	if (aborted) {
		kvx_send_end(send);
		send = NULL;
	}
	if (end == CONSUMER_ABORTS && recv) {
		kvx_recv_end(recv);
		recv = NULL;
	}
	recv = recv ? recv : start_recv(transfer, 0);
	result = finish_recv(recv);
	assert_true(aborted || end == DAMAGED || result.cause == KVC_OK);
	assert_int_equal(result.cause == KVC_OK, result.tokens == to.n_tokens);
	ends[end] += result.cause == KVC_OK;
	if (send) {
		pair_await_send(&producer, &consumer, send,
				&(kvx_send_result_t){.struct_size = sizeof(kvx_send_result_t)});
		kvx_send_end(send);
	}
}

static void p1_p4_passes_of_any_size_that_end_anyhow_change_no_byte(void **state)
{
	uint64_t random = kv_test_seed();
	uint32_t ends[ENDS] = {0};

	(void)state;
	for (uint32_t i = 0; i < ROUNDS; i++) {
		hand_over_at_random(&random, i, ends);
	}
	assert_true(ends[ENDS_WELL] > 0 && layers_handed_in > ROUNDS);
	print_message("whole: %u of those that end well, %u of the damaged, %u layers, %u leases\n", ends[ENDS_WELL],
		      ends[DAMAGED], layers_handed_in, leases_asked);
}

/* ---- a producer that is killed --------------------------------------------------------------- */

/* Hands two layers over, then does nothing. */
static void run_producer(void)
{
	kvx_send_t *send = NULL;

	side_open(&producer, rig.socket, KVX_PRODUCER);
	(void)send_whole(&send, "killed", 0, 3 * T, 0);
	for (uint32_t layers = 0; layers <= 2; layers++) {
		pair_poll(&producer, NULL, 20);
		(void)send_layer(send, 3 * T, 9 * T, layers);
	}
	for (;;) {
		pair_poll(&producer, NULL, 1);
	}
}

static void p4_p7_a_producer_killed_between_layers_is_a_miss_at_once(void **state)
{
	kvx_recv_result_t result;
	kvx_recv_t *recv;
	pid_t pid;

	(void)state;
	side_close(&producer);
	side_close(&consumer);
	set_prompt(60, 12 * T);
	pid = fork(); /* before this process attaches */
	assert_true(pid >= 0);
	if (pid == 0) {
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		run_producer();
	}
	side_open(&consumer, rig.socket, KVX_CONSUMER);
	recv = start_recv("killed", 0);
	await_layers(recv, 9, 2);
	assert_int_equal(kill(pid, SIGKILL), 0);
	assert_int_equal(waitpid(pid, NULL, 0), pid);
	result = finish_recv(recv);
	assert_int_equal(result.cause, KVC_ERR_PRODUCER_LOST);
	assert_int_equal(result.blocks, 3);
	assert_int_equal(result.layers, 2);
	assert_int_equal(result.layer_blocks, 9);
	side_open(&producer, rig.socket, KVX_PRODUCER);
}

#define LAYERS_TEST(function) cmocka_unit_test_setup_teardown(function, begin_layers_test, end_test)

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		LAYERS_TEST(p1_p3_layers_are_in_the_consumers_cache_during_the_pass),
		LAYERS_TEST(p1_a_consumer_may_come_between_two_layers),
		LAYERS_TEST(p1_what_cannot_come_by_layers_comes_whole),
		LAYERS_TEST(p1_a_damaged_layer_ends_the_receive_before_it),
		LAYERS_TEST(p7_a_producer_that_aborts_leaves_the_layers_it_has_sent),
		LAYERS_TEST(p7_a_consumer_that_aborts_between_layers_gives_it_back),
		LAYERS_TEST(p5_a_pass_that_does_not_go_on_is_a_miss_at_the_deadline),
		LAYERS_TEST(p7_a_daemon_that_dies_between_two_layers_is_a_miss),
		LAYERS_TEST(p4_engines_detached_amid_a_pass_leave_nothing),
		LAYERS_TEST(p10_a_pass_that_is_not_sound_changes_nothing),
		LAYERS_TEST(p10_a_chunk_of_an_older_caller_has_no_pass),
		LAYERS_TEST(p1_p4_passes_of_any_size_that_end_anyhow_change_no_byte),
		LAYERS_TEST(p4_p7_a_producer_killed_between_layers_is_a_miss_at_once),
	};

	if (argc != 2) {
		return 64;
	}
	program = argv[1];

	return cmocka_run_group_tests_name("kvx.handover-layers", tests, NULL, NULL);
}
