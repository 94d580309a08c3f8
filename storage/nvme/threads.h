/* storage/nvme/threads.h -- the threads of a disk tier. */
#ifndef KVS_NVME_IO_THREADS_H
#define KVS_NVME_IO_THREADS_H

#include "nvme/nvme.h"

/* The ring thread, or plain workers where there is no io_uring (logged once), and the commit thread.
 * KV_ERR_NOMEM, or one of kv/system.h. */
kv_status_t kvs_threads_start(kvs_nvme_t *nvme);
void kvs_threads_stop(kvs_nvme_t *nvme);

/* ---- uring.c, workers.c: mains of the I/O threads; the argument is a kvs_io_t ---------------- */
void *kvs_uring_main(void *io);
void *kvs_worker_main(void *io);

#endif
