/* Never slower: what the guard decides from measured times, with a clock of the test's own. */
#include "guard.h"
#include "kv_cmocka.h"
#include "kv_test.h"

#define BLOCK 16u
#define MS    UINT64_C(1000000)
#define S     UINT64_C(1000000000)

static kvx_guard_t guard;
static uint64_t now;
static uint64_t who;

static kvx_guard_answer_t ask(uint32_t cpu, uint32_t disk)
{
	const kvx_guard_question_t question = {.who = ++who, .now_ns = now, .cpu = cpu, .disk = disk};
	kvx_guard_answer_t answer;

	kvx_guard_ask(&guard, &question, &answer);

	return answer;
}

static void fresh(void)
{
	kvx_guard_init(&guard, BLOCK);
	now = 100u * S;
}

static void measure(uint32_t times, uint32_t cpu, uint32_t disk, uint64_t load, uint64_t compute)
{
	for (uint32_t i = 0; i < times; i++) {
		kvx_guard_loaded(&guard, cpu, disk, load);
		kvx_guard_computed(&guard, cpu + disk, compute);
	}
}

static void p7_nothing_is_stopped_before_it_was_measured(void **state)
{
	(void)state;
	fresh();
	assert_int_equal(ask(1024, 0).verdict, KVX_GUARD_PAYS);
	assert_int_equal(kvx_guard_load_ns(&guard, 1024, 0), 0);
	measure(2, 1024, 0, 100u * MS, 10u * MS);
	assert_int_equal(ask(1024, 0).verdict, KVX_GUARD_PAYS);
	measure(1, 1024, 0, 100u * MS, 10u * MS);
	assert_int_equal(ask(1024, 0).verdict, KVX_GUARD_NO);
	/* Another length knows nothing of that. */
	assert_int_equal(ask(16384, 0).verdict, KVX_GUARD_PAYS);
}

static void p7_a_slow_length_is_tried_now_and_then(void **state)
{
	uint32_t probes = 0;

	(void)state;
	fresh();
	measure(5, 1024, 0, 100u * MS, 10u * MS);
	assert_int_equal(ask(1024, 0).turned, 1);
	for (uint32_t i = 0; i < 320; i++) {
		const kvx_guard_answer_t answer = ask(1024, 0);

		assert_int_equal(answer.turned, 0);
		assert_true(answer.verdict != KVX_GUARD_PAYS);
		probes += answer.verdict == KVX_GUARD_PROBE;
	}
	assert_int_equal(probes, 10);
	for (uint32_t i = 0; i < 3; i++) {
		now += KVX_GUARD_PROBE_NS;
		assert_int_equal(ask(1024, 0).verdict, KVX_GUARD_PROBE);
		assert_int_equal(ask(1024, 0).verdict, KVX_GUARD_NO);
	}
}

static void p7_it_resumes_when_loading_has_become_faster(void **state)
{
	(void)state;
	fresh();
	measure(7, 1024, 0, 100u * MS, 10u * MS);
	assert_int_equal(ask(1024, 0).turned, 1);
	measure(3, 1024, 0, 1u * MS, 10u * MS);
	assert_int_equal(ask(1024, 0).verdict, KVX_GUARD_NO); /* the median is still of before */
	measure(1, 1024, 0, 1u * MS, 10u * MS);
	assert_int_equal(ask(1024, 0).turned, -1);
	assert_int_equal(ask(1024, 0).verdict, KVX_GUARD_PAYS);
	/* About equal: no flapping. */
	measure(7, 1024, 0, 10u * MS, 10u * MS);
	assert_int_equal(ask(1024, 0).turned, 0);
	assert_int_equal(ask(1024, 0).verdict, KVX_GUARD_PAYS);
}

