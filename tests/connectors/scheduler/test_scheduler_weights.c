/* Weights that may have been changed: what is found, saved and handed over while their name is unproven, under the same
 * name as before, and under another one. */
#include "connectors/scheduler/sched_rig.h"
#include "scheduler/names/spaces.h"
#include "scheduler/names/weights.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

static const sr_options_t plain, later = {.named_later = 1}, own = {.named_later = 1, .own_keys = 1},
				 windows = {.named_later = 1, .groups = 2}, unnamed = {.unnamed = 1};
static sr_request_t a, b, c, d;

/* ---- unproven -------------------------------------------------------------------------------- */

/* And no block is touched. */
SR_CASE(p1_while_unproven_nothing_is_found_or_saved, plain)
{
	sr_store(&a, "a", 1, 0, 120);
	kvx_scheduler_suspend(sr.scheduler);
	sr_request(&b, "b", 1, 0, 121);
	assert_int_equal(sr_match(&b), 0);
	assert_int_equal(sr_stats().miss_tokens_weights_pending, 120);
	sr_request(&c, "c", 2, 0, 121);
	assert_int_equal(sr_run(&c, 100), 0);
	assert_int_equal(sr_stats().save_done, 15);
	assert_int_equal(sr_count_stored(KVX_HOST_MEM, &a), 15);
	assert_false(kvx_scheduler_is_ready(sr.scheduler));
	assert_int_equal(sr_stats().suspensions, 1);
}

/* What was stored under a name that is given again may be of other weights, until it is taken back. */
SR_CASE(p1_nothing_is_found_that_is_to_be_taken_back, later)
{
	sr_store(&a, "a", 1, 0, 120);
	sr_end(&a);
	sr.scheduler->withdraw_ns = UINT64_MAX; /* not yet */
	kvx_scheduler_suspend(sr.scheduler);
	assert_int_equal(kvx_scheduler_set_weights(sr.scheduler, "w2"), KVC_OK);
	SR_UNTIL(kvx_scheduler_is_ready(sr.scheduler));
	kvx_scheduler_suspend(sr.scheduler);
	assert_int_equal(kvx_scheduler_set_weights(sr.scheduler, "w1"), KVC_OK);
	SR_UNTIL(kvx_scheduler_is_ready(sr.scheduler));
	assert_int_equal(sr_count_stored(KVX_HOST_MEM, &a), 15);
	sr_request(&b, "b", 1, 0, 121);
	assert_int_equal(sr_look_up(&b), 0);
	assert_int_equal(sr_stats().miss_tokens_weights_pending, 120);
	sr.scheduler->withdraw_ns = 0;
	SR_UNTIL(sr.scheduler->stored.withdrawn == 0);
	assert_int_equal(sr_count_stored(KVX_HOST_MEM, &a), 0);
	sr_store(&c, "c", 1, 0, 120);
	assert_int_equal(sr_match(&b), 120);
}

/* A name is given once, until it is unproven. */
SR_CASE(p10_weights_that_have_a_name_get_no_other, later)
{
	char name[KVX_WEIGHTS_MAX + 2];

	assert_int_equal(kvx_scheduler_set_weights(sr.scheduler, "w1"), KVC_ERR_ARG);
	kvx_scheduler_suspend(sr.scheduler);
	memset(name, 'x', sizeof name - 1);
	name[sizeof name - 1] = '\0';
	assert_int_equal(kvx_scheduler_set_weights(sr.scheduler, name), KVC_ERR_ARG);
	assert_int_equal(kvx_scheduler_set_weights(sr.scheduler, ""), KVC_ERR_ARG);
	assert_int_equal(kvx_scheduler_set_weights(sr.scheduler, "w2"), KVC_OK);
	assert_int_equal(kvx_scheduler_set_weights(sr.scheduler, "w3"), KVC_ERR_ARG);
	kvx_scheduler_suspend(sr.scheduler); /* a name that was given and never used is forgotten */
	assert_int_equal(kvx_scheduler_set_weights(sr.scheduler, "w1"), KVC_OK);
	SR_UNTIL(kvx_scheduler_is_ready(sr.scheduler));
	assert_string_equal(sr.scheduler->weights, "w1");
}

