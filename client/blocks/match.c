/* Match: the longest resident prefix, from the mirror alone.
 *
 * Residency of a `full` group in each tier is monotone along a prefix, so the answer is found by a search. Each probe
 * is a cache miss; three positions are read in a round, all prefetched before the first is read, so that a search of
 * 8,192 keys takes seven rounds of one miss instead of thirteen. Blocks of other groups come and go one by one: from
 * the full groups' answer downwards, lengths are tried until every group has what it needs there. A missing block rules
 * out every length that needs it. A window's first block is looked at first: its absence rules out as many lengths as
 * the window has blocks. Each block is looked at about once.
 */
#include "impl.h"

#define KVC_PROBES      3u /* positions a round: the range shrinks to a quarter */
#define KVC_SEQ_RETRIES 64u
#define KVC_CONTENDED   0x100u /* no bit of a tier */
#define KVC_MAX_TRIES   128u   /* lengths tried for groups that are not `full` */
#define KVC_AHEAD       16u    /* blocks prefetched before they are looked at */
#define KVC_MOST_AHEAD  64u    /* of each group while the search goes on */
#define KVC_MEMO_BITS   7u
#define KVC_MEMO        (1u << KVC_MEMO_BITS)
#define KVC_MEMO_FULL   (KVC_MEMO - KVC_MEMO / 4u)
#define KVC_ALL_TIERS   0xffu

/* A bucket as words: all reads are atomic, since the daemon may write at any time; the sequence says whether they
 * belong together. */
#define KVC_ENTRY_WORDS 5u
typedef struct kvc_words {
	_Atomic uint32_t seq;
	_Atomic uint32_t entry[KV_MIRROR_WAYS][KVC_ENTRY_WORDS];
} kvc_words_t;
_Static_assert(sizeof(kvc_words_t) == sizeof(kv_mirror_bucket_t), "a bucket is sixteen words");

/* Acquire: a look at the sequence that follows in the program stays behind the looks at entries. */
static inline uint32_t load_word(const _Atomic uint32_t *word)
{
	return atomic_load_explicit(word, memory_order_acquire);
}

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

/* Keys made so far in this search: an open table by unit; a quarter of it stays empty. */
typedef struct kvc_memo {
	const kvc_key_source_t *source;
	uint32_t count;
	uint32_t unit[KVC_MEMO + 1u]; /* UINT32_MAX: empty; the last one is never looked up */
	kv_key_t key[KVC_MEMO + 1u];
} kvc_memo_t;

/* One search: [lo, hi) brackets the number of resident blocks, blocks [0, lo) are there. */
typedef struct kvc_range {
	uint32_t lo, hi;
} kvc_range_t;

typedef struct kvc_search {
	const kvc_map_t *map;
	const kv_key_t *keys; /* NULL: made by the memo */
	kvc_memo_t *memo;
	uint32_t group, units; /* of the group being looked at */
	/* Its groups that are not `full` are prefetched as soon as few lengths are left; NULL: it has none, or they
	 * have been. */
	const kvc_space_t *ahead;
	kvc_range_t any, cpu;
	uint32_t unreadable;    /* tiers in which being there is no hit now */
	uint32_t unreadable_at; /* smallest length in units whose last block is in no others; UINT32_MAX: none */
	uint32_t contended_at;  /* smallest length in units whose last bucket stayed odd; UINT32_MAX: none */
	uint32_t probes;
} kvc_search_t;

static const kv_key_t *memo_key(kvc_memo_t *memo, uint32_t unit)
{
	uint32_t home = unit * UINT32_C(0x9e3779b1) >> (32u - KVC_MEMO_BITS), at = home;

	while (memo->unit[at] != unit && memo->unit[at] != UINT32_MAX) {
		at = (at + 1u) % KVC_MEMO;
	}
	if (memo->unit[at] == unit) {
		return &memo->key[at];
	}
	/* More keys than any search of one group needs overwrite each other; what is empty stays so, since searches
	 * end there. */
	if (memo->count == KVC_MEMO_FULL) {
		at = memo->unit[home] != UINT32_MAX ? home : KVC_MEMO;
	}
	memo->count += memo->count < KVC_MEMO_FULL;
	memo->unit[at] = unit;
	memo->source->key(memo->source->ctx, unit, (kvc_key_t *)(void *)&memo->key[at]);

	return &memo->key[at];
}

