#include "nvme/slots/recency.h"

#include "nvme/slots/slots.h"

#include "kv/digest.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define RECENCY_NS UINT64_C(30000000000)
#define MAGIC      UINT64_C(0x796e63656372766b) /* "kvrcency", little-endian, as the fields are */
#define VERSION    1u
#define GEN_BITS   20u
#define GEN_MASK   ((1u << GEN_BITS) - 1u)
#define DIRECTORY  "recency"

typedef struct image {
	uint64_t magic;
	uint64_t check; /* XXH3-64 of the image, this field as 0 */
	uint64_t uuid;  /* of the tier */
	uint32_t version;
	uint32_t slot_class;
	uint32_t number;
	uint32_t slots;
	uint64_t word[];
} image_t;

static size_t image_bytes(uint32_t slots)
{
	return sizeof(image_t) + slots * sizeof(uint64_t);
}

static void file_name(uint32_t number, const char *suffix, char out[48])
{
	snprintf(out, 48, DIRECTORY "/%u%s", number, suffix);
}

/* ---- words ----------------------------------------------------------------------------------- */

static void mark_file(kvs_nvme_t *nvme, kvs_dfile_t *file)
{
	nvme->recency.files += !file->used;
	file->used = 1;
}

static void set_word(kvs_nvme_t *nvme, kv_slot_t slot, uint32_t gen, uint64_t use)
{
	kvs_dfile_t *file = &nvme->files[kv_slot_slab(slot)];

	file->use[kv_slot_index(slot)] = use << GEN_BITS | (gen & GEN_MASK);
	mark_file(nvme, file);
}

uint64_t kvs_recency_of(const kvs_nvme_t *nvme, kv_slot_t slot)
{
	return nvme->files[kv_slot_slab(slot)].use[kv_slot_index(slot)] >> GEN_BITS;
}

void kvs_nvme_touch(kvs_tier_t *tier, kvs_loc_t loc, uint64_t stamp)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	const kvs_dslot_t *s = kvs_slot_find(nvme, loc);

	if (s) {
		set_word(nvme, loc.slot, s->gen, nvme->recency.base + stamp);
	}
}

/* ---- writing --------------------------------------------------------------------------------- */

int kvs_recency_is_due(const kvs_nvme_t *nvme, uint64_t now)
{
	return nvme->recency.files > 0 && (nvme->closing || now >= nvme->recency.due_ns);
}

/* The next file in the order of their numbers, then a pause: a file that is used all the time is written once in each
 * round of them. KVS_MAX_FILES: none before the pause. */
static uint32_t next_file(kvs_nvme_t *nvme, uint64_t now)
{
	kvs_recency_t *recency = &nvme->recency;
	uint32_t number = recency->next;

	while (number < KVS_MAX_FILES && !nvme->files[number].used) {
		number++;
	}
	if (number < KVS_MAX_FILES) {
		nvme->files[number].used = 0;
		recency->files--;
		recency->next = number + 1u;
	}
	if (number == KVS_MAX_FILES || recency->files == 0) {
		recency->next = 0;
		recency->due_ns = now + RECENCY_NS;
	}

	return number;
}

void kvs_recency_collect(kvs_nvme_t *nvme, kvs_commit_t *c, uint64_t now)
{
	const kvs_dfile_t *file;
	image_t *image;
	uint32_t number;

	c->recency = NULL;
	if (!kvs_recency_is_due(nvme, now)) {
		return;
	}
	number = next_file(nvme, now);
	if (number == KVS_MAX_FILES) {
		return;
	}
	file = &nvme->files[number];
	image = kv_alloc(nvme->env, image_bytes(file->slots));
	if (!image) {
		kv_metric_add(nvme->metrics, KV_M_DISK_RECENCY_ERRORS, 1);
		return;
	}
	*image = (image_t){.magic = MAGIC,
			   .uuid = nvme->super.uuid,
			   .version = VERSION,
			   .slot_class = file->slot_class,
			   .number = number,
			   .slots = file->slots};
	memcpy(image->word, file->use, file->slots * sizeof *file->use);
	c->recency = image;
}

static int write_all(int fd, const void *bytes, size_t n)
{
	const uint8_t *at = bytes;

	while (n > 0) {
		ssize_t done = write(fd, at, n);

		if (done < 0 && errno == EINTR) {
			continue;
		}
		if (done <= 0) {
			return -1;
		}
		at += done;
		n -= (size_t)done;
	}

	return 0;
}

