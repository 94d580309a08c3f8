/* gpu_engine.h -- an engine without a model, as the kill loop and the bench of loads have it: a cache in a device's
 * memory (or the host's), a kvx_worker_t beside it, and a second member in the scheduler's place that leases, reserves
 * and writes plans. One in a process; several where memory is the host's. */
#ifndef GPU_ENGINE_H
#define GPU_ENGINE_H

#include "kvc.h"
#include "kvk/cuda.h"
#include "kvx_worker.h"
#include "step/message.h"

#include <stddef.h>
#include <stdint.h>

#define ENGINE_LAYERS 32u
#define ENGINE_GROUPS 3u
#define ENGINE_ASK_MS 2000u

typedef struct engine {
	/* Set before engine_open(). */
	const char *program, *socket;
	kvk_layout_t layout;            /* at most ENGINE_LAYERS */
	uint32_t blocks;                /* of the cache */
	uint32_t length;                /* blocks of a prompt, at most */
	uint32_t load_ms;               /* a load is given up after so long; 0: 5000 */
	uint64_t layer_bytes;           /* from this many bytes on, loads may come layer by layer; 0: none */
	uint32_t layer_wait_us;         /* if all blocks are there after so long; 0: the worker's own */
	int prefault;                   /* pages of the cache are touched in idle time */
	size_t bounce_bytes;            /* of `bounce`; a block at least */
	const char *device;             /* the GPU in whose memory blocks may lie as well; NULL: none */
	const char *groups;             /* of the identity; NULL: one full group, that of the fields above */
	const kvx_worker_group_t *more; /* the groups after that, whose memory is the caller's */
	uint32_t more_count;
	/* Of what is saved and loaded from now on: KVX_HOST_MEM or KVX_OWN_MEM. */
	uint32_t mem;
	/* Made by it. */
	char instance[48];
	uint64_t end_ns; /* when the end of the last save's step began */
	uint8_t *bounce, *expected;
	char layout_text[KVK_LAYOUTS_TEXT_MAX];
	kvk_paged_t paged;
	void *base[ENGINE_LAYERS];
	uint8_t *cache;
	size_t piece, block_bytes; /* of a block in a layer; in all */
	kvc_identity_t identity;
	kvc_writer_t writer;
	kvx_worker_t *worker;
	kvc_t *kvc;
	kvc_space_t *space, *device_space;
	kvx_msg_buf_t plan;
	uint32_t step;
	uint64_t load;
} engine_t;

#ifdef ENGINE_FAKE
#define ENGINE_IS_SMALL(host) 1
#define ENGINE_LAYER_WAIT_US  1000000u /* the machine may be busy */
#else
#define ENGINE_IS_SMALL(host) (host)
#define ENGINE_LAYER_WAIT_US  0u
#endif
/* The 8B shape, 2 MiB a block, or the same in 32 KiB: where the CPU moves them. */
#define ENGINE_SHAPE(small)                                                                                            \
	((kvk_layout_t){.heads = (small) ? 2 : 8,                                                                      \
			.layers = (small) ? 4 : ENGINE_LAYERS,                                                         \
			.block_tokens = 16,                                                                            \
			.k_dim = (small) ? 64 : 128,                                                                   \
			.v_dim = (small) ? 64 : 128,                                                                   \
			.dtype = KVK_DTYPE_BF16,                                                                       \
			.inner = KVK_INNER_SPLIT})

/* 0, after a sentence: it could not, or bench_late(). Memory (below) is open. The daemon may come and go. */
int engine_open(engine_t *e);
void engine_close(engine_t *e);
/* Another worker, after kvx_worker_close(), perhaps over another cache. */
void engine_place(engine_t *e, uint8_t *cache);
int engine_open_worker(engine_t *e);
/* That of `mem`; NULL: the daemon has none there, or has not answered yet. */
kvc_space_t *engine_space(engine_t *e);
/* Keys of prompt number `chain` in that space, `length` of them. UNREACHABLE: there is none. */
kvc_status_t engine_keys(engine_t *e, uint64_t chain, kvc_key_t *keys);

/* A block of the cache gets the bytes of a seed; does it hold them? */
void engine_write(engine_t *e, uint32_t id, uint64_t seed);
int engine_holds(engine_t *e, uint32_t id, uint64_t seed);

/* A step that says that these blocks have new owners: what is still to be read of them is read first. engine_end()
 * follows. */
void engine_fence(engine_t *e, const uint32_t *ids, uint32_t n);
/* A step that saves the first n blocks of a put, from these blocks; 0: there is nothing to write, or it cannot. */
int engine_save(engine_t *e, const kvc_put_t *put, const uint32_t *ids, uint32_t n);
/* A step that loads n leased blocks to these blocks. engine_end() has been called: what is bad is told by
 * kvx_worker_take_failed_blocks(). */
int engine_load(engine_t *e, const kvc_lease_t *lease, const uint32_t *ids, uint32_t n);
/* The same layer by layer; *p_ns: from the plan's being handed over until the host has seen the engine's stream get
 * past what layer 0 waits for. *p_layered 0: the worker has loaded all layers at once. */
int engine_load_first(engine_t *e, const kvc_lease_t *lease, const uint32_t *ids, uint64_t *p_ns, int *p_layered);
/* What a step saves or loads of one group: n blocks of a put or a lease, `first` of the lease the first of them. */
typedef struct engine_part {
	uint32_t group, first, n;
	const uint32_t *ids;
	const kvc_put_t *put;     /* saves */
	const kvc_lease_t *lease; /* loads */
} engine_part_t;
int engine_save_parts(engine_t *e, const engine_part_t *parts, uint32_t count);
/* Asynchronously, by an engine that has nothing else to do: 1 when all blocks are there. */
int engine_load_async(engine_t *e, const engine_part_t *parts, uint32_t count);
void engine_end(engine_t *e);

/* ---- memory of an engine's cache, and how the engine gets at it ------------------------------- */

int memory_open(int host); /* 0: there; 77: no device, which is said; 4: it cannot be used */
void memory_close(void);
/* Enqueue a copy of the engine's own host memory to its stream; memory_settle() waits for all of them. */
void memory_write(uint8_t *to, const uint8_t *bounce, size_t bytes);
void memory_settle(void);
/* The driver; NULL: the cache is in host memory. */
const kvk_cuda_ops_t *memory_cuda(void);
/* The device's UUID, or the name of one that is host memory; NULL: it has none. */
const char *memory_device(void);
/* Free bytes of the device's memory; 0: not known. Opens and closes the device. */
uint64_t memory_free_bytes(int host);

#endif
