/* The fake daemon's sockets: accept, read frames, answer, and break what a test wants broken. */
#include "fake_impl.h"

#include "kv/env.h"
#include "kv/key.h"
#include "kv/sock.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

const fake_geometry_t fake_split = {
	.block_bytes = 16384, .slot_bytes = 16384, .heads = 2, .leaves = 4, .leaf_bytes = 2048, .page_bytes = 2048};
const fake_geometry_t fake_opaque = {
	.block_bytes = 80000, .slot_bytes = 81920, .heads = 1, .leaves = 6, .leaf_bytes = 16384, .page_bytes = 40000};

/* ---- sending --------------------------------------------------------------------------------- */

static void send_frame(fake_session_t *session, kv_frame_header_t *header, const uint8_t *body, const int *fds,
		       uint32_t fd_count)
{
	size_t sent = 0, total = 0;

	header->fds = (uint16_t)fd_count;
	while (session->fd >= 0 && total < sizeof *header + header->body) {
		struct pollfd out = {.fd = session->fd, .events = POLLOUT};
		kv_status_t status = kv_sock_send(session->fd, header, body, total, total ? NULL : fds, &sent);

		if (status != KV_OK && status != KV_PENDING) {
			return;
		}
		total += sent;
		if (status == KV_PENDING && poll(&out, 1, 1000) <= 0) {
			return;
		}
	}
}

void fake_notice(fake_t *fake, uint32_t session, uint16_t code, const void *msg, const int *fds, uint32_t fd_count)
{
	kv_frame_header_t header = {
		.magic = KV_WIRE_MAGIC, .version = KV_WIRE_VERSION, .kind = KV_FRAME_NOTICE, .code = code};
	uint8_t body[256];

	kv_assert(kv_body_encode(&kv_request_find(code)->ask, msg, body, sizeof body, &header.body) == KV_OK);
	send_frame(&fake->sessions[session], &header, body, fds, fd_count);
}

static void session_close(fake_session_t *session)
{
	for (uint32_t i = 0; i < session->fd_count; i++) {
		close(session->fds[i]);
	}
	if (session->fd >= 0) {
		close(session->fd);
	}
	fake_area_free(&session->member);
	session->fd = -1;
	session->joined = 0;
	session->len = 0;
	session->fd_count = 0;
}

/* ---- answering ------------------------------------------------------------------------------- */

static void slab_announce(fake_t *fake, uint32_t at)
{
	const fake_geometry_t *g = &fake->geometry;
	const fake_lie_t none = {0}, *told = fake_lie_about(fake, FAKE_OF_SLAB), *lie = told ? told : &none;
	fake_area_t open = lie->unsealed ? fake_area_make(fake->data.bytes, 0) : (fake_area_t){.fd = -1};
	const int fds[2] = {lie->unsealed ? open.fd : fake->data.fd, fake->digests.fd};
	kv_msg_slab_add_t msg = {
		.slab = 0,
		.slots = FAKE_SLOTS,
		.slot_bytes = g->slot_bytes,
		.block_bytes = g->block_bytes,
		.heads = g->heads,
		.leaves = g->leaves,
		.memory = atomic_load(&fake->knobs.slab_memory),
		.bytes = fake->data.bytes,
		.digest_bytes = fake->digests.bytes,
	};

	fake_lie_put(fake, FAKE_OF_SLAB, &msg);
	for (int i = 0; i < (lie->twice ? 2 : 1); i++) {
		fake_notice(fake, at, KV_CODE_SLAB_ADD, &msg, fds, lie->one_less ? 1 : 2);
	}
	fake_area_free(&open);
}

static void space_reply(fake_t *fake, const kv_msg_space_open_t *ask, kv_msg_space_open_reply_t *reply)
{
	const fake_geometry_t *g = &fake->geometry;

	kv_sha256(ask->identity.data, ask->identity.len, fake->root);
	*reply = (kv_msg_space_open_reply_t){
		.epoch = fake->epoch,
		.root = {fake->root, sizeof fake->root},
		.hash_tokens = 16,
		.block_bytes = g->block_bytes,
		.heads = g->heads,
		.leaves = g->leaves,
		.leaf_bytes = g->leaf_bytes,
		.page_bytes = g->page_bytes,
		.layout = ask->layout,
	};
	if (atomic_load(&fake->knobs.space_geometry) == 1) {
		reply->leaves++;
	}
	if (atomic_load(&fake->knobs.space_geometry) == 2) {
		reply->block_bytes *= 2;
		reply->leaves *= 2;
	}
	if (atomic_load(&fake->knobs.space_geometry) == 3) {
		reply->layout =
			kv_slice_str("kvk1 heads=2 layers=4 tokens=16 k=32 v=32 dtype=bf16 inner=packed page=0");
	}
}

