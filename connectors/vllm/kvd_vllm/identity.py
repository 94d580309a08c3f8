"""Which engines share blocks: the identity of their space. Computed from vllm_config and kv_cache_config alone, so that both halves get the same."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass, field
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
    """Layers of the engine whose blocks have one rule and one size: a KV cache group of its, or those of one that have pages of one kind."""

    number: int
    table: int  # the engine's group, whose blocks it has
    block_tokens: int
    window: int  # tokens; 0: full attention, or a state
    layers: tuple[str, ...]
    page_bytes: int  # of a layer's block, without padding
    state: bool = False  # a block holds what its layers know at its end, not something of each token
    spec: Any = field(default=None, compare=False, repr=False)  # the engine's

    def text(self) -> str:
        rule = "state" if self.state else "window" if self.window else "full"
        return f"{self.number}:{rule}:{self.block_tokens}" + (f":{self.window}" if self.window else "")


@dataclass(frozen=True)
class Blocks:
    """The blocks of a group in the pool, and what of them each rank holds."""

    block: layout.Block
    shape: layout.Shape | None  # of a rank's page; None: pages are opaque, and each tensor parallel rank has layers of its own
    counts: tuple[int, ...]  # layers of each pipeline stage

    def copies(self, ranks: int) -> int:
        """Of `ranks` tensor parallel ones those that hold the same heads, one after another: vLLM copies heads where there are more ranks."""
        return 1 if self.shape is None else ranks * self.shape.heads // self.block.heads


@dataclass
class Space:
    """What both halves must have equal."""

    identity: dict[str, Any]
    groups: list[Group]
    blocks: list[Blocks]  # of the groups; their layouts are in `identity`
    hash_tokens: int
    foreign: bool
    hash_reason: str
    none_hash: bytes | None
    world: int  # ranks: tensor parallel ones of the first pipeline stage, then those of the next
    stage: int  # of this half's configuration
    max_blocks: int
    device: str = "cpu"  # where the engine's cache is: "cpu" or "cuda"
    weights: weights.Weights = weights.Weights()  # not in `identity`: digesting them takes a while

    @property
    def stages(self) -> int:
        return len(self.blocks[0].counts)

    @property
    def tensor_ranks(self) -> int:
        """Of a pipeline stage."""
        return self.world // self.stages

    def kind(self) -> str:
        """How the ranks share the model."""
        return f"tp{self.tensor_ranks}" + (f" pp{self.stages}" if self.stages > 1 else "")

    def check_rank(self, rank: int) -> None:
        if rank // self.tensor_ranks != self.stage:
            raise Declined(f"rank {rank} caches the layers of pipeline stage {self.stage}")

    def digest(self) -> str:
        text = json.dumps([self.identity, [group.text() for group in self.groups], self.world, [blocks.counts for blocks in self.blocks]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def held(self, group: int, rank: int) -> tuple[int, int, int, int, int]:
        """(rank, first head, heads, first layer, layers) of a rank's cache: its heads of all layers of its stage. An opaque block has the layers of one tensor parallel rank
        after those of another."""
        blocks = self.blocks[group]
        stage, own = divmod(rank, self.tensor_ranks)
        first, count = sum(blocks.counts[:stage]), blocks.counts[stage]
        if blocks.shape is None:
            return rank, 0, 1, own * sum(blocks.counts) + first, count
        return rank, own // blocks.copies(self.tensor_ranks) * blocks.shape.heads, blocks.shape.heads, first, count

    def saved(self, group: int, rank: int) -> tuple[int, int, int, int, int]:
        """The same of what the rank saves. Ranks that hold copies share out the layers: each writes a part of every block, so a block is complete only if all have computed right."""
        parts = self.blocks[group].copies(self.tensor_ranks)
        _, head, heads, first, count = self.held(group, rank)
        low, high = (count * (rank % parts + i) // parts for i in range(2))
        return rank, head, heads, first + low, high - low

    def writers(self) -> list[tuple[int, int, int, int, int]]:
        """What all ranks save, group by group."""
        return [self.saved(group, rank) for group in range(len(self.groups)) for rank in range(self.world)]


def short(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return DTYPES.get(name, name)


def canonical(value: Any) -> str:
    """Canonical JSON; the digest of a long one."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return text if len(text.encode()) <= MAX_VALUE else "sha256:" + hashlib.sha256(text.encode()).hexdigest()


# ---- groups --------------------------------------------------------------------------------------------------------


def _kinds(group: Any) -> list[tuple[Any, tuple[str, ...]]]:
    """The layers of an engine's group by what their pages are: vLLM puts layers with pages of several sizes into one group where all have one rule."""
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if not isinstance(inner, dict):
        return [(group.kv_cache_spec, tuple(group.layer_names))]
    kinds: list[tuple[Any, list[str]]] = []
    for name in group.layer_names:
        known = next((names for spec, names in kinds if spec == inner[name]), None)
        if known is None:
            kinds.append((inner[name], [name]))
        else:
            known.append(name)
    return [(spec, tuple(names)) for spec, names in kinds]


