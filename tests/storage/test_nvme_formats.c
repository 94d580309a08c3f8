/* Formats on disk: slot header and superblock decode what they encoded and nothing else; RocksDB's sentences are told
 * apart; a model of the whole tier. */
#include "nvme_test.h"

#include "metadb/rocks.h"
#include "nvme/format/slothdr.h"
#include "nvme/format/super.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

/* Digests of the encoded fixtures; a change of them is a change of the format and needs another version. */
#define FIXTURE_SLOT    UINT64_C(0xd274d93095255d4a)
#define FIXTURE_SUPER   UINT64_C(0xbcd8b35ffa00f819)
#define FIXTURE_SUPER_1 UINT64_C(0x6565e796a2d7d3c7)

static kv_test_env_t t_;
static kvs_super_t super_, back_; /* what is written, and what was read back */
static uint8_t *image_;
static size_t len_;

static void super_begin(void)
{
	kv_test_env_init(&t_);
	image_ = NULL;
	assert_int_equal(kvs_super_init(&super_, &t_.env), KV_OK);
	assert_int_equal(kvs_super_init(&back_, &t_.env), KV_OK);
}

static void super_end(void)
{
	kv_free(&t_.env, image_);
	kvs_super_fini(&super_);
	kvs_super_fini(&back_);
	assert_int_equal(kv_test_env_live(&t_), 0);
}

static void super_encode(void)
{
	kv_free(&t_.env, image_);
	assert_int_equal(kvs_super_encode(&super_, &image_, &len_), KV_OK);
}

/* The first `len` bytes of the image, by a superblock that knows nothing. */
static kv_status_t super_decode(size_t len)
{
	kvs_super_fini(&back_);
	assert_int_equal(kvs_super_init(&back_, &t_.env), KV_OK);

	return kvs_super_decode(&back_, image_, len);
}

static void add_class(const kvs_geometry_t *geometry)
{
	const kvs_super_class_t c = {.ns = "default", .geometry = *geometry, .slots_per_file = 128};
	uint32_t id;

	assert_int_equal(kvs_super_class_add(&super_, &c, &id), KV_OK);
}

/* A test of a superblock that leaves nothing behind. */
#define SUPER_TEST(name) KV_TEST_BETWEEN(name, super_begin(), super_end())

/* Slot 8 of class 7, of generation 9. */
static kvs_slothdr_t sample_header(void)
{
	return (kvs_slothdr_t){.meta = meta_of(3, 2, 9),
			       .incarnation = 5,
			       .digest = 6,
			       .slot_class = 7,
			       .slot = 8,
			       .gen = 9,
			       .length = 12288};
}

KV_TEST(p10_every_flipped_bit_of_a_slot_header_is_noticed)
{
	static _Alignas(4096) uint8_t page[4096];
	const uint64_t leaves[6] = {1, 2, 3, 4, 5, 6};
	const uint64_t *got;
	kvs_slothdr_t header = sample_header(), back;

	header.meta.group = 200;
	header.meta.withdrawals = KVS_SLOTHDR_MAX_WITHDRAWALS;
	assert_int_equal(kvs_slothdr_bytes(&plain), 4096);
	kvs_slothdr_encode(page, &plain, &header, leaves);
	assert_int_equal(kvs_slothdr_decode(page, sizeof page, &plain, &back, &got), KV_OK);
	assert_memory_equal(got, leaves, sizeof leaves);
	assert_memory_equal(&back.meta.key, &header.meta.key, 16);
	assert_memory_equal(&back.meta.parent, &header.meta.parent, 16);
	assert_memory_equal(back.meta.root, header.meta.root, 32);
	assert_int_equal(back.meta.withdrawals, KVS_SLOTHDR_MAX_WITHDRAWALS);
	assert_true(back.meta.group == 200 && back.meta.depth == 2 && back.meta.epoch == 9 && back.gen == 9 &&
		    back.slot == 8);
	for (size_t bit = 0; bit < sizeof page * 8u; bit++) {
		kv_status_t status;

		page[bit / 8] ^= (uint8_t)(1u << bit % 8);
		status = kvs_slothdr_decode(page, sizeof page, &plain, &back, &got);
		assert_true(status == KV_ERR_CORRUPT || status == KV_ERR_VERSION);
		page[bit / 8] ^= (uint8_t)(1u << bit % 8);
	}
	for (size_t n = 0; n < sizeof page; n += 63) {
		assert_int_equal(kvs_slothdr_decode(page, n, &plain, &back, &got), KV_ERR_CORRUPT);
	}
	assert_int_equal(kvs_slothdr_decode(page, sizeof page, &opaque, &back, &got), KV_ERR_CORRUPT);
	memset(page, 0, sizeof page);
	assert_int_equal(kvs_slothdr_decode(page, sizeof page, &plain, &back, &got), KV_MISS);
}

