/* Members and instances: JOIN, their shared memory, their end. */
#include "io/sessions/join.h"

#include "io/members/member.h"
#include "io/members/member_table.h"
#include "io/members/pidfd.h"
#include "io/members/reports.h"
#include "io/members/slabs.h"
#include "io/members/writers.h"
#include "io/sessions/net.h"
#include "io/base/poller.h"
#include "io/base/session.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define REAPED_ONCE 8u /* members freed in a row */

#define LIMIT_DETAIL                                                                                                   \
	"limits.members, limits.instances (a namespace may have an equal part of either) or limits.staging is "        \
	"reached, or the instance has as many members as one can have; raise it, or end some"

/* ---- the end --------------------------------------------------------------------------------- */

static void member_gone(kvd_host_t *host, kvd_member_entry_t *member)
{
	kvd_member_entry_t **at = kvd_member_bucket(host, member->id);

	while (*at != member) {
		at = &(*at)->next;
	}
	*at = member->next;
	member->ns->used.members--;
	kv_ns_metric_set(&host->metrics, member->ns->id, KV_NM_MEMBERS, member->ns->used.members);
	kvd_fair_remove(&member->source);
	kvd_poller_remove(host, &member->source);
	kvd_writers_drop(host, member); /* a daemon that is started anew need not watch it */
	kvd_slabs_forget_member(host, member->id);
	kvd_member_gone(host->core, member->id, member->fired);
	kvd_commit_events(host);
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
static void absorb_connection(kvd_host_t *host, kvd_member_entry_t *closed, const kvd_member_entry_t *by)
{
	kvd_member_absorb(host->core, closed->id, by->id, by->drained);
	member_gone(host, closed);
}

/* A connection has ended: is there a newer one? It may have joined, and spoken for this one, before the end was
 * seen. */
static void absorb_into_newer(kvd_host_t *host, kvd_member_entry_t *closed)
{
	for (uint32_t i = 0; i < KVD_MEMBER_BUCKETS; i++) {
		for (const kvd_member_entry_t *by = host->members[i]; by; by = by->next) {
			if (same_attachment(closed, by)) {
				absorb_connection(host, closed, by);
				return;
			}
		}
	}
}

/* A member has joined: has it older connections that have ended? */
static void absorb_older(kvd_host_t *host, const kvd_member_entry_t *by)
{
	for (uint32_t i = 0; i < KVD_MEMBER_BUCKETS; i++) {
		for (kvd_member_entry_t *closed = host->members[i]; closed;) {
			kvd_member_entry_t *next = closed->next;

			if (same_attachment(closed, by)) {
				absorb_connection(host, closed, by);
			}
			closed = next;
		}
	}
}

void kvd_member_entry_set_drained(kvd_host_t *host, kvd_member_entry_t *member, const kv_msg_drained_t *ask)
{
	if (ask->what == 2) {
		member->drained = 1;
		kvd_writers_note_quiet(host, member);
	} else if (ask->what == 3) {
		kvd_slabs_note_unmapped(host, member->id, ask->id);
	} else if (ask->what == 4) {
		/* Its last word, although a forked child may hold the socket open. */
		member->left = 1;
		kvd_session_doom(host, member->session);
	}
}

void kvd_member_entry_close(kvd_host_t *host, kvd_member_entry_t *member)
{
	kvd_reports_drain_member(host, member);
	kvd_member_log(host, member,
		       member->left    ? "a member has detached"
		       : member->fired ? "a member's process has ended"
				       : "a member's connection has ended");
	member->session = NULL;
	if (member->fired || member->left) {
		member_gone(host, member);
	} else {
		kvd_member_closed(host->core, member->id);
		kvd_commit_events(host);
		absorb_into_newer(host, member);
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
	kvd_poller_change(host, source, 0);
	if (member->session) {
		/* The session reads to the end of the stream and closes the member then. */
		shutdown(member->session->source.fd, SHUT_RDWR);
	} else {
		member_gone(host, member);
	}

	return 0;
}

static void member_free(kvd_member_entry_t *member)
{
	kvd_shm_region_destroy(&member->area);
	close(member->source.fd);
	free(member);
}

static void instance_free(kvd_instance_entry_t *entry)
{
	kvd_shm_region_destroy(&entry->leases);
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

int kvd_members_reap(kvd_host_t *host)
{
	kvd_instance_t ended;
	uint32_t n = kvd_instances_reap(host->core, &ended, 1);

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

void kvd_members_fini(kvd_host_t *host)
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

/* Of a member's area that is touched for it: the report ring, and as much staging as puts mostly use. The rest is its
 * own memory, for its own digests. */
#define OWN_BYTES (KVD_REPORT_OFFSET + KVD_REPORT_RECORDS * sizeof(kv_report_t) + ((size_t)128 << 10))

/* The areas of a new member: its own, and its instance's when that is new. */
static kv_status_t member_area(const kvd_options_t *options, const kv_msg_join_t *ask, kvd_member_entry_t *member)
{
	size_t staging = KVD_REPORT_OFFSET + KVD_REPORT_RECORDS * sizeof(kv_report_t);
	size_t bytes = staging + (size_t)ask->staging_words * sizeof(uint64_t);
	kv_member_area_header_t *header;
	kv_status_t status;

	if ((size_t)ask->staging_words * sizeof(uint64_t) > options->limits_staging) {
		return KV_ERR_LIMIT;
	}
	status = kvd_shm_region_create("kvd-member", bytes, KVD_SHM_REGION_CLIENT, &member->area);
	if (status != KV_OK) {
		return status;
	}
	status = kvd_shm_region_touch(&member->area, bytes < OWN_BYTES ? bytes : OWN_BYTES);
	if (status != KV_OK) {
		kvd_shm_region_destroy(&member->area);
		return status;
	}
	member->staging_offset = staging;
	member->staging_words = ask->staging_words;
	header = member->area.base;
	header->magic = KV_MEMBER_MAGIC;
	header->version = KV_SHM_VERSION;
	header->ring_records = KVD_REPORT_RECORDS;
	header->ring_offset = KVD_REPORT_OFFSET;
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
		*p_entry = kvd_instance_entry_find(host, id);
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
	status = kvd_shm_region_create("kvd-leases", host->options->instance_lease_area, KVD_SHM_REGION_DAEMON,
				       &entry->leases);
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
	kv_status_t status = kvd_keeper_reserve(&host->to_keeper, 1);
	kvd_member_entry_t *member = status == KV_OK ? calloc(1, sizeof *member) : NULL;

	if (status == KV_ERR_BUSY) {
		call->detail = "the keeper takes no descriptors, and as many wait for it as may: is it stopped?";
		return status;
	}
	if (!member) {
		return KV_ERR_NOMEM;
	}
	member->source = (kvd_source_t){.ready = pidfd_ready, .fd = call->fds[0], .flow = &call->session->ns->flow};
	member->area = KVD_SHM_REGION_NONE;
	member->ns = call->session->ns;
	status = member_area(host->options, &call->ask->join, member);
	if (status != KV_OK) {
		goto err_free;
	}
	status = kvd_poller_add(host, &member->source, EPOLLIN);
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
	kvd_poller_remove(host, &member->source);
err_area:
	kvd_shm_region_destroy(&member->area);
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
	const kvd_shm_region_t *mirror = &call->session->ns->mirror;

	kv_metric_add(&host->metrics, KV_M_MATCH_JOINS, !call->session->matching);
	call->session->matching = 1;
	call->reply->join_reply =
		(kv_msg_join_reply_t){.mirror_bytes = mirror->bytes, .peer_name = kv_slice_str(kvd_net_name(host))};
	call->reply_fds[0] = mirror->fd;

	return KV_OK;
}

static kv_status_t may_join(kvd_call_t *call)
{
	if (call->session->member) {
		call->detail = "this connection has joined already";
		return KV_ERR_EXISTS;
	}
	if (!call->session->ns->mirror.touched) {
		call->detail = "the daemon has no memory for the mirror of this namespace now";
		return KV_ERR_NOMEM;
	}

	return KV_OK;
}

kv_status_t kvd_request_join(kvd_host_t *host, kvd_call_t *call)
{
	const kv_msg_join_t *ask = &call->ask->join;
	char instance[129];
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

	status = may_join(call);
	if (status != KV_OK) {
		return status;
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
		call->detail = status == KV_ERR_LIMIT ? LIMIT_DETAIL : call->detail;
		return status;
	}

	call->fds[0] = -1; /* the member's from now on */
	member->session = call->session;
	member->looked_ns = kv_now_ns(host->env);
	member->process = process;
	member->attachment = ask->attachment;
	/* A member names the daemon it was attached to before only when no copy into its memory is left. */
	member->drained = ask->old_incarnation == host->incarnation;
	member->role = join.role;
	member->rank = join.rank;
	member->next = *kvd_member_bucket(host, member->id);
	*kvd_member_bucket(host, member->id) = member;
	member->ns->used.members++;
	kv_ns_metric_set(&host->metrics, member->ns->id, KV_NM_MEMBERS, member->ns->used.members);
	call->session->member = member;
	call->session->roles |= KV_ROLE_MEMBER;
	kvd_member_log(host, member, "a member has attached");
	if (ask->old_incarnation != 0) {
		kvd_writers_note_quiet(host, member);
	}
	kvd_writers_keep(host, member);
	absorb_older(host, member);
	call->reply->join_reply = (kv_msg_join_reply_t){.instance_id = entry->id,
							.member_id = member->id,
							.mirror_bytes = member->ns->mirror.bytes,
							.lease_bytes = entry->leases.bytes,
							.member_bytes = member->area.bytes,
							.peer_name = kv_slice_str(kvd_net_name(host))};
	call->reply_fds[0] = member->ns->mirror.fd;
	call->reply_fds[1] = entry->leases.fd;
	call->reply_fds[2] = member->area.fd;

	return KV_OK;
}
