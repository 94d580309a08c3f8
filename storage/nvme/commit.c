/* Durability: what the owner has changed goes to disk in rounds of the commit thread.
 *
 * One round: superblock if it changed, then data of all files written since the last round (fdatasync), then one synced
 * batch of rows. Rows are made only of slots whose write had ended before the round was built, so a row never speaks of
 * bytes that are not on the device. A flush belongs to the round number of its call: it waits until the stores of that
 * number have ended, and for the round that then covers them.
 */
#include "commit.h"

#include "faults.h"
#include "files.h"
#include "fs_status.h"
#include "nvme/slots/recency.h"
#include "nvme/slots/slots.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define RETRY_NS 1000000000ull

/* ---- the commit thread ----------------------------------------------------------------------- */

static kv_status_t sync_files(kvs_nvme_t *nvme, const kvs_commit_t *c)
{
	if (!nvme->config.sync) {
		return KV_OK;
	}
	if (c->sync_dir && fsync(nvme->slots_fd) != 0) {
		kv_logf(nvme->env, KV_LOG_ERROR, "nvme", "cannot sync the directory of slot files: %s",
			strerror(errno));
		return kvs_fs_status(errno);
	}
	for (uint32_t i = 0; i < c->file_count; i++) {
		int result;

		do {
			result = fdatasync(c->fds[i]);
		} while (result != 0 && errno == EINTR);
		if (result != 0) {
			kv_logf(nvme->env, KV_LOG_ERROR, "nvme", "cannot sync slot file number %u: %s", c->files[i],
				strerror(errno));
			return kvs_fs_status(errno);
		}
	}

	return KV_OK;
}

/* Does the directory of slot files take a file and a page again, and is there room for the file or the bytes wanted?
 * 0, or an errno. */
