/* kvx_digest.h -- the digest of a whole file, or of memory, computed while the engine is busy.
 *
 * That of a file is XXH3-128 (canonical byte order) over: the XXH3-128 (canonical) of each chunk of KVX_DIGEST_CHUNK
 * bytes, in order, then the file's length as u64 little-endian. It depends on the file's bytes alone, not on the number
 * of threads.
 *
 * Threads of idle priority, processor and disk (of the usual one for a file of up to 4 MiB), read the file through the
 * page cache: pages that an engine has just read cost no disk access, and pages that only this reads are the first to
 * be evicted. Memory: 256 KiB a thread.
 */
#ifndef KVX_DIGEST_H
#define KVX_DIGEST_H

#include "kvc.h"
#include "kvk/digest_range.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVX_DIGEST_BYTES   16u
#define KVX_DIGEST_CHUNK   (UINT64_C(64) << 20)
#define KVX_DIGEST_THREADS 16u /* at most */

typedef struct kvx_digest_config {
	size_t struct_size;
	int fd;           /* a regular file, open for reading; the caller's */
	uint32_t threads; /* 0: one for each CPU the process may use */
	/* Not NULL: asked before each piece, from any of the threads; nonzero ends the call. */
	int (*cancelled)(void *ctx);
	void *ctx;
} kvx_digest_config_t;

/* Waits until all of the file has been read. Any thread may call it. KVC_ERR_ARG: the configuration is wrong or the
 * file is not a regular one. KVC_ERR_CLOSED: cancelled. KVC_ERR_FAULT: the file cannot be read to the length it had,
 * errno says why (0: it has become shorter). KVC_ERR_NOMEM. */
KVC_API kvc_status_t kvx_digest_file(const kvx_digest_config_t *config, uint8_t digest[KVX_DIGEST_BYTES]);

/* The digests of ranges of this process's memory (kvk/digest_range.h), by the caller and `threads` - 1 threads of its
 * priority, 16 in all at most (0: one for each CPU the process may use). Waits until all has been read; any thread may
 * call it. Bytes that are written meanwhile count as old or new. KVC_ERR_ARG: a range ends beyond all memory.
 * KVC_ERR_NOMEM. */
KVC_API kvc_status_t kvx_digest_memory(const kvk_range_t *ranges, uint32_t count, uint32_t threads,
				       uint8_t (*digests)[KVX_DIGEST_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
