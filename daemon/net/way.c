/* How bytes go to a peer. */
#include "net/net.h"

int kvd_net_has_way(const kvd_inbound_t *to)
{
	return to->ep || to->stream;
}

kv_status_t kvd_net_push(kvd_inbound_t *to, const kvd_envelope_t *envelope, const struct iovec *runs, uint32_t count,
			 void *object)
{
	return to->ep ? kvd_ucx_push(to->ep, envelope, runs, count, object)
		      : kvd_stream_push(to->stream, envelope, runs, count, object);
}
