/* An entry's life: found, failed, given back, expired, ended. */
#include "core/handover/handover.h"
#include "core/block/block.h"
#include "core/handover/handover_impl.h"
#include "core/base/find.h"

#include <stdio.h>

#define LOG_PAUSE_NS UINT64_C(1000000000) /* of one namespace */

__extension__ typedef unsigned __int128 wide_t;

/* ---- the table of transfer ids --------------------------------------------------------------- */

static uint64_t mix(uint64_t a, uint64_t b)
{
	wide_t product = (wide_t)a * b;

	return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Transfer ids are chosen by clients: a secret decides which of them share a bucket. */
static uint64_t hash_transfer(const kvd_core_t *core, uint32_t ns, const kv_slice_t *transfer)
{
	const uint64_t *seed = core->ix.seed;
	uint64_t hash = mix(seed[0] ^ transfer->len, seed[1] ^ ns);

	for (uint32_t at = 0; at < transfer->len; at += 16) {
		uint64_t words[2] = {0, 0};
		uint32_t left = transfer->len - at;

		memcpy(words, transfer->data + at, left < sizeof words ? left : sizeof words);
		hash = mix(words[0] ^ hash ^ seed[0], words[1] ^ seed[1]);
	}

	return hash;
}

static uint32_t *bucket_of(kvd_core_t *core, uint32_t ns, const kv_slice_t *transfer)
{
	return &core->handover_heads[hash_transfer(core, ns, transfer) % KVD_HANDOVER_HEADS];
}

static kv_slice_t transfer_of(const kvd_handover_t *entry)
{
	return (kv_slice_t){entry->transfer, entry->transfer_len};
}

static int has_name(const kvd_handover_t *entry, uint32_t ns, const kv_slice_t *transfer)
{
	return entry->ns == ns && entry->transfer_len == transfer->len &&
	       memcmp(entry->transfer, transfer->data, transfer->len) == 0;
}

static kvd_handover_t *find_transfer(kvd_core_t *core, const kvd_space_t *space, const kv_slice_t *transfer)
{
	uint32_t id = *bucket_of(core, space->ns, transfer);

	while (id != KVD_NONE) {
		kvd_handover_t *entry = kvd_handover_at(core, id);

		if (entry->space == space->id && has_name(entry, space->ns, transfer)) {
			return entry;
		}
		id = entry->hash_next;
	}

	return NULL;
}

static void unlink_transfer(kvd_core_t *core, const kvd_handover_t *entry)
{
	const kv_slice_t transfer = transfer_of(entry);
	uint32_t *link = bucket_of(core, entry->ns, &transfer);

	while (*link != entry->self) {
		link = &kvd_handover_at(core, *link)->hash_next;
	}
	*link = entry->hash_next;
}

/* ---- names of entries that ended before a consumer came ------------------------------------------ */

static uint64_t hash_name(const kvd_core_t *core, const kvd_space_t *space, const kv_slice_t *transfer)
{
	const uint64_t *seed = core->ix.seed;

	return mix(hash_transfer(core, space->ns, transfer) ^ seed[0], seed[1] ^ space->id) | 1u;
}

int kvd_handover_recall(const kvd_core_t *core, const kvd_space_t *space, const kv_slice_t *transfer)
{
	const uint64_t name = hash_name(core, space, transfer);
	uint64_t *forgotten = core->ns[space->ns]->forgotten;

	for (uint32_t i = 0; i < KVD_FORGOTTEN; i++) {
		if (forgotten[i] == name) {
			forgotten[i] = 0;
			return 1;
		}
	}

	return 0;
}

/* ---- sides ----------------------------------------------------------------------------------- */

static const kvd_space_t *space_of(const kvd_core_t *core, const kvd_handover_t *entry)
{
	return core->ns[entry->ns]->numbers[entry->space];
}

static void count_side(kvd_core_t *core, const kvd_handover_side_t *side, uint32_t more)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, kvd_id_index(side->instance));

	if (instance->id == side->instance) { /* it may have ended before */
		instance->handovers += more;
	}
}

