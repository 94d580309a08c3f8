/* Connectors by name and role: vLLM's KVTransferConfig makes one, and each wrong field is named with the nearest right
 * one. */
#include "connectors/inproc/pair.h"
#include "engine/check.h"
#include "kv_test.h"

#include "kvx_factory.h"

#include <stdio.h>
#include <string.h>

static const char *program;

static kvc_status_t read_text(const char *text, kvx_connector_config_t *config)
{
	return kvx_connector_config_read(text, strlen(text), config);
}

/* What vLLM writes for a producer, and for one that leaves all to the defaults. */
static void p10_the_json_form_reads_what_vllm_writes(void **state)
{
	const char full[] =
		"{\"kv_connector\": \"KvdConnector\", \"engine_id\": \"e7\", \"kv_buffer_device\": \"cuda\","
		" \"kv_buffer_size\": 2e9, \"kv_role\": \"kv_producer\", \"kv_rank\": 1, \"kv_parallel_size\": 2,"
		" \"kv_ip\": \"10.0.0.1\", \"kv_port\": 14580, \"kv_connector_extra_config\":"
		" {\"socket\": \"/run/kvd/a.sock\", \"load_ms\": 250, \"save_ms\": 0, \"attach_ms\": 1},"
		" \"kv_connector_module_path\": null, \"enable_permute_local_kv\": false,"
		" \"kv_load_failure_policy\": \"recompute\"}";
	kvx_connector_config_t config;

	(void)state;
	assert_int_equal(read_text(full, &config), KVC_OK);
	assert_int_equal(config.struct_size, sizeof config);
	assert_string_equal(config.connector, "KvdConnector");
	assert_int_equal(config.roles, KVX_PRODUCER);
	assert_int_equal(config.rank, 1);
	assert_int_equal(config.parallel_size, 2);
	assert_int_equal(config.buffer_size, 2000000000);
	assert_string_equal(config.buffer_device, "cuda");
	assert_string_equal(config.ip, "10.0.0.1");
	assert_int_equal(config.port, 14580);
	assert_string_equal(config.engine_id, "e7");
	assert_string_equal(config.socket, "/run/kvd/a.sock");
	assert_int_equal(config.load_ms, 250);
	assert_int_equal(config.attach_ms, 1);

	assert_int_equal(read_text("{\"kv_role\": null, \"kv_connector_extra_config\": null}", &config), KVC_OK);
	assert_string_equal(config.connector, KVX_CONNECTOR);
	assert_int_equal(config.roles, KVX_BOTH);
	assert_int_equal(config.parallel_size, 1);
	assert_int_equal(config.buffer_size, 1000000000);
	assert_string_equal(config.socket, "");
}

