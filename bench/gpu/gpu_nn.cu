// gpu_nn: the operations of a layer on a GPU (kvk/nn.h); a program of the harness (bench.h). Families by the
// files nn_*.cu. Exit status 77: there is no GPU.
#include "gpu_nn.h"

#include <algorithm>

nn_rig nn_device;

const char *nn_open()
{
	const char *why = "no device";
	const kvk_cuda_ops_t *cuda = kvk_cuda_load(&why);
	kvk_gpu_config_t config = {};
	int count = 0;

	if (nn_device.nn) {
		return nullptr;
	}
	if (!cuda || cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
		return why;
	}
	config.cuda = cuda;
	nn_must(kvk_gpu_open(&config, &nn_device.gpu));
	CU(cudaSetDevice(0));
	CU(cudaStreamCreateWithFlags(&nn_device.stream, cudaStreamNonBlocking));
	nn_must(kvk_nn_twin_open(&nn_device.twin));
	nn_must(kvk_nn_gpu_open(nn_device.gpu, 0, &nn_device.nn));
	printf("# %s\n", kvk_gpu_describe(nn_device.gpu));

	return nullptr;
}

double nn_time(const std::function<void()> &enqueue, int times, int rounds)
{
	std::vector<double> seconds;
	cudaEvent_t begin, end;
	float ms;

	CU(cudaEventCreate(&begin));
	CU(cudaEventCreate(&end));
	enqueue();
	for (int r = 0; r < rounds; r++) {
		CU(cudaEventRecord(begin, nn_device.stream));
		for (int i = 0; i < times; i++) {
			enqueue();
		}
		CU(cudaEventRecord(end, nn_device.stream));
		CU(cudaEventSynchronize(end));
		CU(cudaEventElapsedTime(&ms, begin, end));
		seconds.push_back(ms / 1e3 / times);
	}
	CU(cudaEventDestroy(begin));
	CU(cudaEventDestroy(end));
	std::sort(seconds.begin(), seconds.end());

	return seconds[seconds.size() / 2];
}

double nn_distance(const std::vector<float> &a, const std::vector<float> &b)
{
	double difference = 0, norm = 0;

	for (size_t i = 0; i < b.size(); i++) {
		difference += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
		norm += (double)b[i] * b[i];
	}

	return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

std::vector<float> nn_floats(const std::vector<kvk_bf16_t> &from)
{
	std::vector<float> to(from.size());

	for (size_t i = 0; i < from.size(); i++) {
		to[i] = kvk_bf16_to_float(from[i]);
	}

	return to;
}

std::vector<kvk_bf16_t> nn_random(size_t n, float deviation, uint64_t seed)
{
	std::mt19937_64 rng(seed);
	std::normal_distribution<float> normal(0, deviation);
	std::vector<kvk_bf16_t> to(n);

	for (kvk_bf16_t &value : to) {
		value = kvk_bf16_round(normal(rng));
	}

	return to;
}

extern "C" const bench_t bench_list[] = {
	{"product-right", nn_product_right, 0, "products on a GPU", "the twin on the CPU", "relative L2 <= 1e-2, rows invariant"},
	{"attention-right", nn_attention_right, 0, "attention on a GPU", "the twin on the CPU", "relative L2 <= 1e-2, rows invariant"},
	{"rows-right", nn_rows_right, 0, "norms, rotation, router, choice and drawn weights on a GPU", "the twin on the CPU", "relative L2 <= 1e-2, choices equal"},
	{"product", nn_product_speed, 0, "grouped and dense products", "the device's bounds, cuBLAS", "ratio >= 0.75"},
	{"attention", nn_attention_speed, 0, "attention of prompts and of single tokens", "the device's bounds", "ratio >= 0.6, 0.8"},
	{},
};
