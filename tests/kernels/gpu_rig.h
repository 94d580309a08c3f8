/* gpu_rig.h -- one fake driver, one environment and one GPU opened on them, as the tests of GPU copies want them.
 *
 *     gpu_rig_init(&rig, NULL);
 *     rig.config.jobs = 3;
 *     gpu = gpu_rig_open(&rig);
 *     ...
 *     gpu_rig_fini(&rig);
 */
#ifndef GPU_RIG_H
#define GPU_RIG_H

#include "gpu_case.h"

typedef struct gpu_rig {
	kv_test_env_t t;
	kvk_gpu_config_t config; /* what gpu_rig_open takes: changed between init and open */
	kvk_gpu_t *gpu;          /* closed by gpu_rig_fini; NULL: none is open */
} gpu_rig_t;

/* Starts the driver (NULL: one with bulk kernels whose streams run late). Until somebody says otherwise it pins 256 KiB
 * at most: quick to open, little to measure. Do not move the rig afterwards. */
void gpu_rig_init(gpu_rig_t *rig, const fake_cuda_config_t *driver);
/* Closes the GPU and asserts that nothing is left of it, on the device or off it. */
void gpu_rig_fini(gpu_rig_t *rig);

kv_status_t gpu_rig_try_open(gpu_rig_t *rig);
kvk_gpu_t *gpu_rig_open(gpu_rig_t *rig); /* which must work */

/* The fake device gets on at each look. Answers how the job ended. */
kv_status_t gpu_rig_finish(kvk_gpu_job_t *job);
/* It must have ended well, and is given back. */
void gpu_rig_end(kvk_gpu_job_t *job);
/* Submits a copy that must be taken and must end well. */
void gpu_rig_copy(kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy);

/* Memory of the device, which the host sees at the same address, and pinned memory (0: there is too little), in the
 * driver's context. */
kvk_cu_ptr_t gpu_rig_alloc(size_t bytes);
void gpu_rig_free(kvk_cu_ptr_t memory);
int gpu_rig_alloc_pinned(size_t bytes, void **p_base);
void gpu_rig_free_pinned(void *base);

/* The rig of a test, and a test that starts it and is ended with gpu_rig_fini(). */
static gpu_rig_t __attribute__((unused)) rig_;
#define GPU_TEST(name) KV_TEST_BETWEEN(name, (void)0, gpu_rig_fini(&rig_))

#endif
