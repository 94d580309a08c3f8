/* The scheduling half: what vLLM's scheduler calls, but for the walk over a step (step.c). */
#include "kvdpy.h"

#include <string.h>

static PyTypeObject *scheduler_type;

#define SELF(object) ((kvdpy_scheduler_t *)(object))

/* ---- hooks ----------------------------------------------------------------------------------- */

static PyObject *bad_call(const char *name, Py_ssize_t wanted)
{
	PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments", name, wanted);

	return NULL;
}

/* The request is asked about from its beginning although it had blocks: they are gone. */
static void drop_blocks(kvdpy_scheduler_t *self, kvdpy_request_t *r, kvdpy_ask_t *ask)
{
	if (r->step == 0) {
		return;
	}
	kvx_scheduler_preempt(self->scheduler, &ask->ask);
	memset(r->known_blocks, 0, sizeof r->known_blocks);
	r->step = 0;
	r->computed = 0;
}

/* Keys of our own begin with the space, and it is a match that opens the space of an adapter seen for the first time:
 * then once more. */
static int match_request(kvdpy_scheduler_t *self, kvdpy_request_t *r, kvdpy_ask_t *ask)
{
	for (int turn = 0; turn < 2; turn++) {
		if (kvdpy_feed_tokens(self, r, ask, ask->ask.tokens)) {
			return -1;
		}
		if (turn == 0 || r->fed_tokens > 0) {
			kvx_scheduler_match(self->scheduler, &ask->ask, &r->hit);
		}
		if (self->foreign || r->fed_tokens > 0) {
			break;
		}
	}

	return 0;
}

static PyObject *run_match(kvdpy_scheduler_t *self, PyObject *request, uint32_t local)
{
	kvdpy_request_t *r = kvdpy_find_request(self, request);
	kvdpy_ask_t ask;
	PyObject *answer = NULL;

	if (!r) {
		return NULL;
	}
	r->local = local;
	memset(&r->hit, 0, sizeof r->hit);
	if (kvdpy_ask_begin(self, r, &ask)) {
		Py_DECREF((PyObject *)r);
		return NULL;
	}

	drop_blocks(self, r, &ask);
	if (self->off || r->no_read || r->no_keys || !self->loads) {
		answer = Py_NewRef(self->nothing);
	} else if (match_request(self, r, &ask) == 0) {
		answer = r->hit.tokens ? Py_BuildValue("(IO)", r->hit.tokens, r->hit.async ? Py_True : Py_False)
				       : Py_NewRef(self->nothing);
	}
	kvdpy_ask_end(&ask);
	Py_DECREF((PyObject *)r);

	return answer;
}

/* get_num_new_matched_tokens(request, num_computed_tokens) */
static PyObject *scheduler_match(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
	kvdpy_scheduler_t *self = SELF(object);
	PyObject *answer = NULL;
	unsigned long local;

	if (!self->scheduler) {
		return Py_NewRef(self->nothing);
	}
	if (n != 2) {
		bad_call("match", 2);
	} else {
		local = PyLong_AsUnsignedLong(args[1]);
		answer = PyErr_Occurred() ? NULL : run_match(self, args[0], (uint32_t)local);
	}

	return answer ? answer : kvdpy_answer_error(&self->breaker, "get_num_new_matched_tokens", self->nothing);
}

/* Whatever fails here, a load the engine counts on goes into the message, where a load that cannot be done is reported
 * as failed. */
static int run_add_blocks(kvdpy_scheduler_t *self, PyObject *const *args)
{
	kvdpy_request_t *r = kvdpy_find_request(self, args[0]);
	const unsigned long external = PyLong_AsUnsignedLong(args[2]);
	PyObject *tables;
	kvdpy_ask_t ask;
	int failed;

	if (!r || PyErr_Occurred() || kvdpy_ask_begin(self, r, &ask)) {
		Py_XDECREF((PyObject *)r);
		return -1;
	}

	tables = PyObject_CallMethodObjArgs(args[1], kvdpy_names.get_block_ids, NULL);
	failed = !tables || kvdpy_append_blocks(self, r, &ask, tables, 0);
	r->step = self->step;
	if (!r->admitted) {
		r->admitted = 1;
		r->engine = r->local;
	}
	if (external > 0) {
		r->hit.tokens = (uint32_t)external;
		kvx_scheduler_start_load(self->scheduler, &ask.ask, &r->hit);
	}
	Py_XDECREF(tables);
	kvdpy_ask_end(&ask);
	Py_DECREF((PyObject *)r);

	return failed;
}

