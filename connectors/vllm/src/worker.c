/* The worker half: the hooks that vLLM's model runner calls on every rank. */
#include "kvdpy.h"

#define SELF(object) ((kvdpy_worker_t *)(object))

/* The stream of this step: copies are ordered with what the engine enqueues on it. */
static int read_stream(kvdpy_worker_t *self)
{
	if (self->stream_of == Py_None || !self->worker) {
		return 0;
	}
	if (kvdpy_current_stream(self->stream_of, self->device, &self->stream)) {
		return -1;
	}
	kvx_worker_set_stream(self->worker, self->stream);

	return 0;
}

/* handle_preemptions(meta) */
static PyObject *worker_begin_step(PyObject *object, PyObject *meta)
{
	kvdpy_worker_t *self = SELF(object);
	PyObject *message = self->worker ? PyObject_GetAttr(meta, kvdpy_names.message) : Py_NewRef(Py_None);
	PyThreadState *state;
	char *bytes = NULL;
	Py_ssize_t len = 0;

	kvdpy_prefetch_note_begin(&self->prefetch, message);
	kvdpy_layers_clear(&self->layers);
	if (!message || read_stream(self) || (message != Py_None && PyBytes_AsStringAndSize(message, &bytes, &len))) {
		Py_XDECREF(message);
		if (self->worker) { /* no message: the reused blocks are unknown, so all marked blocks are saved */
			kvx_worker_begin_step(self->worker, "", 1);
		}
		return kvdpy_answer_error(&self->breaker, "handle_preemptions", Py_None);
	}
	if (message != Py_None) {
		state = len ? PyEval_SaveThread() : NULL;
		kvx_worker_begin_step(self->worker, bytes, (size_t)len);
		if (state) {
			PyEval_RestoreThread(state);
		}
	}
	Py_DECREF(message);

	return Py_NewRef(Py_None);
}

/* bind_connector_metadata(meta) */
static PyObject *worker_start_async_loads(PyObject *object, PyObject *meta)
{
	(void)meta;
	if (SELF(object)->worker) {
		kvx_worker_start_async_loads(SELF(object)->worker);
	}

	return Py_NewRef(Py_None);
}

/* start_load_kv(forward_context, **kwargs) */
static PyObject *worker_run_sync_loads(PyObject *object, PyObject *args, PyObject *kwargs)
{
	kvdpy_worker_t *self = SELF(object);
	PyObject *context = PyTuple_Size(args) > 0 ? PyTuple_GetItem(args, 0) : NULL;

	(void)kwargs;
	if (self->worker) {
		kvdpy_layers_run_loads(&self->layers, self->worker, context);
	}

	return Py_NewRef(Py_None);
}

/* has_connector_metadata() */
static PyObject *worker_wants_layers(PyObject *object, PyObject *unused)
{
	(void)unused;

	return Py_NewRef(SELF(object)->layers.asked ? Py_True : Py_False);
}

/* wait_for_layer_load(name) */
static PyObject *worker_await_layer(PyObject *object, PyObject *name)
{
	kvdpy_worker_t *self = SELF(object);
	void *stream = self->stream;
	PyObject *answer = NULL;

	if (!self->layers.asked || !self->worker) {
		return Py_NewRef(Py_None);
	}
	if (!self->layers.layered && self->stream_of != Py_None &&
	    kvdpy_current_stream(self->stream_of, self->device, &stream)) {
		answer = kvdpy_answer_error(&self->breaker, "wait_for_layer_load", Py_None);
		if (!answer) {
			return NULL;
		}
	}
	kvdpy_layers_note(&self->layers, self->worker, name, !answer && stream == self->stream);

	return answer ? answer : Py_NewRef(Py_None);
}

/* save_kv_layer(name, tensor, metadata) */
static PyObject *worker_skip_save(PyObject *object, PyObject *args, PyObject *kwargs)
{
	(void)object;
	(void)args;
	(void)kwargs;

	return Py_NewRef(Py_None);
}

/* wait_for_save() */
static PyObject *worker_end_step(PyObject *object, PyObject *unused)
{
	(void)unused;
	if (SELF(object)->worker) {
		kvx_worker_end_step(SELF(object)->worker);
	}
	kvdpy_layers_end(&SELF(object)->layers);

	return Py_NewRef(Py_None);
}

/* Returns `value`, also after an error. */
static PyObject *answer_with(kvdpy_worker_t *self, PyObject *value, int failed, const char *hook)
{
	PyObject *found = failed ? kvdpy_answer_error(&self->breaker, hook, value) : Py_NewRef(value);

	Py_DECREF(value);

	return found;
}

