/* Loads and saves against a real daemon, with every way in which they can fail, one at a time and at random. */
#include "connectors/inproc/jobs_rig.h"
#include "engine/check.h"

#include "common/await.h"
#include "kv/env.h"
#include "kv/shm.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *kvd_program;

static void open_with_ten(bench_t *b, prompt_t *from, prompt_t *to)
{
	bench_open(b, kvd_program, RIG_SILENCE);
	store_ten(b, from, to);
}

static void a_prefix_comes_back_as_it_was(void **state)
{
	kvx_load_result_t result;
	prompt_t from, to;
	kvx_load_t *load;
	bench_t b;

	(void)state;
	open_with_ten(&b, &from, &to);
	assert_int_equal(load_now(&b, &to, &result), KVC_OK);
	assert_int_equal(result.tokens, 10 * TOKENS);
	assert_int_equal(result.cause, KVC_OK);
	assert_int_equal(result.cpu_tokens, 10 * TOKENS);
	for (uint32_t i = 0; i < 10; i++) {
		assert_true(holds(&b, 30 + i, 1, i));
	}
	rig_wait_written(&b.rig);
	rig_kill(&b.rig);
	rig_start(&b.rig);
	for (uint32_t i = 0; i < JOBS_MS / 10u && stats_of(&b).attaches < 2; i++) {
		(void)kvx_poll(b.kvx, 10);
	}
	bench_await_ready(&b);
	prompt_init(&to, 1, 10, 50);
	atomic_store(&knobs.late, 1); /* while the daemon reads them: a lookup finds them in memory then */
	assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_PENDING);
	for (uint32_t i = 0; i < 200; i++) {
		(void)kvx_poll(b.kvx, 1);
	}
	atomic_store(&knobs.late, 0);
	while (kvx_load_state(load, &result) == KVC_PENDING) {
		(void)kvx_poll(b.kvx, 1);
	}
	kvx_load_end(load);
	assert_int_equal(result.status, KVC_OK);
	assert_int_equal(result.disk_tokens, 10 * TOKENS);
	assert_int_equal(result.cpu_tokens, 0);
	bench_close(&b);
}

/* A key says which salt it is of, and libkvc derives the same. */
static void p1_a_salt_keeps_callers_apart(void **state)
{
	kvx_load_result_t result;
	kvx_save_result_t saved;
	kvc_key_t keys[2][MAX_JOB];
	prompt_t from, to;
	bench_t b;

	(void)state;
	open_with_ten(&b, &from, &to);
	keys_of(&b, &from, keys[0]);
	prompt_init(&to, 1, 12, 30);
	to.prefix.salt = "another tenant's salt";
	keys_of(&b, &to, keys[1]);
	assert_int_equal(load_now(&b, &to, &result), KVC_MISS);
	assert_memory_equal(&result.first_missing, &keys[1][0], sizeof keys[1][0]);
	to.prefix.salt = NULL;
	assert_int_equal(load_now(&b, &to, &result), KVC_OK);
	assert_int_equal(result.blocks, 10);
	assert_int_equal(result.why, KV_WHY_ABSENT);
	from.prefix.salt = to.prefix.salt = "another tenant's salt";
	assert_int_equal(save_now(&b, &from, &saved), KVC_OK);
	assert_int_equal(load_now(&b, &to, &result), KVC_OK);
	assert_memory_equal(&result.first_missing, &keys[1][10], sizeof keys[1][10]);
	bench_close(&b);
}

static void p5_a_poll_returns_in_time_whatever_a_load_waits_for(void **state)
{
	prompt_t from, to;
	kvx_load_t *load;
	bench_t b;

	(void)state;
	open_with_ten(&b, &from, &to);
	atomic_store(&knobs.ready, 0);
	assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_PENDING);
	for (uint32_t i = 0; i < 20; i++) {
		const uint64_t start = kv_now_ns(&kv_env_posix);

		assert_int_equal(kvx_poll(b.kvx, i % 5u), 1);
		assert_true(kv_now_ns(&kv_env_posix) - start < UINT64_C(2000000000)); /* of a busy machine */
	}
	assert_int_equal(kvx_load_state(load, NULL), KVC_PENDING);
	kvx_load_end(load);
	for (uint32_t i = 0; i < 10; i++) {
		assert_false(holds(&b, 30 + i, 1, i));
	}
	bench_close(&b);
}

