/* Taking back what was saved: the named blocks, and all below them, are never found again. */
#include "impl.h"

struct kvc_withdrawal {
	kvc_t *kvc;
	kv_status_t status; /* PENDING until the answer */
	uint32_t blocks;
};

static void on_withdrawn(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	kvc_withdrawal_t *withdrawal = object;

	(void)kvc;
	withdrawal->status = answer->status;
	if (answer->status == KV_OK) {
		withdrawal->blocks = answer->reply->withdraw_reply.withdrawn;
		return;
	}
	kvc_fail_request(answer->status, answer->detail, "withdrawing blocks");
}

kvc_status_t kvc_withdraw_start(kvc_space_t *space, const kvc_withdraw_t *what, kvc_withdrawal_t **p_withdrawal)
{
	kvc_withdrawal_t *withdrawal;
	kv_msg_withdraw_t msg;
	kvc_ask_t ask = {.code = KV_CODE_WITHDRAW, .msg = &msg, .done = on_withdrawn, .fd = -1};
	kvc_status_t status;
	kv_status_t sent;

	if (!space || !what || !p_withdrawal || what->struct_size < sizeof *what || !what->keys || what->n == 0 ||
	    what->n > KV_MAX_BLOCKS) {
		return kvc_fail(KV_ERR_ARG,
				"kvc_withdraw_start: an argument is NULL, struct_size is not set, or not 1 to %u keys",
				KV_MAX_BLOCKS);
	}
	if (!kvc_group_find(space, what->group)) {
		return kvc_fail(KV_ERR_ARG, "kvc_withdraw_start: the space has no group %u", what->group);
	}
	status = kvc_space_usable(space);
	if (status != KVC_OK) {
		return status;
	}
	withdrawal = kv_alloc(&space->kvc->env, sizeof *withdrawal);
	if (!withdrawal) {
		return kvc_fail(KV_ERR_NOMEM, "no memory for a withdrawal");
	}
	*withdrawal = (kvc_withdrawal_t){.kvc = space->kvc, .status = KV_PENDING};
	msg = (kv_msg_withdraw_t){.space = atomic_load(&space->id),
				  .epoch = what->epoch,
				  .group = what->group,
				  .keys = {(const uint8_t *)what->keys, what->n * KV_KEY_BYTES}};
	ask.object = withdrawal;
	sent = kvc_send(space->kvc, &ask);
	if (sent != KV_OK) {
		kv_free(&space->kvc->env, withdrawal);
		return kvc_fail(sent, "WITHDRAW of %u blocks could not be sent: %s", what->n, kv_status_text(sent));
	}
	*p_withdrawal = withdrawal;

	return KVC_OK;
}

kvc_status_t kvc_withdraw_state(const kvc_withdrawal_t *withdrawal, uint32_t *p_blocks)
{
	if (p_blocks) {
		*p_blocks = withdrawal->blocks;
	}

	return (kvc_status_t)withdrawal->status;
}

void kvc_withdraw_free(kvc_withdrawal_t *withdrawal)
{
	if (withdrawal) {
		kvc_forget_requests(withdrawal->kvc, withdrawal);
		kv_free(&withdrawal->kvc->env, withdrawal);
	}
}
