/* kv/metric.h -- the metric table: every number kvd publishes, with unit and help.
 *
 * Values live in one array of atomics per process: any thread adds with relaxed order, HTTP and STATS read it. Prometheus text, STATS JSON and
 * docs/metrics.md come from the table. A lint finds a metric nobody updates.
 */
#ifndef KV_METRIC_H
#define KV_METRIC_H

#include "kv/status.h"

#include <stdatomic.h>
#include <stddef.h>

typedef enum kv_metric_type { KV_METRIC_COUNTER, KV_METRIC_GAUGE, KV_METRIC_HISTOGRAM } kv_metric_type_t;

/* X(NAME, prometheus_name, type, help). Counters end in _total (bytes: _bytes_total). Histograms are of seconds, with fixed buckets. */
#include "kv/metric_list.h"

typedef enum kv_metric {
#define KV_METRIC_ENUM(NAME, name, type, help) KV_M_##NAME,
	KV_METRIC_LIST(KV_METRIC_ENUM)
#undef KV_METRIC_ENUM
		KV_METRIC_COUNT
} kv_metric_t;

#define KV_HISTOGRAM_BUCKETS 24u /* 1 us, 2 us, 4 us, ... 8.4 s, +Inf */

/* Values of one process, or of one namespace. All zero is a good start. */
typedef struct kv_metrics {
	_Atomic uint64_t value[KV_METRIC_COUNT];  /* counters and gauges; of a histogram: the count */
	_Atomic uint64_t sum_ns[KV_METRIC_COUNT]; /* histograms */
	_Atomic uint64_t bucket[KV_METRIC_COUNT][KV_HISTOGRAM_BUCKETS];
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
void kv_metric_observe_ns(kv_metrics_t *m, kv_metric_t id, uint64_t ns);

typedef struct kv_metric_info {
	const char *name;
	kv_metric_type_t type;
	const char *help;
} kv_metric_info_t;
extern const kv_metric_info_t kv_metric_infos[KV_METRIC_COUNT];

/* Prometheus text format 0.0.4. Returns bytes needed without the NUL, like snprintf. */
size_t kv_metrics_prometheus(const kv_metrics_t *m, char *out, size_t cap);
/* JSON object, name to value (histogram: {count, sum_ns, p50_ns, p99_ns}). Returns bytes needed, like snprintf. */
size_t kv_metrics_json(const kv_metrics_t *m, char *out, size_t cap);

#endif
