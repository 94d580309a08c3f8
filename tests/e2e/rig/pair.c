#include "e2e/rig/pair.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define TAIL "a token"

static const uint32_t units_of_chunk[PAIR_CHUNKS] = {16, 32, PAIR_BLOCKS};

/* One side, in its process. */
typedef struct engine {
	const pair_t *pair;
	enum pair_side side;
	kv_test_rng_t rng;
	user_t user;
	kvc_key_t keys[PAIR_BLOCKS];
	uint64_t began_ms; /* the call that is under way */
	uint64_t until_ms; /* the consumer's deadline */
} engine_t;

pair_notes_t *pair_notes_new(void)
{
	pair_notes_t *notes = mmap(NULL, sizeof *notes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	assert_ptr_not_equal(notes, MAP_FAILED);

	return notes;
}

/* ---- both sides ------------------------------------------------------------------------------ */

/* What the producer computes: a function of the conversation, not of the keys, which differ between daemons. */
static void compute(uint64_t talk, uint32_t i, uint8_t *out)
{
	kv_test_rng_t rng = {.state = kv_test_seed() ^ ((talk * PAIR_BLOCKS + i) * UINT64_C(0x9e3779b97f4a7c15))};

	for (size_t at = 0; at < RIG_BLOCK_BYTES; at += sizeof(uint64_t)) {
		const uint64_t word = kv_test_rand(&rng);

		memcpy(out + at, &word, sizeof word);
	}
}

static void name_transfer(const pair_t *pair, char out[32])
{
	snprintf(out, 32, "talk-%" PRIu64, pair->talk);
}

/* The next step begins; a call was under way until now. */
static void step(engine_t *engine)
{
	pair_notes_t *notes = engine->pair->notes;
	const uint64_t ms = rig_now_ms() - engine->began_ms;

	if (ms > atomic_load(&notes->longest[engine->side])) {
		atomic_store(&notes->longest[engine->side], ms);
	}
	usleep((useconds_t)kv_test_below(&engine->rng, 1500));
	if (atomic_fetch_add(&notes->mark[engine->side], 1) + 1 == engine->pair->hold[engine->side]) {
		while (!atomic_load(&notes->go)) {
			usleep(200);
		}
	}
	engine->began_ms = rig_now_ms();
}

static kvc_status_t attach(engine_t *engine)
{
	const rig_t *rig = engine->side == PAIR_PRODUCER ? engine->pair->owner : engine->pair->asker;
	const kvc_identity_t identity = user_identity("model");
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = rig->sock,
				     .program = engine->side == PAIR_PRODUCER ? "producer" : "consumer",
				     .staging_blocks = RIG_BLOCKS,
				     .timeout_ms = engine->pair->call_ms};
	kvc_status_t status = kvc_attach(&config, &engine->user.kvc);

	if (status == KVC_OK) {
		status = kvc_space_open(engine->user.kvc, &identity, &engine->user.space);
	}
	if (status == KVC_OK) {
		user_keys(&engine->user, engine->pair->talk, PAIR_BLOCKS, engine->keys);
	}

	return status;
}

/* ---- the producer ---------------------------------------------------------------------------- */

static kvc_status_t write_blocks(engine_t *engine, kvc_put_t *put, uint32_t from, uint32_t n)
{
	static uint8_t block[RIG_BLOCK_BYTES];
	kvc_status_t status = kvc_put_ready(put, engine->pair->call_ms);

	for (uint32_t i = from; i < n && status == KVC_OK; i++) {
		if (i == (from + n) / 2) {
			step(engine);
		}
		compute(engine->pair->talk, i, block);
		status = i - from < kvc_put_n(put) ? kvc_put_write(put, i - from, block) : KVC_ERR_BUSY;
	}

	return status == KVC_OK ? kvc_put_end(put, 0, n - from) : status;
}

static kvc_status_t put_chunk(engine_t *engine, uint32_t from, uint32_t n)
{
	const kvc_put_options_t options = {.struct_size = sizeof options};
	kvc_put_t *put = NULL;
	kvc_status_t status;

	step(engine);
	status = kvc_put_start(engine->user.space, engine->keys, from, n, &options, &put);
	if (status == KVC_OK || status == KVC_PENDING) {
		status = write_blocks(engine, put, from, n);
	}
	if (status == KVC_OK) {
		step(engine);
		status = kvc_put_wait(put, 0, engine->pair->call_ms);
	}
	kvc_put_free(put);

	return status;
}

static kvc_status_t hand_over(engine_t *engine, uint32_t n, int last, kvc_handover_t **p_handover)
{
	const kvc_key_source_t source = {.key = user_key_at, .ctx = engine->keys};
	pair_notes_t *notes = engine->pair->notes;
	char transfer[32];
	const kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk,
					    .transfer = transfer,
					    .n = n,
					    .source = &source,
					    .last = last,
					    .tail = TAIL,
					    .tail_len = last ? sizeof TAIL : 0};
	kvc_status_t status;

	name_transfer(engine->pair, transfer);
	step(engine);
	atomic_store(&notes->sending, n);
	status = kvc_handover_send(engine->user.space, &chunk, p_handover);
	if (status == KVC_OK) {
		step(engine);
		status = kvc_handover_wait(*p_handover, 0, engine->pair->call_ms);
	}
	if (status == KVC_OK) {
		atomic_store(&notes->sent, n);
		atomic_store(&notes->sent_ms, last ? rig_now_ms() : 0);
	}

	return status;
}

