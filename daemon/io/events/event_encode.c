/* Events as vLLM's subscribers expect them: msgpack maps, every key always there. */
#include "io/events/events.h"

#include "kv/key.h"
#include "kv/miss_reason_list.h"

#include <string.h>

static void put_text(msgpack_packer *packer, const char *text)
{
	msgpack_pack_str_with_body(packer, text, (uint32_t)strlen(text));
}

static void put_text_or_nil(msgpack_packer *packer, const char *text)
{
	if (text) {
		put_text(packer, text);
	} else {
		msgpack_pack_nil(packer);
	}
}

static void put_number(msgpack_packer *packer, const char *key, uint64_t value)
{
	put_text(packer, key);
	msgpack_pack_uint64(packer, value);
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

void kvd_encode_begin(msgpack_packer *packer, double ts, uint32_t count)
{
	msgpack_pack_array(packer, 3);
	msgpack_pack_double(packer, ts);
	msgpack_pack_array(packer, count);
}

void kvd_encode_end(msgpack_packer *packer)
{
	msgpack_pack_uint64(packer, 0);
}

static void put_hashes(msgpack_packer *packer, const kvd_event_t *event)
{
	put_text(packer, "block_hashes");
	msgpack_pack_array(packer, event->count);
	for (uint32_t i = 0; i < event->count; i++) {
		msgpack_pack_uint64(packer, event->hashes[i]);
	}
}

static const char *spec_kind(kv_group_rule_t rule)
{
	static const char *const kinds[] = {"full_attention", "sliding_window", "mamba"};

	return kinds[rule];
}

static void put_stored(msgpack_packer *packer, const kvd_event_t *event)
{
	uint32_t tokens = event->tokens ? event->count * event->block_tokens : 0;

	msgpack_pack_map(packer, 11);
	put_text(packer, "type");
	put_text(packer, "BlockStored");
	put_hashes(packer, event);
	put_text(packer, "parent_block_hash");
	if (event->has_parent) {
		msgpack_pack_uint64(packer, event->parent_hash);
	} else {
		msgpack_pack_nil(packer);
	}
	put_text(packer, "token_ids");
	msgpack_pack_array(packer, tokens);
	for (uint32_t i = 0; i < tokens; i++) {
		msgpack_pack_uint64(packer, event->tokens[i]);
	}
	put_number(packer, "block_size", event->block_tokens);
	put_text(packer, "lora_id");
	msgpack_pack_nil(packer);
	put_text(packer, "medium");
	put_text(packer, kvd_medium_name(event->medium));
	put_text(packer, "lora_name");
	put_text_or_nil(packer, event->lora);
	put_text(packer, "extra_keys");
	msgpack_pack_array(packer, event->count);
	for (uint32_t i = 0; i < event->count; i++) {
		msgpack_pack_nil(packer);
	}
	put_number(packer, "group_idx", event->group);
	put_text(packer, "kv_cache_spec_kind");
	put_text(packer, spec_kind(event->rule));
}

static void put_removed(msgpack_packer *packer, const kvd_event_t *event)
{
	msgpack_pack_map(packer, 4);
	put_text(packer, "type");
	put_text(packer, "BlockRemoved");
	put_hashes(packer, event);
	put_text(packer, "medium");
	put_text(packer, kvd_medium_name(event->medium));
	put_number(packer, "group_idx", event->group);
}

void kvd_encode_event(msgpack_packer *packer, const kvd_event_t *event)
{
	if (event->type == KVD_EVENT_STORED) {
		put_stored(packer, event);
	} else {
		put_removed(packer, event);
	}
}

static const char *why_name(uint32_t why)
{
	static const char *const names[] = {
#define REASON(NAME, label, words) [KV_WHY_##NAME] = label,
		KV_MISS_REASON_LIST(REASON)
#undef REASON
	};

	return why < KV_COUNT_OF(names) ? names[why] : "unknown";
}

void kvd_encode_hit(msgpack_packer *packer, double ts, const kv_report_t *report)
{
	char missing[33];

	msgpack_pack_map(packer, 15);
	put_text(packer, "ts");
	msgpack_pack_double(packer, ts);
	put_number(packer, "space", report->space);
	put_number(packer, "group", report->group);
	put_number(packer, "request", report->request);
	put_number(packer, "session", report->session);
	put_number(packer, "turn", report->turn);
	put_number(packer, "query_tokens", report->query_tokens);
	put_number(packer, "hit_gpu_tokens", report->hit_gpu_tokens);
	put_number(packer, "hit_cpu_tokens", report->hit_cpu_tokens);
	put_number(packer, "hit_disk_tokens", report->hit_disk_tokens);
	put_number(packer, "hit_engine_tokens", report->hit_engine_tokens);
	put_number(packer, "output_tokens", report->output_tokens);
	put_text(packer, "why");
	put_text(packer, why_name(report->why));
	put_text(packer, "first_missing");
	kv_key_format(&report->first_missing, missing);
	put_text_or_nil(packer, kv_key_is_zero(&report->first_missing) ? NULL : missing);
	put_text(packer, "times_ns");
	msgpack_pack_array(packer, 2);
	msgpack_pack_uint64(packer, report->match_ns);
	msgpack_pack_uint64(packer, report->load_ns);
}
