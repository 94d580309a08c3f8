/* What a space in the memory of a GPU tells the next daemon. */
#include "universe.h"

KV_TEST(p1_a_reset_is_kept_before_it_is_answered)
{
	const u_config_t config = {.cpu_slots = 16, .gpu_slots = 16, .max_blocks = 64, .seed = kv_test_seed()};
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
