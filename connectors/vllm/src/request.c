/* A request of the engine: its id, keys, tokens and blocks as the C interface takes them. */
#include "kvdpy.h"

#include <string.h>

#define FEED_TOKENS 8192u /* handed in at once */
#define FEED_UNITS  512u

static void request_destroy(PyObject *object)
{
	kvdpy_request_t *r = (kvdpy_request_t *)object;

	Py_XDECREF(r->request);
	Py_XDECREF(r->id);
	Py_XDECREF(r->lora);
	Py_XDECREF(r->transfer);
	kvdpy_free_object(object);
}

static PyType_Slot slots[] = {{Py_tp_dealloc, KVDPY_SLOT(request_destroy)}, {0, NULL}};
PyType_Spec kvdpy_request_spec = {"kvd_vllm._kvd.Request", sizeof(kvdpy_request_t), 0, Py_TPFLAGS_DEFAULT, slots};
PyTypeObject *kvdpy_request_type;

/* 1: the attribute exists and is true. */
static int has_value(PyObject *object, PyObject *name)
{
	PyObject *value = PyObject_GetAttr(object, name);
	int truth;

	if (!value) {
		PyErr_Clear();
		return 0;
	}
	truth = value != Py_None && PyObject_IsTrue(value) != 0;
	PyErr_Clear(); /* the truth of a tensor may be ambiguous: it has a value */
	Py_DECREF(value);

	return truth;
}

/* The name of its adapter, which selects the space. */
static int read_lora(kvdpy_scheduler_t *self, kvdpy_request_t *r)
{
	PyObject *lora = PyObject_GetAttr(r->request, kvdpy_names.lora_request);
	PyObject *text;

	if (!lora) {
		return -1;
	}
	text = lora == Py_None ? Py_NewRef(lora) : PyObject_CallFunctionObjArgs(self->lora_text, lora, NULL);
	Py_DECREF(lora);
	if (!text) {
		return -1;
	}
	Py_XDECREF(r->lora);
	r->lora = text;

	return 0;
}

/* Tokens of a prompt that is followed by a single token: the engine computes it for another one. */
static uint32_t single_token_at(PyObject *request)
{
	uint32_t most = 0, prompt = 0;

	if (kvdpy_read_u32_attribute(request, kvdpy_names.max_tokens, &most) || most != 1 ||
	    kvdpy_read_u32_attribute(request, kvdpy_names.num_prompt_tokens, &prompt)) {
		PyErr_Clear(); /* unknown */
		return 0;
	}

	return prompt;
}

static int read_request(kvdpy_scheduler_t *self, kvdpy_request_t *r)
{
	Py_ssize_t len;

	if (read_lora(self, r)) {
		return -1;
	}
	r->id_text = PyUnicode_AsUTF8AndSize(r->id, &len);
	if (!r->id_text) {
		return -1;
	}

	r->id_len = (uint32_t)len;
	r->single = single_token_at(r->request);
	r->no_keys = !self->foreign && has_value(r->request, kvdpy_names.resumable);
	r->no_read = has_value(r->request, kvdpy_names.skip_reading_prefix_cache);
	r->extra = has_value(r->request, kvdpy_names.cache_salt) || has_value(r->request, kvdpy_names.mm_features) ||
		   has_value(r->request, kvdpy_names.prompt_embeds);

	return 0;
}

static int begin_transfer(kvdpy_scheduler_t *self, kvdpy_request_t *r);

/* A request that is handed over is loaded and saved whole. */
static int read_params(kvdpy_scheduler_t *self, kvdpy_request_t *r)
{
	PyObject *limits;
	int failed;

	if (begin_transfer(self, r)) {
		return -1;
	}
	if (r->transfer != Py_None) {
		return 0;
	}
	limits = PyObject_CallFunctionObjArgs(self->find_limits, r->request, NULL);
	failed = !limits || !PyArg_ParseTuple(limits, "IIp", &r->most_load, &r->most_save, &r->memory_only);
	Py_XDECREF(limits);

	return failed ? -1 : 0;
}

