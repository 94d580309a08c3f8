/* Transfers of the disk tier as the owner sees them: start, finish, count. */
#include "transfer.h"

#include "faults.h"
#include "nvme/slots/slots.h"
#include "nvme/slots/unreadable.h"

#define ERRORS_IN_A_ROW 8u
#define SUBMIT_BATCH    32u

static kvs_xfer_t *xfer_alloc(kvs_nvme_t *nvme)
{
	kvs_xfer_t *xfer;

	if (nvme->xfer_free == KVS_NONE) {
		return NULL;
	}

	xfer = &nvme->xfers[nvme->xfer_free];
	nvme->xfer_free = xfer->next;
	nvme->in_flight++;

	return xfer;
}

static void xfer_free(kvs_nvme_t *nvme, kvs_xfer_t *xfer)
{
	xfer->busy = 0;
	xfer->next = nvme->xfer_free;
	nvme->xfer_free = (uint32_t)(xfer - nvme->xfers);
	nvme->in_flight--;
}

/* Everything from `meta` and `mem` on is the caller's; the rest follows from the slot. */
static void xfer_submit(kvs_nvme_t *nvme, kvs_xfer_t *xfer, kvs_loc_t loc)
{
	uint32_t number = kv_slot_slab(loc.slot);
	kvs_io_t *io = &nvme->io[nvme->next_worker];
	int pushed;

	/* In turns: transfers of one batch are alike, so that no worker falls behind. */
	nvme->next_worker = (nvme->next_worker + 1u) % nvme->workers;
	xfer->cls = kvs_slot_class(nvme, loc.slot);
	xfer->slot = loc.slot;
	xfer->gen = loc.gen;
	xfer->fd = nvme->files[number].fd;
	xfer->offset = (uint64_t)kv_slot_index(loc.slot) * xfer->cls->stride;
	xfer->start_ns = kv_now_ns(nvme->env);
	kvs_slot_get(nvme, loc.slot)->io++;

	/* As many places as transfers: it cannot be full. */
	pushed = kvs_queue_push(&io->in, xfer);
	kv_assert(pushed);
	/* A wake-up is a system call: one for a batch, or for what there is when the owner polls. */
	if (++io->unflushed >= SUBMIT_BATCH) {
		kvs_flush_submissions(nvme);
	}
}

void kvs_flush_submissions(kvs_nvme_t *nvme)
{
	for (uint32_t i = 0; i < nvme->workers; i++) {
		if (nvme->io[i].unflushed > 0) {
			nvme->io[i].unflushed = 0;
			kvs_wakeup_signal(&nvme->io[i].wakeup);
		}
	}
}

static int mem_is_good(const kvs_mem_t *mem)
{
	return mem && mem->data && mem->leaves && mem->roots && (uintptr_t)mem->data % KVS_PAGE == 0;
}

kv_status_t kvs_nvme_store(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *src, kvs_done_fn done, void *arg)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	kvs_dslot_t *s = kvs_slot_find(nvme, loc);
	kvs_xfer_t *xfer;

	if (!mem_is_good(src) || !done) {
		return KV_ERR_ARG;
	}
	if (!s) {
		return KV_MISS;
	}
	if ((s->state != KVS_PUT && s->state != KVS_FILLING) || s->io > 0 || (s->flags & KVS_SLOT_STORED)) {
		return KV_ERR_ARG;
	}
	if (nvme->health >= KVS_HEALTH_READ_ONLY) {
		return KV_ERR_TIER_OFF;
	}
	xfer = xfer_alloc(nvme);
	if (!xfer) {
		return KV_ERR_BUSY;
	}

	*xfer = (kvs_xfer_t){.kind = KVS_STORE,
			     .busy = 1,
			     .mem = *src,
			     .meta = nvme->recs[s->rec].meta,
			     .incarnation = nvme->config.incarnation,
			     .flush_round = nvme->round,
			     .failed_syncs = nvme->failed_syncs,
			     .done = done,
			     .arg = arg};
	/* A flush waits for the stores of its own round only: later ones cannot hold it up for ever. */
	nvme->round_open++;
	xfer_submit(nvme, xfer, loc);

	return KV_OK;
}

