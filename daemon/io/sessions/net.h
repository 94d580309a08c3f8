/* daemon/io/sessions/net.h -- the daemon's end of its net process (kvd-net): started, watched, given orders, and never
 * waited for.
 *
 *   OFF --started--> RUNNING --it ends, or reports nothing for 10 s--> OFF, with a pause that grows
 *
 * While it is off peers are a miss: FETCH answers UNREACHABLE. What it does here it does as a member of the namespaces,
 * like any engine, so its end gives everything back (decision 046).
 */
#ifndef KVD_IO_NET_H
#define KVD_IO_NET_H

#include "io/sessions/request.h"

#include "kv/json.h"

#define KVD_NET_REASON_MAX 400u

/* Without peers in the configuration nothing is done. KV_ERR_PATH: the program is not there; KV_ERR_NOMEM. */
kv_status_t kvd_net_open(kvd_host_t *host, char *detail, size_t cap);
void kvd_net_close(kvd_host_t *host);
/* Start it when it is time to, end it when it is silent. Between two iterations. */
void kvd_net_step(kvd_host_t *host, uint64_t now_ns);

/* Options were read again: so are the keys. */
void kvd_net_reload(kvd_host_t *host);

/* What the daemons of other nodes call this one; "": it has no peers. */
const char *kvd_net_name(const kvd_host_t *host);
/* KV_PENDING: it is answered when the hand-over here has begun, or will not. */
kv_status_t kvd_request_fetch(kvd_host_t *host, kvd_call_t *call);
void kvd_net_json(const kvd_host_t *host, kv_json_t *json);
/* 1, and a sentence: transfers between nodes do not work, or not with all peers. */
int kvd_net_is_degraded(const kvd_host_t *host, char *out, size_t cap);

#endif
