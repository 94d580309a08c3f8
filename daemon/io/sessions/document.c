/* STATUS, TRANSFERS, STATS, CHECK and CONFIG as JSON. A document speaks of the asker's namespace and of the daemon as a
 * whole, never of another namespace. */
#include "io/sessions/disk_attach.h"
#include "io/base/gpu.h"
#include "io/members/member_table.h"
#include "io/members/slabs.h"
#include "io/members/writers.h"
#include "io/sessions/net.h"
#include "io/sessions/document.h"
#include "base/process.h"

#include "kv/json.h"
#include "kv/system.h"
#include "kvs/pool.h"

#include <stdio.h>

#define FD_SLACK 64u /* metadata files and HTTP connections come and go */

/* ---- status ---------------------------------------------------------------------------------- */

static void put_usage(kv_json_t *json, kvs_tier_t *tier, const char *state)
{
	kvs_usage_t u;

	kvs_usage(tier, &u);
	kv_json_text(json, "medium", tier->ops->medium);
	kv_json_numbers(json, {"limit_bytes", u.limit_bytes}, {"charged_bytes", u.charged_bytes}, {"slots", u.slots},
			{"free_slots", u.free_slots}, {"used_slots", u.used_slots},
			{"quarantined_slots", u.quarantined_slots}, {"used_bytes", u.used_bytes},
			{"quarantined_bytes", u.quarantined_bytes}, {"in_flight", kvs_in_flight(tier)});
	kv_json_text(json, "state", state);
}

/* `off`: NULL is a tier that is off, and not one that is not there. */
static void put_tier(kv_json_t *json, const char *name, kvs_tier_t *tier, int off)
{
	kvs_tier_state_t state;

	if (!tier && !off) {
		kv_json_raw(json, name, "null");
		return;
	}
	kv_json_open(json, name, '{');
	if (tier) {
		kvs_tier_state(tier, &state);
		put_usage(json, tier, kvs_health_name(state.health));
	} else {
		kv_json_text(json, "state", "off");
	}
	kv_json_close(json, '}');
}

static void put_gpus(const kvd_host_t *host, kv_json_t *json)
{
	static const char *const states[] = {[KVD_GPU_OK] = "ok", [KVD_GPU_FILLING] = "filling", [KVD_GPU_OFF] = "off"};
	kvd_gpu_info_t gpu;

	kv_json_open(json, "gpu", '[');
	for (uint32_t i = 0; kvd_gpu_describe(host, i, &gpu); i++) {
		kv_json_open(json, NULL, '{');
		kv_json_text(json, "device", gpu.uuid);
		kv_json_numbers(json, {"slabs", gpu.slabs}, {"wanted_slabs", gpu.wanted},
				{"adopted_blocks", gpu.adopted});
		kv_json_text(json, "reason", gpu.why);
		if (gpu.pool) {
			put_usage(json, gpu.pool, states[gpu.state]);
		} else {
			kv_json_text(json, "state", states[gpu.state]);
		}
		kv_json_close(json, '}');
	}
	kv_json_close(json, ']');
}

