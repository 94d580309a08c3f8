/* The owner's side of a transfer.
 *
 *   ASK --keys, and for a hand-over the right to be its consumer--> WAITING
 *   WAITING --more units than were offered--> LEASING --leases are ready--> OFFERING
 *   OFFERING --every block of the leases was offered, and pushed or not wanted--> WAITING
 *   WAITING --the hand-over is complete--> ENDED --FINISH--> gone
 *   any --failure, or the deadline--> ENDED: END says why       any --the link has gone--> gone
 *
 * Bytes are sent from the pool's own memory, under a lease, and verified where they arrive. A lease that is revoked
 * meanwhile means other bytes, which do not match.
 */
#include "net/prefix.h"

#include <stdlib.h>
#include <string.h>

typedef enum state { WAITING, LEASING, OFFERING, ENDED } state_t;

/* One message of bytes. */
typedef struct batch {
	struct batch *next;
	kvd_serve_t *serve;
	uint64_t id;
	uint8_t ticket[KVD_NET_TICKET];
	uint32_t group, first, count; /* group: an index */
	int wanted;                   /* GO has come */
	int pushing;
} batch_t;

struct kvd_serve {
	kvd_serve_t *next;
	kvd_net_t *net;
	kvd_inbound_t *from; /* NULL: its link has gone, and a push is still under way */
	kvd_net_peer_t *peer;
	uint64_t id;
	state_t state;
	kvd_prefix_t prefix;
	char transfer[KVC_MAX_TRANSFER + 1]; /* "": a prefix */
	char layout[KVK_LAYOUTS_TEXT_MAX];
	uint64_t deadline_ns;
	kvc_handover_t *handover;
	uint32_t offered; /* units */
	uint32_t target;  /* units of this round */
	uint32_t partial; /* tokens after them, in a private block; 0: none, or
			     not known yet */
	int private_round, private_done;
	uint32_t group, block;                               /* the next one to be offered */
	uint32_t first[KVD_GROUPS_MAX], end[KVD_GROUPS_MAX]; /* blocks of this round */
	uint32_t done[KVD_GROUPS_MAX];                       /* blocks of full groups that were offered */
	kvc_lease_t *leases[KVD_GROUPS_MAX];
	batch_t *batches;
	uint32_t batch_count;
	kv_status_t failed; /* of a push */
	kv_status_t why;    /* ENDED: what END says, */
	int must_end;       /* and it has not been sent: the link had no room for it */
};

/* ---- the end --------------------------------------------------------------------------------- */

static void drop_leases(kvd_serve_t *serve)
{
	kvc_release(serve->leases, KVD_GROUPS_MAX);
	memset(serve->leases, 0, sizeof serve->leases);
}

/* What is being pushed is still read: its lease goes with the last push. */
static int has_pushes(const kvd_serve_t *serve)
{
	for (const batch_t *batch = serve->batches; batch; batch = batch->next) {
		if (batch->pushing) {
			return 1;
		}
	}

	return 0;
}

/* Without it the consumer would wait for its deadline, so it is sent again until the link takes it. */
static void send_end(kvd_serve_t *serve)
{
	kvc_handover_info_t info = {.struct_size = sizeof info};
	kvd_net_end_t end = {.id = serve->id, .status = serve->why};
	kv_status_t status;

	if (serve->why == KV_OK && serve->handover) {
		kvc_handover_get_info(serve->handover, &info);
		end.tail = (kv_slice_t){info.tail, info.tail_len};
	}
	status = kvd_link_send(serve->from->link, KVD_NET_END, &end);
	serve->must_end = status == KV_ERR_BUSY || status == KV_ERR_NOMEM;
}

static void end_serve(kvd_serve_t *serve, kv_status_t status)
{
	/* Our session with the daemon here may have ended, not one of the consumer's. */
	const int is_ours = status == KV_ERR_REVOKED || status == KV_ERR_CLOSED;

	if (serve->state != ENDED) {
		serve->state = ENDED;
		serve->why = is_ours ? KV_ERR_PRODUCER_LOST : status;
		serve->must_end = 1;
	}
}

