/* Attackers: another user's process does one thing to excess in a namespace of its own, all the time. A tenant that
 * comes after it, as a third user, has its share and keeps it: of memory, of the index, and of what the daemon answers.
 * What each attack was about: docs/decisions/025, 026 and 027. */
#include "daemon/raw.h"
#include "e2e/rig/rig.h"

#include <arpa/inet.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <zmq.h>

#define ATTACKER 65534u
#define VICTIM   65533u
#define LEN      32u
#define OWN      5u /* conversations of the victim: 160 blocks of a share of 200 */
#define READS    20u
#define MANY     40u
#define DEEP     400u
#define SLOW     64

typedef struct attack {
	const char *name;
	void (*round)(user_t *user, uint32_t round);
	const char *layout;  /* NULL: the usual one */
	const char *counted; /* a counter that shows that the daemon has met it; NULL: none */
} attack_t;

static rig_t rig;
static char rival_sock[96];
static uint16_t port;
static const attack_t *attack;

/* ---- the attacks ----------------------------------------------------------------------------- */

static void put_some(user_t *user, uint32_t first, uint32_t count)
{
	kvc_key_t keys[LEN];

	for (uint32_t c = first; c < first + count; c++) {
		user_keys(user, c, LEN, keys);
		(void)user_put(user, keys, 0, LEN, 0, NULL);
	}
}

static void fill(user_t *user, uint32_t round)
{
	put_some(user, 1000 + round * MANY, MANY);
}

/* Everything is leased, and nothing given back. */
static void pin(user_t *user, uint32_t round)
{
	kvc_key_t keys[LEN];
	kvc_lease_t *lease;

	put_some(user, 1000 + round * MANY, MANY);
	for (uint32_t c = 0; c < MANY; c++) {
		user_keys(user, 1000 + round * MANY + c, LEN, keys);
		(void)kvc_acquire(user->space, keys, LEN, c % 2 ? LEN - 1 : 0, 0, &lease);
	}
}

/* Puts are begun, and never ended. */
static void begin(user_t *user, uint32_t round)
{
	kvc_key_t keys[LEN];
	kvc_put_t *put;

	for (uint32_t c = 0; c < MANY; c++) {
		user_keys(user, 1000 + round * MANY + c, LEN, keys);
		(void)kvc_put_start(user->space, keys, 0, c % 2 ? 1 : LEN, NULL, &put);
	}
	(void)kvc_poll(user->kvc, 10);
}

/* Joins as a process that will outlive it, and dies with slots that it has begun to write. */
static void borrow_pidfd(user_t *user, uint32_t round)
{
	char name[32];

	for (uint32_t i = 0; i < 8; i++) {
		int pidfd = (int)syscall(SYS_pidfd_open, getppid(), 0), fd = raw_open(rival_sock);
		kv_msg_join_reply_t reply;

		snprintf(name, sizeof name, "thief.%u.%u", round, i);
		(void)raw_join_with(fd, name, NULL, pidfd, &reply);
		close(pidfd);
		close(fd);
	}
	begin(user, round);
}

/* Subscribes and does not read, while there is much to tell. */
static void subscribe(user_t *user, uint32_t round)
{
	static void *context, *deaf[8];
	const int few = 1, small = 4096;
	char endpoint[128];

	context = context ? context : zmq_ctx_new();
	snprintf(endpoint, sizeof endpoint, "ipc://%.79s/rival.events", rig.run_dir);
	for (uint32_t i = 0; i < KV_COUNT_OF(deaf) && !deaf[i]; i++) {
		deaf[i] = zmq_socket(context, ZMQ_SUB);
		(void)zmq_setsockopt(deaf[i], ZMQ_RCVHWM, &few, sizeof few);
		(void)zmq_setsockopt(deaf[i], ZMQ_RCVBUF, &small, sizeof small);
		(void)zmq_setsockopt(deaf[i], ZMQ_SUBSCRIBE, "", 0);
		(void)zmq_connect(deaf[i], endpoint);
	}
	put_some(user, 1000 + round * MANY, MANY);
}

