/* Hand-overs in memory of a GPU: the consumer takes from there what it can, all else comes from host memory as it does
 * without, and nothing is left. Both requests are of one half here. A second space in host memory stands in for that of
 * either GPU: the producer's own one, and the same one as another engine names it. */
#include "connectors/scheduler/sched_rig.h"
#include "scheduler/lease_cache.h"
#include "scheduler/names/spaces.h"

#include <signal.h>
#include <unistd.h>

#define WAIT_MS 60000u
#define OWN     1 /* rows: the consumer is on the producer's GPU */
#define PRIVATE 2 /* the tokens after the last whole block are handed over, too */

static sr_request_t p, d;
static uint32_t seed = 1; /* of the prompt */
static const sr_options_t there = {.device = SR_DEVICE_THERE}, none, refused = {.device = SR_DEVICE_REFUSED},
			  window = {.device = SR_DEVICE_THERE, .groups = 2};

static kvx_transfer_t transfer(const sr_request_t *request, const char *device)
{
	const uint32_t whole = request->n / SR_UNIT * SR_UNIT;

	return (kvx_transfer_t){.struct_size = sizeof(kvx_transfer_t),
				.id = "x",
				.timeout_ms = WAIT_MS,
				.tokens = request->tokens + whole,
				.n_tokens = sr.row & PRIVATE ? request->n - whole : 0,
				.on_device = 1,
				.device = device};
}

static uint32_t mem(void)
{
	return sr.row & OWN ? KVX_OWN_MEM : KVX_OWN_MEM + 1u;
}

static const char *producer_gpu(void)
{
	return sr.row & OWN ? "fake-0" : "fake-1";
}

static void ask_to_receive(uint32_t n, const char *device)
{
	kvx_transfer_t from;

	sr_request(&d, "d", seed, 0, n);
	d.ask.whole = 1;
	from = transfer(&d, device);
	assert_int_equal(kvx_scheduler_receive(sr.scheduler, &d.ask, &from), KVC_OK);
}

/* The consumer is promised the prompt, and has got blocks from 100 on. */
static void receive(uint32_t n, const char *device)
{
	ask_to_receive(n, device);
	if (device && sr.groups == 1) {
		SR_UNTIL(kvx_mem_is_open(sr.scheduler, 0, mem()));
	}
	assert_int_equal(sr_match(&d), sr.row & PRIVATE ? n : n / SR_UNIT * SR_UNIT);
	assert_true(sr.hit.async);
	sr_place(&d, 100, 0);
	sr_start_load(&d);
}

static void ask_to_send(const sr_request_t *request)
{
	const kvx_transfer_t to = transfer(request, NULL);

	assert_int_equal(kvx_scheduler_send(sr.scheduler, &request->ask, &to), KVC_OK);
}

static void begin_sending(uint32_t n)
{
	sr_request(&p, "p", seed, 0, n);
	ask_to_send(&p);
	assert_int_equal(sr_match(&p), 0);
	sr_place(&p, 0, 0);
}

/* Nobody keeps anything: the daemon's gauge tells so, a heartbeat later. */
static void must_be_empty(void)
{
	SR_UNTIL(!sr.scheduler->handovers);
	usleep(2 * KV_MIRROR_HEARTBEAT_NS / 1000);
	SR_UNTIL(rig_counter(&sr.rig, "kvd_handovers") == 0);
}

/* All of it has come, and nobody keeps anything. */
static void must_come(uint32_t blocks, uint64_t from_device)
{
	sr_await_outcome(&d, KVC_OK);
	assert_true(sr_is_right(&d, 0, blocks));
	must_be_empty();
	assert_int_equal(sr_stats().handovers_received, 1);
	assert_int_equal(sr_stats().handovers_received_gpu, from_device);
	assert_int_equal(sr_stats().loads_failed, 0);
}

/* ---- from the GPU ---------------------------------------------------------------------------- */

