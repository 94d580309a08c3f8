/* silence.h -- how long another process has said nothing while this one could hear it. Time in which this process did
 * not run counts for nobody: after a pause of the whole container, or on a machine that gave it no processor, the other
 * one may have been paused as well. */
#ifndef KVD_IO_SILENCE_H
#define KVD_IO_SILENCE_H

#include <stdint.h>

#define KVD_SILENCE_GAP_NS UINT64_C(1000000000) /* two looks further apart: this process did not run */

typedef struct kvd_silence {
	uint64_t heard_ns, looked_ns;
} kvd_silence_t;

static inline void kvd_silence_end(kvd_silence_t *silence, uint64_t now_ns)
{
	silence->heard_ns = silence->looked_ns = now_ns;
}

/* Its length in ns. To be asked several times a second. */
static inline uint64_t kvd_silence_look(kvd_silence_t *silence, uint64_t now_ns)
{
	uint64_t gap = now_ns > silence->looked_ns ? now_ns - silence->looked_ns : 0;

	silence->looked_ns += gap;
	if (gap > KVD_SILENCE_GAP_NS) {
		silence->heard_ns += gap;
	}

	return silence->looked_ns - silence->heard_ns;
}

#endif
