"""kvd and vLLM's NixlConnector below one MultiConnector, in both orders: each hands over the requests that are its own, and both engines live."""
from __future__ import annotations

import importlib.util
from typing import Any

from context import Context, Prompt, must_equal
from harness import Engine, Failed, Missed, Skipped, wait_for
from promises import promise
from test_pd import Json, count, decodes, free_port, must_come, prefills, together

WAIT_MS = 30000  # nothing waits for this deadline, so it is that of a slow machine
LEAST = 200  # tokens of the shortest hit that kvd loads on the decode engine: shorter prompts are NixlConnector's in both orders


reads: list[int] = []  # bytes of NixlConnector's reads; in the engine's process


def nixl_reads(engine: Any) -> int:
    """How many reads have been done since the first call; runs in the engine's process."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats as Stats
    if not hasattr(Stats, "recorded"):
        Stats.recorded = Stats.record_transfer

        def record_transfer(self: Any, result: Any) -> None:
            reads.append(getattr(result, "totalBytes", 0))
            Stats.recorded(self, result)
        Stats.record_transfer = record_transfer
    return len(reads)


def several(children: list[Json]) -> Json:
    return dict(kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=dict(connectors=children))


def pair(context: Context, ours: Json, kvd_first: bool, ranks: int = 1) -> tuple[Engine, Engine]:
    """A prefill and a decode engine; with several ranks in several processes."""
    more: Json = dict(mp=True, tensor_parallel_size=ranks) if ranks > 1 else {}
    cores = dict(VLLM_CPU_OMP_THREADS_BIND="|".join(map(str, range(ranks)))) if ranks > 1 else {}
    engines = []
    for role in ("kv_producer", "kv_consumer"):
        nixl = dict(kv_connector="NixlConnector", kv_role=role, kv_buffer_device="cpu")
        port = dict(VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()))
        children = several([ours, nixl] if kvd_first else [nixl, ours])
        engines.append(context.bench.start_engine("gqa", children, environment=port | cores, max_num_batched_tokens=256, **more))
    for engine in engines:
        engine.wait_started()
        engine.generate(context.prompts(1, 100, 190), max_tokens=1)  # its spaces are open afterwards
    return engines[0], engines[1]


def must_hand_over_ours(context: Context, p: Engine, d: Engine, prompts: list[Prompt], expected: list[Any], order: str) -> None:
    """The first half one after the other, the others at once, as kvd's proxy does both."""
    half = len(prompts) // 2
    ids = [f"ours {i}" for i in range(len(prompts))]
    loaded, received, read = count(d, "load_tokens"), count(d, "handovers_received"), d.call("test_nixl", "nixl_reads")
    handed = [answer.params or {} for answer in p.run(prefills(prompts[:half], ids))]
    if handed != [dict(transfer_id=one) for one in ids[:half]]:
        raise Failed(f"{order}: requests that name kvd's hand-over are answered with {handed}")
    must_equal(f"{order}: ours, one after the other", expected[:half], d.run(decodes(prompts[:half], handed)))
    d.submit(decodes(prompts[half:], together(ids[half:])))
    p.run(prefills(prompts[half:], ids[half:]))
    must_equal(f"{order}: ours, both at once", expected[half:], d.collect())
    must_come(f"{order}: ours", d, loaded, prompts)
    if count(d, "handovers_received") == received:
        raise Missed(f"{order}: all prompts were ordinary hits")
    if d.call("test_nixl", "nixl_reads") != read:
        raise Failed(f"{order}: NixlConnector has read what kvd was to load")


def must_hand_over_theirs(p: Engine, d: Engine, prompts: list[Prompt], expected: list[Any], order: str) -> None:
    loaded, received, sent = count(d, "load_tokens"), count(d, "handovers_received"), count(p, "handovers_sent")
    handed = [answer.params or {} for answer in p.run(prefills(prompts))]
    must_be_nixls(order, handed)
    read = d.call("test_nixl", "nixl_reads")
    must_equal(f"{order}: theirs", expected, d.run(decodes(prompts, handed)))
    read = d.call("test_nixl", "nixl_reads") - read
    if read != len(prompts):
        raise Failed(f"{order}: NixlConnector has read {read} of {len(prompts)} prompts")
    if (count(d, "load_tokens"), count(d, "handovers_received"), count(p, "handovers_sent")) != (loaded, received, sent):
        raise Failed(f"{order}: kvd has moved what NixlConnector was to move")


