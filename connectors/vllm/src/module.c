/* The module kvd_vllm._kvd. */
#include "kvdpy.h"

static PyObject *module_status_name(PyObject *module, PyObject *number)
{
	const long status = PyLong_AsLong(number);

	(void)module;

	return PyErr_Occurred() ? NULL : PyUnicode_FromString(kvc_status_name((kvc_status_t)status));
}

static PyMethodDef module_methods[] = {
	{"stats_table", kvdpy_stats_table, METH_NOARGS, "[(name, help)] of all counters"},
	{"status_name", module_status_name, METH_O, "name of a status"},
	{NULL, NULL, 0, NULL},
};

static const struct {
	const char *name;
	long value;
} constants[] = {{"OK", KVC_OK},
		 {"PENDING", KVC_PENDING},
		 {"KIND_KV_TOKEN_HEAD", KVK_PAGED_KV_TOKEN_HEAD},
		 {"KIND_HEAD_TOKEN_KV", KVK_PAGED_HEAD_TOKEN_KV},
		 {"KIND_OPAQUE", KVK_PAGED_OPAQUE},
		 {"KIND_TOKEN_HEAD_KV", KVK_PAGED_TOKEN_HEAD_KV},
		 {"KIND_KV_HEAD_TOKEN", KVK_PAGED_KV_HEAD_TOKEN},
		 {"KIND_HEAD_KV_TOKEN", KVK_PAGED_HEAD_KV_TOKEN},
		 {"MEMORY_HOST", KVX_MEMORY_HOST},
		 {"MEMORY_CUDA", KVX_MEMORY_CUDA},
		 {"INNER_split", KVK_INNER_SPLIT},
		 {"INNER_opaque", KVK_INNER_OPAQUE},
#define KVDPY_DTYPE(NAME, text, bytes) {"DTYPE_" text, KVK_DTYPE_##NAME},
		 KVK_DTYPE_LIST(KVDPY_DTYPE)
#undef KVDPY_DTYPE
};

/* A borrowed reference to a new type, which the module has; NULL: an exception. */
static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
	PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(spec);

	if (type && PyModule_AddType(module, type)) {
		Py_CLEAR(type);
	}
	Py_XDECREF((PyObject *)type);

	return type;
}

static int module_fill(PyObject *module)
{
	kvdpy_request_type = add_type(module, &kvdpy_request_spec);
	if (!kvdpy_request_type || !add_type(module, &kvdpy_scheduler_spec) || !add_type(module, &kvdpy_worker_spec) ||
	    !add_type(module, &kvdpy_digest_spec) || kvdpy_names_init() ||
	    PyModule_AddStringConstant(module, "version", kvc_version())) {
		return -1;
	}
	for (size_t i = 0; i < KVDPY_COUNT(constants); i++) {
		if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value)) {
			return -1;
		}
	}

	return 0;
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
