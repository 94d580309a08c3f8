/* Messages on a TLS connection. */
#include "net/stream.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define TURN_BYTES (1u << 20)            /* in each direction, before others have their turn */
#define WAKE_BYTES (UINT64_C(256) << 10) /* worth an iteration, where more than twice that many are still to come */

typedef struct header {
	kvd_envelope_t envelope; /* zero: the owner's answer */
	uint64_t bytes;
} header_t;

typedef struct push {
	struct push *next;
	void *object;
	header_t header;
	uint32_t run, count;
	size_t at; /* of the header, and then of the run */
	int is_begun;
	struct iovec runs[];
} push_t;

struct kvd_stream {
	const kvd_bytes_ops_t *ops;
	void *ctx;
	kvd_tls_t *tls;
	int fd, is_owner;
	kvd_stream_state_t state;
	kv_status_t status;
	uint64_t born_ns, silence_ns;
	push_t *pushes, **last; /* in their order */
	header_t header;        /* of what comes */
	size_t header_at;
	uint8_t *to;   /* where it lands; NULL: nobody wants it */
	uint64_t left; /* bytes of it that have not come */
	void *object;
	uint64_t sent, sent_ns; /* bytes that the socket has taken, and when it last took some, or none waited */
	int wake_bytes;         /* of the socket; 0: it is readable at the first one */
};

/* ---- the end --------------------------------------------------------------------------------- */

static void finish_landing(kvd_stream_t *stream, kv_status_t status)
{
	stream->header_at = 0;
	if (stream->to) {
		stream->to = NULL;
		stream->ops->landed(stream->ctx, stream->object, status);
	}
}

static void finish_push(kvd_stream_t *stream, kv_status_t status)
{
	push_t *push = stream->pushes;

	stream->pushes = push->next;
	stream->last = stream->pushes ? stream->last : &stream->pushes;
	if (push->object) {
		stream->ops->pushed(stream->ctx, push->object, status);
	}
	free(push);
}

static void end_stream(kvd_stream_t *stream, kv_status_t status)
{
	if (stream->state == KVD_STREAM_DEAD) {
		return;
	}
	stream->state = KVD_STREAM_DEAD;
	stream->status = status;
	close(stream->fd);
	stream->fd = -1;
	finish_landing(stream, KV_ERR_CLOSED);
	while (stream->pushes) {
		finish_push(stream, KV_ERR_CLOSED);
	}
}

/* ---- receiving ------------------------------------------------------------------------------- */

/* A header is there. */
static void begin_message(kvd_stream_t *stream)
{
	const header_t *header = &stream->header;

	if (stream->state == KVD_STREAM_WAITING) {
		static const header_t answer;

		if (memcmp(header, &answer, sizeof answer) != 0) {
			end_stream(stream, KV_ERR_PROTO);
			return;
		}
		stream->state = KVD_STREAM_OPEN;
	} else if (header->bytes == 0) {
		end_stream(stream, KV_ERR_PROTO);
		return;
	} else {
		stream->left = header->bytes;
		stream->to = stream->ops->land(stream->ctx, &header->envelope, header->bytes, &stream->object);
	}
	if (stream->left == 0) {
		finish_landing(stream, KV_OK);
	}
}

/* Bytes that came, or 0: none, or it has ended. */
static size_t receive_part(kvd_stream_t *stream)
{
	static uint8_t unwanted[16u << 10];
	const int is_header = stream->header_at < sizeof stream->header;
	uint8_t *to = is_header ? (uint8_t *)&stream->header + stream->header_at : stream->to ? stream->to : unwanted;
	size_t most = is_header ? sizeof stream->header - stream->header_at : sizeof unwanted, n = 0;
	kv_status_t status;

	if (!is_header && (stream->to || stream->left < most)) {
		most = stream->left;
	}
	status = kvd_tls_read(stream->tls, to, most, &n);
	if (status != KV_OK) {
		if (status != KV_PENDING) {
			end_stream(stream, status);
		}
		return 0;
	}
	if (stream->is_owner) {
		end_stream(stream, KV_ERR_PROTO); /* it has nothing to say here */
		return 0;
	}
	if (is_header) {
		stream->header_at += n;
		if (stream->header_at == sizeof stream->header) {
			begin_message(stream);
		}
		return n;
	}
	if (stream->to) {
		stream->to += n;
	}
	stream->left -= n;
	if (stream->left == 0) {
		finish_landing(stream, KV_OK);
	}

	return n;
}