static int http_connect(void)
{
	const struct sockaddr_in to = {
		.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (connect(fd, (const struct sockaddr *)&to, sizeof to) != 0) {
		close(fd);
		return -1;
	}

	return fd;
}

/* HTTP requests that never end. */
static void ask_slowly(user_t *user, uint32_t round)
{
	static int fds[SLOW];

	(void)user;
	for (uint32_t i = 0; i < SLOW; i++) {
		if (round > 0 && fds[i] >= 0) {
			close(fds[i]);
		}
		fds[i] = http_connect();
		(void)!write(fds[i], "GET /met", 8);
	}
}

/* A chain with a branch at every block, and requests for all of it. */
static void dig(user_t *user, uint32_t round)
{
	static kvc_key_t keys[DEEP + 1];
	static uint8_t block[RIG_BLOCK_BYTES];
	const void *const src[1] = {block};
	const kvc_put_options_t options = {.struct_size = sizeof options, .blocks = src};
	kvc_lease_t *lease;

	for (uint32_t i = 0; i < DEEP; i++) {
		kvc_key_t branch = {{1, (uint8_t)round, (uint8_t)i, (uint8_t)(i >> 8)}};

		keys[i] = (kvc_key_t){{2, (uint8_t)round, (uint8_t)i, (uint8_t)(i >> 8)}};
		(void)kvc_put(user->space, keys, i, i + 1, &options, NULL);
		kvc_key_t saved = keys[i];

		keys[i] = branch;
		(void)kvc_put(user->space, keys, i, i + 1, &options, NULL);
		keys[i] = saved;
	}
	for (uint32_t i = 0; i < 16; i++) {
		if (kvc_acquire(user->space, keys, DEEP, 0, 0, &lease) == KVC_OK) {
			kvc_release(&lease, 1);
		}
	}
}

/* One block of every size there is: each takes a slab and a file. */
static void spread(user_t *user, uint32_t round)
{
	char layout[128];

	for (uint32_t i = 0; i < 16; i++) {
		kvc_identity_t identity = user_identity("spread");
		user_t other = *user;

		snprintf(layout, sizeof layout,
			 "kvk1 heads=2 layers=%u tokens=16 k=32 v=32 dtype=bf16 inner=split page=0",
			 1 + i % 4 + 8 * (i / 4));
		identity.layout = layout;
		if (kvc_space_open(user->kvc, &identity, &other.space) == KVC_OK) {
			put_some(&other, 1000 + round, 1);
			kvc_space_close(other.space);
		}
	}
}

static const attack_t attacks[] = {
	{"fills the index with small blocks", fill,
	 "kvk1 heads=1 layers=2 tokens=16 k=32 v=32 dtype=bf16 inner=split page=0", NULL},
	{"fills memory and disk", fill, NULL, NULL},
	{"pins what it can", pin, NULL, "kvd_share_full_total"},
	{"begins puts and never ends them", begin, NULL, "kvd_share_full_total"},
	{"joins with another process's pidfd", borrow_pidfd, NULL, "kvd_joins_refused_total{reason=pidfd_unproved}"},
	{"subscribes and does not read", subscribe, NULL, NULL},
	{"asks over HTTP and never finishes", ask_slowly, NULL, "kvd_http_ended_total"},
	{"asks for deep chains with branches", dig, NULL, NULL},
	{"has blocks of many sizes", spread, NULL, NULL},
};

static int become(unsigned user)
{
	return setresgid(user, user, user) == 0 && setresuid(user, user, user) == 0;
}

static void attacker(void *arg, int ready)
{
	kvc_identity_t identity = user_identity("rival");
	user_t user;

	(void)arg;
	identity.layout = attack->layout ? attack->layout : identity.layout;
	if (!become(ATTACKER) || user_try(&user, rival_sock, &identity) != KVC_OK) {
		_exit(1);
	}
	for (uint32_t round = 0;; round++) {
		attack->round(&user, round);
		(void)kvc_poll(user.kvc, 1);
		if (round == 0) {
			child_say(ready);
		}
	}
}

/* ---- the victim ------------------------------------------------------------------------------ */

/* Blocks in memory: what is on disk only may need room there when it is read. */
static uint32_t in_memory(user_t *user)
{
	kvc_key_t keys[LEN];
	kvc_match_t match = {.struct_size = sizeof match};
	uint32_t blocks = 0;

	(void)kvc_poll(user->kvc, 0);
	for (uint32_t c = 0; c < OWN; c++) {
		user_keys(user, c, LEN, keys);
		kvc_match(user->space, keys, LEN, &match);
		blocks += match.n_cpu;
	}

	return blocks;
}

static int reads_all(user_t *user)
{
	kvc_key_t keys[LEN];
	uint32_t n;

	for (uint32_t c = 0; c < OWN; c++) {
		user_keys(user, c, LEN, keys);
		if (user_get(user, keys, LEN, &n) != KVC_OK || n != LEN) {
			return 0;
		}
	}

	return 1;
}

static int is_answered(void)
{
	static const char probe[] = "GET /healthz HTTP/1.0\r\n\r\n";
	char answer[64] = "";
	int fd = http_connect();
	int yes = fd >= 0 && write(fd, probe, sizeof probe - 1) == sizeof probe - 1 &&
		  read(fd, answer, sizeof answer - 1) > 0 && strncmp(answer, "HTTP/1.", 7) == 0;

	close(fd);

	return yes;
}

static _Noreturn void give_up(user_t *user, const char *why)
{
	fprintf(stderr, "# the victim %s, %u of %u blocks in memory, %u wrong\n", why, in_memory(user), OWN * LEN,
		(unsigned)user->wrong);
	_exit(2);
}

/* Ready when it has had its share, and kept it while the attack went on. */
static void victim(void *arg, int ready)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	kvc_identity_t identity = user_identity("victim");
	user_t user;

	(void)arg;
	if (!become(VICTIM) || user_try(&user, rig.sock, &identity) != KVC_OK) {
		_exit(1);
	}
	while (in_memory(&user) < OWN * LEN) { /* slabs come one after the other */
		put_some(&user, 0, OWN);
		(void)reads_all(&user);
		if (rig_now_ms() > deadline) {
			give_up(&user, "never had its share");
		}
	}
	for (uint32_t i = 0; i < READS; i++) {
		while (!reads_all(&user) || !is_answered()) { /* on a busy machine an answer may come too late */
			if (rig_now_ms() > deadline) {
				give_up(&user, "is not served");
			}
		}
		if (in_memory(&user) != OWN * LEN || user.wrong) {
			give_up(&user, "lost blocks");
		}
	}
	child_say(ready);
	_exit(0);
}