static void as_version_1(uint8_t *image, size_t len)
{
	uint64_t check = 0;

	image[16] = 1;
	memcpy(image + 8, &check, sizeof check);
	check = kv_digest(image, len);
	memcpy(image + 8, &check, sizeof check);
}

/* The same bytes on every machine: fixtures of slot headers 1 and superblocks 2, and of superblocks 1, which are read
 * too. */
SUPER_TEST(p10_the_formats_are_those_of_their_versions)
{
	static _Alignas(4096) uint8_t page[4096];
	const uint64_t leaves[6] = {1, 2, 3, 4, 5, 6};
	const kvs_slothdr_t header = sample_header();

	kvs_slothdr_encode(page, &plain, &header, leaves);
	assert_memory_equal(page, "KVDSLOT1", 8);
	assert_true(kv_digest(page, sizeof page) == FIXTURE_SLOT);
	super_.uuid = 77;
	add_class(&plain);
	assert_int_equal(kvs_super_space_set(&super_, space_root, "default", "model=test\n", 4), KV_OK);
	super_encode();
	assert_memory_equal(image_, "KVDSUPER", 8);
	assert_true(kv_digest(image_, len_) == FIXTURE_SUPER);
	as_version_1(image_, len_);
	assert_true(kv_digest(image_, len_) == FIXTURE_SUPER_1);
	assert_int_equal(super_decode(len_), KV_OK);
	assert_int_equal(kvs_super_space_find(&back_, space_root)->epoch, 4);
}

SUPER_TEST(p10_every_flipped_bit_and_cut_of_a_superblock_is_noticed)
{
	add_class(&plain);
	for (uint8_t i = 0; i < 40; i++) {
		uint8_t root[32] = {(uint8_t)(i * 37u)};

		assert_int_equal(kvs_super_space_set(&super_, root, "default", "model=test\n", i + 1u), KV_OK);
	}
	super_encode();
	for (size_t bit = 0; bit < len_ * 8u; bit++) {
		image_[bit / 8] ^= (uint8_t)(1u << bit % 8);
		assert_int_not_equal(super_decode(len_), KV_OK);
		image_[bit / 8] ^= (uint8_t)(1u << bit % 8);
	}
	for (size_t n = 0; n < len_; n++) {
		assert_int_not_equal(super_decode(n), KV_OK);
	}
	assert_int_equal(super_decode(len_), KV_OK);
	assert_int_equal(back_.space_count, 40);
	for (uint8_t i = 0; i < 40; i++) {
		uint8_t root[32] = {(uint8_t)(i * 37u)};

		assert_int_equal(kvs_super_space_find(&back_, root)->epoch, i + 1u);
	}
}

/* A valid check says nothing of sense: leaves of no bytes would be divided by, blocks near 4 GiB would wrap. */
KV_TEST(p6_an_impossible_geometry_in_a_superblock_is_refused)
{
	static const kvs_geometry_t bad[] = {
		{.block_bytes = 12288, .heads = 2, .leaves = 3, .leaf_bytes = 0, .page_bytes = 2048},
		{.block_bytes = 12288, .heads = 2, .leaves = 3, .leaf_bytes = 4096, .page_bytes = 4096},
		{.block_bytes = 12288, .heads = 0, .leaves = 3, .leaf_bytes = 4096, .page_bytes = 4096},
		{.block_bytes = UINT32_MAX, .heads = 1, .leaves = 1, .leaf_bytes = UINT32_MAX},
	};

	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		super_begin();
		add_class(&bad[i]);
		super_encode();
		assert_int_equal(super_decode(len_), KV_ERR_CORRUPT);
		super_end();
	}
}

