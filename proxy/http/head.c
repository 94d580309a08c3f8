/* The head of a request. */
#include "head.h"

#include "base/headers.h"

#include <string.h>
#include <strings.h>

#define METHOD_MAX 32u
#define ALNUM      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
#define TOKEN      ALNUM "!#$%&'*+-.^_`|~"
#define HOST       ALNUM "-._~%!$&'()*+,;="

/* ---- where it ends --------------------------------------------------------------------------- */

/* Control characters are in no line: so a line ends where all readers see its end. */
static int is_text(unsigned char c)
{
	return (c >= ' ' && c != 0x7f) || c == '\t';
}

long kvp_head_scan(const char *text, size_t len, size_t *scanned)
{
	for (size_t at = *scanned; at < len; at++) {
		if (text[at] == '\n') {
			if (at == 0 || text[at - 1] != '\r') {
				return -1;
			}
			if (at >= 3 && text[at - 2] == '\n') {
				return (long)at + 1;
			}
		} else if ((at > 0 && text[at - 1] == '\r') ||
			   (text[at] != '\r' && !is_text((unsigned char)text[at]))) {
			return -1;
		}
	}
	*scanned = len;

	return 0;
}

/* ---- the first line -------------------------------------------------------------------------- */

static unsigned refuse(kvp_head_t *head, unsigned status, const char *why)
{
	head->refuse = why;

	return status;
}

static int is_digit(char c)
{
	return c >= '0' && c <= '9';
}

/* "name", "name:80", "[::1]:80"; the name may be empty. */
static int is_host(const char *text, size_t len)
{
	const char *at = text, *end = text + len;

	if (len > 0 && *at == '[') {
		at += 1 + strspn(at + 1, "0123456789abcdefABCDEFv.:-_~");
		if (at >= end || *at++ != ']') {
			return 0;
		}
	} else {
		at += strspn(at, HOST);
	}
	if (at < end && *at == ':') {
		for (at++; at < end && is_digit(*at); at++) {
		}
	}

	return at == end;
}

/* http://host/path, as a proxy is asked: the path. NULL: it is something else. */
static const char *skip_authority(char *target)
{
	const size_t scheme = strncasecmp(target, "http://", 7) == 0    ? 7
			      : strncasecmp(target, "https://", 8) == 0 ? 8
									: 0;
	char *host = target + scheme;
	const size_t len = strcspn(host, "/?");

	if (scheme == 0 || len == 0 || *host == ':' || !is_host(host, len)) {
		return NULL;
	}
	if (host[len] == '?') {
		host[len - 1] = '/'; /* the path is not written */
		return host + len - 1;
	}

	return host[len] ? host + len : "/";
}

static unsigned parse_target(char *target, kvp_head_t *head)
{
	head->target = target;
	for (const char *at = target; *at; at++) {
		if (*at <= ' ' || *at > '~' || *at == '#') {
			return refuse(head, 400, "the target is no path with a query");
		}
	}
	if (*target == '/' || strcmp(head->method, "CONNECT") == 0 ||
	    (strcmp(target, "*") == 0 && strcmp(head->method, "OPTIONS") == 0)) {
		return 0;
	}
	head->target = skip_authority(target);

	return head->target ? 0 : refuse(head, 400, "the target is neither a path nor an http:// URL");
}

static unsigned parse_version(const char *version, kvp_head_t *head)
{
	if (strncmp(version, "HTTP/", 5) != 0 || !is_digit(version[5]) || version[6] != '.' || !is_digit(version[7]) ||
	    version[8] != '\0') {
		return refuse(head, 400, "the request line is not METHOD TARGET HTTP/1.1");
	}
	if (version[5] != '1') {
		return refuse(head, 505, "this is HTTP/1.1");
	}
	head->minor = version[7] > '0';

	return 0;
}

static unsigned parse_first_line(char *line, kvp_head_t *head)
{
	const size_t len = strspn(line, TOKEN);
	char *target = line + len, *version = strchr(target + (*target != '\0'), ' ');
	unsigned status;

	if (len == 0 || *target != ' ' || !version) {
		return refuse(head, 400, "the request line is not METHOD TARGET HTTP/1.1");
	}
	*target++ = '\0';
	*version++ = '\0';
	head->method = line;
	if (len > METHOD_MAX) {
		return refuse(head, 501, "this method is not served");
	}
	status = parse_version(version, head);

	return status ? status : parse_target(target, head);
}

/* ---- headers --------------------------------------------------------------------------------- */

