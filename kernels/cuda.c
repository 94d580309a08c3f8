/* libcuda.so.1, found at run time. */
#include "kvk/cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static kvk_cuda_ops_t driver;
static int loaded;
static char why[256];

/* Fill the table; the name of the first function the library lacks, or NULL. */
static const char *fill(void *library, kvk_cuda_ops_t *ops)
{
	void *found;

#define KVK_CUDA_FIND(member, symbol, arguments)                                                                       \
	found = dlsym(library, #symbol);                                                                               \
	if (!found) {                                                                                                  \
		return #symbol;                                                                                        \
	}                                                                                                              \
	memcpy(&ops->member, &found, sizeof found);
	KVK_CUDA_OPS(KVK_CUDA_FIND)
#undef KVK_CUDA_FIND

	return NULL;
}

static void load(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	const char *missing;

	if (!library) {
		const char *cause = dlerror();

		snprintf(why, sizeof why, "there is no CUDA driver on this machine (%s)", cause ? cause : "no reason");
		return;
	}
	missing = fill(library, &driver);
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
	pthread_once(&once, load);
	if (p_why) {
		*p_why = why;
	}

	return loaded ? &driver : NULL;
}
