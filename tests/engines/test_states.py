"""Models with recurrent layers: a state at the end of a block stands for all tokens before it, and is there only where the engine's steps have ended."""
from __future__ import annotations

import json

from context import IN_PIECES, Context, Prompt, Store, must_equal
from harness import Answer, Engine, Failed, wait_for
from models import SHAPES
from promises import promise
from test_failed import Rig, fail_loads
from test_killed import disk
from test_pd import WAIT_MS, count, decodes, prefills, together

MODEL, BLOCK, STEP = "recurrent", 256, 1024


class States:
    """Which states are stored, by the tokens they stand for: a model of the rule that is independent of kvd's."""

    def __init__(self) -> None:
        self.ends: set[tuple[int, ...]] = set()

    def hit(self, prompt: Prompt) -> int:
        """The last token of a prompt is computed."""
        return max((end for end in range(BLOCK, len(prompt), BLOCK) if tuple(prompt[:end]) in self.ends), default=0)

    def compute(self, prompt: Prompt) -> None:
        """Steps end at ends of blocks, and before the prompt's last token."""
        at, last = self.hit(prompt), (len(prompt) - 1) // BLOCK * BLOCK
        while at < len(prompt):
            end = min(at + STEP, len(prompt))
            end = last if at < last < end else end // BLOCK * BLOCK if end < len(prompt) else end
            if end % BLOCK == 0:
                self.ends.add(tuple(prompt[:end]))
            at = end


class Played:
    """An engine, its store, and the answers of an engine without one."""

    def __init__(self, context: Context, store: Store, states: States) -> None:
        self.context, self.store, self.states = context, store, states
        self.engine = self.start()

    def start(self) -> Engine:
        return self.context.engine(MODEL, self.store, **IN_PIECES[MODEL])

    def ask(self, what: str, prompts: list[Prompt], expected: list[Answer]) -> None:
        """One after another, each with nothing in the engine's own cache."""
        for i, prompt in enumerate(prompts):
            self.store.settle()
            self.engine.reset()
            answers = self.engine.generate([prompt])
            must_equal(f"{what}, prompt {i}", expected[i : i + 1], answers)
            found, possible = answers[0].cached or 0, self.states.hit(prompt)
            if found != possible:
                raise Failed(f"{what}, prompt {i} of {len(prompt)} tokens: {found} tokens came from the store, {possible} could")
            self.states.compute(prompt)

    def restart(self) -> None:
        self.store.settle()
        self.engine.kill()
        self.engine = self.start()
        self.engine.generate(self.context.prompts(1, 40, 60), 2)


def must_be_true_sizes(store: Store) -> None:
    """Blocks of states have what a layer keeps and no more; those of attention their keys and values."""
    assert store.daemon
    c = SHAPES[MODEL]()
    convolution = (c["linear_conv_kernel_dim"] - 1) * 3 * c["linear_key_head_dim"] * 2  # of queries, keys and values, bfloat16
    state = convolution + c["linear_key_head_dim"] * c["linear_value_head_dim"] * 4
    full = 2 * c["num_key_value_heads"] * c["head_dim"] * BLOCK * 2
    spaces = json.loads(store.daemon.kvctl("status", "--json", check=False).stdout)["core"]["spaces"]
    found = [{(group["rule"], group["block_bytes"]) for group in space["groups"]} for space in spaces if len(space["groups"]) > 1]
    if found != [{("state", state), ("full", full)}]:
        raise Failed(f"blocks have {found} bytes; states of a layer are {state}, keys and values {full}")


@promise(daemon=True)
def states_are_resumed_where_a_step_has_ended(context: Context) -> None:
    """Qwen3-Next's layers: hits are exactly those that the rule allows, and answers those without a cache; also after restarts of engine and daemon"""
    context.oracle.prepare(MODEL)
    store = context.store(**disk(context))
    prompts = [context.prompt(n) for n in (2600, 1300, 2 * BLOCK + 1, 2 * BLOCK, BLOCK)]
    branches = [prompts[0][:n] + context.prompt(300) for n in (1100, 700, 2100)]  # the second one: no state at 512
    expected, expected_branches = context.expected(MODEL, prompts), context.expected(MODEL, branches)
    context.oracle.stop()
    played = Played(context, store, States())
    played.ask("cold", prompts, expected)
    must_be_true_sizes(store)
    played.ask("warm", prompts, expected)
    played.ask("other ends", branches, expected_branches)
    played.restart()
    played.ask("after the engine was killed", prompts + branches, expected + expected_branches)
    store.settle()
    assert store.daemon
    store.daemon.stop()
    store.daemon.start()
    wait_for("the engine to find the daemon", 20, lambda: bool(played.engine.generate([prompts[0]])[0].cached), 0.2)
    played.ask("after the daemon was restarted", prompts + branches, expected + expected_branches)
    played.engine.stop()
    store.must_be_clean("the engine has gone")


class StatesRig(Rig):
    model, company = MODEL, False
    lengths = (1300, 1500, 900, 600, 1500, 700, 900, 2050)


@promise(daemon=True, short=False)
def failed_loads_of_states_are_computed_again(context: Context) -> None:
    """flipped bits, a lost lease, a deadline, a killed daemon: in any of the groups"""
    fail_loads(context, "async", StatesRig, **IN_PIECES[MODEL])


@promise(daemon=True, short=False)
def states_are_handed_over(context: Context) -> None:
    """a prefill engine's prompts come to a decode engine up to their last state, one after the other and both at once"""
    context.oracle.prepare(MODEL)
    store, states = context.store(), States()
    prompts = [context.prompt(n) for n in (2600, 700, BLOCK + 1, BLOCK, 1500, 1100)]
    expected = context.expected(MODEL, prompts)
    context.oracle.stop()
    p, d = (context.bench.engine(MODEL, store.connector(handover_ms=WAIT_MS), **IN_PIECES[MODEL]) for _ in range(2))
    for engine in (p, d):
        engine.generate(context.prompts(1, 100, 200), max_tokens=1)  # its spaces are open afterwards
    for i, prompt in enumerate(prompts):
        before = count(d, "load_tokens")
        if i < 4:
            handed = [answer.params or {} for answer in p.run(prefills([prompt]))]
            answers = d.run(decodes([prompt], handed))
        else:
            d.submit(decodes([prompt], together([f"states {i}"])))
            p.run(prefills([prompt], [f"states {i}"]))
            answers = d.collect()
        must_equal(f"prompt {i}", expected[i : i + 1], answers)
        states.compute(prompt)
        came = count(d, "load_tokens") - before
        if came != states.hit(prompt):
            raise Failed(f"prompt {i} of {len(prompt)} tokens: {came} came, {states.hit(prompt)} could")
    d.stop()
    store.must_be_clean("both engines have gone")
