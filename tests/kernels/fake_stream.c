/* Streams of the fake driver: queues whose heads run in any order, as long as waits allow it. */
#include "fake_cuda_internal.h"

#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>

#define TRACE_LINES 4096u
#define TRACE_BYTES 96u

/* ---- trace ----------------------------------------------------------------------------------- */

static struct {
	pthread_mutex_t lock;
	uint64_t count; /* of lines ever written */
	char lines[TRACE_LINES][TRACE_BYTES];
} trace = {.lock = PTHREAD_MUTEX_INITIALIZER};

void fake_cuda_trace(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	pthread_mutex_lock(&trace.lock);
	(void)vsnprintf(trace.lines[trace.count++ % TRACE_LINES], TRACE_BYTES, format, args);
	pthread_mutex_unlock(&trace.lock);
	va_end(args);
}

void fake_cuda_print_trace(void)
{
	pthread_mutex_lock(&trace.lock);
	for (uint64_t i = trace.count > TRACE_LINES ? trace.count - TRACE_LINES : 0; i < trace.count; i++) {
		printf("# %s\n", trace.lines[i % TRACE_LINES]);
	}
	pthread_mutex_unlock(&trace.lock);
}

/* ---- work ------------------------------------------------------------------------------------ */

fake_work_t *fake_work(fake_what_t what)
{
	fake_work_t *work = calloc(1, sizeof *work);

	work->what = what;

	return work;
}

static void unmark(fake_marker_t *marker)
{
	if (marker && --marker->users == 0) {
		free(marker);
	}
}

void fake_mark(fake_work_t *work, fake_event_t *event, int fresh)
{
	pthread_mutex_lock(&fake.lock);
	if (fresh) {
		unmark(event->latest);
		event->latest = calloc(1, sizeof *event->latest);
		event->latest->users = 1;
	}
	work->marker = event->latest;
	if (work->marker) {
		work->marker->users++;
	}
	pthread_mutex_unlock(&fake.lock);
}

void fake_forget(fake_event_t *event)
{
	unmark(event->latest);
	free(event);
}

static void run_copy(const fake_piece_t *piece)
{
	void *dst = fake_resolve(piece->dst, piece->bytes);
	const void *src = fake_resolve(piece->src, piece->bytes);

	if (dst && src) {
		memcpy(dst, src, piece->bytes);
	}
	atomic_fetch_add(&fake.clock, fake.engine_cost * piece->bytes);
}

static void run_batch(const fake_work_t *work)
{
	const size_t first = kv_test_below(&fake.rng, work->count);

	for (size_t i = 0; i < work->count; i++) {
		run_copy(&work->pieces[(first + i) % work->count]);
	}
}

/* Run the head of a stream; 0: there is none, or it waits. */
static int run_one(fake_stream_t *stream)
{
	fake_work_t *work = stream->first;

	if (!work || stream->stalled || (work->what == FAKE_WAIT && work->marker && !work->marker->done)) {
		return 0;
	}
	if (fake.held == 2 && work->what != FAKE_RECORD && work->what != FAKE_WAIT) {
		return 0;
	}
	stream->first = work->next;
	switch (work->what) {
	case FAKE_COPY:
		run_copy(&work->piece);
		break;
	case FAKE_BATCH:
		run_batch(work);
		break;
	case FAKE_LAUNCH:
		fake_kernel(work);
		break;
	case FAKE_CALL:
		work->call(work->call_args);
		free(work->call_args);
		break;
	case FAKE_RECORD:
		fake_cuda_trace("stream %u: event %p", work->stream, (void *)work->marker);
		work->marker->done = 1;
		work->marker->at = atomic_load(&fake.clock);
		break;
	case FAKE_WAIT:
		fake_cuda_trace("stream %u: has waited for event %p", work->stream, (void *)work->marker);
		break;
	}
	unmark(work->marker);
	free(work->pieces);
	free(work);

	return 1;
}

void fake_run_all(void)
{
	int ran = 1;

	while (ran) {
		ran = 0;
		for (uint32_t i = 0; i < FAKE_STREAMS; i++) {
			while (run_one(&fake.streams[i])) {
				ran = 1;
			}
		}
	}
}

