#include "connectors/inproc/fake_kvc.h"
#include "engine/check.h"

#include "kv/shm.h"
#include "kvk/move.h"

#include <stdlib.h>
#include <string.h>

struct kvc {
	uint64_t polls;
};
struct kvc_space {
	kvc_t *kvc;
	uint64_t asked_at;
};
struct kvc_lease {
	kvc_t *kvc;
	kvc_key_t keys[256];
	uint32_t n, skip;
	uint64_t answer_at;
	int over;
};
struct kvc_put {
	kvc_t *kvc;
	kvc_key_t keys[256];
	uint32_t from, n, granted, ended;
	uint64_t answer_at, done_at;
	kvc_status_t status;
	int finished;
};

typedef struct stored {
	kvc_key_t key;
	int there;
	uint8_t *data;
	uint64_t *leaves;
} stored_t;

fake_t fake;
static stored_t stored[FAKE_BLOCKS];
static kvk_geometry_t geometry;
static kvk_layout_t the_layout;
static kvc_t the_kvc;
static kvc_space_t the_space;

void fake_reset(const kvk_layout_t *layout)
{
	for (uint32_t i = 0; i < FAKE_BLOCKS; i++) {
		free(stored[i].data);
		free(stored[i].leaves);
		stored[i] = (stored_t){0};
	}
	fake = (fake_t){.incarnation = 1, .ready_step = 1000};
	if (layout) {
		the_layout = *layout;
		kvk_layout_geometry(layout, &geometry);
	}
}

static stored_t *find(const kvc_key_t *key, int make)
{
	uint64_t at;

	memcpy(&at, key->b, sizeof at);
	for (uint32_t i = 0; i < FAKE_BLOCKS; i++) {
		stored_t *s = &stored[(at + i) % FAKE_BLOCKS];

		if (s->data && memcmp(&s->key, key, sizeof *key) == 0) {
			return s;
		}
		if (!s->data && !make) {
			return NULL;
		}
		if (!s->data) {
			s->key = *key;
			s->data = calloc(1, geometry.block_bytes);
			s->leaves = calloc((size_t)geometry.heads * geometry.leaves, sizeof(uint64_t));
			return s;
		}
	}

	return NULL;
}

void fake_damage(const kvc_key_t *key)
{
	stored_t *s = find(key, 0);

	assert_non_null(s);
	s->data[geometry.block_bytes / 2] ^= 4;
}

void fake_evict(const kvc_key_t *key)
{
	stored_t *s = find(key, 0);

	if (s) {
		s->there = 0;
	}
}

void fake_keys(const uint32_t *tokens, uint32_t n_tokens, const char *salt, kvc_key_t *keys)
{
	uint64_t hash = hash_bytes(HASH_START, salt ? salt : "", salt ? strlen(salt) : 0);

	for (uint32_t i = 0; i < n_tokens / the_layout.block_tokens; i++) {
		hash = hash_bytes(hash, tokens + i * the_layout.block_tokens,
				  the_layout.block_tokens * sizeof(uint32_t));
		memcpy(keys[i].b, &hash, 8);
		memcpy(keys[i].b + 8, &hash, 8);
	}
}

/* ---- libkvc ---------------------------------------------------------------------------------- */

