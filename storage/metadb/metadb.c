/* The disk tier's end of the metadata process: see metadb.h. */
#include "metadb.h"

#include "fs_status.h"
#include "wire.h"

#include "kv/system.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/pidfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#define OPEN_MS     30000 /* replaying the log after a crash, on a slow device, and waiting for a lock */
#define ANSWER_MS   10000
#define CLOSE_MS    2000 /* the rows are in the log, if not in their place: a kill loses none */
#define REAP_MS     2000
#define FULL        (1u << 20)             /* a file system with less room than this is full */
#define HIGH_FD     16                     /* below it the process's own descriptors are put in place */
#define START_NS    UINT64_C(3000000000)   /* so long a start tries to open the database */
#define GIVE_UP_NS  UINT64_C(600000000000) /* one that has not opened for so long is replaced */
#define WAIT_MIN_NS UINT64_C(100000000)    /* between such processes */
#define WAIT_MAX_NS UINT64_C(60000000000)

typedef enum belief {
	UNKNOWN, /* not opened yet */
	MARKED,  /* rows say everything */
	PARTIAL, /* they do not: the database has no mark, and the next start reads headers */
} belief_t;

struct kvs_metadb {
	const kv_env_t *env;
	kvs_metadb_config_t config;
	belief_t belief;
	int aside; /* the database has to be moved aside before it is opened */
	int program_fd;
	int fd;    /* our end of the pair; -1: no process */
	pid_t pid; /* 0: none; else not yet reaped */
	int pidfd;
	int opened;    /* this process has opened the database, */
	int served;    /* and done something well with it */
	int read_only; /* this process opened the database without writing to it */
	int lost;      /* rows were lost since kvs_metadb_open() or kvs_metadb_replace() */
	/* No process is started before retry_ns: the last one did not open the database, or had no room. */
	kv_status_t failed;
	uint64_t retry_ns, wait_ns;
	uint64_t failing_ns; /* since then the database has not opened, for want of nothing else; 0: it has */
	uint64_t number;     /* of the last request */
	kvs_meta_message_t ask;
	kvs_meta_message_t answer;
};

/* ---- the process ----------------------------------------------------------------------------- */

/* 1: it is gone, or there was none. */
static int reap(kvs_metadb_t *db, int wait_ms)
{
	struct pollfd gone = {.fd = db->pidfd, .events = POLLIN};
	int wstatus;

	if (db->pid == 0) {
		return 1;
	}
	(void)poll(&gone, 1, wait_ms);
	if (waitpid(db->pid, &wstatus, WNOHANG) != db->pid) {
		return 0;
	}
	if (WIFSIGNALED(wstatus)) {
		kv_logf(db->env, KV_LOG_ERROR, "nvme", "the metadata process has died: signal %d pid %d",
			WTERMSIG(wstatus), (int)db->pid);
	}
	close(db->pidfd);
	db->pid = 0;
	db->pidfd = -1;

	return 1;
}

/* One that has hung up is about to end; another one is killed. A process the kernel holds back is reaped
 * before the next one starts. */
static void end_process(kvs_metadb_t *db, int has_hung_up)
{
	if (db->fd >= 0) {
		close(db->fd);
		db->fd = -1;
	}
	if (!reap(db, has_hung_up ? REAP_MS : 0)) {
		kill(db->pid, SIGKILL);
		(void)reap(db, REAP_MS);
	}
}

