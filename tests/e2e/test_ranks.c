/* One engine of three processes: a scheduler that starts leases and puts and never waits, and two ranks that read and
 * fill them by handle, each its head of every block. */
#include "e2e/rig/rig.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANKS  2u
#define LEN    8u
#define WINDOW 63u /* tokens: four blocks and a token less */

typedef enum op { OP_WRITE, OP_READ, OP_HOLD, OP_READ_HELD, OP_BAD, OP_LET_GO } op_t;

/* What the scheduler asks a rank. */
typedef struct order {
	op_t op;
	uint32_t group;
	uint32_t first, count; /* blocks of the handle; `first` is that of the prompt, too */
	kvc_handle_t handle;
} order_t;

static const uint8_t secret[16] = "a secret of test";

/* The window's blocks have half as many layers. */
#define WINDOW_LAYOUT "kvk1 heads=2 layers=2 tokens=16 k=32 v=32 dtype=bf16 inner=split page=0"

static const kvc_writer_t writers[2][RANKS] = {{{.rank = 0, .head_count = 1, .layer_count = 4},
						{.rank = 1, .head_first = 1, .head_count = 1, .layer_count = 4}},
					       {{.rank = 0, .head_count = 1, .layer_count = 2},
						{.rank = 1, .head_first = 1, .head_count = 1, .layer_count = 2}}};

static kvc_identity_t identity_of(void)
{
	kvc_identity_t identity = user_identity("ranks");

	identity.groups = "0:full:16,1:window:16:63";
	identity.layout = "1*" RIG_LAYOUT ";1*" WINDOW_LAYOUT;

	return identity;
}

static kvc_status_t attach(user_t *user, const char *sock, uint32_t role, uint32_t rank)
{
	const kvc_identity_t identity = identity_of();
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = sock,
				     .instance = "engine",
				     .secret = secret,
				     .secret_len = sizeof secret,
				     .role = role,
				     .rank = rank,
				     .timeout_ms = RIG_WAIT_MS, /* a busy machine */
				     .staging_blocks = 1};      /* 256 words: of a put of 16 blocks only part */
	kvc_status_t status = kvc_attach(&config, &user->kvc);

	return status == KVC_OK ? kvc_space_open(user->kvc, &identity, &user->space) : status;
}

/* ---- a rank ---------------------------------------------------------------------------------- */

typedef struct rank {
	user_t user;
	uint32_t number;
	kvc_key_t keys[LEN];
	kvc_put_t *put;
	kvc_lease_t *held;
} rank_t;

/* A slab this member has not heard of, or staging that is still being read: poll and try again. */
static int should_retry(rank_t *rank, kvc_status_t status, uint32_t *p_tries)
{
	if ((status != KVC_ERR_FAULT && status != KVC_ERR_BUSY && status != KVC_PENDING) || ++*p_tries > 2000) {
		return 0;
	}
	(void)kvc_poll(rank->user.kvc, 5);

	return 1;
}

static kvc_status_t rank_write(rank_t *rank, const order_t *order)
{
	uint8_t block[RIG_BLOCK_BYTES];
	uint32_t tries = 0;
	kvc_status_t status =
		kvc_put_import(rank->user.space, &order->handle, &writers[order->group][rank->number], &rank->put);

	for (uint32_t i = 0; i < order->count && status == KVC_OK; i++) {
		user_fill(&rank->keys[order->first + i], block);
		do {
			status = kvc_put_write(rank->put, i, block);
		} while (should_retry(rank, status, &tries));
		status = status == KVC_OK ? kvc_put_end(rank->put, i, 1) : status;
	}

	return status;
}

