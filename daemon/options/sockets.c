/* Groups and modes of the sockets. */
#include "sockets.h"

#include "kv/types.h"

#include <errno.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MODE_USUAL 0660u
#define MODE_MOST  0666u

/* Octal; connecting needs write permission, and the daemon's own tools connect too. */
static int parse_mode(const char *text, kvd_access_t *access)
{
	char *end;
	unsigned long mode = strtoul(text, &end, 8);

	access->mode = (mode_t)mode;

	return text[0] >= '0' && text[0] <= '7' && *end == '\0' && (mode & ~(unsigned long)MODE_MOST) == 0 &&
	       (mode & 0600u) == 0600u;
}

/* A name, or a number. */
static int parse_group(const char *text, kvd_access_t *access)
{
	const struct group *group = getgrnam(text);
	char *end;
	unsigned long number;

	if (group) {
		access->group = group->gr_gid;
		return 1;
	}
	number = strtoul(text, &end, 10);
	access->group = (gid_t)number;

	return text[0] >= '0' && text[0] <= '9' && *end == '\0' && number < (gid_t)-1;
}

typedef struct kind {
	const char *name, *wanted;
	int (*parse)(const char *text, kvd_access_t *access);
	size_t list; /* of kvd_options_t */
} kind_t;

static const kind_t kinds[] = {
	{"sockets.mode", "a mode from 0600 to 0666", parse_mode, offsetof(kvd_options_t, sockets_mode)},
	{"sockets.group", "a group of this machine", parse_group, offsetof(kvd_options_t, sockets_group)},
};

typedef struct pair {
	char name[72], value[72]; /* what is longer is no namespace, no mode and no group */
} pair_t;

/* The n-th word of a list, "name=value". 0: there is none. */
static int pair_at(const char *list, uint32_t n, pair_t *pair)
{
	const char *word, *equals;
	size_t len = kvd_list_word(list, n, &word), name_len;

	if (len == 0) {
		return 0;
	}
	equals = memchr(word, '=', len);
	name_len = equals ? (size_t)(equals - word) : len;
	snprintf(pair->name, sizeof pair->name, "%.*s", (int)name_len, word);
	snprintf(pair->value, sizeof pair->value, "%.*s", equals ? (int)(len - name_len - 1) : 0, word + name_len + 1);

	return 1;
}

static int is_namespace(const kvd_options_t *options, const char *name)
{
	const char *word;
	size_t len;

	for (uint32_t i = 0; (len = kvd_list_word(options->namespaces, i, &word)) > 0; i++) {
		if (strlen(name) == len && memcmp(word, name, len) == 0) {
			return 1;
		}
	}

	return 0;
}

static const char *list_of(const kvd_options_t *options, const kind_t *kind)
{
	return (const char *)options + kind->list;
}

static kv_status_t check_kind(const kvd_options_t *options, const kind_t *kind, char *why, size_t cap)
{
	kvd_access_t access;
	pair_t pair, other;

	for (uint32_t i = 0; pair_at(list_of(options, kind), i, &pair); i++) {
		if (!is_namespace(options, pair.name) || !kind->parse(pair.value, &access)) {
			snprintf(why, cap, "%s: \"%s=%s\" is not one of the namespaces and %s", kind->name, pair.name,
				 pair.value, kind->wanted);
			return KV_ERR_CONFIG;
		}
		for (uint32_t j = 0; j < i && pair_at(list_of(options, kind), j, &other); j++) {
			if (strcmp(other.name, pair.name) == 0) {
				snprintf(why, cap, "%s: \"%s\" is there twice", kind->name, pair.name);
				return KV_ERR_CONFIG;
			}
		}
	}

	return KV_OK;
}

kv_status_t kvd_sockets_check(const kvd_options_t *options, char *why, size_t cap)
{
	kv_status_t status = KV_OK;

	for (size_t i = 0; i < KV_COUNT_OF(kinds) && status == KV_OK; i++) {
		status = check_kind(options, &kinds[i], why, cap);
	}

	return status;
}

kvd_access_t kvd_sockets_access(const kvd_options_t *options, const char *ns)
{
	kvd_access_t access = {MODE_USUAL, (gid_t)-1};
	pair_t pair;

	for (size_t i = 0; i < KV_COUNT_OF(kinds); i++) {
		for (uint32_t j = 0; pair_at(list_of(options, &kinds[i]), j, &pair); j++) {
			if (strcmp(pair.name, ns) == 0) {
				(void)kinds[i].parse(pair.value, &access);
			}
		}
	}

	return access;
}

int kvd_sockets_give(const char *path, const kvd_access_t *access)
{
	if (access->group != (gid_t)-1 && lchown(path, (uid_t)-1, access->group) != 0) {
		return errno;
	}

	return chmod(path, access->mode) == 0 ? 0 : errno;
}
