/* A Python dict into what the C interface takes. */
#include "kvdpy.h"

#include <stdlib.h>
#include <string.h>

int kvdpy_get_object(PyObject *dict, const char *key, PyObject **p_object)
{
	PyObject *value = PyDict_GetItemString(dict, key);

	if (!value) {
		PyErr_Format(PyExc_KeyError, "%s is missing", key);
		return -1;
	}
	*p_object = value;

	return 0;
}

int kvdpy_get_u32(PyObject *dict, const char *key, uint32_t *p_value)
{
	PyObject *value;
	unsigned long number;

	if (kvdpy_get_object(dict, key, &value)) {
		return -1;
	}
	number = PyLong_AsUnsignedLong(value);
	if (PyErr_Occurred() || number > UINT32_MAX) {
		PyErr_Format(PyExc_ValueError, "%s must be from 0 to 4294967295", key);
		return -1;
	}
	*p_value = (uint32_t)number;

	return 0;
}

int kvdpy_get_int(PyObject *dict, const char *key, int *p_value)
{
	PyObject *value;
	long number;

	if (kvdpy_get_object(dict, key, &value)) {
		return -1;
	}
	number = PyLong_AsLong(value);
	if (PyErr_Occurred() || number < 0 || number > INT32_MAX) {
		PyErr_Format(PyExc_ValueError, "%s must be a small whole number", key);
		return -1;
	}
	*p_value = (int)number;

	return 0;
}

int kvdpy_get_text(PyObject *dict, const char *key, const char **p_text)
{
	PyObject *value;
	const char *text = NULL;

	if (kvdpy_get_object(dict, key, &value)) {
		return -1;
	}
	if (value != Py_None) {
		text = PyUnicode_AsUTF8AndSize(value, NULL);
		if (!text) {
			return -1;
		}
	}
	*p_text = text;

	return 0;
}

static int get_identity(PyObject *dict, kvc_identity_t *identity)
{
	PyObject *value;

	memset(identity, 0, sizeof *identity);
	identity->struct_size = sizeof *identity;
	if (kvdpy_get_object(dict, "identity", &value)) {
		return -1;
	}

	return kvdpy_get_text(value, "model", &identity->model) ||
			       kvdpy_get_text(value, "weights", &identity->weights) ||
			       kvdpy_get_text(value, "dtype", &identity->dtype) ||
			       kvdpy_get_text(value, "quantization", &identity->quantization) ||
			       kvdpy_get_text(value, "rope", &identity->rope) ||
			       kvdpy_get_text(value, "lora", &identity->lora) ||
			       kvdpy_get_text(value, "hash", &identity->hash) ||
			       kvdpy_get_u32(value, "hash_tokens", &identity->hash_tokens) ||
			       kvdpy_get_text(value, "groups", &identity->groups) ||
			       kvdpy_get_text(value, "layout", &identity->layout) ||
			       kvdpy_get_text(value, "page_format", &identity->page_format) ||
			       kvdpy_get_text(value, "extra", &identity->extra)
		       ? -1
		       : 0;
}

/* The value after "name=" in a layout text; NULL: it is not there. */
static const char *value_of(const char *text, const char *name)
{
	const char *at = strstr(text, name);

	return at ? at + strlen(name) : NULL;
}

static int number_in(const char *text, const char *name, uint32_t *p_number)
{
	const char *value = value_of(text, name);
	char *end = NULL;
	const unsigned long number = value ? strtoul(value, &end, 10) : 0;

	*p_number = (uint32_t)number;

	return value && end != value && number <= UINT32_MAX ? 0 : -1;
}

/* Which of `count` words it is; count: none. */
static size_t word_in(const char *text, const char *name, const char *const *words, size_t count)
{
	const char *value = value_of(text, name);
	const size_t len = value ? strcspn(value, " ") : 0;
	size_t i = value ? 0 : count;

	while (i < count && (strlen(words[i]) != len || memcmp(words[i], value, len) != 0)) {
		i++;
	}

	return i;
}

/* The text was made by our own Python, and the C interface checks what comes of it: it is only taken apart here. An
 * installed libkvx has no function for that. */
