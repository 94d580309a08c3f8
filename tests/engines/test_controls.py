"""The tests of the tests: wrong bytes in the engine's cache must be seen by the comparison that all others rely on."""
from __future__ import annotations

from context import Context, difference
from harness import Failed, Missed
from promises import promise


@promise()
def wrong_bytes_are_noticed(context: Context) -> None:
    """a load of zeros; one wrong page in one layer of every eighth block"""
    context.oracle.prepare("gqa")
    store = context.store()
    engine = context.engine("gqa", store, faulty=True)
    prompts = context.prompts(6, 600, 1200)
    expected = context.expected("gqa", prompts)
    if (d := difference(expected, engine.generate(prompts))).any():
        raise Failed(f"cold: {d}")
    store.settle()
    for fault in ("", "zeros", "page", ""):
        engine.reset()
        engine.call("faulty", "set_fault", fault=fault)
        d = difference(expected, engine.generate(prompts))
        corrupted = engine.call("faulty", "set_fault", fault="")
        context.note(f"{fault or 'honest'}: {corrupted} pages corrupted, {d.tokens} of {d.requests} answers, logprobs off by {d.logprob:.2g}")
        if fault and not corrupted:
            raise Missed(f"{fault}: nothing was loaded, so no page was corrupted")
        if d.any() != bool(fault):
            raise Failed(f"{fault or 'honest'}: {d}")
