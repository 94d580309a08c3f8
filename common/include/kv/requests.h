/* kv/requests.h -- the request table: everything that can be said on a kvd socket.
 *
 * From this one table come the C structs, encoder, decoder, role checks, `kvctl help requests` and docs/wire.md. Codes
 * are part of the wire format and are never reused; no field is optional, and from the first release on a new one means
 * a new protocol version.
 *
 * A field is F(kind, name, limit, "help"). Kinds:
 *   U32, U64, I32     an integer (limit: largest value allowed, 0: no limit)
 *   STR               UTF-8 without control characters, at most `limit` bytes; kv_slice_t in C, borrowed from the frame
 *   TEXT              the same, but newline and tab are allowed: JSON documents, identity texts
 *   BIN               bytes, at most `limit`; kv_slice_t, borrowed
 *   KEY               16 bytes exactly; kv_key_t
 *   KEYS              a multiple of 16 bytes, at most `limit` keys; kv_slice_t of raw bytes, borrowed
 * A body is a msgpack array of the fields in this order.
 */
#ifndef KV_REQUESTS_H
#define KV_REQUESTS_H

#define KV_MAX_BLOCKS 65536u      /* blocks in one acquire or put */
#define KV_MAX_DEVICES 8u /* GPUs of a node whose memory has blocks */
#define KV_MAX_LADDER 40u        /* rungs of a full group's ladder */
#define KV_MAX_TEXT 4096u
#define KV_MAX_JSON (1u << 20)
#define KV_MAX_WRITERS 1024u
#define KV_ROLE_MATCH 3u /* of a JOIN */

/* Who may send it. ANY: also before HELLO. The bits are roles of a session (a member is a client that has joined). */
#define KV_ROLE_NONE 0u
#define KV_ROLE_CLIENT 1u
#define KV_ROLE_MEMBER 2u
#define KV_ROLE_OPERATOR 4u
#define KV_ROLE_ANY 8u

#define KV_PUT_DURABLE 1u /* flags of PUT_START: a DURABLE notice is wanted */
#define KV_PUT_YIELD   4u /* the blocks are copies of what another tier has: others go first */
#define KV_PUT_OPTIONAL 8u /* new blocks may be refused while the pool thrashes: NOT_ADMITTED */
#define KV_PUT_PRIVATE 2u /* the blocks are private: of a hand-over, and found by no lookup */
/* Bytes of one PUT_START writer entry (u32 rank, head_first, head_count, layer_first, layer_count; little-endian). */
#define KV_WRITER_BYTES 20u
/* Bytes of one HANDOVER_SEND part (u32 group, n, count; little-endian). */
#define KV_HANDOVER_PART_BYTES 12u
#define KV_HANDOVER_LAST  1u /* flags of HANDOVER_SEND: nothing follows */
#define KV_HANDOVER_AWAIT_ROOM 2u /* with the answer BUSY: HANDOVER_ROOM follows */
#define KV_HANDOVER_AHEAD 4u /* the blocks need not be visible yet: they are handed over as they become visible */
#define KV_HANDOVER_ABORT 1u /* flags of HANDOVER_DONE: the hand-over is given up; by its producer, not its consumer */
#define KV_HANDOVER_BY_PRODUCER 2u
#define KV_FETCH_PREFIX 1u /* flags of FETCH */
#define KV_SPACE_KNOWN 1u /* flags of SPACE_OPEN: only if it was opened before */

/* X(code, NAME, name, roles, help): request from a client, answered by exactly one reply (same code).
 * 24 was a request, and is not used again. */
