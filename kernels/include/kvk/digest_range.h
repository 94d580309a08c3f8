/* kvk/digest_range.h -- the digest of a range of memory, which names what lies there (an engine's weights).
 *
 * A range is cut into pieces of KVK_PIECE bytes. The digest of a piece is XXH3-64 of its bytes, padded with zeros to a
 * multiple of KVK_PIECE_PAD bytes; the digest of the range is XXH3-128 (canonical) of its pieces' digests in order and
 * its length, all u64 little-endian. So it is the same whichever threads or lanes have read which piece, and a range of
 * 0 bytes has one, too. cpu/digest_range.c is the specification of kvk_gpu_digest() (kvk/gpu.h). */
#ifndef KVK_DIGEST_RANGE_H
#define KVK_DIGEST_RANGE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVK_PIECE              16384u
#define KVK_PIECE_PAD          256u /* XXH3's long form, the only one that kernels have, begins at 241 bytes */
#define KVK_RANGE_DIGEST_BYTES 16u

typedef struct kvk_range {
	uint64_t at; /* address */
	uint64_t bytes;
} kvk_range_t;

/* Pieces of a range of `bytes` bytes. */
uint64_t kvk_count_pieces(uint64_t bytes);
/* 1 to KVK_PIECE bytes. */
uint64_t kvk_digest_piece(const void *data, size_t bytes);
/* Of a range of `bytes` bytes: digests of all its pieces in, its own digest out. */
void kvk_digest_range(const uint64_t *pieces, uint64_t bytes, uint8_t digest[KVK_RANGE_DIGEST_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
