"""Hooks around a step that do something for a cache on a GPU only: loads that begin when they are planned, and loads layer by layer. Here the cache is in host
memory, so that nothing else comes of them; the engine's stream, which they ask for, shows who is told of what (rig.py)."""

from __future__ import annotations

import threading
import unittest
from types import SimpleNamespace
from typing import Any

from rig import SLOW, Engine, Engines, Meta, Request, output, prompt, time_us


class Early(Engines):
    """When a worker is told of a step message before the engine tells it."""

    with_daemon = False

    def setUp(self) -> None:
        super().setUp()
        self.asked = 0
        self.stream: Any = 7
        self.requests = 0
        self.first = self.make("prefetch")

    def tearDown(self) -> None:
        super().tearDown()
        for engine in self.engines:
            self.assertEqual(engine.worker.stats()["loads_prefetched"], 0)

    def make(self, name: str, **options: Any) -> Engine:
        return self.engine(name, **{"prefetch": 1, "stream_of": self.stream_of, **options})

    def stream_of(self, device: int) -> Any:
        self.asked += 1
        if isinstance(self.stream, BaseException):
            raise self.stream
        return self.stream

    def plan(self, engine: Engine | None = None, **extra: Any) -> tuple[bool, Any]:
        """Build a plan with something in it. Whether the worker was told, and the plan."""
        engine = engine or self.first
        request = Request(f"r{self.requests}", prompt(1, 40))
        self.requests += 1
        engine.admit(request, [1, 2])
        before = self.asked
        meta = engine.scheduler.build_meta(output(new=[(request.request_id, ([1, 2],), 0, 40)], **extra))
        self.assertNotEqual(meta.message, b"")
        return self.asked > before, meta

    def step(self, engine: Engine | None = None, **extra: Any) -> bool:
        told, meta = self.plan(engine, **extra)
        (engine or self.first).work(meta)
        return told

    def test_a_message_is_prefetched_once_the_worker_has_had_a_step(self) -> None:
        self.assertFalse(self.step(), "nobody knows which thread calls it")
        for _ in range(3):
            self.assertTrue(self.step())

    def test_an_empty_message_is_not_prefetched_and_counts(self) -> None:
        self.step()
        before = self.asked
        meta = self.first.scheduler.build_meta(output())
        self.assertEqual((meta.message, self.asked), (b"", before))
        self.assertFalse(self.plan()[0], "the worker has not begun the one before")

    def test_a_message_does_not_overtake_an_empty_one(self) -> None:
        self.step()
        first = self.plan()[1]
        empty = self.first.scheduler.build_meta(output())
        self.first.work(first)
        told, meta = self.plan()
        self.assertFalse(told, "the empty one is still to come")
        self.first.work(empty)
        self.first.work(meta)
        self.assertTrue(self.step())

    def test_a_message_does_not_overtake_another(self) -> None:
        self.step()
        plans = [self.plan() for _ in range(3)]
        self.assertEqual([told for told, _ in plans], [True, False, False])
        for _, meta in plans[:2]:
            self.first.work(meta)
        told, last = self.plan()
        self.assertFalse(told, "one is still to come")
        self.first.work(plans[2][1])
        self.assertFalse(self.plan()[0], "and another")
        self.first.work(last)

    def test_a_lost_message_is_not_awaited_after_a_later_one(self) -> None:
        self.step()
        self.assertTrue(self.plan()[0], "this one is lost,")
        self.first.scheduler.build_meta(output())  # and an empty one
        told, meta = self.plan()
        self.assertFalse(told, "they may still come")
        self.first.work(meta)
        self.assertTrue(self.step(), "they do not, after this one")
        self.assertTrue(self.step())

    def test_steps_that_write_blocks_before_the_forward_do_not_prefetch(self) -> None:
        self.step()
        for name in ("new_block_ids_to_zero", "kv_cache_block_copies"):
            self.assertFalse(self.step(**{name: [3]}))
            self.assertTrue(self.step(**{name: []}))
            self.assertTrue(self.step(**{name: None}))

            class Strange:
                def __bool__(self) -> bool:
                    raise ValueError

            self.assertFalse(self.step(**{name: Strange()}))

    def test_another_thread_does_not_prefetch(self) -> None:
        self.step()
        told: list[bool] = []
        thread = threading.Thread(target=lambda: told.append(self.step()))
        thread.start()
        thread.join()
        self.assertEqual(told, [False])
        self.assertFalse(self.step(), "that thread has called it last")
        self.assertTrue(self.step())

    def test_an_unknown_stream_is_the_hooks_error(self) -> None:
        self.step()
        self.stream = "no stream"
        told, meta = self.plan()
        self.assertTrue(told)
        self.assertEqual(self.first.breaker.errors, [])
        self.stream = 7
        self.first.work(meta)
        self.assertTrue(self.step())

    def test_an_interrupt_is_not_swallowed(self) -> None:
        self.step()
        self.stream = KeyboardInterrupt()
        with self.assertRaises(KeyboardInterrupt):
            self.plan()
        self.stream = 7
        self.assertFalse(self.step(), "what was interrupted is lost")
        self.assertTrue(self.step())

        class Interrupted:
            def __bool__(self) -> bool:
                raise KeyboardInterrupt

        engine = self.make("interrupted")
        self.step(engine)
        with self.assertRaises(KeyboardInterrupt):
            self.plan(engine, new_block_ids_to_zero=Interrupted())

    def test_prefetch_can_be_turned_off_on_either_side(self) -> None:
        for n, options in enumerate(({"prefetch": 0}, {"stream_of": None})):
            engine = self.make(f"off{n}", **options)
            self.step(engine)
            self.assertFalse(self.step(engine))

    def test_a_worker_of_another_instance_does_not_prefetch(self) -> None:
        other = self.make("another")
        self.step()
        self.step(other)
        before = self.asked
        self.first.worker.close()
        self.assertFalse(self.plan()[0])
        self.assertEqual(self.asked, before)
        self.assertTrue(self.step(other))

    def test_of_two_workers_of_an_instance_none_prefetches(self) -> None:
        second = self.make("prefetch")
        self.step()
        self.assertFalse(self.step())
        second.worker.close()
        self.step()
        self.assertTrue(self.step())


