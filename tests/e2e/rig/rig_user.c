#include "e2e/rig/rig.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

kvc_identity_t user_identity(const char *model)
{
	return (kvc_identity_t){
		.struct_size = sizeof(kvc_identity_t),
		.model = model,
		.weights = "r1",
		.dtype = "bf16",
		.rope = "none",
		.hash_tokens = RIG_TOKENS,
		.layout = RIG_LAYOUT,
	};
}

kvc_status_t user_try(user_t *user, const char *sock, const kvc_identity_t *identity)
{
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = sock,
				     .program = "e2e",
				     .staging_blocks = RIG_BLOCKS,
				     .timeout_ms = RIG_WAIT_MS}; /* a slow disk acknowledges late */
	kvc_status_t status;

	*user = (user_t){0};
	status = kvc_attach(&config, &user->kvc);
	if (status == KVC_OK) {
		status = kvc_space_open(user->kvc, identity, &user->space);
	}
	if (status != KVC_OK) {
		kvc_detach(user->kvc);
		user->kvc = NULL;
	}

	return status;
}

void user_attach(user_t *user, const rig_t *rig, const char *model)
{
	const kvc_identity_t identity = user_identity(model);

	if (user_try(user, rig->sock, &identity) != KVC_OK) {
		fail_msg("%s", kvc_last_error());
	}
}

void user_leave(user_t *user)
{
	kvc_detach(user->kvc);
	user->kvc = NULL;
	assert_int_equal(user->wrong, 0);
}

void rig_begin(rig_t *rig, int disk)
{
	rig_init(rig, disk);
	rig_start(rig);
}

void rig_begin_with(rig_t *rig, int disk, user_t *user, const char *model)
{
	rig_begin(rig, disk);
	user_attach(user, rig, model);
}

void rig_finish(rig_t *rig, user_t *user)
{
	if (user->kvc) {
		user_leave(user);
	}
	if (rig->pid > 0) {
		rig_check_quiet(rig);
	}
	rig_fini(rig);
}

void user_tokens(uint64_t seed, uint32_t n, uint32_t *tokens)
{
	kv_test_rng_t rng = {.state = kv_test_seed() ^ (seed * UINT64_C(0x9e3779b97f4a7c15))};

	assert_true(n <= RIG_BLOCKS);
	for (uint32_t i = 0; i < n * RIG_TOKENS; i++) {
		tokens[i] = (uint32_t)kv_test_below(&rng, 50000);
	}
}

void user_keys(const user_t *user, uint64_t seed, uint32_t n, kvc_key_t *keys)
{
	uint32_t tokens[RIG_BLOCKS * RIG_TOKENS];
	uint32_t made = 0;

	user_tokens(seed, n, tokens);
	assert_int_equal(kvc_keys_of(user->space, &(kvc_prompt_t){sizeof(kvc_prompt_t), tokens, n * RIG_TOKENS, NULL},
				     keys, n, &made),
			 KVC_OK);
	assert_int_equal(made, n);
}

void user_fill(const kvc_key_t *key, uint8_t *out)
{
	kv_test_rng_t rng;
	uint64_t word;

	memcpy(&rng.state, key->b + 8, sizeof rng.state);
	for (size_t i = 0; i < RIG_BLOCK_BYTES; i += sizeof word) {
		word = kv_test_rand(&rng);
		memcpy(out + i, &word, sizeof word);
	}
}

kvc_status_t user_put(user_t *user, const kvc_key_t *keys, uint32_t from, uint32_t n, int durable, uint32_t *p_visible)
{
	static uint8_t blocks[RIG_BLOCKS][RIG_BLOCK_BYTES];
	const void *src[RIG_BLOCKS];
	const kvc_put_options_t options = {.struct_size = sizeof options, .durable = durable, .blocks = src};
	uint32_t visible = 0;
	kvc_status_t status;

	for (uint32_t i = from; i < n; i++) {
		user_fill(&keys[i], blocks[i - from]);
		src[i - from] = blocks[i - from];
	}
	status = kvc_put(user->space, keys, from, n, &options, &visible);
	if (status == KVC_OK && p_visible) {
		*p_visible = visible;
	}

	return status;
}

