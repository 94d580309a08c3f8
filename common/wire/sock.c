/* UNIX stream sockets that carry frames and descriptors. */
#include "kv/sock.h"

#include "kv/system.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
	       "frames are little-endian and are sent as they lie in memory");

/* Room for more descriptors than we take: what fits is received and closed by us, what does not the kernel closes. */
typedef union control {
	struct cmsghdr align;
	char bytes[CMSG_SPACE(KV_WIRE_MAX_FDS * sizeof(int)) + CMSG_SPACE(sizeof(struct ucred))];
} control_t;

static kv_status_t address_of(const char *path, struct sockaddr_un *address)
{
	size_t len = strlen(path);

	if (len == 0 || len >= sizeof address->sun_path) {
		return KV_ERR_PATH;
	}
	memset(address, 0, sizeof *address);
	address->sun_family = AF_UNIX;
	memcpy(address->sun_path, path, len);

	return KV_OK;
}

static int stream_socket(void)
{
	return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

/* 0, or the errno of the attempt. */
static int connect_to(int fd, const struct sockaddr_un *address)
{
	while (connect(fd, (const struct sockaddr *)address, sizeof *address) != 0) {
		if (errno != EINTR) {
			return errno;
		}
	}

	return 0;
}

kv_status_t kv_sock_connect(const char *path, int *p_fd, int *p_errno)
{
	struct sockaddr_un address;
	kv_status_t status = address_of(path, &address);
	int fd, error;

	if (status != KV_OK) {
		*p_errno = ENAMETOOLONG;
		return status;
	}

	fd = stream_socket();
	if (fd < 0) {
		*p_errno = errno;
		return KV_ERR_UNREACHABLE;
	}
	error = connect_to(fd, &address);
	if (error != 0) {
		close(fd);
		*p_errno = error;
		return KV_ERR_UNREACHABLE;
	}
	*p_fd = fd;

	return KV_OK;
}

/* Of a call that needs no path, or has failed as no path makes it fail. */
static kv_status_t note_refusal(kv_sock_error_t *p_error, const char *call)
{
	*p_error = (kv_sock_error_t){errno, call};

	return kv_refused_status(p_error->error);
}

/* EPERM is of a filter: who may not write to the directory gets EACCES. A file system that is full now may have room
 * later; another kind of path stays what it is. */
static kv_status_t note_path_error(kv_sock_error_t *p_error, const char *call)
{
	if (errno == EPERM) {
		return note_refusal(p_error, call);
	}
	*p_error = (kv_sock_error_t){errno, call};

	return errno == ENOSPC || errno == EDQUOT ? KV_ERR_NOSPC : KV_ERR_PATH;
}

/* Remove what lies at the address if it is a socket that refuses connections: its owner is dead. */
static kv_status_t remove_stale(const struct sockaddr_un *address, kv_sock_error_t *p_error)
{
	struct stat st;
	int fd, error;

	if (lstat(address->sun_path, &st) != 0) {
		const int is_gone = errno == ENOENT;
		const kv_status_t status = note_path_error(p_error, "lstat");

		return is_gone ? KV_OK : status;
	}
	if (!S_ISSOCK(st.st_mode)) {
		*p_error = (kv_sock_error_t){EEXIST, "bind"};
		return KV_ERR_PATH;
	}

	fd = stream_socket();
	if (fd < 0) {
		return note_refusal(p_error, "socket");
	}
	error = connect_to(fd, address);
	close(fd);
	if (error != ECONNREFUSED && error != ENOENT) {
		*p_error = (kv_sock_error_t){error ? error : EADDRINUSE, "connect"};
		return KV_ERR_LOCKED;
	}
	if (unlink(address->sun_path) != 0 && errno != ENOENT) {
		return note_path_error(p_error, "unlink");
	}

	return KV_OK;
}

static kv_status_t bind_at(int fd, const struct sockaddr_un *address, kv_sock_error_t *p_error)
{
	kv_status_t status;

	if (bind(fd, (const struct sockaddr *)address, sizeof *address) == 0) {
		return KV_OK;
	}
	if (errno != EADDRINUSE) {
		return note_path_error(p_error, "bind");
	}

	status = remove_stale(address, p_error);
	if (status != KV_OK) {
		return status;
	}
	if (bind(fd, (const struct sockaddr *)address, sizeof *address) != 0) {
		const int is_taken = errno == EADDRINUSE;

		status = note_path_error(p_error, "bind");
		return is_taken ? KV_ERR_LOCKED : status;
	}

	return KV_OK;
}

kv_status_t kv_sock_listen(const char *path, unsigned mode, int backlog, int *p_fd, kv_sock_error_t *p_error)
{
	struct sockaddr_un address;
	kv_status_t status = address_of(path, &address);
	int fd;

	if (status != KV_OK) {
		*p_error = (kv_sock_error_t){.error = ENAMETOOLONG};
		return status;
	}

	fd = stream_socket();
	if (fd < 0) {
		return note_refusal(p_error, "socket");
	}
	/* The file takes the mode its socket has at bind (less the umask), so it is at no time wider than asked for. */
	if (fchmod(fd, (mode_t)mode) != 0) {
		status = note_refusal(p_error, "fchmod");
		goto err_socket;
	}
	status = bind_at(fd, &address, p_error);
	if (status != KV_OK) {
		goto err_socket;
	}
	if (chmod(path, (mode_t)mode) != 0) {
		status = note_path_error(p_error, "chmod");
		goto err_bind;
	}
	if (listen(fd, backlog) != 0) {
		status = note_refusal(p_error, "listen");
		goto err_bind;
	}
	*p_fd = fd;

	return KV_OK;

err_bind:
	unlink(path);
err_socket:
	close(fd);
	return status;
}

const char *kv_sock_error_text(kv_status_t status, const kv_sock_error_t *error, char *out, size_t cap)
{
	if (status == KV_ERR_REFUSED || status == KV_ERR_BUSY || status == KV_ERR_NOMEM) {
		return kv_refused_text(error->call, error->error, out, cap);
	}
	snprintf(out, cap, "%s (%s)", kv_status_text(status), strerror(error->error));

	return out;
}

kv_sock_file_t kv_sock_file(const char *path)
{
	struct stat st;

	return lstat(path, &st) == 0 ? (kv_sock_file_t){st.st_dev, st.st_ino} : (kv_sock_file_t){0};
}

int kv_sock_is_at(const char *path, kv_sock_file_t file)
{
	const kv_sock_file_t now = kv_sock_file(path);

	return now.ino != 0 && now.ino == file.ino && now.dev == file.dev;
}

static void attach_fds(struct msghdr *message, control_t *control, const int *fds, uint32_t count)
{
	size_t bytes = count * sizeof(int);
	struct cmsghdr *head;

	memset(control, 0, sizeof *control);
	message->msg_control = control;
	message->msg_controllen = CMSG_SPACE(bytes);
	head = CMSG_FIRSTHDR(message);
	head->cmsg_level = SOL_SOCKET;
	head->cmsg_type = SCM_RIGHTS;
	head->cmsg_len = CMSG_LEN(bytes);
	memcpy(CMSG_DATA(head), fds, bytes);
}

ssize_t kv_sock_send_message(int fd, const void *bytes, size_t len, int passed, int flags)
{
	control_t control;
	struct iovec part = {(void *)(uintptr_t)bytes, len};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

	if (passed >= 0) {
		attach_fds(&message, &control, &passed, 1);
	}

	return sendmsg(fd, &message, flags | MSG_NOSIGNAL);
}

static kv_status_t status_of_errno(int error)
{
	switch (error) {
	case EAGAIN:
#if EAGAIN != EWOULDBLOCK
	case EWOULDBLOCK:
#endif
	case ENOBUFS:
		return KV_PENDING;
	case EPIPE:
	case ECONNRESET:
	case ENOTCONN:
		return KV_ERR_CLOSED;
	case ENOMEM:
	case ETOOMANYREFS:
		return KV_ERR_BUSY;
	default:
		return KV_ERR_IO;
	}
}

int kv_sock_peer_runs_beside(int fd)
{
	struct ucred peer = {0};
	socklen_t len = sizeof peer;
	cpu_set_t ours, theirs;

	if (sched_getaffinity(0, sizeof ours, &ours) != 0 ||
	    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) != 0 || peer.pid <= 0 ||
	    sched_getaffinity(peer.pid, sizeof theirs, &theirs) != 0) {
		return sysconf(_SC_NPROCESSORS_ONLN) > 1;
	}
	CPU_OR(&ours, &ours, &theirs);

	return CPU_COUNT(&ours) > 1;
}

