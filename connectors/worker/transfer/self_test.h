/* worker/transfer/self_test.h -- the self-test against the daemon; the transfer thread. */
#ifndef KVX_SELF_TEST_H
#define KVX_SELF_TEST_H

#include "worker/base/state.h"

/* Run it, if it has not passed or failed yet and there is a daemon. Waits for each answer, 2 s a group at most. */
void kvx_self_test_run(kvx_worker_t *worker, uint64_t now);

#endif
