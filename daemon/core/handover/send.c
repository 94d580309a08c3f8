/* HANDOVER_SEND: what is new becomes pinned and is told to the consumer, all of it or nothing. */
#include "core/block/block.h"
#include "core/handover/handover_impl.h"
#include "core/base/share.h"
#include "core/base/find.h"

/* One part of the request, and the pins that it gets. */
typedef struct part {
	const kv_group_t *group;
	uint32_t index; /* of the group in its space */
	uint32_t n, count;
	const uint8_t *keys;
	kvd_handover_pins_t pins;
} part_t;

typedef struct draft {
	part_t parts[KV_MAX_GROUPS];
	uint32_t count;
	kvd_ahead_t ahead;              /* with KV_HANDOVER_AHEAD */
	kvd_handover_advance_t advance; /* and what is visible of it */
	uint8_t *tail;                  /* NULL: the request has none */
} draft_t;

/* ---- what was asked for ---------------------------------------------------------------------- */

static kv_status_t decode_part(const kvd_space_t *space, const uint8_t *bytes, const kv_msg_handover_send_t *ask,
			       part_t *part)
{
	uint32_t words[3];
	kv_status_t status;

	memcpy(words, bytes, sizeof words);
	status = kvd_space_group(space, words[0], &part->group);
	if (status != KV_OK) {
		return status;
	}
	*part = (part_t){.group = part->group,
			 .index = (uint32_t)(part->group - space->groups),
			 .n = words[1],
			 .count = words[2],
			 .pins = {.head = KVD_NONE}};
	if (part->count > part->n || part->n == 0 || part->n > KV_MAX_BLOCKS) {
		return KV_ERR_ARG;
	}
	if (part->count == 0) { /* the state after the partial block is all that is needed */
		return part->group->rule == KV_RULE_STATE && ask->partial > 0 ? KV_OK : KV_ERR_ARG;
	}

	return !kvd_group_unchained(part->group) && part->count != 1 && !(ask->flags & KV_HANDOVER_AHEAD) ? KV_ERR_ARG
													  : KV_OK;
}

static kv_status_t decode_parts(const kvd_space_t *space, const kv_msg_handover_send_t *ask, draft_t *draft)
{
	uint32_t seen = 0, keys = 0;

	draft->advance = (kvd_handover_advance_t){.pins = {.head = KVD_NONE}, .private_pins = {.head = KVD_NONE}};
	for (uint32_t g = 0; g < space->group_count; g++) {
		if (ask->partial >= space->groups[g].block_tokens) {
			return KV_ERR_ARG;
		}
	}
	if (ask->partial > 0 && !(ask->flags & KV_HANDOVER_LAST)) {
		return KV_ERR_ARG;
	}
	if ((ask->flags & KV_HANDOVER_AHEAD) && (space->group_count != 1 || kvd_group_unchained(&space->groups[0]))) {
		return KV_ERR_ARG;
	}
	draft->count = ask->parts.len / KV_HANDOVER_PART_BYTES;
	if (ask->parts.len % KV_HANDOVER_PART_BYTES != 0 || draft->count > KV_MAX_GROUPS ||
	    ask->keys.len % KV_KEY_BYTES != 0) {
		return KV_ERR_ARG;
	}
	for (uint32_t i = 0; i < draft->count; i++) {
		part_t *part = &draft->parts[i];
		kv_status_t status =
			decode_part(space, ask->parts.data + (size_t)i * KV_HANDOVER_PART_BYTES, ask, part);

		if (status != KV_OK) {
			return status;
		}
		if ((seen & 1u << part->index) || part->count > ask->keys.len / KV_KEY_BYTES - keys) {
			return KV_ERR_ARG;
		}
		seen |= 1u << part->index;
		part->keys = ask->keys.data + (size_t)keys * KV_KEY_BYTES;
		keys += part->count;
	}

	return keys == ask->keys.len / KV_KEY_BYTES ? KV_OK : KV_ERR_ARG;
}

/* ---- the new pins ---------------------------------------------------------------------------- */

