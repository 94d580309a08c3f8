/* Memory of a GPU that one process allocates and others map: kvk/device.h, kvk_gpu_map(), and copies from and to it. */
#include "gpu_rig.h"

#include "kvk/device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef KVD_SANITIZE /* several times slower */
#define ROUNDS 30
#else
#define ROUNDS 200
#endif
#define MAX_CALLS 100u
#define SLAB      (4 * FAKE_GRAIN)
#define SMS       20u /* of the fake device */

#define OF(member) offsetof(kvk_cuda_ops_t, member)

static const char uuids[2][48] = {"GPU-00112233-4455-6677-8899-aabbccddeeff",
				  "GPU-01122334-4556-6778-899a-abbccddeef00"};

static uint32_t open_files(void)
{
	return kv_test_count_fds(getpid(), "");
}

static kvk_gpu_t *start(uint64_t seed)
{
	gpu_rig_init(&rig_, &(fake_cuda_config_t){.seed = seed, .lazy = 1, .major = 9, .devices = 2});

	return gpu_rig_open(&rig_);
}

static int alloc_slab(const char *uuid)
{
	kvk_device_t *device;
	int fd = -1;

	assert_int_equal(kvk_device_open(fake_cuda_ops(), uuid, &device), KV_OK);
	assert_int_equal(kvk_device_alloc(device, SLAB, &fd), KV_OK);
	kvk_device_close(device);

	return fd;
}

static void assert_nothing_mapped(const kvk_gpu_t *gpu)
{
	const fake_cuda_live_t live = fake_cuda_live();
	kvk_gpu_stats_t stats;

	kvk_gpu_get_stats(gpu, &stats);
	assert_int_equal(stats.mapped_bytes, 0);
	assert_true(live.handles == 0 && live.reserved == 0 && live.mapped == 0);
}

/* ---- devices and their memory ---------------------------------------------------------------- */

GPU_TEST(devices_are_listed_by_the_name_nvidia_smi_prints)
{
	kvk_device_info_t info[2];
	uint32_t count = 0;

	assert_string_equal(kvk_gpu_uuid(start(1)), uuids[0]);
	assert_int_equal(kvk_device_list(fake_cuda_ops(), info, 1, &count), KV_OK);
	assert_int_equal(count, 2); /* more than there was room for */
	assert_int_equal(kvk_device_list(fake_cuda_ops(), info, 2, &count), KV_OK);
	for (uint32_t i = 0; i < 2; i++) {
		assert_string_equal(info[i].uuid, uuids[i]);
		assert_string_equal(info[i].name, i ? "Fake 1" : "Fake 0");
		assert_true(info[i].bytes == UINT64_C(80) << 30 && info[i].free_bytes == UINT64_C(70) << 30);
	}
	/* One that gives nobody a context has no memory to allocate. */
	fake_cuda_fail_always(OF(context_retain), 46);
	assert_int_equal(kvk_device_list(fake_cuda_ops(), info, 2, &count), KV_OK);
	fake_cuda_fail_always(0, 0);
	assert_true(info[1].bytes == 0 && info[1].free_bytes == 0);
}

GPU_TEST(p8_memory_of_a_device_is_handed_out_zeroed)
{
	const uint8_t *bytes;
	uint32_t files;
	int fd;

	start(1);
	files = open_files();
	fd = alloc_slab(uuids[1]);
	assert_int_equal(open_files(), files + 1);
	assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
	assert_nothing_mapped(rig_.gpu);
	bytes = mmap(NULL, SLAB, PROT_READ, MAP_SHARED, fd, 0); /* the fake device's memory is a memfd */
	assert_true(bytes != MAP_FAILED);
	for (size_t i = 0; i < SLAB; i++) {
		assert_int_equal(bytes[i], 0);
	}
	munmap((void *)(uintptr_t)bytes, SLAB);
	close(fd);
	assert_int_equal(open_files(), files);
}

