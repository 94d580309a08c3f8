/* kvctl reset: drop all blocks of a space for all engines. */
#include "kvctl.h"

#include "kv/types.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* What tells spaces apart, a line of the identity each. */
static void print_identity(const char *identity)
{
	static const char *const names[] = {"model=", "weights=", "lora=", "device="};

	for (const char *line = identity; *line; line += strcspn(line, "\n"), line += *line == '\n') {
		for (size_t i = 0; i < KV_COUNT_OF(names); i++) {
			if (strncmp(line, names[i], strlen(names[i])) == 0) {
				char shown[256];

				snprintf(shown, sizeof shown, "  %.*s", (int)strcspn(line, "\n"), line);
				kvctl_print_text(shown);
				putchar('\n');
			}
		}
	}
}

/* A block may be in memory and on disk. */
static void print_space(struct json_object *space)
{
	const int in_gpu = kvctl_member(space, "blocks_gpu") != NULL;

	printf("space %llu\n", (unsigned long long)kvctl_u64(space, "space"));
	print_identity(kvctl_str(space, "identity"));
	printf("  %llu blocks: %llu in %s memory, %llu on disk\n", (unsigned long long)kvctl_u64(space, "blocks"),
	       (unsigned long long)kvctl_u64(space, in_gpu ? "blocks_gpu" : "blocks_cpu"), in_gpu ? "GPU" : "CPU",
	       (unsigned long long)kvctl_u64(space, "blocks_disk"));
}

/* epoch: the new one; 0: nothing was dropped. */
static void print_document(struct json_object *space, uint64_t epoch)
{
	struct json_object *json = json_object_new_object();

	json_object_object_add(json, "reset", json_object_new_boolean(epoch != 0));
	json_object_object_add(json, "new_epoch", epoch ? json_object_new_uint64(epoch) : NULL);
	json_object_object_add(json, "space", json_object_get(space));
	kvctl_print_json(json);
	json_object_put(json);
}

/* 0: go on. Else the exit code, after saying why. */
static int ask_operator(const kvctl_t *ctl)
{
	char answer[16] = "";

	if (ctl->given[KVCTL_YES]) {
		return 0;
	}
	if (ctl->json || !isatty(STDIN_FILENO)) {
		return kvctl_error(ctl, KV_ERR_ARG,
				   "reset: --yes is needed where nobody can be asked; --dry-run shows what would go");
	}
	printf("drop these blocks for all engines? [y/N] ");
	fflush(stdout);
	if (fgets(answer, sizeof answer, stdin) && (strcmp(answer, "y\n") == 0 || strcmp(answer, "yes\n") == 0)) {
		return 0;
	}
	printf("nothing was dropped\n");

	return kv_status_exit_code(KV_MISS);
}

/* Only a member is answered: attach as one, hold nothing. */
static int drop_blocks(const kvctl_t *ctl, struct json_object *row)
{
	kvc_config_t config = {.struct_size = sizeof config,
			       .socket = ctl->socket,
			       .program = "kvctl reset",
			       .timeout_ms = ctl->timeout_ms,
			       .role = KVC_ROLE_SCHEDULER,
			       .staging_blocks = 1};
	kvc_space_info_t info = {.struct_size = sizeof info};
	kvc_space_t *space = NULL;
	kvc_t *kvc = NULL;
	kvc_status_t status = kvc_attach(&config, &kvc);
	int code = status == KVC_OK ? kvctl_open_space(ctl, kvc, kvctl_str(row, "identity"), &space)
				    : kvctl_failed(ctl, status);

	if (code == 0) {
		status = kvc_space_reset(space);
		code = status == KVC_OK ? 0 : kvctl_failed(ctl, status);
	}
	if (code == 0) {
		kvc_space_get_info(space, &info);
		if (ctl->json) {
			print_document(row, info.epoch);
		} else {
			printf("dropped; the space is in epoch %llu\n", (unsigned long long)info.epoch);
		}
	}
	kvc_detach(kvc);

	return code;
}

int kvctl_reset(const kvctl_t *ctl)
{
	struct json_object *space = NULL;
	int code;

	if (!ctl->given[KVCTL_SPACE] && !ctl->given[KVCTL_IDENTITY]) {
		return kvctl_error(ctl, KV_ERR_ARG,
				   "reset: --space or --identity is needed (`kvctl status` lists them)");
	}
	code = kvctl_find_space(ctl, &space);
	if (code != 0) {
		return code;
	}
	if (!ctl->json) {
		print_space(space);
	}
	if (!ctl->given[KVCTL_DRY_RUN]) {
		code = ask_operator(ctl);
		code = code ? code : drop_blocks(ctl, space);
	} else if (ctl->json) {
		print_document(space, 0);
	} else {
		printf("nothing was dropped: --dry-run\n");
	}
	json_object_put(space);

	return code;
}
