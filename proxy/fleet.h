/* fleet.h -- the engines: which of them answer, what each one has to do, and has in its own cache.
 *
 * An engine is up until `health.failures` looks at its /health in a row have failed, or a connection was refused. Looks
 * at one that is down become rarer, but a request that finds none up has all looked at; the first look that succeeds
 * brings it back. Loads are this proxy's own: of other
 * clients of an engine only its slowness tells.
 */
#ifndef KVP_FLEET_H
#define KVP_FLEET_H

#include "body.h"
#include "call.h"
#include "decide.h"
#include "events/cache.h"
#include "events/subscriber.h"
#include "metrics.h"
#include "options.h"

typedef struct kvp_fleet kvp_fleet_t;

typedef struct kvp_engine {
	kvp_fleet_t *fleet;
	char url[KVP_URL_MAX + 1];
	char peer[KVP_URL_MAX + 1];      /* its node, of a prefill engine; "": it is not named */
	char device[KVP_DEVICE_MAX + 1]; /* the GPU that its last answers have named; "": none */
	int is_decode, up;
	uint32_t failures; /* looks in a row */
	kvp_call_t *look;  /* under way */
	uint64_t next_look_ns, pause_ns;
	uint32_t running;
	double backlog_ns, slowness;
	char endpoint[KVP_URL_MAX + 1]; /* of its events; "": none */
	kvp_subscriber_t subscriber;
	kvp_cache_t *cache; /* what the events tell; NULL: none */
} kvp_engine_t;

struct kvp_fleet {
	const kvp_options_t *options;
	kvp_calls_t *calls;
	void *zmq;                             /* libzmq's context; NULL: no engine has events */
	kvp_engine_t engines[KVP_ENGINES_MAX]; /* prefill engines first */
	uint32_t prefill_n, decode_n;
};

/* KV_ERR_NOMEM. kvp_fleet_fini() is right after errors too. */
kv_status_t kvp_fleet_init(kvp_fleet_t *fleet, const kvp_options_t *options, kvp_calls_t *calls);
void kvp_fleet_fini(kvp_fleet_t *fleet);
/* Begin the looks and connections that are due. */
void kvp_fleet_tick(kvp_fleet_t *fleet, uint64_t now_ns);
/* Look now at the engines of a role that are down: a request finds none up. */
void kvp_fleet_look(kvp_fleet_t *fleet, int is_decode);
/* Is such a look at a decode engine under way? */
int kvp_fleet_is_looking(const kvp_fleet_t *fleet);
/* Take the events that have come. Returns whether more are left than are taken at a time. */
int kvp_fleet_serve(kvp_fleet_t *fleet, uint64_t now_ns);

/* A request begins, and ends, on an engine; work_ns: estimated prefill work of it. */
void kvp_engine_begin(kvp_engine_t *engine, double work_ns);
void kvp_engine_finish(kvp_engine_t *engine, double work_ns);
/* A prefill that was to take `expected_ns` at slowness 1, what was before it included, has taken `measured_ns`. */
void kvp_engine_measured(kvp_engine_t *engine, double expected_ns, double measured_ns);
/* A connection was refused. */
void kvp_engine_unreachable(kvp_engine_t *engine);

static inline uint64_t kvp_engine_bit(const kvp_engine_t *engine)
{
	return UINT64_C(1) << (engine - engine->fleet->engines);
}
/* Tokens of a prompt that each engine has in its own cache: own[prefill_n + decode_n]. Returns the most of a decode
 * engine. */
uint32_t kvp_fleet_own_hits(const kvp_fleet_t *fleet, const kvp_prefix_question_t *question, uint32_t *own);
/* What kvp_decide() reads: loads[prefill_n + decode_n]. Engines in the set `excluded` are unusable; all can load `hit`
 * tokens of the prompt, and have own[i]. */
void kvp_fleet_loads(const kvp_fleet_t *fleet, uint64_t excluded, uint32_t hit, const uint32_t *own,
		     kvp_engine_load_t *loads);
/* Is an engine of the role up that is not in the set? */
int kvp_fleet_has(const kvp_fleet_t *fleet, int is_decode, uint64_t excluded);
void kvp_fleet_metrics(const kvp_fleet_t *fleet, kvp_engine_metrics_t out[KVP_ENGINES_MAX]);

#endif
