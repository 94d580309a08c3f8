/* daemon/io/sessions/space.h -- SPACE_OPEN: identity, layout, groups. */
#ifndef KVD_IO_SESSIONS_SPACE_H
#define KVD_IO_SESSIONS_SPACE_H

#include "io/sessions/request.h"

kv_status_t kvd_request_space_open(kvd_host_t *host, kvd_call_t *call);

#endif