static kvdpy_request_t *new_request(kvdpy_scheduler_t *self, PyObject *request, PyObject *id)
{
	kvdpy_request_t *r = (kvdpy_request_t *)PyType_GenericAlloc(kvdpy_request_type, 0);

	if (!r) {
		return NULL;
	}
	r->request = Py_NewRef(request);
	r->id = Py_NewRef(id);
	r->hit.struct_size = sizeof r->hit;
	r->most_load = r->most_save = UINT32_MAX;
	if (read_request(self, r) || PyDict_SetItem(self->requests, id, (PyObject *)r)) {
		Py_DECREF((PyObject *)r);
		return NULL;
	}
	if (has_value(request, kvdpy_names.kv_transfer_params) && read_params(self, r)) {
		Py_DECREF((PyObject *)r);
		return NULL;
	}

	return r;
}

kvdpy_request_t *kvdpy_find_request(kvdpy_scheduler_t *self, PyObject *request)
{
	PyObject *id = PyObject_GetAttr(request, kvdpy_names.request_id);
	kvdpy_request_t *r;

	if (!id) {
		return NULL;
	}
	r = (kvdpy_request_t *)PyDict_GetItemWithError(self->requests, id);
	if (r && r->request == request) {
		Py_INCREF((PyObject *)r);
	} else {
		r = PyErr_Occurred() ? NULL : new_request(self, request, id);
	}
	Py_DECREF(id);

	return r;
}

/* ---- ask ------------------------------------------------------------------------------------- */

static const void *hash_at(void *ctx, uint32_t i, uint32_t *p_len)
{
	PyObject *hash = PyList_GetItem(ctx, (Py_ssize_t)i);
	char *bytes;
	Py_ssize_t len;

	if (!hash || PyBytes_AsStringAndSize(hash, &bytes, &len)) {
		PyErr_Clear();
		return NULL;
	}
	*p_len = (uint32_t)len;

	return bytes;
}

/* The hashes of confirmed tokens. */
static int read_hashes(kvdpy_scheduler_t *self, kvdpy_request_t *r, kvdpy_ask_t *ask)
{
	Py_ssize_t n;

	ask->list = PyObject_GetAttr(r->request, kvdpy_names.block_hashes);
	n = ask->list ? PyList_Size(ask->list) : -1;
	if (n < 0) {
		return -1;
	}
	if (self->publishable) {
		PyObject *number = PyObject_GetAttr(r->request, kvdpy_names.num_publishable_block_hashes);
		const long most = number ? PyLong_AsLong(number) : -1;

		Py_XDECREF(number);
		PyErr_Clear();
		n = most >= 0 && most < n ? most : n;
	}

	ask->hashes = (kvx_hashes_t){.at = hash_at, .ctx = ask->list, .n = (uint32_t)n};
	ask->ask.hashes = &ask->hashes;

	return 0;
}

/* The request's list of tokens. New reference. */
static PyObject *token_list(PyObject *request)
{
	PyObject *list = PyObject_GetAttr(request, kvdpy_names._all_token_ids);

	if (!list) {
		PyErr_Clear();
		list = PyObject_GetAttr(request, kvdpy_names.all_token_ids);
	}

	return list;
}

static int fill_ask(kvdpy_scheduler_t *self, kvdpy_request_t *r, kvdpy_ask_t *ask)
{
	PyObject *tokens = token_list(r->request);
	const Py_ssize_t n = tokens ? PyObject_Size(tokens) : -1;

	Py_XDECREF(tokens);
	if (n < 0) {
		return -1;
	}

	ask->ask = (kvx_ask_t){.struct_size = sizeof ask->ask,
			       .id = r->id_text,
			       .id_len = r->id_len,
			       .tokens = (uint32_t)n,
			       .local = r->local,
			       .busy = self->continuing,
			       .save_tokens = r->most_save,
			       .memory_only = r->memory_only,
			       .whole = 1};
	if (r->lora != Py_None) {
		ask->ask.lora = PyUnicode_AsUTF8AndSize(r->lora, NULL);
		if (!ask->ask.lora) {
			return -1;
		}
	}

	return self->foreign ? read_hashes(self, r, ask) : 0;
}

