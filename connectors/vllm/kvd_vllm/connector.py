"""KvdConnector: the class that vLLM loads. The hooks that run every step are methods of the C objects, bound as attributes of the instance. The code here runs at
start and at shutdown. After an error at start, and for a cache that is not served, all hooks of the connector do nothing."""

from __future__ import annotations

import logging
import pathlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvd_vllm import _kvd, compat, digests, identity, layout, limits, memory, multi, options, proof, recovery, self_test, weights
from kvd_vllm.attendant import Attendant
from kvd_vllm.errors import CircuitBreaker, Declined
from kvd_vllm.handover import Handovers
from kvd_vllm.metrics import KvdPromMetrics, KvdStats

logger = init_logger("vllm.kvd")

ATTACH_S = 0.25
CANCEL_S = 1.0
MODES = {"auto": 0, "sync": 1, "async": 2}


class KvdMetadata(KVConnectorMetadata):
    """The message of a step: bytes that only the C halves read."""

    __slots__ = ("message",)

    def __init__(self, message: bytes) -> None:
        self.message = message

    def __reduce__(self) -> tuple:
        return KvdMetadata, (self.message,)


class KvdProvingMetadata(KvdMetadata):
    """Asks the ranks as well what the weights in their memory are."""

    __slots__ = ("number",)

    def __init__(self, message: bytes, number: int) -> None:
        super().__init__(message)
        self.number = number

    def __reduce__(self) -> tuple:
        return KvdProvingMetadata, (self.message, self.number)


@dataclass
class KvdReports(KVConnectorWorkerMetadata):
    """Reports of the ranks about a step, and what their weights are where they were asked."""

    reports: list[bytes] = field(default_factory=list)
    proofs: list[proof.Answer] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return KvdReports(self.reports + other.reports, self.proofs + other.proofs)


@dataclass
class KvdHandshake(KVConnectorHandshakeMetadata):
    """Sent by a rank at start: digests of its space and of the weight files it sees, the UUID of its GPU, the node it runs on, or the reason why it serves nothing."""

    space: str = ""
    files: str = ""
    reason: str = ""
    device: str = ""
    node: str = ""


def _rank(vllm_config: Any) -> int:
    """Among those that hold a part of each block: vLLM's order, tensor parallel ranks within pipeline stages. Replicas have the same ones."""
    parallel = vllm_config.parallel_config
    try:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        return int(get_pp_group().rank_in_group * parallel.tensor_parallel_size + get_tp_group().rank_in_group)
    except (AssertionError, ImportError):
        return int(getattr(parallel, "rank", 0)) % (parallel.pipeline_parallel_size * parallel.tensor_parallel_size)


