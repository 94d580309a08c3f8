/* Frames by hand. */
#include "daemon/raw.h"

#include "kv/sock.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#define BUFFER (4u << 20)

int raw_reply_fds[KV_WIRE_MAX_FDS];
uint32_t raw_reply_fd_count;

static uint8_t frame_bytes[BUFFER];

/* Notices that came while a reply was waited for, by connection. */
static struct kept {
	int fd;
	uint16_t code;
	uint32_t len;
	int fds[KV_WIRE_MAX_FDS];
	uint8_t body[512];
} kept[256];
static size_t kept_count;

int raw_connect(const char *path)
{
	int fd = -1, error = 0;

	assert_int_equal(kv_sock_connect(path, &fd, &error), KV_OK);
	kept_count = 0;

	return fd;
}

int raw_bytes_fds(int fd, const void *data, size_t len, const int *fds, uint32_t count)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(16 * sizeof(int))];
	} control = {0};
	const uint8_t *at = data;

	while (len > 0) {
		struct iovec part = {(void *)(uintptr_t)at, len};
		struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
		ssize_t n;

		if (count > 0) {
			message.msg_control = control.bytes;
			message.msg_controllen = CMSG_SPACE(count * sizeof(int));
			control.align.cmsg_level = SOL_SOCKET;
			control.align.cmsg_type = SCM_RIGHTS;
			control.align.cmsg_len = CMSG_LEN(count * sizeof(int));
			memcpy(CMSG_DATA(&control.align), fds, count * sizeof(int));
		}
		n = sendmsg(fd, &message, MSG_NOSIGNAL);
		if (n < 0 && errno == EAGAIN) {
			struct pollfd look = {.fd = fd, .events = POLLOUT};

			assert_int_equal(poll(&look, 1, RAW_TIMEOUT_MS), 1);
			continue;
		}
		if (n < 0) {
			return 0;
		}
		count = 0;
		at += n;
		len -= (size_t)n;
	}

	return 1;
}

int raw_bytes(int fd, const void *data, size_t len)
{
	return raw_bytes_fds(fd, data, len, NULL, 0);
}

void raw_send(int fd, uint16_t code, uint64_t id, const void *msg, const int *fds, uint32_t fd_count)
{
	static uint8_t bytes[BUFFER];
	kv_frame_header_t header = {.magic = KV_WIRE_MAGIC,
				    .version = KV_WIRE_VERSION,
				    .kind = KV_FRAME_REQUEST,
				    .code = code,
				    .fds = (uint16_t)fd_count,
				    .id = id};

	if (msg) {
		assert_int_equal(kv_body_encode(&kv_request_find(code)->ask, msg, bytes + sizeof header,
						sizeof bytes - sizeof header, &header.body),
				 KV_OK);
	}
	memcpy(bytes, &header, sizeof header);
	raw_bytes_fds(fd, bytes, sizeof header + header.body, fds, fd_count);
}

/* n bytes, or fewer at the end of file or of the time. */
static size_t read_bytes(int fd, uint8_t *out, size_t n, int timeout_ms, raw_frame_t *frame)
{
	size_t have = 0;

	while (have < n) {
		struct pollfd look = {.fd = fd, .events = POLLIN};
		size_t len = 0;
		int fds[KV_WIRE_MAX_FDS];
		uint32_t count = 0;

		if (poll(&look, 1, timeout_ms) != 1 ||
		    kv_sock_recv(fd, out + have, n - have, &len, fds, &count) != KV_OK) {
			break;
		}
		for (uint32_t i = 0; i < count; i++) {
			frame->fds[frame->fd_count++] = fds[i];
		}
		have += len;
	}

	return have;
}

int raw_recv(int fd, int timeout_ms, raw_frame_t *frame)
{
	memset(frame, 0, sizeof *frame);
	frame->body = frame_bytes;
	if (read_bytes(fd, (uint8_t *)&frame->header, sizeof frame->header, timeout_ms, frame) < sizeof frame->header) {
		return 0;
	}
	assert_int_equal(frame->header.magic, KV_WIRE_MAGIC);
	assert_true(frame->header.body <= BUFFER);
	assert_int_equal(read_bytes(fd, frame->body, frame->header.body, RAW_TIMEOUT_MS, frame), frame->header.body);
	assert_int_equal(frame->fd_count, frame->header.fds);

	return 1;
}

int raw_closed(int fd, int timeout_ms)
{
	struct pollfd look = {.fd = fd, .events = POLLIN};
	uint8_t byte;
	ssize_t n;

	if (poll(&look, 1, timeout_ms) != 1) {
		return 0;
	}
	n = recv(fd, &byte, 1, MSG_DONTWAIT);

	return n == 0 || (n < 0 && errno == ECONNRESET);
}

