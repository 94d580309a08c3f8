/* The option table of kvd and its command line. */
#include "options.h"

#include "kv/system.h"
#include "kv/log.h"
#include "kv/map.h"
#include "kv/text.h"
#include "kv/types.h"
#include "kv/units.h"
#include "kv/wire.h"
#include "kvs/pool.h"
#include "base/memory.h"
#include "peers.h"
#include "sockets.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#define LIVE       1
#define AT_START   0
#define AHEAD_MOST (UINT64_C(1) << 30)
#define ROW(name, type, fallback, min, max, choices, live, member, help)                                               \
	{                                                                                                              \
		name, KV_OPTION_##type, fallback, min, max, choices, live, offsetof(kvd_options_t, member), help       \
	}

/* clang-format off */
static const kv_option_t rows[] = {
	ROW("run_dir", PATH, "/run/kvd", NULL, NULL, NULL, AT_START, run_dir, "directory of the sockets and of the lock that keeps a second daemon out; created when missing, and refused when it is another user's (not root's) or everybody may write there without a sticky bit"),
	ROW("namespaces", LIST, "default", NULL, NULL, NULL, AT_START, namespaces, "tenants: each has a socket <run_dir>/<name>.sock of its own and shares nothing with the others"),
	ROW("sockets.group", LIST, "", NULL, NULL, NULL, AT_START, sockets_group, "groups of the sockets: name=group, one word a namespace; those not named have the daemon's. The daemon must be a member"),
	ROW("sockets.mode", LIST, "", NULL, NULL, NULL, AT_START, sockets_mode, "modes of the sockets: name=0600 to name=0666; those not named have 0660"),
	ROW("cpu.size", SIZE, "1GiB", "4MiB", NULL, NULL, AT_START, cpu_size, "limit of the CPU tier: slabs, digests and ledger together; refused at the start when the machine, a control group or a resource limit leaves less"),
	ROW("cpu.slab_size", SIZE, "64MiB", "1MiB", "64GiB", NULL, AT_START, cpu_slab_size, "size of a slab, by default at most cpu.size; the last ones are smaller when the limit leaves less"),
	ROW("cpu.max_blocks", U64, "0", NULL, NULL, NULL, AT_START, cpu_max_blocks, "slots in the CPU tier; 0: as many as fit"),
	ROW("cpu.huge_pages", ENUM, "auto", NULL, NULL, "auto,on,off", AT_START, cpu_huge_pages, "huge pages under slabs and the mirror: when the kernel gives them, wanted (their lack is a warning), never"),
	ROW("cpu.prefault", BOOL, "on", NULL, NULL, NULL, AT_START, cpu_prefault, "touch new slabs in a thread, before their slots are lent; off, for tests: the loop does, and stands still meanwhile"),
	ROW("cpu.ahead", STRING, "auto", NULL, NULL, NULL, AT_START, cpu_ahead, "memory kept touched ahead of need, beyond the slab in use, for the block size that was registered or needed memory last: a size; auto: a quarter of cpu.size, at most 1GiB; all: the first block size takes the whole pool at once, for nodes where engines pin it. Another block size gets of it what is not used"),
	ROW("nvme.path", PATH, "", NULL, NULL, NULL, AT_START, nvme_path, "directory of the disk tier; empty: no disk tier. One that is full, read-only or fails is switched off and tried again: kvctl status says so"),
	ROW("nvme.size", SIZE, "8GiB", "16MiB", NULL, NULL, AT_START, nvme_size, "limit of the disk tier: slot files and metadata together"),
	ROW("nvme.file_size", SIZE, "256MiB", "1MiB", "64GiB", NULL, AT_START, nvme_file_size, "preallocated size of a slot file, by default at most nvme.size"),
	ROW("nvme.queue_depth", U64, "64", "1", "1024", NULL, AT_START, nvme_queue_depth, "device requests in flight"),
	ROW("nvme.io_engine", ENUM, "auto", NULL, NULL, "auto,uring,threads", AT_START, nvme_io_engine, "io_uring, plain reads and writes in threads, or the first of them that works"),
	ROW("nvme.direct", BOOL, "on", NULL, NULL, NULL, AT_START, nvme_direct, "O_DIRECT where the file system has it"),
	ROW("nvme.sync", BOOL, "on", NULL, NULL, NULL, AT_START, nvme_sync, "sync data and metadata before something is acknowledged as durable; off only for tests"),
	ROW("nvme.flush_interval", DURATION, "50ms", "1ms", "10s", NULL, AT_START, nvme_flush_interval, "metadata is written at the latest after this"),
	ROW("nvme.write_behind", BOOL, "on", NULL, NULL, NULL, AT_START, nvme_write_behind, "write new blocks to disk at once, parents first"),
	ROW("gpu.size", SIZE, "0", NULL, NULL, NULL, AT_START, gpu_size, "GPU tier: memory of each device for the hottest blocks; 0: none. Where a device has less, the tier is smaller and kvctl status says so"),
	ROW("gpu.devices", LIST, "all", NULL, NULL, NULL, AT_START, gpu_devices, "devices of the GPU tier: UUIDs as nvidia-smi -L prints them, at most 8; all: those that the driver shows. fake-0 to fake-7 are host memory, for tests"),
	ROW("gpu.slab_size", SIZE, "256MiB", "2MiB", "64GiB", NULL, AT_START, gpu_slab_size, "size of a slab of the GPU tier, a multiple of 2MiB, by default at most gpu.size; larger when gpu.size would need more than 127"),
	ROW("index.max_blocks", U64, "1048576", "1024", "268435456", NULL, AT_START, index_max_blocks, "blocks the index may hold; sizes the mirror of every namespace"),
	ROW("share.cpu", LIST, "", NULL, NULL, NULL, AT_START, share[0], "shares of cpu.size: name=40% or name=2GiB, one word a namespace; those not named have equal parts of the rest. A namespace's pinned, unfinished and quarantined bytes end at its share; what others leave idle it may borrow"),
	ROW("share.disk", LIST, "", NULL, NULL, NULL, AT_START, share[1], "shares of nvme.size, in the same way"),
	ROW("share.index", LIST, "", NULL, NULL, NULL, AT_START, share[2], "shares of index.max_blocks, in percent or blocks"),
	ROW("share.max_cpu", LIST, "", NULL, NULL, NULL, AT_START, share_max[0], "what a namespace never has more of, whatever others leave idle: name=60% or name=3GiB of cpu.size, one word a namespace, not less than its share; those not named have no maximum"),
	ROW("share.max_disk", LIST, "", NULL, NULL, NULL, AT_START, share_max[1], "the same of nvme.size, at least nvme.file_size. Files beyond it go, one after the other"),
	ROW("share.max_index", LIST, "", NULL, NULL, NULL, AT_START, share_max[2], "the same of index.max_blocks, in percent or blocks"),
	ROW("policy", ENUM, "lru", NULL, NULL, "lru,fifo", AT_START, policy, "which leaf is evicted first"),
	ROW("admission", ENUM, "second_use", NULL, NULL, "all,second_use", AT_START, admission, "new blocks while the pool thrashes, which is when of the blocks that leave it fewer than 1 in 16 were ever hit: all are saved; or those that were asked for after the block that would go for them, and others are answered NOT_ADMITTED. Hand-overs and durable puts are always taken"),
	ROW("lease.ttl", DURATION, "60s", "100ms", "24h", NULL, AT_START, lease_ttl, "life of a read lease, by default and at most"),
	ROW("put.ttl", DURATION, "60s", "100ms", "24h", NULL, AT_START, put_ttl, "life of a put since its start, its last KEEP or PUT_END; afterwards it is revoked when its namespace lacks room"),
	ROW("handover.ttl", DURATION, "120s", "100ms", "24h", NULL, AT_START, handover_ttl, "life of a hand-over without a consumer, and time that its consumer has, by default and at most"),
	ROW("handover.min_ttl", DURATION, "2s", "0s", "24h", NULL, AT_START, handover_min_ttl, "least life of a hand-over without a consumer: later it gives way to one that lacks room, and its blocks stay cached"),
	ROW("handover.max_bytes", SIZE, "0", NULL, NULL, NULL, AT_START, handover_max_bytes, "bytes of host memory that the hand-overs of one namespace may keep, tails and announced keys included; 0: a quarter of its share of the CPU tier. In memory of GPUs they may keep its share"),
	ROW("handover.max_entries", U64, "16384", "1", "65536", NULL, AT_START, handover_max_entries, "hand-overs of one namespace; one instance may be a side of limits.leases of them"),
	ROW("instance.max_pinned", SIZE, "0", NULL, NULL, NULL, AT_START, instance_max_pinned, "bytes the read leases of one instance may keep from eviction, of host memory and of each GPU; 0: these and its unfinished puts together, half of its namespace's share"),
	ROW("instance.max_unfinished", SIZE, "0", NULL, NULL, NULL, AT_START, instance_max_unfinished, "bytes of one instance's unfinished puts, of host memory and of each GPU; 0: these and its leases together, half of its namespace's share"),
	ROW("instance.lease_area", SIZE, "16MiB", "1MiB", "1GiB", NULL, AT_START, instance_lease_area, "shared memory for the slot lists of one instance's leases and puts; only touched pages count"),
	ROW("members.trusted", LIST, "", NULL, NULL, NULL, AT_START, members_trusted, "namespaces whose members may join with a pidfd that is not proved to be their own: for engines in other process namespaces, before Linux 6.9"),
	ROW("limits.sessions", U64, "1024", "1", "65536", NULL, AT_START, limits_sessions, "open connections; a namespace may have an equal part of them, and operators eight more"),
	ROW("limits.instances", U64, "256", "1", "4096", NULL, AT_START, limits_instances, "live instances; a namespace may have an equal part of them"),
	ROW("limits.members", U64, "1024", "1", "16384", NULL, AT_START, limits_members, "live members; a namespace may have an equal part of them"),
	ROW("limits.spaces", U64, "1024", "1", "4095", NULL, AT_START, limits_spaces, "spaces (models, weights, adapters) of one namespace that engines may have open at a time; one that nobody uses gives way to another, and keeps its blocks"),
	ROW("limits.leases", U64, "4096", "1", "1048576", NULL, AT_START, limits_leases, "leases and puts of one instance"),
	ROW("limits.send_queue", SIZE, "4MiB", "64KiB", "1GiB", NULL, AT_START, limits_send_queue, "bytes waiting for one session that does not read; beyond them it is closed"),
	ROW("limits.receive", SIZE, "256MiB", "1MiB", NULL, NULL, AT_START, limits_receive, "receive buffers of all sessions; a namespace may have an equal part of them, which should hold the largest frame (32MiB)"),
	ROW("limits.staging", SIZE, "128MiB", "64KiB", "128MiB", NULL, AT_START, limits_staging, "digest staging of one member"),
	ROW("limits.frames_per_quantum", U64, "32", "1", "4096", NULL, AT_START, limits_frames_quantum, "frames of one session that are handled before its namespace's next source (decision 033)"),
	ROW("limits.hello_time", DURATION, "1s", "10ms", "60s", NULL, AT_START, limits_hello_time, "a connection that has not said HELLO by then is closed"),
	ROW("limits.frame_time", DURATION, "10s", "10ms", "10m", NULL, AT_START, limits_frame_time, "a frame that has begun must be complete after this, else the connection is closed"),
	ROW("limits.silence", DURATION, "50ms", "50ms", "10s", NULL, AT_START, limits_silence, "a heartbeat older than this means to clients that the daemon is dead or stopped: a miss; longer where it may wait that long for a CPU"),
	ROW("http.listen", STRING, "127.0.0.1:9464", NULL, NULL, NULL, AT_START, http_listen, "host:port of /metrics, /healthz and /readyz; off: none"),
	ROW("http.allow_remote", BOOL, "off", NULL, NULL, NULL, AT_START, http_allow_remote, "allow http.listen to be reached from other machines; there is no authentication"),
	ROW("http.connections", U64, "32", "1", "1024", NULL, AT_START, http_connections, "HTTP connections at a time; a new one beyond them ends the oldest"),
	ROW("events.enabled", BOOL, "on", NULL, NULL, NULL, AT_START, events_enabled, "publish block events on ipc://<run_dir>/<namespace>.events and prefix hits on <namespace>.hits"),
	ROW("events.tokens", BOOL, "on", NULL, NULL, NULL, AT_START, events_tokens, "put token ids into BlockStored events"),
	ROW("events.topic", STRING, "kv@{publisher}@{namespace}", NULL, NULL, NULL, AT_START, events_topic, "topic of the event messages; {publisher} and {namespace} are replaced"),
	ROW("events.publisher", STRING, "kvd", NULL, NULL, NULL, AT_START, events_publisher, "publisher id for {publisher} in events.topic: what routers call the source of the events, as the name of the pod"),
	ROW("events.buffer", SIZE, "32MiB", "256KiB", "1GiB", NULL, AT_START, events_buffer, "events of one namespace waiting for the publisher; beyond it messages are lost, and their numbers skipped"),
	ROW("events.send_buffer", SIZE, "32MiB", "256KiB", "1GiB", NULL, AT_START, events_send_buffer, "messages one endpoint keeps for its subscribers; one that falls further behind misses the oldest and sees the gap in their numbers"),
	ROW("events.subscribers", U64, "32", "1", "1024", NULL, AT_START, events_subscribers, "subscribers of one endpoint; more are refused"),
	ROW("peers.name", STRING, "", NULL, NULL, NULL, AT_START, peers_name, "what the other nodes' daemons call this one"),
	ROW("peers.listen", STRING, "127.0.0.1:9465", NULL, NULL, NULL, AT_START, peers_listen, "address:port for the daemons of other nodes, numeric: TLS 1.3 with the peer's key. Nothing listens without peers.addresses"),
	ROW("peers.addresses", LIST, "", NULL, NULL, NULL, AT_START, peers_addresses, "daemons of other nodes: name=address:port, one word a peer, numeric; empty: kvd is alone and starts no net process"),
	ROW("peers.keys", LIST, "", NULL, NULL, NULL, LIVE, peers_keys, "key file of each peer: name=path, mode 0600, the same on both nodes (kvctl peer-key makes one). Two of one peer while a key is changed: the first is the one to dial with"),
	ROW("peers.transports", STRING, KVD_PEERS_TLS, NULL, NULL, NULL, AT_START, peers_transports, "how blocks come: tls, or transports of UCX (its UCX_TLS), where both nodes have them; for trusted networks only: they authenticate and encrypt nothing. With tcp among them UCX listens on the network device of peers.listen; others are not tested"),
	ROW("peers.in_flight", SIZE, "64MiB", "4MiB", "16GiB", NULL, AT_START, peers_in_flight, "bytes of one peer that may be on their way to this daemon; a larger block goes alone"),
	ROW("peers.timeout", DURATION, "5s", "100ms", "10m", NULL, AT_START, peers_timeout, "a peer that sends nothing, or not the bytes it was asked for, or does not read those it asked for, for so long is cut off and dialled again"),
	ROW("spin", DURATION, "1ms", NULL, "10ms", NULL, AT_START, spin, "look at the sockets at most this long before going to sleep: as long as requests have lately come that often, else 30us; 0: never"),
	ROW("sched", ENUM, "normal", NULL, NULL, "normal,realtime", AT_START, sched, "scheduling class of the core thread; realtime (SCHED_RR, priority 1): it gets a CPU at once where engines use all, and spins 30us at most; needs LimitRTPRIO=1 or CAP_SYS_NICE"),
	ROW("log.level", ENUM, "info", NULL, NULL, "error,warn,info,debug", LIVE, log_level, "lines above this level are dropped; debug adds connections and refused requests"),
	ROW("keeper", BOOL, "on", NULL, NULL, NULL, AT_START, keeper, "start as a small keeper process that restarts the daemon when it crashes"),
	ROW("restart.adopt", BOOL, "on", NULL, NULL, NULL, AT_START, adopt, "after a crash or an upgrade the next daemon takes over the blocks in GPU memory; off: it starts with empty memory. Host memory is always empty then"),
};
/* clang-format on */

