/* Why a call failed, in words; and the small things every program asks first. */
#include "impl.h"

#include "kv/struct.h"

#include "kv/miss_reason_list.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* The installed header has a name for each. */
#define SAME_STATUS(name, code, radius, retry, exit_code, sentence)                                                    \
	_Static_assert(KVC_##name == (int)KV_##name, "kvc.h: status " #name);
KV_STATUS_LIST(SAME_STATUS)
#define SAME_REASON(name, label, words) _Static_assert(KVC_WHY_##name == (int)KV_WHY_##name, "kvc.h: reason " #name);
KV_MISS_REASON_LIST(SAME_REASON)

static _Thread_local char last_error[512];

kvc_status_t kvc_fail(kv_status_t status, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(last_error, sizeof last_error, format, args);
	va_end(args);

	return (kvc_status_t)status;
}

kvc_status_t kvc_fail_request(kv_status_t status, const char *detail, const char *what, ...)
{
	char text[sizeof last_error / 2];
	va_list args;

	va_start(args, what);
	vsnprintf(text, sizeof text, what, args);
	va_end(args);

	return kvc_fail(status, "%s: %s%s%s", text, kv_status_text(status), detail[0] ? ": " : "", detail);
}

const char *kvc_last_error(void)
{
	return last_error;
}

const char *kvc_status_name(kvc_status_t status)
{
	return kv_status_name((kv_status_t)status);
}

const char *kvc_status_text(kvc_status_t status)
{
	return kv_status_text((kv_status_t)status);
}

kvc_status_t kvc_fill(const char *call, void *out, const void *full, size_t size)
{
	return kv_struct_fill(out, full, size) ? KVC_OK : kvc_fail(KV_ERR_ARG, "%s: struct_size is not set", call);
}

const char *kvc_version(void)
{
	_Static_assert(KV_WIRE_VERSION == 1u && KVC_ABI_VERSION == 1, "say the new versions in the text below");

	return "kvc " KVD_VERSION " abi 1 wire 1";
}

void kvc_abandon(kvc_t *kvc)
{
	if (kvc) {
		atomic_store(&kvc->abandoned, 1);
	}
}

int kvc_is_abandoned(const kvc_t *kvc)
{
	return atomic_load_explicit(&kvc->abandoned, memory_order_relaxed) || kv_broken_count() > 0;
}

kvc_status_t kvc_check_process(const kvc_t *kvc)
{
	if (*kvc->fork_guard == KVC_FORK_GUARD) {
		return !kvc_is_abandoned(kvc) ? KVC_OK
					      : kvc_fail(KV_ERR_INTERNAL, "an invariant is broken; this process has "
									  "detached from kvd for good (see its log)");
	}

	return kvc_fail(KV_ERR_CLOSED, "this process was forked from the one that attached; attach again in it");
}

void kvc_free(void *p)
{
	free(p);
}
