/* The scheduler half: the hooks that vLLM's scheduler calls. The walk over a step is in step.c. */
#include "kvdpy.h"

#include <string.h>

#define SELF(object) ((kvdpy_scheduler_t *)(object))

/* ---- hooks ----------------------------------------------------------------------------------- */

/* -1 with an exception: the engine has called with another number of arguments. */
static int check_count(Py_ssize_t n, Py_ssize_t wanted)
{
	if (n != wanted) {
		PyErr_Format(PyExc_TypeError, "%zd arguments instead of %zd", n, wanted);
		return -1;
	}

	return 0;
}

/* kvd's own keys contain the space. The first match of an adapter opens its space; tokens and a second match follow. */
static int match_request(kvdpy_scheduler_t *self, kvdpy_ask_t *ask)
{
	kvdpy_request_t *r = ask->request;

	for (int attempt = 0; attempt < 2; attempt++) {
		if (kvdpy_feed_tokens(self, ask, ask->ask.tokens)) {
			return -1;
		}
		if (attempt == 0 || r->fed_tokens > 0) {
			kvx_scheduler_match(self->scheduler, &ask->ask, &r->hit);
		}
		if (self->foreign || r->fed_tokens > 0) {
			break;
		}
	}

	return 0;
}

static PyObject *run_match(kvdpy_scheduler_t *self, PyObject *const *args)
{
	kvdpy_request_t *r;
	PyObject *found = NULL;
	uint32_t local;
	kvdpy_ask_t ask;

	if (kvdpy_read_u32(args[1], &local) || kvdpy_ask_begin(self, args[0], &ask)) {
		return NULL;
	}
	r = ask.request;
	r->local = ask.ask.local = local;
	memset(&r->hit, 0, sizeof r->hit);
	if (r->step != 0) {
		kvdpy_drop_blocks(self, &ask); /* the engine matches it again, so it has lost its blocks */
	}

	if (self->off || r->no_read || r->no_keys || !self->loads) {
		found = Py_NewRef(self->nothing);
	} else if (match_request(self, &ask) == 0) {
		found = r->hit.tokens ? Py_BuildValue("(IO)", r->hit.tokens, r->hit.async ? Py_True : Py_False)
				      : Py_NewRef(self->nothing);
	}
	kvdpy_ask_end(&ask);

	return found;
}

/* get_num_new_matched_tokens(request, num_computed_tokens) */
static PyObject *scheduler_match(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
	kvdpy_scheduler_t *self = SELF(object);
	PyObject *found;

	if (!self->scheduler) {
		return Py_NewRef(self->nothing);
	}
	found = check_count(n, 2) ? NULL : run_match(self, args);

	return kvdpy_answer(&self->breaker, found, "get_num_new_matched_tokens", self->nothing);
}

/* The engine relies on the load, so after any failure here it still goes into the message. The ranks report a load that
 * they cannot do as failed. */
static PyObject *run_add_blocks(kvdpy_scheduler_t *self, PyObject *const *args)
{
	kvdpy_request_t *r;
	PyObject *tables;
	uint32_t external;
	kvdpy_ask_t ask;
	int failed;

	if (kvdpy_read_u32(args[2], &external) || kvdpy_ask_begin(self, args[0], &ask)) {
		return NULL;
	}

	r = ask.request;
	tables = PyObject_CallMethodObjArgs(args[1], kvdpy_names.get_block_ids, NULL);
	failed = !tables || kvdpy_append_blocks(self, &ask, tables, 0);
	r->step = self->step;
	if (!r->admitted) {
		r->admitted = 1;
		r->engine = r->local;
	}
	if (external > 0) {
		r->hit.tokens = external;
		kvx_scheduler_start_load(self->scheduler, &ask.ask, &r->hit);
	}
	Py_XDECREF(tables);
	kvdpy_ask_end(&ask);

	return failed ? NULL : Py_NewRef(Py_None);
}

/* update_state_after_alloc(request, blocks, num_external_tokens) */
static PyObject *scheduler_add_blocks(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
	kvdpy_scheduler_t *self = SELF(object);
	PyObject *done;

	if (!self->scheduler) {
		return Py_NewRef(Py_None);
	}
	done = check_count(n, 3) ? NULL : run_add_blocks(self, args);

	return kvdpy_answer(&self->breaker, done, "update_state_after_alloc", Py_None);
}

/* on_new_request(request) */
static PyObject *scheduler_add_request(PyObject *object, PyObject *request)
{
	kvdpy_scheduler_t *self = SELF(object);
	kvdpy_request_t *r;

	if (self->off || !self->scheduler) {
		return Py_NewRef(Py_None);
	}
	r = kvdpy_find_request(self, request);
	Py_XDECREF((PyObject *)r);

	return kvdpy_answer(&self->breaker, r ? Py_NewRef(Py_None) : NULL, "on_new_request", Py_None);
}

