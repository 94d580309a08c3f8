/* Loads: match, acquire, then scatter ready blocks, a bounded number in each poll.
 *
 * A block counts only if the lease was still valid after it was copied and its digests were right: the memory of an
 * ended lease may already hold another block. */
#include "inproc/load.h"
#include "common/await.h"
#include "inproc/job.h"

#include <string.h>

static void count_result(kvx_load_t *load, kvc_status_t cause)
{
	kvx_stats_t *stats = &load->job.kvx->stats;

	if (load->job.internal) {
		return;
	}

	stats->load_hits += load->done > load->skip;
	stats->cpu_tokens += load->result.cpu_tokens;
	stats->disk_tokens += load->result.disk_tokens;
	stats->load_timeouts += cause == KVC_ERR_TIMEOUT;
	stats->load_corrupt += cause == KVC_ERR_CORRUPT;
	stats->load_lost += cause < 0 && cause != KVC_ERR_TIMEOUT && cause != KVC_ERR_CORRUPT;
	stats->load_misses += cause == KVC_MISS && load->done == load->skip;
}

/* Every load ends here. */
static void finish_load(kvx_load_t *load, kvc_status_t cause)
{
	const uint32_t block_tokens = load->job.kvx->layout.block_tokens;
	const uint32_t leased = kvc_lease_n(load->lease);
	const uint32_t disk = kvc_lease_disk(load->lease);
	const uint32_t first_disk = leased > disk ? leased - disk : 0;
	const uint32_t from_disk = load->done > first_disk ? load->done - first_disk : 0;
	const uint32_t loaded = load->done - load->skip;
	kvx_load_result_t *result = &load->result;

	result->status = loaded > 0 ? KVC_OK : KVC_MISS;
	result->cause = cause;
	result->blocks = load->done;
	result->tokens = load->done * block_tokens;
	result->disk_tokens = (from_disk < loaded ? from_disk : loaded) * block_tokens;
	result->cpu_tokens = loaded * block_tokens - result->disk_tokens;
	result->load_ns = kvx_now_ns() - load->job.start_ns;
	if (load->done < load->job.n) {
		result->first_missing = load->job.keys[load->done];
	}
	if (cause == KVC_ERR_CORRUPT || cause == KVC_ERR_TIMEOUT || cause == (kvc_status_t)KV_ERR_IO) {
		result->why = cause == KVC_ERR_CORRUPT   ? KV_WHY_CORRUPT
			      : cause == KVC_ERR_TIMEOUT ? KV_WHY_TIMEOUT
							 : KV_WHY_UNREADABLE;
	}

	kvc_release(&load->lease, 1);
	load->lease = NULL;
	count_result(load, cause);
}

kvc_status_t kvx_load_start(kvx_t *kvx, const kvk_paged_t *paged, const kvx_prefix_t *prefix, kvx_load_t **p_load,
			    kvx_load_result_t *result)
{
	const uint32_t deadline_ms = prefix->deadline_ms ? prefix->deadline_ms : kvx->load_ms;
	kvx_load_t *load = (kvx_load_t *)kvx_job_create(kvx, paged, prefix, sizeof *load, NULL);
	kvc_match_t match = {.struct_size = sizeof match};

	if (!load) {
		kvx->stats.load_refused++;
		*result = (kvx_load_result_t){.status = KVC_MISS, .cause = KVC_ERR_ARG};
		return KVC_MISS;
	}

	load->result.status = KVC_MISS;
	load->result.cause = KVC_MISS;
	do { /* the daemon may have been stopped in the middle of a bucket */
		kvc_match(kvx->space, load->job.keys, load->job.n, &match);
	} while (match.why == KV_WHY_CONTENDED &&
		 kvx_await_daemon(kvx->kvc, &kv_env_posix, load->job.start_ns, load->job.start_ns + KVX_STALE_NS));
	load->result.match_ns = kvx_now_ns() - load->job.start_ns;
	load->result.why = match.why;
	load->skip = prefix->skip;
	load->done = prefix->skip;
	load->result.blocks = load->skip;
	load->result.tokens = load->skip * kvx->layout.block_tokens;
	load->job.deadline_ns = load->job.start_ns + (uint64_t)deadline_ms * 1000000u;
	if (match.n < load->job.n) {
		load->result.first_missing = load->job.keys[match.n];
	}
	if (match.n <= load->skip) {
		kvx->stats.load_misses += !load->job.internal;
		goto miss;
	}
	load->result.cause = kvc_acquire_start(kvx->space, load->job.keys, match.n, load->skip, 0, &load->lease);
	if (load->result.cause != KVC_OK) {
		load->result.why = KV_WHY_NO_DAEMON;
		kvx->stats.load_lost += !load->job.internal;
		goto miss;
	}

	load->result.status = KVC_PENDING;
	*p_load = load;
	*result = load->result;

	return KVC_PENDING;

miss:
	*result = load->result;
	kvx_job_destroy(&load->job);
	return KVC_MISS;
}

