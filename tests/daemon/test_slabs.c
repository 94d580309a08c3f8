/* Slabs that come and go, as the host tells of them: pool, disk tier and members are played here. */
#include "io/base/gpu.h"
#include "io/members/member_table.h"
#include "io/members/slabs.h"
#include "io/base/session.h"

#include "kv_cmocka.h"
#include "kvs/nvme.h"
#include "kvs/pool.h"

#include <stdlib.h>

#define SLABS   4u
#define REGIONS 4u

typedef enum part_state { LIVE, GOING, GONE } part_state_t;

static kvs_slab_info_t slab_[SLABS];
static int there_[SLABS];
static uint64_t version_, now_ns_;
static part_state_t region_[REGIONS];
static uint32_t region_count_;
static kvd_session_t first_, second_;
static char told_[1024];

/* ---- what slabs.c calls ---------------------------------------------------------------------- */

uint64_t kvs_pool_version(const kvs_tier_t *pool)
{
	(void)pool;

	return version_;
}

uint32_t kvs_pool_slabs_held(const kvs_tier_t *pool)
{
	(void)pool;

	return SLABS;
}

uint32_t kvs_pool_slab_count(kvs_tier_t *pool)
{
	(void)pool;

	return SLABS;
}

kv_status_t kvs_pool_slab(kvs_tier_t *pool, uint32_t slab, kvs_slab_info_t *p_info)
{
	(void)pool;
	*p_info = slab_[slab];

	return there_[slab] ? KV_OK : KV_MISS;
}

void kvs_pool_set_region(kvs_tier_t *pool, uint32_t slab, uint32_t region)
{
	(void)pool;
	(void)slab;
	(void)region;
}

kv_status_t kvs_pool_release(kvs_tier_t *pool, uint32_t slab, int unmapped)
{
	(void)pool;
	there_[slab] = there_[slab] && !unmapped;

	return KV_OK;
}

/* Places of memory that has gone are used again, as by the real one. */
void kvs_nvme_register(kvs_tier_t *disk, void *base, size_t bytes, uint32_t *p_region)
{
	uint32_t at = 0;

	(void)disk;
	(void)base;
	(void)bytes;
	while (at < region_count_ && region_[at] != GONE) {
		at++;
	}
	region_count_ += at == region_count_;
	region_[at] = LIVE;
	*p_region = at;
}

int kvs_nvme_unregister(kvs_tier_t *disk, uint32_t region)
{
	(void)disk;
	if (region >= region_count_) {
		return 1;
	}
	region_[region] = region_[region] == LIVE ? GOING : GONE;

	return region_[region] == GONE;
}

/* One engine maps everything; it has not looked at its socket. */
uint32_t kvd_members_list(const kvd_host_t *host, const char *ns, kvd_mapper_t *out, uint32_t cap)
{
	(void)host;
	(void)ns;
	if (cap > 0) {
		out[0] = (kvd_mapper_t){.id = 1, .role = 2};
	}

	return 1;
}

void kvd_session_drop_queued(kvd_session_t *session, const int fds[2])
{
	(void)session;
	(void)fds;
}

/* Each GPU's pool but the last, which has none yet. */
int kvd_gpu_describe(const kvd_host_t *host, uint32_t i, kvd_gpu_info_t *p_info)
{
	static const char *const names[] = {"fake-0", "fake-1", "fake-2"};
	const uint32_t memory = i + 1u;

	if (i >= KV_COUNT_OF(names)) {
		return 0;
	}
	*p_info = memory < host->pool_count
			  ? (kvd_gpu_info_t){.uuid = names[i], .pool = host->pool[memory], .memory = memory}
			  : (kvd_gpu_info_t){.uuid = names[i]};

	return 1;
}