int kvdpy_ask_known(kvdpy_scheduler_t *self, kvdpy_request_t *request, kvdpy_ask_t *ask)
{
	ask->list = NULL;
	ask->request = (kvdpy_request_t *)Py_NewRef((PyObject *)request);
	if (fill_ask(self, request, ask)) {
		kvdpy_ask_end(ask);
		return -1;
	}

	return 0;
}

int kvdpy_ask_begin(kvdpy_scheduler_t *self, PyObject *request, kvdpy_ask_t *ask)
{
	kvdpy_request_t *r = kvdpy_find_request(self, request);
	const int failed = !r || kvdpy_ask_known(self, r, ask);

	Py_XDECREF((PyObject *)r);

	return failed ? -1 : 0;
}

void kvdpy_ask_end(kvdpy_ask_t *ask)
{
	Py_CLEAR(ask->list);
	Py_DECREF((PyObject *)ask->request);
}

/* ---- own keys -------------------------------------------------------------------------------- */

static int read_tokens(PyObject *list, uint32_t at, uint32_t n, uint32_t *tokens)
{
	for (uint32_t i = 0; i < n; i++) {
		PyObject *item = PySequence_GetItem(list, (Py_ssize_t)at + (Py_ssize_t)i);
		const unsigned long token = item ? PyLong_AsUnsignedLong(item) : 0;

		Py_XDECREF(item);
		if (PyErr_Occurred()) {
			return -1;
		}
		tokens[i] = token > UINT32_MAX ? UINT32_MAX : (uint32_t)token;
	}

	return 0;
}

/* Extra keys of `units` units as pointers into the bytes of *p_list. */
static int read_extras(kvdpy_scheduler_t *self, PyObject *request, kvx_units_t *units, PyObject **p_list)
{
	static const void *extra[FEED_UNITS]; /* under the interpreter's lock, like everything here */
	static uint32_t len[FEED_UNITS];
	const uint32_t count = units->n / self->hash_tokens;

	*p_list = PyObject_CallFunction(self->unit_extras, "OII", request, units->at, count);
	for (uint32_t i = 0; *p_list && i < count; i++) {
		PyObject *bytes = PyList_GetItem(*p_list, (Py_ssize_t)i);
		char *data = NULL;
		Py_ssize_t size = 0;

		if (!bytes || (bytes != Py_None && PyBytes_AsStringAndSize(bytes, &data, &size))) {
			Py_CLEAR(*p_list);
			return -1;
		}
		extra[i] = data;
		len[i] = (uint32_t)size;
	}
	units->extra = extra;
	units->extra_len = len;
	units->extra_count = count;

	return *p_list ? 0 : -1;
}

static int feed_piece(kvdpy_scheduler_t *self, kvdpy_ask_t *ask, kvx_units_t *units)
{
	kvdpy_request_t *r = ask->request;
	PyObject *extras = NULL;
	kvc_status_t status;

	if (r->extra && read_extras(self, r->request, units, &extras)) {
		return -1;
	}
	/* A bad token: taken, but the request has no keys. */
	status = kvx_scheduler_add_tokens(self->scheduler, &ask->ask, units);
	r->fed_tokens = status == KVC_ERR_UNREACHABLE || status == KVC_ERR_STALE_EPOCH ? 0 : units->at + units->n;
	Py_XDECREF(extras);

	return 0;
}

/* Whether its space is open. This saves reading tokens in vain. */
static int may_begin(kvdpy_scheduler_t *self, kvdpy_ask_t *ask)
{
	const kvx_units_t none = {.struct_size = sizeof none};

	return kvx_scheduler_add_tokens(self->scheduler, &ask->ask, &none) != KVC_ERR_UNREACHABLE;
}

