/* worker/jobs/deferred_saves.h -- saves go to the transfer thread: at once, or at the end of the step that computes
 * their blocks. */
#ifndef KVX_DEFERRED_SAVES_H
#define KVX_DEFERRED_SAVES_H

#include "worker/jobs/save.h"

/* To the transfer thread; a dropped save goes there too, which tells the daemon that nothing is written. */
void kvx_save_submit(kvx_worker_t *worker, kvx_wsave_t *save);
void kvx_save_defer(kvx_worker_t *worker, kvx_wsave_t *save);
/* Submit the deferred saves, or drop them. */
void kvx_saves_submit_deferred(kvx_worker_t *worker, int drop);

#endif
