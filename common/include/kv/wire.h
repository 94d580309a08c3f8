/* kv/wire.h -- frames and bodies on a kvd socket, made from the request table (kv/requests.h).
 *
 * A frame is a 24-byte header and a msgpack body. File descriptors travel with the frame's first byte (SCM_RIGHTS).
 * Decoding is bounded: headers are walked first, every count must fit into the bytes left, and no byte is allocated for
 * what a header claims. Decoded strings and bytes are borrowed from the frame.
 */
#ifndef KV_WIRE_H
#define KV_WIRE_H

#include "kv/requests.h"
#include "kv/status.h"
#include "kv/types.h"

#define KV_WIRE_VERSION               1u
#define KV_WIRE_MAGIC                 0x564bu /* "KV" */
#define KV_WIRE_MAX_BODY_BEFORE_HELLO 65536u
#define KV_WIRE_MAX_BODY              (32u << 20)
#define KV_WIRE_MAX_FDS               3u
#define KV_WIRE_MAX_FIELDS            16u /* in one body */

typedef enum kv_frame_kind { KV_FRAME_REQUEST = 0, KV_FRAME_REPLY = 1, KV_FRAME_NOTICE = 2 } kv_frame_kind_t;

typedef struct kv_frame_header {
	uint16_t magic;
	uint8_t version;
	uint8_t kind;   /* kv_frame_kind_t */
	uint16_t code;  /* kv_code_t */
	uint16_t fds;   /* descriptors that came with it, at most KV_WIRE_MAX_FDS */
	uint32_t body;  /* bytes that follow */
	int32_t status; /* of a reply: kv_status_t; an error's body is a msgpack array of one STR: the detail */
	uint64_t id;    /* chosen by the client; a reply repeats it */
} kv_frame_header_t;

_Static_assert(sizeof(kv_frame_header_t) == 24, "frame header is 24 bytes");

typedef enum kv_code {
#define KV_CODE_ENUM(code, NAME, name, roles, help) KV_CODE_##NAME = (code),
	KV_REQUEST_LIST(KV_CODE_ENUM) KV_NOTICE_LIST(KV_CODE_ENUM)
#undef KV_CODE_ENUM
} kv_code_t;

#define KV_CTYPE_U32                             uint32_t
#define KV_CTYPE_U64                             uint64_t
#define KV_CTYPE_I32                             int32_t
#define KV_CTYPE_STR                             kv_slice_t
#define KV_CTYPE_TEXT                            kv_slice_t
#define KV_CTYPE_BIN                             kv_slice_t
#define KV_CTYPE_KEY                             kv_key_t
#define KV_CTYPE_KEYS                            kv_slice_t
#define KV_STRUCT_FIELD(kind, name, limit, help) KV_CTYPE_##kind name;

/* kv_msg_hello_t, kv_msg_hello_reply_t, kv_msg_put_done_t, ... */
#define KV_REQUEST_STRUCT(code, NAME, name, roles, help)                                                               \
	typedef struct kv_msg_##name {                                                                                 \
		KV_FIELDS_##name(KV_STRUCT_FIELD)                                                                      \
	} kv_msg_##name##_t;                                                                                           \
	typedef struct kv_msg_##name##_reply {                                                                         \
		KV_FIELDS_##name##_reply(KV_STRUCT_FIELD)                                                              \
	} kv_msg_##name##_reply_t;
#define KV_NOTICE_STRUCT(code, NAME, name, roles, help)                                                                \
	typedef struct kv_msg_##name {                                                                                 \
		KV_FIELDS_##name(KV_STRUCT_FIELD)                                                                      \
	} kv_msg_##name##_t;
KV_REQUEST_LIST(KV_REQUEST_STRUCT)
KV_NOTICE_LIST(KV_NOTICE_STRUCT)
#undef KV_REQUEST_STRUCT
#undef KV_NOTICE_STRUCT

/* Room for any decoded body: request, reply or notice. */
typedef union kv_msg {
#define KV_REQUEST_MEMBER(code, NAME, name, roles, help)                                                               \
	kv_msg_##name##_t name;                                                                                        \
	kv_msg_##name##_reply_t name##_reply;
#define KV_NOTICE_MEMBER(code, NAME, name, roles, help) kv_msg_##name##_t name;
	KV_REQUEST_LIST(KV_REQUEST_MEMBER) KV_NOTICE_LIST(KV_NOTICE_MEMBER)
#undef KV_REQUEST_MEMBER
#undef KV_NOTICE_MEMBER
} kv_msg_t;

typedef enum kv_field_kind {
	KV_FIELD_U32,
	KV_FIELD_U64,
	KV_FIELD_I32,
	KV_FIELD_STR,
	KV_FIELD_TEXT,
	KV_FIELD_BIN,
	KV_FIELD_KEY,
	KV_FIELD_KEYS,
} kv_field_kind_t;

typedef struct kv_field {
	kv_field_kind_t kind;
	const char *name;
	uint32_t limit;
	const char *help;
} kv_field_t;

typedef struct kv_body {
	const kv_field_t *fields;
	uint32_t count;
} kv_body_t;

typedef struct kv_request {
	uint16_t code;
	const char *name; /* "ACQUIRE" */
	uint32_t roles;   /* KV_ROLE_*; NONE: a notice */
	const char *help;
	kv_body_t ask;   /* request or notice */
	kv_body_t reply; /* count 0 for a notice */
} kv_request_t;

/* All requests, then all notices, in code order. */
extern const kv_request_t kv_requests[];
extern const uint32_t kv_request_count;

/* "U32", "STR", ... */
const char *kv_field_kind_name(kv_field_kind_t kind);

/* Where field `index` of a body lies in the body's struct. */
size_t kv_field_offset(const kv_body_t *body, uint32_t index);

/* NULL when the code is unknown. */
const kv_request_t *kv_request_find(uint16_t code);

/* Check a header from the wire: magic, version, kind, fds, body <= max_body, code (a notice's code in a notice and
 * nowhere else), in this order. The status of what is not a reply must be 0. KV_ERR_PROTO, KV_ERR_VERSION,
 * KV_ERR_UNKNOWN_REQUEST, KV_ERR_TOO_BIG say what is wrong. */
kv_status_t kv_frame_check(const kv_frame_header_t *header, uint32_t max_body);

/* Encode `msg` (a struct made from `body`'s fields) into at most `cap` bytes. *p_len is set on success only.
 * KV_ERR_TOO_BIG: does not fit, or a field is over its limit. KV_ERR_ARG: the other side would refuse the value (text
 * that is not clean UTF-8, keys that are not whole). What could be encoded can be decoded. */
kv_status_t kv_body_encode(const kv_body_t *body, const void *msg, uint8_t *out, size_t cap, uint32_t *p_len);

/* Upper bound of the encoded size of this very message. */
size_t kv_body_size(const kv_body_t *body, const void *msg);

/* Decode. Every byte must be used; a mistyped or over-limit field is KV_ERR_PROTO or KV_ERR_TOO_BIG and names the field
 * in *p_bad (may be NULL); a sound array of more or fewer fields is KV_ERR_VERSION: another build has made it. `msg` is
 * filled on success only. */
kv_status_t kv_body_decode(const kv_body_t *body, const uint8_t *data, uint32_t len, void *msg,
			   const kv_field_t **p_bad);

/* An error reply's body: one STR, cut to 255 bytes at a character; what STR does not allow becomes '?'. */
kv_status_t kv_error_encode(const char *detail, uint8_t *out, size_t cap, uint32_t *p_len);
kv_status_t kv_error_decode(const uint8_t *data, uint32_t len, kv_slice_t *p_detail);

#endif
