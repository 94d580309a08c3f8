/* Every allocation fails once, in every call: an error or a miss, no leak, and the next call works. */
#include "impl.h"

#include "client_test.h"

static uint64_t real_now(void *ctx)
{
	(void)ctx;

	return kv_now_ns(&kv_env_posix);
}

static void use_everything(kv_test_env_t *t)
{
	kvc_identity_t identity = bed_identity();
	kvc_lease_t *lease = NULL, *view = NULL;
	kvc_put_t *put = NULL, *shared = NULL;
	kvc_writer_t all = {.head_count = 2, .layer_count = 4};
	kvc_key_source_t source = {.key = bed_key_at, .ctx = bed.keys};
	kvc_want_t want = {.struct_size = sizeof want, .group = 1, .n = 200, .source = &source};
	kvc_handle_t handle;
	kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk, .transfer = "t", .n = 512, .source = &source};
	kvc_handover_t *made = NULL, *wanted = NULL;
	char *json = NULL;

	identity.groups = "0:full:16,1:window:16:4095";
	if (kvc_space_open(bed.kvc, &identity, &bed.space) != KVC_OK) {
		assert_true(kv_test_failed(t));
		return;
	}
	bed.info.struct_size = sizeof bed.info;
	kvc_space_get_info(bed.space, &bed.info);
	(void)kvc_put_start(bed.space, bed.keys, 0, 12, NULL, &put);
	if (put && kvc_put_ready(put, 0) == KVC_OK) {
		if (kvc_put_export(put, &handle) == KVC_OK &&
		    kvc_put_import(bed.space, &handle, &all, &shared) == KVC_OK) {
			kvc_put_free(shared);
		}
		for (uint32_t i = 0; i < kvc_put_n(put); i++) {
			(void)kvc_put_write(put, i, bed.src[i]);
		}
		(void)kvc_put_end(put, 0, kvc_put_n(put));
		(void)kvc_put_wait(put, 0, 0);
	}
	kvc_put_free(put);
	if (kvc_acquire(bed.space, bed.keys, 12, 0, 0, &lease) == KVC_OK) {
		if (kvc_lease_export(lease, &handle) == KVC_OK &&
		    kvc_lease_import(bed.space, &handle, &view) == KVC_OK) {
			kvc_release(&view, 1);
		}
		if (kvc_lease_read(lease, 0, 12, (void *const *)bed.dst, NULL) == KVC_OK) {
			bed_read(lease, 0, 12);
		}
		kvc_release(&lease, 1);
	}
	if (kvc_lease_start(bed.space, &want, &lease) == KVC_OK) { /* keys that do not fit on the stack */
		kvc_release(&lease, 1);
	}
	if (kvc_handover_send(bed.space, &chunk, &made) == KVC_OK) {
		(void)kvc_handover_wait(made, 0, 0);
		kvc_handover_done(made, 1);
	}
	if (kvc_handover_recv(bed.space, "t", 0, &wanted) == KVC_OK) {
		kvc_status_t status = kvc_handover_wait(wanted, 0, 0);

		assert_true(status == KVC_OK || kv_test_failed(t));
		kvc_handover_done(wanted, 0);
	}
	if (kvc_document(bed.kvc, KVC_DOC_STATUS, 0, &json, NULL) == KVC_OK) {
		kvc_free(json);
	}
	BED_UNTIL(&bed, fake_open_leases(bed.fake) == 0); /* what was granted and could not be kept was given back */
}

KV_TEST(p4_every_failed_allocation_is_an_error_and_no_leak)
{
	kv_test_env_t t;
	kv_test_rng_t rng = {.state = kv_test_seed()};
	kvc_config_t config;
	uint32_t attached = 0;

	kv_test_env_init(&t);
	t.env.now_ns = real_now;
	bed_listen(&bed, &fake_split);
	config = bed_config(&bed, (kvc_config_t){0});
	KNOB(tail_bytes) = 5;
	for (uint32_t i = 0; i < BED_KEYS; i++) {
		bed.src[i] = malloc(fake_split.block_bytes);
		bed.dst[i] = malloc(fake_split.block_bytes);
		kv_test_fill(&rng, bed.src[i], fake_split.block_bytes);
		kv_test_fill(&rng, &bed.keys[i], sizeof bed.keys[i]);
	}
	KV_TEST_EACH_FAILURE(&t, n)
	{
		kvc_status_t status = kvc_attach_env(&config, &t.env, &bed.kvc);

		if (status == KVC_OK) {
			attached++;
			use_everything(&t);
			kvc_detach(bed.kvc);
		} else {
			assert_true(kv_test_failed(&t));
			assert_int_equal(status, KVC_ERR_NOMEM);
		}
		bed.kvc = NULL;
		assert_int_equal(kv_test_env_live(&t), 0);
	}
	assert_in_range(attached, 5, 100);
}

KV_TEST_MAIN_EACH(NULL, bed_teardown)