/* update_state_after_alloc(request, blocks, num_external_tokens) */
static PyObject *scheduler_add_blocks(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
	kvdpy_scheduler_t *self = SELF(object);

	if (!self->scheduler) {
		return Py_NewRef(Py_None);
	}
	if (n != 3) {
		bad_call("add_blocks", 3);
	} else if (run_add_blocks(self, args) == 0) {
		return Py_NewRef(Py_None);
	}

	return kvdpy_answer_error(&self->breaker, "update_state_after_alloc", Py_None);
}

/* on_new_request(request) */
static PyObject *scheduler_add_request(PyObject *object, PyObject *request)
{
	kvdpy_scheduler_t *self = SELF(object);
	kvdpy_request_t *r = self->off || !self->scheduler ? NULL : kvdpy_find_request(self, request);

	Py_XDECREF((PyObject *)r);

	return PyErr_Occurred() ? kvdpy_answer_error(&self->breaker, "on_new_request", Py_None) : Py_NewRef(Py_None);
}

/* build_connector_meta(scheduler_take_output) */
static PyObject *scheduler_build_meta(PyObject *object, PyObject *output)
{
	kvdpy_scheduler_t *self = SELF(object);
	PyObject *meta = self->scheduler ? kvdpy_build_meta(self, output) : Py_NewRef(self->meta_empty);

	return meta ? meta : kvdpy_answer_error(&self->breaker, "build_connector_meta", self->meta_empty);
}

/* request_finished(request, block_ids), request_finished_all_groups(request, block_ids) */
static PyObject *scheduler_finish_request(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
	kvdpy_scheduler_t *self = SELF(object);

	if (!self->scheduler) {
		return Py_NewRef(self->released);
	}
	if (n != 2) {
		bad_call("finish_request", 2);
	} else if (kvdpy_request_finish(self, args[0]) == 0) {
		return Py_NewRef(self->released);
	}

	return kvdpy_answer_error(&self->breaker, "request_finished", self->released);
}

static int read_reports(kvdpy_scheduler_t *self, PyObject *meta)
{
	PyObject *reports = PyObject_GetAttr(meta, kvdpy_names.reports);
	const Py_ssize_t n = reports ? PyList_Size(reports) : -1;
	int failed = n < 0;

	for (Py_ssize_t i = 0; !failed && i < n; i++) {
		PyObject *report = PyList_GetItem(reports, i);
		char *bytes;
		Py_ssize_t len;

		failed = !report || PyBytes_AsStringAndSize(report, &bytes, &len);
		if (!failed) {
			kvx_scheduler_take_report(self->scheduler, bytes, (size_t)len);
		}
	}
	Py_XDECREF(reports);

	return failed ? -1 : 0;
}

/* With the blocks that requests had lost by the time their load failed; as a rule there are none, and the engine's own
 * set does. */
static PyObject *with_invalidated(kvdpy_scheduler_t *self, PyObject *ids)
{
	uint32_t invalidated[256];
	uint32_t n = kvx_scheduler_take_invalidated(self->scheduler, invalidated, 256);
	PyObject *all = n > 0 ? PySet_New(ids == Py_None ? NULL : ids) : ids;

	if (n == 0) {
		Py_INCREF(all);
	}
	for (; all && n > 0; n = kvx_scheduler_take_invalidated(self->scheduler, invalidated, 256)) {
		for (uint32_t i = 0; all && i < n; i++) {
			PyObject *id = PyLong_FromUnsignedLong(invalidated[i]);

			if (!id || PySet_Add(all, id)) {
				Py_CLEAR(all);
			}
			Py_XDECREF(id);
		}
	}

	return all;
}

/* A synchronous load has failed. */
static int forget_invalid(kvdpy_scheduler_t *self, PyObject *output)
{
	PyObject *invalid = PyObject_GetAttr(output, kvdpy_names.invalid_block_ids);
	PyObject *ids = invalid ? with_invalidated(self, invalid) : NULL;
	const int some = ids ? PyObject_IsTrue(ids) : -1;
	PyObject *said = NULL;

	Py_XDECREF(invalid);
	if (some > 0) {
		said = PyObject_CallFunctionObjArgs(self->forget, ids, self->requests, NULL);
	}
	Py_XDECREF(said);
	Py_XDECREF(ids);

	return some == 0 || said ? 0 : -1;
}

