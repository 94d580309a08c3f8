/* TRANSFERS as JSON: one object an entry of namespace `ns`. */
#include "core/handover/handover_impl.h"

#include "kv/json.h"

static const char *state_name(kv_handover_state_t state)
{
	static const char *const names[] = {
		[KV_HANDOVER_AWAITED] = "awaited",   [KV_HANDOVER_SENDING] = "sending",
		[KV_HANDOVER_COMPLETE] = "complete", [KV_HANDOVER_FAILED] = "failed",
		[KV_HANDOVER_ENDED] = "ended",
	};

	return names[state];
}

/* Whose turn it is. */
static const char *waits_for(const kvd_handover_t *entry)
{
	if (entry->state == KV_HANDOVER_AWAITED) {
		return "the producer to begin";
	}
	if (entry->state == KV_HANDOVER_SENDING) {
		return entry->is_announced ? "announced blocks" : "the producer to go on";
	}

	return entry->consumer.member != 0 ? "the consumer to be done" : "a consumer";
}

static void side_json(const kvd_core_t *core, kv_json_t *json, const char *name, const kvd_handover_side_t *side)
{
	const kvd_instance_rec_t *instance =
		side->member == 0 ? NULL : kvd_instance_at(core, kvd_id_index(side->instance));

	kv_json_text(json, name, instance && instance->id == side->instance ? instance->name : "");
}

static void entry_json(kvd_core_t *core, kv_json_t *json, const kvd_handover_t *entry)
{
	const kv_msg_handover_t told = kvd_handover_describe(core, entry);
	const kvd_space_t *space = core->ns[entry->ns]->numbers[entry->space];
	char transfer[KVD_TRANSFER_MAX + 1] = "";
	uint64_t now = kv_now_ns(core->env);

	memcpy(transfer, entry->transfer, entry->transfer_len);
	kv_json_open(json, NULL, '{');
	kv_json_u64(json, "number", entry->number);
	kv_json_text(json, "transfer", transfer);
	kv_json_u64(json, "space", entry->space);
	kv_json_text(json, "state", state_name(entry->state));
	kv_json_text(json, "status", kv_status_name(entry->status));
	kv_json_numbers(json, {"units", entry->n}, {"tokens", (uint64_t)entry->n * space->hash_tokens + entry->partial},
			{"announced_units", told.announced}, {"bytes", kvd_handover_bytes(core, entry)},
			{"tail_bytes", entry->tail_len}, {"age_ns", now > entry->began_ns ? now - entry->began_ns : 0},
			{"left_ns", entry->expiry_ns > now ? entry->expiry_ns - now : 0});
	side_json(core, json, "producer", &entry->producer);
	side_json(core, json, "consumer", &entry->consumer);
	kv_json_text(json, "waits_for", waits_for(entry));
	kv_json_close(json, '}');
}

size_t kvd_core_transfers_json(kvd_core_t *core, uint32_t ns, char *out, size_t cap)
{
	kv_json_t json = kv_json(out, cap);
	uint64_t omitted = 0;

	kv_json_open(&json, NULL, '{');
	kv_json_open(&json, "transfers", '[');
	for (uint32_t i = 0; i < core->handovers.made; i++) {
		const kvd_handover_t *entry = kvd_handover_at(core, i);

		if (entry->number == 0 || entry->ns != ns) {
			continue;
		}
		if (json.text.len < cap / 4 * 3) {
			entry_json(core, &json, entry);
		} else {
			omitted++;
		}
	}
	kv_json_close(&json, ']');
	kv_json_u64(&json, "omitted", omitted);
	kv_json_u64(&json, "other_space", core->ns[ns]->other_space);
	kv_json_text(&json, "other_space_last", core->ns[ns]->other_space_last);
	kv_json_close(&json, '}');

	return json.text.len;
}
