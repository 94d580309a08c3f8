/* Who has joined. */
#include "io/members/member_table.h"

#include "io/members/member.h"
#include "io/base/session.h"

#include "kv/json.h"

#define LOG_NS    UINT64_C(100000000) /* a namespace may have one more line about its members in this time */
#define LOG_BURST 64u                 /* and this many at once */

kvd_member_entry_t *kvd_member_entry_find(kvd_host_t *host, kvd_member_t id)
{
	kvd_member_entry_t *member = *kvd_member_bucket(host, id);

	while (member && member->id != id) {
		member = member->next;
	}

	return member;
}

kvd_member_t kvd_member_entry_id(const kvd_member_entry_t *member)
{
	return member ? member->id : 0;
}

kvd_session_t *kvd_member_entry_session(const kvd_member_entry_t *member)
{
	return member ? member->session : NULL;
}

kvd_instance_entry_t *kvd_instance_entry_find(kvd_host_t *host, kvd_instance_t id)
{
	kvd_instance_entry_t *entry = host->instances;

	while (entry && entry->id != id) {
		entry = entry->next;
	}

	return entry;
}

uint32_t kvd_members_count_attached(const kvd_host_t *host)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < KVD_MEMBER_BUCKETS; i++) {
		for (const kvd_member_entry_t *member = host->members[i]; member; member = member->next) {
			n += member->session != NULL;
		}
	}

	return n;
}

uint32_t kvd_members_list(const kvd_host_t *host, const char *ns, kvd_mapper_t *out, uint32_t cap)
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

uint32_t kvd_members_count_fds(const kvd_host_t *host)
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
	if (ns->members_unlogged > 0) {
		kv_log(KV_LOG_INFO, "io", "lines about members were left out: namespace %s lines %llu", ns->name,
		       (unsigned long long)ns->members_unlogged);
		ns->members_unlogged = 0;
	}

	return 1;
}

/* `what` has happened to a member that has a session. */
void kvd_member_log(kvd_host_t *host, const kvd_member_entry_t *member, const char *what)
{
	static const char *const roles[] = {"scheduler", "worker", "both"};
	const kvd_instance_entry_t *instance = kvd_instance_entry_find(host, member->instance);

	if (!may_log(host, member->ns)) {
		return;
	}
	kv_log(KV_LOG_INFO, "io", "%s: namespace %s instance %s member %llu role %s rank %u program %s pid %d", what,
	       member->ns->name, instance ? instance->name : "?", (unsigned long long)member->id, roles[member->role],
	       member->rank, member->session->program, (int)member->session->pid);
}

void kvd_member_entry_set_space(kvd_host_t *host, kvd_member_entry_t *member, uint32_t space, const char *model)
{
	member->space = space;
	if (may_log(host, member->ns)) {
		kv_log(KV_LOG_INFO, "io", "a space is open: namespace %s space %u model \"%.128s\" member %llu",
		       member->ns->name, space, model, (unsigned long long)member->id);
	}
}

void kvd_member_entry_describe(void *ctx, kvd_member_t id, struct kv_json *json)
{
	const kvd_member_entry_t *member = kvd_member_entry_find(ctx, id);

	if (member && member->session) {
		kv_json_text(json, "program", member->session->program);
		kv_json_u64(json, "pid", (uint64_t)member->session->pid);
		kv_json_u64(json, "space", member->space);
	}
}
