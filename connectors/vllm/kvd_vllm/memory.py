"""The weights as they lie in a rank's memory: read once they are loaded, and compared when the scheduler half asks. (Decision 071.)

Parameters and buffers are digested. What a layer of a CPU has packed for its library cannot be read. It is never written after it was made, and new weights are packed anew:
as long as the same objects are there, the weights are those that were loaded. Workspaces are no weights, and adapters have names of their own."""

from __future__ import annotations

import hashlib
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvd_vllm.proof import OTHER, SAME, UNKNOWN, Answer, find_self

logger = logging.getLogger("vllm.kvd")

PACKED = ("CPUDNNLGEMMHandler",)  # classes of packed weights
NO_WEIGHTS = ("workspace", "kv_cache")
DRAFTS = ("drafter", "speculator")
SHOWN = 3  # names of tensors that have changed


class Unreadable(Exception):
    """What the weights are cannot be found out."""


def find_runner() -> Any:
    """The model runner that is registering its cache now, or None."""
    return find_self("get_model")


def _models(runner: Any) -> list[tuple[str, Any]]:
    """The model, and one that drafts: both have layers in the cache."""
    drafts = [(name, getattr(getattr(runner, name, None), "model", None)) for name in DRAFTS]
    return [("", runner.get_model())] + [(f"{name}.", model) for name, model in drafts if hasattr(model, "named_parameters")]


@dataclass
class Contents:
    """Tensors by name, each with a text of its shape; and what is packed."""

    tensors: dict[str, tuple[str, Any]] = field(default_factory=dict)
    packed: dict[str, Any] = field(default_factory=dict)


def _parts(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """A tensor that is made of others (quantised weights)."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
        return
    for part in flatten()[0]:
        yield from _parts(f"{name}.{part}", getattr(tensor, part))


def _is_dense(tensor: Any) -> bool:
    """Its elements fill a range of memory, in whatever order."""
    span = 1 + sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride()))
    return all(stride >= 0 for stride in tensor.stride()) and span == tensor.numel()


def _add_tensor(found: Contents, name: str, tensor: Any) -> None:
    for part, data in _parts(name, tensor):
        if data.is_meta:
            raise Unreadable(f"{part} is not loaded")
        data = data.detach()
        shape = f"{data.dtype} {tuple(data.shape)} {tuple(data.stride())}"
        found.tensors[part] = shape, data if _is_dense(data) else data.contiguous()


def _held_by(value: Any) -> Iterator[Any]:
    """What the attribute of a layer holds: itself, or what its function has captured."""
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            yield cell.cell_contents
    else:
        yield value


def _add_packed(found: Contents, name: str, module: Any) -> bool:
    """Weights of a layer that are no parameters. True: there are some."""
    import torch

    count = 0
    for attribute, value in vars(module).items():
        captured = isinstance(value, types.FunctionType)
        for held in _held_by(value):
            if type(held).__name__ in PACKED:
                found.packed[f"{name}.{attribute}"] = held
                count += 1
            elif captured and isinstance(held, torch.Tensor):
                _add_tensor(found, f"{name}.{attribute}", held)
                count += 1
    return count > 0


def read(models: list[tuple[str, Any]]) -> Contents:
    """Unreadable."""
    found = Contents()
    for prefix, model in models:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not any(word in name for word in NO_WEIGHTS):
                _add_tensor(found, prefix + name, tensor)
        for name, module in model.named_modules():
            packed = _add_packed(found, prefix + name, module)
            if not packed and any(parameter.numel() == 0 for parameter in module.parameters(recurse=False)):
                raise Unreadable(f"the weights of {prefix + name} are not where its parameters are")
    if not found.tensors:
        raise Unreadable("the model has no weights")
    return found


class Memory:
    """Of a rank. digest: of ranges of memory, [(address, bytes)] -> [bytes]. Tensors are kept alive while they are read, and not longer."""

    def __init__(self, runner: Any, rank: int, digest: Callable[[list[tuple[int, int]]], list[bytes]], moves_experts: bool, device: str) -> None:
        self.runner, self.rank, self.digest, self.device = runner, rank, digest, device
        self.proofs: list[Answer] = []  # not reported yet; from any thread
        self.tensors: dict[str, str] = {}
        self.packed: dict[str, weakref.ref[Any]] = {}
        self.reason = "its experts are moved between ranks" if moves_experts else "the model was not found" if runner is None else ""
        if self.reason:
            return
        try:
            found = read(_models(runner))
            self.tensors = self._digests(found)
            self.packed = {name: weakref.ref(held) for name, held in found.packed.items()}
        except Exception as error:
            self.reason = f"the weights cannot be read: {error}"

    def _digests(self, found: Contents) -> dict[str, str]:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        ranges = [(data.data_ptr(), data.numel() * data.element_size()) for _, data in found.tensors.values()]
        digests = self.digest(ranges)
        return {name: f"{shape} {digest.hex()}" for (name, (shape, _)), digest in zip(found.tensors.items(), digests, strict=True)}

    def prove(self, number: int) -> None:
        """On a GPU before it returns, else in a thread. The answer is then in `proofs`."""
        if self.device == "cuda":
            self._prove(number)
        else:
            threading.Thread(target=self._prove, args=(number,), name="kvd-proof", daemon=True).start()

    def _prove(self, number: int) -> None:
        try:
            self.proofs.append(self._compare(number))
        except Exception as error:
            self.proofs.append(Answer(number, self.rank, UNKNOWN, reason=f"the weights cannot be read: {error}"))

    def _compare(self, number: int) -> Answer:
        if self.reason:
            return Answer(number, self.rank, UNKNOWN, reason=self.reason)
        found = read(_models(self.runner))
        if found.packed.keys() != self.packed.keys() or any(self.packed[name]() is not held for name, held in found.packed.items()):
            return Answer(number, self.rank, UNKNOWN, reason="packed weights were replaced, and cannot be read")
        now = self._digests(found)
        changed = [name for name in now.keys() | self.tensors.keys() if now.get(name) != self.tensors.get(name)]
        if changed:
            logger.info("kvd: rank %d: %d of %d tensors are not as they were loaded: %s", self.rank, len(changed), len(now), ", ".join(sorted(changed)[:SHOWN]))
        text = "\n".join(f"{name} {now[name]}" for name in sorted(now))
        return Answer(number, self.rank, OTHER if changed else SAME, hashlib.sha256(text.encode()).hexdigest(), bool(self.packed))
