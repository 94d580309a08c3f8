/* What commands say of a failure. */
#include "command.h"

#include <stdio.h>

int fail(const char *format, const char *text)
{
	(void)fputs("kve: ", stderr);
	fprintf(stderr, format, text);
	(void)fputs("\n", stderr);

	return EXIT_USAGE;
}
