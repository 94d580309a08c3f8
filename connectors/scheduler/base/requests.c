/* The table of requests: chained buckets, found by id, the last one found first. */
#include "scheduler/base/requests.h"

#define FIRST_BUCKETS 256u

kvc_status_t kvx_requests_init(kvx_requests_t *requests, const kv_env_t *env, uint32_t group_count)
{
	*requests = (kvx_requests_t){.env = env, .group_count = group_count};
	requests->buckets = kv_alloc(env, FIRST_BUCKETS * sizeof(kvx_request_t *));
	if (!requests->buckets) {
		return KVC_ERR_NOMEM;
	}
	requests->bucket_count = FIRST_BUCKETS;
	kv_random(env, &requests->seed, sizeof requests->seed);

	return KVC_OK;
}

static void free_tables(const kvx_requests_t *requests, kvx_request_t *request)
{
	for (uint32_t g = 0; g < requests->group_count; g++) {
		kv_free(requests->env, request->groups[g].entries);
		request->groups[g] = (kvx_request_group_t){0};
	}
}

static void free_request(const kvx_requests_t *requests, kvx_request_t *request)
{
	free_tables(requests, request);
	kv_free(requests->env, request->own.keys);
	kv_free(requests->env, request->own.tokens);
	kv_free(requests->env, request);
}

void kvx_request_release(const kvx_requests_t *requests, kvx_request_t *request)
{
	if (request->ended && !request->loads && !request->puts && !request->handover[0] && !request->handover[1]) {
		free_request(requests, request);
	}
}

void kvx_requests_fini(kvx_requests_t *requests)
{
	kvx_request_t *next;

	for (kvx_request_t *request = kvx_requests_next(requests, NULL); request; request = next) {
		next = kvx_requests_next(requests, request);
		free_request(requests, request);
	}
	if (requests->env) {
		kv_free(requests->env, requests->buckets);
	}
	*requests = (kvx_requests_t){0};
}

uint64_t kvx_requests_hash(const kvx_requests_t *requests, const char *id, uint32_t len)
{
	uint64_t hash = requests->seed ^ len * UINT64_C(0x9e3779b97f4a7c15);

	while (len) {
		const uint32_t piece = len < 8u ? len : 8u;
		uint64_t word = 0;

		memcpy(&word, id, piece);
		hash = (hash ^ word) * UINT64_C(0xff51afd7ed558ccd);
		hash ^= hash >> 32;
		id += piece;
		len -= piece;
	}
	hash *= UINT64_C(0xc4ceb9fe1a85ec53);

	return hash ^ hash >> 29;
}

static int has_id(const kvx_request_t *request, const char *id, uint32_t len)
{
	return request->id_len == len && memcmp(request->id, id, len) == 0;
}

kvx_request_t *kvx_requests_find(const kvx_requests_t *requests, const char *id, uint32_t len)
{
	kvx_request_t *request = requests->last;
	uint64_t hash;

	if (!id || len == 0 || len > KVX_MAX_ID) {
		return NULL;
	}
	if (request && has_id(request, id, len)) {
		return request;
	}

	hash = kvx_requests_hash(requests, id, len);
	request = requests->buckets[hash & (requests->bucket_count - 1u)];
	while (request && (request->hash != hash || !has_id(request, id, len))) {
		request = request->next;
	}
	if (request) {
		((kvx_requests_t *)(uintptr_t)requests)->last = request; /* it only saves a search */
	}

	return request;
}

kvx_request_t *kvx_requests_find_asked(const kvx_requests_t *requests, const kvx_ask_t *ask)
{
	return kvx_ask_is_sound(ask) ? kvx_requests_find(requests, ask->id, ask->id_len) : NULL;
}

/* Double the buckets. Without memory for them the chains grow longer. */
static void grow_table(kvx_requests_t *requests)
{
	const uint32_t count = requests->bucket_count * 2u;
	kvx_request_t **buckets = kv_alloc(requests->env, count * sizeof(kvx_request_t *));

	if (!buckets) {
		return;
	}
	for (uint32_t b = 0; b < requests->bucket_count; b++) {
		kvx_request_t *request = requests->buckets[b];

		while (request) {
			kvx_request_t *next = request->next;
			kvx_request_t **to = &buckets[request->hash & (count - 1u)];

			request->next = *to;
			*to = request;
			request = next;
		}
	}
	kv_free(requests->env, requests->buckets);
	requests->buckets = buckets;
	requests->bucket_count = count;
}

kvx_request_t *kvx_requests_find_or_add(kvx_requests_t *requests, const char *id, uint32_t len)
{
	const size_t size = sizeof(kvx_request_t) + requests->group_count * sizeof(kvx_request_group_t);
	kvx_request_t *request = kvx_requests_find(requests, id, len);
	kvx_request_t **bucket;

	if (request || !id || len == 0 || len > KVX_MAX_ID) {
		return request;
	}
	request = kv_alloc(requests->env, size + len);
	if (!request) {
		return NULL;
	}
	if (requests->count >= requests->bucket_count && requests->bucket_count < 1u << 24) {
		grow_table(requests);
	}

	request->id = (char *)request + size;
	memcpy(request->id, id, len);
	request->id_len = len;
	request->hash = kvx_requests_hash(requests, id, len);
	request->loads_end = &request->loads;
	request->puts_end = &request->puts;
	bucket = &requests->buckets[request->hash & (requests->bucket_count - 1u)];
	request->next = *bucket;
	*bucket = request;
	requests->count++;
	requests->last = request;

	return request;
}

void kvx_requests_remove(kvx_requests_t *requests, kvx_request_t *request)
{
	kvx_request_t **link = &requests->buckets[request->hash & (requests->bucket_count - 1u)];

	while (*link != request) {
		link = &(*link)->next;
	}
	*link = request->next;
	requests->count--;
	if (requests->last == request) {
		requests->last = NULL;
	}
	request->ended = 1;
	request->ended_ns = kv_now_ns(requests->env);
	free_tables(requests, request);
	kvx_request_release(requests, request);
}

kvc_status_t kvx_request_reserve(kvx_requests_t *requests, kvx_request_t *request, uint32_t index, uint32_t n)
{
	kvx_request_group_t *group = &request->groups[index];
	kvx_table_entry_t *entries;
	uint32_t cap;

	if (n <= group->cap) {
		return KVC_OK;
	}
	cap = group->cap ? group->cap : 16u;
	while (cap < n) {
		cap = cap < UINT32_MAX / 2u ? cap * 2u : n;
	}
	entries = kv_resize(requests->env, group->entries, group->cap * sizeof *entries, cap * sizeof *entries);
	if (!entries) {
		return KVC_ERR_NOMEM;
	}
	group->entries = entries;
	group->cap = cap;

	return KVC_OK;
}

kvx_request_t *kvx_requests_next(const kvx_requests_t *requests, const kvx_request_t *request)
{
	uint32_t b = request ? (uint32_t)(request->hash & (requests->bucket_count - 1u)) + 1u : 0;

	if (request && request->next) {
		return request->next;
	}
	while (b < requests->bucket_count && !requests->buckets[b]) {
		b++;
	}

	return b < requests->bucket_count ? requests->buckets[b] : NULL;
}
