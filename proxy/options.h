/* options.h -- every option of kvd-pd-proxy: the values and the table they come from. docs/pd-proxy.md is made from the
 * table (--options-page). */
#ifndef KVP_OPTIONS_H
#define KVP_OPTIONS_H

#include "kv/option.h"

typedef struct kvp_options {
	char http_listen[KV_OPTION_STRING_MAX];
	int http_allow_remote;
	char prefill[KV_OPTION_STRING_MAX], decode[KV_OPTION_STRING_MAX];
	int sequential, tokenize;
	uint64_t skip_tokens, skip_wait;
	uint64_t queue_max, queue_deadline;
	uint64_t prefill_running, prefill_ahead, prefill_timeout;
	uint64_t decode_timeout, decode_stall, decode_whole, connect_timeout, tokenize_timeout;
	uint64_t attempts;
	uint64_t health_interval, health_timeout, health_failures, health_backoff;
	uint64_t cost_fixed, cost_tokens, cost_attention, cost_handover, cost_transfer, cost_local, cost_running;
	char kvd_socket[KV_OPTION_STRING_MAX], kvd_peers[KV_OPTION_STRING_MAX];
	char events_prefill[KV_OPTION_STRING_MAX], events_decode[KV_OPTION_STRING_MAX];
	uint64_t events_blocks;
	uint64_t limits_body, limits_bodies, limits_tokens, limits_headers, limits_connections, limits_requests,
		limits_answer, limits_stream, limits_answers, limits_receive_time, limits_idle_time;
	int log_level;
} kvp_options_t;

extern const kv_option_table_t kvp_option_table;

#define KVP_ENGINES_MAX 64u /* of both lists together */
#define KVP_URL_MAX     200u
#define KVP_PEER_MAX    64u

typedef enum kvp_action { KVP_RUN, KVP_CHECK_CONFIG, KVP_SHOW } kvp_action_t;

/* Read file, environment and command line. KVP_SHOW: what was asked for (--help, --version, ...) has been printed.
 * KV_ERR_CONFIG, KV_ERR_IO: *error says what and where. */
kv_status_t kvp_options_read(int argc, char **argv, kvp_options_t *options, kvp_action_t *action,
			     kv_option_error_t *error);

/* The n-th word of a list, without slashes at its end; 0: there is none. */
size_t kvp_options_word(const char *list, uint32_t n, char out[KVP_URL_MAX + 1]);

#endif
