/* What the caller configures, copied once: the attachment outlives the caller's strings. */
#include "impl.h"

#include "base/config.h"

#include "kv/system.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define KVC_DEFAULT_SOCKET         "/run/kvd/default.sock"
#define KVC_DEFAULT_TIMEOUT_MS     5000u
#define KVC_DEFAULT_SPIN_US        200u
#define KVC_DEFAULT_STAGING_BLOCKS 8192u

static kvc_status_t copy_text(const char *what, const char *text, char *out, size_t cap)
{
	int n = snprintf(out, cap, "%s", text);

	if (n < 0 || (size_t)n >= cap) {
		return kvc_fail(KV_ERR_ARG, "%s \"%.40s...\" is too long: at most %zu bytes", what, text, cap - 1);
	}

	return KVC_OK;
}

static kvc_status_t take_instance(kvc_t *kvc, const kvc_config_t *config)
{
	uint8_t random[16];

	if (config->instance) {
		if (!config->secret || config->secret_len < 16 || config->secret_len > sizeof kvc->secret) {
			return kvc_fail(KV_ERR_ARG, "instance %s has a secret of %u bytes; it must have 16 to 32",
					config->instance, config->secret ? config->secret_len : 0u);
		}
		memcpy(kvc->secret, config->secret, config->secret_len);
		kvc->secret_len = config->secret_len;
		return copy_text("instance id", config->instance, kvc->instance, sizeof kvc->instance);
	}

	kv_random(&kvc->env, random, sizeof random);
	for (unsigned i = 0; i < sizeof random; i++) {
		snprintf(kvc->instance + 2u * (size_t)i, 3, "%02x", random[i]);
	}
	kv_random(&kvc->env, kvc->secret, sizeof kvc->secret);
	kvc->secret_len = sizeof kvc->secret;

	return KVC_OK;
}

static const char *socket_of(const kvc_config_t *config)
{
	const char *from_env = secure_getenv("KVD_SOCKET");

	if (config->socket) {
		return config->socket;
	}

	return from_env && *from_env ? from_env : KVC_DEFAULT_SOCKET;
}

kvc_status_t kvc_config_take(kvc_t *kvc, const kvc_config_t *given, kvc_config_t *config)
{
	uint64_t words;
	kvc_status_t status;

	if (!given || given->struct_size < offsetof(kvc_config_t, instance)) {
		return kvc_fail(KV_ERR_ARG, "kvc_config_t.struct_size is not set");
	}
	kv_struct_read(config, given, sizeof *config);
	if (config->role > KVC_ROLE_MATCH || config->rank > 65535u) {
		return kvc_fail(KV_ERR_ARG, "role %u or rank %u is out of range", config->role, config->rank);
	}

	if (config->map_device && !config->unmap_device) {
		return kvc_fail(KV_ERR_ARG, "map_device is set, and unmap_device is not");
	}

	status = copy_text("socket path", socket_of(config), kvc->socket, sizeof kvc->socket);
	if (status == KVC_OK) {
		status = copy_text("program name", config->program ? config->program : program_invocation_short_name,
				   kvc->program, sizeof kvc->program);
	}
	if (status == KVC_OK && kv_random_check(&kvc->env) != KV_OK) {
		status = kvc_fail(KV_ERR_REFUSED, KV_RANDOM_REFUSED);
	}
	if (status == KVC_OK) {
		status = take_instance(kvc, config);
	}
	if (status != KVC_OK) {
		return status;
	}

	kv_random(&kvc->env, &kvc->attachment, sizeof kvc->attachment);
	kvc->role = config->role;
	kvc->rank = config->rank;
	kvc->observe = config->observe;
	kvc->on_memory = config->on_memory;
	kvc->memory_ctx = config->memory_ctx;
	kvc->map_device = config->map_device;
	kvc->unmap_device = config->unmap_device;
	kvc->timeout_ns = (config->timeout_ms ? config->timeout_ms : KVC_DEFAULT_TIMEOUT_MS) * KVC_NS_A_MS;
	kvc->most_spin_ns = (config->spin_us ? config->spin_us : KVC_DEFAULT_SPIN_US) * UINT64_C(1000);
	if (config->spin_us == UINT32_MAX) {
		kvc->most_spin_ns = 0;
	}
	words = (uint64_t)(config->staging_blocks ? config->staging_blocks : KVC_DEFAULT_STAGING_BLOCKS) *
		KVC_STAGING_WORDS_A_BLOCK;
	kvc->staging_words = (uint32_t)(words < KVC_MAX_STAGING_WORDS ? words : KVC_MAX_STAGING_WORDS);

	return KVC_OK;
}
