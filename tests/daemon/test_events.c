/* P9: events have vLLM's bytes, one gap-free sequence a namespace, and a gap where something was lost. */
#include "daemon/raw.h"

#include "io/events/events.h"
#include "io/events/ring.h"

#include <pthread.h>
#include <sys/stat.h>
#include <zmq.h>

/* ---- the encoder against captured bytes ------------------------------------------------------ */

static uint64_t hashes_[64];
static uint32_t tokens_[4096];
static char name_[64];

static kv_mp_item_t next(kv_mp_reader_t *r, kv_mp_type_t type)
{
	kv_mp_item_t item;

	assert_int_equal(kv_mp_next(r, &item), KV_OK);
	assert_int_equal(item.type, type);

	return item;
}

static int is(const kv_mp_item_t *item, const char *text)
{
	return item->type == KV_MP_STR && item->len == strlen(text) && memcmp(item->data, text, item->len) == 0;
}

static void read_field(kv_mp_reader_t *r, const kv_mp_item_t *key, kvd_event_t *event)
{
	kv_mp_item_t item;

	if (is(key, "type")) {
		item = next(r, KV_MP_STR);
		event->type = is(&item, "BlockStored") ? KVD_EVENT_STORED : KVD_EVENT_REMOVED;
	} else if (is(key, "block_hashes")) {
		event->count = next(r, KV_MP_ARRAY).len;
		for (uint32_t i = 0; i < event->count; i++) {
			hashes_[i] = next(r, KV_MP_UINT).value;
		}
		event->hashes = hashes_;
	} else if (is(key, "parent_block_hash")) {
		assert_int_equal(kv_mp_next(r, &item), KV_OK);
		event->has_parent = item.type == KV_MP_UINT;
		event->parent_hash = item.value;
	} else if (is(key, "token_ids")) {
		uint32_t n = next(r, KV_MP_ARRAY).len;
		for (uint32_t i = 0; i < n; i++) {
			tokens_[i] = (uint32_t)next(r, KV_MP_UINT).value;
		}
		event->tokens = tokens_;
	} else if (is(key, "block_size")) {
		event->block_tokens = (uint32_t)next(r, KV_MP_UINT).value;
	} else if (is(key, "medium")) {
		item = next(r, KV_MP_STR);
		assert_true(is(&item, "GPU"));
		event->medium = KV_TIER_GPU;
	} else if (is(key, "group_idx")) {
		event->group = (uint8_t)next(r, KV_MP_UINT).value;
	} else if (is(key, "lora_name")) {
		assert_int_equal(kv_mp_next(r, &item), KV_OK);
		snprintf(name_, sizeof name_, "%.*s", item.type == KV_MP_STR ? (int)item.len : 0,
			 (const char *)item.data);
		event->lora = item.type == KV_MP_STR ? name_ : NULL;
	} else {
		assert_int_equal(kv_mp_skip(r, 4), KV_OK);
	}
}

static size_t from_hex(const char *hex, uint8_t *out)
{
	size_t n = strcspn(hex, "\n") / 2;

	for (size_t i = 0; i < n; i++) {
		unsigned byte;

		assert_int_equal(sscanf(hex + 2 * i, "%2x", &byte), 1);
		out[i] = (uint8_t)byte;
	}

	return n;
}

/* Decode a captured payload event by event and encode it again. */
static void round_trip(const uint8_t *payload, size_t len)
{
	static uint8_t ours[1 << 16];
	kv_mp_reader_t r = {payload, payload + len};
	kv_mp_writer_t w = {ours, sizeof ours, 0};
	msgpack_packer packer = kv_mp_packer(&w);
	uint64_t bits;
	double ts;

	assert_int_equal(next(&r, KV_MP_ARRAY).len, 3);
	bits = next(&r, KV_MP_FLOAT).value;
	memcpy(&ts, &bits, sizeof ts);
	uint32_t count = next(&r, KV_MP_ARRAY).len;
	kvd_encode_begin(&packer, ts, count);
	for (uint32_t i = 0; i < count; i++) {
		uint32_t pairs = next(&r, KV_MP_MAP).len;
		kvd_event_t event = {0};

		for (uint32_t p = 0; p < pairs; p++) {
			kv_mp_item_t key = next(&r, KV_MP_STR);
			read_field(&r, &key, &event);
		}
		kvd_encode_event(&packer, &event);
	}
	kvd_encode_end(&packer);
	assert_int_equal(w.len, len);
	assert_memory_equal(ours, payload, len);
}

