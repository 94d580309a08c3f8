/* How blocks come from another node: over TLS, with somebody in between, while keys change, and over UCX. */
#include "e2e/rig/peers.h"
#include "kv_child.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCKS 96u
#define HALF   32u
#define SOON   20000u

static peers_t net_; /* rigs 0 (has the blocks) and 1 (wants them) */
static user_t producer_, consumer_;
static kvc_key_t keys_[2][BLOCKS];
static uint32_t tokens_[BLOCKS * RIG_TOKENS];
static kvc_handover_t *sent_, *wanted_;
static uint32_t talk_;
static char transfer_[16];

static void start(void)
{
	peers_start(&net_);
	user_attach(&producer_, &net_.rig[0], "model");
	user_attach(&consumer_, &net_.rig[1], "model");
	peers_connected(&net_);
}

KV_FIXTURE(setup)
{
	peers_init(&net_);
}

KV_FIXTURE(teardown)
{
	user_leave(&producer_);
	user_leave(&consumer_);
	peers_fini(&net_);
}

static void put_and_send(uint32_t from, uint32_t n)
{
	const kvc_key_source_t source = {.key = user_key_at, .ctx = keys_[0]};
	const kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk,
					    .transfer = transfer_,
					    .n = n,
					    .source = &source,
					    .last = n == BLOCKS,
					    .tail = "token",
					    .tail_len = n == BLOCKS ? 5 : 0};

	assert_int_equal(user_put(&producer_, keys_[0], from, n, 0, NULL), KVC_OK);
	assert_int_equal(kvc_handover_send(producer_.space, &chunk, &sent_), KVC_OK);
	assert_int_equal(kvc_handover_wait(sent_, 0, SOON), KVC_OK);
}

/* Another conversation. A third of it has arrived. */
static void begin_transfer(void)
{
	const kvc_prompt_t prompt = {.struct_size = sizeof prompt, .tokens = tokens_, .n_tokens = BLOCKS * RIG_TOKENS};
	const kvc_fetch_t ask = {.struct_size = sizeof ask, .peer = "node0", .transfer = transfer_, .prompt = &prompt};

	sent_ = wanted_ = NULL;
	snprintf(transfer_, sizeof transfer_, "t%u", ++talk_);
	user_tokens(talk_, BLOCKS, tokens_);
	user_keys(&producer_, talk_, BLOCKS, keys_[0]);
	user_keys(&consumer_, talk_, BLOCKS, keys_[1]);
	assert_int_equal(kvc_handover_fetch(consumer_.space, &ask, &wanted_), KVC_OK);
	put_and_send(0, HALF);
	assert_int_equal(kvc_handover_wait(wanted_, HALF, SOON), KVC_OK);
}

static void end_transfer(void)
{
	put_and_send(HALF, BLOCKS);
	assert_int_equal(kvc_handover_wait(wanted_, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted_).n, BLOCKS);
	user_expect_as(&consumer_, keys_[1], keys_[0], BLOCKS);
	kvc_handover_done(wanted_, 0);
	kvc_handover_done(sent_, 0);
}

/* ---- keys ------------------------------------------------------------------------------------ */

static void write_keys(uint32_t i, const char *first, const char *second)
{
	char path[128];

	peers_write_key(net_.key[i], first, 0600);
	snprintf(path, sizeof path, "%s2", net_.key[i]);
	peers_write_key(path, second, 0600);
}

static void change_keys(uint32_t i, const char *first, const char *second)
{
	const uint32_t before = rig_log_count(&net_.rig[i], "keys of peers were read again");

	write_keys(i, first, second);
	kill(net_.rig[i].pid, SIGHUP);
	KV_AWAIT(rig_log_count(&net_.rig[i], "keys of peers were read again") > before);
}

/* Number of the key of rig 1's link. */
static void key_number(char out[9])
{
	char json[8192];
	const char *at;

	assert_int_equal(rig_kvctl(&net_.rig[1], "peers --json", json, sizeof json), 0);
	at = strstr(json, "\"key\":\"");
	assert_non_null(at);
	snprintf(out, 9, "%.8s", at + strlen("\"key\":\""));
}

