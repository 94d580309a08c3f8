/* The scheduler half: the hooks that vLLM's scheduler calls. The walk over a step is in step.c. */
#include "kvdpy.h"

/* ---- hooks ----------------------------------------------------------------------------------- */

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

/* Whole units of `most` tokens are looked up, and one more token, which is left to compute. */
static void limit_load(const kvdpy_scheduler_t *self, kvx_ask_t *ask, uint32_t most)
{
	const uint64_t end = ask->local + (uint64_t)(most - most % self->hash_tokens) + 1u;

	ask->tokens = end < ask->tokens ? (uint32_t)end : ask->tokens;
}

/* get_num_new_matched_tokens(request, num_computed_tokens) */
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
	limit_load(self, &ask.ask, r->most_load);
	r->hit = (kvx_hit_t){.struct_size = sizeof r->hit};
	if (r->step != 0) {
		kvdpy_drop_blocks(self, &ask); /* the engine matches it again, so it has lost its blocks */
	}

	if (self->off || r->no_read || r->no_keys || r->most_load == 0 || !self->loads) {
		found = Py_NewRef(self->nothing);
	} else if (match_request(self, &ask) == 0) {
		found = r->hit.tokens ? Py_BuildValue("(IO)", r->hit.tokens, r->hit.async ? Py_True : Py_False)
				      : Py_NewRef(r->hit.deferred ? self->later : self->nothing);
	}
	kvdpy_ask_end(&ask);

	return found;
}

/* update_state_after_alloc(request, blocks, num_external_tokens)
 *
 * The engine relies on the load, so after any failure here it still goes into the message. The ranks report a load that
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

	return failed ? NULL : KVDPY_NONE;
}

static PyObject *add_request(kvdpy_scheduler_t *self, PyObject *request)
{
	kvdpy_request_t *r = self->off ? NULL : kvdpy_find_request(self, request);

	Py_XDECREF((PyObject *)r);

	return PyErr_Occurred() ? NULL : KVDPY_NONE;
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

/* The engine removes from its prefix cache the blocks of a failed synchronous load, and those that requests had lost
 * before their load failed. There rarely are any. */
static int forget_invalid(kvdpy_scheduler_t *self, PyObject *output)
{
	uint32_t lost[256], n = kvx_scheduler_take_invalidated(self->scheduler, lost, 256);
	PyObject *invalid = PyObject_GetAttr(output, kvdpy_names.invalid_block_ids);
	const int some = invalid ? PyObject_IsTrue(invalid) : -1;
	PyObject *ids = some > 0 || (some == 0 && n > 0) ? PySet_New(some ? invalid : NULL) : NULL;
	PyObject *reply = NULL;

	while (ids && n > 0 && kvdpy_add_numbers(ids, lost, n) == 0) {
		n = kvx_scheduler_take_invalidated(self->scheduler, lost, 256);
	}
	if (ids && n == 0) {
		reply = PyObject_CallFunctionObjArgs(self->forget, ids, self->requests, NULL);
	}
	Py_XDECREF(reply);
	Py_XDECREF(ids);
	Py_XDECREF(invalid);

	return PyErr_Occurred() ? -1 : 0;
}

/* update_connector_output(output) */
static PyObject *take_output(kvdpy_scheduler_t *self, PyObject *output)
{
	PyObject *meta = PyObject_GetAttr(output, kvdpy_names.kv_connector_worker_meta);
	const int failed = !meta || (meta != Py_None && read_reports(self, meta)) || forget_invalid(self, output);

	Py_XDECREF(meta);

	return failed ? NULL : KVDPY_NONE;
}

/* ---- called by kvd_vllm ---------------------------------------------------------------------- */

static PyObject *find_disk_tokens(kvdpy_scheduler_t *self, PyObject *id)
{
	const kvdpy_request_t *r = (kvdpy_request_t *)PyDict_GetItemWithError(self->requests, id);

	return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(r ? r->hit.disk_tokens : 0);
}

/* Any thread may call it. */
static PyObject *set_weights(kvdpy_scheduler_t *self, PyObject *value)
{
	const char *text = PyUnicode_AsUTF8AndSize(value, NULL);

	return text ? PyLong_FromLong(kvx_scheduler_set_weights(self->scheduler, text)) : NULL;
}

static PyObject *set_device(kvdpy_scheduler_t *self, PyObject *value)
{
	const char *uuid = PyUnicode_AsUTF8AndSize(value, NULL);

	return uuid ? PyLong_FromLong(kvx_scheduler_set_device(self->scheduler, uuid)) : NULL;
}

static PyObject *set_enabled(kvdpy_scheduler_t *self, PyObject *on)
{
	self->off = PyObject_IsTrue(on) != 1;
	if (self->off) {
		kvx_scheduler_revoke_saves(self->scheduler); /* block owners are no longer known */
	}

	return KVDPY_NONE;
}

