#include "inproc/transfer.h"

#include <stdio.h>
#include <string.h>

kvc_status_t kvx_transfer_name(const kvx_job_t *job, const char *transfer, char *name)
{
	const size_t len = transfer ? strnlen(transfer, KVC_MAX_TRANSFER + 1u) : 0;
	kvc_key_t key;
	int at;

	if (transfer) {
		if (len == 0 || len > KVC_MAX_TRANSFER) {
			return KVC_ERR_ARG;
		}
		memcpy(name, transfer, len + 1u);
		return KVC_OK;
	}
	if (kvx_scheduler_get_key(job->kvx->scheduler, &job->ask, job->cap - 1u, &key) != KVC_OK) {
		return KVC_ERR_ARG;
	}
	at = snprintf(name, KVC_MAX_TRANSFER, "%s", KVX_TRANSFER_OF_KEY);
	for (size_t i = 0; i < sizeof key.b; i++) {
		at += snprintf(name + at, 3, "%02x", key.b[i]);
	}

	return KVC_OK;
}
