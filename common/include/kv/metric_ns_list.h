/* kv/metric_ns_list.h -- what is counted for each namespace. Add a line, update it where the thing happens; nothing
 * else to do. */
#ifndef KV_METRIC_NS_LIST_H
#define KV_METRIC_NS_LIST_H

#define KV_HELP_MISSES "prompt tokens that neither the engine nor kvd had, by the reason of the first missing block (shm.md, reasons of a miss)"

#define KV_NS_METRIC_LIST(X)                                                                                           \
	X(SESSIONS, kvd_namespace_sessions, KV_METRIC_GAUGE, "open sessions, those of operators beyond its part left out") \
	X(SESSIONS_REFUSED, kvd_namespace_sessions_refused_total, KV_METRIC_COUNTER, "connections refused at its part of a limit") \
	X(RECEIVE_BYTES, kvd_namespace_receive_bytes, KV_METRIC_GAUGE, "receive buffers of these sessions")            \
	X(MEMBERS, kvd_namespace_members, KV_METRIC_GAUGE, "live members")                                             \
	X(SPACES, kvd_namespace_spaces, KV_METRIC_GAUGE, "its open spaces, at most limits.spaces")                      \
	X(SPACES_REFUSED, kvd_namespace_spaces_refused_total, KV_METRIC_COUNTER, "spaces not opened because all that limits.spaces permits are in use") \
	X(CPU_BYTES, kvd_namespace_bytes{tier="cpu"}, KV_METRIC_GAUGE, "bytes of its slabs or slot files")             \
	X(DISK_BYTES, kvd_namespace_bytes{tier="disk"}, KV_METRIC_GAUGE, "bytes of its slabs or slot files")           \
	X(GPU_BYTES, kvd_namespace_bytes{tier="gpu"}, KV_METRIC_GAUGE, "bytes of its slabs or slot files")           \
	X(CPU_SHARE_BYTES, kvd_namespace_share_bytes{tier="cpu"}, KV_METRIC_GAUGE, "its share of the tier; what it has beyond is borrowed") \
	X(DISK_SHARE_BYTES, kvd_namespace_share_bytes{tier="disk"}, KV_METRIC_GAUGE, "its share of the tier; what it has beyond is borrowed") \
	X(GPU_SHARE_BYTES, kvd_namespace_share_bytes{tier="gpu"}, KV_METRIC_GAUGE, "its share of the tier; what it has beyond is borrowed") \
	X(CPU_MAX_BYTES, kvd_namespace_max_bytes{tier="cpu"}, KV_METRIC_GAUGE, "its maximum in the tier; 0: none")     \
	X(DISK_MAX_BYTES, kvd_namespace_max_bytes{tier="disk"}, KV_METRIC_GAUGE, "its maximum in the tier; 0: none")   \
	X(BLOCKS, kvd_namespace_blocks, KV_METRIC_GAUGE, "its blocks in the index")                                    \
	X(BLOCKS_SHARE, kvd_namespace_blocks_share, KV_METRIC_GAUGE, "its share of the index")                         \
	X(BLOCKS_MAX, kvd_namespace_blocks_max, KV_METRIC_GAUGE, "its maximum in the index; 0: none")                  \
	X(IRRECLAIMABLE_BYTES, kvd_namespace_irreclaimable_bytes, KV_METRIC_GAUGE, "pinned, unfinished and quarantined bytes in memory: they end at the share") \
	X(HANDOVERS, kvd_namespace_handovers, KV_METRIC_GAUGE, "its hand-overs")                                       \
	X(HANDOVER_BYTES, kvd_namespace_handover_bytes, KV_METRIC_GAUGE, "slots, tails and announced keys that its hand-overs keep, each slot counted once") \
	X(HANDOVERS_REFUSED, kvd_namespace_handovers_refused_total, KV_METRIC_COUNTER, "HANDOVER_SENDs answered BUSY for want of room") \
	X(EVICTED, kvd_namespace_evicted_total, KV_METRIC_COUNTER, "blocks evicted from a tier for others of the namespace") \
	X(EVICTED_FOR_OTHERS, kvd_namespace_evicted_for_others_total, KV_METRIC_COUNTER, "blocks evicted from a tier for another namespace: what was borrowed") \
	X(EVICTED_UNHIT, kvd_namespace_evicted_unhit_total, KV_METRIC_COUNTER, "blocks that left their last tier and were never hit: saves that did not pay") \
	X(NOT_ADMITTED, kvd_namespace_not_admitted_total, KV_METRIC_COUNTER, "blocks refused while the pool thrashed (admission)") \
	X(THRASHES, kvd_namespace_thrashes, KV_METRIC_GAUGE, "1: its pool thrashes, and admission takes new blocks by second use") \
	X(PUTS_EXPIRED, kvd_namespace_puts_expired_total, KV_METRIC_COUNTER, "puts revoked for want of room, their time to live over") \
	X(SHARE_FULL, kvd_namespace_share_full_total, KV_METRIC_COUNTER, "acquires and puts cut short because its irreclaimable bytes were at its share") \
	X(LOOKUPS, kvd_prefix_lookups_total, KV_METRIC_COUNTER, "prompts looked up")                                   \
	X(QUERY_TOKENS, kvd_prefix_query_tokens_total, KV_METRIC_COUNTER, "prompt tokens looked up")                   \
	X(HIT_GPU_TOKENS, kvd_prefix_hit_tokens_total{tier="gpu"}, KV_METRIC_COUNTER, "prompt tokens found in the tier") \
	X(HIT_CPU_TOKENS, kvd_prefix_hit_tokens_total{tier="cpu"}, KV_METRIC_COUNTER, "prompt tokens found in the tier") \
	X(HIT_DISK_TOKENS, kvd_prefix_hit_tokens_total{tier="disk"}, KV_METRIC_COUNTER, "prompt tokens found in the tier") \
	X(MISS_ABSENT_TOKENS, kvd_prefix_miss_tokens_total{reason="absent"}, KV_METRIC_COUNTER, KV_HELP_MISSES)        \
	X(MISS_EVICTED_TOKENS, kvd_prefix_miss_tokens_total{reason="evicted"}, KV_METRIC_COUNTER, KV_HELP_MISSES)      \
	X(MISS_STALE_TOKENS, kvd_prefix_miss_tokens_total{reason="daemon_stale"}, KV_METRIC_COUNTER, KV_HELP_MISSES)   \
	X(MISS_NO_DAEMON_TOKENS, kvd_prefix_miss_tokens_total{reason="no_daemon"}, KV_METRIC_COUNTER, KV_HELP_MISSES)  \
	X(MISS_EPOCH_TOKENS, kvd_prefix_miss_tokens_total{reason="stale_epoch"}, KV_METRIC_COUNTER, KV_HELP_MISSES)    \
	X(MISS_CONTENDED_TOKENS, kvd_prefix_miss_tokens_total{reason="contended"}, KV_METRIC_COUNTER, KV_HELP_MISSES)  \
	X(MISS_CORRUPT_TOKENS, kvd_prefix_miss_tokens_total{reason="corrupt"}, KV_METRIC_COUNTER, KV_HELP_MISSES)      \
	X(MISS_LATE_TOKENS, kvd_prefix_miss_tokens_total{reason="timeout"}, KV_METRIC_COUNTER, KV_HELP_MISSES)         \
	X(MISS_UNREADABLE_TOKENS, kvd_prefix_miss_tokens_total{reason="unreadable"}, KV_METRIC_COUNTER, KV_HELP_MISSES) \
	X(MISS_NOT_ADMITTED_TOKENS, kvd_prefix_miss_tokens_total{reason="not_admitted"}, KV_METRIC_COUNTER, KV_HELP_MISSES)

#endif
