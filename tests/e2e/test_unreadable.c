/* Blocks that the disk cannot read for a while (decision 032), as a client and an operator see them. */
#include "e2e/rig/fault_disk_rig.h"

#include <errno.h>
#include <signal.h>

#define FEW   4u  /* blocks whose reads fail without switching the tier off */
#define MANY  16u /* eight in a row switch it off */
#define ALL   (3u * FEW + MANY)
#define MODEL "unreadable"

typedef struct bed {
	rig_t rig;
	fault_disk_t disk;
	user_t user;
} bed_t;

/* Conversations 1 to 3 of FEW blocks and 4 of MANY, on disk only. */
static void begin(bed_t *bed, const char *engine)
{
	kvc_key_t keys[MANY];

	rig_init(&bed->rig, 1);
	rig_option(&bed->rig, "--nvme.io_engine=%s", engine);
	fault_disk_open(&bed->disk, &bed->rig);
	rig_start(&bed->rig);
	user_attach(&bed->user, &bed->rig, MODEL);
	for (uint64_t talk = 1; talk <= 4; talk++) {
		uint32_t n = talk < 4 ? FEW : MANY;

		user_keys(&bed->user, talk, n, keys);
		assert_int_equal(user_put(&bed->user, keys, 0, n, 1, NULL), KVC_OK);
	}
	user_leave(&bed->user);
	rig_crash(&bed->rig);
	fault_disk_wait(&bed->rig);
	rig_start(&bed->rig);
	user_attach(&bed->user, &bed->rig, MODEL);
	assert_true(user_match_is(&bed->user, keys, MANY, MANY));
}

static void end_bed(bed_t *bed)
{
	assert_int_equal(rig_metric(&bed->rig, "kvd_disk_lost_total"), 0);
	user_leave(&bed->user);
	rig_end(&bed->rig);
	fault_disk_close(&bed->disk);
}

static void fail_reads(bed_t *bed, uint32_t count)
{
	fault_disk_arm(&bed->disk, FAULT_READ, FAULT_SLOTS, EIO, 0, count);
}

static void kvctl_says(const bed_t *bed, const char *arguments, int code, const char *text)
{
	char out[8192];

	assert_int_equal(rig_kvctl(&bed->rig, arguments, out, sizeof out), code);
	if (!strstr(out, text)) {
		fail_msg("\"%s\" is not in: %s", text, out);
	}
}

static void explain_says(const bed_t *bed, uint64_t talk, uint32_t n, const char *text)
{
	uint32_t tokens[MANY * RIG_TOKENS];
	char path[128], arguments[192];
	FILE *file;

	snprintf(path, sizeof path, "%s/tokens", bed->rig.dir);
	file = fopen(path, "we");
	assert_non_null(file);
	user_tokens(talk, n, tokens);
	for (uint32_t i = 0; i < n * RIG_TOKENS; i++) {
		fprintf(file, "%u,", tokens[i]);
	}
	fclose(file);
	snprintf(arguments, sizeof arguments, "explain --tokens @%s", path);
	kvctl_says(bed, arguments, 1, text);
}

/* Nothing of the conversation is a hit, everywhere for this reason, and the tokens are counted under it. */
static void is_unreadable(bed_t *bed, uint64_t talk, const kvc_key_t *keys, uint32_t n)
{
	const uint64_t counted = rig_metric(&bed->rig, "kvd_prefix_miss_tokens_total{reason=unreadable}");
	kvc_report_t report = {.struct_size = sizeof report, .query_tokens = n * RIG_TOKENS};
	uint8_t tiers[MANY];
	kvc_match_t match = {.struct_size = sizeof match};

	assert_true(user_match_is(&bed->user, keys, n, 0));
	kvc_match(bed->user.space, keys, n, &match);
	assert_int_equal(match.why, KV_WHY_UNREADABLE);
	assert_int_equal(kvc_explain(bed->user.space, keys, n, tiers, &report.why), KVC_OK);
	assert_int_equal(report.why, KV_WHY_UNREADABLE);
	for (uint32_t i = 0; i < n; i++) {
		assert_int_equal(tiers[i], KV_TIER_DISK | KV_TIER_UNREADABLE);
	}
	explain_says(bed, talk, n, "block 0 is missing: on disk, and set aside");
	kvc_report(bed->user.space, &report);
	assert_true(
		rig_metric_is(&bed->rig, "kvd_prefix_miss_tokens_total{reason=unreadable}", counted + n * RIG_TOKENS));
	assert_true(rig_metric_is(&bed->rig, "kvd_tier_blocks{tier=disk}", ALL)); /* nothing has left the disk */
}

