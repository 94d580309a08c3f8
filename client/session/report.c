/* The report ring: one record a request, never a wait. And the counters of this attachment. */
#include "impl.h"

static void fill_record(const kvc_space_t *space, const kvc_report_t *report, kv_report_t *record)
{
	*record = (kv_report_t){
		.type = KV_REPORT_REQUEST,
		.space = atomic_load_explicit(&space->id, memory_order_relaxed),
		.time_ns = kv_now_ns(&space->kvc->env),
		.request = report->request,
		.session = report->session,
		.query_tokens = report->query_tokens,
		.hit_cpu_tokens = report->hit_cpu_tokens,
		.hit_disk_tokens = report->hit_disk_tokens,
		.hit_engine_tokens = report->hit_engine_tokens,
		.output_tokens = report->output_tokens,
		.why = report->why,
		.turn = report->turn,
		.match_ns = report->match_ns,
		.load_ns = report->load_ns,
		.hit_gpu_tokens = report->hit_gpu_tokens,
	};
	memcpy(record->first_missing.b, report->first_missing.b, sizeof record->first_missing.b);
}

void kvc_report(kvc_space_t *space, const kvc_report_t *given)
{
	kvc_report_t report;
	kvc_t *kvc = space->kvc;
	kv_member_area_header_t *area;
	kvc_map_t *map;
	uint64_t head;

	if (!given || !kv_struct_is_set(given) || kvc_check_process(kvc) != KVC_OK) {
		return;
	}
	kv_struct_read(&report, given, sizeof report);
	map = atomic_load_explicit(&kvc->map, memory_order_relaxed);
	if (!map || !map->member || atomic_load_explicit(&space->epoch, memory_order_relaxed) == 0) {
		kvc_count(&kvc->counters.reports_dropped, 1);
		return;
	}
	area = map->member;
	head = atomic_load_explicit(&area->head, memory_order_relaxed);
	if (head - atomic_load_explicit(&area->tail, memory_order_acquire) > map->ring_mask) {
		atomic_fetch_add_explicit(&area->dropped, 1, memory_order_relaxed);
		kvc_count(&kvc->counters.reports_dropped, 1);
		return;
	}
	fill_record(space, &report, &map->ring[head & map->ring_mask]);
	atomic_store_explicit(&area->head, head + 1, memory_order_release);
}

static uint64_t read_counter(const _Atomic uint64_t *counter)
{
	return atomic_load_explicit(counter, memory_order_relaxed);
}

kvc_status_t kvc_get_stats(const kvc_t *kvc, kvc_stats_t *stats)
{
	const kvc_counters_t *c = &kvc->counters;
	kvc_stats_t now = {
		.matches = read_counter(&c->matches),
		.match_hits = read_counter(&c->match_hits),
		.acquires = read_counter(&c->acquires),
		.acquire_misses = read_counter(&c->acquire_misses),
		.blocks_read = read_counter(&c->blocks_read),
		.bytes_read = read_counter(&c->bytes_read),
		.blocks_put = read_counter(&c->blocks_put),
		.bytes_put = read_counter(&c->bytes_put),
		.corrupt = read_counter(&c->corrupt),
		.reattaches = read_counter(&c->reattaches),
		.timeouts = read_counter(&c->timeouts),
		.reports_dropped = read_counter(&c->reports_dropped),
		.leases_open = kvc->leases_open,
		.puts_open = kvc->puts_open,
		.slabs_mapped = kvc->slabs_mapped,
		.broken_invariants = kv_broken_count(),
	};

	return kvc_fill("kvc_get_stats", stats, &now, sizeof now);
}
