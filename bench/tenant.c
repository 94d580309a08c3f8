/* tenant -- p99 of acquire and release of a resident prefix while another namespace attacks the daemon, against the
 * same in quiet. ns. Goal: ratio <= 2. `daemon` is the daemon's part: p99 of kvd_answer_seconds, from the look at the
 * sockets before a request was seen to its reply, read off buckets of powers of two. The attackers run when a core is
 * idle, as where there are cores for all; on a machine with fewer cores the client's figure has their wake-ups in it
 * all the same. The attackers are two processes: one connects, sends what is no frame, and connects again; one begins
 * frames of 1 MiB on as many connections as it gets. */
#include "bench.h"
#include "rig.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROMPT    512u
#define PAIRS     2000u
#define ATTACKERS 2u
#define BUCKETS   24u
/* An attack of fewer in a round is none; with a core of their own they open thousands. */
#define LEAST_SESSIONS 200u

typedef struct work {
	rig_t rig;
	kvc_t *kvc;
	kvc_space_t *space;
	kvc_key_t keys[PROMPT];
	char target[160];
	char http[40];
	uint16_t port;
	pid_t attackers[ATTACKERS];
	double ns[PAIRS];
} work_t;

static int dial(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	memcpy(address.sun_path, path, strlen(path));
	if (fd >= 0 && connect(fd, (const struct sockaddr *)&address, sizeof address) != 0) {
		close(fd);
		fd = -1;
	}

	return fd;
}

static _Noreturn void attack(const char *path, uint32_t how)
{
	static const char nonsense[65536] = "nonsense";
	uint32_t turn = 0;
	int fds[256];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	(void)sched_setscheduler(0, SCHED_IDLE, &(struct sched_param){0});
	memset(fds, 0xff, sizeof fds);
	for (;; turn++) {
		int *fd = &fds[how == 0 ? 0 : turn % 256];

		if (*fd >= 0) {
			close(*fd);
		}
		*fd = dial(path);
		if (*fd >= 0) {
			(void)send(*fd, nonsense, how == 0 ? sizeof nonsense : 8, MSG_NOSIGNAL | MSG_DONTWAIT);
		}
	}
}

static bench_outcome_t pairs(bench_run_t *run, work_t *work, bench_sample_t *p_sample)
{
	for (uint32_t i = 0; i < PAIRS; i++) {
		kvc_lease_t *lease = NULL;
		uint64_t start = bench_now_ns();

		if (kvc_acquire(work->space, work->keys, PROMPT, 0, 0, &lease) != KVC_OK ||
		    kvc_lease_ready(lease) != PROMPT) {
			return bench_fail(run, "the prefix was not leased whole: %s", kvc_last_error());
		}
		kvc_release(&lease, 1);
		kvc_poll(work->kvc, 0);
		work->ns[i] = (double)(bench_now_ns() - start);
	}
	p_sample->value = bench_quantile(work->ns, PAIRS, 0.99);
	p_sample->ops = PAIRS;

	return BENCH_DONE;
}

static bench_outcome_t quiet(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	return pairs(run, arg, p_sample);
}

static bench_outcome_t attacked(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	work_t *work = arg;
	uint64_t opened = rig_counter(work->port, "kvd_sessions_opened_total");
	bench_outcome_t outcome;

	for (uint32_t i = 0; i < ATTACKERS; i++) {
		work->attackers[i] = fork();
		if (work->attackers[i] == 0) {
			attack(work->target, i);
		}
	}
	outcome = pairs(run, work, p_sample);
	for (uint32_t i = 0; i < ATTACKERS; i++) {
		if (work->attackers[i] > 0) {
			kill(work->attackers[i], SIGKILL);
			waitpid(work->attackers[i], NULL, 0);
		}
	}
	opened = rig_counter(work->port, "kvd_sessions_opened_total") - opened;
	if (outcome == BENCH_DONE && opened < LEAST_SESSIONS) {
		return bench_skip(run, "other programs use all cores, the attackers opened %llu sessions only",
				  (unsigned long long)opened);
	}

	return outcome;
}

/* The value below which that share of what came between two looks lies; a bucket's values are taken to lie evenly in
 * it. */
