/* Any bytes from an engine's event socket: the connection ends, or messages come; what is then known of its cache stays
 * within the limit, and no message brings more hits than tokens.
 *
 * Byte 0: bit 0 says greeting and READY first, bit 1 makes the rest one payload. Then pieces: a length byte (0: 256),
 * then that many bytes. */
#include "events/cache.h"
#include "events/subscriber.h"

#include "kv/env.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MAX_BLOCKS 8u

static void take_message(void *ctx, uint64_t seq, const uint8_t *payload, size_t len)
{
	kvp_cache_take(ctx, seq, payload, len);
}

static void check(const kvp_cache_t *cache)
{
	static const uint32_t tokens[64] = {1, 2, 3, 4};
	kvp_cache_stats_t stats;

	kvp_cache_stats(cache, &stats);
	kv_assert(stats.blocks <= MAX_BLOCKS);
	kv_assert(kvp_cache_hit(cache, &(kvp_prefix_question_t){"m", "s", tokens, 64}) <= 64);
}

static void feed(kvp_cache_t *cache, const uint8_t *data, size_t size, int greet)
{
	static const uint8_t greeting[] = {0xff,     [8] = 1, [9] = 0x7f, [10] = 3, [12] = 'N', 'U', 'L', 'L',
					   [64] = 4, 6,       5,          'R',      'E',        'A', 'D', 'Y'};
	kvp_zmtp_t zmtp = {0};
	kv_status_t status = greet ? kvp_zmtp_feed(&zmtp, greeting, sizeof greeting, take_message, cache) : KV_OK;

	for (size_t at = 0; at < size && status == KV_OK;) {
		size_t n = data[at] ? data[at] : 256;

		at++;
		n = n < size - at ? n : size - at;
		status = kvp_zmtp_feed(&zmtp, data + at, n, take_message, cache);
		kv_assert(status == KV_OK || status == KV_ERR_PROTO);
		kv_assert(zmtp.len <= KVP_MESSAGE_MAX + n);
		check(cache);
		at += n;
	}
	kvp_zmtp_reset(&zmtp);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	kvp_cache_t *cache = kvp_cache_create(MAX_BLOCKS);

	kv_assert(cache);
	if (size > 0 && data[0] & 2) {
		kvp_cache_take(cache, 0, data + 1, size - 1);
		check(cache);
		kvp_cache_take(cache, 1, data + 1, size - 1);
	} else if (size > 0) {
		feed(cache, data + 1, size - 1, data[0] & 1);
	}
	check(cache);
	kvp_cache_destroy(cache);

	return 0;
}