kv_status_t kvs_nvme_load(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *dst, kvs_done_fn done, void *arg)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	const kvs_dslot_t *s = kvs_slot_find(nvme, loc);
	kv_status_t status;

	if (!mem_is_good(dst) || !done) {
		return KV_ERR_ARG;
	}
	if (!s) {
		return KV_MISS;
	}
	if (s->state == KVS_QUARANTINED) {
		return KV_ERR_CORRUPT;
	}
	if (!(s->flags & KVS_SLOT_STORED)) {
		return KV_ERR_ARG;
	}
	status = kvs_nvme_readable(tier, loc);

	return status == KV_OK ? kvs_load_submit(nvme, loc, dst, done, arg) : status;
}

kv_status_t kvs_load_submit(kvs_nvme_t *nvme, kvs_loc_t loc, const kvs_mem_t *dst, kvs_done_fn done, void *arg)
{
	const kvs_dslot_t *s = kvs_slot_get(nvme, loc.slot);
	kvs_xfer_t *xfer = s->io == UINT16_MAX ? NULL : xfer_alloc(nvme);

	if (!xfer) {
		return KV_ERR_BUSY;
	}
	*xfer = (kvs_xfer_t){.kind = KVS_LOAD, .busy = 1, .mem = *dst, .done = done, .arg = arg};
	xfer->meta.key = s->key;
	xfer->meta.group = s->group;
	xfer_submit(nvme, xfer, loc);

	return KV_OK;
}

/* Count a device error; enough of them in a row are a fault of the tier. */
static void count_error(kvs_nvme_t *nvme, kvs_fault_t fault, const char *doing, int error)
{
	uint32_t *in_a_row = fault == KVS_FAULT_READ ? &nvme->read_errors : &nvme->write_errors;

	kv_metric_add(nvme->metrics, KV_M_DISK_ERRORS, 1);
	*in_a_row += 1;
	if (*in_a_row <= 3u) {
		kv_logf(nvme->env, KV_LOG_ERROR, "nvme", "%s failed: %s", doing, strerror(error));
	}
	if (*in_a_row >= ERRORS_IN_A_ROW && !nvme->faults[fault].active) {
		kvs_fault_raise(nvme, fault, doing, strerror(error));
	}
}

static void count_ended_store(kvs_nvme_t *nvme, const kvs_xfer_t *xfer)
{
	/* Of the round that is open, or of the round before, which a flush drains; there is no third. */
	if (xfer->flush_round == nvme->round) {
		nvme->round_open--;
	} else {
		nvme->drain_open--;
	}
}

static void finish_store(kvs_nvme_t *nvme, kvs_xfer_t *xfer, kvs_dslot_t *s)
{
	count_ended_store(nvme, xfer);
	/* A sync that failed meanwhile may have been the one to carry these bytes; the next would not say so again. */
	if (xfer->status == KV_OK &&
	    (xfer->failed_syncs != nvme->failed_syncs || nvme->files[kv_slot_slab(xfer->slot)].gone)) {
		xfer->status = KV_ERR_IO;
	}
	if (xfer->status == KV_OK) {
		nvme->write_errors = 0;
		nvme->recs[s->rec].digest = xfer->digest;
		nvme->files[kv_slot_slab(xfer->slot)].dirty = 1;
		kv_metric_add(nvme->metrics, KV_M_DISK_WRITTEN_BYTES, xfer->cls->stride);
		kv_metric_observe_ns(nvme->metrics, KV_M_DISK_WRITE_TIME, kv_now_ns(nvme->env) - xfer->start_ns);
		s->flags |= KVS_SLOT_STORED;
		if (s->state != KVS_QUARANTINED) {
			kvs_slot_set_state(nvme, xfer->slot, s, KVS_READY);
		}
		return;
	}

	/* What is on the device now is unknown: nothing may be read from there before it has been written anew. */
	if (xfer->status == KV_ERR_IO && xfer->error) {
		count_error(nvme, KVS_FAULT_WRITE, "writing a slot", xfer->error);
	} else if (xfer->status == KV_ERR_NOSPC) {
		kv_metric_add(nvme->metrics, KV_M_DISK_ERRORS, 1);
		if (!nvme->faults[KVS_FAULT_SPACE].active) {
			nvme->space_wanted = xfer->cls->stride;
			kvs_fault_raise(nvme, KVS_FAULT_SPACE, "writing a slot", strerror(xfer->error));
		}
	}
	if (s->state != KVS_QUARANTINED) {
		kvs_slot_set_state(nvme, xfer->slot, s, KVS_QUARANTINED);
	}
}

