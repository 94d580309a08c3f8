"""Single calls that the engine makes all the time, from Python, inside the engine's process."""
from __future__ import annotations

import os
import time
from typing import Any, Callable

from rig import Rig

HASHES = 8192


def per_call_us(call: Callable[[], Any], rounds: int = 200, calls: int = 20) -> list[float]:
    out = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        for _ in range(calls):
            call()
        out.append((time.perf_counter_ns() - began) / calls / 1e3)
    return out


def request(name: str, tokens: list[int], hasher: Any = None) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request
    return Request(request_id=name, prompt_token_ids=tokens, sampling_params=SamplingParams(max_tokens=1), pooling_params=None, block_hasher=hasher)


def match_us(engine: Any, tokens: list[int]) -> dict[str, Any]:
    """Ask for a prompt of HASHES blocks: one whose start is stored, one that is not stored."""
    scheduler = engine.engine_core.engine_core.scheduler
    connector, size = scheduler.connector, scheduler.block_size
    known = list(request("bench-stored", tokens, engine.engine_core.engine_core.request_block_hasher).block_hashes)
    out: dict[str, Any] = {}
    filler = (tokens * (HASHES * size // len(tokens) + 1))[:HASHES * size + 1]
    for name, start in (("stored", known), ("unknown", [])):
        asked = request(f"bench-{name}", filler)
        asked.block_hashes = [*start, *(os.urandom(32) for _ in range(HASHES - len(start)))]
        connector.on_new_request(asked)
        out[name] = dict(us=per_call_us(lambda: connector.get_num_new_matched_tokens(asked, 0)),
                         tokens=connector.get_num_new_matched_tokens(asked, 0)[0])
    return out


def idle_us(engine: Any) -> dict[str, list[float]]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    worker = get_kv_transfer_group()
    nobody: set[str] = set()
    out = {name: per_call_us(lambda: getattr(worker, name)(nobody), 200, 200) for name in ("get_finished", "get_transfer_results")}
    out["empty function"] = per_call_us(lambda: None, 200, 200)
    return out


def run(rig: Rig) -> None:
    rig.options = dict(mp=False, max_model_len=8256, max_num_batched_tokens=2048, num_gpu_blocks_override=600)
    for kind in [kind for kind in rig.args.kinds if kind in ("naive", "kvd")]:
        rig.restart(kind)
        engine = rig.engines[kind]
        tokens = rig.prompt(8192)
        engine.generate([tokens], 1)
        rig.settle()
        for name, found in engine.call("micro", "match_us", tokens=tokens).items():
            rig.line("micro", f"match of {HASHES} hashes, {name}", kind, found["us"], "us", hit_tokens=found["tokens"], goal="<= 20")
        for name, values in engine.call("micro", "idle_us").items():
            rig.line("micro", f"{name}, nothing to report", kind, values, "us", goal="<= 2")
