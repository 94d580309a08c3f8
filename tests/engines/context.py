"""What tests share: the answers of an engine without a cache, conversations, a store, comparisons."""
from __future__ import annotations

import dataclasses
import random
import time
from typing import Any, Sequence

import harness
from harness import Answer, Bench, Daemon, Engine, Failed
from models import FIRST_TOKEN, VOCAB

LOGPROB = 1e-3
Prompt = list[int]
# A model that runs in bfloat16 answers alike only where its prompts are computed in the same pieces: one at a time, cut where states are kept.
# Its kernels are Python here; compiling them takes longer than the tests.
IN_PIECES: dict[str, dict[str, Any]] = {
    "recurrent": dict(dtype="bfloat16", enable_prefix_caching=True, block_size=256, max_num_batched_tokens=1024, environment=dict(TORCHDYNAMO_DISABLE="1"))}


@dataclasses.dataclass
class Difference:
    """Of answers from those of the engine without a cache."""
    requests: int = 0
    tokens: int = 0  # answers with other tokens
    logprob: float = 0.0  # the largest difference, of tokens that are equal

    def any(self) -> bool:
        return self.tokens > 0 or self.logprob > LOGPROB


def difference(expected: Sequence[Answer], got: Sequence[Answer]) -> Difference:
    out = Difference()
    for want, have in zip(expected, got, strict=True):
        if have.finish != "length":
            raise Failed(f"a request has ended with {have.finish!r} after {len(have.tokens)} tokens")
        out.requests += 1
        out.tokens += want.tokens != have.tokens
        for a, b, p, q in zip(want.tokens, have.tokens, want.logprobs, have.logprobs):
            if a != b:
                break
            out.logprob = max(out.logprob, abs(p - q))
    return out


def must_equal(what: str, expected: Sequence[Answer], got: Sequence[Answer]) -> None:
    d = difference(expected, got)
    if d.any():
        raise Failed(f"{what}: {d.tokens} of {d.requests} answers have other tokens than without a cache, logprobs differ by up to {d.logprob:.2g}")


@dataclasses.dataclass
class Dialogue:
    """Conversations of several users, turn by turn, with what an engine without a cache answers."""
    rounds: list[list[Prompt]]
    expected: list[list[Answer]]
    max_tokens: int

    def flat(self) -> tuple[list[Prompt], list[Answer]]:
        return [p for r in self.rounds for p in r], [a for r in self.expected for a in r]

    def __len__(self) -> int:
        return sum(len(r) for r in self.rounds)


@dataclasses.dataclass
class Played:
    cached: int
    possible: int  # tokens of whole blocks, but for the last token of a prompt

    @property
    def share(self) -> float:
        return self.cached / max(1, self.possible)


