/* Spaces with several block groups, over the socket: put, lease, look, and all of it again after a crash. */
#include "daemon/raw.h"

#include <signal.h>

#define GROUPS "0:full:16,1:window:16:63,2:state:16"
#define BLOCKS 12u

static const char *dir_option(const raw_daemon_t *daemon, char *out, size_t cap)
{
	snprintf(out, cap, "--nvme.path=%s/disk", daemon->dir);

	return out;
}

/* Blocks first .. first + n of the keys go into the group, each with a pattern of its own; waits until they are on
 * disk. */
static void put_blocks(raw_member_t *member, uint32_t group, const kv_key_t *keys, uint32_t first, uint32_t n)
{
	const kv_msg_put_start_t ask = {.space = member->space.space,
					.epoch = member->space.epoch,
					.group = group,
					.flags = 1,
					.depth = first,
					.keys = {keys[first].b, n * KV_KEY_BYTES}};
	kv_msg_put_start_reply_t put;
	kv_msg_put_end_reply_t end;
	kv_msg_put_done_t done;
	kv_msg_durable_t durable;

	assert_int_equal(raw_call(member->fd, KV_CODE_PUT_START, &ask, &put), KV_OK);
	assert_int_equal(put.n, n);
	for (uint32_t i = n; i-- > 0;) { /* last first: none waits for another */
		const kv_msg_put_end_t range = {
			.put = put.put, .first = i, .count = 1, .staging = i * RAW_LEAVES, .words = RAW_LEAVES};

		raw_fill(member, put.offset, i, (uint8_t)(group * 64 + first + i));
		assert_int_equal(raw_call(member->fd, KV_CODE_PUT_END, &range, &end), KV_OK);
	}
	assert_int_equal(raw_notice(member->fd, KV_CODE_PUT_DONE, RAW_TIMEOUT_MS, &done), 1);
	assert_true(done.n == n && done.status == KV_OK);
	assert_int_equal(raw_notice(member->fd, KV_CODE_DURABLE, RAW_TIMEOUT_MS, &durable), 1);
	assert_true(durable.n == n && durable.status == KV_OK);
}

static kv_status_t lease_blocks(raw_member_t *member, uint32_t group, const kv_key_t *keys, uint32_t skip, uint32_t n,
				kv_msg_acquire_reply_t *reply)
{
	const kv_msg_acquire_t ask = {.space = member->space.space,
				      .epoch = member->space.epoch,
				      .group = group,
				      .skip = skip,
				      .n = n,
				      .ladder = {keys[skip].b, (n - skip) * KV_KEY_BYTES}};

	return raw_call(member->fd, KV_CODE_ACQUIRE, &ask, reply);
}

/* Leased, ready, and every block has its own bytes. */
static void read_blocks(raw_member_t *member, uint32_t group, const kv_key_t *keys, uint32_t skip, uint32_t n)
{
	kv_msg_acquire_reply_t lease;
	kv_msg_lease_done_t done;

	assert_int_equal(lease_blocks(member, group, keys, skip, n, &lease), KV_OK);
	assert_true(lease.lease != 0 && lease.n == n);
	if (lease.ready < n) {
		assert_int_equal(raw_notice(member->fd, KV_CODE_LEASE_DONE, RAW_TIMEOUT_MS, &done), 1);
		assert_true(done.lease == lease.lease && done.ready == n && done.status == KV_OK);
	}
	for (uint32_t i = 0; i < n - skip; i++) {
		const uint8_t *data = raw_slot(member, lease.offset, i);

		assert_non_null(data);
		for (uint32_t at = 0; at < RAW_BLOCK_BYTES; at += 97) {
			assert_int_equal(data[at], group * 64 + skip + i);
		}
	}
	const kv_msg_release_t release = {.leases = {(const uint8_t *)&lease.lease, sizeof lease.lease}};
	kv_msg_release_reply_t released;

	assert_int_equal(raw_call(member->fd, KV_CODE_RELEASE, &release, &released), KV_OK);
	assert_int_equal(released.released, 1);
}

/* EXPLAIN: which of the blocks are there. */
static uint32_t known_blocks(raw_member_t *member, uint32_t group, const kv_key_t *keys)
{
	const kv_msg_explain_t ask = {.space = member->space.space,
				      .epoch = member->space.epoch,
				      .group = group,
				      .keys = {keys[0].b, BLOCKS * KV_KEY_BYTES}};
	kv_msg_explain_reply_t reply;
	uint32_t known = 0;

	assert_int_equal(raw_call(member->fd, KV_CODE_EXPLAIN, &ask, &reply), KV_OK);
	for (uint32_t i = 0; i < BLOCKS; i++) {
		known |= reply.tiers.data[i] & (KV_TIER_CPU | KV_TIER_DISK) ? 1u << i : 0;
	}

	return known;
}