KV_TEST(p9_events_have_the_bytes_a_real_vllm_sends)
{
	static char line[1 << 16];
	static uint8_t payload[1 << 15];
	char label[64];
	unsigned seq;
	int at, batches = 0;
	FILE *file = fopen(RAW_GOLDEN, "re");

	assert_non_null(file);
	while (fgets(line, sizeof line, file)) {
		if (line[0] != '#') {
			assert_int_equal(sscanf(line, "%63s %u %n", label, &seq, &at), 2);
			round_trip(payload, from_hex(line + at, payload));
			batches++;
		}
	}
	fclose(file);
	assert_true(batches >= 4);
}

KV_TEST(p9_each_tier_has_a_medium_routers_know)
{
	assert_string_equal(kvd_medium_name(KV_TIER_CPU), "CPU_PINNED");
	assert_string_equal(kvd_medium_name(KV_TIER_DISK), "DISK");
	assert_string_equal(kvd_medium_name(KV_TIER_GPU), "GPU");
	assert_string_equal(kvd_medium_name(KV_TIER_REMOTE), "EXTERNAL");
}

static int says(const uint8_t *bytes, size_t len, const char *text)
{
	return memmem(bytes, len, text, strlen(text)) != NULL;
}

KV_TEST(p9_each_group_has_a_kind_vllm_knows)
{
	static const char *const kinds[] = {"full_attention", "sliding_window", "mamba"};
	const uint64_t hash = 7;
	uint8_t bytes[512];

	for (uint32_t rule = 0; rule < KV_COUNT_OF(kinds); rule++) {
		kv_mp_writer_t w = {.out = bytes, .cap = sizeof bytes};
		msgpack_packer packer = kv_mp_packer(&w);
		const kvd_event_t event = {.type = KVD_EVENT_STORED,
					   .group = 3,
					   .rule = (kv_group_rule_t)rule,
					   .medium = KV_TIER_CPU,
					   .count = 1,
					   .hashes = &hash,
					   .block_tokens = 16};

		kvd_encode_event(&packer, &event);
		assert_true(w.len <= sizeof bytes && says(bytes, w.len, kinds[rule]));
	}
}

/* ---- the ring -------------------------------------------------------------------------------- */

#define RECORDS 20000u /* 1000 times around the ring; each time waits for the other thread to get a CPU */

static void *ring_reader(void *arg)
{
	kvd_ring_t *ring = arg;

	for (uint64_t want = 0; want < RECORDS;) {
		size_t len;
		const uint64_t *record = kvd_ring_peek(ring, &len);

		if (!record) {
			sched_yield();
			continue;
		}
		uint64_t n = len / 8;
		for (uint64_t i = 0; i < n; i++) {
			if (record[i] != want + i) {
				return "a record is not what was written";
			}
		}
		want++;
		kvd_ring_pop(ring);
	}

	return NULL;
}

KV_TEST(p5_the_ring_keeps_records_whole_and_in_order)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvd_ring_t ring;
	pthread_t thread;
	void *complaint;

	assert_int_equal(kvd_ring_init(&ring, 5000), KV_OK);
	assert_int_equal(ring.size, 4096);
	assert_int_equal(pthread_create(&thread, NULL, ring_reader, &ring), 0);
	for (uint64_t r = 0; r < RECORDS;) {
		uint64_t words = 1 + kv_test_below(&rng, 60), i = 0;

		while (i < words) {
			uint64_t *to = kvd_ring_extend(&ring, 8);
			if (!to) {
				break;
			}
			*to = r + i++;
		}
		if (i < words || kv_test_below(&rng, 10) == 0) {
			kvd_ring_abort(&ring);
			sched_yield();
		} else {
			kvd_ring_commit(&ring);
			r++;
		}
	}
	pthread_join(thread, &complaint);
	assert_null(complaint);
	assert_null(kvd_ring_extend(&ring, 4096));
	kvd_ring_fini(&ring);
}

