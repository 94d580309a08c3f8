/* The cost model: what it learns from times, and decides from them, with a clock of the test's own. */
#include "cost_model/cost_model.h"
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kv/types.h"

#define BLOCK 16u
#define TOKEN 131072u /* bytes: an 8B model */
#define MS    UINT64_C(1000000)
#define S     UINT64_C(1000000000)

static kvx_cost_model_t cost_model;
static uint64_t now;
static uint64_t who;
static kv_test_rng_t rng;

static void fresh(void)
{
	kvx_cost_model_init(&cost_model, BLOCK, TOKEN);
	now = 100u * S;
	rng.state = 7;
}

/* Within some percent of it. */
static double about(double x, uint32_t percent)
{
	return percent ? x * (1.0 + ((double)kv_test_below(&rng, 2u * percent * 100u) / 100.0 - percent) / 100.0) : x;
}

static kvx_cost_decision_t ask_of(uint32_t local, uint32_t cpu, uint32_t disk)
{
	const kvx_cost_query_t question = {.request = ++who,
					   .now_ns = now,
					   .local = local,
					   .cpu = cpu,
					   .disk = disk,
					   .total = local + cpu + disk + 12u,
					   .grain = BLOCK};
	kvx_cost_decision_t answer;

	kvx_cost_model_decide(&cost_model, &question, &answer);
	assert_true(answer.cpu <= cpu && answer.disk <= disk);
	assert_true(answer.disk == 0 || answer.cpu == cpu); /* a prefix */
	assert_true((answer.cpu + answer.disk > 0) == (answer.choice != KVX_RECOMPUTE));

	return answer;
}

static kvx_cost_decision_t query(uint32_t cpu, uint32_t disk)
{
	return ask_of(0, cpu, disk);
}

/* ---- the machine of docs/CLAIMS.md "On GPUs" ------------------------------------------------- */

static double h200_ns(uint32_t before, uint32_t tokens)
{
	return 1e6 * (3.8 + 0.02276 * tokens + 4.18e-7 * tokens * (2.0 * before + tokens));
}

static void step(uint32_t before, uint32_t tokens, double ns)
{
	kvx_step_work_t work = {0};

	kvx_step_work_add(&work, before, tokens);
	kvx_cost_model_add_step(&cost_model, &work, (uint64_t)ns);
}

/* A prompt in chunks, as the engine takes it: all of it in nanoseconds. */
static double prompt(uint32_t tokens, uint32_t percent)
{
	double sum = 0;

	for (uint32_t at = 0; at < tokens; at += 8192u) {
		const uint32_t n = tokens - at < 8192u ? tokens - at : 8192u;
		const double ns = about(h200_ns(at, n), percent);

		step(at, n, ns);
		sum += ns;
	}

	return sum;
}

/* bytes a nanosecond */
static double load_ns(uint32_t tokens, double rate)
{
	return tokens ? 2e5 + (double)tokens * TOKEN / rate : 0;
}

static void loaded(uint32_t cpu, uint32_t disk, double ns)
{
	kvx_cost_model_add_load(&cost_model,
				&(kvx_load_sample_t){.cpu = cpu, .disk = disk, .ns = (uint64_t)ns, .now_ns = now});
}

static kvx_cost_decision_t ask_rest(uint32_t disk, uint32_t rest)
{
	const kvx_cost_query_t question = {
		.request = ++who, .now_ns = now, .disk = disk, .total = disk + rest, .grain = BLOCK};
	kvx_cost_decision_t answer;

	kvx_cost_model_decide(&cost_model, &question, &answer);

	return answer;
}

/* Nanoseconds, in chunks, after `before` others; times `slower`. */
static double computed_ns(uint32_t before, uint32_t tokens, double slower, int learn)
{
	double sum = 0;

	for (uint32_t at = before; at < before + tokens; at += 8192u) {
		const uint32_t n = before + tokens - at < 8192u ? before + tokens - at : 8192u;
		const double ns = slower * h200_ns(at, n);

		if (learn) {
			step(at, n, ns);
		}
		sum += ns;
	}

	return sum;
}

static double cold_ns(uint32_t tokens)
{
	return computed_ns(0, tokens, 1, 0);
}

