"""After aborts and preemptions nothing is held on either side."""
from __future__ import annotations

from typing import Any

from context import Context, Dialogue, Store, difference, must_equal
from harness import Engine, Failed, Missed
from promises import promise


def must_hold_nothing(what: str, engine: Engine, store: Store) -> None:
    engine.reset()
    free, total = engine.blocks()
    if free != total - 1:  # one is the null block
        raise Failed(f"{what}: {total - 1 - free} of the engine's {total} blocks are never freed")
    store.must_be_clean(what)


def aborted_batch(context: Context, prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
    out = []
    for _ in range(count):
        enter = context.random.randrange(0, 60)
        request: dict[str, Any] = dict(ids=context.random.choice(prompts), max_tokens=24, enter_step=enter)
        if context.random.random() < 0.7:
            request["abort_step"] = context.random.choice([0, 0, 1, 2, 3, 5, 8, 13])
        out.append(request)
    return out


def abort(context: Context, mode: str, dialogue: Dialogue, count: int) -> None:
    store = context.store()
    engine = context.engine("gqa", store, extra=dict(mode=mode), max_num_batched_tokens=256)
    prompts, expected = dialogue.flat()
    want = {tuple(p): a for p, a in zip(prompts, expected)}
    aborted = 0
    while aborted < count:
        engine.reset()
        batch = aborted_batch(context, prompts, 60)
        answers = engine.run(batch)
        for i, (request, answer) in enumerate(zip(batch, answers)):
            if answer.finish == "aborted":
                aborted += 1
            elif (d := difference([want[tuple(request["ids"])]], [answer])).any():
                raise Failed(f"mode {mode}, after {aborted} aborts, request {i} of {len(batch)}, {len(request['ids'])} tokens, {answer.cached} cached, was "
                             f"not aborted and its answer is wrong: {d}")
        store.settle()
    must_hold_nothing(f"mode {mode}, {aborted} aborts", engine, store)
    context.note(f"mode {mode}: {aborted} aborts")
    must_equal("after the aborts", expected, engine.generate(prompts, 24))
    engine.stop()
    store.must_be_clean("the engine has gone")


@promise()
def aborts_leave_nothing_behind(context: Context) -> None:
    """200 requests (2,000 in the full form, in each load mode some) aborted at random moments among others, prompts partly stored; the others' answers
    are right"""
    context.oracle.prepare("gqa")
    dialogue = context.dialogue("gqa", 8, 3, max_tokens=24)
    for mode, count in [("auto", 200)] if context.short else [("auto", 800), ("sync", 600), ("async", 600)]:
        abort(context, mode, dialogue, count)


@promise()
def preempted_requests_go_on_as_if_nothing_was(context: Context) -> None:
    """an engine cache so small that requests push each other out; they resume from the store"""
    context.oracle.prepare("gqa")
    store = context.store()
    engine = context.engine("gqa", store, num_gpu_blocks_override=72, max_num_batched_tokens=512, max_model_len=1536)
    prompts = context.prompts(8 if context.short else 24, 250, 420)
    expected = context.expected("gqa", prompts, 120)
    for turn in range(2):
        must_equal(f"turn {turn + 1}", expected, engine.generate(prompts, 120))
        store.settle()
    preemptions = engine.call("probes", "preemptions")
    if not preemptions:
        raise Missed("nothing was preempted: the test proves nothing")
    context.note(f"{preemptions} preemptions")
    must_hold_nothing("preemptions", engine, store)
    engine.stop()
    store.must_be_clean("the engine has gone")
