/* The file that nvcc made, taken in as it is. */
#include "image.h"

#include <stddef.h>

#ifdef KVK_GPU_FATBIN

/* 64: the driver reads it as words. */
__asm__(".pushsection .rodata\n"
	".balign 64\n"
	".hidden kvk_gpu_image_bytes\n"
	".globl kvk_gpu_image_bytes\n"
	"kvk_gpu_image_bytes:\n"
	".incbin \"" KVK_GPU_FATBIN "\"\n"
	".byte 0\n"
	".popsection\n");
extern const unsigned char kvk_gpu_image_bytes[] __attribute__((visibility("hidden")));

const void *kvk_gpu_image(void)
{
	return kvk_gpu_image_bytes;
}

#else

const void *kvk_gpu_image(void)
{
	return NULL;
}

#endif
