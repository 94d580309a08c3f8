"""Which engines share blocks: the identity of their space. Computed from vllm_config and kv_cache_config alone, so that both halves get the same."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from typing import Any

from kvd_vllm import layout, pipeline, weights
from kvd_vllm.errors import Declined

CRYPTOGRAPHIC = ("sha256", "sha256_cbor")
FULL = ("FullAttentionSpec", "MLAAttentionSpec")
WINDOW = ("SlidingWindowSpec",)
STATE = ("MambaSpec",)
MAX_VALUE = 1000
DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "half": "f16", "fp8": "fp8_e4m3"}


@dataclass(frozen=True)
class Group:
    """One KV cache group of the engine."""

    number: int
    block_tokens: int
    window: int  # tokens; 0: full attention, or a state
    layers: tuple[str, ...]
    page_bytes: int
    state: bool = False  # a block holds what its layers know at its end, not something of each token

    def text(self) -> str:
        rule = "state" if self.state else "window" if self.window else "full"
        return f"{self.number}:{rule}:{self.block_tokens}" + (f":{self.window}" if self.window else "")


@dataclass
class Space:
    """What both halves must have equal."""

    identity: dict[str, Any]
    block: layout.Block  # of the pool; its text is in `identity`
    groups: list[Group]
    hash_tokens: int
    foreign: bool
    hash_reason: str
    none_hash: bytes | None
    world: int  # ranks: tensor parallel ones of the first pipeline stage, then those of the next
    stages: pipeline.Stages
    max_blocks: int
    device: str = "cpu"  # where the engine's cache is: "cpu" or "cuda"
    shape: layout.Shape | None = None  # of a rank's page; None: pages are opaque
    weights: weights.Weights = weights.Weights()  # not in `identity`: digesting them takes a while

    @property
    def tensor_ranks(self) -> int:
        """Of a pipeline stage."""
        return self.world // len(self.stages.ranges)

    def kind(self) -> str:
        """How the ranks share the model."""
        return f"tp{self.tensor_ranks}" + (f" pp{len(self.stages.ranges)}" if len(self.stages.ranges) > 1 else "")

    def check_rank(self, rank: int) -> None:
        if rank // self.tensor_ranks != self.stages.own:
            raise Declined(f"rank {rank} caches the layers of pipeline stage {self.stages.own}")

    def digest(self) -> str:
        text = json.dumps([self.identity, [group.text() for group in self.groups], self.world, self.stages.ranges], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def held(self, rank: int) -> tuple[int, int, int, int, int]:
        """(rank, first head, heads, first layer, layers) of a rank's cache: its heads of all layers of its stage. An opaque block has the layers of one tensor parallel rank
        after those of another."""
        stage, own = divmod(rank, self.tensor_ranks)
        first, count = self.stages.ranges[stage]
        if self.shape is None:
            return rank, 0, 1, own * self.stages.layers + first, count
        return rank, own // self.copies() * self.shape.heads, self.shape.heads, first, count

    def copies(self) -> int:
        """Ranks that hold the same heads, one after another: vLLM copies heads where there are more ranks."""
        return 1 if self.shape is None else self.tensor_ranks * self.shape.heads // self.block.heads

    def writers(self) -> list[tuple[int, int, int, int, int]]:
        """The same of what each rank saves. Ranks that hold copies share out the layers: each writes a part of every block, so a block is complete only if all have computed right."""
        parts, found = self.copies(), []
        for rank in range(self.world):
            _, head, heads, first, count = self.held(rank)
            low, high = (count * (rank % parts + i) // parts for i in range(2))
            found.append((rank, head, heads, first + low, high - low))
        return found

    def place(self, rank: int) -> tuple[int, int]:
        """(first head, first layer) of a rank."""
        return self.held(rank)[1], self.held(rank)[3]


def short(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return DTYPES.get(name, name)


def canonical(value: Any) -> str:
    """Canonical JSON; the digest of a long one."""
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
    if kind not in FULL + WINDOW + STATE:
        raise Declined(f"KV cache group {number} is {kind}; served are {', '.join(FULL + WINDOW + STATE)}")
    if kind in STATE:
        _check_state(number, spec)
    elif getattr(spec, "tokens_per_state", 1) != 1:
        raise Declined(f"KV cache group {number} keeps one state for several tokens")
    if not getattr(group, "enable_kv_transfer", True) or not getattr(spec, "prefix_cacheable", True) or getattr(group, "host_resident", False):
        raise Declined(f"KV cache group {number} is not to be transferred")
    window = spec.sliding_window - 1 if kind in WINDOW else 0
    if kind in WINDOW and window < 1:
        raise Declined(f"KV cache group {number} has a window of {spec.sliding_window} tokens")
    return Group(number, spec.block_size, window, tuple(group.layer_names), spec.page_size_bytes, kind in STATE)


def _check_state(number: int, spec: Any) -> None:
    """Served is the mode in which the engine ends its chunks at the ends of blocks, and leaves there the state of just these tokens."""
    mode = getattr(spec, "mamba_cache_mode", "none")
    if mode != "align":
        raise Declined(f"KV cache group {number} keeps states in mode {mode}; served is align")
    if getattr(spec, "num_speculative_blocks", 0):
        raise Declined(f"KV cache group {number} keeps states of drafts, too")


def groups_of(kv_cache_config: Any, compat: dict[str, Any]) -> list[Group]:
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


# ---- hashes --------------------------------------------------------------------------------------------------------


def _hash(vllm_config: Any, compat: dict[str, Any], wanted: str) -> tuple[str, bytes | None, str]:
    """(its text in the identity, NONE_HASH, reason). NONE_HASH is None with kvd's own hashes: where the engine's differ from process to process or can be forged."""
    if wanted == "own":
        return "kv1", None, "kvd's own, as asked"
    algorithm, seed = str(vllm_config.cache_config.prefix_caching_hash_algo), os.environ.get("PYTHONHASHSEED")
    reason = ""
    if algorithm not in CRYPTOGRAPHIC:
        reason = f"the engine's {algorithm} is not cryptographic"
    elif compat["none_hash"] != "resolved" and seed is None:
        reason = "PYTHONHASHSEED is not set, so the engine's hashes differ from process to process"
    if reason and wanted == "engine":
        raise Declined(f"hash=engine, but {reason}")
    if reason:
        return "kv1", None, f"kvd's own: {reason}"

    from vllm.utils.hashing import get_hash_fn_by_name

    function = get_hash_fn_by_name(algorithm)
    if compat["none_hash"] == "resolved":
        from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

        seed = resolve_none_hash_seed(function)
    none_hash = bytes(function(seed))
    return f"vllm:{algorithm}:{none_hash.hex()}", none_hash, f"the engine's {algorithm} with a seed that stays the same"


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


def _settings(model: Any) -> dict[str, Any]:
    """Settings of the operator that change values: with others, equal files are another model."""
    images = getattr(model, "multimodal_config", None)
    found = {name: getattr(model, name, None) for name in ("hf_overrides", "quantization_config", "model_impl", "config_format")}
    found |= {name: getattr(images, name, None) for name in ("mm_processor_kwargs", "media_io_kwargs")}
    return {name: value if isinstance(value, dict) else str(getattr(value, "value", value)) for name, value in found.items() if value and value != "auto"}


def _extra(vllm_config: Any, groups: list[Group], stages: pipeline.Stages, whole: bool) -> str:
    """`whole`: a block has all heads of the model, however many ranks have filled it."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    names = "\n".join(f"{group.number} {name}" for group, names in zip(groups, stages.names) for name in names)
    extra: dict[str, Any] = {
        "compute": short(model.dtype),
        "layers": hashlib.sha256(names.encode()).hexdigest()[:16],
    }
    if not whole:
        extra["tp"] = parallel.tensor_parallel_size
    if stages.moved:
        extra["stages"] = stages.moved
    settings = _settings(model)
    if settings:
        extra["settings"] = hashlib.sha256(canonical(settings).encode()).hexdigest()[:16]
    skipped = getattr(cache, "kv_cache_dtype_skip_layers", None)
    if skipped:
        extra["skipped"] = list(skipped)
    return canonical(extra)