def must_leave_alone(p: Engine, d: Engine, prompts: list[Prompt], expected: list[Any], order: str) -> None:
    sent = count(p, "handovers_sent")
    for engine in (p, d):
        answers = engine.run([dict(ids=prompt, max_tokens=16) for prompt in prompts])
        must_equal(f"{order}: plain", expected, answers)
        if any(answer.params for answer in answers):
            raise Failed(f"{order}: a plain request is answered with {[answer.params for answer in answers]}")
    if count(p, "handovers_sent") != sent:
        raise Failed(f"{order}: a plain request was handed over")


def must_be_free(engine: Engine, order: str) -> None:
    """No block waits for a reader: neither a lease of NixlConnector's nor a load of ours."""
    def free() -> bool:
        engine.ask(do="pump", steps=1)
        left, whole = engine.blocks()
        return left >= whole - 1  # one is vLLM's null block
    wait_for(f"{order}: all blocks of {engine.name} to be free", 10, free)


def must_be_nixls(order: str, handed: list[Json], ranks: int = 1) -> None:
    if not all(one.get("do_remote_prefill") and one.get("remote_block_ids") and one.get("tp_size") == ranks and "transfer_id" not in one for one in handed):
        raise Failed(f"{order}: requests for NixlConnector are answered with {handed}")


def skip_without_nixl() -> None:
    if not importlib.util.find_spec("nixl"):
        raise Skipped("there is no nixl in this Python (scripts/engines.sh --nixl installs it)")


@promise(daemon=True, short=False)
def kvd_and_nixl_hand_over_what_is_their_own(context: Context) -> None:
    """kvd first and NixlConnector first: requests with a transfer_id go through kvd, one after the other and both at once, others with parameters through NixlConnector, plain ones through neither"""
    skip_without_nixl()
    context.oracle.prepare("gqa")
    ours, theirs, plain = context.prompts(4, 300, 1100), context.prompts(3, 60, LEAST - 10), context.prompts(2, 60, LEAST - 10)
    expected = [context.expected("gqa", some) for some in (ours, theirs, plain)]
    context.oracle.stop()
    for kvd_first in (True, False):
        order = "kvd first" if kvd_first else "NixlConnector first"
        store = context.store()
        p, d = pair(context, store.connector(handover_ms=WAIT_MS, min_tokens=LEAST), kvd_first)
        must_hand_over_ours(context, p, d, ours, expected[0], order)
        must_hand_over_theirs(p, d, theirs, expected[1], order)
        must_leave_alone(p, d, plain, expected[2], order)
        for engine in (p, d):
            must_be_free(engine, order)
        store.settle()
        for engine in (p, d):
            engine.stop()
        store.must_be_clean(order)


@promise(daemon=True, short=False)
def kvd_and_nixl_serve_two_ranks(context: Context) -> None:
    """both hear all ranks of an engine of several processes, and each hands over its own requests"""
    skip_without_nixl()
    context.oracle.prepare("gqa")
    ours, theirs = context.prompts(3, 300, 900), context.prompts(2, 60, LEAST - 10)
    expected = [context.expected("gqa", some) for some in (ours, theirs)]
    context.oracle.stop()
    store = context.store()
    p, d = pair(context, store.connector(handover_ms=WAIT_MS, min_tokens=LEAST), True, ranks=2)
    ids = [f"ours {i}" for i in range(len(ours))]
    handed = [answer.params or {} for answer in p.run(prefills(ours, ids))]
    if handed != [dict(transfer_id=one) for one in ids]:
        raise Failed(f"requests that name kvd's hand-over are answered with {handed}")
    must_equal("ours", expected[0], d.run(decodes(ours, handed)))
    handed = [answer.params or {} for answer in p.run(prefills(theirs))]
    must_be_nixls("two ranks", handed, ranks=2)
    must_equal("theirs", expected[1], d.run(decodes(theirs, handed)))
    taken = store.stats()["kvd_handovers_ended_total{result=taken}"]
    if taken != len(ours):
        raise Missed(f"{taken:.0f} of {len(ours)} hand-overs were taken")
