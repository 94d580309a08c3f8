/* kvdpy.h -- the module kvd_vllm._kvd: both halves of the connector as Python objects that read vLLM's own objects.
 *
 * Stable ABI of Python 3.11. Every method of a half is a KVDPY_METHOD: after an exception the circuit breaker (Python)
 * logs and counts it, and the method answers with a value that means "nothing". Constructors raise; their caller is our
 * own Python.
 */
#ifndef KVDPY_H
#define KVDPY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kvx_scheduler.h"
#include "kvx_worker.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

/* A slot's function as the object pointer that the interpreter wants. */
#define KVDPY_SLOT(function) (__extension__(void *)(function))

#define KVDPY_MAX_GROUPS 16u
#define KVDPY_MAX_RANKS  1024u
#define KVDPY_MAX_RANGES (1u << 20) /* of memory to digest */
#define KVDPY_MAX_ID     256u       /* bytes of a request id; longer ones are not served */

/* Attribute names, interned once. */
#define KVDPY_NAMES(X)                                                                                                 \
	X(all_token_ids)                                                                                               \
	X(_all_token_ids)                                                                                              \
	X(attn_metadata)                                                                                               \
	X(block_hashes)                                                                                                \
	X(cache_salt)                                                                                                  \
	X(cudagraph_runtime_mode)                                                                                      \
	X(get_block_ids)                                                                                               \
	X(invalid_block_ids)                                                                                           \
	X(kv_cache_block_copies)                                                                                       \
	X(kv_connector_worker_meta)                                                                                    \
	X(kv_transfer_params)                                                                                          \
	X(lora_request)                                                                                                \
	X(max_tokens)                                                                                                  \
	X(mm_features)                                                                                                 \
	X(new_block_ids)                                                                                               \
	X(new_block_ids_to_zero)                                                                                       \
	X(num_computed_tokens)                                                                                         \
	X(num_output_tokens)                                                                                           \
	X(num_prompt_tokens)                                                                                           \
	X(num_publishable_block_hashes)                                                                                \
	X(num_scheduled_tokens)                                                                                        \
	X(block_ids)                                                                                                   \
	X(message)                                                                                                     \
	X(preempted_req_ids)                                                                                           \
	X(prompt_embeds)                                                                                               \
	X(reports)                                                                                                     \
	X(req_id)                                                                                                      \
	X(req_ids)                                                                                                     \
	X(request_id)                                                                                                  \
	X(resumed_req_ids)                                                                                             \
	X(resumable)                                                                                                   \
	X(scheduled_cached_reqs)                                                                                       \
	X(scheduled_new_reqs)                                                                                          \
	X(skip_reading_prefix_cache)                                                                                   \
	X(ubatch_slices)
typedef struct kvdpy_names {
#define KVDPY_NAME(name) PyObject *name;
	KVDPY_NAMES(KVDPY_NAME)
#undef KVDPY_NAME
} kvdpy_names_t;
extern kvdpy_names_t kvdpy_names;
int kvdpy_names_init(void);

/* ---- python.c: what every file needs of Python ------------------------------------------------ */

typedef struct kvdpy_breaker {
	PyObject *object; /* .error(hook, exception) */
	uint64_t errors;
} kvdpy_breaker_t;
/* `hook` has raised: count it, tell the circuit breaker and drop the exception. -1: an interrupt, which is no Exception
 * and stays raised. */
int kvdpy_report_error(kvdpy_breaker_t *breaker, const char *hook);
/* 0, or -1 with an exception: the method has another number of arguments. */
int kvdpy_check_count(Py_ssize_t n, Py_ssize_t wanted);

/* A method of a half: the value of `call`, if the half is open and has got `count` arguments. Else, and after an error,
 * the value of `harmless`. Both are new references. `text` is vLLM's name of the hook, or says what the method does. */
