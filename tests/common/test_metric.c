/* Metrics: buckets, Prometheus text, JSON. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kv/metric.h"

#include <pthread.h>

static kv_metrics_t metrics;
static char text[1 << 18];

static void reset(void)
{
	memset(&metrics, 0, sizeof metrics);
}

/* kvd_name, or kvd_name{label="value"}, of lower-case letters, digits and '_'. */
static void check_series(const kv_metric_info_t *info)
{
	static const char alphabet[] = "abcdefghijklmnopqrstuvwxyz0123456789_";
	const size_t family = kv_metric_family_len(info);
	const char *at = info->name + family;

	assert_int_equal(strncmp(info->name, "kvd_", 4), 0);
	assert_int_equal(strspn(info->name, alphabet), family);
	assert_int_equal(memcmp(at - 6, "_total", 6) == 0, info->type == KV_METRIC_COUNTER);
	if (info->type == KV_METRIC_HISTOGRAM) {
		assert_int_equal(memcmp(at - 8, "_seconds", 8), 0);
		assert_int_equal(*at, '\0');
	}
	if (*at) {
		at += 1 + strspn(at + 1, alphabet);
		assert_int_equal(strncmp(at, "=\"", 2), 0);
		at += 2 + strspn(at + 2, alphabet);
		assert_string_equal(at, "\"}");
	}
}

/* Prometheus refuses a family whose series are not in one place. */
static void check_families(const kv_metric_info_t *infos, unsigned count)
{
	for (unsigned i = 0; i < count; i++) {
		check_series(&infos[i]);
		assert_true(strlen(infos[i].help) > 3);
		assert_null(strchr(infos[i].help, '\n'));
		if (!kv_metric_begins_family(infos, i)) {
			assert_int_equal(infos[i].type, infos[i - 1].type);
			assert_string_equal(infos[i].help, infos[i - 1].help);
		}
		for (unsigned j = 0; j < i; j++) {
			assert_string_not_equal(infos[i].name, infos[j].name);
			assert_false(kv_metric_begins_family(infos, i) &&
				     kv_metric_family_len(&infos[i]) == kv_metric_family_len(&infos[j]) &&
				     memcmp(infos[i].name, infos[j].name, kv_metric_family_len(&infos[i])) == 0);
		}
	}
}

KV_TEST(series_follow_the_rules_and_families_are_in_one_place)
{
	check_families(kv_metric_infos, KV_METRIC_COUNT);
	check_families(kv_ns_metric_infos, KV_NS_METRIC_COUNT);
}

KV_TEST(a_value_falls_into_the_bucket_whose_bound_it_does_not_pass)
{
	for (unsigned i = 0; i < KV_HISTOGRAM_BUCKETS; i++) {
		uint64_t bound = UINT64_C(1000) << i;

		reset();
		kv_metric_observe_ns(&metrics, KV_M_REQUEST_TIME, bound);
		assert_int_equal(atomic_load(&metrics.bucket[KV_M_REQUEST_TIME][i]), 1);
		kv_metric_observe_ns(&metrics, KV_M_REQUEST_TIME, bound + 1);
		if (i + 1 < KV_HISTOGRAM_BUCKETS) {
			assert_int_equal(atomic_load(&metrics.bucket[KV_M_REQUEST_TIME][i + 1]), 1);
		}
		assert_int_equal(kv_metric_get(&metrics, KV_M_REQUEST_TIME), 2);
	}
	reset();
	kv_metric_observe_ns(&metrics, KV_M_REQUEST_TIME, 0);
	assert_int_equal(atomic_load(&metrics.bucket[KV_M_REQUEST_TIME][0]), 1);
	kv_metric_observe_ns(&metrics, KV_M_REQUEST_TIME, UINT64_MAX);
	assert_int_equal(kv_metric_get(&metrics, KV_M_REQUEST_TIME), 2);
}