def play(what: str, engine: Engine, dialogue: Dialogue, block: int = 32) -> Played:
    """All rounds; every answer must be that of the engine without a cache."""
    out = Played(0, 0)
    for i, (prompts, expected) in enumerate(zip(dialogue.rounds, dialogue.expected)):
        answers = engine.generate(prompts, dialogue.max_tokens)
        must_equal(f"{what}, turn {i + 1}", expected, answers)
        out.cached += sum(a.cached or 0 for a in answers)
        out.possible += sum((len(p) - 1) // block * block for p in prompts)
    return out


class Oracle:
    """An engine without a cache, or whose cache is emptied before each request. One at a time; what it has answered is kept."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.engine: Engine | None = None
        self.model = ""
        self.known: dict[tuple[str, tuple[int, ...], int], Answer] = {}

    def prepare(self, model: str) -> None:
        """Start it, without waiting for it."""
        if self.model == model:
            return
        self.stop()
        self.engine, self.model = self.bench.start_engine(model, **IN_PIECES.get(model, dict(enable_prefix_caching=False, max_num_batched_tokens=4096))), model
        self.started = False

    def stop(self) -> None:
        if self.engine:
            self.engine.kill()
        self.engine, self.model = None, ""

    def compute(self, prompts: list[Prompt], max_tokens: int) -> list[Answer]:
        assert self.engine
        if self.model not in IN_PIECES:
            return self.engine.generate(prompts, max_tokens)
        answers = []
        for prompt in prompts:
            self.engine.reset()
            answers += self.engine.generate([prompt], max_tokens)
        return answers

    def answers(self, model: str, prompts: list[Prompt], max_tokens: int) -> list[Answer]:
        keys = [(model, tuple(p), max_tokens) for p in prompts]
        new = [list(key[1]) for key in dict.fromkeys(keys) if key not in self.known]
        if new:
            self.prepare(model)
            assert self.engine
            if not self.started:
                self.engine.wait_started()
                self.started = True
            for p, answer in zip(new, self.compute(new, max_tokens), strict=True):
                self.known[model, tuple(p), max_tokens] = answer
        return [self.known[key] for key in keys]


class Store:
    """What the engines of a test keep their cache in: kvd, or the baseline's folder."""

    def __init__(self, context: Context, daemon: Daemon | None) -> None:
        self.context, self.daemon = context, daemon
        self.path = context.bench.folder("naive")

    def connector(self, faulty: bool = False, **extra: Any) -> dict[str, Any]:
        config = self.context.bench.kvd(self.daemon, **extra) if self.daemon else harness.naive(self.path)
        if faulty:
            config |= dict(kv_connector="FaultyConnector", kv_connector_module_path="faulty")
        return config

    def stats(self) -> dict[str, float]:
        return self.daemon.stats() if self.daemon else {}

    def environment(self) -> dict[str, str]:
        return dict(KVD_TEST_BASE="kvd_vllm.connector:KvdConnector" if self.daemon else "naive:NaiveConnector")

    def settle(self) -> None:
        """Wait until what engines have handed over is stored."""
        if not self.daemon:
            return
        quiet_since, last = time.monotonic(), -1.0
        end = quiet_since + 10 * harness.SLOW
        while time.monotonic() < min(end, quiet_since + 0.15):
            stats = self.daemon.stats()
            if stats["kvd_puts"] or stats["kvd_put_blocks_total"] != last:
                quiet_since, last = time.monotonic(), stats["kvd_put_blocks_total"]
            time.sleep(0.02)

    def must_be_clean(self, what: str) -> None:
        """Nothing is leased, reserved or pinned, and the daemon's invariants hold."""
        if not self.daemon:
            return
        daemon = self.daemon

        def left() -> dict[str, float]:
            stats = daemon.stats()
            return {name: stats[name] for name in ("kvd_leases", "kvd_puts", "kvd_pins") if stats[name]}
        end = time.monotonic() + 5 * harness.SLOW
        while left() and time.monotonic() < end:
            time.sleep(0.05)
        if left():
            raise Failed(f"{what}: still held in the daemon after 5 s: {left()}")
        daemon.kvctl("check")


class Context:
    """Of one run of the tests."""

    def __init__(self, bench: Bench, kind: str, short: bool, seed: int) -> None:
        self.bench, self.kind, self.short, self.seed = bench, kind, short, seed
        self.oracle = Oracle(bench)
        self.random = random.Random(seed)
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def store(self, **options: str) -> Store:
        return Store(self, self.bench.daemon(**options) if self.kind == "kvd" else None)

    def engine(self, model: str, store: Store | None = None, faulty: bool = False, extra: dict[str, Any] | None = None, **options: Any) -> Engine:
        connector = store.connector(faulty, **(extra or {})) if store else None
        environment = (store.environment() if store else {}) | options.pop("environment", {})
        return self.bench.engine(model, connector, environment=environment, **options)

    def prompt(self, tokens: int) -> Prompt:
        return [self.random.randrange(FIRST_TOKEN, VOCAB) for _ in range(tokens)]

    def prompts(self, count: int, least: int, most: int) -> list[Prompt]:
        return [self.prompt(self.random.randint(least, most)) for _ in range(count)]

    def expected(self, model: str, prompts: list[Prompt], max_tokens: int = 16) -> list[Answer]:
        return self.oracle.answers(model, prompts, max_tokens)

    def dialogue(self, model: str, users: int, turns: int, max_tokens: int = 16) -> Dialogue:
        """Users share one of three system prompts; each turn adds the answer to the last and a new question."""
        systems = self.prompts(3, 200, 500)
        histories = [systems[i % 3] + self.prompt(self.random.randint(20, 120)) for i in range(users)]
        out = Dialogue([], [], max_tokens)
        for _ in range(turns):
            answers = self.expected(model, histories, max_tokens)
            out.rounds.append(histories)
            out.expected.append(answers)
            histories = [h + a.tokens + self.prompt(self.random.randint(20, 120)) for h, a in zip(histories, answers)]
        return out
