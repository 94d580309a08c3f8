#include "connectors/scheduler/sched_rig.h"
#include "engine/check.h"
#include "scheduler/scheduler.h"

#include <stdlib.h>
#include <unistd.h>

sr_t sr;
kv_test_env_t sr_env;

const char *sr_program;
static const uint8_t secret[16] = "sixteen bytes!!!";
static _Alignas(8) uint8_t report_memory[1u << 20]; /* never grown: allocations fail in some tests */

/* ---- what the half calls --------------------------------------------------------------------- */

uint64_t sr_now_ns(void)
{
	return kv_now_ns(&kv_env_posix);
}

static uint64_t env_now(void *ctx)
{
	(void)ctx;

	return sr_now_ns() + sr.ahead_ns;
}

static void *env_alloc(void *ctx, size_t n)
{
	return sr.no_memory ? NULL : kv_test_env_alloc(ctx, n);
}

static void *env_resize(void *ctx, void *p, size_t old_n, size_t n)
{
	return sr.no_memory ? NULL : kv_test_env_resize(ctx, p, old_n, n);
}

/* step/message.c calls it for realloc(). */
void *sr_realloc(void *p, size_t n);
void *sr_realloc(void *p, size_t n)
{
	return sr.no_memory || kv_test_env_fails(&sr_env) ? NULL : realloc(p, n);
}

#define WRAP(type, name, ...)                                                                                          \
	type __real_##name(__VA_ARGS__);                                                                               \
	type __wrap_##name(__VA_ARGS__);                                                                               \
	type __wrap_##name(__VA_ARGS__)

WRAP(kvc_status_t, kvc_lease_renew, kvc_lease_t *lease, uint32_t ttl_ms)
{
	if (sr.refuse_renewals > 0) {
		sr.refuse_renewals--;
		return KVC_ERR_BUSY;
	}
	sr.renewals++;

	return __real_kvc_lease_renew(lease, ttl_ms);
}

WRAP(kvc_status_t, kvc_put_keep, kvc_put_t *put)
{
	sr.keeps++;

	return __real_kvc_put_keep(put);
}

WRAP(kvc_status_t, kvc_poll_us, kvc_t *kvc, uint32_t timeout_us)
{
	sr.naps += timeout_us > 0;

	return __real_kvc_poll_us(kvc, timeout_us);
}

WRAP(kvc_status_t, kvc_await_us, kvc_t *kvc, uint32_t timeout_us)
{
	const kvc_status_t status = __real_kvc_await_us(kvc, timeout_us);

	sr.awaits += status == KVC_OK;

	return status;
}

/* Spaces of devices are spaces of host memory here. The daemon takes the two halves of one hand-over in two spaces of
 * one memory for sides that differ (decision 070), so what goes to such a space has a name of its own. */
static const kvc_space_t *of_devices[64];
static uint32_t of_devices_count;

static const char *name_in(const kvc_space_t *space, const char *transfer, char out[KVC_MAX_TRANSFER + 1])
{
	for (uint32_t i = 0; transfer && i < KV_COUNT_OF(of_devices); i++) {
		if (of_devices[i] == space) {
			snprintf(out, KVC_MAX_TRANSFER + 1, "gpu-%.100s", transfer);
			return out;
		}
	}

	return transfer;
}

WRAP(kvc_status_t, kvc_handover_recv, kvc_space_t *space, const char *transfer, uint32_t timeout_ms,
     kvc_handover_t **p_handover)
{
	char name[KVC_MAX_TRANSFER + 1];

	return __real_kvc_handover_recv(space, name_in(space, transfer, name), timeout_ms, p_handover);
}

WRAP(kvc_status_t, kvc_handover_send, kvc_space_t *space, const kvc_handover_chunk_t *chunk,
     kvc_handover_t **p_handover)
{
	kvc_handover_chunk_t named = *chunk;
	char name[KVC_MAX_TRANSFER + 1];

	named.transfer = name_in(space, chunk->transfer, name);

	return __real_kvc_handover_send(space, &named, p_handover);
}

