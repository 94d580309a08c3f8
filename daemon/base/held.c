/* What an earlier daemon had handed to the keeper. */
#include "held.h"

#include "kv/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct entry {
	char name[KVD_KEEPER_NAME];
	int fd; /* -1: claimed */
} entry_t;

struct kvd_held {
	kvd_keeper_queue_t *keeper; /* NULL: none is told */
	uint32_t count, cap;
	entry_t *entries;
};

static int add(kvd_held_t *held, int fd, const char *name)
{
	if (held->count == held->cap) {
		uint32_t cap = held->cap ? 2 * held->cap : 64;
		entry_t *more = realloc(held->entries, cap * sizeof *more);

		if (!more) {
			return 0;
		}
		held->entries = more;
		held->cap = cap;
	}
	held->entries[held->count].fd = fd;
	snprintf(held->entries[held->count++].name, KVD_KEEPER_NAME, "%s", name);

	return 1;
}

/* One line of the list. 0: no memory, and the descriptor is closed. */
static int take_line(kvd_held_t *held, char *line)
{
	char *name;
	int fd = (int)strtol(line, &name, 10);

	name[strcspn(name, "\n")] = '\0';
	name += *name == ' ';
	/* No program that we start may inherit it. A writer that cannot be watched is still one: its name stays. */
	if (fd <= STDERR_FILENO || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
		kv_log(KV_LOG_WARN, "main", "a kept descriptor is none: name %s error \"%s\"", name, strerror(errno));
		fd = -1;
	}
	if (held && add(held, fd, name)) {
		return 1;
	}
	if (fd >= 0) {
		close(fd);
	}

	return 0;
}

kv_status_t kvd_held_open(int list_fd, kvd_keeper_queue_t *keeper, kvd_held_t **p_held)
{
	char line[KVD_KEEPER_NAME + 16];
	kvd_held_t *held;
	FILE *list;
	int whole;

	*p_held = NULL;
	if (list_fd < 0) {
		return KV_OK;
	}
	list = fdopen(list_fd, "r");
	if (!list) {
		close(list_fd);
		return KV_ERR_NOMEM;
	}
	held = calloc(1, sizeof *held);
	whole = held != NULL;
	rewind(list);
	while (fgets(line, sizeof line, list)) {
		whole &= take_line(held, line);
	}
	whole &= !ferror(list);
	fclose(list);
	if (!whole) {
		kvd_held_close(held, 0);
		return KV_ERR_NOMEM;
	}
	held->keeper = keeper;
	*p_held = held;

	return KV_OK;
}

const char *kvd_held_name(const kvd_held_t *held, uint32_t i)
{
	return held && i < held->count ? held->entries[i].name : NULL;
}

int kvd_held_claim(kvd_held_t *held, const char *name)
{
	for (uint32_t i = 0; held && i < held->count; i++) {
		int fd = held->entries[i].fd;

		if (fd >= 0 && strcmp(held->entries[i].name, name) == 0) {
			held->entries[i].fd = -1;
			return fd;
		}
	}

	return -1;
}

void kvd_held_close(kvd_held_t *held, int drop)
{
	for (uint32_t i = 0; held && i < held->count; i++) {
		if (held->entries[i].fd >= 0) {
			close(held->entries[i].fd);
			if (drop) {
				kvd_keeper_drop(held->keeper, held->entries[i].name);
			}
		}
	}
	if (held) {
		free(held->entries);
		free(held);
	}
}
