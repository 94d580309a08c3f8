/* libkvc and kvctl against the real daemon: what no other program of this folder asks for. */
#include "e2e/rig/rig.h"

#include "kv/identity.h"

#include <signal.h>

#define LEN      30u
#define FLOOD    60u /* blocks of one put */
#define MOST     40u /* puts, or leases */
#define ADAPTERS 20u
#define CALL_MS  5000u /* no call may come near it */

static kvc_key_t keys[LEN];

static void stage(int disk)
{
	rig_init(&rig_, disk);
	rig_start(&rig_);
	user_attach(&user_, &rig_, "client");
	user_keys(&user_, 1, LEN, keys);
}

static void withdraw(uint32_t from, uint32_t n, uint32_t *p_blocks)
{
	kvc_space_info_t info = {.struct_size = sizeof info};
	kvc_withdraw_t what = {.struct_size = sizeof what, .n = n - from, .keys = keys + from};
	kvc_withdrawal_t *withdrawal = NULL;

	kvc_space_get_info(user_.space, &info);
	what.epoch = info.epoch;
	assert_int_equal(kvc_withdraw_start(user_.space, &what, &withdrawal), KVC_OK);
	while (kvc_withdraw_state(withdrawal, NULL) == KVC_PENDING) {
		(void)kvc_poll(user_.kvc, 5);
	}
	assert_int_equal(kvc_withdraw_state(withdrawal, p_blocks), KVC_OK);
	kvc_withdraw_free(withdrawal);
}

/* The next daemon, and the client is attached to it. */
static void start_again(uint64_t times)
{
	kvc_stats_t stats = {.struct_size = sizeof stats};

	rig_start(&rig_);
	while (stats.reattaches < times || kvc_space_state(user_.space) != KVC_OK) {
		(void)kvc_poll(user_.kvc, 5);
		kvc_get_stats(user_.kvc, &stats);
	}
}

/* The daemon dies directly after the answer; later the metadata of its disk is lost, so that the headers speak. */
RIG_TEST(p1_withdrawn_blocks_do_not_come_back, stage(1))
{
	kvc_lease_t *lease;
	uint32_t blocks = 0;
	char meta[96];

	snprintf(meta, sizeof meta, "%s/meta", rig_.disk);
	assert_int_equal(user_put(&user_, keys, 0, LEN, 1, NULL), KVC_OK);
	assert_int_equal(kvc_acquire(user_.space, keys, LEN, 0, 0, &lease), KVC_OK);
	withdraw(12, LEN, &blocks);
	rig_crash(&rig_);
	assert_int_equal(blocks, 18);
	assert_int_equal(kvc_lease_state(lease), KVC_ERR_REVOKED);
	kvc_release(&lease, 1);
	start_again(1);
	assert_int_equal(user_match(&user_, keys, LEN), 12);
	user_expect(&user_, keys, 12);

	for (uint64_t times = 2; times < 4; times++) {
		rig_stop(&rig_);
		kv_test_dir_remove(meta);
		start_again(times);
		if (times == 2) {
			assert_int_equal(user_match(&user_, keys, LEN), 0);
			assert_int_equal(user_put(&user_, keys, 0, LEN, 1, NULL), KVC_OK);
		}
	}
	user_expect(&user_, keys, LEN);
}

static user_t adapter(uint32_t i, kvc_status_t *p_status)
{
	kvc_identity_t identity = user_identity("client");
	user_t other = user_;
	char name[16];

	snprintf(name, sizeof name, "adapter %u", i);
	identity.lora = name;
	*p_status = kvc_space_open(user_.kvc, &identity, &other.space);

	return other;
}

/* The operator names a space that status does not list. */
static void reset_closed(uint32_t i)
{
	const kvc_identity_t given = user_identity("client");
	kv_identity_t identity = {.model = given.model,
				  .weights = given.weights,
				  .dtype = given.dtype,
				  .quantization = "none",
				  .rope = given.rope,
				  .hash = "kv1",
				  .hash_tokens = "16",
				  .groups = "0:full:16",
				  .layout = given.layout,
				  .page_format = "plain"};
	char name[16], text[KV_IDENTITY_MAX_TEXT], path[96], line[160], out[4096];
	const char *field;

	snprintf(name, sizeof name, "adapter %u", i);
	identity.lora = name;
	assert_int_equal(kv_identity_text(&identity, text, sizeof text, &field), KV_OK);
	snprintf(path, sizeof path, "%.79s/identity", rig_.dir);
	kv_test_write(path, text);
	snprintf(line, sizeof line, "reset --yes --identity @%s", path);
	assert_int_equal(rig_kvctl(&rig_, line, out, sizeof out), 0);
	assert_non_null(strstr(out, "1 blocks: 1 in CPU memory, 1 on disk"));
}

