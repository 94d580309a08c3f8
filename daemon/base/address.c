/* Addresses without ports. */
#include "base/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>

static kvd_address_t from_in6(const struct in6_addr *in6)
{
	kvd_address_t address = {.len = 16};

	memcpy(address.bytes, in6, 16);
	if (IN6_IS_ADDR_V4MAPPED(in6)) {
		memmove(address.bytes, address.bytes + 12, 4);
		address.len = 4;
	}

	return address;
}

kvd_address_t kvd_address_parse(const char *text)
{
	kvd_address_t address = {.len = 4};
	struct in6_addr in6;

	if (inet_pton(AF_INET, text, address.bytes) == 1) {
		return address;
	}

	return inet_pton(AF_INET6, text, &in6) == 1 ? from_in6(&in6) : (kvd_address_t){.len = 0};
}

kvd_address_t kvd_address_of(const struct sockaddr *from)
{
	kvd_address_t address = {.len = 0};
	struct sockaddr_in in;
	struct sockaddr_in6 in6;

	if (from && from->sa_family == AF_INET) {
		memcpy(&in, from, sizeof in);
		memcpy(address.bytes, &in.sin_addr, 4);
		address.len = 4;
	} else if (from && from->sa_family == AF_INET6) {
		memcpy(&in6, from, sizeof in6);
		address = from_in6(&in6.sin6_addr);
	}

	return address;
}

kvd_address_t kvd_address_of_peer(int fd)
{
	union {
		struct sockaddr head;
		struct sockaddr_storage room;
	} from = {.room = {0}};
	socklen_t len = sizeof from;

	return kvd_address_of(getpeername(fd, &from.head, &len) == 0 ? &from.head : NULL);
}

int kvd_address_equal(const kvd_address_t *a, const kvd_address_t *b)
{
	return a->len > 0 && a->len == b->len && memcmp(a->bytes, b->bytes, a->len) == 0;
}
