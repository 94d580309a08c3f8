#include "maker.h"

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/prctl.h>

struct kvs_maker {
	const kvs_sys_t *sys;
	const kv_env_t *env;
	pthread_t thread;
	sem_t wanted;
	sem_t made;
	uint8_t *at; /* NULL: the end */
	int result;
};

static void wait_for(sem_t *sem)
{
	while (sem_wait(sem) != 0) {
	}
}

static void *run(void *arg)
{
	kvs_maker_t *maker = arg;

	(void)prctl(PR_SET_NAME, "kvd-huge", 0, 0, 0);
	for (wait_for(&maker->wanted); maker->at; wait_for(&maker->wanted)) {
		maker->result = maker->sys->collapse(maker->at);
		sem_post(&maker->made);
	}

	return NULL;
}

static int start_thread(kvs_maker_t *maker)
{
	sigset_t all, before;
	int error;

	/* Signals belong to the daemon's loop. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	error = pthread_create(&maker->thread, NULL, run, maker);
	pthread_sigmask(SIG_SETMASK, &before, NULL);

	return error;
}

kvs_maker_t *kvs_maker_start(const kvs_sys_t *sys, const kv_env_t *env)
{
	kvs_maker_t *maker = kv_alloc(env, sizeof *maker);

	if (!maker) {
		return NULL;
	}
	maker->sys = sys;
	maker->env = env;
	if (sem_init(&maker->wanted, 0, 0) != 0) {
		goto err_free;
	}
	if (sem_init(&maker->made, 0, 0) != 0) {
		goto err_wanted;
	}
	if (start_thread(maker) != 0) {
		goto err_made;
	}

	return maker;

err_made:
	sem_destroy(&maker->made);
err_wanted:
	sem_destroy(&maker->wanted);
err_free:
	kv_free(env, maker);
	return NULL;
}

int kvs_maker_make(kvs_maker_t *maker, uint8_t *at)
{
	maker->at = at;
	sem_post(&maker->wanted);
	wait_for(&maker->made);

	return maker->result;
}

void kvs_maker_stop(kvs_maker_t *maker)
{
	if (!maker) {
		return;
	}
	maker->at = NULL;
	sem_post(&maker->wanted);
	pthread_join(maker->thread, NULL);
	sem_destroy(&maker->made);
	sem_destroy(&maker->wanted);
	kv_free(maker->env, maker);
}