def _group(number: int, table: int, group: Any, spec: Any, layers: tuple[str, ...]) -> Group:
    kind = type(spec).__name__
    if kind not in FULL + WINDOW + STATE:
        raise Declined(f"KV cache group {table} is {kind}; served are {', '.join(FULL + WINDOW + STATE)}")
    if kind in STATE:
        _check_state(table, spec)
    elif getattr(spec, "tokens_per_state", 1) != 1:
        raise Declined(f"KV cache group {table} keeps one state for several tokens")
    if not getattr(group, "enable_kv_transfer", True) or not getattr(spec, "prefix_cacheable", True) or getattr(group, "host_resident", False):
        raise Declined(f"KV cache group {table} is not to be transferred")
    window = spec.sliding_window - 1 if kind in WINDOW else 0
    if kind in WINDOW and window < 1:
        raise Declined(f"KV cache group {table} has a window of {spec.sliding_window} tokens")
    if spec.block_size != group.kv_cache_spec.block_size:
        raise Declined(f"KV cache group {table} holds layers with blocks of {spec.block_size} and {group.kv_cache_spec.block_size} tokens")
    return Group(number, table, spec.block_size, window, layers, _true_bytes(spec), kind in STATE, spec)


def _true_bytes(spec: Any) -> int:
    """Of a page, without what vLLM adds so that the pages of all groups have one size."""
    if type(spec).__name__ in STATE:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes))
    return int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))


def _check_state(number: int, spec: Any) -> None:
    """Served is the mode in which the engine ends its chunks at the ends of blocks, and leaves there the state of just these tokens."""
    mode = getattr(spec, "mamba_cache_mode", "none")
    if mode != "align":
        raise Declined(f"KV cache group {number} keeps states in mode {mode}; served is align")
    if getattr(spec, "num_speculative_blocks", 0):
        raise Declined(f"KV cache group {number} keeps states of drafts, too")


def groups_of(kv_cache_config: Any, compat: dict[str, Any]) -> list[Group]:
    groups: list[Group] = []
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        for spec, layers in _kinds(group):
            groups.append(_group(len(groups), table, group, spec, layers))
    if not groups:
        raise Declined("the model has no KV cache")
    if len(groups) > 16:
        raise Declined(f"{len(groups)} KV cache groups; at most 16 are served")
    _check_takes_back(groups, compat)
    return groups


def needs_recovery(groups: list[Group], compat: dict[str, Any]) -> bool:
    """Whether this vLLM would raise after a failed load of such a cache."""
    return len(groups) > 1 and not compat["failed_recving"]


def _check_takes_back(groups: list[Group], compat: dict[str, Any]) -> None:
    if not needs_recovery(groups, compat):
        return
    if not compat["recovers_groups"]:
        raise Declined("several KV cache groups need an engine that takes back a whole failed load (vLLM 0.26.0, or 0.30 and later)")
    if any(group.state for group in groups):
        raise Declined("states beside other KV cache groups need vLLM 0.30: this one counts tokens as computed whose state it does not have")


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


