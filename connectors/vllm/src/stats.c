/* Counters as dicts. Names and help come from the tables in kvx_scheduler.h and kvx_worker.h. */
#include "kvdpy.h"

#define KVDPY_ERRORS_HELP "errors inside the connector, answered as nothing found or nothing done"

static int put(PyObject *dict, const char *name, uint64_t value)
{
	PyObject *number = PyLong_FromUnsignedLongLong(value);
	const int failed = !number || PyDict_SetItemString(dict, name, number);

	Py_XDECREF(number);

	return failed ? -1 : 0;
}

/* One changed counter; the dict is made when the first has. */
static int put_delta(PyObject **p_dict, const char *name, uint64_t now, uint64_t *last)
{
	const uint64_t delta = now - *last;

	if (delta == 0) {
		return 0;
	}
	*last = now;
	if (!*p_dict) {
		*p_dict = PyDict_New();
	}

	return *p_dict ? put(*p_dict, name, delta) : -1;
}

static PyObject *delta_result(PyObject *dict, int failed)
{
	if (failed) {
		Py_XDECREF(dict);
		return NULL;
	}

	return dict ? dict : Py_NewRef(Py_None);
}

PyObject *kvdpy_scheduler_delta(const kvx_scheduler_stats_t *now, kvx_scheduler_stats_t *last, kvdpy_guard_t *guard)
{
	PyObject *dict = NULL;
	int failed = 0;

#define KVDPY_DELTA(name, help) failed |= put_delta(&dict, "scheduler_" #name, now->name, &last->name);
	KVX_SCHEDULER_STATS(KVDPY_DELTA)
#undef KVDPY_DELTA
	failed |= put_delta(&dict, "scheduler_internal_errors", guard->errors, &guard->said);

	return delta_result(dict, failed);
}

PyObject *kvdpy_worker_delta(const kvx_worker_stats_t *now, kvx_worker_stats_t *last, kvdpy_guard_t *guard)
{
	PyObject *dict = NULL;
	int failed = 0;

#define KVDPY_DELTA(name, help) failed |= put_delta(&dict, "worker_" #name, now->name, &last->name);
	KVX_WORKER_STATS(KVDPY_DELTA)
#undef KVDPY_DELTA
	failed |= put_delta(&dict, "worker_internal_errors", guard->errors, &guard->said);

	return delta_result(dict, failed);
}

PyObject *kvdpy_scheduler_dict(const kvx_scheduler_stats_t *now)
{
	PyObject *dict = PyDict_New();
	int failed = !dict;

#define KVDPY_TOTAL(name, help) failed = failed || put(dict, #name, now->name);
	KVX_SCHEDULER_STATS(KVDPY_TOTAL)
#undef KVDPY_TOTAL
	failed = failed || put(dict, "requests", now->requests) || put(dict, "leases_open", now->leases_open) ||
		 put(dict, "puts_open", now->puts_open);
	if (failed) {
		Py_XDECREF(dict);
		return NULL;
	}

	return dict;
}

PyObject *kvdpy_worker_dict(const kvx_worker_stats_t *now)
{
	PyObject *dict = PyDict_New();
	int failed = !dict;

#define KVDPY_TOTAL(name, help) failed = failed || put(dict, #name, now->name);
	KVX_WORKER_STATS(KVDPY_TOTAL)
#undef KVDPY_TOTAL
	failed = failed || put(dict, "loads_open", now->loads_open) || put(dict, "saves_open", now->saves_open) ||
		 put(dict, "marked", now->marked);
	if (failed) {
		Py_XDECREF(dict);
		return NULL;
	}

	return dict;
}

PyObject *kvdpy_stats_table(void)
{
	static const char *const rows[][2] = {
#define KVDPY_ROW(name, help) {"scheduler_" #name, help},
		KVX_SCHEDULER_STATS(KVDPY_ROW)
#undef KVDPY_ROW
			{"scheduler_internal_errors", KVDPY_ERRORS_HELP},
#define KVDPY_ROW(name, help) {"worker_" #name, help},
		KVX_WORKER_STATS(KVDPY_ROW)
#undef KVDPY_ROW
			{"worker_internal_errors", KVDPY_ERRORS_HELP},
	};
	PyObject *table = PyList_New(0);

	for (size_t i = 0; table && i < sizeof rows / sizeof rows[0]; i++) {
		PyObject *row = Py_BuildValue("(ss)", rows[i][0], rows[i][1]);

		if (!row || PyList_Append(table, row)) {
			Py_CLEAR(table);
		}
		Py_XDECREF(row);
	}

	return table;
}
