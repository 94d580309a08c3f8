/* Spaces in the memory of a GPU, on a device that is none: what it has for memory are memfds. */
#include "e2e/rig/rig.h"

#include <signal.h>
#include <unistd.h>

#define LEN    32u  /* blocks of a conversation */
#define SLABS  4u   /* of 2 MiB: 128 blocks each */
#define IN_ALL 512u /* blocks */

static rig_t rig;

static void stage_devices(const char *namespaces, const char *devices)
{
	rig_init(&rig, 1);
	rig_option(&rig, "--gpu.size=%uMiB", 2 * SLABS);
	rig_option(&rig, "--gpu.slab_size=2MiB");
	rig_option(&rig, "--gpu.devices=%s", devices);
	rig_option(&rig, "--namespaces=%s", namespaces);
	rig_start(&rig);
}

static kvc_status_t try_device(user_t *user, const char *sock, const char *device)
{
	kvc_identity_t identity = user_identity("model");

	identity.device = device;

	return user_try(user, sock, &identity);
}

static void stage(const char *namespaces)
{
	stage_devices(namespaces, "fake-0");
}

/* The daemon has its memory a moment after it serves. */
static void attach_to(user_t *user, const char *sock, const char *device)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	kvc_status_t status;

	while ((status = try_device(user, sock, device)) == (kvc_status_t)KV_ERR_TIER_OFF && rig_now_ms() < deadline) {
		user_leave(user);
		usleep(20000);
	}
	if (status != KVC_OK) {
		fail_msg("%d: %s", (int)status, kvc_last_error());
	}
}

static void attach(user_t *user, const char *sock)
{
	attach_to(user, sock, "fake-0");
}

static uint32_t put_conversation(user_t *user, uint64_t seed)
{
	kvc_key_t keys[LEN];
	uint32_t visible = 0;

	user_keys(user, seed, LEN, keys);

	return user_put(user, keys, 0, LEN, 0, &visible) == KVC_OK ? visible : 0;
}

/* How many blocks of it are there; each has its own bytes. None if the memory went back to its tenant meanwhile, which
 * ends the leases in it. */
static uint32_t get_conversation(user_t *user, uint64_t seed)
{
	kvc_key_t keys[LEN];
	uint32_t n = 0;
	kvc_status_t status;

	user_keys(user, seed, LEN, keys);
	status = user_get(user, keys, LEN, &n);
	if (status != KVC_OK && status != KVC_MISS && status != KVC_ERR_REVOKED) {
		fail_msg("%d: %s", (int)status, kvc_last_error());
	}
	assert_int_equal(user->wrong, 0);

	return status == KVC_OK ? n : 0;
}

static void end_stage(void)
{
	rig_end(&rig);
}

KV_FIXTURE(clean_up)
{
	rig_clean_up(&rig);
}

KV_TEST(p1_blocks_in_gpu_memory_outlive_their_engine, NULL, clean_up)
{
	user_t gpu, host;

	stage("default");
	attach(&gpu, rig.sock);
	user_attach(&host, &rig, "model");
	for (uint64_t c = 0; c < 4; c++) {
		assert_int_equal(put_conversation(&gpu, c), LEN);
	}
	assert_int_equal(get_conversation(&host, 0), 0); /* another space */
	assert_int_equal(put_conversation(&host, 0), LEN);
	user_leave(&gpu); /* the engine goes */
	attach(&gpu, rig.sock);
	for (uint64_t c = 0; c < 4; c++) {
		assert_int_equal(get_conversation(&gpu, c), LEN);
	}
	assert_int_equal(get_conversation(&host, 0), LEN);
	rig_written(&rig);
	assert_true(rig_metric_is(&rig, "kvd_tier_blocks{tier=gpu}", 4 * LEN));
	assert_true(rig_metric_is(&rig, "kvd_tier_blocks{tier=disk}", LEN)); /* of the host's space alone */
	assert_int_equal(rig_metric(&rig, "kvd_tier_bytes{tier=gpu}"), 2u << 20);
	assert_int_equal(rig_metric(&rig, "kvd_tier_limit_bytes{tier=gpu}"), SLABS * (2u << 20));
	user_leave(&gpu);
	user_leave(&host);
	end_stage();
}

KV_TEST(p5_gpu_memory_evicts_within_its_size, NULL, clean_up)
{
	user_t gpu, host;
	uint32_t there = 0;

	stage("default");
	attach(&gpu, rig.sock);
	user_attach(&host, &rig, "model");
	assert_int_equal(put_conversation(&host, 0), LEN);
	for (uint64_t c = 0; c < 3 * IN_ALL / LEN; c++) {
		assert_int_equal(put_conversation(&gpu, c), LEN);
	}
	for (uint64_t c = 0; c < 3 * IN_ALL / LEN; c++) {
		there += get_conversation(&gpu, c);
	}
	assert_in_range(there, IN_ALL - LEN, IN_ALL);
	assert_true(rig_metric(&rig, "kvd_evicted_total{tier=gpu}") >= 2 * IN_ALL);
	assert_int_equal(rig_metric(&rig, "kvd_evicted_total{tier=cpu}"), 0);
	assert_int_equal(rig_metric(&rig, "kvd_tier_bytes{tier=gpu}"), SLABS * (2u << 20));
	assert_int_equal(get_conversation(&host, 0), LEN);
	user_leave(&gpu);
	user_leave(&host);
	end_stage();
}

