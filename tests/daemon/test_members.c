/* Members over the wire: who may join, what they map, what remains of them when they die. */
#include "daemon/raw.h"
#include "kv_child.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define N 8u

static int watch_;
static uint64_t seed_ = 1;

KV_FIXTURE(setup)
{
	static const char *const args[] = {"--namespaces=other,default", "--limits.send_queue=64KiB", "--lease.ttl=60s",
					   NULL};

	raw_daemon_start(&daemon_, args);
	watch_ = raw_open(daemon_.sock);
}

/* Gauges are renewed now and then. */
static void falls_to(const char *gauge, uint64_t value)
{
	for (int i = 0; raw_metric(watch_, gauge) != value; i++) {
		if (i > 1000) {
			fail_msg("%s is still %llu", gauge, (unsigned long long)raw_metric(watch_, gauge));
		}
		usleep(5000);
	}
}

/* P4 at the end of every run: nothing is left. */
KV_FIXTURE(teardown)
{
	const kv_msg_check_t ask = {0};
	kv_msg_check_reply_t reply;

	falls_to("kvd_leases", 0);
	falls_to("kvd_puts", 0);
	falls_to("kvd_pins", 0);
	assert_int_equal(raw_call(watch_, KV_CODE_CHECK, &ask, &reply), KV_OK);
	if (reply.failed != 0) {
		fail_msg("%.*s", (int)reply.json.len, (const char *)reply.json.data);
	}
	close(watch_);
	raw_daemon_end(&daemon_);
}

/* ---- joining --------------------------------------------------------------------------------- */

KV_TEST(p1_a_join_needs_a_live_pidfd)
{
	uint64_t before = raw_metric(watch_, "kvd_joins_refused_total{reason=no_pidfd}");
	kv_msg_join_reply_t reply;
	int fd = raw_open(daemon_.sock);
	int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
	pid_t pid = fork();

	if (pid == 0) {
		_exit(0);
	}
	int dead = (int)syscall(SYS_pidfd_open, pid, 0);
	assert_int_equal(waitpid(pid, NULL, 0), pid);

	assert_int_equal(raw_join_with(fd, "i", NULL, -1, &reply), KV_ERR_PIDFD_REQUIRED);
	assert_int_equal(raw_join_with(fd, "i", NULL, null, &reply), KV_ERR_PIDFD_REQUIRED);
	assert_int_equal(raw_join_with(fd, "i", NULL, dead, &reply), KV_ERR_PIDFD_REQUIRED);
	assert_int_equal(raw_metric(watch_, "kvd_joins_refused_total{reason=no_pidfd}"), before + 3);
	close(null);
	close(dead);
	close(fd);
}

KV_TEST(p8_an_instance_is_joined_with_its_secret_only)
{
	static const uint8_t wrong[16] = "fedcba9876543210";
	int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
	kv_msg_join_reply_t reply;
	raw_member_t member;

	raw_join(&member, daemon_.sock, "secretive");
	int fd = raw_open(daemon_.sock);
	assert_int_equal(raw_join_with(fd, "secretive", wrong, pidfd, &reply), KV_ERR_SECRET);
	assert_int_equal(raw_join_with(member.fd, "another", NULL, pidfd, &reply), KV_ERR_EXISTS);
	assert_int_equal(raw_join_with(fd, "", NULL, pidfd, &reply), KV_ERR_ARG);
	assert_int_equal(raw_join_with(fd, "secretive", NULL, pidfd, &reply), KV_OK);
	assert_true(reply.instance_id == member.joined.instance_id && reply.member_id != member.joined.member_id);
	for (uint32_t i = 0; i < raw_reply_fd_count; i++) {
		close(raw_reply_fds[i]);
	}
	close(fd);
	close(pidfd);
	raw_leave(&member);
}