/* build_connector_meta(scheduler_output) */
static PyObject *scheduler_build_meta(PyObject *object, PyObject *output)
{
	kvdpy_scheduler_t *self = SELF(object);
	PyObject *meta = self->scheduler ? kvdpy_build_meta(self, output) : Py_NewRef(self->meta_empty);

	return kvdpy_answer(&self->breaker, meta, "build_connector_meta", self->meta_empty);
}

/* request_finished(request, block_ids), request_finished_all_groups(request, block_ids) */
static PyObject *scheduler_finish_request(PyObject *object, PyObject *const *args, Py_ssize_t n)
{
	kvdpy_scheduler_t *self = SELF(object);
	int failed;

	if (!self->scheduler) {
		return Py_NewRef(self->released);
	}
	failed = check_count(n, 2) || kvdpy_request_finish(self, args[0]);

	return kvdpy_answer(&self->breaker, failed ? NULL : Py_NewRef(self->released), "request_finished",
			    self->released);
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

/* The engine's set, and blocks that requests had lost before their load failed. There rarely are any: then the engine's
 * own set is returned. */
static PyObject *with_invalidated(kvdpy_scheduler_t *self, PyObject *ids)
{
	uint32_t invalidated[256];
	uint32_t n = kvx_scheduler_take_invalidated(self->scheduler, invalidated, 256);
	PyObject *all = n > 0 ? PySet_New(ids == Py_None ? NULL : ids) : ids;

	if (n == 0) {
		Py_INCREF(all);
	}
	for (; all && n > 0; n = kvx_scheduler_take_invalidated(self->scheduler, invalidated, 256)) {
		if (kvdpy_add_numbers(all, invalidated, n)) {
			Py_CLEAR(all);
		}
	}

	return all;
}

/* After a failed synchronous load: the engine removes these blocks from its prefix cache. */
static int forget_invalid(kvdpy_scheduler_t *self, PyObject *output)
{
	PyObject *invalid = PyObject_GetAttr(output, kvdpy_names.invalid_block_ids);
	PyObject *ids = invalid ? with_invalidated(self, invalid) : NULL;
	const int some = ids ? PyObject_IsTrue(ids) : -1;
	PyObject *reply = NULL;

	Py_XDECREF(invalid);
	if (some > 0) {
		reply = PyObject_CallFunctionObjArgs(self->forget, ids, self->requests, NULL);
	}
	Py_XDECREF(reply);
	Py_XDECREF(ids);

	return some == 0 || reply ? 0 : -1;
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

	return kvdpy_answer(&self->breaker, failed ? NULL : Py_NewRef(Py_None), "update_connector_output", Py_None);
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

	return kvdpy_stats_delta(&kvdpy_scheduler_half, &now, &self->last, self->stats_class, &self->breaker);
}

/* ---- called by kvd_vllm ---------------------------------------------------------------------- */

static PyObject *scheduler_stats(PyObject *object, PyObject *unused)
{
	kvx_scheduler_stats_t now = {.struct_size = sizeof now};

	(void)unused;
	if (SELF(object)->scheduler) {
		kvx_scheduler_get_stats(SELF(object)->scheduler, &now);
	}

	return kvdpy_stats_totals(&kvdpy_scheduler_half, &now);
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

/* set_weights(text): their name is known. Any thread may call it. */
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
		kvx_scheduler_revoke_saves(self->scheduler); /* block owners are no longer known */
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

/* ---- create and destroy ---------------------------------------------------------------------- */

#define OWN(kind, field)    KVDPY_KEY(kvdpy_scheduler_t, kind, field)
#define CONFIG(kind, field) KVDPY_KEY(kvx_scheduler_config_t, kind, field)

static const kvdpy_key_t own_keys[] = {
	{"circuit_breaker", KVDPY_REF, offsetof(kvdpy_scheduler_t, breaker.object)},
	OWN(KVDPY_REF, meta_class),
	OWN(KVDPY_REF, stats_class),
	OWN(KVDPY_REF, lora_text),
	OWN(KVDPY_REF, unit_extras),
	OWN(KVDPY_REF, forget),
	OWN(KVDPY_U32, hash_tokens),
	OWN(KVDPY_INT, foreign),
	OWN(KVDPY_INT, loads),
	OWN(KVDPY_INT, saves),
	OWN(KVDPY_INT, publishable),
	OWN(KVDPY_INT, prefetch),
};
static const kvdpy_key_t config_keys[] = {
	CONFIG(KVDPY_U32, max_blocks), CONFIG(KVDPY_INT, foreign), CONFIG(KVDPY_INT, cost_model),
	CONFIG(KVDPY_INT, mode),       CONFIG(KVDPY_U32, wait_us), CONFIG(KVDPY_U32, load_ms),
	CONFIG(KVDPY_U32, min_tokens),
};

static void scheduler_destroy(PyObject *object)
{
	kvdpy_scheduler_t *self = SELF(object);

	kvx_scheduler_close(self->scheduler);
	kvdpy_drop_keys(own_keys, KVDPY_COUNT(own_keys), self);
	Py_XDECREF(self->config);
	Py_XDECREF(self->requests);
	Py_XDECREF(self->meta_empty);
	Py_XDECREF(self->nothing);
	Py_XDECREF(self->released);
	kvdpy_free_object(object);
}

static int make_answers(kvdpy_scheduler_t *self)
{
	self->requests = PyDict_New();
	self->nothing = Py_BuildValue("(iO)", 0, Py_False);
	self->released = Py_BuildValue("(OO)", Py_False, Py_None);
	self->meta_empty = PyObject_CallFunction(self->meta_class, "y", "");

	return self->requests && self->nothing && self->released && self->meta_empty ? 0 : -1;
}

static int read_groups(kvdpy_scheduler_t *self, PyObject *dict)
{
	PyObject *list = kvdpy_find_key(dict, "group_tokens");
	const Py_ssize_t n = list ? PyList_Size(list) : -1;

	if (n < 1 || n > (Py_ssize_t)KVDPY_MAX_GROUPS || self->hash_tokens == 0) {
		PyErr_SetString(PyExc_ValueError, "group_tokens must be a list of 1 to 16 numbers of whole units");
		return -1;
	}
	for (Py_ssize_t i = 0; i < n; i++) {
		uint32_t *tokens = &self->block_tokens[i];

		if (kvdpy_read_u32(PyList_GetItem(list, i), tokens) || *tokens == 0 ||
		    *tokens % self->hash_tokens != 0) {
			PyErr_SetString(PyExc_ValueError, "a group's block must be whole units");
			return -1;
		}
	}
	self->groups = (uint32_t)n;

	return 0;
}

static kvc_writer_t *read_writers(PyObject *dict, uint32_t *p_count)
{
	PyObject *list = kvdpy_find_key(dict, "writers");
	const Py_ssize_t n = list ? PyList_Size(list) : -1;
	kvc_writer_t *writers;

	if (n < 1 || n > (Py_ssize_t)KVDPY_MAX_RANKS) {
		PyErr_SetString(PyExc_ValueError, "writers must be a list of 1 to 1024 ranges");
		return NULL;
	}
	writers = PyMem_Malloc((size_t)n * sizeof *writers);
	for (Py_ssize_t i = 0; writers && i < n; i++) {
		if (kvdpy_read_writer(PyList_GetItem(list, i), &writers[i])) {
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

	if (kvdpy_read_common(dict, &common) || kvdpy_read_keys(dict, config_keys, KVDPY_COUNT(config_keys), &c)) {
		return -1;
	}
	writers = read_writers(dict, &c.writer_count);
	if (!writers) {
		return -1;
	}

	c.socket = common.socket;
	c.instance = self->instance = common.instance;
	c.secret = common.secret;
	c.secret_len = common.secret_len;
	c.program = common.program;
	c.identity = &common.identity;
	c.layout = &common.layout;
	c.writers = writers;
	status = kvx_scheduler_open(&c, &self->scheduler);
	PyMem_Free(writers);
	if (status != KVC_OK) {
		PyErr_Format(PyExc_ValueError, "%s: %s", kvc_status_name(status), kvx_scheduler_last_error());
		return -1;
	}

	return 0;
}

static int scheduler_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
	kvdpy_scheduler_t *self = SELF(object);
	PyObject *dict;

	(void)kwargs;
	if (!PyArg_ParseTuple(args, "O!", &PyDict_Type, &dict)) {
		return -1;
	}
	self->config = Py_NewRef(dict);
	self->step = 1;
	self->last.struct_size = sizeof self->last;
	self->off = 1;

	return kvdpy_read_keys(dict, own_keys, KVDPY_COUNT(own_keys), self) || make_answers(self) ||
			       read_groups(self, dict) || open_scheduler(self, dict)
		       ? -1
		       : 0;
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
	static const kvdpy_type_t type = {"kvd_vllm._kvd.Scheduler", sizeof(kvdpy_scheduler_t), scheduler_init,
					  scheduler_destroy, scheduler_methods};

	return kvdpy_add_type(module, &type) ? 0 : -1;
}