static int probe_device(kvs_nvme_t *nvme, kvs_commit_t *c)
{
	static const char page[KVS_PAGE];
	struct statvfs room;
	int fd = openat(nvme->slots_fd, ".probe", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
	int error;

	if (fd < 0) {
		return errno;
	}
	error = c->file_wanted > 0 ? kvs_preallocate(fd, c->file_wanted) : 0;
	error = error == EOPNOTSUPP ? 0 : error;
	if (error == 0 && pwrite(fd, page, sizeof page, 0) != (ssize_t)sizeof page) {
		error = errno;
	} else if (error == 0 && fsync(fd) != 0) {
		error = errno;
		c->sync_status = kvs_fs_status(error);
	} else if (error == 0 && fstatvfs(fd, &room) == 0 &&
		   (uint64_t)room.f_bavail * room.f_frsize < c->space_wanted) {
		error = ENOSPC;
	}
	close(fd);
	unlinkat(nvme->slots_fd, ".probe", 0);

	return error;
}

static void run_round(kvs_nvme_t *nvme, kvs_commit_t *c)
{
	c->super_status = KV_OK;
	c->sync_status = KV_OK;
	c->status = KV_OK;
	if (c->probe) {
		c->probe_error = probe_device(nvme, c);
		c->status = c->probe_error ? kvs_fs_status(c->probe_error) : KV_OK;
		return;
	}
	/* The order is what makes rows true (decision 005): the superblock first, for a row names a class and an epoch;
	 * then the data; the rows last, so that no row ever speaks of bytes that a power loss can take. */
	kvs_file_checks_run(nvme, c);
	if (c->image) {
		int sync_failed = 0;

		c->super_status =
			kvs_super_write(nvme->dir_fd, c->image, c->image_len, nvme->config.sync, &sync_failed);
		c->sync_status = sync_failed ? c->super_status : KV_OK;
	}
	if (c->sync_status == KV_OK) {
		c->sync_status = sync_files(nvme, c);
	}
	if (c->super_status == KV_OK && c->sync_status == KV_OK) {
		c->status = c->count > 0 || c->try_meta ? kvs_metadb_write(nvme->db, c->change, c->count) : KV_OK;
		if (c->status == KV_OK && c->mark) {
			c->status = kvs_metadb_mark(nvme->db);
			c->status = c->status == KV_ERR_CORRUPT ? KV_OK : c->status; /* it was lost meanwhile */
		}
	} else {
		c->status = c->super_status != KV_OK ? c->super_status : c->sync_status;
	}
	kvs_recency_write(nvme, c);
	c->meta_bytes = kvs_metadb_bytes(nvme->meta_path);
}

/* Rows that wait: until their time has come. Nothing to commit: until somebody rings. */
static int sleep_ms(kvs_nvme_t *nvme)
{
	uint64_t ms = (nvme->config.flush_interval_ns + 999999u) / 1000000u;

	if (!atomic_load(&nvme->dirty_hint)) {
		return -1;
	}

	return ms < 1u ? 1 : ms > 1000u ? 1000 : (int)ms;
}

void *kvs_commit_main(void *arg)
{
	kvs_nvme_t *nvme = arg;
	kvs_commit_t *c = nvme->commit;
	struct pollfd wait[2] = {{.fd = nvme->commit_wakeup.fd, .events = POLLIN}, {.fd = -1, .events = POLLIN}};

	(void)prctl(PR_SET_NAME, "kvd-commit", 0, 0, 0);
	while (1) {
		if (atomic_load(&c->state) == 1) {
			run_round(nvme, c);
			atomic_store(&c->state, 2);
			kvs_wakeup_signal(&nvme->owner_wakeup);
			continue;
		}
		if (atomic_load(&nvme->commit_stop)) {
			break;
		}
		kvs_wakeup_arm(&nvme->commit_wakeup);
		if (atomic_load(&c->state) != 1 && !atomic_load(&nvme->commit_stop)) {
			int rung;

			wait[1].fd = atomic_load(&nvme->watch_meta) ? kvs_metadb_fd(nvme->db) : -1;
			rung = poll(wait, 2, sleep_ms(nvme));
			if (rung > 0 && wait[0].revents) {
				kvs_wakeup_clear(&nvme->commit_wakeup);
			}
			if (rung > 0 && wait[1].revents) {
				atomic_store(&nvme->meta_died, kvs_metadb_note_death(nvme->db));
				kvs_wakeup_signal(&nvme->owner_wakeup);
			} else if (rung <= 0 && atomic_load(&nvme->dirty_hint)) {
				kvs_wakeup_signal(&nvme->owner_wakeup);
			}
		}
		kvs_wakeup_disarm(&nvme->commit_wakeup);
	}
	/* Here and not by the owner: the process dies with the thread that has started it. */
	kvs_metadb_close(nvme->db);
	nvme->db = NULL;

	return NULL;
}

/* ---- the owner: building a round ------------------------------------------------------------- */

static void add_change(kvs_nvme_t *nvme, kvs_commit_t *c, kv_slot_t slot, kvs_dslot_t *s)
{
	kvs_row_change_t *change = &c->change[c->count];
	uint32_t slot_class = nvme->files[kv_slot_slab(slot)].slot_class;
	int live = (s->state == KVS_READY || s->state == KVS_TRANSIT) && (s->flags & KVS_SLOT_STORED) &&
		   !(s->flags & KVS_SLOT_FREEING);

	if (live && s->rec == KVS_NONE) {
		return; /* its row is there and says the same */
	}
	if (!live && !(s->flags & KVS_SLOT_ROW)) {
		return;
	}

	change->is_put = live;
	change->row = (kvs_row_t){.slot_class = slot_class, .slot = slot, .gen = s->gen};
	if (live) {
		change->row.meta = nvme->recs[s->rec].meta;
		change->row.digest = nvme->recs[s->rec].digest;
		change->row.length = nvme->classes[slot_class].geometry.block_bytes;
		s->flags |= KVS_SLOT_ROW;
	} else {
		s->flags &= (uint8_t)~KVS_SLOT_ROW;
	}
	c->count++;
}

static void collect_rows(kvs_nvme_t *nvme, kvs_commit_t *c)
{
	c->count = 0;
	while (nvme->dirty_head != KV_SLOT_NONE && c->count < KVS_COMMIT_ROWS) {
		kv_slot_t slot = nvme->dirty_head;
		kvs_dslot_t *s = kvs_slot_get(nvme, slot);

		nvme->dirty_head = s->next_dirty;
		if (nvme->dirty_head == KV_SLOT_NONE) {
			nvme->dirty_tail = KV_SLOT_NONE;
		}
		nvme->dirty_out++;
		s->flags &= (uint8_t)~KVS_SLOT_DIRTY;
		add_change(nvme, c, slot, s);
	}
	nvme->dirty_since_ns = kv_now_ns(nvme->env);
	atomic_store(&nvme->dirty_hint, nvme->dirty_head != KV_SLOT_NONE);
}

static void collect_files(kvs_nvme_t *nvme, kvs_commit_t *c)
{
	c->file_count = 0;
	for (uint32_t i = 0; i < KVS_MAX_FILES; i++) {
		if (nvme->files[i].slot && nvme->files[i].dirty) {
			nvme->files[i].dirty = 0;
			c->files[c->file_count] = i;
			c->fds[c->file_count++] = nvme->files[i].fd;
		}
	}
	c->sync_dir = nvme->slots_dirty;
	nvme->slots_dirty = 0;
}

kv_status_t kvs_commit_sync_all(kvs_nvme_t *nvme)
{
	for (uint32_t i = 0; i < KVS_MAX_FILES; i++) {
		nvme->files[i].dirty = 1;
	}
	nvme->slots_dirty = 1;
	collect_files(nvme, nvme->commit);

	return sync_files(nvme, nvme->commit);
}

int kvs_mark_is_due(const kvs_nvme_t *nvme)
{
	return nvme->mark_owed && nvme->unverified == 0;
}

static void retry_later(kvs_nvme_t *nvme)
{
	nvme->commit_after_ns = kv_now_ns(nvme->env) + RETRY_NS;
	kvs_commit_request(nvme);
}

/* What the superblock says of classes is in the next image, or is as the last one has left it. */
static void move_records(kvs_nvme_t *nvme, kvs_record_state_t from, kvs_record_state_t to)
{
	for (uint32_t i = 0; i < nvme->super.class_count; i++) {
		nvme->classes[i].record = (uint8_t)(nvme->classes[i].record == from ? to : nvme->classes[i].record);
	}
}

static void post_round(kvs_nvme_t *nvme)
{
	atomic_store(&nvme->commit->state, 1);
	kvs_wakeup_signal(&nvme->commit_wakeup);
}

static void begin_round(kvs_nvme_t *nvme)
{
	kvs_commit_t *c = nvme->commit;

	c->probe = 0;
	c->image = NULL;
	c->try_meta = nvme->faults[KVS_FAULT_META].active | atomic_exchange(&nvme->meta_died, 0);
	c->mark = kvs_mark_is_due(nvme);
	if (nvme->super_dirty) {
		if (kvs_super_encode(&nvme->super, &c->image, &c->image_len) != KV_OK) {
			retry_later(nvme);
			return;
		}
		nvme->super_dirty = 0;
		move_records(nvme, KVS_RECORD_CHANGED, KVS_RECORD_IN_ROUND);
		nvme->super_round = nvme->super_asked;
	}
	kvs_file_checks_collect(nvme, c, kv_now_ns(nvme->env));
	kvs_recency_collect(nvme, c, kv_now_ns(nvme->env));
	collect_files(nvme, c);
	collect_rows(nvme, c);
	c->covers = nvme->draining && nvme->drained && nvme->dirty_out >= nvme->drain_target;
	post_round(nvme);
}

/* ---- the owner: taking the answer ------------------------------------------------------------ */

/* Which waiters: flushes of a round before the current one, or superblock writes up to the number that was written. */
static uint32_t answer_waiters(kvs_nvme_t *nvme, int is_super, kv_status_t status)
{
	uint32_t kept = 0;
	uint32_t count = nvme->waiter_count;
	uint32_t ran = 0;
	kvs_waiter_t *list = nvme->answering;

	for (uint32_t i = 0; i < count; i++) {
		const kvs_waiter_t *w = &nvme->waiters[i];
		int hit = w->is_super == is_super &&
			  (is_super ? (int32_t)(w->round - nvme->super_round) <= 0 : w->round != nvme->round);

		if (hit) {
			list[ran++] = *w;
		} else {
			nvme->waiters[kept++] = *w;
		}
	}
	nvme->waiter_count = kept;

	/* The callbacks may flush again. */
	for (uint32_t i = 0; i < ran; i++) {
		list[i].done(list[i].arg, status);
	}

	return ran;
}

/* A sync has failed: whatever was stored since the last round in which all went well may be gone, whatever reads say.
 * Its record is still there: rows are committed after all syncs of their round. Syncing again would prove nothing. */
static void lose_unsynced(kvs_nvme_t *nvme, const kvs_commit_t *c)
{
	nvme->failed_syncs++; /* writes in flight end as errors */
	for (uint32_t i = 0; i < c->count; i++) {
		kvs_dslot_t *s = kvs_slot_get(nvme, c->change[i].row.slot);

		if (c->change[i].is_put && s->gen == c->change[i].row.gen && s->rec != KVS_NONE &&
		    s->state != KVS_QUARANTINED) {
			kvs_slot_mark_lost(nvme, c->change[i].row.slot, s);
		}
	}
	for (kv_slot_t slot = nvme->dirty_head; slot != KV_SLOT_NONE; slot = kvs_slot_get(nvme, slot)->next_dirty) {
		kvs_dslot_t *s = kvs_slot_get(nvme, slot);

		if (s->rec != KVS_NONE && (s->flags & KVS_SLOT_STORED) && s->state != KVS_QUARANTINED &&
		    !(s->flags & KVS_SLOT_FREEING)) {
			kvs_slot_mark_lost(nvme, slot, s);
		}
	}
}

static void rows_failed(kvs_nvme_t *nvme, const kvs_commit_t *c)
{
	for (uint32_t i = 0; i < c->count; i++) {
		kvs_dslot_t *s = kvs_slot_get(nvme, c->change[i].row.slot);

		s->flags |= KVS_SLOT_ROW; /* it may or may not be there: say what holds once more */
		kvs_slot_mark_dirty(nvme, c->change[i].row.slot, s);
	}
	retry_later(nvme);
}

static void rows_done(kvs_nvme_t *nvme, const kvs_commit_t *c)
{
	for (uint32_t i = 0; i < c->count; i++) {
		kvs_dslot_t *s = kvs_slot_get(nvme, c->change[i].row.slot);

		if (c->change[i].is_put && s->gen == c->change[i].row.gen) {
			kvs_rec_free(nvme, s);
		}
	}
	if (c->count > 0) {
		kv_metric_add(nvme->metrics, KV_M_DISK_COMMITS, 1);
	}
	nvme->mark_owed &= !c->mark;
	if (c->count > 0 || c->super_written || c->try_meta) {
		kvs_fault_reset(nvme, KVS_FAULT_META);
	}
	if (c->file_count > 0) {
		kvs_fault_reset(nvme, KVS_FAULT_SYNC);
	}
}

/* Faults that a new file, with a page written and synced, speaks for. */
static const kvs_fault_t probed[] = {KVS_FAULT_SPACE, KVS_FAULT_CARVE, KVS_FAULT_WRITE, KVS_FAULT_SYNC, KVS_FAULT_READ};

static void apply_probe(kvs_nvme_t *nvme, const kvs_commit_t *c)
{
	for (size_t i = 0; i < KV_COUNT_OF(probed); i++) {
		kvs_fault_t fault = probed[i];

		if (!nvme->faults[fault].active) {
			continue;
		}
		if (c->status == KV_OK || (c->status == KV_ERR_NOSPC && fault != KVS_FAULT_SPACE)) {
			kvs_fault_clear(nvme, fault);
		} else if (c->sync_status == KV_OK || fault != KVS_FAULT_SYNC) { /* a failed sync has raised its own */
			kvs_fault_raise(nvme, fault, "writing a page to try the device", strerror(c->probe_error));
		}
	}
	if (c->status == KV_OK) {
		nvme->read_errors = nvme->write_errors = 0;
	}
}

/* Full, not broken: then only what needs room has to wait. */
void kvs_commit_raise_meta(kvs_nvme_t *nvme, const char *doing, kv_status_t status)
{
	if (status != KV_ERR_NOSPC) {
		kvs_fault_raise(nvme, KVS_FAULT_META, doing, kv_status_text(status));
		return;
	}
	kvs_fault_reset(nvme, KVS_FAULT_META);
	if (!nvme->faults[KVS_FAULT_SPACE].active) {
		nvme->space_wanted = KVS_PAGE;
		kvs_fault_raise(nvme, KVS_FAULT_SPACE, doing, kv_status_text(status));
	}
}

static uint32_t apply_result(kvs_nvme_t *nvme)
{
	kvs_commit_t *c = nvme->commit;
	int had_image = c->image != NULL;
	uint32_t ran = 0;

	nvme->rounds++;
	/* First of all: after a failed sync the kernel may have dropped the dirty pages and marked them clean, so a
	 * second sync proves nothing (decision 022). What the round was to carry is lost before any waiter is answered.
	 */
	if (c->sync_status != KV_OK) {
		kv_metric_add(nvme->metrics, KV_M_DISK_ERRORS, 1);
		kvs_fault_raise(nvme, KVS_FAULT_SYNC, "a sync of the disk tier", kv_status_text(c->sync_status));
		lose_unsynced(nvme, c);
	}
	if (c->probe) {
		apply_probe(nvme, c);
		return 0;
	}
	kvs_file_checks_apply(nvme, c);
	kvs_recency_apply(nvme, c);
	c->super_written = had_image && c->super_status == KV_OK;
	kv_free(nvme->env, c->image);
	c->image = NULL;
	nvme->meta_bytes = c->meta_bytes;
	nvme->slots_dirty |= c->sync_status != KV_OK && c->sync_dir;
	if (c->status == KV_OK) {
		rows_done(nvme, c);
	} else {
		nvme->super_dirty |= had_image && c->super_status != KV_OK;
		if (c->sync_status == KV_OK) {
			kv_metric_add(nvme->metrics, KV_M_DISK_ERRORS, 1);
			kvs_commit_raise_meta(nvme, "committing metadata", c->status);
		}
		rows_failed(nvme, c);
	}

	if (had_image) {
		move_records(nvme, KVS_RECORD_IN_ROUND, c->super_written ? KVS_RECORD_WRITTEN : KVS_RECORD_CHANGED);
		ran += answer_waiters(nvme, 1, c->super_status);
	}
	if (c->covers || (nvme->draining && c->status != KV_OK)) {
		/* A block stored before the flush has been lost, and the watch does not know yet. */
		kv_status_t status = c->status == KV_OK && nvme->lost > 0 ? KV_ERR_IO : c->status;

		nvme->draining = 0;
		ran += answer_waiters(nvme, 0, status);
	}

	return ran;
}

/* ---- the owner: what is next ----------------------------------------------------------------- */

static int flush_is_wanted(const kvs_nvme_t *nvme)
{
	for (uint32_t i = 0; i < nvme->waiter_count; i++) {
		if (!nvme->waiters[i].is_super) {
			return 1;
		}
	}

	return 0;
}

static void begin_drain(kvs_nvme_t *nvme)
{
	nvme->draining = 1;
	nvme->drained = 0;
	nvme->drain_open += nvme->round_open;
	nvme->round_open = 0;
	nvme->round++;
}

static void begin_probe(kvs_nvme_t *nvme)
{
	nvme->commit->probe = 1;
	nvme->commit->count = 0;
	nvme->commit->space_wanted = nvme->faults[KVS_FAULT_SPACE].active ? nvme->space_wanted : 0;
	nvme->commit->file_wanted = nvme->faults[KVS_FAULT_CARVE].active ? nvme->file_wanted : 0;
	post_round(nvme);
}

static int probe_is_due(const kvs_nvme_t *nvme, uint64_t now)
{
	for (size_t i = 0; i < KV_COUNT_OF(probed) && !nvme->closing; i++) {
		if (kvs_fault_is_due(nvme, probed[i], now)) {
			return 1;
		}
	}

	return 0;
}

static uint32_t refuse_flushes(kvs_nvme_t *nvme, kv_status_t status)
{
	begin_drain(nvme);
	nvme->draining = 0;

	return answer_waiters(nvme, 0, status);
}

/* Every waiter is told that nothing can be made durable now. */
static uint32_t refuse_waiters(kvs_nvme_t *nvme)
{
	nvme->super_round = nvme->super_asked;

	return refuse_flushes(nvme, KV_ERR_TIER_OFF) + answer_waiters(nvme, 1, KV_ERR_TIER_OFF);
}

static int round_is_due(const kvs_nvme_t *nvme, uint64_t now)
{
	uint64_t dirty = nvme->dirty_in - nvme->dirty_out;

	if (nvme->draining && nvme->drained) {
		return 1;
	}
	if (now < nvme->commit_after_ns) {
		return 0;
	}

	return nvme->super_dirty || dirty >= KVS_COMMIT_ROWS || kvs_mark_is_due(nvme) ||
	       atomic_load(&nvme->meta_died) || kvs_fault_is_due(nvme, KVS_FAULT_META, now) ||
	       kvs_fault_is_due(nvme, KVS_FAULT_FILES, now) || kvs_file_checks_are_due(nvme, now) ||
	       kvs_recency_is_due(nvme, now) ||
	       (dirty > 0 && (nvme->closing || now - nvme->dirty_since_ns >= nvme->config.flush_interval_ns));
}

uint32_t kvs_commit_step(kvs_nvme_t *nvme)
{
	uint64_t now = kv_now_ns(nvme->env);
	uint32_t ran = 0;

	if (atomic_load(&nvme->commit->state) == 1) {
		return 0;
	}
	if (atomic_load(&nvme->commit->state) == 2) {
		ran = apply_result(nvme);
		atomic_store(&nvme->commit->state, 0);
	}
	kvs_files_close_removed(nvme);
	kvs_file_reserve_fd(nvme);
	if (probe_is_due(nvme, now)) {
		begin_probe(nvme);
		return ran;
	}
	if (nvme->health >= KVS_HEALTH_READ_ONLY) {
		ran += refuse_waiters(nvme);
		if (!kvs_fault_is_due(nvme, KVS_FAULT_META, now) && !kvs_fault_is_due(nvme, KVS_FAULT_FILES, now)) {
			return ran;
		}
		nvme->commit_after_ns = 0;
	}
	if (!nvme->draining && flush_is_wanted(nvme) && nvme->unverified > 0) {
		ran += nvme->closing ? refuse_flushes(nvme, KV_ERR_CLOSED) : 0;
	} else if (!nvme->draining && flush_is_wanted(nvme)) {
		begin_drain(nvme);
	}
	/* The stores of the flush have ended. Their rows are among those queued by now: a round that has taken all of
	 * them covers the flush, however many rows come later. */
	if (nvme->draining && !nvme->drained && nvme->drain_open == 0) {
		nvme->drained = 1;
		nvme->drain_target = nvme->dirty_in;
	}
	if (round_is_due(nvme, now)) {
		begin_round(nvme);
	}

	return ran;
}

static kv_status_t add_waiter(kvs_nvme_t *nvme, int is_super, uint32_t round, kvs_done_fn done, void *arg)
{
	if (nvme->waiter_count == KVS_MAX_WAITERS) {
		return KV_ERR_BUSY;
	}

	nvme->waiters[nvme->waiter_count++] =
		(kvs_waiter_t){.done = done, .arg = arg, .round = round, .is_super = is_super};

	return KV_OK;
}

kv_status_t kvs_nvme_flush(kvs_tier_t *tier, kvs_done_fn done, void *arg)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);

	if (!done) {
		return KV_ERR_ARG;
	}
	if (nvme->health >= KVS_HEALTH_READ_ONLY) {
		return KV_ERR_TIER_OFF;
	}

	return add_waiter(nvme, 0, nvme->round, done, arg);
}

