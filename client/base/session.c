/* The states of a session: connect, HELLO, JOIN, spaces opened again, ready; and back to the start when the daemon has
 * gone. Who lives in it is told by kvc_events_t. */
#include "impl.h"

#include "kv/system.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

kvc_status_t kvc_detached(const kvc_t *kvc)
{
	kv_status_t status = kvc->why_detached == KV_OK ? KV_ERR_CLOSED : kvc->why_detached;

	if (!kvc->why_text[0]) {
		return kvc_fail(status, "the session with kvd at %s is being opened again", kvc->socket);
	}

	return kvc_fail(status, "%s", kvc->why_text);
}

/* ---- losing a session ------------------------------------------------------------------------ */

/* A daemon without room for a session closes the connection: it has read no request that it could answer. */
static const char *closed_text(const kvc_t *kvc)
{
	return kvc->state == KVC_HELLO
		       ? "it has closed the connection at once: is limits.sessions (a namespace may have an equal part) or "
			 "its limit of descriptors reached? raise it, or end some"
		       : "it has closed the connection";
}

static void back_off(kvc_t *kvc)
{
	kvc->next_try_ns = kv_now_ns(&kvc->env) + kvc->backoff_ns;
	kvc->backoff_ns = kvc->backoff_ns * 2 < KVC_BACKOFF_MAX_NS ? kvc->backoff_ns * 2 : KVC_BACKOFF_MAX_NS;
}

void kvc_session_lost(kvc_t *kvc, kv_status_t status, const char *why)
{
	if (kvc->state == KVC_DETACHED) {
		return;
	}
	/* A daemon that ends every session right away is not asked a hundred times a second. */
	if (kvc->state == KVC_READY && kv_now_ns(&kvc->env) - kvc->ready_ns > KVC_BACKOFF_MAX_NS) {
		kvc->backoff_ns = KVC_BACKOFF_MIN_NS;
	}
	if (atomic_load(&kvc->map)) {
		kvc->old_incarnation = kvc->incarnation;
	}
	kvc->state = KVC_DETACHED;
	kvc->incarnation = 0;
	kvc->reopening = 0;
	kvc->why_detached = status;
	snprintf(kvc->why_text, sizeof kvc->why_text, "kvd at %s: %s", kvc->socket, why);

	for (kvc_space_t *space = kvc->spaces; space; space = space->next) {
		atomic_store(&space->epoch, 0);
	}
	kvc_map_retire(kvc);
	kvc_channel_close(kvc, KV_ERR_CLOSED);
	kvc->events->lost(kvc);
	kvc->must_send_drained = 0;
	kvc->put_ttl_ns = 0;
	back_off(kvc);
}

/* ---- gaining one ----------------------------------------------------------------------------- */

static void ready_when_open(kvc_t *kvc)
{
	if (kvc->state == KVC_OPEN && kvc->reopening == 0) {
		kvc->state = KVC_READY;
		kvc->ready_ns = kv_now_ns(&kvc->env);
		kvc->why_detached = KV_OK;
		kvc->why_text[0] = '\0';
	}
}

void kvc_reopened(kvc_t *kvc)
{
	if (kvc->reopening) {
		kvc->reopening--;
	}
	ready_when_open(kvc);
}

static void opened(kvc_t *kvc)
{
	kvc->state = KVC_OPEN;
	kvc->reopening += kvc->events->opened(kvc);
	ready_when_open(kvc);
}

static void lose_refused_session(kvc_t *kvc, const char *what, const kvc_answer_t *answer)
{
	char why[400]; /* all of a detail, 255 bytes */

	if (answer->status == KV_ERR_CLOSED && !answer->detail[0]) {
		return; /* the session is ending already */
	}
	if (answer->expired) {
		kvc_session_lost(kvc, answer->status, "it did not answer in time; is it stopped?");
		return;
	}
	snprintf(why, sizeof why, "%s failed: %s%s%s", what, kv_status_text(answer->status),
		 answer->detail[0] ? ": " : "", answer->detail);
	kvc_session_lost(kvc, answer->status, why);
}

