/* libkvc and kvctl against the real daemon, as an engine uses them. */
#include "daemon/raw.h"
#include "kvc.h"

#include <signal.h>
#include <sys/wait.h>

#define KEYS   96u
#define TOKENS 16u
#define LAYOUT "kvk1 heads=2 layers=4 tokens=16 k=32 v=32 dtype=bf16 inner=split page=0"

typedef struct bed {
	raw_daemon_t daemon;
	char disk[96];
	kvc_t *kvc;
	kvc_space_t *space;
	kvc_space_info_t info;
	kvc_key_t keys[KEYS];
	uint32_t tokens[KEYS * TOKENS];
	uint8_t *src[KEYS], *dst[KEYS];
} bed_t;

static uint64_t now_ms(void)
{
	return kv_now_ns(&kv_env_posix) / 1000000u;
}

static kvc_identity_t identity_of(void)
{
	return (kvc_identity_t){
		.struct_size = sizeof(kvc_identity_t),
		.model = "e2e",
		.weights = "r1",
		.dtype = "bf16",
		.rope = "none",
		.hash_tokens = TOKENS,
		.layout = LAYOUT,
	};
}

static kvc_config_t config_of(const bed_t *bed)
{
	return (kvc_config_t){.struct_size = sizeof(kvc_config_t),
			      .socket = bed->daemon.sock,
			      .program = "e2e",
			      .staging_blocks = 128};
}

static void attach(bed_t *bed)
{
	kvc_config_t config = config_of(bed);
	kvc_identity_t identity = identity_of();
	kv_test_rng_t rng = {.state = kv_test_seed()};
	uint32_t n = 0;

	if (kvc_attach(&config, &bed->kvc) != KVC_OK || kvc_space_open(bed->kvc, &identity, &bed->space) != KVC_OK) {
		fail_msg("%s", kvc_last_error());
	}
	bed->info.struct_size = sizeof bed->info;
	kvc_space_get_info(bed->space, &bed->info);
	assert_int_equal(bed->info.block_bytes, 16384);
	assert_int_equal(bed->info.heads * bed->info.leaves, 8);
	for (uint32_t i = 0; i < KEYS * TOKENS; i++) {
		bed->tokens[i] = (uint32_t)kv_test_below(&rng, 50000);
	}
	assert_int_equal(kvc_keys_of(bed->space,
				     &(kvc_prompt_t){sizeof(kvc_prompt_t), bed->tokens, KEYS * TOKENS, NULL}, bed->keys,
				     KEYS, &n),
			 KVC_OK);
	for (uint32_t i = 0; i < KEYS; i++) {
		bed->src[i] = malloc(bed->info.block_bytes);
		bed->dst[i] = calloc(1, bed->info.block_bytes);
		kv_test_fill(&rng, bed->src[i], bed->info.block_bytes);
	}
}

/* Arguments of every start of this bed's daemon, when it has a disk. */
static const char *const *arguments(bed_t *bed)
{
	static char path[128];
	static const char *args[] = {NULL, "--nvme.size=64MiB", "--nvme.file_size=4MiB", "--lease.ttl=60s", NULL};

	snprintf(path, sizeof path, "--nvme.path=%s", bed->disk);
	args[0] = path;

	return args;
}

static void bed_make(bed_t *bed, int disk)
{
	memset(bed, 0, sizeof *bed);
	kv_test_dir_make(bed->disk, sizeof bed->disk);
	raw_daemon_start(&bed->daemon, disk ? arguments(bed) : NULL);
	attach(bed);
}

/* Without a disk, and its heartbeat may be so old. */
static void bed_make_silent(bed_t *bed, const char *silence)
{
	memset(bed, 0, sizeof *bed);
	kv_test_dir_make(bed->disk, sizeof bed->disk);
	raw_daemon_start(&bed->daemon, (const char *const[]){silence, NULL});
	attach(bed);
}

/* The daemon's own invariants hold. */
static void check(bed_t *bed)
{
	char *json = NULL;
	uint32_t failed = 1;

	if (kvc_document(bed->kvc, KVC_DOC_CHECK, 0, &json, &failed) != KVC_OK) {
		fail_msg("%s", kvc_last_error());
	}
	if (failed) {
		fail_msg("%s", json);
	}
	kvc_free(json);
}

