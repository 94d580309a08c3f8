/* daemon/options/options.h -- every option of kvd: the values, the table they come from, and what the command line asks
 * for.
 *
 * docs/options.md and conf/kvd.conf are made from the table (--options-page, --sample-config); tests/daemon compares
 * them.
 */
#ifndef KVD_OPTIONS_H
#define KVD_OPTIONS_H

#include "kv/option.h"

typedef struct kvd_options {
	char run_dir[KV_OPTION_STRING_MAX];
	char namespaces[KV_OPTION_STRING_MAX];
	char sockets_group[KV_OPTION_STRING_MAX], sockets_mode[KV_OPTION_STRING_MAX];
	uint64_t cpu_size, cpu_slab_size, cpu_max_blocks;
	char cpu_ahead[KV_OPTION_STRING_MAX];
	int cpu_huge_pages, cpu_prefault;
	char nvme_path[KV_OPTION_STRING_MAX];
	uint64_t nvme_size, nvme_file_size, nvme_queue_depth, nvme_flush_interval;
	int nvme_io_engine, nvme_direct, nvme_sync, nvme_write_behind;
	uint64_t gpu_size, gpu_slab_size;
	char gpu_devices[KV_OPTION_STRING_MAX];
	uint64_t index_max_blocks;
	char share[3][KV_OPTION_STRING_MAX], share_max[3][KV_OPTION_STRING_MAX]; /* by kvd_resource_t */
	int policy, admission;
	uint64_t lease_ttl, put_ttl;
	uint64_t handover_ttl, handover_min_ttl, handover_max_bytes, handover_max_entries;
	uint64_t instance_max_pinned, instance_max_unfinished, instance_lease_area;
	char members_trusted[KV_OPTION_STRING_MAX];
	uint64_t limits_sessions, limits_instances, limits_members, limits_spaces, limits_leases;
	uint64_t limits_send_queue, limits_receive, limits_staging, limits_frames_quantum;
	uint64_t limits_hello_time, limits_frame_time, limits_silence;
	char http_listen[KV_OPTION_STRING_MAX];
	int http_allow_remote;
	uint64_t http_connections;
	int events_enabled, events_tokens;
	char events_topic[KV_OPTION_STRING_MAX], events_publisher[KV_OPTION_STRING_MAX];
	uint64_t events_buffer, events_send_buffer, events_subscribers;
	char peers_name[KV_OPTION_STRING_MAX], peers_listen[KV_OPTION_STRING_MAX];
	char peers_addresses[KV_OPTION_STRING_MAX], peers_keys[KV_OPTION_STRING_MAX];
	char peers_transports[KV_OPTION_STRING_MAX];
	uint64_t peers_in_flight, peers_timeout;
	uint64_t spin;
	int sched;
	int log_level;
	int keeper, adopt;
} kvd_options_t;

extern const kv_option_table_t kvd_option_table;

#define KVD_OPTION_COUNT_MAX 96u
#define KVD_GPU_GRAIN        (UINT64_C(2) << 20) /* slabs in GPU memory are multiples of it */
#define KVD_DIFFERS_MAX      512u
#define KVD_TOPIC_MAX        255u

typedef enum kvd_action {
	KVD_RUN,
	KVD_CHECK_CONFIG,
	KVD_DESCRIBE,
	KVD_PAGE,
	KVD_SAMPLE,
	KVD_VERSION_ONLY,
	KVD_HELP
} kvd_action_t;

/* What the daemon has been started with. */
typedef struct kvd_setup {
	int argc; /* as main() got them: a later reading has the same precedence */
	char **argv, **environment;
	kvd_options_t options;
	kv_option_source_t sources[KVD_OPTION_COUNT_MAX];
	kvd_action_t action;
	char config[KV_OPTION_STRING_MAX]; /* file, empty: none */
	int config_fd;                     /* memfd: the file as it was read, -1: there is no file */
	int keeper_fd;                     /* socket to the keeper, -1: we are not its child */
	int lock_fd;                       /* held lock of run_dir, -1: not yet */
	int held_fd;                       /* memfd: names of what the keeper has kept (held.h), -1: nothing */
	uint32_t restarts;                 /* times the keeper has restarted us */
	char differs[KVD_DIFFERS_MAX];     /* why the file is not what runs, empty: it is */
} kvd_setup_t;

/* Defaults, then the file, then KVD_* of the environment (KVD_SOCKET belongs to clients and is left alone), then the
 * command line; checks of options that belong together come last. A daemon of the keeper's gets the file as it was when
 * it was last found valid. KV_ERR_CONFIG, KV_ERR_PATH (a socket path would not fit), KV_ERR_NOMEM: *error is the
 * sentence. */
kv_status_t kvd_setup_read(int argc, char **argv, char **environment, kvd_setup_t *setup, kv_option_error_t *error);

/* The text of the file as it is now, which is not looked into: a memfd, the caller's; without a file *p_fd is left.
 * KV_ERR_CONFIG or KV_ERR_NOMEM: *error is the sentence. */
kv_status_t kvd_setup_copy_config(const kvd_setup_t *setup, int *p_fd, kv_option_error_t *error);

/* Read the file, the environment and the command line of `running` again (SIGHUP). Errors as above: nothing has
 * changed, and running->differs says so. On KV_OK fresh->config_fd is the caller's. */
kv_status_t kvd_setup_reread(kvd_setup_t *running, kvd_setup_t *fresh, kv_option_error_t *error);

/* Take over what may change while running; running->differs names what waits for a start. */
void kvd_setup_adopt(kvd_setup_t *running, const kvd_setup_t *fresh);

/* The topic of a namespace's events, its name given by its length. Returns the topic's length, in checked options at
 * most KVD_TOPIC_MAX. */
size_t kvd_topic_format(const kvd_options_t *options, const char *ns, size_t len, char *out, size_t cap);

/* Bytes that cpu.ahead means; KVS_AHEAD_ALL: all. KV_ERR_ARG or the like: it is no size and no word it knows. */
kv_status_t kvd_ahead_parse(const kvd_options_t *options, uint64_t *p_bytes);

/* What share.cpu, share.disk and share.index give the namespace, and share.max_cpu and so on at most: bytes, bytes and
 * blocks; 0: nothing is said of it. The options have been checked. */
void kvd_shares_given(const kvd_options_t *options, const char *ns, uint64_t given[3], uint64_t most[3]);
/* A namespace that is not there, or there twice, no number, more than there is, or a maximum below a share:
 * KV_ERR_CONFIG and a sentence in `why`. */
kv_status_t kvd_shares_check(const kvd_options_t *options, char *why, size_t cap);

/* gpu.size, gpu.slab_size and gpu.devices together: KV_ERR_CONFIG and a sentence in `why`. */
kv_status_t kvd_gpu_options_check(const kvd_options_t *options, char *why, size_t cap);

/* Print what an action other than KVD_RUN and KVD_CHECK_CONFIG asks for. Returns the exit code. */
int kvd_describe(kvd_action_t action);

/* The n-th word of a comma-separated list: its length, 0 past the last. */
size_t kvd_list_word(const char *list, uint32_t n, const char **p_word);
int kvd_list_has(const char *list, const char *word);

#endif
