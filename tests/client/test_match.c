/* Match against a mirror written here: the model is the list of what is resident. */
#include "match_bed.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static kvc_match_t match(bed_t *bed, uint32_t n)
{
	kvc_match_t m = {.struct_size = sizeof m};

	kvc_match(&bed->space, (const kvc_key_t *)(const void *)bed->keys, n, &m);

	return m;
}

static bed_t bed_;
#define BED_TEST(name, buckets) KV_TEST_BETWEEN(name, bed_make(&bed_, buckets), bed_free(&bed_))

BED_TEST(p3_match_is_the_longest_resident_prefix_in_each_tier, 4096)
{
	for (uint32_t round = 0; round < 300; round++) {
		uint32_t n = 1 + (uint32_t)kv_test_below(&bed_.t.rng, round < 100 ? 40 : 2000);
		uint32_t any = (uint32_t)kv_test_below(&bed_.t.rng, n + 1);
		uint32_t cpu = (uint32_t)kv_test_below(&bed_.t.rng, any + 1);
		uint32_t unreadable = any + (uint32_t)kv_test_below(&bed_.t.rng, n - any + 1); /* [any, unreadable) */
		kvc_match_t m = {.struct_size = sizeof m};

		for (uint32_t i = 0; i < any; i++) {
			bed_set(&bed_, i, i < cpu ? KV_TIER_CPU | KV_TIER_DISK : KV_TIER_DISK);
		}
		for (uint32_t i = any; i < unreadable; i++) {
			bed_set(&bed_, i, KV_TIER_UNREADABLE);
		}
		m = match(&bed_, n);
		assert_int_equal(m.n, any);
		assert_int_equal(m.n_cpu, cpu);
		assert_int_equal(m.why, any == n ? KV_WHY_NONE : any < unreadable ? KV_WHY_UNREADABLE : KV_WHY_ABSENT);
		kvd_mirror_set_unreadable(&bed_.mirror, KV_TIER_DISK);
		m = match(&bed_, n);
		assert_int_equal(m.n, cpu);
		assert_int_equal(m.n_cpu, cpu);
		assert_int_equal(m.why, cpu == n ? KV_WHY_NONE : cpu < unreadable ? KV_WHY_UNREADABLE : KV_WHY_ABSENT);
		kvd_mirror_set_unreadable(&bed_.mirror, 0);
		for (uint32_t i = unreadable; i-- > 0;) {
			bed_set(&bed_, i, 0);
		}
	}
	assert_int_equal(match(&bed_, 100).n, 0);
	assert_int_equal(match(&bed_, 0).n, 0);
}

BED_TEST(p1_only_the_whole_key_of_this_group_counts, 64)
{
	kv_key_t near;

	near = bed_.keys[0];
	near.b[15] ^= 1;
	assert_int_equal(kvd_mirror_set(&bed_.mirror, &near, 0, KV_TIER_CPU), 0);
	assert_int_equal(kvd_mirror_set(&bed_.mirror, &bed_.keys[0], 9, KV_TIER_CPU), 0);
	assert_int_equal(match(&bed_, 1).n, 0);
	bed_set(&bed_, 0, KV_TIER_DISK);
	assert_int_equal(match(&bed_, 1).n, 1);
	assert_int_equal(match(&bed_, 1).n_cpu, 0);
}

/* Keys that begin alike lie in one bucket; each may be in any way of it, and gone. */
BED_TEST(p1_keys_with_the_same_first_words_are_told_apart, 64)
{
	uint8_t there[6] = {0};

	for (uint32_t i = 1; i < 6; i++) {
		memcpy(bed_.keys[i].b, bed_.keys[0].b, i % 2 ? 12 : 8);
	}
	for (uint32_t step = 0; step < 2000; step++) {
		const uint32_t i = (uint32_t)kv_test_below(&bed_.t.rng, 6);

		there[i] ^= 1;
		bed_set(&bed_, i, there[i]);
		for (uint32_t k = 0; k < 6; k++) {
			kvc_match_t m = {.struct_size = sizeof m};

			kvc_match(&bed_.space, (const kvc_key_t *)(const void *)&bed_.keys[k], 1, &m);
			assert_int_equal(m.n, there[k]);
		}
	}
}

