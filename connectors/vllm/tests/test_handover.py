"""Hand-overs between two engines, driven as vLLM drives the hooks (rig.py), and what kv_transfer_params mean (kvd_vllm/handover.py)."""

from __future__ import annotations

import ctypes
import os
import pathlib
import signal
import sys
import time
import unittest
from types import SimpleNamespace
from typing import Any

from rig import PAGE, Engine, Engines, Request, nodes, output, prompt, until

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from kvd_vllm.attendant import Attendant  # noqa: E402
from kvd_vllm.handover import Handovers, claim  # noqa: E402

TABLE = [9, 8, 7, 6, 5, 4, 3]


def sent(name: str, tokens: list[int], transfer: str, max_tokens: int = 1) -> Request:
    return Request(name, tokens, max_tokens=max_tokens, kv_transfer_params={"do_remote_decode": True, "transfer_id": transfer})


def received(name: str, tokens: list[int], transfer: str, peer: str | None = None) -> Request:
    return Request(name, tokens, kv_transfer_params={"do_remote_prefill": True, "transfer_id": transfer, "transfer_peer": peer})


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
        self.assertEqual(prefill.scheduler.finish_request(p, (TABLE,)), (False, {"transfer_id": "x", "transfer_peer": ""}))
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

    def test_an_engine_that_only_waits_leaves_the_processor_to_others(self) -> None:
        """Its waits grow: where both engines share a processor, the other one computes meanwhile."""
        decode = self.engine()
        self.assertEqual(decode.admit(received("d", prompt(94, 200), "w"), TABLE), (200, True))
        decode.step(output())
        began = time.monotonic()
        for _ in range(50):
            decode.step(output())
        self.assertGreater(time.monotonic() - began, 0.2)

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


class HandedOverByAnIdleEngine(Engines):
    def test_a_prompt_computed_without_the_daemon_is_not_awaited_from_the_next_one(self) -> None:
        """No hook is called: the attendants attach both engines, and the producer's says that nothing comes."""
        prefill, decode = self.engine(), self.engine()
        for engine in (prefill, decode):
            self.addCleanup(Attendant(engine.scheduler).close)
        self.daemon.kill()
        until(lambda: not prefill.scheduler.is_ready())
        tokens = prompt(93, 200)
        p, d = sent("p", tokens, "z"), received("d", tokens, "z")
        self.assertEqual(prefill.prefill(p, list(range(1, 8))), 0)
        self.assertEqual(prefill.scheduler.finish_request(p, (TABLE,)), (False, None))
        self.daemon.start()
        self.assertTrue(until(lambda: prefill.scheduler.is_ready() and decode.scheduler.is_ready()))
        began = time.monotonic()
        self.assertEqual(decode.admit(d, TABLE), (200, True))
        self.assertEqual(finished(decode), ({"d"}, set(TABLE)))
        self.assertLess(time.monotonic() - began, 10)  # of 20 s that it would wait
        self.assertTrue(until(lambda: prefill.scheduler.stats()["handovers_send_failed"] == 1))


class Nodes(Engines):
    """The prefill engine on node0, the decode engine on node1."""

    with_daemon = False

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.daemons = nodes()
        for daemon in cls.daemons:
            cls.addClassCleanup(daemon.stop)

    def pair(self, **options: Any) -> tuple[Engine, Engine]:
        engines = []
        for daemon in self.daemons:
            self.socket = daemon.socket
            engines.append(self.engine(**options))
            engines[-1].wait()
        return engines[0], engines[1]

    def compute(self, engine: Engine, request: Request) -> dict[str, Any]:
        """All of its prompt, into blocks from 1 on; what the engine answers."""
        for layer in range(len(engine.memory)):
            ctypes.memset(page(engine, layer, 7), 0x5A + layer, PAGE)
        self.assertEqual(engine.prefill(request, list(range(1, 8))), 0)
        answer = engine.scheduler.finish_request(request, (TABLE,))[1]
        until(lambda: not engine.scheduler.has_pending(), lambda: engine.step(output()), 60)
        return answer

    def must_come(self, decode: Engine, d: Request) -> None:
        """All of it: block 6 has the tokens after the last whole one."""
        self.assertEqual(finished(decode), ({d.request_id}, set()))
        self.assertTrue(decode.holds(d, TABLE, *range(6)))
        for layer in range(len(decode.memory)):
            self.assertEqual(ctypes.string_at(page(decode, layer, TABLE[6]), PAGE), bytes([0x5A + layer]) * PAGE)


