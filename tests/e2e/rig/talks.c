#include "e2e/rig/talks.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

void talks_stage(rig_t *rig, int disk)
{
	rig_init(rig, disk);
	rig_option(rig, "--keeper=on");
	rig_option(rig, "--gpu.size=%uMiB", 2 * TALKS_SLABS);
	rig_option(rig, "--gpu.slab_size=2MiB");
	rig_option(rig, "--gpu.devices=fake-0");
}

void talks_begin(rig_t *rig, user_t *user)
{
	talks_stage(rig, 0);
	rig_start(rig);
	talks_attach(rig, user);
	talks_put_all(user);
}

kvc_status_t talks_try(user_t *user, const char *sock, const char *device)
{
	kvc_identity_t identity = user_identity("model");

	identity.device = device;

	return user_try(user, sock, &identity);
}

void talks_attach_to(user_t *user, const char *sock, const char *device)
{
	kvc_status_t status;

	KV_AWAIT((status = talks_try(user, sock, device)) != (kvc_status_t)KV_ERR_TIER_OFF);
	if (status != KVC_OK) {
		fail_msg("%d: %s", (int)status, kvc_last_error());
	}
}

void talks_attach(const rig_t *rig, user_t *user)
{
	talks_attach_to(user, rig->sock, "fake-0");
}

void talks_wait_attached(user_t *user, uint64_t incarnation)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;

	while (kvc_poll(user->kvc, 5) != KVC_OK || kvc_incarnation(user->kvc) == incarnation) {
		assert_true(rig_now_ms() < deadline);
	}
}

void talks_wait_next(const rig_t *rig, pid_t before)
{
	pid_t now;

	KV_AWAIT((now = rig_daemon(rig)) != before && now != 0 && now != rig->pid);
	rig_serving(rig);
	assert_int_equal(waitpid(rig->pid, NULL, WNOHANG), 0);
}

void talks_kill_daemon(const rig_t *rig)
{
	const pid_t daemon = rig_daemon(rig);

	assert_true(daemon > 0 && daemon != rig->pid);
	kill(daemon, SIGKILL);
	talks_wait_next(rig, daemon);
}

uint32_t talks_put(user_t *user, uint64_t seed)
{
	kvc_key_t keys[TALKS_LEN];
	uint32_t visible = 0;

	user_keys(user, seed, TALKS_LEN, keys);

	return user_put(user, keys, 0, TALKS_LEN, 0, &visible) == KVC_OK ? visible : 0;
}

uint32_t talks_get(user_t *user, uint64_t seed)
{
	kvc_key_t keys[TALKS_LEN];
	uint32_t n = 0;
	kvc_status_t status;

	user_keys(user, seed, TALKS_LEN, keys);
	status = user_get(user, keys, TALKS_LEN, &n);
	assert_int_equal(user->wrong, 0);

	return status == KVC_OK ? n : 0;
}

void talks_put_all(user_t *user)
{
	for (uint64_t c = 0; c < TALKS; c++) {
		assert_int_equal(talks_put(user, c), TALKS_LEN);
	}
}

void talks_expect(user_t *user, uint32_t each)
{
	for (uint64_t c = 0; c < TALKS; c++) {
		assert_int_equal(talks_get(user, c), each);
	}
}