/* A start, or a new epoch, on a full file system: the same files, and no block more. */
SUPER_TEST(p2_a_superblock_is_overwritten_in_place)
{
	struct stat before[2], after;
	char dir[128];
	int sync_failed = 0, stale, fd;
	uint32_t found;

	kv_test_dir_make(dir, sizeof dir);
	fd = open(dir, O_RDONLY | O_DIRECTORY);
	for (uint32_t i = 0; i < 200; i++) {
		uint8_t root[32] = {(uint8_t)i, 9};

		assert_int_equal(kvs_super_space_set(&super_, root, "default", "model=test\n", i + 1), KV_OK);
		super_encode();
		assert_int_equal(kvs_super_write(fd, image_, len_, 1, &sync_failed), KV_OK);
		for (int copy = 0; copy < 2; copy++) {
			assert_int_equal(fstatat(fd, copy ? "superblock.1" : "superblock.0", &after, 0), 0);
			before[copy] = i == 0 ? after : before[copy];
			assert_true(before[copy].st_ino == after.st_ino && before[copy].st_blocks == after.st_blocks);
		}
	}
	assert_int_equal(kvs_super_load(&back_, fd, &found, &stale), KV_OK);
	assert_true(found == 2 && stale == 0 && sync_failed == 0);
	assert_int_equal(back_.generation, super_.generation);
	assert_int_equal(back_.space_count, 200);
	close(fd);
	kv_test_dir_remove(dir);
}

SUPER_TEST(p2_a_superblock_never_outgrows_what_is_read_back)
{
	static char identity[KVS_SUPER_MAX_IDENTITY + 1u];
	kvs_super_class_t c = {.ns = "default", .geometry = plain, .slots_per_file = 128};
	uint32_t id, made = 0;
	uint32_t root[8] = {0};

	/* Whole identities first, then one that leaves room for no class more than a few. */
	for (size_t n = KVS_SUPER_MAX_IDENTITY; n > 0; n = n > 1 ? n / 2 : 0) {
		memset(identity, 'x', n);
		identity[n] = '\0';
		do {
			root[0]++;
		} while (kvs_super_space_set(&super_, (const uint8_t *)root, "default", identity, 1) == KV_OK);
	}
	while (kvs_super_class_add(&super_, &c, &id) == KV_OK) {
		made++;
	}
	assert_true(made < KVS_SUPER_MAX_CLASSES);
	assert_true(super_.bytes <= KVS_SUPER_MAX_BYTES);
	super_encode();
	assert_int_equal(super_decode(len_), KV_OK);
	assert_int_equal(back_.space_count, super_.space_count);
}

static int is_even(void *ctx, const uint8_t root[32])
{
	(void)ctx;

	return root[1] % 2 == 0;
}

/* But for that with the greatest epoch, or the next start would give it again. */
SUPER_TEST(p5_a_full_superblock_forgets_spaces)
{
	uint8_t root[32] = {0};

	for (uint32_t i = 0; i <= KVS_SUPER_MAX_SPACES; i++) {
		root[0] = (uint8_t)(i >> 8);
		root[1] = (uint8_t)i;
		assert_int_equal(kvs_super_space_set(&super_, root, "ns", "text", 10u + i),
				 i < KVS_SUPER_MAX_SPACES ? KV_OK : KV_ERR_LIMIT);
	}
	assert_int_equal(kvs_super_spaces_drop(&super_, is_even, NULL), KVS_SUPER_MAX_SPACES / 2 - 1);
	assert_int_equal(kvs_super_last_epoch(&super_), 9u + KVS_SUPER_MAX_SPACES);
	assert_int_equal(kvs_super_space_set(&super_, root, "ns", "text", 10u + KVS_SUPER_MAX_SPACES), KV_OK);
	super_encode();
	assert_int_equal(super_decode(len_), KV_OK);
	assert_int_equal(back_.space_count, KVS_SUPER_MAX_SPACES / 2 + 2);
	root[0] = root[1] = 0;
	assert_int_equal(kvs_super_space_find(&back_, root)->epoch, 10);
	root[1] = 1;
	assert_null(kvs_super_space_find(&back_, root));
}

