/* kvd-docs: print docs/wire.md, docs/status.md, docs/metrics.md or docs/shm.md from the tables they describe.
 * tests/common compares the files in docs/ with what this prints. */
#include "kv/metric.h"
#include "kv/miss_reason_list.h"
#include "kv/shm.h"
#include "kv/wire.h"

#include <stdio.h>
#include <string.h>

#define GENERATED "<!-- Made by `kvd-docs %s` from %s. Change that, then `make docs`. -->\n\n"

/* ---- wire ------------------------------------------------------------------------------------ */

static void print_roles(uint32_t roles)
{
	static const struct {
		uint32_t bit;
		const char *name;
	} names[] = {{KV_ROLE_ANY, "any connection, before HELLO too"},
		     {KV_ROLE_CLIENT, "clients"},
		     {KV_ROLE_MEMBER, "members"},
		     {KV_ROLE_OPERATOR, "operators"}};
	const char *comma = "*";

	for (size_t i = 0; i < KV_COUNT_OF(names); i++) {
		if (roles & names[i].bit) {
			printf("%s%s", comma, names[i].name);
			comma = ", ";
		}
	}
	printf("*: ");
}

/* ", 64 bytes", " <= 3"; of a KEY nothing, its kind says it. */
static void print_limit(const kv_field_t *field)
{
	if (field->limit != 0 && field->kind <= KV_FIELD_I32) {
		printf(" <= %u", field->limit);
	} else if (field->limit != 0 && field->kind != KV_FIELD_KEY) {
		printf(", %u %s", field->limit, field->kind == KV_FIELD_KEYS ? "keys" : "bytes");
	}
}

static void print_fields(const char *title, const kv_body_t *body)
{
	printf("%s:\n\n", title);
	for (uint32_t i = 0; i < body->count; i++) {
		const kv_field_t *field = &body->fields[i];

		printf("%u. `%s` %s", i, field->name, kv_field_kind_name(field->kind));
		print_limit(field);
		printf(": %s\n", field->help);
	}
	printf("\n");
}

