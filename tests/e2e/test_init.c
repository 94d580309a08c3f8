/* kvd as process 1 of a container: it ends when it is told to, and reaps the children of processes that have ended. */
#include "e2e/rig/rig.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* What a container runtime does: what follows runs as process 1 of a namespace, signals and its end are passed on. */
static void enter_container(void)
{
	sigset_t set;
	int wstatus, signal;
	pid_t init;

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGCHLD);
	sigprocmask(SIG_BLOCK, &set, NULL);
	if (unshare(CLONE_NEWPID) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) {
		_exit(77);
	}
	init = fork();
	if (init == 0) {
		sigprocmask(SIG_UNBLOCK, &set, NULL);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		return;
	}
	while (init > 0 && sigwait(&set, &signal) == 0) {
		if (signal == SIGTERM) {
			kill(init, SIGTERM);
		} else if (waitpid(init, &wstatus, WNOHANG) == init) {
			_exit(child_exit_of(wstatus));
		}
	}
	_exit(77);
}

static void start(rig_t *rig, const char *keeper)
{
	int result;

	rig_init(rig, 1);
	rig_option(rig, "--keeper=%s", keeper);
	rig->before = enter_container;
	result = rig_try(rig);
	if (result == 77) {
		rig_fini(rig);
		kv_test_skip("no process namespace can be made here");
	}
	assert_int_equal(result, -1);
}

static int is_gone(pid_t pid)
{
	return kill(pid, 0) != 0 && errno == ESRCH;
}

KV_TEST(p4_process_1_reaps_orphans_and_stops)
{
	pid_t daemon, meta;
	rig_t rig;

	start(&rig, "on");
	daemon = child_first(child_first(rig.pid));
	meta = child_first(daemon);
	assert_true(daemon > 0 && meta > 0);
	kill(daemon, SIGKILL); /* its own programs die with it, and become process 1's */
	KV_AWAIT(is_gone(daemon) && is_gone(meta));
	rig_serving(&rig);
	rig_fini(&rig);
}

/* Without a keeper, too: the daemon is its child, and its end is the container's. */
KV_TEST(p4_process_1_without_a_keeper_stops_and_ends_with_its_daemon)
{
	rig_t rig;

	start(&rig, "off");
	rig_stop(&rig);
	rig_start(&rig);
	kill(child_first(child_first(rig.pid)), SIGKILL);
	assert_int_equal(rig_kill(&rig, 0), 128 + SIGKILL);
	rig_fini(&rig);
}
