/* STATUS, TRANSFERS, STATS, CHECK and CONFIG as JSON. A document speaks of the asker's namespace and of the daemon as a
 * whole, never of another namespace. */
#include "io/disk_attach.h"
#include "io/gpu.h"
#include "io/members/member_table.h"
#include "io/members/slabs.h"
#include "io/members/writers.h"
#include "io/net.h"
#include "io/sessions/document.h"
#include "process.h"

#include "kv/text.h"
#include "kvs/pool.h"

#include <stdio.h>

#define FD_SLACK 64u /* slot files, metadata files and HTTP connections come and go */

/* ---- status ---------------------------------------------------------------------------------- */

static void put_usage(kv_text_t *text, kvs_tier_t *tier, const char *state)
{
	kvs_usage_t u;

	kvs_usage(tier, &u);
	kv_text_addf(text,
		     "\"medium\":\"%s\",\"limit_bytes\":%llu,\"charged_bytes\":%llu,\"slots\":%llu,\"free_"
		     "slots\":%llu,"
		     "\"used_slots\":%llu,\"quarantined_slots\":%llu,\"used_bytes\":%llu,\"quarantined_bytes\":%llu,"
		     "\"in_flight\":%u,\"state\":\"%s\"",
		     tier->ops->medium, (unsigned long long)u.limit_bytes, (unsigned long long)u.charged_bytes,
		     (unsigned long long)u.slots, (unsigned long long)u.free_slots, (unsigned long long)u.used_slots,
		     (unsigned long long)u.quarantined_slots, (unsigned long long)u.used_bytes,
		     (unsigned long long)u.quarantined_bytes, kvs_in_flight(tier), state);
}

/* `off`: NULL is a tier that is off, and not one that is not there. */
static void put_tier(kv_text_t *text, const char *name, kvs_tier_t *tier, int off)
{
	kvs_tier_state_t state;

	if (!tier) {
		kv_text_addf(text, off ? "\"%s\":{\"state\":\"off\"}" : "\"%s\":null", name);
		return;
	}
	kvs_tier_state(tier, &state);
	kv_text_addf(text, "\"%s\":{", name);
	put_usage(text, tier, kvs_health_name(state.health));
	kv_text_addf(text, "}");
}

static void put_gpus(const kvd_host_t *host, kv_text_t *text)
{
	static const char *const states[] = {[KVD_GPU_OK] = "ok", [KVD_GPU_FILLING] = "filling", [KVD_GPU_OFF] = "off"};
	kvd_gpu_info_t gpu;

	kv_text_addf(text, "\"gpu\":[");
	for (uint32_t i = 0; kvd_gpu_describe(host, i, &gpu); i++) {
		kv_text_addf(text,
			     "%s{\"device\":\"%s\",\"slabs\":%u,\"wanted_slabs\":%u,\"adopted_blocks\":%llu,"
			     "\"reason\":",
			     i > 0 ? "," : "", gpu.uuid, gpu.slabs, gpu.wanted, (unsigned long long)gpu.adopted);
		kv_text_json(text, gpu.why);
		kv_text_addf(text, ",");
		if (gpu.pool) {
			put_usage(text, gpu.pool, states[gpu.state]);
		} else {
			kv_text_addf(text, "\"state\":\"%s\"", states[gpu.state]);
		}
		kv_text_addf(text, "}");
	}
	kv_text_addf(text, "]");
}

/* Block sizes of the namespace, and the slabs each has. */
static void put_classes(kvd_host_t *host, const kvd_namespace_t *ns, kv_text_t *text)
{
	kvs_class_info_t look;
	const char *comma = "";

	kv_text_addf(text, "\"slabs\":[");
	for (uint32_t i = 0; kvs_pool_class(host->cpu, i, &look) == KV_OK; i++) {
		if (strcmp(look.ns, ns->name) != 0) {
			continue;
		}
		kv_text_addf(text,
			     "%s{\"block_bytes\":%u,\"slabs\":%u,\"bytes\":%llu,\"touched_bytes\":%llu,\"slots\":%llu,"
			     "\"free_slots\":%llu}",
			     comma, look.block_bytes, look.slabs, (unsigned long long)look.bytes,
			     (unsigned long long)look.ready_bytes, (unsigned long long)look.slots,
			     (unsigned long long)look.free_slots);
		comma = ",";
	}
	kv_text_addf(text, "],");
}

