/* Touching new slabs in the background, so that no put pays for the kernel's zeroing. */
#include "idle.h"
#include "slab.h"

#include "kvs/sigbus.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

/* One step: short enough for a prompt stop, for a carve that waits for the address space's lock, and for an engine that
 * wants the core again. */
#define CHUNK    ((uint64_t)256 << 10)
#define PAUSE_NS 20000000
#define HUGE     ((uint64_t)2 << 20) /* as one page about the work of a small step */

/* An entry of the queue: who wants to have the slab back tries QUEUED -> DROPPED; when it is too late, `halt` ends the
 * touching within a chunk. No lock: who wants it back waits for nothing. */
typedef enum entry_state { QUEUED, TOUCHED, DROPPED } entry_state_t;
typedef struct entry {
	kvs_slab_t *slab;
	atomic_int state;
	atomic_int halt;
} entry_t;

struct kvs_prefault {
	const kv_env_t *env;
	const kvs_sys_t *sys;
	pthread_t thread;
	kvs_idle_t *idle; /* an engine may compute on the same cores, in threads that wait for each other */
	sem_t work;       /* posted once for each slab and once for the stop */
	atomic_int stop;
	atomic_int paused;
	_Atomic uint64_t count; /* entries [done, count) of the ring are waiting or in work */
	_Atomic uint64_t done;
	uint32_t cap;
	int huge;              /* the thread's: they are worth trying */
	_Atomic int collapsed; /* there is one */
	entry_t *ring;
};

/* 0 or -errno. Neither way changes a byte: clients may be writing already. */
static int touch(const kvs_sys_t *sys, uint8_t *base, uint64_t n)
{
	int error;

	do {
		error = sys->populate(base, n);
	} while (error == -EINTR || error == -EAGAIN);
	if (error == -EINVAL) {
		error = kvs_sigbus_touch_pages(base, n) == KV_OK ? 0 : -EFAULT;
	}

	return error;
}

/* The step at `at`: bytes that exist now, or -errno. A huge page costs a tenth of the small ones in its place, here and
 * wherever it is used. */
static int64_t touch_step(kvs_prefault_t *p, const entry_t *entry, const kvs_shm_t *area, uint64_t at)
{
	uint64_t left = area->bytes - at, n = left < CHUNK ? left : CHUNK;
	int error;

	if (p->huge && !entry->slab->huge && left >= HUGE && ((uintptr_t)area->base + at) % HUGE == 0) {
		error = p->sys->collapse(area->base + at);
		if (!error) {
			atomic_store_explicit(&p->collapsed, 1, memory_order_relaxed);
			return (int64_t)HUGE;
		}
		p->huge = error != -EINVAL;
	}
	error = touch(p->sys, area->base + at, n);

	return error ? error : (int64_t)n;
}

static int is_paused(const kvs_prefault_t *p, const entry_t *entry)
{
	return atomic_load_explicit(&p->paused, memory_order_relaxed) &&
	       !atomic_load_explicit(&p->stop, memory_order_relaxed) &&
	       !atomic_load_explicit(&entry->halt, memory_order_relaxed);
}

static int touch_area(kvs_prefault_t *p, const entry_t *entry, const kvs_shm_t *area, _Atomic uint64_t *ready)
{
	for (uint64_t at = 0; at < area->bytes;) {
		int64_t n;

		kvs_idle_wait(p->idle);
		while (is_paused(p, entry)) {
			(void)nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
		}
		if (atomic_load_explicit(&p->stop, memory_order_relaxed) ||
		    atomic_load_explicit(&entry->halt, memory_order_relaxed)) {
			return 0;
		}
		n = touch_step(p, entry, area, at);
		if (n < 0) {
			return (int)n;
		}
		at += (uint64_t)n;
		if (ready) {
			atomic_store_explicit(ready, at, memory_order_release);
		}
	}

	return 0;
}

static void touch_slab(kvs_prefault_t *p, entry_t *entry)
{
	int queued = QUEUED, error;
	kvs_slab_t *slab = entry->slab;

	if (!atomic_compare_exchange_strong(&entry->state, &queued, TOUCHED)) {
		return;
	}
	error = touch_area(p, entry, &slab->digest, NULL);
	if (!error) {
		error = touch_area(p, entry, &slab->data, &slab->ready_bytes);
	}
	if (error) {
		kv_logf(p->env, KV_LOG_WARN, "pool", "pre-fault of a slab ended early slab %u error \"%s\"",
			slab->number, strerror(-error));
	}
}