#define KV_REQUEST_LIST(X)                                                                                             \
	X(1, HELLO, hello, KV_ROLE_ANY, "open a session: agree on the version and learn the daemon's incarnation")     \
	X(2, JOIN, join, KV_ROLE_CLIENT, "create an instance or join it; carries the member's pidfd, answers with fds")\
	X(3, SPACE_OPEN, space_open, KV_ROLE_CLIENT, "open the space with this identity, creating it when it is new")  \
	X(4, SPACE_RESET, space_reset, KV_ROLE_OPERATOR, "drop all blocks of a space by starting its next epoch; to operators that have joined") \
	X(5, ACQUIRE, acquire, KV_ROLE_MEMBER, "lease the deepest known block of a full group's ladder and all before it, or all of a window's or state's blocks") \
	X(6, RELEASE, release, KV_ROLE_MEMBER, "give leases back")                                                     \
	X(7, RENEW, renew, KV_ROLE_MEMBER, "extend a read lease")                                                      \
	X(8, PUT_START, put_start, KV_ROLE_MEMBER, "reserve slots for new blocks below a parent")                      \
	X(9, PUT_END, put_end, KV_ROLE_MEMBER, "one rank's bytes of some blocks of a put are in place")                \
	X(10, PUT_REVOKE, put_revoke, KV_ROLE_MEMBER, "give an unfinished put up")                                     \
	X(11, DRAINED, drained, KV_ROLE_MEMBER, "this member has stopped touching that memory")                            \
	X(12, BAD_BLOCK, bad_block, KV_ROLE_MEMBER, "a leased block did not match its digest: quarantine it")          \
	X(13, EXPLAIN, explain, KV_ROLE_CLIENT | KV_ROLE_OPERATOR, "where each of these keys is, and why the first missing one is missing") \
	X(14, STATUS, status, KV_ROLE_CLIENT | KV_ROLE_OPERATOR, "health, tiers, spaces and sessions")         \
	X(15, STATS, stats, KV_ROLE_CLIENT | KV_ROLE_OPERATOR, "every metric")                                 \
	X(16, CHECK, check, KV_ROLE_OPERATOR, "verify the invariants: leaks, sums, index against storage")             \
	X(17, CONFIG, config, KV_ROLE_OPERATOR, "the options in force")                                        \
	X(18, KEEP, keep, KV_ROLE_MEMBER, "a put is still being written: its time to live begins again")               \
	X(19, HANDOVER_SEND, handover_send, KV_ROLE_MEMBER, "hand a prefix over, or more of it: it stays until its consumer is done") \
	X(20, HANDOVER_RECV, handover_recv, KV_ROLE_MEMBER, "be the consumer of a hand-over that has begun or will; HANDOVER follows until it is complete") \
	X(21, HANDOVER_TAIL, handover_tail, KV_ROLE_MEMBER, "the bytes that came with a hand-over; to its consumer")   \
	X(22, HANDOVER_DONE, handover_done, KV_ROLE_MEMBER, "the consumer needs the hand-over no longer, or either side gives it up") \
	X(23, TRANSFERS, transfers, KV_ROLE_CLIENT | KV_ROLE_OPERATOR, "the namespace's hand-overs")         \
	X(27, WITHDRAW, withdraw, KV_ROLE_MEMBER, "take back what was saved under a name that was not true: these blocks, and all below them, are never found again") \
	X(28, FETCH, fetch, KV_ROLE_MEMBER, "bring a hand-over, or a prefix, from another node's daemon: it becomes a hand-over here") \
	X(29, PEERS, peers, KV_ROLE_OPERATOR, "the daemons of other nodes: who is connected, what was moved, what failed last") \
	X(30, SPACE_CLOSE, space_close, KV_ROLE_MEMBER, "the member needs the space no longer: when no member does, its number may be another space's; its blocks stay")

/* Sent by the daemon on its own, never answered. */
#define KV_NOTICE_LIST(X)                                                                                              \
	X(64, SLAB_ADD, slab_add, KV_ROLE_NONE, "a slab of the namespace; carries its data fd and its digest fd")      \
	X(65, SLAB_RETIRE, slab_retire, KV_ROLE_NONE, "unmap this slab, then send DRAINED")                               \
	X(66, LEASE_DONE, lease_done, KV_ROLE_NONE, "a lease's blocks are all ready, or will never be")                \
	X(67, PUT_DONE, put_done, KV_ROLE_NONE, "a put has ended: to its starter, and to ranks whose DRAINED its slots wait for") \
	X(68, DURABLE, durable, KV_ROLE_NONE, "what of a put survives kill -9 and power loss")                         \
	X(69, HANDOVER, handover, KV_ROLE_NONE, "a hand-over has moved on or ended: to its consumer; to its producer too when it ends, or by announced blocks") \
	X(70, HANDOVER_ROOM, handover_room, KV_ROLE_NONE, "hand-overs may keep more again: to a member that was answered BUSY and waits") \
	X(71, DEVICE_ADD, device_add, KV_ROLE_NONE, "a GPU in whose memory there are blocks; before its first SLAB_ADD")