/* What the headers say of the message itself. */
typedef struct framing {
	unsigned hosts, lengths, codings;
	int is_closed, is_kept; /* Connection lists close, keep-alive */
} framing_t;

static unsigned parse_length(const char *value, kvp_head_t *head)
{
	const char *at = value;

	for (head->length = 0; is_digit(*at); at++) {
		const uint64_t digit = (uint64_t)(*at - '0');

		head->length = head->length > (UINT64_MAX - digit) / 10 ? UINT64_MAX : head->length * 10 + digit;
	}

	return at > value && !*at ? 0 : refuse(head, 400, "Content-Length is no number");
}

/* What the proxy itself must know of a header. */
static unsigned note_field(const char *name, const char *value, framing_t *framing, kvp_head_t *head)
{
	if (strcasecmp(name, "Content-Length") == 0) {
		framing->lengths++;
		return parse_length(value, head);
	}
	if (strcasecmp(name, "Transfer-Encoding") == 0) {
		framing->codings++;
		head->is_chunked = 1;
		return strcasecmp(value, "chunked") == 0
			       ? 0
			       : refuse(head, 501, "no Transfer-Encoding but chunked is served");
	}
	if (strcasecmp(name, "Host") == 0) {
		framing->hosts++;
		return is_host(value, strlen(value)) ? 0 : refuse(head, 400, "Host is none");
	}
	if (strcasecmp(name, "Connection") == 0) {
		framing->is_closed |= kvp_list_has(value, "close", 5);
		framing->is_kept |= kvp_list_has(value, "keep-alive", 10);
	} else if (strcasecmp(name, "Expect") == 0) {
		head->expects = head->minor > 0 && strcasecmp(value, "100-continue") == 0;
	}

	return 0;
}

/* One of both, and once: servers differ in what they make of more (RFC 9112, 6.3 and 11.2). */
static unsigned check_framing(const framing_t *framing, kvp_head_t *head)
{
	if (framing->lengths + framing->codings > 1) {
		return refuse(head, 400, "there is more than one Content-Length or Transfer-Encoding");
	}
	if (framing->codings > 0 && head->minor == 0) {
		return refuse(head, 400, "HTTP/1.0 has no Transfer-Encoding");
	}
	if (framing->hosts > 1 || (framing->hosts == 0 && head->minor > 0)) {
		return refuse(head, 400, "there has to be one Host");
	}
	head->is_kept = !framing->is_closed && (head->minor > 0 || framing->is_kept);

	return 0;
}

/* One line; the field is written to *out, which is never beyond the line. */
static unsigned parse_field(char *line, char **out, framing_t *framing, kvp_head_t *head)
{
	const size_t name_len = strspn(line, TOKEN);
	char *name = *out, *value = line + name_len + 1;
	size_t len;

	if (name_len == 0 || line[name_len] != ':') {
		return refuse(head, 400, "a header is not NAME: VALUE");
	}
	value += strspn(value, " \t");
	len = strlen(value);
	while (len > 0 && (value[len - 1] == ' ' || value[len - 1] == '\t')) {
		len--;
	}
	memmove(name, line, name_len);
	name[name_len] = '\0';
	memmove(name + name_len + 1, value, len);
	name[name_len + 1 + len] = '\0';
	*out += name_len + len + 2;

	return note_field(name, name + name_len + 1, framing, head);
}

unsigned kvp_head_parse(char *text, size_t len, kvp_head_t *head)
{
	char *line = text, *end = text + len - 2, *next, *out = end;
	framing_t framing = {0};
	unsigned status = 0;

	memset(head, 0, sizeof *head);
	for (*end = '\0'; line < end && status == 0; line = next) {
		next = strchr(line, '\r');
		*next = '\0';
		next += 2;
		if (line == text) {
			status = parse_first_line(line, head);
			head->fields = out = next;
		} else {
			status = parse_field(line, &out, &framing, head);
		}
	}
	if (status == 0) {
		*out = '\0';
		status = check_framing(&framing, head);
	}

	return status;
}

const char *kvp_head_next(const char *field)
{
	field = kvp_head_value(field);
	field += strlen(field) + 1;

	return *field ? field : NULL;
}

const char *kvp_head_value(const char *field)
{
	return field + strlen(field) + 1;
}

const char *kvp_head_find(const kvp_head_t *head, const char *name)
{
	const char *field = *head->fields ? head->fields : NULL;

	while (field && strcasecmp(field, name) != 0) {
		field = kvp_head_next(field);
	}

	return field ? kvp_head_value(field) : NULL;
}
