/* host.h -- a host in this process, without keeper, publisher and HTTP: what is tested is what its loop does with
 * connections. */
#ifndef TEST_HOST_H
#define TEST_HOST_H

#include "io/loop.h"
#include "io/sessions/receive.h"
#include "io/world.h"

/* Namespaces as in the option, in this order. One host a process, for its life. Anything that fails ends the
 * process. */
kvd_host_t *host_make(const kv_env_t *env, const char *namespaces);

#endif
