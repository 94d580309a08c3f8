/* Slabs: sealed shared memory, huge pages where the kernel gives them. */
#include "slab.h"

#include "geometry.h"

#include <fcntl.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SEALS_DATA   (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define SEALS_DIGEST (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)
#define THP_SETTING  "/sys/kernel/mm/transparent_hugepage/shmem_enabled"

static uint64_t round_up(uint64_t n, uint64_t unit)
{
	return (n + unit - 1u) / unit * unit;
}

uint64_t kvs_slab_data_bytes(const kvs_geometry_t *geometry, uint64_t slots, uint64_t page)
{
	return round_up(slots * kvs_geometry_stride(geometry), page);
}

uint64_t kvs_slab_digest_bytes(const kvs_geometry_t *geometry, uint64_t slots)
{
	return round_up(slots * kvs_geometry_digest_bytes(geometry) + sizeof(kv_slab_tail_t), 4096u);
}

static int create_data(kvs_slab_t *slab, const kvs_sys_t *sys)
{
	uint64_t bytes = kvs_slab_data_bytes(&slab->geometry, slab->slots, slab->huge ? KVS_HUGE_PAGE : 4096u);
	char name[32];
	int error;

	if (slab->foreign) {
		return 0;
	}
	snprintf(name, sizeof name, "kvd-slab.%u", slab->number);
	error = kvs_shm_create(sys, name, bytes, slab->huge, SEALS_DATA, &slab->data);
	if (!error && !slab->huge) {
		/* Advice only: kvs_thp_works() says whether the kernel follows it. */
		madvise(slab->data.base, slab->data.bytes, MADV_HUGEPAGE);
	}

	return error;
}

/* Clients look there as soon as they map it. */
static int create_digests(kvs_slab_t *slab, const kvs_sys_t *sys)
{
	char name[32];
	int error;

	snprintf(name, sizeof name, "kvd-digest.%u", slab->number);
	error = kvs_shm_create(sys, name, kvs_slab_digest_bytes(&slab->geometry, slab->slots), 0, SEALS_DIGEST,
			       &slab->digest);
	if (!error) {
		error = kvs_shm_populate(sys, slab->digest.base + slab->digest.bytes - 4096u, 4096u);
		if (error) {
			kvs_shm_destroy(&slab->digest);
			return error;
		}
		kvs_slab_tail(slab)->magic = KV_SLAB_TAIL_MAGIC;
		kvs_slab_set_ready(slab, slab->foreign ? slab->data.bytes : 0);
	}

	return error;
}

int kvs_slab_create(kvs_slab_t *slab, const kvs_sys_t *sys, const kv_env_t *env)
{
	int error;

	slab->stride = kvs_geometry_stride(&slab->geometry);
	slab->region = UINT32_MAX;
	slab->next = kv_alloc(env, slab->slots * sizeof *slab->next);
	if (!slab->next) {
		return -ENOMEM;
	}

	error = create_data(slab, sys);
	if (error) {
		goto err_next;
	}
	error = create_digests(slab, sys);
	if (error) {
		goto err_data;
	}

	return 0;

err_data:
	if (!slab->foreign) {
		kvs_shm_destroy(&slab->data);
	}
err_next:
	kv_free(env, slab->next);
	slab->next = NULL;
	return error;
}

int kvs_slab_open(kvs_slab_t *slab, const kvs_sys_t *sys)
{
	int error;

	if (atomic_load_explicit(&slab->opened, memory_order_acquire)) {
		return 0;
	}
	error = kvs_shm_populate(sys, slab->digest.base, slab->digest.bytes);
	if (!error) {
		error = kvs_shm_populate(sys, slab->records.base, slab->records.bytes);
	}
	if (!error) {
		atomic_store_explicit(&slab->opened, 1, memory_order_release);
	}

	return error;
}

int kvs_slab_touch(kvs_slab_t *slab, const kvs_sys_t *sys)
{
	int error = kvs_slab_open(slab, sys);

	if (!error && !slab->foreign) {
		error = kvs_shm_populate(sys, slab->data.base, slab->data.bytes);
	}
	if (!error) {
		kvs_slab_set_ready(slab, slab->data.bytes);
	}

	return error;
}

void kvs_slab_set_ready(kvs_slab_t *slab, uint64_t bytes)
{
	atomic_store_explicit(&slab->ready_bytes, bytes, memory_order_release);
	atomic_store_explicit(&kvs_slab_tail(slab)->ready_bytes, bytes, memory_order_release);
}

void kvs_slab_destroy(kvs_slab_t *slab, const kv_env_t *env)
{
	kvs_shm_destroy(&slab->digest);
	if (slab->foreign && slab->data.bytes > 0) {
		close(slab->data.fd);
		slab->data = (kvs_shm_t){0};
	}
	kvs_shm_destroy(&slab->data);
	kv_free(env, slab->next);
	slab->next = NULL;
}

int kvs_thp_works(char *detail, size_t cap)
{
	char text[128] = "";
	FILE *file = fopen(THP_SETTING, "re");

	if (file) {
		size_t n = fread(text, 1, sizeof text - 1, file);

		text[n] = '\0';
		text[strcspn(text, "\n")] = '\0';
		fclose(file);
	}
	snprintf(detail, cap, "%s", text[0] ? text : "not there");

	/* The choice in force stands in brackets; MADV_HUGEPAGE is heeded under all of these. */
	return strstr(text, "[always]") || strstr(text, "[within_size]") || strstr(text, "[advise]") ||
	       strstr(text, "[force]");
}
