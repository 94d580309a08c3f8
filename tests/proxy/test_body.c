/* Bodies of the OpenAI API: nothing is lost, and what differs between the sides differs. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "body.h"
#include "kv/types.h"

#define MOST_TOKENS 4

static kv_status_t parse(kvp_api_t api, const char *text, kvp_body_t *body)
{
	char why[128];

	return kvp_body_parse(api, (kvp_span_t){strdup(text), strlen(text)}, MOST_TOKENS, body, why);
}

static kvp_span_t span(const char *text)
{
	return (kvp_span_t){text, strlen(text)};
}

/* The pieces are one text, and free. */
static void assert_pieces(kvp_pieces_t *pieces, const char *wanted)
{
	char text[1024] = "";

	for (uint32_t i = 0; i < pieces->n; i++) {
		strncat(text, pieces->at[i].data, pieces->at[i].len);
	}
	assert_string_equal(text, wanted);
	free(pieces->tail);
}

KV_TEST(p1_members_keep_their_order_and_their_bytes)
{
	const char *text = " {\"model\" : \"m\", \"top_p\":0.10,\"stream\":true,\"prompt\":\"a\\u00e9/"
			   "\\n\",\"kv_transfer_params\":{},"
			   "\"max_tokens\":7,\"seed\":18446744073709551615,\"x\": null} \n";
	const char *common = "{\"model\" : \"m\", \"top_p\":0.10,\"prompt\":\"a\\u00e9/"
			     "\\n\",\"seed\":18446744073709551615,\"x\": null,";
	char wanted[512];
	kvp_body_t body;
	kvp_pieces_t out;

	assert_int_equal(parse(KVP_COMPLETIONS, text, &body), KV_OK);
	assert_true(body.stream && !body.whole && !body.opaque);
	assert_int_equal(body.text_bytes, 5);
	assert_string_equal(body.model, "m");
	assert_true(kvp_body_for_tokenize(&body, &out));
	assert_pieces(&out, "{\"model\" : \"m\",\"prompt\":\"a\\u00e9/\\n\"}");
	assert_true(kvp_body_for_decode(&body, NULL, &out));
	snprintf(wanted, sizeof wanted, "%s\"max_tokens\":7,\"stream\":true}", common);
	assert_pieces(&out, wanted);
	assert_true(kvp_body_for_decode(&body, "{\"a\":1}", &out));
	snprintf(wanted, sizeof wanted, "%s\"max_tokens\":7,\"stream\":true,\"kv_transfer_params\":{\"a\":1}}", common);
	assert_pieces(&out, wanted);
	assert_true(kvp_body_for_prefill(&body, "id", &out));
	snprintf(wanted, sizeof wanted,
		 "%s\"max_tokens\":1,\"stream\":false,\"kv_transfer_params\":{\"do_remote_decode\":true,"
		 "\"do_remote_prefill\":false,\"transfer_id\":\"id\"}}",
		 common);
	assert_pieces(&out, wanted);
	kvp_body_free(&body);
}

KV_TEST(p1_texts_are_decoded)
{
	kvp_body_t body;

	assert_int_equal(parse(KVP_COMPLETIONS,
			       "{\"mod\\u0065l\":\"\\ud83d\\uDE00\\u00e9\\t\\/z\",\"prompt\":\"\\u4f60\"}", &body),
			 KV_OK);
	assert_string_equal(body.model, "\xf0\x9f\x98\x80\u00e9\t/z");
	assert_int_equal(body.text_bytes, 3);
	kvp_body_free(&body);
	assert_int_equal(parse(KVP_COMPLETIONS, "{\"model\":\"\\ud83dx\",\"prompt\":\"a\"}", &body), KV_OK);
	assert_true(body.opaque);
	kvp_body_free(&body);
}

