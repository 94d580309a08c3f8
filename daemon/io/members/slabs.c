/* Slabs that come and go: who has been told of which, and who still maps one that has been retired.
 *
 *   NONE --carved--> TOLD --retired--> LEAVING --nobody maps it--> NONE
 *                                      LEAVING --too long--> KEPT (its pages are taken away) --nobody maps it--> NONE
 *
 * Nothing names a slot of a retired slab, so nothing is read or written there; what is waited for is memory, and it is
 * not waited for long: an engine that is idle may not look at its socket for minutes. Pages that a member has pinned
 * for a device stay its own when they are taken away. Members that may do that look at their socket all the time, and
 * what those that do not answer may keep so is bounded.
 */
#include "io/members/slabs.h"

#include "io/members/member_table.h"
#include "io/sessions/session.h"

#include "kvs/nvme.h"
#include "kvs/pool.h"

#include <stdlib.h>

#define WAIT_NS      UINT64_C(250000000)
#define PINNED_SHARE 8u /* of the pool */
#define ROLE_WORKER  1u
#define NOWHERE      UINT32_MAX

typedef enum told_state { TOLD_NONE, TOLD, LEAVING, KEPT } told_state_t;

typedef struct told {
	told_state_t state;
	uint32_t region;
	uint32_t next;   /* in the list of those that are LEAVING or KEPT */
	uint32_t mapped; /* members that have not said that they do not map it */
	uint64_t serial;
	uint64_t since_ns;
	uint64_t bytes;
	uint64_t pinned; /* KEPT: bytes that may be pinned */
	kvd_mapper_t *by;
} told_t;

typedef struct kvd_slabs {
	uint64_t version; /* of the pool, when it was looked at last */
	uint64_t pinned;  /* sum */
	uint32_t kept;
	uint32_t going; /* list */
	told_t slab[KV_SLOT_MAX_SLAB + 1u];
} kvd_slabs_t;

