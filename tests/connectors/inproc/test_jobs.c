/* Loads and saves against a fake libkvc: every way in which the daemon can fail, one at a time and at random. */
#include "connectors/inproc/fake_kvc.h"
#include "connectors/inproc/jobs_rig.h"
#include "engine/check.h"

#include "common/await.h"
#include "kv/shm.h"
#include "kvx.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void a_prefix_comes_back_as_it_was(void **state)
{
	kvx_load_result_t result;
	prompt_t from, to;
	bench_t b;

	(void)state;
	store_ten(&b, 3, &from, &to);
	fake.disk = 4;
	assert_int_equal(load_now(&b, &to, &result), KVC_OK);
	assert_int_equal(result.tokens, 10 * TOKENS);
	assert_int_equal(result.cause, KVC_OK);
	assert_int_equal(result.cpu_tokens, 6 * TOKENS);
	assert_int_equal(result.disk_tokens, 4 * TOKENS);
	for (uint32_t i = 0; i < 10; i++) {
		assert_true(holds(&b, 30 + i, 1, i));
	}
	bench_close(&b);
}

static void p5_one_poll_moves_no_more_than_its_budget(void **state)
{
	prompt_t from, to;
	kvx_load_t *load;
	uint32_t before = 0, polls = 0;
	bench_t b;

	(void)state;
	store_ten(&b, 3, &from, &to);
	assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_PENDING);
	while (kvx_load_state(load, NULL) == KVC_PENDING) {
		uint32_t there = 0;

		(void)kvx_poll(b.kvx, 0);
		polls++;
		for (uint32_t i = 0; i < 10; i++) {
			there += (uint32_t)holds(&b, 30 + i, 1, i);
		}
		assert_true(there - before <= 3);
		before = there;
	}
	assert_int_equal(before, 10);
	assert_true(polls >= 4);
	kvx_load_end(load);
	bench_close(&b);
}

static void jobs_that_share_a_small_budget_all_end_well(void **state)
{
	prompt_t from, to, p[4];
	kvx_load_t *loads[4];
	kvx_save_t *saves[4];
	bench_t b;

	(void)state;
	store_ten(&b, 2, &from, &to);
	for (uint32_t i = 0; i < 4; i++) {
		to.prefix.n_tokens = (10 - i) * TOKENS;
		assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &loads[i], NULL), KVC_PENDING);
		prompt_init(&p[i], 20 + i, 5 + i, 0);
		assert_int_equal(kvx_save_prefix(b.kvx, &p[i].prefix, &saves[i]), KVC_PENDING);
	}
	while (kvx_poll(b.kvx, 0) > 0) {
	}
	for (uint32_t i = 0; i < 4; i++) {
		assert_int_equal(kvx_load_state(loads[i], NULL), KVC_OK);
		assert_int_equal(kvx_save_state(saves[i], NULL), KVC_OK);
		kvx_load_end(loads[i]);
		kvx_save_end(saves[i]);
	}
	assert_true(fake.keeps > 0); /* they were begun long before they ended */
	bench_close(&b);
}

static void p1_a_block_copied_while_its_lease_ends_does_not_count(void **state)
{
	kvx_load_result_t result;
	prompt_t from, to;
	bench_t b;

	(void)state;
	store_ten(&b, 3, &from, &to);
	fake.revoke_on_block = 7; /* in the third batch: blocks 6 to 8 */
	assert_int_equal(load_now(&b, &to, &result), KVC_OK);
	assert_int_equal(result.blocks, 6);
	assert_int_equal(result.cause, KVC_ERR_REVOKED);
	assert_int_equal(stats_of(&b).load_lost, 1);
	bench_close(&b);
}

static void p1_a_damaged_block_ends_the_load_before_it_and_is_reported(void **state)
{
	kvx_load_result_t result;
	kvc_key_t keys[10];
	prompt_t from, to;
	bench_t b;

	(void)state;
	store_ten(&b, 4, &from, &to);
	fake_keys(from.tokens, 10 * TOKENS, NULL, keys);
	fake_damage(&keys[6]);
	assert_int_equal(load_now(&b, &to, &result), KVC_OK);
	assert_int_equal(result.blocks, 6);
	assert_int_equal(result.cause, KVC_ERR_CORRUPT);
	assert_int_equal(result.why, 7); /* CORRUPT */
	assert_memory_equal(&result.first_missing, &keys[6], sizeof keys[6]);
	assert_int_equal(fake.bad, 1);
	assert_int_equal(stats_of(&b).load_corrupt, 1);
	bench_close(&b);
}

