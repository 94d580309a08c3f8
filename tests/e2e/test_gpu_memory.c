/* Spaces in the memory of a GPU, on a device that is none: what it has for memory are memfds. */
#include "e2e/rig/talks.h"

#include <signal.h>
#include <unistd.h>

#define LEN    TALKS_LEN
#define SLABS  TALKS_SLABS
#define IN_ALL (SLABS * 128u) /* blocks */

static void stage_devices(const char *namespaces, const char *devices)
{
	rig_init(&rig_, 1);
	rig_option(&rig_, "--gpu.size=%uMiB", 2 * SLABS);
	rig_option(&rig_, "--gpu.slab_size=2MiB");
	rig_option(&rig_, "--gpu.devices=%s", devices);
	rig_option(&rig_, "--namespaces=%s", namespaces);
	rig_start(&rig_);
}

static void stage(const char *namespaces)
{
	stage_devices(namespaces, "fake-0");
}

RIG_TEST(p1_blocks_in_gpu_memory_outlive_their_engine, stage("default"))
{
	user_t gpu, host;

	talks_attach(&rig_, &gpu);
	user_attach(&host, &rig_, "model");
	for (uint64_t c = 0; c < 4; c++) {
		assert_int_equal(talks_put(&gpu, c), LEN);
	}
	assert_int_equal(talks_get(&host, 0), 0); /* another space */
	assert_int_equal(talks_put(&host, 0), LEN);
	user_leave(&gpu); /* the engine goes */
	talks_attach(&rig_, &gpu);
	for (uint64_t c = 0; c < 4; c++) {
		assert_int_equal(talks_get(&gpu, c), LEN);
	}
	assert_int_equal(talks_get(&host, 0), LEN);
	rig_written(&rig_);
	assert_true(rig_metric_is(&rig_, "kvd_tier_blocks{tier=gpu}", 4 * LEN));
	assert_true(rig_metric_is(&rig_, "kvd_tier_blocks{tier=disk}", LEN)); /* of the host's space alone */
	assert_int_equal(rig_metric(&rig_, "kvd_tier_bytes{tier=gpu}"), 2u << 20);
	assert_int_equal(rig_metric(&rig_, "kvd_tier_limit_bytes{tier=gpu}"), SLABS * (2u << 20));
	user_leave(&gpu);
	user_leave(&host);
}