/* A wrong text, and what the sentence about it must say. */
static const struct {
	const char *text, *says[2];
} wrong[] = {
	{"{\"kv_rol\": \"kv_both\"}", {"kv_rol", "kv_role"}},
	{"{\"role\": \"kv_both\"}", {"role: there is no such field", "kv_role"}},
	{"{\"kv_role\": \"kv_produce\"}", {"kv_role", "kv_producer"}},
	{"{\"kv_role\": 3}", {"kv_role", "text"}},
	{"{\"kv_role\": true}", {"kv_role", "must be"}},
	{"{\"kv_buffer_device\": \"cudo\"}", {"kv_buffer_device", "cuda"}},
	{"{\"kv_buffer_device\": 1}", {"kv_buffer_device", "text"}},
	{"{\"kv_rank\": -1}", {"kv_rank", "65535"}},
	{"{\"kv_rank\": 1.5}", {"kv_rank", "65535"}},
	{"{\"kv_rank\": 99999999999999999999}", {"kv_rank", "65535"}},
	{"{\"kv_rank\": \"1\"}", {"kv_rank", "number"}},
	{"{\"kv_parallel_size\": 0}", {"kv_parallel_size", "from 1"}},
	{"{\"kv_port\": 65536}", {"kv_port", "65535"}},
	{"{\"kv_buffer_size\": 1e30}", {"kv_buffer_size", "number"}},
	{"{\"kv_connector\": 5}", {"kv_connector", "text"}},
	{"{\"kv_connector\": \"a\\u0000b\"}", {"kv_connector", "NUL"}},
	{"{\"kv_ip\": \"0123456789012345678901234567890123456789012345678901234567890123\"}", {"kv_ip", "63 bytes"}},
	{"{\"kv_connector_extra_config\": 5}", {"kv_connector_extra_config", "object"}},
	{"{\"kv_connector_extra_config\": {\"sockets\": \"x\"}}", {"sockets", "socket"}},
	{"{\"kv_connector_extra_config\": {\"load_ms\": 3600001}}", {"load_ms", "3600000"}},
	{"{\"kv_connector_extra_config\": {\"kv_role\": 1}}", {"kv_role", "option"}},
	{"[]", {"object", ""}},
	{"{\"kv_role\"", {"not JSON", "byte 10"}},
	{"{kv_role: 1}", {"not JSON", "byte 1"}},
	{"{} x", {"not JSON", "byte"}},
	{"[[[[[[[[[[]]]]]]]]]]", {"not JSON", "too deep"}},
	{"", {"not JSON", "early"}},
};

static void p10_a_wrong_field_is_named_with_the_nearest_right_one(void **state)
{
	kvx_connector_config_t config, before;

	(void)state;
	kvx_connector_config_init(&config);
	before = config;
	for (size_t i = 0; i < KV_COUNT_OF(wrong); i++) {
		const kvc_status_t status = read_text(wrong[i].text, &config);

		if (status != KVC_ERR_ARG || !strstr(kvx_last_error(), wrong[i].says[0]) ||
		    !strstr(kvx_last_error(), wrong[i].says[1])) {
			fail_msg("%s: %s", wrong[i].text, kvx_last_error());
		}
		assert_memory_equal(&config, &before, sizeof config);
	}
	assert_int_equal(kvx_connector_config_read(NULL, 2, &config), KVC_ERR_ARG);
	assert_int_equal(kvx_connector_config_read("{}", 2, NULL), KVC_ERR_ARG);
}

/* ---- creating -------------------------------------------------------------------------------- */

static uint32_t created_roles;

static kvc_status_t create_other(const kvx_connector_config_t *config, const kvx_config_t *engine, kvx_t **p_kvx)
{
	created_roles = config->roles;
	(void)engine;
	*p_kvx = NULL;

	return KVC_OK;
}

static void connectors_are_made_by_name_and_registered_ones_too(void **state)
{
	const kvx_config_t engine = {.struct_size = sizeof engine};
	kvx_connector_config_t config;
	char name[8];
	kvx_t *kvx;

	(void)state;
	kvx_connector_config_init(&config);
	(void)snprintf(config.connector, sizeof config.connector, "OtherConnector");
	assert_int_equal(kvx_connector_create(&config, &engine, &kvx), KVC_ERR_ARG);
	assert_non_null(strstr(kvx_last_error(), "KvdConnector"));
	assert_int_equal(kvx_connector_register("OtherConnector", create_other), KVC_OK);
	assert_int_equal(kvx_connector_register("OtherConnector", create_other), KVC_ERR_EXISTS);
	assert_int_equal(kvx_connector_register(KVX_CONNECTOR, create_other), KVC_ERR_EXISTS);
	assert_int_equal(kvx_connector_register("", create_other), KVC_ERR_ARG);
	assert_int_equal(kvx_connector_register("NoFunction", NULL), KVC_ERR_ARG);
	config.roles = KVX_CONSUMER;
	assert_int_equal(kvx_connector_create(&config, &engine, &kvx), KVC_OK);
	assert_int_equal(created_roles, KVX_CONSUMER);
	(void)snprintf(config.connector, sizeof config.connector, "OtherConector");
	assert_int_equal(kvx_connector_create(&config, &engine, &kvx), KVC_ERR_ARG);
	assert_non_null(strstr(kvx_last_error(), "did you mean OtherConnector"));
	for (uint32_t i = 1; i < KVX_CONNECTORS_MAX; i++) {
		(void)snprintf(name, sizeof name, "C%u", i);
		assert_int_equal(kvx_connector_register(name, create_other), KVC_OK);
	}
	assert_int_equal(kvx_connector_register("OneTooMany", create_other), KVC_ERR_LIMIT);
}