/* Nothing of it is saved. The consumer of a prompt that is handed over is told so, whichever side comes first. */
SR_CASE(p7_a_producer_whose_weights_have_no_name_says_so, plain)
{
	const kvx_transfer_t to = {.struct_size = sizeof to, .id = "x"};
	kvc_handover_info_t info = {.struct_size = sizeof info};
	kvc_handover_t *taken = NULL;

	if (!sr.row) {
		assert_int_equal(kvc_handover_recv(sr.space[KVX_HOST_MEM], "x", 60000, &taken), KVC_OK);
		SR_UNTIL(rig_counter(&sr.rig, "kvd_handovers") == 1);
	}
	if (!sr.options.unnamed) {
		kvx_scheduler_suspend(sr.scheduler);
	}
	sr_request(&a, "a", 1, 0, 120);
	assert_int_equal(kvx_scheduler_send(sr.scheduler, &a.ask, &to), KVC_OK);
	assert_int_equal(sr_run(&a, 0), 0);
	assert_false(kvx_scheduler_has_sent(sr.scheduler, &a.ask)); /* the engine's answer says that nothing comes */
	sr_finish(&a);
	SR_UNTIL(!sr.scheduler->handovers);
	if (sr.row) {
		assert_int_equal(kvc_handover_recv(sr.space[KVX_HOST_MEM], "x", 60000, &taken), KVC_OK);
	}
	SR_UNTIL((kvc_handover_get_info(taken, &info), info.status != KVC_PENDING));
	assert_int_equal(info.status, KVC_ERR_OTHER_SPACE);
	kvc_handover_done(taken, 0);
	assert_int_equal(sr_stats().handovers_send_failed, 1);
	SR_UNTIL(rig_counter(&sr.rig, "kvd_handovers") == 0);

	/* Then the space is closed, and is the same for the next one. */
	SR_UNTIL(!sr.scheduler->spaces[1].space);
	assert_int_equal(kvx_scheduler_send(sr.scheduler, &a.ask, &to), KVC_OK);
	sr_finish(&a);
	SR_UNTIL(!sr.scheduler->handovers);
	assert_int_equal(sr.scheduler->space_count, 2);
}
SR_ALSO(p7_a_producer_whose_weights_have_no_name_says_so, plain, 1)
SR_ALSO(p7_a_producer_whose_weights_have_no_name_says_so, unnamed, 0)
SR_ALSO(p7_a_producer_whose_weights_have_no_name_says_so, unnamed, 1)

/* ---- the same weights ------------------------------------------------------------------------ */

/* But for what lay in the engine: nobody knows when it was computed. */
SR_CASE(p1_equal_weights_find_everything_again, later)
{
	sr_store(&a, "a", 1, 0, 120);
	sr_request(&c, "c", 3, 0, 120);
	sr_place(&c, 100, 0);
	sr_name_weights("w1");
	assert_int_equal(sr_step_saves(&c, 120), 0);
	sr_request(&b, "b", 1, 0, 121);
	assert_int_equal(sr_run(&b, 200), 120);
	assert_int_equal(sr_stats().withdrawn, 0);
	assert_int_equal(sr.scheduler->space_count, 1);
}

/* ---- other weights --------------------------------------------------------------------------- */

/* What is saved under the new name is found under it, and not under the old one. */
SR_CASE(p1_other_weights_find_nothing_of_before, later)
{
	sr_store(&a, "a", 1, 0, 120);
	assert_int_equal(sr_step_saves(&a, 120), 0);
	sr_name_weights("w2");
	assert_int_equal(sr_step_saves(&a, 120), 0); /* what the living have computed */
	sr_request(&b, "b", 1, 0, 121);
	assert_int_equal(sr_run(&b, 100), 0);
	sr_settle();
	sr_request(&c, "c", 1, 0, 121);
	assert_int_equal(sr_run(&c, 200), 120);
	sr_finish(&c);
	sr_request(&d, "d", 5, 0, 120);
	(void)sr_run(&d, 0);
	sr_settle();
	assert_int_equal(sr_count_stored(KVX_HOST_MEM, &d), 0);
}

/* A chain of our own begins with the space, so it begins again. */
SR_CASE(p1_own_keys_begin_again_with_another_name, own)
{
	sr_store(&a, "a", 1, 0, 120);
	sr_name_weights("w2");
	sr_request(&b, "b", 1, 0, 121);
	assert_int_equal(sr_run(&b, 100), 0);
	sr_name_weights("w1");
	sr_request(&c, "c", 1, 0, 121);
	assert_int_equal(sr_match(&c), 0); /* withdrawn: nobody knows which weights it is of */
}

/* ---- taken back ------------------------------------------------------------------------------ */