static void p7_a_load_that_stands_still_ends_in_time_or_at_once(void **state)
{
	kvx_load_result_t result;
	prompt_t from, to;
	bench_t b;

	(void)state;
	store_ten(&b, 3, &from, &to);
	fake.ready_step = 0;
	to.prefix.deadline_ms = 200;
	assert_int_equal(load_now(&b, &to, &result), KVC_MISS);
	assert_int_equal(result.cause, KVC_ERR_TIMEOUT);
	assert_true(result.load_ns >= 190000000u && result.load_ns < JOBS_MS * 1000000u);
	to.prefix.deadline_ms = 0;

	fake.ready_step = 2;
	fake.rest = KVC_ERR_CORRUPT;
	fake.rest_at = 4;
	assert_int_equal(load_now(&b, &to, &result), KVC_OK);
	assert_int_equal(result.blocks, 4);
	assert_true(result.load_ns < JOBS_MS * 1000000u);

	fake.rest = KVC_OK;
	fake.acquire = KVC_ERR_BUSY;
	assert_int_equal(load_now(&b, &to, &result), KVC_MISS);
	assert_int_equal(result.cause, KVC_ERR_BUSY);
	bench_close(&b);
}

static void p7_a_daemon_that_falls_silent_or_dies_amid_a_load_is_a_miss(void **state)
{
	kvx_load_result_t result;
	prompt_t from, to;
	kvx_load_t *load;
	bench_t b;

	(void)state;
	for (int death = 0; death < 2; death++) {
		store_ten(&b, 3, &from, &to);
		fake.answer_after = 5;
		assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_PENDING);
		(void)kvx_poll(b.kvx, 0);
		fake.silent = !death;
		fake.incarnation = death ? 0 : 1;
		(void)kvx_poll(b.kvx, 0);
		assert_int_equal(kvx_load_state(load, &result), death ? KVC_MISS : KVC_PENDING);
		for (int i = 0; i < 10000 && kvx_load_state(load, &result) == KVC_PENDING; i++) {
			(void)kvx_poll(b.kvx, 0); /* one that is starved for a moment goes on */
			usleep(1000);
		}
		assert_int_equal(kvx_load_state(load, &result), KVC_MISS);
		assert_int_equal(result.cause, death ? KVC_ERR_REVOKED : KVC_ERR_DAEMON_STALE);
		kvx_load_end(load);
		assert_int_equal(stats_of(&b).load_lost, 1);

		fake.silent = 0;
		fake.answer_after = 0;
		fake.incarnation = 2;
		assert_int_equal(load_now(&b, &to, &result), KVC_OK);
		bench_close(&b);
	}
}

/* Of loads in one process and in several, whether their space is open yet or not. */
static void p7_a_load_bears_a_silence_of_200_ms(void **state)
{
	const uint64_t ms = UINT64_C(1000000), start = 5 * ms;
	uint64_t since = 0;

	(void)state;
	assert_false(kvx_silent_too_long(&since, 0, start));
	assert_false(kvx_silent_too_long(&since, 1, start));
	assert_false(kvx_silent_too_long(&since, 1, start + 200 * ms));
	assert_true(kvx_silent_too_long(&since, 1, start + 200 * ms + 1));
	assert_false(kvx_silent_too_long(&since, 0, start + 300 * ms));
	assert_false(kvx_silent_too_long(&since, 1, start + 400 * ms));
	assert_false(kvx_silent_too_long(&since, 1, start + 600 * ms));
}

/* In one process as in several: a miss costs more than the rest of a stall. */
static void p7_a_lookup_waits_for_a_daemon_that_stalls(void **state)
{
	kvx_load_result_t result;
	prompt_t from, to;
	kvx_load_t *load;
	bench_t b;

	(void)state;
	store_ten(&b, 3, &from, &to);
	fake.silent = 1;
	fake.stall = 3;
	assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_PENDING);
	kvx_load_end(load);
	fake.silent = 1;
	fake.stall = 0;
	assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, &result), KVC_MISS);
	assert_int_equal(result.why, KV_WHY_DAEMON_STALE);
	fake.silent = 0;
	bench_close(&b);
}

