/* transfer/pool-2m, -64m, transfer/wake-* -- KV handed from a producer to a consumer that waits for it, both processes
 * of their own on one daemon.
 *
 * pool: 1.25 GiB in blocks of 256 KiB, handed over chunk by chunk while the producer still puts: from its first put to
 * the consumer's last verified byte, less one chunk. Against the longer of the same puts and the same gets, each alone,
 * in the same chunks. The producer is pinned to the program's first CPU, the consumer to the second, the daemon to the
 * third (with two CPUs: the first). ns. Goal: ratio <= 1.1.
 *
 * wake: from the producer's last byte until the consumer is awake, which has slept for more than a millisecond, as has
 * the daemon. The end of the put and the hand-over are sent one after the other: the daemon sees the block visible when
 * it reads the second. Against a raw round trip over a UNIX socket whose partner has slept as long. two-cores: the
 * daemon, and the raw partner, on the second CPU, all with their usual spinning. one-core: all on the first, where none
 * spins. ns. Goal: ratio <= 1.5. */
#include "bench.h"
#include "rig.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCK_BYTES (256u << 10)
#define COLD_BYTES  ((size_t)256 << 20)
#define MAX_CHUNK   256u
#define MAX_BLOCKS  5120u
#define WAIT_MS     30000u
#define WAKES       60u
#define SLEEP_US    1500u
#define WAKE_BYTES  4096u /* of the block that is handed over */
#define ASK_BYTES   192u  /* HANDOVER_SEND */
#define REPLY_BYTES 64u   /* the notice HANDOVER */

/* What the producer does next; it answers with what became of it. */
typedef struct order {
	uint32_t what; /* PUT, HAND_OVER or WAKE */
	uint32_t seed;
} order_t;
enum { PUT = 0, HAND_OVER = 1, WAKE = 2 };

typedef struct answer {
	kvc_status_t status;
	uint64_t start_ns, end_ns; /* WAKE: start is the last byte */
	uint64_t cpu_ns;           /* of the process, meanwhile */
	char why[200];
} answer_t;

static struct {
	rig_t rig;
	uint32_t blocks, chunk; /* of one hand-over; of one chunk of it */
	uint32_t seed;          /* of the last prompt */
	unsigned producer_cpu, consumer_cpu;
	int orders; /* to the producer */
	pid_t producer;
	uint8_t *memory; /* source or target */
	size_t at;       /* in it */
	double longer_ns;
	rig_echo_t echo;
	kvc_key_t keys[MAX_BLOCKS];
	double ns[WAKES];
} work = {.echo.fd = -1};

/* ---- both sides ------------------------------------------------------------------------------ */

static void key_at(void *ctx, uint32_t i, kvc_key_t *key)
{
	(void)ctx;
	*key = work.keys[i];
}

static const kvc_key_source_t key_source = {.key = key_at};

static const char *transfer_of(uint32_t seed, char name[32])
{
	snprintf(name, 32, "bench-%u", seed);

	return name;
}

/* The next cold piece of n blocks. */
static uint8_t *advance(uint32_t n)
{
	const size_t bytes = (size_t)n * BLOCK_BYTES;

	work.at = work.at + bytes > COLD_BYTES ? 0 : work.at;
	work.at += bytes;

	return work.memory + work.at - bytes;
}

/* ---- the producer ---------------------------------------------------------------------------- */

static kvc_status_t put_chunk(uint32_t from, uint32_t n)
{
	uint8_t *source = advance(n - from);
	const void *blocks[MAX_CHUNK];
	const kvc_put_options_t options = {.struct_size = sizeof options, .blocks = blocks};
	uint32_t visible = 0;
	kvc_status_t status;

	for (uint32_t i = 0; i < n - from; i++) {
		blocks[i] = source + (size_t)i * BLOCK_BYTES;
	}
	status = kvc_put(work.rig.space, work.keys, from, n, &options, &visible);

	return status == KVC_OK && visible != n - from ? KVC_ERR_FULL : status;
}

/* A chunk goes while the one before is not answered yet only if it is the last: a later one covers it. */
static kvc_status_t hand_over(uint32_t seed, uint32_t n, kvc_handover_t **p_handover)
{
	char name[32];
	const kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk,
					    .transfer = transfer_of(seed, name),
					    .n = n,
					    .source = &key_source,
					    .last = n == work.blocks};
	kvc_status_t status = kvc_handover_send(work.rig.space, &chunk, p_handover);

	while (status == KVC_PENDING && chunk.last) {
		status = kvc_handover_wait(*p_handover, 0, WAIT_MS);
		status = status == KVC_OK ? kvc_handover_send(work.rig.space, &chunk, p_handover) : status;
	}

	return status == KVC_PENDING ? KVC_OK : status;
}

