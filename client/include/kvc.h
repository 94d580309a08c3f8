/* kvc.h -- libkvc: attach an engine process to kvd, look prefixes up, lease them, put new ones.
 *
 * Model. A process attaches as one member (kvc_t) of an instance: the scheduler and the ranks of one engine share
 * the instance id and secret. Blocks live in memory the daemon lends: a lease (or put) gives pointers into it. Bytes
 * never pass through the socket.
 *   kvc_match        how much of a prefix is there: shared memory only, no system call
 *   kvc_acquire      lease a prefix: it stays until released (or until its time to live ends)
 *   kvc_lease_read   copy blocks out, verified
 *   kvc_put_start .. kvc_put_write .. kvc_put_end   store new blocks
 *   kvc_handover_send .. kvc_handover_recv          hand a stored prefix to another engine that waits for it
 *   kvc_handover_fetch                              the same from another node
 *
 * Non-blocking. Every *_start call returns at once. kvc_poll() alone drives everything; the state of the object says
 * how far it is. kvc_lease_state(), kvc_lease_ready(), kvc_lease_rest_status(), kvc_put_export() and
 * kvc_put_get_result() never wait, nor do kvc_handover_send(), _recv() and _get_info(). Blocking forms take a timeout.
 *
 * A daemon that goes away. After the daemon has died or restarted, calls answer KVC_ERR_UNREACHABLE, KVC_ERR_CLOSED or
 * a miss at once. kvc_poll() (and any call) attaches again. Leases, puts and hand-overs of before have ended: a lease
 * and a hand-over are KVC_ERR_REVOKED, the result of a put is KVC_ERR_CLOSED. A stopped daemon is a miss after 50 ms,
 * and KVC_ERR_DAEMON_STALE after a second; both come after its option limits.silence where that is longer. A caller for
 * which a miss is expensive waits for the next heartbeat with kvc_await_us().
 *
 * Threads. A kvc_t and everything made from it belong to one thread at a time: its owner, which polls. Other threads
 * may call these functions at the same time, as long as no thread frees the object:
 *   kvc_match(), kvc_match_lazy(), kvc_chain_*(), kvc_keys_of(), kvc_key_bind(), kvc_space_groups(), kvc_group_range()
 *   kvc_lease_state(), _n(), _skip(), _ready(), _rest_status(), _block(), _read()   once the owner saw the lease OK
 *   kvc_put_block(), _write(), _digests()   once the owner saw the put granted; each block by one thread at a time
 * kvc_put_end() of a block comes after its writes; the threads order these themselves.
 *
 * Ownership. What a function returns through **p is the caller's until the matching free.
 *
 * ABI. A struct that begins with struct_size may grow at its end. The caller sets struct_size to its sizeof before
 * every call, also where the library fills the struct; the library reads and fills no more. If it is not set, the call
 * answers KVC_ERR_ARG. A struct without struct_size never changes: what callers pass in arrays has none, so that an
 * array's stride is its sizeof. KVC_ABI_VERSION is the number in the library's soname (libkvc.so.1). It changes when an
 * older program no longer works with the library.
 */
#ifndef KVC_H
#define KVC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVC_ABI_VERSION 1
#if defined(__GNUC__)
#define KVC_API __attribute__((visibility("default")))
#else
#define KVC_API
#endif

typedef struct kvc kvc_t;
typedef struct kvc_space kvc_space_t;
typedef struct kvc_lease kvc_lease_t;
typedef struct kvc_put kvc_put_t;
typedef struct kvc_handover kvc_handover_t;

typedef struct kvc_key {
	uint8_t b[16];
} kvc_key_t;

/* A status: 0 is good, positive is an answer (a miss), negative is an error. What each means and what to do is in
 * docs/status.md. */
typedef int32_t kvc_status_t;
enum {
	KVC_OK = 0,
	KVC_MISS = 1,
	KVC_ALREADY = 2,
	KVC_PENDING = 3,
	KVC_ERR_ARG = -1,
	KVC_ERR_NOMEM = -2,
	KVC_ERR_BUSY = -3,
	KVC_ERR_FULL = -4,
	KVC_ERR_TIMEOUT = -5,
	KVC_ERR_PROTO = -6,
	KVC_ERR_VERSION = -7,
	KVC_ERR_TOO_BIG = -8,
	KVC_ERR_UNKNOWN_REQUEST = -9,
	KVC_ERR_NOT_PERMITTED = -10,
	KVC_ERR_NOT_JOINED = -11,
	KVC_ERR_PIDFD_REQUIRED = -12,
	KVC_ERR_SECRET = -13,
	KVC_ERR_NOT_FOUND = -14,
	KVC_ERR_EXISTS = -15,
	KVC_ERR_IDENTITY = -16,
	KVC_ERR_LAYOUT = -17,
	KVC_ERR_STALE_EPOCH = -18,
	KVC_ERR_NO_PARENT = -19,
	KVC_ERR_PARENT_LOST = -20,
	KVC_ERR_NOT_ADMITTED = -21,
	KVC_ERR_COVERAGE = -22,
	KVC_ERR_EXPIRED = -23,
	KVC_ERR_REVOKED = -24,
	KVC_ERR_CORRUPT = -25,
	KVC_ERR_FAULT = -26,
	KVC_ERR_IO = -27,
	KVC_ERR_NOSPC = -28,
	KVC_ERR_LOCKED = -29,
	KVC_ERR_FOREIGN = -30,
	KVC_ERR_CONFIG = -31,
	KVC_ERR_PATH = -32,
	KVC_ERR_UNREACHABLE = -33,
	KVC_ERR_DAEMON_STALE = -34,
	KVC_ERR_CLOSED = -35,
	KVC_ERR_UNSUPPORTED = -36,
	KVC_ERR_LIMIT = -37,
	KVC_ERR_TIER_OFF = -38,
	KVC_ERR_INTERNAL = -39,
	KVC_ERR_PARENT_UNREADABLE = -40,
	KVC_ERR_TAKEN = -41,
	KVC_ERR_ABORTED = -42,
	KVC_ERR_PRODUCER_LOST = -43,
	KVC_ERR_OTHER_SPACE = -44,
	KVC_ERR_REFUSED = -45
};
KVC_API const char *kvc_status_name(kvc_status_t status);
KVC_API const char *kvc_status_text(kvc_status_t status);

