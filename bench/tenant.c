/* tenant -- p99 of acquire and release of a resident prefix while another namespace attacks the daemon, against the
 * same in quiet. ns. Goal: ratio <= 2. `daemon` is the daemon's part: p99 of kvd_answer_seconds, from the look at the
 * sockets before a request was seen to its reply, read off buckets of powers of two. The attackers run when a core is
 * idle, as where there are cores for all; on a machine with fewer cores the client's figure has their wake-ups in it
 * all the same. The attackers are two processes: one connects, sends what is no frame, and connects again; one begins
 * frames of 1 MiB on as many connections as it gets. */
#include "bench.h"
#include "rig.h"

#include <arpa/inet.h>
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

static struct {
	rig_t rig;
	kvc_key_t keys[PROMPT];
	uint16_t port; /* of the daemon's /metrics */
	pid_t attackers[ATTACKERS];
	double ns[PAIRS];
} work;

/* The socket of the other namespace. */
static int dial(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	snprintf(address.sun_path, sizeof address.sun_path, "%.80s/run/other.sock", work.rig.dir);
	if (fd >= 0 && connect(fd, (const struct sockaddr *)&address, sizeof address) != 0) {
		close(fd);
		fd = -1;
	}

	return fd;
}

static _Noreturn void attack(uint32_t how)
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
		*fd = dial();
		if (*fd >= 0) {
			(void)send(*fd, nonsense, how == 0 ? sizeof nonsense : 8, MSG_NOSIGNAL | MSG_DONTWAIT);
		}
	}
}

/* /metrics, which the core loop does not serve. */
static const char *read_metrics(void)
{
	static const char ask[] = "GET /metrics HTTP/1.0\r\n\r\n";
	static char text[1 << 18];
	const struct sockaddr_in to = {
		.sin_family = AF_INET, .sin_port = htons(work.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	size_t len = 0;
	ssize_t n = -1;

	if (connect(fd, (const struct sockaddr *)&to, sizeof to) == 0 && write(fd, ask, sizeof ask - 1) > 0) {
		while (len + 1 < sizeof text && (n = read(fd, text + len, sizeof text - 1 - len)) > 0) {
			len += (size_t)n;
		}
	}
	close(fd);
	text[n == 0 ? len : 0] = '\0';

	return text;
}

static uint64_t count_sessions(void)
{
	static const char name[] = "\nkvd_sessions_opened_total ";
	const char *at = strstr(read_metrics(), name);

	return at ? strtoull(at + sizeof name - 1, NULL, 10) : UINT64_MAX;
}

/* How many of the daemon's answers took at most 1 us, 2 us, 4 us, ... 0: they cannot be had. */
static int read_answers(uint64_t *below)
{
	static const char bucket[] = "\nkvd_answer_seconds_bucket{le=\"";
	const char *at = read_metrics();

	for (uint32_t i = 0; i < BUCKETS; i++) {
		at = strstr(at + 1, bucket);
		at = at ? strchr(at, '}') : NULL;
		if (!at) {
			return 0;
		}
		below[i] = strtoull(at + 1, NULL, 10);
	}

	return 1;
}

static bench_outcome_t quiet(void *arg, bench_sample_t *p_sample)
{
	(void)arg;
	return rig_acquire_often(&work.rig, (rig_pairs_t){work.keys, PROMPT, PAIRS, 0.99}, work.ns, p_sample);
}

static bench_outcome_t attacked(void *arg, bench_sample_t *p_sample)
{
	uint64_t opened = count_sessions();
	bench_outcome_t outcome;

	for (uint32_t i = 0; i < ATTACKERS; i++) {
		work.attackers[i] = fork();
		if (work.attackers[i] == 0) {
			attack(i);
		}
	}
	outcome = quiet(arg, p_sample);
	for (uint32_t i = 0; i < ATTACKERS; i++) {
		if (work.attackers[i] > 0) {
			kill(work.attackers[i], SIGKILL);
			waitpid(work.attackers[i], NULL, 0);
		}
	}
	opened = count_sessions() - opened;
	if (outcome == BENCH_DONE && opened < LEAST_SESSIONS) {
		return bench_skip("other programs use all cores, the attackers opened %llu sessions only",
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

static bench_outcome_t daemon_part(void *arg, bench_sample_t *p_sample)
{
	uint64_t before[BUCKETS], after[BUCKETS];
	const int found = read_answers(before);
	const bench_outcome_t outcome = p_sample->is_reference ? quiet(arg, p_sample) : attacked(arg, p_sample);

	if (outcome != BENCH_DONE) {
		return outcome;
	}
	if (!found || !read_answers(after)) {
		return bench_fail("the daemon's /metrics cannot be read");
	}
	p_sample->value = quantile_between(before, after, 0.99);

	return BENCH_DONE;
}

static const bench_measurement_t rows[] = {
	{"tenant", "ns", "the same in quiet", attacked, quiet, 11, BENCH_RATIO_AT_MOST, 2},
	{"tenant/daemon", "ns", "the same in quiet", daemon_part, daemon_part, 11, BENCH_RATIO_AT_MOST, 2},
};

static bench_outcome_t measure(void)
{
	bench_outcome_t outcome;

	work.port = rig_free_port();
	if (rig_start(&work.rig,
		      " --limits.silence=10s --namespaces=default,other --cpu.max_blocks=4096"
		      " --cpu.size=256MiB --nvme.path= --http.listen=127.0.0.1:%u",
		      work.port) != 0 ||
	    rig_attach(&work.rig, "tenant", 64) != 0) {
		return bench_fail("the daemon could not be started");
	}
	rig_keys(work.rig.space, 1, PROMPT, work.keys);
	if (rig_put(work.rig.space, work.keys, 0, PROMPT, 0) != 0) {
		return bench_fail("the prefix could not be put");
	}
	outcome = bench_measure(NULL, &rows[0]);

	return outcome == BENCH_DONE ? bench_measure(NULL, &rows[1]) : outcome;
}

bench_outcome_t run_tenant(int variant)
{
	const bench_outcome_t outcome = measure();

	(void)variant;
	rig_remove(&work.rig);

	return outcome;
}
