#include "engine/reference.h"

#include "kve/real.h"
#include "kvk/bf16.h"
#include "kvk/ep.h"

#include <math.h>
#include <stdlib.h>

struct reference {
	kve_config_t c;
	kve_weights_t w;
	float *turns;
	float *keys; /* [layer][position][kv_head][dim] */
	float *values;
	float *logits;
	uint32_t chosen[KVE_MAX_LAYERS][KVK_EP_MAX_TOP_K];
	uint32_t n;
};

static float *floats(size_t n)
{
	float *p = calloc(n, sizeof *p);

	if (!p) {
		abort();
	}

	return p;
}

reference_t *reference_create(const kve_config_t *config)
{
	reference_t *m = calloc(1, sizeof *m);
	const size_t kv = (size_t)config->layers * config->max_tokens * config->kv_heads * config->head_dim;

	if (!m || kve_weights_init(&m->w, config) != KV_OK) {
		abort();
	}
	m->c = *config;
	m->turns = floats((size_t)config->max_tokens * config->head_dim);
	m->keys = floats(kv);
	m->values = floats(kv);
	m->logits = floats(config->vocab);
	kve_rope_table(config, m->turns);

	return m;
}

void reference_destroy(reference_t *m)
{
	kve_weights_fini(&m->w);
	free(m->turns);
	free(m->keys);
	free(m->values);
	free(m->logits);
	free(m);
}

static float *times(const float *x, const kve_matrix_t *w)
{
	float *y = floats(w->out);

	for (uint32_t o = 0; o < w->out; o++) {
		for (uint32_t k = 0; k < w->in; k++) {
			y[o] += x[k] * w->data[((size_t)(o / 16) * w->in + k) * 16 + o % 16];
		}
	}

	return y;
}

static float *normed(const float *x, const float *gain, uint32_t n)
{
	float *y = floats(n);
	float sum = 0.0f;

	for (uint32_t i = 0; i < n; i++) {
		sum += x[i] * x[i];
	}
	for (uint32_t i = 0; i < n; i++) {
		y[i] = x[i] * (1.0f / sqrtf(sum / (float)n + 1e-5f)) * gain[i];
	}

	return y;
}

static void rotate(const reference_t *m, float *x, uint32_t heads)
{
	const uint32_t dim = m->c.head_dim, half = dim / 2;

	for (uint32_t h = 0; h < heads; h++) {
		for (uint32_t i = 0; i < half; i++) {
			const float c = m->turns[((size_t)m->n * half + i) * 2],
				    s = m->turns[((size_t)m->n * half + i) * 2 + 1];
			const float a = x[h * dim + i], b = x[h * dim + half + i];

			x[h * dim + i] = a * c - b * s;
			x[h * dim + half + i] = b * c + a * s;
		}
	}
}

/* One head against positions 0 .. n; stride floats from one position's head to the next. */
static void attend(const float *q, const float *keys, const float *values, size_t stride, uint32_t dim, uint32_t n,
		   float *out)
{
	float *p = floats(n);
	float max = -INFINITY, sum = 0.0f;

	for (uint32_t j = 0; j < n; j++) {
		for (uint32_t d = 0; d < dim; d++) {
			p[j] += q[d] * keys[j * stride + d];
		}
		max = p[j] > max ? p[j] : max;
	}
	for (uint32_t j = 0; j < n; j++) {
		p[j] = kve_exp32((p[j] - max) * (1.0f / sqrtf((float)dim)));
		sum += p[j];
	}
	for (uint32_t d = 0; d < dim; d++) {
		for (uint32_t j = 0; j < n; j++) {
			out[d] += p[j] * values[j * stride + d];
		}
		out[d] /= sum;
	}
	free(p);
}

static void norm_heads(const kve_config_t *c, float *x, uint32_t heads, const float *gain)
{
	for (uint32_t h = 0; h < heads; h++) {
		float *y = normed(x + h * c->head_dim, gain, c->head_dim);

		for (uint32_t d = 0; d < c->head_dim; d++) {
			x[h * c->head_dim + d] = y[d];
		}
		free(y);
	}
}

static void attention_branch(reference_t *m, uint32_t l, float *x)
{
	const kve_config_t *c = &m->c;
	const kve_layer_t *w = &m->w.layers[l];
	const size_t stride = (size_t)c->kv_heads * c->head_dim, layer = (size_t)l * c->max_tokens * stride;
	float *in = normed(x, w->attention_norm, c->hidden);
	float *q = times(in, &w->q), *k = times(in, &w->k), *v = times(in, &w->v);
	float *all = floats((size_t)c->heads * c->head_dim);
	float *added;

	if (c->qk_norm) {
		norm_heads(c, q, c->heads, w->q_norm);
		norm_heads(c, k, c->kv_heads, w->k_norm);
	}
	rotate(m, q, c->heads);
	rotate(m, k, c->kv_heads);
	for (size_t i = 0; i < stride; i++) {
		m->keys[layer + m->n * stride + i] = k[i];
		m->values[layer + m->n * stride + i] = v[i];
	}
	for (uint32_t h = 0; h < c->heads; h++) {
		const size_t at = layer + (size_t)(h / (c->heads / c->kv_heads)) * c->head_dim;

		attend(q + h * c->head_dim, m->keys + at, m->values + at, stride, c->head_dim, m->n + 1,
		       all + h * c->head_dim);
	}
	added = times(all, &w->o);
	for (uint32_t i = 0; i < c->hidden; i++) {
		x[i] += added[i];
	}
	free(in);
	free(q);
	free(k);
	free(v);
	free(all);
	free(added);
}

