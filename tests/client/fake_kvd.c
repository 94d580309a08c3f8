/* fake-kvd PATH: the fake daemon as a program, until its standard input ends. Stands in for kvd where only a client
 * is tested. */
#include "fake_daemon.h"

#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	fake_t *fake;
	char byte;

	if (argc != 2) {
		fprintf(stderr, "usage: fake-kvd PATH\n");
		return 64;
	}
	fake = fake_start(argv[1], &fake_split, 41);
	printf("ready\n");
	fflush(stdout);
	while (read(STDIN_FILENO, &byte, 1) > 0) {
	}
	fake_stop(fake);

	return 0;
}
