"""kvd and vLLM's NixlConnector below one MultiConnector, in both orders: each hands over the requests that are its own, and both engines live."""
from __future__ import annotations

import importlib.util
from typing import Any

from context import Context, Prompt, must_equal
from harness import Engine, Failed, Missed, Skipped, wait_for
from promises import promise
from test_pd import Json, count, decodes, free_port, must_come, prefills, together

WAIT_MS = 6000
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


def pair(context: Context, ours: Json, kvd_first: bool) -> tuple[Engine, Engine]:
    """A prefill and a decode engine."""
    engines = []
    for role in ("kv_producer", "kv_consumer"):
        nixl = dict(kv_connector="NixlConnector", kv_role=role, kv_buffer_device="cpu")
        port = dict(VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()))
        engines.append(context.bench.start_engine("gqa", several([ours, nixl] if kvd_first else [nixl, ours]), environment=port, max_num_batched_tokens=256))
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
    if not all(one.get("do_remote_prefill") and one.get("remote_block_ids") and one.get("remote_port") and "transfer_id" not in one for one in handed):
        raise Failed(f"{order}: requests for NixlConnector are answered with {handed}")
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


@promise(daemon=True, short=False)
def kvd_and_nixl_hand_over_what_is_their_own(context: Context) -> None:
    """kvd first and NixlConnector first: requests with a transfer_id go through kvd, one after the other and both at once, others with parameters through NixlConnector, plain ones through neither"""
    if not importlib.util.find_spec("nixl"):
        raise Skipped("there is no nixl in this Python (scripts/engines.sh --nixl installs it)")
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