int kvdpy_feed_tokens(kvdpy_scheduler_t *self, kvdpy_ask_t *ask, uint32_t upto)
{
	static uint32_t tokens[FEED_TOKENS]; /* under the interpreter's lock */
	const uint32_t end = upto < ask->ask.tokens ? upto : ask->ask.tokens;
	kvdpy_request_t *r = ask->request;
	uint32_t most = FEED_TOKENS / self->hash_tokens, was;
	PyObject *list;
	int failed = 0;

	if (self->foreign || end < r->fed_tokens + self->hash_tokens || (r->fed_tokens == 0 && !may_begin(self, ask))) {
		return 0;
	}
	list = token_list(r->request);
	if (!list) {
		return -1;
	}

	most = most > FEED_UNITS ? FEED_UNITS : most;
	do {
		const uint32_t left = (end - r->fed_tokens) / self->hash_tokens;
		kvx_units_t units = {
			.struct_size = sizeof units,
			.at = r->fed_tokens,
			.n = (left < most ? left : most) * self->hash_tokens,
			.tokens = tokens,
		};

		was = r->fed_tokens;
		failed = read_tokens(list, units.at, units.n, tokens) || feed_piece(self, ask, &units);
	} while (!failed && r->fed_tokens > was && end >= r->fed_tokens + self->hash_tokens);
	Py_DECREF(list);

	return failed ? -1 : 0;
}

/* ---- hand-overs ------------------------------------------------------------------------------- */

/* The tokens after the last whole block; how many. None where the block may change after the prompt was computed, or
 * its content does not follow from the tokens alone. */
static uint32_t read_last_tokens(kvdpy_scheduler_t *self, const kvdpy_ask_t *ask, int sends, uint32_t *tokens)
{
	const kvdpy_request_t *r = ask->request;
	const uint32_t n = ask->ask.tokens % self->block_tokens[0];
	PyObject *list;
	int failed;

	if (self->groups > 1 || n == 0 || n > FEED_TOKENS || r->extra || (sends && r->single != ask->ask.tokens)) {
		return 0;
	}
	list = token_list(r->request);
	failed = !list || read_tokens(list, ask->ask.tokens - n, n, tokens);
	PyErr_Clear();
	Py_XDECREF(list);

	return failed ? 0 : n;
}