/* Some heads of some streams. */
static void run_some(void)
{
	const uint64_t steps = kv_test_below(&fake.rng, 6);

	for (uint64_t i = 0; i < steps; i++) {
		const uint64_t from = kv_test_below(&fake.rng, FAKE_STREAMS);

		for (uint32_t k = 0; k < FAKE_STREAMS && !run_one(&fake.streams[(from + k) % FAKE_STREAMS]); k++) {
		}
	}
}

/* ---- captures -------------------------------------------------------------------------------- */

static fake_stream_t *stream_of(kvk_cu_stream_t handle)
{
	return handle ? (fake_stream_t *)(void *)handle : &fake.streams[0];
}

void fake_invalidate(const char *what)
{
	fake_fault(what);
	pthread_mutex_lock(&fake.lock);
	fake.capture.invalid = 1;
	pthread_mutex_unlock(&fake.lock);
}

int fake_check_capture(int thread_mode)
{
	int does;

	pthread_mutex_lock(&fake.lock);
	does = fake.capture.number && fake.capture.mode == 0 && thread_mode != 2;
	pthread_mutex_unlock(&fake.lock);
	if (does) {
		fake_invalidate("a call that is not to be made while something is captured");
	}

	return does;
}

int fake_is_capturing(kvk_cu_stream_t handle)
{
	int status;

	pthread_mutex_lock(&fake.lock);
	status = !stream_of(handle)->capture ? 0 : fake.capture.invalid ? 2 : 1;
	pthread_mutex_unlock(&fake.lock);

	return status;
}

int fake_record(kvk_cu_stream_t handle, fake_event_t *event)
{
	fake_work_t *work;
	uint32_t capture;

	pthread_mutex_lock(&fake.lock);
	capture = event->capture = stream_of(handle)->capture;
	pthread_mutex_unlock(&fake.lock);
	if (capture) {
		return 0;
	}
	work = fake_work(FAKE_RECORD);
	fake_mark(work, event, 1);
	fake_enqueue(handle, work);

	return 0;
}

int fake_wait(kvk_cu_stream_t handle, fake_event_t *event)
{
	fake_stream_t *stream = stream_of(handle);
	uint32_t of_event, of_stream;
	fake_work_t *work;

	pthread_mutex_lock(&fake.lock);
	of_event = event->capture;
	of_stream = stream->capture;
	if (of_event && !of_stream) {
		stream->capture = of_event; /* it takes part from now on */
	}
	pthread_mutex_unlock(&fake.lock);
	if (of_stream && of_event != of_stream) {
		fake_invalidate("a stream that is captured waits for what is not in the graph");
		return CU_ISOLATION;
	}
	if (of_event) {
		return 0;
	}
	work = fake_work(FAKE_WAIT);
	fake_mark(work, event, 0);
	fake_enqueue(handle, work);

	return 0;
}

void fake_cuda_capture(kvk_cu_stream_t handle, int mode)
{
	fake_stream_t *stream = stream_of(handle);

	pthread_mutex_lock(&fake.lock);
	if (fake.capture.number || !handle) {
		fake_fault("a capture within another, or of the default stream");
	}
	fake.capture.number = stream->capture = ++fake.captures;
	fake.capture.mode = mode;
	fake.capture.invalid = 0;
	fake.capture.origin = stream;
	pthread_mutex_unlock(&fake.lock);
}

int fake_cuda_captured(kvk_cu_stream_t handle)
{
	pthread_mutex_lock(&fake.lock);
	if (!stream_of(handle)->capture) {
		fake_fault("no capture to end");
	}
	for (uint32_t i = 0; i < FAKE_STREAMS; i++) {
		fake_stream_t *stream = &fake.streams[i];

		if (stream->capture && stream != fake.capture.origin) {
			fake_fault("a stream that took part in a capture and has not come back");
		}
		stream->capture = 0;
	}
	fake.capture.number = 0;
	pthread_mutex_unlock(&fake.lock);

	return !fake.capture.invalid;
}

