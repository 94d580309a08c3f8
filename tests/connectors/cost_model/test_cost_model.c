/* The cost model: what it learns from times, and decides from them, with a clock of the test's own, on the H200 and the
 * model of 8 billion parameters of docs/decisions/015. */
#include "cost_model/cost_model.h"
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kv/types.h"

#define BLOCK 16u
#define TOKEN 131072u /* bytes */
#define CHUNK 8192u   /* tokens of a step */
#define MS    UINT64_C(1000000)
#define S     UINT64_C(1000000000)

static kvx_cost_model_t model;
static uint64_t now;
static kv_test_rng_t rng;

static void begin(void)
{
	kvx_cost_model_init(&model, BLOCK, TOKEN);
	now = 100u * S;
	rng.state = 7;
}

/* Within two percent of it. */
static double about(double x)
{
	return x * (0.98 + (double)kv_test_below(&rng, 401u) / 10000.0);
}

static double step_ns(uint32_t before, uint32_t tokens)
{
	return 1e6 * (3.8 + 0.02276 * tokens + 4.18e-7 * tokens * (2.0 * before + tokens));
}

/* Bytes a nanosecond; 0: there is no such tier. */
static double load_ns(uint32_t tokens, double rate)
{
	return tokens > 0 && rate > 0 ? 2e5 + (double)tokens * TOKEN / rate : 0;
}

static void add_step(uint32_t before, uint32_t tokens, double ns)
{
	kvx_step_work_t work = {0};

	kvx_step_work_add(&work, before, tokens);
	kvx_cost_model_add_step(&model, &work, (uint64_t)ns);
}

static void add_load(uint32_t cpu, uint32_t disk, double ns)
{
	kvx_cost_model_add_load(&model, cpu, disk, (uint64_t)ns, now);
}

/* Tokens [before, end) in chunks, on an engine that is slower by a factor: nanoseconds. */
static double compute(uint32_t before, uint32_t end, double slower, int learn)
{
	double sum = 0;

	for (uint32_t at = before; at < end; at += CHUNK) {
		const uint32_t n = end - at < CHUNK ? end - at : CHUNK;
		const double ns = slower * step_ns(at, n);

		if (learn) {
			add_step(at, n, about(ns));
		}
		sum += ns;
	}

	return sum;
}

static kvx_cost_decision_t decide(uint32_t local, uint32_t cpu, uint32_t disk, uint32_t rest, uint32_t grain)
{
	const kvx_cost_query_t query = {.now_ns = now,
					.local = local,
					.cpu = cpu,
					.disk = disk,
					.total = local + cpu + disk + rest,
					.grain = grain};
	kvx_cost_decision_t answer;

	kvx_cost_model_decide(&model, &query, &answer);
	assert_true(answer.cpu <= cpu && answer.disk <= disk);
	assert_true(answer.disk == 0 || answer.cpu == cpu); /* a prefix */
	assert_true((answer.cpu + answer.disk > 0) == (answer.choice != KVX_RECOMPUTE));

	return answer;
}

static kvx_cost_decision_t query(uint32_t cpu, uint32_t disk)
{
	return decide(0, cpu, disk, 12, BLOCK);
}

/* A prompt that is stored but for `rest` tokens, from question to answer, measured: how much more than computing all of
 * it that takes. */
static double serve(uint32_t cpu, uint32_t disk, uint32_t rest, double disk_rate, double slower)
{
	const kvx_cost_decision_t answer = decide(0, cpu, disk, rest, BLOCK);
	const double load = load_ns(answer.cpu, 50) + load_ns(answer.disk, disk_rate);
	const uint32_t end = cpu + disk + rest;

	if (load > 0) {
		add_load(answer.cpu, answer.disk, about(load));
	}
	now += S;

	return load + compute(answer.cpu + answer.disk, end, slower, 1) - compute(0, end, slower, 0);
}

static void learn_prompts(void)
{
	static const uint32_t lengths[] = {33, 700, 9000, 2000, 1030, 10250, 66000};

	for (uint32_t i = 0; i < KV_COUNT_OF(lengths); i++) {
		(void)compute(0, lengths[i], 1, 1);
	}
}

/* ---- what is known --------------------------------------------------------------------------- */