void kvd_handover_join_side(kvd_core_t *core, kvd_handover_side_t *side, const kvd_handover_call_t *call)
{
	int is_new = side->member == 0;

	*side = (kvd_handover_side_t){.member = call->member->id, .instance = call->instance->id};
	if (is_new) {
		count_side(core, side, 1);
	}
}

void kvd_handover_leave_side(kvd_core_t *core, kvd_handover_side_t *side)
{
	if (side->member != 0) {
		count_side(core, side, UINT32_MAX);
		*side = (kvd_handover_side_t){0};
	}
}

static int has_gone(kvd_core_t *core, const kvd_handover_side_t *side)
{
	const kvd_member_rec_t *member = kvd_member_find(core, side->member);

	/* Ids of members never come back, so one that is not found has gone. */
	return side->member != 0 && (!member || !member->open);
}

static uint32_t units_of_block(const kvd_core_t *core, const kvd_handover_t *entry, uint32_t group)
{
	const kvd_space_t *space = space_of(core, entry);

	return space->groups[group].block_tokens / space->hash_tokens;
}

uint32_t kvd_handover_units(const kvd_core_t *core, const kvd_handover_t *entry)
{
	uint32_t n = UINT32_MAX;

	for (uint32_t g = 0; g < space_of(core, entry)->group_count; g++) {
		uint32_t units = entry->parts[g].n * units_of_block(core, entry, g);

		n = units < n ? units : n;
	}

	return n;
}

kv_msg_handover_t kvd_handover_describe(kvd_core_t *core, const kvd_handover_t *entry)
{
	kv_msg_handover_t msg = {.number = entry->number,
				 .state = entry->state,
				 .n = entry->n,
				 .partial = entry->partial,
				 .status = entry->status,
				 .tail_bytes = entry->tail_len};

	if (entry->is_announced) {
		msg.announced = entry->ahead.n * units_of_block(core, entry, 0) + (entry->ahead.partial > 0);
	}

	return msg;
}

void kvd_handover_notify(kvd_core_t *core, const kvd_handover_t *entry, const kvd_handover_side_t *side)
{
	kv_msg_t msg = {.handover = kvd_handover_describe(core, entry)};

	msg.handover.side = side == &entry->producer;
	kvd_member_notify(core, side->member, KV_CODE_HANDOVER, &msg);
}

/* ---- time ------------------------------------------------------------------------------------ */

static kvd_list_t *expiry_bucket(kvd_core_t *core, const kvd_handover_t *entry)
{
	return kvd_wheel_bucket(&core->handover_wheel, entry->expiry_ns);
}

/* The oldest come first: an entry is added when its time without a consumer begins. */
static void set_unclaimed(kvd_core_t *core, kvd_handover_t *entry, kvd_list_t *list)
{
	const size_t link = offsetof(kvd_handover_t, of_unclaimed);

	if (entry->unclaimed) {
		kvd_list_remove(entry->unclaimed, &core->handovers, link, entry->self);
	}
	entry->unclaimed = list;
	if (list) {
		kvd_list_push(list, &core->handovers, link, entry->self);
	}
}

void kvd_handover_set_expiry(kvd_core_t *core, kvd_handover_t *entry, uint64_t expiry_ns)
{
	set_unclaimed(core, entry,
		      expiry_ns != 0 && entry->consumer.member == 0 ? &core->ns[entry->ns]->unclaimed : NULL);
	if (entry->expiry_ns != 0) {
		kvd_list_remove(expiry_bucket(core, entry), &core->handovers, offsetof(kvd_handover_t, of_bucket),
				entry->self);
	}
	entry->expiry_ns = expiry_ns;
	if (expiry_ns != 0) {
		kvd_list_push_front(expiry_bucket(core, entry), &core->handovers, offsetof(kvd_handover_t, of_bucket),
				    entry->self);
	}
}

