/* Whose pidfd a member hands in: its own, or that of a process that outlives it. */
#include "daemon/raw.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#define PIDFS_MAGIC 0x50494446

/* JOIN in a child process with the pidfd of `of` (0: its own). Returns the status. */
static kv_status_t child_joins(const char *sock, const char *name, pid_t of)
{
	int answer[2];
	kv_status_t status = KV_ERR_IO;
	pid_t child;

	assert_int_equal(pipe(answer), 0);
	child = fork();
	assert_true(child >= 0);
	if (child == 0) {
		int pidfd = (int)syscall(SYS_pidfd_open, of ? of : getpid(), 0);
		int fd = raw_open(sock);
		kv_msg_join_reply_t reply;

		status = raw_join_with(fd, name, NULL, pidfd, &reply);
		_exit(write(answer[1], &status, sizeof status) != sizeof status);
	}
	close(answer[1]);
	assert_int_equal(read(answer[0], &status, sizeof status), sizeof status);
	close(answer[0]);
	assert_int_equal(waitpid(child, NULL, 0), child);

	return status;
}

/* The attack: a client that joins as its parent, takes slots and dies would leave them in quarantine for as long as the
 * parent lives. */
RAW_TEST(p4_a_join_with_another_processes_pidfd_is_refused, NULL)
{
	uint64_t before;
	int watch;

	watch = raw_open(daemon_.sock);
	before = raw_metric(watch, "kvd_joins_refused_total{reason=pidfd_unproved}");
	assert_int_equal(child_joins(daemon_.sock, "thief", getpid()), KV_ERR_PIDFD_REQUIRED);
	assert_int_equal(raw_metric(watch, "kvd_joins_refused_total{reason=pidfd_unproved}"), before + 1);
	assert_int_equal(child_joins(daemon_.sock, "honest", 0), KV_OK);
	assert_int_equal(raw_metric(watch, "kvd_joins_refused_total{reason=pidfd_unproved}"), before + 1);
	close(watch);
}

