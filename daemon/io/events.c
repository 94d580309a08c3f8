/* The publisher thread and the way to it. */
#include "io/events.h"

#include "io/ring.h"
#include "kv/log.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

#define SEND_LIMIT 10000 /* messages waiting for one slow subscriber */
#define LINGER_MS  100
#define WAKE_MS    1000

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
	char topic[256];
	kvd_ring_t ring;
	uint32_t open_events; /* in the batch being built */
	int lost;             /* the batch being built has lost an event */
	uint64_t event_seq, hit_seq;
	void *events, *hits; /* sockets: the thread's once it runs */
	char events_path[108], hits_path[108];
} feed_t;

struct kvd_publisher {
	kv_metrics_t *metrics;
	int tokens;
	void *context;
	feed_t *feeds;
	uint32_t feed_count;
	pthread_t thread;
	int wake_fd;
	_Atomic int asleep;
	_Atomic int stop;
};

/* ---- core loop side -------------------------------------------------------------------------------------------------- */

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

static int put(kvd_ring_t *ring, const void *data, size_t n)
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

void kvd_publisher_event(kvd_publisher_t *publisher, const kvd_event_t *event)
{
	feed_t *feed = feed_of(publisher, event->ns);
	uint32_t tokens = publisher->tokens && event->tokens ? event->count * event->block_tokens : 0;
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

	if (!feed) {
		return;
	}
	feed->open_events++;
	if (feed->lost) {
		return;
	}
	feed->lost = (feed->open_events == 1 && !put(&feed->ring, &empty, sizeof empty)) ||
		     !put(&feed->ring, &packed, sizeof packed) ||
		     !put(&feed->ring, event->hashes, event->count * sizeof *event->hashes) ||
		     !put(&feed->ring, event->tokens, tokens * sizeof *event->tokens) ||
		     !put(&feed->ring, event->lora, packed.lora);
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
	feed->lost = 0;
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
	if (kvd_ring_used(&feed->ring) > feed->ring.size / 2 || !put(&feed->ring, &record, sizeof record) ||
	    !put(&feed->ring, report, sizeof *report)) {
		kvd_ring_abort(&feed->ring);
		kv_metric_add(publisher->metrics, KV_M_PREFIX_RECORDS_LOST, 1);
		return;
	}
	kvd_ring_commit(&feed->ring);
	wake(publisher);
}

/* ---- publisher thread ------------------------------------------------------------------------------------------------ */

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

static void encode(kv_mp_writer_t *w, const record_t *record, const uint8_t *body)
{
	kvd_event_t event;
	kv_report_t report;

	if (record->count == 0) {
		memcpy(&report, body, sizeof report);
		kvd_encode_hit(w, record->ts, &report);
		return;
	}
	kvd_encode_begin(w, record->ts, record->count);
	for (uint32_t i = 0; i < record->count; i++) {
		body = unpack(body, &event);
		kvd_encode_event(w, &event);
	}
	kvd_encode_end(w);
}

/* topic | seq | payload. A PUB socket never waits for a subscriber. */
static int send_frames(void *socket, const char *topic, uint64_t seq, zmq_msg_t *payload)
{
	uint8_t number[8];

	for (uint32_t i = 0; i < 8; i++) {
		number[i] = (uint8_t)(seq >> (56 - 8 * i));
	}

	return zmq_send(socket, topic, strlen(topic), ZMQ_SNDMORE | ZMQ_DONTWAIT) >= 0 &&
	       zmq_send(socket, number, sizeof number, ZMQ_SNDMORE | ZMQ_DONTWAIT) >= 0 &&
	       zmq_msg_send(payload, socket, ZMQ_DONTWAIT) >= 0;
}

static void send_record(kvd_publisher_t *publisher, feed_t *feed, const uint8_t *at)
{
	kv_mp_writer_t w = {0};
	record_t record;
	zmq_msg_t payload;
	int sent = 0;

	memcpy(&record, at, sizeof record);
	at += padded(sizeof record);
	encode(&w, &record, at);
	if (zmq_msg_init_size(&payload, w.len) == 0) {
		w = (kv_mp_writer_t){.out = zmq_msg_data(&payload), .cap = w.len};
		encode(&w, &record, at);
		sent = send_frames(record.count ? feed->events : feed->hits, feed->topic, record.seq, &payload);
		zmq_msg_close(&payload);
	}
	if (record.count) {
		kv_metric_add(publisher->metrics, sent ? KV_M_EVENTS : KV_M_EVENTS_LOST, sent ? record.count : 1);
	} else {
		kv_metric_add(publisher->metrics, sent ? KV_M_PREFIX_RECORDS : KV_M_PREFIX_RECORDS_LOST, 1);
	}
}

