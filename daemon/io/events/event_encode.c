/* Events as vLLM's subscribers expect them: msgpack maps, every key always there. */
#include "io/events/events.h"

#include "kv/key.h"

#include <string.h>

static void put_text(kv_mp_writer_t *w, const char *text)
{
	kv_mp_put_str(w, text, (uint32_t)strlen(text));
}

static void put_text_or_nil(kv_mp_writer_t *w, const char *text)
{
	if (text) {
		put_text(w, text);
	} else {
		kv_mp_put_nil(w);
	}
}

static void put_number(kv_mp_writer_t *w, const char *key, uint64_t value)
{
	put_text(w, key);
	kv_mp_put_uint(w, value);
}

const char *kvd_medium_name(kv_tier_t medium)
{
	switch (medium) {
	case KV_TIER_GPU:
		return "GPU";
	case KV_TIER_CPU:
		return "CPU_PINNED";
	case KV_TIER_DISK:
		return "DISK";
	default:
		return "EXTERNAL";
	}
}

void kvd_encode_begin(kv_mp_writer_t *w, double ts, uint32_t count)
{
	kv_mp_put_array(w, 3);
	kv_mp_put_double(w, ts);
	kv_mp_put_array(w, count);
}

void kvd_encode_end(kv_mp_writer_t *w)
{
	kv_mp_put_uint(w, 0);
}

static void put_hashes(kv_mp_writer_t *w, const kvd_event_t *event)
{
	put_text(w, "block_hashes");
	kv_mp_put_array(w, event->count);
	for (uint32_t i = 0; i < event->count; i++) {
		kv_mp_put_uint(w, event->hashes[i]);
	}
}

static const char *spec_kind(kv_group_rule_t rule)
{
	static const char *const kinds[] = {"full_attention", "sliding_window", "mamba"};

	return kinds[rule];
}

static void put_stored(kv_mp_writer_t *w, const kvd_event_t *event)
{
	uint32_t tokens = event->tokens ? event->count * event->block_tokens : 0;

	kv_mp_put_map(w, 11);
	put_text(w, "type");
	put_text(w, "BlockStored");
	put_hashes(w, event);
	put_text(w, "parent_block_hash");
	if (event->has_parent) {
		kv_mp_put_uint(w, event->parent_hash);
	} else {
		kv_mp_put_nil(w);
	}
	put_text(w, "token_ids");
	kv_mp_put_array(w, tokens);
	for (uint32_t i = 0; i < tokens; i++) {
		kv_mp_put_uint(w, event->tokens[i]);
	}
	put_number(w, "block_size", event->block_tokens);
	put_text(w, "lora_id");
	kv_mp_put_nil(w);
	put_text(w, "medium");
	put_text(w, kvd_medium_name(event->medium));
	put_text(w, "lora_name");
	put_text_or_nil(w, event->lora);
	put_text(w, "extra_keys");
	kv_mp_put_array(w, event->count);
	for (uint32_t i = 0; i < event->count; i++) {
		kv_mp_put_nil(w);
	}
	put_number(w, "group_idx", event->group);
	put_text(w, "kv_cache_spec_kind");
	put_text(w, spec_kind(event->rule));
}

static void put_removed(kv_mp_writer_t *w, const kvd_event_t *event)
{
	kv_mp_put_map(w, 4);
	put_text(w, "type");
	put_text(w, "BlockRemoved");
	put_hashes(w, event);
	put_text(w, "medium");
	put_text(w, kvd_medium_name(event->medium));
	put_number(w, "group_idx", event->group);
}

void kvd_encode_event(kv_mp_writer_t *w, const kvd_event_t *event)
{
	if (event->type == KVD_EVENT_STORED) {
		put_stored(w, event);
	} else {
		put_removed(w, event);
	}
}

static const char *why_name(uint32_t why)
{
	static const char *const names[] = {"none",        "absent",    "evicted", "daemon_stale", "no_daemon",
					    "stale_epoch", "contended", "corrupt", "timeout",      "unreadable"};

	return why < KV_COUNT_OF(names) ? names[why] : "unknown";
}

void kvd_encode_hit(kv_mp_writer_t *w, double ts, const kv_report_t *report)
{
	char missing[33];

	kv_mp_put_map(w, 14);
	put_text(w, "ts");
	kv_mp_put_double(w, ts);
	put_number(w, "space", report->space);
	put_number(w, "group", report->group);
	put_number(w, "request", report->request);
	put_number(w, "session", report->session);
	put_number(w, "turn", report->turn);
	put_number(w, "query_tokens", report->query_tokens);
	put_number(w, "hit_cpu_tokens", report->hit_cpu_tokens);
	put_number(w, "hit_disk_tokens", report->hit_disk_tokens);
	put_number(w, "hit_engine_tokens", report->hit_engine_tokens);
	put_number(w, "output_tokens", report->output_tokens);
	put_text(w, "why");
	put_text(w, why_name(report->why));
	put_text(w, "first_missing");
	kv_key_format(&report->first_missing, missing);
	put_text_or_nil(w, kv_key_is_zero(&report->first_missing) ? NULL : missing);
	put_text(w, "times_ns");
	kv_mp_put_array(w, 2);
	kv_mp_put_uint(w, report->match_ns);
	kv_mp_put_uint(w, report->load_ns);
}
