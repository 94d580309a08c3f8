/* acquire -- acquire and release of a resident 8,192-block prefix, against two raw UNIX-socket round trips of messages
 * of the same size, with the same pinning (asking side on one processor, answering side on the other) and the same
 * spinning on both sides. ns a pair. Goal: ratio <= 1.5. */
#include "bench.h"
#include "rig.h"

#define PROMPT      8192u
#define PAIRS       200u
#define SPIN_NS     50000u
#define ASK_BYTES   320u /* an ACQUIRE frame with its ladder */
#define REPLY_BYTES 72u

static struct {
	rig_t rig;
	kvc_key_t keys[PROMPT];
	rig_echo_t echo;
	double ns[PAIRS];
} work;

static bench_outcome_t pairs(void *arg, bench_sample_t *p_sample)
{
	(void)arg;
	return rig_acquire_often(&work.rig, (rig_pairs_t){work.keys, PROMPT, PAIRS, 0.5}, work.ns, p_sample);
}

static bench_outcome_t two_trips(void *arg, bench_sample_t *p_sample)
{
	(void)arg;
	for (uint32_t i = 0; i < PAIRS; i++) {
		const uint64_t start = bench_now_ns();

		for (uint32_t trips = 0; trips < 2; trips++) {
			if (!rig_echo_trip(&work.echo)) {
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
	work.echo = (rig_echo_t){.ask = ASK_BYTES, .reply = REPLY_BYTES, .spin_ns = SPIN_NS};
	if (rig_echo_start(&work.echo, 1) != 0) {
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
	rig_echo_stop(&work.echo);

	return outcome;
}