static void bed_free(bed_t *bed)
{
	check(bed);
	kvc_detach(bed->kvc);
	raw_daemon_end(&bed->daemon);
	kv_test_dir_remove(bed->disk);
	for (uint32_t i = 0; i < KEYS; i++) {
		free(bed->src[i]);
		free(bed->dst[i]);
	}
}

static void put(bed_t *bed, uint32_t from, uint32_t n, int durable)
{
	kvc_put_options_t options = {.struct_size = sizeof options,
				     .durable = durable,
				     .tokens = bed->tokens,
				     .blocks = (const void *const *)(bed->src + from)};
	uint32_t visible = 0;

	if (kvc_put(bed->space, bed->keys, from, n, &options, &visible) != KVC_OK) {
		fail_msg("put [%u, %u): %s", from, n, kvc_last_error());
	}
	assert_int_equal(visible, n - from);
}

static kvc_lease_t *acquire(bed_t *bed, uint32_t n, uint32_t skip)
{
	kvc_lease_t *lease = NULL;

	if (kvc_acquire(bed->space, bed->keys, n, skip, 0, &lease) != KVC_OK) {
		fail_msg("acquire %u: %s", n, kvc_last_error());
	}

	return lease;
}

static void read_back(bed_t *bed, uint32_t n, uint32_t skip)
{
	kvc_lease_t *lease = acquire(bed, n, skip);

	assert_int_equal(kvc_lease_n(lease), n);
	if (kvc_lease_wait(lease, n, 5000) != KVC_OK ||
	    kvc_lease_read(lease, skip, n - skip, (void *const *)(bed->dst + skip), NULL) != KVC_OK) {
		fail_msg("read %u: %s", n, kvc_last_error());
	}
	for (uint32_t i = skip; i < n; i++) {
		assert_memory_equal(bed->dst[i], bed->src[i], bed->info.block_bytes);
		memset(bed->dst[i], 0, bed->info.block_bytes);
	}
	kvc_release(&lease, 1);
}

static kvc_match_t match(bed_t *bed, uint32_t n)
{
	kvc_match_t m = {.struct_size = sizeof m};

	kvc_match(bed->space, bed->keys, n, &m);

	return m;
}

/* Poll until the match is as long as this, 5 s at most. */
static int match_reaches(bed_t *bed, uint32_t n)
{
	uint64_t until = now_ms() + RAW_TIMEOUT_MS;

	while (match(bed, KEYS).n != n && now_ms() < until) {
		(void)kvc_poll(bed->kvc, 5);
	}

	return match(bed, KEYS).n == n;
}

KV_TEST(p1_what_was_put_is_matched_and_read_back)
{
	bed_t bed;

	bed_make(&bed, 0);
	assert_int_equal(match(&bed, KEYS).n, 0);
	put(&bed, 0, 20, 0);
	assert_true(match_reaches(&bed, 20));
	assert_int_equal(match(&bed, KEYS).n_cpu, 20);
	read_back(&bed, 20, 0);
	read_back(&bed, 17, 9);
	put(&bed, 20, 50, 0);
	put(&bed, 10, 50, 0); /* all of it is there */
	read_back(&bed, 50, 0);
	bed_free(&bed);
}

KV_TEST(p1_blocks_read_from_disk_are_the_same)
{
	bed_t bed;

	bed_make(&bed, 1);
	put(&bed, 0, 40, 1);
	kvc_detach(bed.kvc);
	assert_int_equal(raw_daemon_kill(&bed.daemon, SIGTERM), 0);
	assert_true(raw_daemon_spawn(&bed.daemon, arguments(&bed), &(int){0}));
	for (uint32_t i = 0; i < KEYS; i++) {
		free(bed.src[i]);
		free(bed.dst[i]);
	}
	attach(&bed);
	assert_int_equal(match(&bed, KEYS).n, 40);
	assert_int_equal(match(&bed, KEYS).n_cpu, 0);
	read_back(&bed, 40, 3);
	bed_free(&bed);
}

