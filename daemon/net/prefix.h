/* daemon/net/prefix.h -- a prefix of a namespace here, named by what its keys are made of. Two daemons have other keys
 * for the same tokens (epochs are part of them), so each makes its own. */
#ifndef KVD_NET_PREFIX_H
#define KVD_NET_PREFIX_H

#include "net/net.h"

#include "kvk/layout.h"

#define KVD_GROUPS_MAX 16u

typedef struct kvd_net_space kvd_net_space_t;

typedef struct kvd_prefix {
	kvd_net_space_t *space; /* NULL: not opened */
	kvc_key_t *keys;        /* [n]; NULL: the space is not open yet */
	uint32_t n;             /* units, whole blocks of every group */
	uint32_t hash_bytes;    /* 0: tokens */
	uint8_t *names;         /* and then `rest` */
	uint32_t names_len, rest_len;
	char salt[KVC_MAX_SALT + 1];
	int is_handover;
	/* once there are keys */
	kvc_group_info_t groups[KVD_GROUPS_MAX];
	uint32_t group_count, unit_tokens;
	kvk_layout_t layouts[KVD_GROUPS_MAX]; /* of the groups' blocks */
	kvk_geometry_t geometries[KVD_GROUPS_MAX];
	/* once it has a private block */
	uint32_t private_units, partial; /* units before it; its tokens, 0: none */
	kvc_key_t private_key;
} kvd_prefix_t;

/* What an order or an ASK says of a prefix. */
typedef struct kvd_prefix_names {
	const char *ns;
	kv_slice_t identity, salt, names, rest;
	uint32_t hash_bytes;
	int is_handover; /* its sides meet also in a space that nobody has opened here */
} kvd_prefix_names_t;

/* KV_ERR_NOT_FOUND: no such namespace; KV_ERR_IDENTITY, KV_ERR_ARG, KV_ERR_LIMIT, KV_ERR_NOMEM. */
kv_status_t kvd_prefix_init(kvd_net_t *net, const kvd_prefix_names_t *names, kvd_prefix_t *prefix);
void kvd_prefix_fini(kvd_prefix_t *prefix);
/* KVC_OK: there are keys. KVC_PENDING, or why there are none. */
kvc_status_t kvd_prefix_ready(kvd_prefix_t *prefix);
kvc_space_t *kvd_prefix_space(const kvd_prefix_t *prefix);
/* Keys of the prefix, for libkvc. */
kvc_key_source_t kvd_prefix_source(const kvd_prefix_t *prefix);
/* There is a private block with `partial` tokens after n units. KVC_ERR_ARG: not of this prefix, as far as it is named.
 */
kvc_status_t kvd_prefix_set_private(kvd_prefix_t *prefix, const char *transfer, uint32_t n, uint32_t partial);
/* Keys of the units before the private block, and then its own. */
kvc_key_source_t kvd_prefix_private_source(const kvd_prefix_t *prefix);
/* Blocks of group g (an index) that n units need: [*p_first, *p_end), counted in the group. */
void kvd_prefix_range(const kvd_prefix_t *prefix, uint32_t g, uint32_t n, uint32_t *p_first, uint32_t *p_end);
/* Key of block i of group g. */
kvc_key_t kvd_prefix_block_key(const kvd_prefix_t *prefix, uint32_t g, uint32_t i);

/* Namespaces: one attachment each, made when it is first needed. */
kv_status_t kvd_tenants_open(kvd_net_t *net);
void kvd_tenants_poll(kvd_net_t *net);
/* In idle times: bring some of the pools' memory into our page table. 0: all of it is there. */
int kvd_tenants_prefault(const kvd_net_t *net);
/* Descriptors for poll(): writes at most cap, returns how many. */
uint32_t kvd_tenants_fds(const kvd_net_t *net, int *fds, uint32_t cap);

#endif
