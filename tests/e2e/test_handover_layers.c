/* Two engines, one daemon: the consumer reads the layers of blocks that the producer is still writing, and one of the
 * two ends between two layers. */
#include "e2e/rig/rig.h"

#define BLOCKS 24u
#define HALF   8u
#define HEADS  2u
#define LAYERS 4u
#define SOON   20000u /* ms: who runs into it has waited for nothing */

static rig_t rig_;
static user_t user_, other_;
static kvc_key_t keys_[BLOCKS];

static int setup(void **state)
{
	(void)state;
	rig_init(&rig_, 0);
	rig_option(&rig_, "--cpu.size=%s", "8MiB");
	rig_start(&rig_);
	user_attach(&user_, &rig_, "model");
	user_attach(&other_, &rig_, "model");
	user_keys(&user_, 1, BLOCKS, keys_);

	return 0;
}

static int teardown(void **state)
{
	(void)state;
	user_leave(&user_);
	user_leave(&other_);
	rig_fini(&rig_);

	return 0;
}

static const kvc_key_source_t source_ = {.key = user_key_at, .ctx = keys_};

/* ---- the producer ---------------------------------------------------------------------------- */

typedef struct maker {
	user_t *user;
	kvc_put_t *put;
	kvc_handover_t *handover;
} maker_t;

static kvc_status_t send_chunk(maker_t *maker, uint32_t n, int last)
{
	const kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk,
					    .transfer = "t",
					    .n = n,
					    .source = &source_,
					    .last = last,
					    .open = last ? NULL : maker->put};
	kvc_status_t status = kvc_handover_send(maker->user->space, &chunk, &maker->handover);

	return status == KVC_OK ? kvc_handover_wait(maker->handover, 0, SOON) : status;
}

/* Blocks [0, HALF) are there; the others are about to be computed. */
static kvc_status_t begin(maker_t *maker, user_t *user)
{
	kvc_status_t status = user_put(user, keys_, 0, HALF, 0, NULL);

	*maker = (maker_t){.user = user};
	if (status == KVC_OK) {
		status = kvc_put_start(user->space, keys_, HALF, BLOCKS, NULL, &maker->put);
	}
	if (status == KVC_OK) {
		status = kvc_put_ready(maker->put, SOON);
	}

	return status == KVC_OK ? send_chunk(maker, HALF, 0) : status;
}

/* A forward pass: one layer of all blocks. */
static kvc_status_t make_layer(const maker_t *maker, uint32_t layer)
{
	static uint8_t block[RIG_BLOCK_BYTES];
	kvc_status_t status = KVC_OK;

	for (uint32_t i = HALF; i < BLOCKS && status == KVC_OK; i++) {
		user_fill(&keys_[i], block);
		status = kvc_put_write_layers(maker->put, i - HALF, layer, 1, block);
	}

	return status == KVC_OK ? kvc_put_layers(maker->put, layer + 1) : status;
}

static void free_maker(maker_t *maker)
{
	kvc_handover_done(maker->handover, 0);
	kvc_put_free(maker->put);
}

/* ---- the consumer ---------------------------------------------------------------------------- */

static kvc_lease_t *lease_layers(kvc_handover_t *wanted)
{
	const uint64_t deadline = rig_now_ms() + SOON;
	kvc_lease_t *lease = NULL;

	assert_int_equal(kvc_handover_wait_layers(wanted, BLOCKS, 1, SOON), KVC_OK);
	assert_int_equal(kvc_handover_lease(wanted, 0, &lease), KVC_OK);
	while (kvc_lease_state(lease) == KVC_PENDING && rig_now_ms() < deadline) {
		(void)kvc_poll(other_.kvc, 10);
	}
	assert_int_equal(kvc_lease_state(lease), KVC_OK);
	assert_int_equal(kvc_lease_n(lease), BLOCKS);
	assert_int_equal(kvc_lease_skip(lease), HALF);

	return lease;
}