/* Why a block is not there: kvc_match_t.why and others. In words in docs/shm.md. */
enum {
	KVC_WHY_NONE = 0,
	KVC_WHY_ABSENT = 1, /* never seen, or evicted: kvc_explain() tells them apart, a match does not */
	KVC_WHY_EVICTED = 2,
	KVC_WHY_DAEMON_STALE = 3,
	KVC_WHY_NO_DAEMON = 4,
	KVC_WHY_STALE_EPOCH = 5,
	KVC_WHY_CONTENDED = 6, /* the daemon changed the index all the time */
	KVC_WHY_CORRUPT = 7,
	KVC_WHY_TIMEOUT = 8,
	KVC_WHY_UNREADABLE = 9,   /* stored, and the disk cannot read it now */
	KVC_WHY_NOT_ADMITTED = 10 /* refused when it was saved: the pool thrashed */
};
/* "kvc 0.2.0 abi 1 wire 1". */
KVC_API const char *kvc_version(void);

/* ---- attach ---------------------------------------------------------------------------------- */

/* KVC_ROLE_MATCH: kvc_match(), documents and explain only; leases and puts answer KVC_ERR_PIDFD_REQUIRED. The daemon
 * lends it nothing, so it needs not be proved which process this is. */
enum { KVC_ROLE_SCHEDULER = 0, KVC_ROLE_WORKER = 1, KVC_ROLE_BOTH = 2, KVC_ROLE_MATCH = 3 };

/* Memory of the pool in this process. */
typedef struct kvc_memory {
	void *base;
	size_t bytes;
	size_t slot_bytes; /* blocks begin at multiples of it */
	const void *mark;  /* kvc_memory_ready() reads it; as long as the memory is mapped */
} kvc_memory_t;

typedef struct kvc_config {
	size_t struct_size;
	const char *socket;    /* path; NULL: $KVD_SOCKET, else /run/kvd/default.sock */
	const char *instance;  /* NULL: a random one (then secret is ignored) */
	const uint8_t *secret; /* 16 to 32 bytes, the same for all members */
	uint32_t secret_len;
	uint32_t role; /* KVC_ROLE_* */
	uint32_t rank;
	const char *program; /* shown by kvctl; NULL: the process name */
	uint32_t timeout_ms; /* of blocking calls without one of their own; 0: 5000 */
	uint32_t spin_us; /* busy-wait this long for a reply before sleeping; 0: 200; UINT32_MAX: never spin. Not where
			     the daemon may use no other CPU than the thread that attaches */
	/* The staging holds the leaf digests of this many blocks of 256 leaves each; 0: 8192. A block of more leaves
	 * (kvc_space_info_t: heads x leaves, of this rank's share) takes the room of several. */
	uint32_t staging_blocks;
	int lazy; /* 1: kvc_attach succeeds without a daemon and attaches later; 2: nor does it wait for a slow one */
	int observe; /* 1: do not join an instance: documents and explain only, kvc_match() answers a miss (operators'
			tools) */
	/* Told of pool memory: mapped 1 when it has just been mapped, 0 right before it is unmapped, when no lease or
	 * put can name it. On the owner's thread, from within any call; it must not call back. For callers that
	 * make memory known to a device. NULL: not called. */
	void (*on_memory)(void *ctx, const kvc_memory_t *memory, int mapped);
	void *memory_ctx; /* of on_memory, map_device and unmap_device */
	/* Import memory of a GPU that the CUDA driver has exported as `fd`, which stays the caller's: *p_base is an
	 * address of the device. Called where on_memory is, which is not called for this memory. NULL, or an error: its
	 * blocks answer KVC_ERR_TIER_OFF. kvc_lease_block() and kvc_put_block() answer with addresses of the device,
	 * and no call of libkvc reads or writes them. */
	kvc_status_t (*map_device)(void *ctx, int fd, size_t bytes, void **p_base);
	/* It is named by no lease and no put; when it returns the memory is not mapped. Not NULL with map_device. */
	void (*unmap_device)(void *ctx, void *base, size_t bytes);
} kvc_config_t;

/* Bytes of this pool memory, from its beginning, that the daemon has touched: all blocks it has lent lie there, and
 * they grow. To touch or pin others would be charged to the caller, and can end it. Any thread. */
KVC_API size_t kvc_memory_ready(const kvc_memory_t *memory);

/* Connect, join, map the shared memory. KVC_ERR_UNREACHABLE at once when no daemon listens. */
KVC_API kvc_status_t kvc_attach(const kvc_config_t *config, kvc_t **p_kvc);
/* Release everything: spaces, leases, puts and hand-overs made from it are freed, the pool's memory is unmapped, and
 * the daemon may lend it out again at once. Every copy to or from it must have ended; where one may go on,
 * kvc_abandon() comes first and the memory stays. NULL is fine. */
KVC_API void kvc_detach(kvc_t *kvc);
/* Readable when kvc_poll() has work; changes after a re-attach. -1: not attached. */
KVC_API int kvc_fd(const kvc_t *kvc);
/* Handle what has arrived, expire time-outs, re-attach when due; if there was none of it, wait up to timeout_ms for
 * something to arrive (0: do not wait). OK, or KVC_ERR_CLOSED / KVC_ERR_UNREACHABLE while detached. */
KVC_API kvc_status_t kvc_poll(kvc_t *kvc, uint32_t timeout_ms);
/* The same in microseconds. A caller that spins passes 0. */
KVC_API kvc_status_t kvc_poll_us(kvc_t *kvc, uint32_t timeout_us);
/* The same for a caller that cannot go on without the daemon: it waits for an answer, or has found the heartbeat stale.
 * Time spent here adds up while the heartbeat stands still; after limits.silence (50 ms) of it this returns
 * KVC_ERR_DAEMON_STALE without waiting, until the heartbeat moves. So a stopped daemon costs its callers 50 ms once,
 * however often they call, and one that stalls for less costs no miss. Also KVC_ERR_CLOSED and KVC_ERR_UNREACHABLE,
 * without waiting, while detached. */
