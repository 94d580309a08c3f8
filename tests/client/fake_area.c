/* The shared memory the fake daemon hands out, right or corrupted. */
#include "fake_impl.h"

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

static void mirror_make(fake_t *fake, int seal)
{
	fake->mirror = fake_area_make(kvd_mirror_size(FAKE_SLOTS), seal);
	kvd_mirror_init(&fake->writer, fake->mirror.base, FAKE_SLOTS, fake->incarnation);
	kvd_mirror_set_epoch(&fake->writer, 0, fake->epoch);
	fake->writer.header->stale_ns = FAKE_STALE_NS;
}

void fake_areas_make(fake_t *fake)
{
	const fake_geometry_t *g = &fake->geometry;
	kv_lease_area_header_t *leases;

	mirror_make(fake, 1);
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

const fake_lie_t *fake_lie_about(fake_t *fake, fake_of_t of)
{
	const fake_lie_t *lie = atomic_load(&fake->knobs.lie);

	return lie && lie->of == of ? lie : NULL;
}

void fake_lie_put(fake_t *fake, fake_of_t of, void *what)
{
	const fake_lie_t *lie = fake_lie_about(fake, of);

	if (lie) {
		memcpy((uint8_t *)what + lie->at, &lie->value, lie->bytes);
	}
}

void fake_areas_spoil(fake_t *fake, fake_session_t *session, kv_msg_join_reply_t *reply, int fds[3], uint32_t *p_count)
{
	const fake_lie_t *lie = fake_lie_about(fake, FAKE_OF_JOIN);

	fake_area_free(&fake->mirror); /* the right one stays right */
	mirror_make(fake, !lie || !lie->unsealed);
	fds[0] = fake->mirror.fd;
	((kv_lease_area_header_t *)fake->leases.base)->version = KV_SHM_VERSION;
	*p_count -= lie && lie->one_less;
	fake_lie_put(fake, FAKE_OF_JOIN, reply);
	fake_lie_put(fake, FAKE_OF_MIRROR, fake->mirror.base);
	fake_lie_put(fake, FAKE_OF_LEASES, fake->leases.base);
	fake_lie_put(fake, FAKE_OF_MEMBER, session->member.base);
}
