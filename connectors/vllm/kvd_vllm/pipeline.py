"""Which layers each pipeline parallel rank has, and where they lie in a block. A rank's configuration names its own layers only, and the scheduler half sees that of the
first stage. So each half computes the layers of all stages as vLLM does, and checks its own against them. When all have the same space, all layers are proved. (Decision 100.)"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvd_vllm.errors import Declined


@dataclass(frozen=True)
class Stages:
    names: tuple[tuple[str, ...], ...]  # of each KV cache group: its layers in all stages
    counts: tuple[tuple[int, ...], ...]  # of each KV cache group: how many of them each stage has
    own: int  # the stage of this half's configuration


def stages_of(vllm_config: Any, kv_cache_groups: Sequence[Any], regroup: Callable[[Any, dict[str, Any]], Any] | None) -> Stages:
    """regroup: vLLM's own grouping of layers, if it is known. Declined: where the layers of other stages lie cannot be proved."""
    count = int(vllm_config.parallel_config.pipeline_parallel_size)
    own = [tuple(group.layer_names) for group in kv_cache_groups]
    if count == 1:
        return Stages(tuple(own), tuple((len(group),) for group in own), 0)
    bounds = _bounds(vllm_config.model_config, count)
    template, numbers = _numbers(own)
    stage = next((s for s, (first, end) in enumerate(bounds) if sorted(numbers.values()) == list(range(first, end))), None)
    if stage is None:
        raise Declined(f"a pipeline stage caches {len(numbers)} layers that are not those which the model's configuration gives to a stage ({_text(bounds)})")
    names = _regroup(regroup, vllm_config, kv_cache_groups, template, numbers, bounds[-1][1]) if len(own) > 1 else [tuple(template.format(i) for i in range(bounds[-1][1]))]
    return _place(names, own, template, bounds, stage)


def _bounds(model: Any, count: int) -> list[tuple[int, int]]:
    """First layer and end of each stage."""
    from vllm.distributed.utils import get_pp_indices

    total = int(model.get_total_num_hidden_layers())
    return [tuple(get_pp_indices(total, stage, count)) for stage in range(count)]


def _text(bounds: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{first} to {end - 1}" for first, end in bounds)


def _numbers(own: Sequence[tuple[str, ...]]) -> tuple[str, dict[str, int]]:
    """The name of a layer with {} in the place of its number, and the number of each layer."""
    found, templates = {}, set()
    for name in (name for layers in own for name in layers):
        parts = re.split(r"(?<![^.])(\d+)(?![^.])", name)
        if len(parts) != 3 or "{" in name or "}" in name:
            raise Declined(f"over pipeline stages the name of a layer must have one number, and {name} does not")
        found[name] = int(parts[1])
        templates.add("{}".join(parts[::2]))
    if len(templates) != 1:
        raise Declined("over pipeline stages the names of layers must differ in their number alone")
    return templates.pop(), found


def _regroup(regroup: Any, vllm_config: Any, groups: Sequence[Any], template: str, numbers: dict[str, int], total: int) -> list[tuple[str, ...]]:
    """Layers of each group in all stages: vLLM's own grouping, of layers that are all of a type which this stage has, too."""
    if regroup is None:
        raise Declined("several KV cache groups over pipeline stages are not served under this vLLM: it groups layers in a way that kvd does not know")
    types = list(getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or ())
    if len(types) != total:
        raise Declined("several KV cache groups over pipeline stages are served only of models whose configuration names the type of each layer")
    specs: dict[str, Any] = {}
    for group in groups:
        for name in group.layer_names:
            if specs.setdefault(types[numbers[name]], group.kv_cache_spec) != group.kv_cache_spec:
                raise Declined(f"layers of type {types[numbers[name]]} are in KV cache groups of different kinds")
    if not set(types) <= specs.keys():
        raise Declined("a pipeline stage has no layer of some KV cache group")
    try:
        made = regroup(vllm_config, {template.format(i): specs[kind] for i, kind in enumerate(types)})
    except Exception as error:
        raise Declined(f"vLLM does not group the layers of all pipeline stages: {error!r}") from error
    return [tuple(group.layer_names) for group in made]


def _place(names: list[tuple[str, ...]], own: list[tuple[str, ...]], template: str, bounds: list[tuple[int, int]], stage: int) -> Stages:
    """In a block a group's layers of one stage lie behind those of the stage before it."""
    stage_of = {template.format(i): s for s, (first, end) in enumerate(bounds) for i in range(first, end)}
    split = [[tuple(name for name in group if stage_of[name] == s) for s in range(len(bounds))] for group in names]
    if [parts[stage] for parts in split] != own or any(sum(parts, ()) != group for parts, group in zip(split, names)):
        raise Declined("the KV cache groups of a pipeline stage are not those that the layers of all stages have")
    if not all(part for parts in split for part in parts):
        raise Declined("a pipeline stage has no layer of some KV cache group")
    return Stages(tuple(names), tuple(tuple(map(len, parts)) for parts in split), stage)
