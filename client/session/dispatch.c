/* What arrives from the daemon: replies to what was asked, and notices. */
#include "impl.h"

#include <stdio.h>
#include <unistd.h>

/* Descriptors of one frame, taken out of the queue: closed here unless a handler has set them to -1. */
typedef struct kvc_frame_fds {
	int fd[KV_WIRE_MAX_FDS];
	uint32_t count;
} kvc_frame_fds_t;

static kv_status_t fds_take(kvc_channel_t *channel, uint32_t count, kvc_frame_fds_t *fds)
{
	*fds = (kvc_frame_fds_t){.fd = {-1, -1, -1}};
	if (count > channel->fd_count || count > KV_WIRE_MAX_FDS) {
		return KV_ERR_PROTO;
	}
	for (uint32_t i = 0; i < count; i++) {
		fds->fd[i] = channel->fds[i];
	}
	fds->count = count;
	channel->fd_count -= count;
	memmove(channel->fds, channel->fds + count, channel->fd_count * sizeof channel->fds[0]);

	return KV_OK;
}

static void fds_close(const kvc_frame_fds_t *fds)
{
	for (uint32_t i = 0; i < fds->count; i++) {
		close(fds->fd[i]);
	}
}

/* A late answer, after its deadline: what it grants goes back. */
static void give_back(kvc_t *kvc, uint16_t code, const kv_msg_t *reply)
{
	if (code == KV_CODE_ACQUIRE && reply->acquire_reply.lease && kvc->backlog_len < KVC_MAX_BACKLOG) {
		kvc->backlog[kvc->backlog_len++] = reply->acquire_reply.lease;
	}
	if (code == KV_CODE_SPACE_OPEN) {
		kvc_space_give_back(kvc, reply->space_open_reply.space, NULL);
	}
	if (code == KV_CODE_PUT_START && reply->put_start_reply.put) {
		kv_msg_put_revoke_t msg = {.put = reply->put_start_reply.put};

		kv_msg_drained_t drained = {.what = 0, .id = reply->put_start_reply.put};

		kvc_send_oneway(kvc, KV_CODE_PUT_REVOKE, &msg);
		kvc_send_oneway(kvc, KV_CODE_DRAINED, &drained);
	}
	if (code == KV_CODE_HANDOVER_SEND || code == KV_CODE_HANDOVER_RECV) {
		kv_msg_handover_done_t msg = {.flags = KV_HANDOVER_ABORT};

		if (code == KV_CODE_HANDOVER_SEND) {
			msg.number = reply->handover_send_reply.number;
			msg.flags |= KV_HANDOVER_BY_PRODUCER;
		} else {
			msg.number = reply->handover_recv_reply.number;
		}
		kvc_send_oneway(kvc, KV_CODE_HANDOVER_DONE, &msg);
	}
}

/* JOIN is the one reply that carries descriptors: map them before its handler runs. */
static kv_status_t map_joined_memory(kvc_t *kvc, const kv_msg_join_reply_t *reply, const kvc_frame_fds_t *fds)
{
	kvc_join_fds_t three = {fds->fd[0], fds->fd[1], fds->fd[2]};
	kvc_map_t *map;
	kv_status_t status;

	if (fds->count != (kvc->role == KVC_ROLE_MATCH ? 1u : 3u)) {
		return KV_ERR_PROTO;
	}
	status = kvc_map_create(kvc, reply, &three, &map);
	if (status != KV_OK) {
		return status;
	}
	kvc_staging_reset(kvc);
	atomic_store(&kvc->map, map);

	return KV_OK;
}

static kv_status_t on_reply(kvc_t *kvc, const kv_frame_header_t *header, const uint8_t *body,
			    const kvc_frame_fds_t *fds)
{
	const kv_request_t *request = kv_request_find(header->code);
	kvc_pending_t *pending = kvc_pending_find(kvc, header->id);
	kvc_pending_t was;
	kv_msg_t msg;
	kv_slice_t text = {0};
	char detail[256];
	kvc_answer_t answer = {.status = (kv_status_t)header->status, .detail = detail};
	kv_status_t status;

	if (!request || (pending ? pending->code != header->code : header->id != KVC_ONEWAY_ID)) {
		return KV_ERR_PROTO;
	}
	if (header->status == KV_OK) {
		status = kv_body_decode(&request->reply, body, header->body, &msg, NULL);
		answer.reply = &msg;
	} else {
		status = kv_error_decode(body, header->body, &text);
	}
	if (status != KV_OK) {
		return status;
	}
	if (!pending) {
		return KV_OK; /* to what was only told */
	}
	snprintf(detail, sizeof detail, "%.*s", (int)text.len, (const char *)text.data);
	if (strcmp(detail, kv_status_text(answer.status)) == 0) {
		detail[0] = '\0'; /* nothing that the status does not say */
	}

	was = *pending;
	kvc_pending_free(kvc, pending);
	if (was.code == KV_CODE_JOIN && was.done && answer.reply) {
		status = map_joined_memory(kvc, &msg.join_reply, fds);
		if (status != KV_OK) {
			answer = (kvc_answer_t){.status = status,
						.detail = "the shared memory it handed out cannot be used"};
		}
	}
	if (was.done) {
		was.done(kvc, was.object, &answer);
	} else if (answer.reply) {
		give_back(kvc, was.code, answer.reply);
	}

	return KV_OK;
}

static kv_status_t on_notice(kvc_t *kvc, const kv_frame_header_t *header, const uint8_t *body,
			     const kvc_frame_fds_t *fds)
{
	const kv_request_t *notice = kv_request_find(header->code);
	kv_msg_t msg;
	kv_status_t status;

	if (!notice || notice->roles != KV_ROLE_NONE || kvc->state < KVC_OPEN) {
		return KV_ERR_PROTO;
	}
	status = kv_body_decode(&notice->ask, body, header->body, &msg, NULL);
	if (status != KV_OK) {
		return status;
	}

	switch (header->code) {
	case KV_CODE_SLAB_ADD:
		return fds->count == 2 ? kvc_slab_add(kvc, &msg.slab_add, fds->fd[0], fds->fd[1]) : KV_ERR_PROTO;
	case KV_CODE_DEVICE_ADD:
		return kvc_device_add(kvc, &msg.device_add);
	case KV_CODE_SLAB_RETIRE:
		kvc_slab_retire(kvc, msg.slab_retire.slab);
		break;
	case KV_CODE_LEASE_DONE:
		kvc_lease_notice(kvc, &msg.lease_done);
		break;
	case KV_CODE_PUT_DONE:
		kvc_put_notice_done(kvc, &msg.put_done);
		break;
	case KV_CODE_DURABLE:
		kvc_put_notice_durable(kvc, &msg.durable);
		break;
	case KV_CODE_HANDOVER:
		kvc_handover_notice(kvc, &msg.handover);
		break;
	case KV_CODE_HANDOVER_ROOM:
		kvc_handovers_note_room(kvc);
		break;
	default:
		return KV_ERR_PROTO;
	}

	return KV_OK;
}

kv_status_t kvc_dispatch(kvc_t *kvc, const kv_frame_header_t *header, const uint8_t *body)
{
	kvc_frame_fds_t fds;
	kv_status_t status = fds_take(&kvc->channel, header->fds, &fds);

	if (status != KV_OK) {
		return status;
	}
	if (header->kind == KV_FRAME_REPLY) {
		status = on_reply(kvc, header, body, &fds);
	} else if (header->kind == KV_FRAME_NOTICE) {
		status = on_notice(kvc, header, body, &fds);
	} else {
		status = KV_ERR_PROTO;
	}
	fds_close(&fds);

	return status;
}