/* Block n of a full group lies below the one that the entry has pinned. */
static int goes_on(const kvd_core_t *core, const kvd_handover_t *entry, const part_t *part, uint32_t block)
{
	const kvd_handover_part_t *before = &entry->parts[part->index];

	if (kvd_is_private(&core->ix, kvd_block_at(&core->ix, block))) {
		return 0;
	}
	if (kvd_group_unchained(part->group)) {
		return 1;
	}

	/* One pin keeps the whole path. A block beside that path would let go of blocks that the consumer was promised.
	 */
	return kvd_depth_of(&core->ix, kvd_block_at(&core->ix, block)) == part->n &&
	       (before->pins.count == 0 ||
		kvd_index_ancestor(&core->ix, block, before->n) ==
			((const kvd_pin_t *)kvd_obj_at(&core->pins, before->pins.head))->block);
}

/* A producer that has announced may not know yet how far the entry is: what it names again is no error. */
static kv_status_t skip_known_part(const kvd_handover_t *entry, const kv_msg_handover_send_t *ask, draft_t *draft)
{
	if (entry->was_announced && draft->count > 0 && draft->parts[0].n <= entry->parts[0].n) {
		draft->count = 0;
		return ask->partial > 0 && draft->parts[0].n < entry->parts[0].n ? KV_ERR_ARG : KV_OK;
	}

	return KV_OK;
}

static kv_status_t pin_part(kvd_core_t *core, kvd_handover_call_t *call, part_t *part, uint64_t tail_bytes)
{
	/* What was handed over may be in the consumer's cache already: an entry never becomes shorter. */
	if (part->n < call->entry->parts[part->index].n) {
		return KV_ERR_ARG;
	}
	for (uint32_t i = 0; i < part->count; i++) {
		kv_key_t key;
		uint32_t block;
		kv_status_t status;

		memcpy(&key, part->keys + (size_t)i * KV_KEY_BYTES, sizeof key);
		block = kvd_index_find(&core->ix, call->space->tree, &key, part->group->id);
		if (block == KVD_NONE) {
			return KV_MISS;
		}
		if (!goes_on(core, call->entry, part, block)) {
			return KV_ERR_ARG;
		}
		status = kvd_handover_pin_block(core, call, block, tail_bytes, &part->pins);
		if (status != KV_OK) {
			return status;
		}
	}

	return KV_OK;
}

/* ---- all of it -------------------------------------------------------------------------------- */

/* Blocks that are handed over or announced when the request is taken over. */
static uint32_t reach_of(const kvd_handover_t *entry, const draft_t *draft)
{
	return draft->count > 0 ? draft->parts[0].n : kvd_handover_reach(entry);
}

/* Of what is announced with this request or before: memory for the keys, and pins for what is visible. */
static kv_status_t prepare_ahead(kvd_core_t *core, kvd_handover_call_t *call, const kv_msg_handover_send_t *ask,
				 uint64_t tail_bytes, draft_t *draft)
{
	const part_t *part = draft->count > 0 ? &draft->parts[0] : NULL;
	const kvd_handover_keys_t more = {
		.n = reach_of(call->entry, draft), .count = part ? part->count : 0, .keys = part ? part->keys : NULL};
	uint32_t lookups = UINT32_MAX;
	kv_status_t status = kvd_handover_draft_ahead(core, call->entry, &more, ask, &draft->ahead);

	return status == KV_OK
		       ? kvd_handover_pin_ahead(core, call, &draft->ahead, tail_bytes, &lookups, &draft->advance)
		       : status;
}

/* Is there no gap before the blocks that are announced, and none of those before is left out? */
static kv_status_t check_ahead(const kvd_handover_call_t *call, const draft_t *draft)
{
	const part_t *part = &draft->parts[0];
	const uint32_t known = kvd_handover_reach(call->entry);

	if (draft->count > 0 && part->n < known) {
		return KV_ERR_ARG;
	}

	return draft->count > 0 && part->n - part->count > known ? KV_MISS : KV_OK;
}