/* ---- streams --------------------------------------------------------------------------------- */

void fake_enqueue(kvk_cu_stream_t handle, fake_work_t *work)
{
	fake_stream_t *stream = stream_of(handle);

	pthread_mutex_lock(&fake.lock);
	if (handle && !stream->used) {
		fake_fault("a stream that is not there");
	}
	if (stream->capture) {
		fake_fault("work in a capture");
		fake.capture.invalid = 1;
		pthread_mutex_unlock(&fake.lock);
		free(work);
		return;
	}
	if (stream->first) {
		stream->last->next = work;
	} else {
		stream->first = work;
	}
	stream->last = work;
	work->stream = (uint32_t)(stream - fake.streams);
	if (fake.held == 2 || (!fake.held && !fake.config.lazy)) {
		fake_run_all();
	} else if (!fake.held && kv_test_below(&fake.rng, 4) == 0) {
		run_some();
	}
	pthread_mutex_unlock(&fake.lock);
}

void fake_take_sms(kvk_cu_stream_t handle, unsigned sms)
{
	fake_stream_t *stream = stream_of(handle);

	pthread_mutex_lock(&fake.lock);
	stream->sms = stream->sms > sms ? stream->sms : sms;
	pthread_mutex_unlock(&fake.lock);
}

unsigned fake_cuda_sms(void)
{
	unsigned all = 0;

	pthread_mutex_lock(&fake.lock);
	for (uint32_t i = 0; i < FAKE_STREAMS; i++) {
		all += fake.streams[i].sms;
		fake.streams[i].sms = 0;
	}
	pthread_mutex_unlock(&fake.lock);

	return all;
}

kvk_cu_stream_t fake_stream_new(void)
{
	kvk_cu_stream_t found = NULL;

	pthread_mutex_lock(&fake.lock);
	for (uint32_t i = 1; i < FAKE_STREAMS && !found; i++) {
		fake_stream_t *stream = &fake.streams[i];

		/* What a stream that was given back still has to do is done, sooner or later. */
		if (!stream->used && !stream->first) {
			stream->used = 1;
			fake.live.streams++;
			found = (kvk_cu_stream_t)(void *)stream;
		}
	}
	pthread_mutex_unlock(&fake.lock);

	return found;
}

void fake_stream_drop(kvk_cu_stream_t handle)
{
	fake_stream_t *stream = (fake_stream_t *)(void *)handle;

	pthread_mutex_lock(&fake.lock);
	if (!stream->used || stream->capture) {
		fake_fault("a stream given back twice, or while it is captured");
	}
	stream->used = 0;
	fake.live.streams--;
	pthread_mutex_unlock(&fake.lock);
}

int fake_look(fake_event_t *event, int all)
{
	int done;

	pthread_mutex_lock(&fake.lock);
	if (all) {
		fake_run_all();
	} else if (fake.held != 1) {
		run_some();
	}
	done = !event->latest || event->latest->done;
	pthread_mutex_unlock(&fake.lock);

	return done;
}

/* ---- what tests ask for ---------------------------------------------------------------------- */

void fake_cuda_start(const fake_cuda_config_t *config)
{
	memset(&fake, 0, sizeof fake);
	pthread_mutex_init(&fake.lock, NULL);
	fake.config = *config;
	fake.config.devices = config->devices ? config->devices : 1;
	fake.rng.state = config->seed;
	fake.streams[0].used = 1;
	atomic_store(&fake.clock, UINT64_C(1000000000));
}

void fake_cuda_stop(void)
{
	pthread_mutex_lock(&fake.lock);
	fake_run_all();
	for (size_t i = 0; i < FAKE_RANGES; i++) {
		if (fake.ranges[i].kind == FAKE_DEVICE || fake.ranges[i].kind == FAKE_PINNED) {
			free((void *)(uintptr_t)fake.ranges[i].base);
		}
	}
	for (size_t i = 0; i < FAKE_SPACES; i++) {
		if (fake.spaces[i].bytes > 0) {
			munmap((void *)(uintptr_t)fake.spaces[i].base, fake.spaces[i].bytes);
		}
	}
	for (size_t i = 0; i < FAKE_HANDLES; i++) {
		if (fake.handles[i] > 0) {
			close(fake.handles[i]);
		}
	}
	pthread_mutex_unlock(&fake.lock);
	pthread_mutex_destroy(&fake.lock);
}

