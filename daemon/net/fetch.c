/* The consumer's side of a transfer: this process is the producer of a hand-over here, of the same name.
 *
 *   FETCH of the daemon --> OPENING --keys, a hand-over here has begun: the daemon is answered; ASK--> ASKED
 *   each OFFER: a put --granted--> room in the landing window: GO --bytes--> compared with the digests while they are
 *       copied into the put, by other threads --visible--> handed over, when those before are
 *   ASKED --END and all of it is handed over: FINISH--> LAST --answered--> gone
 *   any --failure, the peer is down, the consumer has gone, the deadline--> the hand-over here fails, or the FETCH has
 *       this answer: FINISH says why
 *
 * Only the landing window is remotely written. Its buffers are bounded for each peer, and one that UCX may still write
 * to is not used again before UCX has said that it will not.
 */
#include "net/prefix.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define AGAIN_MIN_NS UINT64_C(1000000) /* after BUSY, and twice that after each further one: */
#define AGAIN_NS     UINT64_C(20000000)

typedef enum state { OPENING, ASKED, LAST } state_t;
typedef enum batch_state {
	NEW,       /* no put yet */
	PUT_ASKED, /* it is not answered */
	GRANTED,   /* there is no room to land */
	COMING,    /* GO has been said */
	LANDED,
	COPYING, /* by a copier: neither put nor buffer may go */
	COPIED,
	HANDED_IN, /* and not visible yet */
	DONE
} batch_state_t;

/* A piece of a landing window. */
struct kvd_buffer {
	kvd_buffer_t *next;
	kvd_net_peer_t *peer;
	uint8_t *data;
	size_t bytes;
	int used;            /* by a batch */
	int landing;         /* UCX may write to it */
	struct batch *batch; /* NULL: nobody wants what lands */
	kv_status_t status;
};

typedef struct batch {
	struct batch *next; /* in the order of the peer's OFFERs */
	uint64_t id;
	uint8_t ticket[KVD_NET_TICKET];
	batch_state_t state;
	uint32_t group, first, count, units; /* group: an index */
	uint32_t partial; /* it is the private block, with this number of tokens; 0: blocks of the prefix */
	kvc_put_t *put;
	kvd_buffer_t *buffer;
	kvd_copy_t *copy;  /* NULL: not begun */
	uint64_t since_ns; /* COMING, on the clock peer_ns; or a put that was refused */
	uint64_t busy_ns;  /* since when there is no room for the put; 0: there is */
	uint64_t pause_ns; /* before it is asked for again */
	int below_refused; /* its put was asked for below one that was refused */
	int was_refused;   /* its put was, or that above it */
	uint64_t leaves[];
} batch_t;

struct kvd_fetch {
	kvd_fetch_t *next;
	kvd_net_t *net;
	kvd_net_peer_t *peer;
	uint64_t id;
	uint64_t order; /* of the daemon; 0: it is answered */
	state_t state;
	kvd_prefix_t prefix;
	char ns[65];
	char transfer[KVC_MAX_TRANSFER + 1];
	uint32_t flags;
	char *identity;
	uint32_t identity_len;
	uint64_t deadline_ns;
	kvc_handover_t *handover; /* ours, as its producer */
	uint32_t units;           /* that are here */
	uint32_t handed;          /* that were handed over */
	uint32_t partial;         /* tokens in the private block, which is here; 0: none */
	uint64_t busy_ns;         /* since when there is no room for them; 0: there is */
	uint64_t again_ns;        /* when to ask again */
	batch_t *batches;
	int ended; /* the peer has said END */
	uint8_t *tail;
	uint32_t tail_len;
	kv_status_t failed;
	int peer_knows; /* it needs no FINISH */
};

/* ---- the landing window ---------------------------------------------------------------------- */

static void free_buffer(kvd_buffer_t **at)
{
	kvd_buffer_t *buffer = *at;

	*at = buffer->next;
	buffer->peer->buffer_bytes -= buffer->bytes;
	munmap(buffer->data, buffer->bytes);
	free(buffer);
}

