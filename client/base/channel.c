/* Frames out, frames in, and the table of requests in flight. */
#include "impl.h"

#include <stdio.h>
#include <unistd.h>

#define KVC_IN_FIRST  65536u
#define KVC_OUT_FIRST 65536u
#define KVC_NONE      UINT32_MAX

uint64_t kvc_deadline(const kvc_t *kvc, uint32_t timeout_ms)
{
	return kv_now_ns(&kvc->env) + (timeout_ms ? timeout_ms * KVC_NS_A_MS : kvc->timeout_ns);
}

static void pending_reset(kvc_channel_t *channel)
{
	for (uint32_t i = 0; i < KVC_MAX_PENDING; i++) {
		channel->pending[i] = (kvc_pending_t){.next_free = i + 1u < KVC_MAX_PENDING ? i + 1u : KVC_NONE};
	}
	channel->free_pending = 0;
	channel->in_flight = 0;
	channel->next_deadline = UINT64_MAX;
}

kv_status_t kvc_channel_init(kvc_t *kvc)
{
	kvc_channel_t *channel = &kvc->channel;

	channel->fd = -1;
	channel->pending = kv_alloc(&kvc->env, sizeof(kvc_pending_t) * KVC_MAX_PENDING);
	if (!channel->pending) {
		return KV_ERR_NOMEM;
	}
	channel->in = kv_alloc(&kvc->env, KVC_IN_FIRST);
	if (!channel->in) {
		goto err_pending;
	}
	channel->out = kv_alloc(&kvc->env, KVC_OUT_FIRST);
	if (!channel->out) {
		goto err_in;
	}
	channel->in_cap = KVC_IN_FIRST;
	channel->out_cap = KVC_OUT_FIRST;
	pending_reset(channel);

	return KV_OK;

err_in:
	kv_free(&kvc->env, channel->in);
err_pending:
	kv_free(&kvc->env, channel->pending);
	*channel = (kvc_channel_t){.fd = -1};

	return KV_ERR_NOMEM;
}

void kvc_channel_fini(kvc_t *kvc)
{
	kvc_channel_t *channel = &kvc->channel;

	for (uint32_t i = 0; i < channel->fd_count; i++) {
		close(channel->fds[i]);
	}
	if (channel->fd >= 0) {
		close(channel->fd);
	}
	kv_free(&kvc->env, channel->out);
	kv_free(&kvc->env, channel->in);
	kv_free(&kvc->env, channel->pending);
	*channel = (kvc_channel_t){.fd = -1};
}

void kvc_channel_close(kvc_t *kvc, kv_status_t status)
{
	kvc_channel_t *channel = &kvc->channel;
	kvc_answer_t answer = {.status = status, .detail = ""};

	for (uint32_t i = 0; i < channel->fd_count; i++) {
		close(channel->fds[i]);
	}
	if (channel->fd >= 0) {
		close(channel->fd);
	}
	channel->fd = -1;
	channel->fd_count = 0;
	channel->in_len = 0;
	channel->out_head = channel->out_tail = channel->out_sent = 0;

	/* A handler may not ask anything new: the socket is closed. */
	for (uint32_t i = 0; i < KVC_MAX_PENDING && channel->in_flight; i++) {
		kvc_pending_t *pending = &channel->pending[i];
		kvc_pending_t was = *pending;

		if (was.id) {
			kvc_pending_free(kvc, pending);
			if (was.done) {
				was.done(kvc, was.object, &answer);
			}
		}
	}
	channel->next_deadline = UINT64_MAX;
}

/* ---- requests in flight ---------------------------------------------------------------------- */

static kvc_pending_t *pending_new(kvc_t *kvc, const kvc_ask_t *ask)
{
	kvc_channel_t *channel = &kvc->channel;
	uint32_t at = channel->free_pending;
	kvc_pending_t *pending;

	if (at == KVC_NONE) {
		return NULL;
	}
	pending = &channel->pending[at];
	channel->free_pending = pending->next_free;
	channel->in_flight++;
	/* The id names the entry and its use: a late answer to an earlier use finds another id there. */
	*pending = (kvc_pending_t){
		.id = ++channel->serial * KVC_MAX_PENDING + at,
		.deadline = ask->deadline ? ask->deadline : kvc_deadline(kvc, 0),
		.done = ask->done,
		.object = ask->object,
		.code = ask->code,
	};
	if (pending->deadline < channel->next_deadline) {
		channel->next_deadline = pending->deadline;
	}

	return pending;
}

void kvc_pending_free(kvc_t *kvc, kvc_pending_t *pending)
{
	kvc_channel_t *channel = &kvc->channel;

	*pending = (kvc_pending_t){.next_free = channel->free_pending};
	channel->free_pending = (uint32_t)(pending - channel->pending);
	channel->in_flight--;
}

