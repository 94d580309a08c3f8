/* Match: the longest resident prefix, from the mirror alone.
 *
 * Residency in each tier is monotone along a prefix, so the answer is found by a search. Each probe is a cache miss;
 * four positions are looked at per round, all prefetched before the first is read, so that a search of 8,192 keys
 * takes seven rounds of one miss instead of thirteen.
 */
#include "impl.h"

#define KVC_PROBES      3u /* positions a round: the range shrinks to a quarter */
#define KVC_SEQ_RETRIES 64u
#define KVC_CONTENDED   UINT32_MAX

/* A bucket as words: all reads are atomic, since the daemon may write at any time; the sequence says whether they
 * belong together. */
#define KVC_ENTRY_WORDS 5u
typedef struct kvc_words {
	_Atomic uint32_t seq;
	_Atomic uint32_t entry[KV_MIRROR_WAYS][KVC_ENTRY_WORDS];
} kvc_words_t;
_Static_assert(sizeof(kvc_words_t) == sizeof(kv_mirror_bucket_t), "a bucket is sixteen words");

/* Bytes of an entry's last word: group, tiers, overflow (little-endian). */
static inline uint32_t word_group(uint32_t word)
{
	return word & 0xffu;
}
static inline uint32_t word_tiers(uint32_t word)
{
	return word >> 8 & 0xffu;
}
static inline uint32_t word_overflow(uint32_t word)
{
	return word >> 16;
}

/* One search: [lo, hi) brackets the number of resident keys, keys[0 .. lo) are there. */
typedef struct kvc_range {
	uint32_t lo, hi;
} kvc_range_t;

typedef struct kvc_search {
	const kvc_map_t *map;
	const kv_key_t *keys;
	kvc_range_t any, cpu;
	uint32_t contended_at; /* smallest position whose bucket stayed odd, 1-based; UINT32_MAX: none */
	uint32_t probes;
} kvc_search_t;

/* Tiers of `key` in one bucket; *p_last: the search ends here. CONTENDED: the writer never let go. */
static uint32_t bucket_find(const kvc_words_t *bucket, const uint32_t key[4], int *p_last)
{
	for (uint32_t retry = 0; retry < KVC_SEQ_RETRIES; retry++) {
		uint32_t seq = atomic_load_explicit(&bucket->seq, memory_order_acquire);
		uint32_t tiers = 0, first;

		if (seq & 1u) {
			kvc_pause();
			continue;
		}
		/* Acquire loads: the second look at the sequence stays behind them. */
		first = atomic_load_explicit(&bucket->entry[0][4], memory_order_acquire);
		for (uint32_t way = 0; way < KV_MIRROR_WAYS; way++) {
			const _Atomic uint32_t *entry = bucket->entry[way];
			uint32_t last;

			if (atomic_load_explicit(&entry[0], memory_order_acquire) != key[0]) {
				continue;
			}
			last = atomic_load_explicit(&entry[4], memory_order_acquire);
			if (atomic_load_explicit(&entry[1], memory_order_acquire) == key[1] &&
			    atomic_load_explicit(&entry[2], memory_order_acquire) == key[2] &&
			    atomic_load_explicit(&entry[3], memory_order_acquire) == key[3] && word_group(last) == 0 &&
			    word_tiers(last)) {
				tiers = word_tiers(last);
				break;
			}
		}
		if (atomic_load_explicit(&bucket->seq, memory_order_relaxed) == seq) {
			*p_last = tiers != 0 || word_overflow(first) == 0;
			return tiers;
		}
	}

	return KVC_CONTENDED;
}

static uint32_t key_find(kvc_search_t *search, const kv_key_t *key)
{
	const kvc_words_t *buckets = (const kvc_words_t *)search->map->buckets;
	uint64_t home = kv_key_hash(key);
	uint32_t words[4];

	memcpy(words, key->b, sizeof words);
	for (uint32_t i = 0; i < KV_MIRROR_MAX_PROBE; i++) {
		int last = 1;
		uint32_t tiers = bucket_find(&buckets[(home + i) & search->map->bucket_mask], words, &last);

		search->probes++;
		if (tiers || last) {
			return tiers;
		}
	}

	return 0;
}

static void prefetch(const kvc_search_t *search, uint32_t position)
{
	uint64_t home = kv_key_hash(&search->keys[position - 1]) & search->map->bucket_mask;

	__builtin_prefetch(&search->map->buckets[home]);
}

static void narrow(kvc_range_t *range, uint32_t position, int there)
{
	if (there && position > range->lo) {
		range->lo = position;
	}
	if (!there && position < range->hi) {
		range->hi = position;
	}
}

