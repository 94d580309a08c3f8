/* decide.h -- where a request is computed: on a decode engine alone, or first on a prefill engine that hands its KV
 * over.
 *
 * Pure: estimates and loads in, a choice out.
 * Times are nanoseconds in double, tokens are whole prompts.
 */
#ifndef KVP_DECIDE_H
#define KVP_DECIDE_H

#include <stdint.h>

/* What things take on an engine of slowness 1. */
typedef struct kvp_costs {
	double fixed_ns;     /* of a prefill, whatever its length */
	double token_ns;     /* each token that is computed */
	double pair_ns;      /* attention: each pair of a computed token and one before it, times two */
	double handover_ns;  /* of a hand-over, whatever its length */
	double transfer_ns;  /* each token that is handed over */
	double local_factor; /* a local prefill takes this many times the time of one on a prefill engine */
	double running_ns;   /* how much later a request starts for each one that decodes on the same engine */
} kvp_costs_t;

typedef struct kvp_thresholds {
	/* What is left takes at most as long as a prompt of this length, and the decode engine would be done first: no
	 * hand-over. */
	uint32_t min_tokens;
	double max_wait_ns; /* a prefill engine would start later than this: no hand-over */
} kvp_thresholds_t;

typedef struct kvp_engine_load {
	int usable;
	uint32_t running;  /* requests there */
	uint32_t hit;      /* tokens of this prompt that it needs not compute */
	uint32_t own;      /* those of them in its own cache; it loads the others */
	double backlog_ns; /* prefill work there that has not ended, by estimate */
	double slowness;   /* measured over estimated time; 1: as estimated */
} kvp_engine_load_t;

typedef struct kvp_scene {
	kvp_costs_t costs;
	kvp_thresholds_t thresholds;
	const kvp_engine_load_t *prefill, *decode;
	uint32_t prefill_n, decode_n;
	uint32_t max_running; /* requests that a prefill engine has at a time; others wait in the queue */
	double ahead_ns;      /* it gets another one only while it has less work than this */
	double queue_ns;      /* work that waits in the queue ahead of this request, by estimate */
} kvp_scene_t;

typedef struct kvp_question {
	uint32_t tokens;  /* of the prompt */
	int whole;        /* it cannot be handed over: several sequences, log-probabilities of the prompt */
	double waited_ns; /* in the queue, so far */
} kvp_question_t;

typedef enum kvp_verdict {
	KVP_HANDOVER,
	KVP_QUEUE, /* a hand-over, once a prefill engine has room */
	KVP_LOCAL_SHORT,
	KVP_LOCAL_WAIT,
	KVP_LOCAL_NO_PREFILL,
	KVP_LOCAL_WHOLE,
	KVP_NO_DECODE, /* no engine can serve it now */
} kvp_verdict_t;

typedef struct kvp_choice {
	kvp_verdict_t verdict;
	uint32_t prefill, decode; /* indices; prefill: of KVP_HANDOVER only */
	double prefill_ns; /* estimated work: at the prefill engine, or of a local prefill at the decode engine */
} kvp_choice_t;

/* Time to compute a prompt that has its first `hit` tokens computed. */
double kvp_prefill_ns(const kvp_costs_t *costs, uint32_t tokens, uint32_t hit);

/* Place in the queue, the least first: a short prompt overtakes a long one that has not waited for four times its own
 * work yet. */
double kvp_queue_rank(double queued_ns, double work_ns);

/* The decode engine with the least of backlog, load and tokens to compute and to load; the prefill engine with the
 * least of wait, prefill and transfer. Ties go to the first. Unusable engines are never chosen. */
void kvp_decide(const kvp_scene_t *scene, const kvp_question_t *question, kvp_choice_t *choice);

#endif
