/* Spaces: the base model's, and one for each adapter that is used; with each of them a second one in GPU memory, if the
 * daemon has such memory (docs/decisions/057). */
#include "scheduler/spaces.h"
#include "common/await.h"

#include "kv/log.h"

#define RETRY_NS      (500u * KVX_MS)
#define DEVICE_NS     (2000u * KVX_MS)  /* before the space in GPU memory is asked for again */
#define PAUSE_NS      (60000u * KVX_MS) /* after a rank could not use it */
#define BRIEF_NS      KVX_MS            /* within this time a wait is short, so the processor stays awake */
#define LONG_SLICE_US 1000u             /* later waits are longer */

static void log_rarely(kvx_scheduler_t *scheduler, uint64_t now, const char *sentence)
{
	if (now >= scheduler->next_log_ns) {
		kv_log(KV_LOG_WARN, "kvx", "%s", sentence);
		scheduler->next_log_ns = now + 10000u * KVX_MS;
	}
}

const char *kvx_weights_text(const kvx_scheduler_t *scheduler)
{
	return scheduler->identity.weights ? scheduler->identity.weights
					   : atomic_load_explicit(&scheduler->weights, memory_order_acquire);
}

/* Set it once, to a copy of the text. */
static kvc_status_t set_text(const kvx_scheduler_t *scheduler, _Atomic(char *) *p_text, const char *text, size_t len)
{
	char *none = NULL, *copy = kv_alloc(scheduler->env, len + 1u);

	if (!copy) {
		return KVC_ERR_NOMEM;
	}
	memcpy(copy, text, len);
	if (!atomic_compare_exchange_strong(p_text, &none, copy)) {
		kv_free(scheduler->env, copy);
		return KVC_ERR_ARG;
	}

	return KVC_OK;
}

kvc_status_t kvx_scheduler_set_device(kvx_scheduler_t *scheduler, const char *uuid)
{
	const size_t len = uuid ? strnlen(uuid, KVX_DEVICE_MAX + 1u) : 0;

	if (!scheduler->foreign) {
		return KVC_ERR_UNSUPPORTED;
	}

	return len == 0 || len > KVX_DEVICE_MAX ? KVC_ERR_ARG : set_text(scheduler, &scheduler->device, uuid, len);
}

kvc_status_t kvx_scheduler_set_weights(kvx_scheduler_t *scheduler, const char *text)
{
	const size_t len = text ? strnlen(text, KVX_WEIGHTS_MAX + 1u) : 0;

	if (len == 0 || len > KVX_WEIGHTS_MAX || scheduler->identity.weights) {
		return KVC_ERR_ARG;
	}

	return set_text(scheduler, &scheduler->weights, text, len);
}

static kvc_identity_t identity_of(const kvx_scheduler_t *scheduler, const kvx_sspace_t *space)
{
	kvc_identity_t identity = scheduler->identity;

	identity.weights = kvx_weights_text(scheduler);
	if (space->adapter) {
		identity.lora = space->adapter;
	}

	return identity;
}

static void start_open(kvx_scheduler_t *scheduler, kvx_sspace_t *space, uint64_t now)
{
	const kvc_identity_t identity = identity_of(scheduler, space);

	if (!identity.weights) {
		return;
	}
	if (kvc_space_open_start(scheduler->kvc, &identity, &space->space) != KVC_OK) {
		space->space = NULL;
		space->retry_ns = now + RETRY_NS;
		log_rarely(scheduler, now, kvc_last_error());
	}
}

static uint32_t add_space(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, uint32_t len, uint64_t hash)
{
	kvx_sspace_t *space = &scheduler->spaces[scheduler->space_count];

	if (scheduler->space_count == KVX_SPACES_MAX || len == 0 || len > KVX_ADAPTER_MAX) {
		scheduler->stats.spaces_refused++;
		log_rarely(scheduler, kv_now_ns(scheduler->env),
			   "too many adapters, one whose files are still digested or reloaded in place, or a name too "
			   "long: its requests are neither loaded nor saved");
		return UINT32_MAX;
	}
	space->adapter = kv_alloc(scheduler->env, len + 1u);
	if (!space->adapter) {
		return UINT32_MAX;
	}
	memcpy(space->adapter, ask->lora, len);
	space->hash = hash;
	if (scheduler->incarnation) {
		start_open(scheduler, space, kv_now_ns(scheduler->env));
	}

	return scheduler->space_count++;
}