/* As many attach as a limit permits, then one more, who is told the option. */
static void attach_beyond(const char *option, const char *name, kvc_status_t expected)
{
	const kvc_identity_t identity = user_identity("client");
	user_t users[16];
	kvc_status_t status;
	uint32_t n = 0;

	rig_option(&rig_, "%s", option);
	rig_start(&rig_);
	while ((status = user_try(&users[n], rig_.sock, &identity)) == KVC_OK) {
		assert_in_range(++n, 1, KV_COUNT_OF(users) - 1);
	}
	assert_int_equal(status, expected);
	assert_non_null(strstr(kvc_last_error(), name));
	assert_non_null(strstr(kvc_last_error(), "raise it, or end some")); /* nothing is cut off */
	while (n > 0) {
		user_leave(&users[--n]);
	}
}

RIG_TEST(p10_the_limit_of_instances_is_named, rig_init(&rig_, 0))
{
	attach_beyond("--limits.instances=1", "limits.instances", KVC_ERR_LIMIT);
}

/* The daemon closes such a connection, and answers nothing. */
RIG_TEST(p10_the_limit_of_sessions_is_named, rig_init(&rig_, 0))
{
	attach_beyond("--limits.sessions=2", "limits.sessions", KVC_ERR_CLOSED);
}

/* One engine tries adapters as long as it lives. Its own space, and limits.spaces - 1 more, may be open at a time. */
RIG_TEST(p5_more_adapters_come_and_go_than_spaces_can_be_open, rig_init(&rig_, 1))
{
	static char out[1 << 16];
	kvc_status_t status;
	user_t open[5];

	rig_option(&rig_, "--limits.spaces=6");
	rig_start(&rig_);
	user_attach(&user_, &rig_, "client");
	for (uint32_t i = 0; i < ADAPTERS; i++) {
		open[0] = adapter(i, &status);
		assert_int_equal(status, KVC_OK);
		user_keys(&open[0], 1, 1, keys);
		assert_int_equal(user_put(&open[0], keys, 0, 1, 1, NULL), KVC_OK);
		kvc_space_close(open[0].space);
	}
	for (uint32_t i = 0; i < ADAPTERS; i++) { /* each has its block still */
		open[0] = adapter(i, &status);
		assert_int_equal(status, KVC_OK);
		user_keys(&open[0], 1, 1, keys);
		user_expect(&open[0], keys, 1);
		kvc_space_close(open[0].space);
	}
	assert_int_equal(rig_kvctl(&rig_, "status", out, sizeof out), 0);
	assert_null(strstr(out, "limits.spaces"));
	for (uint32_t i = 0; i < 5; i++) {
		open[i] = adapter(i, &status);
		assert_int_equal(status, KVC_OK);
	}
	(void)adapter(9, &status);
	assert_int_equal(status, KVC_ERR_LIMIT);
	assert_non_null(strstr(kvc_last_error(), "limits.spaces"));
	assert_true(rig_metric_is(&rig_, "kvd_namespace_spaces_refused_total", 1));
	assert_int_equal(rig_kvctl(&rig_, "status", out, sizeof out), 2);
	assert_non_null(strstr(out, "limits.spaces"));
	kvc_space_close(open[3].space);
	reset_closed(ADAPTERS - 1);
	do { /* a space that is being reset has its number until the blocks are gone */
		(void)adapter(9, &status);
	} while (status == KVC_ERR_LIMIT);
	assert_int_equal(status, KVC_OK);
	assert_int_equal(rig_kvctl(&rig_, "status", out, sizeof out), 0);
	assert_null(strstr(out, "limits.spaces"));
}

RIG_TEST(p7_a_daemon_silent_within_limits_silence_is_no_miss, stage(0))
{
	assert_int_equal(user_put(&user_, keys, 0, LEN, 0, NULL), KVC_OK);
	assert_true(user_match_is(&user_, keys, LEN, LEN));
	kill(rig_.pid, SIGSTOP);
	usleep(200000);
	assert_int_equal(user_match(&user_, keys, LEN), LEN);
	kill(rig_.pid, SIGCONT);
	user_expect(&user_, keys, LEN);
}

/* A router attaches to match only: it sees what there is, holds nothing, and finds its way back after a restart. */
RIG_TEST(p4_who_attaches_to_match_only_sees_all_and_holds_nothing, stage(1))
{
	const kvc_identity_t identity = user_identity("client");
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = rig_.sock,
				     .program = "router",
				     .role = KVC_ROLE_MATCH,
				     .timeout_ms = RIG_WAIT_MS};
	kvc_lease_t *lease = NULL;
	kvc_put_t *begun = NULL;
	user_t router = {0};

	assert_int_equal(user_put(&user_, keys, 0, 20, 1, NULL), KVC_OK);
	assert_int_equal(kvc_attach(&config, &router.kvc), KVC_OK);
	assert_int_equal(kvc_space_open(router.kvc, &identity, &router.space), KVC_OK);
	assert_int_equal(user_match(&router, keys, LEN), 20);
	assert_int_equal(kvc_acquire(router.space, keys, 20, 0, 0, &lease), KVC_ERR_PIDFD_REQUIRED);
	assert_int_equal(kvc_put_start(router.space, keys, 20, 24, NULL, &begun), KVC_ERR_PIDFD_REQUIRED);
	assert_int_equal(kvc_space_reset(router.space), KVC_ERR_PIDFD_REQUIRED);
	assert_true(!lease && !begun);
	kvc_report(router.space, &(kvc_report_t){.struct_size = sizeof(kvc_report_t), .query_tokens = 1});
	assert_true(rig_kvctl_has(&rig_, "status --detail 2", "match_only true"));
	user_leave(&user_);
	rig_crash(&rig_);
	assert_int_not_equal(kvc_poll(router.kvc, 100), KVC_OK);
	rig_start(&rig_);
	assert_true(user_match_is(&router, keys, LEN, 20));
	user_leave(&router);
}