#define KVDPY_METHOD(half, method, count, call, harmless, text)                                                        \
	static PyObject *half##_##method(PyObject *object, PyObject *const *args, Py_ssize_t n)                        \
	{                                                                                                              \
		kvdpy_##half##_t *self = (kvdpy_##half##_t *)object;                                                   \
		PyObject *answer;                                                                                      \
                                                                                                                       \
		(void)args;                                                                                            \
		if (!self->half) {                                                                                     \
			return (harmless);                                                                             \
		}                                                                                                      \
		self->running++;                                                                                       \
		answer = kvdpy_check_count(n, count) ? NULL : (call);                                                  \
		self->running--;                                                                                       \
		if (!answer && kvdpy_report_error(&self->breaker, text) == 0) {                                        \
			answer = (harmless);                                                                           \
		}                                                                                                      \
                                                                                                                       \
		return answer;                                                                                         \
	}
#define KVDPY_METHOD_ROW(half, method, text) {#method, KVDPY_FAST(half##_##method), METH_FASTCALL, text},
#define KVDPY_FAST(function)                 ((PyCFunction)(void (*)(void))(function))
/* Answers. */
#define KVDPY_NONE       Py_NewRef(Py_None)
#define KVDPY_CLOSED     PyLong_FromLong(KVC_ERR_CLOSED)
#define KVDPY_DONE(call) ((call), Py_NewRef(Py_None))

/* An object's own memory, the last act of its destructor. */
void kvdpy_free_object(PyObject *object);

/* These return 0, or -1 with an exception. */

/* New references to n attributes of an object; on -1 kvdpy_drop() as well. */
int kvdpy_get_attributes(PyObject *object, PyObject *const *names, PyObject **values, int n);
void kvdpy_drop(PyObject **values, int n);
/* `number` may be NULL: a KeyError, if there is no exception yet. */
int kvdpy_read_u32(PyObject *number, uint32_t *p_value);
int kvdpy_read_u32_attribute(PyObject *object, PyObject *name, uint32_t *p_value);
int kvdpy_add_numbers(PyObject *set, const uint32_t *numbers, uint32_t n);
/* The engine's current stream: stream_of(device). */
int kvdpy_current_stream(PyObject *stream_of, PyObject *device, void **p_stream);

/* ---- config.c: a dict into what the C interface takes ----------------------------------------- */

/* A key of a configuration, and the field its value goes to. `format` is one of PyArg_Parse(): "i", also for uint32_t
 * and enumerations; "n" for size_t; "z" and "O" borrow from the dict. */
typedef struct kvdpy_key {
	const char *name, *format;
	size_t offset;
} kvdpy_key_t;
#define KVDPY_KEY(type, format, field)                                                                                 \
	{                                                                                                              \
#field, format, offsetof(type, field)                                                                  \
	}
#define KVDPY_COUNT(rows) (sizeof(rows) / sizeof(rows)[0])

/* 0, or -1 with an exception. */
int kvdpy_read_keys(PyObject *dict, const kvdpy_key_t *keys, size_t n, void *out);
/* Borrowed; NULL with an exception that names the key. */
PyObject *kvdpy_find_key(PyObject *dict, const char *key);
/* The list of 1 to `most` values of a key, and how many; NULL with an exception. */
PyObject *kvdpy_find_list(PyObject *dict, const char *key, Py_ssize_t most, uint32_t *p_count);

/* What both halves have. */
typedef struct kvdpy_common {
	const uint8_t *secret;
	uint32_t secret_len;
	kvc_identity_t identity;
	kvk_layout_t layouts[KVDPY_MAX_GROUPS]; /* of the groups */
	uint32_t layout_count;
} kvdpy_common_t;
int kvdpy_read_common(PyObject *dict, kvdpy_common_t *common);
/* (rank, head_first, head_count, layer_first, layer_count) */
int kvdpy_read_writer(PyObject *tuple, kvc_writer_t *writer);

