/* A Python dict into what the C interface takes: each configuration is a table of its keys. */
#include "kvdpy.h"

_Static_assert(sizeof(int) == sizeof(uint32_t) && sizeof(kvk_dtype_t) == sizeof(int) &&
		       sizeof(kvk_inner_t) == sizeof(int) && sizeof(kvk_paged_kind_t) == sizeof(int) &&
		       sizeof(size_t) == sizeof(Py_ssize_t) && sizeof(size_t) == sizeof(uint64_t),
	       "they are read as an int, or as a Py_ssize_t");

PyObject *kvdpy_find_key(PyObject *dict, const char *key)
{
	PyObject *value = PyDict_GetItemString(dict, key);

	if (!value) {
		PyErr_Format(PyExc_KeyError, "%s is missing", key);
	}

	return value;
}

PyObject *kvdpy_find_list(PyObject *dict, const char *key, Py_ssize_t most, uint32_t *p_count)
{
	PyObject *list = kvdpy_find_key(dict, key);
	const Py_ssize_t n = list ? PyList_Size(list) : -1;

	if (n >= 0 && (n < 1 || n > most)) {
		PyErr_Format(PyExc_ValueError, "%s must be a list of 1 to %zd", key, most);
	}
	*p_count = (uint32_t)n;

	return PyErr_Occurred() ? NULL : list;
}

int kvdpy_read_keys(PyObject *dict, const kvdpy_key_t *keys, size_t n, void *out)
{
	for (size_t i = 0; i < n; i++) {
		PyObject *value = kvdpy_find_key(dict, keys[i].name);

		if (!value || !PyArg_Parse(value, keys[i].format, (char *)out + keys[i].offset)) {
			return -1;
		}
	}

	return 0;
}

/* ---- what both halves have ------------------------------------------------------------------- */

#define IDENTITY(format, field) KVDPY_KEY(kvc_identity_t, format, field)
#define LAYOUT(field)           KVDPY_KEY(kvk_layout_t, "i", field)

int kvdpy_read_common(PyObject *dict, kvdpy_common_t *common)
{
	static const kvdpy_key_t identity[] = {
		IDENTITY("z", model),  IDENTITY("z", weights), IDENTITY("z", dtype),       IDENTITY("z", quantization),
		IDENTITY("z", rope),   IDENTITY("z", lora),    IDENTITY("z", hash),        IDENTITY("i", hash_tokens),
		IDENTITY("z", groups), IDENTITY("z", layout),  IDENTITY("z", page_format), IDENTITY("z", extra),
	};
	static const kvdpy_key_t layout[] = {LAYOUT(heads), LAYOUT(layers), LAYOUT(block_tokens), LAYOUT(k_dim),
					     LAYOUT(v_dim), LAYOUT(dtype),  LAYOUT(inner),        LAYOUT(page_bytes)};
	PyObject *named = kvdpy_find_key(dict, "identity");
	PyObject *list = kvdpy_find_list(dict, "layouts", KVDPY_MAX_GROUPS, &common->layout_count);
	PyObject *secret = kvdpy_find_key(dict, "secret");
	Py_ssize_t len;

	common->identity.struct_size = sizeof common->identity;
	if (!named || !list || !secret || !PyArg_Parse(secret, "y#", &common->secret, &len) ||
	    kvdpy_read_keys(named, identity, KVDPY_COUNT(identity), &common->identity)) {
		return -1;
	}
	for (uint32_t i = 0; i < common->layout_count; i++) {
		PyObject *fields = PyList_GetItem(list, (Py_ssize_t)i);

		if (kvdpy_read_keys(fields, layout, KVDPY_COUNT(layout), &common->layouts[i])) {
			return -1;
		}
	}
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

#define PAGED(format, field)                                                                                           \
	{                                                                                                              \
#field, format, offsetof(kvdpy_paged_t, paged.field)                                                   \
	}

int kvdpy_read_paged(PyObject *dict, kvdpy_paged_t *paged)
{
	static const kvdpy_key_t keys[] = {
		KVDPY_KEY(kvdpy_paged_t, "i", group),
		PAGED("i", kind),
		PAGED("i", dtype),
		PAGED("i", blocks),
		PAGED("i", layers),
		PAGED("i", first_layer),
		PAGED("i", heads),
		PAGED("i", first_head),
		PAGED("i", block_tokens),
		PAGED("i", k_dim),
		PAGED("i", v_dim),
		PAGED("i", page_bytes),
		PAGED("n", block_stride),
		PAGED("n", head_stride),
	};
	uint32_t layers;
	PyObject *list = kvdpy_find_list(dict, "base", KVK_MAX_LAYERS, &layers);

	if (!list || kvdpy_read_keys(dict, keys, KVDPY_COUNT(keys), paged)) {
		return -1;
	}
	for (uint32_t i = 0; i < layers; i++) {
		paged->base[i] = PyLong_AsVoidPtr(PyList_GetItem(list, (Py_ssize_t)i));
	}
	paged->paged.layers = layers;
	paged->paged.base = paged->base;

	return PyErr_Occurred() ? -1 : 0;
}
