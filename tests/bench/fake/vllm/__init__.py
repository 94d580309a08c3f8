"""As much of vLLM as bench/gpu/vllm asks for, without a model: an answer follows from the prompt, a cache is a set of prompts, and so is what a connector keeps."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BLOCK = 16


class SamplingParams:
    def __init__(self, **options: Any) -> None:
        self.max_tokens = options["max_tokens"]
        self.extra_args: dict[str, Any] | None = None
        self.skip_reading_prefix_cache = False


class Engine:
    """A token a step, for each request."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.left: dict[str, int] = {}
        self.until: dict[str, float] = {}  # a request waits for another engine
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.answers: dict[str, Any] = {}
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK))

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        assert request_id and request_id not in self.left
        self.asked[request_id], self.left[request_id] = (prompt["prompt_token_ids"], params), params.max_tokens
        self.until[request_id] = time.monotonic() + float(os.environ.get("FAKE_VLLM_WAITS_S", "10"))

    def begin(self, request_id: str) -> bool:
        """False: what another engine computes has not come yet."""
        prompt, params = self.asked[request_id]
        pair = (params.extra_args or {}).get("kv_transfer_params") or {}
        if pair.get("do_remote_prefill"):
            if not self.llm.received(str(hash(tuple(prompt)))) and time.monotonic() < self.until[request_id]:
                return False
            self.llm.counters["handovers_received_gpu"] += pair.get("transfer_device", "none") != "none"
        self.answers[request_id] = self.llm.answer(prompt, params.max_tokens, not params.skip_reading_prefix_cache)
        self.answers[request_id].request_id = request_id
        device = {} if pair.get("transfer_device") == "none" else {"transfer_device": "fake-0"}
        self.answers[request_id].kv_transfer_params = {"do_remote_prefill": True, "transfer_id": "its own", **device} if pair.get("do_remote_decode") else None
        del self.asked[request_id], self.until[request_id]
        return True

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        given = []
        for name in list(self.left):
            if name in self.asked and not self.begin(name):
                continue
            self.left[name] -= 1
            self.answers[name].finished = self.left[name] == 0
            given.append(self.answers[name])
            if self.left[name] == 0:
                del self.left[name], self.answers[name]
        return given


class Faults:
    """What the connector Failing does, and a daemon whose memory is one slab: a prompt that was stored before bits in it were flipped does not load."""

    def __init__(self) -> None:
        self.folder, self.pid = Path(os.environ["FAULTS_FOLDER"]), Path(os.environ["FAKE_KVD_PID"])
        self.counters = {"attaches": 0, "loads_failed": 0, "gpu_tokens": 0, "ready": 1}
        self.daemon = self.slab = ""
        self.bad: set[str] = set()

    def attach(self, stored: set[str]) -> None:
        if self.pid.read_text() != self.daemon:
            self.daemon, self.slab = self.pid.read_text(), ""
            self.counters["attaches"] += 1
        folder = Path(f"/proc/{self.daemon.strip()}/fd")
        slab = next((hashlib.sha256(fd.read_bytes()).hexdigest() for fd in folder.iterdir() if "kvd-slab" in os.readlink(fd)), "")
        if not slab:
            raise OSError("it has died")
        if self.slab and slab != self.slab:
            self.bad = set(stored)
        self.slab = slab

    def load(self, key: str, stored: set[str]) -> bool:
        try:
            self.attach(stored)
        except OSError:
            return False  # no daemon
        failed = key in self.bad
        self.bad.discard(key)
        fault = self.folder / "fault"
        if key and fault.exists() and not os.environ.get("FAKE_VLLM_LOADS_ALL"):
            if fault.read_text() != "deadline":
                os.kill(int((self.folder / "pid").read_text()), signal.SIGKILL)
            fault.unlink()
            failed = True
        self.counters["loads_failed"] += failed
        (self.folder / "counters").write_text(json.dumps(self.counters))
        return failed