/* A prompt that lies on disk but for its last tokens, from question to answer; all that is done is measured. */
static double answered(uint32_t tokens, double rate, double slower)
{
	const uint32_t hit = (tokens - 1u) / BLOCK * BLOCK;
	const kvx_cost_decision_t answer = ask_rest(hit, tokens - hit);
	const double load = load_ns(answer.disk, rate);

	if (answer.disk) {
		loaded(0, answer.disk, load);
	}

	return load + computed_ns(answer.disk, tokens - answer.disk, slower, 1);
}

/* Ask, load what the answer says, learn from it; what the hit costs, loading and computing, beside computing all. */
static double serve(uint32_t cpu, uint32_t disk, double memory_rate, double disk_rate)
{
	const kvx_cost_decision_t answer = query(cpu, disk);
	const uint32_t all = cpu + disk + 12u, got = answer.cpu + answer.disk;
	const double load = load_ns(answer.cpu, memory_rate) + load_ns(answer.disk, disk_rate);

	if (got) {
		loaded(answer.cpu, answer.disk, load);
	}

	return (load + h200_ns(got, all - got)) / h200_ns(0, all);
}

static void p7_computing_is_predicted_from_a_few_prompts(void **state)
{
	static const uint32_t lengths[] = {33, 700, 9000, 2000, 1030, 10250, 32780};

	(void)state;
	fresh();
	for (uint32_t i = 0; i < KV_COUNT_OF(lengths); i++) {
		(void)prompt(lengths[i], 2);
	}
	step(0, 900, 3e9); /* something else had the machine */
	step(0, 700, 5e9);
	for (uint32_t n = 512; n <= 65536; n *= 2) {
		const double expected = h200_ns(0, n) - h200_ns(0, 0);

		assert_in_range(kvx_cost_model_compute_ns(&cost_model, 0, n), (uint64_t)(expected * 0.88),
				(uint64_t)(expected * 1.12));
	}
	/* The same tokens cost more behind others. */
	assert_true(kvx_cost_model_compute_ns(&cost_model, 32768, 1024) >
		    3u * kvx_cost_model_compute_ns(&cost_model, 0, 1024) / 2u);
}

/* What was measured at one length says something about longer ones, unless it is so short that most of the time may be
 * any step's. */
static void p7_one_measurement_is_a_proportion(void **state)
{
	(void)state;
	fresh();
	assert_int_equal(kvx_cost_model_compute_ns(&cost_model, 0, 1000), 0);
	step(0, 1000, 30e6);
	assert_in_range(kvx_cost_model_compute_ns(&cost_model, 0, 2000), 59u * MS, 61u * MS);
	assert_true(kvx_cost_model_compute_ns(&cost_model, 0, 8000) > 0);
	assert_in_range(kvx_cost_model_compute_ns(&cost_model, 0, 32000), 950u * MS, 970u * MS);
	step(0, 0, 30e6);
	step(0, 1000, 0);
	step(0, 1000, 200e9);
	assert_in_range(kvx_cost_model_compute_ns(&cost_model, 0, 2000), 59u * MS, 61u * MS);

	fresh();
	step(9000, 100, 6e6);
	assert_in_range(kvx_cost_model_compute_ns(&cost_model, 0, 200), 11u * MS, 13u * MS);
	assert_int_equal(kvx_cost_model_compute_ns(&cost_model, 0, 202), 0);
}

/* The rule: a disk of 2.6 GB/s does not pay under 32 k tokens, and no hit costs more than 1.02 of a cold prompt: the
 * first one neither. */
static void p7_a_hit_on_a_slow_disk_costs_what_a_cold_prompt_does(void **state)
{
	static const uint32_t lengths[] = {1024, 10240, 32768};

	(void)state;
	for (uint32_t first = 0; first < 3; first++) {
		fresh();
		(void)prompt(33, 2);
		(void)prompt(700, 2);
		(void)prompt(9000, 2);
		(void)prompt(2000, 2);
		for (uint32_t i = 0; i < 300; i++) {
			const double cost = serve(0, lengths[(i + first) % 3], 50, about(2.6, 5));

			assert_true(cost <= 1.02);
			now += S;
		}
		/* With a part in memory, that is loaded and the rest computed. */
		for (uint32_t i = 0; i < 100; i++) {
			const kvx_cost_decision_t answer = query(4096, 6144);

			assert_int_equal(answer.cpu, 4096);
			assert_true(answer.disk <= 6144 / 8);
			assert_true(serve(4096, 6144, 50, about(2.6, 5)) < 0.8);
		}
	}
}

