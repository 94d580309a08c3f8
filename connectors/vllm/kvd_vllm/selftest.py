"""Proof that what kvd copies is what the engine sees: a pattern written through the engine's own tensor view must arrive in another block, and nowhere else."""

from __future__ import annotations

from typing import Any

from kvd_vllm import _kvd
from kvd_vllm.errors import Declined

FROM, TO = 1, 2
TOUCHED = (0, 1, 2, 3)


def _rows(tensor: Any, num_blocks: int, block: int) -> Any:
    pieces = tensor.shape[0] // num_blocks
    return tensor[block * pieces : (block + 1) * pieces]


def _pattern(rows: Any, seed: int) -> Any:
    """Bytes of a generator seen through the tensor's own type: every bit pattern, not only those of sensible numbers."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    bytes_ = torch.randint(0, 256, (rows.numel() * rows.element_size(),), dtype=torch.uint8, generator=generator)
    return bytes_.view(rows.dtype).reshape(rows.shape)


def _same(a: Any, b: Any) -> bool:
    """By bytes: a pattern may be no number."""
    import torch

    return bool(torch.equal(a.contiguous().view(torch.uint8).cpu(), b.contiguous().view(torch.uint8).cpu()))


def _settle(tensor: Any) -> None:
    """What was written through a GPU tensor is there before others copy it."""
    if tensor.device.type == "cuda":
        import torch

        torch.cuda.synchronize(tensor.device)


def _check(group: int, before: list[dict[int, Any]], patterns: list[Any], tensors: list[Any], num_blocks: int) -> None:
    for layer, tensor in enumerate(tensors):
        if not _same(_rows(tensor, num_blocks, TO), patterns[layer]):
            raise Declined(f"self-test: group {group}, layer {layer}: other bytes arrived")
        for block in TOUCHED:
            expected = patterns[layer] if block == FROM else before[layer][block]
            if block != TO and not _same(_rows(tensor, num_blocks, block), expected):
                raise Declined(f"self-test: group {group}, layer {layer}: block {block} was written although nobody asked")


def run(worker: Any, group: int, tensors: list[Any], num_blocks: int) -> None:
    """Declined: this layout is not what we took it for."""
    if num_blocks < len(TOUCHED):
        raise Declined(f"a cache of {num_blocks} blocks is too small for the self-test")
    before = [{block: _rows(tensor, num_blocks, block).clone() for block in TOUCHED} for tensor in tensors]
    patterns = [_pattern(_rows(tensor, num_blocks, FROM), 1000 * group + layer) for layer, tensor in enumerate(tensors)]
    try:
        for tensor, pattern in zip(tensors, patterns):
            _rows(tensor, num_blocks, FROM).copy_(pattern)
        _settle(tensors[0])
        status = worker.roundtrip_test(group, FROM, TO)
        if status != _kvd.OK:
            raise Declined(f"self-test: group {group}: {_kvd.status_name(status)}")
        _check(group, before, patterns, tensors, num_blocks)
    finally:
        for tensor, saved in zip(tensors, before):
            for block, rows in saved.items():
                _rows(tensor, num_blocks, block).copy_(rows)
        _settle(tensors[0])
