/* kvd: the composition root. Read daemon() and its mirror end_daemon() to see what there is and in which order it
 * lives. */
#include "base/held.h"
#include "io/sessions/disk_attach.h"
#include "io/base/gpu.h"
#include "io/http.h"
#include "io/loop.h"
#include "io/sessions/join.h"
#include "io/members/slabs.h"
#include "io/members/writers.h"
#include "io/sessions/net.h"
#include "io/sessions/listener.h"
#include "io/sessions/receive.h"
#include "io/world.h"
#include "keeper.h"
#include "kv/system.h"
#include "kvs/pool.h"
#include "base/memory.h"
#include "base/process.h"
#include "base/takeover.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define KEEPER_MS 1000u /* for what the next daemon must know; the keeper that has asked for the end reads */

extern char **environ;

/* ---- one daemon ------------------------------------------------------------------------------ */

static kv_status_t host_create(kvd_setup_t *setup, kvd_host_t **p_host)
{
	kvd_host_t *host = calloc(1, sizeof *host);
	kv_status_t status;

	if (!host) {
		return KV_ERR_NOMEM;
	}
	host->setup = setup;
	host->options = &setup->options;
	host->env = &kv_env_posix;
	host->started_ns = kv_now_ns(host->env);
	host->epoll_fd = host->signals.fd = -1;
	host->to_keeper = (kvd_keeper_queue_t){.fd = setup->keeper_fd, .metrics = &host->metrics};
	status = kvd_held_open(setup->held_fd, &host->to_keeper, &host->held);
	if (!host->options->adopt) {
		kvd_held_close(host->held, 1);
		host->held = NULL;
	}
	host->frame = malloc(KVD_FRAME_SCRATCH);
	host->text = malloc(KVD_TEXT_SCRATCH);
	do {
		kv_random(host->env, &host->incarnation, sizeof host->incarnation);
	} while (host->incarnation == 0);
	kv_metric_set(&host->metrics, KV_M_RESTARTS, setup->restarts);
	kv_metric_set(&host->metrics, KV_M_CONFIG_DIFFERS, setup->differs[0] != '\0');
	*p_host = host;

	return host->frame && host->text ? status : KV_ERR_NOMEM;
}

static kv_status_t open_publisher(kvd_host_t *host, char *detail, size_t cap)
{
	const kvd_options_t *options = host->options;
	const kvd_publisher_config_t config = {.options = options,
					       .buffer_bytes = options->events_buffer,
					       .log_bytes = options->events_send_buffer,
					       .max_subscribers = (uint32_t)options->events_subscribers,
					       .tokens = options->events_tokens,
					       .metrics = &host->metrics};

	return options->events_enabled ? kvd_publisher_open(&config, &host->publisher, detail, cap) : KV_OK;
}

static kv_status_t open_http(kvd_host_t *host, char *detail, size_t cap)
{
	if (strcmp(host->options->http_listen, "off") == 0) {
		return KV_OK;
	}

	return kvd_http_open(host->options, &host->metrics, &host->health, &host->http, detail, cap);
}

static void ready(kvd_host_t *host)
{
	kvd_held_close(host->held, 1);
	host->held = NULL;
	host->own_fds = kvd_process_count_fds() - kvd_gpu_count_fds(host) - kvd_writers_count_fds(host) -
			kvd_slabs_count_files(host);
	host->own_slabs = kvd_slabs_count_held(host);
	atomic_store(&host->health.ready, 1);
	kv_log(KV_LOG_INFO, "main", "ready: version %s run_dir %s namespaces %s disk %s restarts %u", KVD_VERSION,
	       host->options->run_dir, host->options->namespaces,
	       host->disk     ? host->options->nvme_path
	       : host->attach ? "off"
			      : "none",
	       host->setup->restarts);
	kvd_process_notify("READY=1");
	kvd_keeper_serves(&host->to_keeper);
}

/* Mirror of daemon(), for as much as there is. */
static void end_daemon(kvd_host_t *host)
{
	if (!host->upgrade) {
		kvd_process_notify("STOPPING=1"); /* systemd kills what goes on after it */
	}
	kvd_net_close(host);
	kvd_listeners_close(host);
	if (host->core) {
		kvd_core_shutdown(host->core);
	}
	kvd_sessions_fini(host);
	kvd_http_close(host->http);
	kvd_world_destroy_core(host); /* what is in flight ends with the tiers, and then the core's last memory goes */
	kvd_keeper_close(&host->to_keeper, host->upgrade ? KEEPER_MS : 0); /* what it names is closed from here on */
	kvd_world_close(host);
	kvd_gpu_close(host); /* pools take memory from there */
	kvd_publisher_close(host->publisher);
	kvd_writers_close(host);
	kvd_held_close(host->held, 0); /* the next start finds what this one has not taken over */
	kvd_members_fini(host);
	kvd_namespaces_free(host);
	kvd_loop_fini(host);
	free(host->text);
	free(host->frame);
	free(host);
}

