/* Spaces: the base model's, and one for each adapter that is used, of each name the weights have had (docs/decisions/
 * 071); with each of them others in memory of GPUs, if the daemon has such memory (docs/decisions/057, 058, 062). */
#include "scheduler/names/spaces.h"
#include "common/await.h"
#include "scheduler/base/requests.h"

#include "kv/log.h"

#define NAMELESS      "not known yet" /* in the place of a name of weights */
#define RETRY_NS      (500u * KVX_MS)
#define DEVICE_NS     (2000u * KVX_MS)  /* before the space in GPU memory is asked for again */
#define PAUSE_NS      (60000u * KVX_MS) /* after a rank could not use it; twice as long each time, */
#define PAUSE_MAX_NS  (60u * PAUSE_NS)  /* up to this */
#define BRIEF_NS      KVX_MS            /* within this time a wait is short, so the processor stays awake */
#define LONG_SLICE_US 1000u             /* later waits are longer */

static void log_rarely(kvx_scheduler_t *scheduler, uint64_t now, const char *sentence)
{
	if (now >= scheduler->next_log_ns) {
		kv_log(KV_LOG_WARN, "kvx", "%s", sentence);
		scheduler->next_log_ns = now + 10000u * KVX_MS;
	}
}

static char *copy_text(const kvx_scheduler_t *scheduler, const char *text, size_t len)
{
	char *copy = kv_alloc(scheduler->env, len + 1u);

	if (copy) {
		memcpy(copy, text, len);
	}

	return copy;
}

/* Set it once, to a copy of the text. */
static kvc_status_t set_text(const kvx_scheduler_t *scheduler, _Atomic(char *) *p_text, const char *text, size_t len)
{
	char *none = NULL, *copy = copy_text(scheduler, text, len);

	if (!copy) {
		return KVC_ERR_NOMEM;
	}
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

	return len == 0 || len > KVX_DEVICE_MAX ? KVC_ERR_ARG
						: set_text(scheduler, &scheduler->mems[KVX_OWN_MEM].device, uuid, len);
}