/* 1: nothing of it is left. */
static int may_free(kvd_serve_t *serve)
{
	batch_t **at = &serve->batches;

	while (*at) {
		batch_t *batch = *at;

		if (batch->pushing) {
			at = &batch->next;
			continue;
		}
		*at = batch->next;
		free(batch);
	}
	if (serve->batches) {
		return 0;
	}
	drop_leases(serve);

	return 1;
}

static void finish(kvd_serve_t *serve, kv_status_t status)
{
	serve->peer->serving--;
	if (status == KV_OK) {
		serve->peer->counts.served++;
	} else {
		serve->peer->counts.serve_failed++;
	}
	kvc_handover_done(serve->handover, status != KV_OK);
	serve->handover = NULL;
	serve->state = ENDED;
	serve->from = NULL;
}

void kvd_serves_lost(kvd_inbound_t *from)
{
	for (kvd_serve_t *serve = from->net->serves; serve; serve = serve->next) {
		if (serve->from == from) {
			finish(serve, KV_ERR_CLOSED);
		}
	}
}

/* ---- what the peer says ---------------------------------------------------------------------- */

static kvd_serve_t *find_serve(const kvd_inbound_t *from, uint64_t id)
{
	kvd_serve_t *serve = from->net->serves;

	while (serve && (serve->from != from || serve->id != id)) {
		serve = serve->next;
	}

	return serve;
}

static kv_status_t refuse(kvd_inbound_t *from, uint64_t id, kv_status_t why)
{
	const kvd_net_end_t end = {.id = id, .status = why};

	from->peer->counts.serve_failed++;

	return kvd_link_send(from->link, KVD_NET_END, &end);
}

kv_status_t kvd_serve_ask(kvd_inbound_t *from, const kvd_net_ask_t *ask)
{
	const uint64_t timeout_ns = (ask->timeout_ms ? ask->timeout_ms : 600000u) * UINT64_C(1000000);
	char ns[KVD_NET_NAME_MAX + 1] = "";
	kvd_prefix_names_t names = {.ns = ns,
				    .identity = ask->identity,
				    .salt = ask->salt,
				    .names = ask->names,
				    .rest = ask->rest,
				    .hash_bytes = ask->hash_bytes,
				    .is_handover = !(ask->flags & KVD_NET_PREFIX)};
	kvd_serve_t *serve;
	kv_status_t status;

	if (find_serve(from, ask->id)) {
		return KV_ERR_PROTO;
	}
	if (!kvd_net_has_way(from)) {
		return refuse(from, ask->id, KV_ERR_UNREACHABLE);
	}
	if (from->peer->serving >= KVD_NET_SERVES_MAX) {
		return refuse(from, ask->id, KV_ERR_BUSY);
	}
	serve = calloc(1, sizeof *serve);
	if (!serve) {
		return refuse(from, ask->id, KV_ERR_NOMEM);
	}
	memcpy(ns, ask->ns.data, ask->ns.len);
	status = kvd_prefix_init(from->net, &names, &serve->prefix);
	if (status != KV_OK) {
		free(serve);
		return refuse(from, ask->id, status);
	}
	serve->net = from->net;
	serve->from = from;
	serve->peer = from->peer;
	serve->id = ask->id;
	serve->deadline_ns = from->net->now_ns + timeout_ns;
	serve->offered = ask->skip;
	if (!(ask->flags & KVD_NET_PREFIX)) {
		memcpy(serve->transfer, ask->transfer.data, ask->transfer.len);
	}
	memcpy(serve->layout, ask->layout.data, ask->layout.len < sizeof serve->layout ? ask->layout.len : 0);
	serve->next = from->net->serves;
	from->net->serves = serve;
	from->peer->serving++;

	return KV_OK;
}

static batch_t *find_batch(const kvd_inbound_t *from, uint64_t id)
{
	for (kvd_serve_t *serve = from->net->serves; serve; serve = serve->next) {
		for (batch_t *batch = serve->from == from ? serve->batches : NULL; batch; batch = batch->next) {
			if (batch->id == id) {
				return batch;
			}
		}
	}

	return NULL;
}

