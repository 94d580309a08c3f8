/* libkvx for an engine in one process whose cache lies in the memory of a device (kvx_config_t.devices). The device is
 * the fake one, whose streams run late and in any order they may; the engine never waits for it before a call. */
#include "connectors/inproc/pair_stage.h"
#include "connectors/worker/wr_device.h"
#include "kernels/fake_cuda.h"

#include <stdlib.h>
#include <string.h>

#define BLOCKS   10u
#define TOKENS   (BLOCKS * PAIR_TOKENS)
#define OTHER    30u /* the first block of the consumer's prompt */
#define ROUNDS   32u
#define EARLY    8u /* more polls than a save that is ended early has */
#define REFUSALS 120u
#define ATTACHES 60u
#define LATE     60u

/* ---- what the engine does ---------------------------------------------------------------------- */

typedef struct kernel_args {
	side_t *side;
	pair_prompt_t prompt;
	uint32_t from; /* token */
} kernel_args_t;

static void compute_kernel(void *args)
{
	const kernel_args_t *a = args;

	side_compute(a->side, &a->prompt, a->from, a->prompt.n_tokens);
}

/* Tokens from `from` on are computed when the stream comes to it. */
static void enqueue_compute(side_t *side, const pair_prompt_t *prompt, uint32_t first)
{
	kernel_args_t *args = malloc(sizeof *args);

	assert_non_null(args);
	*args = (kernel_args_t){.side = side, .prompt = *prompt, .from = first};
	wr_device_call(compute_kernel, args);
}

static kvx_save_result_t await_save(side_t *side, kvx_save_t *save)
{
	kvx_save_result_t result = {.struct_size = sizeof result};

	while (save && kvx_save_state(save, &result) == KVC_PENDING) {
		(void)kvx_poll(side->kvx, 1);
	}
	kvx_save_end(save);

	return result;
}

/* Computed, saved while the device still computes, and waited for. */
static kvx_save_result_t save_computed(side_t *side, const pair_prompt_t *prompt)
{
	kvx_save_t *save;

	enqueue_compute(side, prompt, 0);
	(void)kvx_save_prefix(side->kvx, &prompt->prefix, &save);

	return await_save(side, save);
}

static kvx_load_result_t load(side_t *side, const pair_prompt_t *prompt)
{
	kvx_load_result_t result = {.struct_size = sizeof result};
	kvx_load_t *job;

	(void)kvx_load_prefix(side->kvx, &prompt->prefix, &job, &result);
	while (job && kvx_load_state(job, &result) == KVC_PENDING) {
		(void)kvx_poll(side->kvx, 1);
	}
	kvx_load_end(job);

	return result;
}

static void check_loaded_whole(side_t *side, const pair_prompt_t *prompt)
{
	const kvx_load_result_t result = load(side, prompt);

	assert_int_equal(result.status, KVC_OK);
	assert_int_equal(result.cause, KVC_OK);
	assert_int_equal(result.tokens, TOKENS);
	assert_true(side_holds(side, prompt, TOKENS));
}

/* An engine with a cache of the shape of that of `of`, in parts. */
static kvc_status_t attach(const side_t *of, const kvk_paged_t *paged, const kvx_device_t *devices, uint32_t parts,
			   kvx_t **p_kvx)
{
	const kvx_config_t config = {.struct_size = sizeof config,
				     .roles = KVX_BOTH,
				     .socket = the_rig.socket,
				     .identity = &of->identity,
				     .layout = &of->layout,
				     .paged = paged,
				     .parts = parts,
				     .load_ms = PAIR_MS,
				     .attach_ms = UINT32_MAX,
				     .devices = devices};

	*p_kvx = NULL;

	return kvx_attach(&config, p_kvx);
}

static void begin_pair(void)
{
	rig_start(&the_rig);
	open_pair();
}

static void end_pair(void)
{
	side_close(&producer);
	side_close(&consumer);
}

/* ---- bytes --------------------------------------------------------------------------------------- */

