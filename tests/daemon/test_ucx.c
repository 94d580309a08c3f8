/* Addresses of UCX workers that a peer sends: right ones, and everything near them. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "net/ucx/ucx.h"

#include <stdlib.h>
#include <string.h>

#define PORT_BYTES 2u /* the end of a TCP address; another port is somebody else's */

static kvd_ucx_t *ours_, *theirs_;

static void *refuse_bytes(void *ctx, const kvd_ucx_envelope_t *envelope, size_t bytes, void **p_object)
{
	(void)ctx;
	(void)envelope;
	(void)bytes;
	(void)p_object;

	return NULL;
}

static kvd_ucx_t *open_ucx(void)
{
	static const kvd_ucx_ops_t ops = {.land = refuse_bytes};
	const kvd_ucx_config_t config = {.transports = "tcp", .address = "127.0.0.1", .ops = &ops};
	kvd_ucx_t *ucx = NULL;
	char why[200] = "";
	kv_status_t status = kvd_ucx_open(&config, &ucx, why, sizeof why);

	if (status == KV_ERR_UNSUPPORTED) {
		kv_test_skip(why);
	}
	assert_int_equal(status, KV_OK);

	return ucx;
}

static int setup(void **state)
{
	(void)state;
	ours_ = open_ucx();
	theirs_ = open_ucx();

	return 0;
}

/* Connect to the first `len` bytes, which lie alone in their memory, and let go again. */
static kv_status_t try_address(const uint8_t *bytes, uint32_t len)
{
	uint8_t *alone = malloc(len ? len : 1);
	kvd_ucx_ep_t *ep = NULL;
	kv_status_t status;

	assert_non_null(alone);
	memcpy(alone, bytes, len);
	status = kvd_ucx_connect(ours_, (kv_slice_t){alone, len}, &ep);
	free(alone);
	assert_int_equal(status == KV_OK, ep != NULL);
	if (ep) {
		kvd_ucx_disconnect(ep);
	}
	for (uint32_t i = 0; i < 8; i++) {
		(void)kvd_ucx_progress(ours_);
		(void)kvd_ucx_progress(theirs_);
	}

	return status;
}

KV_TEST(p10_the_address_of_a_worker_is_taken)
{
	const kv_slice_t right = kvd_ucx_address(theirs_);

	assert_int_equal(try_address(right.data, right.len), KV_OK);
}

KV_TEST(p6_an_address_that_is_cut_is_refused)
{
	const kv_slice_t right = kvd_ucx_address(theirs_);

	for (uint32_t len = 0; len < right.len; len++) {
		assert_int_equal(try_address(right.data, len), KV_ERR_PROTO);
	}
}

KV_TEST(p6_an_address_with_more_behind_it_is_refused)
{
	const kv_slice_t right = kvd_ucx_address(theirs_);
	uint8_t bytes[4096] = {0};

	memcpy(bytes, right.data, right.len);
	assert_int_equal(try_address(bytes, right.len + 1), KV_ERR_PROTO);
	assert_int_equal(try_address(bytes, sizeof bytes), KV_ERR_PROTO);
}

/* UCX pairs endpoints by the number of the worker. */
KV_TEST(p6_our_own_address_is_refused)
{
	const kv_slice_t own = kvd_ucx_address(ours_);

	assert_int_equal(try_address(own.data, own.len), KV_ERR_PROTO);
}

KV_TEST(p6_no_changed_byte_of_an_address_ends_the_process)
{
	const kv_slice_t right = kvd_ucx_address(theirs_);
	const uint8_t changes[] = {1, 2, 4, 8, 16, 32, 64, 128, 255};
	uint8_t bytes[4096];
	uint32_t refused = 0;

	for (uint32_t at = 0; at + PORT_BYTES < right.len; at++) {
		for (uint32_t i = 0; i < KV_COUNT_OF(changes); i++) {
			memcpy(bytes, right.data, right.len);
			bytes[at] ^= changes[i];
			refused += try_address(bytes, right.len) != KV_OK;
		}
	}
	assert_true(refused > 50);
}

KV_TEST(p6_no_address_of_garbage_ends_the_process)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};
	uint8_t bytes[512];

	for (uint32_t i = 0; i < 2000; i++) {
		const uint32_t len = (uint32_t)(kv_test_rand(&rng) % sizeof bytes);

		for (uint32_t at = 0; at < len; at++) {
			bytes[at] = (uint8_t)kv_test_rand(&rng);
		}
		if (len > 0) {
			bytes[0] &= 0xf0; /* as far as its version it is one */
		}
		assert_int_not_equal(try_address(bytes, len), KV_OK);
	}
}

KV_TEST_MAIN(setup, NULL)
