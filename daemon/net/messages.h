/* daemon/net/messages.h -- what two daemons say to each other on the control channel (docs/decisions/046, 078).
 *
 *   daemon that asks (dialler)                         daemon that owns the blocks
 *   HELLO          ------------------------------->                     after the handshake of TLS (tls.h)
 *   READY          ------------------------------->
 *                  <-------------------------------    READY            how bytes come: over UCX, or over a connection
 *   HELLO          ===============================>                     of their own, with a ticket of READY
 *   ASK            ------------------------------->
 *                  <-------------------------------    OFFER            blocks that are there, and their digests
 *   GO             ------------------------------->                     there is room: their bytes come
 *                  <-------------------------------    END              nothing follows, or it has failed
 *   FINISH         ------------------------------->                     everything is here, or is no longer wanted
 *   PING, PONG in both directions
 *
 * Bodies are those of kv/wire.h: msgpack arrays, bounded and typed by this table, decoded by the same code as a
 * client's frames.
 */
#ifndef KVD_NET_MESSAGES_H
#define KVD_NET_MESSAGES_H

#include "kv/wire.h"

#define KVD_NET_VERSION    2u          /* 1: without TLS */
#define KVD_NET_MAGIC      0x54454e4bu /* "KNET" */
#define KVD_NET_NAME_MAX   64u
#define KVD_NET_TICKET     16u
#define KVD_NET_EARLY_BODY 512u       /* largest body of HELLO */
#define KVD_NET_MAX_BODY   (5u << 20) /* and of others: the tokens of an ASK */
#define KVD_NET_MAX_NAMES  (4u << 20)
#define KVD_NET_MAX_REST   (1u << 18)
#define KVD_NET_MAX_LEAVES 65536u /* digests in one OFFER */
#define KVD_NET_OFFERS_MAX 16u    /* with blocks, of one transfer, that GO has not answered */
#define KVD_NET_PREFIX     1u     /* flags of ASK: a prefix that is there, no hand-over */
#define KVD_NET_SKIP       1u     /* flags of GO: these blocks are here already */

/* X(code, NAME, name) */
#define KVD_NET_MESSAGES(X)                                                                                            \
	X(1, HELLO, hello)                                                                                             \
	X(4, READY, ready)                                                                                             \
	X(5, PING, ping)                                                                                               \
	X(6, PONG, pong)                                                                                               \
	X(7, ASK, ask)                                                                                                 \
	X(8, OFFER, offer)                                                                                             \
	X(9, GO, go)                                                                                                   \
	X(10, END, end)                                                                                                \
	X(11, FINISH, finish)

/* F(kind, name, limit, help), as in kv/requests.h. */
#define KVD_NET_FIELDS_hello(F)                                                                                        \
	F(BIN, ticket, KVD_NET_TICKET, "empty: a control channel; else of READY: its bytes come here")
#define KVD_NET_FIELDS_ready(F)                                                                                        \
	F(BIN, ucx, 4096, "of the dialler: address of its UCX worker; empty: it has none")                             \
	F(BIN, ticket, KVD_NET_TICKET, "of the other side: for a connection for bytes; empty: they come over UCX")
#define KVD_NET_FIELDS_ping(F) F(U64, number, 0, "returned by PONG")
#define KVD_NET_FIELDS_pong(F) F(U64, number, 0, "of the PING")
#define KVD_NET_FIELDS_ask(F)                                                                                          \
	F(U64, id, 0, "chosen by the dialler; names the transfer on this link")                                        \
	F(STR, ns, KVD_NET_NAME_MAX, "namespace, the same on both sides")                                              \
	F(TEXT, identity, 4096, "canonical identity text of the space")                                                \
	F(STR, layout, 1024, "layouts of the asking daemon's pool blocks")                                             \
	F(STR, transfer, 128, "transfer id; empty with bit 0")                                                         \
	F(U32, flags, KVD_NET_PREFIX, "bit 0: blocks that are there now, no hand-over")                                \
	F(U32, hash_bytes, 60, "0: names are token ids, u32 each; else one hash of this many bytes a unit")            \
	F(BIN, names, KVD_NET_MAX_NAMES, "what the keys of the prefix are made of")                                    \
	F(BIN, salt, 1024, "cache salt of the prompt; empty: none")                                                    \
	F(U32, skip, 0, "units that the asking daemon has already")                                                    \
	F(U32, timeout_ms, 0, "from now on; then it is given up")                                                      \
	F(BIN, rest, KVD_NET_MAX_REST, "with hashes: token ids after their units, u32 each")
