/* Ranks as processes: heaps of memfds, whose descriptors they exchange. What they answer is what ranks of one process
 * answer, and one that dies or stands still anywhere is named by all others.
 *
 * The clock is a word of shared memory that the test moves, and only when no rank has anything left to do. */
#include "ep_case.h"

#include "kv/types.h"

#include "kvk/ep_group.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define MOST_RANKS 4u
#define TOKENS     5u
#define HIDDEN     16u
#define TOP_K      3u
#define NUMBERS    3u
#define DEADLINE   UINT64_C(1000000000)
#define START      UINT64_C(1000000000)
#define NOBODY     MOST_RANKS

typedef struct answer {
	kvk_bf16_t rows[NUMBERS][TOKENS * HIDDEN];
	kvk_ep_stats_t sent;
} answer_t;

/* In memory that all processes share. */
typedef struct board {
	_Atomic uint64_t now_ns, events; /* events: what ranks have done */
	_Atomic uint32_t over, expected; /* ranks that will do no more, and that will at last */
	struct {
		_Atomic uint64_t looks; /* at the clock */
		_Atomic uint32_t over;
		kv_status_t status;
		uint32_t lost, leaked;
		answer_t answer;
	} ranks[MOST_RANKS];
} board_t;

static struct {
	board_t *board;
	kvk_ep_plan_t plan;
	kvk_ep_link_kind_t kind;
	char directory[96];
	ep_batch_t batches[NUMBERS][MOST_RANKS];
	answer_t expected[MOST_RANKS];
	/* of the process */
	uint32_t rank, victim;
	int exchanges, signal;
	uint32_t looks_left, steps_left; /* until the victim gets its signal; 0: never */
	kvk_ep_link_t link;
} w;

/* ---- what a rank does ------------------------------------------------------------------------ */

static void fall(uint32_t *p_left)
{
	if (w.rank == w.victim && *p_left > 0 && --*p_left == 0) {
		atomic_fetch_sub(&w.board->expected, 1);
		raise(w.signal);
	}
}

static uint64_t look_at_clock(void *ctx)
{
	(void)ctx;
	if (w.exchanges) {
		fall(&w.looks_left);
	}
	atomic_fetch_add(&w.board->ranks[w.rank].looks, 1);

	return atomic_load(&w.board->now_ns);
}

static void step(void)
{
	fall(&w.steps_left);
	atomic_fetch_add(&w.board->events, 1);
}

static void put(void *ctx, uint32_t rank, size_t offset, const void *bytes, size_t n)
{
	step();
	w.link.put(ctx, rank, offset, bytes, n);
}

static void release(void *ctx, uint32_t rank, size_t offset, uint64_t value)
{
	step();
	w.link.release(ctx, rank, offset, value);
}

static kv_status_t run_number(kvk_ep_rank_t *ep, uint32_t rank, uint64_t number, answer_t *answer)
{
	static kvk_bf16_t outputs[MOST_RANKS * TOKENS * TOP_K * HIDDEN];
	const uint64_t deadline = atomic_load(&w.board->now_ns) + DEADLINE;
	kvk_ep_rows_t rows;
	uint64_t given;
	kv_status_t status = kvk_ep_dispatch_send(ep, &w.batches[number - 1][rank].tokens, &given);

	if (status == KV_OK) {
		step();
		status = kvk_ep_dispatch_recv(ep, number, deadline, &rows);
	}
	if (status == KV_OK) {
		step();
		ep_run_experts(&w.plan, rank, &rows, outputs);
		status = kvk_ep_combine_send(ep, number, outputs);
	}
	if (status == KV_OK) {
		step();
		status = kvk_ep_combine_recv(ep, number, deadline, answer->rows[number - 1]);
	}

	return status;
}

/* What others still do may make the names of the lost more exact. */
static void wait_for_others(void)
{
	atomic_fetch_add(&w.board->events, 1);
	atomic_store(&w.board->ranks[w.rank].over, 1);
	atomic_fetch_add(&w.board->over, 1);
	while (atomic_load(&w.board->over) < atomic_load(&w.board->expected)) {
		sched_yield();
	}
}