static int has_other_key(const char *before)
{
	char now[9];

	key_number(now);

	return now[0] != '"' && strcmp(now, before) != 0;
}

KV_TEST(p7_keys_change_under_transfers_and_none_fails, setup, teardown)
{
	static const char old[] = "0123456789abcdef0123456789abcdef", new[] = "another key of thirty-two bytes!";
	uint64_t breaks;
	char before[9];

	for (uint32_t i = 0; i < 2; i++) {
		write_keys(i, old, old);
		rig_option(&net_.rig[i], "--peers.keys=node%u=%s,node%u=%s2", 1 - i, net_.key[i], 1 - i, net_.key[i]);
		rig_option(&net_.rig[i], "--peers.timeout=60s");
	}
	start();
	breaks = rig_metric(&net_.rig[1], "kvd_peer_breaks_total"); /* one, where it called before the other listened */
	key_number(before);
	begin_transfer();
	change_keys(0, new, old);
	end_transfer();
	begin_transfer();
	change_keys(1, new, old);
	end_transfer();
	assert_false(has_other_key(before));
	assert_int_equal(rig_metric(&net_.rig[1], "kvd_peer_breaks_total"), breaks);
	begin_transfer();
	change_keys(0, new, new);
	change_keys(1, new, new);
	end_transfer();
	KV_AWAIT(has_other_key(before)); /* when it was over */
	peers_connected(&net_);
	begin_transfer();
	end_transfer();
	assert_true(rig_metric_is(&net_.rig[1], "kvd_peer_fetches_total{result=failed}", 0));
	peers_check_quiet(&net_);
}

KV_TEST(p10_a_new_key_is_made_and_none_is_overwritten, setup, teardown)
{
	char command[160], out[512], keys[3][128];
	struct stat file;

	for (uint32_t i = 0; i < 3; i++) {
		const uint32_t of = i < 2 ? i : 0; /* the last time it is there already */
		FILE *key;

		snprintf(command, sizeof command, "peer-key %s/made%u", net_.rig[0].dir, of);
		assert_int_equal(rig_kvctl(&net_.rig[0], command, out, sizeof out) == 0, i < 2);
		snprintf(command, sizeof command, "%s/made%u", net_.rig[0].dir, of);
		assert_int_equal(stat(command, &file), 0);
		assert_int_equal(file.st_mode & 0777, 0600);
		key = fopen(command, "r");
		assert_non_null(key);
		assert_non_null(fgets(keys[i], sizeof keys[i], key));
		fclose(key);
		assert_int_equal(strspn(keys[i], "0123456789abcdef"), 64);
	}
	assert_string_not_equal(keys[0], keys[1]);
	assert_string_equal(keys[0], keys[2]);
	for (uint32_t i = 0; i < 2; i++) {
		peers_write_key(net_.key[i], keys[0], 0600);
	}
	start();
}

/* ---- somebody in between --------------------------------------------------------------------- */

typedef struct proxy {
	int listening;
	uint16_t to;
	uint64_t flip_at; /* byte of a connection's answers that is changed; and every later one like it */
} proxy_t;

static int pass_bytes(int from, int to, uint64_t *p_at, uint64_t flip_at)
{
	uint8_t bytes[65536];
	const ssize_t n = recv(from, bytes, sizeof bytes, 0);

	if (n <= 0) {
		return 0;
	}
	if (flip_at > 0 && flip_at >= *p_at && flip_at < *p_at + (uint64_t)n) {
		bytes[flip_at - *p_at] ^= 1;
	}
	*p_at += (uint64_t)n;

	return send(to, bytes, (size_t)n, MSG_NOSIGNAL) == n;
}

static void serve_connection(const proxy_t *proxy, int dialler)
{
	struct pollfd ends[2] = {{.fd = dialler, .events = POLLIN}, {.fd = peers_dial(proxy->to), .events = POLLIN}};
	uint64_t at[2] = {0, 0};

	while (poll(ends, 2, -1) > 0) {
		for (uint32_t i = 0; i < 2; i++) {
			if (ends[i].revents &&
			    !pass_bytes(ends[i].fd, ends[1 - i].fd, &at[i], i ? proxy->flip_at : 0)) {
				_exit(0);
			}
		}
	}
}