static void mlp_branch(reference_t *m, uint32_t l, float *x)
{
	const kve_layer_t *w = &m->w.layers[l];
	float *in = normed(x, w->mlp_norm, m->c.hidden);
	float *gate = times(in, &w->gate), *up = times(in, &w->up);
	float *added;

	for (uint32_t i = 0; i < m->c.inner; i++) {
		gate[i] = gate[i] / (1.0f + kve_exp32(-gate[i])) * up[i];
	}
	added = times(gate, &w->down);
	for (uint32_t i = 0; i < m->c.hidden; i++) {
		x[i] += added[i];
	}
	free(in);
	free(gate);
	free(up);
	free(added);
}

static float *half(const float *x, uint32_t n)
{
	float *y = floats(n);

	for (uint32_t i = 0; i < n; i++) {
		y[i] = kvk_bf16_to_float(kvk_bf16_round(x[i]));
	}

	return y;
}

/* What an expert makes of a row. */
static float *expert(const kve_expert_t *w, const float *x, uint32_t inner)
{
	float *gate = times(x, &w->gate), *up = times(x, &w->up);
	float *made, *y;

	for (uint32_t i = 0; i < inner; i++) {
		gate[i] = gate[i] / (1.0f + kve_exp32(-gate[i])) * up[i];
	}
	made = times(gate, &w->down);
	y = half(made, w->down.out);
	free(gate);
	free(up);
	free(made);

	return y;
}

/* The k largest of p by sorting all of it. */
static void choose(const kve_config_t *c, const float *p, uint32_t *chosen)
{
	for (uint32_t e = 0; e < c->experts; e++) {
		uint32_t rank = 0;

		for (uint32_t o = 0; o < c->experts; o++) {
			rank += p[o] > p[e] || (p[o] == p[e] && o < e);
		}
		if (rank < c->top_k) {
			chosen[rank] = e;
		}
	}
}

/* Of what x was, to x. */
static void expert_branch(reference_t *m, uint32_t l, const float *was, float *x)
{
	const kve_config_t *c = &m->c;
	const kve_layer_t *w = &m->w.layers[l];
	float *in = normed(was, w->mlp_norm, c->hidden), *p = times(in, &w->router), *row = half(in, c->hidden);
	float *sum = floats(c->hidden), max = -INFINITY, all = 0.0f, few = 0.0f;
	uint32_t *chosen = m->chosen[l];

	for (uint32_t e = 0; e < c->experts; e++) {
		max = p[e] > max ? p[e] : max;
	}
	for (uint32_t e = 0; e < c->experts; e++) {
		p[e] = kve_exp32(p[e] - max);
		all += p[e];
	}
	for (uint32_t e = 0; e < c->experts; e++) {
		p[e] /= all;
	}
	choose(c, p, chosen);
	for (uint32_t k = 0; k < c->top_k; k++) {
		few += p[chosen[k]];
	}
	for (uint32_t g = 0; g < c->groups; g++) {
		float *part = floats(c->hidden), *rounded;

		for (uint32_t k = 0; k < c->top_k; k++) {
			float *y;

			if (chosen[k] / (c->experts / c->groups) != g) {
				continue;
			}
			y = expert(&w->experts[chosen[k]], row, c->expert_inner);
			for (uint32_t i = 0; i < c->hidden; i++) {
				part[i] += (c->norm_top_k ? p[chosen[k]] / few : p[chosen[k]]) * y[i];
			}
			free(y);
		}
		rounded = half(part, c->hidden);
		for (uint32_t i = 0; i < c->hidden; i++) {
			sum[i] += rounded[i];
		}
		free(part);
		free(rounded);
	}
	for (uint32_t i = 0; i < c->hidden; i++) {
		x[i] += kvk_bf16_to_float(kvk_bf16_round(sum[i]));
	}
	free(in);
	free(p);
	free(row);
	free(sum);
}

/* The shared expert and those that are chosen see the same rows. */
static void both_branches(reference_t *m, uint32_t l, float *x)
{
	float *was = floats(m->c.hidden);

	for (uint32_t i = 0; i < m->c.hidden; i++) {
		was[i] = x[i];
	}
	if (m->c.inner) {
		mlp_branch(m, l, x);
	}
	expert_branch(m, l, was, x);
	free(was);
}

const float *reference_feed(reference_t *m, uint32_t token)
{
	float *x = floats(m->c.hidden);
	float *last;

	for (uint32_t i = 0; i < m->c.hidden; i++) {
		x[i] = m->w.embedding[(size_t)token * m->c.hidden + i];
	}
	for (uint32_t l = 0; l < m->c.layers; l++) {
		attention_branch(m, l, x);
		if (m->c.experts) {
			both_branches(m, l, x);
		} else {
			mlp_branch(m, l, x);
		}
	}
	last = normed(x, m->w.final_norm, m->c.hidden);
	free(m->logits);
	m->logits = times(last, &m->w.head);
	free(last);
	free(x);
	m->n++;

	return m->logits;
}

const uint32_t *reference_experts(const reference_t *m, uint32_t layer)
{
	return m->chosen[layer];
}