SR_CASE(p1_pieces_come_from_memory_of_the_gpu, there)
{
	receive(203, producer_gpu());
	begin_sending(203);
	sr.hold_host_saves = 1; /* the host has nothing before all has come */
	sr_run_tokens(&p, 0, 80);
	SR_UNTIL(sr_is_right(&d, 0, 10));
	assert_true(sr_stats().handover_pieces > 0);
	assert_string_equal(kvx_scheduler_send_device(sr.scheduler, &p.ask), "fake-0");
	sr_run_tokens(&p, 80, 203);
	SR_UNTIL(sr_outcome(&d).load != KVC_PENDING);
	assert_true(sr_is_right(&d, 0, sr.row & PRIVATE ? 26 : 25));
	sr_release_saves();
	sr_finish(&p);
	must_come(sr.row & PRIVATE ? 26 : 25, 1);
	SR_UNTIL(sr_stats().handovers_sent == 1);
	assert_int_equal(sr_stats().handovers_sent_gpu, 1);
	assert_int_equal(sr.yielding_puts, 0);
	assert_int_equal(sr_stats().gpu_tokens, sr.row & PRIVATE ? 203 : 200);
}
SR_ALSO(p1_pieces_come_from_memory_of_the_gpu, there, OWN)
SR_ALSO(p1_pieces_come_from_memory_of_the_gpu, there, PRIVATE)

/* As the consumer would see it: the producer's GPU is another one, and no rank has said that it reaches that. */
static void be_out_of_reach(void)
{
	sr.scheduler->mems[KVX_OWN_MEM].off_ns = UINT64_MAX;
}

/* All of it is there, in both mems, before the consumer comes. */
static void hand_over(uint32_t n)
{
	assert_int_equal(kvx_mem_find_or_add(sr.scheduler, producer_gpu()), mem());
	begin_sending(n);
	sr_run_tokens(&p, 0, n);
	sr_end(&p);
	memset(sr.cache, 0, (size_t)SR_BLOCKS * sr.block_bytes);
}

/* Host memory has it too: memory of the GPU is nearer. */
SR_CASE(p7_what_the_host_has_too_comes_from_the_gpu, there)
{
	hand_over(200);
	be_out_of_reach();
	receive(200, producer_gpu());
	must_come(25, 1);
	assert_int_equal(sr_stats().gpu_tokens, 200);
}

/* A step can load it: nothing is promised, and both mems keep nothing. */
SR_CASE_ROW(p7_what_is_in_reach_comes_with_its_step, there, OWN | PRIVATE)
{
	hand_over(203);
	ask_to_receive(203, producer_gpu());
	SR_UNTIL(kvx_mem_is_open(sr.scheduler, 0, mem()));
	assert_int_equal(sr_match(&d), 200);
	assert_false(sr.hit.async);
	assert_int_equal(sr.hit.gpu_tokens, 200);
	sr_place(&d, 100, 0);
	sr_start_load(&d);
	(void)sr_step();
	assert_true(sr_is_right(&d, 0, 25));
	must_be_empty();
	assert_int_equal(sr_stats().handovers_receive_failed, 0);
}

/* The producer has computed nothing, and saves what it found there too, step by step as it is told. */
SR_CASE(p7_a_prompt_that_the_host_has_is_saved_on_the_gpu, there)
{
	sr_store(&d, "before", 1, 0, 200);
	sr_finish(&d);
	assert_int_equal(kvx_mem_find_or_add(sr.scheduler, producer_gpu()), mem());
	sr_request(&p, "p", 1, 0, 201);
	ask_to_send(&p);
	assert_int_equal(sr_match(&p), 200);
	sr_place(&p, 200, 0);
	sr_start_load(&p);
	(void)sr_step();
	sr_advance(&p, 80, 80);
	(void)sr_step();
	assert_int_equal(sr.plan.device_save_blocks, 10);
	assert_int_equal(sr.plan.urgent_saves, sr.plan.device_saves);
	sr_advance(&p, 200, 120);
	(void)sr_step();
	assert_int_equal(sr.plan.device_save_blocks, 15);
	sr_end(&p);
	assert_int_equal(sr_stats().handovers_sent_gpu, 1);
	be_out_of_reach();
	receive(200, producer_gpu());
	must_come(25, 1);
}

/* Neither is a hand-over in host memory alone one there, nor one of another node. */
SR_CASE(p7_a_gpu_is_used_only_where_it_is_asked_for, there)
{
	kvx_transfer_t one;

	sr_request(&p, "p", 1, 0, 200);
	one = transfer(&p, NULL);
	one.on_device = 0;
	assert_int_equal(kvx_scheduler_send(sr.scheduler, &p.ask, &one), KVC_OK);
	assert_null(sr.scheduler->handovers->next);
	sr_finish(&p);
	SR_UNTIL(!sr.scheduler->handovers);

	sr_request(&d, "d", 1, 0, 200);
	one = transfer(&d, "fake-1");
	one.peer = "node1";
	assert_int_equal(kvx_scheduler_receive(sr.scheduler, &d.ask, &one), KVC_OK);
	assert_null(sr.scheduler->handovers->next);
	sr_finish(&d);
	SR_UNTIL(!sr.scheduler->handovers);
}

