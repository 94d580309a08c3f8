"""Loads that come layer by layer, as vLLM's own code around an attention layer drives them. Needs vLLM's classes; no engine and no GPU: what is looked at is who is called when."""

from __future__ import annotations

import ctypes
import tempfile
import unittest
import unittest.mock
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.attention import kv_transfer_utils

from kvd_vllm import _kvd, compat, connector, options
from rig import PAGE, common_config, worker_config

NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(12)]


class Around(unittest.TestCase):
    """kv_transfer_utils.maybe_transfer_kv_layer, which is around the attention of every layer."""

    def setUp(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.asks = False
        self.connector = SimpleNamespace(
            has_connector_metadata=lambda: self.asks,
            wait_for_layer_load=lambda name: self.calls.append(("wait", name)),
            save_kv_layer=lambda name, cache, metadata: self.calls.append(("save", name)),
        )

        def attention(query: Any, layer_name: str) -> None:
            self.calls.append(("attention", layer_name))

        self.attention = kv_transfer_utils.maybe_transfer_kv_layer(attention)
        for name, value in (("has_kv_transfer_group", True), ("is_v1_kv_transfer_group", True), ("get_kv_transfer_group", self.connector)):
            patch = unittest.mock.patch.object(kv_transfer_utils, name, lambda value=value: value)
            patch.start()
            self.addCleanup(patch.stop)

    def run_layer(self, name: str) -> list[str]:
        self.calls.clear()
        context = ForwardContext({name: SimpleNamespace(kv_cache=None)}, {name: object()}, {}, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
        with override_forward_context(context):
            self.attention(None, name)
        self.assertTrue(all(of == name for _, of in self.calls))
        return [call for call, _ in self.calls]

    def test_a_layer_is_waited_for_before_its_attention(self) -> None:
        self.asks = True
        self.assertEqual(self.run_layer(NAMES[3]), ["wait", "attention", "save"])

    def test_nothing_is_called_in_a_step_that_does_not_ask(self) -> None:
        self.assertEqual(self.run_layer(NAMES[3]), ["attention"])


def ways_of(ways: Iterable[str]) -> compat.LoadWays:
    return compat.LoadWays(frozenset(ways), "", False)


class Which(unittest.TestCase):
    """What the connector tells the module."""

    def layers(self, given: dict[str, Any] | None = None, groups: int = 1, device: str = "cuda", ways: Iterable[str] = compat.WAYS, **config: Any) -> Any:
        half = connector.KvdConnector.__new__(connector.KvdConnector)
        half._compat = compat.probe()
        half._options = options.parse(given or {})[0]
        half._ways = ways_of(ways)
        half._space = SimpleNamespace(device=device, groups=[SimpleNamespace(layers=tuple(NAMES)) for _ in range(groups)])
        half._vllm_config = SimpleNamespace(**{"speculative_config": None, "parallel_config": SimpleNamespace(use_ubatching=False), **config})
        return half._layers()

    def test_layers_are_numbered_as_the_cache_is(self) -> None:
        names, modes = self.layers()
        self.assertEqual(list(names.items()), [(name, i) for i, name in enumerate(NAMES)])
        self.assertEqual(modes, (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE))

    def test_where_layers_may_be_read_otherwise_loads_come_whole(self) -> None:
        self.assertIsNone(self.layers({"layers": False}))
        self.assertIsNone(self.layers(groups=2))
        self.assertIsNone(self.layers(ways=("sync",)))
        self.assertIsNone(self.layers(device="cpu"))
        self.assertIsNone(self.layers(speculative_config=object()))
        self.assertIsNone(self.layers(parallel_config=SimpleNamespace(use_ubatching=True)))

    def test_a_full_graph_is_none_of_its_modes(self) -> None:
        self.assertNotIn(CUDAGraphMode.FULL, self.layers()[1])


class Early(unittest.TestCase):
    """Whether loads may begin when their step is planned, as far as the configuration says."""

    def prefetches(self, given: dict[str, Any] | None = None, known: bool = True, device: str = "cuda", ranks: int = 1, ways: Iterable[str] = compat.WAYS) -> bool:
        half = connector.KvdConnector.__new__(connector.KvdConnector)
        half._compat = {"known_steps": known}
        half._options = options.parse(given or {})[0]
        half._ways = ways_of(ways)
        half._space = SimpleNamespace(device=device, world=1)
        half._vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks))
        return half._prefetches()

    def test_one_rank_on_a_gpu_with_steps_that_are_known(self) -> None:
        self.assertTrue(self.prefetches())
        self.assertFalse(self.prefetches({"prefetch": False}))
        self.assertFalse(self.prefetches(known=False))
        self.assertFalse(self.prefetches(device="cpu"))
        self.assertFalse(self.prefetches(ranks=2))
        self.assertFalse(self.prefetches(ways=("sync",)))

    def test_this_engines_steps_are_known(self) -> None:
        self.assertTrue(compat.probe()["known_steps"])


class Steps(unittest.TestCase):
    """The module with a real forward context; the cache is in host memory."""

    def worker(self, socket: str) -> Any:
        memory = [ctypes.create_string_buffer(4 * PAGE) for _ in NAMES]
        self.addCleanup(memory.clear)
        layers = {name: i for i, name in enumerate(NAMES)}, compat.probe()["eager_modes"]
        return _kvd.Worker(worker_config(common_config(socket, "layers", self, len(NAMES)), memory, layers=layers))

    def error(self, hook: str, error: BaseException) -> None:
        raise AssertionError(f"{hook}: {error!r}")

    def test_a_step_is_known_by_its_forward_context(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            worker = self.worker(folder + "/nobody.sock")

            def asked(mode: Any, metadata: Any) -> bool:
                worker.begin_step(SimpleNamespace(message=b""))
                worker.run_sync_loads(ForwardContext({}, metadata, {}, cudagraph_runtime_mode=mode), scheduler_output=None)
                answer = worker.wants_layers()
                worker.end_step()
                return answer

            metadata: dict[str, Any] = {name: object() for name in NAMES}
            self.assertTrue(asked(CUDAGraphMode.PIECEWISE, metadata))
            self.assertTrue(asked(CUDAGraphMode.NONE, metadata))
            self.assertFalse(asked(CUDAGraphMode.FULL, metadata))
            self.assertFalse(asked(CUDAGraphMode.NONE, None), "as around a graph of the whole step, and without a forward")
            self.assertFalse(asked(CUDAGraphMode.NONE, [metadata, metadata]))
            worker.close()


if __name__ == "__main__":
    unittest.main()
