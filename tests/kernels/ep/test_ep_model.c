/* The protocol of dispatch and combine (kernels/ep/protocol.h) in every order of events. Ranks run at any speed, and send
 * and wait in any order that the rules allow; stores overtake each other until a release; a rank dies, or stops and goes
 * on, at any step. Explores all states, once with the rules as they are, and once with each of them broken, which must
 * be found.
 *
 * A rank's own transfers are left out. States are told apart by a hash of 64 bits. Assumed of time: a deadline passes
 * only where nothing else can happen, so it is longer than all else takes. */
#include "ep/protocol.h"
#include "kv/types.h"
#include "kv_cmocka.h"
#include "kv_test.h"

#include <xxhash.h>

#define RANKS 3u
#define SLOTS 2u
#define ROWS  3u

enum { D, C };                                                        /* dispatch, combine */
enum { D_SENT, D_ARRIVED, D_READ, C_SENT, C_ARRIVED, C_READ, STEPS }; /* each by number, of a rank */
enum { RUNS, STOPPED, RESUMED, DEAD };

/* X(name, what is broken) */
#define MISTAKES(X)                                                                                                    \
	X(NONE, "")                                                                                                    \
	X(ONE_SLOT, "two results in flight share a slot")                                                              \
	X(SLOT_OF_PAIRS, "a slot is that of half the number")                                                          \
	X(EQUAL, "a flag is compared for equality")                                                                    \
	X(OFF_BY_ONE, "the flag of the number before is taken for this one's")                                         \
	X(EAGER, "a dispatch is sent before the slot's last combine was read")                                         \
	X(RELAXED, "a flag is stored without a release")                                                               \
	X(FLAG_FIRST, "a flag is stored before the rows")                                                              \
	X(RELEASE_OF_ONE, "a release covers the rows of its own number alone")                                         \
	X(COMBINE_EARLY, "a combine is sent before the dispatch was read")                                             \
	X(SHARED_FLAG, "dispatch and combine share a flag")                                                            \
	X(RESET, "a flag is cleaned after it was seen")                                                                \
	X(ONE_SOURCE, "a rank waits for the first of its sources alone")                                               \
	X(SILENT, "a rank that gives up tells nobody")                                                                 \
	X(MUTE, "a rank that hears of another one that gave up reports nothing itself")                                \
	X(NO_ORDER, "all reports count, not the hindmost rank's alone")
typedef enum mistake {
#define MISTAKE_ENUM(name, text) name,
	MISTAKES(MISTAKE_ENUM)
#undef MISTAKE_ENUM
} mistake_t;

typedef struct rank {
	uint8_t done[STEPS]; /* the last number */
	uint8_t life, failed;
} rank_t;

/* Zeroed before use: it is hashed as bytes. */
typedef struct state {
	uint32_t pending[RANKS][RANKS]; /* by source and destination: stores under way, a bit each (store_bit()) */
	rank_t rank[RANKS];
	uint8_t rows[RANKS][RANKS][2][SLOTS][ROWS]; /* at a rank, by source: the number of what lies there */
	uint8_t flag[RANKS][RANKS][2];
	uint16_t report[RANKS][RANKS], report_pending[RANKS][RANKS]; /* kvk_ep_report(), with 4 bits for ranks */
} state_t;

/* One exploration. */
static struct {
	uint32_t ranks, numbers, in_flight, rows;
	int faults, in_order;
	mistake_t mistake;
	uint64_t *seen; /* hashes; 0: free */
	size_t capacity, states;
	state_t *stack;
	size_t depth, room;
	const char *violation; /* NULL: none */
} m;

/* ---- the rules, or a broken one -------------------------------------------------------------- */

static uint32_t slot(uint32_t number)
{
	if (m.mistake == ONE_SLOT) {
		return 0;
	}

	return kvk_ep_slot(m.mistake == SLOT_OF_PAIRS ? number / 2 : number, m.in_flight);
}

static int has_arrived(uint32_t flag, uint32_t number)
{
	if (m.mistake == EQUAL) {
		return flag == number;
	}

	return kvk_ep_has_arrived(m.mistake == OFF_BY_ONE ? flag + 1u : flag, number);
}

static uint32_t flag_of(uint32_t kind)
{
	return m.mistake == SHARED_FLAG ? D : kind;
}

static uint32_t lost_ranks(const state_t *s, uint32_t rank)
{
	uint64_t reports[RANKS];

	for (uint32_t r = 0; r < m.ranks; r++) {
		const uint32_t calls = m.mistake == NO_ORDER ? 1 : s->report[rank][r] >> 4;

		reports[r] = s->report[rank][r] ? kvk_ep_report(calls, s->report[rank][r] & 15u) : 0;
	}

	return kvk_ep_name_lost(reports, m.ranks);
}

