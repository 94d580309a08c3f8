/* gpu_load.h -- reading a file as fast as it goes: what the disk tier is measured against (gpu_load_raw.c). */
#ifndef GPU_LOAD_H
#define GPU_LOAD_H

#include <stddef.h>
#include <stdint.h>

typedef struct load_raw load_raw_t;

/* NULL, or why there is no raw reading in a directory. */
const char *load_raw_why(const char *dir);
/* A file of `bytes`, a multiple of `request`, in a directory; its name is removed. NULL, after a sentence: it could
 * not. */
load_raw_t *load_raw_open(const char *dir, uint64_t bytes, size_t request, uint32_t depth);
/* Seconds that reading all of it took; 0, after a sentence: it failed. */
double load_raw_read(load_raw_t *raw);
void load_raw_close(load_raw_t *raw);

#endif
