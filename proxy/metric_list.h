/* metric_list.h -- the metric tables behind metrics.h. Add a line, update it where the thing happens; nothing else to
 * do. */
#ifndef KVP_METRIC_LIST_H
#define KVP_METRIC_LIST_H

#define KVP_HELP_ANSWERS "requests ended: answered; refused by an engine; refused as malformed; refused at a limit; without an engine that answers; ended by the client; their stream cut short"
#define KVP_HELP_DECISIONS "decisions: handed over; computed by the decode engine, since little was left to compute, the queue was long or full, no prefill engine was there, several sequences were asked for, it is no completion, or attempts had failed"
#define KVP_HELP_FAILURES "calls that failed: not reached, an error of the engine, an answer that makes no sense, or too late"
#define KVP_HELP_LOOKUPS "prompts looked up in the daemon: some of it was there; nothing; or no space of it is known"

#define KVP_METRIC_LIST(X)                                                                                             \
	X(CONNECTIONS, kvd_pd_proxy_connections, KV_METRIC_GAUGE, "connections of clients")                            \
	X(CONNECTIONS_ENDED, kvd_pd_proxy_connections_ended_total, KV_METRIC_COUNTER, "connections closed at a limit: too many, no whole request in time, or an answer that is not taken") \
	X(REQUESTS, kvd_pd_proxy_requests, KV_METRIC_GAUGE, "requests now")                                            \
	X(BODY_BYTES, kvd_pd_proxy_body_bytes, KV_METRIC_GAUGE, "bytes of the bodies of requests that are kept, unfinished ones too") \
	X(ANSWER_BYTES, kvd_pd_proxy_answer_bytes, KV_METRIC_GAUGE, "bytes of the answers of engines that are kept: whole ones, and what waits of streams") \
	X(PASSED_EARLY, kvd_pd_proxy_answers_passed_early_total, KV_METRIC_COUNTER, "answers that were not streamed and were passed on as they came: larger than limits.answer, or without room in limits.answers") \
	X(ANSWERED, kvd_pd_proxy_requests_total{outcome="answered"}, KV_METRIC_COUNTER, KVP_HELP_ANSWERS)              \
	X(REFUSED, kvd_pd_proxy_requests_total{outcome="refused"}, KV_METRIC_COUNTER, KVP_HELP_ANSWERS)                \
	X(MALFORMED, kvd_pd_proxy_requests_total{outcome="malformed"}, KV_METRIC_COUNTER, KVP_HELP_ANSWERS)            \
	X(OVERLOADED, kvd_pd_proxy_requests_total{outcome="overloaded"}, KV_METRIC_COUNTER, KVP_HELP_ANSWERS)          \
	X(FAILED, kvd_pd_proxy_requests_total{outcome="failed"}, KV_METRIC_COUNTER, KVP_HELP_ANSWERS)                  \
	X(ABORTED, kvd_pd_proxy_requests_total{outcome="aborted"}, KV_METRIC_COUNTER, KVP_HELP_ANSWERS)                \
	X(CUT, kvd_pd_proxy_requests_total{outcome="cut"}, KV_METRIC_COUNTER, KVP_HELP_ANSWERS)                        \
	X(HANDOVERS, kvd_pd_proxy_decisions_total{choice="handover"}, KV_METRIC_COUNTER, KVP_HELP_DECISIONS)           \
	X(LOCAL_SHORT, kvd_pd_proxy_decisions_total{choice="short"}, KV_METRIC_COUNTER, KVP_HELP_DECISIONS)            \
	X(LOCAL_WAIT, kvd_pd_proxy_decisions_total{choice="queue"}, KV_METRIC_COUNTER, KVP_HELP_DECISIONS)             \
	X(LOCAL_NO_PREFILL, kvd_pd_proxy_decisions_total{choice="no_prefill"}, KV_METRIC_COUNTER, KVP_HELP_DECISIONS)  \
	X(LOCAL_WHOLE, kvd_pd_proxy_decisions_total{choice="several"}, KV_METRIC_COUNTER, KVP_HELP_DECISIONS)          \
	X(LOCAL_OTHER, kvd_pd_proxy_decisions_total{choice="as_it_is"}, KV_METRIC_COUNTER, KVP_HELP_DECISIONS)         \
	X(LOCAL_FAILED, kvd_pd_proxy_decisions_total{choice="failed"}, KV_METRIC_COUNTER, KVP_HELP_DECISIONS)          \
	X(PREFILL_FAILURES, kvd_pd_proxy_failures_total{role="prefill"}, KV_METRIC_COUNTER, KVP_HELP_FAILURES)         \
	X(DECODE_FAILURES, kvd_pd_proxy_failures_total{role="decode"}, KV_METRIC_COUNTER, KVP_HELP_FAILURES)           \
	X(TOKENIZE_FAILURES, kvd_pd_proxy_failures_total{role="tokenize"}, KV_METRIC_COUNTER, KVP_HELP_FAILURES)       \
	X(RETRIES, kvd_pd_proxy_retries_total, KV_METRIC_COUNTER, "requests sent again, to another engine")            \
	X(QUEUED, kvd_pd_proxy_queue_requests, KV_METRIC_GAUGE, "requests that wait for a prefill engine")             \
	X(QUEUE_EXPIRED, kvd_pd_proxy_queue_expired_total, KV_METRIC_COUNTER, "requests that left the queue at their deadline, for a decode engine") \
	X(QUEUE_TIME, kvd_pd_proxy_queue_seconds, KV_METRIC_HISTOGRAM, "time in the queue")                            \
	X(PREFILL_TIME, kvd_pd_proxy_prefill_seconds, KV_METRIC_HISTOGRAM, "time to the answer of a prefill engine")   \
	X(FIRST_TIME, kvd_pd_proxy_first_byte_seconds, KV_METRIC_HISTOGRAM, "time from a whole request to the first byte of its answer") \
	X(LOOKUP_HITS, kvd_pd_proxy_lookups_total{result="hit"}, KV_METRIC_COUNTER, KVP_HELP_LOOKUPS)                  \
	X(LOOKUP_MISSES, kvd_pd_proxy_lookups_total{result="miss"}, KV_METRIC_COUNTER, KVP_HELP_LOOKUPS)               \
	X(LOOKUP_UNKNOWN, kvd_pd_proxy_lookups_total{result="unknown"}, KV_METRIC_COUNTER, KVP_HELP_LOOKUPS)           \
	X(PROMPT_TOKENS, kvd_pd_proxy_prompt_tokens_total, KV_METRIC_COUNTER, "tokens of prompts, where they are not known by estimate") \
	X(HIT_TOKENS, kvd_pd_proxy_hit_tokens_total, KV_METRIC_COUNTER, "tokens of prompts that the daemon had")          \
	X(OWN_HIT_TOKENS, kvd_pd_proxy_own_hit_tokens_total, KV_METRIC_COUNTER, "tokens of prompts that a decode engine had in its own cache, of the one that had most")

