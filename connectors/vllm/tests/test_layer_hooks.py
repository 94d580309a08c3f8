"""In which steps the engine is asked to name its layers, and that asking and answering cost next to nothing. As test_hooks.py, whose engine it drives."""

from __future__ import annotations

import os
import tempfile
import unittest
from types import SimpleNamespace
from typing import Any

import test_hooks
from test_hooks import Engine, Meta


class Layers(unittest.TestCase):
    """The cache is in host memory, so that loads come whole whatever it is trusted with."""

    NONE, PIECEWISE, FULL = object(), object(), object()
    NAMES = {"model.layers.0.attn": 0, "model.layers.1.attn": 1}

    def setUp(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.stream = 7
        self.engine = Engine(self.folder.name + "/nobody.sock", "layers", layers=(self.NAMES, (self.NONE, self.PIECEWISE)), stream_of=lambda device: self.stream)

    def tearDown(self) -> None:
        self.assertEqual(self.engine.breaker.errors, [])
        self.engine.close()
        self.folder.cleanup()

    def step(self, mode: Any, names: Any = NAMES, end: bool = True, **context: Any) -> bool:
        """Whether the step asked for its layers' names."""
        worker, meta = self.engine.worker, Meta(b"")
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
        worker = self.engine.worker
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
        self.assertIsNone(self.engine.worker.await_layer("model.layers.0.attn"))
        self.stream = 7
        self.engine.worker.end_step()
        self.assertEqual([hook for hook, _ in self.engine.breaker.errors], ["wait_for_layer_load"])
        self.engine.breaker.errors.clear()

    def test_wrong_layers_are_refused(self) -> None:
        for broken in (3, ({}, ()), ([], ()), ({"a": 0}, [])):
            with self.assertRaises((TypeError, ValueError)):
                Engine(self.folder.name + "/nobody.sock", "broken", layers=broken)

    def test_asking_and_answering_cost_little(self) -> None:
        worker = self.engine.worker
        self.step(self.NONE)
        worker.begin_step(Meta(b""))
        asks = min(test_hooks.Cost.timed(lambda: [worker.wants_layers() for _ in range(1000)]) for _ in range(50))
        layer = min(test_hooks.Cost.timed(lambda: [worker.await_layer("model.layers.0.attn") for _ in range(1000)]) for _ in range(50))
        print(f"has_connector_metadata {asks:.0f} ns, wait_for_layer_load with nothing to wait for {layer:.0f} ns")
        factor = 20 if "LD_PRELOAD" in os.environ else 1
        self.assertLess(asks + layer, 1000 * factor)


if __name__ == "__main__":
    unittest.main()