static kvc_status_t put_all(const order_t *order)
{
	kvc_handover_t *handover = NULL;
	kvc_status_t status = KVC_OK;

	rig_keys(work.rig.space, order->seed, work.blocks, work.keys);
	for (uint32_t n = 0; n < work.blocks && status == KVC_OK; n += work.chunk) {
		status = put_chunk(n, n + work.chunk);
		if (status == KVC_OK && order->what == HAND_OVER) {
			status = hand_over(order->seed, n + work.chunk, &handover);
		}
	}
	if (status == KVC_OK && handover) {
		status = kvc_handover_wait(handover, 0, WAIT_MS);
	}
	kvc_handover_done(handover, status != KVC_OK);

	return status;
}

/* One block, whose last byte is written when all are asleep. */
static kvc_status_t put_and_wake(const order_t *order, uint64_t *p_start_ns)
{
	kvc_handover_t *handover = NULL;
	kvc_put_t *put = NULL;
	kvc_status_t status;

	rig_keys(work.rig.space, order->seed, 1, work.keys);
	status = kvc_put_start(work.rig.space, work.keys, 0, 1, NULL, &put);
	status = status == KVC_OK ? kvc_put_ready(put, WAIT_MS) : status;
	usleep(SLEEP_US);
	status = status == KVC_OK ? kvc_put_write(put, 0, work.memory) : status;
	*p_start_ns = bench_now_ns();
	status = status == KVC_OK ? kvc_put_end(put, 0, 1) : status;
	status = status == KVC_OK ? hand_over(order->seed, 1, &handover) : status;
	status = status == KVC_OK ? kvc_handover_wait(handover, 0, WAIT_MS) : status;
	kvc_handover_done(handover, status != KVC_OK);
	kvc_put_free(put);

	return status;
}

/* Obey until the other end of the socket is closed. */
_Noreturn static void run_producer(int fd, uint32_t block_bytes)
{
	const size_t bytes = work.blocks > 1 ? COLD_BYTES : block_bytes;
	order_t order;

	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	bench_pin(work.producer_cpu);
	if (rig_attach(&work.rig, "transfer", block_bytes) != 0 || !(work.memory = bench_memory(bytes))) {
		_exit(1);
	}
	bench_fill(work.memory, bytes, 1);
	while (recv(fd, &order, sizeof order, MSG_WAITALL) == (ssize_t)sizeof order) {
		answer_t answer = {.start_ns = bench_now_ns(), .cpu_ns = bench_process_cpu_ns()};

		answer.status = order.what == WAKE ? put_and_wake(&order, &answer.start_ns) : put_all(&order);
		answer.end_ns = bench_now_ns();
		answer.cpu_ns = bench_process_cpu_ns() - answer.cpu_ns;
		snprintf(answer.why, sizeof answer.why, "%s", kvc_last_error());
		if (send(fd, &answer, sizeof answer, MSG_NOSIGNAL) != (ssize_t)sizeof answer) {
			break;
		}
	}
	_exit(0);
}

static int start_producer(uint32_t block_bytes)
{
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
		return -1;
	}
	work.orders = pair[0];
	fflush(NULL);
	work.producer = fork();
	if (work.producer == 0) {
		close(pair[0]);
		run_producer(pair[1], block_bytes);
	}
	close(pair[1]);

	return work.producer > 0 ? 0 : -1;
}

static int give_order(uint32_t what)
{
	const order_t order = {.what = what, .seed = work.seed};

	return send(work.orders, &order, sizeof order, MSG_NOSIGNAL) == (ssize_t)sizeof order ? 0 : -1;
}

static bench_outcome_t take_answer(answer_t *answer)
{
	if (recv(work.orders, answer, sizeof *answer, MSG_WAITALL) != (ssize_t)sizeof *answer) {
		return bench_fail("the producer has gone");
	}

	return answer->status == KVC_OK
		       ? BENCH_DONE
		       : bench_fail("the producer: %s: %s", kvc_status_text(answer->status), answer->why);
}

/* ---- the consumer ---------------------------------------------------------------------------- */

