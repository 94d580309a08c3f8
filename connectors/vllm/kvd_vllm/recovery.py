"""After a failed synchronous load vLLM rewinds the requests in place, which the tokens and steps already in flight survive in one mode only. Here they
are preempted instead, as reset_prefix_cache(reset_running_requests=True) does it. This replaces a method of vLLM's scheduler, so only where all the source that has
to do with it is known byte by byte. (Decision 019.)"""

from __future__ import annotations

import hashlib
import importlib.util
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SCHEDULER = "vllm.v1.core.sched.scheduler"
# What plans steps, what takes their outputs in, what shares blocks, and the state that both model runners keep of a request.
SOURCES = (
    SCHEDULER,
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.core.sched.request_queue",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.core.block_pool",
    "vllm.v1.request",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu_input_batch",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.states",
    "vllm.v1.worker.gpu.block_table",
)
KNOWN = frozenset(
    {
        "3a525faa62bb131e00c07f10c7ffe7ff2bc96e0eef01edb70c5ca8df77a227bd",  # 0.25.1
        "2c2efa3213fec4e129072a43a5109a356e7c0746ac287eeff598f7b1f0b8e13a",  # 0.26.0
    }
)


def digest(sources: Iterable[str] = SOURCES) -> str:
    """SHA-256 of these modules' files. Empty: one has none that can be read. Nothing is imported but the packages they lie in."""
    found = hashlib.sha256()
    for name in sources:
        try:
            spec = importlib.util.find_spec(name)
            text = Path(spec.origin).read_bytes() if spec and spec.origin else b""
        except (ImportError, OSError, ValueError):
            text = b""
        if not text:
            return ""
        found.update(hashlib.sha256(text).digest())
    return found.hexdigest()


def is_known() -> bool:
    return digest() in KNOWN


def install(scheduler_class: type) -> None:
    """For all schedulers of the process. A method that somebody else has put there is not replaced: ValueError."""
    method = scheduler_class._handle_invalid_blocks
    if getattr(method, "preempts", False):
        return
    if method.__module__ != SCHEDULER:
        raise ValueError(f"Scheduler._handle_invalid_blocks() is {method.__module__}'s")
    scheduler_class._handle_invalid_blocks = handler(method)


def handler(original: Callable[..., set[str]]) -> Callable[..., set[str]]:
    """A method in the place of the original one, which still fails requests where that is the policy."""

    def _handle_invalid_blocks(self: Any, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        if not self.recompute_kv_load_failures:
            return original(self, invalid_block_ids, num_scheduled_tokens)
        return recover(self, invalid_block_ids, num_scheduled_tokens)

    _handle_invalid_blocks.preempts = True  # type: ignore[attr-defined]
    return _handle_invalid_blocks


def first_bad(table: list[int], bad: set[int]) -> int:
    return next((place for place, block in enumerate(table) if block in bad), len(table))


def spread(tables: Iterable[list[int]], invalid: set[int], null: int) -> set[int]:
    """These blocks, and all that come after one of them in any table: computed from it, or named after it."""
    bad, before = set(invalid), -1
    while before != len(bad):
        before = len(bad)
        for table in tables:
            bad.update(table[first_bad(table, bad) :])
        bad.discard(null)
    return bad


def recover(scheduler: Any, invalid: set[int], scheduled: dict[str, int]) -> set[str]:
    """Called for the output of a step, before its tokens are taken in. Returns the requests whose output of this step must be skipped."""
    manager = scheduler.kv_cache_manager
    waiting = [*scheduler.waiting, *scheduler.skipped_waiting]
    tables = {request.request_id: manager.get_block_ids(request.request_id)[0] for request in (*scheduler.running, *waiting)}
    bad = spread(tables.values(), invalid, manager.block_pool.null_block.block_id)
    manager.evict_blocks(bad)

    hit = {name for name, table in tables.items() if first_bad(table, bad) < len(table)}
    for request in waiting:
        if request.request_id in hit:
            rewind(scheduler, request, first_bad(tables[request.request_id], bad) * scheduler.block_size)
    preempted = [request for request in scheduler.running if request.request_id in hit]
    scheduler.running = [request for request in scheduler.running if request.request_id not in hit]
    now = time.monotonic()
    for request in reversed(preempted):  # each goes to the head of the queue
        scheduler._preempt_request(request, now)
    # A request that was preempted since this step was planned no longer has a table that would tell.
    lost = [request for request in waiting if request.request_id in scheduled and not tables[request.request_id]]
    skipped = {request.request_id for request in (*preempted, *lost)}
    scheduler.prev_step_scheduled_req_ids -= skipped
    if not scheduler.scheduler_config.async_scheduling:
        return skipped
    for request in (*preempted, *lost):
        discard(request)
    return set()


def discard(request: Any) -> None:
    """All outputs in flight, this step's among them, were computed from garbage."""
    request.async_tokens_to_discard += request.num_output_placeholders
    request.num_output_placeholders = 0


def rewind(scheduler: Any, request: Any, good: int) -> None:
    """A request that is not running begins at its first bad block. While an asynchronous load is in progress, the engine reads `failed_recving...`."""
    request.num_computed_tokens = min(request.num_computed_tokens, good)
    if request.status.name == "WAITING_FOR_REMOTE_KVS":
        scheduler.failed_recving_kv_req_ids.add(request.request_id)
    elif request.num_computed_tokens == 0:
        scheduler.kv_cache_manager.free(request)
