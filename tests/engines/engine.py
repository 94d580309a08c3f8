"""One vLLM engine in a process of its own, driven over a pipe: a command a line in, an answer a line out. Started by harness.Engine.

usage: engine.py SPEC-JSON COMMAND-FD ANSWER-FD      with the environment that harness.Engine sets
"""
import importlib
import json
import os
import sys
import time
import traceback
from typing import Any

Json = dict[str, Any]


def start(spec: Json) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    import probes
    probes.count_preemptions()
    probes.count_drafts()
    options = dict(dtype="float32", enforce_eager=True, seed=0, disable_log_stats=True, generation_config="vllm") | spec["options"]
    if spec.get("connector"):
        options["kv_transfer_config"] = KVTransferConfig(**spec["connector"])
    return LLMEngine.from_engine_args(EngineArgs(model=spec["model"], **options))


def adapter(described: Json | None) -> Any:
    from vllm.lora.request import LoRARequest
    return LoRARequest(described["name"], described["number"], described["path"]) if described else None


def image(seed: int) -> Any:
    """Coloured squares of that seed."""
    import numpy
    from PIL import Image
    points = numpy.random.default_rng(seed).integers(0, 256, (7, 7, 3), dtype=numpy.uint8)
    return Image.fromarray(points.repeat(8, 0).repeat(8, 1))


class Requests:
    """Runs a batch of requests to its end, each entering and leaving at the step it names."""

    def __init__(self, engine: Any, requests: list[Json]) -> None:
        self.engine, self.requests = engine, requests
        self.ids: dict[str, int] = {}  # of the outputs: the place in the batch
        self.internal: dict[int, str] = {}
        self.started: dict[int, float] = {}
        self.answers: list[Json] = [dict(tokens=[], logprobs=[], cached=None, ttft_ms=None, ms=None, finish=None) for _ in requests]
        self.step = 0
        self.step_ms: list[float] = []

    def enter(self, i: int) -> None:
        from vllm import SamplingParams
        r = self.requests[i]
        prompt: Json = dict(prompt_token_ids=r["ids"])
        if r.get("salt"):
            prompt["cache_salt"] = r["salt"]
        if "image" in r:
            prompt["multi_modal_data"] = dict(image=image(r["image"]))
        params = SamplingParams(temperature=0, max_tokens=r.get("max_tokens", 16), ignore_eos=True, logprobs=0, detokenize=False,
                                allowed_token_ids=r.get("allowed"), extra_args=dict(kv_transfer_params=r["params"]) if r.get("params") else None)
        self.started[i] = time.perf_counter()
        name = f"{os.getpid()}-{i}"
        self.ids[name] = i
        self.internal[i] = self.engine.add_request(name, prompt, params, lora_request=adapter(r.get("adapter")))

    def note(self, output: Any, now: float) -> None:
        i = self.ids[output.request_id]
        answer, one = self.answers[i], output.outputs[0]
        ms = (now - self.started[i]) * 1e3
        if one.token_ids and answer["ttft_ms"] is None:
            answer["ttft_ms"] = ms
        answer.update(tokens=list(one.token_ids), cached=output.num_cached_tokens)
        if output.finished:
            answer.update(ms=ms, finish=one.finish_reason, params=output.kv_transfer_params,
                          logprobs=[p[t].logprob for p, t in zip(one.logprobs or [], one.token_ids)])

    def turn(self) -> None:
        for i, r in enumerate(self.requests):
            if i not in self.started and r.get("enter_step", 0) <= self.step:
                self.enter(i)
        for i, r in enumerate(self.requests):
            if r.get("abort_step", -1) == self.step - r.get("enter_step", 0) and i in self.started and not self.answers[i]["finish"]:
                self.engine.abort_request([self.internal[i]], internal=True)
                self.answers[i]["finish"] = "aborted"
        began = time.perf_counter()
        outputs = self.engine.step() if self.engine.has_unfinished_requests() else []
        now = time.perf_counter()
        self.step_ms.append((now - began) * 1e3)
        for output in outputs:
            self.note(output, now)
        self.step += 1

    def run(self, limit_s: float) -> Json:
        end = time.monotonic() + limit_s
        while any(not a["finish"] for a in self.answers):
            if time.monotonic() > end:
                raise TimeoutError(f"{sum(not a['finish'] for a in self.answers)} requests have not ended after {limit_s} s")
            self.turn()
        if any(r.get("params") for r in self.requests):
            go_on(self.engine)
        return dict(answers=self.answers, steps=self.step, step_ms=self.step_ms)


def go_on(engine: Any, limit_s: float = 20.0) -> None:
    """What a server does without being asked: steps without requests, while the connector wants them."""
    end = time.monotonic() + limit_s
    while hasattr(engine.engine_core, "engine_core") and core(engine).scheduler.has_requests() and time.monotonic() < end:
        pump(engine)


def core(engine: Any) -> Any:
    """The scheduler's side, in a single-process engine."""
    return engine.engine_core.engine_core


def reset(engine: Any, limit_s: float = 20.0) -> bool:
    """Empty the engine's own prefix cache; what a connector keeps stays."""
    end = time.monotonic() + limit_s
    while not engine.reset_prefix_cache():
        if time.monotonic() > end:
            return False
        pump(engine)
        time.sleep(0.01)
    return True


def pump(engine: Any) -> None:
    """One step although no request is there: what has ended becomes known to the connector."""
    if hasattr(engine.engine_core, "engine_core"):
        core(engine).step_fn()


def blocks(engine: Any) -> Json:
    pool = core(engine).scheduler.kv_cache_manager.block_pool
    return dict(free=pool.get_num_free_blocks(), all=pool.num_gpu_blocks)


def cpu_seconds() -> float:
    """Of this process and those it has started."""
    import psutil
    me = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in [me, *me.children(recursive=True)])


def execute(engine: Any, command: Json) -> Any:
    match command["do"]:
        case "generate":
            return Requests(engine, command["requests"]).run(command["limit_s"])
        case "reset":
            return reset(engine)
        case "blocks":
            return blocks(engine)
        case "pump":
            for _ in range(command["steps"]):
                pump(engine)
            return None
        case "cpu":
            return cpu_seconds()
        case "call":
            module = importlib.import_module(command["module"])
            return getattr(module, command["function"])(engine, **command["arguments"])
    raise ValueError(command["do"])


def main() -> None:
    spec = json.loads(sys.argv[1])
    commands, answers = os.fdopen(int(sys.argv[2])), os.fdopen(int(sys.argv[3]), "w", buffering=1)
    began = time.monotonic()
    try:
        engine = start(spec)
        answers.write(json.dumps(dict(ok=True, value=dict(start_s=time.monotonic() - began))) + "\n")
        for line in commands:
            command = json.loads(line)
            if command["do"] == "exit":
                break
            answers.write(json.dumps(dict(ok=True, value=execute(engine, command))) + "\n")
    except BaseException:
        answers.write(json.dumps(dict(ok=False, value=traceback.format_exc())) + "\n")
    answers.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an orderly end of several processes takes up to ten seconds


if __name__ == "__main__":  # the engine's processes import this file again
    main()
