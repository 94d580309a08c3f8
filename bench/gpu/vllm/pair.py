"""Two engines: one computes prompts (P), the other one generates (D) and leads. P answers one line of JSON by another on a socket in their folder.
Times are of one clock (CLOCK_MONOTONIC), whichever process reads it: from P's answer, which follows its last step, to D's first token."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from failed import TOKENS, Failures

if TYPE_CHECKING:
    from engine import Bench

Json = dict[str, Any]
Prompt = list[int]
MEET_S, ANSWER_S = 300.0, 60.0  # the longest to wait for the other engine to start, and to answer


def first_token(bench: Bench, prompt: Prompt, tokens: int, params: Json | None, meanwhile: Callable[[], None] = lambda: None) -> Json:
    """When the request was made and its first token came, what of it was found, its answer and what the connector says with it. `meanwhile`: once it is on."""
    engine, began, first = bench.llm.llm_engine, time.monotonic(), 0.0
    sampling = bench.exactly(tokens)
    sampling.extra_args = {"kv_transfer_params": params} if params else None
    engine.add_request(f"pair {time.time_ns()}", {"prompt_token_ids": prompt}, sampling)
    meanwhile()
    while engine.has_unfinished_requests():
        for answer in engine.step():
            first = first or time.monotonic()
            if answer.finished:
                output = answer.outputs[0]
                return {"began": began, "first": first, "cached": answer.num_cached_tokens or 0, "answer": list(output.token_ids), "params": answer.kv_transfer_params}
    raise RuntimeError("a request without an answer")


class Prefill:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def serve(self) -> None:
        """Until D has gone."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.bench.order["pair"])
            listener.listen(1)
            listener.settimeout(MEET_S)
            stream = listener.accept()[0].makefile("rw")
        for line in stream:
            order = json.loads(line)
            stream.write(json.dumps(first_token(self.bench, order["prompt"], 1, order["params"])) + "\n")
            stream.flush()


class Decode:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.stream = self.meet()
        self.count = 0
        self.device: Json = {}  # the GPU in whose memory P hands over, as its answers name it
        self.host = False  # hand over in host memory alone

    def meet(self) -> Any:
        end = time.monotonic() + MEET_S
        while True:
            peer = socket.socket(socket.AF_UNIX)
            try:
                peer.connect(self.bench.order["pair"])
                peer.settimeout(ANSWER_S)
                return peer.makefile("rw")
            except OSError:
                peer.close()
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def ask(self, prompt: Prompt, params: Json) -> None:
        more = {"transfer_device": "none"} if self.host else {}
        self.stream.write(json.dumps({"prompt": prompt, "params": params | more}) + "\n")
        self.stream.flush()

    def answered(self) -> Json:
        found = json.loads(self.stream.readline())
        params = found["params"] or {}
        self.device = {"transfer_device": params["transfer_device"]} if "transfer_device" in params else self.device
        return found

    def at_once(self, prompt: Prompt, tokens: int = 1) -> tuple[Json, Json]:
        """What P and D answer; both have the request at the same time."""
        self.count += 1
        name = {"transfer_id": f"{self.bench.order['seed']} {self.count}"}
        device = {} if self.host else self.device
        found = first_token(self.bench, prompt, tokens, {"do_remote_prefill": True, **name, **device}, lambda: self.ask(prompt, {"do_remote_decode": True, **name}))
        return self.answered(), found

    def one_after_the_other(self, prompt: Prompt, tokens: int = 1) -> tuple[Json, Json]:
        self.ask(prompt, {"do_remote_decode": True})
        computed = self.answered()
        return computed, first_token(self.bench, prompt, tokens, computed["params"])

    def times(self) -> None:
        """Of each size and each way, in milliseconds: from P's answer to D's first token. Beside them, of the same prompts, D's own hits; and D's own first pass of others. Where P
        hands over in memory of its GPU, each way in host memory alone, too."""
        ways = {"at once": self.at_once, "one after the other": self.one_after_the_other}
        self.at_once(self.prompts(9, min(self.bench.sizes), 1)[0])  # P's answer names its GPU, if there is one
        if self.device:
            ways = {f"{name}{where}": way for name, way in ways.items() for where in (" in host memory", "")}
        for n, count in self.bench.sizes.items():
            for at, (name, way) in enumerate(ways.items()):
                self.host = name.endswith("in host memory")
                prompts = self.prompts(at, n, count + 1)
                pairs = [way(prompt) for prompt in prompts][1:]  # the first one finds what others have left of the ring, the pool and the GPU's clock
                self.note(f"pd {name} {n}", [found["first"] - computed["first"] for computed, found in pairs], pairs)
                self.note(f"pd {name} {n}, whole", [found["first"] - min(computed["began"], found["began"]) for computed, found in pairs], pairs)
            own = [first_token(self.bench, prompt, 1, None) for prompt in prompts[1:]]
            self.note(f"pd own hit {n}", [found["first"] - found["began"] for found in own], [(found, found) for found in own])
            cold = [first_token(self.bench, prompt, 1, None) for prompt in self.prompts(len(ways), n, count)]
            self.note(f"pd cold {n}", [found["first"] - found["began"] for found in cold], [(found, found) for found in cold])

    def prompts(self, at: int, n: int, count: int) -> list[Prompt]:
        from engine import prompts_of

        return prompts_of(self.bench.order["seed"] + 100 * n + at, [n] * count)

    def note(self, name: str, seconds: list[float], pairs: list[tuple[Json, Json]]) -> None:
        each = [round(1e3 * s, 2) for s in seconds]
        self.bench.note(name, {"ms": sorted(each)[len(each) // 2], "each": each, "cached": sorted({found["cached"] for _, found in pairs})})

    def check(self) -> None:
        """All tokens but the last have come, and the answers are those of an engine without a connector (failed.py says what is right)."""
        expected, prompts = json.loads(Path(self.bench.order["tokens"]).read_text()), self.bench.checked()
        for name, way, ours in (("at once", self.at_once, slice(0, None, 2)), ("one after the other", self.one_after_the_other, slice(1, None, 2))):
            found = [way(prompt, TOKENS)[1] for prompt in prompts[ours]]
            right = Failures.judged([one["answer"] for one in found], expected[ours])
            short = [(len(prompt), one["cached"]) for prompt, one in zip(prompts[ours], found) if one["cached"] < (len(prompt) - 1) // self.bench.block * self.bench.block]
            self.bench.note(f"handed over {name}", {**right, "not all came": short, "in memory of": self.device.get("transfer_device", "the host")})
