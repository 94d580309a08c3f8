/* Leases and puts of other members of the instance: a scheduler takes them, workers move the bytes. */
#include "impl.h"

static kvc_status_t handle_check(const kvc_space_t *space, const kvc_handle_t *handle, kv_lease_kind_t kind)
{
	if (handle->kind != (uint32_t)kind || handle->first > handle->n || handle->n > KV_MAX_BLOCKS) {
		return kvc_fail(KV_ERR_ARG, "the handle is not one of a %s", kind == KV_LEASE_READ ? "lease" : "put");
	}
	if (handle->incarnation != space->kvc->incarnation) {
		return kvc_fail(KV_ERR_REVOKED, "the handle is of another run of the daemon");
	}

	return KVC_OK;
}

/* A handle may have been damaged on its way, and may be looked at in the wrong space: what a live header says must
 * agree. Of one that is no longer live nothing will be read or written. */
static kvc_status_t header_check(const kvc_space_t *space, const kvc_grant_t *grant, const kvc_handle_t *handle)
{
	const kv_lease_header_t *header = grant->header;
	uint32_t n = atomic_load_explicit(&header->n, memory_order_acquire);
	int agree = header->skip == handle->first && header->space == atomic_load(&space->id) && n <= grant->slots &&
		    (n == grant->slots || handle->kind == KV_LEASE_READ); /* a lease may have been cut short */

	if (!agree && kvc_grant_check(grant) == KV_OK) {
		return kvc_fail(KV_ERR_ARG, "the handle does not name all of this %s, or another space's",
				handle->kind == KV_LEASE_READ ? "lease" : "put");
	}

	return KVC_OK;
}

kvc_status_t kvc_lease_export(const kvc_lease_t *lease, kvc_handle_t *handle)
{
	kvc_status_t status = kvc_lease_state(lease);

	if (status == KVC_OK) {
		*handle = (kvc_handle_t){
			.incarnation = lease->grant.map->incarnation,
			.id = lease->grant.id,
			.offset = lease->grant.offset,
			.kind = KV_LEASE_READ,
			.first = lease->skip,
			.n = lease->n,
		};
	}

	return status;
}

kvc_status_t kvc_lease_import(kvc_space_t *space, const kvc_handle_t *handle, kvc_lease_t **p_lease)
{
	kvc_lease_t *lease;
	kvc_status_t status;
	kv_status_t taken;

	if (!space || !handle || !p_lease) {
		return kvc_fail(KV_ERR_ARG, "kvc_lease_import: an argument is NULL");
	}
	status = kvc_space_usable(space);
	if (status == KVC_OK) {
		status = handle_check(space, handle, KV_LEASE_READ);
	}
	if (status != KVC_OK) {
		return status;
	}
	lease = kvc_lease_new(space);
	if (!lease) {
		return kvc_fail(KV_ERR_NOMEM, "out of memory for a lease");
	}
	taken = kvc_grant_take(space->kvc, handle->id, handle->offset, handle->n - handle->first, KV_LEASE_READ,
			       &lease->grant);
	lease->group = taken == KV_OK ? kvc_group_find(space, lease->grant.header->group) : NULL;
	status = lease->group ? header_check(space, &lease->grant, handle)
			      : kvc_fail(KV_ERR_ARG, "the handle names no lease of this instance and space");
	if (taken == KV_OK) {
		kvc_lease_bind(lease);
	}
	if (status != KVC_OK) {
		kvc_lease_forget(lease);
		return status;
	}
	lease->imported = 1;
	lease->skip = handle->first;
	lease->n = handle->n;
	atomic_store(&lease->status, KV_OK);
	*p_lease = lease;

	return KVC_OK;
}

