/* kvctl peer-key: make the key that two daemons share. */
#include "kvctl.h"

#include "kv/env.h"
#include "kv/system.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define KEY_BYTES  ((size_t)32)
#define TEXT_BYTES (2 * KEY_BYTES + 2)

/* In hexadecimal digits and a newline, so that it can be looked at and copied as text. 0, or an errno. */
static int make_key(char text[TEXT_BYTES])
{
	uint8_t key[KEY_BYTES];
	const int error = kv_random_error();

	if (error) {
		return error;
	}
	kv_random(&kv_env_posix, key, sizeof key);
	for (size_t i = 0; i < sizeof key; i++) {
		snprintf(&text[2 * i], 3, "%02x", key[i]);
	}
	memcpy(&text[2 * KEY_BYTES], "\n", 2);
	explicit_bzero(key, sizeof key);

	return 0;
}

static int write_key(int fd, const char text[TEXT_BYTES])
{
	ssize_t n = write(fd, text, TEXT_BYTES - 1);

	return n < 0 ? errno : n != TEXT_BYTES - 1 ? ENOSPC : fsync(fd) != 0 ? errno : 0;
}

int kvctl_peer_key(const kvctl_t *ctl)
{
	const char *path = ctl->argc > 1 ? ctl->argv[1] : NULL;
	char text[TEXT_BYTES], why[KV_REFUSED_TEXT];
	int fd, error;

	if (!path) {
		return kvctl_error(ctl, KV_ERR_ARG, "peer-key: which file?");
	}
	error = make_key(text); /* before there is a file */
	if (error != 0) {
		return kvctl_error(ctl, kv_refused_status(error), "%s: no key: %s", path,
				   kv_refused_text("getrandom", error, why, sizeof why));
	}
	fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0) {
		return kvctl_error(ctl, errno == EEXIST ? KV_ERR_EXISTS : KV_ERR_PATH, "%s: %s", path, strerror(errno));
	}
	error = write_key(fd, text);
	explicit_bzero(text, sizeof text);
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
