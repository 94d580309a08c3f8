#include "daemon/host.h"

#include "kvs/pool.h"

#include <stdlib.h>

static kvd_setup_t setup_;

static void namespace_make(kvd_host_t *host, uint32_t i, const char *word, size_t len)
{
	kvd_namespace_t *ns = &host->namespaces[i];

	memcpy(ns->name, word, len);
	ns->index = i;
	ns->source.fd = -1;
	kv_assert(kvd_shm_region_create("mirror", kvd_mirror_bytes(&host->core_config), KVD_SHM_REGION_DAEMON,
					&ns->mirror) == KV_OK);
	kv_assert(kvd_namespace_add(host->core, ns->name, ns->mirror.base, &ns->id) == KV_OK);
}

kvd_host_t *host_make(const kv_env_t *env, const char *namespaces)
{
	static const char *const args[] = {"--cpu.size=4MiB",        "--cpu.slab_size=1MiB", "--cpu.prefault=off",
					   "--cpu.huge_pages=off",   "--http.listen=off",    "--log.level=error",
					   "--index.max_blocks=1024"};
	char *argv[KV_COUNT_OF(args) + 2] = {"kvd"}, *none[] = {NULL}, detail[256];
	kvd_host_t *host = calloc(1, sizeof *host);
	kv_option_error_t error;
	const char *word;
	size_t len;

	for (size_t i = 0; i < KV_COUNT_OF(args); i++) {
		argv[i + 1] = (char *)(uintptr_t)args[i];
	}
	kv_assert(host && kvd_setup_read((int)KV_COUNT_OF(args) + 1, argv, none, &setup_, &error) == KV_OK);
	kv_log_set_level(KV_LOG_ERROR);
	host->setup = &setup_;
	host->options = &setup_.options;
	host->env = env;
	host->incarnation = 1;
	host->to_keeper.fd = -1;
	host->frame = malloc(KVD_FRAME_SCRATCH);
	host->text = malloc(KVD_TEXT_SCRATCH);
	kv_assert(host->frame && host->text);
	kv_assert(kvd_world_open(host, detail, sizeof detail) == KV_OK);
	kv_assert(kvd_world_create_core(host, detail, sizeof detail) == KV_OK);
	kv_assert(kvd_loop_init(host) == KV_OK);
	while (kvd_list_word(namespaces, host->namespace_count, &word) > 0) {
		host->namespace_count++;
	}
	host->part = (kvd_part_t){UINT32_MAX, UINT32_MAX, UINT32_MAX, setup_.options.limits_receive};
	host->namespaces = calloc(host->namespace_count, sizeof *host->namespaces);
	kv_assert(host->namespaces);
	for (uint32_t i = 0; i < host->namespace_count; i++) {
		len = kvd_list_word(namespaces, i, &word);
		namespace_make(host, i, word, len);
	}
	kv_assert(kvd_core_recover(host->core) == KV_OK);

	return host;
}
