#include "idle.h"

#include "kv/system.h"
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>

struct kvs_idle {
	sem_t ask; /* somebody waits, or the end */
	sem_t told;
	atomic_int woken;
	atomic_int stop, end;
	atomic_int users; /* its owner and its thread: the last of them frees it */
};

static void wait_semaphore(sem_t *sem)
{
	while (sem_wait(sem) != 0) {
	}
}

static void drop_user(kvs_idle_t *idle)
{
	if (atomic_fetch_sub(&idle->users, 1) == 1) {
		sem_destroy(&idle->ask);
		sem_destroy(&idle->told);
		free(idle);
	}
}

static void *idle_main(void *arg)
{
	static const struct sched_param none;
	kvs_idle_t *idle = arg;

	(void)pthread_setschedparam(pthread_self(), SCHED_IDLE, &none);
	wait_semaphore(&idle->ask);
	while (!atomic_load(&idle->end)) {
		sem_post(&idle->told);
		wait_semaphore(&idle->ask);
	}
	drop_user(idle);

	return NULL;
}

kv_status_t kvs_idle_start(const kv_env_t *env, kvs_idle_t **p_idle)
{
	kvs_idle_t *idle = calloc(1, sizeof *idle); /* outlives its user's environment */
	pthread_attr_t alone;
	pthread_t thread;

	kv_status_t status = KV_ERR_NOMEM;
	int error;

	if (!idle || sem_init(&idle->ask, 0, 0) != 0 || sem_init(&idle->told, 0, 0) != 0 ||
	    pthread_attr_init(&alone) != 0) {
		goto err_idle;
	}
	atomic_store(&idle->users, 2);
	(void)pthread_attr_setdetachstate(&alone, PTHREAD_CREATE_DETACHED);
	error = pthread_create(&thread, &alone, idle_main, idle);
	if (error) {
		status = kv_refused(env, "pool", "pthread_create", error);
		goto err_attr;
	}
	(void)pthread_attr_destroy(&alone);
	*p_idle = idle;

	return KV_OK;

err_attr:
	(void)pthread_attr_destroy(&alone);
err_idle:
	free(idle);
	return status;
}

void kvs_idle_wait(kvs_idle_t *idle)
{
	if (atomic_load(&idle->stop)) {
		return;
	}
	/* Answers to waits that were cut short: they say nothing of now, and would add up. */
	while (sem_trywait(&idle->told) == 0) {
	}
	if (!atomic_load(&idle->woken) && !atomic_load(&idle->stop)) {
		sem_post(&idle->ask);
		wait_semaphore(&idle->told);
	}
	(void)atomic_exchange(&idle->woken, 0);
}

void kvs_idle_wake(kvs_idle_t *idle)
{
	atomic_store(&idle->woken, 1);
	sem_post(&idle->told);
}

void kvs_idle_stop(kvs_idle_t *idle)
{
	atomic_store(&idle->stop, 1);
	kvs_idle_wake(idle);
}

void kvs_idle_free(kvs_idle_t *idle)
{
	if (idle) {
		atomic_store(&idle->end, 1);
		sem_post(&idle->ask);
		drop_user(idle);
	}
}