class HandedOverBetweenNodes(Nodes):
    def test_prompts_come_from_the_other_node(self) -> None:
        """Dispatched together, and one after the other with the answer of the prefill engine unchanged."""
        for foreign in (1, 0):
            prefill, decode = self.pair(foreign=foreign)
            tokens = prompt(100 + foreign, 200)
            d, p = received("d", tokens, f"together{foreign}", "node0"), sent("p", tokens, f"together{foreign}")
            self.assertEqual(decode.admit(d, TABLE), (200, True))
            decode.step(output())
            self.assertEqual(self.compute(prefill, p)["transfer_peer"], "node0")
            self.must_come(decode, d)

            tokens = prompt(110 + foreign, 200)
            answer = self.compute(prefill, sent("p2", tokens, f"sequential{foreign}"))
            d = Request("d2", tokens, kv_transfer_params={"do_remote_prefill": True} | answer)
            self.assertEqual(decode.admit(d, TABLE), (200, True))
            self.must_come(decode, d)

    def test_a_peer_that_is_this_node_is_no_detour(self) -> None:
        self.socket = self.daemons[0].socket
        prefill, decode = self.engine(), self.engine()
        for engine in (prefill, decode):
            engine.wait()
        asked = self.daemons[0].peers()["peers"][0]["fetched"]
        tokens = prompt(120, 200)
        d = received("d", tokens, "here", "node0")
        self.assertEqual(decode.admit(d, TABLE), (200, True))
        decode.step(output())
        self.compute(prefill, sent("p", tokens, "here"))
        self.must_come(decode, d)
        self.assertEqual(decode.scheduler.stats()["handovers_received"], 1)
        self.assertEqual(self.daemons[0].peers()["peers"][0]["fetched"], asked)

    def test_an_unknown_node_is_a_miss_at_once(self) -> None:
        decode = self.pair()[1]
        d, began = received("d", prompt(121, 200), "x", "nobody"), time.monotonic()
        self.assertEqual(decode.admit(d, TABLE), (200, True))
        self.assertEqual(finished(decode), ({"d"}, set(TABLE)))
        self.assertLess(time.monotonic() - began, 10)  # of 20 s that it would wait


class HandedOverByANodeThatFails(Nodes):
    def half_way(self) -> tuple[Engine, Request]:
        """The decode engine, its request, three of whose blocks have come."""
        prefill, decode = self.pair()
        tokens, table = prompt(130 + len(self.id()), 200), list(range(1, 8))
        d, p = received("d", tokens, self.id()[-100:], "node0"), sent("p", tokens, self.id()[-100:])
        self.assertEqual(decode.admit(d, TABLE), (200, True))
        prefill.admit(p, table)
        prefill.step(output(new=[("p", (table,), 0, 96)]), lambda: prefill.write(p, table, 0, 3))
        self.assertTrue(until(lambda: decode.holds(d, TABLE, 0, 1, 2), lambda: (prefill.step(output()), decode.step(output())), 60))
        return decode, d

    def must_end_soon(self, decode: Engine) -> None:
        """What has come stays, and the rest fails, long before the 20 s that the engine would wait."""
        began = time.monotonic()
        self.assertEqual(finished(decode), ({"d"}, set(TABLE[3:])))
        self.assertLess(time.monotonic() - began, 12)
        self.assertEqual(decode.scheduler.stats()["handovers_receive_failed"], 1)

    def test_1_a_net_process_that_stands_still_is_given_up(self) -> None:
        decode, _ = self.half_way()
        net, links = self.daemons[0].peers()["net"]["pid"], self.daemons[1].peers()["peers"][0]["links"]
        os.kill(net, signal.SIGSTOP)
        try:
            self.must_end_soon(decode)
        finally:
            os.kill(net, signal.SIGCONT)
        self.assertTrue(until(lambda: self.daemons[1].peers()["peers"][0]["links"] > links, pause=0.05))

    def test_2_what_has_come_from_a_daemon_that_is_killed_is_kept(self) -> None:
        decode, d = self.half_way()
        self.daemons[0].process.kill()
        self.must_end_soon(decode)
        self.assertTrue(decode.holds(d, TABLE, 0, 1, 2))


def request(params: Any, status: str = "FINISHED_LENGTH_CAPPED") -> SimpleNamespace:
    return SimpleNamespace(request_id="r", kv_transfer_params=params, status=SimpleNamespace(name=status), num_prompt_tokens=7)


