/* fake_tier.h -- a tier in plain memory: C slots, completions that are late, out of order, and fail when told to.
 *
 * It refuses (kv_assert) what no tier may be asked: a state change that is not in the diagram of kvs/tier.h, a double
 * free, a store or load of a slot in the wrong state. A slot's bytes are one word.
 */
#ifndef TESTS_CORE_FAKE_TIER_H
#define TESTS_CORE_FAKE_TIER_H

#include "kv_test.h"
#include "kvs/tier.h"

#define FAKE_CLASSES 8u
#define FAKE_FILES   64u

typedef struct fake_slot {
	uint64_t bytes;
	uint64_t leaves[4], roots[4];
	kvs_meta_t meta;
	kvs_state_t state;
	uint32_t gen;
	uint32_t slot_class;
	uint64_t owner;
	uint32_t busy;    /* transfers that use it */
	uint32_t freed;   /* free it when they have ended */
	uint64_t seq;     /* of its store */
	uint32_t put_off; /* by the recovering core: it is offered again */
	int aside;        /* the device cannot read it */
	uint64_t use;     /* kvs_touch() */
} fake_slot_t;

typedef struct fake_op {
	kvs_done_fn done;
	void *arg;
	uint64_t *to;
	kvs_mem_t mem; /* of a load */
	uint64_t value;
	uint32_t slot;
	kv_status_t status;
	int kind; /* 0 load, 1 store, 2 flush, 3 epoch */
} fake_op_t;

typedef struct fake_root {
	uint8_t root[32];
	uint64_t epoch;
} fake_root_t;

typedef struct fake_tier {
	kvs_tier_t tier;
	int disk;
	fake_slot_t *slots;
	uint32_t cap;
	uint32_t used;
	uint32_t *free_list;
	uint32_t free_count;
	struct {
		char ns[65];
		kvs_geometry_t geometry;
	} classes[FAKE_CLASSES];
	uint32_t class_count;
	uint32_t put_off, again;
	struct {
		char ns[65];
		uint64_t bytes;
	} caps[4];
	uint32_t cap_count;
	uint32_t file_slots; /* > 0: slots lie in files of this many, each of one class at a time, which change hands as
				those of a disk do */
	struct {
		uint32_t owner; /* class + 1; 0: none */
		int retiring;
	} files[FAKE_FILES];
	fake_op_t *ops;
	uint32_t op_count, op_cap;
	fake_root_t roots[512];
	uint32_t root_count, root_limit; /* 0: as many as there is room for */
	kv_test_rng_t rng;
	int shuffle;           /* completions in random order, some stay for later */
	int hold;              /* nothing completes */
	uint32_t fail_percent; /* of loads and stores */
	kv_status_t fail_with;
	kv_status_t flush_status;                     /* how flushes end */
	kv_status_t withdraw_refuse, withdraw_status; /* withdrawals: not taken; how they end */
	uint64_t withdrawals;
	int untouched;          /* no slot's memory is ready: BUSY */
	int off;                /* stores are refused: TIER_OFF */
	int dark;               /* and loads */
	uint32_t lose_percent;  /* of polls that end with the loss of one READY slot */
	uint32_t aside_percent; /* of polls that end with one READY slot that cannot be read now, or can again */
	kvs_watch_t watch;
	uint64_t seq, synced; /* of the last store; stores up to here are behind a flush that went well */
	uint32_t queue_limit; /* BUSY beyond */
	int whole;            /* loads go to memory of whole blocks: digests are computed */
	int device;           /* memory that the core's process does not see */
	int ordered;          /* slots lie parents first: recover in one pass */
	uint32_t found_depth, found_slot, deepest; /* recovery goes on here, and ends there */
	uint64_t use_base;                         /* uses before the restart */
	fake_slot_t **by_use;                      /* while they are reported */
	uint32_t used_next;
	uint64_t loads, stores, flushes;
	uint64_t retired; /* files that have changed hands */
	uint64_t tries;   /* stores asked for, refused and failed ones too */
} fake_tier_t;

void fake_tier_init(fake_tier_t *fake, int disk, uint32_t cap, uint64_t seed);
void fake_tier_fini(fake_tier_t *fake);
/* The bytes of a slot as a client sees them. */
uint64_t *fake_bytes(fake_tier_t *fake, kv_slot_t slot);
/* The tier no longer vouches for a READY slot; it tells the watch. */
void fake_lose(fake_tier_t *fake, kv_slot_t slot);
/* A READY slot cannot be read from now on, or can again; it tells the watch. */
void fake_set_readable(fake_tier_t *fake, kv_slot_t slot, int readable);
/* All can. */
void fake_read_all(fake_tier_t *fake);
/* Is the slot READY, and covered by a flush that succeeded? */
int fake_is_synced(const fake_tier_t *fake, kvs_loc_t loc);
/* What survives the end of the daemon: READY slots; the next core may recover them. */
void fake_disk_restart(fake_tier_t *fake);

#endif