/* Of block `position`, counted from 1. Valid until the next. */
static inline const kv_key_t *key_at(const kvc_search_t *search, uint32_t position)
{
	uint32_t unit = position * search->units - 1u;

	return search->keys ? &search->keys[unit] : memo_key(search->memo, unit);
}

/* Tiers of `key` in one bucket; *p_last: the search ends here. CONTENDED: the writer never let go. */
static uint32_t bucket_find(const kvc_words_t *bucket, const uint32_t key[4], uint32_t group, int *p_last)
{
	/* A sequence lock (docs/shared-memory.md): odd while the daemon writes, another number after it has written.
	 * The bound keeps a match from waiting for a daemon that was stopped inside a bucket. */
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

			/* The first word of a SHA-256 key differs in all but one of 4 G other entries. */
			if (atomic_load_explicit(&entry[0], memory_order_acquire) != key[0]) {
				continue;
			}
			last = atomic_load_explicit(&entry[4], memory_order_acquire);
			if (atomic_load_explicit(&entry[1], memory_order_acquire) == key[1] &&
			    atomic_load_explicit(&entry[2], memory_order_acquire) == key[2] &&
			    atomic_load_explicit(&entry[3], memory_order_acquire) == key[3] &&
			    word_group(last) == group && word_tiers(last)) {
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
	/* The daemon puts no entry further from its home bucket than this; a block that finds no room is left out. */
	for (uint32_t i = 0; i < KV_MIRROR_MAX_PROBE; i++) {
		int last = 1;
		uint32_t tiers =
			bucket_find(&buckets[(home + i) & search->map->bucket_mask], words, search->group, &last);

		search->probes++;
		if (tiers || last) {
			return tiers;
		}
	}

	return 0;
}

static inline void prefetch(const kvc_search_t *search, uint32_t position)
{
	uint64_t home = kv_key_hash(key_at(search, position)) & search->map->bucket_mask;

	__builtin_prefetch(&search->map->buckets[home]);
}

static void narrow_range(kvc_range_t *range, uint32_t position, int there)
{
	if (there && position > range->lo) {
		range->lo = position;
	}
	if (!there && position < range->hi) {
		range->hi = position;
	}
}

/* Tiers of block `position` (1-based) that can be read, or CONTENDED. */
static inline uint32_t read_tiers(kvc_search_t *search, uint32_t position)
{
	uint32_t tiers = key_find(search, key_at(search, position)), at = position * search->units;

	if (tiers == KVC_CONTENDED) {
		return tiers;
	}
	if (tiers != 0 && (tiers & ~search->unreadable) == 0) {
		search->unreadable_at = at < search->unreadable_at ? at : search->unreadable_at;
	}

	return tiers & ~search->unreadable;
}

/* The search ends at this block, whose bucket stayed odd. Neither this nor being unreadable is a hit. The smallest such
 * length is kept, because it may be what ends the match: then the reason is not ABSENT, and an operator does not look
 * for a tier that is too small (decision 032). */
static void end_at_contended(kvc_search_t *search, uint32_t position)
{
	uint32_t at = position * search->units;

	search->contended_at = at < search->contended_at ? at : search->contended_at;
}

/* Look at a block; both searches learn from it. 0: its bucket stayed odd, which says nothing of it. */
static int probe_block(kvc_search_t *search, uint32_t position)
{
	uint32_t tiers = read_tiers(search, position);

	if (tiers == KVC_CONTENDED) {
		return 0;
	}
	narrow_range(&search->any, position, tiers != 0);
	narrow_range(&search->cpu, position, (tiers & KV_TIER_CPU) != 0);

	return 1;
}

/* Few lengths are left, n units the longest. What n needs of the groups that are not `full` comes into the cache while
 * the search goes on: nearly all of it is what the answer needs. */
static void prefetch_unchained(kvc_search_t *search, uint32_t n)
{
	const kvc_space_t *space = search->ahead;
	const uint32_t units = search->units;

	for (uint32_t i = 0; i < space->group_count; i++) {
		const kvc_group_t *group = &space->groups[i];
		const kvc_blocks_t need = kvc_group_blocks(space, group, n - n % space->granule);

		search->units = group->units;
		for (uint32_t k = 0; group->rule != KV_RULE_FULL && k < KVC_MOST_AHEAD && k < need.end - need.first;
		     k++) {
			prefetch(search, need.first + 1u + k);
		}
	}
	search->units = units;
	search->ahead = NULL;
}

/* Until hi == lo + 1: blocks [0, lo) are there and block hi (1-based) is not. */
static void converge(kvc_search_t *search, kvc_range_t *range)
{
	/* KVC_PROBES blocks a round, all prefetched before the first is read: their cache misses overlap, so a round
	 * costs one miss and leaves a part of the gap that a binary search would need two rounds for. */
	while (range->hi > range->lo + 1u) {
		uint32_t lo = range->lo, gap = range->hi - range->lo - 1u;
		uint32_t count = gap < KVC_PROBES ? gap : KVC_PROBES;
		uint32_t at[KVC_PROBES] = {0};
		int known = 0;

		if (search->ahead && gap <= KVC_AHEAD) {
			prefetch_unchained(search, (lo + gap) * search->units);
		}
		for (uint32_t i = 0; i < count; i++) {
			at[i] = lo + 1u + (uint32_t)((uint64_t)gap * (i + 1u) / (count + 1u));
			at[i] = at[i] > lo + gap ? lo + gap : at[i];
			prefetch(search, at[i]);
		}
		for (uint32_t i = 0; i < count; i++) {
			known |= probe_block(search, at[i]);
		}
		/* A block that is there has all those before it: a contended one ends the search only where no
		 * other tells. */
		if (!known) {
			end_at_contended(search, at[0]);
			range->hi = at[0];
		}
		/* A concurrent eviction can make answers contradict each other; the lower one holds. */
		range->lo = range->lo < range->hi ? range->lo : range->hi - 1u;
	}
}

static kv_miss_reason_t check_daemon_alive(const kvc_space_t *space, const kvc_map_t *map)
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
	/* A shared heartbeat is the only sign of life that costs no system call (decision 021). */
	now = kv_now_ns(&space->kvc->env);
	age = now > beat ? now - beat : beat - now; /* a beat from the future is of another clock */
	if (age > map->stale_ns) {
		return KV_WHY_DAEMON_STALE;
	}
	if (epoch == 0) {
		return KV_WHY_NO_DAEMON;
	}

	return atomic_load_explicit(&map->epochs[id], memory_order_acquire) == epoch ? KV_WHY_NONE : KV_WHY_STALE_EPOCH;
}