/* Both halves of the engine know no more GPUs than there are mems. */
SR_CASE(p5_no_more_gpus_are_named_than_there_are_places, there)
{
	char name[16];

	for (uint32_t i = 0; i < 20; i++) {
		(void)snprintf(name, sizeof name, "gpu-%u", i);
		assert_int_equal(kvx_mem_find_or_add(sr.scheduler, name), i < KVX_MEMS - 2u ? i + 2u : KVX_HOST_MEM);
	}
	assert_int_equal(kvx_mem_find_or_add(sr.scheduler, "gpu-3"), 5);
	assert_int_equal(kvx_mem_find_or_add(sr.scheduler, "fake-0"), KVX_OWN_MEM);
	assert_int_equal(kvx_mem_find_or_add(sr.scheduler, ""), KVX_HOST_MEM);
	receive(200, NULL);
	sr_finish(&d);
	ask_to_receive(200, "gpu-19");
	assert_int_equal(sr_match(&d), 200);
	begin_sending(200);
	sr_place(&d, 100, 0);
	sr_start_load(&d);
	sr_run_tokens(&p, 0, 200);
	sr_finish(&p);
	sr_await_outcome(&d, KVC_OK);
	assert_int_equal(sr_stats().gpu_tokens, 0);
}

/* ---- not from the GPU ------------------------------------------------------------------------ */

/* The consumer knows no GPU: it has what it would have had. */
SR_CASE(p7_a_consumer_that_names_no_gpu_takes_from_the_host, there)
{
	kvc_handover_t *taken = NULL;

	receive(203, NULL);
	begin_sending(203);
	sr_run_tokens(&p, 0, 80);
	SR_UNTIL(sr_is_right(&d, 0, 10));
	sr_run_tokens(&p, 80, 203);
	sr_finish(&p);
	SR_UNTIL(sr_outcome(&d).load == KVC_OK);
	assert_true(sr_is_right(&d, 0, 25));
	assert_int_equal(sr_stats().gpu_tokens, 0);
	SR_UNTIL(!sr.scheduler->handovers);
	SR_UNTIL(rig_counter(&sr.rig, "kvd_handovers") == 1); /* for handover.ttl */
	assert_int_equal(kvc_handover_recv(sr.space[KVX_OWN_MEM], "x", WAIT_MS, &taken), KVC_OK);
	kvc_handover_done(taken, 0);
	SR_UNTIL(rig_counter(&sr.rig, "kvd_handovers") == 0);
}

/* The producer has no memory there, or is not asked to use it: the consumer's question leaves nothing. */
SR_CASE(p7_a_producer_without_the_gpu_hands_over_in_host_memory, none)
{
	receive(203, producer_gpu());
	begin_sending(203);
	assert_string_equal(kvx_scheduler_send_device(sr.scheduler, &p.ask), "");
	sr_run_tokens(&p, 0, 203);
	sr_finish(&p);
	must_come(25, 0);
	assert_int_equal(sr_stats().handovers_sent_gpu + sr_stats().gpu_blocks, 0);
}
SR_ALSO(p7_a_producer_without_the_gpu_hands_over_in_host_memory, refused, 0)
SR_NAMED("p7_several_groups_are_handed_over_in_host_memory", p7_a_producer_without_the_gpu_hands_over_in_host_memory,
	 window, 0)

static int is_sent_on_device(void)
{
	const kvx_shandover_t *h = sr.scheduler->handovers;

	while (h && (!h->sends || h->mem == KVX_HOST_MEM)) {
		h = h->next;
	}

	return h != NULL;
}