class Layers(Engines):
    """In which steps the engine is asked to name its layers, and that asking and answering cost next to nothing."""

    with_daemon = False
    NONE, PIECEWISE, FULL = object(), object(), object()
    NAMES = {"model.layers.0.attn": 0, "model.layers.1.attn": 1}

    def setUp(self) -> None:
        super().setUp()
        self.stream: Any = 7
        self.worker = self.engine(layers=(self.NAMES, (self.NONE, self.PIECEWISE)), stream_of=lambda device: self.stream).worker

    def step(self, mode: Any, names: Any = NAMES, end: bool = True, **context: Any) -> bool:
        """Whether the step asked for its layers' names."""
        worker, meta = self.worker, Meta(b"")
        worker.begin_step(meta)
        self.assertIs(worker.wants_layers(), False)
        worker.start_async_loads(meta)
        worker.run_sync_loads(SimpleNamespace(**{"attn_metadata": {}, "cudagraph_runtime_mode": mode, "ubatch_slices": None, **context}))
        asked = worker.wants_layers()
        for name in names:
            self.assertIsNone(worker.await_layer(name))
            self.assertIsNone(worker.skip_save(name, None, attn_metadata=None))
        if end:
            worker.end_step()
            self.assertIs(worker.wants_layers(), False)
        return asked

    def test_a_mode_is_watched_until_each_layer_was_named(self) -> None:
        self.assertTrue(self.step(self.PIECEWISE, ["model.layers.0.attn"]))
        self.assertTrue(self.step(self.PIECEWISE))
        self.assertFalse(self.step(self.PIECEWISE), "a step without a load that comes layer by layer has nothing to wait for")
        self.assertTrue(self.step(self.NONE), "each mode separately")
        self.assertFalse(self.step(self.NONE))

    def test_steps_that_do_not_name_layers_are_not_asked(self) -> None:
        self.assertFalse(self.step(self.FULL))
        self.assertFalse(self.step(self.NONE, attn_metadata=None))
        self.assertFalse(self.step(self.NONE, attn_metadata=[{}, {}]))
        self.assertFalse(self.step(self.NONE, ubatch_slices=[1, 2]))
        worker = self.worker
        for context in ((), (None,), (object(),)):
            worker.begin_step(Meta(b""))
            worker.run_sync_loads(*context)
            self.assertIs(worker.wants_layers(), False)
        self.assertTrue(self.step(self.NONE), "none of these counted")

    def test_a_mode_that_never_names_all_is_given_up(self) -> None:
        for _ in range(20):
            self.assertTrue(self.step(self.NONE, []), "a step without attention says nothing")
        asked = [self.step(self.NONE, ["model.layers.1.attn", "model.layers.1.attn", "another"]) for _ in range(20)]
        self.assertEqual(asked, [True] * 8 + [False] * 12)

    def test_layers_on_another_stream_are_not_trusted(self) -> None:
        class Names(list):
            def __iter__(names) -> Any:
                yield "model.layers.0.attn"
                self.stream = 8
                yield "model.layers.1.attn"
                self.stream = 7

        self.assertTrue(self.step(self.NONE, Names()))
        self.assertTrue(self.step(self.NONE))
        self.assertFalse(self.step(self.NONE))

    def test_a_step_without_an_end_is_forgotten(self) -> None:
        self.assertTrue(self.step(self.NONE, end=False))
        self.assertTrue(self.step(self.NONE))
        self.assertFalse(self.step(self.NONE))

    def test_names_that_are_none_are_harmless(self) -> None:
        self.assertTrue(self.step(self.NONE, [None, 3, ["x"], *self.NAMES]))
        self.assertFalse(self.step(self.NONE))

    def test_an_error_in_a_hook_is_the_circuit_breakers(self) -> None:
        self.step(self.NONE, [], end=False)
        self.stream = "no stream"
        self.assertIsNone(self.worker.await_layer("model.layers.0.attn"))
        self.stream = 7
        self.worker.end_step()
        self.assertEqual([hook for hook, _ in self.engines[0].breaker.errors], ["wait_for_layer_load"])
        self.engines[0].breaker.errors.clear()

    def test_wrong_layers_are_refused(self) -> None:
        for broken in (3, ({}, ()), ([], ()), ({"a": 0}, [])):
            with self.assertRaises((TypeError, ValueError)):
                Engine(self.socket, "broken", layers=broken)

    def test_asking_and_answering_cost_little(self) -> None:
        worker = self.worker
        self.step(self.NONE)
        worker.begin_step(Meta(b""))
        asks, layer = (1000 * time_us(call, 50, 1000) for call in (worker.wants_layers, lambda: worker.await_layer("model.layers.0.attn")))
        print(f"has_connector_metadata {asks:.0f} ns, wait_for_layer_load with nothing to wait for {layer:.0f} ns")
        self.assertLess(asks + layer, 1000 * SLOW)


if __name__ == "__main__":
    unittest.main()