void kvd_handover_set_deadline(kvd_core_t *core, kvd_handover_t *entry, uint64_t deadline_ns)
{
	const uint64_t lack_ns = core->now_ns + KVD_HANDOVER_LACK_NS;

	entry->deadline_ns = deadline_ns;
	kvd_handover_set_expiry(core, entry, entry->lacks_room && lack_ns < deadline_ns ? lack_ns : deadline_ns);
}

void kvd_handover_note_refusal(kvd_core_t *core, kvd_handover_t *entry)
{
	const int lacked_room = entry->lacks_room;

	entry->lacks_room = 1;
	if (!lacked_room && entry->consumer.member != 0) {
		kvd_handover_set_deadline(core, entry, entry->deadline_ns);
	}
}

uint64_t kvd_handover_ttl(const kvd_core_t *core, uint32_t ttl_ms)
{
	uint64_t ttl = (uint64_t)ttl_ms * 1000000u, most = core->config.handover_ttl_ns;

	return ttl == 0 || ttl > most ? most : ttl;
}

void kvd_handover_end_wait(kvd_core_t *core, kvd_handover_t *entry)
{
	if (entry->asked_ns != 0) {
		kv_metric_observe_ns(core->world.metrics, KV_M_HANDOVER_WAIT, core->now_ns - entry->asked_ns);
		entry->asked_ns = 0;
	}
}

/* ---- an entry begins and ends ---------------------------------------------------------------- */

uint64_t kvd_handover_bytes(const kvd_core_t *core, const kvd_handover_t *entry)
{
	const kvd_space_t *space = space_of(core, entry);
	uint64_t bytes = entry->tail_len + kvd_handover_ahead_bytes(entry);
	const kvd_pin_t *pin;

	for (uint32_t g = 0; g < space->group_count; g++) {
		const kvd_handover_part_t *part = &entry->parts[g];
		const int each = kvd_group_unchained(&space->groups[g]) || part->pins.count == 0;

		/* One pin keeps the whole path of a full group. */
		bytes += (each ? part->pins.count : part->n) * core->classes[space->blocks[g].slot_class].slot_bytes;
	}
	for (uint32_t id = entry->private_pins.head; id != KVD_NONE; id = pin->next) {
		pin = kvd_obj_at(&core->pins, id);
		bytes += core->classes[kvd_class_of(&core->ix, kvd_block_at(&core->ix, pin->block))].slot_bytes;
	}

	return bytes;
}

kv_status_t kvd_handover_create(kvd_core_t *core, kvd_handover_call_t *call, const kv_slice_t *transfer)
{
	kvd_space_t *space = call->space;
	uint32_t self, *bucket = bucket_of(core, space->ns, transfer);
	kvd_handover_t *entry;
	kv_status_t status;

	(void)kvd_handover_recall(core, space, transfer); /* the name is used again */
	status = kvd_obj_pool_get(&core->handovers, &self);
	if (status != KV_OK) {
		return status;
	}
	entry = kvd_handover_at(core, self);
	*entry = (kvd_handover_t){.number = kvd_id_make(core, self),
				  .self = self,
				  .ns = space->ns,
				  .space = space->id,
				  .epoch = space->epoch,
				  .began_ns = core->now_ns,
				  .transfer_len = transfer->len};
	for (uint32_t g = 0; g < KV_MAX_GROUPS; g++) {
		entry->parts[g].pins.head = KVD_NONE;
	}
	entry->private_pins.head = KVD_NONE;
	memcpy(entry->transfer, transfer->data, transfer->len);
	entry->hash_next = *bucket;
	*bucket = self;
	core->ns[space->ns]->handovers++;
	space->handovers++;
	call->entry = entry;

	return KV_OK;
}