/* update_connector_output(output) */
static PyObject *scheduler_take_output(PyObject *object, PyObject *output)
{
	kvdpy_scheduler_t *self = SELF(object);
	PyObject *meta;
	int failed;

	if (!self->scheduler) {
		return Py_NewRef(Py_None);
	}
	meta = PyObject_GetAttr(output, kvdpy_names.kv_connector_worker_meta);
	failed = !meta || (meta != Py_None && read_reports(self, meta)) || forget_invalid(self, output);
	Py_XDECREF(meta);

	return failed ? kvdpy_answer_error(&self->breaker, "update_connector_output", Py_None) : Py_NewRef(Py_None);
}

/* has_pending_push_work() */
static PyObject *scheduler_has_pending(PyObject *object, PyObject *unused)
{
	(void)unused;

	return PyBool_FromLong(SELF(object)->scheduler && kvx_scheduler_has_pending(SELF(object)->scheduler));
}

/* get_kv_connector_stats() */
static PyObject *scheduler_take_stats(PyObject *object, PyObject *unused)
{
	kvdpy_scheduler_t *self = SELF(object);
	kvx_scheduler_stats_t now = {.struct_size = sizeof now};

	(void)unused;
	if (!self->scheduler) {
		return Py_NewRef(Py_None);
	}
	kvx_scheduler_get_stats(self->scheduler, &now);

	return kvdpy_scheduler_delta(&now, &self->last, self->stats_class, &self->breaker);
}

/* ---- what our own Python calls --------------------------------------------------------------- */

static PyObject *scheduler_stats(PyObject *object, PyObject *unused)
{
	kvx_scheduler_stats_t now = {.struct_size = sizeof now};

	(void)unused;
	if (SELF(object)->scheduler) {
		kvx_scheduler_get_stats(SELF(object)->scheduler, &now);
	}

	return kvdpy_scheduler_dict(&now);
}

/* Tokens of the request's last hit that come from disk. */
static PyObject *scheduler_disk_tokens(PyObject *object, PyObject *id)
{
	kvdpy_request_t *r = (kvdpy_request_t *)PyDict_GetItemWithError(SELF(object)->requests, id);

	return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(r ? r->hit.disk_tokens : 0);
}

static PyObject *scheduler_is_ready(PyObject *object, PyObject *unused)
{
	(void)unused;

	return PyBool_FromLong(SELF(object)->scheduler && kvx_scheduler_is_ready(SELF(object)->scheduler));
}

/* weights(text): what names them is known. Of any thread. */
static PyObject *scheduler_set_weights(PyObject *object, PyObject *value)
{
	const char *text = PyUnicode_AsUTF8AndSize(value, NULL);
	kvc_status_t status = KVC_ERR_CLOSED;

	if (!text) {
		return NULL;
	}
	if (SELF(object)->scheduler) {
		status = kvx_scheduler_set_weights(SELF(object)->scheduler, text);
	}

	return PyLong_FromLong(status);
}

static PyObject *scheduler_set_enabled(PyObject *object, PyObject *on)
{
	kvdpy_scheduler_t *self = SELF(object);

	self->off = PyObject_IsTrue(on) != 1;
	if (self->off && self->scheduler) {
		kvx_scheduler_revoke_saves(
			self->scheduler); /* blocks may change hands from now on that nobody tells us about */
	}

	return Py_NewRef(Py_None);
}

static PyObject *scheduler_reset(PyObject *object, PyObject *unused)
{
	kvdpy_scheduler_t *self = SELF(object);
	kvc_status_t status = KVC_ERR_CLOSED;

	(void)unused;
	self->own = 1;
	if (self->scheduler) {
		status = kvx_scheduler_reset(self->scheduler);
	}

	return PyLong_FromLong(status);
}

static PyObject *scheduler_close(PyObject *object, PyObject *unused)
{
	kvdpy_scheduler_t *self = SELF(object);
	kvx_scheduler_t *scheduler = self->scheduler;

	(void)unused;
	self->scheduler = NULL;
	kvx_scheduler_close(scheduler);
	PyDict_Clear(self->requests);

	return Py_NewRef(Py_None);
}

/* ---- life ------------------------------------------------------------------------------------ */