/* All 0: it knows of none of that name. */
static kvc_device_t device_named(const user_t *user, const char *name)
{
	kvc_device_t device = {.struct_size = sizeof device};

	for (uint32_t i = 0; kvc_device(user->kvc, i, &device) == KVC_OK; i++) {
		if (strcmp(device.name, name) == 0) {
			return device;
		}
	}

	return (kvc_device_t){0};
}

/* A member learns which GPUs have memory, whether it came before or after that memory, and what it could map of it. The
 * slabs are those of its own namespace. */
KV_TEST(p8_a_member_knows_the_gpus_and_what_it_has_mapped, NULL, clean_up)
{
	char sock[96];
	user_t early, late, rival;
	kvc_device_t device;

	stage_devices("default,rival", "fake-0,fake-1");
	snprintf(sock, sizeof sock, "%.79s/rival.sock", rig.run_dir);
	user_attach(&early, &rig, "model");
	attach_to(&late, rig.sock, "fake-1");
	assert_int_equal(put_conversation(&late, 1), LEN);
	attach_to(&rival, sock, "fake-0");
	for (uint32_t i = 0; i < 2; i++) {
		user_t *user = i == 0 ? &early : &late;

		for (const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
		     (!device_named(user, "fake-0").name || device_named(user, "fake-1").mapped != 1) &&
		     rig_now_ms() < deadline;) {
			(void)kvc_poll(user->kvc, 3);
		}
		assert_non_null(device_named(user, "fake-0").name);
		assert_int_equal(device_named(user, "fake-0").mapped, 0);
		assert_int_equal(device_named(user, "fake-1").mapped, 1);
		assert_int_equal(device_named(user, "fake-1").unmapped, 0);
	}
	assert_int_equal(device_named(&rival, "fake-1").mapped, 0);
	rig_kill(&rig, SIGKILL);
	while (kvc_incarnation(late.kvc) != 0) {
		(void)kvc_poll(late.kvc, 3);
	}
	device.struct_size = sizeof device;
	assert_int_equal(kvc_device(late.kvc, 0, &device), KVC_MISS);
	rig_start(&rig);
	user_leave(&early);
	user_leave(&late);
	user_leave(&rival);
	end_stage();
}

/* What one tenant has borrowed returns to the other, as fresh memory. */
KV_TEST(p8_gpu_memory_of_one_tenant_is_never_another_s, NULL, clean_up)
{
	char sock[96];
	user_t user, rival;
	uint32_t there = 0;

	stage("default,rival");
	snprintf(sock, sizeof sock, "%.79s/rival.sock", rig.run_dir);
	attach(&user, rig.sock);
	for (uint64_t c = 0; c < IN_ALL / LEN; c++) {
		assert_int_equal(put_conversation(&user, c), LEN);
	}
	attach(&rival, sock);
	for (uint64_t c = 0; c < IN_ALL / LEN; c++) {
		assert_int_equal(get_conversation(&rival, c), 0);
	}
	/* Until the slabs have changed hands, which waits for the other tenant to unmap them. */
	for (const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	     there < IN_ALL / 2 - LEN && rig_now_ms() < deadline;) {
		there = 0;
		for (uint64_t c = 100; c < 100 + IN_ALL / LEN / 2; c++) {
			(void)put_conversation(&rival, c);
			(void)get_conversation(&user, 0);
			there += get_conversation(&rival, c);
		}
	}
	assert_in_range(there, IN_ALL / 2 - LEN, IN_ALL / 2);
	assert_true(rig_metric(&rig, "kvd_slabs_retired_total") >= SLABS / 2);
	assert_true(rig_metric(&rig, "kvd_tier_bytes{tier=gpu}") <= SLABS * (2u << 20));
	user_leave(&user);
	user_leave(&rival);
	end_stage();
}

KV_TEST(p6_a_killed_daemon_starts_with_empty_gpu_memory, NULL, clean_up)
{
	user_t gpu;

	stage("default");
	attach(&gpu, rig.sock);
	assert_int_equal(put_conversation(&gpu, 1), LEN);
	user_leave(&gpu);
	for (int i = 0; i < 3; i++) {
		rig_crash(&rig);
		rig_start(&rig);
		attach(&gpu, rig.sock);
		assert_int_equal(get_conversation(&gpu, 1), 0);
		assert_int_equal(put_conversation(&gpu, 1), LEN);
		assert_int_equal(get_conversation(&gpu, 1), LEN);
		user_leave(&gpu);
	}
	end_stage();
}

KV_TEST(p10_a_device_that_is_not_there_is_refused, NULL, clean_up)
{
	user_t user;
	char out[4096];

	stage("default");
	attach(&user, rig.sock);
	user_leave(&user);
	assert_int_equal(try_device(&user, rig.sock, "GPU-00000000-0000-0000-0000-000000000000"),
			 (kvc_status_t)KV_ERR_TIER_OFF);
	user_leave(&user);
	assert_int_equal(try_device(&user, rig.sock, "fake-1"), (kvc_status_t)KV_ERR_TIER_OFF);
	user_leave(&user);
	attach(&user, rig.sock);
	assert_int_equal(put_conversation(&user, 1), LEN);
	assert_int_equal(rig_kvctl(&rig, "reset --space 1 --yes", out, sizeof out), 0);
	assert_true(strstr(out, "  device=fake-0\n") && strstr(out, " in GPU memory, 0 on disk\n"));
	assert_int_equal(get_conversation(&user, 1), 0);
	assert_int_equal(rig_kvctl(&rig, "status", out, sizeof out), 0);
	assert_non_null(strstr(out, "fake-0"));
	user_leave(&user);
	end_stage();
}

KV_TEST_MAIN(NULL, NULL)
