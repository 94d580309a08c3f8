"""What differs between vLLM 0.25.1 and 0.32, found by looking and not by version number; the line logged at start has it all. And which ways to load an engine survives."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvd_vllm import recovery

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
OUTPUT = "vllm.v1.core.sched.output"
HASHES = "vllm.v1.core.kv_cache_utils"


def _module(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError:
        return None


def _has(path: str, name: str) -> Any:
    """Attribute `name` ("Class.method" as well) of a module, or None."""
    found = _module(path)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _fields(path: str, name: str) -> set[str]:
    return set(getattr(_has(path, name), "__dataclass_fields__", ()))


def _tensors() -> str:
    fields = _fields("vllm.v1.kv_cache_interface", "KVCacheTensor")
    return "placed" if "layer_stride" in fields else "shared_by" if "shared_by" in fields else "unknown"


def _none_hash() -> str:
    if _has(HASHES, "resolve_none_hash_seed"):
        return "resolved"
    return "environment" if _has(HASHES, "init_none_hash") else "unknown"


def none_hash() -> bytes | None:
    """The hash that the engine's block hashes start from, once it has one."""
    return _has(HASHES, "NONE_HASH")


def _publishable() -> bool:
    """An attribute of requests in some builds: how many of their hashes are of confirmed tokens."""
    request = _has("vllm.v1.request", "Request")
    return request is not None and (hasattr(request, "num_publishable_block_hashes") or "num_publishable_block_hashes" in inspect.getsource(request))


# What a step may ask of a rank in 0.25 to 0.33. What is written before the forward, and where, is known for these; C looks at the two that write blocks.
STEP = frozenset(
    """scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens scheduled_encoder_inputs
    scheduled_encoder_input_stats num_common_prefix_blocks finished_req_ids free_encoder_mm_hashes preempted_req_ids has_structured_output_requests
    pending_structured_output_tokens num_invalid_spec_tokens kv_connector_metadata has_sync_kv_loads aux_output_connector_metadata ec_connector_metadata
    ec_manager_metadata new_block_ids_to_zero kv_cache_block_copies kv_connector_block_state num_spec_tokens_to_schedule encoder_input_updates skip_drafts""".split()
)


def _eager_modes() -> tuple[Any, ...]:
    """Modes of CUDA graphs in which attention runs from Python, so that each layer is waited for; none if a forward context does not tell."""
    if not {"attn_metadata", "cudagraph_runtime_mode", "ubatch_slices"} <= _fields("vllm.forward_context", "ForwardContext"):
        return ()
    modes = _has("vllm.config", "CUDAGraphMode")
    return tuple(getattr(modes, name) for name in ("NONE", "PIECEWISE") if hasattr(modes, name))


# A row a difference: its name in the log, and what finds the value that is used.
ROWS: dict[str, Callable[[], Any]] = {
    "version": lambda: getattr(_module("vllm"), "__version__", "unknown"),  # named in page formats that may change with it
    # 0.30: get_transfer_results() asks for sent, received and failed at once; before: get_finished().
    "results": lambda: _has(BASE, "KVConnectorTransferResults"),
    # 0.30: a whole load can fail, so several KV groups can be served.
    "failed_recving": lambda: "failed_recving" in _fields(BASE, "KVConnectorTransferResults"),
    "recovers_groups": recovery.knows_groups,  # the same by kvd's own recovery
    # 0.30: start_load_kv() comes after the forward in steps without a synchronous load; before: always ahead of it.
    "sync_loads": lambda: "has_sync_kv_loads" in _fields(OUTPUT, "SchedulerOutput"),
    "known_steps": lambda: bool(fields := _fields(OUTPUT, "SchedulerOutput")) and fields <= STEP,  # loads of such a step may begin before the engine prepares it
    "eager_modes": _eager_modes,
    "hit_sources": lambda: _has("vllm.v1.metrics.cache_hit_source", "CacheHitSource"),  # 0.32: hits are labelled host or disk
    "cross_layers": lambda: _has(BASE, "KVConnectorBase_V1.register_cross_layers_kv_cache") is not None,  # 0.25.1: one tensor for all layers may be registered
    "cache_tensors": _tensors,  # 0.30: KVCacheTensor gives layer and block strides; 0.25.1: who shares it
    "none_hash": _none_hash,  # 0.30: without PYTHONHASHSEED a fixed seed is used; before: a random one
    "hash_sizes": lambda: _has(HASHES, "resolve_kv_cache_block_sizes"),  # tokens a block hash covers; else computed from the groups
    "publishable": _publishable,
    "cpu_isa": lambda: _has("vllm.v1.attention.backends.cpu_attn", "_get_attn_isa"),  # how the CPU backend packs a page
    "regroup": lambda: _has("vllm.v1.core.kv_cache_utils", "get_kv_cache_groups"),  # to 0.32: the layers of all pipeline stages are grouped as the engine does
    "conv_layout": lambda: _has("vllm.model_executor.layers.mamba.mamba_utils", "get_conv_state_layout"),  # the order inside the convolution's state
    "bind_manager": lambda: _has(BASE, "KVConnectorBase_V1.bind_kv_cache_manager") is not None,  # 0.30: the cache manager is given; before: the block pool
}


@functools.cache
def probe() -> dict[str, Any]:
    """The values for the vLLM that is there. A probe that fails has found nothing."""
    values: dict[str, Any] = {}
    for name, find in ROWS.items():
        values[name] = None
        with contextlib.suppress(Exception):
            values[name] = find()
    return values


