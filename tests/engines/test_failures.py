"""Whatever goes wrong with a load, the engine computes what it did not get, and the answer is the same."""
from __future__ import annotations

import mmap
import os
import signal
import time

from context import Context, Prompt, Store, must_equal
from harness import Answer, Daemon, Engine, Missed
from promises import promise
from test_killed import cached, disk, must_come_back


def scribble(daemon: Daemon, every: int) -> int:
    """Turn over one byte in every `every` of the pool's used memory; how many bytes were."""
    changed = 0
    for path in daemon.memory_files("slab"):
        fd = os.open(path, os.O_RDWR)
        try:
            with mmap.mmap(fd, 0) as memory:
                for at in range(0, len(memory), every):
                    if any(memory[at:at + 64]):
                        memory[at + 7] ^= 0x55
                        changed += 1
        finally:
            os.close(fd)
    return changed


def prepare(context: Context, store: Store, count: int, **options: object) -> tuple[Engine, list[Prompt], list[Answer]]:
    context.oracle.prepare("gqa")
    engine = context.engine("gqa", store, faulty=True, **options)
    prompts = context.prompts(count, 500, 1100)
    expected = context.expected("gqa", prompts)
    must_equal("cold", expected, engine.generate(prompts))
    store.settle()
    engine.reset()
    return engine, prompts, expected


def failed(engine: Engine) -> int:
    return int(engine.call("faulty", "load_errors"))


@promise(daemon=True)
def corrupt_blocks_are_recomputed(context: Context) -> None:
    """bytes in the daemon's memory change behind its back: noticed by the digest, computed, stored anew"""
    store = context.store()
    assert store.daemon
    engine, prompts, expected = prepare(context, store, 6)
    changed = scribble(store.daemon, 16384)
    must_equal("corrupt blocks", expected, engine.generate(prompts))
    bad = store.daemon.stats()["kvd_bad_blocks_total"]
    if not changed or not bad:
        raise Missed(f"{changed} bytes were changed and {bad:.0f} blocks were found corrupt")
    context.note(f"{changed} bytes changed, {bad:.0f} blocks found corrupt, {failed(engine)} blocks not loaded")
    must_come_back("corrupt blocks", engine, store, prompts, expected)
    engine.stop()
    store.must_be_clean("the engine has gone")


@promise(daemon=True)
def nobody_else_uses_blocks_that_failed_to_load(context: Context) -> None:
    """a long prompt's blocks are corrupt; others with the same beginning come in the step of its load, and while it is computed again, piece by piece"""
    store = context.store()
    assert store.daemon
    engine = context.engine("gqa", store, faulty=True, extra=dict(mode="sync"), max_num_batched_tokens=256, max_num_seqs=8, long_prefill_token_threshold=64)
    shared = context.prompt(960)
    first, *others = [shared + context.prompt(40) for _ in range(5)]
    expected = context.expected("gqa", [first, *others])
    must_equal("cold", expected[:1], engine.generate([first]))
    store.settle()
    engine.reset()
    engine.generate(context.prompts(1, 40, 40), 2)  # the weights are proved: the next request is admitted in its first step, and the first of the others in the same one
    scribble(store.daemon, 4096)
    requests = [dict(ids=first, max_tokens=16)] + [dict(ids=p, max_tokens=16, enter_step=i) for i, p in enumerate(others)]
    must_equal("while the failed blocks were computed", expected, engine.run(requests))
    if not failed(engine):
        raise Missed("every block was loaded")
    store.settle()
    engine.reset()
    must_equal("from the store", expected, engine.generate([first, *others]))
    engine.stop()
    store.must_be_clean("the engine has gone")


@promise(daemon=True, short=False)
def a_lease_lost_before_the_load_is_a_miss(context: Context) -> None:
    """leases that live shorter than the engine takes to use them; memory so small that others need it meanwhile"""
    store = context.store(**{"lease.ttl": "100ms", "cpu.size": "16MiB", "cpu.slab_size": "4MiB"})
    engine, prompts, expected = prepare(context, store, 6)
    engine.call("faulty", "set_fault", fault="delay", value=250)
    for _ in range(2 if context.short else 8):
        engine.reset()
        must_equal("lost leases", expected, engine.generate(prompts))
    engine.call("faulty", "set_fault", fault="")
    context.note(f"{store.stats()['kvd_leases_ended_total{reason=expired}']:.0f} leases expired, {failed(engine)} blocks not loaded")
    must_come_back("lost leases", engine, store, prompts, expected)
    engine.stop()
    store.must_be_clean("the engine has gone")