/* Keys of our own begin anew, with the space of the next name. */
static PyObject *suspend(kvdpy_scheduler_t *self)
{
	PyObject *id, *request;
	Py_ssize_t at = 0;

	while (PyDict_Next(self->requests, &at, &id, &request)) {
		((kvdpy_request_t *)request)->fed_tokens = 0;
	}
	kvx_scheduler_suspend(self->scheduler);

	return KVDPY_NONE;
}

static PyObject *close_scheduler(kvdpy_scheduler_t *self)
{
	kvx_scheduler_t *scheduler = self->scheduler;

	self->scheduler = NULL;
	kvx_scheduler_close(scheduler);
	PyDict_Clear(self->requests);

	return KVDPY_NONE;
}

/* The engine's thread and that of kvd_vllm/attendant.py call it. 1 beside another method: its caller asks again. */
static PyObject *has_pending(const kvdpy_scheduler_t *self)
{
	return PyBool_FromLong(self->running > 1u || kvx_scheduler_has_pending(self->scheduler));
}

/* ---- the methods ----------------------------------------------------------------------------- */

#define NOTHING  Py_NewRef(self->nothing)
#define RELEASED Py_NewRef(self->released)
#define EMPTY    Py_NewRef(self->meta_empty)
#define NO       Py_NewRef(Py_False)
#define DELTA    kvdpy_stats_delta(&kvdpy_scheduler_half, self->scheduler, &self->breaker, &self->counters)
#define TOTALS   kvdpy_stats_totals(&kvdpy_scheduler_half, self->scheduler, &self->breaker, &self->counters)
/* X(method, number of arguments, what is called, harmless answer, vLLM's hook or what it does) */
#define METHODS(X)                                                                                                     \
	X(match, 2, run_match(self, args), NOTHING, "get_num_new_matched_tokens")                                      \
	X(add_blocks, 3, run_add_blocks(self, args), KVDPY_NONE, "update_state_after_alloc")                           \
	X(add_request, 1, add_request(self, args[0]), KVDPY_NONE, "on_new_request")                                    \
	X(build_meta, 1, kvdpy_build_meta(self, args[0]), EMPTY, "build_connector_meta")                               \
	X(finish_request, 2, kvdpy_request_finish(self, args[0]), RELEASED, "request_finished")                        \
	X(take_output, 1, take_output(self, args[0]), KVDPY_NONE, "update_connector_output")                           \
	X(has_pending, 0, has_pending(self), NO, "has_pending_push_work")                                              \
	X(take_stats, 0, DELTA, KVDPY_NONE, "get_kv_connector_stats")                                                  \
	X(stats, 0, TOTALS, TOTALS, "counters since the start")                                                        \
	X(disk_tokens, 1, find_disk_tokens(self, args[0]), PyLong_FromLong(0), "get_external_cache_hit_sources")       \
	X(is_ready, 0, PyBool_FromLong(kvx_scheduler_is_ready(self->scheduler)), NO, "attached and the space is open") \
	X(set_weights, 1, set_weights(self, args[0]), KVDPY_CLOSED,                                                    \
	  "name the weights, at first or after suspend(); a status")                                                   \
	X(set_device, 1, set_device(self, args[0]), KVDPY_CLOSED, "the GPU whose memory may be used; a status")        \
	X(set_enabled, 1, set_enabled(self, args[0]), KVDPY_NONE, "on or off")                                         \
	X(suspend, 0, suspend(self), KVDPY_NONE, "the weights may have been changed: set_weights() follows")           \
	X(close, 0, close_scheduler(self), KVDPY_NONE, "detach")

#define DEFINE(method, count, call, harmless, text) KVDPY_METHOD(scheduler, method, count, call, harmless, text)
#define ROW(method, count, call, harmless, text)    KVDPY_METHOD_ROW(scheduler, method, text)
METHODS(DEFINE)
static PyMethodDef methods[] = {METHODS(ROW){NULL, NULL, 0, NULL}};

/* ---- create and destroy ---------------------------------------------------------------------- */

#define OWN(format, field)    KVDPY_KEY(kvdpy_scheduler_t, format, field)
#define CONFIG(format, field) KVDPY_KEY(kvx_scheduler_config_t, format, field)

static const kvdpy_key_t own_keys[] = {
	{"circuit_breaker", "O", offsetof(kvdpy_scheduler_t, breaker.object)},
	OWN("O", meta_class),
	{"stats_class", "O", offsetof(kvdpy_scheduler_t, counters.stats_class)},
	OWN("O", lora_text),
	OWN("O", unit_extras),
	OWN("O", forget),
	OWN("O", reprove),
	OWN("O", find_transfer),
	OWN("O", find_limits),
	OWN("O", transfer_params),
	OWN("i", handover_ms),
	OWN("i", hash_tokens),
	OWN("i", foreign),
	OWN("i", loads),
	OWN("i", saves),
	OWN("i", publishable),
	OWN("i", prefetch),
	OWN("z", instance),
};
static const kvdpy_key_t config_keys[] = {
	CONFIG("z", socket),  CONFIG("z", instance),   CONFIG("z", program),      CONFIG("i", max_blocks),
	CONFIG("i", foreign), CONFIG("i", cost_model), CONFIG("i", mode),         CONFIG("i", wait_us),
	CONFIG("i", load_ms), CONFIG("i", min_tokens), CONFIG("i", defer_shared),
};

