/* metrics.h -- what kvd-pd-proxy counts, from the tables in metric_list.h. Any thread adds. */
#ifndef KVP_METRICS_H
#define KVP_METRICS_H

#include "kv/metric.h"
#include "metric_list.h"

#include <stdio.h>

typedef enum kvp_metric {
#define KVP_METRIC_ENUM(NAME, name, type, help) KVP_M_##NAME,
	KVP_METRIC_LIST(KVP_METRIC_ENUM)
#undef KVP_METRIC_ENUM
		KVP_METRIC_COUNT
} kvp_metric_t;

typedef enum kvp_engine_metric {
#define KVP_METRIC_ENUM(NAME, name, type, help) KVP_EM_##NAME,
	KVP_ENGINE_METRIC_LIST(KVP_METRIC_ENUM)
#undef KVP_METRIC_ENUM
		KVP_ENGINE_METRIC_COUNT
} kvp_engine_metric_t;

/* All zero is a good start. */
typedef struct kvp_metrics {
	_Atomic uint64_t value[KVP_METRIC_COUNT];  /* counters and gauges; of a histogram: the count */
	_Atomic uint64_t sum_ns[KVP_METRIC_COUNT]; /* histograms */
	_Atomic uint64_t bucket[KVP_METRIC_COUNT][KV_HISTOGRAM_BUCKETS];
} kvp_metrics_t;

static inline void kvp_metric_add(kvp_metrics_t *m, kvp_metric_t id, uint64_t n)
{
	atomic_fetch_add_explicit(&m->value[id], n, memory_order_relaxed);
}
static inline void kvp_metric_sub(kvp_metrics_t *m, kvp_metric_t id, uint64_t n)
{
	atomic_fetch_sub_explicit(&m->value[id], n, memory_order_relaxed);
}
static inline void kvp_metric_observe_ns(kvp_metrics_t *m, kvp_metric_t id, uint64_t ns)
{
	kv_histogram_observe_ns((kv_histogram_t){&m->value[id], &m->sum_ns[id], m->bucket[id]}, ns);
}

/* One engine's values, at the time of the call. */
typedef struct kvp_engine_metrics {
	const char *url, *role;
	uint64_t value[KVP_ENGINE_METRIC_COUNT];
} kvp_engine_metrics_t;

/* Prometheus text format 0.0.4. Returns bytes needed without the NUL, like snprintf. */
size_t kvp_metrics_prometheus(kvp_metrics_t *m, const kvp_engine_metrics_t *engines, uint32_t count, char *out,
			      size_t cap);
/* The list of docs/pd-proxy.md. */
void kvp_metrics_page(FILE *out);

#endif
