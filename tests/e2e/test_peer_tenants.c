/* Two daemons with two tenants each: what is fetched from a peer is the asking tenant's own, and within its share. */
#include "e2e/rig/peers.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define BLOCKS 48u
#define SOON   20000u
#define SECRET "an-id-that-only-the-rival-knows"

enum tenant { MINE, RIVAL, TENANTS };
static const char *const names_[TENANTS] = {"default", "rival"};

static peers_t net_;
static user_t owners_[TENANTS], askers_[TENANTS];
static uint32_t tokens_[BLOCKS * RIG_TOKENS];

static void attach(user_t *user, const rig_t *rig, enum tenant tenant)
{
	const kvc_identity_t identity = user_identity("model");
	char sock[112];

	snprintf(sock, sizeof sock, "%.79s/%s.sock", rig->run_dir, names_[tenant]);
	if (user_try(user, sock, &identity) != KVC_OK) {
		fail_msg("%s", kvc_last_error());
	}
}

static void start(void)
{
	for (uint32_t i = 0; i < 2; i++) {
		rig_option(&net_.rig[i], "--namespaces=default,rival");
	}
	peers_start(&net_);
	for (uint32_t t = 0; t < TENANTS; t++) {
		attach(&owners_[t], &net_.rig[0], (enum tenant)t);
		attach(&askers_[t], &net_.rig[1], (enum tenant)t);
	}
	user_tokens(1, BLOCKS, tokens_);
	peers_connected(&net_);
}

/* A quarter of 16 MiB at the asker is one tenant's. */
KV_FIXTURE(setup)
{
	peers_init(&net_);
	rig_option(&net_.rig[1], "--cpu.size=16MiB");
	rig_option(&net_.rig[1], "--handover.max_bytes=16MiB");
	rig_option(&net_.rig[1], "--share.cpu=default=25%%");
	start();
}

/* The asker's daemon grants the puts of one message at a time, of 4 MiB. */
KV_FIXTURE(setup_narrow)
{
	peers_init(&net_);
	for (uint32_t i = 0; i < 2; i++) {
		rig_option(&net_.rig[i], "--cpu.size=256MiB");
	}
	rig_option(&net_.rig[1], "--instance.max_unfinished=6MiB");
	start();
}

KV_FIXTURE(teardown)
{
	for (uint32_t t = 0; t < TENANTS; t++) {
		user_leave(&owners_[t]);
		user_leave(&askers_[t]);
	}
	peers_fini(&net_);
}

static kvc_prompt_t prompt_of(const char *salt)
{
	return (kvc_prompt_t){
		.struct_size = sizeof(kvc_prompt_t), .tokens = tokens_, .n_tokens = BLOCKS * RIG_TOKENS, .salt = salt};
}

static void keys_of(const user_t *user, const char *salt, kvc_key_t *keys)
{
	const kvc_prompt_t prompt = prompt_of(salt);
	uint32_t made = 0;

	assert_int_equal(kvc_keys_of(user->space, &prompt, keys, BLOCKS, &made), KVC_OK);
	assert_int_equal(made, BLOCKS);
}

/* Of equal tokens each tenant, and each salt, has other bytes. */
static void put(enum tenant tenant, const char *salt)
{
	kvc_key_t keys[BLOCKS];

	keys_of(&owners_[tenant], salt, keys);
	assert_int_equal(user_put(&owners_[tenant], keys, 0, BLOCKS, 0, NULL), KVC_OK);
}

static void hand_over(enum tenant tenant, const char *salt, kvc_handover_t **p_handover)
{
	static kvc_key_t keys[BLOCKS];
	const kvc_key_source_t source = {.key = user_key_at, .ctx = keys};
	const kvc_handover_chunk_t chunk = {
		.struct_size = sizeof chunk, .transfer = SECRET, .n = BLOCKS, .source = &source, .last = 1};

	keys_of(&owners_[tenant], salt, keys);
	assert_int_equal(kvc_handover_send(owners_[tenant].space, &chunk, p_handover), KVC_OK);
	assert_int_equal(kvc_handover_wait(*p_handover, 0, SOON), KVC_OK);
}

static kvc_status_t fetch(enum tenant tenant, const char *transfer, const char *salt, kvc_handover_t **p_handover)
{
	const kvc_prompt_t prompt = prompt_of(salt);
	const kvc_fetch_t ask = {.struct_size = sizeof ask,
				 .peer = "node0",
				 .transfer = transfer,
				 .prompt = &prompt,
				 .timeout_ms = transfer ? 1000 : 0};

	*p_handover = NULL;
	assert_int_equal(kvc_handover_fetch(askers_[tenant].space, &ask, p_handover), KVC_OK);

	return kvc_handover_wait(*p_handover, 0, SOON);
}