void kvd_handover_drop_pins(kvd_core_t *core, kvd_handover_pins_t *pins)
{
	while (pins->head != KVD_NONE) {
		uint32_t pin = pins->head;

		pins->head = ((const kvd_pin_t *)kvd_obj_at(&core->pins, pin))->next;
		kvd_pin_drop(core, pin);
	}
	pins->count = 0;
}

static void drop_tail(kvd_core_t *core, kvd_handover_t *entry)
{
	core->ns[entry->ns]->tail_bytes -= entry->tail_len;
	kv_free(core->env, entry->tail);
	entry->tail = NULL;
	entry->tail_len = 0;
}

void kvd_handover_drop_ahead(kvd_core_t *core, kvd_handover_t *entry)
{
	if (entry->is_announced) {
		kvd_ns_t *ns = core->ns[entry->ns];

		ns->tail_bytes -= kvd_handover_ahead_bytes(entry);
		ns->announced_count--;
		core->announced_count--;
		kvd_list_remove(&ns->announced, &core->handovers, offsetof(kvd_handover_t, of_announced), entry->self);
		kv_free(core->env, entry->ahead.keys);
		entry->ahead = (kvd_ahead_t){0};
		entry->is_announced = 0;
	}
}

void kvd_handover_note_progress(kvd_core_t *core, kvd_handover_t *entry)
{
	const int lacked_room = entry->lacks_room;

	entry->lacks_room = 0;
	if (lacked_room && entry->consumer.member != 0) {
		kvd_handover_set_deadline(core, entry, entry->deadline_ns);
	}
	if (entry->consumer.member == 0) {
		kvd_handover_set_expiry(core, entry, core->now_ns + entry->ttl_ns);
		return;
	}
	if (entry->state == KV_HANDOVER_COMPLETE) {
		kvd_handover_end_wait(core, entry);
	}
	kvd_handover_notify(core, entry, &entry->consumer);
}

/* All that it keeps. */
static void drop_contents(kvd_core_t *core, kvd_handover_t *entry)
{
	for (uint32_t g = 0; g < KV_MAX_GROUPS; g++) {
		kvd_handover_drop_pins(core, &entry->parts[g].pins);
		entry->parts[g].n = 0;
	}
	kvd_handover_drop_pins(core, &entry->private_pins);
	drop_tail(core, entry);
	kvd_handover_drop_ahead(core, entry);
	entry->n = entry->partial = 0;
}

void kvd_handover_discard(kvd_core_t *core, kvd_handover_t *entry)
{
	kvd_handover_leave_side(core, &entry->producer);
	kvd_handover_leave_side(core, &entry->consumer);
	drop_contents(core, entry);
	kvd_handover_set_expiry(core, entry, 0);
	unlink_transfer(core, entry);
	core->ns[entry->ns]->handovers--;
	core->ns[entry->ns]->numbers[entry->space]->handovers--;
	entry->number = 0;
	kvd_obj_pool_put(&core->handovers, entry->self);
}

static kv_metric_t ended_metric(kv_status_t why)
{
	switch (why) {
	case KV_OK:
		return KV_M_HANDOVERS_TAKEN;
	case KV_ERR_EXPIRED:
	case KV_ERR_TIMEOUT:
		return KV_M_HANDOVERS_EXPIRED;
	case KV_ERR_ABORTED:
		return KV_M_HANDOVERS_ABORTED;
	case KV_ERR_OTHER_SPACE:
		return KV_M_HANDOVERS_OTHER_SPACE;
	default:
		return KV_M_HANDOVERS_FAILED;
	}
}

void kvd_handover_end(kvd_core_t *core, kvd_handover_t *entry, kv_status_t why, const kvd_handover_side_t *by)
{
	/* A consumer that is done with an entry that failed has not taken it. */
	entry->status = why == KV_OK && entry->state == KV_HANDOVER_FAILED ? entry->status : why;
	entry->state = KV_HANDOVER_ENDED;
	kvd_count(core, ended_metric(entry->status), 1);
	kvd_handover_end_wait(core, entry);
	if (by != &entry->producer) {
		kvd_handover_notify(core, entry, &entry->producer);
	}
	if (by != &entry->consumer) {
		kvd_handover_notify(core, entry, &entry->consumer);
	}
	kvd_handover_discard(core, entry);
}