/* One record at a time, of each length at each place. */
KV_TEST(p5_a_record_that_fits_an_empty_ring_fits_at_every_offset)
{
	static const size_t lens[] = {4096 - 8, 2048, 2048 + 8,
				      3000}; /* with their words an odd number of words a round */
	uint8_t want[4096];
	kvd_ring_t ring;
	size_t len;

	assert_int_equal(kvd_ring_init(&ring, 4096), KV_OK);
	for (size_t r = 0; r < KV_COUNT_OF(lens) * 4096 / 8; r++) {
		size_t n = lens[r % KV_COUNT_OF(lens)];

		for (size_t i = 0; i < n; i++) {
			want[i] = (uint8_t)(r + i / 8);
		}
		for (size_t at = 0; at < n; at += 512) {
			size_t piece = n - at < 512 ? n - at : 512;
			void *to = kvd_ring_extend(&ring, piece);

			assert_non_null(to);
			memcpy(to, want + at, piece);
		}
		kvd_ring_commit(&ring);
		const void *record = kvd_ring_peek(&ring, &len);
		assert_non_null(record);
		assert_int_equal(len, n);
		assert_memory_equal(record, want, n);
		kvd_ring_pop(&ring);
		assert_null(kvd_ring_peek(&ring, &len));
	}
	assert_null(kvd_ring_extend(&ring, 4096));
	kvd_ring_fini(&ring);
}

/* ---- the publisher --------------------------------------------------------------------------- */

typedef struct subscriber {
	void *context, *socket;
} subscriber_t;

static void subscribe(subscriber_t *s, const char *dir, const char *name)
{
	const int timeout = 60000;
	char endpoint[160];

	snprintf(endpoint, sizeof endpoint, "ipc://%s/%s", dir, name);
	s->context = zmq_ctx_new();
	s->socket = zmq_socket(s->context, ZMQ_SUB);
	assert_int_equal(zmq_setsockopt(s->socket, ZMQ_SUBSCRIBE, "", 0), 0);
	zmq_setsockopt(s->socket, ZMQ_RCVTIMEO, &timeout, sizeof timeout);
	assert_int_equal(zmq_connect(s->socket, endpoint), 0);
}

static void unsubscribe(subscriber_t *s)
{
	zmq_close(s->socket);
	zmq_ctx_term(s->context);
}

/* Something has come: who has just subscribed misses what is sent before it is known. */
static int is_told(const subscriber_t *s)
{
	zmq_pollitem_t arrived = {.socket = s->socket, .events = ZMQ_POLLIN};

	return zmq_poll(&arrived, 1, 20) == 1;
}

/* One message of three frames: its number; the payload's length in *p_len. */
static uint64_t receive(subscriber_t *s, const char *topic, uint8_t *payload, size_t cap, size_t *p_len)
{
	uint8_t first[64], number[8];
	uint64_t seq = 0;
	int n = zmq_recv(s->socket, first, sizeof first, 0);

	assert_int_equal(n, strlen(topic));
	assert_memory_equal(first, topic, strlen(topic));
	assert_int_equal(zmq_recv(s->socket, number, sizeof number, 0), 8);
	n = zmq_recv(s->socket, payload, cap, 0);
	assert_true(n > 0 && (size_t)n <= cap);
	*p_len = (size_t)n;
	for (int i = 0; i < 8; i++) {
		seq = seq << 8 | number[i];
	}

	return seq;
}

static kvd_publisher_t *publisher_open(kv_metrics_t *metrics, const char *dir, uint64_t buffer)
{
	static kvd_options_t options;
	const kvd_publisher_config_t config = {.options = &options,
					       .buffer_bytes = buffer,
					       .log_bytes = 1u << 20,
					       .max_subscribers = 8,
					       .tokens = 1,
					       .metrics = metrics};
	kvd_publisher_t *publisher = NULL;
	char detail[256];

	snprintf(options.run_dir, sizeof options.run_dir, "%s", dir);
	snprintf(options.namespaces, sizeof options.namespaces, "a,b");
	snprintf(options.sockets_mode, sizeof options.sockets_mode, "a=0600,b=0600");
	snprintf(options.events_topic, sizeof options.events_topic, "kv@{publisher}@{namespace}");
	snprintf(options.events_publisher, sizeof options.events_publisher, "t");
	assert_int_equal(kvd_publisher_open(&config, &publisher, detail, sizeof detail), KV_OK);

	return publisher;
}

