/* netns.h -- the two daemons of peers.h in two network namespaces with one link between them, that can be cut. */
#ifndef TESTS_E2E_RIG_NETNS_H
#define TESTS_E2E_RIG_NETNS_H

#include "e2e/rig/peers.h"

/* Like peers_init(). Skips the test without root, ip or nft. */
void netns_init(peers_t *peers);
/* The same, with a link whose packets take so long each way; nothing below cuts it. Needs TUN devices, else skips. */
void netns_init_slow(peers_t *peers, uint32_t delay_ms);
/* Run a command of nft, tc or ip inside namespace i; it must end with 0. */
void netns_run(uint32_t i, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The link goes down, or up again. */
void netns_link(int up);
/* Drop what comes in at namespace i: a part of the packets in percent; 0: nothing any longer. */
void netns_drop(uint32_t i, uint32_t percent);
void netns_fini(peers_t *peers);

#endif
