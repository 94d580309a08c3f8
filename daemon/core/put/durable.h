/* durable.h -- DURABLE: the answer that a put's blocks are on disk and synced. */
#ifndef KVD_CORE_DURABLE_H
#define KVD_CORE_DURABLE_H

#include "core/core.h"

/* Blocks have left the disk set because the tier no longer vouches for them: acknowledgements that rest on them fail.
 */
void kvd_durable_fail_lost(kvd_core_t *core);
/* A block that acknowledgements owed may rest on has a new disk copy: they wait for the flush that covers it. */
void kvd_durable_await_again(kvd_core_t *core);
/* Answer DURABLE for the puts whose result is known. */
void kvd_durable_run(kvd_core_t *core);

#endif
