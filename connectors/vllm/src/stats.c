/* Counters as dicts. Names and help come from the tables in kvx_scheduler.h and kvx_worker.h. */
#include "kvdpy.h"

#include <string.h>

#define ERRORS_HELP "errors inside the connector, answered as nothing found or nothing done"

typedef struct row {
	const char *name; /* with the half's name before it */
	const char *help; /* NULL: a gauge */
} row_t;

/* The statistics of libkvx are struct_size, and then a uint64_t a row but the last. */
struct kvdpy_half {
	void (*read)(const void *open, void *stats);
	size_t prefix; /* length of the half's name in the names */
	const row_t *rows;
	size_t count;
};
_Static_assert(sizeof(size_t) == sizeof(uint64_t), "struct_size is as long as a counter");

static void read_scheduler(const void *open, void *stats)
{
	kvx_scheduler_get_stats(open, stats);
}

#define ROW(name, help) {"scheduler_" #name, help},
static const row_t scheduler_rows[] = {KVX_SCHEDULER_STATS(ROW) ROW(requests, NULL) ROW(leases_open, NULL)
					       ROW(puts_open, NULL) ROW(internal_errors, ERRORS_HELP)};
#undef ROW
const kvdpy_half_t kvdpy_scheduler_half = {read_scheduler, sizeof "scheduler_" - 1, scheduler_rows,
					   KVDPY_COUNT(scheduler_rows)};
_Static_assert(sizeof(kvx_scheduler_stats_t) == KVDPY_COUNT(scheduler_rows) * sizeof(uint64_t), "a row each");
_Static_assert(KVDPY_COUNT(scheduler_rows) < KVDPY_MAX_COUNTERS, "they fit");

static void read_worker(const void *open, void *stats)
{
	kvx_worker_get_stats(open, stats);
}

#define ROW(name, help) {"worker_" #name, help},
static const row_t worker_rows[] = {KVX_WORKER_STATS(ROW) ROW(loads_open, NULL) ROW(saves_open, NULL) ROW(marked, NULL)
					    ROW(registered_bytes, NULL) ROW(internal_errors, ERRORS_HELP)};
#undef ROW
const kvdpy_half_t kvdpy_worker_half = {read_worker, sizeof "worker_" - 1, worker_rows, KVDPY_COUNT(worker_rows)};
_Static_assert(sizeof(kvx_worker_stats_t) == KVDPY_COUNT(worker_rows) * sizeof(uint64_t), "a row each");
_Static_assert(KVDPY_COUNT(worker_rows) < KVDPY_MAX_COUNTERS, "they fit");

/* values[i + 1] is that of row i. */
static void read_values(const kvdpy_half_t *half, const void *open, const kvdpy_breaker_t *breaker, uint64_t *values)
{
	values[0] = half->count * sizeof *values; /* struct_size */
	half->read(open, values);
	values[half->count] = breaker->errors;
}

/* The dict is made with its first value. */
static int put(PyObject **p_dict, const char *name, uint64_t value)
{
	PyObject *number = PyLong_FromUnsignedLongLong(value);
	int failed;

	if (!*p_dict) {
		*p_dict = PyDict_New();
	}
	failed = !number || !*p_dict || PyDict_SetItemString(*p_dict, name, number);
	Py_XDECREF(number);

	return failed ? -1 : 0;
}

PyObject *kvdpy_stats_delta(const kvdpy_half_t *half, const void *open, const kvdpy_breaker_t *breaker,
			    kvdpy_counters_t *last)
{
	uint64_t now[KVDPY_MAX_COUNTERS];
	PyObject *delta = NULL, *stats = NULL;
	int failed = 0;

	read_values(half, open, breaker, now);
	for (size_t i = 0; i < half->count && !failed; i++) {
		const uint64_t more = now[i + 1] - last->values[i + 1];

		failed = more != 0 && half->rows[i].help && put(&delta, half->rows[i].name, more);
	}
	memcpy(last->values, now, (half->count + 1) * sizeof *now);
	if (!failed) {
		stats = delta ? PyObject_CallFunctionObjArgs(last->stats_class, delta, NULL) : KVDPY_NONE;
	}
	Py_XDECREF(delta);

	return stats;
}

PyObject *kvdpy_stats_totals(const kvdpy_half_t *half, const void *open, const kvdpy_breaker_t *breaker,
			     const kvdpy_counters_t *last)
{
	uint64_t now[KVDPY_MAX_COUNTERS];
	PyObject *dict = NULL;

	if (open) {
		read_values(half, open, breaker, now);
	}
	for (size_t i = 0; i < half->count; i++) {
		const uint64_t value = open ? now[i + 1] : last->values[i + 1];

		if (put(&dict, half->rows[i].name + half->prefix, value)) {
			Py_CLEAR(dict);
			break;
		}
	}

	return dict;
}

PyObject *kvdpy_stats_table(PyObject *module, PyObject *unused)
{
	static const kvdpy_half_t *const halves[] = {&kvdpy_scheduler_half, &kvdpy_worker_half};
	PyObject *table = PyList_New(0);
	int failed = !table;

	(void)module;
	(void)unused;
	for (size_t h = 0; h < KVDPY_COUNT(halves); h++) {
		for (size_t i = 0; i < halves[h]->count && !failed; i++) {
			const row_t *row = &halves[h]->rows[i];
			PyObject *pair = Py_BuildValue("(ss)", row->name, row->help);

			failed = !pair || (row->help && PyList_Append(table, pair));
			Py_XDECREF(pair);
		}
	}
	if (failed) {
		Py_CLEAR(table);
	}

	return table;
}
