"""Weights changed in place, as loops of reinforcement learning do it: no engine is answered with blocks of other weights, and equal weights find everything again."""
from __future__ import annotations

import time
from typing import Any

from context import Context, Prompt, must_equal
from harness import Answer, Engine, Failed, Missed
from promises import promise

BLOCK = 32


def _set(worker: Any, seed: int) -> int:
    """In the process of a rank: weights number `seed`; 0 are those of the files. Not the linear layers: a CPU packs them."""
    import torch
    model = worker.model_runner.get_model()
    found = {name: p for name, p in model.named_parameters() if "embed_tokens" in name or "layernorm" in name}
    if not hasattr(worker, "original_weights"):
        worker.original_weights = {name: p.detach().clone() for name, p in found.items()}
    draw = torch.Generator().manual_seed(seed)
    for name, p in found.items():
        p.data.copy_(worker.original_weights[name] * (1 + 0.5 * torch.randn(p.shape, generator=draw) if seed else 1))
    return len(found)


def set_weights(engine: Any, seed: int) -> int:
    return sum(engine.collective_rpc(_set, args=(seed,)))


def set_while_paused(engine: Any, seed: int) -> None:
    from engine import core
    core(engine).pause_scheduler(mode="keep", clear_cache=False)
    set_weights(engine, seed)
    core(engine).resume_scheduler()


def set_in_the_middle(engine: Any, seed: int, ids: Prompt) -> bool:
    """While a request runs; and a reset that fails, because the request has blocks. Whether it has failed."""
    from vllm import SamplingParams
    engine.add_request("running", dict(prompt_token_ids=ids), SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False))
    engine.step()
    failed = not engine.reset_prefix_cache()
    set_weights(engine, seed)
    while engine.has_unfinished_requests():
        engine.step()
    return failed


class Pair:
    """An engine with a store, and one without any cache whose weights are the same."""

    def __init__(self, context: Context, store: Any) -> None:
        self.store = store
        self.engine = context.engine("gqa", store)
        self.plain = context.bench.engine("gqa", enable_prefix_caching=False, max_num_batched_tokens=4096)

    def change(self, seed: int, how: str = "set_weights", **arguments: Any) -> Any:
        self.plain.call("test_weights", "set_weights", seed=seed)
        return self.engine.call("test_weights", how, seed=seed, **arguments)

    def compare(self, what: str, prompts: list[Prompt], found: bool) -> list[Answer]:
        """Right answers; of the stored tokens all were found, or none."""
        answers = self.engine.generate(prompts)
        must_equal(what, self.plain.generate(prompts), answers)
        must_have_found(what, answers, prompts, found)
        self.store.settle()
        return answers


def must_have_found(what: str, answers: list[Answer], prompts: list[Prompt], found: bool) -> None:
    cached, possible = sum(a.cached or 0 for a in answers), sum((len(p) - 1) // BLOCK * BLOCK for p in prompts)
    if cached and not found:
        raise Failed(f"{what}: {cached} tokens of other weights were found")
    if found and cached < possible:
        raise Missed(f"{what}: {cached} of {possible} tokens were found")


@promise(daemon=True)
def changed_weights_never_meet_old_blocks(context: Context) -> None:
    """update and reset in both orders, in a pause, beside a reset that fails; a reset alone finds everything again; an innocent engine finds nothing of them"""
    store = context.store()
    pair, innocent = Pair(context, store), context.engine("gqa", store)
    engine, prompts, late = pair.engine, context.prompts(3, 400, 700), context.prompts(3, 400, 700)
    old = pair.compare("cold", prompts, found=False)
    for i in range(2):
        engine.reset()
        pair.compare(f"reset {i}", prompts, found=True)
    pair.change(1)
    engine.reset()
    pair.compare("update, reset", prompts, found=False)
    engine.reset()
    pair.compare("update, reset, and another reset", prompts, found=True)
    engine.reset()
    pair.change(2)
    pair.compare("reset, update", prompts, found=False)
    pair.change(0)
    engine.reset()
    must_equal("the first weights again", old, pair.compare("the first weights again", prompts, found=True))

    pair.change(3, "set_while_paused")
    engine.generate([p + late[0] for p in prompts])  # the engine itself uses its own old blocks: that is what it was asked for
    engine.reset()
    pair.compare("update in a pause", prompts, found=False)
    if not pair.change(4, "set_in_the_middle", ids=late[2]):
        raise Missed("the reset beside a running request did not fail")
    engine.generate(prompts)  # the same
    engine.reset()
    pair.compare("after a reset that has failed", prompts, found=False)

    pair.change(0)
    engine.reset()
    pair.compare("the first weights once more", prompts, found=True)
    pair.change(5)  # nobody says so, and what is computed is saved under the name of the files
    wrong = engine.generate(late)
    store.settle()
    engine.reset()
    engine.generate(context.prompts(1, 100, 200))  # the proof, and what was saved since the last one is taken back
    wait_withdrawn(engine)
    pair.change(0)
    right = pair.plain.generate(late + prompts)
    if not any(a.tokens != b.tokens for a, b in zip(wrong, right)):
        raise Failed("the changed weights answer like the first ones: nothing was tested")
    answers = innocent.generate(late + prompts)
    must_equal("an innocent engine", right, answers)
    must_have_found("an innocent engine, what was saved with other weights", answers[: len(late)], late, found=False)
    must_have_found("an innocent engine, what was not", answers[len(late) :], prompts, found=True)
    store.must_be_clean("all changes")


def wait_withdrawn(engine: Engine) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if engine.call("test_weights", "withdrawing") == 0:
            return
        time.sleep(0.05)
    raise Failed("what was saved with other weights was not taken back")


def withdrawing(engine: Any) -> int:
    from engine import core, pump
    pump(engine)
    stats = core(engine).scheduler.connector._c.stats()
    return int(stats["withdrawn"] - stats["withdrawals"])


@promise(daemon=True, short=False)
def engines_of_other_weights_hand_nothing_over(context: Context) -> None:
    """a decode engine whose weights are others than the prefill engine's computes at once; updated alike they hand over again"""
    from test_pd import count, decodes, prefills
    store = context.store()
    extra = dict(handover_ms=20000)
    p, d = (context.engine("gqa", store, extra=extra) for _ in range(2))
    plain = context.bench.engine("gqa", enable_prefix_caching=False, max_num_batched_tokens=4096)
    for engine in (p, d):
        engine.generate(context.prompts(1, 100, 200), max_tokens=1)

    def hand_over(what: str, comes: bool) -> None:
        prompts = context.prompts(2, 400, 700)
        begin, before = time.monotonic(), count(d, "handovers_received")
        handed = [answer.params or {} for answer in p.run(prefills(prompts))]
        answers = d.run(decodes(prompts, handed))
        must_equal(what, plain.generate(prompts), answers)
        came = count(d, "handovers_received") - before
        if came != (len(prompts) if comes else 0):
            raise Missed(f"{what}: {came} of {len(prompts)} prompts were handed over")
        if not comes and time.monotonic() - begin > 15:
            raise Failed(f"{what}: it took {time.monotonic() - begin:.1f} s")
    hand_over("equal weights", comes=True)
    for engine in (d, plain):
        engine.call("test_weights", "set_weights", seed=1)
    d.reset()
    hand_over("other weights", comes=False)
    p.call("test_weights", "set_weights", seed=1)
    p.reset()
    hand_over("updated alike", comes=True)
    for engine in (p, d):
        engine.kill()
    store.must_be_clean("hand-overs of other weights")