/* Nearly full buckets: entries lie far from home, around the end of the table, and others go in between. */
BED_TEST(p3_crowded_buckets_hide_nothing, 64)
{
	uint8_t there[160] = {0};

	for (uint32_t step = 0; step < 20000; step++) {
		uint32_t i = (uint32_t)kv_test_below(&bed_.t.rng, 160);
		kvc_match_t m = {.struct_size = sizeof m};

		if (there[i]) {
			bed_set(&bed_, i, 0);
			there[i] = 0;
		} else {
			there[i] = kvd_mirror_set(&bed_.mirror, &bed_.keys[i], 0, KV_TIER_CPU) == 0;
		}
		i = (uint32_t)kv_test_below(&bed_.t.rng, 160);
		kvc_match(&bed_.space, (const kvc_key_t *)(const void *)&bed_.keys[i], 1, &m);
		assert_int_equal(m.n, there[i]);
	}
}

BED_TEST(p7_a_stopped_daemon_is_a_miss_within_50_ms, 64)
{
	bed_set(&bed_, 0, KV_TIER_CPU);
	kv_test_advance(&bed_.t, KV_MIRROR_STALE_NS);
	assert_int_equal(match(&bed_, 1).n, 1);
	kv_test_advance(&bed_.t, 1);
	assert_int_equal(match(&bed_, 1).n, 0);
	assert_int_equal(match(&bed_, 1).why, KV_WHY_DAEMON_STALE);

	/* One that may be silent for longer. */
	bed_.map.stale_ns = 4 * KV_MIRROR_STALE_NS;
	assert_int_equal(match(&bed_, 1).n, 1);
	kv_test_advance(&bed_.t, 3 * KV_MIRROR_STALE_NS);
	assert_int_equal(match(&bed_, 1).why, KV_WHY_DAEMON_STALE);
	bed_.map.stale_ns = KV_MIRROR_STALE_NS;

	/* A clock that is not ours. */
	kvd_mirror_set_heartbeat(&bed_.mirror, kv_now_ns(&bed_.t.env) + KV_MIRROR_STALE_NS + 1);
	assert_int_equal(match(&bed_, 1).why, KV_WHY_DAEMON_STALE);

	/* The daemon has shut down. */
	kvd_mirror_set_heartbeat(&bed_.mirror, 0);
	assert_int_equal(match(&bed_, 1).why, KV_WHY_NO_DAEMON);
	atomic_store(&bed_.kvc.map, NULL);
	assert_int_equal(match(&bed_, 1).why, KV_WHY_NO_DAEMON);
}

/* A daemon that lost its CPU inside a bucket costs the block at the end of a match, and no other. */
BED_TEST(p5_a_bucket_locked_for_ever_costs_the_last_block, 1024)
{
	uint32_t whole = 0;

	for (uint32_t i = 0; i < 100; i++) {
		bed_set(&bed_, i, KV_TIER_CPU);
	}
	for (uint32_t i = 0; i < 100; i++) {
		bed_lock(&bed_, i, 1);
		for (uint32_t n = 100; n <= 150; n += 50) {
			kvc_match_t m = match(&bed_, n);

			assert_in_range(m.n, 90, i == 99 ? 99 : 100);
			assert_true(m.n == 100 || m.why == KV_WHY_CONTENDED);
			whole += m.n == 100;
		}
		bed_lock(&bed_, i, 0);
	}
	assert_in_range(whole, 180, 198); /* a few others lie in the last block's bucket */
	assert_int_equal(match(&bed_, 100).n, 100);
}

/* ---- while the daemon writes ----------------------------------------------------------------- */

#define STABLE  500u
#define MOVING  700u
#define BUCKETS 512u

typedef struct writer {
	bed_t *bed;
	_Atomic int stop;
} writer_t;

