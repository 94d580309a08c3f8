/* UCX through dlopen: see ucx.h. */
#include "base/address.h"
#include "net/ucx/admission.h"
#include "net/ucx/ucx.h"
#include "net/ucx/worker_address.h"

#include "kv/env.h"
#include "kv/log.h"

#include <dlfcn.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>

#define AM_ID 7u /* of our messages */

#define UCP_FUNCTIONS(X)                                                                                               \
	X(ucp_am_recv_data_nbx)                                                                                        \
	X(ucp_am_send_nbx)                                                                                             \
	X(ucp_cleanup)                                                                                                 \
	X(ucp_config_modify)                                                                                           \
	X(ucp_config_read)                                                                                             \
	X(ucp_config_release)                                                                                          \
	X(ucp_ep_close_nbx)                                                                                            \
	X(ucp_ep_create)                                                                                               \
	X(ucp_get_version_string)                                                                                      \
	X(ucp_init_version)                                                                                            \
	X(ucp_request_check_status)                                                                                    \
	X(ucp_request_free)                                                                                            \
	X(ucp_worker_arm)                                                                                              \
	X(ucp_worker_create)                                                                                           \
	X(ucp_worker_destroy)                                                                                          \
	X(ucp_worker_get_address)                                                                                      \
	X(ucp_worker_get_efd)                                                                                          \
	X(ucp_worker_progress)                                                                                         \
	X(ucp_worker_release_address)                                                                                  \
	X(ucp_worker_set_am_recv_handler)

/* The library's functions. */
static struct {
#define POINTER(name) __typeof__(name) *name;
	UCP_FUNCTIONS(POINTER)
#undef POINTER
	__typeof__(ucs_status_string) *ucs_status_string;
} ucp;

struct kvd_ucx {
	kvd_ucx_config_t config;
	ucp_context_h context;
	ucp_worker_h worker;
	ucp_address_t *address;
	size_t address_len;
	int fd;
	kvd_admission_t ports;
	kvd_ucx_ep_t *closing; /* endpoints whose close is under way */
};

struct kvd_ucx_ep {
	kvd_ucx_t *ucx;
	kvd_ucx_ep_t *next;
	ucp_ep_h ep;
	void *close; /* request */
	uint32_t pushes;
	int broken;
};

typedef struct push {
	kvd_ucx_ep_t *ep;
	void *object;
	kvd_envelope_t envelope;
	ucp_dt_iov_t runs[];
} push_t;

typedef struct landing {
	kvd_ucx_t *ucx;
	void *object;
} landing_t;

/* ---- the library ----------------------------------------------------------------------------- */

