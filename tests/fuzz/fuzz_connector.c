/* The JSON form of a connector's configuration. What is refused changes nothing and says why; what is accepted has
 * fields within their bounds. */
#include "kv_test.h"

#include "kvx_factory.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	kvx_connector_config_t before, config;

	kvx_connector_config_init(&before);
	memcpy(&config, &before, sizeof config);
	if (kvx_connector_config_read((const char *)data, size, &config) != KVC_OK) {
		kv_assert(memcmp(&config, &before, sizeof config) == 0);
		kv_assert(kvx_last_error()[0] != '\0');
		return 0;
	}
	kv_assert(config.struct_size == sizeof config);
	kv_assert(config.roles >= KVX_PRODUCER && config.roles <= KVX_BOTH);
	kv_assert(config.rank <= 65535 && config.parallel_size >= 1 && config.parallel_size <= 65536);
	kv_assert(config.port >= 1 && config.port <= 65535 && config.buffer_size >= 1);
	kv_assert(strnlen(config.connector, sizeof config.connector) < sizeof config.connector);
	kv_assert(strnlen(config.socket, sizeof config.socket) < sizeof config.socket);
	kv_assert(strcmp(config.buffer_device, "cpu") == 0 || strcmp(config.buffer_device, "cuda") == 0);

	return 0;
}
