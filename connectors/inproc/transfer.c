/* The id that both sides make of a prompt is "prefix-", the key of its last whole block in hexadecimal digits, and "+"
 * with a hash of the tokens after it, if there are any. */
#include "inproc/transfer.h"
#include "scheduler/handover.h"

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

static kvc_status_t make_name(const kvx_job_t *job, const uint32_t *rest, uint32_t n_rest, char *name)
{
	const uint32_t whole = job->n_tokens / job->kvx->block_tokens;
	char *at = name + snprintf(name, KVC_MAX_TRANSFER, "prefix-");
	uint8_t digest[32];
	kvc_key_t key;

	if (whole == 0 || kvx_scheduler_get_key(job->kvx->scheduler, &job->ask, whole - 1u, &key) != KVC_OK) {
		return KVC_ERR_ARG;
	}
	at = append_hex(at, key.b, sizeof key.b);
	if (n_rest > 0) {
		kv_sha256(rest, n_rest * sizeof *rest, digest);
		*at++ = '+';
		(void)append_hex(at, digest, sizeof key.b);
	}

	return KVC_OK;
}

kvc_status_t kvx_transfer_begin(const kvx_job_t *job, const char *transfer, const uint32_t *tokens, char *name)
{
	const uint32_t n_rest = job->n_tokens % job->kvx->block_tokens;
	const uint32_t *rest = tokens + job->n_tokens - n_rest;
	const size_t len = transfer ? strnlen(transfer, KVC_MAX_TRANSFER + 1u) : 0;
	kvc_status_t status = KVC_OK;

	if (!transfer) {
		status = make_name(job, rest, n_rest, name);
	} else if (len == 0 || len > KVC_MAX_TRANSFER) {
		status = KVC_ERR_ARG;
	} else {
		memcpy(name, transfer, len + 1u);
	}
	if (status == KVC_OK && n_rest > 0) {
		status = kvx_scheduler_add_private(job->kvx->scheduler, &job->ask, name, rest, n_rest);
	}

	return status;
}