/* One head's layer of each block: these bytes have come, and no others. */
static void read_layer(kvc_lease_t *lease, uint32_t head, uint32_t layer)
{
	static uint8_t have[RIG_BLOCK_BYTES], want[RIG_BLOCK_BYTES], full[RIG_BLOCK_BYTES];
	const kvc_writer_t part = {.head_first = head, .head_count = 1, .layer_first = layer, .layer_count = 1};
	const size_t bytes = RIG_BLOCK_BYTES / HEADS / LAYERS, at = (head * LAYERS + layer) * bytes;

	for (uint32_t i = HALF; i < BLOCKS; i++) {
		memset(have, 0xee, sizeof have);
		memset(want, 0xee, sizeof want);
		user_fill(&keys_[i], full);
		memcpy(want + at, full + at, bytes);
		assert_int_equal(kvc_lease_read_layers(lease, i, &part, have), KVC_OK);
		assert_memory_equal(have, want, sizeof have);
	}
}

static void p1_p3_layers_are_read_while_the_next_ones_are_written(void **state)
{
	static uint8_t have[RIG_BLOCK_BYTES], want[RIG_BLOCK_BYTES];
	void *const dst[1] = {have};
	const kvc_writer_t beyond = {.head_count = HEADS, .layer_first = 1, .layer_count = LAYERS - 1};
	kvc_handover_t *wanted = NULL;
	kvc_lease_t *lease, *view = NULL;
	kvc_handle_t handle;
	maker_t maker;

	(void)state;
	assert_int_equal(kvc_handover_recv(other_.space, "t", 0, &wanted), KVC_OK);
	assert_int_equal(begin(&maker, &user_), KVC_OK);
	assert_int_equal(kvc_handover_wait_layers(wanted, BLOCKS, 1, 30), KVC_ERR_TIMEOUT);
	assert_int_equal(user_handover_info(wanted).open_n, BLOCKS);
	assert_int_equal(make_layer(&maker, 0), KVC_OK);
	lease = lease_layers(wanted);
	assert_int_equal(kvc_lease_export(lease, &handle), KVC_OK);
	assert_int_equal(kvc_lease_import(other_.space, &handle, &view), KVC_OK);
	assert_int_equal(kvc_lease_read_layers(lease, HALF, &beyond, have), KVC_PENDING);
	assert_int_equal(kvc_lease_read(lease, HALF, 1, dst, NULL), KVC_PENDING);
	for (uint32_t layer = 0; layer < LAYERS; layer++) {
		if (layer > 0) {
			assert_int_equal(make_layer(&maker, layer), KVC_OK);
		}
		assert_int_equal(kvc_handover_wait_layers(wanted, BLOCKS, layer + 1, SOON), KVC_OK);
		assert_int_equal(kvc_lease_layers(view), layer + 1);
		read_layer(lease, 0, layer);
		read_layer(view, 1, layer); /* as another rank would */
		assert_int_equal(user_match(&other_, keys_, BLOCKS), layer + 1 < LAYERS ? HALF : BLOCKS);
	}
	assert_int_equal(kvc_put_wait(maker.put, 0, SOON), KVC_OK);
	assert_int_equal(kvc_lease_wait(lease, BLOCKS, SOON), KVC_OK); /* whole, and a lease like any other */
	assert_int_equal(kvc_lease_read(lease, BLOCKS - 1, 1, dst, NULL), KVC_OK);
	user_fill(&keys_[BLOCKS - 1], want);
	assert_memory_equal(have, want, sizeof have);
	assert_int_equal(send_chunk(&maker, BLOCKS, 1), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	assert_int_equal(user_handover_info(wanted).n, BLOCKS);
	assert_int_equal(user_handover_info(wanted).open_n, 0);
	kvc_handover_done(wanted, 0);
	assert_int_equal(kvc_lease_state(lease), KVC_OK);
	kvc_release(&view, 1);
	kvc_release(&lease, 1);
	free_maker(&maker);
	rig_check_quiet(&rig_);
}

/* ---- ends ------------------------------------------------------------------------------------ */

static void wait_revoked(const kvc_lease_t *lease)
{
	const uint64_t deadline = rig_now_ms() + SOON;

	while (kvc_lease_state(lease) == KVC_OK && rig_now_ms() < deadline) {
		(void)kvc_poll(other_.kvc, 10);
	}
	assert_int_equal(kvc_lease_state(lease), KVC_ERR_REVOKED);
}

/* A producer that hands one layer over, and then does nothing. */
static void producer(void *arg, int ready)
{
	user_t user = {0};
	maker_t maker;

	(void)arg;
	user_attach(&user, &rig_, "model");
	if (begin(&maker, &user) == KVC_OK && make_layer(&maker, 0) == KVC_OK) {
		child_say(ready);
	}
	for (;;) {
		(void)kvc_poll(user.kvc, 100);
	}
}

static void p4_a_producer_killed_between_two_layers_is_told_at_once(void **state)
{
	static uint8_t have[RIG_BLOCK_BYTES];
	const kvc_writer_t first = {.head_count = HEADS, .layer_count = 1};
	kvc_handover_t *wanted = NULL;
	kvc_lease_t *lease;
	pid_t pid = child_start(producer, NULL);
	uint32_t got = 0;

	(void)state;
	assert_int_equal(kvc_handover_recv(other_.space, "t", 0, &wanted), KVC_OK);
	lease = lease_layers(wanted);
	read_layer(lease, 0, 0);
	child_kill(pid);
	assert_int_equal(kvc_handover_wait(wanted, BLOCKS, SOON), KVC_ERR_PRODUCER_LOST);
	wait_revoked(lease);
	assert_int_equal(kvc_lease_read_layers(lease, HALF, &first, have), KVC_ERR_REVOKED);
	assert_int_equal(user_handover_info(wanted).n, HALF);
	assert_int_equal(user_handover_info(wanted).open_n, 0);
	kvc_release(&lease, 1);
	kvc_handover_done(wanted, 0);
	assert_int_equal(user_get(&other_, keys_, BLOCKS, &got), KVC_OK);
	assert_int_equal(got, HALF);
	rig_check_quiet(&rig_);
}

static void consumer(void *arg, int ready)
{
	kvc_handover_t *wanted = NULL;
	kvc_lease_t *lease = NULL;
	user_t user = {0};

	(void)arg;
	user_attach(&user, &rig_, "model");
	if (kvc_handover_recv(user.space, "t", 0, &wanted) == KVC_OK &&
	    kvc_handover_wait_layers(wanted, BLOCKS, 1, SOON) == KVC_OK &&
	    kvc_handover_lease(wanted, 0, &lease) == KVC_OK) {
		while (kvc_lease_state(lease) == KVC_PENDING) {
			(void)kvc_poll(user.kvc, 100);
		}
		if (kvc_lease_state(lease) == KVC_OK) {
			child_say(ready);
		}
	}
	for (;;) {
		(void)kvc_poll(user.kvc, 100);
	}
}

static void p4_a_consumer_killed_between_two_layers_leaves_them_to_the_next(void **state)
{
	kvc_handover_t *wanted = NULL;
	kvc_lease_t *lease;
	maker_t maker;
	pid_t pid;

	(void)state;
	assert_int_equal(begin(&maker, &user_), KVC_OK);
	assert_int_equal(make_layer(&maker, 0), KVC_OK);
	pid = child_start(consumer, NULL);
	child_kill(pid);
	do { /* the daemon hears of the death when it comes to it */
		kvc_handover_done(wanted, 0);
		assert_int_equal(kvc_handover_recv(other_.space, "t", 0, &wanted), KVC_OK);
	} while (kvc_handover_wait_layers(wanted, BLOCKS, 1, SOON) == KVC_ERR_TAKEN);
	lease = lease_layers(wanted);
	for (uint32_t layer = 1; layer < LAYERS; layer++) {
		assert_int_equal(make_layer(&maker, layer), KVC_OK);
	}
	assert_int_equal(kvc_lease_wait(lease, BLOCKS, SOON), KVC_OK);
	read_layer(lease, 1, LAYERS - 1);
	assert_int_equal(send_chunk(&maker, BLOCKS, 1), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, 0, SOON), KVC_OK);
	kvc_handover_done(wanted, 0);
	kvc_release(&lease, 1);
	free_maker(&maker);
	rig_check_quiet(&rig_);
}

