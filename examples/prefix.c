/* One process stores the KV blocks of a prompt, another reads them: docs/client.md explains it call by call.
 * usage: prefix SOCKET put|get        exit code 0: done, 1: an error, 2: nothing is stored */
#include <kvc.h>
#include <kvk/layout.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 16, BLOCKS = 4 }; /* tokens of a block; blocks of the prompt */

static void check(kvc_status_t status, const char *call)
{
	if (status != KVC_OK) {
		fprintf(stderr, "%s: %s: %s\n", call, kvc_status_text(status), kvc_last_error());
		exit(1);
	}
}

static int put(kvc_space_t *space, const kvc_key_t *keys, unsigned char **blocks, size_t bytes)
{
	kvc_put_options_t options = {.struct_size = sizeof options, .blocks = (const void *const *)blocks};
	uint32_t stored = 0;

	for (int i = 0; i < BLOCKS; i++) {
		memset(blocks[i], i + 1, bytes); /* what a prefill computes */
	}
	check(kvc_put(space, keys, 0, BLOCKS, &options, &stored), "kvc_put");
	printf("stored %u blocks of %zu bytes\n", stored, bytes);
	return 0;
}

static int get(kvc_space_t *space, const kvc_key_t *keys, unsigned char **blocks)
{
	kvc_lease_t *lease = NULL;
	kvc_match_t match = {.struct_size = sizeof match};
	uint32_t n, bad = 0;

	kvc_match(space, keys, BLOCKS, &match);
	if (match.n == 0 || kvc_acquire(space, keys, match.n, 0, 0, &lease) == KVC_MISS) {
		printf("a miss, reason %u\n", match.why);
		return 2;
	}
	n = kvc_lease_n(lease);
	check(kvc_lease_wait(lease, n, 1000), "kvc_lease_wait");
	check(kvc_lease_read(lease, 0, n, (void *const *)blocks, &bad), "kvc_lease_read");
	kvc_release(&lease, 1);
	printf("read %u of %d blocks; the last one holds %d\n", n, BLOCKS, blocks[n - 1][0]);
	return 0;
}

int main(int argc, char **argv)
{
	const kvc_config_t config = {
		.struct_size = sizeof config, .socket = argc > 1 ? argv[1] : NULL, .role = KVC_ROLE_BOTH};
	const kvk_layout_t layout = {.heads = 2,
				     .layers = 4,
				     .block_tokens = TOKENS,
				     .k_dim = 32,
				     .v_dim = 32,
				     .dtype = KVK_DTYPE_BF16,
				     .inner = KVK_INNER_SPLIT};
	char layout_text[KVK_LAYOUT_TEXT_MAX];
	const kvc_identity_t identity = {.struct_size = sizeof identity,
					 .model = "example",
					 .weights = "v1",
					 .dtype = "bf16",
					 .rope = "none",
					 .hash_tokens = TOKENS,
					 .layout = layout_text};
	uint32_t tokens[TOKENS * BLOCKS], n = 0;
	const kvc_prompt_t prompt = {.struct_size = sizeof prompt, .tokens = tokens, .n_tokens = TOKENS * BLOCKS};
	unsigned char *blocks[BLOCKS];
	kvc_key_t keys[BLOCKS];
	kvc_space_t *space = NULL;
	kvc_space_info_t info = {.struct_size = sizeof info};
	kvc_t *kvc = NULL;
	int status;

	check(kvc_layout_text(&layout, 1, layout_text, sizeof layout_text), "kvc_layout_text");
	check(kvc_attach(&config, &kvc), "kvc_attach");
	check(kvc_space_open(kvc, &identity, &space), "kvc_space_open");
	kvc_space_get_info(space, &info);
	for (uint32_t i = 0; i < TOKENS * BLOCKS; i++) {
		tokens[i] = 100 + i;
	}
	check(kvc_keys_of(space, &prompt, keys, BLOCKS, &n), "kvc_keys_of");
	for (int i = 0; i < BLOCKS; i++) {
		blocks[i] = calloc(1, info.block_bytes);
		check(blocks[i] ? KVC_OK : KVC_ERR_NOMEM, "calloc");
	}
	status = argc == 3 && strcmp(argv[2], "put") == 0 ? put(space, keys, blocks, info.block_bytes)
							  : get(space, keys, blocks);
	kvc_detach(kvc);
	return status;
}