static kv_status_t run_group(const kv_env_t *env, const kvk_ep_memory_t *memory)
{
	void *heaps[MOST_RANKS];
	kvk_ep_link_t link;
	kvk_ep_rank_t *ep;
	kv_status_t status;

	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		heaps[r] = memory[r].base;
	}
	w.link = kvk_ep_link_of(w.kind, heaps);
	link = w.link;
	link.put = put;
	link.release = release;
	status = kvk_ep_open(env, &w.plan, w.rank, heaps[w.rank], &link, &ep);
	for (uint64_t n = 1; n <= NUMBERS && status == KV_OK; n++) {
		status = run_number(ep, w.rank, n, &w.board->ranks[w.rank].answer);
	}
	wait_for_others();
	w.board->ranks[w.rank].lost = kvk_ep_lost_ranks(ep);
	w.board->ranks[w.rank].answer.sent = kvk_ep_get_stats(ep);
	kvk_ep_close(ep);

	return status;
}

static kv_status_t map_all(const int *heaps, kvk_ep_memory_t *memory)
{
	kv_status_t status = KV_OK;

	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		if (r != w.rank && status == KV_OK) {
			status = kvk_ep_memory_map(heaps[r], w.plan.heap_bytes, &memory[r]);
			close(heaps[r]);
		}
	}

	return status;
}

static void rank_main(void)
{
	kv_env_t env = kv_env_posix;
	const uint32_t before = kv_test_count_fds(getpid(), "");
	kvk_ep_memory_t memory[MOST_RANKS] = {0};
	int heap, heaps[KVK_EP_MAX_RANKS];
	kvk_ep_exchange_fault_t fault;
	kv_status_t status;

	env.now_ns = look_at_clock;
	if (kvk_ep_memory_create(w.plan.heap_bytes, &memory[w.rank], &heap) != KV_OK) {
		_exit(1);
	}
	const kvk_ep_exchange_t config = {.env = &env,
					  .plan = &w.plan,
					  .directory = w.directory,
					  .rank = w.rank,
					  .link = w.kind,
					  .heap = heap,
					  .timeout_us = DEADLINE / 1000};
	w.exchanges = 1;
	status = kvk_ep_exchange(&config, heaps, &fault);
	w.exchanges = 0;
	close(heap);
	if (status == KV_OK) {
		atomic_fetch_add(&w.board->events, 1);
		status = map_all(heaps, memory);
		status = status == KV_OK ? run_group(&env, memory) : status;
	} else {
		printf("# rank %u: %s\n", w.rank, fault.why);
		wait_for_others();
		w.board->ranks[w.rank].lost = fault.lost;
	}
	w.board->ranks[w.rank].status = status;
	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		kvk_ep_memory_unmap(&memory[r]);
	}
	w.board->ranks[w.rank].leaked = kv_test_count_fds(getpid(), "") - before;
	fflush(stdout);
	_exit(0);
}

static pid_t start_rank(uint32_t rank)
{
	const pid_t pid = fork();

	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		w.rank = rank;
		rank_main();
	}
	assert_true(pid > 0);

	return pid;
}

/* ---- a group, and what one process makes of the same ------------------------------------------ */

static void draw_batches(kv_test_rng_t *rng)
{
	for (uint32_t n = 0; n < NUMBERS; n++) {
		for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
			ep_batch_open(&w.batches[n][r], &w.plan);
			ep_batch_draw(&w.batches[n][r], &w.plan, rng, r, EP_RANDOM);
			w.batches[n][r].tokens.n = TOKENS - n;
			w.batches[n][r].tokens.most = n == 0 ? 0 : TOKENS - 1u;
		}
	}
}

static void run_half(kvk_ep_rank_t **eps, uint64_t number)
{
	static kvk_bf16_t outputs[MOST_RANKS * TOKENS * TOP_K * HIDDEN];

	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		kvk_ep_rows_t rows;

		assert_int_equal(kvk_ep_dispatch_recv(eps[r], number, 0, &rows), KV_OK);
		ep_run_experts(&w.plan, r, &rows, outputs);
		assert_int_equal(kvk_ep_combine_send(eps[r], number, outputs), KV_OK);
	}
}

/* Ranks in turn, in this process, over stores. */
static void run_reference(void)
{
	const uint32_t ranks = w.plan.shape.ranks;
	kvk_ep_rank_t *eps[MOST_RANKS];
	void *heaps[MOST_RANKS] = {NULL};
	kvk_ep_link_t link = kvk_ep_memory_link(heaps);
	uint64_t given;

	memset(w.expected, 0, sizeof w.expected);
	for (uint32_t r = 0; r < ranks; r++) {
		heaps[r] = ep_alloc(w.plan.heap_bytes);
		assert_int_equal(kvk_ep_open(&kv_env_posix, &w.plan, r, heaps[r], &link, &eps[r]), KV_OK);
	}
	for (uint64_t n = 1; n <= NUMBERS; n++) {
		for (uint32_t r = 0; r < ranks; r++) {
			assert_int_equal(kvk_ep_dispatch_send(eps[r], &w.batches[n - 1][r].tokens, &given), KV_OK);
		}
		run_half(eps, n);
		for (uint32_t r = 0; r < ranks; r++) {
			assert_int_equal(kvk_ep_combine_recv(eps[r], n, 0, w.expected[r].rows[n - 1]), KV_OK);
		}
	}
	for (uint32_t r = 0; r < ranks; r++) {
		w.expected[r].sent = kvk_ep_get_stats(eps[r]);
		kvk_ep_close(eps[r]);
		free(heaps[r]);
	}
}