static int spawn(kvs_metadb_t *db, int socket_fd)
{
	char allowance[24], uuid[24];
	char *argv[] = {"kvd-meta", (char *)(uintptr_t)db->config.path,    allowance,
			uuid,       db->read_only ? "read-only" : "write", NULL};
	posix_spawn_file_actions_t files;
	posix_spawnattr_t attr;
	sigset_t none, all;
	int result;

	snprintf(allowance, sizeof allowance, "%llu", (unsigned long long)db->config.allowance);
	snprintf(uuid, sizeof uuid, "%llu", (unsigned long long)db->config.uuid);
	sigemptyset(&none);
	sigfillset(&all);
	posix_spawn_file_actions_init(&files);
	posix_spawn_file_actions_adddup2(&files, socket_fd, KVS_META_FD);
	posix_spawn_file_actions_adddup2(&files, db->program_fd, KVS_META_FD + 1);
	posix_spawn_file_actions_addclosefrom_np(&files, KVS_META_FD + 2);
	posix_spawnattr_init(&attr);
	posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
	posix_spawnattr_setsigmask(&attr, &none);
	posix_spawnattr_setsigdefault(&attr, &all);
	/* By descriptor: a package that is upgraded meanwhile does not bring in a program of another version. */
	result = posix_spawn(&db->pid, "/proc/self/fd/4", &files, &attr, argv, environ);
	posix_spawnattr_destroy(&attr);
	posix_spawn_file_actions_destroy(&files);
	if (result != 0) {
		db->pid = 0;
	}

	return result;
}

static kv_status_t start_process(kvs_metadb_t *db)
{
	int pair[2];
	int theirs;
	const char *call = "fcntl";
	int result;

	if (!reap(db, 0)) {
		return KV_ERR_LOCKED; /* the kernel holds the old one back, and the old one the database */
	}
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
		return kv_refused(db->env, "nvme", "socketpair", errno);
	}
	theirs = fcntl(pair[1], F_DUPFD_CLOEXEC, HIGH_FD);
	result = theirs < 0 ? errno : 0;
	close(pair[1]);
	if (theirs >= 0) {
		call = "posix_spawn";
		result = spawn(db, theirs);
		close(theirs);
	}
	if (result == 0) {
		call = "pidfd_open";
		db->pidfd = pidfd_open(db->pid, 0);
		result = db->pidfd < 0 ? errno : 0;
	}
	if (result != 0) {
		if (db->pid > 0) {
			kill(db->pid, SIGKILL);
			(void)waitpid(db->pid, NULL, 0);
			db->pid = 0;
		}
		close(pair[0]);
		return kv_refused(db->env, "nvme", call, result);
	}
	db->fd = pair[0];
	db->opened = db->served = 0;

	return KV_OK;
}

/* ---- messages -------------------------------------------------------------------------------- */

static int is_full(const kvs_metadb_t *db)
{
	struct statvfs room;

	return fstatvfs(db->config.dir_fd, &room) == 0 && (uint64_t)room.f_bavail * room.f_frsize < FULL;
}

/* It would only fail again: the next process comes at once, but then each after a pause. */
static kv_status_t put_off_start(kvs_metadb_t *db, kv_status_t status)
{
	uint64_t wait = 2 * db->wait_ns;

	db->retry_ns = kv_now_ns(db->env) + db->wait_ns;
	db->wait_ns = wait < WAIT_MIN_NS ? WAIT_MIN_NS : wait > WAIT_MAX_NS ? WAIT_MAX_NS : wait;
	db->failed = status;

	return status;
}

static kv_status_t give_up(kvs_metadb_t *db, kv_status_t status, const char *why)
{
	const int has_hung_up = status == KV_ERR_CLOSED || status == KV_ERR_IO, pid = (int)db->pid;
	const char *cause = status == KV_ERR_CLOSED ? "why is unknown" : kv_status_text(status);

	/* The library aborts after a write that found no room, and what it had allocated goes with it: there may be
	 * room now. */
	if (has_hung_up && (is_full(db) || db->failed == KV_ERR_NOSPC)) {
		status = KV_ERR_NOSPC;
		cause = kv_status_text(status);
	}
	status = status == KV_ERR_CLOSED ? KV_ERR_IO : status;
	end_process(db, has_hung_up);
	kv_logf(db->env, KV_LOG_ERROR, "nvme", "the metadata process %s: %s pid %d", why, cause, pid);
	db->failed = status;

	return db->opened && status != KV_ERR_NOSPC ? status : put_off_start(db, status);
}