WRAP(kvc_status_t, kvc_space_open_start, kvc_t *kvc, const kvc_identity_t *identity, kvc_space_t **p_space)
{
	kvc_identity_t second = *identity;
	kvc_status_t status;

	if (identity->device) {
		/* Else of every name: a request finds there, as another GPU's, what one has saved. */
		second.extra = sr.options.other ? identity->device : "fake-0";
		second.device = NULL;
	}

	status = __real_kvc_space_open_start(kvc, &second, p_space);
	for (uint32_t i = 0; status == KVC_OK && i < KV_COUNT_OF(of_devices); i++) { /* an address of an earlier one */
		of_devices[i] = of_devices[i] == *p_space ? NULL : of_devices[i];
	}
	if (identity->device && status == KVC_OK) {
		of_devices[of_devices_count++ % KV_COUNT_OF(of_devices)] = *p_space;
	}

	return status;
}

static const char *gpu(uint32_t mem)
{
	const char *own = sr.options.own ? sr.options.own : "fake-0";

	return mem == KVX_HOST_MEM ? NULL : mem > KVX_OWN_MEM && sr.options.other ? sr.options.other : own;
}

WRAP(kvc_status_t, kvc_device, const kvc_t *kvc, uint32_t i, kvc_device_t *device)
{
	if (!sr.options.other) {
		return __real_kvc_device(kvc, i, device);
	}
	device->name = gpu(KVX_OWN_MEM + i);

	return i < 2 ? KVC_OK : KVC_MISS;
}

WRAP(kvc_status_t, kvc_space_state, const kvc_space_t *space)
{
	if (sr.options.device == SR_DEVICE_REFUSED && sr.scheduler &&
	    space == sr.scheduler->spaces[0].mems[KVX_OWN_MEM].space) {
		sr.refusals++;
		return KVC_ERR_TIER_OFF;
	}

	return __real_kvc_space_state(space);
}

WRAP(kvc_status_t, kvc_lease_start, kvc_space_t *space, const kvc_want_t *want, kvc_lease_t **p_lease)
{
	if (sr.miss_device_leases && space != sr.scheduler->spaces[0].space) {
		return KVC_MISS;
	}

	if (sr.cut_device_leases && space != sr.scheduler->spaces[0].space && want->n > sr.cut_device_leases) {
		kvc_want_t cut = *want;

		cut.n = sr.cut_device_leases;
		return __real_kvc_lease_start(space, &cut, p_lease);
	}

	return __real_kvc_lease_start(space, want, p_lease);
}

/* ---- members --------------------------------------------------------------------------------- */

static void describe(void)
{
	kvk_geometry_t geometry;

	sr.layout = (kvk_layout_t){.heads = 1,
				   .layers = 2,
				   .block_tokens = SR_UNIT,
				   .k_dim = 4,
				   .v_dim = 4,
				   .dtype = KVK_DTYPE_F32,
				   .inner = KVK_INNER_SPLIT};
	assert_int_equal(kvk_layout_format(&sr.layout, sr.layout_text, sizeof sr.layout_text), KV_OK);
	kvk_layout_geometry(&sr.layout, &geometry);
	sr.block_bytes = geometry.block_bytes;
	sr.identity = (kvc_identity_t){.struct_size = sizeof sr.identity,
				       .model = "scheduler test",
				       .weights = "w1",
				       .dtype = "f32",
				       .rope = "r",
				       .hash = sr.options.own_keys ? NULL : "test:fnv",
				       .hash_tokens = SR_UNIT,
				       .groups = sr.groups == 1           ? "0:full:8"
						 : sr.options.one_table   ? "0:full:8,1:full:8"
						 : sr.options.even_window ? "0:full:8,1:window:8:24"
									  : "0:full:8,1:window:8:20",
				       .layout = sr.layout_text};
	sr.writer = (kvc_writer_t){.rank = 0, .head_count = 1, .layer_count = 2};
	sr.hit.struct_size = sizeof sr.hit;
}

static kvc_status_t open_scheduler(void)
{
	kvc_identity_t identity = sr.identity;
	kvc_status_t status;
	const kvk_layout_t layouts[2] = {sr.layout, sr.layout};
	const kvc_writer_t writers[2] = {sr.writer, sr.writer};
	const kvx_scheduler_config_t config = {.struct_size = sizeof config,
					       .socket = sr.rig.socket,
					       .instance = "scheduler-test",
					       .secret = secret,
					       .secret_len = sizeof secret,
					       .identity = &identity,
					       .layouts = layouts,
					       .writers = writers,
					       .writer_count = 1,
					       .max_blocks = SR_BLOCKS,
					       .foreign = !sr.options.own_keys,
					       .cost_model = sr.options.cost_model,
					       .mode = sr.options.mode,
					       .keeps_blocks = 1,
					       .defer_shared = sr.options.defer_shared,
					       .wait_us = sr.options.wait_us ? sr.options.wait_us : SR_WAIT_US,
					       .load_ms = sr.options.load_ms ? sr.options.load_ms : SR_LOAD_MS};

	identity.weights = sr.options.named_later || sr.options.unnamed ? NULL : identity.weights;
	status = kvx_scheduler_open_in(&sr_env.env, &config, &sr.scheduler);
	if (status == KVC_OK && sr.options.named_later) {
		status = kvx_scheduler_set_weights(sr.scheduler, sr.identity.weights);
	}

	return status;
}

