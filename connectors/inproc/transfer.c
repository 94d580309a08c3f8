/* The id that both sides make of a prompt is "prefix-", the key of its last whole block in hexadecimal digits, and "+"
 * with a hash of the tokens after it, if there are any. Without a whole block the hash of the salt is in its place. */
#include "inproc/transfer.h"
#include "scheduler/handover_calls.h"

#include "kv/key.h"

#include <stdio.h>
#include <string.h>

static char *append_hex(char *at, const uint8_t *bytes, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		at += snprintf(at, 3, "%02x", bytes[i]);
	}

	return at;
}

static void make_name(const kvx_job_t *job, const kvx_prefix_t *prompt, char *name)
{
	const uint32_t unit = job->kvx->block_tokens, whole = job->n_tokens / unit, rest = job->n_tokens % unit;
	const char *salt = prompt->salt ? prompt->salt : "";
	char *at = name + snprintf(name, KVC_MAX_TRANSFER, "prefix-");
	uint8_t digest[32];
	kvc_key_t key;

	if (whole == 0 || kvx_scheduler_get_key(job->kvx->scheduler, &job->ask, whole - 1u, &key) != KVC_OK) {
		kv_sha256(salt, strlen(salt), digest);
		memcpy(key.b, digest, sizeof key.b);
	}
	at = append_hex(at, key.b, sizeof key.b);
	if (rest > 0) {
		kv_sha256(prompt->tokens + job->n_tokens - rest, rest * sizeof *prompt->tokens, digest);
		*at++ = '+';
		(void)append_hex(at, digest, sizeof key.b);
	}
}

kvc_status_t kvx_transfer_begin(const kvx_job_t *job, const kvx_prefix_t *prompt, const char *transfer, char *name)
{
	const uint32_t rest = job->n_tokens % job->kvx->block_tokens;
	const size_t len = transfer ? strnlen(transfer, KVC_MAX_TRANSFER + 1u) : 0;

	if (!transfer) {
		make_name(job, prompt, name);
	} else if (len == 0 || len > KVC_MAX_TRANSFER) {
		return KVC_ERR_ARG;
	} else {
		memcpy(name, transfer, len + 1u);
	}

	return rest > 0 ? kvx_scheduler_add_private(job->kvx->scheduler, &job->ask, name,
						    prompt->tokens + job->n_tokens - rest, rest)
			: KVC_OK;
}
