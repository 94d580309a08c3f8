/* storage/metadb/wire.h -- what the disk tier and its metadata process (kvd_meta.c) say to each other over a pair of
 * SOCK_SEQPACKET sockets.
 *
 * A message is a head and `count` changes. Each request has one answer with its verb and number, but for a WRITE with
 * MORE, which has none. Both ends are of one build: what differs in version or size is refused.
 *
 *   verb    request                                          answer
 *   OPEN    (the start of the process)                       status; MARKED
 *   WRITE   changes; MORE: the batch goes on; SYNC           status
 *   MARK    SYNC                                             status
 *   SCAN    from: class << 32 | slot                         status; rows from there on, in order; MORE: there are
 *                                                            others
 *   CLOSE                                                    status, then the process ends
 *
 * The process ends after any answer that is not OK: what RocksDB does after a failed write is not relied upon.
 */
#ifndef KVS_METADB_WIRE_H
#define KVS_METADB_WIRE_H

#include "metadb.h"

#define KVS_META_VERSION 1u
#define KVS_META_CHANGES 200u /* of one message: it fits into any socket buffer */
#define KVS_META_FD      3    /* the process's end of the pair */

typedef enum kvs_meta_verb {
	KVS_META_OPEN = 1,
	KVS_META_WRITE,
	KVS_META_MARK,
	KVS_META_SCAN,
	KVS_META_CLOSE
} kvs_meta_verb_t;

#define KVS_META_MORE   1u
#define KVS_META_SYNC   2u
#define KVS_META_MARKED 4u

typedef struct kvs_meta_message {
	uint32_t version;
	uint32_t verb;
	uint32_t flags;
	uint32_t count;
	uint64_t number;
	uint64_t from;
	int32_t status;
	uint32_t change_bytes; /* sizeof(kvs_row_change_t) */
	kvs_row_change_t change[KVS_META_CHANGES];
} kvs_meta_message_t;

static inline size_t kvs_meta_bytes(uint32_t count)
{
	return offsetof(kvs_meta_message_t, change) + count * sizeof(kvs_row_change_t);
}

/* 1: `len` received bytes are a whole message of this version. */
static inline int kvs_meta_is_whole(const kvs_meta_message_t *m, size_t len)
{
	return len >= kvs_meta_bytes(0) && m->version == KVS_META_VERSION &&
	       m->change_bytes == sizeof(kvs_row_change_t) && m->count <= KVS_META_CHANGES &&
	       len == kvs_meta_bytes(m->count);
}

static inline uint64_t kvs_meta_row_id(const kvs_row_t *row)
{
	return (uint64_t)row->slot_class << 32 | row->slot;
}

#endif