static void attach_stand_in(void)
{
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = sr.rig.socket,
				     .instance = "scheduler-test",
				     .secret = secret,
				     .secret_len = sizeof secret,
				     .role = KVC_ROLE_WORKER,
				     .rank = 0,
				     .lazy = 2};

	assert_int_equal(kvc_attach(&config, &sr.kvc), KVC_OK);
}

static void run_iteration(void *ctx)
{
	(void)ctx;
	(void)kvx_scheduler_has_pending(sr.scheduler);
	(void)kvc_poll(sr.kvc, 0);
}

kvc_status_t sr_open(const sr_options_t *options)
{
	kvc_status_t status;

	sr = (sr_t){.rig = sr.rig, .options = *options, .groups = options->groups > 1 ? 2 : 1};
	sr.report = (kvx_msg_buf_t){.data = report_memory, .cap = sizeof report_memory};
	describe();
	status = open_scheduler();
	if (status != KVC_OK) {
		return status;
	}
	if (options->device != SR_DEVICE_NONE) {
		assert_int_equal(kvx_scheduler_set_device(sr.scheduler, gpu(KVX_OWN_MEM)), KVC_OK);
	}
	sr.cache = calloc(SR_BLOCKS, sr.block_bytes);
	assert_non_null(sr.cache);
	if (!options->alone) {
		attach_stand_in();
		sr.rig.run_iteration = run_iteration;
	}

	return KVC_OK;
}

static void free_puts(void)
{
	for (uint32_t i = 0; i < sr.put_count; i++) {
		kvc_put_free(sr.puts[i]);
	}
	sr.put_count = 0;
}

void sr_close(void)
{
	sr.rig.run_iteration = NULL;
	free_puts();
	kvx_scheduler_close(sr.scheduler);
	for (uint32_t mem = 0; mem < KVX_MEMS; mem++) {
		kvc_space_close(sr.space[mem]);
		for (uint32_t i = 0; i < SR_NAMES; i++) {
			kvc_space_close(sr.named[i].space[mem]);
		}
	}
	kvc_detach(sr.kvc);
	free(sr.cache);
	assert_int_equal(kv_test_env_live(&sr_env), 0);
}

/* 1: the stand-in's space is open. One that was refused, or is of a daemon that is gone, is asked for again. */
static int open_numbered(uint32_t number, uint32_t mem)
{
	kvc_space_t **p_space = number ? &sr.named[number].space[mem] : &sr.space[mem];
	const kvc_status_t state = *p_space ? kvc_space_state(*p_space) : KVC_MISS;
	kvc_identity_t identity = sr.identity;

	if (number) {
		identity.weights = sr.named[number].weights;
		identity.lora = sr.named[number].adapter[0] ? sr.named[number].adapter : identity.lora;
	}

	if (state != KVC_OK && state != KVC_PENDING && kvc_incarnation(sr.kvc)) {
		kvc_space_close(*p_space);
		*p_space = NULL;
		identity.device = gpu(mem);
		(void)kvc_space_open_start(sr.kvc, &identity, p_space);
	}

	return state == KVC_OK;
}

static int open_space(uint32_t mem)
{
	return open_numbered(0, mem);
}

void sr_wait_ready(void)
{
	const int device = sr.options.device == SR_DEVICE_THERE;
	const uint32_t last = !device ? KVX_HOST_MEM : sr.options.other ? KVX_OWN_MEM + 1u : KVX_OWN_MEM;

	for (int i = 0; i < 30000; i++) {
		int open = 1;

		(void)sr_step();
		for (uint32_t mem = 0; mem <= last; mem++) {
			open &= open_space(mem) && (mem == KVX_HOST_MEM || sr.scheduler->spaces[0].mems[mem].open);
		}
		if (open && (sr.options.unnamed || kvx_scheduler_is_ready(sr.scheduler))) {
			return;
		}
		usleep(1000);
	}
	fail_msg("not ready");
}

