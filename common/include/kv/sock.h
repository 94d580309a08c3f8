/* kv/sock.h -- UNIX stream sockets carrying frames (kv/wire.h) and descriptors. */
#ifndef KV_SOCK_H
#define KV_SOCK_H

#include "kv/wire.h"

#include <sys/types.h>

/* Connect to a daemon. KV_ERR_PATH: path does not fit sockaddr_un (107 bytes); KV_ERR_UNREACHABLE: no process listens,
 * *p_errno says why. The fd is CLOEXEC and non-blocking. */
kv_status_t kv_sock_connect(const char *path, int *p_fd, int *p_errno);

/* What kv_sock_listen() has failed with. */
typedef struct kv_sock_error {
	int error;        /* errno, */
	const char *call; /* of this call; NULL: the path is too long */
} kv_sock_error_t;

/* Listen at path with the given mode. A left-over socket without a listener is replaced; a live one is KV_ERR_LOCKED.
 * KV_ERR_NOSPC: the file system is full; KV_ERR_PATH: another fault of the path; KV_ERR_REFUSED, KV_ERR_BUSY,
 * KV_ERR_NOMEM: as kv_refused_status(). */
kv_status_t kv_sock_listen(const char *path, unsigned mode, int backlog, int *p_fd, kv_sock_error_t *p_error);
/* Why it has failed with this status, for people: as kv_refused_text() where the system refuses it. Returns out. */
const char *kv_sock_error_text(kv_status_t status, const kv_sock_error_t *error, char *out, size_t cap);

/* Which file a path leads to; all zero: none. A socket's file keeps its number for as long as the socket is open. */
typedef struct kv_sock_file {
	dev_t dev;
	ino_t ino;
} kv_sock_file_t;

kv_sock_file_t kv_sock_file(const char *path);
/* Does the path still lead to it? */
int kv_sock_is_at(const char *path, kv_sock_file_t file);

/* Send what fits without blocking: header and body as one frame, `fds` with the first byte. *p_sent counts bytes of
 * header + body from `offset` on. KV_PENDING: the socket is full. KV_ERR_CLOSED: the peer has gone. KV_ERR_BUSY: the
 * kernel has no memory, or too many descriptors are under way; try again later. KV_ERR_ARG: offset, fds or body do not
 * fit the header. */
kv_status_t kv_sock_send(int fd, const kv_frame_header_t *header, const uint8_t *body, size_t offset, const int *fds,
			 size_t *p_sent);

/* sendmsg() of one message that is no frame, with the descriptor `passed` unless it is -1, without SIGPIPE. */
ssize_t kv_sock_send_message(int fd, const void *bytes, size_t len, int passed, int flags);

/* 0: this thread and the process at the other end may use one CPU only, and the same one (sched_getaffinity()): one
 * that spins while it waits for the other keeps it from running. */
int kv_sock_peer_runs_beside(int fd);

/* Receive at most cap bytes and up to KV_WIRE_MAX_FDS descriptors without blocking; descriptors are CLOEXEC and belong
 * to the caller. More descriptors than fit are closed and *p_fd_count is UINT32_MAX. KV_PENDING: nothing there.
 * KV_ERR_CLOSED: end of file. Descriptors of two frames never come in one call. */
kv_status_t kv_sock_recv(int fd, uint8_t *out, size_t cap, size_t *p_len, int fds[KV_WIRE_MAX_FDS],
			 uint32_t *p_fd_count);

/* What came with bytes. */
typedef struct kv_sock_extra {
	int fds[KV_WIRE_MAX_FDS];
	uint32_t fd_count;
	pid_t sender; /* process that sent them, by its number in our process namespace; 0: it has none there, or none
			 was asked */
} kv_sock_extra_t;

/* From now on the kernel says which process sends on this socket (on a listening one: on those it accepts). KV_ERR_IO:
 * it is no socket. */
kv_status_t kv_sock_ask_sender(int fd);
/* kv_sock_recv(), with the sender. Bytes of two processes never come in one call. */
kv_status_t kv_sock_recv_from(int fd, uint8_t *out, size_t cap, size_t *p_len, kv_sock_extra_t *extra);

#endif
