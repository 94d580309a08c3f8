/* gpu/wire.h -- what the GPU program (kvd-gpu) says to the daemon that started it, on a pair of SOCK_SEQPACKET sockets:
 * a message a device or a slab, and one message why it ends. The daemon says nothing.
 *
 * Both ends are of one build. The version and the size are in each message, and what does not fit is refused.
 */
#ifndef KVD_GPU_WIRE_H
#define KVD_GPU_WIRE_H

#include "kv/status.h"

#include <stdint.h>
#include <string.h>

#define KVD_GPU_FD       3 /* of the program: its end of the pair */
#define KVD_GPU_WIRE     1u
#define KVD_GPU_UUID_MAX 48u
#define KVD_GPU_TEXT_MAX 160u
#define KVD_GPU_FAKE     "fake-" /* devices of this name have memfds for memory: fake-0 to fake-7 */

typedef enum kvd_gpu_verb {
	KVD_GPU_DEVICE = 1, /* `list`: a device of this machine */
	KVD_GPU_SLAB = 2,   /* a slab's memory, with one descriptor, which is the receiver's */
	KVD_GPU_END = 3     /* the last message */
} kvd_gpu_verb_t;

typedef struct kvd_gpu_message {
	uint32_t version; /* KVD_GPU_WIRE */
	uint32_t verb;    /* kvd_gpu_verb_t */
	int32_t status;   /* END: KV_OK when all was given; kv_status_t */
	uint32_t reserved;
	uint64_t bytes; /* DEVICE: of memory, all and free; SLAB: of the slab */
	uint64_t free_bytes;
	char uuid[KVD_GPU_UUID_MAX]; /* DEVICE */
	char text[KVD_GPU_TEXT_MAX]; /* DEVICE: its name; END: why, as a sentence without its full stop */
} kvd_gpu_message_t;

/* 1: NUL-terminated, and without control characters: it goes to logs and documents. */
static inline int kvd_gpu_text_ok(const char *text, size_t cap)
{
	size_t len = strnlen(text, cap);

	for (size_t i = 0; i < len; i++) {
		if ((unsigned char)text[i] < 0x20 || (unsigned char)text[i] == 0x7f) {
			return 0;
		}
	}

	return len < cap;
}

/* Letters, digits and '-'. */
static inline int kvd_gpu_uuid_ok(const char *uuid, size_t len)
{
	for (size_t i = 0; i < len; i++) {
		const char c = uuid[i];

		if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-')) {
			return 0;
		}
	}

	return len > 0 && len < KVD_GPU_UUID_MAX;
}

static inline int kvd_gpu_is_fake(const char *uuid)
{
	return strncmp(uuid, KVD_GPU_FAKE, sizeof KVD_GPU_FAKE - 1) == 0;
}

/* Does a received message of n bytes, with this number of descriptors, make sense? KV_ERR_PROTO: it does not. */
static inline kv_status_t kvd_gpu_check(const kvd_gpu_message_t *m, size_t n, uint32_t fds)
{
	int ok = n == sizeof *m && m->version == KVD_GPU_WIRE && m->reserved == 0 &&
		 fds == (m->verb == KVD_GPU_SLAB ? 1u : 0u);

	if (!ok || !kvd_gpu_text_ok(m->text, sizeof m->text)) {
		return KV_ERR_PROTO;
	}
	switch (m->verb) {
	case KVD_GPU_DEVICE:
		ok = m->free_bytes <= m->bytes && kvd_gpu_uuid_ok(m->uuid, strnlen(m->uuid, sizeof m->uuid));
		break;
	case KVD_GPU_SLAB:
		ok = m->bytes > 0;
		break;
	case KVD_GPU_END:
		ok = m->status <= KV_OK && (m->status == KV_OK) == (m->text[0] == '\0');
		break;
	default:
		ok = 0;
		break;
	}

	return ok ? KV_OK : KV_ERR_PROTO;
}

#endif