static kvc_status_t run_producer(engine_t *engine)
{
	kvc_handover_t *handover = NULL;
	kvc_status_t status = attach(engine);

	for (uint32_t c = 0, from = 0; c < PAIR_CHUNKS && status == KVC_OK; from = units_of_chunk[c++]) {
		status = put_chunk(engine, from, units_of_chunk[c]);
		if (status == KVC_OK) {
			status = hand_over(engine, units_of_chunk[c], c + 1 == PAIR_CHUNKS, &handover);
		}
	}
	kvc_handover_done(handover, status != KVC_OK);
	step(engine);

	return status;
}

/* ---- the consumer ---------------------------------------------------------------------------- */

static kvc_status_t ask_for_handover(engine_t *engine, kvc_handover_t **p_handover)
{
	const pair_t *pair = engine->pair;
	static uint32_t tokens[PAIR_BLOCKS * RIG_TOKENS];
	const kvc_prompt_t prompt = {
		.struct_size = sizeof prompt, .tokens = tokens, .n_tokens = PAIR_BLOCKS * RIG_TOKENS};
	char transfer[32];
	const kvc_fetch_t fetch = {.struct_size = sizeof fetch,
				   .peer = pair->peer,
				   .transfer = transfer,
				   .prompt = &prompt,
				   .timeout_ms = pair->deadline_ms};

	name_transfer(pair, transfer);
	user_tokens(pair->talk, PAIR_BLOCKS, tokens);
	engine->until_ms = rig_now_ms() + pair->deadline_ms;

	return pair->peer ? kvc_handover_fetch(engine->user.space, &fetch, p_handover)
			  : kvc_handover_recv(engine->user.space, transfer, pair->deadline_ms, p_handover);
}

/* Blocks [from, n) are there: read them, and note the bytes. */
static kvc_status_t read_blocks(engine_t *engine, uint32_t from, uint32_t n)
{
	static uint8_t bytes[PAIR_BLOCKS][RIG_BLOCK_BYTES];
	pair_notes_t *notes = engine->pair->notes;
	kvc_lease_t *lease = NULL;
	void *dst[PAIR_BLOCKS];
	kvc_status_t status;

	for (uint32_t i = from; i < n; i++) {
		dst[i - from] = bytes[i - from];
	}
	step(engine);
	status = kvc_acquire(engine->user.space, engine->keys, n, from, 0, &lease);
	if (status == KVC_OK && kvc_lease_n(lease) < n) {
		status = KVC_MISS;
	}
	if (status == KVC_OK) {
		status = kvc_lease_wait(lease, n, engine->pair->call_ms);
	}
	step(engine);
	if (status == KVC_OK) {
		status = kvc_lease_read(lease, from, n - from, dst, NULL);
	}
	if (status == KVC_OK) {
		memcpy(notes->bytes[from], bytes, (size_t)(n - from) * RIG_BLOCK_BYTES);
		atomic_store(&notes->read, n);
	}
	kvc_release(&lease, 1);

	return status;
}

static kvc_status_t await_units(engine_t *engine, kvc_handover_t *handover, uint32_t n)
{
	const uint64_t now = rig_now_ms();

	return kvc_handover_wait(handover, n, engine->until_ms > now ? (uint32_t)(engine->until_ms - now) : 0);
}

/* KVC_OK: all of it was read, tail included. After a failure what had come is read. */
static kvc_status_t take_handover(engine_t *engine, kvc_handover_t *handover)
{
	kvc_handover_info_t info = {.struct_size = sizeof info};
	pair_notes_t *notes = engine->pair->notes;
	kvc_status_t status = KVC_OK;
	uint32_t have = 0;

	for (uint32_t c = 0; c < PAIR_CHUNKS && status == KVC_OK; c++) {
		step(engine);
		status = await_units(engine, handover, units_of_chunk[c]);
		if (status == KVC_OK) {
			status = read_blocks(engine, have, units_of_chunk[c]);
			have = units_of_chunk[c];
		}
	}
	if (status == KVC_OK) {
		status = await_units(engine, handover, 0);
	}
	atomic_store(&notes->answered_ms, rig_now_ms() + engine->pair->deadline_ms - engine->until_ms);
	kvc_handover_get_info(handover, &info);
	if (status != KVC_OK) {
		have = atomic_load(&notes->read);
		(void)(info.n > have && info.n <= PAIR_BLOCKS ? read_blocks(engine, have, info.n) : KVC_OK);
	} else if (info.tail_len != sizeof TAIL || memcmp(info.tail, TAIL, sizeof TAIL) != 0) {
		status = KVC_ERR_CORRUPT;
	}

	return status;
}