void talks_check_unfinished_put(rig_t *rig, void (*change)(void))
{
	const kvc_put_options_t options = {.struct_size = sizeof options};
	kvc_key_t keys[TALKS_LEN];
	kvc_put_t *put = NULL;
	user_t user, other;
	void *data = NULL;
	uint64_t incarnation;

	talks_stage(rig, 0);
	rig_start(rig);
	talks_attach(rig, &user);
	talks_attach(rig, &other); /* another attachment of this process, which has no copy under way */
	talks_put_all(&user);
	user_keys(&user, 100, TALKS_LEN, keys);
	assert_int_equal(kvc_put_start(user.space, keys, 0, TALKS_LEN, &options, &put), KVC_OK);
	assert_int_equal(kvc_put_ready(put, 10000), KVC_OK);
	assert_int_equal(kvc_put_block(put, 0, &data), KVC_OK);
	incarnation = kvc_incarnation(user.kvc);
	change();
	talks_wait_attached(&other, incarnation);
	talks_expect(&other, TALKS_LEN);
	assert_true(rig_metric_is(rig, "kvd_adopt_writers", 1));
	assert_int_equal(rig_metric(rig, "kvd_tier_quarantined_bytes{tier=gpu}"), TALKS_LEN * RIG_BLOCK_BYTES);
	memset(data, 0xaa, RIG_BLOCK_BYTES); /* a late copy, into memory that nobody else has */
	talks_expect(&other, TALKS_LEN);
	talks_wait_attached(&user, incarnation); /* it has joined again, and still holds the put */
	assert_int_equal(rig_metric(rig, "kvd_tier_quarantined_bytes{tier=gpu}"), TALKS_LEN * RIG_BLOCK_BYTES);
	kvc_put_free(put);
	for (const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	     rig_metric(rig, "kvd_tier_quarantined_bytes{tier=gpu}") > 0;) {
		assert_true(rig_now_ms() < deadline);
		(void)kvc_poll(user.kvc, 5);
	}
	assert_int_equal(rig_metric(rig, "kvd_adopt_writers"), 0);
	user_leave(&user);
	user_leave(&other);
	rig_end(rig);
}

/* ---- engines --------------------------------------------------------------------------------- */

talks_notes_t *talks_notes_make(const rig_t *rig, uint32_t talks)
{
	talks_notes_t *notes = mmap(NULL, sizeof *notes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	assert_true(notes != MAP_FAILED);
	notes->rig = rig;
	notes->talks = talks;

	return notes;
}

void talks_notes_free(talks_notes_t *notes)
{
	munmap(notes, sizeof *notes);
}

static void run_engine(void *arg, int ready)
{
	talks_notes_t *notes = arg;
	kv_test_rng_t rng = {.state = kv_test_seed()};
	uint64_t incarnation = 0;
	user_t user;

	talks_attach(notes->rig, &user);
	child_say(ready);
	while (!atomic_load(&notes->stop)) {
		const uint64_t talk = kv_test_below(&rng, notes->talks);
		kvc_key_t keys[TALKS_LEN];
		uint32_t n = 0;

		if (kvc_poll(user.kvc, 5) != KVC_OK) {
			continue;
		}
		if (kvc_incarnation(user.kvc) != incarnation) {
			incarnation = kvc_incarnation(user.kvc);
			atomic_fetch_add(&notes->attached, 1);
		}
		user_keys(&user, talk, TALKS_LEN, keys);
		(void)user_get(&user, keys, TALKS_LEN, &n);
		atomic_fetch_add(&notes->hits, n);
		atomic_store(&notes->wrong, user.wrong);
		if (n < TALKS_LEN && user_put(&user, keys, 0, TALKS_LEN, 0, NULL) == KVC_OK) {
			atomic_fetch_add(&notes->put, 1);
		}
	}
	kvc_detach(user.kvc);
}

void talks_engines_start(talks_notes_t *notes, pid_t *pids, uint32_t n)
{
	notes->before = atomic_load(&notes->put);
	for (uint32_t i = 0; i < n; i++) {
		pids[i] = child_start(run_engine, notes);
	}
}

void talks_engines_end(talks_notes_t *notes, const pid_t *pids, uint32_t n)
{
	atomic_store(&notes->stop, 1);
	for (uint32_t i = 0; i < n; i++) {
		int wstatus = 0;

		assert_int_equal(waitpid(pids[i], &wstatus, 0), pids[i]);
		assert_int_equal(wstatus, 0);
	}
	atomic_store(&notes->stop, 0);
	assert_int_equal(atomic_load(&notes->wrong), 0);
}

void talks_engines_wait(talks_notes_t *notes, uint32_t puts)
{
	KV_AWAIT(atomic_load(&notes->put) >= notes->before + puts);
}