KV_TEST(p7_computing_is_predicted_from_a_few_prompts)
{
	begin();
	assert_int_equal(kvx_cost_model_compute_ns(&model, 0, 1000), 0);
	learn_prompts();
	add_step(0, 900, 3e9); /* something else had the machine */
	add_step(0, 700, 5e9);
	for (uint32_t n = 512; n <= 131072; n *= 2) {
		const double expected = step_ns(0, n) - step_ns(0, 0);

		assert_in_range(kvx_cost_model_compute_ns(&model, 0, n), (uint64_t)(expected * 0.88),
				(uint64_t)(expected * 1.12));
	}
	/* The same tokens cost more behind others. */
	assert_true(kvx_cost_model_compute_ns(&model, 32768, 1024) >
		    3u * kvx_cost_model_compute_ns(&model, 0, 1024) / 2u);
}

/* What was measured at one length says something about longer ones, unless it is so short that most of the time may be
 * any step's. */
KV_TEST(p7_one_measurement_is_a_proportion)
{
	begin();
	add_step(0, 1000, 30e6);
	for (uint32_t garbage = 0; garbage < 2; garbage++) {
		assert_in_range(kvx_cost_model_compute_ns(&model, 0, 2000), 59u * MS, 61u * MS);
		assert_in_range(kvx_cost_model_compute_ns(&model, 0, 32000), 950u * MS, 970u * MS);
		add_step(0, 0, 30e6);
		add_step(0, 1000, 0);
		add_step(0, 1000, 200e9); /* the machine slept */
		add_load(1000, 0, 200e9);
		add_load(0, 0, 5);
	}
	assert_int_equal(model.cpu.fit.count, 0);

	begin();
	add_step(9000, 100, 6e6);
	assert_in_range(kvx_cost_model_compute_ns(&model, 0, 200), 11u * MS, 13u * MS);
	assert_int_equal(kvx_cost_model_compute_ns(&model, 0, 202), 0);
}

/* ---- measured situations, and what is loaded -------------------------------------------------- */

typedef enum expected { ALL, HEAD, NONE } expected_t; /* HEAD, NONE: and a piece of the rest at most */

typedef struct situation {
	double memory, disk;       /* bytes a nanosecond, measured three times at this length; 0: not at all */
	uint32_t measured;         /* 0: the length of the hit */
	uint32_t local, cpu, tail; /* the hit; tail: its tokens on disk */
	expected_t expected;
} situation_t;

static const situation_t situations[] = {
	/* Memory of a GPU's link always pays, whatever the length; not known yet, it is trusted. */
	{50, 0, 0, 0, 1024, 0, ALL},
	{50, 0, 0, 0, 10240, 0, ALL},
	{50, 0, 1024, 0, 120000, 0, ALL},
	{0, 0, 0, 0, 10240, 0, ALL},
	/* Sixteen hits of 10,250 tokens at once take 400 ms, timed with their waiting; that is why they are not. */
	{3.3, 0, 0, 0, 10240, 0, NONE},
	/* A disk of 2.6 GB/s loses below 32 k tokens, and wins far beyond; behind what the engine has it wins earlier.
	 */
	{50, 2.6, 0, 0, 0, 1024, NONE},
	{50, 2.6, 0, 0, 0, 10240, NONE},
	{50, 2.6, 0, 0, 0, 32768, NONE},
	{50, 2.6, 1024, 0, 0, 32768, NONE},
	{50, 2.6, 1024, 0, 0, 120000, ALL},
	{50, 2.6, 1024, 60000, 0, 4096, ALL},
	{50, 2.6, 1024, 0, 0, 4096, NONE},
	{50, 2.6, 1024, 0, 4096, 6144, HEAD},
	/* One of 1.2 GB/s: 114 ms for 1,030 tokens instead of 29.5, 446 for 10,250 instead of 275. */
	{50, 1.2, 0, 0, 0, 1024, NONE},
	{50, 1.2, 0, 0, 0, 10240, NONE},
	{50, 1.2, 0, 0, 8192, 2048, HEAD},
	/* A fast one, and one that is not known: a byte a nanosecond. */
	{50, 12, 0, 0, 0, 1024, ALL},
	{50, 12, 0, 0, 0, 10240, ALL},
	{50, 12, 1024, 0, 2048, 30720, ALL},
	{50, 0, 0, 0, 0, 10240, NONE},
	{50, 0, 0, 0, 4096, 6144, HEAD},
	/* A head that does not pay alone, and a tail that makes up for it. */
	{3.3, 30, 1024, 0, 1024, 60000, ALL},
};