KVC_API kvc_status_t kvc_await_us(kvc_t *kvc, uint32_t timeout_us);
/* For idle times: bring up to `bytes` more of the pool's memory into this process's page table, so that later reads and
 * writes take no page faults. Returns the bytes of this call; 0: all of it is there that the daemon has touched. */
KVC_API uint64_t kvc_prefault(kvc_t *kvc, uint64_t bytes);
/* Incarnation of the daemon attached to; 0: detached. */
KVC_API uint64_t kvc_incarnation(const kvc_t *kvc);
/* A GPU in whose memory the daemon has blocks: what kvc_identity_t names as its device. */
#define KVC_MAX_DEVICE 63u
typedef struct kvc_device {
	size_t struct_size;
	const char *name; /* its UUID, or the name of a fake device; valid until the owner's next call */
	/* Slabs of this namespace there that this process has mapped, and that it could not map. */
	uint32_t mapped, unmapped;
} kvc_device_t;
/* The i-th of them, from 0 on; they come right after the attachment, and later ones as the daemon gets their memory.
 * Owner's thread. KVC_MISS: there are no more, or no daemon. */
KVC_API kvc_status_t kvc_device(const kvc_t *kvc, uint32_t i, kvc_device_t *device);
/* What the daemons of other nodes call the daemon that this attachment has joined last (its option peers.name): their
 * engines name it in kvc_fetch_t. "": it has no peers, or none was joined yet. Valid until the next call of the owner;
 * never NULL. */
KVC_API const char *kvc_peer_name(const kvc_t *kvc);
/* Why the last call on this thread failed, as a sentence; never NULL. */
KVC_API const char *kvc_last_error(void);

/* ---- spaces and keys ------------------------------------------------------------------------- */

typedef struct kvc_identity {
	size_t struct_size;
	const char *model;
	const char *weights;
	const char *dtype;
	const char *quantization; /* NULL: "none" */
	const char *rope;
	const char *lora;        /* NULL: "none" */
	const char *hash;        /* NULL: "kv1" */
	uint32_t hash_tokens;    /* tokens a unit of the chain */
	const char *groups;      /* NULL: "0:full:<hash_tokens>"; else kvc_groups_text() */
	const char *layout;      /* of the pool's blocks: kvc_layout_text() */
	const char *page_format; /* NULL: "plain" */
	const char *extra;       /* NULL: none */
	/* UUID of the GPU ("GPU-...") in whose memory the blocks lie, in a space of their own; NULL: in host memory and
	 * on disk. ERR_TIER_OFF in kvc_space_state(): the daemon has no memory of that GPU. */
	const char *device;
	/* 1: open the space only if it was opened before, by anybody: else ERR_NOT_FOUND in kvc_space_state(). */
	uint32_t known;
} kvc_identity_t;

/* Write the text of the layouts of blocks in the pool (kvk_layout_t of kvk/layout.h), and a NUL: at most
 * KVK_LAYOUTS_TEXT_MAX bytes. layouts[count]: of the space's groups, in their order; one, if all have the same.
 * KVC_ERR_LAYOUT: a field is out of range, or two contradict each other; kvc_last_error() says which. KVC_ERR_TOO_BIG:
 * it does not fit.
 *
 *   kvk1 heads=N layers=N tokens=N k=N v=N dtype=D inner=I page=N
 *   N*kvk1 ...;M*kvk1 ...     of N groups, and of the M after them */
struct kvk_layout;
KVC_API kvc_status_t kvc_layout_text(const struct kvk_layout *layouts, uint32_t count, char *out, size_t cap);

typedef struct kvc_space_info {
	size_t struct_size;
	uint64_t epoch;
	uint8_t root[32];
	uint32_t hash_tokens;
	uint32_t block_bytes; /* of the first group, as the next two: kvc_space_groups() */
	uint32_t heads;
	uint32_t leaves; /* digest leaves a head */
} kvc_space_info_t;

/* Open or create. The handle survives re-attaches (it is opened again). KVC_ERR_* when the identity is incomplete. */
KVC_API kvc_status_t kvc_space_open(kvc_t *kvc, const kvc_identity_t *identity, kvc_space_t **p_space);
/* The same without waiting: PENDING in kvc_space_state() until the answer has come; until then a match is a miss and
 * what is asked of the space ERR_BUSY. The handle is the caller's to close whatever comes of it. */
KVC_API kvc_status_t kvc_space_open_start(kvc_t *kvc, const kvc_identity_t *identity, kvc_space_t **p_space);
/* OK: open. PENDING: being opened. Else why it is not open now. */
KVC_API kvc_status_t kvc_space_state(const kvc_space_t *space);
/* Its leases, puts and hand-overs go back. The daemon keeps the blocks, and may give the space's number to another one
 * when no member has the space open. */
KVC_API void kvc_space_close(kvc_space_t *space);
KVC_API kvc_status_t kvc_space_get_info(const kvc_space_t *space, kvc_space_info_t *info);
/* Canonical layouts of the pool's blocks: those asked for, or others that differ in the inner order only (permute on
 * the way in and out). Borrowed. */
KVC_API const char *kvc_space_layout(const kvc_space_t *space);
/* Drop all blocks of the space, for everybody. Blocking. Not permitted but to operators (processes of root and of the
 * daemon's user); an engine takes back what it has saved: kvc_withdraw_start(). */
KVC_API kvc_status_t kvc_space_reset(kvc_space_t *space);

/* Running hash state; plain value, copy it to branch. */
typedef struct kvc_chain {
	uint32_t state[9];
} kvc_chain_t;
/* Start at the space's root in its current epoch. */
KVC_API void kvc_chain_begin(const kvc_space_t *space, kvc_chain_t *chain);
/* `units` whole units of hash_tokens tokens; keys[units]. KVC_ERR_ARG: token 0xFFFFFFFF. */
KVC_API kvc_status_t kvc_chain_tokens(kvc_chain_t *chain, const uint32_t *tokens, uint32_t units, kvc_key_t *keys);
/* One unit with extra keys (salt, LoRA, multimodal): canonical bytes. */
KVC_API kvc_status_t kvc_chain_unit(kvc_chain_t *chain, const void *extra, uint32_t extra_len, const uint32_t *tokens,
				    kvc_key_t *key);