kv_status_t kvs_nvme_epoch_set(kvs_tier_t *tier, const kvs_epoch_t *epoch, kvs_done_fn done, void *arg)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	kv_status_t status;

	if (!done || !epoch->ns || !epoch->identity) {
		return KV_ERR_ARG;
	}
	if (nvme->health >= KVS_HEALTH_READ_ONLY) {
		return KV_ERR_TIER_OFF;
	}
	if (nvme->waiter_count == KVS_MAX_WAITERS) {
		return KV_ERR_BUSY;
	}
	status = kvs_super_space_set(&nvme->super, epoch->root, epoch->ns, epoch->identity, epoch->epoch);
	if (status != KV_OK) {
		return status;
	}

	nvme->super_dirty = 1;
	nvme->commit_after_ns = 0;

	return add_waiter(nvme, 1, ++nvme->super_asked, done, arg);
}

kv_status_t kvs_nvme_withdraw(kvs_tier_t *tier, const uint8_t root[32], kvs_done_fn done, void *arg)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	kv_status_t status;

	if (nvme->health >= KVS_HEALTH_READ_ONLY) {
		return KV_ERR_TIER_OFF;
	}
	if (nvme->waiter_count == KVS_MAX_WAITERS) {
		return KV_ERR_BUSY;
	}
	status = kvs_super_space_withdraw(&nvme->super, root);
	if (status != KV_OK) {
		return status;
	}
	/* Rows of what was freed wait to be deleted. The round that ends the flush deletes them, and it, or one before,
	 * writes the superblock: a round that could not is no answer. */
	nvme->super_dirty = 1;

	return add_waiter(nvme, 0, nvme->round, done, arg);
}

uint64_t kvs_nvme_epoch_get(kvs_tier_t *tier, const uint8_t root[32])
{
	const kvs_super_space_t *space = kvs_super_space_find(&kvs_nvme(tier)->super, root);

	return space ? space->epoch : 0;
}

uint64_t kvs_nvme_epoch_last(kvs_tier_t *tier)
{
	return kvs_super_last_epoch(&kvs_nvme(tier)->super);
}

uint32_t kvs_nvme_epochs_drop(kvs_tier_t *tier, uint32_t memory, kvs_root_used_fn used, void *ctx)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	const uint32_t n = kvs_super_spaces_drop(&nvme->super, used, ctx);

	(void)memory;
	nvme->super_dirty |= n > 0;

	return n;
}
