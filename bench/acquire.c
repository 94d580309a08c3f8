/* acquire -- acquire and release of a resident 8,192-block prefix, against two raw UNIX-socket round trips of messages
 * of the same size, with the same pinning (asking side on one processor, answering side on the other) and the same
 * spinning on both sides. ns a pair. Goal: ratio <= 1.5. acquire/branched -- the same of a prefix that another one
 * leaves at every block, the worst a client can make of the index. */
#include "bench.h"
#include "rig.h"

#include <stdio.h>
#include <stdlib.h>

#define PROMPT      8192u
#define PAIRS       200u
#define SPIN_US     50u
#define ASK_BYTES   320u /* an ACQUIRE frame with its ladder */
#define REPLY_BYTES 72u

typedef struct work {
	rig_t rig;
	kvc_t *kvc;
	kvc_space_t *space;
	kvc_key_t keys[PROMPT];
	rig_echo_t echo;
	double ns[PAIRS];
} work_t;

static bench_outcome_t pairs(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	work_t *work = arg;

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
	p_sample->value = bench_quantile(work->ns, PAIRS, 0.5);
	p_sample->ops = PAIRS;

	return BENCH_DONE;
}

static bench_outcome_t two_trips(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	work_t *work = arg;

	(void)run;
	for (uint32_t i = 0; i < PAIRS; i++) {
		uint64_t start = bench_now_ns();

		rig_echo_trip(&work->echo);
		rig_echo_trip(&work->echo);
		work->ns[i] = (double)(bench_now_ns() - start);
	}
	p_sample->value = bench_quantile(work->ns, PAIRS, 0.5);
	p_sample->ops = PAIRS;

	return BENCH_DONE;
}

/* At every depth a second block next to the prefix's. */
static int put_branches(work_t *work)
{
	int failed = 0;

	for (uint32_t i = 1; i < PROMPT && !failed; i++) {
		kvc_key_t key = work->keys[i];

		work->keys[i].b[0] ^= 1;
		failed = rig_put_index(work->space, work->keys, i, i + 1);
		work->keys[i] = key;
	}

	return failed;
}

static bench_outcome_t measure(bench_run_t *run, work_t *work)
{
	bench_outcome_t outcome;

	rig_keys(work->space, 0, 0, 1, PROMPT, work->keys);
	if (rig_put_index(work->space, work->keys, 0, PROMPT) != 0) {
		return bench_fail(run, "the prefix could not be put");
	}
	outcome = bench_measure(run, &(bench_measurement_t){.name = "acquire",
							    .unit = "ns",
							    .reference = "two raw round trips",
							    .value_fn = pairs,
							    .reference_fn = two_trips,
							    .arg = work,
							    .rounds = 31,
							    .goal = BENCH_RATIO_AT_MOST,
							    .goal_value = 1.5});
	if (outcome != BENCH_DONE) {
		return outcome;
	}
	if (put_branches(work) != 0) {
		return bench_fail(run, "the branches could not be put");
	}

	return bench_measure(run, &(bench_measurement_t){.name = "acquire/branched",
							 .unit = "ns",
							 .reference = "two raw round trips",
							 .value_fn = pairs,
							 .reference_fn = two_trips,
							 .arg = work,
							 .rounds = 31});
}

static bench_outcome_t run_acquire(bench_run_t *run)
{
	work_t *work = calloc(1, sizeof *work);
	bench_outcome_t outcome;
	int other;

	if (!work) {
		return bench_fail(run, "no memory");
	}
	work->echo = (rig_echo_t){.spin_us = SPIN_US, .ask_bytes = ASK_BYTES, .reply_bytes = REPLY_BYTES};
	other = bench_pin(1);
	bench_pin(0);
	work->rig = (rig_t){.cpu = other,
			    .options = {"--cpu.max_blocks=32768", "--cpu.size=256MiB",
					"--nvme.path=", "--events.enabled=off", "--spin=50us"}};
	if (rig_echo_start(&work->echo, other) != 0) {
		outcome = bench_fail(run, "the echo partner could not be started");
	} else if (rig_start(&work->rig, 20000) != 0 ||
		   rig_attach(&work->rig, "acquire", 64, &work->kvc, &work->space) != 0) {
		outcome = bench_fail(run, "the daemon could not be started");
	} else {
		outcome = measure(run, work);
	}
	kvc_detach(work->kvc);
	rig_remove(&work->rig);
	rig_echo_stop(&work->echo);
	free(work);

	return outcome;
}

const bench_t bench_acquire = {
	.name = "acquire",
	.measures = "acquire and release of a resident 8,192-block prefix, median",
	.reference = "two raw UNIX-socket round trips, same message sizes, pinning and spinning",
	.goal = "ratio <= 1.5",
	.run = run_acquire,
};