#define HEADER_ROW(type, member, text)                                                                                 \
	printf("- %zu+%zu `%s`: %s\n", offsetof(type, member), sizeof(((type *)0)->member), #member, text)

static void print_frame(void)
{
	printf("## Frame\n\n"
	       "A UNIX stream socket carries frames in both directions. A frame is a header of %zu bytes, "
	       "little-endian (offset+bytes), and a body.\n"
	       "File descriptors travel with the first byte of their frame (SCM_RIGHTS), at most %u.\n\n",
	       sizeof(kv_frame_header_t), KV_WIRE_MAX_FDS);
	HEADER_ROW(kv_frame_header_t, magic, "0x564b, the bytes `KV`");
	HEADER_ROW(kv_frame_header_t, version, "1");
	HEADER_ROW(kv_frame_header_t, kind, "0 request, 1 reply, 2 notice");
	HEADER_ROW(kv_frame_header_t, code, "which request or notice; a reply has its request's");
	HEADER_ROW(kv_frame_header_t, fds, "descriptors that come with it");
	HEADER_ROW(kv_frame_header_t, body, "bytes that follow");
	HEADER_ROW(kv_frame_header_t, status, "of a reply: a number from status.md; else 0");
	HEADER_ROW(kv_frame_header_t, id, "chosen by the client; the reply repeats it; a notice has 0");
	printf("\nA body is one msgpack array of the fields below, in their order: at most %u bytes before HELLO is "
	       "answered, %u after.\n"
	       "The body of an error (a negative status) is one STR of at most 255 bytes: what was wrong. A frame that "
	       "breaks these rules is\n"
	       "answered with its error where its header could be read, counted, and its connection is closed. No field is "
	       "optional: a sound\n"
	       "array of more or fewer fields was made by another build, ERR_VERSION, and the text says which libkvc to "
	       "use.\n\n",
	       KV_WIRE_MAX_BODY_BEFORE_HELLO, KV_WIRE_MAX_BODY);
}

static void print_kinds(void)
{
	printf("## Kinds of fields\n\n"
	       "U32, U64, I32 are integers in any width, which must fit (U: not negative). STR is UTF-8 in shortest form "
	       "without control\n"
	       "characters; TEXT may have newlines and tabs. BIN is bytes, KEY a bin of 16 bytes, KEYS a bin of whole "
	       "keys.\n\n");
}

static void print_wire(void)
{
	int notices = 0;

	printf("# The socket protocol\n\n" GENERATED, "wire", "common/include/kv/requests.h");
	print_frame();
	print_kinds();
	printf("## Requests\n\nEach is answered by exactly one reply with the same code and id. In italics: who may send "
	       "it.\n\n");
	for (uint32_t i = 0; i < kv_request_count; i++) {
		const kv_request_t *request = &kv_requests[i];

		if (request->roles == KV_ROLE_NONE && !notices++) {
			printf("## Notices\n\nSent by the daemon on its own, never answered.\n\n");
		}
		printf("### %u %s\n\n", request->code, request->name);
		if (request->roles != KV_ROLE_NONE) {
			print_roles(request->roles);
		}
		printf("%s.\n\n", request->help);
		print_fields(request->roles == KV_ROLE_NONE ? "Body" : "Request", &request->ask);
		if (request->roles != KV_ROLE_NONE) {
			print_fields("Reply", &request->reply);
		}
	}
}

/* ---- status ---------------------------------------------------------------------------------- */

static const char *radius_name(kv_radius_t radius)
{
	static const char *const names[] = {"none", "request", "block", "lease", "session", "peer", "tier", "daemon"};

	return (unsigned)radius < KV_COUNT_OF(names) ? names[radius] : "unknown";
}

static const char *retry_name(kv_retry_t retry)
{
	static const char *const names[] = {"no", "now", "later"};

	return (unsigned)retry < KV_COUNT_OF(names) ? names[retry] : "unknown";
}

static void print_status(void)
{
	static const kv_status_t all[] = {
#define STATUS_VALUE(name, code, radius, retry, exit_code, sentence) KV_##name,
		KV_STATUS_LIST(STATUS_VALUE)
#undef STATUS_VALUE
	};

	printf("# Outcomes\n\n" GENERATED, "status", "common/include/kv/status.h");
	printf("Number and name (what it says something about, retry, exit code of a command that ended so): sentence. "
	       "Negative is an error.\n"
	       "Retry: no, the same call fails again; now, at once; later, after the cause has gone.\n\n");
	for (size_t i = 0; i < KV_COUNT_OF(all); i++) {
		printf("- %d %s (%s, %s, %d): %s\n", (int)all[i], kv_status_name(all[i]),
		       radius_name(kv_status_radius(all[i])), retry_name(kv_status_retry(all[i])),
		       kv_status_exit_code(all[i]), kv_status_text(all[i]));
	}
}

/* ---- metrics --------------------------------------------------------------------------------- */

static void print_metrics(void)
{
	printf("# Metrics\n\n" GENERATED, "metrics", "common/include/kv/metric_list.h");
	printf("Prometheus text at `/metrics`, JSON by the STATS request (`kvctl stats --json`). `_total` is a counter, "
	       "`_seconds` a histogram with %u\n"
	       "buckets (1 us, 2 us, 4 us and so on), all else a gauge. In JSON a histogram is {count, sum_ns, p50_ns, "
	       "p99_ns}, where a quantile is the bound\n"
	       "of its bucket, and a label has no quotes: `kvd_tier_blocks{tier=cpu}`.\n"
	       "The hit rate of a namespace is `sum by (namespace) (rate(kvd_prefix_hit_tokens_total[5m])) / sum by "
	       "(namespace) (rate(kvd_prefix_query_tokens_total[5m]))`;\n"
	       "since the start `kvctl status --json` has it in `hits.namespace` and `hits.total`.\n"
	       "`kvd_build_info` (at `/metrics` only): " KV_HELP_BUILD_INFO " (`version`).\n\n",
	       KV_HISTOGRAM_BUCKETS);
	kv_metrics_page(kv_metric_infos, KV_METRIC_COUNT, stdout);
	printf("\nOf each namespace, with the label `namespace` too at `/metrics`; STATS answers those of the asker's "
	       "own:\n\n");
	kv_metrics_page(kv_ns_metric_infos, KV_NS_METRIC_COUNT, stdout);
}

/* ---- shared memory --------------------------------------------------------------------------- */

static void print_table(const char *title, const char *text, size_t bytes)
{
	printf("## %s\n\n%s %zu bytes:\n\n", title, text, bytes);
}

static void print_mirror(void)
{
	print_table("Mirror", "One memfd a namespace: which blocks are resident, and in which tiers. Header:",
		    sizeof(kv_mirror_header_t));
	HEADER_ROW(kv_mirror_header_t, magic, "`KMIRROR1`");
	HEADER_ROW(kv_mirror_header_t, version, "1");
	HEADER_ROW(kv_mirror_header_t, features, "0");
	HEADER_ROW(kv_mirror_header_t, incarnation, "run of the daemon that wrote it; never 0, never reused");
	HEADER_ROW(kv_mirror_header_t, heartbeat_ns, "CLOCK_MONOTONIC of the core loop; 0: the daemon has shut down");
	HEADER_ROW(kv_mirror_header_t, bucket_count, "a power of two");
	HEADER_ROW(kv_mirror_header_t, buckets_offset, "bytes from the start, a multiple of 4096");
	HEADER_ROW(kv_mirror_header_t, epochs_offset, "u64 epoch[4096], by space id; 0: no such space");
	HEADER_ROW(kv_mirror_header_t, total_bytes, "size of the mirror");
	HEADER_ROW(kv_mirror_header_t, stale_ns, "how old a heartbeat may be (option limits.silence); 0: 50 ms");
	HEADER_ROW(kv_mirror_header_t, unreadable, "bits of tiers that cannot be read now: to be there is no hit");
	printf("\nA heartbeat older than stale_ns makes every match a miss (reason %d). A bucket is %zu bytes: a u32 "
	       "sequence (odd while the daemon\n"
	       "writes) and %u entries of %zu bytes. A key's home bucket is its first 8 bytes & (bucket_count - 1); a "
	       "search goes on to the next\n"
	       "bucket until one whose first entry has overflow 0, at most %u buckets.\n\n"
	       "An entry:\n\n",
	       KV_WHY_DAEMON_STALE, sizeof(kv_mirror_bucket_t), KV_MIRROR_WAYS, sizeof(kv_mirror_entry_t),
	       KV_MIRROR_MAX_PROBE);
	HEADER_ROW(kv_mirror_entry_t, key, "block key");
	HEADER_ROW(kv_mirror_entry_t, group, "block group");
	HEADER_ROW(kv_mirror_entry_t, tiers,
		   "bits: 1 CPU, 2 disk, 4 GPU, 8 remote; 32: no hit, the disk cannot read it or a block above it now; "
		   "0: an empty entry");
	HEADER_ROW(kv_mirror_entry_t, overflow,
		   "first entry only: entries that had to go past this bucket; sticky at 65535");
	printf("\n");
}

static void print_lease_area(void)
{
	print_table("Lease area", "One memfd an instance. Header:", sizeof(kv_lease_area_header_t));
	HEADER_ROW(kv_lease_area_header_t, magic, "`KLEASES1`");
	HEADER_ROW(kv_lease_area_header_t, version, "1");
	HEADER_ROW(kv_lease_area_header_t, reserved, "0");
	HEADER_ROW(kv_lease_area_header_t, incarnation, "run of the daemon");
	HEADER_ROW(kv_lease_area_header_t, total_bytes, "size of the area");
	printf("\nA lease or put lies at the offset its reply names: this header of %zu bytes, then u32 slots[n]. A "
	       "slot is a slab number in the\n"
	       "upper 12 bits and an index in the lower 20; 0xffffffff: none. Look at id and state before a copy and "
	       "again after it.\n\n",
	       sizeof(kv_lease_header_t));
	HEADER_ROW(kv_lease_header_t, id, "never reused within an incarnation");
	HEADER_ROW(kv_lease_header_t, incarnation, "run of the daemon");
	HEADER_ROW(kv_lease_header_t, state, "0 none, 1 active, 2 revoked (stored before any of its slots is reused)");
	HEADER_ROW(kv_lease_header_t, n, "entries in slots");
	HEADER_ROW(kv_lease_header_t, ready, "read: blocks [0, ready) hold their bytes; put: visible blocks");
	HEADER_ROW(kv_lease_header_t, kind, "1 read, 2 put");
	HEADER_ROW(kv_lease_header_t, group, "block group");
	HEADER_ROW(kv_lease_header_t, skip, "read: slots[i] belongs to block skip + i");
	HEADER_ROW(kv_lease_header_t, space, "space id");
	HEADER_ROW(kv_lease_header_t, reserved, "0");
	HEADER_ROW(kv_lease_header_t, reserved2, "0");
	printf("\n");
}

static void print_slab_tail(void)
{
	print_table("Slab tail", "The last bytes of a slab's digest memfd.", sizeof(kv_slab_tail_t));
	HEADER_ROW(kv_slab_tail_t, magic, "`SLBTAIL1`; else the daemon is one of before, and says nothing");
	HEADER_ROW(kv_slab_tail_t, ready_bytes,
		   "the daemon has touched [0, ready_bytes) of the data: populate and pin no more");
	printf("\n");
}

static void print_member_area(void)
{
	print_table("Member area",
		    "One memfd a member: report ring and digest staging. Header:", sizeof(kv_member_area_header_t));
	HEADER_ROW(kv_member_area_header_t, magic, "`KMEMBER1`");
	HEADER_ROW(kv_member_area_header_t, version, "1");
	HEADER_ROW(kv_member_area_header_t, ring_records, "a power of two");
	HEADER_ROW(kv_member_area_header_t, ring_offset, "reports, 128 bytes each");
	HEADER_ROW(kv_member_area_header_t, staging_offset, "u64 leaf digests of puts: [block][head][leaf]");
	HEADER_ROW(kv_member_area_header_t, staging_words, "u64 words there");
	HEADER_ROW(kv_member_area_header_t, total_bytes, "size of the area");
	HEADER_ROW(kv_member_area_header_t, head, "reports ever written, stored after the report");
	HEADER_ROW(kv_member_area_header_t, tail, "reports ever read, stored by the daemon");
	HEADER_ROW(kv_member_area_header_t, dropped, "reports that found the ring full");
	printf("\n");
	print_table("Report", "A record of the report ring.", sizeof(kv_report_t));
	HEADER_ROW(kv_report_t, type, "1 a prompt was looked up, 2 a request has ended");
	HEADER_ROW(kv_report_t, space, "space id");
	HEADER_ROW(kv_report_t, time_ns, "CLOCK_MONOTONIC");
	HEADER_ROW(kv_report_t, request, "request id as 64 bits; 0: unknown");
	HEADER_ROW(kv_report_t, session, "conversation; 0: unknown");
	HEADER_ROW(kv_report_t, query_tokens, "prompt tokens");
	HEADER_ROW(kv_report_t, hit_cpu_tokens, "found in CPU memory");
	HEADER_ROW(kv_report_t, hit_disk_tokens, "found on disk");
	HEADER_ROW(kv_report_t, hit_engine_tokens, "held by the engine already");
	HEADER_ROW(kv_report_t, output_tokens, "generated");
	HEADER_ROW(kv_report_t, why, "reason of the first missing block, below");
	HEADER_ROW(kv_report_t, group, "block group");
	HEADER_ROW(kv_report_t, turn, "turn in the conversation; 0: unknown");
	HEADER_ROW(kv_report_t, first_missing, "key; zero: nothing was missing");
	HEADER_ROW(kv_report_t, match_ns, "time of the match; 0: not measured");
	HEADER_ROW(kv_report_t, load_ns, "time of the load; 0: none");
	HEADER_ROW(kv_report_t, hit_gpu_tokens, "found in memory of a GPU");
	HEADER_ROW(kv_report_t, reserved, "0");
	printf("\nReasons of a miss:");
#define REASON(NAME, label, words) printf("%s %d `%s`", KV_WHY_##NAME ? "," : "", KV_WHY_##NAME, label);
	KV_MISS_REASON_LIST(REASON)
#undef REASON
	printf(".\n");
}

static void print_shm(void)
{
	printf("# Shared memory\n\n" GENERATED, "shm", "common/include/kv/shm.h");
	printf("Between daemon and clients; version %u. Integers are little-endian and naturally aligned. Fields: "
	       "offset+bytes. How they are used: "
	       "[shared-memory.md](shared-memory.md).\n\n",
	       KV_SHM_VERSION);
	print_mirror();
	print_lease_area();
	print_slab_tail();
	print_member_area();
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*print)(void);
	} pages[] = {{"wire", print_wire}, {"status", print_status}, {"metrics", print_metrics}, {"shm", print_shm}};

	for (size_t i = 0; argc == 2 && i < KV_COUNT_OF(pages); i++) {
		if (strcmp(argv[1], pages[i].name) == 0) {
			pages[i].print();
			return fflush(stdout) == 0 ? 0 : 74;
		}
	}
	fprintf(stderr, "usage: kvd-docs wire|status|metrics|shm\n");

	return 64;
}
