/* The publisher thread and the way to it. */
#include "io/events/events.h"

#include "io/events/ring.h"
#include "io/events/zmtp.h"
#include "kv/system.h"
#include "kv/log.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define LINGER_MS      100
#define WAKE_MS        1000
#define RECORDS_A_TURN 16 /* of one feed, before subscribers are sent what there is */
#define HITS_SHARE     16 /* hits are small: their log is this part of the events' */

/* What is said of a batch and of an event in msgpack, at most: numbers and names of fields; then by block, by token and
 * by byte of the adapter's name. */
#define PAYLOAD_MAX (KVD_ZMTP_MESSAGE_MAX - KVD_ZMTP_HEAD_MAX)
#define BATCH_BYTES 32u
#define EVENT_BYTES 320u
#define BLOCK_BYTES 10u
#define TOKEN_BYTES 5u

/* One record of a ring: a batch of events or a prefix hit. */
typedef struct record {
	uint64_t seq;
	double ts;
	uint32_t count; /* events that follow; 0: a kv_report_t follows */
	uint32_t reserved;
} record_t;

/* Followed by count hashes, tokens and the adapter's name, each padded to 8 bytes. */
typedef struct packed_event {
	uint32_t type, medium, group, count;
	uint32_t block_tokens, tokens, lora, has_parent;
	uint32_t rule, reserved;
	uint64_t parent;
} packed_event_t;

typedef struct feed {
	char name[65];
	char topic[KVD_TOPIC_MAX + 1];
	kvd_ring_t ring;
	uint32_t open_events; /* in the batch being built */
	uint32_t open_bytes;  /* at most, of its payload */
	int lost;             /* the batch being built has lost an event */
	uint64_t event_seq, hit_seq;
	kvd_zmtp_t *events, *hits; /* the thread's once it runs */
} feed_t;

struct kvd_publisher {
	kv_metrics_t *metrics;
	int tokens;
	feed_t *feeds;
	uint32_t feed_count;
	pthread_t thread;
	int wake_fd, epoll_fd;
	uint64_t ticked_ms;
	uint8_t payload[PAYLOAD_MAX];
	_Atomic int asleep;
	_Atomic int stop;
};

/* ---- core loop side -------------------------------------------------------------------------- */

static double wall_clock(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_REALTIME, &ts);

	return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

static void wake(kvd_publisher_t *publisher)
{
	uint64_t one = 1;

	if (atomic_exchange(&publisher->asleep, 0)) {
		ssize_t ignored = write(publisher->wake_fd, &one, sizeof one);
		(void)ignored; /* a counter that is full wakes too */
	}
}

static feed_t *feed_of(kvd_publisher_t *publisher, const char *ns)
{
	for (uint32_t i = 0; i < publisher->feed_count; i++) {
		if (strcmp(publisher->feeds[i].name, ns) == 0) {
			return &publisher->feeds[i];
		}
	}

	return NULL;
}

static int push_record(kvd_ring_t *ring, const void *data, size_t n)
{
	void *to = kvd_ring_extend(ring, n);

	if (!to) {
		return 0;
	}
	if (n > 0) {
		memcpy(to, data, n);
	}

	return 1;
}

static void commit_feed(kvd_publisher_t *publisher, feed_t *feed)
{
	record_t record = {.seq = feed->event_seq++, .ts = wall_clock(), .count = feed->open_events};

	if (feed->lost) {
		kvd_ring_abort(&feed->ring);
		kv_metric_add(publisher->metrics, KV_M_EVENTS_LOST, 1);
	} else {
		memcpy(kvd_ring_record(&feed->ring), &record, sizeof record);
		kvd_ring_commit(&feed->ring);
		wake(publisher);
	}
	feed->open_events = 0;
	feed->open_bytes = BATCH_BYTES;
	feed->lost = 0;
}

/* Append to the batch being built. */
static void pack(feed_t *feed, const kvd_event_t *event)
{
	uint32_t tokens = event->tokens ? event->count * event->block_tokens : 0;
	packed_event_t packed = {.type = event->type,
				 .medium = event->medium,
				 .group = event->group,
				 .rule = event->rule,
				 .count = event->count,
				 .block_tokens = event->block_tokens,
				 .tokens = tokens,
				 .lora = event->lora ? (uint32_t)strlen(event->lora) + 1 : 0,
				 .has_parent = event->has_parent != 0,
				 .parent = event->parent_hash};
	static const record_t empty;

	feed->open_events++;
	if (feed->lost) {
		return;
	}
	feed->lost = (feed->open_events == 1 && !push_record(&feed->ring, &empty, sizeof empty)) ||
		     !push_record(&feed->ring, &packed, sizeof packed) ||
		     !push_record(&feed->ring, event->hashes, event->count * sizeof *event->hashes) ||
		     !push_record(&feed->ring, event->tokens, tokens * sizeof *event->tokens) ||
		     !push_record(&feed->ring, event->lora, packed.lora);
}

