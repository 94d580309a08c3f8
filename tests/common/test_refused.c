/* kv/system.h: what an errno of a refused call means, and what is said of it. */
#include "kv_cmocka.h"
#include "kv/system.h"
#include "kv/status.h"
#include "kv_child.h"
#include "kv_refuse.h"

#include <errno.h>
#include <sys/resource.h>

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

/* As a daemon's that has none left when it numbers a new space. */
KV_TEST(p5_randomness_needs_no_descriptor_once_it_was_there)
{
	const struct rlimit none = {0, 0};
	uint64_t words[2] = {0, 0};
	int wstatus = 0;
	pid_t pid = fork();

	if (pid == 0) {
		alarm(60); /* kv_random() would wait for ever */
		kv_refuse_call(SYS_getrandom, EPERM);
		if (kv_random_error() != 0 || setrlimit(RLIMIT_NOFILE, &none) != 0) {
			_exit(1);
		}
		kv_random(&kv_env_posix, words, sizeof words);
		_exit(words[0] != 0 && words[1] != 0 ? 0 : 2);
	}
	assert_int_equal(waitpid(pid, &wstatus, 0), pid);
	if (child_exit_of(wstatus) == 77) {
		kv_test_skip("the kernel takes no seccomp filter");
	}
	assert_int_equal(child_exit_of(wstatus), 0);
}
