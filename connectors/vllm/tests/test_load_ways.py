"""Which ways to load kvd uses in which engine: the table of survivors (kvd_vllm/compat.py). Needs no engine."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys
import unittest
import unittest.mock
from types import SimpleNamespace
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "connectors" / "vllm"), str(ROOT / "bench" / "gpu" / "vllm")]

import configurations  # noqa: E402
from kvd_vllm import compat  # noqa: E402
from kvd_vllm.compat import SURVIVORS, Mode, load_ways, mode_of, only_async, untried_groups  # noqa: E402

KNOWN = SURVIVORS[-1].mode


def config(**changes: Any) -> Any:
    """A vLLM configuration as far as mode_of() reads it."""
    given = {"device": "cuda", "async_scheduling": True, "use_v2_model_runner": True, "scheduler_cls": None, "speculative_config": None, "world_size": 1, "runner_type": "generate", **changes}
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=given["device"]),
        scheduler_config=SimpleNamespace(async_scheduling=given["async_scheduling"], scheduler_cls=given["scheduler_cls"]),
        parallel_config=SimpleNamespace(world_size=given["world_size"]),
        model_config=SimpleNamespace(runner_type=given["runner_type"]),
        use_v2_model_runner=given["use_v2_model_runner"],
        speculative_config=given["speculative_config"],
    )


class LoadWays(unittest.TestCase):
    def test_an_engine_of_a_row_gets_the_ways_of_that_row(self) -> None:
        for row in SURVIVORS:
            with unittest.mock.patch.object(compat.recovery, "is_known", return_value=True):
                found = load_ways(row.mode, "auto")
            self.assertEqual((found.ways, found.refused, found.preempts), (row.ways, False, row.preempts))
            self.assertIn(row.proof, found.sentence)

    def test_recovery_by_preemption_needs_the_known_source(self) -> None:
        row = compat.Survivor(Mode("0.25.1", "cuda", "V2", "asynchronous", False), frozenset({"sync"}), "a check", preempts=True)
        for known, ways in ((True, row.ways), (False, frozenset())):
            with unittest.mock.patch.object(compat.recovery, "is_known", return_value=known):
                found = load_ways(row.mode, "sync", survivors=(row,))
            self.assertEqual((found.ways, found.refused, found.preempts), (ways, not known, known))
        self.assertIn("the source of this vLLM 0.25.1 on cuda", found.sentence)

    def test_every_other_engine_gets_asynchronous_loads(self) -> None:
        others = [
            Mode("0.33.0", "cpu", "V1", "synchronous", False),
            Mode("0.32.0", "cpu", "V1", "asynchronous", False),
            Mode("0.32.0", "cpu", "V2", "synchronous", False),
            Mode("0.32.0", "cpu", "unknown", "synchronous", False),
            Mode("0.32.0", "cpu", "V1", "unknown", False),
            Mode("0.32.0", "cpu", "V1", "synchronous", True),
            Mode("0.32.0", "cuda", "V1", "synchronous", False),
            Mode("0.25.1", "cuda", "V1", "asynchronous", False, ranks=2),
            Mode("0.25.1", "cuda", "V2", "asynchronous", True),
            Mode("0.25.2", "cuda", "V2", "synchronous", False),
            Mode("0.25.1", "cpu", "V1", "synchronous", False),
            Mode("unknown", "cuda", "unknown", "unknown", False),
        ]
        for mode in others:
            for wanted in ("auto", "sync", "async"):
                found = load_ways(mode, wanted)
                self.assertEqual((found.ways, found.refused), (frozenset(), wanted == "sync"), mode.text())

    def test_a_refusal_names_the_engine(self) -> None:
        found = load_ways(Mode("0.26.0", "cuda", "V2", "asynchronous", False, ranks=2), "sync")
        self.assertEqual(
            found.sentence,
            "loads are asynchronous, mode=sync is refused: vLLM 0.26.0 on cuda, model runner V2, asynchronous scheduling, 2 ranks is not known to survive a failed synchronous load",
        )

    def test_the_user_may_ask_for_asynchronous_loads(self) -> None:
        self.assertEqual(load_ways(KNOWN, "async").ways, frozenset())

    def test_several_groups_and_states_have_asynchronous_loads(self) -> None:
        plain, state = SimpleNamespace(state=False), SimpleNamespace(state=True)
        self.assertEqual(only_async([plain]), "")
        for groups, word in (([plain] * 3, "3 KV groups"), ([state], "copies states"), ([plain, state], "copies states")):
            for wanted in ("auto", "sync"):
                found = load_ways(KNOWN, wanted, only_async(groups))
                self.assertEqual((found.ways, found.refused), (frozenset(), wanted == "sync"))
                self.assertIn(word, found.sentence)

    def test_several_groups_need_an_engine_whose_recovery_was_tried(self) -> None:
        known = Mode("0.26.0", "cuda", "V2", "asynchronous", False)
        self.assertEqual(untried_groups(known), "")
        self.assertIn("2 ranks", untried_groups(dataclasses.replace(known, ranks=2)))
        self.assertIn("speculative", untried_groups(dataclasses.replace(known, drafts=True)))

    def test_the_mode_is_read_from_the_configuration(self) -> None:
        self.assertEqual(mode_of(config(), "0.25.1"), Mode("0.25.1", "cuda", "V2", "asynchronous", False))
        self.assertEqual(mode_of(config(use_v2_model_runner=False, async_scheduling=False, device="cpu"), "0.32.0+cpu"), Mode("0.32.0", "cpu", "V1", "synchronous", False))
        self.assertTrue(mode_of(config(speculative_config=object()), "0.25.1").drafts)

    def test_what_a_configuration_does_not_say_is_unknown(self) -> None:
        self.assertEqual(mode_of(config(async_scheduling=None), "1").scheduling, "unknown")
        self.assertEqual(mode_of(config(scheduler_cls="mine.Scheduler"), "1").scheduling, "unknown")
        self.assertEqual(mode_of(config(world_size=2), "1").ranks, 2)
        self.assertEqual(mode_of(config(runner_type="pooling"), "1").scheduling, "unknown")
        self.assertEqual(mode_of(config(use_v2_model_runner=None), "1").runner, "unknown")
        self.assertEqual(mode_of(SimpleNamespace(device_config=SimpleNamespace(device_type="cuda")), "1"), Mode("1", "cuda", "unknown", "unknown", False, ranks=0))

    def test_every_row_has_its_test(self) -> None:
        promises = set(re.findall(r"^def (\w+)\(context: Context", "\n".join(path.read_text() for path in (ROOT / "tests" / "engines").glob("test_*.py")), re.M))
        checks = set(configurations.configurations(1))
        for row in SURVIVORS:
            where, _, name = row.proof.partition(": ")
            self.assertIn(name, {"tests/engines": promises, "bench/gpu/vllm": checks}[where])
            self.assertLessEqual(row.ways, set(compat.WAYS))
            self.assertTrue(row.mode.version[0].isdigit() and "unknown" not in (row.mode.runner, row.mode.scheduling))
        self.assertEqual(len({row.mode for row in SURVIVORS}), len(SURVIVORS))


if __name__ == "__main__":
    unittest.main()
