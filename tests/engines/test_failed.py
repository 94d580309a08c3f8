"""Loads that fail, in each way to load: the answer is that of an engine without a cache, the failure was counted, the engine goes on."""
from __future__ import annotations

import os
import sys
import time
from typing import Any

from context import Context, Prompt, Store, must_equal
from harness import HERE, ROOT, Answer, Engine, Failed, Missed, wait_for
from promises import promise
from test_killed import disk

BENCH = ROOT / "bench" / "gpu" / "vllm"
sys.path.append(str(BENCH))
import faults  # noqa: E402

LOAD_MS = 500


class Rig:
    """An engine whose loads fail (bench/gpu/vllm/failing.py), a store on disk, prompts and what an engine without a cache answers. Prompts 0 and 4 are
    asked alone."""

    model = "gqa"
    lengths = (620, 470, 550, 700, 700, 300, 600, 900)  # of prompts, the first four share 400 tokens
    company = True  # prompts are asked together, too
    options: dict[str, str] = {}  # of the daemon
    extra: dict[str, Any] = {}  # of the connector

    def __init__(self, context: Context, mode: str, **options: Any) -> None:
        self.context, self.folder = context, context.bench.folder("faults")
        self.store = context.store(**disk(context), **{"nvme.io_engine": "threads"}, **self.options)
        assert self.store.daemon
        self.daemon = self.store.daemon
        self.daemon.environment = faults.hanging_disk(self.folder)
        shared = context.prompt(400)
        self.prompts = [shared + context.prompt(n - 400) for n in self.lengths[:4]] + [context.prompt(n) for n in self.lengths[4:]]
        self.expected = context.expected(self.model, self.prompts)
        connector = self.store.connector(mode=mode, load_ms=LOAD_MS, wait_us=100000, **self.extra) | dict(kv_connector="Failing", kv_connector_module_path="failing")
        environment = options.pop("environment", {}) | dict(FAULTS_FOLDER=str(self.folder), PYTHONPATH=os.pathsep.join(filter(None, [str(HERE), str(BENCH), os.environ.get("PYTHONPATH")])))
        self.engine = context.bench.engine(self.model, connector, environment=environment, **options)
        self.attach(0)
        self.ask("cold", self.prompts, self.expected)

    def ask(self, what: str, prompts: list[Prompt], expected: list[Answer]) -> None:
        must_equal(what, expected, self.engine.generate(prompts, together=self.company))
        self.store.settle()

    def attach(self, before: int) -> None:
        def attached() -> bool:
            self.engine.generate(self.context.prompts(1, 40, 40), 2)
            return faults.attached(self.folder, before)
        wait_for("the connector to attach", 20, attached, 0.1)

    def start_daemon(self) -> None:
        """Comes back when the connector is attached to it."""
        before = faults.counters(self.folder).get("attaches", 0)
        self.daemon.start()
        self.attach(before)

    def flip(self) -> None:
        """Every block that is in the daemon's memory is bad: one on disk is good."""
        if not faults.flip_bits(self.daemon.pid, self.context.seed):
            raise Failed("the daemon has no memory")
        self.engine.reset()

    def restart(self) -> None:
        """Everything is on disk only: a load takes a moment."""
        time.sleep(0.3)  # written behind
        self.daemon.stop()
        self.start_daemon()
        self.engine.reset()

    def repair(self, fault: str) -> None:
        if not faults.disarm(self.folder):
            raise Missed(f"{fault}: there was no load")
        if fault in (faults.LEASE, faults.KILL):
            self.daemon.kill()
            self.start_daemon()

    def fail(self, fault: str, what: str, prompts: list[Prompt], expected: list[Answer]) -> int:
        if fault != faults.FLIPS:
            self.restart()
            faults.arm(self.folder, fault, self.daemon.pid)
        before = faults.counters(self.folder)
        self.engine.submit([dict(ids=p, max_tokens=16) for p in prompts])
        answers = self.engine.collect(30)
        must_equal(f"{fault}, {what}", expected, answers)
        self.repair(fault)
        self.engine.generate(self.context.prompts(1, 40, 40), 2)
        after = faults.counters(self.folder)
        failed = after["loads_failed"] - before["loads_failed"]
        if not failed:
            raise Missed(f"{fault}, {what}: no load has failed: { {name: n - before[name] for name, n in after.items() if n != before[name]} }")
        return failed


def fail_loads(context: Context, mode: str, kind: type[Rig] = Rig, **options: Any) -> None:
    context.oracle.prepare(kind.model)
    rig = kind(context, mode, **options)
    rig.flip()
    for fault in faults.FAULTS:
        repeated = fault != faults.FLIPS and not context.short
        alone = sum(rig.fail(fault, "alone", [rig.prompts[i]], [rig.expected[i]]) for i in (range(8) if repeated else (0, 4)))
        together = sum(rig.fail(fault, "among 8", rig.prompts, rig.expected) for _ in range((3 if repeated else 1) * rig.company))
        context.note(f"{fault}: {alone} loads failed alone, {together} among 8")
    counters = faults.counters(rig.folder)
    beside = counters["loads_async"]
    if mode == "async" and beside != counters["loads"] or mode == "sync" and beside:
        raise Failed(f"{beside} of {counters['loads']} loads were asynchronous, mode={mode}")
    rig.engine.stop()
    rig.store.must_be_clean("the engine has gone")


@promise(daemon=True)
def failed_synchronous_loads_are_computed_again(context: Context) -> None:
    """flipped bits, a lost lease, a deadline, a killed daemon; alone and among 8 that share prefixes; synchronous loads"""
    fail_loads(context, "sync")


@promise(daemon=True)
def failed_asynchronous_loads_are_computed_again(context: Context) -> None:
    """the same with asynchronous loads"""
    fail_loads(context, "async")


@promise(daemon=True)
def failed_loads_wake_an_idle_engine(context: Context) -> None:
    """the same in an engine of several processes, which nobody but the failed load keeps awake"""
    fail_loads(context, "async", mp=True)
