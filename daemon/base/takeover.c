/* What another version keeps: see takeover.h. */
#include "base/takeover.h"

#include "base/held.h"

#include "kvs/ledger.h"
#include "kvs/nvme.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int ends_with(const char *name, const char *end)
{
	const size_t len = strlen(name), n = strlen(end);

	return len >= n && strcmp(name + len - n, end) == 0;
}

static kv_status_t check_ledger(kvd_held_t *held, const char *name, char *detail, size_t cap)
{
	kvs_ledger_header_t header;
	const int fd = kvd_held_claim(held, name);
	char why[128] = "it cannot be read";
	kv_status_t status = KV_ERR_FOREIGN;

	if (fd >= 0 && pread(fd, &header, sizeof header, 0) == (ssize_t)sizeof header) {
		status = kvs_ledger_check_format(&header, why, sizeof why);
	}
	if (fd >= 0) {
		close(fd);
	}
	if (status != KV_OK) {
		snprintf(detail, cap, "%s, which the keeper keeps, is not of this version: %s", name, why);
	}

	return status;
}

/* Names are between versions, as formats are. */
static kv_status_t check_name(kvd_held_t *held, const char *name, char *detail, size_t cap)
{
	if (ends_with(name, ".ledger")) {
		return check_ledger(held, name, detail, cap);
	}
	if (strcmp(name, KVD_KEEPER_CONFIG) == 0 || strstr(name, ".slab.") || strstr(name, ".digest.") ||
	    strncmp(name, KVD_KEEPER_WRITER, sizeof KVD_KEEPER_WRITER - 1) == 0) {
		return KV_OK;
	}
	snprintf(detail, cap, "the keeper keeps something that this version does not know: %s", name);

	return KV_ERR_FOREIGN;
}

kv_status_t kvd_takeover_check(const kvd_setup_t *setup, char *detail, size_t cap)
{
	kvd_held_t *held;
	const char *name;
	uint32_t count = 0;
	kv_status_t status = kvd_held_open(setup->held_fd, NULL, &held);

	while (status == KV_OK && (name = kvd_held_name(held, count)) != NULL) {
		status = check_name(held, name, detail, cap);
		count++;
	}
	kvd_held_close(held, 0);
	if (status == KV_OK && setup->options.nvme_path[0]) {
		status = kvs_nvme_check_format(setup->options.nvme_path, &kv_env_posix, detail, cap);
	}
	if (status == KV_OK && !kvd_keeper_answer(setup->keeper_fd, count)) {
		snprintf(detail, cap, "the keeper cannot be told");
		status = KV_ERR_IO;
	}

	return status;
}