KV_TEST(p2_durable_blocks_and_the_attachment_survive_kill_9)
{
	bed_t bed;
	kvc_lease_t *lease;
	kvc_stats_t stats = {.struct_size = sizeof stats};

	bed_make(&bed, 1);
	put(&bed, 0, 30, 1);
	lease = acquire(&bed, 30, 0);
	assert_int_equal(raw_daemon_kill(&bed.daemon, SIGKILL), 128 + SIGKILL);
	assert_int_not_equal(kvc_poll(bed.kvc, 100), KVC_OK);
	assert_int_equal(kvc_lease_state(lease), KVC_ERR_REVOKED);
	assert_int_equal(match(&bed, KEYS).n, 0);
	assert_true(raw_daemon_spawn(&bed.daemon, arguments(&bed), &(int){0}));
	assert_true(match_reaches(&bed, 30));
	kvc_release(&lease, 1);
	read_back(&bed, 30, 0);
	put(&bed, 30, 40, 0);
	read_back(&bed, 40, 0);
	kvc_get_stats(bed.kvc, &stats);
	assert_int_equal(stats.reattaches, 1);
	bed_free(&bed);
}

static void withdraw(bed_t *bed, uint32_t from, uint32_t n, uint32_t *p_blocks)
{
	const kvc_withdraw_t what = {
		.struct_size = sizeof what, .n = n - from, .keys = bed->keys + from, .epoch = bed->info.epoch};
	kvc_withdrawal_t *withdrawal = NULL;

	if (kvc_withdraw_start(bed->space, &what, &withdrawal) != KVC_OK) {
		fail_msg("withdraw: %s", kvc_last_error());
	}
	while (kvc_withdraw_state(withdrawal, NULL) == KVC_PENDING) {
		(void)kvc_poll(bed->kvc, 5);
	}
	if (kvc_withdraw_state(withdrawal, p_blocks) != KVC_OK) {
		fail_msg("withdraw: %s", kvc_last_error());
	}
	kvc_withdraw_free(withdrawal);
}

/* The next daemon, and the client is attached to it. */
static void spawn_again(bed_t *bed, uint64_t times)
{
	kvc_stats_t stats = {.struct_size = sizeof stats};

	assert_true(raw_daemon_spawn(&bed->daemon, arguments(bed), &(int){0}));
	while (stats.reattaches < times || kvc_space_state(bed->space) != KVC_OK) {
		(void)kvc_poll(bed->kvc, 5);
		kvc_get_stats(bed->kvc, &stats);
	}
}

/* The daemon dies directly after the answer; later the metadata of its disk is lost, so that the headers speak. */
KV_TEST(p1_withdrawn_blocks_do_not_come_back)
{
	bed_t bed;
	kvc_lease_t *lease;
	uint32_t blocks = 0;
	char meta[128];

	bed_make(&bed, 1);
	put(&bed, 0, 30, 1);
	lease = acquire(&bed, 30, 0);
	withdraw(&bed, 12, 60, &blocks);
	assert_int_equal(raw_daemon_kill(&bed.daemon, SIGKILL), 128 + SIGKILL);
	assert_int_equal(blocks, 18);
	assert_int_equal(kvc_lease_state(lease), KVC_ERR_REVOKED);
	kvc_release(&lease, 1);
	spawn_again(&bed, 1);
	assert_int_equal(match(&bed, 30).n, 12);
	read_back(&bed, 12, 0);

	assert_int_equal(raw_daemon_kill(&bed.daemon, SIGTERM), 0);
	snprintf(meta, sizeof meta, "%s/meta", bed.disk);
	kv_test_dir_remove(meta);
	spawn_again(&bed, 2);
	assert_int_equal(match(&bed, 30).n, 0);
	put(&bed, 0, 30, 1);
	assert_int_equal(raw_daemon_kill(&bed.daemon, SIGTERM), 0);
	kv_test_dir_remove(meta);
	spawn_again(&bed, 3);
	assert_int_equal(match(&bed, 30).n, 30);
	read_back(&bed, 30, 0);
	bed_free(&bed);
}