static kvc_status_t read_all(rank_t *rank, kvc_lease_t *lease, uint32_t group)
{
	uint8_t block[RIG_BLOCK_BYTES], want[RIG_BLOCK_BYTES];
	uint32_t tries = 0;
	kvc_status_t status = KVC_OK;

	for (uint32_t i = kvc_lease_skip(lease); i < kvc_lease_n(lease) && status == KVC_OK; i++) {
		void *dst[1] = {block};

		do {
			status = kvc_lease_read(lease, i, 1, dst, NULL);
		} while (should_retry(rank, status, &tries));
		user_fill(&rank->keys[i], want);
		if (status == KVC_OK && memcmp(block, want, RIG_BLOCK_BYTES >> group) != 0) {
			return KVC_ERR_CORRUPT;
		}
	}

	return status;
}

static kvc_status_t rank_read(rank_t *rank, const order_t *order)
{
	kvc_lease_t *lease = NULL;
	kvc_status_t status = kvc_lease_import(rank->user.space, &order->handle, &lease);

	if (status == KVC_OK) {
		status = order->op == OP_BAD ? kvc_lease_report_bad(lease, order->first)
					     : read_all(rank, lease, order->group);
	}
	kvc_release(&lease, 1);

	return status;
}

static kvc_status_t rank_do(rank_t *rank, const order_t *order)
{
	user_keys(&rank->user, 1, LEN, rank->keys); /* the same prompt in every process */
	switch (order->op) {
	case OP_WRITE:
		return rank_write(rank, order);
	case OP_HOLD:
		return kvc_lease_import(rank->user.space, &order->handle, &rank->held);
	case OP_READ_HELD:
		return read_all(rank, rank->held, order->group);
	case OP_LET_GO:
		kvc_put_free(rank->put);
		kvc_release(&rank->held, 1);
		rank->put = NULL;
		rank->held = NULL;
		return KVC_OK;
	default:
		return rank_read(rank, order);
	}
}

static void rank_live(const char *sock, uint32_t number, int orders)
{
	rank_t rank = {.number = number};
	kvc_status_t status = attach(&rank.user, sock, KVC_ROLE_WORKER, number);

	if (write(orders, &status, sizeof status) != sizeof status || status != KVC_OK) {
		_exit(1);
	}
	for (;;) {
		struct pollfd fd = {.fd = orders, .events = POLLIN};
		order_t order;

		(void)kvc_poll(rank.user.kvc, 0);
		if (poll(&fd, 1, 2) <= 0) {
			continue;
		}
		if (read(orders, &order, sizeof order) != sizeof order) {
			break;
		}
		status = rank_do(&rank, &order);
		if (write(orders, &status, sizeof status) != sizeof status) {
			break;
		}
	}
	kvc_detach(rank.user.kvc);
	_exit(0);
}

/* ---- the scheduler --------------------------------------------------------------------------- */

typedef struct bed {
	rig_t rig;
	user_t user;
	kvc_key_t keys[LEN];
	pid_t pid[RANKS];
	int orders[RANKS];
	uint32_t group; /* of the put or lease that the ranks are asked about */
} bed_t;

static kvc_status_t answer_of(bed_t *bed, uint32_t rank)
{
	struct pollfd fd = {.fd = bed->orders[rank], .events = POLLIN};
	uint64_t since = rig_now_ms();
	kvc_status_t status = KVC_PENDING;

	while (poll(&fd, 1, 2) == 0 && rig_now_ms() - since < RIG_WAIT_MS) {
		(void)kvc_poll(bed->user.kvc, 0);
	}
	assert_int_equal(read(bed->orders[rank], &status, sizeof status), sizeof status);

	return status;
}

static kvc_status_t command_rank(bed_t *bed, uint32_t rank, op_t op, const kvc_handle_t *handle, uint32_t first,
				 uint32_t count)
{
	order_t order = {.op = op, .group = bed->group, .first = first, .count = count};

	if (handle) {
		order.handle = *handle;
	}
	assert_int_equal(write(bed->orders[rank], &order, sizeof order), sizeof order);

	return answer_of(bed, rank);
}