static void *write_for_ever(void *arg)
{
	writer_t *writer = arg;
	bed_t *bed = writer->bed;

	while (!atomic_load(&writer->stop)) {
		for (uint32_t i = STABLE; i < MOVING; i++) {
			(void)kvd_mirror_set(&bed->mirror, &bed->keys[i], 0, KV_TIER_CPU | KV_TIER_DISK);
		}
		for (uint32_t i = MOVING; i-- > STABLE;) {
			(void)kvd_mirror_set(&bed->mirror, &bed->keys[i], 0, KV_TIER_DISK);
		}
		for (uint32_t i = MOVING; i-- > STABLE;) {
			(void)kvd_mirror_set(&bed->mirror, &bed->keys[i], 0, 0);
		}
	}

	return NULL;
}

/* The sequences of all buckets. */
static void look_at_buckets(const bed_t *bed, uint32_t *seqs)
{
	for (uint64_t i = 0; i <= bed->mirror.mask; i++) {
		seqs[i] = atomic_load(&bed->mirror.buckets[i].seq);
	}
}

/* Has a bucket in which key i may lie been written since? */
static int is_contended(const bed_t *bed, const uint32_t *seqs, uint32_t i)
{
	int written = 0;

	for (uint64_t probe = 0; probe < KV_MIRROR_MAX_PROBE; probe++) {
		uint64_t at = (kv_key_hash(&bed->keys[i]) + probe) & bed->mirror.mask;

		written |= seqs[at] & 1u || atomic_load(&bed->mirror.buckets[at].seq) != seqs[at];
	}

	return written;
}

BED_TEST(p1_a_match_beside_a_writer_never_says_what_never_was, BUCKETS)
{
	writer_t writer = {.bed = &bed_};
	uint32_t seqs[BUCKETS];
	pthread_t thread;

	for (uint32_t i = 0; i < STABLE; i++) {
		bed_set(&bed_, i, KV_TIER_CPU);
	}
	assert_int_equal(pthread_create(&thread, NULL, write_for_ever, &writer), 0);
	for (uint32_t answers = 0; answers < 10000;) {
		kvc_match_t m;

		look_at_buckets(&bed_, seqs);
		m = match(&bed_, 1000);
		/* The writer may have lost its CPU inside a bucket, for as long as the machine likes: of the blocks in
		 * any tier the reason tells, of those in the CPU tier the bucket. */
		if (m.why == KV_WHY_CONTENDED || (m.n_cpu < STABLE && is_contended(&bed_, seqs, m.n_cpu))) {
			sched_yield();
			continue;
		}
		answers++;
		assert_in_range(m.n, STABLE, MOVING);
		assert_in_range(m.n_cpu, STABLE, m.n);
	}
	atomic_store(&writer.stop, 1);
	pthread_join(thread, NULL);
}

/* ---- no system call -------------------------------------------------------------------------- */