static void keep_notice(int fd, const raw_frame_t *frame)
{
	struct kept *k = &kept[kept_count++];

	assert_true(kept_count <= KV_COUNT_OF(kept) && frame->header.body <= sizeof k->body);
	k->fd = fd;
	k->code = frame->header.code;
	k->len = frame->header.body;
	memcpy(k->body, frame->body, k->len);
	memcpy(k->fds, frame->fds, sizeof k->fds);
}

kv_status_t raw_call(int fd, uint16_t code, const void *msg, void *reply)
{
	return raw_call_with(fd, code, msg, -1, reply);
}

kv_status_t raw_call_with(int fd, uint16_t code, const void *msg, int sent_fd, void *reply)
{
	static uint64_t next_id;
	static kv_msg_t ignored;
	uint64_t id = ++next_id;
	raw_frame_t frame;

	raw_send(fd, code, id, msg, &sent_fd, sent_fd >= 0);
	do {
		if (!raw_recv(fd, RAW_TIMEOUT_MS, &frame)) {
			return KV_ERR_CLOSED;
		}
		if (frame.header.kind == KV_FRAME_NOTICE) {
			keep_notice(fd, &frame);
		}
	} while (frame.header.kind == KV_FRAME_NOTICE);
	assert_int_equal(frame.header.id, id);
	assert_int_equal(frame.header.code, code);
	memcpy(raw_reply_fds, frame.fds, sizeof frame.fds);
	raw_reply_fd_count = frame.fd_count;
	if (frame.header.status != KV_OK) {
		kv_slice_t detail;
		assert_int_equal(kv_error_decode(frame.body, frame.header.body, &detail), KV_OK);
		return (kv_status_t)frame.header.status;
	}
	assert_int_equal(kv_body_decode(&kv_request_find(code)->reply, frame.body, frame.header.body,
					reply ? reply : &ignored, NULL),
			 KV_OK);

	return KV_OK;
}

int raw_notice_any(int fd, uint16_t code, int timeout_ms, void *msg, int fds[KV_WIRE_MAX_FDS])
{
	raw_frame_t frame;

	for (;;) {
		for (size_t i = 0; i < kept_count; i++) {
			if (kept[i].fd == fd && kept[i].code == code) {
				assert_int_equal(kv_body_decode(&kv_request_find(code)->ask, kept[i].body, kept[i].len,
								msg, NULL),
						 KV_OK);
				memcpy(fds, kept[i].fds, sizeof kept[i].fds);
				memmove(&kept[i], &kept[i + 1], (--kept_count - i) * sizeof kept[0]);
				return 1;
			}
		}
		if (!raw_recv(fd, timeout_ms, &frame)) {
			return 0;
		}
		assert_int_equal(frame.header.kind, KV_FRAME_NOTICE);
		keep_notice(fd, &frame);
	}
}

int raw_notice(int fd, uint16_t code, int timeout_ms, void *msg)
{
	int fds[KV_WIRE_MAX_FDS];

	return raw_notice_any(fd, code, timeout_ms, msg, fds);
}

kv_status_t raw_hello(int fd)
{
	const kv_msg_hello_t ask = {.version = KV_WIRE_VERSION, .program = kv_slice_str("raw")};
	kv_msg_hello_reply_t reply;
	kv_status_t status = raw_call(fd, KV_CODE_HELLO, &ask, &reply);

	if (status == KV_OK) {
		assert_true(reply.incarnation != 0);
		assert_int_equal(reply.version, KV_WIRE_VERSION);
	}

	return status;
}

int raw_open(const char *path)
{
	int fd = raw_connect(path);

	assert_int_equal(raw_hello(fd), KV_OK);

	return fd;
}

uint64_t raw_metric(int fd, const char *name)
{
	const kv_msg_stats_t ask = {0};
	kv_msg_stats_reply_t reply;
	char key[96], *at;
	static char text[KV_MAX_JSON + 1];

	assert_int_equal(raw_call(fd, KV_CODE_STATS, &ask, &reply), KV_OK);
	memcpy(text, reply.json.data, reply.json.len);
	text[reply.json.len] = '\0';
	snprintf(key, sizeof key, "\"%s\":", name);
	at = strstr(text, key);
	assert_non_null(at);

	return strtoull(at + strlen(key), NULL, 10);
}

int raw_metric_reaches(int fd, const char *name, uint64_t value)
{
	for (int i = 0; i < RAW_TIMEOUT_MS / 5; i++) {
		if (raw_metric(fd, name) >= value) {
			return 1;
		}
		usleep(5000);
	}

	return 0;
}
