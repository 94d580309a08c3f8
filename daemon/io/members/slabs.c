/* Slabs that come and go: which members know each one, and which still map a retired one (decision 013).
 *
 *   NONE --carved--> ANNOUNCED --retired--> RETIRING --no member maps it--> NONE
 *   RETIRING --too long--> ZOMBIE (its pages are taken away) --no member maps it--> NONE
 *
 * Nothing names a slot of a retired slab, so nothing is read or written there. What is waited for is memory, and not
 * for long: an idle engine may not read its socket for minutes. Pages that a member has pinned for a device stay its
 * own when they are taken away. Members that pin memory read their sockets all the time; what members that do not
 * answer can keep in this way is bounded (PINNED_SHARE).
 */
#include "io/members/slabs.h"

#include "io/base/gpu.h"
#include "io/members/member_table.h"
#include "io/base/session.h"

#include "kvs/nvme.h"
#include "kvs/pool.h"

#include <stdlib.h>

#define WAIT_NS      UINT64_C(250000000)
#define PINNED_SHARE 8u /* of the pool */
#define ROLE_WORKER  1u
#define NOWHERE      UINT32_MAX

typedef enum slab_state { SLAB_NONE, ANNOUNCED, RETIRING, ZOMBIE } slab_state_t;

typedef struct slab_entry {
	slab_state_t state;
	uint32_t region;
	uint32_t next;   /* in the list of RETIRING and ZOMBIE slabs */
	uint32_t mapped; /* members that have not said that they do not map it */
	uint64_t serial;
	uint64_t since_ns;
	uint64_t bytes;
	uint64_t pinned; /* ZOMBIE: bytes that may be pinned */
	kvd_mapper_t *by;
} slab_entry_t;

typedef struct kvd_slabs {
	uint64_t version; /* of the pools, when they were looked at last */
	uint32_t pools;   /* whose devices members know */
	uint64_t pinned;  /* sum */
	uint32_t kept;
	uint32_t retiring; /* list */
	slab_entry_t slab[KV_SLOT_MAX_SLAB + 1u];
} kvd_slabs_t;

kv_status_t kvd_slabs_open(kvd_host_t *host)
{
	host->slabs = calloc(1, sizeof *host->slabs);
	if (!host->slabs) {
		return KV_ERR_NOMEM;
	}
	host->slabs->retiring = NOWHERE;

	return KV_OK;
}

void kvd_slabs_close(kvd_host_t *host)
{
	for (uint32_t i = 0; host->slabs && i <= KV_SLOT_MAX_SLAB; i++) {
		free(host->slabs->slab[i].by);
	}
	free(host->slabs);
	host->slabs = NULL;
}

/* ---- pools ----------------------------------------------------------------------------------- */

/* The pool with this slab; *p_local: as the pool itself counts. NULL: there is none. */
static kvs_tier_t *find_pool(const kvd_host_t *host, uint32_t slab, uint32_t *p_local)
{
	uint32_t memory = kvs_memory_of_slab(slab);

	*p_local = slab - kvs_memories_base(memory);

	return memory < host->pool_count ? host->pool[memory] : NULL;
}

static kv_status_t get_slab(const kvd_host_t *host, uint32_t slab, kvs_slab_info_t *p_info)
{
	uint32_t local;
	kvs_tier_t *pool = find_pool(host, slab, &local);
	kv_status_t status = pool ? kvs_pool_slab(pool, local, p_info) : KV_MISS;

	if (status == KV_OK) {
		p_info->slab = slab;
	}

	return status;
}

uint32_t kvd_slabs_count_held(const kvd_host_t *host)
{
	uint32_t held = 0;

	for (uint32_t m = 0; m < host->pool_count; m++) {
		held += kvs_pool_slabs_held(host->pool[m]);
	}

	return held;
}

uint32_t kvd_slabs_count_files(const kvd_host_t *host)
{
	const kvs_rebalance_ops_t *ops = host->disk ? host->disk->ops->rebalance : NULL;
	uint32_t files = 0;
	kvs_slab_desc_t desc;

	for (uint32_t file = 0; ops && file < ops->slab_count(host->disk); file++) {
		files += ops->describe_slab(host->disk, file, &desc) == KV_OK;
	}

	return files;
}

static uint64_t sum_versions(const kvd_host_t *host)
{
	uint64_t sum = 0;

	for (uint32_t m = 0; m < host->pool_count; m++) {
		sum += kvs_pool_version(host->pool[m]);
	}

	return sum;
}

/* ---- telling --------------------------------------------------------------------------------- */

