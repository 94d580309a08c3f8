/* The one file in which the daemon touches memory that a client may have taken away.
 *
 * A thread says which ranges it is about to touch, then touches them inside run_protected(). The SIGBUS handler looks
 * at the thread's record: a fault inside an announced range leaves by siglongjmp and becomes KV_ERR_FAULT; any other
 * goes to the handler that was there before us.
 */
#include "kvs/sigbus.h"

#include "geometry.h"

#include "kv/digest.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <ucontext.h>

typedef struct range {
	uintptr_t start;
	size_t len;
} range_t;

typedef struct region {
	volatile sig_atomic_t active;
	int unblocked; /* SIGBUS is deliverable in this thread: a blocked one would kill the process */
	range_t range[2];
	sigjmp_buf out;
} region_t;

/* initial-exec: reading it in a signal handler never calls the dynamic linker. */
static __thread region_t region __attribute__((tls_model("initial-exec")));

static pthread_mutex_t install_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int installed;
static struct sigaction previous;

/* A machine check names the start of a page of 1 << si_addr_lsb bytes, any other fault the very address. */
static int is_ours(const siginfo_t *info)
{
	uintptr_t at = (uintptr_t)info->si_addr;
	size_t span = info->si_code == BUS_MCEERR_AR ? (size_t)1 << (info->si_addr_lsb & 63) : 1u;

	for (int i = 0; i < 2; i++) {
		const range_t *r = &region.range[i];

		if (at < r->start + r->len && r->start < at + span) {
			return 1;
		}
	}

	return 0;
}

static void on_sigbus(int signum, siginfo_t *info, void *context)
{
	/* si_code > 0: raised by the kernel for this very access, not sent by kill(). */
	if (region.active && info->si_code > 0 && is_ours(info)) {
		const ucontext_t *interrupted = context;

		/* The jump saves no mask, to cost no system call where nothing faults: back to that of the faulting
		 * access. */
		pthread_sigmask(SIG_SETMASK, &interrupted->uc_sigmask, NULL);
		siglongjmp(region.out, 1);
	}

	if (previous.sa_flags & SA_SIGINFO) {
		previous.sa_sigaction(signum, info, context);
	} else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
		previous.sa_handler(signum);
	} else if (info->si_code > 0 || previous.sa_handler == SIG_DFL) {
		/* Fatal, as it would have been without us: the access is repeated, or the signal sent again, under the
		 * default action. */
		struct sigaction standard = {.sa_handler = SIG_DFL};

		sigaction(SIGBUS, &standard, NULL);
		if (info->si_code <= 0) {
			raise(SIGBUS);
		}
	}
}

static int is_installed(void)
{
	struct sigaction now;

	return sigaction(SIGBUS, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_sigbus;
}

/* Also when somebody has replaced the handler since: the last caller before the danger decides. */
kv_status_t kvs_sigbus_install(void)
{
	struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_NODEFER};
	kv_status_t status = KV_OK;

	sigemptyset(&action.sa_mask);
	pthread_mutex_lock(&install_lock);
	if (!is_installed()) {
		status = sigaction(SIGBUS, &action, &previous) == 0 ? KV_OK : KV_ERR_INTERNAL;
	}
	atomic_store(&installed, status == KV_OK);
	pthread_mutex_unlock(&install_lock);

	return status;
}

static void unblock_sigbus(void)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGBUS);
	pthread_sigmask(SIG_UNBLOCK, &set, NULL);
	region.unblocked = 1;
}

/* Run work(arg), which touches only a, b and trusted memory. Not to be nested: an inner region would end the outer
 * one's protection. */
static kv_status_t run_protected(void (*work)(void *arg), void *arg, range_t a, range_t b)
{
	if (region.active || !atomic_load_explicit(&installed, memory_order_relaxed)) {
		return KV_ERR_INTERNAL;
	}
	if (!region.unblocked) {
		unblock_sigbus();
	}

	region.range[0] = a;
	region.range[1] = b;
	if (sigsetjmp(region.out, 0) != 0) {
		region.active = 0;
		return KV_ERR_FAULT;
	}

	region.active = 1;
	atomic_signal_fence(memory_order_seq_cst);
	work(arg);
	atomic_signal_fence(memory_order_seq_cst);
	region.active = 0;

	return KV_OK;
}

typedef struct copy {
	void *dst;
	const void *src;
	size_t n;
} copy_t;

static void work_copy(void *arg)
{
	copy_t *c = arg;

	memcpy(c->dst, c->src, c->n);
}

static range_t range_of(const void *p, size_t n)
{
	return (range_t){(uintptr_t)p, n};
}

kv_status_t kvs_sigbus_copy(void *dst, const void *src, size_t n)
{
	copy_t c = {dst, src, n};

	return run_protected(work_copy, &c, range_of(dst, n), range_of(src, n));
}

/* One block: copied when dst is given, digested leaf by leaf, compared as it goes. */
typedef struct block {
	const kvs_geometry_t *geometry;
	uint8_t *dst;
	const uint8_t *src;
	const uint64_t *expected;
	uint64_t *leaves;
	kv_status_t status;
} block_t;

static void work_block(void *arg)
{
	block_t *b = arg;
	const kvs_geometry_t *g = b->geometry;
	size_t i = 0;

	for (uint32_t head = 0; head < g->heads; head++) {
		for (uint32_t leaf = 0; leaf < g->leaves; leaf++, i++) {
			size_t offset, len;
			uint64_t digest;

			kvs_leaf_range(g, head, leaf, &offset, &len);
			digest = b->dst ? kv_copy_digest(b->dst + offset, b->src + offset, len)
					: kv_digest(b->src + offset, len);
			if (b->expected && b->expected[i] != digest) {
				b->status = KV_ERR_CORRUPT;
				return;
			}
			if (b->leaves) {
				b->leaves[i] = digest;
			}
		}
	}
}

kv_status_t kvs_sigbus_copy_block(const kvs_geometry_t *geometry, void *dst, const void *src, const uint64_t *expected,
				  uint64_t *p_leaves)
{
	block_t b = {geometry, dst, src, expected, p_leaves, KV_OK};
	size_t n = geometry->block_bytes;
	kv_status_t status = run_protected(work_block, &b, range_of(dst, dst ? n : 0), range_of(src, n));

	return status == KV_OK ? b.status : status;
}

kv_status_t kvs_sigbus_verify_block(const kvs_geometry_t *geometry, const void *data, const uint64_t *expected,
				    uint64_t *p_leaves, uint64_t *p_roots)
{
	const uint64_t *leaves = p_leaves ? p_leaves : expected;

	if (p_roots && !leaves) {
		return KV_ERR_ARG;
	}

	kv_status_t status = kvs_sigbus_copy_block(geometry, NULL, data, expected, p_leaves);

	if (status == KV_OK && p_roots) {
		kvs_compute_roots(geometry, leaves, p_roots);
	}

	return status;
}

/* A locked "or" of nothing: writes the page into being without losing a byte that a client stores at the same
 * moment. */
static void work_touch(void *arg)
{
	const copy_t *c = arg;
	uint8_t *p = c->dst;

	for (size_t at = 0; at < c->n; at += 4096u) {
		__atomic_fetch_or(p + at, 0, __ATOMIC_RELAXED);
	}
}

kv_status_t kvs_sigbus_touch_pages(void *p, size_t n)
{
	copy_t c = {p, NULL, n};

	return run_protected(work_touch, &c, range_of(p, n), range_of(NULL, 0));
}
