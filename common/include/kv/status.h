/* kv/status.h -- every outcome kvd knows, in one list.
 *
 * Wire, logs, kvctl exit codes, the C API and (later) Python exceptions come from this list. A miss is not an error:
 * it is positive. Errors are negative. Numbers are part of the wire format and are never reused.
 */
#ifndef KV_STATUS_H
#define KV_STATUS_H

#include <stdint.h>

/* X(name, code, blast radius, retry, kvctl exit code, sentence)
 *   blast radius: what the outcome says something about (NONE, REQUEST, BLOCK, LEASE, SESSION, PEER, TIER, DAEMON)
 *   retry:        NO (the same call fails again), NOW (try again at once), LATER (after the cause has gone)
 */
#define KV_STATUS_LIST(X)                                                                                              \
	X(OK, 0, NONE, NO, 0, "done")                                                                                  \
	X(MISS, 1, BLOCK, NO, 1, "the block is not here")                                                              \
	X(ALREADY, 2, BLOCK, NO, 0, "the block is already visible")                                                    \
	X(PENDING, 3, REQUEST, LATER, 75, "the operation has not ended yet")                                           \
	X(ERR_ARG, -1, REQUEST, NO, 64, "an argument is out of its range")                                             \
	X(ERR_NOMEM, -2, REQUEST, LATER, 75, "out of memory")                                                          \
	X(ERR_BUSY, -3, REQUEST, LATER, 75, "a limit is reached, or something is not ready yet; try again later")      \
	X(ERR_FULL, -4, TIER, LATER, 75, "the tier is full and nothing in it can be evicted")                          \
	X(ERR_TIMEOUT, -5, REQUEST, LATER, 75, "the deadline has passed")                                              \
	X(ERR_PROTO, -6, SESSION, NO, 65, "the frame breaks the protocol")                                             \
	X(ERR_VERSION, -7, SESSION, NO, 65, "the peer speaks another version")                                         \
	X(ERR_TOO_BIG, -8, SESSION, NO, 65, "the frame or field is over its limit")                                    \
	X(ERR_UNKNOWN_REQUEST, -9, SESSION, NO, 65, "no such request")                                                 \
	X(ERR_NOT_PERMITTED, -10, REQUEST, NO, 77, "the session's role may not do this")                               \
	X(ERR_NOT_JOINED, -11, REQUEST, NO, 77, "join an instance first")                                              \
	X(ERR_PIDFD_REQUIRED, -12, REQUEST, NO, 77, "a live pidfd of the member itself is required")                   \
	X(ERR_SECRET, -13, REQUEST, NO, 77, "the instance exists and its secret is another")                           \
	X(ERR_NOT_FOUND, -14, REQUEST, NO, 1, "no such object")                                                        \
	X(ERR_EXISTS, -15, REQUEST, NO, 65, "the object exists already")                                               \
	X(ERR_IDENTITY, -16, REQUEST, NO, 65, "the space's identity is incomplete or contradictory")                   \
	X(ERR_LAYOUT, -17, REQUEST, NO, 65, "the block layout is not valid or does not fit the space")                 \
	X(ERR_STALE_EPOCH, -18, REQUEST, NOW, 75, "the space was reset; open it again")                                \
	X(ERR_NO_PARENT, -19, BLOCK, LATER, 65, "the parent block is neither visible nor in this instance's puts")     \
	X(ERR_PARENT_LOST, -20, BLOCK, LATER, 75, "the parent's last put ended without a block")                       \
	X(ERR_NOT_ADMITTED, -21, BLOCK, LATER, 75, "the tier refused the block")                                       \
	X(ERR_COVERAGE, -22, REQUEST, NO, 65, "the writers' ranges overlap or do not cover the block")                 \
	X(ERR_EXPIRED, -23, LEASE, NOW, 75, "the lease or hand-over has expired")                                      \
	X(ERR_REVOKED, -24, LEASE, NOW, 75, "the lease or put was revoked")                                            \
	X(ERR_CORRUPT, -25, BLOCK, NO, 65, "the bytes do not match their digest")                                      \
	X(ERR_FAULT, -26, BLOCK, NO, 65, "the memory under the block is gone (truncated or unmapped)")                 \
	X(ERR_IO, -27, TIER, LATER, 75, "the device reports an error")                                                 \
	X(ERR_NOSPC, -28, TIER, LATER, 75, "the file system is full")                                                  \
	X(ERR_LOCKED, -29, DAEMON, LATER, 75, "another daemon holds the data directory")                               \
	X(ERR_FOREIGN, -30, DAEMON, NO, 78, "the directory or file was not made by kvd, or by another version")        \
	X(ERR_CONFIG, -31, DAEMON, NO, 78, "the configuration is not valid")                                           \
	X(ERR_PATH, -32, DAEMON, NO, 78, "the path is too long, of the wrong kind, or not permitted")                  \
	X(ERR_UNREACHABLE, -33, PEER, LATER, 69, "the daemon cannot be reached")                                       \
	X(ERR_DAEMON_STALE, -34, PEER, LATER, 69, "the daemon's heartbeat has stopped")                                \
	X(ERR_CLOSED, -35, SESSION, NOW, 69, "the session has ended")                                                  \
	X(ERR_UNSUPPORTED, -36, REQUEST, NO, 64, "this build or this version cannot do it")                            \
	X(ERR_LIMIT, -37, REQUEST, NO, 75, "an instance, space or session limit is reached")                           \
	X(ERR_TIER_OFF, -38, TIER, LATER, 75, "the tier is switched off after a fault")                                \
	X(ERR_INTERNAL, -39, REQUEST, NO, 70, "a bug in kvd; please report the log line")                              \
	X(ERR_PARENT_UNREADABLE, -40, BLOCK, LATER, 75,                                                                \
	  "the disk cannot read the parent block, or one above it, now; put those blocks again")                       \
	X(ERR_TAKEN, -41, REQUEST, NO, 65, "another consumer has the hand-over")                                       \
	X(ERR_ABORTED, -42, REQUEST, NO, 75, "the other side has given the hand-over up")                              \
	X(ERR_PRODUCER_LOST, -43, REQUEST, NO, 75, "the producer has gone before the hand-over was complete")          \
	X(ERR_OTHER_SPACE, -44, REQUEST, NO, 75,                                                                       \
	  "the other side of the hand-over has other weights or another layout")                                       \
	X(ERR_REFUSED, -45, DAEMON, NO, 71, "the system refuses a call that is needed; the log says which")

