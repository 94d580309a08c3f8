/* Reports and digests that members leave in their shared memory: client-writable, so each word is copied once and
 * believed no further. */
#include "io/members/reports.h"

#include "io/members/member.h"
#include "io/members/member_table.h"

#include "kvs/pool.h"
#include "kvs/sigbus.h"

#define DRAIN_RECORDS 128u /* of one ring at a time */
#define DRAIN_WORK    256u /* of all rings in a row: records, and four for a ring */

/* A word a client writes while we read it: the same value twice, or none. */
static int stable_word(const void *word, uint64_t *p_value)
{
	uint64_t once, again;

	if (kvs_sigbus_copy(&once, word, sizeof once) != KV_OK ||
	    kvs_sigbus_copy(&again, word, sizeof again) != KV_OK || once != again) {
		return 0;
	}
	*p_value = again;

	return 1;
}

static void drain_records(kvd_host_t *host, kvd_member_entry_t *member, uint64_t head, uint32_t limit)
{
	const kv_report_t *ring = (const kv_report_t *)((const uint8_t *)member->area.base + KVD_REPORT_OFFSET);

	for (; member->tail != head && limit > 0; limit--) {
		kv_report_t report;

		if (kvs_sigbus_copy(&report, &ring[member->tail % KVD_REPORT_RECORDS], sizeof report) != KV_OK) {
			kv_metric_add(&host->metrics, KV_M_BAD_REPORTS, 1);
		} else if (kvd_core_report(host->core, member->id, &report) == KV_OK &&
			   report.type == KV_REPORT_REQUEST && host->publisher) {
			kvd_publisher_hit(host->publisher, member->ns->index, &report);
		}
		member->tail++;
	}
}

/* Returns how many records there were. */
static uint32_t drain_ring(kvd_host_t *host, kvd_member_entry_t *member, uint32_t limit)
{
	kv_member_area_header_t *header = member->area.base;
	uint64_t now = kv_now_ns(host->env), head = 0, dropped = 0, tail = member->tail;

	if (stable_word(&header->dropped, &dropped)) {
		uint64_t lost = dropped - member->dropped;
		/* To drop one takes a client more than a nanosecond: a larger step is no count. */
		int is_count = lost <= kv_now_ns(host->env) - member->looked_ns;

		kv_metric_add(&host->metrics, is_count ? KV_M_LOST_REPORTS : KV_M_BAD_REPORTS, is_count ? lost : 1);
		member->dropped = dropped;
		member->looked_ns = now;
	}
	if (!stable_word(&header->head, &head) || head == tail) {
		return 0;
	}
	if (head - tail > KVD_REPORT_RECORDS) {
		kv_metric_add(&host->metrics, KV_M_BAD_REPORTS, 1);
		member->tail = tail = head;
	}
	/* `head` was read once and is bounded: the client can at worst lose its own reports. Its tail is published
	 * after the copies, so it never overwrites a record that is being read. */
	drain_records(host, member, head, limit);
	atomic_store_explicit(&header->tail, member->tail, memory_order_release);

	return (uint32_t)(member->tail - tail);
}

void kvd_reports_drain_member(kvd_host_t *host, kvd_member_entry_t *member)
{
	(void)drain_ring(host, member, KVD_REPORT_RECORDS);
}

int kvd_reports_drain(kvd_host_t *host)
{
	uint32_t work = 0, i = host->drain_next;

	for (; i < KVD_MEMBER_BUCKETS && work < DRAIN_WORK; i++) {
		for (kvd_member_entry_t *member = host->members[i]; member; member = member->next) {
			if (member->session) {
				work += 4 + drain_ring(host, member, DRAIN_RECORDS);
			}
		}
	}
	host->drain_next = i < KVD_MEMBER_BUCKETS ? i : 0;

	return host->drain_next != 0;
}

kv_status_t kvd_member_entry_read_staging(void *ctx, kvd_member_t id, uint64_t first, uint32_t words, uint64_t *out)
{
	kvd_member_entry_t *member = kvd_member_entry_find(ctx, id);

	if (!member || !member->session || first > member->staging_words || words > member->staging_words - first) {
		return KV_ERR_ARG;
	}

	return kvs_sigbus_copy(out,
			       (const uint8_t *)member->area.base + member->staging_offset + first * sizeof(uint64_t),
			       (size_t)words * sizeof(uint64_t));
}
