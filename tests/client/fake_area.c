/* The shared memory the fake daemon hands out, right or corrupted. */
#include "fake_impl.h"

#include "mirror_writer.h"

#include "kv/env.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

fake_area_t fake_area_make(uint64_t bytes, int seal)
{
	fake_area_t area = {.bytes = bytes, .fd = memfd_create("fake-kvd", MFD_CLOEXEC | MFD_ALLOW_SEALING)};

	kv_assert(area.fd >= 0 && ftruncate(area.fd, (off_t)bytes) == 0);
	if (seal) {
		kv_assert(fcntl(area.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
	}
	area.base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, area.fd, 0);
	kv_assert(area.base != MAP_FAILED);

	return area;
}

void fake_area_free(fake_area_t *area)
{
	if (area->base) {
		munmap(area->base, area->bytes);
		close(area->fd);
	}
	*area = (fake_area_t){.fd = -1};
}

void fake_areas_make(fake_t *fake)
{
	const fake_geometry_t *g = &fake->geometry;
	kv_lease_area_header_t *leases;

	fake->mirror = fake_area_make(mirror_bytes(FAKE_BUCKETS), 1);
	mirror_init(fake->mirror.base, FAKE_BUCKETS, fake->incarnation);
	mirror_epoch(fake->mirror.base, 0, fake->epoch);
	((kv_mirror_header_t *)fake->mirror.base)->stale_ns = FAKE_STALE_NS;

	fake->leases = fake_area_make(FAKE_LEASE_BYTES, 1);
	leases = (kv_lease_area_header_t *)fake->leases.base;
	*leases = (kv_lease_area_header_t){
		.magic = KV_LEASES_MAGIC,
		.version = KV_SHM_VERSION,
		.incarnation = fake->incarnation,
		.total_bytes = FAKE_LEASE_BYTES,
	};
	fake->data = fake_area_make((uint64_t)FAKE_SLOTS * g->slot_bytes, 1);
	fake->digests = fake_area_make((uint64_t)FAKE_SLOTS * g->heads * (g->leaves + 1u) * 8u, 1);
}

void fake_member_make(fake_area_t *area)
{
	kv_member_area_header_t *header;

	*area = fake_area_make(FAKE_MEMBER_BYTES, 1);
	header = (kv_member_area_header_t *)area->base;
	header->magic = KV_MEMBER_MAGIC;
	header->version = KV_SHM_VERSION;
	header->ring_records = FAKE_RING_RECORDS;
	header->ring_offset = 4096;
	header->staging_offset = 4096 + FAKE_RING_RECORDS * sizeof(kv_report_t);
	header->staging_words = FAKE_STAGING_WORDS;
	header->total_bytes = FAKE_MEMBER_BYTES;
}

/* A mirror of its own to be damaged: the right one stays right. */
static kv_mirror_header_t *spoilt_mirror(fake_t *fake)
{
	fake_area_free(&fake->mirror);
	fake->mirror = fake_area_make(mirror_bytes(FAKE_BUCKETS), 1);
	mirror_init(fake->mirror.base, FAKE_BUCKETS, fake->incarnation);
	mirror_epoch(fake->mirror.base, 0, fake->epoch);

	return (kv_mirror_header_t *)fake->mirror.base;
}

void fake_areas_spoil(fake_t *fake, fake_session_t *session, kv_msg_join_reply_t *reply, int fds[3], uint32_t *p_count)
{
	kv_mirror_header_t *mirror = spoilt_mirror(fake);
	kv_lease_area_header_t *leases = (kv_lease_area_header_t *)fake->leases.base;
	kv_member_area_header_t *member = (kv_member_area_header_t *)session->member.base;

	fds[0] = fake->mirror.fd;
	leases->version = KV_SHM_VERSION;
	switch ((fake_join_fault_t)atomic_load(&fake->knobs.join)) {
	case FAKE_JOIN_TWO_FDS:
		*p_count = 2;
		break;
	case FAKE_JOIN_NO_SEAL:
		fake_area_free(&fake->mirror);
		fake->mirror = fake_area_make(mirror_bytes(FAKE_BUCKETS), 0);
		mirror_init(fake->mirror.base, FAKE_BUCKETS, fake->incarnation);
		fds[0] = fake->mirror.fd;
		break;
	case FAKE_JOIN_TOO_LONG:
		reply->lease_bytes = UINT64_C(1) << 40;
		break;
	case FAKE_JOIN_MIRROR_MAGIC:
		mirror->magic++;
		break;
	case FAKE_JOIN_MIRROR_BUCKETS:
		mirror->bucket_count = FAKE_BUCKETS - 1;
		break;
	case FAKE_JOIN_MIRROR_OUTSIDE:
		mirror->bucket_count = UINT64_C(1) << 58;
		break;
	case FAKE_JOIN_MIRROR_EPOCHS:
		mirror->epochs_offset = reply->mirror_bytes - 8u;
		break;
	case FAKE_JOIN_MIRROR_STALE:
		mirror->stale_ns = UINT64_MAX;
		break;
	case FAKE_JOIN_INCARNATION:
		mirror->incarnation++;
		break;
	case FAKE_JOIN_LEASE_VERSION:
		leases->version++;
		break;
	case FAKE_JOIN_RING:
		member->ring_records = 1u << 30;
		break;
	case FAKE_JOIN_STAGING:
		member->staging_offset = UINT64_MAX - 7u;
		break;
	default:
		break;
	}
}
