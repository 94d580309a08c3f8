/* daemon/io/events/events.h -- the publisher: block events and prefix hits on ZeroMQ PUB sockets, one pair a namespace
 * (docs/events.md).
 *
 * The core loop copies an event into a bounded ring and goes on; a thread encodes and sends (zmtp.h). A message has at
 * most 64 KiB: a larger batch becomes several. Nothing here blocks the loop: when a ring is full the message is lost,
 * its number in the sequence is skipped, so that subscribers see the gap, and EVENTS_LOST counts it.
 */
#ifndef KVD_IO_EVENTS_EVENTS_H
#define KVD_IO_EVENTS_EVENTS_H

#include "core/core.h"
#include "kv/mp.h"
#include "options/options.h"

typedef struct kvd_publisher kvd_publisher_t;

typedef struct kvd_publisher_config {
	/* Where, for which namespaces (known by their place), under which topics, and who may connect. */
	const kvd_options_t *options;
	uint64_t buffer_bytes; /* of each namespace's ring */
	uint64_t log_bytes;    /* what an endpoint keeps for slow subscribers (zmtp.h) */
	uint32_t max_subscribers;
	int tokens; /* 0: leave token ids out */
	kv_metrics_t *metrics;
} kvd_publisher_config_t;

/* Bind all sockets and start the thread. KV_ERR_IO, KV_ERR_NOMEM, KV_ERR_PATH;
 * `detail` gets a sentence. */
kv_status_t kvd_publisher_open(const kvd_publisher_config_t *config, kvd_publisher_t **p_publisher, char *detail,
			       size_t cap);
/* Send what waits (bounded), end the thread, remove the sockets. NULL is fine. */
void kvd_publisher_close(kvd_publisher_t *publisher);

/* All three from the core loop. An event joins the batch of its namespace; commit ends all batches. Events of
 * namespaces it does not know are dropped. */
void kvd_publisher_event(kvd_publisher_t *publisher, const kvd_event_t *event);
void kvd_publisher_commit(kvd_publisher_t *publisher);
void kvd_publisher_hit(kvd_publisher_t *publisher, uint32_t ns_index, const kv_report_t *report);

/* ---- encoding (event_encode.c): pure, tested against captured bytes of vLLM ------------------ */

/* "GPU", "CPU_PINNED", "DISK", "EXTERNAL". */
const char *kvd_medium_name(kv_tier_t medium);
/* [ts, [ ... `count` events follow with kvd_encode_event ... ], 0: begin and end of a batch. */
void kvd_encode_begin(msgpack_packer *packer, double ts, uint32_t count);
void kvd_encode_event(msgpack_packer *packer, const kvd_event_t *event);
void kvd_encode_end(msgpack_packer *packer);
void kvd_encode_hit(msgpack_packer *packer, double ts, const kv_report_t *report);

#endif