static kvs_health_t disk_state(kvd_host_t *host, char *sentence, size_t cap)
{
	kvs_tier_state_t state = {.health = KVS_HEALTH_OK};

	if (host->disk) {
		kvs_tier_state(host->disk, &state);
	} else if (kvd_disk_attach_reason(host)) {
		state.health = KVS_HEALTH_OFF;
		snprintf(state.reason, sizeof state.reason, "%s", kvd_disk_attach_reason(host));
	}
	snprintf(sentence, cap, "the disk tier is %s: %s; it is tried again", kvs_health_name(state.health),
		 state.reason);

	return state.health;
}

/* What is not as good as it could be, one sentence each. */
static void put_degraded(kvd_host_t *host, kv_text_t *text)
{
	const kv_metrics_t *m = &host->metrics;
	char disk[192];
	const kvs_health_t health = disk_state(host, disk, sizeof disk);
	char differs[KVD_DIFFERS_MAX + 64];
	char net[KVD_NET_REASON_MAX], gpu[KVD_GPU_REASON_MAX];
	const struct {
		int is;
		const char *sentence;
	} facts[] = {
		{host->setup->differs[0] != '\0', differs},
		{host->options->cpu_huge_pages != KVS_HUGE_OFF && kvs_pool_slab_count(host->cpu) > 0 &&
			 kv_metric_get(m, KV_M_CPU_HUGE_PAGES) == 0,
		 "the CPU pool is not on huge pages"},
		{!host->options->nvme_path[0], "there is no disk tier: nothing survives a restart"},
		{kv_metric_get(m, KV_M_DISK_FALLBACK) != 0, "io_uring is not available: the disk tier uses plain I/O"},
		{health != KVS_HEALTH_OK, disk},
		{kv_metric_get(m, KV_M_DISK_UNREADABLE) != 0,
		 "slots of the disk cannot be read: their blocks, and those below them, are no hits until they can"},
		{host->disk && !host->options->nvme_sync, "nvme.sync is off: nothing is really durable"},
		{host->accept_paused, "no descriptors are left for new sessions"},
		{host->setup->restarts > 0, "the daemon has crashed and was restarted"},
		{kvd_net_is_degraded(host, net, sizeof net), net},
		{kvd_gpu_is_degraded(host, gpu, sizeof gpu), gpu},
	};
	const char *comma = "";

	snprintf(differs, sizeof differs, "the configuration file is not what runs: %s", host->setup->differs);
	kv_text_addf(text, "\"degraded\":[");
	for (size_t i = 0; i < KV_COUNT_OF(facts); i++) {
		if (facts[i].is) {
			kv_text_addf(text, "%s", comma);
			kv_text_json(text, facts[i].sentence);
			comma = ",";
		}
	}
	kv_text_addf(text, "]");
}

static void put_sessions(kvd_host_t *host, const kvd_namespace_t *ns, kv_text_t *text)
{
	uint64_t now = kv_now_ns(host->env);
	const char *comma = "";

	kv_text_addf(text, ",\"sessions\":[");
	for (const kvd_session_t *s = host->sessions; s && text->len < text->cap * 3 / 4; s = s->next) {
		if (s->ns != ns) {
			continue;
		}
		kv_text_addf(text, "%s{\"id\":%llu,\"program\":", comma, (unsigned long long)s->id);
		kv_text_json(text, s->program);
		kv_text_addf(text,
			     ",\"pid\":%d,\"uid\":%u,\"member\":%llu,\"age_ns\":%llu,\"requests\":%llu,\"queued_"
			     "bytes\":%zu,\"match_only\":%s}",
			     (int)s->pid, (unsigned)s->uid, (unsigned long long)kvd_member_entry_id(s->member),
			     (unsigned long long)(now - s->opened_ns), (unsigned long long)s->requests, s->out_bytes,
			     s->matching && !s->member ? "true" : "false");
		comma = ",";
	}
	kv_text_addf(text, "]");
}

static uint64_t sum_of(const kv_metrics_t *m, uint32_t first, uint32_t end, kv_ns_metric_t id)
{
	uint64_t sum = 0;

	for (uint32_t n = first; n < end; n++) {
		sum += kv_ns_metric_get(m, n, id);
	}

	return sum;
}

