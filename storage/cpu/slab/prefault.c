/* Touching new slabs in the background: before a client is lent a slot, and without a wait where there was time. */
#include "idle.h"
#include "slab.h"

#include "kv/system.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>

/* One step: short enough for a prompt stop, for a carve that waits for the address space's lock, and for an engine that
 * wants the core again. */
#define CHUNK    ((uint64_t)256 << 10)
#define PAUSE_NS 20000000
#define HUGE     ((uint64_t)2 << 20) /* as one page about the work of a small step */

/* How much is held against the limits of memory at a time, and what is left of them for everything else. */
#define ROOM_STEP ((uint64_t)16 << 20)
#define ROOM_LEFT ((uint64_t)8 << 20)

/* An entry of the queue: who wants to have the slab back tries QUEUED -> DROPPED; when it is too late, `halt` ends the
 * touching within a chunk. No lock: who wants it back waits for nothing. */
typedef enum entry_state { QUEUED, TOUCHED, DROPPED } entry_state_t;
typedef struct entry {
	kvs_slab_t *slab;
	uint64_t ticket;
	atomic_int state;
	atomic_int halt;
} entry_t;

struct kvs_prefault {
	const kv_env_t *env;
	kvs_prefault_config_t config;
	pthread_t thread;
	kvs_idle_t *idle; /* an engine may compute on the same cores, in threads that wait for each other */
	sem_t work;       /* posted once for each slab and once for the stop */
	atomic_int stop;
	atomic_int paused;
	_Atomic uint64_t count; /* entries [done, count) of the ring are waiting or in work */
	_Atomic uint64_t done;
	_Atomic uint64_t hurry; /* slabs up to this ticket are waited for */
	uint32_t cap;
	int collapses;         /* the thread's: huge pages are worth trying */
	_Atomic int collapsed; /* there is one */
	entry_t *ring;
};

/* Memory that is short is refused to nobody: somebody is killed. What is about to be touched must fit. */
static int is_short(const kvs_prefault_t *p, uint64_t bytes)
{
	return p->config.room && p->config.room(p->config.room_ctx) < bytes + ROOM_LEFT;
}

/* The step at `at`: bytes that exist now, or -errno. A huge page costs a tenth of the small ones in its place, here and
 * wherever it is used. */
static int64_t touch_step(kvs_prefault_t *p, const entry_t *entry, const kvs_shm_t *area, uint64_t at)
{
	const uint64_t step = entry->slab->huge ? HUGE : CHUNK, left = area->bytes - at, n = left < step ? left : step;
	int error;

	if (p->collapses && !entry->slab->huge && left >= HUGE && ((uintptr_t)area->base + at) % HUGE == 0) {
		error = p->config.sys->collapse(area->base + at);
		if (!error) {
			atomic_store_explicit(&p->collapsed, 1, memory_order_relaxed);
			return (int64_t)HUGE;
		}
		p->collapses = error != -EINVAL;
	}
	error = kvs_shm_populate(p->config.sys, area->base + at, n);

	return error ? error : (int64_t)n;
}

static int is_halted(const kvs_prefault_t *p, const entry_t *entry)
{
	return atomic_load_explicit(&p->stop, memory_order_relaxed) ||
	       atomic_load_explicit(&entry->halt, memory_order_relaxed);
}

static int is_urgent(const kvs_prefault_t *p, const entry_t *entry)
{
	return atomic_load_explicit(&p->hurry, memory_order_relaxed) >= entry->ticket;
}

static void wait_for_time(kvs_prefault_t *p, const entry_t *entry)
{
	if (!is_urgent(p, entry)) {
		kvs_idle_wait(p->idle);
	}
	while (atomic_load_explicit(&p->paused, memory_order_relaxed) && !is_halted(p, entry) && !is_urgent(p, entry)) {
		(void)nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
	}
}