static double quantile_between(const uint64_t *before, const uint64_t *after, double share)
{
	double rank = share * (double)(after[BUCKETS - 1] - before[BUCKETS - 1]), low = 0, high = 1000;

	for (uint32_t i = 0; i < BUCKETS; i++, low = high, high *= 2) {
		double up_to = (double)(after[i] - before[i]);
		double under = i ? (double)(after[i - 1] - before[i - 1]) : 0;

		if (up_to >= rank && up_to > under) {
			return low + (high - low) * (rank - under) / (up_to - under);
		}
	}

	return high;
}

static bench_outcome_t daemon_part(bench_run_t *run, work_t *work, bench_sample_fn sample, bench_sample_t *p_sample)
{
	uint64_t before[BUCKETS], after[BUCKETS];
	uint32_t n = rig_histogram(work->port, "kvd_answer_seconds", before, BUCKETS);
	bench_outcome_t outcome = sample(run, work, p_sample);

	if (outcome != BENCH_DONE) {
		return outcome;
	}
	if (n != BUCKETS || rig_histogram(work->port, "kvd_answer_seconds", after, BUCKETS) != BUCKETS) {
		return bench_fail(run, "the daemon's /metrics cannot be read");
	}
	p_sample->value = quantile_between(before, after, 0.99);

	return BENCH_DONE;
}

static bench_outcome_t daemon_quiet(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	return daemon_part(run, arg, quiet, p_sample);
}

static bench_outcome_t daemon_attacked(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	return daemon_part(run, arg, attacked, p_sample);
}

static bench_outcome_t measure(bench_run_t *run, work_t *work)
{
	bench_outcome_t outcome;

	rig_keys(work->space, 0, 0, 1, PROMPT, work->keys);
	if (rig_put_index(work->space, work->keys, 0, PROMPT) != 0) {
		return bench_fail(run, "the prefix could not be put");
	}

	outcome = bench_measure(run, &(bench_measurement_t){.name = "tenant",
							    .unit = "ns",
							    .reference = "the same in quiet",
							    .value_fn = attacked,
							    .reference_fn = quiet,
							    .arg = work,
							    .rounds = 11,
							    .goal = BENCH_RATIO_AT_MOST,
							    .goal_value = 2});
	if (outcome != BENCH_DONE) {
		return outcome;
	}

	return bench_measure(run, &(bench_measurement_t){.name = "tenant/daemon",
							 .unit = "ns",
							 .reference = "the same in quiet",
							 .value_fn = daemon_attacked,
							 .reference_fn = daemon_quiet,
							 .arg = work,
							 .rounds = 11,
							 .goal = BENCH_RATIO_AT_MOST,
							 .goal_value = 2});
}

static bench_outcome_t run_tenant(bench_run_t *run)
{
	work_t *work = calloc(1, sizeof *work);
	bench_outcome_t outcome;

	if (!work) {
		return bench_fail(run, "no memory");
	}
	work->port = rig_free_port();
	snprintf(work->http, sizeof work->http, "--http.listen=127.0.0.1:%u", work->port);
	work->rig = (rig_t){.cpu = -1,
			    .options = {"--namespaces=default,other", "--cpu.max_blocks=4096", "--cpu.size=256MiB",
					"--nvme.path=", work->http}};
	if (rig_start(&work->rig, 20000) != 0 || rig_attach(&work->rig, "tenant", 64, &work->kvc, &work->space) != 0) {
		outcome = bench_fail(run, "the daemon could not be started");
	} else {
		snprintf(work->target, sizeof work->target, "%s/other.sock", work->rig.dir);
		outcome = strlen(work->target) < sizeof((struct sockaddr_un *)0)->sun_path
				  ? measure(run, work)
				  : bench_fail(run, "the path of the socket is too long");
	}
	kvc_detach(work->kvc);
	rig_remove(&work->rig);
	free(work);

	return outcome;
}

const bench_t bench_tenant = {
	.name = "tenant",
	.measures = "p99 of acquire and release while another namespace attacks",
	.reference = "the same in quiet",
	.goal = "ratio <= 2",
	.run = run_tenant,
};
