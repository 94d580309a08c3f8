/* daemon/io/sessions/request.h -- one decoded request, and its reply. */
#ifndef KVD_IO_SESSIONS_REQUEST_H
#define KVD_IO_SESSIONS_REQUEST_H

#include "io/base/session.h"

/* A request on its way. */
typedef struct kvd_call {
	kvd_session_t *session;
	const kv_frame_header_t *header;
	const kv_msg_t *ask;
	kv_msg_t *reply;
	int *fds; /* that came with it, fd_count of them; who takes one stores -1 */
	uint32_t fd_count;
	int reply_fds[KV_WIRE_MAX_FDS]; /* borrowed, -1 ends the list */
	const char *detail;             /* sentence for an error reply, or NULL */
} kvd_call_t;

/* A whole frame: check, decode, do, answer. Returns KV_OK when the session goes on. */
kv_status_t kvd_request_handle(kvd_host_t *host, kvd_session_t *session, const kv_frame_header_t *header,
			       const uint8_t *body);
/* Send the reply (or error) of `status` to a frame. */
void kvd_request_reply(kvd_host_t *host, const kvd_call_t *call, kv_status_t status);
/* A late answer: of the core (SPACE_RESET, WITHDRAW), of the net process (FETCH). */
void kvd_request_reply_late(void *ctx, kvd_member_t member, uint16_t code, uint64_t frame_id, kv_status_t status,
			    const kv_msg_t *reply);

#endif
