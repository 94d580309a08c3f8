/* One listening socket a namespace. */
#include "io/sessions/listener.h"

#include "io/members/mirror.h"
#include "io/base/poller.h"
#include "io/sessions/accepting.h"
#include "io/sessions/receive.h"

#include "kv/system.h"
#include "kvs/pool.h"
#include "base/process.h"
#include "options/sockets.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define BACKLOG         256
#define SPARED_IN_A_ROW 16   /* connections looked at for an operator's, when there are no descriptors */
#define OWN_FDS         128u /* of the daemon itself, and ... */
#define OWN_FDS_OF_ONE  8u   /* ... of a namespace: its socket, its mirror, its endpoints */

/* ---- without descriptors --------------------------------------------------------------------- */

/* Who comes first in the queue is known when he has a descriptor: an operator keeps it, others are refused, so that
 * they do not hold the queue. 0: none is to spare, or nobody waits. */
static int accept_with_spare(kvd_host_t *host, kvd_namespace_t *ns)
{
	int fd;

	if (host->spare_count == 0) {
		return 0;
	}
	close(host->spares[--host->spare_count]);
	fd = accept4(ns->source.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (fd >= 0 && kvd_peer_is_operator(fd)) {
		kvd_session_open(host, ns, fd);
		return 1;
	}
	if (fd >= 0) {
		kv_metric_add(&host->metrics, KV_M_SESSIONS_REFUSED, 1);
		kv_ns_metric_add(&host->metrics, ns->id, KV_NM_SESSIONS_REFUSED, 1);
		close(fd);
	}
	kvd_accepting_fill_spares(host);

	return fd >= 0;
}

/* One connection. */
static int listener_ready(kvd_host_t *host, kvd_source_t *source, uint32_t events)
{
	kvd_namespace_t *ns = (kvd_namespace_t *)source;
	int fd, lack;

	(void)events;
	if (host->accept_paused) {
		return 0;
	}
	if (source->silent) {
		kvd_poller_change(host, source, EPOLLIN);
	}
	fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (fd >= 0) {
		kvd_session_open(host, ns, fd);
		return 1;
	}
	lack = errno;
	if (lack == EAGAIN || lack == EINTR || lack == ECONNABORTED) {
		return lack != EAGAIN;
	}
	for (int i = 0; kv_refused_status(lack) != KV_ERR_REFUSED && i < SPARED_IN_A_ROW && accept_with_spare(host, ns);
	     i++) {
	}
	kvd_accepting_pause(host, lack);

	return 0;
}

static kv_status_t namespace_open(kvd_host_t *host, kvd_namespace_t *ns, const char *word, size_t len)
{
	kv_status_t status;

	memcpy(ns->name, word, len);
	ns->trusted = kvd_list_has(host->options->members_trusted, ns->name);
	if ((size_t)snprintf(ns->path, sizeof ns->path, "%s/%s.sock", host->options->run_dir, ns->name) >=
	    sizeof ns->path) {
		return KV_ERR_PATH;
	}
	status = (host->options->cpu_huge_pages == KVS_HUGE_OFF ? kvd_shm_region_create : kvd_shm_region_create_huge)(
		"kvd-mirror", kvd_mirror_bytes(&host->core_config), KVD_SHM_REGION_DAEMON, &ns->mirror);
	if (status == KV_OK) {
		status = kvd_namespace_add(host->core, ns->name, ns->mirror.base, &ns->id);
	}
	if (status == KV_OK) {
		kvd_parts_t parts = {0};

		kvd_shares_given(host->options, ns->name, parts.given, parts.max);
		status = kvd_namespace_share(host->core, ns->id, &parts);
	}

	return status;
}

static uint32_t part_of(uint64_t total, double fit, uint32_t namespaces)
{
	uint64_t part = (uint64_t)((double)total * fit) / namespaces;

	return part > 0 ? (uint32_t)part : 1;
}

/* Equal parts of the limits; less where the process may not have the descriptors that they promise, so that no
 * namespace uses up another's. */
static void set_parts(kvd_host_t *host)
{
	const kvd_options_t *options = host->options;
	uint64_t own = OWN_FDS + KVD_RESERVED_SESSIONS + OWN_FDS_OF_ONE * host->namespace_count +
		       2 * (options->cpu_size / options->cpu_slab_size + 1) + options->http_connections +
		       (options->events_enabled ? 2 * options->events_subscribers * host->namespace_count : 0) +
		       (options->nvme_path[0] ? options->nvme_size / options->nvme_file_size + 1 : 0);
	uint64_t need = options->limits_sessions * (1 + KV_WIRE_MAX_FDS) + 2 * options->limits_members +
			options->limits_instances;
	uint64_t want = own + need;
	double fit = 1;
	struct rlimit files;

	if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < want) {
		fit = files.rlim_cur > own ? (double)(files.rlim_cur - own) / (double)need : 0;
		host->lacks_files = files.rlim_cur <= own;
		snprintf(host->few_files, sizeof host->few_files,
			 "the limit of descriptors (%llu) is too low for %slimits.sessions, members and instances: "
			 "%.0f %% of them are in force; raise it to %llu (ulimit -n, LimitNOFILE)",
			 (unsigned long long)files.rlim_cur,
			 host->lacks_files ? "the slabs of cpu.size, connections and files, and for " : "", 100 * fit,
			 (unsigned long long)want);
		kv_log(KV_LOG_WARN, "io", "%s", host->few_files);
	}
	host->part = (kvd_part_t){.sessions = part_of(options->limits_sessions, fit, host->namespace_count),
				  .members = part_of(options->limits_members, fit, host->namespace_count),
				  .instances = part_of(options->limits_instances, fit, host->namespace_count),
				  .receive = options->limits_receive / host->namespace_count};
}