static void p7_asking_again_gives_the_same_answer(void **state)
{
	kvx_guard_question_t question = {.who = 5, .now_ns = 100u * S, .cpu = 1024};
	kvx_guard_answer_t answer;
	uint32_t probes = 0;

	(void)state;
	fresh();
	measure(7, 1024, 0, 100u * MS, 10u * MS);
	for (uint32_t i = 0; i < 1000; i++) {
		question.now_ns += 100000;
		kvx_guard_ask(&guard, &question, &answer);
		assert_int_equal(answer.verdict, KVX_GUARD_NO);
		assert_int_equal(answer.turned, i == 0);
		probes += !answer.again;
	}
	assert_int_equal(probes, 1);
}

/* Memory is fast, disk is not: only the part on disk is left out. */
static void p7_a_slow_tail_on_disk_is_left_out(void **state)
{
	kvx_guard_answer_t answer;

	(void)state;
	fresh();
	for (uint32_t i = 0; i < 7; i++) {
		kvx_guard_loaded(&guard, 1024, 0, 1u * MS);
		kvx_guard_loaded(&guard, 1024, 256, 81u * MS);
		kvx_guard_computed(&guard, 1024, 100u * MS);
		kvx_guard_computed(&guard, 256, 25u * MS);
	}
	answer = ask(1024, 256);
	assert_true(answer.cut);
	assert_int_equal(answer.verdict, KVX_GUARD_PAYS);
	assert_int_equal(ask(1024, 0).verdict, KVX_GUARD_PAYS);
	answer = ask(0, 256);
	assert_int_equal(answer.verdict, KVX_GUARD_NO);
	/* Estimates: 80 ms for the tail, 1 ms for the rest. */
	assert_in_range(kvx_guard_load_ns(&guard, 1024, 256), 80u * MS, 83u * MS);
	assert_in_range(kvx_guard_compute_ns(&guard, 512), 49u * MS, 52u * MS);
}

static void p7_single_outliers_decide_nothing(void **state)
{
	(void)state;
	fresh();
	measure(7, 1024, 0, 1u * MS, 10u * MS);
	measure(3, 1024, 0, 90u * S, 10u * MS);
	assert_int_equal(ask(1024, 0).verdict, KVX_GUARD_PAYS);
	kvx_guard_loaded(&guard, 1024, 0, 200u * S); /* the machine slept */
	kvx_guard_loaded(&guard, 0, 0, 5);
	assert_int_equal(ask(1024, 0).verdict, KVX_GUARD_PAYS);
}

/* Any sequence gives sane answers, and the same when repeated. */
static void p7_the_same_history_gives_the_same_answers(void **state)
{
	uint64_t sum[2] = {0, 0};

	(void)state;
	for (uint32_t round = 0; round < 2; round++) {
		kv_test_rng_t rng = {kv_test_seed()};

		fresh();
		who = 0;
		for (uint32_t i = 0; i < 20000; i++) {
			const uint32_t cpu = (uint32_t)kv_test_below(&rng, 1u << kv_test_below(&rng, 22));
			const uint32_t disk = (uint32_t)kv_test_below(&rng, 2) ? cpu / 3u : 0;
			const uint64_t ns = kv_test_below(&rng, S);

			now += kv_test_below(&rng, 10u * MS);
			kvx_guard_loaded(&guard, cpu, disk, ns);
			kvx_guard_computed(&guard, cpu, kv_test_below(&rng, S));
			if (cpu + disk) {
				const kvx_guard_answer_t answer = ask(cpu, disk);

				assert_true(answer.verdict <= KVX_GUARD_NO);
				assert_true(!answer.cut || (cpu && disk));
				sum[round] = sum[round] * 31u + answer.verdict + (uint64_t)answer.cut * 4u;
			}
		}
	}
	assert_true(sum[0] == sum[1]);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p7_nothing_is_stopped_before_it_was_measured),
		cmocka_unit_test(p7_a_slow_length_is_tried_now_and_then),
		cmocka_unit_test(p7_it_resumes_when_loading_has_become_faster),
		cmocka_unit_test(p7_asking_again_gives_the_same_answer),
		cmocka_unit_test(p7_a_slow_tail_on_disk_is_left_out),
		cmocka_unit_test(p7_single_outliers_decide_nothing),
		cmocka_unit_test(p7_the_same_history_gives_the_same_answers),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
