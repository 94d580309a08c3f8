"""Time to the first token: cold, from the engine's own cache, after an engine restart, after a daemon restart (from disk)."""
from __future__ import annotations

import statistics

from rig import Rig, must_cache

GOAL = "goal: (kvd - own) <= 0.5 x (naive - own) at 8192; disk <= 1.3 x kvd"


STEP = 2048  # tokens a step computes


def run(rig: Rig) -> None:
    longest = max(rig.args.lengths)
    blocks = 2 * rig.args.rounds * longest // 32 + 256  # the engine without a connector keeps all prompts of a length
    rig.start(rig.args.kinds, max_model_len=longest + 64, max_num_batched_tokens=STEP, num_gpu_blocks_override=blocks)
    for tokens in rig.args.lengths:
        length(rig, tokens)


def kinds_for(rig: Rig, tokens: int) -> list[str]:
    """vLLM's ExampleConnector keeps the last step of a prompt, and its load of a longer one ends the engine."""
    return [kind for kind in rig.args.kinds if kind != "example" or tokens <= STEP]


def in_turn(rig: Rig, prompts: list[list[int]], warm: bool) -> dict[str, list[float]]:
    """Prompt by prompt, every kind in turn. Warm: from the store, the engine without a connector from its own cache."""
    kinds = kinds_for(rig, len(prompts[0]))
    out: dict[str, list[float]] = {kind: [] for kind in kinds}
    for prompt in prompts:
        for kind in rig.random.sample(kinds, len(kinds)):
            if warm and kind != "none":
                rig.engines[kind].reset()
            answer = rig.first_token(kind, prompt)
            if warm:
                must_cache(kind, "warm", answer, len(prompt) - 64)
            out[kind].append(answer.ttft_ms or 0.0)
    return out


def from_disk(rig: Rig, prompts: list[list[int]]) -> tuple[list[float], list[float]]:
    """After a restart of the daemon: each prompt from disk, and at once again from memory."""
    assert rig.daemon
    rig.settle()
    rig.daemon.stop()
    rig.daemon.start()
    engine = rig.engines["kvd"]
    wait_attached(rig)
    disk, memory = [], []
    for prompt in prompts:
        for values in (disk, memory):
            engine.reset()
            answer = rig.first_token("kvd", prompt)
            must_cache("kvd", "from disk" if values is disk else "from memory", answer, len(prompt) - 64)
            values.append(answer.ttft_ms or 0.0)
            rig.settle()
    return disk, memory


def wait_attached(rig: Rig) -> None:
    """The connector attaches again on its own: until a short prompt is a hit."""
    prompt = rig.prompt(200)
    for _ in range(200):
        rig.engines["kvd"].reset()
        if rig.first_token("kvd", prompt).cached:
            return
        rig.settle()


def length(rig: Rig, tokens: int) -> None:
    prompts = [rig.prompt(tokens) for _ in range(rig.args.rounds)]
    for kind, values in in_turn(rig, prompts, warm=False).items():
        rig.line("ttft", f"cold {tokens}", kind, values, "ms")
    rig.settle()
    for kind in [kind for kind in kinds_for(rig, tokens) if kind != "none"]:
        rig.restart(kind)
    medians: dict[str, float] = {}
    for kind, values in in_turn(rig, prompts, warm=True).items():
        rig.line("ttft", f"warm {tokens}", "own" if kind == "none" else kind, values, "ms")
        medians[kind] = statistics.median(values)
    if "kvd" in rig.args.kinds:
        disk, memory = from_disk(rig, prompts)
        rig.line("ttft", f"disk {tokens}", "kvd", disk, "ms", ratio=statistics.median(a / b for a, b in zip(disk, memory)))
    if {"none", "naive", "kvd"} <= set(medians) and medians["naive"] > medians["none"]:
        rig.line("ttft", f"excess {tokens}", "kvd/naive", [(medians["kvd"] - medians["none"]) / (medians["naive"] - medians["none"])], "ratio", goal=GOAL)
