/* The status list as text. */
#include "kv/status.h"

typedef struct kv_status_row {
	kv_status_t status;
	const char *name;
	const char *text;
	kv_radius_t radius;
	kv_retry_t retry;
	int exit_code;
} kv_status_row_t;

static const kv_status_row_t rows[] = {
#define ROW(name, code, radius, retry, exit_code, sentence)                                                            \
	{KV_##name, #name, sentence, KV_RADIUS_##radius, KV_RETRY_##retry, exit_code},
	KV_STATUS_LIST(ROW)
#undef ROW
};

static const kv_status_row_t unknown = {KV_ERR_INTERNAL,   "UNKNOWN",   "a status this version does not know",
					KV_RADIUS_REQUEST, KV_RETRY_NO, 70};

static const kv_status_row_t *row_of(kv_status_t status)
{
	for (unsigned i = 0; i < sizeof rows / sizeof rows[0]; i++) {
		if (rows[i].status == status) {
			return &rows[i];
		}
	}

	return &unknown;
}

const char *kv_status_name(kv_status_t status)
{
	return row_of(status)->name;
}

const char *kv_status_text(kv_status_t status)
{
	return row_of(status)->text;
}

kv_radius_t kv_status_radius(kv_status_t status)
{
	return row_of(status)->radius;
}

kv_retry_t kv_status_retry(kv_status_t status)
{
	return row_of(status)->retry;
}

int kv_status_exit_code(kv_status_t status)
{
	return row_of(status)->exit_code;
}
