/* The spaces of the base model and of adapters, and for each others in memory of GPUs: opened at their first use, and
 * kept until their number stands for something else. */
#include "worker/transfer/spaces.h"
#include "common/await.h"

#include "kv/log.h"

#include <stdlib.h>
#include <string.h>

#define RETRY_NS        UINT64_C(500000000)
#define DEVICE_RETRY_NS UINT64_C(2000000000)

static void close_number(kvx_worker_t *worker, uint32_t number)
{
	for (uint32_t mem = 0; mem < KVX_MEMS; mem++) {
		kvc_space_close(worker->spaces[mem][number].space);
		worker->spaces[mem][number] = (kvx_wspace_t){0};
	}
	free(worker->names[number]);
	worker->names[number] = NULL;
}

/* A number stands for something else when nothing of the scheduler's uses it any longer. */
void kvx_wspace_add_name(kvx_worker_t *worker, kvx_wname_t *name)
{
	if (name->ref.mem != KVX_HOST_MEM) {
		if (!worker->mems[name->ref.mem]) {
			worker->mems[name->ref.mem] = strdup(name->text);
		}
		free(name);
		return;
	}
	close_number(worker, name->ref.number);
	worker->names[name->ref.number] = name;
	if (worker->space_top <= name->ref.number) {
		worker->space_top = name->ref.number + 1;
	}
}

/* The pool's inner order may differ from ours. */
static kvc_status_t learn_layout(const kvx_worker_t *worker, kvx_wspace_t *space)
{
	const char *text = kvc_space_layout(space->space);

	if (space->known) {
		return KVC_OK;
	}
	if (kvk_layouts_parse(text, strlen(text), space->layouts, worker->group_count, NULL) != KV_OK) {
		return (kvc_status_t)KV_ERR_LAYOUT;
	}
	for (uint32_t i = 0; i < worker->group_count && strcmp(text, worker->layout_text) != 0; i++) {
		if (!kvk_layout_convertible(&space->layouts[i], &worker->groups[i].layout)) {
			return (kvc_status_t)KV_ERR_LAYOUT;
		}
	}
	space->known = 1;

	return KVC_OK;
}

static kvc_status_t start_open(kvx_worker_t *worker, kvx_wspace_ref_t ref, uint64_t now)
{
	kvx_wspace_t *space = &worker->spaces[ref.mem][ref.number];
	const kvx_wname_t *name = worker->names[ref.number];
	kvc_identity_t identity = worker->identity;
	kvc_status_t status;

	if (name) {
		identity.weights = name->text;
		identity.lora = name->text[name->adapter] ? name->text + name->adapter : identity.lora;
	}
	if (now < space->next_open_ns || !identity.weights) {
		return KVC_ERR_UNREACHABLE;
	}
	identity.device = worker->mems[ref.mem];
	status = kvc_space_open_start(worker->kvc, &identity, &space->space);
	if (status != KVC_OK) {
		space->next_open_ns = now + RETRY_NS;
		return status;
	}

	return KVC_PENDING;
}

kvc_status_t kvx_wspace_get(kvx_worker_t *worker, kvx_wspace_ref_t ref, uint64_t now, const kvx_wspace_t **p_space)
{
	kvx_wspace_t *space;
	kvc_status_t status;

	if (ref.number >= KVX_WORKER_SPACES || ref.mem >= KVX_MEMS || (ref.number > 0 && !worker->names[ref.number]) ||
	    (ref.mem != KVX_HOST_MEM && !worker->mems[ref.mem])) {
		return KVC_ERR_ARG;
	}
	space = &worker->spaces[ref.mem][ref.number];
	if (kvc_incarnation(worker->kvc) == 0) {
		return KVC_ERR_CLOSED;
	}
	if (!space->space) {
		return start_open(worker, ref, now);
	}
	status = kvc_space_state(space->space);
	if (status == KVC_OK) {
		status = learn_layout(worker, space);
	}
	if (status == KVC_OK) {
		*p_space = space;
	}

	return status;
}

/* A refused space is requested again after a pause; a job may hold one that was open before. A daemon may have no GPU
 * memory: that is no news. */
static void poll_space(kvx_worker_t *worker, kvx_wspace_ref_t ref, uint64_t now)
{
	kvx_wspace_t *space = &worker->spaces[ref.mem][ref.number];
	const kvx_wspace_t *unused;
	const kvc_status_t status = kvx_wspace_get(worker, ref, now, &unused);

	if (!space->space || space->known || status >= 0) {
		return;
	}
	if (ref.mem == KVX_HOST_MEM) {
		kv_log(KV_LOG_WARN, "kvx", "space %u cannot be opened, all of it is a miss: %s", ref.number,
		       kvc_status_text(status));
	}
	kvc_space_close(space->space);
	space->space = NULL;
	space->next_open_ns = now + (ref.mem == KVX_HOST_MEM ? RETRY_NS : DEVICE_RETRY_NS);
}

/* All slabs there could be mapped, and there are some. Another engine's GPU may be out of reach. */
static int is_mapped(const kvx_worker_t *worker, uint32_t mem)
{
	kvc_device_t device = {.struct_size = sizeof device};

	for (uint32_t i = 0; kvc_device(worker->kvc, i, &device) == KVC_OK; i++) {
		if (strcmp(device.name, worker->mems[mem]) == 0) {
			return device.mapped > 0 && device.unmapped == 0;
		}
	}

	return 0;
}

/* Of another engine's GPU spaces are opened when its memory can be mapped, or by a load of a hand-over. */
static void poll_mem(kvx_worker_t *worker, uint32_t mem, uint64_t now)
{
	const int mapped = mem > KVX_OWN_MEM && is_mapped(worker, mem);

	for (uint32_t i = 0; i < worker->space_top; i++) {
		if (mem <= KVX_OWN_MEM || mapped || worker->spaces[mem][i].space) {
			poll_space(worker, (kvx_wspace_ref_t){i, mem}, now);
		}
	}
	if (mapped && worker->spaces[mem][0].known) {
		atomic_fetch_or(&worker->reached, 1u << mem);
	}
}

void kvx_wspaces_poll(kvx_worker_t *worker, uint64_t now)
{
	if (kvc_incarnation(worker->kvc) == 0) {
		return;
	}
	for (uint32_t mem = KVX_HOST_MEM; mem < KVX_MEMS; mem++) {
		if (mem == KVX_HOST_MEM || worker->mems[mem]) {
			poll_mem(worker, mem, now);
		}
	}
}

void kvx_wspaces_close(kvx_worker_t *worker)
{
	for (uint32_t i = 0; i < worker->space_top; i++) {
		close_number(worker, i);
	}
	for (uint32_t mem = 0; mem < KVX_MEMS; mem++) {
		free(worker->mems[mem]);
		worker->mems[mem] = NULL;
	}
}

int kvx_daemon_is_silent(const kvx_worker_t *worker)
{
	const kvx_wspace_t *base = &worker->spaces[KVX_HOST_MEM][0];
	uint32_t why;

	if (kvc_incarnation(worker->kvc) == 0) {
		return 1;
	}
	if (!base->known) {
		return 0;
	}
	why = kvx_miss_reason(base->space);

	return why == KV_WHY_DAEMON_STALE || why == KV_WHY_NO_DAEMON;
}
