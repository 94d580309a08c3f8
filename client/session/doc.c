/* What people and tools ask: documents as JSON, and where each key is. */
#include "impl.h"

#include <stdlib.h>

typedef struct kvc_question {
	kv_status_t status;
	uint16_t code;
	char *json;
	uint32_t value;
	uint8_t *tiers;
	uint32_t n;
} kvc_question_t;

static char *copy_json(const kv_slice_t *text)
{
	char *copy = malloc((size_t)text->len + 1u); /* the caller's: kvc_free() */

	if (copy) {
		memcpy(copy, text->data, text->len);
		copy[text->len] = '\0';
	}

	return copy;
}

static void copy_document(kvc_question_t *question, const kv_msg_t *reply)
{
	const kv_slice_t *json = &reply->status_reply.json;

	switch (question->code) {
	case KV_CODE_STATS:
		json = &reply->stats_reply.json;
		break;
	case KV_CODE_CHECK:
		json = &reply->check_reply.json;
		question->value = reply->check_reply.failed;
		break;
	case KV_CODE_CONFIG:
		json = &reply->config_reply.json;
		break;
	case KV_CODE_PEERS:
		json = &reply->peers_reply.json;
		break;
	case KV_CODE_TRANSFERS:
		json = &reply->transfers_reply.json;
		break;
	default:
		break;
	}
	question->json = copy_json(json);
	question->status = question->json ? KV_OK : KV_ERR_NOMEM;
}

static void on_document(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	kvc_question_t *question = object;

	(void)kvc;
	question->status = answer->status;
	if (answer->status != KV_OK) {
		kvc_fail_request(answer->status, answer->detail, "%s", kv_request_find(question->code)->name);
		return;
	}
	if (question->code != KV_CODE_EXPLAIN) {
		copy_document(question, answer->reply);
		return;
	}
	if (answer->reply->explain_reply.tiers.len != question->n) {
		question->status = KV_ERR_PROTO;
		return;
	}
	memcpy(question->tiers, answer->reply->explain_reply.tiers.data, question->n);
	question->value = answer->reply->explain_reply.why;
}

static int is_answered(const void *object)
{
	return ((const kvc_question_t *)object)->status != KV_PENDING;
}

static kvc_status_t request_and_wait(kvc_t *kvc, const void *msg, kvc_question_t *question)
{
	kvc_ask_t ask = {.code = question->code, .msg = msg, .done = on_document, .object = question, .fd = -1};
	kvc_status_t status = kvc_enter(kvc);
	kv_status_t sent;

	if (status != KVC_OK) {
		return status;
	}
	if (kvc->state != KVC_READY) {
		return kvc_detached(kvc);
	}
	question->status = KV_PENDING;
	sent = kvc_send(kvc, &ask);
	if (sent != KV_OK) {
		return kvc_fail(sent, "the question could not be sent: %s", kv_status_text(sent));
	}
	/* The request's own deadline ends the wait. */
	(void)kvc_wait(kvc, is_answered, question, UINT64_MAX);

	return (kvc_status_t)question->status;
}

kvc_status_t kvc_document(kvc_t *kvc, int what, uint32_t detail, char **p_json, uint32_t *p_value)
{
	kvc_question_t question = {.code = (uint16_t)what};
	kv_msg_t msg = {0};
	kvc_status_t status;

	if (!kvc || !p_json ||
	    ((what < KVC_DOC_STATUS || what > KVC_DOC_CONFIG) && what != KVC_DOC_TRANSFERS && what != KVC_DOC_PEERS)) {
		return kvc_fail(KV_ERR_ARG, "kvc_document: no such document: %d", what);
	}
	if (what == KVC_DOC_STATUS) {
		msg.status.detail = detail;
	}
	status = request_and_wait(kvc, &msg, &question);
	if (status == KVC_OK) {
		*p_json = question.json;
		if (p_value) {
			*p_value = question.value;
		}
	}

	return status;
}

kvc_status_t kvc_explain_group(kvc_space_t *space, uint32_t group, const kvc_key_t *keys, uint32_t n, uint8_t *tiers,
			       uint32_t *p_why)
{
	uint32_t why = KV_WHY_NONE;

	if (!space || !keys || !tiers || !kvc_group_find(space, group)) {
		return kvc_fail(KV_ERR_ARG, "kvc_explain: an argument is NULL, or the space has no group %u", group);
	}
	/* One message takes KVC_EXPLAIN_KEYS keys; the first one that is missing anything says why. */
	for (uint32_t at = 0; at < n;) {
		uint32_t count = n - at < KVC_EXPLAIN_KEYS ? n - at : KVC_EXPLAIN_KEYS;
		kvc_question_t question = {.code = KV_CODE_EXPLAIN, .tiers = tiers + at, .n = count};
		kv_msg_explain_t msg = {
			.space = atomic_load(&space->id),
			.epoch = atomic_load(&space->known_epoch),
			.group = group,
			.keys = {keys[at].b, count * (uint32_t)sizeof keys[0]},
		};
		kvc_status_t status = request_and_wait(space->kvc, &msg, &question);

		if (status != KVC_OK) {
			return status;
		}
		why = why == KV_WHY_NONE ? question.value : why;
		at += count;
	}
	if (p_why) {
		*p_why = why;
	}

	return KVC_OK;
}

kvc_status_t kvc_explain(kvc_space_t *space, const kvc_key_t *keys, uint32_t n, uint8_t *tiers, uint32_t *p_why)
{
	return kvc_explain_group(space, space ? space->groups[0].number : 0, keys, n, tiers, p_why);
}
