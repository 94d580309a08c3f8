/* kvk/ep_group.h -- ranks of kvk/ep.h as processes of one machine: memory that they share, and how its descriptors get
 * from each rank to all others.
 */
#ifndef KVK_EP_GROUP_H
#define KVK_EP_GROUP_H

#include "kvk/ep.h"

/* Host memory of one rank, mapped here. */
typedef struct kvk_ep_memory {
	void *base;
	size_t bytes;
} kvk_ep_memory_t;

/* At least that many zero bytes which cannot shrink, of a memfd; on huge pages if enough of them are free. *p_fd is
 * the caller's. KV_ERR_NOMEM, KV_ERR_BUSY, KV_ERR_REFUSED: kv/system.h. */
kv_status_t kvk_ep_memory_create(size_t bytes, kvk_ep_memory_t *memory, int *p_fd);
/* Memory that another rank created; fd stays the caller's. KV_ERR_ARG: it is shorter, may shrink, or is none. */
kv_status_t kvk_ep_memory_map(int fd, size_t bytes, kvk_ep_memory_t *memory);
/* Zeros are nothing. */
void kvk_ep_memory_unmap(kvk_ep_memory_t *memory);

typedef struct kvk_ep_exchange {
	const kv_env_t *env;
	const kvk_ep_plan_t *plan;
	const char *directory; /* a socket a rank; of this user and mode 0700, made if it is not there */
	uint32_t rank;
	kvk_ep_link_kind_t link; /* whose heaps these are */
	int heap;                /* borrowed: kvk_ep_memory_create(), or an export of GPU memory (kvk_device_alloc()) */
	uint64_t timeout_us;     /* 0: 10 s */
} kvk_ep_exchange_t;

typedef struct kvk_ep_exchange_fault {
	uint32_t lost; /* ranks that have not come, or have ended, a bit each */
	char why[160]; /* a sentence */
} kvk_ep_exchange_fault_t;

/* Give all other ranks this one's descriptor and get theirs: heaps[ranks], the caller's; its own is -1. All ranks get
 * them or, after a failure, none: then all are -1 and nothing is left open. A rank that dies amid its last message may
 * leave others on both sides; those that go on name it at their first receive.
 *
 * KV_ERR_TIMEOUT: ranks have not come, or stand still. Who is waiting says so within a quarter of timeout_us more.
 * KV_ERR_CLOSED: a rank has ended. KV_ERR_IDENTITY: a rank has another plan or link. KV_ERR_EXISTS: a rank is there
 * twice. KV_ERR_NOT_PERMITTED: a process of another user. KV_ERR_PROTO: a message that is none, is cut off, or has not
 * the one descriptor of a heap that is as large as the plan's and cannot shrink. Each ends the exchange on all ranks.
 * KV_ERR_PATH: the directory. KV_ERR_ARG: no such rank; KV_ERR_IO. */
kv_status_t kvk_ep_exchange(const kvk_ep_exchange_t *config, int *heaps, kvk_ep_exchange_fault_t *fault);

#endif
