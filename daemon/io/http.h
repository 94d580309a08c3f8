/* daemon/io/http.h -- /metrics (Prometheus), /healthz and /readyz in a thread of their own. Read-only, no
 * authentication: loopback unless the operator says otherwise. */
#ifndef KVD_IO_HTTP_H
#define KVD_IO_HTTP_H

#include "io/host.h"

typedef struct kvd_http kvd_http_t;

/* Connections that are slow to ask or to read keep no probe out: beyond http.connections the oldest makes room.
 * http.listen is host:port (IPv6 in brackets). KV_ERR_BUSY: the port is taken; KV_ERR_CONFIG: not an address;
 * those of kv/system.h. `detail` gets a sentence. */
kv_status_t kvd_http_open(const kvd_options_t *options, kv_metrics_t *metrics, const kvd_health_t *health,
			  kvd_http_t **p_http, char *detail, size_t cap);
/* NULL is fine. */
void kvd_http_close(kvd_http_t *http);

#endif
