/* gpu_load.h -- reading a file as fast as it goes: what the disk tier is measured against (gpu_load_raw.c). */
#ifndef GPU_LOAD_H
#define GPU_LOAD_H

#include <stddef.h>
#include <stdint.h>

typedef struct load_raw load_raw_t;

/* A file of `bytes`, a multiple of `request`, in a directory; its name is removed. NULL, or why there is no raw reading
 * there; load_raw_close() follows in any case. */
const char *load_raw_open(const char *dir, uint64_t bytes, size_t request, uint32_t depth, load_raw_t **p_raw);
/* Seconds that reading all of it took; 0, after a sentence: it failed. */
double load_raw_read(load_raw_t *raw);
void load_raw_close(load_raw_t *raw);

#endif