static kv_status_t send_ask(kvs_metadb_t *db)
{
	size_t bytes = kvs_meta_bytes(db->ask.count);
	struct pollfd room = {.fd = db->fd, .events = POLLOUT};
	ssize_t n;

	db->ask.version = KVS_META_VERSION;
	db->ask.change_bytes = sizeof(kvs_row_change_t);
	db->ask.number = ++db->number;
	do {
		int ready = poll(&room, 1, ANSWER_MS);

		if (ready == 0) {
			return give_up(db, KV_ERR_TIMEOUT, "takes no request");
		}
		n = send(db->fd, &db->ask, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
	} while (n < 0 && (errno == EINTR || errno == EAGAIN));

	return n == (ssize_t)bytes ? KV_OK : give_up(db, KV_ERR_CLOSED, "has gone");
}

static int is_known(int32_t status)
{
	return status == KV_OK || status == KV_ERR_NOSPC || status == KV_ERR_CORRUPT || status == KV_ERR_LOCKED ||
	       status == KV_ERR_IO || status == KV_ERR_NOMEM || status == KV_ERR_PROTO || status == KV_ERR_BUSY ||
	       status == KV_ERR_PATH || status == KV_ERR_REFUSED;
}

static kv_status_t take_answer(kvs_metadb_t *db, kvs_meta_verb_t verb, int wait_ms)
{
	const kvs_meta_message_t *m = &db->answer;
	struct pollfd wait = {.fd = db->fd, .events = POLLIN};
	ssize_t n;

	do {
		int ready = poll(&wait, 1, wait_ms);

		if (ready == 0) {
			return give_up(db, KV_ERR_TIMEOUT, "does not answer and is killed");
		}
		n = recv(db->fd, &db->answer, sizeof db->answer, MSG_DONTWAIT | MSG_TRUNC);
	} while (n < 0 && (errno == EINTR || errno == EAGAIN));
	if (n <= 0) {
		return give_up(db, KV_ERR_CLOSED, "has gone");
	}
	if ((size_t)n > sizeof *m || !kvs_meta_is_whole(m, (size_t)n) || m->verb != verb || m->number != db->number ||
	    !is_known(m->status) || (m->count > 0 && verb != KVS_META_SCAN)) {
		return give_up(db, KV_ERR_PROTO, "gave an answer that makes no sense");
	}
	if (m->status != KV_OK) {
		return give_up(db, (kv_status_t)m->status, "reports a failure");
	}
	db->opened = 1;
	if (verb != KVS_META_OPEN && !db->read_only) {
		db->served = 1;
		db->failed = KV_OK;
	}
	db->wait_ns = db->failed == KV_ERR_NOSPC ? db->wait_ns : 0; /* a full database opens well, and fails again */

	return KV_OK;
}

static kv_status_t exchange(kvs_metadb_t *db, kvs_meta_verb_t verb, int wait_ms)
{
	kv_status_t status;

	db->ask.verb = verb;
	db->ask.flags = db->config.sync ? KVS_META_SYNC : 0;
	status = send_ask(db);

	return status == KV_OK ? take_answer(db, verb, wait_ms) : status;
}

/* ---- the database ---------------------------------------------------------------------------- */

static void aside_path(const kvs_metadb_t *db, char out[PATH_MAX])
{
	snprintf(out, PATH_MAX, "%s.lost", db->config.path);
}

/* Remove a database's directory and the files in it. */
static void remove_directory(const char *path)
{
	DIR *dir = opendir(path);
	const struct dirent *entry;

	if (!dir) {
		unlink(path); /* it may be anything */
		return;
	}
	while ((entry = readdir(dir)) != NULL) {
		if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
			unlinkat(dirfd(dir), entry->d_name, 0);
		}
	}
	closedir(dir);
	rmdir(path);
}

/* Under another name, for good: a marked database that came back after a power loss would be believed without its last
 * rows. */
static kv_status_t move_aside(kvs_metadb_t *db)
{
	char aside[PATH_MAX];

	aside_path(db, aside);
	remove_directory(aside);
	if ((rename(db->config.path, aside) != 0 && errno != ENOENT) ||
	    (db->config.sync && fsync(db->config.dir_fd) != 0)) {
		kv_logf(db->env, KV_LOG_ERROR, "nvme", "cannot move the metadata aside: %s path %s", strerror(errno),
			db->config.path);
		return kvs_fs_status(errno);
	}
	db->aside = 0;
	db->belief = PARTIAL;
	db->lost = 1;
	kv_logf(db->env, KV_LOG_WARN, "nvme",
		"the metadata is lost or damaged; the slots' headers say what there is path %s", db->config.path);

	return KV_OK;
}

