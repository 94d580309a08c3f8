"""After a failed synchronous load vLLM rewinds the requests in place, which the tokens and steps already in flight survive in one mode only. Here they
are preempted instead, as reset_prefix_cache(reset_running_requests=True) does it. Before 0.30 vLLM's own method raises where a request has blocks in several
KV groups; this one takes such a request back whole. It replaces a method of vLLM's scheduler, so only where all the source that has to do with it is known byte
by byte. (Decision 019.)"""

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
SEVERAL_GROUPS = frozenset({"2c2efa3213fec4e129072a43a5109a356e7c0746ac287eeff598f7b1f0b8e13a"})  # 0.26.0
KNOWN = SEVERAL_GROUPS | {"3a525faa62bb131e00c07f10c7ffe7ff2bc96e0eef01edb70c5ca8df77a227bd"}  # 0.25.1


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


def knows_groups() -> bool:
    """Whether a failed asynchronous load of several KV groups is recovered, once this is installed."""
    return digest() in SEVERAL_GROUPS


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


Tables = tuple[list[int], ...]  # a request's, of each group


def first_bad_token(tables: Tables, sizes: list[int], bad: set[int]) -> int | None:
    """Where the first bad block begins. sizes: tokens of a block of each group."""
    starts = [place * size for table, size in zip(tables, sizes) if (place := first_bad(table, bad)) < len(table)]
    return min(starts, default=None)


def spread(requests: Iterable[Tables], sizes: list[int], invalid: set[int], null: int) -> set[int]:
    """These blocks, and all of a request that hold tokens after one of them: computed from it, or named after it."""
    bad, before = set(invalid), -1
    while before != len(bad):
        before = len(bad)
        for tables in requests:
            token = first_bad_token(tables, sizes, bad)
            if token is not None:
                bad.update(block for table, size in zip(tables, sizes) for block in table[token // size :])
        bad.discard(null)
    return bad


def recover(scheduler: Any, invalid: set[int], scheduled: dict[str, int]) -> set[str]:
    """Called for the output of a step, before its tokens are taken in. Returns the requests whose output of this step must be skipped."""
    manager = scheduler.kv_cache_manager
    waiting = [*scheduler.waiting, *scheduler.skipped_waiting]
    tables = {request.request_id: manager.get_block_ids(request.request_id) for request in (*scheduler.running, *waiting)}
    sizes = [group.block_size for group in manager.coordinator.single_type_managers]
    bad = spread(tables.values(), sizes, invalid, manager.block_pool.null_block.block_id)
    manager.evict_blocks(bad)

    hit = {name: token for name, own in tables.items() if (token := first_bad_token(own, sizes, bad)) is not None}
    for request in waiting:
        if request.request_id in hit:
            rewind(scheduler, request, hit[request.request_id] if len(sizes) == 1 else 0)  # of a window only the end has been loaded
    preempted = [request for request in scheduler.running if request.request_id in hit]
    scheduler.running = [request for request in scheduler.running if request.request_id not in hit]
    now = time.monotonic()
    for request in reversed(preempted):  # each goes to the head of the queue
        scheduler._preempt_request(request, now)
    # A request that was preempted since this step was planned no longer has a table that would tell.
    lost = [request for request in waiting if request.request_id in scheduled and not any(tables[request.request_id])]
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
    """A request that is not running begins after that many tokens. While an asynchronous load is in progress, the engine reads `failed_recving...`."""
    request.num_computed_tokens = min(request.num_computed_tokens, good)
    if request.status.name == "WAITING_FOR_REMOTE_KVS":
        scheduler.failed_recving_kv_req_ids.add(request.request_id)
    elif request.num_computed_tokens == 0:
        scheduler.kv_cache_manager.free(request)
