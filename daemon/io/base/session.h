/* daemon/io/base/session.h -- one connection: from bytes to requests and back.
 *
 *   NEW --HELLO--> OPEN --JOIN--> OPEN as a member          any --bad frame, overflow, end of file--> doomed
 *
 * NEW: a body of at most 64 KiB, one second, one request. A doomed session handles nothing more and is freed when its
 * namespace is served next (fair.h), so that no call frame below still holds it. Output that the socket does not take
 * at once waits in a bounded queue; input waits in a bounded buffer that grows with the bytes that have come, never
 * with what a header claims.
 */
#ifndef KVD_IO_SESSIONS_SESSION_H
#define KVD_IO_SESSIONS_SESSION_H

#include "io/host.h"

typedef enum kvd_session_state { KVD_SESSION_NEW, KVD_SESSION_OPEN } kvd_session_state_t;

typedef struct kvd_out {
	struct kvd_out *next;
	kv_frame_header_t header;
	int fds[KV_WIRE_MAX_FDS]; /* borrowed: they outlive the session */
	size_t done;              /* bytes of header + body sent */
	uint8_t body[];
} kvd_out_t;

struct kvd_session {
	kvd_source_t source;
	kvd_session_t *next, *prev;
	kvd_namespace_t *ns;
	kvd_member_entry_t *member; /* NULL: not joined */
	uint64_t id;
	kvd_session_state_t state;
	uint32_t roles; /* KV_ROLE_* */
	pid_t pid;      /* as SO_PEERCRED says: for people only */
	uid_t uid;
	int matching; /* has joined to match only: it has the mirror, and holds nothing */
	int reserved; /* an operator's, beyond its namespace's part: its receive buffer does not grow */
	char program[65];
	uint64_t opened_ns;
	uint64_t requests;

	uint8_t *in;
	size_t in_cap, in_off, in_len;
	int fds[KV_WIRE_MAX_FDS]; /* came along and wait for their frame */
	uint32_t fd_count;
	pid_t fds_sender;    /* process that sent them (kv_sock_extra_t) */
	uint64_t partial_ns; /* since when a frame is incomplete; 0: none is */
	int backlog;         /* whole frames are left for the next piece */
	int parked;          /* its next frame waits for memory that is being touched */

	kvd_out_t *out, **out_tail;
	size_t out_bytes;
	int runs_beside; /* the client can run while the loop spins */
	int mute;        /* the peer reads no more; what it has sent still counts */
	int doomed;
};

/* Queue one frame. fds (borrowed, -1 ends the list) or NULL. */
void kvd_session_send(kvd_host_t *host, kvd_session_t *session, const kv_frame_header_t *header, const uint8_t *body,
		      const int *fds);
/* These two descriptors are about to be closed: a frame that would still hand them over goes. */
void kvd_session_drop_queued(kvd_session_t *session, const int fds[2]);
/* Is the peer root or the daemon's own user? */
int kvd_session_is_operator(const kvd_session_t *session);
int kvd_peer_is_operator(int fd);
/* End it when its namespace is served next. */
void kvd_session_doom(kvd_host_t *host, kvd_session_t *session);
/* Send what is queued, as far as the socket takes it. */
void kvd_session_flush(kvd_host_t *host, kvd_session_t *session);
/* Send a notice; fds (two, borrowed) or NULL. */
void kvd_session_notify(kvd_host_t *host, kvd_session_t *session, uint16_t code, const kv_msg_t *msg, const int *fds);
/* Who opened the connection: for people, and for the operator's part. */
struct ucred kvd_session_peer(int fd);
/* Count the session and its receive buffer in, or out, of its namespace's part. */
void kvd_session_count_in(kvd_host_t *host, kvd_session_t *session);
void kvd_session_count_out(kvd_host_t *host, const kvd_session_t *session);
/* Close the descriptors that wait for their frame. */
void kvd_session_close_fds(kvd_session_t *session);
/* Unlink, close and free it. Its member must have been told. */
void kvd_session_free(kvd_host_t *host, kvd_session_t *session);

#endif
