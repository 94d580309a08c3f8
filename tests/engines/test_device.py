"""The GPU tier under a real engine: answers, failed loads, kills. The device is a fake one, whose memory is host memory; everything else is what runs beside a GPU."""
from __future__ import annotations

import time
from typing import Any

from context import Context, Prompt, Store, must_equal, play
from harness import Answer, Engine, Failed, Missed
from promises import promise
from test_equal import Case, must_hit
from test_failed import Rig, fail_loads, faults
from test_killed import must_come_back
from test_pd import count

GPU, CPU = "gpu", "cpu"  # tiers in metrics
DEVICE = dict(device="fake-0")
MEMORY = {"gpu.devices": "fake-0", "gpu.size": "64MiB", "gpu.slab_size": "8MiB"}


def found(store: Store, tier: str) -> float:
    """Prompt tokens that requests found there, of those that have ended."""
    return store.stats()[f"kvd_prefix_hit_tokens_total{{tier={tier}}}"]


class InDevice(Rig):
    """All of a prompt, or its first half, is in the device's memory when its load fails; the rest is on disk."""

    options, extra = MEMORY, DEVICE

    def promote(self, prompts: list[Prompt]) -> None:
        """The second use saves blocks to the device."""
        expected = self.context.expected("gqa", prompts)
        for _ in range(2):
            self.engine.reset()
            self.ask("promoted", prompts, expected)
        self.engine.reset()

    def flip(self) -> None:
        self.promote(self.prompts)
        if not faults.flip_bits(self.daemon.pid, self.context.seed, "kvd-fake-gpu"):
            raise Failed("the daemon has no memory of a device")

    def restart(self) -> None:
        super().restart()
        self.promote([p[:len(p) // 2] for p in self.prompts])

    def fail(self, fault: str, what: str, prompts: list[Prompt], expected: list[Answer]) -> int:
        before = faults.counters(self.folder)["gpu_tokens"]
        failed = super().fail(fault, what, prompts, expected)
        if faults.counters(self.folder)["gpu_tokens"] <= before:
            raise Missed(f"{fault}, {what}: nothing was loaded from the device's memory")
        return failed


@promise(daemon=True, short=False)
def failed_synchronous_loads_from_a_device_are_computed_again(context: Context) -> None:
    """flipped bits in the device's memory; a lost lease, a deadline, a killed daemon in a load of two parts; synchronous loads"""
    fail_loads(context, "sync", InDevice)


@promise(daemon=True)
def failed_asynchronous_loads_from_a_device_are_computed_again(context: Context) -> None:
    """the same with asynchronous loads"""
    fail_loads(context, "async", InDevice)


def check_answers(context: Context, case: Case) -> None:
    context.oracle.prepare(case.model)
    store = context.store(**MEMORY)
    extra = case.extra | DEVICE
    engine = context.engine(case.model, store, extra=extra, **case.options())
    dialogue = context.dialogue(case.model, case.users, case.turns)
    for use in ("first", "second"):
        play(use, engine, dialogue, case.block)
        store.settle()
        engine.reset()
    shares = []
    for what in ("from the device", "after the engine was killed"):
        before = [found(store, tier) for tier in (GPU, CPU)]
        must_hit(what, play(what, engine, dialogue, case.block))
        device, host = (found(store, tier) - n for tier, n in zip((GPU, CPU), before))
        shares.append(device / max(1.0, device + host))
        if shares[-1] < 0.8:
            raise Missed(f"{what}: {device:.0f} tokens were found in the device's memory, {host:.0f} in the host's")
        store.settle()
        engine.kill()
        engine = context.engine(case.model, store, extra=extra, **case.options())
        engine.generate(context.prompts(2, 40, 60), 2, together=False)
    context.note(f"{len(dialogue)} requests, {shares[0]:.0%} and {shares[1]:.0%} of the hits from the device")
    engine.stop()
    store.must_be_clean("the engine has gone")


@promise(daemon=True)
def answers_from_a_device_are_equal(context: Context) -> None:
    """conversations whose blocks are in the device's memory; then a second engine's"""
    check_answers(context, Case())


@promise(daemon=True, short=False)
def answers_from_another_engine_s_device_are_equal(context: Context) -> None:
    """a second engine, with a device of its own, finds what the first one has used twice in the first one's device"""
    case = Case()
    context.oracle.prepare(case.model)
    store = context.store(**(MEMORY | {"gpu.devices": "fake-0,fake-1"}))
    dialogue = context.dialogue(case.model, case.users, case.turns)
    first, second = (context.engine(case.model, store, extra=case.extra | dict(device=device), **case.options()) for device in ("fake-0", "fake-1"))
    for use in ("first", "second"):
        play(use, first, dialogue, case.block)
        store.settle()
        first.reset()
    for _ in range(2):  # one that has reached the other device says so with the report of a step
        second.generate(context.prompts(2, 40, 60), 2, together=False)
    must_hit("from the other engine's device", play("from the other engine's device", second, dialogue, case.block))
    other, every = (count(second, name) for name in ("other_gpu_tokens", "load_tokens"))
    if other < 0.5 * every:
        raise Missed(f"{other} of {every} tokens came from the other engine's device")
    context.note(f"{other} of {every} tokens from the other engine's device")
    for engine in (first, second):
        engine.stop()
    store.must_be_clean("the engines have gone")


@promise(daemon=True, short=False)
def answers_from_a_device_are_equal_tensor_parallel(context: Context) -> None:
    """the same with two ranks that hold one KV head each"""
    check_answers(context, Case(mp=True, ranks=2, users=4))


@promise(daemon=True, short=False)
def kills_beside_a_device_cost_hits_only(context: Context) -> None:
    """kill -9 of the daemon, or of the engine, while blocks are loaded from the device's memory or saved there"""
    context.oracle.prepare("gqa")
    store = context.store(**MEMORY)
    assert store.daemon
    prompts = context.prompts(6, 400, 900)
    expected = context.expected("gqa", prompts)

    def start() -> Engine:
        return context.engine("gqa", store, faulty=True, extra=DEVICE, max_num_batched_tokens=256)

    def use(engine: Engine, what: str, **more: Any) -> None:
        must_equal(what, expected, engine.generate(prompts, **more))
        store.settle()
        engine.reset()

    engine = start()
    for kill in range(20):
        for what in ("first use", "second use"):
            use(engine, what)
        engine.call("faulty", "set_fault", fault="delay", value=20)  # leases are held meanwhile
        engine.submit([dict(ids=p, max_tokens=16) for p in prompts])
        time.sleep(context.random.uniform(0.0, 0.15))
        if kill % 4 == 3:
            engine.kill()
            store.must_be_clean("the engine was killed")
            engine = start()
            continue
        store.daemon.kill()
        time.sleep(context.random.uniform(0.0, 0.3))
        store.daemon.start()
        must_equal("the daemon was killed", expected, engine.collect())
        engine.call("faulty", "set_fault", fault="")
        must_come_back("the daemon was killed", engine, store, prompts, expected)
        engine.reset()
    context.note(f"20 kills, {found(store, GPU):.0f} tokens from the device since the last")
    engine.stop()
    store.must_be_clean("the engine has gone")