/* ---- states ---------------------------------------------------------------------------------- */

static void violate(const char *what)
{
	m.violation = m.violation ? m.violation : what;
}

/* Remember the state; a new one will be explored. */
static void visit(const state_t *s)
{
	uint64_t hash = XXH3_64bits(s, sizeof *s) | 1u;
	size_t at = hash & (m.capacity - 1);

	while (m.seen[at] != 0 && m.seen[at] != hash) {
		at = (at + 1) & (m.capacity - 1);
	}
	if (m.seen[at] == hash) {
		return;
	}
	m.seen[at] = hash;
	m.states++;
	assert_true(m.states < m.capacity / 4 * 3);
	if (m.depth == m.room) {
		m.room = m.room * 2 + 1024;
		m.stack = realloc(m.stack, m.room * sizeof *m.stack);
		assert_non_null(m.stack);
	}
	m.stack[m.depth++] = *s;
}

/* Rows and the flag, the last one, of a kind and number. */
static uint32_t store_bit(uint32_t kind, uint32_t number, uint32_t store)
{
	return 1u << ((kind * m.numbers + number - 1) * (m.rows + 1u) + store);
}

static uint32_t stores_of(uint32_t kind, uint32_t number)
{
	return store_bit(kind, number, 0) * ((1u << (m.rows + 1u)) - 1u);
}

/* May a store arrive? A flag follows all that its rank has sent there before, of its kind. */
static int may_arrive(uint32_t pending, uint32_t kind, uint32_t number, uint32_t store)
{
	const uint32_t flag = store_bit(kind, number, m.rows);

	if (!(pending & store_bit(kind, number, store)) || m.mistake == RELAXED) {
		return (pending & store_bit(kind, number, store)) != 0;
	}
	if (m.mistake == FLAG_FIRST) {
		return store == m.rows || !(pending & flag);
	}
	if (store < m.rows) {
		return 1;
	}
	for (uint32_t n = m.mistake == RELEASE_OF_ONE ? number : 1; n <= number; n++) {
		if (pending & stores_of(kind, n) & ~flag) {
			return 0;
		}
	}

	return 1;
}

static uint32_t missing_for(const state_t *s, uint32_t r, uint32_t kind, uint32_t number)
{
	uint32_t missing = 0;

	for (uint32_t source = 0; source < m.ranks; source++) {
		if (source != r && !has_arrived(s->flag[r][source][flag_of(kind)], number) &&
		    !(m.mistake == ONE_SOURCE && source > (r == 0))) {
			missing |= 1u << source;
		}
	}

	return missing;
}

/* ---- what a rank does ------------------------------------------------------------------------ */

static void send(state_t *s, uint32_t r, uint32_t kind, uint32_t number)
{
	for (uint32_t to = 0; to < m.ranks; to++) {
		s->pending[r][to] |= to != r ? stores_of(kind, number) : 0;
	}
}

static void read_rows(const state_t *s, uint32_t r, uint32_t kind, uint32_t number)
{
	for (uint32_t source = 0; source < m.ranks; source++) {
		for (uint32_t i = 0; i < m.rows && source != r; i++) {
			if (s->rows[r][source][kind][slot(number)][i] != number) {
				violate("rows of another number were read");
			}
		}
	}
}

/* Ranks of one program: what they do next, as DBO has it with two in flight. All ranks call the halves in one order. */
static int is_next(const rank_t *rank, uint32_t step)
{
	static const uint8_t one[] = {D_SENT, D_ARRIVED, D_READ, C_SENT, C_ARRIVED, C_READ};
	static const uint8_t two[] = {D_SENT, D_ARRIVED, D_SENT, D_READ, D_ARRIVED, C_SENT,
				      D_READ, C_ARRIVED, C_SENT, C_READ, C_ARRIVED, C_READ};
	uint32_t done = 0;

	for (uint32_t i = 0; i < STEPS; i++) {
		done += rank->done[i];
	}

	return (m.in_flight == 1 ? one[done % sizeof one] : two[done % sizeof two]) == step;
}

