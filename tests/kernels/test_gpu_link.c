/* What a load takes of the link, and of the device's SMs, when nobody says. */
#include "cuda/args.h"
#include "gpu_rig.h"
#include "cuda/device/xxh3.h"

/* More would not come faster, and an engine's launches would wait behind it. Memory of a device is not behind the
 * link. */
GPU_TEST(p5_a_load_has_no_more_on_its_way_than_it_may)
{
	static const uint32_t windows[] = {0, 1, 64u << 10, 256u << 10, 1u << 20};
	kv_test_rng_t rng = {kv_test_seed()};
	uint32_t near = 0, behind = 0;
	kvk_gpu_t *gpu;
	gpu_case_t c;

	gpu_rig_init(&rig_, NULL);
	gpu = gpu_rig_open(&rig_);
	while (near < 40 || behind < 40) {
		gpu_case_init(&c, &rng, gpu, KVK_PAGED_HEAD_TOKEN_KV);
		gpu_case_ask_no_digests(&c); /* which no kernel makes of small leaves */
		for (uint32_t i = 0; i < KV_COUNT_OF(windows); i++) {
			const uint64_t asked = windows[i] ? windows[i] : 256u << 10;
			kvk_gpu_copy_t copy = gpu_case_copy(&c, KVK_GPU_SCATTER, KVK_GPU_ZERO_COPY, NULL);
			uint64_t came;

			copy.sms = 1u << i;
			copy.max_in_flight = windows[i];
			(void)fake_cuda_on_their_way();
			gpu_rig_copy(gpu, &copy);
			came = fake_cuda_on_their_way();
			if (came == 0) {
				continue; /* no moves, or none for a bulk kernel */
			}
			near += gpu_case_is_near(&c) != 0;
			behind += gpu_case_is_near(&c) == 0;
			if (gpu_case_is_near(&c)) {
				assert_int_equal(came, UINT64_MAX);
			} else { /* a chunk a warp in any case */
				assert_true(came <= asked || came <= copy.sms * (KVK_GPU_THREADS / 32u) * KVK_CHUNK);
			}
		}
		gpu_case_fini(&c);
	}
}

/* A scatter of all layers that a bulk kernel makes, of blocks that are large enough: one job copies a MiB of them when
 * they are measured. */
static kvk_gpu_copy_t draw(gpu_case_t *c, kv_test_rng_t *rng, kvk_gpu_t *gpu)
{
	for (;;) {
		kvk_gpu_copy_t copy;

		gpu_case_usual(c, rng, gpu, KVK_PAGED_HEAD_TOKEN_KV);
		c->layer = c->layers = 0;
		copy = gpu_case_copy(c, KVK_GPU_SCATTER, KVK_GPU_ZERO_COPY, NULL);
		(void)fake_cuda_on_their_way();
		gpu_rig_copy(gpu, &copy);
		if (fake_cuda_on_their_way() > 0 && c->g.block_bytes >= 1024) {
			return copy;
		}
		gpu_case_fini(c);
	}
}

/* A link of several times the rate is not filled by few SMs with little on its way: that is measured. A caller that
 * says how many SMs there are is believed. */
KV_TEST(p5_a_link_that_takes_more_is_given_more)
{
	kv_test_rng_t rng = {kv_test_seed()};

	for (int round = 0; round < 6; round++) {
		const int wide = round % 2, told = round / 2 == 2;
		kvk_gpu_t *gpu;
		kvk_gpu_copy_t copy;
		gpu_case_t c;

		gpu_rig_init(&rig_, NULL);
		rig_.t.env.now_ns = fake_cuda_clock;
		rig_.config.sms = told ? 3 : 0;
		gpu = gpu_rig_open(&rig_);
		fake_cuda_costs(40, 10);
		fake_cuda_narrow(wide ? 3 : 1);
		fake_cuda_limit_pinned(1 << 20);
		copy = draw(&c, &rng, gpu);
		assert_false(kvk_gpu_link_is_wide(gpu, &copy));
		assert_int_equal(kvk_gpu_measure(gpu, &c.layout, &c.paged), KV_OK);
		assert_int_equal(kvk_gpu_link_is_wide(gpu, &copy), wide && !told);

		(void)fake_cuda_sms();
		(void)fake_cuda_on_their_way();
		gpu_rig_copy(gpu, &copy);
		assert_int_equal(fake_cuda_on_their_way() > 256u << 10, wide && !told);
		assert_true(fake_cuda_sms() <= (told ? 3u : wide ? 16u : 8u));
		gpu_case_fini(&c);
		gpu_rig_fini(&rig_);
	}
}