/* The devices of pools [first, end). */
static void announce_devices(kvd_host_t *host, kvd_session_t *session, uint32_t first, uint32_t end)
{
	kvd_gpu_info_t gpu;

	for (uint32_t i = 0; kvd_gpu_describe(host, i, &gpu); i++) {
		kv_msg_t msg = {.device_add = {.device = gpu.memory, .name = kv_slice_str(gpu.uuid)}};

		if (gpu.pool && gpu.memory >= first && gpu.memory < end) {
			kvd_session_notify(host, session, KV_CODE_DEVICE_ADD, &msg, NULL);
		}
	}
}

static void announce_pools(kvd_host_t *host)
{
	for (kvd_session_t *session = host->sessions; session; session = session->next) {
		if (session->member) {
			announce_devices(host, session, host->slabs->pools, host->pool_count);
		}
	}
	host->slabs->pools = host->pool_count;
}

static void announce_slab(kvd_host_t *host, kvd_session_t *session, const kvs_slab_info_t *info)
{
	int fds[KV_WIRE_MAX_FDS] = {info->data_fd, info->digest_fd, -1};
	kv_msg_t msg = {.slab_add = {.slab = info->slab,
				     .slots = info->slots,
				     .slot_bytes = info->slot_bytes,
				     .block_bytes = info->geometry.block_bytes,
				     .heads = info->geometry.heads,
				     .leaves = info->geometry.leaves,
				     .memory = info->memory,
				     .device = kvs_memory_of_slab(info->slab),
				     .bytes = info->bytes,
				     .digest_bytes = info->digest_bytes}};

	if (strcmp(info->ns, session->ns->name) == 0) {
		kvd_session_notify(host, session, KV_CODE_SLAB_ADD, &msg, fds);
	}
}

static void add_slab(kvd_host_t *host, slab_entry_t *entry, const kvs_slab_info_t *info)
{
	*entry = (slab_entry_t){.state = ANNOUNCED, .region = UINT32_MAX, .serial = info->serial, .bytes = info->bytes};
	/* On huge pages a transfer without registration costs less. */
	if (host->disk && !info->huge && info->base) {
		kvs_nvme_register(host->disk, info->base, info->bytes, &entry->region);
		kvs_pool_set_region(host->cpu, info->slab, entry->region);
	}
	for (kvd_session_t *session = host->sessions; session; session = session->next) {
		if (session->member) {
			announce_slab(host, session, info);
		}
	}
}

/* Who maps the slab: every member of its namespace, those whose connection has ended while their process lives, too. */
static void find_mappers(kvd_host_t *host, slab_entry_t *entry, const kvs_slab_info_t *info)
{
	uint32_t count = kvd_members_list(host, info->ns, NULL, 0);

	entry->by = count ? calloc(count, sizeof *entry->by) : NULL;
	if (entry->by) {
		entry->mapped = kvd_members_list(host, info->ns, entry->by, count);
	} /* else: nobody is waited for; the memory is theirs until they let go of it */
}

static void announce_retirement(kvd_host_t *host, slab_entry_t *entry, const kvs_slab_info_t *info)
{
	kv_msg_t msg = {.slab_retire = {.slab = info->slab}};

	entry->state = RETIRING;
	entry->since_ns = kv_now_ns(host->env);
	entry->next = host->slabs->retiring;
	host->slabs->retiring = info->slab;
	find_mappers(host, entry, info);
	for (kvd_session_t *session = host->sessions; session; session = session->next) {
		if (session->member && strcmp(info->ns, session->ns->name) == 0) {
			kvd_session_notify(host, session, KV_CODE_SLAB_RETIRE, &msg, NULL);
		}
	}
}

static void announce_changes(kvd_host_t *host, uint32_t slab)
{
	slab_entry_t *entry = &host->slabs->slab[slab];
	kvs_slab_info_t info;

	if (get_slab(host, slab, &info) != KV_OK) {
		return;
	}
	if (entry->serial != info.serial) {
		add_slab(host, entry, &info);
	}
	if (info.retired && entry->state == ANNOUNCED) {
		announce_retirement(host, entry, &info);
	}
}

void kvd_slabs_announce(kvd_host_t *host)
{
	uint64_t version = sum_versions(host);

	if (host->slabs->pools < host->pool_count) {
		announce_pools(host);
	}
	if (host->slabs->version == version) {
		return;
	}
	host->slabs->version = version;
	for (uint32_t m = 0; m < host->pool_count; m++) {
		for (uint32_t i = 0; i < kvs_pool_slab_count(host->pool[m]); i++) {
			announce_changes(host, kvs_memories_base(m) + i);
		}
	}
}