/* Stored by this engine since the last proof; what others had stored, and what was proved since, stays. */
SR_CASE(p1_what_was_stored_since_the_last_proof_is_taken_back, later)
{
	sr_store(&a, "a", 1, 80, 80);
	sr_name_weights("w1");
	sr_store(&b, "b", 2, 80, 120); /* after those: another branch of the same prefix */
	sr_store(&c, "c", 7, 0, 120);
	assert_int_equal(sr_count_stored(KVX_HOST_MEM, &c), 15);
	sr_name_weights("w2");
	SR_UNTIL(sr_stats().withdrawals == sr_stats().withdrawn);
	assert_true(sr_stats().withdrawn > 0);
	SR_UNTIL(sr_count_stored(KVX_HOST_MEM, &c) == 0);
	assert_int_equal(sr_count_stored(KVX_HOST_MEM, &a), 10);
	assert_int_equal(sr_count_stored(KVX_HOST_MEM, &b), 10);
	assert_false(kvx_scheduler_has_pending(sr.scheduler));
}

/* Windows have no parents: each block is named. */
SR_CASE(p1_of_windows_every_block_is_taken_back, windows)
{
	sr_store(&a, "a", 1, 0, 120);
	sr_name_weights("w2");
	SR_UNTIL(sr_stats().withdrawals == sr_stats().withdrawn);
	assert_int_equal(sr_stats().withdrawn, 1 + 15);
	sr_name_weights("w1");
	sr_request(&b, "b", 1, 0, 121);
	assert_int_equal(sr_match(&b), 0);
}

/* The engine need not wait for its daemon, nor for its next request. */
SR_CASE(p2_what_is_to_be_taken_back_waits_for_the_daemon, later)
{
	for (int row = 0; row < 2; row++) {
		sr_store(&a, row ? "b" : "a", 1u + (uint32_t)row, 0, 120);
		rig_signal(&sr.rig, SIGSTOP);
		kvx_scheduler_suspend(sr.scheduler);
		assert_int_equal(kvx_scheduler_set_weights(sr.scheduler, row ? "w1" : "w2"), KVC_OK);
		(void)sr_step();
		assert_true(sr_stats().withdrawn > sr_stats().withdrawals);
		rig_signal(&sr.rig, SIGCONT);
		SR_UNTIL(sr_stats().withdrawals == sr_stats().withdrawn);
	}
	assert_int_equal(sr_count_stored(KVX_HOST_MEM, &a), 0);
}

/* With its end, too. */
SR_CASE(p2_an_engine_that_ends_takes_back_what_it_must, later)
{
	kvc_identity_t identity;
	kvc_match_t match = {.struct_size = sizeof match};
	kvc_key_t keys[15];
	kvc_space_t *space;

	sr_store(&a, "a", 1, 0, 120);
	identity = sr.identity;
	sr_name_weights("w1");
	sr_store(&b, "b", 2, 0, 120);
	kvx_scheduler_suspend(sr.scheduler);
	assert_int_equal(kvx_scheduler_set_weights(sr.scheduler, "w2"), KVC_OK);
	(void)kvx_scheduler_has_pending(sr.scheduler);
	sr_close();
	assert_int_equal(sr_open(&later), KVC_OK);
	sr_wait_ready();
	assert_int_equal(kvc_space_open(sr.kvc, &identity, &space), KVC_OK);
	for (uint32_t i = 0; i < 15; i++) {
		assert_int_equal(kvc_key_bind(space, b.hash[i], 32, &keys[i]), KVC_OK);
	}
	kvc_match(space, keys, 15, &match);
	assert_int_equal(match.n, 0);
	assert_int_equal(sr_count_stored(KVX_HOST_MEM, &a), 15);
	kvc_space_close(space);
}

/* No list grows without end: the weights are proved before it is full. */
SR_CASE(p5_what_may_have_to_be_taken_back_is_bounded, later)
{
	kvx_stored_list_t *list = &sr.scheduler->stored;
	const kvx_stored_at_t some = {.space = 0};

	sr_store(&a, "a", 1, 0, 120);
	while (kvx_weights_reserve_stored(sr.scheduler, 1)) {
		kvx_weights_add_stored(sr.scheduler, &some);
	}
	assert_true(kvx_scheduler_needs_proof(sr.scheduler));
	assert_int_equal(list->n, 1u << 20);
	sr_request(&b, "b", 2, 0, 120);
	(void)sr_run(&b, 0);
	assert_int_equal(sr_stats().save_done, 15); /* nothing more is saved before */
	sr_name_weights("w1");
	assert_false(kvx_scheduler_needs_proof(sr.scheduler));
	assert_int_equal(list->n, 0);
	sr_request(&c, "c", 3, 0, 120);
	(void)sr_run(&c, 0);
	sr_settle();
	assert_int_equal(sr_stats().save_done, 30);
}

