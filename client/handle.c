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
	if (taken != KV_OK) {
		kvc_lease_forget(lease);
		return kvc_fail(KV_ERR_ARG, "the handle names no lease of this instance");
	}
	lease->imported = 1;
	lease->skip = handle->first;
	lease->n = handle->n;
	kvc_lease_bind(lease);
	atomic_store(&lease->status, KV_OK);
	*p_lease = lease;

	return KVC_OK;
}

kvc_status_t kvc_put_export(const kvc_put_t *put, kvc_handle_t *handle)
{
	if (put->status != KV_OK || !put->grant.map) {
		return kvc_fail(put->status == KV_OK ? KV_ALREADY : put->status,
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

static kvc_status_t put_take(kvc_put_t *put, const kvc_handle_t *handle, const kvc_writer_t *range)
{
	kvc_space_t *space = put->space;
	kv_status_t status;

	put->imported = 1;
	put->n = put->asked = handle->n;
	put->range = *range;
	put->result = (kvc_put_result_t){.status = KVC_PENDING, .durable_status = KVC_MISS};
	status = kvc_put_range(space, range, &put->words_a_block);
	if (status != KV_OK) {
		return kvc_fail(status, "the range of heads and layers is not in a block of %u heads and %u layers",
				space->heads, space->layers);
	}
	status = kvc_staging_take(space->kvc, (uint64_t)put->n * put->words_a_block, &put->staging);
	if (status != KV_OK) {
		return kvc_fail(status, "no staging is left for %u blocks; end or free other puts first", put->n);
	}
	status = kvc_grant_take(space->kvc, handle->id, handle->offset, put->n, KV_LEASE_PUT, &put->grant);
	if (status == KV_OK) {
		status = kvc_put_bind(put);
	}
	if (status != KV_OK) {
		return kvc_fail(status == KV_ERR_PROTO ? KV_ERR_ARG : status,
				"the handle names no put of this instance");
	}
	put->status = KV_OK;

	return KVC_OK;
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
	status = put_take(put, handle, range);
	if (status != KVC_OK) {
		kvc_put_forget(put);
		return status;
	}
	*p_put = put;

	return KVC_OK;
}