/* What the prompts of namespaces [first, end) found. No rate before the first prompt. */
static void put_hits(kv_text_t *text, const kv_metrics_t *m, uint32_t first, uint32_t end)
{
	const uint64_t asked = sum_of(m, first, end, KV_NM_QUERY_TOKENS);
	const uint64_t gpu = sum_of(m, first, end, KV_NM_HIT_GPU_TOKENS);
	const uint64_t cpu = sum_of(m, first, end, KV_NM_HIT_CPU_TOKENS);
	const uint64_t disk = sum_of(m, first, end, KV_NM_HIT_DISK_TOKENS);
	char rate[16] = "null";

	kv_text_addf(text, "{\"lookups\":%llu,\"query_tokens\":%llu,\"hit_gpu_tokens\":%llu,\"hit_cpu_tokens\":%llu,",
		     (unsigned long long)sum_of(m, first, end, KV_NM_LOOKUPS), (unsigned long long)asked,
		     (unsigned long long)gpu, (unsigned long long)cpu);
	kv_text_addf(text, "\"hit_disk_tokens\":%llu,", (unsigned long long)disk);
	if (asked) {
		snprintf(rate, sizeof rate, "%.4f", (double)(gpu + cpu + disk) / (double)asked);
	}
	kv_text_addf(text, "\"hit_rate\":%s,\"missed_tokens\":{", rate);
	for (kv_ns_metric_t id = KV_NM_MISS_ABSENT_TOKENS; id <= KV_NM_MISS_UNREADABLE_TOKENS; id++) {
		const char *reason = strchr(kv_ns_metric_infos[id].name, '"') + 1; /* of {reason="absent"} */

		kv_text_addf(text, "%s\"%.*s\":%llu", id > KV_NM_MISS_ABSENT_TOKENS ? "," : "",
			     (int)strcspn(reason, "\""), reason, (unsigned long long)sum_of(m, first, end, id));
	}
	kv_text_addf(text, "}}");
}

/* Room for what a snprintf-like function of another part writes; its answer is added to len, so that what is too long
 * is refused as a whole. */
static char *remaining_text(kv_text_t *text, size_t *p_cap)
{
	*p_cap = text->len < text->cap ? text->cap - text->len : 0;

	return *p_cap ? text->out + text->len : NULL;
}

static void status_json(kvd_host_t *host, const kvd_namespace_t *ns, uint32_t detail, kv_text_t *text)
{
	uint64_t now = kv_now_ns(host->env);
	size_t cap;
	char *out;

	kv_text_addf(text,
		     "{\"daemon\":{\"version\":\"%s\",\"namespace\":\"%s\",\"incarnation\":%llu,\"uptime_ns\":%llu,"
		     "\"restarts\":%u,\"sessions\":%u},\"tiers\":{",
		     KVD_VERSION, ns->name, (unsigned long long)host->incarnation,
		     (unsigned long long)(now - host->started_ns), host->setup->restarts, host->session_count);
	put_tier(text, "cpu", host->cpu, 0);
	kv_text_addf(text, ",");
	put_tier(text, "disk", host->disk, kvd_disk_attach_reason(host) != NULL);
	kv_text_addf(text, ",");
	put_gpus(host, text);
	kv_text_addf(text, "},");
	put_classes(host, ns, text);
	kv_text_addf(text, "\"hits\":{\"namespace\":");
	put_hits(text, &host->metrics, ns->id, ns->id + 1);
	kv_text_addf(text, ",\"total\":");
	put_hits(text, &host->metrics, 0, host->namespace_count);
	kv_text_addf(text, "},");
	put_degraded(host, text);
	/* A fault, as opposed to a fact of the machine or the configuration. */
	kv_text_addf(text, ",\"healthy\":%s,\"core\":",
		     host->accept_paused || kv_metric_get(&host->metrics, KV_M_DISK_STATE) > KVS_HEALTH_FULL ? "false"
													     : "true");
	out = remaining_text(text, &cap);
	text->len += kvd_core_status_json(host->core, ns->id, detail, out, cap);
	if (detail >= 2) {
		put_sessions(host, ns, text);
	}
	kv_text_addf(text, "}");
}

/* ---- check ----------------------------------------------------------------------------------- */

static void put_check(kv_text_t *text, const char *name, const char *promise, int ok, const char *detail)
{
	kv_text_addf(text, ",{\"name\":\"%s\",\"promise\":\"%s\",\"ok\":%s,\"detail\":", name, promise,
		     ok ? "true" : "false");
	kv_text_json(text, detail);
	kv_text_addf(text, "}");
}

static uint32_t check_tier(kv_text_t *text, const char *name, kvs_tier_t *tier)
{
	char detail[256] = "";
	kv_status_t status;

	if (!tier) {
		return 0;
	}
	status = kvs_check(tier, detail, sizeof detail);
	put_check(text, name, "P4", status == KV_OK, detail);

	return status != KV_OK;
}

