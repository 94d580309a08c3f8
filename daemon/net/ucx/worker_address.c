/* The packed address of a UCX worker, format 1 (src/ucp/wireup/address.c of UCX):
 *
 *   header, u64 worker, [u64 client], [length and name]
 *   each device:      domain, length and flags, [paths], [system device], its address
 *     each transport: u16 sum of its name, attributes, length and flags, its address
 */
#include "net/ucx/worker_address.h"

#include <math.h>
#include <string.h>

#define PLACES_MAX 32u /* where a worker can be reached; one has a few */
#define NO_DEVICES 0xffu

enum { DEBUG_NAME = 0x10, HAS_WORKER = 0x20, HAS_CLIENT = 0x40, AM_ONLY = 0x80 }; /* header */
enum { LAST = 0x80 };                                                             /* device, transport */
enum { IS_EMPTY = 0x80 };                                                         /* domain */
enum { HAS_PATHS = 0x40, HAS_SYSTEM_DEVICE = 0x20, DEVICE_LEN = 0x1f };           /* device */
enum { HAS_ENDPOINTS = 0x40, TRANSPORT_LEN = 0x3f };                              /* transport */

typedef struct attributes {
	float overhead, bandwidth, latency;
	uint32_t flags;
} attributes_t;

/* A device and a transport. */
typedef struct place {
	uint16_t transport;
	uint32_t device_len, transport_len;
} place_t;

typedef struct worker {
	uint64_t number;
	place_t places[PLACES_MAX];
	uint32_t count;
} worker_t;

/* Copies what is next, or skips it where `out` is NULL. 0: it is not there. */
static int take_bytes(kv_slice_t *rest, void *out, uint32_t len)
{
	if (rest->len < len) {
		return 0;
	}
	if (out) {
		memcpy(out, rest->data, len);
	}
	*rest = (kv_slice_t){rest->data + len, rest->len - len};

	return 1;
}

static int is_sound(const attributes_t *a)
{
	return isfinite(a->overhead) && isfinite(a->bandwidth) && isfinite(a->latency) && a->overhead >= 0 &&
	       a->bandwidth > 0 && a->latency >= 0;
}

static int take_transport(kv_slice_t *rest, worker_t *worker, uint32_t device_len, int *p_is_last)
{
	place_t place = {.device_len = device_len};
	attributes_t attributes;
	uint8_t flags;

	if (worker->count == PLACES_MAX || !take_bytes(rest, &place.transport, sizeof place.transport) ||
	    !take_bytes(rest, &attributes, sizeof attributes) || !is_sound(&attributes) ||
	    !take_bytes(rest, &flags, 1) || (flags & HAS_ENDPOINTS)) {
		return 0;
	}
	place.transport_len = flags & TRANSPORT_LEN;
	worker->places[worker->count++] = place;
	*p_is_last = (flags & LAST) != 0;

	return take_bytes(rest, NULL, place.transport_len);
}

static int take_device(kv_slice_t *rest, worker_t *worker, int *p_is_last)
{
	uint8_t domain, flags, paths = 1;
	int is_last;

	if (!take_bytes(rest, &domain, 1) || !take_bytes(rest, &flags, 1) ||
	    ((flags & HAS_PATHS) && !take_bytes(rest, &paths, 1)) || paths == 0 ||
	    ((flags & HAS_SYSTEM_DEVICE) && !take_bytes(rest, NULL, 1)) ||
	    !take_bytes(rest, NULL, flags & DEVICE_LEN)) {
		return 0;
	}
	is_last = (domain & IS_EMPTY) != 0;
	while (!is_last) {
		if (!take_transport(rest, worker, flags & DEVICE_LEN, &is_last)) {
			return 0;
		}
	}
	*p_is_last = (flags & LAST) != 0;

	return 1;
}

/* 0: it is not one. */
static int parse(kv_slice_t rest, worker_t *worker)
{
	uint8_t header, name_len = 0;
	int is_last = 0;

	worker->count = 0;
	if (!take_bytes(&rest, &header, 1) || (header & 0x0f) != 0 || !(header & HAS_WORKER) || (header & AM_ONLY) ||
	    !take_bytes(&rest, &worker->number, sizeof worker->number) ||
	    ((header & HAS_CLIENT) && !take_bytes(&rest, NULL, sizeof(uint64_t))) ||
	    ((header & DEBUG_NAME) && (!take_bytes(&rest, &name_len, 1) || !take_bytes(&rest, NULL, name_len)))) {
		return 0;
	}
	if (rest.len == 1 && rest.data[0] == NO_DEVICES) {
		return 1;
	}
	while (!is_last) {
		if ((rest.len > 0 && rest.data[0] == NO_DEVICES) || !take_device(&rest, worker, &is_last)) {
			return 0;
		}
	}

	return rest.len == 0;
}

/* A transport reads as much of an address as its own have. */
static int is_too_short(const place_t *place, const place_t *own)
{
	return place->transport == own->transport &&
	       (place->device_len < own->device_len || place->transport_len < own->transport_len);
}

kv_status_t kvd_ucx_address_check(kv_slice_t ours, kv_slice_t address)
{
	worker_t worker, own = {.count = 0};
	uint32_t common = 0;

	if (!parse(address, &worker) || (ours.len > 0 && (!parse(ours, &own) || own.number == worker.number))) {
		return KV_ERR_PROTO;
	}
	for (uint32_t i = 0; i < worker.count; i++) {
		for (uint32_t k = 0; k < own.count; k++) {
			if (is_too_short(&worker.places[i], &own.places[k])) {
				return KV_ERR_UNREACHABLE;
			}
			common += worker.places[i].transport == own.places[k].transport;
		}
	}

	return common > 0 ? KV_OK : KV_ERR_UNREACHABLE;
}
