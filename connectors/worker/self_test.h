/* worker/self_test.h -- the self-test against the daemon; the transfer thread. */
#ifndef KVX_SELF_TEST_H
#define KVX_SELF_TEST_H

#include "worker/state.h"

void kvx_self_test_step(kvx_worker_t *worker, uint64_t now);
void kvx_self_test_fini(kvx_worker_t *worker);

#endif
