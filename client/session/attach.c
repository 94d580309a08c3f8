/* The life of an attachment, and what its session tells spaces, leases and puts. Everything of libkvc meets here. */
#include "impl.h"

#include "base/config.h"

#include <sys/mman.h>

/* ---- what a session tells -------------------------------------------------------------------- */

/* No lease is left to be released, and no put or hand-over goes on. */
static void session_lost(kvc_t *kvc)
{
	kvc_puts_lost(kvc);
	kvc_handovers_lost(kvc);
	kvc->backlog_len = 0;
}

static void flush_deferred(kvc_t *kvc)
{
	kvc_spaces_refresh(kvc);
	kvc_slab_reap(kvc);
	kvc_lease_flush(kvc);
	kvc_handovers_fetch_tails(kvc);
}

static const kvc_events_t events = {
	.frame = kvc_dispatch,
	.opened = kvc_spaces_ask,
	.lost = session_lost,
	.deferred = flush_deferred,
};

/* ---- the life of an attachment --------------------------------------------------------------- */

/* A page that reads as zero in a forked child tells it that nothing of this attachment is its own. */
static kv_status_t create_fork_guard(kvc_t *kvc)
{
	uint64_t *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (page == MAP_FAILED) {
		return KV_ERR_NOMEM;
	}
	if (madvise(page, 4096, MADV_WIPEONFORK) != 0) {
		munmap(page, 4096);
		return KV_ERR_UNSUPPORTED;
	}
	*page = KVC_FORK_GUARD;
	kvc->fork_guard = page;

	return KV_OK;
}

/* Ready, or the first attempt has failed. */
static int is_first_attempt_over(const void *object)
{
	const kvc_t *kvc = object;

	return kvc->state == KVC_READY || kvc->state == KVC_DETACHED;
}

static void destroy_attachment(kvc_t *kvc)
{
	kv_env_t env = kvc->env;

	kvc_leases_destroy(kvc);
	kvc_puts_destroy(kvc);
	kvc_handovers_destroy(kvc);
	while (kvc->spaces) {
		kvc_space_t *space = kvc->spaces;

		kvc->spaces = space->next;
		kvc_space_free(space);
	}
	kvc_map_destroy_all(kvc);
	if (kvc->state >= KVC_JOIN && !kvc->observe && kvc_check_process(kvc) == KVC_OK) {
		/* Nothing is mapped, so nothing is touched: the daemon need not wait for the end of this process
		 * (decision 030). */
		kvc_send_oneway(kvc, KV_CODE_DRAINED, &(kv_msg_drained_t){.what = 4});
		(void)kvc_flush(kvc);
	}
	kvc_channel_fini(kvc);
	kv_free(&env, kvc->backlog);
	kv_free(&env, kvc->ladder);
	if (kvc->fork_guard) {
		munmap((void *)(uintptr_t)kvc->fork_guard, 4096);
	}
	kv_free(&env, kvc);
}

kvc_status_t kvc_attach_env(const kvc_config_t *given, const kv_env_t *env, kvc_t **p_kvc)
{
	kvc_t *kvc = kv_alloc(env, sizeof *kvc);
	kvc_config_t config;
	kvc_status_t status;
	kv_status_t made;

	if (!kvc) {
		return kvc_fail(KV_ERR_NOMEM, "out of memory for an attachment of %zu bytes", sizeof *kvc);
	}
	kvc->env = *env;
	kvc->events = &events;
	kvc->channel.fd = -1;
	kvc->backoff_ns = KVC_BACKOFF_MIN_NS;
	made = create_fork_guard(kvc);
	if (made != KV_OK) {
		status = kvc_fail(made, "no page that is wiped on fork (Linux 4.14 has them)");
		goto err_kvc;
	}
	status = kvc_config_take(kvc, given, &config);
	if (status != KVC_OK) {
		goto err_kvc;
	}
	kvc->backlog = kv_alloc(env, KVC_MAX_BACKLOG * sizeof *kvc->backlog);
	if (!kvc->backlog || kvc_channel_init(kvc) != KV_OK) {
		status = kvc_fail(KV_ERR_NOMEM, "out of memory for the buffers of an attachment");
		goto err_kvc;
	}

	if (config.lazy > 1) {
		kvc_pump(kvc);
		*p_kvc = kvc;
		return KVC_OK;
	}
	if (kvc_wait(kvc, is_first_attempt_over, kvc, kvc_deadline(kvc, 0)) != KV_OK) {
		kvc_session_lost(kvc, KV_ERR_TIMEOUT, "it did not answer in time; is it stopped?");
	}
	if (kvc->state != KVC_READY && !config.lazy) {
		status = kvc_detached(kvc);
		goto err_kvc;
	}
	*p_kvc = kvc;

	return KVC_OK;

err_kvc:
	destroy_attachment(kvc);

	return status;
}

kvc_status_t kvc_attach(const kvc_config_t *config, kvc_t **p_kvc)
{
	if (!p_kvc) {
		return kvc_fail(KV_ERR_ARG, "kvc_attach: p_kvc is NULL");
	}

	return kvc_attach_env(config, &kv_env_posix, p_kvc);
}

void kvc_detach(kvc_t *kvc)
{
	if (kvc) {
		kvc_lease_flush(kvc);
		destroy_attachment(kvc);
	}
}

/* What is left of its leases, puts and hand-overs goes back. */
void kvc_space_close(kvc_space_t *space)
{
	if (!space) {
		return;
	}
	kvc_space_unlink(space);
	kvc_leases_of_space_end(space);
	kvc_puts_of_space_end(space);
	kvc_handovers_of_space_end(space);
	if (atomic_load(&space->epoch) != 0) {
		kvc_space_give_back(space->kvc, atomic_load(&space->id), space->text);
	}
	if (!space->puts_left) {
		kvc_space_free(space);
	}
}

int kvc_fd(const kvc_t *kvc)
{
	return kvc ? kvc->channel.fd : -1;
}

uint64_t kvc_incarnation(const kvc_t *kvc)
{
	return kvc && kvc->state == KVC_READY ? kvc->incarnation : 0;
}

const char *kvc_peer_name(const kvc_t *kvc)
{
	return kvc ? kvc->peer_name : "";
}