KV_TEST(p10_each_member_that_must_be_right_is_checked)
{
	static const struct {
		kvp_api_t api;
		const char *text;
		kv_status_t status;
		int whole;
	} cases[] = {
		{KVP_COMPLETIONS, "{\"prompt\":\"a\"}", KV_OK, 0},
		{KVP_COMPLETIONS, "{\"prompt\":\"\"}", KV_OK, 0},
		{KVP_COMPLETIONS, "{\"prompt\":[1,2]}", KV_OK, 0},
		{KVP_COMPLETIONS, "{\"prompt\":[\"a\"]}", KV_OK, 0},
		{KVP_COMPLETIONS, "{\"prompt\":[\"a\",\"b\"]}", KV_OK, 1},
		{KVP_COMPLETIONS, "{\"prompt\":[[1],[2]]}", KV_OK, 1},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\",\"n\":1}", KV_OK, 0},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\",\"n\":2}", KV_OK, 1},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\",\"n\":\"2\"}", KV_OK, 1},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\",\"best_of\":3}", KV_OK, 1},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\",\"echo\":true,\"logprobs\":1}", KV_OK, 1},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\",\"echo\":true}", KV_OK, 0},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\",\"stream\":null}", KV_OK, 0},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\",\"stream\":1}", KV_ERR_PROTO, 0},
		{KVP_COMPLETIONS, "{\"prompt\":[]}", KV_ERR_PROTO, 0},
		{KVP_COMPLETIONS, "{\"prompt\":[4294967295]}", KV_ERR_PROTO, 0},
		{KVP_COMPLETIONS, "{\"prompt\":[1,-1]}", KV_ERR_PROTO, 0},
		{KVP_COMPLETIONS, "{\"prompt\":[1.5]}", KV_ERR_PROTO, 0},
		{KVP_COMPLETIONS, "{\"prompt\":null}", KV_ERR_PROTO, 0},
		{KVP_COMPLETIONS, "{\"prompt\":null,\"prompt_embeds\":\"a\"}", KV_OK, 1},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\",\"prompt_embeds\":null}", KV_OK, 0},
		{KVP_OTHER, "\xff", KV_OK, 1},
		{KVP_COMPLETIONS, "{}", KV_ERR_PROTO, 0},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\"}{}", KV_ERR_PROTO, 0},
		{KVP_COMPLETIONS, "\"prompt\"", KV_ERR_PROTO, 0},
		{KVP_COMPLETIONS, "{\"prompt\":[1,2,3,4]}", KV_OK, 0},
		{KVP_COMPLETIONS, "{\"prompt\":[1,2,3,4,5]}", KV_ERR_LIMIT, 0},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\",\"stream\":true,\"stream\":false}", KV_ERR_PROTO, 0},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\",\"stream\":true,\"str\\u0065am\":false}", KV_ERR_PROTO, 0},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\",\"kv_transfer_params\":null,\"kv_transfer_params\":{}}",
		 KV_ERR_PROTO, 0},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\",\"prompt\":\"b\"}", KV_ERR_PROTO, 0},
		{KVP_COMPLETIONS, "{\"prompt\":\"a\",\"user\":1,\"user\":1}", KV_OK, 0},
		{KVP_CHAT, "{\"messages\":[{\"content\":\"a\"}]}", KV_OK, 0},
		{KVP_CHAT, "{\"messages\":[{}],\"n\":2}", KV_OK, 1},
		{KVP_CHAT, "{\"messages\":[]}", KV_ERR_PROTO, 0},
		{KVP_CHAT, "{\"messages\":{}}", KV_ERR_PROTO, 0},
		{KVP_CHAT, "{\"messages\":[null]}", KV_ERR_PROTO, 0},
		{KVP_CHAT, "{\"prompt\":\"a\"}", KV_ERR_PROTO, 0},
	};

	for (size_t i = 0; i < KV_COUNT_OF(cases); i++) {
		kvp_body_t body;

		assert_int_equal(parse(cases[i].api, cases[i].text, &body), cases[i].status);
		if (cases[i].status == KV_OK) {
			assert_int_equal(body.whole, cases[i].whole);
		}
		kvp_body_free(&body);
	}
}

KV_TEST(p8_what_is_no_text_is_not_looked_up)
{
	kvp_body_t body;

	assert_int_equal(
		parse(KVP_CHAT, "{\"messages\":[{\"content\":[{\"type\":\"text\"}]}],\"cache_salt\":\"s\"}", &body),
		KV_OK);
	assert_false(body.opaque);
	assert_string_equal(body.salt, "s");
	kvp_body_free(&body);
	assert_int_equal(
		parse(KVP_CHAT, "{\"messages\":[{\"content\":[{\"type\":\"text\"},{\"type\":\"image_url\"}]}]}", &body),
		KV_OK);
	assert_true(body.opaque);
	kvp_body_free(&body);
}

KV_TEST(p10_answers_of_engines_are_checked)
{
	uint32_t *tokens = NULL, n = 0;
	char *params = NULL, *error;

	assert_int_equal(kvp_answer_params(span("{\"kv_transfer_params\":{\"a\":[1, 2.50]}} "), &params), KV_OK);
	assert_string_equal(params, "{\"a\":[1, 2.50]}");
	free(params);
	assert_int_equal(kvp_answer_params(span("{\"kv_transfer_params\":null}"), &params), KV_OK);
	assert_null(params);
	assert_int_equal(kvp_answer_params(span("{\"kv_transfer_params\":[]}"), &params), KV_ERR_PROTO);
	assert_int_equal(kvp_answer_params(span(""), &params), KV_ERR_PROTO);
	assert_int_equal(kvp_answer_tokens(span("{\"tokens\":[5,6]}"), MOST_TOKENS, &tokens, &n), KV_OK);
	assert_int_equal(n, 2);
	assert_int_equal(tokens[1], 6);
	free(tokens);
	assert_int_equal(kvp_answer_tokens(span("{\"tokens\":[5,\"6\"]}"), MOST_TOKENS, &tokens, &n), KV_ERR_PROTO);
	assert_int_equal(kvp_answer_tokens(span("{\"count\":2}"), MOST_TOKENS, &tokens, &n), KV_ERR_PROTO);
	error = kvp_error_text("say \"no\"", 502);
	assert_string_equal(
		error,
		"{\"error\":{\"message\":\"say \\\"no\\\"\",\"type\":\"server_error\",\"param\":null,\"code\":502}}");
	free(error);
}
