/* inproc/error.h -- why the last call on this thread was refused: kvx_last_error(). */
#ifndef KVX_INPROC_ERROR_H
#define KVX_INPROC_ERROR_H

#include "kvx.h"

/* Keep the sentence. Returns KVC_ERR_ARG. */
kvc_status_t kvx_refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
