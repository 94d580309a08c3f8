/* A timeline in two forms. */
#include "timeline.h"

#include "command.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#define COLUMNS      100u
#define LAYERS_SHOWN 3u

static const struct {
	const char *name;
	char letter; /* of its first column; 0: it goes on with the phase before it */
} phases[KVE_PHASES] = {
	[KVE_PHASE_QKV] = {"QKV", 'A'},
	[KVE_PHASE_ATTENTION] = {"attention", 0},
	[KVE_PHASE_DISPATCH_SEND] = {"dispatch send", 'D'},
	[KVE_PHASE_DISPATCH_RECV] = {"dispatch recv", 0},
	[KVE_PHASE_EXPERTS] = {"experts", 'E'},
	[KVE_PHASE_COMBINE_SEND] = {"combine send", 'C'},
	[KVE_PHASE_SHARED] = {"shared experts", 'S'},
	[KVE_PHASE_COMBINE_RECV] = {"combine recv", 0},
};

static const char *const streams[KVE_STREAMS] = {"compute", "transport"};

/* Of [0, end): a column begins where the one before it has ended. */
static void draw_row(const timeline_t *t, kve_stream_t stream, uint64_t end, char row[COLUMNS + 1])
{
	memset(row, '.', COLUMNS);
	row[COLUMNS] = '\0';
	for (uint32_t i = 0; i < t->n; i++) {
		const kve_clock_interval_t interval = t->intervals[i];
		const uint64_t first = interval.start * COLUMNS / end, last = interval.end * COLUMNS / end;
		const char letter = phases[t->items[i].phase].letter;

		if (t->items[i].stream != stream || interval.start == interval.end) {
			continue;
		}
		for (uint64_t c = first; c < last && c < COLUMNS; c++) {
			row[c] = c == first && letter ? letter : (char)('0' + t->items[i].microbatch);
		}
	}
}

void timeline_print(const timeline_t *t, FILE *out)
{
	uint32_t layers = 0;
	uint64_t end = 0;

	for (uint32_t i = 0; i < t->n; i++) {
		if (t->items[i].layer < LAYERS_SHOWN) {
			layers = t->items[i].layer >= layers ? t->items[i].layer + 1 : layers;
			end = t->intervals[i].end > end ? t->intervals[i].end : end;
		}
	}
	if (end == 0) {
		return;
	}

	fprintf(out, "until the end of layer %" PRIu32 ", %" PRIu64 " us: A attention, E experts, S shared experts, ",
		layers - 1, end);
	fprintf(out, "D dispatch, C combine; then the microbatch; . nothing\n");
	for (unsigned s = 0; s < KVE_STREAMS; s++) {
		char row[COLUMNS + 1];

		draw_row(t, (kve_stream_t)s, end, row);
		fprintf(out, "%-10s %s\n", streams[s], row);
	}
}

void timeline_trace(const timeline_t *t, FILE *out)
{
	fprintf(out, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
	for (unsigned s = 0; s < KVE_STREAMS; s++) {
		fprintf(out,
			"{\"ph\":\"M\",\"pid\":0,\"tid\":%u,\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}},\n", s,
			streams[s]);
	}
	for (uint32_t i = 0; i < t->n; i++) {
		const kve_overlap_item_t *item = &t->items[i];

		fprintf(out,
			"{\"ph\":\"X\",\"pid\":0,\"tid\":%u,\"ts\":%" PRIu64 ",\"dur\":%" PRIu64
			",\"name\":\"%s %" PRIu32 "\",\"cname\":\"%s\",\"args\":{\"layer\":%" PRIu32
			",\"microbatch\":%" PRIu32 "}}%s\n",
			(unsigned)item->stream, t->intervals[i].start, t->intervals[i].end - t->intervals[i].start,
			phases[item->phase].name, item->microbatch,
			item->microbatch ? "thread_state_iowait" : "thread_state_running", item->layer,
			item->microbatch, i + 1 < t->n ? "," : "");
	}
	fprintf(out, "]}\n");
}

int timeline_write(const timeline_t *timeline, const char *path)
{
	FILE *file = fopen(path, "w");
	int failed = !file;

	if (file) {
		timeline_trace(timeline, file);
		failed = ferror(file);
		failed |= fclose(file) != 0;
	}
	if (failed) {
		fprintf(stderr, "kve: --timeline %s: %s\n", path, strerror(errno));
	}

	return failed ? EXIT_WRITE : 0;
}
