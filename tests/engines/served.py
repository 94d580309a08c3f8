"""Whether kvd serves the cache groups of public models: their shapes (shapes/*.json, from public configurations), the groups that vLLM makes of them (caches.py),
and kvd's word on these and on tensors as vLLM lays them, for a Hopper GPU and for a CPU without AMX. No engine runs.

usage: served.py            a line a model, with the sentence where it is not served
       served.py --groups   all that vLLM says of the groups and of where their pages lie
       served.py --table    the table of docs/vllm.md
       served.py --check    fails where a model of served.json is no longer served, and where the page has another table
       served.py --keep     served.json and the page's table as they are now
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs, iter_layer_specs

import caches
from kvd_vllm import compat, connector, identity, layout, options
from kvd_vllm.errors import Declined

HERE = Path(__file__).resolve().parent
SHAPES, KEPT = HERE / "shapes", HERE / "served.json"
PAGE = HERE.parents[1] / "docs" / "vllm.md"
DEVICES = ("cuda", "cpu")
CASES = {"cuda": ("cuda", {}), "cuda, gpu_states": ("cuda", {"gpu_states": True}), "cpu": ("cpu", {})}  # device, options
DEGREES = (1, 8)  # of tensor parallelism: a model counts as served if it is with each that vLLM takes
# Models that vLLM 0.32 does not run on a CPU without AMX with its prefix caching on, so that there is nothing to serve: a key of their shapes, and why.
NOT_ON_CPUS = {
    "compress_ratios": "vLLM runs it on CPUs with AMX only",
    "index_topk": "vLLM has no sparse attention on CPUs",
    "linear_attn_config": "vLLM's kernel for MLA on CPUs has no blocks as large as this model's states",
    "hybrid_override_pattern": "vLLM fails on CPUs in its prefix caching of Mamba-2",
}


# ---- kvd's word ----------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    engine: caches.Engine
    cache: KVCacheConfig
    space: identity.Space | None
    why: str  # not served; empty: it is

    def groups(self) -> list[Any]:
        return self.cache.kv_cache_groups

    def stored(self) -> list[int]:
        """Bytes that a rank stores of a block of each of the engine's groups."""
        assert self.space is not None
        sizes = [0] * len(self.groups())
        for group, blocks in zip(self.space.groups, self.space.blocks):
            block, tp = blocks.block, self.engine.tp
            page = block.page_bytes or block.block_tokens * (block.k_dim + block.v_dim) * layout.BYTES[block.dtype]
            sizes[group.table] += page * (block.layers // tp if block.page_bytes else block.layers * max(1, block.heads // tp))
        return sizes


def not_run(shape: caches.Shape, device: str) -> str:
    return next((why for key, why in NOT_ON_CPUS.items() if device == "cpu" and key in shape), "")


def judge(shape: caches.Shape, device: str, chosen: dict[str, Any], tp: int = 1) -> Verdict:
    engine = caches.engine_of(shape, device, tp)
    cache = caches.cache_of(engine)
    try:
        space = identity.describe(engine.config, cache, options.parse(chosen)[0], compat.probe())
        look_at_tensors(space, caches.tensors_of(engine, cache))
    except Declined as declined:
        return Verdict(engine, cache, None, str(declined))
    return Verdict(engine, cache, space, "")


def look_at_tensors(space: identity.Space, tensors: dict[str, Any]) -> None:
    """As a worker half does, of rank 0. Declined: it would not know how the cache lies."""
    half = connector.KvdConnector.__new__(connector.KvdConnector)
    half.__dict__.update(_space=space)
    half._describe([[tensors[name] for name in group.layers] for group in space.groups], 0)


def why_not(shape: caches.Shape, device: str, chosen: dict[str, Any]) -> str:
    """Empty: served, with each degree."""
    heads = shape.get("num_key_value_heads", 1)
    degrees = [tp for tp in DEGREES if heads % tp == 0 or tp % heads == 0]
    return not_run(shape, device) or next((why for tp in degrees if (why := judge(shape, device, chosen, tp).why)), "")


def read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from error


def shapes() -> list[caches.Shape]:
    return sorted((read(path) for path in SHAPES.glob("*.json")), key=lambda shape: shape["model"].lower())


def rule_of(spec: Any) -> str:
    if isinstance(spec, MambaSpec):
        return "state"
    return f"window {spec.sliding_window:,}" if isinstance(spec, SlidingWindowSpec) else "full"


def parts(group: Any) -> dict[Any, int]:
    """Layers of each kind in a group."""
    specs = list(iter_layer_specs(group.kv_cache_spec))
    if not isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        specs *= len(group.layer_names)
    return {spec: specs.count(spec) for spec in specs}


def kib(size: int) -> str:
    return f"{size / 1024:,.1f}".removesuffix(".0")


def true_bytes(group: Any) -> int:
    return sum(count * spec.real_page_size_bytes for spec, count in parts(group).items())


def once(texts: list[str], counted: str) -> str:
    """Texts one after another; what is there several times, once and how often."""
    return "; ".join(text if texts.count(text) == 1 else f"{texts.count(text)} {counted} {text}" for text in dict.fromkeys(texts))


def describe(group: Any) -> str:
    pages = " + ".join(f"{count} x {kib(spec.page_size_bytes)}" for spec, count in parts(group).items())
    return f"{rule_of(next(iter(parts(group))))}: {pages} / {group.kv_cache_spec.block_size:,}"


# ---- what is printed -----------------------------------------------------------------------------------------------


def table() -> str:
    notes: list[str] = []

    def word(shape: caches.Shape, device: str) -> str:
        reasons = [why_not(shape, *case) for case in CASES.values() if case[0] == device]
        why = next((why for why in reasons if why), "")
        if why and why not in notes:
            notes.append(why)
        return f"{'no' if all(reasons) else 'if asked'} ({notes.index(why) + 1})" if why else "yes"

    rows = [["model", "groups on a GPU", "KiB of a block", "stored", "GPU", "CPU"], ["---"] * 6]
    for shape in shapes():
        gpu = judge(shape, *CASES["cuda, gpu_states"])
        sizes = once([kib(true_bytes(group)) for group in gpu.groups()], "x")
        stored = once([kib(size) for size in gpu.stored()], "x") if gpu.space else "-"
        rows.append([shape["model"], once([describe(group) for group in gpu.groups()], "groups"), sizes, stored, *(word(shape, device) for device in DEVICES)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"{number}. {why}" for number, why in enumerate(notes, 1))])


