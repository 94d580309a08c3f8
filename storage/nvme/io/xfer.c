/* One transfer, as every I/O thread treats it: header before a write, checks after a read. */
#include "xfer.h"

#include "fs_status.h"
#include "nvme/nvme.h"

#include "kv/digest.h"
#include "kvs/pool.h"
#include "kvs/sigbus.h"

void kvs_xfer_prepare(kvs_xfer_t *xfer, void *header)
{
	kvs_slothdr_t h = {
		.meta = xfer->meta,
		.incarnation = xfer->incarnation,
		.slot_class = xfer->cls->id,
		.slot = xfer->slot,
		.gen = xfer->gen,
		.length = xfer->cls->geometry.block_bytes,
	};

	xfer->status = KV_OK;
	xfer->error = 0;
	if (xfer->kind == KVS_STORE) {
		h.digest = kv_digest_root(xfer->mem.roots, xfer->cls->geometry.heads);
		xfer->digest = h.digest;
		kvs_slothdr_encode(header, &xfer->cls->geometry, &h, xfer->mem.leaves);
	}
}

void kvs_xfer_verify(kvs_xfer_t *xfer, void *header)
{
	const kvs_dclass_t *cls = xfer->cls;
	const uint64_t *leaves;
	kvs_slothdr_t h;

	if (kvs_slothdr_decode(header, cls->header_bytes, &cls->geometry, &h, &leaves) != KV_OK) {
		xfer->status = KV_ERR_CORRUPT;
		return;
	}
	if (h.slot != xfer->slot || h.slot_class != cls->id || h.gen != xfer->gen || h.meta.group != xfer->meta.group ||
	    !kv_key_equal(&h.meta.key, &xfer->meta.key)) {
		xfer->status =
			KV_ERR_CORRUPT; /* a whole header, but of another block: a lost, misplaced or later write */
		return;
	}

	xfer->status =
		kvs_sigbus_verify_block(&cls->geometry, xfer->mem.data, leaves, xfer->mem.leaves, xfer->mem.roots);
}

void kvs_xfer_set_error(kvs_xfer_t *xfer, int error)
{
	xfer->error = error;
	xfer->status = error == EFAULT ? KV_ERR_FAULT : kvs_fs_status(error);
	if (xfer->status == KV_ERR_BUSY || xfer->status == KV_ERR_PATH) {
		xfer->status = KV_ERR_IO; /* whatever it was, the block has not been moved */
	}
}

void kvs_xfer_return(kvs_io_t *io, kvs_xfer_t *xfer)
{
	int pushed = kvs_queue_push(&io->out, xfer);

	kv_assert(pushed); /* as many places as transfers: it cannot be full */
}

void kvs_xfer_wake_owner(kvs_io_t *io)
{
	kvs_wakeup_signal(&io->nvme->owner_wakeup);
}

void kvs_iov_advance(struct iovec *iov, uint32_t *p_count, size_t done)
{
	uint32_t skip = 0;

	while (skip < *p_count && done >= iov[skip].iov_len) {
		done -= iov[skip].iov_len;
		skip++;
	}
	for (uint32_t i = skip; i < *p_count; i++) {
		iov[i - skip] = iov[i];
	}
	*p_count -= skip;
	if (*p_count > 0) {
		iov[0].iov_base = (uint8_t *)iov[0].iov_base + done;
		iov[0].iov_len -= done;
	}
}
