#include "e2e/rig/relay.h"

#include "e2e/rig/rig.h"

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define PACKETS 4096u /* under way, each way; more are lost, as on any link */
#define BYTES   1600u

typedef struct packet {
	uint64_t due_ms;
	size_t len;
	uint8_t data[BYTES];
} packet_t;

/* Packets in the order in which they came in at one end. */
typedef struct way {
	packet_t packets[PACKETS];
	uint64_t first, next;
} way_t;

static int open_tun(const char *name, uint32_t i)
{
	struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
	char path[64];
	int ns, fd;

	snprintf(path, sizeof path, "/run/netns/%s", name);
	snprintf(request.ifr_name, sizeof request.ifr_name, "tun%u", i);
	ns = open(path, O_RDONLY | O_CLOEXEC);
	if (ns < 0 || setns(ns, CLONE_NEWNET) != 0) {
		_exit(1);
	}
	close(ns);
	fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0 || ioctl(fd, TUNSETIFF, &request) != 0) {
		_exit(2);
	}

	return fd;
}

static void take_packets(way_t *way, int fd, uint32_t delay_ms)
{
	packet_t *packet = &way->packets[way->next % PACKETS];
	ssize_t len;

	while ((len = read(fd, packet->data, sizeof packet->data)) > 0) {
		if (way->next - way->first == PACKETS - 1) {
			continue;
		}
		packet->len = (size_t)len;
		packet->due_ms = rig_now_ms() + delay_ms;
		packet = &way->packets[++way->next % PACKETS];
	}
}

/* Returns when the next one is due. */
static uint64_t pass_packets(way_t *way, int fd)
{
	while (way->first < way->next) {
		const packet_t *packet = &way->packets[way->first % PACKETS];

		if (packet->due_ms > rig_now_ms()) {
			return packet->due_ms;
		}
		if (write(fd, packet->data, packet->len) < 0) {
			/* lost: its device is down */
		}
		way->first++;
	}

	return UINT64_MAX;
}

static void carry(void *arg, int ready)
{
	static way_t ways[2];
	const relay_t *relay = arg;
	struct pollfd ends[2];

	for (uint32_t i = 0; i < 2; i++) {
		ends[i] = (struct pollfd){.fd = open_tun(relay->names[i], i), .events = POLLIN};
	}
	child_say(ready);
	for (;;) {
		uint64_t due = UINT64_MAX, now;

		for (uint32_t i = 0; i < 2; i++) {
			const uint64_t next = pass_packets(&ways[i], ends[1 - i].fd);

			due = next < due ? next : due;
		}
		now = rig_now_ms();
		(void)poll(ends, 2, due == UINT64_MAX ? 1000 : due > now ? (int)(due - now) : 0);
		for (uint32_t i = 0; i < 2; i++) {
			take_packets(&ways[i], ends[i].fd, relay->delay_ms);
		}
	}
}

pid_t relay_start(relay_t *relay)
{
	return child_start(carry, relay);
}