/* Memory for the tail, and all pins. What is done of it when it fails is the caller's to undo. */
static kv_status_t prepare(kvd_core_t *core, kvd_handover_call_t *call, const kv_msg_handover_send_t *ask,
			   draft_t *draft)
{
	const kv_slice_t *tail = &ask->tail;
	uint32_t ns = call->space->ns, had = call->entry->tail_len;
	uint64_t grows = tail->len > had ? tail->len - had : 0;
	kv_status_t status;

	status = ask->flags & KV_HANDOVER_AHEAD ? check_ahead(call, draft) : skip_known_part(call->entry, ask, draft);
	if (status != KV_OK) {
		return status;
	}
	if (ask->flags & KV_HANDOVER_AHEAD) {
		grows += kvd_handover_ahead_growth(call->entry, reach_of(call->entry, draft));
	}
	/* The growth is charged when the request is taken over. Until then each pin is asked for together with it, or
	 * both could fit one by one and not at once. */
	while (grows > kvd_handover_room_left(core, ns) || !kvd_handover_is_within_share(core, ns, grows)) {
		if (!kvd_handover_make_room(core, ns, 0, grows, call->entry)) {
			return kvd_handover_refuse(core, call, grows);
		}
	}
	if (tail->len > 0) {
		draft->tail = kv_alloc(core->env, tail->len);
		if (!draft->tail) {
			return KV_ERR_NOMEM;
		}
		memcpy(draft->tail, tail->data, tail->len);
	}
	if (ask->flags & KV_HANDOVER_AHEAD) {
		return prepare_ahead(core, call, ask, grows, draft);
	}
	for (uint32_t i = 0; i < draft->count; i++) {
		status = pin_part(core, call, &draft->parts[i], grows);
		if (status != KV_OK) {
			return status;
		}
	}

	return ask->partial > 0
		       ? kvd_handover_pin_private(core, call, &ask->private_key, grows, &draft->advance.private_pins)
		       : KV_OK;
}

/* ---- taking it over -------------------------------------------------------------------------- */

static void take_over_visible(kvd_core_t *core, const kvd_handover_call_t *call, const draft_t *draft,
			      const kv_msg_handover_send_t *ask)
{
	kvd_handover_t *entry = call->entry;

	kvd_handover_drop_ahead(core, entry); /* withdrawn */
	for (uint32_t i = 0; i < draft->count; i++) {
		const part_t *part = &draft->parts[i];

		/* The new pins are there: what both keep is not let go of in between. */
		kvd_handover_drop_pins(core, &entry->parts[part->index].pins);
		entry->parts[part->index] = (kvd_handover_part_t){.n = part->n, .pins = part->pins};
	}
	entry->n = kvd_handover_units(core, entry);
	entry->state = ask->flags & KV_HANDOVER_LAST ? KV_HANDOVER_COMPLETE : KV_HANDOVER_SENDING;
	kvd_handover_set_private(core, entry, ask->partial, &draft->advance.private_pins);
}

static void take_over(kvd_core_t *core, const kvd_handover_call_t *call, const draft_t *draft,
		      const kv_msg_handover_send_t *ask)
{
	kvd_handover_t *entry = call->entry;
	uint32_t tail_len = ask->tail.len;

	if (ask->flags & KV_HANDOVER_AHEAD) {
		entry->state = KV_HANDOVER_SENDING;
		kvd_handover_announce(core, entry, &draft->ahead);
		kvd_handover_advance(core, entry, &draft->advance);
	} else {
		take_over_visible(core, call, draft, ask);
	}
	if (draft->tail) {
		core->ns[entry->ns]->tail_bytes += tail_len - (uint64_t)entry->tail_len;
		kv_free(core->env, entry->tail);
		entry->tail = draft->tail;
		entry->tail_len = tail_len;
	}
}

/* The entry that the request goes on with; without a number: that a consumer awaits, or none. KV_ALREADY: announced
 * blocks have completed it, and the request is another last one. */
static kv_status_t find_entry(kvd_core_t *core, uint32_t ns, kvd_member_t member, const kv_msg_handover_send_t *ask,
			      kvd_handover_call_t *call)
{
	const kvd_handover_name_t name = {
		.ns = ns, .space = ask->space, .epoch = ask->epoch, .member = member, .transfer = ask->transfer};
	kv_status_t status = kvd_handover_find_transfer(core, &name, call);
	const kvd_handover_t *entry = call->entry;

	if (status != KV_OK) {
		return status;
	}
	if (ask->number != 0) {
		if (!entry || entry->number != ask->number || !kvd_handover_is_side(&entry->producer, call)) {
			return KV_ERR_NOT_FOUND;
		}
		/* The notice of COMPLETE and this request may have crossed. */
		if (entry->state == KV_HANDOVER_COMPLETE && entry->was_announced && (ask->flags & KV_HANDOVER_LAST)) {
			return KV_ALREADY;
		}
		return entry->state == KV_HANDOVER_SENDING  ? KV_OK
		       : entry->state == KV_HANDOVER_FAILED ? entry->status
							    : KV_ERR_EXISTS;
	}
	if (entry && entry->state != KV_HANDOVER_AWAITED) {
		return KV_ERR_EXISTS;
	}
	if (!entry) {
		status = kvd_handover_meet(core, call, &ask->transfer, 1);
	}
	if (status != KV_OK) {
		return status;
	}

	return kvd_handover_may_join(core, call);
}

