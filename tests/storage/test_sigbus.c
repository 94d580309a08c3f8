/* Memory that a client takes away under the daemon's hands. */
#include "pool_test.h"

#include "kv/digest.h"
#include "kvs/sigbus.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define PAGE  4096
#define BYTES (64L * PAGE)

/* A block whose one digest is that of all its bytes. */
static const kvs_geometry_t one_leaf = {
	.block_bytes = BYTES, .heads = 1, .leaves = 1, .leaf_bytes = BYTES, .page_bytes = BYTES};

typedef struct region {
	int fd;
	uint8_t *base;
} region_t;

/* Not sealed: what a hostile client could hand in, or a slab before its seals. */
static region_t region_map(void)
{
	region_t a = {.fd = memfd_create("test", MFD_CLOEXEC)};

	assert_true(a.fd >= 0);
	assert_int_equal(ftruncate(a.fd, BYTES), 0);
	a.base = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, a.fd, 0);
	assert_true(a.base != MAP_FAILED);
	memset(a.base, 0x5a, BYTES);

	return a;
}

static void region_unmap(region_t *a)
{
	munmap(a->base, BYTES);
	close(a->fd);
}

KV_TEST(p6_truncated_memory_is_a_fault_not_a_crash)
{
	static uint8_t mine[BYTES];
	kvs_geometry_t g = {
		.block_bytes = BYTES, .heads = 4, .leaves = 4, .leaf_bytes = BYTES / 16, .page_bytes = BYTES / 16};
	uint64_t leaves[16], roots[4], digest = 1, want;
	region_t a = region_map();

	assert_int_equal(kvs_sigbus_install(), KV_OK);
	want = kv_digest(a.base, BYTES);
	assert_int_equal(kvs_sigbus_copy_block(&one_leaf, mine, a.base, NULL, &digest), KV_OK);
	assert_true(digest == want);
	assert_memory_equal(mine, a.base, BYTES);
	assert_int_equal(kvs_sigbus_verify_block(&g, a.base, NULL, leaves, roots), KV_OK);
	assert_int_equal(kvs_sigbus_verify_block(&g, a.base, leaves, NULL, NULL), KV_OK);

	for (uint32_t keep = 0; keep < 64; keep += 7) {
		assert_int_equal(ftruncate(a.fd, (off_t)(keep * PAGE)), 0);
		digest = 1;
		assert_int_equal(kvs_sigbus_copy_block(&one_leaf, mine, a.base, NULL, &digest), KV_ERR_FAULT);
		assert_int_equal(kvs_sigbus_copy_block(&one_leaf, NULL, a.base, NULL, &digest), KV_ERR_FAULT);
		assert_int_equal(kvs_sigbus_copy(mine, a.base, BYTES), KV_ERR_FAULT);
		assert_int_equal(kvs_sigbus_copy(a.base, mine, BYTES), KV_ERR_FAULT);
		assert_int_equal(kvs_sigbus_copy_block(&one_leaf, a.base, mine, NULL, &digest), KV_ERR_FAULT);
		assert_int_equal(kvs_sigbus_verify_block(&g, a.base, NULL, leaves, roots), KV_ERR_FAULT);
		assert_true(digest == 1); /* outputs on success only */
		assert_int_equal(ftruncate(a.fd, BYTES), 0);
		memset(a.base, 0x5a, BYTES);
	}
	assert_int_equal(kvs_sigbus_copy_block(&one_leaf, NULL, a.base, NULL, &digest), KV_OK);
	assert_true(digest == want);
	region_unmap(&a);
}

KV_TEST(p1_verify_finds_every_flipped_leaf)
{
	const kvs_geometry_t *geometries[] = {&plain, &opaque};

	assert_int_equal(kvs_sigbus_install(), KV_OK);
	for (size_t i = 0; i < KV_COUNT_OF(geometries); i++) {
		const kvs_geometry_t *g = geometries[i];
		static block_t b;
		uint64_t leaves[16], roots[4];

		block_fill(g, 9, &b);
		assert_int_equal(kvs_sigbus_verify_block(g, b.data, b.leaves, leaves, roots), KV_OK);
		assert_memory_equal(leaves, b.leaves, g->heads * g->leaves * sizeof *leaves);
		assert_memory_equal(roots, b.roots, g->heads * sizeof *roots);
		assert_int_equal(kvs_sigbus_verify_block(g, b.data, NULL, NULL, roots), KV_ERR_ARG);
		for (uint32_t at = 0; at < g->block_bytes; at += 97) {
			b.data[at] ^= 4;
			assert_int_equal(kvs_sigbus_verify_block(g, b.data, b.leaves, NULL, NULL), KV_ERR_CORRUPT);
			b.data[at] ^= 4;
		}
		b.data[g->block_bytes - 1] ^= 1;
		assert_int_equal(kvs_sigbus_verify_block(g, b.data, b.leaves, NULL, NULL), KV_ERR_CORRUPT);
	}
}