void kvd_slabs_announce_to(kvd_host_t *host, kvd_session_t *session)
{
	announce_devices(host, session, 0, host->slabs->pools);
	for (uint32_t m = 0; m < host->pool_count; m++) {
		for (uint32_t i = 0; i < kvs_pool_slab_count(host->pool[m]); i++) {
			uint32_t slab = kvs_memories_base(m) + i;
			kvs_slab_info_t info;

			if (host->slabs->slab[slab].state == ANNOUNCED && get_slab(host, slab, &info) == KV_OK) {
				announce_slab(host, session, &info);
			}
		}
	}
}

/* ---- letting go ------------------------------------------------------------------------------ */

static void remove_mapper(slab_entry_t *entry, kvd_member_t member)
{
	for (uint32_t i = 0; i < entry->mapped; i++) {
		if (entry->by[i].id == member) {
			entry->by[i] = entry->by[--entry->mapped];
			return;
		}
	}
}

void kvd_slabs_note_unmapped(kvd_host_t *host, kvd_member_t member, uint64_t slab)
{
	if (slab <= KV_SLOT_MAX_SLAB) {
		remove_mapper(&host->slabs->slab[slab], member);
	}
}

void kvd_slabs_forget_member(kvd_host_t *host, kvd_member_t member)
{
	for (uint32_t i = host->slabs ? host->slabs->retiring : NOWHERE; i != NOWHERE; i = host->slabs->slab[i].next) {
		remove_mapper(&host->slabs->slab[i], member);
	}
}

/* Bytes that may stay pinned when the pages are taken away. */
static uint64_t may_be_pinned(const slab_entry_t *entry)
{
	for (uint32_t i = 0; i < entry->mapped; i++) {
		if (entry->by[i].role == ROLE_WORKER) {
			return entry->bytes;
		}
	}

	return 0;
}

/* The pool's part: 1 when the memory has come back. */
static int release_slab(kvd_host_t *host, uint32_t slab, int unmapped)
{
	kvs_slab_info_t info;
	uint32_t local;
	kvs_tier_t *pool = find_pool(host, slab, &local);

	if (get_slab(host, slab, &info) == KV_OK && host->slabs->slab[slab].state == RETIRING) {
		const int fds[2] = {info.data_fd, info.digest_fd};

		for (kvd_session_t *session = host->sessions; session; session = session->next) {
			kvd_session_drop_queued(session, fds);
		}
	}

	return kvs_pool_release(pool, local, unmapped) != KV_ERR_BUSY;
}

static void take_pages_away(kvd_host_t *host, uint32_t slab)
{
	slab_entry_t *entry = &host->slabs->slab[slab];
	uint64_t pinned = may_be_pinned(entry);

	if (host->slabs->pinned + pinned > host->options->cpu_size / PINNED_SHARE || !release_slab(host, slab, 0)) {
		return;
	}
	kv_logf(host->env, KV_LOG_INFO, "io",
		"the pages of a retired slab are taken away, some members still map it slab %u members %u", slab,
		entry->mapped);
	entry->state = ZOMBIE;
	entry->pinned = pinned;
	host->slabs->pinned += pinned;
	host->slabs->kept++;
}

/* 1: the slab has gone, and its number is free. */
static int release_if_unmapped(kvd_host_t *host, uint32_t slab)
{
	slab_entry_t *entry = &host->slabs->slab[slab];

	if (entry->state == RETIRING && host->disk && !kvs_nvme_unregister(host->disk, entry->region)) {
		return 0;
	}
	entry->region = UINT32_MAX; /* its place may be another slab's at the next turn */
	if (entry->mapped > 0) {
		if (entry->state == RETIRING && kv_now_ns(host->env) - entry->since_ns >= WAIT_NS) {
			take_pages_away(host, slab);
		}
		return 0;
	}
	if (!release_slab(host, slab, 1)) {
		return 0;
	}
	host->slabs->kept -= entry->state == ZOMBIE ? 1u : 0u;
	host->slabs->pinned -= entry->pinned;
	free(entry->by);
	*entry = (slab_entry_t){.state = SLAB_NONE};

	return 1;
}

void kvd_slabs_release_retired(kvd_host_t *host)
{
	uint32_t *link = &host->slabs->retiring;

	if (*link == NOWHERE) {
		return;
	}
	while (*link != NOWHERE) {
		uint32_t slab = *link, next = host->slabs->slab[slab].next;

		if (release_if_unmapped(host, slab)) {
			*link = next;
		} else {
			link = &host->slabs->slab[slab].next;
		}
	}
	kv_metric_set(&host->metrics, KV_M_SLABS_STILL_MAPPED, host->slabs->kept);
}