/* The list, the gauge and the members must tell the same story. */
static uint32_t check_sessions(kvd_host_t *host, kv_text_t *text)
{
	uint32_t sessions = 0, joined = 0, attached = 0;
	size_t bytes = 0;
	char detail[160];
	int ok;

	for (const kvd_session_t *s = host->sessions; s; s = s->next) {
		sessions++;
		bytes += s->in_cap;
		joined += s->member != NULL && kvd_member_entry_session(s->member) == s;
	}
	attached = kvd_members_count_attached(host);
	ok = sessions == host->session_count && bytes == host->receive_bytes && joined == attached;
	snprintf(detail, sizeof detail, "%u sessions, %u of them members, %zu bytes of receive buffers", sessions,
		 joined, bytes);
	put_check(text, "sessions", "P4", ok, detail);

	return !ok;
}

/* What is open beyond a session's socket and a member's two must not grow: the daemon's own are counted once it has
 * started. */
static uint32_t check_fds(kvd_host_t *host, kv_text_t *text)
{
	uint32_t open = kvd_process_count_fds();
	uint32_t slabs = kvd_slabs_count_held(host) - host->own_slabs;
	uint32_t known = host->own_fds + host->session_count + kvd_members_count_fds(host) + 2 * slabs +
			 kvd_gpu_count_fds(host) + kvd_writers_count_fds(host);
	uint32_t slack = FD_SLACK;
	char detail[160];
	int ok = open <= known + slack;

	snprintf(detail, sizeof detail, "%u descriptors open, %u accounted for (and up to %u of storage and HTTP)",
		 open, known, slack);
	put_check(text, "descriptors", "P4", ok, detail);

	return !ok;
}

/* The core's list {"checks":[...]} goes on with ours. */
static uint32_t check_json(kvd_host_t *host, kv_text_t *text)
{
	uint32_t failed = 0;
	size_t cap;
	char *out = remaining_text(text, &cap);

	text->len += kvd_core_check_json(host->core, out, cap, &failed);
	kv_assert(!kv_text_fits(text) || (text->len > 2 && strcmp(text->out + text->len - 2, "]}") == 0));
	text->len -= 2;
	failed += check_tier(text, "cpu", host->cpu);
	for (uint32_t m = 1; m < host->pool_count; m++) {
		failed += check_tier(text, "gpu", host->pool[m]);
	}
	failed += check_tier(text, "disk", host->disk);
	failed += check_sessions(host, text);
	failed += check_fds(host, text);
	kv_text_addf(text, "]}");

	return failed;
}

/* ---- the requests ---------------------------------------------------------------------------- */

kv_status_t kvd_request_document(kvd_host_t *host, kvd_call_t *call)
{
	kv_text_t text = kv_text(host->text, KVD_TEXT_SCRATCH);
	kv_slice_t json;
	uint32_t failed = 0;
	size_t cap;
	char *out;

	switch (call->header->code) {
	case KV_CODE_STATUS:
		status_json(host, call->session->ns, call->ask->status.detail, &text);
		break;
	case KV_CODE_CHECK:
		failed = check_json(host, &text);
		break;
	case KV_CODE_TRANSFERS:
		out = remaining_text(&text, &cap);
		text.len += kvd_core_transfers_json(host->core, call->session->ns->id, out, cap);
		break;
	case KV_CODE_PEERS:
		kvd_net_json(host, &text);
		break;
	case KV_CODE_STATS:
		out = remaining_text(&text, &cap);
		text.len += kv_metrics_json(&host->metrics, call->session->ns->id, out, cap);
		break;
	default:
		out = remaining_text(&text, &cap);
		text.len += kv_options_json(&kvd_option_table, host->options, host->setup->sources, out, cap);
		break;
	}
	if (!kv_text_fits(&text)) {
		call->detail = "the document is over its limit; ask for less detail";
		return KV_ERR_LIMIT;
	}
	json = (kv_slice_t){(const uint8_t *)host->text, (uint32_t)text.len};
	switch (call->header->code) {
	case KV_CODE_STATUS:
		call->reply->status_reply.json = json;
		break;
	case KV_CODE_CHECK:
		call->reply->check_reply = (kv_msg_check_reply_t){failed, json};
		break;
	case KV_CODE_TRANSFERS:
		call->reply->transfers_reply.json = json;
		break;
	case KV_CODE_PEERS:
		call->reply->peers_reply.json = json;
		break;
	case KV_CODE_STATS:
		call->reply->stats_reply.json = json;
		break;
	default:
		call->reply->config_reply.json = json;
		break;
	}

	return KV_OK;
}
