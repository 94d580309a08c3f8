"""A proxy in front of a prefill and a decode engine, both vLLM's API servers on one daemon: clients get the answers of one engine."""
from __future__ import annotations

import time

from context import Context, Store, must_equal
from harness import Failed, Missed, wait_for
from promises import promise
from servers import Answers, Proxy, Server, ToyProxy, metric, request

BLOCK = 32
LOADED = "vllm:external_prefix_cache_hits_total"  # of D: tokens that came from the daemon
# The model computes 1,000 tokens in a second: by the costs of the options nothing would wait. What is short here is sent over all the same.
ALWAYS = ("--skip.tokens=8", "--skip.wait=1m", "--queue.deadline=1m", "--engine.tokenize_timeout=20s")


def taken(store: Store) -> float:
    return store.stats()["kvd_handovers_ended_total{result=taken}"]


def must_be_handed_over(what: str, store: Store, decode: Server, before: tuple[float, float], prompts: list[list[int]]) -> None:
    """The daemon gave each of them to D once, and D has loaded all of their whole blocks."""
    handed, loaded = taken(store) - before[0], metric(decode.port, LOADED) - before[1]
    possible = sum(len(p) // BLOCK * BLOCK for p in prompts)
    if handed != len(prompts) or loaded < possible:
        raise Missed(f"{what}: {handed:.0f} of {len(prompts)} prompts were taken, {loaded:.0f} of {possible} tokens loaded")


@promise(daemon=True, short=False)
def proxies_answer_as_one_engine_does(context: Context) -> None:
    """completions and chats, streamed and whole, both engines at once and one after the other; vLLM's toy proxy; the prefill engine is killed"""
    context.oracle.prepare("gqa")
    store = context.store()
    bench = context.bench
    at_once, in_turn, toy = context.prompts(6, 500, 1100), context.prompts(3, 300, 700), context.prompts(3, 300, 700)
    dying, dead = context.prompts(1, 2900, 3000), context.prompts(2, 500, 700)
    longer = [at_once[0] + context.prompt(40)]
    expected = [context.expected("gqa", prompts) for prompts in (at_once, longer, in_turn, toy, dying, dead)]
    context.oracle.stop()
    model = bench.model("gqa")
    p, d = (Server(bench, name, model, store.connector(hash="own"), max_num_batched_tokens=256) for name in ("prefill", "decode"))
    for server in (p, d):
        server.wait_started()
        Answers(server.port, [request(context.prompt(100))]).collect()  # its spaces are open afterwards

    def through(what: str, port: int, prompts: list[list[int]], wanted: int) -> None:
        before = taken(store), metric(d.port, LOADED)
        kinds = [dict(chat=i % 3 == 2, stream=i % 2 == 1, text=i % 4 == 3) for i in range(len(prompts))]
        must_equal(what, expected[wanted], Answers(port, [request(prompt, **kind) for prompt, kind in zip(prompts, kinds)]).collect())
        must_be_handed_over(what, store, d, before, prompts)

    with Proxy(bench, [p], [d], f"--kvd.socket={store.daemon.socket}", *ALWAYS) as proxy:
        wait_for("the proxy to know the engines' space", 20, lambda: "are looked up" in proxy.log.read_text())
        through("both at once", proxy.port, at_once, 0)
        must_equal("a prompt that is there", expected[1], Answers(proxy.port, [request(longer[0], text=True)]).collect())
        if proxy.metric('lookups_total{result="hit"}') != 1 or proxy.metric("hit_tokens_total") != len(at_once[0]) // BLOCK * BLOCK:
            raise Missed(f"the proxy has found {proxy.metric('hit_tokens_total'):.0f} tokens of {len(at_once[0])} that are there")
        if proxy.metric("failures_total"):
            raise Failed(f"calls have failed: {proxy.log.read_text()}")
    with Proxy(bench, [p], [d], "--sequential", *ALWAYS) as proxy:
        through("one after the other", proxy.port, in_turn, 2)
    with ToyProxy(p, d) as plain:
        through("the toy proxy", plain.port, toy, 3)
    with Proxy(bench, [p], [d], *ALWAYS) as proxy:
        answers = Answers(proxy.port, [request(dying[0], stream=True)])
        wait_for("the hand-over to begin", 20, lambda: store.stats()["kvd_handovers"], 0.001)
        p.kill()
        begin = time.monotonic()
        must_equal("the prefill engine is killed", expected[4], answers.collect())
        if not proxy.metric("retries_total"):
            raise Missed("the prefill engine had answered before it was killed")
        context.note(f"{time.monotonic() - begin:.1f} s after the prefill engine was killed its request was answered")
        must_equal("without a prefill engine", expected[5], Answers(proxy.port, [request(dead[0]), request(dead[1], chat=True, stream=True)]).collect())
    store.settle()
    d.kill()
    store.must_be_clean("both engines have gone")
