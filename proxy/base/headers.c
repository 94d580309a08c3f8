/* Header lines that pass through the proxy. */
#include "headers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static int is_listed(const char *list, const char *name)
{
	const size_t len = strlen(name);

	while (list && *list) {
		list += strspn(list, ", \t");
		if (strncasecmp(list, name, len) == 0 && strchr(", \t", list[len])) {
			return 1;
		}
		list += strcspn(list, ",");
	}

	return 0;
}

int kvp_headers_add(struct curl_slist **lines, const char *name, const char *value, const char *connection)
{
	static const char own[] = "connection,keep-alive,proxy-connection,proxy-authenticate,proxy-authorization,te,"
				  "trailer,transfer-encoding,upgrade,host,content-length,expect,date";
	struct curl_slist *longer;
	char *line = NULL;

	if (is_listed(own, name) || is_listed(connection, name) || strpbrk(value, "\r\n")) {
		return 1;
	}
	/* To libcurl "Name:" is a header to be left out, "Name;" one without a value. */
	if (asprintf(&line, *value ? "%s: %s" : "%s;", name, value) < 0) {
		return 0;
	}
	longer = curl_slist_append(*lines, line);
	free(line);
	*lines = longer ? longer : *lines;

	return longer != NULL;
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