static void a_save_takes_what_is_granted_and_comes_back_for_the_rest(void **state)
{
	kvx_save_result_t saved;
	kvx_load_result_t result;
	prompt_t from, to;
	bench_t b;

	(void)state;
	store_ten(&b, 3, &from, &to);
	prompt_init(&from, 2, 10, 10);
	prompt_init(&to, 2, 10, 40);
	for (uint32_t i = 0; i < 10; i++) {
		fill(&b, 10 + i, 2, i);
	}
	fake.grant = 4;
	assert_int_equal(save_now(&b, &from, &saved), KVC_OK);
	assert_int_equal(saved.blocks, 10);
	assert_int_equal(stats_of(&b).save_retries, 2);
	assert_int_equal(load_now(&b, &to, &result), KVC_OK);
	for (uint32_t i = 0; i < 10; i++) {
		assert_true(holds(&b, 40 + i, 2, i));
	}
	bench_close(&b);
}

static void a_save_whose_parent_is_gone_offers_the_whole_prefix(void **state)
{
	static const int32_t refusals[] = {KVC_ERR_NO_PARENT, KV_ERR_PARENT_LOST, KV_ERR_PARENT_UNREADABLE};
	kvx_save_result_t saved;
	prompt_t from, to;
	kvc_key_t keys[15];
	bench_t b;

	(void)state;
	for (size_t r = 0; r < KV_COUNT_OF(refusals); r++) {
		store_ten(&b, 3, &from, &to);
		prompt_init(&from, 1, 15, 0);
		for (uint32_t i = 10; i < 15; i++) {
			fill(&b, i, 1, i);
		}
		fake_keys(from.tokens, 15 * TOKENS, NULL, keys);
		fake.put = refusals[r];
		fake.put_times = 1;
		assert_int_equal(save_now(&b, &from, &saved), KVC_OK);
		assert_int_equal(fake.put_from, 0);
		assert_int_equal(saved.blocks, 15);
		assert_int_equal(save_now(&b, &from, &saved), KVC_ALREADY);
		bench_close(&b);
	}
}

static void p7_a_save_that_cannot_be_is_given_up_and_counted(void **state)
{
	kvx_save_result_t saved;
	kvx_save_t *save;
	prompt_t p, unused;
	bench_t b;

	(void)state;
	store_ten(&b, 3, &unused, &p);
	prompt_init(&p, 3, 6, 0);
	fake.put = KVC_ERR_BUSY;
	fake.put_times = 100;
	assert_int_equal(save_now(&b, &p, &saved), KVC_ERR_BUSY);
	assert_int_equal(stats_of(&b).save_busy, 1);
	fake.put_times = 0;
	fake.put_end = KVC_ERR_CLOSED;
	assert_int_equal(save_now(&b, &p, &saved), KVC_ERR_CLOSED);
	fake.put_end = KVC_OK;
	fake.put_done = KVC_ERR_REVOKED;
	assert_int_equal(save_now(&b, &p, &saved), KVC_ERR_REVOKED);
	assert_int_equal(stats_of(&b).save_lost, 2);
	fake.put_done = KVC_OK;
	p.prefix.deadline_ms = 200;
	assert_int_equal(kvx_save_prefix(b.kvx, &p.prefix, &save), KVC_PENDING);
	fake.silent = 1;
	while (kvx_save_state(save, &saved) == KVC_PENDING) {
		(void)kvx_poll(b.kvx, 0);
	}
	assert_int_equal(saved.status, KVC_ERR_TIMEOUT);
	kvx_save_end(save);
	assert_int_equal(stats_of(&b).save_timeouts, 1);
	fake.silent = 0;
	fake.incarnation = 0;
	assert_int_equal(kvx_save_prefix(b.kvx, &p.prefix, &save), KVC_MISS);
	bench_close(&b);
}

static void p7_a_connector_whose_self_test_reads_other_bytes_never_loads(void **state)
{
	kvx_load_result_t result;
	kvx_save_result_t saved;
	prompt_t p;
	bench_t b;

	(void)state;
	fake_reset(&layout);
	fake.wrong_bytes = 1;
	bench_open(&b, 3);
	assert_false(kvx_is_ready(b.kvx));
	prompt_init(&p, 1, 4, 0);
	assert_int_equal(save_now(&b, &p, &saved), KVC_MISS);
	fake.wrong_bytes = 0;
	for (int i = 0; i < 50; i++) {
		(void)kvx_poll(b.kvx, 0);
	}
	assert_false(kvx_is_ready(b.kvx));
	assert_int_equal(load_now(&b, &p, &result), KVC_MISS);
	assert_int_equal(stats_of(&b).self_test_failures, 1);
	bench_close(&b);
}