static kv_status_t load_library(char *why, size_t cap)
{
	/* UCX need not watch this process's memory, nor catch its signals; what fails is said by us. Segments of TCP
	 * are larger than 8 KiB, and smaller than the 64 KiB that each peer can receive. */
	static const char *const settings[][2] = {{"UCX_MEM_EVENTS", "n"},
						  {"UCX_HANDLE_ERRORS", "none"},
						  {"UCX_WARN_UNUSED_ENV_VARS", "n"},
						  {"UCX_LOG_LEVEL", "fatal"},
						  {"UCX_TCP_TX_SEG_SIZE", "56K"}};
	void *library, *services;

	for (size_t i = 0; i < KV_COUNT_OF(settings); i++) {
		(void)setenv(settings[i][0], settings[i][1], 0);
	}
	library = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
	services = library ? dlopen("libucs.so.0", RTLD_NOW | RTLD_LOCAL) : NULL;
	if (!services) {
		snprintf(why, cap, "UCX is not installed: %s", dlerror());
		return KV_ERR_UNSUPPORTED;
	}
#define LOOK_UP(name)                                                                                                  \
	ucp.name = (__typeof__(ucp.name))(uintptr_t)dlsym(library, #name);                                             \
	if (!ucp.name) {                                                                                               \
		snprintf(why, cap, "this UCX has no %s; 1.13 or newer is needed", #name);                              \
		return KV_ERR_UNSUPPORTED;                                                                             \
	}
	UCP_FUNCTIONS(LOOK_UP)
#undef LOOK_UP
	ucp.ucs_status_string = (__typeof__(ucp.ucs_status_string))(uintptr_t)dlsym(services, "ucs_status_string");

	return ucp.ucs_status_string ? KV_OK : KV_ERR_UNSUPPORTED;
}

/* The network device that has this address. */
static kv_status_t find_device(const char *address, char out[IF_NAMESIZE], char *why, size_t cap)
{
	const kvd_address_t want = kvd_address_parse(address);
	struct ifaddrs *all;
	kv_status_t status = KV_ERR_CONFIG;

	if (getifaddrs(&all) != 0) {
		snprintf(why, cap, "cannot list network devices (AF_NETLINK): %s", strerror(errno));
		return KV_ERR_CONFIG;
	}
	snprintf(why, cap, "no network device has the address %s", address);
	for (const struct ifaddrs *at = all; at; at = at->ifa_next) {
		const kvd_address_t has = kvd_address_of(at->ifa_addr);

		if (kvd_address_equal(&has, &want)) {
			snprintf(out, IF_NAMESIZE, "%s", at->ifa_name);
			status = KV_OK;
			break;
		}
	}
	freeifaddrs(all);

	return status;
}

/* ---- what arrives ---------------------------------------------------------------------------- */

static kv_status_t status_of(ucs_status_t status)
{
	return status == UCS_OK ? KV_OK : status == UCS_ERR_NO_MEMORY ? KV_ERR_NOMEM : KV_ERR_CLOSED;
}

static void finish_landing(landing_t *landing, ucs_status_t status)
{
	landing->ucx->config.ops->landed(landing->ucx->config.ctx, landing->object, status_of(status));
	free(landing);
}

static void on_landed(void *request, ucs_status_t status, size_t length, void *arg)
{
	(void)length;
	ucp.ucp_request_free(request);
	finish_landing(arg, status);
}

static ucs_status_t on_message(void *arg, const void *header, size_t header_len, void *data, size_t len,
			       const ucp_am_recv_param_t *from)
{
	kvd_ucx_t *ucx = arg;
	kvd_envelope_t envelope;
	ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
				     .cb.recv_am = on_landed};
	landing_t *landing;
	void *memory, *request;

	if (header_len != sizeof envelope) {
		return UCS_OK;
	}
	landing = calloc(1, sizeof *landing);
	memcpy(&envelope, header, sizeof envelope);
	memory = landing ? ucx->config.ops->land(ucx->config.ctx, &envelope, len, &landing->object) : NULL;
	if (!memory) {
		free(landing);
		return UCS_OK;
	}
	landing->ucx = ucx;
	if (!(from->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
		memcpy(memory, data, len);
		finish_landing(landing, UCS_OK);
		return UCS_OK;
	}
	param.user_data = landing;
	request = ucp.ucp_am_recv_data_nbx(ucx->worker, data, memory, len, &param);
	if (!UCS_PTR_IS_PTR(request)) {
		finish_landing(landing, UCS_PTR_STATUS(request));
	}

	return UCS_OK; /* the library knows that the receive has begun */
}

/* ---- the worker ------------------------------------------------------------------------------ */

static ucs_status_t create_context(kvd_ucx_t *ucx, const char *device)
{
	const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
				     .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
				     .name = "kvd-net"};
	ucp_config_t *config;
	ucs_status_t status = ucp.ucp_config_read(NULL, NULL, &config);

	if (status != UCS_OK) {
		return status;
	}
	status = ucp.ucp_config_modify(config, "TLS", ucx->config.transports);
	if (status == UCS_OK) {
		status = ucp.ucp_config_modify(config, "NET_DEVICES", device);
	}
	if (status == UCS_OK) {
		status = ucp.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &ucx->context);
	}
	ucp.ucp_config_release(config);

	return status;
}

