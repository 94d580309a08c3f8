/* relay.h -- a slow link between two network namespaces: two TUN devices, and a process that carries every packet over
 * after a while. The kernel's own (tc netem) is not in every kernel. */
#ifndef TESTS_E2E_RIG_RELAY_H
#define TESTS_E2E_RIG_RELAY_H

#include <stdint.h>
#include <sys/types.h>

typedef struct relay {
	char names[2][32]; /* of the namespaces; device tun0 in the first, tun1 in the second */
	uint32_t delay_ms; /* each way */
} relay_t;

/* The devices are there when it returns; child_kill() ends it, and they go with it. */
pid_t relay_start(relay_t *relay);

#endif