static void p7_what_fails_at_attach_is_tried_again_in_poll(void **state)
{
	bench_t b;

	(void)state;
	fake_reset(&layout);
	fake.no_space = 1;
	bench_open(&b, 3);
	assert_false(kvx_is_ready(b.kvx));
	fake.no_space = 0;
	for (int i = 0; i < 200 && !kvx_is_ready(b.kvx); i++) {
		(void)kvx_poll(b.kvx, 0);
		usleep(10000);
	}
	assert_true(kvx_is_ready(b.kvx));
	bench_close(&b);
}

static void p5_jobs_are_limited_and_bad_prefixes_refused(void **state)
{
	kvx_load_t *load;
	kvx_save_t *save;
	prompt_t from, to;
	bench_t b;

	(void)state;
	store_ten(&b, 3, &from, &to);
	to.blocks[3] = BLOCKS;
	assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_MISS);
	assert_int_equal(kvx_save_prefix(b.kvx, &to.prefix, &save), KVC_MISS);
	to.blocks[3] = 33;
	to.prefix.skip = 11;
	assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_MISS);
	to.prefix.skip = 0;
	to.prefix.n_tokens = TOKENS - 1;
	assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_MISS);
	to.prefix.struct_size = 4;
	assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_MISS);
	assert_int_equal(stats_of(&b).load_refused, 4);
	prompt_init(&to, 1, 10, 30);
	to.prefix.blocks = NULL;
	assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_MISS);
	assert_int_equal(kvx_save_prefix(b.kvx, &to.prefix, &save), KVC_MISS);
	prompt_init(&to, 1, 10, 30);
	to.prefix.tokens = NULL;
	assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_MISS);
	assert_int_equal(kvx_save_prefix(b.kvx, &to.prefix, &save), KVC_MISS);
	prompt_init(&to, 1, 10, 30);
	for (uint32_t i = 0; i < KVX_JOBS; i++) {
		assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_PENDING);
	}
	assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_MISS);
	assert_int_equal(stats_of(&b).load_refused, 7);
	bench_close(&b); /* ends them all */
}

static void reports_carry_the_reason_of_the_miss(void **state)
{
	kvx_request_t request = {.struct_size = sizeof request, .request = 1, .prompt_tokens = 100};
	kvx_load_result_t result;
	prompt_t from, to;
	bench_t b;

	(void)state;
	store_ten(&b, 3, &from, &to);
	prompt_init(&to, 1, 14, 30);
	assert_int_equal(load_now(&b, &to, &result), KVC_OK);
	assert_int_equal(result.blocks, 10);
	assert_int_equal(result.why, 1); /* ABSENT */
	request.load = &result;
	kvx_record_request(b.kvx, &request);
	assert_int_equal(fake.reports, 1);
	assert_int_equal(fake.last_report_why, 1);
	bench_close(&b);
}

/* ---- at random ------------------------------------------------------------------------------- */

static void random_knobs(uint64_t *seed)
{
	fake.incarnation = below(seed, 12) ? fake.incarnation ? fake.incarnation : 1 + below(seed, 1000) : 0;
	fake.silent = below(seed, 15) == 0;
	fake.answer_after = below(seed, 4);
	fake.ready_step = 1 + below(seed, 4);
	fake.disk = below(seed, 5);
	fake.acquire = below(seed, 8) ? KVC_OK : KVC_MISS;
	fake.rest = below(seed, 8) ? KVC_OK : KVC_ERR_TIMEOUT;
	fake.rest_at = below(seed, 8);
	fake.revoke_on_block = below(seed, 4) ? 0 : 1 + below(seed, 10);
	fake.grant = below(seed, 2) ? 0 : 1 + below(seed, 6);
	fake.put = below(seed, 2) ? KVC_ERR_NO_PARENT : KVC_ERR_BUSY;
	fake.put_times = below(seed, 4) ? 0 : 1;
	fake.put_done = below(seed, 6) ? KVC_OK : KVC_ERR_REVOKED;
	fake.put_end = below(seed, 12) ? KVC_OK : KVC_ERR_CLOSED;
}