static void drop_batch(batch_t *batch)
{
	batch_t **at = &batch->serve->batches;

	while (*at != batch) {
		at = &(*at)->next;
	}
	*at = batch->next;
	batch->serve->batch_count--;
	free(batch);
}

void kvd_serve_pushed(void *object, kv_status_t status)
{
	batch_t *batch = object;
	kvd_serve_t *serve = batch->serve;

	if (status == KV_OK) {
		serve->peer->counts.messages_out++;
		serve->peer->counts.bytes_out +=
			(uint64_t)batch->count * serve->prefix.geometries[batch->group].block_bytes;
	} else if (serve->failed == KV_OK) {
		serve->failed = status;
	}
	batch->pushing = 0;
	serve->peer->pushes--;
	drop_batch(batch);
}

/* Neighbours in the pool go as one run. */
static kv_status_t push(batch_t *batch)
{
	kvd_serve_t *serve = batch->serve;
	const kvc_lease_t *lease = serve->leases[batch->group];
	const size_t bytes = serve->prefix.geometries[batch->group].block_bytes;
	struct iovec runs[KVD_BYTES_RUNS_MAX];
	kvd_envelope_t envelope = {.batch = batch->id};
	uint32_t n = 0;

	for (uint32_t i = batch->first; i < batch->first + batch->count; i++) {
		const void *data;
		kvc_status_t status = kvc_lease_block(lease, i, &data, NULL);

		if (status != KVC_OK) {
			return (kv_status_t)status;
		}
		if (n > 0 && (const uint8_t *)runs[n - 1].iov_base + runs[n - 1].iov_len == data) {
			runs[n - 1].iov_len += bytes;
		} else {
			runs[n++] = (struct iovec){(void *)(uintptr_t)data, bytes};
		}
	}
	memcpy(envelope.ticket, batch->ticket, sizeof envelope.ticket);
	batch->wanted = 0;
	batch->pushing = 1;
	serve->peer->pushes++;
	kv_status_t status = kvd_net_push(serve->from, &envelope, runs, n, batch);
	if (status != KV_OK) {
		batch->pushing = 0;
		serve->peer->pushes--;
	}

	return status;
}

/* The oldest batch that a peer waits for; NULL: none, or enough are on their way. */
static batch_t *next_wanted(const kvd_inbound_t *from)
{
	batch_t *oldest = NULL;

	for (kvd_serve_t *serve = from->net->serves; serve; serve = serve->next) {
		for (batch_t *batch = serve->from == from ? serve->batches : NULL; batch; batch = batch->next) {
			if (batch->wanted && serve->state != ENDED && (!oldest || batch->id < oldest->id)) {
				oldest = batch;
			}
		}
	}

	return oldest && from->peer->pushes < KVD_NET_PUSHES_MAX ? oldest : NULL;
}

static void push_wanted(kvd_inbound_t *from)
{
	batch_t *batch;

	while ((batch = next_wanted(from))) {
		kvd_serve_t *serve = batch->serve;
		kv_status_t status = push(batch);

		if (status != KV_OK) {
			end_serve(serve, status);
		}
	}
}

kv_status_t kvd_serve_go(kvd_inbound_t *from, const kvd_net_go_t *go)
{
	batch_t *batch = find_batch(from, go->batch);

	if (!batch || batch->serve->state == ENDED) {
		return KV_OK; /* of a transfer that has ended meanwhile */
	}
	if (batch->pushing || batch->wanted) {
		return KV_ERR_PROTO;
	}
	if (go->flags & KVD_NET_SKIP) {
		drop_batch(batch);
		return KV_OK;
	}
	batch->wanted = 1;
	push_wanted(from);

	return KV_OK;
}

