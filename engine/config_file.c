/* A model's config.json: each key is read, must have one value, or says nothing to this engine. */
#include "kve/config.h"
#include "kvk/ep.h"

#include <json-c/json.h>
#include <json-c/json_object_iterator.h>
#include <stdio.h>
#include <string.h>

typedef enum need {
	ALWAYS,
	WITH_EXPERTS, /* only then */
	OPTIONAL,     /* the field has its value already */
} need_t;

typedef struct number {
	const char *key;
	size_t field; /* uint32_t of kve_config_t */
	uint32_t least, most, step;
	need_t need;
} number_t;

#define FIELD(name) offsetof(kve_config_t, name)

static const number_t numbers[] = {
	{"vocab_size", FIELD(vocab), 16, 1u << 20, 16, ALWAYS},
	{"hidden_size", FIELD(hidden), 16, 8192, 16, ALWAYS},
	{"num_hidden_layers", FIELD(layers), 1, KVE_MAX_LAYERS, 1, ALWAYS},
	{"num_attention_heads", FIELD(heads), 1, 128 * KVE_MAX_GROUP, 1, ALWAYS},
	{"num_key_value_heads", FIELD(kv_heads), 1, 128, 1, ALWAYS},
	{"head_dim", FIELD(head_dim), 16, 256, 16, ALWAYS},
	{"max_position_embeddings", FIELD(max_tokens), 16, 65536, 1, ALWAYS},
	{"rope_theta", FIELD(rope_theta), 2, UINT32_MAX, 1, ALWAYS},
	{"num_experts", FIELD(experts), 16, KVK_EP_MAX_EXPERTS, 16, OPTIONAL},
	{"num_experts_per_tok", FIELD(top_k), 1, KVK_EP_MAX_TOP_K, 1, WITH_EXPERTS},
	{"moe_intermediate_size", FIELD(expert_inner), 16, 32768, 16, WITH_EXPERTS},
	{"reduction_groups", FIELD(groups), 1, KVK_EP_MAX_RANKS, 1, OPTIONAL},
};

/* One value is served. */
static const struct {
	const char *key, *value;
} fixed[] = {
	{"hidden_act", "\"silu\""},   {"attention_bias", "false"}, {"tie_word_embeddings", "false"},
	{"rope_scaling", "null"},     {"sliding_window", "null"},  {"use_sliding_window", "false"},
	{"decoder_sparse_step", "1"}, {"mlp_only_layers", "[]"},
};

/* Of training, of other programs, or without a meaning where the values above are as they are. */
static const char *const ignored[] = {
	"architectures",        "attention_dropout",    "bos_token_id", "dtype",       "eos_token_id",
	"initializer_range",    "max_window_layers",    "pad_token_id", "torch_dtype", "output_router_logits",
	"router_aux_loss_coef", "transformers_version", "use_cache",
};

/* Read by code of their own. */
static const char *const others[] = {"model_type", "rms_norm_eps",      "norm_topk_prob",
				     "seed",       "intermediate_size", "shared_expert_intermediate_size"};

typedef struct reader {
	struct json_object *root;
	kve_config_t *config;
	char *why; /* KVE_CONFIG_WHY_MAX */
} reader_t;

#define COMPLAIN(r, ...) (snprintf((r)->why, KVE_CONFIG_WHY_MAX, __VA_ARGS__), -1)

static int is_number(const struct json_object *value)
{
	return json_object_is_type(value, json_type_int) || json_object_is_type(value, json_type_double);
}

/* 1000000.0 is a whole number, too. */
static int read_number(reader_t *r, const number_t *number)
{
	struct json_object *value = NULL;
	double x;

	if (!json_object_object_get_ex(r->root, number->key, &value)) {
		const int needed = number->need == ALWAYS || (number->need == WITH_EXPERTS && r->config->experts);

		return needed ? COMPLAIN(r, "\"%s\" is missing", number->key) : 0;
	}
	x = is_number(value) ? json_object_get_double(value) : -1.0;
	if (!(x >= number->least && x <= number->most) || (double)(uint32_t)x != x || (uint32_t)x % number->step != 0) {
		return COMPLAIN(r, "\"%s\" is %.40s; it must be a whole number from %u to %u, a multiple of %u",
				number->key, json_object_to_json_string(value), number->least, number->most,
				number->step);
	}
	*(uint32_t *)(void *)((char *)r->config + number->field) = (uint32_t)x;

	return 0;
}

static int is_among(const char *key, const char *const *keys, size_t n)
{
	size_t i = 0;

	while (i < n && strcmp(key, keys[i]) != 0) {
		i++;
	}

	return i < n;
}

