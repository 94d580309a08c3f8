/* ep_driver.h -- fake_cuda.h with the kernels of kernels/ep: they are launched at once, as a function of the test says.
 * Copies on another stream than the caller's (NULL) happen when the caller's waits for them. The rig's image is theirs,
 * too. */
#ifndef EP_DRIVER_H
#define EP_DRIVER_H

#include "gpu_rig.h"

#include "kvk/ep_gpu.h"

/* Runs a kernel of that name. */
typedef void (*ep_run_t)(const char *name, unsigned grid, unsigned threads, unsigned shared_bytes, const void *args);

/* Starts the rig's driver, one of that compute capability, and opens its GPU. NULL: nothing runs. */
kvk_gpu_t *ep_driver_open(gpu_rig_t *rig, int major, ep_run_t run);
uint64_t ep_driver_launches(void);
uint64_t ep_driver_copied(void); /* bytes, between memory of the device */
/* The caller's stream of compute, if there is one. */
void ep_driver_compute(kvk_cu_stream_t stream);
/* Kernels and copies since the last call of this, in their order: "route push". "+copy" is on another stream, which waits
 * for the caller's at "fork", and the caller's for it at "join". */
const char *ep_driver_trace(void);

extern int ep_driver_has_kernels;           /* of kernels/ep, in this build */
extern void (*ep_driver_before_copy)(void); /* NULL: nothing is called */

#endif
