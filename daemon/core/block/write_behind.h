/* write_behind.h -- new blocks to disk in the background, parents first; and the flush that makes them durable.
 *
 *   run:  --a block joins the CPU set--> QUEUED --all its blocks are on disk, or not admitted--> out of the queue
 *   write failed: nothing is started for a while, which grows from failure to failure
 */
#ifndef KVD_CORE_WRITE_BEHIND_H
#define KVD_CORE_WRITE_BEHIND_H

#include "core/core.h"

/* Start what the depth allows. */
void kvd_write_behind_run(kvd_core_t *core);
int kvd_write_behind_paused(const kvd_core_t *core);
/* Will write-behind store the block soon? Not while writes fail. */
int kvd_write_is_expected(kvd_core_t *core, uint32_t block);
/* A block has been stored: it is durable when a flush that begins now has ended. */
void kvd_note_store(kvd_core_t *core);
/* Start a flush when something was stored since the last one and a put waits for that; `seq` of a store is durable once
 * flushed >= seq. */
void kvd_flush_run(kvd_core_t *core);

#endif