kvc_status_t kvc_attach(const kvc_config_t *config, kvc_t **p_kvc)
{
	assert_int_equal(config->lazy, 2); /* an engine's start waits for attach_ms, not for the daemon */
	the_kvc = (kvc_t){0};
	*p_kvc = &the_kvc;

	return KVC_OK;
}
void kvc_detach(kvc_t *kvc)
{
	(void)kvc;
}
int kvc_fd(const kvc_t *kvc)
{
	(void)kvc;

	return fake.incarnation ? 0 : -1; /* only its sign is looked at */
}
kvc_status_t kvc_poll(kvc_t *kvc, uint32_t timeout_ms)
{
	(void)timeout_ms;
	kvc->polls++;

	return fake.incarnation ? KVC_OK : KVC_ERR_UNREACHABLE;
}
kvc_status_t kvc_await_us(kvc_t *kvc, uint32_t timeout_us)
{
	(void)timeout_us;
	if (fake.silent && fake.stall == 0) {
		return KVC_ERR_DAEMON_STALE;
	}
	fake.silent = fake.silent && --fake.stall > 0;

	return kvc_poll(kvc, 0);
}
uint64_t kvc_incarnation(const kvc_t *kvc)
{
	(void)kvc;

	return fake.incarnation;
}
const char *kvc_last_error(void)
{
	return "the fake was told to fail";
}
kvc_status_t kvc_space_open_start(kvc_t *kvc, const kvc_identity_t *identity, kvc_space_t **p_space)
{
	assert_non_null(identity->layout);
	if (fake.no_space) {
		return KVC_ERR_ARG;
	}
	the_space.kvc = kvc;
	the_space.asked_at = kvc->polls;
	*p_space = &the_space;

	return KVC_OK;
}
/* The answer comes with a later poll. */
kvc_status_t kvc_space_state(const kvc_space_t *space)
{
	return space->kvc->polls > space->asked_at ? KVC_OK : KVC_PENDING;
}
void kvc_space_close(kvc_space_t *space)
{
	(void)space;
}
kvc_status_t kvc_keys_of(const kvc_space_t *space, const kvc_prompt_t *prompt, kvc_key_t *keys, uint32_t cap,
			 uint32_t *p_n)
{
	(void)space;
	*p_n = prompt->n_tokens / the_layout.block_tokens;
	assert_true(*p_n <= cap);
	fake_keys(prompt->tokens, prompt->n_tokens, prompt->salt, keys);

	return KVC_OK;
}
void kvc_match(const kvc_space_t *space, const kvc_key_t *keys, uint32_t n, kvc_match_t *match)
{
	(void)space;
	*match = (kvc_match_t){.struct_size = match->struct_size, .why = KV_WHY_NONE};
	if (!fake.incarnation || fake.silent) {
		match->why = fake.silent ? KV_WHY_DAEMON_STALE : KV_WHY_NO_DAEMON;
		return;
	}
	while (match->n < n) {
		const stored_t *s = find(&keys[match->n], 0);

		if (!s || !s->there) {
			match->why = KV_WHY_ABSENT;
			break;
		}
		match->n++;
	}
	match->n_cpu = match->n;
}

kvc_status_t kvc_acquire_start(kvc_space_t *space, const kvc_key_t *keys, uint32_t n, uint32_t skip, uint32_t ttl_ms,
			       kvc_lease_t **p_lease)
{
	kvc_lease_t *lease = calloc(1, sizeof *lease);

	(void)ttl_ms;
	lease->kvc = space->kvc;
	memcpy(lease->keys, keys, n * sizeof *keys);
	lease->n = n;
	lease->skip = skip;
	lease->answer_at = space->kvc->polls + fake.answer_after;
	fake.leases++;
	*p_lease = lease;

	return KVC_OK;
}
kvc_status_t kvc_lease_state(const kvc_lease_t *lease)
{
	if (!fake.incarnation || lease->over) {
		return KVC_ERR_REVOKED;
	}
	if (fake.silent || lease->kvc->polls < lease->answer_at) {
		return KVC_PENDING;
	}

	return fake.acquire;
}
uint32_t kvc_lease_n(const kvc_lease_t *lease)
{
	return lease->n;
}
uint32_t kvc_lease_ready(const kvc_lease_t *lease)
{
	const uint64_t ready = lease->skip + (lease->kvc->polls - lease->answer_at) * fake.ready_step;
	const uint64_t top = fake.rest && fake.rest_at < lease->n ? fake.rest_at : lease->n;

	return (uint32_t)(ready < top ? ready : top);
}
uint32_t kvc_lease_disk(const kvc_lease_t *lease)
{
	(void)lease;

	return fake.disk;
}
kvc_status_t kvc_lease_rest_status(const kvc_lease_t *lease)
{
	return kvc_lease_ready(lease) == fake.rest_at ? fake.rest : KVC_OK;
}
kvc_status_t kvc_lease_block(const kvc_lease_t *lease, uint32_t i, const void **p_data, const uint64_t **p_leaves)
{
	const stored_t *s = find(&lease->keys[i], 0);

	assert_true(i >= lease->skip && i < kvc_lease_ready(lease));
	assert_non_null(s);
	if (fake.revoke_on_block && i >= fake.revoke_on_block) {
		((kvc_lease_t *)(uintptr_t)lease)->over = 1;
	}
	*p_data = s->data;
	*p_leaves = s->leaves;

	return KVC_OK;
}
kvc_status_t kvc_lease_report_bad(kvc_lease_t *lease, uint32_t i)
{
	fake_evict(&lease->keys[i]);
	fake.bad++;

	return KVC_OK;
}
void kvc_release(kvc_lease_t *const *leases, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		if (leases[i]) {
			fake.leases--;
			free(leases[i]);
		}
	}
}

