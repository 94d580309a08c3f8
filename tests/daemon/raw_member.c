/* A member by hand: pidfd, shared areas, slabs, puts. */
#include "daemon/raw.h"

#include "kv/digest.h"
#include "kv/identity.h"
#include "kvk/layout.h"

#include <sys/mman.h>
#include <sys/syscall.h>

static const uint8_t secret_of_tests[16] = "0123456789abcdef";

uint64_t raw_attachment = 1;

static void *map(int fd, size_t bytes, int protection)
{
	void *base = mmap(NULL, bytes, protection, MAP_SHARED, fd, 0);

	assert_true(base != MAP_FAILED);

	return base;
}

kv_status_t raw_join_with(int fd, const char *name, const uint8_t *secret, int pidfd, kv_msg_join_reply_t *reply)
{
	const kv_msg_join_t ask = {.instance = kv_slice_str(name),
				   .secret = {secret ? secret : secret_of_tests, 16},
				   .role = 2,
				   .staging_words = 65536,
				   .attachment = raw_attachment};

	return raw_call_with(fd, KV_CODE_JOIN, &ask, pidfd, reply);
}

void raw_join(raw_member_t *member, const char *path, const char *name)
{
	int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
	const kv_member_area_header_t *header;

	assert_true(pidfd >= 0);
	memset(member, 0, sizeof *member);
	member->fd = raw_open(path);
	assert_int_equal(raw_join_with(member->fd, name, NULL, pidfd, &member->joined), KV_OK);
	close(pidfd);
	assert_int_equal(raw_reply_fd_count, 3);
	memcpy(member->area_fds, raw_reply_fds, sizeof member->area_fds);
	member->mirror = map(raw_reply_fds[0], member->joined.mirror_bytes, PROT_READ);
	member->leases = map(raw_reply_fds[1], member->joined.lease_bytes, PROT_READ);
	member->area = map(raw_reply_fds[2], member->joined.member_bytes, PROT_READ | PROT_WRITE);
	header = (const kv_member_area_header_t *)(const void *)member->area;
	assert_true(header->magic == KV_MEMBER_MAGIC && header->staging_words == 65536);
	member->staging = (uint64_t *)(void *)(member->area + header->staging_offset);
}

kv_status_t raw_space(raw_member_t *member, const char *model)
{
	return raw_space_groups(member, model, "16", "0:full:16");
}

kv_status_t raw_space_groups(raw_member_t *member, const char *model, const char *hash_tokens, const char *groups)
{
	static const kvk_layout_t layout = {
		.heads = 2, .layers = 2, .block_tokens = 16, .k_dim = 16, .v_dim = 16, .dtype = KVK_DTYPE_F32};
	char layout_text[KVK_LAYOUT_TEXT_MAX], text[KV_IDENTITY_MAX_TEXT];
	kv_identity_t identity = {.model = model,
				  .weights = "w1",
				  .dtype = "f32",
				  .quantization = "none",
				  .rope = "none",
				  .lora = "none",
				  .hash = "kv1",
				  .hash_tokens = hash_tokens,
				  .groups = groups,
				  .layout = layout_text,
				  .page_format = "plain"};
	kv_msg_space_open_t ask;

	assert_int_equal(kvk_layout_format(&layout, layout_text, sizeof layout_text), KV_OK);
	assert_int_equal(kv_identity_text(&identity, text, sizeof text, NULL), KV_OK);
	ask = (kv_msg_space_open_t){.identity = kv_slice_str(text), .layout = kv_slice_str(layout_text)};

	return raw_call(member->fd, KV_CODE_SPACE_OPEN, &ask, &member->space);
}

static kv_status_t put_start(raw_member_t *member, kv_msg_put_start_t *ask, const kv_key_t *keys, uint32_t n,
			     kv_msg_put_start_reply_t *reply)
{
	ask->space = member->space.space;
	ask->epoch = member->space.epoch;
	ask->keys = (kv_slice_t){keys[0].b, n * KV_KEY_BYTES};

	return raw_call(member->fd, KV_CODE_PUT_START, ask, reply);
}

kv_status_t raw_put_start(raw_member_t *member, const kv_key_t *parent, uint32_t depth, const kv_key_t *keys,
			  uint32_t n, kv_msg_put_start_reply_t *reply)
{
	kv_msg_put_start_t ask = {.depth = depth};

	if (parent) {
		ask.parent = *parent;
	}

	return put_start(member, &ask, keys, n, reply);
}