/* Documents in the shape of kvd's. */
static const char status_json[] =
	"{\"daemon\":{\"version\":\"9.9\",\"namespace\":\"default\",\"incarnation\":41,\"uptime_ns\":90000000000,"
	"\"restarts\":1,"
	"\"sessions\":2},\"healthy\":false,\"tiers\":{\"cpu\":{\"medium\":\"CPU\",\"limit_bytes\":4194304,\"used_"
	"bytes\":1048576,"
	"\"quarantined_bytes\":4096},\"disk\":null},"
	"\"hits\":{\"namespace\":{\"lookups\":4,\"query_tokens\":1000,\"hit_cpu_tokens\":600,\"hit_disk_tokens\":150,"
	"\"hit_rate\":0.7500,\"missed_tokens\":{\"absent\":200,\"evicted\":50,\"corrupt\":0}},"
	"\"total\":{\"lookups\":9,\"query_tokens\":4000,\"hit_cpu_tokens\":1600,\"hit_disk_tokens\":400,\"hit_rate\":0."
	"5000,"
	"\"missed_tokens\":{}}},\"degraded\":[\"there is no disk tier\"],\"core\":{\"blocks\":64,"
	"\"shares\":[{\"resource\":\"cpu\",\"share\":4194304},{\"resource\":\"index\",\"share\":4194304}],"
	"\"spaces\":[{\"space\":0,\"block_bytes\":16384,\"blocks\":64,\"identity\":\"model=test\\nweights=r1\\ndtype="
	"bf16\\n"
	"quantization=none\\nrope=none\\nlora=none\\nhash=kv1\\nhash_tokens=16\\ngroups=0:full:16\\nlayout=kvk1 "
	"heads%3D2\\n"
	"page_format=plain\\n\"}],"
	"\"instances\":[{\"instance\":\"engine-7\",\"leases\":2,\"puts\":1,\"pinned_bytes\":32768,\"unfinished_bytes\":"
	"0,"
	"\"members\":[{\"member\":1,\"role\":\"scheduler\",\"rank\":0,\"open\":true,\"program\":\"VLLM::EngineCore\","
	"\"pid\":71,"
	"\"space\":0},{\"member\":2,\"role\":\"worker\",\"rank\":0,\"open\":true,\"program\":\"VLLM::Worker\",\"pid\":"
	"72,"
	"\"space\":9},{\"member\":3,\"role\":\"worker\",\"rank\":1,\"open\":false}]}]}}";
static const char stats_json[] =
	"{\"kvd_sessions\":2,\"kvd_prefix_query_tokens_total\":1000,\"kvd_prefix_hit_tokens_total{tier=cpu}\":600,"
	"\"kvd_prefix_hit_tokens_total{tier=disk}\":150,\"kvd_big_total\":18446744073709551615}";
static const char config_json[] = "{\"cpu.size\":{\"value\":\"4MiB\",\"source\":\"command line\"}}";
static const char check_json[] =
	"{\"checks\":[{\"name\":\"pins\",\"promise\":\"P4\",\"ok\":true,\"detail\":\"3 of 3\"},"
	"{\"name\":\"sums\",\"promise\":\"P4\",\"ok\":false,\"detail\":\"1 slot\\nlost\"}]}";

static const char transfers_json[] =
	"{\"transfers\":[{\"number\":7,\"transfer\":\"young\",\"space\":1,\"state\":\"sending\",\"status\":\"OK\","
	"\"units\":4,"
	"\"tokens\":64,\"bytes\":65536,\"tail_bytes\":0,\"age_ns\":1500000,\"left_ns\":60000000000,\"producer\":\"p-"
	"0\","
	"\"consumer\":\"\",\"waits_for\":\"the producer to go on\"},{\"number\":3,\"transfer\":"
	"\"cmpl-\u00e4bcdefghijklmnopqrstuvwxyz\",\"space\":1,\"state\":\"failed\",\"status\":\"ERR_PRODUCER_LOST\","
	"\"units\":0,\"tokens\":0,\"bytes\":0,\"tail_bytes\":0,\"age_ns\":90000000000,\"left_ns\":1000000000,"
	"\"producer\":\"\",\"consumer\":\"d-0\",\"waits_for\":\"the consumer to be "
	"done\"}],\"omitted\":5,\"other_space\":2,\"other_space_last\":\"hand-over x: producer's weights a (space 1), "
	"consumer's b (space 2)\"}";