typedef struct kvc_prompt {
	size_t struct_size;
	const uint32_t *tokens;
	uint32_t n_tokens;
	const char *salt; /* NULL or "": none; else unit 0 has the extra key KVC_SALT_PREFIX and this */
} kvc_prompt_t;
#define KVC_SALT_PREFIX "cache_salt="
#define KVC_MAX_SALT    1024u /* bytes */
/* Keys of the whole units of a prompt, from the root: *p_n = n_tokens / hash_tokens keys. KVC_ERR_ARG: more than
 * cap. */
KVC_API kvc_status_t kvc_keys_of(const kvc_space_t *space, const kvc_prompt_t *prompt, kvc_key_t *keys, uint32_t cap,
				 uint32_t *p_n);
/* Key of an engine's own hash (16..60 bytes), bound to the space. */
KVC_API kvc_status_t kvc_key_bind(const kvc_space_t *space, const void *hash, uint32_t len, kvc_key_t *key);
/* The same from a chain that has just begun, for many: half the work. Good as long as the space's epoch is. */
KVC_API kvc_status_t kvc_chain_bind(const kvc_chain_t *header, const void *hash, uint32_t len, kvc_key_t *key);

/* Key of the private block, the same in every group, that holds the `n_tokens` tokens (at least 1) after the block
 * `parent` (NULL: after none) for the hand-over `transfer` (1 to 128 bytes). It covers all three and the space's epoch,
 * so that it names these bytes and no other prompt finds them. KVC_ERR_ARG: also token 0xFFFFFFFF. Any thread. */
KVC_API kvc_status_t kvc_private_key(const kvc_space_t *space, const kvc_key_t *parent, const char *transfer,
				     const uint32_t *tokens, uint32_t n_tokens, kvc_key_t *key);

/* Keys that are made when they are looked at: of unit i, counted from 0. Called in no order, on the calling thread and
 * within the call only; a match asks for about 3 log4(n) of them, each once. */
typedef struct kvc_key_source {
	void (*key)(void *ctx, uint32_t i, kvc_key_t *key);
	void *ctx;
} kvc_key_source_t;

/* Block groups of a space (identity field `groups`). What must be there for a sequence that continues after n units: */
typedef enum kvc_rule {
	KVC_RULE_FULL = 0,   /* every block before n */
	KVC_RULE_WINDOW = 1, /* the blocks of the last `window` tokens before n */
	KVC_RULE_STATE = 2,  /* the one block that ends exactly at n */
} kvc_rule_t;
typedef struct kvc_group_info {
	uint32_t group; /* number */
	uint32_t rule;  /* kvc_rule_t */
	uint32_t block_tokens;
	uint32_t window; /* tokens; KVC_RULE_WINDOW only */
	/* What kvc_space_groups() says of its blocks; 0 as long as the space was never open. */
	uint32_t block_bytes;
	uint32_t heads;
	uint32_t leaves; /* digest leaves a head */
} kvc_group_info_t;
#define KVC_GROUPS_TEXT_MAX 512u /* room for any text, with its NUL */
/* The text of groups, ascending by number, and a NUL: comma-separated, each of
 *   N:full:T | N:window:T:W | N:state:T       N number, T block_tokens, W window
 * KVC_ERR_IDENTITY: not ascending, no group, or a number out of range. KVC_ERR_TOO_BIG: does not fit, or more than 16
 * groups. */
KVC_API kvc_status_t kvc_groups_text(const kvc_group_info_t *groups, uint32_t count, char *out, size_t cap);
/* Up to cap of them, ascending; returns how many there are. */
KVC_API uint32_t kvc_space_groups(const kvc_space_t *space, kvc_group_info_t *groups, uint32_t cap);
/* First block of the group that a sequence continuing after n units needs, and one past the last. Equal: none (no such
 * group; n = 0; a state that n units end in the middle of). */
KVC_API void kvc_group_range(const kvc_space_t *space, uint32_t group, uint32_t n, uint32_t *p_first, uint32_t *p_end);

/* ---- match ----------------------------------------------------------------------------------- */

typedef struct kvc_match {
	size_t struct_size;
	uint32_t n;      /* longest prefix in any tier, in units (of one key each) */
	uint32_t n_cpu;  /* longest prefix in CPU memory */
	uint32_t why;    /* KVC_WHY_* of unit n; 0: all there, or all of it that ends in a block of every group */
	uint32_t probes; /* cache lines looked at */
} kvc_match_t;

/* Longest resident prefix of n keys. Shared memory only: no system call, any thread. Never fails: without a live
 * daemon it is a miss with its reason. */
KVC_API kvc_status_t kvc_match(const kvc_space_t *space, const kvc_key_t *keys, uint32_t n, kvc_match_t *match);

/* The same for keys made on demand. In a space of several groups both answer the largest n that every group can serve:
 * a multiple of all their blocks; of groups that are not `full` the 128 nearest lengths below the full groups' answer
 * that may do are tried. n_cpu: the same counting blocks in CPU memory only. */
KVC_API kvc_status_t kvc_match_lazy(const kvc_space_t *space, const kvc_key_source_t *source, uint32_t n,
				    kvc_match_t *match);

/* ---- leases ---------------------------------------------------------------------------------- */

/* Ask for the first n keys' blocks, n as kvc_match() found it: the answer is exact there, and shortened when something
 * was evicted in between (a ladder of keys is sent, dense only near n). Blocks [0, skip) are held by the engine already
 * and are only touched. The lease is PENDING until the answer has come. ttl_ms 0: the daemon's default. */
KVC_API kvc_status_t kvc_acquire_start(kvc_space_t *space, const kvc_key_t *keys, uint32_t n, uint32_t skip,
				       uint32_t ttl_ms, kvc_lease_t **p_lease);
/* The same, waiting for the answer (not for disk reads: kvc_lease_wait). KVC_MISS: nothing beyond skip is there;
 * *p_lease is then NULL. */
KVC_API kvc_status_t kvc_acquire(kvc_space_t *space, const kvc_key_t *keys, uint32_t n, uint32_t skip, uint32_t ttl_ms,
				 kvc_lease_t **p_lease);
