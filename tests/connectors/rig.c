#include "connectors/rig.h"
#include "engine/check.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

void rig_init(rig_t *rig, const char *program)
{
	*rig = (rig_t){.program = program, .silence = RIG_SILENCE};
	(void)snprintf(rig->dir, sizeof rig->dir, "/tmp/kvd-test-kvx.XXXXXX");
	assert_non_null(mkdtemp(rig->dir));
	(void)snprintf(rig->socket, sizeof rig->socket, "%s/run/default.sock", rig->dir);
}

static void become_daemon(const rig_t *rig)
{
	char run_dir[96], disk[96], log[96], silence[48];
	int fd;

	(void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that dies leaves no daemon behind */
	(void)snprintf(run_dir, sizeof run_dir, "--run_dir=%s/run", rig->dir);
	(void)snprintf(disk, sizeof disk, "--nvme.path=%s/disk", rig->dir);
	(void)snprintf(log, sizeof log, "%s/log", rig->dir);
	(void)snprintf(silence, sizeof silence, "--limits.silence=%s", rig->silence);
	fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
	if (fd >= 0) {
		(void)dup2(fd, STDERR_FILENO);
		(void)dup2(fd, STDOUT_FILENO);
	}
	execl(rig->program, rig->program, run_dir, disk, silence, "--keeper=off", "--cpu.size=16MiB", "--cpu.ahead=0",
	      "--cpu.slab_size=4MiB", "--cpu.prefault=off", "--nvme.size=64MiB", "--nvme.file_size=16MiB",
	      "--index.max_blocks=16384", "--http.listen=off", "--handover.min_ttl=60s", "--admission=all",
	      (char *)NULL);
	_exit(127);
}

static void print_log(const rig_t *rig)
{
	char command[128];

	(void)snprintf(command, sizeof command, "tail -n 30 %s/log >&2", rig->dir);
	if (system(command) != 0) {
		fprintf(stderr, "no log in %s\n", rig->dir);
	}
}

static kvc_t *observer(const rig_t *rig)
{
	/* A call that takes longer than a minute waits for nothing. */
	const kvc_config_t config = {
		.struct_size = sizeof config, .socket = rig->socket, .observe = 1, .timeout_ms = 60000};
	kvc_t *kvc = NULL;

	return kvc_attach(&config, &kvc) == KVC_OK ? kvc : NULL;
}

void rig_start(rig_t *rig)
{
	rig->pid = fork();
	assert_true(rig->pid >= 0);
	if (rig->pid == 0) {
		become_daemon(rig);
	}
	for (int i = 0; i < 6000; i++) {
		kvc_t *kvc = observer(rig);

		if (kvc) {
			kvc_detach(kvc);
			return;
		}
		if (waitpid(rig->pid, NULL, WNOHANG) == rig->pid) {
			rig->pid = 0;
			break;
		}
		usleep(10000);
	}
	print_log(rig);
	fail_msg("the daemon did not start in %s", rig->dir);
}

void rig_signal(const rig_t *rig, int signal)
{
	assert_int_equal(kill(rig->pid, signal), 0);
}

void rig_kill(rig_t *rig)
{
	rig_signal(rig, SIGKILL);
	assert_int_equal(waitpid(rig->pid, NULL, 0), rig->pid);
	rig->pid = 0;
}

void rig_stop(rig_t *rig)
{
	int code = -1;

	rig_signal(rig, SIGTERM);
	assert_int_equal(waitpid(rig->pid, &code, 0), rig->pid);
	rig->pid = 0;
	assert_int_equal(code, 0);
}

void rig_fini(rig_t *rig)
{
	char command[128];

	if (rig->pid) {
		(void)kill(rig->pid, SIGCONT);
		rig_kill(rig);
	}
	(void)snprintf(command, sizeof command, "rm -rf %s", rig->dir);
	assert_int_equal(system(command), 0);
}

/* Value of a gauge or counter in the daemon's statistics. */
static long gauge(kvc_t *kvc, const char *name)
{
	char needle[64];
	char *json = NULL;
	const char *at;
	long value = -1;

	if (kvc_document(kvc, KVC_DOC_STATS, 0, &json, NULL) != KVC_OK) {
		return -1;
	}
	(void)snprintf(needle, sizeof needle, "\"%s\":", name);
	at = strstr(json, needle);
	if (at) {
		value = strtol(at + strlen(needle), NULL, 10);
	}
	kvc_free(json);

	return value;
}

static int is_quiet(kvc_t *kvc)
{
	return gauge(kvc, "kvd_leases") == 0 && gauge(kvc, "kvd_puts") == 0;
}

long rig_counter(const rig_t *rig, const char *name)
{
	kvc_t *kvc = observer(rig);
	long value;

	assert_non_null(kvc);
	value = gauge(kvc, name);
	kvc_detach(kvc);

	return value;
}

void rig_flip(const rig_t *rig, const kvc_identity_t *identity, const kvc_prompt_t *prompt, uint32_t block)
{
	const kvc_config_t config = {.struct_size = sizeof config, .socket = rig->socket};
	kvc_space_t *space;
	kvc_lease_t *lease;
	kvc_key_t keys[64];
	const void *data;
	uint32_t n;
	kvc_t *kvc;

	assert_int_equal(kvc_attach(&config, &kvc), KVC_OK);
	assert_int_equal(kvc_space_open(kvc, identity, &space), KVC_OK);
	assert_int_equal(kvc_keys_of(space, prompt, keys, 64, &n), KVC_OK);
	assert_int_equal(kvc_acquire(space, keys, block + 1, 0, 0, &lease), KVC_OK);
	assert_int_equal(kvc_lease_wait(lease, block + 1, 20000), KVC_OK);
	assert_int_equal(kvc_lease_block(lease, block, &data, NULL), KVC_OK);
	((uint8_t *)(uintptr_t)data)[1234] ^= 0x10;
	kvc_release(&lease, 1);
	kvc_detach(kvc);
}

void rig_wait_written(const rig_t *rig)
{
	long on_disk = 0;
	int calm = 0;

	/* Four looks: the gauges of one heartbeat may be of before the last put. */
	for (int i = 0; i < 300 && calm < 4; i++) {
		on_disk = rig_counter(rig, "kvd_tier_blocks{tier=disk}");
		calm = on_disk > 0 && on_disk == rig_counter(rig, "kvd_blocks") ? calm + 1 : 0;
		usleep(100000);
	}
	assert_int_equal(calm, 4);
}

void rig_check_quiet(const rig_t *rig)
{
	kvc_t *kvc = observer(rig);
	uint32_t failed = 1;
	char *json = NULL;
	int quiet = 0;

	assert_non_null(kvc);
	for (int i = 0; i < 3000 && !quiet; i++) {
		if (rig->run_iteration) {
			rig->run_iteration(rig->iteration_ctx);
		}
		quiet = is_quiet(kvc);
		usleep(quiet ? 0 : 10000);
	}
	if (!quiet) {
		(void)kvc_document(kvc, KVC_DOC_STATUS, 2, &json, NULL);
		fprintf(stderr, "%s\n", json);
		print_log(rig);
		fail_msg("leases %ld puts %ld", gauge(kvc, "kvd_leases"), gauge(kvc, "kvd_puts"));
	}
	assert_int_equal(kvc_document(kvc, KVC_DOC_CHECK, 0, &json, &failed), KVC_OK);
	if (failed) {
		fprintf(stderr, "%s\n", json);
	}
	assert_int_equal(failed, 0);
	kvc_free(json);
	kvc_detach(kvc);
}

/* ---- the rig of a program ---------------------------------------------------------------------- */

const char *the_program;
rig_t the_rig;

int begin_rig(void **state)
{
	(void)state;
	rig_init(&the_rig, the_program);

	return 0;
}

int end_rig(void **state)
{
	(void)state;
	if (the_rig.pid) {
		rig_check_quiet(&the_rig);
	}
	rig_fini(&the_rig);

	return 0;
}