kvc_status_t kvc_put_start(kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t n,
			   const kvc_put_options_t *options, kvc_put_t **p_put)
{
	kvc_put_t *put;

	assert_non_null(options->tokens);
	if (!fake.incarnation) {
		return KVC_ERR_CLOSED;
	}
	put = calloc(1, sizeof *put);
	put->kvc = space->kvc;
	memcpy(put->keys, keys, n * sizeof *keys);
	put->from = from;
	put->n = n - from;
	put->granted = fake.grant && fake.grant < put->n ? fake.grant : put->n;
	put->answer_at = space->kvc->polls + fake.answer_after;
	put->status = KVC_PENDING;
	if (fake.put_times > 0) {
		fake.put_times--;
		put->status = fake.put;
	}
	fake.put_starts++;
	fake.put_from = from;
	fake.puts++;
	*p_put = put;

	return KVC_OK;
}
static int answered(const kvc_put_t *put)
{
	return !fake.silent && put->kvc->polls >= put->answer_at;
}
uint32_t kvc_put_n(const kvc_put_t *put)
{
	return answered(put) && put->status == KVC_PENDING ? put->granted : 0;
}
static void become_visible(kvc_put_t *put)
{
	for (uint32_t i = 0; i < put->granted; i++) {
		stored_t *s = find(&put->keys[put->from + i], 0);

		if (fake.wrong_bytes) {
			memset(s->data, 0x5a, geometry.block_bytes);
			kvk_digest_block(&the_layout, s->data, s->leaves, NULL);
		}
		s->there = 1;
	}
	put->finished = 1;
}
void kvc_put_get_result(const kvc_put_t *put, kvc_put_result_t *result)
{
	*result = (kvc_put_result_t){
		.struct_size = result->struct_size, .status = KVC_PENDING, .durable_status = KVC_MISS};
	if (!fake.incarnation) {
		result->status = KVC_ERR_REVOKED;
	} else if (answered(put) && put->status != KVC_PENDING) {
		result->status = put->status;
	} else if (answered(put) && put->ended == put->granted && put->kvc->polls >= put->done_at) {
		result->status = fake.put_done;
		if (fake.put_done == KVC_OK) {
			become_visible((kvc_put_t *)(uintptr_t)put);
			result->visible = put->granted;
		}
	}
}
kvc_status_t kvc_put_block(const kvc_put_t *put, uint32_t i, void **p_data)
{
	stored_t *s = find(&put->keys[put->from + i], 1);

	assert_true(i < put->granted);
	if (s->there) {
		return KVC_ALREADY;
	}
	*p_data = s->data;

	return KVC_OK;
}
kvc_status_t kvc_put_digests(kvc_put_t *put, uint32_t i, const uint64_t *leaves)
{
	memcpy(find(&put->keys[put->from + i], 0)->leaves, leaves,
	       (size_t)geometry.heads * geometry.leaves * sizeof *leaves);

	return KVC_OK;
}
kvc_status_t kvc_put_end(kvc_put_t *put, uint32_t first, uint32_t count)
{
	assert_int_equal(first, put->ended);
	assert_true(count > 0 && count <= put->granted - put->ended);
	put->ended += count;
	put->done_at = put->kvc->polls + fake.answer_after;

	return fake.put_end;
}
kvc_status_t kvc_put_keep(kvc_put_t *put)
{
	assert_true(put->granted > 0);
	fake.keeps++;

	return KVC_OK;
}
void kvc_put_free(kvc_put_t *put)
{
	if (put) {
		fake.puts--;
		fake.released_unfinished += !put->finished;
		free(put);
	}
}
void kvc_report(kvc_space_t *space, const kvc_report_t *report)
{
	(void)space;
	fake.reports++;
	fake.last_report_why = report->why;
}

void kvc_abandon(kvc_t *kvc)
{
	(void)kvc;
	fake.incarnation = 0;
}