void sr_name_weights(const char *text)
{
	kvx_scheduler_suspend(sr.scheduler);
	assert_int_equal(kvx_scheduler_set_weights(sr.scheduler, text), KVC_OK);
	SR_UNTIL(kvx_scheduler_is_ready(sr.scheduler));
}

void sr_restart_daemon(void)
{
	rig_start(&sr.rig);
	sr_wait_ready();
}

/* ---- requests -------------------------------------------------------------------------------- */

static const void *hash_at(void *ctx, uint32_t i, uint32_t *p_len)
{
	const sr_request_t *request = ctx;

	*p_len = 32;

	return request->hash[i];
}

void sr_request(sr_request_t *request, const char *id, uint32_t seed, uint32_t shared, uint32_t n)
{
	uint64_t base = 0, own = seed, hash = HASH_START;
	uint32_t i;

	assert_true(n <= SR_MAX_TOKENS);
	(void)snprintf(request->id, sizeof request->id, "%s", id);
	request->n = n;
	for (i = 0; i < n; i++) {
		request->tokens[i] = i < shared ? below(&base, 50000) : below(&own, 50000);
		hash = hash_bytes(hash, &request->tokens[i], sizeof request->tokens[i]);
		if (i % SR_UNIT == SR_UNIT - 1u) {
			uint64_t state = hash;

			for (uint32_t b = 0; b < 32; b += 8) {
				const uint64_t word = next_random(&state);

				memcpy(request->hash[i / SR_UNIT] + b, &word, 8);
			}
		}
	}
	for (i = 0; i < sr.request_count && sr.requests[i] != request; i++) {
	}
	if (i == sr.request_count) {
		assert_true(i < SR_REQUESTS);
		sr.requests[sr.request_count++] = request;
	}
	request->hashes = (kvx_hashes_t){.at = hash_at, .ctx = request, .n = n / SR_UNIT};
	request->ask = (kvx_ask_t){.struct_size = sizeof request->ask,
				   .id = request->id,
				   .id_len = (uint32_t)strlen(request->id),
				   .hashes = &request->hashes,
				   .tokens = n};
	if (sr.options.own_keys) {
		const kvx_units_t units = {.struct_size = sizeof units, .n = n, .tokens = request->tokens};

		(void)kvx_scheduler_add_tokens(sr.scheduler, &request->ask, &units);
	}
}

void sr_place(sr_request_t *request, uint32_t base, uint32_t fresh)
{
	const uint32_t n = (request->n + SR_UNIT - 1u) / SR_UNIT;

	for (uint32_t g = 0; g < sr.groups; g++) {
		const kvx_block_table_t table = {.struct_size = sizeof table,
						 .group = g,
						 .n = n,
						 .fresh = fresh,
						 .ids = request->ids[g],
						 .shared = g > 0 && sr.options.one_table};

		for (uint32_t i = 0; i < n; i++) {
			request->ids[g][i] = (base + (table.shared ? 0 : g * n) + i) % SR_BLOCKS;
		}
		assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &request->ask, &table), KVC_OK);
	}
}

void sr_content(const sr_request_t *request, uint32_t group, uint32_t block, uint8_t *out)
{
	uint64_t state;

	memcpy(&state, request->hash[block], sizeof state);
	state ^= (sr.options.one_table ? 0 : group) * UINT64_C(0x1234567);
	for (uint32_t i = 0; i < sr.block_bytes; i += 8) {
		const uint64_t word = next_random(&state);

		memcpy(out + i, &word, 8);
	}
}

void sr_compute(const sr_request_t *request, uint32_t from, uint32_t to)
{
	for (uint32_t g = 0; g < sr.groups; g++) {
		for (uint32_t i = from; i < to; i++) {
			sr_content(request, g, i, sr.cache + (size_t)request->ids[g][i] * sr.block_bytes);
		}
	}
}

int sr_is_right(const sr_request_t *request, uint32_t from, uint32_t to)
{
	uint8_t expected[4096];

	assert_true(sr.block_bytes <= sizeof expected);
	for (uint32_t i = from; i < to; i++) {
		sr_content(request, 0, i, expected);
		if (memcmp(expected, sr.cache + (size_t)request->ids[0][i] * sr.block_bytes, sr.block_bytes) != 0) {
			return 0;
		}
	}

	return 1;
}