static kv_status_t daemon_run(kvd_setup_t *setup)
{
	char detail[1024] = "";
	kvd_host_t *host = NULL;
	kv_status_t status = kv_random_check(&kv_env_posix);

	if (status == KV_OK) {
		status = host_create(setup, &host);
	}
	if (status == KV_OK) {
		status = kvd_world_open(host, detail, sizeof detail); /* tiers */
	}
	if (status == KV_OK) {
		status = kvd_world_create_core(host, detail, sizeof detail); /* index, leases, policy */
	}
	if (status == KV_OK) {
		status = kvd_loop_init(host);
	}
	if (status == KV_OK) {
		status = open_publisher(host, detail, sizeof detail);
	}
	if (status == KV_OK) {
		status = open_http(host, detail, sizeof detail); /* /readyz says "starting" until ready() */
	}
	if (status == KV_OK) {
		status = kvd_listeners_open(host, detail, sizeof detail); /* namespaces, recovery, sockets */
	}
	if (status == KV_OK) {
		status = kvd_disk_attach_watch(host); /* a disk tier that is off */
	}
	if (status == KV_OK) {
		status = kvd_net_open(host, detail, sizeof detail); /* peers */
	}
	if (status == KV_OK) {
		status = kvd_gpu_open(host); /* memory of GPUs: what is kept of it, the rest comes later */
	}
	if (status == KV_OK) {
		status = kvd_writers_open(host);
	}
	if (status == KV_OK) {
		ready(host);
		kvd_loop_run(host);
	} else {
		kv_log(KV_LOG_ERROR, "main", "cannot start: %s", detail[0] ? detail : kv_status_text(status));
	}
	if (host) {
		end_daemon(host);
	}

	return status;
}

/* ---- the program ----------------------------------------------------------------------------- */

static int report_failure(kv_status_t status, const kv_option_error_t *error)
{
	if (error->file[0] && error->line == 0) {
		fprintf(stderr, "kvd: %s: %s\n", error->file, error->text); /* the file as a whole */
	} else if (error->file[0]) {
		fprintf(stderr, "kvd: %s:%u:%u: %s\n", error->file, error->line, error->column, error->text);
	} else {
		fprintf(stderr, "kvd: %s\n", error->text[0] ? error->text : kv_status_text(status));
	}

	return kv_status_exit_code(status);
}

/* Memory that others use now may be free when the daemon starts: a configuration is not wrong for it. What
 * starts after another daemon starts whatever there is: that one's memory goes only when engines have let go of it. */
static kv_status_t check_memory(const kvd_setup_t *setup, kv_option_error_t *error)
{
	kv_status_t status =
		setup->lock_fd < 0 ? kvd_memory_check(&setup->options, error->text, sizeof error->text) : KV_OK;

	if (status == KV_ERR_NOMEM && setup->action == KVD_CHECK_CONFIG) {
		kv_log(KV_LOG_WARN, "main", "%s", error->text);
		return KV_OK;
	}

	return status;
}

int main(int argc, char **argv)
{
	static kvd_setup_t setup;
	kv_option_error_t error;
	kv_status_t status = kvd_setup_read(argc, argv, environ, &setup, &error);

	if (status == KV_OK && setup.action <= KVD_CHECK_CONFIG) {
		status = check_memory(&setup, &error);
	}
	if (status != KV_OK) {
		return report_failure(status, &error);
	}
	if (setup.action == KVD_CHECK_CONFIG && setup.held_fd >= 0) {
		status = kvd_takeover_check(&setup, error.text, sizeof error.text);
		if (status != KV_OK) {
			return report_failure(status, &error);
		}
	}
	if (setup.action == KVD_CHECK_CONFIG) {
		printf("kvd: the configuration is valid\n");
		return fflush(stdout) == 0 ? 0 : kv_status_exit_code(KV_ERR_IO);
	}
	if (setup.action != KVD_RUN) {
		return kvd_describe(setup.action);
	}

	kv_log_set_level((kv_log_level_t)setup.options.log_level);
	kvd_process_prepare();
	if (setup.lock_fd < 0) {
		status = kvd_process_lock(setup.options.run_dir, &setup.lock_fd, error.text, sizeof error.text);
		if (status != KV_OK) {
			return report_failure(status, &error);
		}
	}
	/* Process 1 of a container is its init: a keeper ends children that are not its own, the daemon does not. */
	if (setup.keeper_fd < 0 && (setup.options.keeper || getpid() == 1)) {
		return kvd_keeper_run(&setup);
	}

	(void)prctl(PR_SET_NAME, "kvd"); /* a keeper starts it as /proc/self/exe */

	return kv_status_exit_code(daemon_run(&setup));
}
