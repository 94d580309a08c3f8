/* What --version says. */
#include "kv/system.h"

#include <stdio.h>
#include <string.h>

void kv_version_print(const char *program, const char *more)
{
	printf("%s %s (%s)%s\n", program, KVD_VERSION, kv_revision[0] ? kv_revision : "revision unknown", more);
}

int kv_version_asked(int argc, char **argv, const char *program)
{
	if (argc != 2 || strcmp(argv[1], "--version") != 0) {
		return 0;
	}
	kv_version_print(program, "");

	return 1;
}
