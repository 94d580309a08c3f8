/* A connection's whole life against a real host and core: whatever bytes come, in whatever pieces, with whatever
 * descriptors, the daemon goes on and keeps nothing of it.
 *
 * Byte 0: bit 0 says HELLO first, bit 1 joins too, bit 2 opens a space. Then pieces: a length byte (0: 256; bit 7 set
 * on the next byte sends a descriptor along), then that many bytes. A piece whose second byte is 0x40 is a request
 * frame made around the rest: code, then its body.
 */
#include "daemon/host.h"

#include "io/sessions/join.h"
#include "io/members/mirror.h"
#include "io/members/reports.h"
#include "io/members/slabs.h"
#include "kvs/pool.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static kvd_host_t *host_;
static int null_, self_;

static void host_open(void)
{
	host_ = host_make(&kv_env_posix, "fuzz");
	null_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
	self_ = (int)syscall(SYS_pidfd_open, getpid(), 0);
	kv_assert(null_ >= 0 && self_ >= 0);
	while (kvd_mirror_touch(host_->namespaces) == KV_PENDING) {
		usleep(100); /* or a JOIN would wait for a thread, and no input is like another */
	}
	kv_assert(host_->namespaces->mirror.touched);
}

/* A quantum of the only session, as if epoll had named it. */
static void serve(void)
{
	kvd_fair_add(&host_->fair, &host_->sessions->source, 0, 0);
	kvd_fair_serve(&host_->fair, host_, host_->env);
}

/* One iteration of the loop for the only session, and throw away what it has sent. */
static void run_iteration(int peer)
{
	static uint8_t bytes[65536];
	int fds[KV_WIRE_MAX_FDS];
	uint32_t count;
	size_t len;

	for (int i = 0; i < 64 && host_->sessions && !host_->sessions->doomed; i++) {
		uint64_t before = host_->sessions->requests;
		serve();
		kvd_core_tick(host_->core);
		kvd_slabs_announce(host_);
		if (!host_->sessions || (host_->sessions->requests == before && !host_->sessions->backlog)) {
			break;
		}
	}
	kvd_fair_serve(&host_->fair, host_, host_->env);
	(void)kvd_reports_drain(host_);
	(void)kvd_members_reap(host_);
	while (kv_sock_recv(peer, bytes, sizeof bytes, &len, fds, &count) == KV_OK) {
		for (uint32_t i = 0; i < count && count <= KV_WIRE_MAX_FDS; i++) {
			close(fds[i]);
		}
	}
}

static void send_piece(int peer, const void *data, size_t len, int fd)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct iovec part = {(void *)(uintptr_t)data, len};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

	if (fd >= 0) {
		message.msg_control = control.bytes;
		message.msg_controllen = sizeof control.bytes;
		control.align.cmsg_level = SOL_SOCKET;
		control.align.cmsg_type = SCM_RIGHTS;
		control.align.cmsg_len = CMSG_LEN(sizeof fd);
		memcpy(CMSG_DATA(&control.align), &fd, sizeof fd);
	}
	(void)!sendmsg(peer, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
	run_iteration(peer);
}

static void request(int peer, uint16_t code, const void *msg, int fd)
{
	uint8_t bytes[2048];
	kv_frame_header_t header = {.magic = KV_WIRE_MAGIC, .version = KV_WIRE_VERSION, .code = code, .fds = fd >= 0};

	kv_assert(kv_body_encode(&kv_request_find(code)->ask, msg, bytes + sizeof header, sizeof bytes - sizeof header,
				 &header.body) == KV_OK);
	memcpy(bytes, &header, sizeof header);
	send_piece(peer, bytes, sizeof header + header.body, fd);
}

static void prepare(int peer, uint8_t how)
{
	static const char identity[] = "model=m\nweights=w\ndtype=f32\nquantization=none\nrope=none\nlora=none\nhash="
				       "kv1\nhash_tokens=16\ngroups=0:full:16\n"
				       "layout=kvk1 heads%3D2 layers%3D2 tokens%3D16 k%3D16 v%3D16 dtype%3Df32 "
				       "inner%3Dsplit page%3D0\npage_format=plain\n";
	static const char layout[] = "kvk1 heads=2 layers=2 tokens=16 k=16 v=16 dtype=f32 inner=split page=0";
	const kv_msg_hello_t hello = {.version = KV_WIRE_VERSION, .program = kv_slice_str("fuzz")};
	const kv_msg_join_t join = {.instance = kv_slice_str("i"),
				    .secret = kv_slice_str("0123456789abcdef"),
				    .role = 2,
				    .staging_words = 1024};
	const kv_msg_space_open_t space = {.identity = kv_slice_str(identity), .layout = kv_slice_str(layout)};

	if (how & 1) {
		request(peer, KV_CODE_HELLO, &hello, -1);
	}
	if (how & 2) {
		request(peer, KV_CODE_JOIN, &join, self_);
	}
	if (how & 4) {
		request(peer, KV_CODE_SPACE_OPEN, &space, -1);
	}
}

static void framed(int peer, const uint8_t *data, size_t len, int fd)
{
	uint8_t bytes[sizeof(kv_frame_header_t) + 256];
	kv_frame_header_t header = {.magic = KV_WIRE_MAGIC,
				    .version = KV_WIRE_VERSION,
				    .code = data[0],
				    .fds = fd >= 0,
				    .body = (uint32_t)len - 1};

	memcpy(bytes, &header, sizeof header);
	memcpy(bytes + sizeof header, data + 1, len - 1);
	send_piece(peer, bytes, sizeof header + len - 1, fd);
}

/* The process behind a member does not die here: end it by hand, as its pidfd would. */
static void bury(void)
{
	for (uint32_t i = 0; i < KVD_MEMBER_BUCKETS; i++) {
		while (host_->members[i]) {
			kvd_source_t *pidfd = (kvd_source_t *)host_->members[i];
			pidfd->ready(host_, pidfd, 0);
		}
	}
	while (kvd_members_reap(host_)) {
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	int pair[2];
	kvs_usage_t usage;
	uint32_t failed = 0;

	if (!host_) {
		host_open();
	}
	if (size < 2 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
		return 0;
	}
	kvd_session_open(host_, host_->namespaces, pair[0]);
	prepare(pair[1], data[0]);
	for (size_t at = 1; at + 2 < size && host_->sessions;) {
		size_t len = data[at] ? data[at] : 256, left = size - at - 2;
		uint8_t kind = data[at + 1];
		int fd = kind & 0x80 ? (kind & 1 ? self_ : null_) : -1;

		len = len < left ? len : left;
		if (kind & 0x40) {
			framed(pair[1], data + at + 2, len, fd);
		} else {
			send_piece(pair[1], data + at + 2, len, fd);
		}
		at += 2 + len;
	}
	close(pair[1]);
	for (int i = 0; i < 1000 && host_->sessions; i++) {
		serve();
	}
	bury();
	kv_assert(host_->session_count == 0 && host_->receive_bytes == 0 && !host_->instances);
	kvs_usage(host_->cpu, &usage);
	kv_assert(usage.free_slots + usage.used_slots + usage.quarantined_slots == usage.slots);

	kvd_core_check_json(host_->core, host_->text, KVD_TEXT_SCRATCH, &failed);
	if (failed > 0) {
		fprintf(stderr, "%s\n", host_->text);
		abort();
	}

	return 0;
}
