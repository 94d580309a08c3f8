/* server.h -- the side of the clients: their connections, HTTP/1.1 on them, on the loop's thread.
 *
 *   HEAD -> (BODY) -> RUN -> ANSWER -> HEAD ...
 *                              `-> LINGER: our side has ended; what the client still sends is read and dropped, so that
 *                                  it gets the answer and no reset (RFC 9112, 9.6)
 *
 * While a request runs, its client's socket is not read, and watched for its end alone, which ends the request and with
 * it both of its calls. A client that has ended its own side has left.
 */
#ifndef KVP_SERVER_H
#define KVP_SERVER_H

#include "request.h"

typedef struct kvp_server kvp_server_t;

/* Listen. KV_ERR_CONFIG, KV_ERR_BUSY (the port is taken), KV_ERR_LIMIT, KV_ERR_NOMEM: `detail` says why. */
kv_status_t kvp_server_open(kvp_requests_t *requests, kvp_loop_t *loop, kvp_server_t **p_server, char *detail,
			    size_t cap);
/* Take no new connection, and no new request on those that are there. */
void kvp_server_quiesce(kvp_server_t *server);
/* Ends all requests. NULL is fine. */
void kvp_server_close(kvp_server_t *server);
/* Go on where an answer has come, and close connections that are late. */
void kvp_server_run(kvp_server_t *server, uint64_t now_ns);
/* Milliseconds until kvp_server_run() has something to do, at most `most`. */
int kvp_server_timeout_ms(kvp_server_t *server, int most);

#endif