/* One hand-over, complete as soon as somebody asks for it. */
static kv_status_t answer_handover(fake_t *fake, uint16_t code, const kv_msg_t *ask, kv_msg_t *reply)
{
	const uint32_t flags = code == KV_CODE_HANDOVER_SEND ? ask->handover_send.flags : 0;
	const int ahead = (flags & KV_HANDOVER_AHEAD) != 0, last = (flags & KV_HANDOVER_LAST) != 0;

	switch (code) {
	case KV_CODE_HANDOVER_SEND:
		reply->handover_send_reply = (kv_msg_handover_send_reply_t){
			.number = 7,
			.n = 4,
			.ttl_ms = 1000,
			.state = last && !ahead ? KV_HANDOVER_COMPLETE : KV_HANDOVER_SENDING,
			.announced = ahead ? 8 : 0};
		return KV_OK;
	case KV_CODE_HANDOVER_RECV:
		reply->handover_recv_reply = (kv_msg_handover_recv_reply_t){.number = 7,
									    .state = KV_HANDOVER_COMPLETE,
									    .n = 4,
									    .tail_bytes = 5,
									    .bytes = 5,
									    .ttl_ms = 1000};
		return KV_OK;
	case KV_CODE_HANDOVER_TAIL:
		reply->handover_tail_reply.tail =
			(kv_slice_t){(const uint8_t *)"token", atomic_load(&fake->knobs.tail_bytes)};
		return KV_OK;
	case KV_CODE_HANDOVER_DONE:
		atomic_store(&fake->seen.done_flags, ask->handover_done.flags);
		return KV_OK;
	case KV_CODE_TRANSFERS:
		reply->transfers_reply.json = kv_slice_str(transfers_json);
		return KV_OK;
	default:
		return KV_ERR_UNKNOWN_REQUEST;
	}
}

static kv_status_t answer_document(uint16_t code, kv_msg_t *reply)
{
	if (code == KV_CODE_CHECK) {
		reply->check_reply = (kv_msg_check_reply_t){.failed = 1, .json = kv_slice_str(check_json)};
	} else if (code == KV_CODE_STATUS) {
		reply->status_reply.json = kv_slice_str(status_json);
	} else if (code == KV_CODE_STATS) {
		reply->stats_reply.json = kv_slice_str(stats_json);
	} else {
		reply->config_reply.json = kv_slice_str(config_json);
	}

	return KV_OK;
}