def _extra(vllm_config: Any, stages: pipeline.Stages, whole: bool) -> str:
    """`whole`: a block has all heads of the model, however many ranks have filled it."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    names = "\n".join(f"{number} {name}" for number, names in enumerate(stages.names) for name in names)
    extra: dict[str, Any] = {
        "compute": short(model.dtype),
        "layers": hashlib.sha256(names.encode()).hexdigest()[:16],
    }
    if not whole:
        extra["tp"] = parallel.tensor_parallel_size
    settings = _settings(model)
    if settings:
        extra["settings"] = hashlib.sha256(canonical(settings).encode()).hexdigest()[:16]
    skipped = getattr(cache, "kv_cache_dtype_skip_layers", None)
    if skipped:
        extra["skipped"] = list(skipped)
    return canonical(extra)


def _page_format(vllm_config: Any, groups: list[Group], compat: dict[str, Any]) -> str:
    """The CPU backend packs keys for its instruction set, and the packing may change with any release."""
    import torch

    spec = next((group.spec for group in groups if not group.state), None)
    isa, kind, shape = "plain", "none", ""
    if spec is not None:
        kind, shape = type(spec).__name__, f"h{spec.num_kv_heads}d{spec.head_size}"
        if compat["cpu_isa"] is not None and kind != "MLAAttentionSpec":
            isa = compat["cpu_isa"](vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype)
    level = torch.backends.cpu.get_cpu_capability()
    return f"vllm-cpu/{compat['version']}/{isa}/{level}/{kind}/{shape}{_state_text(groups, compat)}/tp{vllm_config.parallel_config.tensor_parallel_size}"


def _state_text(groups: list[Group], compat: dict[str, Any]) -> str:
    """Empty: the model keeps no states."""
    states = [_state_format(group.spec) for group in groups if group.state for _ in group.layers]
    order = compat["conv_layout"]() if compat["conv_layout"] else "unknown"
    return "/states-" + hashlib.sha256(json.dumps([order, states]).encode()).hexdigest()[:16] if states else ""


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
        if known and real != states * size * spec.head_size:
            size, known = 1, False  # something else of each token, as the keys of an indexer: bytes
        if real % (states * size) != 0:
            raise Declined(f"a page of {real} bytes is not {spec.block_size} latent vectors")
        return layout.Shape(spec.block_size, 1, real // (states * size), 0, dtype if known else "byte")
    value = getattr(spec, "head_size_v", None) or spec.head_size
    if not known or real != states * size * (spec.head_size + value) or (getattr(spec, "page_size_padded", None) is None and spec.page_size_bytes != real):
        raise Declined(f"a page of {spec.page_size_bytes} bytes holds more than {states} keys and values of type {dtype}")
    return layout.Shape(spec.block_size, spec.num_kv_heads, spec.head_size, value, dtype)


def _total_heads(vllm_config: Any, shape: layout.Shape, layers: int, alike: bool) -> int:
    """KV heads of these layers: fewer than all ranks hold together if some hold copies. The model's number is that of its layers only if they are `alike`."""
    world = vllm_config.parallel_config.tensor_parallel_size
    total = getattr(vllm_config.model_config, "get_total_num_kv_heads", None) if alike else None
    held = world * shape.heads
    if not alike and world > 1 and shape.heads == 1 and shape.v:
        raise Declined("layers have different numbers of KV heads, and one of a rank may be a copy of another rank's")
    heads = 1 if shape.v == 0 else int(total()) if total is not None else held
    if not 0 < heads <= held or held % heads != 0 or (heads < held and shape.heads != 1):
        raise Declined(f"{world} tensor parallel ranks of {shape.heads} KV heads for a model of {heads}")
    if held // heads > layers:
        raise Declined(f"{held // heads} tensor parallel ranks hold copies of the same KV heads, more than there are layers of a stage")
    return heads


def _blocks(vllm_config: Any, group: Group, counts: tuple[int, ...], alike: bool) -> Blocks:
    ranks, layers = vllm_config.parallel_config.tensor_parallel_size, sum(counts)
    if str(vllm_config.device_config.device_type) == "cpu" or group.state:
        return Blocks(layout.opaque_block(ranks * layers, group.block_tokens, group.page_bytes), None, counts)
    shape = _page_shape(group.spec, _cache_dtype(vllm_config))
    return Blocks(layout.Block(_total_heads(vllm_config, shape, min(counts), alike), layers, shape.tokens, shape.k, shape.v, shape.dtype), shape, counts)


def _layers(groups: list[Group], stages: pipeline.Stages) -> list[tuple[int, ...]]:
    """How many layers of each group each pipeline stage has."""
    tables = [group.table for group in groups]
    if len(stages.counts[0]) > 1 and len(set(tables)) < len(tables):
        raise Declined("layers with pages of several sizes in one KV cache group are not served over pipeline stages")
    return [stages.counts[group.table] if tables.count(group.table) == 1 else (len(group.layers),) for group in groups]


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
    if device == "cuda" and any(group.state for group in groups) and not options["gpu_states"]:
        raise Declined("states in memory of a GPU are served only if you ask for it (option gpu_states): no GPU has tested this")
    stages = pipeline.stages_of(vllm_config, kv_cache_config.kv_cache_groups, compat["regroup"])
    alike = len({group.spec.num_kv_heads for group in groups if not group.state}) == 1
    blocks = [_blocks(vllm_config, group, counts, alike) for group, counts in zip(groups, _layers(groups, stages))]
    text = layout.text_of([one.block for one in blocks])
    if len(text) > MAX_VALUE:
        raise Declined(f"the blocks of {len(groups)} KV cache groups differ so much that the space's name is too long")
    whole = all(one.shape is not None for one in blocks)
    page_format = _page_format(vllm_config, groups, compat)
    if device == "cuda":
        page_format = "canonical" + (f"/{compat['version']}{_state_text(groups, compat)}" if not whole else "")
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
        "layout": text,
        "page_format": page_format,
        "extra": _extra(vllm_config, stages, whole),
    }
    named = weights.of_model(vllm_config, options["weights"], compat["version"], device)
    world = parallel.tensor_parallel_size * len(stages.counts[0])
    return Space(identity, groups, blocks, hash_tokens, none_hash is not None, reason, none_hash, world, stages.own, int(kv_cache_config.num_blocks), device, named)


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
