/* Two models of other block sizes on one daemon: slabs change hands, whatever their members are doing. */
#include "e2e/rig/rig.h"

#include <signal.h>
#include <sys/wait.h>

#define LARGE_BYTES  32768u
#define LARGE_LAYOUT "kvk1 heads=2 layers=4 tokens=16 k=64 v=64 dtype=bf16 inner=split page=0"
#define TALKS        16u
#define DEPTH        32u

typedef struct model {
	kvc_t *kvc;
	kvc_space_t *space;
	uint32_t bytes;
	uint32_t mapped, unmapped; /* as on_memory has said */
	uint64_t mapped_bytes;
	kvc_key_t keys[TALKS][DEPTH];
} model_t;

static uint8_t blocks_[DEPTH][LARGE_BYTES], have_[LARGE_BYTES];

static void fill(const kvc_key_t *key, uint8_t *out, uint32_t bytes)
{
	kv_test_rng_t rng;

	memcpy(&rng.state, key->b + 8, sizeof rng.state);
	kv_test_fill(&rng, out, bytes);
}

static void told(void *ctx, const kvc_memory_t *memory, int mapped)
{
	model_t *model = ctx;

	model->mapped += mapped ? 1u : 0u;
	model->unmapped += mapped ? 0u : 1u;
	model->mapped_bytes += mapped ? memory->bytes : 0u - (uint64_t)memory->bytes;
}

static void attach(model_t *model, const rig_t *rig, const char *name, uint32_t bytes)
{
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = rig->sock,
				     .program = name,
				     .staging_blocks = 256,
				     .timeout_ms = RIG_WAIT_MS, /* a busy machine */
				     .on_memory = told,
				     .memory_ctx = model};
	kvc_identity_t identity = user_identity(name);

	*model = (model_t){.bytes = bytes};
	identity.layout = bytes == LARGE_BYTES ? LARGE_LAYOUT : RIG_LAYOUT;
	if (kvc_attach(&config, &model->kvc) != KVC_OK ||
	    kvc_space_open(model->kvc, &identity, &model->space) != KVC_OK) {
		fail_msg("%s", kvc_last_error());
	}
	for (uint32_t t = 0; t < TALKS; t++) {
		const user_t as_user = {.kvc = model->kvc, .space = model->space};

		user_keys(&as_user, 100 * bytes + t, DEPTH, model->keys[t]);
	}
}

static kvc_status_t put(model_t *model, uint32_t talk)
{
	const void *src[DEPTH];
	const kvc_put_options_t options = {.struct_size = sizeof options, .blocks = src};

	for (uint32_t i = 0; i < DEPTH; i++) {
		fill(&model->keys[talk][i], blocks_[i], model->bytes);
		src[i] = blocks_[i];
	}

	return kvc_put(model->space, model->keys[talk], 0, DEPTH, &options, NULL);
}

/* What the mirror has of a talk. A daemon that gets no processor for a while is silent: then it is asked again. */
static uint32_t match(model_t *model, uint32_t talk)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	kvc_match_t match = {.struct_size = sizeof match};

	do {
		(void)kvc_poll(model->kvc, match.why == KV_WHY_DAEMON_STALE ? 1 : 0);
		kvc_match(model->space, model->keys[talk], DEPTH, &match);
	} while (match.why == KV_WHY_DAEMON_STALE && rig_now_ms() < deadline);

	return match.n;
}

/* How much of a talk there is; all of it is read and compared. */
static uint32_t get(model_t *model, uint32_t talk)
{
	static uint8_t want[LARGE_BYTES];
	void *const dst[1] = {have_};
	kvc_lease_t *lease = NULL;
	const uint32_t found = match(model, talk);
	uint32_t n = 0;
	kvc_status_t status;

	if (found == 0) {
		return 0;
	}
	status = kvc_acquire(model->space, model->keys[talk], found, 0, 0, &lease);
	if (status != KVC_OK) {
		printf("# talk %u: %u blocks are there, and their lease: %s\n", talk, found, kvc_status_text(status));
		return 0;
	}
	for (; n < kvc_lease_n(lease) && kvc_lease_wait(lease, n + 1, 0) == KVC_OK &&
	       kvc_lease_read(lease, n, 1, dst, NULL) == KVC_OK;
	     n++) {
		fill(&model->keys[talk][n], want, model->bytes);
		assert_memory_equal(have_, want, model->bytes);
	}
	kvc_release(&lease, 1);

	return n;
}

