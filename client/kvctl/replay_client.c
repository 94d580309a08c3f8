/* One client of a replay: look up, lease, read and verify every byte, put what is missing. */
#include "replay.h"

#include "kvk/layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define READ_BATCH 64u

typedef struct client {
	const replay_job_t *job;
	replay_result_t *result;
	kvc_t *kvc;
	kvc_space_t *space;
	kvc_key_t *keys;   /* of the running request */
	uint8_t *buffer;   /* READ_BATCH blocks */
	uint8_t *expected; /* one block */
} client_t;

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);

	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* The content of a block is a function of its key: splitmix64 from the key's first bytes. */
static void block_content(const kvc_key_t *key, uint8_t *out, uint32_t bytes)
{
	uint64_t x;

	memcpy(&x, key->b, sizeof x);
	for (uint32_t at = 0; at < bytes; at += 8) {
		uint64_t z = x += 0x9e3779b97f4a7c15u;

		z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
		z = (z ^ z >> 27) * 0x94d049bb133111ebu;
		z ^= z >> 31;
		memcpy(out + at, &z, bytes - at < 8 ? bytes - at : 8);
	}
}

static uint64_t wrong_bytes(const uint8_t *got, const uint8_t *expected, uint32_t bytes)
{
	uint64_t wrong = 0;

	if (memcmp(got, expected, bytes) == 0) {
		return 0;
	}
	for (uint32_t i = 0; i < bytes; i++) {
		wrong += got[i] != expected[i];
	}

	return wrong;
}

static kvc_status_t open_space(client_t *client)
{
	const kvk_layout_t block = {.heads = 1,
				    .layers = 1,
				    .block_tokens = TRACE_BLOCK_TOKENS,
				    .dtype = KVK_DTYPE_BYTE,
				    .inner = KVK_INNER_OPAQUE,
				    .page_bytes = client->job->block_bytes};
	char layout[KVK_LAYOUT_TEXT_MAX];
	kvc_identity_t identity = {
		.struct_size = sizeof identity,
		.model = "kvctl replay",
		.weights = client->job->name,
		.dtype = "byte",
		.rope = "none",
		.hash = "trace-ids",
		.hash_tokens = TRACE_BLOCK_TOKENS,
		.layout = layout,
		.page_format = "replay",
	};

	kvc_status_t status = kvc_layout_text(&block, 1, layout, sizeof layout);

	return status == KVC_OK ? kvc_space_open(client->kvc, &identity, &client->space) : status;
}

/* A trace's ids are chained hashes already: bind each to the space, as an engine's own hash would be. */
static kvc_status_t make_keys(client_t *client, const trace_request_t *request)
{
	for (uint32_t i = 0; i < request->count; i++) {
		uint64_t hash[2] = {client->job->trace->ids[request->first + i], 0};
		kvc_status_t status = kvc_key_bind(client->space, hash, sizeof hash, &client->keys[i]);

		if (status != KVC_OK) {
			return status;
		}
	}

	return KVC_OK;
}

/* Copy the leased blocks out in batches and compare every byte. Returns how many leading blocks were good. */
static uint32_t read_blocks(client_t *client, kvc_lease_t *lease, uint32_t n)
{
	const uint32_t bytes = client->job->block_bytes;
	void *dst[READ_BATCH];
	uint32_t done = 0;

	while (done < n) {
		uint32_t count = n - done < READ_BATCH ? n - done : READ_BATCH;
		uint32_t bad = 0;
		kvc_status_t status;

		for (uint32_t i = 0; i < count; i++) {
			dst[i] = client->buffer + (size_t)i * bytes;
		}
		status = kvc_lease_read(lease, done, count, dst, &bad);
		if (status != KVC_OK) {
			client->result->corrupt_blocks += status == KVC_ERR_CORRUPT;
			return status == KVC_ERR_CORRUPT ? bad : done;
		}
		for (uint32_t i = 0; i < count; i++) {
			block_content(&client->keys[done + i], client->expected, bytes);
			client->result->wrong_bytes += wrong_bytes(dst[i], client->expected, bytes);
		}
		client->result->bytes_read += (uint64_t)count * bytes;
		done += count;
	}

	return done;
}

/* A silent daemon is asked again until the time is over, which begins with the first try (*p_until_ns 0): what it has
 * is what is asked for. */
static int may_ask_again(const client_t *client, uint64_t *p_until_ns)
{
	const uint64_t now = now_ns();

	*p_until_ns = *p_until_ns ? *p_until_ns : now + client->job->timeout_ms * UINT64_C(1000000);
	(void)kvc_poll(client->kvc, 1);

	return now < *p_until_ns;
}

/* A call has failed. Without the daemon, or with the next one, whose cache is empty, no figure says what this cache
 * does: then no more requests. */
static void count_failure(client_t *client, kvc_status_t status)
{
	client->result->failures++;
	if (status == KVC_ERR_CLOSED || status == KVC_ERR_UNREACHABLE || status == KVC_ERR_DAEMON_STALE) {
		client->result->status = status;
	}
}

