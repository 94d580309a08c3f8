/* reference.h -- the transformer once more, in the plainest way: one position at a time, keys and values in one flat
 * array, no tiles, no pages. */
#ifndef TESTS_ENGINE_REFERENCE_H
#define TESTS_ENGINE_REFERENCE_H

#include "kve/weights.h"

typedef struct reference reference_t;

reference_t *reference_create(const kve_config_t *config);
void reference_destroy(reference_t *reference);
/* Logits of the next position after feeding one more token; valid until the next call. */
const float *reference_feed(reference_t *reference, uint32_t token);
/* [top_k] experts that a layer has chosen for the token that was fed last. */
const uint32_t *reference_experts(const reference_t *reference, uint32_t layer);

#endif
