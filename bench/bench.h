/* bench.h -- how a bench of kvd is written.
 *
 * One file a family of benches, one entry of bench_list[] a bench: what it measures, against which reference, with
 * which goal. Its run function makes one or more bench_measure() calls: each takes a value and its reference
 * alternately, round by round, so that a change of the machine's speed affects both. A missed goal is printed and is no
 * error. C++ may use it as well. */
#ifndef KVD_BENCH_H
#define KVD_BENCH_H

#include <stddef.h>
#include <stdint.h>

typedef enum bench_outcome {
	BENCH_DONE,
	BENCH_SKIPPED, /* bench_skip() has said why */
	BENCH_FAILED,  /* bench_fail() has said why */
} bench_outcome_t;

typedef bench_outcome_t bench_run_t(int variant);

typedef struct bench {
	const char *name; /* "hash", "pool/batch-8m"; `kvd-bench pool` runs all under pool/ */
	bench_run_t *run;
	int variant;           /* for a function of several benches                     */
	const char *measures;  /* one sentence                                          */
	const char *reference; /* what it is compared with; NULL when it stands alone   */
	const char *goal;      /* for people: "ratio <= 1.2"                            */
} bench_t;

/* Every bench of the program in the order of `all`; the last entry has no name. Each program has a list of its own. */
extern const bench_t bench_list[];

/* One round of one side: a value in the measurement's unit, the operations it consists of (0: one), and their CPU time
 * (0: the calling thread's, over the whole call). is_reference tells a function of both sides which one to take. */
typedef struct bench_sample {
	double value, ops, cpu_ns;
	int is_reference;
} bench_sample_t;

/* Take one sample. Anything but BENCH_DONE ends the measurement. */
typedef bench_outcome_t (*bench_sample_fn)(void *arg, bench_sample_t *p_sample);

typedef enum bench_goal {
	BENCH_NO_GOAL,
	BENCH_RATIO_AT_MOST,
	BENCH_RATIO_AT_LEAST,
	BENCH_VALUE_AT_MOST,
} bench_goal_t;

typedef struct bench_measurement {
	const char *name;      /* "hash", "digest/copy-16k"                                      */
	const char *unit;      /* "ns" for times, "GB/s", "count", ...                            */
	const char *reference; /* name of the reference; NULL: none                              */
	bench_sample_fn value_fn;
	bench_sample_fn reference_fn; /* NULL: none, and the ratio is left out                    */
	unsigned rounds;              /* 0: the default; --rounds has the last word               */
	bench_goal_t goal;
	double goal_value;
} bench_measurement_t;

/* One unmeasured round of each side, then `rounds` measured ones, reference and value in turn, and a line of output.
 * The functions get `arg`. The value and the reference are medians over rounds; the ratio is the median of the rounds'
 * ratios; spread is the interquartile range of the value over its median. After --seconds, or a signal, what has been
 * measured counts; nothing at all is a failure. */
bench_outcome_t bench_measure(void *arg, const bench_measurement_t *m);

/* Say why a bench cannot run here, or has failed (printf format). Returns the outcome to hand on. */
bench_outcome_t bench_end(bench_outcome_t outcome, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define bench_skip(...) bench_end(BENCH_SKIPPED, __VA_ARGS__)
#define bench_fail(...) bench_end(BENCH_FAILED, __VA_ARGS__)

/* A parameter given as --with name=value, else `otherwise`. bench_param_size() understands 4KiB, 2GiB. */
const char *bench_param(const char *name, const char *otherwise);
uint64_t bench_param_size(const char *name, uint64_t otherwise);

/* --quick: smaller sizes, where a bench has any. */
int bench_quick(void);

/* ---- tools.c --------------------------------------------------------------------------------- */

uint64_t bench_now_ns(void); /* CLOCK_MONOTONIC */
uint64_t bench_thread_cpu_ns(void);
uint64_t bench_process_cpu_ns(void);

/* The clocks of a sample that measures a rate: GB/s, and the CPU time of the whole process. */
typedef struct bench_clock {
	uint64_t ns, cpu_ns;
} bench_clock_t;
bench_clock_t bench_start(void);
bench_outcome_t bench_rate(bench_clock_t start, double bytes, double ops, bench_sample_t *p_sample);

/* From now on SIGTERM, SIGINT and the end of that time (0: never) make bench_late() true: what is left is given
 * up. */
void bench_limit(uint64_t seconds);
int bench_late(void);

/* Pin the calling thread to the n-th CPU the program was started on (modulo their number). Returns the CPU, -1 when it
 * could not. */
int bench_pin(unsigned n);
/* Undo it. The harness does so after each bench. */
void bench_unpin(void);

/* Memory for benches, for free(): touched, 2 MiB-aligned, huge pages asked for. NULL when there is none. */
void *bench_memory(size_t bytes);

/* A file of random bytes in a directory, which already has no name; flags: of open(), such as O_DIRECT. -1: errno says
 * why (ETIME: bench_late()). */
int bench_file(const char *dir, uint64_t bytes, int flags);

/* Sort values and return a quantile (0.5: the median) by linear interpolation. */
double bench_quantile(double *values, size_t count, double quantile);

/* Deterministic bytes, never zeros. */
void bench_fill(void *memory, size_t bytes, uint64_t seed);
uint64_t bench_random(uint64_t *state);

/* Keep the compiler from dropping a result. */
static inline void bench_use(uint64_t value)
{
	__asm__ volatile("" : : "r"(value) : "memory");
}

#endif