KV_TEST(p7_a_stopped_daemon_is_a_miss_within_50_ms_and_comes_back)
{
	uint64_t stopped;
	bed_t bed;

	bed_make_silent(&bed, "--limits.silence=50ms");
	put(&bed, 0, 8, 0);
	assert_true(match_reaches(&bed, 8));
	kill(bed.daemon.pid, SIGSTOP);
	stopped = now_ms();
	while (now_ms() - stopped < 60 || (match(&bed, 8).n > 0 && now_ms() - stopped < RAW_TIMEOUT_MS)) {
		usleep(1000);
	}
	assert_int_equal(match(&bed, 8).n, 0);
	assert_int_equal(match(&bed, 8).why, KV_WHY_DAEMON_STALE);
	kill(bed.daemon.pid, SIGCONT);
	assert_true(match_reaches(&bed, 8));
	read_back(&bed, 8, 0);
	bed_free(&bed);
}

KV_TEST(p7_a_daemon_silent_within_limits_silence_is_no_miss)
{
	bed_t bed;

	bed_make_silent(&bed, "--limits.silence=10s");
	put(&bed, 0, 8, 0);
	assert_true(match_reaches(&bed, 8));
	kill(bed.daemon.pid, SIGSTOP);
	usleep(200000);
	assert_int_equal(match(&bed, 8).n, 8);
	kill(bed.daemon.pid, SIGCONT);
	read_back(&bed, 8, 0);
	bed_free(&bed);
}

KV_TEST(p1_a_scribbled_block_is_refused_and_not_offered_again)
{
	bed_t bed;
	kvc_lease_t *lease;
	const void *data;
	uint32_t bad = 0;

	bed_make(&bed, 0);
	put(&bed, 0, 8, 0);
	lease = acquire(&bed, 8, 0);
	assert_int_equal(kvc_lease_block(lease, 5, &data, NULL), KVC_OK);
	((uint8_t *)(uintptr_t)data)[777] ^= 1;
	assert_int_equal(kvc_lease_read(lease, 0, 8, (void *const *)bed.dst, &bad), KVC_ERR_CORRUPT);
	assert_int_equal(bad, 5);
	kvc_release(&lease, 1);
	assert_true(match_reaches(&bed, 5));
	read_back(&bed, 5, 0);
	bed_free(&bed);
}

KV_TEST(p5_more_than_fits_evicts_and_never_fails)
{
	bed_t bed;
	kvc_identity_t identity = identity_of();
	kvc_space_t *space;

	bed_make(&bed, 0);
	/* 8 MiB hold some 500 blocks of 16 KiB; ten prompts are twice that. */
	for (uint32_t round = 0; round < 10; round++) {
		char model[16];
		uint32_t visible = 0, n = 0;
		kvc_put_options_t options = {.struct_size = sizeof options, .blocks = (const void *const *)bed.src};

		snprintf(model, sizeof model, "m%u", round);
		identity.model = model;
		assert_int_equal(kvc_space_open(bed.kvc, &identity, &space), KVC_OK);
		assert_int_equal(kvc_keys_of(space,
					     &(kvc_prompt_t){sizeof(kvc_prompt_t), bed.tokens, KEYS * TOKENS, "salt"},
					     bed.keys, KEYS, &n),
				 KVC_OK);
		if (kvc_put(space, bed.keys, 0, KEYS, &options, &visible) != KVC_OK) {
			fail_msg("round %u: %s", round, kvc_last_error());
		}
		assert_int_equal(visible, KEYS);
		kvc_space_close(space);
	}
	bed_free(&bed);
}

KV_TEST(p1_a_reset_space_forgets)
{
	bed_t bed;
	uint64_t epoch;
	uint32_t n = 0;

	bed_make(&bed, 1);
	put(&bed, 0, 8, 0);
	epoch = bed.info.epoch;
	if (kvc_space_reset(bed.space) != KVC_OK) {
		fail_msg("%s", kvc_last_error());
	}
	kvc_space_get_info(bed.space, &bed.info);
	assert_true(bed.info.epoch > epoch);
	assert_int_equal(kvc_keys_of(bed.space, &(kvc_prompt_t){sizeof(kvc_prompt_t), bed.tokens, KEYS * TOKENS, NULL},
				     bed.keys, KEYS, &n),
			 KVC_OK);
	assert_int_equal(match(&bed, 8).n, 0);
	put(&bed, 0, 8, 0);
	read_back(&bed, 8, 0);
	bed_free(&bed);
}