/* Opened: may it be used? KV_ERR_CORRUPT: it has to go. */
static kv_status_t check_opened(kvs_metadb_t *db)
{
	int is_marked = (db->answer.flags & KVS_META_MARKED) != 0;
	char aside[PATH_MAX];

	if (is_marked && db->belief == PARTIAL) {
		end_process(db, 0);
		return KV_ERR_CORRUPT; /* it has its mark, and not all rows */
	}
	if (!is_marked && db->belief == MARKED) {
		kv_logf(db->env, KV_LOG_WARN, "nvme", "the metadata was lost; the next start reads the slots' headers");
	}
	db->belief = is_marked ? MARKED : PARTIAL;
	if (db->belief == PARTIAL) {
		aside_path(db, aside);
		remove_directory(aside);
	}

	return KV_OK;
}

static kv_status_t open_once(kvs_metadb_t *db)
{
	kv_status_t status = db->aside ? move_aside(db) : KV_OK;

	if (status == KV_OK) {
		kv_metric_add(db->config.metrics, KV_M_META_STARTS, 1);
		status = start_process(db);
	}
	if (status != KV_OK) {
		return put_off_start(db, status);
	}
	db->number = 0;
	status = take_answer(db, KVS_META_OPEN, OPEN_MS);

	return status == KV_OK ? check_opened(db) : status;
}

/* Has the database itself had its time? A full file system, a foreign lock or a lack of memory says nothing of it. */
static int is_hopeless(kvs_metadb_t *db, kv_status_t status)
{
	const uint64_t now = kv_now_ns(db->env);

	if (status != KV_ERR_IO && status != KV_ERR_PROTO && status != KV_ERR_TIMEOUT) {
		db->failing_ns = 0;
	} else if (db->failing_ns == 0) {
		db->failing_ns = now;
	}

	return db->failing_ns != 0 && now - db->failing_ns >= GIVE_UP_NS;
}

/* A process with the database open. Damage replaces it, as RocksDB reports it; an error of the device may pass, and
 * only ten minutes of it do. */
static kv_status_t get_ready(kvs_metadb_t *db)
{
	kv_status_t status = KV_OK;

	if (db->fd >= 0) {
		return KV_OK;
	}
	if (kv_now_ns(db->env) < db->retry_ns) {
		return db->failed;
	}
	status = open_once(db);
	if (is_hopeless(db, status) || status == KV_ERR_CORRUPT) {
		db->failing_ns = 0;
		db->aside = 1;
		status = open_once(db);
	}

	return status;
}

/* The same with one that writes. */
static kv_status_t get_writer(kvs_metadb_t *db)
{
	if (db->fd >= 0 && db->read_only) {
		return KV_ERR_NOSPC;
	}

	return get_ready(db);
}

