/* From bytes to frames: sessions opened, read within their limits, ended. */
#include "io/sessions/receive.h"

#include "io/sessions/join.h"
#include "io/members/mirror.h"
#include "io/base/poller.h"
#include "io/sessions/accepting.h"
#include "io/sessions/request.h"

#include "kvs/pool.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define IN_SMALL 16384u
#define IN_KEEP  262144u             /* a larger buffer is given back when it is empty */
#define EXPIRES  64u                 /* sessions looked at in a row */
#define LOG_NS   UINT64_C(100000000) /* between two lines about refused frames of one namespace */
#define HEADER   sizeof(kv_frame_header_t)

static int session_ready(kvd_host_t *host, kvd_source_t *source, uint32_t events);

/* Is there room in its namespace's part, or in the operators' reserve? What a tenant takes never keeps an operator out
 * (decision 026). */
static int has_room(const kvd_host_t *host, kvd_session_t *session)
{
	const kvd_part_t *used = &session->ns->used;

	if (used->sessions < host->part.sessions && used->receive + IN_SMALL <= host->part.receive) {
		return 1;
	}
	session->reserved = kvd_session_is_operator(session) && host->reserved < KVD_RESERVED_SESSIONS;

	return session->reserved;
}

void kvd_session_open(kvd_host_t *host, kvd_namespace_t *ns, int fd)
{
	kvd_session_t *session = calloc(1, sizeof *session);
	struct ucred peer;

	if (!session) {
		goto err_close;
	}
	peer = kvd_session_peer(fd);
	session->source = (kvd_source_t){.ready = session_ready, .fd = fd, .flow = &ns->flow};
	session->ns = ns;
	session->pid = peer.pid;
	session->uid = peer.uid;
	session->in = has_room(host, session) ? malloc(IN_SMALL) : NULL;
	if (!session->in) {
		goto err_free;
	}
	session->in_cap = IN_SMALL;
	session->id = ++host->next_session;
	session->roles = KV_ROLE_ANY;
	session->opened_ns = kv_now_ns(host->env);
	kv_log(KV_LOG_DEBUG, "io", "a connection is open: session %llu namespace %s pid %d uid %u",
	       (unsigned long long)session->id, ns->name, (int)session->pid, (unsigned)session->uid);
	session->out_tail = &session->out;
	session->runs_beside = kv_sock_peer_runs_beside(fd);
	(void)kv_sock_ask_sender(fd); /* without it no member is proved, and joins are refused */
	if (kvd_poller_add(host, &session->source, EPOLLIN) != KV_OK) {
		goto err_free_in;
	}

	session->next = host->sessions;
	if (host->sessions) {
		host->sessions->prev = session;
	}
	host->sessions = session;
	kvd_session_count_in(host, session);
	kv_metric_add(&host->metrics, KV_M_SESSIONS_OPENED, 1);
	return;

err_free_in:
	free(session->in);
err_free:
	free(session);
err_close:
	kv_metric_add(&host->metrics, KV_M_SESSIONS_REFUSED, 1);
	kv_ns_metric_add(&host->metrics, ns->id, KV_NM_SESSIONS_REFUSED, 1);
	close(fd);
}

static void session_end(kvd_host_t *host, kvd_session_t *session)
{
	if (session->member) {
		kvd_member_entry_close(host, session->member);
	}
	kvd_session_free(host, session);
}

void kvd_sessions_fini(kvd_host_t *host)
{
	while (host->sessions) {
		session_end(host, host->sessions);
	}
}

/* A line is written at once, and a namespace can have any number of frames refused. */
static void log_refusal(kvd_host_t *host, kvd_session_t *session, kv_status_t status)
{
	kvd_namespace_t *ns = session->ns;
	uint64_t now = kv_now_ns(host->env);

	if (now - ns->refusal_logged_ns < LOG_NS) {
		ns->refusals_unlogged++;
		return;
	}
	kv_log(KV_LOG_INFO, "io",
	       "a session is closed over a frame: session %llu program %s why \"%s\" namespace %s unlogged %llu",
	       (unsigned long long)session->id, session->program, kv_status_text(status), ns->name,
	       (unsigned long long)ns->refusals_unlogged);
	ns->refusal_logged_ns = now;
	ns->refusals_unlogged = 0;
}

/* The peer has broken the protocol, or there is no room for its frame: count, say why if its header can be trusted,
 * end. */
static void refuse_frame(kvd_host_t *host, kvd_session_t *session, const kv_frame_header_t *header, kv_status_t status)
{
	kv_metric_t metric = status == KV_ERR_VERSION   ? KV_M_FRAMES_VERSION
			     : status == KV_ERR_TOO_BIG ? KV_M_FRAMES_TOO_BIG
			     : status == KV_ERR_BUSY    ? KV_M_FRAMES_NO_ROOM
							: KV_M_FRAMES_BAD;

	kv_metric_add(&host->metrics, metric, 1);
	log_refusal(host, session, status);
	if (header && header->magic == KV_WIRE_MAGIC) {
		kvd_call_t call = {.session = session, .header = header, .reply_fds = {-1, -1, -1}};

		if (status == KV_ERR_VERSION) {
			call.detail = "client and daemon are of different builds: use the libkvc of kvd " KVD_VERSION
				      " in the client and start it again";
		}
		kvd_request_reply(host, &call, status);
	}
	kvd_session_doom(host, session);
}

