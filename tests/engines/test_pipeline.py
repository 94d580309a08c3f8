"""Engines whose layers are computed by several ranks, one after another: each saves and loads its layers of a block."""
from __future__ import annotations

import json
import mmap
import os
import random
import time
from typing import Any

from context import Context, Store, must_equal
from harness import Engine, Failed
from promises import promise
from test_equal import Case, check
from test_failed import Rig, faults
from test_killed import disk, must_come_back
from test_pd import NODES_WAIT_MS, count, decodes, must_come, prefills, together

LAYER_BYTES = 16384  # of a block of the model "gqa", which has four


def in_stages(stages: int, layers: str = "") -> dict[str, Any]:
    """Options of an engine with this number of pipeline stages, a core each. layers: of each stage, with commas; empty: vLLM's own choice.

    vLLM 0.32 makes the buffer between its stages in a dry run, which its CPU worker leaves out where nothing is compiled: without it the first step fails
    with an AssertionError. Backend "eager" compiles nothing either, but has the dry run."""
    cores = "|".join(str(i % (os.cpu_count() or 1)) for i in range(stages))
    environment = dict(VLLM_CPU_OMP_THREADS_BIND=cores) | (dict(VLLM_PP_LAYER_PARTITION=layers) if layers else {})
    return dict(pipeline_parallel_size=stages, enforce_eager=False, compilation_config=dict(mode=2, backend="eager"), environment=environment)


def restart(store: Store, engine: Engine) -> None:
    """What was stored is on disk alone."""
    store.settle()
    engine.stop()
    store.must_be_clean("the engine has gone")
    time.sleep(0.3)  # written behind
    assert store.daemon
    store.daemon.stop()
    store.daemon.start()


@promise(short=False)
def answers_are_equal_pipeline_parallel(context: Context) -> None:
    """GQA, two stages of two layers each"""
    check(context, Case(mp=True, users=4 if context.short else 12, more=in_stages(2)))


@promise(short=False)
def answers_are_equal_pipeline_parallel_windows(context: Context) -> None:
    """full and sliding-window layers in turn, half of each in each of two stages"""
    check(context, Case("hybrid", chunk=1024, users=4, turns=3, more=in_stages(2)))


@promise(daemon=True, short=False)
def any_number_of_stages_shares_one_store(context: Context) -> None:
    """one stage, then one and three layers in two, then one again; engine and daemon are restarted in between"""
    context.oracle.prepare("gqa")
    store = context.store(**disk(context))
    old, new = context.prompts(3, 300, 700), context.prompts(3, 300, 700)
    answers = context.expected("gqa", old), context.expected("gqa", new)
    context.oracle.stop()
    engine = context.engine("gqa", store)
    must_equal("cold", answers[0], engine.generate(old))
    restart(store, engine)
    engine = context.engine("gqa", store, **in_stages(2, "1,3"))
    must_come_back("two stages after one", engine, store, old, answers[0])
    must_equal("cold, in two stages", answers[1], engine.generate(new))
    restart(store, engine)
    engine = context.engine("gqa", store)
    must_come_back("one stage after two", engine, store, new, answers[1])
    engine.stop()
    store.must_be_clean("the engine has gone")


@promise(daemon=True, short=False)
def one_stage_and_two_hand_prompts_over_to_each_other(context: Context) -> None:
    """prefill in two stages and decode in one, then the other way round; one after the other, and both at once"""
    context.oracle.prepare("gqa")
    store = context.store()
    prompts = [context.prompts(2, 500, 900) for _ in range(4)]
    expected = [context.expected("gqa", some) for some in prompts]
    context.oracle.stop()
    one, two = (context.bench.start_engine("gqa", store.connector(handover_ms=NODES_WAIT_MS), max_num_batched_tokens=256, **more) for more in ({}, in_stages(2)))
    for engine in (one, two):
        engine.wait_started()
        engine.generate(context.prompts(1, 100, 200), max_tokens=1)  # its spaces are open afterwards
    for i, (what, p, d) in enumerate((("two stages to one", two, one), ("one stage to two", one, two))):
        loaded = count(d, "load_tokens")
        handed = [answer.params or {} for answer in p.run(prefills(prompts[2 * i]))]
        must_equal(what, expected[2 * i], d.run(decodes(prompts[2 * i], handed)))
        must_come(what, d, loaded, prompts[2 * i], tails=False)
        loaded, ids = count(d, "load_tokens"), [f"{what} {n}" for n in range(2)]
        d.submit(decodes(prompts[2 * i + 1], together(ids)))
        p.run(prefills(prompts[2 * i + 1], ids))
        must_equal(f"{what}, both at once", expected[2 * i + 1], d.collect())
        must_come(f"{what}, both at once", d, loaded, prompts[2 * i + 1])
    store.settle()
    one.stop()
    two.stop()
    store.must_be_clean("both engines have gone")


class Staged(Rig):
    """Of two stages."""

    def flip_stage(self, stage: int) -> None:
        """A bit of the second layer of a stage in every block. All blocks are in the daemon's memory before."""
        self.engine.reset()
        self.ask("before the fault", self.prompts, self.expected)
        drawn, places = random.Random(f"{self.context.seed} {stage}"), 0
        for path in {os.stat(path).st_ino: path for path in self.daemon.memory_files("slab")}.values():
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                for at in range((2 * stage + 1) * LAYER_BYTES, len(memory), 4 * LAYER_BYTES):
                    memory[at + drawn.randrange(LAYER_BYTES)] ^= 1 << drawn.randrange(8)
                    places += 1
        if not places:
            raise Failed("the daemon has no memory")
        self.engine.reset()

    def ranks(self) -> list[dict[str, int]]:
        """Counters of each."""
        return [json.loads(faults.read(self.folder, f"worker{rank}") or "{}") for rank in (0, 1)]


@promise(daemon=True, short=False)
def a_load_that_fails_in_one_stage_is_computed_again(context: Context) -> None:
    """flipped bits in the layers of one of two stages; then the faults of other engines"""
    context.oracle.prepare("gqa")
    rig = Staged(context, "async", **in_stages(2))
    for stage in (0, 1):
        rig.flip_stage(stage)
        before = rig.ranks()
        failed = rig.fail(faults.FLIPS, f"stage {stage}", rig.prompts, rig.expected)
        more = [{name: n - was.get(name, 0) for name, n in after.items() if n != was.get(name, 0)} for after, was in zip(rig.ranks(), before)]
        if not more[stage].get("load_corrupt") or more[1 - stage].get("load_corrupt"):
            raise Failed(f"stage {stage}: counters of the stages {more}")
        context.note(f"stage {stage}: {failed} loads failed")
        rig.store.settle()
    for fault in (faults.LEASE, faults.DEADLINE, faults.KILL):
        context.note(f"{fault}: {rig.fail(fault, 'in two stages', rig.prompts, rig.expected)} loads failed")
    rig.engine.stop()
    rig.store.must_be_clean("the engine has gone")