/* Of each engine, with the labels engine and role. */
#define KVP_ENGINE_METRIC_LIST(X)                                                                                      \
	X(UP, kvd_pd_proxy_engine_up, KV_METRIC_GAUGE, "1: the engine gets requests; 0: it does not answer")           \
	X(RUNNING, kvd_pd_proxy_engine_requests, KV_METRIC_GAUGE, "requests that the engine has from this proxy")      \
	X(BACKLOG, kvd_pd_proxy_engine_backlog_seconds, KV_METRIC_GAUGE, "prefill work that the engine has not ended, by estimate") \
	X(SLOWNESS, kvd_pd_proxy_engine_slowness_percent, KV_METRIC_GAUGE, "measured over estimated time of its prefills") \
	X(CACHED, kvd_pd_proxy_engine_cached_blocks, KV_METRIC_GAUGE, "blocks that the engine has in its own cache, as its events tell") \
	X(EVENTS, kvd_pd_proxy_engine_event_messages_total, KV_METRIC_COUNTER, "messages with events of that cache")   \
	X(EVENT_GAPS, kvd_pd_proxy_engine_event_gaps_total, KV_METRIC_COUNTER, "gaps in their numbers: what was known of the cache is forgotten") \
	X(EVENTS_MALFORMED, kvd_pd_proxy_engine_events_malformed_total, KV_METRIC_COUNTER, "messages that could not be read, and handshakes that failed: likewise") \
	X(LEFT_OUT, kvd_pd_proxy_engine_event_blocks_left_out_total, KV_METRIC_COUNTER, "blocks stored that count as not there: the one before is unknown, or events.blocks are known")

#endif