_Static_assert(KV_COUNT_OF(rows) <= KVD_OPTION_COUNT_MAX, "room for every option's source");

const kv_option_table_t kvd_option_table = {rows, KV_COUNT_OF(rows), "KVD_"};

static kv_status_t set_error(kv_option_error_t *error, kv_status_t status, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
static kv_status_t set_error(kv_option_error_t *error, kv_status_t status, const char *format, ...)
{
	va_list args;

	error->file[0] = '\0';
	error->line = 0;
	error->column = 0;
	va_start(args, format);
	vsnprintf(error->text, sizeof error->text, format, args);
	va_end(args);

	return status;
}

size_t kvd_topic_format(const kvd_options_t *options, const char *ns, size_t len, char *out, size_t cap)
{
	const char *at = options->events_topic;
	kv_text_t text = kv_text(out, cap);

	while (*at) {
		if (strncmp(at, "{publisher}", 11) == 0) {
			kv_text_add(&text, options->events_publisher, strlen(options->events_publisher));
			at += 11;
		} else if (strncmp(at, "{namespace}", 11) == 0) {
			kv_text_add(&text, ns, len);
			at += 11;
		} else {
			kv_text_add(&text, at++, 1);
		}
	}

	return text.len;
}

/* Letters, digits, '-', '_' and '.': the name becomes a file name and a label. */
static int namespace_ok(const char *word, size_t len)
{
	if (len == 0 || len > 64 || word[0] == '.') {
		return 0;
	}
	for (size_t i = 0; i < len; i++) {
		int c = (unsigned char)word[i];

		if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || strchr("-_.", c))) {
			return 0;
		}
	}

	return 1;
}

