/* message.h -- what ranks in processes say to each other (exchange.c). */
#ifndef KVK_EP_MESSAGE_H
#define KVK_EP_MESSAGE_H

#include "kvk/ep.h"

#define KVK_EP_MESSAGE_MAGIC UINT64_C(0x314741585645504b) /* "KPEVXAG1" */

enum { KVK_EP_HELLO = 1, KVK_EP_READY = 2, KVK_EP_GIVE_UP = 4 };

typedef struct kvk_ep_message {
	uint64_t magic;
	uint32_t kind, rank;
	uint32_t lost;  /* GIVE_UP */
	int32_t status; /* GIVE_UP */
	uint64_t plan;  /* HELLO: digest of all that follows from the shape */
	kvk_ep_shape_t shape;
	uint32_t link; /* kvk_ep_link_kind_t */
} kvk_ep_message_t;

#endif
