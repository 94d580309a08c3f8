/* daemon/io/sessions/session.h -- one connection: from bytes to requests and back.
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

	kvd_out_t *out, **out_tail;
	size_t out_bytes;
	int mute; /* the peer reads no more; what it has sent still counts */
	int doomed;
};

/* Take a connected socket over. On failure it is closed. */
void kvd_session_open(kvd_host_t *host, kvd_namespace_t *ns, int fd);
/* One receive, and at most a quantum's frames. 1: there may be more. */
int kvd_session_read(kvd_host_t *host, kvd_session_t *session);
/* Queue one frame. fds (borrowed, -1 ends the list) or NULL. */
void kvd_session_send(kvd_host_t *host, kvd_session_t *session, const kv_frame_header_t *header, const uint8_t *body,
		      const int *fds);
/* These two descriptors are about to be closed: a frame that would still hand them over goes. */
void kvd_session_forget(kvd_session_t *session, const int fds[2]);
/* Is the peer root or the daemon's own user? */
int kvd_session_is_operator(const kvd_session_t *session);
int kvd_peer_is_operator(int fd);
/* End it when its namespace is served next. */
void kvd_session_doom(kvd_host_t *host, kvd_session_t *session);
/* Close those that keep us waiting, looking at a bounded number: the next call goes on. 1: it has to. */
int kvd_sessions_expire(kvd_host_t *host, uint64_t now_ns);
void kvd_sessions_fini(kvd_host_t *host);

/* ---- request.c ------------------------------------------------------------------------------- */

/* A request on its way. */
typedef struct kvd_call {
	kvd_session_t *session;
	const kv_frame_header_t *header;
	const kv_msg_t *ask;
	kv_msg_t *reply;
	int *fds; /* that came with it, fd_count of them; who takes one stores -1 */
	uint32_t fd_count;
	int reply_fds[KV_WIRE_MAX_FDS]; /* borrowed, -1 ends the list */
	const char *detail;             /* sentence for an error reply, or NULL */
} kvd_call_t;

/* A whole frame: check, decode, do, answer. Returns KV_OK when the session goes on. */
kv_status_t kvd_request_frame(kvd_host_t *host, kvd_session_t *session, const kv_frame_header_t *header,
			      const uint8_t *body);
/* Send the reply (or error) of `status` to a frame. */
void kvd_request_answer(kvd_host_t *host, const kvd_call_t *call, kv_status_t status);
/* The core's late answer (SPACE_RESET). */
void kvd_request_late(void *ctx, kvd_member_t member, uint16_t code, uint64_t frame_id, kv_status_t status,
		      const kv_msg_t *reply);

/* ---- pidfd.c --------------------------------------------------------------------------------- */

typedef enum kvd_pidfd {
	KVD_PIDFD_BAD,      /* no pidfd, or of a process that has ended */
	KVD_PIDFD_UNPROVED, /* of a live process that may be another one than the sender */
	KVD_PIDFD_OWN,      /* of the very process that sent it */
} kvd_pidfd_t;

/* Whose pidfd is fds[0] of the session? *p_process, unless it is bad: a number that no other live process has; 0: it
 * cannot be told. */
kvd_pidfd_t kvd_pidfd_check(const kvd_session_t *session, uint64_t *p_process);

/* join.c, space.c, document.c */
kv_status_t kvd_join_request(kvd_host_t *host, kvd_call_t *call);
kv_status_t kvd_space_request(kvd_host_t *host, kvd_call_t *call);
kv_status_t kvd_document_request(kvd_host_t *host, kvd_call_t *call);

#endif