static int drain_all(kvd_publisher_t *publisher)
{
	int found = 0;

	for (uint32_t i = 0; i < publisher->feed_count; i++) {
		feed_t *feed = &publisher->feeds[i];
		const uint8_t *record;
		size_t len;

		while ((record = kvd_ring_peek(&feed->ring, &len)) != NULL) {
			send_record(publisher, feed, record);
			kvd_ring_pop(&feed->ring);
			found = 1;
		}
	}

	return found;
}

static void *publish_thread(void *arg)
{
	kvd_publisher_t *publisher = arg;
	struct pollfd wait = {.fd = publisher->wake_fd, .events = POLLIN};
	uint64_t count;

	(void)prctl(PR_SET_NAME, "kvd-events", 0, 0, 0);
	while (!atomic_load(&publisher->stop)) {
		drain_all(publisher);
		atomic_store(&publisher->asleep, 1);
		if (drain_all(publisher) || atomic_load(&publisher->stop)) {
			continue;
		}
		if (poll(&wait, 1, WAKE_MS) > 0) {
			ssize_t ignored = read(publisher->wake_fd, &count, sizeof count);
			(void)ignored;
		}
	}
	drain_all(publisher);

	return NULL;
}

/* ---- open and close -------------------------------------------------------------------------------------------------- */

static void *bind_one(kvd_publisher_t *publisher, const char *path, char *detail, size_t cap)
{
	const int limit = SEND_LIMIT, linger = LINGER_MS;
	void *socket = zmq_socket(publisher->context, ZMQ_PUB);
	char endpoint[128];

	snprintf(endpoint, sizeof endpoint, "ipc://%s", path);
	if (socket) {
		zmq_setsockopt(socket, ZMQ_SNDHWM, &limit, sizeof limit);
		zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof linger);
	}
	if (!socket || zmq_bind(socket, endpoint) != 0) {
		snprintf(detail, cap, "cannot publish events on %s: %s", endpoint, zmq_strerror(errno));
		if (socket) {
			zmq_close(socket);
		}
		return NULL;
	}

	return socket;
}

static kv_status_t feed_open(kvd_publisher_t *publisher, feed_t *feed, const kvd_publisher_config_t *config,
			     char *detail, size_t cap)
{
	const char *mark = strstr(config->topic, "{namespace}");
	kv_status_t status = kvd_ring_init(&feed->ring, config->buffer_bytes);

	if (status != KV_OK) {
		return status;
	}
	if (mark) {
		snprintf(feed->topic, sizeof feed->topic, "%.*s%s%s", (int)(mark - config->topic), config->topic,
			 feed->name, mark + strlen("{namespace}"));
	} else {
		snprintf(feed->topic, sizeof feed->topic, "%s", config->topic);
	}
	int a = snprintf(feed->events_path, sizeof feed->events_path, "%s/%s.events", config->run_dir, feed->name);
	int b = snprintf(feed->hits_path, sizeof feed->hits_path, "%s/%s.hits", config->run_dir, feed->name);
	if (a < 0 || b < 0 || (size_t)a >= sizeof feed->events_path || (size_t)b >= sizeof feed->hits_path) {
		return KV_ERR_PATH;
	}
	feed->events = bind_one(publisher, feed->events_path, detail, cap);
	if (feed->events) {
		feed->hits = bind_one(publisher, feed->hits_path, detail, cap);
	}

	return feed->hits ? KV_OK : KV_ERR_IO;
}

static void publisher_free(kvd_publisher_t *publisher)
{
	for (uint32_t i = 0; i < publisher->feed_count; i++) {
		feed_t *feed = &publisher->feeds[i];

		if (feed->events) {
			zmq_close(feed->events);
			unlink(feed->events_path);
		}
		if (feed->hits) {
			zmq_close(feed->hits);
			unlink(feed->hits_path);
		}
		kvd_ring_fini(&feed->ring);
	}
	if (publisher->context) {
		zmq_ctx_term(publisher->context);
	}
	if (publisher->wake_fd >= 0) {
		close(publisher->wake_fd);
	}
	free(publisher->feeds);
	free(publisher);
}

static kv_status_t feeds_open(kvd_publisher_t *publisher, const kvd_publisher_config_t *config, char *detail,
			      size_t cap)
{
	const char *at = config->namespaces;
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
	kv_status_t status = KV_ERR_NOMEM;

	snprintf(detail, cap, "out of memory for the event buffers");
	if (!publisher) {
		return status;
	}
	publisher->metrics = config->metrics;
	publisher->tokens = config->tokens;
	publisher->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	publisher->context = zmq_ctx_new();
	if (publisher->wake_fd < 0 || !publisher->context) {
		goto err_free;
	}
	status = feeds_open(publisher, config, detail, cap);
	if (status != KV_OK) {
		goto err_free;
	}
	if (pthread_create(&publisher->thread, NULL, publish_thread, publisher) != 0) {
		snprintf(detail, cap, "cannot start the publisher's thread");
		status = KV_ERR_LIMIT;
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