/* One load or save of a random conversation; aborted at times. What a load reports is there, to the last float. */
static void random_job(bench_t *b, uint64_t *seed)
{
	const uint32_t c = below(seed, 4), n = 1 + below(seed, MAX_JOB),
		       abort_at = below(seed, 4) ? 60 : below(seed, 6);
	const uint32_t first = below(seed, BLOCKS);
	kvx_load_result_t result = {0};
	kvx_load_t *load = NULL;
	kvx_save_t *save = NULL;
	prompt_t p;

	prompt_init(&p, c, n, first);
	if (below(seed, 3) == 0) {
		kvc_key_t keys[MAX_JOB];

		fake_keys(p.tokens, n * TOKENS, NULL, keys);
		fake_evict(&keys[n - 1]);
	}
	if (below(seed, 2)) {
		for (uint32_t i = 0; i < n; i++) {
			fill(b, p.blocks[i], c, i);
		}
		(void)kvx_save_prefix(b->kvx, &p.prefix, &save);
	} else {
		p.prefix.deadline_ms = 20;
		(void)kvx_load_prefix(b->kvx, &p.prefix, &load, &result);
	}
	for (uint32_t i = 0; i < abort_at && kvx_poll(b->kvx, 0) > 0; i++) {
		if (load && kvx_load_state(load, &result) != KVC_PENDING) {
			break;
		}
	}
	if (load) {
		(void)kvx_load_state(load, &result);
	}
	for (uint32_t i = 0; result.status == KVC_OK && i < result.blocks; i++) {
		assert_true(holds(b, p.blocks[i], c, i));
	}
	kvx_load_end(load);
	kvx_save_end(save);
	assert_int_equal(fake.leases, 0);
	assert_int_equal(fake.puts, 0);
}

static void p1_p4_p7_under_any_fault_loads_are_right_and_nothing_leaks(void **state)
{
	uint64_t seed = 101;
	kvx_stats_t stats;
	bench_t b;

	(void)state;
	fake_reset(&layout);
	bench_open(&b, 2);
	for (int round = 0; round < 3000; round++) {
		random_knobs(&seed);
		random_job(&b, &seed);
	}
	stats = stats_of(&b);
	print_message("load hits %lu lost %lu, save done %lu lost %lu\n", (unsigned long)stats.load_hits,
		      (unsigned long)stats.load_lost, (unsigned long)stats.save_done, (unsigned long)stats.save_lost);
	assert_true(stats.load_hits > 50 && stats.load_lost > 20 && stats.save_done > 50 && stats.save_lost > 20);
	bench_close(&b);
	fake_reset(NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_prefix_comes_back_as_it_was),
		cmocka_unit_test(p5_one_poll_moves_no_more_than_its_budget),
		cmocka_unit_test(jobs_that_share_a_small_budget_all_end_well),
		cmocka_unit_test(p1_a_block_copied_while_its_lease_ends_does_not_count),
		cmocka_unit_test(p1_a_damaged_block_ends_the_load_before_it_and_is_reported),
		cmocka_unit_test(p7_a_load_that_stands_still_ends_in_time_or_at_once),
		cmocka_unit_test(p7_a_daemon_that_falls_silent_or_dies_amid_a_load_is_a_miss),
		cmocka_unit_test(p7_a_load_bears_a_silence_of_200_ms),
		cmocka_unit_test(p7_a_lookup_waits_for_a_daemon_that_stalls),
		cmocka_unit_test(a_save_takes_what_is_granted_and_comes_back_for_the_rest),
		cmocka_unit_test(a_save_whose_parent_is_gone_offers_the_whole_prefix),
		cmocka_unit_test(p7_a_save_that_cannot_be_is_given_up_and_counted),
		cmocka_unit_test(p7_a_connector_whose_self_test_reads_other_bytes_never_loads),
		cmocka_unit_test(p7_what_fails_at_attach_is_tried_again_in_poll),
		cmocka_unit_test(p5_jobs_are_limited_and_bad_prefixes_refused),
		cmocka_unit_test(reports_carry_the_reason_of_the_miss),
		cmocka_unit_test(p1_p4_p7_under_any_fault_loads_are_right_and_nothing_leaks),
	};

	return cmocka_run_group_tests_name("kvx.jobs", tests, NULL, NULL);
}
