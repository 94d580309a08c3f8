"""Who may share a block: the space's identity and its block layout, from vllm_config and kv_cache_config alone, so that both halves compute the same."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass, field
from typing import Any

from kvd_vllm import weights
from kvd_vllm.compat import Compat
from kvd_vllm.errors import Declined

CRYPTOGRAPHIC = ("sha256", "sha256_cbor")
FULL = ("FullAttentionSpec", "MLAAttentionSpec")
WINDOW = ("SlidingWindowSpec",)
MAX_VALUE = 1000
DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "half": "f16", "fp8": "fp8_e4m3"}


@dataclass(frozen=True)
class Group:
    """One KV cache group of the engine."""

    number: int
    rule: str  # "full" or "window"
    block_tokens: int
    window: int  # tokens
    layers: tuple[str, ...]
    page_bytes: int

    def text(self) -> str:
        tail = f":{self.window}" if self.rule == "window" else ""
        return f"{self.number}:{self.rule}:{self.block_tokens}{tail}"


@dataclass
class Space:
    """All that both halves must agree on."""

    identity: dict[str, Any]
    groups: list[Group]
    hash_tokens: int
    foreign: bool
    hash_reason: str
    none_hash: bytes | None
    world: int
    layers: int  # of a rank
    max_blocks: int
    notes: list[str] = field(default_factory=list)

    def digest(self) -> str:
        text = json.dumps([self.identity, [group.text() for group in self.groups], self.world, self.layers], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def writers(self) -> list[tuple[int, int, int, int, int]]:
        """Who fills what of an opaque block: every rank its own range of layers."""
        return [(rank, 0, 1, rank * self.layers, self.layers) for rank in range(self.world)]


def short(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return DTYPES.get(name, name)


def canonical(value: Any) -> str:
    """JSON with one form; long ones by their digest."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return text if len(text.encode()) <= MAX_VALUE else "sha256:" + hashlib.sha256(text.encode()).hexdigest()


# ---- groups --------------------------------------------------------------------------------------------------------


def _specs(spec: Any) -> list[Any]:
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if isinstance(inner, dict) else [spec]


def _group(number: int, group: Any) -> Group:
    specs = _specs(group.kv_cache_spec)
    spec = specs[0]
    kind = type(spec).__name__
    if any(type(other) is not type(spec) or other.page_size_bytes != spec.page_size_bytes or other.block_size != spec.block_size for other in specs):
        raise Declined(f"KV cache group {number} holds layers with pages of different sizes")
    if kind not in FULL + WINDOW:
        raise Declined(f"KV cache group {number} is {kind}; served are {', '.join(FULL + WINDOW)}")
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise Declined(f"KV cache group {number} keeps one state for several tokens")
    if not getattr(group, "enable_kv_transfer", True) or not getattr(spec, "prefix_cacheable", True) or getattr(group, "host_resident", False):
        raise Declined(f"KV cache group {number} is not to be transferred")
    window = spec.sliding_window - 1 if kind in WINDOW else 0
    if kind in WINDOW and window < 1:
        raise Declined(f"KV cache group {number} has a window of {spec.sliding_window} tokens")
    return Group(number, "window" if kind in WINDOW else "full", spec.block_size, window, tuple(group.layer_names), spec.page_size_bytes)


def groups_of(kv_cache_config: Any, compat: Compat) -> list[Group]:
    groups = [_group(number, group) for number, group in enumerate(kv_cache_config.kv_cache_groups)]
    if not groups:
        raise Declined("the model has no KV cache")
    if len(groups) > 16:
        raise Declined(f"{len(groups)} KV cache groups; at most 16 are served")
    if len({group.page_bytes for group in groups}) > 1:
        raise Declined("KV cache groups have pages of different sizes")
    if len(groups) > 1 and not compat["failed_recving"]:
        raise Declined("several KV cache groups need an engine that takes back a whole failed load (vLLM 0.30)")
    return groups


def hash_tokens_of(vllm_config: Any, kv_cache_config: Any, groups: list[Group], compat: Compat) -> int:
    """Tokens one of the engine's block hashes covers."""
    resolve = compat["hash_sizes"]
    if resolve is not None:
        return int(resolve(kv_cache_config, vllm_config)[1])
    return math.gcd(*(group.block_tokens for group in groups))


# ---- hashes --------------------------------------------------------------------------------------------------------


