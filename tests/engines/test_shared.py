"""Engines of one kind share a daemon; engines of different kinds share nothing, whatever their token ids are."""
from __future__ import annotations

from typing import Any

from context import Context, must_equal, play
from harness import Failed, Missed
from promises import promise


@promise()
def two_engines_share_one_store(context: Context) -> None:
    """what one has stored the other finds; then both at once"""
    context.oracle.prepare("gqa")
    store = context.store()
    dialogue = context.dialogue("gqa", 6, 3)
    context.oracle.stop()
    one, two = context.engine("gqa", store), context.engine("gqa", store)
    play("the first engine", one, dialogue)
    store.settle()
    played = play("the second engine", two, dialogue)
    if played.share < 0.9:
        raise Missed(f"the second engine found {played.cached} of {played.possible} tokens")
    one.reset()
    two.reset()
    prompts, expected = dialogue.flat()
    for engine in (one, two):
        engine.submit([dict(ids=p, max_tokens=16) for p in prompts])
    must_equal("the first of two at once", expected, one.collect())
    must_equal("the second of two at once", expected, two.collect())
    new = context.prompts(6, 300, 900)
    for engine in (one, two):  # both store the same blocks
        engine.submit([dict(ids=p, max_tokens=16) for p in new])
    first, second = one.collect(), two.collect()
    must_equal("two engines that store the same", first, second)
    must_equal("two engines that store the same", context.expected("gqa", new), first)
    one.kill()
    two.stop()
    store.must_be_clean("both engines have gone")


@promise()
def different_models_never_share_a_block(context: Context) -> None:
    """other weights, dtype, block size or salt: the same token ids find nothing"""
    store = context.store()
    prompts = context.prompts(5, 500, 900)
    engine = context.engine("gqa", store)
    plain = engine.generate(prompts)
    for salt in ("one", "two"):
        engine.reset()
        must_miss(f"salt {salt}", engine.generate(prompts, salt=salt))
        store.settle()
        engine.reset()
        again = engine.generate(prompts, salt=salt)
        must_equal(f"salt {salt}", plain, again)
        must_find(f"salt {salt}, again", again)
    engine.kill()
    others: list[tuple[str, dict[str, Any]]] = [
        ("weights", dict(weights=1)), ("weights changed in the middle of a file", dict(changed=True)), ("dtype and block size", dict(dtype="bfloat16", block_size=64)), ("block size", dict(block_size=64))]
    if not context.short:
        others += [("dtype", dict(dtype="bfloat16"))]
    for what, options in others:
        engine = context.engine("gqa", store, **options)
        must_miss(what, engine.generate(prompts))
        engine.kill()
    engine = context.engine("mha", store)
    must_miss("model", engine.generate(prompts))
    store.settle()
    engine.reset()
    must_find("model, again", engine.generate(prompts))
    engine.kill()
    engine = context.engine("gqa", store)
    answers = engine.generate(prompts)
    must_find("the first engine's kind", answers)
    must_equal("the first engine's kind", plain, answers)


def must_miss(what: str, answers: list[Any]) -> None:
    if any(a.cached for a in answers):
        raise Failed(f"{what}: blocks of another kind were used: {[a.cached for a in answers]} tokens")


def must_find(what: str, answers: list[Any]) -> None:
    if not all(a.cached for a in answers):
        raise Missed(f"{what}: nothing was found: {[a.cached for a in answers]} tokens")
