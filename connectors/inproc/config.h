/* inproc/config.h -- what kvx_attach() is given. */
#ifndef KVX_INPROC_CONFIG_H
#define KVX_INPROC_CONFIG_H

#include "inproc/state.h"

/* KVC_ERR_ARG and a sentence in kvx_last_error(). */
kvc_status_t kvx_config_check(const kvx_config_t *config);
/* Copy the identity into the connector and complete it from the layout. */
kvc_status_t kvx_config_keep_identity(kvx_t *kvx, const kvx_config_t *config);
/* libkvc has refused it: pass its sentence on. */
kvc_status_t kvx_config_identity_refused(void);

#endif