kv_status_t kvs_metadb_create(const kvs_metadb_config_t *config, const kv_env_t *env, kvs_metadb_t **p_db)
{
	static const char name[] = "kvd-meta";
	char path[PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", path, sizeof path - sizeof name - 1u);
	kvs_metadb_t *db = kv_alloc(env, sizeof *db);
	const char *folder_end;
	int error;

	if (!db) {
		return KV_ERR_NOMEM;
	}

	*db = (kvs_metadb_t){.env = env, .config = *config, .fd = -1, .pidfd = -1};
	path[n > 0 ? n : 0] = '\0';
	folder_end = strrchr(path, '/');
	memcpy(path + (folder_end ? folder_end + 1 - path : 0), name, sizeof name);
	n = open(path, O_PATH | O_CLOEXEC);
	if (n < 0) {
		kv_logf(env, KV_LOG_ERROR, "nvme", "cannot open the metadata program: %s path %s", strerror(errno),
			path);
		kv_free(env, db);
		return KV_ERR_PATH;
	}
	db->program_fd = fcntl((int)n, F_DUPFD_CLOEXEC, HIGH_FD);
	error = errno;
	close((int)n);
	if (db->program_fd < 0) {
		kv_free(env, db);
		return kv_refused(env, "nvme", "fcntl", error);
	}
	*p_db = db;

	return KV_OK;
}

void kvs_metadb_close(kvs_metadb_t *db)
{
	if (!db) {
		return;
	}
	db->ask.count = 0;
	if (db->fd >= 0 && !db->read_only && exchange(db, KVS_META_CLOSE, CLOSE_MS) == KV_OK) {
		end_process(db, 1);
	}
	end_process(db, 0);
	close(db->program_fd);
	kv_free(db->env, db);
}

/* Open an empty database in the place of what is there. */
static kv_status_t open_empty(kvs_metadb_t *db)
{
	kv_status_t status;

	db->belief = PARTIAL;
	db->aside = 1;
	db->read_only = 0;
	db->retry_ns = 0;
	status = get_ready(db);
	db->lost = 0;

	return status;
}

int kvs_metadb_await_retry(const kvs_metadb_t *db, uint64_t until_ns)
{
	const uint64_t now = kv_now_ns(db->env), least = now + WAIT_MIN_NS;
	const uint64_t next = db->retry_ns > least ? db->retry_ns : least;

	if (next >= until_ns) {
		return 0;
	}
	(void)poll(NULL, 0, (int)((next - now) / 1000000u) + 1);

	return 1;
}

/* Without room nothing can be opened for writing; the rows are there all the same. */
static kv_status_t open_for_reading(kvs_metadb_t *db)
{
	kv_status_t status;

	db->read_only = 1;
	status = open_once(db);
	if (status == KV_OK && db->belief != MARKED) {
		end_process(db, 0);
		db->aside = 1;
		status = KV_ERR_NOSPC;
	}
	db->read_only = status == KV_OK;

	return status;
}

/* Of a process that was not started, or got no threads: it says nothing of the database. */
static int is_refused(kv_status_t status)
{
	return status == KV_ERR_BUSY || status == KV_ERR_REFUSED;
}

kv_status_t kvs_metadb_open(kvs_metadb_t *db, int has_slots, int must_open, int *p_marked)
{
	const uint64_t until = kv_now_ns(db->env) + START_NS;
	char aside[PATH_MAX];
	struct stat st;
	kv_status_t status;

	/* A database moved aside says that its successor was never finished. */
	aside_path(db, aside);
	db->aside = lstat(aside, &st) == 0;
	do {
		status = get_ready(db);
	} while ((status == KV_ERR_IO || status == KV_ERR_PATH || is_refused(status)) && !db->aside && !db->lost &&
		 kvs_metadb_await_retry(db, until));
	if (is_refused(status) && !db->aside && !db->lost) {
		return status;
	}
	if (status == KV_ERR_NOSPC && has_slots && !db->aside && !db->lost) {
		status = open_for_reading(db);
	}
	if (status == KV_OK && db->belief == PARTIAL && has_slots && !db->lost) {
		status = kvs_metadb_replace(db); /* whose rows they are is unknown */
	} else if (status != KV_OK && status != KV_ERR_NOSPC && (must_open || !has_slots)) {
		status = open_empty(db);
	}
	*p_marked = status == KV_OK && db->belief == MARKED;
	if (status != KV_OK && has_slots && !must_open && !db->lost && !db->aside) {
		return status;
	}
	db->aside |= status != KV_OK;
	db->belief = status == KV_OK ? db->belief : PARTIAL;
	db->lost = 0;

	return KV_OK;
}

kv_status_t kvs_metadb_replace(kvs_metadb_t *db)
{
	end_process(db, 0);

	return open_empty(db);
}

static kv_status_t send_changes(kvs_metadb_t *db, const kvs_row_change_t *change, uint32_t count)
{
	while (count > KVS_META_CHANGES) {
		kv_status_t status;

		db->ask.verb = KVS_META_WRITE;
		db->ask.flags = KVS_META_MORE;
		db->ask.count = KVS_META_CHANGES;
		memcpy(db->ask.change, change, KVS_META_CHANGES * sizeof *change);
		status = send_ask(db);
		if (status != KV_OK) {
			return status;
		}
		change += KVS_META_CHANGES;
		count -= KVS_META_CHANGES;
	}
	db->ask.count = count;
	memcpy(db->ask.change, change, count * sizeof *change);

	return exchange(db, KVS_META_WRITE, ANSWER_MS);
}

kv_status_t kvs_metadb_write(kvs_metadb_t *db, const kvs_row_change_t *change, uint32_t count)
{
	kv_status_t status = KV_OK;

	for (int tries = 0; tries < 2; tries++) {
		status = get_writer(db);
		if (status == KV_OK && count > 0) {
			status = send_changes(db, change, count);
		}
		/* A full file system and a process that hangs would only do so again. */
		if (status != KV_ERR_IO && status != KV_ERR_PROTO) {
			break;
		}
	}

	return status;
}

kv_status_t kvs_metadb_mark(kvs_metadb_t *db)
{
	kv_status_t status = db->lost ? KV_ERR_CORRUPT : get_writer(db);

	if (status == KV_OK && !db->lost) {
		db->ask.count = 0;
		status = exchange(db, KVS_META_MARK, ANSWER_MS);
	}
	if (status == KV_OK && !db->lost) {
		db->belief = MARKED;
	}

	return status;
}

/* The rows of one answer, in order and behind what was asked for. */
static kv_status_t take_rows(kvs_metadb_t *db, uint64_t *p_from, kvs_row_fn row, void *arg)
{
	kvs_row_change_t change[KVS_META_CHANGES];
	uint32_t count = db->answer.count;
	kv_status_t status = KV_OK;

	memcpy(change, db->answer.change, count * sizeof *change);
	for (uint32_t i = 0; i < count && status == KV_OK; i++) {
		uint64_t place = kvs_meta_row_id(&change[i].row);

		if (place < *p_from || place == UINT64_MAX || !change[i].is_put) {
			return KV_ERR_PROTO;
		}
		*p_from = place + 1u;
		status = row(arg, &change[i].row);
	}

	return status;
}

kv_status_t kvs_metadb_scan(kvs_metadb_t *db, kvs_row_fn row, void *arg)
{
	kv_status_t status = KV_OK;
	uint64_t from = 0;
	int more = 1;

	while (status == KV_OK && more) {
		status = get_ready(db); /* the callback's write may have cost the process, or the database */
		if (status == KV_ERR_NOSPC && !db->aside) {
			status = open_for_reading(db);
		}
		if (status != KV_OK || db->belief != MARKED) {
			return status == KV_OK ? KV_ERR_CORRUPT : status;
		}
		db->ask.count = 0;
		db->ask.from = from;
		status = exchange(db, KVS_META_SCAN, ANSWER_MS);
		if (status == KV_OK) {
			more = (db->answer.flags & KVS_META_MORE) != 0;
			status = more && db->answer.count == 0 ? KV_ERR_PROTO : take_rows(db, &from, row, arg);
		}
	}

	return status;
}

kv_status_t kvs_metadb_end_reading(kvs_metadb_t *db)
{
	if (db->fd >= 0 && db->read_only) {
		end_process(db, 0);
	}
	db->read_only = 0;

	return db->fd >= 0 ? KV_OK : db->failed == KV_OK ? KV_ERR_IO : db->failed;
}

int kvs_metadb_fd(const kvs_metadb_t *db)
{
	return db->fd;
}

int kvs_metadb_note_death(kvs_metadb_t *db)
{
	const int served = db->served;

	(void)give_up(db, KV_ERR_CLOSED, "has gone");

	return served;
}

uint64_t kvs_metadb_bytes(const char *path)
{
	DIR *dir = opendir(path);
	const struct dirent *entry;
	uint64_t bytes = 0;

	if (!dir) {
		return 0;
	}
	while ((entry = readdir(dir)) != NULL) {
		struct stat st;

		if (fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode)) {
			bytes += (uint64_t)st.st_blocks * 512u;
		}
	}
	closedir(dir);

	return bytes;
}
