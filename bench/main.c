/* kvd-bench: runs benches by name. */
#include "run.h"

#include "kv/status.h"
#include "kv/units.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const bench_t *const benches[] = {
#define BENCH_ENTRY(id) &bench_##id,
	BENCH_LIST(BENCH_ENTRY)
#undef BENCH_ENTRY
};

#define BENCH_COUNT       (sizeof benches / sizeof benches[0])
#define EXIT_USAGE        64
#define EXIT_BENCH_FAILED 70

static const char usage[] = "usage: kvd-bench NAME... [--json] [--rounds N] [--quick] [--with name=value]...\n"
			    "       kvd-bench list | all\n"
			    "\n"
			    "NAME is a bench, or a family of them (`pool` runs all under pool/). Each measures a value "
			    "and its reference in turn in the\n"
			    "same run and prints medians over rounds; ratio is value over reference, round by round; "
			    "spread is the interquartile range\n"
			    "over the median. --json prints one object a line, times in ns. A goal that is missed is "
			    "printed, the exit status stays 0.\n"
			    "\n"
			    "  --rounds N         measured rounds (default: each bench's own)\n"
			    "  --quick            smaller sizes where a bench has any\n"
			    "  --with name=value  parameter of a bench; `kvd-bench list` names them\n";

const char *bench_param(const bench_run_t *run, const char *name, const char *otherwise)
{
	const size_t n = strlen(name);

	for (size_t i = run->param_count; i > 0; i--) {
		const char *param = run->params[i - 1];

		if (strncmp(param, name, n) == 0 && param[n] == '=') {
			return param + n + 1;
		}
	}

	return otherwise;
}

uint64_t bench_param_size(const bench_run_t *run, const char *name, uint64_t otherwise)
{
	const char *text = bench_param(run, name, NULL);
	uint64_t bytes;

	if (!text) {
		return otherwise;
	}
	if (kv_parse_size(text, &bytes) != KV_OK) {
		fprintf(stderr, "kvd-bench: --with %s=%s: not a size\n", name, text);
		exit(EXIT_USAGE);
	}

	return bytes;
}

int bench_quick(const bench_run_t *run)
{
	return run->quick;
}

/* Is `bench` called `name`, or in the family `name`? */
static int named(const bench_t *bench, const char *name)
{
	const size_t n = strlen(name);

	return strcmp(name, "all") == 0 ||
	       (strncmp(bench->name, name, n) == 0 && (bench->name[n] == '\0' || bench->name[n] == '/'));
}

static int known(const char *name)
{
	for (size_t i = 0; i < BENCH_COUNT; i++) {
		if (named(benches[i], name)) {
			return 1;
		}
	}

	return 0;
}

static void list(void)
{
	for (size_t i = 0; i < BENCH_COUNT; i++) {
		const bench_t *b = benches[i];

		printf("%s\n  measures   %s\n  reference  %s\n  goal       %s\n", b->name, b->measures,
		       *b->reference ? b->reference : "none", b->goal);
	}
}

static int refuse_name(const char *name)
{
	const char *names[BENCH_COUNT];
	const char *near;

	for (size_t i = 0; i < BENCH_COUNT; i++) {
		names[i] = benches[i]->name;
	}
	near = kv_nearest(name, names, BENCH_COUNT);
	fprintf(stderr, "kvd-bench: no bench is called %s%s%s; kvd-bench list shows them\n", name,
		near ? "; did you mean " : "", near ? near : "");

	return EXIT_USAGE;
}

/* Reads options into run and moves the names to the front of argv. Returns their number, -1 for bad usage. */
static int read_options(int argc, char **argv, bench_run_t *run)
{
	int names = 0;

	for (int i = 1; i < argc; i++) {
		uint64_t number;

		if (strcmp(argv[i], "--json") == 0) {
			run->json = 1;
		} else if (strcmp(argv[i], "--quick") == 0) {
			run->quick = 1;
		} else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc &&
			   kv_parse_u64(argv[i + 1], &number) == KV_OK && number > 0 && number <= BENCH_MAX_ROUNDS) {
			run->rounds = (unsigned)number;
			i++;
		} else if (strcmp(argv[i], "--with") == 0 && i + 1 < argc && strchr(argv[i + 1], '=') &&
			   run->param_count < BENCH_MAX_PARAMS) {
			run->params[run->param_count++] = argv[++i];
		} else if (argv[i][0] == '-') {
			return -1;
		} else {
			argv[names++] = argv[i];
		}
	}

	return names;
}

int main(int argc, char **argv)
{
	bench_run_t run = {0};
	const int names = read_options(argc, argv, &run);
	int failed = 0;

	if (names <= 0) {
		const int asked = argc == 2 && strcmp(argv[1], "--help") == 0;

		fputs(usage, asked ? stdout : stderr);
		return asked ? 0 : EXIT_USAGE;
	}
	if (strcmp(argv[0], "list") == 0) {
		list();
		return 0;
	}
	for (int i = 0; i < names; i++) {
		if (!known(argv[i])) {
			return refuse_name(argv[i]);
		}
	}
	for (int i = 0; i < names; i++) {
		for (size_t b = 0; b < BENCH_COUNT; b++) {
			if (named(benches[b], argv[i])) {
				run.bench = benches[b];
				failed += benches[b]->run(&run) == BENCH_FAILED;
				bench_unpin();
			}
		}
	}

	return failed ? EXIT_BENCH_FAILED : 0;
}
