"""The hooks of both halves, driven as vLLM drives them, without vLLM (rig.py)."""

from __future__ import annotations

import ctypes
import hashlib
import signal
import struct
import sys
import threading
import unittest
from types import SimpleNamespace
from typing import Any

from rig import BLOCK, PAGE, SLOW, Blocks, Engine, Engines, Meta, Request, Results, _kvd, output, prompt, time_us, until

MISS = (0, False)


def without_leases(meta: Meta) -> Meta:
    """The message's loads find nothing: the daemon has lost what was leased."""
    message, at = bytearray(meta.message), 16
    while at < len(message):
        kind, size = struct.unpack_from("=II", message, at)
        if kind == 3:
            message[at + 20] |= 2
        at += size
    return Meta(bytes(message))


class Hooks(Engines):
    def saved_by(self, request: Request, **options: Any) -> Engine:
        engine = self.engine(**options)
        table = list(range(1, 1 + (len(request._all_token_ids) + BLOCK - 1) // BLOCK))
        self.assertEqual(engine.prefill(request, table), 0)
        n = len(request._all_token_ids)
        # An adapter's space may not be open yet in the step that computes the prompt: then a later one saves it.
        engine.saved(n // BLOCK, cached=[(request.request_id, None, n, 1)] if request.lora_request else [])
        self.assertEqual(engine.scheduler.finish_request(request, (table,)), (False, None))
        return engine

    def test_what_one_engine_saved_another_loads(self) -> None:
        self.saved_by(Request("a", prompt(1, 200)))
        engine = self.engine()
        again = Request("b", prompt(1, 200))
        table = [9, 8, 7, 6, 5, 4, 3]
        self.assertEqual(engine.prefill(again, table), 192)
        self.assertTrue(engine.holds(again, table, *range(6)))

    def test_nothing_is_found_or_saved_before_the_weights_have_a_name(self) -> None:
        engine = self.engine(weights=None)
        engine.idle(engine.is_proved)  # its self-test needs no weights
        self.assertTrue(engine.is_proved())
        early, table = Request("early", prompt(60, 200)), list(range(1, 8))
        self.assertEqual(engine.prefill(early, table), 0)
        engine.scheduler.finish_request(early, (table,))
        for _ in range(20):
            engine.step(output())
        stats = engine.scheduler.stats()
        self.assertEqual((stats["miss_tokens_weights_pending"], stats["match_no_daemon"], stats["saves"], engine.scheduler.is_ready()), (192, 0, 0, False))

        self.assertEqual(_kvd.status_name(engine.scheduler.set_weights("")), "ERR_ARG")
        self.assertEqual(engine.scheduler.set_weights("named late"), _kvd.OK)
        self.assertEqual(_kvd.status_name(engine.scheduler.set_weights("another name")), "ERR_ARG")
        engine.wait()
        late = Request("late", prompt(60, 200))
        self.assertEqual(engine.prefill(late, table), 0)
        engine.saved(6)
        engine.scheduler.finish_request(late, (table,))

    def test_a_late_name_of_the_weights_is_as_good_as_one_from_the_start(self) -> None:
        self.saved_by(Request("a", prompt(61, 200)), weights="x")
        engine = self.engine(weights=None)
        engine.scheduler.set_weights("x")
        engine.wait()
        again, table = Request("b", prompt(61, 200)), [9, 8, 7, 6, 5, 4, 3]
        self.assertEqual(engine.prefill(again, table), 192)  # loaded in the step in which the rank learns the name, at the latest
        self.assertTrue(engine.holds(again, table, *range(6)))
        other = self.engine(weights=None)
        other.scheduler.set_weights("y")
        other.wait()
        self.assertEqual(other.match("c", prompt(61, 200)), MISS)
        self.assertEqual(_kvd.status_name(self.engine(weights="x").scheduler.set_weights("x")), "ERR_ARG")

    def test_an_adapter_of_unnamed_weights_waits_for_their_name(self) -> None:
        first, again = (Request(name, prompt(62, 200), lora_request="adapter") for name in "ab")
        self.saved_by(first, weights="x")
        engine = self.engine(weights=None)
        self.assertEqual(engine.scheduler.match(again, 0), MISS)
        engine.scheduler.set_weights("x")
        engine.wait()
        until(lambda: engine.scheduler.match(again, 0) != MISS, seconds=20)
        self.assertEqual(engine.scheduler.match(again, 0), (192, False))

    def test_one_token_is_always_left_to_compute(self) -> None:
        self.saved_by(Request("a", prompt(2, 128)))
        engine = self.engine()
        self.assertEqual(engine.match("b", prompt(2, 128)), (96, False))
        self.assertEqual(engine.match("c", prompt(2, 129)), (128, False))
        self.assertEqual(engine.match("d", prompt(2, 129), 64), (64, False))

    def test_a_request_says_how_much_is_loaded_and_saved(self) -> None:
        def limited(load: int, save: int, memory: bool = False) -> dict[str, Any]:
            return {"limits": (load, save, memory)}

        every, engine, table = 2**32 - 1, self.engine(), list(range(1, 8))
        for name, params in (("none", limited(every, 0)), ("some", limited(every, 100))):
            request = Request(name, prompt(80, 200), kv_transfer_params=params)
            self.assertEqual(engine.prefill(request, table), 0)
            for computed in range(200, 230):  # what it generates is not saved either
                engine.step(output(cached=[(name, None, computed, 1)]))
            engine.scheduler.finish_request(request, (table,))
        engine.saved(3)
        self.assertEqual(engine.scheduler.stats()["save_blocks"], 3)
        other = self.engine()
        for load, memory, found in ((every, False, 96), (every, True, 96), (95, False, 64), (64, False, 64), (31, False, 0), (0, False, 0)):
            self.assertEqual(other.match(f"b{load}", prompt(80, 200), kv_transfer_params=limited(load, every, memory)), (found, False))
        self.assertEqual(other.match("more", prompt(80, 200), 32, kv_transfer_params=limited(40, every)), (32, False))

    def test_asynchronous_loads_are_reported_once(self) -> None:
        self.saved_by(Request("a", prompt(3, 128)))
        engine = self.engine(mode=2)
        request = Request("b-12345", prompt(3, 128))
        table = [11, 12, 13, 14]
        self.assertEqual(engine.admit(request, table), (128, True))
        seen: list[str] = []
        until(lambda: seen, lambda: seen.extend(engine.step(output()).finished_recving))
        for _ in range(20):
            seen += engine.step(output()).finished_recving
        self.assertEqual(seen, ["b-12345"])
        self.assertTrue(engine.holds(request, table, 2))
        engine.scheduler.add_blocks(request, Blocks(table), 0)
        engine.step(output(new=[("b-12345", (table,), 127, 1)]))
        engine.scheduler.finish_request(request, (table,))

    def test_chunks_and_decoded_tokens_are_saved_too(self) -> None:
        engine = self.engine()
        request = Request("a", prompt(4, 100))
        self.assertEqual(engine.admit(request, [1, 2]), MISS)
        table = [1, 2, 3, 4, 5]
        engine.step(output(new=[("a", ([1, 2],), 0, 64)]), lambda: engine.write(request, table, 0, 2))
        engine.step(output(cached=[("a", ([3, 4],), 64, 36)]), lambda: engine.write(request, table, 2, 3))
        for n in range(100, 130):
            request._all_token_ids.append(n)
            request.hash()
            engine.step(output(cached=[("a", ([5],) if n == 128 else None, n, 1)]), lambda n=n: n == 127 and engine.write(request, table, 3, 4))
        engine.saved(4)
        other = self.engine()
        self.assertEqual(other.prefill(Request("b", request._all_token_ids), [21, 22, 23, 24, 25]), 128)
        self.assertTrue(other.holds(request, [21, 22, 23, 24, 25], 3))

    def test_a_preempted_request_comes_back_with_other_blocks(self) -> None:
        engine = self.engine()
        request = Request("a", prompt(5, 100))
        engine.prefill(request, [1, 2, 3, 4])
        engine.saved(3)
        engine.step(output(preempted={"a"}))
        for _ in range(5):
            self.assertEqual(engine.scheduler.match(request, 0), (96, False))
        engine.scheduler.add_blocks(request, Blocks([14, 13, 12, 11]), 96)
        engine.step(output(cached=[("a", ([14, 13, 12, 11],), 96, 4)], resumed={"a"}))
        self.assertTrue(engine.holds(request, [14, 13, 12, 11], 1))

    def test_roles_are_kept(self) -> None:
        self.saved_by(Request("a", prompt(6, 100)))
        producer = self.engine(loads=0)
        self.assertEqual(producer.match("b", prompt(6, 100)), MISS)
        consumer = self.engine(saves=0)
        self.assertEqual(consumer.prefill(Request("c", prompt(6, 200)), [1, 2, 3, 4, 5, 6, 7]), 96)
        consumer.idle(seconds=0.2)
        self.assertEqual(consumer.scheduler.stats()["save_blocks"], 0)

    def test_own_keys_serve_as_well_and_keep_salts_apart(self) -> None:
        self.saved_by(Request("a", prompt(7, 200), cache_salt="x"), foreign=0)
        engine = self.engine(foreign=0)
        self.assertEqual(engine.match("b", prompt(7, 200)), MISS)
        self.assertEqual(engine.match("c", prompt(7, 200), cache_salt="y"), MISS)
        self.assertEqual(engine.match("d", prompt(7, 200), cache_salt="x"), (192, False))

    def test_the_first_request_of_an_adapter_is_served(self) -> None:
        for foreign in (1, 0):
            first, again = (Request(name, prompt(50 + foreign, 200), lora_request=f"adapter {foreign}") for name in "ab")
            self.saved_by(first, foreign=foreign)
            engine = self.engine(foreign=foreign)
            until(lambda: engine.scheduler.match(again, 0) != MISS, seconds=20)  # the space is opened: a busy daemon may need longer than a match waits
            self.assertEqual(engine.scheduler.match(again, 0), (192, False))
            self.assertEqual(engine.match("c", prompt(50 + foreign, 200)), MISS)

    def test_requests_that_do_not_read_the_cache_are_not_loaded(self) -> None:
        self.saved_by(Request("a", prompt(8, 100)))
        engine = self.engine()
        self.assertEqual(engine.match("b", prompt(8, 100), skip_reading_prefix_cache=True), MISS)

    def test_other_weights_share_nothing(self) -> None:
        self.saved_by(Request("a", prompt(9, 100)))
        engine = self.engine(weights="v")
        self.assertEqual(engine.match("b", prompt(9, 100)), MISS)

    def check_asks_nothing(self, message: bytes) -> None:
        """Some steps are timed: how many came before depends on how long the daemon was waited for."""
        self.assertIn(message[16:], (b"", struct.pack("=II", 6, 8)))  # no record, or TIME

    def test_nonsense_is_a_miss_and_an_error_in_the_circuit_breaker(self) -> None:
        engine = self.engine()
        self.assertEqual(engine.scheduler.match(object(), 0), MISS)
        self.assertEqual(engine.match("a", prompt(1, 40), "x"), MISS)
        self.assertIsNone(engine.scheduler.add_blocks(Request("b", prompt(1, 40)), object(), 0))
        self.assertIsNone(engine.scheduler.add_blocks(Request("c", prompt(1, 40)), Blocks(["x"]), 0))
        self.check_asks_nothing(engine.scheduler.build_meta(object()).message)
        engine.scheduler.add_request(Request("d", prompt(1, 40)))
        self.check_asks_nothing(engine.scheduler.build_meta(output(new=[("d", 3, 0, 1)])).message)
        self.assertIsNone(engine.scheduler.take_output(SimpleNamespace(kv_connector_worker_meta=SimpleNamespace(reports=[1]))))
        self.assertEqual(engine.scheduler.finish_request(None, ()), (False, None))
        self.assertIsNone(engine.worker.begin_step(SimpleNamespace(message=3)))
        self.assertEqual(engine.worker.stats()["bad_messages"], 1, "a plan that cannot be read must fence every block")
        hooks = [hook for hook, _ in engine.breaker.errors]
        self.assertEqual(len(hooks), 9, hooks)
        self.assertIsInstance(engine.breaker.errors[0][1], AttributeError)
        self.assertEqual(engine.scheduler.take_stats()["scheduler_internal_errors"], 8)
        engine.breaker.errors.clear()
        engine.worker.begin_step(Meta(b"no plan"))
        engine.scheduler.take_output(SimpleNamespace(kv_connector_worker_meta=SimpleNamespace(reports=[b"no report"]), invalid_block_ids=set()))
        self.assertEqual((engine.worker.stats()["bad_messages"], engine.scheduler.stats()["bad_reports"]), (2, 1))

    def test_an_interrupt_is_not_swallowed(self) -> None:
        engine = self.engine()

        class Interrupted:
            @property
            def request_id(self) -> str:
                raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            engine.scheduler.match(Interrupted(), 0)

    def test_off_is_off(self) -> None:
        self.saved_by(Request("a", prompt(10, 100)))
        engine = self.engine()
        engine.scheduler.set_enabled(False)
        request = Request("b", prompt(10, 100))
        self.assertEqual(engine.prefill(request, [1, 2, 3, 4]), 0)
        engine.idle(seconds=0.1)
        self.assertEqual(engine.scheduler.stats()["matches"], 0)
        engine.scheduler.set_enabled(True)
        self.assertEqual(engine.scheduler.match(request, 0), (96, False))

    def test_blocks_lost_while_it_was_off_are_known_to_be_lost(self) -> None:
        """Preempted and resumed in one step, as a reset of the engine does it."""
        engine = self.engine()
        request = Request("a", prompt(22, 100))
        engine.prefill(request, [1, 2, 3, 4])
        engine.scheduler.set_enabled(False)
        self.assertEqual(engine.admit(request, [5, 6, 7, 8]), MISS)
        meta = engine.scheduler.build_meta(output(cached=[("a", ([5, 6, 7, 8],), 0, 100)], resumed={"a"}, preempted={"a"}))
        self.assertIn(struct.pack("<IIII", 5, 6, 7, 8), meta.message)

    def test_saves_in_progress_at_a_switch_off_are_given_up(self) -> None:
        """Switched off by an error: blocks change hands that nobody is told about."""
        engine = self.engine()
        request, table = Request("a", prompt(18, 100)), [1, 2, 3, 4]
        self.assertEqual(engine.admit(request, table), MISS)
        self.daemon.process.send_signal(signal.SIGSTOP)
        try:
            engine.step(output(new=[("a", (table,), 0, 100)]), lambda: engine.write(request, table, 0, 3))
            engine.scheduler.set_enabled(False)
        finally:
            self.daemon.process.send_signal(signal.SIGCONT)
        engine.write(Request("b", prompt(19, 100)), table, 0, 3)
        engine.idle(lambda: engine.scheduler.stats()["late_answers"] > 0, 0.5)
        stats = engine.scheduler.stats()
        self.assertEqual((stats["save_blocks"], stats["puts_open"]), (0, 0))

    def test_what_another_request_of_the_step_loads_is_asked_for_again(self) -> None:
        """vLLM's cache has the blocks of a synchronous load as soon as they are allocated."""
        self.saved_by(Request("a", prompt(23, 100)))
        engine = self.engine(defer_shared=1)
        loading, sharing = Request("b", prompt(23, 100)), Request("c", prompt(23, 100))
        self.assertEqual(engine.admit(loading, [1, 2, 3, 4]), (96, False))
        self.assertEqual(engine.scheduler.match(sharing, 96), (None, False))
        engine.step(output(new=[("b", ([1, 2, 3, 4],), 96, 4)]))
        self.assertEqual(engine.scheduler.match(sharing, 96), MISS)
        self.assertEqual(engine.scheduler.stats()["match_deferred"], 1)

    def test_the_engine_forgets_blocks_that_failed_to_load(self) -> None:
        engine = self.engine()
        request = Request("a", prompt(21, 100))
        engine.scheduler.add_blocks(request, Blocks([1, 2, 3, 4]), 0)
        engine.scheduler.take_output(SimpleNamespace(kv_connector_worker_meta=None, invalid_block_ids=set()))
        self.assertEqual(engine.forgotten, [])
        engine.scheduler.take_output(SimpleNamespace(kv_connector_worker_meta=None, invalid_block_ids={2, 3}))
        self.assertEqual(engine.forgotten, [({2, 3}, ["a"])])

    def test_blocks_an_ended_request_computed_after_a_failed_load_go(self) -> None:
        self.saved_by(Request("a", prompt(61, 100)))
        for lose in ("finished", "preempted"):
            engine = self.engine()
            request = Request(lose, prompt(61, 200))
            table = [11, 12, 13, 14, 15, 16, 17]
            self.assertEqual(engine.admit(request, table), (96, False))
            meta = without_leases(engine.scheduler.build_meta(output(new=[(lose, (table,), 96, 104)])))
            if lose == "finished":
                engine.scheduler.finish_request(request, (table,))
            # The next step is planned before the first is over.
            ahead = engine.scheduler.build_meta(output(preempted={lose} if lose == "preempted" else set()))
            self.assertEqual(engine.work(meta).errors, {11, 12, 13})
            self.assertEqual([blocks for blocks, _ in engine.forgotten], [set(table)])
            engine.work(ahead)
            self.assertEqual(len(engine.forgotten), 1)

    def test_a_failed_load_of_several_groups_names_its_request_or_its_blocks(self) -> None:
        tables, others = ([1, 2, 3, 4], [5, 6, 7, 8]), ([11, 12, 13, 14], [15, 16, 17, 18])
        first, request = self.engine(groups=2), Request("a", prompt(91, 100))
        first.scheduler.match(request, 0)
        first.scheduler.add_blocks(request, Blocks(*tables), 0)
        first.step(output(new=[("a", tables, 0, 100)]), lambda: [first.write(request, table, 0, 3) for table in tables])
        first.saved(6)
        for results_class, blocks, requests in ((Results, set(), {"b"}), (None, {11, 12, 13, 15, 16, 17}, set())):
            engine, request = self.engine(groups=2, mode=2, results_class=results_class), Request("b", prompt(91, 100))
            self.assertEqual(engine.scheduler.match(request, 0), (96, True))
            engine.scheduler.add_blocks(request, Blocks(*others), 96)
            found = [engine.work(without_leases(engine.scheduler.build_meta(output())))]
            until(lambda: found[-1].finished_recving, lambda: found.append(engine.step(output())))
            self.assertEqual(found[-1].finished_recving, {"b"})
            self.assertEqual(set().union(*(results.errors for results in found)), blocks)
            self.assertEqual(set().union(*(results.failed_recving for results in found)), requests)

    def test_a_step_that_lacks_a_number_of_tokens_is_an_error(self) -> None:
        engine = self.engine()
        request = Request("a", prompt(20, 40))
        engine.scheduler.add_blocks(request, Blocks([1, 2]), 0)
        out = output(new=[("a", ([1, 2],), 0, 40)])
        out.num_scheduled_tokens = {}
        engine.scheduler.build_meta(out)
        self.assertEqual([hook for hook, _ in engine.breaker.errors], ["build_connector_meta"])
        engine.breaker.errors.clear()

    def test_weights_that_may_have_changed_find_nothing_before_they_have_a_name(self) -> None:
        self.saved_by(Request("a", prompt(11, 100)))
        engine = self.engine()
        self.assertEqual(engine.match("b", prompt(11, 100)), (96, False))
        engine.scheduler.suspend()
        self.assertEqual(engine.match("c", prompt(11, 100)), MISS)
        engine.scheduler.set_weights("w")
        self.assertEqual(engine.match("d", prompt(11, 100)), (96, False))
        self.assertEqual(engine.scheduler.stats()["suspensions"], 1)

    def test_other_weights_are_shared_by_those_that_have_them(self) -> None:
        for foreign in (1, 0):
            self.saved_by(Request("a", prompt(14, 100)), foreign=foreign)
            first, second = self.engine(foreign=foreign), self.engine(foreign=foreign)
            for engine in (first, second):
                engine.scheduler.suspend()
                engine.scheduler.set_weights("memory:1")
                engine.wait()
            self.assertEqual(first.match("b", prompt(14, 100)), MISS)
            self.assertEqual(first.prefill(Request("c", prompt(14, 100)), [1, 2, 3, 4]), 0)
            first.saved(3)
            until(lambda: second.match("d", prompt(14, 100)) != MISS, lambda: second.step(output()))
            self.assertEqual(second.match("e", prompt(14, 100)), (96, False))

    def test_a_request_that_goes_on_has_keys_of_the_new_name(self) -> None:
        engine = self.engine(foreign=0)
        request = Request("a", prompt(15, 100))
        self.assertEqual(engine.scheduler.match(request, 0), MISS)
        engine.scheduler.suspend()
        engine.scheduler.set_weights("memory:2")
        engine.wait()
        self.assertEqual(engine.prefill(request, [1, 2, 3, 4]), 0)
        engine.saved(3)
        self.assertEqual(engine.match("b", prompt(15, 100)), (96, False))

    def test_requests_whose_tokens_may_change_have_no_keys_of_ours(self) -> None:
        self.saved_by(Request("a", prompt(12, 100)), foreign=0)
        engine = self.engine(foreign=0)
        request = Request("b", prompt(12, 100), resumable=True)
        self.assertEqual(engine.prefill(request, [1, 2, 3, 4]), 0)
        engine.idle(seconds=0.1)
        self.assertEqual(engine.scheduler.stats()["save_blocks"], 0)

    def test_the_null_block_is_nobodys(self) -> None:
        engine = self.engine()
        request, table = Request("a", prompt(13, 100)), [0, 2, 3, 4]
        engine.admit(request, table)
        engine.step(output(new=[("a", (table,), 0, 100)]), lambda: engine.write(request, table, 1, 3))
        engine.idle(seconds=0.2)
        self.assertEqual(engine.match("b", prompt(13, 100)), MISS)

    def test_requests_that_ended_are_forgotten(self) -> None:
        engine = self.engine()
        for i in range(50):
            request = Request(f"r{i}", prompt(100 + i, 40))
            engine.prefill(request, [1, 2])
            held = sys.getrefcount(request)
            engine.scheduler.finish_request(request, ([1, 2],))
            self.assertEqual(sys.getrefcount(request), held - 1)
        engine.idle(lambda: engine.scheduler.stats()["requests"] == 0)
        self.assertEqual(engine.scheduler.stats()["requests"], 0)


class Synchronous(Engines):
    """When a hit is loaded synchronously: if no continuing request would wait for it."""

    def setUp(self) -> None:
        super().setUp()
        before = self.engine()
        if before.prefill(Request("stored", prompt(6, 128)), [1, 2, 3, 4]) == 0:  # of the first test
            before.saved(4)
        self.inner = self.engine(mode=0)
        self.asked = 0

    def inside(self) -> bool:
        """Of a hit that is refused again: it is in no step."""
        self.asked += 1
        request = Request(f"asks-{self.asked}", prompt(6, 128))
        tokens, is_async = self.inner.scheduler.match(request, 0)
        self.assertGreater(tokens, 0)
        self.inner.scheduler.finish_request(request, ([],))
        return not is_async

    def begin(self, *requests: Request) -> None:
        """The first 20 tokens of each: so few that the step is not timed, and any load may take longer than it."""
        for request in requests:
            self.assertEqual(self.inner.scheduler.match(request, 0), (0, False))
        self.inner.step(output(new=[(r.request_id, ([20 + i, 30 + i],), 0, 20) for i, r in enumerate(requests)]))

    def test_requests_wait_until_they_end(self) -> None:
        self.assertTrue(self.inside())
        running = [Request("one", prompt(60, 20)), Request("two", prompt(61, 20))]
        self.begin(*running)
        for request in running:
            self.assertFalse(self.inside())
            self.inner.scheduler.finish_request(request, ([],))
        self.assertTrue(self.inside())

    def test_a_request_for_one_token_waits_for_no_step_after_its_prompt(self) -> None:
        request = Request("single", prompt(62, 40), max_tokens=1)
        self.begin(request)
        self.assertFalse(self.inside())
        self.inner.step(output(cached=[("single", None, 20, 20)]))
        self.assertTrue(self.inside())
        self.inner.scheduler.finish_request(request, ([],))
        self.assertTrue(self.inside())

    def test_one_that_is_not_known_waits_as_others_do(self) -> None:
        self.inner.step(output(new=[("unknown", ([20, 30],), 0, 20)]))
        self.assertFalse(self.inside())
        self.inner.step(output())
        self.assertTrue(self.inside())


class Absent(Engines):
    with_daemon = False

    def test_without_a_daemon_everything_is_a_miss(self) -> None:
        engine = self.engine()
        for i in range(20):
            request = Request(f"r{i}", prompt(i, 200))
            self.assertEqual(engine.prefill(request, [1, 2, 3, 4, 5, 6, 7]), 0)
            engine.scheduler.finish_request(request, ([],))
        self.assertIs(engine.scheduler.build_meta(output()), engine.scheduler.build_meta(output()))
        engine.close()
        self.assertEqual(engine.match("x", prompt(1, 40)), MISS)
        self.assertEqual(engine.worker.take_finished(set()), (None, None))

    def test_digests_are_of_what_lies_in_memory(self) -> None:
        engine = self.engine()
        ranges = [(ctypes.addressof(memory) + i, len(memory) - i - 1) for i, memory in enumerate(engine.memory)] + [(0, 0)]
        before = engine.worker.digest(ranges)
        self.assertEqual([len(digest) for digest in before], [16] * len(ranges))
        self.assertEqual(len(set(before[1:])), 2)
        engine.memory[1][PAGE] = b"\1"
        after = engine.worker.digest(ranges)
        self.assertEqual([a == b for a, b in zip(after, before)], [True, False, True])

        found: list[Any] = []
        threads = [threading.Thread(target=lambda: found.extend(engine.worker.digest(ranges) for _ in range(20))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            engine.step(output())
        for thread in threads:
            thread.join()
        self.assertEqual(found, [after] * 40)

        for wrong in ([(1, -1)], [(1,)], [7], [(2**64 - 2, 16)], [(2**64, 1)], ["ab"]):
            with self.assertRaises((IndexError, OverflowError, TypeError, ValueError)):
                engine.worker.digest(wrong)
        engine.worker.close()
        with self.assertRaises(ValueError):
            engine.worker.digest(ranges)

    def test_closing_waits_for_digests(self) -> None:
        engine = self.engine()
        memory = ctypes.create_string_buffer(32 << 20)
        ranges = [(ctypes.addressof(memory), len(memory))]
        expected = engine.worker.digest(ranges)
        wrong: list[Any] = []
        begun = threading.Event()

        def digest() -> None:
            try:
                while True:
                    wrong.extend(digest for digest in engine.worker.digest(ranges) if digest != expected[0])
                    begun.set()
            except ValueError:
                pass

        thread = threading.Thread(target=digest)
        thread.start()
        begun.wait()
        engine.worker.close()
        thread.join()
        self.assertEqual(wrong, [])

    def test_a_wrong_configuration_is_refused_with_its_reason(self) -> None:
        for half in (_kvd.Scheduler, _kvd.Worker):
            for broken in ({}, {"socket": 3}):
                with self.assertRaises((KeyError, TypeError)):
                    half(broken)


class Cost(Engines):
    """Goals: 20 us and 2 us."""

    def test_a_match_of_8192_hashes_looks_at_few(self) -> None:
        engine = self.engine()
        warm = Request("warm", prompt(1, 1600))
        engine.prefill(warm, list(range(1, 51)))
        engine.saved(50)
        hashes = warm.block_hashes + [hashlib.sha256(str(i).encode()).digest() for i in range(8142)]
        request = Request("long", [], _all_token_ids=prompt(1, 8192 * BLOCK + 1), block_hashes=hashes)
        engine.scheduler.match(request, 0)
        ids: set[str] = set()
        calls = (lambda: engine.scheduler.match(request, 0), lambda: engine.worker.take_results(ids), lambda: engine.worker.take_finished(ids))
        best, results, plain = map(time_us, calls)
        print(f"match of 8192 hashes {best:.2f} us, get_transfer_results {results:.2f} us, get_finished {plain:.2f} us")
        self.assertLess(best, 20 * SLOW)
        self.assertLess(plain, 2 * SLOW)


if __name__ == "__main__":
    unittest.main()
