/* scheduler/names/spaces.h -- the attachment, and the spaces of the base model and of adapters. */
#ifndef KVX_SCHEDULER_SPACES_H
#define KVX_SCHEDULER_SPACES_H

#include "scheduler/base/state.h"

/* Number of the request's space, UINT32_MAX: refused, or the weights have no name. A new one is added and opened. */
uint32_t kvx_space_find_or_add(kvx_scheduler_t *scheduler, const kvx_ask_t *ask);
/* Number of a space without blocks. A producer whose own space cannot be named begins there, and so its consumer is
 * told that the sides differ (docs/decisions/075). UINT32_MAX: none is left. */
uint32_t kvx_space_nameless(kvx_scheduler_t *scheduler);
/* The same of the weights' present name and an adapter; NULL: the base model's. */
uint32_t kvx_space_of_name(kvx_scheduler_t *scheduler, const char *adapter);
/* The weights' first name is that of number 0. KVC_ERR_NOMEM. */
kvc_status_t kvx_space_take_first_name(kvx_scheduler_t *scheduler);
/* KV_WHY_NONE: open, and the daemon alive. */
uint32_t kvx_space_miss_reason(const kvx_scheduler_t *scheduler, uint32_t number);
/* The daemon answers, as far as its heartbeat says. */
int kvx_daemon_is_alive(const kvx_scheduler_t *scheduler);
/* Wait a little for the daemon, in a call that began at `since` and may take until `until`; what has arrived is
 * processed. 0: the time is up, or the daemon is not worth waiting for: look once more and stop. */
int kvx_scheduler_await_daemon(kvx_scheduler_t *scheduler, uint64_t since, uint64_t until);
/* Attach, and open the spaces that are not open. */
void kvx_spaces_poll(kvx_scheduler_t *scheduler, uint64_t now);
void kvx_spaces_emit(kvx_scheduler_t *scheduler);
/* The mem of the GPU with that UUID; KVX_HOST_MEM: there is none left, or own chains have keys of one space. */
uint32_t kvx_mem_find_or_add(kvx_scheduler_t *scheduler, const char *uuid);
/* Open the space of that number there. */
void kvx_mem_want(kvx_scheduler_t *scheduler, uint32_t number, uint32_t mem);
/* 1: the space of that number there is open. */
int kvx_mem_is_open(const kvx_scheduler_t *scheduler, uint32_t number, uint32_t mem);
/* 1: and the ranks can use it. */
int kvx_mem_is_usable(const kvx_scheduler_t *scheduler, uint32_t number, uint32_t mem);
/* 1: and each of them has said so, or it is the engine's own GPU: a match may count on it. */
int kvx_mem_is_reached(const kvx_scheduler_t *scheduler, uint32_t number, uint32_t mem);
void kvx_device_take_reached(kvx_scheduler_t *scheduler, const kvx_report_reached_t *report);
/* A rank cannot use memory of that GPU: none does for a while, and for longer each time. */
void kvx_mem_pause(kvx_scheduler_t *scheduler, uint32_t mem);
void kvx_spaces_close(kvx_scheduler_t *scheduler);

#endif
