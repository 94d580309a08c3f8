/* The request table as data: kv/requests.h expanded once for the fields, once for the requests. */
#include "kv/wire.h"

#define FIELD(field_kind, field_name, field_limit, field_help)                                                         \
	{.kind = KV_FIELD_##field_kind, .name = #field_name, .limit = (field_limit), .help = field_help},

#define REQUEST_FIELDS(code, NAME, name, roles, help)                                                                  \
	static const kv_field_t fields_##name[] = {KV_FIELDS_##name(FIELD)};                                           \
	static const kv_field_t fields_##name##_reply[] = {KV_FIELDS_##name##_reply(FIELD)};
#define NOTICE_FIELDS(code, NAME, name, roles, help)                                                                   \
	static const kv_field_t fields_##name[] = {KV_FIELDS_##name(FIELD)};

KV_REQUEST_LIST(REQUEST_FIELDS)
KV_NOTICE_LIST(NOTICE_FIELDS)

#define BODY(name)                                                                                                     \
	{                                                                                                              \
		fields_##name, KV_COUNT_OF(fields_##name)                                                              \
	}
#define FITS(name)                                  _Static_assert(KV_COUNT_OF(fields_##name) <= KV_WIRE_MAX_FIELDS, #name " has too many fields");
#define REQUEST_FITS(code, NAME, name, roles, help) FITS(name) FITS(name##_reply)
#define NOTICE_FITS(code, NAME, name, roles, help)  FITS(name)

KV_REQUEST_LIST(REQUEST_FITS)
KV_NOTICE_LIST(NOTICE_FITS)

const kv_request_t kv_requests[] = {
#define REQUEST_ROW(number, NAME, name_, roles_, help_)                                                                \
	{number, #NAME, roles_, help_, BODY(name_), BODY(name_##_reply)},
#define NOTICE_ROW(number, NAME, name_, roles_, help_) {number, #NAME, roles_, help_, BODY(name_), {NULL, 0}},
	KV_REQUEST_LIST(REQUEST_ROW) KV_NOTICE_LIST(NOTICE_ROW)};

const uint32_t kv_request_count = KV_COUNT_OF(kv_requests);

/* Codes are small and the row of each is known at compile time. */
enum {
#define REQUEST_INDEX(code, NAME, name, roles, help) INDEX_##NAME,
	KV_REQUEST_LIST(REQUEST_INDEX) KV_NOTICE_LIST(REQUEST_INDEX)
};

#define MAX_CODE 127u

static const uint8_t row_of_code[MAX_CODE + 1] = {
#define CODE_ROW(code, NAME, name, roles, help) [code] = INDEX_##NAME + 1,
	KV_REQUEST_LIST(CODE_ROW) KV_NOTICE_LIST(CODE_ROW)};

const kv_request_t *kv_request_find(uint16_t code)
{
	if (code > MAX_CODE || row_of_code[code] == 0) {
		return NULL;
	}

	return &kv_requests[row_of_code[code] - 1];
}

const char *kv_field_kind_name(kv_field_kind_t kind)
{
	static const char *const names[] = {"U32", "U64", "I32", "STR", "TEXT", "BIN", "KEY", "KEYS"};

	return (unsigned)kind < KV_COUNT_OF(names) ? names[kind] : "UNKNOWN";
}
