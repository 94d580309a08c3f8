/* When there are no descriptors for new sessions: accept pauses, and operators have some in reserve (decision 026). */
#include "io/sessions/accepting.h"

#include "io/base/poller.h"

#include "kv/system.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/epoll.h>

#define REST_NS UINT64_C(100000000)

void kvd_accepting_fill_spares(kvd_host_t *host)
{
	int fd = 0;

	while (host->spare_count < KVD_RESERVED_SESSIONS && (fd = fcntl(host->epoll_fd, F_DUPFD_CLOEXEC, 0)) >= 0) {
		host->spares[host->spare_count++] = fd;
	}
}

/* Sessions that are open go on, new ones wait in the kernel's backlog. */
void kvd_accepting_pause(kvd_host_t *host, int error)
{
	char why[KV_REFUSED_TEXT];

	kv_metric_add(&host->metrics, KV_M_FD_EXHAUSTED, 1);
	kv_log(KV_LOG_WARN, "io", "no new sessions for a while: error \"%s\" open %u",
	       kv_refused_text("accept4", error, why, sizeof why), host->session_count);
	for (uint32_t i = 0; i < host->namespace_count; i++) {
		kvd_poller_change(host, &host->namespaces[i].source, 0);
	}
	host->accept_paused = error;
	host->accept_again_ns = kv_now_ns(host->env) + REST_NS;
}

void kvd_accepting_resume(kvd_host_t *host)
{
	kvd_accepting_fill_spares(host);
	if (!host->accept_paused) {
		return;
	}
	host->accept_paused = 0;
	for (uint32_t i = 0; i < host->namespace_count; i++) {
		kvd_poller_change(host, &host->namespaces[i].source, EPOLLIN);
	}
}