static uint32_t get_all(model_t *model)
{
	uint32_t n = 0;

	for (uint32_t t = 0; t < TALKS; t++) {
		n += get(model, t);
	}

	return n;
}

/* Work until the model has this number of blocks at a time, or for 20 s. */
static void grow_to(model_t *model, uint32_t blocks, model_t *beside)
{
	const uint64_t deadline = rig_now_ms() + 60000;
	uint32_t n = 0;

	while (n < blocks) {
		for (uint32_t t = 0; t < TALKS; t++) {
			(void)put(model, t);
			(void)kvc_poll(model->kvc, 2);
			if (beside) {
				(void)kvc_poll(beside->kvc, 0);
			}
		}
		n = get_all(model);
		if (rig_now_ms() > deadline) {
			fail_msg("%u blocks, not %u", n, blocks);
		}
	}
}

/* The models look at their sockets until nothing that was retired is mapped. */
static void all_unmapped(const rig_t *rig, model_t *one, model_t *other)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;

	do {
		(void)kvc_poll(one->kvc, 5);
		(void)kvc_poll(other->kvc, 5);
	} while (rig_metric(rig, "kvd_slabs_still_mapped") != 0 && rig_now_ms() < deadline);
	assert_int_equal(rig_metric(rig, "kvd_slabs_still_mapped"), 0);
}

/* 8 MiB of pool: some 480 small blocks or 240 large ones. */
RIG_TEST(p5_each_of_two_models_gets_the_pool_when_the_other_is_cold, rig_begin(&rig_, 0))
{
	model_t small, large;
	uint32_t left;

	attach(&small, &rig_, "small", RIG_BLOCK_BYTES);
	grow_to(&small, 440, NULL);
	attach(&large, &rig_, "large", LARGE_BYTES);
	grow_to(&large, 150, &small);
	left = get_all(&small);
	printf("# %u small blocks are left, %llu slabs have changed\n", left,
	       (unsigned long long)rig_metric(&rig_, "kvd_slabs_retired_total"));
	assert_true(left < 440 && small.unmapped > 0 && small.unmapped < small.mapped);
	assert_true(rig_metric(&rig_, "kvd_slabs_retired_total") >= 4);
	grow_to(&small, 300, &large);
	assert_true(get_all(&large) < 150);
	all_unmapped(&rig_, &small, &large);
	kvc_detach(small.kvc);
	kvc_detach(large.kvc);
	assert_int_equal(small.mapped, small.unmapped);
}

/* The same beside a disk tier that has the slabs' pages registered: what is evicted comes back from there, in slots of
 * other slabs. */
RIG_TEST(p1_what_changing_slabs_evicted_comes_back_from_disk, rig_init(&rig_, 1))
{
	model_t small, large;

	rig_option(&rig_, "--cpu.prefault=on");
	rig_start(&rig_);
	attach(&small, &rig_, "small", RIG_BLOCK_BYTES);
	grow_to(&small, 400, NULL);
	rig_written(&rig_);
	attach(&large, &rig_, "large", LARGE_BYTES);
	grow_to(&large, 150, &small);
	assert_true(rig_metric(&rig_, "kvd_slabs_retired_total") >= 3);
	for (uint32_t round = 0; round < 3; round++) {
		(void)get_all(&large);
		(void)kvc_poll(small.kvc, 1);
		assert_true(get_all(&small) >= 400);
	}
	kvc_detach(small.kvc);
	kvc_detach(large.kvc);
}

/* An engine that is idle does not look at its socket: its slabs' pages are taken away after a moment. When it wakes up
 * it goes on. */
RIG_TEST(p5_an_idle_engine_holds_nothing_up, rig_begin(&rig_, 0))
{
	model_t small, large;

	attach(&small, &rig_, "small", RIG_BLOCK_BYTES);
	grow_to(&small, 440, NULL);
	attach(&large, &rig_, "large", LARGE_BYTES);
	grow_to(&large, 150, NULL);
	assert_true(rig_metric(&rig_, "kvd_slabs_still_mapped") >= 3);
	assert_int_equal(small.unmapped, 0);
	(void)get_all(&small);
	all_unmapped(&rig_, &small, &large);
	assert_true(small.unmapped >= 3);
	grow_to(&small, 200, &large);
	kvc_detach(small.kvc);
	kvc_detach(large.kvc);
}

