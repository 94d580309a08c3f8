/* Kernels that are launched, by themselves and as graphs of one. */
#include "fake_cuda_internal.h"

#include "../../kernels/cuda/device/xxh3.h"

/* A graph of one kernel, and the same as it can be launched: its arguments are its own. The node is the graph. */
typedef struct fake_single {
	int full, runs;
	size_t kernel;
	unsigned grid, shared;
	kvk_gpu_args_t args;
	kvk_gpu_digest_args_t digest;
} fake_single_t;

static void set(fake_single_t *single, const kvk_cu_kernel_t *kernel)
{
	single->full = 1;
	single->kernel = (size_t)((fake_function_t *)(void *)kernel->function - fake.functions);
	single->grid = kernel->grid[0];
	single->shared = kernel->shared_bytes;
	if (single->kernel == FAKE_DIGEST) {
		memcpy(&single->digest, kernel->params[0], sizeof single->digest);
	} else {
		memcpy(&single->args, kernel->params[0], sizeof single->args);
	}
	if (kernel->grid[0] == 0 || kernel->grid[1] != 1 || kernel->grid[2] != 1 || kernel->block[1] != 1 ||
	    kernel->block[2] != 1 || kernel->extra || kernel->kernel || kernel->context ||
	    kernel->block[0] != KVK_GPU_THREADS) {
		fake_fault("a kernel of a wrong shape");
	}
}

static void take_window(const fake_single_t *single)
{
	const kvk_gpu_args_t *args = &single->args;
	const uint64_t chunk = args->leaf_bytes < KVK_CHUNK ? args->leaf_bytes : KVK_CHUNK;
	const uint64_t bytes = args->ahead ? single->grid * (KVK_GPU_THREADS / 32u) * args->ahead * chunk : UINT64_MAX;

	pthread_mutex_lock(&fake.lock);
	fake.on_their_way = fake.on_their_way > bytes ? fake.on_their_way : bytes;
	pthread_mutex_unlock(&fake.lock);
}

uint64_t fake_cuda_on_their_way(void)
{
	uint64_t bytes;

	pthread_mutex_lock(&fake.lock);
	bytes = fake.on_their_way;
	fake.on_their_way = 0;
	pthread_mutex_unlock(&fake.lock);

	return bytes;
}

static void start(const fake_single_t *single, kvk_cu_stream_t stream)
{
	fake_work_t *work = fake_work(FAKE_LAUNCH);

	work->kernel = single->kernel;
	work->shared = (int)single->shared;
	work->args = single->args;
	work->digest = single->digest;
	/* two plain blocks fit an SM */
	fake_take_sms(stream, single->kernel < FAKE_BULK || single->kernel == FAKE_DIGEST ? (single->grid + 1) / 2
											  : single->grid);
	if (single->kernel == FAKE_SCATTER) {
		take_window(single);
	}
	fake_enqueue(stream, work);
}

int fake_launch(kvk_cu_function_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
		unsigned bz, unsigned shared_bytes, kvk_cu_stream_t stream, void **params, void **extra)
{
	const kvk_cu_kernel_t kernel = {function, {gx, gy, gz}, {bx, by, bz}, shared_bytes, params, extra, NULL, NULL};
	fake_single_t single = {0};

	BEGIN(launch, NEEDS_CONTEXT)
	set(&single, &kernel);
	start(&single, stream);

	return 0;
}

uint64_t fake_cuda_launches(void)
{
	return fake_cuda_calls(offsetof(kvk_cuda_ops_t, launch)) +
	       fake_cuda_calls(offsetof(kvk_cuda_ops_t, graph_launch));
}

static void count(int more)
{
	pthread_mutex_lock(&fake.lock);
	fake.live.graphs += more;
	pthread_mutex_unlock(&fake.lock);
}

static int give_back(void *single, int failing)
{
	free(single);
	count(-1);

	return failing;
}

int fake_graph_create(kvk_cu_graph_t *p_graph, unsigned flags)
{
	BEGIN(graph_create, NEEDS_CONTEXT)
	if (flags != 0) {
		return CU_INVALID;
	}
	*p_graph = calloc(1, sizeof(fake_single_t));
	count(1);

	return 0;
}

int fake_graph_destroy(kvk_cu_graph_t graph)
{
	BEGIN(graph_destroy, NEEDS_CONTEXT | GIVES_BACK)
	return give_back(graph, failing);
}

int fake_graph_add(kvk_cu_node_t *p_node, kvk_cu_graph_t graph, const kvk_cu_node_t *after, size_t after_count,
		   const kvk_cu_kernel_t *kernel)
{
	fake_single_t *single = (fake_single_t *)(void *)graph;

	BEGIN(graph_add, NEEDS_CONTEXT)
	if (after || after_count > 0 || single->full) {
		fake_fault("a graph of more than a kernel");
	}
	set(single, kernel);
	*p_node = (kvk_cu_node_t)(void *)graph;

	return 0;
}

int fake_graph_exec(kvk_cu_exec_t *p_exec, kvk_cu_graph_t graph, unsigned long long flags)
{
	fake_single_t *exec;

	BEGIN(graph_exec, NEEDS_CONTEXT)
	if (flags != 0) {
		return CU_INVALID;
	}
	exec = malloc(sizeof *exec);
	memcpy(exec, graph, sizeof *exec);
	exec->runs = 1;
	*p_exec = (kvk_cu_exec_t)(void *)exec;
	count(1);

	return 0;
}

int fake_graph_change(kvk_cu_exec_t exec, kvk_cu_node_t node, const kvk_cu_kernel_t *kernel)
{
	BEGIN(graph_change, NEEDS_CONTEXT)
	if (!((const fake_single_t *)(const void *)node)->full) {
		fake_fault("a node of no graph");
	}
	set((fake_single_t *)(void *)exec, kernel);

	return 0;
}

int fake_graph_launch(kvk_cu_exec_t exec, kvk_cu_stream_t stream)
{
	const fake_single_t *single = (const fake_single_t *)(const void *)exec;

	BEGIN(graph_launch, NEEDS_CONTEXT)
	if (!single->runs || fake_is_capturing(stream)) {
		fake_fault("a graph launched that does not run, or into a capture");
	}
	start(single, stream);

	return 0;
}

int fake_graph_drop(kvk_cu_exec_t exec)
{
	BEGIN(graph_drop, NEEDS_CONTEXT | GIVES_BACK)
	return give_back(exec, failing);
}