/* Blocks of the lease that are wanted. */
static uint32_t wanted_blocks(const kvx_load_t *load)
{
	const uint32_t n = kvc_lease_n(load->lease);

	return n < load->job.n ? n : load->job.n;
}

static uint32_t ready_blocks(const kvx_load_t *load)
{
	const uint32_t n = wanted_blocks(load);
	const uint32_t there = kvc_lease_ready(load->lease);

	return there < n ? there : n;
}

int kvx_load_movable(const kvx_load_t *load)
{
	if (!load->lease) {
		return 0;
	}

	return kvc_lease_state(load->lease) != KVC_PENDING &&
	       (ready_blocks(load) > load->done || load->done >= wanted_blocks(load));
}

/* Scatter blocks [done, done + count). OK: all are verified. CORRUPT: *p_good of them are. */
static kvc_status_t copy_blocks(kvx_load_t *load, uint32_t count, uint32_t *p_good)
{
	kvx_t *kvx = load->job.kvx;
	const uint32_t leaves = kvx_leaf_count(kvx);
	kvc_status_t status;
	uint32_t bad = 0;

	for (uint32_t i = 0; i < count; i++) {
		const void *data;
		const uint64_t *expected;

		status = kvc_lease_block(load->lease, load->done + i, &data, &expected);
		if (status != KVC_OK) {
			return status;
		}
		memcpy(kvx->leaves + (size_t)i * leaves, expected, leaves * sizeof(uint64_t));
		kvx->moves[i] = (kvk_move_t){
			.block = load->job.blocks[load->done + i],
			.data = (void *)(uintptr_t)data, /* scatter only reads it */
			.leaves = kvx->leaves + (size_t)i * leaves,
		};
	}

	status = (kvc_status_t)kvk_scatter(&kvx->layout, load->job.paged, kvx->moves, count, &bad);
	*p_good = status == KVC_ERR_CORRUPT ? bad : count;

	return status;
}

/* The daemon has ended, or stopped for too long. Checked only while a load makes no progress. */
static int daemon_has_gone(kvx_load_t *load, uint64_t now)
{
	const uint32_t why = kvx_miss_reason(load->job.kvx->space);

	return why == KV_WHY_NO_DAEMON || kvx_silent_too_long(&load->silent_ns, why == KV_WHY_DAEMON_STALE, now);
}

/* Nothing can be copied now: end the load if there is no hope of more. */
static void check_stalled(kvx_load_t *load, uint64_t now)
{
	const kvc_status_t rest = kvc_lease_rest_status(load->lease);

	if (now >= load->job.deadline_ns) {
		finish_load(load, KVC_ERR_TIMEOUT);
	} else if (rest < 0 &&
		   ready_blocks(load) <= load->done) { /* read after `rest`: no further block will be ready */
		finish_load(load, rest);
	} else if (daemon_has_gone(load, now)) {
		finish_load(load, KVC_ERR_DAEMON_STALE);
	}
}

uint32_t kvx_load_step(kvx_load_t *load, uint64_t now, uint32_t budget)
{
	kvc_status_t status = kvc_lease_state(load->lease);
	uint32_t count, good = 0;

	if (status == KVC_PENDING) {
		check_stalled(load, now);
		return 0;
	}
	if (status != KVC_OK) {
		finish_load(load, status);
		return 0;
	}

	count = ready_blocks(load) - load->done;
	if (count > budget) {
		count = budget;
	}
	if (count > 0) {
		const uint32_t first = load->done;
		kvc_status_t after;

		status = copy_blocks(load, count, &good);
		after = kvc_lease_state(load->lease);
		if (after != KVC_OK) {
			finish_load(load, after);
			return count;
		}
		load->done += good;
		load->job.kvx->stats.bytes_loaded += (uint64_t)good * load->job.kvx->geometry.block_bytes;
		if (status == KVC_ERR_CORRUPT) {
			(void)kvc_lease_report_bad(load->lease, first + good);
		}
		if (status != KVC_OK) {
			finish_load(load, status);
			return count;
		}
	}

	if (load->done >= wanted_blocks(load)) {
		finish_load(load, load->done == load->job.n ? KVC_OK : KVC_MISS);
	} else if (ready_blocks(load) == load->done) {
		check_stalled(load, now);
	} else if (now >= load->job.deadline_ns) {
		finish_load(load, KVC_ERR_TIMEOUT);
	}

	return count;
}

kvc_status_t kvx_load_state(const kvx_load_t *load, kvx_load_result_t *result)
{
	if (result) {
		*result = load->result;
	}

	return load->result.status;
}

void kvx_load_end(kvx_load_t *load)
{
	if (!load) {
		return;
	}
	if (load->lease) {
		load->job.kvx->stats.load_aborted += !load->job.internal;
		kvc_release(&load->lease, 1);
	}
	kvx_job_destroy(&load->job);
}