/* May the rank do that next? */
static int is_enabled(const state_t *s, uint32_t r, uint32_t step)
{
	const uint8_t *done = s->rank[r].done;
	const uint32_t number = done[step] + 1u;

	if (s->rank[r].failed || s->rank[r].life == STOPPED || s->rank[r].life == DEAD || number > m.numbers ||
	    (m.in_order && !is_next(&s->rank[r], step))) {
		return 0;
	}
	switch (step) {
	case D_SENT:
		return kvk_ep_may_send(number, done[C_READ], m.in_flight + (m.mistake == EAGER));
	case D_ARRIVED:
		return number <= done[D_SENT] && missing_for(s, r, D, number) == 0;
	case C_SENT:
		return number <= done[m.mistake == COMBINE_EARLY ? D_ARRIVED : D_READ];
	case C_ARRIVED:
		return number <= done[C_SENT] && missing_for(s, r, C, number) == 0;
	default:
		return number <= done[step - 1];
	}
}

static void advance(const state_t *before, uint32_t r, uint32_t step)
{
	state_t s = *before;
	const uint32_t number = ++s.rank[r].done[step];
	const uint32_t kind = step < C_SENT ? D : C;

	if (step == D_SENT || step == C_SENT) {
		send(&s, r, kind, number);
	} else if (step == D_READ || step == C_READ) {
		read_rows(&s, r, kind, number);
	} else if (m.mistake == RESET) {
		for (uint32_t source = 0; source < m.ranks; source++) {
			s.flag[r][source][kind] = 0;
		}
	}
	visit(&s);
}

/* It waits in vain for these: it gives up, and reports. */
static void give_up(const state_t *before, uint32_t r, uint32_t missing)
{
	const uint8_t *done = before->rank[r].done;
	const int calls = done[D_SENT] + done[D_ARRIVED] + done[C_SENT] + done[C_ARRIVED] + 1;
	state_t s = *before;

	s.rank[r].failed = 1;
	if (m.mistake != MUTE || lost_ranks(&s, r) == 0) {
		s.report[r][r] = (uint16_t)((uint32_t)calls << 4 | missing);
		for (uint32_t to = 0; to < m.ranks && m.mistake != SILENT; to++) {
			s.report_pending[r][to] = to != r ? s.report[r][r] : 0;
		}
	}
	visit(&s);
}

/* For whom the rank waits in that half; 0: it does not. */
static uint32_t waits_for(const state_t *s, uint32_t r, uint32_t step)
{
	const rank_t *rank = &s->rank[r];

	if (rank->failed || rank->life == STOPPED || rank->life == DEAD || rank->done[step] >= rank->done[step - 1] ||
	    (m.in_order && !is_next(rank, step))) {
		return 0;
	}

	return missing_for(s, r, step == D_ARRIVED ? D : C, rank->done[step] + 1u);
}

/* ---- exploration ----------------------------------------------------------------------------- */

static uint32_t deliver(const state_t *before)
{
	uint32_t found = 0;

	for (uint32_t from = 0; from < m.ranks; from++) {
		for (uint32_t to = 0; to < m.ranks; to++) {
			for (uint32_t bits = before->pending[from][to]; bits; bits &= bits - 1) {
				const uint32_t at = (uint32_t)__builtin_ctz(bits), store = at % (m.rows + 1u);
				const uint32_t kind = at / (m.rows + 1u) / m.numbers;
				const uint32_t number = at / (m.rows + 1u) % m.numbers + 1u;
				state_t s = *before;

				if (!may_arrive(s.pending[from][to], kind, number, store)) {
					continue;
				}
				s.pending[from][to] &= ~(1u << at);
				if (store == m.rows) {
					s.flag[to][from][flag_of(kind)] = (uint8_t)number;
				} else {
					s.rows[to][from][kind][slot(number)][store] = (uint8_t)number;
				}
				found += before->rank[from].life != DEAD;
				visit(&s);
			}
			if (before->report_pending[from][to]) {
				state_t s = *before;

				s.report[to][from] = s.report_pending[from][to];
				s.report_pending[from][to] = 0;
				found += before->rank[from].life != DEAD;
				visit(&s);
			}
		}
	}

	return found;
}

static void add_fault(const state_t *before)
{
	for (uint32_t r = 0; r < m.ranks; r++) {
		state_t s = *before;

		s.rank[r].life = DEAD;
		visit(&s);
		s.rank[r].life = STOPPED;
		visit(&s);
	}
}