static void begin(uint32_t ranks)
{
	const kvk_ep_shape_t shape = {ranks, 12, TOP_K, HIDDEN, TOKENS, ranks, 1};
	kv_test_rng_t rng = {.state = kv_test_seed()};

	assert_int_equal(kvk_ep_plan(&shape, &w.plan, NULL), KV_OK);
	kv_test_dir_make(w.directory, sizeof w.directory);
	w.board = mmap(NULL, sizeof *w.board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	assert_true(w.board != MAP_FAILED);
	atomic_store(&w.board->now_ns, START);
	atomic_store(&w.board->expected, ranks);
	draw_batches(&rng);
	fflush(stdout);
}

static void end_test(void)
{
	for (uint32_t i = 0; i < NUMBERS * w.plan.shape.ranks; i++) {
		ep_batch_close(&w.batches[i % NUMBERS][i / NUMBERS]);
	}
	kv_test_dir_remove(w.directory);
	munmap(w.board, sizeof *w.board);
}

static void check_answer(uint32_t rank)
{
	const answer_t *answer = &w.board->ranks[rank].answer, *expected = &w.expected[rank];

	assert_int_equal(w.board->ranks[rank].status, KV_OK);
	assert_memory_equal(answer->rows, expected->rows, sizeof answer->rows);
	assert_int_equal(answer->sent.dispatch_bytes, expected->sent.dispatch_bytes);
	assert_int_equal(answer->sent.combine_bytes, expected->sent.combine_bytes);
	assert_int_equal(answer->sent.dispatch_padding, w.kind == KVK_EP_HOST_COPIES
								? (TOKENS + (NUMBERS - 1u) * (TOKENS - 1u)) *
										  (w.plan.shape.ranks - 1u) *
										  w.plan.record_bytes -
									  expected->sent.dispatch_bytes
								: 0);
}

/* ---- one that falls -------------------------------------------------------------------------- */

/* Longer than any rank is kept from running. */
static void nap(uint64_t *p_naps)
{
	usleep(500);
	assert_true(++*p_naps < UINT64_C(600000000) / 500);
}

/* Until each that is not over has looked at the clock four times more. */
static void let_ranks_look(void)
{
	uint64_t naps = 0, before[MOST_RANKS];

	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		before[r] = atomic_load(&w.board->ranks[r].looks);
	}
	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		while (r != w.victim && !atomic_load(&w.board->ranks[r].over) &&
		       atomic_load(&w.board->ranks[r].looks) < before[r] + 4) {
			nap(&naps);
		}
	}
}

/* Until nothing has happened for long enough that whatever was sent has been read, and what follows from it. */
static void let_ranks_settle(void)
{
	uint64_t before;
	int quiet = 0;

	while (quiet < 3) {
		before = atomic_load(&w.board->events);
		let_ranks_look();
		quiet = atomic_load(&w.board->events) == before ? quiet + 1 : 0;
	}
}

static int count_over(void)
{
	int over = 0;

	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		over += r != w.victim && atomic_load(&w.board->ranks[r].over);
	}

	return over;
}

/* The victim is dead, stands still, or has ended: 1. */
static int wait_for_victim(pid_t pid)
{
	uint64_t naps = 0;
	int status;

	while (waitpid(pid, &status, WUNTRACED | WNOHANG) == 0) {
		nap(&naps);
	}

	return WIFEXITED(status);
}

/* Up to a quarter of the deadline after it, all others are over. */
static void pass_deadline(void)
{
	const int others = (int)w.plan.shape.ranks - 1;
	uint64_t naps = 0;
	int over;

	let_ranks_settle();
	atomic_store(&w.board->now_ns, START + DEADLINE - 1);
	over = count_over();
	let_ranks_settle();
	assert_int_equal(count_over(), over); /* nobody gives up too early */
	atomic_store(&w.board->now_ns, START + DEADLINE);
	let_ranks_settle();
	atomic_store(&w.board->now_ns, START + DEADLINE * 5 / 4);
	while (count_over() < others) {
		nap(&naps);
	}
}

