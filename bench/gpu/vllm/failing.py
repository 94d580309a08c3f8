"""kvd's connector with a fault at the next load (faults.py): the daemon is killed before the load is told to the ranks (lease) or, when it
has been told, while its disk hangs (kill); or the disk just hangs (deadline). FAULTS_FOLDER names the shared folder."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Callable

import faults
from kvd_vllm import compat, recovery
from kvd_vllm.connector import KvdConnector

NOTICED_S = 0.05  # in which a client sees that its daemon has died
_listed = compat.load_ways


def _tried(mode: compat.Mode, wanted: str, groups: int = 1) -> compat.LoadWays:
    ways = frozenset(os.environ["BENCH_WAYS"].split(","))
    return _listed(mode, wanted, groups, (compat.Survivor(mode, ways, "tried", recovery.is_known()),))


if "BENCH_WAYS" in os.environ:
    compat.load_ways = _tried


class Tried(KvdConnector):
    """With the ways to load that BENCH_WAYS names (with commas), whatever the table of survivors says: how an engine is tried before it has a row."""


class Failing(Tried):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(os.environ["FAULTS_FOLDER"])
        self._loading, self._written = False, ""
        if self._half == "scheduler":
            for hook, around in {"update_state_after_alloc": self._placed, "build_connector_meta": self._planned, "update_connector_output": self._reported}.items():
                setattr(self, hook, functools.partial(around, getattr(self, hook)))

    def _open_worker(self, kv_caches: dict[str, Any]) -> None:
        super()._open_worker(kv_caches)
        report = self.build_connector_worker_meta
        name = "worker" if self._space.world == 1 else f"worker{self._loaded.rank}"

        def reported() -> Any:
            self._write(name, self._c.stats())
            return report()

        self.build_connector_worker_meta = reported

    def _struck(self, fault: str) -> bool:
        """Whether this is what happens at the next load: now."""
        if faults.read(self._folder, "fault") != fault:
            return False
        (self._folder / "fault").unlink()
        if fault != faults.DEADLINE:
            os.kill(int(faults.read(self._folder, "pid")), signal.SIGKILL)
        return True

    def _placed(self, inner: Callable[..., Any], request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loading = True
            if self._struck(faults.LEASE):
                time.sleep(NOTICED_S)
        inner(request, blocks, num_external_tokens)

    def _planned(self, inner: Callable[..., Any], output: Any) -> Any:
        meta = inner(output)
        if self._loading:
            self._loading = False
            _ = self._struck(faults.KILL) or self._struck(faults.DEADLINE)
        self._write_counters()
        return meta

    def _reported(self, inner: Callable[..., Any], output: Any) -> None:
        inner(output)
        self._write_counters()

    def _write_counters(self) -> None:
        if self._c is not None:
            self._write("counters", {**self._c.stats(), "ready": int(self._c.is_ready())})

    def _write(self, name: str, found: dict[str, int]) -> None:
        text = json.dumps(found)
        if text != self._written:
            self._written = text
            faults.write(self._folder, name, text)
