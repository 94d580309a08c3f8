"""Loads that fail in a real engine: flipped bits, a lost lease, a deadline, a killed daemon; twelve prompts alone, and eight at once, four of them with common beginnings.
Right is what an engine without a connector answers. Requests that share a batch add up in another order, even with VLLM_BATCH_INVARIANT=1 (its own answers alone and at once
differ now and then): where another of its first choices is NEAR the best one, that is right as well, and what follows it is not compared."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import faults
import gpu_memory
from daemon import Daemon
from engine import TOKENS, Bench

Prompt = list[int]
Answer = list[list[list[float]]]  # of each token: the engine's choices, the likeliest first, with how much less likely they are (the logarithm)
NEAR = 0.125  # a step of bfloat16 at logits of 16 to 32
TOGETHER, ATTACH_S, WRITTEN_S = 8, 60.0, 0.5


def differs(got: list[int], right: Answer) -> int:
    """The first place where it does; -1: nowhere."""
    return next((i for i, (token, choices) in enumerate(zip(got, right)) if token != choices[0][0]), -1 if len(got) == len(right) else min(len(got), len(right)))


def judge(got: list[int], right: Answer) -> str:
    at = differs(got, right)
    if at < 0:
        return "equal"
    near = [token for token, less in right[at] if less <= NEAR] if at < min(len(got), len(right)) else []
    return "tied" if near and got[at] in near else "wrong"


class Failures:
    def __init__(self, bench: Bench) -> None:
        self.bench, self.order = bench, bench.order
        self.folder = Path(os.environ["FAULTS_FOLDER"])
        self.in_gpu = bool(self.order["gpu_gib"])  # the memory that loads come from, all of them or their first half
        drawn = random.Random(self.order["seed"])

        def prompt(low: int, high: int) -> Prompt:
            return [drawn.randrange(10, 4000) for _ in range(drawn.randrange(low, high) | 1)]

        low, high = min(bench.sizes) // 2, 2 * min(bench.sizes)
        self.alone = [prompt(low, high) for _ in range(max(1, self.order["prompts"] - TOGETHER))]
        self.together = [prompt(low, high) for _ in range(TOGETHER)]
        for i in range(TOGETHER // 2):  # beginnings that others have as well
            first = self.together[i]
            self.together[TOGETHER // 2 + i] = first[: len(first) * 2 // 3 | 1] + prompt(low // 4, low)

    def answers(self, prompts: list[Prompt]) -> list[list[int]]:
        return self.bench.ask(prompts, TOKENS)[2]

    def reference(self) -> None:
        """Also whether the same comes from the middle on, and alone of those that are asked at once: else nothing could be compared."""
        alone = [self.bench.choices(prompt, TOKENS) for prompt in self.alone]
        together = [self.bench.choices(prompt, TOKENS) for prompt in self.together]
        self.bench.forget()
        at_once = self.answers(self.together)
        self.bench.forget()
        halves = []
        for prompt in self.alone:
            self.answers([prompt[: len(prompt) // 2]])
            halves += self.answers([prompt])
        Path(self.order["tokens"]).write_text(json.dumps({"alone": alone, "together": together}))
        for name, got, right in (("at once", at_once, together), ("from the middle", halves, alone)):
            self.bench.note(f"reference {name}", self.judged(got, right))

    @staticmethod
    def judged(got: list[list[int]], right: list[Answer]) -> dict[str, Any]:
        """How many are right, how many of those by a tie, and of the others: where they differ, from which choices."""
        verdicts = [judge(a, b) for a, b in zip(got, right)]
        places = [(differs(a, b), a, b) for a, b, verdict in zip(got, right, verdicts) if verdict == "wrong"]
        wrong = [(at, a[at : at + 1], b[at : at + 1]) for at, a, b in places]
        return {"right": len(got) - len(wrong), "of": len(got), "tied": verdicts.count("tied"), "wrong": wrong}

    def run(self, daemon: Daemon) -> None:
        expected = json.loads(Path(self.order["tokens"]).read_text())
        self.attach()
        asks = [([prompt], [answer]) for prompt, answer in zip(self.alone, expected["alone"])] + [(self.together, expected["together"])]
        cold = [answer for prompts, _ in asks for answer in self.answers(prompts)]
        self.bench.note("cold", self.judged(cold, [answer for _, right in asks for answer in right]))
        self.bench.wait_for_saves()
        for fault in faults.FAULTS:
            found = {"right": 0, "of": 0, "tied": 0, "asks": len(asks), "asks with a failed load": 0, "loads failed": 0, "tokens from the GPU tier": 0, "wrong": []}
            for i, (prompts, right) in enumerate(asks):
                self.arrange(daemon, fault, prompts, i == 0)
                self.count(found, prompts, right, lambda: self.repair(daemon, fault))
                self.bench.note(f"after {fault}", found)
            self.bench.wait_for_saves()
        self.bench.note("counters", {**faults.counters(self.folder), **json.loads(faults.read(self.folder, "worker") or "{}")})

    def count(self, found: dict[str, Any], prompts: list[Prompt], right: list[Answer], repair: Any) -> None:
        before = faults.counters(self.folder)
        got = self.answers(prompts)
        repair()
        self.bench.step(2)
        failed, from_gpu = (faults.counters(self.folder)[name] - before[name] for name in ("loads_failed", "gpu_tokens"))
        for what, value in self.judged(got, right).items():
            found[what] += value
        found["loads failed"] += failed
        found["tokens from the GPU tier"] += from_gpu
        found["asks with a failed load"] += failed > 0

    def attach(self, restarted: Daemon | None = None) -> None:
        """To the daemon, and its weights are named; after its start where it was running before."""
        before = faults.counters(self.folder).get("attaches", 0) if restarted else 0
        if restarted:
            restarted.start()
        end = time.monotonic() + ATTACH_S
        while not faults.attached(self.folder, before):
            if time.monotonic() > end:
                raise RuntimeError("the connector does not attach")
            self.bench.step(2)
            time.sleep(0.1)

    def promote(self, prompts: list[Prompt]) -> None:
        """Into the memory of the GPU: by their second use, once the daemon has that memory."""
        before, end = self.from_gpu(), time.monotonic() + ATTACH_S
        while self.from_gpu() == before:
            if time.monotonic() > end:
                raise RuntimeError("nothing comes from the GPU tier")
            self.bench.forget()
            self.answers(prompts)
        self.bench.wait_for_saves()

    def from_gpu(self) -> int:
        """Tokens, so far."""
        return faults.counters(self.folder)["gpu_tokens"]

    def flip(self, daemon: Daemon) -> int:
        if not self.in_gpu:
            return faults.flip_bits(daemon.pid, self.order["seed"])
        self.promote(self.alone + self.together)
        return gpu_memory.flip_bits(daemon.pid, self.order["seed"])

    def arrange(self, daemon: Daemon, fault: str, prompts: list[Prompt], first: bool) -> None:
        """Flipped once, bits serve all asks; for the others everything, but for first halves in the GPU tier, is on disk only, so that a load takes a moment."""
        if fault == faults.FLIPS:
            if first:
                self.bench.note("bits flipped", self.flip(daemon))
        else:
            time.sleep(WRITTEN_S)
            daemon.stop()
            self.attach(daemon)
            if self.in_gpu:
                self.promote([prompt[: len(prompt) // 2] for prompt in prompts])
            faults.arm(self.folder, fault, daemon.pid)
        self.bench.forget()

    def repair(self, daemon: Daemon, fault: str) -> None:
        if fault == faults.FLIPS:
            return
        if faults.disarm(self.folder) and fault != faults.DEADLINE:
            daemon.kill()
            self.attach(daemon)
