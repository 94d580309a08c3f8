#include "e2e/rig/rig.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <json-c/json.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sysexits.h>

uint64_t rig_now_ms(void)
{
	return kv_now_ns(&kv_env_posix) / 1000000u;
}

void rig_option(rig_t *rig, const char *format, ...)
{
	va_list args;

	assert_true(rig->option_count < RIG_OPTIONS);
	va_start(args, format);
	vsnprintf(rig->options[rig->option_count++], sizeof rig->options[0], format, args);
	va_end(args);
}

static void add_disk(rig_t *rig)
{
	rig_option(rig, "--nvme.path=%s", rig->disk);
	rig_option(rig, "--nvme.size=64MiB");
	rig_option(rig, "--nvme.file_size=4MiB");
}

void rig_init(rig_t *rig, int disk)
{
	static const char *const usual[] = {
		"--keeper=off",         "--http.listen=off",      "--cpu.size=8MiB",         "--cpu.slab_size=1MiB",
		"--cpu.prefault=off",   "--cpu.huge_pages=off",   "--index.max_blocks=4096", "--spin=0us",
		"--limits.silence=10s", "--handover.min_ttl=60s", "--admission=all"}; /* pools so small thrash */

	memset(rig, 0, sizeof *rig);
	kv_test_dir_make(rig->dir, sizeof rig->dir);
	snprintf(rig->run_dir, sizeof rig->run_dir, "%s/run", rig->dir);
	snprintf(rig->disk, sizeof rig->disk, "%s/disk", rig->dir);
	snprintf(rig->log, sizeof rig->log, "%s/log", rig->dir);
	snprintf(rig->sock, sizeof rig->sock, "%s/default.sock", rig->run_dir);
	for (size_t i = 0; i < KV_COUNT_OF(usual); i++) {
		rig_option(rig, "%s", usual[i]);
	}
	rig_option(rig, "--run_dir=%s", rig->run_dir);
	if (disk) {
		add_disk(rig);
	}
}

void rig_init_mount(rig_t *rig, const char *size)
{
	rig_init(rig, 0);
	rig_mount(rig, size);
}

void rig_mount(rig_t *rig, const char *size)
{
	char options[64];

	add_disk(rig);
	snprintf(options, sizeof options, "size=%s,mode=0700", size);
	assert_int_equal(mkdir(rig->disk, 0700), 0);
	if (mount("tmpfs", rig->disk, "tmpfs", 0, options) != 0) {
		int error = errno;

		rig_fini(rig);
		kv_test_skip("mounting a tmpfs is not permitted: %s", strerror(error));
	}
}

void rig_unmount(rig_t *rig)
{
	const uint64_t until = rig_now_ms() + RIG_WAIT_MS;

	rig_stop(rig);
	/* The kernel ends a ring, and lets go of its files, some time after the process. */
	while (umount(rig->disk) != 0) {
		assert_true(rig_now_ms() < until);
		usleep(5000);
	}
}

void rig_disk_fill(const rig_t *rig)
{
	static const uint8_t zeros[65536];
	size_t chunk = sizeof zeros;
	char path[96];
	int fd;

	snprintf(path, sizeof path, "%s/filler", rig->disk);
	fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	while (chunk > 0) {
		if (write(fd, zeros, chunk) <= 0) {
			chunk /= 2;
		}
	}
	close(fd);
}

void rig_disk_free(const rig_t *rig)
{
	char path[96];

	snprintf(path, sizeof path, "%s/filler", rig->disk);
	assert_int_equal(unlink(path), 0);
}

void rig_clean_up(rig_t *rig)
{
	if (rig->pid > 0) {
		(void)rig_kill(rig, SIGKILL);
	}
	(void)umount2(rig->disk, MNT_DETACH);
}

static _Noreturn void become_daemon(const rig_t *rig)
{
	const char *argv[RIG_OPTIONS + 8];
	int fd = open(rig->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
	size_t n = 0;

	prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that dies leaves no daemon behind */
	dup2(fd, STDOUT_FILENO);
	dup2(fd, STDERR_FILENO);
	for (size_t i = 0; i < KV_COUNT_OF(rig->wrap) && rig->wrap[i]; i++) {
		argv[n++] = rig->wrap[i];
	}
	argv[n++] = rig->program ? rig->program : kv_test_program(E2E_KVD);
	for (uint32_t i = 0; i < rig->option_count; i++) {
		argv[n++] = rig->options[i];
	}
	argv[n] = NULL;
	if (rig->before) {
		rig->before();
	}
	execvp(argv[0], (char *const *)(uintptr_t)argv);
	_exit(127);
}

static kvc_t *observer(const rig_t *rig)
{
	const kvc_config_t config = {
		.struct_size = sizeof config, .socket = rig->sock, .observe = 1, .program = "e2e-watch"};
	kvc_t *kvc = NULL;

	return kvc_attach(&config, &kvc) == KVC_OK ? kvc : NULL;
}

static int serves(const rig_t *rig)
{
	kvc_t *kvc = observer(rig);

	kvc_detach(kvc);

	return kvc != NULL;
}

static void show_log(const rig_t *rig)
{
	char command[160];

	snprintf(command, sizeof command, "tail -n 40 %s >&2", rig->log);
	if (system(command) != 0) {
		fprintf(stderr, "no log in %s\n", rig->dir);
	}
}

int rig_try(rig_t *rig)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	int wstatus;

	assert_int_equal(rig->pid, 0);
	rig->pid = fork();
	assert_true(rig->pid >= 0);
	if (rig->pid == 0) {
		become_daemon(rig);
	}
	while (rig_now_ms() < deadline) {
		if (waitpid(rig->pid, &wstatus, WNOHANG) == rig->pid) {
			rig->pid = 0;
			return child_exit_of(wstatus);
		}
		if (serves(rig)) {
			return -1;
		}
		usleep(3000);
	}
	show_log(rig);
	fail_msg("kvd neither serves nor ends");

	return 0;
}

