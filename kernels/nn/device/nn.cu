/* The kernels of kvk/nn.h, for sm_90a. */
#define _Noreturn __attribute__((noreturn)) /* C's word */
extern "C" {
#include "kvk/nn.h"
}
#include "groups.cuh"
#include "attention_wide.cuh"
#include "rows.cuh"