#define KVD_NET_FIELDS_offer(F)                                                                                        \
	F(U64, id, 0, "of the ASK")                                                                                    \
	F(U64, batch, 0, "greater than any before on this link")                                                       \
	F(BIN, ticket, KVD_NET_TICKET, "goes with the bytes; nobody else knows it")                                    \
	F(U32, group, 255, "block group")                                                                              \
	F(U32, first, KV_MAX_BLOCKS, "first block, counted in the group from the prompt's first")                      \
	F(U32, count, KV_MAX_BLOCKS, "blocks")                                                                         \
	F(U32, units, 0,                                                                                               \
	  "units that are whole once this and every earlier OFFER of the transfer is here; 0: no more "                \
	  "than before")                                                                                               \
	F(BIN, leaves, 8u * KVD_NET_MAX_LEAVES, "u64 digests, leaves[block][head][leaf]")                              \
	F(U32, partial, 0,                                                                                             \
	  "number of tokens of the private block, which this is, after `units` whole units, or 0; without a "          \
	  "block: that of each group was offered")
#define KVD_NET_FIELDS_go(F)                                                                                           \
	F(U64, batch, 0, "of the OFFER")                                                                               \
	F(U32, flags, KVD_NET_SKIP, "bit 0: the bytes are not needed")
#define KVD_NET_FIELDS_end(F)                                                                                          \
	F(U64, id, 0, "of the ASK")                                                                                    \
	F(I32, status, 0, "OK: all of it was offered; else why not")                                                   \
	F(BIN, tail, 1u << 20, "of the hand-over")
#define KVD_NET_FIELDS_finish(F)                                                                                       \
	F(U64, id, 0, "of the ASK")                                                                                    \
	F(I32, status, 0, "OK: everything is here; else it is given up, and why")

#define KVD_NET_STRUCT(code, NAME, name)                                                                               \
	typedef struct kvd_net_##name {                                                                                \
		KVD_NET_FIELDS_##name(KV_STRUCT_FIELD)                                                                 \
	} kvd_net_##name##_t;
KVD_NET_MESSAGES(KVD_NET_STRUCT)
#undef KVD_NET_STRUCT

typedef enum kvd_net_code {
#define KVD_NET_ENUM(code, NAME, name) KVD_NET_##NAME = (code),
	KVD_NET_MESSAGES(KVD_NET_ENUM)
#undef KVD_NET_ENUM
} kvd_net_code_t;

typedef union kvd_net_message {
#define KVD_NET_MEMBER(code, NAME, name) kvd_net_##name##_t name;
	KVD_NET_MESSAGES(KVD_NET_MEMBER)
#undef KVD_NET_MEMBER
} kvd_net_message_t;

/* A frame: this, and the body. Little-endian, as all of kvd. */
typedef struct kvd_net_header {
	uint32_t magic;
	uint8_t version;
	uint8_t code; /* kvd_net_code_t */
	uint16_t reserved;
	uint32_t body; /* bytes */
} kvd_net_header_t;

_Static_assert(sizeof(kvd_net_header_t) == 12, "frame header is 12 bytes");

/* Fields of a message; NULL: no such code. */
const kv_body_t *kvd_net_body(uint32_t code);

#endif
