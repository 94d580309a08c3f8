"""A prefill engine hands prompts over to a decode engine on the same daemon; whatever becomes of the hand-over, the answer is the same."""
from __future__ import annotations

import time
from typing import Any

from context import Context, Prompt, must_equal
from harness import Answer, Engine, Failed, Missed
from promises import promise

Json = dict[str, Any]
BLOCK = 32
WAIT_MS = 6000  # the longest that the decode engine waits
# What vLLM's own proxy asks the prefill engine (tests/v1/kv_connector/nixl_integration/toy_proxy_server.py).
TOY: Json = dict(do_remote_decode=True, do_remote_prefill=False, remote_engine_id=None, remote_block_ids=None, remote_host=None, remote_port=None)


def counters(engine: Any) -> Json:
    """Of the scheduler half; runs in the engine's process."""
    return dict(engine.engine_core.engine_core.scheduler.connector._c.stats())


def count(engine: Engine, name: str) -> int:
    return int(engine.call("test_pd", "counters")[name])


def prefills(prompts: list[Prompt], ids: list[str] | None = None) -> list[Json]:
    return [dict(ids=p, max_tokens=1, params=TOY | (dict(transfer_id=ids[i]) if ids else {})) for i, p in enumerate(prompts)]


def decodes(prompts: list[Prompt], params: list[Json]) -> list[Json]:
    return [dict(ids=p, max_tokens=16, params=one) for p, one in zip(prompts, params)]


def together(ids: list[str]) -> list[Json]:
    return [dict(do_remote_prefill=True, transfer_id=one) for one in ids]


def must_come(what: str, engine: Engine, before: int, prompts: list[Prompt]) -> None:
    """The engine has loaded all tokens, and computed the last of them again. What it says itself is what the prefill engine had cached."""
    loaded, possible = count(engine, "load_tokens") - before, sum(len(p) - BLOCK * (len(p) % BLOCK == 0) for p in prompts)
    if loaded < possible:
        raise Missed(f"{what}: {loaded} of {possible} tokens came")


@promise(daemon=True)
def handed_over_prompts_are_answered_alike(context: Context) -> None:
    """one after the other, as vLLM's own proxy does it, and both at once, in chunks; the prefill engine aborts, is killed, or never comes"""
    context.oracle.prepare("gqa")
    store = context.store()
    prompts = context.prompts(4, 300, 1100) + [context.prompt(20 * BLOCK), context.prompt(BLOCK - 1)]
    fresh = context.prompts(4, 700, 1100)
    expected, expected_fresh = context.expected("gqa", prompts), context.expected("gqa", fresh)
    lost = context.prompts(3, 900, 1100)
    expected_lost = context.expected("gqa", lost)
    context.oracle.stop()
    p, d = (context.bench.start_engine("gqa", store.connector(handover_ms=WAIT_MS), max_num_batched_tokens=256) for _ in range(2))
    for engine in (p, d):
        engine.wait_started()
        engine.generate(context.prompts(1, 100, 200), max_tokens=1)  # its spaces are open afterwards

    handed = [answer.params or {} for answer in p.run(prefills(prompts))]
    if not all(one.get("do_remote_prefill") and one.get("transfer_id") for one in handed):
        raise Failed(f"the prefill engine answers {handed}")
    loaded = count(d, "load_tokens")
    must_equal("one after the other", expected, d.run(decodes(prompts, handed)))
    must_come("one after the other", d, loaded, prompts)
    left = store.stats()["kvd_handovers"]
    if left:
        raise Failed(f"one after the other: {left:.0f} prompts are still kept for a consumer")

    ids = [f"together {i}" for i in range(len(fresh))]
    loaded = count(d, "load_tokens")
    d.submit(decodes(fresh, together(ids)))
    p.run(prefills(fresh, ids))
    must_equal("both at once", expected_fresh, d.collect())
    must_come("both at once", d, loaded, fresh)
    pieces = count(d, "handover_pieces")
    if not pieces:
        raise Missed("both at once: no chunk was loaded before the last")
    context.note(f"{pieces} chunks were loaded while more were computed")

    begin = time.monotonic()
    d.submit(decodes(lost[:1], together(["aborted"])))
    aborted = p.run([one | dict(abort_step=2) for one in prefills(lost[:1], ["aborted"])])
    if aborted[0].params:
        raise Failed(f"an aborted request answers {aborted[0].params}")
    must_equal("the prefill engine aborts", expected_lost[:1], d.collect())
    must_be_told("the prefill engine aborts", begin)

    begin = time.monotonic()
    d.submit(decodes(lost[1:2], together(["nobody comes"])))
    must_equal("nobody comes", expected_lost[1:2], d.collect())
    if time.monotonic() - begin < WAIT_MS / 1e3:
        raise Failed("the decode engine did not wait for a prefill engine that might have come")

    begin = time.monotonic()
    d.submit(decodes(lost[2:], together(["killed"])))
    p.submit(prefills(lost[2:], ["killed"]))
    time.sleep(0.3)
    p.kill()
    must_equal("the prefill engine is killed", expected_lost[2:], d.collect())
    must_be_told("the prefill engine is killed", begin)
    context.note(f"{count(d, 'handovers_received')} prompts came, {count(d, 'handovers_receive_failed')} did not")
    store.settle()
    d.stop()
    store.must_be_clean("both engines have gone")