void rig_start(rig_t *rig)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	int code;

	do {
		code = rig_try(rig);
	} while (code == EX_TEMPFAIL &&
		 rig_now_ms() < deadline); /* the one that was killed still lets go: a supervisor tries again */
	if (code >= 0) {
		show_log(rig);
		fail_msg("kvd ended with %d", code);
	}
}

void rig_serving(const rig_t *rig)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;

	while (!serves(rig)) {
		if (rig_now_ms() > deadline) {
			show_log(rig);
			fail_msg("no daemon serves");
		}
		usleep(3000);
	}
}

pid_t rig_daemon(const rig_t *rig)
{
	char path[64], text[64];

	snprintf(path, sizeof path, "/proc/%d/comm", (int)rig->pid);
	assert_true(kv_test_read(path, text, sizeof text) > 0);
	if (strncmp(text, "kvd-keeper", 10) != 0) {
		return rig->pid;
	}

	return child_first(rig->pid);
}

static int is_child_of(const char *name, pid_t daemon, const char *program)
{
	char path[320], text[512], first[64];
	const char *parent;

	snprintf(first, sizeof first, "Name:\t%s\n", program);
	snprintf(path, sizeof path, "/proc/%s/status", name);
	(void)kv_test_read(path, text, sizeof text);
	parent = strstr(text, "\nPPid:");

	return parent && strncmp(text, first, strlen(first)) == 0 && strtol(parent + 6, NULL, 10) == daemon &&
	       !strstr(text, "\nState:\tZ");
}

pid_t rig_child(const rig_t *rig, const char *program)
{
	DIR *dir = opendir("/proc");
	const struct dirent *entry;
	const pid_t daemon = rig_daemon(rig);
	pid_t found = 0;

	assert_non_null(dir);
	while (found == 0 && (entry = readdir(dir)) != NULL) {
		if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && is_child_of(entry->d_name, daemon, program)) {
			found = (pid_t)strtol(entry->d_name, NULL, 10);
		}
	}
	closedir(dir);

	return found;
}

pid_t rig_meta(const rig_t *rig)
{
	return rig_child(rig, "kvd-meta");
}

int rig_kill(rig_t *rig, int signal)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	int wstatus = 0;

	assert_true(rig->pid > 0);
	kill(rig->pid, signal);
	while (waitpid(rig->pid, &wstatus, WNOHANG) != rig->pid) {
		if (rig_now_ms() > deadline) {
			kill(rig->pid, SIGKILL);
			show_log(rig);
			fail_msg("kvd did not end after signal %d", signal);
		}
		usleep(2000);
	}
	rig->pid = 0;

	return child_exit_of(wstatus);
}

void rig_fini(rig_t *rig)
{
	int code = rig->pid > 0 ? rig_kill(rig, SIGTERM) : 0;

	if (code != 0) {
		show_log(rig);
	}
	kv_test_dir_remove(rig->dir);
	assert_int_equal(code, 0);
}

void rig_crash(rig_t *rig)
{
	assert_int_equal(rig_kill(rig, SIGKILL), 128 + SIGKILL);
}

void rig_stop(rig_t *rig)
{
	assert_int_equal(rig_kill(rig, SIGTERM), 0);
}

void rig_end(rig_t *rig)
{
	rig_check_quiet(rig);
	rig_fini(rig);
}

uint32_t rig_log_count(const rig_t *rig, const char *text)
{
	static char log[1 << 20];
	uint32_t n = 0;

	(void)kv_test_read(rig->log, log, sizeof log);
	for (const char *at = strstr(log, text); at; at = strstr(at + 1, text)) {
		n++;
	}

	return n;
}

int rig_log_has(const rig_t *rig, const char *text)
{
	return rig_log_count(rig, text) > 0;
}

