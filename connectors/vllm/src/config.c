/* A Python dict into what the C interface takes: each configuration is a table of its keys. */
#include "kvdpy.h"

#include <string.h>

_Static_assert(sizeof(int) == sizeof(uint32_t) && sizeof(kvk_dtype_t) == sizeof(uint32_t) &&
		       sizeof(kvk_inner_t) == sizeof(uint32_t) && sizeof(kvk_paged_kind_t) == sizeof(uint32_t),
	       "they are read as a uint32_t");

PyObject *kvdpy_find_key(PyObject *dict, const char *key)
{
	PyObject *value = PyDict_GetItemString(dict, key);

	if (!value) {
		PyErr_Format(PyExc_KeyError, "%s is missing", key);
	}

	return value;
}

static int read_number(PyObject *value, const kvdpy_key_t *key, void *field)
{
	const unsigned long most = key->kind == KVDPY_INT ? INT32_MAX : UINT32_MAX;
	const unsigned long number = PyLong_AsUnsignedLong(value);
	const uint32_t small = (uint32_t)number;

	if (PyErr_Occurred() || number > most) {
		PyErr_Format(PyExc_ValueError, "%s must be a whole number from 0 to %lu", key->name, most);
		return -1;
	}
	memcpy(field, &small, sizeof small);

	return 0;
}

static int read_value(PyObject *value, const kvdpy_key_t *key, void *field)
{
	switch (key->kind) {
	case KVDPY_REF:
		*(PyObject **)field = Py_NewRef(value);
		return 0;
	case KVDPY_TEXT:
		*(const char **)field = value == Py_None ? NULL : PyUnicode_AsUTF8AndSize(value, NULL);
		return PyErr_Occurred() ? -1 : 0;
	case KVDPY_SIZE:
		*(size_t *)field = PyLong_AsSize_t(value);
		return PyErr_Occurred() ? -1 : 0;
	case KVDPY_U32:
	case KVDPY_INT:
		break;
	}

	return read_number(value, key, field);
}

int kvdpy_read_keys(PyObject *dict, const kvdpy_key_t *keys, size_t n, void *out)
{
	for (size_t i = 0; i < n; i++) {
		PyObject *value = kvdpy_find_key(dict, keys[i].name);

		if (!value || read_value(value, &keys[i], (char *)out + keys[i].offset)) {
			return -1;
		}
	}

	return 0;
}

void kvdpy_drop_keys(const kvdpy_key_t *keys, size_t n, void *out)
{
	for (size_t i = 0; i < n; i++) {
		if (keys[i].kind == KVDPY_REF) {
			Py_CLEAR(*(PyObject **)((char *)out + keys[i].offset));
		}
	}
}

/* ---- what both halves have ------------------------------------------------------------------- */

#define COMMON(field)         KVDPY_KEY(kvdpy_common_t, KVDPY_TEXT, field)
#define IDENTITY(kind, field) KVDPY_KEY(kvc_identity_t, kind, field)
#define LAYOUT(field)         KVDPY_KEY(kvk_layout_t, KVDPY_U32, field)

int kvdpy_read_common(PyObject *dict, kvdpy_common_t *common)
{
	static const kvdpy_key_t texts[] = {COMMON(socket), COMMON(instance), COMMON(program)};
	static const kvdpy_key_t identity[] = {
		IDENTITY(KVDPY_TEXT, model),        IDENTITY(KVDPY_TEXT, weights),     IDENTITY(KVDPY_TEXT, dtype),
		IDENTITY(KVDPY_TEXT, quantization), IDENTITY(KVDPY_TEXT, rope),        IDENTITY(KVDPY_TEXT, lora),
		IDENTITY(KVDPY_TEXT, hash),         IDENTITY(KVDPY_U32, hash_tokens),  IDENTITY(KVDPY_TEXT, groups),
		IDENTITY(KVDPY_TEXT, layout),       IDENTITY(KVDPY_TEXT, page_format), IDENTITY(KVDPY_TEXT, extra),
	};
	static const kvdpy_key_t layout[] = {LAYOUT(heads), LAYOUT(layers), LAYOUT(block_tokens), LAYOUT(k_dim),
					     LAYOUT(v_dim), LAYOUT(dtype),  LAYOUT(inner),        LAYOUT(page_bytes)};
	PyObject *named = kvdpy_find_key(dict, "identity"), *fields = kvdpy_find_key(dict, "layout");
	PyObject *secret = kvdpy_find_key(dict, "secret");
	char *bytes;
	Py_ssize_t len;

	memset(common, 0, sizeof *common);
	common->identity.struct_size = sizeof common->identity;
	if (!named || !fields || !secret || PyBytes_AsStringAndSize(secret, &bytes, &len) ||
	    kvdpy_read_keys(dict, texts, KVDPY_COUNT(texts), common) ||
	    kvdpy_read_keys(named, identity, KVDPY_COUNT(identity), &common->identity) ||
	    kvdpy_read_keys(fields, layout, KVDPY_COUNT(layout), &common->layout)) {
		return -1;
	}
	common->secret = (const uint8_t *)bytes;
	common->secret_len = (uint32_t)len;

	return 0;
}

int kvdpy_read_writer(PyObject *tuple, kvc_writer_t *writer)
{
	return PyArg_ParseTuple(tuple, "IIIII", &writer->rank, &writer->head_first, &writer->head_count,
				&writer->layer_first, &writer->layer_count)
		       ? 0
		       : -1;
}

/* ---- the engine's cache ---------------------------------------------------------------------- */

#define PAGED(kind, field) KVDPY_KEY(kvk_paged_t, kind, field)

int kvdpy_read_paged(PyObject *dict, kvdpy_paged_t *paged)
{
	static const kvdpy_key_t keys[] = {
		PAGED(KVDPY_U32, kind),         PAGED(KVDPY_U32, dtype),        PAGED(KVDPY_U32, blocks),
		PAGED(KVDPY_U32, layers),       PAGED(KVDPY_U32, first_layer),  PAGED(KVDPY_U32, heads),
		PAGED(KVDPY_U32, first_head),   PAGED(KVDPY_U32, block_tokens), PAGED(KVDPY_U32, k_dim),
		PAGED(KVDPY_U32, v_dim),        PAGED(KVDPY_U32, page_bytes),   PAGED(KVDPY_SIZE, block_stride),
		PAGED(KVDPY_SIZE, head_stride),
	};
	kvk_paged_t *p = &paged->paged;
	PyObject *list = kvdpy_find_key(dict, "base");

	if (!list || kvdpy_read_keys(dict, keys, KVDPY_COUNT(keys), p)) {
		return -1;
	}
	if (p->kind >= KVK_PAGED_KIND_COUNT || p->dtype >= KVK_DTYPE_COUNT || p->layers == 0 ||
	    p->layers > KVK_MAX_LAYERS) {
		PyErr_SetString(PyExc_ValueError, "kind, dtype or layers of the paged cache are out of range");
		return -1;
	}
	for (uint32_t i = 0; i < p->layers; i++) {
		PyObject *base = PyList_GetItem(list, (Py_ssize_t)i);

		paged->base[i] = base ? PyLong_AsVoidPtr(base) : NULL;
		if (!paged->base[i]) {
			return -1;
		}
	}
	p->base = paged->base;

	return 0;
}
