/* Counters as dicts. Names and help come from the tables in kvx_scheduler.h and kvx_worker.h. */
#include "kvdpy.h"

#include <stddef.h>
#include <string.h>

#define KVDPY_ERRORS_HELP "errors inside the connector, answered as nothing found or nothing done"

static int put(PyObject *dict, const char *name, uint64_t value)
{
	PyObject *number = PyLong_FromUnsignedLongLong(value);
	const int failed = !number || PyDict_SetItemString(dict, name, number);

	Py_XDECREF(number);

	return failed ? -1 : 0;
}

/* Counters and gauges of a half, by where they lie in its statistics. */
typedef struct field {
	const char *name; /* with the half's name before a counter's */
	size_t offset;
} field_t;

typedef struct half {
	const char *name, *errors;
	const field_t *counters, *gauges;
	size_t counter_count, gauge_count;
} half_t;

#define COUNT_OF(rows) (sizeof(rows) / sizeof(rows)[0])

#define SCHEDULER_AT(name)            offsetof(kvx_scheduler_stats_t, name)
#define SCHEDULER_COUNTER(name, help) {"scheduler_" #name, SCHEDULER_AT(name)},
static const field_t scheduler_counters[] = {KVX_SCHEDULER_STATS(SCHEDULER_COUNTER)};
static const field_t scheduler_gauges[] = {{"requests", SCHEDULER_AT(requests)},
					   {"leases_open", SCHEDULER_AT(leases_open)},
					   {"puts_open", SCHEDULER_AT(puts_open)}};
static const half_t scheduler_half = {
	.name = "scheduler_",
	.errors = "scheduler_internal_errors",
	.counters = scheduler_counters,
	.gauges = scheduler_gauges,
	.counter_count = COUNT_OF(scheduler_counters),
	.gauge_count = COUNT_OF(scheduler_gauges),
};

#define WORKER_AT(name)            offsetof(kvx_worker_stats_t, name)
#define WORKER_COUNTER(name, help) {"worker_" #name, WORKER_AT(name)},
static const field_t worker_counters[] = {KVX_WORKER_STATS(WORKER_COUNTER)};
static const field_t worker_gauges[] = {
	{"loads_open", WORKER_AT(loads_open)}, {"saves_open", WORKER_AT(saves_open)}, {"marked", WORKER_AT(marked)}};
static const half_t worker_half = {
	.name = "worker_",
	.errors = "worker_internal_errors",
	.counters = worker_counters,
	.gauges = worker_gauges,
	.counter_count = COUNT_OF(worker_counters),
	.gauge_count = COUNT_OF(worker_gauges),
};

static uint64_t read_stat(const void *stats, const field_t *stat)
{
	uint64_t value;

	memcpy(&value, (const char *)stats + stat->offset, sizeof value);

	return value;
}

/* One changed counter; the dict is made when the first has. */
static int put_delta(PyObject **p_dict, const char *name, uint64_t delta)
{
	if (delta == 0) {
		return 0;
	}
	if (!*p_dict) {
		*p_dict = PyDict_New();
	}

	return *p_dict ? put(*p_dict, name, delta) : -1;
}

/* What has changed since `last` as {name: increment}, None: nothing. */
static PyObject *changed(const half_t *half, const void *now, const void *last, kvdpy_breaker_t *breaker)
{
	PyObject *dict = NULL;
	int failed = 0;

	for (size_t i = 0; i < half->counter_count; i++) {
		const field_t *stat = &half->counters[i];

		failed |= put_delta(&dict, stat->name, read_stat(now, stat) - read_stat(last, stat));
	}
	failed |= put_delta(&dict, half->errors, breaker->errors - breaker->said);
	if (failed) {
		Py_XDECREF(dict);
		return NULL;
	}
	breaker->said = breaker->errors;

	return dict ? dict : Py_NewRef(Py_None);
}

/* The answer to get_kv_connector_stats(). */
static PyObject *report(const half_t *half, const void *now, const void *last, PyObject *stats_class,
			kvdpy_breaker_t *breaker)
{
	PyObject *delta = changed(half, now, last, breaker);
	PyObject *stats = NULL;

	if (delta) {
		stats = delta == Py_None ? Py_NewRef(delta) : PyObject_CallFunctionObjArgs(stats_class, delta, NULL);
		Py_DECREF(delta);
	}

	return stats ? stats : kvdpy_answer_error(breaker, "get_kv_connector_stats", Py_None);
}

static PyObject *totals(const half_t *half, const void *now)
{
	const size_t prefix = strlen(half->name);
	PyObject *dict = PyDict_New();
	int failed = !dict;

	for (size_t i = 0; i < half->counter_count && !failed; i++) {
		failed = put(dict, half->counters[i].name + prefix, read_stat(now, &half->counters[i]));
	}
	for (size_t i = 0; i < half->gauge_count && !failed; i++) {
		failed = put(dict, half->gauges[i].name, read_stat(now, &half->gauges[i]));
	}
	if (failed) {
		Py_CLEAR(dict);
	}

	return dict;
}

PyObject *kvdpy_scheduler_delta(const kvx_scheduler_stats_t *now, kvx_scheduler_stats_t *last, PyObject *stats_class,
				kvdpy_breaker_t *breaker)
{
	PyObject *answer = report(&scheduler_half, now, last, stats_class, breaker);

	*last = *now;

	return answer;
}

PyObject *kvdpy_worker_delta(const kvx_worker_stats_t *now, kvx_worker_stats_t *last, PyObject *stats_class,
			     kvdpy_breaker_t *breaker)
{
	PyObject *answer = report(&worker_half, now, last, stats_class, breaker);

	*last = *now;

	return answer;
}

PyObject *kvdpy_scheduler_dict(const kvx_scheduler_stats_t *now)
{
	return totals(&scheduler_half, now);
}

PyObject *kvdpy_worker_dict(const kvx_worker_stats_t *now)
{
	return totals(&worker_half, now);
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