/* A lease on one group's blocks, keys made on demand. Blocks are counted in the group: [skip, n units in blocks). Of a
 * `full` group as kvc_acquire_start(); of the others exactly these blocks or MISS (which ones are needed:
 * kvc_group_range()). kvc_acquire_*() lease of the first group. The last block may be a private one
 * (kvc_private_key()): ask for one block more than there are whole ones, with a source that answers the private key
 * from that block's first unit on. */
typedef struct kvc_want {
	size_t struct_size;
	uint32_t group;
	uint32_t n;    /* units */
	uint32_t skip; /* blocks of the group */
	uint32_t ttl_ms;
	const kvc_key_source_t *source;
} kvc_want_t;
KVC_API kvc_status_t kvc_lease_start(kvc_space_t *space, const kvc_want_t *want, kvc_lease_t **p_lease);
/* PENDING: no answer yet. OK: granted and valid. MISS: nothing leased. Else why it is over. */
KVC_API kvc_status_t kvc_lease_state(const kvc_lease_t *lease);
/* Blocks leased (skip included) and blocks whose bytes are there. */
KVC_API uint32_t kvc_lease_n(const kvc_lease_t *lease);
KVC_API uint32_t kvc_lease_ready(const kvc_lease_t *lease);
KVC_API uint32_t kvc_lease_skip(const kvc_lease_t *lease);
/* Blocks that came or come from disk. */
KVC_API uint32_t kvc_lease_disk(const kvc_lease_t *lease);
/* Wait until `n` blocks are ready. KVC_ERR_TIMEOUT, KVC_ERR_REVOKED, or why the rest will never be ready. */
KVC_API kvc_status_t kvc_lease_wait(kvc_lease_t *lease, uint32_t n, uint32_t timeout_ms);
/* OK: blocks that are not ready yet will be; else why they never will. Does not wait. Once it is not OK,
 * kvc_lease_ready() is final: ask for the number of blocks after this, or what came in between counts as lost. */
KVC_API kvc_status_t kvc_lease_rest_status(const kvc_lease_t *lease);
/* Memory of block i (skip <= i < ready), read-only by contract, and its digests: leaves[heads][leaves]. Valid while
 * kvc_lease_state() is OK, so check it again after the copy. Any of p_data, p_leaves may be NULL. */
KVC_API kvc_status_t kvc_lease_block(const kvc_lease_t *lease, uint32_t i, const void **p_data,
				     const uint64_t **p_leaves);
/* Copy blocks [first, first + count) to dst[count], each block_bytes long, verified in the same pass.
 * KVC_ERR_CORRUPT: *p_bad names the block, which has been reported to the daemon; earlier blocks are good. */
KVC_API kvc_status_t kvc_lease_read(kvc_lease_t *lease, uint32_t first, uint32_t count, void *const *dst,
				    uint32_t *p_bad);
/* Tell the daemon that block i was bad (found by the caller's own verification, e.g. a scatter). */
KVC_API kvc_status_t kvc_lease_report_bad(kvc_lease_t *lease, uint32_t i);
KVC_API kvc_status_t kvc_lease_renew(kvc_lease_t *lease, uint32_t ttl_ms);
/* Give back and free the handles; one message for all. Does not wait. NULLs are skipped. */
KVC_API void kvc_release(kvc_lease_t *const *leases, uint32_t count);

/* ---- puts ------------------------------------------------------------------------------------ */

/* Who writes which heads and layers of a block. */
typedef struct kvc_writer {
	uint32_t rank, head_first, head_count, layer_first, layer_count;
} kvc_writer_t;

typedef struct kvc_put_options {
	size_t struct_size;
	int durable;                  /* a durable acknowledgement is wanted */
	const uint64_t *event_hashes; /* [n], parallel to keys (the first `from` are not read), or NULL */
	const uint32_t *tokens;       /* [n x block_tokens], likewise, or NULL: events then carry no token ids */
	/* NULL: this member writes all. Else who writes what, this member found by its rank; one whose role is
	 * KVC_ROLE_SCHEDULER is none of them. Who writes nothing takes no staging: kvc_put_export() and let others
	 * write. */
	const kvc_writer_t *writers;
	uint32_t writer_count;
	const void *const *blocks; /* kvc_put() only: n - from blocks of block_bytes each */
	uint32_t group;            /* blocks, keys and tokens are this group's */
	/* keys, event_hashes and tokens start with block `base` (<= from, and < from in a `full` group unless from is
	 * 0). Blocks of other groups have no parent: base = from will do, and any keys may be neighbours. */
	uint32_t base;
	/* 1: all keys are of private blocks (kvc_private_key()); they have no parent in any group, so from and base 0
	 * will do. Neither match nor events know such a block, it never goes to disk (with `durable`: KVC_ERR_ARG), and
	 * it is dropped when the last hand-over or lease that held it has ended. Before the first it ages like any
	 * block. */
	int private_blocks;
	/* 1: the blocks are copies of what another tier has, made to have them nearer. They get no slot (BUSY) where
	 * pinned and unfinished blocks would be more than half of the namespace's share: what is nowhere else goes
	 * first. */
	int yields;
	/* 1: the daemon may answer NOT_ADMITTED to new blocks while its pool thrashes: they are not worth a copy now.
	 * Such keys are offered again when the prefix is computed again, not before. Durable and private blocks are
	 * never refused. */
	int optional;
} kvc_put_options_t;

/* Reserve slots for keys[from .. n) of a prefix; keys[0 .. from) are its ancestors (the parent is keys[from - 1]).
 * PENDING until the answer is there. */
KVC_API kvc_status_t kvc_put_start(kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t n,
				   const kvc_put_options_t *options, kvc_put_t **p_put);
/* Wait for the answer to kvc_put_start. OK, or why nothing can be written. */
KVC_API kvc_status_t kvc_put_ready(kvc_put_t *put, uint32_t timeout_ms);
/* Blocks granted, from the first; may be fewer than asked (BUSY). */
KVC_API uint32_t kvc_put_n(const kvc_put_t *put);
/* Memory of block i to be filled. KVC_ALREADY: visible already, nothing to do. p_data NULL: just ask which. */
KVC_API kvc_status_t kvc_put_block(const kvc_put_t *put, uint32_t i, void **p_data);
/* Copy block i in and digest it in the same pass (OK for ALREADY blocks: nothing is copied). */
KVC_API kvc_status_t kvc_put_write(kvc_put_t *put, uint32_t i, const void *src);
/* For callers that filled the memory themselves: the leaf digests of block i, [heads][leaves] of this rank's range,
 * copied; NULL: is there room for them? KVC_ERR_BUSY from here and kvc_put_write(): see kvc_put_import(). */
