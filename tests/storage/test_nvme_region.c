/* Transfers between the disk tier and memory that has been registered with it. */
#include "nvme/nvme.h"

#include "nvme_test.h"

#include <fcntl.h>
#include <sys/mman.h>

#define LET_GO_NS UINT64_C(3000000000)
#define TRY_NS    UINT64_C(1500000000)
#define MANY      1000u

static uint8_t *map_pages(size_t bytes, int flags)
{
	uint8_t *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);

	assert_true(pages != MAP_FAILED);

	return pages;
}

/* Block 1 of the chain goes to disk and comes back through this memory of the region. */
static kvs_loc_t go_through(uint8_t *data, uint32_t region, uint64_t chain)
{
	const kvs_meta_t meta = meta_of(chain, 1, 1);
	kvs_loc_t loc;
	block_t b;
	kvs_mem_t mem;

	block_fill(&plain, kv_key_hash(&meta.key), &b);
	mem = (kvs_mem_t){data, b.leaves, b.roots, region};
	memcpy(data, b.data, plain.block_bytes);
	assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &meta, &loc), KV_OK);
	assert_int_equal(store_wait(f_.tier, loc, &mem), KV_OK);
	memset(data, 0, plain.block_bytes);
	assert_int_equal(load_wait(f_.tier, loc, &mem), KV_OK);
	assert_memory_equal(data, b.data, plain.block_bytes);
	assert_int_equal(get_block(&f_, &plain, chain, 1, loc), KV_OK);

	return loc;
}

DISK_TEST(p1_registered_memory_gives_the_same_bytes, fixture_fresh())
{
	const size_t bytes = 40 * MIB; /* more than one piece of a region */
	/* the first, one across the border of two pieces, and the last */
	const size_t places[] = {0, 32 * MIB - 4096, bytes - 16384};
	uint8_t *slab = map_pages(bytes, 0);
	kvs_loc_t loc[10];
	uint32_t region;

	kvs_nvme_register(f_.tier, slab, bytes, &region);
	for (uint32_t round = 0; round < 40; round++) {
		if (round >= 10) {
			kvs_free(f_.tier, loc[round % 10]);
		}
		loc[round % 10] = go_through(slab + places[round % 3], region, round % 10);
	}
	fixture_close(&f_); /* before its memory goes */
	munmap(slab, bytes);
}

/* Memory that is unmapped, and other memory that comes to lie at its address, often: never are old pages used for new
 * ones. */
DISK_TEST(p1_memory_may_go_and_other_memory_come, fixture_fresh())
{
	const size_t bytes = 36 * MIB;
	uint32_t region, first = UINT32_MAX;

	for (uint32_t round = 0; round < 30; round++) {
		uint8_t *slab = map_pages(bytes, MAP_POPULATE);

		kvs_nvme_register(f_.tier, slab, bytes, &region);
		first = round == 0 ? region : first;
		assert_int_equal(region, first); /* the place comes back */
		usleep(round % 3 * 30000);       /* sometimes none, sometimes some of it is registered */
		(void)go_through(slab + (round % 2 ? 0 : 33 * MIB), region, round);
		KV_AWAIT(kvs_nvme_unregister(f_.tier, region));
		munmap(slab, bytes);
	}
	assert_int_equal(kvs_nvme_unregister(f_.tier, UINT32_MAX), 1);
}

/* A number is other memory's only when the caller has been told that its own has gone: it would ask once more, and have
 * the other memory removed under its transfers. */
DISK_TEST(p1_memory_that_goes_takes_no_other_memory_along, fixture_fresh())
{
	uint8_t *page = map_pages(4096, MAP_POPULATE);
	uint32_t going, other, next;

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
DISK_TEST(p5_memory_is_let_go_of_at_once_though_the_disk_rests, fixture_fresh())
{
	uint8_t *page = map_pages(4096, MAP_POPULATE);
	uint32_t region[MANY];
	uint64_t took = 0, end;

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
	fixture_close(&f_);
	munmap(page, 4096);
}

/* The ring has pinned the pages of a slab; a client takes one out of the file, and what lies there now is another
 * page. */
DISK_TEST(p2_a_hole_in_a_slab_does_not_cost_the_block_on_disk, fixture_fresh())
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
	kvs_nvme_register(f_.tier, slab, bytes, &region);
	assert_int_equal(put_block(&f_, &plain, 1, 1, &loc), KV_OK);
	block_blank(&b);
	mem = (kvs_mem_t){slab, b.leaves, b.roots, region};
	for (int round = 0; round < 20; round++) {
		assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 4096), 0);
		assert_int_equal(load_wait(f_.tier, loc, &mem), KV_OK);
		usleep(2000); /* registration is the ring thread's, in its own time */
	}
	assert_int_equal(get_block(&f_, &plain, 1, 1, loc), KV_OK);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_CORRUPT), 0);
	check_sums(&f_);
	fixture_close(&f_);
	munmap(slab, bytes);
	close(fd);
}

/* The caller is the daemon's one loop, whose clients take it for dead after 50 ms. Walking /proc/self/smaps took 15 ms
 * a GiB. */
DISK_TEST(p5_registering_takes_no_time_however_much_is_mapped, fixture_fresh())
{
	const size_t bytes = 256 * MIB;
	uint8_t *slab = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	uint64_t least = UINT64_MAX;
	uint32_t region;

	assert_true(slab != MAP_FAILED);
	memset(slab, 1, bytes);
	for (int i = 0; i < 5; i++) {
		uint64_t start = real_now(NULL);
		uint64_t took;

		kvs_nvme_register(f_.tier, slab, bytes, &region);
		took = real_now(NULL) - start;
		least = took < least ? took : least;
	}
	assert_true(least < 1000000u);
	fixture_close(&f_);
	munmap(slab, bytes);
}
