/* The rules of the systemd unit, as a seccomp filter of this process and of all that it starts: two daemons under them
 * hand over to each other. */
#include "e2e/rig/pair.h"
#include "e2e/rig/peers.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#define FAMILIES_MAX              8u
#define LOAD(offset)              BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)(offset))
#define JUMP(how, value, yes, no) BPF_JUMP(BPF_JMP | (how) | BPF_K, (uint32_t)(value), (uint8_t)(yes), (uint8_t)(no))
#define RETURN(what)              BPF_STMT(BPF_RET | BPF_K, (what))
#define ALLOW                     RETURN(SECCOMP_RET_ALLOW)
#define REFUSE(error)             RETURN(SECCOMP_RET_ERRNO | (error))
#define ARGUMENT(i)               (offsetof(struct seccomp_data, args) + 8u * (i))

/* What the unit says of an option; NULL: nothing. */
static const char *unit_value(const char *option)
{
	static char line[512];
	FILE *unit = fopen(UNIT_FILE, "r");
	const char *value = NULL;

	assert_non_null(unit);
	while (!value && fgets(line, sizeof line, unit)) {
		line[strcspn(line, "\n")] = '\0';
		if (strncmp(line, option, strlen(option)) == 0 && line[strlen(option)] == '=') {
			value = line + strlen(option) + 1;
		}
	}
	fclose(unit);

	return value;
}

static void install(struct sock_filter *filter, size_t n)
{
	const struct sock_fprog program = {(unsigned short)n, filter};

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
		kv_test_skip("the kernel takes no seccomp filter");
	}
}

static void restrict_address_families(void)
{
	static const struct {
		const char *name;
		int family;
	} known[] = {{"AF_UNIX", AF_UNIX}, {"AF_INET", AF_INET}, {"AF_INET6", AF_INET6}, {"AF_NETLINK", AF_NETLINK}};
	struct sock_filter filter[5 + 2 * FAMILIES_MAX] = {LOAD(offsetof(struct seccomp_data, nr)),
							   JUMP(BPF_JEQ, SYS_socket, 1, 0), ALLOW, LOAD(ARGUMENT(0))};
	char families[512];
	size_t n = 4;

	(void)snprintf(families, sizeof families, "%s", unit_value("RestrictAddressFamilies"));
	for (char *rest, *name = strtok_r(families, " ", &rest); name; name = strtok_r(NULL, " ", &rest)) {
		size_t i = 0;

		while (i < KV_COUNT_OF(known) && strcmp(known[i].name, name) != 0) {
			i++;
		}
		assert_in_range(i, 0, KV_COUNT_OF(known) - 1);
		filter[n++] = (struct sock_filter)JUMP(BPF_JEQ, known[i].family, 0, 1);
		filter[n++] = (struct sock_filter)ALLOW;
	}
	filter[n++] = (struct sock_filter)REFUSE(EAFNOSUPPORT);
	install(filter, n);
	assert_int_equal(socket(AF_BLUETOOTH, SOCK_RAW, 0), -1);
	assert_int_equal(errno, EAFNOSUPPORT);
}

static void deny_write_and_execute(void)
{
	struct sock_filter filter[] = {
		LOAD(offsetof(struct seccomp_data, nr)),
		JUMP(BPF_JEQ, SYS_mprotect, 0, 3),
		LOAD(ARGUMENT(2)),
		JUMP(BPF_JSET, PROT_EXEC, 4, 0),
		ALLOW,
		JUMP(BPF_JEQ, SYS_mmap, 0, 4),
		LOAD(ARGUMENT(2)),
		BPF_STMT(BPF_ALU | BPF_AND | BPF_K, PROT_EXEC | PROT_WRITE),
		JUMP(BPF_JEQ, PROT_EXEC | PROT_WRITE, 0, 1),
		REFUSE(EPERM),
		ALLOW,
	};

	assert_string_equal(unit_value("MemoryDenyWriteExecute"), "yes");
	install(filter, KV_COUNT_OF(filter));
	assert_ptr_equal(mmap(NULL, 4096, PROT_EXEC | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), MAP_FAILED);
}

static void hand_over(int with_ucx)
{
	pair_t pair = {.peer = "node0", .deadline_ms = RIG_WAIT_MS, .call_ms = RIG_WAIT_MS, .notes = pair_notes_new()};
	peers_t net;

	peers_init(&net);
	for (uint32_t i = 0; i < 2 && with_ucx; i++) {
		peers_use_ucx(&net, i);
	}
	peers_start(&net);
	peers_connected(&net);
	pair.owner = &net.rig[0];
	pair.asker = &net.rig[1];
	pair_next(&pair);
	pair_start(&pair, PAIR_CONSUMER);
	pair_start(&pair, PAIR_PRODUCER);
	pair_await_end(&pair, PAIR_CONSUMER);
	pair_await_end(&pair, PAIR_PRODUCER);
	assert_int_equal(pair.notes->status[PAIR_CONSUMER], KVC_OK);
	assert_true(pair.notes->whole);
	pair_check_bytes(&pair);
	assert_true(rig_kvctl_has(&net.rig[1], "peers --json", with_ucx ? "\"bytes\":\"ucx\"" : "\"bytes\":\"tls\""));
	pair_finish(&pair);
	peers_fini(&net);
}

KV_TEST(p7_daemons_under_the_rules_of_the_unit_hand_over)
{
	restrict_address_families();
	deny_write_and_execute();
	hand_over(0);
	hand_over(1);
}
