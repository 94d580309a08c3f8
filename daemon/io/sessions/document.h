/* daemon/io/sessions/document.h -- STATUS, STATS, CHECK and CONFIG as JSON. */
#ifndef KVD_IO_SESSIONS_DOCUMENT_H
#define KVD_IO_SESSIONS_DOCUMENT_H

#include "io/sessions/request.h"

kv_status_t kvd_request_document(kvd_host_t *host, kvd_call_t *call);

#endif
