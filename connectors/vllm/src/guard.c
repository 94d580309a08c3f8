/* Errors of a hook: to the guard, never to the engine. */
#include "kvdpy.h"

PyObject *kvdpy_harmless(PyObject *guard, const char *name, PyObject *answer)
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
	said = guard ? PyObject_CallMethod(guard, "error", "sO", name, value ? value : Py_None) : NULL;
	Py_XDECREF(said);
	PyErr_Clear();
	Py_XDECREF(type);
	Py_XDECREF(value);
	Py_XDECREF(trace);

	return Py_NewRef(answer);
}
