/* The consumer's requests: HANDOVER_RECV, HANDOVER_TAIL; and HANDOVER_DONE, which either side sends. */
#include "core/handover/handover_impl.h"

/* The entry of the request, its consumer's from now on. */
static kv_status_t take_entry(kvd_core_t *core, kvd_handover_call_t *call, const kv_slice_t *transfer)
{
	kv_status_t status = KV_OK;

	if (call->entry && kvd_handover_is_side(&call->entry->consumer, call)) {
		kvd_handover_join_side(core, &call->entry->consumer, call); /* perhaps another member of the instance */
		return KV_OK;
	}
	if (call->entry && call->entry->consumer.member != 0) {
		return KV_ERR_TAKEN;
	}
	if (!call->entry && kvd_handover_recall(core, call->space, transfer)) {
		return KV_ERR_EXPIRED;
	}
	status = kvd_handover_may_join(core, call);
	if (status == KV_OK && !call->entry) {
		status = kvd_handover_make_entry(core, call->space->ns);
	}
	if (status == KV_OK && !call->entry) {
		status = kvd_handover_create(core, call, transfer);
		if (status == KV_OK) {
			call->entry->state = KV_HANDOVER_AWAITED;
		}
	}
	if (status == KV_OK) {
		kvd_handover_join_side(core, &call->entry->consumer, call);
	}

	return status;
}

/* The entry is its consumer's until then, and this is what the consumer is answered. */
static void begin_wait(kvd_core_t *core, kvd_handover_t *entry, uint64_t ttl, kv_msg_handover_recv_reply_t *reply)
{
	const kv_msg_handover_t now = kvd_handover_describe(core, entry);

	/* The consumer's deadline replaces the entry's time to live. When it gives the entry back, that begins anew. */
	kvd_handover_set_deadline(core, entry, core->now_ns + ttl);
	if (entry->asked_ns == 0 && (entry->state == KV_HANDOVER_AWAITED || entry->state == KV_HANDOVER_SENDING)) {
		entry->asked_ns = core->now_ns;
	}
	*reply = (kv_msg_handover_recv_reply_t){.number = now.number,
						.state = now.state,
						.n = now.n,
						.partial = now.partial,
						.status = now.status,
						.tail_bytes = now.tail_bytes,
						.bytes = kvd_handover_bytes(core, entry),
						.ttl_ms = (uint32_t)(ttl / 1000000u)};
}

kv_status_t kvd_handover_recv(kvd_core_t *core, uint32_t ns, kvd_member_t member, const kv_msg_handover_recv_t *ask,
			      kv_msg_handover_recv_reply_t *reply)
{
	const kvd_handover_name_t name = {
		.ns = ns, .space = ask->space, .epoch = ask->epoch, .member = member, .transfer = ask->transfer};
	kvd_handover_call_t call = {0};
	kv_status_t status = kvd_handover_find_transfer(core, &name, &call);

	if (status == KV_OK && !call.entry) {
		status = kvd_handover_meet(core, &call, &ask->transfer, 0);
	}
	if (status == KV_OK) {
		status = take_entry(core, &call, &ask->transfer);
	}
	if (status == KV_OK) {
		begin_wait(core, call.entry, kvd_handover_ttl(core, ask->timeout_ms), reply);
	}

	return status;
}

kv_status_t kvd_handover_tail(kvd_core_t *core, uint32_t ns, kvd_member_t member, const kv_msg_handover_tail_t *ask,
			      kv_msg_handover_tail_reply_t *reply)
{
	kvd_handover_call_t call = {0};
	kv_status_t status = kvd_handover_find_number(core, ns, member, ask->number, &call);

	if (status != KV_OK) {
		return status;
	}
	if (!kvd_handover_is_side(&call.entry->consumer, &call)) {
		return KV_ERR_NOT_FOUND;
	}
	reply->tail = (kv_slice_t){call.entry->tail, call.entry->tail_len};

	return KV_OK;
}

/* An error of the list, or none. */
static int is_reason(int32_t status)
{
	return status == 0 || (status < 0 && strcmp(kv_status_name((kv_status_t)status), "UNKNOWN") != 0);
}

kv_status_t kvd_handover_done(kvd_core_t *core, uint32_t ns, kvd_member_t member, const kv_msg_handover_done_t *ask)
{
	kvd_handover_call_t call = {0};
	kv_status_t status = kvd_handover_find_number(core, ns, member, ask->number, &call);
	int abort = (ask->flags & KV_HANDOVER_ABORT) != 0;

	if (status != KV_OK) {
		return status;
	}
	/* An instance may be both sides. */
	if (ask->flags & KV_HANDOVER_BY_PRODUCER) {
		if (!kvd_handover_is_side(&call.entry->producer, &call)) {
			return KV_ERR_NOT_FOUND;
		}
		if (!abort || !is_reason(ask->status)) {
			return KV_ERR_ARG; /* what a producer has to say is said with its last SEND */
		}
		/* The entry may stay for its consumer, and no longer counts against the producer's limit. */
		kvd_handover_leave_side(core, &call.entry->producer);
		if (call.entry->state != KV_HANDOVER_FAILED) {
			kvd_handover_fail(core, call.entry, ask->status ? (kv_status_t)ask->status : KV_ERR_ABORTED);
		}
		return KV_OK;
	}
	if (!kvd_handover_is_side(&call.entry->consumer, &call)) {
		return KV_ERR_NOT_FOUND;
	}
	if (abort) {
		kvd_handover_give_back(core, call.entry);
	} else {
		kvd_handover_end(core, call.entry, KV_OK, &call.entry->consumer);
	}

	return KV_OK;
}