RIG_TEST(p5_gpu_memory_evicts_within_its_size, stage("default"))
{
	user_t gpu, host;
	uint32_t there = 0;

	talks_attach(&rig_, &gpu);
	user_attach(&host, &rig_, "model");
	assert_int_equal(talks_put(&host, 0), LEN);
	for (uint64_t c = 0; c < 3 * IN_ALL / LEN; c++) {
		assert_int_equal(talks_put(&gpu, c), LEN);
	}
	for (uint64_t c = 0; c < 3 * IN_ALL / LEN; c++) {
		there += talks_get(&gpu, c);
	}
	assert_in_range(there, IN_ALL - LEN, IN_ALL);
	assert_true(rig_metric(&rig_, "kvd_evicted_total{tier=gpu}") >= 2 * IN_ALL);
	assert_int_equal(rig_metric(&rig_, "kvd_evicted_total{tier=cpu}"), 0);
	assert_int_equal(rig_metric(&rig_, "kvd_tier_bytes{tier=gpu}"), SLABS * (2u << 20));
	assert_int_equal(talks_get(&host, 0), LEN);
	user_leave(&gpu);
	user_leave(&host);
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
RIG_TEST(p8_a_member_knows_the_gpus_and_what_it_has_mapped, stage_devices("default,rival", "fake-0,fake-1"))
{
	char sock[96];
	user_t early, late, rival;
	kvc_device_t device;

	snprintf(sock, sizeof sock, "%.79s/rival.sock", rig_.run_dir);
	user_attach(&early, &rig_, "model");
	talks_attach_to(&late, rig_.sock, "fake-1");
	assert_int_equal(talks_put(&late, 1), LEN);
	talks_attach_to(&rival, sock, "fake-0");
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
	rig_kill(&rig_, SIGKILL);
	while (kvc_incarnation(late.kvc) != 0) {
		(void)kvc_poll(late.kvc, 3);
	}
	device.struct_size = sizeof device;
	assert_int_equal(kvc_device(late.kvc, 0, &device), KVC_MISS);
	rig_start(&rig_);
	user_leave(&early);
	user_leave(&late);
	user_leave(&rival);
}

/* What one tenant has borrowed of the first GPU returns to the other, as fresh memory. */
static void borrow_and_return(const char *devices)
{
	char sock[96];
	user_t user, rival;
	uint32_t there = 0;

	stage_devices("default,rival", devices);
	snprintf(sock, sizeof sock, "%.79s/rival.sock", rig_.run_dir);
	talks_attach(&rig_, &user);
	for (uint64_t c = 0; c < IN_ALL / LEN; c++) {
		assert_int_equal(talks_put(&user, c), LEN);
	}
	talks_attach_to(&rival, sock, "fake-0");
	for (uint64_t c = 0; c < IN_ALL / LEN; c++) {
		assert_int_equal(talks_get(&rival, c), 0);
	}
	/* Until the slabs have changed hands, which waits for the other tenant to unmap them. */
	for (const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	     there < IN_ALL / 2 - LEN && rig_now_ms() < deadline;) {
		there = 0;
		for (uint64_t c = 100; c < 100 + IN_ALL / LEN / 2; c++) {
			(void)talks_put(&rival, c);
			(void)talks_get(&user, 0);
			there += talks_get(&rival, c);
		}
	}
	assert_in_range(there, IN_ALL / 2 - LEN, IN_ALL / 2);
	assert_true(rig_metric(&rig_, "kvd_slabs_retired_total") >= SLABS / 2);
	assert_true(rig_metric(&rig_, "kvd_tier_bytes{tier=gpu}") <= SLABS * (2u << 20));
	user_leave(&user);
	user_leave(&rival);
	rig_end(&rig_);
}

KV_TEST(p8_gpu_memory_of_one_tenant_is_never_another_s, NULL, rig_tear_down)
{
	borrow_and_return("fake-0");
}

/* The other GPU, which nobody uses, is no reason to keep all of this one. */
KV_TEST(p5_a_tenant_has_a_share_of_each_gpu, NULL, rig_tear_down)
{
	borrow_and_return("fake-0,fake-1");
}

RIG_TEST(p6_a_killed_daemon_starts_with_empty_gpu_memory, stage("default"))
{
	user_t gpu;

	talks_attach(&rig_, &gpu);
	assert_int_equal(talks_put(&gpu, 1), LEN);
	user_leave(&gpu);
	for (int i = 0; i < 3; i++) {
		rig_crash(&rig_);
		rig_start(&rig_);
		talks_attach(&rig_, &gpu);
		assert_int_equal(talks_get(&gpu, 1), 0);
		assert_int_equal(talks_put(&gpu, 1), LEN);
		assert_int_equal(talks_get(&gpu, 1), LEN);
		user_leave(&gpu);
	}
}

RIG_TEST(p10_a_device_that_is_not_there_is_refused, stage("default"))
{
	char out[4096];

	talks_attach(&rig_, &user_);
	user_leave(&user_);
	assert_int_equal(talks_try(&user_, rig_.sock, "GPU-00000000-0000-0000-0000-000000000000"),
			 (kvc_status_t)KV_ERR_TIER_OFF);
	user_leave(&user_);
	assert_int_equal(talks_try(&user_, rig_.sock, "fake-1"), (kvc_status_t)KV_ERR_TIER_OFF);
	user_leave(&user_);
	talks_attach(&rig_, &user_);
	assert_int_equal(talks_put(&user_, 1), LEN);
	assert_int_equal(rig_kvctl(&rig_, "reset --space 1 --yes", out, sizeof out), 0);
	assert_true(strstr(out, "  device=fake-0\n") && strstr(out, " in GPU memory, 0 on disk\n"));
	assert_int_equal(talks_get(&user_, 1), 0);
	assert_true(rig_kvctl_has(&rig_, "status", "fake-0"));
}
