/* Header and body of every request, reply and notice. Byte 0: row of the table, byte 1: request or reply, then 24 bytes
 * of header, then the body. What decodes must encode to something that decodes to the same, msgpack-c must agree with
 * every byte. */
#include "common/mp_compare.h"
#include "common/wire_build.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_body(const kv_body_t *body, const uint8_t *data, uint32_t len)
{
	static msgpack_sbuffer buffer;
	kv_msg_t msg, back;
	const kv_field_t *bad;
	uint32_t coded;
	size_t room;
	uint8_t *out;

	if (kv_body_decode(body, data, len, &msg, &bad) != KV_OK) {
		return;
	}
	room = kv_body_size(body, &msg);
	out = malloc(room);
	if (!out) {
		return;
	}
	kv_assert(kv_body_encode(body, &msg, out, room, &coded) == KV_OK);
	kv_assert(coded <= len); /* we write the shortest form */
	kv_assert(kv_body_decode(body, out, coded, &back, NULL) == KV_OK);
	kv_assert(wire_equal(body, (uint8_t *)&msg, (uint8_t *)&back));
	wire_pack(body, (uint8_t *)&msg, &buffer);
	kv_assert(buffer.size == coded && memcmp(buffer.data, out, coded) == 0);
	free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	kv_frame_header_t header;
	const kv_request_t *row;

	if (size < 2 + sizeof header) {
		return 0;
	}
	memcpy(&header, data + 2, sizeof header);
	if (kv_frame_check(&header, KV_WIRE_MAX_BODY) == KV_OK) {
		kv_assert(kv_request_find(header.code) && header.body <= KV_WIRE_MAX_BODY &&
			  header.fds <= KV_WIRE_MAX_FDS);
	}
	row = &kv_requests[data[0] % kv_request_count];
	data += 2 + sizeof header;
	size -= 2 + sizeof header;
	kv_assert(mp_compare(data, size));
	check_body(data[-25] & 1 && row->reply.count ? &row->reply : &row->ask, data, (uint32_t)size);

	return 0;
}