KV_TEST(p7_measured_situations_are_decided_as_they_were)
{
	for (uint32_t i = 0; i < KV_COUNT_OF(situations); i++) {
		const situation_t *s = &situations[i];
		const uint32_t cpu = s->measured ? s->measured : s->cpu, disk = s->measured ? s->measured : s->tail;
		kvx_cost_decision_t answer;

		begin();
		learn_prompts();
		for (uint32_t k = 0; k < 3; k++) {
			add_load(s->memory > 0 ? cpu : 0, 0, about(load_ns(cpu, s->memory)));
			add_load(0, s->disk > 0 ? disk : 0, about(load_ns(disk, s->disk)));
		}
		answer = decide(s->local, s->cpu, s->tail, 12, BLOCK);
		if (answer.cpu != (s->expected == NONE ? 0 : s->cpu) ||
		    (s->expected == ALL ? answer.disk != s->tail : answer.disk > s->tail / 8u)) {
			fail_msg("situation %u: %u and %u tokens are loaded", i, answer.cpu, answer.disk);
		}
	}
}

/* ---- no hit costs more than 1.02 of a cold prompt --------------------------------------------- */

/* Hits that are served one after another by an engine that has computed prompts before. */
typedef struct series {
	uint32_t cpu, disk[3]; /* tokens of a hit; disk: in turn */
	double rate;           /* of the disk */
	uint32_t hits;
	double most; /* that a hit may cost more than a cold prompt, as a part of it */
} series_t;

KV_TEST(p7_a_hit_on_a_slow_disk_costs_what_a_cold_prompt_does)
{
	static const series_t all[] = {
		{0, {1024, 10240, 32768}, 2.6, 300, 0.02}, /* the first one neither */
		{0, {10240, 32768, 1024}, 2.6, 300, 0.02},  {0, {32768, 1024, 10240}, 2.6, 300, 0.02},
		{4096, {6144, 6144, 6144}, 2.6, 100, -0.2}, {0, {10240, 10240, 10240}, 12, 6, 0.02},
	};

	for (uint32_t i = 0; i < KV_COUNT_OF(all); i++) {
		begin();
		learn_prompts();
		for (uint32_t k = 0; k < all[i].hits; k++) {
			const uint32_t disk = all[i].disk[k % 3], n = all[i].cpu + disk + 12;

			assert_true(serve(all[i].cpu, disk, 12, all[i].rate, 1) <= all[i].most * compute(0, n, 1, 0));
		}
	}
	assert_int_equal(query(0, 10240).disk, 10240); /* the fast one was found by samples */
}

/* An engine whose first request ever is a hit on disk. */
KV_TEST(p7_before_any_measurement_exploration_of_a_disk_is_small)
{
	static const uint32_t cases[][4] = {                    /* memory, disk, rest, loaded of the disk */
					    {0, 1024, 12, 512}, /* the rest is computed, which is measured */
					    {0, 1024, 3000, 1024},
					    {0, 1024, 100, 1024 - 416},
					    {8192, 64, 12, 0}};
	kvx_cost_decision_t answer;

	begin();
	answer = query(8192, 32768);
	assert_int_equal(answer.cpu, 8192);
	assert_in_range((uint64_t)answer.disk * TOKEN, 240u * MS, 250u * MS); /* a byte a nanosecond */
	for (uint32_t i = 0; i < KV_COUNT_OF(cases); i++) {
		assert_int_equal(decide(0, cases[i][0], cases[i][1], cases[i][2], BLOCK).disk, cases[i][3]);
	}
	add_step(8192, 64 + 12, 6e6);
	assert_true(query(0, 1024).disk > 0); /* that was too little */

	begin(); /* hits that are loaded whole or not at all */
	for (uint32_t i = 0; i < 6; i++) {
		assert_int_equal(decide(0, 0, 1024, 6, 0).disk, i % 2 ? 0 : 1024);
	}
	(void)compute(0, 1030, 1, 1);
	assert_int_equal(decide(0, 0, 1024, 6, 0).choice, KVX_RECOMPUTE);
}

