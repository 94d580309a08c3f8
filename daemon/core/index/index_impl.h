/* index_impl.h -- what lookup.c offers to index.c only: entries of the table of keys. */
#ifndef KVD_CORE_INDEX_IMPL_H
#define KVD_CORE_INDEX_IMPL_H

#include "core/index/index.h"

void kvd_table_add(kvd_index_t *ix, uint32_t block);
void kvd_table_remove(kvd_index_t *ix, uint32_t block);
/* Is the run, or one above it, being taken down? */
int kvd_node_is_dead(const kvd_index_t *ix, uint32_t node);

#endif
