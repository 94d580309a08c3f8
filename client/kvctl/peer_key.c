/* kvctl peer-key: make the key that two daemons share. */
#include "kvctl.h"

#include "kv/env.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define KEY_BYTES ((size_t)32)

/* In hexadecimal digits and a newline, so that it can be looked at and copied as text. 0, or an errno. */
static int write_key(int fd)
{
	uint8_t key[KEY_BYTES];
	char text[2 * KEY_BYTES + 2];
	ssize_t n;

	kv_random(&kv_env_posix, key, sizeof key);
	for (size_t i = 0; i < sizeof key; i++) {
		snprintf(&text[2 * i], 3, "%02x", key[i]);
	}
	text[2 * KEY_BYTES] = '\n';
	n = write(fd, text, 2 * KEY_BYTES + 1);
	explicit_bzero(key, sizeof key);
	explicit_bzero(text, sizeof text);

	return n < 0 ? errno : n != 2 * KEY_BYTES + 1 ? ENOSPC : fsync(fd) != 0 ? errno : 0;
}

int kvctl_peer_key(const kvctl_t *ctl)
{
	const char *path = ctl->argc > 1 ? ctl->argv[1] : NULL;
	int fd, error;

	if (!path) {
		return kvctl_error(ctl, KV_ERR_ARG, "peer-key: which file?");
	}
	fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0) {
		return kvctl_error(ctl, errno == EEXIST ? KV_ERR_EXISTS : KV_ERR_PATH, "%s: %s", path, strerror(errno));
	}
	error = write_key(fd);
	close(fd);
	if (error != 0) {
		unlink(path);
		return kvctl_error(ctl, KV_ERR_IO, "%s: %s", path, strerror(error));
	}
	if (ctl->json) {
		struct json_object *json = json_object_new_object();

		json_object_object_add(json, "file", json_object_new_string(path));
		kvctl_print_json(json);
		json_object_put(json);
	} else {
		printf("%s: a new key; copy it to the other node, for peers.keys of both daemons\n", path);
	}

	return 0;
}