/* Once each call of the driver, in turn: an answer with its own word, and nothing is left. */
KV_TEST(p4_a_failed_allocation_leaves_no_memory_behind)
{
	uint64_t n = 0;
	int failed = 1;

	while (failed && ++n < MAX_CALLS) {
		kvk_device_t *device = NULL;
		kv_status_t status;
		uint32_t files;
		int fd = -1;

		start(n);
		files = open_files();
		fake_cuda_fail_nth(n);
		status = kvk_device_open(fake_cuda_ops(), uuids[0], &device);
		if (status == KV_OK) {
			status = kvk_device_alloc(device, SLAB, &fd);
			failed = fake_cuda_failed();
			fake_cuda_fail_nth(0);
			assert_int_equal(open_files(), files + (status == KV_OK));
			assert_int_equal(status == KV_OK, fd >= 0);
			assert_true(status == KV_OK || status == KV_ERR_IO);
			assert_true(status == KV_OK || strstr(kvk_gpu_last_error(), "CUDA_ERROR_UNKNOWN"));
			assert_nothing_mapped(rig_.gpu);
			if (fd < 0) {
				assert_int_equal(kvk_device_alloc(device, SLAB, &fd), KV_OK);
			}
			close(fd);
		} else {
			fake_cuda_fail_nth(0);
			assert_null(device);
			assert_true(status == KV_ERR_IO || status == KV_ERR_UNSUPPORTED || status == KV_ERR_NOT_FOUND);
		}
		kvk_device_close(device);
		assert_int_equal(open_files(), files);
		gpu_rig_fini(&rig_);
	}
	assert_true(n > 15 && n < MAX_CALLS);
}

GPU_TEST(p5_a_device_without_memory_is_full)
{
	kvk_device_t *device;
	int fd = -1;

	start(1);
	assert_int_equal(kvk_device_open(fake_cuda_ops(), uuids[0], &device), KV_OK);
	fake_cuda_fail_always(OF(mem_create), 2);
	assert_int_equal(kvk_device_alloc(device, SLAB, &fd), KV_ERR_FULL);
	assert_non_null(strstr(kvk_gpu_last_error(), "cuMemCreate"));
	fake_cuda_fail_always(0, 0);
	assert_int_equal(fd, -1);
	kvk_device_close(device);
}

/* One of the driver's optional calls is missing, or the device has no such feature. */
GPU_TEST(p10_what_cannot_export_memory_is_refused_by_name)
{
	static const size_t members[] = {OF(mem_create),    OF(mem_release), OF(mem_export), OF(mem_import),
					 OF(mem_reserve),   OF(mem_map),     OF(mem_unmap),  OF(mem_access),
					 OF(mem_unreserve), OF(mem_grain),   OF(mem_set),    OF(context_wait)};
	static const char *const symbols[] = {"cuMemCreate",
					      "cuMemRelease",
					      "cuMemExportToShareableHandle",
					      "cuMemImportFromShareableHandle",
					      "cuMemAddressReserve",
					      "cuMemMap",
					      "cuMemUnmap",
					      "cuMemSetAccess",
					      "cuMemAddressFree",
					      "cuMemGetAllocationGranularity",
					      "cuMemsetD8_v2",
					      "cuCtxSynchronize"};
	kvk_device_t *device = NULL;
	uint32_t count;
	int fd;

	start(1);
	fd = alloc_slab(uuids[0]);
	for (size_t i = 0; i < KV_COUNT_OF(members); i++) {
		kvk_cuda_ops_t ops = *fake_cuda_ops();

		memset((uint8_t *)&ops + members[i], 0, sizeof(void *));
		assert_int_equal(kvk_device_open(&ops, uuids[0], &device), KV_ERR_UNSUPPORTED);
		assert_non_null(strstr(kvk_gpu_last_error(), symbols[i]));
	}
	assert_int_equal(kvk_device_open(NULL, uuids[0], &device), KV_ERR_UNSUPPORTED);
	assert_int_equal(kvk_device_list(NULL, NULL, 0, &count), KV_ERR_UNSUPPORTED);
	assert_int_equal(kvk_device_open(fake_cuda_ops(), "GPU-of-nobody", &device), KV_ERR_NOT_FOUND);
	assert_int_equal(kvk_device_open(fake_cuda_ops(), "", &device), KV_ERR_NOT_FOUND);
	assert_null(device);
	close(fd);
}

