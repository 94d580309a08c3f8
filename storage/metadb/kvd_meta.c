/* kvd-meta: the metadata process. RocksDB runs here and nowhere else; the disk tier starts, asks and ends it
 * (metadb.h). */
#include "kv/log.h"
#include "kv/system.h"
#include "wire.h"
#include "rocks.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

/* A process killed before this one holds the lock until the kernel has ended its writes. */
#define LOCK_TRIES    1000u
#define LOCK_PAUSE_US 10000u

#define LIBRARY_THREADS 6u /* no more at a time */

static kv_status_t open_database(char **argv, kvs_rocks_t **p_db, int *p_marked)
{
	uint64_t allowance = strtoull(argv[2], NULL, 10);
	uint64_t uuid = strtoull(argv[3], NULL, 10);
	int writes = strcmp(argv[4], "write") == 0;
	kv_status_t status = kvs_rocks_open(argv[1], writes, allowance, uuid, p_db, p_marked);

	for (uint32_t i = 0; status == KV_ERR_LOCKED && i < LOCK_TRIES; i++) {
		usleep(LOCK_PAUSE_US);
		status = kvs_rocks_open(argv[1], writes, allowance, uuid, p_db, p_marked);
	}

	return status;
}

static int send_answer(kvs_meta_message_t *m, kv_status_t status)
{
	size_t bytes;

	m->version = KVS_META_VERSION;
	m->change_bytes = sizeof(kvs_row_change_t);
	m->status = status;
	m->count = status == KV_OK ? m->count : 0;
	bytes = kvs_meta_bytes(m->count);

	return send(KVS_META_FD, m, bytes, MSG_NOSIGNAL) == (ssize_t)bytes && status == KV_OK;
}

/* Rows for the next SCAN, read while the daemon takes those of the last one in. */
static struct {
	int is_there;
	kv_status_t status;
	uint64_t from;
	uint32_t count;
	int more;
	kvs_row_change_t change[KVS_META_CHANGES];
} ahead;

static void read_ahead(kvs_rocks_t *db, uint64_t from)
{
	ahead.is_there = 1;
	ahead.from = from;
	ahead.status = kvs_rocks_read(db, from, ahead.change, KVS_META_CHANGES, &ahead.count, &ahead.more);
}

static kv_status_t scan(kvs_rocks_t *db, kvs_meta_message_t *m)
{
	if (!ahead.is_there || ahead.from != m->from) {
		read_ahead(db, m->from);
	}
	ahead.is_there = 0;
	m->count = ahead.count;
	m->flags = ahead.more ? KVS_META_MORE : 0;
	memcpy(m->change, ahead.change, m->count * sizeof *m->change);

	return ahead.status;
}

/* The answer's fields replace the request's. */
static kv_status_t handle_request(kvs_rocks_t *db, kvs_meta_message_t *m)
{
	int sync = (m->flags & KVS_META_SYNC) != 0;
	kv_status_t status = KV_ERR_PROTO;

	if (m->verb == KVS_META_WRITE) {
		ahead.is_there = 0;
		for (uint32_t i = 0; i < m->count; i++) {
			kvs_rocks_add(db, &m->change[i]);
		}
		if (m->flags & KVS_META_MORE) {
			return KV_OK;
		}
	}
	m->flags = 0;
	m->count = 0;
	if (m->verb == KVS_META_WRITE) {
		status = kvs_rocks_commit(db, sync);
	} else if (m->verb == KVS_META_MARK) {
		status = kvs_rocks_mark(db, sync);
	} else if (m->verb == KVS_META_CLOSE) {
		status = kvs_rocks_close(db);
	} else if (m->verb == KVS_META_SCAN) {
		status = scan(db, m);
	}

	return status;
}

/* Returns when the daemon has closed its end, or when an answer was not OK. */
static void serve_requests(kvs_rocks_t *db)
{
	static kvs_meta_message_t m;

	while (1) {
		ssize_t n = recv(KVS_META_FD, &m, sizeof m, 0);
		uint32_t verb;
		int silent;

		if (n < 0 && errno == EINTR) {
			continue;
		}
		if (n <= 0 || !kvs_meta_is_whole(&m, (size_t)n)) {
			return;
		}
		verb = m.verb;
		silent = verb == KVS_META_WRITE && (m.flags & KVS_META_MORE);
		if (silent) {
			(void)handle_request(db, &m);
		} else if (!send_answer(&m, handle_request(db, &m)) || verb == KVS_META_CLOSE) {
			return;
		} else if (verb == KVS_META_SCAN && (m.flags & KVS_META_MORE)) {
			read_ahead(db, kvs_meta_row_id(&m.change[m.count - 1u].row) + 1u);
		}
	}
}

static void *wait_for_lock(void *arg)
{
	pthread_mutex_lock(arg);
	pthread_mutex_unlock(arg);

	return NULL;
}

/* The library aborts where it gets no thread. */
static kv_status_t try_threads(void)
{
	pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	pthread_t threads[LIBRARY_THREADS];
	kv_status_t status = KV_OK;
	uint32_t count = 0;
	int error = 0;

	pthread_mutex_lock(&lock);
	while (count < LIBRARY_THREADS && error == 0) {
		error = pthread_create(&threads[count], NULL, wait_for_lock, &lock);
		count += error == 0;
	}
	if (error) { /* while they count for the limit */
		status = kv_refused(&kv_env_posix, "meta", "pthread_create", error);
	}
	pthread_mutex_unlock(&lock);
	while (count > 0) {
		pthread_join(threads[--count], NULL);
	}

	return status;
}

int main(int argc, char **argv)
{
	const struct rlimit none = {0, 0};
	kvs_meta_message_t opened = {.verb = KVS_META_OPEN};
	kvs_rocks_t *db = NULL;
	kv_status_t status;
	int type = 0, marked = 0;
	socklen_t len = sizeof type;

	if (kv_version_asked(argc, argv, "kvd-meta")) {
		return 0;
	}
	if (argc != 5 || getsockopt(KVS_META_FD, SOL_SOCKET, SO_TYPE, &type, &len) != 0 || type != SOCK_SEQPACKET) {
		fprintf(stderr, "kvd-meta: kvd starts this program for its disk tier; it does nothing alone\n");
		return kv_status_exit_code(KV_ERR_ARG);
	}
	prctl(PR_SET_NAME, "kvd-meta");
	prctl(PR_SET_PDEATHSIG, SIGKILL); /* also when it is stopped, which an end of file would not wake */
	(void)setrlimit(RLIMIT_CORE, &none);
	close(KVS_META_FD + 1); /* the program itself */
	status = try_threads();
	if (status == KV_OK) {
		status = open_database(argv, &db, &marked);
	}
	opened.flags = marked ? KVS_META_MARKED : 0;
	if (send_answer(&opened, status)) {
		serve_requests(db);
	}

	_exit(0); /* past the library's own ends: they may abort after a failed write */
}
