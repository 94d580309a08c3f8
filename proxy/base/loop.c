/* One epoll for all descriptors of the proxy. */
#include "loop.h"

#include "kv/system.h"

#include <errno.h>
#include <sys/epoll.h>
#include <unistd.h>

#define BATCH 64

kv_status_t kvp_loop_open(kvp_loop_t *loop)
{
	loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);

	return loop->epoll_fd < 0 ? kv_refused(&kv_env_posix, "proxy", "epoll_create1", errno) : KV_OK;
}

void kvp_loop_close(kvp_loop_t *loop)
{
	if (loop->epoll_fd >= 0) {
		close(loop->epoll_fd);
		loop->epoll_fd = -1;
	}
}

kv_status_t kvp_loop_watch(kvp_loop_t *loop, kvp_fd_kind_t kind, int fd, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.u64 = (uint64_t)kind << 32 | (uint32_t)fd};

	if (epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0) {
		return KV_OK;
	}

	return errno == EEXIST && epoll_ctl(loop->epoll_fd, EPOLL_CTL_MOD, fd, &event) == 0 ? KV_OK : KV_ERR_LIMIT;
}

void kvp_loop_forget(kvp_loop_t *loop, int fd)
{
	(void)epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
}

void kvp_loop_wait(kvp_loop_t *loop, int timeout_ms)
{
	struct epoll_event events[BATCH];
	int n = epoll_wait(loop->epoll_fd, events, BATCH, timeout_ms);

	for (int i = 0; i < n; i++) {
		kvp_fd_kind_t kind = (kvp_fd_kind_t)(events[i].data.u64 >> 32);

		loop->handlers[kind].ready(loop->handlers[kind].ctx, (int)(uint32_t)events[i].data.u64,
					   events[i].events);
	}
}