typedef enum kv_status {
#define KV_STATUS_ENUM(name, code, radius, retry, exit_code, sentence) KV_##name = (code),
	KV_STATUS_LIST(KV_STATUS_ENUM)
#undef KV_STATUS_ENUM
} kv_status_t;

typedef enum kv_radius {
	KV_RADIUS_NONE,
	KV_RADIUS_REQUEST,
	KV_RADIUS_BLOCK,
	KV_RADIUS_LEASE,
	KV_RADIUS_SESSION,
	KV_RADIUS_PEER,
	KV_RADIUS_TIER,
	KV_RADIUS_DAEMON,
} kv_radius_t;

typedef enum kv_retry { KV_RETRY_NO, KV_RETRY_NOW, KV_RETRY_LATER } kv_retry_t;

/* The name without its prefix ("ERR_NO_PARENT"); "UNKNOWN" for a number that is not in the list. Never NULL. */
const char *kv_status_name(kv_status_t status);

/* One sentence for a person, lower case, without a full stop. Never NULL. */
const char *kv_status_text(kv_status_t status);

kv_radius_t kv_status_radius(kv_status_t status);
kv_retry_t kv_status_retry(kv_status_t status);

/* The exit code of a command that ended with this status (sysexits.h where it has a word for it). */
int kv_status_exit_code(kv_status_t status);

#endif