static int read_layout(const char *text, kvk_layout_t *layout)
{
	static const char *const dtypes[] = {
#define KVDPY_DTYPE(NAME, name, bytes) name,
		KVK_DTYPE_LIST(KVDPY_DTYPE)
#undef KVDPY_DTYPE
	};
	static const char *const inners[] = {"split", "packed", "opaque"};
	const size_t inner_count = sizeof inners / sizeof inners[0];
	const size_t dtype = word_in(text, " dtype=", dtypes, KVK_DTYPE_COUNT);
	const size_t inner = word_in(text, " inner=", inners, inner_count);

	layout->dtype = (kvk_dtype_t)dtype;
	layout->inner = (kvk_inner_t)inner;

	return dtype == KVK_DTYPE_COUNT || inner == inner_count || number_in(text, " heads=", &layout->heads) ||
			       number_in(text, " layers=", &layout->layers) ||
			       number_in(text, " tokens=", &layout->block_tokens) ||
			       number_in(text, " k=", &layout->k_dim) || number_in(text, " v=", &layout->v_dim) ||
			       number_in(text, " page=", &layout->page_bytes)
		       ? -1
		       : 0;
}

int kvdpy_get_common(PyObject *dict, kvdpy_common_t *common)
{
	PyObject *value;
	char *secret;
	Py_ssize_t len;

	if (kvdpy_get_text(dict, "socket", &common->socket) || kvdpy_get_text(dict, "instance", &common->instance) ||
	    kvdpy_get_text(dict, "program", &common->program) || kvdpy_get_object(dict, "secret", &value) ||
	    PyBytes_AsStringAndSize(value, &secret, &len) || get_identity(dict, &common->identity)) {
		return -1;
	}

	common->secret = (const uint8_t *)secret;
	common->secret_len = (uint32_t)len;
	if (!common->identity.layout || read_layout(common->identity.layout, &common->layout)) {
		PyErr_Format(PyExc_ValueError, "%s is no layout",
			     common->identity.layout ? common->identity.layout : "");
		return -1;
	}

	return 0;
}

int kvdpy_get_writer(PyObject *tuple, kvc_writer_t *writer)
{
	uint32_t *const field[] = {&writer->rank, &writer->head_first, &writer->head_count, &writer->layer_first,
				   &writer->layer_count};

	for (Py_ssize_t i = 0; i < 5; i++) {
		PyObject *value = PyTuple_GetItem(tuple, i);
		unsigned long number = value ? PyLong_AsUnsignedLong(value) : 0;

		if (PyErr_Occurred()) {
			return -1;
		}
		*field[i] = (uint32_t)number;
	}

	return 0;
}

static int get_bases(PyObject *list, kvdpy_paged_t *paged)
{
	for (uint32_t i = 0; i < paged->paged.layers; i++) {
		PyObject *value = PyList_GetItem(list, (Py_ssize_t)i);
		void *base = value ? PyLong_AsVoidPtr(value) : NULL;

		if (!base) {
			return -1;
		}
		paged->base[i] = base;
	}
	paged->paged.base = paged->base;

	return 0;
}

int kvdpy_get_paged(PyObject *dict, kvdpy_paged_t *paged)
{
	kvk_paged_t *p = &paged->paged;
	uint32_t kind, dtype;
	PyObject *list, *stride, *apart;

	if (kvdpy_get_u32(dict, "kind", &kind) || kvdpy_get_u32(dict, "dtype", &dtype) ||
	    kvdpy_get_u32(dict, "blocks", &p->blocks) || kvdpy_get_u32(dict, "layers", &p->layers) ||
	    kvdpy_get_u32(dict, "first_layer", &p->first_layer) || kvdpy_get_u32(dict, "heads", &p->heads) ||
	    kvdpy_get_u32(dict, "first_head", &p->first_head) || kvdpy_get_u32(dict, "tokens", &p->block_tokens) ||
	    kvdpy_get_u32(dict, "k", &p->k_dim) || kvdpy_get_u32(dict, "v", &p->v_dim) ||
	    kvdpy_get_u32(dict, "page", &p->page_bytes) || kvdpy_get_object(dict, "stride", &stride) ||
	    kvdpy_get_object(dict, "apart", &apart) || kvdpy_get_object(dict, "base", &list)) {
		return -1;
	}
	if (kind >= KVK_PAGED_KIND_COUNT || dtype >= KVK_DTYPE_COUNT || p->layers == 0 || p->layers > KVK_MAX_LAYERS) {
		PyErr_SetString(PyExc_ValueError, "kind, dtype or layers of the paged cache are out of range");
		return -1;
	}

	p->kind = (kvk_paged_kind_t)kind;
	p->dtype = (kvk_dtype_t)dtype;
	p->block_stride = PyLong_AsSize_t(stride);
	if (!PyErr_Occurred()) {
		p->head_stride = PyLong_AsSize_t(apart);
	}
	if (PyErr_Occurred()) {
		return -1;
	}

	return get_bases(list, paged);
}
