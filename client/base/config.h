/* client/config.h -- the caller's configuration, checked and copied. */
#ifndef KVC_CONFIG_H
#define KVC_CONFIG_H

#include "kvc.h"

/* Fill kvc's own copy of everything; *config is the caller's struct widened to this version. Needs kvc->env. */
kvc_status_t kvc_config_take(kvc_t *kvc, const kvc_config_t *given, kvc_config_t *config);

#endif