/* The daemon has just answered, so its heartbeat is of now: by our clock too, unless that is another one. Leases and
 * matches would all be stale. */
static int has_other_clock(kvc_t *kvc)
{
	const kvc_map_t *map = atomic_load(&kvc->map);
	const uint64_t now = kv_now_ns(&kvc->env);
	uint64_t beat;
	char why[200];

	if (!map || !map->mirror) {
		return 0;
	}
	beat = atomic_load_explicit(&map->mirror->heartbeat_ns, memory_order_relaxed);
	if (beat == 0 || (beat < now + KVC_OTHER_CLOCK_NS && now < beat + KVC_OTHER_CLOCK_NS)) {
		return 0;
	}
	snprintf(why, sizeof why,
		 "its CLOCK_MONOTONIC is %lld s ahead of ours; run the engine in the daemon's time namespace",
		 (long long)((int64_t)(beat - now) / INT64_C(1000000000)));
	kvc_session_lost(kvc, KV_ERR_UNSUPPORTED, why);

	return 1;
}

static void on_joined(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	(void)object;
	if (answer->status != KV_OK) {
		lose_refused_session(kvc, "joining the instance", answer);
		return;
	}
	if (has_other_clock(kvc)) {
		return;
	}
	if (kvc->old_incarnation) {
		kvc_count(&kvc->counters.reattaches, 1);
	}
	snprintf(kvc->peer_name, sizeof kvc->peer_name, "%.*s", (int)answer->reply->join_reply.peer_name.len,
		 (const char *)answer->reply->join_reply.peer_name.data);
	opened(kvc);
}

static void join(kvc_t *kvc)
{
	const int matching = kvc->role == KVC_ROLE_MATCH;
	int pidfd = matching ? -1 : (int)syscall(SYS_pidfd_open, getpid(), 0u);
	kv_msg_join_t msg = {
		.instance = kv_slice_str(kvc->instance),
		.secret = {kvc->secret, kvc->secret_len},
		.role = kvc->role,
		.rank = kvc->rank,
		.staging_words = kvc->staging_words,
		.attachment = kvc->attachment,
	};
	kvc_ask_t ask = {.code = KV_CODE_JOIN, .msg = &msg, .done = on_joined, .fd = pidfd};
	kv_status_t status;

	if (pidfd < 0 && !matching) {
		char why[KV_REFUSED_TEXT];

		kvc_session_lost(kvc, KV_ERR_PIDFD_REQUIRED, kv_refused_text("pidfd_open", errno, why, sizeof why));
		return;
	}
	/* Naming the old incarnation says that no copy of ours is in its memory now. */
	kvc_map_reap(kvc);
	msg.old_incarnation = kvc->retired ? 0 : kvc->old_incarnation;
	kvc->must_send_drained = kvc->retired && !matching;

	kvc->state = KVC_JOIN;
	status = kvc_send(kvc, &ask);
	if (pidfd >= 0) {
		close(pidfd);
	}
	if (status != KV_OK) {
		kvc_session_lost(kvc, status, "JOIN could not be sent");
	}
}

static void on_hello(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	(void)object;
	if (answer->status != KV_OK) {
		lose_refused_session(kvc, "opening a session", answer);
		return;
	}
	if (answer->reply->hello_reply.version != KV_WIRE_VERSION || answer->reply->hello_reply.incarnation == 0) {
		kvc_session_lost(kvc, KV_ERR_VERSION,
				 "it speaks another version of the protocol; use a libkvc of its release");
		return;
	}
	kvc->incarnation = answer->reply->hello_reply.incarnation;
	kvc->channel.max_body = answer->reply->hello_reply.max_frame;
	if (kvc->observe) {
		opened(kvc);
	} else {
		join(kvc);
	}
}