KV_TEST(p9_batches_are_numbered_from_zero_and_a_loss_leaves_a_gap)
{
	static kv_metrics_t metrics;
	static uint64_t many[2048];
	kvd_event_t small = {.type = KVD_EVENT_REMOVED, .ns = "a", .medium = KV_TIER_CPU, .count = 1, .hashes = many};
	kvd_event_t large = {
		.type = KVD_EVENT_REMOVED, .ns = "a", .medium = KV_TIER_CPU, .count = 2048, .hashes = many};
	uint8_t payload[4096];
	uint64_t probes = 0, seq;
	subscriber_t s;
	char dir[64];
	size_t len;

	kv_test_dir_make(dir, sizeof dir);
	kvd_publisher_t *publisher = publisher_open(&metrics, dir, 8192);
	subscribe(&s, dir, "a.events");
	do {
		kvd_publisher_event(publisher, &small);
		kvd_publisher_commit(publisher);
		probes++;
		assert_true(probes < 3000);
	} while (!is_told(&s));
	do {
		seq = receive(&s, "kv@t@a", payload, sizeof payload, &len);
		assert_true(seq < probes);
	} while (seq != probes - 1); /* counted from 0 */

	for (int i = 0; i < 3; i++) {
		if (i == 1) {
			kvd_publisher_event(publisher, &small);
			kvd_publisher_event(publisher, &large); /* larger than the ring: the batch is lost */
		} else {
			kvd_publisher_event(publisher, &small);
			kvd_publisher_event(publisher, &small);
		}
		kvd_publisher_commit(publisher);
		kvd_publisher_commit(publisher); /* no events, no batch */
	}
	assert_int_equal(receive(&s, "kv@t@a", payload, sizeof payload, &len), probes);
	kv_mp_reader_t r = {payload, payload + len};
	assert_int_equal(next(&r, KV_MP_ARRAY).len, 3);
	next(&r, KV_MP_FLOAT);
	assert_int_equal(next(&r, KV_MP_ARRAY).len, 2);
	assert_int_equal(receive(&s, "kv@t@a", payload, sizeof payload, &len), probes + 2);
	unsubscribe(&s);
	kvd_publisher_close(publisher);
	assert_int_equal(kv_metric_get(&metrics, KV_M_EVENTS_LOST), 1);
	assert_int_equal(kv_metric_get(&metrics, KV_M_EVENTS), probes + 4);
	kv_test_dir_remove(dir);
}

KV_TEST(p9_topic_and_publisher_are_options_of_their_own)
{
	static const struct {
		const char *topic, *publisher, *topic_of_b;
	} cases[] = {
		{NULL, NULL, "kv@kvd@b"}, /* the defaults: what subscribers know */
		{NULL, "10.0.0.7", "kv@10.0.0.7@b"},
		{"{namespace}/{publisher}/{namespace}", "{namespace}", "b/{namespace}/b"},
		{"kv@fixed", "n1", "kv@fixed"},
		{"{pod}{publisher}{", "n1", "{pod}n1{"},
		{"", "n1", ""},
	};
	char topic[KVD_TOPIC_MAX + 1];
	kvd_options_t options;

	for (size_t i = 0; i < KV_COUNT_OF(cases); i++) {
		kv_options_default(&kvd_option_table, &options, (kv_option_source_t[KVD_OPTION_COUNT_MAX]){0});
		if (cases[i].topic) {
			snprintf(options.events_topic, sizeof options.events_topic, "%s", cases[i].topic);
		}
		if (cases[i].publisher) {
			snprintf(options.events_publisher, sizeof options.events_publisher, "%s", cases[i].publisher);
		}
		assert_int_equal(kvd_topic_format(&options, "b,c", 1, topic, sizeof topic),
				 strlen(cases[i].topic_of_b));
		assert_string_equal(topic, cases[i].topic_of_b);
	}
}

