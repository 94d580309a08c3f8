/* lookup/stalls -- stored prompts of 4,096 tokens looked up and leased by the scheduling half while the daemon is
 * stopped and continued at random moments, up to 40 ms at a time with up to 30 ms between: the part of the stored
 * tokens that is hit, against the same with a daemon left in peace. Goal: at least 0.99.
 *
 * Parameters: hogs=N busy loops beside (default 0), in the daemon's session: what it then loses is for want of a
 * processor.
 */
#include "bench.h"
#include "rig.h"

#include "kvx_scheduler.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROMPTS  8u
#define UNIT     16u
#define TOKENS   4096u
#define BLOCKS   (TOKENS / UNIT)
#define LOOKUPS  100u
#define STALL_US 38000u /* with what the sleep adds, 40 ms */
#define GAP_US   30000u
#define PAUSE_US 10000u
#define MAX_HOGS 64u
#define WAIT_MS  20000u

typedef struct work {
	rig_t rig;
	kvk_layout_t layout;
	char layout_text[KVK_LAYOUT_TEXT_MAX];
	kvc_identity_t identity;
	kvc_t *kvc;
	kvc_space_t *space;
	kvx_scheduler_t *scheduler;
	kvc_key_t keys[BLOCKS];
	uint64_t hash[2];
	uint32_t asked;
	_Atomic int stop;
	pid_t hogs[MAX_HOGS];
	uint32_t hog_count;
} work_t;

static const uint8_t secret[16] = "bench's secret!!";

static void describe(work_t *w)
{
	w->layout = (kvk_layout_t){.heads = 1,
				   .layers = 1,
				   .block_tokens = UNIT,
				   .dtype = KVK_DTYPE_F32,
				   .inner = KVK_INNER_OPAQUE,
				   .page_bytes = 64};
	(void)kvk_layout_format(&w->layout, w->layout_text, sizeof w->layout_text);
	w->identity = (kvc_identity_t){.struct_size = sizeof w->identity,
				       .model = "stalls",
				       .weights = "bench",
				       .dtype = "f32",
				       .rope = "none",
				       .hash = "bench:seed",
				       .hash_tokens = UNIT,
				       .layout = w->layout_text,
				       .page_format = "bench"};
}

/* The hash that rig_keys() has bound. */
static const void *hash_at(void *ctx, uint32_t i, uint32_t *p_len)
{
	work_t *w = ctx;

	w->hash[1] = i;
	*p_len = sizeof w->hash;

	return w->hash;
}

static int store(work_t *w)
{
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = w->rig.socket,
				     .instance = "bench",
				     .secret = secret,
				     .secret_len = sizeof secret,
				     .timeout_ms = WAIT_MS};

	if (kvc_attach(&config, &w->kvc) != KVC_OK || kvc_space_open(w->kvc, &w->identity, &w->space) != KVC_OK) {
		return -1;
	}
	for (uint32_t i = 0; i < PROMPTS; i++) {
		rig_keys(w->space, 0, 0, i + 1u, BLOCKS, w->keys);
		if (rig_put_index(w->space, w->keys, 0, BLOCKS) != 0) {
			return -1;
		}
	}

	return 0;
}

static int open_scheduler(work_t *w)
{
	const kvc_writer_t writer = {.head_count = 1, .layer_count = 1};
	const kvx_scheduler_config_t config = {.struct_size = sizeof config,
					       .socket = w->rig.socket,
					       .instance = "bench",
					       .secret = secret,
					       .secret_len = sizeof secret,
					       .identity = &w->identity,
					       .layout = &w->layout,
					       .writers = &writer,
					       .writer_count = 1,
					       .max_blocks = BLOCKS,
					       .foreign = 1};

	if (kvx_scheduler_open(&config, &w->scheduler) != KVC_OK) {
		return -1;
	}
	for (uint32_t ms = 0; ms < WAIT_MS && !kvx_scheduler_is_ready(w->scheduler); ms++) {
		(void)kvx_scheduler_has_pending(w->scheduler);
		usleep(1000);
	}

	return kvx_scheduler_is_ready(w->scheduler) ? 0 : -1;
}