KV_TEST(p6_a_client_cannot_write_or_resize_what_the_daemon_writes)
{
	raw_member_t member;

	raw_join(&member, daemon_.sock, "sealed");
	for (int i = 0; i < 2; i++) { /* mirror, lease area */
		assert_true(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, member.area_fds[i], 0) == MAP_FAILED);
		assert_int_equal(pwrite(member.area_fds[i], "x", 1, 0), -1);
	}
	for (int i = 0; i < 3; i++) {
		assert_int_equal(ftruncate(member.area_fds[i], 0), -1);
		assert_int_equal(ftruncate(member.area_fds[i], 1 << 30), -1);
	}
	assert_int_equal(fallocate(member.area_fds[2], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
				   (off_t)member.joined.member_bytes),
			 0);
	usleep(50000); /* the daemon looks into its area meanwhile */
	assert_true(raw_metric(watch_, "kvd_sessions") >= 2);
	assert_true(member.mirror->magic == KV_MIRROR_MAGIC &&
		    member.mirror->total_bytes <= member.joined.mirror_bytes);
	raw_leave(&member);
}

/* ---- spaces ---------------------------------------------------------------------------------- */

static kv_status_t space_with(int fd, const char *from, const char *to)
{
	static const char good[] =
		"model=m\nweights=w\ndtype=f32\nquantization=none\nrope=none\nlora=none\nhash=kv1\nhash_tokens=16\n"
		"groups=0:full:16\nlayout=kvk1 heads%3D2 layers%3D2 tokens%3D16 k%3D16 v%3D16 dtype%3Df32 "
		"inner%3Dsplit page%3D0\n"
		"page_format=plain\n";
	static const char layout[] = "kvk1 heads=2 layers=2 tokens=16 k=16 v=16 dtype=f32 inner=split page=0";
	char text[1024], *at;
	kv_msg_space_open_reply_t reply;

	strcpy(text, good);
	at = strstr(text, from);
	assert_non_null(at);
	memmove(at + strlen(to), at + strlen(from), strlen(at + strlen(from)) + 1);
	memcpy(at, to, strlen(to));
	const kv_msg_space_open_t ask = {.identity = kv_slice_str(text), .layout = kv_slice_str(layout)};

	return raw_call(fd, KV_CODE_SPACE_OPEN, &ask, &reply);
}

KV_TEST(p10_an_incomplete_or_contradictory_identity_is_refused)
{
	assert_int_equal(space_with(watch_, "model=m", "model=m"), KV_OK);
	assert_int_equal(space_with(watch_, "model=m\n", ""), KV_ERR_IDENTITY);
	assert_int_equal(space_with(watch_, "rope=none", "rope="), KV_ERR_IDENTITY);
	assert_int_equal(space_with(watch_, "groups=0:full:16", "groups=0:full"), KV_ERR_IDENTITY);
	assert_int_equal(space_with(watch_, "groups=0:full:16", "groups=0:window:16:0"), KV_ERR_IDENTITY);
	assert_int_equal(space_with(watch_, "groups=0:full:16", "groups=0:full:32"), KV_ERR_LAYOUT);
	assert_int_equal(space_with(watch_, "heads%3D2", "heads%3D4"), KV_ERR_IDENTITY);
}

KV_TEST(p8_a_namespace_sees_nothing_of_another)
{
	char other[128];
	raw_member_t here, there;
	kv_key_t keys[N];
	kv_msg_acquire_reply_t lease;
	const kv_msg_status_t ask = {.detail = 2};
	kv_msg_status_reply_t status;

	snprintf(other, sizeof other, "%s/other.sock", daemon_.dir);
	raw_keys(seed_++, keys, N);
	raw_join(&here, daemon_.sock, "here");
	raw_join(&there, other, "there");
	assert_int_equal(raw_space(&here, "confidential"), KV_OK);
	assert_int_equal(raw_space(&there, "confidential"), KV_OK);
	assert_int_equal(raw_put(&here, keys, N, 1), N);
	assert_true(raw_acquire(&there, keys, N, &lease) != KV_OK || lease.lease == 0);
	raw_call(there.fd, KV_CODE_STATUS, &ask, &status);
	assert_non_null(memmem(status.json.data, status.json.len, "there", 5));
	assert_null(memmem(status.json.data, status.json.len, "\"here\"", 6));
	raw_leave(&here);
	raw_leave(&there);
}