kvc_status_t kvc_put_export(const kvc_put_t *put, kvc_handle_t *handle)
{
	kvc_status_t status = atomic_load(&put->status);

	if (status == KVC_PENDING) {
		return status;
	}
	if (status != KVC_OK || !put->grant.map) {
		return kvc_fail(status == KVC_OK ? KV_ALREADY : (kv_status_t)status,
				"there is nothing of this put to be written");
	}
	*handle = (kvc_handle_t){
		.incarnation = put->grant.map->incarnation,
		.id = put->grant.id,
		.offset = put->grant.offset,
		.kind = KV_LEASE_PUT,
		.n = put->n,
	};

	return KVC_OK;
}

/* Staging for as many of the blocks to be written as there is room for, one at least. */
static kvc_status_t reserve_view_staging(kvc_put_t *put)
{
	kvc_t *kvc = put->space->kvc;
	uint64_t words = atomic_load_explicit(&kvc->map, memory_order_relaxed)->staging_words;
	uint32_t blocks = put->order[put->n], most;
	kv_status_t status;

	if (put->words_a_block == 0 || blocks == 0) {
		return KVC_OK;
	}
	/* Half as much each time: a put of many blocks then moves through a small window, instead of being refused
	 * while other puts hold the staging. */
	most = words / put->words_a_block < blocks ? (uint32_t)(words / put->words_a_block) : blocks;
	if (most == 0) {
		return kvc_fail(KV_ERR_LIMIT,
				"one block has %u leaf digests and the staging only %llu words; raise staging_blocks",
				put->words_a_block, (unsigned long long)words);
	}
	do {
		status = kvc_staging_take(kvc, (uint64_t)most * put->words_a_block, &put->staging);
		put->window_blocks = most;
		most /= 2;
	} while (status == KV_ERR_BUSY && most > 0);
	if (status != KV_OK) {
		return kvc_fail(status, "no staging is left for a block; end or free other puts first");
	}

	return KVC_OK;
}

static kvc_status_t take_put_handle(kvc_put_t *put, const kvc_handle_t *handle, const kvc_writer_t *range)
{
	kvc_space_t *space = put->space;
	kvc_status_t checked;
	kv_status_t status;

	put->imported = 1;
	put->n = put->asked = handle->n;
	put->range = *range;
	status = kvc_grant_take(space->kvc, handle->id, handle->offset, put->n, KV_LEASE_PUT, &put->grant);
	if (status == KV_OK) {
		put->group = kvc_group_find(space, put->grant.header->group);
		status = put->group ? kvc_put_bind(put) : KV_ERR_ARG;
	}
	if (status != KV_OK || !put->group) {
		return kvc_fail(status == KV_ERR_PROTO ? KV_ERR_ARG : status,
				"the handle names no put of this instance and space");
	}
	status = kvc_put_range(&put->group->geometry, range, &put->words_a_block);
	if (status != KV_OK) {
		return kvc_fail(status, "the range of heads and layers is not in a block of %u heads and %u layers",
				put->group->geometry.heads, put->group->geometry.layers);
	}
	checked = header_check(space, &put->grant, handle);
	checked = checked == KVC_OK ? reserve_view_staging(put) : checked;
	if (checked == KVC_OK) {
		atomic_store(&put->status, KV_OK);
	}

	return checked;
}

kvc_status_t kvc_put_import(kvc_space_t *space, const kvc_handle_t *handle, const kvc_writer_t *range,
			    kvc_put_t **p_put)
{
	kvc_put_t *put;
	kvc_status_t status;

	if (!space || !handle || !range || !p_put) {
		return kvc_fail(KV_ERR_ARG, "kvc_put_import: an argument is NULL");
	}
	status = kvc_space_usable(space);
	if (status == KVC_OK) {
		status = handle_check(space, handle, KV_LEASE_PUT);
	}
	if (status != KVC_OK) {
		return status;
	}
	put = kvc_put_new(space);
	if (!put) {
		return kvc_fail(KV_ERR_NOMEM, "out of memory for a put");
	}
	status = take_put_handle(put, handle, range);
	if (status != KVC_OK) {
		kvc_put_forget(put);
		return status;
	}
	*p_put = put;

	return KVC_OK;
}
