/* The metric table as numbers, Prometheus text and JSON. */
#include "kv/metric.h"

#include <string.h>

const kv_metric_info_t kv_metric_infos[KV_METRIC_COUNT] = {
#define ROW(NAME, metric_name, metric_type, metric_help)                                                               \
	[KV_M_##NAME] = {.name = #metric_name, .type = metric_type, .help = metric_help},
	KV_METRIC_LIST(ROW)
#undef ROW
};

const kv_metric_info_t kv_ns_metric_infos[KV_NS_METRIC_COUNT] = {
#define ROW(NAME, metric_name, metric_type, metric_help)                                                               \
	[KV_NM_##NAME] = {.name = #metric_name, .type = metric_type, .help = metric_help},
	KV_NS_METRIC_LIST(ROW)
#undef ROW
};

void kv_ns_metrics_open(kv_metrics_t *m, const char *name)
{
	uint32_t n = atomic_load_explicit(&m->ns_count, memory_order_relaxed);
	size_t len = strlen(name);

	if (n < KV_METRIC_NAMESPACES && len < KV_METRIC_NS_NAME) {
		memcpy(m->ns[n].name, name, len + 1);
		atomic_store_explicit(&m->ns_count, n + 1, memory_order_release);
	}
}

/* Upper bound of bucket i: 1 us * 2^i. What is above the last one is only in the count. */
static uint64_t bound_ns(unsigned i)
{
	return UINT64_C(1000) << i;
}

void kv_histogram_observe_ns(kv_histogram_t histogram, uint64_t ns)
{
	unsigned i = 0;

	if (ns > 1000) {
		i = 64u - (unsigned)__builtin_clzll((ns - 1) / 1000);
	}
	if (i < KV_HISTOGRAM_BUCKETS) {
		atomic_fetch_add_explicit(&histogram.bucket[i], 1, memory_order_relaxed);
	}
	atomic_fetch_add_explicit(histogram.sum_ns, ns, memory_order_relaxed);
	atomic_fetch_add_explicit(histogram.count, 1, memory_order_relaxed);
}

/* One histogram as read: cumulative buckets and a count that is never below them, whatever other threads do
 * meanwhile. */
typedef struct snapshot {
	uint64_t below[KV_HISTOGRAM_BUCKETS];
	uint64_t count;
	uint64_t sum_ns;
} snapshot_t;

static void histogram_read(kv_histogram_t histogram, snapshot_t *h)
{
	uint64_t total = 0;

	for (unsigned i = 0; i < KV_HISTOGRAM_BUCKETS; i++) {
		total += atomic_load_explicit(&histogram.bucket[i], memory_order_relaxed);
		h->below[i] = total;
	}
	h->count = atomic_load_explicit(histogram.count, memory_order_relaxed);
	if (h->count < total) {
		h->count = total;
	}
	h->sum_ns = atomic_load_explicit(histogram.sum_ns, memory_order_relaxed);
}

/* The bound of the bucket in which that share of the values lies; the last bound for what is above all of them. */
static uint64_t quantile_ns(const snapshot_t *h, unsigned percent)
{
	uint64_t rank = h->count / 100 * percent + (h->count % 100 * percent + 99) / 100;

	if (h->count == 0) {
		return 0;
	}
	for (unsigned i = 0; i < KV_HISTOGRAM_BUCKETS; i++) {
		if (h->below[i] >= rank) {
			return bound_ns(i);
		}
	}

	return bound_ns(KV_HISTOGRAM_BUCKETS - 1);
}

static void seconds(kv_text_t *text, uint64_t ns)
{
	kv_text_addf(text, "%llu.%09llu", (unsigned long long)(ns / 1000000000u),
		     (unsigned long long)(ns % 1000000000u));
}

void kv_histogram_write(kv_text_t *text, const char *name, kv_histogram_t histogram)
{
	snapshot_t h;

	histogram_read(histogram, &h);
	for (unsigned i = 0; i < KV_HISTOGRAM_BUCKETS; i++) {
		kv_text_addf(text, "%s_bucket{le=\"", name);
		seconds(text, bound_ns(i));
		kv_text_addf(text, "\"} %llu\n", (unsigned long long)h.below[i]);
	}
	kv_text_addf(text, "%s_bucket{le=\"+Inf\"} %llu\n%s_sum ", name, (unsigned long long)h.count, name);
	seconds(text, h.sum_ns);
	kv_text_addf(text, "\n%s_count %llu\n", name, (unsigned long long)h.count);
}

/* To read: what is pointed to is not written through it. */
static kv_histogram_t histogram_of(const kv_metrics_t *m, unsigned id)
{
	kv_metrics_t *values = (kv_metrics_t *)(uintptr_t)m;

	return (kv_histogram_t){&values->value[id], &values->sum_ns[id], values->bucket[id]};
}

int kv_metric_begins_family(const kv_metric_info_t *infos, unsigned id)
{
	const size_t len = kv_metric_family_len(&infos[id]);

	return id == 0 || kv_metric_family_len(&infos[id - 1]) != len ||
	       memcmp(infos[id - 1].name, infos[id].name, len) != 0;
}

static const char *const type_names[] = {"counter", "gauge", "histogram"};

void kv_metric_write_head(kv_text_t *text, const kv_metric_info_t *infos, unsigned id)
{
	const int len = (int)kv_metric_family_len(&infos[id]);
	const char *name = infos[id].name;

	if (kv_metric_begins_family(infos, id)) {
		kv_text_addf(text, "# HELP %.*s %s\n# TYPE %.*s %s\n", len, name, infos[id].help, len, name,
			     type_names[infos[id].type]);
	}
}

/* Does the name say the type? _total: a counter, _seconds: a histogram, all else a gauge. */
static int name_says_type(const kv_metric_info_t *info, size_t len)
{
	const int is_counter = len > 6 && memcmp(info->name + len - 6, "_total", 6) == 0;
	const int is_histogram = len > 8 && memcmp(info->name + len - 8, "_seconds", 8) == 0;

	return info->type == (is_counter ? KV_METRIC_COUNTER : is_histogram ? KV_METRIC_HISTOGRAM : KV_METRIC_GAUGE);
}

void kv_metrics_page(const kv_metric_info_t *infos, unsigned count, FILE *out)
{
	for (unsigned i = 0; i < count; i++) {
		const size_t len = kv_metric_family_len(&infos[i]);
		const char *label = infos[i].name + len;
		const int begins = kv_metric_begins_family(infos, i);

		if (begins) {
			fprintf(out, "- `%.*s`", (int)len, infos[i].name);
		}
		if (*label) { /* {tier="cpu"} */
			const char *value = strchr(label, '"') + 1;

			if (begins) {
				fprintf(out, " by `%.*s`", (int)strcspn(label + 1, "="), label + 1);
			}
			fprintf(out, "%s %.*s", begins ? "" : ",", (int)strcspn(value, "\""), value);
		}
		if (i + 1 == count || kv_metric_begins_family(infos, i + 1)) {
			fprintf(out, "%s%s: %s\n", name_says_type(&infos[i], len) ? "" : " ",
				name_says_type(&infos[i], len) ? "" : type_names[infos[i].type], infos[i].help);
		}
	}
}

/* The labels of a namespace's series: its own come behind the namespace. */
static void prometheus_ns(kv_text_t *text, const kv_metrics_t *m, uint32_t ns, unsigned id)
{
	const kv_metric_info_t *info = &kv_ns_metric_infos[id];
	const char *labels = info->name + kv_metric_family_len(info);

	kv_text_add(text, info->name, kv_metric_family_len(info));
	kv_text_addf(text, "{namespace=\"%s\"%s%s %llu\n", m->ns[ns].name, *labels ? "," : "",
		     *labels ? labels + 1 : "}", (unsigned long long)kv_ns_metric_get(m, ns, (kv_ns_metric_t)id));
}

size_t kv_metrics_prometheus(const kv_metrics_t *m, char *out, size_t cap)
{
	const uint32_t namespaces = atomic_load_explicit(&m->ns_count, memory_order_acquire);
	kv_text_t text = kv_text(out, cap);

	kv_text_addf(&text, "# HELP kvd_build_info " KV_HELP_BUILD_INFO "\n# TYPE kvd_build_info gauge\n"
			    "kvd_build_info{version=\"" KVD_VERSION "\"} 1\n");
	for (unsigned id = 0; id < KV_METRIC_COUNT; id++) {
		const kv_metric_info_t *info = &kv_metric_infos[id];

		kv_metric_write_head(&text, kv_metric_infos, id);
		if (info->type == KV_METRIC_HISTOGRAM) {
			kv_histogram_write(&text, info->name, histogram_of(m, id));
		} else {
			kv_text_addf(&text, "%s %llu\n", info->name,
				     (unsigned long long)kv_metric_get(m, (kv_metric_t)id));
		}
	}
	for (unsigned id = 0; id < KV_NS_METRIC_COUNT && namespaces > 0; id++) {
		kv_metric_write_head(&text, kv_ns_metric_infos, id);
		for (uint32_t n = 0; n < namespaces; n++) {
			prometheus_ns(&text, m, n, id);
		}
	}

	return text.len;
}

/* A member's name: the series without the quotes of its label's value. */
static void json_name(kv_text_t *text, const char *name)
{
	kv_text_addf(text, "\"");
	for (; *name; name++) {
		if (*name != '"') {
			kv_text_add(text, name, 1);
		}
	}
	kv_text_addf(text, "\":");
}

size_t kv_metrics_json(const kv_metrics_t *m, uint32_t ns, char *out, size_t cap)
{
	kv_text_t text = kv_text(out, cap);

	for (unsigned id = 0; id < KV_METRIC_COUNT; id++) {
		const kv_metric_info_t *info = &kv_metric_infos[id];
		snapshot_t h;

		kv_text_addf(&text, "%s", id ? "," : "{");
		json_name(&text, info->name);
		if (info->type != KV_METRIC_HISTOGRAM) {
			kv_text_addf(&text, "%llu", (unsigned long long)kv_metric_get(m, (kv_metric_t)id));
			continue;
		}
		histogram_read(histogram_of(m, id), &h);
		kv_text_addf(&text, "{\"count\":%llu,\"sum_ns\":%llu,\"p50_ns\":%llu,\"p99_ns\":%llu}",
			     (unsigned long long)h.count, (unsigned long long)h.sum_ns,
			     (unsigned long long)quantile_ns(&h, 50), (unsigned long long)quantile_ns(&h, 99));
	}
	for (unsigned id = 0; id < KV_NS_METRIC_COUNT && ns != UINT32_MAX; id++) {
		kv_text_addf(&text, ",");
		json_name(&text, kv_ns_metric_infos[id].name);
		kv_text_addf(&text, "%llu", (unsigned long long)kv_ns_metric_get(m, ns, (kv_ns_metric_t)id));
	}
	kv_text_add(&text, "}", 1);

	return text.len;
}
