/* Members and instances: pidfds, shared areas, report rings. */
#include "core/json.h"
#include "io/sessions/session.h"

#include "kvs/pool.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define RING_RECORDS  1024u
#define RING_OFFSET   4096u
#define DRAIN_RECORDS 128u                /* of one ring at a time */
#define DRAIN_WORK    256u                /* of all rings in a row: records, and four for a ring */
#define REAPED_ONCE   8u                  /* members freed in a row */
#define LOG_NS        UINT64_C(100000000) /* a namespace may have one more line about its members in this time */
#define LOG_BURST     64u                 /* and so many at once */

struct kvd_instance_entry {
	kvd_instance_entry_t *next;
	kvd_instance_t id;
	kvd_namespace_t *ns;
	kvd_area_t leases;
	char name[129];
};

struct kvd_member_entry {
	kvd_source_t source;      /* its pidfd */
	kvd_member_entry_t *next; /* in its bucket, or among those that have gone */
	kvd_member_t id;
	kvd_instance_t instance;
	kvd_namespace_t *ns;
	kvd_session_t *session; /* NULL: its connection has ended */
	kvd_area_t area;
	uint64_t staging_offset, staging_words;
	uint64_t tail;      /* reports read; the copy in the area is for the member only */
	uint64_t dropped;   /* reports it could not write, as far as they are counted */
	uint64_t looked_ns; /* when that was */
	uint64_t process; /* equal to another's whose pidfd has not fired either: the same process; 0: cannot be told */
	uint64_t attachment; /* equal to another's of that process: connections of one kvc_t; 0: of none */
	uint32_t role, rank;
	uint32_t space; /* opened last; 0: none */
	int drained;    /* it has said that copies of its older connections have ended */
	int left;       /* its last word was that it has unmapped everything */
	int fired;      /* the pidfd has: it touches nothing any more */
};

/* ---- finding --------------------------------------------------------------------------------- */

static kvd_member_entry_t **bucket_of(kvd_host_t *host, kvd_member_t id)
{
	return &host->members[(id * UINT64_C(0x9e3779b97f4a7c15)) >> 54];
}

kvd_member_entry_t *kvd_entry_find(kvd_host_t *host, kvd_member_t id)
{
	kvd_member_entry_t *member = *bucket_of(host, id);

	while (member && member->id != id) {
		member = member->next;
	}

	return member;
}

kvd_member_t kvd_entry_id(const kvd_member_entry_t *member)
{
	return member ? member->id : 0;
}

kvd_session_t *kvd_entry_session(const kvd_member_entry_t *member)
{
	return member ? member->session : NULL;
}

static kvd_instance_entry_t *instance_find(kvd_host_t *host, kvd_instance_t id)
{
	kvd_instance_entry_t *entry = host->instances;

	while (entry && entry->id != id) {
		entry = entry->next;
	}

	return entry;
}

uint32_t kvd_entries_attached(const kvd_host_t *host)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < KVD_MEMBER_BUCKETS; i++) {
		for (const kvd_member_entry_t *member = host->members[i]; member; member = member->next) {
			n += member->session != NULL;
		}
	}

	return n;
}

uint32_t kvd_entries_of(const kvd_host_t *host, const char *ns, kvd_mapper_t *out, uint32_t cap)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < KVD_MEMBER_BUCKETS; i++) {
		for (const kvd_member_entry_t *member = host->members[i]; member; member = member->next) {
			if (strcmp(member->ns->name, ns) == 0 && n++ < cap) {
				out[n - 1] = (kvd_mapper_t){member->id, member->role};
			}
		}
	}

	return n;
}

uint32_t kvd_entries_fds(const kvd_host_t *host)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < KVD_MEMBER_BUCKETS; i++) {
		for (const kvd_member_entry_t *member = host->members[i]; member; member = member->next) {
			n += 2;
		}
	}
	for (const kvd_instance_entry_t *entry = host->instances; entry; entry = entry->next) {
		n++;
	}

	return n;
}

/* ---- what operators see
 * ---------------------------------------------------------------------------------------------- */

