/* Loads that begin when their step is planned: how the two halves find each other where they share a process and a
 * thread.
 *
 * A half knows the other by the instance's name. The worker's half may be told of a plan before the engine tells it, if
 *   - there is one such worker, of one rank, and its hooks are called by the thread that plans,
 *   - each plan before this one has reached it (begin()), or one behind that has, so that it is the next,
 *   - the engine enqueues nothing between the plan and the step that writes blocks by itself,
 *   - it still enqueues where it did in the step before.
 * Whether the step before is over, the worker knows itself (kvx_worker_prefetch_step()). All of this is under the
 * interpreter's lock.
 */
#include "kvdpy.h"

#include <string.h>

static kvdpy_early_t *all;

void kvdpy_early_join(kvdpy_worker_t *worker, const char *instance)
{
	kvdpy_early_t *early = &worker->early;

	early->worker = worker;
	early->instance = instance;
	early->next = all;
	all = early;
}

void kvdpy_early_leave(kvdpy_early_t *early)
{
	kvdpy_early_t **link = &all;

	while (*link && *link != early) {
		link = &(*link)->next;
	}
	if (*link) {
		*link = early->next;
	}
}

/* Plans come in their order: of those before the last one none comes after it. An engine that was interrupted has lost
 * one. */
void kvdpy_early_begun(kvdpy_early_t *early, const PyObject *plan)
{
	early->owed = plan && plan == early->last ? 0 : early->owed - (early->owed > 0);
	early->thread = pthread_self();
	early->called = 1;
}

/* The instance's only worker here. */
static kvdpy_early_t *partner(const char *instance)
{
	kvdpy_early_t *found = NULL;

	for (kvdpy_early_t *early = all; early; early = early->next) {
		if (strcmp(early->instance, instance) == 0) {
			if (found) {
				return NULL;
			}
			found = early;
		}
	}

	return found;
}

/* What went wrong, a hook will meet again and say so. -1: it is an interrupt, which passes through. */
static int harmless(void)
{
	if (!PyErr_ExceptionMatches(PyExc_Exception)) {
		return -1;
	}
	PyErr_Clear();

	return 0;
}

/* 1: the output's list is there and not empty. -1: an exception. */
static int has_some(PyObject *output, PyObject *name)
{
	PyObject *list = PyObject_GetAttr(output, name);
	int some;

	if (!list) {
		return harmless(); /* an engine that has no such thing */
	}
	some = PyObject_IsTrue(list);
	Py_DECREF(list);

	return some;
}

/* Before the forward the engine zeroes blocks, or copies them. */
static int writes_blocks(PyObject *output)
{
	const int zeroes = has_some(output, kvdpy_names.new_block_ids_to_zero);

	return zeroes ? zeroes : has_some(output, kvdpy_names.kv_cache_block_copies);
}

/* Begin them, if the worker is between two steps. */
static int begin(kvdpy_worker_t *worker, const kvdpy_plan_t *plan)
{
	const uint32_t flags = (plan->after_computed ? KVX_PREFETCH_COMPUTED : 0u) |
			       (worker->layers.trusted ? KVX_PREFETCH_LAYERS : 0u);
	PyThreadState *state;
	void *stream;

	if (kvdpy_current_stream(worker, &stream)) {
		return harmless();
	}
	if (stream == worker->stream && worker->worker) { /* else what came before is somewhere else */
		state = PyEval_SaveThread();
		(void)kvx_worker_prefetch_step(worker->worker, plan->bytes, plan->len, flags);
		PyEval_RestoreThread(state);
	}

	return 0;
}

int kvdpy_early_planned(kvdpy_scheduler_t *self, PyObject *output, const kvdpy_plan_t *plan)
{
	kvdpy_early_t *early = self->early ? partner(self->instance) : NULL;
	PyObject *worker;
	int writes, status;

	if (early) {
		early->last = plan->told;
	}
	if (!early || early->owed++ > 0 || plan->len == 0 || !early->called ||
	    !pthread_equal(early->thread, pthread_self())) {
		return 0;
	}
	writes = writes_blocks(output);
	if (writes != 0) {
		return writes < 0 ? harmless() : 0;
	}
	worker = Py_NewRef((PyObject *)early->worker);
	status = begin(early->worker, plan);
	Py_DECREF(worker);

	return status;
}