KVC_API kvc_status_t kvc_put_digests(kvc_put_t *put, uint32_t i, const uint64_t *leaves);
/* Blocks [first, first + count) are filled by this rank: hand them in, each once. Does not wait. */
KVC_API kvc_status_t kvc_put_end(kvc_put_t *put, uint32_t first, uint32_t count);
typedef struct kvc_put_result {
	size_t struct_size;
	/* PENDING until PUT_DONE has come. REVOKED: a member gave it up or died. CLOSED: the daemon or the session has
	 * gone. */
	kvc_status_t status;
	uint32_t visible;            /* blocks from the put's first that are visible */
	kvc_status_t durable_status; /* PENDING until DURABLE has come; MISS when not asked for */
	uint32_t durable;            /* blocks from the root that are durable */
} kvc_put_result_t;
KVC_API kvc_status_t kvc_put_get_result(const kvc_put_t *put, kvc_put_result_t *result);
/* The put is still being written: without a word for the daemon's put.ttl it may be revoked, when its namespace lacks
 * room. kvc_put_end() says so too. Call it whenever the put moves on: a message goes at most once in half of put.ttl
 * (until the first answer has named that: 50 ms), else this is a look at the clock. Does not wait. REVOKED: that has
 * happened. */
KVC_API kvc_status_t kvc_put_keep(kvc_put_t *put);
/* Wait until PUT_DONE (or DURABLE too, when asked for and `durable` is 1). */
KVC_API kvc_status_t kvc_put_wait(kvc_put_t *put, int durable, uint32_t timeout_ms);
/* Free the handle; an unfinished put is revoked. A view revokes its put too, unless all blocks of its range have
 * been handed in. */
KVC_API void kvc_put_free(kvc_put_t *put);
/* Start, write all of options->blocks, end and wait: one call for simple callers. *p_visible counts from keys[from]. */
KVC_API kvc_status_t kvc_put(kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t n,
			     const kvc_put_options_t *options, uint32_t *p_visible);

/* ---- taking blocks back ---------------------------------------------------------------------- */

/* Blocks that must not be found again, with all below them, also those that others have put: an engine has saved them
 * under a name that was not true (its weights had changed). Leases and hand-overs on them end as REVOKED, and so do
 * unfinished puts of them and below them. Other namespaces' blocks, other spaces' (the memory of a GPU is one), and
 * copies that other nodes have fetched are not touched. */
typedef struct kvc_withdraw {
	size_t struct_size;
	uint32_t group;
	uint32_t n;            /* 1 to 65536 */
	const kvc_key_t *keys; /* copied; one that is not known is no error */
	uint64_t epoch;        /* kvc_space_info_t.epoch when they were made */
} kvc_withdraw_t;
typedef struct kvc_withdrawal kvc_withdrawal_t;
/* Does not wait. KVC_ERR_BUSY: too much in flight. */
KVC_API kvc_status_t kvc_withdraw_start(kvc_space_t *space, const kvc_withdraw_t *what,
					kvc_withdrawal_t **p_withdrawal);
/* PENDING: no answer yet. OK: *p_blocks blocks (may be NULL) are gone for good, also after a crash, and without the
 * metadata of the disk. Any error: some may be there, or come back; ask again, with the same keys.
 * KVC_ERR_STALE_EPOCH: nobody finds them now, since the space has another epoch. With one above theirs and below 2^48
 * that is for good; else the disk of this daemon is not there yet: ask again when it is. */
KVC_API kvc_status_t kvc_withdraw_state(const kvc_withdrawal_t *withdrawal, uint32_t *p_blocks);
/* Before its attachment is closed; without an answer the daemon goes on with it. NULL is fine. */
KVC_API void kvc_withdraw_free(kvc_withdrawal_t *withdrawal);

/* ---- leases and puts of other members -------------------------------------------------------- */

/* Names a lease or put within its instance. Plain value: the scheduler sends it to the workers as it likes. */
typedef struct kvc_handle {
	uint64_t incarnation, id, offset;
	uint32_t kind, first, n, reserved;
} kvc_handle_t;
/* Does not wait: PENDING as long as the answer has not come. */
KVC_API kvc_status_t kvc_lease_export(const kvc_lease_t *lease, kvc_handle_t *handle);
/* A view of another member's lease: kvc_lease_read(), _block(), _wait(), _rest() and _bad() work, kvc_release() frees
 * the view only. KVC_ERR_REVOKED: of another incarnation; the two members have not both re-attached yet. KVC_ERR_ARG:
 * no handle of a lease of this instance and space. The taker keeps its lease until all members have read; when it does
 * not, the view's state is REVOKED, also after a copy that has just ended. A read that answers ERR_FAULT names a slab
 * this member has not heard of yet: kvc_poll() and read again. */
KVC_API kvc_status_t kvc_lease_import(kvc_space_t *space, const kvc_handle_t *handle, kvc_lease_t **p_lease);
/* Does not wait: PENDING as long as the answer has not come; KVC_ALREADY: there is nothing to write; else why not. */
KVC_API kvc_status_t kvc_put_export(const kvc_put_t *put, kvc_handle_t *handle);
/* A view of another member's put, to write `range` of every block: kvc_put_write(), _block(), _digests() and _end().
 * How the put ends is said to its starter; a view hears only of an early end (its result). ERR_FAULT from a write: as
 * above. KVC_ERR_REVOKED and KVC_ERR_ARG: likewise.
 * Staging: for all blocks to be written when there is room, else for fewer, and then blocks go in in order: a write or
 * digest that answers KVC_ERR_BUSY comes again after kvc_put_end() of all blocks before it and a kvc_poll() that has
 * taken the answer. KVC_ERR_BUSY from the import: other puts hold all staging. KVC_ERR_LIMIT: one block's digests are
 * more than the whole staging; attach with more staging_blocks. */
KVC_API kvc_status_t kvc_put_import(kvc_space_t *space, const kvc_handle_t *handle, const kvc_writer_t *range,
				    kvc_put_t **p_put);