static int add_id(PyObject **p_set, const char *id, uint32_t len)
{
	PyObject *text;
	int failed;

	if (!*p_set) {
		*p_set = PySet_New(NULL);
	}
	text = *p_set ? PyUnicode_FromStringAndSize(id, (Py_ssize_t)len) : NULL;
	failed = !text || PySet_Add(*p_set, text);
	Py_XDECREF(text);

	return failed;
}

/* Ids of asynchronous loads that have ended, and with several groups those that failed. A set stays NULL if empty. */
static int take_finished(kvdpy_worker_t *self, PyObject **p_done, PyObject **p_failed)
{
	char id[KVDPY_MAX_ID];
	int bad = 0;
	uint32_t len;

	while ((len = kvx_worker_take_finished(self->worker, id, sizeof id, &bad)) > 0) {
		len = len > sizeof id ? (uint32_t)sizeof id : len;
		if (add_id(p_done, id, len) || (bad && self->groups > 1 && add_id(p_failed, id, len))) {
			return -1;
		}
	}

	return 0;
}

/* get_finished(finished_req_ids) */
static PyObject *worker_take_finished(PyObject *object, PyObject *ids)
{
	kvdpy_worker_t *self = SELF(object);
	PyObject *done = NULL, *bad = NULL, *found = NULL;

	(void)ids;
	if (!self->worker) {
		return Py_NewRef(self->nothing);
	}
	if (take_finished(self, &done, &bad) == 0) {
		found = done ? Py_BuildValue("(OO)", Py_None, done) : Py_NewRef(self->nothing);
	}
	Py_XDECREF(done);
	Py_XDECREF(bad);

	return kvdpy_answer(&self->breaker, found, "get_finished", self->nothing);
}

/* get_transfer_results(finished_req_ids) */
static PyObject *worker_take_results(PyObject *object, PyObject *ids)
{
	kvdpy_worker_t *self = SELF(object);
	PyObject *results = PyObject_CallNoArgs(self->results_class);
	PyObject *done = NULL, *bad = NULL;
	int failed = 0;

	(void)ids;
	if (!results) {
		return NULL; /* out of memory: there is no harmless value */
	}
	if (self->worker) {
		failed = take_finished(self, &done, &bad);
	}
	failed = (done && PyObject_SetAttrString(results, "finished_recving", done)) || failed;
	failed = (bad && PyObject_SetAttrString(results, "failed_recving", bad)) || failed;
	Py_XDECREF(done);
	Py_XDECREF(bad);

	return answer_with(self, results, failed, "get_transfer_results");
}

/* With a cache in GPU memory this may wait for the loads of the step: other threads of the engine may run meanwhile. */
static uint32_t read_failed_blocks(kvdpy_worker_t *self, uint32_t *ids, uint32_t cap)
{
	PyThreadState *state = self->stream_of == Py_None ? NULL : PyEval_SaveThread();
	const uint32_t n = kvx_worker_take_failed_blocks(self->worker, ids, cap);

	if (state) {
		PyEval_RestoreThread(state);
	}

	return n;
}

/* get_block_ids_with_load_errors() */
static PyObject *worker_take_failed_blocks(PyObject *object, PyObject *unused)
{
	kvdpy_worker_t *self = SELF(object);
	PyObject *set = PySet_New(NULL);
	uint32_t ids[256], n = 0;
	int failed = 0;

	(void)unused;
	while (set && self->worker && (n = read_failed_blocks(self, ids, 256)) > 0) {
		failed = (self->groups == 1 && kvdpy_add_numbers(set, ids, n)) || failed;
	}

	return set ? answer_with(self, set, failed, "get_block_ids_with_load_errors") : NULL;
}

/* build_connector_worker_meta() */
static PyObject *worker_take_report(PyObject *object, PyObject *unused)
{
	kvdpy_worker_t *self = SELF(object);
	const void *bytes = NULL;
	size_t len = 0;
	PyObject *list, *meta;

	(void)unused;
	if (self->worker) {
		kvx_worker_take_report(self->worker, &bytes, &len);
	}
	if (len == 0) {
		return Py_NewRef(Py_None);
	}
	list = Py_BuildValue("[y#]", (const char *)bytes, (Py_ssize_t)len);
	meta = list ? PyObject_CallFunctionObjArgs(self->report_class, list, NULL) : NULL;
	Py_XDECREF(list);

	return kvdpy_answer(&self->breaker, meta, "build_connector_worker_meta", Py_None);
}

/* get_kv_connector_stats() */
static PyObject *worker_take_stats(PyObject *object, PyObject *unused)
{
	kvdpy_worker_t *self = SELF(object);
	kvx_worker_stats_t now = {.struct_size = sizeof now};

	(void)unused;
	if (!self->worker) {
		return Py_NewRef(Py_None);
	}
	kvx_worker_get_stats(self->worker, &now);

	return kvdpy_stats_delta(&kvdpy_worker_half, &now, &self->last, self->stats_class, &self->breaker);
}

