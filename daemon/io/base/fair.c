/* Namespaces in turn: a flow is what one of them has ready. */
#include "io/base/fair.h"

#include "kv/types.h"

static void flow_push(kvd_fair_t *fair, kvd_flow_t *flow, int at_front)
{
	flow->listed = 1;
	fair->flows++;
	if (!fair->first) {
		flow->next = NULL;
		fair->first = fair->last = flow;
	} else if (at_front) {
		flow->next = fair->first;
		fair->first = flow;
	} else {
		flow->next = NULL;
		fair->last->next = flow;
		fair->last = flow;
	}
}

static kvd_flow_t *flow_pop(kvd_fair_t *fair)
{
	kvd_flow_t *flow = fair->first;

	fair->first = flow->next;
	fair->last = fair->first ? fair->last : NULL;
	fair->flows--;

	return flow;
}

void kvd_fair_add(kvd_fair_t *fair, kvd_source_t *source, uint32_t events, uint64_t since_ns)
{
	kvd_flow_t *flow = source->flow;

	source->events |= events;
	if (source->queued) {
		return;
	}
	source->queued = 1;
	source->since_ns = since_ns;
	source->next = NULL;
	source->prev = flow->last;
	*(flow->last ? &flow->last->next : &flow->first) = source;
	flow->last = source;
	if (!flow->listed) {
		flow_push(fair, flow, !fair->serving);
	}
}

void kvd_fair_remove(kvd_source_t *source)
{
	kvd_flow_t *flow = source->flow;

	if (!source->queued) {
		return;
	}
	*(source->prev ? &source->prev->next : &flow->first) = source->next;
	*(source->next ? &source->next->prev : &flow->last) = source->prev;
	source->queued = 0;
	source->events = 0;
}

static void flow_serve(kvd_fair_t *fair, kvd_flow_t *flow, kvd_host_t *host, const kv_env_t *env)
{
	uint64_t now = kv_now_ns(env);

	fair->until_ns = now + KVD_QUANTUM_NS;
	while (flow->first && now < fair->until_ns) {
		kvd_source_t *source = flow->first;
		uint32_t events = source->events;

		kvd_fair_remove(source);
		if (source->ready(host, source, events)) {
			kvd_fair_add(fair, source, 0, now);
		}
		now = kv_now_ns(env);
	}
}

void kvd_fair_serve(kvd_fair_t *fair, kvd_host_t *host, const kv_env_t *env)
{
	fair->serving = 1;
	for (uint32_t left = fair->flows; left > 0; left--) {
		kvd_flow_t *flow = flow_pop(fair);

		flow_serve(fair, flow, host, env);
		flow->listed = 0;
		if (flow->first) {
			flow_push(fair, flow, 0);
		}
	}
	fair->serving = 0;
}
