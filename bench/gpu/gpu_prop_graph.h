/* gpu_prop_graph.h -- what gpu_prop needs of the driver's graphs: captures are the caller's, not kvk/gpu.h's, so its
 * table has none of it. */
#ifndef GPU_PROP_GRAPH_H
#define GPU_PROP_GRAPH_H

#include "kvk/cuda.h"

#include <dlfcn.h>

typedef struct graphs {
	int (*begin)(kvk_cu_stream_t stream, int mode);
	int (*end)(kvk_cu_stream_t stream, void **p_graph);
	int (*instantiate)(void **p_exec, void *graph, unsigned long long flags);
	int (*launch)(void *exec, kvk_cu_stream_t stream);
	int (*drop_exec)(void *exec);
	int (*drop)(void *graph);
} graphs_t;

/* 0: this driver has none. */
static inline int graphs_open(graphs_t *g)
{
	static const char *const names[] = {"cuStreamBeginCapture_v2",     "cuStreamEndCapture",
					    "cuGraphInstantiateWithFlags", "cuGraphLaunch",
					    "cuGraphExecDestroy",          "cuGraphDestroy"};
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	void *found[KV_COUNT_OF(names)];

	_Static_assert(sizeof found == sizeof *g, "a table of functions and nothing else");
	for (size_t i = 0; i < KV_COUNT_OF(names); i++) {
		found[i] = library ? dlsym(library, names[i]) : NULL;
		if (!found[i]) {
			return 0;
		}
	}
	memcpy(g, found, sizeof found);

	return 1;
}

#endif