/* Far enough in, even that disk pays; a fast one does from the start, and is found out by pieces. */
static void p7_a_disk_that_pays_is_loaded_from(void **state)
{
	uint32_t asked = 0;

	(void)state;
	fresh();
	for (uint32_t i = 0; i < 6; i++) {
		(void)prompt(33, 2);
		(void)prompt(9000, 2);
		(void)prompt(66000, 2);
	}
	while (query(0, 10240).disk < 10240) {
		assert_true(serve(0, 10240, 50, 12) <= 1.02);
		assert_true(++asked < 6);
		now += S;
	}
	fresh();
	for (uint32_t i = 0; i < 6; i++) {
		(void)prompt(33, 2);
		(void)prompt(9000, 2);
		(void)prompt(66000, 2);
		loaded(0, 1024, load_ns(1024, 2.6));
	}
	assert_int_equal(query(0, 32768).choice, KVX_RECOMPUTE);
	assert_int_equal(query(0, 120000).disk, 120000);
	/* The engine has the first half: what follows is dear to compute. */
	assert_int_equal(ask_of(60000, 0, 4096).disk, 4096);
	assert_int_equal(ask_of(0, 0, 4096).choice, KVX_RECOMPUTE);
}

/* An engine whose first request ever is a hit on disk. */
static void p7_before_any_measurement_exploration_of_a_disk_is_small(void **state)
{
	kvx_cost_decision_t answer;

	(void)state;
	fresh();
	answer = query(8192, 32768);
	assert_int_equal(answer.cpu, 8192);
	assert_true(answer.disk > 0);
	assert_in_range((uint64_t)answer.disk * TOKEN, 240u * MS, 250u * MS); /* a byte a nanosecond */
	answer = query(0, 1024);
	assert_int_equal(answer.disk, 512); /* the rest is computed, which is measured */
	assert_int_equal(ask_rest(1024, 3000).disk, 1024);
	assert_int_equal(ask_rest(1024, 100).disk, 1024 - 416);
	assert_int_equal(query(8192, 64).disk, 0);
	step(8192, 64 + 12, 6e6);
	assert_true(query(0, 1024).disk > 0); /* that was too little */
}

/* All of an engine's prompts lie on a disk, also the first ones: it learns what computing takes all the same, and where
 * the disk does not pay, only the first few cost more than a cold prompt, by what was bet. */
static void p7_an_engine_with_all_prompts_on_disk_learns_compute_cost(void **state)
{
	static const uint32_t lengths[] = {200, 1030, 10250, 32780};
	static const double rates[] = {0.3, 1.2, 2.6};

	(void)state;
	for (uint32_t i = 0; i < KV_COUNT_OF(lengths) * KV_COUNT_OF(rates); i++) {
		const uint32_t n = lengths[i / KV_COUNT_OF(rates)];
		const double rate = rates[i % KV_COUNT_OF(rates)];

		if (n > 32768 && rate > 2) {
			continue; /* there it pays, nearly */
		}
		fresh();
		for (uint32_t k = 0; k < 50; k++) {
			const double ns = answered(n, rate, 1);

			assert_true(ns <= cold_ns(n) * 1.02 + (k < 3 ? 1.1 * KVX_COST_EXPLORE_NS / rate : 0));
			now += S;
		}
	}
}

/* Where it does pay, little is left to be computed, once. */
static void p7_a_disk_that_pays_is_used_fully_by_the_second_prompt(void **state)
{
	static const uint32_t lengths[] = {1030, 10250, 32780};
	double ns = 0;

	(void)state;
	for (uint32_t i = 0; i < KV_COUNT_OF(lengths); i++) {
		fresh();
		for (uint32_t k = 0; k < 20; k++) {
			ns = answered(lengths[i], 2.6, 50); /* an engine 50 times as slow */
			assert_true(k == 0 || ns < 0.2 * 50 * cold_ns(lengths[i]));
			now += S;
		}
	}
}