#define KV_FIELDS_hello(F)                                                                                             \
	F(U32, version, 0, "protocol version of the client")                                                          \
	F(U32, features, 0, "feature bits the client knows")                                                           \
	F(STR, program, 64, "name of the program, for `kvctl status`")
#define KV_FIELDS_hello_reply(F)                                                                                       \
	F(U32, version, 0, "protocol version spoken from now on")                                                      \
	F(U32, features, 0, "feature bits both sides know")                                                            \
	F(U64, incarnation, 0, "this run of the daemon; never 0, never reused")                                       \
	F(STR, ns, 64, "the namespace this socket belongs to")                                                         \
	F(U32, max_frame, 0, "largest frame body in bytes the daemon accepts from now on")

#define KV_FIELDS_join(F)                                                                                              \
	F(STR, instance, 128, "instance id, chosen by the launcher and shared by all its members")                     \
	F(BIN, secret, 32, "16 to 32 bytes; every member shows the same")                                              \
	F(U32, role, KV_ROLE_MATCH, "0 scheduler, 1 worker, 2 both; 3 match only: no pidfd, no member, no lease, no put")                                                               \
	F(U32, rank, 65535, "worker rank")                                                                             \
	F(U64, old_incarnation, 0, "incarnation this member was attached to before, 0: none; its copies have ended")   \
	F(U32, staging_words, 1u << 24, "u64 words of digest staging wanted in the member area")                       \
	F(U64, attachment, 0, "drawn at random once, the same each time this member joins again: its older connections are those with the same number; 0: it has none")
#define KV_FIELDS_join_reply(F)                                                                                        \
	F(U64, instance_id, 0, "the daemon's number for the instance; match only: 0, and the next one")                                                 \
	F(U64, member_id, 0, "the daemon's number for this member")                                                    \
	F(U64, mirror_bytes, 0, "size of the mirror (first fd)")                                                       \
	F(U64, lease_bytes, 0, "size of the lease area (second fd); match only: 0, and the next one")                                                   \
	F(U64, member_bytes, 0, "size of the member area (third fd)")                                                  \
	F(STR, peer_name, 64, "what the daemons of other nodes call this one (peers.name); empty: it has no peers")

#define KV_FIELDS_space_open(F)                                                                                        \
	F(TEXT, identity, KV_MAX_TEXT, "canonical identity text (kv/identity.h); the daemon adds the namespace")        \
	F(STR, layout, 1024, "canonical text of the layouts of the groups' blocks (kvk/layout.h), the same as in the identity") \
	F(U32, flags, KV_SPACE_KNOWN, "bit 0: only a space that was opened before, here or as the disk knows; else NOT_FOUND")
#define KV_FIELDS_space_open_reply(F)                                                                                  \
	F(U32, space, 0, "space id: the space's as long as a member has it open, a lease, put or hand-over names it, or no other space needs a number")                                                       \
	F(U64, epoch, 0, "current epoch; never that of another space")                                                 \
	F(BIN, root, 32, "root digest the chain starts from")                                                          \
	F(U32, hash_tokens, 0, "tokens a unit of the chain")                                                           \
	F(U32, block_bytes, 0, "payload bytes of a block of the first group; this and the next four follow from its layout")          \
	F(U32, heads, 0, "heads of the layout: digest roots a block")                                                  \
	F(U32, leaves, 0, "digest leaves a head")                                                                      \
	F(U32, leaf_bytes, 0, "bytes of a leaf; the last one of an opaque page may be shorter")                        \
	F(U32, page_bytes, 0, "bytes of one page, i.e. one (head, layer): where the leaves start anew")                \
	F(STR, layout, 1024, "canonical layouts of the groups' blocks; their inner order may differ from the one asked for")

#define KV_FIELDS_space_close(F) F(U32, space, 0, "space id; NOT_FOUND: the member did not have it open")
#define KV_FIELDS_space_close_reply(F) F(U32, reserved, 0, "0")

#define KV_FIELDS_space_reset(F)                                                                                       \
	F(U32, space, 0, "space id")                                                                                   \
	F(U64, epoch, 0, "epoch the caller knows; an old one answers STALE_EPOCH, so a retry resets once")
#define KV_FIELDS_space_reset_reply(F) F(U64, epoch, 0, "the new epoch, synced to disk before this answer")

