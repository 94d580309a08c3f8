"""Looks into a single-process engine, from inside (harness.Engine.call)."""
from __future__ import annotations

from typing import Any


def preemptions(engine: Any) -> int:
    """How often a request was preempted since the start."""
    return counted["preemptions"]


def drafts(engine: Any) -> dict[str, int]:
    """Tokens that were drafted, and of these the accepted ones, since the start."""
    return {name: counted[name] for name in ("drafted", "accepted")}


counted = {"preemptions": 0, "drafted": 0, "accepted": 0}


def count_preemptions() -> None:
    """The scheduler says it in each step's output only."""
    from vllm.v1.core.sched.scheduler import Scheduler
    original = Scheduler._preempt_request

    def preempt(self: Any, *arguments: Any, **more: Any) -> Any:
        counted["preemptions"] += 1
        return original(self, *arguments, **more)
    Scheduler._preempt_request = preempt  # type: ignore[method-assign]


def count_drafts() -> None:
    """Speculative decoding: the scheduler counts only where its statistics are on."""
    from vllm.v1.core.sched.scheduler import Scheduler
    original = Scheduler.make_spec_decoding_stats

    def make(self: Any, *arguments: Any, **more: Any) -> Any:
        counted["drafted"] += more["num_draft_tokens"]
        counted["accepted"] += more["num_accepted_tokens"]
        return original(self, *arguments, **more)
    Scheduler.make_spec_decoding_stats = make  # type: ignore[method-assign]


def connector(engine: Any) -> dict[str, int]:
    """What the scheduling half has counted, without what is still zero."""
    from engine import core
    return {name: value for name, value in core(engine).scheduler.connector._c.stats().items() if value}
