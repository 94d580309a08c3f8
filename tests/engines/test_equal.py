"""Tokens and logprobs with the store are those without, in conversations whose turns share prefixes; and the store is used."""
from __future__ import annotations

import dataclasses
from typing import Any

from context import Context, Played, play
from harness import Failed, Missed
from promises import promise

SHARE = 0.9  # of the tokens that could come from a cache, at least this many must


@dataclasses.dataclass
class Case:
    model: str = "gqa"
    block: int = 32
    chunk: int = 256  # tokens a step; 4096: whole prompts
    mp: bool = False
    users: int = 6
    turns: int = 4
    restart: bool = True
    ranks: int = 1  # tensor parallel, a core each
    more: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of the engine
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        ranks = dict(tensor_parallel_size=self.ranks, environment=dict(VLLM_CPU_OMP_THREADS_BIND="|".join(str(i) for i in range(self.ranks))))
        return (ranks if self.ranks > 1 else {}) | self.more | dict(block_size=self.block, max_num_batched_tokens=self.chunk, mp=self.mp,
                    enable_chunked_prefill=self.chunk < 4096, num_gpu_blocks_override=512 * 32 // self.block)


def must_hit(what: str, played: Played, share: float = SHARE) -> None:
    if played.share < share:
        raise Missed(f"{what}: only {played.cached} of {played.possible} tokens came from a cache")


def check(context: Context, case: Case) -> None:
    context.oracle.prepare(case.model)
    store = context.store()
    engine = context.engine(case.model, store, extra=case.extra, **case.options())
    dialogue = context.dialogue(case.model, case.users, case.turns)
    cold = play("cold", engine, dialogue, case.block)
    store.settle()
    engine.reset()
    warm = play("from the store", engine, dialogue, case.block)
    must_hit("the engine's own cache was emptied", warm)
    if case.restart:
        store.settle()
        engine.kill()
        engine = context.engine(case.model, store, extra=case.extra, **case.options())
        engine.generate(context.prompts(2, 40, 60), 2, together=False)  # test_killed looks at a new engine's first request
        warm = play("after the engine was killed", engine, dialogue, case.block)
        must_hit("the engine was killed and restarted", warm)
    context.note(f"{len(dialogue)} requests, cached {cold.share:.0%} cold, {warm.share:.0%} warm")
    engine.stop()
    store.must_be_clean("the engine has gone")



@promise()
def answers_are_equal_gqa(context: Context) -> None:
    """GQA, in-process engine, chunked prefill, blocks of 32"""
    check(context, Case(users=12 if context.short else 100, turns=5))


@promise()
def answers_are_equal_multi_process(context: Context) -> None:
    """GQA, multi-process engine, whole prompts, blocks of 128"""
    check(context, Case(block=128, chunk=4096, mp=True, users=8))


@promise(short=False)
def answers_are_equal_tensor_parallel(context: Context) -> None:
    """GQA, two ranks that hold one KV head each"""
    check(context, Case(mp=True, ranks=2, users=4 if context.short else 12))


@promise(short=False)
def answers_are_equal_mha(context: Context) -> None:
    """MHA, in-process engine, chunked prefill, blocks of 32"""
    check(context, Case("mha", restart=not context.short))


@promise()
def answers_are_equal_sliding_window(context: Context) -> None:
    """full and sliding-window layers in turn: several KV groups"""
    check(context, Case("hybrid", chunk=1024))


@promise()
def answers_are_equal_with_synchronous_loads(context: Context) -> None:
    """the load mode forced to synchronous"""
    check(context, Case(restart=False, extra=dict(mode="sync")))


@promise()
def answers_are_equal_with_asynchronous_loads(context: Context) -> None:
    """the load mode forced to asynchronous"""
    check(context, Case(restart=False, extra=dict(mode="async")))


@promise(short=False)
def answers_are_equal_in_process_whole_prompts_128(context: Context) -> None:
    """GQA, in-process engine, whole prompts, blocks of 128"""
    check(context, Case(block=128, chunk=4096))


@promise(short=False)
def answers_are_equal_in_process_chunked_128(context: Context) -> None:
    """GQA, in-process engine, chunked prefill, blocks of 128"""
    check(context, Case(block=128))


@promise(short=False)
def answers_are_equal_multi_process_chunked_32(context: Context) -> None:
    """GQA, multi-process engine, chunked prefill, blocks of 32"""
    check(context, Case(mp=True))


@promise(short=False)
def answers_are_equal_sliding_window_multi_process(context: Context) -> None:
    """several KV groups, multi-process engine, chunked prefill, blocks of 128"""
    check(context, Case("hybrid", block=128, mp=True))


@promise(daemon=True)
def nothing_is_loaded_where_the_engine_keeps_no_prefixes(context: Context) -> None:
    """MLA on the CPU: vLLM switches prefix caching off because its kernel cannot go on from one; a hit would give wrong answers"""
    context.oracle.prepare("mla")
    store = context.store()
    engine = context.engine("mla", store, max_num_batched_tokens=4096)
    dialogue = context.dialogue("mla", 4, 2)
    play("first", engine, dialogue, 16)
    store.settle()
    engine.reset()
    played = play("again", engine, dialogue, 16)
    if played.cached:
        raise Failed(f"{played.cached} tokens came from a cache")