/* ---- reports --------------------------------------------------------------------------------- */

KV_TEST(p6_reports_are_copied_out_once_and_checked)
{
	uint64_t tokens = raw_metric(watch_, "kvd_prefix_query_tokens_total"),
		 missed = raw_metric(watch_, "kvd_prefix_miss_tokens_total{reason=daemon_stale}"),
		 bad = raw_metric(watch_, "kvd_bad_reports_total");
	raw_member_t member;

	raw_join(&member, daemon_.sock, "reporter");
	assert_int_equal(raw_space(&member, "reported"), KV_OK);
	kv_member_area_header_t *header = (kv_member_area_header_t *)(void *)member.area;
	kv_report_t *ring = (kv_report_t *)(void *)(member.area + header->ring_offset);
	ring[0] = (kv_report_t){.type = KV_REPORT_REQUEST,
				.space = member.space.space,
				.query_tokens = 1000,
				.hit_cpu_tokens = 500,
				.hit_engine_tokens = 100,
				.why = KV_WHY_DAEMON_STALE};
	ring[1] = (kv_report_t){.type = 99, .space = member.space.space, .query_tokens = 1000};
	atomic_store(&header->head, 2);
	assert_true(raw_metric_reaches(watch_, "kvd_prefix_query_tokens_total", tokens + 1000));
	assert_true(raw_metric_reaches(watch_, "kvd_prefix_miss_tokens_total{reason=daemon_stale}", missed + 400));
	assert_true(raw_metric_reaches(watch_, "kvd_bad_reports_total", bad + 1));
	atomic_store(&header->dropped, 7);
	assert_true(raw_metric_reaches(watch_, "kvd_lost_reports_total", 7));
	atomic_store(&header->head, UINT64_C(1) << 60);
	assert_true(raw_metric_reaches(watch_, "kvd_bad_reports_total", bad + 2));
	memset(header, 0xff, sizeof *header); /* the daemon believes nothing in it */
	assert_true(raw_metric_reaches(watch_, "kvd_bad_reports_total", bad + 3));
	raw_leave(&member);
}

/* No client can have dropped that many: whatever it is, it is not a count. The counts after it are taken from there. */
KV_TEST(p6_a_count_of_lost_reports_that_cannot_be_is_refused)
{
	static const uint64_t garbage[] = {UINT64_C(1) << 60, UINT64_MAX, 0, UINT64_C(1) << 40};
	uint64_t lost = raw_metric(watch_, "kvd_lost_reports_total"), bad = raw_metric(watch_, "kvd_bad_reports_total");
	raw_member_t member;

	raw_join(&member, daemon_.sock, "miscounter");
	kv_member_area_header_t *header = (kv_member_area_header_t *)(void *)member.area;
	for (size_t i = 0; i < KV_COUNT_OF(garbage); i++) {
		atomic_store(&header->dropped, garbage[i]);
		assert_true(raw_metric_reaches(watch_, "kvd_bad_reports_total", ++bad));
		assert_int_equal(raw_metric(watch_, "kvd_lost_reports_total"), lost);
		atomic_fetch_add(&header->dropped, 1000); /* within the 10 ms and more between two looks */
		lost += 1000;
		assert_true(raw_metric_reaches(watch_, "kvd_lost_reports_total", lost));
		assert_int_equal(raw_metric(watch_, "kvd_lost_reports_total"), lost);
	}
	atomic_store(&header->dropped, UINT64_C(1) << 61); /* and at the end */
	raw_leave(&member);
	assert_true(raw_metric_reaches(watch_, "kvd_bad_reports_total", ++bad));
	assert_int_equal(raw_metric(watch_, "kvd_bad_reports_total"), bad);
	assert_int_equal(raw_metric(watch_, "kvd_lost_reports_total"), lost);
}

/* ---- dying ----------------------------------------------------------------------------------- */

static kv_key_t victim_keys_[2 * N];