/* More than the limits of one instance allow: BUSY or LIMIT at once, and everything again when there is room. */
RIG_TEST(p5_more_puts_and_leases_than_allowed_are_refused_not_hung, rig_init(&rig_, 0))
{
	const kvc_put_options_t options = {.struct_size = sizeof options};
	kvc_put_t *put[MOST] = {0};
	kvc_lease_t *lease[MOST] = {0};
	uint64_t busy = 0, granted = 0, held = 0, limited = 0, since;
	kvc_status_t status;
	kvc_key_t many[FLOOD];

	rig_option(&rig_, "--instance.max_unfinished=2MiB"); /* 128 blocks */
	rig_option(&rig_, "--limits.leases=8");
	rig_start(&rig_);
	user_attach(&user_, &rig_, "flood");
	for (uint32_t i = 0; i < MOST; i++) {
		user_keys(&user_, i, FLOOD, many);
		since = rig_now_ms();
		assert_int_equal(kvc_put_start(user_.space, many, 0, FLOOD, &options, &put[i]), KVC_OK);
		status = kvc_put_ready(put[i], 0);
		assert_true(rig_now_ms() - since < CALL_MS);
		assert_true(status == KVC_OK || status == KVC_ERR_BUSY);
		granted += status == KVC_OK ? kvc_put_n(put[i]) : 0;
		busy += status == KVC_ERR_BUSY || kvc_put_n(put[i]) < FLOOD;
	}
	assert_int_equal(granted, 128);
	assert_int_equal(busy, MOST - 2);
	assert_true(rig_metric_is(&rig_, "kvd_put_busy_total", MOST - 2));
	for (uint32_t i = 0; i < MOST; i++) {
		kvc_put_free(put[i]);
	}
	assert_int_equal(user_put(&user_, many, 0, FLOOD, 0, NULL), KVC_OK); /* room again */
	for (uint32_t i = 0; i < MOST; i++) {
		status = kvc_acquire(user_.space, many, 4, 0, 0, &lease[i]);
		assert_true(status == KVC_OK || status == KVC_ERR_BUSY || status == KVC_ERR_LIMIT);
		assert_true(status != KVC_ERR_LIMIT || strstr(kvc_last_error(), "limits.leases"));
		limited += status == KVC_ERR_LIMIT;
		held += status == KVC_OK;
	}
	assert_int_equal(held, 8);
	assert_int_not_equal(limited, 0);
	assert_int_equal(kvc_lease_state(lease[0]), KVC_OK);
	kvc_release(lease, MOST);
	user_expect(&user_, many, FLOOD);
}

RIG_TEST(kvctl_looks_into_the_real_daemon, stage(1))
{
	static const struct {
		const char *arguments, *says;
	} asked[] = {{"status", "healthy"},
		     {"status --json --detail 2", "\"program\":\"e2e\""},
		     {"check", ", 0 failed"},
		     {"check", "no slab is being rebalanced"},
		     {"stats kvd_put_blocks", "3"},
		     {"config cpu.size", " 8MiB  (command line)"},
		     {"version", ""}};
	uint32_t tokens[5 * RIG_TOKENS];
	char out[65536], command[128], text[1024], path[96];
	size_t at = 0;

	assert_int_equal(user_put(&user_, keys, 0, 3, 0, NULL), KVC_OK);
	for (size_t i = 0; i < KV_COUNT_OF(asked); i++) {
		assert_int_equal(rig_kvctl(&rig_, asked[i].arguments, out, sizeof out), 0);
		if (!strstr(out, asked[i].says)) {
			fail_msg("\"%s\" is not in: %s", asked[i].says, out);
		}
	}
	user_tokens(1, 5, tokens);
	for (uint32_t i = 0; i < KV_COUNT_OF(tokens); i++) {
		at += (size_t)snprintf(text + at, sizeof text - at, "%u,", tokens[i]);
	}
	snprintf(path, sizeof path, "%s/tokens", rig_.dir);
	kv_test_write(path, text);
	snprintf(command, sizeof command, "explain --tokens @%s", path);
	assert_int_equal(rig_kvctl(&rig_, command, out, sizeof out), 1);
	assert_non_null(strstr(out, "3 of 5 blocks would hit"));
}
