/* In the place of kvd-gpu: what it does wrong stands in the file that GPU_FAULT names. Without the file it is the real
 * program (GPU_REAL). */
#include "gpu/wire.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

static uint64_t slab_bytes;

static int make_memory(uint64_t bytes, int seals)
{
	int fd = memfd_create("gpu-program", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0 || (seals && fcntl(fd, F_ADD_SEALS, seals) != 0)) {
		exit(70);
	}

	return fd;
}

static void send_bytes(const void *bytes, size_t n, const int *fds, size_t fd_count)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(4 * sizeof(int))];
	} control = {0};
	struct iovec part = {(void *)(uintptr_t)bytes, n};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

	if (fd_count > 0) {
		message.msg_control = control.bytes;
		message.msg_controllen = CMSG_SPACE(fd_count * sizeof(int));
		control.align.cmsg_level = SOL_SOCKET;
		control.align.cmsg_type = SCM_RIGHTS;
		control.align.cmsg_len = CMSG_LEN(fd_count * sizeof(int));
		memcpy(CMSG_DATA(&control.align), fds, fd_count * sizeof(int));
	}
	(void)sendmsg(KVD_GPU_FD, &message, MSG_NOSIGNAL);
}

static kvd_gpu_message_t slab_message(void)
{
	return (kvd_gpu_message_t){.version = KVD_GPU_WIRE, .verb = KVD_GPU_SLAB, .bytes = slab_bytes};
}

static void give_slabs(uint64_t count)
{
	const kvd_gpu_message_t slab = slab_message();

	for (uint64_t i = 0; i < count; i++) {
		int fd = make_memory(slab_bytes, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);

		send_bytes(&slab, sizeof slab, &fd, 1);
		close(fd);
	}
}

static void say_end(kv_status_t status, const char *text)
{
	kvd_gpu_message_t end = {.version = KVD_GPU_WIRE, .verb = KVD_GPU_END, .status = status};

	snprintf(end.text, sizeof end.text, "%s", text);
	send_bytes(&end, sizeof end, NULL, 0);
}

/* One message that is wrong in one way, as the real ones are otherwise. */
static void send_wrong(const char *how)
{
	kvd_gpu_message_t m = slab_message();
	int fds[2] = {make_memory(strcmp(how, "small") == 0 ? slab_bytes / 2 : slab_bytes,
				  strcmp(how, "unsealed") == 0 ? 0 : F_SEAL_SHRINK | F_SEAL_GROW),
		      -1};
	size_t n = sizeof m, fd_count = 1;
	char longer[sizeof m + 8u] = {0};

	fds[1] = fds[0];
	if (strcmp(how, "short") == 0) {
		n--;
	} else if (strcmp(how, "version") == 0) {
		m.version++;
	} else if (strcmp(how, "verb") == 0) {
		m.verb = 99;
	} else if (strcmp(how, "none") == 0) {
		fd_count = 0;
	} else if (strcmp(how, "two") == 0) {
		fd_count = 2;
	} else if (strcmp(how, "bytes") == 0) {
		m.bytes *= 2;
	} else if (strcmp(how, "device") == 0) {
		m.verb = KVD_GPU_DEVICE;
		snprintf(m.uuid, sizeof m.uuid, "GPU-1");
		fd_count = 0;
	} else if (strcmp(how, "text") == 0) {
		memset(m.text, '\n', sizeof m.text);
	}
	memcpy(longer, &m, sizeof m);
	send_bytes(longer, strcmp(how, "long") == 0 ? sizeof longer : n, fds, fd_count);
}

int main(int argc, char **argv)
{
	const char *path = getenv("GPU_FAULT"), *real = getenv("GPU_REAL");
	FILE *file = path ? fopen(path, "re") : NULL;
	uint64_t count = argc == 4 ? strtoull(argv[3], NULL, 10) : 0;
	char how[32] = "";

	if (!file && real) {
		execv(real, argv);
	}
	if (!file || fscanf(file, "%31s", how) != 1) {
		return 70;
	}
	fclose(file);
	prctl(PR_SET_NAME, "kvd-gpu");
	slab_bytes = argc == 4 ? strtoull(argv[2], NULL, 10) : 0;
	if (strcmp(how, "hang") == 0) { /* amid its work */
		give_slabs(1);
		pause();
	} else if (strcmp(how, "silent") == 0) { /* it ends and says nothing */
		give_slabs(1);
	} else if (strcmp(how, "less") == 0) {
		give_slabs(count / 2);
		say_end(KV_ERR_FULL, "the device has no more memory");
	} else if (strcmp(how, "lie") == 0) { /* it says that it gave all */
		give_slabs(count / 2);
		say_end(KV_OK, "");
	} else if (strcmp(how, "more") == 0) {
		give_slabs(count + 1);
	} else {
		send_wrong(how);
	}

	return 0;
}
