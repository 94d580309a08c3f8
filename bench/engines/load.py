"""Whole batches: multi-turn throughput, prompts nobody has seen before, CPU seconds a prompt token."""
from __future__ import annotations

import statistics
import time

from rig import PAUSE_S, Rig, spread

USERS, TURNS = 8, 5
PROCESS_PAIRS = 3  # of unique, then come new engines
DOCUMENTS, DOCUMENT = 10, 2048  # of thrash
FULL_POOL, FULL_BATCHES = {"cpu.size": "512MiB"}, 12  # a batch of unique stores 50 MB


def batch(rig: Rig, kind: str, prompts: list[list[int]], tokens: int = 16) -> tuple[float, int]:
    """Seconds, and prompt tokens that were not computed."""
    time.sleep(PAUSE_S)
    began = time.perf_counter()
    answers = rig.engines[kind].generate(prompts, tokens)
    return time.perf_counter() - began, sum(answer.cached or 0 for answer in answers)


def conversations(rig: Rig) -> list[list[list[int]]]:
    """Turns of prompts: a shared start, then each turn longer by an answer and a question."""
    systems = [rig.prompt(600) for _ in range(2)]
    histories = [systems[i % 2] + rig.prompt(200) for i in range(USERS)]
    out = []
    for _ in range(TURNS):
        out.append(histories)
        histories = [h + rig.prompt(150) for h in histories]
    return out


