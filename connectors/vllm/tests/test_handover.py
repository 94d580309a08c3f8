"""Hand-overs between two engines, driven as vLLM drives the hooks (rig.py), and what kv_transfer_params mean (kvd_vllm/handover.py)."""

from __future__ import annotations

import ctypes
import pathlib
import sys
import time
import unittest
from types import SimpleNamespace
from typing import Any

from rig import PAGE, Engine, Engines, Request, output, prompt, until

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from kvd_vllm.handover import Handovers  # noqa: E402

TABLE = [9, 8, 7, 6, 5, 4, 3]


def sent(name: str, tokens: list[int], transfer: str, max_tokens: int = 1) -> Request:
    return Request(name, tokens, max_tokens=max_tokens, kv_transfer_params={"do_remote_decode": True, "transfer_id": transfer})


def received(name: str, tokens: list[int], transfer: str) -> Request:
    return Request(name, tokens, kv_transfer_params={"do_remote_prefill": True, "transfer_id": transfer})


def finished(engine: Engine) -> tuple[set[str], set[int]]:
    """Step until the load of a request has ended: its id, and the blocks that failed."""
    ids: set[str] = set()
    errors: set[int] = set()

    def step() -> None:
        results = engine.step(output())
        ids.update(results.finished_recving or ())
        errors.update(results.errors)

    until(lambda: bool(ids), step, 60)
    return ids, errors


def page(engine: Engine, layer: int, block: int) -> int:
    """Address."""
    return ctypes.addressof(engine.memory[layer]) + block * PAGE


class HandedOver(Engines):
    def pair(self) -> tuple[Engine, Engine]:
        prefill, decode = self.engine(), self.engine()
        for engine in (prefill, decode):
            engine.wait()
        return prefill, decode

    def hand_over(self, prefill: Engine, decode: Engine, d: Request, p: Request) -> set[int]:
        """Blocks that did not come. Block 7 of the producer has the tokens after the last whole block."""
        self.assertEqual(decode.admit(d, TABLE), (200, True))
        decode.step(output())
        for layer in range(len(prefill.memory)):
            ctypes.memset(page(prefill, layer, 7), 0x5A + layer, PAGE)
        self.assertEqual(prefill.prefill(p, list(range(1, 8))), 0)
        self.assertEqual(prefill.scheduler.finish_request(p, (TABLE,)), (False, {"transfer_id": "x"}))
        until(lambda: not prefill.scheduler.has_pending(), lambda: prefill.step(output()), 60)
        ids, errors = finished(decode)
        self.assertEqual(ids, {d.request_id})
        self.assertTrue(decode.holds(d, TABLE, *range(6)))
        return errors

    def test_all_of_a_prompt_comes_from_the_engine_that_computes_it(self) -> None:
        prefill, decode = self.pair()
        tokens = prompt(90, 200)
        self.assertEqual(self.hand_over(prefill, decode, received("d", tokens, "x"), sent("p", tokens, "x")), set())
        for layer in range(len(decode.memory)):
            self.assertEqual(ctypes.string_at(page(decode, layer, TABLE[6]), PAGE), bytes([0x5A + layer]) * PAGE)
        self.assertEqual((prefill.scheduler.stats()["handovers_sent"], decode.scheduler.stats()["handovers_received"]), (1, 1))

    def test_a_block_that_the_producer_goes_on_to_fill_is_computed(self) -> None:
        prefill, decode = self.pair()
        tokens = prompt(92, 200)
        self.assertEqual(self.hand_over(prefill, decode, received("d", tokens, "x"), sent("p", tokens, "x", max_tokens=16)), {TABLE[6]})

    def test_an_aborted_prompt_is_computed_by_the_other_engine(self) -> None:
        prefill, decode = self.pair()
        tokens = prompt(91, 200)
        d, p = received("d", tokens, "y"), sent("p", tokens, "y")
        p.aborted = True
        self.assertEqual(decode.admit(d, TABLE), (200, True))
        prefill.admit(p, list(range(1, 8)))
        prefill.step(output())
        self.assertEqual(prefill.scheduler.finish_request(p, (TABLE,)), (False, None))
        until(lambda: not prefill.scheduler.has_pending(), lambda: prefill.step(output()), 60)
        began = time.monotonic()
        self.assertEqual(finished(decode), ({"d"}, set(TABLE)))
        self.assertLess(time.monotonic() - began, 10)  # of 20 s that it would wait


def request(params: Any, status: str = "FINISHED_LENGTH_CAPPED") -> SimpleNamespace:
    return SimpleNamespace(request_id="r", kv_transfer_params=params, status=SimpleNamespace(name=status), num_prompt_tokens=7)


class Parameters(unittest.TestCase):
    def handovers(self, **changes: bool) -> Handovers:
        return Handovers(**{"engine_id": "e", "ranks": 2, "sends": True, "receives": True, "child": False, **changes})

    def test_they_say_which_side_a_request_is(self) -> None:
        both = self.handovers()
        self.assertEqual(both.find(request({"do_remote_decode": True, "transfer_id": "t"})), (True, "t"))
        self.assertEqual(both.find(request({"do_remote_prefill": True, "transfer_id": "t"})), (False, "t"))
        self.assertIsNone(both.find(request({"do_remote_prefill": True, "remote_engine_id": "another connector's"})))
        sends, made = both.find(request({"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None})) or (False, "")
        self.assertTrue(sends and len(made) == 32)

    def test_what_is_answered_is_asked_for_elsewhere(self) -> None:
        both = self.handovers()
        answer = both.params(request({}), "t")
        self.assertEqual(both.find(request(answer)), (False, "t"))
        self.assertIsNone(both.params(request({}, "FINISHED_ABORTED"), "t"))

    def test_the_role_only_restricts(self) -> None:
        self.assertIsNone(self.handovers(sends=False).find(request({"do_remote_decode": True, "transfer_id": "t"})))
        self.assertIsNone(self.handovers(receives=False).find(request({"do_remote_prefill": True, "transfer_id": "t"})))

    def test_bad_parameters_are_no_hand_over(self) -> None:
        both = self.handovers()
        for bad in ("", "x" * 129, "a\nb", "\0", "\ud800", 7, ["t"]):
            self.assertIsNone(both.find(request({"do_remote_decode": True, "transfer_id": bad})), bad)
        self.assertIsNone(both.find(request(["do_remote_decode"])))
        self.assertEqual(both.complaints, 8)

    def test_a_child_answers_with_no_key_of_another_connector(self) -> None:
        child = self.handovers(child=True)
        self.assertIsNone(child.find(request({"do_remote_decode": True})))
        self.assertEqual(child.params(request({}), "t"), {"transfer_id": "t"})
        self.assertEqual(child.find(request({"do_remote_prefill": True, "transfer_id": "t"})), (False, "t"))


if __name__ == "__main__":
    unittest.main()
