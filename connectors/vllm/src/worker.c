/* The worker half: the hooks that vLLM's model runner calls on every rank. */
#include "kvdpy.h"

#include <unistd.h>

#define CLOSE_NAP_US 1000u /* between looks at whether digests are still being made */

/* ---- hooks ----------------------------------------------------------------------------------- */

/* The stream of this step: copies are ordered with what the engine enqueues on it. */
static int read_stream(kvdpy_worker_t *self)
{
	if (self->stream_of == Py_None) {
		return 0;
	}
	if (kvdpy_current_stream(self->stream_of, self->device, &self->stream)) {
		return -1;
	}
	kvx_worker_set_stream(self->worker, self->stream);

	return 0;
}

/* The message asks for what the weights in memory are, as well. */
static int prove_weights(kvdpy_worker_t *self, PyObject *meta)
{
	PyObject *reply = PyObject_CallFunctionObjArgs(self->prove, meta, NULL);
	const int failed = !reply && kvdpy_report_error(&self->breaker, "prove");

	Py_XDECREF(reply);

	return failed;
}

/* handle_preemptions(meta) */
static PyObject *begin_step(kvdpy_worker_t *self, PyObject *meta)
{
	PyObject *message = PyObject_GetAttr(meta, kvdpy_names.message);
	PyThreadState *state;
	char *bytes;
	Py_ssize_t len;

	if ((PyObject *)Py_TYPE(meta) != self->meta_class && prove_weights(self, meta)) {
		Py_XDECREF(message);
		return NULL;
	}
	kvdpy_prefetch_note_begin(&self->prefetch, message);
	kvdpy_layers_clear(&self->layers);
	if (!message || read_stream(self) || PyBytes_AsStringAndSize(message, &bytes, &len)) {
		/* no message: the reused blocks are unknown, so all marked blocks are saved */
		kvx_worker_begin_step(self->worker, "", 1);
		Py_XDECREF(message);
		return NULL;
	}
	state = len ? PyEval_SaveThread() : NULL;
	kvx_worker_begin_step(self->worker, bytes, (size_t)len);
	if (state) {
		PyEval_RestoreThread(state);
	}
	Py_DECREF(message);

	return KVDPY_NONE;
}

/* start_load_kv(forward_context, **kwargs) */
static PyObject *worker_run_sync_loads(PyObject *object, PyObject *args, PyObject *kwargs)
{
	kvdpy_worker_t *self = (kvdpy_worker_t *)object;
	PyObject *context = PyTuple_Size(args) > 0 ? PyTuple_GetItem(args, 0) : NULL;

	(void)kwargs;
	if (self->worker) {
		kvdpy_layers_run_loads(&self->layers, self->worker, context);
	}

	return KVDPY_NONE;
}

/* wait_for_layer_load(name) */
static PyObject *await_layer(kvdpy_worker_t *self, PyObject *name)
{
	void *stream;
	int failed = 0;

	if (!self->layers.asked) {
		return KVDPY_NONE;
	}
	kvdpy_layers_note(&self->layers, self->worker, name);
	if (!self->layers.layered && self->stream_of != Py_None) {
		failed = kvdpy_current_stream(self->stream_of, self->device, &stream);
		self->layers.strange |= failed || stream != self->stream;
	}

	return failed ? NULL : KVDPY_NONE;
}

/* save_kv_layer(name, tensor, metadata) */
static PyObject *worker_skip_save(PyObject *object, PyObject *args, PyObject *kwargs)
{
	(void)object;
	(void)args;
	(void)kwargs;

	return KVDPY_NONE;
}