kvc_pending_t *kvc_pending_find(kvc_t *kvc, uint64_t id)
{
	kvc_pending_t *pending = &kvc->channel.pending[id % KVC_MAX_PENDING];

	return id && pending->id == id ? pending : NULL;
}

void kvc_forget_requests(kvc_t *kvc, const void *object)
{
	/* The entries stay: their answers come, and must not be taken for those of other requests. */
	for (uint32_t i = 0; i < KVC_MAX_PENDING && kvc->channel.in_flight; i++) {
		kvc_pending_t *pending = &kvc->channel.pending[i];

		if (pending->id && pending->object == object) {
			pending->object = NULL;
			pending->done = NULL;
		}
	}
}

void kvc_expire(kvc_t *kvc, uint64_t now)
{
	kvc_channel_t *channel = &kvc->channel;
	kvc_answer_t answer = {.status = KV_ERR_TIMEOUT, .detail = "no answer in time", .expired = 1};
	uint64_t next = UINT64_MAX;

	if (now < channel->next_deadline) {
		return;
	}

	for (uint32_t i = 0; i < KVC_MAX_PENDING; i++) {
		kvc_pending_t *pending = &channel->pending[i];
		kvc_pending_t was = *pending;

		if (!was.id || was.deadline == UINT64_MAX) {
			continue;
		}
		if (now < was.deadline) {
			next = was.deadline < next ? was.deadline : next;
			continue;
		}

		/* The late answer is still expected; of PUT_END it says when the staging may be used again. */
		pending->deadline = UINT64_MAX;
		if (was.code != KV_CODE_PUT_END) {
			pending->done = NULL;
			pending->object = NULL;
		}
		kvc->news++;
		if (was.done) {
			kvc_count(&kvc->counters.timeouts, 1);
			was.done(kvc, was.object, &answer);
		}
		if (channel->fd < 0) {
			return; /* a handler has ended the session */
		}
	}
	channel->next_deadline = next;
}

/* ---- sending --------------------------------------------------------------------------------- */

/* Room for `need` more bytes at the tail. */
static kv_status_t out_reserve(kvc_t *kvc, size_t need)
{
	kvc_channel_t *channel = &kvc->channel;
	size_t used = channel->out_tail - channel->out_head;
	size_t cap = channel->out_cap;
	uint8_t *grown;

	if (channel->out_cap - channel->out_tail >= need) {
		return KV_OK;
	}
	if (channel->out_head) {
		memmove(channel->out, channel->out + channel->out_head, used);
		channel->out_head = 0;
		channel->out_tail = used;
	}
	if (channel->out_cap - used >= need) {
		return KV_OK;
	}
	/* A daemon that does not read: BUSY is a miss for the caller, an ever longer queue would be a leak. */
	if (used + need > KVC_MAX_OUT) {
		return KV_ERR_BUSY;
	}
	while (cap < used + need) {
		cap *= 2;
	}
	grown = kv_resize(&kvc->env, channel->out, channel->out_cap, cap);
	if (!grown) {
		return KV_ERR_NOMEM;
	}
	channel->out = grown;
	channel->out_cap = cap;

	return KV_OK;
}

/* Send from the queue; `fd` goes with the first byte. */
static kv_status_t out_send(kvc_t *kvc, int fd)
{
	kvc_channel_t *channel = &kvc->channel;

	while (channel->out_head < channel->out_tail) {
		kv_frame_header_t header;
		size_t sent = 0;
		kv_status_t status;

		memcpy(&header, channel->out + channel->out_head, sizeof header);
		status = kv_sock_send(channel->fd, &header, channel->out + channel->out_head + sizeof header,
				      channel->out_sent, fd >= 0 ? &fd : NULL, &sent);
		if (status != KV_OK && status != KV_PENDING) {
			return KV_ERR_CLOSED;
		}
		channel->out_sent += sent;
		if (channel->out_sent < sizeof header + header.body) {
			if (status == KV_PENDING || sent == 0) {
				return KV_PENDING;
			}
			continue;
		}
		channel->out_head += sizeof header + header.body;
		channel->out_sent = 0;
	}
	channel->out_head = channel->out_tail = 0;

	return KV_OK;
}

kv_status_t kvc_flush(kvc_t *kvc)
{
	kvc_channel_t *channel = &kvc->channel;

	if (channel->fd < 0) {
		return KV_ERR_CLOSED;
	}

	return channel->out_head == channel->out_tail ? KV_OK : out_send(kvc, -1);
}