static void jobs_that_share_the_transfer_thread_all_end_well(void **state)
{
	prompt_t from, to, p[4];
	kvx_load_t *loads[4];
	kvx_save_t *saves[4];
	bench_t b;

	(void)state;
	open_with_ten(&b, &from, &to);
	for (uint32_t i = 0; i < 4; i++) {
		prompt_init(&to, 1, 2 + i, 10 + 5 * i);
		assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &loads[i], NULL), KVC_PENDING);
		prompt_init(&p[i], 20 + i, 5 + i, 40);
		assert_int_equal(kvx_save_prefix(b.kvx, &p[i].prefix, &saves[i]), KVC_PENDING);
	}
	while (kvx_poll(b.kvx, 1) > 0) {
	}
	for (uint32_t i = 0; i < 4; i++) {
		assert_int_equal(kvx_load_state(loads[i], NULL), KVC_OK);
		assert_int_equal(kvx_save_state(saves[i], NULL), KVC_OK);
		kvx_load_end(loads[i]);
		kvx_save_end(saves[i]);
		for (uint32_t j = 0; j < 2 + i; j++) {
			assert_true(holds(&b, 10 + 5 * i + j, 1, j));
		}
	}
	bench_close(&b);
}

static void p1_a_block_copied_while_its_lease_ends_does_not_count(void **state)
{
	kvx_load_result_t result;
	prompt_t from, to;
	bench_t b;

	(void)state;
	open_with_ten(&b, &from, &to);
	atomic_store(&knobs.revoke_on, 30);
	assert_int_equal(load_now(&b, &to, &result), KVC_MISS);
	assert_int_equal(result.blocks, 0);
	assert_int_equal(result.cause, KVC_ERR_REVOKED);
	assert_int_equal(stats_of(&b).load_lost, 1);
	bench_close(&b);
}

static void p1_a_damaged_block_ends_the_load_before_it_and_is_reported(void **state)
{
	kvx_load_result_t result;
	kvc_key_t keys[MAX_JOB];
	prompt_t from, to;
	bench_t b;

	(void)state;
	open_with_ten(&b, &from, &to);
	keys_of(&b, &from, keys);
	damage(&b, &from, 6);
	assert_int_equal(load_now(&b, &to, &result), KVC_OK);
	assert_int_equal(result.blocks, 6);
	assert_int_equal(result.cause, KVC_ERR_CORRUPT);
	assert_int_equal(result.why, KV_WHY_CORRUPT);
	assert_memory_equal(&result.first_missing, &keys[6], sizeof keys[6]);
	assert_int_equal(atomic_load(&knobs.bad), 1);
	assert_int_equal(stats_of(&b).load_corrupt, 1);
	bench_close(&b);
}