/* Everything but JOIN, which carries descriptors. */
static kv_status_t answer(fake_t *fake, uint32_t at, uint16_t code, const kv_msg_t *ask, kv_msg_t *reply)
{
	const uint32_t version = atomic_load(&fake->knobs.hello_version);

	switch (code) {
	case KV_CODE_HELLO:
		reply->hello_reply = (kv_msg_hello_reply_t){
			.version = version ? version : KV_WIRE_VERSION,
			.incarnation = fake->incarnation,
			.ns = kv_slice_str("default"),
			.max_frame = 1u << 20,
		};
		return KV_OK;
	case KV_CODE_SPACE_OPEN:
		space_reply(fake, &ask->space_open, &reply->space_open_reply);
		return KV_OK;
	case KV_CODE_SPACE_CLOSE:
		return KV_OK;
	case KV_CODE_SPACE_RESET:
		if (ask->space_reset.epoch != fake->epoch) {
			return KV_ERR_STALE_EPOCH;
		}
		kvd_mirror_set_epoch(&fake->writer, 0, ++fake->epoch);
		reply->space_reset_reply.epoch = fake->epoch;
		return KV_OK;
	case KV_CODE_ACQUIRE:
		return fake_acquire(fake, at, &ask->acquire, &reply->acquire_reply);
	case KV_CODE_RELEASE:
		return fake_release(fake, &ask->release, &reply->release_reply);
	case KV_CODE_RENEW:
		reply->renew_reply.ttl_ms = ask->renew.ttl_ms;
		return KV_OK;
	case KV_CODE_PUT_START:
		atomic_fetch_add(&fake->seen.durable_asked, ask->put_start.flags & 1u);
		return fake_put_start(fake, at, &ask->put_start, &reply->put_start_reply);
	case KV_CODE_PUT_END:
		return fake_put_end(fake, at, &ask->put_end, &reply->put_end_reply);
	case KV_CODE_KEEP:
		reply->keep_reply.ttl_ms = atomic_load(&fake->knobs.put_ttl_ms);
		return KV_OK;
	case KV_CODE_PUT_REVOKE:
		return fake_put_revoke(fake, &ask->put_revoke);
	case KV_CODE_DRAINED:
		atomic_store(&fake->seen.drained_what, ask->drained.what);
		return KV_OK;
	case KV_CODE_WITHDRAW:
		reply->withdraw_reply.withdrawn = ask->withdraw.keys.len / KV_KEY_BYTES;
		return ask->withdraw.epoch == fake->epoch ? KV_OK : KV_ERR_STALE_EPOCH;
	case KV_CODE_BAD_BLOCK:
		atomic_store(&fake->seen.bad_index, ask->bad_block.index);
		return KV_OK;
	case KV_CODE_EXPLAIN:
		return fake_explain(fake, &ask->explain, &reply->explain_reply);
	case KV_CODE_CHECK:
	case KV_CODE_STATUS:
	case KV_CODE_STATS:
	case KV_CODE_CONFIG:
		return answer_document(code, reply);
	default:
		return answer_handover(fake, code, ask, reply);
	}
}

static void corrupt_answer(fake_t *fake, fake_session_t *session, kv_frame_header_t *header, uint8_t *body)
{
	const fake_lie_t *lie = fake_lie_about(fake, FAKE_OF_ANSWER);
	struct iovec parts[] = {{header, sizeof *header / (lie->cut ? 2 : 1)}, {body, header->body}};
	const struct msghdr frame = {.msg_iov = parts, .msg_iovlen = lie->cut ? 1 : 2};

	if (lie->garbled) {
		memset(body, 0xc1, header->body);
	}
	fake_lie_put(fake, FAKE_OF_ANSWER, header);
	kv_assert(sendmsg(session->fd, &frame, MSG_NOSIGNAL) > 0);
	if (lie->cut) {
		session_close(session);
	}
}

static void join(fake_t *fake, uint32_t at, const kv_msg_join_t *ask, kv_frame_header_t *header)
{
	fake_session_t *session = &fake->sessions[at];
	kv_msg_join_reply_t reply = {.instance_id = 1, .member_id = at + 1u};
	uint8_t body[256];
	uint32_t count = 3;
	int fds[3];

	const fake_lie_t *lie = atomic_load(&fake->knobs.lie);

	atomic_store(&fake->seen.old_incarnation, ask->old_incarnation);
	fake_area_free(&session->member);
	fake_member_make(&session->member);
	reply.mirror_bytes = fake->mirror.bytes;
	reply.lease_bytes = fake->leases.bytes;
	reply.member_bytes = session->member.bytes;
	fds[0] = fake->mirror.fd;
	fds[1] = fake->leases.fd;
	fds[2] = session->member.fd;
	if (lie && lie->of <= FAKE_OF_MEMBER) {
		fake_areas_spoil(fake, session, &reply, fds, &count);
	}
	kv_assert(kv_body_encode(&kv_request_find(KV_CODE_JOIN)->reply, &reply, body, sizeof body, &header->body) ==
		  KV_OK);
	send_frame(session, header, body, fds, count);
	session->joined = 1;
	fake->newest = at;
	slab_announce(fake, at);
}

