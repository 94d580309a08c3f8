/* Built without UCX's headers: the net process connects to peers and bytes come over TLS. There is never a
 * kvd_ucx_t, and so nothing else of ucx.h happens. */
#include "net/ucx/ucx.h"

#include <stdio.h>

kv_status_t kvd_ucx_open(const kvd_ucx_config_t *config, kvd_ucx_t **p_ucx, char *why, size_t cap)
{
	(void)config;
	(void)p_ucx;
	snprintf(why, cap, "this kvd-net was built without UCX (libucx-dev)");

	return KV_ERR_UNSUPPORTED;
}

kv_status_t kvd_ucx_admit(kvd_ucx_t *ucx, const kvd_address_t *addresses, uint32_t count)
{
	(void)ucx;
	(void)addresses;
	(void)count;

	return KV_ERR_UNSUPPORTED;
}

const char *kvd_ucx_version(const kvd_ucx_t *ucx)
{
	(void)ucx;

	return "";
}

kv_slice_t kvd_ucx_address(const kvd_ucx_t *ucx)
{
	(void)ucx;

	return (kv_slice_t){NULL, 0};
}

int kvd_ucx_fd(const kvd_ucx_t *ucx)
{
	(void)ucx;

	return -1;
}

int kvd_ucx_arm(kvd_ucx_t *ucx)
{
	(void)ucx;

	return 1;
}

int kvd_ucx_progress(kvd_ucx_t *ucx)
{
	(void)ucx;

	return 0;
}

kv_status_t kvd_ucx_connect(kvd_ucx_t *ucx, kv_slice_t address, kvd_ucx_ep_t **p_ep)
{
	(void)ucx;
	(void)address;
	(void)p_ep;

	return KV_ERR_UNSUPPORTED;
}

void kvd_ucx_disconnect(kvd_ucx_ep_t *ep)
{
	(void)ep;
}

int kvd_ucx_is_broken(const kvd_ucx_ep_t *ep)
{
	(void)ep;

	return 1;
}

kv_status_t kvd_ucx_push(kvd_ucx_ep_t *ep, const kvd_envelope_t *envelope, const struct iovec *runs, uint32_t count,
			 void *object)
{
	(void)ep;
	(void)envelope;
	(void)runs;
	(void)count;
	(void)object;

	return KV_ERR_UNSUPPORTED;
}
