"""Hand-overs in memory of a GPU, between two engines on two fake devices of one daemon. Driven as vLLM drives it, without vLLM (rig.py)."""

from __future__ import annotations

import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time
import unittest
from typing import Any

from rig import PAGE, Daemon, Engine, Engines, Request, _kvd, output, prompt, until

from test_handover import TABLE, finished, page, received, sent

ON_DEVICE = {"do_remote_decode": True, "transfer_device": "own"}


def flip_device_memory() -> int:
    """Flip a bit of each page of it, which both engines have mapped; slabs."""
    seen = set()
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        place, access, *slab = line.split()[:5]
        if "kvd-fake-gpu" in line and access.startswith("rw") and tuple(slab) not in seen:
            first, last = (int(word, 16) for word in place.split("-"))
            for at in range(first, last, PAGE):
                ctypes.c_uint8.from_address(at).value ^= 1
            seen.add(tuple(slab))
    return len(seen)


def produce_and_die(socket: str) -> None:
    """Half of a prompt, in a process of its own."""
    engine, table, tries = Engine(socket, "killed"), list(range(1, 8)), 0
    engine.wait()
    engine.scheduler.set_device("fake-0")

    def sends_there() -> bool:
        nonlocal tries
        tries += 1
        p = sent(f"w{tries}", prompt(2000 + tries, 200), f"not received {tries}")
        p.kv_transfer_params |= ON_DEVICE
        engine.prefill(p, table)
        return "transfer_device" in engine.scheduler.finish_request(p, (table,))[1]

    until(sends_there, lambda: engine.step(output()), 60)
    engine.idle(lambda: engine.scheduler.stats()["puts_open"] == 0)
    done = engine.scheduler.stats()["gpu_blocks"]
    p = sent("p", prompt(8, 200), "killed")
    p.kv_transfer_params |= ON_DEVICE
    engine.admit(p, table)
    engine.step(output(new=[("p", (table,), 0, 96)]), lambda: engine.write(p, table, 0, 3))
    engine.idle(lambda: engine.scheduler.stats()["gpu_blocks"] == done + 3)
    os.kill(os.getpid(), signal.SIGKILL)


class OnDevices(Engines):
    """The prefill engine is on fake-0, the decode engine on fake-1."""

    with_daemon = False  # one of each test's own
    gpu_size = "16MiB"

    def setUp(self) -> None:
        super().setUp()
        self.daemon = Daemon(gpu__size=self.gpu_size, gpu__slab_size="4MiB", gpu__devices="fake-0,fake-1")
        self.addCleanup(self.daemon.stop)
        self.socket = self.daemon.socket

    def pair(self, **decodes: Any) -> tuple[Engine, Engine]:
        """Both are ready, and so is memory of both devices: a first prompt came from there."""
        prefill, decode = self.engine(), self.engine(**decodes)
        for engine, device in ((prefill, "fake-0"), (decode, "fake-1")):
            engine.wait()
            self.assertEqual(engine.scheduler.set_device(device), _kvd.OK)
        self.tries = 0

        def is_there() -> bool:
            self.tries += 1
            self.hand_over(prefill, decode, 1000 + self.tries, f"warm{self.tries}")
            return decode.scheduler.stats()["handovers_received_gpu"] > 0

        self.assertTrue(until(is_there, seconds=60, pause=0.1))
        self.before = decode.scheduler.stats()
        return prefill, decode

    def ask(self, decode: Engine, seed: int, transfer: str, device: str = "fake-0") -> Request:
        d = received(f"d-{transfer}", prompt(seed, 200), transfer)
        d.kv_transfer_params["transfer_device"] = device
        self.assertEqual(decode.admit(d, TABLE), (200, True))
        return d

    def compute(self, prefill: Engine, seed: int, transfer: str, until_saved: bool = True) -> dict[str, Any]:
        """What the prefill engine answers."""
        p = sent(f"p-{transfer}", prompt(seed, 200), transfer)
        p.kv_transfer_params |= ON_DEVICE
        for layer in range(len(prefill.memory)):
            ctypes.memset(page(prefill, layer, 7), 0x5A + layer, PAGE)
        self.assertEqual(prefill.prefill(p, list(range(1, 8))), 0)
        answer = prefill.scheduler.finish_request(p, (list(range(1, 8)),))[1]
        if until_saved:
            until(lambda: not prefill.scheduler.has_pending(), lambda: prefill.step(output()), 60)
        return answer

    def must_have(self, decode: Engine, d: Request) -> None:
        self.assertEqual(finished(decode), ({d.request_id}, set()))
        self.assertTrue(decode.holds(d, TABLE, *range(6)))
        for layer in range(len(decode.memory)):
            self.assertEqual(ctypes.string_at(page(decode, layer, TABLE[6]), PAGE), bytes([0x5A + layer]) * PAGE)
        decode.scheduler.finish_request(d, (TABLE,))

    def hand_over(self, prefill: Engine, decode: Engine, seed: int, transfer: str) -> dict[str, Any]:
        d = self.ask(decode, seed, transfer)
        decode.step(output())
        answer = self.compute(prefill, seed, transfer)
        self.must_have(decode, d)
        return answer

    def gained(self, decode: Engine, name: str) -> int:
        return decode.scheduler.stats()[name] - self.before[name]