/* Another handler, there before ours. It maps the page again, as a run-time library might. */
static volatile int seen;
static volatile kv_status_t nested;

static void map_page(int signum, siginfo_t *info, void *context)
{
	char copy[6];
	uintptr_t page = (uintptr_t)info->si_addr & ~(uintptr_t)(PAGE - 1u);

	(void)signum;
	(void)context;
	seen++;
	nested = kvs_sigbus_copy(copy, "nested", sizeof copy);
	if (mmap((void *)page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
	    MAP_FAILED) {
		_exit(1);
	}
}

KV_TEST(p6_a_fault_outside_the_announced_memory_is_not_swallowed)
{
	kvs_geometry_t g = {.block_bytes = PAGE, .heads = 1, .leaves = 1, .leaf_bytes = PAGE, .page_bytes = PAGE};
	struct sigaction action = {.sa_sigaction = map_page, .sa_flags = SA_SIGINFO};
	static uint8_t data[PAGE];
	region_t a = region_map();
	uint64_t *leaves = (uint64_t *)(a.base + BYTES - PAGE);

	assert_int_equal(sigaction(SIGBUS, &action, NULL), 0);
	assert_int_equal(kvs_sigbus_install(), KV_OK);
	assert_int_equal(ftruncate(a.fd, 0), 0);

	/* The digests lie in trusted memory: a fault there is not the client's, even inside the protected
	 * region. */
	assert_int_equal(kvs_sigbus_verify_block(&g, data, NULL, leaves, NULL), KV_OK);
	assert_int_equal(seen, 1);
	assert_int_equal(nested, KV_ERR_INTERNAL);
	assert_true(leaves[0] == kv_digest(data, PAGE));

	/* Outside any region. */
	*(volatile uint8_t *)a.base = 1;
	assert_int_equal(seen, 2);
	assert_int_equal(nested, KV_OK);
	region_unmap(&a);
}

static void exit_on_signal(int signum)
{
	(void)signum;
	_exit(42);
}

/* Run in a child: the disposition before ours, then a real fault or a sent signal. Returns waitpid's status. */
static int end_of_child(void (*before)(int), int send)
{
	struct sigaction action = {.sa_handler = before};
	region_t a = region_map();
	pid_t pid;
	int status;

	assert_int_equal(ftruncate(a.fd, 0), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		sigaction(SIGBUS, &action, NULL);
		if (kvs_sigbus_install() != KV_OK) {
			_exit(1);
		}
		if (send) {
			raise(SIGBUS);
		} else {
			*(volatile uint8_t *)a.base = 1;
		}
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	region_unmap(&a);

	return status;
}

KV_TEST(p6_an_unhandled_sigbus_means_what_it_meant_before)
{
	for (int send = 0; send < 2; send++) {
		int status = end_of_child(SIG_DFL, send);

		assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
		status = end_of_child(exit_on_signal, send);
		assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 42);
		status = end_of_child(SIG_IGN, send);
		assert_true(send ? WIFEXITED(status) && WEXITSTATUS(status) == 0
				 : WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
	}
}

typedef struct racer {
	const region_t *region;
	atomic_int *stop;
	uint64_t ok, faults, odd;
} racer_t;

static void *race_reader(void *arg)
{
	racer_t *r = arg;
	uint8_t *mine = malloc(BYTES);
	sigset_t all;

	/* Threads of a daemon that reads signals from an fd block them all. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, NULL);
	while (mine && !atomic_load(r->stop)) {
		uint64_t digest;

		switch (kvs_sigbus_copy_block(&one_leaf, mine, r->region->base, NULL, &digest)) {
		case KV_OK:
			r->ok++;
			r->odd += digest != kv_digest(mine, BYTES);
			break;
		case KV_ERR_FAULT:
			r->faults++;
			break;
		default:
			r->odd++;
		}
	}
	free(mine);

	return NULL;
}

KV_TEST(p6_threads_fault_separately_while_a_client_truncates)
{
	region_t a = region_map();
	atomic_int stop = 0;
	racer_t racer[3];
	pthread_t thread[3];
	uint64_t faults = 0;

	assert_int_equal(kvs_sigbus_install(), KV_OK);
	for (int i = 0; i < 3; i++) {
		racer[i] = (racer_t){.region = &a, .stop = &stop};
		assert_int_equal(pthread_create(&thread[i], NULL, race_reader, &racer[i]), 0);
	}
	for (int i = 0; i < 400; i++) {
		assert_int_equal(ftruncate(a.fd, (off_t)(i % 64) * PAGE), 0);
		usleep(200);
		assert_int_equal(ftruncate(a.fd, BYTES), 0);
		usleep(200);
	}
	atomic_store(&stop, 1);
	for (int i = 0; i < 3; i++) {
		pthread_join(thread[i], NULL);
		assert_int_equal(racer[i].odd, 0);
		faults += racer[i].faults;
	}
	assert_true(faults > 0);
	region_unmap(&a);
}