/* The engine's cache: a group of it. */
typedef struct kvdpy_paged {
	uint32_t group;
	kvk_paged_t paged;
	void *base[KVK_MAX_LAYERS];
} kvdpy_paged_t;
int kvdpy_read_paged(PyObject *dict, kvdpy_paged_t *paged);

/* ---- stats.c: counters as dicts -------------------------------------------------------------- */

/* The tables in kvx_scheduler.h and kvx_worker.h, and what the circuit breaker counts. */
typedef struct kvdpy_half kvdpy_half_t;
extern const kvdpy_half_t kvdpy_scheduler_half, kvdpy_worker_half;

/* Statistics of an open half as the engine has got them last. */
#define KVDPY_MAX_COUNTERS 64u
typedef struct kvdpy_counters {
	PyObject *stats_class;
	uint64_t values[KVDPY_MAX_COUNTERS];
} kvdpy_counters_t;
/* The answer to get_kv_connector_stats(): stats_class({name: increment}) of what has changed since `last`, which is
 * brought up to date; None: nothing. `open` is a kvx_scheduler_t or a kvx_worker_t. */
PyObject *kvdpy_stats_delta(const kvdpy_half_t *half, const void *open, const kvdpy_breaker_t *breaker,
			    kvdpy_counters_t *last);
/* Totals and gauges; open NULL: those of `last`. */
PyObject *kvdpy_stats_totals(const kvdpy_half_t *half, const void *open, const kvdpy_breaker_t *breaker,
			     const kvdpy_counters_t *last);
/* stats_table() of the module: [(name, help)] of all counters, scheduler's and worker's. */
PyObject *kvdpy_stats_table(PyObject *module, PyObject *unused);

/* ---- request.c: a request of the engine ------------------------------------------------------ */

typedef struct kvdpy_request {
	PyObject_HEAD PyObject *request; /* vLLM's */
	PyObject *id;                    /* its request_id */
	PyObject *lora;                  /* text of its adapter, or None */
	PyObject *transfer;              /* what self->find_transfer() has found; None: nothing */
	const char *id_text;
	uint32_t id_len;
	uint32_t local;      /* tokens the engine had itself at the last match */
	uint32_t fed_tokens; /* tokens kvx_scheduler_add_tokens() has taken */
	uint32_t computed;   /* after the last step planned */
	uint32_t step;       /* in which its blocks were appended last */
	uint32_t last_step;  /* the last step after which it continues */
	uint32_t single;     /* tokens of the prompt where one token is wanted after it; 0: more are */
	uint32_t engine;     /* tokens the engine had itself when it was admitted first */
	kvx_hit_t hit;
	uint32_t known_blocks[KVDPY_MAX_GROUPS]; /* blocks known of each group */
	int admitted;                            /* 1: it has been given blocks once */
	int extra;                               /* 1: its units have extra keys */
	int no_read;                             /* 1: skip_reading_prefix_cache */
	int no_keys;                             /* 1: its tokens may be replaced later without notice */
	/* What self->find_limits() has found: tokens to load and to save at most, UINT32_MAX: all */
	uint32_t most_load, most_save;
	int memory_only; /* 1: nothing is loaded from disk */
} kvdpy_request_t;

extern PyTypeObject *kvdpy_request_type;

/* ---- scheduler.c, step.c --------------------------------------------------------------------- */