#define KV_FIELDS_acquire(F)                                                                                           \
	F(U32, space, 0, "space id")                                                                                   \
	F(U64, epoch, 0, "of the keys")                                                                                 \
	F(U32, group, 255, "block group")                                                                              \
	F(U32, skip, KV_MAX_BLOCKS, "blocks the engine holds already: touched, neither promoted nor listed")           \
	F(U32, n, KV_MAX_BLOCKS, "blocks wanted")                                                                      \
	F(KEYS, ladder, KV_MAX_BLOCKS, "full: keys of blocks n, n-1, n-2, n-4, ... (1-based), ending with that of block 1, and block n may be a private one; window, state: those of blocks skip+1 to n, all or none are leased") \
	F(U32, ttl_ms, 0, "lease life in ms; 0: the daemon's default")
#define KV_FIELDS_acquire_reply(F)                                                                                     \
	F(U64, lease, 0, "lease id; 0: nothing is leased (n <= skip)")                                                 \
	F(U32, n, 0, "blocks leased, skip included; window, state: n as asked, or 0")                                  \
	F(U32, ready, 0, "blocks whose bytes are there now; LEASE_DONE follows when ready < n")                        \
	F(U32, n_disk, 0, "of them read from disk for this lease")                                                     \
	F(U64, offset, 0, "of the lease's header in the lease area")                                                   \
	F(U32, ttl_ms, 0, "lease life granted")                                                                        \
	F(U32, why, 0, "kv_miss_reason_t of block n + 1; window, state: of the first block that is missing")

#define KV_FIELDS_release(F) F(BIN, leases, 8u * 4096u, "lease ids, u64 little-endian each")
#define KV_FIELDS_release_reply(F) F(U32, released, 0, "how many of them were held")

#define KV_FIELDS_renew(F)                                                                                             \
	F(U64, lease, 0, "lease id")                                                                                   \
	F(U32, ttl_ms, 0, "new life from now in ms; 0: the daemon's default")
#define KV_FIELDS_renew_reply(F) F(U32, ttl_ms, 0, "lease life granted")

#define KV_FIELDS_put_start(F)                                                                                         \
	F(U32, space, 0, "space id")                                                                                   \
	F(U64, epoch, 0, "of the keys")                                                                                 \
	F(U32, group, 255, "block group")                                                                              \
	F(U32, flags, KV_PUT_DURABLE | KV_PUT_PRIVATE | KV_PUT_YIELD | KV_PUT_OPTIONAL, "bit 0: a DURABLE notice is wanted; bit 1, without bit 0: the blocks are private, and unchained in every group; bit 2: they are copies of what another tier has, and get at most half of the share; bit 3: while the pool thrashes NOT_ADMITTED may be the answer, but not with bit 0 or 1") \
	F(KEY, parent, 0, "key of the block before the first one; zero: the first block is at the root; window, state, private: ignored") \
	F(U32, depth, 0, "blocks before the first one (0 at the root); window, state, private: nothing depends on it") \
	F(KEYS, keys, KV_MAX_BLOCKS, "keys of the blocks, each the parent of the next; window, state, private: unchained, none twice") \
	F(BIN, event_hashes, 8u * KV_MAX_BLOCKS, "the engine's 64-bit event hashes, u64 each; empty: key bytes 0-7")   \
	F(BIN, tokens, 4u * 4u * 1024u * 1024u, "token ids of all blocks, u32 each; empty: events carry none")         \
	F(BIN, writers, KV_WRITER_BYTES * KV_MAX_WRITERS, "who writes which heads and layers; empty: one writer, rank 0, all")
#define KV_FIELDS_put_start_reply(F)                                                                                   \
	F(U64, put, 0, "put id; 0: nothing to write")                                                                  \
	F(U32, n, 0, "blocks answered, from the first; fewer than asked: BUSY or NOT_ADMITTED from there on, as the next put says")                          \
	F(U64, offset, 0, "of the put's header in the lease area; slots[i] == KV_SLOT_NONE: ALREADY")                  \
	F(U32, already, 0, "blocks among them that are visible already: the first ones; window, state: anywhere")

#define KV_FIELDS_put_end(F)                                                                                           \
	F(U64, put, 0, "put id")                                                                                       \
	F(U32, rank, 65535, "the writer")                                                                              \
	F(U32, first, KV_MAX_BLOCKS, "first block, counted from the put's first")                                      \
	F(U32, count, KV_MAX_BLOCKS, "blocks")                                                                         \
	F(U64, staging, 0, "first u64 word in the member's staging: leaves[block][head][leaf] of the rank's range, ALREADY blocks left out") \
	F(U32, words, 0, "u64 words there")
