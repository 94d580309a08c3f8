/* The core loop: one thread, epoll, iterations. */
#include "io/loop.h"

#include "io/base/gpu.h"
#include "io/sessions/join.h"
#include "io/members/reports.h"
#include "io/members/slabs.h"
#include "io/members/writers.h"
#include "io/sessions/net.h"
#include "io/base/poller.h"
#include "io/sessions/accepting.h"
#include "io/sessions/listener.h"
#include "io/sessions/receive.h"

#include "kv/system.h"
#include "kvs/pool.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EVENTS       256
#define SERVE_NS     UINT64_C(20000) /* of requests, and then the core has its tick */
#define SPIN_LOOKS   4u              /* direct looks at the hot session for one at everybody */
#define DRAIN_NS     UINT64_C(10000000)
#define SECOND_NS    UINT64_C(1000000000)
#define HEARTBEAT_NS KV_MIRROR_HEARTBEAT_NS /* never sleep longer, */
#define HURRIED_NS   (HEARTBEAT_NS / 2)     /* nor longer than this on a machine so busy */
#define LATE_NS      UINT64_C(3000000)      /* that a sleep has lately ended this much too late */
#define STALL_NS     UINT64_C(20000000)
#define PARKED_NS    UINT64_C(500000) /* sessions wait for memory that is being touched */
#define BRIEF_NS     UINT64_C(30000)
#define LONG_GAP_NS  UINT64_C(20000000)
#define QUIET_NS     UINT64_C(200000000)

/* ---- sources of the loop itself -------------------------------------------------------------- */

/* SIGHUP has the precedence of the start: file, environment, command line. It is taken whole or not at all. */
static void reload_config(kvd_host_t *host)
{
	kvd_setup_t fresh;
	kv_option_error_t error;
	const char *differs = host->setup->differs;

	if (kvd_setup_reread(host->setup, &fresh, &error) != KV_OK) {
		kv_metric_add(&host->metrics, KV_M_CONFIG_REFUSED, 1);
		kv_log(KV_LOG_WARN, "io", "the configuration is not valid and nothing has changed: %s", differs);
	} else {
		kvd_setup_adopt(host->setup, &fresh);
		kv_log_set_level((kv_log_level_t)host->options->log_level);
		kvd_net_reload(host);
		if (fresh.config_fd >= 0) {
			kvd_keeper_config(&host->to_keeper, fresh.config_fd);
		}
		kv_log(KV_LOG_INFO, "io", "SIGHUP: log.level is %s%s%s",
		       kv_log_level_name((kv_log_level_t)host->options->log_level), differs[0] ? "; " : "", differs);
	}
	kv_metric_set(&host->metrics, KV_M_CONFIG_DIFFERS, differs[0] != '\0');
}

static int signal_ready(kvd_host_t *host, kvd_source_t *source, uint32_t events)
{
	struct signalfd_siginfo info;

	(void)events;
	while (read(source->fd, &info, sizeof info) == (ssize_t)sizeof info) {
		if (info.ssi_signo == SIGHUP) {
			reload_config(host);
		} else if (info.ssi_signo == SIGUSR2) {
			kv_log(KV_LOG_WARN, "io", "SIGUSR2 is for the keeper: %s",
			       host->keeper.fd < 0 ? "there is none, and so no upgrade in place" : "the main process");
		} else {
			kv_log(KV_LOG_INFO, "io", "stopping: signal %u", info.ssi_signo);
			host->stop = 1;
		}
	}

	return 0;
}

static int keeper_ready(kvd_host_t *host, kvd_source_t *source, uint32_t events)
{
	char byte;
	const ssize_t n = recv(source->fd, &byte, 1, MSG_DONTWAIT);

	(void)events;
	if (n >= 0) {
		kv_log(n > 0 ? KV_LOG_INFO : KV_LOG_WARN, "io", "stopping: %s",
		       n > 0 ? "another program goes on" : "the keeper has gone");
		host->stop = 1;
		host->upgrade = n > 0;
		kvd_poller_remove(host, source);
	}

	return 0;
}

kv_status_t kvd_loop_init(kvd_host_t *host)
{
	sigset_t set;
	kv_status_t status;

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	sigaddset(&set, SIGUSR2);
	sigprocmask(SIG_BLOCK, &set, NULL);
	host->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (host->epoll_fd < 0) {
		return kv_refused(host->env, "io", "epoll_create1", errno);
	}
	host->signals = (kvd_source_t){.ready = signal_ready, .fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK)};
	if (host->signals.fd < 0) {
		return kv_refused(host->env, "io", "signalfd", errno);
	}
	status = kvd_poller_add(host, &host->signals, EPOLLIN);
	host->keeper = (kvd_source_t){.ready = keeper_ready, .fd = host->setup->keeper_fd};
	if (status == KV_OK && host->keeper.fd >= 0) {
		status = kvd_poller_add(host, &host->keeper, EPOLLIN);
	}
	if (status == KV_OK) {
		status = kvd_poller_watch_tier(host, &host->cpu_ready, host->cpu);
	}
	if (status == KV_OK) {
		status = kvd_poller_watch_tier(host, &host->disk_ready, host->disk);
	}

	return status;
}