/* One of at least that size, or NULL: wait. Smaller idle ones make room. */
static kvd_buffer_t *take_buffer(kvd_net_peer_t *peer, size_t bytes)
{
	const uint64_t most = peer->net->config->in_flight;
	kvd_buffer_t **at = &peer->buffers, *buffer;

	for (buffer = peer->buffers; buffer; buffer = buffer->next) {
		if (!buffer->used && !buffer->landing && buffer->bytes >= bytes) {
			buffer->used = 1;
			return buffer;
		}
	}
	bytes = bytes > KVD_NET_BATCH_BYTES ? (bytes + 4095) / 4096 * 4096 : KVD_NET_BATCH_BYTES;
	while (*at && peer->buffer_bytes + bytes > most) {
		if ((*at)->used || (*at)->landing) {
			at = &(*at)->next;
		} else {
			free_buffer(at);
		}
	}
	if (peer->buffer_bytes + bytes > most && peer->buffer_bytes > 0) {
		return NULL;
	}
	buffer = calloc(1, sizeof *buffer);
	if (!buffer) {
		return NULL;
	}
	buffer->data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (buffer->data == MAP_FAILED) {
		free(buffer);
		return NULL;
	}
	buffer->peer = peer;
	buffer->bytes = bytes;
	buffer->used = 1;
	buffer->next = peer->buffers;
	peer->buffers = buffer;
	peer->buffer_bytes += bytes;

	return buffer;
}

uint64_t kvd_fetch_in_flight(const kvd_net_peer_t *peer)
{
	uint64_t bytes = 0;

	for (const kvd_buffer_t *buffer = peer->buffers; buffer; buffer = buffer->next) {
		bytes += buffer->used || buffer->landing ? buffer->bytes : 0;
	}

	return bytes;
}

static void give_buffer_back(batch_t *batch)
{
	if (batch->buffer) {
		batch->buffer->used = 0;
		batch->buffer->batch = NULL;
		batch->buffer = NULL;
	}
}

/* ---- the end --------------------------------------------------------------------------------- */

static void drop_batches(kvd_fetch_t *fetch)
{
	while (fetch->batches) {
		batch_t *batch = fetch->batches;

		fetch->batches = batch->next;
		give_buffer_back(batch);
		kvc_put_free(batch->put);
		free(batch->copy);
		free(batch);
	}
}

static void fail(kvd_fetch_t *fetch, kv_status_t status)
{
	if (fetch->failed == KV_OK) {
		fetch->failed = status;
	}
}

static kvc_handover_info_t handover_info(const kvd_fetch_t *fetch)
{
	kvc_handover_info_t info = {.struct_size = sizeof info};

	kvc_handover_get_info(fetch->handover, &info);

	return info;
}

static void answer(kvd_fetch_t *fetch, kv_status_t status)
{
	if (fetch->order != 0) {
		kvd_net_answer(fetch->net, fetch->order, status);
		fetch->order = 0;
	}
}

static void finish(kvd_fetch_t *fetch)
{
	const kvd_net_finish_t message = {.id = fetch->id, .status = fetch->failed};
	kvd_link_t *link = kvd_net_peer_link(fetch->peer);

	if (link && fetch->state != OPENING && !fetch->peer_knows) {
		(void)kvd_link_send(link, KVD_NET_FINISH, &message);
	}
	if (fetch->failed == KV_OK) {
		fetch->peer->counts.fetched++;
	} else {
		fetch->peer->counts.fetch_failed++;
		/* Without its name: operators of every namespace read this. */
		snprintf(fetch->peer->error, sizeof fetch->peer->error, "a transfer has failed: %s",
			 kv_status_text(fetch->failed));
		kv_log(KV_LOG_INFO, "net", "a transfer has failed: peer %s namespace %s units %u error \"%s\"",
		       fetch->peer->config->name, fetch->ns, fetch->handed, kv_status_text(fetch->failed));
	}
	/* Where a hand-over has begun the consumer hears of its end by it, and nothing is left when it has heard. One
	 * that is here already, because an earlier consumer has not taken it, goes to this one. */
	answer(fetch, fetch->failed == KV_ERR_EXISTS || (fetch->handover && handover_info(fetch).number != 0)
			      ? KV_OK
			      : fetch->failed);
	fetch->peer->fetching--;
	fetch->net->fetch_count--;
	if (fetch->failed == KV_OK) {
		kvc_handover_done(fetch->handover, 0);
	} else {
		kvc_handover_fail(fetch->handover, fetch->failed);
	}
	drop_batches(fetch);
	kvd_prefix_fini(&fetch->prefix);
	free(fetch->identity);
	free(fetch->tail);
	free(fetch);
}

void kvd_fetches_lost(kvd_net_peer_t *peer)
{
	for (kvd_fetch_t *fetch = peer->net->fetches; fetch; fetch = fetch->next) {
		if (fetch->peer == peer) {
			fail(fetch, fetch->state == OPENING ? KV_ERR_UNREACHABLE : KV_ERR_PRODUCER_LOST);
		}
	}
}

