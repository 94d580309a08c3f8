/* The kernels of kvk/nn.h: loaded, launched, unloaded. */
#include "nn/gpu.h"

#include "cuda/driver/context.h"
#include "cuda/driver/image.h"

#define FUNCTION_SHARED 8 /* attribute: shared memory a block may take */

static const char *const names[KVK_NN_KERNEL_COUNT] = {
#define KVK_NN_KERNEL(what, name) [KVK_NN_KERNEL_##what] = name,
	KVK_NN_KERNELS(KVK_NN_KERNEL)
#undef KVK_NN_KERNEL
};

static void close_gpu(kvk_nn_t *nn)
{
	kvk_nn_gpu_t *own = (kvk_nn_gpu_t *)nn;

	if (own->module && kvk_gpu_enter(own->gpu) == KV_OK) {
		KVK_GPU_CALL(own->gpu, module_unload, own->module);
		kvk_gpu_leave(own->gpu);
	}
	kv_free(own->gpu->env, own);
}

static const kvk_nn_ops_t ops = {
	.draw = kvk_nn_gpu_draw,
	.product = kvk_nn_gpu_product,
	.qkv = kvk_nn_gpu_qkv,
	.attention = kvk_nn_gpu_attention,
	.embed = kvk_nn_gpu_embed,
	.norm = kvk_nn_gpu_norm,
	.route = kvk_nn_gpu_route,
	.choose = kvk_nn_gpu_choose,
	.close = close_gpu,
};

/* In the context. */
static kv_status_t load_kernels(kvk_nn_gpu_t *own)
{
	kvk_gpu_t *gpu = own->gpu;
	kv_status_t status = KVK_GPU_CALL(gpu, module_load, &own->module, kvk_nn_image());

	own->module = status == KV_OK ? own->module : NULL;
	for (int i = 0; i < KVK_NN_KERNEL_COUNT && status == KV_OK; i++) {
		status = KVK_GPU_CALL(gpu, module_function, &own->kernels[i], own->module, names[i]);
		if (status == KV_OK && i < KVK_NN_KERNEL_DRAW) { /* products and attention */
			status = KVK_GPU_CALL(gpu, function_attribute, own->kernels[i], FUNCTION_SHARED,
					      (int)KVK_NN_SHARED);
		}
	}

	return status;
}

kv_status_t kvk_nn_gpu_open(kvk_gpu_t *gpu, uint32_t sms, kvk_nn_t **p_nn)
{
	kvk_nn_gpu_t *own;
	kv_status_t status;

	if (!kvk_nn_image()) {
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "this build has no GPU kernels");
	}
	if (!gpu->bulk[0]) {
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "%s has no bulk copies", gpu->name);
	}
	own = kv_alloc(gpu->env, sizeof *own);
	if (!own) {
		return kvk_gpu_set_error(KV_ERR_NOMEM, "out of memory");
	}
	own->nn.ops = &ops;
	own->gpu = gpu;
	own->sms = sms ? sms : gpu->sms_all;
	status = kvk_gpu_enter(gpu);
	if (status == KV_OK) {
		status = load_kernels(own);
		kvk_gpu_leave(gpu);
	}
	if (status != KV_OK) {
		kvk_nn_close(&own->nn);
		return status;
	}
	*p_nn = &own->nn;

	return KV_OK;
}
