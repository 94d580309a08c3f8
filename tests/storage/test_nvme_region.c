/* Transfers between the disk tier and memory that has been registered with it. */
#include "nvme/nvme.h"

#include "nvme_test.h"

#include <fcntl.h>
#include <sys/mman.h>

#define LET_GO_NS UINT64_C(3000000000)
#define TRY_NS    UINT64_C(1500000000)
#define MANY      1000u

KV_TEST(p1_registered_memory_gives_the_same_bytes)
{
	const size_t bytes = 40 * MIB; /* more than one piece of a region */
	kvs_loc_t loc[10];
	uint8_t *slab = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	block_t b;
	uint32_t region;

	assert_true(slab != MAP_FAILED);
	fixture_init(&f_, NULL);
	fixture_begin(&f_, &found_);
	kvs_nvme_register(f_.tier, slab, bytes, &region);
	for (uint32_t round = 0; round < 40; round++) {
		uint32_t i = round % 10;
		/* the first, the last, and one across the border of two pieces */
		size_t place = round % 3 == 0 ? 0 : round % 3 == 1 ? bytes - 16384 : 32 * MIB - 4096;
		kvs_meta_t meta = meta_of(1, i + 1, 1);
		kvs_mem_t mem;

		block_fill(&plain, &meta.key, &b);
		mem = b.mem;
		mem.data = slab + place;
		mem.region = region;
		memcpy(mem.data, b.data, plain.block_bytes);
		if (round >= 10) {
			kvs_free(f_.tier, loc[i]);
		}
		assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &meta, &loc[i]), KV_OK);
		assert_int_equal(store_wait(f_.tier, loc[i], &mem), KV_OK);
		memset(mem.data, 0, plain.block_bytes);
		assert_int_equal(load_wait(f_.tier, loc[i], &mem), KV_OK);
		assert_memory_equal(mem.data, b.data, plain.block_bytes);
		assert_int_equal(get_block(&f_, &plain, 1, i + 1, loc[i]), KV_OK);
	}
	fixture_fini(&f_);
	munmap(slab, bytes);
}

/* Memory that is unmapped, and other memory that comes to lie at its address, often: never are old pages used for new
 * ones. */
DISK_TEST(p1_memory_may_go_and_other_memory_come, fixture_fresh())
{
	const size_t bytes = 36 * MIB;
	uint8_t *slab = NULL;
	uint32_t region, first = UINT32_MAX;
	kvs_loc_t loc;
	block_t b;

	for (uint32_t round = 0; round < 30; round++) {
		kvs_meta_t meta = meta_of(1, round + 1, 1);
		int gone = 0;
		kvs_mem_t mem;

		slab = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
		assert_true(slab != MAP_FAILED);
		kvs_nvme_register(f_.tier, slab, bytes, &region);
		first = round == 0 ? region : first;
		assert_int_equal(region, first); /* the place comes back */
		usleep(round % 3 * 30000);       /* sometimes none, sometimes some of it is registered */
		block_fill(&plain, &meta.key, &b);
		mem = b.mem;
		mem.data = slab + (round % 2 ? 0 : 33 * MIB);
		mem.region = region;
		memcpy(mem.data, b.data, plain.block_bytes);
		assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &meta, &loc), KV_OK);
		assert_int_equal(store_wait(f_.tier, loc, &mem), KV_OK);
		memset(mem.data, 0, plain.block_bytes);
		assert_int_equal(load_wait(f_.tier, loc, &mem), KV_OK);
		assert_memory_equal(mem.data, b.data, plain.block_bytes);
		assert_int_equal(get_block(&f_, &plain, 1, round + 1, loc), KV_OK);
		for (int i = 0; i < 20000 && !gone; i++) {
			gone = kvs_nvme_unregister(f_.tier, region);
			usleep(gone ? 0 : 1000);
		}
		assert_int_equal(gone, 1);
		munmap(slab, bytes);
	}
	assert_int_equal(kvs_nvme_unregister(f_.tier, UINT32_MAX), 1);
}

/* A number is other memory's only when the caller has been told that its own has gone: it would ask once more, and have
 * the other memory removed under its transfers. */
DISK_TEST(p1_memory_that_goes_takes_no_other_memory_along, fixture_fresh())
{
	uint8_t *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	uint32_t going, other, next;

	assert_true(page != MAP_FAILED);
	kvs_nvme_register(f_.tier, page, 4096, &going);
	kvs_nvme_register(f_.tier, page, 4096, &other);
	assert_int_equal(kvs_nvme_unregister(f_.tier, going), going == UINT32_MAX);
	for (int round = 0; round < 3; round++) { /* in the second one `going` has gone, too */
		KV_AWAIT(kvs_nvme_unregister(f_.tier, other));
		kvs_nvme_register(f_.tier, page, 4096, &next);
		assert_int_equal(next, other);
	}
	KV_AWAIT(kvs_nvme_unregister(f_.tier, going));
	kvs_nvme_register(f_.tier, page, 4096, &next);
	assert_int_equal(next, going);
	KV_AWAIT(kvs_nvme_unregister(f_.tier, going));
	KV_AWAIT(kvs_nvme_unregister(f_.tier, other));
	munmap(page, 4096);
}