class HandedOverOnDevices(OnDevices):
    def test_a_prompt_comes_from_memory_of_the_other_device(self) -> None:
        prefill, decode = self.pair()
        self.assertEqual(self.hand_over(prefill, decode, 1, "a")["transfer_device"], "fake-0")
        self.assertEqual(self.gained(decode, "handovers_received_gpu"), 1)
        self.assertEqual(self.gained(decode, "gpu_tokens"), 200)
        self.assertTrue(until(lambda: prefill.scheduler.stats()["handovers_sent_gpu"] > 0, lambda: prefill.step(output()), 60))

    def test_what_a_step_can_load_is_a_hit(self) -> None:
        """One after the other: all is there, and the hand-over is over with the hit."""
        prefill, decode = self.pair()
        d = Request("d", prompt(2, 200), kv_transfer_params=dict(self.compute(prefill, 2, "h")))
        self.assertEqual(decode.admit(d, TABLE), (192, False))
        results = decode.step(output(new=[("d", (TABLE,), 192, 8)]))
        self.assertEqual(results.errors, set())
        self.assertTrue(decode.holds(d, TABLE, *range(6)))
        self.assertEqual(self.gained(decode, "other_gpu_tokens"), 192)
        self.assertEqual(self.gained(decode, "handovers_receive_failed"), 0)

    def test_an_answer_names_the_device(self) -> None:
        """One after the other, with asynchronous loads: all is in host memory as well by then."""
        prefill, decode = self.pair(mode=2)
        answer = self.compute(prefill, 2, "b")
        d = Request("d", prompt(2, 200), kv_transfer_params=dict(answer))
        self.assertEqual(decode.admit(d, TABLE), (200, True))
        self.must_have(decode, d)
        self.assertEqual(self.gained(decode, "gpu_tokens"), 200)

    def test_a_device_that_the_daemon_has_not_is_no_hand_over_s(self) -> None:
        prefill, decode = self.pair()
        d = self.ask(decode, 3, "c", "GPU-00000000-0000-0000-0000-000000000000")
        decode.step(output())
        self.compute(prefill, 3, "c")
        self.must_have(decode, d)
        self.assertEqual(self.gained(decode, "gpu_tokens"), 0)
        self.assertEqual(self.gained(decode, "handovers_received"), 1)

    def test_damaged_memory_is_computed(self) -> None:
        """What is in host memory is not looked for: the request has failed once."""
        prefill, decode = self.pair(mode=2)
        answer = self.compute(prefill, 4, "d")
        self.assertGreater(flip_device_memory(), 0)
        d = Request("d", prompt(4, 200), kv_transfer_params=dict(answer))
        self.assertEqual(decode.admit(d, TABLE), (200, True))
        self.assertEqual(finished(decode), ({"d"}, set(TABLE)))
        self.assertEqual(self.gained(decode, "loads_failed"), 1)

    def test_a_producer_that_goes_leaves_the_decode_engine_its_work(self) -> None:
        prefill, decode = self.pair()
        tokens, table = prompt(5, 200), list(range(1, 8))
        d, p = self.ask(decode, 5, "e"), sent("p", tokens, "e")
        p.kv_transfer_params |= ON_DEVICE
        prefill.admit(p, table)
        prefill.step(output(new=[("p", (table,), 0, 96)]), lambda: prefill.write(p, table, 0, 3))
        self.assertTrue(until(lambda: decode.holds(d, TABLE, 0, 1, 2), lambda: (prefill.step(output()), decode.step(output())), 60))
        began = time.monotonic()
        prefill.close()
        self.engines.remove(prefill)
        self.assertEqual(finished(decode), ({d.request_id}, set(TABLE[3:])))
        self.assertLess(time.monotonic() - began, 12)  # of 20 s that it would wait

    def test_a_producer_that_is_killed_leaves_what_it_has_saved(self) -> None:
        decode = self.pair()[1]
        d = self.ask(decode, 8, "killed")
        decode.step(output())
        producer = subprocess.Popen([sys.executable, __file__, "producer", self.socket])
        self.addCleanup(producer.kill)
        self.assertEqual(producer.wait(60), -signal.SIGKILL)
        began = time.monotonic()
        self.assertEqual(finished(decode), ({d.request_id}, set(TABLE[3:])))
        self.assertLess(time.monotonic() - began, 12)
        self.assertTrue(decode.holds(d, TABLE, 0, 1, 2))

    def test_a_consumer_that_goes_takes_nothing_along(self) -> None:
        prefill, decode = self.pair()
        self.ask(decode, 6, "f")
        decode.step(output())
        self.engines.remove(decode)
        decode.close()
        self.compute(prefill, 6, "f")
        other = self.engine(mode=2)
        other.wait()
        d = self.ask(other, 6, "f", "fake-0")
        self.must_have(other, d)

    def test_a_killed_daemon_is_a_miss(self) -> None:
        prefill, decode = self.pair()
        d = self.ask(decode, 7, "g")
        decode.step(output())
        self.compute(prefill, 7, "g", until_saved=False)
        self.daemon.process.kill()
        ids, _ = finished(decode)
        self.assertEqual(ids, {d.request_id})


class HandedOverWithoutRoom(OnDevices):
    gpu_size = "4MiB"  # 512 blocks

    def test_full_memory_hands_over_in_host_memory(self) -> None:
        """Nobody takes these prompts, so each keeps its blocks; the daemon is busy now and then, and full once it stays so."""
        prefill, decode = self.pair()
        answers: list[dict[str, Any]] = []
        while len(answers) < 300 and (len(answers) < 90 or any("transfer_device" in answer for answer in answers[-20:])):
            answers.append(self.compute(prefill, 100 + len(answers), f"kept{len(answers)}"))
        self.assertEqual(answers[0]["transfer_device"], "fake-0")
        self.before = decode.scheduler.stats()
        self.hand_over(prefill, decode, 99, "last")
        self.assertEqual(self.gained(decode, "handovers_received"), 1)
        self.assertEqual(self.gained(decode, "handovers_received_gpu"), 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["producer"]:
        produce_and_die(sys.argv[2])
    unittest.main()
