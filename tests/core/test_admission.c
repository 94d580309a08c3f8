/* Admission: while what is saved is evicted before it is hit, new blocks are taken by second use. */
#include "stage.h"

#include "core/block/admission.h"

#define POOL  100u
#define CHAIN 10u
#define LONG  70u
#define LOST  (POOL - CHAIN) /* a pool's worth, while a document is being written */

static u_put_t put_;
static kv_msg_put_start_reply_t reply_;

static void stage_pool(int admission)
{
	stage_in(&(u_config_t){.cpu_slots = POOL, .admission = admission});
}

/* Chain number `n`, of a document that no other shares anything with. */
static const kv_key_t *document(uint32_t n)
{
	static kv_key_t keys[CHAIN];

	u_chain(NULL, 1000 + n, keys, CHAIN);

	return keys;
}

static kv_status_t offer(const kv_key_t *keys, uint32_t first, uint32_t n, uint32_t flags)
{
	return u_put_start(&u_, m_, &space_, keys, first, n, flags, &put_, &reply_);
}

static uint32_t save(const kv_key_t *keys)
{
	return u_put_optional(&u_, m_, &space_, keys, 0, CHAIN);
}

static int thrashes(void)
{
	return kvd_admission_thrashes(u_.core, u_.ns[0]);
}

/* Documents, each once: the pool is full, and has lost as many blocks again. */
static uint32_t read_once(uint32_t from, uint32_t documents)
{
	uint32_t saved = 0;

	for (uint32_t d = from; d < from + documents; d++) {
		saved += save(document(d)) == CHAIN;
	}

	return saved;
}

static void begin_to_thrash(void)
{
	stage_pool(1);
	assert_int_equal(read_once(0, 18), 18);
	assert_false(thrashes());
	assert_int_equal(read_once(18, 1), 1);
	assert_true(thrashes());
	assert_int_equal(kv_ns_metric_get(&u_.metrics, 0, KV_NM_EVICTED_UNHIT), LOST);
}

static void end_stage(void)
{
	settle_and_check();
	universe_leave(&u_);
	universe_fini(&u_);
}

KV_TEST(p5_what_is_evicted_without_a_hit_is_no_longer_saved)
{
	begin_to_thrash();
	assert_int_equal(offer(document(20), 0, CHAIN, KV_PUT_OPTIONAL), KV_ERR_NOT_ADMITTED);
	assert_non_null(u_.detail);
	assert_non_null(strstr(u_.detail, "thrashes"));
	assert_int_equal(read_once(21, 5), 0);
	assert_int_equal(kv_ns_metric_get(&u_.metrics, 0, KV_NM_NOT_ADMITTED), 6 * CHAIN);
	assert_int_equal(kv_ns_metric_get(&u_.metrics, 0, KV_NM_EVICTED_UNHIT), LOST);
	/* What is there is there still. */
	assert_int_equal(u_mirror_tiers(&u_, 0, &document(18)[CHAIN - 1]), KV_TIER_CPU);
	end_stage();
}

/* A put of more blocks than an offer's window has: those of the put that makes the pool thrash were admitted before it did. */
KV_TEST(p5_a_long_document_that_makes_a_pool_thrash_does_not_end_it)
{
	static kv_key_t keys[4][LONG];
	uint32_t saved = 0;

	stage_pool(1);
	for (uint32_t d = 0; d < 4; d++) {
		u_chain(NULL, 1000 + d, keys[d], LONG);
		saved += u_put_optional(&u_, m_, &space_, keys[d], 0, LONG);
	}
	assert_int_equal(saved, 3 * LONG);
	assert_true(thrashes());
	end_stage();
}

KV_TEST(p5_the_second_use_within_the_life_of_the_pool_is_saved)
{
	begin_to_thrash();
	assert_int_equal(save(document(20)), 0);
	/* It was asked for after the coldest block of the pool. */
	assert_int_equal(save(document(20)), CHAIN);
	/* The first document was evicted long ago: it is older than all that the pool has. */
	assert_int_equal(save(document(0)), 0);
	end_stage();
}

KV_TEST(p2_what_must_be_stored_is_never_refused)
{
	static const uint32_t flags[] = {0, KV_PUT_DURABLE, KV_PUT_DURABLE | KV_PUT_OPTIONAL, KV_PUT_PRIVATE,
					 KV_PUT_PRIVATE | KV_PUT_OPTIONAL};

	begin_to_thrash();
	for (uint32_t i = 0; i < KV_COUNT_OF(flags); i++) {
		assert_int_equal(offer(document(30 + i), 0, 1, flags[i]), KV_OK);
		assert_int_equal(reply_.n, 1);
		u_put_write(&u_, &put_);
		assert_int_equal(u_put_end(&u_, m_, &put_, 0, 1), KV_OK);
	}
	end_stage();
}

KV_TEST(p3_a_child_is_refused_with_its_parent)
{
	begin_to_thrash();
	/* A prefix that is asked for again, with a tail that is new. */
	assert_int_equal(offer(keys_, 0, 4, KV_PUT_OPTIONAL), KV_ERR_NOT_ADMITTED);
	assert_int_equal(offer(keys_, 0, 12, KV_PUT_OPTIONAL), KV_OK);
	assert_int_equal(reply_.n, 4);
	u_put_write(&u_, &put_);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 4), KV_OK);
	/* The rest is offered once more, and refused; what follows it has no parent, and is refused as well. */
	assert_int_equal(offer(keys_, 4, 12, KV_PUT_OPTIONAL), KV_ERR_NOT_ADMITTED);
	assert_int_equal(offer(keys_, 12, 16, KV_PUT_OPTIONAL), KV_ERR_NOT_ADMITTED);
	assert_int_equal(offer(keys_, 12, 16, 0), KV_ERR_NO_PARENT);
	/* All was offered: the next time it is stored as a whole. */
	assert_int_equal(offer(keys_, 4, 16, KV_PUT_OPTIONAL), KV_OK);
	assert_int_equal(reply_.n, 12);
	assert_int_equal(u_put_revoke(&u_, m_, put_.id), KV_OK);
	end_stage();
}