/* A save there fails after some have not: what follows comes from host memory, and the GPU keeps nothing. */
SR_CASE(p7_what_is_not_saved_on_the_gpu_comes_from_the_host, there)
{
	receive(203, producer_gpu());
	begin_sending(203);
	sr_run_tokens(&p, 0, 80);
	SR_UNTIL(sr_is_right(&d, 0, 10));
	sr.drop_device_saves = 1;
	sr_run_tokens(&p, 80, 160);
	SR_UNTIL(sr_is_right(&d, 0, 20));
	assert_string_equal(kvx_scheduler_send_device(sr.scheduler, &p.ask), "");
	SR_UNTIL(!is_sent_on_device());
	sr_run_tokens(&p, 160, 203);
	assert_int_equal(sr.plan.device_saves, 0); /* it has no parent there */
	sr_finish(&p);
	must_come(25, 0);
	assert_int_equal(sr_stats().handovers_sent, 1);
	assert_int_equal(sr_stats().handovers_sent_gpu, 0);
	sr.drop_device_saves = 0;
}
SR_ALSO(p7_what_is_not_saved_on_the_gpu_comes_from_the_host, there, OWN)

/* A save there takes long: what the host has is not kept waiting for it. */
SR_CASE(p7_what_the_host_has_does_not_wait_for_the_gpu, there)
{
	receive(203, producer_gpu());
	begin_sending(203);
	sr_run_tokens(&p, 0, 80);
	SR_UNTIL(sr_is_right(&d, 0, 10));
	sr.hold_device_saves = 1;
	sr_run_tokens(&p, 80, 203);
	sr_await_outcome(&d, KVC_OK);
	assert_true(sr_is_right(&d, 0, 25));
	sr_release_saves();
	sr_finish(&p);
	must_be_empty();
}

/* Memory there is full. */
SR_CASE(p5_a_full_gpu_is_not_waited_for, there)
{
	receive(203, producer_gpu());
	begin_sending(203);
	sr.refuse_device_puts = 1;
	sr_run_tokens(&p, 0, 203);
	sr_finish(&p);
	must_come(25, 0);
	sr.refuse_device_puts = 0;
}

/* The GPU has all blocks of it, as hits, while the producer still saves them to host memory: what the lease there lacks
 * comes with the hand-over. */
SR_CASE_ROW(p7_what_the_gpu_lost_since_the_match_comes_with_the_hand_over, there, OWN)
{
	kvc_handover_t *taken = NULL;

	begin_sending(203);
	sr_run_tokens(&p, 0, 80);
	sr_settle();
	sr.hold_host_saves = 1;
	sr_run_tokens(&p, 80, 203);
	SR_UNTIL(sr_stats().gpu_blocks == 25);
	assert_int_equal(kvc_handover_recv(sr.space[KVX_OWN_MEM], "x", WAIT_MS, &taken), KVC_OK);
	kvc_handover_done(taken, 0);
	ask_to_receive(203, NULL);
	sr.miss_device_leases = 1;
	assert_int_equal(sr_match(&d), 200);
	assert_true(sr.hit.async);
	assert_int_equal(sr.hit.gpu_tokens, 0);
	sr.miss_device_leases = 0;
	sr_place(&d, 100, 0);
	sr_start_load(&d);
	sr_release_saves();
	sr_finish(&p);
	sr_await_outcome(&d, KVC_OK);
	assert_true(sr_is_right(&d, 0, 25));
	must_be_empty();
	assert_int_equal(sr_stats().handovers_receive_failed, 0);
}

/* The host has no room, and the GPU has all of it. */
SR_CASE(p7_what_the_host_did_not_save_comes_from_the_gpu, there)
{
	receive(200, producer_gpu());
	begin_sending(200);
	sr.drop_host_saves = 1;
	sr_run_tokens(&p, 0, 200);
	sr_finish(&p);
	must_come(25, 1);
	sr.drop_host_saves = 0;
	SR_UNTIL(sr_stats().handovers_sent == 1);
	assert_int_equal(sr_stats().handovers_send_failed, 0);
}

/* Of the first 80 tokens the consumer leases six blocks there, and the host has none yet. */
static void lease_too_few(uint32_t n)
{
	receive(n, producer_gpu());
	begin_sending(n);
	sr.cut_device_leases = 6;
	sr.hold_host_saves = 1;
	sr_run_tokens(&p, 0, 80);
}

static void must_wait(void)
{
	for (uint32_t i = 0; i < 20; i++) {
		(void)sr_step();
	}
	assert_int_equal(sr_outcome(&d).load, KVC_PENDING);
}

/* The consumer's share of that GPU is smaller than the prompt: the rest is awaited in host memory, and comes from
 * there. */