typedef struct stopped {
	const rig_t *rig;
} stopped_t;

static void live_and_stop(void *arg, int ready)
{
	const stopped_t *s = arg;
	model_t small;

	attach(&small, s->rig, "small", RIG_BLOCK_BYTES);
	grow_to(&small, 440, NULL);
	child_say(ready);
	for (;;) { /* in the middle of whatever comes */
		(void)put(&small, (uint32_t)rig_now_ms() % TALKS);
		(void)get(&small, (uint32_t)rig_now_ms() % TALKS);
	}
}

/* One that is stopped in the middle of its work, and then killed. */
RIG_TEST(p6_a_stopped_engine_and_a_killed_one_hold_nothing_up, rig_init(&rig_, 0))
{
	stopped_t s;
	model_t large;
	pid_t pid;

	rig_option(&rig_, "--lease.ttl=300ms");
	rig_start(&rig_);
	s.rig = &rig_;
	pid = child_start(live_and_stop, &s);
	kill(pid, SIGSTOP);
	attach(&large, &rig_, "large", LARGE_BYTES);
	grow_to(&large, 120, NULL);
	assert_true(rig_metric(&rig_, "kvd_slabs_still_mapped") >= 1);
	kill(pid, SIGKILL);
	kill(pid, SIGCONT);
	assert_int_equal(waitpid(pid, NULL, 0), pid);
	assert_true(rig_metric_is(&rig_, "kvd_slabs_still_mapped", 0));
	grow_to(&large, 150, NULL);
	kvc_detach(large.kvc);
}

/* Poll until the daemon has announced this number of bytes; nothing has been put. */
static void announced(model_t *model, uint64_t bytes)
{
	const uint64_t deadline =
		rig_now_ms() + 4u * RIG_WAIT_MS; /* touched by a thread that runs when nobody else does */

	while (model->mapped_bytes < bytes && rig_now_ms() < deadline) {
		(void)kvc_poll(model->kvc, 5);
	}
	assert_true(model->mapped_bytes >= bytes);
}

/* Registration of a space is enough: memory is carved, touched and announced before the first put. */
KV_TEST(p5_memory_is_announced_before_the_first_put)
{
	static const struct {
		const char *option;
		uint64_t least, most;
	} cases[] = {
		{"--cpu.ahead=auto", 3u << 20, 4u << 20}, /* the slab in use, and a quarter of 8 MiB */
		{"--cpu.ahead=4MiB", 5u << 20, 6u << 20},
		{"--cpu.ahead=all", 7u << 20, 8u << 20},
		{"--cpu.ahead=0", 1u << 20, 1u << 20},
	};

	for (size_t i = 0; i < KV_COUNT_OF(cases); i++) {
		model_t model;
		rig_t rig;

		rig_init(&rig, 0);
		rig_option(&rig, "--cpu.prefault=on");
		rig_option(&rig, "%s", cases[i].option);
		rig_start(&rig);
		attach(&model, &rig, "small", RIG_BLOCK_BYTES);
		announced(&model, cases[i].least - (1u << 16));
		for (uint32_t p = 0; p < 10; p++) {
			(void)kvc_poll(model.kvc, 20);
		}
		assert_true(model.mapped_bytes <= cases[i].most);
		assert_int_equal(put(&model, 0), KVC_OK);
		assert_int_equal(get(&model, 0), DEPTH);
		kvc_detach(model.kvc);
		rig_end(&rig);
	}
}

