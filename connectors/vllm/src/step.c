/* The walk over one step of vLLM's scheduler: block tables grow, computed tokens advance, a step message comes out. */
#include "kvdpy.h"

#define PEER_WAIT_US   1000u /* a new request may come */
#define PEER_WAITS_MAX 3u    /* doublings: a step costs a worker about 1 ms, which the other engine may need */

/* One request of the step. */
typedef struct kvdpy_item {
	kvdpy_request_t *r;   /* borrowed from self->requests */
	PyObject *tables;     /* borrowed; None: no new blocks */
	uint32_t had, tokens; /* computed before, scheduled now */
	int whole;            /* tables is everything, not what is appended */
} kvdpy_item_t;

/* 1: a list in `tables` has another length than the known blocks of its group. */
static int tables_differ(kvdpy_scheduler_t *self, const kvdpy_item_t *item)
{
	for (uint32_t g = 0; g < self->groups; g++) {
		PyObject *list = PySequence_GetItem(item->tables, (Py_ssize_t)self->tables[g]);
		const Py_ssize_t n = list ? PyList_Size(list) : -1;

		Py_XDECREF(list);
		if (n < 0) {
			return -1;
		}
		if ((uint32_t)n != item->r->known_blocks[g]) {
			return 1;
		}
	}

	return 0;
}

/* Append the blocks of this step that update_state_after_alloc() has not named. */
static int append_item(kvdpy_scheduler_t *self, kvdpy_item_t *item, kvdpy_ask_t *ask)
{
	int differ = item->tables != Py_None;

	if (differ && item->whole) {
		differ = tables_differ(self, item);
	}
	if (differ > 0) {
		return kvdpy_append_blocks(self, ask, item->tables, !item->whole);
	}

	return differ;
}

/* A request that decodes inside a block needs nothing. */
static int is_idle(kvdpy_scheduler_t *self, const kvdpy_item_t *item)
{
	const uint32_t computed = item->had + item->tokens;

	return item->tables == Py_None && item->tokens == 1 && computed > item->r->computed &&
	       computed < kvx_scheduler_next_save_at(self->scheduler, item->r->id_text, item->r->id_len);
}

static int step_item(kvdpy_scheduler_t *self, kvdpy_item_t *item)
{
	kvdpy_request_t *r = item->r;
	const uint32_t computed = item->had + item->tokens;
	kvdpy_ask_t ask;
	int failed;

	if (r->single == 0 || computed < r->single) {
		r->last_step = self->step;
	} else {
		self->continuing--;
	}
	if (is_idle(self, item)) {
		r->computed = computed;
		return 0;
	}
	if (kvdpy_ask_known(self, r, &ask)) {
		return -1;
	}

	failed = append_item(self, item, &ask);
	r->computed = computed;
	if (!failed && self->saves && !self->off && !r->no_keys && r->most_save > 0) {
		failed = kvdpy_feed_tokens(self, &ask, computed);
		kvx_scheduler_advance(self->scheduler, &ask.ask, computed, item->tokens);
	} else {
		kvx_scheduler_note_step_tokens(self->scheduler, computed, item->tokens);
	}
	kvdpy_ask_end(&ask);

	return failed;
}

static kvdpy_request_t *find_known(kvdpy_scheduler_t *self, PyObject *id)
{
	return id ? (kvdpy_request_t *)PyDict_GetItemWithError(self->requests, id) : NULL;
}

/* NewRequestData: scheduled for the first time, or (model runner V2) resumed. */
static int step_new(kvdpy_scheduler_t *self, PyObject *data, PyObject *scheduled)
{
	PyObject *const names[] = {kvdpy_names.req_id, kvdpy_names.block_ids, kvdpy_names.num_computed_tokens};
	PyObject *values[3];
	kvdpy_item_t item = {.whole = 1};
	int failed = !data || kvdpy_get_attributes(data, names, values, 3);

	if (!failed) {
		item.r = find_known(self, values[0]);
		item.tables = values[1];
		failed = kvdpy_read_u32(values[2], &item.had) ||
			 kvdpy_read_u32(PyDict_GetItemWithError(scheduled, values[0]), &item.tokens) ||
			 (item.r && step_item(self, &item));
	}
	if (data) {
		kvdpy_drop(values, 3);
	}

	return failed ? -1 : 0;
}

static int walk_new(kvdpy_scheduler_t *self, PyObject *output, PyObject *scheduled)
{
	PyObject *list = PyObject_GetAttr(output, kvdpy_names.scheduled_new_reqs);
	const Py_ssize_t n = list ? PyList_Size(list) : -1;
	int failed = n < 0;

	for (Py_ssize_t i = 0; i < n && !failed; i++) {
		failed = step_new(self, PyList_GetItem(list, i), scheduled);
	}
	Py_XDECREF(list);

	return failed ? -1 : 0;
}

/* CachedRequestData: parallel lists. */
enum { IDS, TABLES, HAD, RESUMED, CACHED_COUNT };

