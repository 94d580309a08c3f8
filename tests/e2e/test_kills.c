/* Hand-overs on one daemon and between two, in which one of the processes is killed, or stands still for a while, at
 * any moment: the other side has its answer in time, nothing is lost, and nothing of it is left. */
#include "e2e/rig/pair.h"
#include "e2e/rig/peers.h"

#include <dirent.h>
#include <signal.h>
#include <unistd.h>

#define DEADLINE       2500u /* ms, of a hand-over */
#define CALL           1500u /* ms, of other calls */
#define TTL            8000u /* ms, without a consumer */
#define SHORT_DEADLINE 1200u
#define GRACE          10000u /* ms: a busy machine */
#define AGAIN          15000u

enum victim { PRODUCER, CONSUMER, OWNER, ASKER, OWNER_NET, ASKER_NET, VICTIMS };
static const char *const victim_names[VICTIMS] = {
	"producer", "consumer", "owner's daemon", "asker's daemon", "owner's net process", "asker's net process"};

typedef struct hit {
	enum victim victim;
	int is_local; /* one daemon */
	int signal;
	uint32_t owner;       /* number of its rig */
	enum pair_side watch; /* when this side */
	uint32_t mark;        /* begins this step, */
	uint32_t delay_us;    /* and a little later */
	uint32_t stop_ms;     /* 0: until all others have their answers */
	int late_start;       /* a killed daemon comes back when all have their answers */
} hit_t;

typedef struct tally {
	uint32_t rounds, whole, again;
	uint64_t longest_ms;
} tally_t;

static peers_t net_;
static pair_t pair_;
static uint32_t rounds_ = 18;
static size_t descriptors_[2][2]; /* of each rig's daemon and net process */
static uint32_t kept_kills_;      /* daemons of the keeper that were killed */
static tally_t tally_[2][2][VICTIMS];

/* ---- descriptors ----------------------------------------------------------------------------- */

/* Those of slabs stay: the pool keeps its memory. */
static size_t count_descriptors(pid_t pid)
{
	char path[64], link[320], target[128];
	const struct dirent *entry;
	size_t count = 0;
	DIR *dir;

	snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
	dir = opendir(path);
	while (dir && (entry = readdir(dir)) != NULL) {
		ssize_t len;

		snprintf(link, sizeof link, "%s/%s", path, entry->d_name);
		len = readlink(link, target, sizeof target - 1);
		target[len > 0 ? len : 0] = '\0';
		count += len > 0 && !strstr(target, "kvd-slab") && !strstr(target, "kvd-digest");
	}
	if (dir) {
		closedir(dir);
	}

	return count;
}

static pid_t process_of(uint32_t rig, int is_net)
{
	return is_net ? peers_net(&net_, rig) : rig_daemon(&net_.rig[rig]);
}

static void check_descriptors(void)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;

	for (uint32_t i = 0; i < 4; i++) {
		const size_t most = descriptors_[i / 2][i % 2];
		size_t count;

		while ((count = count_descriptors(process_of(i / 2, i % 2))) > most || count == 0) {
			if (rig_now_ms() > deadline) {
				fail_msg("%zu descriptors are open in the %s of rig %u, at first %zu", count,
					 i % 2 ? "net process" : "daemon", i / 2, most);
			}
			usleep(20000);
		}
	}
}

/* ---- the rigs -------------------------------------------------------------------------------- */

static void check_rigs_quiet(void)
{
	for (uint32_t i = 0; i < 2; i++) {
		assert_true(rig_metric_is(&net_.rig[i], "kvd_handovers", 0));
		assert_true(rig_metric_is(&net_.rig[i], "kvd_handover_bytes", 0));
		rig_check_quiet(&net_.rig[i]);
	}
}

static void init(uint32_t deadline_ms, uint32_t ttl_ms)
{
	peers_init(&net_);
	pair_ = (pair_t){
		.notes = pair_.notes ? pair_.notes : pair_notes_new(), .deadline_ms = deadline_ms, .call_ms = CALL};
	for (uint32_t i = 0; i < 2; i++) {
		rig_option(&net_.rig[i], "--handover.ttl=%ums", ttl_ms);
		rig_option(&net_.rig[i], "--cpu.size=48MiB");
		rig_option(&net_.rig[i], "--handover.max_bytes=12MiB");
	}
}