/* Under another name first: a process that is killed half way leaves the file of before. */
void kvs_recency_write(const kvs_nvme_t *nvme, kvs_commit_t *c)
{
	image_t *image = c->recency;
	char fresh[48], name[48];
	int fd;

	c->recency_failed = 0;
	if (!image) {
		return;
	}
	image->check = kv_digest(image, image_bytes(image->slots));
	file_name(image->number, "", name);
	file_name(image->number, ".new", fresh);
	fd = openat(nvme->dir_fd, fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0 && errno == ENOENT && mkdirat(nvme->dir_fd, DIRECTORY, 0700) == 0) {
		fd = openat(nvme->dir_fd, fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
	}
	c->recency_failed = fd < 0 || write_all(fd, image, image_bytes(image->slots)) != 0;
	if (fd >= 0) {
		close(fd);
		c->recency_failed |= !c->recency_failed && renameat(nvme->dir_fd, fresh, nvme->dir_fd, name) != 0;
		if (c->recency_failed) {
			(void)unlinkat(nvme->dir_fd, fresh, 0);
		}
	}
}

/* What could not be written is not tried again before the file is used again: it is a hint. */
void kvs_recency_apply(kvs_nvme_t *nvme, kvs_commit_t *c)
{
	if (c->recency) {
		kv_metric_add(nvme->metrics, KV_M_DISK_RECENCY_ERRORS, c->recency_failed ? 1 : 0);
	}
	kv_free(nvme->env, c->recency);
	c->recency = NULL;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* The image, in memory of its size, is one of this file. */
static int is_ours(const kvs_nvme_t *nvme, uint32_t number, image_t *image)
{
	const kvs_dfile_t *file = &nvme->files[number];
	const uint64_t check = image->check;

	image->check = 0;

	return image->magic == MAGIC && image->version == VERSION && image->uuid == nvme->super.uuid &&
	       image->slot_class == file->slot_class && image->number == number && image->slots == file->slots &&
	       kv_digest(image, image_bytes(file->slots)) == check;
}

/* Only the words of generations that are there now: nothing of the file is used as a size or an index. */
static void take_words(kvs_nvme_t *nvme, uint32_t number, const image_t *image)
{
	const kvs_dfile_t *file = &nvme->files[number];

	for (uint32_t i = 0; i < file->slots; i++) {
		const kvs_dslot_t *s = &file->slot[i];

		if ((s->flags & KVS_SLOT_STORED) && (image->word[i] & GEN_MASK) == (s->gen & GEN_MASK)) {
			file->use[i] = image->word[i];
			if (image->word[i] >> GEN_BITS > nvme->recency.base) {
				nvme->recency.base = image->word[i] >> GEN_BITS;
			}
		}
	}
}

static void read_file(kvs_nvme_t *nvme, uint32_t number)
{
	const size_t bytes = image_bytes(nvme->files[number].slots);
	image_t *image = kv_alloc(nvme->env, bytes + 1u);
	ssize_t n = -1;
	char name[48];
	int fd;

	file_name(number, "", name);
	fd = openat(nvme->dir_fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	if (fd >= 0) {
		n = image ? read(fd, image, bytes + 1u) : -1;
		close(fd);
	}
	if (image && n == (ssize_t)bytes && is_ours(nvme, number, image)) {
		take_words(nvme, number, image);
	} else if (fd >= 0 || errno != ENOENT) {
		kv_metric_add(nvme->metrics, KV_M_DISK_RECENCY_ERRORS, 1);
	}
	kv_free(nvme->env, image);
}

void kvs_recency_read(kvs_nvme_t *nvme)
{
	kvs_recency_t *recency = &nvme->recency;

	for (uint32_t number = 0; number < KVS_MAX_FILES; number++) {
		if (nvme->files[number].slot) {
			read_file(nvme, number);
		}
	}
	recency->base++;
	for (uint32_t number = 0; number < KVS_MAX_FILES; number++) {
		const kvs_dfile_t *file = &nvme->files[number];

		for (uint32_t i = 0; file->slot && i < file->slots; i++) {
			if ((file->slot[i].flags & KVS_SLOT_STORED) && file->use[i] == 0) {
				set_word(nvme, kv_slot_make(number, i), file->slot[i].gen, recency->base);
			}
		}
	}
}

/* ---- the order ------------------------------------------------------------------------------- */

void kvs_recency_begin(kvs_nvme_t *nvme, uint32_t max)
{
	nvme->recency.order = kv_alloc(nvme->env, ((size_t)max + 1u) * sizeof *nvme->recency.order);
	nvme->recency.cap = nvme->recency.order ? max : 0;
}

void kvs_recency_add(kvs_nvme_t *nvme, kv_slot_t slot, uint32_t depth)
{
	kvs_recency_t *recency = &nvme->recency;

	if (recency->count < recency->cap) {
		recency->order[recency->count++] =
			(kvs_used_t){.use = kvs_recency_of(nvme, slot), .depth = depth, .slot = slot};
	}
}

static int compare(const void *a, const void *b)
{
	const kvs_used_t *x = a, *y = b;

	return x->use != y->use       ? (x->use > y->use) - (x->use < y->use)
	       : x->depth != y->depth ? (x->depth > y->depth) - (x->depth < y->depth)
				      : (x->slot > y->slot) - (x->slot < y->slot);
}

void kvs_recency_sort(kvs_nvme_t *nvme)
{
	if (nvme->recency.count > 1) {
		qsort(nvme->recency.order, nvme->recency.count, sizeof *nvme->recency.order, compare);
	}
}

kv_status_t kvs_nvme_recover_use(kvs_tier_t *tier, uint32_t memory, kvs_used_fn used, void *arg, uint32_t max)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	kvs_recency_t *recency = &nvme->recency;

	(void)memory;
	kv_assert(nvme->recovered);
	for (; recency->reported < recency->count && max > 0; recency->reported++, max--) {
		const kv_slot_t slot = recency->order[recency->reported].slot;
		const kvs_dslot_t *s = kvs_slot_get(nvme, slot);

		if (s && s->state == KVS_READY) {
			used(arg, (kvs_loc_t){.slot = slot, .gen = s->gen}, &s->key, s->group);
		}
	}
	if (recency->reported < recency->count) {
		return KV_PENDING;
	}
	kv_free(nvme->env, recency->order);
	recency->order = NULL;
	recency->count = recency->cap = recency->reported = 0;

	return KV_OK;
}
