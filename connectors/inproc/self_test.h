/* inproc/self_test.h -- the self-test at attach. */
#ifndef KVX_INPROC_SELF_TEST_H
#define KVX_INPROC_SELF_TEST_H

#include "inproc/state.h"

kvc_status_t kvx_inproc_test_init(kvx_t *kvx);
void kvx_inproc_test_fini(kvx_t *kvx);
/* Advance it, if it is due. */
void kvx_inproc_test_step(kvx_t *kvx, uint64_t now);

#endif