KV_TEST(p10_the_metadata_library_s_sentences_are_told_apart)
{
	static const struct {
		const char *text;
		kv_status_t status;
	} cases[] = {
		{"IO error: No space left on device: While appending to file: /x/000004.log: No space left on device",
		 KV_ERR_NOSPC},
		{"IO error: While appending to file: /x/000004.log: No space left on device", KV_ERR_NOSPC},
		{"IO error: lock /x/LOCK: Resource temporarily unavailable", KV_ERR_LOCKED},
		{"IO error: While lock file: /x/LOCK: Resource temporarily unavailable", KV_ERR_LOCKED},
		{"IO error: lock hold by current process, acquire time 1 acquiring thread 2: /x/LOCK: No locks "
		 "available",
		 KV_ERR_LOCKED},
		{"Corruption: block checksum mismatch: stored = 1, computed = 2", KV_ERR_CORRUPT},
		{"Corruption: IO error: While pread: /x/000012.sst: Input/output error in file /x/MANIFEST-000005",
		 KV_ERR_IO},
		{"Corruption: CURRENT file does not end with newline", KV_ERR_CORRUPT},
		{"IO error: No such file or directory: While open a file for random read: /x/000012.sst: No such file "
		 "or directory",
		 KV_ERR_CORRUPT},
		{"Invalid argument: /x/MANIFEST-000005: does not exist", KV_ERR_CORRUPT},
		{"IO error: While fdatasync: /x/000004.log: Input/output error", KV_ERR_IO},
		{"IO error: While mkdir if missing: /x: Permission denied", KV_ERR_PATH}, /* an operator's to repair */
	};

	for (size_t i = 0; i < KV_COUNT_OF(cases); i++) {
		assert_int_equal(kvs_rocks_error(cases[i].text), cases[i].status);
	}
}

static kv_status_t reopen(const char *path)
{
	kvs_rocks_t *db = NULL;
	int marked;
	kv_status_t status = kvs_rocks_open(path, 1, 1u << 20, 7, &db, &marked);

	return status == KV_OK ? kvs_rocks_close(db) : status;
}

/* The first file whose name has this in it. */
static void file_of(const char *path, const char *part, char out[512])
{
	DIR *dir = opendir(path);
	const struct dirent *entry;

	assert_non_null(dir);
	out[0] = '\0';
	while ((entry = readdir(dir)) != NULL) {
		if (strstr(entry->d_name, part) && !out[0]) {
			snprintf(out, 512, "%s/%.200s", path, entry->d_name);
		}
	}
	closedir(dir);
	assert_true(out[0] != '\0');
}

static void gone(const char *file)
{
	assert_int_equal(unlink(file), 0);
}

static void cut(const char *file)
{
	assert_int_equal(truncate(file, 5), 0);
}

static void flipped(const char *file)
{
	int fd = open(file, O_RDWR | O_CLOEXEC);

	assert_true(fd >= 0 && pwrite(fd, "\377\377\377", 3, 8) == 3);
	close(fd);
}

/* What a read says is EISDIR. */
static void directory(const char *file)
{
	gone(file);
	assert_int_equal(mkdir(file, 0700), 0);
}

