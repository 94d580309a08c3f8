/* kv/metric.h -- the metric table: every number kvd publishes, with unit and help.
 *
 * Values live in one array of atomics per process: any thread adds with relaxed order, HTTP and STATS read it.
 * Prometheus text, STATS JSON and docs/metrics.md come from the table. A lint finds a metric that is never updated.
 */
#ifndef KV_METRIC_H
#define KV_METRIC_H

#include "kv/status.h"
#include "kv/text.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef enum kv_metric_type { KV_METRIC_COUNTER, KV_METRIC_GAUGE, KV_METRIC_HISTOGRAM } kv_metric_type_t;

/* X(NAME, series, type, help). A series is a name of Prometheus, with one label or none: kvd_tier_blocks{tier="cpu"}.
 * The series of one family follow one another. Counters end in _total (bytes: _bytes_total). Histograms are of seconds,
 * with fixed buckets and without a label. */
#include "kv/metric_list.h"
/* The same for what is counted a namespace: bounded by the namespaces that are configured. */
#include "kv/metric_ns_list.h"

typedef enum kv_metric {
#define KV_METRIC_ENUM(NAME, name, type, help) KV_M_##NAME,
	KV_METRIC_LIST(KV_METRIC_ENUM)
#undef KV_METRIC_ENUM
		KV_METRIC_COUNT
} kv_metric_t;

typedef enum kv_ns_metric {
#define KV_METRIC_ENUM(NAME, name, type, help) KV_NM_##NAME,
	KV_NS_METRIC_LIST(KV_METRIC_ENUM)
#undef KV_METRIC_ENUM
		KV_NS_METRIC_COUNT
} kv_ns_metric_t;

#define KV_METRIC_NAMESPACES 256u
#define KV_METRIC_NS_NAME    72u

typedef struct kv_ns_metrics {
	char name[KV_METRIC_NS_NAME]; /* of letters, digits, '.', '_' and '-' */
	_Atomic uint64_t value[KV_NS_METRIC_COUNT];
} kv_ns_metrics_t;

#define KV_HISTOGRAM_BUCKETS 24u /* 1 us, 2 us, 4 us, ... 8.4 s, +Inf */

/* Values of one process. All zero is a good start. */
typedef struct kv_metrics {
	_Atomic uint64_t value[KV_METRIC_COUNT];  /* counters and gauges; of a histogram: the count */
	_Atomic uint64_t sum_ns[KV_METRIC_COUNT]; /* histograms */
	_Atomic uint64_t bucket[KV_METRIC_COUNT][KV_HISTOGRAM_BUCKETS];
	kv_ns_metrics_t ns[KV_METRIC_NAMESPACES];
	_Atomic uint32_t ns_count;
} kv_metrics_t;

static inline void kv_metric_add(kv_metrics_t *m, kv_metric_t id, uint64_t n)
{
	atomic_fetch_add_explicit(&m->value[id], n, memory_order_relaxed);
}
static inline void kv_metric_set(kv_metrics_t *m, kv_metric_t id, uint64_t n)
{
	atomic_store_explicit(&m->value[id], n, memory_order_relaxed);
}
static inline uint64_t kv_metric_get(const kv_metrics_t *m, kv_metric_t id)
{
	return atomic_load_explicit(&m->value[id], memory_order_relaxed);
}
/* Where the values of one histogram are; bucket[KV_HISTOGRAM_BUCKETS]: what is above the last one is only in the
 * count. */
typedef struct kv_histogram {
	_Atomic uint64_t *count, *sum_ns, *bucket;
} kv_histogram_t;
void kv_histogram_observe_ns(kv_histogram_t histogram, uint64_t ns);
static inline void kv_metric_observe_ns(kv_metrics_t *m, kv_metric_t id, uint64_t ns)
{
	kv_histogram_observe_ns((kv_histogram_t){&m->value[id], &m->sum_ns[id], m->bucket[id]}, ns);
}

/* One namespace more; it has the next number, from 0 on. At most KV_METRIC_NAMESPACES, with names that fit. */
void kv_ns_metrics_open(kv_metrics_t *m, const char *name);
static inline void kv_ns_metric_add(kv_metrics_t *m, uint32_t ns, kv_ns_metric_t id, uint64_t n)
{
	atomic_fetch_add_explicit(&m->ns[ns].value[id], n, memory_order_relaxed);
}
static inline void kv_ns_metric_set(kv_metrics_t *m, uint32_t ns, kv_ns_metric_t id, uint64_t n)
{
	atomic_store_explicit(&m->ns[ns].value[id], n, memory_order_relaxed);
}
static inline uint64_t kv_ns_metric_get(const kv_metrics_t *m, uint32_t ns, kv_ns_metric_t id)
{
	return atomic_load_explicit(&m->ns[ns].value[id], memory_order_relaxed);
}

typedef struct kv_metric_info {
	const char *name; /* of the series */
	kv_metric_type_t type;
	const char *help;
} kv_metric_info_t;
extern const kv_metric_info_t kv_metric_infos[KV_METRIC_COUNT];
extern const kv_metric_info_t kv_ns_metric_infos[KV_NS_METRIC_COUNT];
#define KV_HELP_BUILD_INFO "always 1; the label is the version of kvd"

/* Length of the family's name, at the beginning of the series'. */
static inline size_t kv_metric_family_len(const kv_metric_info_t *info)
{
	return strcspn(info->name, "{");
}
/* Is infos[id] the first series of its family? */
int kv_metric_begins_family(const kv_metric_info_t *infos, unsigned id);

/* Parts of Prometheus text, for programs with a table of their own: HELP and TYPE where infos[id] begins its family;
 * the lines of a histogram. */
void kv_metric_write_head(kv_text_t *text, const kv_metric_info_t *infos, unsigned id);
/* A list for a page of Markdown, one item a family. */
void kv_metrics_page(const kv_metric_info_t *infos, unsigned count, FILE *out);
void kv_histogram_write(kv_text_t *text, const char *name, kv_histogram_t histogram);

/* Prometheus text format 0.0.4; those of namespaces have the label `namespace`. Returns bytes needed without the NUL,
 * like snprintf. */
size_t kv_metrics_prometheus(const kv_metrics_t *m, char *out, size_t cap);
/* JSON object, series to value (histogram: {count, sum_ns, p50_ns, p99_ns}), of the process and of one namespace;
 * UINT32_MAX: of none. A series is written without the quotes of its label's value. Returns bytes needed, like
 * snprintf. */
size_t kv_metrics_json(const kv_metrics_t *m, uint32_t ns, char *out, size_t cap);

#endif