/* Two daemons; the second one has a keeper. */
KV_FIXTURE(setup)
{
	init(DEADLINE, TTL);
	rig_option(&net_.rig[1], "--keeper=on");
	peers_start(&net_);
	peers_connected(&net_);
}

/* Puts and leases of those that stand still end soon. */
KV_FIXTURE(setup_short)
{
	init(SHORT_DEADLINE, 2 * SHORT_DEADLINE);
	for (uint32_t i = 0; i < 2; i++) {
		rig_option(&net_.rig[i], "--put.ttl=200ms");
		rig_option(&net_.rig[i], "--lease.ttl=500ms");
		rig_option(&net_.rig[i], "--instance.max_unfinished=1MiB");
	}
	peers_start(&net_);
	peers_connected(&net_);
}

KV_FIXTURE(teardown)
{
	peers_fini(&net_);
}

static void kill_daemon(rig_t *rig)
{
	const pid_t daemon = rig_daemon(rig);

	if (daemon == rig->pid) {
		rig_crash(rig);
		return;
	}
	kept_kills_++;
	kill(daemon, SIGKILL);
	while (rig_daemon(rig) == daemon) {
		usleep(1000);
	}
}

static void bring_back(rig_t *rig)
{
	if (rig->pid == 0) {
		rig_start(rig);
	}
	rig_serving(rig);
}

/* A keeper gives up after a few daemons that did not live for long. */
static void renew_keeper(rig_t *rig)
{
	if (kept_kills_ >= 3) {
		kept_kills_ = 0;
		rig_stop(rig);
		rig_start(rig);
	}
}

/* ---- one round ------------------------------------------------------------------------------- */

/* Every victim has its turn; everything else is drawn. */
static hit_t draw(uint32_t round, kv_test_rng_t *rng)
{
	static const enum victim local[] = {PRODUCER, CONSUMER, OWNER};
	const uint32_t kind = round % (VICTIMS + KV_COUNT_OF(local));
	hit_t hit = {.is_local = kind >= VICTIMS};

	hit.victim = hit.is_local ? local[kind - VICTIMS] : (enum victim)kind;
	hit.signal = kv_test_below(rng, 2) ? SIGKILL : SIGSTOP;
	hit.owner = (uint32_t)kv_test_below(rng, 2);
	hit.watch = kv_test_below(rng, 2) ? PAIR_PRODUCER : PAIR_CONSUMER;
	hit.mark = 1 +
		   (uint32_t)kv_test_below(rng, hit.watch == PAIR_PRODUCER ? PAIR_PRODUCER_MARKS : PAIR_CONSUMER_MARKS);
	hit.delay_us = (uint32_t)kv_test_below(rng, 2500);
	hit.stop_ms = kv_test_below(rng, 5) ? 20 + (uint32_t)kv_test_below(rng, 400) : 0;
	hit.late_start = (int)kv_test_below(rng, 2);

	return hit;
}

static rig_t *owner_of(const hit_t *hit)
{
	return &net_.rig[hit->owner];
}

static rig_t *asker_of(const hit_t *hit)
{
	return hit->is_local ? owner_of(hit) : &net_.rig[1 - hit->owner];
}

static pid_t victim_pid(const hit_t *hit)
{
	switch (hit->victim) {
	case PRODUCER:
	case CONSUMER:
		return pair_.pid[hit->victim == CONSUMER];
	case OWNER:
		return rig_daemon(owner_of(hit));
	case ASKER:
		return rig_daemon(asker_of(hit));
	default:
		return peers_net(&net_, hit->victim == OWNER_NET ? hit->owner : 1 - hit->owner);
	}
}

/* The metric is half a second old: ask the peer for what it does not have until it says so. */
static void await_peer(uint32_t asker)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	const uint32_t tokens[RIG_TOKENS] = {0};
	const kvc_prompt_t prompt = {.struct_size = sizeof prompt, .tokens = tokens, .n_tokens = RIG_TOKENS};
	const kvc_fetch_t fetch = {
		.struct_size = sizeof fetch, .peer = asker == 0 ? "node1" : "node0", .prompt = &prompt};
	kvc_status_t status = KVC_PENDING;
	user_t user = {0};

	user_attach(&user, &net_.rig[asker], "model");
	while (status != KVC_ERR_NOT_FOUND) {
		kvc_handover_t *wanted = NULL;

		assert_true(rig_now_ms() < deadline);
		assert_int_equal(kvc_handover_fetch(user.space, &fetch, &wanted), KVC_OK);
		status = kvc_handover_wait(wanted, 0, RIG_WAIT_MS);
		kvc_handover_done(wanted, 0);
		usleep(status == KVC_ERR_NOT_FOUND ? 0 : 10000);
	}
	user_leave(&user);
}