#define KV_FIELDS_put_end_reply(F) F(U32, complete, 0, "blocks of the put all of whose ranges have ended")

#define KV_FIELDS_put_revoke(F) F(U64, put, 0, "put id")
#define KV_FIELDS_put_revoke_reply(F) F(U32, revoked, 0, "blocks that were unfinished")

#define KV_FIELDS_keep(F) F(U64, put, 0, "put id")
#define KV_FIELDS_keep_reply(F) F(U32, ttl_ms, 0, "time to live granted; after it the put is revoked when its namespace lacks room")

#define KV_FIELDS_handover_send(F)                                                                                     \
	F(STR, transfer, 128, "transfer id, 1 to 128 bytes: the same as its consumer's, and of one hand-over at a time in the space") \
	F(U64, number, 0, "0: the first one of the hand-over; else its number, from the reply")                        \
	F(U32, space, 0, "space id")                                                                                   \
	F(U64, epoch, 0, "of the keys")                                                                                 \
	F(BIN, parts, KV_HANDOVER_PART_BYTES * KV_MAX_GROUPS, "u32 group, n, count of each group that has more: its first n blocks are handed over, the next count keys name them") \
	F(KEYS, keys, KV_MAX_BLOCKS, "of each part: full: the key of block n, with flags bit 2 those of the last count blocks; window, state: those of the blocks that a sequence needs after n. One that is not visible: MISS. count 0: none, of a state before a partial block") \
	F(U32, partial, 0, "with flags bit 0: tokens after these units, fewer than any group's block has; they are in a private block of every group. 0: none") \
	F(KEY, private_key, 0, "of those private blocks; without partial: ignored")                                    \
	F(U32, flags, KV_HANDOVER_LAST | KV_HANDOVER_AWAIT_ROOM | KV_HANDOVER_AHEAD, "bit 0: nothing follows, the hand-over is complete; bit 1: HANDOVER_ROOM is wanted after the answer BUSY; bit 2, in a space of one full group: blocks that are not visible yet are handed over when they are, MISS: the first key leaves a gap; without it what is announced is withdrawn") \
	F(U32, ttl_ms, 0, "life from now on without a consumer; 0: the daemon's default and most")                     \
	F(BIN, tail, 1u << 20, "bytes for the consumer, opaque; they replace earlier ones unless empty")
#define KV_FIELDS_handover_send_reply(F)                                                                               \
	F(U64, number, 0, "of the hand-over; never reused")                                       \
	F(U32, n, 0, "units handed over, of every group")                                            \
	F(U32, taken, 0, "1: it has a consumer")                                                                       \
	F(U64, bytes, 0, "slots, tail and announced keys that it keeps")                                       \
	F(U32, ttl_ms, 0, "life granted")                                                                              \
	F(U32, state, 0, "kv_handover_state_t: SENDING or COMPLETE")                                                   \
	F(U32, announced, 0, "units that announced blocks reach to, a private block counts as one; 0: none are announced")

#define KV_FIELDS_handover_recv(F)                                                                                     \
	F(STR, transfer, 128, "transfer id")                                                           \
	F(U32, space, 0, "space id")                                                                                   \
	F(U64, epoch, 0, "of the keys")                                                                                 \
	F(U32, timeout_ms, 0, "from now until HANDOVER_DONE, or until this is asked again; then the hand-over is another one's. 0: the daemon's default and most")
#define KV_FIELDS_handover_recv_reply(F)                                                                               \
	F(U64, number, 0, "of the hand-over; never reused")                                       \
	F(U32, state, 0, "kv_handover_state_t")                                                                        \
	F(U32, n, 0, "units handed over, of every group: to be leased by their keys")                \
	F(U32, partial, 0, "tokens after them, in a private block of every group; 0: none")                            \
	F(I32, status, 0, "FAILED: why")                                                                               \
	F(U32, tail_bytes, 0, "of HANDOVER_TAIL's answer")                                                             \
	F(U64, bytes, 0, "slots, tail and announced keys that it keeps")                                                       \
	F(U32, ttl_ms, 0, "time granted")

#define KV_FIELDS_handover_tail(F) F(U64, number, 0, "hand-over")
#define KV_FIELDS_handover_tail_reply(F) F(BIN, tail, 1u << 20, "as its producer gave it last")

