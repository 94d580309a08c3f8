/* fault_disk_rig.h -- the test's half of fault_disk.h: faults are set, and power is lost. */
#ifndef TESTS_E2E_FAULT_DISK_RIG_H
#define TESTS_E2E_FAULT_DISK_RIG_H

#include "e2e/rig/fault_disk.h"
#include "e2e/rig/rig.h"

typedef struct fault_disk {
	char dir[80];
	fault_control_t *control;
} fault_disk_t;

/* Stands before the daemons this rig starts from now on (rig->before). */
void fault_disk_open(fault_disk_t *disk, rig_t *rig);
void fault_disk_close(fault_disk_t *disk);
/* After `skip` such calls, `count` fail; count 0: none does. */
void fault_disk_arm(fault_disk_t *disk, enum fault_op op, uint32_t where, int error, uint32_t skip, uint32_t count);

typedef struct fault_loss {
	uint64_t writes, doubtful; /* in the journal; those among them that no sync covers */
	uint64_t undone;           /* of these, writes that were undone at least in part */
	uint64_t torn;             /* of these, writes that stayed in part */
	uint64_t cut;              /* files that are shorter now */
	uint64_t names;            /* made, renamed and removed ones that were taken back */
} fault_loss_t;

/* The processes have been killed: wait for their ends. */
void fault_disk_wait(const rig_t *rig);
/* The same, then put a drawn part of what no sync covers back (`all`: everything), and begin a new journal. */
void fault_disk_lose_power(fault_disk_t *disk, const rig_t *rig, kv_test_rng_t *rng, int all, fault_loss_t *loss);

#endif