/* A lease, and a put that is half written. */
static void hold_things(void *arg, int ready)
{
	raw_member_t member;
	kv_msg_acquire_reply_t lease;
	kv_msg_put_start_reply_t put;

	(void)arg;
	raw_join(&member, daemon_.sock, "victim");
	assert_int_equal(raw_space(&member, "doomed"), KV_OK);
	assert_int_equal(raw_put(&member, victim_keys_, N, 1), N);
	assert_int_equal(raw_acquire(&member, victim_keys_, N, &lease), KV_OK);
	assert_int_equal(raw_put_start(&member, &victim_keys_[N - 1], N, &victim_keys_[N], N, &put), KV_OK);
	raw_fill(&member, put.offset, 0, 4);
	child_say(ready);
	pause();
}

KV_TEST(p4_a_client_killed_with_a_lease_and_a_put_leaves_nothing)
{
	raw_keys(seed_++, victim_keys_, 2 * N);
	pid_t pid = child_start(hold_things, NULL);
	falls_to("kvd_leases", 1);
	falls_to("kvd_puts", 1);
	child_kill(pid);
	falls_to("kvd_leases", 0);
	falls_to("kvd_puts", 0);
	falls_to("kvd_tier_quarantined_bytes{tier=cpu}", 0);
	assert_true(raw_metric(watch_, "kvd_members_died_total") >= 1);
}

static void hold_and_hang_up(void *arg, int ready)
{
	raw_member_t member;
	kv_msg_put_start_reply_t put;

	(void)arg;
	raw_join(&member, daemon_.sock, "hanger");
	assert_int_equal(raw_space(&member, "doomed"), KV_OK);
	assert_int_equal(raw_put_start(&member, NULL, 0, victim_keys_, N, &put), KV_OK);
	raw_fill(&member, put.offset, 0, 4);
	close(member.fd); /* the mappings stay */
	child_say(ready);
	pause();
}

KV_TEST(p1_memory_a_member_may_still_touch_waits_for_its_death)
{
	raw_keys(seed_++, victim_keys_, N);
	pid_t pid = child_start(hold_and_hang_up, NULL);
	assert_true(raw_metric_reaches(watch_, "kvd_tier_quarantined_bytes{tier=cpu}", N * RAW_BLOCK_BYTES));
	usleep(300000);
	assert_int_equal(raw_metric(watch_, "kvd_tier_quarantined_bytes{tier=cpu}"), N * RAW_BLOCK_BYTES);
	child_kill(pid);
	falls_to("kvd_tier_quarantined_bytes{tier=cpu}", 0);
}

KV_TEST(p5_a_refused_member_leaves_no_instance_behind)
{
	static const char *const args[] = {"--limits.members=1", "--limits.instances=3", "--log.level=debug", NULL};
	raw_daemon_t small;
	raw_member_t only;

	raw_daemon_start(&small, args);
	raw_join(&only, small.sock, "only");
	for (uint32_t i = 0; i < 10; i++) {
		int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0), fd = raw_open(small.sock);
		kv_msg_join_reply_t reply;
		char name[16];

		snprintf(name, sizeof name, "late%u", i);
		assert_int_equal(raw_join_with(fd, name, NULL, pidfd, &reply), KV_ERR_LIMIT);
		close(pidfd);
		close(fd);
	}
	assert_int_equal(raw_metric_reaches(only.fd, "kvd_instances", 1), 1);
	usleep(50000); /* one more turn of the gauges */
	assert_int_equal(raw_metric(only.fd, "kvd_instances"), 1);
	assert_true(raw_log_has(&small, "status ERR_LIMIT detail \"limits.members")); /* the option that bounds */
	assert_true(raw_log_has(&small, "a connection is open: session "));
	KV_AWAIT(raw_log_has(&small, "a connection has ended: session "));
	raw_leave(&only);
	raw_daemon_end(&small);
}

/* One process, attached again and again: what its old connections may still touch is asked of the newest, and nothing
 * is kept of them. */