uint32_t kvx_space_find_or_add(kvx_scheduler_t *scheduler, const kvx_ask_t *ask)
{
	uint32_t len;
	uint64_t hash;

	if (!ask->lora) {
		return 0;
	}
	len = (uint32_t)strnlen(ask->lora, KVX_ADAPTER_MAX + 1u);
	hash = kvx_requests_hash(&scheduler->requests, ask->lora, len);
	for (uint32_t i = 1; i < scheduler->space_count; i++) {
		const kvx_sspace_t *space = &scheduler->spaces[i];

		if (space->hash == hash && strcmp(space->adapter, ask->lora) == 0) {
			return i;
		}
	}

	return add_space(scheduler, ask, len, hash);
}

uint32_t kvx_space_miss_reason(const kvx_scheduler_t *scheduler, uint32_t number)
{
	return number >= scheduler->space_count || !scheduler->spaces[number].open
		       ? KV_WHY_NO_DAEMON
		       : kvx_miss_reason(scheduler->spaces[number].space);
}

int kvx_daemon_is_alive(const kvx_scheduler_t *scheduler)
{
	const uint32_t why = kvx_space_miss_reason(scheduler, 0);

	return why != KV_WHY_NO_DAEMON && why != KV_WHY_DAEMON_STALE;
}

int kvx_scheduler_await_daemon(kvx_scheduler_t *scheduler, uint64_t since, uint64_t until)
{
	const uint64_t start = kv_now_ns(scheduler->env), left = start < until ? (until - start) / 1000u : 0;
	const uint32_t slice = start < since + BRIEF_NS ? KVX_SLICE_US : LONG_SLICE_US;
	const int more = start < until && kvc_await_us(scheduler->kvc, left < slice ? (uint32_t)left : slice) == KVC_OK;

	scheduler->stats.wait_ns += kv_now_ns(scheduler->env) - start;

	return more;
}

/* Open it, or process the answer. */
static void poll_space(kvx_scheduler_t *scheduler, kvx_sspace_t *space, uint64_t now)
{
	kvc_status_t status;

	if (!space->space) {
		if (now >= space->retry_ns) {
			start_open(scheduler, space, now);
		}
		return;
	}
	status = kvc_space_state(space->space);
	if (status == KVC_OK) {
		space->open = 1;
	} else if (status != KVC_PENDING) {
		log_rarely(scheduler, now, "a space cannot be opened: all in it is a miss");
		kvc_space_close(space->space);
		space->space = NULL;
		space->closes++;
		space->retry_ns = now + RETRY_NS;
	}
}

/* ---- in GPU memory --------------------------------------------------------------------------- */

/* Open it, or process the answer. A daemon without such memory is no news. */
static void poll_device(kvx_scheduler_t *scheduler, kvx_sspace_t *space, uint64_t now)
{
	kvc_identity_t identity = identity_of(scheduler, space);
	kvc_status_t status;

	if (now < space->device_retry_ns) {
		return;
	}
	identity.device = atomic_load_explicit(&scheduler->device, memory_order_acquire);
	if (!space->device && kvc_space_open_start(scheduler->kvc, &identity, &space->device) != KVC_OK) {
		space->device = NULL;
		space->device_retry_ns = now + DEVICE_NS;
		return;
	}
	status = kvc_space_state(space->device);
	if (status == KVC_OK && space->device_must_reset) {
		space->device_must_reset = kvc_space_reset(space->device) != KVC_OK;
		space->device_retry_ns = space->device_must_reset ? now + DEVICE_NS : 0;
	}
	if (status == KVC_OK) {
		space->device_named = 1;
		space->device_open = !space->device_must_reset;
	} else if (status != KVC_PENDING && !space->device_named) {
		kvc_space_close(space->device);
		space->device = NULL;
		space->device_retry_ns = now + DEVICE_NS;
	}
}