static void begin(const hit_t *hit)
{
	pair_next(&pair_);
	pair_.owner = owner_of(hit);
	pair_.asker = asker_of(hit);
	pair_.peer = hit->is_local ? NULL : hit->owner == 0 ? "node0" : "node1";
	pair_start(&pair_, pair_.talk % 2 ? PAIR_PRODUCER : PAIR_CONSUMER);
	pair_start(&pair_, pair_.talk % 2 ? PAIR_CONSUMER : PAIR_PRODUCER);
}

/* Those that are left have an answer. */
static void await_answers(const hit_t *hit, int is_stopped)
{
	for (uint32_t side = 0; side < 2; side++) {
		if (!is_stopped || hit->victim != (enum victim)side) {
			pair_await_end(&pair_, (enum pair_side)side);
		}
	}
}

/* Of processes that have handed something over in either direction: each has what it keeps. */
static void note_descriptors(void)
{
	for (uint32_t owner = 0; owner < 2; owner++) {
		const hit_t none = {.owner = owner};

		begin(&none);
		await_answers(&none, 0);
		assert_true(atomic_load(&pair_.notes->whole));
		pair_finish(&pair_);
	}
	for (uint32_t i = 0; i < 4; i++) {
		descriptors_[i / 2][i % 2] = count_descriptors(process_of(i / 2, i % 2));
		assert_true(descriptors_[i / 2][i % 2] > 0);
	}
}

/* What the victim has is bounded, and counted, by every daemon that runs; a lease does not outlive its time. */
static void check_while_stopped(const hit_t *hit)
{
	const uint64_t most = (uint64_t)PAIR_BLOCKS * RIG_BLOCK_BYTES;
	char out[16384];

	for (uint32_t i = 0; i < 2; i++) {
		const rig_t *rig = &net_.rig[i];

		if ((hit->victim == OWNER && rig == owner_of(hit)) || (hit->victim == ASKER && rig == asker_of(hit))) {
			continue;
		}
		assert_in_range(rig_metric(rig, "kvd_handovers"), 0, 1);
		assert_in_range(rig_metric(rig, "kvd_handover_bytes"), 0, most + 64);
		assert_in_range(rig_metric(rig, "kvd_tier_quarantined_bytes{tier=cpu}"), 0, most);
		assert_in_range(rig_metric(rig, "kvd_puts"), 0, PAIR_CHUNKS);
		assert_int_equal(rig_kvctl(rig, "check --json", out, sizeof out), 0);
	}
}

static void hit_with_kill(const hit_t *hit)
{
	if (hit->victim == PRODUCER || hit->victim == CONSUMER) {
		pair_kill(&pair_, hit->victim == PRODUCER ? PAIR_PRODUCER : PAIR_CONSUMER);
	} else if (hit->victim == OWNER || hit->victim == ASKER) {
		rig_t *rig = hit->victim == OWNER ? owner_of(hit) : asker_of(hit);

		kill_daemon(rig);
		if (!hit->late_start) {
			bring_back(rig);
		}
	} else {
		kill(victim_pid(hit), SIGKILL);
	}
	await_answers(hit, 0);
}

static void hit_with_stop(const hit_t *hit)
{
	const pid_t pid = victim_pid(hit);

	kill(pid, SIGSTOP);
	if (hit->stop_ms > 0) {
		usleep(hit->stop_ms * 1000);
	} else {
		await_answers(hit, 1);
		check_while_stopped(hit);
	}
	kill(pid, SIGCONT);
	await_answers(hit, 0);
}