const void *fake_cuda_image(void)
{
	static const char image[] = "fake";

	return image;
}

fake_cuda_live_t fake_cuda_live(void)
{
	fake_cuda_live_t live;

	pthread_mutex_lock(&fake.lock);
	live = fake.live;
	pthread_mutex_unlock(&fake.lock);

	return live;
}

int fake_cuda_clean(void)
{
	const fake_cuda_live_t l = fake_cuda_live();
	const int left = l.memory || l.pinned || l.registered || l.streams || l.events || l.modules || l.contexts ||
			 l.handles || l.reserved || l.mapped;

	if (left) {
		printf("# left: memory %d pinned %d registered %d streams %d events %d modules %d contexts %d\n",
		       (int)l.memory, (int)l.pinned, (int)l.registered, (int)l.streams, (int)l.events, (int)l.modules,
		       (int)l.contexts);
		printf("# left: handles %d reserved %d mapped %d\n", (int)l.handles, (int)l.reserved, (int)l.mapped);
	}

	return !left && fake_cuda_faults() == 0;
}

uint64_t fake_cuda_faults(void)
{
	return atomic_load(&fake.faults);
}

void fake_cuda_fail_nth(uint64_t n)
{
	fake_cuda_fail_run(n, n ? 1 : 0);
}

void fake_cuda_fail_run(uint64_t n, uint64_t count)
{
	atomic_store(&fake.fail_count, 0);
	atomic_store(&fake.failed, 0);
	atomic_store(&fake.fail_at, atomic_load(&fake.call) + n);
	atomic_store(&fake.fail_count, count);
}

int fake_cuda_failed(void)
{
	return atomic_load(&fake.failed);
}

void fake_cuda_fail_always(size_t member, int error)
{
	fake.always_member = member;
	fake.always_error = error;
}

uint64_t fake_cuda_calls(size_t member)
{
	return atomic_load(&fake.calls[member / sizeof(void *)]);
}

uint64_t fake_cuda_bulk_launches(void)
{
	return fake.bulk_launches;
}

void fake_cuda_limit_pinned(size_t bytes)
{
	fake.pinned_limit = bytes;
}

void fake_cuda_costs(uint64_t engine, uint64_t link)
{
	fake.engine_cost = engine;
	fake.link_cost = link;
}

void fake_cuda_narrow(uint64_t times)
{
	fake.narrow_cost = times;
}

uint64_t fake_cuda_clock(void *ctx)
{
	(void)ctx;

	return atomic_fetch_add(&fake.clock, 1);
}

void fake_cuda_advance(uint64_t ns)
{
	atomic_fetch_add(&fake.clock, ns);
}

void fake_cuda_foreign(int foreign)
{
	fake.foreign = foreign;
}

void fake_cuda_unlink(void)
{
	fake.unlinked = 1;
}

void fake_cuda_hold(int held)
{
	pthread_mutex_lock(&fake.lock);
	fake.held = held;
	pthread_mutex_unlock(&fake.lock);
}

void fake_cuda_stall(kvk_cu_stream_t stream, int stalled)
{
	pthread_mutex_lock(&fake.lock);
	stream_of(stream)->stalled = stalled;
	pthread_mutex_unlock(&fake.lock);
}

void fake_cuda_call(kvk_cu_stream_t stream, void (*call)(void *args), void *args)
{
	fake_work_t *work = fake_work(FAKE_CALL);

	work->call = call;
	work->call_args = args;
	fake_enqueue(stream, work);
}

void fake_cuda_drain(void)
{
	pthread_mutex_lock(&fake.lock);
	fake_run_all();
	pthread_mutex_unlock(&fake.lock);
}