/* ---- hand-overs ------------------------------------------------------------------------------ */

/* A producer hands a prefix to exactly one consumer, another instance that names the same transfer id and may ask
 * first. The blocks are ordinary ones: the producer has put them, the consumer leases them by their keys and reads them
 * verified. From kvc_handover_send() on they stay until the consumer is done, or until nobody has come in time.
 *
 * A hand-over is a miss when it fails: the consumer leases what is there and computes the rest. */
enum {
	KVC_HANDOVER_ASKED = 0,    /* no answer of the daemon yet */
	KVC_HANDOVER_AWAITED = 1,  /* the producer has not begun */
	KVC_HANDOVER_SENDING = 2,  /* more may follow */
	KVC_HANDOVER_COMPLETE = 3, /* nothing follows */
	KVC_HANDOVER_FAILED = 4,   /* nothing follows; what there is stays until the consumer is done */
	KVC_HANDOVER_ENDED = 5     /* nothing of it stays */
};
#define KVC_MAX_TRANSFER 128u       /* bytes of a transfer id */
#define KVC_MAX_PEER     64u        /* bytes of a peer's name */
#define KVC_MAX_TAIL     (1u << 20) /* bytes */

typedef struct kvc_handover_chunk {
	size_t struct_size;
	const char *transfer; /* UTF-8 without control characters, 1 to 128 bytes; of a first chunk */
	uint32_t n; /* units that are handed over now, from the prompt's first: a multiple of all groups' blocks */
	const kvc_key_source_t *source; /* of the prompt's keys; n 0, or n as before: may be NULL */
	int last;                       /* nothing follows */
	uint32_t ttl_ms; /* from now on without a consumer; 0: the daemon's option handover.ttl, which is the most */
	const void *
		tail; /* for the consumer, opaque, copied: a first token, last hidden states. Replaces an earlier one */
	uint32_t tail_len; /* bytes; 0: none, or that of before stays */
	/* Tokens after the n units, fewer than any group's block has; 0: none. Of the last chunk. They are in a private
	 * block of every group, whose key is unit n of `source` (kvc_private_key()). Of a state group the private block
	 * is the state after these tokens; that after n units is not needed then. */
	uint32_t partial;
	/* 1: KVC_ERR_BUSY is not the answer until there is room again: the status is KVC_PENDING, the daemon says when,
	 * and then the status is KVC_ERR_BUSY: send the chunk again. The caller ends the wait by its own
	 * deadline, with kvc_handover_done(). */
	int await_room;
	/* 1: the chunk is announced: its blocks, and the private block of `partial`, need not be visible. The daemon
	 * hands them over in order as they become visible, and tells both sides. With `last` the hand-over is
	 * KVC_HANDOVER_COMPLETE when all of them are; until then it is KVC_HANDOVER_SENDING, and n of
	 * kvc_handover_get_info() says what has been handed over. `source` has the keys from that n on. Later chunks
	 * may announce more. A chunk without `ahead` withdraws what is announced and not visible, and may name fewer
	 * units than have been handed over meanwhile: a producer whose save has failed ends with a plain last chunk of
	 * what is visible, which is KVC_OK too when the hand-over has become complete, or was taken, before that. In a
	 * space of one full group, and of no fewer units than are announced: else KVC_ERR_ARG. An announced block that
	 * does not follow those before it fails the hand-over with KVC_ERR_ARG. */
	int ahead;
} kvc_handover_chunk_t;
/* Hand units [0, n) over; *p_handover NULL: the first chunk of a new hand-over, which is the caller's until
 * kvc_handover_done(). Each call goes deeper, the last one says so. The blocks must be visible (the result of their
 * put) or announced: else the status is KVC_MISS, nothing has changed, and the chunk may be sent again. Does not wait:
 * KVC_PENDING, and nothing is sent, while the chunk before is not answered. The answer, in kvc_handover_get_info() or
 * kvc_handover_wait(), is KVC_OK; KVC_ERR_BUSY: no room within the daemon's handover.max_bytes or the namespace's
 * share; KVC_ERR_LIMIT: too many hand-overs; KVC_ERR_EXISTS: the id is another one's; KVC_ERR_STALE_EPOCH: the space
 * was reset; or why the hand-over has failed. */
KVC_API kvc_status_t kvc_handover_send(kvc_space_t *space, const kvc_handover_chunk_t *chunk,
				       kvc_handover_t **p_handover);
/* Be the consumer of this transfer id; before its producer has begun, too. Does not wait, and the daemon is never asked
 * again: it tells of each chunk. Call kvc_handover_done() within timeout_ms (0: handover.ttl, which is the most):
 * afterwards the status is KVC_ERR_TIMEOUT, and another consumer may have it. The status is KVC_PENDING until the
 * hand-over is complete and its tail is here. KVC_ERR_TAKEN: it has a consumer. KVC_ERR_OTHER_SPACE, to
 * both sides: the producer has other weights or another layout. KVC_ERR_FULL, to both sides: the producer has found no
 * room for half a second. KVC_ERR_EXPIRED, once: it has ended before a consumer came, by its time to live, for want of
 * room, or with a reset. KVC_ERR_PRODUCER_LOST, _ABORTED, _CORRUPT, _REVOKED, _STALE_EPOCH, ...: it has failed. */
KVC_API kvc_status_t kvc_handover_recv(kvc_space_t *space, const char *transfer, uint32_t timeout_ms,
				       kvc_handover_t **p_handover);

/* What is on another node. Keys differ between daemons, so the prefix is named by what they are made of. */
typedef struct kvc_fetch {
	size_t struct_size;
	const char *peer; /* name in the daemon's option peers.addresses; its own name: a hand-over of this daemon */
	const char *transfer;       /* of a hand-over there; NULL: the blocks of the prefix that the peer has now */
	const kvc_prompt_t *prompt; /* tokens and salt, to the last token; NULL: hashes alone name it */
	const void *hashes; /* [n_hashes], hash_bytes (16 to 60) each: one a unit, as in kvc_key_bind(). NULL: the
			       prompt's tokens name it; not NULL: of the prompt count those after the hashed units */
	uint32_t hash_bytes, n_hashes;
	uint32_t timeout_ms; /* 0: the daemon's option handover.ttl, which is the most */
} kvc_fetch_t;
/* kvc_handover_recv() of a hand-over, or of a prefix, on another node: blocks come over and are stored here like any
 * others, and *p_handover tells how far they go. A hand-over's private block comes where its tokens are named: its key
 * here is that of kvc_private_key() here, with the same transfer id. Does not wait.
 * KVC_ERR_NOT_FOUND: the daemon has no such peer, the peer nothing of the prefix, or `peer` is the daemon itself and no
 * hand-over is named; KVC_ERR_UNREACHABLE: the peer, or the net process here, is down, or there is no UCX, or no
 * transport of it, between them; KVC_ERR_BUSY: no room here, or the peer has too much to do; KVC_ERR_LAYOUT: the peer's
 * blocks have another inner order; and what kvc_handover_recv() says. */