/* ---- its beginning --------------------------------------------------------------------------- */

kv_status_t kvd_fetch_begin(kvd_net_t *net, const kvd_net_fetch_t *order, const uint8_t *bytes)
{
	const kvd_prefix_names_t names = {.ns = order->ns,
					  .identity = {(const uint8_t *)order->identity, order->identity_len},
					  .salt = {(const uint8_t *)order->salt, order->salt_len},
					  .names = {bytes, order->names_len},
					  .rest = {bytes + order->names_len, order->rest_len},
					  .hash_bytes = order->hash_bytes};
	const uint64_t timeout_ns = order->timeout_ms * UINT64_C(1000000);
	kvd_net_peer_t *peer = kvd_net_peer_find(net, order->peer);
	kvd_fetch_t *fetch = peer && net->fetch_count < KVD_NET_FETCHES_MAX ? calloc(1, sizeof *fetch) : NULL;
	kv_status_t status;

	if (!fetch) {
		return peer ? KV_ERR_BUSY : KV_ERR_NOT_FOUND;
	}
	fetch->net = net;
	fetch->peer = peer;
	fetch->id = ++net->next_id;
	fetch->order = order->order;
	fetch->flags = order->flags;
	fetch->deadline_ns = net->now_ns + timeout_ns;
	memcpy(fetch->ns, order->ns, sizeof fetch->ns);
	memcpy(fetch->transfer, order->transfer, sizeof fetch->transfer);
	fetch->identity = malloc(order->identity_len + 1u);
	fetch->identity_len = order->identity_len;
	status = fetch->identity ? kvd_prefix_init(net, &names, &fetch->prefix) : KV_ERR_NOMEM;
	if (status != KV_OK) {
		free(fetch->identity);
		free(fetch);
		return status;
	}
	memcpy(fetch->identity, order->identity, order->identity_len);
	fetch->next = net->fetches;
	net->fetches = fetch;
	net->fetch_count++;
	peer->fetching++;

	return KV_OK;
}

/* Nothing of it yet. Who does not come for it within its time, or has given it up by then, does not come. */
static kv_status_t begin_handover(kvd_fetch_t *fetch)
{
	const kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk,
					    .transfer = fetch->transfer,
					    .ttl_ms = kvd_net_left_ms(fetch->net, fetch->deadline_ns)};

	return (kv_status_t)kvc_handover_send(kvd_prefix_space(&fetch->prefix), &chunk, &fetch->handover);
}

static kv_status_t send_ask(kvd_fetch_t *fetch, kvd_link_t *link)
{
	kvc_key_source_t source = kvd_prefix_source(&fetch->prefix);
	kvc_match_t match = {.struct_size = sizeof match};
	kvd_net_ask_t message = {
		.id = fetch->id,
		.ns = kv_slice_str(fetch->ns),
		.identity = {(const uint8_t *)fetch->identity, fetch->identity_len},
		.layout = kv_slice_str(kvc_space_layout(kvd_prefix_space(&fetch->prefix))),
		.transfer = kv_slice_str(fetch->transfer),
		.flags = fetch->flags,
		.hash_bytes = fetch->prefix.hash_bytes,
		.names = {fetch->prefix.names, fetch->prefix.names_len},
		.salt = kv_slice_str(fetch->prefix.salt),
		.timeout_ms = kvd_net_left_ms(fetch->net, fetch->deadline_ns),
		.rest = {fetch->prefix.names + fetch->prefix.names_len, fetch->prefix.rest_len},
	};

	if (fetch->prefix.n > 0) {
		kvc_match_lazy(kvd_prefix_space(&fetch->prefix), &source, fetch->prefix.n, &match);
	}
	fetch->units = message.skip = match.n;

	return kvd_link_send(link, KVD_NET_ASK, &message);
}

/* ---- what the peer says ---------------------------------------------------------------------- */

static kvd_fetch_t *find_fetch(const kvd_net_peer_t *peer, uint64_t id)
{
	kvd_fetch_t *fetch = peer->net->fetches;

	while (fetch && (fetch->peer != peer || fetch->id != id)) {
		fetch = fetch->next;
	}

	return fetch;
}

