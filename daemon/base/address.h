/* daemon/base/address.h -- the address of a node: where a connection comes from, and where a peer is configured. */
#ifndef KVD_ADDRESS_H
#define KVD_ADDRESS_H

#include <stdint.h>
#include <sys/socket.h>

typedef struct kvd_address {
	uint8_t bytes[16];
	uint32_t len; /* 4, 16, or 0: none */
} kvd_address_t;

/* Of a numeric text, without its port. */
kvd_address_t kvd_address_parse(const char *text);
/* An IPv4 address in the clothes of an IPv6 one is the IPv4 address. */
kvd_address_t kvd_address_of(const struct sockaddr *from);
/* Of the other end of a connected socket. */
kvd_address_t kvd_address_of_peer(int fd);
/* No address equals none. */
int kvd_address_equal(const kvd_address_t *a, const kvd_address_t *b);

#endif
