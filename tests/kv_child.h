/* kv_child.h -- a process of the test's own, which dies with it. */
#ifndef KV_CHILD_H
#define KV_CHILD_H

#include "kv_cmocka.h"
#include "kv_test.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

/* How a process has ended: its exit code, or 128 and the signal. */
static inline int child_exit_of(int wstatus)
{
	return WIFEXITED(wstatus) ? WEXITSTATUS(wstatus) : 128 + WTERMSIG(wstatus);
}

/* The first child of a process; 0: it has none. */
static inline pid_t child_first(pid_t parent)
{
	char path[64], text[64];

	snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)parent, (int)parent);

	return kv_test_read(path, text, sizeof text) > 0 ? (pid_t)strtol(text, NULL, 10) : 0;
}

/* Run fn in a process of its own, which says that it is ready by writing a byte. */
static inline pid_t child_start(void (*fn)(void *arg, int ready), void *arg)
{
	int ends[2];
	char byte;
	pid_t pid;

	(void)kv_test_seed();
	fflush(stdout);
	assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		setenv("CMOCKA_TEST_ABORT", "1", 1); /* a failure here must not go on as a second test program */
		alarm(100); /* a check that fails here must not make the parent wait for ever */
		close(ends[0]);
		fn(arg, ends[1]);
		_exit(0);
	}
	close(ends[1]);
	if (read(ends[0], &byte, 1) != 1) {
		fail_msg("the child ended before it was ready");
	}
	close(ends[0]);

	return pid;
}

static inline void child_say(int ready)
{
	if (write(ready, "r", 1) != 1) {
		_exit(99);
	}
}

static inline void child_kill(pid_t pid)
{
	kill(pid, SIGKILL);
	assert_int_equal(waitpid(pid, NULL, 0), pid);
}

#endif
