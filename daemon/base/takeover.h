/* daemon/base/takeover.h -- can this program go on with what the keeper of another version keeps? (decision 061) */
#ifndef KVD_TAKEOVER_H
#define KVD_TAKEOVER_H

#include "options/options.h"

/* For --check-config of a keeper that is about to be replaced: look at each name and ledger of setup->held_fd and at
 * the disk tier's superblock, while the daemon of the other version uses them. KV_OK: the keeper has been told how many
 * names were understood, over setup->keeper_fd. KV_ERR_FOREIGN: a format is another version's, `detail` says which;
 * KV_ERR_NOMEM; KV_ERR_IO: the keeper cannot be told. */
kv_status_t kvd_takeover_check(const kvd_setup_t *setup, char *detail, size_t cap);

#endif