static int no_attribute(int *p_value, int attribute, int device)
{
	(void)attribute, (void)device;
	*p_value = 0;

	return 0;
}

static int no_uuid(kvk_cu_uuid_t *p_uuid, int device)
{
	(void)p_uuid, (void)device;

	return 801;
}

GPU_TEST(p10_devices_that_cannot_be_named_or_shared_are_refused)
{
	kvk_cuda_ops_t ops;
	kvk_device_t *device = NULL;
	kvk_device_info_t info;
	uint32_t count;

	start(1);
	ops = *fake_cuda_ops();
	ops.device_attribute = no_attribute;
	assert_int_equal(kvk_device_open(&ops, uuids[0], &device), KV_ERR_UNSUPPORTED);
	ops = *fake_cuda_ops();
	ops.device_uuid = no_uuid;
	assert_int_equal(kvk_device_open(&ops, "", &device), KV_ERR_NOT_FOUND);
	assert_int_equal(kvk_device_list(&ops, &info, 1, &count), KV_OK);
	assert_string_equal(info.uuid, "");
	assert_int_equal(kvk_device_open(fake_cuda_ops(), uuids[0], &device), KV_OK);
	assert_int_equal(kvk_device_alloc(device, 0, &(int){0}), KV_ERR_ARG);
	assert_int_equal(kvk_device_alloc(device, kvk_device_grain(device) + 4096, &(int){0}), KV_ERR_ARG);
	kvk_device_close(device);
}

/* ---- mapping --------------------------------------------------------------------------------- */

KV_TEST(p4_memory_lives_until_it_is_unmapped)
{
	void *base = NULL, *other = NULL;
	kvk_gpu_stats_t stats;
	kvk_gpu_t *gpu = start(1);
	kvk_cu_ptr_t address;
	int fd = alloc_slab(uuids[0]), peer = alloc_slab(uuids[1]);

	assert_int_equal(kvk_gpu_map(gpu, fd, SLAB, &base), KV_OK);
	assert_int_equal(kvk_gpu_map(gpu, peer, SLAB, &other), KV_OK);
	assert_true(fcntl(fd, F_GETFD) >= 0); /* it stayed ours */
	close(fd);
	close(peer);
	assert_int_equal(fake_cuda_live().handles, 0);
	assert_int_equal(kvk_gpu_is_registered(gpu, base, SLAB), 1);
	assert_int_equal(kvk_gpu_is_registered(gpu, base, SLAB + 1), 0);
	assert_int_equal(kvk_gpu_address(gpu, (uint8_t *)base + 5, 1, &address), KV_OK);
	assert_int_equal(address, (uintptr_t)base + 5);
	kvk_gpu_get_stats(gpu, &stats);
	assert_int_equal(stats.mapped_bytes, 2 * SLAB);
	assert_int_equal(stats.registered_bytes, 0);

	kvk_gpu_unregister(gpu, base); /* it is not registered */
	kvk_gpu_unmap(gpu, (uint8_t *)base + FAKE_GRAIN);
	kvk_gpu_unmap(gpu, NULL);
	assert_int_equal(kvk_gpu_is_registered(gpu, base, SLAB), 1);
	kvk_gpu_unmap(gpu, base);
	assert_int_equal(kvk_gpu_is_registered(gpu, base, 1), 0);
	assert_int_equal(kvk_gpu_is_registered(gpu, other, SLAB), 1);
	assert_int_equal(fake_cuda_live().mapped, 1);
	gpu_rig_fini(&rig_); /* unmaps what is left */
}