/* ---- the stand-in for the ranks -------------------------------------------------------------- */

kvc_space_t *sr_await_space(uint32_t number, uint32_t mem)
{
	assert_true(number < SR_NAMES);
	for (uint32_t i = 0; i < 1000 && !open_numbered(number, mem); i++) {
		(void)kvc_poll(sr.kvc, 10);
	}

	return number ? sr.named[number].space[mem] : sr.space[mem];
}

/* Blocks of a part that could be read. */
static uint32_t read_part(uint32_t number, const kvx_msg_part_t *part, uint32_t flags)
{
	const uint32_t *ids = kvx_msg_part_ids(part), last = part->first + part->n;
	kvc_lease_t *lease = NULL;
	kvc_space_t *space;
	uint32_t good = 0, end;

	if ((flags & KVX_MSG_NO_LEASE) || part->lease.incarnation == 0 || sr.fail_loads ||
	    (part->mem != KVX_HOST_MEM && sr.fail_device != KVC_OK)) {
		return 0;
	}
	space = sr_await_space(number, part->mem);
	(void)kvc_poll(sr.kvc, 0);
	if (kvc_lease_import(space, &part->lease, &lease) != KVC_OK) {
		return 0;
	}
	end = kvc_lease_n(lease) < last ? kvc_lease_n(lease) : last;
	if (kvc_lease_wait(lease, end, SR_LOAD_MS) == KVC_OK) {
		for (uint32_t i = part->first; i < end; i++) {
			void *to = sr.cache + (size_t)ids[i - part->first] * sr.block_bytes;
			uint32_t bad;

			good += kvc_lease_read(lease, i, 1, &to, &bad) == KVC_OK;
		}
	}
	kvc_release(&lease, 1);

	return good;
}

static void add_loaded(uint64_t number, kvc_status_t status, uint32_t blocks)
{
	kvx_report_loaded_t *record = kvx_msg_add_record(&sr.report, KVX_RECORD_LOADED, sizeof *record);

	record->load = number;
	record->status = status;
	record->blocks = blocks;
	record->ns = 1000;
}

static void do_load(const kvx_msg_load_t *load)
{
	const kvx_msg_part_t *part = kvx_msg_part_first(load);
	uint32_t good = 0, asked = 0, there;
	kvc_status_t why = KVC_MISS;

	for (uint32_t p = 0; p < load->parts; p++) {
		there = read_part(load->space, part, load->flags);
		good += there;
		asked += part->n;
		if (part->mem != KVX_HOST_MEM) {
			sr.plan.gpu_blocks += there;
			why = sr.fail_device != KVC_OK ? sr.fail_device : why;
		}
		part = kvx_msg_part_next(part);
	}
	sr.plan.loads++;
	sr.plan.parts += load->parts;
	sr.plan.dead += (load->flags & KVX_MSG_NO_LEASE) != 0;
	sr.plan.loaded_blocks += good;
	sr.plan.failed_blocks += asked - good;
	add_loaded(load->load, good == asked ? KVC_OK : why, good);
}

static void write_save(kvc_put_t *put, const uint32_t *ids, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		if (ids[i] != KVX_NO_BLOCK) {
			(void)kvc_put_write(put, i, sr.cache + (size_t)ids[i] * sr.block_bytes);
		}
	}
	(void)kvc_put_end(put, 0, n);
	assert_true(sr.put_count < SR_PUTS);
	sr.puts[sr.put_count++] = put;
}

void sr_release_save(void)
{
	assert_non_null(sr.held);
	write_save(sr.held, sr.held_ids, sr.held_n);
	sr.held = NULL;
	sr.hold_saves = 0;
}

void sr_release_saves(void)
{
	for (uint32_t i = 0; i < sr.held_count; i++) {
		write_save(sr.held_saves[i].put, sr.held_saves[i].ids, sr.held_saves[i].n);
	}
	sr.hold_host_saves = sr.hold_device_saves = 0;
	sr.held_count = 0;
}

/* 1: the save waits until it is released. */
static int hold_save(kvc_put_t *put, const uint32_t *ids, uint32_t n, int device)
{
	if (device ? !sr.hold_device_saves : !sr.hold_host_saves) {
		return 0;
	}
	assert_true(sr.held_count < 8 && n <= SR_BLOCKS);
	sr.held_saves[sr.held_count].put = put;
	sr.held_saves[sr.held_count].n = n;
	memcpy(sr.held_saves[sr.held_count++].ids, ids, n * sizeof *ids);

	return 1;
}

