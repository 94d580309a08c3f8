/* The metric tables of kvd-pd-proxy as Prometheus text and as a page. */
#include "metrics.h"

#include "kv/text.h"

#define MICROS 1000000u /* in a second: a backlog's value */

static const kv_metric_info_t infos[KVP_METRIC_COUNT] = {
#define ROW(NAME, metric_name, metric_type, metric_help)                                                               \
	[KVP_M_##NAME] = {.name = #metric_name, .type = metric_type, .help = metric_help},
	KVP_METRIC_LIST(ROW)
#undef ROW
};

static const kv_metric_info_t engine_infos[KVP_ENGINE_METRIC_COUNT] = {
#define ROW(NAME, metric_name, metric_type, metric_help)                                                               \
	[KVP_EM_##NAME] = {.name = #metric_name, .type = metric_type, .help = metric_help},
	KVP_ENGINE_METRIC_LIST(ROW)
#undef ROW
};

size_t kvp_metrics_prometheus(kvp_metrics_t *m, const kvp_engine_metrics_t *engines, uint32_t count, char *out,
			      size_t cap)
{
	kv_text_t text = kv_text(out, cap);

	kv_text_addf(&text, "# HELP kvd_build_info " KV_HELP_BUILD_INFO "\n# TYPE kvd_build_info gauge\n"
			    "kvd_build_info{version=\"" KVD_VERSION "\"} 1\n");
	for (unsigned id = 0; id < KVP_METRIC_COUNT; id++) {
		kv_metric_write_head(&text, infos, id);
		if (infos[id].type == KV_METRIC_HISTOGRAM) {
			kv_histogram_write(&text, infos[id].name,
					   (kv_histogram_t){&m->value[id], &m->sum_ns[id], m->bucket[id]});
		} else {
			kv_text_addf(&text, "%s %llu\n", infos[id].name,
				     (unsigned long long)atomic_load_explicit(&m->value[id], memory_order_relaxed));
		}
	}
	for (unsigned id = 0; id < KVP_ENGINE_METRIC_COUNT; id++) {
		kv_metric_write_head(&text, engine_infos, id);
		for (uint32_t i = 0; i < count; i++) {
			const unsigned long long value = engines[i].value[id];

			kv_text_addf(&text, "%s{engine=\"%s\",role=\"%s\"} ", engine_infos[id].name, engines[i].url,
				     engines[i].role);
			kv_text_addf(&text, id == KVP_EM_BACKLOG ? "%llu.%06llu\n" : "%llu\n",
				     id == KVP_EM_BACKLOG ? value / MICROS : value, value % MICROS);
		}
	}

	return text.len;
}

void kvp_metrics_page(FILE *out)
{
	fprintf(out,
		"\n## Metrics\n\n"
		"`GET /metrics` has them. Those of an engine have the labels `engine` and `role`. `_total` is a counter, "
		"`_seconds` a histogram but for `backlog_seconds`, all else a gauge.\n\n");
	kv_metrics_page(infos, KVP_METRIC_COUNT, out);
	kv_metrics_page(engine_infos, KVP_ENGINE_METRIC_COUNT, out);
}
