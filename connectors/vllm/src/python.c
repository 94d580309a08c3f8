/* What all files of the module use of Python: names, errors of a hook, numbers. */
#include "kvdpy.h"

/* ---- names ----------------------------------------------------------------------------------- */

kvdpy_names_t kvdpy_names;

int kvdpy_names_init(void)
{
#define KVDPY_NAME(name) #name,
	static const char *const texts[] = {KVDPY_NAMES(KVDPY_NAME)};
#undef KVDPY_NAME
	PyObject **names = (PyObject **)&kvdpy_names; /* it has nothing else */

	for (size_t i = 0; i < KVDPY_COUNT(texts); i++) {
		names[i] = PyUnicode_InternFromString(texts[i]);
		if (!names[i]) {
			return -1;
		}
	}

	return 0;
}

/* ---- errors of a hook ------------------------------------------------------------------------ */

int kvdpy_report_error(kvdpy_breaker_t *breaker, const char *hook)
{
	PyObject *type, *value, *trace, *reply;

	if (!PyErr_ExceptionMatches(PyExc_Exception)) {
		return PyErr_Occurred() ? -1 : 0;
	}

	PyErr_Fetch(&type, &value, &trace);
	PyErr_NormalizeException(&type, &value, &trace);
	if (value && trace) {
		PyException_SetTraceback(value, trace);
	}
	breaker->errors++;
	reply = PyObject_CallMethod(breaker->object, "error", "sO", hook, value ? value : Py_None);
	Py_XDECREF(reply);
	PyErr_Clear();
	Py_XDECREF(type);
	Py_XDECREF(value);
	Py_XDECREF(trace);

	return 0;
}

int kvdpy_check_count(Py_ssize_t n, Py_ssize_t wanted)
{
	if (n != wanted) {
		PyErr_Format(PyExc_TypeError, "%zd arguments instead of %zd", n, wanted);
		return -1;
	}

	return 0;
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