/* Blocks have the bytes of these keys, which may be another daemon's. */
static kvc_status_t read_lease(user_t *user, kvc_lease_t *lease, const kvc_key_t *as, uint32_t *p_n)
{
	static uint8_t have[RIG_BLOCK_BYTES], want[RIG_BLOCK_BYTES];
	void *const dst[1] = {have};
	kvc_status_t status = KVC_OK;

	for (uint32_t i = 0; status == KVC_OK && i < kvc_lease_n(lease); i++) {
		memset(have, 0xee, sizeof have);
		status = kvc_lease_wait(lease, i + 1, 0);
		if (status == KVC_OK) {
			status = kvc_lease_read(lease, i, 1, dst, NULL);
		}
		if (status == KVC_OK) {
			user_fill(&as[i], want);
			user->wrong += memcmp(have, want, sizeof have) != 0;
			*p_n = i + 1;
		}
	}

	return status;
}

kvc_status_t user_get(user_t *user, const kvc_key_t *keys, uint32_t n, uint32_t *p_n)
{
	return user_get_as(user, keys, keys, n, p_n);
}

kvc_status_t user_get_as(user_t *user, const kvc_key_t *keys, const kvc_key_t *as, uint32_t n, uint32_t *p_n)
{
	kvc_lease_t *lease = NULL;
	kvc_match_t match = {.struct_size = sizeof match};
	kvc_status_t status;

	*p_n = 0;
	(void)kvc_poll(user->kvc, 0);
	kvc_match(user->space, keys, n, &match);
	if (match.n == 0) {
		return KVC_MISS;
	}
	status = kvc_acquire(user->space, keys, match.n, 0, 0, &lease);
	if (status == KVC_OK) {
		status = read_lease(user, lease, as, p_n);
	}
	kvc_release(&lease, 1);

	return status;
}

void user_expect(user_t *user, const kvc_key_t *keys, uint32_t n)
{
	user_expect_as(user, keys, keys, n);
}

void user_expect_as(user_t *user, const kvc_key_t *keys, const kvc_key_t *as, uint32_t n)
{
	uint32_t got = 0;

	assert_int_equal(user_get_as(user, keys, as, n, &got), KVC_OK);
	assert_int_equal(got, n);
	assert_int_equal(user->wrong, 0);
}

uint32_t user_match(const user_t *user, const kvc_key_t *keys, uint32_t n)
{
	kvc_match_t match = {.struct_size = sizeof match};

	kvc_match(user->space, keys, n, &match);

	return match.n;
}

int user_match_is(user_t *user, const kvc_key_t *keys, uint32_t n, uint32_t want)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;

	while (user_match(user, keys, n) != want && rig_now_ms() < deadline) {
		(void)kvc_poll(user->kvc, 3);
	}
	if (user_match(user, keys, n) != want) {
		kvc_match_t match = {.struct_size = sizeof match};

		kvc_match(user->space, keys, n, &match);
		printf("# match is %u, not %u: reason %u\n", match.n, want, match.why);
	}

	return user_match(user, keys, n) == want;
}

uint8_t *user_memory(kvc_lease_t *lease, uint32_t i)
{
	const void *data = NULL;

	assert_int_equal(kvc_lease_wait(lease, i + 1, 0), KVC_OK);
	assert_int_equal(kvc_lease_block(lease, i, &data, NULL), KVC_OK);

	return (uint8_t *)(uintptr_t)data;
}

/* ---- another client -------------------------------------------------------------------------- */

#define OTHER_TALKS 6u
#define OTHER_MAX   10u

static void count_round(other_shared_t *shared, kvc_status_t status)
{
	if (status == KVC_OK || status == KVC_MISS) {
		return;
	}
	atomic_store(&shared->last, status);
	snprintf(shared->text, sizeof shared->text, "%s", kvc_last_error());
	atomic_fetch_add(&shared->failures, 1);
}