KV_TEST(p4_a_failed_mapping_leaves_nothing_behind)
{
	uint64_t n = 0;
	int failed = 1;

	while (failed && ++n < MAX_CALLS) {
		void *base = NULL;
		kv_status_t status;
		kvk_gpu_t *gpu = start(n);
		const int fd = alloc_slab(uuids[0]);
		const uint32_t files = open_files();

		fake_cuda_fail_nth(n);
		status = kvk_gpu_map(gpu, fd, SLAB, &base);
		failed = fake_cuda_failed();
		fake_cuda_fail_nth(0);
		assert_true(status == KV_OK || status == KV_ERR_IO);
		assert_int_equal(status == KV_OK, base != NULL);
		assert_int_equal(open_files(), files);
		if (status != KV_OK) {
			assert_non_null(strstr(kvk_gpu_last_error(), "CUDA_ERROR_UNKNOWN"));
			assert_nothing_mapped(gpu);
			assert_int_equal(kvk_gpu_map(gpu, fd, SLAB, &base), KV_OK);
		}
		/* A driver that says no while it gives back has done so, or it never will. */
		fake_cuda_fail_nth(1 + n % 4);
		kvk_gpu_unmap(gpu, base);
		fake_cuda_fail_nth(0);
		assert_false(kvk_gpu_is_registered(gpu, base, 1));
		assert_nothing_mapped(gpu);
		close(fd);
		gpu_rig_fini(&rig_);
	}
	assert_true(n > 5 && n < MAX_CALLS);
}

KV_TEST(p10_what_is_no_memory_of_a_device_is_not_mapped)
{
	static const size_t members[] = {OF(mem_import), OF(mem_reserve),   OF(mem_map),    OF(mem_unmap),
					 OF(mem_access), OF(mem_unreserve), OF(mem_release)};
	void *base = NULL;
	kvk_gpu_t *gpu = start(1);
	const int fd = alloc_slab(uuids[0]);
	const int memfd = memfd_create("slab", MFD_CLOEXEC);

	assert_int_equal(ftruncate(memfd, (off_t)SLAB), 0);
	assert_int_equal(kvk_gpu_map(gpu, -1, SLAB, &base), KV_ERR_ARG);
	assert_int_equal(kvk_gpu_map(gpu, fd, 0, &base), KV_ERR_ARG);
	assert_int_equal(kvk_gpu_map(gpu, memfd, SLAB, &base), KV_ERR_IO);
	assert_int_equal(kvk_gpu_map(gpu, fd, SLAB - 1, &base), KV_ERR_IO);
	assert_int_equal(kvk_gpu_map(gpu, fd, 2 * SLAB, &base), KV_ERR_IO);
	assert_nothing_mapped(gpu);
	fake_cuda_unlink(); /* of a peer that this device does not reach */
	assert_int_equal(kvk_gpu_map(gpu, fd, SLAB, &base), KV_ERR_IO);
	assert_nothing_mapped(gpu);
	gpu_rig_fini(&rig_);
	for (size_t i = 0; i < KV_COUNT_OF(members); i++) {
		kvk_cuda_ops_t ops = *fake_cuda_ops();

		memset((uint8_t *)&ops + members[i], 0, sizeof(void *));
		gpu_rig_init(&rig_, NULL);
		rig_.config.cuda = &ops;
		assert_int_equal(kvk_gpu_map(gpu_rig_open(&rig_), fd, SLAB, &base), KV_ERR_UNSUPPORTED);
		gpu_rig_fini(&rig_);
	}
	assert_null(base);
	close(memfd);
	close(fd);
}

/* ---- copies ---------------------------------------------------------------------------------- */

static int is_mapped(const gpu_case_t *c)
{
	return c->kind == CASE_MAPPED && c->count >= 2;
}

/* The same bytes as the pool's in registered host memory. */
static uint8_t *copy_to_host(const gpu_case_t *c)
{
	uint8_t *host = aligned_alloc(4096, (c->pool_bytes + 4095) / 4096 * 4096);

	memcpy(host, c->pool, c->pool_bytes);
	assert_int_equal(kvk_gpu_register(c->gpu, host, c->pool_bytes), KV_OK);

	return host;
}

