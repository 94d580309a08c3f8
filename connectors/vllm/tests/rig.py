"""An engine without vLLM: its objects as far as the hooks read them, both halves over one cache in memory of ctypes, a real daemon.

Needs nothing but the module (HOOKS_MODULE: its folder) and, where there is a daemon, HOOKS_PROGRAM.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, os.environ.get("HOOKS_MODULE", "."))
try:
    import _kvd
except ImportError:  # where the package is installed
    from kvd_vllm import _kvd  # noqa: F401

BLOCK = 32
PAGE = 4096
LAYERS = 2
BLOCKS = 64
SLOW = 20 if "LD_PRELOAD" in os.environ else 1  # under a sanitizer


class CircuitBreaker:
    def __init__(self) -> None:
        self.errors: list[tuple[str, BaseException]] = []

    def error(self, hook: str, exception: BaseException) -> None:
        self.errors.append((hook, exception))


class Request:
    """What the connector reads of vLLM's."""

    def __init__(self, name: str, tokens: list[int], **attributes: Any) -> None:
        self.request_id = name
        self._all_token_ids = list(tokens)
        self.block_hashes: list[bytes] = []
        self.lora_request = self.cache_salt = self.prompt_embeds = None
        self.skip_reading_prefix_cache = False
        self.kv_transfer_params: dict[str, Any] | None = None
        self.aborted = False
        self.mm_features: list[Any] = []
        self.max_tokens, self.num_prompt_tokens, self.num_output_tokens = 16, len(tokens), 0
        self.__dict__.update(attributes)
        self.hash()

    def hash(self) -> None:
        for i in range(len(self.block_hashes), len(self._all_token_ids) // BLOCK):
            before = self.block_hashes[-1] if self.block_hashes else b"seed" + (self.cache_salt or "").encode()
            self.block_hashes.append(hashlib.sha256(before + repr(self._all_token_ids[i * BLOCK : (i + 1) * BLOCK]).encode()).digest())

    def content(self, block: int, layer: int) -> bytes:
        """What computing leaves in a block."""
        seed = hashlib.sha256(self.block_hashes[block] + bytes([layer])).digest()
        return (seed * (PAGE // len(seed) + 1))[:PAGE]


class Blocks:
    def __init__(self, *tables: list[int]) -> None:
        self.tables = tables

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.tables


def output(new: list[Any] = [], cached: list[Any] = [], resumed: set[str] = set(), preempted: set[str] = set(), **more: Any) -> SimpleNamespace:
    """SchedulerOutput. new: (id, tables, computed, tokens); cached: (id, tables or None, computed, tokens)."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r, block_ids=t, num_computed_tokens=c) for r, t, c, _ in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r for r, *_ in cached], new_block_ids=[t for _, t, _, _ in cached], num_computed_tokens=[c for _, _, c, _ in cached], resumed_req_ids=resumed
        ),
        num_scheduled_tokens={r: n for r, _, _, n in [*new, *cached]},
        finished_req_ids=set(),
        preempted_req_ids=preempted,
        **more,
    )


class Meta:
    def __init__(self, message: bytes) -> None:
        self.message = message


class Results:
    def __init__(self, finished: set[str] | None = None) -> None:
        self.finished_sending: set[str] = set()
        self.finished_recving = finished or set()
        self.failed_recving: set[str] = set()


def prompt(seed: int, n: int) -> list[int]:
    return [(seed * 7919 + i * 31) % 4000 for i in range(n)]


def until(condition: Callable[[], Any], step: Callable[[], Any] = lambda: None, seconds: float = 60, pause: float = 0.002) -> Any:
    """The condition's value, in the end; `step` runs between two looks at it."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        step()
        time.sleep(pause)
    return value


def time_us(call: Callable[[], Any], tries: int = 2000, each: int = 1) -> float:
    """The best of many, so that a busy machine passes."""
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter_ns()
        for _ in range(each):
            call()
        best = min(best, (time.perf_counter_ns() - start) / each / 1000)
    return best


class Daemon:
    def __init__(self, **more: str) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvd-hooks-")
        self.key: Any = None
        self.socket = self.folder.name + "/default.sock"
        options = {"run_dir": self.folder.name, "cpu.size": "64MiB", "cpu.slab_size": "4MiB", "index.max_blocks": "4096", "http.listen": "off", "keeper": "off", "log.level": "warn", "limits.silence": "10s", "handover.min_ttl": "60s"}
        options |= {name.replace("__", "."): value for name, value in more.items()}
        self.command = [os.environ.get("HOOKS_PROGRAM", "kvd"), *(f"--{name}={value}" for name, value in options.items())]
        self.start()

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        self.process = subprocess.Popen(self.command, env=environment)
        until(lambda: pathlib.Path(self.socket).exists() or self.process.poll() is not None)
        if not pathlib.Path(self.socket).exists():
            self.stop()
            raise RuntimeError(f"kvd has not started: exit code {self.process.returncode}")

    def peers(self) -> dict[str, Any]:
        kvctl = pathlib.Path(os.environ.get("HOOKS_PROGRAM", "kvd")).with_name("kvctl")
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        return json.loads(subprocess.run([kvctl, "peers", "--json", "--socket", self.socket], capture_output=True, text=True, env=environment, check=True).stdout)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.folder.cleanup()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def nodes() -> tuple[Daemon, Daemon]:
    """Two daemons that are peers: node0 and node1."""
    folder = tempfile.TemporaryDirectory(prefix="kvd-key-")
    key = pathlib.Path(folder.name) / "key"
    key.touch(0o600)
    key.write_text("0123456789abcdef0123456789abcdef")
    port = free_port(), free_port()
    pair = [Daemon(peers__name=f"node{i}", peers__listen=f"127.0.0.1:{port[i]}", peers__addresses=f"node{1 - i}=127.0.0.1:{port[1 - i]}", peers__keys=f"node{1 - i}={key}", peers__timeout="2s")
            for i in range(2)]
    pair[0].key = folder  # removed with it
    if not until(lambda: all(daemon.peers()["peers"][0]["state"] == "up" for daemon in pair), pause=0.05):
        for daemon in pair:
            daemon.stop()
        raise RuntimeError("two daemons do not connect")
    return pair[0], pair[1]


def common_config(socket: str, name: str, breaker: Any, layers: int, group_count: int = 1, **identity: Any) -> dict[str, Any]:
    """What both halves are given: opaque pages of one head."""
    text = f"kvk1 heads=1 layers={layers} tokens={BLOCK} k=0 v=0 dtype=byte inner=opaque page={PAGE}"
    return {
        "socket": socket, "instance": "hooks-" + name, "secret": hashlib.sha256(name.encode()).digest(), "program": "hooks", "circuit_breaker": breaker,
        "identity": {"model": "hooks", "weights": "w", "dtype": "f32", "quantization": None, "rope": "none", "lora": None, "hash": None, "hash_tokens": BLOCK,
                     "groups": ",".join(f"{group}:full:{BLOCK}" for group in range(group_count)), "layout": text, "page_format": "test", "extra": None, **identity},
        "layouts": [{"heads": 1, "layers": layers, "block_tokens": BLOCK, "k_dim": 0, "v_dim": 0, "dtype": _kvd.DTYPE_byte, "inner": _kvd.INNER_opaque, "page_bytes": PAGE}] * group_count,
    }


def worker_config(common: dict[str, Any], memory: list[Any], **changes: Any) -> dict[str, Any]:
    """`memory`: a buffer a layer."""
    layers = len(memory)
    paged = {"group": 0, "kind": _kvd.KIND_OPAQUE, "dtype": _kvd.DTYPE_byte, "blocks": sum(len(m) for m in memory[:1]) // PAGE, "layers": layers, "first_layer": 0, "heads": 1, "first_head": 0,
             "block_tokens": BLOCK, "k_dim": 0, "v_dim": 0, "page_bytes": PAGE, "block_stride": PAGE, "head_stride": 0, "save_layer_first": 0, "save_layers": 0, "base": [ctypes.addressof(m) for m in memory]}
    return {
        **common, "meta_class": Meta, "prove": lambda meta: None, "report_class": lambda reports: SimpleNamespace(reports=reports), "results_class": Results, "stats_class": dict, "rank": 0,
        "groups": [{**paged, "group": group} for group in range(len(common["layouts"]))], "threads": 1, "prefault": 0, "memory": _kvd.MEMORY_HOST, "device": 0, "measure": 0, "sms": 0, "save_sms": 0, "promote_rate": 0, "stream_of": None, "layers": None,
        "layer_bytes": 1, "prefetch": 0, **changes,
    }


class Engine:
    """Both halves over one cache of LAYERS buffers. A step of it fills blocks with bytes that follow from their hash."""

    def __init__(self, socket: str, name: str, **options: Any) -> None:
        self.breaker = CircuitBreaker()
        self.forgotten: list[tuple[set[int], list[str]]] = []
        self.memory = [ctypes.create_string_buffer(BLOCKS * PAGE) for _ in range(LAYERS)]
        foreign, groups = options.get("foreign", 1), options.get("groups", 1)
        common = common_config(socket, name, self.breaker, LAYERS, groups, hash="vllm:sha256:00" if foreign else None, weights=options.get("weights", "w"))
        self.scheduler = _kvd.Scheduler({
            **common, "meta_class": Meta, "stats_class": dict, "lora_text": str, "unit_extras": self.extras, "forget": self.forget, "reprove": lambda: None, "find_transfer": self.find_transfer, "transfer_params": self.transfer_params, "find_limits": self.find_limits,
            "handover_ms": 20000, "group_tokens": [BLOCK] * groups, "group_tables": list(range(groups)), "hash_tokens": BLOCK,
            "writers": [(0, 0, 1, 0, LAYERS)] * groups, "max_blocks": BLOCKS, "foreign": foreign, "cost_model": 0, "mode": options.get("mode", 1), "wait_us": 5000000, "load_ms": 20000,
            "min_tokens": 0, "defer_shared": options.get("defer_shared", 0), "loads": options.get("loads", 1), "saves": options.get("saves", 1), "publishable": 0, "prefetch": options.get("prefetch", 0),
        })
        self.scheduler.set_enabled(True)
        self.worker = _kvd.Worker(worker_config(common, self.memory, **{key: options[key] for key in ("stream_of", "layers", "prefetch", "results_class") if key in options}))
        self.names_requests = options.get("results_class", Results) is not None

    def forget(self, invalid: set[int], requests: dict[str, Any]) -> None:
        self.forgotten.append((set(invalid), list(requests)))

    @staticmethod
    def find_transfer(request: Request) -> tuple[bool, str, str | None, str | None] | None:
        params = request.kv_transfer_params or {}
        return ("do_remote_decode" in params, params["transfer_id"], params.get("transfer_peer"), params.get("transfer_device")) if "transfer_id" in params else None

    @staticmethod
    def find_limits(request: Request) -> tuple[int, int, bool]:
        return (request.kv_transfer_params or {}).get("limits", (2**32 - 1, 2**32 - 1, False))

    @staticmethod
    def transfer_params(request: Request, transfer: str, node: str, device: str) -> dict[str, str] | None:
        return None if request.aborted else {"transfer_id": transfer, "transfer_peer": node} | ({"transfer_device": device} if device else {})

    @staticmethod
    def extras(request: Request, at: int, units: int) -> list[bytes | None]:
        return [request.cache_salt.encode() if at == 0 and i == 0 and request.cache_salt else None for i in range(units)]

    def is_proved(self) -> bool:
        return self.worker.self_test_status() == _kvd.OK

    def wait(self) -> None:
        ready = until(lambda: self.scheduler.is_ready() and self.is_proved(), lambda: self.step(output()), pause=0.005)
        assert ready, (self.scheduler.stats(), self.worker.stats())

    def write(self, request: Request, table: list[int], first: int, end: int) -> None:
        for i in range(first, end):
            for layer, memory in enumerate(self.memory):
                ctypes.memmove(ctypes.addressof(memory) + table[i] * PAGE, request.content(i, layer), PAGE)

    def read(self, block: int, layer: int) -> bytes:
        return ctypes.string_at(ctypes.addressof(self.memory[layer]) + block * PAGE, PAGE)

    def holds(self, request: Request, table: list[int], *places: int) -> bool:
        """Whether these blocks of the request have what computing leaves there."""
        return all(self.read(table[i], layer) == request.content(i, layer) for i in places for layer in range(LAYERS))

    def match(self, name: str, tokens: list[int], local: int = 0, **attributes: Any) -> tuple[int, bool]:
        """Of a new request."""
        return self.scheduler.match(Request(name, tokens, **attributes), local)

    def step(self, out: SimpleNamespace, compute: Any = None) -> Results:
        """One step in vLLM's order of calls."""
        return self.work(self.scheduler.build_meta(out), compute)

    def work(self, meta: Any, compute: Any = None) -> Results:
        """The worker's half of a step, and what the scheduler hears of it."""
        self.worker.begin_step(meta)
        self.worker.start_async_loads(meta)
        self.worker.run_sync_loads(None)
        if compute:
            compute()
        self.worker.end_step()
        results = self.worker.take_results(set()) if self.names_requests else Results(self.worker.take_finished(set())[1])
        results.errors = self.worker.take_failed_blocks()
        self.worker.take_stats()
        report = self.worker.take_report()
        self.scheduler.take_output(SimpleNamespace(kv_connector_worker_meta=report, invalid_block_ids=results.errors))
        self.scheduler.take_stats()
        return results

    def idle(self, condition: Any = lambda: False, seconds: float = 60, **running: Any) -> None:
        until(condition, lambda: self.step(output(**running)), seconds)

    def admit(self, request: Request, table: list[int], local: int = 0) -> tuple[int, bool]:
        found = self.scheduler.match(request, local)
        self.scheduler.add_blocks(request, Blocks(table), found[0])
        return found

    def prefill(self, request: Request, table: list[int], local: int = 0) -> int:
        """Admit and compute a whole prompt; tokens that came from the store."""
        tokens, is_async = self.admit(request, table, local)
        assert not is_async
        had = local + tokens
        n = len(request._all_token_ids)
        results = self.step(output(new=[(request.request_id, (table,), had, n - had)]), lambda: self.write(request, table, had // BLOCK, n // BLOCK))
        assert not results.errors, results.errors
        return tokens

    def saved(self, blocks: int, **running: Any) -> None:
        self.idle(lambda: self.scheduler.stats()["save_done"] >= blocks, **running)
        assert self.scheduler.stats()["save_done"] >= blocks, (self.scheduler.stats(), self.worker.stats())

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


class Engines(unittest.TestCase):
    """Engines of one daemon, or of none. At the end none may have met an error."""

    with_daemon = True
    socket = ""

    @classmethod
    def setUpClass(cls) -> None:
        if cls.with_daemon:
            cls.daemon = Daemon()
            cls.addClassCleanup(cls.daemon.stop)
            cls.socket = cls.daemon.socket
        else:
            folder = tempfile.TemporaryDirectory()
            cls.addClassCleanup(folder.cleanup)
            cls.socket = folder.name + "/nobody.sock"

    def setUp(self) -> None:
        self.engines: list[Engine] = []

    def tearDown(self) -> None:
        for engine in self.engines:
            self.assertEqual(engine.breaker.errors, [])

    def engine(self, name: str | None = None, **options: Any) -> Engine:
        """It waits for the daemon if its weights have a name."""
        engine = Engine(self.socket, f"{self.id()}-{len(self.engines) if name is None else name}", **options)
        self.addCleanup(engine.close)
        self.engines.append(engine)
        if self.with_daemon and options.get("weights", "w"):
            engine.wait()
        return engine
