/* Records for the scheduler half, collected until the engine fetches the report. */
#include "worker/report.h"

#include <string.h>

#define REPORT_MAX (1u << 20) /* bytes; a report that is never fetched starts again */

/* Reserved at open: without memory for its report a load or save would stay open until the scheduler half gives it up.
 */
kvc_status_t kvx_report_reserve(kvx_worker_t *worker)
{
	for (uint32_t i = 0; i < 2; i++) {
		if (!kvx_msg_reserve(&worker->report[i], REPORT_MAX + sizeof(kvx_report_loaded_t))) {
			return KVC_ERR_NOMEM;
		}
	}

	return KVC_OK;
}

static kvx_msg_buf_t *open_report(kvx_worker_t *worker)
{
	kvx_msg_buf_t *report = &worker->report[worker->report_at];

	if (report->len == 0 || report->len > REPORT_MAX) {
		kvx_msg_reset(report, KVX_REPORT_MAGIC);
	}

	return report;
}

void kvx_report_add_loaded(kvx_worker_t *worker, uint64_t id, const kvx_report_loaded_t *what)
{
	kvx_report_loaded_t *record = kvx_msg_add_record(open_report(worker), KVX_RECORD_LOADED, sizeof *record);

	if (record) {
		record->load = id;
		record->status = what->status;
		record->blocks = what->blocks;
		record->bytes = what->bytes;
		record->ns = what->ns;
	}
}

int kvx_report_add_finished(kvx_worker_t *worker, const char *id, uint32_t len, int failed)
{
	kvx_finished_t *finished = &worker->finished[worker->finished_added % KVX_WORKER_NAMES];

	if (worker->finished_added - worker->finished_taken == KVX_WORKER_NAMES) {
		return 0;
	}
	*finished = (kvx_finished_t){.failed = failed, .len = len};
	memcpy(finished->id, id, len);
	worker->finished_added++;

	return 1;
}

void kvx_report_add_step(kvx_worker_t *worker, uint32_t step, uint64_t ns)
{
	kvx_report_step_t *record = kvx_msg_add_record(open_report(worker), KVX_RECORD_STEP, sizeof *record);

	if (record) {
		record->step = step;
		record->ns = ns;
	}
}

void kvx_report_add_dropped(kvx_worker_t *worker, uint64_t put)
{
	kvx_report_dropped_t *record = kvx_msg_add_record(open_report(worker), KVX_RECORD_DROPPED, sizeof *record);

	kvx_stat_add(&worker->stats.save_dropped, 1);
	if (record) {
		record->put = put;
	}
}