#define KV_FIELDS_handover_done(F)                                                                                     \
	F(U64, number, 0, "hand-over")                                                                                 \
	F(U32, flags, KV_HANDOVER_ABORT | KV_HANDOVER_BY_PRODUCER, "bit 0: given up: another consumer may take it; bit 1, with bit 0: its producer says so, and it fails") \
	F(I32, status, 0, "bit 1: why, an error, for the consumer; 0: ABORTED")
#define KV_FIELDS_handover_done_reply(F) F(U32, reserved, 0, "0")

#define KV_FIELDS_transfers(F) F(U32, reserved, 0, "0")
#define KV_FIELDS_transfers_reply(F) F(TEXT, json, KV_MAX_JSON, "one object: transfers[], and how many are left out")

#define KV_FIELDS_fetch(F)                                                                                             \
	F(STR, peer, 64, "name of a configured peer; this daemon's own: the hand-over is here, and nothing is fetched") \
	F(STR, transfer, 128, "transfer id there and here; with bit 0: of the hand-over here")                         \
	F(U32, flags, KV_FETCH_PREFIX, "bit 0: the blocks of the prefix that the peer has now, no hand-over there")    \
	F(TEXT, identity, KV_MAX_TEXT, "as in SPACE_OPEN")                       \
	F(U32, hash_bytes, 60, "0: names are token ids, u32 each; else one hash of this many bytes (16 to 60) a unit") \
	F(BIN, names, 4u << 20, "what the keys of the prefix are made of: another daemon has other keys for it")       \
	F(BIN, salt, 1024, "cache salt of the prompt; empty: none")                                                    \
	F(U32, timeout_ms, 0, "from now until it is given up; 0: the daemon's handover.ttl, which is the most")        \
	F(BIN, rest, 1u << 18, "with hashes: token ids after their units, u32 each: those of a private block")
#define KV_FIELDS_fetch_reply(F) F(U32, timeout_ms, 0, "time granted; the hand-over here has begun, and tells its consumer how it goes")

#define KV_FIELDS_peers(F) F(U32, reserved, 0, "0")
#define KV_FIELDS_peers_reply(F) F(TEXT, json, KV_MAX_JSON, "one object: the net process, and peers[]")

#define KV_FIELDS_drained(F)                                                                                             \
	F(U32, what, 4, "0 a put, 1 a lease, 2 all that its older connections touched, 3 a retired slab, 4 everything: the member leaves")                           \
	F(U64, id, 0, "put, lease or slab id; 0 with `everything`")
#define KV_FIELDS_drained_reply(F) F(U32, freed, 0, "slots that became free")

#define KV_FIELDS_bad_block(F)                                                                                         \
	F(U64, lease, 0, "lease id")                                                                                   \
	F(U32, index, KV_MAX_BLOCKS, "position in the lease's slots")
#define KV_FIELDS_bad_block_reply(F) F(U32, quarantined, 0, "blocks that are no longer visible")

#define KV_FIELDS_withdraw(F)                                                                                          \
	F(U32, space, 0, "space id")                                                                                   \
	F(U64, epoch, 0, "of the keys")                                                                                 \
	F(U32, group, 255, "block group")                                                                              \
	F(KEYS, keys, KV_MAX_BLOCKS, "at least one; a key without a block is no error. Unfinished puts of one are revoked")
/* An error after the keys were taken, TIER_OFF or IO: the blocks are gone from this daemon, but the disk may bring them
 * back with the next one. Asking again is harmless, and needed. */
#define KV_FIELDS_withdraw_reply(F) F(U32, withdrawn, 0, "blocks that are gone, those below the named ones included; synced to disk before this answer")

#define KV_FIELDS_explain(F)                                                                                           \
	F(U32, space, 0, "space id")                                                                                   \
	F(U64, epoch, 0, "of the keys")                                                                                 \
	F(U32, group, 255, "block group")                                                                              \
	F(KEYS, keys, 4096, "keys to look up")
#define KV_FIELDS_explain_reply(F)                                                                                     \
	F(BIN, tiers, 4096, "one byte a key: kv_tier_t bits, 0x80: being written, 0x40: quarantined, 0x20: no hit, the disk cannot read it or a block above it now") \
	F(BIN, leases, 4u * 4096u, "u32 a key: leases that end at this block; window, state: that have it")                                         \
	F(U32, why, 0, "kv_miss_reason_t of the first missing key")