KVC_API kvc_status_t kvc_handover_fetch(kvc_space_t *space, const kvc_fetch_t *fetch, kvc_handover_t **p_handover);

typedef struct kvc_handover_info {
	size_t struct_size;
	uint32_t state;      /* KVC_HANDOVER_* */
	kvc_status_t status; /* of the producer: of its last chunk; of the consumer: see kvc_handover_recv() */
	uint64_t number;     /* the daemon's, as in `kvctl transfers`; 0: none */
	uint32_t n;          /* units that are there: kvc_acquire() finds them */
	int taken;           /* of the producer: it had a consumer when the last chunk was answered */
	uint64_t bytes;      /* that the daemon kept for it at the last answer */
	const void *tail;    /* of the consumer; NULL: none, or not here yet. Valid until kvc_handover_done() */
	uint32_t tail_len;
	uint32_t partial; /* tokens after the n units, in a private block of every group; 0: none */
	/* Of the producer: units that announced chunks reach to, a private block counts as one. 0: none are
	 * announced, or no longer, because the daemon had no room for one that became visible: then the producer sends
	 * from n again. */
	uint32_t announced;
} kvc_handover_info_t;
/* What is known now; it changes in kvc_poll() and other calls. */
KVC_API kvc_status_t kvc_handover_get_info(const kvc_handover_t *handover, kvc_handover_info_t *info);
/* Of the consumer: wait until n units are there, or all of it with its tail (n 0: all). Of the producer: until the last
 * chunk is answered; n is ignored. OK, KVC_ERR_TIMEOUT, or its status. */
KVC_API kvc_status_t kvc_handover_wait(kvc_handover_t *handover, uint32_t n, uint32_t timeout_ms);
/* Free the handle; does not wait. Of the consumer: it has what it wants, the blocks stay as long as others do. With
 * `abort` it gives the hand-over back, for another consumer. Of the producer: when it is complete the hand-over goes
 * on without the handle; before that, or with `abort`, the consumer is told KVC_ERR_ABORTED. NULL is fine. */
KVC_API void kvc_handover_done(kvc_handover_t *handover, int abort);
/* Of the producer: give it up like kvc_handover_done(handover, 1), and the consumer is told this error instead of
 * KVC_ERR_ABORTED. For those that pass on what others produce. NULL is fine. */
KVC_API void kvc_handover_fail(kvc_handover_t *handover, kvc_status_t why);

/* ---- looking in ------------------------------------------------------------------------------ */

/* One request has ended: what metrics, prefix-hit records and the eviction policy learn from. Lossy, never blocks. */
typedef struct kvc_report {
	size_t struct_size;
	uint64_t request, session;
	uint32_t query_tokens, hit_cpu_tokens, hit_disk_tokens, hit_engine_tokens, output_tokens, why, turn;
	kvc_key_t first_missing;
	uint64_t match_ns, load_ns;
	uint32_t hit_gpu_tokens; /* in addition to those of the other tiers */
} kvc_report_t;
KVC_API void kvc_report(kvc_space_t *space, const kvc_report_t *report);

/* Counters of this attachment. */
typedef struct kvc_stats {
	size_t struct_size;
	uint64_t matches, match_hits, acquires, acquire_misses, blocks_read, bytes_read, blocks_put, bytes_put, corrupt,
		reattaches, timeouts, reports_dropped;
	uint64_t leases_open, puts_open, slabs_mapped;
	uint64_t broken_invariants; /* of libkvc; above 0: it has detached for good */
} kvc_stats_t;
KVC_API kvc_status_t kvc_get_stats(const kvc_t *kvc, kvc_stats_t *stats);

/* Detach for good, because the caller has found its own state broken: from the owner's next call on there is no
 * session, every match is a miss and every call KVC_ERR_INTERNAL. What the daemon has lent stays mapped until the
 * process ends, since a copy may be in it, and until then the daemon does not lend it again. libkvc does the same when
 * an invariant of its own is broken. Any thread. */
KVC_API void kvc_abandon(kvc_t *kvc);

/* Documents of the daemon as JSON (NUL-terminated, freed with kvc_free): what is KVC_DOC_*. KVC_DOC_CHECK: *p_value
 * is the number of failed checks. */
enum {
	KVC_DOC_STATUS = 14,
	KVC_DOC_STATS = 15,
	KVC_DOC_CHECK = 16,
	KVC_DOC_CONFIG = 17,
	KVC_DOC_TRANSFERS = 23,
	KVC_DOC_PEERS = 29
};
KVC_API kvc_status_t kvc_document(kvc_t *kvc, int what, uint32_t detail, char **p_json, uint32_t *p_value);
/* Where each key is: one byte a key (kv_tier_t bits, 0x80 being written, 0x40 quarantined, 0x20: no hit, since
 * the disk cannot read it, or a block above it, now); *p_why: reason of the first missing one. */
KVC_API kvc_status_t kvc_explain(kvc_space_t *space, const kvc_key_t *keys, uint32_t n, uint8_t *tiers,
				 uint32_t *p_why);
/* The same of blocks of one group (kvc_explain(): of the first), each named by the key of its last unit. KVC_ERR_ARG:
 * no such group. */
KVC_API kvc_status_t kvc_explain_group(kvc_space_t *space, uint32_t group, const kvc_key_t *keys, uint32_t n,
				       uint8_t *tiers, uint32_t *p_why);
KVC_API void kvc_free(void *p);

#ifdef __cplusplus
}
#endif
#endif