KV_TEST(p1_two_members_write_and_read_one_block)
{
	bed_t bed;
	kvc_config_t config;
	kvc_identity_t identity = identity_of();
	kvc_t *member[2];
	kvc_space_t *space[2];
	kvc_writer_t writers[2] = {{.head_count = 1, .layer_count = 4},
				   {.rank = 1, .head_first = 1, .head_count = 1, .layer_count = 4}};
	kvc_put_options_t options = {.struct_size = sizeof options, .writers = writers, .writer_count = 2};
	kvc_put_t *own, *view;
	kvc_lease_t *lease, *seen;
	kvc_handle_t handle;

	bed_make(&bed, 0);
	config = config_of(&bed);
	config.instance = "two-ranks";
	config.role = KVC_ROLE_BOTH;
	config.secret = (const uint8_t *)"0123456789abcdef";
	config.secret_len = 16;
	for (uint32_t i = 0; i < 2; i++) {
		config.rank = i;
		assert_int_equal(kvc_attach(&config, &member[i]), KVC_OK);
		assert_int_equal(kvc_space_open(member[i], &identity, &space[i]), KVC_OK);
	}
	assert_int_equal(kvc_put_start(space[0], bed.keys, 0, 12, &options, &own), KVC_OK);
	assert_int_equal(kvc_put_ready(own, 0), KVC_OK);
	assert_int_equal(kvc_put_export(own, &handle), KVC_OK);
	assert_int_equal(kvc_put_import(space[1], &handle, &writers[1], &view), KVC_OK);
	(void)kvc_poll(member[1], 20); /* its slab may still be on the way */
	for (uint32_t i = 0; i < 12; i++) {
		assert_int_equal(kvc_put_write(own, i, bed.src[i]), KVC_OK);
		assert_int_equal(kvc_put_write(view, i, bed.src[i]), KVC_OK);
	}
	assert_int_equal(kvc_put_end(own, 0, 12), KVC_OK);
	assert_int_equal(kvc_put_wait(own, 0, 50), KVC_ERR_TIMEOUT);
	assert_int_equal(kvc_put_end(view, 0, 12), KVC_OK);
	if (kvc_put_wait(own, 0, 0) != KVC_OK) {
		fail_msg("%s", kvc_last_error());
	}
	kvc_put_free(own);
	kvc_put_free(view);
	assert_int_equal(kvc_acquire(space[0], bed.keys, 12, 0, 0, &lease), KVC_OK);
	assert_int_equal(kvc_lease_export(lease, &handle), KVC_OK);
	assert_int_equal(kvc_lease_import(space[1], &handle, &seen), KVC_OK);
	assert_int_equal(kvc_lease_read(seen, 0, 12, (void *const *)bed.dst, NULL), KVC_OK);
	for (uint32_t i = 0; i < 12; i++) {
		assert_memory_equal(bed.dst[i], bed.src[i], bed.info.block_bytes);
	}
	kvc_release(&seen, 1);
	kvc_release(&lease, 1);
	read_back(&bed, 12, 0); /* another instance */
	config.secret = (const uint8_t *)"0123456789abcdeF";
	kvc_detach(member[0]);
	assert_int_equal(kvc_attach(&config, &member[0]), (kvc_status_t)KV_ERR_SECRET);
	kvc_detach(member[1]);
	bed_free(&bed);
}

static int kvctl(const bed_t *bed, const char *arguments_text);
static int said(const bed_t *bed, const char *text);