/* 0 or -errno. Of reserved huge pages all or nothing is said to be there: where they end, the slab is replaced. */
static int touch_data(kvs_prefault_t *p, const entry_t *entry)
{
	kvs_slab_t *slab = entry->slab;
	const kvs_shm_t *area = &slab->data;
	uint64_t at = atomic_load_explicit(&slab->ready_bytes, memory_order_relaxed), held = at;

	while (at < area->bytes) {
		int64_t n;

		wait_for_time(p, entry);
		if (is_halted(p, entry)) {
			return 0;
		}
		if (at >= held && !slab->huge) {
			held = area->bytes - at < ROOM_STEP ? area->bytes : at + ROOM_STEP;
			if (is_short(p, held - at)) {
				return -ENOMEM;
			}
		}
		n = touch_step(p, entry, area, at);
		if (n < 0) {
			return (int)n;
		}
		at += (uint64_t)n;
		if (!slab->huge) {
			kvs_slab_set_ready(slab, at);
		}
	}
	kvs_slab_set_ready(slab, area->bytes);

	return 0;
}

static void touch_slab(kvs_prefault_t *p, entry_t *entry)
{
	int queued = QUEUED, error;
	kvs_slab_t *slab = entry->slab;

	if (!atomic_compare_exchange_strong(&entry->state, &queued, TOUCHED)) {
		return;
	}
	wait_for_time(p, entry);
	error = is_short(p, slab->digest.bytes + slab->records.bytes) ? -ENOMEM : kvs_slab_open(slab, p->config.sys);
	if (!error) {
		error = touch_data(p, entry);
	}
	atomic_store_explicit(&slab->error, -error, memory_order_release);
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

kv_status_t kvs_prefault_start(const kvs_prefault_config_t *config, const kv_env_t *env, kvs_prefault_t **p_prefault)
{
	kvs_prefault_t *p = kv_alloc(env, sizeof *p);
	sigset_t all, old;
	kv_status_t status = KV_ERR_NOMEM;
	int error = 0;

	if (!p) {
		return KV_ERR_NOMEM;
	}
	p->env = env;
	p->config = *config;
	p->cap = config->max_slabs;
	p->collapses = config->huge && config->sys->collapse;
	p->ring = kv_alloc(env, p->cap * sizeof *p->ring);
	if (!p->ring || sem_init(&p->work, 0, 0) != 0) {
		goto err_ring;
	}

	/* Signals belong to the daemon's loop. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	status = kvs_idle_start(env, &p->idle);
	if (status == KV_OK) {
		error = pthread_create(&p->thread, NULL, prefault_main, p);
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (error) {
		status = kv_refused(env, "pool", "pthread_create", error);
	}
	if (status != KV_OK) {
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
	return status;
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
		atomic_store_explicit(&slab->error, EAGAIN, memory_order_relaxed); /* it is far behind */
		return;
	}
	atomic_store_explicit(&slab->error, 0, memory_order_relaxed);
	entry->slab = slab;
	entry->ticket = n + 1u;
	atomic_store_explicit(&entry->state, QUEUED, memory_order_relaxed);
	atomic_store_explicit(&entry->halt, 0, memory_order_relaxed);
	slab->ticket = n + 1u;
	atomic_store_explicit(&prefault->count, n + 1u, memory_order_release);
	sem_post(&prefault->work);
}

void kvs_prefault_hurry(kvs_prefault_t *prefault, const kvs_slab_t *slab)
{
	if (atomic_load_explicit(&prefault->hurry, memory_order_relaxed) < slab->ticket) {
		atomic_store_explicit(&prefault->hurry, slab->ticket, memory_order_relaxed);
		kvs_idle_wake(prefault->idle);
	}
}

int kvs_prefault_is_done(const kvs_prefault_t *prefault, const kvs_slab_t *slab)
{
	return !prefault || atomic_load_explicit(&prefault->done, memory_order_acquire) >= slab->ticket;
}

int kvs_prefault_drop(kvs_prefault_t *prefault, const kvs_slab_t *slab)
{
	entry_t *entry;
	int queued = QUEUED;

	if (kvs_prefault_is_done(prefault, slab)) {
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