/* A struct that a program has filled in is checked like one that was read. */
static void p10_a_struct_is_checked_like_json(void **state)
{
	const kvx_config_t engine = {.struct_size = sizeof engine};
	kvx_connector_config_t bad[5];
	kvx_t *kvx;

	(void)state;
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		kvx_connector_config_init(&bad[i]);
	}
	bad[0].struct_size = 8;
	bad[1].roles = 4;
	bad[2].rank = 1;
	bad[3].port = 0;
	memset(bad[4].socket, 'x', sizeof bad[4].socket);
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		assert_int_equal(kvx_connector_create(&bad[i], &engine, &kvx), KVC_ERR_ARG);
		assert_true(strlen(kvx_last_error()) > 10);
	}
}

/* A role of the configuration restricts what the connector does. */
static void p7_a_connector_from_json_sends_and_one_receives(void **state)
{
	static pair_prompt_t from, to;
	kvx_connector_config_t config;
	kvx_send_result_t sent = {.struct_size = sizeof sent};
	kvx_recv_result_t result = {.struct_size = sizeof result};
	kvx_send_t *send = NULL;
	kvx_recv_t *recv;
	kvx_prefix_t prefix;
	kvx_chunk_t chunk;
	side_t producer, consumer;
	char text[256];
	rig_t rig;

	(void)state;
	rig_init(&rig, program);
	rig_start(&rig);
	(void)snprintf(text, sizeof text,
		       "{\"kv_role\": \"kv_producer\", \"kv_connector_extra_config\": {\"socket\": \"%s\"}}",
		       rig.socket);
	assert_int_equal(read_text(text, &config), KVC_OK);
	side_open_by(&producer, &config);
	config.roles = KVX_CONSUMER;
	side_open_by(&consumer, &config);

	pair_prompt_init(&from, 1, 70, 0);
	pair_prompt_init(&to, 1, 70, 30);
	side_compute(&producer, &from, 0, 70);
	prefix = pair_prefix(&to, PAIR_MS);
	chunk = pair_chunk(&from, "made", 70, 1);
	assert_int_equal(kvx_recv(producer.kvx, "made", &prefix, &recv, NULL), KVC_MISS);
	assert_int_equal(kvx_recv(consumer.kvx, "made", &prefix, &recv, NULL), KVC_PENDING);
	assert_int_equal(kvx_send(producer.kvx, &chunk, &send), KVC_PENDING);
	pair_await_send(&producer, &consumer, send, &sent);
	pair_await_recv(&consumer, NULL, recv, &result);
	assert_int_equal(result.tokens, 70);
	assert_true(side_holds(&consumer, &to, 70));
	kvx_send_end(send);
	kvx_recv_end(recv);
	side_close(&producer);
	side_close(&consumer);
	rig_check_quiet(&rig);
	rig_fini(&rig);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p10_the_json_form_reads_what_vllm_writes),
		cmocka_unit_test(p10_a_wrong_field_is_named_with_the_nearest_right_one),
		cmocka_unit_test(connectors_are_made_by_name_and_registered_ones_too),
		cmocka_unit_test(p10_a_struct_is_checked_like_json),
		cmocka_unit_test(p7_a_connector_from_json_sends_and_one_receives),
	};

	if (argc != 2) {
		return 64;
	}
	program = argv[1];

	return cmocka_run_group_tests_name("kvx.factory", tests, NULL, NULL);
}
