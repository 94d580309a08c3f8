/* The core's LRU against published figures: the Mooncake conversation trace, one request after the other (12,031
 * requests of chat in blocks of 512 tokens). A request's resident prefix is leased, then every block of it is put; the
 * token hit ratio must be that of plain LRU.
 *
 * And admission (docs/decisions/101) against saving all, in the same run, on that trace, the synthetic one of the same
 * source, and documents in turn.
 *
 *     test_core_replay DIR        DIR has conversation_trace.jsonl and synthetic_trace.jsonl
 */
#include "universe.h"

#define TRACE_BLOCK 512u
#define MAX_REQUEST 512u

typedef struct trace_request {
	uint64_t tokens;
	uint32_t first, count;
} trace_request_t;

typedef struct trace {
	trace_request_t *requests;
	uint32_t request_count;
	uint64_t *ids;
	uint32_t id_count;
} trace_t;

static trace_t conversation_, synthetic_;

static void read_line(trace_t *trace, char *line)
{
	char *at = strstr(line, "\"input_length\":"), *ids = strstr(line, "\"hash_ids\":");
	trace_request_t request = {.first = trace->id_count};

	assert_true(at && ids);
	request.tokens = strtoull(at + strlen("\"input_length\":"), NULL, 10);
	ids = strchr(ids, '[') + 1;
	while (*ids != ']' && *ids != '\0') {
		trace->ids[trace->id_count++] = strtoull(ids, &ids, 10);
		request.count++;
		ids += strspn(ids, ", ");
	}
	trace->requests[trace->request_count++] = request;
}

static void trace_read(trace_t *trace, const char *dir, const char *name)
{
	static char line[1 << 20];
	char path[512];
	FILE *file;

	snprintf(path, sizeof path, "%s/%s_trace.jsonl", dir, name);
	file = fopen(path, "r");
	if (!file) {
		kv_test_skip("no request trace at %s", path);
	}
	trace->requests = calloc(20000, sizeof *trace->requests);
	trace->ids = calloc(1000000, sizeof *trace->ids);
	while (fgets(line, sizeof line, file)) {
		read_line(trace, line);
	}
	fclose(file);
}

static void trace_free(trace_t *trace)
{
	free(trace->requests);
	free(trace->ids);
}

static kv_key_t key_of(uint64_t id)
{
	kv_test_rng_t rng = {.state = id};
	uint64_t words[2] = {kv_test_rand(&rng), kv_test_rand(&rng)};
	kv_key_t key;

	memcpy(key.b, words, sizeof key.b);

	return key;
}

/* As an engine does it: lease what is stored, and save the rest. What is cut off is offered once more, as the connector
 * does. Tokens that were hit. */
static uint64_t replay_one(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const trace_t *trace,
			   const trace_request_t *request, uint32_t flags)
{
	static kv_key_t keys[MAX_REQUEST];
	kv_msg_acquire_reply_t reply = {0};
	uint32_t hit = 0, stored = 0;

	assert_true(request->count <= MAX_REQUEST);
	for (uint32_t i = 0; i < request->count; i++) {
		keys[i] = key_of(trace->ids[request->first + i]);
	}
	while (hit < request->count && u_mirror_tiers(u, 0, &keys[hit]) != 0) {
		hit++;
	}
	if (hit > 0) {
		assert_int_equal(u_acquire(u, m, space, keys, hit, 0, NULL, &reply), KV_OK);
		assert_int_equal(reply.n, hit);
	}
	if (flags == 0) {
		(void)u_put(u, m, space, keys, 0, request->count);
	} else {
		stored = hit < request->count ? hit + u_put_optional(u, m, space, keys, hit, request->count) : hit;
		if (stored > hit && stored < request->count) {
			(void)u_put_optional(u, m, space, keys, stored, request->count);
		}
	}
	if (reply.lease) {
		assert_int_equal(u_release(u, m, reply.lease), KV_OK);
	}
	if (hit == 0) {
		return 0;
	}

	return hit < request->count ? (uint64_t)hit * TRACE_BLOCK : request->tokens;
}

KV_TEST(p5_plain_lru_hits_what_the_reference_hits)
{
	static const struct {
		uint32_t blocks;
		double percent;
	} figures[] = {{1000, 4.54}, {5000, 11.40}, {10000, 21.57}, {30000, 33.22}, {50000, 36.15}};
	static universe_t u;

	for (size_t f = 0; f < KV_COUNT_OF(figures); f++) {
		uint64_t hits = 0, tokens = 0;
		kvd_space_info_t space;
		u_member_t *m;
		double percent;

		universe_init(&u, &(u_config_t){.cpu_slots = figures[f].blocks, .max_blocks = 65536, .seed = 5}, NULL);
		m = u_join(&u, 0, "replay", 2, 0);
		space = u_space(&u, 0, "trace");
		for (uint32_t r = 0; r < conversation_.request_count; r++) {
			hits += replay_one(&u, m, &space, &conversation_, &conversation_.requests[r], 0);
			tokens += conversation_.requests[r].tokens;
			u.notice_count = 0;
		}
		universe_check(&u);
		percent = 100.0 * (double)hits / (double)tokens;
		printf("# %u blocks: %.2f %% of the tokens hit, the reference %.2f %%\n", figures[f].blocks, percent,
		       figures[f].percent);
		assert_true(percent > figures[f].percent - 0.1 && percent < figures[f].percent + 0.1);
		universe_fini(&u);
	}
}