KV_TEST(prometheus_text_has_every_metric_with_help_and_type)
{
	size_t need;

	reset();
	kv_metric_add(&metrics, KV_M_REQUESTS, 41);
	kv_metric_add(&metrics, KV_M_REQUESTS, 1);
	kv_metric_set(&metrics, KV_M_SESSIONS, 3);
	kv_metric_observe_ns(&metrics, KV_M_REQUEST_TIME, 1500);
	kv_metric_observe_ns(&metrics, KV_M_REQUEST_TIME, UINT64_C(20000000000));
	need = kv_metrics_prometheus(&metrics, text, sizeof text);
	assert_int_equal(need, strlen(text));
	assert_non_null(strstr(text, "# HELP kvd_requests_total requests handled\n# TYPE kvd_requests_total "
				     "counter\nkvd_requests_total 42\n"));
	assert_non_null(strstr(text, "\nkvd_sessions 3\n"));
	assert_non_null(strstr(text, "# TYPE kvd_build_info gauge\nkvd_build_info{version=\"" KVD_VERSION "\"} 1\n"));
	assert_non_null(strstr(text, "kvd_request_seconds_bucket{le=\"0.000001000\"} "
				     "0\nkvd_request_seconds_bucket{le=\"0.000002000\"} 1\n"));
	assert_non_null(strstr(
		text, "kvd_request_seconds_bucket{le=\"8.388608000\"} 1\nkvd_request_seconds_bucket{le=\"+Inf\"} 2\n"
		      "kvd_request_seconds_sum 20.000001500\nkvd_request_seconds_count 2\n"));
	for (unsigned i = 0; i < KV_METRIC_COUNT; i++) {
		assert_non_null(strstr(text, kv_metric_infos[i].name));
		assert_non_null(strstr(text, kv_metric_infos[i].help));
	}

	assert_int_equal(kv_metrics_prometheus(&metrics, text, 100), need);
	assert_int_equal(strlen(text), 99);
	assert_int_equal(kv_metrics_prometheus(&metrics, NULL, 0), need);
}

/* One help and type a family; the label's value has quotes at /metrics, and none in a name of JSON. */
KV_TEST(series_of_a_family_share_help_and_type)
{
	reset();
	kv_ns_metrics_open(&metrics, "a");
	kv_metric_set(&metrics, KV_M_BLOCKS_CPU, 5);
	kv_metric_set(&metrics, KV_M_BLOCKS_DISK, 6);
	kv_ns_metric_add(&metrics, 0, KV_NM_HIT_DISK_TOKENS, 7);
	assert_in_range(kv_metrics_prometheus(&metrics, text, sizeof text), 1, sizeof text - 1);
	assert_non_null(strstr(text, "# TYPE kvd_tier_blocks gauge\nkvd_tier_blocks{tier=\"cpu\"} 5\n"
				     "kvd_tier_blocks{tier=\"gpu\"} 0\nkvd_tier_blocks{tier=\"disk\"} 6\n# HELP "));
	assert_non_null(strstr(text, "kvd_prefix_hit_tokens_total{namespace=\"a\",tier=\"cpu\"} 0\n"
				     "kvd_prefix_hit_tokens_total{namespace=\"a\",tier=\"disk\"} 7\n# HELP "));
	kv_metrics_json(&metrics, 0, text, sizeof text);
	assert_non_null(strstr(
		text,
		"\"kvd_tier_blocks{tier=cpu}\":5,\"kvd_tier_blocks{tier=gpu}\":0,\"kvd_tier_blocks{tier=disk}\":6,"));
	assert_non_null(strstr(text, "\"kvd_prefix_hit_tokens_total{tier=disk}\":7,"));
}