static kv_status_t check_namespaces(const kvd_options_t *options, kv_option_error_t *error)
{
	static const size_t room = sizeof(((struct sockaddr_un *)0)->sun_path) - 1;
	const char *word, *other;
	size_t len;

	for (uint32_t i = 0; (len = kvd_list_word(options->namespaces, i, &word)) > 0; i++) {
		if (!namespace_ok(word, len)) {
			return set_error(error, KV_ERR_CONFIG,
					 "namespaces: \"%.*s\" is not a name of letters, digits, '-', '_' and '.'",
					 (int)len, word);
		}
		for (uint32_t j = 0; j < i; j++) {
			if (kvd_list_word(options->namespaces, j, &other) == len && memcmp(word, other, len) == 0) {
				return set_error(error, KV_ERR_CONFIG, "namespaces: \"%.*s\" is there twice", (int)len,
						 word);
			}
		}

		size_t need = strlen(options->run_dir) + 1 + len + strlen(".events");
		if (need > room) {
			return set_error(
				error, KV_ERR_PATH,
				"run_dir: the path of a socket %s/%.*s.events has %zu bytes, %zu fit; choose a "
				"shorter run_dir",
				options->run_dir, (int)len, word, need, room);
		}
		need = kvd_topic_format(options, word, len, NULL, 0);
		if (need > KVD_TOPIC_MAX) {
			return set_error(error, KV_ERR_CONFIG, "events.topic: that of \"%.*s\" has %zu bytes, %u fit",
					 (int)len, word, need, KVD_TOPIC_MAX);
		}
	}
	if (kvd_list_word(options->namespaces, 0, &word) == 0) {
		return set_error(error, KV_ERR_CONFIG, "namespaces: at least one is needed");
	}

	return KV_OK;
}