/* Does the request say nothing that the entry, which is complete, does not have? */
static int is_known(const kvd_handover_t *entry, const kv_msg_handover_send_t *ask, const draft_t *draft)
{
	const uint32_t n = draft->count > 0 ? draft->parts[0].n : entry->parts[0].n;

	return ask->tail.len == 0 && n <= entry->parts[0].n &&
	       (ask->partial == 0 || (ask->partial == entry->partial && n == entry->parts[0].n));
}

/* Prepared, but not taken over. */
static void drop_draft(kvd_core_t *core, draft_t *draft)
{
	kvd_handover_drop_pins(core, &draft->advance.pins);
	kvd_handover_drop_pins(core, &draft->advance.private_pins);
	for (uint32_t i = 0; i < draft->count; i++) {
		kvd_handover_drop_pins(core, &draft->parts[i].pins);
	}
	kv_free(core->env, draft->ahead.keys);
	kv_free(core->env, draft->tail);
}

static kv_msg_handover_send_reply_t describe_sent(kvd_core_t *core, const kvd_handover_t *entry)
{
	const kv_msg_handover_t now = kvd_handover_describe(core, entry);

	return (kv_msg_handover_send_reply_t){.number = now.number,
					      .n = now.n,
					      .taken = entry->consumer.member != 0,
					      .bytes = kvd_handover_bytes(core, entry),
					      .ttl_ms = (uint32_t)(entry->ttl_ns / 1000000u),
					      .state = now.state,
					      .announced = now.announced};
}

kv_status_t kvd_handover_send(kvd_core_t *core, uint32_t ns, kvd_member_t member, const kv_msg_handover_send_t *ask,
			      kv_msg_handover_send_reply_t *reply)
{
	kvd_handover_call_t call = {0};
	draft_t draft = {0};
	kvd_handover_t *entry;
	int created;
	kv_status_t status = find_entry(core, ns, member, ask, &call), decoded;

	if (status != KV_OK && status != KV_ALREADY) {
		return status;
	}
	decoded = decode_parts(call.space, ask, &draft);
	if (decoded != KV_OK) {
		return decoded;
	}
	if (status == KV_ALREADY) {
		*reply = describe_sent(core, call.entry);
		return is_known(call.entry, ask, &draft) ? KV_OK : KV_ERR_EXISTS;
	}
	created = call.entry == NULL;
	status = created ? kvd_handover_make_entry(core, ns) : KV_OK;
	status = created && status == KV_OK ? kvd_handover_create(core, &call, &ask->transfer) : status;
	if (status != KV_OK) {
		return status;
	}
	entry = call.entry;
	status = prepare(core, &call, ask, &draft);
	if (status != KV_OK) {
		drop_draft(core, &draft);
		/* An entry without sides has no deadline, and would never end. */
		if (created) {
			kvd_handover_discard(core, entry);
		}
		/* What is announced without room is sent when it is visible, and perhaps there is room then. */
		if (status == KV_ERR_BUSY && !created && !(ask->flags & KV_HANDOVER_AHEAD)) {
			kvd_handover_note_refusal(core, entry);
		}
		if (status == KV_ERR_BUSY && (ask->flags & KV_HANDOVER_AWAIT_ROOM)) {
			kvd_handover_await_room(core, ns, call.member, call.refused);
		}
		return status;
	}

	take_over(core, &call, &draft, ask);
	/* A later request may come from another member of the instance: notices follow the one that spoke last. */
	kvd_handover_join_side(core, &entry->producer, &call);
	entry->ttl_ns = kvd_handover_ttl(core, ask->ttl_ms);
	kvd_handover_note_progress(core, entry);
	*reply = describe_sent(core, entry);

	return KV_OK;
}
