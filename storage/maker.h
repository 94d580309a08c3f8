/* maker.h -- huge pages under shared memory, made one at a time by a thread of ordinary priority.
 *
 * A page that is being made is locked until it is whole, and whoever gets only idle time may be half a second over it. So the thread that touches memory in
 * idle time says when, and this one does it at once: some 0.3 ms of work, where 512 small pages cost 1.5.
 */
#ifndef KVS_MAKER_H
#define KVS_MAKER_H

#include "sys.h"

#include "kv/env.h"

typedef struct kvs_maker kvs_maker_t;

/* `sys` has a collapse. NULL: no thread, no memory. */
kvs_maker_t *kvs_maker_start(const kvs_sys_t *sys, const kv_env_t *env);
/* Make the 2 MiB at `at` one page and wait for it: what sys->collapse answered. One caller at a time. */
int kvs_maker_make(kvs_maker_t *maker, uint8_t *at);
/* NULL is fine. */
void kvs_maker_stop(kvs_maker_t *maker);

#endif