/* 1: a line about the namespace's members may be written. One that joins and leaves in a loop has its lines cut. */
static int may_log(kvd_host_t *host, kvd_namespace_t *ns)
{
	const uint64_t now = kv_now_ns(host->env);

	if (ns->member_logged_ns + LOG_BURST * LOG_NS < now) {
		ns->member_logged_ns = now - LOG_BURST * LOG_NS;
	}
	if (ns->member_logged_ns + LOG_NS > now) {
		ns->members_unlogged++;
		return 0;
	}
	ns->member_logged_ns += LOG_NS;

	return 1;
}

/* `what` has happened to a member that has a session. */
static void log_member(kvd_host_t *host, const kvd_member_entry_t *member, const char *what)
{
	static const char *const roles[] = {"scheduler", "worker", "both"};
	const kvd_instance_entry_t *instance = instance_find(host, member->instance);

	if (!may_log(host, member->ns)) {
		return;
	}
	kv_log(KV_LOG_INFO, "io",
	       "%s: namespace %s instance %s member %llu role %s rank %u program %s pid %d unlogged %llu", what,
	       member->ns->name, instance ? instance->name : "?", (unsigned long long)member->id, roles[member->role],
	       member->rank, member->session->program, (int)member->session->pid,
	       (unsigned long long)member->ns->members_unlogged);
	member->ns->members_unlogged = 0;
}

void kvd_entry_opened(kvd_host_t *host, kvd_member_entry_t *member, uint32_t space, const char *model)
{
	member->space = space;
	if (may_log(host, member->ns)) {
		kv_log(KV_LOG_INFO, "io",
		       "a space is open: namespace %s space %u model \"%.128s\" member %llu unlogged %llu",
		       member->ns->name, space, model, (unsigned long long)member->id,
		       (unsigned long long)member->ns->members_unlogged);
		member->ns->members_unlogged = 0;
	}
}

void kvd_entry_describe(void *ctx, kvd_member_t id, struct kvd_json *json)
{
	const kvd_member_entry_t *member = kvd_entry_find(ctx, id);

	if (member && member->session) {
		kvd_json_text(json, "program", member->session->program);
		kvd_json_u64(json, "pid", (uint64_t)member->session->pid);
		kvd_json_u64(json, "space", member->space);
	}
}

/* ---- reports
 * --------------------------------------------------------------------------------------------------------- */

/* A word a client writes while we read it: the same value twice, or none. */
static int stable_word(const void *word, uint64_t *p_value)
{
	uint64_t once, again;

	if (kvs_sigbus_copy(&once, word, sizeof once) != KV_OK ||
	    kvs_sigbus_copy(&again, word, sizeof again) != KV_OK || once != again) {
		return 0;
	}
	*p_value = again;

	return 1;
}

static void drain_records(kvd_host_t *host, kvd_member_entry_t *member, uint64_t head, uint32_t limit)
{
	const kv_report_t *ring = (const kv_report_t *)((const uint8_t *)member->area.base + RING_OFFSET);

	for (; member->tail != head && limit > 0; limit--) {
		kv_report_t report;

		if (kvs_sigbus_copy(&report, &ring[member->tail % RING_RECORDS], sizeof report) != KV_OK) {
			kv_metric_add(&host->metrics, KV_M_BAD_REPORTS, 1);
		} else if (kvd_core_report(host->core, member->id, &report) == KV_OK &&
			   report.type == KV_REPORT_REQUEST && host->publisher) {
			kvd_publisher_hit(host->publisher, member->ns->index, &report);
		}
		member->tail++;
	}
}

/* Returns how many records there were. */
static uint32_t drain(kvd_host_t *host, kvd_member_entry_t *member, uint32_t limit)
{
	kv_member_area_header_t *header = member->area.base;
	uint64_t now = kv_now_ns(host->env), head = 0, dropped = 0, tail = member->tail;

	if (stable_word(&header->dropped, &dropped)) {
		uint64_t lost = dropped - member->dropped;
		/* To drop one takes a client more than a nanosecond: a larger step is no count. */
		int is_count = lost <= kv_now_ns(host->env) - member->looked_ns;

		kv_metric_add(&host->metrics, is_count ? KV_M_LOST_REPORTS : KV_M_BAD_REPORTS, is_count ? lost : 1);
		member->dropped = dropped;
		member->looked_ns = now;
	}
	if (!stable_word(&header->head, &head) || head == tail) {
		return 0;
	}
	if (head - tail > RING_RECORDS) {
		kv_metric_add(&host->metrics, KV_M_BAD_REPORTS, 1);
		member->tail = tail = head;
	}
	drain_records(host, member, head, limit);
	atomic_store_explicit(&header->tail, member->tail, memory_order_release);

	return (uint32_t)(member->tail - tail);
}

