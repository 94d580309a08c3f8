/* How kernels get to a stream: as graphs of one kernel.
 *
 * Once eight kernels were launched, one at a time, on other streams than the engine's, any two kernels of the process
 * have 0.34 us more between them, for good: 2 to 3 % of a step that generates. Kernels of graphs are not counted (H200,
 * driver 13.0, on some machines; docs/decisions/017-kernels-as-graphs.md). An executable graph runs one launch after
 * another, so each stream has one of its own; streams that find no room share one, which only puts their kernels in an
 * order. Launching it with other arguments than before takes the host 5 us, a plain launch 2.
 */
#include "launch.h"

#include "context.h"
#include "cuda/device/xxh3.h"

#include "kv/log.h"

static void give_up_graphs(kvk_gpu_t *gpu, const char *why)
{
	gpu->no_launch_graphs = 1;
	kv_logf(gpu->env, KV_LOG_INFO, "gpu", "kernels are launched without graphs device %d why %s", gpu->ordinal,
		why);
}

void kvk_gpu_launch_init(kvk_gpu_t *gpu)
{
	const kvk_cuda_ops_t *cuda = gpu->cuda;

	pthread_mutex_init(&gpu->launch_lock, NULL);
	if (!cuda->graph_create || !cuda->graph_destroy || !cuda->graph_add || !cuda->graph_exec ||
	    !cuda->graph_change || !cuda->graph_launch || !cuda->graph_drop) {
		give_up_graphs(gpu, "the driver has no such calls");
	}
}

static void free_launch_graph(kvk_gpu_t *gpu, const kvk_gpu_launch_graph_t *single)
{
	if (single->exec) {
		KVK_GPU_CALL(gpu, graph_drop, single->exec);
	}
	if (single->graph) {
		KVK_GPU_CALL(gpu, graph_destroy, single->graph);
	}
}

void kvk_gpu_launch_fini(kvk_gpu_t *gpu)
{
	for (uint32_t i = 0; i < gpu->launch_graph_count; i++) {
		free_launch_graph(gpu, &gpu->launch_graphs[i]);
	}
	pthread_mutex_destroy(&gpu->launch_lock);
}

static kv_status_t make_launch_graph(kvk_gpu_t *gpu, const kvk_cu_kernel_t *kernel, kvk_gpu_launch_graph_t *single)
{
	kv_status_t status = KVK_GPU_CALL(gpu, graph_create, &single->graph, 0);

	if (status != KV_OK) {
		single->graph = NULL;
		return status;
	}
	status = KVK_GPU_CALL(gpu, graph_add, &single->node, single->graph, NULL, 0, kernel);
	if (status == KV_OK) {
		status = KVK_GPU_CALL(gpu, graph_exec, &single->exec, single->graph, 0);
		single->exec = status == KV_OK ? single->exec : NULL;
	}
	if (status != KV_OK) {
		free_launch_graph(gpu, single);
	}

	return status;
}

/* Under the lock. NULL: there is none. */
static const kvk_gpu_launch_graph_t *launch_graph_of(kvk_gpu_t *gpu, const kvk_cu_kernel_t *kernel,
						     kvk_cu_stream_t stream)
{
	kvk_gpu_launch_graph_t made = {.stream = stream};

	if (gpu->no_launch_graphs) {
		return NULL;
	}
	for (uint32_t i = 0; i < gpu->launch_graph_count; i++) {
		if (gpu->launch_graphs[i].stream == stream) {
			return &gpu->launch_graphs[i];
		}
	}
	if (gpu->launch_graph_count == KVK_GPU_LAUNCH_GRAPHS) {
		return &gpu->launch_graphs[KVK_GPU_LAUNCH_GRAPHS - 1];
	}
	if (make_launch_graph(gpu, kernel, &made) != KV_OK) {
		give_up_graphs(gpu, kvk_gpu_last_error());
		return NULL;
	}
	gpu->launch_graphs[gpu->launch_graph_count] = made;

	return &gpu->launch_graphs[gpu->launch_graph_count++];
}

static kv_status_t start_plain(kvk_gpu_t *gpu, const kvk_cu_kernel_t *kernel, kvk_cu_stream_t stream)
{
	return KVK_GPU_CALL(gpu, launch, kernel->function, kernel->grid[0], kernel->grid[1], kernel->grid[2],
			    kernel->block[0], kernel->block[1], kernel->block[2], kernel->shared_bytes, stream,
			    kernel->params, kernel->extra);
}

