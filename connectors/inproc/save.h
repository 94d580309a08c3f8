/* inproc/save.h -- saves, for the engine and for the self-test. */
#ifndef KVX_INPROC_SAVE_H
#define KVX_INPROC_SAVE_H

#include "inproc/state.h"

/* kvx_save_prefix(), for any paged cache and whether or not the self-test has passed. */
kvc_status_t kvx_save_start(kvx_t *kvx, const kvk_paged_t *paged, const kvx_prefix_t *prefix, kvx_save_t **p_save);
/* Advance by at most `budget` blocks; how many were moved. */
uint32_t kvx_save_step(kvx_save_t *save, uint64_t now, uint32_t budget);
/* 1: there is something to move now, without waiting for the daemon. */
int kvx_save_movable(const kvx_save_t *save);

#endif
