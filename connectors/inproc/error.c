#include "inproc/error.h"

#include "kv/struct.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char why_text[512] = "no call has failed";

const char *kvx_last_error(void)
{
	return why_text;
}

kvc_status_t kvx_refuse(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	(void)vsnprintf(why_text, sizeof why_text, format, args);
	va_end(args);

	return KVC_ERR_ARG;
}

int kvx_fill_result(const char *call, void *out, const void *full, size_t size)
{
	if (!out || kv_struct_fill(out, full, size)) {
		return 1;
	}
	(void)kvx_refuse("%s: struct_size is not set", call);

	return 0;
}
