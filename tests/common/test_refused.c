/* kv/system.h: what an errno of a refused call means, and what is said of it. */
#include "kv_cmocka.h"
#include "kv/system.h"
#include "kv/status.h"

#include <errno.h>

KV_TEST(p10_only_the_want_of_memory_is_out_of_memory)
{
	static const struct {
		int error;
		kv_status_t status;
	} rows[] = {{ENOMEM, KV_ERR_NOMEM}, {EPERM, KV_ERR_REFUSED}, {EACCES, KV_ERR_REFUSED}, {ENOSYS, KV_ERR_REFUSED},
		    {EAGAIN, KV_ERR_BUSY},  {EMFILE, KV_ERR_BUSY},   {ENFILE, KV_ERR_BUSY},    {ENOSPC, KV_ERR_BUSY}};

	for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
		assert_int_equal(kv_refused_status(rows[i].error), rows[i].status);
	}
}

KV_TEST(p10_a_refusal_names_call_error_and_remedy)
{
	static const struct {
		const char *call;
		int error;
		const char *says;
	} rows[] = {
		{"memfd_create", EPERM,
		 "memfd_create: Operation not permitted; allow memfd_create in the seccomp filter"},
		{"eventfd", ENOSYS, "eventfd: Function not implemented; allow eventfd2 in"},
		{"pthread_create", EPERM, "allow clone3 and clone in"},
		{"pthread_create", EAGAIN, "pthread_create: Resource temporarily unavailable; "},
		{"epoll_create1", EMFILE, "RLIMIT_NOFILE (ulimit -n, LimitNOFILE= of systemd) is "},
		{"socket", ENFILE, "fs.file-max"},
	};
	char text[KV_REFUSED_TEXT];

	for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
		assert_non_null(strstr(kv_refused_text(rows[i].call, rows[i].error, text, sizeof text), rows[i].says));
	}
	assert_string_equal(kv_refused_text("mmap", ENOMEM, text, sizeof text), "mmap: Cannot allocate memory");
}
