/* partition/both, -one-way, -loss -- a local client's match, acquire and release of a resident prefix, beside a peer
 * whose network is broken.
 *
 * Two daemons in two network namespaces (root only), with one link between them. Every 20 ms the peer has a new prefix
 * of 2 MiB, and another client asks the measured daemon to fetch it, whether it can come or not. The value is the p99
 * of pairs in two seconds that begin with the fault: the link is down, all packets one way are dropped, or 30 % of
 * them. The reference is the same while prefixes come. After a fault prefixes come again before the next
 * sample. Medians of the p50 follow on standard error. ns. Goal: ratio <= 1.2. */
#include "bench.h"
#include "rig.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROMPT      256u
#define MOST_PAIRS  400000u
#define SAMPLE_NS   UINT64_C(2000000000)
#define ROUNDS      7u
#define BLOCKS      32u /* of a prefix that is fetched */
#define BLOCK_BYTES 65536u
#define UNIT_TOKENS 16u
#define PACE_US     20000u
#define FETCH_MS    1000u
#define FEWEST      10u /* prefixes that come meanwhile where nothing is broken: 100 would be right */
#define UP_NS       UINT64_C(30000000000)

enum fault { BOTH, ONE_WAY, LOSS };

static struct {
	rig_t rig[2]; /* the measured daemon; its peer */
	char name[2][32];
	enum fault fault;
	pid_t loader;
	kvc_key_t keys[PROMPT];
	double ns[MOST_PAIRS];
	double p50[2][ROUNDS + 1]; /* of faults, of references */
	unsigned samples[2];
} work;

/* ---- the network ----------------------------------------------------------------------------- */

static int run(const char *format, ...) __attribute__((format(printf, 1, 2)));

static int run(const char *format, ...)
{
	char command[400], quiet[440];
	va_list args;

	va_start(args, format);
	vsnprintf(command, sizeof command, format, args);
	va_end(args);
	snprintf(quiet, sizeof quiet, "{ %s; } >/dev/null 2>&1", command);

	return system(quiet);
}

static void remove_network(void)
{
	for (uint32_t i = 0; i < 2 && work.name[i][0]; i++) {
		(void)run("ip netns del %s", work.name[i]);
	}
}

/* 0: there is one. */
static int make_network(void)
{
	int failed;

	for (uint32_t i = 0; i < 2; i++) {
		snprintf(work.name[i], sizeof work.name[i], "kvd-bench-%d-%u", (int)getpid(), i);
	}
	failed = run("ip netns add %s && ip netns add %s && "
		     "ip link add veth0 netns %s type veth peer name veth1 netns %s",
		     work.name[0], work.name[1], work.name[0], work.name[1]);
	for (uint32_t i = 0; i < 2 && !failed; i++) {
		failed = run("ip netns exec %s sh -c 'ip addr add 10.98.0.%u/24 dev veth%u && ip link set veth%u up && "
			     "ip link set lo up'",
			     work.name[i], i + 1, i, i);
	}
	for (uint32_t up = 0; up < 2 && !failed; usleep(10000)) {
		up = 0;
		for (uint32_t i = 0; i < 2; i++) {
			up += run("ip netns exec %s ip link show veth%u | grep 'state UP'", work.name[i], i) == 0;
		}
		failed = bench_late();
	}

	return failed;
}

static void drop_packets(const char *which)
{
	(void)run("ip netns exec %s sh -c \"nft add table ip kvd; nft 'add chain ip kvd in { type filter hook input "
		  "priority 0; }'; nft add rule ip kvd in iif veth0 %s drop\"",
		  work.name[0], which);
}

static void break_network(void)
{
	if (work.fault == BOTH) {
		(void)run("ip netns exec %s ip link set veth0 down", work.name[0]);
	} else {
		drop_packets(work.fault == ONE_WAY ? "" : "numgen random mod 100 lt 30");
	}
}

static uint64_t fetches(const char *result)
{
	char name[64];

	snprintf(name, sizeof name, "kvd_peer_fetches_total{result=%s}", result);

	return rig_metric(&work.rig[0], name);
}