/* Every second block lies in host memory. */
GPU_TEST(p1_a_copy_takes_blocks_of_both_memories)
{
	kv_test_rng_t rng = {kv_test_seed()};
	kvk_gpu_t *gpu = start(kv_test_rand(&rng));

	for (int round = 0; round < ROUNDS / 4; round++) {
		const kvk_gpu_dir_t dir = (kvk_gpu_dir_t)(round % 2);
		kvk_move_t moves[CASE_MOVES];
		kvk_gpu_copy_t copy;
		gpu_case_t c;
		uint8_t *host;

		gpu_case_until(&c, &rng, gpu, gpu_case_kind(round), is_mapped);
		gpu_case_ask_no_digests(&c);
		host = copy_to_host(&c);
		memcpy(moves, c.moves, sizeof moves);
		for (uint32_t i = (uint32_t)kv_test_below(&rng, 2); i < c.count; i += 2) {
			moves[i].data = host + ((uint8_t *)moves[i].data - c.pool);
		}
		copy = gpu_case_copy(&c, dir, (kvk_gpu_way_t)kv_test_below(&rng, 4), NULL);
		copy.moves = moves;
		gpu_rig_copy(gpu, &copy);
		for (uint32_t i = 0; i < c.count; i++) {
			memcpy(c.moves[i].data, moves[i].data, c.g.block_bytes);
		}
		gpu_case_twin(&c, dir);
		gpu_case_equal(&c);
		kvk_gpu_unregister(gpu, host);
		free(host);
		gpu_case_fini(&c);
	}
}

/* A job that has work for all SMs. */
static int is_large(const gpu_case_t *c)
{
	return !gpu_case_has_small_leaf(c) && c->layers == 0 && c->count * c->paged.heads * c->paged.layers >= SMS * 8;
}

static int is_large_and_mapped(const gpu_case_t *c)
{
	return c->kind == CASE_MAPPED && is_large(c);
}

static int is_large_and_on_device(const gpu_case_t *c)
{
	return c->kind == CASE_ON_DEVICE && is_large(c);
}

/* How a copy of some blocks of host memory goes that is in all else like this one. */
static void copy_from_host(const gpu_case_t *c, kvk_gpu_copy_t copy)
{
	uint8_t *host = copy_to_host(c);
	kvk_move_t moves[CASE_MOVES];

	for (uint32_t i = 0; i < c->count; i++) {
		moves[i] = c->moves[i];
		moves[i].data = host + ((uint8_t *)c->moves[i].data - c->pool);
	}
	copy.moves = moves;
	gpu_rig_copy(c->gpu, &copy);
	kvk_gpu_unregister(c->gpu, host);
	free(host);
}

/* Whatever is best for host memory and its link: here the ring, as measured. */
KV_TEST(copies_inside_a_device_take_all_of_it_or_their_budget)
{
	kv_test_rng_t rng = {kv_test_seed()};

	for (size_t i = 0; i < 4; i++) {
		kvk_gpu_stats_t before, stats;
		kvk_gpu_copy_t copy;
		gpu_case_t c;
		kvk_gpu_t *gpu;

		gpu_rig_init(&rig_, &(fake_cuda_config_t){.seed = i, .lazy = 0, .major = 9});
		gpu = gpu_rig_open(&rig_);
		fake_cuda_limit_pinned(4 << 20);
		rig_.t.env.now_ns = fake_cuda_clock;
		fake_cuda_costs(1, 40);
		gpu_case_until(&c, &rng, gpu, KVK_PAGED_HEAD_TOKEN_KV,
			       i < 2 ? is_large_and_mapped : is_large_and_on_device);
		gpu_case_ask_no_digests(&c);
		assert_int_equal(kvk_gpu_measure(gpu, &c.layout, &c.paged), KV_OK);
		copy = gpu_case_copy(&c, (kvk_gpu_dir_t)(i % 2), KVK_GPU_AUTO, NULL);
		kvk_gpu_get_stats(gpu, &before);
		copy_from_host(&c, copy);
		kvk_gpu_get_stats(gpu, &stats);
		assert_int_equal(stats.staged - before.staged, 1);

		(void)fake_cuda_sms();
		gpu_rig_copy(gpu, &copy);
		assert_true(fake_cuda_sms() > SMS / 2); /* as many as have something to do */
		copy.sms = 3;
		gpu_rig_copy(gpu, &copy);
		assert_int_equal(fake_cuda_sms(), 3);
		kvk_gpu_get_stats(gpu, &stats);
		assert_int_equal(stats.zero_copy - before.zero_copy, 2);
		gpu_case_fini(&c);
		gpu_rig_fini(&rig_);
	}
}