def must_be_told(what: str, begin: float) -> None:
    if time.monotonic() - begin >= WAIT_MS / 1e3:
        raise Missed(f"{what}: the decode engine has waited for its deadline")


@promise(daemon=True, short=False)
def other_connectors_keep_their_hand_overs(context: Context) -> None:
    """beside a connector that answers with the same names: kvd hands over what is named for it, and the engine lives"""
    store = context.store()
    children = [store.connector(), dict(kv_connector="OtherConnector", kv_connector_module_path="other_pd", kv_role="kv_both")]
    several = dict(kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=dict(connectors=children))
    engine = context.bench.engine("gqa", several)
    engine.generate(context.prompts(1, 100, 200), max_tokens=1)
    prompts = context.prompts(2, 300, 500)
    theirs, ours = engine.run(prefills(prompts[:1]))[0], engine.run(prefills(prompts[1:], ["ours"]))[0]
    if (theirs.params or {}).get("remote_engine_id") != "other" or "transfer_id" in (theirs.params or {}):
        raise Failed(f"a request that was not named for kvd answers {theirs.params}")
    if (ours.params or {}).get("transfer_id") != "ours" or (ours.params or {}).get("remote_engine_id") != "other":
        raise Failed(f"a request named for kvd answers {ours.params}")
    assert store.daemon
    kept = store.daemon.kvctl("transfers").stdout
    if "ours" not in kept or kept.count("complete") != 1:
        raise Failed(f"not one prompt is kept for a consumer, but: {kept}")


@promise(daemon=True, short=False)
def handed_over_between_engines_of_several_processes(context: Context) -> None:
    """an engine that is idle hands the last chunk over, and one that waits is woken, without a request that makes them step"""
    context.oracle.prepare("gqa")
    store = context.store()
    assert store.daemon
    prompts, fresh = context.prompts(3, 300, 1100), context.prompts(3, 700, 1100)
    expected, expected_fresh = context.expected("gqa", prompts), context.expected("gqa", fresh)
    context.oracle.stop()
    p, d = (context.bench.start_engine("gqa", store.connector(handover_ms=WAIT_MS), mp=True, max_num_batched_tokens=256) for _ in range(2))
    for engine in (p, d):
        engine.wait_started()
        engine.generate(context.prompts(1, 100, 200), max_tokens=1)
    handed = [answer.params or {} for answer in p.run(prefills(prompts))]
    must_equal("one after the other", expected, d.run(decodes(prompts, handed)))
    ids = [f"together {i}" for i in range(len(fresh))]
    d.submit(decodes(fresh, together(ids)))
    p.run(prefills(fresh, ids))
    must_equal("both at once", expected_fresh, d.collect())
    taken = store.stats()['kvd_handovers_ended_total{result=taken}']
    if taken != len(prompts) + len(fresh):
        raise Missed(f"{taken:.0f} of {len(prompts) + len(fresh)} hand-overs were taken")