static ucs_status_t create_worker(kvd_ucx_t *ucx)
{
	const ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
					    .thread_mode = UCS_THREAD_MODE_SINGLE};
	const ucp_am_handler_param_t handler = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID |
							      UCP_AM_HANDLER_PARAM_FIELD_CB |
							      UCP_AM_HANDLER_PARAM_FIELD_ARG,
						.id = AM_ID,
						.cb = on_message,
						.arg = ucx};
	kvd_admission_t others;
	ucs_status_t status;

	kvd_admission_find(NULL, &others);
	status = ucp.ucp_worker_create(ucx->context, &params, &ucx->worker);
	kvd_admission_find(&others, &ucx->ports);
	(void)kvd_ucx_admit(ucx, NULL, 0); /* nobody, until it is known who */
	if (status == UCS_OK) {
		status = ucp.ucp_worker_set_am_recv_handler(ucx->worker, &handler);
	}
	if (status == UCS_OK) {
		status = ucp.ucp_worker_get_address(ucx->worker, &ucx->address, &ucx->address_len);
	}

	return status == UCS_OK ? ucp.ucp_worker_get_efd(ucx->worker, &ucx->fd) : status;
}

/* What of it there is, when it does not start. */
static void destroy(kvd_ucx_t *ucx)
{
	if (ucx->address) {
		ucp.ucp_worker_release_address(ucx->worker, ucx->address);
	}
	if (ucx->worker) {
		ucp.ucp_worker_destroy(ucx->worker);
	}
	if (ucx->context) {
		ucp.ucp_cleanup(ucx->context);
	}
	free(ucx);
}

kv_status_t kvd_ucx_open(const kvd_ucx_config_t *config, kvd_ucx_t **p_ucx, char *why, size_t cap)
{
	char device[IF_NAMESIZE];
	kvd_ucx_t *ucx;
	ucs_status_t result;
	kv_status_t status = load_library(why, cap);

	if (status == KV_OK) {
		status = find_device(config->address, device, why, cap);
	}
	if (status != KV_OK) {
		return status;
	}
	ucx = calloc(1, sizeof *ucx);
	if (!ucx) {
		return KV_ERR_NOMEM;
	}
	ucx->config = *config;
	ucx->fd = -1;
	result = create_context(ucx, device);
	if (result == UCS_OK) {
		result = create_worker(ucx);
	}
	if (result == UCS_OK && kvd_ucx_address_check((kv_slice_t){NULL, 0}, kvd_ucx_address(ucx)) == KV_ERR_PROTO) {
		snprintf(why, cap, "UCX %s makes addresses of another format than 1", ucp.ucp_get_version_string());
		destroy(ucx);
		return KV_ERR_UNSUPPORTED;
	}
	if (result != UCS_OK) {
		snprintf(why, cap, "UCX %s does not start with transports %s on %s: %s", ucp.ucp_get_version_string(),
			 config->transports, device, ucp.ucs_status_string(result));
		destroy(ucx);
		return KV_ERR_IO;
	}
	*p_ucx = ucx;

	return KV_OK;
}

static void reap_closed(kvd_ucx_t *ucx)
{
	kvd_ucx_ep_t **at = &ucx->closing;

	while (*at) {
		kvd_ucx_ep_t *ep = *at;

		if (ep->close && ucp.ucp_request_check_status(ep->close) == UCS_INPROGRESS) {
			at = &ep->next;
			continue;
		}
		if (ep->close) {
			ucp.ucp_request_free(ep->close);
			ep->close = NULL;
		}
		if (ep->pushes > 0) {
			at = &ep->next;
			continue;
		}
		*at = ep->next;
		free(ep);
	}
}

kv_status_t kvd_ucx_admit(kvd_ucx_t *ucx, const kvd_address_t *addresses, uint32_t count)
{
	return kvd_admission_set(&ucx->ports, addresses, count);
}

const char *kvd_ucx_version(const kvd_ucx_t *ucx)
{
	return ucx ? ucp.ucp_get_version_string() : "";
}

kv_slice_t kvd_ucx_address(const kvd_ucx_t *ucx)
{
	return (kv_slice_t){(const uint8_t *)ucx->address, (uint32_t)ucx->address_len};
}

int kvd_ucx_fd(const kvd_ucx_t *ucx)
{
	return ucx->fd;
}

int kvd_ucx_arm(kvd_ucx_t *ucx)
{
	return ucp.ucp_worker_arm(ucx->worker) == UCS_OK;
}