/* A connection that another process has opened proves nothing about who speaks on it. */
RAW_TEST(p4_an_inherited_connection_joins_as_its_user_only, NULL)
{
	int fd, status, parent = (int)syscall(SYS_pidfd_open, getpid(), 0);
	pid_t child;

	fd = raw_open(daemon_.sock);
	child = fork();
	if (child == 0) {
		int own = (int)syscall(SYS_pidfd_open, getpid(), 0);
		kv_msg_join_reply_t reply;
		int refused = raw_join_with(fd, "i", NULL, parent, &reply) == KV_ERR_PIDFD_REQUIRED;

		_exit(!refused || raw_join_with(fd, "i", NULL, own, &reply) != KV_OK);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
	close(fd);
	close(parent);
}

/* Who cannot prove what process it is gets the mirror and nothing that its death would have to free. */
RAW_TEST(p4_an_unproved_process_may_match_only, NULL)
{
	kv_msg_join_t ask = {.instance = kv_slice_str("router"), .role = KV_ROLE_MATCH};
	raw_member_t member;
	kv_msg_join_reply_t reply;
	kv_key_t keys[4];
	kv_msg_put_start_reply_t put;
	kv_msg_acquire_reply_t lease;

	memset(&member, 0, sizeof member);
	member.fd = raw_open(daemon_.sock);
	raw_keys(1, keys, 4);
	assert_int_equal(raw_call(member.fd, KV_CODE_JOIN, &ask, &reply), KV_OK);
	assert_true(raw_reply_fd_count == 1 && reply.member_id == 0 && reply.lease_bytes == 0);
	close(raw_reply_fds[0]);
	assert_int_equal(raw_metric(member.fd, "kvd_match_joins_total"), 1);
	assert_int_equal(raw_metric(member.fd, "kvd_members"), 0);
	assert_int_equal(raw_space(&member, "m"), KV_OK);
	assert_int_equal(raw_put_start(&member, NULL, 0, keys, 4, &put), KV_ERR_PIDFD_REQUIRED);
	assert_int_equal(raw_acquire(&member, keys, 4, &lease), KV_ERR_PIDFD_REQUIRED);
	assert_int_equal(raw_call(member.fd, KV_CODE_DRAINED, &(kv_msg_drained_t){.what = 2}, NULL),
			 KV_ERR_PIDFD_REQUIRED);
	/* With its own pidfd it becomes a member after all. */
	int own = (int)syscall(SYS_pidfd_open, getpid(), 0);

	assert_int_equal(raw_join_with(member.fd, "i", NULL, own, &reply), KV_OK);
	assert_int_equal(raw_put_start(&member, NULL, 0, keys, 4, &put), KV_OK);
	close(own);
	close(member.fd);
}

RAW_TEST(p4_a_namespace_the_operator_trusts_may_join_unproved, "--namespaces=other,default",
	 "--members.trusted=default")
{
	char other[128];

	snprintf(other, sizeof other, "%s/other.sock", daemon_.dir);
	assert_int_equal(child_joins(daemon_.sock, "i", getpid()), KV_OK);
	assert_int_equal(child_joins(other, "i", getpid()), KV_ERR_PIDFD_REQUIRED);
}

KV_TEST(p4_only_a_namespace_of_the_daemon_can_be_trusted)
{
	static const char *const args[] = {"--check-config", "--namespaces=default", "--members.trusted=other", NULL};
	char out[4096];

	assert_int_not_equal(raw_run(args, out, sizeof out), 0);
	assert_non_null(strstr(out, "members.trusted"));
}

/* ---- daemon and member that do not see each other's process ids ------------------------------ */

/* In a process namespace of its own, with its own /proc: run the daemon, say where, and end it when `end` is closed. */
static void daemon_apart(int say, int end)
{
	char byte;

	if (mount("", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 || mount("proc", "/proc", "proc", 0, NULL) != 0) {
		_exit(2);
	}
	raw_daemon_start(&daemon_, NULL);
	if (write(say, &daemon_, sizeof daemon_) != sizeof daemon_) {
		_exit(1);
	}
	(void)!read(end, &byte, 1);
	raw_daemon_end(&daemon_);
	_exit(0);
}

static int inodes_tell_processes(void)
{
	int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
	struct statfs fs;
	int yes = fstatfs(pidfd, &fs) == 0 && fs.f_type == PIDFS_MAGIC;

	close(pidfd);

	return yes;
}

/* The last one of the file: it may skip the program. */
KV_TEST(p4_a_member_in_another_pid_namespace_is_proved_by_its_socket)
{
	int say[2], end[2], status;
	kv_status_t own, another;
	pid_t outer;

	assert_true(pipe(say) == 0 && pipe(end) == 0);
	outer = fork();
	if (outer == 0) {
		close(end[1]);
		if (unshare(CLONE_NEWPID | CLONE_NEWNS) != 0) {
			_exit(2);
		}
		pid_t inner = fork();

		if (inner == 0) {
			daemon_apart(say[1], end[0]);
		}
		waitpid(inner, &status, 0);
		_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
	}
	close(say[1]);
	close(end[0]);
	if (read(say[0], &daemon_, sizeof daemon_) != sizeof daemon_) {
		assert_int_equal(waitpid(outer, &status, 0), outer);
		assert_int_equal(WEXITSTATUS(status), 2); /* not permitted here, else a failure */
		kv_test_skip("a process namespace of its own needs root");
	}
	own = child_joins(daemon_.sock, "own", 0);
	another = child_joins(daemon_.sock, "another", getpid());
	close(end[1]);
	close(say[0]);
	assert_int_equal(waitpid(outer, &status, 0), outer);
	assert_int_equal(status, 0);
	assert_int_equal(another, KV_ERR_PIDFD_REQUIRED);
	assert_int_equal(own, inodes_tell_processes() ? KV_OK : KV_ERR_PIDFD_REQUIRED);
}