/* Lease n blocks and read those from `from` on; the lease before goes when there is the next. */
static kvc_status_t get_chunk(uint32_t from, uint32_t n, kvc_lease_t **p_lease)
{
	uint8_t *target = advance(n - from);
	void *blocks[MAX_CHUNK];
	kvc_lease_t *lease = NULL;
	kvc_status_t status = kvc_acquire(work.rig.space, work.keys, n, from, 0, &lease);

	kvc_release(p_lease, 1);
	*p_lease = lease;
	for (uint32_t i = 0; i < n - from; i++) {
		blocks[i] = target + (size_t)i * BLOCK_BYTES;
	}

	return status == KVC_OK ? kvc_lease_read(lease, from, n - from, blocks, NULL) : status;
}

static kvc_status_t get_all(kvc_handover_t *handover)
{
	kvc_lease_t *lease = NULL;
	kvc_status_t status = KVC_OK;

	for (uint32_t n = 0; n < work.blocks && status == KVC_OK; n += work.chunk) {
		if (handover) {
			status = kvc_handover_wait(handover, n + work.chunk, WAIT_MS);
		}
		status = status == KVC_OK ? get_chunk(n, n + work.chunk, &lease) : status;
	}
	kvc_release(&lease, 1);

	return status;
}

static bench_outcome_t wait_for_producer(kvc_handover_t **p_handover)
{
	char name[32];
	kvc_handover_info_t info = {.struct_size = sizeof info};
	kvc_status_t status;

	rig_keys(work.rig.space, ++work.seed, work.blocks, work.keys);
	status = kvc_handover_recv(work.rig.space, transfer_of(work.seed, name), 0, p_handover);
	for (kvc_handover_get_info(*p_handover, &info); status == KVC_OK && info.state == KVC_HANDOVER_ASKED;
	     kvc_handover_get_info(*p_handover, &info)) {
		kvc_poll(work.rig.kvc, 1);
	}

	return status == KVC_OK ? BENCH_DONE : bench_fail("%s", kvc_last_error());
}

static bench_outcome_t take_pipe(void *arg, bench_sample_t *p_sample)
{
	const uint64_t cpu = bench_process_cpu_ns();
	kvc_handover_t *handover = NULL;
	answer_t answer;
	uint64_t end_ns;
	kvc_status_t status;
	bench_outcome_t outcome = wait_for_producer(&handover);

	(void)arg;
	if (outcome != BENCH_DONE || give_order(HAND_OVER) != 0) {
		return outcome;
	}
	status = get_all(handover);
	end_ns = bench_now_ns();
	kvc_handover_done(handover, 0);
	if (status != KVC_OK) {
		return bench_fail("the consumer: %s", kvc_last_error());
	}
	outcome = take_answer(&answer);
	p_sample->value = (double)(end_ns - answer.start_ns) - work.longer_ns * work.chunk / work.blocks;
	p_sample->cpu_ns = (double)(bench_process_cpu_ns() - cpu + answer.cpu_ns);

	return outcome;
}

/* The longer of all puts and all gets. */
static bench_outcome_t take_alone(void *arg, bench_sample_t *p_sample)
{
	answer_t answer = {0};
	uint64_t start, cpu;
	bench_outcome_t outcome;

	(void)arg;
	rig_keys(work.rig.space, ++work.seed, work.blocks, work.keys);
	outcome = give_order(PUT) == 0 ? take_answer(&answer) : bench_fail("the producer has gone");
	if (outcome != BENCH_DONE) {
		return outcome;
	}
	start = bench_now_ns();
	cpu = bench_process_cpu_ns();
	if (get_all(NULL) != KVC_OK) {
		return bench_fail("the consumer: %s", kvc_last_error());
	}
	work.longer_ns = (double)(bench_now_ns() - start);
	if (work.longer_ns < (double)(answer.end_ns - answer.start_ns)) {
		work.longer_ns = (double)(answer.end_ns - answer.start_ns);
	}
	p_sample->value = work.longer_ns;
	p_sample->cpu_ns = (double)(bench_process_cpu_ns() - cpu + answer.cpu_ns);

	return BENCH_DONE;
}

