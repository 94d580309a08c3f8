"""Weights changed in place, resets, and sleep: what a prompt finds afterwards, and whether the answer is that of the weights there are now. Answers that nothing was found for are
compared with those to the same prompts under another salt, which find nothing either."""

from __future__ import annotations

import itertools
import time
from typing import Any

from engine import Bench

Prompt = list[int]
TOKENS = 8


def _scale(worker: Any, factor: float) -> int:
    """In the process of a rank: every weight times a power of two, which is exact."""
    found = [p for name, p in worker.model_runner.get_model().named_parameters() if "down_proj" in name]
    for p in found:
        p.data.mul_(factor)
    return len(found)


class Changes:
    def __init__(self, bench: Bench, prompts: list[Prompt]) -> None:
        self.bench, self.prompts, self.salts = bench, prompts, itertools.count()

    def scale(self, factor: float) -> None:
        if not all(self.bench.llm.collective_rpc(_scale, args=(factor,))):
            raise RuntimeError("no weight was changed")

    def ask(self, salt: str = "") -> tuple[list[int], list[list[int]], float]:
        """Cached tokens, answers, and milliseconds to the first one."""
        found = []
        for prompt in self.prompts:
            began = time.perf_counter()
            asked = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
            answer = self.bench.llm.generate([asked], self.bench.exactly(TOKENS), use_tqdm=False)[0]
            found.append((answer.num_cached_tokens or 0, list(answer.outputs[0].token_ids), 1e3 * (time.perf_counter() - began)))
        cached, answers, ms = zip(*found)
        return list(cached), list(answers), ms[0]

    def check(self, name: str, hit: bool, before: list[list[int]] | None = None) -> list[list[int]]:
        """All blocks are found, and the answers are those of `before`; or none, and they are those of a prompt that finds nothing."""
        cached, answers, ms = self.ask()
        expected = before if hit else self.ask(f"salt {next(self.salts)}")[1]
        whole = [(len(prompt) - 1) // self.bench.block * self.bench.block for prompt in self.prompts]
        right = sum(a == b for a, b in zip(answers, expected or answers))
        wanted = whole if hit else [0] * len(whole)
        self.bench.note(f"changed: {name}", {"as it should be": cached == wanted and right == len(answers), "cached": cached, "equal": right, "of": len(answers), "first ms": round(ms, 1)})
        self.bench.wait_for_saves()
        return answers

    def run(self) -> None:
        bench, llm = self.bench, self.bench.llm
        self.check("cold", hit=False)
        llm.reset_prefix_cache()
        old = self.check("reset", hit=True)
        llm.reset_prefix_cache()
        self.check("reset again", hit=True, before=old)
        self.scale(0.5)
        llm.reset_prefix_cache()
        new = self.check("update, reset", hit=False)
        if new == old:
            bench.note("changed: the weights do not matter", new)
        llm.reset_prefix_cache()
        self.scale(0.5)
        self.check("reset, update", hit=False)
        self.scale(4)
        llm.reset_prefix_cache()
        self.check("the first weights again", hit=True, before=old)
        for level in (1, 2):
            self.ask(f"not saved yet {level}")
            llm.sleep(level=level)
            llm.wake_up(tags=["weights"])
            if level == 2:
                llm.collective_rpc("reload_weights")
            llm.wake_up(tags=["kv_cache"])
            self.check(f"sleep {level}", hit=True, before=old)
