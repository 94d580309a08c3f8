#include "connectors/worker/fail_alloc.h"

#include <stddef.h>

_Thread_local uint32_t fail_at;

static int fails(void)
{
	return fail_at == FAIL_EACH || (fail_at > 0 && --fail_at == 0);
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t size);
/* visible: sanitizers' libraries look for them */
__attribute__((visibility("default"))) void *__wrap_malloc(size_t size);
__attribute__((visibility("default"))) void *__wrap_calloc(size_t n, size_t size);
__attribute__((visibility("default"))) void *__wrap_realloc(void *p, size_t size);

void *__wrap_malloc(size_t size)
{
	return fails() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size)
{
	return fails() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t size)
{
	return fails() ? NULL : __real_realloc(p, size);
}
