#include "e2e/rig/wire_between.h"

#include "kv/identity.h"

#define TIMEOUT_NS  UINT64_C(200000000)
#define DEADLINE_MS 20000u
#define IN_FLIGHT   (8u << 20) /* bytes: two batches at once */

/* ---- what link.c and way.c have -------------------------------------------------------------- */

typedef struct frame {
	struct frame *next;
	uint32_t code, len;
	uint8_t body[];
} frame_t;

struct kvd_link {
	wire_t *wire;
	kvd_link_state_t state;
	frame_t *queue; /* that this end has sent */
};

/* A push. Its parts happen one after the other, but for the last two. */
typedef struct push {
	struct push *next;
	int is_lost; /* its way was closed */
	kvd_envelope_t envelope;
	struct iovec runs[KVD_BYTES_RUNS_MAX];
	uint32_t count;
	size_t bytes;
	void *sender, *receiver; /* objects; NULL: it was told, or does not want it */
	int is_read;
} push_t;

static struct {
	kvd_link_t dialled, accepted; /* the asker's end, the owner's */
	kvd_inbound_t inbound;
	push_t *pushes;
} w_;

kv_status_t kvd_link_send(kvd_link_t *link, kvd_net_code_t code, const void *message)
{
	static uint8_t body[KVD_NET_MAX_BODY];
	frame_t *frame, **at;
	uint32_t len;

	if (link->state != KVD_LINK_OPEN) {
		return KV_ERR_CLOSED;
	}
	if (code == KVD_NET_END && link->wire->full > 0) {
		link->wire->full--;
		return KV_ERR_BUSY;
	}
	assert_int_equal(kv_body_encode(kvd_net_body(code), message, body, sizeof body, &len), KV_OK);
	frame = malloc(sizeof *frame + len);
	assert_non_null(frame);
	*frame = (frame_t){.code = code, .len = len};
	memcpy(frame->body, body, len);
	for (at = &link->queue; *at; at = &(*at)->next) {
	}
	*at = frame;

	return KV_OK;
}

kvd_link_state_t kvd_link_state(const kvd_link_t *link)
{
	return link->state;
}

void kvd_link_fail(kvd_link_t *link, kv_status_t status, const char *why)
{
	(void)status;
	(void)why;
	link->wire->cuts += link->state == KVD_LINK_OPEN;
	link->state = KVD_LINK_DEAD;
}

int kvd_net_has_way(const kvd_inbound_t *to)
{
	(void)to;

	return 1;
}

kv_status_t kvd_net_push(kvd_inbound_t *to, const kvd_envelope_t *envelope, const struct iovec *runs, uint32_t count,
			 void *object)
{
	push_t *push = calloc(1, sizeof *push), **at = &w_.pushes;

	(void)to;
	assert_non_null(push);
	*push = (push_t){.envelope = *envelope, .count = count, .sender = object};
	memcpy(push->runs, runs, count * sizeof *runs);
	for (uint32_t i = 0; i < count; i++) {
		push->bytes += runs[i].iov_len;
	}
	while (*at) {
		at = &(*at)->next;
	}
	*at = push;

	return KV_OK;
}