/* A whole frame at in_off? KV_PENDING: not yet; *p_need is its length as far as it is known. Other values: it is
 * bad. */
static kv_status_t check_next_frame(const kvd_session_t *session, kv_frame_header_t *header, size_t *p_need)
{
	size_t have = session->in_len - session->in_off;
	uint32_t limit = session->state == KVD_SESSION_NEW ? KV_WIRE_MAX_BODY_BEFORE_HELLO : KV_WIRE_MAX_BODY;
	kv_status_t status;

	*p_need = HEADER;
	if (have < HEADER) {
		return KV_PENDING;
	}
	memcpy(header, session->in + session->in_off, HEADER);
	status = kv_frame_check(header, limit);
	if (status != KV_OK) {
		return status;
	}
	if (header->kind != KV_FRAME_REQUEST || (header->fds > 0 && header->code != KV_CODE_JOIN) ||
	    header->fds > session->fd_count) {
		return KV_ERR_PROTO;
	}
	*p_need = HEADER + header->body;

	return have < *p_need ? KV_PENDING : KV_OK;
}

/* 1: what the frame asks for is being touched at this moment, for the first client of a namespace or a space. */
static int waits_for_memory(kvd_host_t *host, const kvd_session_t *session, const kv_frame_header_t *header)
{
	return (header->code == KV_CODE_JOIN && kvd_mirror_touch(session->ns) == KV_PENDING) ||
	       (header->code == KV_CODE_PUT_START && kvs_pool_is_warming(host->cpu));
}

/* Handle whole frames until the quantum is over, at least one and at most *p_left. KV_OK: there are more; KV_PENDING:
 * all are done, `need` bytes make the next. */
static kv_status_t handle_frames(kvd_host_t *host, kvd_session_t *session, uint32_t *p_left, size_t *p_need)
{
	const uint64_t limit = host->options->limits_frames_quantum;
	kv_frame_header_t header = {0};
	kv_status_t status;

	while ((status = check_next_frame(session, &header, p_need)) == KV_OK && *p_left > 0 &&
	       (*p_left == limit || kv_now_ns(host->env) < host->fair.until_ns)) {
		const uint8_t *body = session->in + session->in_off + HEADER;

		if (waits_for_memory(host, session, &header)) {
			session->parked = host->parked = 1;
			break;
		}
		(*p_left)--;
		host->frames++;
		status = kvd_request_handle(host, session, &header, body);
		session->in_off += *p_need;
		session->partial_ns = 0;
		if (header.fds > 0) {
			kvd_session_close_fds(session);
		}
		if (status != KV_OK || session->doomed) {
			break;
		}
	}
	if (session->doomed) {
		return KV_ERR_CLOSED;
	}
	if (status != KV_OK && status != KV_PENDING) {
		refuse_frame(host, session, &header, status);
	}

	return status;
}

/* Make room for the frame at in_off, growing with what has come. */
static kv_status_t make_room(kvd_host_t *host, kvd_session_t *session, size_t need)
{
	size_t have = session->in_len - session->in_off;
	size_t cap = session->in_cap;

	if (have == 0 && cap > IN_KEEP) {
		cap = IN_SMALL;
	} else if (have == cap && need > cap) {
		cap = need < 2 * cap ? need : 2 * cap;
	}
	if (session->in_off > 0) {
		memmove(session->in, session->in + session->in_off, have);
		session->in_off = 0;
		session->in_len = have;
	}
	if (cap == session->in_cap) {
		return KV_OK;
	}
	if (cap > session->in_cap &&
	    (session->reserved || session->ns->used.receive + cap - session->in_cap > host->part.receive)) {
		return KV_ERR_BUSY;
	}
	uint8_t *in = realloc(session->in, cap);
	if (!in) {
		return cap < session->in_cap ? KV_OK : KV_ERR_NOMEM;
	}
	kvd_session_count_out(host, session);
	session->in = in;
	session->in_cap = cap;
	kvd_session_count_in(host, session);

	return KV_OK;
}

