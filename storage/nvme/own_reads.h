/* storage/nvme/own_reads.h -- loads that the tier begins: of slots that are set aside (decision 032), and of blocks
 * that a rebuild has found: a header proves that a write had begun, not that it had ended (decision 023). Owner's
 * thread only.
 */
#ifndef KVS_NVME_OWN_READS_H
#define KVS_NVME_OWN_READS_H

#include "nvme.h"

/* Read again one slot that is set aside and whose pause has ended. */
void kvs_retry_aside_slot(kvs_nvme_t *nvme);
/* Read some of the blocks that a rebuild has found. One that is not whole is lost; no flush begins while others are
 * unread. */
void kvs_verify_some_blocks(kvs_nvme_t *nvme);

#endif