/* Others that the victim served to the end have all their answers; the rest name it, and it alone. Returns how many. */
static uint32_t check_others(void)
{
	uint32_t named = 0;

	for (uint32_t r = 0; r < w.plan.shape.ranks; r++) {
		const kv_status_t status = w.board->ranks[r].status;

		if (r == w.victim) {
			continue;
		}
		assert_int_equal(w.board->ranks[r].leaked, 0);
		if (status == KV_OK) {
			check_answer(r);
			continue;
		}
		assert_true(status == KV_ERR_TIMEOUT || (status == KV_ERR_CLOSED && w.signal == SIGKILL));
		assert_int_equal(w.board->ranks[r].lost, 1u << w.victim);
		named++;
	}

	return named;
}

/* The victim gets the signal at that look of its exchange, or at that step after it. 0: it has ended before. */
static int run_with_victim(uint32_t ranks, int signal, uint32_t look, uint32_t at_step, uint32_t *p_named)
{
	pid_t pids[MOST_RANKS];
	int has_ended, status;

	begin(ranks);
	run_reference();
	w.signal = signal;
	w.looks_left = look;
	w.steps_left = at_step;
	w.victim = (look + at_step) % ranks;
	w.kind = (kvk_ep_link_kind_t)(at_step % 3);
	for (uint32_t r = 0; r < ranks; r++) {
		pids[r] = r == w.victim ? 0 : start_rank(r);
	}
	let_ranks_settle(); /* those know each other before it comes */
	pids[w.victim] = start_rank(w.victim);
	has_ended = wait_for_victim(pids[w.victim]);
	if (!has_ended) {
		pass_deadline();
	}
	for (uint32_t r = 0; r < ranks; r++) {
		if (r != w.victim) {
			assert_int_equal(waitpid(pids[r], &status, 0), pids[r]);
			assert_int_equal(status, 0);
		}
	}
	if (!has_ended && signal == SIGSTOP) {
		kill(pids[w.victim], SIGKILL);
		assert_int_equal(waitpid(pids[w.victim], NULL, 0), pids[w.victim]);
	}
	*p_named = check_others();
	w.victim = NOBODY;
	end_test();

	return !has_ended;
}

/* ---- tests ----------------------------------------------------------------------------------- */

KV_TEST(p1_ranks_in_processes_give_the_bits_of_ranks_in_one)
{
	static const uint32_t ranks[] = {1, 2, 4};

	w.victim = NOBODY;
	for (size_t i = 0; i < KV_COUNT_OF(ranks) * 3; i++) {
		const uint32_t n = ranks[i / 3];
		pid_t pids[MOST_RANKS];
		int status;

		w.kind = (kvk_ep_link_kind_t)(i % 3);
		begin(n);
		run_reference();
		for (uint32_t r = 0; r < n; r++) {
			pids[r] = start_rank(r);
		}
		for (uint32_t r = 0; r < n; r++) {
			assert_int_equal(waitpid(pids[r], &status, 0), pids[r]);
			assert_int_equal(status, 0);
			check_answer(r);
			assert_int_equal(w.board->ranks[r].leaked, 0);
		}
		assert_int_equal(rmdir(w.directory), 0); /* no socket is left */
		end_test();
	}
}

static void fell_at_each_look(uint32_t ranks, int signal)
{
	for (uint32_t look = 1; look <= 6; look++) {
		uint32_t named;

		if (run_with_victim(ranks, signal, look, 0, &named)) {
			assert_int_equal(named, ranks - 1); /* amid the exchange */
		}
	}
}

static void fell_at_each_step(uint32_t ranks, int signal)
{
	uint32_t at_step = 1, total = 0, named;

	for (; run_with_victim(ranks, signal, 0, at_step, &named); at_step += ranks == 2 ? 1 : 5) {
		total += named;
	}
	assert_true(at_step > 20 && total > (at_step - 5) / (ranks == 2 ? 1 : 5));
}

KV_TEST(p5_p6_p10_a_process_that_dies_is_named_by_all_others_in_time)
{
	fell_at_each_look(2, SIGKILL);
	fell_at_each_look(4, SIGKILL);
	fell_at_each_step(2, SIGKILL);
	fell_at_each_step(4, SIGKILL);
}

KV_TEST(p5_p6_p10_a_process_that_stands_still_is_named_by_all_others_in_time)
{
	fell_at_each_look(2, SIGSTOP);
	fell_at_each_look(4, SIGSTOP);
	fell_at_each_step(2, SIGSTOP);
	fell_at_each_step(4, SIGSTOP);
}

KV_TEST_MAIN(NULL, NULL)
