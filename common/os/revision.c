/* The revision of the build; cmake/revision.cmake writes the header. */
#include "kv/system.h"

#include "kv_revision.h"

const char kv_revision[] = KV_REVISION;
