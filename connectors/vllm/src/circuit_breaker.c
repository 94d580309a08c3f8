/* Errors of a hook: to the circuit breaker, never to the engine. */
#include "kvdpy.h"

PyObject *kvdpy_answer_error(kvdpy_breaker_t *breaker, const char *name, PyObject *answer)
{
	PyObject *type, *value, *trace, *said;

	if (!PyErr_Occurred() || !PyErr_ExceptionMatches(PyExc_Exception)) {
		return PyErr_Occurred() ? NULL : Py_NewRef(answer);
	}

	PyErr_Fetch(&type, &value, &trace);
	PyErr_NormalizeException(&type, &value, &trace);
	if (value && trace) {
		PyException_SetTraceback(value, trace);
	}
	breaker->errors++;
	said = PyObject_CallMethod(breaker->object, "error", "sO", name, value ? value : Py_None);
	Py_XDECREF(said);
	PyErr_Clear();
	Py_XDECREF(type);
	Py_XDECREF(value);
	Py_XDECREF(trace);

	return Py_NewRef(answer);
}