KV_TEST(p4_a_process_that_attaches_again_leaves_nothing_behind)
{
	raw_member_t anchor, member;
	kv_msg_put_start_reply_t put;
	const kv_msg_drained_t drained = {.what = 2};
	kv_msg_drained_reply_t freed;
	uint32_t fds;

	raw_keys(seed_++, victim_keys_, N);
	for (uint32_t times = 0; times < 2; times++) {
		raw_join(&member, daemon_.sock, times == 0 ? "again" : "other");
		raw_leave(&member);
	}
	falls_to("kvd_members", 0);
	falls_to("kvd_instances", 0);
	fds = kv_test_count_fds(daemon_.pid, "");
	for (uint32_t times = 0; times < 200; times++) {
		raw_join(&member, daemon_.sock, "again");
		assert_int_equal(raw_space(&member, "doomed"), KV_OK);
		if (times % 40 == 0) {
			assert_int_equal(raw_put_start(&member, NULL, 0, victim_keys_, N, &put), KV_OK);
		}
		raw_leave(&member);
	}
	raw_join(&member, daemon_.sock, "again");
	falls_to("kvd_members", 1);
	falls_to("kvd_instances", 1);
	assert_true(raw_metric(watch_, "kvd_tier_quarantined_bytes{tier=cpu}") > 0);
	assert_int_equal(raw_call(member.fd, KV_CODE_DRAINED, &drained, &freed), KV_OK);
	assert_true(freed.freed > 0);
	falls_to("kvd_tier_quarantined_bytes{tier=cpu}", 0);
	raw_join(&anchor, daemon_.sock, "again"); /* two connections at once: one takes over from the other */
	raw_leave(&member);
	falls_to("kvd_members", 1);
	raw_leave(&anchor);
	falls_to("kvd_members", 0);
	falls_to("kvd_instances", 0);
	assert_in_range(kv_test_count_fds(daemon_.pid, ""), 1, fds + 8); /* slabs may have come */
}

/* Join the instance `again` and start a put of N blocks. */
static uint64_t join_and_put(raw_member_t *member)
{
	kv_msg_put_start_reply_t put;

	raw_join(member, daemon_.sock, "again");
	assert_int_equal(raw_space(member, "doomed"), KV_OK);
	assert_int_equal(raw_put_start(member, NULL, 0, victim_keys_, N, &put), KV_OK);
	assert_int_equal(put.n, N);

	return put.put;
}

static uint32_t send_drained(raw_member_t *member)
{
	const kv_msg_drained_t drained = {.what = 2};
	kv_msg_drained_reply_t reply;

	assert_int_equal(raw_call(member->fd, KV_CODE_DRAINED, &drained, &reply), KV_OK);

	return reply.freed;
}

/* Two attachments of one process: what one of them may touch the other one cannot know. */
KV_TEST(p1_an_attachment_speaks_for_its_own_connections_only)
{
	raw_member_t member, other, again;

	raw_keys(seed_++, victim_keys_, N);
	join_and_put(&member);
	close(member.fd); /* the mappings stay */
	assert_true(raw_metric_reaches(watch_, "kvd_tier_quarantined_bytes{tier=cpu}", N * RAW_BLOCK_BYTES));
	raw_attachment = 2;
	raw_join(&other, daemon_.sock, "again");
	assert_int_equal(send_drained(&other), 0);
	assert_int_equal(raw_metric(watch_, "kvd_tier_quarantined_bytes{tier=cpu}"), N * RAW_BLOCK_BYTES);
	raw_attachment = 1;
	raw_join(&again, daemon_.sock, "again");
	raw_leave(&other);
	assert_int_equal(send_drained(&again), N);
	member.fd = dup(again.fd);
	raw_leave(&member);
	raw_leave(&again);
	falls_to("kvd_tier_quarantined_bytes{tier=cpu}", 0);
	falls_to("kvd_members", 0);
}

KV_TEST(p4_a_word_for_a_connection_whose_end_was_not_seen_yet_counts)
{
	raw_member_t member, again;
	kv_msg_put_revoke_t revoke;

	raw_keys(seed_++, victim_keys_, N);
	revoke.put = join_and_put(&member);
	assert_int_equal(raw_call(member.fd, KV_CODE_PUT_REVOKE, &revoke, NULL), KV_OK);
	raw_join(&again, daemon_.sock, "again");
	assert_int_equal(send_drained(&again), 0);
	raw_leave(&member);
	falls_to("kvd_members", 1);
	falls_to("kvd_tier_quarantined_bytes{tier=cpu}", 0);
	raw_leave(&again);
	falls_to("kvd_members", 0);
}