/* "connection refused": the C library's words, as part of a sentence. */
static const char *reason_text(int reason, char *out, size_t cap)
{
	snprintf(out, cap, "%s", strerrordesc_np(reason) ? strerrordesc_np(reason) : "unknown error");
	out[0] = out[0] >= 'A' && out[0] <= 'Z' ? (char)(out[0] + 32) : out[0];

	return out;
}

static void connect_now(kvc_t *kvc)
{
	char text[96];
	kv_msg_hello_t msg = {.version = KV_WIRE_VERSION, .program = kv_slice_str(kvc->program)};
	kvc_ask_t ask = {.code = KV_CODE_HELLO, .msg = &msg, .done = on_hello, .fd = -1};
	int reason = 0;
	kv_status_t status = kv_sock_connect(kvc->socket, &kvc->channel.fd, &reason);

	if (status != KV_OK) {
		kvc->channel.fd = -1;
		kvc->why_detached = status;
		snprintf(kvc->why_text, sizeof kvc->why_text, "cannot reach kvd at %s (%s); %s", kvc->socket,
			 reason ? reason_text(reason, text, sizeof text) : kv_status_text(status),
			 reason == EACCES ? "are you in its group?" : "is it running?");
		back_off(kvc);
		return;
	}
	kvc->spin_ns = kv_sock_peer_runs_beside(kvc->channel.fd) ? kvc->most_spin_ns : 0;
	kvc->channel.max_body = KV_WIRE_MAX_BODY_BEFORE_HELLO;
	kvc->state = KVC_HELLO;
	status = kvc_send(kvc, &ask);
	if (status != KV_OK) {
		kvc_session_lost(kvc, status, status == KV_ERR_CLOSED ? closed_text(kvc) : "HELLO could not be sent");
	}
}

/* ---- polling --------------------------------------------------------------------------------- */

static void run_deferred_work(kvc_t *kvc)
{
	kvc_map_reap(kvc);
	if (kvc->state != KVC_READY) {
		return;
	}
	if (kvc->must_send_drained && !kvc->retired) {
		kv_msg_drained_t msg = {.what = 2};

		kvc->must_send_drained = 0;
		kvc_send_oneway(kvc, KV_CODE_DRAINED, &msg);
	}
	kvc->events->deferred(kvc);
}

void kvc_pump(kvc_t *kvc)
{
	kv_status_t status;

	if (kvc->state == KVC_DETACHED && kv_now_ns(&kvc->env) >= kvc->next_try_ns) {
		connect_now(kvc);
	}
	if (kvc->state != KVC_DETACHED) {
		status = kvc_receive(kvc, kvc->events->frame);
		if (status != KV_OK) {
			kvc_session_lost(kvc, status,
					 status == KV_ERR_CLOSED ? closed_text(kvc)
					 : status == KV_ERR_VERSION
						 ? "it is of another build: use the libkvc that came with it"
						 : "it broke the protocol: session closed");
		}
	}
	if (kvc->channel.in_flight) {
		kvc_expire(kvc, kv_now_ns(&kvc->env));
	}
	run_deferred_work(kvc);
	if (kvc->state != KVC_DETACHED && kvc_flush(kvc) == KV_ERR_CLOSED) {
		kvc_session_lost(kvc, KV_ERR_CLOSED, closed_text(kvc));
	}
}

kvc_status_t kvc_enter(kvc_t *kvc)
{
	kvc_status_t status = kvc_check_process(kvc);

	if (status == KVC_OK) {
		kvc_pump(kvc);
	}
	if (status == KVC_ERR_INTERNAL && kvc->channel.fd >= 0) {
		/* To the daemon this member has gone but for its pidfd: what it may still touch is not lent again. */
		close(kvc->channel.fd);
		kvc->channel.fd = -1;
	}

	return status;
}