/* What its kv_transfer_params ask for. One that cannot be handed over is served like any other. */
static int begin_transfer(kvdpy_scheduler_t *self, kvdpy_request_t *r)
{
	kvx_transfer_t transfer = {.struct_size = sizeof transfer};
	const char *device;
	static uint32_t tokens[FEED_TOKENS]; /* under the interpreter's lock */
	int sends, failed;
	kvdpy_ask_t ask;

	r->transfer = PyObject_CallFunctionObjArgs(self->find_transfer, r->request, NULL);
	if (!r->transfer || r->transfer == Py_None) {
		return r->transfer ? 0 : -1;
	}
	failed = !PyArg_ParseTuple(r->transfer, "iszz", &sends, &transfer.id, &transfer.peer, &device) ||
		 kvdpy_ask_known(self, r, &ask);
	if (!failed) {
		transfer.on_device = sends && device;
		transfer.device = sends ? NULL : device;
		transfer.tokens = tokens;
		transfer.n_tokens = read_last_tokens(self, &ask, sends, tokens);
		transfer.timeout_ms = sends ? 0 : self->handover_ms;
		(void)(sends ? kvx_scheduler_send : kvx_scheduler_receive)(self->scheduler, &ask.ask, &transfer);
		kvdpy_ask_end(&ask);
	}

	return failed ? -1 : 0;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* Block 0 is vLLM's null block: it has no data. */
static int read_ids(PyObject *list, Py_ssize_t n, uint32_t *ids)
{
	for (Py_ssize_t i = 0; i < n; i++) {
		PyObject *item = PyList_GetItem(list, i);
		const unsigned long id = item ? PyLong_AsUnsignedLong(item) : 0;

		if (PyErr_Occurred()) {
			return -1;
		}
		ids[i] = id == 0 || id >= KVX_NO_BLOCK ? KVX_NO_BLOCK : (uint32_t)id;
	}

	return 0;
}

static int append_group(kvdpy_scheduler_t *self, kvdpy_ask_t *ask, PyObject *list, kvx_block_table_t *table)
{
	const Py_ssize_t n = PyList_Size(list);
	uint32_t *ids = n > 0 ? PyMem_Malloc((size_t)n * sizeof *ids) : NULL;
	int failed = n < 0;

	if (n > 0 && !ids) {
		PyErr_NoMemory();
		return -1;
	}
	failed = failed || read_ids(list, n, ids);
	if (!failed && n > 0) {
		table->ids = ids;
		table->n = (uint32_t)n;
		/* Not taken: the request is not saved. */
		kvx_scheduler_append_blocks(self->scheduler, &ask->ask, table);
		table->ids = NULL; /* copied */
		ask->request->known_blocks[table->group] = table->first + table->n;
	}
	PyMem_Free(ids);

	return failed ? -1 : 0;
}

int kvdpy_append_blocks(kvdpy_scheduler_t *self, kvdpy_ask_t *ask, PyObject *tables, int append)
{
	const kvdpy_request_t *r = ask->request;
	int failed = 0;

	for (uint32_t g = 0; g < self->groups && !failed; g++) {
		PyObject *list = PySequence_GetItem(tables, (Py_ssize_t)self->tables[g]);
		kvx_block_table_t table = {.struct_size = sizeof table, .group = g};

		table.shared = g > 0 && self->tables[g] == self->tables[g - 1];
		table.first = append ? r->known_blocks[g] : 0;
		table.fresh = r->known_blocks[g] > 0 ? r->known_blocks[g] : r->local / self->block_tokens[g];
		failed = !list || append_group(self, ask, list, &table);
		Py_XDECREF(list);
	}

	return failed ? -1 : 0;
}

void kvdpy_drop_blocks(kvdpy_scheduler_t *self, kvdpy_ask_t *ask)
{
	kvdpy_request_t *r = ask->request;

	kvx_scheduler_preempt(self->scheduler, &ask->ask);
	memset(r->known_blocks, 0, sizeof r->known_blocks);
	r->step = 0;
	r->computed = 0;
}

/* What the engine answers to a request that is handed over. The consumer of one that ended in another way is told. New
 * reference. */
static PyObject *end_transfer(kvdpy_scheduler_t *self, const kvdpy_ask_t *ask)
{
	const kvdpy_request_t *r = ask->request;
	PyObject *params = NULL;

	if (r->transfer && r->transfer != Py_None && kvx_scheduler_has_sent(self->scheduler, &ask->ask)) {
		params =
			PyObject_CallFunction(self->transfer_params, "OOss", r->request,
					      PyTuple_GetItem(r->transfer, 1), kvx_scheduler_peer_name(self->scheduler),
					      kvx_scheduler_send_device(self->scheduler, &ask->ask));
	}
	if (!params || params == Py_None) {
		kvx_scheduler_abort_send(self->scheduler, &ask->ask);
	}

	return params || PyErr_Occurred() ? params : Py_NewRef(Py_None);
}

PyObject *kvdpy_request_finish(kvdpy_scheduler_t *self, PyObject *request)
{
	kvx_ended_t ended = {.struct_size = sizeof ended};
	PyObject *params, *answer = NULL;
	kvdpy_ask_t ask;
	int failed;

	if (kvdpy_ask_begin(self, request, &ask)) {
		return NULL;
	}

	failed = kvdpy_read_u32_attribute(request, kvdpy_names.num_prompt_tokens, &ended.prompt_tokens) ||
		 kvdpy_read_u32_attribute(request, kvdpy_names.num_output_tokens, &ended.output_tokens);
	ended.engine_tokens = ask.request->engine;
	if (!failed && ask.request->admitted) {
		kvx_scheduler_record_ended(self->scheduler, &ask.ask, &ended);
	}
	params = end_transfer(self, &ask);
	kvx_scheduler_finish(self->scheduler, &ask.ask);
	self->continuing -= self->continuing > 0 && ask.request->last_step == self->built_step;
	failed |= !params || PyDict_DelItem(self->requests, ask.request->id);
	kvdpy_ask_end(&ask);
	if (!failed) {
		answer = params == Py_None ? Py_NewRef(self->released) : Py_BuildValue("(OO)", Py_False, params);
	}
	Py_XDECREF(params);

	return answer;
}
