/* The disk tier's state: which faults stop it, and when each is tried again. Owner's thread only. */
#include "faults.h"

#include <stdio.h>

#define WAIT_MIN_NS 100000000ull
#define WAIT_MAX_NS 60000000000ull

/* What a fault stops. */
static const kvs_health_t stops[KVS_FAULTS] = {
	[KVS_FAULT_SPACE] = KVS_HEALTH_FULL,      [KVS_FAULT_CARVE] = KVS_HEALTH_NOT_GROWING,
	[KVS_FAULT_WRITE] = KVS_HEALTH_READ_ONLY, [KVS_FAULT_SYNC] = KVS_HEALTH_READ_ONLY,
	[KVS_FAULT_META] = KVS_HEALTH_READ_ONLY,  [KVS_FAULT_FILES] = KVS_HEALTH_READ_ONLY,
	[KVS_FAULT_READ] = KVS_HEALTH_OFF,
};

const char *kvs_health_name(kvs_health_t health)
{
	static const char *const names[] = {"ok", "full", "not_growing", "read_only", "off"};

	return names[health];
}

/* The active fault that stops most. KVS_FAULTS: none. */
static kvs_fault_t worst_fault(const kvs_nvme_t *nvme)
{
	kvs_fault_t found = KVS_FAULTS;

	for (kvs_fault_t i = 0; i < KVS_FAULTS; i++) {
		if (nvme->faults[i].active && (found == KVS_FAULTS || stops[i] > stops[found])) {
			found = i;
		}
	}

	return found;
}

static void update_health(kvs_nvme_t *nvme)
{
	kvs_health_t before = nvme->health;
	kvs_fault_t fault = worst_fault(nvme);

	nvme->health = fault == KVS_FAULTS ? KVS_HEALTH_OK : stops[fault];
	if (nvme->health == before) {
		return;
	}
	kv_metric_set(nvme->metrics, KV_M_DISK_STATE, nvme->health);
	kv_metric_set(nvme->metrics, KV_M_DISK_OFF, nvme->health == KVS_HEALTH_OFF);
	if (nvme->health == KVS_HEALTH_OK) {
		kv_logf(nvme->env, KV_LOG_INFO, "nvme", "the disk tier works again");
	} else {
		kv_logf(nvme->env, nvme->health == KVS_HEALTH_FULL ? KV_LOG_WARN : KV_LOG_ERROR, "nvme",
			"the disk tier is %s: %s; it is tried again", kvs_health_name(nvme->health),
			nvme->faults[fault].reason);
	}
}

void kvs_fault_raise(kvs_nvme_t *nvme, kvs_fault_t fault, const char *doing, const char *why)
{
	kvs_fault_state_t *f = &nvme->faults[fault];
	uint64_t now = kv_now_ns(nvme->env);
	uint64_t wait = f->wait_ns * 2u;

	f->wait_ns = wait < WAIT_MIN_NS ? WAIT_MIN_NS : wait > WAIT_MAX_NS ? WAIT_MAX_NS : wait;
	f->retry_ns = now + f->wait_ns;
	f->since_ns = f->active ? f->since_ns : now;
	f->active = 1;
	snprintf(f->reason, sizeof f->reason, "%s: %s", doing, why);
	kvs_commit_request(nvme);
	update_health(nvme);
}

void kvs_fault_clear(kvs_nvme_t *nvme, kvs_fault_t fault)
{
	if (nvme->faults[fault].active) {
		nvme->faults[fault].active = 0;
		update_health(nvme);
	}
}

void kvs_fault_reset(kvs_nvme_t *nvme, kvs_fault_t fault)
{
	kvs_fault_clear(nvme, fault);
	nvme->faults[fault].wait_ns = 0;
}

int kvs_fault_is_due(const kvs_nvme_t *nvme, kvs_fault_t fault, uint64_t now)
{
	return nvme->faults[fault].active && now >= nvme->faults[fault].retry_ns;
}

void kvs_nvme_state(kvs_tier_t *tier, kvs_tier_state_t *p_state)
{
	const kvs_nvme_t *nvme = kvs_nvme(tier);
	kvs_fault_t fault = worst_fault(nvme);

	*p_state = (kvs_tier_state_t){.health = nvme->health};
	if (fault != KVS_FAULTS) {
		p_state->since_ns = nvme->faults[fault].since_ns;
		p_state->retry_ns = nvme->faults[fault].retry_ns;
		memcpy(p_state->reason, nvme->faults[fault].reason, sizeof p_state->reason);
	}
}