#define KV_FIELDS_status(F) F(U32, detail, 2, "0 summary, 1 with spaces and engines, 2 with sessions too")
#define KV_FIELDS_status_reply(F) F(TEXT, json, KV_MAX_JSON, "one object")
#define KV_FIELDS_stats(F) F(U32, reserved, 0, "0")
#define KV_FIELDS_stats_reply(F) F(TEXT, json, KV_MAX_JSON, "one object: metric name to value")
#define KV_FIELDS_check(F) F(U32, reserved, 0, "0")
#define KV_FIELDS_check_reply(F)                                                                                       \
	F(U32, failed, 0, "invariants that do not hold")                                                               \
	F(TEXT, json, KV_MAX_JSON, "one object: checks[] of {name, promise, ok, detail}")
#define KV_FIELDS_config(F) F(U32, reserved, 0, "0")
#define KV_FIELDS_config_reply(F) F(TEXT, json, KV_MAX_JSON, "one object: option name to {value, source}")

#define KV_FIELDS_slab_add(F)                                                                                          \
	F(U32, slab, KV_SLOT_MAX_SLAB, "slab number: the upper bits of its slots")                                     \
	F(U32, slots, 1u << 20, "slots in it")                                                                         \
	F(U32, slot_bytes, 0, "distance of two slots in bytes, a multiple of 4096")                                    \
	F(U32, block_bytes, 0, "payload bytes of a slot")                                                              \
	F(U32, heads, 0, "digest roots a slot")                                                                        \
	F(U32, leaves, 0, "digest leaves a head")                                                                      \
	F(U32, memory, KV_SLAB_CUDA, "what the first fd is: 0 a memfd, 1 memory of a GPU, which CUDA imports")          \
	F(U32, device, KV_MAX_DEVICES, "the number that a DEVICE_ADD gave the GPU whose memory it is; 0: host memory")  \
	F(U64, bytes, 0, "size of the data memory (first fd)")                                                         \
	F(U64, digest_bytes, 0, "size of the digest memfd (second fd): u64 leaf[slots][head][leaf], u64 root[slots][head]")
#define KV_FIELDS_device_add(F)                                                                                        \
	F(U32, device, KV_MAX_DEVICES, "its number, from 1 on; valid for this incarnation")                            \
	F(STR, name, 63, "its UUID, or the name of a fake device: what an identity names as its device")
#define KV_FIELDS_slab_retire(F) F(U32, slab, KV_SLOT_MAX_SLAB, "slab number")
#define KV_FIELDS_lease_done(F)                                                                                        \
	F(U64, lease, 0, "lease id")                                                                                   \
	F(U32, ready, 0, "blocks [0, ready) hold their bytes")                                                         \
	F(I32, status, 0, "OK, or why the rest will never be ready")
#define KV_FIELDS_put_done(F)                                                                                          \
	F(U64, put, 0, "put id")                                                                                       \
	F(U32, n, 0, "blocks from the put's first that are visible; window, state: others may be too")                 \
	F(I32, status, 0, "OK, or why the rest is not")
#define KV_FIELDS_handover(F)                                                                                          \
	F(U64, number, 0, "hand-over")                                                                                 \
	F(U32, side, 1, "0: as its consumer; 1: as its producer")                                                      \
	F(U32, state, 0, "kv_handover_state_t; ENDED: the number means nothing from now on")                           \
	F(U32, n, 0, "units handed over, of every group, and that stay")                             \
	F(U32, partial, 0, "tokens after them, in a private block of every group; 0: none")                            \
	F(I32, status, 0, "FAILED and ENDED: why; OK: its consumer is done")                                           \
	F(U32, tail_bytes, 0, "of HANDOVER_TAIL's answer")                                                             \
	F(U32, announced, 0, "as in the reply of HANDOVER_SEND; 0 also: there was no room when one became visible")
#define KV_FIELDS_handover_room(F) F(U64, bytes, 0, "that hand-overs of the namespace may keep more now")
#define KV_FIELDS_durable(F)                                                                                           \
	F(U64, put, 0, "put id")                                                                                       \
	F(U32, n, 0, "blocks from the root that are synced, ancestors and ALREADY blocks included; window, state: from the put's first") \
	F(I32, status, 0, "OK, or why the rest is not")

#endif