@promise(daemon=True)
def a_stopped_daemon_during_loads_is_a_time_out(context: Context) -> None:
    """SIGSTOP at random moments while blocks come from disk; the engine goes on without"""
    store = context.store(**disk(context))
    assert store.daemon
    engine, prompts, expected = prepare(context, store, 6)
    longest = 0.0
    for _ in range(4 if context.short else 20):
        store.daemon.stop()
        store.daemon.start()  # everything is on disk only
        engine.reset()
        engine.submit([dict(ids=p, max_tokens=16) for p in prompts])
        time.sleep(context.random.uniform(0.0, 0.1))
        store.daemon.signal(signal.SIGSTOP)
        began = time.monotonic()
        must_equal("the daemon was stopped", expected, engine.collect(30))
        longest = max(longest, time.monotonic() - began)
        store.daemon.signal(signal.SIGCONT)
    context.note(f"6 requests took at most {longest:.1f} s with the daemon stopped, {failed(engine)} blocks not loaded")
    must_come_back("the daemon was stopped", engine, store, prompts, expected)
    engine.stop()
    store.must_be_clean("the engine has gone")


@promise(daemon=True)
def blocks_come_back_from_disk(context: Context) -> None:
    """the daemon is stopped and started again: hits out of its disk tier at once"""
    store = context.store(**disk(context))
    assert store.daemon
    engine, prompts, expected = prepare(context, store, 6)
    time.sleep(0.5)  # written behind
    store.daemon.stop()
    store.daemon.start()
    must_come_back("restart", engine, store, prompts, expected)
    disk_tokens = store.daemon.stats()["kvd_promoted_total"]
    if not disk_tokens:
        raise Missed("nothing was read from disk")
    engine.reset()
    context.note(f"{disk_tokens:.0f} blocks read from disk, {cached(engine.generate(prompts))} tokens cached in the end")
    engine.stop()
    store.must_be_clean("the engine has gone")


@promise(daemon=True)
def the_first_hit_on_a_disk_tells_what_computing_takes(context: Context) -> None:
    """engine and daemon restarted, all prompts stored, what does not pay is not loaded: the first hit is loaded in part; the others whole, or but for a piece not"""
    store = context.store(**disk(context) | {"cpu.slab_size": "16MiB", "cpu.size": "512MiB"})
    assert store.daemon
    options = dict(extra=dict(cost_model=True), max_model_len=2048, max_num_batched_tokens=2048, num_gpu_blocks_override=400)
    prompts = [context.prompt(1500) for _ in range(4)]
    whole, least = 1472, 512
    engine = context.engine("bench", store, **options)
    cold = engine.generate(prompts, together=False)
    store.settle()
    time.sleep(1.0)  # written behind
    engine.stop()
    store.daemon.stop()
    store.daemon.start()
    engine = context.engine("bench", store, **options)
    answers = engine.generate(prompts, together=False)
    must_equal("restart", cold, answers)
    found = [a.cached or 0 for a in answers]
    context.note(f"{found} of {whole} tokens were loaded")
    if not 0 < found[0] <= len(prompts[0]) - least:
        raise Missed(f"the first hit: {found[0]} of {whole} tokens from disk; {engine.call('probes', 'connector')}")
    if any(whole / 8 < n < whole for n in found[1:]):
        raise Missed(f"a hit after the first was a bet, too: {found} of {whole} tokens from disk; {engine.call('probes', 'connector')}")
    engine.stop()
    store.must_be_clean("the engine has gone")


@promise(daemon=True, short=False)
def long_prompts_come_back_from_disk_at_once(context: Context) -> None:
    """the first question after a restart of the daemon: 3 prompts, 84 MB, several slabs"""
    store = context.store(**disk(context) | {"cpu.slab_size": "16MiB", "cpu.size": "512MiB"})
    assert store.daemon
    engine = context.engine("bench", store, max_model_len=4352, max_num_batched_tokens=2048, num_gpu_blocks_override=400)
    prompts = [context.prompt(n) for n in (1000, 2000, 4000)]
    cold = engine.generate(prompts, together=False)
    store.settle()
    time.sleep(1.0)  # written behind
    for turn in range(2):
        store.daemon.stop()
        store.daemon.start()
        engine.reset()
        engine.generate(context.prompts(2, 100, 120), 2, together=False)  # attached again
        time.sleep(0.5)
        answers = engine.generate(prompts, together=False)
        must_equal(f"restart {turn + 1}", cold, answers)
        if [a.cached for a in answers] != [992, 1984, answers[2].cached] or (answers[2].cached or 0) < 3968:
            raise Missed(f"restart {turn + 1}: {[a.cached for a in answers]} of {[len(p) for p in prompts]} tokens came from disk; "
                         f"{engine.call('probes', 'connector')}")