void kvd_loop_fini(kvd_host_t *host)
{
	if (host->signals.fd >= 0) {
		close(host->signals.fd);
	}
	if (host->epoll_fd >= 0) {
		close(host->epoll_fd);
	}
}

/* ---- an iteration ---------------------------------------------------------------------------- */

static int sleep_for(kvd_host_t *host, struct epoll_event *events, uint64_t ns)
{
	struct timespec wait = {(time_t)(ns / SECOND_NS), (long)(ns % SECOND_NS)};
	int n = epoll_pwait2(host->epoll_fd, events, EVENTS, &wait, NULL);

	if (n < 0 && errno != EINTR) { /* ENOSYS, or a filter that is older than the call: EPERM */
		n = epoll_wait(host->epoll_fd, events, EVENTS, (int)((ns + 999999u) / 1000000u));
	}

	return n < 0 ? 0 : n;
}

/* Somebody who has just asked will probably ask again: look before sleeping. Returns events, or 0 with host->frames >
 * 0, or 0: time is over. */
static int spin_for_request(kvd_host_t *host, struct epoll_event *events, uint64_t until_ns)
{
	while ((host->look_ns = kv_now_ns(host->env)) < until_ns) {
		for (uint32_t i = 0; i < SPIN_LOOKS && host->hot; i++) {
			host->hot->source.since_ns = host->look_ns;
			if (kvd_session_read(host, host->hot)) {
				kvd_fair_add(&host->fair, &host->hot->source, 0, host->look_ns);
			}
			if (host->frames > 0 || kvd_fair_has_ready(&host->fair)) {
				return 0;
			}
		}

		int n = epoll_wait(host->epoll_fd, events, EVENTS, 0);
		if (n > 0) {
			return n;
		}
	}

	return 0;
}

static int wait_for_events(kvd_host_t *host, struct epoll_event *events, uint64_t wait_ns)
{
	uint64_t now = kv_now_ns(host->env);

	if (wait_ns == 0) {
		return sleep_for(host, events, 0);
	}
	if (now < host->busy_until_ns) {
		uint64_t until = now + wait_ns < host->busy_until_ns ? now + wait_ns : host->busy_until_ns;
		int n = spin_for_request(host, events, until);

		if (n > 0 || host->frames > 0 || kvd_fair_has_ready(&host->fair)) {
			return n;
		}
		now = kv_now_ns(host->env) - now;
		wait_ns = now < wait_ns ? wait_ns - now : 0;
	}

	return sleep_for(host, events, wait_ns);
}

static void update_second_gauges(kvd_host_t *host, uint64_t now)
{
	kv_metric_set(&host->metrics, KV_M_UPTIME, (now - host->started_ns) / SECOND_NS);
	kv_metric_set(&host->metrics, KV_M_LOG_DROPPED, kv_log_dropped());
}

/* 1: something goes on in the next iteration. */
static int do_housekeeping(kvd_host_t *host)
{
	uint64_t now = kv_now_ns(host->env);
	int more = 0;

	atomic_store_explicit(&host->health.iteration_ns, now, memory_order_relaxed);
	if (now >= host->next_drain_ns) {
		more = host->expire_next ? 0 : kvd_reports_drain(host);
		more = more ? more : kvd_sessions_expire(host, now);
		host->next_drain_ns = more ? now : now + DRAIN_NS;
	}
	if (now >= host->next_second_ns) {
		host->next_second_ns = now + SECOND_NS;
		update_second_gauges(host, now);
		kvd_listeners_restore(host);
	}
	kvd_net_step(host, now);
	kvd_gpu_step(host, now);
	kvd_keeper_flush(&host->to_keeper);
	kvd_writers_step(host);
	if (host->accept_paused && now >= host->accept_again_ns) {
		kvd_accepting_resume(host);
	}

	return kvd_members_reap(host) || more;
}

/* How long to look for the next request: twice the gap that requests have lately had, if that is within the option;
 * else a moment for the request that often follows at once. A daemon nobody asks sleeps. */