/* All of it taken by the first model: the second one gets what is not used. */
RIG_TEST(p5_a_pool_taken_ahead_is_there_for_the_next_model, rig_init(&rig_, 0))
{
	model_t small, large;
	char text[8192];

	rig_option(&rig_, "--cpu.prefault=on");
	rig_option(&rig_, "--cpu.ahead=all");
	rig_start(&rig_);
	attach(&small, &rig_, "small", RIG_BLOCK_BYTES);
	announced(&small, (7u << 20) - (1u << 16));
	assert_int_equal(put(&small, 0), KVC_OK);
	attach(&large, &rig_, "large", LARGE_BYTES);
	grow_to(&large, 100, &small);
	assert_int_equal(get(&small, 0), DEPTH);
	assert_int_equal(rig_kvctl(&rig_, "status", text, sizeof text), 0);
	assert_non_null(strstr(text, "slabs\n  block_bytes 16KiB"));
	assert_non_null(strstr(text, "block_bytes 32KiB"));
	kvc_detach(small.kvc);
	kvc_detach(large.kvc);
}

#define SIZES 320u /* there are numbers for 256 at a time */

typedef struct size {
	uint32_t i;
	char layout[96];
	kvc_identity_t identity;
	kvc_key_t key;
	user_t user;
} shape_t;

/* Space number i, whose blocks no other one can have. The tiers may need a while to take a number back. */
static void open_size(shape_t *size, kvc_t *kvc, uint32_t i)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	kvc_status_t status;

	*size = (shape_t){.i = i, .identity = user_identity("sizes"), .user = {.kvc = kvc}};
	snprintf(size->layout, sizeof size->layout,
		 "kvk1 heads=2 layers=4 tokens=16 k=%u v=32 dtype=bf16 inner=split page=0", i + 1);
	size->identity.layout = size->layout;
	while ((status = kvc_space_open(kvc, &size->identity, &size->user.space)) == KVC_ERR_BUSY &&
	       rig_now_ms() < deadline) {
		usleep(1000);
	}
	if (status != KVC_OK) {
		fail_msg("size %u: %s", i, kvc_last_error());
	}
	user_keys(&size->user, i, 1, &size->key);
}

static uint32_t bytes_of(const shape_t *size)
{
	return 2u * 4u * 16u * (size->i + 1u + 32u) * 2u;
}

static void put_size(shape_t *size)
{
	static uint8_t block[256u * (SIZES + 33u)];
	const void *src[1] = {block};
	const kvc_put_options_t options = {.struct_size = sizeof options, .durable = 1, .blocks = src};

	fill(&size->key, block, bytes_of(size));
	if (kvc_put(size->user.space, &size->key, 0, 1, &options, NULL) != KVC_OK) {
		fail_msg("size %u: %s", size->i, kvc_last_error());
	}
}

static void expect_size(shape_t *size)
{
	static uint8_t want[256u * (SIZES + 33u)], got[256u * (SIZES + 33u)];
	void *const dst[1] = {got};
	kvc_lease_t *lease = NULL;

	fill(&size->key, want, bytes_of(size));
	assert_true(user_match_is(&size->user, &size->key, 1, 1));
	assert_int_equal(kvc_acquire(size->user.space, &size->key, 1, 0, 0, &lease), KVC_OK);
	assert_int_equal(kvc_lease_wait(lease, 1, RIG_WAIT_MS), KVC_OK);
	assert_int_equal(kvc_lease_read(lease, 0, 1, dst, NULL), KVC_OK);
	assert_memory_equal(got, want, bytes_of(size));
	kvc_release(&lease, 1);
}

/* A block size that nobody has open gives its number back, and its memory and files, in both tiers; after a crash those
 * that were used last are there. */
RIG_TEST(p5_more_block_sizes_come_and_go_than_there_are_numbers, rig_init(&rig_, 1))
{
	shape_t size;
	user_t user;

	rig_option(&rig_, "--cpu.size=1GiB");
	rig_option(&rig_, "--nvme.size=1GiB");
	rig_option(&rig_, "--nvme.file_size=1MiB");
	for (uint32_t life = 0, next = 0; life < 2; life++) {
		rig_start(&rig_);
		user_attach(&user, &rig_, "first");
		if (life > 0) {
			open_size(&size, user.kvc, next - 1);
			expect_size(&size);
			kvc_space_close(size.user.space);
		}
		for (const uint32_t end = life > 0 ? SIZES : SIZES - 20u; next < end; next++) {
			open_size(&size, user.kvc, next);
			put_size(&size);
			expect_size(&size);
			kvc_space_close(size.user.space);
		}
		user_leave(&user);
		rig_check_quiet(&rig_);
		if (life == 0) {
			rig_crash(&rig_);
		}
	}
}