/* In the middle of a message poll() need not return for each record. */
static void choose_wake(kvd_stream_t *stream)
{
	const int wanted = stream->left > 2 * WAKE_BYTES ? (int)WAKE_BYTES : 0;

	if (wanted != stream->wake_bytes) {
		stream->wake_bytes = wanted;
		(void)setsockopt(stream->fd, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
	}
}

/* ---- sending --------------------------------------------------------------------------------- */

/* Bytes that went, or 0: there is no room, or it has ended. */
static size_t send_part(kvd_stream_t *stream)
{
	push_t *push = stream->pushes;
	const uint8_t *from = push->is_begun ? push->runs[push->run].iov_base : (const void *)&push->header;
	const size_t len = push->is_begun ? push->runs[push->run].iov_len : sizeof push->header;
	size_t n = 0;
	kv_status_t status = kvd_tls_write(stream->tls, from + push->at, len - push->at, &n);

	if (status != KV_OK) {
		if (status != KV_PENDING) {
			end_stream(stream, status);
		}
		return 0;
	}
	push->at += n;
	if (push->at == len) {
		push->at = 0;
		push->run += push->is_begun != 0;
		push->is_begun = 1;
		if (push->run == push->count) {
			finish_push(stream, KV_OK);
		}
	}

	return n;
}

/* Nothing waits in the buffer for what is pushed later. */
static void flush(kvd_stream_t *stream)
{
	const kv_status_t status = kvd_tls_flush(stream->tls);

	if (status != KV_OK && status != KV_PENDING) {
		end_stream(stream, status);
	}
}

/* What waits for a peer that does not read keeps blocks and memory. */
static void check_sending(kvd_stream_t *stream, uint64_t now_ns)
{
	const uint64_t sent = kvd_tls_sent(stream->tls);

	if (sent != stream->sent || (!stream->pushes && !kvd_tls_wants_write(stream->tls))) {
		stream->sent = sent;
		stream->sent_ns = now_ns;
	} else if (now_ns > stream->sent_ns + stream->silence_ns) {
		end_stream(stream, KV_ERR_TIMEOUT);
	}
}

/* The owner's answer is a push without bytes; nobody hears of it. */
static kv_status_t queue(kvd_stream_t *stream, const header_t *header, const struct iovec *runs, uint32_t count,
			 void *object)
{
	push_t *push = calloc(1, sizeof *push + count * sizeof push->runs[0]);

	if (!push) {
		return KV_ERR_NOMEM;
	}
	push->header = *header;
	push->object = object;
	push->count = count;
	for (uint32_t i = 0; i < count; i++) {
		push->runs[i] = runs[i];
		push->header.bytes += runs[i].iov_len;
	}
	*stream->last = push;
	stream->last = &push->next;

	return KV_OK;
}

kv_status_t kvd_stream_push(kvd_stream_t *stream, const kvd_envelope_t *envelope, const struct iovec *runs,
			    uint32_t count, void *object)
{
	const header_t header = {.envelope = *envelope};

	return stream->state == KVD_STREAM_OPEN ? queue(stream, &header, runs, count, object) : KV_ERR_CLOSED;
}

/* ---- its life -------------------------------------------------------------------------------- */

kvd_stream_t *kvd_stream_open(const kvd_bytes_ops_t *ops, void *ctx, kvd_tls_t *tls, int fd, int is_owner,
			      uint64_t silence_ns)
{
	static const header_t answer;
	kvd_stream_t *stream = calloc(1, sizeof *stream);

	if (!stream) {
		kvd_tls_free(tls);
		close(fd);
		return NULL;
	}
	*stream = (kvd_stream_t){.ops = ops,
				 .ctx = ctx,
				 .tls = tls,
				 .fd = fd,
				 .is_owner = is_owner,
				 .state = is_owner ? KVD_STREAM_OPEN : KVD_STREAM_WAITING,
				 .silence_ns = silence_ns};
	stream->last = &stream->pushes;
	if (kvd_tls_buffer(tls, is_owner) != KV_OK || (is_owner && queue(stream, &answer, NULL, 0, NULL) != KV_OK)) {
		kvd_stream_free(stream);
		return NULL;
	}

	return stream;
}

void kvd_stream_free(kvd_stream_t *stream)
{
	if (stream) {
		end_stream(stream, KV_ERR_CLOSED);
		kvd_tls_free(stream->tls);
		free(stream);
	}
}

int kvd_stream_fd(const kvd_stream_t *stream)
{
	return stream->fd;
}

short kvd_stream_events(const kvd_stream_t *stream)
{
	return (short)(POLLIN | (stream->pushes || kvd_tls_wants_write(stream->tls) ? POLLOUT : 0));
}

int kvd_stream_progress(kvd_stream_t *stream, uint64_t now_ns)
{
	size_t n = 1, received = 0, sent = 0;

	if (stream->born_ns == 0) {
		stream->born_ns = stream->sent_ns = now_ns;
	}
	while (stream->state != KVD_STREAM_DEAD && received < TURN_BYTES && (n = receive_part(stream)) > 0) {
		received += n;
	}
	choose_wake(stream);
	while (stream->state != KVD_STREAM_DEAD && stream->pushes && sent < TURN_BYTES && (n = send_part(stream)) > 0) {
		sent += n;
	}
	if (stream->state != KVD_STREAM_DEAD) {
		flush(stream);
	}
	if (stream->state != KVD_STREAM_DEAD && stream->is_owner) {
		check_sending(stream, now_ns);
	}
	if (stream->state == KVD_STREAM_WAITING && now_ns > stream->born_ns + KVD_STREAM_ANSWER_NS) {
		end_stream(stream, KV_ERR_TIMEOUT);
	}

	return received >= TURN_BYTES || sent >= TURN_BYTES;
}

kvd_stream_state_t kvd_stream_state(const kvd_stream_t *stream)
{
	return stream->state;
}

kv_status_t kvd_stream_status(const kvd_stream_t *stream)
{
	return stream->status;
}

const char *kvd_stream_why(const kvd_stream_t *stream)
{
	return stream->status == KV_ERR_SECRET    ? "bytes of blocks were changed on their way"
	       : stream->status != KV_ERR_TIMEOUT ? kv_status_text(stream->status)
	       : stream->is_owner                 ? "the peer does not read the bytes that it asked for"
						  : "the peer does not answer on the connection for bytes";
}
