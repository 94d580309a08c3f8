/* The module kvd_vllm._kvd. */
#include "kvdpy.h"

#ifndef KVDPY_SHARED
#include <string.h>
#endif

static PyObject *module_stats_table(PyObject *module, PyObject *unused)
{
	(void)module;
	(void)unused;

	return kvdpy_stats_table();
}

#ifndef KVDPY_SHARED /* an installed libkvx keeps these to itself */
/* check_layout(text): None, or why the canonical layout text is none. */
static PyObject *module_check_layout(PyObject *module, PyObject *text)
{
	Py_ssize_t len;
	const char *bytes = PyUnicode_AsUTF8AndSize(text, &len);
	const char *why = "it is not a layout text";
	kvk_layout_t layout;

	(void)module;
	if (!bytes) {
		return NULL;
	}

	return kvk_layout_parse(bytes, (size_t)len, &layout, &why) == KV_OK ? Py_NewRef(Py_None)
									    : PyUnicode_FromString(why);
}

/* check_paged(paged, layout text): None, or why they do not fit. */
static PyObject *module_check_paged(PyObject *module, PyObject *args)
{
	const char *text, *why = "it is not a layout text";
	PyObject *dict, *answer = NULL;
	kvk_layout_t layout;
	kvdpy_paged_t *paged;

	(void)module;
	if (!PyArg_ParseTuple(args, "O!s", &PyDict_Type, &dict, &text)) {
		return NULL;
	}
	paged = PyMem_Calloc(1, sizeof *paged);
	if (!paged) {
		return PyErr_NoMemory();
	}
	if (kvdpy_get_paged(dict, paged) == 0) {
		const int fits = kvk_layout_parse(text, strlen(text), &layout, &why) == KV_OK &&
				 kvk_paged_check(&paged->paged, &layout, &why) == KV_OK;

		answer = fits ? Py_NewRef(Py_None) : PyUnicode_FromString(why);
	}
	PyMem_Free(paged);

	return answer;
}
#endif

static PyObject *module_status_name(PyObject *module, PyObject *number)
{
	const long status = PyLong_AsLong(number);

	(void)module;

	return PyErr_Occurred() ? NULL : PyUnicode_FromString(kvc_status_name((kvc_status_t)status));
}

static PyMethodDef module_methods[] = {
	{"stats_table", module_stats_table, METH_NOARGS, "[(name, help)] of all counters"},
#ifndef KVDPY_SHARED
	{"check_layout", module_check_layout, METH_O, "None, or why a canonical layout text is wrong"},
	{"check_paged", module_check_paged, METH_VARARGS, "None, or why a paged cache does not fit a layout"},
#endif
	{"status_name", module_status_name, METH_O, "name of a status"},
	{NULL, NULL, 0, NULL},
};

static int module_fill(PyObject *module)
{
	return kvdpy_names_init() || kvdpy_request_init(module) || kvdpy_scheduler_init(module) ||
			       kvdpy_worker_init(module) || kvdpy_digest_init(module) ||
			       PyModule_AddStringConstant(module, "version", kvc_version()) ||
			       PyModule_AddIntConstant(module, "OK", KVC_OK) ||
			       PyModule_AddIntConstant(module, "PENDING", KVC_PENDING) ||
			       PyModule_AddIntConstant(module, "KIND_KV_TOKEN_HEAD", KVK_PAGED_KV_TOKEN_HEAD) ||
			       PyModule_AddIntConstant(module, "KIND_HEAD_TOKEN_KV", KVK_PAGED_HEAD_TOKEN_KV) ||
			       PyModule_AddIntConstant(module, "KIND_OPAQUE", KVK_PAGED_OPAQUE) ||
			       PyModule_AddIntConstant(module, "KIND_TOKEN_HEAD_KV", KVK_PAGED_TOKEN_HEAD_KV) ||
			       PyModule_AddIntConstant(module, "KIND_KV_HEAD_TOKEN", KVK_PAGED_KV_HEAD_TOKEN) ||
			       PyModule_AddIntConstant(module, "KIND_HEAD_KV_TOKEN", KVK_PAGED_HEAD_KV_TOKEN) ||
#define KVDPY_DTYPE(NAME, text, bytes) PyModule_AddIntConstant(module, "DTYPE_" text, KVK_DTYPE_##NAME) ||
			       KVK_DTYPE_LIST(KVDPY_DTYPE) 0
#undef KVDPY_DTYPE
		       ? -1
		       : 0;
}

PyMODINIT_FUNC PyInit__kvd(void);
PyMODINIT_FUNC PyInit__kvd(void)
{
	static struct PyModuleDef definition = {
		.m_base = PyModuleDef_HEAD_INIT,
		.m_name = "kvd_vllm._kvd",
		.m_doc = "Both halves of kvd's connector for vLLM.",
		.m_size = -1,
		.m_methods = module_methods,
	};
	PyObject *module = PyModule_Create(&definition);

	if (module && module_fill(module)) {
		Py_CLEAR(module);
	}

	return module;
}
