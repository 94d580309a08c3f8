/* Two daemons that know each other. */
#include "e2e/rig/peers.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static struct sockaddr_in loopback(uint16_t port)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);

	return address;
}

/* A port that nobody else is given as long as the descriptor is open; a daemon may listen on it all the same. */
static int reserve_port(uint16_t *p_port)
{
	struct sockaddr_in address = loopback(0);
	socklen_t len = sizeof address;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;

	assert_true(fd >= 0);
	assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), 0);
	assert_int_equal(bind(fd, (struct sockaddr *)&address, len), 0);
	assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &len), 0);
	*p_port = ntohs(address.sin_port);

	return fd;
}

int peers_listen(uint16_t *p_port)
{
	const int fd = reserve_port(p_port);

	assert_int_equal(listen(fd, 64), 0);

	return fd;
}

int peers_dial(uint16_t port)
{
	const struct sockaddr_in address = loopback(port);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	assert_true(fd >= 0);
	assert_int_equal(connect(fd, (const struct sockaddr *)&address, sizeof address), 0);

	return fd;
}

void peers_write_key(const char *path, const char *text, mode_t mode)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);

	assert_true(fd >= 0);
	assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	assert_int_equal(fchmod(fd, mode), 0);
	close(fd);
}

void peers_init(peers_t *peers)
{
	memset(peers, 0, sizeof *peers);
	for (uint32_t i = 0; i < 2; i++) {
		rig_init(&peers->rig[i], 0);
		peers->port_fd[i] = reserve_port(&peers->port[i]);
		snprintf(peers->key[i], sizeof peers->key[i], "%s/key", peers->rig[i].dir);
		peers_write_key(peers->key[i], "0123456789abcdef0123456789abcdef\n", 0600);
	}
	for (uint32_t i = 0; i < 2; i++) {
		rig_t *rig = &peers->rig[i];

		rig_option(rig, "--peers.name=node%u", i);
		rig_option(rig, "--peers.listen=127.0.0.1:%u", peers->port[i]);
		rig_option(rig, "--peers.addresses=node%u=127.0.0.1:%u", 1 - i, peers->port[1 - i]);
		rig_option(rig, "--peers.keys=node%u=%s", 1 - i, peers->key[i]);
		rig_option(rig, "--peers.timeout=2s");
		rig_option(rig, "--cpu.size=160MiB");
		rig_option(rig, "--index.max_blocks=16384");
		rig_option(rig, "--handover.max_bytes=80MiB");
	}
}

void peers_use_ucx(peers_t *peers, uint32_t i)
{
	if (!PEERS_UCX) {
		kv_test_skip("kvd was built without UCX (libucx-dev)");
	}
	rig_option(&peers->rig[i], "--peers.transports=tcp");
}

void peers_start(peers_t *peers)
{
	for (uint32_t i = 0; i < 2; i++) {
		rig_start(&peers->rig[i]);
	}
}

void peers_connected(const peers_t *peers)
{
	for (uint32_t i = 0; i < 2; i++) {
		assert_true(rig_metric_is(&peers->rig[i], "kvd_peers_up", 1));
		if (rig_log_has(&peers->rig[i], "UCX is not installed")) {
			kv_test_skip("UCX is not installed (libucx0)");
		}
	}
}

void peers_fini(peers_t *peers)
{
	for (uint32_t i = 0; i < 2; i++) {
		rig_fini(&peers->rig[i]);
		close(peers->port_fd[i]);
	}
}

void peers_check_quiet(const peers_t *peers)
{
	for (uint32_t i = 0; i < 2; i++) {
		assert_true(rig_metric_is(&peers->rig[i], "kvd_handovers", 0));
		rig_check_quiet(&peers->rig[i]);
	}
}

pid_t peers_net(const peers_t *peers, uint32_t i)
{
	return rig_child(&peers->rig[i], "kvd-net");
}

uint32_t peers_ports(pid_t pid, uint16_t *ports, uint32_t cap)
{
	char path[64], line[512], link[64];
	unsigned port, state;
	unsigned long inode;
	uint32_t n = 0;
	FILE *table;

	snprintf(path, sizeof path, "/proc/%d/net/tcp", (int)pid);
	table = fopen(path, "re");
	assert_non_null(table);
	while (fgets(line, sizeof line, table)) {
		if (sscanf(line, " %*u: %*8[0-9A-F]:%x %*8[0-9A-F]:%*x %x %*x:%*x %*x:%*x %*x %*u %*u %lu", &port,
			   &state, &inode) != 3 ||
		    state != 0x0a) {
			continue;
		}
		for (int fd = 0; fd < 256 && n < cap; fd++) {
			char want[64];
			ssize_t len;

			snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, fd);
			snprintf(want, sizeof want, "socket:[%lu]", inode);
			len = readlink(path, link, sizeof link - 1);
			if (len > 0 && (link[len] = '\0', strcmp(link, want) == 0)) {
				ports[n++] = (uint16_t)port;
				break;
			}
		}
	}
	fclose(table);

	return n;
}

static void send_garbage(uint16_t port, kv_test_rng_t *rng)
{
	uint8_t bytes[4096];
	const uint32_t n = 1 + (uint32_t)(kv_test_rand(rng) % sizeof bytes);
	int fd = peers_dial(port);

	for (uint32_t i = 0; i < n; i++) {
		bytes[i] = (uint8_t)kv_test_rand(rng);
	}
	if (kv_test_rand(rng) % 2) {
		memcpy(bytes, "KNET\1\1\0\0", 8); /* a right beginning */
	}
	(void)send(fd, bytes, n, MSG_NOSIGNAL);
	close(fd);
}

void peers_send_garbage(const uint16_t *ports, uint32_t n)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};

	for (uint32_t i = 0; i < 200; i++) {
		send_garbage(ports[i % n], &rng);
	}
	for (uint32_t i = 0; i < PEERS_SILENT; i++) {
		(void)peers_dial(ports[i % n]);
	}
}
