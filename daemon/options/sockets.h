/* daemon/options/sockets.h -- who may connect: the options sockets.group and sockets.mode, for each namespace. */
#ifndef KVD_SOCKETS_H
#define KVD_SOCKETS_H

#include "options.h"

#include <sys/types.h>

typedef struct kvd_access {
	mode_t mode;
	gid_t group; /* (gid_t)-1: the daemon's */
} kvd_access_t;

/* KV_ERR_CONFIG: a word is not name=mode or name=group of one of the namespaces, stands there twice, or there is no
 * such group; `why` gets the sentence. */
kv_status_t kvd_sockets_check(const kvd_options_t *options, char *why, size_t cap);

/* Of a namespace, by checked options. */
kvd_access_t kvd_sockets_access(const kvd_options_t *options, const char *ns);

/* Open a socket that only its owner can reach to those. Returns 0, or errno. */
int kvd_sockets_give(const char *path, const kvd_access_t *access);

#endif