/* Several groups: a hit is loaded whole or not at all. */
static void p7_half_of_the_uncuttable_hits_explore_the_compute_cost(void **state)
{
	kvx_cost_query_t question = {.now_ns = 100u * S, .disk = 1024, .total = 1030, .grain = 0};
	kvx_cost_decision_t answer;

	(void)state;
	fresh();
	for (uint32_t i = 0; i < 6; i++) {
		question.request = i + 1u;
		kvx_cost_model_decide(&cost_model, &question, &answer);
		assert_int_equal(answer.disk, i % 2 ? 0 : 1024);
		assert_int_equal(answer.choice, i % 2 ? KVX_RECOMPUTE : KVX_LOAD);
	}
	(void)prompt(1030, 0);
	question.request++;
	kvx_cost_model_decide(&cost_model, &question, &answer);
	assert_int_equal(answer.choice, KVX_RECOMPUTE);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void measure(uint32_t times, uint32_t tokens, uint64_t load, uint64_t compute)
{
	for (uint32_t i = 0; i < times; i++) {
		loaded(tokens, 0, (double)load);
		step(0, tokens, (double)compute);
	}
}

static void p7_memory_is_trusted_until_it_was_measured(void **state)
{
	kvx_cost_decision_t answer;

	(void)state;
	fresh();
	assert_int_equal(query(1024, 0).choice, KVX_LOAD);
	measure(2, 1024, 100u * MS, 10u * MS);
	assert_int_equal(query(1024, 0).choice, KVX_LOAD);
	measure(1, 1024, 100u * MS, 10u * MS);
	answer = query(1024, 0);
	assert_int_equal(answer.choice, KVX_RECOMPUTE);
	assert_int_equal(answer.state_changed, 1);
	assert_int_equal(answer.from, 1024);
	assert_int_equal(answer.on_disk, 0);
	assert_in_range(answer.load_ns, 99u * MS, 101u * MS);
	assert_in_range(answer.compute_ns, 9u * MS, 11u * MS);
}

/* A piece of it, every 32nd time and once in 30 s. */
static void p7_a_slow_tier_is_sampled_now_and_then_at_little_cost(void **state)
{
	uint32_t probes = 0;

	(void)state;
	fresh();
	measure(5, 16384, 1600u * MS, 160u * MS);
	assert_int_equal(query(16384, 0).state_changed, 1);
	for (uint32_t i = 0; i < 320; i++) {
		const kvx_cost_decision_t answer = query(16384, 0);

		assert_int_equal(answer.state_changed, 0);
		assert_true(answer.choice != KVX_LOAD);
		if (answer.choice == KVX_LOAD_SAMPLE) {
			assert_true(answer.cpu % BLOCK == 0);
			assert_true(answer.cpu * 1600.0 / 16384 <= 161.0 / KVX_COST_SAMPLE_SHARE);
			probes++;
		}
	}
	assert_int_equal(probes, 10);
	for (uint32_t i = 0; i < 3; i++) {
		now += KVX_COST_SAMPLE_NS;
		assert_int_equal(query(16384, 0).choice, KVX_LOAD_SAMPLE);
		assert_int_equal(query(16384, 0).choice, KVX_RECOMPUTE);
	}
}

static void p7_it_resumes_when_loading_has_become_faster(void **state)
{
	uint32_t asked = 0;

	(void)state;
	fresh();
	measure(7, 16384, 1600u * MS, 160u * MS);
	assert_int_equal(query(16384, 0).state_changed, 1);
	/* Pieces say otherwise; when the old measurements have had their time, they are believed. */
	for (;;) {
		const kvx_cost_decision_t answer = query(16384, 0);

		if (answer.state_changed == -1) {
			assert_int_equal(answer.cpu, 16384);
			break;
		}
		if (answer.cpu) {
			loaded(answer.cpu, 0, answer.cpu * 1e3);
		}
		now += 10u * S;
		assert_true(++asked < 60);
	}
}

static void p7_about_equal_does_not_flap(void **state)
{
	(void)state;
	fresh();
	measure(7, 16384, 136u * MS, 160u * MS);
	assert_int_equal(query(16384, 0).state_changed, 0);
	assert_int_equal(query(16384, 0).choice, KVX_LOAD);
	measure(7, 16384, 150u * MS, 160u * MS);
	assert_int_equal(query(16384, 0).state_changed, 1);
	measure(7, 16384, 136u * MS, 160u * MS);
	assert_int_equal(query(16384, 0).choice, KVX_RECOMPUTE);
	measure(7, 16384, 120u * MS, 160u * MS);
	assert_int_equal(query(16384, 0).state_changed, -1);
}

/* Pieces are read while a step runs, and look as if they cost nothing: what was measured near a length counts more. */
static void p7_small_loads_do_not_speak_for_large_ones(void **state)
{
	(void)state;
	fresh();
	for (uint32_t i = 0; i < 7; i++) {
		step(0, 10240, 273e6);
		loaded(0, 80, 3e5);
	}
	assert_int_equal(query(0, 10240).disk, 10240);
	loaded(0, 10240, load_ns(10240, 2.6));
	assert_true(query(0, 10240).disk < 10240);
	for (uint32_t i = 0; i < 20; i++) {
		loaded(0, 80, 3e5);
		assert_true(query(0, 10240).disk < 10240);
	}
}

static void p7_asking_again_gives_the_same_answer(void **state)
{
	kvx_cost_query_t question = {.request = 5, .now_ns = 100u * S, .cpu = 1024, .total = 1030, .grain = BLOCK};
	kvx_cost_decision_t answer;
	uint32_t asked = 0;

	(void)state;
	fresh();
	measure(7, 1024, 100u * MS, 10u * MS);
	for (uint32_t i = 0; i < 1000; i++) {
		question.now_ns += 100000;
		kvx_cost_model_decide(&cost_model, &question, &answer);
		assert_int_equal(answer.choice, KVX_RECOMPUTE);
		assert_int_equal(answer.state_changed, i == 0);
		asked += !answer.repeated;
	}
	assert_int_equal(asked, 1);
}

static void p7_single_outliers_decide_nothing(void **state)
{
	(void)state;
	fresh();
	measure(7, 1024, 1u * MS, 10u * MS);
	measure(3, 1024, 90u * S, 10u * MS);
	assert_int_equal(query(1024, 0).choice, KVX_LOAD);
	loaded(1024, 0, 200e9); /* the machine slept */
	loaded(0, 0, 5);
	assert_int_equal(query(1024, 0).choice, KVX_LOAD);
}

/* Any sequence gives sane answers, and the same when repeated. */
static void p7_the_same_history_gives_the_same_answers(void **state)
{
	uint64_t sum[2] = {0, 0};

	(void)state;
	for (uint32_t round = 0; round < 2; round++) {
		fresh();
		rng.state = kv_test_seed();
		who = 0;
		for (uint32_t i = 0; i < 1500; i++) {
			const uint32_t cpu = (uint32_t)kv_test_below(&rng, 1u << kv_test_below(&rng, 22));
			const uint32_t disk = (uint32_t)kv_test_below(&rng, 2) ? cpu / 3u : 0;

			now += kv_test_below(&rng, 10u * S);
			loaded(cpu, disk, (double)kv_test_below(&rng, S));
			step((uint32_t)kv_test_below(&rng, 100000), cpu, (double)kv_test_below(&rng, S));
			if (cpu + disk) {
				const kvx_cost_decision_t answer = query(cpu, disk);

				assert_true(answer.choice <= KVX_RECOMPUTE);
				sum[round] = sum[round] * 31u + answer.choice + answer.cpu * 4u + answer.disk;
			}
		}
	}
	assert_true(sum[0] == sum[1]);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p7_computing_is_predicted_from_a_few_prompts),
		cmocka_unit_test(p7_one_measurement_is_a_proportion),
		cmocka_unit_test(p7_a_hit_on_a_slow_disk_costs_what_a_cold_prompt_does),
		cmocka_unit_test(p7_a_disk_that_pays_is_loaded_from),
		cmocka_unit_test(p7_before_any_measurement_exploration_of_a_disk_is_small),
		cmocka_unit_test(p7_an_engine_with_all_prompts_on_disk_learns_compute_cost),
		cmocka_unit_test(p7_a_disk_that_pays_is_used_fully_by_the_second_prompt),
		cmocka_unit_test(p7_half_of_the_uncuttable_hits_explore_the_compute_cost),
		cmocka_unit_test(p7_memory_is_trusted_until_it_was_measured),
		cmocka_unit_test(p7_a_slow_tier_is_sampled_now_and_then_at_little_cost),
		cmocka_unit_test(p7_it_resumes_when_loading_has_become_faster),
		cmocka_unit_test(p7_about_equal_does_not_flap),
		cmocka_unit_test(p7_small_loads_do_not_speak_for_large_ones),
		cmocka_unit_test(p7_asking_again_gives_the_same_answer),
		cmocka_unit_test(p7_single_outliers_decide_nothing),
		cmocka_unit_test(p7_the_same_history_gives_the_same_answers),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
