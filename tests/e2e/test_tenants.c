/* Who must not meet: tenants, and models that differ in anything that changes a block's bytes. */
#include "e2e/rig/rig.h"

#include <zmq.h>

#define LEN 6u

static void hex(const kvc_key_t *key, char *out)
{
	for (size_t i = 0; i < sizeof key->b; i++) {
		snprintf(out + 2 * i, 3, "%02x", key->b[i]);
	}
}

typedef struct tenants {
	rig_t rig;
	char there_sock[96];
	user_t here, there;
	kvc_key_t here_keys[LEN], there_keys[LEN];
} tenants_t;

static void tenants_make(tenants_t *t)
{
	kvc_identity_t identity = user_identity("the same model");

	memset(t, 0, sizeof *t);
	rig_init(&t->rig, 1);
	rig_option(&t->rig, "--namespaces=default,rival");
	snprintf(t->there_sock, sizeof t->there_sock, "%.79s/rival.sock", t->rig.run_dir);
	rig_start(&t->rig);
	assert_int_equal(user_try(&t->here, t->rig.sock, &identity), KVC_OK);
	assert_int_equal(user_try(&t->there, t->there_sock, &identity), KVC_OK);
	user_keys(&t->here, 1, LEN, t->here_keys); /* the same tokens */
	user_keys(&t->there, 1, LEN, t->there_keys);
}

static void tenants_free(tenants_t *t)
{
	user_leave(&t->here);
	user_leave(&t->there);
	rig_end(&t->rig);
}

KV_TEST(p8_the_same_prompt_of_two_tenants_never_meets)
{
	kvc_lease_t *lease = NULL;
	uint8_t tiers[LEN];
	tenants_t t;
	uint32_t n, why;

	tenants_make(&t);
	for (uint32_t i = 0; i < LEN; i++) {
		assert_memory_not_equal(&t.here_keys[i], &t.there_keys[i], sizeof(kvc_key_t));
	}
	assert_int_equal(user_put(&t.here, t.here_keys, 0, LEN, 1, NULL), KVC_OK);
	assert_int_equal(user_get(&t.there, t.there_keys, LEN, &n), KVC_MISS);
	/* Not even with the other's keys, learnt somehow. */
	assert_int_equal(user_get(&t.there, t.here_keys, LEN, &n), KVC_MISS);
	assert_int_equal(kvc_acquire(t.there.space, t.here_keys, LEN, 0, 0, &lease), KVC_MISS);
	assert_int_equal(kvc_explain(t.there.space, t.here_keys, LEN, tiers, &why), KVC_OK);
	for (uint32_t i = 0; i < LEN; i++) {
		assert_int_equal(tiers[i], 0);
	}
	assert_int_equal(why, KV_WHY_ABSENT);
	assert_int_equal(user_put(&t.there, t.there_keys, 0, LEN, 0, NULL), KVC_OK);
	assert_int_equal(user_get(&t.there, t.there_keys, LEN, &n), KVC_OK);
	assert_int_equal(user_get(&t.here, t.here_keys, LEN, &n), KVC_OK);
	/* A space of one is not reset by the other. */
	assert_int_equal(kvc_space_reset(t.there.space), KVC_OK);
	assert_int_equal(user_match(&t.here, t.here_keys, LEN), LEN);
	assert_int_equal(user_match(&t.there, t.there_keys, LEN), 0);
	tenants_free(&t);
}

static void *subscribe(void *context, const rig_t *rig, const char *name)
{
	const int timeout = 200;
	void *socket = zmq_socket(context, ZMQ_SUB);
	char endpoint[160];

	snprintf(endpoint, sizeof endpoint, "ipc://%s/%s", rig->run_dir, name);
	zmq_setsockopt(socket, ZMQ_SUBSCRIBE, "", 0);
	zmq_setsockopt(socket, ZMQ_RCVTIMEO, &timeout, sizeof timeout);
	assert_int_equal(zmq_connect(socket, endpoint), 0);

	return socket;
}

static int comes(void *socket, long timeout_ms)
{
	zmq_pollitem_t item = {.socket = socket, .events = ZMQ_POLLIN};

	return zmq_poll(&item, 1, timeout_ms) == 1;
}

/* A subscription takes effect in the background: put until one is told of. */
static void wait_until_told(tenants_t *t, void *socket)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	kvc_key_t keys[1];

	for (uint64_t seed = 100; !comes(socket, 50); seed++) {
		assert_true(rig_now_ms() < deadline);
		user_keys(&t->here, seed, 1, keys);
		assert_int_equal(user_put(&t->here, keys, 0, 1, 0, NULL), KVC_OK);
	}
}

/* What frames of events have; and how many of those that have come had it. */
static const char *const parts_[] = {"kv@kvd@default", "BlockStored", "CPU_PINNED", "fr@team"};
static uint32_t seen_[KV_COUNT_OF(parts_)];

/* Everything that comes within 200 ms of silence. */
static uint32_t drain(void *socket, const char *forbidden)
{
	static uint8_t frame[1 << 16];
	uint32_t frames = 0;
	int len;

	while ((len = zmq_recv(socket, frame, sizeof frame, 0)) >= 0) {
		frames++;
		for (size_t i = 0; i < KV_COUNT_OF(parts_); i++) {
			seen_[i] += memmem(frame, (size_t)len, parts_[i], strlen(parts_[i])) != NULL;
		}
		assert_null(memmem(frame, (size_t)len, forbidden, strlen(forbidden)));
	}

	return frames;
}