int rig_kvctl(const rig_t *rig, const char *arguments, char *out, size_t cap)
{
	char command[512], path[96];
	int wstatus;

	snprintf(path, sizeof path, "%s/kvctl.out", rig->dir);
	snprintf(command, sizeof command, "%s --socket %s %s >%s 2>&1", kv_test_program(E2E_KVCTL), rig->sock,
		 arguments, path);
	wstatus = system(command);
	(void)kv_test_read(path, out, cap);

	return child_exit_of(wstatus);
}

int rig_kvctl_has(const rig_t *rig, const char *arguments, const char *text)
{
	const uint64_t until = rig_now_ms() + RIG_WAIT_MS;
	static char out[1 << 16];

	do {
		(void)rig_kvctl(rig, arguments, out, sizeof out);
		if (strstr(out, text)) {
			return 1;
		}
		usleep(5000);
	} while (rig_now_ms() < until);
	printf("# kvctl %s: no \"%s\" in: %s\n", arguments, text, out);

	return 0;
}

/* ---- numbers --------------------------------------------------------------------------------- */

uint64_t rig_number(kvc_t *kvc, const char *name)
{
	json_object *root, *number;
	uint64_t value = UINT64_MAX;
	char *json = NULL;

	if (!kvc || kvc_document(kvc, KVC_DOC_STATS, 0, &json, NULL) != KVC_OK) {
		return value;
	}
	root = json_tokener_parse(json);
	if (root && json_object_object_get_ex(root, name, &number)) {
		value = json_object_get_uint64(number);
	}
	json_object_put(root);
	kvc_free(json);

	return value;
}

uint64_t rig_metric(const rig_t *rig, const char *name)
{
	kvc_t *kvc = observer(rig);
	uint64_t value = rig_number(kvc, name);

	kvc_detach(kvc);

	return value;
}

uint64_t rig_share(kvc_t *kvc, const char *resource, const char *field)
{
	json_object *root, *core, *shares, *name, *number;
	uint64_t value = UINT64_MAX;
	char *json = NULL;

	assert_int_equal(kvc_document(kvc, KVC_DOC_STATUS, 0, &json, NULL), KVC_OK);
	root = json_tokener_parse(json);
	assert_true(root && json_object_object_get_ex(root, "core", &core) &&
		    json_object_object_get_ex(core, "shares", &shares));
	for (size_t i = 0; i < json_object_array_length(shares); i++) {
		json_object *share = json_object_array_get_idx(shares, i);

		if (json_object_object_get_ex(share, "resource", &name) &&
		    strcmp(json_object_get_string(name), resource) == 0 &&
		    json_object_object_get_ex(share, field, &number)) {
			value = json_object_get_uint64(number);
		}
	}
	json_object_put(root);
	kvc_free(json);

	return value;
}

static int metric_within(const rig_t *rig, const char *name, uint64_t low, uint64_t high)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	kvc_t *kvc = observer(rig);
	uint64_t value = rig_number(kvc, name);

	while ((value < low || value > high) && rig_now_ms() < deadline) {
		usleep(5000);
		kvc = kvc ? kvc : observer(rig); /* sessions that have just been left may count still */
		value = rig_number(kvc, name);
	}
	kvc_detach(kvc);
	if (value < low || value > high) {
		printf("# %s is %" PRIu64 "\n", name, value);
	}

	return value >= low && value <= high;
}

int rig_metric_reaches(const rig_t *rig, const char *name, uint64_t value)
{
	return metric_within(rig, name, value, UINT64_MAX - 1);
}

int rig_metric_is(const rig_t *rig, const char *name, uint64_t value)
{
	return metric_within(rig, name, value, value);
}

void rig_written(const rig_t *rig)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	kvc_t *kvc = observer(rig);
	int done = 0;

	assert_non_null(kvc);
	while (!done && rig_now_ms() < deadline) {
		char *json = NULL;

		if (kvc_document(kvc, KVC_DOC_STATUS, 0, &json, NULL) == KVC_OK) {
			done = strstr(json, "\"write_behind_queue\":0,") && strstr(json, "\"writes_in_flight\":0,");
		}
		kvc_free(json);
		usleep(3000);
	}
	kvc_detach(kvc);
	assert_true(done);
}

void rig_check_quiet(const rig_t *rig)
{
	static const char *const gauges[] = {"kvd_leases", "kvd_puts", "kvd_pins",
					     "kvd_tier_quarantined_bytes{tier=cpu}",
					     "kvd_tier_quarantined_bytes{tier=disk}"};
	static char out[1 << 16];
	int code;

	for (size_t i = 0; i < KV_COUNT_OF(gauges); i++) {
		assert_true(rig_metric_is(rig, gauges[i], 0));
	}
	code = rig_kvctl(rig, "check --json", out, sizeof out);
	if (code != 0 || !strstr(out, "\"failed\":0")) {
		show_log(rig);
		fail_msg("kvctl check: %d: %s", code, out);
	}
}
