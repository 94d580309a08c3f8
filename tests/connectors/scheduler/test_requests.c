/* The table of requests against a model: an array searched from end to end. */
#include "kv_cmocka.h"
#include "kv_test.h"
#include "scheduler/base/requests.h"

#define NAMES 600u

typedef struct model {
	const kvx_request_t *request; /* NULL: not there */
	uint32_t entries;
} model_t;

static uint32_t name_of(uint32_t i, char out[KVX_MAX_ID])
{
	uint32_t len = (uint32_t)snprintf(out, KVX_MAX_ID, "req-%u", i);

	/* Some are long. */
	while (i % 7u == 0 && len < 40u + i % 200u) {
		out[len++] = (char)('a' + i % 26u);
	}

	return len;
}

/* 0: there was no memory, and what is there stays as it was. */
static int add(kvx_requests_t *requests, model_t *model, uint32_t i, uint32_t entries)
{
	char id[KVX_MAX_ID];
	const uint32_t len = name_of(i, id);
	kvx_request_t *request = kvx_requests_find_or_add(requests, id, len);

	if (!request) {
		assert_null(model->request);
		return 0;
	}
	if (model->request) {
		assert_ptr_equal(request, model->request);
	} else {
		assert_int_equal(request->groups[0].n + request->groups[1].n + request->computed, 0);
		assert_int_equal(request->own.n + (uint32_t)request->failed, 0);
		*model = (model_t){.request = request};
	}
	request->computed = i + 1u;
	if (kvx_request_reserve(requests, request, 1, entries) != KVC_OK) {
		return 0;
	}
	for (uint32_t p = 0; p < entries; p++) {
		request->groups[1].entries[p] = (kvx_table_entry_t){i, p};
	}
	request->groups[1].n = model->entries = entries;

	return 1;
}

static void check(kvx_requests_t *requests, const model_t *model, uint32_t i)
{
	char id[KVX_MAX_ID];
	const uint32_t len = name_of(i, id);
	const kvx_request_t *request = kvx_requests_find(requests, id, len);

	if (!model->request) {
		assert_null(request);
		return;
	}
	assert_ptr_equal(request, model->request);
	assert_int_equal(request->computed, i + 1u);
	assert_int_equal(request->groups[1].n, model->entries);
	for (uint32_t p = 0; p < model->entries; p++) {
		assert_int_equal(request->groups[1].entries[p].id, i);
		assert_int_equal(request->groups[1].entries[p].gen, p);
	}
}

/* Now and then an allocation fails: the answer says so, what is there stays right, nothing leaks. */
KV_TEST(p4_p5_the_table_knows_exactly_the_living)
{
	static model_t model[NAMES];
	kv_test_rng_t rng = {kv_test_seed()};
	uint32_t living = 0, refused = 0;
	kvx_requests_t requests;
	kv_test_env_t t;

	kv_test_env_init(&t);
	KV_TEST_EACH_FAILURE(&t, n)
	{
		if (kvx_requests_init(&requests, &t.env, 2) == KVC_OK) {
			kvx_requests_fini(&requests);
		}
		assert_int_equal(kv_test_env_live(&t), 0);
	}
	assert_int_equal(kvx_requests_init(&requests, &t.env, 2), KVC_OK);
	for (uint32_t n = 0; n < 200000; n++) {
		const uint32_t i = (uint32_t)kv_test_below(&rng, NAMES);
		const uint32_t what = (uint32_t)kv_test_below(&rng, 3);
		char id[KVX_MAX_ID];

		if (n % 4 == 0) {
			kv_test_fail_nth(&t, kv_test_below(&rng, 4)); /* 0: none */
		}
		if (what == 0) {
			const int was = model[i].request != NULL;

			refused += (uint32_t)!add(&requests, &model[i], i, (uint32_t)kv_test_below(&rng, 30));
			living += (uint32_t)((model[i].request != NULL) - was);
		} else if (what == 1 && model[i].request) {
			kvx_requests_remove(&requests, kvx_requests_find(&requests, id, name_of(i, id)));
			model[i] = (model_t){0};
			living--;
		} else {
			check(&requests, &model[i], i);
		}
		assert_int_equal(requests.count, living);
	}
	assert_in_range(refused, 100, 100000);
	kvx_requests_fini(&requests);
	assert_int_equal(kv_test_env_live(&t), 0);
}