void kvc_sleep(kvc_t *kvc, uint64_t ns)
{
	kvc_channel_t *channel = &kvc->channel;
	uint64_t now = kv_now_ns(&kvc->env);
	struct pollfd fd = {.fd = channel->fd, .events = POLLIN};
	struct timespec time;

	if (channel->out_head < channel->out_tail) {
		fd.events |= POLLOUT;
	}
	if (kvc->state == KVC_DETACHED) {
		uint64_t left = kvc->next_try_ns > now ? kvc->next_try_ns - now : 0;

		ns = left < ns ? left : ns;
	}
	if (channel->next_deadline != UINT64_MAX) {
		uint64_t left = channel->next_deadline > now ? channel->next_deadline - now : 0;

		ns = left < ns ? left : ns;
	}
	time = (struct timespec){.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
	(void)ppoll(&fd, 1, &time, NULL);
}

kv_status_t kvc_wait(kvc_t *kvc, kvc_done_fn done, const void *object, uint64_t deadline)
{
	uint64_t spin_until = kv_now_ns(&kvc->env) + kvc->spin_ns;

	for (;;) {
		uint64_t now;

		kvc_pump(kvc);
		if (done(object)) {
			return KV_OK;
		}
		now = kv_now_ns(&kvc->env);
		if (now >= deadline) {
			return KV_ERR_TIMEOUT;
		}
		if (now < spin_until) {
			kvc_pause();
		} else {
			kvc_sleep(kvc, deadline - now);
		}
	}
}

/* What has arrived already may be what the caller waits for: then it does not sleep. */
static kvc_status_t poll_ns(kvc_t *kvc, uint64_t ns)
{
	uint64_t news;
	kvc_status_t status;

	if (!kvc) {
		return kvc_fail(KV_ERR_ARG, "kvc_poll: no attachment given");
	}
	news = kvc->news;
	status = kvc_enter(kvc);
	if (status == KVC_OK && ns && kvc->news == news) {
		kvc_sleep(kvc, ns);
		kvc_pump(kvc);
	}
	if (status != KVC_OK) {
		return status;
	}

	return kvc->state == KVC_READY ? KVC_OK : kvc_detached(kvc);
}

kvc_status_t kvc_poll(kvc_t *kvc, uint32_t timeout_ms)
{
	return poll_ns(kvc, timeout_ms * KVC_NS_A_MS);
}

kvc_status_t kvc_poll_us(kvc_t *kvc, uint32_t timeout_us)
{
	return poll_ns(kvc, timeout_us * KVC_NS_A_US);
}

kvc_status_t kvc_await_us(kvc_t *kvc, uint32_t timeout_us)
{
	const kvc_map_t *map;
	uint64_t news, beat, start, left, ns = timeout_us * KVC_NS_A_US;
	kvc_status_t status;

	if (!kvc) {
		return kvc_fail(KV_ERR_ARG, "kvc_await_us: no attachment given");
	}
	news = kvc->news;
	status = poll_ns(kvc, 0);
	if (status != KVC_OK) {
		return status;
	}
	map = atomic_load_explicit(&kvc->map, memory_order_relaxed);
	if (!map) {
		return kvc_fail(KV_ERR_NOT_JOINED, "an observer sees no heartbeat; attach without `observe`");
	}
	beat = atomic_load_explicit(&map->mirror->heartbeat_ns, memory_order_relaxed);
	if (beat != kvc->awaited_beat) {
		kvc->awaited_beat = beat;
		kvc->awaited_ns = 0;
	}
	if (kvc->awaited_ns >= map->stale_ns) {
		return kvc_fail(KV_ERR_DAEMON_STALE, "kvd at %s has been silent for too long; is it stopped?",
				kvc->socket);
	}

	if (kvc->news != news) {
		return KVC_OK;
	}
	left = map->stale_ns - kvc->awaited_ns;
	start = kv_now_ns(&kvc->env);
	status = poll_ns(kvc, ns < left ? ns : left);
	kvc->awaited_ns += kv_now_ns(&kvc->env) - start;

	return status;
}
