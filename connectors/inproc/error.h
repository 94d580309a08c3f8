/* inproc/error.h -- why the last call on this thread was refused: kvx_last_error(). */
#ifndef KVX_INPROC_ERROR_H
#define KVX_INPROC_ERROR_H

#include "kvx.h"

/* Keep the sentence. Returns KVC_ERR_ARG. */
kvc_status_t kvx_refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Fill the result of a caller of `call`, who may want none (NULL). 0: its struct_size is not set, which is kept. */
int kvx_fill_result(const char *call, void *out, const void *full, size_t size);

#endif