void kvd_handover_forget(kvd_core_t *core, kvd_handover_t *entry, kv_status_t why)
{
	const kv_slice_t transfer = transfer_of(entry);
	kvd_ns_t *ns = core->ns[entry->ns];

	if (entry->consumer.member == 0) {
		ns->forgotten[ns->forgotten_next++ % KVD_FORGOTTEN] = hash_name(core, space_of(core, entry), &transfer);
	}
	kvd_handover_end(core, entry, why, NULL);
}

void kvd_handover_fail(kvd_core_t *core, kvd_handover_t *entry, kv_status_t why)
{
	kvd_handover_drop_ahead(core, entry);
	entry->state = KV_HANDOVER_FAILED;
	entry->status = why;
	/* A consumer may be loading what is there, and says when it is done. Without one nothing will be loaded, but the
	 * entry stays for its time to live: a consumer that asks late learns the reason, and waits for no producer. */
	if (entry->consumer.member == 0) {
		set_unclaimed(core, entry, &core->ns[entry->ns]->failed);
		drop_contents(core, entry);
	}
	kvd_handover_end_wait(core, entry);
	kvd_handover_notify(core, entry, &entry->consumer);
}

void kvd_handover_give_back(kvd_core_t *core, kvd_handover_t *entry)
{
	/* First: the consumer has asked for this, or has gone, and gets no notice of it. */
	kvd_handover_leave_side(core, &entry->consumer);
	kvd_handover_end_wait(core, entry);
	/* Before a SEND there is nothing that another consumer could take. Of a failed entry the reason was for one
	 * consumer, which has had it. */
	if (entry->state == KV_HANDOVER_AWAITED) {
		kvd_handover_end(core, entry, KV_ERR_ABORTED, NULL);
	} else if (entry->state == KV_HANDOVER_FAILED) {
		kvd_handover_end(core, entry, entry->status, NULL);
	} else {
		/* The next consumer has as much time as the first one had. */
		kvd_handover_set_expiry(core, entry, core->now_ns + entry->ttl_ns);
	}
}

/* ---- what has happened meanwhile ------------------------------------------------------------- */

kvd_handover_t *kvd_handover_settle(kvd_core_t *core, kvd_handover_t *entry)
{
	/* Blocks of an old epoch are being taken down: the entry has nothing left, whatever its sides do. */
	if (space_of(core, entry)->epoch != entry->epoch) {
		kvd_handover_forget(core, entry, KV_ERR_STALE_EPOCH);
		return NULL;
	}
	if (has_gone(core, &entry->producer)) {
		kvd_handover_leave_side(core, &entry->producer);
		/* What is complete needs no producer: a prefill engine may end before the consumer comes. */
		if (entry->state == KV_HANDOVER_SENDING) {
			kvd_handover_fail(core, entry, KV_ERR_PRODUCER_LOST);
		}
	}
	if (entry->number != 0 && has_gone(core, &entry->consumer)) {
		kvd_handover_give_back(core, entry);
	}

	return entry->number != 0 ? entry : NULL;
}

kv_status_t kvd_handover_find_transfer(kvd_core_t *core, const kvd_handover_name_t *name, kvd_handover_call_t *call)
{
	kv_status_t status = kvd_member_check(core, name->ns, name->member, &call->member, &call->instance);

	if (status == KV_OK) {
		status = kvd_space_find(core, name->ns, name->space, name->epoch, &call->space);
	}
	if (status != KV_OK) {
		return status;
	}
	if (name->transfer.len == 0 || name->transfer.len > KVD_TRANSFER_MAX) {
		return KV_ERR_ARG;
	}
	call->entry = find_transfer(core, call->space, &name->transfer);
	call->entry = call->entry ? kvd_handover_settle(core, call->entry) : NULL;

	return KV_OK;
}

