/* A real pool, of slabs, that thrashes. */
#include "e2e/rig/rig.h"

#define LEN 40u

static kvc_status_t save(uint64_t seed, kvc_key_t *keys)
{
	static uint8_t blocks[LEN][RIG_BLOCK_BYTES];
	const void *src[LEN];
	const kvc_put_options_t options = {.struct_size = sizeof options, .optional = 1, .blocks = src};

	user_keys(&user_, seed, LEN, keys);
	for (uint32_t i = 0; i < LEN; i++) {
		user_fill(&keys[i], blocks[i]);
		src[i] = blocks[i];
	}

	return kvc_put(user_.space, keys, 0, LEN, &options, NULL);
}

static void stage(const char *admission)
{
	rig_init(&rig_, 0);
	rig_option(&rig_, "--admission=%s", admission);
	rig_start(&rig_);
	user_attach(&user_, &rig_, "admission");
}

/* How many documents are saved, each once, before one is refused; 100 if none is. */
static uint32_t save_until_refused(kvc_key_t *keys)
{
	uint32_t saved = 0;
	kvc_status_t status = KVC_OK;

	while (status == KVC_OK && saved < 100) {
		status = save(1000 + saved, keys);
		saved += status == KVC_OK;
	}
	assert_true(status == KVC_OK || status == KVC_ERR_NOT_ADMITTED);

	return saved;
}

/* Of how many blocks an explanation says so. What was asked for is remembered at its hash, and another block may come to lie
 * there: of 40 the daemon may have forgotten a few. */
static uint32_t count_not_admitted(const kvc_key_t *keys)
{
	uint32_t count = 0;

	for (uint32_t i = 0; i < LEN; i++) {
		uint8_t tiers;
		uint32_t why;

		assert_int_equal(kvc_explain(user_.space, &keys[i], 1, &tiers, &why), KVC_OK);
		count += why == KVC_WHY_NOT_ADMITTED;
	}

	return count;
}

RIG_TEST(p5_a_pool_that_thrashes_refuses_what_is_new, stage("second_use"))
{
	kvc_key_t keys[LEN];
	uint32_t got, saved = save_until_refused(keys);

	printf("# %u documents of %u blocks before the first refusal\n", saved, LEN);
	assert_in_range(saved, 10, 99);
	assert_non_null(strstr(kvc_last_error(), "thrashes"));
	assert_in_range(count_not_admitted(keys), LEN / 2, LEN);
	assert_int_equal(rig_metric(&rig_, "kvd_namespace_not_admitted_total"), LEN);
	assert_true(rig_metric_reaches(&rig_, "kvd_namespace_thrashes", 1));
	assert_true(rig_kvctl_has(&rig_, "status", "the pool thrashes: new blocks are saved at their second use"));
	/* A put of another kind is not refused; nor the second use. */
	assert_int_equal(user_put(&user_, keys, 0, 1, 0, NULL), KVC_OK);
	assert_int_equal(save(1000 + saved, keys), KVC_OK);
	assert_int_equal(user_get(&user_, keys, LEN, &got), KVC_OK);
	assert_in_range(got, LEN / 2, LEN);
	assert_int_equal(user_.wrong, 0);
}

RIG_TEST(p5_without_admission_a_pool_takes_all, stage("all"))
{
	kvc_key_t keys[LEN];

	assert_int_equal(save_until_refused(keys), 100);
}