/* What is under way ends in later steps. */
static void close_way(void)
{
	for (push_t *push = w_.pushes; push; push = push->next) {
		push->is_lost = 1;
	}
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static void read_push(wire_t *wire, push_t *push)
{
	uint8_t *to = kvd_fetch_land(&wire->net[1], &push->envelope, push->bytes, &push->receiver);
	size_t done = 0;

	push->is_read = 1;
	wire->pushes++;
	for (uint32_t i = 0; to && i < push->count; done += push->runs[i++].iov_len) {
		memcpy(to + done, push->runs[i].iov_base, push->runs[i].iov_len);
	}
	if (to && wire->flip_next > 0 && --wire->flip_next == 0) {
		to[kv_test_below(wire->rng, push->bytes)] ^= (uint8_t)(1u << kv_test_below(wire->rng, 8));
		wire->flips++;
	}
}

static void report_push(push_t *push, int to_receiver)
{
	const kv_status_t status = push->is_lost ? KV_ERR_CLOSED : KV_OK;

	if (to_receiver && push->receiver) {
		kvd_fetch_landed(push->receiver, push->is_read ? status : KV_ERR_CLOSED);
		push->receiver = NULL;
	} else if (push->sender) {
		kvd_serve_pushed(push->sender, status);
		push->sender = NULL;
	}
}

static void step_pushes(wire_t *wire)
{
	push_t **at = &w_.pushes, *push;
	uint32_t count = 0;

	for (push = w_.pushes; push; push = push->next) {
		count++;
	}
	for (uint64_t i = count ? kv_test_below(wire->rng, count) : 0; i > 0; i--) {
		at = &(*at)->next;
	}
	push = *at;
	if (!push || (wire->still && !push->is_read && !push->is_lost)) {
		return;
	}
	if (!push->is_read && !push->is_lost) {
		read_push(wire, push);
		return;
	}
	report_push(push, (int)kv_test_below(wire->rng, 2));
	if (!push->sender && !push->receiver) {
		*at = push->next;
		free(push);
	}
}

/* ---- the control channel --------------------------------------------------------------------- */

static kv_status_t receive(wire_t *wire, int at_owner, uint32_t code, const kvd_net_message_t *message)
{
	kvd_net_peer_t *peer = &wire->net[1].peers[0];

	switch (code) {
	case KVD_NET_ASK:
		return at_owner ? kvd_serve_ask(&w_.inbound, &message->ask) : KV_ERR_PROTO;
	case KVD_NET_GO:
		return at_owner ? kvd_serve_go(&w_.inbound, &message->go) : KV_ERR_PROTO;
	case KVD_NET_FINISH:
		return at_owner ? kvd_serve_finish(&w_.inbound, &message->finish) : KV_ERR_PROTO;
	case KVD_NET_OFFER:
		return at_owner ? KV_ERR_PROTO : kvd_fetch_offer(peer, &message->offer);
	case KVD_NET_END:
		return at_owner ? KV_ERR_PROTO : kvd_fetch_end(peer, &message->end);
	default:
		return KV_ERR_PROTO;
	}
}

static void deliver(wire_t *wire, int to_owner)
{
	static kvd_net_message_t message;
	kvd_link_t *from = to_owner ? &w_.dialled : &w_.accepted, *to = to_owner ? &w_.accepted : &w_.dialled;
	frame_t *frame = from->queue;

	if (!frame || to->state != KVD_LINK_OPEN) {
		return;
	}
	from->queue = frame->next;
	assert_int_equal(kv_body_decode(kvd_net_body(frame->code), frame->body, frame->len, &message, NULL), KV_OK);
	/* The two sides understand each other. */
	assert_int_equal(receive(wire, to_owner, frame->code, &message), KV_OK);
	wire->delivered++;
	free(frame);
}

static void drop_frames(kvd_link_t *link)
{
	while (link->queue) {
		frame_t *frame = link->queue;

		link->queue = frame->next;
		free(frame);
	}
}

/* As links.c. When both ends have noticed the end, the next link is there. */
static void step_link(wire_t *wire)
{
	kvd_net_peer_t *peer = &wire->net[1].peers[0];

	if (w_.dialled.state == KVD_LINK_DEAD && w_.accepted.state == KVD_LINK_OPEN && kv_test_below(wire->rng, 2)) {
		w_.accepted.state = KVD_LINK_DEAD;
	} else if (w_.accepted.state == KVD_LINK_DEAD && w_.dialled.state == KVD_LINK_OPEN) {
		w_.dialled.state = KVD_LINK_DEAD;
	}
	if (w_.dialled.state == KVD_LINK_DEAD && peer->link) {
		peer->link = NULL;
		drop_frames(&w_.dialled);
		kvd_fetches_lost(peer);
	}
	if (w_.accepted.state == KVD_LINK_DEAD && w_.inbound.link) {
		drop_frames(&w_.accepted);
		kvd_serves_lost(&w_.inbound);
		close_way();
		w_.inbound.link = NULL;
	}
	if (!peer->link && !w_.inbound.link && !w_.pushes && kv_test_below(wire->rng, 20) == 0) {
		w_.dialled.state = w_.accepted.state = KVD_LINK_OPEN;
		peer->link = &w_.dialled;
		w_.inbound.link = &w_.accepted;
	}
}

void wire_cut(wire_t *wire)
{
	kvd_link_fail(kv_test_below(wire->rng, 2) ? &w_.dialled : &w_.accepted, KV_ERR_CLOSED, "cut");
}

/* ---- both ------------------------------------------------------------------------------------ */

static void step_net(kvd_net_t *net)
{
	kvd_tenants_poll(net);
	kvd_fetches_step(net);
	kvd_serves_step(net);
}

void wire_step(wire_t *wire)
{
	const uint64_t ns = kv_test_below(wire->rng, 20000);

	for (uint32_t i = 0; i < 2; i++) {
		kvd_net_set_time(&wire->net[i], wire->net[i].now_ns + ns);
	}
	switch (kv_test_below(wire->rng, 6)) {
	case 0:
	case 1:
		step_net(&wire->net[kv_test_below(wire->rng, 2)]);
		break;
	case 2:
		deliver(wire, 1);
		break;
	case 3:
		deliver(wire, 0);
		break;
	case 4:
		step_pushes(wire);
		break;
	default:
		step_link(wire);
		break;
	}
}

int wire_is_quiet(const wire_t *wire)
{
	return !wire->net[0].serves && !wire->net[1].fetches && !w_.pushes &&
	       kvd_fetch_in_flight(&wire->net[1].peers[0]) == 0 && w_.dialled.state == KVD_LINK_OPEN &&
	       w_.accepted.state == KVD_LINK_OPEN;
}

uint32_t wire_pushes(void)
{
	uint32_t n = 0;

	for (const push_t *push = w_.pushes; push; push = push->next) {
		n += push->sender != NULL;
	}

	return n;
}

kv_status_t wire_fetch(wire_t *wire, const kvc_identity_t *identity, const char *transfer, int is_prefix,
		       const uint32_t *tokens, uint32_t n_tokens)
{
	static kvd_net_fetch_t order;
	char hash_tokens[16], groups[32];
	const kv_identity_t fields = {.model = identity->model,
				      .weights = identity->weights,
				      .dtype = identity->dtype,
				      .quantization = "none",
				      .rope = identity->rope,
				      .lora = "none",
				      .hash = "kv1",
				      .hash_tokens = hash_tokens,
				      .groups = groups,
				      .layout = identity->layout,
				      .page_format = "plain"};

	memset(&order, 0, sizeof order);
	snprintf(hash_tokens, sizeof hash_tokens, "%u", identity->hash_tokens);
	snprintf(groups, sizeof groups, "0:full:%u", identity->hash_tokens);
	assert_int_equal(kv_identity_text(&fields, order.identity, sizeof order.identity, NULL), KV_OK);
	order.identity_len = (uint32_t)strlen(order.identity);
	order.version = KVD_NET_WIRE;
	order.verb = KVD_NET_VERB_FETCH;
	order.order = ++wire->order;
	snprintf(order.ns, sizeof order.ns, "default");
	snprintf(order.peer, sizeof order.peer, "node0");
	snprintf(order.transfer, sizeof order.transfer, "%s", transfer);
	order.flags = is_prefix ? KVD_NET_PREFIX : 0;
	order.timeout_ms = wire->timeout_ms;
	order.names_len = n_tokens * (uint32_t)sizeof *tokens;

	return kvd_fetch_begin(&wire->net[1], &order, (const uint8_t *)tokens);
}

int wire_has_asked(void)
{
	const frame_t *frame = w_.dialled.queue;

	while (frame && frame->code != KVD_NET_ASK) { /* behind what ended a fetch before */
		frame = frame->next;
	}

	return frame != NULL;
}

kv_status_t wire_answer(wire_t *wire, uint64_t order)
{
	kvd_net_t *net = &wire->net[1];

	for (uint32_t i = 0; i < net->answer_count; i++) {
		const kvd_net_answer_t answer = net->answers[i];

		if (answer.order == order) {
			net->answers[i] = net->answers[--net->answer_count];
			return (kv_status_t)answer.status;
		}
	}

	return KV_PENDING;
}

void wire_open(wire_t *wire, const rig_t rigs[2], kv_test_rng_t *rng)
{
	memset(wire, 0, sizeof *wire);
	memset(&w_, 0, sizeof w_);
	wire->rng = rng;
	wire->timeout_ms = DEADLINE_MS;
	for (uint32_t i = 0; i < 2; i++) {
		kvd_net_config_t *config = &wire->config[i];
		kvd_net_t *net = &wire->net[i];

		config->in_flight = IN_FLIGHT;
		config->timeout_ns = TIMEOUT_NS;
		snprintf(config->run_dir, sizeof config->run_dir, "%s", rigs[i].run_dir);
		snprintf(config->namespaces, sizeof config->namespaces, "default");
		snprintf(config->peers.peers[0].name, sizeof config->peers.peers[0].name, "node%u", 1 - i);
		config->peers.count = 1;
		*net = (kvd_net_t){.config = config, .listen_fd = -1, .now_ns = 1, .peer_count = 1};
		net->peers[0] = (kvd_net_peer_t){.net = net, .config = &config->peers.peers[0]};
		assert_int_equal(kvd_copiers_open(&net->copiers), KV_OK);
		assert_int_equal(kvd_tenants_open(net), KV_OK);
	}
	w_.dialled = w_.accepted = (kvd_link_t){.wire = wire, .state = KVD_LINK_OPEN};
	w_.inbound = (kvd_inbound_t){.net = &wire->net[0], .peer = &wire->net[0].peers[0], .link = &w_.accepted};
	wire->net[0].peers[0].inbound = &w_.inbound;
	wire->net[1].peers[0].link = &w_.dialled;
}
