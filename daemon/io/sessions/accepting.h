/* daemon/io/sessions/accepting.h -- accept, while there are descriptors. */
#ifndef KVD_IO_SESSIONS_ACCEPTING_H
#define KVD_IO_SESSIONS_ACCEPTING_H

#include "io/host.h"

/* Hold descriptors back for operators, as many as there is room for. */
void kvd_accepting_fill_spares(kvd_host_t *host);
/* accept() has failed for want of descriptors: no namespace accepts for a while. `error`: its errno. */
void kvd_accepting_pause(kvd_host_t *host, int error);
/* Descriptors may be there again: accept goes on. */
void kvd_accepting_resume(kvd_host_t *host);

#endif