class LLM:
    def __init__(self, **options: Any) -> None:
        if os.environ.get("FAKE_VLLM_FAILS") and os.environ["FAKE_VLLM_FAILS"] in json.dumps(options):
            raise RuntimeError("this engine does not start")
        assert options["tensor_parallel_size"] in (1, 2) and 0 < options["gpu_memory_utilization"] < 1
        connector = options.get("kv_transfer_config")
        extra = (connector or {}).get("kv_connector_extra_config", {})
        socket = extra.get("socket")
        self.kept = Path(socket).with_name(f"kept {extra.get('weights', '')}") if socket else None  # what a daemon would have
        self.gpu = "" if extra.get("device") == "none" else "0" if os.environ.get("FAKE_VLLM_ONE_GPU") else str(os.getpid())
        self.counters = dict.fromkeys(("load_tokens", "gpu_tokens", "other_gpu_tokens", "gpu_blocks", "handovers_received_gpu"), 0)
        self.counts = bool(connector) and connector["kv_connector"] == "Counted"
        self.dies = bool(os.environ.get("FAKE_VLLM_DIES")) and os.environ["FAKE_VLLM_DIES"] in json.dumps(options)
        self.profiles = options.get("profiler_config", {}).get("torch_profiler_dir")
        self.serves = bool(connector) and connector["kv_connector"] != "Nothing"
        self.outside = self.stored()
        self.inside: set[str] = set()
        self.llm_engine = Engine(self)
        self.faults = Faults() if connector and connector["kv_connector"] == "Failing" else None

    def start_profile(self, profile_prefix: str) -> None:
        assert profile_prefix and self.profiles
        self.prefix = profile_prefix

    def stop_profile(self) -> None:
        """Three kernels on a stream, two between which the host was late, and one elsewhere."""
        folder = Path(self.profiles)
        folder.mkdir(parents=True, exist_ok=True)
        kernels = [{"cat": "kernel", "ts": ts, "dur": 2.0, "args": {"stream": stream}} for ts, stream in ((10.0, 7), (12.5, 7), (14.75, 7), (100.0, 7), (11.0, 13))]
        with gzip.open(folder / f"{self.prefix}_rank0.1.pt.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": [{"cat": "cpu_op"}, *kernels]}, file)

    def reset_prefix_cache(self) -> bool:
        self.inside.clear()
        return True

    def generate(self, prompts: list[dict[str, list[int]]], params: SamplingParams, use_tqdm: bool) -> list[Any]:
        if os.environ.get("FAKE_VLLM_HANGS"):
            Path(os.environ["FAKE_VLLM_HANGS"]).write_text(str(os.getpid()))
            time.sleep(100)
        if self.dies and len(prompts) == 16:  # in the middle of a round
            os._exit(3)
        return [self.answer(prompt["prompt_token_ids"], params.max_tokens) for prompt in prompts]

    def received(self, key: str) -> bool:
        """Another engine has stored it."""
        self.outside |= self.stored()
        return key in self.outside

    def stored(self) -> set[str]:
        return set(self.kept.read_text().split()) if self.kept and self.kept.exists() else set()

    def count(self, key: str, cached: int) -> None:
        """What the connector Counted counts. A prompt that is found is in memory of this engine's GPU after that."""
        own = f"{key}@{self.gpu}"
        if key not in self.inside:
            in_a_gpu = any(word.startswith(f"{key}@") for word in self.outside)
            self.counters["load_tokens"] += cached
            self.counters["gpu_tokens"] += cached * in_a_gpu
            self.counters["other_gpu_tokens"] += cached * (in_a_gpu and own not in self.outside)
        if cached and self.gpu and own not in self.outside:
            self.outside.add(own)
            self.counters["gpu_blocks"] += cached // BLOCK
        Path(os.environ["BENCH_WATCH"]).write_text(json.dumps(self.counters))

    def answer(self, prompt: list[int], tokens: int, read: bool = True) -> Any:
        key = str(hash(tuple(prompt)))
        failed = self.faults is not None and self.faults.load(key if key in self.outside - self.inside else "", self.outside)
        cached = (len(prompt) - 1) // BLOCK * BLOCK if read and key in self.inside | self.outside else 0
        if self.counts:
            self.count(key, cached)
        self.inside.add(key)
        if self.serves:
            self.outside.add(key)
        if self.kept:
            self.outside |= self.stored()
            new = self.kept.with_suffix(f".{os.getpid()}")
            new.write_text("\n".join(self.outside))
            new.rename(self.kept)
        first = int(failed and bool(os.environ.get("FAKE_VLLM_DROPS")))  # what the recovery of some engines does to the first token
        answer = [(int(key) + i) % 4000 for i in range(first, first + tokens)]
        likely = [{token: SimpleNamespace(logprob=-0.1), 4001: SimpleNamespace(logprob=-5.1)} for token in answer]
        return SimpleNamespace(num_cached_tokens=cached, outputs=[SimpleNamespace(token_ids=answer, logprobs=likely)])
