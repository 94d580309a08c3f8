/* Loads that begin when their step is planned (decision 016): the halves find each other if they share a process and a
 * thread.
 *
 * A half finds the other by the instance's name. The worker half gets a message before the engine passes it on, if
 *   - there is one such worker, of one rank, and the planning thread calls its hooks,
 *   - every earlier message has reached it (begin_step()), or a later one has, so that this is the next,
 *   - the engine's own block writes come after begin_step(),
 *   - the engine still enqueues on the stream of the step before.
 * The worker knows if the step before is complete (kvx_worker_prefetch_step()). All of this is under the interpreter's
 * lock. */
#include "kvdpy.h"

#include <string.h>

static kvdpy_prefetch_t *all;

void kvdpy_prefetch_join(kvdpy_worker_t *worker, const char *instance)
{
	kvdpy_prefetch_t *prefetch = &worker->prefetch;

	prefetch->worker = worker;
	prefetch->instance = instance;
	prefetch->next = all;
	all = prefetch;
}

void kvdpy_prefetch_leave(kvdpy_prefetch_t *prefetch)
{
	kvdpy_prefetch_t **link = &all;

	while (*link && *link != prefetch) {
		link = &(*link)->next;
	}
	if (*link) {
		*link = prefetch->next;
	}
}

/* Messages come in their order: after the last one no earlier one comes. An interrupted engine has lost one. */
void kvdpy_prefetch_note_begin(kvdpy_prefetch_t *prefetch, const PyObject *message)
{
	prefetch->owed = message && message == prefetch->last ? 0 : prefetch->owed - (prefetch->owed > 0);
	prefetch->thread = pthread_self();
	prefetch->called = 1;
}

/* The instance's only worker here. */
static kvdpy_prefetch_t *find_partner(const char *instance)
{
	kvdpy_prefetch_t *found = NULL;

	for (kvdpy_prefetch_t *prefetch = all; prefetch; prefetch = prefetch->next) {
		if (strcmp(prefetch->instance, instance) == 0) {
			if (found) {
				return NULL;
			}
			found = prefetch;
		}
	}

	return found;
}

/* A later hook gets the same error and reports it. -1: an interrupt, which is raised. */
static int clear_error(void)
{
	if (!PyErr_ExceptionMatches(PyExc_Exception)) {
		return -1;
	}
	PyErr_Clear();

	return 0;
}

/* 1: the output has this list, and it is not empty. -1: an exception. */
static int has_some(PyObject *output, PyObject *name)
{
	PyObject *list = PyObject_GetAttr(output, name);
	int some;

	if (!list) {
		return clear_error(); /* this engine has no such list */
	}
	some = PyObject_IsTrue(list);
	Py_DECREF(list);

	return some;
}

/* Before the forward pass the engine zeroes or copies blocks. */
static int writes_blocks(PyObject *output)
{
	const int zeroes = has_some(output, kvdpy_names.new_block_ids_to_zero);

	return zeroes ? zeroes : has_some(output, kvdpy_names.kv_cache_block_copies);
}

/* Begin them, if the worker is between two steps. */
static int begin_loads(kvdpy_worker_t *worker, const kvdpy_message_t *message)
{
	const uint32_t flags = (message->after_computing ? KVX_PREFETCH_COMPUTED : 0u) |
			       (worker->layers.trusted ? KVX_PREFETCH_LAYERS : 0u);
	PyThreadState *state;
	void *stream;

	if (kvdpy_current_stream(worker->stream_of, worker->device, &stream)) {
		return clear_error();
	}
	if (stream == worker->stream && worker->worker) { /* else earlier work is on another stream */
		state = PyEval_SaveThread();
		(void)kvx_worker_prefetch_step(worker->worker, message->bytes, message->len, flags);
		PyEval_RestoreThread(state);
	}

	return 0;
}

int kvdpy_prefetch_planned(kvdpy_scheduler_t *self, PyObject *output, const kvdpy_message_t *message)
{
	kvdpy_prefetch_t *prefetch = self->prefetch ? find_partner(self->instance) : NULL;
	PyObject *worker;
	int writes, status;

	if (prefetch) {
		prefetch->last = message->given;
	}
	if (!prefetch || prefetch->owed++ > 0 || message->len == 0 || !prefetch->called ||
	    !pthread_equal(prefetch->thread, pthread_self())) {
		return 0;
	}
	writes = writes_blocks(output);
	if (writes != 0) {
		return writes < 0 ? clear_error() : 0;
	}
	worker = Py_NewRef((PyObject *)prefetch->worker);
	status = begin_loads(prefetch->worker, message);
	Py_DECREF(worker);

	return status;
}
