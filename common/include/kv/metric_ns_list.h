/* kv/metric_ns_list.h -- what is counted for each namespace. Add a line, update it where the thing happens; nothing
 * else to do. */
#ifndef KV_METRIC_NS_LIST_H
#define KV_METRIC_NS_LIST_H

#define KV_NS_METRIC_LIST(X)                                                                                           \
	X(SESSIONS, kvd_namespace_sessions, KV_METRIC_GAUGE, "open sessions, those of operators beyond its part left out")\
	X(SESSIONS_REFUSED, kvd_namespace_sessions_refused_total, KV_METRIC_COUNTER, "connections refused at its part of a limit") \
	X(RECEIVE_BYTES, kvd_namespace_receive_bytes, KV_METRIC_GAUGE, "receive buffers of these sessions")            \
	X(MEMBERS, kvd_namespace_members, KV_METRIC_GAUGE, "live members")                                             \
	X(CPU_BYTES, kvd_namespace_cpu_bytes, KV_METRIC_GAUGE, "bytes of its slabs")                                   \
	X(CPU_SHARE_BYTES, kvd_namespace_cpu_share_bytes, KV_METRIC_GAUGE, "its share of the CPU tier; what it has beyond is borrowed") \
	X(CPU_MAX_BYTES, kvd_namespace_cpu_max_bytes, KV_METRIC_GAUGE, "its maximum in the CPU tier; 0: none") \
	X(DISK_BYTES, kvd_namespace_disk_bytes, KV_METRIC_GAUGE, "bytes of its slot files")                            \
	X(DISK_SHARE_BYTES, kvd_namespace_disk_share_bytes, KV_METRIC_GAUGE, "its share of the disk tier")             \
	X(DISK_MAX_BYTES, kvd_namespace_disk_max_bytes, KV_METRIC_GAUGE, "its maximum in the disk tier; 0: none")\
	X(BLOCKS, kvd_namespace_blocks, KV_METRIC_GAUGE, "its blocks in the index")                                    \
	X(BLOCKS_SHARE, kvd_namespace_blocks_share, KV_METRIC_GAUGE, "its share of the index")                         \
	X(BLOCKS_MAX, kvd_namespace_blocks_max, KV_METRIC_GAUGE, "its maximum in the index; 0: none")          \
	X(IRRECLAIMABLE_BYTES, kvd_namespace_irreclaimable_bytes, KV_METRIC_GAUGE, "pinned, unfinished and quarantined bytes in memory: they end at the share") \
	X(EVICTED, kvd_namespace_evicted_total, KV_METRIC_COUNTER, "blocks evicted from a tier for others of the namespace") \
	X(EVICTED_FOR_OTHERS, kvd_namespace_evicted_for_others_total, KV_METRIC_COUNTER, "blocks evicted from a tier for another namespace: what was borrowed") \
	X(PUTS_EXPIRED, kvd_namespace_puts_expired_total, KV_METRIC_COUNTER, "puts revoked for want of room, their time to live over") \
	X(SHARE_FULL, kvd_namespace_share_full_total, KV_METRIC_COUNTER, "acquires and puts cut short because its irreclaimable bytes were at its share")

#endif