static int step_cached(kvdpy_scheduler_t *self, PyObject *const *lists, Py_ssize_t i, PyObject *scheduled)
{
	PyObject *id = PyList_GetItem(lists[IDS], i);
	kvdpy_item_t item = {.r = find_known(self, id), .tables = PyList_GetItem(lists[TABLES], i)};

	if (!id || !item.tables || PyErr_Occurred()) {
		return -1;
	}
	if (!item.r) {
		return 0;
	}
	if (kvdpy_read_u32(PyList_GetItem(lists[HAD], i), &item.had) ||
	    kvdpy_read_u32(PyDict_GetItemWithError(scheduled, id), &item.tokens)) {
		return -1;
	}
	item.whole = PySet_Size(lists[RESUMED]) > 0 && PySet_Contains(lists[RESUMED], id) == 1;

	return step_item(self, &item);
}

static int walk_cached(kvdpy_scheduler_t *self, PyObject *output, PyObject *scheduled)
{
	PyObject *const names[] = {kvdpy_names.req_ids, kvdpy_names.new_block_ids, kvdpy_names.num_computed_tokens,
				   kvdpy_names.resumed_req_ids};
	PyObject *data = PyObject_GetAttr(output, kvdpy_names.scheduled_cached_reqs);
	PyObject *lists[CACHED_COUNT] = {0};
	int failed = !data || kvdpy_get_attributes(data, names, lists, CACHED_COUNT);
	const Py_ssize_t n = failed ? -1 : PyList_Size(lists[IDS]);

	for (Py_ssize_t i = 0; i < n && !failed; i++) {
		failed = step_cached(self, lists, i, scheduled);
	}
	kvdpy_drop(lists, CACHED_COUNT);
	Py_XDECREF(data);

	return failed || n < 0 ? -1 : 0;
}

/* A preempted request that got blocks again in this step keeps them. */
static int step_preempted(kvdpy_scheduler_t *self, PyObject *id)
{
	kvdpy_request_t *r = find_known(self, id);
	kvdpy_ask_t ask;

	if (!r || r->step == self->step) {
		return PyErr_Occurred() ? -1 : 0;
	}
	if (kvdpy_ask_known(self, r, &ask)) {
		return -1;
	}
	kvdpy_drop_blocks(self, &ask);
	kvdpy_ask_end(&ask);

	return 0;
}

static int walk_preempted(kvdpy_scheduler_t *self, PyObject *output)
{
	PyObject *ids = PyObject_GetAttr(output, kvdpy_names.preempted_req_ids);
	PyObject *iterator, *id;
	int failed = 0;

	if (!ids || ids == Py_None || PyObject_Size(ids) <= 0) {
		Py_XDECREF(ids);
		return ids && !PyErr_Occurred() ? 0 : -1;
	}

	iterator = PyObject_GetIter(ids);
	while (iterator && !failed && (id = PyIter_Next(iterator)) != NULL) {
		failed = step_preempted(self, id);
		Py_DECREF(id);
	}
	Py_XDECREF(iterator);
	Py_DECREF(ids);

	return failed || PyErr_Occurred() ? -1 : 0;
}

static int walk_step(kvdpy_scheduler_t *self, PyObject *output)
{
	PyObject *scheduled = PyObject_GetAttr(output, kvdpy_names.num_scheduled_tokens);
	int failed;

	if (!scheduled) {
		return -1;
	}
	self->request_count = (uint32_t)PyDict_Size(scheduled);
	self->continuing = self->request_count;
	self->built_step = self->step;
	failed = walk_preempted(self, output) || walk_new(self, output, scheduled) ||
		 walk_cached(self, output, scheduled);
	Py_DECREF(scheduled);

	return failed;
}

/* The engine has nothing to compute, and would ask again at once. What the daemon says ends the wait. */
static void await_peer(kvdpy_scheduler_t *self)
{
	PyThreadState *state = PyEval_SaveThread();

	(void)kvx_scheduler_wait(self->scheduler, PEER_WAIT_US << self->peer_waits);
	PyEval_RestoreThread(state);
	self->peer_waits += self->peer_waits < PEER_WAITS_MAX;
}

PyObject *kvdpy_build_meta(kvdpy_scheduler_t *self, PyObject *output)
{
	kvdpy_message_t message = {.after_computing = self->request_count > 0};
	PyObject *bytes, *meta;

	/* After an error the message goes out all the same: loads depend on it. */
	if (walk_step(self, output) && kvdpy_report_error(&self->breaker, "build_connector_meta")) {
		return NULL;
	}
	self->step = self->step == UINT32_MAX ? 1 : self->step + 1;
	if (self->request_count == 0 && kvx_scheduler_awaits_peer(self->scheduler)) {
		await_peer(self);
	} else {
		self->peer_waits = 0;
	}

	kvx_scheduler_build_message(self->scheduler, &message.bytes, &message.len);
	if (message.len == 0) {
		meta = Py_NewRef(self->meta_empty);
	} else {
		bytes = PyBytes_FromStringAndSize(message.bytes, (Py_ssize_t)message.len);
		meta = bytes ? PyObject_CallFunctionObjArgs(self->meta_class, bytes, NULL) : NULL;
		Py_XDECREF(bytes);
		message.given = bytes;
	}
	if (meta && kvdpy_prefetch_planned(self, output, &message)) {
		Py_CLEAR(meta);
	}
	if (meta && kvx_scheduler_needs_proof(self->scheduler)) {
		bytes = PyObject_CallNoArgs(self->reprove);
		Py_XDECREF(bytes);
		if (!bytes) {
			Py_CLEAR(meta);
		}
	}

	return meta;
}