int kvd_entries_drain(kvd_host_t *host)
{
	uint32_t work = 0, i = host->drain_next;

	for (; i < KVD_MEMBER_BUCKETS && work < DRAIN_WORK; i++) {
		for (kvd_member_entry_t *member = host->members[i]; member; member = member->next) {
			if (member->session) {
				work += 4 + drain(host, member, DRAIN_RECORDS);
			}
		}
	}
	host->drain_next = i < KVD_MEMBER_BUCKETS ? i : 0;

	return host->drain_next != 0;
}

kv_status_t kvd_entry_staging(void *ctx, kvd_member_t id, uint64_t first, uint32_t words, uint64_t *out)
{
	kvd_member_entry_t *member = kvd_entry_find(ctx, id);

	if (!member || !member->session || first > member->staging_words || words > member->staging_words - first) {
		return KV_ERR_ARG;
	}

	return kvs_sigbus_copy(out,
			       (const uint8_t *)member->area.base + member->staging_offset + first * sizeof(uint64_t),
			       (size_t)words * sizeof(uint64_t));
}

/* ---- the end --------------------------------------------------------------------------------- */

static void member_gone(kvd_host_t *host, kvd_member_entry_t *member)
{
	kvd_member_entry_t **at = bucket_of(host, member->id);
	char name[32];

	while (*at != member) {
		at = &(*at)->next;
	}
	*at = member->next;
	member->ns->used.members--;
	kv_ns_metric_set(&host->metrics, member->ns->id, KV_NM_MEMBERS, member->ns->used.members);
	kvd_fair_remove(&member->source);
	kvd_loop_remove(host, &member->source);
	snprintf(name, sizeof name, "pidfd.%llu", (unsigned long long)member->id);
	kvd_keeper_drop(host->setup->keeper_fd, name);
	kvd_slabs_member_gone(host, member->id);
	kvd_member_gone(host->core, member->id, member->fired);
	kvd_world_commit(host);
	/* Its pidfd may be what is being served: freed when the iteration is over. */
	member->next = host->gone;
	host->gone = member;
}

static int is_live(const kvd_member_entry_t *member)
{
	struct pollfd look = {.fd = member->source.fd, .events = POLLIN};

	return !member->fired && poll(&look, 1, 0) == 0;
}

/* Is `open` a later connection of the attachment that `closed` was one of? Only that one knows when its copies have
 * ended (decision 030). A process id is nobody else's while its process lives, so both must. */
static int same_attachment(const kvd_member_entry_t *closed, const kvd_member_entry_t *open)
{
	return open != closed && open->session && !closed->session && closed->process != 0 && closed->attachment != 0 &&
	       closed->process == open->process && closed->attachment == open->attachment &&
	       closed->instance == open->instance && closed->rank == open->rank && closed->role == open->role &&
	       is_live(closed) && is_live(open);
}

/* The attachment goes on under `by`: nothing of its old connection needs to be kept. */
static void absorb(kvd_host_t *host, kvd_member_entry_t *closed, const kvd_member_entry_t *by)
{
	kvd_member_absorb(host->core, closed->id, by->id, by->drained);
	member_gone(host, closed);
}

/* A connection has ended: is there a newer one? It may have joined, and spoken for this one, before the end was
 * seen. */
static void hand_over(kvd_host_t *host, kvd_member_entry_t *closed)
{
	for (uint32_t i = 0; i < KVD_MEMBER_BUCKETS; i++) {
		for (const kvd_member_entry_t *by = host->members[i]; by; by = by->next) {
			if (same_attachment(closed, by)) {
				absorb(host, closed, by);
				return;
			}
		}
	}
}