static void do_save(const kvx_msg_save_t *save)
{
	const uint32_t *ids = kvx_msg_save_ids(save);
	const int complete = (save->flags & KVX_MSG_COMPLETE) != 0, device = (save->flags & KVX_MSG_GPU_MEM) != 0;
	kvc_put_t *put = NULL;

	*(device ? &sr.plan.device_saves : &sr.plan.saves) += 1;
	sr.plan.urgent_saves += (save->flags & KVX_MSG_URGENT) != 0;
	*(device ? &sr.plan.device_save_blocks : &sr.plan.save_blocks) += save->n;
	sr.plan.early += (uint32_t)complete;
	(void)kvc_poll(sr.kvc, 0);
	if (sr.drop_saves || (device ? sr.drop_device_saves : sr.drop_host_saves) ||
	    (sr.plan.failed_blocks && !complete) ||
	    kvc_put_import(sr_await_space(save->space, (uint32_t)device), &save->put, &sr.writer, &put) != KVC_OK) {
		kvx_report_dropped_t *record = kvx_msg_add_record(&sr.report, KVX_RECORD_DROPPED, sizeof *record);

		record->put = save->put.id;
		return;
	}
	if (sr.hold_saves) {
		assert_true(!sr.held && save->n <= SR_BLOCKS);
		sr.held = put;
		sr.held_n = save->n;
		memcpy(sr.held_ids, ids, save->n * sizeof *ids);
		return;
	}
	if (hold_save(put, ids, save->n, device)) {
		return;
	}
	write_save(put, ids, save->n);
	if (sr.put_count > SR_PUTS / 2) {
		(void)kvc_poll(sr.kvc, 20);
		free_puts();
	}
}

void sr_take_name(const kvx_msg_space_t *space)
{
	if (space->number > 0 && space->number < SR_NAMES) {
		(void)snprintf(sr.named[space->number].weights, sizeof sr.named->weights, "%.*s",
			       (int)space->weights_len, kvx_msg_space_weights(space));
		(void)snprintf(sr.named[space->number].adapter, sizeof sr.named->adapter, "%.*s",
			       (int)space->adapter_len, kvx_msg_space_adapter(space));
	}
}

static void take_record(const kvx_record_header_t *record, int act)
{
	const void *at = record;

	switch (record->type) {
	case KVX_RECORD_SPACE:
		sr_take_name(at);
		sr.plan.spaces++;
		break;
	case KVX_RECORD_LOAD:
		sr.load = ((const kvx_msg_load_t *)at)->load;
		if (act) {
			do_load(at);
		}
		break;
	case KVX_RECORD_SAVE:
		if (act) {
			do_save(at);
		}
		break;
	case KVX_RECORD_FENCE:
		sr.plan.fences += ((const kvx_msg_fence_t *)at)->n;
		break;
	case KVX_RECORD_DROP:
		sr.plan.drops++;
		break;
	case KVX_RECORD_TIME:
		sr.plan.timed = 1;
		break;
	case KVX_RECORD_WORK:
		sr.plan.work = *(const kvx_msg_work_t *)at;
		break;
	default:
		sr.plan.spaces++;
		break;
	}
}

/* What the daemon and the steps have numbered is left out, and what depends on the clock (TIME, WORK). */
static void trace(const kvx_record_header_t *record)
{
	static _Alignas(8) uint8_t copy[1u << 16];
	kvx_msg_load_t *load = (void *)copy;
	kvx_msg_save_t *save = (void *)copy;

	if (record->type == KVX_RECORD_TIME || record->type == KVX_RECORD_WORK) {
		return;
	}
	assert_true(record->bytes <= sizeof copy);
	memcpy(copy, record, record->bytes);
	if (record->type == KVX_RECORD_LOAD) {
		kvx_msg_part_t *part = (void *)(uintptr_t)kvx_msg_part_first(load);

		for (uint32_t p = 0; p < load->parts; p++) {
			part->lease = (kvc_handle_t){0};
			part = (void *)(uintptr_t)kvx_msg_part_next(part);
		}
	} else if (record->type == KVX_RECORD_SAVE) {
		save->put = (kvc_handle_t){0};
		save->step = 0;
	}
	sr.trace = hash_bytes(sr.trace, copy, record->bytes);
	sr.traced++;
}

