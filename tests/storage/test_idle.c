/* Time that nobody else wants: a machine that is busy just when the test says so. */
#include "cpu/slab/idle.h"

#include "kv_cmocka.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <unistd.h>

static pthread_mutex_t busy_ = PTHREAD_MUTEX_INITIALIZER; /* while the test has it the thread of idle.c gets no time */
static __thread int other_;                               /* 1: not that thread */
static atomic_uint answers_;

/* What idle.c calls in place of sem_wait() here. */
int wait_while_busy(sem_t *sem);

int wait_while_busy(sem_t *sem)
{
	int result = sem_wait(sem);

	if (!other_ && result == 0) {
		pthread_mutex_lock(&busy_);
		pthread_mutex_unlock(&busy_);
		atomic_fetch_add(&answers_, 1);
	}

	return result;
}

#define WAKES 50u

static kvs_idle_t *idle_;
static atomic_uint waits_;
static atomic_int over_;

static void *wait_again_and_again(void *arg)
{
	(void)arg;
	other_ = 1;
	while (!atomic_load(&over_)) {
		kvs_idle_wait(idle_);
		atomic_fetch_add(&waits_, 1);
	}

	return NULL;
}

KV_TEST(p5_waits_cut_short_are_not_made_up_for_when_there_is_no_time)
{
	pthread_t waiter;
	uint32_t before;

	other_ = 1;
	assert_int_equal(kvs_idle_start(&kv_env_posix, &idle_), KV_OK);
	for (uint32_t i = 0; i < WAKES; i++) {
		kvs_idle_wake(idle_);
		kvs_idle_wait(idle_);
	}
	do {
		before = atomic_load(&answers_);
		usleep(50000);
	} while (atomic_load(&answers_) != before);

	pthread_mutex_lock(&busy_);
	assert_int_equal(pthread_create(&waiter, NULL, wait_again_and_again, NULL), 0);
	usleep(100000);
	before = atomic_load(&waits_);
	assert_in_range(before, 0, 2);
	kvs_idle_wake(idle_);
	for (int i = 0; i < 10000 && atomic_load(&waits_) == before; i++) {
		usleep(1000);
	}
	assert_int_equal(atomic_load(&waits_), before + 1);

	pthread_mutex_unlock(&busy_);
	atomic_store(&over_, 1);
	kvs_idle_stop(idle_);
	assert_int_equal(pthread_join(waiter, NULL), 0);
	kvs_idle_free(idle_);
}
