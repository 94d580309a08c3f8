/* Counters as dicts. Names and help come from the tables in kvx_scheduler.h and kvx_worker.h. */
#include "kvdpy.h"

#include <string.h>

#define ERRORS_HELP "errors inside the connector, answered as nothing found or nothing done"

typedef struct row {
	const char *name; /* with the half's name before it */
	const char *help; /* NULL: a gauge */
} row_t;

/* The statistics of a half are struct_size, and then a uint64_t a row in the order of the rows. */
struct kvdpy_half {
	size_t prefix; /* length of the half's name in the names */
	row_t errors;  /* what the circuit breaker has counted: not in the statistics */
	const row_t *rows;
	size_t count;
};
_Static_assert(sizeof(size_t) == sizeof(uint64_t), "struct_size is as long as a counter");

#define ROW(name, help) {"scheduler_" #name, help},
static const row_t scheduler_rows[] = {KVX_SCHEDULER_STATS(ROW) ROW(requests, NULL) ROW(leases_open, NULL)
					       ROW(puts_open, NULL)};
#undef ROW
const kvdpy_half_t kvdpy_scheduler_half = {
	.prefix = sizeof "scheduler_" - 1,
	.errors = {"scheduler_internal_errors", ERRORS_HELP},
	.rows = scheduler_rows,
	.count = KVDPY_COUNT(scheduler_rows),
};
_Static_assert(sizeof(kvx_scheduler_stats_t) == (KVDPY_COUNT(scheduler_rows) + 1u) * sizeof(uint64_t), "a row each");

#define ROW(name, help) {"worker_" #name, help},
static const row_t worker_rows[] = {KVX_WORKER_STATS(ROW) ROW(loads_open, NULL) ROW(saves_open, NULL) ROW(marked, NULL)
					    ROW(registered_bytes, NULL)};
#undef ROW
const kvdpy_half_t kvdpy_worker_half = {
	.prefix = sizeof "worker_" - 1,
	.errors = {"worker_internal_errors", ERRORS_HELP},
	.rows = worker_rows,
	.count = KVDPY_COUNT(worker_rows),
};
_Static_assert(sizeof(kvx_worker_stats_t) == (KVDPY_COUNT(worker_rows) + 1u) * sizeof(uint64_t), "a row each");

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

/* {name: increment} of what has changed; NULL without an exception: nothing has. */
static PyObject *changed(const kvdpy_half_t *half, const uint64_t *now, const uint64_t *last, kvdpy_breaker_t *breaker)
{
	const uint64_t errors = breaker->errors - breaker->reported;
	PyObject *dict = NULL;
	int failed = 0;

	for (size_t i = 0; i < half->count && half->rows[i].help && !failed; i++) {
		failed = now[i] != last[i] && put(&dict, half->rows[i].name, now[i] - last[i]);
	}
	failed = failed || (errors && put(&dict, half->errors.name, errors));
	if (failed) {
		Py_CLEAR(dict);
	} else {
		breaker->reported = breaker->errors;
	}

	return dict;
}

PyObject *kvdpy_stats_delta(const kvdpy_half_t *half, const void *now, void *last, PyObject *stats_class,
			    kvdpy_breaker_t *breaker)
{
	PyObject *delta = changed(half, (const uint64_t *)now + 1, (const uint64_t *)last + 1, breaker);
	PyObject *stats = NULL;

	if (delta) {
		stats = PyObject_CallFunctionObjArgs(stats_class, delta, NULL);
		Py_DECREF(delta);
	} else if (!PyErr_Occurred()) {
		stats = Py_NewRef(Py_None);
	}
	memcpy(last, now, (half->count + 1) * sizeof(uint64_t));

	return kvdpy_answer(breaker, stats, "get_kv_connector_stats", Py_None);
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

static int add_help(PyObject *table, const row_t *row)
{
	PyObject *pair = Py_BuildValue("(ss)", row->name, row->help);
	const int failed = !pair || PyList_Append(table, pair);

	Py_XDECREF(pair);

	return failed;
}

PyObject *kvdpy_stats_table(void)
{
	static const kvdpy_half_t *const halves[] = {&kvdpy_scheduler_half, &kvdpy_worker_half};
	PyObject *table = PyList_New(0);
	int failed = !table;

	for (size_t h = 0; h < KVDPY_COUNT(halves); h++) {
		for (size_t i = 0; halves[h]->rows[i].help && !failed; i++) {
			failed = add_help(table, &halves[h]->rows[i]);
		}
		failed = failed || add_help(table, &halves[h]->errors);
	}
	if (failed) {
		Py_CLEAR(table);
	}

	return table;
}