/* The message of the step, and what the ranks do about it. */
static size_t take_message(int act)
{
	const kvx_record_header_t *record;
	const void *bytes = NULL;
	kvx_msg_reader_t cursor;
	size_t len = 0;

	sr.plan = (sr_plan_t){0};
	kvx_scheduler_build_message(sr.scheduler, &bytes, &len);
	if (sr.kvc) {
		(void)kvc_poll(sr.kvc, 0); /* it has a thread of its own for that in life */
	}
	if (sr.ranks) {
		sr.ranks(bytes, len);
	}
	if (len == 0) {
		return 0;
	}
	sr.plan.step = ((const kvx_msg_header_t *)bytes)->step;
	assert_true(kvx_msg_open(&cursor, KVX_MSG_MAGIC, bytes, len));
	kvx_msg_reset(&sr.report, KVX_REPORT_MAGIC);
	while ((record = kvx_msg_next(&cursor)) != NULL) {
		take_record(record, act && !sr.ranks);
		trace(record);
	}
	assert_false(cursor.bad);

	return len;
}

void sr_plan(void)
{
	(void)take_message(0);
}

void sr_give_report(void)
{
	kvx_msg_finish(&sr.report, 1);
	kvx_scheduler_take_report(sr.scheduler, sr.report.data, sr.report.len);
}

size_t sr_step(void)
{
	const size_t len = take_message(1);

	if (len && sr.report.records && !sr.ahead) {
		sr_give_report();
	}

	return len;
}

uint32_t sr_step_saves(const sr_request_t *request, uint32_t computed)
{
	sr_advance(request, computed, computed);
	(void)sr_step();

	return sr.plan.save_blocks;
}

void sr_run_tokens(const sr_request_t *request, uint32_t from, uint32_t to)
{
	sr_compute(request, from / SR_UNIT, (to + SR_UNIT - 1u) / SR_UNIT);
	sr_advance(request, to, to - from);
	(void)sr_step();
}

kvx_outcome_t sr_outcome(const sr_request_t *request)
{
	kvx_outcome_t outcome = {.struct_size = sizeof outcome};

	kvx_scheduler_get_outcome(sr.scheduler, &request->ask, &outcome);

	return outcome;
}

void *sr_begin_report(uint32_t type, size_t size)
{
	kvx_msg_reset(&sr.report, KVX_REPORT_MAGIC);

	return kvx_msg_add_record(&sr.report, type, size);
}

void sr_report_loaded(uint64_t number, uint32_t blocks)
{
	kvx_msg_reset(&sr.report, KVX_REPORT_MAGIC);
	add_loaded(number, KVC_OK, blocks);
	sr_give_report();
}

/* ---- what an engine does --------------------------------------------------------------------- */

void sr_settle(void)
{
	for (int i = 0; i < 30000; i++) {
		kvx_scheduler_stats_t stats;

		(void)kvx_scheduler_has_pending(sr.scheduler);
		(void)sr_step();
		(void)kvc_poll(sr.kvc, 0);
		stats = sr_stats();
		if (stats.puts_open == 0 && stats.leases_open == 0 && !kvx_scheduler_has_pending(sr.scheduler)) {
			(void)kvc_poll(sr.kvc, 2);
			free_puts();
			return;
		}
		usleep(1000);
	}
	fail_msg("puts or leases stay open");
}

uint32_t sr_look_up(const sr_request_t *request)
{
	kvx_scheduler_match(sr.scheduler, &request->ask, &sr.hit);

	return sr.hit.tokens;
}

uint32_t sr_match(const sr_request_t *request)
{
	if (sr_look_up(request) == 0 && (sr.hit.why == KV_WHY_TIMEOUT || sr.hit.why == KV_WHY_DAEMON_STALE)) {
		fail_msg("the daemon does not answer: reason %u, answers late %lu, leases lost %lu: %s", sr.hit.why,
			 (unsigned long)sr_stats().late_answers, (unsigned long)sr_stats().lease_lost,
			 kvc_last_error());
	}

	return sr.hit.tokens;
}

void sr_start_load(const sr_request_t *request)
{
	kvx_scheduler_start_load(sr.scheduler, &request->ask, &sr.hit);
}