KV_TEST(p2_blocks_of_every_group_are_served_after_kill_9)
{
	char path[96];
	const char *const args[] = {path, "--nvme.size=64MiB", "--nvme.file_size=4MiB", NULL};
	raw_daemon_t daemon = {0};
	raw_member_t member;
	kv_key_t keys[BLOCKS];
	kv_msg_acquire_reply_t lease;
	int code;

	kv_test_dir_make(daemon.dir, sizeof daemon.dir);
	(void)dir_option(&daemon, path, sizeof path);
	raw_keys(21, keys, BLOCKS);
	assert_int_equal(raw_daemon_spawn(&daemon, args, &code), 1);
	for (int run = 0; run < 2; run++) {
		raw_join(&member, daemon.sock, "engine");
		assert_int_equal(raw_space_groups(&member, "hybrid", "8", GROUPS), KV_OK);
		assert_int_equal(member.space.hash_tokens, 8);
		if (run == 0) {
			put_blocks(&member, 0, keys, 0, BLOCKS);
			put_blocks(&member, 1, keys, 8, 4);
			put_blocks(&member, 1, keys, 2, 4);
			put_blocks(&member, 2, keys, 11, 1);
		}
		assert_int_equal(known_blocks(&member, 1, keys), 0xf3cu);
		assert_int_equal(known_blocks(&member, 2, keys), 0x800u);
		read_blocks(&member, 1, keys, 8, 12);
		read_blocks(&member, 1, keys, 2, 6);
		read_blocks(&member, 2, keys, 11, 12);
		assert_int_equal(raw_acquire(&member, keys, BLOCKS, &lease), KV_OK);
		assert_int_equal(lease.n, BLOCKS);
		assert_int_equal(lease_blocks(&member, 1, keys, 5, 7, &lease), KV_OK);
		assert_true(lease.lease == 0 && lease.n == 0 && lease.why == KV_WHY_ABSENT);
		assert_int_equal(raw_metric(member.fd, "kvd_bad_blocks_total"), 0);
		raw_leave(&member);
		if (run == 0) {
			raw_daemon_kill(&daemon, SIGKILL);
			assert_int_equal(raw_daemon_spawn(&daemon, args, &code), 1);
		}
	}
	raw_daemon_end(&daemon);
}

RAW_TEST(p10_groups_that_cannot_be_served_are_refused_with_a_sentence, NULL)
{
	static const struct {
		const char *hash_tokens, *groups;
		kv_status_t status;
	} asked[] = {
		{"16", "0:full:16,1:window:32:63", KV_ERR_LAYOUT},
		{"8", "0:full:8", KV_ERR_LAYOUT},
		{"16", "0:full:16,1:ring:16", KV_ERR_IDENTITY},
		{"16", "0:full:16,0:window:16:63", KV_ERR_IDENTITY},
		{"5", "0:full:16", KV_ERR_IDENTITY},
		{"4", "1:window:16:63", KV_OK},
		{"16", "0:full:16,1:full:16,2:state:16", KV_OK},
	};
	raw_member_t member;
	kv_key_t keys[BLOCKS];
	kv_msg_acquire_reply_t lease;

	raw_join(&member, daemon_.sock, "engine");
	for (size_t i = 0; i < KV_COUNT_OF(asked); i++) {
		assert_int_equal(raw_space_groups(&member, "m", asked[i].hash_tokens, asked[i].groups),
				 asked[i].status);
	}
	raw_keys(22, keys, BLOCKS);
	assert_int_equal(lease_blocks(&member, 7, keys, 0, 4, &lease), KV_ERR_UNSUPPORTED);
	raw_leave(&member);
}

/* 512 blocks of the window group in one put that is not durable. */
static void put_many(raw_member_t *member, const kv_key_t *keys)
{
	const kv_msg_put_start_t ask = {.space = member->space.space,
					.epoch = member->space.epoch,
					.group = 1,
					.keys = {keys[0].b, 512 * KV_KEY_BYTES}};
	kv_msg_put_start_reply_t put;
	kv_msg_put_end_reply_t end;
	kv_msg_put_done_t done;

	assert_int_equal(raw_call(member->fd, KV_CODE_PUT_START, &ask, &put), KV_OK);
	assert_int_equal(put.n, 512);
	for (uint32_t i = 0; i < put.n; i++) {
		raw_fill(member, put.offset, i, 1);
	}
	const kv_msg_put_end_t range = {.put = put.put, .count = put.n, .words = put.n * RAW_LEAVES};

	assert_int_equal(raw_call(member->fd, KV_CODE_PUT_END, &range, &end), KV_OK);
	assert_int_equal(raw_notice(member->fd, KV_CODE_PUT_DONE, RAW_TIMEOUT_MS, &done), 1);
	assert_int_equal(done.n, 512);
}

RAW_TEST(p10_a_window_may_be_as_long_as_a_put, NULL)
{
	static kv_key_t keys[KV_MAX_BLOCKS];
	raw_member_t member;
	kv_msg_acquire_reply_t lease;

	raw_join(&member, daemon_.sock, "engine");
	assert_int_equal(raw_space_groups(&member, "hybrid", "16", GROUPS), KV_OK);
	raw_keys(23, keys, KV_MAX_BLOCKS);
	assert_int_equal(lease_blocks(&member, 1, keys, 0, KV_MAX_BLOCKS, &lease),
			 KV_ERR_BUSY); /* more than the pool */
	put_many(&member, keys);
	assert_int_equal(lease_blocks(&member, 1, keys, 0, 512, &lease), KV_OK);
	assert_int_equal(lease.n, 512);
	raw_leave(&member);
}
