/* Blocks that a rebuild has found are read before anything is acknowledged: a header proves that a write had begun, not
 * that it had ended (decision 023). */
#include "impl.h"

#define LOOK_SLOTS 4096u        /* a poll looks at so many */
#define PAUSE_NS   100000000ull /* after a pass over all slots in which no read could be begun */

typedef struct kvs_verify_read {
	kvs_nvme_t *nvme;
	int busy;
	kvs_loc_t loc;
	kvs_mem_t mem; /* its own */
} kvs_verify_read_t;

/* The pass over the slots; made when there is something to read. */
struct kvs_verify {
	kvs_verify_read_t read[KVS_VERIFY_READS];
	uint32_t file, index; /* the next slot to look at */
	int has_begun;        /* a read, in this pass */
	uint64_t after_ns;
};

void kvs_slot_found(kvs_nvme_t *nvme, kvs_dslot_t *s)
{
	s->flags |= KVS_SLOT_UNVERIFIED;
	nvme->unverified++;
}

void kvs_slot_verified(kvs_nvme_t *nvme, kvs_dslot_t *s)
{
	if (s->flags & KVS_SLOT_UNVERIFIED) {
		s->flags &= (uint8_t)~KVS_SLOT_UNVERIFIED;
		nvme->unverified--;
	}
}

static void read_done(void *arg, kv_status_t status)
{
	kvs_verify_read_t *read = arg;
	kvs_nvme_t *nvme = read->nvme;
	kvs_dslot_t *s = kvs_slot_at(nvme, read->loc);

	read->busy = 0;
	if (status == KV_ERR_CLOSED) {
		return; /* the device may still write into the memory */
	}
	kvs_mem_give(nvme, &read->mem);
	if (status == KV_ERR_CORRUPT && s) {
		kvs_slot_lose(nvme, read->loc.slot, s);
	}
}

/* 0: not now. */
static int begin_read(kvs_nvme_t *nvme, kvs_verify_read_t *read, kv_slot_t slot, const kvs_dslot_t *s)
{
	if (!kvs_mem_take(nvme, kvs_slot_class(nvme, slot), &read->mem)) {
		return 0;
	}
	read->nvme = nvme;
	read->loc = (kvs_loc_t){slot, s->gen};
	read->busy = kvs_load_submit(nvme, read->loc, &read->mem, read_done, read) == KV_OK;
	if (!read->busy) {
		kvs_mem_give(nvme, &read->mem);
	}

	return read->busy;
}

/* The next slot that is to be read, at most `*p_look` slots on. One that is set aside is read again by itself. */
static kvs_dslot_t *next_slot(kvs_nvme_t *nvme, struct kvs_verify *v, uint32_t *p_look)
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

static kvs_verify_read_t *idle_read(struct kvs_verify *v)
{
	for (uint32_t i = 0; i < KVS_VERIFY_READS; i++) {
		if (!v->read[i].busy) {
			return &v->read[i];
		}
	}

	return NULL;
}

void kvs_verify_step(kvs_nvme_t *nvme)
{
	uint32_t look = LOOK_SLOTS;
	struct kvs_verify *v;
	kvs_verify_read_t *read;

	if (nvme->unverified == 0 || !nvme->recovered || nvme->closing || nvme->health == KVS_HEALTH_OFF) {
		return;
	}
	if (!nvme->verify) {
		nvme->verify = kv_alloc(nvme->env, sizeof *nvme->verify);
	}
	v = nvme->verify;
	if (!v || kv_now_ns(nvme->env) < v->after_ns) {
		return;
	}
	while ((read = idle_read(v)) != NULL && nvme->in_flight < nvme->xfer_cap / 2u) {
		kvs_dslot_t *s = next_slot(nvme, v, &look);

		if (!s || !begin_read(nvme, read, kv_slot_make(v->file, v->index), s)) {
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
