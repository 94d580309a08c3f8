/* fail_alloc.h -- allocations of this thread fail, in sources linked with --wrap=malloc,calloc,realloc. */
#ifndef TESTS_CONNECTORS_FAIL_ALLOC_H
#define TESTS_CONNECTORS_FAIL_ALLOC_H

#include <stdint.h>

#define FAIL_EACH UINT32_MAX

/* 1: the next one; n: the n-th from now; 0: none. */
extern _Thread_local uint32_t fail_at;

#endif