/* wait_for_save() */
static void end_step(kvdpy_worker_t *self)
{
	kvx_worker_end_step(self->worker);
	kvdpy_layers_end(&self->layers);
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
static PyObject *find_finished(kvdpy_worker_t *self)
{
	PyObject *done = NULL, *bad = NULL, *found = NULL;

	if (take_finished(self, &done, &bad) == 0) {
		found = done ? Py_BuildValue("(OO)", Py_None, done) : Py_NewRef(self->nothing);
	}
	Py_XDECREF(done);
	Py_XDECREF(bad);

	return found;
}

/* get_transfer_results(finished_req_ids) */
static PyObject *find_results(kvdpy_worker_t *self)
{
	PyObject *results = PyObject_CallNoArgs(self->results_class);
	PyObject *done = NULL, *bad = NULL;

	if (!results || take_finished(self, &done, &bad) ||
	    (done && PyObject_SetAttrString(results, "finished_recving", done)) ||
	    (bad && PyObject_SetAttrString(results, "failed_recving", bad))) {
		Py_CLEAR(results);
	}
	Py_XDECREF(done);
	Py_XDECREF(bad);

	return results;
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

/* get_block_ids_with_load_errors(). Of several groups only where find_results() cannot name the request. */
static PyObject *find_failed_blocks(kvdpy_worker_t *self)
{
	PyObject *set = PySet_New(NULL);
	uint32_t ids[256], n;

	while (set && (n = read_failed_blocks(self, ids, 256)) > 0) {
		if ((self->groups == 1 || self->results_class == Py_None) && kvdpy_add_numbers(set, ids, n)) {
			Py_CLEAR(set);
		}
	}

	return set;
}

/* build_connector_worker_meta() */
static PyObject *take_report(kvdpy_worker_t *self)
{
	const void *bytes;
	size_t len;
	PyObject *list, *meta;

	kvx_worker_take_report(self->worker, &bytes, &len);
	if (len == 0) {
		return KVDPY_NONE;
	}
	list = Py_BuildValue("[y#]", (const char *)bytes, (Py_ssize_t)len);
	meta = list ? PyObject_CallFunctionObjArgs(self->report_class, list, NULL) : NULL;
	Py_XDECREF(list);

	return meta;
}

/* ---- called by kvd_vllm ---------------------------------------------------------------------- */

static PyObject *run_roundtrip_test(kvdpy_worker_t *self, PyObject *const *args)
{
	uint32_t group, from, to;

	if (kvdpy_read_u32(args[0], &group) || kvdpy_read_u32(args[1], &from) || kvdpy_read_u32(args[2], &to)) {
		return NULL;
	}

	return PyLong_FromLong(kvx_worker_roundtrip_test(self->worker, group, from, to));
}

static PyObject *flush_saves(kvdpy_worker_t *self, PyObject *number)
{
	PyThreadState *state;
	kvc_status_t status;
	uint32_t timeout_ms;

	if (kvdpy_read_u32(number, &timeout_ms)) {
		return NULL;
	}
	state = PyEval_SaveThread();
	status = kvx_worker_flush(self->worker, timeout_ms);
	PyEval_RestoreThread(state);

	return PyLong_FromLong(status);
}

static int read_u64_item(PyObject *pair, Py_ssize_t i, uint64_t *p_value)
{
	PyObject *number = PySequence_GetItem(pair, i);

	*p_value = number ? PyLong_AsUnsignedLongLong(number) : 0;
	Py_XDECREF(number);

	return PyErr_Occurred() ? -1 : 0;
}

static int read_ranges(PyObject *list, kvk_range_t *ranges, Py_ssize_t n)
{
	for (Py_ssize_t i = 0; i < n; i++) {
		PyObject *range = PyList_GetItem(list, i);

		if (!range || read_u64_item(range, 0, &ranges[i].at) || read_u64_item(range, 1, &ranges[i].bytes)) {
			return -1;
		}
	}

	return 0;
}

static PyObject *make_digests(uint8_t (*digests)[KVK_RANGE_DIGEST_BYTES], Py_ssize_t n)
{
	PyObject *list = PyList_New(n);

	for (Py_ssize_t i = 0; list && i < n; i++) {
		PyObject *digest = PyBytes_FromStringAndSize((const char *)digests[i], KVK_RANGE_DIGEST_BYTES);

		if (!digest || PyList_SetItem(list, i, digest)) {
			Py_CLEAR(list);
		}
	}

	return list;
}

/* close() waits for it. */
static kvc_status_t digest_ranges(kvdpy_worker_t *self, const kvk_range_t *ranges, Py_ssize_t n,
				  uint8_t (*digests)[KVK_RANGE_DIGEST_BYTES])
{
	kvx_worker_t *worker = self->worker;
	PyThreadState *state;
	kvc_status_t status;

	if (!worker) {
		PyErr_SetString(PyExc_ValueError, "the worker is closed");
		return KVC_ERR_CLOSED;
	}
	self->digesting++;
	state = PyEval_SaveThread();
	status = kvx_worker_digest(worker, ranges, (uint32_t)n, digests);
	PyEval_RestoreThread(state);
	self->digesting--;
	if (status == KVC_ERR_NOMEM) {
		(void)PyErr_NoMemory();
	} else if (status != KVC_OK) {
		PyErr_Format(PyExc_ValueError, "%s: %s", kvc_status_name(status), kvx_worker_last_error());
	}

	return status;
}

/* No hook: it may raise, and any thread may call it. */
static PyObject *worker_digest(PyObject *object, PyObject *list)
{
	const Py_ssize_t n = PyList_Size(list);
	uint8_t(*digests)[KVK_RANGE_DIGEST_BYTES];
	PyObject *answer = NULL;
	kvk_range_t *ranges;

	if (n < 0) {
		return NULL;
	}
	if (n > KVDPY_MAX_RANGES) {
		return PyErr_Format(PyExc_ValueError, "at most %u ranges", KVDPY_MAX_RANGES);
	}
	ranges = PyMem_Calloc((size_t)n + 1, sizeof *ranges);
	digests = PyMem_Calloc((size_t)n + 1, sizeof *digests);
	if (!ranges || !digests) {
		answer = PyErr_NoMemory();
	} else if (read_ranges(list, ranges, n) == 0 &&
		   digest_ranges((kvdpy_worker_t *)object, ranges, n, digests) == KVC_OK) {
		answer = make_digests(digests, n);
	}
	PyMem_Free(digests);
	PyMem_Free(ranges);

	return answer;
}

static PyObject *close_worker(kvdpy_worker_t *self)
{
	kvx_worker_t *worker = self->worker;
	PyThreadState *state;

	self->worker = NULL;
	kvdpy_layers_clear(&self->layers);
	kvdpy_prefetch_leave(&self->prefetch);
	state = PyEval_SaveThread();
	while (atomic_load(&self->digesting) > 0) {
		(void)usleep(CLOSE_NAP_US);
	}
	kvx_worker_close(worker);
	PyEval_RestoreThread(state);

	return KVDPY_NONE;
}

/* ---- the methods ----------------------------------------------------------------------------- */

#define NO        Py_NewRef(Py_False)
#define NOTHING   Py_NewRef(self->nothing)
#define RESULTS   PyObject_CallNoArgs(self->results_class)
#define DELTA     kvdpy_stats_delta(&kvdpy_worker_half, self->worker, &self->breaker, &self->counters)
#define TOTALS    kvdpy_stats_totals(&kvdpy_worker_half, self->worker, &self->breaker, &self->counters)
#define START     KVDPY_DONE(kvx_worker_start_async_loads(self->worker))
#define SELF_TEST PyLong_FromLong(kvx_worker_self_test_status(self->worker))
/* X(method, number of arguments, what is called, harmless answer, vLLM's hook or what it does) */
#define METHODS(X)                                                                                                     \
	X(begin_step, 1, begin_step(self, args[0]), KVDPY_NONE, "handle_preemptions")                                  \
	X(start_async_loads, 1, START, KVDPY_NONE, "bind_connector_metadata")                                          \
	X(wants_layers, 0, PyBool_FromLong(self->layers.asked), NO, "has_connector_metadata")                          \
	X(await_layer, 1, await_layer(self, args[0]), KVDPY_NONE, "wait_for_layer_load")                               \
	X(end_step, 0, KVDPY_DONE(end_step(self)), KVDPY_NONE, "wait_for_save")                                        \
	X(take_finished, 1, find_finished(self), NOTHING, "get_finished")                                              \
	X(take_results, 1, find_results(self), RESULTS, "get_transfer_results")                                        \
	X(take_failed_blocks, 0, find_failed_blocks(self), PySet_New(NULL), "get_block_ids_with_load_errors")          \
	X(take_report, 0, take_report(self), KVDPY_NONE, "build_connector_worker_meta")                                \
	X(take_stats, 0, DELTA, KVDPY_NONE, "get_kv_connector_stats")                                                  \
	X(stats, 0, TOTALS, TOTALS, "counters since the start")                                                        \
	X(roundtrip_test, 3, run_roundtrip_test(self, args), KVDPY_CLOSED,                                             \
	  "gather a block of a group and scatter it to another; a status")                                             \
	X(self_test_status, 0, SELF_TEST, KVDPY_CLOSED, "how the self-test against the daemon went; a status")         \
	X(flush, 1, flush_saves(self, args[0]), KVDPY_CLOSED, "wait until what was handed over is saved; a status")    \
	X(finish_saves, 0, KVDPY_DONE(kvx_worker_finish_saves(self->worker)), KVDPY_NONE,                              \
	  "read what is still to be saved, or give it up: the cache's memory goes away")                               \
	X(close, 0, close_worker(self), KVDPY_NONE, "end the transfer threads")

#define DEFINE(method, count, call, harmless, text) KVDPY_METHOD(worker, method, count, call, harmless, text)
#define ROW(method, count, call, harmless, text)    KVDPY_METHOD_ROW(worker, method, text)
METHODS(DEFINE)
static PyMethodDef methods[] = {
	METHODS(ROW){"run_sync_loads", KVDPY_FAST(worker_run_sync_loads), METH_VARARGS | METH_KEYWORDS,
		     "start_load_kv"},
	{"digest", KVDPY_FAST(worker_digest), METH_O, "[(address, bytes)] -> their digests, as they lie in memory"},
	{"skip_save", KVDPY_FAST(worker_skip_save), METH_VARARGS | METH_KEYWORDS, "save_kv_layer"},
	{NULL, NULL, 0, NULL},
};

/* ---- create and destroy ---------------------------------------------------------------------- */

#define OWN(format, field)    KVDPY_KEY(kvdpy_worker_t, format, field)
#define CONFIG(format, field) KVDPY_KEY(kvx_worker_config_t, format, field)

static const kvdpy_key_t own_keys[] = {
	{"circuit_breaker", "O", offsetof(kvdpy_worker_t, breaker.object)},
	OWN("O", meta_class),
	OWN("O", report_class),
	OWN("O", prove),
	OWN("O", results_class),
	{"stats_class", "O", offsetof(kvdpy_worker_t, counters.stats_class)},
	OWN("O", stream_of),
	OWN("O", device),
	{"prefetch", "i", offsetof(kvdpy_worker_t, prefetch.wanted)},
};
static const kvdpy_key_t config_keys[] = {
	CONFIG("z", socket),      CONFIG("z", instance), CONFIG("z", program),      CONFIG("i", rank),
	CONFIG("i", threads),     CONFIG("i", prefault), CONFIG("i", memory),       CONFIG("i", device),
	CONFIG("i", sms),         CONFIG("i", save_sms), CONFIG("n", promote_rate), CONFIG("i", measure),
	CONFIG("n", layer_bytes),
};

static void worker_destroy(PyObject *object)
{
	kvdpy_worker_t *self = (kvdpy_worker_t *)object;

	kvdpy_prefetch_leave(&self->prefetch);
	kvx_worker_close(self->worker);
	Py_XDECREF(self->config);
	Py_XDECREF(self->nothing);
	kvdpy_free_object(object);
}

static int read_groups(PyObject *dict, const kvdpy_common_t *common, kvdpy_paged_t *paged, kvx_worker_group_t *groups)
{
	static const kvdpy_key_t saved[] = {KVDPY_KEY(kvx_worker_group_t, "i", save_layer_first),
					    KVDPY_KEY(kvx_worker_group_t, "i", save_layers)};
	uint32_t count = 0;
	PyObject *list = kvdpy_find_list(dict, "groups", KVDPY_MAX_GROUPS, &count);

	if (list && count != common->layout_count) {
		PyErr_SetString(PyExc_ValueError, "not as many groups as layouts");
		return -1;
	}
	for (uint32_t i = 0; list && i < count; i++) {
		PyObject *group = PyList_GetItem(list, (Py_ssize_t)i);

		if (kvdpy_read_paged(group, &paged[i]) ||
		    kvdpy_read_keys(group, saved, KVDPY_COUNT(saved), &groups[i])) {
			return -1;
		}
		groups[i].group = paged[i].group;
		groups[i].layout = &common->layouts[i];
		groups[i].paged = &paged[i].paged;
	}

	return list ? (int)count : -1;
}

static int open_worker(kvdpy_worker_t *self, PyObject *dict, kvdpy_paged_t *paged)
{
	kvx_worker_config_t c = {.struct_size = sizeof c};
	kvx_worker_group_t groups[KVDPY_MAX_GROUPS] = {0};
	kvdpy_common_t common = {0};
	kvc_status_t status;

	if (kvdpy_read_common(dict, &common) || kvdpy_read_keys(dict, config_keys, KVDPY_COUNT(config_keys), &c)) {
		return -1;
	}
	self->groups = read_groups(dict, &common, paged, groups);
	if (self->groups < 0) {
		return -1;
	}

	c.secret = common.secret;
	c.secret_len = common.secret_len;
	c.identity = &common.identity;
	c.groups = groups;
	c.group_count = (uint32_t)self->groups;
	status = kvx_worker_open(&c, &self->worker);
	if (status != KVC_OK) {
		PyErr_Format(PyExc_ValueError, "%s: %s", kvc_status_name(status), kvx_worker_last_error());
		return -1;
	}
	if (self->prefetch.wanted && self->stream_of != Py_None) {
		kvdpy_prefetch_join(self, c.instance);
	}

	return 0;
}

static int worker_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
	kvdpy_worker_t *self = (kvdpy_worker_t *)object;
	kvdpy_paged_t *paged = PyMem_Calloc(KVDPY_MAX_GROUPS, sizeof *paged);
	PyObject *dict;
	int failed;

	(void)kwargs;
	self->nothing = Py_BuildValue("(OO)", Py_None, Py_None);
	failed = !paged || !self->nothing || !PyArg_ParseTuple(args, "O!", &PyDict_Type, &dict);
	if (!failed) {
		self->config = Py_NewRef(dict);
		failed = kvdpy_read_keys(dict, own_keys, KVDPY_COUNT(own_keys), self) ||
			 kvdpy_layers_init(&self->layers, dict) || open_worker(self, dict, paged);
	}
	PyMem_Free(paged);

	return failed ? -1 : 0;
}

static PyType_Slot slots[] = {
	{Py_tp_init, KVDPY_SLOT(worker_init)},
	{Py_tp_dealloc, KVDPY_SLOT(worker_destroy)},
	{Py_tp_methods, methods},
	{0, NULL},
};
PyType_Spec kvdpy_worker_spec = {"kvd_vllm._kvd.Worker", sizeof(kvdpy_worker_t), 0, Py_TPFLAGS_DEFAULT, slots};