/* 1: prefixes come again. */
static int mend_network(void)
{
	const uint64_t before = fetches("done"), end = bench_now_ns() + UP_NS;

	(void)run("ip netns exec %s nft flush ruleset; ip netns exec %s ip link set veth0 up", work.name[0],
		  work.name[0]);
	while (fetches("done") < before + FEWEST) {
		if (bench_now_ns() > end) {
			return 0;
		}
		usleep(50000);
	}

	return 1;
}

/* ---- what is fetched ------------------------------------------------------------------------- */

/* Put a new prefix at the peer, and ask for it here. */
static void load_one(rig_t rig[2], uint32_t number, const void **blocks)
{
	static uint32_t tokens[BLOCKS * UNIT_TOKENS];
	static kvc_key_t keys[BLOCKS];
	const kvc_prompt_t prompt = {.struct_size = sizeof prompt, .tokens = tokens, .n_tokens = BLOCKS * UNIT_TOKENS};
	const kvc_put_options_t options = {.struct_size = sizeof options, .blocks = blocks};
	const kvc_fetch_t fetch = {
		.struct_size = sizeof fetch, .peer = "n1", .prompt = &prompt, .timeout_ms = FETCH_MS};
	kvc_handover_t *wanted = NULL;
	uint32_t n = 0, visible = 0;

	for (uint32_t i = 0; i < BLOCKS * UNIT_TOKENS; i++) {
		tokens[i] = number * 65536u + i;
	}
	if (kvc_keys_of(rig[1].space, &prompt, keys, BLOCKS, &n) != KVC_OK ||
	    kvc_put(rig[1].space, keys, 0, n, &options, &visible) != KVC_OK) {
		return;
	}
	if (kvc_handover_fetch(rig[0].space, &fetch, &wanted) == KVC_OK) {
		(void)kvc_handover_wait(wanted, 0, FETCH_MS);
	}
	kvc_handover_done(wanted, 0);
	(void)kvc_poll(rig[0].kvc, 0);
}

_Noreturn static void run_loader(void)
{
	uint8_t *memory = bench_memory((size_t)BLOCKS * BLOCK_BYTES);
	const void *blocks[BLOCKS];

	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (uint32_t i = 0; i < 2; i++) {
		work.rig[i].kvc = NULL; /* the parent's does not survive a fork */
		if (!memory || rig_attach(&work.rig[i], "fetched", BLOCK_BYTES) != 0) {
			_exit(1);
		}
	}
	bench_fill(memory, (size_t)BLOCKS * BLOCK_BYTES, 1);
	for (uint32_t i = 0; i < BLOCKS; i++) {
		blocks[i] = memory + (size_t)i * BLOCK_BYTES;
	}
	for (uint32_t number = 1;; number++) {
		const uint64_t next = bench_now_ns() + (uint64_t)PACE_US * 1000u;
		uint64_t now;

		load_one(work.rig, number, blocks);
		now = bench_now_ns();
		usleep(now < next ? (useconds_t)((next - now) / 1000u) : 0);
	}
}

/* ---- what is measured ------------------------------------------------------------------------ */

static uint64_t pair_ns(void)
{
	const uint64_t start = bench_now_ns();
	kvc_match_t match = {.struct_size = sizeof match};

	kvc_match(work.rig[0].space, work.keys, PROMPT, &match);

	return match.n == PROMPT && rig_acquire_ns(&work.rig[0], work.keys, PROMPT) > 0 ? bench_now_ns() - start : 0;
}

/* Two seconds of pairs: p99. */
static bench_outcome_t measure_pairs(bench_sample_t *p_sample)
{
	const uint64_t until = bench_now_ns() + SAMPLE_NS;
	const int which = p_sample->is_reference;
	uint32_t n = 0;

	for (; n < MOST_PAIRS && bench_now_ns() < until; n++) {
		work.ns[n] = (double)pair_ns();
		if (work.ns[n] <= 0) {
			return bench_fail("the prefix was not leased whole: %s", kvc_last_error());
		}
	}
	p_sample->value = bench_quantile(work.ns, n, 0.99);
	p_sample->ops = n;
	if (work.samples[which] < ROUNDS + 1) {
		work.p50[which][work.samples[which]++] = bench_quantile(work.ns, n, 0.5);
	}

	return BENCH_DONE;
}