SR_CASE(p7_what_a_lease_on_the_gpu_lacks_comes_from_the_host, there)
{
	lease_too_few(203);
	sr_run_tokens(&p, 80, 203);
	SR_UNTIL(sr_stats().gpu_blocks == (sr.row & PRIVATE ? 26 : 25));
	must_wait();
	sr_release_saves();
	sr_finish(&p);
	must_come(sr.row & PRIVATE ? 26 : 25, 1);
	assert_int_equal(sr_stats().gpu_tokens, 48);
	sr.cut_device_leases = 0;
}
SR_ALSO(p7_what_a_lease_on_the_gpu_lacks_comes_from_the_host, there, OWN)
SR_ALSO(p7_what_a_lease_on_the_gpu_lacks_comes_from_the_host, there, PRIVATE)

/* The consumer has the lease of a piece, or of the last load. */
static int is_leased(int is_piece)
{
	for (const kvx_sload_t *load = sr.scheduler->loads; load; load = load->next) {
		if (!load->open && ((load->flags & KVX_MSG_MORE) != 0) == is_piece) {
			return kvx_load_lease_state(load) == KVC_OK;
		}
	}

	return 0;
}

/* A rank names the request as finished after its last load. */
SR_CASE(p1_the_last_load_of_a_hand_over_waits_for_a_piece_that_the_gpu_lacks, there)
{
	lease_too_few(200);
	SR_UNTIL(is_leased(1));
	sr.cut_device_leases = 0;
	sr_run_tokens(&p, 80, 200);
	SR_UNTIL(is_leased(0));
	must_wait();
	assert_false(sr_is_right(&d, 24, 25));
	sr_release_saves();
	sr_finish(&p);
	must_come(25, 1);
}
SR_ALSO(p1_the_last_load_of_a_hand_over_waits_for_a_piece_that_the_gpu_lacks, there, OWN)

SR_CASE(p7_what_the_gpu_leases_not_at_all_comes_from_the_host, there)
{
	receive(200, producer_gpu());
	begin_sending(200);
	sr.miss_device_leases = 1;
	sr_run_tokens(&p, 0, 200);
	sr_finish(&p);
	must_come(25, 1);
	assert_int_equal(sr_stats().gpu_tokens + sr_stats().other_gpu_tokens, 0);
	sr.miss_device_leases = 0;
}
SR_ALSO(p7_what_the_gpu_leases_not_at_all_comes_from_the_host, there, OWN)

/* Neither mem has it: the consumer computes it, and does not wait for what will not come. */
SR_CASE(p7_what_a_lease_on_the_gpu_lacks_is_not_awaited_for_ever, there)
{
	receive(200, producer_gpu());
	begin_sending(200);
	sr.cut_device_leases = 6;
	sr.drop_host_saves = 1;
	sr_run_tokens(&p, 0, 200);
	sr_finish(&p);
	SR_UNTIL(sr_outcome(&d).load != KVC_PENDING);
	assert_int_not_equal(sr_outcome(&d).load, KVC_OK);
	sr_finish(&d);
	must_be_empty();
	sr.cut_device_leases = 0;
	sr.drop_host_saves = 0;
}
SR_ALSO(p7_what_a_lease_on_the_gpu_lacks_is_not_awaited_for_ever, there, OWN)

/* A rank cannot map it: what was handed over so far is computed, and the next prompt comes from the host. What it would
 * have had there is taken all the same. */
SR_CASE(p7_a_gpu_that_a_rank_cannot_reach_is_left_alone, there)
{
	receive(200, producer_gpu());
	begin_sending(200);
	sr.fail_device = KVC_ERR_TIER_OFF;
	sr_run_tokens(&p, 0, 200);
	sr_finish(&p);
	sr_await_outcome(&d, KVC_ERR_TIER_OFF);
	sr_finish(&d);
	must_be_empty();

	seed = 7;
	receive(200, producer_gpu());
	begin_sending(200);
	assert_string_equal(kvx_scheduler_send_device(sr.scheduler, &p.ask), "fake-0"); /* it is another GPU's fault */
	sr_run_tokens(&p, 0, 200);
	sr_finish(&p);
	sr_await_outcome(&d, KVC_OK);
	assert_true(sr_is_right(&d, 0, 25));
	must_be_empty();
	assert_int_equal(sr_stats().loads_failed, 1);
	sr.fail_device = KVC_OK;
	seed = 1;
}