static void scheduler_dealloc(PyObject *object)
{
	kvdpy_scheduler_t *self = SELF(object);
	PyTypeObject *type = Py_TYPE(object);

	kvx_scheduler_close(self->scheduler);
	Py_XDECREF(self->breaker.object);
	Py_XDECREF(self->config);
	Py_XDECREF(self->requests);
	Py_XDECREF(self->meta_class);
	Py_XDECREF(self->meta_empty);
	Py_XDECREF(self->stats_class);
	Py_XDECREF(self->lora_text);
	Py_XDECREF(self->unit_extras);
	Py_XDECREF(self->forget);
	Py_XDECREF(self->nothing);
	Py_XDECREF(self->released);
	PyObject_Free(object);
	Py_DECREF(type);
}

static int take_callables(kvdpy_scheduler_t *self, PyObject *dict)
{
	PyObject *empty = PyBytes_FromStringAndSize("", 0);
	PyObject **const field[] = {&self->breaker.object, &self->meta_class,  &self->stats_class,
				    &self->lora_text,      &self->unit_extras, &self->forget};
	static const char *const key[] = {"circuit_breaker", "meta_class",  "stats_class",
					  "lora_text",       "unit_extras", "forget"};

	for (size_t i = 0; i < sizeof key / sizeof key[0]; i++) {
		PyObject *value;

		if (kvdpy_get_object(dict, key[i], &value)) {
			Py_XDECREF(empty);
			return -1;
		}
		*field[i] = Py_NewRef(value);
	}

	self->config = Py_NewRef(dict);
	self->requests = PyDict_New();
	self->nothing = Py_BuildValue("(iO)", 0, Py_False);
	self->released = Py_BuildValue("(OO)", Py_False, Py_None);
	self->meta_empty = empty ? PyObject_CallFunctionObjArgs(self->meta_class, empty, NULL) : NULL;
	Py_XDECREF(empty);

	return self->requests && self->nothing && self->released && self->meta_empty ? 0 : -1;
}

static int take_groups(kvdpy_scheduler_t *self, PyObject *dict)
{
	PyObject *list;
	Py_ssize_t n;

	if (kvdpy_get_object(dict, "group_tokens", &list) || kvdpy_get_u32(dict, "hash_tokens", &self->hash_tokens)) {
		return -1;
	}
	n = PyList_Size(list);
	if (n < 1 || n > (Py_ssize_t)KVDPY_MAX_GROUPS) {
		PyErr_SetString(PyExc_ValueError, "group_tokens must be a list of 1 to 16 numbers");
		return -1;
	}
	for (Py_ssize_t i = 0; i < n; i++) {
		self->block_tokens[i] = (uint32_t)PyLong_AsUnsignedLong(PyList_GetItem(list, i));
		if (PyErr_Occurred() || self->block_tokens[i] == 0 || self->hash_tokens == 0 ||
		    self->block_tokens[i] % self->hash_tokens != 0) {
			PyErr_SetString(PyExc_ValueError, "a group's block must be whole units");
			return -1;
		}
	}
	self->groups = (uint32_t)n;

	return 0;
}

static kvc_writer_t *read_writers(PyObject *dict, uint32_t *p_count)
{
	PyObject *list;
	Py_ssize_t n;
	kvc_writer_t *writers;

	if (kvdpy_get_object(dict, "writers", &list)) {
		return NULL;
	}
	n = PyList_Size(list);
	if (n < 1 || n > (Py_ssize_t)KVDPY_MAX_RANKS) {
		PyErr_SetString(PyExc_ValueError, "writers must be a list of 1 to 1024 ranges");
		return NULL;
	}
	writers = PyMem_Malloc((size_t)n * sizeof *writers);
	for (Py_ssize_t i = 0; writers && i < n; i++) {
		if (kvdpy_get_writer(PyList_GetItem(list, i), &writers[i])) {
			PyMem_Free(writers);
			return NULL;
		}
	}
	*p_count = (uint32_t)n;

	return writers ? writers : (kvc_writer_t *)PyErr_NoMemory();
}