/* All calls of those that were not stopped themselves have ended in time. */
static void check_in_time(const hit_t *hit, tally_t *tally)
{
	const pair_notes_t *notes = pair_.notes;

	for (uint32_t side = 0; side < 2; side++) {
		const uint64_t ms = atomic_load(&notes->longest[side]);

		if (pair_.pid[side] == 0 || (hit->signal == SIGSTOP && hit->victim == (enum victim)side)) {
			continue;
		}
		tally->longest_ms = ms > tally->longest_ms ? ms : tally->longest_ms;
		assert_in_range(ms, 0, DEADLINE + GRACE);
	}
	/* The end of a process is told, and not waited for. */
	if (hit->signal == SIGKILL && (hit->victim == PRODUCER || hit->victim >= OWNER_NET) &&
	    atomic_load(&notes->sent) > 0) {
		assert_int_not_equal(atomic_load(&notes->status[PAIR_CONSUMER]), KVC_ERR_TIMEOUT);
	}
}

/* Where both daemons have lived, a hand-over that was complete is had by the consumer or by the next one that asks. */
static int must_come(const hit_t *hit)
{
	const uint64_t sent_ms = atomic_load(&pair_.notes->sent_ms);
	const int daemon_died = hit->signal == SIGKILL && (hit->victim == OWNER || hit->victim == ASKER);

	return sent_ms != 0 && !daemon_died && rig_now_ms() - sent_ms < TTL / 2;
}

static void consume_again(const hit_t *hit, tally_t *tally)
{
	const uint64_t until = rig_now_ms() + AGAIN;
	const int must = must_come(hit);
	kvc_status_t status;
	int whole = 0;

	do {
		status = pair_consume_again(&pair_, must ? DEADLINE : 300, &whole);
	} while (must && !whole && rig_now_ms() < until);
	if (must && !whole) {
		fail_msg("talk %" PRIu64 ": a complete hand-over is lost: %s", pair_.talk, kvc_status_name(status));
	}
	tally->again += (uint32_t)whole;
}

static void play(const hit_t *hit)
{
	tally_t *tally = &tally_[hit->is_local][hit->signal == SIGSTOP][hit->victim];

	begin(hit);
	pair_await_mark(&pair_, hit->watch, hit->mark);
	usleep(hit->delay_us);
	if (hit->signal == SIGKILL) {
		hit_with_kill(hit);
	} else {
		hit_with_stop(hit);
	}
	check_in_time(hit, tally);
	bring_back(&net_.rig[0]);
	bring_back(&net_.rig[1]);
	pair_finish(&pair_);
	renew_keeper(&net_.rig[1]);
	await_peer(0);
	await_peer(1);
	pair_check_bytes(&pair_);
	tally->rounds++;
	tally->whole += (uint32_t)atomic_load(&pair_.notes->whole);
	if (!atomic_load(&pair_.notes->whole)) {
		consume_again(hit, tally);
	}
	check_rigs_quiet();
	check_descriptors();
}

static void print_hit(uint32_t round, const hit_t *hit)
{
	printf("# round %u: %s, %s of the %s, rig %u owns, at step %u of the %s\n", round,
	       hit->is_local ? "one daemon" : "two daemons",
	       hit->signal == SIGKILL ? "kill"
	       : hit->stop_ms > 0     ? "stop"
				      : "long stop",
	       victim_names[hit->victim], hit->owner, hit->mark, hit->watch == PAIR_PRODUCER ? "producer" : "consumer");
	fflush(stdout);
}

static void print_tally(void)
{
	printf("# daemons  what  of whom               rounds  whole  by the next one  longest call (ms)\n");
	for (uint32_t i = 0; i < 4 * VICTIMS; i++) {
		const tally_t *tally = &tally_[i / (2 * VICTIMS)][i / VICTIMS % 2][i % VICTIMS];

		if (tally->rounds > 0) {
			printf("# %7s  %s  %-20s %5u  %5u  %15u  %17" PRIu64 "\n", i / (2 * VICTIMS) ? "one" : "two",
			       i / VICTIMS % 2 ? "stop" : "kill", victim_names[i % VICTIMS], tally->rounds,
			       tally->whole, tally->again, tally->longest_ms);
		}
	}
}

KV_TEST(p4_p6_kills_and_stops_at_any_moment_of_a_hand_over_leave_nothing, setup, teardown)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};

	note_descriptors();
	for (uint32_t round = 0; round < rounds_; round++) {
		const hit_t hit = draw(round, &rng);

		print_hit(round, &hit);
		play(&hit);
	}
	print_tally();
}

/* ---- those that stand still ------------------------------------------------------------------ */

/* Its put is revoked when another engine lacks room; what it may still write to is quarantined, counted, and no more
 * than it had. */