/* A message has at most 64 KiB, so a batch becomes several, each with a number of its own. An event that fits none is
 * cut between blocks: each piece is the child of the one before. Tokens of one block that fit no message are left out,
 * as if the engine had given none. */
void kvd_publisher_event(kvd_publisher_t *publisher, const kvd_event_t *event)
{
	feed_t *feed = feed_of(publisher, event->ns);
	kvd_event_t piece = *event;
	uint64_t fixed = EVENT_BYTES + (event->lora ? strlen(event->lora) : 0), each;

	if (!feed) {
		return;
	}
	each = BLOCK_BYTES + (uint64_t)TOKEN_BYTES * event->block_tokens;
	if (!publisher->tokens || !event->tokens || BATCH_BYTES + fixed + each > PAYLOAD_MAX) {
		piece.tokens = NULL;
		each = BLOCK_BYTES;
	}
	if (feed->open_events > 0 && feed->open_bytes + fixed + each * event->count > PAYLOAD_MAX) {
		commit_feed(publisher, feed);
	}
	for (uint32_t at = 0; at < event->count; at += piece.count) {
		uint64_t fit = (PAYLOAD_MAX - feed->open_bytes - fixed) / each;

		piece.count = event->count - at < fit ? event->count - at : (uint32_t)fit;
		piece.hashes = event->hashes + at;
		piece.tokens = piece.tokens ? event->tokens + (size_t)at * event->block_tokens : NULL;
		if (at > 0) {
			piece.has_parent = event->type == KVD_EVENT_STORED;
			piece.parent_hash = event->hashes[at - 1];
		}
		pack(feed, &piece);
		feed->open_bytes += (uint32_t)(fixed + each * piece.count);
		if (at + piece.count < event->count) {
			commit_feed(publisher, feed);
		}
	}
}

void kvd_publisher_commit(kvd_publisher_t *publisher)
{
	for (uint32_t i = 0; i < publisher->feed_count; i++) {
		if (publisher->feeds[i].open_events > 0) {
			commit_feed(publisher, &publisher->feeds[i]);
		}
	}
}

void kvd_publisher_hit(kvd_publisher_t *publisher, uint32_t ns_index, const kv_report_t *report)
{
	feed_t *feed = &publisher->feeds[ns_index];
	record_t record = {.seq = feed->hit_seq++, .ts = wall_clock()};

	kv_assert(ns_index < publisher->feed_count && feed->open_events == 0);
	/* Events matter more: hits leave them half of the ring. */
	if (kvd_ring_used(&feed->ring) > feed->ring.size / 2 || !push_record(&feed->ring, &record, sizeof record) ||
	    !push_record(&feed->ring, report, sizeof *report)) {
		kvd_ring_abort(&feed->ring);
		kv_metric_add(publisher->metrics, KV_M_PREFIX_RECORDS_LOST, 1);
		return;
	}
	kvd_ring_commit(&feed->ring);
	wake(publisher);
}

/* ---- publisher thread ------------------------------------------------------------------------ */

static size_t padded(size_t n)
{
	return (n + 7u) / 8u * 8u;
}

/* The event at `at`; returns where the next one begins. */
static const uint8_t *unpack(const uint8_t *at, kvd_event_t *event)
{
	packed_event_t packed;

	memcpy(&packed, at, sizeof packed);
	at += padded(sizeof packed);
	*event = (kvd_event_t){.type = (kvd_event_type_t)packed.type,
			       .medium = (kv_tier_t)packed.medium,
			       .group = (uint8_t)packed.group,
			       .rule = (kv_group_rule_t)packed.rule,
			       .count = packed.count,
			       .block_tokens = packed.block_tokens,
			       .has_parent = (int)packed.has_parent,
			       .parent_hash = packed.parent};
	event->hashes = (const uint64_t *)(const void *)at;
	at += packed.count * sizeof(uint64_t);
	event->tokens = packed.tokens ? (const uint32_t *)(const void *)at : NULL;
	at += padded(packed.tokens * sizeof(uint32_t));
	event->lora = packed.lora ? (const char *)at : NULL;

	return at + padded(packed.lora);
}

static void encode(msgpack_packer *packer, const record_t *record, const uint8_t *body)
{
	kvd_event_t event;
	kv_report_t report;

	if (record->count == 0) {
		memcpy(&report, body, sizeof report);
		kvd_encode_hit(packer, record->ts, &report);
		return;
	}
	kvd_encode_begin(packer, record->ts, record->count);
	for (uint32_t i = 0; i < record->count; i++) {
		body = unpack(body, &event);
		kvd_encode_event(packer, &event);
	}
	kvd_encode_end(packer);
}

