/* scheduler/save.h -- puts, from their reservation to the daemon's answer. */
#ifndef KVX_SCHEDULER_SAVE_H
#define KVX_SCHEDULER_SAVE_H

#include "scheduler/base/state.h"

/* Its first `computed` tokens are computed: reserve what is full and not stored. */
void kvx_request_advance(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t computed);
/* It ends: what the daemon was too busy to take is asked for once more, and again after that for a second, if the
 * engine keeps its blocks (kvx_scheduler_config_t). */
void kvx_request_save_rest(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request);
/* The request's first `tokens` tokens are in its blocks, and used again. Those that the space in memory of its GPU does
 * not have are saved there, once, if there is room. */
void kvx_request_save_to_device(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request,
				uint32_t tokens);
/* Process answers that have arrived; 1: one of this step is still due. */
int kvx_puts_poll(kvx_scheduler_t *scheduler, uint64_t now);
/* Wait a short time for the answers to this step's reservations, but not for a daemon that has stopped. */
void kvx_puts_await(kvx_scheduler_t *scheduler, uint64_t now);
void kvx_puts_emit(kvx_scheduler_t *scheduler);
/* 1: a put is granted and not emitted, or rests, or an answer is due soon: an idle engine makes a step for it. */
int kvx_puts_are_due(const kvx_scheduler_t *scheduler, uint64_t now);
/* Save the block of a request after its last full one in that mem, under the key of a private block. Nothing is saved
 * if it is not current, or there is no room. */
void kvx_put_start_private(kvx_scheduler_t *scheduler, kvx_request_t *request, uint32_t mem, uint32_t block,
			   const kvc_key_t *key);
/* 1: a put of the request is in progress there. */
int kvx_puts_are_open(const kvx_request_t *request, uint32_t mem);
void kvx_puts_take_dropped(kvx_scheduler_t *scheduler, uint64_t handle);
/* Give up what the request has reserved since that step: it may be garbage. */
void kvx_puts_revoke(kvx_scheduler_t *scheduler, const kvx_request_t *request, uint32_t since);
void kvx_puts_revoke_all(kvx_scheduler_t *scheduler);

#endif