def tell() -> None:
    for shape in shapes():
        for name, case in CASES.items():
            print(f"{shape['model']:26} {name:16} {why_not(shape, *case) or 'served'}")
    print("; ".join(f"{name}: {len(names)} of {len(shapes())} served" for name, names in now().items()))


def tell_groups() -> None:
    runs = [(shape, device, tp) for shape in shapes() for device in DEVICES for tp in DEGREES if not not_run(shape, device)]
    for shape, device, tp in runs:
        verdict = judge(shape, device, {"gpu_states": True}, tp)
        print(f"{shape['model']} on {device}, TP {tp}, layout {verdict.engine.config.cache_config.kv_cache_layout}: {verdict.why or 'served'}")
        for number, group in enumerate(verdict.groups()):
            print(f"  group {number}: {type(group.kv_cache_spec).__name__}, {rule_of(next(iter(parts(group))))}, blocks of {group.kv_cache_spec.block_size} tokens")
            for spec, count in parts(group).items():
                print(f"    {count} x {type(spec).__name__}: page {spec.page_size_bytes} bytes, {spec.real_page_size_bytes} without padding; {spec.tokens_per_state} tokens a state")
        for tensor in verdict.cache.kv_cache_tensors:
            print(f"  {len(tensor.layers)} layers from {tensor.layers[0]} on: offset {tensor.offset}, layers {tensor.layer_stride} apart, blocks {tensor.block_stride}")


# ---- what is kept --------------------------------------------------------------------------------------------------


def now() -> dict[str, list[str]]:
    return {name: [shape["model"] for shape in shapes() if not why_not(shape, *case)] for name, case in CASES.items()}


def on_page() -> tuple[str, str, str]:
    """The page before its table, the table, and what comes after."""
    before, mark, rest = PAGE.read_text().partition("| model | groups on a GPU |")
    if not mark:
        raise SystemExit(f"{PAGE} has no table of models")
    body, end, after = rest.partition("\n\n## ")
    return before, mark + body, end + after


def check() -> None:
    kept, found = read(KEPT), now()
    lost = [f"{model} on {case}" for case in CASES for model in kept.get(case, ()) if model not in found[case]]
    if lost:
        raise SystemExit(f"no longer served (served.py says why): {', '.join(lost)}")
    if found != kept or on_page()[1].strip() != table():
        raise SystemExit(f"{KEPT.name} or the table of {PAGE.name} is not as it is now: served.py --keep")


def keep() -> None:
    KEPT.write_text(json.dumps(now(), indent=1) + "\n")
    before, _, after = on_page()
    PAGE.write_text(before + table() + (after or "\n"))


def main(args: list[str]) -> None:
    logging.disable(logging.WARNING)
    modes: dict[str, Callable[[], None]] = {"": tell, "--groups": tell_groups, "--table": lambda: print(table()), "--check": check, "--keep": keep}
    mode = modes.get(" ".join(args))
    if mode is None:
        raise SystemExit(__doc__)
    mode()


if __name__ == "__main__":
    main(sys.argv[1:])
