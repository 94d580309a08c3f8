/* One frame: check the role, decode, do, answer. */
#include "io/sessions/request.h"

#include "io/sessions/join.h"
#include "io/members/member_table.h"
#include "io/members/slabs.h"
#include "io/sessions/net.h"
#include "io/sessions/document.h"
#include "io/sessions/space.h"

/* A request before HELLO, HELLO twice, a member's request from somebody else. */
static kv_status_t check_role(const kvd_session_t *session, const kv_request_t *request)
{
	if (request->roles == KV_ROLE_NONE) {
		return KV_ERR_UNKNOWN_REQUEST;
	}
	if ((session->state == KVD_SESSION_NEW) != (request->code == KV_CODE_HELLO)) {
		return KV_ERR_PROTO;
	}
	if (request->roles & session->roles) {
		return KV_OK;
	}

	if (request->roles & KV_ROLE_MEMBER) {
		return session->matching ? KV_ERR_PIDFD_REQUIRED : KV_ERR_NOT_JOINED;
	}

	return KV_ERR_NOT_PERMITTED;
}

static kv_status_t handle_hello(kvd_host_t *host, kvd_call_t *call)
{
	const kv_msg_hello_t *ask = &call->ask->hello;
	kvd_session_t *session = call->session;
	size_t len = ask->program.len < sizeof session->program ? ask->program.len : sizeof session->program - 1;

	if (ask->version != KV_WIRE_VERSION) {
		return KV_ERR_VERSION;
	}
	memcpy(session->program, ask->program.data, len);
	session->state = KVD_SESSION_OPEN;
	session->roles |= KV_ROLE_CLIENT;
	if (kvd_session_is_operator(session)) {
		session->roles |= KV_ROLE_OPERATOR;
	}
	call->reply->hello_reply = (kv_msg_hello_reply_t){
		.version = KV_WIRE_VERSION,
		.features = 0,
		.incarnation = host->incarnation,
		.ns = kv_slice_str(session->ns->name),
		.max_frame = KV_WIRE_MAX_BODY,
	};

	return KV_OK;
}

static kv_status_t ask_core(kvd_host_t *host, kvd_call_t *call)
{
	const kvd_session_t *session = call->session;
	kvd_ask_t ask = {.ns = session->ns->id,
			 .member = session->member ? kvd_member_entry_id(session->member) : 0,
			 .code = call->header->code,
			 .frame_id = call->header->id,
			 .msg = call->ask};
	kv_status_t status = kvd_core_request(host->core, &ask, call->reply, &call->detail);

	kvd_commit_events(host);
	/* Events go out as one batch a call, and slabs that the call has carved are announced before its reply can name
	 * a slot of them. */
	kvd_slabs_announce(host);
	if (call->header->code == KV_CODE_DRAINED && status == KV_OK) {
		kvd_member_entry_set_drained(host, session->member, &call->ask->drained);
	}

	return status;
}

static kv_status_t dispatch_request(kvd_host_t *host, kvd_call_t *call)
{
	switch (call->header->code) {
	case KV_CODE_HELLO:
		return handle_hello(host, call);
	case KV_CODE_JOIN:
		return kvd_request_join(host, call);
	case KV_CODE_SPACE_OPEN:
		return kvd_request_space_open(host, call);
	case KV_CODE_STATUS:
	case KV_CODE_STATS:
	case KV_CODE_CHECK:
	case KV_CODE_CONFIG:
	case KV_CODE_TRANSFERS:
	case KV_CODE_PEERS:
		return kvd_request_document(host, call);
	case KV_CODE_FETCH:
		return kvd_request_fetch(host, call);
	default:
		return ask_core(host, call);
	}
}

/* Statuses after which the two sides no longer understand each other. */
static int is_fatal(kv_status_t status)
{
	return status == KV_ERR_PROTO || status == KV_ERR_VERSION || status == KV_ERR_TOO_BIG ||
	       status == KV_ERR_UNKNOWN_REQUEST;
}

kv_status_t kvd_request_handle(kvd_host_t *host, kvd_session_t *session, const kv_frame_header_t *header,
			       const uint8_t *body)
{
	uint64_t start = kv_now_ns(host->env), now;
	const kv_request_t *request = kv_request_find(header->code);
	const kv_field_t *bad = NULL;
	kvd_call_t call = {.session = session,
			   .header = header,
			   .ask = &host->ask,
			   .reply = &host->reply,
			   .fds = session->fds,
			   .fd_count = header->fds,
			   .reply_fds = {-1, -1, -1}};
	kv_status_t status = request ? check_role(session, request) : KV_ERR_UNKNOWN_REQUEST;

	session->requests++;
	kv_metric_add(&host->metrics, KV_M_REQUESTS, 1);
	if (is_fatal(status)) {
		return status;
	}
	if (status == KV_OK) {
		status = kv_body_decode(&request->ask, body, header->body, &host->ask, &bad);
		if (status != KV_OK) {
			return status;
		}
		memset(&host->reply, 0, sizeof host->reply);
		status = dispatch_request(host, &call);
	}
	if (status == KV_PENDING) {
		return KV_OK;
	}
	if (header->code == KV_CODE_HELLO && status != KV_OK) {
		return status;
	}
	kvd_request_reply(host, &call, status);
	if (header->code == KV_CODE_JOIN && status == KV_OK) {
		kvd_slabs_announce_to(host, session);
	}
	now = kv_now_ns(host->env);
	kv_metric_observe_ns(&host->metrics, KV_M_REQUEST_TIME, now - start);
	kv_metric_observe_ns(&host->metrics, KV_M_ANSWER_TIME, now - session->source.since_ns);

	return KV_OK;
}