/* The library that is linked says what kvs_rocks_error() knows. */
KV_TEST(p10_the_error_texts_of_the_linked_library_are_known)
{
	static const struct {
		const char *part;
		void (*damage)(const char *file);
		kv_status_t status;
	} cases[] = {
		{"MANIFEST", gone, KV_ERR_CORRUPT},     {"MANIFEST", cut, KV_ERR_CORRUPT},
		{"MANIFEST", flipped, KV_ERR_CORRUPT},  {".sst", gone, KV_ERR_CORRUPT},
		{".sst", cut, KV_ERR_CORRUPT},          {"CURRENT", cut, KV_ERR_CORRUPT},
		{"CURRENT", directory, KV_ERR_CORRUPT},
	};
	char dir[128], path[256], file[512];
	kvs_rocks_t *db = NULL;
	int marked;

	for (size_t i = 0; i < KV_COUNT_OF(cases); i++) {
		kv_test_dir_make(dir, sizeof dir);
		snprintf(path, sizeof path, "%s/meta", dir);
		assert_int_equal(kvs_rocks_open(path, 1, 1u << 20, 7, &db, &marked), KV_OK);
		assert_int_equal(reopen(path), KV_ERR_LOCKED);
		assert_int_equal(kvs_rocks_mark(db, 1), KV_OK);
		assert_int_equal(kvs_rocks_close(db), KV_OK);
		assert_int_equal(reopen(path), KV_OK);
		file_of(path, cases[i].part, file);
		cases[i].damage(file);
		assert_int_equal(reopen(path), cases[i].status);
		kv_test_dir_remove(dir);
	}
}

/* ---- the model: random calls, compared with a table; now and then everything is closed and opened again ---- */

#define CHAINS 12u
#define DEEP   12u

typedef struct model {
	kvs_loc_t loc[CHAINS][DEEP];
	uint32_t len[CHAINS];     /* blocks stored, a prefix of the chain */
	uint32_t durable[CHAINS]; /* of them, flushed and not evicted since */
	uint32_t steps[6];
} model_t;

static void model_reopen(fixture_t *f, model_t *m)
{
	fixture_close(f);
	fixture_begin(f, &found_);
	for (uint64_t c = 0; c < CHAINS; c++) {
		uint32_t n = 0;
		int at;

		while (n < DEEP && (at = found_find(&found_, c, n + 1)) >= 0) {
			m->loc[c][n++] = found_.loc[at];
		}
		assert_int_equal(n, m->len[c]); /* a clean close loses nothing */
		m->durable[c] = n;
	}
	check_sums(f);
}

static void model_step(fixture_t *f, model_t *m, kv_test_rng_t *rng)
{
	uint32_t c = (uint32_t)kv_test_below(rng, CHAINS);
	uint64_t what = kv_test_below(rng, 100);
	uint32_t n = m->len[c];

	if (what < 45 && n < DEEP) {
		kv_status_t status = put_block(f, &plain, c, n + 1, &m->loc[c][n]);

		assert_true(status == KV_OK || status == KV_ERR_FULL);
		m->len[c] += status == KV_OK;
		m->steps[0]++;
	} else if (what < 70 && n > 0) {
		kvs_free(f->tier, m->loc[c][n - 1]); /* leaf first */
		m->len[c]--;
		m->durable[c] = m->durable[c] < m->len[c] ? m->durable[c] : m->len[c];
		m->steps[1]++;
	} else if (what < 90 && n > 0) {
		uint32_t d = (uint32_t)kv_test_below(rng, n);

		assert_int_equal(get_block(f, &plain, c, d + 1, m->loc[c][d]), KV_OK);
		m->steps[2]++;
	} else if (what < 97) {
		assert_int_equal(flush_wait(f->tier), KV_OK);
		m->steps[3]++;
	} else {
		model_reopen(f, m);
		m->steps[4]++;
	}
}

KV_TEST(p1_p2_random_use_agrees_with_a_table)
{
	static model_t m;
	kv_test_rng_t rng = {kv_test_seed()};
	kvs_usage_t usage;
	fixture_t f;
	uint64_t used = 0;

	fixture_init(&f, NULL);
	f.config.limit_bytes = 8 * MIB;
	f.config.file_bytes = MIB / 2;
	f.config.sync = 0;
	fixture_begin(&f, &found_);
	for (uint32_t i = 0; i < 1200; i++) {
		model_step(&f, &m, &rng);
	}
	for (uint32_t c = 0; c < CHAINS; c++) {
		used += m.len[c];
	}
	kvs_usage(f.tier, &usage);
	assert_int_equal(usage.used_slots, used);
	assert_true(m.steps[0] > 100 && m.steps[1] > 50 && m.steps[2] > 50 && m.steps[3] > 10 && m.steps[4] > 5);
	check_sums(&f);
	fixture_fini(&f);
}