static kv_status_t check_trusted(const kvd_options_t *options, kv_option_error_t *error)
{
	const char *word;
	char name[65];
	size_t len;

	for (uint32_t i = 0; (len = kvd_list_word(options->members_trusted, i, &word)) > 0; i++) {
		snprintf(name, sizeof name, "%.*s", (int)len, word);
		if (len >= sizeof name || !kvd_list_has(options->namespaces, name)) {
			return set_error(error, KV_ERR_CONFIG, "members.trusted: \"%.*s\" is not one of the namespaces",
					 (int)len, word);
		}
	}

	return KV_OK;
}

static int is_loopback(const char *listen)
{
	return strncmp(listen, "127.", 4) == 0 || strncmp(listen, "localhost:", 10) == 0 ||
	       strncmp(listen, "[::1]:", 6) == 0;
}

static int has_port(const char *listen)
{
	const char *colon = strrchr(listen, ':');
	uint64_t port = 0;

	return colon && kv_parse_u64(colon + 1, &port) == KV_OK && port >= 1 && port <= 65535;
}

kv_status_t kvd_ahead_parse(const kvd_options_t *options, uint64_t *p_bytes)
{
	const char *text = options->cpu_ahead;

	if (strcmp(text, "auto") == 0) {
		*p_bytes = options->cpu_size / 4u < AHEAD_MOST ? options->cpu_size / 4u : AHEAD_MOST;
		return KV_OK;
	}
	if (strcmp(text, "all") == 0 || strcmp(text, "100%") == 0) {
		*p_bytes = KVS_AHEAD_ALL;
		return KV_OK;
	}

	return kv_parse_size(text, p_bytes);
}