kv_status_t kv_sock_send(int fd, const kv_frame_header_t *header, const uint8_t *body, size_t offset, const int *fds,
			 size_t *p_sent)
{
	size_t total = sizeof *header + header->body;
	struct msghdr message = {0};
	struct iovec part[2];
	control_t control;
	size_t parts = 0;
	ssize_t n;

	if (offset >= total || header->fds > KV_WIRE_MAX_FDS || (header->body > 0 && !body)) {
		return KV_ERR_ARG;
	}
	if (offset == 0 && header->fds > 0 && !fds) {
		return KV_ERR_ARG;
	}
	if (offset < sizeof *header) {
		part[parts].iov_base = (uint8_t *)(uintptr_t)header + offset;
		part[parts++].iov_len = sizeof *header - offset;
	}
	if (header->body > 0) {
		size_t from = offset > sizeof *header ? offset - sizeof *header : 0;

		part[parts].iov_base = (uint8_t *)(uintptr_t)body + from;
		part[parts++].iov_len = header->body - from;
	}
	message.msg_iov = part;
	message.msg_iovlen = parts;
	if (offset == 0 && header->fds > 0) {
		attach_fds(&message, &control, fds, header->fds);
	}

	do {
		n = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
	} while (n < 0 && errno == EINTR);
	if (n < 0) {
		return status_of_errno(errno);
	}
	*p_sent = (size_t)n;

	return KV_OK;
}