KV_TEST(p1_what_one_device_has_saved_another_engine_loads)
{
	pair_prompt_t saved, loaded, host_saved, second;
	kvx_save_t *save;
	side_t host;

	pair_prompt_init(&saved, 1, TOKENS, 0);
	pair_prompt_init(&loaded, 1, TOKENS, OTHER);
	pair_prompt_init(&host_saved, 2, TOKENS, 0);
	pair_prompt_init(&second, 2, TOKENS, 5);
	begin_pair();
	side_open(&host, the_rig.socket, (side_options_t){.host = 1});
	assert_int_equal(save_computed(&producer, &saved).status, KVC_OK);
	assert_int_equal(side_stats(&producer).blocks_saved, BLOCKS);
	check_loaded_whole(&consumer, &loaded);
	assert_true(side_is_untouched(&consumer, &loaded, TOKENS));
	check_loaded_whole(&host, &loaded);

	side_compute(&host, &host_saved, 0, TOKENS);
	assert_int_equal(kvx_save_prefix(host.kvx, &host_saved.prefix, &save), KVC_PENDING);
	assert_int_equal(await_save(&host, save).status, KVC_OK);
	check_loaded_whole(&consumer, &second);

	assert_int_equal(side_stats(&producer).self_tests, 1);
	assert_int_equal(side_stats(&consumer).self_tests, 1);
	assert_true(fake_cuda_launches() > 0);
	side_close(&host);
	end_pair();
}

KV_TEST(p1_a_load_writes_after_what_the_engine_has_enqueued)
{
	pair_prompt_t saved, loaded, before;
	kvx_load_result_t result = {.struct_size = sizeof result};
	kvx_load_t *job;

	pair_prompt_init(&saved, 1, TOKENS, 0);
	pair_prompt_init(&loaded, 1, TOKENS, OTHER);
	pair_prompt_init(&before, 2, TOKENS, OTHER);
	begin_pair();
	assert_int_equal(save_computed(&producer, &saved).status, KVC_OK);
	wr_device_stall(0, 1);
	enqueue_compute(&consumer, &before, 0);
	assert_int_equal(kvx_load_prefix(consumer.kvx, &loaded.prefix, &job, NULL), KVC_PENDING);
	pair_poll(&consumer, NULL, 50);
	assert_int_equal(kvx_load_state(job, NULL), KVC_PENDING);
	assert_true(side_is_untouched(&consumer, &loaded, 0));

	wr_device_stall(0, 0);
	while (kvx_load_state(job, &result) == KVC_PENDING) {
		(void)kvx_poll(consumer.kvx, 1);
	}
	kvx_load_end(job);
	assert_int_equal(result.tokens, TOKENS);
	assert_true(side_holds(&consumer, &loaded, TOKENS));
	end_pair();
}

/* It ends after n polls; EARLY: when all was read. */
static void end_save_early(uint32_t n, kvx_save_t *save)
{
	kvx_save_result_t result = {.struct_size = sizeof result};

	for (uint32_t i = 0; i < n || (n == EARLY && !result.copied); i++) {
		(void)kvx_poll(producer.kvx, 1);
		(void)kvx_save_state(save, &result);
	}
	kvx_save_end(save);
}

/* The engine's next kernel writes the blocks in any case. In every other round the device does nothing before that is
 * enqueued. */
KV_TEST(p1_a_save_ended_at_any_moment_stores_what_was_computed)
{
	uint32_t stored = 0;

	begin_pair();
	for (uint32_t i = 0; i < ROUNDS; i++) {
		pair_prompt_t saved, next, loaded;
		kvx_load_result_t result;
		kvx_save_t *save;

		pair_prompt_init(&saved, 10 + i, TOKENS, 0);
		pair_prompt_init(&next, 100 + i, TOKENS, 0);
		pair_prompt_init(&loaded, 10 + i, TOKENS, OTHER);
		enqueue_compute(&producer, &saved, 0);
		fake_cuda_hold(i % 2u);
		assert_int_equal(kvx_save_prefix(producer.kvx, &saved.prefix, &save), KVC_PENDING);
		end_save_early(i / 2u % EARLY + (i == 0 ? EARLY : 0), save);
		enqueue_compute(&producer, &next, 0);
		fake_cuda_hold(0);
		pair_poll(&producer, NULL, 10);

		result = load(&consumer, &loaded);
		assert_true(side_holds(&consumer, &loaded, result.tokens));
		stored += result.tokens;
	}
	assert_true(stored > 0);
	end_pair();
}