static kvc_identity_t identity_of(const kvx_scheduler_t *scheduler, const kvx_sspace_t *space)
{
	kvc_identity_t identity = scheduler->identity;

	identity.weights = space->weights;
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

/* ---- by name --------------------------------------------------------------------------------- */

static int are_equal(const char *a, const char *b)
{
	return a == b || (a && b && strcmp(a, b) == 0);
}

static void close_space(kvx_scheduler_t *scheduler, kvx_sspace_t *space)
{
	kvc_space_close(space->space);
	for (uint32_t mem = KVX_OWN_MEM; mem < KVX_MEMS; mem++) {
		kvc_space_close(space->mems[mem].space);
	}
	kv_free(scheduler->env, space->weights);
	kv_free(scheduler->env, space->adapter);
	*space = (kvx_sspace_t){.closes = space->closes + 1u};
}

/* Numbers that something in progress has. Not number 0 either, whose space shows whether the daemon is alive. */
static void mark_used(const kvx_scheduler_t *scheduler, uint8_t used[KVX_SPACES_MAX + 1u])
{
	/* UINT32_MAX is none. */
#define MARK(number) used[(number) < KVX_SPACES_MAX ? (number) : KVX_SPACES_MAX] = 1
	MARK(0);
	MARK(scheduler->base);
	MARK(scheduler->nameless);
	for (const kvx_sload_t *load = scheduler->loads; load; load = load->next) {
		MARK(load->space);
	}
	for (const kvx_sput_t *put = scheduler->puts; put; put = put->next) {
		MARK(put->space);
	}
	for (const kvx_shandover_t *h = scheduler->handovers; h; h = h->next) {
		MARK(h->space);
	}
	for (const kvx_request_t *request = NULL; (request = kvx_requests_next(&scheduler->requests, request));) {
		MARK(request->space);
	}
#undef MARK
}

/* A number that nothing has, the one whose last use was the longest ago. UINT32_MAX: none. Blocks that may have to be
 * taken back name their space until the weights are proved again: when no other is left, that is due. */
static uint32_t find_number(kvx_scheduler_t *scheduler)
{
	uint8_t used[KVX_SPACES_MAX + 1u] = {0};
	uint32_t oldest = UINT32_MAX, idle = 0;

	if (scheduler->space_count < KVX_SPACES_MAX) {
		return scheduler->space_count++;
	}
	mark_used(scheduler, used);
	for (uint32_t i = 0; i < KVX_SPACES_MAX; i++) {
		idle += !used[i];
	}
	for (uint32_t i = 0; i < scheduler->stored.n; i++) {
		used[scheduler->stored.at[i].space] = 1;
	}
	for (uint32_t i = 0; i < KVX_SPACES_MAX; i++) {
		const uint64_t use = scheduler->spaces[i].used;

		oldest = !used[i] && (oldest == UINT32_MAX || use < scheduler->spaces[oldest].used) ? i : oldest;
	}
	scheduler->stored.full |= idle > 0 && oldest == UINT32_MAX;
	if (oldest != UINT32_MAX) {
		close_space(scheduler, &scheduler->spaces[oldest]);
	}

	return oldest;
}

/* `adapter` NULL: the base model's. */
static uint32_t add_space(kvx_scheduler_t *scheduler, const char *adapter, size_t len, uint64_t hash)
{
	char *name = copy_text(scheduler, scheduler->weights, strlen(scheduler->weights));
	char *copy = adapter ? copy_text(scheduler, adapter, len) : NULL;
	const uint32_t number = name && (!adapter || copy) ? find_number(scheduler) : UINT32_MAX;
	kvx_sspace_t *space;

	if (number == UINT32_MAX) {
		kv_free(scheduler->env, name);
		kv_free(scheduler->env, copy);
		return number;
	}
	space = &scheduler->spaces[number];
	space->weights = name;
	space->adapter = copy;
	space->hash = hash;
	space->used = ++scheduler->space_uses;
	if (scheduler->incarnation) {
		start_open(scheduler, space, kv_now_ns(scheduler->env));
	}

	return number;
}

/* Of the weights' name and the adapter's. */
static uint64_t hash_names(const kvx_scheduler_t *scheduler, const char *adapter)
{
	const uint32_t len = (uint32_t)strlen(scheduler->weights);
	const uint64_t hash = kvx_requests_hash(&scheduler->requests, scheduler->weights, len);

	return adapter ? hash * 3u ^ kvx_requests_hash(&scheduler->requests, adapter, (uint32_t)strlen(adapter)) : hash;
}

uint32_t kvx_space_of_name(kvx_scheduler_t *scheduler, const char *adapter)
{
	const size_t len = adapter ? strnlen(adapter, KVX_ADAPTER_MAX + 1u) : 0;
	const int sound = !adapter || (len > 0 && len <= KVX_ADAPTER_MAX);
	const uint64_t hash = sound ? hash_names(scheduler, adapter) : 0;
	uint32_t number = UINT32_MAX;

	for (uint32_t i = 0; sound && i < scheduler->space_count; i++) {
		kvx_sspace_t *space = &scheduler->spaces[i];

		if (space->hash == hash && are_equal(space->weights, scheduler->weights) &&
		    are_equal(space->adapter, adapter)) {
			space->used = ++scheduler->space_uses;
			return i;
		}
	}
	if (sound) {
		number = add_space(scheduler, adapter, len, hash);
	}
	if (number == UINT32_MAX) {
		log_rarely(
			scheduler, kv_now_ns(scheduler->env),
			"too many adapters in use, one whose files are still digested or reloaded in place, or a name too "
			"long: its requests are neither loaded nor saved");
	}

	return number;
}

kvc_status_t kvx_space_take_first_name(kvx_scheduler_t *scheduler)
{
	kvx_sspace_t *space = &scheduler->spaces[0];

	space->weights = copy_text(scheduler, scheduler->weights, strlen(scheduler->weights));
	space->hash = hash_names(scheduler, NULL);

	return space->weights ? KVC_OK : KVC_ERR_NOMEM;
}

uint32_t kvx_space_find_or_add(kvx_scheduler_t *scheduler, const kvx_ask_t *ask)
{
	uint32_t number;

	if (!ask->lora || !scheduler->adopted) {
		return ask->lora ? UINT32_MAX : scheduler->base;
	}
	number = kvx_space_of_name(scheduler, ask->lora);
	scheduler->stats.spaces_refused += number == UINT32_MAX;

	return number;
}

uint32_t kvx_space_nameless(kvx_scheduler_t *scheduler)
{
	kvx_sspace_t *space;

	if (scheduler->nameless == UINT32_MAX) {
		scheduler->nameless = find_number(scheduler);
	}
	space = scheduler->nameless != UINT32_MAX ? &scheduler->spaces[scheduler->nameless] : NULL;
	if (space && !space->weights) {
		space->weights = copy_text(scheduler, NAMELESS, sizeof NAMELESS - 1u);
		space->emitted = 1; /* no block is of it */
	}

	return scheduler->nameless;
}

/* Its number in the daemon is needed while a hand-over is in it. */
static void poll_nameless(kvx_scheduler_t *scheduler)
{
	const kvx_shandover_t *h = scheduler->handovers;

	while (h && h->space != scheduler->nameless) {
		h = h->next;
	}
	if (!h && scheduler->nameless != UINT32_MAX && scheduler->spaces[scheduler->nameless].weights) {
		close_space(scheduler, &scheduler->spaces[scheduler->nameless]);
	}
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

static const char *device_of(const kvx_scheduler_t *scheduler, uint32_t mem)
{
	return atomic_load_explicit(&scheduler->mems[mem].device, memory_order_acquire);
}

/* Open it, or process the answer. A daemon without such memory is no news. */
static void poll_gpu_mem(kvx_scheduler_t *scheduler, kvx_sspace_t *space, uint32_t mem, uint64_t now)
{
	kvx_smem_space_t *there = &space->mems[mem];
	kvc_identity_t identity = identity_of(scheduler, space);
	kvc_status_t status;

	if (now < there->retry_ns) {
		return;
	}
	identity.device = device_of(scheduler, mem);
	if (!there->space && kvc_space_open_start(scheduler->kvc, &identity, &there->space) != KVC_OK) {
		there->space = NULL;
		there->retry_ns = now + DEVICE_NS;
		return;
	}
	status = kvc_space_state(there->space);
	if (status == KVC_OK) {
		there->named = 1;
		there->open = 1;
	} else if (status != KVC_PENDING && !there->named) {
		kvc_space_close(there->space);
		there->space = NULL;
		there->retry_ns = now + DEVICE_NS;
	}
}

static void poll_mems(kvx_scheduler_t *scheduler, kvx_sspace_t *space, uint64_t now)
{
	for (uint32_t mem = KVX_OWN_MEM; mem < KVX_MEMS; mem++) {
		if (device_of(scheduler, mem) && !space->mems[mem].open &&
		    (mem == KVX_OWN_MEM || scheduler->mems[mem].offered || space->mems[mem].wanted)) {
			poll_gpu_mem(scheduler, space, mem, now);
		}
	}
}

uint32_t kvx_mem_find_or_add(kvx_scheduler_t *scheduler, const char *uuid)
{
	const size_t len = strnlen(uuid, KVX_DEVICE_MAX + 1u);
	uint32_t free_mem = KVX_HOST_MEM;

	if (!scheduler->foreign || len == 0 || len > KVX_DEVICE_MAX) {
		return KVX_HOST_MEM;
	}
	for (uint32_t mem = KVX_MEMS - 1u; mem >= KVX_OWN_MEM; mem--) {
		const char *text = device_of(scheduler, mem);

		if (text && strcmp(text, uuid) == 0) {
			return mem;
		}
		free_mem = !text && mem > KVX_OWN_MEM ? mem : free_mem;
	}

	return free_mem != KVX_HOST_MEM && set_text(scheduler, &scheduler->mems[free_mem].device, uuid, len) == KVC_OK
		       ? free_mem
		       : KVX_HOST_MEM;
}

/* GPUs whose memory the daemon has, for an engine that uses memory of its own. */
static void find_gpu_mems(kvx_scheduler_t *scheduler)
{
	kvc_device_t device = {.struct_size = sizeof device};

	while (device_of(scheduler, KVX_OWN_MEM) &&
	       kvc_device(scheduler->kvc, scheduler->device_count, &device) == KVC_OK) {
		scheduler->mems[kvx_mem_find_or_add(scheduler, device.name)].offered = 1;
		scheduler->device_count++;
	}
}

void kvx_mem_want(kvx_scheduler_t *scheduler, uint32_t number, uint32_t mem)
{
	kvx_sspace_t *space = &scheduler->spaces[number];

	space->mems[mem].wanted = 1;
	if (scheduler->incarnation && space->open && !space->mems[mem].open) {
		poll_gpu_mem(scheduler, space, mem, kv_now_ns(scheduler->env));
	}
}

int kvx_mem_is_open(const kvx_scheduler_t *scheduler, uint32_t number, uint32_t mem)
{
	return number < scheduler->space_count && scheduler->spaces[number].mems[mem].open;
}

int kvx_mem_is_usable(const kvx_scheduler_t *scheduler, uint32_t number, uint32_t mem)
{
	return kvx_mem_is_open(scheduler, number, mem) && kv_now_ns(scheduler->env) >= scheduler->mems[mem].off_ns;
}

int kvx_mem_is_reached(const kvx_scheduler_t *scheduler, uint32_t number, uint32_t mem)
{
	return (mem == KVX_OWN_MEM || scheduler->mems[mem].ranks >= scheduler->writer_count) &&
	       kvx_mem_is_usable(scheduler, number, mem);
}

void kvx_device_take_reached(kvx_scheduler_t *scheduler, const kvx_report_reached_t *report)
{
	scheduler->mems[report->mem].ranks++;
}

void kvx_mem_pause(kvx_scheduler_t *scheduler, uint32_t mem)
{
	const uint64_t now = kv_now_ns(scheduler->env);
	kvx_smem_t *at = &scheduler->mems[mem];

	if (now < at->off_ns) {
		return; /* a load of before */
	}
	log_rarely(scheduler, now, "a rank cannot use a space in GPU memory: it is left alone for a minute or more");
	at->pause_ns = at->pause_ns ? at->pause_ns * 2u : PAUSE_NS;
	at->pause_ns = at->pause_ns < PAUSE_MAX_NS ? at->pause_ns : PAUSE_MAX_NS;
	at->off_ns = now + at->pause_ns;
}

/* ---- all of them ----------------------------------------------------------------------------- */

void kvx_spaces_poll(kvx_scheduler_t *scheduler, uint64_t now)
{
	const uint64_t incarnation = kvc_incarnation(scheduler->kvc);

	if (incarnation != scheduler->incarnation) {
		scheduler->stats.attaches += incarnation != 0;
		scheduler->incarnation = incarnation;
		scheduler->generation++;
		scheduler->device_count = 0;
		for (uint32_t mem = 0; mem < KVX_MEMS; mem++) {
			scheduler->mems[mem].offered = 0;
		}
	}
	if (!incarnation) {
		return;
	}
	find_gpu_mems(scheduler);
	poll_nameless(scheduler);
	for (uint32_t i = 0; i < scheduler->space_count; i++) {
		if (!scheduler->spaces[i].open) {
			poll_space(scheduler, &scheduler->spaces[i], now);
		} else if (i != scheduler->nameless) {
			poll_mems(scheduler, &scheduler->spaces[i], now);
		}
	}
}

/* The ranks learn a GPU when there is a space in its memory. */
static void emit_gpu_mem(kvx_scheduler_t *scheduler, uint32_t mem)
{
	const char *text = device_of(scheduler, mem);
	const size_t len = text ? strlen(text) : 0;
	kvx_msg_gpu_mem_t *record;
	uint32_t i = 0;

	while (i < scheduler->space_count && !scheduler->spaces[i].mems[mem].open) {
		i++;
	}
	if (i == scheduler->space_count || scheduler->mems[mem].emitted ||
	    !kvx_message_reserve(scheduler, sizeof *record + len + 8u)) {
		return;
	}
	record = kvx_msg_add_record(&scheduler->message, KVX_RECORD_GPU_MEM, sizeof *record);
	record->mem = mem;
	record->text_len = (uint32_t)len;
	kvx_msg_append(&scheduler->message, text, len);
	scheduler->mems[mem].emitted = 1;
}

/* The ranks learn what a number stands for before a record uses it. */
void kvx_spaces_emit(kvx_scheduler_t *scheduler)
{
	for (uint32_t i = 0; i < scheduler->space_count; i++) {
		kvx_sspace_t *space = &scheduler->spaces[i];
		const size_t weights = space->weights && !space->emitted ? strlen(space->weights) : 0;
		const size_t adapter = space->adapter ? strlen(space->adapter) : 0;
		kvx_msg_space_t *record;

		if (weights == 0 || !kvx_message_reserve(scheduler, sizeof *record + weights + adapter + 16u)) {
			continue;
		}
		record = kvx_msg_add_record(&scheduler->message, KVX_RECORD_SPACE, sizeof *record);
		record->number = i;
		record->weights_len = (uint32_t)weights;
		record->adapter_len = (uint32_t)adapter;
		kvx_msg_append(&scheduler->message, space->weights, weights);
		kvx_msg_append(&scheduler->message, space->adapter, adapter);
		space->emitted = 1;
	}
	for (uint32_t mem = KVX_OWN_MEM; mem < KVX_MEMS; mem++) {
		emit_gpu_mem(scheduler, mem);
	}
}

void kvx_spaces_close(kvx_scheduler_t *scheduler)
{
	for (uint32_t i = 0; scheduler->spaces && i < scheduler->space_count; i++) {
		close_space(scheduler, &scheduler->spaces[i]);
	}
}