static void send_record(kvd_publisher_t *publisher, feed_t *feed, const uint8_t *at)
{
	kv_mp_writer_t w = {.out = publisher->payload, .cap = sizeof publisher->payload};
	msgpack_packer packer = kv_mp_packer(&w);
	record_t record;

	memcpy(&record, at, sizeof record);
	encode(&packer, &record, at + padded(sizeof record));
	kv_assert(w.len <= w.cap); /* kvd_publisher_event() has counted it */
	kvd_zmtp_put(record.count ? feed->events : feed->hits, record.seq, publisher->payload, w.len);
	kv_metric_add(publisher->metrics, record.count ? KV_M_EVENTS : KV_M_PREFIX_RECORDS,
		      record.count ? record.count : 1);
}

/* 1: records were there. */
static int send_queued(kvd_publisher_t *publisher)
{
	int found = 0;

	for (uint32_t i = 0; i < publisher->feed_count; i++) {
		feed_t *feed = &publisher->feeds[i];
		const uint8_t *record;
		size_t len;

		for (int n = 0; n < RECORDS_A_TURN && (record = kvd_ring_peek(&feed->ring, &len)) != NULL; n++) {
			send_record(publisher, feed, record);
			kvd_ring_pop(&feed->ring);
			found = 1;
		}
	}

	return found;
}

/* 1: there is more to send at once. */
static int flush(kvd_publisher_t *publisher)
{
	int more = 0;

	for (uint32_t i = 0; i < publisher->feed_count; i++) {
		more |= kvd_zmtp_flush(publisher->feeds[i].events);
		more |= kvd_zmtp_flush(publisher->feeds[i].hits);
	}

	return more;
}

static uint64_t clock_ms(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);

	return (uint64_t)ts.tv_sec * 1000u + (uint64_t)ts.tv_nsec / 1000000u;
}

static void tick(kvd_publisher_t *publisher)
{
	uint64_t now = clock_ms();

	if (now - publisher->ticked_ms < WAKE_MS) {
		return;
	}
	publisher->ticked_ms = now;
	for (uint32_t i = 0; i < publisher->feed_count; i++) {
		kvd_zmtp_tick(publisher->feeds[i].events);
		kvd_zmtp_tick(publisher->feeds[i].hits);
	}
}

/* What connections say and ask for, within the time. */
static void serve_connections(kvd_publisher_t *publisher, int timeout_ms)
{
	struct epoll_event events[64];
	int n = epoll_wait(publisher->epoll_fd, events, 64, timeout_ms);
	uint64_t count;

	for (int i = 0; i < n; i++) {
		if (events[i].data.ptr) {
			kvd_zmtp_ready(events[i].data.ptr, events[i].events);
		} else {
			ssize_t ignored = read(publisher->wake_fd, &count, sizeof count);
			(void)ignored;
		}
	}
}

/* What is left goes out while subscribers take it at once. */
static void linger(kvd_publisher_t *publisher)
{
	uint64_t end = clock_ms() + LINGER_MS;
	int waiting = 1;

	while (send_queued(publisher)) {
	}
	while (waiting && clock_ms() < end) {
		waiting = flush(publisher);
		for (uint32_t i = 0; i < publisher->feed_count; i++) {
			waiting |= kvd_zmtp_waiting(publisher->feeds[i].events) |
				   kvd_zmtp_waiting(publisher->feeds[i].hits);
		}
		serve_connections(publisher, waiting ? 1 : 0);
	}
}

static void *publish_thread(void *arg)
{
	kvd_publisher_t *publisher = arg;

	(void)prctl(PR_SET_NAME, "kvd-events", 0, 0, 0);
	while (!atomic_load(&publisher->stop)) {
		int busy = send_queued(publisher);

		busy |= flush(publisher);
		if (!busy) {
			atomic_store(&publisher->asleep, 1);
			busy = send_queued(publisher) || atomic_load(&publisher->stop);
		}
		serve_connections(publisher, busy ? 0 : WAKE_MS);
		tick(publisher);
	}
	linger(publisher);

	return NULL;
}

/* ---- open and close -------------------------------------------------------------------------- */

