"""Without a daemon that answers, requests go on, and it costs next to nothing."""
from __future__ import annotations

import signal
import statistics
import time

from context import Context, Prompt, must_equal
from harness import Answer, Engine, Missed
from promises import promise
from test_killed import must_come_back

COST_MS = 25.0  # more than this a request is a failure on any machine; the goal, 1 ms, is what `make bench-engines` measures


def measured(engine: Engine, prompts: list[Prompt]) -> tuple[float, list[Answer]]:
    """Median time to the first token, one request at a time, and the answers."""
    answers = engine.generate(prompts, 4, together=False)
    return statistics.median(a.ttft_ms or 0.0 for a in answers), answers


@promise(daemon=True)
def an_absent_hung_or_killed_daemon_costs_nothing(context: Context) -> None:
    """first there is none, then it comes, is stopped (SIGSTOP), goes on, is killed, comes back"""
    context.oracle.prepare("gqa")
    store = context.store()
    daemon = store.daemon
    assert daemon
    daemon.stop()
    prompts = context.prompts(12, 65, 100)
    expected = context.expected("gqa", prompts, 4)
    long_prompts = context.prompts(4, 500, 900)
    long_expected = context.expected("gqa", long_prompts)
    plain = context.engine("gqa")
    plain.generate(prompts, 4)
    engine = context.engine("gqa", store)
    engine.generate(prompts, 4)
    costs: list[str] = []

    def check(state: str) -> None:
        engine.reset()
        plain.reset()
        base, _ = measured(plain, prompts)
        took, answers = measured(engine, prompts)
        must_equal(state, expected, answers)
        costs.append(f"{state} {took - base:+.2f} ms")
        if took - base > COST_MS:
            raise Missed(f"{state}: a request takes {took:.1f} ms to its first token, {base:.1f} ms without a connector")
    check("absent")
    daemon.start()
    time.sleep(1.5)
    must_come_back("the daemon has come", engine, store, long_prompts, long_expected)
    daemon.signal(signal.SIGSTOP)
    check("hung")
    daemon.signal(signal.SIGCONT)
    must_come_back("the daemon goes on", engine, store, long_prompts, long_expected)
    daemon.kill()
    check("killed")
    daemon.start()
    must_come_back("the daemon was restarted", engine, store, long_prompts, long_expected)
    context.note("a request's first token: " + ", ".join(costs))
    engine.stop()
    store.must_be_clean("the engine has gone")