static int offer_is_sound(const kvd_fetch_t *fetch, const kvd_net_offer_t *offer, uint32_t g)
{
	const kvd_prefix_t *prefix = &fetch->prefix;
	const kvk_geometry_t *geometry = &prefix->geometries[g < prefix->group_count ? g : 0];
	const uint64_t leaves = (uint64_t)geometry->heads * geometry->leaves;
	uint32_t first, end;

	if (g == prefix->group_count || offer->ticket.len != KVD_NET_TICKET || offer->units > prefix->n ||
	    offer->leaves.len != offer->count * leaves * sizeof(uint64_t)) {
		return 0;
	}
	kvd_prefix_range(prefix, g, offer->partial ? offer->units : prefix->n, &first, &end);
	if (offer->partial > 0) {
		return !(fetch->flags & KVD_NET_PREFIX) &&
		       (offer->count == 0 || (offer->count == 1 && offer->first == end));
	}

	return offer->count <= KV_MAX_BLOCKS && offer->first <= end && offer->count <= end - offer->first;
}

/* There is one private block, the same in every group. */
static int is_private_block(kvd_fetch_t *fetch, const kvd_net_offer_t *offer)
{
	kvd_prefix_t *prefix = &fetch->prefix;

	return prefix->partial == 0
		       ? kvd_prefix_set_private(prefix, fetch->transfer, offer->units, offer->partial) == KVC_OK
		       : offer->partial == prefix->partial && offer->units == prefix->private_units;
}

/* Behind the others. What is only said to be whole goes with what was said so before: any number takes no room. */
static kv_status_t add_batch(kvd_fetch_t *fetch, const kvd_net_offer_t *offer, uint32_t g)
{
	uint32_t unanswered = 0;
	batch_t *batch, *last = NULL, **at;

	for (at = &fetch->batches; *at; at = &(*at)->next) {
		last = *at;
		unanswered += last->count > 0 && last->state < COMING;
	}
	if (offer->count > 0 && unanswered == KVD_NET_OFFERS_MAX) {
		return KV_ERR_PROTO;
	}
	if (offer->count == 0 && last && last->count == 0 && last->partial == offer->partial) {
		last->units = offer->units > last->units ? offer->units : last->units;
		return KV_OK;
	}
	batch = calloc(1, sizeof *batch + offer->leaves.len);
	if (!batch) {
		fail(fetch, KV_ERR_NOMEM);
		return KV_OK;
	}
	batch->id = offer->batch;
	memcpy(batch->ticket, offer->ticket.data, sizeof batch->ticket);
	batch->group = g;
	batch->first = offer->first;
	batch->count = offer->count;
	batch->units = offer->units;
	batch->partial = offer->partial;
	memcpy(batch->leaves, offer->leaves.data, offer->leaves.len);
	*at = batch;

	return KV_OK;
}

kv_status_t kvd_fetch_offer(kvd_net_peer_t *peer, const kvd_net_offer_t *offer)
{
	kvd_fetch_t *fetch = find_fetch(peer, offer->id);
	uint32_t g = 0;

	if (offer->batch <= peer->last_batch) {
		return KV_ERR_PROTO;
	}
	peer->last_batch = offer->batch;
	if (!fetch) {
		return KV_OK; /* it has ended here, and FINISH is on its way */
	}
	if (fetch->state != ASKED || fetch->ended) {
		return KV_ERR_PROTO;
	}
	while (g < fetch->prefix.group_count && fetch->prefix.groups[g].group != offer->group) {
		g++;
	}
	if (!offer_is_sound(fetch, offer, g) || (offer->partial > 0 && !is_private_block(fetch, offer))) {
		return KV_ERR_PROTO;
	}

	return add_batch(fetch, offer, g);
}