kv_status_t kvd_serve_finish(kvd_inbound_t *from, const kvd_net_finish_t *message)
{
	kvd_serve_t *serve = find_serve(from, message->id);

	if (serve) {
		finish(serve, message->status);
	}

	return KV_OK;
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Units that are there, and whether more may come; when none do, serve->partial is known. */
static kv_status_t count_units(kvd_serve_t *serve, uint32_t *p_n, int *p_complete)
{
	kvc_handover_info_t info = {.struct_size = sizeof info};
	kvc_key_source_t source = kvd_prefix_source(&serve->prefix);
	kvc_match_t match = {.struct_size = sizeof match};

	if (serve->transfer[0] == '\0') {
		kvc_match_lazy(kvd_prefix_space(&serve->prefix), &source, serve->prefix.n, &match);
		*p_n = match.n;
		*p_complete = 1;
		return serve->offered > 0 || match.n > 0 ? KV_OK : KV_MISS;
	}
	if (!serve->handover) {
		return (kv_status_t)kvc_handover_recv(kvd_prefix_space(&serve->prefix), serve->transfer,
						      kvd_net_left_ms(serve->net, serve->deadline_ns),
						      &serve->handover);
	}
	kvc_handover_get_info(serve->handover, &info);
	*p_n = info.n < serve->prefix.n ? info.n : serve->prefix.n;
	*p_complete = info.status == KVC_OK;
	/* Known before the tail is here. */
	serve->partial =
		info.state == KVC_HANDOVER_COMPLETE && !serve->private_done && info.n == *p_n ? info.partial : 0;

	return info.status < 0 ? (kv_status_t)info.status : KV_OK;
}

static kv_status_t begin_round(kvd_serve_t *serve)
{
	kvc_key_source_t source = kvd_prefix_source(&serve->prefix);

	for (uint32_t g = 0; g < serve->prefix.group_count; g++) {
		kvc_want_t want = {.struct_size = sizeof want,
				   .group = serve->prefix.groups[g].group,
				   .n = serve->target,
				   .source = &source};
		uint32_t first, end;

		kvd_prefix_range(&serve->prefix, g, serve->offered, &first, &serve->first[g]);
		kvd_prefix_range(&serve->prefix, g, serve->target, &first, &end);
		if (serve->prefix.groups[g].rule != KVC_RULE_FULL || serve->first[g] < first) {
			serve->first[g] = first; /* those that a sequence needs after n, perhaps once more */
		}
		if (serve->prefix.groups[g].rule == KVC_RULE_STATE && serve->partial > 0) {
			serve->first[g] = end; /* the private block is the state that is needed */
		}
		serve->end[g] = end;
		want.skip = serve->first[g];
		if (serve->first[g] < end) {
			kv_status_t status = (kv_status_t)kvc_lease_start(kvd_prefix_space(&serve->prefix), &want,
									  &serve->leases[g]);

			if (status != KV_OK) {
				return status;
			}
		}
	}
	serve->group = 0;
	serve->block = serve->first[0];
	serve->state = LEASING;

	return KV_OK;
}

/* The private block of each group. */
static kv_status_t begin_private_round(kvd_serve_t *serve)
{
	const kvd_prefix_t *prefix = &serve->prefix;
	kvc_key_source_t source = kvd_prefix_private_source(prefix);

	for (uint32_t g = 0; g < prefix->group_count; g++) {
		kvc_want_t want = {.struct_size = sizeof want, .group = prefix->groups[g].group, .source = &source};
		uint32_t first, end;
		kv_status_t status;

		kvd_prefix_range(prefix, g, serve->target, &first, &end);
		serve->first[g] = want.skip = end;
		serve->end[g] = end + 1;
		want.n = (end + 1) * (prefix->groups[g].block_tokens / prefix->unit_tokens);
		status = (kv_status_t)kvc_lease_start(kvd_prefix_space(prefix), &want, &serve->leases[g]);
		if (status != KV_OK) {
			return status;
		}
	}
	serve->group = 0;
	serve->block = serve->first[0];
	serve->private_round = 1;
	serve->state = LEASING;

	return KV_OK;
}

/* KV_PENDING: not ready. */
static kv_status_t check_leases(const kvd_serve_t *serve)
{
	for (uint32_t g = 0; g < serve->prefix.group_count; g++) {
		const kvc_lease_t *lease = serve->leases[g];
		kvc_status_t status = lease ? kvc_lease_state(lease) : KVC_OK;

		if (status == KVC_OK && lease && kvc_lease_rest_status(lease) != KVC_OK) {
			status = kvc_lease_rest_status(lease);
		}
		if (status != KVC_OK) {
			return (kv_status_t)status;
		}
		if (lease && kvc_lease_n(lease) < serve->end[g]) {
			return KV_MISS; /* shortened by an eviction */
		}
		if (lease && kvc_lease_ready(lease) < serve->end[g]) {
			return KV_PENDING;
		}
	}

	return KV_OK;
}

static kv_status_t offer(kvd_serve_t *serve, uint32_t count)
{
	const kvk_geometry_t *geometry = &serve->prefix.geometries[serve->group];
	const size_t leaves = (size_t)geometry->heads * geometry->leaves;
	batch_t *batch = calloc(1, sizeof *batch);
	uint64_t *digests = malloc((size_t)count * leaves * sizeof *digests);
	kvd_net_offer_t message;
	kv_status_t status = batch && digests ? KV_OK : KV_ERR_NOMEM;

	for (uint32_t i = 0; i < count && status == KV_OK; i++) {
		const uint64_t *of_block;

		status = (kv_status_t)kvc_lease_block(serve->leases[serve->group], serve->block + i, NULL, &of_block);
		if (status == KV_OK) {
			memcpy(digests + (size_t)i * leaves, of_block, leaves * sizeof *digests);
		}
	}
	if (status == KV_OK) {
		*batch = (batch_t){.next = serve->batches,
				   .serve = serve,
				   .id = ++serve->net->next_id,
				   .group = serve->group,
				   .first = serve->block,
				   .count = count};
		kv_random(&kv_env_posix, batch->ticket, sizeof batch->ticket);
		message = (kvd_net_offer_t){
			.id = serve->id,
			.batch = batch->id,
			.ticket = {batch->ticket, sizeof batch->ticket},
			.group = serve->prefix.groups[serve->group].group,
			.first = serve->block,
			.count = count,
			.units = serve->private_round ? serve->target : 0,
			.partial = serve->private_round ? serve->partial : 0,
			.leaves = {(const uint8_t *)digests, (uint32_t)(count * leaves * sizeof *digests)}};
		status = kvd_link_send(serve->from->link, KVD_NET_OFFER, &message);
	}
	free(digests);
	if (status != KV_OK) {
		free(batch);
		return status;
	}
	serve->batches = batch;
	serve->batch_count++;
	serve->block += count;

	return KV_OK;
}

/* All blocks of the round so far: the units are whole. */
static kv_status_t offer_units(kvd_serve_t *serve)
{
	const uint8_t ticket[KVD_NET_TICKET] = {0};
	const kvd_net_offer_t message = {.id = serve->id,
					 .batch = ++serve->net->next_id,
					 .ticket = {ticket, sizeof ticket},
					 .group = serve->prefix.groups[0].group,
					 .units = serve->target,
					 .partial = serve->private_round ? serve->partial : 0};

	return kvd_link_send(serve->from->link, KVD_NET_OFFER, &message);
}

static uint32_t batch_blocks(const kvd_serve_t *serve)
{
	const kvk_geometry_t *geometry = &serve->prefix.geometries[serve->group];
	uint32_t most = KVD_NET_BATCH_BYTES / geometry->block_bytes;
	uint32_t by_leaves = KVD_NET_MAX_LEAVES / (geometry->heads * geometry->leaves);

	most = most < by_leaves ? most : by_leaves;
	most = most < KVD_BYTES_RUNS_MAX ? most : KVD_BYTES_RUNS_MAX;

	return most > 0 ? most : 1;
}

/* KV_PENDING: more in a later step. */
static kv_status_t offer_more(kvd_serve_t *serve)
{
	while (serve->group < serve->prefix.group_count) {
		uint32_t left = serve->end[serve->group] - serve->block, most;
		kv_status_t status;

		if (left == 0) {
			serve->group++;
			serve->block = serve->group < serve->prefix.group_count ? serve->first[serve->group] : 0;
			continue;
		}
		if (serve->batch_count >= KVD_NET_OFFERS_MAX) {
			return KV_PENDING;
		}
		most = batch_blocks(serve);
		status = offer(serve, left < most ? left : most);
		if (status != KV_OK) {
			return status == KV_ERR_BUSY ? KV_PENDING : status;
		}
	}

	return serve->batch_count > 0 ? KV_PENDING : KV_OK;
}

/* The round is over, and its units are whole; before a private block they are said to be so with it, since without it
 * there may be no state after them. */
static kv_status_t end_round(kvd_serve_t *serve)
{
	kv_status_t status = KV_OK;

	drop_leases(serve);
	serve->offered = serve->target > serve->offered ? serve->target : serve->offered;
	serve->state = WAITING;
	if (serve->private_round || serve->partial == 0) {
		status = offer_units(serve);
	}
	serve->private_done |= serve->private_round;
	serve->private_round = 0;

	return status;
}

/* The private block is not there, or not the one that the consumer names: what is whole will do, where that is all that
 * a sequence needs. */
static kv_status_t give_up_private(kvd_serve_t *serve)
{
	for (uint32_t g = 0; g < serve->prefix.group_count; g++) {
		if (serve->prefix.groups[g].rule == KVC_RULE_STATE) {
			return KV_MISS;
		}
	}
	serve->partial = 0;
	serve->private_round = 0;
	serve->private_done = 1;

	return end_round(serve);
}

static kv_status_t wait_for_units(kvd_serve_t *serve)
{
	uint32_t n = 0;
	int complete = 0;
	kv_status_t status = count_units(serve, &n, &complete);

	if (status != KV_OK) {
		return status;
	}
	if (n > serve->offered) {
		serve->target = n;
		return begin_round(serve);
	}
	if (serve->partial > 0) {
		serve->target = n;
		status = (kv_status_t)kvd_prefix_set_private(&serve->prefix, serve->transfer, n, serve->partial);
		return status == KV_OK ? begin_private_round(serve) : give_up_private(serve);
	}
	if (complete) {
		end_serve(serve, KV_OK);
	}

	return KV_OK;
}

static kv_status_t step(kvd_serve_t *serve)
{
	kv_status_t status = (kv_status_t)kvd_prefix_ready(&serve->prefix);

	if (status != KV_OK) {
		return status;
	}
	if (strcmp(serve->layout, kvc_space_layout(kvd_prefix_space(&serve->prefix))) != 0) {
		return KV_ERR_LAYOUT;
	}
	if (serve->failed != KV_OK) {
		return serve->failed;
	}
	if (serve->state == WAITING) {
		return wait_for_units(serve);
	}
	if (serve->state == LEASING) {
		status = check_leases(serve);
		if (status == KV_MISS && serve->private_round) {
			return give_up_private(serve);
		}
		serve->state = status == KV_OK ? OFFERING : LEASING;
	}
	if (serve->state == OFFERING) {
		status = offer_more(serve);
		status = status == KV_OK ? end_round(serve) : status;
	}

	return status;
}

void kvd_serves_step(kvd_net_t *net)
{
	kvd_serve_t **at = &net->serves;

	for (kvd_inbound_t *from = net->inbound; from && net->serves; from = from->next) {
		push_wanted(from);
	}

	while (*at) {
		kvd_serve_t *serve = *at;
		const state_t before = serve->state;
		const int is_late = serve->from && kvd_net_left_ms(net, serve->deadline_ns) == 0;
		kv_status_t status = serve->state == ENDED || is_late ? KV_OK : step(serve);

		net->moved |= serve->state != before;

		if (status != KV_OK && status != KV_PENDING) {
			end_serve(serve, status);
		}
		if (is_late) {
			end_serve(serve, KV_ERR_TIMEOUT);
		}
		if (serve->from && serve->must_end) {
			send_end(serve);
		}
		if (serve->from && net->now_ns > serve->deadline_ns) {
			finish(serve, KV_ERR_TIMEOUT);
		}
		if (!serve->from && !has_pushes(serve) && may_free(serve)) {
			*at = serve->next;
			kvd_prefix_fini(&serve->prefix);
			free(serve);
			continue;
		}
		at = &serve->next;
	}
}
