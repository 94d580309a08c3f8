#include "inproc/buffer.h"

#include <stdlib.h>

struct kvx_buffered {
	struct kvx_buffered *next;
	kvc_handover_t *handover;
	uint64_t bytes;
};

int kvx_buffer_has_room(const kvx_t *kvx, uint64_t bytes)
{
	return kvx->buffered_bytes == 0 ||
	       (bytes <= kvx->max_buffered_bytes && kvx->buffered_bytes <= kvx->max_buffered_bytes - bytes);
}

void kvx_buffer_keep(kvx_t *kvx, kvc_handover_t *handover, uint64_t bytes)
{
	kvx_buffered_t *kept = malloc(sizeof *kept);

	if (!kept) {
		kvc_handover_done(handover, 0);
		return;
	}
	*kept = (kvx_buffered_t){.next = kvx->buffered, .handover = handover, .bytes = bytes};
	kvx->buffered = kept;
	kvx->buffered_bytes += bytes;
}

static void drop(kvx_t *kvx, kvx_buffered_t **link)
{
	kvx_buffered_t *kept = *link;

	*link = kept->next;
	kvx->buffered_bytes -= kept->bytes;
	kvc_handover_done(kept->handover, 0);
	free(kept);
}

void kvx_buffer_poll(kvx_t *kvx)
{
	kvx_buffered_t **link = &kvx->buffered;

	while (*link) {
		kvc_handover_info_t info = {.struct_size = sizeof info};

		kvc_handover_get_info((*link)->handover, &info);
		if (info.state == KVC_HANDOVER_COMPLETE) {
			link = &(*link)->next;
		} else {
			drop(kvx, link);
		}
	}
}

void kvx_buffer_free(kvx_t *kvx)
{
	while (kvx->buffered) {
		drop(kvx, &kvx->buffered);
	}
}