static kv_status_t open_listener(kvd_host_t *host, kvd_namespace_t *ns, char *detail, size_t cap)
{
	const kvd_access_t access = kvd_sockets_access(host->options, ns->name);
	/* Nobody of the daemon's own group gets in before the socket has its group. */
	const unsigned mode = access.group == (gid_t)-1 ? access.mode : 0600;
	char why[KV_REFUSED_TEXT];
	kv_sock_error_t error = {0};
	kv_status_t status = kv_sock_listen(ns->path, mode, BACKLOG, &ns->source.fd, &error);

	if (status == KV_OK) {
		error.error = kvd_sockets_give(ns->path, &access);
		if (error.error != 0) {
			unlink(ns->path);
			close(ns->source.fd);
			status = KV_ERR_PATH;
		}
	}
	if (status != KV_OK) {
		ns->source.fd = -1;
		snprintf(detail, cap, "cannot listen on %s: %s", ns->path,
			 kv_sock_error_text(status, &error, why, sizeof why));
		return status;
	}
	ns->file = kv_sock_file(ns->path);
	(void)kv_sock_ask_sender(ns->source.fd); /* for what is sent before we accept */
	ns->source.ready = listener_ready;
	ns->source.flow = &ns->flow;

	return kvd_poller_add(host, &ns->source, EPOLLIN);
}

static kv_status_t open_listeners(kvd_host_t *host, char *detail, size_t cap)
{
	kv_status_t status = KV_OK;

	for (uint32_t i = 0; i < host->namespace_count && status == KV_OK; i++) {
		status = open_listener(host, &host->namespaces[i], detail, cap);
	}

	return status;
}

/* ---- what was removed ------------------------------------------------------------------------ */

static void close_listener(kvd_host_t *host, kvd_namespace_t *ns)
{
	if (ns->source.fd < 0) {
		return;
	}
	if (kv_sock_is_at(ns->path, ns->file)) {
		unlink(ns->path);
	}
	kvd_fair_remove(&ns->source);
	kvd_poller_remove(host, &ns->source);
	close(ns->source.fd);
	ns->source.fd = -1;
}

static kv_status_t restore_listener(kvd_host_t *host, kvd_namespace_t *ns, char *detail, size_t cap)
{
	kv_status_t status;

	if (ns->file.ino == 0 || (ns->source.fd >= 0 && kv_sock_is_at(ns->path, ns->file))) {
		return KV_OK;
	}
	close_listener(host, ns);
	status = open_listener(host, ns, detail, cap);
	if (status == KV_OK) {
		kv_log(KV_LOG_WARN, "io", "a socket that was removed is back: path %s", ns->path);
	}

	return status;
}

void kvd_listeners_restore(kvd_host_t *host)
{
	char detail[512] = "";
	kv_status_t status = kvd_process_relock(host->options->run_dir, host->setup->lock_fd, detail, sizeof detail);

	if (status == KV_OK) {
		kv_log(KV_LOG_WARN, "io", "the lock of run_dir was removed and is back: path %s",
		       host->options->run_dir);
	}
	status = status == KV_MISS ? KV_OK : status;
	for (uint32_t i = 0; i < host->namespace_count && status == KV_OK; i++) {
		status = restore_listener(host, &host->namespaces[i], detail, sizeof detail);
	}
	if (status != KV_OK && !host->unreachable) {
		kv_log(KV_LOG_ERROR, "io", "sockets were removed, engines cannot attach, trying again every second: %s",
		       detail);
	}
	host->unreachable = status != KV_OK;
}

kv_status_t kvd_listeners_open(kvd_host_t *host, char *detail, size_t cap)
{
	const char *list = host->options->namespaces, *word;
	uint32_t count = 0;
	kv_status_t status = KV_OK;
	size_t len;

	while (kvd_list_word(list, count, &word) > 0) {
		count++;
	}
	kv_assert(count > 0); /* checked with the options */
	host->namespaces = calloc(count, sizeof *host->namespaces);
	if (!host->namespaces) {
		return KV_ERR_NOMEM;
	}
	host->namespace_count = count;
	set_parts(host);
	for (uint32_t i = 0; i < count; i++) {
		host->namespaces[i].mirror = KVD_SHM_REGION_NONE;
		host->namespaces[i].source.fd = -1;
		host->namespaces[i].index = i;
	}
	for (uint32_t i = 0; i < count && status == KV_OK; i++) {
		len = kvd_list_word(list, i, &word);
		status = namespace_open(host, &host->namespaces[i], word, len);
	}
	if (status == KV_OK) {
		status = kvd_core_recover(host->core);
	}
	if (status != KV_OK) {
		snprintf(detail, cap, "cannot set up the namespaces: %s", kv_status_text(status));
		return status;
	}

	kvd_accepting_fill_spares(host);

	return open_listeners(host, detail, cap);
}

void kvd_listeners_close(kvd_host_t *host)
{
	while (host->spare_count > 0) {
		close(host->spares[--host->spare_count]);
	}
	for (uint32_t i = 0; i < host->namespace_count; i++) {
		close_listener(host, &host->namespaces[i]);
	}
}

void kvd_namespaces_free(kvd_host_t *host)
{
	for (uint32_t i = 0; i < host->namespace_count; i++) {
		kvd_mirror_close(&host->namespaces[i]);
		kvd_shm_region_destroy(&host->namespaces[i].mirror);
	}
	free(host->namespaces);
	host->namespaces = NULL;
	host->namespace_count = 0;
}