/* The part of the stored tokens that LOOKUPS lookups hit. */
static double look_up(work_t *w)
{
	uint64_t hit_tokens = 0;

	for (uint32_t i = 0; i < LOOKUPS; i++) {
		const kvx_hashes_t hashes = {.at = hash_at, .ctx = w, .n = BLOCKS};
		const void *plan;
		size_t len;
		kvx_hit_t hit;
		char id[16];
		kvx_ask_t ask = {.struct_size = sizeof ask, .id = id, .hashes = &hashes, .tokens = TOKENS + 1u};

		ask.id_len = (uint32_t)snprintf(id, sizeof id, "%u", w->asked++);
		w->hash[0] = i % PROMPTS + 1u;
		usleep((useconds_t)(w->asked * 2654435761u % PAUSE_US));
		kvx_scheduler_match(w->scheduler, &ask, &hit);
		hit_tokens += hit.tokens;
		kvx_scheduler_finish(w->scheduler, &ask);
		kvx_scheduler_build_message(w->scheduler, &plan, &len);
	}

	return (double)hit_tokens / ((double)LOOKUPS * TOKENS);
}

static void *stall(void *arg)
{
	work_t *w = arg;
	uint64_t state = 1;

	while (!atomic_load(&w->stop)) {
		state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
		usleep((useconds_t)((state >> 33) % GAP_US));
		kill(w->rig.pid, SIGSTOP);
		usleep((useconds_t)((state >> 13) % STALL_US));
		kill(w->rig.pid, SIGCONT);
	}

	return NULL;
}

static bench_outcome_t stalled(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	work_t *w = arg;
	pthread_t thread;

	atomic_store(&w->stop, 0);
	if (pthread_create(&thread, NULL, stall, w) != 0) {
		return bench_fail(run, "no thread");
	}
	p_sample->value = look_up(w);
	p_sample->ops = LOOKUPS;
	atomic_store(&w->stop, 1);
	pthread_join(thread, NULL);

	return BENCH_DONE;
}

static bench_outcome_t in_peace(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	(void)run;
	p_sample->value = look_up(arg);
	p_sample->ops = LOOKUPS;

	return BENCH_DONE;
}

static void begin_hogs(work_t *w, uint64_t count)
{
	while (w->hog_count < count && w->hog_count < MAX_HOGS) {
		const pid_t pid = fork();

		if (pid == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			for (volatile uint64_t i = 0;; i++) {
			}
		}
		if (pid < 0) {
			return;
		}
		w->hogs[w->hog_count++] = pid;
	}
}

static bench_outcome_t run_stalls(bench_run_t *run)
{
	work_t *w = calloc(1, sizeof *w);
	bench_outcome_t outcome;

	if (!w) {
		return bench_fail(run, "no memory");
	}
	w->rig = (rig_t){
		.cpu = -1,
		.options = {"--limits.silence=50ms", "--cpu.size=64MiB", "--nvme.path=", "--events.enabled=off"}};
	describe(w);
	if (rig_start(&w->rig, WAIT_MS) != 0 || store(w) != 0 || open_scheduler(w) != 0) {
		outcome = bench_fail(run, "no daemon with stored prompts: %s", kvc_last_error());
	} else {
		begin_hogs(w, bench_param_size(run, "hogs", 0));
		outcome = bench_measure(run, &(bench_measurement_t){.name = "lookup/stalls",
								    .unit = "ratio",
								    .reference = "a daemon left in peace",
								    .value_fn = stalled,
								    .reference_fn = in_peace,
								    .arg = w,
								    .rounds = 5,
								    .goal = BENCH_VALUE_AT_LEAST,
								    .goal_value = 0.99});
	}
	for (uint32_t i = 0; i < w->hog_count; i++) {
		kill(w->hogs[i], SIGKILL);
		waitpid(w->hogs[i], NULL, 0);
	}
	kvx_scheduler_close(w->scheduler);
	kvc_detach(w->kvc);
	rig_remove(&w->rig);
	free(w);

	return outcome;
}

const bench_t bench_lookup_stalls = {
	.name = "lookup/stalls",
	.measures = "part of the stored tokens hit while the daemon is stopped up to 40 ms at a time",
	.reference = "the same with a daemon left in peace",
	.goal = "value >= 0.99",
	.run = run_stalls,
};
