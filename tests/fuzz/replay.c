/* Runs a fuzzer's seeds without libFuzzer: each seed as it is, cut at every length, and with a few hundred seeded
 * mutations. */
#include "kv_test.h"

#include <dirent.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define SEED_MAX  65536u
#define MUTATIONS 300u

static uint8_t seed[SEED_MAX], work[SEED_MAX];

/* An exact copy, so that a sanitizer sees a read past the end. */
static void run(const uint8_t *data, size_t size)
{
	uint8_t *exact = malloc(size ? size : 1);

	if (exact) {
		memcpy(exact, data, size);
		LLVMFuzzerTestOneInput(exact, size);
		free(exact);
	}
}

static void mutate(kv_test_rng_t *rng, size_t size)
{
	static const uint8_t nasty[] = {0x00, 0x01, 0x7f, 0x80, 0x90, 0xc0, 0xc1, 0xc6, 0xdb, 0xdd, 0xdf, 0xff};
	unsigned count = 1 + (unsigned)kv_test_below(rng, 4);

	memcpy(work, seed, size);
	while (size > 0 && count-- > 0) {
		size_t at = kv_test_below(rng, size);

		if (kv_test_below(rng, 2)) {
			work[at] = nasty[kv_test_below(rng, sizeof nasty)];
		} else {
			work[at] = (uint8_t)(work[at] ^ 1u << kv_test_below(rng, 8));
		}
	}
	run(work, size);
}

static void run_seed(kv_test_rng_t *rng, const char *path)
{
	FILE *file = fopen(path, "rb");
	size_t size;

	if (!file) {
		perror(path);
		exit(1);
	}
	size = fread(seed, 1, sizeof seed, file);
	fclose(file);
	run(seed, size);
	for (size_t cut = 0; cut < size && cut < 4096; cut++) {
		run(seed, cut);
	}
	for (unsigned i = 0; i < MUTATIONS; i++) {
		mutate(rng, size);
	}
}

int main(int argc, char **argv)
{
	kv_test_rng_t rng = {kv_test_seed()};
	unsigned seeds = 0;

	for (int i = 1; i < argc; i++) {
		DIR *list = opendir(argv[i]);
		struct dirent *entry;

		while (list && (entry = readdir(list))) {
			char path[4096];

			if (entry->d_name[0] == '.') {
				continue;
			}
			snprintf(path, sizeof path, "%s/%s", argv[i], entry->d_name);
			run_seed(&rng, path);
			seeds++;
		}
		if (list) {
			closedir(list);
		}
	}
	printf("# %u seeds\n", seeds);

	return seeds > 0 ? 0 : 1;
}
