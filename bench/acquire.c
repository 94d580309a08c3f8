/* acquire -- acquire and release of a resident 8,192-block prefix, against two raw UNIX-socket round trips of messages
 * of the same size, with the same pinning (asking side on one processor, answering side on the other) and the same
 * spinning on both sides. ns a pair. Goal: ratio <= 1.5. */
#include "bench.h"
#include "rig.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROMPT      8192u
#define PAIRS       200u
#define SPIN_NS     50000u
#define ASK_BYTES   320u /* an ACQUIRE frame with its ladder */
#define REPLY_BYTES 72u

static struct {
	rig_t rig;
	kvc_key_t keys[PROMPT];
	int echo; /* of the partner in a process of its own */
	pid_t partner;
	double ns[PAIRS];
} work;

/* Receive exactly n bytes: spin first, then sleep. Returns 0 at end of file. */
static int receive(int fd, uint8_t *buffer, uint32_t n)
{
	const uint64_t until = bench_now_ns() + SPIN_NS;
	uint32_t got = 0;

	while (got < n) {
		const ssize_t len = recv(fd, buffer, n - got, MSG_DONTWAIT);

		if (len > 0) {
			got += (uint32_t)len;
		} else if (len == 0 || (errno != EAGAIN && errno != EINTR)) {
			return 0;
		} else if (bench_now_ns() >= until) {
			poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, -1);
		}
	}

	return 1;
}

static int start_partner(void)
{
	uint8_t buffer[ASK_BYTES] = {0};
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
		return 0;
	}
	work.echo = pair[0];
	work.partner = fork();
	if (work.partner == 0) {
		close(pair[0]);
		bench_pin(1);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		while (receive(pair[1], buffer, ASK_BYTES) && send(pair[1], buffer, REPLY_BYTES, MSG_NOSIGNAL) > 0) {
		}
		_exit(0);
	}
	close(pair[1]);

	return work.partner > 0;
}

static bench_outcome_t pairs(void *arg, bench_sample_t *p_sample)
{
	(void)arg;
	for (uint32_t i = 0; i < PAIRS; i++) {
		work.ns[i] = (double)rig_acquire_ns(&work.rig, work.keys, PROMPT);
		if (work.ns[i] <= 0) {
			return bench_fail("the prefix was not leased whole: %s", kvc_last_error());
		}
	}
	p_sample->value = bench_quantile(work.ns, PAIRS, 0.5);
	p_sample->ops = PAIRS;

	return BENCH_DONE;
}

static bench_outcome_t two_trips(void *arg, bench_sample_t *p_sample)
{
	uint8_t buffer[ASK_BYTES] = {0};

	(void)arg;
	for (uint32_t i = 0; i < PAIRS; i++) {
		const uint64_t start = bench_now_ns();

		for (int trip = 0; trip < 2; trip++) {
			if (send(work.echo, buffer, ASK_BYTES, MSG_NOSIGNAL) != ASK_BYTES ||
			    !receive(work.echo, buffer, REPLY_BYTES)) {
				return bench_fail("the echo partner has gone");
			}
		}
		work.ns[i] = (double)(bench_now_ns() - start);
	}
	p_sample->value = bench_quantile(work.ns, PAIRS, 0.5);
	p_sample->ops = PAIRS;

	return BENCH_DONE;
}

static bench_outcome_t measure(void)
{
	if (!start_partner()) {
		return bench_fail("the echo partner could not be started");
	}
	work.rig.cpu = bench_pin(1) + 1;
	bench_pin(0);
	if (rig_start(&work.rig, " --limits.silence=10s --cpu.max_blocks=32768 --cpu.size=256MiB --nvme.path="
				 " --events.enabled=off --spin=50us") != 0 ||
	    rig_attach(&work.rig, "acquire", 64) != 0) {
		return bench_fail("the daemon could not be started");
	}
	rig_keys(work.rig.space, 1, PROMPT, work.keys);
	if (rig_put(work.rig.space, work.keys, 0, PROMPT, 0) != 0) {
		return bench_fail("the prefix could not be put");
	}

	return bench_measure(NULL, &(bench_measurement_t){"acquire", "ns", "two raw round trips", pairs, two_trips, 31,
							  BENCH_RATIO_AT_MOST, 1.5});
}

bench_outcome_t run_acquire(int variant)
{
	const bench_outcome_t outcome = measure();

	(void)variant;
	rig_remove(&work.rig);
	close(work.echo);
	waitpid(work.partner, NULL, 0);

	return outcome;
}