def _page_format(vllm_config: Any, kv_cache_config: Any, compat: dict[str, Any]) -> str:
    """The CPU backend packs keys for its instruction set, and the packing may change with any release."""
    import torch

    specs = [_specs(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    spec = next((own[0] for own in specs if type(own[0]).__name__ not in STATE), None)
    isa, kind, shape = "plain", "none", ""
    if spec is not None:
        kind, shape = type(spec).__name__, f"h{spec.num_kv_heads}d{spec.head_size}"
        if compat["cpu_isa"] is not None and kind != "MLAAttentionSpec":
            isa = compat["cpu_isa"](vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype)
    level = torch.backends.cpu.get_cpu_capability()
    states = [_state_format(one) for own in specs for one in own if type(one).__name__ in STATE]
    if states:
        order = compat["conv_layout"]() if compat["conv_layout"] else "unknown"
        shape += "/states-" + hashlib.sha256(json.dumps([order, states]).encode()).hexdigest()[:16]
    return f"vllm-cpu/{compat['version']}/{isa}/{level}/{kind}/{shape}/tp{vllm_config.parallel_config.tensor_parallel_size}"


def _state_format(spec: Any) -> list[Any]:
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    return [kind, [list(shape) for shape in spec.shapes], [str(dtype) for dtype in spec.dtypes], spec.page_size_bytes]


def _cache_dtype(vllm_config: Any) -> str:
    cache = vllm_config.cache_config
    return short(vllm_config.model_config.dtype if cache.cache_dtype == "auto" else cache.cache_dtype)


def _page_shape(spec: Any, dtype: str) -> layout.Shape:
    """One page of a rank on a GPU, from its spec. A latent vector of a type that kvd does not know is bytes (DeepSeek's packing)."""
    latent = type(spec).__name__ == "MLAAttentionSpec"
    real = int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))
    known = dtype in layout.BYTES
    size = layout.BYTES[dtype] if known else 1
    states = spec.block_size * spec.num_kv_heads
    if getattr(spec, "compress_ratio", 1) != 1 or getattr(spec, "num_head_slots", None) not in (None, spec.num_kv_heads):
        raise Declined("pages hold something else than one key and value a token and head")
    if latent:
        if real % (states * size) != 0 or (known and real != states * size * spec.head_size):
            raise Declined(f"a page of {real} bytes is not {spec.block_size} latent vectors")
        return layout.Shape(spec.block_size, 1, real // (states * size), 0, dtype if known else "byte")
    value = getattr(spec, "head_size_v", None) or spec.head_size
    if not known or real != states * size * (spec.head_size + value) or (getattr(spec, "page_size_padded", None) is None and spec.page_size_bytes != real):
        raise Declined(f"a page of {spec.page_size_bytes} bytes holds more than {states} keys and values of type {dtype}")
    return layout.Shape(spec.block_size, spec.num_kv_heads, spec.head_size, value, dtype)


def _shape(vllm_config: Any, kv_cache_config: Any) -> layout.Shape:
    """The shape of all groups."""
    if any(type(_specs(group.kv_cache_spec)[0]).__name__ in STATE for group in kv_cache_config.kv_cache_groups):
        raise Declined("states in memory of a GPU are not served by this version")
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in _specs(group.kv_cache_spec)]
    shapes = {_page_shape(spec, _cache_dtype(vllm_config)) for spec in specs}
    if len(shapes) != 1:
        raise Declined("KV cache groups have pages of different shapes")
    return shapes.pop()


