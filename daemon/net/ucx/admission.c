/* Filters of sockets: classic BPF, which needs no privilege. */
#include "net/ucx/admission.h"

#include <linux/filter.h>
#include <string.h>
#include <sys/resource.h>

#define FDS_MAX    1024 /* UCX opens its sockets when the process has a few */
#define EACH       9u   /* instructions for an address, at most */
#define FRAME      6u   /* instructions around them */
#define LET_IN     UINT32_MAX
#define VERSION_AT (SKF_NET_OFF + 0)
#define FROM_V4_AT (SKF_NET_OFF + 12)
#define FROM_V6_AT (SKF_NET_OFF + 8)

typedef struct program {
	struct sock_filter code[FRAME + EACH * KVD_ADMISSION_ADDRESSES];
	uint16_t len;
} program_t;

void kvd_admission_find(const kvd_admission_t *before, kvd_admission_t *found)
{
	found->count = 0;
	for (int fd = 0; fd < FDS_MAX && found->count < KVD_ADMISSION_SOCKETS; fd++) {
		int listens = 0, is_old = 0;
		socklen_t len = sizeof listens;

		for (uint32_t i = 0; before && i < before->count; i++) {
			is_old |= before->fds[i] == fd;
		}
		if (!is_old && getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &len) == 0 && listens) {
			found->fds[found->count++] = fd;
		}
	}
}

static void add_load(program_t *program, uint16_t size, int at)
{
	program->code[program->len++] = (struct sock_filter)BPF_STMT(BPF_LD | size | BPF_ABS, (uint32_t)at);
}

/* Goes on where it is equal, else skips. */
static void add_test(program_t *program, uint32_t value, uint32_t skip)
{
	program->code[program->len++] =
		(struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, (uint8_t)skip);
}

static void add_verdict(program_t *program, uint32_t verdict)
{
	program->code[program->len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, verdict);
}

static uint32_t word_of(const kvd_address_t *address, uint32_t i)
{
	const uint8_t *b = address->bytes + 4 * (size_t)i;

	return (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
}

/* All of one version of IP, from its first word on. */
static void add_addresses(program_t *program, const kvd_address_t *addresses, uint32_t count, uint32_t len)
{
	const uint32_t words = len / 4;

	for (uint32_t i = 0; i < count; i++) {
		for (uint32_t w = 0; addresses[i].len == len && w < words; w++) {
			add_load(program, BPF_W, (len == 4 ? FROM_V4_AT : FROM_V6_AT) + 4 * (int)w);
			add_test(program, word_of(&addresses[i], w), 2 * (words - 1 - w) + 1);
		}
		if (addresses[i].len == len) {
			add_verdict(program, LET_IN);
		}
	}
	add_verdict(program, 0);
}

kv_status_t kvd_admission_set(const kvd_admission_t *admission, const kvd_address_t *addresses, uint32_t count)
{
	program_t program = {.len = 0}, v4 = {.len = 0};
	struct sock_fprog filter = {.filter = program.code};

	if (count > KVD_ADMISSION_ADDRESSES) {
		return KV_ERR_LIMIT;
	}
	add_addresses(&v4, addresses, count, 4);
	add_load(&program, BPF_B, VERSION_AT);
	program.code[program.len++] = (struct sock_filter)BPF_STMT(BPF_ALU | BPF_AND | BPF_K, 0xf0);
	add_test(&program, 0x40, v4.len);
	memcpy(program.code + program.len, v4.code, v4.len * sizeof v4.code[0]);
	program.len = (uint16_t)(program.len + v4.len);
	add_addresses(&program, addresses, count, 16);
	filter.len = program.len;
	for (uint32_t i = 0; i < admission->count; i++) {
		if (setsockopt(admission->fds[i], SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) != 0) {
			return KV_ERR_UNSUPPORTED;
		}
	}

	return KV_OK;
}