/* One receive. KV_OK: the buffer is full, there may be more; KV_PENDING: that was all. */
static kv_status_t receive_bytes(kvd_session_t *session)
{
	size_t room = session->in_cap - session->in_len;
	size_t len = 0;
	kv_sock_extra_t extra = {.fds = {-1, -1, -1}};
	kv_status_t status = kv_sock_recv_from(session->source.fd, session->in + session->in_len, room, &len, &extra);

	if (status != KV_OK) {
		return status;
	}
	session->in_len += len;
	if (extra.fd_count == UINT32_MAX) {
		return KV_ERR_PROTO;
	}
	for (uint32_t i = 0; i < extra.fd_count; i++) {
		if (session->fd_count < KV_WIRE_MAX_FDS) {
			session->fds_sender =
				session->fd_count == 0 || session->fds_sender == extra.sender ? extra.sender : 0;
			session->fds[session->fd_count++] = extra.fds[i];
		} else {
			close(extra.fds[i]);
			status = KV_ERR_PROTO;
		}
	}
	if (status != KV_OK) {
		return status;
	}

	return len == room ? KV_OK : KV_PENDING;
}

/* Nothing more comes. A frame that was cut off is a broken one. */
static void handle_end_of_file(kvd_host_t *host, kvd_session_t *session)
{
	if (session->in_len > session->in_off && !session->doomed) {
		kv_metric_add(&host->metrics, KV_M_FRAMES_BAD, 1);
	}
	kvd_session_doom(host, session);
}

/* All whole frames are handled: what is left must be the beginning of one. */
static void finish_reading(kvd_host_t *host, kvd_session_t *session)
{
	if (session->in_off == session->in_len) {
		session->in_off = session->in_len = 0;
		session->partial_ns = 0;
		if (session->fd_count > 0) {
			kvd_session_close_fds(session);
			refuse_frame(host, session, NULL, KV_ERR_PROTO);
		}
	} else if (session->partial_ns == 0) {
		session->partial_ns = kv_now_ns(host->env);
	}
}

/* The buffer cannot be filled: the peer has ended, or what it sends is not taken. */
static void stop_reading(kvd_host_t *host, kvd_session_t *session, kv_status_t status, size_t need)
{
	kv_frame_header_t header = {0};

	if (status == KV_ERR_CLOSED) {
		handle_end_of_file(host, session);
		return;
	}
	memcpy(&header, session->in + session->in_off,
	       need > HEADER ? HEADER : 0); /* known as soon as it asks for room */
	refuse_frame(host, session, &header, status);
}

int kvd_session_read(kvd_host_t *host, kvd_session_t *session)
{
	uint32_t left = (uint32_t)host->options->limits_frames_quantum;
	size_t need = HEADER;
	kv_status_t filled = KV_PENDING, more = handle_frames(host, session, &left, &need);

	if (more == KV_PENDING) {
		filled = make_room(host, session, need);
		filled = filled == KV_OK ? receive_bytes(session) : filled;
		if (filled != KV_OK && filled != KV_PENDING) {
			stop_reading(host, session, filled, need);
			return 0;
		}
		more = handle_frames(host, session, &left, &need);
	}
	if (session->doomed) {
		return 0;
	}
	session->backlog = more == KV_OK;
	if (more == KV_PENDING) {
		finish_reading(host, session);
	}

	return !session->parked && (session->backlog || filled == KV_OK);
}

void kvd_sessions_unpark(kvd_host_t *host)
{
	host->parked = 0;
	for (kvd_session_t *session = host->sessions; session; session = session->next) {
		if (session->parked) {
			session->parked = 0;
			kvd_fair_add(&host->fair, &session->source, EPOLLIN, kv_now_ns(host->env));
		}
	}
}

static int session_ready(kvd_host_t *host, kvd_source_t *source, uint32_t events)
{
	kvd_session_t *session = (kvd_session_t *)source;
	int more = 0;

	if (session->doomed) {
		session_end(host, session);
		kvd_accepting_resume(host);
		return 0;
	}
	if (source->silent) {
		kvd_poller_change(host, source, session->out ? EPOLLIN | EPOLLOUT : EPOLLIN);
	}
	if (events & EPOLLOUT) {
		kvd_session_flush(host, session);
	}
	if (!session->doomed && (events != EPOLLOUT || session->backlog)) {
		more = kvd_session_read(host, session);
		host->hot = session;
	}

	return more && !session->doomed;
}

int kvd_sessions_expire(kvd_host_t *host, uint64_t now_ns)
{
	kvd_session_t *session = host->expire_next ? host->expire_next : host->sessions;

	for (uint32_t i = 0; i < EXPIRES && session; i++, session = session->next) {
		int slow_hello = session->state == KVD_SESSION_NEW &&
				 now_ns - session->opened_ns > host->options->limits_hello_time;
		int slow_frame = session->partial_ns != 0 && now_ns > session->partial_ns &&
				 now_ns - session->partial_ns > host->options->limits_frame_time;

		/* What is queued waits for us. */
		if (!session->doomed && !session->source.queued && (slow_hello || slow_frame)) {
			kv_metric_add(&host->metrics, KV_M_IDLE_CLOSED, 1);
			kvd_session_doom(host, session);
		}
	}
	host->expire_next = session;

	return session != NULL;
}