/* A member has joined: has it older connections that have ended? */
static void take_over(kvd_host_t *host, const kvd_member_entry_t *by)
{
	for (uint32_t i = 0; i < KVD_MEMBER_BUCKETS; i++) {
		for (kvd_member_entry_t *closed = host->members[i]; closed;) {
			kvd_member_entry_t *next = closed->next;

			if (same_attachment(closed, by)) {
				absorb(host, closed, by);
			}
			closed = next;
		}
	}
}

void kvd_entry_drained(kvd_host_t *host, kvd_member_entry_t *member, const kv_msg_drained_t *ask)
{
	if (ask->what == 2) {
		member->drained = 1;
	} else if (ask->what == 3) {
		kvd_slabs_drained(host, member->id, ask->id);
	} else if (ask->what == 4) {
		/* Its last word, whoever else holds the socket open: a child that was forked does. */
		member->left = 1;
		kvd_session_doom(host, member->session);
	}
}

void kvd_entry_session_ended(kvd_host_t *host, kvd_member_entry_t *member)
{
	(void)drain(host, member, RING_RECORDS);
	log_member(host, member,
		   member->left    ? "a member has detached"
		   : member->fired ? "a member's process has ended"
				   : "a member's connection has ended");
	member->session = NULL;
	if (member->fired || member->left) {
		member_gone(host, member);
	} else {
		kvd_member_closed(host->core, member->id);
		kvd_world_commit(host);
		hand_over(host, member);
	}
}

/* The process has ended. What it has sent still counts: read its socket to the end first. */
static int pidfd_ready(kvd_host_t *host, kvd_source_t *source, uint32_t events)
{
	kvd_member_entry_t *member = (kvd_member_entry_t *)source;

	(void)events;
	if (member->fired) {
		return 0;
	}
	member->fired = 1;
	kvd_loop_change(host, source, 0);
	if (member->session) {
		shutdown(member->session->source.fd, SHUT_RDWR);
	} else {
		member_gone(host, member);
	}

	return 0;
}

static void member_free(kvd_member_entry_t *member)
{
	kvd_area_destroy(&member->area);
	close(member->source.fd);
	free(member);
}

static void instance_free(kvd_instance_entry_t *entry)
{
	kvd_area_destroy(&entry->leases);
	free(entry);
}

/* The core has done with an instance, and so with all its members. */
static void instance_gone(kvd_host_t *host, kvd_instance_t id)
{
	kvd_instance_entry_t **at = &host->instances;

	for (uint32_t i = 0; i < KVD_MEMBER_BUCKETS; i++) {
		for (kvd_member_entry_t *member = host->members[i]; member;) {
			kvd_member_entry_t *next = member->next;

			if (member->instance == id) {
				member_gone(host, member);
			}
			member = next;
		}
	}
	while (*at && (*at)->id != id) {
		at = &(*at)->next;
	}
	if (*at) {
		kvd_instance_entry_t *entry = *at;
		*at = entry->next;
		entry->ns->used.instances--;
		instance_free(entry);
	}
}

int kvd_entries_reap(kvd_host_t *host)
{
	kvd_instance_t ended;
	uint32_t n = kvd_reaped(host->core, &ended, 1);

	if (n > 0) {
		instance_gone(host, ended);
	}
	for (uint32_t i = 0; i < REAPED_ONCE && host->gone; i++) {
		kvd_member_entry_t *member = host->gone;
		host->gone = member->next;
		member_free(member);
	}

	return n > 0 || host->gone != NULL;
}

void kvd_entries_fini(kvd_host_t *host)
{
	for (uint32_t i = 0; i < KVD_MEMBER_BUCKETS; i++) {
		while (host->members[i]) {
			kvd_member_entry_t *member = host->members[i];
			host->members[i] = member->next;
			member_free(member);
		}
	}
	while (host->gone) {
		kvd_member_entry_t *member = host->gone;
		host->gone = member->next;
		member_free(member);
	}
	while (host->instances) {
		kvd_instance_entry_t *entry = host->instances;
		host->instances = entry->next;
		instance_free(entry);
	}
}

/* ---- JOIN ------------------------------------------------------------------------------------ */