def _total_heads(vllm_config: Any, shape: layout.Shape, layers: int) -> int:
    """KV heads of the model: fewer than all ranks hold together if some hold copies."""
    world = vllm_config.parallel_config.tensor_parallel_size
    total = getattr(vllm_config.model_config, "get_total_num_kv_heads", None)
    held = world * shape.heads
    heads = 1 if shape.v == 0 else int(total()) if total is not None else held
    if not 0 < heads <= held or held % heads != 0 or (heads < held and shape.heads != 1):
        raise Declined(f"{world} tensor parallel ranks of {shape.heads} KV heads for a model of {heads}")
    if held // heads > layers:
        raise Declined(f"{held // heads} tensor parallel ranks hold copies of the same KV heads, more than there are layers of a stage")
    return heads


def _check_parallel(parallel: Any) -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise Declined(f"{name} above 1 is not served by this version")


def describe(vllm_config: Any, kv_cache_config: Any, options: dict[str, Any], compat: dict[str, Any]) -> Space:
    """Declined: this cache is not served."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    device = str(vllm_config.device_config.device_type)
    if device not in ("cpu", "cuda"):
        raise Declined(f"memory of device {device} is not served")
    _check_parallel(parallel)
    if not getattr(cache, "enable_prefix_caching", True):
        raise Declined("the engine's prefix caching is off: vLLM switches it off where its kernels cannot go on from a prefix (MLA on CPUs), and a hit would give wrong answers")

    groups = groups_of(kv_cache_config, compat)
    resolve = compat["hash_sizes"]
    hash_tokens = int(resolve(kv_cache_config, vllm_config)[1]) if resolve else math.gcd(*(group.block_tokens for group in groups))
    hash_text, none_hash, reason = _hash(vllm_config, compat, options["hash"])
    if any(group.state and group.block_tokens != hash_tokens for group in groups):
        raise Declined(f"states at ends of blocks are found by prefixes of whole blocks; the engine looks for prefixes of {hash_tokens} tokens")
    if parallel.pipeline_parallel_size > 1 and any(group.state for group in groups):
        raise Declined("states are not served over pipeline stages by this version")
    stages = pipeline.stages_of(vllm_config, kv_cache_config.kv_cache_groups)
    layers, ranks = stages.layers, parallel.tensor_parallel_size
    shape = _shape(vllm_config, kv_cache_config) if device == "cuda" else None
    if shape is not None:
        block, page_format = layout.Block(_total_heads(vllm_config, shape, min(count for _, count in stages.ranges)), layers, shape.tokens, shape.k, shape.v, shape.dtype), "canonical"
    else:
        block = layout.opaque_block(ranks * layers, groups[0].block_tokens, groups[0].page_bytes)
        page_format = _page_format(vllm_config, kv_cache_config, compat)
    identity = {
        "model": options["model"] or _model_name(model),
        "weights": None,
        "dtype": _cache_dtype(vllm_config),
        "quantization": str(model.quantization or "none"),
        "rope": rope_of(model),
        "lora": None,
        "hash": hash_text,
        "hash_tokens": hash_tokens,
        "groups": ",".join(group.text() for group in groups),
        "layout": block.text(),
        "page_format": page_format,
        "extra": _extra(vllm_config, groups, stages, shape is not None),
    }
    named = weights.of_model(vllm_config, options["weights"], compat["version"], device)
    return Space(identity, block, groups, hash_tokens, none_hash is not None, reason, none_hash, ranks * len(stages.ranges), stages, int(kv_cache_config.num_blocks), device, shape, named)


def membership(engine_id: str) -> tuple[str, bytes]:
    """Instance id and secret that all members of one engine compute alike."""
    digest = hashlib.sha256(b"kvd vllm instance\n" + engine_id.encode()).digest()
    return "vllm-" + hashlib.sha256(engine_id.encode()).hexdigest()[:24], digest


def unit_extras(request: Any, at: int, units: int, hash_tokens: int) -> list[bytes | None]:
    """Extra keys of units of a request (salt, images, embeddings) as canonical bytes: the same that vLLM puts into its own hash."""
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