/* ---- sides that meet in two spaces --------------------------------------------------------------- */

/* The other half of a hand-over of this name, which waits in another space. One that has both sides is none: it is not
 * disturbed (decision 070). A hand-over in memory of a GPU and the one in host memory have one name and two spaces. */
static kvd_handover_t *find_other_half(kvd_core_t *core, const kvd_space_t *space, const kv_slice_t *transfer,
				       int is_awaited)
{
	const uint32_t memory = space->memory;
	uint32_t id = *bucket_of(core, space->ns, transfer);

	while (id != KVD_NONE) {
		kvd_handover_t *entry = kvd_handover_at(core, id);

		id = entry->hash_next; /* first: the entry may end here */
		if (!has_name(entry, space->ns, transfer) || entry->space == space->id ||
		    space_of(core, entry)->memory != memory) {
			continue;
		}
		entry = kvd_handover_settle(core, entry);
		if (entry && (is_awaited ? entry->state == KV_HANDOVER_AWAITED : entry->consumer.member == 0)) {
			return entry;
		}
	}

	return NULL;
}

/* What the operator looks for: weights, cut to what a line of a log has room for. */
static const char *weights_of(const kvd_space_t *space, char out[65])
{
	const char *at = space->identity;
	size_t len = 0;

	while (at && strncmp(at, "weights=", 8) != 0) {
		at = strchr(at, '\n');
		at = at ? at + 1 : NULL;
	}
	if (at) {
		at += 8;
		len = strcspn(at, "\n");
		len = len < 64 ? len : 64;
		memcpy(out, at, len);
	}
	out[len] = '\0';

	return out;
}

kv_status_t kvd_handover_meet(kvd_core_t *core, const kvd_handover_call_t *call, const kv_slice_t *transfer,
			      int is_producer)
{
	kvd_ns_t *ns = core->ns[call->space->ns];
	kvd_handover_t *half = find_other_half(core, call->space, transfer, is_producer);
	char here[65], there[65];

	if (!half) {
		return KV_OK;
	}
	weights_of(call->space, here);
	weights_of(space_of(core, half), there);
	ns->other_space++;
	snprintf(ns->other_space_last, sizeof ns->other_space_last,
		 "hand-over %.*s: producer's weights %s (space %u), consumer's %s (space %u)", (int)transfer->len,
		 (const char *)transfer->data, is_producer ? here : there, is_producer ? call->space->id : half->space,
		 is_producer ? there : here, is_producer ? half->space : call->space->id);
	if (core->now_ns >= ns->other_space_log_ns) {
		ns->other_space_log_ns = core->now_ns + LOG_PAUSE_NS;
		kv_logf(core->env, KV_LOG_WARN, "core", "%s, %s", kv_status_text(KV_ERR_OTHER_SPACE),
			ns->other_space_last);
	}
	kvd_handover_end(core, half, KV_ERR_OTHER_SPACE, NULL);

	return KV_ERR_OTHER_SPACE;
}

static kvd_handover_t *find_number(kvd_core_t *core, uint64_t number)
{
	uint32_t self = kvd_id_index(number);

	return number != 0 && self < core->handovers.made && kvd_handover_at(core, self)->number == number
		       ? kvd_handover_at(core, self)
		       : NULL;
}

kv_status_t kvd_handover_find_number(kvd_core_t *core, uint32_t ns, kvd_member_t member, uint64_t number,
				     kvd_handover_call_t *call)
{
	kv_status_t status = kvd_member_check(core, ns, member, &call->member, &call->instance);

	if (status != KV_OK) {
		return status;
	}
	call->entry = find_number(core, number);
	call->entry = call->entry ? kvd_handover_settle(core, call->entry) : NULL;

	return call->entry ? KV_OK : KV_ERR_NOT_FOUND;
}

