/* A mirror is as large as the index may be: it is touched when its namespace has its first client, in a thread. */
#include "io/members/mirror.h"

#include "base/memory.h"

#include "kv/system.h"
#include "kv/log.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#define ROOM_LEFT ((uint64_t)8 << 20) /* of memory, for everything else */

typedef struct kvd_mirror_touch {
	pthread_t thread;
	kvd_shm_region_t area;
	kv_status_t status;
	atomic_int done;
} kvd_mirror_touch_t;

static void *touch_main(void *arg)
{
	kvd_mirror_touch_t *touch = arg;

	touch->status = kvd_memory_room(NULL) < touch->area.bytes + ROOM_LEFT
				? KV_ERR_NOMEM
				: kvd_shm_region_touch(&touch->area, touch->area.bytes);
	atomic_store_explicit(&touch->done, 1, memory_order_release);

	return NULL;
}

static kv_status_t begin(kvd_namespace_t *ns)
{
	kvd_mirror_touch_t *touch = calloc(1, sizeof *touch);
	sigset_t all, old;
	int error;

	if (!touch) {
		return KV_ERR_NOMEM;
	}
	touch->area = ns->mirror;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old); /* signals belong to the loop */
	error = pthread_create(&touch->thread, NULL, touch_main, touch);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (error) {
		free(touch);
		return kv_refused(&kv_env_posix, "io", "pthread_create", error);
	}
	ns->touch = touch;

	return KV_PENDING;
}

kv_status_t kvd_mirror_touch(kvd_namespace_t *ns)
{
	if (ns->mirror.touched) {
		return KV_OK;
	}
	if (!ns->touch) {
		return begin(ns);
	}
	if (!atomic_load_explicit(&ns->touch->done, memory_order_acquire)) {
		return KV_PENDING;
	}

	kv_status_t status = ns->touch->status;

	kvd_mirror_close(ns);
	ns->mirror.touched = status == KV_OK;
	if (status != KV_OK && !ns->mirror_refused) { /* engines ask again and again */
		kv_log(KV_LOG_WARN, "io",
		       "no memory for the mirror of namespace %s, whose size follows from index.max_blocks: no engine can "
		       "attach bytes %zu",
		       ns->name, ns->mirror.bytes);
	}
	ns->mirror_refused = status != KV_OK;

	return status;
}

void kvd_mirror_close(kvd_namespace_t *ns)
{
	if (ns->touch) {
		pthread_join(ns->touch->thread, NULL);
		free(ns->touch);
		ns->touch = NULL;
	}
}
