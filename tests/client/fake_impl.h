/* fake_impl.h -- between fake_daemon.c (sockets), fake_store.c (blocks, leases, puts) and fake_area.c (shared
 * memory). */
#ifndef TESTS_FAKE_IMPL_H
#define TESTS_FAKE_IMPL_H

#include "fake_daemon.h"

#include "core/block/mirror.h"
#include "kv/shm.h"

#include <pthread.h>

#define FAKE_SESSIONS      8u
#define FAKE_CLAIMS        128u
#define FAKE_LEASE_STRIDE  2048u
#define FAKE_LEASE_BYTES   (4096u + FAKE_CLAIMS * FAKE_LEASE_STRIDE)
#define FAKE_STAGING_WORDS 4096u
#define FAKE_RING_RECORDS  8u
#define FAKE_MEMBER_BYTES  (4096u + FAKE_RING_RECORDS * 128u + FAKE_STAGING_WORDS * 8u)

typedef struct fake_area {
	int fd;
	uint8_t *base;
	uint64_t bytes;
} fake_area_t;

typedef struct fake_block {
	kv_key_t key, parent;
	uint8_t group;
	uint32_t state; /* 0 free, 1 being written, 2 visible */
	uint32_t words; /* digests handed in */
} fake_block_t;

typedef struct fake_claim {
	uint64_t id; /* 0: free */
	uint32_t kind, n, done, session;
	int durable;
} fake_claim_t;

typedef struct fake_session {
	int fd; /* -1: free */
	int joined;
	fake_area_t member;
	uint8_t in[1 << 20];
	size_t len;
	int fds[KV_WIRE_MAX_FDS];
	uint32_t fd_count;
} fake_session_t;

struct fake {
	pthread_t thread;
	pthread_mutex_t lock; /* everything below; the test's thread looks in, too */
	_Atomic int stop;
	int listener, wake[2];
	char path[108];
	uint64_t incarnation, epoch, next_id;
	uint8_t root[32];
	fake_geometry_t geometry;
	fake_knobs_t knobs;
	fake_seen_t seen;
	fake_area_t mirror, leases, data, digests;
	kvd_mirror_t writer; /* of the mirror */
	fake_block_t blocks[FAKE_SLOTS];
	fake_claim_t claims[FAKE_CLAIMS];
	fake_session_t *sessions;
	uint32_t newest; /* session that joined last */
	uint8_t out[1 << 20];
};

/* fake_area.c */
fake_area_t fake_area_make(uint64_t bytes, int seal);
void fake_area_free(fake_area_t *area);
void fake_areas_make(fake_t *fake);
void fake_member_make(fake_area_t *area);
/* The lie, if it is about this. */
const fake_lie_t *fake_lie_about(fake_t *fake, fake_of_t of);
/* Put it there. */
void fake_lie_put(fake_t *fake, fake_of_t of, void *what);
/* Damage what is about to be handed out. */
void fake_areas_spoil(fake_t *fake, fake_session_t *session, kv_msg_join_reply_t *reply, int fds[3], uint32_t *p_count);

/* fake_store.c: requests of members; the reply is filled in. */
kv_status_t fake_acquire(fake_t *fake, uint32_t session, const kv_msg_acquire_t *ask, kv_msg_acquire_reply_t *reply);
kv_status_t fake_release(fake_t *fake, const kv_msg_release_t *ask, kv_msg_release_reply_t *reply);
kv_status_t fake_put_start(fake_t *fake, uint32_t session, const kv_msg_put_start_t *ask,
			   kv_msg_put_start_reply_t *reply);
kv_status_t fake_put_end(fake_t *fake, uint32_t session, const kv_msg_put_end_t *ask, kv_msg_put_end_reply_t *reply);
kv_status_t fake_put_revoke(fake_t *fake, const kv_msg_put_revoke_t *ask);
kv_status_t fake_explain(fake_t *fake, const kv_msg_explain_t *ask, kv_msg_explain_reply_t *reply);
kv_lease_header_t *fake_claim_header(fake_t *fake, const fake_claim_t *claim);

/* The open claims of a kind; 0: of any. */
#define FAKE_EACH_CLAIM(fake, claim, of_kind)                                                                          \
	for (fake_claim_t *claim = (fake)->claims; claim < (fake)->claims + FAKE_CLAIMS; claim++)                      \
		if (claim->id && ((of_kind) == 0 || claim->kind == (of_kind)))

/* fake_daemon.c */
void fake_notice(fake_t *fake, uint32_t session, uint16_t code, const void *msg, const int *fds, uint32_t fd_count);

#endif