/* The status of a fetch. What came of it is not kept. */
static kvc_status_t fetched(enum tenant tenant, const char *transfer, const char *salt)
{
	kvc_handover_t *wanted;
	const kvc_status_t status = fetch(tenant, transfer, salt, &wanted);

	kvc_handover_done(wanted, status != KVC_OK);

	return status;
}

static uint32_t matched(enum tenant tenant, const char *salt)
{
	kvc_key_t keys[BLOCKS];

	keys_of(&askers_[tenant], salt, keys);
	(void)kvc_poll(askers_[tenant].kvc, 0);

	return user_match(&askers_[tenant], keys, BLOCKS);
}

/* All of it is at the asker, with this tenant's bytes. */
static void check_bytes(enum tenant tenant, const char *salt)
{
	kvc_key_t theirs[BLOCKS], ours[BLOCKS];

	keys_of(&owners_[tenant], salt, theirs);
	keys_of(&askers_[tenant], salt, ours);
	user_expect_as(&askers_[tenant], ours, theirs, BLOCKS);
}

KV_TEST(p8_a_fetch_never_brings_another_tenants_prefix, setup, teardown)
{
	put(RIVAL, NULL);
	assert_int_equal(fetched(MINE, NULL, NULL), KVC_ERR_NOT_FOUND); /* as what nobody has */
	assert_int_equal(matched(MINE, NULL), 0);
	assert_int_equal(fetched(RIVAL, NULL, NULL), KVC_OK);
	check_bytes(RIVAL, NULL);
	assert_int_equal(matched(MINE, NULL), 0);
	put(MINE, NULL);
	assert_int_equal(fetched(MINE, NULL, NULL), KVC_OK);
	check_bytes(MINE, NULL);
	check_bytes(RIVAL, NULL);
	peers_check_quiet(&net_);
}

/* Nobody learns from an answer, or from what operators of another tenant's socket see, that there is one. */
KV_TEST(p8_another_tenants_transfer_is_none, setup, teardown)
{
	static char out[1 << 16];
	kvc_handover_t *sent = NULL;

	put(RIVAL, NULL);
	hand_over(RIVAL, NULL, &sent);
	assert_int_equal(fetched(MINE, "never", NULL), fetched(MINE, SECRET, NULL));
	assert_int_equal(matched(MINE, NULL), 0);
	assert_int_equal(fetched(RIVAL, SECRET, "another salt"), KVC_ERR_NOT_FOUND);
	/* What they have asked for themselves has gone: only the rival's is left. */
	assert_true(rig_metric_is(&net_.rig[0], "kvd_handovers", 1));
	assert_true(rig_metric_is(&net_.rig[1], "kvd_handovers", 0));
	for (uint32_t i = 0; i < 2; i++) {
		assert_int_equal(rig_kvctl(&net_.rig[i], "transfers --json", out, sizeof out), 0);
		assert_null(strstr(out, SECRET));
		usleep(600000); /* until the net process has reported */
		assert_int_equal(rig_kvctl(&net_.rig[i], "peers --json", out, sizeof out), 0);
		assert_null(strstr(out, SECRET));
	}
	assert_int_equal(fetched(RIVAL, SECRET, NULL), KVC_OK); /* it was given back */
	check_bytes(RIVAL, NULL);
	kvc_handover_done(sent, 0);
	peers_check_quiet(&net_);
}

KV_TEST(p8_a_fetch_names_its_salt, setup, teardown)
{
	put(MINE, "a");
	assert_int_equal(fetched(MINE, NULL, NULL), KVC_ERR_NOT_FOUND);
	assert_int_equal(fetched(MINE, NULL, "b"), KVC_ERR_NOT_FOUND);
	assert_int_equal(fetched(MINE, NULL, "a"), KVC_OK);
	check_bytes(MINE, "a");
	put(MINE, NULL);
	assert_int_equal(fetched(MINE, NULL, NULL), KVC_OK);
	check_bytes(MINE, NULL);
	check_bytes(MINE, "a");
	assert_int_equal(matched(MINE, "b"), 0);
	peers_check_quiet(&net_);
}

#define ASKED 8u /* prefixes of 768 KiB: more than a share of 4 MiB */

