/* report.h -- what a run of the chat says: a line a request, a row or an object a phase, and the comparison with a run
 * without any cache. */
#ifndef KVE_CHAT_REPORT_H
#define KVE_CHAT_REPORT_H

#include "kve/engine.h"

#include <stdio.h>

#define REPORT_MAX_REQUESTS 4096u
#define REPORT_MAX_PHASE    64u

typedef struct report {
	const char *phase; /* at most REPORT_MAX_PHASE bytes                                  */
	char phase_json[6u * REPORT_MAX_PHASE + 3u]; /* the same as a JSON string, quotes and all */
	FILE *log;                                   /* a JSON object a request, flushed at once; NULL: none     */
	FILE *reference_out;                         /* hash of each answer; NULL: none                          */
	FILE *reference;                             /* such hashes of a run without cache; NULL: not compared   */
	uint32_t requests;
	uint64_t prompt_tokens, cpu_tokens, disk_tokens, output_tokens;
	uint64_t hash;      /* of all answers                                           */
	uint32_t different; /* answers that are not the reference's                     */
	uint64_t cold[REPORT_MAX_REQUESTS], warm[REPORT_MAX_REQUESTS]; /* times to the first token, ns */
	uint32_t n_cold, n_warm; /* warm: at least half of the prompt was loaded             */
} report_t;

void report_begin(report_t *report, const char *phase);
/* Count one finished request. */
void report_request(report_t *report, const kve_request_t *request);

/* After the last request: what the reference has beyond them counts as different. */
void report_end(report_t *report);
void report_header(FILE *out);
void report_row(report_t *report, FILE *out);
/* stats, ranks: of all ranks. */
void report_json(report_t *report, const kvx_stats_t *stats, const kve_rank_stats_t *ranks, FILE *out);

#endif