/* Slabs the daemon has told of. */
static void take_slabs(raw_member_t *member)
{
	kv_msg_slab_add_t info;
	int fds[KV_WIRE_MAX_FDS];

	while (raw_notice_any(member->fd, KV_CODE_SLAB_ADD, 0, &info, fds)) {
		raw_slab_t *slab = &member->slabs[member->slab_count++];

		assert_true(member->slab_count <= KV_COUNT_OF(member->slabs));
		slab->info = info;
		slab->data = map(fds[0], info.bytes, PROT_READ | PROT_WRITE);
		slab->digests = map(fds[1], info.digest_bytes, PROT_READ);
		slab->data_fd = fds[0];
		close(fds[1]);
	}
}

uint8_t *raw_slot(raw_member_t *member, uint64_t offset, uint32_t i)
{
	const kv_lease_header_t *header = (const kv_lease_header_t *)(const void *)(member->leases + offset);
	kv_slot_t slot = kv_lease_slots(header)[i];

	if (slot == KV_SLOT_NONE) {
		return NULL;
	}
	take_slabs(member);
	for (uint32_t s = 0; s < member->slab_count; s++) {
		const raw_slab_t *slab = &member->slabs[s];

		if (slab->info.slab == kv_slot_slab(slot)) {
			return slab->data + (size_t)kv_slot_index(slot) * slab->info.slot_bytes;
		}
	}
	fail_msg("the slot's slab was not announced before the slot");

	return NULL;
}

void raw_fill(raw_member_t *member, uint64_t offset, uint32_t i, uint8_t pattern)
{
	uint8_t *data = raw_slot(member, offset, i);

	assert_non_null(data);
	memset(data, pattern, RAW_BLOCK_BYTES);
	for (uint32_t leaf = 0; leaf < RAW_LEAVES; leaf++) {
		member->staging[i * RAW_LEAVES + leaf] = kv_digest(data + leaf * 2048u, 2048u);
	}
}

/* Fill all blocks of a put, hand them in, wait for PUT_DONE. */
static uint32_t put_rest(raw_member_t *member, const kv_msg_put_start_reply_t *put, uint8_t pattern)
{
	const kv_msg_put_end_t ask = {.put = put->put, .count = put->n, .words = put->n * RAW_LEAVES};
	kv_msg_put_end_reply_t end;
	kv_msg_put_done_t done;

	assert_int_equal(put->already, 0);
	for (uint32_t i = 0; i < put->n; i++) {
		raw_fill(member, put->offset, i, pattern);
	}
	assert_int_equal(raw_call(member->fd, KV_CODE_PUT_END, &ask, &end), KV_OK);
	assert_int_equal(raw_notice(member->fd, KV_CODE_PUT_DONE, RAW_TIMEOUT_MS, &done), 1);
	assert_true(done.put == put->put);

	return done.n;
}

uint32_t raw_put(raw_member_t *member, const kv_key_t *keys, uint32_t n, uint8_t pattern)
{
	kv_msg_put_start_reply_t put;

	assert_int_equal(raw_put_start(member, NULL, 0, keys, n, &put), KV_OK);

	return put.put == 0 ? put.already : put_rest(member, &put, pattern);
}

kv_status_t raw_acquire(raw_member_t *member, const kv_key_t *keys, uint32_t n, kv_msg_acquire_reply_t *reply)
{
	kv_key_t ladder[KV_MAX_LADDER];
	uint32_t count = 0;

	/* n, n-1, n-2, n-4, ..., 1 */
	for (uint32_t back = 0; back < n; back = back ? back * 2 : 1) {
		ladder[count++] = keys[n - 1 - back];
	}
	if (!kv_key_equal(&ladder[count - 1], &keys[0])) {
		ladder[count++] = keys[0];
	}
	const kv_msg_acquire_t ask = {.space = member->space.space,
				      .epoch = member->space.epoch,
				      .n = n,
				      .ladder = {ladder[0].b, count * KV_KEY_BYTES}};

	return raw_call(member->fd, KV_CODE_ACQUIRE, &ask, reply);
}

void raw_leave(raw_member_t *member)
{
	close(member->fd);
	munmap((void *)(uintptr_t)member->mirror, member->joined.mirror_bytes);
	munmap((void *)(uintptr_t)member->leases, member->joined.lease_bytes);
	munmap(member->area, member->joined.member_bytes);
	for (uint32_t i = 0; i < 3; i++) {
		close(member->area_fds[i]);
	}
	for (uint32_t i = 0; i < member->slab_count; i++) {
		munmap(member->slabs[i].data, member->slabs[i].info.bytes);
		munmap(member->slabs[i].digests, member->slabs[i].info.digest_bytes);
		close(member->slabs[i].data_fd);
	}
}

void raw_keys(uint64_t seed, kv_key_t *keys, uint32_t n)
{
	kv_test_rng_t rng = {seed};

	for (uint32_t i = 0; i < n; i++) {
		kv_test_fill(&rng, &keys[i], sizeof keys[i]);
	}
}