/* A process for each connection. */
static void run_proxy(void *arg, int ready)
{
	const proxy_t *proxy = arg;

	signal(SIGCHLD, SIG_IGN);
	child_say(ready);
	for (;;) {
		const int fd = accept(proxy->listening, NULL, NULL);

		if (fd >= 0 && fork() == 0) {
			serve_connection(proxy, fd);
			_exit(0);
		}
		close(fd);
	}
}

/* A byte of the blocks is changed on its way, each time. */
KV_TEST(p1_a_byte_changed_between_two_nodes_lands_nowhere, setup, teardown)
{
	proxy_t proxy = {.flip_at = HALF * RIG_BLOCK_BYTES / 2};
	pid_t pid;

	proxy.listening = peers_listen(&proxy.to);
	rig_option(&net_.rig[1], "--peers.addresses=node0=127.0.0.1:%u", proxy.to);
	proxy.to = net_.port[0];
	pid = child_start(run_proxy, &proxy);
	close(proxy.listening);
	start();
	for (uint32_t i = 0; i < 3; i++) {
		const kvc_prompt_t prompt = {
			.struct_size = sizeof prompt, .tokens = tokens_, .n_tokens = HALF * RIG_TOKENS};
		const kvc_fetch_t ask = {.struct_size = sizeof ask, .peer = "node0", .prompt = &prompt};
		kvc_handover_t *wanted = NULL;

		user_tokens(100 + i, HALF, tokens_);
		user_keys(&producer_, 100 + i, HALF, keys_[0]);
		user_keys(&consumer_, 100 + i, HALF, keys_[1]);
		assert_int_equal(user_put(&producer_, keys_[0], 0, HALF, 0, NULL), KVC_OK);
		peers_connected(&net_);
		assert_int_equal(kvc_handover_fetch(consumer_.space, &ask, &wanted), KVC_OK);
		assert_true(kvc_handover_wait(wanted, 0, SOON) < 0);
		kvc_handover_done(wanted, 1);
		assert_int_equal(user_match(&consumer_, keys_[1], HALF), 0);
		assert_true(rig_metric_reaches(&net_.rig[1], "kvd_peer_refused_total{reason=key}", i + 1));
	}
	assert_int_equal(rig_metric(&net_.rig[1], "kvd_peer_corrupt_blocks_total"), 0); /* no digest was needed */
	peers_check_quiet(&net_);
	child_kill(pid);
}

/* ---- UCX ------------------------------------------------------------------------------------- */

KV_TEST(p1_a_hand_over_arrives_over_ucx, setup, teardown)
{
	peers_use_ucx(&net_, 0);
	peers_use_ucx(&net_, 1);
	start();
	KV_AWAIT(rig_kvctl_has(&net_.rig[1], "peers --json", "\"bytes\":\"ucx\""));
	begin_transfer();
	end_transfer();
	peers_check_quiet(&net_);
}

KV_TEST(p7_with_ucx_at_one_node_bytes_come_over_tls, setup, teardown)
{
	peers_use_ucx(&net_, 1);
	start();
	assert_true(rig_kvctl_has(&net_.rig[1], "peers --json", "\"bytes\":\"tls\""));
	begin_transfer();
	end_transfer();
	peers_check_quiet(&net_);
}

/* On the port of peers, and on UCX's own. */
KV_TEST(p10_strangers_on_either_port_do_no_harm, setup, teardown)
{
	uint16_t ports[8];
	pid_t net;

	peers_use_ucx(&net_, 0);
	peers_use_ucx(&net_, 1);
	start();
	net = peers_net(&net_, 0);
	assert_true(peers_ports(net, ports, 8) >= 2); /* both of them, or this test proves nothing */
	peers_send_garbage(ports, peers_ports(net, ports, 8));
	begin_transfer();
	end_transfer();
	assert_int_equal(peers_net(&net_, 0), net);
	peers_check_quiet(&net_);
}
