#include "connectors/worker/wr_device.h"

#include <stdlib.h>
#include <unistd.h>

void wr_device_start(uint64_t seed)
{
	(void)seed;
}

void wr_device_stop(void)
{
}

void wr_device_leave(void)
{
}

uint8_t *wr_device_alloc(size_t bytes)
{
	return calloc(1, bytes);
}

void wr_device_free(uint8_t *memory)
{
	free(memory);
}

void wr_device_config(kvx_worker_config_t *config)
{
	config->memory = KVX_MEMORY_HOST;
}

const kvx_device_t *wr_device_front(void)
{
	return NULL;
}

void wr_device_set_stream(kvx_worker_t *worker, int second)
{
	(void)worker;
	(void)second;
}

void wr_device_call(void (*call)(void *args), void *args)
{
	call(args);
	free(args);
}

void wr_device_take(uint64_t ns)
{
	usleep((useconds_t)(ns / 1000u));
}

void wr_device_hold(int held)
{
	(void)held;
}

void wr_device_cost(uint64_t ns)
{
	(void)ns;
}

int wr_device_runs_behind(void)
{
	return 0;
}

void wr_device_sync(void)
{
}

int wr_device_fail(uint64_t nth)
{
	(void)nth;

	return 0;
}

void wr_device_refuse_orders(int refuse)
{
	(void)refuse;
}

void wr_device_trace(const char *what, uint32_t a, uint32_t b)
{
	(void)what;
	(void)a;
	(void)b;
}

void wr_device_print_trace(void)
{
}