static void rank_start(bed_t *bed, uint32_t rank)
{
	int pair[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	bed->pid[rank] = fork();
	if (bed->pid[rank] == 0) {
		for (uint32_t i = 0; i < RANKS; i++) {
			if (bed->orders[i] > 0) {
				close(bed->orders[i]); /* or the other rank never sees its end */
			}
		}
		close(pair[0]);
		rank_live(bed->rig.sock, rank, pair[1]);
	}
	close(pair[1]);
	bed->orders[rank] = pair[0];
}

static void bed_make(bed_t *bed)
{
	*bed = (bed_t){0};
	rig_init(&bed->rig, 1);
	rig_start(&bed->rig);
	for (uint32_t i = 0; i < RANKS; i++) {
		rank_start(bed, i); /* before this process attaches, as an engine does */
	}
	assert_int_equal(attach(&bed->user, bed->rig.sock, KVC_ROLE_SCHEDULER, 0), KVC_OK);
	for (uint32_t i = 0; i < RANKS; i++) {
		assert_int_equal(answer_of(bed, i), KVC_OK);
	}
	user_keys(&bed->user, 1, LEN, bed->keys);
}

static void bed_free(bed_t *bed)
{
	for (uint32_t i = 0; i < RANKS; i++) {
		close(bed->orders[i]);
		assert_int_equal(waitpid(bed->pid[i], NULL, 0), bed->pid[i]);
	}
	user_leave(&bed->user);
	rig_end(&bed->rig);
}

static void key_of(void *ctx, uint32_t i, kvc_key_t *key)
{
	*key = ((bed_t *)ctx)->keys[i];
}

#define UNTIL(bed, condition)                                                                                          \
	do {                                                                                                           \
		uint64_t since_ = rig_now_ms();                                                                        \
		while (!(condition) && rig_now_ms() - since_ < RIG_WAIT_MS) {                                          \
			(void)kvc_poll_us((bed)->user.kvc, 500);                                                       \
		}                                                                                                      \
		assert_true(condition);                                                                                \
	} while (0)

/* Reserve blocks [first, LEN) of a group for the ranks. */
static kvc_put_t *put_start(bed_t *bed, uint32_t group, uint32_t first, kvc_handle_t *handle)
{
	kvc_put_options_t options = {.struct_size = sizeof options,
				     .durable = 1,
				     .writers = writers[group],
				     .writer_count = RANKS,
				     .group = group,
				     .base = group ? first : 0};
	kvc_put_t *put = NULL;

	bed->group = group;
	assert_int_equal(kvc_put_start(bed->user.space, bed->keys + options.base, first, LEN, &options, &put), KVC_OK);
	UNTIL(bed, kvc_put_export(put, handle) != KVC_PENDING);
	assert_int_equal(kvc_put_export(put, handle), KVC_OK);
	assert_int_equal(kvc_put_n(put), LEN - first);
	assert_int_equal(kvc_put_block(put, 0, NULL),
			 KVC_OK); /* to be written; whether its memory is here does not matter */

	return put;
}

static kvc_status_t put_ends(bed_t *bed, const kvc_put_t *put)
{
	kvc_put_result_t result = {.struct_size = sizeof result};

	UNTIL(bed, (kvc_put_get_result(put, &result), result.status != KVC_PENDING));

	return result.status;
}

static void put_all(bed_t *bed, uint32_t group, uint32_t first)
{
	kvc_handle_t handle;
	kvc_put_result_t result = {.struct_size = sizeof result};
	kvc_put_t *put = put_start(bed, group, first, &handle);

	for (uint32_t i = 0; i < RANKS; i++) {
		assert_int_equal(command_rank(bed, i, OP_WRITE, &handle, first, LEN - first), KVC_OK);
	}
	assert_int_equal(put_ends(bed, put), KVC_OK);
	UNTIL(bed, (kvc_put_get_result(put, &result), result.durable_status != KVC_PENDING));
	assert_int_equal(result.durable_status, KVC_OK);
	for (uint32_t i = 0; i < RANKS; i++) {
		assert_int_equal(command_rank(bed, i, OP_LET_GO, NULL, 0, 0), KVC_OK);
	}
	kvc_put_free(put);
}

/* Blocks [skip, n) of a group, if they are there. */
static kvc_lease_t *lease(bed_t *bed, uint32_t group, uint32_t skip, uint32_t n, kvc_handle_t *handle)
{
	kvc_key_source_t source = {.key = key_of, .ctx = bed};
	kvc_want_t want = {.struct_size = sizeof want, .group = group, .n = n, .skip = skip, .source = &source};
	kvc_lease_t *lease = NULL;

	bed->group = group;
	assert_int_equal(kvc_lease_start(bed->user.space, &want, &lease), KVC_OK);
	UNTIL(bed, kvc_lease_state(lease) != KVC_PENDING);
	if (kvc_lease_state(lease) == KVC_MISS) {
		kvc_release(&lease, 1);
		return NULL;
	}
	assert_int_equal(kvc_lease_export(lease, handle), KVC_OK);
	assert_int_equal(kvc_lease_n(lease), n);

	return lease;
}

static uint32_t match(bed_t *bed)
{
	kvc_key_source_t source = {.key = key_of, .ctx = bed};
	kvc_match_t m = {.struct_size = sizeof m};

	kvc_match_lazy(bed->user.space, &source, LEN, &m);

	return m.n;
}

static bed_t bed_;
#define BED_TEST(name) KV_TEST_BETWEEN(name, bed_make(&bed_), bed_free(&bed_))

/* ---- what is promised ------------------------------------------------------------------------ */

BED_TEST(p1_ranks_fill_the_schedulers_puts_and_read_its_leases)
{
	kvc_handle_t handle;
	kvc_lease_t *full, *window;

	put_all(&bed_, 0, 0);
	assert_int_equal(match(&bed_), 0); /* the window's blocks are not there */
	assert_null(lease(&bed_, 1, 4, LEN, &handle));
	put_all(&bed_, 1, 4);
	UNTIL(&bed_, match(&bed_) == LEN);

	full = lease(&bed_, 0, 2, LEN, &handle);
	assert_non_null(full);
	for (uint32_t i = 0; i < RANKS; i++) {
		assert_int_equal(command_rank(&bed_, i, OP_READ, &handle, 0, 0), KVC_OK);
	}
	window = lease(&bed_, 1, 4, LEN, &handle);
	assert_non_null(window);
	for (uint32_t i = 0; i < RANKS; i++) {
		assert_int_equal(command_rank(&bed_, i, OP_READ, &handle, 0, 0), KVC_OK);
	}
	handle.first++; /* damaged on its way */
	assert_int_equal(command_rank(&bed_, 0, OP_READ, &handle, 0, 0), KVC_ERR_ARG);
	assert_null(lease(&bed_, 1, 3, LEN, &handle)); /* block 3 of the window was never put */
	kvc_release((kvc_lease_t *const[]){full, window}, 2);
}

BED_TEST(p4_a_rank_that_gives_up_ends_the_put_for_all)
{
	kvc_handle_t handle;
	kvc_put_t *put;

	put = put_start(&bed_, 0, 0, &handle);
	assert_int_equal(command_rank(&bed_, 0, OP_WRITE, &handle, 0, LEN), KVC_OK);
	assert_int_equal(command_rank(&bed_, 1, OP_WRITE, &handle, 0, LEN / 2), KVC_OK);
	assert_int_equal(command_rank(&bed_, 0, OP_LET_GO, NULL, 0, 0), KVC_OK); /* all of its blocks are in */
	UNTIL(&bed_, rig_metric(&bed_.rig, "kvd_put_blocks_total") == LEN / 2);
	assert_int_equal(command_rank(&bed_, 1, OP_LET_GO, NULL, 0, 0), KVC_OK);
	assert_int_equal(put_ends(&bed_, put), KVC_ERR_REVOKED);
	kvc_put_free(put);
}

BED_TEST(p4_a_put_revoked_before_its_ranks_import_it_leaks_nothing)
{
	kvc_handle_t handle;
	kvc_put_t *put;

	put = put_start(&bed_, 0, 0, &handle);
	kvc_put_free(put);
	rig_check_quiet(&bed_.rig); /* while all members live: no slot waits for a rank */
	assert_true(command_rank(&bed_, 1, OP_WRITE, &handle, 0, LEN) != KVC_OK);
	assert_int_equal(command_rank(&bed_, 1, OP_LET_GO, NULL, 0, 0), KVC_OK);
	put = put_start(&bed_, 0, 0, &handle);
	assert_int_equal(command_rank(&bed_, 1, OP_WRITE, &handle, 0, 1), KVC_OK);
	kvc_put_free(put);
	assert_int_equal(command_rank(&bed_, 1, OP_LET_GO, NULL, 0, 0), KVC_OK);
	rig_check_quiet(&bed_.rig);
}

/* A rank that never reads the end of a put, and detaches: its process lives on. */
KV_TEST(p4_a_rank_that_detaches_holds_nothing_back)
{
	user_t rank = {0};
	kvc_handle_t handle;
	kvc_put_t *put, *view;
	bed_t bed = {0};

	rig_init(&bed.rig, 1);
	rig_start(&bed.rig);
	assert_int_equal(attach(&bed.user, bed.rig.sock, KVC_ROLE_SCHEDULER, 0), KVC_OK);
	user_keys(&bed.user, 1, LEN, bed.keys);
	for (uint32_t round = 0; round < 6; round++) {
		assert_int_equal(attach(&rank, bed.rig.sock, KVC_ROLE_WORKER, 0), KVC_OK);
		put = put_start(&bed, 0, 0, &handle);
		if (round % 3 != 0) {
			assert_int_equal(kvc_put_import(rank.space, &handle, &writers[0][0], &view), KVC_OK);
		}
		if (round % 2 != 0) {
			kvc_put_free(put);
			assert_true(
				rig_metric_is(&bed.rig, "kvd_tier_quarantined_bytes{tier=cpu}", LEN * RIG_BLOCK_BYTES));
			kvc_detach(rank.kvc);
		} else {
			kvc_detach(rank.kvc); /* revokes what it was to write */
			assert_int_equal(put_ends(&bed, put), KVC_ERR_REVOKED);
			kvc_put_free(put);
		}
		rig_check_quiet(&bed.rig);
		assert_true(rig_metric_is(&bed.rig, "kvd_members", 1));
	}
	user_leave(&bed.user);
	assert_true(rig_metric_is(&bed.rig, "kvd_members", 0));
	rig_fini(&bed.rig);
}

BED_TEST(p1_a_lease_given_back_under_a_view_reads_nothing)
{
	kvc_handle_t handle;
	kvc_lease_t *taken;

	put_all(&bed_, 0, 0);
	taken = lease(&bed_, 0, 0, LEN, &handle);
	assert_non_null(taken);
	assert_int_equal(command_rank(&bed_, 0, OP_HOLD, &handle, 0, 0), KVC_OK);
	assert_int_equal(command_rank(&bed_, 0, OP_READ_HELD, NULL, 0, 0), KVC_OK);
	kvc_release(&taken, 1);
	rig_check_quiet(&bed_.rig); /* a view holds nothing */
	assert_int_equal(command_rank(&bed_, 0, OP_READ_HELD, NULL, 0, 0), KVC_ERR_REVOKED);
	assert_int_equal(command_rank(&bed_, 0, OP_LET_GO, NULL, 0, 0), KVC_OK);
}

BED_TEST(p1_a_rank_reports_a_bad_block_of_the_schedulers_lease)
{
	kvc_handle_t handle;
	kvc_lease_t *taken;

	put_all(&bed_, 0, 0);
	put_all(&bed_, 1, 4);
	UNTIL(&bed_, match(&bed_) == LEN);
	rig_written(&bed_.rig);
	taken = lease(&bed_, 1, 4, LEN, &handle);
	assert_non_null(taken);
	assert_int_equal(command_rank(&bed_, 1, OP_BAD, &handle, 6, 0), KVC_OK);
	assert_true(rig_metric_reaches(&bed_.rig, "kvd_bad_blocks_total", 1));
	kvc_release(&taken, 1);
}

static int is_there(const bed_t *bed, uint32_t block)
{
	uint8_t tier = 0;
	uint32_t why;

	return kvc_explain_group(bed->user.space, 0, bed->keys + block, 1, &tier, &why) == KVC_OK && tier > 0;
}

BED_TEST(p4_a_rank_that_dies_ends_its_puts)
{
	kvc_handle_t handle;
	kvc_put_t *put;

	put = put_start(&bed_, 0, 0, &handle);
	assert_int_equal(command_rank(&bed_, 0, OP_WRITE, &handle, 0, LEN / 2), KVC_OK);
	assert_int_equal(command_rank(&bed_, 1, OP_WRITE, &handle, 0, LEN / 2), KVC_OK);
	UNTIL(&bed_, is_there(&bed_, LEN / 2 - 1u)); /* the daemon has heard both */
	kill(bed_.pid[1], SIGKILL);
	assert_int_equal(waitpid(bed_.pid[1], NULL, 0), bed_.pid[1]);
	close(bed_.orders[1]);
	assert_int_equal(put_ends(&bed_, put), KVC_ERR_REVOKED);
	kvc_put_free(put);
	assert_int_equal(command_rank(&bed_, 0, OP_LET_GO, NULL, 0, 0), KVC_OK);
	rig_check_quiet(&bed_.rig);
	bed_.orders[1] = 0;
	rank_start(&bed_, 1);
	assert_int_equal(answer_of(&bed_, 1), KVC_OK);
	put_all(&bed_, 0, LEN / 2); /* below the half that both ranks had handed in */
}

BED_TEST(p7_handles_of_a_daemon_that_died_are_over_and_new_ones_work)
{
	kvc_handle_t old_lease, old_put, handle;
	kvc_lease_t *taken;
	kvc_put_t *put;

	put_all(&bed_, 0, 0);
	rig_written(&bed_.rig);
	taken = lease(&bed_, 0, 0, LEN, &old_lease);
	assert_non_null(taken);
	put = put_start(&bed_, 1, 4, &old_put);
	assert_int_equal(command_rank(&bed_, 0, OP_HOLD, &old_lease, 0, 0), KVC_OK);
	assert_int_equal(command_rank(&bed_, 1, OP_WRITE, &old_put, 4, 2), KVC_OK);

	(void)rig_kill(&bed_.rig, SIGKILL);
	assert_int_equal(put_ends(&bed_, put), KVC_ERR_CLOSED); /* nobody gave it up */
	rig_start(&bed_.rig);
	assert_int_equal(command_rank(&bed_, 0, OP_READ_HELD, NULL, 0, 0), KVC_ERR_REVOKED);
	UNTIL(&bed_, kvc_poll(bed_.user.kvc, 0) == KVC_OK);
	assert_true(command_rank(&bed_, 0, OP_READ, &old_lease, 0, 0) < 0);
	for (uint32_t i = 0; i < RANKS; i++) {
		assert_int_equal(command_rank(&bed_, i, OP_LET_GO, NULL, 0, 0), KVC_OK);
	}
	kvc_release(&taken, 1);
	kvc_put_free(put);

	/* A rank may be back later than the scheduler: until then it says so. */
	UNTIL(&bed_, (taken = lease(&bed_, 0, 0, LEN, &handle)) != NULL); /* from disk */
	for (uint32_t i = 0; i < RANKS; i++) {
		kvc_status_t status = KVC_PENDING;

		UNTIL(&bed_, (status = command_rank(&bed_, i, OP_READ, &handle, 0, 0)) == KVC_OK || status > 0);
		assert_int_equal(status, KVC_OK);
		assert_int_equal(command_rank(&bed_, i, OP_READ, &old_lease, 0, 0), KVC_ERR_REVOKED);
	}
	kvc_release(&taken, 1);
}