KV_TEST(p8_p5_fetched_bytes_end_at_the_tenants_share, setup, teardown)
{
	const uint64_t bytes = (uint64_t)BLOCKS * RIG_BLOCK_BYTES;
	kvc_key_t keys[RIG_BLOCKS];
	kvc_handover_t *wanted[ASKED];
	uint64_t share;
	uint32_t whole = 0;
	char salt[16];

	user_keys(&askers_[RIVAL], 9, RIG_BLOCKS, keys); /* 4 MiB of the rival's 12 */
	assert_int_equal(user_put(&askers_[RIVAL], keys, 0, RIG_BLOCKS, 0, NULL), KVC_OK);
	share = rig_number(askers_[MINE].kvc, "kvd_namespace_share_bytes{tier=cpu}");
	assert_int_equal(share, 4u << 20);
	for (uint32_t i = 0; i < ASKED; i++) {
		kvc_status_t status;

		snprintf(salt, sizeof salt, "%u", i);
		put(MINE, salt);
		status = fetch(MINE, NULL, salt, &wanted[i]);
		if (status != KVC_OK && status != KVC_ERR_BUSY) {
			fail_msg("prefix %u: %s", i, kvc_status_name(status));
		}
		whole += status == KVC_OK;
		if (i == 1) {
			assert_int_equal(whole, 2);
			KV_AWAIT(rig_number(askers_[MINE].kvc, "kvd_namespace_handover_bytes") ==
				 2 * bytes); /* gauges are set once in a while */
			KV_AWAIT(rig_number(askers_[MINE].kvc, "kvd_namespace_irreclaimable_bytes") == 2 * bytes);
			assert_int_equal(rig_number(askers_[RIVAL].kvc, "kvd_namespace_handover_bytes"), 0);
		}
		assert_in_range(rig_number(askers_[MINE].kvc, "kvd_namespace_irreclaimable_bytes"), 0, share);
	}
	printf("# %u of %u prefixes had room\n", whole, ASKED);
	assert_in_range(whole, share / bytes - 1, share / bytes);
	assert_int_equal(user_match(&askers_[RIVAL], keys, RIG_BLOCKS), RIG_BLOCKS);
	for (uint32_t i = 0; i < ASKED; i++) {
		kvc_handover_done(wanted[i], 0);
	}
	peers_check_quiet(&net_);
}

#define LONG     2000u /* blocks: */
#define MESSAGES 8u

/* Puts are asked for ahead of the answers. The second one is refused, and those below it with it: once, since from then on
 * each is asked for when the one above it is granted. */
KV_TEST(p5_each_message_of_a_long_prefix_waits_for_its_room, setup_narrow, teardown)
{
	static uint32_t tokens[LONG * RIG_TOKENS];
	static kvc_key_t keys[LONG];
	const kvc_prompt_t prompt = {.struct_size = sizeof prompt, .tokens = tokens, .n_tokens = LONG * RIG_TOKENS};
	const kvc_fetch_t ask = {.struct_size = sizeof ask, .peer = "node0", .prompt = &prompt};
	kvc_handover_t *wanted = NULL;
	uint32_t made = 0;

	for (uint32_t i = 0; i < LONG * RIG_TOKENS; i++) {
		tokens[i] = i;
	}
	assert_int_equal(kvc_keys_of(owners_[MINE].space, &prompt, keys, LONG, &made), KVC_OK);
	for (uint32_t i = 0; i < LONG; i += RIG_BLOCKS / 2) {
		const uint32_t end = i + RIG_BLOCKS / 2 < LONG ? i + RIG_BLOCKS / 2 : LONG;

		assert_int_equal(user_put(&owners_[MINE], keys, i, end, 0, NULL), KVC_OK);
	}
	assert_int_equal(kvc_handover_fetch(askers_[MINE].space, &ask, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).n, LONG);
	kvc_handover_done(wanted, 0);
	printf("# puts refused: %" PRIu64 " without room, %" PRIu64 " below those\n",
	       rig_metric(&net_.rig[1], "kvd_put_busy_total"), rig_metric(&net_.rig[1], "kvd_no_parent_total"));
	assert_in_range(rig_metric(&net_.rig[1], "kvd_no_parent_total"), 0, MESSAGES - 2);
	assert_true(rig_metric_is(&net_.rig[0], "kvd_peer_messages_total", MESSAGES));
	assert_int_equal(kvc_keys_of(askers_[MINE].space, &prompt, keys, LONG, &made), KVC_OK);
	assert_int_equal(user_match(&askers_[MINE], keys, LONG), LONG);
	peers_check_quiet(&net_);
}