/* A line for each notice: who, what, and which. */
void kvd_session_notify(kvd_host_t *host, kvd_session_t *session, uint16_t code, const kv_msg_t *msg, const int *fds)
{
	const size_t len = strlen(told_);

	(void)host;
	(void)fds;
	if (code == KV_CODE_DEVICE_ADD) {
		snprintf(told_ + len, sizeof told_ - len, "%c device %u %.*s\n", session == &first_ ? 'a' : 'b',
			 msg->device_add.device, (int)msg->device_add.name.len,
			 (const char *)msg->device_add.name.data);
	} else if (code == KV_CODE_SLAB_ADD) {
		snprintf(told_ + len, sizeof told_ - len, "%c slab %u of %u\n", session == &first_ ? 'a' : 'b',
			 msg->slab_add.slab, msg->slab_add.device);
	}
}

/* ---- tests ----------------------------------------------------------------------------------- */

static uint64_t now(void *ctx)
{
	(void)ctx;

	return now_ns_;
}

static void carve(uint32_t slab)
{
	slab_[slab] = (kvs_slab_info_t){
		.slab = slab, .serial = ++version_, .bytes = 1u << 20, .ns = "default", .base = slab_};
	there_[slab] = 1;
}

static kvs_tier_t tier_;

static kvd_host_t *open_host(kv_env_t *env)
{
	static const kvd_options_t options = {.cpu_size = 16u << 20};
	kvd_host_t *host = calloc(1, sizeof *host);

	assert_non_null(host);
	memset(there_, 0, sizeof there_);
	*env = kv_env_posix;
	env->now_ns = now;
	host->env = env;
	host->options = &options;
	host->cpu = host->pool[0] = &tier_;
	host->pool_count = 1;
	assert_int_equal(kvd_slabs_open(host), KV_OK);

	return host;
}

/* A device comes before its slabs, for members of before and of later. */
KV_TEST(p10_a_member_hears_of_a_device_before_its_slabs)
{
	static kvd_namespace_t ns = {.name = "default"};
	kv_env_t env;
	kvd_host_t *host = open_host(&env);

	first_ = (kvd_session_t){.ns = &ns, .member = (void *)&first_, .next = &second_};
	second_ = (kvd_session_t){.ns = &ns};
	host->sessions = &first_;
	kvd_slabs_announce(host);
	host->pool[host->pool_count++] = &tier_; /* two devices have got memory */
	host->pool[host->pool_count++] = &tier_;
	carve(2);
	kvd_slabs_announce(host);
	assert_string_equal(told_, "a device 1 fake-0\na device 2 fake-1\na slab 2 of 0\n"
				   "a slab 3074 of 1\na slab 3201 of 2\n");
	told_[0] = '\0';
	kvd_slabs_announce(host);
	assert_string_equal(told_, "");
	second_.member = (void *)&second_;
	kvd_slabs_announce_to(host, &second_);
	assert_string_equal(told_, "b device 1 fake-0\nb device 2 fake-1\nb slab 2 of 0\n"
				   "b slab 3074 of 1\nb slab 3201 of 2\n");
	kvd_slabs_close(host);
	free(host);
}

KV_TEST(p4_a_retiring_slab_leaves_the_memory_of_others_registered)
{
	kv_env_t env;
	kvd_host_t *host = open_host(&env);

	host->disk = &tier_;
	carve(0);
	kvd_slabs_announce(host);
	slab_[0].retired = 1;
	version_++;
	kvd_slabs_announce(host);
	for (int i = 0; i < 3; i++) {
		kvd_slabs_release_retired(host);
	}
	assert_int_equal(region_[0], GONE);
	assert_int_equal(there_[0], 1);

	carve(1); /* while the engine still maps the first: its memory takes the place that came free */
	kvd_slabs_announce(host);
	assert_int_equal(region_[0], LIVE);
	for (int i = 0; i < 3; i++) {
		kvd_slabs_release_retired(host);
	}
	assert_int_equal(region_[0], LIVE);
	kvd_slabs_note_unmapped(host, 1, 0);
	kvd_slabs_release_retired(host);
	assert_int_equal(there_[0], 0);
	assert_int_equal(region_[0], LIVE);
	kvd_slabs_close(host);
	free(host);
}
