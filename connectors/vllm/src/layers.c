/* Loads that come layer by layer: in which steps the engine awaits each layer before it reads it.
 *
 * It does where attention runs from Python around every layer (wait_for_layer_load), and not in a graph of the whole
 * step. The forward context says which of the two a step is. That does not tell whether every layer of this model is
 * awaited, by its own name and on the step's stream; so in each mode one step is watched first, whose loads come whole.
 * The worker finds a layer that is skipped later, and its loads have failed.
 *
 * In all other steps has_connector_metadata() is false, and the engine makes no call around its layers. */
#include "kvdpy.h"

#include <string.h>

#define TRIES 8u /* a mode in which this many steps named only some layers is not watched again */

/* ---- configuration --------------------------------------------------------------------------- */

int kvdpy_layers_init(kvdpy_layers_t *layers, PyObject *dict)
{
	PyObject *value = kvdpy_find_key(dict, "layers");

	if (!value || value == Py_None) {
		return value ? 0 : -1;
	}
	if (!PyArg_Parse(value, "(O!O!)", &PyDict_Type, &layers->names, &PyTuple_Type, &layers->modes)) {
		return -1;
	}
	layers->count = (uint32_t)PyDict_Size(layers->names);
	if (PyTuple_Size(layers->modes) > (Py_ssize_t)KVDPY_MODES || layers->count == 0 ||
	    layers->count > KVK_MAX_LAYERS) {
		PyErr_SetString(PyExc_ValueError, "layers must be some names and at most 8 modes");
		return -1;
	}

	return 0;
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* Attribute of the forward context; NULL: it has none, or it is None. */
static PyObject *context_part(PyObject *context, PyObject *name)
{
	PyObject *value = PyObject_GetAttr(context, name);

	if (!value || value == Py_None) {
		PyErr_Clear();
		Py_XDECREF(value);
		return NULL;
	}

	return value;
}

/* Number of the step's mode, if attention runs from Python in it; -1: it may not. */
static int find_mode(const kvdpy_layers_t *layers, PyObject *context)
{
	PyObject *metadata = context_part(context, kvdpy_names.attn_metadata);
	PyObject *halves = context_part(context, kvdpy_names.ubatch_slices);
	PyObject *mode = context_part(context, kvdpy_names.cudagraph_runtime_mode);
	int found = -1;

	/* Without metadata no layer is named; a list is of two halves of a step that overlap. */
	if (metadata && PyDict_Check(metadata) && !halves) {
		for (Py_ssize_t i = 0; i < PyTuple_Size(layers->modes) && found < 0; i++) {
			found = PyTuple_GetItem(layers->modes, i) == mode ? (int)i : -1;
		}
	}
	Py_XDECREF(metadata);
	Py_XDECREF(halves);
	Py_XDECREF(mode);

	return found;
}

void kvdpy_layers_clear(kvdpy_layers_t *layers)
{
	layers->asked = 0;
	layers->layered = 0;
}

void kvdpy_layers_run_loads(kvdpy_layers_t *layers, kvx_worker_t *worker, PyObject *context)
{
	PyThreadState *state;
	int mode = -1, trusted;

	kvdpy_layers_clear(layers);
	if (layers->names && context && context != Py_None) {
		mode = find_mode(layers, context);
	}
	trusted = mode >= 0 && layers->trusted >> mode & 1u;
	state = PyEval_SaveThread();
	if (trusted) {
		layers->layered = kvx_worker_run_layered_loads(worker);
	} else {
		kvx_worker_run_sync_loads(worker);
	}
	PyEval_RestoreThread(state);
	if (layers->layered || (mode >= 0 && !trusted && layers->tries[mode] < TRIES)) {
		layers->asked = 1;
		layers->mode = mode;
		layers->seen = 0;
		layers->strange = 0;
		memset(layers->named, 0, layers->count);
	}
}

/* The number of a layer; `count` for another name. */
static uint32_t find_layer(const kvdpy_layers_t *layers, PyObject *name)
{
	uint32_t layer;

	if (kvdpy_read_u32(PyDict_GetItemWithError(layers->names, name), &layer)) {
		PyErr_Clear();
		return layers->count;
	}

	return layer < layers->count ? layer : layers->count;
}

void kvdpy_layers_note(kvdpy_layers_t *layers, kvx_worker_t *worker, PyObject *name)
{
	const uint32_t layer = find_layer(layers, name);

	if (layers->layered) {
		kvx_worker_await_layer(worker, layer);
		return;
	}
	if (layer < layers->count && !layers->named[layer]) {
		layers->named[layer] = 1;
		layers->seen++;
	}
}

void kvdpy_layers_end(kvdpy_layers_t *layers)
{
	if (layers->asked && !layers->layered) {
		if (layers->seen == layers->count && !layers->strange) {
			layers->trusted |= 1u << layers->mode;
		} else if (layers->seen > 0) {
			layers->tries[layers->mode]++;
		}
	}
	kvdpy_layers_clear(layers);
}
