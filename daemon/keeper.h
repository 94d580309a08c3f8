/* daemon/keeper.h -- the keeper: the small process that `kvd` starts as. It holds what must outlive a crash and starts
 * the daemon again.
 *
 *   kvd (keeper) --fork, exec /proc/self/exe --kept=...--> kvd (daemon)      a SOCK_SEQPACKET pair between them
 *
 * The daemon hands in duplicates of its memfds (ledgers, slabs, digests) and of its members' pidfds, and never waits
 * for the keeper (decision 073). The keeper opens nothing heavy and links to nothing that starts threads before the
 * fork, so that the fork is safe. What a dead daemon had handed in to be held is closed once it has died. What was to
 * be kept, the next daemon gets (held.h), unless its predecessor died before it served, or crashes follow each other:
 * then it starts with empty memory (decision 059).
 *
 * After one daemon has served, a passing cause (exit code 75) or a crash does not end the service: the next one starts
 * after a pause that grows, with the configuration that was found valid last (at the start, or by SIGHUP), whatever the
 * file says by then; and if that one never served, with the one that did. A first start fails at once
 * (docs/decisions/024-keeper.md).
 *
 * On SIGUSR2 the keeper has the installed program check the configuration, lets the daemon end, and executes that
 * program in its own process, with what was kept (docs/decisions/061-upgrade-in-place.md):
 *
 *   NONE --SIGUSR2--> CHECKING --exit code 0--> CHECKED --the daemon serves--> STOPPING --it has ended--> exec
 *    ^------------- refused, or exec failed -------'  '------ no daemon runs ------------------------------^
 */
#ifndef KVD_KEEPER_H
#define KVD_KEEPER_H

#include "kv/status.h"
#include "options/options.h"

/* Run as the keeper until the daemon has ended for good; returns the exit code of the process. setup->lock_fd is handed
 * on to every daemon; setup->config_fd becomes the keeper's, and so does what setup->held_fd lists. */
int kvd_keeper_run(kvd_setup_t *setup);

#endif