static bench_outcome_t beside_healthy(void *arg, bench_sample_t *p_sample)
{
	const uint64_t before = fetches("done");
	const bench_outcome_t outcome = measure_pairs(p_sample);
	const uint64_t came = fetches("done") - before;

	(void)arg;

	return outcome != BENCH_DONE || came >= FEWEST
		       ? outcome
		       : bench_skip("other programs use all cores: only %llu prefixes came", (unsigned long long)came);
}

static bench_outcome_t beside_broken(void *arg, bench_sample_t *p_sample)
{
	const uint64_t before = fetches("failed");
	bench_outcome_t outcome;

	(void)arg;
	break_network();
	outcome = measure_pairs(p_sample);
	if (!mend_network()) {
		return bench_fail("no prefix comes again");
	}
	if (outcome == BENCH_DONE && fetches("failed") == before) {
		outcome = bench_fail("no transfer failed");
	}

	return outcome;
}

static bench_outcome_t start_daemons(void)
{
	char addresses[2][32] = {"10.98.0.1:9465", "10.98.0.2:9465"};
	bench_outcome_t outcome;

	for (uint32_t i = 0; i < 2; i++) {
		snprintf(work.rig[i].before, sizeof work.rig[i].before, "ip netns exec %s", work.name[i]);
	}
	outcome = rig_start_peers(
		work.rig, addresses,
		"--limits.silence=10s --cpu.size=256MiB --nvme.path= --events.enabled=off --peers.timeout=1s");
	if (outcome != BENCH_DONE) {
		return outcome;
	}
	work.loader = fork();
	if (work.loader == 0) {
		run_loader();
	}
	if (rig_attach(&work.rig[0], "local", 64) != 0) {
		return bench_fail("the local client could not be started");
	}
	rig_keys(work.rig[0].space, 1, PROMPT, work.keys);

	return rig_put(work.rig[0].space, work.keys, 0, PROMPT, 0) == 0 ? BENCH_DONE
									: bench_fail("the prefix could not be put");
}

static bench_outcome_t measure(void)
{
	static const char *const names[] = {"partition/both", "partition/one-way", "partition/loss"};
	const bench_measurement_t m = {
		names[work.fault],   "ns", "the same while prefixes come", beside_broken, beside_healthy, ROUNDS,
		BENCH_RATIO_AT_MOST, 1.2};
	bench_outcome_t outcome;

	if (geteuid() != 0) {
		return bench_skip("network namespaces need root");
	}
	if (run("command -v nft && command -v ip") != 0) {
		return bench_skip("nft or ip is not installed (nftables, iproute2)");
	}
	if (make_network() != 0) {
		return bench_skip("network namespaces and virtual Ethernet devices cannot be made here");
	}
	outcome = start_daemons();
	outcome = outcome == BENCH_DONE ? bench_measure(NULL, &m) : outcome;
	if (outcome == BENCH_DONE) {
		fprintf(stderr, "%s: p50 %.0f ns, while prefixes come %.0f ns\n", m.name,
			bench_quantile(work.p50[0], work.samples[0], 0.5),
			bench_quantile(work.p50[1], work.samples[1], 0.5));
	}

	return outcome;
}

bench_outcome_t run_partition(int variant)
{
	bench_outcome_t outcome;

	memset(&work, 0, sizeof work);
	work.fault = (enum fault)variant;
	outcome = measure();
	if (work.loader > 0) {
		kill(work.loader, SIGKILL);
		waitpid(work.loader, NULL, 0);
	}
	rig_remove(&work.rig[0]);
	rig_remove(&work.rig[1]);
	remove_network();

	return outcome;
}