static kv_status_t check_together(const kvd_options_t *options, kv_option_error_t *error)
{
	uint64_t ahead;
	kv_status_t status;

	if (options->cpu_slab_size > options->cpu_size) {
		return set_error(error, KV_ERR_CONFIG,
				 "cpu.slab_size is larger than cpu.size (%llu and %llu bytes); make it smaller",
				 (unsigned long long)options->cpu_slab_size, (unsigned long long)options->cpu_size);
	}
	if (kvd_ahead_parse(options, &ahead) != KV_OK) {
		return set_error(error, KV_ERR_CONFIG, "cpu.ahead: \"%s\" is neither a size nor auto nor all",
				 options->cpu_ahead);
	}
	if (options->nvme_path[0] && options->nvme_file_size > options->nvme_size) {
		return set_error(error, KV_ERR_CONFIG,
				 "nvme.file_size is larger than nvme.size (%llu and %llu bytes); make it smaller",
				 (unsigned long long)options->nvme_file_size, (unsigned long long)options->nvme_size);
	}
	if (strcmp(options->http_listen, "off") != 0) {
		if (!has_port(options->http_listen)) {
			return set_error(error, KV_ERR_CONFIG,
					 "http.listen: \"%s\" is neither host:port (1 to 65535) nor off",
					 options->http_listen);
		}
		if (!options->http_allow_remote && !is_loopback(options->http_listen)) {
			return set_error(
				error, KV_ERR_CONFIG,
				"http.listen: \"%s\" can be reached from other machines and has no authentication; "
				"use 127.0.0.1, or set http.allow_remote",
				options->http_listen);
		}
	}

	status = check_namespaces(options, error);
	if (status == KV_OK) {
		status = check_trusted(options, error);
	}

	if (status == KV_OK) {
		status = kvd_peers_check(options, error->text, sizeof error->text);
	}
	if (status == KV_OK) {
		status = kvd_gpu_options_check(options, error->text, sizeof error->text);
	}
	if (status == KV_OK) {
		status = kvd_shares_check(options, error->text, sizeof error->text);
	}

	return status == KV_OK ? kvd_sockets_check(options, error->text, sizeof error->text) : status;
}

/* --kept=<socket>,<lock>,<restarts>,<configuration, or -1>,<list of what is held, or -1>: what the keeper hands on to a
 * daemon, to the program that takes its place (socket -1), or to the check of that program. That one may be of another
 * version, which refuses what it does not know. */
static int take_kept(const char *arg, kvd_setup_t *setup)
{
	static const char name[] = "--kept=";
	long values[5];
	const char *at = arg + sizeof name - 1;

	if (strncmp(arg, name, sizeof name - 1) != 0) {
		return 0;
	}
	for (size_t i = 0; i < KV_COUNT_OF(values); i++) {
		char *end;

		values[i] = strtol(at, &end, 10);
		if (end == at || values[i] < (i == 1 || i == 2 ? 0 : -1) || values[i] > INT32_MAX ||
		    *end != (i + 1 < KV_COUNT_OF(values) ? ',' : '\0')) {
			return 0;
		}
		at = end + 1;
	}
	setup->keeper_fd = (int)values[0];
	setup->lock_fd = (int)values[1];
	setup->restarts = (uint32_t)values[2];
	setup->config_fd = (int)values[3];
	setup->held_fd = (int)values[4];

	return 1;
}