/* ---- names ----------------------------------------------------------------------------------- */

/* An adapter's blocks depend on the weights below it. */
SR_CASE(p1_an_adapter_finds_nothing_of_other_weights, later)
{
	for (int row = 0; row < 2; row++) {
		sr_request(&a, "a", 1, 0, 80);
		a.ask.lora = "adapter-1:0123";
		assert_int_equal(sr_match(&a), 0);
		SR_UNTIL(sr.scheduler->spaces[sr.scheduler->space_count - 1u].open);
		assert_int_equal(sr_match(&a), 0);
		(void)sr_run(&a, 0);
		sr_settle();
		sr_finish(&a);
		sr_request(&b, "b", 1, 0, 81);
		b.ask.lora = a.ask.lora;
		assert_int_equal(sr_match(&b), 80);
		sr_finish(&b);
		sr_name_weights(row ? "w1" : "w2");
	}
}

/* More names than an engine has numbers: old ones become free. (The daemon refuses spaces beyond its own limit.) */
SR_CASE(p5_names_without_end_take_bounded_memory, plain)
{
	char name[16];

	sr_store(&a, "a", 1, 0, 120);
	for (uint32_t i = 0; i < KVX_SPACES_MAX + 100u; i++) {
		(void)snprintf(name, sizeof name, "w-%u", i);
		kvx_scheduler_suspend(sr.scheduler);
		assert_int_equal(kvx_scheduler_set_weights(sr.scheduler, name), KVC_OK);
		(void)sr_step();
		assert_true(sr.scheduler->base > 0 && sr.scheduler->base < KVX_SPACES_MAX);
		assert_string_equal(sr.scheduler->spaces[sr.scheduler->base].weights, name);
	}
	assert_int_equal(sr.scheduler->space_count, KVX_SPACES_MAX);
	sr_name_weights("w1");
	assert_int_equal(sr.scheduler->base, 0);
}

/* The one whose last use was the longest ago is closed, unless something in progress has it. */
SR_CASE(p5_adapters_without_end_take_bounded_memory, plain)
{
	const uint32_t extra = 100;
	char name[32];
	uint32_t first, second;

	for (uint32_t i = 0; i < KVX_SPACES_MAX + extra; i++) {
		sr_request(i == 0 ? &b : &a, i == 0 ? "b" : "a", 1, 0, 80);
		(void)snprintf(name, sizeof name, "adapter-%u:0123", i);
		(i == 0 ? &b : &a)->ask.lora = name;
		(void)sr_match(i == 0 ? &b : &a); /* the first request goes on */
		if (i > 0) {
			sr_finish(&a);
		}
		(void)kvx_space_of_name(sr.scheduler,
					"adapter-1:0123"); /* and the second adapter is used all the time */
	}
	assert_int_equal(sr_stats().spaces_refused, 0);
	assert_int_equal(sr.scheduler->space_count, KVX_SPACES_MAX);
	first = kvx_space_of_name(sr.scheduler, "adapter-0:0123");
	second = kvx_space_of_name(sr.scheduler, "adapter-1:0123");
	assert_true(first < 3 && second < 3 && first != second); /* as at first */
	(void)snprintf(name, sizeof name, "adapter-%u:0123", KVX_SPACES_MAX + extra - 1u);
	assert_int_equal(kvx_space_of_name(sr.scheduler, name), 3u + extra);
	sr_finish(&b);
}

/* What may have to be taken back names the space. When that is so of all, a proof is due, and then they may go. */
SR_CASE(p5_spaces_of_unproved_blocks_wait_for_a_proof, later)
{
	char name[32];

	for (uint32_t i = 1; i < KVX_SPACES_MAX; i++) {
		(void)snprintf(name, sizeof name, "adapter-%u:0123", i);
		assert_int_equal(kvx_space_of_name(sr.scheduler, name), i);
		assert_true(kvx_weights_reserve_stored(sr.scheduler, 1));
		kvx_weights_add_stored(sr.scheduler, &(kvx_stored_at_t){.space = (uint16_t)i});
	}
	assert_false(kvx_scheduler_needs_proof(sr.scheduler));
	assert_int_equal(kvx_space_of_name(sr.scheduler, "another:0123"), UINT32_MAX);
	assert_true(kvx_scheduler_needs_proof(sr.scheduler));
	sr_name_weights("w1");
	assert_int_equal(kvx_space_of_name(sr.scheduler, "another:0123"), 1);
}

SR_MAIN
