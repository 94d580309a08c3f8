/* Loop device, throttle and fio for the disk benches. */
#include "nvme_disk.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static int shell(const char *format, ...) __attribute__((format(printf, 1, 2)));

static int shell(const char *format, ...)
{
	char command[1024];
	va_list args;

	va_start(args, format);
	vsnprintf(command, sizeof command, format, args);
	va_end(args);

	return system(command);
}

/* 0, or -1. */
static int write_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	ssize_t n = fd >= 0 ? write(fd, text, strlen(text)) : -1;

	if (fd >= 0) {
		close(fd);
	}

	return n == (ssize_t)strlen(text) ? 0 : -1;
}

/* First line of a command's output. */
static int read_line(const char *command, char *out, size_t cap)
{
	FILE *pipe = popen(command, "re");
	int good = pipe && fgets(out, (int)cap, pipe) != NULL;

	if (pipe) {
		pclose(pipe);
	}
	if (good) {
		out[strcspn(out, "\n")] = '\0';
	}

	return good ? 0 : -1;
}

static int put_limit(const char *group, const char *file, dev_t device, const char *format, uint64_t a, uint64_t b)
{
	char path[512];
	char text[256];
	int n = snprintf(text, sizeof text, "%u:%u ", major(device), minor(device));

	snprintf(text + n, sizeof text - (size_t)n, format, (unsigned long long)a, (unsigned long long)b);
	snprintf(path, sizeof path, "%s/%s", group, file);

	return write_text(path, text);
}

static int enter_group(const char *group)
{
	char path[512];
	char pid[32];

	snprintf(path, sizeof path, "%s/cgroup.procs", group);
	snprintf(pid, sizeof pid, "%d", (int)getpid());

	return write_text(path, pid);
}

/* Version 1 of the block controller, else version 2. */
static const char *throttle(bench_disk_t *disk, dev_t device, uint64_t read_bps, uint64_t write_bps)
{
	int v1 = access("/sys/fs/cgroup/blkio/cgroup.procs", W_OK) == 0;
	int result;

	snprintf(disk->cgroup, sizeof disk->cgroup, "%s/kvd-bench-%d", v1 ? "/sys/fs/cgroup/blkio" : "/sys/fs/cgroup",
		 (int)getpid());
	if (mkdir(disk->cgroup, 0755) != 0) {
		disk->cgroup[0] = '\0';
		return "no control group can be made";
	}
	if (v1) {
		result = put_limit(disk->cgroup, "blkio.throttle.read_bps_device", device, "%llu", read_bps, 0);
		result |= put_limit(disk->cgroup, "blkio.throttle.write_bps_device", device, "%llu", write_bps, 0);
	} else {
		write_text("/sys/fs/cgroup/cgroup.subtree_control", "+io");
		result = put_limit(disk->cgroup, "io.max", device, "rbps=%llu wbps=%llu", read_bps, write_bps);
	}
	if (result != 0 || enter_group(disk->cgroup) != 0) {
		return "the block controller takes no limit for the loop device";
	}

	return NULL;
}

const char *bench_disk_loop(bench_disk_t *disk, uint64_t bytes, uint64_t read_bps, uint64_t write_bps)
{
	char command[512];
	struct stat st;

	memset(disk, 0, sizeof *disk);
	if (geteuid() != 0) {
		return "a throttled loop device needs root";
	}
	snprintf(disk->image, sizeof disk->image, "/dev/shm/kvd-bench-%d.img", (int)getpid());
	snprintf(disk->dir, sizeof disk->dir, "/tmp/kvd-bench-XXXXXX");
	if (!mkdtemp(disk->dir)) {
		disk->dir[0] = '\0';
		return "no temporary directory";
	}
	if (shell("dd if=/dev/zero of=%s bs=1M count=%llu status=none && mkfs.ext4 -q -O ^has_journal %s", disk->image,
		  (unsigned long long)(bytes >> 20), disk->image) != 0) {
		return "no memory for the image, or no mkfs.ext4";
	}
	snprintf(command, sizeof command, "losetup -f --show %s 2>/dev/null", disk->image);
	if (read_line(command, disk->loop, sizeof disk->loop) != 0 || stat(disk->loop, &st) != 0) {
		disk->loop[0] = '\0';
		return "no loop device";
	}
	if (mount(disk->loop, disk->dir, "ext4", 0, NULL) != 0) {
		return "the loop device cannot be mounted";
	}
	disk->mounted = 1;

	return throttle(disk, st.st_rdev, read_bps, write_bps);
}

const char *bench_disk_real(bench_disk_t *disk, const char *base)
{
	memset(disk, 0, sizeof *disk);
	snprintf(disk->dir, sizeof disk->dir, "%s/kvd-bench-XXXXXX", base);
	if (!mkdtemp(disk->dir)) {
		disk->dir[0] = '\0';
		return "the directory cannot be written";
	}

	return NULL;
}

void bench_disk_fini(bench_disk_t *disk)
{
	if (disk->cgroup[0]) {
		char root[256];

		snprintf(root, sizeof root, "%.*s", (int)(strrchr(disk->cgroup, '/') - disk->cgroup), disk->cgroup);
		enter_group(root);
		rmdir(disk->cgroup);
	}
	if (disk->mounted) {
		umount2(disk->dir, MNT_DETACH);
	} else if (disk->dir[0]) {
		shell("rm -rf -- '%s'", disk->dir);
	}
	if (disk->loop[0]) {
		shell("losetup -d %s", disk->loop);
	}
	if (disk->image[0]) {
		unlink(disk->image);
	}
	if (disk->dir[0]) {
		rmdir(disk->dir);
	}
}

/* fio's terse output, version 3: one line of fields separated by semicolons. */
static double field(const char *line, unsigned index)
{
	while (index > 0 && line) {
		line = strchr(line, ';');
		line = line ? line + 1 : NULL;
		index--;
	}

	return line ? strtod(line, NULL) : 0;
}

double bench_disk_fio(const bench_disk_t *disk, int write, uint64_t bytes, double seconds, double *p_cpu_ns)
{
	char command[1024];
	char line[4096];
	double kib;
	double ms;

	snprintf(command, sizeof command,
		 "fio --name=reference --filename=%s/fio.dat --size=%llu --rw=%s --bs=256k --iodepth=32 "
		 "--ioengine=io_uring --direct=1 "
		 "--time_based --runtime=%.1f --randrepeat=1 --norandommap --output-format=terse --terse-version=3 "
		 "2>/dev/null",
		 disk->dir, (unsigned long long)bytes, write ? "randwrite" : "randread", seconds);
	if (read_line(command, line, sizeof line) != 0) {
		return 0;
	}

	kib = field(line, write ? 47 : 6); /* bandwidth, KiB/s */
	ms = field(line, write ? 49 : 8);  /* run time */
	/* user and system CPU, in percent of the run time */
	*p_cpu_ns = (field(line, 87) + field(line, 88)) / 100.0 * ms * 1e6;

	return kib * 1024.0;
}