KV_TEST(json_has_every_metric_and_quantiles)
{
	size_t need;

	reset();
	for (int i = 0; i < 98; i++) {
		kv_metric_observe_ns(&metrics, KV_M_REQUEST_TIME, 900);
	}
	kv_metric_observe_ns(&metrics, KV_M_REQUEST_TIME, 3000);
	kv_metric_observe_ns(&metrics, KV_M_REQUEST_TIME, 9000);
	need = kv_metrics_json(&metrics, UINT32_MAX, text, sizeof text);
	assert_int_equal(need, strlen(text));
	assert_non_null(strstr(
		text, "\"kvd_request_seconds\":{\"count\":100,\"sum_ns\":100200,\"p50_ns\":1000,\"p99_ns\":4000}"));
	assert_true(text[0] == '{' && text[need - 1] == '}');
	assert_int_equal(kv_metrics_json(&metrics, UINT32_MAX, NULL, 0), need);
	reset();
	kv_metrics_json(&metrics, UINT32_MAX, text, sizeof text);
	assert_non_null(strstr(text, "\"p50_ns\":0,\"p99_ns\":0}"));
}

/* Every namespace has a line of each at /metrics; a document shows one's own, and no name. */
KV_TEST(p8_namespace_metrics_are_labelled_and_stats_show_ones_own)
{
	reset();
	kv_ns_metrics_open(&metrics, "a");
	kv_ns_metrics_open(&metrics, "b.c");
	kv_ns_metric_add(&metrics, 0, KV_NM_EVICTED, 4);
	kv_ns_metric_set(&metrics, 1, KV_NM_EVICTED, 7);
	assert_in_range(kv_metrics_prometheus(&metrics, text, sizeof text), 1, sizeof text - 1);
	assert_non_null(
		strstr(text, "# TYPE kvd_namespace_evicted_total counter\nkvd_namespace_evicted_total{namespace=\"a\"} "
			     "4\nkvd_namespace_evicted_total{namespace=\"b.c\"} 7\n"));
	kv_metrics_json(&metrics, 1, text, sizeof text);
	assert_non_null(strstr(text, "\"kvd_namespace_evicted_total\":7"));
	assert_null(strstr(text, "b.c"));
	kv_metrics_json(&metrics, UINT32_MAX, text, sizeof text);
	assert_null(strstr(text, "kvd_namespace_"));
	for (uint32_t i = 0; i < 2 * KV_METRIC_NAMESPACES; i++) {
		kv_ns_metrics_open(&metrics, "many");
	}
	assert_int_equal(metrics.ns_count, KV_METRIC_NAMESPACES);
}

/* As a Prometheus server reads it, lint included. */
KV_TEST(prometheus_text_passes_promtool)
{
	FILE *promtool;

	if (system("command -v promtool >/dev/null 2>&1") != 0) {
		printf("# SKIP: promtool is not installed (Debian package prometheus; `make ci` fetches it)\n");
		skip();
	}
	reset();
	kv_ns_metrics_open(&metrics, "a");
	kv_ns_metrics_open(&metrics, "b");
	kv_metric_observe_ns(&metrics, KV_M_REQUEST_TIME, 1500);
	assert_in_range(kv_metrics_prometheus(&metrics, text, sizeof text), 1, sizeof text - 1);
	promtool = popen("promtool check metrics", "w");
	assert_non_null(promtool);
	assert_int_equal(fwrite(text, 1, strlen(text), promtool), strlen(text));
	assert_int_equal(pclose(promtool), 0);
}

static void *adder(void *arg)
{
	(void)arg;
	for (int i = 0; i < 20000; i++) {
		kv_metric_add(&metrics, KV_M_REQUESTS, 1);
		kv_metric_observe_ns(&metrics, KV_M_REQUEST_TIME, (uint64_t)i);
	}

	return NULL;
}

KV_TEST(no_count_is_lost_between_threads)
{
	pthread_t threads[4];

	reset();
	for (int i = 0; i < 4; i++) {
		assert_int_equal(pthread_create(&threads[i], NULL, adder, NULL), 0);
	}
	for (int i = 0; i < 20; i++) {
		kv_metrics_prometheus(&metrics, text, sizeof text);
	}
	for (int i = 0; i < 4; i++) {
		pthread_join(threads[i], NULL);
	}
	assert_int_equal(kv_metric_get(&metrics, KV_M_REQUESTS), 80000);
	assert_int_equal(kv_metric_get(&metrics, KV_M_REQUEST_TIME), 80000);
}
