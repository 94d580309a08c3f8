/* Hand-overs: what a request names by its keys, it hands over by them. */
#include "scheduler/handover_calls.h"
#include "scheduler/keys.h"
#include "scheduler/base/requests.h"

#include <string.h>

kvc_status_t kvx_scheduler_send_chunk(kvx_scheduler_t *scheduler, const kvx_ask_t *ask,
				      const kvc_handover_chunk_t *chunk, kvc_handover_t **p_handover)
{
	const kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);
	kvc_handover_chunk_t named = *chunk;
	kvx_key_view_t view;
	uint32_t units;

	if (!request) {
		return KVC_ERR_ARG;
	}
	units = chunk->n + (chunk->partial > 0);
	kvx_key_view_init(scheduler, ask, request, units * scheduler->unit, &view);
	if (view.n < units) {
		return KVC_ERR_STALE_EPOCH;
	}
	named.source = &view.source;

	return kvc_handover_send(scheduler->spaces[request->space].space, &named, p_handover);
}

kvc_status_t kvx_handover_receive(kvc_space_t *space, const kvc_fetch_t *from, kvc_handover_t **p_handover)
{
	return from->peer ? kvc_handover_fetch(space, from, p_handover)
			  : kvc_handover_recv(space, from->transfer, from->timeout_ms, p_handover);
}

kvc_status_t kvx_scheduler_recv(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvc_fetch_t *from,
				kvc_handover_t **p_handover)
{
	const kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);

	return request ? kvx_handover_receive(scheduler->spaces[request->space].space, from, p_handover) : KVC_ERR_ARG;
}

kvc_status_t kvx_scheduler_get_root(const kvx_scheduler_t *scheduler, uint8_t root[32])
{
	kvc_space_info_t info = {.struct_size = sizeof info};

	if (!scheduler->spaces[0].open) {
		return KVC_ERR_UNREACHABLE;
	}
	kvc_space_get_info(scheduler->spaces[0].space, &info);
	memcpy(root, info.root, sizeof info.root);

	return KVC_OK;
}

void kvx_scheduler_restart_saving(kvx_scheduler_t *scheduler, const kvx_ask_t *ask)
{
	kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);

	if (request) {
		request->generation = 0;
	}
}