/* A key that nothing reads is not served. */
static int check_key(reader_t *r, const char *key, struct json_object *value)
{
	for (size_t i = 0; i < KV_COUNT_OF(numbers); i++) {
		if (strcmp(key, numbers[i].key) == 0) {
			return 0;
		}
	}
	for (size_t i = 0; i < KV_COUNT_OF(fixed); i++) {
		if (strcmp(key, fixed[i].key) == 0) {
			const char *text = json_object_to_json_string_ext(value, JSON_C_TO_STRING_PLAIN);

			return strcmp(text, fixed[i].value) == 0
				       ? 0
				       : COMPLAIN(r, "\"%s\" is %.40s; only %s is served", key, text, fixed[i].value);
		}
	}
	if (is_among(key, ignored, KV_COUNT_OF(ignored)) || is_among(key, others, KV_COUNT_OF(others))) {
		return 0;
	}

	return COMPLAIN(r, "\"%.60s\" is not served", key);
}

/* Which MLP every token passes: all of a dense model, or a shared expert. */
static int read_mlp(reader_t *r)
{
	const number_t dense = {"intermediate_size", FIELD(inner), 16, 32768, 16, ALWAYS};
	const number_t shared = {"shared_expert_intermediate_size", FIELD(inner), 16, 32768, 16, OPTIONAL};

	return read_number(r, r->config->experts ? &shared : &dense);
}

static int read_others(reader_t *r)
{
	struct json_object *value = NULL;
	const char *type = NULL;

	if (json_object_object_get_ex(r->root, "model_type", &value)) {
		type = json_object_get_string(value);
	}
	if (!type || (strcmp(type, "qwen3") != 0 && strcmp(type, "qwen3_moe") != 0)) {
		return COMPLAIN(r, "\"model_type\" is %.40s; qwen3 and qwen3_moe are served", type ? type : "missing");
	}
	if ((strcmp(type, "qwen3_moe") == 0) != (r->config->experts > 0)) {
		return COMPLAIN(r, "\"num_experts\" is %s", r->config->experts ? "not served in qwen3" : "missing");
	}
	if (!json_object_object_get_ex(r->root, "rms_norm_eps", &value) || !is_number(value) ||
	    !(json_object_get_double(value) >= 1e-12 && json_object_get_double(value) <= 0.01)) {
		return COMPLAIN(r, "\"rms_norm_eps\" must be there, from 1e-12 to 0.01");
	}
	r->config->norm_eps = (float)json_object_get_double(value);
	if (json_object_object_get_ex(r->root, "norm_topk_prob", &value)) {
		if (!json_object_is_type(value, json_type_boolean)) {
			return COMPLAIN(r, "\"norm_topk_prob\" must be true or false");
		}
		r->config->norm_top_k = json_object_get_boolean(value);
	}
	if (json_object_object_get_ex(r->root, "seed", &value)) {
		if (!json_object_is_type(value, json_type_int) || json_object_get_int64(value) < 0) {
			return COMPLAIN(r, "\"seed\" must be a whole number from 0");
		}
		r->config->seed = json_object_get_uint64(value);
	}

	return read_mlp(r);
}

static int check_relations(reader_t *r)
{
	const kve_config_t *c = r->config;
	const char *why = NULL;

	if (c->heads % c->kv_heads != 0 || c->heads / c->kv_heads > KVE_MAX_GROUP) {
		return COMPLAIN(
			r, "\"num_attention_heads\" must be a multiple of \"num_key_value_heads\", 1 to %u times it",
			KVE_MAX_GROUP);
	}
	if (c->experts && c->top_k > c->experts) {
		return COMPLAIN(r, "\"num_experts_per_tok\" is more than \"num_experts\"");
	}
	if (c->experts && c->experts % c->groups != 0) {
		return COMPLAIN(r, "\"reduction_groups\" does not divide \"num_experts\"");
	}

	return kve_config_check(c, &why) == KV_OK ? 0 : COMPLAIN(r, "%s", why);
}

static int read_all(reader_t *r)
{
	struct json_object_iterator at, end;

	if (!json_object_is_type(r->root, json_type_object)) {
		return COMPLAIN(r, "it is no JSON object");
	}
	at = json_object_iter_begin(r->root);
	end = json_object_iter_end(r->root);
	while (!json_object_iter_equal(&at, &end)) {
		if (check_key(r, json_object_iter_peek_name(&at), json_object_iter_peek_value(&at)) != 0) {
			return -1;
		}
		json_object_iter_next(&at);
	}
	for (size_t i = 0; i < KV_COUNT_OF(numbers); i++) {
		if (read_number(r, &numbers[i]) != 0) {
			return -1;
		}
	}
	if (read_others(r) != 0) {
		return -1;
	}
	r->config->max_tokens -= r->config->max_tokens % r->config->block_tokens;

	return check_relations(r);
}

kv_status_t kve_config_read(const char *path, kve_config_t *config, char why[KVE_CONFIG_WHY_MAX])
{
	kve_config_t read = {.block_tokens = 16, .seed = 1, .qk_norm = 1, .groups = 4};
	reader_t r = {.root = json_object_from_file(path), .config = &read, .why = why};
	int rc = -1;

	if (!r.root) {
		(void)snprintf(why, KVE_CONFIG_WHY_MAX, "it cannot be read as JSON");
	} else {
		rc = read_all(&r);
	}
	json_object_put(r.root);
	if (rc == 0) {
		*config = read;
	}

	return rc == 0 ? KV_OK : KV_ERR_ARG;
}
