/* What happens to slot files behind the tier's back: a file that is removed or cut, and slots the device cannot read
 * for a while (decision 022). */
#include "impl.h"

#include <fcntl.h>
#include <sys/stat.h>

#define LOOK_NS      1000000000ull /* all files are looked at this often while there is work, */
#define LOOK_IDLE_NS 5000000000ull /* and this often while there is none */
#define ASIDE_MIN_NS 100000000ull
#define ASIDE_MAX_NS 60000000000ull
#define RETIRE_NS    600000000000ull /* unreadable for so long, and at each of so many tries: given up */
#define RETIRE_TRIES 8u

/* ---- files: the commit thread looks, the owner acts ------------------------------------------ */

/* Is the directory of slot files still the one under the tier's path? */
static int directory_is_there(const kvs_nvme_t *nvme)
{
	struct stat open_one;
	struct stat named;

	return fstat(nvme->slots_fd, &open_one) == 0 && open_one.st_nlink > 0 &&
	       fstatat(nvme->dir_fd, "slots", &named, AT_SYMLINK_NOFOLLOW) == 0 && named.st_ino == open_one.st_ino &&
	       named.st_dev == open_one.st_dev && fstat(nvme->dir_fd, &open_one) == 0 &&
	       stat(nvme->path, &named) == 0 && named.st_ino == open_one.st_ino && named.st_dev == open_one.st_dev;
}

void kvs_lookout_collect(kvs_nvme_t *nvme, kvs_commit_t *c, uint64_t now)
{
	int all = now - nvme->looked_ns >= LOOK_NS;

	c->look_count = 0;
	for (uint32_t i = 0; i < KVS_MAX_FILES; i++) {
		const kvs_dfile_t *file = &nvme->files[i];

		if (file->slot && !file->gone && (all || file->dirty)) {
			c->look[c->look_count++] = (kvs_look_t){.number = i, .fd = file->fd};
		}
	}
	nvme->looked_ns = all ? now : nvme->looked_ns;
}

int kvs_lookout_is_due(const kvs_nvme_t *nvme, uint64_t now)
{
	return now - nvme->looked_ns >= LOOK_IDLE_NS && nvme->slots > 0;
}

void kvs_lookout_run(const kvs_nvme_t *nvme, kvs_commit_t *c)
{
	c->directory_gone = !directory_is_there(nvme);
	for (uint32_t i = 0; i < c->look_count; i++) {
		struct stat st;

		c->look[i].bytes = UINT64_MAX;
		if (fstat(c->look[i].fd, &st) == 0) {
			c->look[i].bytes = st.st_nlink == 0 ? 0 : (uint64_t)st.st_size;
		}
	}
}

static void lose_stored(kvs_nvme_t *nvme, uint32_t number, uint32_t from)
{
	kvs_dfile_t *file = &nvme->files[number];

	for (uint32_t i = from; i < file->slots; i++) {
		kvs_dslot_t *s = &file->slot[i];

		if ((s->flags & KVS_SLOT_STORED) && s->state != KVS_QUARANTINED && !(s->flags & KVS_SLOT_FREEING)) {
			kvs_slot_lose(nvme, kv_slot_make(number, i), s);
		}
	}
}

void kvs_lookout_take(kvs_nvme_t *nvme, const kvs_commit_t *c)
{
	if (c->directory_gone) {
		kvs_fault_raise(nvme, KVS_FAULT_FILES, "looking for the directory of slot files",
				"another one, or none, is under its path");
	} else {
		kvs_fault_forget(nvme, KVS_FAULT_FILES);
	}
	for (uint32_t i = 0; i < c->look_count; i++) {
		const kvs_look_t *look = &c->look[i];
		kvs_dfile_t *file = &nvme->files[look->number];
		uint64_t stride = nvme->classes[file->slot_class].stride;

		if (look->bytes >= file->slots * stride) {
			file->cut = 0;
			continue;
		}
		if (look->bytes > 0 && file->cut) {
			continue; /* it grows again with the slots that are written */
		}
		kv_metric_add(nvme->metrics, KV_M_DISK_FILES_DROPPED, look->bytes == 0);
		kv_logf(nvme->env, KV_LOG_ERROR, "nvme",
			"slot file %u.%u was %s while the daemon ran; what was there is lost", file->slot_class,
			look->number, look->bytes == 0 ? "removed" : "cut");
		file->cut = 1;
		lose_stored(nvme, look->number, (uint32_t)(look->bytes / stride));
		if (look->bytes == 0) {
			kvs_file_retire(nvme, look->number);
		}
	}
}

/* ---- slots that the device does not read (decision 032) -------------------------------------- */

static kvs_aside_t *aside_find(kvs_nvme_t *nvme, kv_slot_t slot)
{
	for (uint32_t i = 0; i < KVS_MAX_ASIDE; i++) {
		if (nvme->aside[i].tries > 0 && nvme->aside[i].slot == slot) {
			return &nvme->aside[i];
		}
	}

	return NULL;
}

static void tell(const kvs_nvme_t *nvme, kv_slot_t slot, const kvs_dslot_t *s, int readable)
{
	kv_key_t key = s->key;

	if (nvme->watch.readable && !(s->flags & KVS_SLOT_FREEING)) {
		nvme->watch.readable(nvme->watch.arg, (kvs_loc_t){slot, s->gen}, &key, s->group, readable);
	}
}