/* Flags that are no options. Returns 1 when arg was one. */
static int take_flag(const char *arg, kvd_setup_t *setup)
{
	static const struct {
		const char *name;
		kvd_action_t action;
	} flags[] = {{"--check-config", KVD_CHECK_CONFIG}, {"--describe-options", KVD_DESCRIBE},
		     {"--options-page", KVD_PAGE},         {"--sample-config", KVD_SAMPLE},
		     {"--version", KVD_VERSION_ONLY},      {"--help", KVD_HELP}};

	for (size_t i = 0; i < KV_COUNT_OF(flags); i++) {
		if (strcmp(arg, flags[i].name) == 0) {
			setup->action = flags[i].action;
			return 1;
		}
	}

	return 0;
}

static kv_status_t take_assignment(const char *arg, kvd_setup_t *setup, kv_option_error_t *error)
{
	char name[64];
	const char *equals = strchr(arg, '=');
	size_t len = equals ? (size_t)(equals - arg) : strlen(arg);

	if (len < 3 || strncmp(arg, "--", 2) != 0 || len - 2 >= sizeof name) {
		return set_error(error, KV_ERR_CONFIG,
				 "\"%.100s\" is not an option; options are --name=value (see --help)", arg);
	}
	memcpy(name, arg + 2, len - 2);
	name[len - 2] = '\0';
	if (!equals) {
		const char *names[KVD_OPTION_COUNT_MAX];
		for (size_t i = 0; i < KV_COUNT_OF(rows); i++) {
			names[i] = rows[i].name;
		}
		const char *near = kv_nearest(name, names, KV_COUNT_OF(rows));
		return set_error(error, KV_ERR_CONFIG, "--%s has no value; write --%s=VALUE", name, near ? near : name);
	}

	return kv_options_set(&kvd_option_table, name, equals + 1, &setup->options, setup->sources, error);
}

/* Variables of our prefix that are for clients, builds and scripts: who has them exported can start a daemon all the
 * same. */
static int is_for_others(const char *entry)
{
	static const char *const names[] = {"KVD_SOCKET", "KVD_BUILD", "KVD_VENV", "KVD_PYTHON", "KVD_CUBLAS"};

	for (size_t i = 0; i < KV_COUNT_OF(names); i++) {
		size_t len = strlen(names[i]);

		if (strncmp(entry, names[i], len) == 0 && entry[len] == '=') {
			return 1;
		}
	}

	return 0;
}

static void warn(const char *sentence)
{
	kv_log(KV_LOG_WARN, "options", "%s", sentence);
}

static kv_status_t read_environment(char **environment, kvd_setup_t *setup, kv_option_error_t *error)
{
	size_t count = 0, kept = 0;

	while (environment[count]) {
		count++;
	}
	char **ours = calloc(count + 1, sizeof *ours);
	if (!ours) {
		return set_error(error, KV_ERR_NOMEM, "out of memory");
	}
	for (size_t i = 0; i < count; i++) {
		if (!is_for_others(environment[i])) {
			ours[kept++] = environment[i];
		}
	}
	/* The keeper has warned already. */
	kv_status_t status = kv_options_env(&kvd_option_table, ours, &setup->options, setup->sources,
					    setup->keeper_fd < 0 ? warn : NULL, error);
	free(ours);

	return status;
}

/* What must be known before the rest is read: the file, and whether the keeper has started us. */
static kv_status_t find_config(int argc, char **argv, kvd_setup_t *setup, kv_option_error_t *error)
{
	for (int i = 1; i < argc && argv[i]; i++) {
		const char *path = NULL;

		if (strncmp(argv[i], "--kept=", 7) == 0 && !take_kept(argv[i], setup)) {
			return set_error(error, KV_ERR_CONFIG, "--kept= is between the keeper and the daemon");
		}

		if (strncmp(argv[i], "--config=", 9) == 0) {
			path = argv[i] + 9;
		} else if (strcmp(argv[i], "--config") == 0) {
			path = i + 1 < argc && argv[i + 1] ? argv[i + 1] : "";
		}
		if (path && (path[0] == '\0' || strlen(path) >= sizeof setup->config)) {
			return set_error(error, KV_ERR_CONFIG, "--config wants the name of a file");
		}
		if (path) {
			snprintf(setup->config, sizeof setup->config, "%s", path);
		}
	}

	return KV_OK;
}

static int is_default(const kvd_setup_t *setup, const char *name)
{
	for (size_t i = 0; i < KV_COUNT_OF(rows); i++) {
		if (strcmp(rows[i].name, name) == 0) {
			return setup->sources[i] == KV_SOURCE_DEFAULT;
		}
	}

	return 0;
}

