/* Counters as dicts. Names and help come from the tables in kvx_scheduler.h and kvx_worker.h. */
#include "kvdpy.h"

#include <string.h>

#define ERRORS_HELP "errors inside the connector, answered as nothing found or nothing done"

/* The statistics of a half are struct_size, and then a uint64_t a row in the order of the rows. */
typedef struct row {
	const char *name; /* with the half's name before it */
	const char *help; /* NULL: a gauge */
} row_t;
struct kvdpy_half {
	size_t prefix; /* length of the half's name in the names */
	const row_t *rows;
	size_t count;
};
_Static_assert(sizeof(size_t) == sizeof(uint64_t), "struct_size is as long as a counter");

#define ROW(name, help) {"scheduler_" #name, help},
static const row_t scheduler_rows[] = {KVX_SCHEDULER_STATS(ROW) ROW(requests, NULL) ROW(leases_open, NULL)
					       ROW(puts_open, NULL) ROW(internal_errors, ERRORS_HELP)};
#undef ROW
const kvdpy_half_t kvdpy_scheduler_half = {sizeof "scheduler_" - 1, scheduler_rows, KVDPY_COUNT(scheduler_rows)};
_Static_assert(sizeof(kvdpy_scheduler_stats_t) == (KVDPY_COUNT(scheduler_rows) + 1u) * sizeof(uint64_t), "a row each");

#define ROW(name, help) {"worker_" #name, help},
static const row_t worker_rows[] = {KVX_WORKER_STATS(ROW) ROW(loads_open, NULL) ROW(saves_open, NULL) ROW(marked, NULL)
					    ROW(registered_bytes, NULL) ROW(internal_errors, ERRORS_HELP)};
#undef ROW
const kvdpy_half_t kvdpy_worker_half = {sizeof "worker_" - 1, worker_rows, KVDPY_COUNT(worker_rows)};
_Static_assert(sizeof(kvdpy_worker_stats_t) == (KVDPY_COUNT(worker_rows) + 1u) * sizeof(uint64_t), "a row each");

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

PyObject *kvdpy_stats_delta(const kvdpy_half_t *half, const void *now, void *last, PyObject *stats_class)
{
	const uint64_t *values = (const uint64_t *)now + 1, *before = (const uint64_t *)last + 1;
	PyObject *delta = NULL, *stats = NULL;
	int failed = 0;

	for (size_t i = 0; i < half->count && !failed; i++) {
		failed = values[i] != before[i] && half->rows[i].help &&
			 put(&delta, half->rows[i].name, values[i] - before[i]);
	}
	memcpy(last, now, (half->count + 1) * sizeof(uint64_t));
	if (!failed) {
		stats = delta ? PyObject_CallFunctionObjArgs(stats_class, delta, NULL) : KVDPY_NONE;
	}
	Py_XDECREF(delta);

	return stats;
}

PyObject *kvdpy_stats_totals(const kvdpy_half_t *half, const void *now)
{
	PyObject *dict = NULL;

	for (size_t i = 0; i < half->count; i++) {
		if (put(&dict, half->rows[i].name + half->prefix, ((const uint64_t *)now)[i + 1])) {
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