class Parameters(unittest.TestCase):
    def handovers(self, **changes: Any) -> Handovers:
        return Handovers(**{"engine_id": "e", "ranks": 2, "sends": True, "receives": True, "child": False, **changes})

    def test_they_say_which_side_a_request_is(self) -> None:
        both = self.handovers()
        self.assertEqual(both.find(request({"do_remote_decode": True, "transfer_id": "t"})), (True, "t", None, "own"))
        self.assertEqual(both.find(request({"do_remote_prefill": True, "transfer_id": "t"})), (False, "t", None, None))
        self.assertIsNone(both.find(request({"do_remote_prefill": True, "remote_engine_id": "another connector's"})))
        sends, made, _, _ = both.find(request({"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None})) or (False, "", None, None)
        self.assertTrue(sends and len(made) == 32)

    def test_what_is_answered_is_asked_for_elsewhere(self) -> None:
        both = self.handovers()
        for node, device in (("", ""), ("node1", ""), ("", "GPU-1"), ("node1", "GPU-1")):
            answer = both.params(request({}), "t", node, device)
            self.assertEqual(both.find(request(answer)), (False, "t", node or None, device or None))
        self.assertIsNone(both.params(request({}, "FINISHED_ABORTED"), "t", "node1", "GPU-1"))

    def test_a_request_names_the_node_that_computes_or_the_option_does(self) -> None:
        for default, named, peer in ((None, None, None), (None, "n", "n"), ("o", None, "o"), ("o", "n", "n")):
            self.assertEqual(self.handovers(peer=default).find(request({"transfer_id": "t", "transfer_peer": named})), (False, "t", peer, None))
        self.assertEqual(self.handovers(peer="o").find(request({"do_remote_decode": True, "transfer_id": "t"})), (True, "t", None, "own"))

    def test_a_request_names_the_gpu_or_the_option_does(self) -> None:
        for default, named, device in ((None, None, None), (None, "g", "g"), ("o", None, "o"), ("o", "g", "g"), ("o", "none", None)):
            self.assertEqual(self.handovers(device=default).find(request({"transfer_id": "t", "transfer_device": named})), (False, "t", None, device))
        self.assertEqual(self.handovers().find(request({"do_remote_decode": True, "transfer_id": "t", "transfer_device": "none"})), (True, "t", None, None))
        self.assertEqual(self.handovers(own_device=False).find(request({"do_remote_decode": True, "transfer_id": "t"})), (True, "t", None, None))

    def test_the_role_only_restricts(self) -> None:
        self.assertIsNone(self.handovers(sends=False).find(request({"do_remote_decode": True, "transfer_id": "t"})))
        self.assertIsNone(self.handovers(receives=False).find(request({"do_remote_prefill": True, "transfer_id": "t"})))

    def test_bad_parameters_are_no_hand_over(self) -> None:
        both = self.handovers()
        for bad in ("", "x" * 129, "a\nb", "\0", "\ud800", 7, ["t"]):
            self.assertIsNone(both.find(request({"do_remote_decode": True, "transfer_id": bad})), bad)
        for bad in ("", "x" * 65, "a\nb", 7):
            self.assertIsNone(both.find(request({"transfer_id": "t", "transfer_peer": bad})), bad)
            self.assertIsNone(both.find(request({"transfer_id": "t", "transfer_device": bad})), bad)
        self.assertIsNone(both.find(request(["do_remote_decode"])))
        self.assertEqual(both.complaints, 16)

    def test_a_child_answers_with_no_key_of_another_connector(self) -> None:
        child = self.handovers(child=True)
        self.assertIsNone(child.find(request({"do_remote_decode": True})))
        self.assertEqual(child.params(request({}), "t", "", ""), {"transfer_id": "t"})
        self.assertEqual(child.params(request({}), "t", "node1", "GPU-1"), {"transfer_id": "t", "transfer_peer": "node1", "transfer_device": "GPU-1"})
        self.assertEqual(child.find(request({"do_remote_prefill": True, "transfer_id": "t", "remote_host": "of another connector"})), (False, "t", None, None))

    def test_a_claimed_request_is_the_same_hand_over(self) -> None:
        child = self.handovers(child=True)
        for given in ({"do_remote_decode": True}, {"do_remote_prefill": True}, {"do_remote_prefill": True, "transfer_peer": "n", "transfer_device": "g"}, {}):
            one = request(given | {"transfer_id": "t", "remote_port": 1})
            wanted = child.find(one)
            for _ in range(2):  # by each of two kvd children
                claim(one)
                self.assertEqual(child.find(one), wanted)
            self.assertFalse({"do_remote_decode", "do_remote_prefill", "remote_port"} & set(one.kv_transfer_params))


if __name__ == "__main__":
    unittest.main()