KV_TEST(p8_no_document_and_no_event_shows_another_tenant)
{
	static char out[1 << 18];
	void *context = zmq_ctx_new(), *events, *hits, *own;
	char text[40];
	tenants_t t;

	tenants_make(&t);
	events = subscribe(context, &t.rig, "rival.events");
	hits = subscribe(context, &t.rig, "rival.hits");
	own = subscribe(context, &t.rig, "default.events");
	wait_until_told(&t, own);
	(void)drain(own, "rival");
	assert_int_equal(user_put(&t.here, t.here_keys, 0, LEN, 1, NULL), KVC_OK);
	const kvc_report_t report = {.struct_size = sizeof report, .query_tokens = 96, .hit_cpu_tokens = 96};
	kvc_report(t.here.space, &report);
	assert_true(rig_metric_reaches(&t.rig, "kvd_prefix_query_tokens_total", 96));
	assert_true(comes(own, RIG_WAIT_MS));
	assert_true(drain(own, "rival") > 0);
	assert_true(seen_[0] > 0 && seen_[1] > 0 && seen_[2] > 0);
	assert_int_equal(drain(events, ""), 0);
	assert_int_equal(drain(hits, ""), 0);

	snprintf(t.rig.sock, sizeof t.rig.sock, "%s", t.there_sock); /* what the rival sees */
	assert_int_equal(rig_kvctl(&t.rig, "status --json --detail 2", out, sizeof out), 0);
	assert_null(strstr(out, "\"default\""));
	assert_non_null(strstr(out, "\"blocks\":0"));
	for (uint32_t i = 0; i < LEN; i++) {
		hex(&t.here_keys[i], text);
		assert_null(strstr(out, text));
	}
	zmq_close(events);
	zmq_close(hits);
	zmq_close(own);
	zmq_ctx_term(context);
	tenants_free(&t);
}

/* A router knows an adapter by the engine's name: the revision behind it is ours. */
KV_TEST(p9_an_event_names_the_adapter_as_the_engine_does)
{
	void *context = zmq_ctx_new(), *events;
	kvc_identity_t identity = user_identity("m");
	kvc_key_t keys[1];
	user_t user;
	rig_t rig;

	identity.lora = "fr@team@files:00ff";
	rig_init(&rig, 0);
	rig_start(&rig);
	events = subscribe(context, &rig, "default.events");
	assert_int_equal(user_try(&user, rig.sock, &identity), KVC_OK);
	for (uint64_t seed = 1; !comes(events, 50); seed++) {
		user_keys(&user, seed, 1, keys);
		assert_int_equal(user_put(&user, keys, 0, 1, 0, NULL), KVC_OK);
	}
	assert_true(drain(events, "00ff") > 0);
	assert_true(seen_[3] > 0);
	zmq_close(events);
	zmq_ctx_term(context);
	user_leave(&user);
	rig_fini(&rig);
}

/* ---- identities ------------------------------------------------------------------------------ */

KV_TEST(p1_models_that_differ_in_one_field_never_share_a_block)
{
	kvc_identity_t identity[12];
	user_t user[KV_COUNT_OF(identity)];
	kvc_key_t keys[KV_COUNT_OF(identity)][LEN];
	const uint32_t count = KV_COUNT_OF(identity);
	kvc_lease_t *lease = NULL;
	uint32_t n;
	rig_t rig;

	for (uint32_t i = 0; i < count; i++) {
		identity[i] = user_identity("m");
	}
	identity[1].model = "M";
	identity[2].weights = "r2";
	identity[3].dtype = "f16";
	identity[4].quantization = "fp8 k=1.0 v=1.0";
	identity[5].rope = "yarn 4";
	identity[6].lora = "french";
	identity[7].hash = "sha256_cbor";
	identity[8].page_format = "amx";
	identity[9].extra = "x";
	identity[10].layout = "kvk1 heads=2 layers=4 tokens=16 k=32 v=32 dtype=f16 inner=split page=0";
	identity[11].layout = "kvk1 heads=2 layers=8 tokens=16 k=16 v=16 dtype=bf16 inner=split page=0";

	rig_init(&rig, 0);
	rig_start(&rig);
	for (uint32_t i = 0; i < count; i++) {
		if (user_try(&user[i], rig.sock, &identity[i]) != KVC_OK) {
			fail_msg("identity %u: %s", i, kvc_last_error());
		}
		user_keys(&user[i], 1, LEN, keys[i]); /* the same tokens */
	}
	assert_int_equal(user_put(&user[0], keys[0], 0, LEN, 0, NULL), KVC_OK);
	for (uint32_t i = 1; i < count; i++) {
		assert_memory_not_equal(keys[0], keys[i], sizeof(kvc_key_t));
		assert_int_equal(user_get(&user[i], keys[i], LEN, &n), KVC_MISS);
		/* The key itself, of the other space: the mirror knows it, the daemon has the last word. */
		assert_int_equal(kvc_acquire(user[i].space, keys[0], LEN, 0, 0, &lease), KVC_MISS);
	}
	for (uint32_t i = 1; i < count; i++) {
		assert_int_equal(user_put(&user[i], keys[i], 0, LEN, 0, NULL), KVC_OK);
	}
	for (uint32_t i = 0; i < count; i++) {
		user_expect(&user[i], keys[i], LEN);
		user_leave(&user[i]);
	}
	rig_end(&rig);
}
