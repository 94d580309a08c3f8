"""A connector with faults that only tests have: it changes what another connector has loaded. In a single-process engine, where both halves meet.

KVD_TEST_BASE names the connector below it (module:class). faulty.set_fault(engine, fault, value) arms a fault, from inside the engine's process:
    zeros        every block that is loaded becomes zeros
    page         every eighth block that is loaded gets, in one layer, the page of its neighbour
    delay        a step's loads begin `value` milliseconds late
    draft        a block is saved before the step that overwrites its rejected drafts (one request at a time)
"""
from __future__ import annotations

import functools
import importlib
import os
import struct
import time
from typing import Any, Callable

import numpy
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

module_name, _, class_name = os.environ.get("KVD_TEST_BASE", "naive:NaiveConnector").partition(":")
Base: Any = getattr(importlib.import_module(module_name), class_name)
Places = list[list[int]]  # per group: blocks


class State:
    """Of the process: both halves of the connector see it."""

    def __init__(self) -> None:
        self.fault = ""
        self.value = 0.0
        self.corrupted = 0
        self.errors = 0  # blocks that were reported as not loaded
        self.rows: dict[str, numpy.ndarray] = {}
        self.group_of: dict[str, int] = {}
        self.now: list[Places] = []  # loaded inside the coming step
        self.later: dict[str, Places] = {}  # by request: loaded asynchronously
        self.written = 0  # tokens whose places the last step has written, drafts too


state = State()


def set_fault(_engine: Any, fault: str, value: float = 0.0) -> int:
    """Returns how many pages (draft: blocks) were corrupted since the last call."""
    corrupted, state.corrupted = state.corrupted, 0
    state.fault, state.value = fault, value
    return corrupted


def load_errors(_engine: Any) -> int:
    """Blocks whose load has failed since the last call."""
    errors, state.errors = state.errors, 0
    return errors


def corrupt(places: Places) -> None:
    for number, (layer, rows) in enumerate(state.rows.items()):
        blocks = [b for b in places[state.group_of[layer]] if b != 0]
        if state.fault == "zeros":
            rows[blocks] = 0
            state.corrupted += len(blocks)
        elif state.fault == "page" and number == 1:
            for i in range(0, len(blocks) - 1, 8):
                rows[blocks[i]] = rows[blocks[i + 1]]
                state.corrupted += 1


SAVE, EARLY = 4, 4  # connectors/step/message.h: KVX_RECORD_SAVE, KVX_MSG_COMPLETE


def early(plan: bytes) -> tuple[bytes, int]:
    """The message with all saves of the end of the step moved before it; how many blocks."""
    out, at, count = bytearray(plan), 16, 0
    while at < len(out):
        kind, size = struct.unpack_from("II", out, at)
        if kind == SAVE:
            flags, n = struct.unpack_from("II", out, at + 16)
            count += n if not flags & EARLY else 0
            struct.pack_into("I", out, at + 16, flags | EARLY)
        at += size
    return bytes(out), count


def rows_of(tensor: torch.Tensor) -> numpy.ndarray:
    """A block's page of this layer, as a row of bytes that can be written."""
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    size = tensor.element_size()
    return raw.as_strided((tensor.shape[0], tensor[0].numel() * size), (tensor.stride(0) * size, 1), tensor.storage_offset() * size).numpy()


class FaultyConnector(Base):
    """Stands between the engine and the hooks of the connector below, which may be methods or attributes of the instance."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.asked: tuple[str, int, bool] = ("", 0, False)
        self.block = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        if role == KVConnectorRole.SCHEDULER:
            self.wrap("get_num_new_matched_tokens", self.match)
            self.wrap("update_state_after_alloc", self.placed)
            self.wrap("build_connector_meta", self.planned)

    def wrap(self, hook: str, around: Callable[..., Any]) -> None:
        setattr(self, hook, functools.partial(around, getattr(self, hook)))

    def match(self, inner: Callable[..., Any], request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, beside = inner(request, num_computed_tokens)
        if tokens:
            self.asked = (request.request_id, num_computed_tokens, beside)
        return tokens, beside

    def placed(self, inner: Callable[..., Any], request: Any, blocks: Any, num_external_tokens: int) -> None:
        inner(request, blocks, num_external_tokens)
        if not num_external_tokens or not state.fault:
            return
        name, local, beside = self.asked
        assert name == request.request_id
        sizes = [group.kv_cache_spec.block_size for group in self._kv_cache_config.kv_cache_groups]
        places = [list(ids[local // size:(local + num_external_tokens) // size]) for ids, size in zip(blocks.get_block_ids(), sizes)]
        if beside:
            state.later[name] = places
        else:
            state.now.append(places)

    def planned(self, inner: Callable[..., Any], output: Any) -> Any:
        """A connector that takes what was scheduled for computed would save a block as soon as its last place was written, be it with a draft."""
        meta, cached = inner(output), output.scheduled_cached_reqs
        if state.fault == "draft" and len(cached.req_ids) == 1:
            had = cached.num_computed_tokens[0]
            if state.written // self.block * self.block > had and meta.message:  # a block's end was written, and then rejected
                plan, count = early(meta.message)
                meta = type(meta)(plan)
                state.corrupted += count
            state.written = had + output.num_scheduled_tokens[cached.req_ids[0]]
        else:
            state.written = 0
        return meta

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        state.rows = {layer: rows_of(tensor) for layer, tensor in kv_caches.items()}
        state.group_of = {layer: i for i, group in enumerate(self._kv_cache_config.kv_cache_groups) for layer in group.layer_names}
        self.wrap("start_load_kv", self.load)
        self.wrap("get_transfer_results", self.results)
        self.wrap("get_block_ids_with_load_errors", self.errors)

    def load(self, inner: Callable[..., Any], *arguments: Any, **more: Any) -> None:
        if state.fault == "delay":
            time.sleep(state.value / 1e3)
        inner(*arguments, **more)
        for places in state.now:
            corrupt(places)
        state.now = []

    def errors(self, inner: Callable[[], set[int]]) -> set[int]:
        blocks = inner()
        state.errors += len(blocks or ())
        return blocks

    def results(self, inner: Callable[..., Any], finished_req_ids: set[str]) -> Any:
        results = inner(finished_req_ids)
        for name in results.finished_recving if results else ():
            if name in state.later:
                corrupt(state.later.pop(name))
        return results