/* The parts are copies: each saves some layers, and gets all. */
KV_TEST(p1_parts_in_memory_of_devices_are_one_cache)
{
	pair_prompt_t saved, loaded;
	kvk_paged_t paged[2];
	kvx_device_t devices[2];
	kvx_save_t *save;
	side_t both = {0};

	pair_prompt_init(&saved, 1, TOKENS, 0);
	pair_prompt_init(&loaded, 1, TOKENS, OTHER);
	begin_pair();
	paged[0] = producer.paged;
	paged[1] = consumer.paged;
	devices[0] = devices[1] = *wr_device_front();
	assert_int_equal(attach(&producer, paged, devices, 2, &both.kvx), KVC_OK);
	side_await_ready(&both);
	enqueue_compute(&producer, &saved, 0);
	enqueue_compute(&consumer, &saved, 0);
	assert_int_equal(kvx_save_prefix(both.kvx, &saved.prefix, &save), KVC_PENDING);
	assert_int_equal(await_save(&both, save).status, KVC_OK);

	assert_int_equal(load(&both, &loaded).tokens, TOKENS);
	assert_true(side_holds(&producer, &loaded, TOKENS));
	assert_true(side_holds(&consumer, &loaded, TOKENS));
	assert_int_equal(side_stats(&both).self_tests, 2);
	kvx_detach(both.kvx);
	end_pair();
}

/* ---- a device that fails ------------------------------------------------------------------------- */

/* What came is right, and what the engine computes in place of the rest stays, whatever copies were on their way. */
KV_TEST(p1_p6_a_refused_driver_call_is_a_miss_and_no_wrong_byte)
{
	uint32_t refused = 0, missed = 0;

	begin_pair();
	for (uint32_t n = 1; n <= REFUSALS; n++) {
		pair_prompt_t saved, loaded, instead;
		kvx_load_result_t result;

		pair_prompt_init(&saved, 1000 + n, TOKENS, 0);
		pair_prompt_init(&loaded, 1000 + n, TOKENS, OTHER);
		pair_prompt_init(&instead, 5000 + n, TOKENS, OTHER);
		(void)wr_device_fail(n % 2 ? n : 0);
		(void)save_computed(&producer, &saved);
		(void)wr_device_fail(n % 2 ? 0 : n);
		result = load(&consumer, &loaded);
		enqueue_compute(&consumer, &instead, result.tokens);
		refused += wr_device_fail(0) != 0;
		wr_device_sync();
		pair_poll(&consumer, &producer, 5);
		fake_cuda_drain();
		assert_true(side_holds(&consumer, &loaded, result.tokens));
		assert_true(side_holds_between(&consumer, &instead, result.tokens, TOKENS));
		missed += result.tokens < TOKENS;
	}
	assert_true(refused > 0);
	assert_true(missed > 0);
	assert_true(missed < REFUSALS);
	end_pair();
}

/* Refused: the mark behind a copy that the device has already. Nothing runs meanwhile, so it certainly comes late. */
KV_TEST(p1_what_the_engine_writes_comes_after_copies_whose_end_nobody_knows)
{
	pair_prompt_t saved, loaded;
	uint32_t late = 0;

	pair_prompt_init(&saved, 1, TOKENS, 0);
	pair_prompt_init(&loaded, 1, TOKENS, OTHER);
	begin_pair();
	assert_int_equal(save_computed(&producer, &saved).status, KVC_OK);
	for (uint32_t n = 1; n <= LATE; n++) {
		kvx_load_result_t result = {.struct_size = sizeof result};
		pair_prompt_t instead;
		kvx_load_t *job;

		pair_prompt_init(&instead, 100 + n, TOKENS, OTHER);
		fake_cuda_hold(1);
		fake_cuda_fail_run(n, 3);
		assert_int_equal(kvx_load_prefix(consumer.kvx, &loaded.prefix, &job, NULL), KVC_PENDING);
		for (uint32_t i = 0; i < 50 && kvx_load_state(job, &result) == KVC_PENDING; i++) {
			(void)kvx_poll(consumer.kvx, 1);
		}
		(void)wr_device_fail(0);
		late += result.status != KVC_PENDING;
		if (result.status == KVC_PENDING) {
			fake_cuda_hold(0);
		}
		kvx_load_end(job);
		enqueue_compute(&consumer, &instead, 0);
		fake_cuda_hold(0);
		fake_cuda_drain();
		assert_true(side_holds(&consumer, &instead, TOKENS));
	}
	assert_true(late > 0);
	end_pair();
}

