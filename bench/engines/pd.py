"""A prefill engine (P) on one core hands prompts over to a decode engine (D) on another one: the time to D's first token.
What it is compared with runs on the same cores in the same rounds: one engine without a connector, and a pair with vLLM's NixlConnector."""
from __future__ import annotations

import os
import signal
import statistics
import time
import uuid
from typing import Any

from harness import Answer, Engine, Failed, Skipped
from rig import ENVIRONMENT, PAUSE_S, Rig, must_cache, spread
from test_nixl import skip_without_nixl
from test_pd import TOY, free_port

STEP = 1024  # tokens a step computes, of all engines
TOGETHER = "goal: pair <= one + 1.1 x hit; strict: with hit - own, the copy alone"


def start(rig: Rig) -> dict[str, Engine]:
    """P and D with kvd, one engine without a connector, and both with NixlConnector, if it is there. The core of each is its own."""
    longest = max(rig.args.lengths) + 64
    options: dict[str, Any] = dict(mp=False, max_num_seqs=4, max_model_len=longest, max_num_batched_tokens=STEP, num_gpu_blocks_override=4 * longest // 32)
    rig.daemon = rig.bench.daemon(**{"cpu.size": "2GiB", "cpu.slab_size": "64MiB"})
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise Failed("pd: two processors are needed")
    out: dict[str, Engine] = {}
    kvd = rig.connector("kvd")
    start_some(rig, out, options, dict(p=(kvd, cores[0]), d=(kvd, cores[1]), one=(None, cores[0])))
    handed_over(out["p"], out["d"], rig.prompt(STEP))  # what two engines do once
    try:
        skip_without_nixl()
    except Skipped as reason:
        rig.skipped("pd", "nixl", str(reason))
        return out
    start_some(rig, out, options, {"nixl p": (nixl("kv_producer"), cores[0]), "nixl d": (nixl("kv_consumer"), cores[1])})
    by_nixl(out, rig.prompt(STEP))
    return out


def start_some(rig: Rig, out: dict[str, Engine], options: dict[str, Any], wanted: dict[str, tuple[dict[str, Any] | None, int]]) -> None:
    """Engines by name, each with its connector, on its core."""
    for name, (connector, core) in wanted.items():
        side_channel = dict(VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()))
        environment = ENVIRONMENT | side_channel | dict(VLLM_CPU_OMP_THREADS_BIND=str(core))
        engine = rig.bench.start_engine(rig.args.model, connector, environment=environment, **options)
        os.sched_setaffinity(engine.process.pid, {core})  # its threads too: none of them runs yet
        out[name] = engine
    for name, (_, core) in wanted.items():
        out[name].wait_started()
        os.sched_setaffinity(out[name].process.pid, {core})  # NixlConnector has moved this thread, which computes, to the machine's last core
        for tokens in (33, 700, STEP):  # the first prefills of a process are slow
            out[name].generate([rig.prompt(tokens)], 3)


def nixl(role: str) -> dict[str, Any]:
    return dict(kv_connector="NixlConnector", kv_role=role, kv_buffer_device="cpu")


def handed_over(p: Engine, d: Engine, prompt: list[int]) -> Answer:
    """Both at once, under one name."""
    name = uuid.uuid4().hex
    before = loaded(d)
    d.submit([dict(ids=prompt, max_tokens=2, params=dict(do_remote_prefill=True, transfer_id=name))])
    p.run([dict(ids=prompt, max_tokens=1, params=dict(do_remote_decode=True, transfer_id=name))])
    answer = d.collect()[0]
    if loaded(d) - before < len(prompt) - 64:
        raise Failed(f"a hand-over of {len(prompt)} tokens: only {loaded(d) - before} came")
    return answer