def line(values: dict[str, Any]) -> str:
    """For the log."""

    def short(value: Any) -> str:
        if value is None or value is False:
            return "no"
        return value if isinstance(value, str) else "yes"

    return " ".join(f"{name}={short(value)}" for name, value in values.items())


@dataclass(frozen=True)
class Mode:
    """What the recovery from a failed load depends on."""

    version: str
    device: str
    runner: str  # V1, V2 or unknown
    scheduling: str  # synchronous, asynchronous or unknown
    drafts: bool  # speculative decoding
    ranks: int = 1  # of tensor and pipeline parallelism

    def text(self) -> str:
        more = (", speculative decoding" if self.drafts else "") + (f", {self.ranks or 'an unknown number of'} ranks" if self.ranks != 1 else "")
        return f"vLLM {self.version} on {self.device}, model runner {self.runner}, {self.scheduling} scheduling{more}"


def mode_of(vllm_config: Any, version: str) -> Mode:
    """The scheduling is unknown with the user's own scheduler class, and of models that answer without tokens; unknown is also what the configuration lacks."""
    scheduler = getattr(vllm_config, "scheduler_config", None)
    generates = getattr(getattr(vllm_config, "model_config", None), "runner_type", None) == "generate"
    listed = getattr(scheduler, "scheduler_cls", None) is None and generates
    asynchronous = getattr(scheduler, "async_scheduling", None) if listed else None
    return Mode(
        version.partition("+")[0],
        str(vllm_config.device_config.device_type),
        {True: "V2", False: "V1"}.get(getattr(vllm_config, "use_v2_model_runner", None), "unknown"),
        {True: "asynchronous", False: "synchronous"}.get(asynchronous, "unknown"),
        getattr(vllm_config, "speculative_config", None) is not None,
        getattr(getattr(vllm_config, "parallel_config", None), "world_size", 0),
    )


WAYS = {
    "sync": "a step waits for its loads",
    "layers": "each layer of a step waits for its part of the loads",
    "prefetch": "the loads of a step begin when it is planned",
}


@dataclass(frozen=True)
class Survivor:
    """An engine that answers right after a failed load of these ways, and the test that proves it. preempts: once recovery.py has replaced its own recovery. (Decision 019.)"""

    mode: Mode
    ways: frozenset[str]
    proof: str
    preempts: bool = False


def _preempts(version: str, runner: str, scheduling: str, check: str) -> Survivor:
    return Survivor(Mode(version, "cuda", runner, scheduling, False), frozenset(WAYS), f"bench/gpu/vllm: {check}-sync", preempts=True)


SURVIVORS: tuple[Survivor, ...] = (
    _preempts("0.25.1", "V2", "asynchronous", "failed-v2-graph"),
    _preempts("0.25.1", "V2", "synchronous", "failed-v2-plain-graph"),
    _preempts("0.25.1", "V1", "asynchronous", "failed-v1-graph"),
    _preempts("0.25.1", "V1", "synchronous", "failed-v1-plain-graph"),
    _preempts("0.26.0", "V2", "asynchronous", "failed-v2-graph"),
    _preempts("0.26.0", "V2", "synchronous", "failed-v2-plain-graph"),
    Survivor(Mode("0.32.0", "cpu", "V1", "synchronous", False), frozenset({"sync"}), "tests/engines: failed_synchronous_loads_are_computed_again"),
)


@dataclass(frozen=True)
class LoadWays:
    """The ways that kvd uses in this engine in addition to asynchronous loads, and a sentence for the log. refused: the user has asked for sync; preempts: as in its row."""

    ways: frozenset[str]
    sentence: str
    refused: bool
    preempts: bool = False


def only_async(groups: list[Any]) -> str:
    """Why loads of such a cache (identity.Group) are asynchronous in every engine; empty: they need not be."""
    if any(group.state for group in groups):
        return "the engine copies states before a step's loads begin"
    return f"there are {len(groups)} KV groups" if len(groups) > 1 else ""


def untried_groups(mode: Mode) -> str:
    """Why several KV groups are declined where only recovery.py takes a failed load of them back; empty: they are not."""
    return "" if mode.ranks == 1 and not mode.drafts else f"a failed load of several KV cache groups was not tried in {mode.text()}"


def load_ways(mode: Mode, wanted: str, why_not: str = "", survivors: tuple[Survivor, ...] = SURVIVORS) -> LoadWays:
    """wanted: option `mode`; why_not: of the KV cache, see only_async(). An engine that is in no row gets asynchronous loads only."""
    row = next((row for row in survivors if row.mode == mode), None)
    if wanted == "async":
        return LoadWays(frozenset(), "loads are asynchronous: mode=async", False)
    known = row is not None and (not row.preempts or recovery.is_known())
    if row is not None and known and not why_not:
        how = " by preemption" if row.preempts else ""
        return LoadWays(row.ways, f"synchronous loads are used ({', '.join(sorted(row.ways))}): {mode.text()} survives a failed one{how} ({row.proof})", False, row.preempts)
    why = f"{mode.text()} is not known to survive a failed synchronous load" if row is None else why_not if known else f"the source of this {mode.text()} is not the one whose recovery is known"
    return LoadWays(frozenset(), f"loads are asynchronous{', mode=sync is refused' if wanted == 'sync' else ''}: {why}", wanted == "sync")