static kvc_status_t run_consumer(engine_t *engine)
{
	kvc_handover_t *handover = NULL;
	kvc_status_t status = attach(engine);

	step(engine);
	if (status == KVC_OK) {
		status = ask_for_handover(engine, &handover);
	}
	if (status == KVC_OK) {
		status = take_handover(engine, handover);
	}
	step(engine);
	atomic_store(&engine->pair->notes->whole, status == KVC_OK);
	kvc_handover_done(handover, status != KVC_OK);
	step(engine);

	return status;
}

/* ---- processes ------------------------------------------------------------------------------- */

static void live(const pair_t *pair, enum pair_side side, int ready)
{
	engine_t engine = {.pair = pair,
			   .side = side,
			   .rng = {.state = kv_test_seed() ^ (2 * pair->talk + (uint64_t)side)},
			   .began_ms = rig_now_ms()};
	pair_notes_t *notes = pair->notes;
	kvc_status_t status;

	child_say(ready);
	status = side == PAIR_PRODUCER ? run_producer(&engine) : run_consumer(&engine);
	atomic_store(&notes->status[side], status);
	atomic_store(&notes->ended[side], 1);
	while (!atomic_load(&notes->over)) {
		(void)kvc_poll(engine.user.kvc, 5);
		usleep(1000);
	}
	kvc_detach(engine.user.kvc);
}

static void live_as_producer(void *arg, int ready)
{
	live(arg, PAIR_PRODUCER, ready);
}

static void live_as_consumer(void *arg, int ready)
{
	live(arg, PAIR_CONSUMER, ready);
}

void pair_next(pair_t *pair)
{
	(void)kv_test_seed(); /* printed here, not there */
	memset(pair->notes, 0, sizeof *pair->notes);
	pair->talk++;
}

void pair_start(pair_t *pair, enum pair_side side)
{
	pair->pid[side] = child_start(side == PAIR_PRODUCER ? live_as_producer : live_as_consumer, pair);
}

void pair_await_mark(const pair_t *pair, enum pair_side side, uint32_t mark)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	const pair_notes_t *notes = pair->notes;

	while (atomic_load(&notes->mark[side]) < mark) {
		if (rig_now_ms() > deadline ||
		    (atomic_load(&notes->ended[side]) && atomic_load(&notes->status[side]))) {
			fail_msg("talk %" PRIu64 ": side %u has come to step %u of %u: %s", pair->talk, side,
				 atomic_load(&notes->mark[side]), mark,
				 kvc_status_name(atomic_load(&notes->status[side])));
		}
		usleep(50);
	}
}

void pair_await_end(const pair_t *pair, enum pair_side side)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;

	while (pair->pid[side] != 0 && !atomic_load(&pair->notes->ended[side])) {
		if (rig_now_ms() > deadline) {
			fail_msg("talk %" PRIu64 ": side %u has no answer, at step %u", pair->talk, side,
				 atomic_load(&pair->notes->mark[side]));
		}
		usleep(500);
	}
}

void pair_kill(pair_t *pair, enum pair_side side)
{
	child_kill(pair->pid[side]);
	pair->pid[side] = 0;
}

void pair_finish(pair_t *pair)
{
	atomic_store(&pair->notes->over, 1);
	for (uint32_t side = 0; side < 2; side++) {
		int wstatus = 0;

		if (pair->pid[side] != 0) {
			assert_int_equal(waitpid(pair->pid[side], &wstatus, 0), pair->pid[side]);
			assert_int_equal(wstatus, 0);
			pair->pid[side] = 0;
		}
	}
}

void pair_check_bytes(const pair_t *pair)
{
	static uint8_t want[RIG_BLOCK_BYTES];
	const uint32_t n = atomic_load(&pair->notes->read);

	assert_in_range(n, 0, PAIR_BLOCKS);
	assert_true(n <= atomic_load(&pair->notes->sending)); /* nothing that was not handed over */
	for (uint32_t i = 0; i < n; i++) {
		compute(pair->talk, i, want);
		assert_memory_equal(pair->notes->bytes[i], want, sizeof want);
	}
}

kvc_status_t pair_consume_again(const pair_t *pair, uint32_t deadline_ms, int *p_whole)
{
	pair_t again = *pair;
	engine_t engine = {.pair = &again, .side = PAIR_CONSUMER, .began_ms = rig_now_ms()};
	kvc_status_t status;

	again.deadline_ms = deadline_ms;
	atomic_store(&pair->notes->read, 0);
	status = run_consumer(&engine);
	kvc_detach(engine.user.kvc);
	*p_whole = status == KVC_OK;
	pair_check_bytes(pair);

	return status;
}

int pair_is_kept(const pair_t *pair, const rig_t *rig)
{
	pair_t kept = *pair;
	engine_t engine = {.pair = &kept, .side = PAIR_CONSUMER, .began_ms = rig_now_ms()};
	int whole;

	kept.asker = rig;
	atomic_store(&pair->notes->read, 0);
	whole = attach(&engine) == KVC_OK && read_blocks(&engine, 0, PAIR_BLOCKS) == KVC_OK;
	kvc_detach(engine.user.kvc);
	pair_check_bytes(pair);

	return whole;
}