/* ---- the table ------------------------------------------------------------------------------- */

static void stage(void)
{
	int probe = raw_listen_anywhere(&port);

	close(probe);
	rig_init(&rig, 1);
	rig_option(&rig, "--nvme.size=32MiB");
	rig_option(&rig, "--index.max_blocks=1024");
	rig_option(&rig, "--namespaces=default,rival");
	rig_option(&rig, "--sockets.mode=default=0666,rival=0666");
	rig_option(&rig, "--http.listen=127.0.0.1:%u", port);
	rig_option(&rig, "--instance.max_pinned=1GiB");
	rig_option(&rig, "--instance.max_unfinished=1GiB");
	snprintf(rival_sock, sizeof rival_sock, "%.79s/rival.sock", rig.run_dir);
	rig_start(&rig);
	assert_int_equal(chmod(rig.dir, 0755), 0);
	assert_int_equal(chmod(rig.run_dir, 0755), 0);
}

static void withstand(void)
{
	const kvc_config_t look = {.struct_size = sizeof look, .socket = rival_sock, .observe = 1};
	kvc_t *rival;
	pid_t pid;

	stage();
	pid = child_start(attacker, NULL);
	(void)child_start(victim, NULL);
	assert_int_equal(kvc_attach(&look, &rival), KVC_OK);
	assert_in_range(rig_share(rival, "cpu", "irreclaimable"), 0, rig_share(rival, "cpu", "share"));
	kvc_detach(rival);
	/* What is the victim's went for nobody else. */
	assert_int_equal(rig_metric(&rig, "kvd_namespace_evicted_for_others_total"), 0);
	assert_true(!attack->counted || rig_metric_reaches(&rig, attack->counted, 1));
	child_kill(pid);
	rig_end(&rig);
}

KV_TEST(p8_whatever_one_tenant_does_another_has_its_share)
{
	if (geteuid() != 0) {
		kv_test_skip("processes of two users need root");
	}
	for (size_t i = 0; i < KV_COUNT_OF(attacks); i++) {
		attack = &attacks[i];
		printf("# one tenant %s\n", attack->name);
		withstand();
	}
}