typedef struct kvdpy_scheduler {
	PyObject_HEAD kvx_scheduler_t *scheduler;
	uint32_t running; /* methods: one that waits, or calls Python, lets another thread begin */
	kvdpy_breaker_t breaker;
	PyObject *config;      /* keeps alive what the fields borrow from it */
	PyObject *requests;    /* {request_id: kvdpy_request_t} */
	PyObject *meta_class;  /* of what build_meta() returns: meta_class(message) */
	PyObject *meta_empty;  /* one for all steps without a message */
	PyObject *lora_text;   /* callable(lora_request) -> str */
	PyObject *unit_extras; /* callable(request, at, units) -> [bytes|None] */
	/* callable(request) -> (1: sent, 0: received; transfer id; peer or None; GPU of the producer, or None), or
	 * None; of one that is sent any text says: in memory of the engine's GPU, too */
	PyObject *find_transfer;
	PyObject *find_limits; /* callable(request) -> (most_load, most_save, memory_only) of kvdpy_request_t */
	/* callable(request, transfer id, name of this node, GPU in whose memory it is) -> what is answered, or None */
	PyObject *transfer_params;
	uint32_t handover_ms; /* longest wait for a prompt that another engine hands over */
	uint32_t peer_waits;  /* steps in a row that had nothing else to do; up to PEER_WAITS_MAX */
	PyObject *reprove;    /* callable(): the weights must be proved before more is saved */
	PyObject *forget;     /* callable(block ids that a load has not filled, ids of the requests that live) */
	uint32_t groups;
	uint32_t block_tokens[KVDPY_MAX_GROUPS];
	uint32_t tables[KVDPY_MAX_GROUPS]; /* index of the block table in the engine's, ascending */
	uint32_t hash_tokens;
	uint32_t request_count; /* requests in the last step */
	uint32_t continuing;    /* of these, requests that continue in the next step */
	uint32_t built_step;    /* number of that step */
	uint32_t step;          /* number of the next step */
	const char *instance;
	int prefetch; /* 1: a worker in this process may begin loads when they are planned */
	int foreign, loads, saves;
	int publishable;    /* 1: requests have num_publishable_block_hashes */
	int off;            /* 1: no match and no save; what is in progress is completed */
	PyObject *nothing;  /* (0, False) */
	PyObject *later;    /* (None, False) */
	PyObject *released; /* (False, None) */
	kvdpy_counters_t counters;
} kvdpy_scheduler_t;

PyObject *kvdpy_build_meta(kvdpy_scheduler_t *self, PyObject *output);

/* A request as the C interface is asked about it, while a call lasts. */
typedef struct kvdpy_ask {
	kvx_ask_t ask;
	kvx_hashes_t hashes;
	kvdpy_request_t *request; /* owned */
	PyObject *list;           /* of the engine's hashes; owned */
} kvdpy_ask_t;
/* vLLM's request, and one that is known. 0: kvdpy_ask_end() follows; -1: an exception. */
int kvdpy_ask_begin(kvdpy_scheduler_t *self, PyObject *request, kvdpy_ask_t *ask);
int kvdpy_ask_known(kvdpy_scheduler_t *self, kvdpy_request_t *request, kvdpy_ask_t *ask);
void kvdpy_ask_end(kvdpy_ask_t *ask);
/* The request's object, made when it is new. New reference. */
kvdpy_request_t *kvdpy_find_request(kvdpy_scheduler_t *self, PyObject *request);
/* Own keys: add the tokens below `upto` that were not added yet. */
int kvdpy_feed_tokens(kvdpy_scheduler_t *self, kvdpy_ask_t *ask, uint32_t upto);
/* `tables`: a sequence with a list of block ids per group: the whole table, or what is appended to it. */
int kvdpy_append_blocks(kvdpy_scheduler_t *self, kvdpy_ask_t *ask, PyObject *tables, int append);
/* The engine has taken its blocks. */
void kvdpy_drop_blocks(kvdpy_scheduler_t *self, kvdpy_ask_t *ask);
/* It has ended and is forgotten. The answer to request_finished(): (False, what names its hand-over, or None). */
PyObject *kvdpy_request_finish(kvdpy_scheduler_t *self, PyObject *request);

/* ---- prefetch.c ------------------------------------------------------------------------------ */

/* The message of a step, as soon as it is built. */
typedef struct kvdpy_message {
	const void *bytes;
	size_t len;
	int after_computing;   /* the step before computes something */
	const PyObject *given; /* the bytes object the engine gets; NULL: the message is empty */
} kvdpy_message_t;

