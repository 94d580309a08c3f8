"""The baseline: a connector that keeps one file per block, read and written synchronously. It must pass the same tests of correctness as kvd."""
from __future__ import annotations

import hashlib
import os
import pathlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class NaiveMetadata(KVConnectorMetadata):
    loads: list[tuple[int, str]] = field(default_factory=list)  # block, file
    saves: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Followed:
    """A request that has blocks."""
    request: Request
    table: list[int] = field(default_factory=list)
    saved: int = 0  # blocks from the start that are stored, or on their way


def folder(config: VllmConfig, root: str) -> pathlib.Path:
    model = config.model_config
    weights = hashlib.sha256()
    for path in sorted(pathlib.Path(model.model).glob("*")):
        weights.update(path.read_bytes())
    path = pathlib.Path(root) / f"{weights.hexdigest()[:16]}-{model.dtype}-{config.cache_config.block_size}"
    path.mkdir(parents=True, exist_ok=True)
    return path


class NaiveConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.block_tokens = vllm_config.cache_config.block_size
        self.path = folder(vllm_config, self._kv_transfer_config.get_from_extra_config("path", "/dev/shm/naive"))
        self.followed: dict[str, Followed] = {}
        self.pending: list[tuple[int, str]] = []
        self.pages: list[numpy.ndarray] = []  # per layer: a row of bytes per block
        self.bad: set[int] = set()

    # The scheduler's side

    def file(self, request: Request, i: int) -> str:
        return str(self.path / bytes(request.block_hashes[i]).hex())

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        first = num_computed_tokens // self.block_tokens
        last = min(len(request.block_hashes), (request.num_tokens - 1) // self.block_tokens)
        end = first
        while end < last and os.path.exists(self.file(request, end)):
            end += 1
        return (end - first) * self.block_tokens, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        table = list(blocks.get_block_ids()[0])
        followed = self.followed[request.request_id] = Followed(request, table)
        if num_external_tokens == 0:
            return
        n = num_external_tokens // self.block_tokens
        end = self.get_num_new_matched_tokens(request, 0)[0] // self.block_tokens
        first = max(0, end - n)
        self.pending += [(table[i], self.file(request, i)) for i in range(first, first + n)]
        followed.saved = first + n

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> NaiveMetadata:
        meta = NaiveMetadata(loads=self.pending)
        self.pending = []
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self.advance(new.req_id, list(new.block_ids[0]), True, new.num_computed_tokens + scheduled[new.req_id], meta)
        cached = scheduler_output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            ids = list(cached.new_block_ids[i][0]) if cached.new_block_ids[i] else []
            self.advance(name, ids, name in cached.resumed_req_ids, cached.num_computed_tokens[i] + scheduled[name], meta)
        return meta

    def advance(self, name: str, ids: list[int], replace: bool, computed: int, meta: NaiveMetadata) -> None:
        followed = self.followed[name]
        followed.table = ids if replace else followed.table + ids
        end = min(computed // self.block_tokens, len(followed.request.block_hashes), len(followed.table))
        for i in range(min(followed.saved, end), end):
            if not os.path.exists(self.file(followed.request, i)):
                meta.saves.append((followed.table[i], self.file(followed.request, i)))
        followed.saved = end

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.followed.pop(request.request_id, None)
        return False, None

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for tensor in kv_caches.values():
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            size, stride = tensor.element_size(), tensor.stride(0) * tensor.element_size()
            page = tensor[0].numel() * size
            self.pages.append(raw.as_strided((tensor.shape[0], page), (stride, 1), tensor.storage_offset() * size).numpy())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for block, path in self._get_connector_metadata().loads:
            try:
                data = numpy.fromfile(path, dtype=numpy.uint8)
                for page, row in zip(self.pages, numpy.split(data, len(self.pages)), strict=True):
                    page[block] = row
            except (OSError, ValueError):
                self.bad.add(block)

    def wait_for_save(self) -> None:
        if self.bad:
            return  # what was computed on top of a failed load is not to be kept
        for block, path in self._get_connector_metadata().saves:
            scratch = f"{path}.{os.getpid()}"
            try:
                with open(scratch, "wb") as f:
                    f.writelines(memoryview(page[block]) for page in self.pages)
                os.rename(scratch, path)
            except OSError:
                pass  # not stored, that is all

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self.bad = self.bad, set()
        return bad

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass
