/* kvd-pd-proxy: the composition root. Everything runs on this thread, except for those of prefix.c and libzmq. */
#include "server.h"

#include "kv/system.h"
#include "kv/env.h"
#include "kv/log.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#define NS_IN_MS UINT64_C(1000000)
#define TICK_NS  (5 * NS_IN_MS)
#define IDLE_MS  100
#define DRAIN_NS (30000 * NS_IN_MS) /* what runs may end, after a SIGTERM */

typedef struct proxy {
	kvp_options_t options;
	kvp_metrics_t metrics;
	kvp_loop_t loop;
	kvp_calls_t calls;
	kvp_fleet_t fleet;
	kvp_requests_t requests;
	kvp_server_t *server;
	int signal_fd, signals;
	int has_events; /* that were not taken yet */
} proxy_t;

static void signal_came(void *ctx, int fd, uint32_t events)
{
	proxy_t *proxy = ctx;
	struct signalfd_siginfo info;

	(void)events;
	proxy->signals += read(fd, &info, sizeof info) == (ssize_t)sizeof info;
}

static kv_status_t watch_signals(proxy_t *proxy)
{
	sigset_t set;

	signal(SIGPIPE, SIG_IGN);
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigprocmask(SIG_BLOCK, &set, NULL);
	proxy->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	proxy->loop.handlers[KVP_FD_SIGNAL].ready = signal_came;
	proxy->loop.handlers[KVP_FD_SIGNAL].ctx = proxy;

	return proxy->signal_fd < 0 ? kv_refused(&kv_env_posix, "proxy", "signalfd", errno)
				    : kvp_loop_watch(&proxy->loop, KVP_FD_SIGNAL, proxy->signal_fd, EPOLLIN);
}

static kv_status_t open_all(proxy_t *proxy, char *detail, size_t cap)
{
	kvp_requests_t *requests = &proxy->requests;
	kv_status_t status = kvp_loop_open(&proxy->loop);

	if (status == KV_OK) {
		status = watch_signals(proxy);
	}
	if (status == KV_OK) {
		status = kvp_calls_open(&proxy->calls, &proxy->loop,
					2u * (uint32_t)proxy->options.limits_requests + 2u * KVP_ENGINES_MAX);
	}
	proxy->calls.metrics = &proxy->metrics;
	proxy->calls.kept_most = proxy->options.limits_answers;
	if (status == KV_OK) {
		status = kvp_fleet_init(&proxy->fleet, &proxy->options, &proxy->calls);
	}
	requests->options = &proxy->options;
	requests->metrics = &proxy->metrics;
	requests->calls = &proxy->calls;
	requests->fleet = &proxy->fleet;
	TAILQ_INIT(&requests->live);
	TAILQ_INIT(&requests->queue);
	if (status == KV_OK && proxy->options.kvd_socket[0]) {
		status = kvp_prefix_open(proxy->options.kvd_socket, &requests->prefix);
	}
	if (status == KV_OK) {
		status = kvp_server_open(requests, &proxy->loop, &proxy->server, detail, cap);
	}

	return status;
}

/* Mirror of open_all(), for as much as there is. */
static void close_all(proxy_t *proxy)
{
	kvp_server_close(proxy->server);
	kvp_prefix_close(proxy->requests.prefix);
	kvp_fleet_fini(&proxy->fleet);
	kvp_calls_close(&proxy->calls);
	if (proxy->signal_fd >= 0) {
		close(proxy->signal_fd);
	}
	kvp_loop_close(&proxy->loop);
}

static int timeout_ms(proxy_t *proxy, uint64_t now_ns)
{
	int most = proxy->requests.live_n > 0 ? (int)(TICK_NS / NS_IN_MS) : IDLE_MS;

	if (!TAILQ_EMPTY(&proxy->calls.changed) || proxy->calls.due_ns <= now_ns || proxy->has_events) {
		return 0;
	}
	if (proxy->calls.due_ns < now_ns + (uint64_t)most * NS_IN_MS) {
		most = (int)((proxy->calls.due_ns - now_ns) / NS_IN_MS) + 1;
	}

	return kvp_server_timeout_ms(proxy->server, most);
}

static void run(proxy_t *proxy)
{
	uint64_t now_ns = kv_now_ns(&kv_env_posix), tick_ns = 0, stop_ns = UINT64_MAX;
	int seen = 0;

	while (proxy->signals < 2 && now_ns < stop_ns && (proxy->signals == 0 || proxy->requests.live_n > 0)) {
		kvp_loop_wait(&proxy->loop, timeout_ms(proxy, now_ns));
		now_ns = kv_now_ns(&kv_env_posix);
		kvp_calls_dispatch(&proxy->calls, now_ns);
		if (now_ns >= tick_ns) {
			tick_ns = now_ns + TICK_NS;
			kvp_requests_tick(&proxy->requests, now_ns);
			kvp_fleet_tick(&proxy->fleet, now_ns);
		}
		proxy->has_events = kvp_fleet_serve(&proxy->fleet, now_ns);
		kvp_requests_serve(&proxy->requests);
		kvp_server_run(proxy->server, now_ns);
		if (proxy->signals > seen) {
			seen = proxy->signals;
			stop_ns = now_ns + DRAIN_NS;
			kvp_server_quiesce(proxy->server);
			kv_log(KV_LOG_INFO, "main", "stopping: %" PRIu32 " requests run", proxy->requests.live_n);
		}
	}
}

static int serve(proxy_t *proxy)
{
	char detail[512] = "";
	kv_status_t status;

	kv_rlimit_raise_files();
	if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) {
		kv_log(KV_LOG_ERROR, "main", "libcurl cannot be used");
		return kv_status_exit_code(KV_ERR_INTERNAL);
	}
	status = open_all(proxy, detail, sizeof detail);
	if (status == KV_OK) {
		kv_log(KV_LOG_INFO, "main", "ready: version %s listen %s prefill %s decode %s", KVD_VERSION,
		       proxy->options.http_listen, proxy->options.prefill[0] ? proxy->options.prefill : "none",
		       proxy->options.decode);
		run(proxy);
	} else {
		kv_log(KV_LOG_ERROR, "main", "%s", detail[0] ? detail : kv_status_text(status));
	}
	close_all(proxy);
	curl_global_cleanup();

	return status == KV_OK ? 0 : kv_status_exit_code(status);
}

int main(int argc, char **argv)
{
	static proxy_t proxy = {.signal_fd = -1, .loop = {.epoll_fd = -1}};
	kv_option_error_t error = {0};
	kvp_action_t action;
	kv_status_t status = kvp_options_read(argc, argv, &proxy.options, &action, &error);

	if (status != KV_OK) {
		fprintf(stderr, "kvd-pd-proxy: %s%s%s\n", error.file, error.file[0] ? ": " : "", error.text);
		return kv_status_exit_code(status);
	}
	if (action != KVP_RUN) {
		return fflush(stdout) == 0 ? 0 : kv_status_exit_code(KV_ERR_IO);
	}
	kv_log_set_level((kv_log_level_t)proxy.options.log_level);
	status = kv_random_check(&kv_env_posix); /* for names of hand-overs that nobody can guess */
	if (status != KV_OK) {
		return kv_status_exit_code(status);
	}

	return serve(&proxy);
}