static int open_scheduler(kvdpy_scheduler_t *self, PyObject *dict)
{
	kvx_scheduler_config_t c = {.struct_size = sizeof c};
	kvdpy_common_t common;
	kvc_writer_t *writers;
	kvc_status_t status;

	if (kvdpy_get_common(dict, &common) || kvdpy_get_u32(dict, "max_blocks", &c.max_blocks) ||
	    kvdpy_get_int(dict, "foreign", &c.foreign) || kvdpy_get_int(dict, "cost_model", &c.cost_model) ||
	    kvdpy_get_int(dict, "mode", &c.mode) || kvdpy_get_u32(dict, "wait_us", &c.wait_us) ||
	    kvdpy_get_u32(dict, "load_ms", &c.load_ms) || kvdpy_get_u32(dict, "min_tokens", &c.min_tokens) ||
	    kvdpy_get_int(dict, "loads", &self->loads) || kvdpy_get_int(dict, "saves", &self->saves) ||
	    kvdpy_get_int(dict, "publishable", &self->publishable) ||
	    kvdpy_get_int(dict, "prefetch", &self->prefetch)) {
		return -1;
	}
	writers = read_writers(dict, &c.writer_count);
	if (!writers) {
		return -1;
	}

	c.socket = common.socket;
	c.instance = common.instance;
	c.secret = common.secret;
	c.secret_len = common.secret_len;
	c.program = common.program;
	c.identity = &common.identity;
	c.layout = &common.layout;
	c.writers = writers;
	self->foreign = c.foreign;
	self->instance = common.instance;
	status = kvx_scheduler_open(&c, &self->scheduler);
	PyMem_Free(writers);
	if (status != KVC_OK) {
		PyErr_Format(PyExc_ValueError, "%s: %s", kvc_status_name(status), kvx_scheduler_last_error());
		return -1;
	}

	return 0;
}

static PyObject *scheduler_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	kvdpy_scheduler_t *self;
	PyObject *dict;

	(void)kwargs;
	if (!PyArg_ParseTuple(args, "O!", &PyDict_Type, &dict)) {
		return NULL;
	}
	self = PyObject_New(kvdpy_scheduler_t, type);
	if (!self) {
		return NULL;
	}

	memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
	self->step = 1;
	self->last.struct_size = sizeof self->last;
	self->off = 1;
	if (take_callables(self, dict) || take_groups(self, dict) || open_scheduler(self, dict)) {
		Py_DECREF((PyObject *)self);
		return NULL;
	}

	return (PyObject *)self;
}

#define FAST(function) ((PyCFunction)(void (*)(void))(function))
static PyMethodDef scheduler_methods[] = {
	{"match", FAST(scheduler_match), METH_FASTCALL, "get_num_new_matched_tokens"},
	{"add_blocks", FAST(scheduler_add_blocks), METH_FASTCALL, "update_state_after_alloc"},
	{"add_request", scheduler_add_request, METH_O, "on_new_request"},
	{"build_meta", scheduler_build_meta, METH_O, "build_connector_meta"},
	{"finish_request", FAST(scheduler_finish_request), METH_FASTCALL, "request_finished"},
	{"take_output", scheduler_take_output, METH_O, "update_connector_output"},
	{"has_pending", scheduler_has_pending, METH_NOARGS, "has_pending_push_work"},
	{"take_stats", scheduler_take_stats, METH_NOARGS, "get_kv_connector_stats"},
	{"stats", scheduler_stats, METH_NOARGS, "counters since the start"},
	{"disk_tokens", scheduler_disk_tokens, METH_O, "tokens of a request's hit that come from disk"},
	{"is_ready", scheduler_is_ready, METH_NOARGS, "attached and the space is open"},
	{"set_weights", scheduler_set_weights, METH_O, "what names the weights is known; a status"},
	{"set_enabled", scheduler_set_enabled, METH_O, "on or off"},
	{"reset", scheduler_reset, METH_NOARGS, "drop all blocks of the space; a status"},
	{"close", scheduler_close, METH_NOARGS, "detach"},
	{NULL, NULL, 0, NULL},
};

int kvdpy_scheduler_init(PyObject *module)
{
	static PyType_Slot slots[] = {
		{Py_tp_new, KVDPY_SLOT(scheduler_new)},
		{Py_tp_dealloc, KVDPY_SLOT(scheduler_dealloc)},
		{Py_tp_methods, scheduler_methods},
		{0, NULL},
	};
	static PyType_Spec spec = {
		.name = "kvd_vllm._kvd.Scheduler",
		.basicsize = (int)sizeof(kvdpy_scheduler_t),
		.flags = Py_TPFLAGS_DEFAULT,
		.slots = slots,
	};

	scheduler_type = (PyTypeObject *)PyType_FromSpec(&spec);

	return scheduler_type ? PyModule_AddObjectRef(module, "Scheduler", (PyObject *)scheduler_type) : -1;
}
