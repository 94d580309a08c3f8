/* real_alloc.h -- put before a source whose allocations are not to fail where others' are made to (--wrap). */
#ifndef TESTS_CONNECTORS_REAL_ALLOC_H
#define TESTS_CONNECTORS_REAL_ALLOC_H

#include <stdlib.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
#define malloc(size)    __real_malloc(size)
#define calloc(n, size) __real_calloc(n, size)

#endif