static void p7_a_load_that_stands_still_ends_in_time_or_at_once(void **state)
{
	kvx_load_result_t result;
	prompt_t from, to;
	bench_t b;

	(void)state;
	open_with_ten(&b, &from, &to);
	atomic_store(&knobs.ready, 0);
	to.prefix.deadline_ms = 200;
	assert_int_equal(load_now(&b, &to, &result), KVC_MISS);
	assert_int_equal(result.cause, KVC_ERR_TIMEOUT);
	assert_int_equal(stats_of(&b).load_timeouts, 1);
	assert_true(result.load_ns >= 190000000u && result.load_ns < JOBS_MS * UINT64_C(1000000));
	to.prefix.deadline_ms = 0;

	atomic_store(&knobs.rest, KVC_ERR_CORRUPT);
	atomic_store(&knobs.ready, 4);
	assert_int_equal(load_now(&b, &to, &result), KVC_OK);
	assert_int_equal(result.blocks, 4);
	assert_int_equal(result.cause, KVC_ERR_CORRUPT);
	assert_true(result.load_ns < JOBS_MS * UINT64_C(1000000));

	atomic_store(&knobs.rest, 0);
	atomic_store(&knobs.lease, KVC_ERR_BUSY);
	assert_int_equal(load_now(&b, &to, &result), KVC_MISS);
	assert_true(result.load_ns < JOBS_MS * UINT64_C(1000000));
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
		bench_open(&b, kvd_program, "500ms");
		store_ten(&b, &from, &to);
		rig_wait_written(&b.rig);
		bench_await_ready(&b);
		atomic_store(&knobs.ready, 0);
		assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_PENDING);
		assert_int_equal(kvx_poll(b.kvx, 50), 1); /* the ranks have it */
		if (death) {
			rig_kill(&b.rig);
		} else {
			rig_signal(&b.rig, SIGSTOP);
		}
		while (kvx_load_state(load, &result) == KVC_PENDING) {
			(void)kvx_poll(b.kvx, 1);
		}
		assert_int_equal(result.status, KVC_MISS);
		assert_true(result.cause == KVC_ERR_DAEMON_STALE || (death && result.cause == KVC_ERR_REVOKED));
		assert_true(result.load_ns < JOBS_MS * UINT64_C(1000000));
		kvx_load_end(load);
		assert_int_equal(stats_of(&b).load_lost, 1);

		atomic_store(&knobs.ready, NONE);
		if (death) {
			rig_start(&b.rig);
		} else {
			rig_signal(&b.rig, SIGCONT);
		}
		bench_await_ready(&b);
		assert_int_equal(load_now(&b, &to, &result), KVC_OK);
		bench_close(&b);
	}
}

/* Whether their space is open yet or not. */
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

/* A miss costs more than the rest of a stall. */
static void p7_a_lookup_waits_for_a_daemon_that_stalls(void **state)
{
	kvx_load_result_t result;
	prompt_t from, to;
	kvx_load_t *load;
	bench_t b;

	(void)state;
	bench_open(&b, kvd_program, "500ms");
	store_ten(&b, &from, &to);
	bench_await_ready(&b);
	knobs.stalled = b.rig.pid;
	rig_signal(&b.rig, SIGSTOP);
	usleep(700000);
	atomic_store(&knobs.stall, 3);
	assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_PENDING);
	assert_int_equal(atomic_load(&knobs.stall), 0);
	kvx_load_end(load);

	rig_signal(&b.rig, SIGSTOP);
	usleep(700000);
	assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, &result), KVC_MISS);
	assert_int_equal(result.why, KV_WHY_DAEMON_STALE);
	rig_signal(&b.rig, SIGCONT);
	bench_await_ready(&b);
	bench_close(&b);
}