KV_TEST(p8_namespaces_have_endpoints_of_their_own)
{
	static kv_metrics_t metrics;
	uint64_t hash = 42;
	kvd_event_t event = {.type = KVD_EVENT_REMOVED, .medium = KV_TIER_DISK, .count = 1, .hashes = &hash};
	const char *const files[] = {"a.events", "a.hits", "b.events", "b.hits"};
	const char *const names[] = {"a", "b", "nobody"};
	uint64_t rounds = 0, seq, before = UINT64_MAX;
	uint8_t payload[256];
	subscriber_t s;
	struct stat st;
	char dir[64], path[128];
	size_t len;

	kv_test_dir_make(dir, sizeof dir);
	const mode_t mask = umask(0077);
	kvd_publisher_t *publisher = publisher_open(&metrics, dir, 65536);
	for (size_t i = 0; i < KV_COUNT_OF(files); i++) {
		snprintf(path, sizeof path, "%s/%s", dir, files[i]);
		assert_int_equal(stat(path, &st), 0);
		assert_int_equal(st.st_mode & 0077, 0); /* as the options say */
	}
	umask(mask);
	subscribe(&s, dir, "b.events");
	do {
		for (size_t i = 0; i < KV_COUNT_OF(names); i++) {
			event.ns = names[i];
			kvd_publisher_event(publisher, &event);
		}
		kvd_publisher_commit(publisher);
		rounds++;
		assert_true(rounds < 3000);
	} while (!is_told(&s));
	do { /* b's alone, one a round */
		seq = receive(&s, "kv@t@b", payload, sizeof payload, &len);
		assert_true(seq < rounds && (before == UINT64_MAX || seq == before + 1));
		before = seq;
	} while (seq != rounds - 1);
	unsubscribe(&s);
	kvd_publisher_close(publisher);
	assert_int_equal(stat(path, &st), -1);
	kv_test_dir_remove(dir);
}

KV_TEST(p9_a_prefix_hit_is_one_map_on_its_own_endpoint)
{
	static kv_metrics_t metrics;
	kv_report_t report = {.type = KV_REPORT_REQUEST,
			      .space = 3,
			      .query_tokens = 1000,
			      .hit_gpu_tokens = 160,
			      .hit_cpu_tokens = 640,
			      .why = KV_WHY_EVICTED};
	uint8_t payload[1024];
	subscriber_t s;
	char dir[64];
	uint64_t hits = 0;
	size_t len;
	int found = 0;

	kv_test_dir_make(dir, sizeof dir);
	kvd_publisher_t *publisher = publisher_open(&metrics, dir, 65536);
	subscribe(&s, dir, "b.hits");
	do {
		kvd_publisher_hit(publisher, 1, &report);
		hits++;
		assert_true(hits < 3000);
	} while (!is_told(&s));
	assert_true(receive(&s, "kv@t@b", payload, sizeof payload, &len) < hits);
	kv_mp_reader_t r = {payload, payload + len};
	for (uint32_t pairs = next(&r, KV_MP_MAP).len; pairs > 0; pairs--) {
		kv_mp_item_t key = next(&r, KV_MP_STR);
		kv_mp_reader_t value = r;

		assert_int_equal(kv_mp_skip(&r, 2), KV_OK);
		found += is(&key, "query_tokens") && next(&value, KV_MP_UINT).value == 1000;
		found += is(&key, "hit_gpu_tokens") && next(&value, KV_MP_UINT).value == 160;
		found += is(&key, "hit_cpu_tokens") && next(&value, KV_MP_UINT).value == 640;
		if (is(&key, "why")) {
			kv_mp_item_t why = next(&value, KV_MP_STR);
			found += is(&why, "evicted");
		}
	}
	assert_true(r.at == r.end);
	assert_int_equal(found, 4);
	unsubscribe(&s);
	kvd_publisher_close(publisher);
	assert_int_equal(kv_metric_get(&metrics, KV_M_PREFIX_RECORDS), hits);
	kv_test_dir_remove(dir);
}