static void finish_load(kvs_nvme_t *nvme, const kvs_xfer_t *xfer, kvs_dslot_t *s)
{
	if (xfer->status == KV_OK || xfer->status == KV_ERR_CORRUPT) {
		nvme->read_errors = 0;
		kvs_aside_resolve(nvme, xfer->slot, s);
		kv_metric_add(nvme->metrics, KV_M_DISK_READ_BYTES, xfer->cls->stride);
		kv_metric_observe_ns(nvme->metrics, KV_M_DISK_READ_TIME, kv_now_ns(nvme->env) - xfer->start_ns);
	}
	/* The first whole read of a block that a rebuild has found is its verification. */
	if (xfer->status == KV_OK) {
		kvs_slot_clear_unverified(nvme, s);
	}
	if (xfer->status == KV_ERR_IO) {
		if (s->flags & KVS_SLOT_ASIDE) { /* that it fails again says nothing of other slots */
			kv_metric_add(nvme->metrics, KV_M_DISK_ERRORS, 1);
		} else {
			count_error(nvme, KVS_FAULT_READ, "reading a slot", xfer->error);
		}
		kvs_aside_add(nvme, xfer->slot, s);
	}
	if (xfer->status == KV_ERR_CORRUPT) {
		kv_metric_add(nvme->metrics, KV_M_DISK_CORRUPT, 1);
		kv_logf(nvme->env, KV_LOG_ERROR, "nvme",
			"slot does not hold what it should and is quarantined file %u index %u",
			kv_slot_slab(xfer->slot), kv_slot_index(xfer->slot));
		if (s->state != KVS_QUARANTINED) {
			kvs_slot_set_state(nvme, xfer->slot, s, KVS_QUARANTINED);
		}
	}
}

/* Every transfer ends here, whatever happened on the way. */
static void finish_xfer(kvs_nvme_t *nvme, kvs_xfer_t *xfer)
{
	kvs_done_fn done = xfer->done;
	void *arg = xfer->arg;
	kv_status_t status;

	if (xfer->kind != KVS_UNREGISTER_FILE) {
		kvs_dslot_t *s = kvs_slot_get(nvme, xfer->slot);

		s->io--;
		if (xfer->kind == KVS_STORE) {
			finish_store(nvme, xfer, s);
		} else {
			finish_load(nvme, xfer, s);
		}
		if (s->io == 0 && (s->flags & KVS_SLOT_FREEING)) {
			kvs_slot_release(nvme, xfer->slot, s);
		}
	}
	status = xfer->status;
	xfer_free(nvme, xfer); /* first: `done` may start the next transfer, and finds a free one */
	done(arg, status);
}

uint32_t kvs_transfers_finish(kvs_nvme_t *nvme, uint32_t max)
{
	uint32_t ran = 0;

	for (uint32_t i = 0; i < nvme->workers; i++) {
		kvs_xfer_t *xfer;

		while (ran < max && (xfer = kvs_queue_pop(&nvme->io[i].out)) != NULL) {
			finish_xfer(nvme, xfer);
			ran++;
		}
	}

	return ran;
}