int kvx_device_is_usable(const kvx_scheduler_t *scheduler, uint32_t number)
{
	return number < scheduler->space_count && scheduler->spaces[number].device_open &&
	       kv_now_ns(scheduler->env) >= scheduler->device_off_ns;
}

void kvx_device_pause(kvx_scheduler_t *scheduler)
{
	const uint64_t now = kv_now_ns(scheduler->env);

	log_rarely(scheduler, now, "a rank cannot use the space in GPU memory: it is left alone for a minute");
	scheduler->device_off_ns = now + PAUSE_NS;
}

void kvx_device_reset(kvx_scheduler_t *scheduler)
{
	for (uint32_t i = 0; i < scheduler->space_count; i++) {
		kvx_sspace_t *space = &scheduler->spaces[i];
		const int open = space->device_open;

		space->device_must_reset = 1;
		space->device_open = 0;
		space->device_retry_ns = open ? 0 : space->device_retry_ns;
		if (open) {
			poll_device(scheduler, space, kv_now_ns(scheduler->env));
		}
	}
}

/* ---- all of them ----------------------------------------------------------------------------- */

void kvx_spaces_poll(kvx_scheduler_t *scheduler, uint64_t now)
{
	const uint64_t incarnation = kvc_incarnation(scheduler->kvc);
	const int has_device = atomic_load_explicit(&scheduler->device, memory_order_relaxed) != NULL;

	if (incarnation != scheduler->incarnation) {
		scheduler->stats.attaches += incarnation != 0;
		scheduler->incarnation = incarnation;
		scheduler->generation++;
	}
	if (!incarnation) {
		return;
	}
	for (uint32_t i = 0; i < scheduler->space_count; i++) {
		if (!scheduler->spaces[i].open) {
			poll_space(scheduler, &scheduler->spaces[i], now);
		} else if (!scheduler->spaces[i].device_open && has_device) {
			poll_device(scheduler, &scheduler->spaces[i], now);
		}
	}
}

/* The ranks learn the GPU when there is a space in its memory. */
static void emit_device(kvx_scheduler_t *scheduler)
{
	const char *text = atomic_load_explicit(&scheduler->device, memory_order_acquire);
	const size_t len = text ? strlen(text) : 0;
	kvx_msg_device_t *record;
	uint32_t i = 0;

	while (i < scheduler->space_count && !scheduler->spaces[i].device_open) {
		i++;
	}
	if (i == scheduler->space_count || scheduler->device_emitted ||
	    !kvx_message_reserve(scheduler, sizeof *record + len + 8u)) {
		return;
	}
	record = kvx_msg_add_record(&scheduler->message, KVX_RECORD_DEVICE, sizeof *record);
	record->text_len = (uint32_t)len;
	kvx_msg_append(&scheduler->message, text, len);
	scheduler->device_emitted = 1;
}

/* The ranks learn the number of an adapter, and what names the weights, before a record uses the space. */
void kvx_spaces_emit(kvx_scheduler_t *scheduler)
{
	for (uint32_t i = 0; i < scheduler->space_count; i++) {
		kvx_sspace_t *space = &scheduler->spaces[i];
		const char *text = i == 0 ? kvx_weights_text(scheduler) : space->adapter;
		const size_t len = text && !space->emitted ? strlen(text) : 0;
		kvx_msg_space_t *record;

		if (len == 0 || !kvx_message_reserve(scheduler, sizeof *record + len + 8u)) {
			continue;
		}
		record = kvx_msg_add_record(&scheduler->message, KVX_RECORD_SPACE, sizeof *record);
		record->number = i;
		record->text_len = (uint32_t)len;
		kvx_msg_append(&scheduler->message, text, len);
		space->emitted = 1;
	}
	emit_device(scheduler);
}

void kvx_spaces_close(kvx_scheduler_t *scheduler)
{
	for (uint32_t i = 0; scheduler->spaces && i < scheduler->space_count; i++) {
		kvc_space_close(scheduler->spaces[i].space);
		kvc_space_close(scheduler->spaces[i].device);
		kv_free(scheduler->env, scheduler->spaces[i].adapter);
	}
}