/* How the scheduler half finds a worker of its instance. */
typedef struct kvdpy_prefetch {
	struct kvdpy_prefetch *next;
	struct kvdpy_worker *worker; /* removed before the worker is freed */
	int wanted;
	const char *instance;
	pthread_t thread; /* that called begin_step() last */
	int called;
	uint32_t owed;        /* messages built that begin_step() was not called with */
	const PyObject *last; /* the last of them; NULL: it is empty. Borrowed, only compared */
} kvdpy_prefetch_t;
void kvdpy_prefetch_join(struct kvdpy_worker *worker, const char *instance);
/* Allowed for one that has not joined. */
void kvdpy_prefetch_leave(kvdpy_prefetch_t *prefetch);
/* begin_step() was called with this; NULL: with no message. */
void kvdpy_prefetch_note_begin(kvdpy_prefetch_t *prefetch, const PyObject *message);
/* build_meta() has built a message: its loads begin now if they may. -1: interrupted. */
int kvdpy_prefetch_planned(kvdpy_scheduler_t *self, PyObject *output, const kvdpy_message_t *message);

/* ---- layers.c -------------------------------------------------------------------------------- */

#define KVDPY_MODES 8u

typedef struct kvdpy_layers {
	PyObject *names; /* {name: number}, borrowed; NULL: loads come whole */
	PyObject *modes; /* of CUDA graphs, in which attention runs from Python; borrowed */
	uint32_t count;
	uint32_t trusted;           /* bit a mode: each layer has been named in a step of it */
	uint8_t tries[KVDPY_MODES]; /* steps of the mode in which only some were */
	int mode;                   /* of the step at hand */
	int asked;                  /* in this step the engine must name its layers */
	int layered;                /* its loads come layer by layer; else the step is watched */
	int strange;                /* a layer was not on the step's stream */
	uint32_t seen;
	uint8_t named[KVK_MAX_LAYERS];
} kvdpy_layers_t;
/* Key "layers": ({name: number}, (mode, ..)), or None. */
int kvdpy_layers_init(kvdpy_layers_t *layers, PyObject *dict);
/* start_load_kv(context): run the loads, layer by layer where allowed. */
void kvdpy_layers_run_loads(kvdpy_layers_t *layers, kvx_worker_t *worker, PyObject *context);
/* wait_for_layer_load(name), in a step that has asked for it. */
void kvdpy_layers_note(kvdpy_layers_t *layers, kvx_worker_t *worker, PyObject *name);
void kvdpy_layers_end(kvdpy_layers_t *layers);
/* Drop the state of a step that did not end. */
void kvdpy_layers_clear(kvdpy_layers_t *layers);

/* ---- worker.c -------------------------------------------------------------------------------- */

typedef struct kvdpy_worker {
	PyObject_HEAD kvx_worker_t *worker;
	uint32_t running; /* methods */
	kvdpy_breaker_t breaker;
	PyObject *config;        /* keeps alive what the fields borrow from it */
	PyObject *meta_class;    /* of a step's message; one of another class asks for more */
	PyObject *prove;         /* callable(meta): it may ask what the weights in memory are */
	PyObject *report_class;  /* report_class([bytes]) */
	PyObject *results_class; /* KVConnectorTransferResults, or None where the engine has none */
	PyObject *nothing;       /* (None, None) */
	PyObject *stream_of; /* callable(device) -> the stream the engine enqueues on now; None: the cache is in host
				memory */
	PyObject *device;    /* its number */
	void *stream;        /* of the step */
	kvdpy_layers_t layers;
	kvdpy_prefetch_t prefetch;
	int groups;
	_Atomic uint32_t digesting; /* calls of digest() that use the worker */
	kvdpy_counters_t counters;
} kvdpy_worker_t;

/* ---- module.c makes the types ---------------------------------------------------------------- */

extern PyType_Spec kvdpy_request_spec, kvdpy_scheduler_spec, kvdpy_worker_spec, kvdpy_digest_spec;

#endif