/* Take every descriptor of one control message: into fds while there is room, closed otherwise. Returns how many there
 * were. */
static uint32_t take_fds(const struct cmsghdr *head, int fds[KV_WIRE_MAX_FDS], uint32_t have)
{
	uint32_t count = (uint32_t)((head->cmsg_len - CMSG_LEN(0)) / sizeof(int));

	for (uint32_t i = 0; i < count; i++) {
		int fd;

		memcpy(&fd, CMSG_DATA(head) + i * sizeof fd, sizeof fd);
		if (have + i < KV_WIRE_MAX_FDS) {
			fds[have + i] = fd;
		} else {
			close(fd);
		}
	}

	return count;
}

static void collect_control_data(struct msghdr *message, kv_sock_extra_t *extra)
{
	struct ucred sender;
	uint32_t count = 0;

	extra->sender = 0;
	for (struct cmsghdr *head = CMSG_FIRSTHDR(message); head; head = CMSG_NXTHDR(message, head)) {
		if (head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS) {
			count += take_fds(head, extra->fds, count);
		} else if (head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_CREDENTIALS) {
			memcpy(&sender, CMSG_DATA(head), sizeof sender);
			extra->sender = sender.pid;
		}
	}
	extra->fd_count = count;
	if (count <= KV_WIRE_MAX_FDS && !(message->msg_flags & MSG_CTRUNC)) {
		return;
	}
	for (uint32_t i = 0; i < count && i < KV_WIRE_MAX_FDS; i++) {
		close(extra->fds[i]);
	}
	extra->fd_count = UINT32_MAX;
}

kv_status_t kv_sock_ask_sender(int fd)
{
	const int on = 1;

	return setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0 ? KV_OK : KV_ERR_IO;
}

kv_status_t kv_sock_recv(int fd, uint8_t *out, size_t cap, size_t *p_len, int fds[KV_WIRE_MAX_FDS],
			 uint32_t *p_fd_count)
{
	kv_sock_extra_t extra = {.fd_count = 0};
	kv_status_t status = kv_sock_recv_from(fd, out, cap, p_len, &extra);

	if (status == KV_OK) {
		*p_fd_count = extra.fd_count;
		memcpy(fds, extra.fds, sizeof extra.fds);
	}

	return status;
}

kv_status_t kv_sock_recv_from(int fd, uint8_t *out, size_t cap, size_t *p_len, kv_sock_extra_t *extra)
{
	struct iovec part = {.iov_base = out, .iov_len = cap};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
	control_t control;
	ssize_t n;

	if (cap == 0) {
		return KV_ERR_ARG;
	}
	do {
		message.msg_control = &control;
		message.msg_controllen = sizeof control;
		n = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	} while (n < 0 && errno == EINTR);
	if (n < 0) {
		return status_of_errno(errno);
	}

	collect_control_data(&message, extra);
	if (n == 0) {
		return KV_ERR_CLOSED;
	}
	*p_len = (size_t)n;

	return KV_OK;
}