static int on_frame(fake_t *fake, uint32_t at, const kv_frame_header_t *ask, const uint8_t *body)
{
	fake_session_t *session = &fake->sessions[at];
	const kv_request_t *request = kv_request_find(ask->code);
	kv_frame_header_t header = {.magic = KV_WIRE_MAGIC,
				    .version = KV_WIRE_VERSION,
				    .kind = KV_FRAME_REPLY,
				    .code = ask->code,
				    .id = ask->id};
	kv_msg_t msg, reply = {0};
	kv_status_t status;

	if (!request || kv_body_decode(&request->ask, body, ask->body, &msg, NULL) != KV_OK) {
		return -1;
	}
	if (atomic_load(&fake->knobs.mute) == ask->code || atomic_load(&fake->knobs.mute) == UINT32_MAX) {
		return 0;
	}
	if (atomic_load(&fake->knobs.fail_code) == ask->code) {
		status = (kv_status_t)atomic_load(&fake->knobs.fail_status);
	} else if (ask->code == KV_CODE_JOIN) {
		join(fake, at, &msg.join, &header);
		atomic_fetch_add(&fake->seen.asked[ask->code], 1);
		return 0;
	} else {
		status = answer(fake, at, ask->code, &msg, &reply);
		atomic_fetch_add(&fake->seen.asked[ask->code], 1); /* with what is seen of it */
	}
	while (atomic_load(&fake->knobs.delay_code) == ask->code && !atomic_load(&fake->knobs.release) &&
	       !atomic_load(&fake->stop)) {
		pthread_mutex_unlock(&fake->lock);
		usleep(1000);
		pthread_mutex_lock(&fake->lock);
	}

	header.status = status;
	if (status == KV_OK) {
		kv_assert(kv_body_encode(&request->reply, &reply, fake->out, sizeof fake->out, &header.body) == KV_OK);
	} else {
		kv_assert(kv_error_encode("the fake says no", fake->out, sizeof fake->out, &header.body) == KV_OK);
	}
	if (atomic_load(&fake->knobs.corrupt_code) == ask->code) {
		corrupt_answer(fake, session, &header, fake->out);
	} else {
		send_frame(session, &header, fake->out, NULL, 0);
	}

	return 0;
}

static void on_readable(fake_t *fake, uint32_t at)
{
	fake_session_t *session = &fake->sessions[at];
	uint32_t count = 0;
	size_t len = 0, used = 0;
	kv_frame_header_t header;
	kv_status_t status = kv_sock_recv(session->fd, session->in + session->len, sizeof session->in - session->len,
					  &len, session->fds, &count);

	if (status != KV_OK) {
		if (status != KV_PENDING) {
			session_close(session);
		}
		return;
	}
	/* A member's pidfd: the fake has no use for it. */
	for (uint32_t i = 0; i < count && count != UINT32_MAX; i++) {
		close(session->fds[i]);
	}
	session->len += len;
	while (session->fd >= 0 && session->len - used >= sizeof header) {
		memcpy(&header, session->in + used, sizeof header);
		if (session->len - used - sizeof header < header.body) {
			break;
		}
		if (on_frame(fake, at, &header, session->in + used + sizeof header) != 0) {
			session_close(session);
			return;
		}
		used += sizeof header + header.body;
	}
	if (session->fd >= 0) {
		memmove(session->in, session->in + used, session->len - used);
		session->len -= used;
	}
}