KV_TEST(p6_a_device_that_fails_for_a_while_is_misses_then_hits)
{
	pair_prompt_t saved, loaded, later;
	kvx_load_result_t result;

	pair_prompt_init(&saved, 1, TOKENS, 0);
	pair_prompt_init(&loaded, 1, TOKENS, OTHER);
	pair_prompt_init(&later, 2, TOKENS, 0);
	begin_pair();
	assert_int_equal(save_computed(&producer, &saved).status, KVC_OK);
	fake_cuda_fail_always(offsetof(kvk_cuda_ops_t, context_push), 999);
	result = load(&consumer, &loaded);
	assert_int_equal(result.status, KVC_MISS);
	assert_true(result.cause < 0);
	assert_int_equal(side_stats(&consumer).load_lost, 1);
	assert_true(save_computed(&producer, &later).status < 0);
	assert_int_equal(side_stats(&producer).saves, 2);

	fake_cuda_fail_always(0, 0);
	check_loaded_whole(&consumer, &loaded);
	end_pair();
}

/* ---- a configuration that cannot be -------------------------------------------------------------- */

static void must_refuse(const kvk_paged_t *paged, const kvx_device_t *device, const char *why)
{
	kvx_t *kvx;

	assert_int_equal(attach(&producer, paged, device, 1, &kvx), KVC_ERR_ARG);
	assert_null(kvx);
	if (!strstr(kvx_last_error(), why)) {
		fail_msg("'%s' is not in: %s", why, kvx_last_error());
	}
}

KV_TEST(p10_a_cache_that_is_not_in_memory_of_its_device_is_refused)
{
	kvx_device_t device;
	kvk_paged_t paged;
	void *base[PAIR_LAYERS];
	uint8_t *host;

	begin_pair();
	device = *wr_device_front();
	host = malloc((size_t)PAIR_BLOCKS * PAIR_PAYLOAD);
	assert_non_null(host);
	memcpy(base, producer.base, sizeof base);
	paged = producer.paged;
	paged.base = base;
	base[1] = host;
	must_refuse(&paged, &device, "layer 1 of the cache");
	base[1] = producer.base[1];
	paged.blocks++;
	must_refuse(&paged, &device, "is not in memory of device 0");
	paged.blocks--;
	fake_cuda_foreign(1);
	must_refuse(&paged, &device, "layer 0 of the cache");
	fake_cuda_foreign(0);
	device.ordinal = 3;
	must_refuse(&paged, &device, "the GPU cannot be used");
	free(host);
	end_pair();
}

/* The end of the test looks for memory, streams and events of the device that are left. */
KV_TEST(p4_a_device_that_fails_while_it_is_attached_leaves_nothing)
{
	uint32_t refused = 0;

	begin_pair();
	for (uint32_t n = 1; n <= ATTACHES; n++) {
		kvx_t *kvx;
		kvc_status_t status;

		(void)wr_device_fail(n);
		status = attach(&producer, &producer.paged, wr_device_front(), 1, &kvx);
		(void)wr_device_fail(0);
		assert_true(status == KVC_OK || status == KVC_ERR_ARG || status == KVC_ERR_NOMEM);
		assert_true((status == KVC_OK) == (kvx != NULL));
		refused += status != KVC_OK;
		kvx_detach(kvx);
	}
	assert_true(refused > 0);
	end_pair();
}

KV_TEST_MAIN_OF(the_program, begin_rig, end_rig)