/* ---- one group that is a chain --------------------------------------------------------------- */

/* The first n blocks of a `full` group. */
static void search_full(kvc_search_t *search, uint32_t n)
{
	search->any = (kvc_range_t){0, n + 1u};
	search->cpu = (kvc_range_t){0, n + 1u};

	/* Often all of it is there: one look at the last key then ends both searches. */
	prefetch(search, n);
	(void)probe_block(search, n);
	converge(search, &search->any);
	/* The CPU tier holds a prefix of what is in any tier, and the first search has narrowed both ranges. */
	search->cpu.hi = search->cpu.hi < search->any.lo + 1u ? search->cpu.hi : search->any.lo + 1u;
	search->cpu.lo = search->cpu.lo < search->cpu.hi ? search->cpu.lo : search->cpu.hi - 1u;
	converge(search, &search->cpu);
}

/* ---- groups of unchained blocks --------------------------------------------------------- */

/* Tiers of `key` in this bucket; 0: it is not there, or key_find() must tell. The way differs from block to block, and
 * a wrongly predicted branch on it costs more than a look at all ways: there is no such branch. Two keys with one first
 * word, and a bucket that is being written, are left to key_find(). */
static inline uint32_t quick_find(const kvc_words_t *bucket, const kv_key_t *key, uint32_t group)
{
	const uint32_t seq = load_word(&bucket->seq);
	const _Atomic uint32_t *entry = bucket->entry[0];
	uint32_t words[4], last, differs;

	memcpy(words, key->b, sizeof words);
	for (uint32_t i = 1; i < KV_MIRROR_WAYS; i++) {
		const _Atomic uint32_t *other = bucket->entry[i];

		differs = (load_word(&other[0]) ^ words[0]) | word_group(load_word(&other[4]) ^ group);
		entry = differs ? entry : other;
	}
	last = load_word(&entry[4]);
	differs = (load_word(&entry[0]) ^ words[0]) | (load_word(&entry[1]) ^ words[1]) |
		  (load_word(&entry[2]) ^ words[2]) | (load_word(&entry[3]) ^ words[3]) | word_group(last ^ group);
	differs |= seq & 1u;
	differs |= atomic_load_explicit(&bucket->seq, memory_order_relaxed) ^ seq;

	return differs ? 0 : word_tiers(last);
}

