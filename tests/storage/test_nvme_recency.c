/* The order of use of the disk tier's blocks after a close, a kill and damage (decision 069). */
#include "nvme_test.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define CHAINS 40u
#define DEPTH  5u
#define LATER  UINT64_C(31000000000) /* the pause between two writes of a file, and more */

/* The clock of a tier, which tests move. */
static _Atomic uint64_t ahead_ns;

static uint64_t moved_now(void *ctx)
{
	return real_now(ctx) + atomic_load(&ahead_ns);
}

typedef struct model {
	fixture_t f;
	kvs_loc_t loc[CHAINS][DEPTH];
	uint64_t use[CHAINS][DEPTH]; /* 0: there is no such block */
	uint64_t stamp, uses;
	int exact; /* the words are those of `use` */
	kv_test_rng_t rng;
} model_t;

typedef struct order {
	model_t *m;
	uint64_t last;
	uint32_t count, wrong;
	uint8_t told[CHAINS][DEPTH];
} order_t;

static void on_used(void *arg, kvs_loc_t loc, const kv_key_t *key, uint8_t group)
{
	order_t *o = arg;

	assert_int_equal(group, 0);
	assert_int_equal(kvs_readable(o->m->f.tier, loc), KV_OK);
	for (uint32_t i = 0; i < CHAINS * DEPTH; i++) {
		const kv_key_t want = key_of(i / DEPTH, i % DEPTH + 1);

		if (kv_key_equal(&want, key)) {
			const uint64_t use = o->m->use[i / DEPTH][i % DEPTH];

			assert_true(use > 0);
			o->wrong += use <= o->last;
			o->last = use;
			o->told[i / DEPTH][i % DEPTH] = 1;
			o->count++;
			return;
		}
	}
	fail_msg("a block that was not stored");
}

static uint32_t count_blocks(const model_t *m)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < CHAINS * DEPTH; i++) {
		n += m->use[i / DEPTH][i % DEPTH] != 0;
	}

	return n;
}

static void touch(model_t *m, uint32_t c, uint32_t d)
{
	kvs_touch(m->f.tier, m->loc[c][d], ++m->stamp);
	m->use[c][d] = ++m->uses;
}

static void store_chain(model_t *m, uint32_t c)
{
	for (uint32_t d = 0; d < DEPTH; d++) {
		assert_int_equal(put_block(&m->f, &plain, c, d + 1, &m->loc[c][d]), KV_OK);
		touch(m, c, d);
	}
}

static void drop_chain(model_t *m, uint32_t c)
{
	for (uint32_t d = DEPTH; d-- > 0;) {
		kvs_free(m->f.tier, m->loc[c][d]);
		m->use[c][d] = 0;
	}
}

static void use_some(model_t *m, uint32_t times)
{
	for (uint32_t i = 0; i < times; i++) {
		const uint32_t c = (uint32_t)kv_test_below(&m->rng, CHAINS),
			       d = (uint32_t)kv_test_below(&m->rng, DEPTH);

		if (m->use[c][d]) {
			touch(m, c, d);
		}
	}
}

/* A block is told of unless its child was used as late. */
static void check_told(const model_t *m, const order_t *o)
{
	for (uint32_t c = 0; c < CHAINS; c++) {
		for (uint32_t d = 0; d < DEPTH; d++) {
			const uint64_t child = d + 1 < DEPTH ? m->use[c][d + 1] : 0;

			assert_true(o->told[c][d] == (m->use[c][d] > child) || !m->exact);
		}
	}
}

/* Open, and see that all blocks are there; the number of those that come before one used earlier. */
static uint32_t reopen(model_t *m)
{
	static found_t found;
	order_t order = {.m = m};

	m->stamp = 0;
	fixture_begin(&m->f, &found);
	while (kvs_recover_use(m->f.tier, 0, on_used, &order, 7) == KV_PENDING) {
	}
	assert_int_equal(found.count, count_blocks(m));
	check_told(m, &order);
	for (uint32_t i = 0; i < found.count; i++) {
		const uint32_t d = found.meta[i].depth - 1;

		for (uint32_t c = 0; c < CHAINS; c++) {
			const kv_key_t key = key_of(c, d + 1);

			m->loc[c][d] = kv_key_equal(&key, &found.meta[i].key) ? found.loc[i] : m->loc[c][d];
		}
	}
	check_sums(&m->f);

	return order.wrong;
}

static void model_init(model_t *m, const char *dir)
{
	memset(m, 0, sizeof *m);
	fixture_init(&m->f, dir);
	m->f.test.env.now_ns = moved_now;
	m->f.config.file_bytes = 1 * MIB; /* several */
	m->rng.state = kv_test_seed();
}

KV_TEST(p2_the_order_of_use_survives_a_close)
{
	static model_t m;

	model_init(&m, NULL);
	(void)reopen(&m);
	m.exact = 1;
	for (uint32_t c = 0; c < CHAINS; c++) {
		store_chain(&m, c);
	}
	for (uint32_t round = 0; round < 4; round++) {
		use_some(&m, 300);
		drop_chain(&m, round); /* its slots get other blocks */
		store_chain(&m, round);
		drop_chain(&m, CHAINS - 1 - round);
		assert_int_equal(flush_wait(m.f.tier), KV_OK);
		fixture_close(&m.f);
		assert_int_equal(reopen(&m), 0);
	}
	assert_int_equal(kv_metric_get(&m.f.metrics, KV_M_DISK_RECENCY_ERRORS), 0);
	fixture_fini(&m.f);
}

