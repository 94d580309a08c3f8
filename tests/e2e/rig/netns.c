/* Two network namespaces. */
#include "e2e/rig/netns.h"

#include "e2e/rig/relay.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char name_[2][32];
static relay_t relay_;
static pid_t relay_pid_; /* 0: the link is a pair of virtual Ethernet devices */

static int run(const char *command)
{
	char quiet[640];

	snprintf(quiet, sizeof quiet, "{ %s; } >/dev/null 2>&1", command);

	return system(quiet);
}

void netns_run(uint32_t i, const char *format, ...)
{
	char command[512], inside[600];
	va_list args;

	va_start(args, format);
	vsnprintf(command, sizeof command, format, args);
	va_end(args);
	snprintf(inside, sizeof inside, "ip netns exec %s %s", name_[i], command);
	if (run(inside) != 0) {
		fail_msg("%s", inside);
	}
}

void netns_link(int up)
{
	netns_run(0, "ip link set veth0 %s", up ? "up" : "down");
}

void netns_drop(uint32_t i, uint32_t percent)
{
	netns_run(i, "nft flush ruleset");
	if (percent == 0) {
		return;
	}
	netns_run(i, "nft add table ip kvd");
	netns_run(i, "nft 'add chain ip kvd in { type filter hook input priority 0; }'");
	if (percent == 100) {
		netns_run(i, "nft add rule ip kvd in iif veth%u drop", i);
	} else {
		netns_run(i, "nft add rule ip kvd in iif veth%u numgen random mod 100 lt %u drop", i, percent);
	}
}

/* Both ends have a carrier: UCX takes no other device. */
static void wait_for_carrier(void)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	char command[160];
	uint32_t up = 0;

	while (up < 2) {
		assert_true(rig_now_ms() < deadline);
		up = 0;
		for (uint32_t i = 0; i < 2; i++) {
			snprintf(command, sizeof command, "ip netns exec %s ip link show veth%u | grep 'state UP'",
				 name_[i], i);
			up += run(command) == 0;
		}
		usleep(10000);
	}
}

static void remove_namespaces(void)
{
	char command[96];

	for (uint32_t i = 0; i < 2; i++) {
		snprintf(command, sizeof command, "ip netns del %s", name_[i]);
		(void)run(command);
	}
}

static void make_namespaces(void)
{
	char command[256];

	if (geteuid() != 0) {
		kv_test_skip("network namespaces need root");
	}
	if (run("command -v nft && command -v tc") != 0) {
		kv_test_skip("nft or tc is not installed (nftables, iproute2)");
	}
	for (uint32_t i = 0; i < 2; i++) {
		snprintf(name_[i], sizeof name_[i], "kvd-test-%d-%u", (int)getpid(), i);
	}
	remove_namespaces();
	snprintf(command, sizeof command, "ip netns add %s && ip netns add %s", name_[0], name_[1]);
	if (run(command) != 0) {
		remove_namespaces();
		kv_test_skip("network namespaces cannot be made here");
	}
}

/* Two daemons, one in each namespace, on devices of this name and a number. */
static void place_peers(peers_t *peers, const char *device)
{
	peers_init(peers);
	for (uint32_t i = 0; i < 2; i++) {
		rig_t *rig = &peers->rig[i];
		const char *const wrap[] = {"ip", "netns", "exec", name_[i]};

		netns_run(i, "ip addr add 10.97.0.%u/24 dev %s%u", i + 1, device, i);
		netns_run(i, "ip link set %s%u up", device, i);
		netns_run(i, "ip link set lo up");
		memcpy(rig->wrap, wrap, sizeof wrap);
		rig_option(rig, "--peers.listen=10.97.0.%u:9465", i + 1);
		rig_option(rig, "--peers.addresses=node%u=10.97.0.%u:9465", 1 - i, 2 - i);
	}
}

void netns_init(peers_t *peers)
{
	char command[256];

	make_namespaces();
	snprintf(command, sizeof command, "ip link add veth0 netns %s type veth peer name veth1 netns %s", name_[0],
		 name_[1]);
	if (run(command) != 0) {
		remove_namespaces();
		kv_test_skip("virtual Ethernet devices cannot be made here");
	}
	place_peers(peers, "veth");
	wait_for_carrier();
}

void netns_init_slow(peers_t *peers, uint32_t delay_ms)
{
	if (access("/dev/net/tun", R_OK | W_OK) != 0) {
		kv_test_skip("there are no TUN devices (/dev/net/tun)");
	}
	make_namespaces();
	memcpy(relay_.names, name_, sizeof name_);
	relay_.delay_ms = delay_ms;
	relay_pid_ = relay_start(&relay_);
	place_peers(peers, "tun");
}

void netns_fini(peers_t *peers)
{
	peers_fini(peers);
	if (relay_pid_ > 0) {
		child_kill(relay_pid_);
		relay_pid_ = 0;
	}
	remove_namespaces();
}