void sr_advance(const sr_request_t *request, uint32_t computed, uint32_t prefill)
{
	kvx_scheduler_advance(sr.scheduler, &request->ask, computed, prefill);
}

void sr_finish(const sr_request_t *request)
{
	kvx_scheduler_finish(sr.scheduler, &request->ask);
}

void sr_wait_saved(const sr_request_t *request, uint64_t blocks)
{
	for (int i = 0; i < 10000 && sr_stats().save_done < blocks; i++) {
		(void)kvc_poll(sr.kvc, 0);
		sr_advance(request, request->n, 0);
		(void)sr_step();
		usleep(1000);
	}
	assert_int_equal(sr_stats().save_done, blocks);
}

uint32_t sr_count_stored(uint32_t mem, const sr_request_t *request)
{
	kvc_match_t match = {.struct_size = sizeof match};
	kvc_key_t keys[SR_MAX_TOKENS / SR_UNIT];

	for (uint32_t i = 0; i < request->n / SR_UNIT; i++) {
		assert_int_equal(kvc_key_bind(sr.space[mem], request->hash[i], 32, &keys[i]), KVC_OK);
	}
	kvc_match(sr.space[mem], keys, request->n / SR_UNIT, &match);

	return match.n;
}

uint32_t sr_run(sr_request_t *request, uint32_t base)
{
	const uint32_t full = request->n / SR_UNIT, loaded = sr_match(request);
	const int async = sr.hit.async;
	uint32_t failed = 0;

	sr.plan.loads = 0;
	sr_place(request, base, 0);
	if (loaded) {
		sr_start_load(request);
	}
	for (uint32_t i = 0; async && i < 1000 && sr.plan.loads == 0; i++) { /* told when its lease is there */
		(void)sr_step();
		failed = sr.plan.failed_blocks;
		usleep(sr.plan.loads ? 0 : 200);
	}
	sr_compute(request, loaded / SR_UNIT, full);
	sr_advance(request, request->n, request->n - loaded);
	(void)sr_step();
	failed += async ? 0 : sr.plan.failed_blocks;
	if (loaded && !failed) {
		assert_true(sr_is_right(request, 0, full));
	}
	if (failed) {
		sr_compute(request, 0, full);
		sr_advance(request, request->n, request->n);
		(void)sr_step();
	}

	return loaded;
}

uint32_t sr_use(sr_request_t *request, const char *id, uint32_t seed, uint32_t shared, uint32_t n)
{
	uint32_t found;

	sr_request(request, id, seed, shared, n);
	found = sr_run(request, 0);
	sr_end(request);

	return found;
}

void sr_store(sr_request_t *request, const char *id, uint32_t seed, uint32_t shared, uint32_t n)
{
	sr_request(request, id, seed, shared, n);
	(void)sr_run(request, 0);
	sr_settle();
}

void sr_find(sr_request_t *request, uint32_t n)
{
	sr_store(request, "first", 1, 0, 80);
	sr_end(request);
	sr_request(request, "second", 1, 0, n);
	assert_int_equal(sr_match(request), 80);
	sr_place(request, 100, 0);
}

kvx_scheduler_stats_t sr_stats(void)
{
	kvx_scheduler_stats_t stats = {.struct_size = sizeof stats};

	kvx_scheduler_get_stats(sr.scheduler, &stats);

	return stats;
}

/* ---- both ends ------------------------------------------------------------------------------- */

void sr_start(const sr_options_t *options)
{
	kv_test_env_init(&sr_env);
	sr_env.env.now_ns = env_now;
	sr_env.env.alloc = env_alloc;
	sr_env.env.resize = env_resize;
	rig_init(&sr.rig, sr_program);
	sr.rig.silence = options->silence ? options->silence : sr.rig.silence;
	if (!options->alone) {
		rig_start(&sr.rig);
	}
	assert_int_equal(sr_open(options), KVC_OK);
	if (!options->alone) {
		sr_wait_ready();
	}
}

void sr_stop(void)
{
	for (uint32_t i = 0; i < sr.request_count; i++) {
		sr_finish(sr.requests[i]);
	}
	if (sr.rig.pid) {
		sr_settle();
		rig_check_quiet(&sr.rig);
	}
	sr_close();
	rig_fini(&sr.rig);
}

void sr_run_test(void **state)
{
	const sr_test_t *test = *state;

	sr_start(test->options);
	sr.row = test->row;
	test->run();
	sr_stop();
}
