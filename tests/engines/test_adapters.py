"""Requests with LoRA adapters: a model and its adapters keep their caches apart, and each finds its own."""
from __future__ import annotations

from typing import Any

import models
from context import Context, Prompt, difference, must_equal
from harness import Answer, Engine, Failed, wait_for
from promises import promise
from test_shared import must_find, must_miss

RANK = 8
Adapter = dict[str, Any]  # name, number, path; None: the base model


def options() -> dict[str, Any]:
    return dict(enable_lora=True, max_loras=2, max_cpu_loras=4, max_lora_rank=RANK)


def ask(engine: Engine, prompts: list[Prompt], adapter: Adapter | None) -> list[Answer]:
    return engine.run([dict(ids=p, max_tokens=16, adapter=adapter) for p in prompts])


def all_at_once(engine: Engine, prompts: list[Prompt], kinds: dict[str, Adapter | None]) -> dict[str, list[Answer]]:
    """Every prompt of every kind in one batch."""
    answers = engine.run([dict(ids=p, max_tokens=16, adapter=adapter) for p in prompts for adapter in kinds.values()])
    return {name: answers[i::len(kinds)] for i, name in enumerate(kinds)}


def wait_named(context: Context, engine: Engine, adapter: Adapter) -> None:
    """Until its files are digested, its requests are neither loaded nor saved."""
    def refused() -> int:
        return engine.call("probes", "connector").get("spaces_refused", 0)

    def is_named() -> bool:
        before = refused()
        ask(engine, context.prompts(1, 40, 60), adapter)
        return refused() == before
    wait_for(f"the name of adapter {adapter['name']}", 60, is_named)


# The CPU kernels of 0.32 take the base model's number among adapters, -1, for that of the last one: `beside` is what an engine without kvd answers right
# in one batch.
def check(context: Context, **extra: Any) -> None:
    root = str(context.bench.folder("adapters"))
    one, two = (models.adapter("gqa", root, seed, RANK) for seed in (1, 2))
    kinds: dict[str, Adapter | None] = dict(base=None, one=dict(name="one", number=1, path=one), two=dict(name="two", number=2, path=two))
    prompts = context.prompts(4, 300, 700)
    plain = context.engine("gqa", enable_prefix_caching=False, **options())
    expected = {name: ask(plain, prompts, adapter) for name, adapter in kinds.items()}
    beside = {name: answers for name, answers in all_at_once(plain, prompts, kinds).items() if not difference(expected[name], answers).any()}
    plain.kill()
    if alone := kinds.keys() - beside.keys():
        context.note(f"asked alone, because vLLM itself answers otherwise beside adapters: {', '.join(sorted(alone))}")
    for name, other in (("base", "one"), ("base", "two"), ("one", "two")):
        if difference(expected[name], expected[other]).tokens < len(prompts):
            raise Failed(f"{name} and {other} give the same answers: the test proves nothing")

    store = context.store()
    engine = context.engine("gqa", store, extra=extra, **options())
    for name, adapter in kinds.items():
        if adapter:
            wait_named(context, engine, adapter)
        engine.reset()
        answers = ask(engine, prompts, adapter)
        must_miss(name, answers)
        must_equal(name, expected[name], answers)
        store.settle()
    engine.kill()

    engine = context.engine("gqa", store, extra=extra, **options())
    for adapter in kinds.values():  # a busy daemon may open an adapter's space later than its first request waits
        if adapter:
            wait_named(context, engine, adapter)
        ask(engine, context.prompts(2, 40, 60), adapter)
    for name, adapter in reversed(kinds.items()):
        answers = ask(engine, prompts, adapter)
        must_find(f"{name} after a restart", answers)
        must_equal(f"{name} after a restart", expected[name], answers)
    engine.reset()
    for name, answers in all_at_once(engine, prompts, {name: kinds[name] for name in beside}).items():
        must_find(f"{name} with the others", answers)
        must_equal(f"{name} with the others", expected[name], answers)
    engine.reset()
    changed = dict(name="one", number=3, path=two)  # the name of one, the files of the other
    answers = ask(engine, prompts, changed)
    must_miss("an adapter of the same name with other files", answers)
    must_equal("an adapter of the same name with other files", expected["two"], answers)
    context.note(f"in one batch: {', '.join(sorted(beside))}")
    engine.stop()
    store.must_be_clean("the engine has gone")


@promise(daemon=True, short=False)
def adapters_and_the_base_model_never_share_a_block(context: Context) -> None:
    """LoRA: equal token ids; each finds its own after an engine restart, and in one batch; the engine's block hashes"""
    check(context)


@promise(daemon=True, short=False)
def adapters_never_share_a_block_under_own_keys(context: Context) -> None:
    """the same with kvd's own keys, which do not contain the adapter: only the spaces keep them apart"""
    check(context, hash="own")