/* Who makes a tier small has said nothing about its parts. */
static void fit_defaults(kvd_setup_t *setup)
{
	kvd_options_t *options = &setup->options;

	if (options->gpu_slab_size > options->gpu_size && options->gpu_size >= KVD_GPU_GRAIN &&
	    is_default(setup, "gpu.slab_size")) {
		options->gpu_slab_size = options->gpu_size / KVD_GPU_GRAIN * KVD_GPU_GRAIN;
	}
	if (options->cpu_slab_size > options->cpu_size && is_default(setup, "cpu.slab_size")) {
		options->cpu_slab_size = options->cpu_size;
	}
	if (options->nvme_file_size > options->nvme_size && is_default(setup, "nvme.file_size")) {
		options->nvme_file_size = options->nvme_size;
	}
}

/* ---- the file -------------------------------------------------------------------------------- */

static kv_status_t keep_text(const char *text, size_t len, int *p_fd, kv_option_error_t *error)
{
	int fd = kv_memfd_create("kvd-config", 0);

	if (fd < 0 || write(fd, text, len) != (ssize_t)len) {
		if (fd >= 0) {
			close(fd);
		}
		return set_error(error, KV_ERR_NOMEM, "cannot keep a copy of the configuration: %s", strerror(errno));
	}
	*p_fd = fd;

	return KV_OK;
}

/* The file as the keeper has kept it. It may have been edited since: that is said, not used. */
static kv_status_t read_kept(kvd_setup_t *setup, char **p_text, size_t *p_len, kv_option_error_t *error)
{
	kv_option_error_t now_error;
	char path[32], *now = NULL;
	size_t now_len = 0;
	kv_status_t status;

	snprintf(path, sizeof path, "/proc/self/fd/%d", setup->config_fd);
	status = kv_option_file_read(path, p_text, p_len, error);
	if (setup->keeper_fd >= 0) {
		close(setup->config_fd); /* the keeper has it for the next one */
		setup->config_fd = -1;
	}
	if (status != KV_OK) {
		return status;
	}
	if (kv_option_file_read(setup->config, &now, &now_len, &now_error) != KV_OK) {
		snprintf(setup->differs, sizeof setup->differs, "%.200s: %.200s", setup->config, now_error.text);
	} else if (now_len != *p_len || memcmp(now, *p_text, now_len) != 0) {
		snprintf(setup->differs, sizeof setup->differs, "%.400s was edited and not read again; SIGHUP reads it",
			 setup->config);
	}
	free(now);

	return KV_OK;
}

static kv_status_t read_file(kvd_setup_t *setup, kv_option_error_t *error)
{
	const int kept = setup->config_fd >= 0;
	char *text = NULL;
	size_t len = 0;
	kv_status_t status =
		kept ? read_kept(setup, &text, &len, error) : kv_option_file_read(setup->config, &text, &len, error);

	if (status == KV_OK) {
		status = kv_options_text(&kvd_option_table, setup->config,
					 (kv_slice_t){(const uint8_t *)text, (uint32_t)len}, &setup->options,
					 setup->sources, error);
	}
	if (status == KV_OK && !kept) {
		status = keep_text(text, len, &setup->config_fd, error);
	}
	free(text);

	return status == KV_ERR_IO ? KV_ERR_CONFIG : status; /* trying again later would not help */
}

/* ---- all of it ------------------------------------------------------------------------------- */

static void start_reading(int argc, char **argv, char **environment, kvd_setup_t *setup)
{
	memset(setup, 0, sizeof *setup);
	setup->argc = argc;
	setup->argv = argv;
	setup->environment = environment;
	setup->keeper_fd = setup->lock_fd = setup->config_fd = setup->held_fd = -1;
	kv_options_default(&kvd_option_table, &setup->options, setup->sources);
}

static kv_status_t read_sources(kvd_setup_t *setup, kv_option_error_t *error)
{
	kv_status_t status = setup->config[0] ? read_file(setup, error) : KV_OK;

	if (status == KV_OK) {
		status = read_environment(setup->environment, setup, error);
	}
	for (int i = 1; i < setup->argc && status == KV_OK; i++) {
		const char *arg = setup->argv[i];

		if (strcmp(arg, "--config") == 0) {
			i++;
		} else if (strncmp(arg, "--config=", 9) != 0 && strncmp(arg, "--kept=", 7) != 0 &&
			   !take_flag(arg, setup)) {
			status = take_assignment(arg, setup, error);
		}
	}
	fit_defaults(setup);
	if (status == KV_OK && setup->action <= KVD_CHECK_CONFIG) {
		status = check_together(&setup->options, error);
	}

	return status;
}

kv_status_t kvd_setup_read(int argc, char **argv, char **environment, kvd_setup_t *setup, kv_option_error_t *error)
{
	kv_status_t status;

	memset(error, 0, sizeof *error);
	start_reading(argc, argv, environment, setup);
	status = find_config(argc, argv, setup, error);

	return status == KV_OK ? read_sources(setup, error) : status;
}

kv_status_t kvd_setup_copy_config(const kvd_setup_t *setup, int *p_fd, kv_option_error_t *error)
{
	char *text = NULL;
	size_t len = 0;
	kv_status_t status;

	if (!setup->config[0]) {
		return KV_OK;
	}
	status = kv_option_file_read(setup->config, &text, &len, error);
	if (status == KV_OK) {
		status = keep_text(text, len, p_fd, error);
	}
	free(text);

	return status;
}