def turns(rig: Rig) -> None:
    """The engine's cache holds a third of what the conversations need: by the time of the next turn much of it is gone."""
    total = USERS * (800 + 150 * TURNS) // 32
    rig.start(rig.args.kinds, max_model_len=2048, num_gpu_blocks_override=max(80, total // 3), max_num_seqs=2)
    rates: dict[str, list[float]] = {kind: [] for kind in rig.args.kinds}
    hits: dict[str, list[float]] = {kind: [] for kind in rig.args.kinds}
    for _ in range(rig.args.rounds):
        rounds = conversations(rig)
        tokens = sum(len(p) for prompts in rounds for p in prompts)
        for kind in rig.random.sample(rig.args.kinds, len(rig.args.kinds)):
            done = [batch(rig, kind, prompts) for prompts in rounds]
            rates[kind].append(tokens / sum(seconds for seconds, _ in done))
            hits[kind].append(sum(cached for _, cached in done) / tokens)
    for kind, values in rates.items():
        ratio = statistics.median(b / a for a, b in zip(rates["none"], values)) if "none" in rates else 0.0
        hit = statistics.median(hits[kind])  # of the prompt tokens, own cache and connector together: equal between those that miss nothing
        rig.line("turns", f"{USERS} users, {TURNS} turns", kind, values, "prompt tokens/s", ratio=ratio, cached=round(hit, 4))


def unique(rig: Rig) -> None:
    """Prompts that are never seen again: what the store costs, in a pool that evicts (as it does for all but its first minutes), and in one never used, without
    and with memory kept ready ahead.
    `none` runs twice a pair: the second against the first says how much is noise. Processes of one kind differ by more than the store costs (where their
    memory lies), so there are several of each."""
    for name, pool, batches in (("full pool", FULL_POOL, FULL_BATCHES), ("new pool", {"cpu.ahead": "0"}, 0), ("new pool, ahead", {"cpu.ahead": "2GiB"}, 0)):
        rig.fresh()
        rig.pool = pool
        unique_in(rig, name, batches)
    rig.pool = {}


def unique_in(rig: Rig, name: str, before: int) -> None:
    def prompts() -> list[list[int]]:
        return [rig.prompt(1024) for _ in range(4)]

    times: dict[str, list[float]] = {"none": [], "kvd": [], "again": []}
    for i in range(rig.args.pairs):
        if i % PROCESS_PAIRS == 0:
            rig.start(["none", "kvd"], max_model_len=2048, num_gpu_blocks_override=512)
        for _ in range(before if i == 0 else 0):
            batch(rig, "kvd", prompts())
        order = ["none", "kvd", "again"]
        for kind in order if i % 2 == 0 else order[::-1]:
            times[kind].append(batch(rig, "none" if kind == "again" else kind, prompts())[0])
    ratios = [2 * k / (a + b) for a, k, b in zip(times["none"], times["kvd"], times["again"])]
    noise = [b / a for a, b in zip(times["none"], times["again"])]
    none = times["none"] + times["again"]
    what = f"4 x 1024 tokens, {name}"
    rig.line("unique", what, "none", none, "s")
    rig.line("unique", what, "kvd", times["kvd"], "s", ratio=statistics.median(ratios), ratio_spread=spread(ratios), noise=statistics.median(noise),
             noise_spread=spread(noise), goal="ratio <= 1.03")


def thrash(rig: Rig) -> None:
    """Documents in turn, in a pool of 0.3 of them: each is evicted before it is asked for again. The first token of those that are computed, with and without
    admission; `hits`: the share of the documents that were loaded. The reference is the same document in the same engine, with nothing loaded nor saved: a second
    process differs by more than the goal."""
    for admission in ("all", "second_use"):
        rig.fresh()
        rig.pool = {"admission": admission, "nvme.path": "", "cpu.max_blocks": str(3 * DOCUMENTS * DOCUMENT // 32 // 10)}
        rig.start(["kvd"], max_model_len=DOCUMENT + 64, max_num_batched_tokens=DOCUMENT, num_gpu_blocks_override=256)
        thrash_with(rig, f"{DOCUMENT} tokens, admission {admission}")
    rig.pool = {}


def thrash_with(rig: Rig, name: str) -> None:
    documents = [rig.prompt(DOCUMENT) for _ in range(DOCUMENTS)]
    times: dict[str, list[float]] = {"skip": [], "kvd": [], "again": []}
    for i in range(rig.args.rounds + 3):  # in the first three the pool fills, thrashes, and is found to
        for j, document in enumerate(documents):
            took: dict[str, Answer] = {}
            for kind in list(times)[:: 1 if (i + j) % 2 else -1] if i > 2 else ["kvd"]:
                rig.engines["kvd"].reset()
                took[kind] = rig.first_token("kvd", document, params=None if kind == "kvd" else {"skip_read": True, "skip_write": True})
            for kind in times if i > 2 and not took["kvd"].cached else []:
                times[kind].append(took[kind].ttft_ms or 0.0)
            rig.settle() if i < 3 else None
    ratios = [2 * k / (a + b) for a, k, b in zip(times["skip"], times["kvd"], times["again"])]
    noise = [b / a for a, b in zip(times["skip"], times["again"])]
    assert rig.daemon
    rig.line("thrash", name, "skip", times["skip"] + times["again"], "ms")
    rig.line("thrash", name, "kvd", times["kvd"], "ms", ratio=statistics.median(ratios), ratio_spread=spread(ratios), noise=statistics.median(noise),
             hits=round(1 - len(ratios) / (rig.args.rounds * DOCUMENTS), 3), saved=rig.daemon.stats()["kvd_put_blocks_total"], goal="ratio <= 1.01")


def cpu_of(rig: Rig, kind: str) -> float:
    seconds = float(rig.engines[kind].ask(do="cpu"))
    return seconds + (rig.daemon.cpu_seconds() if kind == "kvd" and rig.daemon else 0.0)


def cpu(rig: Rig) -> None:
    """Of engine and daemon together, a prompt token: cold, then from the store."""
    rig.start(rig.args.kinds, max_model_len=2048, num_gpu_blocks_override=1024)
    used: dict[tuple[str, str], list[float]] = {}
    for _ in range(rig.args.rounds):
        prompts = [rig.prompt(1024) for _ in range(8)]
        for kind in rig.random.sample(rig.args.kinds, len(rig.args.kinds)):
            for state in ("cold", "warm"):
                rig.engines[kind].reset()
                before = cpu_of(rig, kind)
                batch(rig, kind, prompts, 1)
                rig.settle()
                used.setdefault((kind, state), []).append((cpu_of(rig, kind) - before) / sum(map(len, prompts)) * 1e6)
    for (kind, state), values in used.items():
        rig.line("cpu", f"8 x 1024 tokens, {state}", kind, values, "us/prompt token")