def engine_hashes(vllm_config: Any, compat: Compat) -> tuple[bytes | None, str, str]:
    """(NONE_HASH, algorithm, reason): None where the engine's hashes differ from process to process or can be forged."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm not in CRYPTOGRAPHIC:
        return None, algorithm, f"the engine's {algorithm} is not cryptographic"
    from vllm.utils.hashing import get_hash_fn_by_name

    function = get_hash_fn_by_name(algorithm)
    if compat["none_hash"] == "resolved":
        from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

        seed = resolve_none_hash_seed(function)
    else:
        seed = os.environ.get("PYTHONHASHSEED")
        if seed is None:
            return None, algorithm, "PYTHONHASHSEED is not set, so the engine's hashes differ from process to process"
    return bytes(function(seed)), algorithm, f"the engine's {algorithm} with a seed that stays the same"


def _hash(vllm_config: Any, compat: Compat, wanted: str) -> tuple[str, bytes | None, str]:
    if wanted == "own":
        return "kv1", None, "kvd's own, as asked"
    none_hash, algorithm, reason = engine_hashes(vllm_config, compat)
    if none_hash is None:
        if wanted == "engine":
            raise Declined(f"hash=engine, but {reason}")
        return "kv1", None, f"kvd's own: {reason}"
    return f"vllm:{algorithm}:{none_hash.hex()}", none_hash, reason


# ---- the rest ------------------------------------------------------------------------------------------------------


def rope_of(model_config: Any) -> str:
    config = getattr(model_config, "hf_text_config", None) or getattr(model_config, "hf_config", None)
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings", "original_max_position_embeddings")
    found = {name: getattr(config, name, None) for name in names}
    found = {name: value for name, value in found.items() if value is not None}
    if "longrope" in str(found) or "'su'" in str(found):
        found["max_model_len"] = getattr(model_config, "max_model_len", None)  # chooses between two sets of factors
    return canonical(found) if found else "none"


def _model_name(model_config: Any) -> str:
    name = str(model_config.model)
    return os.path.basename(os.path.normpath(name)) if os.path.exists(name) else name


def _extra(vllm_config: Any, groups: list[Group], engine_id: str) -> str:
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    names = "\n".join(f"{group.number} {name}" for group in groups for name in group.layers)
    extra: dict[str, Any] = {
        "compute": short(model.dtype),
        "layers": hashlib.sha256(names.encode()).hexdigest()[:16],
        "tp": parallel.tensor_parallel_size,
    }
    overrides = getattr(model, "hf_overrides", None)
    if overrides:
        extra["overrides"] = hashlib.sha256(canonical(overrides if isinstance(overrides, dict) else repr(overrides)).encode()).hexdigest()[:16]
    if getattr(cache, "calculate_kv_scales", False):
        extra["scales"] = engine_id  # found from the first prompts: true for this engine only
    skipped = getattr(cache, "kv_cache_dtype_skip_layers", None)
    if skipped:
        extra["skipped"] = list(skipped)
    return canonical(extra)


def _page_format(vllm_config: Any, kv_cache_config: Any, groups: list[Group], compat: Compat) -> str:
    """The CPU backend packs keys for its instruction set; nobody promises that the packing stays from release to release."""
    import torch

    spec = _specs(kv_cache_config.kv_cache_groups[0].kv_cache_spec)[0]
    isa = "plain"
    if compat["cpu_isa"] is not None and type(spec).__name__ != "MLAAttentionSpec":
        isa = compat["cpu_isa"](vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype)
    level = torch.backends.cpu.get_cpu_capability()
    shape = f"h{spec.num_kv_heads}d{spec.head_size}"
    return f"vllm-cpu/{compat['version']}/{isa}/{level}/{type(spec).__name__}/{shape}/tp{vllm_config.parallel_config.tensor_parallel_size}"


def _check_parallel(parallel: Any) -> None:
    if parallel.pipeline_parallel_size > 1:
        raise Declined("pipeline parallel ranks are not served by this version")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise Declined(f"{name} above 1 is not served by this version")


def describe(vllm_config: Any, kv_cache_config: Any, options: dict[str, Any], compat: Compat) -> Space:
    """Declined: this cache is not served."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    device = str(vllm_config.device_config.device_type)
    if device == "cuda":
        raise Declined("GPU memory is not served by this version")
    if device != "cpu":
        raise Declined(f"memory of device {device} is not served")
    _check_parallel(parallel)
    if not getattr(cache, "enable_prefix_caching", True):
        raise Declined("the engine's prefix caching is off: vLLM switches it off where its kernels cannot go on from a prefix (MLA on CPUs), and a hit would give wrong answers")

    engine_id = str(vllm_config.kv_transfer_config.engine_id)
    groups = groups_of(kv_cache_config, compat)
    hash_tokens = hash_tokens_of(vllm_config, kv_cache_config, groups, compat)
    block_tokens = groups[0].block_tokens
    hash_text, none_hash, reason = _hash(vllm_config, compat, options["hash"])
    layers = max(len(group.layers) for group in groups)
    world = parallel.tensor_parallel_size
    cache_dtype = short(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype)
    layout = f"kvk1 heads=1 layers={world * layers} tokens={block_tokens} k=0 v=0 dtype=byte inner=opaque page={groups[0].page_bytes}"
    identity = {
        "model": options["model"] or _model_name(model),
        "weights": options["weights"] or weights.of_model(model, str(vllm_config.load_config.load_format), engine_id),
        "dtype": cache_dtype,
        "quantization": str(model.quantization or "none"),
        "rope": rope_of(model),
        "lora": None,
        "hash": hash_text,
        "hash_tokens": hash_tokens,
        "groups": ",".join(group.text() for group in groups),
        "layout": layout,
        "page_format": _page_format(vllm_config, kv_cache_config, groups, compat),
        "extra": _extra(vllm_config, groups, engine_id),
    }
    return Space(identity, groups, hash_tokens, none_hash is not None, reason, none_hash, world, layers, int(kv_cache_config.num_blocks))


def membership(engine_id: str) -> tuple[str, bytes]:
    """Instance id and secret that all members of one engine compute alike."""
    digest = hashlib.sha256(b"kvd vllm instance\n" + engine_id.encode()).digest()
    return "vllm-" + hashlib.sha256(engine_id.encode()).hexdigest()[:24], digest


def unit_extras(request: Any, at: int, units: int, hash_tokens: int) -> list[bytes | None]:
    """Extra keys of units of a request as canonical bytes: what vLLM would put into its own hash (salt, images, embeddings)."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    keys: list[bytes | None] = []
    for unit in range(units):
        start = at + unit * hash_tokens
        extra, _ = generate_block_hash_extra_keys(request, start, start + hash_tokens, 0)
        keys.append(None if extra is None else _extra_bytes(extra))
    return keys


def _extra_bytes(extra: tuple[Any, ...]) -> bytes:
    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        return [plain(part) for part in value] if isinstance(value, (tuple, list)) else value

    return json.dumps(plain(extra), separators=(",", ":"), ensure_ascii=True).encode()