kv_status_t kvd_setup_reread(kvd_setup_t *running, kvd_setup_t *fresh, kv_option_error_t *error)
{
	kv_status_t status;

	memset(error, 0, sizeof *error);
	start_reading(running->argc, running->argv, running->environment, fresh);
	snprintf(fresh->config, sizeof fresh->config, "%s", running->config);
	fresh->keeper_fd = running->keeper_fd;
	status = read_sources(fresh, error);
	if (status == KV_OK && fresh->options.cpu_size != running->options.cpu_size) {
		char why[400];

		status = kvd_memory_check(&fresh->options, why, sizeof why);
		status = status == KV_ERR_NOMEM ? KV_OK : status; /* we use it */
		if (status != KV_OK) {
			set_error(error, status, "%s", why);
		}
	}
	if (status != KV_OK) {
		if (fresh->config_fd >= 0) {
			close(fresh->config_fd);
			fresh->config_fd = -1;
		}
		char at[32] = "";

		if (error->line > 0) {
			snprintf(at, sizeof at, ":%u:%u", error->line, error->column);
		}
		snprintf(running->differs, sizeof running->differs, "SIGHUP refused it: %.*s%s%s%.400s",
			 (int)(sizeof error->file / 4), error->file, at, error->file[0] ? ": " : "", error->text);
	}

	return status;
}

void kvd_setup_adopt(kvd_setup_t *running, const kvd_setup_t *fresh)
{
	kv_text_t waits = kv_text(running->differs, sizeof running->differs);
	char now[KV_OPTION_STRING_MAX + 1], then[KV_OPTION_STRING_MAX + 1];
	kv_option_error_t error;

	running->differs[0] = '\0';
	for (size_t i = 0; i < KV_COUNT_OF(rows); i++) {
		kv_option_text(&rows[i], &running->options, now, sizeof now);
		kv_option_text(&rows[i], &fresh->options, then, sizeof then);
		if (rows[i].live) {
			kv_assert(kv_options_set(&kvd_option_table, rows[i].name, then, &running->options,
						 running->sources, &error) == KV_OK);
			running->sources[i] = fresh->sources[i];
		} else if (strcmp(now, then) != 0) {
			kv_text_addf(&waits, "%s%s", waits.len ? ", " : "", rows[i].name);
		}
	}
	if (waits.len) {
		kv_text_addf(&waits, ": changed, and waits for the next start");
	}
}

int kvd_describe(kvd_action_t action)
{
	char wire[32];

	switch (action) {
	case KVD_VERSION_ONLY:
		snprintf(wire, sizeof wire, " wire %u", KV_WIRE_VERSION);
		kv_version_print("kvd", wire);
		break;
	case KVD_HELP:
		printf("kvd: KV cache store and transfer daemon for LLM inference\n\n"
		       "usage: kvd [--config FILE] [--NAME=VALUE ...]\n"
		       "  --check-config       read the configuration, say what is wrong, start nothing\n"
		       "  --describe-options   every option with its default and meaning\n"
		       "  --options-page       the same as Markdown (docs/options.md)\n"
		       "  --sample-config      a configuration file with every default\n"
		       "  --version            print the version\n"
		       "  --help               print this\n\n"
		       "Order: default < file < environment (KVD_CPU_SIZE) < command line (--cpu.size=4GiB).\n"
		       "SIGHUP reads all three again: what is live changes, the rest waits for the next start. An "
		       "invalid\n"
		       "file changes nothing, and a crash restarts with what was found valid last. SIGUSR2 replaces "
		       "kvd by "
		       "the\n"
		       "program that is installed now; blocks in GPU memory stay (docs/upgrade.md).\n");
		break;
	case KVD_PAGE:
		printf("# Options\n\n"
		       "<!-- Made by `kvd --options-page` from daemon/options/options.c. Change that, then `make "
		       "docs`. -->\n\n"
		       "Each option with its values and its default. `cpu.size` is `size` in the group `cpu` of the file "
		       "(`conf/kvd.conf`), `KVD_CPU_SIZE` in the\n"
		       "environment and `--cpu.size=4GiB` on the command line; the later source wins. `kvctl config` shows "
		       "what is in force, and its source.\n"
		       "Sizes have a unit (`64KiB`, `1.5GiB`, `2TB`) or are bytes; durations have one (`250us`, `20ms`, "
		       "`1.5s`, `10m`, `2h`); commas part the words of a list.\n"
		       "*live*: changes when the daemon gets SIGHUP. All others wait for the next start.\n");
		kv_options_page(&kvd_option_table, stdout);
		break;
	case KVD_SAMPLE:
		kv_options_sample(&kvd_option_table, stdout);
		break;
	default:
		kv_options_describe(&kvd_option_table, stdout);
		break;
	}

	return fflush(stdout) == 0 ? 0 : kv_status_exit_code(KV_ERR_IO);
}
