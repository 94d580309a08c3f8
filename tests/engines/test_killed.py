"""Engine and daemon are killed at any moment: no request fails, no answer changes, hits come back."""
from __future__ import annotations

import time

from context import Context, Prompt, Store, must_equal, play
from harness import Answer, Engine, Failed, Missed, wait_for
from promises import promise

DISK = {"nvme.path": "", "nvme.size": "512MiB", "nvme.file_size": "64MiB"}


def disk(context: Context) -> dict[str, str]:
    return DISK | {"nvme.path": str(context.bench.folder("disk"))}


def cached(answers: list[Answer]) -> int:
    return sum(a.cached or 0 for a in answers)


def must_come_back(what: str, engine: Engine, store: Store, prompts: list[Prompt], expected: list[Answer]) -> None:
    """Ask until the store serves again: the connector attaches on its own."""
    possible = sum((len(p) - 1) // 32 * 32 for p in prompts)

    def served() -> bool:
        engine.reset()
        answers = engine.generate(prompts)
        must_equal(what, expected, answers)
        store.settle()
        return cached(answers) >= 0.9 * possible
    wait_for(f"hits to come back ({what})", 20, served)


@promise()
def an_engine_killed_while_storing_leaves_whole_blocks(context: Context) -> None:
    """kill -9 in the middle of prefill; what the next engine finds is right, and nothing stays held"""
    context.oracle.prepare("gqa")
    store = context.store()
    dialogue = context.dialogue("gqa", 8, 2)
    prompts, expected = dialogue.flat()
    hits = 0
    for _ in range(1 if context.short else 4):
        engine = context.engine("gqa", store, max_num_batched_tokens=128)
        engine.generate(context.prompts(1, 200, 300))  # a process's first prefill is slow
        engine.submit([dict(ids=p, max_tokens=16) for p in prompts])
        time.sleep(context.random.uniform(0.05, 0.5))
        engine.kill()
        store.must_be_clean("the engine was killed")
    engine = context.engine("gqa", store)
    answers = engine.generate(prompts)
    must_equal("after the kill", expected, answers)
    hits = cached(answers)
    context.note(f"{hits} tokens cached after the kill")
    store.settle()
    must_come_back("after the kill", engine, store, prompts, expected)
    engine.stop()
    store.must_be_clean("the engine has gone")


@promise()
def the_first_request_of_a_restarted_engine_is_a_hit(context: Context) -> None:
    """a second after its start an engine has found the store; the first answer comes from there"""
    context.oracle.prepare("gqa")
    store = context.store()
    prompts = context.prompts(2, 500, 900)
    expected = context.expected("gqa", prompts)
    context.oracle.stop()
    for start in range(2):
        engine = context.engine("gqa", store)
        time.sleep(1)
        answers = engine.generate(prompts, together=False)
        must_equal(f"start {start + 1}", expected, answers)
        if start == 1 and not all(a.cached for a in answers):
            raise Missed(f"tokens from the store: {[a.cached for a in answers]}")
        store.settle()
        engine.kill()


@promise(daemon=True)
def a_daemon_killed_at_any_moment_costs_hits_only(context: Context) -> None:
    """kill -9 of the daemon in the middle of saves and in the middle of loads, and its restart; then engine and daemon at once"""
    context.oracle.prepare("gqa")
    store = context.store(**disk(context))
    assert store.daemon
    engine = context.engine("gqa", store, faulty=True, max_num_batched_tokens=256)
    dialogue = context.dialogue("gqa", 6, 3)
    prompts, expected = dialogue.flat()
    play("before", engine, dialogue)
    store.settle()
    times = 4 if context.short else 20
    for i in range(times):
        killed_while(context, engine, store, "loading", prompts, expected)
        new = context.prompts(6, 400, 900)
        killed_while(context, engine, store, "saving", new, context.expected("gqa", new))
    context.note(f"{engine.call('faulty', 'load_errors')} blocks not loaded")
    must_come_back("the daemon was killed", engine, store, prompts, expected)
    if problems := engine.problems():
        raise Failed("\n".join(problems))
    engine.submit([dict(ids=p) for p in prompts])
    time.sleep(0.1)
    store.daemon.kill()
    engine.kill()
    store.daemon.start()
    engine = context.engine("gqa", store)
    answers = engine.generate(prompts)
    must_equal("both were killed", expected, answers)
    context.note(f"{2 * times} kills; both killed: {cached(answers)} tokens cached at once, from disk")
    must_come_back("both were killed", engine, store, prompts, expected)
    engine.stop()
    store.must_be_clean("the engine has gone")


def killed_while(context: Context, engine: Engine, store: Store, doing: str, prompts: list[Prompt], expected: list[Answer]) -> None:
    assert store.daemon
    engine.reset()
    if doing == "loading":
        engine.call("faulty", "set_fault", fault="delay", value=20)  # leases are held meanwhile
    engine.submit([dict(ids=p, max_tokens=16) for p in prompts])
    time.sleep(context.random.uniform(0.0, 0.15))
    store.daemon.kill()
    time.sleep(context.random.uniform(0.0, 0.3))
    store.daemon.start()
    must_equal(f"the daemon was killed while {doing}", expected, engine.collect())
    engine.call("faulty", "set_fault", fault="")