/* The areas of a new member: its own, and its instance's when that is new. */
static kv_status_t member_area(const kvd_options_t *options, const kv_msg_join_t *ask, kvd_member_entry_t *member)
{
	size_t staging = RING_OFFSET + RING_RECORDS * sizeof(kv_report_t);
	size_t bytes = staging + (size_t)ask->staging_words * sizeof(uint64_t);
	kv_member_area_header_t *header;
	kv_status_t status;

	if ((size_t)ask->staging_words * sizeof(uint64_t) > options->limits_staging) {
		return KV_ERR_LIMIT;
	}
	status = kvd_area_create("kvd-member", bytes, KVD_AREA_CLIENT, &member->area);
	if (status != KV_OK) {
		return status;
	}
	member->staging_offset = staging;
	member->staging_words = ask->staging_words;
	header = member->area.base;
	header->magic = KV_MEMBER_MAGIC;
	header->version = KV_SHM_VERSION;
	header->ring_records = RING_RECORDS;
	header->ring_offset = RING_OFFSET;
	header->staging_offset = staging;
	header->staging_words = ask->staging_words;
	header->total_bytes = member->area.bytes;

	return KV_OK;
}

static kv_status_t instance_open(kvd_host_t *host, kvd_namespace_t *ns, const kvd_join_t *join,
				 kvd_instance_entry_t **p_entry)
{
	kvd_instance_t id = 0;
	kv_status_t status = kvd_instance_find(host->core, join, &id);

	if (status != KV_OK) {
		return status;
	}
	if (id != 0) {
		*p_entry = instance_find(host, id);
		kv_assert(*p_entry);
		return KV_OK;
	}

	if (ns->used.instances >= host->part.instances) {
		return KV_ERR_LIMIT;
	}
	kvd_instance_entry_t *entry = calloc(1, sizeof *entry);
	if (!entry) {
		return KV_ERR_NOMEM;
	}
	status = kvd_area_create("kvd-leases", host->options->instance_lease_area, KVD_AREA_DAEMON, &entry->leases);
	if (status != KV_OK) {
		free(entry);
		return status;
	}
	status = kvd_instance_create(host->core, join, entry->leases.base, entry->leases.bytes, &entry->id);
	if (status != KV_OK) {
		instance_free(entry);
		return status;
	}
	entry->ns = ns;
	snprintf(entry->name, sizeof entry->name, "%s", join->instance);
	ns->used.instances++;
	entry->next = host->instances;
	host->instances = entry;
	*p_entry = entry;

	return KV_OK;
}

static kv_status_t member_open(kvd_host_t *host, kvd_call_t *call, const kvd_join_t *join,
			       kvd_member_entry_t **p_member, kvd_instance_entry_t **p_instance)
{
	kvd_member_entry_t *member = calloc(1, sizeof *member);
	kv_status_t status;

	if (!member) {
		return KV_ERR_NOMEM;
	}
	member->source = (kvd_source_t){.ready = pidfd_ready, .fd = call->fds[0], .flow = &call->session->ns->flow};
	member->area = KVD_AREA_NONE;
	member->ns = call->session->ns;
	status = member_area(host->options, &call->ask->join, member);
	if (status != KV_OK) {
		goto err_free;
	}
	status = kvd_loop_add(host, &member->source, EPOLLIN);
	if (status != KV_OK) {
		goto err_area;
	}
	status = instance_open(host, member->ns, join, p_instance);
	if (status != KV_OK) {
		goto err_watch;
	}
	status = kvd_member_add(host->core, (*p_instance)->id, join, &member->id);
	if (status != KV_OK) {
		kvd_instance_drop(host->core, (*p_instance)->id);
		goto err_watch;
	}
	member->instance = (*p_instance)->id;
	*p_member = member;

	return KV_OK;

err_watch:
	kvd_loop_remove(host, &member->source);
err_area:
	kvd_area_destroy(&member->area);
err_free:
	free(member);
	return status;
}

/* Slots that a member's death frees wait for its pidfd: a pidfd of somebody else would free them too early or never
 * (decision 026). */