def by_nixl(engines: dict[str, Engine], prompt: list[int]) -> tuple[Answer, float]:
    """One after the other, as this connector is made: D reads when P has computed all. The milliseconds to D's first token are those of both; and D's part.
    In each engine NIXL has a thread that never sleeps. It gets the core on which nothing is computed, and these engines are stopped while others are measured."""
    p, d = engines["nixl p"], engines["nixl d"]
    cores = [next(iter(os.sched_getaffinity(one.process.pid))) for one in (p, d)]
    move_threads(p, cores[1])
    os.kill(p.process.pid, signal.SIGCONT)
    first = p.run([dict(ids=prompt, max_tokens=1, params=TOY)])[0]
    move_threads(p, cores[0])
    move_threads(d, cores[0])
    os.kill(d.process.pid, signal.SIGCONT)
    reads = d.call("test_nixl", "nixl_reads")
    answer = d.run([dict(ids=prompt, max_tokens=2, params=first.params)])[0]
    if d.call("test_nixl", "nixl_reads") != reads + 1:
        raise Failed(f"NixlConnector: a prompt of {len(prompt)} tokens was not read")
    for engine in (p, d):
        os.kill(engine.process.pid, signal.SIGSTOP)
    at_d = answer.ttft_ms or 0.0
    answer.ttft_ms = (first.ms or 0.0) + at_d
    return answer, at_d


def move_threads(engine: Engine, core: int) -> None:
    """All but the first one, which computes."""
    for thread in os.listdir(f"/proc/{engine.process.pid}/task"):
        if int(thread) != engine.process.pid:
            os.sched_setaffinity(int(thread), {core})


def loaded(d: Engine) -> int:
    return int(d.call("test_pd", "counters")["load_tokens"])


def first_token(rig: Rig, engines: dict[str, Engine], tokens: int) -> None:
    """Prompt by prompt: one engine alone and the pairs, in random order; then what D takes from the pool, and from its own cache."""
    compared = ["one", "pair"] + ["nixl"] * ("nixl p" in engines)
    times: dict[str, list[float]] = {kind: [] for kind in compared + ["hit", "own"]}
    nixl_at_d: list[float] = []
    d = engines["d"]
    for i in range(rig.args.rounds):
        prompt, answers = rig.prompt(tokens), {}
        for kind in rig.random.sample(compared, len(compared)):
            time.sleep(PAUSE_S)
            if kind == "one":
                answers[kind] = engines["one"].generate([prompt], 2)[0]
            elif kind == "pair":
                answers[kind] = handed_over(engines["p"], d, prompt)
            else:
                answers[kind], at_d = by_nixl(engines, prompt)
                nixl_at_d.append(at_d)
        for kind in ("hit", "own"):
            rig.settle()
            if kind == "hit":
                d.reset()
            answers[kind] = d.generate([prompt], 2)[0]
            must_cache("kvd", kind, answers[kind], tokens - 64)
        if any(answer.tokens != answers["one"].tokens for answer in answers.values()):
            raise Failed(f"{tokens} tokens: the answers differ: {answers}")
        for kind, answer in answers.items():
            times[kind].append(answer.ttft_ms or 0.0)
    what = f"first token, {tokens} tokens"
    for kind in ("one", "hit", "own"):
        rig.line("pd", what, kind, times[kind], "ms")
    rounds = list(zip(*(times[kind] for kind in ("one", "pair", "hit", "own"))))
    ratios = [pair / (one + 1.1 * hit) for one, pair, hit, _ in rounds]
    if nixl_at_d:
        theirs = [nixl / (one + 1.1 * hit) for nixl, (one, _, hit, _) in zip(times["nixl"], rounds)]
        rig.line("pd", what, "nixl", times["nixl"], "ms", ratio=round(statistics.median(theirs), 4), ratio_spread=round(spread(theirs), 4),
                 at_d_ms=round(statistics.median(nixl_at_d), 3), pair_to_nixl=round(statistics.median(a / b for a, b in zip(times["pair"], times["nixl"])), 4),
                 pair_to_one_and_d=round(statistics.median(a / (b + c) for a, b, c in zip(times["pair"], times["one"], nixl_at_d)), 4))
    strict = [pair / (one + 1.1 * max(0.0, hit - own)) for one, pair, hit, own in rounds]
    rig.line("pd", what, "pair", times["pair"], "ms", ratio=round(statistics.median(ratios), 4), ratio_spread=round(spread(ratios), 4),
             strict=round(statistics.median(strict), 4), goal=TOGETHER)


def run(rig: Rig) -> None:
    engines = start(rig)
    try:
        for tokens in rig.args.lengths:
            first_token(rig, engines, tokens)
    finally:
        for engine in engines.values():
            engine.kill()
