/* setup.h -- the model and the devices that a command computes with. */
#ifndef KVE_SETUP_H
#define KVE_SETUP_H

#include "command.h"

#include "kve/devices.h"
#include "kve/rank.h"

/* First in the values of a command that has SETUP_OPTIONS. */
typedef struct setup_options {
	char config[KV_OPTION_STRING_MAX];
	int device, link;
	uint64_t layers, ranks, gpus, pace, transport_sms;
} setup_options_t;

#define SETUP_AT(field) offsetof(setup_options_t, field)
#define SETUP_OPTIONS                                                                                                  \
	{"config",                                                                                                     \
	 KV_OPTION_PATH,                                                                                               \
	 "",                                                                                                           \
	 NULL,                                                                                                         \
	 NULL,                                                                                                         \
	 NULL,                                                                                                         \
	 0,                                                                                                            \
	 SETUP_AT(config),                                                                                             \
	 "config.json of Qwen3 or Qwen3-MoE; none: a small model with experts."},                                      \
		{"layers", KV_OPTION_U64, "0", "0", "64", NULL, 0, SETUP_AT(layers), "Layers of it; 0: as it says."},  \
		{"device",                                                                                             \
		 KV_OPTION_ENUM,                                                                                       \
		 "cpu",                                                                                                \
		 NULL,                                                                                                 \
		 NULL,                                                                                                 \
		 "cpu,gpu",                                                                                            \
		 0,                                                                                                    \
		 SETUP_AT(device),                                                                                     \
		 "gpu: BF16 on GPUs; cpu: the same by the kernels' twins."},                                           \
		{"data-parallel-size",                                                                                 \
		 KV_OPTION_U64,                                                                                        \
		 "1",                                                                                                  \
		 "1",                                                                                                  \
		 "8",                                                                                                  \
		 NULL,                                                                                                 \
		 0,                                                                                                    \
		 SETUP_AT(ranks),                                                                                      \
		 "Ranks, with the experts between them."},                                                             \
		{"gpus", KV_OPTION_U64, "1", "1", "8", NULL, 0, SETUP_AT(gpus), "GPUs; rank r has number r % gpus."},  \
		{"link",                                                                                               \
		 KV_OPTION_ENUM,                                                                                       \
		 "peer",                                                                                               \
		 NULL,                                                                                                 \
		 NULL,                                                                                                 \
		 "peer,host,host-kernels",                                                                             \
		 0,                                                                                                    \
		 SETUP_AT(link),                                                                                       \
		 "peer: stores to the other rank's memory; host: copies through host memory; host-kernels: stores "    \
		 "there."},                                                                                            \
		{"pace", KV_OPTION_U64,  "0",                                                                          \
		 "0",    "1000000",      NULL,                                                                         \
		 0,      SETUP_AT(pace), "Of host-kernels: MB/s that a rank stores at most; 0: any."},                 \
	{                                                                                                              \
		"transport-sms", KV_OPTION_U64, "0", "0", "64", NULL, 0, SETUP_AT(transport_sms),                      \
			"SMs of a rank's transport; 0: 8, with copies 2."                                              \
	}

/* What a command that computes has open. */
typedef struct setup {
	kve_config_t model;
	kve_devices_t *devices;
	uint32_t ranks;
} setup_t;

/* Returns 0, or an exit status: said on standard error. */
int setup_open(setup_t *setup, const setup_options_t *options);
void setup_close(setup_t *setup);
/* Say why computing failed, the device's word where it is a device. Returns EXIT_DEVICE. */
int setup_fail(const char *command, const setup_options_t *options, kv_status_t status);
/* Bytes of a rank's device, printed. */
void setup_print_memory(const kve_group_t *group, uint32_t cache_blocks);

#endif
