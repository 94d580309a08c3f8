/* Replies to requests, at once and late. */
#include "io/members/member_table.h"
#include "io/sessions/request.h"

void kvd_request_reply(kvd_host_t *host, const kvd_call_t *call, kv_status_t status)
{
	kv_frame_header_t header = {.magic = KV_WIRE_MAGIC,
				    .version = KV_WIRE_VERSION,
				    .kind = KV_FRAME_REPLY,
				    .code = call->header->code,
				    .id = call->header->id};

	if (status == KV_OK) {
		const kv_request_t *request = kv_request_find(call->header->code);
		status = kv_body_encode(&request->reply, call->reply, host->frame, KVD_FRAME_SCRATCH, &header.body);
	}
	if (status == KV_OK) {
		while (header.fds < KV_WIRE_MAX_FDS && call->reply_fds[header.fds] >= 0) {
			header.fds++;
		}
	} else {
		const char *detail = call->detail ? call->detail : kv_status_text(status);

		kv_metric_add(&host->metrics, KV_M_REQUESTS_FAILED, 1);
		kv_log(KV_LOG_DEBUG, "io",
		       "a request is refused: session %llu namespace %s pid %d request 0x%x status %s detail \"%s\"",
		       (unsigned long long)call->session->id, call->session->ns->name, (int)call->session->pid,
		       call->header->code, kv_status_name(status), detail);
		if (kv_error_encode(detail, host->frame, KVD_FRAME_SCRATCH, &header.body) != KV_OK) {
			header.body = 0;
		}
	}
	header.status = status;
	kvd_session_send(host, call->session, &header, host->frame, call->reply_fds);
}

void kvd_request_reply_late(void *ctx, kvd_member_t member, uint16_t code, uint64_t frame_id, kv_status_t status,
			    const kv_msg_t *reply)
{
	kvd_host_t *host = ctx;
	kvd_session_t *session = kvd_member_entry_session(kvd_member_entry_find(host, member));
	kv_frame_header_t header = {.code = code, .id = frame_id};

	if (session) {
		kvd_call_t call = {.session = session,
				   .header = &header,
				   .reply = (kv_msg_t *)(uintptr_t)reply,
				   .reply_fds = {-1, -1, -1}};
		kvd_request_reply(host, &call, status);
	}
}
