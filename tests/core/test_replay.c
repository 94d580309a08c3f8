/* The core's LRU against published figures: the Mooncake conversation trace, one request after the other (12,031
 * requests of chat in blocks of 512 tokens). A request's resident prefix is leased, then every block of it is put; the
 * token hit ratio must be that of plain LRU.
 *
 *     test_core_replay DIR        DIR has conversation_trace.jsonl
 */
#include "universe.h"

#define TRACE_BLOCK 512u
#define MAX_REQUEST 512u

typedef struct trace_request {
	uint64_t tokens;
	uint32_t first, count;
} trace_request_t;

static trace_request_t *requests_;
static uint32_t request_count_;
static uint64_t *ids_;
static uint32_t id_count_;

static void read_line(char *line)
{
	char *at = strstr(line, "\"input_length\":"), *ids = strstr(line, "\"hash_ids\":");
	trace_request_t request = {.first = id_count_};

	assert_true(at && ids);
	request.tokens = strtoull(at + strlen("\"input_length\":"), NULL, 10);
	ids = strchr(ids, '[') + 1;
	while (*ids != ']' && *ids != '\0') {
		ids_[id_count_++] = strtoull(ids, &ids, 10);
		request.count++;
		ids += strspn(ids, ", ");
	}
	requests_[request_count_++] = request;
}

static void trace_read(const char *dir)
{
	static char line[1 << 20];
	char path[512];
	FILE *file;

	snprintf(path, sizeof path, "%s/conversation_trace.jsonl", dir);
	file = fopen(path, "r");
	if (!file) {
		kv_test_skip("no request trace at %s", path);
	}
	requests_ = calloc(20000, sizeof *requests_);
	ids_ = calloc(1000000, sizeof *ids_);
	while (fgets(line, sizeof line, file)) {
		read_line(line);
	}
	fclose(file);
}

static kv_key_t key_of(uint64_t id)
{
	kv_test_rng_t rng = {.state = id};
	uint64_t words[2] = {kv_test_rand(&rng), kv_test_rand(&rng)};
	kv_key_t key;

	memcpy(key.b, words, sizeof key.b);

	return key;
}

static uint64_t replay_one(universe_t *u, u_member_t *m, const kvd_space_info_t *space, const trace_request_t *request)
{
	static kv_key_t keys[MAX_REQUEST];
	kv_msg_acquire_reply_t reply = {0};
	uint32_t hit = 0;

	assert_true(request->count <= MAX_REQUEST);
	for (uint32_t i = 0; i < request->count; i++) {
		keys[i] = key_of(ids_[request->first + i]);
	}
	while (hit < request->count && u_mirror_tiers(u, 0, &keys[hit]) != 0) {
		hit++;
	}
	if (hit > 0) {
		assert_int_equal(u_acquire(u, m, space, keys, hit, 0, NULL, &reply), KV_OK);
		assert_int_equal(reply.n, hit);
	}
	(void)u_put(u, m, space, keys, 0, request->count);
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
		for (uint32_t r = 0; r < request_count_; r++) {
			hits += replay_one(&u, m, &space, &requests_[r]);
			tokens += requests_[r].tokens;
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

int main(int argc, char **argv)
{
	int failed;

	trace_read(argc > 1 ? argv[1] : "traces");
	failed = kv_test_run(NULL, NULL);
	free(requests_);
	free(ids_);

	return failed;
}
