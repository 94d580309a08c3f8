#include "report.h"

#include "kv/text.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static uint64_t hash_tokens(uint64_t hash, const uint32_t *tokens, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		hash = (hash ^ tokens[i]) * UINT64_C(0x100000001b3);
	}

	return hash;
}

void report_begin(report_t *report, const char *phase)
{
	kv_text_t json;

	*report = (report_t){.phase = phase, .hash = UINT64_C(0xcbf29ce484222325)};
	json = kv_text(report->phase_json, sizeof report->phase_json);
	kv_text_json_n(&json, phase, strnlen(phase, REPORT_MAX_PHASE));
}

/* Is this answer the reference's? Every line of the reference is one request, in the same order. */
static int same_as_reference(report_t *report, uint64_t answer)
{
	char line[32];

	return fgets(line, sizeof line, report->reference) && strtoull(line, NULL, 16) == answer;
}

void report_end(report_t *report)
{
	char line[32];

	/* Answers of the reference that this run has not given. */
	while (report->reference && fgets(line, sizeof line, report->reference)) {
		report->different++;
	}
}

static void log_request(report_t *report, const kve_request_t *r, uint64_t answer)
{
	fprintf(report->log,
		"{\"phase\":%s,\"session\":%" PRIu64
		",\"turn\":%u,\"prompt_tokens\":%u,\"cpu_tokens\":%u,\"disk_tokens\":%u,"
		"\"ttft_ns\":%" PRIu64 ",\"load_ns\":%" PRIu64 ",\"load_cause\":\"%s\",\"answer\":\"%016" PRIx64
		"\"}\n",
		report->phase_json, r->session, r->turn, r->n_prompt, r->load.cpu_tokens, r->load.disk_tokens,
		r->first_token_ns - r->submit_ns, r->load.load_ns, kvc_status_name(r->load.cause), answer);
	(void)fflush(report->log);
}

void report_request(report_t *report, const kve_request_t *r)
{
	const uint32_t n_new = r->n_tokens - r->n_prompt;
	const uint32_t loaded = r->load.cpu_tokens + r->load.disk_tokens;
	const uint64_t answer = hash_tokens(UINT64_C(0xcbf29ce484222325), r->tokens + r->n_prompt, n_new);
	const uint64_t ttft = r->first_token_ns - r->submit_ns;

	report->requests++;
	report->prompt_tokens += r->n_prompt;
	report->output_tokens += n_new;
	report->cpu_tokens += r->load.cpu_tokens;
	report->disk_tokens += r->load.disk_tokens;
	report->hash = hash_tokens(report->hash, r->tokens + r->n_prompt, n_new);
	if (2 * loaded >= r->n_prompt && report->n_warm < REPORT_MAX_REQUESTS) {
		report->warm[report->n_warm++] = ttft;
	} else if (2 * loaded < r->n_prompt && report->n_cold < REPORT_MAX_REQUESTS) {
		report->cold[report->n_cold++] = ttft;
	}

	if (report->reference) {
		report->different += !same_as_reference(report, answer);
	}
	if (report->reference_out) {
		fprintf(report->reference_out, "%016" PRIx64 "\n", answer);
	}
	if (report->log) {
		log_request(report, r, answer);
	}
}

static int by_value(const void *a, const void *b)
{
	const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static uint64_t median(uint64_t *values, uint32_t n)
{
	if (n == 0) {
		return 0;
	}
	qsort(values, n, sizeof *values, by_value);

	return values[n / 2];
}

static const char *verdict(const report_t *report)
{
	if (!report->reference) {
		return "-";
	}

	return report->different ? "NO" : "yes";
}

void report_header(FILE *out)
{
	fprintf(out, "%-28s %8s %8s %9s %9s %6s  %14s %14s  %s\n", "phase", "requests", "prompt", "hit cpu", "hit disk",
		"hit", "ttft cold", "ttft warm", "tokens equal");
	fprintf(out, "%-28s %8s %8s %9s %9s %6s  %14s %14s  %s\n", "", "", "tokens", "tokens", "tokens", "%",
		"median ms (n)", "median ms (n)", "to no cache");
}

static void print_ttft(uint64_t *values, uint32_t n, FILE *out)
{
	char text[32] = "-";

	if (n > 0) {
		(void)snprintf(text, sizeof text, "%.1f (%u)", (double)median(values, n) / 1e6, n);
	}
	fprintf(out, " %14s", text);
}

void report_row(report_t *r, FILE *out)
{
	const double hit =
		r->prompt_tokens ? 100.0 * (double)(r->cpu_tokens + r->disk_tokens) / (double)r->prompt_tokens : 0.0;

	fprintf(out, "%-28s %8u %8" PRIu64 " %9" PRIu64 " %9" PRIu64 " %6.1f ", r->phase, r->requests, r->prompt_tokens,
		r->cpu_tokens, r->disk_tokens, hit);
	print_ttft(r->cold, r->n_cold, out);
	print_ttft(r->warm, r->n_warm, out);
	fprintf(out, "  %s\n", verdict(r));
}

void report_json(report_t *r, const kvx_stats_t *stats, const kve_rank_stats_t *ranks, FILE *out)
{
	fprintf(out,
		"{\"phase\":%s,\"requests\":%u,\"prompt_tokens\":%" PRIu64 ",\"output_tokens\":%" PRIu64
		",\"hit_cpu_tokens\":%" PRIu64 ",\"hit_disk_tokens\":%" PRIu64,
		r->phase_json, r->requests, r->prompt_tokens, r->output_tokens, r->cpu_tokens, r->disk_tokens);
	fprintf(out,
		",\"ttft_cold_ns\":%" PRIu64 ",\"cold\":%u,\"ttft_warm_ns\":%" PRIu64
		",\"warm\":%u,\"different\":%u,\"hash\":\"%016" PRIx64 "\"",
		median(r->cold, r->n_cold), r->n_cold, median(r->warm, r->n_warm), r->n_warm, r->different, r->hash);
	fprintf(out,
		",\"seq_steps\":%" PRIu64 ",\"dbo_steps\":%" PRIu64 ",\"dispatch_bytes\":%" PRIu64
		",\"combine_bytes\":%" PRIu64,
		ranks->steps[KVE_OVERLAP_SEQ], ranks->steps[KVE_OVERLAP_DBO], ranks->sent.dispatch_bytes,
		ranks->sent.combine_bytes);
	fprintf(out,
		",\"store\":{\"loads\":%" PRIu64 ",\"load_hits\":%" PRIu64 ",\"load_misses\":%" PRIu64
		",\"load_refused\":%" PRIu64 ",\"load_timeouts\":%" PRIu64 ",\"load_corrupt\":%" PRIu64
		",\"load_lost\":%" PRIu64,
		stats->loads, stats->load_hits, stats->load_misses, stats->load_refused, stats->load_timeouts,
		stats->load_corrupt, stats->load_lost);
	fprintf(out,
		",\"saves\":%" PRIu64 ",\"save_done\":%" PRIu64 ",\"save_refused\":%" PRIu64
		",\"save_timeouts\":%" PRIu64 ",\"save_busy\":%" PRIu64 ",\"save_lost\":%" PRIu64
		",\"blocks_saved\":%" PRIu64 ",\"attaches\":%" PRIu64 ",\"self_test_failures\":%" PRIu64 "}}\n",
		stats->saves, stats->save_done, stats->save_refused, stats->save_timeouts, stats->save_busy,
		stats->save_lost, stats->blocks_saved, stats->attaches, stats->self_test_failures);
}