/* What has been seen of a group: blocks lo + 1 to hi are there in the tiers asked for, and those up to hi_cpu in the
 * CPU tier (1-based). lo == hi: nothing. */
typedef struct kvc_seen {
	uint32_t lo, hi, hi_cpu;
} kvc_seen_t;

/* The first block from `position` to `last` that is not there in the tiers; last + 1: all are. *p_not_cpu, if it is 0,
 * becomes the first that is not in the CPU tier. */
static uint32_t find_blocks(kvc_search_t *search, uint32_t position, uint32_t last, uint32_t tiers, uint32_t *p_not_cpu)
{
	const kvc_words_t *buckets = (const kvc_words_t *)search->map->buckets;
	const uint64_t mask = search->map->bucket_mask;
	const uint32_t group = search->group, readable = ~search->unreadable, first = position;
	uint32_t ahead = position, not_cpu = *p_not_cpu, probes = 0;

	for (; position <= last; position++) {
		uint32_t there = 0;

		/* The first is often missing, and then nothing after it is looked at. */
		if (position > first) {
			const kv_key_t *key = key_at(search, position);
			const uint64_t home = kv_key_hash(key);

			there = quick_find(&buckets[home & mask], key, group) & readable;
			probes++;
			if ((there & tiers) == 0) {
				there = quick_find(&buckets[(home + 1u) & mask], key, group) & readable;
				probes++;
			}
		}
		if ((there & tiers) == 0) {
			there = read_tiers(search, position);
		}
		if (there == KVC_CONTENDED) {
			end_at_contended(search, position);
		}
		if ((there & tiers) == 0) {
			break;
		}
		if ((there & KV_TIER_CPU) == 0 && not_cpu == 0) {
			not_cpu = position;
		}
		while (ahead < last && ahead < position + KVC_AHEAD) {
			prefetch(search, ++ahead);
		}
	}
	search->probes += probes;
	*p_not_cpu = not_cpu;

	return position;
}

/* n when the group has all it needs in the tiers for n units, else the largest smaller length it may. */
static uint32_t fit_group(kvc_search_t *search, const kvc_space_t *space, const kvc_group_t *group, kvc_seen_t *seen,
			  uint32_t n, uint32_t tiers)
{
	const kvc_blocks_t need = kvc_group_blocks(space, group, n);
	const int joins = seen->lo < seen->hi && seen->lo <= need.end;
	uint32_t not_cpu = 0, position;

	search->group = group->number;
	search->units = group->units;
	/* What has been seen is not looked at again. */
	position = find_blocks(search, need.first + 1u, joins ? seen->lo : need.end, tiers, &not_cpu);
	if (joins && position > seen->lo) {
		not_cpu = not_cpu == 0 && seen->hi_cpu < seen->hi ? seen->hi_cpu + 1u : not_cpu;
		position = find_blocks(search, seen->hi + 1u, need.end, tiers, &not_cpu);
	}
	*seen = (kvc_seen_t){need.first, position - 1u, not_cpu ? not_cpu - 1u : position - 1u};
	if (position <= need.end) {
		/* No length from here up to n does without this block. */
		const uint32_t below = (position - 1u) * group->units;

		return below - below % space->granule;
	}

	return n;
}

/* n when every group that is not `full` has what it needs, else the largest smaller length that one of them may have.
 */
static uint32_t fit_each(kvc_search_t *search, const kvc_space_t *space, kvc_seen_t *seen, uint32_t n, uint32_t tiers)
{
	/* A state costs one look, a window one for each of its blocks. */
	static const kv_group_rule_t order[] = {KV_RULE_STATE, KV_RULE_WINDOW};

	for (uint32_t k = 0; k < KV_COUNT_OF(order); k++) {
		for (uint32_t i = 0; i < space->group_count; i++) {
			uint32_t fits = n;

			if (space->groups[i].rule == order[k]) {
				fits = fit_group(search, space, &space->groups[i], &seen[i], n, tiers);
			}
			if (fits < n) {
				return fits;
			}
		}
	}

	return n;
}