static int forbid_system_calls(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog program = {.len = KV_COUNT_OF(code), .filter = code};

	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/* What a child does when every system call kills it: 0 read the clock, 1 match. Returns its wait status. */
static int run_without_system_calls(bed_t *bed, int matching)
{
	pid_t pid = fork();
	int status = 0;

	if (pid == 0) {
		uint32_t n = 0;

		if (!forbid_system_calls()) {
			_exit(99);
		}
		for (uint32_t i = 0; i < 1000; i++) {
			n += matching ? match(bed, 900).n : (kv_now_ns(&kv_env_posix) != 0);
		}
		_exit(n == (matching ? 800u * 1000u : 1000u) ? 0 : 1);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);

	return status;
}

KV_TEST(match_makes_no_system_call)
{
	bed_t bed;
	int clock;

#ifdef KVD_SANITIZE
	print_message("# SKIP: sanitizers make system calls of their own\n");
	skip();
#endif
	bed_make(&bed, 1024);
	for (uint32_t i = 0; i < 800; i++) {
		bed_set(&bed, i, KV_TIER_CPU);
	}
	clock = run_without_system_calls(&bed, 0);
	if (clock == 0) {
		/* With the real clock, which the C library reads without a system call here. */
		bed.kvc.env = kv_env_posix;
		kvd_mirror_set_heartbeat(&bed.mirror, kv_now_ns(&kv_env_posix));
		bed.map.stale_ns = UINT64_MAX; /* however long the machine takes for the child */
	} else {
		printf("# the clock itself is a system call here: measured with a clock of the test\n");
	}
	assert_int_equal(run_without_system_calls(&bed, 1), 0);
	bed_free(&bed);
}

BED_TEST(match_looks_at_few_cache_lines, 65536)
{
	kvc_match_t m = {.struct_size = sizeof m};

	for (uint32_t i = 0; i < 7373; i++) {
		bed_set(&bed_, i, KV_TIER_CPU);
	}
	m = match(&bed_, 8192);
	assert_int_equal(m.n, 7373);
	assert_int_equal(m.n_cpu, 7373);
	assert_in_range(m.probes, 7, 30);
}

/* ---- the checks of a lease --------------------------------------------------------------------- */

/* Two looks make one: is this still the lease it was? Between them its place in the lease area may be given to the next
 * lease. */
#define PAGE ((size_t)4096)

/* A header that lies across two pages: `id` at the end of the first, `state` at the start of the second. Who looks at a
 * page that is closed finds that the daemon has given the place to lease 2 just then. */
static struct {
	uint8_t *pages;
	kv_lease_header_t *header;
	uint32_t turns;
} place;

static void next_lease(int signal_number, siginfo_t *info, void *context)
{
	(void)signal_number;
	(void)context;
	if ((uint8_t *)info->si_addr < place.pages || (uint8_t *)info->si_addr >= place.pages + 2u * PAGE) {
		abort();
	}
	(void)mprotect(place.pages, 2u * PAGE, PROT_READ | PROT_WRITE);
	atomic_store(&place.header->state, KV_LEASE_NONE);
	atomic_store(&place.header->id, 2);
	atomic_store(&place.header->state, KV_LEASE_ACTIVE);
	place.turns++;
}

/* What is said of lease 1, whose place changes hands when its page `closed` is looked at. */
static kv_status_t check_while(uint32_t state, uint32_t closed)
{
	kvc_map_t *map = calloc(1, sizeof *map);
	struct sigaction now = {.sa_sigaction = next_lease, .sa_flags = SA_SIGINFO}, before;
	kvc_grant_t grant = {.map = map, .id = 1, .kind = KV_LEASE_READ};
	kv_status_t status;

	place.pages = mmap(NULL, 2u * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert_ptr_not_equal(place.pages, MAP_FAILED);
	place.header = (kv_lease_header_t *)(void *)(place.pages + PAGE - offsetof(kv_lease_header_t, state));
	place.turns = 0;
	atomic_store(&place.header->id, 1);
	atomic_store(&place.header->state, state);
	grant.header = place.header;
	assert_int_equal(kvc_grant_check(&grant), state == KV_LEASE_ACTIVE ? KV_OK : KV_ERR_REVOKED);

	assert_int_equal(sigaction(SIGSEGV, &now, &before), 0);
	assert_int_equal(mprotect(place.pages + closed * PAGE, PAGE, PROT_NONE), 0);
	status = kvc_grant_check(&grant);
	assert_int_equal(mprotect(place.pages, 2u * PAGE, PROT_READ | PROT_WRITE), 0);
	assert_int_equal(sigaction(SIGSEGV, &before, NULL), 0);
	assert_in_range(place.turns, state == KV_LEASE_ACTIVE, 1);
	assert_int_equal(kvc_grant_check(&grant), place.turns ? KV_ERR_REVOKED : status);
	assert_int_equal(munmap(place.pages, 2u * PAGE), 0);
	free(map);

	return status;
}

KV_TEST(p1_an_ended_lease_is_not_taken_for_the_next_at_its_offset)
{
	for (uint32_t closed = 0; closed < 2; closed++) {
		assert_int_equal(check_while(KV_LEASE_REVOKED, closed), KV_ERR_REVOKED);
		assert_int_equal(check_while(KV_LEASE_ACTIVE, closed), KV_ERR_REVOKED);
	}
}
