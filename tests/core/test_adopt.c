/* What a space in the memory of a GPU tells the next daemon. */
#include "universe.h"

KV_TEST(p1_a_reset_is_kept_before_it_is_answered)
{
	const u_config_t config = {.cpu_slots = 16, .gpu_slots = 16, .max_blocks = 64};
	static universe_t u;
	kvd_space_info_t space;
	kv_msg_t ask, reply;
	u_member_t *member;
	uint8_t root[32];

	universe_init(&u, &config, NULL);
	u.memory = 1;
	member = u_join(&u, 0, "engine", 0, 0);
	space = u_space(&u, 0, "model");
	memcpy(root, u.gpu.roots[0].root, sizeof root);
	assert_int_equal(kvs_epoch_get(&u.gpu.tier, root), space.epoch);
	for (uint64_t i = 0; i < 3; i++) {
		ask = (kv_msg_t){.space_reset = {.space = space.space, .epoch = space.epoch + i}};
		assert_int_equal(u_request(&u, member, KV_CODE_SPACE_RESET, &ask, &reply), KV_OK);
		assert_int_equal(reply.space_reset_reply.epoch, space.epoch + i + 1);
		assert_int_equal(kvs_epoch_get(&u.gpu.tier, root), space.epoch + i + 1);
	}
	while (kvs_poll(u.memories, UINT32_MAX) > 0) {
	}
	universe_fini(&u);
}

/* Two slabs of two block sizes, and nothing in them. For the class of the first there is no memory. */
KV_TEST(p5_slabs_that_are_adopted_without_a_class_are_counted)
{
	static fake_tier_t gpu;
	const u_config_t config = {.gpu_slots = 16,
				   .gpu = &gpu,
				   .pool = {.limit_bytes = 1u << 20, .slab_bytes = 1u << 18, .huge = KVS_HUGE_OFF},
				   .max_blocks = 64,
				   .seed = kv_test_seed(),
				   .fail_adopt = 1};
	static universe_t u;

	fake_tier_init(&gpu, 1, 16, config.seed); /* with slabs */
	gpu.file_slots = 8;
	for (uint32_t i = 0; i < 2; i++) {
		const kvs_geometry_t geometry = {.block_bytes = 4096u << i,
						 .heads = 2,
						 .leaves = 2,
						 .leaf_bytes = 1024u << i,
						 .page_bytes = 1024u << i};
		uint32_t class;

		assert_int_equal(kvs_class_open(&gpu.tier, "a", &geometry, &class), KV_OK);
		gpu.files[i].owner = class + 1;
	}
	universe_init(&u, &config, NULL);
	assert_int_equal(kv_metric_get(&u.metrics, KV_M_ADOPT_REFUSED), 1);
	assert_int_equal(u.core->class_count, 1);

	/* An engine of that block size opens it. */
	u.memory = 1;
	(void)u_join(&u, 0, "engine", 0, 0);
	(void)u_space(&u, 0, "model");
	assert_int_equal(u.core->class_count, 2);
	universe_check(&u);
	universe_fini(&u);
}
