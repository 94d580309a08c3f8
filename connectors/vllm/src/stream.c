/* Where the engine enqueues its work. */
#include "kvdpy.h"

int kvdpy_current_stream(kvdpy_worker_t *self, void **p_stream)
{
	PyObject *number = PyObject_CallFunctionObjArgs(self->stream_of, self->device, NULL);

	*p_stream = number ? PyLong_AsVoidPtr(number) : NULL;
	Py_XDECREF(number);

	return PyErr_Occurred() ? -1 : 0;
}