static void *prefault_main(void *arg)
{
	kvs_prefault_t *p = arg;
	uint64_t done = 0;

	(void)prctl(PR_SET_NAME, "kvd-touch", 0, 0, 0);
	while (!atomic_load(&p->stop)) {
		if (done == atomic_load_explicit(&p->count, memory_order_acquire)) {
			sem_wait(&p->work);
			continue;
		}
		touch_slab(p, &p->ring[done % p->cap]);
		atomic_store_explicit(&p->done, ++done, memory_order_release);
	}

	return NULL;
}

int kvs_prefault_huge(const kvs_prefault_t *prefault)
{
	return prefault && atomic_load_explicit(&prefault->collapsed, memory_order_relaxed);
}

kv_status_t kvs_prefault_start(uint32_t max_slabs, const kvs_sys_t *sys, int huge, const kv_env_t *env,
			       kvs_prefault_t **p_prefault)
{
	kvs_prefault_t *p = kv_alloc(env, sizeof *p);
	sigset_t all, old;

	if (!p) {
		return KV_ERR_NOMEM;
	}
	p->env = env;
	p->sys = sys;
	p->cap = max_slabs;
	p->huge = huge && sys->collapse;
	p->ring = kv_alloc(env, max_slabs * sizeof *p->ring);
	if (!p->ring || sem_init(&p->work, 0, 0) != 0) {
		goto err_ring;
	}

	/* Signals belong to the daemon's loop. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	int error = kvs_idle_start(&p->idle) != KV_OK || pthread_create(&p->thread, NULL, prefault_main, p) != 0;
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (error) {
		goto err_work;
	}
	*p_prefault = p;

	return KV_OK;

err_work:
	kvs_idle_free(p->idle);
	sem_destroy(&p->work);
err_ring:
	kv_free(env, p->ring);
	kv_free(env, p);
	return KV_ERR_NOMEM;
}

void kvs_prefault_pause(kvs_prefault_t *prefault, int paused)
{
	atomic_store_explicit(&prefault->paused, paused, memory_order_relaxed);
}

void kvs_prefault_add(kvs_prefault_t *prefault, kvs_slab_t *slab)
{
	uint64_t n = atomic_load_explicit(&prefault->count, memory_order_relaxed);
	entry_t *entry = &prefault->ring[n % prefault->cap];

	if (n - atomic_load_explicit(&prefault->done, memory_order_acquire) == prefault->cap) {
		return; /* the thread is far behind: the users of the slab touch it */
	}
	entry->slab = slab;
	atomic_store_explicit(&entry->state, QUEUED, memory_order_relaxed);
	atomic_store_explicit(&entry->halt, 0, memory_order_relaxed);
	slab->ticket = n + 1u;
	atomic_store_explicit(&prefault->count, n + 1u, memory_order_release);
	sem_post(&prefault->work);
}

int kvs_prefault_drop(kvs_prefault_t *prefault, const kvs_slab_t *slab)
{
	entry_t *entry;
	int queued = QUEUED;

	if (!prefault || slab->ticket == 0 ||
	    atomic_load_explicit(&prefault->done, memory_order_acquire) >= slab->ticket) {
		return 1;
	}
	entry = &prefault->ring[(slab->ticket - 1u) % prefault->cap];
	if (atomic_compare_exchange_strong(&entry->state, &queued, DROPPED) || queued == DROPPED) {
		return 1;
	}
	if (!atomic_exchange(&entry->halt, 1)) {
		kvs_idle_wake(prefault->idle);
	}

	return 0;
}

void kvs_prefault_stop(kvs_prefault_t *prefault)
{
	if (!prefault) {
		return;
	}

	atomic_store(&prefault->stop, 1);
	sem_post(&prefault->work);
	kvs_idle_stop(prefault->idle);
	pthread_join(prefault->thread, NULL);
	kvs_idle_free(prefault->idle);
	sem_destroy(&prefault->work);
	kv_free(prefault->env, prefault->ring);
	kv_free(prefault->env, prefault);
}
