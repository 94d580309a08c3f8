/* Puts that the scheduling half starts: counted, and refused as the test's daemon would. */
#include "connectors/scheduler/sched_rig.h"

#define WRAP(type, name, ...)                                                                                          \
	type __real_##name(__VA_ARGS__);                                                                               \
	type __wrap_##name(__VA_ARGS__);                                                                               \
	type __wrap_##name(__VA_ARGS__)

static kvc_put_t *unwanted;   /* the last put that was optional while sr.thrashes */
static kvc_put_t *refused[8]; /* puts that were started while sr.is_busy */

WRAP(kvc_status_t, kvc_put_start, kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t to,
     const kvc_put_options_t *options, kvc_put_t **p_put)
{
	kvc_status_t status;

	if (sr.refuse_device_puts && space == sr.scheduler->spaces[0].mems[KVX_OWN_MEM].space) {
		return KVC_ERR_BUSY;
	}
	if (options) { /* else it is a test's own */
		assert_ptr_equal(options->writers, sr.scheduler->writers + options->group * sr.scheduler->writer_count);
	}
	sr.yielding_puts += options && options->yields ? 1 : 0;
	sr.optional_puts += options && options->optional ? 1 : 0;
	status = __real_kvc_put_start(space, keys, from, to, options, p_put);
	unwanted = status == KVC_OK && sr.thrashes && options && options->optional ? *p_put : unwanted;
	if (status == KVC_OK && sr.is_busy) {
		refused[sr.busy_puts++ % KV_COUNT_OF(refused)] = *p_put;
	}

	return status;
}

/* As a daemon answers whose pool thrashes, or has no room. */
WRAP(kvc_status_t, kvc_put_get_result, const kvc_put_t *put, kvc_put_result_t *result)
{
	const kvc_status_t status = __real_kvc_put_get_result(put, result);

	if (put == unwanted) {
		result->status = KVC_ERR_NOT_ADMITTED;
		unwanted = NULL; /* it ends with this answer */
	}
	for (uint32_t i = 0; i < KV_COUNT_OF(refused); i++) {
		if (put == refused[i] && kvc_put_n(put) > 0) {
			result->status = KVC_ERR_BUSY;
			refused[i] = NULL;
		}
	}

	return status;
}
