/* Who is served next: namespaces in turn, on a clock that the pieces of work move. */
#include "io/base/fair.h"

#include "kv_cmocka.h"
#include "kv_test.h"

#define FLOWS   6u
#define SOURCES 40u            /* of each flow */
#define PIECE   UINT64_C(9000) /* the longest one, in ns */
#define OTHERS  ((uint64_t)FLOWS - 1)

typedef struct piece_source {
	kvd_source_t source; /* first: it is what the queue knows */
	uint32_t left;       /* pieces it has to do */
	uint32_t done;
} piece_source_t;

static kv_test_env_t t;
static kvd_fair_t fair;
static kvd_flow_t flow[FLOWS];
static piece_source_t sources[FLOWS][SOURCES];
static kv_test_rng_t rng;
static const kvd_flow_t *first; /* served since this was NULL */
static uint64_t time_of[FLOWS]; /* that pieces took */

static int do_piece(kvd_host_t *host, kvd_source_t *source, uint32_t events)
{
	piece_source_t *of = (piece_source_t *)source;
	uint64_t ns = 1 + kv_test_below(&rng, PIECE);

	(void)host;
	(void)events;
	first = first ? first : source->flow;
	of->left--;
	of->done++;
	t.now_ns += ns;
	time_of[source->flow - flow] += ns;

	return of->left > 0;
}

static void stage(void)
{
	kv_test_env_init(&t);
	rng = (kv_test_rng_t){kv_test_rand(&t.rng)};
	memset(&fair, 0, sizeof fair);
	memset(flow, 0, sizeof flow);
	memset(sources, 0, sizeof sources);
	memset(time_of, 0, sizeof time_of);
	for (uint32_t f = 0; f < FLOWS; f++) {
		for (uint32_t i = 0; i < SOURCES; i++) {
			sources[f][i].source = (kvd_source_t){.ready = do_piece, .fd = -1, .flow = &flow[f]};
		}
	}
}

static void need(uint32_t f, uint32_t i, uint32_t pieces)
{
	sources[f][i].left += pieces;
	kvd_fair_add(&fair, &sources[f][i].source, 1, t.now_ns);
}

/* It asks while others are served, at any moment: what is begun is done, and no other namespace has more than a quantum
 * and a piece before it. */
KV_TEST(p8_one_request_waits_for_a_quantum_of_each_other_tenant)
{
	stage();
	for (uint32_t f = 1; f < FLOWS; f++) {
		for (uint32_t i = 0; i < SOURCES; i++) {
			need(f, i, UINT32_MAX / 2);
		}
	}
	for (uint32_t round = 0; round < 2000; round++) {
		uint64_t asked = t.now_ns;

		kvd_fair_serve(&fair, NULL,
			       &t.env); /* it has asked meanwhile: the sockets are looked at once an iteration */
		assert_in_range(t.now_ns - asked, OTHERS, OTHERS * (KVD_QUANTUM_NS + PIECE));
		need(0, round % SOURCES, 1);
		first = NULL;
		kvd_fair_serve(&fair, NULL, &t.env);
		assert_ptr_equal(first, &flow[0]); /* before those that have had their quantum */
		assert_int_equal(sources[0][round % SOURCES].left, 0);
	}
}

KV_TEST(p8_namespaces_with_enough_to_do_have_the_same_time)
{
	stage();
	for (uint32_t f = 0; f < FLOWS; f++) { /* one connection, or many */
		for (uint32_t i = 0; i < (f == 0 ? 1 : SOURCES); i++) {
			need(f, i, UINT32_MAX / 2);
		}
	}
	for (uint32_t round = 0; round < 1000; round++) {
		kvd_fair_serve(&fair, NULL, &t.env);
	}
	for (uint32_t f = 0; f < FLOWS; f++) {
		assert_in_range(time_of[f], 1000 * KVD_QUANTUM_NS, 1000 * (KVD_QUANTUM_NS + PIECE));
	}
}

/* Against a model: what is queued is served, what is taken out is not, and nothing is lost. */
KV_TEST(p5_every_source_that_is_ready_is_served)
{
	uint64_t asked = 0, done = 0, taken = 0;

	stage();
	for (uint32_t step = 0; step < 20000; step++) {
		uint32_t f = (uint32_t)(kv_test_below(&rng, FLOWS)), i = (uint32_t)(kv_test_below(&rng, SOURCES));
		piece_source_t *of = &sources[f][i];

		switch (kv_test_below(&rng, 8)) {
		case 0:
			kvd_fair_serve(&fair, NULL, &t.env);
			break;
		case 1:
			taken += of->left;
			of->left = 0;
			kvd_fair_remove(&of->source);
			break;
		default:
			need(f, i, 1 + step % 3);
			asked += 1 + step % 3;
			break;
		}
	}
	while (kvd_fair_has_ready(&fair)) {
		kvd_fair_serve(&fair, NULL, &t.env);
	}
	for (uint32_t f = 0; f < FLOWS; f++) {
		for (uint32_t i = 0; i < SOURCES; i++) {
			assert_int_equal(sources[f][i].left, 0);
			assert_false(sources[f][i].source.queued);
			done += sources[f][i].done;
		}
	}
	assert_true(taken > 0 && asked > taken);
	assert_int_equal(done, asked - taken);
}
