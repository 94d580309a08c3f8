"""In which steps the engine is asked to name its layers, and that asking and answering cost next to nothing (rig.py)."""

from __future__ import annotations

import unittest
from types import SimpleNamespace
from typing import Any

from rig import SLOW, Engine, Engines, Meta, time_us


class Layers(Engines):
    """The cache is in host memory, so that loads come whole whatever it is trusted with."""

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