static void comes_whole(bed_t *bed, const kvc_key_t *keys, uint32_t n)
{
	assert_true(user_match_is(&bed->user, keys, n, n));
	user_expect(&bed->user, keys, n);
}

/* Reads of one conversation fail until the disk is well; the others are hits all the time. */
static void few(const char *engine)
{
	kvc_key_t keys[4][MANY];
	bed_t bed;
	uint32_t n;

	begin(&bed, engine);
	for (uint64_t talk = 1; talk <= 4; talk++) {
		user_keys(&bed.user, talk, MANY, keys[talk - 1]);
	}
	fail_reads(&bed, UINT32_MAX);
	for (uint32_t talk = 1; talk <= 2; talk++) {
		assert_true(user_get(&bed.user, keys[talk - 1], FEW, &n) != KVC_OK && n == 0);
		is_unreadable(&bed, talk, keys[talk - 1], FEW);
		if (talk == 1) {
			fail_reads(&bed, 0);
			comes_whole(&bed, keys[0], FEW);
			fail_reads(&bed, UINT32_MAX);
		}
	}
	assert_true(rig_metric(&bed.rig, "kvd_disk_unreadable_slots") > 0);
	kvctl_says(&bed, "status", 0, "note: slots of the disk cannot be read");
	assert_int_equal(rig_metric(&bed.rig, "kvd_disk_off"), 0);
	assert_int_equal(user_match(&bed.user, keys[3], MANY), MANY);

	/* Below it nothing can be stored, which is said; the block itself, computed again, takes its place. */
	assert_int_equal(user_put(&bed.user, keys[1], FEW, FEW + 2, 0, NULL), KV_ERR_PARENT_UNREADABLE);
	assert_int_equal(user_put(&bed.user, keys[1], 0, FEW + 2, 0, &n), KVC_OK);
	assert_int_equal(n, FEW + 2);
	comes_whole(&bed, keys[1], FEW + 2);
	fail_reads(&bed, 0);
	comes_whole(&bed, keys[2], FEW);
	comes_whole(&bed, keys[3], MANY);
	assert_true(rig_metric_is(&bed.rig, "kvd_disk_unreadable_slots", 0));
	end_bed(&bed);
}

/* The whole tier cannot be read: what is in memory is a hit, and the rest is one again when the disk is well. */
static void all(const char *engine)
{
	kvc_key_t keys[MANY], in_memory[FEW];
	bed_t bed;
	uint32_t n;

	begin(&bed, engine);
	user_keys(&bed.user, 1, FEW, in_memory);
	comes_whole(&bed, in_memory, FEW);
	user_keys(&bed.user, 4, MANY, keys);
	fail_reads(&bed, UINT32_MAX);
	(void)user_get(&bed.user, keys, MANY, &n);
	assert_int_equal(n, 0);
	assert_true(rig_metric_is(&bed.rig, "kvd_disk_off", 1));
	is_unreadable(&bed, 4, keys, MANY);
	comes_whole(&bed, in_memory, FEW);
	fail_reads(&bed, 0);
	comes_whole(&bed, keys, MANY);
	assert_true(rig_metric_is(&bed.rig, "kvd_disk_off", 0));
	assert_true(rig_metric_is(&bed.rig, "kvd_tier_blocks{tier=disk}", ALL));
	end_bed(&bed);
}

KV_TEST(p3_p6_unreadable_blocks_are_misses_then_hits_by_io_uring)
{
	few("auto");
}

KV_TEST(p3_p6_unreadable_blocks_are_misses_then_hits_by_threads)
{
	few("threads");
}

KV_TEST(p3_p6_an_unreadable_disk_is_a_miss_then_hits_by_io_uring)
{
	all("auto");
}

KV_TEST(p3_p6_an_unreadable_disk_is_a_miss_then_hits_by_threads)
{
	all("threads");
}