void kvd_handover_lose_block(kvd_core_t *core, uint32_t pin, kv_status_t why)
{
	kvd_handover_t *entry = find_number(core, ((const kvd_pin_t *)kvd_obj_at(&core->pins, pin))->owner);

	entry = kvd_handover_settle(core, entry);
	/* The caller takes a block away and goes on when no pin is left on it, so the pins go while a consumer may still
	 * load. It loses nothing: it reads under leases of its own, which end or stay for their own reasons. */
	if (entry) {
		drop_contents(core, entry);
		kvd_handover_fail(core, entry, why);
		kvd_handover_notify(core, entry, &entry->producer);
	}
}

/* ---- the end of the core ------------------------------------------------------------------------ */

void kvd_handovers_free(kvd_core_t *core)
{
	for (uint32_t i = 0; i < core->handovers.made; i++) {
		const kvd_handover_t *entry = kvd_handover_at(core, i);

		kv_free(core->env, entry->number ? entry->tail : NULL);
		kv_free(core->env, entry->number ? entry->ahead.keys : NULL);
	}
}

/* ---- check ----------------------------------------------------------------------------------- */

typedef struct sums {
	uint64_t entries, tails, sides, announced;
} sums_t;

static int is_live(const kvd_core_t *core, const kvd_handover_side_t *side)
{
	return side->member != 0 && kvd_instance_at(core, kvd_id_index(side->instance))->id == side->instance;
}

/* What namespaces and instances have counted. */
static sums_t counted_sums(const kvd_core_t *core)
{
	sums_t sums = {.announced = core->announced_count};

	for (uint32_t n = 0; n < core->ns_count; n++) {
		sums.entries += core->ns[n]->handovers;
		sums.tails += core->ns[n]->tail_bytes;
	}
	for (uint32_t i = core->instance_list.head; i != KVD_NONE; i = kvd_instance_at(core, i)->of_core.next) {
		sums.sides += kvd_instance_at(core, i)->handovers;
	}

	return sums;
}

static void sum_entry(const kvd_core_t *core, const kvd_handover_t *entry, sums_t *sums)
{
	sums->entries++;
	sums->sides += (uint64_t)is_live(core, &entry->producer) + (uint64_t)is_live(core, &entry->consumer);
	sums->tails += entry->tail_len + kvd_handover_ahead_bytes(entry);
	sums->announced += entry->is_announced != 0;
}

int kvd_handovers_check(kvd_core_t *core, uint64_t *p_pins, char *why, size_t cap)
{
	const sums_t counted = counted_sums(core);
	sums_t sums = {0};
	uint64_t pins = 0;

	for (uint32_t i = 0; i < core->handovers.made; i++) {
		const kvd_handover_t *entry = kvd_handover_at(core, i);

		if (entry->number == 0) {
			continue;
		}
		sum_entry(core, entry, &sums);
		pins += entry->private_pins.count;
		for (uint32_t g = 0; g < KV_MAX_GROUPS; g++) {
			pins += entry->parts[g].pins.count;
		}
		if (entry->expiry_ns == 0 || (entry->tail != NULL) != (entry->tail_len > 0) ||
		    (entry->state == KV_HANDOVER_AWAITED && entry->consumer.member == 0)) {
			snprintf(why, cap, "hand-over %llu is in no state", (unsigned long long)entry->number);
			return 0;
		}
	}
	if (sums.entries != core->handovers.used || memcmp(&sums, &counted, sizeof sums) != 0) {
		snprintf(why, cap,
			 "hand-overs %llu of %llu, sides %llu of %llu, tails %llu of %llu, announced %llu of %llu",
			 (unsigned long long)sums.entries, (unsigned long long)counted.entries,
			 (unsigned long long)sums.sides, (unsigned long long)counted.sides,
			 (unsigned long long)sums.tails, (unsigned long long)counted.tails,
			 (unsigned long long)sums.announced, (unsigned long long)counted.announced);
		return 0;
	}
	*p_pins = pins;

	return 1;
}
