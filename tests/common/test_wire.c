/* Frames and bodies: the table is the format; what was encoded can be decoded; everything else is refused and changes
 * nothing. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "wire_build.h"

#include "kv/mp.h"

static uint8_t room[WIRE_ROOM], coded[1 << 20], copy[1 << 20];
static kv_msg_t msg, back, untouched;

typedef void (*body_fn)(const kv_request_t *request, const kv_body_t *body);

static void each_body(body_fn fn)
{
	for (uint32_t i = 0; i < kv_request_count; i++) {
		fn(&kv_requests[i], &kv_requests[i].ask);
		if (kv_requests[i].roles != KV_ROLE_NONE) {
			fn(&kv_requests[i], &kv_requests[i].reply);
		}
	}
}

/* Exact copy in a block of its own, so that a sanitizer sees a read past the end. */
static kv_status_t decode_exact(const kv_body_t *body, const uint8_t *data, uint32_t len, const kv_field_t **p_bad)
{
	uint8_t *exact = malloc(len ? len : 1);
	kv_status_t status;

	memcpy(exact, data, len);
	memset(&back, 0x5a, sizeof back);
	status = kv_body_decode(body, exact, len, &back, p_bad);
	if (status != KV_OK) {
		assert_memory_equal(&back, &untouched, sizeof back);
	}
	free(exact);

	return status;
}

/* ---- the table ------------------------------------------------------------------------------- */