KV_TEST(p10_ids_that_are_none_are_refused)
{
	char id[KVX_MAX_ID + 1u];
	kvx_requests_t requests;
	kv_test_env_t t;

	memset(id, 'x', sizeof id);
	kv_test_env_init(&t);
	assert_int_equal(kvx_requests_init(&requests, &t.env, 1), KVC_OK);
	assert_null(kvx_requests_find_or_add(&requests, id, 0));
	assert_null(kvx_requests_find_or_add(&requests, NULL, 5));
	assert_null(kvx_requests_find_or_add(&requests, id, KVX_MAX_ID + 1u));
	assert_non_null(kvx_requests_find_or_add(&requests, id, KVX_MAX_ID));
	kvx_requests_fini(&requests);
	assert_int_equal(kv_test_env_live(&t), 0);
}

/* Millions come and go: memory is that of the most that lived at one time. */
KV_TEST(p5_memory_does_not_grow_with_requests_gone)
{
	kvx_requests_t requests;
	kv_test_env_t t;
	int64_t after = 0;

	kv_test_env_init(&t);
	assert_int_equal(kvx_requests_init(&requests, &t.env, 2), KVC_OK);
	for (uint32_t n = 0; n < 300000; n++) {
		model_t none = {0};
		char id[KVX_MAX_ID];

		assert_true(add(&requests, &none, n, 8));
		kvx_requests_remove(&requests, kvx_requests_find(&requests, id, name_of(n, id)));
		if (n == 1000) {
			after = atomic_load(&t.live_bytes);
		}
	}
	assert_int_equal(atomic_load(&t.live_bytes), after);
	kvx_requests_fini(&requests);
	assert_int_equal(kv_test_env_live(&t), 0);
}

/* What the engine has ended is not found; its loads, puts and hand-overs find it until the last of them is gone. */
KV_TEST(p4_p7_a_record_stays_until_nothing_of_it_is_left)
{
	kvx_requests_t requests;
	kv_test_env_t t;

	for (uint32_t left = 0; left < 4; left++) {
		model_t model = {0};
		kvx_request_t *request, *next;
		int64_t table;

		kv_test_env_init(&t);
		assert_int_equal(kvx_requests_init(&requests, &t.env, 2), KVC_OK);
		table = kv_test_env_live(&t);
		assert_true(add(&requests, &model, 1, 8));
		request = kvx_requests_find(&requests, "req-1", 5);
		request->loads = left == 0 ? (void *)&t : NULL;
		request->puts = left == 1 ? (void *)&t : NULL;
		request->handover[0] = left == 2 ? (void *)&t : NULL;
		request->handover[1] = left == 3 ? (void *)&t : NULL;
		kvx_request_release(&requests, request);
		assert_ptr_equal(kvx_requests_find(&requests, "req-1", 5), request);

		kvx_requests_remove(&requests, request);
		assert_int_equal(requests.count, 0);
		assert_null(kvx_requests_find(&requests, "req-1", 5));
		assert_int_equal(kv_test_env_live(&t), table + 1); /* its tables are gone */
		assert_true(request->ended);
		next = kvx_requests_find_or_add(&requests, "req-1", 5);
		assert_ptr_not_equal(next, request);
		kvx_request_release(&requests, request);
		assert_int_equal(kv_test_env_live(&t), table + 2);

		request->loads = NULL;
		request->puts = NULL;
		request->handover[0] = request->handover[1] = NULL;
		kvx_request_release(&requests, request);
		assert_int_equal(kv_test_env_live(&t), table + 1);
		kvx_requests_fini(&requests);
		assert_int_equal(kv_test_env_live(&t), 0);
	}
}

KV_TEST_MAIN(NULL, NULL)