/* What a producer writes over a layer that it has handed in is found, and its put is of no use to anybody. */
static void p1_a_layer_that_is_overwritten_is_found(void **state)
{
	static uint8_t have[RIG_BLOCK_BYTES];
	const kvc_writer_t first = {.head_count = HEADS, .layer_count = 1};
	kvc_handover_t *wanted = NULL;
	kvc_lease_t *lease;
	maker_t maker;
	void *data = NULL;

	(void)state;
	assert_int_equal(kvc_handover_recv(other_.space, "t", 0, &wanted), KVC_OK);
	assert_int_equal(begin(&maker, &user_), KVC_OK);
	assert_int_equal(make_layer(&maker, 0), KVC_OK);
	lease = lease_layers(wanted);
	assert_int_equal(kvc_put_block(maker.put, 3, &data), KVC_OK);
	((uint8_t *)data)[77] ^= 1;
	assert_int_equal(kvc_lease_read_layers(lease, HALF + 2, &first, have), KVC_OK);
	assert_int_equal(kvc_lease_read_layers(lease, HALF + 3, &first, have), KVC_ERR_CORRUPT);
	wait_revoked(lease);
	assert_int_equal(kvc_put_wait(maker.put, 0, SOON), KVC_ERR_CORRUPT);
	assert_int_equal(user_match(&other_, keys_, BLOCKS), HALF);
	kvc_release(&lease, 1);
	kvc_handover_done(wanted, 0);
	free_maker(&maker);
	rig_check_quiet(&rig_);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void p10_a_put_is_written_one_way(void **state)
{
	static uint8_t block[RIG_BLOCK_BYTES];
	kvc_handover_t *wanted = NULL;
	kvc_lease_t *lease = NULL;
	kvc_put_t *whole = NULL;
	maker_t maker;

	(void)state;
	assert_int_equal(begin(&maker, &user_), KVC_OK);
	assert_int_equal(kvc_put_layers(maker.put, 1), KVC_ERR_ARG); /* nothing is written */
	assert_int_equal(make_layer(&maker, 0), KVC_OK);
	assert_int_equal(kvc_put_write(maker.put, 0, block), KVC_ERR_ARG);
	assert_int_equal(kvc_put_end(maker.put, 0, 1), KVC_ERR_ARG);
	assert_int_equal(kvc_put_write_layers(maker.put, 0, 0, 1, block), KVC_ERR_ARG); /* handed in */
	assert_int_equal(kvc_put_write_layers(maker.put, 0, 1, LAYERS, block), KVC_ERR_ARG);
	assert_int_equal(kvc_put_layers(maker.put, 1), KVC_ERR_ARG);
	assert_int_equal(kvc_put_layers(maker.put, LAYERS + 1), KVC_ERR_ARG);
	assert_int_equal(kvc_handover_lease(maker.handover, 0, &lease), KVC_ERR_ARG); /* the producer's */
	assert_int_equal(kvc_handover_send(user_.space,
					   &(kvc_handover_chunk_t){.struct_size = sizeof(kvc_handover_chunk_t),
								   .n = HALF,
								   .last = 1,
								   .open = maker.put},
					   &maker.handover),
			 KVC_ERR_ARG);
	assert_int_equal(kvc_put_start(user_.space, keys_, 0, BLOCKS, NULL, &whole), KVC_OK);
	assert_int_equal(kvc_put_ready(whole, SOON), KVC_OK);
	assert_int_equal(kvc_put_write_layers(whole, 0, 0, LAYERS, block), KVC_OK); /* ALREADY: nothing is copied */
	assert_int_equal(kvc_put_write(whole, HALF, block), KVC_OK);
	assert_int_equal(kvc_put_write_layers(whole, HALF, 0, 1, block), KVC_ERR_ARG);
	kvc_put_free(whole);
	assert_int_equal(kvc_handover_recv(other_.space, "t", 0, &wanted), KVC_OK);
	assert_int_equal(kvc_handover_wait(wanted, HALF, SOON), KVC_OK);
	kvc_handover_done(wanted, 0);
	free_maker(&maker);
	rig_check_quiet(&rig_);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(p1_p3_layers_are_read_while_the_next_ones_are_written, setup, teardown),
		cmocka_unit_test_setup_teardown(p4_a_producer_killed_between_two_layers_is_told_at_once, setup,
						teardown),
		cmocka_unit_test_setup_teardown(p4_a_consumer_killed_between_two_layers_leaves_them_to_the_next, setup,
						teardown),
		cmocka_unit_test_setup_teardown(p1_a_layer_that_is_overwritten_is_found, setup, teardown),
		cmocka_unit_test_setup_teardown(p10_a_put_is_written_one_way, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
