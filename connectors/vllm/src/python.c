/* What all files of the module use of Python: names, errors of a hook, types, numbers. */
#include "kvdpy.h"

/* ---- names ----------------------------------------------------------------------------------- */

kvdpy_names_t kvdpy_names;

int kvdpy_names_init(void)
{
#define KVDPY_NAME(name) {#name, &kvdpy_names.name},
	static const struct {
		const char *text;
		PyObject **p_name;
	} all[] = {KVDPY_NAMES(KVDPY_NAME)};
#undef KVDPY_NAME

	for (size_t i = 0; i < KVDPY_COUNT(all); i++) {
		*all[i].p_name = PyUnicode_InternFromString(all[i].text);
		if (!*all[i].p_name) {
			return -1;
		}
	}

	return 0;
}

/* ---- errors of a hook ------------------------------------------------------------------------ */

PyObject *kvdpy_answer_error(kvdpy_breaker_t *breaker, const char *name, PyObject *answer)
{
	PyObject *type, *value, *trace, *reply;

	if (!PyErr_Occurred() || !PyErr_ExceptionMatches(PyExc_Exception)) {
		return PyErr_Occurred() ? NULL : Py_NewRef(answer);
	}

	PyErr_Fetch(&type, &value, &trace);
	PyErr_NormalizeException(&type, &value, &trace);
	if (value && trace) {
		PyException_SetTraceback(value, trace);
	}
	breaker->errors++;
	reply = PyObject_CallMethod(breaker->object, "error", "sO", name, value ? value : Py_None);
	Py_XDECREF(reply);
	PyErr_Clear();
	Py_XDECREF(type);
	Py_XDECREF(value);
	Py_XDECREF(trace);

	return Py_NewRef(answer);
}

PyObject *kvdpy_answer(kvdpy_breaker_t *breaker, PyObject *value, const char *name, PyObject *harmless)
{
	return value ? value : kvdpy_answer_error(breaker, name, harmless);
}

/* ---- types ----------------------------------------------------------------------------------- */

PyTypeObject *kvdpy_add_type(PyObject *module, const kvdpy_type_t *type)
{
	PyType_Slot slots[4] = {{Py_tp_dealloc, KVDPY_SLOT(type->destroy)}};
	PyType_Spec spec = {
		.name = type->name, .basicsize = (int)type->size, .flags = Py_TPFLAGS_DEFAULT, .slots = slots};
	int n = 1;
	PyTypeObject *made;

	if (type->init) {
		slots[n++] = (PyType_Slot){Py_tp_init, KVDPY_SLOT(type->init)};
	}
	if (type->methods) {
		slots[n++] = (PyType_Slot){Py_tp_methods, type->methods};
	}
	made = (PyTypeObject *)PyType_FromSpec(&spec);
	if (made && PyModule_AddType(module, made)) {
		Py_CLEAR(made);
	}
	Py_XDECREF((PyObject *)made);

	return made;
}

void kvdpy_free_object(PyObject *object)
{
	PyTypeObject *type = Py_TYPE(object);

	PyObject_Free(object);
	Py_DECREF(type);
}

/* ---- values ---------------------------------------------------------------------------------- */

int kvdpy_get_attributes(PyObject *object, PyObject *const *names, PyObject **values, int n)
{
	for (int i = 0; i < n; i++) {
		values[i] = NULL;
	}
	for (int i = 0; i < n; i++) {
		values[i] = PyObject_GetAttr(object, names[i]);
		if (!values[i]) {
			return -1;
		}
	}

	return 0;
}

void kvdpy_drop(PyObject **values, int n)
{
	for (int i = 0; i < n; i++) {
		Py_CLEAR(values[i]);
	}
}

int kvdpy_read_u32(PyObject *number, uint32_t *p_value)
{
	const unsigned long none = (unsigned long)-1;
	const unsigned long value = number ? PyLong_AsUnsignedLong(number) : none;

	if (value == none && !number && !PyErr_Occurred()) {
		PyErr_SetString(PyExc_KeyError, "a number is missing");
	}
	if (value == none && PyErr_Occurred()) {
		return -1;
	}
	*p_value = (uint32_t)value;

	return 0;
}

int kvdpy_read_u32_attribute(PyObject *object, PyObject *name, uint32_t *p_value)
{
	PyObject *number = PyObject_GetAttr(object, name);
	const int failed = kvdpy_read_u32(number, p_value);

	Py_XDECREF(number);

	return failed;
}

int kvdpy_add_numbers(PyObject *set, const uint32_t *numbers, uint32_t n)
{
	int failed = 0;

	for (uint32_t i = 0; i < n && !failed; i++) {
		PyObject *number = PyLong_FromUnsignedLong(numbers[i]);

		failed = !number || PySet_Add(set, number);
		Py_XDECREF(number);
	}

	return failed ? -1 : 0;
}

int kvdpy_current_stream(PyObject *stream_of, PyObject *device, void **p_stream)
{
	PyObject *number = PyObject_CallFunctionObjArgs(stream_of, device, NULL);

	*p_stream = number ? PyLong_AsVoidPtr(number) : NULL;
	Py_XDECREF(number);

	return PyErr_Occurred() ? -1 : 0;
}