static kv_status_t pidfd_allowed(kvd_host_t *host, kvd_call_t *call, uint64_t *p_process)
{
	kvd_pidfd_t whose = call->fd_count == 1 ? kvd_pidfd_check(call->session, p_process) : KVD_PIDFD_BAD;

	if (whose == KVD_PIDFD_BAD) {
		kv_metric_add(&host->metrics, KV_M_PIDFD_REFUSED, 1);
		return KV_ERR_PIDFD_REQUIRED;
	}
	if (whose == KVD_PIDFD_UNPROVED && !call->session->ns->trusted) {
		kv_metric_add(&host->metrics, KV_M_PIDFD_UNPROVED, 1);
		call->detail =
			"the daemon cannot prove that the pidfd is the joining process's own, so it may match only; "
			"where the daemon does not see the process ids of its clients, Linux 6.9 or the option "
			"members.trusted is needed for more";
		return KV_ERR_PIDFD_REQUIRED;
	}

	return KV_OK;
}

/* Nothing is lent that its death would have to free: the mirror is read-only, and the connection all that there is to
 * end. */
static kv_status_t join_to_match(kvd_host_t *host, kvd_call_t *call)
{
	const kvd_area_t *mirror = &call->session->ns->mirror;

	kv_metric_add(&host->metrics, KV_M_MATCH_JOINS, !call->session->matching);
	call->session->matching = 1;
	call->reply->join_reply = (kv_msg_join_reply_t){.mirror_bytes = mirror->bytes};
	call->reply_fds[0] = mirror->fd;

	return KV_OK;
}

kv_status_t kvd_join_request(kvd_host_t *host, kvd_call_t *call)
{
	const kv_msg_join_t *ask = &call->ask->join;
	char instance[129], name[32];
	kvd_join_t join = {.ns = call->session->ns->id,
			   .instance = instance,
			   .secret = ask->secret.data,
			   .secret_len = ask->secret.len,
			   .role = ask->role,
			   .rank = ask->rank};
	kvd_member_entry_t *member;
	kvd_instance_entry_t *entry;
	uint64_t process;
	kv_status_t status;

	if (call->session->member) {
		call->detail = "this connection has joined already";
		return KV_ERR_EXISTS;
	}
	if (ask->role == KV_ROLE_MATCH) {
		return join_to_match(host, call);
	}
	status = pidfd_allowed(host, call, &process);
	if (status != KV_OK) {
		return status;
	}
	if (ask->secret.len < 16 || ask->instance.len == 0) {
		call->detail = "an instance has an id, and a secret of 16 to 32 bytes";
		return KV_ERR_ARG;
	}
	memcpy(instance, ask->instance.data, ask->instance.len);
	instance[ask->instance.len] = '\0';
	status = call->session->ns->used.members < host->part.members ? member_open(host, call, &join, &member, &entry)
								      : KV_ERR_LIMIT;
	if (status != KV_OK) {
		return status;
	}

	call->fds[0] = -1; /* the member's from now on */
	member->session = call->session;
	member->looked_ns = kv_now_ns(host->env);
	member->process = process;
	member->attachment = ask->attachment;
	member->drained = ask->old_incarnation == host->incarnation;
	member->role = join.role;
	member->rank = join.rank;
	member->next = *bucket_of(host, member->id);
	*bucket_of(host, member->id) = member;
	member->ns->used.members++;
	kv_ns_metric_set(&host->metrics, member->ns->id, KV_NM_MEMBERS, member->ns->used.members);
	call->session->member = member;
	call->session->roles |= KV_ROLE_MEMBER;
	log_member(host, member, "a member has attached");
	snprintf(name, sizeof name, "pidfd.%llu", (unsigned long long)member->id);
	kvd_keeper_hold(host->setup->keeper_fd, name, member->source.fd);
	take_over(host, member);
	call->reply->join_reply = (kv_msg_join_reply_t){.instance_id = entry->id,
							.member_id = member->id,
							.mirror_bytes = member->ns->mirror.bytes,
							.lease_bytes = entry->leases.bytes,
							.member_bytes = member->area.bytes};
	call->reply_fds[0] = member->ns->mirror.fd;
	call->reply_fds[1] = entry->leases.fd;
	call->reply_fds[2] = member->area.fd;

	return KV_OK;
}