KV_TEST(offsets_are_those_of_the_structs)
{
#define CHECK_FIELD(kind_, name_, limit_, help_)                                                                       \
	assert_int_equal(kv_field_offset(body, index), offsetof(this_t, name_));                                       \
	assert_int_equal(body->fields[index].kind, KV_FIELD_##kind_);                                                  \
	index++;
#define CHECK_BODY(NAME, name, which)                                                                                  \
	{                                                                                                              \
		typedef kv_msg_##name##_t this_t;                                                                      \
		const kv_body_t *body = &kv_request_find(KV_CODE_##NAME)->which;                                       \
		uint32_t index = 0;                                                                                    \
		KV_FIELDS_##name(CHECK_FIELD) assert_int_equal(index, body->count);                                    \
	}
#define CHECK_REQUEST(code, NAME, name, roles, help) CHECK_BODY(NAME, name, ask) CHECK_BODY(NAME, name##_reply, reply)
#define CHECK_NOTICE(code, NAME, name, roles, help)  CHECK_BODY(NAME, name, ask)
	KV_REQUEST_LIST(CHECK_REQUEST)
	KV_NOTICE_LIST(CHECK_NOTICE)
}

KV_TEST(codes_are_unique_and_findable)
{
	unsigned found = 0;

	for (uint32_t code = 0; code <= UINT16_MAX; code++) {
		const kv_request_t *request = kv_request_find((uint16_t)code);

		assert_true(!request || request->code == code);
		found += request != NULL;
	}
	assert_int_equal(found, kv_request_count);
	assert_string_equal(kv_request_find(KV_CODE_PUT_DONE)->name, "PUT_DONE");
	assert_int_equal(kv_request_find(KV_CODE_PUT_DONE)->reply.count, 0);
	assert_string_equal(kv_field_kind_name(KV_FIELD_KEYS), "KEYS");
	assert_string_equal(kv_field_kind_name((kv_field_kind_t)99), "UNKNOWN");
}

/* ---- frames ---------------------------------------------------------------------------------- */

KV_TEST(p10_a_bad_header_gets_a_typed_error)
{
	const kv_frame_header_t good = {
		.magic = KV_WIRE_MAGIC, .version = 1, .kind = KV_FRAME_REQUEST, .code = KV_CODE_HELLO, .body = 100};
	kv_frame_header_t h;

	assert_int_equal(kv_frame_check(&good, 100), KV_OK);
	assert_int_equal(kv_frame_check(&good, 99), KV_ERR_TOO_BIG);
#define REFUSED(field, value, status)                                                                                  \
	h = good;                                                                                                      \
	h.field = value;                                                                                               \
	assert_int_equal(kv_frame_check(&h, 100), status);
	REFUSED(magic, 0x4b56, KV_ERR_PROTO)
	REFUSED(version, 0, KV_ERR_VERSION)
	REFUSED(version, 2, KV_ERR_VERSION)
	REFUSED(kind, 3, KV_ERR_PROTO)
	REFUSED(fds, 4, KV_ERR_PROTO)
	REFUSED(status, -1, KV_ERR_PROTO)
	REFUSED(code, 0, KV_ERR_UNKNOWN_REQUEST)
	REFUSED(code, 63, KV_ERR_UNKNOWN_REQUEST)
	REFUSED(code, 65535, KV_ERR_UNKNOWN_REQUEST)
	REFUSED(code, KV_CODE_SLAB_ADD, KV_ERR_UNKNOWN_REQUEST)
	REFUSED(kind, KV_FRAME_NOTICE, KV_ERR_UNKNOWN_REQUEST)
	REFUSED(body, UINT32_MAX, KV_ERR_TOO_BIG)
	h = good;
	h.kind = KV_FRAME_REPLY;
	h.status = KV_ERR_BUSY;
	assert_int_equal(kv_frame_check(&h, 100), KV_OK);
	h = good;
	h.kind = KV_FRAME_NOTICE;
	h.code = KV_CODE_SLAB_ADD;
	h.fds = 2;
	assert_int_equal(kv_frame_check(&h, 100), KV_OK);
}

/* ---- bodies ---------------------------------------------------------------------------------- */

static void round_trip(const kv_request_t *request, const kv_body_t *body)
{
	kv_test_rng_t rng = {kv_test_seed() + request->code};
	msgpack_sbuffer buffer;

	msgpack_sbuffer_init(&buffer);
	for (int round = 0; round < 200; round++) {
		uint32_t len = 0;

		memset(&msg, 0, sizeof msg);
		wire_random(&rng, body, (uint8_t *)&msg, room);
		assert_int_equal(kv_body_encode(body, &msg, coded, sizeof coded, &len), KV_OK);
		assert_true(len <= kv_body_size(body, &msg));
		wire_pack(body, (uint8_t *)&msg, &buffer);
		assert_int_equal(len, buffer.size);
		assert_memory_equal(coded, buffer.data, len);

		memset(&back, 0, sizeof back);
		assert_int_equal(kv_body_decode(body, coded, len, &back, NULL), KV_OK);
		assert_true(wire_equal(body, (uint8_t *)&msg, (uint8_t *)&back));

		/* Exactly enough room is enough, one byte less is not and touches nothing behind it. */
		memset(copy, 0xee, len + 1);
		assert_int_equal(kv_body_encode(body, &msg, copy, len, &len), KV_OK);
		assert_int_equal(copy[len], 0xee);
		assert_memory_equal(copy, coded, len);
		uint32_t unset = 77;
		assert_int_equal(kv_body_encode(body, &msg, copy, len - 1, &unset), KV_ERR_TOO_BIG);
		assert_int_equal(unset, 77);
	}
	msgpack_sbuffer_destroy(&buffer);
}

KV_TEST(every_body_is_what_msgpack_c_writes_and_comes_back)
{
	each_body(round_trip);
}

static void cut_and_stretched(const kv_request_t *request, const kv_body_t *body)
{
	kv_test_rng_t rng = {kv_test_seed() ^ request->code};
	uint32_t len = 0;

	memset(&msg, 0, sizeof msg);
	do {
		wire_random(&rng, body, (uint8_t *)&msg, room);
		assert_int_equal(kv_body_encode(body, &msg, coded, sizeof coded, &len), KV_OK);
	} while (len > 6000);
	for (uint32_t cut = 0; cut < len; cut++) {
		assert_int_equal(decode_exact(body, coded, cut, NULL), KV_ERR_PROTO);
	}
	coded[len] = 0;
	assert_int_equal(decode_exact(body, coded, len + 1, NULL), KV_ERR_PROTO);

	/* One field more or fewer than the table says. */
	coded[0]++;
	assert_int_equal(decode_exact(body, coded, len, NULL), KV_ERR_PROTO);
	assert_int_equal(decode_exact(body, coded, len + 1, NULL), KV_ERR_VERSION);
	coded[0] = (uint8_t)(coded[0] - 2);
	assert_int_equal(decode_exact(body, coded, len, NULL), KV_ERR_PROTO);
	if (body->count > 1) {
		const kv_body_t older = {body->fields, body->count - 1};

		assert_int_equal(kv_body_encode(&older, &msg, coded, sizeof coded, &len), KV_OK);
		assert_int_equal(decode_exact(body, coded, len, NULL), KV_ERR_VERSION);
	}
}

KV_TEST(p10_a_body_cut_at_any_byte_or_stretched_is_refused)
{
	each_body(cut_and_stretched);
}

/* Encode the message, with field `odd` replaced by what `put` writes. */
static uint32_t encode_with(const kv_body_t *body, uint32_t odd, void (*put)(msgpack_packer *, const void *),
			    const void *arg)
{
	static const kv_key_t key;
	kv_mp_writer_t w = {coded, sizeof coded, 0};
	msgpack_packer packer = kv_mp_packer(&w);

	msgpack_pack_array(&packer, body->count);
	for (uint32_t i = 0; i < body->count; i++) {
		kv_field_kind_t kind = body->fields[i].kind;

		if (i == odd) {
			put(&packer, arg);
		} else if (kind <= KV_FIELD_I32) {
			msgpack_pack_uint64(&packer, 0);
		} else if (kind == KV_FIELD_STR || kind == KV_FIELD_TEXT) {
			msgpack_pack_str_with_body(&packer, "", 0);
		} else {
			msgpack_pack_bin_with_body(&packer, key.b, kind == KV_FIELD_KEY ? KV_KEY_BYTES : 0);
		}
	}
	assert_true(w.len <= w.cap);

	return (uint32_t)w.len;
}

static void put_raw(msgpack_packer *packer, const void *arg)
{
	const kv_slice_t *raw = arg;

	(void)kv_mp_write(packer->data, (const char *)raw->data, raw->len);
}

#define RAW(text)                                                                                                      \
	{                                                                                                              \
		(const uint8_t *)(text), sizeof(text) - 1                                                              \
	}

/* Bit per kind that takes it. */
#define BIT(kind) (1u << KV_FIELD_##kind)

static void wrong_types(const kv_request_t *request, const kv_body_t *body)
{
	static const struct {
		kv_slice_t raw;
		unsigned taken; /* by kinds without a limit that forbids it */
	} items[] = {KV_ROWS(
		{RAW("\xc0"), 0}, {RAW("\xc2"), 0}, {RAW("\xc3"), 0}, {RAW("\xca\x00\x00\x00\x00"), 0},
		{RAW("\xcb\x00\x00\x00\x00\x00\x00\x00\x00"), 0}, {RAW("\xd4\x01\x00"), 0}, {RAW("\xc7\x00\x01"), 0},
		{RAW("\x90"), 0}, {RAW("\x80"), 0}, {RAW("\x91\x01"), 0}, {RAW("\xdd\xff\xff\xff\xff"), 0},
		{RAW("\xdf\xff\xff\xff\xff"), 0}, {RAW("\xdb\xff\xff\xff\xff"), 0}, {RAW("\xc6\xff\xff\xff\xff"), 0},
		{RAW("\xc1"), 0}, {RAW("\xff"), BIT(I32)}, {RAW("\xd0\x80"), BIT(I32)},
		{RAW("\xd2\x80\x00\x00\x00"), BIT(I32)}, {RAW("\xd3\xff\xff\xff\xff\x7f\xff\xff\xff"), 0},
		{RAW("\xcf\x00\x00\x00\x01\x00\x00\x00\x00"), BIT(U64)},
		{RAW("\xcf\xff\xff\xff\xff\xff\xff\xff\xff"), BIT(U64)},
		{RAW("\xce\xff\xff\xff\xff"), BIT(U64) | BIT(U32)},
		{RAW("\xce\x7f\xff\xff\xff"), BIT(U64) | BIT(U32) | BIT(I32)},
		{RAW("\xcf\x00\x00\x00\x00\x00\x00\x00\x00"), BIT(U64) | BIT(U32) | BIT(I32)},
		{RAW("\xd0\x00"), BIT(U64) | BIT(U32) | BIT(I32)}, {RAW("\xa0"), BIT(STR) | BIT(TEXT)},
		{RAW("\xda\x00\x01x"), BIT(STR) | BIT(TEXT)}, {RAW("\xa1\n"), BIT(TEXT)}, {RAW("\xa1\t"), BIT(TEXT)},
		{RAW("\xa1\r"), 0}, {RAW("\xa1\x00"), 0}, {RAW("\xa1\x80"), 0}, {RAW("\xa2\xc0\x80"), 0},
		{RAW("\xc4\x00"), BIT(BIN) | BIT(KEYS)}, {RAW("\xc4\x01x"), BIT(BIN)},
		{RAW("\xc4\x0f"
		     "0123456789abcde"),
		 BIT(BIN)},
		{RAW("\xc4\x10"
		     "0123456789abcdef"),
		 BIT(BIN) | BIT(KEYS) | BIT(KEY)},
		{RAW("\xc4\x11"
		     "0123456789abcdefg"),
		 BIT(BIN)})};

	for (uint32_t i = 0; i < body->count; i++) {
		const kv_field_t *field = &body->fields[i];

		for (size_t j = 0; j < KV_COUNT_OF(items); j++) {
			uint32_t len = encode_with(body, i, put_raw, &items[j].raw);
			const kv_field_t *bad = NULL;
			kv_status_t status = decode_exact(body, coded, len, &bad);
			unsigned taken = items[j].taken & 1u << field->kind;

			if (taken && status == KV_ERR_TOO_BIG && field->limit > 0) {
				assert_ptr_equal(bad, field);
				continue;
			}
			if ((status == KV_OK) != (taken != 0) ||
			    (status != KV_OK && (status != KV_ERR_PROTO || bad != field))) {
				fail_msg("%s.%s item %zu: %s", request->name, field->name, j, kv_status_name(status));
			}
		}
	}
}

KV_TEST(p10_a_field_of_another_type_is_refused_and_named)
{
	each_body(wrong_types);
}

/* Set field `index` of msg to `value` (numbers) or to that many bytes or keys, and encode without any check. */
static void put_sized(msgpack_packer *packer, const void *arg)
{
	static const uint8_t big[1 << 20];
	const struct {
		const kv_field_t *field;
		uint64_t value;
	} *wanted = arg;

	switch (wanted->field->kind) {
	case KV_FIELD_STR:
	case KV_FIELD_TEXT:
		msgpack_pack_str_with_body(packer, room, (uint32_t)wanted->value);
		break;
	case KV_FIELD_BIN:
		msgpack_pack_bin_with_body(packer, big, (uint32_t)wanted->value);
		break;
	case KV_FIELD_KEYS:
		msgpack_pack_bin_with_body(packer, big, KV_KEY_BYTES * (uint32_t)wanted->value);
		break;
	default:
		msgpack_pack_uint64(packer, wanted->value);
		break;
	}
}

static void limits_of(const kv_request_t *request, const kv_body_t *body)
{
	for (uint32_t i = 0; i < body->count; i++) {
		struct {
			const kv_field_t *field;
			uint64_t value;
		} wanted = {&body->fields[i], body->fields[i].limit};
		const kv_field_t *bad = NULL;
		uint32_t unit = wanted.field->kind == KV_FIELD_KEYS ? KV_KEY_BYTES : 1;
		uint32_t len;

		if (wanted.field->limit == 0) {
			assert_true(wanted.field->kind <= KV_FIELD_I32 || wanted.field->kind == KV_FIELD_KEY);
			continue;
		}
		if (wanted.field->kind > KV_FIELD_I32 && (wanted.value + 1) * unit >= WIRE_ROOM) {
			continue; /* the_largest_bodies_fit_and_one_more_does_not */
		}
		len = encode_with(body, i, put_sized, &wanted);
		if (decode_exact(body, coded, len, NULL) != KV_OK) {
			fail_msg("%s.%s at its limit is refused", request->name, wanted.field->name);
		}
		wanted.value++;
		len = encode_with(body, i, put_sized, &wanted);
		assert_int_equal(decode_exact(body, coded, len, &bad), KV_ERR_TOO_BIG);
		assert_ptr_equal(bad, wanted.field);
	}
}

KV_TEST(p5_every_field_is_taken_at_its_limit_and_refused_above)
{
	each_body(limits_of);
}

/* The big ones: a put of 65,536 blocks, a document of 1 MiB. */
KV_TEST(p5_the_largest_bodies_fit_and_one_more_does_not)
{
	const kv_body_t *put = &kv_request_find(KV_CODE_PUT_START)->ask,
			*stats = &kv_request_find(KV_CODE_STATS)->reply;
	size_t cap = KV_WIRE_MAX_BODY;
	uint8_t *big = calloc(1, cap), *out = malloc(cap);
	kv_msg_put_start_t start = {.space = 1}, got;
	kv_msg_stats_reply_t reply;
	uint32_t len = 0;

	start.keys = (kv_slice_t){big, KV_KEY_BYTES * KV_MAX_BLOCKS};
	start.event_hashes = (kv_slice_t){big, 8 * KV_MAX_BLOCKS};
	start.tokens = (kv_slice_t){big, 4u * 4u * 1024u * 1024u};
	start.writers = (kv_slice_t){big, KV_WRITER_BYTES * KV_MAX_WRITERS};
	assert_int_equal(kv_body_encode(put, &start, out, cap, &len), KV_OK);
	assert_true(kv_body_size(put, &start) <= KV_WIRE_MAX_BODY);
	assert_int_equal(kv_body_decode(put, out, len, &got, NULL), KV_OK);
	assert_int_equal(got.tokens.len, start.tokens.len);
	start.keys.len += KV_KEY_BYTES;
	assert_int_equal(kv_body_encode(put, &start, out, cap, &len), KV_ERR_TOO_BIG);
	start.keys.len -= KV_KEY_BYTES;
	start.event_hashes.len++;
	assert_int_equal(kv_body_encode(put, &start, out, cap, &len), KV_ERR_TOO_BIG);

	memset(big, '{', KV_MAX_JSON + 1);
	reply.json = (kv_slice_t){big, KV_MAX_JSON};
	assert_int_equal(kv_body_encode(stats, &reply, out, cap, &len), KV_OK);
	assert_int_equal(kv_body_decode(stats, out, len, &reply, NULL), KV_OK);
	reply.json = (kv_slice_t){big, KV_MAX_JSON + 1};
	assert_int_equal(kv_body_encode(stats, &reply, out, cap, &len), KV_ERR_TOO_BIG);
	free(out);
	free(big);
}

KV_TEST(p10_what_the_other_side_would_refuse_is_not_encoded)
{
	const kv_body_t *hello = &kv_request_find(KV_CODE_HELLO)->ask,
			*acquire = &kv_request_find(KV_CODE_ACQUIRE)->ask;
	kv_msg_hello_t h = {.version = 1, .program = kv_slice_str("a\nb")};
	kv_msg_acquire_t a = {.ladder = {room, 17}};
	uint32_t len = 99;

	assert_int_equal(kv_body_encode(hello, &h, coded, sizeof coded, &len), KV_ERR_ARG);
	h.program = kv_slice_str("\xff");
	assert_int_equal(kv_body_encode(hello, &h, coded, sizeof coded, &len), KV_ERR_ARG);
	h.program = (kv_slice_t){NULL, 5};
	assert_int_equal(kv_body_encode(hello, &h, coded, sizeof coded, &len), KV_ERR_ARG);
	h.program = (kv_slice_t){NULL, 0};
	assert_int_equal(kv_body_encode(hello, &h, coded, sizeof coded, &len), KV_OK);
	len = 99;
	assert_int_equal(kv_body_encode(acquire, &a, coded, sizeof coded, &len), KV_ERR_ARG);
	a.ladder.len = 16;
	a.group = 256;
	assert_int_equal(kv_body_encode(acquire, &a, coded, sizeof coded, &len), KV_ERR_TOO_BIG);
	assert_int_equal(len, 99);
}

KV_TEST(p10_what_is_not_an_array_of_the_fields_is_refused)
{
	static const kv_slice_t bad[] = {
		RAW("\x00"), RAW("\xc0"),         RAW("\x83\x01\x02\x03\x04\x05\x06"), RAW("\xa3xyz"),
		RAW("\x91"), RAW("\xdc\xff\xff"), RAW("\xdd\xff\xff\xff\xff"),         RAW("\xc1"),
		RAW("\x93")};
	const kv_body_t *body = &kv_request_find(KV_CODE_HELLO)->ask;
	const kv_field_t *field = body->fields;
	kv_msg_hello_t h;

	assert_int_equal(decode_exact(body, (const uint8_t *)"", 0, NULL), KV_ERR_PROTO);
	assert_int_equal(kv_body_decode(body, NULL, 0, &h, NULL), KV_ERR_PROTO);
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		assert_int_equal(decode_exact(body, bad[i].data, bad[i].len, &field), KV_ERR_PROTO);
	}
	/* A longer form of the same count is the same array. */
	assert_int_equal(decode_exact(body, (const uint8_t *)"\xdc\x00\x03\x01\x02\xa0", 6, &field), KV_OK);
	assert_null(field);
}

KV_TEST(p8_an_error_detail_is_always_decodable)
{
	char longer[400];
	kv_slice_t detail;
	uint32_t len;

	assert_int_equal(kv_error_encode("no such space", coded, sizeof coded, &len), KV_OK);
	assert_int_equal(kv_error_decode(coded, len, &detail), KV_OK);
	assert_int_equal(detail.len, 13);
	assert_int_equal(kv_error_encode("a\nb\xff\xc3\xa9", coded, sizeof coded, &len), KV_OK);
	assert_int_equal(kv_error_decode(coded, len, &detail), KV_OK);
	assert_memory_equal(detail.data, "a?b?\xc3\xa9", 6);
	memset(longer, 'x', sizeof longer);
	memcpy(longer + 254, "\xc3\xa9", 2);
	longer[399] = '\0';
	assert_int_equal(kv_error_encode(longer, coded, sizeof coded, &len), KV_OK);
	assert_int_equal(kv_error_decode(coded, len, &detail), KV_OK);
	assert_int_equal(detail.len, 254);
	assert_int_equal(kv_error_encode("", coded, sizeof coded, &len), KV_OK);
	assert_int_equal(kv_error_decode(coded, len, &detail), KV_OK);
	assert_int_equal(detail.len, 0);
	assert_int_equal(kv_error_encode("abc", coded, 4, &len), KV_ERR_TOO_BIG);
	assert_int_equal(kv_error_decode((const uint8_t *)"\x91\x01", 2, &detail), KV_ERR_PROTO);
}

static int fill_room(void **state)
{
	(void)state;
	memset(&untouched, 0x5a, sizeof untouched);
	for (size_t i = 0; i < sizeof room; i++) {
		room[i] = (uint8_t)('a' + i % 26);
	}

	return 0;
}

KV_TEST_MAIN(fill_room, NULL)
