/* libcuda.so.1, found at run time. */
#include "kvk/cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static kvk_cuda_ops_t driver;
static int loaded;
static char why[256];

static const char *const symbols[] = {
#define KVK_CUDA_SYMBOL(member, symbol, arguments) #symbol,
	KVK_CUDA_OPS(KVK_CUDA_SYMBOL) KVK_CUDA_OPTIONAL_OPS(KVK_CUDA_SYMBOL)
#undef KVK_CUDA_SYMBOL
};
#define KVK_CUDA_ONE(member, symbol, arguments) +1
enum { NEEDED = 0 KVK_CUDA_OPS(KVK_CUDA_ONE) };
_Static_assert(offsetof(kvk_cu_kernel_t, params) == 40 && sizeof(kvk_cu_kernel_t) == 72, "CUDA_KERNEL_NODE_PARAMS_v2");
_Static_assert(offsetof(kvk_cu_memory_prop_t, flags) == 24 && sizeof(kvk_cu_memory_prop_t) == 32,
	       "CUmemAllocationProp");
_Static_assert(offsetof(kvk_cu_access_t, flags) == 8 && sizeof(kvk_cu_access_t) == 12, "CUmemAccessDesc");
_Static_assert(sizeof(kvk_cuda_ops_t) == sizeof symbols, "a table of functions and nothing else");

/* Fill the table; the name of the first function the library lacks and has to have, or NULL. */
static const char *fill_table(void *library, kvk_cuda_ops_t *ops)
{
	for (size_t i = 0; i < KV_COUNT_OF(symbols); i++) {
		void *found = dlsym(library, symbols[i]);

		if (!found && i < NEEDED) {
			return symbols[i];
		}
		memcpy((uint8_t *)ops + i * sizeof found, &found, sizeof found);
	}

	return NULL;
}

static void load_driver(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	const char *missing;

	if (!library) {
		const char *cause = dlerror();

		snprintf(why, sizeof why, "there is no CUDA driver on this machine (%s)", cause ? cause : "no reason");
		return;
	}
	missing = fill_table(library, &driver);
	if (missing) {
		snprintf(why, sizeof why, "the CUDA driver is too old: it has no %s", missing);
		dlclose(library);
		return;
	}
	loaded = 1;
	snprintf(why, sizeof why, "the CUDA driver is loaded");
}

const kvk_cuda_ops_t *kvk_cuda_load(const char **p_why)
{
	pthread_once(&once, load_driver);
	if (p_why) {
		*p_why = why;
	}

	return loaded ? &driver : NULL;
}
