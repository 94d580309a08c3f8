"""Connectors with a clock around each hook: where the time of a hit goes on the host. And one that only counts.

Every hook's beginning and length is appended to the file that BENCH_WATCH names when a request has finished, and what kvd counts; engine.py prints them next to the
request's own clock. Counted has all that its scheduler half counts in that file.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Callable

import faults
from kvd_vllm.connector import KvdConnector

HOOKS = (
    "on_new_request get_num_new_matched_tokens update_state_after_alloc build_connector_meta handle_preemptions bind_connector_metadata start_load_kv "
    "wait_for_layer_load wait_for_save get_finished get_block_ids_with_load_errors build_connector_worker_meta update_connector_output "
    "get_kv_connector_stats request_finished request_finished_all_groups"
).split()
LAST = HOOKS[-2:]
COUNTERS = "get_kv_connector_stats"

_events: list[tuple[str, int, int]] = []


def _timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter_ns()
        answer = hook(*args, **kwargs)
        _events.append((name, began, time.perf_counter_ns() - began))
        if name == COUNTERS and answer is not None:
            _events.extend((f"+{counter}", began, more) for counter, more in answer.data.items())
        if name in LAST:
            _write()
        return answer

    return call


def _write() -> None:
    with open(os.environ["BENCH_WATCH"], "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in _events)
    _events.clear()


def watch(connector: Any) -> None:
    for name in HOOKS:
        if hasattr(connector, name):
            setattr(connector, name, _timed(name, getattr(connector, name)))


class Watched(KvdConnector):
    """A half sets its hooks when it opens: the scheduler's at once, the worker's when the caches are registered."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self._half == "scheduler":
            self._watch()

    def _open_worker(self, kv_caches: dict[str, Any]) -> None:
        super()._open_worker(kv_caches)
        self._watch()

    def _watch(self) -> None:
        watch(self)


class Counted(KvdConnector):
    """The file is complete before the engine has the answer."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self._half == "scheduler":
            for name in LAST:
                setattr(self, name, self._counting(getattr(self, name)))

    def _counting(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        file = Path(os.environ["BENCH_WATCH"])

        def call(*args: Any) -> Any:
            if self._c is not None:
                faults.write(file.parent, file.name, json.dumps(self._c.stats()))
            return hook(*args)

        return call