static void set_busy(kvd_host_t *host, uint64_t now)
{
	uint64_t gap = now - host->asked_ns, most = host->options->spin;
	uint64_t brief = most < BRIEF_NS ? most : BRIEF_NS;

	most = host->options->sched ? brief : most; /* nobody else runs there meanwhile */
	if (host->hot && !host->hot->runs_beside) {
		most = brief = 0;
	}

	host->asked_ns = now;
	host->gap_ns = (3 * host->gap_ns + (gap < LONG_GAP_NS ? gap : LONG_GAP_NS)) / 4;
	host->busy_until_ns = now + (2 * host->gap_ns <= most && 2 * host->gap_ns > brief ? 2 * host->gap_ns : brief);
}

/* Clients must see a fresh heartbeat: a daemon that is woken late sleeps less long. */
static uint64_t choose_longest_sleep(kvd_host_t *host, uint64_t slept_ns, uint64_t wait_ns, uint64_t now)
{
	if (wait_ns > 0 && slept_ns > wait_ns + LATE_NS) {
		host->hurried_until_ns = now + SECOND_NS;
	}

	return now < host->hurried_until_ns ? HURRIED_NS : HEARTBEAT_NS;
}

/* What is still queued from an earlier iteration would be reported again and again, before what has just come: once
 * more, then not until it is served. */
static void silence_source(kvd_host_t *host, kvd_source_t *source)
{
	kvd_poller_change(host, source, EPOLLIN | EPOLLONESHOT);
	source->silent = 1;
}

/* `since`: when the sockets were looked at before. */
static void take_events(kvd_host_t *host, const struct epoll_event *events, int n, uint64_t since)
{
	for (int i = 0; i < n; i++) {
		kvd_source_t *source = events[i].data.ptr;

		if (!source->flow) {
			(void)source->ready(host, source, events[i].events);
			continue;
		}
		if (source->queued && !source->silent) {
			silence_source(host, source);
		}
		kvd_fair_add(&host->fair, source, events[i].events, since);
	}
}

/* Between two rounds of quanta the sockets are looked at again: who has just asked comes first in the next. */
static void serve_sources(kvd_host_t *host, struct epoll_event *events, uint64_t until_ns)
{
	kvd_fair_serve(&host->fair, host, host->env);
	while (kvd_fair_has_ready(&host->fair)) {
		uint64_t before = host->looked_ns, now = kv_now_ns(host->env);

		if (now >= until_ns) {
			break;
		}
		host->looked_ns = now;
		take_events(host, events, epoll_wait(host->epoll_fd, events, EVENTS, 0), before);
		kvd_fair_serve(&host->fair, host, host->env);
	}
}

uint64_t kvd_loop_iterate(kvd_host_t *host, uint64_t wait_ns)
{
	struct epoll_event events[EVENTS];
	uint64_t slept = kv_now_ns(host->env), before = host->looked_ns, start, next, longest;
	int n, more;

	host->frames = 0;
	host->looked_ns = slept;
	n = wait_for_events(host, events, wait_ns);
	start = host->frames > 0 ? host->look_ns : kv_now_ns(host->env);
	longest = choose_longest_sleep(host, start - slept, wait_ns, start);
	take_events(host, events, n, wait_ns > 0 ? start : before);
	if (host->parked) {
		kvd_sessions_unpark(host);
	}
	serve_sources(host, events, start + SERVE_NS);
	next = kvd_core_tick(host->core);
	kvd_commit_events(host);
	kvs_pool_carve_ahead(host->cpu, start < host->asked_ns + QUIET_NS);
	kvd_slabs_release_retired(host);
	kvd_slabs_announce(host);
	more = do_housekeeping(host);

	uint64_t end = kv_now_ns(host->env);
	if (host->frames > 0) {
		set_busy(host, end);
	}
	kv_metric_add(&host->metrics, KV_M_LOOP_ITERATIONS, 1);
	if (end - start > STALL_NS) {
		kv_metric_add(&host->metrics, KV_M_LOOP_STALLS, 1);
	}
	if (more || kvd_fair_has_ready(&host->fair)) {
		return 0;
	}

	longest = host->parked ? PARKED_NS : longest;

	return next < longest ? next : longest;
}

/* Threads and processes made later are of the normal class. */
static void take_realtime(void)
{
	const struct sched_param param = {.sched_priority = 1};

	if (sched_setscheduler(0, SCHED_RR | SCHED_RESET_ON_FORK, &param) != 0) {
		kv_log(KV_LOG_WARN, "io",
		       "sched: no realtime class for the core thread, it stays normal: error \"%s\"; allow it with "
		       "LimitRTPRIO=1 or CAP_SYS_NICE",
		       strerror(errno));
	}
}

void kvd_loop_run(kvd_host_t *host)
{
	uint64_t wait_ns = 0;

	if (host->options->sched) {
		take_realtime();
	}
	while (!host->stop) {
		wait_ns = kvd_loop_iterate(host, wait_ns);
	}
	atomic_store(&host->health.stopping, 1);
}