/* The blocks that will be used again, at the moment when there are most of them; and all blocks that there are. */
static uint32_t count_live(const trace_t *trace, uint32_t *p_blocks)
{
	uint32_t *first = calloc(1u << 20, sizeof *first), *last = calloc(1u << 20, sizeof *last);
	int64_t *change = calloc(trace->request_count + 1, sizeof *change), live = 0, most = 0;

	*p_blocks = 0;
	for (uint32_t r = 0; r < trace->request_count; r++) {
		for (uint32_t i = 0; i < trace->requests[r].count; i++) {
			const uint64_t id = trace->ids[trace->requests[r].first + i];

			assert_true(id < 1u << 20);
			*p_blocks += first[id] == 0;
			first[id] = first[id] ? first[id] : r + 1;
			last[id] = r + 1;
		}
	}
	for (uint32_t id = 0; id < 1u << 20; id++) {
		change[first[id] ? first[id] - 1 : 0] += last[id] > first[id];
		change[last[id] ? last[id] - 1 : 0] -= last[id] > first[id];
	}
	for (uint32_t r = 0; r < trace->request_count; r++) {
		live += change[r];
		most = live > most ? live : most;
	}
	free(first);
	free(last);
	free(change);

	return (uint32_t)most;
}

typedef struct outcome {
	double hits;           /* percent of the tokens */
	uint64_t saved, unhit; /* blocks; of them were evicted without a hit */
} outcome_t;

static outcome_t replay(const trace_t *trace, uint32_t blocks, int admission, uint32_t laps)
{
	static universe_t u;
	uint64_t hits = 0, tokens = 0;
	kvd_space_info_t space;
	outcome_t outcome;
	u_member_t *m;

	universe_init(&u, &(u_config_t){.cpu_slots = blocks, .max_blocks = 262144, .admission = admission, .seed = 5},
		      NULL);
	m = u_join(&u, 0, "replay", 2, 0);
	space = u_space(&u, 0, "trace");
	for (uint32_t r = 0; r < laps * trace->request_count; r++) {
		const trace_request_t *request = &trace->requests[r % trace->request_count];

		hits += replay_one(&u, m, &space, trace, request, KV_PUT_OPTIONAL);
		tokens += request->tokens;
		u.notice_count = 0;
	}
	universe_check(&u);
	outcome = (outcome_t){.hits = 100.0 * (double)hits / (double)tokens,
			      .saved = u.stored,
			      .unhit = kv_ns_metric_get(&u.metrics, 0, KV_NM_EVICTED_UNHIT)};
	universe_fini(&u);

	return outcome;
}

/* Both ways in one run. Hits stay within 1 %, whatever the pool. Returns the share of the saves without a hit that is
 * left. */
static double compare(const char *name, const trace_t *trace, uint32_t blocks, double part, uint32_t laps)
{
	const uint32_t pool = (uint32_t)(part * blocks);
	const outcome_t all = replay(trace, pool, 0, laps), some = replay(trace, pool, 1, laps);

	printf("# %s, pool of %u blocks, %.1f x %u: all saved: hits %.2f %%, %" PRIu64 " saves, %" PRIu64
	       " never hit; admission: hits %.2f %%, %" PRIu64 " saves, %" PRIu64 " never hit\n",
	       name, pool, part, blocks, all.hits, all.saved, all.unhit, some.hits, some.saved, some.unhit);
	assert_true(some.hits >= 0.99 * all.hits);
	assert_true(some.unhit <= all.unhit);

	return all.unhit ? (double)some.unhit / (double)all.unhit : 1;
}

KV_TEST(p5_saves_that_do_not_pay_are_not_made)
{
	static const double parts[] = {0.1, 0.3, 1.0};
	uint32_t blocks, live = count_live(&conversation_, &blocks);

	for (size_t i = 0; i < KV_COUNT_OF(parts); i++) {
		const double left = compare("conversation, blocks used again", &conversation_, live, parts[i], 1);

		assert_true(parts[i] > 0.5 || left < 0.2);
		(void)compare("conversation, all blocks", &conversation_, blocks, parts[i], 1);
	}
	live = count_live(&synthetic_, &blocks);
	for (size_t i = 0; i < KV_COUNT_OF(parts); i++) {
		const double left = compare("synthetic, blocks used again", &synthetic_, live, parts[i], 1);

		assert_true(parts[i] > 0.2 || left < 0.5);
		(void)compare("synthetic, all blocks", &synthetic_, blocks, parts[i], 1);
	}
}

/* Documents that are asked for in turn: LRU has evicted each just before it is asked for again. */
KV_TEST(p5_a_pool_of_a_part_of_a_cycle_keeps_that_part)
{
	static uint64_t ids[2000];
	static trace_request_t requests[100];
	const trace_t cycle = {.requests = requests, .request_count = 100, .ids = ids, .id_count = 2000};

	for (uint32_t i = 0; i < 2000; i++) {
		ids[i] = i + 1;
	}
	for (uint32_t r = 0; r < 100; r++) {
		requests[r] = (trace_request_t){.tokens = 20 * TRACE_BLOCK, .first = 20 * r, .count = 20};
	}
	assert_true(compare("100 documents in turn", &cycle, 2000, 0.1, 20) < 0.05);
	assert_true(compare("100 documents in turn", &cycle, 2000, 0.3, 20) < 0.05);
	assert_true(compare("100 documents in turn", &cycle, 2000, 1.0, 20) == 1);
}

int main(int argc, char **argv)
{
	int failed;

	trace_read(&conversation_, argc > 1 ? argv[1] : "traces", "conversation");
	trace_read(&synthetic_, argc > 1 ? argv[1] : "traces", "synthetic");
	failed = kv_test_run(NULL, NULL);
	trace_free(&conversation_);
	trace_free(&synthetic_);

	return failed;
}
