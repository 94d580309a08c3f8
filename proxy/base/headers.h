/* headers.h -- header lines that pass through the proxy, either way: all but those of one connection (RFC 9110, 7.6.1)
 * and those that libcurl and exchange.c write. */
#ifndef KVP_HEADERS_H
#define KVP_HEADERS_H

#include <curl/curl.h>

/* Keep a line if it passes. `connection`: the value of the header Connection, which names more that do not; NULL: none.
 * 0: out of memory. */
int kvp_headers_add(struct curl_slist **lines, const char *name, const char *value, const char *connection);
/* Has a list, "a, b", this word of `len` bytes? NULL is empty. */
int kvp_list_has(const char *list, const char *word, size_t len);
/* Append one more value of the header Connection to *list, which its owner frees. 0: out of memory. */
int kvp_headers_join(char **list, const char *value);
/* Does the line have this name? */
int kvp_header_is(const char *line, const char *name);
/* The value of a header; NULL: there is none. */
const char *kvp_headers_find(const struct curl_slist *lines, const char *name);

#endif
