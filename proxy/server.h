/* server.h -- the side of the clients, over libmicrohttpd, on the loop's thread.
 *
 * A connection whose request runs is suspended: libmicrohttpd does not look at it. Its socket is watched for the
 * client's end meanwhile, which ends the request and with it both of its calls.
 */
#ifndef KVP_SERVER_H
#define KVP_SERVER_H

#include "request.h"

typedef struct kvp_server kvp_server_t;

/* Listen. KV_ERR_CONFIG, KV_ERR_BUSY (the port is taken), KV_ERR_LIMIT, KV_ERR_NOMEM: `detail` says why. */
kv_status_t kvp_server_open(kvp_requests_t *requests, kvp_loop_t *loop, kvp_server_t **p_server, char *detail,
			    size_t cap);
/* Take no new connection. */
void kvp_server_quiesce(kvp_server_t *server);
/* Ends all requests. NULL is fine. */
void kvp_server_close(kvp_server_t *server);
/* Handle what is ready, and close connections that are late. */
void kvp_server_run(kvp_server_t *server, uint64_t now_ns);
/* Milliseconds until kvp_server_run() has something to do, at most `most`. */
int kvp_server_timeout_ms(kvp_server_t *server, int most);

#endif
