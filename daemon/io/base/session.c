/* A connection: what it is sent, what it counts for, how it is freed. */
#include "io/base/session.h"

#include "io/base/poller.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define HEADER sizeof(kv_frame_header_t)

struct ucred kvd_session_peer(int fd)
{
	struct ucred cred;
	socklen_t len = sizeof cred;

	return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) == 0 ? cred : (struct ucred){.uid = (uid_t)-1};
}

static int is_operator(uid_t uid)
{
	return uid == 0 || uid == geteuid();
}

int kvd_session_is_operator(const kvd_session_t *session)
{
	return is_operator(session->uid);
}

int kvd_peer_is_operator(int fd)
{
	return is_operator(kvd_session_peer(fd).uid);
}

static void update_session_metrics(kvd_host_t *host, const kvd_namespace_t *ns)
{
	kv_metric_set(&host->metrics, KV_M_SESSIONS, host->session_count);
	kv_ns_metric_set(&host->metrics, ns->id, KV_NM_SESSIONS, ns->used.sessions);
	kv_ns_metric_set(&host->metrics, ns->id, KV_NM_RECEIVE_BYTES, ns->used.receive);
}

/* Count the session's buffer, and with it the session. */
void kvd_session_count_in(kvd_host_t *host, kvd_session_t *session)
{
	host->session_count++;
	host->receive_bytes += session->in_cap;
	if (session->reserved) {
		host->reserved++;
	} else {
		session->ns->used.sessions++;
		session->ns->used.receive += session->in_cap;
	}
	update_session_metrics(host, session->ns);
}

void kvd_session_count_out(kvd_host_t *host, const kvd_session_t *session)
{
	host->session_count--;
	host->receive_bytes -= session->in_cap;
	if (session->reserved) {
		host->reserved--;
	} else {
		session->ns->used.sessions--;
		session->ns->used.receive -= session->in_cap;
	}
	update_session_metrics(host, session->ns);
}

void kvd_session_doom(kvd_host_t *host, kvd_session_t *session)
{
	session->doomed = 1;
	kvd_fair_add(&host->fair, &session->source, 0, session->source.since_ns); /* its request may be at work */
}

void kvd_session_close_fds(kvd_session_t *session)
{
	for (uint32_t i = 0; i < session->fd_count; i++) {
		if (session->fds[i] >= 0) {
			close(session->fds[i]);
		}
	}
	session->fd_count = 0;
}

void kvd_session_free(kvd_host_t *host, kvd_session_t *session)
{
	kv_log(KV_LOG_DEBUG, "io", "a connection has ended: session %llu namespace %s requests %llu",
	       (unsigned long long)session->id, session->ns->name, (unsigned long long)session->requests);
	if (host->hot == session) {
		host->hot = NULL;
	}
	if (host->expire_next == session) {
		host->expire_next = session->next;
	}
	kvd_fair_remove(&session->source);
	if (session->prev) {
		session->prev->next = session->next;
	} else {
		host->sessions = session->next;
	}
	if (session->next) {
		session->next->prev = session->prev;
	}
	kvd_poller_remove(host, &session->source);
	close(session->source.fd);
	kvd_session_close_fds(session);
	while (session->out) {
		kvd_out_t *next = session->out->next;
		free(session->out);
		session->out = next;
	}
	kvd_session_count_out(host, session);
	free(session->in);
	free(session);
}

/* ---- output ---------------------------------------------------------------------------------- */

/* Send what the socket takes from offset *p_done on. KV_PENDING: it is full; KV_ERR_CLOSED: the peer reads no more. */
static kv_status_t send_frame(int fd, const kv_frame_header_t *header, const uint8_t *body, const int *fds,
			      size_t *p_done)
{
	size_t total = HEADER + header->body;

	while (*p_done < total) {
		size_t sent = 0;
		kv_status_t status = kv_sock_send(fd, header, body, *p_done, *p_done == 0 ? fds : NULL, &sent);

		*p_done += sent;
		if (status != KV_OK) {
			return status;
		}
	}

	return KV_OK;
}