/* Each time that a rank cannot map it, a prompt is computed. */
SR_CASE(p7_a_gpu_out_of_reach_is_tried_more_and_more_rarely, there)
{
	const uint64_t second = UINT64_C(1000000000);

	receive(200, producer_gpu());
	sr_finish(&d);
	SR_UNTIL(!sr.scheduler->handovers);
	for (uint64_t i = 0, pause = 60; i < 9; i++, pause = pause < 1800 ? pause * 2 : 3600) {
		kvx_mem_pause(sr.scheduler, mem());
		kvx_mem_pause(sr.scheduler, mem()); /* another load of that time */
		sr.ahead_ns += (pause - 1) * second;
		assert_false(kvx_mem_is_usable(sr.scheduler, 0, mem()));
		sr.ahead_ns += 2 * second;
		assert_true(kvx_mem_is_usable(sr.scheduler, 0, mem()));
	}
	receive(200, producer_gpu());
	begin_sending(200);
	sr_run_tokens(&p, 0, 200);
	sr_finish(&p);
	SR_UNTIL(sr_outcome(&d).load == KVC_OK);
	assert_true(sr_stats().gpu_tokens > 0);
	kvx_mem_pause(sr.scheduler, mem());
	sr.ahead_ns += 61 * second;
	assert_true(kvx_mem_is_usable(sr.scheduler, 0, mem()));
}

/* A wrong digest: computed, and not looked for elsewhere. */
SR_CASE(p1_a_damaged_block_on_the_gpu_is_computed, there)
{
	receive(200, producer_gpu());
	begin_sending(200);
	sr_run_tokens(&p, 0, 80);
	SR_UNTIL(sr_is_right(&d, 0, 10));
	sr.fail_device = KVC_ERR_CORRUPT;
	sr_run_tokens(&p, 80, 200);
	sr_finish(&p);
	sr_await_outcome(&d, KVC_ERR_CORRUPT);
	assert_true(sr_is_right(&d, 0, 10));
	assert_int_equal(sr_match(&d), 0);
	sr.fail_device = KVC_OK;
	sr_finish(&d);
	must_be_empty();
}

/* ---- ends ------------------------------------------------------------------------------------ */

SR_CASE(p4_an_aborted_producer_leaves_nothing_on_the_gpu, there)
{
	receive(200, producer_gpu());
	begin_sending(200);
	sr_run_tokens(&p, 0, 80);
	SR_UNTIL(sr_is_right(&d, 0, 10));
	kvx_scheduler_abort_send(sr.scheduler, &p.ask);
	sr_finish(&p);
	SR_UNTIL(sr_outcome(&d).load != KVC_PENDING);
	assert_true(sr_outcome(&d).load != KVC_OK);
	assert_true(sr_is_right(&d, 0, 10));
	must_be_empty();
}
SR_ALSO(p4_an_aborted_producer_leaves_nothing_on_the_gpu, there, OWN)

/* Nor is one awaited there that has ended before it began there. */
SR_CASE(p5_a_producer_that_never_comes_to_the_gpu_is_not_awaited, there)
{
	const uint64_t start = sr_now_ns();

	receive(200, producer_gpu());
	kvx_mem_pause(sr.scheduler, KVX_OWN_MEM); /* the producer's: it begins in host memory alone */
	begin_sending(200);
	kvx_scheduler_abort_send(sr.scheduler, &p.ask);
	sr_finish(&p);
	SR_UNTIL(sr_outcome(&d).load != KVC_PENDING);
	assert_true(sr_now_ns() - start < WAIT_MS / 4 * KVX_MS);
	must_be_empty();
}

SR_CASE(p4_an_aborted_consumer_leaves_nothing_on_the_gpu, there)
{
	receive(200, producer_gpu());
	begin_sending(200);
	sr_run_tokens(&p, 0, 80);
	SR_UNTIL(sr_is_right(&d, 0, 10));
	sr_finish(&d);
	sr_run_tokens(&p, 80, 200);
	sr_finish(&p);
	must_be_empty();
}

SR_CASE(p7_without_the_daemon_both_ends_go_on, there)
{
	receive(200, producer_gpu());
	begin_sending(200);
	sr_run_tokens(&p, 0, 80);
	rig_kill(&sr.rig);
	SR_UNTIL(sr_outcome(&d).load != KVC_PENDING);
	sr_finish(&d);
	sr_finish(&p);
	sr_restart_daemon();
	SR_UNTIL(!sr.scheduler->handovers);
}

SR_MAIN
