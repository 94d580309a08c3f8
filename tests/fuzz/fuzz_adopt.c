/* The memory of an earlier daemon, of unknown provenance: whatever is taken over, the pool's sums are right, blocks
 * come parents first, and it works. Where the ledger is consistent, records of odd slots get their right checksums,
 * which no mutation finds. */
#include "kvs/ledger.h"
#include "kvs/pool.h"

#include "kv/digest.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define SLAB_BYTES 65536u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct input {
	uint8_t *ledger;
	size_t size;
	uint32_t depth, blocks;
} input_t;

static int memory_of(const void *bytes, size_t size)
{
	int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	kv_assert(fd >= 0 && (bytes ? write(fd, bytes, size) == (ssize_t)size : ftruncate(fd, (off_t)size) == 0));
	kv_assert(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);

	return fd;
}

static int claim(void *ctx, const char *name)
{
	const input_t *input = ctx;

	if (strcmp(name, "ledger") == 0) {
		return memory_of(input->ledger, input->size);
	}

	return memory_of(NULL, strncmp(name, "slab", 4) == 0 ? SLAB_BYTES : 4096);
}

static int take_slab(void *ctx)
{
	(void)ctx;

	return memory_of(NULL, SLAB_BYTES);
}

static kv_status_t on_found(void *arg, uint32_t slot_class, kvs_loc_t loc, const kvs_meta_t *meta)
{
	input_t *input = arg;

	(void)slot_class;
	kv_assert(meta->depth >= input->depth && loc.gen != 0 && meta->epoch != 0);
	input->depth = meta->depth;
	input->blocks++;

	return input->blocks % 7 == 0 ? KV_ERR_NO_PARENT : KV_OK;
}

/* The digest tables are zeros. */
static void set_checksums(const input_t *input)
{
	static const uint64_t roots[4096];
	kvs_ledger_summary_t sum;
	uint32_t count;

	if (kvs_ledger_check(input->ledger, input->size, &sum, NULL, 0) != KV_OK) {
		return;
	}
	count = ((const kvs_ledger_header_t *)input->ledger)->slab_count;
	for (uint32_t n = 0; n < count; n++) {
		const kvs_ledger_slab_t *slab = kvs_ledger_slab(input->ledger, n);

		for (uint32_t i = 0; slab && i < slab->slots; i++) {
			kvs_ledger_slot_t *slot = (kvs_ledger_slot_t *)(uintptr_t)&kvs_ledger_slots(slab)[i];

			if (slot->check % 2 == 0 && slab->geometry.heads <= KV_COUNT_OF(roots)) {
				slot->digest = kv_digest_root(roots, slab->geometry.heads);
				slot->check = kvs_ledger_slot_check(slot);
			}
		}
	}
}

static void use_pool(kvs_tier_t *pool)
{
	static const kvs_geometry_t plain = {
		.block_bytes = 12288, .heads = 2, .leaves = 3, .leaf_bytes = 2048, .page_bytes = 2048};
	static const kvs_meta_t meta = {.depth = 1, .epoch = 1};
	char detail[256];
	uint32_t class;
	kvs_loc_t loc;

	kv_assert(kvs_check(pool, detail, sizeof detail) == KV_OK);
	(void)kvs_pool_free_before(pool);
	kv_assert(kvs_check(pool, detail, sizeof detail) == KV_OK);
	if (kvs_class_open(pool, "ns", &plain, &class) == KV_OK) {
		while (kvs_alloc(pool, class, KVS_PUT, 1, &meta, &loc) == KV_OK) {
			kv_assert(kvs_set_state(pool, loc, KVS_READY) == KV_OK);
		}
	}
	kv_assert(kvs_check(pool, detail, sizeof detail) == KV_OK);
}

static void drop_line(void *ctx, kv_log_level_t level, const char *component, const char *line)
{
	(void)ctx;
	(void)level;
	(void)component;
	(void)line;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static kv_metrics_t metrics;
	input_t input = {.ledger = aligned_alloc(4096, (size + 4096u) / 4096u * 4096u), .size = size};
	kvs_pool_config_t config = {.limit_bytes = 3 * SLAB_BYTES,
				    .slab_bytes = SLAB_BYTES,
				    .max_slabs = 127,
				    .take = take_slab,
				    .memory = KV_SLAB_MEMFD,
				    .incarnation = 8,
				    .claim = claim,
				    .hold_ctx = &input,
				    .metrics = &metrics};
	kv_env_t env = kv_env_posix;
	kvs_tier_t *pool;

	if (!input.ledger) {
		return 0;
	}
	memcpy(input.ledger, data, size);
	if (size >= sizeof(kvs_ledger_header_t) && size % 2 == 0) {
		((kvs_ledger_header_t *)input.ledger)->total_bytes = size; /* odd ones keep what they say */
	}
	set_checksums(&input);
	env.log = drop_line;
	kv_assert(kvs_pool_open(&config, &env, &pool) == KV_OK);
	kv_assert(kvs_recover(pool, on_found, &input) == KV_OK);
	use_pool(pool);
	kvs_close(pool);
	free(input.ledger);

	return 0;
}