static void enqueue_frame(kvd_host_t *host, kvd_session_t *session, const kvd_out_t *head, const uint8_t *body)
{
	size_t bytes = sizeof(kvd_out_t) + head->header.body;
	kvd_out_t *out = NULL;

	if (session->out_bytes + bytes <= host->options->limits_send_queue) {
		out = malloc(bytes);
	}
	if (!out) {
		kv_metric_add(&host->metrics, KV_M_SEND_OVERFLOWS, 1);
		kv_log(KV_LOG_WARN, "io",
		       "a session does not read what it is sent and is closed: session %llu program %s queued %zu",
		       (unsigned long long)session->id, session->program, session->out_bytes);
		kvd_session_doom(host, session);
		return;
	}
	*out = *head;
	memcpy(out->body, body, head->header.body);
	*session->out_tail = out;
	session->out_tail = &out->next;
	if (session->out_bytes == 0) {
		kvd_poller_change(host, &session->source, EPOLLIN | EPOLLOUT);
	}
	session->out_bytes += bytes;
}

/* What was to be sent is lost. A peer that has gone misses nothing, and what it has sent still counts; one that is
 * there would wait for it. */
static void abandon_output(kvd_host_t *host, kvd_session_t *session, kv_status_t status)
{
	if (status == KV_ERR_CLOSED) {
		session->mute = 1;
		return;
	}
	kv_log(KV_LOG_WARN, "io",
	       "a frame cannot be sent and its session is closed: session %llu program %s why \"%s\"",
	       (unsigned long long)session->id, session->program, kv_status_text(status));
	kvd_session_doom(host, session);
}

void kvd_session_send(kvd_host_t *host, kvd_session_t *session, const kv_frame_header_t *header, const uint8_t *body,
		      const int *fds)
{
	kvd_out_t head = {.header = *header, .fds = {-1, -1, -1}};
	kv_status_t status = KV_PENDING;

	if (session->mute || session->doomed) {
		return;
	}
	for (uint32_t i = 0; fds && i < header->fds && i < KV_WIRE_MAX_FDS; i++) {
		head.fds[i] = fds[i];
	}
	if (!session->out) {
		status = send_frame(session->source.fd, header, body, head.fds, &head.done);
	}
	if (status == KV_PENDING) {
		enqueue_frame(host, session, &head, body);
	} else if (status != KV_OK) {
		abandon_output(host, session, status);
	}
}

void kvd_session_flush(kvd_host_t *host, kvd_session_t *session)
{
	while (session->out) {
		kvd_out_t *out = session->out;
		kv_status_t status = send_frame(session->source.fd, &out->header, out->body, out->fds, &out->done);

		if (status == KV_PENDING) {
			return;
		}
		if (status != KV_OK) {
			abandon_output(host, session, status);
		}
		if (session->doomed) {
			return;
		}
		session->out = out->next;
		session->out_bytes -= sizeof(kvd_out_t) + out->header.body;
		free(out);
	}
	session->out_tail = &session->out;
	kvd_poller_change(host, &session->source, EPOLLIN);
}

void kvd_session_drop_queued(kvd_session_t *session, const int fds[2])
{
	for (kvd_out_t **link = &session->out; *link;) {
		kvd_out_t *out = *link;

		/* Descriptors go with a frame's first byte. */
		if (out->done > 0 || out->fds[0] != fds[0] || out->fds[1] != fds[1]) {
			link = &out->next;
			continue;
		}
		*link = out->next;
		if (session->out_tail == &out->next) {
			session->out_tail = link;
		}
		session->out_bytes -= sizeof(kvd_out_t) + out->header.body;
		free(out);
	}
}

void kvd_session_notify(kvd_host_t *host, kvd_session_t *session, uint16_t code, const kv_msg_t *msg, const int *fds)
{
	const kv_request_t *notice = kv_request_find(code);
	kv_frame_header_t header = {.magic = KV_WIRE_MAGIC,
				    .version = KV_WIRE_VERSION,
				    .kind = KV_FRAME_NOTICE,
				    .code = code,
				    .fds = fds ? 2 : 0};
	uint8_t body[512];
	kv_status_t status = kv_body_encode(&notice->ask, msg, body, sizeof body, &header.body);

	kv_assert(status == KV_OK);
	kvd_session_send(host, session, &header, body, fds);
}