/* The one of the feed's two endpoints that p_zmtp is. */
static kv_status_t endpoint_open(kvd_publisher_t *publisher, feed_t *feed, const kvd_publisher_config_t *config,
				 kvd_zmtp_t **p_zmtp, char *detail, size_t cap)
{
	const int is_hits = p_zmtp == &feed->hits;
	char path[108], why[KV_REFUSED_TEXT] = "";
	kvd_zmtp_config_t endpoint = {.path = path,
				      .access = kvd_sockets_access(config->options, feed->name),
				      .topic = feed->topic,
				      .log_bytes = config->log_bytes / (is_hits ? HITS_SHARE : 1),
				      .max_subscribers = config->max_subscribers,
				      .epoll_fd = publisher->epoll_fd,
				      .metrics = publisher->metrics};
	kv_status_t status = KV_ERR_PATH;

	if ((size_t)snprintf(path, sizeof path, "%s/%s.%s", config->options->run_dir, feed->name,
			     is_hits ? "hits" : "events") < sizeof path) {
		status = kvd_zmtp_open(&endpoint, p_zmtp, why, sizeof why);
	}
	if (status != KV_OK) {
		snprintf(detail, cap, "cannot publish events in %s: %s", config->options->run_dir,
			 why[0] ? why : kv_status_text(status));
	}

	return status;
}

static kv_status_t feed_open(kvd_publisher_t *publisher, feed_t *feed, const kvd_publisher_config_t *config,
			     char *detail, size_t cap)
{
	kv_status_t status = kvd_ring_init(&feed->ring, config->buffer_bytes);

	if (status != KV_OK) {
		return status;
	}
	feed->open_bytes = BATCH_BYTES;
	(void)kvd_topic_format(config->options, feed->name, strlen(feed->name), feed->topic, sizeof feed->topic);
	status = endpoint_open(publisher, feed, config, &feed->events, detail, cap);

	return status == KV_OK ? endpoint_open(publisher, feed, config, &feed->hits, detail, cap) : status;
}

static void publisher_free(kvd_publisher_t *publisher)
{
	for (uint32_t i = 0; i < publisher->feed_count; i++) {
		feed_t *feed = &publisher->feeds[i];

		kvd_zmtp_close(feed->events);
		kvd_zmtp_close(feed->hits);
		kvd_ring_fini(&feed->ring);
	}
	if (publisher->wake_fd >= 0) {
		close(publisher->wake_fd);
	}
	if (publisher->epoll_fd >= 0) {
		close(publisher->epoll_fd);
	}
	free(publisher->feeds);
	free(publisher);
}

static kv_status_t feeds_open(kvd_publisher_t *publisher, const kvd_publisher_config_t *config, char *detail,
			      size_t cap)
{
	const char *at = config->options->namespaces;
	kv_status_t status = KV_OK;
	uint32_t count = 1;

	for (const char *c = at; *c; c++) {
		count += *c == ',';
	}
	publisher->feeds = calloc(count, sizeof *publisher->feeds);
	if (!publisher->feeds) {
		return KV_ERR_NOMEM;
	}
	publisher->feed_count = count;
	for (uint32_t i = 0; i < count && status == KV_OK; i++) {
		size_t len = strcspn(at, ",");

		snprintf(publisher->feeds[i].name, sizeof publisher->feeds[i].name, "%.*s", (int)len, at);
		status = feed_open(publisher, &publisher->feeds[i], config, detail, cap);
		at += len + 1;
	}

	return status;
}

kv_status_t kvd_publisher_open(const kvd_publisher_config_t *config, kvd_publisher_t **p_publisher, char *detail,
			       size_t cap)
{
	kvd_publisher_t *publisher = calloc(1, sizeof *publisher);
	kv_status_t status;
	int error;

	if (!publisher) {
		return KV_ERR_NOMEM;
	}
	publisher->metrics = config->metrics;
	publisher->tokens = config->tokens;
	publisher->epoll_fd = -1;
	publisher->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (publisher->wake_fd >= 0) {
		publisher->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	}
	if (publisher->wake_fd < 0 || publisher->epoll_fd < 0 ||
	    epoll_ctl(publisher->epoll_fd, EPOLL_CTL_ADD, publisher->wake_fd,
		      &(struct epoll_event){.events = EPOLLIN}) != 0) {
		status = kv_refused(&kv_env_posix, "events", publisher->wake_fd < 0 ? "eventfd" : "epoll_create1",
				    errno);
		goto err_free;
	}
	status = feeds_open(publisher, config, detail, cap);
	if (status != KV_OK) {
		goto err_free;
	}
	error = pthread_create(&publisher->thread, NULL, publish_thread, publisher);
	if (error) {
		status = kv_refused(&kv_env_posix, "events", "pthread_create", error);
		goto err_free;
	}
	*p_publisher = publisher;

	return KV_OK;

err_free:
	publisher_free(publisher);
	return status;
}

void kvd_publisher_close(kvd_publisher_t *publisher)
{
	uint64_t one = 1;

	if (!publisher) {
		return;
	}
	atomic_store(&publisher->stop, 1);
	ssize_t ignored = write(publisher->wake_fd, &one, sizeof one);
	(void)ignored;
	pthread_join(publisher->thread, NULL);
	publisher_free(publisher);
}
