/* kv/metric_list.h -- the table behind kv/metric.h. Add a line, update it where the thing happens; nothing else to
 * do. */
#ifndef KV_METRIC_LIST_H
#define KV_METRIC_LIST_H

/* Series of one family differ in their label and share their help. */
#define KV_HELP_FRAMES "frames refused, their session closed; no_room: in the receive buffers of their namespace"
#define KV_HELP_JOINS "joins refused: without a live pidfd, or with one not proved to be the process's own"
#define KV_HELP_HANDOVERS "hand-overs ended; taken: their consumer was done; expired: without a consumer, or one in time; failed: by the end of their producer, space or a block"
#define KV_HELP_LEASES "leases ended; revoked: with their instance, space or block"

#define KV_HELP_PEER_BYTES "payload of blocks that came from peers and was verified, or was pushed to them"
#define KV_HELP_PEER_FETCHES "transfers that clients here have asked peers for"
#define KV_HELP_PEER_SERVES "transfers that peers have asked this daemon for"
#define KV_HELP_PEER_REFUSED "connections between daemons that were ended; key: no common key, or bytes that were changed; old: a kvd without TLS, to be upgraded; other: a second daemon of one name, too many, too slow"

#define KV_METRIC_LIST(X)                                                                                              \
	/* requests and sessions (daemon/io) */                                                                        \
	X(SESSIONS, kvd_sessions, KV_METRIC_GAUGE, "open sessions")                                                    \
	X(SESSIONS_OPENED, kvd_sessions_opened_total, KV_METRIC_COUNTER, "sessions accepted")                          \
	X(SESSIONS_REFUSED, kvd_sessions_refused_total, KV_METRIC_COUNTER, "connections refused at a limit")           \
	X(REQUESTS, kvd_requests_total, KV_METRIC_COUNTER, "requests handled")                                         \
	X(REQUESTS_FAILED, kvd_requests_failed_total, KV_METRIC_COUNTER, "requests answered with an error")            \
	X(REQUEST_TIME, kvd_request_seconds, KV_METRIC_HISTOGRAM, "time from a whole frame to its reply")              \
	X(ANSWER_TIME, kvd_answer_seconds, KV_METRIC_HISTOGRAM, "the same from the poll before the one that saw the request: the daemon's whole part of its latency") \
	X(FRAMES_BAD, kvd_frames_refused_total{reason="malformed"}, KV_METRIC_COUNTER, KV_HELP_FRAMES)                 \
	X(FRAMES_VERSION, kvd_frames_refused_total{reason="version"}, KV_METRIC_COUNTER, KV_HELP_FRAMES)               \
	X(FRAMES_TOO_BIG, kvd_frames_refused_total{reason="too_big"}, KV_METRIC_COUNTER, KV_HELP_FRAMES)               \
	X(FRAMES_NO_ROOM, kvd_frames_refused_total{reason="no_room"}, KV_METRIC_COUNTER, KV_HELP_FRAMES)               \
	X(SEND_OVERFLOWS, kvd_send_overflows_total, KV_METRIC_COUNTER, "sessions closed because they did not read their replies") \
	X(IDLE_CLOSED, kvd_idle_closed_total, KV_METRIC_COUNTER, "connections closed because they did not finish HELLO or a frame in time") \
	X(PIDFD_REFUSED, kvd_joins_refused_total{reason="no_pidfd"}, KV_METRIC_COUNTER, KV_HELP_JOINS)                 \
	X(PIDFD_UNPROVED, kvd_joins_refused_total{reason="pidfd_unproved"}, KV_METRIC_COUNTER, KV_HELP_JOINS)          \
	X(MATCH_JOINS, kvd_match_joins_total, KV_METRIC_COUNTER, "joins that may match only: they hand in no pidfd, and hold nothing") \
	X(FD_EXHAUSTED, kvd_fd_exhausted_total, KV_METRIC_COUNTER, "accepts paused because descriptors ran out")       \
	/* instances, leases, puts (daemon/core) */                                                                    \
	X(INSTANCES, kvd_instances, KV_METRIC_GAUGE, "live instances")                                                 \
	X(MEMBERS, kvd_members, KV_METRIC_GAUGE, "live members")                                                       \
	X(MEMBERS_DIED, kvd_members_died_total, KV_METRIC_COUNTER, "members whose pidfd fired while they held something") \
	X(SPACES, kvd_spaces, KV_METRIC_GAUGE, "open spaces: those that have a number")                                                          \
	X(SPACES_CLOSED, kvd_spaces_closed_total, KV_METRIC_COUNTER, "spaces that nobody used and whose number another space got; their blocks stay") \
	X(SPACE_RESETS, kvd_space_resets_total, KV_METRIC_COUNTER, "spaces reset")                                     \
	X(LEASES, kvd_leases, KV_METRIC_GAUGE, "open read leases")                                                     \
	X(LEASES_TAKEN, kvd_leases_taken_total, KV_METRIC_COUNTER, "leases given")                                     \
	X(LEASES_RELEASED, kvd_leases_ended_total{reason="released"}, KV_METRIC_COUNTER, KV_HELP_LEASES)               \
	X(LEASES_EXPIRED, kvd_leases_ended_total{reason="expired"}, KV_METRIC_COUNTER, KV_HELP_LEASES)                 \
	X(LEASES_REVOKED, kvd_leases_ended_total{reason="revoked"}, KV_METRIC_COUNTER, KV_HELP_LEASES)                 \
	X(PINS, kvd_pins, KV_METRIC_GAUGE, "pins on blocks; equals leases, open puts, hand-overs and I/O")                         \
	X(ACQUIRE_HITS, kvd_acquires_total{result="hit"}, KV_METRIC_COUNTER, "acquires; hit: at least one block was leased") \
	X(ACQUIRE_MISSES, kvd_acquires_total{result="miss"}, KV_METRIC_COUNTER, "acquires; hit: at least one block was leased") \
	X(ACQUIRE_SHORTENED, kvd_acquire_shortened_total, KV_METRIC_COUNTER, "acquires that got less than was resident because room for promotion lacked") \
	X(STALE_EPOCH, kvd_stale_epoch_total, KV_METRIC_COUNTER, "requests with keys of an older epoch")               \
	X(PUTS, kvd_puts, KV_METRIC_GAUGE, "open puts")                                                                \
	X(PUTS_STARTED, kvd_puts_started_total, KV_METRIC_COUNTER, "puts started")                                     \
	X(PUTS_REVOKED, kvd_puts_revoked_total, KV_METRIC_COUNTER, "puts given up or revoked")                         \
	X(PUTS_EXPIRED, kvd_puts_expired_total, KV_METRIC_COUNTER, "puts revoked for want of room, their time to live over") \
	X(PUT_BLOCKS, kvd_put_blocks_total, KV_METRIC_COUNTER, "blocks that became visible through a put")             \
	X(PUT_PRIVATE, kvd_put_private_blocks_total, KV_METRIC_COUNTER, "private blocks of hand-overs that were stored: no lookup finds them") \
	X(PUT_ALREADY, kvd_put_already_total, KV_METRIC_COUNTER, "put blocks that were visible already")               \
	X(PUT_DUPLICATES, kvd_put_duplicates_total, KV_METRIC_COUNTER, "put blocks that lost to another instance's copy") \
	X(PUT_YIELDED, kvd_put_yielded_total, KV_METRIC_COUNTER, "puts of copies of what another tier has, cut short at half of the share: the rest is for hand-overs") \
	X(PUT_BUSY, kvd_put_busy_total, KV_METRIC_COUNTER, "puts cut short at a limit")                                \
	X(HANDOVERS, kvd_handovers, KV_METRIC_GAUGE, "hand-overs: awaited, sending, or waiting to be taken")            \
	X(HANDOVER_BYTES, kvd_handover_bytes, KV_METRIC_GAUGE, "slots, tails and announced keys that hand-overs keep, each slot counted once") \
	X(HANDOVERS_TAKEN, kvd_handovers_ended_total{result="taken"}, KV_METRIC_COUNTER, KV_HELP_HANDOVERS)            \
	X(HANDOVERS_EXPIRED, kvd_handovers_ended_total{result="expired"}, KV_METRIC_COUNTER, KV_HELP_HANDOVERS)        \
	X(HANDOVERS_OTHER_SPACE, kvd_handovers_ended_total{result="other_space"}, KV_METRIC_COUNTER, KV_HELP_HANDOVERS) \
	X(HANDOVERS_FAILED, kvd_handovers_ended_total{result="failed"}, KV_METRIC_COUNTER, KV_HELP_HANDOVERS)          \
	X(HANDOVERS_ABORTED, kvd_handovers_ended_total{result="aborted"}, KV_METRIC_COUNTER, KV_HELP_HANDOVERS)        \
	X(HANDOVERS_GAVE_WAY, kvd_handovers_gave_way_total, KV_METRIC_COUNTER, "hand-overs without a consumer that gave way to others which lacked room") \
	X(HANDOVERS_REFUSED, kvd_handovers_refused_total, KV_METRIC_COUNTER, "HANDOVER_SENDs answered BUSY: no room within handover.max_bytes, or the share") \
	X(PEERS_UP, kvd_peers_up, KV_METRIC_GAUGE, "configured peers that transfers work with")                           \
	X(NET_RESTARTS, kvd_net_restarts_total, KV_METRIC_COUNTER, "times the net process was started again after its end") \
	X(NET_CRASHES, kvd_net_crashes_total, KV_METRIC_COUNTER, "times the net process was ended by a signal that was not the daemon's; with UCX strangers can do that") \
	X(PEER_BYTES_IN, kvd_peer_bytes_total{direction="in"}, KV_METRIC_COUNTER, KV_HELP_PEER_BYTES)                  \
	X(PEER_BYTES_OUT, kvd_peer_bytes_total{direction="out"}, KV_METRIC_COUNTER, KV_HELP_PEER_BYTES)                \
	X(PEER_MESSAGES, kvd_peer_messages_total, KV_METRIC_COUNTER, "messages with blocks that were pushed to peers") \
	X(PEER_FETCHED, kvd_peer_fetches_total{result="done"}, KV_METRIC_COUNTER, KV_HELP_PEER_FETCHES)                \
	X(PEER_FETCH_FAILED, kvd_peer_fetches_total{result="failed"}, KV_METRIC_COUNTER, KV_HELP_PEER_FETCHES)         \
	X(PEER_SERVED, kvd_peer_serves_total{result="done"}, KV_METRIC_COUNTER, KV_HELP_PEER_SERVES)                   \
	X(PEER_SERVE_FAILED, kvd_peer_serves_total{result="failed"}, KV_METRIC_COUNTER, KV_HELP_PEER_SERVES)           \
	X(PEER_BREAKS, kvd_peer_breaks_total, KV_METRIC_COUNTER, "connections to peers that ended")                    \
	X(PEER_CORRUPT, kvd_peer_corrupt_blocks_total, KV_METRIC_COUNTER, "blocks from peers whose bytes did not match their digests; none was kept") \
	X(PEER_BAD_FRAMES, kvd_peer_refused_total{reason="malformed"}, KV_METRIC_COUNTER, KV_HELP_PEER_REFUSED)        \
	X(PEER_BAD_PROOFS, kvd_peer_refused_total{reason="key"}, KV_METRIC_COUNTER, KV_HELP_PEER_REFUSED)              \
	X(PEER_OLD, kvd_peer_refused_total{reason="old"}, KV_METRIC_COUNTER, KV_HELP_PEER_REFUSED)                     \
	X(PEER_BAD_LINKS, kvd_peer_refused_total{reason="other"}, KV_METRIC_COUNTER, KV_HELP_PEER_REFUSED)             \
	X(HANDOVER_WAIT, kvd_handover_wait_seconds, KV_METRIC_HISTOGRAM, "time consumers waited for a hand-over to be complete or to fail") \
	X(SHARE_FULL, kvd_share_full_total, KV_METRIC_COUNTER, "acquires and puts cut short: their namespace's irreclaimable bytes were at its share") \
	X(NO_PARENT, kvd_no_parent_total, KV_METRIC_COUNTER, "puts below an unknown parent")                           \
	X(PARENT_UNREADABLE, kvd_parent_unreadable_total, KV_METRIC_COUNTER, "puts refused or ended because the disk could not read their parent, or a block above it") \
	X(PARENT_LOST, kvd_parent_lost_total, KV_METRIC_COUNTER, "put blocks whose parent never came")                 \
	X(NOT_ADMITTED, kvd_not_admitted_total, KV_METRIC_COUNTER, "blocks a tier refused")                            \
	X(BLOCKS_WITHDRAWN, kvd_blocks_withdrawn_total, KV_METRIC_COUNTER, "blocks that engines have taken back, those below the named ones included") \
	X(BAD_BLOCKS, kvd_bad_blocks_total, KV_METRIC_COUNTER, "blocks quarantined because their bytes were wrong")    \
	X(BAD_REPORTS, kvd_bad_reports_total, KV_METRIC_COUNTER, "report records refused, and counts of them that cannot be") \
	X(LOST_REPORTS, kvd_lost_reports_total, KV_METRIC_COUNTER, "report records clients dropped because their ring was full") \
	X(BAD_STAGING, kvd_bad_staging_total, KV_METRIC_COUNTER, "put ends whose digests lay outside the staging area or could not be read") \
	/* index and mirror */                                                                                         \
	X(BLOCKS, kvd_blocks, KV_METRIC_GAUGE, "blocks in the index")                                                  \
	X(BLOCKS_CPU, kvd_tier_blocks{tier="cpu"}, KV_METRIC_GAUGE, "blocks in the tier, with and without an engine attached to their space") \
	X(BLOCKS_GPU, kvd_tier_blocks{tier="gpu"}, KV_METRIC_GAUGE, "blocks in the tier, with and without an engine attached to their space") \
	X(BLOCKS_DISK, kvd_tier_blocks{tier="disk"}, KV_METRIC_GAUGE, "blocks in the tier, with and without an engine attached to their space") \
	X(INDEX_STEPS, kvd_index_steps_total, KV_METRIC_COUNTER, "runs of the index visited by walks towards a root")  \
	X(MIRROR_LEFT_OUT, kvd_mirror_left_out_total, KV_METRIC_COUNTER, "blocks that found no free entry in the mirror")   \
	X(EVICTED_CPU, kvd_evicted_total{tier="cpu"}, KV_METRIC_COUNTER, "blocks evicted from the tier")               \
	X(EVICTED_GPU, kvd_evicted_total{tier="gpu"}, KV_METRIC_COUNTER, "blocks evicted from the tier")               \
	X(EVICTED_DISK, kvd_evicted_total{tier="disk"}, KV_METRIC_COUNTER, "blocks evicted from the tier")             \
	X(PROMOTED, kvd_promoted_total, KV_METRIC_COUNTER, "blocks read from disk for a lease")                        \
	X(WRITE_BEHIND, kvd_write_behind_total, KV_METRIC_COUNTER, "blocks written to disk")                           \
	X(WRITE_BEHIND_DROPPED, kvd_write_behind_dropped_total, KV_METRIC_COUNTER, "blocks evicted or refused before they were on disk") \
	/* storage */                                                                                                  \
	X(CPU_BYTES, kvd_tier_bytes{tier="cpu"}, KV_METRIC_GAUGE, "bytes of the tier: slabs, digests and ledger; slot files and metadata") \
	X(DISK_BYTES, kvd_tier_bytes{tier="disk"}, KV_METRIC_GAUGE, "bytes of the tier: slabs, digests and ledger; slot files and metadata") \
	X(GPU_BYTES, kvd_tier_bytes{tier="gpu"}, KV_METRIC_GAUGE, "bytes of the tier: slabs, digests and ledger; slot files and metadata") \
	X(CPU_USED_BYTES, kvd_tier_used_bytes{tier="cpu"}, KV_METRIC_GAUGE, "slot bytes in use, unfinished and quarantined ones included") \
	X(DISK_USED_BYTES, kvd_tier_used_bytes{tier="disk"}, KV_METRIC_GAUGE, "slot bytes in use, unfinished and quarantined ones included") \
	X(GPU_USED_BYTES, kvd_tier_used_bytes{tier="gpu"}, KV_METRIC_GAUGE, "slot bytes in use, unfinished and quarantined ones included") \
	X(CPU_LIMIT_BYTES, kvd_tier_limit_bytes{tier="cpu"}, KV_METRIC_GAUGE, "limit of the tier")                     \
	X(DISK_LIMIT_BYTES, kvd_tier_limit_bytes{tier="disk"}, KV_METRIC_GAUGE, "limit of the tier")                   \
	X(GPU_LIMIT_BYTES, kvd_tier_limit_bytes{tier="gpu"}, KV_METRIC_GAUGE, "limit of the tier")                     \
	X(CPU_QUARANTINED_BYTES, kvd_tier_quarantined_bytes{tier="cpu"}, KV_METRIC_GAUGE, "slot bytes in quarantine")  \
	X(DISK_QUARANTINED_BYTES, kvd_tier_quarantined_bytes{tier="disk"}, KV_METRIC_GAUGE, "slot bytes in quarantine") \
	X(GPU_QUARANTINED_BYTES, kvd_tier_quarantined_bytes{tier="gpu"}, KV_METRIC_GAUGE, "slot bytes in quarantine")  \
	X(CPU_FIRST_TOUCH, kvd_cpu_first_touch_total, KV_METRIC_COUNTER, "slots wanted before their memory had been touched") \
	X(CPU_MEMORY_REFUSED, kvd_cpu_memory_refused_total, KV_METRIC_COUNTER, "times that the kernel, or a limit of memory, refused pages of the pool") \
	X(SLABS_RETIRED, kvd_slabs_retired_total, KV_METRIC_COUNTER, "slabs whose memory went to another block size")  \
	X(SLABS_STILL_MAPPED, kvd_slabs_still_mapped, KV_METRIC_GAUGE, "retired slabs that a member has not unmapped in time: their pages were taken away") \
	X(SLABS_RECLAIMED, kvd_slabs_reclaimed_total, KV_METRIC_COUNTER, "slabs and slot files that a namespace over its share began to give to another") \
	X(BLOCKS_MOVED, kvd_blocks_moved_total, KV_METRIC_COUNTER, "blocks copied out of slabs that were to be retired") \
	X(CPU_HUGE_PAGES, kvd_cpu_huge_pages, KV_METRIC_GAUGE, "1 when the pool lies on huge pages")                   \
	X(SLAB_FAULTS, kvd_slab_faults_total, KV_METRIC_COUNTER, "copies, digests and looks that found memory gone which a client had taken away") \
	X(FILES_RETIRED, kvd_files_retired_total, KV_METRIC_COUNTER, "slot files whose room went to another block size or namespace") \
	X(DISK_WRITTEN_BYTES, kvd_disk_written_bytes_total, KV_METRIC_COUNTER, "bytes written to slot files")          \
	X(DISK_READ_BYTES, kvd_disk_read_bytes_total, KV_METRIC_COUNTER, "bytes read from slot files")                 \
	X(DISK_ERRORS, kvd_disk_errors_total, KV_METRIC_COUNTER, "reads, writes or syncs that failed")                 \
	X(DISK_CORRUPT, kvd_disk_corrupt_total, KV_METRIC_COUNTER, "slots whose header or digest did not match")       \
	X(DISK_READ_TIME, kvd_disk_read_seconds, KV_METRIC_HISTOGRAM, "time of a slot read, digest included")          \
	X(DISK_WRITE_TIME, kvd_disk_write_seconds, KV_METRIC_HISTOGRAM, "time of a slot write")                        \
	X(DISK_LOST, kvd_disk_lost_total, KV_METRIC_COUNTER, "blocks on disk dropped: a sync failed after they were written, their file went away, or they stayed unreadable") \
	X(DISK_UNREADABLE, kvd_disk_unreadable_slots, KV_METRIC_GAUGE, "slots the disk cannot read now: their blocks, and those below, are no hits") \
	X(DISK_UNVERIFIED, kvd_disk_unverified_blocks, KV_METRIC_GAUGE, "blocks found by their headers and not read yet: durable acknowledgements wait for them") \
	X(DISK_STATE, kvd_disk_state, KV_METRIC_GAUGE, "0: works; 1: the file system is full; 2: no slot file can be made, for another reason; 3: read-only after a fault; 4: switched off after a fault") \
	X(DISK_OFF, kvd_disk_off, KV_METRIC_GAUGE, "1 when the disk tier is switched off after a fault")               \
	X(DISK_FALLBACK, kvd_disk_fallback, KV_METRIC_GAUGE, "1 when io_uring is not available and plain I/O is used") \
	X(DISK_RECOVERED, kvd_disk_recovered_total, KV_METRIC_COUNTER, "blocks found on disk at start")                \
	X(DISK_REBUILT, kvd_disk_rebuilt_total, KV_METRIC_COUNTER, "blocks recovered from slot headers because the metadata was lost") \
	X(DISK_DROPPED, kvd_disk_dropped_total, KV_METRIC_COUNTER, "blocks found on disk at start and not kept: old epoch, unknown space, no parent, damaged or twice") \
	X(DISK_RECENCY_ERRORS, kvd_disk_recency_errors_total, KV_METRIC_COUNTER, "files with the order of use (nvme.path/recency) not written or read: their blocks count as used last") \
	X(DISK_FILES_DROPPED, kvd_disk_files_dropped_total, KV_METRIC_COUNTER, "slot files left out at start because they were damaged or unreadable") \
	X(DISK_FILES_CUT, kvd_disk_files_cut_total, KV_METRIC_COUNTER, "slot files found shorter than they were: what lay behind is lost") \
	X(GPU_DEVICES, kvd_gpu_devices, KV_METRIC_GAUGE, "devices whose memory the GPU tier uses")                     \
	X(GPU_STARTS, kvd_gpu_starts_total, KV_METRIC_COUNTER, "starts of the GPU program, which gets memory of a device and ends") \
	X(GPU_FAILURES, kvd_gpu_failures_total, KV_METRIC_COUNTER, "tries for memory of a device that did not bring all of it") \
	X(GPU_REFUSED, kvd_gpu_refused_messages_total, KV_METRIC_COUNTER, "messages of the GPU program that made no sense") \
	X(GPU_STOCK_SLABS, kvd_gpu_stock_slabs, KV_METRIC_GAUGE, "slabs of devices whose memory is here and that no block size has taken yet") \
	X(ADOPTED_BLOCKS, kvd_adopted_blocks_total, KV_METRIC_COUNTER, "blocks in GPU memory taken over from the daemon before") \
	X(ADOPT_DROPPED, kvd_adopt_dropped_total, KV_METRIC_COUNTER, "its whole blocks that were not: old epoch, no parent, damaged, over a share") \
	X(ADOPT_REFUSED, kvd_adopt_refused_total, KV_METRIC_COUNTER, "its ledgers and slabs that were not, or not whole: damaged, of another version or size, without room or memory") \
	X(ADOPT_WRITERS, kvd_adopt_writers, KV_METRIC_GAUGE, "members of earlier daemons whose copies may go on: unfinished slots wait for them in quarantine") \
	X(KEEPER_WAITING, kvd_keeper_waiting_messages, KV_METRIC_GAUGE, "messages that wait for the keeper: more than a moment above 0, it is stopped") \
	X(KEEPER_REFUSED, kvd_keeper_refused_total, KV_METRIC_COUNTER, "joins and slabs without room for their messages to the keeper: such a join is refused, such a slab is not adopted") \
	X(META_STARTS, kvd_meta_starts_total, KV_METRIC_COUNTER, "starts of the metadata process: 1, and one more each time it died, hung or failed") \
	X(DISK_COMMITS, kvd_disk_commits_total, KV_METRIC_COUNTER, "batches of metadata made durable")                 \
	/* events and prefix hits */                                                                                   \
	X(EVENTS, kvd_events_total, KV_METRIC_COUNTER, "events published")                                             \
	X(EVENTS_LOST, kvd_events_lost_total, KV_METRIC_COUNTER, "event messages not published; subscribers see a gap in seq") \
	X(EVENTS_MISSED, kvd_events_missed_total, KV_METRIC_COUNTER, "messages that a subscriber read too slowly to get; it sees a gap in seq") \
	X(SUBSCRIBERS_REFUSED, kvd_subscribers_refused_total, KV_METRIC_COUNTER, "subscribers refused at the limit, or closed over bytes that no subscriber sends") \
	X(PREFIX_RECORDS, kvd_prefix_records_total, KV_METRIC_COUNTER, "prefix-hit records published")                 \
	X(PREFIX_RECORDS_LOST, kvd_prefix_records_lost_total, KV_METRIC_COUNTER, "prefix-hit records not published")   \
	/* the process */                                                                                              \
	X(UPTIME, kvd_uptime_seconds, KV_METRIC_GAUGE, "seconds since this run of the daemon started")                 \
	X(RESTARTS, kvd_restarts_total, KV_METRIC_COUNTER, "times the keeper has restarted the daemon")                \
	X(HTTP_ENDED, kvd_http_ended_total, KV_METRIC_COUNTER, "HTTP connections ended to make room for newer ones")   \
	X(CONFIG_DIFFERS, kvd_config_differs, KV_METRIC_GAUGE, "1 when the configuration file is not what runs")       \
	X(CONFIG_REFUSED, kvd_config_refused_total, KV_METRIC_COUNTER, "configurations that SIGHUP has refused")       \
	X(LOG_DROPPED, kvd_log_dropped_total, KV_METRIC_COUNTER, "log lines dropped because the log was not read")     \
	X(LOOP_ITERATIONS, kvd_loop_iterations_total, KV_METRIC_COUNTER, "iterations of the core loop")                \
	X(LOOP_STALLS, kvd_loop_stalls_total, KV_METRIC_COUNTER, "iterations of the core loop that took longer than 20 ms")

#endif
