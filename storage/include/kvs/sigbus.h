/* kvs/sigbus.h -- memory that a client may have taken away (truncated, punched), touched without dying.
 *
 * A thread says which ranges it is about to touch. SIGBUS within them ends the call with KV_ERR_FAULT; a fault anywhere
 * else goes to the handler that was there before. KV_ERR_INTERNAL, from each: not installed, or called inside another
 * of these functions (from a signal handler). Any thread may call.
 */
#ifndef KVS_SIGBUS_H
#define KVS_SIGBUS_H

#include "kvs/tier.h"

/* Once per process; again does no harm. */
kv_status_t kvs_sigbus_install(void);

/* KV_ERR_FAULT: the memory was gone; dst is then undefined. */
kv_status_t kvs_sigbus_copy(void *dst, const void *src, size_t n);

/* Digest a block leaf by leaf, copying it to dst in the same pass when dst is not NULL; compare with `expected` and
 * fill p_leaves, each when not NULL (they may not lie in client memory). KV_ERR_CORRUPT: stopped at the first leaf that
 * differs. KV_ERR_FAULT. dst is undefined then. */
kv_status_t kvs_sigbus_copy_block(const kvs_geometry_t *geometry, void *dst, const void *src, const uint64_t *expected,
				  uint64_t *p_leaves);

/* The same without a copy; fills p_roots too, when it is not NULL. */
kv_status_t kvs_sigbus_verify_block(const kvs_geometry_t *geometry, const void *data, const uint64_t *expected,
				    uint64_t *p_leaves, uint64_t *p_roots);

/* Fault the pages of [p, p + n) in for writing without changing a byte. KV_ERR_FAULT: no memory behind one of them. */
kv_status_t kvs_sigbus_touch_pages(void *p, size_t n);

/* The same by one system call where the kernel has it (5.14): what a daemon does to memory before it lends it, since
 * that mmap has succeeded says nothing of the pages. huge: on huge pages where the kernel makes them when asked, which
 * is much faster. 0 or -errno. */
int kvs_populate(void *base, size_t bytes, int huge);

#endif