kv_status_t kvd_slabs_open(kvd_host_t *host)
{
	host->slabs = calloc(1, sizeof *host->slabs);
	if (!host->slabs) {
		return KV_ERR_NOMEM;
	}
	host->slabs->going = NOWHERE;

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

/* ---- telling --------------------------------------------------------------------------------- */

static void tell_one(kvd_host_t *host, kvd_session_t *session, const kvs_slab_info_t *info)
{
	int fds[KV_WIRE_MAX_FDS] = {info->data_fd, info->digest_fd, -1};
	kv_msg_t msg = {.slab_add = {.slab = info->slab,
				     .slots = info->slots,
				     .slot_bytes = info->slot_bytes,
				     .block_bytes = info->geometry.block_bytes,
				     .heads = info->geometry.heads,
				     .leaves = info->geometry.leaves,
				     .bytes = info->bytes,
				     .digest_bytes = info->digest_bytes}};

	if (strcmp(info->ns, session->ns->name) == 0) {
		kvd_session_notify(host, session, KV_CODE_SLAB_ADD, &msg, fds);
	}
}

static void add(kvd_host_t *host, told_t *told, const kvs_slab_info_t *info)
{
	*told = (told_t){.state = TOLD, .region = UINT32_MAX, .serial = info->serial, .bytes = info->bytes};
	/* On huge pages a transfer without registration costs less. */
	if (host->disk && !info->huge) {
		kvs_nvme_register(host->disk, info->base, info->bytes, &told->region);
		kvs_pool_set_region(host->cpu, info->slab, told->region);
	}
	for (kvd_session_t *session = host->sessions; session; session = session->next) {
		if (session->member) {
			tell_one(host, session, info);
		}
	}
}

/* Who maps the slab: every member of its namespace, those whose connection has ended while their process lives, too. */
static void find_mappers(kvd_host_t *host, told_t *told, const kvs_slab_info_t *info)
{
	uint32_t count = kvd_entries_of(host, info->ns, NULL, 0);

	told->by = count ? calloc(count, sizeof *told->by) : NULL;
	if (told->by) {
		told->mapped = kvd_entries_of(host, info->ns, told->by, count);
	} /* else: nobody is waited for; the memory is theirs until they let go of it */
}

static void retire(kvd_host_t *host, told_t *told, const kvs_slab_info_t *info)
{
	kv_msg_t msg = {.slab_retire = {.slab = info->slab}};

	told->state = LEAVING;
	told->since_ns = kv_now_ns(host->env);
	told->next = host->slabs->going;
	host->slabs->going = info->slab;
	find_mappers(host, told, info);
	for (kvd_session_t *session = host->sessions; session; session = session->next) {
		if (session->member && strcmp(info->ns, session->ns->name) == 0) {
			kvd_session_notify(host, session, KV_CODE_SLAB_RETIRE, &msg, NULL);
		}
	}
}

void kvd_slabs_sync(kvd_host_t *host)
{
	kvd_slabs_t *slabs = host->slabs;
	uint64_t version = kvs_pool_version(host->cpu);

	if (slabs->version == version) {
		return;
	}
	slabs->version = version;
	for (uint32_t i = 0; i < kvs_pool_slab_count(host->cpu); i++) {
		kvs_slab_info_t info;

		if (kvs_pool_slab(host->cpu, i, &info) != KV_OK) {
			continue;
		}
		if (slabs->slab[i].serial != info.serial) {
			add(host, &slabs->slab[i], &info);
		}
		if (info.retired && slabs->slab[i].state == TOLD) {
			retire(host, &slabs->slab[i], &info);
		}
	}
}

void kvd_slabs_greet(kvd_host_t *host, kvd_session_t *session)
{
	for (uint32_t i = 0; i < kvs_pool_slab_count(host->cpu); i++) {
		kvs_slab_info_t info;

		if (host->slabs->slab[i].state == TOLD && kvs_pool_slab(host->cpu, i, &info) == KV_OK) {
			tell_one(host, session, &info);
		}
	}
}

/* ---- letting go ------------------------------------------------------------------------------ */

static void unmapped_by(told_t *told, kvd_member_t member)
{
	for (uint32_t i = 0; i < told->mapped; i++) {
		if (told->by[i].id == member) {
			told->by[i] = told->by[--told->mapped];
			return;
		}
	}
}

void kvd_slabs_drained(kvd_host_t *host, kvd_member_t member, uint64_t slab)
{
	if (slab <= KV_SLOT_MAX_SLAB) {
		unmapped_by(&host->slabs->slab[slab], member);
	}
}

void kvd_slabs_member_gone(kvd_host_t *host, kvd_member_t member)
{
	for (uint32_t i = host->slabs ? host->slabs->going : NOWHERE; i != NOWHERE; i = host->slabs->slab[i].next) {
		unmapped_by(&host->slabs->slab[i], member);
	}
}

/* Bytes that may stay pinned when the pages are taken away. */
static uint64_t may_be_pinned(const told_t *told)
{
	for (uint32_t i = 0; i < told->mapped; i++) {
		if (told->by[i].role == ROLE_WORKER) {
			return told->bytes;
		}
	}

	return 0;
}

/* The pool's part: 1 when the memory has come back. */
static int release(kvd_host_t *host, uint32_t slab, int unmapped)
{
	kvs_slab_info_t info;

	if (kvs_pool_slab(host->cpu, slab, &info) == KV_OK && host->slabs->slab[slab].state == LEAVING) {
		const int fds[2] = {info.data_fd, info.digest_fd};

		for (kvd_session_t *session = host->sessions; session; session = session->next) {
			kvd_session_forget(session, fds);
		}
	}

	return kvs_pool_release(host->cpu, slab, unmapped) != KV_ERR_BUSY;
}

static void keep(kvd_host_t *host, uint32_t slab)
{
	told_t *told = &host->slabs->slab[slab];
	uint64_t pinned = may_be_pinned(told);

	if (host->slabs->pinned + pinned > host->options->cpu_size / PINNED_SHARE || !release(host, slab, 0)) {
		return;
	}
	kv_logf(host->env, KV_LOG_INFO, "io",
		"the pages of a retired slab are taken away, some members still map it slab %u members %u", slab,
		told->mapped);
	told->state = KEPT;
	told->pinned = pinned;
	host->slabs->pinned += pinned;
	host->slabs->kept++;
}

/* 1: the slab has gone, and its number is free. */
static int let_go(kvd_host_t *host, uint32_t slab)
{
	told_t *told = &host->slabs->slab[slab];

	if (told->state == LEAVING && host->disk && !kvs_nvme_unregister(host->disk, told->region)) {
		return 0;
	}
	told->region = UINT32_MAX; /* its place may be another slab's at the next turn */
	if (told->mapped > 0) {
		if (told->state == LEAVING && kv_now_ns(host->env) - told->since_ns >= WAIT_NS) {
			keep(host, slab);
		}
		return 0;
	}
	if (!release(host, slab, 1)) {
		return 0;
	}
	host->slabs->kept -= told->state == KEPT ? 1u : 0u;
	host->slabs->pinned -= told->pinned;
	free(told->by);
	*told = (told_t){.state = TOLD_NONE};

	return 1;
}

void kvd_slabs_turn(kvd_host_t *host)
{
	uint32_t *link = &host->slabs->going;

	if (*link == NOWHERE) {
		return;
	}
	while (*link != NOWHERE) {
		uint32_t slab = *link, next = host->slabs->slab[slab].next;

		if (let_go(host, slab)) {
			*link = next;
		} else {
			link = &host->slabs->slab[slab].next;
		}
	}
	kv_metric_set(&host->metrics, KV_M_SLABS_KEPT, host->slabs->kept);
}