/* Rounds are asked for by polls. */
static void let_it_write(model_t *m)
{
	atomic_fetch_add(&ahead_ns, LATER);
	for (uint32_t i = 0; i < 40; i++) {
		struct pollfd wait = {.fd = kvs_event_fd(m->f.tier), .events = POLLIN};

		kvs_poll(m->f.tier, 64);
		poll(&wait, 1, 5);
	}
}

/* In a process that dies: blocks are stored, used, written about, used again, and more are stored. */
static void live_and_die(model_t *m)
{
	(void)reopen(m);
	for (uint32_t c = 0; c < CHAINS / 2; c++) {
		store_chain(m, c);
	}
	use_some(m, 300);
	let_it_write(m);
	for (uint32_t c = CHAINS / 2; c < CHAINS; c++) {
		store_chain(m, c);
	}
	assert_int_equal(flush_wait(m->f.tier), KV_OK);
	_exit(0);
}

KV_TEST(p2_a_kill_forgets_the_use_of_the_last_seconds_only)
{
	static model_t m;
	order_t order = {.m = &m};
	static found_t found;
	int status;
	pid_t pid;

	model_init(&m, NULL);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		live_and_die(&m);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	/* The same, without a tier: what was used when. */
	for (uint32_t c = 0; c < CHAINS / 2; c++) {
		for (uint32_t d = 0; d < DEPTH; d++) {
			m.use[c][d] = ++m.uses;
		}
	}
	for (uint32_t i = 0; i < 300; i++) {
		const uint32_t c = (uint32_t)kv_test_below(&m.rng, CHAINS), d = (uint32_t)kv_test_below(&m.rng, DEPTH);

		m.use[c][d] = m.use[c][d] ? ++m.uses : 0;
	}
	/* Blocks that were stored later were used last, all alike: their ends are told of. */
	for (uint32_t c = CHAINS / 2; c < CHAINS; c++) {
		for (uint32_t d = 0; d < DEPTH; d++) {
			m.use[c][d] = m.uses + 1;
		}
	}
	fixture_begin(&m.f, &found);
	while (kvs_recover_use(m.f.tier, 0, on_used, &order, 1000) == KV_PENDING) {
	}
	m.exact = 1;
	check_told(&m, &order);
	assert_int_equal(found.count, CHAINS * DEPTH);
	assert_int_equal(order.wrong, CHAINS / 2 - 1); /* equal to the one before */
	fixture_fini(&m.f);
}

/* ---- damage ---------------------------------------------------------------------------------- */

static void path_of(const model_t *m, const char *name, char out[256])
{
	snprintf(out, 256, "%s/recency%s", m->f.dir, name);
}

static size_t slurp(const char *path, uint8_t *out, size_t cap)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = read(fd, out, cap);

	assert_true(fd >= 0 && n > 0);
	close(fd);

	return (size_t)n;
}

static void spit(const char *path, const uint8_t *bytes, size_t n)
{
	int fd = open(path, O_WRONLY | O_TRUNC | O_CREAT | O_CLOEXEC, 0600);

	assert_true(fd >= 0 && write(fd, bytes, n) == (ssize_t)n);
	close(fd);
}

static void see_refused(model_t *m, int refused)
{
	const uint64_t before = kv_metric_get(&m->f.metrics, KV_M_DISK_RECENCY_ERRORS);

	(void)reopen(m);
	assert_int_equal(kv_metric_get(&m->f.metrics, KV_M_DISK_RECENCY_ERRORS) - before, refused);
	fixture_close(&m->f);
}

KV_TEST(p6_a_damaged_order_of_use_costs_no_block)
{
	static uint8_t good[4096], bad[4097];
	static model_t m;
	char file[256], directory[256];
	size_t n;

	model_init(&m, NULL);
	(void)reopen(&m);
	for (uint32_t c = 0; c < 4; c++) {
		store_chain(&m, c);
	}
	assert_int_equal(flush_wait(m.f.tier), KV_OK);
	fixture_close(&m.f);
	path_of(&m, "/0", file);
	path_of(&m, "", directory);
	n = slurp(file, good, sizeof good);
	see_refused(&m, 0);
	for (size_t at = 3; at < 64; at += at < 24 ? 8 : 4) { /* a byte of each field, and of some words */
		memcpy(bad, good, n);
		bad[at] ^= (uint8_t)(1u << at % 8);
		spit(file, bad, n);
		see_refused(&m, 1);
	}
	memcpy(bad, good, n);
	spit(file, bad, n - 1);
	see_refused(&m, 1);
	spit(file, bad, n + 1);
	see_refused(&m, 1);
	assert_int_equal(unlink(file), 0);
	see_refused(&m, 0); /* no file is no damage: the slots were never used */
	assert_int_equal(unlink(file), 0);
	assert_int_equal(symlink("/etc/passwd", file), 0);
	see_refused(&m, 1);
	kv_test_dir_remove(directory);
	spit(directory, good, 1);
	see_refused(&m, 1);
	(void)reopen(&m);
	fixture_fini(&m.f);
}
