/* Loads that the tier begins. Each checks header and digests as any other load does; a block that is not whole is lost.
 */
#include "own_reads.h"

#include "nvme/slots/slots.h"
#include "transfer.h"
#include "nvme/slots/unreadable.h"

#include <stdlib.h>

#define LOOK_SLOTS 4096u        /* at most, in a poll */
#define PAUSE_NS   100000000ull /* after a pass over all slots in which no read could be begun */

typedef struct own_read {
	kvs_nvme_t *nvme;
	int busy;
	kvs_loc_t loc;
	kvs_mem_t mem; /* its own */
} own_read_t;

/* The pass over the slots that a rebuild has found. */
typedef struct verify {
	own_read_t read[KVS_VERIFY_READS];
	uint32_t file, index; /* the next slot to look at */
	int has_begun;        /* a read, in this pass */
	uint64_t after_ns;
} verify_t;

struct kvs_own_reads {
	own_read_t retry; /* of a slot that is set aside */
	verify_t verify;
};

static int take_mem(const kvs_nvme_t *nvme, const kvs_dclass_t *cls, kvs_mem_t *mem)
{
	const kvs_geometry_t *g = &cls->geometry;

	*mem = (kvs_mem_t){.region = UINT32_MAX};
	mem->leaves = kv_alloc(nvme->env, ((size_t)g->heads * g->leaves + g->heads) * sizeof *mem->leaves);
	if (!mem->leaves || posix_memalign(&mem->data, KVS_PAGE, cls->payload_bytes) != 0) {
		kv_free(nvme->env, mem->leaves);
		return 0;
	}
	mem->roots = mem->leaves + (size_t)g->heads * g->leaves;

	return 1;
}

static void give_mem(const kvs_nvme_t *nvme, const kvs_mem_t *mem)
{
	free(mem->data);
	kv_free(nvme->env, mem->leaves);
}

static void read_done(void *arg, kv_status_t status)
{
	own_read_t *read = arg;
	kvs_nvme_t *nvme = read->nvme;
	kvs_dslot_t *s = kvs_slot_find(nvme, read->loc);

	read->busy = 0;
	if (status == KV_ERR_CLOSED) {
		return; /* the device may still write into the memory */
	}
	give_mem(nvme, &read->mem);
	if (status == KV_ERR_CORRUPT && s) {
		kvs_slot_mark_lost(nvme, read->loc.slot, s);
	}
}

/* 0: not now. */
static int begin_read(kvs_nvme_t *nvme, own_read_t *read, kv_slot_t slot)
{
	if (!take_mem(nvme, kvs_slot_class(nvme, slot), &read->mem)) {
		return 0;
	}
	read->nvme = nvme;
	read->loc = (kvs_loc_t){slot, kvs_slot_get(nvme, slot)->gen};
	read->busy = kvs_load_submit(nvme, read->loc, &read->mem, read_done, read) == KV_OK;
	if (!read->busy) {
		give_mem(nvme, &read->mem);
	}

	return read->busy;
}

/* Made when there is something to read. NULL: no memory. */
static struct kvs_own_reads *own_reads(kvs_nvme_t *nvme)
{
	if (!nvme->own_reads) {
		nvme->own_reads = kv_alloc(nvme->env, sizeof *nvme->own_reads);
	}

	return nvme->own_reads;
}

void kvs_retry_aside_slot(kvs_nvme_t *nvme)
{
	struct kvs_own_reads *reads;
	kv_slot_t slot;

	if (nvme->aside_count == 0 || nvme->health == KVS_HEALTH_OFF || nvme->closing) {
		return;
	}
	reads = own_reads(nvme);
	if (!reads || reads->retry.busy) {
		return;
	}
	slot = kvs_aside_next(nvme, kv_now_ns(nvme->env));
	if (slot != KV_SLOT_NONE) {
		(void)begin_read(nvme, &reads->retry, slot);
	}
}

/* The next slot to verify, at most `*p_look` slots on. kvs_retry_aside_slot() reads slots that are set aside. */
static kvs_dslot_t *next_slot(kvs_nvme_t *nvme, verify_t *v, uint32_t *p_look)
{
	for (; v->file < KVS_MAX_FILES; v->file++, v->index = 0) {
		const kvs_dfile_t *file = &nvme->files[v->file];

		for (; file->slot && v->index<file->slots && * p_look> 0; v->index++, *p_look -= 1) {
			kvs_dslot_t *s = &file->slot[v->index];

			if ((s->flags & KVS_SLOT_UNVERIFIED) && !(s->flags & KVS_SLOT_ASIDE) && s->io == 0) {
				return s;
			}
		}
		if (*p_look == 0) {
			return NULL;
		}
	}

	return NULL;
}

static own_read_t *idle_read(verify_t *v)
{
	for (uint32_t i = 0; i < KVS_VERIFY_READS; i++) {
		if (!v->read[i].busy) {
			return &v->read[i];
		}
	}

	return NULL;
}

void kvs_verify_some_blocks(kvs_nvme_t *nvme)
{
	uint32_t look = LOOK_SLOTS;
	struct kvs_own_reads *reads;
	own_read_t *read;
	verify_t *v;

	if (nvme->unverified == 0 || !nvme->recovered || nvme->closing || nvme->health == KVS_HEALTH_OFF) {
		return;
	}
	reads = own_reads(nvme);
	if (!reads || kv_now_ns(nvme->env) < reads->verify.after_ns) {
		return;
	}
	v = &reads->verify;
	while ((read = idle_read(v)) != NULL && nvme->in_flight < nvme->xfer_cap / 2u) {
		if (!next_slot(nvme, v, &look) || !begin_read(nvme, read, kv_slot_make(v->file, v->index))) {
			break;
		}
		v->index++;
		v->has_begun = 1;
	}
	if (v->file == KVS_MAX_FILES) {
		v->after_ns = v->has_begun ? 0 : kv_now_ns(nvme->env) + PAUSE_NS;
		v->file = v->index = 0;
		v->has_begun = 0;
	}
}