/* A state in which nothing else can happen: a deadline passes, or the end has come. */
static void expire(const state_t *s, uint32_t faulty, uint32_t dead)
{
	state_t late = *s;
	uint32_t gave_up = 0;

	/* What a dead rank has under way by then is lost. */
	for (uint32_t r = 0; r < m.ranks && dead; r++) {
		memset(late.pending[r], 0, dead >> r & 1u ? sizeof late.pending[r] : 0);
		memset(late.report_pending[r], 0, dead >> r & 1u ? sizeof late.report_pending[r] : 0);
	}
	for (uint32_t r = 0; r < m.ranks; r++) {
		for (uint32_t step = D_ARRIVED; step <= C_ARRIVED; step += C_ARRIVED - D_ARRIVED) {
			const uint32_t missing = waits_for(s, r, step);

			if (missing && faulty) {
				give_up(&late, r, missing);
				gave_up++;
			}
		}
	}
	for (uint32_t r = 0; r < m.ranks && gave_up == 0; r++) {
		if (s->rank[r].failed) {
			const uint32_t lost = lost_ranks(s, r);

			if (dead ? lost != dead : !(lost & faulty)) {
				violate("a rank was named that is not lost");
			}
		} else if (s->rank[r].life < STOPPED && s->rank[r].done[C_READ] < m.numbers) {
			violate("a rank waits for ever");
		}
	}
}

static void explore_state(const state_t *s)
{
	uint32_t faulty = 0, dead = 0, steps = deliver(s);
	for (uint32_t r = 0; r < m.ranks; r++) {
		const uint32_t life = s->rank[r].life;

		faulty |= (uint32_t)(life != RUNS) << r;
		dead |= (uint32_t)(life == DEAD) << r;
		for (uint32_t step = 0; step < STEPS; step++) {
			if (is_enabled(s, r, step)) {
				advance(s, r, step);
				steps++;
			}
		}
		for (uint32_t step = D_ARRIVED; step <= C_ARRIVED; step += C_ARRIVED - D_ARRIVED) {
			const uint32_t missing = waits_for(s, r, step);

			if (missing && lost_ranks(s, r)) {
				give_up(s, r, missing);
				steps++;
			}
		}
		if (life == STOPPED) {
			state_t after = *s;

			after.rank[r].life = RESUMED;
			visit(&after);
		}
	}
	if (m.faults && faulty == 0) {
		add_fault(s);
	}
	if (steps == 0) {
		expire(s, faulty, dead);
	}
}

typedef struct size {
	uint32_t ranks, numbers, in_flight, rows;
	int faults, in_order;
} model_size_t;

static void explore(const model_size_t *size, mistake_t mistake)
{
	const state_t begin = {0};

	m.ranks = size->ranks;
	m.numbers = size->numbers;
	m.in_flight = size->in_flight;
	m.rows = size->rows;
	m.faults = size->faults;
	m.in_order = size->in_order;
	m.mistake = mistake;
	m.states = m.depth = 0;
	m.violation = NULL;
	memset(m.seen, 0, m.capacity * sizeof *m.seen);
	visit(&begin);
	while (m.depth > 0 && !m.violation) {
		const state_t s = m.stack[--m.depth];

		explore_state(&s);
	}
}

/* Both with two results in flight. */
static const model_size_t two_ranks = {.ranks = 2, .numbers = 4, .in_flight = 2, .rows = 3, .faults = 1};
static const model_size_t three_ranks = {
	.ranks = 3, .numbers = 2, .in_flight = 2, .rows = 1, .faults = 1, .in_order = 1};

KV_FIXTURE(begin)
{
	m.capacity = 1u << 23;
	m.seen = malloc(m.capacity * sizeof *m.seen);
	assert_non_null(m.seen);
}

KV_FIXTURE(end)
{
	free(m.seen);
	free(m.stack);
	memset(&m, 0, sizeof m);
}

static void expect_right(const model_size_t *size, size_t states)
{
	explore(size, NONE);
	printf("# %u ranks, %u numbers, %u in flight: %zu states\n", size->ranks, size->numbers, size->in_flight,
	       m.states);
	if (m.violation) {
		fail_msg("%s", m.violation);
	}
	assert_true(m.states >= states);
}

KV_TEST(p1_p5_in_every_order_of_two_ranks_rows_are_right_and_waits_end, begin, end)
{
	expect_right(&two_ranks, 1000000);
}

KV_TEST(p1_p5_p10_in_every_order_of_three_ranks_the_lost_one_is_named, begin, end)
{
	expect_right(&three_ranks, 1000000);
}

KV_TEST(p1_p5_p10_every_broken_rule_is_found, begin, end)
{
	static const char *const texts[] = {
#define MISTAKE_TEXT(name, text) text,
		MISTAKES(MISTAKE_TEXT)
#undef MISTAKE_TEXT
	};

	for (mistake_t mistake = NONE + 1; mistake < KV_COUNT_OF(texts); mistake++) {
		explore(&three_ranks, mistake);
		if (!m.violation) {
			explore(&two_ranks, mistake);
		}
		printf("# %s: %s (%zu states)\n", texts[mistake], m.violation ? m.violation : "not found", m.states);
		assert_non_null(m.violation);
	}
}
