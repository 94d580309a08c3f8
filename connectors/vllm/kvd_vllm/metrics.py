"""Counters of both halves in vLLM's log and /metrics. Names and help come from the tables of the C interface (kvx_scheduler.h, kvx_worker.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvd_vllm import _kvd
from kvd_vllm.compat import WAYS

GAUGES: dict[str, str] = {f"load_way_{way}": f"1: {text}; 0: not used in this engine" for way, text in WAYS.items()}
TABLE: dict[str, str] = dict(_kvd.stats_table())
LOGGED = ("scheduler_matches", "scheduler_match_hits", "scheduler_miss_tokens_daemon_stale", "scheduler_miss_tokens_no_daemon", "scheduler_miss_tokens_late", "scheduler_miss_tokens_weights_pending", "scheduler_load_tokens", "scheduler_gpu_tokens", "scheduler_disk_tokens", "scheduler_loads_failed", "scheduler_save_done", "worker_load_bytes", "worker_save_bytes")


@dataclass
class KvdStats(KVConnectorStats):
    """Increments since the last time; crosses processes as its dict."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: self.data[name] for name in LOGGED if self.data.get(name)}

    def is_empty(self) -> bool:
        return not self.data


def prometheus_name(name: str) -> tuple[str, str, float]:
    """Name, help and factor: times are in seconds there."""
    text = TABLE[name]
    if name.endswith("_ns"):
        return f"kvd:{name[:-3]}_seconds", text.replace("nanoseconds", "seconds"), 1e-9
    return f"kvd:{name}", text, 1


class KvdPromMetrics(KVConnectorPromMetrics):
    """One counter a row of the tables, one gauge a way to load."""

    def __init__(self, vllm_config: Any, metric_types: dict, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self.counters: dict[str, tuple[float, dict[int, Counter]]] = {}
        for name in TABLE:
            prometheus, text, factor = prometheus_name(name)
            counter = self._counter_cls(name=prometheus, documentation=f"kvd connector: {text}.", labelnames=labelnames)
            self.counters[name] = (factor, {engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()})
        self.gauges: dict[str, dict[int, Gauge]] = {}
        for name, text in GAUGES.items():
            gauge = self._gauge_cls(name=f"kvd:{name}", documentation=f"kvd connector: {text}.", labelnames=labelnames, multiprocess_mode="mostrecent")
            self.gauges[name] = {engine: gauge.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self.gauges and engine_idx in self.gauges[name]:
                self.gauges[name][engine_idx].set(value)
            factor, engines = self.counters.get(name, (1, {}))
            if engine_idx in engines:
                engines[engine_idx].inc(value * factor)