static void other_round(user_t *user, other_shared_t *shared, kv_test_rng_t *rng)
{
	kvc_key_t keys[OTHER_MAX];
	const uint32_t n = 1 + (uint32_t)kv_test_below(rng, OTHER_MAX);
	uint32_t had = 0;
	kvc_status_t status;

	user_keys(user, 1000 + kv_test_below(rng, OTHER_TALKS), n, keys);
	status = user_get(user, keys, n, &had);
	count_round(shared, status);
	atomic_fetch_add(&shared->hits, had);
	if (had < n) {
		status = user_put(user, keys, 0, n, 0, NULL);
		count_round(shared, status);
	}
	atomic_store(&shared->wrong, user->wrong);
	atomic_fetch_add(&shared->rounds, 1);
}

static _Noreturn void other_live(const char *sock, other_shared_t *shared)
{
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = sock,
				     .program = "other",
				     .staging_blocks = RIG_BLOCKS,
				     .timeout_ms = RIG_WAIT_MS};
	const kvc_identity_t identity = user_identity("other");
	kv_test_rng_t rng = {.state = kv_test_seed()};
	user_t user = {0};
	kvc_status_t status = kvc_attach(&config, &user.kvc);

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (status == KVC_OK) {
		status = kvc_space_open(user.kvc, &identity, &user.space);
	}
	count_round(shared, status);
	while (status == KVC_OK && !atomic_load(&shared->stop)) {
		other_round(&user, shared, &rng);
		usleep(500);
	}
	kvc_detach(user.kvc);
	_exit(0);
}

void other_start(other_t *other, const char *sock)
{
	(void)kv_test_seed(); /* printed here, not there */
	fflush(stdout);
	other->shared = mmap(NULL, sizeof *other->shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	assert_ptr_not_equal(other->shared, MAP_FAILED);
	other->pid = fork();
	assert_true(other->pid >= 0);
	if (other->pid == 0) {
		other_live(sock, other->shared);
	}
	other_goes_on(other, 3);
}

void other_goes_on(const other_t *other, uint64_t rounds)
{
	const uint64_t until = atomic_load(&other->shared->rounds) + rounds, deadline = rig_now_ms() + RIG_WAIT_MS;

	while (atomic_load(&other->shared->rounds) < until) {
		if (rig_now_ms() > deadline) {
			fail_msg("the other client stands still: %s", other->shared->text);
		}
		usleep(1000);
	}
}

void other_recovers(const other_t *other)
{
	const uint64_t hits = atomic_load(&other->shared->hits), deadline = rig_now_ms() + RIG_WAIT_MS;

	while (atomic_load(&other->shared->hits) == hits) {
		if (rig_now_ms() > deadline) {
			fail_msg("the other client no longer has a hit: %s", other->shared->text);
		}
		usleep(1000);
	}
}

void other_end(other_t *other, int faults)
{
	const other_shared_t *shared = other->shared;
	int wstatus = 0;

	atomic_store(&other->shared->stop, 1);
	assert_int_equal(waitpid(other->pid, &wstatus, 0), other->pid);
	assert_int_equal(wstatus, 0);
	printf("# other: rounds %lu hits %lu failures %lu\n", (unsigned long)shared->rounds,
	       (unsigned long)shared->hits, (unsigned long)shared->failures);
	assert_true(shared->rounds > 0 && shared->hits > 0);
	assert_int_equal(shared->wrong, 0);
	if (!faults && shared->failures) {
		fail_msg("the other client was disturbed: %s (%s)", kvc_status_name(shared->last), shared->text);
	}
	munmap(other->shared, sizeof *other->shared);
}

void user_key_at(void *ctx, uint32_t i, kvc_key_t *key)
{
	*key = ((const kvc_key_t *)ctx)[i];
}

kvc_handover_info_t user_handover_info(const kvc_handover_t *handover)
{
	kvc_handover_info_t info = {.struct_size = sizeof info};

	kvc_handover_get_info(handover, &info);

	return info;
}