/* All of an engine's prompts lie on a disk, also the first ones: it learns what computing takes all the same, and where
 * the disk does not pay, only the first few cost more than a cold prompt, by what was bet. */
KV_TEST(p7_an_engine_with_all_prompts_on_disk_learns_compute_cost)
{
	static const uint32_t lengths[] = {192, 1024, 10240, 32768};
	static const double rates[] = {0.3, 1.2, 2.6};

	for (uint32_t i = 0; i < KV_COUNT_OF(lengths) * KV_COUNT_OF(rates); i++) {
		const uint32_t n = lengths[i / KV_COUNT_OF(rates)];
		const double rate = rates[i % KV_COUNT_OF(rates)];

		if (n > 30000 && rate > 2) {
			continue; /* there it pays, nearly */
		}
		begin();
		for (uint32_t k = 0; k < 50; k++) {
			const double bet = k < 3 ? 1.1 * KVX_COST_EXPLORE_NS / rate : 0;

			assert_true(serve(0, n, 10, rate, 1) <= 0.02 * compute(0, n + 10, 1, 0) + bet);
		}
	}
}

/* Where it does pay, little is left to be computed, once. */
KV_TEST(p7_a_disk_that_pays_is_used_fully_by_the_second_prompt)
{
	static const uint32_t lengths[] = {1024, 10240, 32768};

	for (uint32_t i = 0; i < KV_COUNT_OF(lengths); i++) {
		begin();
		for (uint32_t k = 0; k < 20; k++) {
			const double more = serve(0, lengths[i], 6, 2.6, 50);

			assert_true(k == 0 || more < -0.8 * compute(0, lengths[i] + 6, 50, 0));
		}
	}
}

/* ---- a tier that changes ---------------------------------------------------------------------- */

static void measure(uint32_t times, uint32_t tokens, uint64_t load, uint64_t computing)
{
	for (uint32_t i = 0; i < times; i++) {
		add_load(tokens, 0, (double)load);
		add_step(0, tokens, (double)computing);
	}
}

/* Loads that were measured, as times of 160 ms of computing, and what follows for the next hit. */
KV_TEST(p7_about_equal_does_not_flap)
{
	static const struct {
		uint32_t times;
		uint64_t load_ms;
		kvx_cost_choice_t choice;
		int state_changed;
	} turns[] = {{2, 1600, KVX_LOAD, 0},       /* memory is trusted until it was measured three times */
		     {1, 1600, KVX_RECOMPUTE, 1},  /* */
		     {7, 120, KVX_LOAD, -1},       /* */
		     {7, 136, KVX_LOAD, 0},        /* eight to nine tenths: as it was */
		     {7, 150, KVX_RECOMPUTE, 1},   /* */
		     {7, 136, KVX_RECOMPUTE, 0},   /* */
		     {7, 120, KVX_LOAD, -1},       /* */
		     {3, 90000, KVX_LOAD, 0},      /* outliers */
		     {4, 1600, KVX_RECOMPUTE, 1}}; /* no longer */

	begin();
	for (uint32_t i = 0; i < KV_COUNT_OF(turns); i++) {
		kvx_cost_decision_t answer;

		measure(turns[i].times, 16384, turns[i].load_ms * MS, 160u * MS);
		answer = query(16384, 0);
		assert_int_equal(answer.choice, turns[i].choice);
		assert_int_equal(answer.state_changed, turns[i].state_changed);
		if (answer.state_changed) {
			assert_int_equal(answer.from, 16384);
			assert_int_equal(answer.on_disk, 0);
			assert_in_range(answer.compute_ns, 159u * MS, 161u * MS);
			assert_true((answer.load_ns < 144u * MS) == (answer.choice == KVX_LOAD));
		}
	}
}

