/* kv/miss_reason_list.h -- the names of kv_miss_reason_t. The reasons of kvd_prefix_miss_tokens_total are the same
 * labels. */
#ifndef KV_MISS_REASON_LIST_H
#define KV_MISS_REASON_LIST_H

/* X(NAME, label, words): KV_WHY_NAME; its label in metrics, events and JSON; words for an operator */
#define KV_MISS_REASON_LIST(X)                                                                                         \
	X(NONE, "none", "nothing")                                                                                     \
	X(ABSENT, "absent", "not stored")                                                                              \
	X(EVICTED, "evicted", "evicted")                                                                               \
	X(DAEMON_STALE, "daemon_stale", "daemon silent")                                                               \
	X(NO_DAEMON, "no_daemon", "no daemon")                                                                         \
	X(STALE_EPOCH, "stale_epoch", "space reset")                                                                   \
	X(CONTENDED, "contended", "index busy")                                                                        \
	X(CORRUPT, "corrupt", "digest mismatch")                                                                       \
	X(TIMEOUT, "timeout", "answer late")                                                                           \
	X(UNREADABLE, "unreadable", "disk unreadable")                                                                 \
	X(NOT_ADMITTED, "not_admitted", "not admitted: pool thrashes")

#endif