KV_TEST(p5_all_is_saved_again_when_it_comes_back_soon)
{
	begin_to_thrash();
	/* Each document twice in a row: half of the offers would be hits. */
	for (uint32_t d = 20; d < 30; d++) {
		(void)save(document(d));
		(void)save(document(d));
	}
	assert_false(thrashes());
	assert_int_equal(save(document(40)), CHAIN);
	end_stage();
}

KV_TEST(p5_what_has_room_is_saved)
{
	begin_to_thrash();
	assert_int_equal(u_reset(&u_, m_, &space_), KV_OK);
	u_settle(&u_);
	space_ = u_space(&u_, 0, "model");
	assert_int_equal(read_once(20, 9), 9);
	assert_false(thrashes()); /* none was refused for as long as it looks back */
	end_stage();
}

/* Hits of a few per cent are enough: the save of a block costs a small part of what a hit spares. */
KV_TEST(p5_a_pool_with_hits_does_not_thrash)
{
	kv_msg_acquire_reply_t reply;

	stage_pool(1);
	for (uint32_t d = 0; d < 100; d++) {
		assert_int_equal(save(document(d)), CHAIN);
		if (d % 5 == 0) {
			assert_int_equal(u_acquire(&u_, m_, &space_, document(d), CHAIN, 0, NULL, &reply), KV_OK);
			assert_int_equal(u_release(&u_, m_, reply.lease), KV_OK);
		}
		assert_false(thrashes());
	}
	end_stage();
}

KV_TEST(p5_without_admission_all_is_saved)
{
	stage_pool(0);
	assert_int_equal(read_once(0, 40), 40);
	assert_false(thrashes());
	end_stage();
}

/* A miss says why, and STATUS that it happens. */
KV_TEST(p9_a_refusal_is_told)
{
	static char json[1 << 16];
	uint8_t tiers[CHAIN];

	begin_to_thrash();
	assert_int_equal(save(document(20)), 0);
	assert_int_equal(u_explain(&u_, 0, &space_, document(20), CHAIN, tiers), KV_WHY_NOT_ADMITTED);
	assert_int_equal(u_explain(&u_, 0, &space_, document(0), CHAIN, tiers), KV_WHY_EVICTED);
	assert_int_equal(u_explain(&u_, 0, &space_, document(99), CHAIN, tiers), KV_WHY_ABSENT);
	assert_true(kvd_core_status_json(u_.core, 0, 1, json, sizeof json) < sizeof json);
	assert_non_null(strstr(json, "\"admission\":{\"mode\":\"second_use\",\"thrashes\":true,\"not_admitted\":10"));
	assert_true(kvd_core_status_json(u_.core, 1, 1, json, sizeof json) < sizeof json);
	assert_non_null(strstr(json, "\"thrashes\":false,\"not_admitted\":0"));
	u_tick(&u_, 2000);
	assert_int_equal(kv_ns_metric_get(&u_.metrics, 0, KV_NM_THRASHES), 1);
	end_stage();
}

/* What a hand-over has is hit: a pool that engines hand prompts over in does not thrash. */
KV_TEST(p5_what_is_handed_over_counts_as_hit)
{
	stage_pool(1);
	for (uint32_t d = 0; d < 40; d++) {
		const kv_key_t *keys = document(d);
		char name[16];
		kv_msg_handover_send_reply_t sent;

		snprintf(name, sizeof name, "t%u", d);
		assert_int_equal(save(keys), CHAIN);
		assert_int_equal(u_send(&u_, m_,
					&(u_send_t){.transfer = name,
						    .space = &space_,
						    .keys = keys,
						    .n = CHAIN,
						    .groups = U_FULL,
						    .last = 1},
					&sent),
				 KV_OK);
		assert_int_equal(u_done(&u_, m_, sent.number, U_GIVE_UP), KV_OK);
		assert_false(thrashes());
	}
	end_stage();
}

/* A branch begins and goes: a run is split and merged, and its blocks were hit as before. */
KV_TEST(p5_a_block_was_hit_whatever_branches_below_it)
{
	kv_msg_acquire_reply_t reply;

	stage_pool(1);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 10, 0, NULL, &reply), KV_OK);
	assert_int_equal(u_release(&u_, m_, reply.lease), KV_OK);
	assert_int_equal(u_put(&u_, m_, &space_, fork_, 0, 12), 12);
	/* The last two blocks of the chain go, which were not hit; then those of the branch, and the rest. */
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 10, 0, NULL, &reply), KV_OK);
	assert_int_equal(u_release(&u_, m_, reply.lease), KV_OK);
	u_evict(&u_, KV_TIER_CPU, 2);
	u_evict(&u_, KV_TIER_CPU, 4);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 12), 10);
	assert_int_equal(kv_ns_metric_get(&u_.metrics, 0, KV_NM_EVICTED_UNHIT), 6);
	u_evict(&u_, KV_TIER_CPU, 10);
	assert_int_equal(kv_ns_metric_get(&u_.metrics, 0, KV_NM_EVICTED_UNHIT), 6);
	end_stage();
}