kv_status_t kvc_send(kvc_t *kvc, const kvc_ask_t *ask)
{
	kvc_channel_t *channel = &kvc->channel;
	const kv_request_t *request = kv_request_find(ask->code);
	kv_frame_header_t header = {
		.magic = KV_WIRE_MAGIC, .version = KV_WIRE_VERSION, .kind = KV_FRAME_REQUEST, .code = ask->code};
	kvc_pending_t *pending = NULL;
	size_t size;
	kv_status_t status;

	if (channel->fd < 0) {
		return KV_ERR_CLOSED;
	}
	if (!kv_holds(request && (ask->fd < 0 || channel->out_head == channel->out_tail))) {
		return KV_ERR_INTERNAL;
	}
	size = kv_body_size(&request->ask, ask->msg);
	if (size > channel->max_body) {
		return KV_ERR_TOO_BIG;
	}
	status = out_reserve(kvc, sizeof header + size);
	if (status != KV_OK) {
		return status;
	}
	status = kv_body_encode(&request->ask, ask->msg, channel->out + channel->out_tail + sizeof header, size,
				&header.body);
	if (status != KV_OK) {
		return status;
	}
	if (ask->done) {
		pending = pending_new(kvc, ask);
		if (!pending) {
			return KV_ERR_BUSY;
		}
	}

	header.id = pending ? pending->id : KVC_ONEWAY_ID;
	header.fds = ask->fd >= 0;
	memcpy(channel->out + channel->out_tail, &header, sizeof header);
	channel->out_tail += sizeof header + header.body;

	/* A socket that has gone is noticed by the next receive, which ends the session; the request ends with it. */
	(void)out_send(kvc, ask->fd);

	return KV_OK;
}

void kvc_send_oneway(kvc_t *kvc, uint16_t code, const void *msg)
{
	kvc_ask_t ask = {.code = code, .msg = msg, .fd = -1};

	/* When it cannot even be queued the session is over or hung; its end says the same and more. */
	(void)kvc_send(kvc, &ask);
}

/* ---- receiving ------------------------------------------------------------------------------- */

static kv_status_t in_reserve(kvc_t *kvc)
{
	kvc_channel_t *channel = &kvc->channel;
	size_t cap = channel->in_cap * 2;
	uint8_t *grown;

	if (channel->in_len < channel->in_cap) {
		return KV_OK;
	}
	if (cap > 2u * (size_t)KV_WIRE_MAX_BODY) {
		return KV_ERR_TOO_BIG;
	}
	grown = kv_resize(&kvc->env, channel->in, channel->in_cap, cap);
	if (!grown) {
		return KV_ERR_NOMEM;
	}
	channel->in = grown;
	channel->in_cap = cap;

	return KV_OK;
}

/* Hand on every whole frame in the buffer and move the rest to its front. */
static kv_status_t in_frames(kvc_t *kvc, kvc_frame_fn frame)
{
	kvc_channel_t *channel = &kvc->channel;
	size_t at = 0;

	while (channel->in_len - at >= sizeof(kv_frame_header_t)) {
		kv_frame_header_t header;
		kv_status_t status;

		memcpy(&header, channel->in + at, sizeof header);
		status = kv_frame_check(&header, KV_WIRE_MAX_BODY);
		if (status != KV_OK) {
			return status;
		}
		if (channel->in_len - at - sizeof header < header.body) {
			break;
		}
		kvc->news++;
		status = frame(kvc, &header, channel->in + at + sizeof header);
		if (status != KV_OK) {
			return status;
		}
		if (channel->fd < 0) {
			return KV_OK; /* a handler has ended the session: the buffer is empty */
		}
		at += sizeof header + header.body;
	}
	if (at) {
		memmove(channel->in, channel->in + at, channel->in_len - at);
		channel->in_len -= at;
	}

	return KV_OK;
}

static kv_status_t take_fds(kvc_channel_t *channel, const int *fds, uint32_t count)
{
	if (count == UINT32_MAX) {
		return KV_ERR_PROTO;
	}
	if (channel->fd_count + count > KVC_MAX_FDS_QUEUED) {
		for (uint32_t i = 0; i < count; i++) {
			close(fds[i]);
		}
		return KV_ERR_PROTO;
	}
	for (uint32_t i = 0; i < count; i++) {
		channel->fds[channel->fd_count++] = fds[i];
	}

	return KV_OK;
}

kv_status_t kvc_receive(kvc_t *kvc, kvc_frame_fn frame)
{
	kvc_channel_t *channel = &kvc->channel;
	kv_status_t status = KV_OK;

	/* Bounded: a daemon that never stops talking does not hold the caller. */
	for (uint32_t round = 0; round < 64u && channel->fd >= 0; round++) {
		int fds[KV_WIRE_MAX_FDS];
		uint32_t fd_count = 0;
		size_t room, len = 0;

		status = in_reserve(kvc);
		if (status != KV_OK) {
			return status;
		}
		room = channel->in_cap - channel->in_len;
		status = kv_sock_recv(channel->fd, channel->in + channel->in_len, room, &len, fds, &fd_count);
		if (status != KV_OK) {
			return status == KV_PENDING ? KV_OK : KV_ERR_CLOSED;
		}
		channel->in_len += len;
		status = take_fds(channel, fds, fd_count);
		if (status == KV_OK) {
			status = in_frames(kvc, frame);
		}
		if (status != KV_OK || (len < room && fd_count == 0)) {
			return status;
		}
	}

	return status;
}
