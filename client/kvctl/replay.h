/* replay.h -- drive a daemon with a request trace, through libkvc, with real bytes. */
#ifndef KVCTL_REPLAY_H
#define KVCTL_REPLAY_H

#include "kvc.h"
#include "trace.h"

/* How a replay is counted, so that figures compare: one request after the other; hit = longest run of its blocks from
 * the first that is resident; then every block of the request is offered to the store, blocks of the running request
 * being leased. A request of more than `blocks` blocks offers its first `blocks` only. */
typedef struct replay_job {
	const trace_t *trace;
	const char *socket;
	const char *name; /* of the trace: enters the space's identity */
	uint32_t clients; /* processes; request i goes to client i mod clients */
	uint32_t client;  /* which of them this one is */
	uint32_t blocks;  /* largest number of blocks a request offers; 0: all */
	uint32_t block_bytes;
	uint32_t timeout_ms;
} replay_job_t;

/* One latency sample in nanoseconds a request; plain arrays in memory shared between the client processes. */
typedef struct replay_samples {
	uint64_t *match_ns;
	uint64_t *acquire_ns; /* answer, reads from disk and verified copy */
	uint64_t *put_ns;     /* start to visible; 0: nothing to put */
} replay_samples_t;

typedef struct replay_result {
	uint64_t requests;
	uint64_t input_tokens;
	uint64_t hit_tokens;
	uint64_t hit_cpu_tokens;
	uint64_t hit_blocks;
	uint64_t put_blocks;
	uint64_t put_failed_blocks;
	uint64_t wrong_bytes;
	uint64_t corrupt_blocks; /* refused by their digest: a miss, never wrong bytes */
	uint64_t bytes_read;
	uint64_t bytes_written;
	uint64_t failures; /* requests that a failed call cut short */
	int32_t status;    /* why the client gave up: it had no daemon, or no longer; KVC_OK when it did not */
} replay_result_t;

/* Replay this client's requests. Samples are indexed by the request's number in the trace. */
void replay_client(const replay_job_t *job, replay_samples_t samples, replay_result_t *result);

/* A daemon of our own: `blocks` CPU slots exactly, no disk tier. Empty when not started. */
typedef struct private_daemon {
	int pid;
	char dir[64];
	char socket[96];
} private_daemon_t;
kv_status_t private_daemon_start(private_daemon_t *daemon, uint32_t blocks, uint32_t block_bytes, const char *policy,
				 char *detail, size_t cap);
void private_daemon_stop(private_daemon_t *daemon);

#endif
