/* Header lines that pass through the proxy. */
#include "headers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

int kvp_list_has(const char *list, const char *word, size_t len)
{
	while (list && *list) {
		list += strspn(list, ", \t");
		if (strncasecmp(list, word, len) == 0 && strchr(", \t", list[len])) {
			return 1;
		}
		list += strcspn(list, ",");
	}

	return 0;
}

int kvp_headers_add(struct curl_slist **lines, const char *name, const char *value, const char *connection)
{
	static const char own[] = "connection,keep-alive,proxy-connection,proxy-authenticate,proxy-authorization,te,"
				  "trailer,transfer-encoding,upgrade,host,content-length,expect";
	const size_t len = strcspn(name, " \t"); /* an engine may have written blanks before the colon */
	struct curl_slist *longer;
	char *line = NULL;

	if (len == 0 || name[len + strspn(name + len, " \t")] || kvp_list_has(own, name, len) ||
	    kvp_list_has(connection, name, len) || strpbrk(value, "\r\n")) {
		return 1;
	}
	/* To libcurl "Name:" is a header to be left out, "Name;" one without a value. */
	if (asprintf(&line, *value ? "%.*s: %s" : "%.*s;", (int)len, name, value) < 0) {
		return 0;
	}
	longer = curl_slist_append(*lines, line);
	free(line);
	*lines = longer ? longer : *lines;

	return longer != NULL;
}

int kvp_headers_join(char **list, const char *value)
{
	char *longer = NULL;

	if (asprintf(&longer, "%s,%s", *list ? *list : "", value) < 0) {
		return 0;
	}
	free(*list);
	*list = longer;

	return 1;
}

int kvp_header_is(const char *line, const char *name)
{
	const size_t len = strlen(name);

	return strncasecmp(line, name, len) == 0 && (line[len] == ':' || line[len] == ';');
}

const char *kvp_headers_find(const struct curl_slist *lines, const char *name)
{
	for (; lines; lines = lines->next) {
		if (kvp_header_is(lines->data, name)) {
			return lines->data + strlen(name) + (lines->data[strlen(name)] == ':' ? 2 : 1);
		}
	}

	return NULL;
}