/* ---- called by kvd_vllm ---------------------------------------------------------------------- */

static PyObject *worker_stats(PyObject *object, PyObject *unused)
{
	kvx_worker_stats_t now = {.struct_size = sizeof now};

	(void)unused;
	if (SELF(object)->worker) {
		kvx_worker_get_stats(SELF(object)->worker, &now);
	}

	return kvdpy_stats_totals(&kvdpy_worker_half, &now);
}

static PyObject *worker_roundtrip_test(PyObject *object, PyObject *args)
{
	kvx_worker_t *worker = SELF(object)->worker;
	unsigned int group, from, to;

	if (!PyArg_ParseTuple(args, "III", &group, &from, &to)) {
		return NULL;
	}

	return PyLong_FromLong(worker ? kvx_worker_roundtrip_test(worker, group, from, to) : KVC_ERR_CLOSED);
}

static PyObject *worker_self_test_status(PyObject *object, PyObject *unused)
{
	kvx_worker_t *worker = SELF(object)->worker;

	(void)unused;

	return PyLong_FromLong(worker ? kvx_worker_self_test_status(worker) : KVC_ERR_CLOSED);
}

static PyObject *worker_flush(PyObject *object, PyObject *number)
{
	kvx_worker_t *worker = SELF(object)->worker;
	kvc_status_t status = KVC_ERR_CLOSED;
	uint32_t timeout_ms;

	if (kvdpy_read_u32(number, &timeout_ms)) {
		return NULL;
	}
	if (worker) {
		PyThreadState *state = PyEval_SaveThread();

		status = kvx_worker_flush(worker, timeout_ms);
		PyEval_RestoreThread(state);
	}

	return PyLong_FromLong(status);
}

static PyObject *worker_close(PyObject *object, PyObject *unused)
{
	kvx_worker_t *worker = SELF(object)->worker;
	PyThreadState *state;

	(void)unused;
	SELF(object)->worker = NULL;
	kvdpy_prefetch_leave(&SELF(object)->prefetch);
	state = PyEval_SaveThread();
	kvx_worker_close(worker);
	PyEval_RestoreThread(state);

	return Py_NewRef(Py_None);
}

/* ---- create and destroy ---------------------------------------------------------------------- */

#define OWN(kind, field)    KVDPY_KEY(kvdpy_worker_t, kind, field)
#define CONFIG(kind, field) KVDPY_KEY(kvx_worker_config_t, kind, field)

static const kvdpy_key_t own_keys[] = {
	{"circuit_breaker", KVDPY_REF, offsetof(kvdpy_worker_t, breaker.object)},
	OWN(KVDPY_REF, report_class),
	OWN(KVDPY_REF, results_class),
	OWN(KVDPY_REF, stats_class),
	OWN(KVDPY_REF, stream_of),
	OWN(KVDPY_REF, device),
	{"prefetch", KVDPY_INT, offsetof(kvdpy_worker_t, prefetch.wanted)},
};
static const kvdpy_key_t config_keys[] = {
	CONFIG(KVDPY_U32, rank),     CONFIG(KVDPY_U32, threads), CONFIG(KVDPY_INT, prefault),
	CONFIG(KVDPY_U32, memory),   CONFIG(KVDPY_INT, device),  CONFIG(KVDPY_U32, sms),
	CONFIG(KVDPY_U32, save_sms), CONFIG(KVDPY_INT, measure), CONFIG(KVDPY_SIZE, layer_bytes),
};
_Static_assert(sizeof(size_t) == sizeof(uint64_t), "layer_bytes is read as a size_t");

static void worker_destroy(PyObject *object)
{
	kvdpy_worker_t *self = SELF(object);

	kvdpy_prefetch_leave(&self->prefetch);
	kvx_worker_close(self->worker);
	kvdpy_drop_keys(own_keys, KVDPY_COUNT(own_keys), self);
	Py_XDECREF(self->config);
	Py_XDECREF(self->nothing);
	kvdpy_layers_fini(&self->layers);
	kvdpy_free_object(object);
}

static int read_groups(PyObject *dict, kvdpy_paged_t *paged, kvx_worker_group_t *groups, uint32_t *p_count)
{
	static const kvdpy_key_t keys[] = {KVDPY_KEY(kvx_worker_group_t, KVDPY_U32, group)};
	PyObject *list = kvdpy_find_key(dict, "groups");
	const Py_ssize_t n = list ? PyList_Size(list) : -1;

	if (n < 1 || n > (Py_ssize_t)KVDPY_MAX_GROUPS) {
		PyErr_SetString(PyExc_ValueError, "groups must be a list of 1 to 16");
		return -1;
	}
	for (Py_ssize_t i = 0; i < n; i++) {
		PyObject *group = PyList_GetItem(list, i);

		if (kvdpy_read_keys(group, keys, 1, &groups[i]) || kvdpy_read_paged(group, &paged[i])) {
			return -1;
		}
		groups[i].paged = &paged[i].paged;
	}
	*p_count = (uint32_t)n;

	return 0;
}