static void a_save_takes_what_is_granted_and_comes_back_for_the_rest(void **state)
{
	kvx_save_result_t saved;
	kvx_load_result_t result;
	prompt_t from, to;
	bench_t b;

	(void)state;
	open_with_ten(&b, &from, &to);
	prompt_init(&from, 2, 10, 10);
	prompt_init(&to, 2, 10, 40);
	for (uint32_t i = 0; i < 10; i++) {
		fill(&b, 10 + i, 2, i);
	}
	atomic_store(&knobs.grant, 4);
	atomic_store(&knobs.put_starts, 0);
	assert_int_equal(save_now(&b, &from, &saved), KVC_OK);
	assert_int_equal(saved.blocks, 10);
	assert_int_equal(atomic_load(&knobs.put_starts), 3);
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
	kvx_save_t *save;
	bench_t b;

	(void)state;
	for (size_t r = 0; r < KV_COUNT_OF(refusals); r++) {
		open_with_ten(&b, &from, &to);
		prompt_init(&from, 1, 15, 0);
		for (uint32_t i = 10; i < 15; i++) {
			fill(&b, i, 1, i);
		}
		atomic_store(&knobs.put_times, 1);
		assert_int_equal(kvx_save_prefix(b.kvx, &from.prefix, &save), KVC_PENDING);
		assert_int_equal(atomic_load(&knobs.put_from), 10);
		atomic_store(&knobs.put, refusals[r]);
		while (kvx_save_state(save, &saved) == KVC_PENDING) {
			(void)kvx_poll(b.kvx, 1);
		}
		kvx_save_end(save);
		assert_int_equal(saved.status, KVC_OK);
		assert_int_equal(atomic_load(&knobs.put_from), 0);
		assert_int_equal(saved.blocks, 15);
		atomic_store(&knobs.put, 0);
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
	open_with_ten(&b, &unused, &p);
	prompt_init(&p, 3, 6, 0);
	atomic_store(&knobs.put, KVC_ERR_BUSY);
	atomic_store(&knobs.put_times, 100);
	assert_int_equal(save_now(&b, &p, &saved), KVC_ERR_BUSY);
	assert_true(saved.copied);
	assert_int_equal(stats_of(&b).save_busy, 1);
	atomic_store(&knobs.put_times, 0);
	atomic_store(&knobs.put_end, KVC_ERR_CLOSED);
	assert_int_equal(save_now(&b, &p, &saved), KVC_ERR_REVOKED); /* the rank gives its part up */
	atomic_store(&knobs.put_end, 0);
	atomic_store(&knobs.put_done, KVC_ERR_REVOKED);
	assert_int_equal(save_now(&b, &p, &saved), KVC_ERR_REVOKED);
	assert_int_equal(stats_of(&b).save_lost, 2);
	atomic_store(&knobs.put_done, 0);
	prompt_init(&p, 4, 6, 0);
	p.prefix.deadline_ms = 200;
	rig_signal(&b.rig, SIGSTOP);
	assert_int_equal(kvx_save_prefix(b.kvx, &p.prefix, &save), KVC_PENDING);
	while (kvx_save_state(save, &saved) == KVC_PENDING) {
		(void)kvx_poll(b.kvx, 1);
	}
	assert_int_equal(saved.status, KVC_ERR_TIMEOUT);
	assert_true(saved.copied);
	kvx_save_end(save);
	assert_int_equal(stats_of(&b).save_timeouts, 1);
	rig_kill(&b.rig);
	while (kvx_is_ready(b.kvx)) {
		(void)kvx_poll(b.kvx, 1);
	}
	assert_int_equal(kvx_save_prefix(b.kvx, &p.prefix, &save), KVC_MISS);
	bench_close(&b);
}

/* What was aborted half way reads and writes no block of the engine's any longer. */
static void p1_blocks_are_the_engines_again_once_a_job_was_ended(void **state)
{
	kvx_load_result_t result;
	prompt_t from, to;
	kvx_load_t *load;
	kvx_save_t *save;
	bench_t b;

	(void)state;
	open_with_ten(&b, &from, &to);
	for (uint32_t round = 0; round < 60; round++) {
		prompt_t p;

		prompt_init(&p, 100 + round, 15, 40);
		for (uint32_t i = 0; i < 15; i++) {
			fill(&b, 40 + i, 100 + round, i);
		}
		assert_int_equal(kvx_save_prefix(b.kvx, &p.prefix, &save), KVC_PENDING);
		assert_int_equal(kvx_load_prefix(b.kvx, &to.prefix, &load, NULL), KVC_PENDING);
		for (uint32_t polls = round % 4u; polls > 0; polls--) {
			(void)kvx_poll(b.kvx, 0);
		}
		kvx_load_end(load);
		kvx_save_end(save);
		for (uint32_t i = 0; i < 15; i++) {
			fill(&b, 30 + i, 7, i);
			fill(&b, 45 + i, 8, i);
		}
		for (uint32_t i = 0; i < 10; i++) {
			(void)kvx_poll(b.kvx, 1);
			assert_true(holds(&b, 30 + i, 7, i));
		}
		prompt_init(&p, 100 + round, 15, 0);
		if (load_now(&b, &p, &result) == KVC_OK) {
			for (uint32_t i = 0; i < result.blocks; i++) {
				assert_true(holds(&b, i, 100 + round, i));
			}
		}
	}
	assert_true(stats_of(&b).save_aborted + stats_of(&b).load_aborted > 0);
	bench_close(&b);
}

static void p7_a_connector_whose_self_test_reads_other_bytes_never_loads(void **state)
{
	kvx_load_result_t result;
	kvx_save_result_t saved;
	prompt_t p;
	bench_t b;

	(void)state;
	atomic_store(&knobs.wrong, 1);
	bench_open(&b, kvd_program, RIG_SILENCE);
	for (uint32_t i = 0; i < JOBS_MS / 10u && stats_of(&b).self_test_failures == 0; i++) {
		(void)kvx_poll(b.kvx, 10);
	}
	assert_false(kvx_is_ready(b.kvx));
	prompt_init(&p, 1, 4, 0);
	assert_int_equal(save_now(&b, &p, &saved), KVC_MISS);
	atomic_store(&knobs.wrong, 0);
	for (int i = 0; i < 50; i++) {
		(void)kvx_poll(b.kvx, 1);
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
	atomic_store(&knobs.no_space, 1);
	bench_open(&b, kvd_program, RIG_SILENCE);
	assert_false(kvx_is_ready(b.kvx));
	atomic_store(&knobs.no_space, 0);
	bench_await_ready(&b);
	bench_close(&b);
}

static void p5_jobs_are_limited_and_bad_prefixes_refused(void **state)
{
	kvx_load_t *load;
	kvx_save_t *save;
	prompt_t from, to;
	bench_t b;

	(void)state;
	open_with_ten(&b, &from, &to);
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
	prompt_init(&to, 1, 1, 30);
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
	open_with_ten(&b, &from, &to);
	prompt_init(&to, 1, 14, 30);
	assert_int_equal(load_now(&b, &to, &result), KVC_OK);
	assert_int_equal(result.blocks, 10);
	assert_int_equal(result.why, KV_WHY_ABSENT);
	request.load = &result;
	kvx_record_request(b.kvx, &request);
	assert_int_equal(atomic_load(&knobs.reports), 1);
	assert_int_equal(atomic_load(&knobs.report_why), KV_WHY_ABSENT);
	bench_close(&b);
}

/* ---- at random ------------------------------------------------------------------------------- */

static void random_knobs(uint64_t *seed)
{
	atomic_store(&knobs.ready, below(seed, 4) ? NONE : below(seed, 10));
	atomic_store(&knobs.rest, below(seed, 4) ? 0 : KVC_ERR_CORRUPT);
	atomic_store(&knobs.lease, below(seed, 8) ? 0 : KVC_ERR_BUSY);
	atomic_store(&knobs.revoke_on, below(seed, 4) ? NONE : below(seed, BLOCKS));
	atomic_store(&knobs.revoked, 0);
	atomic_store(&knobs.grant, below(seed, 2) ? NONE : 1 + below(seed, 6));
	atomic_store(&knobs.put_done, below(seed, 6) ? 0 : KVC_ERR_REVOKED);
	atomic_store(&knobs.put_end, below(seed, 8) ? 0 : KVC_ERR_CLOSED);
}

/* One load or save of a random conversation; aborted at times. What a load reports is there, to the last float. */
static void random_job(bench_t *b, uint64_t *seed)
{
	const uint32_t c = below(seed, 12), n = 1 + below(seed, MAX_JOB),
		       abort_at = below(seed, 4) ? 60 : below(seed, 6);
	const uint32_t first = below(seed, BLOCKS);
	kvx_load_result_t result = {0};
	kvx_load_t *load = NULL;
	kvx_save_t *save = NULL;
	prompt_t p;

	prompt_init(&p, c, n, first);
	if (below(seed, 2)) {
		for (uint32_t i = 0; i < n; i++) {
			fill(b, p.blocks[i], c, i);
		}
		p.prefix.deadline_ms = 100;
		(void)kvx_save_prefix(b->kvx, &p.prefix, &save);
	} else {
		p.prefix.deadline_ms = 20;
		(void)kvx_load_prefix(b->kvx, &p.prefix, &load, &result);
	}
	for (uint32_t i = 0; i < abort_at && kvx_poll(b->kvx, 1) > 0; i++) {
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
}

static void p1_p4_p7_under_any_fault_loads_are_right_and_nothing_leaks(void **state)
{
	uint64_t seed = 101;
	kvx_stats_t stats;
	bench_t b;

	(void)state;
	bench_open(&b, kvd_program, RIG_SILENCE);
	bench_await_ready(&b);
	for (int round = 0; round < 600; round++) {
		random_knobs(&seed);
		random_job(&b, &seed);
	}
	stats = stats_of(&b);
	print_message("load hits %lu lost %lu, save done %lu lost %lu\n", (unsigned long)stats.load_hits,
		      (unsigned long)stats.load_lost, (unsigned long)stats.save_done, (unsigned long)stats.save_lost);
	assert_true(stats.load_hits > 20 && stats.load_lost > 5 && stats.save_done > 20 && stats.save_lost > 5);
	bench_close(&b); /* no lease and no put is left */
}

static int reset(void **state)
{
	(void)state;
	knobs_reset();

	return 0;
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(a_prefix_comes_back_as_it_was, reset),
		cmocka_unit_test_setup(p1_a_salt_keeps_callers_apart, reset),
		cmocka_unit_test_setup(p5_a_poll_returns_in_time_whatever_a_load_waits_for, reset),
		cmocka_unit_test_setup(jobs_that_share_the_transfer_thread_all_end_well, reset),
		cmocka_unit_test_setup(p1_a_block_copied_while_its_lease_ends_does_not_count, reset),
		cmocka_unit_test_setup(p1_a_damaged_block_ends_the_load_before_it_and_is_reported, reset),
		cmocka_unit_test_setup(p7_a_load_that_stands_still_ends_in_time_or_at_once, reset),
		cmocka_unit_test_setup(p7_a_daemon_that_falls_silent_or_dies_amid_a_load_is_a_miss, reset),
		cmocka_unit_test_setup(p7_a_load_bears_a_silence_of_200_ms, reset),
		cmocka_unit_test_setup(p7_a_lookup_waits_for_a_daemon_that_stalls, reset),
		cmocka_unit_test_setup(a_save_takes_what_is_granted_and_comes_back_for_the_rest, reset),
		cmocka_unit_test_setup(a_save_whose_parent_is_gone_offers_the_whole_prefix, reset),
		cmocka_unit_test_setup(p7_a_save_that_cannot_be_is_given_up_and_counted, reset),
		cmocka_unit_test_setup(p1_blocks_are_the_engines_again_once_a_job_was_ended, reset),
		cmocka_unit_test_setup(p7_a_connector_whose_self_test_reads_other_bytes_never_loads, reset),
		cmocka_unit_test_setup(p7_what_fails_at_attach_is_tried_again_in_poll, reset),
		cmocka_unit_test_setup(p5_jobs_are_limited_and_bad_prefixes_refused, reset),
		cmocka_unit_test_setup(reports_carry_the_reason_of_the_miss, reset),
		cmocka_unit_test_setup(p1_p4_p7_under_any_fault_loads_are_right_and_nothing_leaks, reset),
	};

	if (argc != 2) {
		return 64;
	}
	kvd_program = argv[1];

	return cmocka_run_group_tests_name("kvx.jobs", tests, NULL, NULL);
}
