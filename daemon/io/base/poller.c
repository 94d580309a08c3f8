/* What the loop watches. */
#include "io/base/poller.h"

#include "kv/system.h"

#include <errno.h>
#include <sys/epoll.h>

/* after the last request nobody is busy */

kv_status_t kvd_poller_add(kvd_host_t *host, kvd_source_t *source, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.ptr = source};

	if (epoll_ctl(host->epoll_fd, EPOLL_CTL_ADD, source->fd, &event) != 0) {
		return kv_refused(&kv_env_posix, "io", "epoll_ctl", errno);
	}

	return KV_OK;
}

void kvd_poller_change(kvd_host_t *host, kvd_source_t *source, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.ptr = source};

	source->silent = 0;
	if (epoll_ctl(host->epoll_fd, EPOLL_CTL_MOD, source->fd, &event) != 0) {
		kv_log(KV_LOG_ERROR, "io", "cannot change how a descriptor is watched: error \"%s\"", strerror(errno));
	}
}

void kvd_poller_remove(kvd_host_t *host, kvd_source_t *source)
{
	(void)epoll_ctl(host->epoll_fd, EPOLL_CTL_DEL, source->fd, NULL);
}

/* The core looks after its tiers in every turn; this only ends the sleep. */
static int tier_ready(kvd_host_t *host, kvd_source_t *source, uint32_t events)
{
	(void)host;
	(void)source;
	(void)events;

	return 0;
}

kv_status_t kvd_poller_watch_tier(kvd_host_t *host, kvd_source_t *source, kvs_tier_t *tier)
{
	*source = (kvd_source_t){.ready = tier_ready, .fd = tier ? kvs_event_fd(tier) : -1};

	return source->fd >= 0 ? kvd_poller_add(host, source, EPOLLIN) : KV_OK;
}
