/* Lookups of prompts in a real daemon: what engines have put is found, under salt and adapter, and nothing else. */
#include "e2e/rig/rig.h"

#include "prefix.h"

#include <signal.h>

#define UNITS  8u
#define TOKENS (UNITS * RIG_TOKENS)

static rig_t rig_;

KV_FIXTURE(set_up)
{
	rig_init(&rig_, 0);
	rig_start(&rig_);
}

KV_FIXTURE(tear_down)
{
	rig_fini(&rig_);
}

/* Put a prompt's blocks; the first unit's extra key, and that of the others; "": none. */
static void put(user_t *user, const uint32_t *tokens, const char *first, const char *other)
{
	static uint8_t block[RIG_BLOCK_BYTES];
	const void *blocks[UNITS];
	kvc_put_options_t options = {.struct_size = sizeof options, .blocks = blocks};
	kvc_key_t keys[UNITS];
	kvc_chain_t chain;
	uint32_t visible = 0;

	kvc_chain_begin(user->space, &chain);
	for (uint32_t i = 0; i < UNITS; i++) {
		const char *extra = i == 0 ? first : other;

		blocks[i] = block;
		assert_int_equal(*extra ? kvc_chain_unit(&chain, extra, (uint32_t)strlen(extra),
							 tokens + (size_t)i * RIG_TOKENS, &keys[i])
					: kvc_chain_tokens(&chain, tokens + (size_t)i * RIG_TOKENS, 1, &keys[i]),
				 KVC_OK);
	}
	assert_int_equal(kvc_put(user->space, keys, 0, UNITS, &options, &visible), KVC_OK);
	assert_int_equal(visible, UNITS);
}

static int64_t hit(kvp_prefix_t *prefix, const char *model, const char *salt, const uint32_t *tokens, uint32_t n)
{
	return kvp_prefix_hit(prefix, &(kvp_prefix_question_t){model, salt, tokens, n});
}

static void await_hit(kvp_prefix_t *prefix, const char *model, const char *salt, const uint32_t *tokens)
{
	uint64_t end = rig_now_ms() + RIG_WAIT_MS;

	while (hit(prefix, model, salt, tokens, TOKENS) != TOKENS) {
		assert_true(rig_now_ms() < end);
		usleep(2000);
	}
}

KV_TEST(p8_prompts_are_found_under_their_salt_and_adapter_alone, set_up, tear_down)
{
	kvc_identity_t identity = user_identity("base"), adapted = identity, testing = identity;
	user_t user = {0}, other = {0}, tester = {0};
	uint32_t tokens[TOKENS + 5], salted[TOKENS];
	kvp_prefix_t *prefix = NULL;

	for (uint32_t i = 0; i < TOKENS + 5; i++) {
		tokens[i] = i;
		salted[i % TOKENS] = i + 7;
	}
	adapted.lora = "tuned@files:0123";
	testing.weights = testing.extra = "self-test"; /* as the vLLM connector opens it */
	assert_int_equal(user_try(&tester, rig_.sock, &testing), KVC_OK);
	assert_int_equal(user_try(&user, rig_.sock, &identity), KVC_OK);
	assert_int_equal(user_try(&other, rig_.sock, &adapted), KVC_OK);
	put(&user, tokens, "", "");
	put(&user, salted, "[\"s\"]", "");
	put(&other, tokens, "[\"tuned\",\"s\"]", "[\"tuned\"]");
	assert_int_equal(kvp_prefix_open(rig_.sock, &prefix), KV_OK);
	await_hit(prefix, "base", "", tokens);
	await_hit(prefix, "tuned", "s", tokens);
	assert_int_equal(hit(prefix, "served under another name", "", tokens, TOKENS + 5), TOKENS);
	assert_int_equal(hit(prefix, "base", "", tokens, TOKENS - 1), TOKENS - RIG_TOKENS);
	assert_int_equal(hit(prefix, "base", "", tokens, 3), 0);
	assert_int_equal(hit(prefix, "base", "s", salted, TOKENS), TOKENS);
	assert_int_equal(hit(prefix, "base", "", salted, TOKENS), 0);
	assert_int_equal(hit(prefix, "base", "t", salted, TOKENS), 0);
	assert_int_equal(hit(prefix, "base", "s", tokens, TOKENS), 0);
	assert_int_equal(hit(prefix, "tuned", "", tokens, TOKENS), 0);
	assert_int_equal(hit(prefix, "base", "\"", salted, TOKENS), -1);
	kvp_prefix_close(prefix);
	kvc_detach(user.kvc);
	kvc_detach(other.kvc);
	kvc_detach(tester.kvc);
}

KV_TEST(p6_without_a_daemon_prompts_are_unknown_until_there_is_one, set_up, tear_down)
{
	uint32_t tokens[TOKENS];
	kvp_prefix_t *prefix = NULL;
	user_t user = {0};
	kvc_identity_t identity = user_identity("base");

	for (uint32_t i = 0; i < TOKENS; i++) {
		tokens[i] = i;
	}
	rig_kill(&rig_, SIGKILL);
	assert_int_equal(kvp_prefix_open(rig_.sock, &prefix), KV_OK);
	assert_int_equal(hit(prefix, "base", "", tokens, TOKENS), -1);
	rig_start(&rig_);
	assert_int_equal(user_try(&user, rig_.sock, &identity), KVC_OK);
	put(&user, tokens, "", "");
	await_hit(prefix, "base", "", tokens);
	kvc_detach(user.kvc);
	rig_kill(&rig_, SIGKILL);
	rig_start(&rig_); /* another incarnation, which has nothing */
	assert_true(hit(prefix, "base", "", tokens, TOKENS) <= 0);
	assert_int_equal(user_try(&user, rig_.sock, &identity), KVC_OK);
	put(&user, tokens, "", "");
	await_hit(prefix, "base", "", tokens);
	kvc_detach(user.kvc);
	kvp_prefix_close(prefix);
}
