/* headers.h -- header lines that pass through the proxy, either way: all but those of one connection (RFC 9110, 7.6.1)
 * and those that libcurl and libmicrohttpd write. */
#ifndef KVP_HEADERS_H
#define KVP_HEADERS_H

#include <curl/curl.h>

/* Keep a line if it passes. `connection`: the value of the header Connection, which names more that do not; NULL: none.
 * 0: out of memory. */
int kvp_headers_add(struct curl_slist **lines, const char *name, const char *value, const char *connection);
/* Does the line have this name? */
int kvp_header_is(const char *line, const char *name);
/* The value of a header; NULL: there is none. */
const char *kvp_headers_find(const struct curl_slist *lines, const char *name);

#endif
