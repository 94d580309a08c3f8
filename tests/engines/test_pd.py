"""A prefill engine hands prompts over to a decode engine on the same daemon; whatever becomes of the hand-over, the answer is the same."""
from __future__ import annotations

import json
import socket
import time
from typing import Any

from context import Context, Prompt, Store, must_equal
from harness import Daemon, Engine, Failed, Missed, Skipped, wait_for
from promises import promise

Json = dict[str, Any]
BLOCK = 32
WAIT_MS = 6000  # the longest that the decode engine waits
NODES_WAIT_MS = 30000  # and for another node: nothing there waits for this deadline, so it is that of a slow machine
# What vLLM's own proxy asks the prefill engine (tests/v1/kv_connector/nixl_integration/toy_proxy_server.py).
TOY: Json = dict(do_remote_decode=True, do_remote_prefill=False, remote_engine_id=None, remote_block_ids=None, remote_host=None, remote_port=None)


def counters(engine: Any) -> Json:
    """Of kvd's scheduler half, below a MultiConnector too; runs in the engine's process."""
    top = engine.engine_core.engine_core.scheduler.connector
    return dict(next(one._c for one in getattr(top, "_connectors", [top]) if hasattr(one, "_c")).stats())


def count(engine: Engine, name: str) -> int:
    return int(engine.call("test_pd", "counters")[name])


def prefills(prompts: list[Prompt], ids: list[str] | None = None) -> list[Json]:
    return [dict(ids=p, max_tokens=1, params=TOY | (dict(transfer_id=ids[i]) if ids else {})) for i, p in enumerate(prompts)]


def decodes(prompts: list[Prompt], params: list[Json]) -> list[Json]:
    return [dict(ids=p, max_tokens=16, params=one) for p, one in zip(prompts, params)]


def together(ids: list[str]) -> list[Json]:
    return [dict(do_remote_prefill=True, transfer_id=one) for one in ids]


def must_come(what: str, engine: Engine, before: int, prompts: list[Prompt], tails: bool = True) -> None:
    """The engine has loaded all tokens, and computed the last of them again; without tails: those of whole blocks. What it says itself is what the prefill engine had cached."""
    loaded, possible = count(engine, "load_tokens") - before, sum((len(p) - 1) // BLOCK * BLOCK + (len(p) % BLOCK if tails else 0) for p in prompts)
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
    must_come("one after the other", d, loaded, prompts, tails=False)
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


def must_be_told(what: str, begin: float, wait_ms: int = WAIT_MS) -> None:
    if time.monotonic() - begin >= wait_ms / 1e3:
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
    if ours.params != dict(transfer_id="ours"):
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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def peer_of(daemon: Daemon) -> Json:
    """What the daemon says of its one peer, and of UCX."""
    told = json.loads(daemon.kvctl("peers", "--json").stdout)
    return dict(told["peers"][0], ucx_error=told["net"]["ucx_error"])


def two_nodes(context: Context) -> list[Store]:
    """Stores whose daemons are peers: node0 and node1."""
    key, ports = context.bench.folder("key") / "key", [free_port() for _ in range(2)]
    key.touch(0o600)
    key.write_text("0123456789abcdef0123456789abcdef")
    nodes = [context.store(peers__name=f"node{i}", peers__listen=f"127.0.0.1:{ports[i]}", peers__addresses=f"node{1 - i}=127.0.0.1:{ports[1 - i]}", peers__keys=f"node{1 - i}={key}",
                           peers__timeout="2s") for i in range(2)]
    daemons = [node.daemon for node in nodes if node.daemon]
    wait_for("two daemons to be connected", 20, lambda: all(peer["state"] == "up" or peer["ucx_error"] for peer in map(peer_of, daemons)))
    if missing := peer_of(daemons[0])["ucx_error"]:
        raise Skipped(missing)
    return nodes


@promise(daemon=True)
def handed_over_between_two_nodes(context: Context) -> None:
    """two daemons over UCX: one after the other, both at once with the node in the request and in the option, a node that nobody knows, and a daemon that is killed half way"""
    context.oracle.prepare("gqa")
    here, there = two_nodes(context)
    assert here.daemon and there.daemon
    prompts, fresh = context.prompts(2, 300, 1100) + [context.prompt(20 * BLOCK)], context.prompts(3, 700, 1100)
    lost = context.prompts(2, 900, 1100)
    expected, expected_fresh, expected_lost = (context.expected("gqa", some) for some in (prompts, fresh, lost))
    context.oracle.stop()
    p = context.bench.start_engine("gqa", here.connector(handover_ms=NODES_WAIT_MS), max_num_batched_tokens=256)
    d = context.bench.start_engine("gqa", there.connector(handover_ms=NODES_WAIT_MS, handover_peer="node0"), max_num_batched_tokens=256)
    for engine in (p, d):
        engine.wait_started()
        engine.generate(context.prompts(1, 100, 200), max_tokens=1)

    handed = [answer.params or {} for answer in p.run(prefills(prompts))]
    if any(one.get("transfer_peer") != "node0" for one in handed):
        raise Failed(f"the prefill engine answers {handed}")
    loaded = count(d, "load_tokens")
    must_equal("one after the other", expected, d.run(decodes(prompts, handed)))
    must_come("one after the other", d, loaded, prompts)

    ids = [f"together {i}" for i in range(len(fresh))]
    params = together(ids)
    params[0]["transfer_peer"] = "node0"
    loaded = count(d, "load_tokens")
    d.submit(decodes(fresh, params))
    p.run(prefills(fresh, ids))
    must_equal("both at once", expected_fresh, d.collect())
    must_come("both at once", d, loaded, fresh)
    pieces = count(d, "handover_pieces")
    if not pieces:
        raise Missed("both at once: no chunk was loaded before the last")
    peer = peer_of(there.daemon)
    context.note(f"{peer['bytes_in'] >> 20} MiB came in {peer['fetched']} transfers, {pieces} chunks while more were computed")
    wait_for("the other node to have let go of all prompts", 10, lambda: here.stats()["kvd_handovers"] == 0)

    begin = time.monotonic()
    must_equal("a node that nobody knows", expected_lost[:1], d.run(decodes(lost[:1], [one | dict(transfer_peer="nobody") for one in together(["unknown"])])))
    must_be_told("a node that nobody knows", begin, NODES_WAIT_MS)

    begin = time.monotonic()
    before = peer["bytes_in"]
    d.submit(decodes(lost[1:], together(["killed"])))
    p.submit(prefills(lost[1:], ["killed"]))
    wait_for("the first chunk", 20, lambda: peer_of(there.daemon)["bytes_in"] > before)
    here.daemon.kill()
    must_equal("the owner's daemon is killed", expected_lost[1:], d.collect())
    must_be_told("the owner's daemon is killed", begin, NODES_WAIT_MS)
    p.collect()  # its daemon was killed while it computed
    must_equal("the prefill engine goes on", expected[:1], p.run([dict(ids=prompts[0], max_tokens=16)]))
    there.settle()
    d.stop()
    there.must_be_clean("both engines have gone")
