"""Speculative decoding: the places of rejected drafts are written, too, but never stored as if they had been computed."""
from __future__ import annotations

import dataclasses
from typing import Any

from context import Context, Prompt, difference, must_equal
from harness import Answer, Engine, Failed, Missed
from promises import promise

ALPHABET = list(range(100, 112))  # so few that the last token has nearly always been there before: a draft in every step, mostly a wrong one
TOKENS = 72  # an answer fills two blocks at least
SPECULATIVE = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4, prompt_lookup_min=1)


@dataclasses.dataclass
class Talk:
    """Turns of conversations, and what an engine without a cache and without drafts answers."""
    rounds: list[list[Prompt]]
    expected: list[list[Answer]]


def ask(engine: Engine, prompts: list[Prompt], together: bool = True) -> list[Answer]:
    requests: list[dict[str, Any]] = [dict(ids=p, max_tokens=TOKENS, allowed=ALPHABET) for p in prompts]
    return engine.run(requests) if together else [engine.run([request])[0] for request in requests]


def talk(context: Context, plain: Engine, users: int, turns: int) -> Talk:
    def words(count: int) -> Prompt:
        return [context.random.choice(ALPHABET) for _ in range(count)]
    out = Talk([], [])
    histories = [words(context.random.randint(200, 400)) for _ in range(users)]
    for _ in range(turns):
        out.rounds.append(histories)
        out.expected.append(ask(plain, histories))
        histories = [h + a.tokens + words(context.random.randint(20, 60)) for h, a in zip(histories, out.expected[-1])]
    return out


def play(what: str, engine: Engine, said: Talk) -> float:
    """All turns must have the answers expected; the share of the prompts' tokens that came from a cache."""
    cached = possible = 0
    for i, (prompts, expected) in enumerate(zip(said.rounds, said.expected)):
        answers = ask(engine, prompts)
        must_equal(f"{what}, turn {i + 1}", expected, answers)
        cached += sum(a.cached or 0 for a in answers)
        possible += sum((len(p) - 1) // 32 * 32 for p in prompts)
    return cached / possible


def must_notice(context: Context, engine: Engine, said: Talk, settle: Any) -> None:
    """The same with a connector that saves a block while rejected drafts lie in it: were the comparison blind to that, it would prove nothing."""
    engine.reset()
    engine.call("faulty", "set_fault", fault="draft")
    must_equal("while it is stored", said.expected[0], ask(engine, said.rounds[0], together=False))
    settle()
    corrupted = engine.call("faulty", "set_fault", fault="")
    engine.reset()
    if not corrupted:
        raise Missed("no block was saved too early")
    d = difference(said.expected[1], ask(engine, said.rounds[1]))
    context.note(f"{corrupted} blocks saved too early: {d.tokens} of {d.requests} answers, logprobs off by {d.logprob:.2g}")
    if not d.any():
        raise Failed(f"{corrupted} blocks with rejected drafts were stored, and nothing noticed it")


def check(context: Context, model: str, control: bool) -> None:
    plain = context.engine(model, enable_prefix_caching=False)
    said, other = talk(context, plain, 6, 3), talk(context, plain, 6 if control else 0, 2)
    plain.kill()
    store = context.store()
    engine = context.engine(model, store, speculative_config=SPECULATIVE)
    play("cold", engine, said)
    drafts = engine.call("probes", "drafts")
    if not 0 < drafts["accepted"] < drafts["drafted"]:
        raise Missed(f"no draft was accepted, or none rejected: {drafts}")
    context.note(f"{drafts['accepted']} of {drafts['drafted']} drafted tokens accepted")
    store.settle()
    engine.reset()
    shares = [play("from the store", engine, said)]
    store.settle()
    engine.kill()
    engine = context.engine(model, store, faulty=control, speculative_config=SPECULATIVE)
    engine.generate(context.prompts(2, 40, 60), 2, together=False)
    shares.append(play("after the engine was killed", engine, said))
    if min(shares) < 0.9:
        raise Missed(f"only {shares} of the tokens came from a cache")
    if control:
        must_notice(context, engine, other, store.settle)
    engine.stop()
    store.must_be_clean("the engine has gone")


@promise(daemon=True, short=False)
def rejected_drafts_are_never_stored(context: Context) -> None:
    """n-gram drafts: answers are those without drafts and without a cache, also from blocks that were generated with drafts"""
    check(context, "gqa", control=True)


@promise(daemon=True, short=False)
def rejected_drafts_of_several_groups_are_never_stored(context: Context) -> None:
    """the same with full and sliding-window layers"""
    check(context, "hybrid", control=False)