kv_status_t kvd_fetch_end(kvd_net_peer_t *peer, const kvd_net_end_t *end)
{
	kvd_fetch_t *fetch = find_fetch(peer, end->id);

	if (!fetch) {
		return KV_OK;
	}
	if (fetch->state != ASKED || fetch->ended) {
		return KV_ERR_PROTO;
	}
	fetch->ended = 1;
	if (end->status != KV_OK) {
		fail(fetch, end->status < 0 ? (kv_status_t)end->status : KV_ERR_NOT_FOUND);
		return KV_OK;
	}
	fetch->tail = malloc(end->tail.len + 1u);
	if (!fetch->tail) {
		fail(fetch, KV_ERR_NOMEM);
		return KV_OK;
	}
	memcpy(fetch->tail, end->tail.data, end->tail.len);
	fetch->tail_len = end->tail.len;

	return KV_OK;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

void *kvd_fetch_land(kvd_net_t *net, const kvd_envelope_t *envelope, size_t bytes, void **p_object)
{
	for (kvd_fetch_t *fetch = net->fetches; fetch; fetch = fetch->next) {
		for (batch_t *batch = fetch->batches; batch; batch = batch->next) {
			if (batch->id != envelope->batch || batch->state != COMING || batch->buffer->landing ||
			    !kvd_tls_equal(batch->ticket, envelope->ticket, sizeof batch->ticket) ||
			    bytes != (size_t)batch->count * fetch->prefix.geometries[batch->group].block_bytes) {
				continue;
			}
			batch->buffer->landing = 1;
			fetch->peer->landed_ns = net->peer_ns;
			*p_object = batch->buffer;
			return batch->buffer->data;
		}
	}

	return NULL;
}

void kvd_fetch_landed(void *object, kv_status_t status)
{
	kvd_buffer_t *buffer = object;

	buffer->landing = 0;
	buffer->status = status;
	buffer->peer->landed_ns = buffer->peer->net->peer_ns;
	if (buffer->batch) {
		buffer->batch->state = LANDED;
	}
}

/* ---- a batch --------------------------------------------------------------------------------- */

static kv_status_t say_go(kvd_fetch_t *fetch, const batch_t *batch, uint32_t flags)
{
	const kvd_net_go_t message = {.batch = batch->id, .flags = flags};

	return kvd_link_send(kvd_net_peer_link(fetch->peer), KVD_NET_GO, &message);
}

static kv_status_t start_put(kvd_fetch_t *fetch, batch_t *batch)
{
	const kvc_group_info_t *group = &fetch->prefix.groups[batch->group];
	const uint32_t base = group->rule == KVC_RULE_FULL && batch->first > 0 ? batch->first - 1 : batch->first;
	const uint32_t *tokens = (const uint32_t *)(const void *)fetch->prefix.names;
	const uint32_t n = batch->first + batch->count - base;
	kvc_put_options_t options = {.struct_size = sizeof options, .group = group->group, .base = base};
	kvc_key_t *keys = calloc(n, sizeof *keys);
	kv_status_t status;

	if (!keys) {
		return KV_ERR_NOMEM;
	}
	for (uint32_t i = 0; i < n; i++) {
		keys[i] = kvd_prefix_block_key(&fetch->prefix, batch->group, base + i);
	}
	if (fetch->prefix.hash_bytes == 0) {
		options.tokens = tokens + (size_t)base * group->block_tokens;
	}
	status = (kv_status_t)kvc_put_start(kvd_prefix_space(&fetch->prefix), keys, batch->first,
					    batch->first + batch->count, &options, &batch->put);
	free(keys);
	batch->state = status == KV_OK || status == KV_PENDING ? PUT_ASKED : NEW;
	batch->below_refused = 0;

	return status == KV_PENDING ? KV_OK : status;
}

/* Do the blocks of `below` follow those of `batch`? */
static int is_above(const kvd_fetch_t *fetch, const batch_t *batch, const batch_t *below)
{
	return batch->group == below->group && batch->partial == 0 && below->partial == 0 &&
	       fetch->prefix.groups[batch->group].rule == KVC_RULE_FULL;
}

/* A put is accepted below one that is accepted: does a batch above it still wait for its own? Puts are asked for ahead
 * of the answers, but for those that were refused once: while there is no room, one request asks for it, not one for
 * each batch (decision 104). */
static int waits_for_parent(const kvd_fetch_t *fetch, const batch_t *batch)
{
	for (const batch_t *above = fetch->batches; above != batch; above = above->next) {
		if ((above->state == NEW || (above->state == PUT_ASKED && batch->was_refused)) &&
		    is_above(fetch, above, batch)) {
			return 1;
		}
	}

	return 0;
}

static void ask_again(kvd_fetch_t *fetch, batch_t *batch)
{
	kvc_put_free(batch->put);
	batch->put = NULL;
	batch->state = NEW;
	batch->since_ns = fetch->net->now_ns;
	batch->was_refused = 1;
}

/* No room for a put now: others let go of theirs. Not for ever (wait_for_room()): what the namespace's own engines keep
 * may stay as long as they like. Puts are asked for ahead of the answers, so those below it are refused as well. */
static kv_status_t put_again(kvd_fetch_t *fetch, batch_t *batch)
{
	const uint64_t now = fetch->net->now_ns;

	ask_again(fetch, batch);
	batch->busy_ns = batch->busy_ns ? batch->busy_ns : now;
	batch->pause_ns = batch->pause_ns ? 2 * batch->pause_ns : AGAIN_MIN_NS;
	batch->pause_ns = batch->pause_ns < AGAIN_NS ? batch->pause_ns : AGAIN_NS;
	for (batch_t *below = batch->next; below; below = below->next) {
		below->below_refused |= below->state == PUT_ASKED && is_above(fetch, batch, below);
	}

	return now - batch->busy_ns > fetch->net->config->timeout_ns / 2 ? KV_ERR_BUSY : KV_OK;
}

static kv_status_t start_private_put(kvd_fetch_t *fetch, batch_t *batch)
{
	const kvc_put_options_t options = {
		.struct_size = sizeof options, .group = fetch->prefix.groups[batch->group].group, .private_blocks = 1};
	kv_status_t status;

	if (fetch->units > batch->units) { /* more of the prompt is here than was handed over there */
		batch->state = DONE;
		return say_go(fetch, batch, KVD_NET_SKIP);
	}
	status = (kv_status_t)kvc_put_start(kvd_prefix_space(&fetch->prefix), &fetch->prefix.private_key, 0, 1,
					    &options, &batch->put);
	batch->state = status == KV_OK || status == KV_PENDING ? PUT_ASKED : NEW;

	return status == KV_PENDING ? KV_OK : status;
}

static kv_status_t take_grant(kvd_fetch_t *fetch, batch_t *batch)
{
	kvc_handle_t handle;
	kvc_status_t status = kvc_put_export(batch->put, &handle);

	if (status == KVC_PENDING) {
		return KV_OK;
	}
	if (status == KVC_ALREADY) {
		batch->state = DONE;
		return say_go(fetch, batch, KVD_NET_SKIP);
	}
	if (status == KVC_ERR_BUSY || (status == KVC_OK && kvc_put_n(batch->put) < batch->count)) {
		return put_again(fetch, batch);
	}
	if (status == KVC_ERR_NO_PARENT && batch->below_refused) {
		ask_again(fetch, batch);
		return KV_OK;
	}
	batch->state = status == KVC_OK ? GRANTED : batch->state;

	return (kv_status_t)status;
}

static kv_status_t make_room(kvd_fetch_t *fetch, batch_t *batch)
{
	batch->buffer =
		take_buffer(fetch->peer, (size_t)batch->count * fetch->prefix.geometries[batch->group].block_bytes);
	if (!batch->buffer) {
		return kvc_put_keep(batch->put) == KVC_ERR_REVOKED ? KV_ERR_REVOKED : KV_OK;
	}
	batch->buffer->batch = batch;
	batch->state = COMING;
	batch->since_ns = fetch->net->peer_ns;

	return say_go(fetch, batch, 0);
}

/* From the landing window into the put, by another thread. */
static kv_status_t start_copy(kvd_fetch_t *fetch, batch_t *batch)
{
	kv_status_t status = batch->buffer->status == KV_OK ? KV_OK : KV_ERR_PRODUCER_LOST;
	kvd_copy_t *copy = status == KV_OK ? calloc(1, sizeof *copy + batch->count * sizeof copy->to[0]) : NULL;

	if (!copy) {
		return status == KV_OK ? KV_ERR_NOMEM : status;
	}
	for (uint32_t i = 0; i < batch->count && status == KV_OK; i++) {
		status = (kv_status_t)kvc_put_block(batch->put, i, &copy->to[i]);
		if (status == KV_ALREADY) {
			copy->to[i] = NULL;
			status = KV_OK;
		}
	}
	if (status != KV_OK) {
		free(copy);
		return status;
	}
	copy->owner = batch;
	copy->layout = &fetch->prefix.layouts[batch->group];
	copy->geometry = fetch->prefix.geometries[batch->group];
	copy->from = batch->buffer->data;
	copy->leaves = batch->leaves;
	copy->count = batch->count;
	batch->copy = copy;
	batch->state = COPYING;
	kvd_copiers_submit(fetch->net->copiers, copy);

	return KV_OK;
}

static kv_status_t take_copy(kvd_fetch_t *fetch, batch_t *batch)
{
	const kvk_geometry_t *geometry = &fetch->prefix.geometries[batch->group];
	const size_t leaves = (size_t)geometry->heads * geometry->leaves;
	kv_status_t status = batch->copy->bad > 0 ? KV_ERR_CORRUPT : KV_OK;

	fetch->peer->counts.corrupt += batch->copy->bad > 0;
	for (uint32_t i = 0; i < batch->count && status == KV_OK; i++) {
		if (batch->copy->to[i]) {
			status = (kv_status_t)kvc_put_digests(batch->put, i, batch->leaves + i * leaves);
		}
	}
	give_buffer_back(batch);
	if (status == KV_OK) {
		status = (kv_status_t)kvc_put_end(batch->put, 0, batch->count);
		batch->state = HANDED_IN;
		fetch->peer->counts.bytes_in += (uint64_t)batch->count * geometry->block_bytes;
	}

	return status;
}

static kv_status_t take_result(batch_t *batch)
{
	kvc_put_result_t result = {.struct_size = sizeof result};

	kvc_put_get_result(batch->put, &result);
	if (result.status == KVC_PENDING) {
		return KV_OK;
	}
	if (result.status == KVC_OK) {
		kvc_put_free(batch->put);
		batch->put = NULL;
		batch->state = DONE;
	}

	return (kv_status_t)result.status;
}

/* They wait for others that were asked for before; but something comes. */
static kv_status_t wait_for_bytes(kvd_fetch_t *fetch, const batch_t *batch)
{
	const uint64_t landed = fetch->peer->landed_ns, since = landed > batch->since_ns ? landed : batch->since_ns;

	if (fetch->net->peer_ns - since > fetch->net->config->timeout_ns) {
		kvd_net_peer_break(fetch->peer, KV_ERR_TIMEOUT, "bytes that were asked for did not come");
		return KV_ERR_PRODUCER_LOST;
	}

	return KV_OK;
}

static kv_status_t step_batch(kvd_fetch_t *fetch, batch_t *batch)
{
	switch (batch->state) {
	case NEW:
		if (batch->count == 0) {
			batch->state = DONE;
			return KV_OK;
		}
		if (fetch->net->now_ns - batch->since_ns < batch->pause_ns || waits_for_parent(fetch, batch)) {
			return KV_OK;
		}
		return batch->partial ? start_private_put(fetch, batch) : start_put(fetch, batch);
	case PUT_ASKED:
		return take_grant(fetch, batch);
	case GRANTED:
		return make_room(fetch, batch);
	case COMING:
		return wait_for_bytes(fetch, batch);
	case LANDED:
		return start_copy(fetch, batch);
	case COPIED:
		return take_copy(fetch, batch);
	case HANDED_IN:
		return take_result(batch);
	default:
		return KV_OK;
	}
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Those at the front that are done: their units are here. */
static void retire_batches(kvd_fetch_t *fetch)
{
	while (fetch->batches && fetch->batches->state == DONE) {
		batch_t *batch = fetch->batches;

		if (batch->units > fetch->units && (batch->partial == 0 || batch->count == 0)) {
			fetch->units = batch->units;
		}
		if (batch->partial > 0 && batch->count == 0 && fetch->units == batch->units) {
			fetch->partial = batch->partial; /* together with its units: without it there may be no state */
		}
		fetch->batches = batch->next;
		kvc_put_free(batch->put);
		free(batch->copy);
		free(batch);
	}
}

/* Hand what is here to the consumer, and at the end the tail. */
static kv_status_t hand_over(kvd_fetch_t *fetch)
{
	const int last = fetch->ended && !fetch->batches;
	const kvc_key_source_t source =
		fetch->partial > 0 ? kvd_prefix_private_source(&fetch->prefix) : kvd_prefix_source(&fetch->prefix);
	const kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk,
					    .n = fetch->units,
					    .source = &source,
					    .last = last,
					    .partial = fetch->partial,
					    .tail = fetch->tail,
					    .tail_len = last ? fetch->tail_len : 0};
	kv_status_t status;

	if (!last && (fetch->units == fetch->handed || fetch->partial > 0)) {
		return KV_OK;
	}
	status = (kv_status_t)kvc_handover_send(kvd_prefix_space(&fetch->prefix), &chunk, &fetch->handover);
	if (status == KV_OK) {
		fetch->handed = fetch->units;
		fetch->state = last ? LAST : fetch->state;
	}

	return status == KV_PENDING ? KV_OK : status;
}

/* There is no room for what is handed over. Others let go of theirs; but those may be transfers that wait as well, each
 * with a part, so nobody waits for long. */
static kv_status_t wait_for_room(kvd_fetch_t *fetch, uint32_t handed)
{
	const uint64_t now = fetch->net->now_ns;

	fetch->handed = handed;
	fetch->state = ASKED;
	fetch->busy_ns = fetch->busy_ns ? fetch->busy_ns : now;
	if (now - fetch->busy_ns > fetch->net->config->timeout_ns / 2) {
		return KV_ERR_BUSY;
	}
	if (now < fetch->again_ns) {
		return KV_PENDING;
	}
	fetch->again_ns = now + AGAIN_NS;

	return KV_OK;
}

/* What has become of the chunk before. KV_PENDING: it is not answered, or there is no room for it now;
 * KV_ALREADY: that was all. */
static kv_status_t check_handover(kvd_fetch_t *fetch)
{
	const kvc_handover_info_t info = handover_info(fetch);

	if (info.state == KVC_HANDOVER_ENDED) { /* OK: its consumer is done, also with a part of it */
		return info.status < 0 ? (kv_status_t)info.status : KV_ALREADY;
	}
	if (info.status == KVC_ERR_BUSY && fetch->state != OPENING) {
		return wait_for_room(fetch, info.n);
	}
	if (info.status == KVC_MISS) {
		return KV_ERR_BUSY; /* evicted before it was handed over */
	}
	if (info.status == KVC_OK) {
		fetch->busy_ns = 0;
	}
	if (info.status == KVC_OK && fetch->state == LAST) {
		return KV_ALREADY;
	}

	return (kv_status_t)info.status;
}

static kv_status_t step_batches(kvd_fetch_t *fetch)
{
	kv_status_t status = KV_OK;

	for (batch_t *batch = fetch->batches; batch && status == KV_OK; batch = batch->next) {
		const batch_state_t before = batch->state;

		status = step_batch(fetch, batch);
		fetch->net->moved |= batch->state != before;
	}
	if (status == KV_OK) {
		retire_batches(fetch);
	}

	return status;
}

/* KV_ALREADY: it is over, well. */
static kv_status_t step(kvd_fetch_t *fetch)
{
	kvd_link_t *link = kvd_net_peer_link(fetch->peer);
	kv_status_t status = (kv_status_t)kvd_prefix_ready(&fetch->prefix), handover;

	if (status != KV_OK) {
		return status == KV_PENDING ? KV_OK : status;
	}
	if (!link) {
		return KV_ERR_UNREACHABLE;
	}
	if (!fetch->handover) {
		return begin_handover(fetch);
	}
	handover = check_handover(fetch);
	if (handover == KV_ALREADY || handover < 0) {
		return handover;
	}
	if (handover == KV_OK) {
		answer(fetch, KV_OK);
	}
	if (fetch->state == OPENING) {
		status = handover == KV_OK ? send_ask(fetch, link) : KV_OK;
		fetch->state = handover == KV_OK && status == KV_OK ? ASKED : OPENING;
		return status;
	}
	status = step_batches(fetch);

	return status == KV_OK && handover == KV_OK ? hand_over(fetch) : status;
}

/* It is not known yet whether its hand-over has begun; so it cannot end. */
static int is_beginning(const kvd_fetch_t *fetch)
{
	return fetch->order != 0 && fetch->handover && handover_info(fetch).status == KVC_PENDING;
}

static int is_copying(const kvd_fetch_t *fetch)
{
	for (const batch_t *batch = fetch->batches; batch; batch = batch->next) {
		if (batch->state == COPYING) {
			return 1;
		}
	}

	return 0;
}

void kvd_fetches_step(kvd_net_t *net)
{
	kvd_fetch_t **at = &net->fetches;
	kvd_copy_t *copy;

	while ((copy = kvd_copiers_take(net->copiers))) {
		((batch_t *)copy->owner)->state = COPIED;
	}

	while (*at) {
		kvd_fetch_t *fetch = *at;
		kv_status_t status = fetch->failed;

		if (status == KV_OK) {
			status = kvd_net_left_ms(net, fetch->deadline_ns) > 0 ? step(fetch) : KV_ERR_TIMEOUT;
		}
		if (status != KV_OK && (is_beginning(fetch) || is_copying(fetch))) {
			if (status != KV_ALREADY) { /* that is no failure, and is found again */
				fail(fetch, status);
			}
			status = KV_OK;
		}
		if (status == KV_OK) {
			at = &fetch->next;
			continue;
		}
		fail(fetch, status == KV_ALREADY ? KV_OK : status);
		*at = fetch->next;
		finish(fetch);
	}
}
