/* Who may still write into memory that an earlier daemon lent. */
#include "io/members/writers.h"

#include "base/held.h"
#include "io/members/member.h"
#include "io/base/poller.h"
#include "base/keeper_socket.h"

#include "kvs/pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

typedef struct kvd_writer {
	kvd_source_t source; /* its pidfd */
	struct kvd_writer *next;
	uint64_t process, attachment;
	int quiet;
	char name[KVD_KEEPER_NAME];
} writer_t;

/* The ledgers say at once what the keeper has not heard: this daemon may die at any time. */
static void mark_ledgers(kvd_host_t *host)
{
	for (uint32_t m = 1; m < host->pool_count; m++) {
		kvs_pool_set_unknown_writers(host->pool[m], host->to_keeper.writers);
	}
}

/* Who the member is. */
static void format_name(char out[KVD_KEEPER_NAME], const kvd_host_t *host, const kvd_member_entry_t *member)
{
	snprintf(out, KVD_KEEPER_NAME, KVD_KEEPER_WRITER "%llx.%llx.%llx.%llx", (unsigned long long)host->incarnation,
		 (unsigned long long)member->id, (unsigned long long)member->process,
		 (unsigned long long)member->attachment);
}

void kvd_writers_keep(kvd_host_t *host, const kvd_member_entry_t *member)
{
	char name[KVD_KEEPER_NAME];

	format_name(name, host, member);
	kvd_keeper_keep(&host->to_keeper, name, member->source.fd);
	mark_ledgers(host);
}

void kvd_writers_drop(kvd_host_t *host, const kvd_member_entry_t *member)
{
	char name[KVD_KEEPER_NAME];

	format_name(name, host, member);
	kvd_keeper_drop(&host->to_keeper, name);
}

/* Its process has ended. */
static int pidfd_ready(kvd_host_t *host, kvd_source_t *source, uint32_t events)
{
	(void)events;
	kvd_poller_change(host, source, 0);
	((writer_t *)source)->quiet = 1;

	return 0;
}

/* 0: it is none of format_name(). */
static int parse_name(const char *name, uint64_t *p_process, uint64_t *p_attachment)
{
	static const char start[] = KVD_KEEPER_WRITER;
	const char *at = name + sizeof start - 1;
	uint64_t fields[4];

	if (strncmp(name, start, sizeof start - 1) != 0) {
		return 0;
	}
	for (uint32_t i = 0; i < 4; i++) {
		char *end;

		fields[i] = strtoull(at, &end, 16);
		if (end == at || *end != (i < 3 ? '.' : '\0')) {
			return 0;
		}
		at = end + 1;
	}
	*p_process = fields[2];
	*p_attachment = fields[3];

	return 1;
}

static kv_status_t add_writer(kvd_host_t *host, const char *name)
{
	uint64_t process, attachment;
	writer_t *writer;

	if (!parse_name(name, &process, &attachment)) {
		return KV_OK;
	}
	writer = calloc(1, sizeof *writer);
	if (!writer) {
		return KV_ERR_NOMEM;
	}
	*writer = (writer_t){.source = {.ready = pidfd_ready, .fd = kvd_held_claim(host->held, name)},
			     .next = host->writers,
			     .process = process,
			     .attachment = attachment};
	snprintf(writer->name, sizeof writer->name, "%s", name);
	host->writers = writer;
	kv_metric_add(&host->metrics, KV_M_ADOPT_WRITERS, 1);

	return writer->source.fd >= 0 ? kvd_poller_add(host, &writer->source, EPOLLIN) : KV_OK;
}

kv_status_t kvd_writers_open(kvd_host_t *host)
{
	const char *name;
	kv_status_t status = KV_OK;

	if (host->pool_count == 1) {
		return KV_OK; /* no memory was taken over */
	}
	for (uint32_t i = 0; status == KV_OK && (name = kvd_held_name(host->held, i)) != NULL; i++) {
		status = add_writer(host, name);
	}
	host->writers_wait = 1;

	return status;
}

void kvd_writers_note_quiet(kvd_host_t *host, const kvd_member_entry_t *member)
{
	for (writer_t *writer = host->writers; writer; writer = writer->next) {
		if (member->process != 0 && member->attachment != 0 && writer->process == member->process &&
		    writer->attachment == member->attachment) {
			writer->quiet = 1;
		}
	}
}

static void free_writer(kvd_host_t *host, writer_t *writer)
{
	if (writer->source.fd >= 0) {
		kvd_poller_remove(host, &writer->source);
		close(writer->source.fd);
	}
	free(writer);
}

void kvd_writers_step(kvd_host_t *host)
{
	writer_t **link = &host->writers;
	uint64_t freed = 0, unknown = 0;

	mark_ledgers(host);
	if (!host->writers_wait) {
		return;
	}
	while (*link) {
		writer_t *writer = *link;

		if (!writer->quiet) {
			link = &writer->next;
			continue;
		}
		*link = writer->next;
		kvd_keeper_drop(&host->to_keeper, writer->name);
		kv_metric_add(&host->metrics, KV_M_ADOPT_WRITERS, (uint64_t)-1);
		free_writer(host, writer);
	}
	if (host->writers) {
		return;
	}
	for (uint32_t m = 1; m < host->pool_count; m++) {
		freed += kvs_pool_free_before(host->pool[m]);
		unknown += kvs_pool_unknown_before(host->pool[m]);
	}
	kv_log(unknown ? KV_LOG_WARN : KV_LOG_INFO, "io", "no writer of the daemon before is left%s: slots freed %llu",
	       unknown ? " that the keeper knew; others may be, and their slots stay in quarantine" : "",
	       (unsigned long long)freed);
	host->writers_wait = 0;
}

void kvd_writers_close(kvd_host_t *host)
{
	while (host->writers) {
		writer_t *writer = host->writers;

		host->writers = writer->next;
		free_writer(host, writer);
	}
}

uint32_t kvd_writers_count_fds(const kvd_host_t *host)
{
	uint32_t n = 0;

	for (const writer_t *writer = host->writers; writer; writer = writer->next) {
		n++;
	}

	return n;
}
