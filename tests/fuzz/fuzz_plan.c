/* Any bytes as a plan, and as a report: refused, or all that it announces lies inside and it is written again byte for
 * byte. Reports also go into a scheduling half without a daemon. */
#include "step/message.h"

#include "kv/env.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile uint32_t seen; /* so that every array is read to its end */

static void look_ids(const uint32_t *ids, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		seen += ids[i];
	}
}

static void walk_record(const kvx_record_header_t *record)
{
	const void *at = record;

	if (record->type == KVX_RECORD_FENCE) {
		look_ids(kvx_msg_fence_ids(at), ((const kvx_msg_fence_t *)at)->n);
	} else if (record->type == KVX_RECORD_SAVE) {
		look_ids(kvx_msg_save_ids(at), ((const kvx_msg_save_t *)at)->n);
	} else if (record->type == KVX_RECORD_SPACE) {
		const kvx_msg_space_t *space = at;

		for (uint32_t i = 0; i < space->weights_len; i++) {
			seen += (uint8_t)kvx_msg_space_weights(space)[i];
		}
		for (uint32_t i = 0; i < space->adapter_len; i++) {
			seen += (uint8_t)kvx_msg_space_adapter(space)[i];
		}
	} else if (record->type == KVX_RECORD_LOAD) {
		const kvx_msg_load_t *load = at;
		const kvx_msg_part_t *part = kvx_msg_part_first(load);

		seen += (uint8_t)kvx_msg_load_id(load)[load->id_len - 1u];
		for (uint32_t p = 0; p < load->parts; p++) {
			look_ids(kvx_msg_part_ids(part), part->n);
			part = kvx_msg_part_next(part);
		}
	}
}

static void decode(uint32_t magic, const void *bytes, size_t size)
{
	const kvx_record_header_t *record;
	kvx_msg_buf_t again = {0};
	kvx_msg_reader_t cursor;

	if (!kvx_msg_open(&cursor, magic, bytes, size)) {
		return;
	}
	kvx_msg_reset(&again, magic);
	for (record = kvx_msg_next(&cursor); record; record = kvx_msg_next(&cursor)) {
		void *copy = kvx_msg_add_record(&again, record->type, record->bytes);

		walk_record(record);
		kv_assert(copy);
		memcpy(copy, record, record->bytes);
	}
	if (!cursor.bad && again.records) {
		kvx_msg_finish(&again, ((const kvx_msg_header_t *)bytes)->step);
		kv_assert(again.len == size && memcmp(again.data, bytes, size) == 0);
	}
	kvx_msg_free(&again);
}

static kvx_scheduler_t *scheduler_without_daemon(void)
{
	static const uint8_t secret[16] = "sixteen bytes!!!";
	const kvk_layout_t layout = {.heads = 1, .layers = 1, .block_tokens = 8, .k_dim = 4, .v_dim = 4};
	const kvc_identity_t identity = {.struct_size = sizeof identity,
					 .model = "fuzz",
					 .weights = "w",
					 .dtype = "f32",
					 .rope = "r",
					 .hash_tokens = 8,
					 .layout =
						 "kvk1 heads=1 layers=1 tokens=8 k=4 v=4 dtype=f32 inner=split page=0"};
	const kvc_writer_t writer = {.head_count = 1, .layer_count = 1};
	const kvx_scheduler_config_t config = {.struct_size = sizeof config,
					       .socket = "/nowhere/kvd.sock",
					       .instance = "fuzz",
					       .secret = secret,
					       .secret_len = sizeof secret,
					       .identity = &identity,
					       .layouts = &layout,
					       .writers = &writer,
					       .writer_count = 1,
					       .max_blocks = 64};
	kvx_scheduler_t *scheduler = NULL;

	kv_assert(kvx_scheduler_open(&config, &scheduler) == KVC_OK);

	return scheduler;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static kvx_scheduler_t *scheduler;
	void *bytes = malloc(size ? size : 1u); /* aligned, and of exactly that size */

	if (!scheduler) {
		scheduler = scheduler_without_daemon();
	}
	if (!bytes) {
		return 0;
	}
	memcpy(bytes, data, size);
	decode(KVX_MSG_MAGIC, bytes, size);
	decode(KVX_REPORT_MAGIC, bytes, size);
	kvx_scheduler_take_report(scheduler, bytes, size);
	free(bytes);

	return 0;
}
