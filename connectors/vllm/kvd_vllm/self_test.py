"""Whether kvd copies what the engine sees: random bytes written through the engine's own tensors must arrive in another block of all layers, and in no third one.
The worker's own self-test cannot tell: it writes and reads by the very description that this one checks."""

from __future__ import annotations

from typing import Any

from kvd_vllm import _kvd
from kvd_vllm.errors import Declined

FROM, TO = 1, 2
LOOKED_AT = 4  # blocks: those two and their neighbours


def run(worker: Any, group: int, tensors: list[Any], num_blocks: int) -> None:
    """Declined: the cache does not have the layout that was described."""
    import torch

    def to_bytes(tensor: Any) -> Any:  # compared as bytes: random ones may be no number
        return tensor.cpu().contiguous().view(torch.uint8)

    def synchronize() -> None:
        if tensors[0].device.type == "cuda":
            torch.cuda.synchronize(tensors[0].device)

    if num_blocks < LOOKED_AT:
        raise Declined(f"a cache of {num_blocks} blocks is too small for the self-test")
    views = [tensor.unflatten(0, (num_blocks, -1))[:LOOKED_AT] for tensor in tensors]
    before = [view.clone() for view in views]
    generator = torch.Generator().manual_seed(group)
    try:
        wanted = []
        for view in views:
            random = torch.randint(0, 256, (view[FROM].numel() * view.element_size(),), dtype=torch.uint8, generator=generator)
            view[FROM].copy_(random.view(view.dtype).reshape(view[FROM].shape))
            wanted.append(to_bytes(view).clone())
            wanted[-1][TO] = wanted[-1][FROM]
        synchronize()
        status = worker.roundtrip_test(group, FROM, TO)
        if status != _kvd.OK:
            raise Declined(f"self-test: group {group}: {_kvd.status_name(status)}")
        for layer, view in enumerate(views):
            if not torch.equal(to_bytes(view), wanted[layer]):
                raise Declined(f"self-test: group {group}, layer {layer}: other bytes arrived, or in other blocks than asked for")
    finally:
        for view, saved in zip(views, before):
            view.copy_(saved)
        synchronize()