/* A router attaches to match only: it sees what there is, holds nothing, and finds its way back after a restart. */
KV_TEST(p4_who_attaches_to_match_only_sees_all_and_holds_nothing)
{
	kvc_identity_t identity = identity_of();
	kvc_config_t config;
	kvc_match_t seen = {.struct_size = sizeof seen};
	kvc_space_t *space;
	kvc_lease_t *lease = NULL;
	kvc_put_t *begun = NULL;
	kvc_t *router;
	bed_t bed;

	bed_make(&bed, 1);
	put(&bed, 0, 20, 1);
	config = config_of(&bed);
	config.role = KVC_ROLE_MATCH;
	assert_int_equal(kvc_attach(&config, &router), KVC_OK);
	assert_int_equal(kvc_space_open(router, &identity, &space), KVC_OK);
	kvc_match(space, bed.keys, KEYS, &seen);
	assert_int_equal(seen.n, 20);
	assert_int_equal(kvc_acquire(space, bed.keys, 20, 0, 0, &lease), KVC_ERR_PIDFD_REQUIRED);
	assert_int_equal(kvc_put_start(space, bed.keys, 20, 24, NULL, &begun), KVC_ERR_PIDFD_REQUIRED);
	assert_int_equal(kvc_space_reset(space), KVC_ERR_PIDFD_REQUIRED);
	assert_true(!lease && !begun);
	kvc_report(space, &(kvc_report_t){.struct_size = sizeof(kvc_report_t), .query_tokens = 1});
	assert_int_equal(kvctl(&bed, "status --detail 2"), 0);
	assert_true(said(&bed, "match_only true"));
	kvc_detach(bed.kvc);
	assert_int_equal(raw_daemon_kill(&bed.daemon, SIGKILL), 128 + SIGKILL);
	assert_int_not_equal(kvc_poll(router, 100), KVC_OK);
	assert_true(raw_daemon_spawn(&bed.daemon, arguments(&bed), &(int){0}));
	seen.n = 0;
	for (uint64_t until = now_ms() + RAW_TIMEOUT_MS; seen.n != 20 && now_ms() < until;) {
		(void)kvc_poll(router, 5);
		kvc_match(space, bed.keys, KEYS, &seen);
	}
	assert_int_equal(seen.n, 20);
	kvc_detach(router);
	for (uint32_t i = 0; i < KEYS; i++) {
		free(bed.src[i]);
		free(bed.dst[i]);
	}
	attach(&bed);
	bed_free(&bed);
}

/* Run kvctl on this daemon: its exit code. */
static int kvctl(const bed_t *bed, const char *arguments_text)
{
	char command[512];
	int status;

	snprintf(command, sizeof command, "%s --socket %s %s >%s/out 2>&1", kv_test_program(E2E_KVCTL),
		 bed->daemon.sock, arguments_text, bed->disk);
	status = system(command);

	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int said(const bed_t *bed, const char *text)
{
	char path[128], have[65536];
	FILE *file;
	size_t n;

	snprintf(path, sizeof path, "%s/out", bed->disk);
	file = fopen(path, "re");
	assert_non_null(file);
	n = fread(have, 1, sizeof have - 1, file);
	have[n] = '\0';
	fclose(file);
	if (!strstr(have, text)) {
		printf("# \"%s\" is not in:\n%s\n", text, have);
	}

	return strstr(have, text) != NULL;
}

KV_TEST(kvctl_looks_into_the_real_daemon)
{
	bed_t bed;
	char explain[1024] = "explain --tokens ";

	bed_make(&bed, 1);
	put(&bed, 0, 3, 0);
	assert_int_equal(kvctl(&bed, "status"), 0);
	assert_true(said(&bed, "healthy"));
	assert_int_equal(kvctl(&bed, "status --json --detail 2"), 0);
	assert_true(said(&bed, "\"program\":\"e2e\""));
	assert_int_equal(kvctl(&bed, "check"), 0);
	assert_true(said(&bed, ", 0 failed"));
	assert_int_equal(kvctl(&bed, "stats kvd_put_blocks"), 0);
	assert_true(said(&bed, "3"));
	assert_int_equal(kvctl(&bed, "config cpu.size"), 0);
	assert_true(said(&bed, " 8MiB  (command line)"));
	for (uint32_t i = 0; i < 5 * TOKENS; i++) {
		size_t at = strlen(explain);

		snprintf(explain + at, sizeof explain - at, "%u,", bed.tokens[i]);
	}
	{
		char path[128];
		FILE *file;

		snprintf(path, sizeof path, "%s/tokens", bed.disk);
		file = fopen(path, "we");
		assert_non_null(file);
		fputs(explain + strlen("explain --tokens "), file);
		fclose(file);
		snprintf(explain, sizeof explain, "explain --tokens @%s", path);
	}
	assert_int_equal(kvctl(&bed, explain), 1);
	assert_true(said(&bed, "3 of 5 blocks would hit"));
	assert_int_equal(kvctl(&bed, "version"), 0);
	bed_free(&bed);
}

KV_TEST_MAIN(NULL, NULL)
