"""What differs between vLLM 0.25.1 and 0.32, found by looking and not by version number. One row a difference; the line printed at start has them all."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


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


@dataclass(frozen=True)
class Row:
    """name; where to look and what to use: probe() gives the value that is used; note says what the values mean."""

    name: str
    probe: Callable[[], Any]
    note: str


def _tensors() -> str:
    fields = _fields("vllm.v1.kv_cache_interface", "KVCacheTensor")
    return "placed" if "layer_stride" in fields else "shared_by" if "shared_by" in fields else "unknown"


def _none_hash() -> str:
    if _has("vllm.v1.core.kv_cache_utils", "resolve_none_hash_seed"):
        return "resolved"
    return "environment" if _has("vllm.v1.core.kv_cache_utils", "init_none_hash") else "unknown"


def _publishable() -> bool:
    """An attribute of requests in some builds: hashes beyond it are of tokens not confirmed."""
    request = _has("vllm.v1.request", "Request")
    if request is None:
        return False
    if hasattr(request, "num_publishable_block_hashes"):
        return True
    return "num_publishable_block_hashes" in inspect.getsource(request)


def _sync_loads() -> bool:
    return "has_sync_kv_loads" in _fields("vllm.v1.core.sched.output", "SchedulerOutput")


# What a step may ask of a rank in 0.25.1 and 0.32. What is written before the forward, and where, is known for these; C looks at the two that write blocks.
STEP = frozenset(
    """scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens scheduled_encoder_inputs
    scheduled_encoder_input_stats num_common_prefix_blocks finished_req_ids free_encoder_mm_hashes preempted_req_ids has_structured_output_requests
    pending_structured_output_tokens num_invalid_spec_tokens kv_connector_metadata has_sync_kv_loads aux_output_connector_metadata ec_connector_metadata
    ec_manager_metadata new_block_ids_to_zero kv_cache_block_copies kv_connector_block_state num_spec_tokens_to_schedule""".split()
)


def _known_steps() -> bool:
    fields = _fields("vllm.v1.core.sched.output", "SchedulerOutput")
    return bool(fields) and fields <= STEP


def _eager_modes() -> tuple[Any, ...]:
    """Modes of CUDA graphs in which attention runs from Python, so that each layer is waited for; none if a forward context does not tell."""
    if not {"attn_metadata", "cudagraph_runtime_mode", "ubatch_slices"} <= _fields("vllm.forward_context", "ForwardContext"):
        return ()
    modes = _has("vllm.config", "CUDAGraphMode")
    return tuple(getattr(modes, name) for name in ("NONE", "PIECEWISE") if hasattr(modes, name))


ROWS: tuple[Row, ...] = (
    Row("version", lambda: getattr(_module("vllm"), "__version__", "unknown"), "named in page formats that may change with it"),
    Row("results", lambda: _has(BASE, "KVConnectorTransferResults"), "0.30: get_transfer_results() asks for sent, received and failed at once; before: get_finished()"),
    Row("failed_recving", lambda: "failed_recving" in _fields(BASE, "KVConnectorTransferResults"), "0.30: a whole load can fail, so several KV groups can be served"),
    Row("sync_loads", _sync_loads, "0.30: start_load_kv() comes after the forward in steps without a synchronous load; before: always ahead of it"),
    Row("known_steps", _known_steps, "a step asks for nothing that is not known here, so its loads may begin before the engine prepares it"),
    Row("eager_modes", _eager_modes, "what a forward context calls a step whose layers can be waited for one by one"),
    Row("hit_sources", lambda: _has("vllm.v1.metrics.cache_hit_source", "CacheHitSource"), "0.32: hits are labelled host or disk"),
    Row("cross_layers", lambda: _has(BASE, "KVConnectorBase_V1.register_cross_layers_kv_cache") is not None, "0.25.1: one tensor for all layers may be registered"),
    Row("cache_tensors", _tensors, "0.30: KVCacheTensor gives layer and block strides; 0.25.1: who shares it"),
    Row("none_hash", _none_hash, "0.30: without PYTHONHASHSEED a fixed seed is used; before: a random one"),
    Row("hash_sizes", lambda: _has("vllm.v1.core.kv_cache_utils", "resolve_kv_cache_block_sizes"), "tokens a block hash covers; else computed from the groups"),
    Row("publishable", _publishable, "requests say how many of their hashes are confirmed"),
    Row("cpu_isa", lambda: _has("vllm.v1.attention.backends.cpu_attn", "_get_attn_isa"), "how the CPU backend packs a page"),
    Row("bind_manager", lambda: _has(BASE, "KVConnectorBase_V1.bind_kv_cache_manager") is not None, "0.30: the cache manager is shown; before: the block pool (neither is needed)"),
)


class Compat:
    """The table with its values for the vLLM that is there."""

    def __init__(self, rows: tuple[Row, ...] = ROWS) -> None:
        self.values: dict[str, Any] = {}
        for row in rows:
            try:
                self.values[row.name] = row.probe()
            except Exception as error:  # a probe that fails has found nothing
                self.values[row.name] = None
                self.values[row.name + "_error"] = repr(error)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def line(self) -> str:
        """One line for the log."""

        def short(value: Any) -> str:
            if value is None or value is False:
                return "no"
            return value if isinstance(value, str) else "yes"

        return " ".join(f"{row.name}={short(self.values[row.name])}" for row in ROWS)


_found: Compat | None = None


def probe() -> Compat:
    """Looked up once a process."""
    global _found
    if _found is None:
        _found = Compat()
    return _found
