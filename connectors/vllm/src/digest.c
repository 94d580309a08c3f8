/* Digests of whole files. A Python thread calls, and waits without the interpreter's lock. */
#include "kvdpy.h"

#include "kvx_digest.h"

#include <errno.h>
#include <stdatomic.h>

typedef struct kvdpy_digest {
	PyObject_HEAD _Atomic int cancelled;
} kvdpy_digest_t;

static int is_cancelled(void *ctx)
{
	return atomic_load_explicit(&((kvdpy_digest_t *)ctx)->cancelled, memory_order_relaxed);
}

/* file(fd) -> 16 bytes, None: cancelled. OSError: the file cannot be read. */
static PyObject *digest_file(PyObject *object, PyObject *number)
{
	kvx_digest_config_t config = {.struct_size = sizeof config, .cancelled = is_cancelled, .ctx = object};
	const long fd = PyLong_AsLong(number);
	uint8_t digest[KVX_DIGEST_BYTES];
	PyThreadState *state;
	kvc_status_t status;
	int error;

	if (PyErr_Occurred()) {
		return NULL;
	}
	config.fd = fd >= 0 && fd <= INT32_MAX ? (int)fd : -1;
	state = PyEval_SaveThread();
	errno = 0;
	status = kvx_digest_file(&config, digest);
	error = errno;
	PyEval_RestoreThread(state);
	if (status == KVC_ERR_CLOSED) {
		return Py_NewRef(Py_None);
	}
	if (status == KVC_ERR_FAULT && error != 0) {
		errno = error;
		return PyErr_SetFromErrno(PyExc_OSError);
	}
	if (status != KVC_OK) {
		PyErr_SetString(PyExc_OSError,
				status == KVC_ERR_FAULT ? "the file has become shorter" : kvc_status_name(status));
		return NULL;
	}

	return PyBytes_FromStringAndSize((const char *)digest, sizeof digest);
}

static PyObject *digest_cancel(PyObject *object, PyObject *unused)
{
	(void)unused;
	atomic_store(&((kvdpy_digest_t *)object)->cancelled, 1);

	return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
	{"file", digest_file, METH_O, "digest of an open file; None: cancelled"},
	{"cancel", digest_cancel, METH_NOARGS, "end file(), now and from now on"},
	{NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {{Py_tp_dealloc, KVDPY_SLOT(kvdpy_free_object)}, {Py_tp_methods, methods}, {0, NULL}};
PyType_Spec kvdpy_digest_spec = {"kvd_vllm._kvd.Digest", sizeof(kvdpy_digest_t), 0, Py_TPFLAGS_DEFAULT, slots};