/* Block sizes of the namespace, and the slabs each has. */
static void put_classes(kvd_host_t *host, const kvd_namespace_t *ns, kv_json_t *json)
{
	kvs_class_info_t look;

	kv_json_open(json, "slabs", '[');
	for (uint32_t i = 0; kvs_pool_class(host->cpu, i, &look) == KV_OK; i++) {
		if (strcmp(look.ns, ns->name) != 0) {
			continue;
		}
		kv_json_open(json, NULL, '{');
		kv_json_numbers(json, {"block_bytes", look.block_bytes}, {"slabs", look.slabs}, {"bytes", look.bytes},
				{"touched_bytes", look.ready_bytes}, {"slots", look.slots},
				{"free_slots", look.free_slots});
		kv_json_close(json, '}');
	}
	kv_json_close(json, ']');
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

/* What is not as good as it could be, one sentence each. 1: nothing of it is for an operator to mend, as opposed to a
 * fact of the machine or the configuration. */
static int put_degraded(kvd_host_t *host, const kvd_namespace_t *ns, kv_json_t *json)
{
	const kv_metrics_t *m = &host->metrics;
	char disk[192];
	const kvs_health_t health = disk_state(host, disk, sizeof disk);
	char differs[KVD_DIFFERS_MAX + 64];
	char why[KV_REFUSED_TEXT], sessions[KV_REFUSED_TEXT + 64];
	char net[KVD_NET_REASON_MAX], gpu[KVD_GPU_REASON_MAX];
	const char *refusal = kvs_pool_refusal(host->cpu);
	char pool[KV_REFUSED_TEXT + 64];
	int healthy = 1;
	const struct {
		int is, is_fault;
		const char *sentence;
	} facts[] = {
		{host->setup->differs[0] != '\0', 0, differs},
		{host->options->cpu_huge_pages != KVS_HUGE_OFF && kvs_pool_slab_count(host->cpu) > 0 &&
			 kv_metric_get(m, KV_M_CPU_HUGE_PAGES) == 0,
		 0, "the CPU pool is not on huge pages"},
		{!host->options->nvme_path[0], 0, "there is no disk tier: nothing survives a restart"},
		{kv_metric_get(m, KV_M_DISK_FALLBACK) != 0, 0,
		 "io_uring is not available: the disk tier uses plain I/O"},
		{health != KVS_HEALTH_OK, 1, disk},
		{kv_metric_get(m, KV_M_DISK_UNREADABLE) != 0, 0,
		 "slots of the disk cannot be read: their blocks, and those below them, are no hits until they can"},
		{host->disk && !host->options->nvme_sync, 0, "nvme.sync is off: nothing is really durable"},
		{host->accept_paused != 0, 1, sessions},
		{host->few_files[0] != '\0', host->lacks_files, host->few_files},
		{refusal[0] != '\0', 1, pool},
		{host->setup->restarts > 0, 0, "the daemon has crashed and was restarted"},
		{ns->mirror_refused, 1,
		 "there is no memory for the mirror, whose size follows from index.max_blocks: no engine can attach"},
		{kvd_core_lacks_spaces(host->core, ns->id), 1,
		 "engines use all spaces that limits.spaces permits: further models, weights and adapters get no cache"},
		{kvd_net_is_degraded(host, net, sizeof net), 0, net},
		{kvd_gpu_is_degraded(host, gpu, sizeof gpu), 0, gpu},
	};

	snprintf(differs, sizeof differs, "the configuration file is not what runs: %s", host->setup->differs);
	snprintf(sessions, sizeof sessions, "new sessions wait: %s",
		 kv_refused_text("accept4", host->accept_paused, why, sizeof why));
	snprintf(pool, sizeof pool, "the pool has fewer slabs than cpu.size permits: %s", refusal);
	kv_json_open(json, "degraded", '[');
	for (size_t i = 0; i < KV_COUNT_OF(facts); i++) {
		if (facts[i].is) {
			kv_json_text(json, NULL, facts[i].sentence);
			healthy &= !facts[i].is_fault;
		}
	}
	kv_json_close(json, ']');

	return healthy;
}

static void put_sessions(kvd_host_t *host, const kvd_namespace_t *ns, kv_json_t *json)
{
	uint64_t now = kv_now_ns(host->env);

	kv_json_open(json, "sessions", '[');
	for (const kvd_session_t *s = host->sessions; s && json->text.len < json->text.cap * 3 / 4; s = s->next) {
		if (s->ns != ns) {
			continue;
		}
		kv_json_open(json, NULL, '{');
		kv_json_u64(json, "id", s->id);
		kv_json_text(json, "program", s->program);
		kv_json_numbers(json, {"pid", (uint64_t)s->pid}, {"uid", s->uid},
				{"member", kvd_member_entry_id(s->member)}, {"age_ns", now - s->opened_ns},
				{"requests", s->requests}, {"queued_bytes", s->out_bytes});
		kv_json_bool(json, "match_only", s->matching && !s->member);
		kv_json_close(json, '}');
	}
	kv_json_close(json, ']');
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
static void put_hits(kv_json_t *json, const char *name, const kv_metrics_t *m, uint32_t first, uint32_t end)
{
	const uint64_t asked = sum_of(m, first, end, KV_NM_QUERY_TOKENS);
	const uint64_t gpu = sum_of(m, first, end, KV_NM_HIT_GPU_TOKENS);
	const uint64_t cpu = sum_of(m, first, end, KV_NM_HIT_CPU_TOKENS);
	const uint64_t disk = sum_of(m, first, end, KV_NM_HIT_DISK_TOKENS);
	char rate[16] = "null", reason[64] = "";

	kv_json_open(json, name, '{');
	kv_json_numbers(json, {"lookups", sum_of(m, first, end, KV_NM_LOOKUPS)}, {"query_tokens", asked},
			{"hit_gpu_tokens", gpu}, {"hit_cpu_tokens", cpu}, {"hit_disk_tokens", disk});
	if (asked) {
		snprintf(rate, sizeof rate, "%.4f", (double)(gpu + cpu + disk) / (double)asked);
	}
	kv_json_raw(json, "hit_rate", rate);
	kv_json_open(json, "missed_tokens", '{');
	for (kv_ns_metric_t id = KV_NM_MISS_ABSENT_TOKENS; id <= KV_NM_MISS_NOT_ADMITTED_TOKENS; id++) {
		sscanf(strchr(kv_ns_metric_infos[id].name, '"'), "\"%63[^\"]", reason); /* of {reason="absent"} */
		kv_json_u64(json, reason, sum_of(m, first, end, id));
	}
	kv_json_close(json, '}');
	kv_json_close(json, '}');
}

/* Room for what a snprintf-like function of another part writes; its answer is added to len, so that what is too long
 * is refused as a whole. */
static char *remaining_text(kv_text_t *text, size_t *p_cap)
{
	*p_cap = text->len < text->cap ? text->cap - text->len : 0;

	return *p_cap ? text->out + text->len : NULL;
}

static void status_json(kvd_host_t *host, const kvd_namespace_t *ns, uint32_t detail, kv_json_t *json)
{
	int healthy;
	size_t cap;
	char *out;

	kv_json_open(json, NULL, '{');
	kv_json_open(json, "daemon", '{');
	kv_json_text(json, "version", KVD_VERSION);
	kv_json_text(json, "namespace", ns->name);
	kv_json_numbers(json, {"incarnation", host->incarnation},
			{"uptime_ns", kv_now_ns(host->env) - host->started_ns}, {"restarts", host->setup->restarts},
			{"sessions", host->session_count});
	kv_json_close(json, '}');
	kv_json_open(json, "tiers", '{');
	put_tier(json, "cpu", host->cpu, 0);
	put_tier(json, "disk", host->disk, kvd_disk_attach_reason(host) != NULL);
	put_gpus(host, json);
	kv_json_close(json, '}');
	put_classes(host, ns, json);
	kv_json_open(json, "hits", '{');
	put_hits(json, "namespace", &host->metrics, ns->id, ns->id + 1);
	put_hits(json, "total", &host->metrics, 0, host->namespace_count);
	kv_json_close(json, '}');
	healthy = put_degraded(host, ns, json);
	kv_json_bool(json, "healthy", healthy);
	kv_json_raw(json, "core", "");
	out = remaining_text(&json->text, &cap);
	json->text.len += kvd_core_status_json(host->core, ns->id, detail, out, cap);
	if (detail >= 2) {
		put_sessions(host, ns, json);
	}
	kv_json_close(json, '}');
}

/* ---- check ----------------------------------------------------------------------------------- */

static void put_check(kv_json_t *json, const char *name, int ok, const char *detail)
{
	kv_json_open(json, NULL, '{');
	kv_json_text(json, "name", name);
	kv_json_text(json, "promise", "P4");
	kv_json_bool(json, "ok", ok);
	kv_json_text(json, "detail", detail);
	kv_json_close(json, '}');
}

static uint32_t check_tier(kv_json_t *json, const char *name, kvs_tier_t *tier)
{
	char detail[256] = "";
	kv_status_t status;

	if (!tier) {
		return 0;
	}
	status = kvs_check(tier, detail, sizeof detail);
	put_check(json, name, status == KV_OK, detail);

	return status != KV_OK;
}

/* The list, the gauge and the members must tell the same story. */
static uint32_t check_sessions(kvd_host_t *host, kv_json_t *json)
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
	put_check(json, "sessions", ok, detail);

	return !ok;
}

/* What is open beyond a session's socket and a member's two must not grow: the daemon's own are counted once it has
 * started. */
static uint32_t check_fds(kvd_host_t *host, kv_json_t *json)
{
	uint32_t open = kvd_process_count_fds();
	uint32_t slabs = kvd_slabs_count_held(host) - host->own_slabs;
	uint32_t known = host->own_fds + host->session_count + kvd_members_count_fds(host) + 2 * slabs +
			 kvd_gpu_count_fds(host) + kvd_writers_count_fds(host) + kvd_slabs_count_files(host);
	uint32_t slack = FD_SLACK;
	char detail[160];
	int ok = open <= known + slack;

	snprintf(detail, sizeof detail, "%u descriptors open, %u accounted for (and up to %u of storage and HTTP)",
		 open, known, slack);
	put_check(json, "descriptors", ok, detail);

	return !ok;
}

/* The core's list {"checks":[...]} goes on with ours. */
static uint32_t check_json(kvd_host_t *host, kv_json_t *json)
{
	kv_text_t *text = &json->text;
	uint32_t failed = 0;
	size_t cap;
	char *out = remaining_text(text, &cap);

	text->len += kvd_core_check_json(host->core, out, cap, &failed);
	kv_assert(!kv_text_fits(text) || (text->len > 2 && strcmp(text->out + text->len - 2, "]}") == 0));
	text->len -= 2;
	json->comma = 1;
	failed += check_tier(json, "cpu", host->cpu);
	for (uint32_t m = 1; m < host->pool_count; m++) {
		failed += check_tier(json, "gpu", host->pool[m]);
	}
	failed += check_tier(json, "disk", host->disk);
	failed += check_sessions(host, json);
	failed += check_fds(host, json);
	kv_json_close(json, ']');
	kv_json_close(json, '}');

	return failed;
}

/* ---- the requests ---------------------------------------------------------------------------- */

kv_status_t kvd_request_document(kvd_host_t *host, kvd_call_t *call)
{
	kv_json_t json = kv_json(host->text, KVD_TEXT_SCRATCH);
	kv_text_t *text = &json.text;
	kv_slice_t document;
	uint32_t failed = 0;
	size_t cap;
	char *out;

	switch (call->header->code) {
	case KV_CODE_STATUS:
		status_json(host, call->session->ns, call->ask->status.detail, &json);
		break;
	case KV_CODE_CHECK:
		failed = check_json(host, &json);
		break;
	case KV_CODE_TRANSFERS:
		out = remaining_text(text, &cap);
		text->len += kvd_core_transfers_json(host->core, call->session->ns->id, out, cap);
		break;
	case KV_CODE_PEERS:
		kvd_net_json(host, &json);
		break;
	case KV_CODE_STATS:
		out = remaining_text(text, &cap);
		text->len += kv_metrics_json(&host->metrics, call->session->ns->id, out, cap);
		break;
	default:
		out = remaining_text(text, &cap);
		text->len += kv_options_json(&kvd_option_table, host->options, host->setup->sources, out, cap);
		break;
	}
	if (!kv_text_fits(text)) {
		call->detail = "the document is over its limit; ask for less detail";
		return KV_ERR_LIMIT;
	}
	document = (kv_slice_t){(const uint8_t *)host->text, (uint32_t)text->len};
	switch (call->header->code) {
	case KV_CODE_STATUS:
		call->reply->status_reply.json = document;
		break;
	case KV_CODE_CHECK:
		call->reply->check_reply = (kv_msg_check_reply_t){failed, document};
		break;
	case KV_CODE_TRANSFERS:
		call->reply->transfers_reply.json = document;
		break;
	case KV_CODE_PEERS:
		call->reply->peers_reply.json = document;
		break;
	case KV_CODE_STATS:
		call->reply->stats_reply.json = document;
		break;
	default:
		call->reply->config_reply.json = document;
		break;
	}

	return KV_OK;
}
