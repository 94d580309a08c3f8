/* The files that nvcc made, taken in as they are. */
#include "image.h"

#include <stddef.h>

/* 64: the driver reads it as words. */
#define TAKE_IN(symbol, file)                                                                                          \
	__asm__(".pushsection .rodata\n"                                                                               \
		".balign 64\n"                                                                                         \
		".hidden " #symbol "\n"                                                                                \
		".globl " #symbol "\n" #symbol ":\n"                                                                   \
		".incbin \"" file "\"\n"                                                                               \
		".byte 0\n"                                                                                            \
		".popsection\n");                                                                                      \
	extern const unsigned char symbol[] __attribute__((visibility("hidden")))

#ifdef KVK_GPU_FATBIN
TAKE_IN(kvk_gpu_image_bytes, KVK_GPU_FATBIN);
#else
#define kvk_gpu_image_bytes NULL
#endif

#ifdef KVK_EP_FATBIN
TAKE_IN(kvk_ep_image_bytes, KVK_EP_FATBIN);
#else
#define kvk_ep_image_bytes NULL
#endif

#ifdef KVK_NN_FATBIN
TAKE_IN(kvk_nn_image_bytes, KVK_NN_FATBIN);
#else
#define kvk_nn_image_bytes NULL
#endif

const void *kvk_gpu_image(void)
{
	return kvk_gpu_image_bytes;
}

const void *kvk_ep_image(void)
{
	return kvk_ep_image_bytes;
}

const void *kvk_nn_image(void)
{
	return kvk_nn_image_bytes;
}