/* The largest length up to n at which every group that is not `full` has what it needs in the tiers. */
static uint32_t fit_unchained_groups(kvc_search_t *search, const kvc_space_t *space, kvc_seen_t *seen, uint32_t n,
				     uint32_t tiers)
{
	for (uint32_t tries = 0; n && tries < KVC_MAX_TRIES; tries++) {
		const uint32_t fits = fit_each(search, space, seen, n, tiers);

		if (fits == n) {
			return n;
		}
		n = fits;
	}

	return 0;
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* Does length `at` lack what ends the match after `all` units? */
static int is_next(const kvc_space_t *space, uint32_t all, uint32_t at)
{
	return all < at && at - all <= space->granule;
}

static void search_all(kvc_search_t *search, const kvc_space_t *space, uint32_t n, kvc_match_t *match)
{
	uint32_t asked = n - n % space->granule, all = asked, cpu = asked;
	int others = 0;

	for (uint32_t i = 0; i < space->group_count; i++) {
		others |= space->groups[i].rule != KV_RULE_FULL;
	}
	search->ahead = others ? space : NULL;

	search->contended_at = search->unreadable_at = UINT32_MAX;
	search->unreadable = KV_TIER_UNREADABLE |
			     (uint32_t)atomic_load_explicit(&search->map->mirror->unreadable, memory_order_relaxed);
	for (uint32_t i = 0; i < space->group_count && all; i++) {
		const kvc_group_t *group = &space->groups[i];
		uint32_t there, there_cpu;

		if (group->rule != KV_RULE_FULL) {
			continue;
		}
		search->group = group->number;
		search->units = group->units;
		search_full(search, all / group->units);
		there = search->any.lo * group->units;
		there_cpu = search->cpu.lo * group->units;
		all = there < all ? there - there % space->granule : all;
		cpu = there_cpu < cpu ? there_cpu - there_cpu % space->granule : cpu;
	}
	if (others && all) {
		kvc_seen_t seen[KV_MAX_GROUPS] = {0};

		all = fit_unchained_groups(search, space, seen, all, KVC_ALL_TIERS);
		for (uint32_t i = 0; i < space->group_count; i++) {
			seen[i].hi = seen[i].hi_cpu; /* from now on only the CPU tier counts */
		}
		cpu = fit_unchained_groups(search, space, seen, cpu < all ? cpu : all, KV_TIER_CPU);
	}

	match->n = all;
	match->n_cpu = cpu;
	match->probes = search->probes;
	if (all < asked) {
		match->why = is_next(space, all, search->contended_at)    ? KV_WHY_CONTENDED
			     : is_next(space, all, search->unreadable_at) ? KV_WHY_UNREADABLE
									  : KV_WHY_ABSENT;
	}
}

static kvc_status_t match_with(const kvc_space_t *space, kvc_search_t *search, uint32_t n, kvc_match_t *out)
{
	kvc_t *kvc = space->kvc;
	kvc_match_t match = {.why = KV_WHY_NO_DAEMON};
	kv_miss_reason_t why;

	if (kvc_check_process(kvc) != KVC_OK) {
		return kvc_fill("kvc_match", out, &match, sizeof match);
	}
	search->map = kvc_map_enter(kvc);
	why = check_daemon_alive(space, search->map);
	if (why == KV_WHY_NONE && n) {
		match.why = KV_WHY_NONE;
		search_all(search, space, n < UINT32_MAX ? n : n - 1u, &match);
	} else {
		match.why = why;
	}
	if (why == KV_WHY_STALE_EPOCH) {
		atomic_store_explicit(&((kvc_space_t *)(uintptr_t)space)->stale, 1u, memory_order_relaxed);
	}
	kvc_map_leave(kvc);

	kvc_count(&kvc->counters.matches, 1);
	kvc_count(&kvc->counters.match_hits, match.n != 0);

	return kvc_fill("kvc_match", out, &match, sizeof match);
}

kvc_status_t kvc_match(const kvc_space_t *space, const kvc_key_t *keys, uint32_t n, kvc_match_t *match)
{
	kvc_search_t search = {.keys = (const kv_key_t *)keys};

	return match_with(space, &search, n, match);
}

kvc_status_t kvc_match_lazy(const kvc_space_t *space, const kvc_key_source_t *source, uint32_t n, kvc_match_t *match)
{
	kvc_memo_t memo;
	kvc_search_t search = {.memo = &memo};

	memo.source = source;
	memo.count = 0;
	memset(memo.unit, 0xff, sizeof memo.unit);
	return match_with(space, &search, n, match);
}