static kv_status_t start_kernel(kvk_gpu_t *gpu, const kvk_cu_kernel_t *kernel, kvk_cu_stream_t stream)
{
	const kvk_gpu_launch_graph_t *single;
	kv_status_t status = KV_OK;

	pthread_mutex_lock(&gpu->launch_lock);
	single = launch_graph_of(gpu, kernel, stream);
	if (single && KVK_GPU_CALL(gpu, graph_change, single->exec, single->node, kernel) != KV_OK) {
		give_up_graphs(gpu, kvk_gpu_last_error());
		single = NULL;
	}
	if (single) {
		status = KVK_GPU_CALL(gpu, graph_launch, single->exec, stream);
	}
	pthread_mutex_unlock(&gpu->launch_lock);

	return single ? status : start_plain(gpu, kernel, stream);
}

/* ---- copies ---------------------------------------------------------------------------------- */

static uint64_t row_bits(const kvk_gpu_row_t *row)
{
	return row->pool_offset | row->pool_stride | row->cache_offset | row->cache_stride | row->cache_head |
	       row->bytes;
}

static int bulk_fits(const kvk_gpu_args_t *args, uint64_t addresses)
{
	const uint64_t bits = addresses | args->cache_stride | args->page_bytes | args->pool_head | args->pool_first |
			      args->leaf_bytes | row_bits(&args->k) | row_bits(&args->v);

	return bits % 16 == 0;
}

uint64_t kvk_gpu_count_units(const kvk_gpu_args_t *args)
{
	/* Heads x layers x pieces of one block are below 2^30: no overflow. */
	return (uint64_t)args->count * args->heads * args->layers * args->pieces;
}

/* Chunks a warp may have on their way so that all of them have no more than the window, and each has one. 0: any
 * number. */
static uint32_t chunks_in_flight(const kvk_gpu_launch_t *launch, const kvk_gpu_args_t *args, unsigned grid)
{
	const uint64_t chunk = args->leaf_bytes < KVK_CHUNK ? args->leaf_bytes : KVK_CHUNK;
	const uint64_t round = (uint64_t)grid * (KVK_GPU_THREADS / 32u) * chunk;

	return launch->max_in_flight == 0      ? 0
	       : launch->max_in_flight > round ? (uint32_t)(launch->max_in_flight / round)
					       : 1u;
}

kv_status_t kvk_gpu_launch_copy(kvk_gpu_t *gpu, const kvk_gpu_launch_t *launch, const kvk_gpu_args_t *args)
{
	const kvk_gpu_dir_t dir = launch->dir;
	const int bulk = gpu->bulk[dir] && bulk_fits(args, launch->addresses);
	const uint64_t units = kvk_gpu_count_units(args);
	const uint64_t useful = (units + KVK_GPU_THREADS / 32u - 1) / (KVK_GPU_THREADS / 32u);
	const uint64_t most = bulk ? launch->sms : (uint64_t)launch->sms * KVK_GPU_PLAIN_GRID;
	const unsigned grid = (unsigned)(useful < most ? useful : most);
	kvk_gpu_args_t by_value = *args;
	void *params[] = {&by_value};
	const kvk_cu_kernel_t kernel = {.function = bulk ? gpu->bulk[dir] : gpu->plain[dir],
					.grid = {grid, 1, 1},
					.block = {KVK_GPU_THREADS, 1, 1},
					.shared_bytes = bulk ? KVK_GPU_SHARED : 0,
					.params = params};

	by_value.ahead = chunks_in_flight(launch, args, grid);

	return start_kernel(gpu, &kernel, launch->stream);
}

kv_status_t kvk_gpu_launch_digest(kvk_gpu_t *gpu, const kvk_gpu_digest_args_t *args, kvk_cu_stream_t stream)
{
	kvk_gpu_digest_args_t by_value = *args;
	void *params[] = {&by_value};
	const kvk_cu_kernel_t kernel = {.function = gpu->digest_pieces,
					.grid = {gpu->sms_all * KVK_GPU_PLAIN_GRID, 1, 1},
					.block = {KVK_GPU_THREADS, 1, 1},
					.params = params};

	return start_kernel(gpu, &kernel, stream);
}