/* Look at key `position` (1-based); both searches learn from it. */
static void probe(kvc_search_t *search, uint32_t position)
{
	uint32_t tiers = key_find(search, &search->keys[position - 1]);

	if (tiers == KVC_CONTENDED) {
		search->contended_at = position < search->contended_at ? position : search->contended_at;
		tiers = 0;
	}
	narrow(&search->any, position, tiers != 0);
	narrow(&search->cpu, position, (tiers & KV_TIER_CPU) != 0);
}

/* Until hi == lo + 1: keys[0 .. lo) are there and key hi is not. */
static void converge(kvc_search_t *search, kvc_range_t *range)
{
	while (range->hi > range->lo + 1u) {
		uint32_t lo = range->lo, gap = range->hi - range->lo - 1u;
		uint32_t count = gap < KVC_PROBES ? gap : KVC_PROBES;
		uint32_t at[KVC_PROBES];

		for (uint32_t i = 0; i < count; i++) {
			at[i] = lo + 1u + (uint32_t)((uint64_t)gap * (i + 1u) / (count + 1u));
			at[i] = at[i] > lo + gap ? lo + gap : at[i];
			prefetch(search, at[i]);
		}
		for (uint32_t i = 0; i < count; i++) {
			probe(search, at[i]);
		}
		/* A concurrent eviction can make answers contradict each other; the lower one holds. */
		range->lo = range->lo < range->hi ? range->lo : range->hi - 1u;
	}
}

static kv_miss_reason_t alive(const kvc_space_t *space, const kvc_map_t *map)
{
	uint64_t beat, now, age, epoch = atomic_load_explicit(&space->epoch, memory_order_relaxed);
	uint32_t id = atomic_load_explicit(&space->id, memory_order_relaxed);

	if (!map) {
		return KV_WHY_NO_DAEMON;
	}
	beat = atomic_load_explicit(&map->mirror->heartbeat_ns, memory_order_relaxed);
	if (beat == 0) {
		return KV_WHY_NO_DAEMON;
	}
	now = kv_now_ns(&space->kvc->env);
	age = now > beat ? now - beat : beat - now; /* a beat from the future is of another clock */
	if (age > KV_MIRROR_STALE_NS) {
		return KV_WHY_DAEMON_STALE;
	}
	if (epoch == 0) {
		return KV_WHY_NO_DAEMON;
	}

	return atomic_load_explicit(&map->epochs[id], memory_order_acquire) == epoch ? KV_WHY_NONE : KV_WHY_STALE_EPOCH;
}

static void search_all(kvc_search_t *search, uint32_t n, kvc_match_t *match)
{
	search->any = (kvc_range_t){0, n + 1u};
	search->cpu = (kvc_range_t){0, n + 1u};
	search->contended_at = UINT32_MAX;

	/* Often all of it is there: one look at the last key then ends both searches. */
	prefetch(search, n);
	probe(search, n);
	converge(search, &search->any);
	search->cpu.hi = search->cpu.hi < search->any.lo + 1u ? search->cpu.hi : search->any.lo + 1u;
	search->cpu.lo = search->cpu.lo < search->cpu.hi ? search->cpu.lo : search->cpu.hi - 1u;
	converge(search, &search->cpu);

	match->n = search->any.lo;
	match->n_cpu = search->cpu.lo;
	match->probes = search->probes;
	if (match->n < n) {
		match->why = match->n + 1u == search->contended_at ? KV_WHY_CONTENDED : KV_WHY_ABSENT;
	}
}

void kvc_match(const kvc_space_t *space, const kvc_key_t *keys, uint32_t n, kvc_match_t *match)
{
	kvc_t *kvc = space->kvc;
	kvc_search_t search = {.keys = (const kv_key_t *)keys};
	kv_miss_reason_t why;

	*match = (kvc_match_t){0};
	if (kvc_check_process(kvc) != KVC_OK) {
		match->why = KV_WHY_NO_DAEMON;
		return;
	}
	search.map = kvc_map_enter(kvc);
	why = alive(space, search.map);
	if (why == KV_WHY_NONE && n) {
		search_all(&search, n < UINT32_MAX ? n : n - 1u, match);
	} else {
		match->why = why;
	}
	if (why == KV_WHY_STALE_EPOCH) {
		atomic_store_explicit(&((kvc_space_t *)(uintptr_t)space)->stale, 1u, memory_order_relaxed);
	}
	kvc_map_leave(kvc);

	kvc_count(&kvc->counters.matches, 1);
	kvc_count(&kvc->counters.match_hits, match->n != 0);
}
