/* Control groups. */
#include "kv/system.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int kv_read_text(const char *path, char *out, uint32_t cap)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd >= 0 ? read(fd, out, cap - 1u) : -1;

	if (fd >= 0) {
		close(fd);
	}
	out[n > 0 ? n : 0] = '\0';

	return n > 0;
}

uint64_t kv_read_number(const char *dir, const char *name)
{
	char path[KV_CGROUP_PATH + 128], text[64], *end;
	unsigned long long value;

	snprintf(path, sizeof path, "%s/%s", dir, name);
	if (!kv_read_text(path, text, sizeof text)) {
		return UINT64_MAX;
	}
	value = strtoull(text, &end, 10);

	return end == text ? UINT64_MAX : value;
}

typedef struct walk {
	kv_cgroup_fn visit;
	void *ctx;
	int version;
} walk_t;

static void walk_up(const walk_t *walk, const char *root, const char *path)
{
	char dir[KV_CGROUP_PATH];
	int n = snprintf(dir, sizeof dir, "%s%s", root, path);
	const size_t root_len = strlen(root);

	if (n < 0 || (size_t)n >= sizeof dir) {
		return;
	}
	for (;;) {
		char *slash;

		walk->visit(walk->ctx, walk->version, dir, dir[root_len] ? dir + root_len : "/");
		slash = strrchr(dir + root_len, '/');
		if (!slash) {
			return;
		}
		*slash = '\0';
	}
}

/* Is the controller in a list like "cpu,cpuacct"? */
static int is_listed(const char *list, const char *controller)
{
	const size_t len = strlen(controller);

	for (const char *at = list; *at; at += *at == ',') {
		const size_t n = strcspn(at, ",");

		if (n == len && strncmp(at, controller, n) == 0) {
			return 1;
		}
		at += n;
	}

	return 0;
}

/* Lines are ID:CONTROLLERS:PATH; version 2 has no controllers. */
void kv_cgroup_walk(const char *controller, kv_cgroup_fn visit, void *ctx)
{
	char text[16384], root[64], *rest;

	if (!kv_read_text("/proc/self/cgroup", text, sizeof text)) {
		return;
	}
	for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
		char *list = strchr(line, ':'), *path = list ? strchr(list + 1, ':') : NULL;

		if (!path) {
			continue;
		}
		*path++ = '\0';
		if (list[1] == '\0') {
			walk_up(&(walk_t){visit, ctx, 2}, "/sys/fs/cgroup", path);
		} else if (is_listed(list + 1, controller)) {
			snprintf(root, sizeof root, "/sys/fs/cgroup/%s", list + 1);
			walk_up(&(walk_t){visit, ctx, 1}, root, path);
		}
	}
}
