"""As much of vLLM as bench/gpu/vllm asks for, without a model: an answer follows from the prompt, a cache is a set of prompts, and so is what a connector keeps."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BLOCK = 16


class SamplingParams:
    def __init__(self, **options: Any) -> None:
        self.max_tokens = options["max_tokens"]


class Engine:
    """A token a step, for each request."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.left: dict[str, int] = {}
        self.answers: dict[str, Any] = {}
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK))

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        assert request_id and request_id not in self.left
        self.answers[request_id], self.left[request_id] = self.llm.answer(prompt["prompt_token_ids"], params.max_tokens), params.max_tokens
        self.answers[request_id].request_id = request_id

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        given = []
        for name in list(self.left):
            self.left[name] -= 1
            self.answers[name].finished = self.left[name] == 0
            given.append(self.answers[name])
            if self.left[name] == 0:
                del self.left[name], self.answers[name]
        return given


class LLM:
    def __init__(self, **options: Any) -> None:
        if os.environ.get("FAKE_VLLM_FAILS") and os.environ["FAKE_VLLM_FAILS"] in json.dumps(options):
            raise RuntimeError("this engine does not start")
        assert options["tensor_parallel_size"] in (1, 2) and 0 < options["gpu_memory_utilization"] < 1
        connector = options.get("kv_transfer_config")
        socket = (connector or {}).get("kv_connector_extra_config", {}).get("socket")
        self.kept = Path(socket).with_name("kept") if socket else None  # what a daemon would have
        self.dies = bool(os.environ.get("FAKE_VLLM_DIES")) and os.environ["FAKE_VLLM_DIES"] in json.dumps(options)
        self.profiles = options.get("profiler_config", {}).get("torch_profiler_dir")
        self.serves = bool(connector) and connector["kv_connector"] != "Nothing"
        self.outside: set[str] = set(self.kept.read_text().split()) if self.kept and self.kept.exists() else set()
        self.inside: set[str] = set()
        self.llm_engine = Engine(self)

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

    def answer(self, prompt: list[int], tokens: int) -> Any:
        key = str(hash(tuple(prompt)))
        cached = (len(prompt) - 1) // BLOCK * BLOCK if key in self.inside | self.outside else 0
        self.inside.add(key)
        if self.serves:
            self.outside.add(key)
        if self.kept:
            self.kept.write_text("\n".join(self.outside))
        return SimpleNamespace(num_cached_tokens=cached, outputs=[SimpleNamespace(token_ids=[(int(key) + i) % 4000 for i in range(tokens)])])