static void on_connect(fake_t *fake)
{
	int fd = accept4(fake->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	for (uint32_t i = 0; i < FAKE_SESSIONS && fd >= 0; i++) {
		if (fake->sessions[i].fd < 0) {
			fake->sessions[i].fd = fd;
			return;
		}
	}
	if (fd >= 0) {
		close(fd);
	}
}

static void *serve(void *arg)
{
	fake_t *fake = arg;

	while (!atomic_load(&fake->stop)) {
		struct pollfd fds[FAKE_SESSIONS + 2];

		pthread_mutex_lock(&fake->lock);
		for (uint32_t i = 0; i < FAKE_SESSIONS; i++) {
			fds[i] = (struct pollfd){.fd = fake->sessions[i].fd, .events = POLLIN};
		}
		fds[FAKE_SESSIONS] = (struct pollfd){.fd = fake->listener, .events = POLLIN};
		fds[FAKE_SESSIONS + 1] = (struct pollfd){.fd = fake->wake[0], .events = POLLIN};
		pthread_mutex_unlock(&fake->lock);
		(void)poll(fds, FAKE_SESSIONS + 2, 5);

		pthread_mutex_lock(&fake->lock);
		if (!atomic_load(&fake->knobs.no_heartbeat) && fake->mirror.base) {
			kvd_mirror_set_heartbeat(&fake->writer, kv_now_ns(&kv_env_posix));
		}
		for (uint32_t i = 0; i < FAKE_SESSIONS; i++) {
			if (fds[i].revents && fake->sessions[i].fd == fds[i].fd && fds[i].fd >= 0) {
				on_readable(fake, i);
			}
		}
		if (fds[FAKE_SESSIONS].revents) {
			on_connect(fake);
		}
		pthread_mutex_unlock(&fake->lock);
	}

	return NULL;
}

/* ---- from the test's thread ------------------------------------------------------------------ */

fake_t *fake_start(const char *path, const fake_geometry_t *geometry, uint64_t incarnation)
{
	fake_t *fake = calloc(1, sizeof *fake);

	kv_assert(fake);
	fake->sessions = calloc(FAKE_SESSIONS, sizeof *fake->sessions);
	kv_assert(fake->sessions && pipe(fake->wake) == 0);
	for (uint32_t i = 0; i < FAKE_SESSIONS; i++) {
		fake->sessions[i].fd = -1;
	}
	snprintf(fake->path, sizeof fake->path, "%s", path);
	fake->incarnation = incarnation;
	fake->epoch = 1;
	fake->next_id = 100;
	fake->geometry = *geometry;
	pthread_mutex_init(&fake->lock, NULL);
	fake_areas_make(fake);
	kvd_mirror_set_heartbeat(&fake->writer, kv_now_ns(&kv_env_posix));
	kv_assert(kv_sock_listen(path, 0600, 16, &fake->listener, &(kv_sock_error_t){0}) == KV_OK);
	kv_assert(pthread_create(&fake->thread, NULL, serve, fake) == 0);

	return fake;
}

void fake_stop(fake_t *fake)
{
	atomic_store(&fake->stop, 1);
	kv_assert(write(fake->wake[1], "x", 1) == 1);
	pthread_join(fake->thread, NULL);
	for (uint32_t i = 0; i < FAKE_SESSIONS; i++) {
		session_close(&fake->sessions[i]);
	}
	close(fake->listener);
	unlink(fake->path);
	fake_area_free(&fake->mirror);
	fake_area_free(&fake->leases);
	fake_area_free(&fake->data);
	fake_area_free(&fake->digests);
	close(fake->wake[0]);
	close(fake->wake[1]);
	pthread_mutex_destroy(&fake->lock);
	free(fake->sessions);
	free(fake);
}

fake_knobs_t *fake_knobs(fake_t *fake)
{
	return &fake->knobs;
}

const fake_seen_t *fake_seen(fake_t *fake)
{
	pthread_mutex_lock(&fake->lock); /* whose effect a test sees, that request is counted */
	pthread_mutex_unlock(&fake->lock);

	return &fake->seen;
}

void fake_drop_sessions(fake_t *fake)
{
	pthread_mutex_lock(&fake->lock);
	for (uint32_t i = 0; i < FAKE_SESSIONS; i++) {
		session_close(&fake->sessions[i]);
	}
	pthread_mutex_unlock(&fake->lock);
}

void fake_flip(fake_t *fake, uint32_t slot, size_t byte)
{
	pthread_mutex_lock(&fake->lock);
	fake->data.base[(size_t)slot * fake->geometry.slot_bytes + byte] ^= 0x10;
	pthread_mutex_unlock(&fake->lock);
}

void fake_reset_space(fake_t *fake)
{
	pthread_mutex_lock(&fake->lock);
	kvd_mirror_set_epoch(&fake->writer, 0, ++fake->epoch);
	pthread_mutex_unlock(&fake->lock);
}

void fake_retire_slab(fake_t *fake)
{
	kv_msg_slab_retire_t msg = {.slab = 0};

	pthread_mutex_lock(&fake->lock);
	for (uint32_t i = 0; i < FAKE_SESSIONS; i++) {
		if (fake->sessions[i].joined) {
			fake_notice(fake, i, KV_CODE_SLAB_RETIRE, &msg, NULL, 0);
		}
	}
	pthread_mutex_unlock(&fake->lock);
}

uint64_t fake_ring_records(fake_t *fake)
{
	uint64_t head;

	pthread_mutex_lock(&fake->lock);
	head = atomic_load(&((kv_member_area_header_t *)fake->sessions[fake->newest].member.base)->head);
	pthread_mutex_unlock(&fake->lock);

	return head;
}