/* Lease what is resident of the prompt and read it. The lease stays until the caller releases it. */
static uint32_t load_blocks(client_t *client, uint32_t wanted, uint32_t *p_cpu, uint64_t *p_ns, kvc_lease_t **p_lease)
{
	uint64_t start = now_ns(), until = 0;
	uint32_t n = 0;
	kvc_status_t status;

	*p_cpu = 0;
	do {
		status = wanted ? kvc_acquire(client->space, client->keys, wanted, 0, 0, p_lease) : KVC_MISS;
	} while (status == KVC_ERR_DAEMON_STALE && may_ask_again(client, &until));
	if (status == KVC_OK) {
		n = kvc_lease_n(*p_lease);
		status = kvc_lease_wait(*p_lease, n, client->job->timeout_ms);
		n = status == KVC_OK ? n : kvc_lease_ready(*p_lease);
		n = read_blocks(client, *p_lease, n);
		*p_cpu = n - (kvc_lease_disk(*p_lease) < n ? kvc_lease_disk(*p_lease) : n);
	}
	if (status != KVC_OK && status != KVC_MISS) {
		count_failure(client, status);
	}
	*p_ns = now_ns() - start;

	return n;
}

static uint64_t store_blocks(client_t *client, uint32_t from, uint32_t n)
{
	uint64_t start = now_ns(), until = 0;
	uint32_t visible = 0;
	kvc_put_t *put = NULL;
	kvc_put_result_t outcome = {.struct_size = sizeof outcome};
	kvc_status_t status;

	do {
		status = kvc_put_start(client->space, client->keys, from, n, NULL, &put);
	} while (status == KVC_ERR_DAEMON_STALE && may_ask_again(client, &until));
	if (status == KVC_OK) {
		status = kvc_put_ready(put, client->job->timeout_ms);
	}
	for (uint32_t i = 0; status == KVC_OK && i < kvc_put_n(put); i++) {
		block_content(&client->keys[from + i], client->expected, client->job->block_bytes);
		status = kvc_put_write(put, i, client->expected);
		client->result->bytes_written += client->job->block_bytes;
	}
	if (status == KVC_OK) {
		status = kvc_put_end(put, 0, kvc_put_n(put));
	}
	if (status == KVC_OK) {
		status = kvc_put_wait(put, 0, client->job->timeout_ms);
	}
	if (put) {
		kvc_put_get_result(put, &outcome);
		visible = outcome.visible;
		kvc_put_free(put);
	}
	client->result->put_blocks += visible;
	client->result->put_failed_blocks += n - from - visible;
	if (status != KVC_OK) {
		count_failure(client, status);
	}

	return now_ns() - start;
}

static void replay_request(client_t *client, uint32_t number, replay_samples_t samples)
{
	const trace_request_t *request = &client->job->trace->requests[number];
	replay_result_t *result = client->result;
	kvc_lease_t *lease = NULL;
	kvc_match_t match = {.struct_size = sizeof match};
	uint32_t offered = request->count;
	uint32_t cpu;
	uint32_t hit;
	uint64_t start, until = 0;

	if (client->job->blocks && offered > client->job->blocks) {
		offered = client->job->blocks;
	}
	if (make_keys(client, request) != KVC_OK) {
		result->failures++;
		return;
	}
	do {
		start = now_ns();
		kvc_match(client->space, client->keys, request->count, &match);
	} while (match.why == KVC_WHY_DAEMON_STALE && may_ask_again(client, &until));
	samples.match_ns[number] = now_ns() - start;

	hit = load_blocks(client, match.n, &cpu, &samples.acquire_ns[number], &lease);
	result->requests++;
	result->input_tokens += request->input_tokens;
	result->hit_blocks += hit;
	result->hit_tokens += trace_tokens(request, hit);
	result->hit_cpu_tokens += trace_tokens(request, cpu);
	if (hit < offered) {
		samples.put_ns[number] = store_blocks(client, hit, offered);
	}
	kvc_release(&lease, 1);
}

static int open_client(client_t *client, const replay_job_t *job)
{
	kvc_config_t config = {
		.struct_size = sizeof config,
		.socket = job->socket,
		.role = KVC_ROLE_BOTH,
		.program = "kvctl replay",
		.timeout_ms = job->timeout_ms,
		.staging_blocks = job->trace->longest,
	};

	client->keys = calloc(job->trace->longest + 1u, sizeof *client->keys);
	client->buffer = malloc((size_t)READ_BATCH * job->block_bytes);
	client->expected = malloc(job->block_bytes);
	if (!client->keys || !client->buffer || !client->expected) {
		client->result->status = KVC_ERR_NOMEM;
		return 0;
	}
	client->result->status = kvc_attach(&config, &client->kvc);
	if (client->result->status == KVC_OK) {
		client->result->status = open_space(client);
	}

	return client->result->status == KVC_OK;
}

void replay_client(const replay_job_t *job, replay_samples_t samples, replay_result_t *result)
{
	client_t client = {.job = job, .result = result};
	uint32_t next = job->client;

	if (!open_client(&client, job)) {
		fprintf(stderr, "kvctl: client %u: %s\n", job->client, kvc_last_error());
	}
	while (result->status == KVC_OK && next < job->trace->count) {
		replay_request(&client, next, samples);
		next += job->clients;
	}
	if (result->requests > 0 && result->status != KVC_OK) {
		fprintf(stderr, "kvctl: client %u gave up after %llu requests: %s\n", job->client,
			(unsigned long long)result->requests, kv_status_text((kv_status_t)result->status));
	}

	kvc_detach(client.kvc);
	free(client.keys);
	free(client.buffer);
	free(client.expected);
}