static void scheduler_destroy(PyObject *object)
{
	kvdpy_scheduler_t *self = (kvdpy_scheduler_t *)object;

	kvx_scheduler_close(self->scheduler);
	Py_XDECREF(self->config);
	Py_XDECREF(self->requests);
	Py_XDECREF(self->meta_empty);
	Py_XDECREF(self->nothing);
	Py_XDECREF(self->later);
	Py_XDECREF(self->released);
	kvdpy_free_object(object);
}

static int make_answers(kvdpy_scheduler_t *self)
{
	self->requests = PyDict_New();
	self->nothing = Py_BuildValue("(iO)", 0, Py_False);
	self->later = Py_BuildValue("(OO)", Py_None, Py_False);
	self->released = Py_BuildValue("(OO)", Py_False, Py_None);
	self->meta_empty = PyObject_CallFunction(self->meta_class, "y", "");

	return self->requests && self->nothing && self->later && self->released && self->meta_empty ? 0 : -1;
}

static int read_groups(kvdpy_scheduler_t *self, PyObject *dict)
{
	PyObject *list = kvdpy_find_list(dict, "group_tokens", KVDPY_MAX_GROUPS, &self->groups);
	uint32_t count = 0;
	PyObject *tables = list ? kvdpy_find_list(dict, "group_tables", KVDPY_MAX_GROUPS, &count) : NULL;

	if (tables && count != self->groups) {
		PyErr_SetString(PyExc_ValueError, "not as many block tables as groups");
		return -1;
	}
	for (uint32_t i = 0; tables && i < self->groups; i++) {
		if (kvdpy_read_u32(PyList_GetItem(list, (Py_ssize_t)i), &self->block_tokens[i]) ||
		    kvdpy_read_u32(PyList_GetItem(tables, (Py_ssize_t)i), &self->tables[i])) {
			return -1;
		}
		if (self->hash_tokens == 0 || self->block_tokens[i] == 0 ||
		    self->block_tokens[i] % self->hash_tokens != 0) {
			PyErr_SetString(PyExc_ValueError, "a group's block must be whole units");
			return -1;
		}
	}

	return tables ? 0 : -1;
}

/* Those of all groups, one group after another; *p_count: of one group. */
static int read_writers(PyObject *dict, uint32_t groups, kvc_writer_t *writers, uint32_t *p_count)
{
	uint32_t total;
	PyObject *list = kvdpy_find_list(dict, "writers", (Py_ssize_t)KVDPY_MAX_RANKS * KVDPY_MAX_GROUPS, &total);

	if (list && (groups == 0 || total % groups != 0)) {
		PyErr_SetString(PyExc_ValueError, "writers are not as many for each group");
		return -1;
	}
	for (uint32_t i = 0; list && i < total; i++) {
		if (kvdpy_read_writer(PyList_GetItem(list, (Py_ssize_t)i), &writers[i])) {
			return -1;
		}
	}
	*p_count = list ? total / groups : 0;

	return list ? 0 : -1;
}

static int open_scheduler(kvdpy_scheduler_t *self, PyObject *dict)
{
	kvx_scheduler_config_t c = {.struct_size = sizeof c, .keeps_blocks = 1};
	kvc_writer_t *writers = PyMem_Calloc((size_t)KVDPY_MAX_RANKS * KVDPY_MAX_GROUPS, sizeof *writers);
	kvdpy_common_t common = {0};
	kvc_status_t status;

	if (!writers || kvdpy_read_common(dict, &common) ||
	    kvdpy_read_keys(dict, config_keys, KVDPY_COUNT(config_keys), &c) ||
	    read_writers(dict, common.layout_count, writers, &c.writer_count)) {
		PyMem_Free(writers);
		return -1;
	}

	c.secret = common.secret;
	c.secret_len = common.secret_len;
	c.identity = &common.identity;
	c.layouts = common.layouts;
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
	kvdpy_scheduler_t *self = (kvdpy_scheduler_t *)object;
	PyObject *dict;

	(void)kwargs;
	if (!PyArg_ParseTuple(args, "O!", &PyDict_Type, &dict)) {
		return -1;
	}
	self->config = Py_NewRef(dict);
	self->step = 1;
	self->off = 1;

	return kvdpy_read_keys(dict, own_keys, KVDPY_COUNT(own_keys), self) || make_answers(self) ||
			       read_groups(self, dict) || open_scheduler(self, dict)
		       ? -1
		       : 0;
}

static PyType_Slot slots[] = {
	{Py_tp_init, KVDPY_SLOT(scheduler_init)},
	{Py_tp_dealloc, KVDPY_SLOT(scheduler_destroy)},
	{Py_tp_methods, methods},
	{0, NULL},
};
PyType_Spec kvdpy_scheduler_spec = {"kvd_vllm._kvd.Scheduler", sizeof(kvdpy_scheduler_t), 0, Py_TPFLAGS_DEFAULT, slots};
