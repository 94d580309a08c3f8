/* daemon/io/sessions/disk_attach.h -- a disk tier that cannot be opened is a tier switched off, and tried again until
 * it opens.
 *
 *   world opens --device error, full--> OFF: a thread tries, with growing pauses
 *       --it opens--> the core loop attaches it
 *
 * While it is off nobody knows the true epochs of its spaces: spaces have random ones (kvd_core_attach() ends those),
 * and each reset is noted in a file of run_dir before it is answered. Noted resets become new epochs on disk before any
 * block of the tier is taken in, after a crash too.
 */
#ifndef KVD_IO_DISK_ATTACH_H
#define KVD_IO_DISK_ATTACH_H

#include "io/host.h"

/* At the start: open the disk tier as host->disk and make noted resets true there. `detail` gets a sentence. */
kv_status_t kvd_disk_attach_open(kvd_host_t *host, char *detail, size_t cap);
/* 1: a tier that failed like this may open later. */
int kvd_disk_attach_may_retry(kv_status_t status);

/* From now on the tier is off for this reason. KV_ERR_NOMEM, and those of kv/system.h. */
kv_status_t kvd_disk_attach_begin(kvd_host_t *host, const char *reason);
/* The start is over. Try for the tier from now on, when one is off; else the notes have done their work. */
kv_status_t kvd_disk_attach_watch(kvd_host_t *host);
/* Stop trying. The tier that was attached is closed before. */
void kvd_disk_attach_end(kvd_host_t *host);
/* Why it is off; NULL: it is not. */
const char *kvd_disk_attach_reason(const kvd_host_t *host);

/* kvd_world_t.note_reset */
kv_status_t kvd_disk_attach_note_reset(void *host, const kvs_epoch_t *epoch);

#endif