/* An entry for the slot; when all are taken, that of the slot which has waited longest, whose next load is its next
 * try. */
static kvs_aside_t *aside_make(kvs_nvme_t *nvme, kv_slot_t slot, uint64_t now)
{
	kvs_aside_t *entry = &nvme->aside[0];

	for (uint32_t i = 0; i < KVS_MAX_ASIDE; i++) {
		kvs_aside_t *other = &nvme->aside[i];

		if (other->tries == 0) {
			entry = other;
			break;
		}
		entry = other->since_ns < entry->since_ns ? other : entry;
	}
	if (entry->tries > 0) {
		kvs_aside_read(nvme, entry->slot, kvs_slot_get(nvme, entry->slot));
	}
	*entry = (kvs_aside_t){.slot = slot, .since_ns = now};
	nvme->aside_count++;

	return entry;
}

void kvs_aside_add(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s)
{
	uint64_t now = kv_now_ns(nvme->env);
	kvs_aside_t *entry = s->flags & KVS_SLOT_ASIDE ? aside_find(nvme, slot) : NULL;
	int is_new = !entry;

	if (s->flags & KVS_SLOT_FREEING || s->state == KVS_QUARANTINED) {
		kvs_aside_drop(nvme, slot, s);
		return;
	}
	if (entry && now < entry->until_ns) {
		return; /* a read that was under way when the pause began */
	}
	entry = entry ? entry : aside_make(nvme, slot, now);
	s->flags |= KVS_SLOT_ASIDE;
	entry->tries++;
	entry->wait_ns = entry->wait_ns * 2u < ASIDE_MIN_NS ? ASIDE_MIN_NS : entry->wait_ns * 2u;
	entry->wait_ns = entry->wait_ns > ASIDE_MAX_NS ? ASIDE_MAX_NS : entry->wait_ns;
	entry->until_ns = now + entry->wait_ns;
	if (entry->tries >= RETIRE_TRIES && now - entry->since_ns >= RETIRE_NS) {
		kv_logf(nvme->env, KV_LOG_ERROR, "nvme",
			"slot cannot be read for too long and is given up file %u index %u", kv_slot_slab(slot),
			kv_slot_index(slot));
		s->flags |= KVS_SLOT_RETIRED;
		kvs_slot_lose(nvme, slot, s);
	} else if (is_new) {
		tell(nvme, slot, s, 0);
	}
}

void kvs_aside_drop(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s)
{
	if (s->flags & KVS_SLOT_ASIDE) {
		aside_find(nvme, slot)->tries = 0;
		nvme->aside_count--;
		s->flags &= (uint8_t)~KVS_SLOT_ASIDE;
	}
}

void kvs_aside_read(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s)
{
	if (s->flags & KVS_SLOT_ASIDE) {
		kvs_aside_drop(nvme, slot, s);
		tell(nvme, slot, s, 1);
	}
}

kv_status_t kvs_nvme_readable(kvs_tier_t *tier, kvs_loc_t loc)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	const kvs_dslot_t *s = kvs_slot_at(nvme, loc);

	if (nvme->health == KVS_HEALTH_OFF) {
		return KV_ERR_TIER_OFF;
	}

	return s && (s->flags & KVS_SLOT_ASIDE) ? KV_ERR_IO : KV_OK;
}

static void reread_done(void *arg, kv_status_t status)
{
	kvs_nvme_t *nvme = arg;
	kvs_dslot_t *s = kvs_slot_at(nvme, nvme->reread.loc);

	nvme->reread.busy = 0;
	if (status == KV_ERR_CLOSED) {
		return; /* the device may still write into the memory */
	}
	kvs_mem_give(nvme, &nvme->reread.mem);
	if (status == KV_ERR_CORRUPT && s) {
		kvs_slot_lose(nvme, nvme->reread.loc.slot, s);
	}
}

void kvs_aside_step(kvs_nvme_t *nvme)
{
	kvs_reread_t *reread = &nvme->reread;
	uint64_t now = kv_now_ns(nvme->env);
	uint32_t due = KVS_MAX_ASIDE;

	if (nvme->aside_count == 0 || reread->busy || nvme->health == KVS_HEALTH_OFF || nvme->closing) {
		return;
	}
	for (uint32_t i = 0; i < KVS_MAX_ASIDE; i++) {
		if (nvme->aside[i].tries > 0 && nvme->aside[i].until_ns <= now &&
		    (due == KVS_MAX_ASIDE || nvme->aside[i].until_ns < nvme->aside[due].until_ns)) {
			due = i;
		}
	}
	if (due == KVS_MAX_ASIDE || !kvs_mem_take(nvme, kvs_slot_class(nvme, nvme->aside[due].slot), &reread->mem)) {
		return;
	}
	reread->loc = (kvs_loc_t){nvme->aside[due].slot, kvs_slot_get(nvme, nvme->aside[due].slot)->gen};
	reread->busy = kvs_load_submit(nvme, reread->loc, &reread->mem, reread_done, nvme) == KV_OK;
	if (!reread->busy) {
		kvs_mem_give(nvme, &reread->mem);
	}
}