static bench_outcome_t measure_pool(int large)
{
	const bench_measurement_t m = {large ? "transfer/pool-64m" : "transfer/pool-2m",
				       "ns",
				       "the longer of put and get alone",
				       take_pipe,
				       take_alone,
				       11,
				       BENCH_RATIO_AT_MOST,
				       1.1};

	work.chunk = large ? MAX_CHUNK : 8;
	work.blocks = bench_quick() ? MAX_BLOCKS / 10 : MAX_BLOCKS;
	work.consumer_cpu = 1;
	work.rig.cpu = bench_pin(2) + 1;
	bench_unpin();
	if (rig_start(&work.rig, " --limits.silence=10s --cpu.size=2GiB --cpu.slab_size=512MiB --nvme.path="
				 " --events.enabled=off --handover.max_bytes=1600MiB --instance.max_pinned=1600MiB"
				 " --instance.max_unfinished=256MiB") != 0 ||
	    start_producer(BLOCK_BYTES) != 0) {
		return bench_fail("daemon and producer could not be started");
	}
	bench_pin(work.consumer_cpu);
	if (rig_attach(&work.rig, "transfer", BLOCK_BYTES) != 0 || !(work.memory = bench_memory(COLD_BYTES))) {
		return bench_fail("the consumer could not be started");
	}
	/* Once through the whole pool: every page is touched and the pool is full. */
	for (uint32_t put = 0; put < (2u << 30) / BLOCK_BYTES; put += work.blocks) {
		bench_sample_t sample = {0};
		const bench_outcome_t outcome = take_alone(NULL, &sample);

		if (outcome != BENCH_DONE) {
			return outcome;
		}
	}

	return bench_measure(NULL, &m);
}

static bench_outcome_t take_wakes(void *arg, bench_sample_t *p_sample)
{
	(void)arg;
	for (uint32_t i = 0; i < WAKES; i++) {
		kvc_handover_t *handover = NULL;
		answer_t answer;
		uint64_t end_ns;
		kvc_status_t status;
		bench_outcome_t outcome = wait_for_producer(&handover);

		if (outcome != BENCH_DONE || give_order(WAKE) != 0) {
			return outcome;
		}
		status = kvc_handover_wait(handover, 0, WAIT_MS);
		end_ns = bench_now_ns();
		kvc_handover_done(handover, 0);
		outcome = take_answer(&answer);
		if (outcome != BENCH_DONE || status != KVC_OK) {
			return outcome != BENCH_DONE ? outcome : bench_fail("the consumer: %s", kvc_last_error());
		}
		work.ns[i] = (double)(end_ns - answer.start_ns);
	}
	p_sample->value = bench_quantile(work.ns, WAKES, 0.5);
	p_sample->ops = WAKES;

	return BENCH_DONE;
}

static bench_outcome_t take_trips(void *arg, bench_sample_t *p_sample)
{
	(void)arg;
	for (uint32_t i = 0; i < WAKES; i++) {
		uint64_t start;

		usleep(SLEEP_US);
		start = bench_now_ns();
		if (!rig_echo_trip(&work.echo)) {
			return bench_fail("the echo partner has gone");
		}
		work.ns[i] = (double)(bench_now_ns() - start);
	}
	p_sample->value = bench_quantile(work.ns, WAKES, 0.5);
	p_sample->ops = WAKES;

	return BENCH_DONE;
}

static bench_outcome_t measure_wake(int cores)
{
	const bench_measurement_t m = {cores == 1 ? "transfer/wake-one-core" : "transfer/wake-two-cores",
				       "ns",
				       "raw round trip",
				       take_wakes,
				       take_trips,
				       15,
				       BENCH_RATIO_AT_MOST,
				       1.5};
	const unsigned other = (unsigned)cores - 1;

	work.blocks = work.chunk = 1;
	work.echo = (rig_echo_t){.fd = -1, .ask = ASK_BYTES, .reply = REPLY_BYTES};
	if (rig_echo_start(&work.echo, other) != 0) {
		return bench_fail("the echo partner could not be started");
	}
	work.rig.cpu = bench_pin(other) + 1;
	bench_pin(work.consumer_cpu);
	if (rig_start(&work.rig, " --limits.silence=10s --cpu.size=256MiB --nvme.path= --events.enabled=off") != 0 ||
	    start_producer(WAKE_BYTES) != 0 || rig_attach(&work.rig, "transfer", WAKE_BYTES) != 0) {
		return bench_fail("daemon, producer and consumer could not be started");
	}

	return bench_measure(NULL, &m);
}

bench_outcome_t run_transfer(int variant)
{
	bench_outcome_t outcome;

	memset(&work, 0, sizeof work);
	work.echo.fd = work.orders = -1;
	outcome = variant < 2 ? measure_pool(variant) : measure_wake(variant - 1);
	if (work.orders >= 0) {
		close(work.orders);
	}
	if (work.producer > 0) {
		waitpid(work.producer, NULL, 0);
	}
	rig_echo_stop(&work.echo);
	rig_remove(&work.rig);
	free(work.memory);

	return outcome;
}
