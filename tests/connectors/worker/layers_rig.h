/* layers_rig.h -- an engine whose loads come layer by layer. */
#ifndef TESTS_CONNECTORS_LAYERS_RIG_H
#define TESTS_CONNECTORS_LAYERS_RIG_H

#include "connectors/worker/worker_rig.h"

extern const char *layers_program; /* kvd */

void layers_start(rig_t *rig, wr_t *wr, uint32_t ranks);
void layers_finish(rig_t *rig, wr_t *wr);
kvx_worker_stats_t layers_stats(const wr_t *wr);
/* Take whatever the workers have to say, until nothing is under way. */
void layers_hear_all(wr_t *wr);
/* A step that loads `other` has begun: on how many ranks it comes layer by layer. */
int layers_begin(wr_t *wr, const kvc_lease_t *lease);
/* A kernel that reads the layer of all of them. */
void layers_look(const wr_rank_t *rank, uint32_t layer, uint32_t *p_wrong);
/* What an engine does: name each layer, then read it. */
void layers_compute(const wr_rank_t *rank, uint32_t *p_wrong);

/* Loads that begin when they are planned, on one rank. */
/* kvx_worker_prefetch_step() of the plan at hand; begin() and start() of it. */
int layers_early(wr_t *wr, uint32_t flags);
void layers_go_on(wr_t *wr);
/* What is enqueued from now on runs late. */
void layers_be_late(void);
/* A kernel of the step before writes `other`, late; then a plan that loads them. */
void layers_plan(wr_t *wr, const kvc_lease_t *lease);
/* Kernels that look whether `other` have what is stored, and that write them. */
void layers_look_all(wr_t *wr, uint32_t seed, uint32_t *p_wrong);
void layers_write(wr_t *wr, uint32_t seed);
/* A step in which nothing is done, with all its hooks. */
void layers_idle_step(wr_t *wr);

#endif