KV_TEST(p4_p5_what_a_stopped_producer_writes_to_is_quarantined, setup_short, teardown)
{
	const kvc_put_options_t options = {.struct_size = sizeof options};
	const hit_t hit = {.victim = PRODUCER, .signal = SIGSTOP, .is_local = 1};
	kvc_key_t keys[RIG_BLOCKS];
	kvc_put_t *put = NULL;
	user_t other = {0};

	pair_.hold[PAIR_PRODUCER] = 7; /* the second put is half written */
	begin(&hit);
	pair_await_mark(&pair_, PAIR_PRODUCER, 7);
	kill(pair_.pid[PAIR_PRODUCER], SIGSTOP);
	await_answers(&hit, 1);
	assert_int_equal(atomic_load(&pair_.notes->status[PAIR_CONSUMER]), KVC_ERR_TIMEOUT);
	assert_int_equal(atomic_load(&pair_.notes->read), 16); /* what had come */
	assert_int_equal(rig_metric(&net_.rig[0], "kvd_tier_quarantined_bytes{tier=cpu}"), 0);
	user_attach(&other, &net_.rig[0], "model");
	user_keys(&other, 500, RIG_BLOCKS, keys);
	assert_int_equal(kvc_put_start(other.space, keys, 0, RIG_BLOCKS, &options, &put), KVC_OK);
	assert_int_equal(kvc_put_ready(put, RIG_WAIT_MS), KVC_OK);
	assert_in_range(kvc_put_n(put), 1, RIG_BLOCKS - 1); /* less than it asked for */
	assert_true(rig_metric_is(&net_.rig[0], "kvd_tier_quarantined_bytes{tier=cpu}", 16 * RIG_BLOCK_BYTES));
	assert_int_equal(rig_metric(&net_.rig[0], "kvd_puts_expired_total"), 1);
	check_while_stopped(&hit);
	kvc_put_free(put);
	user_leave(&other);
	atomic_store(&pair_.notes->go, 1);
	kill(pair_.pid[PAIR_PRODUCER], SIGCONT);
	await_answers(&hit, 0);
	assert_true(atomic_load(&pair_.notes->status[PAIR_PRODUCER]) < 0);
	pair_finish(&pair_);
	check_rigs_quiet();
}

/* It has a lease, and stands still: the lease ends, the next one gets the whole hand-over, and what the first one reads
 * later does not count. */
static void stop_reader(int is_local)
{
	const hit_t hit = {.victim = CONSUMER, .signal = SIGSTOP, .is_local = is_local};
	int whole = 0;

	pair_.hold[PAIR_CONSUMER] = 4;
	begin(&hit);
	pair_await_mark(&pair_, PAIR_CONSUMER, 4);
	kill(pair_.pid[PAIR_CONSUMER], SIGSTOP);
	await_answers(&hit, 1);
	assert_int_equal(atomic_load(&pair_.notes->status[PAIR_PRODUCER]), KVC_OK);
	assert_true(rig_metric_reaches(asker_of(&hit), "kvd_leases_ended_total{reason=expired}", 1));
	assert_true(rig_metric_is(asker_of(&hit), "kvd_leases", 0));
	check_while_stopped(&hit);
	usleep(SHORT_DEADLINE * 1000);
	pair_.hold[PAIR_CONSUMER] = 0;
	assert_int_equal(pair_consume_again(&pair_, SHORT_DEADLINE, &whole), KVC_OK);
	assert_true(whole);
	atomic_store(&pair_.notes->read, 0);
	atomic_store(&pair_.notes->go, 1);
	kill(pair_.pid[PAIR_CONSUMER], SIGCONT);
	await_answers(&hit, 0);
	pair_check_bytes(&pair_);
	pair_finish(&pair_);
	check_rigs_quiet();
}

KV_TEST(p4_p6_what_a_stopped_consumer_has_goes_to_the_next_one, setup_short, teardown)
{
	stop_reader(1);
}

KV_TEST(p4_p6_what_a_stopped_consumer_of_a_peer_has_goes_to_the_next_one, setup_short, teardown)
{
	stop_reader(0);
}

int main(int argc, char **argv)
{
	if (argc == 2) {
		rounds_ = (uint32_t)strtoul(argv[1], NULL, 10);
	}

	return kv_test_run(NULL, NULL);
}