static int open_worker(kvdpy_worker_t *self, PyObject *dict, kvdpy_paged_t *paged)
{
	kvx_worker_config_t c = {.struct_size = sizeof c};
	kvx_worker_group_t groups[KVDPY_MAX_GROUPS];
	PyObject *range = kvdpy_find_key(dict, "range");
	kvdpy_common_t common;
	kvc_status_t status;

	if (!range || kvdpy_read_writer(range, &c.range) || kvdpy_read_common(dict, &common) ||
	    kvdpy_read_keys(dict, config_keys, KVDPY_COUNT(config_keys), &c) ||
	    read_groups(dict, paged, groups, &c.group_count)) {
		return -1;
	}

	c.socket = common.socket;
	c.instance = common.instance;
	c.secret = common.secret;
	c.secret_len = common.secret_len;
	c.program = common.program;
	c.identity = &common.identity;
	c.layout = &common.layout;
	c.groups = groups;
	self->groups = (int)c.group_count;
	status = kvx_worker_open(&c, &self->worker);
	if (status != KVC_OK) {
		PyErr_Format(PyExc_ValueError, "%s: %s", kvc_status_name(status), kvx_worker_last_error());
		return -1;
	}
	if (self->prefetch.wanted && self->stream_of != Py_None) {
		kvdpy_prefetch_join(self, common.instance);
	}

	return 0;
}

static int worker_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
	kvdpy_worker_t *self = SELF(object);
	kvdpy_paged_t *paged;
	PyObject *dict;
	int failed;

	(void)kwargs;
	if (!PyArg_ParseTuple(args, "O!", &PyDict_Type, &dict)) {
		return -1;
	}
	self->config = Py_NewRef(dict);
	self->last.struct_size = sizeof self->last;
	self->nothing = Py_BuildValue("(OO)", Py_None, Py_None);
	paged = PyMem_Calloc(KVDPY_MAX_GROUPS, sizeof *paged);
	if (!paged) {
		PyErr_NoMemory();
	}
	failed = !self->nothing || !paged || kvdpy_read_keys(dict, own_keys, KVDPY_COUNT(own_keys), self) ||
		 kvdpy_layers_init(&self->layers, dict) || open_worker(self, dict, paged);
	PyMem_Free(paged);

	return failed ? -1 : 0;
}

#define FAST(function) ((PyCFunction)(void (*)(void))(function))
static PyMethodDef worker_methods[] = {
	{"begin_step", worker_begin_step, METH_O, "handle_preemptions"},
	{"start_async_loads", worker_start_async_loads, METH_O, "bind_connector_metadata"},
	{"run_sync_loads", FAST(worker_run_sync_loads), METH_VARARGS | METH_KEYWORDS, "start_load_kv"},
	{"wants_layers", worker_wants_layers, METH_NOARGS, "has_connector_metadata"},
	{"await_layer", worker_await_layer, METH_O, "wait_for_layer_load"},
	{"skip_save", FAST(worker_skip_save), METH_VARARGS | METH_KEYWORDS, "save_kv_layer"},
	{"end_step", worker_end_step, METH_NOARGS, "wait_for_save"},
	{"take_finished", worker_take_finished, METH_O, "get_finished"},
	{"take_results", worker_take_results, METH_O, "get_transfer_results"},
	{"take_failed_blocks", worker_take_failed_blocks, METH_NOARGS, "get_block_ids_with_load_errors"},
	{"take_report", worker_take_report, METH_NOARGS, "build_connector_worker_meta"},
	{"take_stats", worker_take_stats, METH_NOARGS, "get_kv_connector_stats"},
	{"stats", worker_stats, METH_NOARGS, "counters since the start"},
	{"roundtrip_test", worker_roundtrip_test, METH_VARARGS,
	 "gather a block of a group and scatter it to another; a status"},
	{"self_test_status", worker_self_test_status, METH_NOARGS,
	 "how the self-test against the daemon went; a status"},
	{"flush", worker_flush, METH_O, "wait until what was handed over is saved; a status"},
	{"close", worker_close, METH_NOARGS, "end the transfer threads"},
	{NULL, NULL, 0, NULL},
};

int kvdpy_worker_init(PyObject *module)
{
	static const kvdpy_type_t type = {"kvd_vllm._kvd.Worker", sizeof(kvdpy_worker_t), worker_init, worker_destroy,
					  worker_methods};

	return kvdpy_add_type(module, &type) ? 0 : -1;
}