int kvd_ucx_progress(kvd_ucx_t *ucx)
{
	int did = ucp.ucp_worker_progress(ucx->worker) != 0;

	if (ucx->closing) {
		reap_closed(ucx);
	}

	return did;
}

/* ---- endpoints ------------------------------------------------------------------------------- */

static void on_broken(void *arg, ucp_ep_h handle, ucs_status_t status)
{
	kvd_ucx_ep_t *ep = arg;

	(void)handle;
	ep->broken = 1;
	kv_log(KV_LOG_INFO, "net", "a UCX connection has broken: error \"%s\"", ucp.ucs_status_string(status));
}

kv_status_t kvd_ucx_connect(kvd_ucx_t *ucx, kv_slice_t address, kvd_ucx_ep_t **p_ep)
{
	kv_status_t status = kvd_ucx_address_check(kvd_ucx_address(ucx), address);
	kvd_ucx_ep_t *ep = status == KV_OK ? calloc(1, sizeof *ep) : NULL;
	const ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
						      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
						      UCP_EP_PARAM_FIELD_ERR_HANDLER,
					.address = (const ucp_address_t *)(const void *)address.data,
					.err_mode = UCP_ERR_HANDLING_MODE_PEER,
					.err_handler = {.cb = on_broken, .arg = ep}};
	ucs_status_t result;

	if (!ep) {
		return status == KV_OK ? KV_ERR_NOMEM : status;
	}
	ep->ucx = ucx;
	result = ucp.ucp_ep_create(ucx->worker, &params, &ep->ep);
	if (result != UCS_OK) {
		free(ep);
		return result == UCS_ERR_NO_MEMORY ? KV_ERR_NOMEM : KV_ERR_UNREACHABLE;
	}
	*p_ep = ep;

	return KV_OK;
}

void kvd_ucx_disconnect(kvd_ucx_ep_t *ep)
{
	const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
	void *request;

	if (!ep) {
		return;
	}
	ep->broken = 1;
	request = ucp.ucp_ep_close_nbx(ep->ep, &param);
	ep->close = UCS_PTR_IS_PTR(request) ? request : NULL;
	ep->next = ep->ucx->closing;
	ep->ucx->closing = ep;
}

int kvd_ucx_is_broken(const kvd_ucx_ep_t *ep)
{
	return ep->broken;
}

static void finish_push(push_t *push, ucs_status_t status)
{
	const kvd_ucx_config_t *config = &push->ep->ucx->config;

	push->ep->pushes--;
	config->ops->pushed(config->ctx, push->object, status_of(status));
	free(push);
}

static void on_pushed(void *request, ucs_status_t status, void *arg)
{
	ucp.ucp_request_free(request);
	finish_push(arg, status);
}

kv_status_t kvd_ucx_push(kvd_ucx_ep_t *ep, const kvd_envelope_t *envelope, const struct iovec *runs, uint32_t count,
			 void *object)
{
	push_t *push;
	ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
						     UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_DATATYPE,
				     .flags = UCP_AM_SEND_FLAG_RNDV,
				     .datatype = count == 1 ? ucp_dt_make_contig(1) : ucp_dt_make_iov(),
				     .cb.send = on_pushed};
	void *request;

	if (ep->broken) {
		return KV_ERR_CLOSED;
	}
	push = calloc(1, sizeof *push + count * sizeof push->runs[0]);
	if (!push) {
		return KV_ERR_NOMEM;
	}
	push->ep = ep;
	push->object = object;
	push->envelope = *envelope;
	for (uint32_t i = 0; i < count; i++) {
		push->runs[i] = (ucp_dt_iov_t){runs[i].iov_base, runs[i].iov_len};
	}
	param.user_data = push;
	ep->pushes++;
	request = ucp.ucp_am_send_nbx(ep->ep, AM_ID, &push->envelope, sizeof push->envelope,
				      count == 1 ? push->runs[0].buffer : (const void *)push->runs,
				      count == 1 ? push->runs[0].length : count, &param);
	if (!UCS_PTR_IS_PTR(request)) {
		finish_push(push, UCS_PTR_STATUS(request));
	}

	return KV_OK;
}