/* Memory that came and goes again while the ring thread looks: it would take it in after it has gone. */
KV_TEST(p1_memory_that_the_ring_thread_does_not_know_waits_for_its_next_look)
{
	kvs_region_t regions[2] = {{.state = KVS_REGION_REMOVING}, {.state = KVS_REGION_REMOVING}};
	static kvs_nvme_t nvme;
	kvs_ring_region_t known[2] = {{.wanted = 1}};

	nvme.regions = regions;
	nvme.region_count = 2;
	assert_int_equal(kvs_apply_region_changes(&nvme, known, 1, NULL, NULL), UINT32_MAX);
	assert_int_equal(regions[0].state, KVS_REGION_GONE);
	assert_int_equal(regions[1].state, KVS_REGION_REMOVING);
}

/* Time until nothing of the region is registered, at most LET_GO_NS. */
static uint64_t let_go(fixture_t *f, uint32_t region)
{
	uint64_t start = real_now(NULL), took = 0;

	while (!kvs_nvme_unregister(f->tier, region) && took < LET_GO_NS) {
		took = real_now(NULL) - start;
	}

	return took;
}

/* The I/O thread has looked at the first place when the second one's memory goes, and is about to sleep: nothing else
 * would wake it. */
KV_TEST(p5_memory_is_let_go_of_at_once_though_the_disk_rests)
{
	uint8_t *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	uint32_t region[MANY];
	uint64_t took = 0, end;

	assert_true(page != MAP_FAILED);
	fixture_init(&f_, NULL);
	fixture_begin(&f_, &found_);
	for (uint32_t i = 0; i < MANY; i++) { /* many: a look at all of them takes a while */
		kvs_nvme_register(f_.tier, page, 4096, &region[i]);
	}
	usleep(100000);
	end = real_now(NULL) + TRY_NS;
	while (took < LET_GO_NS && real_now(NULL) < end) {
		took = let_go(&f_, region[1]);
		if (took < LET_GO_NS) {
			took = let_go(&f_, region[0]);
		}
		kvs_nvme_register(f_.tier, page, 4096, &region[0]);
		kvs_nvme_register(f_.tier, page, 4096, &region[1]);
		usleep(50);
	}
	assert_true(took < LET_GO_NS);
	fixture_fini(&f_);
	munmap(page, 4096);
}

/* The ring has pinned the pages of a slab; a client takes one out of the file, and what lies there now is another
 * page. */
KV_TEST(p2_a_hole_in_a_slab_does_not_cost_the_block_on_disk)
{
	const size_t bytes = 4 * MIB;
	int fd = memfd_create("slab", MFD_CLOEXEC);
	kvs_mem_t mem;
	uint8_t *slab;
	uint32_t region;
	kvs_loc_t loc;
	block_t b;

	assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
	slab = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_true(slab != MAP_FAILED);
	memset(slab, 1, bytes);
	fixture_init(&f_, NULL);
	fixture_begin(&f_, &found_);
	kvs_nvme_register(f_.tier, slab, bytes, &region);
	assert_int_equal(put_block(&f_, &plain, 1, 1, &loc), KV_OK);
	block_blank(&b);
	mem = b.mem;
	mem.data = slab;
	mem.region = region;
	for (int round = 0; round < 20; round++) {
		assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 4096), 0);
		assert_int_equal(load_wait(f_.tier, loc, &mem), KV_OK);
		usleep(2000); /* registration is the ring thread's, in its own time */
	}
	assert_int_equal(get_block(&f_, &plain, 1, 1, loc), KV_OK);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_CORRUPT), 0);
	check_sums(&f_);
	fixture_fini(&f_);
	munmap(slab, bytes);
	close(fd);
}

/* The caller is the daemon's one loop, whose clients take it for dead after 50 ms. Walking /proc/self/smaps took 15 ms
 * a GiB. */
KV_TEST(p5_registering_takes_no_time_however_much_is_mapped)
{
	const size_t bytes = 256 * MIB;
	uint8_t *slab = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	uint64_t least = UINT64_MAX;
	uint32_t region;

	assert_true(slab != MAP_FAILED);
	fixture_init(&f_, NULL);
	fixture_begin(&f_, &found_);
	memset(slab, 1, bytes);
	for (int i = 0; i < 5; i++) {
		uint64_t start = real_now(NULL);
		uint64_t took;

		kvs_nvme_register(f_.tier, slab, bytes, &region);
		took = real_now(NULL) - start;
		least = took < least ? took : least;
	}
	assert_true(least < 1000000u);
	fixture_fini(&f_);
	munmap(slab, bytes);
}
