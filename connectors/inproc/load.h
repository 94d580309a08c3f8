/* inproc/load.h -- loads, for the engine and for the self-test. */
#ifndef KVX_INPROC_LOAD_H
#define KVX_INPROC_LOAD_H

#include "inproc/state.h"

/* kvx_load_prefix() (result is never NULL), for any paged cache and whether or not the self-test has passed. */
kvc_status_t kvx_load_start(kvx_t *kvx, const kvk_paged_t *paged, const kvx_prefix_t *prefix, kvx_load_t **p_load,
			    kvx_load_result_t *result);
/* Advance by at most `budget` blocks; how many were moved. */
uint32_t kvx_load_step(kvx_load_t *load, uint64_t now, uint32_t budget);
/* 1: there is something to move now, without waiting for the daemon. */
int kvx_load_movable(const kvx_load_t *load);

#endif