/* Its last word counts, although another process holds the socket open. */
KV_TEST(p4_a_member_that_leaves_is_not_waited_for)
{
	const kv_msg_drained_t leave = {.what = 4};
	raw_member_t member;

	raw_keys(seed_++, victim_keys_, N);
	for (uint32_t times = 0; times < 20; times++) {
		join_and_put(&member);
		raw_send(member.fd, KV_CODE_DRAINED, 1, &leave, NULL, 0);
		assert_true(raw_closed(member.fd, RAW_TIMEOUT_MS));
		falls_to("kvd_tier_quarantined_bytes{tier=cpu}", 0);
		falls_to("kvd_members", 0);
		falls_to("kvd_instances", 0);
		raw_leave(&member);
	}
}

/* Ask and never read. */
static void ask_and_stop(void *arg, int ready)
{
	const kv_msg_status_t ask = {.detail = 1};
	raw_member_t member;

	(void)arg;
	raw_join(&member, daemon_.sock, "stopped");
	child_say(ready);
	for (uint64_t id = 1; id < 4000; id++) {
		raw_send(member.fd, KV_CODE_STATUS, id, &ask, NULL, 0);
	}
	pause();
}

KV_TEST(p5_a_member_that_does_not_read_is_closed_and_delays_no_other)
{
	uint64_t before = raw_metric(watch_, "kvd_send_overflows_total");
	raw_member_t member;
	kv_key_t keys[N];

	pid_t pid = child_start(ask_and_stop, NULL);
	assert_true(raw_metric_reaches(watch_, "kvd_send_overflows_total", before + 1));
	kill(pid, SIGSTOP);
	raw_keys(seed_++, keys, N);
	raw_join(&member, daemon_.sock, "undisturbed");
	assert_int_equal(raw_space(&member, "undisturbed"), KV_OK);
	assert_int_equal(raw_put(&member, keys, N, 9), N);
	raw_leave(&member);
	child_kill(pid);
}

KV_TEST(p6_a_slab_with_holes_does_not_end_the_daemon)
{
	raw_member_t member;
	kv_key_t keys[N];

	raw_keys(seed_++, keys, N);
	raw_join(&member, daemon_.sock, "puncher");
	assert_int_equal(raw_space(&member, "punched"), KV_OK);
	assert_int_equal(raw_put(&member, keys, N, 7), N);
	assert_int_equal(ftruncate(member.slabs[0].data_fd, 0), -1);
	assert_int_equal(fallocate(member.slabs[0].data_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
				   (off_t)member.slabs[0].info.bytes),
			 0);
	assert_int_equal(fallocate(member.area_fds[2], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
				   (off_t)member.joined.member_bytes),
			 0);
	usleep(50000);
	assert_true(raw_metric(watch_, "kvd_sessions") >= 2);
	raw_leave(&member);
}

KV_TEST(p4_the_documents_are_whole)
{
	const kv_msg_status_t status = {.detail = 2};
	const kv_msg_config_t config = {0};
	kv_msg_status_reply_t a;
	kv_msg_config_reply_t b;

	assert_int_equal(raw_call(watch_, KV_CODE_STATUS, &status, &a), KV_OK);
	assert_non_null(memmem(a.json.data, a.json.len, "\"program\":\"raw\"", 15));
	assert_non_null(memmem(a.json.data, a.json.len, "there is no disk tier", 21));
	assert_true(a.json.data[0] == '{' && a.json.data[a.json.len - 1] == '}');
	assert_int_equal(raw_call(watch_, KV_CODE_CONFIG, &config, &b), KV_OK);
	assert_non_null(memmem(b.json.data, b.json.len, "\"limits.send_queue\"", 19));
}

KV_TEST_MAIN(setup, teardown)
