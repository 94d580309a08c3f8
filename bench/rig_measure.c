/* What of the rig says to the harness how it went: programs with a main() of their own have no harness. */
#include "rig.h"

#include <stdlib.h>
#include <unistd.h>

#define START_NS UINT64_C(60000000000)

bench_outcome_t rig_start_peers(rig_t rigs[2], char addresses[2][32], const char *options)
{
	static const char secret[] = "a key of a bench, which is no secret";
	const uint64_t end = bench_now_ns() + START_NS;
	char key[] = "/tmp/kvd-bench-key-XXXXXX";
	const int fd = mkstemp(key);
	bench_outcome_t outcome = BENCH_DONE;

	if (fd < 0 || write(fd, secret, sizeof secret - 1) < 0) {
		return bench_fail("no key file in /tmp");
	}
	close(fd);
	for (uint32_t i = 0; i < 2 && outcome == BENCH_DONE; i++) {
		if (rig_start(&rigs[i],
			      "%s --peers.name=n%u --peers.listen=%s --peers.addresses=n%u=%s --peers.keys=n%u=%s",
			      options, i, addresses[i], 1 - i, addresses[1 - i], 1 - i, key) != 0) {
			outcome = bench_fail("kvd does not start");
		}
	}
	while (outcome == BENCH_DONE &&
	       (rig_metric(&rigs[0], "kvd_peers_up") != 1 || rig_metric(&rigs[1], "kvd_peers_up") != 1)) {
		usleep(20000);
		if (bench_now_ns() > end || bench_late()) {
			outcome = bench_skip("the peers do not connect");
		}
	}
	unlink(key);

	return outcome;
}

bench_outcome_t rig_acquire_often(const rig_t *rig, rig_pairs_t pairs, double *ns, bench_sample_t *p_sample)
{
	for (uint32_t i = 0; i < pairs.count; i++) {
		ns[i] = (double)rig_acquire_ns(rig, pairs.keys, pairs.n);
		if (ns[i] <= 0) {
			return bench_fail("the prefix was not leased whole: %s", kvc_last_error());
		}
	}
	p_sample->value = bench_quantile(ns, pairs.count, pairs.quantile);
	p_sample->ops = pairs.count;

	return BENCH_DONE;
}