/* A piece of it, every 32nd time and once in 30 s. */
KV_TEST(p7_a_slow_tier_is_sampled_now_and_then_at_little_cost)
{
	uint32_t samples = 0;

	begin();
	measure(5, 16384, 1600u * MS, 160u * MS);
	for (uint32_t i = 0; i < 320; i++) {
		const kvx_cost_decision_t answer = query(16384, 0);

		assert_int_equal(answer.state_changed, i == 0);
		assert_true(answer.choice != KVX_LOAD);
		if (answer.choice == KVX_LOAD_SAMPLE) {
			assert_true(answer.cpu % BLOCK == 0);
			assert_true(answer.cpu * 1600.0 / 16384 <= 161.0 / KVX_COST_SAMPLE_SHARE);
			samples++;
		}
	}
	assert_int_equal(samples, 10);
	for (uint32_t i = 0; i < 3; i++) {
		now += KVX_COST_SAMPLE_NS;
		assert_int_equal(query(16384, 0).choice, KVX_LOAD_SAMPLE);
		assert_int_equal(query(16384, 0).choice, KVX_RECOMPUTE);
	}
}

/* Pieces say otherwise; when the old measurements have had their time, they are believed. */
KV_TEST(p7_it_resumes_when_loading_has_become_faster)
{
	kvx_cost_decision_t answer;
	uint32_t asked = 0;

	begin();
	measure(7, 16384, 1600u * MS, 160u * MS);
	for (answer = query(16384, 0); answer.state_changed != -1; answer = query(16384, 0)) {
		if (answer.cpu) {
			add_load(answer.cpu, 0, answer.cpu * 1e3);
		}
		now += 10u * S;
		assert_true(++asked < 60);
	}
	assert_int_equal(answer.cpu, 16384);
}

/* Pieces are read while a step runs, and look as if they cost nothing: what was measured near a length counts more. */
KV_TEST(p7_small_loads_do_not_speak_for_large_ones)
{
	begin();
	for (uint32_t i = 0; i < 7; i++) {
		add_step(0, 10240, 273e6);
		add_load(0, 80, 3e5);
	}
	assert_int_equal(query(0, 10240).disk, 10240);
	add_load(0, 10240, load_ns(10240, 2.6));
	for (uint32_t i = 0; i < 20; i++) {
		assert_true(query(0, 10240).disk < 10240);
		add_load(0, 80, 3e5);
	}
}

/* Of a load that lies in memory but for one block, the disk's part is smaller than the error of the memory's. */
KV_TEST(p7_a_load_mostly_of_memory_says_nothing_of_disk)
{
	uint64_t guessed;

	begin();
	for (uint32_t i = 0; i < 7; i++) {
		add_load(10240, 0, load_ns(10240, 50.0));
	}
	guessed = kvx_cost_model_load_ns(&model, 0, 10240);
	for (uint32_t i = 0; i < 7; i++) {
		add_load(10240, BLOCK, load_ns(10240, 50.0) * 1.1);
	}
	assert_int_equal(kvx_cost_model_load_ns(&model, 0, 10240), guessed);
	add_load(10240, BLOCK, load_ns(10240, 50.0) * 1.2);
	assert_int_not_equal(kvx_cost_model_load_ns(&model, 0, 10240), guessed);
}

/* Any sequence gives sane answers, and the same when repeated. */
KV_TEST(p7_the_same_history_gives_the_same_answers)
{
	uint64_t sum[2] = {0, 0};

	for (uint32_t round = 0; round < 2; round++) {
		begin();
		rng.state = kv_test_seed();
		for (uint32_t i = 0; i < 1500; i++) {
			const uint32_t cpu = (uint32_t)kv_test_below(&rng, 1u << kv_test_below(&rng, 22));
			const uint32_t disk = (uint32_t)kv_test_below(&rng, 2) ? cpu / 3u : 0;

			now += kv_test_below(&rng, 10u * S);
			add_load(cpu, disk, (double)kv_test_below(&rng, S));
			add_step((uint32_t)kv_test_below(&rng, 100000), cpu, (double)kv_test_below(&rng, S));
			if (cpu + disk) {
				const kvx_cost_decision_t answer = query(cpu, disk);

				sum[round] = sum[round] * 31u + answer.choice + answer.cpu * 4u + answer.disk;
			}
		}
	}
	assert_true(sum[0] == sum[1]);
}

KV_TEST_MAIN(NULL, NULL)