def _node() -> str:
    """Empty: not known."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _parts(layer: Any) -> list[Any]:
    """The tensors of a layer: one, but of a layer with states in some releases one for each of them."""
    return list(layer) if isinstance(layer, (list, tuple)) else [layer]


class KvdConnector(KVConnectorBase_V1, SupportsHMA):
    """An object for each half: `role` says which."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._half = "scheduler" if role == KVConnectorRole.SCHEDULER else "worker"
        self._breaker = CircuitBreaker(logger)
        self._breaker.on_open = self._switch_off
        self._space: Any = None  # identity.Space
        self._c: Any = None
        self._reason = ""
        self._device = ""  # of a rank: the GPU whose memory the daemon may lend
        self._adapters: weights.Adapters | None = None
        self._attendant: Attendant | None = None
        self._naming: proof.Naming | None = None
        self._loaded: memory.Memory | None = None
        self._report: Any = None  # the hook that _report_proofs replaces
        self._seed_checked = False
        self._manager: Any = None
        self._pool: Any = None
        self._ways_told = False
        self._compat = compat.probe()
        parent = multi.parent()
        self._child = parent is not None
        self._unheard = self._child and not self._separate_children(parent)
        self._attempt("start", lambda: self._open(vllm_config, kv_cache_config))

    # ---- start and end ---------------------------------------------------------------------------------------------

    def _attempt(self, when: str, open_half: Callable[[], None]) -> None:
        """Whatever goes wrong in it leaves a half that does nothing."""
        try:
            open_half()
        except Exception as error:
            self._close()
            declined = isinstance(error, Declined)
            if not declined:
                self._breaker.error(when, error)
            self._decline(str(error) if declined else f"internal error at {when}: {error!r}")

    def _open(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._options, complaints = options.parse(dict(self._kv_transfer_config.kv_connector_extra_config or {}))
        self._breaker.most = self._options["max_errors"]
        for complaint in complaints:
            logger.warning("kvd: %s", complaint)
        self._space = identity.describe(vllm_config, kv_cache_config, self._options, self._compat)
        groups, mode = self._space.groups, compat.mode_of(vllm_config, self._compat["version"])
        self._ways = compat.load_ways(mode, self._options["mode"], compat.only_async(groups))
        if identity.needs_recovery(groups, self._compat):
            if untried := compat.untried_groups(mode):
                raise Declined(untried)
            self._ways = replace(self._ways, preempts=True)
        if self._half == "scheduler":
            self._open_scheduler()

    def _separate_children(self, parent: Any) -> bool:
        """Whether the MultiConnector above passes this half's handshake to the other one, and to no other child."""
        try:
            extra = self._kv_transfer_config.kv_connector_extra_config or {}
            return multi.separate_children(parent, options.parse({"handover": extra.get("handover")})[0]["handover"])
        except Exception as error:
            self._breaker.error("start", error)
            return False

    def _decline(self, reason: str) -> None:
        self._reason = reason
        logger.warning("kvd: the %s half does nothing: %s", self._half, reason)

    def _switch_off(self, reason: str) -> None:
        self._decline(reason + "; switched off")
        if self._c is not None and self._half == "scheduler":
            self._c.set_enabled(False)

    def _common(self) -> dict[str, Any]:
        """What both halves of the C side are given. They take the options that they know."""
        instance, secret = identity.membership(str(self._kv_transfer_config.engine_id))
        return {
            **self._options,
            "instance": instance,
            "secret": secret,
            "program": f"vllm {self._compat['version']} {self._half}",
            "identity": self._space.identity,
            "layouts": [blocks.block.fields() for blocks in self._space.blocks],
            "circuit_breaker": self._breaker,
        }

    def _recompute_failed_loads(self) -> None:
        """vLLM's default policy fails a request whose load has failed. vLLM reads the policy after it has made the connector."""
        config = self._kv_transfer_config
        if config.kv_load_failure_policy != "recompute":
            logger.warning("kvd: kv_load_failure_policy is %r; set to 'recompute', so that a failed load costs time and not the request", config.kv_load_failure_policy)
            config.kv_load_failure_policy = "recompute"

    def _preempt_failed_loads(self) -> None:
        """Recovery of a failed load in this engine. Without it loads are asynchronous, and of one KV group."""
        from vllm.v1.core.sched.scheduler import Scheduler

        try:
            recovery.install(Scheduler)
        except ValueError as error:
            if identity.needs_recovery(self._space.groups, self._compat):
                raise Declined(f"several KV cache groups: {error}") from error
            self._ways = compat.LoadWays(frozenset(), f"loads are asynchronous: {error}", True)

    def _open_scheduler(self) -> None:
        space, config = self._space, self._kv_transfer_config
        self._recompute_failed_loads()
        if self._ways.preempts:
            self._preempt_failed_loads()
        adapters = self._adapters = weights.Adapters(digests.Digester())
        wanted = self._options["handover"]
        sides = wanted and config.is_kv_producer, wanted and config.is_kv_consumer
        where = self._options["handover_peer"], self._options["prefill_device"], self._options["handover_device"] == "own"
        handovers = Handovers(str(config.engine_id), space.tensor_ranks, *sides, self._child, *where)
        c = self._c = _kvd.Scheduler(
            {
                **self._common(),
                "meta_class": KvdMetadata,
                "stats_class": self._scheduler_stats,
                "lora_text": adapters.text,
                "forget": self._forget,
                "reprove": lambda: self._suspend("so much was saved that it could not be taken back"),
                "find_transfer": handovers.find if wanted else lambda request: None,
                "transfer_params": handovers.params,
                "find_limits": limits.find,
                "unit_extras": lambda request, at, units: identity.unit_extras(request, at, units, space.hash_tokens),
                "group_tokens": [group.block_tokens for group in space.groups],
                "group_tables": [group.table for group in space.groups],
                "hash_tokens": space.hash_tokens,
                "writers": space.writers(),
                "max_blocks": space.max_blocks,
                "foreign": space.foreign,
                "mode": MODES[self._options["mode"] if "sync" in self._ways.ways else "async"],
                "defer_shared": not self._ways.preempts,  # where recovery.py preempts, it preempts these too
                "loads": config.is_kv_consumer,
                "saves": config.is_kv_producer,
                "publishable": bool(self._compat["publishable"]),
                "prefetch": self._prefetches(),
            }
        )
        kind = f"{self._compat['version']} {space.device} {space.kind()}"
        naming = self._naming = proof.Naming(self, c, space.world, kind, KvdProvingMetadata)
        self.get_num_new_matched_tokens = c.match
        self.build_connector_meta = c.build_meta
        self.update_connector_output = c.take_output
        self.update_state_after_alloc = c.add_blocks
        self.request_finished = c.finish_request
        self.request_finished_all_groups = c.finish_request
        self.has_pending_push_work = c.has_pending
        self.get_kv_connector_stats = c.take_stats
        self._attendant = Attendant(c)
        adapters.run(lambda: self._name_weights(adapters.digester, naming))
        logger.info("kvd: %s; %s", _kvd.version, compat.line(self._compat))
        logger.log(logging.WARNING if self._ways.refused else logging.INFO, "kvd: %s", self._ways.sentence)
        logger.info("kvd: block hashes: %s; groups %s; %s", space.hash_reason, space.identity["groups"], space.identity["layout"])

    def _name_weights(self, digester: digests.Digester, naming: proof.Naming) -> None:
        """Runs in a thread, as long as reading the weights takes. Nothing is matched or saved before its end, nor after an error."""
        space, began = self._space, time.monotonic()
        try:
            named = weights.name_weights(space.weights, digester, weights.process_start_ns())
            naming.begin(named.text)
        except digests.Cancelled:
            raise
        except Exception as error:
            logger.error("kvd: the weights have no name, so nothing is loaded or saved: %r", error)
            return
        files = len(space.weights.files)
        logger.info("kvd: weights %s after %.2f s: %.2f GB read, %d of %d files known before", named.text, time.monotonic() - began, digester.bytes / 1e9, digester.known, files)
        if named.private:
            logger.warning("kvd: no other engine finds this one's blocks, nor does it after a restart: %s; option weights names them", named.private)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager
        super().bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool
        if self._naming is not None:
            self._naming.watch(gpu_block_pool)

    def _forget(self, invalid: set[int], requests: dict[str, Any]) -> None:
        """Evict the blocks of a failed load, and those computed from them, from the engine's prefix cache. They are there since they were allocated, and the policy
        'recompute' does not remove them: until they are computed again, which may take many steps, another request would find garbage."""
        if self._pool is None:
            return
        blocks = set(invalid)
        for request_id in requests if self._manager is not None else ():
            for table in self._manager.get_block_ids(request_id):
                blocks.update(table[recovery.first_bad(table, invalid) :])
        self._pool.evict_blocks(blocks)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """All ranks have answered. Nothing is matched or saved before that."""
        if self._c is None or self._space is None:
            return
        answers = list(metadata.values())
        wrong = [why for why in map(self._find_mismatch, answers) if why]
        if len(answers) != self._space.world:
            wrong.append(f"{len(answers)} of {self._space.world} ranks have answered")
        if wrong:
            self._decline("; ".join(sorted(set(wrong))))
            return
        self._c.set_enabled(True)
        self._use_device(metadata)
        self._wait_for_daemon()
        waits = "the weights are being digested: everything is a miss until that is done" if not self._naming.base else "no daemon yet: everything is a miss until there is one"
        logger.info("kvd: all ranks serve their cache; on (%s)", "attached" if self._c.is_ready() else waits)

    def _use_device(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Memory of the GPU of rank 0, if the daemon has some there."""
        device = getattr(metadata[min(metadata)], "device", "")
        if device and self._space.foreign:
            status = self._c.set_device(device)
            logger.info("kvd: hot blocks are kept in memory of %s, where the daemon has some", device if status == _kvd.OK else f"no GPU ({_kvd.status_name(status)})")

    def _find_mismatch(self, rank: Any) -> str:
        """Why a rank's answer does not fit the scheduler half; empty: it does."""
        if not isinstance(rank, KvdHandshake) or rank.reason or rank.space != self._space.digest():
            return getattr(rank, "reason", "") or "another space"
        if rank.node and rank.node != _node():
            return "a rank runs on another node than the scheduler, and the daemon there has no part of this one's blocks"
        return "" if rank.files == self._space.weights.fingerprint() else "the scheduler's process sees other weight files than a rank; option weights names them"

    def _wait_for_daemon(self) -> None:
        """Once, at start. Otherwise the first request would miss, because the answer to the attachment is not read yet."""
        end = time.monotonic() + ATTACH_S
        while not self._c.is_ready() and time.monotonic() < end:
            self._c.has_pending()
            time.sleep(0.002)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): value for rank, value in metadata.items()})

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._unheard:
            return None  # another child would get it, and raise
        if self._space is None or self._c is None:
            return KvdHandshake(reason=self._reason or "no KV cache was registered")
        return KvdHandshake(space=self._space.digest(), files=self._space.weights.fingerprint(), reason=self._reason, device=self._device, node=_node())

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._space is not None:
            self._attempt("register_kv_caches", lambda: self._open_worker(kv_caches))

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """vLLM 0.25, model runner V1: one tensor for all layers, in the order its bytes lie."""

        def split() -> None:
            order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
            layers = layout.of_all_layers(kv_cache, order)
            names = [tensor.shared_by for tensor in self._kv_cache_config.kv_cache_tensors]
            if len(names) != layers.shape[0]:
                raise Declined(f"one tensor for {layers.shape[0]} layers, but {len(names)} are configured")
            self._open_worker({name: layers[i] for i, shared in enumerate(names) for name in shared})

        if self._space is not None:
            self._attempt("register_cross_layers_kv_cache", split)

    def _describe(self, tensors: list[list[Any]], rank: int) -> list[dict[str, Any]]:
        """Every group's cache as the C side takes it. `tensors`: of a group, of its layers; a layer with states may have several."""
        space = self._space
        described = []
        for number, (group, own) in enumerate(zip(space.groups, tensors)):
            _, head, _, layer, _ = space.held(number, rank)
            _, _, _, first, count = space.saved(number, rank)
            shape = space.blocks[number].shape
            if group.state:
                pages = [layout.states(_parts(layer), space.max_blocks, group.page_bytes) for layer in own]
            elif shape is None:
                pages = [layout.opaque(tensor, space.max_blocks, group.page_bytes) for tensor in own]
            else:
                pages = [layout.structured(tensor, space.max_blocks, shape) for tensor in own]
            described.append({**layout.paged(pages, group.number, layer, head, group.block_tokens), "save_layer_first": first, "save_layers": count})
        return described

    def _memory(self, tensors: list[Any]) -> dict[str, Any]:
        """The memory the cache is in, and the function that returns the engine's current stream."""
        space = self._space
        devices = {str(tensor.device) for tensor in tensors}
        if len(devices) != 1 or tensors[0].device.type != space.device:
            raise Declined(f"the cache lies on {', '.join(sorted(devices))}, not on one {space.device} device")
        if space.device != "cuda":
            return {"memory": _kvd.MEMORY_HOST, "device": 0, "measure": 0, "stream_of": None}
        import torch

        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (lambda index: torch.cuda.current_stream(index).cuda_stream)
        torch.cuda.synchronize()
        return {"memory": _kvd.MEMORY_CUDA, "device": tensors[0].device.index, "measure": 1, "stream_of": raw}

    def _find_device(self, tensor: Any) -> str:
        wanted = self._options["device"]
        if wanted != "auto" or self._space.device != "cuda":
            return "" if wanted in ("auto", "none") else wanted
        import torch

        uuid = getattr(torch.cuda.get_device_properties(tensor.device), "uuid", None)
        return f"GPU-{str(uuid).lower().removeprefix('gpu-')}" if uuid else ""

    def _layers(self) -> tuple[dict[str, int], tuple[Any, ...]] | None:
        """Layer names that the engine waits for, and the modes in which it does. None: loads come whole."""
        space, config = self._space, self._vllm_config
        if space.device != "cuda" or not self._options["layers"] or "layers" not in self._ways.ways or not self._compat["eager_modes"]:
            return None
        if len(space.groups) > 1 or getattr(config, "speculative_config", None) is not None or getattr(config.parallel_config, "use_ubatching", False):
            return None  # several groups have asynchronous loads; a draft model reads layers after the step's own; microbatches overlap
        return {name: number for number, name in enumerate(space.groups[0].layers)}, self._compat["eager_modes"]

    def _prefetches(self) -> bool:
        """Whether loads may begin when their step is planned: that needs one rank, whose halves share a process and a thread. The C side checks whether they do."""
        wanted = self._options["prefetch"] and "prefetch" in self._ways.ways
        return bool(wanted and self._compat["known_steps"] and int(getattr(self._vllm_config.parallel_config, "world_size", self._space.world)) == 1 and self._space.device == "cuda")

    def _open_worker(self, kv_caches: dict[str, Any]) -> None:
        space, megabytes = self._space, self._options["layers_mb"]
        rank = _rank(self._vllm_config)
        space.check_rank(rank)
        tensors = [[kv_caches[name] for name in group.layers] for group in space.groups]
        described = self._describe(tensors, rank)
        parts = [[part for layer in own for part in _parts(layer)] for own in tensors]
        everything = [part for own in parts for part in own]
        layers = self._layers()
        config = {
            **self._common(),
            **self._memory(everything),
            "meta_class": KvdMetadata,
            "prove": self._prove,
            "report_class": KvdReports,
            "results_class": self._compat["results"],
            "stats_class": self._worker_stats,
            "rank": rank,
            "groups": described,
            "layers": layers,
            "layer_bytes": megabytes << 20 or 1,
            "promote_rate": 1000000 * self._options["promote_mb_s"],
            "prefetch": self._prefetches(),
        }
        try:
            c = self._c = _kvd.Worker(config)
        except ValueError as error:
            raise Declined(str(error)) from error
        for group, own in zip(space.groups, parts):
            self_test.run(c, group.number, own, space.max_blocks)
        self._read_weights(c, rank)
        self._device = self._find_device(everything[0])
        self.handle_preemptions = c.begin_step
        self.bind_connector_metadata = c.start_async_loads
        self.start_load_kv = c.run_sync_loads
        self.wait_for_save = c.end_step
        if layers is not None:
            self.has_connector_metadata = c.wants_layers
            self.wait_for_layer_load = c.await_layer
            self.save_kv_layer = c.skip_save
            logger.info("kvd: rank %d: synchronous loads of %d MiB and more come layer by layer, once a step has waited for each of the %d layers", rank, megabytes, len(layers[0]))
        self.get_finished = c.take_finished
        if self._compat["results"] is not None:
            self.get_transfer_results = c.take_results
        self.get_block_ids_with_load_errors = c.take_failed_blocks
        self.build_connector_worker_meta = c.take_report
        self.get_kv_connector_stats = c.take_stats
        logger.info("kvd: rank %d: self-test passed for %d groups of %s layers", rank, len(tensors), "+".join(str(len(own)) for own in tensors))
        if space.device == "cuda":
            logger.info("kvd: rank %d: %s", rank, layout.describe(described[0]))

    def _read_weights(self, c: Any, rank: int) -> None:
        """What is compared after a reset. An engine that sleeps gives its cache's memory away, so what is still to be saved is read before."""
        runner, began = memory.find_runner(), time.monotonic()
        moves_experts = bool(getattr(self._vllm_config.parallel_config, "enable_eplb", False))
        found = self._loaded = memory.Memory(runner, rank, c.digest, moves_experts, self._space.device)
        if found.reason:
            logger.warning("kvd: rank %d: after a reset, a pause or a sleep the weights get a name of this engine's own: %s", rank, found.reason)
        else:
            logger.info("kvd: rank %d: %d tensors of weights read in %.3f s", rank, len(found.tensors), time.monotonic() - began)
        worker = proof.find_self("sleep")
        if worker is not None:
            proof.call_first(worker, "sleep", self._finish_saves)

    def unregister_kv_caches(self) -> None:
        """0.33: the cache's memory is about to be given away, by a sleep or without one."""
        self._finish_saves()

    def _finish_saves(self) -> None:
        try:
            if self._c is not None:
                self._c.flush(self._options["flush_ms"])
                self._c.finish_saves()
        except Exception as error:
            self._breaker.error("sleep", error)

    def _prove(self, meta: Any) -> None:
        if isinstance(meta, KvdProvingMetadata) and self._loaded is not None:
            if self.build_connector_worker_meta != self._report_proofs:
                self._report, self.build_connector_worker_meta = self.build_connector_worker_meta, self._report_proofs
            self._loaded.prove(meta.number)

    def _report_proofs(self) -> KvdReports | None:
        """Until the answer has gone out."""
        report, proofs = self._report(), self._loaded.proofs
        if proofs:
            self._loaded.proofs = []
            self.build_connector_worker_meta = self._report
            report = KvdReports([] if report is None else report.reports, proofs)
        return report

    def _close(self) -> None:
        if self._attendant is not None:
            self._attendant.close()
        if self._adapters is not None:
            self._adapters.close(CANCEL_S)
        c, self._c = self._c, None
        if c is not None:
            c.close()

    def shutdown(self) -> None:
        try:
            if self._c is not None and self._half == "worker":
                self._c.flush(self._options["flush_ms"])
            self._close()
        except Exception as error:
            self._breaker.error("shutdown", error)

    # ---- hooks of both halves --------------------------------------------------------------------------------------

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Model runner V1 of 0.25: all layers of a block are adjacent in the GPU's memory."""
        return self._space is not None and self._space.device == "cuda" and self._options["arrange"] == "blocks"

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """On GPUs, vLLM 0.25: keys and values of a head together, so that larger pieces are copied. Otherwise the engine chooses."""
        extra = getattr(vllm_config.kv_transfer_config, "kv_connector_extra_config", None) or {}
        wanted = options.parse({"arrange": extra.get("arrange")})[0]["arrange"]
        if str(vllm_config.device_config.device_type) != "cuda" or wanted == "engine" or not compat.probe()["cross_layers"]:
            return None
        return None if getattr(vllm_config.model_config, "use_mla", False) else "HND"

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def has_connector_metadata(self) -> bool:
        """False keeps the engine from calling wait_for_layer_load() and save_kv_layer() around every layer: nothing is done there. On GPUs the C side answers."""
        return False

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        """What a hook does in a half that is not open, or has nothing to do there."""

    bind_connector_metadata = clear_connector_metadata = start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = update_state_after_alloc = _do_nothing

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KvdMetadata(b"")

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def on_new_request(self, request: Any) -> None:
        """At the first one the engine's hashes have a seed. It must be the one in the space's identity."""
        if self._c is None or self._naming is None:
            return
        if not self._seed_checked and self._space.foreign and compat.none_hash() != self._space.none_hash:
            self._switch_off("the engine's block hashes start from another seed than the one expected")
        self._seed_checked = True
        self._naming.add_request(request)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """0.32: tokens from memory, the GPU's included, and from disk."""
        sources = self._compat["hit_sources"]
        if num_external_tokens == 0 or sources is None:
            return {}
        disk = min(self._c.disk_tokens(request.request_id), num_external_tokens) if self._c is not None else 0
        split = {sources.HOST: num_external_tokens - disk, sources.DISK: disk}
        return {source: tokens for source, tokens in split.items() if tokens}

    def _suspend(self, why: str) -> None:
        if self._naming is not None:
            self._naming.suspend(why)

    def reset_cache(self) -> bool | None:
        """A reset is of the engine that asks: blocks of others stay, and this engine's are found again if its weights are the same. Wiping a space is the operator's."""
        self._suspend("its caches were reset")
        return True

    # ---- counters --------------------------------------------------------------------------------------------------

    def _scheduler_stats(self, delta: dict[str, int]) -> KvdStats:
        if delta.get("scheduler_attaches"):
            logger.info("kvd: attached to the daemon")
        if delta.get("scheduler_cost_model_stops"):
            logger.info("kvd: some hits, or the part of them on disk, take longer to load than to compute here: they are computed, and a piece is tried now and then")
        told, self._ways_told = self._ways_told, True
        return KvdStats(data=delta if told else delta | {f"load_way_{way}": int(way in self._ways.ways) for way in compat.WAYS})

    def _worker_stats(self, delta: dict[str, int]) -> KvdStats:
        if delta.get("worker_self_test_failures"):
            status = _kvd.status_name(self._c.self_test_status()) if self._c is not None else "unknown"
            self._decline(f"self-test against the daemon: {status}; loads and saves stay off")
        return KvdStats(data=delta)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvdStats:
        return KvdStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: dict, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]) -> KvdPromMetrics:
        return KvdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
