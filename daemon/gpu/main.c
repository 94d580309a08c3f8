/* kvd-gpu: the GPU program. The daemon starts it for memory of a GPU (daemon/io/base/gpu.c): it allocates, hands a
 * descriptor a slab over, and ends. What it gave lives on with the descriptors. docs/decisions/057. */
#include "gpu/source.h"
#include "kv/system.h"
#include "kv/sock.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define DEVICES  64u
#define SLABS    4096u
#define PAUSE_MS 10 /* the daemon has not taken the descriptors that are under way */

static char why_[512];

/* Blocks until there is room. 0: the daemon has gone. */
static int send_message(kvd_gpu_message_t *m, int fd)
{
	ssize_t n;

	m->version = KVD_GPU_WIRE;
	while ((n = kv_sock_send_message(KVD_GPU_FD, m, sizeof *m, fd, 0)) < 0 &&
	       (errno == EINTR || errno == ETOOMANYREFS)) {
		if (errno == ETOOMANYREFS) {
			(void)poll(NULL, 0, PAUSE_MS);
		}
	}

	return n == (ssize_t)sizeof *m;
}

static kv_status_t list_devices(void)
{
	static kvd_gpu_message_t devices[DEVICES];
	uint32_t count = 0;
	kv_status_t status = kvd_gpu_list_cuda(devices, DEVICES, &count, why_, sizeof why_);

	for (uint32_t i = 0; i < count && status == KV_OK; i++) {
		if (!send_message(&devices[i], -1)) {
			return KV_ERR_CLOSED;
		}
	}

	return status;
}

static kv_status_t give_slabs(const char *uuid, uint64_t bytes, uint64_t count)
{
	kvd_gpu_source_t source;
	kv_status_t status = kvd_gpu_is_fake(uuid) ? kvd_gpu_open_fake(uuid, &source)
						   : kvd_gpu_open_cuda(uuid, &source, why_, sizeof why_);

	for (uint64_t i = 0; i < count && status == KV_OK; i++) {
		kvd_gpu_message_t slab = {.verb = KVD_GPU_SLAB, .bytes = bytes};
		int fd = -1;

		status = source.alloc(source.device, bytes, &fd);
		if (status != KV_OK) {
			snprintf(why_, sizeof why_, "%s", source.why());
			break;
		}
		if (!send_message(&slab, fd)) {
			status = KV_ERR_CLOSED;
		}
		close(fd);
	}

	return status;
}

/* The driver's words may be anything. */
static void send_end(kv_status_t status)
{
	kvd_gpu_message_t end = {.verb = KVD_GPU_END, .status = status};

	if (status != KV_OK) {
		snprintf(end.text, sizeof end.text, "%.*s", (int)sizeof end.text - 1,
			 why_[0] ? why_ : kv_status_text(status));
	}
	for (char *at = end.text; *at; at++) {
		*at = (unsigned char)*at < 0x20 || (unsigned char)*at >= 0x7f ? ' ' : *at;
	}
	(void)send_message(&end, -1);
}

int main(int argc, char **argv)
{
	const struct rlimit none = {0, 0};
	const int is_list = argc == 2 && strcmp(argv[1], "list") == 0;
	const uint64_t bytes = argc == 4 ? strtoull(argv[2], NULL, 10) : 0;
	const uint64_t count = argc == 4 ? strtoull(argv[3], NULL, 10) : 0;
	int type = 0;
	socklen_t len = sizeof type;
	kv_status_t status;

	if (kv_version_asked(argc, argv, "kvd-gpu")) {
		return 0;
	}
	if ((!is_list && (bytes == 0 || count == 0 || count > SLABS)) ||
	    getsockopt(KVD_GPU_FD, SOL_SOCKET, SO_TYPE, &type, &len) != 0 || type != SOCK_SEQPACKET) {
		fprintf(stderr, "kvd-gpu: kvd starts this program for its GPU tier; it does nothing alone\n");
		return kv_status_exit_code(KV_ERR_ARG);
	}
	prctl(PR_SET_NAME, "kvd-gpu");
	prctl(PR_SET_PDEATHSIG, SIGKILL); /* also when the driver hangs, which an end of file would not end */
	(void)setrlimit(RLIMIT_CORE, &none);
	close(KVD_GPU_FD + 1); /* the program itself */
	signal(SIGPIPE, SIG_IGN);
	status = is_list ? list_devices() : give_slabs(argv[1], bytes, count);
	send_end(status);

	return kv_status_exit_code(status);
}
